"""Records a model with and without its swap on the same rows.

Axes: H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..conversion import calibrate
from ..describe import describe
from ..layer.registry import parse, parse_options
from ..measuring.batches import Batch
from ..measuring.instrumented import instrumented
from ..measuring.lost import lost
from ..patch import need_installation, patch_model, set_strength
from ..text.bar import bar
from ..wiring.install import installation_of
from .inputs import Inputs
from .record import record
from .recording import Recording
from .report import Report

BEFORE = "unswapped"
Maps = list[np.ndarray]


def compare(
    model: PreTrainedModel,
    inputs: Inputs,
    data: str,
    variant: str | None = None,
    *,
    fit: str | None = None,
    stock: PreTrainedModel | None = None,
    notes: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Record a model without and with its swap.

    A stock model is recorded, swapped, and recorded again. A swapped model is recorded at strength 0, and as it is.

    Args:
        model: changed in place: a stock model stays swapped afterwards.
        inputs: the rows and the sample.
        data: name of the data set, for the report.
        variant: the variant for a stock model; None for a swapped model.
        fit: "gain" or "map" calibrates on the rows before the second recording.
        stock: the model from before the swap, for what was lost. None takes the swapped model at strength 0, which is
            the same model as long as no weight was trained.
        notes: more sentences that a reader of the report should know.
        options: options of the variant.

    Raises:
        ValueError: the model is stock and no variant is named, the model is swapped and a variant is named, or an
            activation is not finite.
    """
    swapped = installation_of(model) is not None
    if swapped and (variant is not None or fit is not None):
        raise ValueError("this model is swapped already; leave the variant and the calibration out.")
    if not swapped and variant is None:
        raise ValueError("this model is not swapped; name a variant to compare it with.")
    if variant is not None:
        parse_options(parse(variant), options)  # checked before the recording, which takes a while
    recorded, more_notes = _both(model.eval(), inputs, variant, fit, options)
    sentences = [*notes, *more_notes]
    label = list(recorded)[-1]
    if stock is None and (
        BEFORE not in recorded or any(layer.swap.retrained for layer in need_installation(model).layers())
    ):
        cost = None
        sentences.append(
            "What was lost is not told: the weights are no longer the stock model's; name the stock model."
        )
    else:
        cost = lost(model, bar(inputs.batches, desc="what was lost", unit="batch"), stock=stock)
        if stock is None and swapped:
            sentences.append(
                "What was lost is told against the same weights; name the stock model if they were trained."
            )
    if inputs.rows == 1:
        sentences.append("A single row: its figures have no spread, and another row may look different.")
    maps = {name: maps for name, (_, maps) in recorded.items() if maps}
    if not maps:
        sentences.append("This architecture does not hand out attention weights, so there are no maps.")
    return Report(
        title=f"{label} in {type(model).__name__}",
        lost=cost,
        data=data,
        description=describe(model),
        recordings={name: recording for name, (recording, _) in recorded.items()},
        maps=maps,
        inputs=inputs,
        notes=tuple(sentences),
    )


def _both(
    model: PreTrainedModel, inputs: Inputs, variant: str | None, fit: str | None, options: dict[str, Any]
) -> tuple[dict[str, tuple[Recording, Maps]], list[str]]:
    """Recordings and maps by label, the unswapped model first; and notes for the reader."""
    recorded: dict[str, tuple[Recording, Maps]] = {}
    notes: list[str] = []
    if variant is not None:
        recorded[BEFORE] = _run(model, inputs, BEFORE)
        patch_model(model, variant, **options)
        if fit is not None:
            notes.append(f"Calibrated on the same rows: {calibrate(model, inputs.batches, fit=fit).summary()}")
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
def _run(model: PreTrainedModel, inputs: Inputs, label: str) -> tuple[Recording, Maps]:
    with record(model, sink_ids=inputs.sink_ids) as recording:
        for batch in bar(inputs.batches, desc=f"record {label}", unit="batch"):
            model(**batch)
    return recording, _maps(model, inputs.sample, inputs.image is not None)


def _maps(model: PreTrainedModel, sample: Batch, image: bool) -> Maps:
    """The attention of one row in each layer, as a mean over heads (Q,K).

    For an image: the attention of its first token to the patches, (rows,columns).
    """
    with instrumented(model) as root:
        try:
            outputs = root(**sample, output_attentions=True)
        except ValueError:  # the model ran the batches before, so it only cannot return attention weights
            return []
    layers = outputs.get("attentions") or outputs.get("encoder_attentions") or ()
    maps = [weights[0].float().mean(0).cpu().numpy() for weights in layers if weights is not None]
    if not image:
        return maps
    side = int((maps[0].shape[1] - 1) ** 0.5) if maps else 0
    if any(weights.shape[1] != side * side + 1 for weights in maps):
        return []  # the tokens are not a class token and a square of patches
    return [weights[0, 1:].reshape(side, side) for weights in maps]
