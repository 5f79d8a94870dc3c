"""Keeps what `make bench` found: one line of JSON per commit and machine, in a file per machine.

A line holds the commit, the date, the machine, the versions, the options and the ratios to stock with their 95 %
intervals. A second run of the same commit on the same machine with the same options replaces the line of the first.
A commit with "+" at its end stands for a working tree with changes that are not committed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_models import KINDS

ROOT = Path(__file__).parents[1]
NOT_MEASURED = ("out", "history", "child")  # options that say where results go
SAME = ("commit", "options", "torch", "transformers")  # lines that agree in these are runs of the same


def git(*words: str, root: Path = ROOT) -> str:
    """What git prints."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    """The commit of this tree, with "+" if files differ from it; "unknown" without git."""
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: str) -> str:
    """The name of the GPU, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def line(options: Any, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of one run."""
    wanted = ("model", "shape", "variant", *KINDS, *(f"{kind}_95" for kind in KINDS), "peak_mb")
    return {
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(options.device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": {name: value for name, value in asdict(options).items() if name not in NOT_MEASURED},
        "ratios": [{name: rounded(row[name]) for name in wanted if name in row} for row in rows],
    }


def keep(folder: str, options: Any, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the line of one run into the file of this machine, and return the file."""
    new = line(options, rows)
    file = Path(folder) / f"{re.sub(r'[^A-Za-z0-9]+', '-', new['machine']).strip('-').lower()}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        [json.loads(splitline) for splitline in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    )
    lines = [line for line in lines if any(line[name] != new[name] for name in SAME)]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in [*lines, new]), encoding="utf-8")
    return file


def rounded(value: Any) -> Any:
    """Numbers with four digits, also inside a list."""
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
