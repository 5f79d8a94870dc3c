"""Draws the figures of the clusters paper and of the multi-head report, by name, with their published settings.

Geshkovski et al. (2023); the multi-head report (2023); docs/mathematics.md, section Dynamics of tokens. The report
counts heads from 1 and this package from 0: "head 5" of the report is head 4 here.
Axes: H head, N token, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from .clusters import clusters, eigenvalues, leaders, matrix_rank
from .drawing import animate, panels, snapshots
from .heads import HeadMatrices, head_matrices
from .simulate import Trajectory, simulate
from .spectra import spectra
from .tokens import embedded_tokens, random_tokens


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a figure.

    Attributes:
        seed: the seed of the random tokens and matrices.
        model, tokenizer: the model and its tokenizer, for the figures of trained heads.
        layer, head: the layer and the head of the model, both counted from 0.
        text: the paragraph whose embedded tokens are the initial tokens of the figure "paragraph".
    """

    seed: int = 0
    model: Any = None
    tokenizer: Any = None
    layer: int = 0
    head: int = 4
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A drawn figure.

    Attributes:
        figure: the picture.
        says: one sentence that states the numbers of the picture.
        movies: trajectories to animate, by name.
    """

    figure: Figure
    says: str
    movies: dict[str, Trajectory] = field(default_factory=dict)

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `<name>.png` and one GIF per trajectory into the folder, and return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.png"]
        self.figure.savefig(paths[0], dpi=130)
        for movie, trajectory in self.movies.items():
            paths.append(folder / (f"{name}-{movie}.gif" if movie else f"{name}.gif"))
            animate(trajectory, paths[-1], movie or name)
        return paths


SWEPT_HEADS, SWEPT_TOKENS = (1, 2, 4, 8, 16), (10, 30, 100)

FIGURES: dict[str, Callable[[Settings], Drawn]] = {}
TRAINED: set[str] = set()


def figure(name: str, *, trained: bool = False) -> Callable[[Callable[[Settings], Drawn]], Callable[[Settings], Drawn]]:
    """Register a figure under a name; `trained` says that the figure needs a model."""

    def add(draw: Callable[[Settings], Drawn]) -> Callable[[Settings], Drawn]:
        FIGURES[name] = draw
        if trained:
            TRAINED.add(name)
        return draw

    return add


def _matrix(kind: str, seed: int) -> Tensor:
    """Return the matrix V of the clustering figures, (2,2)."""
    drawn = torch.rand(2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "identity": torch.eye(2, dtype=torch.float64),
        "positive": drawn,
        "symmetric": drawn + drawn.T - 1,
        "negative": torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64)),
    }[kind]


@figure("clustering")
def clustering(settings: Settings) -> Drawn:
    """20 tokens in 2 dimensions form clusters until t = 5, for four matrices V and Q = K = I."""
    drawing, axes = panels(4)
    movies, ends = {}, []
    identity = torch.eye(2, dtype=torch.float64)
    for panel, kind in zip(axes, ("identity", "positive", "symmetric", "negative"), strict=True):
        heads = HeadMatrices.plain(identity, identity, _matrix(kind, settings.seed))
        movies[kind] = simulate(random_tokens(20, 2, seed=settings.seed), heads, time=5, step=0.1, value="head")
        z = movies[kind].z
        panel.plot(z[..., 0], z[..., 1], color="0.8", linewidth=0.6)
        panel.scatter(*z[-1].T, s=12)
        panel.set_title(f"V {kind}", fontsize="small")
        ends.append(f"{kind} {clusters(movies[kind]).counts[-1]}")
    return Drawn(
        figure=drawing, says=f"Clusters of 20 rescaled tokens at t = 5 by V: {', '.join(ends)}.", movies=movies
    )


@figure("leaders")
def leaders_over_time(settings: Settings) -> Drawn:
    """20 tokens in 2 dimensions until t = 10, with random V and scores: the tokens that attract attention."""
    generator = torch.Generator().manual_seed(settings.seed)
    roots = torch.randn(2, 2, 2, generator=generator, dtype=torch.float64)
    value, scores = roots @ roots.mT  # two independent matrices R R^T
    heads = HeadMatrices.plain(scores, torch.eye(2), value)
    tokens = random_tokens(20, 2, low=-1, high=1, seed=settings.seed)
    trajectory = simulate(tokens, heads, time=10, step=0.1, value="head", method="published")
    over_time = [leaders(trajectory.attention(index)[0]) for index in range(len(trajectory.times))]
    drawing, (left, right) = panels(2)
    left.plot(trajectory.times, [len(leading) for leading in over_time])
    left.set_xlabel("t")
    left.set_ylabel("leaders")
    right.scatter(*trajectory.z[0].T.cpu().numpy(), s=10, color="0.7")
    right.scatter(*trajectory.z[0][over_time[-1]].T.cpu().numpy(), s=30)
    right.set_title("initial tokens; leaders at the end", fontsize="small")
    kept = set(over_time[-1]) <= set(over_time[0])
    says = f"{len(over_time[0])} tokens lead at t = 0 and {len(over_time[-1])} at t = 10, which "
    says += "all led from the start." if kept else "did not all lead from the start."
    return Drawn(figure=drawing, says=says, movies={"": trajectory})


@figure("low-rank")
def low_rank(settings: Settings) -> Drawn:
    """40 tokens in 1 dimension with Q = K = V = 1: the attention matrix P(t) at four times, and its rank."""
    one = torch.eye(1, dtype=torch.float64)
    tokens = random_tokens(40, 1, low=-1, high=1, seed=settings.seed).sort(0).values
    trajectory = simulate(tokens, HeadMatrices.plain(one, one), time=10, step=0.05)
    drawing, axes = panels(4)
    indices = (0, 40, 100, 200)
    for panel, index in zip(axes, indices, strict=True):
        panel.imshow(trajectory.attention(index)[0].cpu().numpy(), vmin=0, vmax=1)
        panel.set_title(f"P(t), t = {float(trajectory.times[index]):g}", fontsize="small")
    ranks = [matrix_rank(trajectory.attention(index)[0]) for index in indices]
    return Drawn(figure=drawing, says=f"Rank of P(t) at t = 0, 2, 5, 10 (singular values above 1e-3): {ranks}.")


@figure("polytope")
def polytope(settings: Settings) -> Drawn:
    """40 tokens in 3 dimensions with V = Q = K = I move to the vertices of a polytope."""
    identity = torch.eye(3, dtype=torch.float64)
    trajectory = simulate(
        random_tokens(40, 3, low=-1, high=1, seed=settings.seed),
        HeadMatrices.plain(identity, identity),
        time=8,
        step=0.05,
    )
    z, wins = trajectory.z[-1], trajectory.attention(-1)[0].argmax(-1)
    far = float((z - z[wins]).norm(dim=-1).max())
    says = f"At t = 8 every token is within {far:.2g} of one of {len(set(wins.tolist()))} vertices."
    return Drawn(figure=snapshots(trajectory, (0, 40, 160), "V = I"), says=says, movies={"": trajectory})


@figure("sweep")
def sweep(settings: Settings) -> Drawn:
    """10, 30 and 100 tokens in 2 dimensions under 1 to 16 heads with random Q and K and V = I, until t = 5."""
    generator = torch.Generator().manual_seed(settings.seed)
    query, key = torch.randn(2, max(SWEPT_HEADS), 2, 2, generator=generator, dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64).expand_as(query)
    every = HeadMatrices(query=query, key=key, value=value, output=value, scale=2**-0.5)
    tokens = random_tokens(max(SWEPT_TOKENS), 2, seed=settings.seed)
    drawing = Figure(figsize=(8.4, 1.9 * len(SWEPT_HEADS)), layout="constrained")
    axes = drawing.subplots(len(SWEPT_HEADS), len(SWEPT_TOKENS) + 1)
    ends = []
    for row, heads in zip(axes, SWEPT_HEADS, strict=True):
        found = []
        for panel, count in zip(row, SWEPT_TOKENS, strict=False):
            trajectory = simulate(tokens[:count], every[range(heads)], time=5, step=0.05)
            counts = clusters(trajectory).counts
            settled = max((index for index, each in enumerate(counts) if each != counts[-1]), default=-1) + 1
            found.append(f"{counts[-1]} from t = {float(trajectory.times[settled]):.3g} on")
            panel.plot(trajectory.z[..., 0], trajectory.z[..., 1], color="0.8", linewidth=0.5)
            panel.scatter(*trajectory.z[-1].T, s=8)
            panel.set_title(f"H = {heads}, {count} tokens", fontsize="x-small")
            row[-1].plot(trajectory.times, counts, label=f"{count} tokens")
        row[-1].set_title(f"H = {heads}: clusters over t", fontsize="x-small")
        row[-1].set_yscale("log")
        for panel in row:
            panel.tick_params(labelsize=5)
        ends.append(f"{heads}: {', '.join(found)}")
    axes[0][-1].legend(fontsize="xx-small")
    names = ", ".join(map(str, SWEPT_TOKENS))
    return Drawn(figure=drawing, says=f"Clusters of {names} tokens by the number of heads: {'; '.join(ends)}.")


@figure("spectra", trained=True)
def trained_spectra(settings: Settings) -> Drawn:
    """The eigenvalues of V_h of every head in the complex plane; green where the hyperplane theorem applies."""
    of_heads = spectra(head_matrices(settings.model, settings.layer))
    columns = min(len(of_heads), 8)
    rows = -(-len(of_heads) // columns)
    drawing = Figure(figsize=(1.6 * columns, 1.7 * rows), layout="constrained")
    for spectrum in of_heads:
        axes = drawing.add_subplot(rows, columns, spectrum.head + 1)
        axes.scatter(
            spectrum.value.real, spectrum.value.imag, s=4, color="tab:green" if spectrum.satisfies else "tab:blue"
        )
        axes.axhline(0, color="0.8", linewidth=0.5)
        axes.axvline(0, color="0.8", linewidth=0.5)
        axes.set_title(f"head {spectrum.head}", fontsize="x-small")
        axes.tick_params(labelsize=5)
    positive = [spectrum.head for spectrum in of_heads if spectrum.positive]
    good = [spectrum.head for spectrum in of_heads if spectrum.satisfies]
    says = f"Heads (from 0) whose largest eigenvalue is real and positive: {positive}; with all conditions: {good}."
    return Drawn(figure=drawing, says=says)


@figure("single-head", trained=True)
def single_head(settings: Settings) -> Drawn:
    """30 random tokens under one trained head with V = I, at steps 0, 25 and 50, in principal components."""
    trajectory = _trained(settings, 30, [settings.head], steps=50)
    says = f"Head {settings.head}: {_clusters(trajectory, (0, 25, 50))}."
    return Drawn(figure=snapshots(trajectory, (0, 25, 50), f"head {settings.head}"), says=says, movies={"": trajectory})


@figure("attention-eigenvalues", trained=True)
def attention_eigenvalues(settings: Settings) -> Drawn:
    """The eigenvalues of P(t) of one trained head in the complex plane, and their moduli over time."""
    trajectory = _trained(settings, 30, [settings.head], steps=50)
    values = eigenvalues(torch.stack([trajectory.attention(index)[0] for index in range(51)]))
    drawing, axes = panels(4)
    for panel, index in zip(axes, (0, 25, 50), strict=False):
        panel.scatter(values[index].real, values[index].imag, s=8)
        panel.set_title(f"t = {float(trajectory.times[index]):g}", fontsize="small")
        panel.set_xlim(-1.05, 1.05)
    axes[3].plot(trajectory.times, values.abs().sort(-1, descending=True).values[:, :10])
    axes[3].set_title("ten largest moduli", fontsize="small")
    large = [int((values[index].abs() > 0.01).sum()) for index in (0, 25, 50)]
    return Drawn(
        figure=drawing, says=f"Eigenvalues of P(t) above 0.01 at steps 0, 25, 50: {large}; the largest stays 1."
    )


@figure("multi-head-30", trained=True)
def multi_head_30(settings: Settings) -> Drawn:
    """30 random tokens under all heads of a layer with V = I, at iterations 1, 7 and 15."""
    return _multi_head(settings, 30, (1, 7, 15))


@figure("multi-head-100", trained=True)
def multi_head_100(settings: Settings) -> Drawn:
    """100 random tokens under all heads of a layer with V = I, at iterations 1, 10 and 20."""
    return _multi_head(settings, 100, (1, 10, 20))


@figure("paragraph", trained=True)
def paragraph(settings: Settings) -> Drawn:
    """The embedded tokens of a text under all heads of a layer with V = I, at iterations 0, 10, 50 and 200."""
    if settings.tokenizer is None or not settings.text:
        raise ValueError("this figure starts from a text; pass a text, and a model with its tokenizer.")
    tokens, names = embedded_tokens(settings.model, settings.tokenizer, settings.text)
    trajectory = simulate(tokens, head_matrices(settings.model, settings.layer), time=20, step=0.1)
    nearest = torch.cdist(clusters(trajectory).centres[-1], tokens.cpu()).min(1)
    where = ", ".join(f"{names[int(index)]!r} ({float(value):.2g})" for value, index in zip(*nearest, strict=True))
    says = (
        f"{len(names)} tokens: {_clusters(trajectory, (0, 10, 50, 200))}; nearest initial tokens (distance): {where}."
    )
    return Drawn(figure=snapshots(trajectory, (0, 10, 50, 200), "paragraph"), says=says, movies={"": trajectory})


def _multi_head(settings: Settings, count: int, indices: tuple[int, ...]) -> Drawn:
    trajectory = _trained(settings, count, None, steps=200)
    largest = float(eigenvalues(trajectory.attention(0).sum(0)).abs().max())
    grouped = _clusters(trajectory, (*indices, 200))
    says = f"{count} tokens: {grouped}; the largest |eigenvalue| of sum P_h is {largest:.6g}."
    return Drawn(figure=snapshots(trajectory, indices, f"{count} tokens"), says=says, movies={"": trajectory})


def _trained(settings: Settings, count: int, chosen: list[int] | None, steps: int) -> Trajectory:
    heads = head_matrices(settings.model, settings.layer)
    if chosen is not None:
        heads = heads[chosen]
    return simulate(random_tokens(count, heads.width, seed=settings.seed), heads, time=0.1 * steps, step=0.1)


def _clusters(trajectory: Trajectory, indices: tuple[int, ...]) -> str:
    grouped = clusters(trajectory)
    when = grouped.collapse_time
    collapse = "no collapse to one" if when is None else f"one from t = {when:.3g} on"
    return f"clusters at iterations {list(indices)}: {[grouped.counts[index] for index in indices]}, {collapse}"
