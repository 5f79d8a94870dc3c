"""The stages of a conversion by one call: as the user names them, or chosen by the kind and size of the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..layer.registry import parse
from ..measuring.lm_head import names_head
from ..measuring.lost import predicts_next
from .stages import KINDS, Calibrate, Distil, FineTune, Stage

SMALL = 60_000_000  # an encoder with fewer parameters trains its weights, a larger one trains adapters
MIDDLE = 500_000_000  # the same for a language model that becomes linear: 24 bytes per parameter while it trains
RANK = 16  # of the adapters of an encoder
HALF = (
    "the weights are in {dtype}, so adapters train; load the model in float32 to train all weights, which loses less "
    "when a language model becomes linear."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is converted.

    Attributes:
        calibrate: the fit; None tries several and takes the best.
        distil: the distillations, in order. The last takes what is left of the budget.
        others: stages of kinds that were added by `stage_kind`; the step of each looks for its own.
    """

    calibrate: Calibrate | None
    distil: tuple[Distil, ...]
    others: tuple[Any, ...] = ()

    @property
    def last(self) -> Distil:
        """The distillation that takes what is left of the budget."""
        return self.distil[-1]

    @property
    def stages(self) -> tuple[Any, ...]:
        """All stages that the plan names."""
        return (*self.others, *(() if self.calibrate is None else (self.calibrate,)), *self.distil)


def plan_of(
    root: PreTrainedModel, variant: str, stages: Sequence[Stage] | None = None, *, low_memory: bool = False
) -> Plan:
    """Check the stages that a user names, or choose them for this model and variant.

    Raises:
        ValueError: a stage is of another kind, or in another place, than a conversion by one call can take.
    """
    if stages is None:
        return Plan(calibrate=None, distil=(default_distil(root, variant, low_memory=low_memory),))
    own = (Calibrate, Distil, FineTune)
    others = tuple(stage for stage in stages if isinstance(stage, tuple(KINDS.values())) and not isinstance(stage, own))
    stages = [stage for stage in stages if stage not in others]
    calibrate = stages[0] if stages and isinstance(stages[0], Calibrate) else None
    distil = tuple(stage for stage in stages if isinstance(stage, Distil))
    if any(isinstance(stage, FineTune) for stage in stages):
        raise ValueError("convert reads no labels; fine-tune the model before, or after with a Trainer of your own.")
    if len(distil) + (calibrate is not None) != len(stages):
        raise ValueError("stages are one Calibrate at most, which comes first, and then Distil stages.")
    if not distil:
        raise ValueError("stages need a Distil; for a fit without a training, call patch_model and calibrate.")
    if len({(stage.rank, stage.trainable) for stage in distil}) > 1:
        raise ValueError("all Distil stages train the same weights: give them the same rank and trainable.")
    if any(stage.tokens is None for stage in distil[:-1]) or distil[-1].tokens is not None:
        raise ValueError("every Distil but the last needs its tokens; the last takes what is left of convert's tokens.")
    if any(stage.epochs != Distil.epochs for stage in distil):
        raise ValueError("convert counts tokens, not epochs: give Distil its tokens, or convert more tokens.")
    if low_memory and distil[-1].rank is None:
        raise ValueError("low_memory trains adapters; give the Distil stages a rank, such as 16.")
    return Plan(calibrate=calibrate, distil=distil, others=others)


def default_distil(root: PreTrainedModel, variant: str, *, low_memory: bool = False) -> Distil:
    """How a model of this kind and size is distilled to a variant.

    Weights in half precision do not train: small steps would be lost in rounding. Adapters train then, and where memory
    is short.

    Measured on SmolLM2, ViT-S and MiniLM; docs/mathematics.md, section Conversion.
    """
    whole = root.dtype == torch.float32
    size = root.num_parameters()
    if predicts_next(root):
        linear = any(cls.replaces for cls in parse(variant))
        if linear and size <= MIDDLE and not low_memory:
            if whole:
                return Distil(learning_rate=3e-4)
            warnings.warn(HALF.format(dtype=root.dtype), stacklevel=4)
        return Distil(rank=32, learning_rate=7e-4)
    name = type(root).__name__
    forecasts = root.main_input_name == "past_values"
    headless = not names_head(name) or "QuestionAnswering" in name or forecasts  # gives no logits
    logits = 0.0 if headless else 1.0
    if root.main_input_name == "pixel_values" or size > SMALL or not whole or low_memory:
        return Distil(rank=RANK, learning_rate=5e-4, logits=logits, hidden=1.0, batch=16)
    return Distil(learning_rate=1e-4, logits=logits, hidden=1.0, batch=16)
