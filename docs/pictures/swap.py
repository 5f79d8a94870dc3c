"""Draws what a swap changes in an attention layer: its steps, and below each step the variants that change it."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant

FILE, DARK_FILE = "swap.png", "swap-dark.png"


@dataclass(frozen=True)
class Colours:
    """The colours of a picture: the page, the steps that are kept and changed, letters, and pale letters."""

    page: str
    kept: str
    changed: str
    ink: str
    pale: str


LIGHT = Colours("#ffffff", "#e9ecef", "#d0ebff", "#212529", "#868e96")
DARK = Colours("#1e2129", "#343a46", "#1c4f7c", "#e9ecef", "#9aa2ac")
STEPS = {  # a place of the registry, and what the step computes in the stock model
    "keys": ("keys", "K, V"),
    "scores": ("scores", "S = Q Kᵀ / √D"),
    "mask": ("mask", "S + M"),
    "normalizer": ("normalizer", "softmax"),
    "weights": ("weights", "P"),
    "read": ("read-out", "Y = P V"),
    "write": ("write-out", "after W_o"),
}
WIDTH, HEIGHT, GAP = 1.5, 0.95, 0.28


def variants_at(place: str) -> list[str]:
    """The variants that change this step, but not all steps."""
    return [name for name in list_variants() if place in get_variant(name).places and name not in whole()]


def whole() -> list[str]:
    """The variants that replace all steps."""
    return [name for name in list_variants() if len(get_variant(name).places) == len(STEPS)]


def draw(colours: Colours = LIGHT) -> Figure:
    """The picture, for a light or a dark page."""
    figure = Figure(figsize=(12.2, 3.0), facecolor=colours.page)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 14.6), ylim=(0, 3.75))
    axes.axis("off")
    left = 0.3
    _box(axes, left, "projections", "W_q  W_k  W_v", colours.kept, colours.ink)
    axes.text(
        left + WIDTH / 2, 1.72, "pretrained\nweights, kept", ha="center", va="top", color=colours.pale, fontsize=9
    )
    for place, (name, formula) in STEPS.items():
        axes.annotate(
            "", (left + WIDTH + GAP, 2.6), (left + WIDTH, 2.6), arrowprops={"arrowstyle": "->", "color": colours.ink}
        )
        left += WIDTH + GAP
        _box(axes, left, name, formula, colours.changed, colours.ink)
        names = "\n".join(variants_at(place))
        axes.text(
            left + WIDTH / 2, 1.72, names, ha="center", va="top", color=colours.ink, fontsize=9.5, family="monospace"
        )
    first = 0.3 + WIDTH + GAP
    axes.plot([first, left + WIDTH], [0.5, 0.5], color=colours.ink, linewidth=1.2)
    middle = (first + left + WIDTH) / 2
    everything = f"{',  '.join(whole())}: all steps, in linear time"
    axes.text(middle, 0.4, everything, ha="center", va="top", fontsize=9.5, color=colours.ink)
    title = "One attention layer: variants change the blue steps, and the pretrained weights stay"
    axes.text(0.3, 3.4, title, fontsize=11, color=colours.ink)
    return figure


def _box(axes: Axes, left: float, name: str, formula: str, colour: str, ink: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, 2.15), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.1", facecolor=colour, edgecolor=ink
        )
    )
    axes.text(left + WIDTH / 2, 2.82, name, ha="center", va="center", fontsize=10.5, weight="bold", color=ink)
    axes.text(left + WIDTH / 2, 2.42, formula, ha="center", va="center", fontsize=9.5, color=ink)
