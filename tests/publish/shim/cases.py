"""What the tests of the shim share: checkpoints with what they must compute, and fresh processes that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.harness.heads import outputs
from tests.harness.process import ROOT, python

Batch = dict[str, torch.Tensor]


def save(model: Any, batch: Batch, folder: Path, auto: str, trust: bool | None = True, **arguments: Any) -> Path:
    """A checkpoint, and what a fresh process must compute from it. Returns the folder of the checkpoint."""
    expect(model, batch, folder, {"auto": auto, "arguments": trusting(trust), "save": arguments})
    model.save_pretrained(folder / "model", **arguments)
    return folder / "model"


def expect(model: Any, batch: Batch, folder: Path, case: dict[str, Any]) -> None:
    """Write down what a fresh process must compute."""
    folder.mkdir(parents=True)
    wanted = {f"out.{place}": tensor.clone().contiguous() for place, tensor in enumerate(outputs(model, batch))}
    save_file({**wanted, **{f"in.{key}": value for key, value in batch.items()}}, folder / "expected.safetensors")
    (folder / "case.json").write_text(json.dumps(case))


def trusting(trust: bool | None) -> dict[str, bool]:
    return {} if trust is None else {"trust_remote_code": trust}


def fresh_processes(folder: Path, package: Path = ROOT) -> dict[str, str]:
    """By case, "ok" or the error of a process that has not imported the package, which lies in `package`."""
    done = python("-m", "tests.publish.shim.child", folder, package)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
