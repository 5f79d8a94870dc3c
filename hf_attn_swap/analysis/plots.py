"""Draws recordings of several models side by side. Each function takes the recordings by label and returns a figure.

Axes: L layer, H head, T token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recording import Recording, mean

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
WIDTH, HEIGHT = 7.0, 3.2  # inches
SHOWN_MAPS = 6  # layers of attention maps side by side
Recordings = Mapping[str, Recording]


def similarity(recordings: Recordings) -> Figure:
    """Violins over pairs of tokens of their cosine, per layer; a peak at 1 is a collapse to one token."""
    figure, axes = _figure("layer", "cosine of two tokens")
    for number, (label, recording) in enumerate(recordings.items()):
        places = _places(recording)
        samples = [[value for value in recording.layers[p].pairs if math.isfinite(value)] for p in places]
        at, colour = _beside(places, number, len(recordings)), COLOURS[number % len(COLOURS)]
        spread = [(x, each) for x, each in zip(at, samples, strict=True) if len(set(each)) > 1]
        if spread:
            bodies: Any = axes.violinplot([e for _, e in spread], [x for x, _ in spread], widths=0.8 / len(recordings))
            for body in bodies["bodies"]:
                body.set_facecolor(colour)
            for part in ("cbars", "cmins", "cmaxes"):
                bodies[part].set_color(colour)
                bodies[part].set_linewidth(0.8)
        middle = [float(np.median(each)) if each else math.nan for each in samples]
        axes.plot(at, middle, ".", color=colour, label=label)
    _finish(axes, recordings)
    return figure


def entropy(recordings: Recordings) -> Figure:
    """Mean attention entropy in nats per layer, a dot per head, a line through the mean over heads."""
    return _heads(recordings, "entropy", "attention entropy (nats)")


def sinks(recordings: Recordings) -> Figure:
    """Share of attention on the first token and separators per layer, a dot per head, a line through their mean."""
    return _heads(recordings, "sinks", "attention on sink tokens")


def _heads(recordings: Recordings, name: str, words: str) -> Figure:
    figure, axes = _figure("layer", words)
    for number, (label, recording) in enumerate(recordings.items()):
        places, colour = _places(recording), COLOURS[number % len(COLOURS)]
        heads = [getattr(recording.layers[place], name).known for place in places]
        for x, values in zip(_beside(places, number, len(recordings)), heads, strict=True):
            axes.plot([x] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
        axes.plot(places, [mean(values) for values in heads], color=colour, label=label)
    _finish(axes, recordings)
    return figure


def outliers(recordings: Recordings) -> Figure:
    """Kurtosis and maximum infinity norm of every recorded module, in the model's order."""
    figure = Figure(figsize=(WIDTH, 1.6 * HEIGHT), layout="constrained")
    for index, name in enumerate(("kurtosis", "max_inf_norm")):
        axes = figure.add_subplot(2, 1, index + 1)
        for number, (label, recording) in enumerate(recordings.items()):
            values = [mean(getattr(each, name)) for each in recording.activations.values()]
            axes.plot(values, ".-", color=COLOURS[number % len(COLOURS)], label=label, linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel(name.replace("_", " "))
        axes.legend(fontsize="small")
    axes.set_xlabel("recorded module")
    return figure


def updates(recordings: Recordings) -> Figure:
    """Norm of what attention adds to a token, and its angle with the token, per layer."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    for index, (name, words) in enumerate(
        (("update_norm", "norm"), ("update_angle", "angle with the token (degrees)"))
    ):
        axes = figure.add_subplot(1, 2, index + 1)
        for number, (label, recording) in enumerate(recordings.items()):
            values = [float(getattr(recording.layers[place], name).value) for place in _places(recording)]
            drawn = np.degrees(values) if name == "update_angle" else values
            axes.plot(_places(recording), drawn, ".-", color=COLOURS[number % len(COLOURS)], label=label)
        axes.set_xlabel("layer")
        axes.set_ylabel(words)
    axes.legend(fontsize="small")
    return figure


def attention_maps(maps: Mapping[str, Sequence[np.ndarray]], tokens: Sequence[str]) -> Figure:
    """Attention of one text, mean over heads, (T,T) per layer: a row per model, at most six layers evenly chosen."""
    chosen, figure, grid = _grid(maps)
    for row, (label, layers) in enumerate(maps.items()):
        for column, place in enumerate(chosen):
            axes = grid[row][column]
            axes.imshow(layers[place], cmap="viridis", vmin=min(0.0, float(layers[place].min())))
            _label(axes, row, column, label, place)
            if column == 0:
                axes.set_yticks(range(len(tokens)), tokens, fontsize=min(7, 140 // len(tokens) + 1))
    return figure


def patch_maps(maps: Mapping[str, Sequence[np.ndarray]], image: np.ndarray) -> Figure:
    """Where the first token looks in one image, (rows,columns) of patches per layer over (height,width,3) pixels."""
    chosen, figure, grid = _grid(maps)
    height, width = image.shape[:2]
    for row, (label, layers) in enumerate(maps.items()):
        for column, place in enumerate(chosen):
            axes = grid[row][column]
            axes.imshow(image)
            axes.imshow(
                layers[place], cmap="inferno", alpha=0.6, extent=(0, width, height, 0), interpolation="bilinear"
            )
            _label(axes, row, column, label, place)
            axes.set_yticks([])
    return figure


def _grid(maps: Mapping[str, Sequence[np.ndarray]]) -> tuple[list[int], Figure, Any]:
    depth = min(len(layers) for layers in maps.values())
    count = min(depth, SHOWN_MAPS)
    chosen = [round(index * (depth - 1) / max(count - 1, 1)) for index in range(count)]
    figure = Figure(figsize=(1.7 * count + 1, 1.9 * len(maps)), layout="constrained")
    return chosen, figure, figure.subplots(len(maps), count, squeeze=False)


def _label(axes: Axes, row: int, column: int, label: str, place: int) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if row == 0:
        axes.set_title(f"layer {place}", fontsize="small")
    if column == 0:
        axes.set_ylabel(label)


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _finish(axes: Axes, recordings: Recordings) -> None:
    places = sorted({place for recording in recordings.values() for place in recording.layers})
    axes.set_xticks(places[:: -(-len(places) // 16)])
    axes.legend(fontsize="small")


def _places(recording: Recording) -> list[int]:
    return sorted(recording.layers)


def _beside(places: Sequence[int], number: int, count: int) -> list[float]:
    return [place + (number - (count - 1) / 2) * 0.8 / count for place in places]
