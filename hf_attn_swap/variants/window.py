"""Computes softmax attention in a window: each query sees the keys near it and the first keys of its text.

P = softmax(S + M + log(1 - s) [outside]), where a key j is outside of the window of a query i if |i - j| >= w and j is
not among the first keys that the query may see. s = 0 is ordinary attention, and so is every text of at most w tokens.
Some key/value heads of a layer may keep all keys: their queries have no window.
Longformer (Beltagy et al., 2020), section 3.1, for the window; StreamingLLM (Xiao et al., 2024a), section 3.2, for the
first tokens; DuoAttention (Xiao et al., 2024b), section 2, for the heads. docs/mathematics.md, section Window.
Axes: G key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.call import Geometry
from ..core.options import Options
from ..kernels.windows import Span
from .about import About
from .base import Variant, register
from .stock_form import StockForm


@dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    """The options of a window.

    Attributes:
        window: a query sees the keys whose distance from it is below this number, at least 1. In causal order, these
            are the last `window` keys, its own included; otherwise the keys on both sides.
        sinks: the number of first tokens of a text that every query sees as well, at least 0. Padding does not count.
        full_heads: the numbers of the key/value heads of the layer, from 0, whose queries see every key. The layers of
            a model have different heads: patch each layer (or each group of layers) by a call of its own.

    Raises:
        ValueError: a number lies below its range.
    """

    window: int = 128
    sinks: int = 4
    full_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("window", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"window: {name} must be at least {least}, got {getattr(self, name)}.")
        heads = tuple(sorted(set(self.full_heads)))
        if heads and heads[0] < 0:
            raise ValueError(f"window: full_heads are numbers of key/value heads, from 0, got {heads[0]}.")
        object.__setattr__(self, "full_heads", heads)  # in one order, so that equal choices are equal


@register("window", aliases=("sliding_window",))
class Window(Variant):
    """Hides the keys outside of a window, except the first tokens of the text (no parameters)."""

    about = About(
        summary="a query sees the keys near it, and the first tokens; in heads of your choice, all keys",
        formula="softmax(S + M), M = -inf where |i - j| >= w and j > sinks",
        paper="Longformer (Beltagy et al., 2020); StreamingLLM and DuoAttention (Xiao et al., 2024)",
        fused="blocks of queries with the keys of their window, by SDPA",
    )
    places = ("mask",)
    tiny: ClassVar[Mapping[str, Any]] = {"window": 2, "sinks": 1}
    masks_of_keys = True
    Options = WindowOptions
    options: WindowOptions

    @classmethod
    def check(cls, options: WindowOptions, geometry: Geometry) -> None:
        if wrong := [head for head in options.full_heads if head >= geometry.kv_heads]:
            raise ValueError(
                f"window: full_heads has {wrong}, but this layer has {geometry.kv_heads} key/value heads, with the "
                f"numbers from 0 to {geometry.kv_heads - 1}."
            )

    @property
    def changes(self) -> tuple[str, ...]:
        """Nothing, if all heads keep all keys: the layer is then that of the pretrained model, with its cache."""
        return self.places if len(self.options.full_heads) < self.geometry.kv_heads else ()

    @classmethod
    def reach(cls, options: WindowOptions) -> int:
        return options.window

    def stock_form(self, strength: float) -> StockForm:
        if not self.changes:
            return StockForm()
        if self.options.sinks or self.options.full_heads or strength < 1:
            raise ValueError(
                "layers of transformers have one window for all heads, without first tokens "
                '(convert with target="engine")'
            )
        return StockForm(window=self.options.window)

    def span(self) -> Span:
        full = self.options.full_heads
        flags = tuple(head in full for head in range(self.geometry.kv_heads)) if full else ()
        return Span(self.options.window, self.options.sinks, flags)
