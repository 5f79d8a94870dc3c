"""Writes the demo's best model as a `results.json`, so that the model can be pushed with a card."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
import transformers

from .. import __version__
from ..publish.results import BaseModel, Budget, Cost, DataSet, Measured, Metric, RunResult, applied_swaps
from .data import Sentences
from .options import CONTROL, DemoOptions
from .report import Row

AUTO_CLASS = "AutoModelForSequenceClassification"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
LIMITS = (
    "One seed, one small training set and one learning rate: another seed would change the difference to the control.",
    "It was kept as the best of the demo's converted models on the same test sentences, which flatters it a little.",
    "Trained on short film reviews only.",
)
ROTTEN_TOMATOES = "cornell-movie-review-data/rotten_tomatoes"


def demo_result(
    options: DemoOptions, rows: Sequence[Row], sentences: Sentences, model: transformers.PreTrainedModel, seconds: float
) -> RunResult:
    """The record of the best converted model, beside the control that was trained the same way.

    Raises:
        ValueError: the model or the data set is a folder, and so has no name on the Hub for the record.
    """
    modules, swaps = applied_swaps(model)
    row = next(row for row in rows if row.variant == swaps[0].variant)
    control = next(row for row in rows if row.variant == CONTROL)
    variant = row.variant.replace("+", "-").replace("_", "-")
    return RunResult(
        name=f"minilm-rotten-tomatoes-{variant}" if options.model is None else f"demo-{variant}",
        base=BaseModel(name=options.model or MINILM, revision=None, relation="finetune", auto_class=AUTO_CLASS),
        modules=modules,
        swaps=swaps,
        parameters_added=row.parameters_added,
        conversion=(
            f"Patched at strength {0 if options.ramp else 1}.",
            f"Fine-tuned for one pass; strength rose to 1 in the first {100 * options.ramp:.0f} % of the steps.",
        ),
        task="text-classification",
        data=DataSet(
            name=options.dataset or ROTTEN_TOMATOES,
            config=None,
            revision=None,
            rows={"train": len(sentences.train), "test": len(sentences.test)},
            evaluated="test",
        ),
        converted=_measured(row, options),
        control=_measured(control, options),
        difference=None,
        cost=Cost(ratio=row.time_ratio, of="forward and backward of one held-out batch, models taking turns"),
        budget=Budget(
            steps=-(-len(sentences.train) // options.batch_size),
            batch_size=options.batch_size,
            sequence_length=options.max_length,
            learning_rate=options.learning_rate,
            optimizer="AdamW, linear schedule with 10 % warm-up",
        ),
        wall_seconds=seconds,
        versions=_versions(),
        hardware=f"{model.device.type}, {platform.machine()}, {torch.get_num_threads()} threads",
        intended_use="Shows a conversion end to end; a sentiment classifier of short English film reviews.",
        limits=LIMITS,
        license="apache-2.0",
        language=("en",),
    )


def _versions() -> dict[str, str]:
    torch_version = torch.__version__.partition("+")[0]
    return {"hf_attn_swap": __version__, "torch": torch_version, "transformers": transformers.__version__}


def _measured(row: Row, options: DemoOptions) -> Measured:
    return Measured(
        seeds=(options.seed,),
        metrics=(Metric(name="accuracy", higher_is_better=True, values=(row.accuracy,)),),
        outliers=(
            Metric(name="kurtosis", higher_is_better=False, values=(row.kurtosis,)),
            Metric(name="max_inf_norm", higher_is_better=False, values=(row.max_inf_norm,)),
        ),
        wall_seconds=row.train_seconds,
    )
