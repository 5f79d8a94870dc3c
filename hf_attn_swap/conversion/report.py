"""The report of a calibration: R^2 per layer and head before and after the fit, as a table or as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ..text.table import Table

TINY = 0.01  # a skip of less than this share of the input is not worth a sentence
HEADER = ("layer", "module", "R2 before", "R2 after", "worst head", "negative gains")


@dataclass(frozen=True, kw_only=True)
class LayerFit:
    """The fit of one layer.

    Attributes:
        layer, module: number and path of the attention module.
        before, after: R^2 per head on the calibration tokens, before the fit and after the fit.
        gains: the fitted gain per head; None for maps.
        tokens: how many real tokens the fit used.
    """

    layer: int
    module: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    gains: tuple[float, ...] | None
    tokens: int

    @property
    def negative(self) -> tuple[int, ...]:
        """The heads whose gain is negative: their output points away from the target."""
        return tuple(head for head, gain in enumerate(self.gains or ()) if gain < 0)

    def cells(self) -> tuple[str, ...]:
        """The layer's row of the table, in the order of `HEADER`."""
        worst = min(range(len(self.after)), key=self.after.__getitem__)
        if self.gains is None:
            negative = "-"
        else:
            negative = ", ".join(map(str, self.negative)) or "none"
        return (
            str(self.layer),
            self.module,
            f"{fmean(self.before):.3g}",
            f"{fmean(self.after):.3f}",
            f"{worst} ({self.after[worst]:.3f})",
            negative,
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """The fits of all layers of one calibration.

    Attributes:
        fit: "gain" or "map".
        source: the attention to which the layers were fitted.
        layers: the fit of each layer.
        lengths: the shortest and the longest row of the calibration batches, in real tokens.
        left: the multiple of a layer's input that the swap adds and that no fit can undo; 0 in post-LayerNorm blocks.
    """

    fit: str
    source: str
    layers: tuple[LayerFit, ...]
    lengths: tuple[int, int]
    left: float = 0.0

    @property
    def unexplained(self) -> float:
        """1 - R^2 after the fit, as a mean over layers and heads."""
        return 1 - fmean(value for layer in self.layers for value in layer.after)

    @property
    def skip_words(self) -> str:
        """A sentence on a skip that no fit can undo; empty if there is none, or a tiny one."""
        if abs(self.left) < TINY:
            return ""
        return (
            f"The swap adds {self.left:g} times the input in every layer, which no fit can undo in a pre-norm block: "
            "choose options without this skip (modern_hopfield: alpha=0), or train the model for long."
        )

    def summary(self) -> str:
        """The report in two sentences, and one more for a skip that no fit can undo."""
        shortest, longest = self.lengths
        span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        sentences = (
            f"{self.fit} fitted to {self.source} on {self.layers[0].tokens:,} tokens: {self.unexplained:.1%} of the "
            f"read-out stays unexplained. Rows had {span} tokens; use the model at such lengths.",
            self.skip_words,
        )
        return " ".join(filter(None, sentences))

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        return Table(summary=self.summary(), header=HEADER, rows=[layer.cells() for layer in self.layers])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)
