"""Describes what was swapped, where, and how each layer runs: a table for terminals, notebooks and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .families import Site, sites
from .kernels.dispatch import Form, Setting
from .kernels.weighing import Rule
from .layer.swap import Phase, Swap
from .text.table import Table
from .variants.base import Variant
from .wiring.device_and_dtype import device_and_dtype
from .wiring.install import installation_of, model_root

NOTHING = (
    "no attention module goes through transformers' attention interface, so nothing can be swapped (models such as "
    "Mamba have no attention; BLOOM, Falcon and MPT, for example, compute it in their own code)"
)
HEADER = ("layer", "module", "attention", "strength", "options", "parameters", "runs")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention module.

    Attributes:
        layer: the number that `layers` counts; None for cross-attention and for a module that cannot be swapped.
        module: the path of the module in the model.
        attention: the name of the variant, or "softmax (stock)".
        strength: the strength of the swap; None for a stock module.
        options: the options of each variant, by the variant's name.
        parameters: the number of parameters that the swap added.
        runs: the form that computes the heads, and what follows, in words.
        modules: the argument `modules` that chose the module, or None.
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
        """The cells of the row as text, in the order of `HEADER`."""
        options = ", ".join(f"{key}={value}" for part in self.options.values() for key, value in part.items())
        layer = "-" if self.layer is None else str(self.layer)
        strength = "-" if self.strength is None else f"{self.strength:g}"
        return layer, self.module, self.attention, strength, options or "-", str(self.parameters), self.runs


@dataclass(frozen=True, kw_only=True)
class Description:
    """All attention modules of a model, in module order.

    Attributes:
        model: the class name of the model.
        rows: one row per attention module.
    """

    model: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return self.table().text()

    def summary(self) -> str:
        """One sentence: how many modules are swapped and how many parameters were added, or why nothing can be."""
        if not self.rows:
            return f"{self.model}: {NOTHING}"
        swapped = sum(row.strength is not None for row in self.rows)
        countable = sum(row.layer is not None for row in self.rows)
        added = sum(row.parameters for row in self.rows)
        chosen = sorted({row.modules for row in self.rows if row.modules is not None})
        words = f", chosen by modules={' and '.join(map(repr, chosen))}" if chosen else ""
        return (
            f"{self.model}: {swapped} of {countable} self-attention modules swapped{words}, {added:,} parameters added"
        )

    def _repr_html_(self) -> str:
        return self.table().html()

    def table(self) -> Table:
        """The rows as text, below the summary."""
        return Table(summary=self.summary(), header=HEADER, rows=[row.cells() for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The description as plain data: dicts, tuples, strings and numbers."""
        return asdict(self)


def describe(model: nn.Module, /) -> Description:
    """Describe every attention module of a model, swapped or not, and how the module runs.

    Raises:
        ValueError: `model` holds no transformers model, or is a part of a patched model.
    """
    root = model_root(model)
    installation_of(root)
    rows, count = [], 0
    for site in sites(root):
        swap = next((module for module in site.core.modules() if isinstance(module, Swap)), None)
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
    """How a stock module runs, and why it cannot be swapped if it cannot, in words."""
    if site.refused is not None:
        return f"stock; cannot be swapped: {site.refused}"
    return "stock (cross-attention)" if site.cross else "stock"


def _needs_weights(variant: Variant) -> bool:
    """True if no rule says what the variant does to the weights, so that its methods need them as one tensor."""
    return bool({"normalizer", "weights"} & set(variant.changes)) and variant.rule(Rule()) is None


def _swapped(site: Site, swap: Swap) -> str:
    """The form that runs on the module's device and in its dtype, and what follows the heads, in words."""
    at = device_and_dtype(site.container, site.core)
    setting = Setting(
        device=at.device.type,
        dtypes=(at.dtype,),
        between=swap.phase == Phase.BETWEEN,
        uniform=swap.wiring is None or swap.wiring.uniform,
    )
    form = swap.form(setting)
    if form is Form.STOCK:
        return str(form.value)
    parts: list[str] = [form.value]
    if form is Form.REFERENCE:
        explicit = [variant.name for variant in swap.variants if _needs_weights(variant)]
        parts = [f"reference ({', '.join(explicit)} needs the weights)" if explicit else "reference (explicit scores)"]
    if swap.in_blocks(setting):
        parts.append("in blocks of queries with the keys of their window")
        if any(variant.span().full for variant in swap.variants if "mask" in variant.changes):
            parts.append("once more for the heads with all keys")
    for variant in swap.variants:
        after = (variant.about.then, "the skip" if variant.shares[0] else "")
        parts += [f"then {what}" for what in after if what]
    return "; ".join([", ".join(parts), *(fit.words() for fit in swap.fitted.values())])
