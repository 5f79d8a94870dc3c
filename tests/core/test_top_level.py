"""What `import hf_attn_swap` gives, with and without the extra `train`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_attn_swap
from hf_attn_swap.conversion.convert import convert
from hf_attn_swap.conversion.sensitivity import layer_sensitivity


def python(code: str) -> str:
    """What a new process prints that cannot import PEFT."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['peft'] = None\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_names_that_are_imported_late() -> None:
    assert hf_attn_swap.convert is convert
    assert hf_attn_swap.layer_sensitivity is layer_sensitivity
    with pytest.raises(AttributeError, match="no attribute 'converted'"):
        _ = hf_attn_swap.converted


def test_a_star_import_needs_no_extra() -> None:
    assert python("from hf_attn_swap import *; print(patch_model.__name__)") == "patch_model"


def test_a_missing_extra_is_named() -> None:
    told = python("try:\n    from hf_attn_swap import convert\nexcept ImportError as error:\n    print(error)")
    assert told == 'convert needs peft: pip install "hf-attn-swap[train]"'
