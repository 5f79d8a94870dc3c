"""Multiple-instance learning: a bag has one label, and a Hopfield pooling finds the instances that decide the label.

    python recipes/multiple_instance.py --dataset mnist/ --bag_sizes 5 10 20 50 --out bags/

In the task "bits", half of the bags hold one of a few signal patterns of random bits among other patterns (Ramsauer et
al., 2020; Hu et al., 2023). In the task "mnist", half of the bags hold one image of a certain digit among images of
other digits. The recipe measures the accuracy on new bags after the last epoch, and the training loss of each epoch.
OutEffHop, section 4.3, names the task and prints no results. The sizes here are small.
Axes: B bag, N instance, P numbers of an instance, S image or bit pattern.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from images import read_images  # images.py and memory_figures.py lie beside this recipe
from matplotlib.figure import Figure
from memory_figures import STYLES, spread, start, table, write
from torch import Tensor, nn
from tqdm import tqdm
from transformers import HfArgumentParser, set_seed

from hf_attn_swap.memory import NORMALIZERS, HopfieldPooling


@dataclass(kw_only=True)
class Options:
    """The bags, and the training on them."""

    dataset: Path | None = field(default=None, metadata={"help": "Folder of MNIST's idx files, for the task mnist."})
    out: Path = field(
        default=Path("multiple_instance"), metadata={"help": "Folder for the measurements and the picture."}
    )
    tasks: list[str] = field(
        default_factory=lambda: ["bits", "mnist"], metadata={"help": "Tasks: bits, mnist or both."}
    )
    normalizers: list[str] = field(default_factory=lambda: list(NORMALIZERS))
    bag_sizes: list[int] = field(
        default_factory=lambda: [5, 10, 20], metadata={"help": "Numbers of instances per bag."}
    )
    bags: int = field(default=800, metadata={"help": "Number of bags to train on; a quarter as many test."})
    bits: int = field(default=8, metadata={"help": "Width of a bit pattern."})
    signals: int = field(default=8, metadata={"help": "Number of patterns that make a bag positive."})
    digit: int = field(default=9, metadata={"help": "Digit that makes a bag positive."})
    width: int = field(default=32, metadata={"help": "Width of the embedded instances."})
    heads: int = field(default=4, metadata={"help": "Heads of the pooling."})
    steps: int = field(default=1, metadata={"help": "Retrieval steps."})
    epochs: int = field(default=30, metadata={"help": "Passes over the bags."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate of AdamW."})
    seeds: int = field(default=3, metadata={"help": "Number of draws of bags and weights."})


def fill(sets: tuple[Tensor, Tensor], bags: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bags (B,N,P) and their labels (B). Every second bag, from the first, has one signal at a random place."""
    signal_SP, other_SP = sets
    bags_BNP = other_SP[torch.randint(len(other_SP), (bags, size), generator=generator)]
    even = torch.arange(0, bags, 2)
    places, which = (torch.randint(most, even.shape, generator=generator) for most in (size, len(signal_SP)))
    bags_BNP[even, places] = signal_SP[which]
    return bags_BNP, (torch.arange(bags) % 2 == 0).float()


def instances(task: str, options: Options, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Signals and other instances, once to train and once to test.

    The images of the two differ; the bit patterns are the same.
    """
    if task == "bits":
        every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * options.bits)
        signals, others = torch.randperm(len(every), generator=generator).tensor_split([options.signals])
        return [(every[signals], every[others])] * 2
    if task != "mnist" or options.dataset is None:
        raise ValueError(f"task {task!r}: choose bits, or mnist with --dataset, the folder of its idx files.")
    sets = [read_images(options.dataset, split) for split in ("train", "test")]
    flat = [((images.flatten(1) - 0.1307) / 0.3081, labels == options.digit) for images, labels in sets]
    return [(images[chosen], images[~chosen]) for images, chosen in flat]


class Bags(nn.Module):
    """Embeds the instances, pools each bag to one vector, and classifies the vector."""

    def __init__(self, numbers: int, normalizer: str, options: Options) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(numbers, options.width), nn.ReLU(), nn.LayerNorm(options.width))
        self.pool = HopfieldPooling(options.width, heads=options.heads, normalizer=normalizer, steps=options.steps)
        self.classify = nn.Linear(options.width, 1)

    def forward(self, bags_BNP: Tensor) -> Tensor:
        """The logits (B) of bags (B,N,P)."""
        return self.classify(self.pool(self.embed(bags_BNP))).flatten()


def train(size: int, normalizer: str, seed: int, options: Options, data: list[Any]) -> tuple[float, list[float]]:
    """Train one model; its accuracy on new bags, and its mean loss in each epoch."""
    set_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    bags, labels = fill(data[0], options.bags, size, generator)
    new, wanted = fill(data[1], options.bags // 4, size, generator)
    model = Bags(bags.shape[2], normalizer, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses = torch.zeros(options.epochs)
    for epoch in range(options.epochs):
        for batch in torch.randperm(len(bags)).split(32):
            loss = F.binary_cross_entropy_with_logits(model(bags[batch]), labels[batch])
            losses[epoch] += loss.detach() * len(batch) / len(bags)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model.eval()(new) > 0) == wanted.bool()
    return right.float().mean().item(), np.round(losses.tolist(), 4).tolist()


def measure(options: Options) -> list[dict[str, Any]]:
    """One row per task, bag size and normalizer, with the accuracy and the losses of each seed."""
    rows = []
    cells = [(task, size, name) for task in options.tasks for size in options.bag_sizes for name in options.normalizers]
    sets = {task: instances(task, options, torch.Generator().manual_seed(0)) for task in options.tasks}
    for task, size, name in tqdm(cells, desc="train"):
        runs = [train(size, name, seed, options, sets[task]) for seed in range(options.seeds)]
        values, losses = zip(*runs, strict=True)
        row = {"task": task, "bag_size": size, "normalizer": name, "accuracy": values, "loss": losses}
        rows.append(row | dict(zip(("mean", "spread"), spread(values), strict=True)))
    return rows


def picture(rows: list[dict[str, Any]], options: Options) -> Figure:
    figure = Figure(figsize=(4.5 * len(options.tasks), 6), layout="constrained")
    grid = figure.subplots(2, len(options.tasks), squeeze=False)
    for task, above, below in zip(options.tasks, *grid, strict=True):
        above.set(title=task, xlabel="bag size", ylabel="accuracy")
        below.set(xlabel="epoch", ylabel=f"training loss, {options.bag_sizes[-1]} per bag", yscale="log")
        for name, style in zip(options.normalizers, cycle(STYLES), strict=False):
            chosen = [row for row in rows if (row["task"], row["normalizer"]) == (task, name)]
            bars = ([row[key] for row in chosen] for key in ("bag_size", "mean", "spread"))
            above.errorbar(*bars, label=name, ls=style)
            below.plot(range(1, options.epochs + 1), np.mean(chosen[-1]["loss"], 0), ls=style)
        above.legend(fontsize="small")
    return figure


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    rows = measure(options)
    write(rows, options, multiple_instance=picture(rows, options))
    accuracies: dict[str, list[list[float]]] = {}
    for row in rows:
        accuracies.setdefault(f"{row['task']}, {row['bag_size']} per bag", []).append(row["accuracy"])
    print(table(options.normalizers, accuracies))


if __name__ == "__main__":
    start(main)
