"""Computes attention with sinks: beside the keys of the text stand learned pairs of a key and a value.

P = softmax([log s + w q k'^T, S + M]) and heads = P [v'; V], for every query; s = 0 is ordinary attention. A pair of
zeros is softmax_1.
Sun et al. (2024), section 4.2, for keys and values; PyTorch's MultiheadAttention(add_bias_kv=True); gpt-oss (2025) for
scores alone. docs/mathematics.md, section Sinks.
Axes: H head, G key/value head, N pair, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.call import Call, Geometry, Inputs
from ..core.options import Options
from ..kernels.extra_kv import ExtraKV
from .about import About
from .base import Variant, register
from .stock_form import StockForm

SMALL = 0.02  # the spread of the keys of further pairs at the start


@dataclass(frozen=True, kw_only=True)
class SinkOptions(Options):
    """The options of sinks.

    Attributes:
        tokens: the number of pairs, at least 1.
        kind: what is learned. "key_value" is a key and a value per key/value head, "key" is a key alone with a value
            of zeros, "score" is one number per head, the score of a key with a value of zeros, and "score_value" is
            such a score and a value per key/value head.

    Raises:
        ValueError: `tokens` is below 1, or above 1 for kind "score".
    """

    tokens: int = 1
    kind: Literal["key_value", "key", "score", "score_value"] = "key_value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise ValueError(f"sink: tokens must be at least 1, got {self.tokens}.")
        if self.kind in ("score", "score_value") and self.tokens > 1:
            raise ValueError(
                f"sink: with kind={self.kind!r}, several scores of one head are one score, so tokens must be 1, got "
                f"{self.tokens}; use kind='key' or 'key_value'."
            )


class Learned(nn.Module):
    """The parameters of one layer, as the kind names them: key (G,N,D), value (G,N,D) and score (H,N)."""

    key: nn.Parameter | None
    value: nn.Parameter | None
    score: nn.Parameter | None

    def __init__(self, options: SinkOptions, geometry: Geometry) -> None:
        super().__init__()
        groups, count = geometry.kv_heads, options.tokens
        shapes = {
            "key": (groups, count, geometry.key_dim or geometry.head_dim),
            "value": (groups, count, geometry.head_dim),
            "score": (geometry.heads, count),
        }
        for name, shape in shapes.items():
            used = name in options.kind.split("_")
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)) if used else None)

    def forward(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Key, value and score, each None if this kind has none. It is called, so that offloaded weights are loaded."""
        return self.key, self.value, self.score


@register("sink")
class Sink(Variant):
    """Adds learned pairs of a key and a value beside the keys of the text."""

    about = About(
        summary="every query also sees learned keys and values",
        formula="softmax([log s + w q k'^T, S]) [v'; V]",
        paper="Sun et al., 2024; gpt-oss (OpenAI, 2025); StreamingLLM (Xiao et al., 2024)",
        parameters_added="2 G N D (key_value), G N D (key), H (score), H + G D (score_value), for N tokens",
        fused="SDPA joined with the pairs by its log-sum-exp, or SDPA with further keys",
    )
    places = ("keys",)
    Options = SinkOptions
    options: SinkOptions

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        self.learned = Learned(options, geometry)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Zeros, so that the start is softmax_1; but the keys of further pairs are drawn.

        Equal pairs have equal gradients, so that they would stay equal.
        """
        for parameter in self.learned.parameters():
            parameter.zero_()
        key = self.learned.key
        if key is not None and self.options.tokens > 1:
            drawn = torch.empty(key[:, 1:].shape, dtype=torch.float32).normal_(0, SMALL, generator=generator)
            key[:, 1:] = drawn.to(key)

    @property
    def further_keys(self) -> int:
        return self.options.tokens

    def stock_form(self, strength: float) -> StockForm:
        key, value, score = self.learned()
        if self.options.tokens > 1 or (key is not None and bool(key.any())):
            raise ValueError(
                "the score of its keys turns with the query, and sinks of transformers have one score per head "
                '(kind="score", or convert with target="engine")'
            )
        heads, groups = self.geometry.heads, self.geometry.kv_heads
        scores = torch.zeros(heads) if score is None else score.detach()[:, 0].cpu()
        values = None if value is None else value.detach()[:, 0].cpu().repeat_interleave(heads // groups, 0)
        return StockForm(score=scores.double() + math.log(strength), value=values)

    def extra_kv(self, inputs: Inputs, call: Call) -> ExtraKV:
        key, value, score = self.learned()
        share = call.exact_strength if isinstance(call.exact_strength, Tensor) else None
        return ExtraKV(key=key, value=value, score=score, share=share)
