"""The architectures beyond the six: how each is built and called, and which variants it cannot have."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from hf_attn_swap import list_variants
from hf_attn_swap.families import sites
from hf_attn_swap.layer.registry import parse
from tests import zoo
from tests.contract.cells import COVERING

EXTRA = ("gemma2", "t5", "bert_cross", "whisper_whole")
SOFT_CAPPED = ("gemma2",)  # stock SDPA drops the soft cap in some versions; eager never does, nor do we
BIASED = {"gemma2": "bounds its scores by a soft cap", "t5": "adds a position bias to its scores"}
SUBJECTS = (*zoo.GENERIC, *EXTRA)


@functools.cache
def _built(name: str, dtype: torch.dtype) -> Any:
    model = zoo.build(name.removesuffix("_whole"), dtype=dtype)
    if name in SOFT_CAPPED:
        model.set_attn_implementation("eager")
    return model.get_encoder() if name == "whisper" else model


def dtype_of(name: str) -> torch.dtype:
    """The dtype in which the stock model is exact: Gemma 2's eager softmax rounds to fp32."""
    return torch.float32 if name in SOFT_CAPPED else torch.float64


def build(name: str, dtype: torch.dtype | None = None) -> Any:
    """A stock model of one's own; `whisper` is the encoder alone, `whisper_whole` all of it."""
    return copy.deepcopy(_built(name, dtype or dtype_of(name)))


def batch_of(name: str, dtype: torch.dtype | None = None, **arguments: Any) -> dict[str, Tensor]:
    dtype = dtype or dtype_of(name)
    batch = zoo.inputs(name.removesuffix("_whole"), dtype=dtype, **arguments)
    return {"input_features": batch["input_features"]} if name == "whisper" else batch


def behind_the_interface(name: str) -> bool:
    """False where this transformers computes attention in the model's own code (T5 before 5.11)."""
    return bool(sites(_built(name, dtype_of(name))))


def projects_apart(model: nn.Module) -> bool:
    """True where W_o sits outside the attention module, in no block that we know (DINOv2 before 5.11)."""
    return any(site.family.output is None for site in sites(model))


def refusal(name: str, variant: str) -> str | None:
    """Why `patch_model` must refuse this variant, or None."""
    model = _built(name, dtype_of(name))
    if not behind_the_interface(name):
        return "attention interface"
    widths = [site.family.geometry(site.core) for site in sites(model)]
    keeps = all(getattr(cls, "keeps_projection", True) for cls in parse(variant))
    if not keeps and any(one.heads * one.head_dim != one.hidden for one in widths):
        return "leaves out W_o"
    if name in BIASED and any(cls.replaces for cls in parse(variant)):
        return f"{BIASED[name]}, but {variant} computes no scores"
    writes = any("write" in cls.places for cls in parse(variant))
    return "W_o" if writes and projects_apart(model) else None


def _variants(name: str) -> list[str]:
    """Two of the few that together change every place; where something is added to the scores, all take turns."""
    place = SUBJECTS.index(name)
    few = [COVERING[(place + step) % len(COVERING)][0] for step in range(2)]
    turn = list_variants()[list(BIASED).index(name) :: len(BIASED)] if name in BIASED else ()
    return list(dict.fromkeys((*few, *turn)))


RUNNABLE = [(name, variant) for name in SUBJECTS for variant in _variants(name) if refusal(name, variant) is None]
REFUSED = [(name, variant) for name in SUBJECTS for variant in list_variants() if refusal(name, variant) is not None]
