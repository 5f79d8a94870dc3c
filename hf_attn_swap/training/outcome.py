"""The outcome of one run of one seed: settings, metrics, and every prediction, to compare two runs row by row."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..layer.registry import canonical_name
from ..publish.results import read

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One trained and measured model.

    Args:
        settings: every setting on which the metrics depend, as text. A folder holds runs of the same settings only.
        seed: the seed of the run.
        metrics: values by name.
        predictions, references: one number per held-out row: the predicted and the true class, or a loss and zero.
        swap: `config.attn_swap` of the model, as JSON.
        parameters_added: the number of parameters that the swap added.
        conversion: how the model was made, one sentence per step.
        steps: number of fine-tuning steps.
        rows: number of rows by split.
        wall_seconds: seconds of the whole run.
        hardware, versions: the machine, and the versions of packages.
        outliers: step, kurtosis and largest activation, where an `OutlierCallback` logged them.
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
    outliers: tuple[tuple[float, ...], ...] = ()

    def save(self, folder: Path) -> None:
        """Write the outcome into a folder. An interrupted write leaves no file of this name."""
        unfinished = folder / f"{OUTCOME_FILE}.part"
        unfinished.write_text(json.dumps(asdict(self), allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(folder / OUTCOME_FILE)

    @classmethod
    def find(cls, folder: Path, settings: dict[str, Any]) -> Outcome | None:
        """The outcome in a folder, or None if the run has not ended. The name of a variant may be an alias.

        Raises:
            ValueError: the folder holds a run of other settings.
        """
        path = folder / OUTCOME_FILE
        if not path.exists():
            return None
        outcome: Outcome = read(cls, json.loads(path.read_text(encoding="utf-8")))
        wanted = {key: str(value) for key, value in settings.items()}
        stored = dict(outcome.settings)
        if "variant" in stored:
            stored["variant"] = canonical_name(stored["variant"])
        for key in sorted(wanted.keys() | stored.keys()):
            if wanted.get(key) != stored.get(key):
                raise ValueError(
                    f"{folder} holds a run with {key} = {stored.get(key)}, not {wanted.get(key)}; choose another "
                    "--output_dir."
                )
        return outcome
