"""Pictures and animations of trajectories. Axes: T time, N token, E model width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

from .simulate import Trajectory

PANEL = 2.6  # inches
FRAMES, RATE = 36, 9  # frames of an animation, and frames per second


def projected(trajectory: Trajectory, components: int = 2) -> np.ndarray:
    """(T,N,components): the principal components of z over all times, or z itself if E is at most `components`."""
    z = trajectory.z.cpu().numpy()
    if z.shape[2] <= components:
        return z
    basis = PCA(components).fit(z.reshape(-1, z.shape[2]))
    return np.stack([basis.transform(points) for points in z])


def panels(count: int, **kwargs: Any) -> tuple[Figure, list[Any]]:
    """A figure with a row of `count` axes."""
    figure = Figure(figsize=(PANEL * count, PANEL + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, count, index + 1, **kwargs) for index in range(count)]


def snapshots(trajectory: Trajectory, indices: Sequence[int], title: str) -> Figure:
    """The tokens at some times; in two dimensions with their paths so far, in three dimensions without paths."""
    solid = trajectory.z.shape[2] == 3
    points = projected(trajectory, 3 if solid else 2)
    if solid:
        figure, axes = panels(len(indices), projection="3d")
    else:
        figure, axes = panels(len(indices))
    for panel, index in zip(axes, indices, strict=True):
        if not solid:
            for token in range(points.shape[1]):
                panel.plot(*points[: index + 1, token].T, color="0.8", linewidth=0.6, zorder=0)
        panel.scatter(*points[index].T, s=12)
        panel.set_title(f"t = {float(trajectory.times[index]):.3g}", fontsize="small")
        _frame(panel, points)
    figure.suptitle(title)
    return figure


def animate(trajectory: Trajectory, path: Path, title: str) -> None:
    """Write a short GIF of the tokens over time, in two dimensions."""
    points = projected(trajectory)
    chosen = np.unique(np.linspace(0, len(points) - 1, min(FRAMES, len(points))).round().astype(int))
    figure, (axes,) = panels(1)
    dots = axes.scatter(*points[0].T, s=14)
    _frame(axes, points)
    axes.set_title(title, fontsize="x-small")
    figure.canvas.draw()
    figure.set_layout_engine("none")  # keep the layout: to solve it again for each frame takes most of the frame's time

    def draw(index: int) -> list[Any]:
        dots.set_offsets(points[index])
        axes.set_title(f"{title}, t = {float(trajectory.times[index]):.2f}", fontsize="x-small")
        return [dots]

    FuncAnimation(figure, draw, frames=list(chosen), blit=False).save(path, writer=PillowWriter(fps=RATE), dpi=80)


def _frame(axes: Any, points: np.ndarray) -> None:
    low, high = points.min((0, 1)), points.max((0, 1))
    margin = 0.05 * (high - low) + 1e-9
    for name, start, end in zip("xyz", low - margin, high + margin, strict=False):
        getattr(axes, f"set_{name}lim")(start, end)
    axes.tick_params(labelsize=6)
