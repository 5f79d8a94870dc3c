"""Draws recordings of several models side by side. Each function takes the recordings by label and returns a figure.

Axes: L layer, H head, T token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .recording import BINS, Counts, Recording, mean

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
WIDTH, HEIGHT = 7.0, 3.2  # inches
UPDATE = ("update_norm", "update_angle")
Recordings = Mapping[str, Recording]


def similarity(recordings: Recordings) -> Figure:
    """Cosines of all pairs of tokens per layer, a line through their mean; 1 is a collapse to one token."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    _similarity(figure.add_subplot(), recordings)
    return figure


def entropy(recordings: Recordings) -> Figure:
    """Attention entropy in nats of all rows of weights per layer, a dot per head, a line through the mean of heads."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    _entropy(figure.add_subplot(), recordings)
    return figure


def spread(recordings: Recordings) -> Figure:
    """`similarity` above `entropy`."""
    figure = Figure(figsize=(1.3 * WIDTH, 1.8 * HEIGHT), layout="constrained")
    above, below = figure.subplots(2, 1)
    _similarity(above, recordings)
    _entropy(below, recordings)
    return figure


def sinks(recordings: Recordings) -> Figure:
    """Share of attention on the first token and separators per layer, a dot per head, a line through their mean."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    _heads(figure.add_subplot(), recordings, "sinks", "attention on sink tokens")
    return figure


def _similarity(axes: Axes, recordings: Recordings) -> None:
    for label, recording, colour, _ in _styled(recordings):
        values = [mean(layer.similarity) for layer in recording.in_order]
        axes.plot(sorted(recording.layers), values, ".-", color=colour, label=label)
    _violins(axes, recordings, "pairs")
    _finish(axes, recordings, "cosine of two tokens")


def _entropy(axes: Axes, recordings: Recordings) -> None:
    _violins(axes, recordings, "entropies")
    _heads(axes, recordings, "entropy", "attention entropy (nats)")


def _violins(axes: Axes, recordings: Recordings, name: str) -> None:
    """For each layer, how often each value is found, as a width; the largest width of a layer is always the same."""
    for _, recording, colour, shift in _styled(recordings):
        for place in sorted(recording.layers):
            found: Counts = getattr(recording.layers[place], name)
            edges, counts = np.linspace(found.low, found.high, BINS + 1), found.counts.numpy()
            if not counts.any():
                continue
            half = np.repeat(0.4 / len(recordings) * counts / counts.max(), 2)
            height, middle = np.repeat(edges, 2)[1:-1], place + shift
            axes.fill_betweenx(
                height, middle - half, middle + half, where=half > 0, color=colour, alpha=0.45, linewidth=0
            )


def _heads(axes: Axes, recordings: Recordings, name: str, words: str) -> None:
    for label, recording, colour, shift in _styled(recordings):
        places = sorted(recording.layers)
        heads = [getattr(layer, name).known for layer in recording.in_order]
        for place, values in zip(places, heads, strict=True):
            axes.plot([place + shift] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
        axes.plot(places, [mean(values) for values in heads], color=colour, label=label)
    _finish(axes, recordings, words)


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


def _finish(axes: Axes, recordings: Recordings, words: str) -> None:
    axes.set(xlabel="layer", ylabel=words)
    places = sorted({place for recording in recordings.values() for place in recording.layers})
    axes.set_xticks(places[:: -(-len(places) // 16)])
    axes.legend(fontsize="small")


def _styled(recordings: Recordings) -> Iterator[tuple[str, Recording, str, float]]:
    """Label, recording, colour, and how far its marks stand from the place of their layer."""
    count = len(recordings)
    for number, (label, recording) in enumerate(recordings.items()):
        yield label, recording, COLOURS[number % len(COLOURS)], (number - (count - 1) / 2) * 0.8 / count
