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


def is_newer(installed: str, tested: str) -> bool:
    """True if the installed version comes after the tested one. A local part such as "+cpu" does not count."""
    return Version(Version(installed).public) > Version(tested)


@functools.cache
def tell_if_newer() -> None:
    """Log one line if the installed transformers is newer than all that were tested: once per process."""
    if is_newer(transformers.__version__, NEWEST_TRANSFORMERS):
        LOGGER.warning(
            "transformers %s is newer than %s, the newest version that this release of hf_attn_swap was tested with; "
            "`hf-attn-swap doctor` checks it here in half a minute.",
            transformers.__version__,
            NEWEST_TRANSFORMERS,
        )
