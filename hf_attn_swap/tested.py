"""States the versions that this release was tested with. A newer transformers is told once, and never refused.

tests/test_release.py compares the numbers with constraints.txt, pyproject.toml and the Makefile.
"""

from __future__ import annotations

import functools
import logging

import transformers
from packaging.version import Version

LOGGER = logging.getLogger("hf_attn_swap")
OLDEST_TRANSFORMERS = "5.10.1"
NEWEST_TRANSFORMERS = "5.24.0"
TESTED_PYTHONS = ("3.10", "3.12", "3.13")
# The newest tested version of each package that `doctor` shows.
TESTED = {
    "transformers": NEWEST_TRANSFORMERS,
    "torch": "2.13.0",
    "huggingface-hub": "2.4.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "sentence-transformers": "6.2.0",
    "trl": "1.16.0",
    "lm-eval": "0.4.13",
    "compressed-tensors": "0.20.0",
    "bitsandbytes": "0.50.2",
}


def is_newer(installed: str, tested: str) -> bool:
    """True if the installed version comes after the tested one. A local part such as "+cpu" does not count."""
    return Version(Version(installed).public) > Version(tested)


@functools.cache
def tell_if_newer() -> None:
    """Log one line if the installed transformers is newer than all that were tested: once per process."""
    if is_newer(transformers.__version__, NEWEST_TRANSFORMERS):
        LOGGER.warning(
            "transformers %s is newer than %s, the newest version that this release of hf_attn_swap was tested with; "
            "`hf-attn-swap doctor` checks it here in about a minute.",
            transformers.__version__,
            NEWEST_TRANSFORMERS,
        )
