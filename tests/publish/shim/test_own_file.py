"""The file of a user's own variant lies beside the weights, and the shim imports it for a program that trusts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.saved import shim
from tests.contract.harness import batch_of, fresh
from tests.harness.process import python

from .cases import fresh_processes, save

BOTH = "capped+damped"
TRUSTED = """
import sys
import pytest, torch
from transformers import AutoModelForCausalLM
from hf_attn_swap.variants.base import VARIANTS

def load(**arguments):
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], **arguments)

with pytest.raises(ValueError, match=r"capped\\.py .*trust_remote_code=True, or import that file"):
    load()
assert "capped" not in VARIANTS
sys.path.insert(0, sys.argv[2])
import capped
with pytest.raises(ValueError, match="damped.py"):
    load()
model = load(trust_remote_code=True)
assert VARIANTS["capped"] is capped.Capped
own = VARIANTS["damped"]
for arguments in ({}, {"trust_remote_code": True}):
    again = load(**arguments)
    assert VARIANTS["damped"] is own
    assert torch.equal(again(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)
VARIANTS["damped"] = VARIANTS["capped"]
for arguments in ({}, {"trust_remote_code": True}):
    with pytest.raises(ValueError, match="knows another variant 'damped'"):
        load(**arguments)
"""


def patched() -> Any:
    return patch_model(fresh("llama", torch.float32), BOTH)


@pytest.mark.slow  # tests/publish/test_push.py loads one such file from the Hub in a fresh process
@pytest.mark.skipif(sys.platform == "win32", reason="the fresh processes are forks")
def test_the_files_travel(own_files: Path, tmp_path: Path) -> None:
    folder = save(patched(), batch_of("llama", torch.float32), tmp_path / "cases" / "own", "AutoModelForCausalLM")
    for path in own_files.glob("*.py"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert fresh_processes(tmp_path / "cases") == {"own": "ok"}


def test_a_process_with_the_package(own_files: Path, tmp_path: Path) -> None:
    """The error names a missing file; a variant is registered once, and no other runs under its name."""
    patched().save_pretrained(tmp_path / "model")
    python("-c", TRUSTED, tmp_path / "model", own_files)


def test_another_text_of_the_file(own_files: Path, tmp_path: Path) -> None:
    patched().save_pretrained(tmp_path)
    path, config = own_files / "damped.py", json.loads((tmp_path / "config.json").read_text())
    text = path.read_bytes()
    path.write_bytes(text.replace(b"\n", b"\r\n"))
    AutoModelForCausalLM.from_pretrained(tmp_path)
    path.write_bytes(text.replace(b"fill_(0.5)", b"fill_(0.6)"))
    with pytest.raises(ValueError, match=r"knows another variant 'damped'.* delete 'files'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    del config["attn_swap"]["files"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("main", "it is defined in a notebook or in the program that runs"),
        ("import helper", r"damped\.py imports helper"),
        ("from .helper import x", r"damped\.py imports \.helper"),
        ("attn_swap.py", r"attn_swap\.py cannot be the name"),
        ("capped.py", r"capped\.py cannot be the name"),
        ("my-damped.py", r"my-damped\.py cannot be the name"),
    ],
)
def test_a_file_that_stays_behind(
    change: str, reason: str, own_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["damped"]
    if change == "main":
        monkeypatch.setattr(module.Damped, "__module__", "__main__")
    elif change.endswith(".py"):
        (tmp_path / "other").mkdir()
        shutil.copy(own_files / "damped.py", tmp_path / "other" / change)
        monkeypatch.setattr(module, "__file__", str(tmp_path / "other" / change))
    else:
        (own_files / "damped.py").write_text(change)
    with pytest.warns(UserWarning, match=f"'damped' is not saved with the model, because {reason}") as warned:
        patched().save_pretrained(tmp_path / "model")
    assert len(warned) == 1
    assert sorted(path.name for path in (tmp_path / "model").glob("*.py")) == ["attn_swap.py", "capped.py"]
    text = (tmp_path / "model" / "attn_swap.py").read_bytes()
    assert text.startswith(shim.SOURCE.read_bytes())
    assert b"capped" in text
    assert b"damped" not in text


@pytest.mark.usefixtures("own_files")
def test_an_installed_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loads the model installs it, as the package itself."""
    monkeypatch.setattr(sys.modules["damped"].Damped, "__module__", "packaging.version")
    patched().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["attn_swap.py", "capped.py"]
