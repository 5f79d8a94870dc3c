"""What `import hf_attn_swap` gives, with and without the extra `train`."""

from __future__ import annotations

import pytest

import hf_attn_swap
from hf_attn_swap.conversion.convert import convert
from hf_attn_swap.conversion.quantize import quantize
from hf_attn_swap.conversion.sensitivity import layer_sensitivity
from hf_attn_swap.text.typed import install
from tests.harness.process import python


def without_peft(code: str) -> str:
    """What a new process prints that cannot import PEFT."""
    return python("-c", f"import sys; sys.modules['peft'] = None\n{code}").stdout.strip()


def test_names_that_are_imported_late() -> None:
    assert hf_attn_swap.convert is convert
    assert hf_attn_swap.quantize is quantize
    assert hf_attn_swap.layer_sensitivity is layer_sensitivity
    with pytest.raises(AttributeError, match="no attribute 'converted'"):
        _ = hf_attn_swap.converted


def test_a_star_import_needs_no_extra() -> None:
    assert without_peft("from hf_attn_swap import *; print(patch_model.__name__)") == "patch_model"


def test_a_missing_extra_is_named() -> None:
    told = without_peft("try:\n    from hf_attn_swap import convert\nexcept ImportError as error:\n    print(error)")
    assert told == f"convert needs peft: {install('train')}"
