"""Run in a fresh process: load every checkpoint of a folder by plain `from_pretrained`, compare, save again, compare.

Usage: python -m tests.lifecycle.reload_child FOLDER. It prints one line per checkpoint that passed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import hf_attn_swap  # noqa: F401  # all that a user has to import


def check(folder: Path) -> None:
    """One checkpoint: bit-equal outputs, and a second save that is byte for byte the first."""
    case = json.loads((folder / "case.json").read_text())
    model = getattr(transformers, case["auto"]).from_pretrained(folder / "model", dtype="auto")
    expected = load_file(folder / "expected.safetensors")
    batch = {key.removeprefix("in."): value for key, value in expected.items() if key.startswith("in.")}
    assert not model.training
    with torch.no_grad():
        got = model(**batch)[0]
    assert got.dtype == expected["out"].dtype, f"{folder}: {got.dtype}"
    assert torch.equal(got, expected["out"]), f"{folder}: off by {float((got - expected['out']).abs().max())}"
    model.save_pretrained(folder / "again", **case["save"])
    first, second = tensors(folder / "model"), tensors(folder / "again")
    assert first.keys() == second.keys()
    assert all(same(first[key], second[key]) for key in first), f"{folder}: weights"
    whole = ("config.json", "generation_config.json", "model.safetensors")  # shards may be cut in another place
    for name in whole:
        if (folder / "model" / name).exists():
            one, two = ((folder / part / name).read_bytes() for part in ("model", "again"))
            assert one == two, f"{folder}: {name}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, from one file or several."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {key: value for file in files for key, value in file.items()}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal dtype and bits."""
    return one.dtype == two.dtype and torch.equal(one, two)


if __name__ == "__main__":
    for case in sorted(Path(sys.argv[1]).iterdir()):
        check(case)
        print(case.name)
