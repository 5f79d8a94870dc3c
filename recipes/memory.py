"""Measures how many images a Hopfield memory recalls from half images and from noisy images, and with more steps.

    python recipes/memory.py --dataset mnist/ --sizes 10 50 100 --beta 0.1 --out memory/

OutEffHop, appendix D.2 (figures 5 and 6), which follows SparseHopfield (Hu et al., 2023). The memory is asked for every
stored image once: with the lower half of the image black, or with noise, |x + sigma noise| cut to [0, 1]. Half images
are also asked for with more retrieval steps.

The paper states no criterion of success. The scripts that it follows count an image as recalled if the squared
difference is at most a threshold, which is 50 in Millidge et al. (2022) for pixels in [0, 1]. The control always
answers the mean of the stored images. On MNIST the control passes this criterion for half of the images, so read the
errors and recall.png too. Which normalizer recalls most depends on beta: try several values.

The data are a folder of MNIST idx files (.gz), or of parquet files named train* and test*. The recipe writes
memory.json, memory.png and recall.png.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from images import read_images  # images.py and memory_figures.py lie beside this recipe
from matplotlib.figure import Figure
from memory_figures import STYLES, spread, start, table, write
from torch import Tensor
from tqdm import tqdm
from transformers import HfArgumentParser

from hf_attn_swap.memory import NORMALIZERS, HopfieldRetrieval

MEAN, MEASURED = "mean image", ("success", "nearest", "error")


@dataclass(kw_only=True)
class Options:
    """The stored images, and the queries."""

    dataset: Path = field(metadata={"help": "Folder of idx or parquet files."})
    out: Path = field(default=Path("memory"), metadata={"help": "Folder for measurements and pictures."})
    column: str = field(default="img", metadata={"help": "Column of the images, in parquet files."})
    normalizers: list[str] = field(default_factory=lambda: list(NORMALIZERS))
    sizes: list[int] = field(
        default_factory=lambda: [2, 5, 10, 20, 50, 100, 200], metadata={"help": "Numbers of stored images."}
    )
    noises: list[float] = field(
        default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 1.0, 1.4], metadata={"help": "Standard deviations of the noise."}
    )
    noise_size: int = field(default=100, metadata={"help": "Number of stored images in the sweeps of noise and steps."})
    beta: float = field(default=1.0, metadata={"help": "Inverse temperature, inside the normalizer."})
    steps: int = field(default=1, metadata={"help": "Retrieval steps."})
    more_steps: list[int] = field(
        default_factory=lambda: [1, 2, 3, 5, 10], metadata={"help": "Numbers of retrieval steps in the sweep of steps."}
    )
    threshold: float = field(default=50.0, metadata={"help": "Largest squared difference that counts as recalled."})
    seeds: int = field(default=3, metadata={"help": "Number of draws of images and noise."})

    @property
    def columns(self) -> list[str]:
        """The names of the normalizers, and of the control."""
        return [*self.normalizers, MEAN]


def upper_half(images: Tensor) -> Tensor:
    return torch.cat([half * visible for visible, half in zip((1, 0), images.tensor_split(2, -2), strict=True)], -2)


def retrieve(normalizer: str, queries: Tensor, stored: Tensor, beta: float, steps: int) -> Tensor:
    if normalizer == MEAN:
        return stored.mean(0).expand_as(stored)
    memory = HopfieldRetrieval(normalizer=normalizer, beta=beta, steps=steps)
    return memory(queries.flatten(1)[None], stored.flatten(1))[0].view_as(stored)


def measure(images: Tensor, options: Options) -> list[dict[str, Any]]:
    """One row per sweep, value and normalizer, with the measurements of each seed."""
    rows: dict[tuple[str, float, str], dict[str, list[float]]] = {}
    for seed in tqdm(range(options.seeds), desc="seed"):
        generator = torch.Generator().manual_seed(seed)
        drawn = images[torch.randperm(len(images), generator=generator)[: max(*options.sizes, options.noise_size)]]
        some, steps = drawn[: options.noise_size], options.steps
        noise = torch.randn(some.shape, generator=generator)
        asked = [("size", size, drawn[:size], upper_half(drawn[:size]), steps) for size in options.sizes]
        asked += [("noise", sigma, some, (some + sigma * noise).abs().clamp(0, 1), steps) for sigma in options.noises]
        asked += [("steps", count, some, upper_half(some), count) for count in options.more_steps]
        for (sweep, value, stored, queries, count), name in product(asked, options.columns):
            answers = retrieve(name, queries, stored, options.beta, count)
            errors = torch.cdist(
                answers.flatten(1), stored.flatten(1)
            ).square()  # a row per query, a column per stored image
            row = rows.setdefault((sweep, float(value), name), {key: [] for key in MEASURED})
            row["success"].append((errors.diag() <= options.threshold).float().mean().item())
            row["nearest"].append((errors.diag() <= errors.min(1).values).float().mean().item())
            row["error"].append(errors.diag().mean().item())
    return [{"sweep": sweep, "value": value, "normalizer": name, **row} for (sweep, value, name), row in rows.items()]


def curves(rows: list[dict[str, Any]], options: Options) -> Figure:
    figure = Figure(figsize=(12, 9), layout="constrained")
    for place, (measured, sweep) in enumerate(product(MEASURED, ("size", "noise", "steps"))):
        axes = figure.add_subplot(3, 3, place + 1, xlabel=sweep, ylabel=measured)
        for name, style in zip(options.columns, cycle(STYLES), strict=False):
            picked = [row for row in rows if (row["sweep"], row["normalizer"]) == (sweep, name)]
            centre, width = zip(*(spread(row[measured]) for row in picked), strict=True)
            axes.errorbar([row["value"] for row in picked], centre, width, label=name, capsize=2, ls=style)
    figure.axes[0].legend(fontsize="small")
    return figure


def recall(images: Tensor, options: Options, shown: int = 8) -> Figure:
    """A picture of stored images, the queries, and the answer of each memory of `noise_size` images."""
    stored = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: options.noise_size]]
    names, query = ["stored", "query", *options.columns], upper_half(stored)
    answers = (retrieve(name, query, stored, options.beta, options.steps) for name in options.columns)
    pictures = [stored, query, *answers]
    figure = Figure(figsize=(shown, len(names)), layout="constrained")
    grid = figure.subplots(len(names), min(shown, len(stored)), squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for line, name, row in zip(grid, names, pictures, strict=True):
        line[0].set_ylabel(name, fontsize="small")
        for axes, picture in zip(line, row, strict=False):
            axes.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
    return figure


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    images, _ = read_images(options.dataset, "train", options.column)
    if len(images) < max(*options.sizes, options.noise_size):
        raise ValueError(f"{options.dataset} has {len(images)} images; choose smaller --sizes and --noise_size.")
    rows = measure(images, options)
    write(rows, options, memory=curves(rows, options), recall=recall(images, options))
    successes: dict[str, list[list[float]]] = {}
    for row in rows:
        successes.setdefault(f"{row['sweep']} {row['value']:g}", []).append(row["success"])
    print(table(options.columns, successes))


if __name__ == "__main__":
    start(main)
