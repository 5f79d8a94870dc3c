"""What one run of one seed left behind: settings, figures, and every prediction, so that runs can be paired."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ..publish.results.record import Record, read_record

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """One trained and measured model.

    Args:
        settings: all that the figures depend on, as text; a folder holds one kind of run.
        metrics: by name.
        predictions, references: per held-out row: class numbers, or losses with zeros.
        modules, swap, parameters_added: what the model carries: `config.attn_swap` as JSON.
        conversion: how it was made, a sentence each.
        steps: of the fine-tuning.
        wall_seconds: of all of it.
        hardware, versions: what it ran on.
    """

    settings: dict[str, str]
    seed: int
    metrics: dict[str, float]
    predictions: tuple[float, ...]
    references: tuple[float, ...]
    swap: str
    parameters_added: int
    conversion: tuple[str, ...]
    steps: int
    rows: dict[str, int]
    wall_seconds: float
    hardware: str
    versions: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        part = folder / f"{OUTCOME_FILE}.part"
        part.write_text(json.dumps(asdict(self), allow_nan=False) + "\n", encoding="utf-8")
        part.replace(folder / OUTCOME_FILE)

    @classmethod
    def find(cls, folder: Path, settings: dict[str, Any]) -> Outcome | None:
        """The outcome in a folder, None if the run has not ended.

        Raises:
            ValueError: it is of other settings.
        """
        path = folder / OUTCOME_FILE
        if not path.exists():
            return None
        outcome = read_record(cls, json.loads(path.read_text(encoding="utf-8")), "")
        wanted = {key: str(value) for key, value in settings.items()}
        for key in sorted(wanted.keys() | outcome.settings.keys()):
            if wanted.get(key) != outcome.settings.get(key):
                raise ValueError(
                    f"{folder} holds a run with {key} = {outcome.settings.get(key)}, not {wanted.get(key)}; choose "
                    "another --output_dir."
                )
        return outcome


def hardware(args: TrainingArguments) -> str:
    """Number and name of the devices."""
    device = args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return f"{args.world_size} x {name}, {torch.get_num_threads()} threads each"
