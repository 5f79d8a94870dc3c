"""Records a model with and without its swap on the same rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..describe import describe
from ..layer.registry import parse, parse_options
from ..measuring.lost import lost
from ..patch import need_installation, patch_model, set_strength
from ..text.bar import bar
from ..wiring.install import installation_of
from .inputs import Inputs
from .record import record
from .recording import Recording
from .report import Report

BEFORE = "unswapped"


def compare(
    model: PreTrainedModel,
    inputs: Inputs,
    data: str,
    variant: str | None = None,
    *,
    stock: PreTrainedModel | None = None,
    **options: Any,
) -> Report:
    """Record a model without and with its swap.

    A stock model is recorded, swapped, and recorded again. A swapped model is recorded at strength 0, and as it is.

    Args:
        model: changed in place: a stock model stays swapped afterwards.
        inputs: the rows.
        data: name of the data set, for the report.
        variant: the variant for a stock model; None for a swapped model.
        stock: the model from before the swap, for what was lost. None takes the swapped model at strength 0, which is
            the same model as long as no weight was trained.
        options: options of the variant.

    Raises:
        ValueError: the model is stock and no variant is named, the model is swapped and a variant is named, or an
            activation is not finite.
    """
    swapped = installation_of(model) is not None
    if swapped and variant is not None:
        raise ValueError("this model is swapped already; leave the variant out.")
    if not swapped and variant is None:
        raise ValueError("this model is not swapped; name a variant (`--variant` in a shell).")
    if variant is not None:
        parse_options(parse(variant), options)  # checked before the recording, which takes a while
    recorded, sentences = _both(model.eval(), inputs, variant, options)
    label = list(recorded)[-1]
    if stock is None and (
        BEFORE not in recorded or any(layer.swap.retrained for layer in need_installation(model).layers())
    ):
        cost = None
        sentences.append(
            "What was lost is not told: the weights are no longer the stock model's; name the stock model (`stock=`, "
            "or `--base` in a shell)."
        )
    else:
        cost = lost(model, bar(inputs.batches, desc="what was lost", unit="batch"), stock=stock)
        if stock is None and swapped:
            sentences.append(
                "What was lost is told against the same weights; name the stock model "
                "(`stock=`, or `--base` in a shell) if they were trained."
            )
    if inputs.rows == 1:
        sentences.append("A single row: its figures have no spread, and another row may look different.")
    return Report(
        title=f"{label} in {type(model).__name__}",
        lost=cost,
        data=data,
        description=describe(model),
        recordings=recorded,
        inputs=inputs,
        notes=tuple(sentences),
    )


def _both(
    model: PreTrainedModel, inputs: Inputs, variant: str | None, options: dict[str, Any]
) -> tuple[dict[str, Recording], list[str]]:
    """Recordings by label, the unswapped model first; and notes for the reader."""
    recorded: dict[str, Recording] = {}
    notes: list[str] = []
    if variant is not None:
        recorded[BEFORE] = _run(model, inputs, BEFORE)
        patch_model(model, variant, **options)
    elif any(layer.swap.retrained for layer in need_installation(model).layers()):
        notes.append("A conversion changed the weights, so the unswapped model cannot be shown beside.")
    else:
        with need_installation(model).strengths_kept():
            set_strength(model, 0.0)
            recorded[BEFORE] = _run(model, inputs, BEFORE)
        notes.append(f"“{BEFORE}” is the same checkpoint at strength 0: its weights as they are, ordinary attention.")
    label = "+".join(dict.fromkeys(name for layer in need_installation(model).layers() for name in layer.swap.names))
    recorded[label] = _run(model, inputs, label)
    return recorded, notes


@torch.no_grad()
def _run(model: PreTrainedModel, inputs: Inputs, label: str) -> Recording:
    with record(model, sink_ids=inputs.sink_ids) as recording:
        for batch in bar(inputs.batches, desc=f"record {label}", unit="batch"):
            model(**batch)
    return recording
