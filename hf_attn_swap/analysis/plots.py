"""Draws recordings of several models side by side. Each function takes the recordings by label and returns a figure.

Axes: L layer, H head, T token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recording import Recording, mean

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
WIDTH, HEIGHT = 7.0, 3.2  # inches
UPDATE = ("update_norm", "update_angle")
Recordings = Mapping[str, Recording]


def similarity(recordings: Recordings) -> Figure:
    """Mean cosine of two tokens per layer; 1 is a collapse to one token."""
    figure, axes = _figure("layer", "cosine of two tokens")
    for label, recording, colour, _ in _styled(recordings):
        values = [mean(layer.similarity) for layer in recording.in_order]
        axes.plot(sorted(recording.layers), values, ".-", color=colour, label=label)
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
    for label, recording, colour, shift in _styled(recordings):
        places = sorted(recording.layers)
        heads = [getattr(layer, name).known for layer in recording.in_order]
        for place, values in zip(places, heads, strict=True):
            axes.plot([place + shift] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
        axes.plot(places, [mean(values) for values in heads], color=colour, label=label)
    _finish(axes, recordings)
    return figure


def outliers(recordings: Recordings) -> Figure:
    """Kurtosis and maximum infinity norm of every recorded module, in the model's order."""
    figure = Figure(figsize=(WIDTH, 1.6 * HEIGHT), layout="constrained")
    for axes, name in zip(figure.subplots(2, 1), ("kurtosis", "max_inf_norm"), strict=True):
        for label, recording, colour, _ in _styled(recordings):
            values = [mean(getattr(activation, name)) for activation in recording.activations.values()]
            axes.plot(values, ".-", color=colour, label=label, linewidth=0.8)
        axes.set(xlabel="recorded module", ylabel=name.replace("_", " "), yscale="log")
        axes.legend(fontsize="small")
    return figure


def updates(recordings: Recordings) -> Figure:
    """Norm of what attention adds to a token, and its angle with the token, per layer."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    norms, angles = figure.subplots(1, 2)
    for label, recording, colour, _ in _styled(recordings):
        places = sorted(recording.layers)
        norm, angle = ([float(getattr(layer, name).value) for layer in recording.in_order] for name in UPDATE)
        norms.plot(places, norm, ".-", color=colour, label=label)
        angles.plot(places, np.degrees(angle), ".-", color=colour, label=label)
    norms.set(xlabel="layer", ylabel="norm")
    angles.set(xlabel="layer", ylabel="angle with the token (degrees)")
    angles.legend(fontsize="small")
    return figure


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


def _styled(recordings: Recordings) -> Iterator[tuple[str, Recording, str, float]]:
    """Label, recording, colour, and how far its marks stand from the place of their layer."""
    count = len(recordings)
    for number, (label, recording) in enumerate(recordings.items()):
        yield label, recording, COLOURS[number % len(COLOURS)], (number - (count - 1) / 2) * 0.8 / count
