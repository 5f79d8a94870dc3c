"""All figures of a GPU by one command, the most valuable first.

    python -m benchmarks.gpu --out FOLDER --minutes 9

It needs a checkout, torch and transformers, and neither an installation nor a network. Stages, each with its share of
the time:

    right     every variant on six families, forward, gradients and decoding, against its readable form in fp64
    layers    attention layers with the sizes of LLaMA-8B and operators alone, 1k to 32k tokens, beside stock
    models    a model of three billion random weights: prefill, decoding, a LoRA step, and some steps of `convert`
    integers  8-bit integers beside bf16

Every figure is written as soon as it is there: a line of FOLDER/figures.jsonl and a row of FOLDER/table.md.
FOLDER/machine.json says on what. The same command with the same folder goes on where an earlier one ended. The exit
status is 1 if a cell failed or is wrong. `--dry` runs tiny sizes of everything on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .record import Record, is_bad, supervise

SHARES = {"right": 0.28, "layers": 0.62, "models": 0.94, "integers": 1.0}  # the time at which each stage must end
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setup:
    """Where the cells run, and whether on tiny sizes."""

    device: str
    dry: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the figures")
    parser.add_argument("--minutes", type=float, default=9, help="the whole command ends within so many minutes")
    parser.add_argument("--stages", default=",".join(SHARES), help="some of the stages, in this order")
    parser.add_argument("--only", default="", help="only cells with these words in their name")
    parser.add_argument("--commit", default="", help="the commit, where the checkout has no git to ask")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--start", type=float, default=0.0, help=argparse.SUPPRESS)  # of a process for cells
    options = parser.parse_args(arguments)
    start = options.start or time.time()
    until = start + 60 * options.minutes
    if options.start or options.dry:
        run(options, start, until)
    if options.start:
        return 0
    if not options.dry:
        given = sys.argv[1:] if arguments is None else list(arguments)
        status = supervise([sys.executable, "-m", "benchmarks.gpu", *given, f"--start={start}"], options.out, until)
        if status:
            return status
    rows = Record(options.out).rows
    bad = [row for row in rows if is_bad(row)]
    for row in bad:
        print(f"FAILED: {row['stage']}: {row['cell']}: {row.get('error', 'not right')}")
    print(f"{len(rows)} rows in {options.out}, {len(bad)} of them failed or wrong.")
    return 1 if bad else 0


def run(options: argparse.Namespace, start: float, until: float) -> None:
    """Run the cells that have no row yet, as far as the time suffices."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # fp32 is fp32, in the convolution of images too
    import torch

    from . import layers, models, right

    if not options.dry and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device here; --dry runs tiny sizes on the CPU.")
    stages = {"right": right.cells, "layers": layers.cells, "models": models.cells, "integers": models.integers}
    record, setup = Record(options.out), Setup("cpu" if options.dry else "cuda", options.dry)
    (options.out / "machine.json").write_text(json.dumps(machine(options), indent=2) + "\n", encoding="utf-8")
    for stage in options.stages.split(","):
        end, left = start + (until - start) * SHARES[stage], 0
        for cell in stages[stage](setup):
            if (stage, cell.name) in record.done or options.only not in cell.name:
                continue
            if time.time() + (0 if options.dry else cell.seconds) > end:
                left += 1
            else:
                record.run(stage, cell)
        if left:
            record.write(stage, f"{left} more cells", left_out="no time left")


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    facts: dict[str, Any] = {"dry": options.dry, "minutes": options.minutes, "python": platform.python_version()}
    facts |= {"system": platform.platform(), "cpus": os.cpu_count(), "commit": options.commit or commit()}
    for name in ("torch", "transformers", "triton", "peft", "accelerate", "flash-linear-attention"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    facts |= {name: value for name, value in os.environ.items() if name.startswith(("TORCH_CUDNN", "PYTORCH_"))}
    if options.dry:
        return facts
    card = torch.cuda.get_device_properties(0)
    facts |= {
        "card": card.name,
        "memory_gb": round(card.total_memory / 1e9, 1),
        "compute": f"{card.major}.{card.minor}",
    }
    facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return facts | {"driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")}


def commit() -> str | None:
    """The commit of this checkout, with "dirty" if files differ from it; None without git."""
    return said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")


def said(*command: str) -> str | None:
    """What a program prints; None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
