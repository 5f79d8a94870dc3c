"""What was swapped, where, and how it runs: a table for terminals, notebooks and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .core.swap import Phase, Swap
from .core.table import Table
from .families import Site, sites
from .kernels.dispatch import Form, Setting
from .wiring.home import home
from .wiring.install import installation_of, model_root

HEADER = ("layer", "module", "attention", "strength", "options", "parameters", "runs")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention module.

    `layer` is None where the module does not count (cross-attention, or refused); `modules` is the pattern that chose
    the module, if there was one.
    """

    layer: int | None
    module: str
    attention: str
    strength: float | None
    options: dict[str, dict[str, Any]]
    parameters: int
    runs: str
    modules: str | None = None

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        options = ", ".join(f"{key}={value}" for part in self.options.values() for key, value in part.items())
        layer = "-" if self.layer is None else str(self.layer)
        strength = "-" if self.strength is None else f"{self.strength:g}"
        return layer, self.module, self.attention, strength, options or "-", str(self.parameters), self.runs


@dataclass(frozen=True, kw_only=True)
class Description:
    """All attention modules of a model, in module order."""

    model: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return self._table().text()

    def summary(self) -> str:
        """One sentence: how many of how many are swapped."""
        swapped = sum(row.strength is not None for row in self.rows)
        countable = sum(row.layer is not None for row in self.rows)
        added = sum(row.parameters for row in self.rows)
        chosen = sorted({row.modules for row in self.rows if row.modules is not None})
        words = f", chosen by modules={' and '.join(map(repr, chosen))}" if chosen else ""
        return (
            f"{self.model}: {swapped} of {countable} self-attention modules swapped{words}, {added:,} parameters added"
        )

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        return Table(summary=self.summary(), header=HEADER, rows=[row.cells() for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def describe(model: nn.Module, /) -> Description:
    """Every attention module of a model, swapped or not, and how it runs.

    Raises:
        ValueError: no transformers model, or part of a patched one.
    """
    root = model_root(model)
    installation_of(root)
    rows, count = [], 0
    for site in sites(root):
        swap = next((m for m in site.core.modules() if isinstance(m, Swap)), None)
        rows.append(
            Row(
                layer=count if site.usable else None,
                module=site.path,
                attention="softmax (stock)" if swap is None else "+".join(swap.names),
                strength=None if swap is None else swap.strength,
                options={} if swap is None else swap.options,
                parameters=0 if swap is None else sum(p.numel() for p in swap.parameters()),
                runs=_stock(site) if swap is None else _swapped(site, swap),
                modules=None if swap is None else swap.selection,
            )
        )
        count += site.usable
    return Description(model=type(root).__name__, rows=tuple(rows))


def _stock(site: Site) -> str:
    if site.refused is not None:
        return f"stock; cannot be swapped: {site.refused}"
    return "stock (cross-attention)" if site.cross else "stock"


def _swapped(site: Site, swap: Swap) -> str:
    """The form that runs with the module's device and dtype, in words, and what follows the heads."""
    like = home(site.container, site.core)
    setting = Setting(
        device=like.device.type,
        dtypes=(like.dtype,),
        between=swap.phase == Phase.BETWEEN,
        uniform=swap.wiring is None or swap.wiring.uniform,
    )
    form = swap.form(setting)
    if form is Form.STOCK:
        return str(form.value)
    parts: list[str] = [form.value]
    if form is Form.REFERENCE:
        explicit = [variant.name for variant in swap.variants if variant.explicit]
        parts = [f"reference ({', '.join(explicit)} needs the weights)" if explicit else "reference (explicit scores)"]
    parts += [f"then {variant.follows}" for variant in swap.variants if variant.follows]
    words = ", ".join(parts)
    if swap.calibration is not None:
        return f"{words}; calibrated ({swap.calibration.fit})"
    return words if swap.merged is None else f"{words}; calibrated ({swap.merged}, merged)"
