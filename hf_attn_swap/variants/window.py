"""Computes softmax attention in a window: each query sees the keys near it and the first keys of its text.

P = softmax(S + M + log(1 - s) [outside]), where a key j is outside of the window of a query i if |i - j| >= w and j is
not among the first keys that the query may see. s = 0 is ordinary attention, and so is every text of at most w tokens.
Longformer (Beltagy et al., 2020), section 3.1, for the window; StreamingLLM (Xiao et al., 2024), section 3.2, for the
first tokens. docs/mathematics.md, section Window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.options import Options
from ..kernels.windows import Span
from .about import About
from .base import Variant, register


@dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    """The options of a window.

    Attributes:
        window: a query sees the keys whose distance from it is below this number, at least 1. In causal order, these
            are the last `window` keys, its own included; otherwise the keys on both sides.
        sinks: the number of first tokens of a text that every query sees as well, at least 0. Padding does not count.

    Raises:
        ValueError: a number lies below its range.
    """

    window: int = 128
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("window", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"window: {name} must be at least {least}, got {getattr(self, name)}.")


@register("window", aliases=("sliding_window",))
class Window(Variant):
    """Hides the keys outside of a window, except the first tokens of the text (no parameters)."""

    about = About(
        summary="a query sees the keys near it, and the first tokens",
        formula="softmax(S + M), M = -inf where |i - j| >= w and j > sinks",
        paper="Longformer (Beltagy et al., 2020); StreamingLLM (Xiao et al., 2024)",
        fused="blocks of queries with the keys of their window, by SDPA",
    )
    places = ("mask",)
    tiny: ClassVar[Mapping[str, Any]] = {"window": 2, "sinks": 1}
    masks_of_keys = True
    Options = WindowOptions
    options: WindowOptions

    @classmethod
    def reach(cls, options: WindowOptions) -> int:
        return options.window

    def span(self) -> Span:
        return Span(self.options.window, self.options.sinks)
