"""What a calibration did: the explained share per layer and head, before and after, as a table or as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ..core.table import Table

HEADER = ("layer", "module", "R2 before", "R2 after", "worst head", "negative gains")


@dataclass(frozen=True, kw_only=True)
class LayerFit:
    """One layer.

    Attributes:
        layer, module: number and path of the attention module.
        before, after: R^2 per head of the variant's heads as they were, and as fitted, on the calibration tokens.
        gains: per head; None for maps.
        tokens: real tokens that were counted.
    """

    layer: int
    module: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    gains: tuple[float, ...] | None
    tokens: int

    @property
    def negative(self) -> tuple[int, ...]:
        """Heads whose gain is negative: the variant points away from what it should give."""
        return tuple(head for head, gain in enumerate(self.gains or ()) if gain < 0)

    def cells(self) -> tuple[str, ...]:
        """The layer as text."""
        worst = min(range(len(self.after)), key=self.after.__getitem__)
        negative = ", ".join(map(str, self.negative)) or ("none" if self.gains is not None else "-")
        means = (f"{fmean(self.before):.3g}", f"{fmean(self.after):.3f}")
        return (str(self.layer), self.module, *means, f"{worst} ({self.after[worst]:.3f})", negative)


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """All layers of one calibration.

    Attributes:
        lengths: the shortest and longest rows it saw, in real tokens.
        left: the multiple of a layer's input that the swap adds and the fit cannot take back (pre-norm blocks).
    """

    fit: str
    source: str
    layers: tuple[LayerFit, ...]
    lengths: tuple[int, int]
    left: float = 0.0

    @property
    def unexplained(self) -> float:
        """1 - R^2 after, mean over layers and heads."""
        return 1 - fmean(value for layer in self.layers for value in layer.after)

    def summary(self) -> str:
        """Two sentences, and a third where the fit cannot be enough."""
        shortest, longest = self.lengths
        span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        skip = (
            f" The swap's skip adds {self.left:g} x in every layer, which no fit can undo in a pre-norm block: use an "
            "option without it (mha: alpha=0), or train the model for long."
        )
        return (
            f"{self.fit} fitted to {self.source} on {self.layers[0].tokens:,} tokens: {self.unexplained:.1%} of the "
            f"read-out stays unexplained. Rows had {span} tokens; use the model at such lengths."
            f"{skip if self.left else ''}"
        )

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        return Table(summary=self.summary(), header=HEADER, rows=[layer.cells() for layer in self.layers])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)
