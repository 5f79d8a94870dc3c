"""Loads checkpoints through the shim, each in a process that has never imported the package.

Usage: python -m tests.publish.shim.child FOLDER WHERE_THE_PACKAGE_IS. The libraries are imported once; then each
checkpoint gets a fork of this process. It prints one line of JSON per checkpoint: its name, and "ok" or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file


def load(folder: Path, case: dict[str, Any]) -> Any:
    """The model of a case, by a class of transformers, or by the class that finds an adapter's base."""
    auto = getattr(transformers, case["auto"])
    return auto.from_pretrained(folder / case.get("model", "model"), dtype="auto", **case.get("arguments", {}))


def check(folder: Path) -> str:
    """Load, compare the outputs bit for bit, save again, and compare the folders; the error if there is one."""
    assert "hf_attn_swap" not in sys.modules
    case = json.loads((folder / "case.json").read_text())
    try:
        model = load(folder, case)
    except Exception as problem:  # noqa: BLE001  # whatever it is, the parent wants to see it
        return f"{type(problem).__name__}: {problem}"
    from tests.lifecycle.steps import same_bits, tensors  # this imports the package

    expected = load_file(folder / "expected.safetensors")
    batch = {key.removeprefix("in."): value for key, value in expected.items() if key.startswith("in.")}
    with torch.no_grad():
        got = list(tensors(model(**batch, output_hidden_states=True)))
    wanted = [expected[f"out.{place}"] for place in range(len(expected) - len(batch))]
    assert len(got) == len(wanted) > 0
    assert all(same_bits(one, two) for one, two in zip(got, wanted, strict=True)), "the outputs differ"
    assert type(model).__module__.startswith("transformers.models."), type(model).__module__
    assert not hasattr(model.config, "auto_map")
    if "model" in case:
        return "ok"
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again, **case["save"])
        one, two = (content(where) for where in (folder / "model", Path(again)))
    assert one == two, "the second save is another one"
    return "ok"


def content(folder: Path) -> dict[str, Any]:
    """All files of a folder, but each tensor of weights in shards: the second save may cut them in another place."""
    shards = sorted(folder.glob("model-*.safetensors"))
    whole = [path for path in folder.iterdir() if path not in shards and not path.name.endswith(".index.json")]
    tensors = {key: value.tolist() for shard in shards for key, value in load_file(shard).items()}
    return {**{path.name: path.read_bytes() for path in whole}, **tensors}


def forked(folder: Path) -> None:
    """Check one checkpoint in a fork of this process."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        outcome = check(folder)
    except AssertionError as problem:
        outcome = f"AssertionError: {problem}"
    print(json.dumps([folder.name, outcome]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    sys.path.insert(0, sys.argv[2])
    for case in sorted(Path(sys.argv[1]).iterdir()):
        forked(case)
