"""How many images a Hopfield memory recalls from their upper half, and how much noise it stands.

    python recipes/memory.py --dataset mnist/ --sizes 10 50 100 --out memory/

OutEffHop, appendix D.2 (figures 5 and 6), which follows SparseHopfield (Hu et al., 2023). Every stored image is asked
for once, with its lower half black, or as |x + sigma noise| cut to [0, 1]. The text states no criterion of success; the
scripts it follows count a squared difference up to a threshold, 50 in Millidge et al. (2022), pixels in [0, 1]. On
MNIST even the mean of all images passes for half of them: read the errors and recall.png with it, or lower --threshold.
The data are a folder of MNIST idx files (.gz), or of parquet files named train* and test*. Writes memory.json and .png.
"""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers import HfArgumentParser

from hf_attn_swap.memory import NORMALIZERS, HopfieldRetrieval


@dataclass(kw_only=True)
class Options:
    """What to store, and how to ask for it."""

    dataset: Path = field(metadata={"help": "Folder of idx or parquet files."})
    out: Path = field(default=Path("memory"), metadata={"help": "Folder for figures and pictures."})
    column: str = field(default="img", metadata={"help": "Of the images, in parquet files."})
    normalizers: list[str] = field(default_factory=lambda: list(NORMALIZERS))
    sizes: list[int] = field(default_factory=lambda: [2, 5, 10, 20, 50, 100, 200], metadata={"help": "Images stored."})
    noises: list[float] = field(default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 1.0, 1.4], metadata={"help": "Sigmas."})
    noise_size: int = field(default=100, metadata={"help": "Images stored while the noise grows."})
    beta: float = field(default=1.0, metadata={"help": "Inverse temperature, inside the normaliser."})
    steps: int = field(default=1, metadata={"help": "Retrieval steps."})
    threshold: float = field(default=50.0, metadata={"help": "Largest squared difference of a success."})
    seeds: int = field(default=3, metadata={"help": "Draws of images and noise."})


def idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())  # two zeros, the type, the number of axes; then the axes, then the data
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(np.frombuffer(raw, ">i4", raw[3], 4))


def read_images(folder: Path, split: str, column: str = "img") -> tuple[Tensor, Tensor]:
    """Images (N,C,H,W) in [0, 1] and labels (N) of the split "train" or "test"."""
    prefix = {"train": "train", "test": "t10k"}[split]
    if (folder / f"{prefix}-images-idx3-ubyte.gz").exists():
        images, labels = (idx(folder / f"{prefix}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
        return torch.from_numpy(images[:, None] / np.float32(255)), torch.from_numpy(labels.astype(np.int64))
    files = sorted(map(str, folder.glob(f"{split}*.parquet")))
    if not files:
        raise ValueError(f"{folder} has neither {prefix}-images-idx3-ubyte.gz nor {split}*.parquet; name their folder.")
    rows = Dataset.from_parquet(files).cast_column(column, Image(mode="RGB"))
    images = np.stack([np.asarray(image, dtype=np.float32) / 255 for image in rows[column]])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(rows["label"])


def upper_half(images: Tensor) -> Tensor:
    return torch.cat([each * seen for seen, each in zip((1, 0), images.tensor_split(2, -2), strict=True)], -2)


def ask(normalizer: str, queries: Tensor, stored: Tensor, options: Options) -> Tensor:
    memory = HopfieldRetrieval(normalizer=normalizer, beta=options.beta, steps=options.steps)
    return memory(queries.flatten(1)[None], stored.flatten(1))[0].view_as(stored)


def measure(images: Tensor, options: Options) -> list[dict[str, Any]]:
    """A row per sweep, value and normaliser, with the figures of each seed."""
    rows: dict[tuple[str, float, str], dict[str, list[float]]] = {}
    for seed in tqdm(range(options.seeds), desc="seed"):
        generator = torch.Generator().manual_seed(seed)
        drawn = images[torch.randperm(len(images), generator=generator)[: max(*options.sizes, options.noise_size)]]
        asked = [("size", size, drawn[:size], upper_half(drawn[:size])) for size in options.sizes]
        some = drawn[: options.noise_size]
        noise = torch.randn(some.shape, generator=generator)
        asked += [("noise", sigma, some, (some + sigma * noise).abs().clamp(0, 1)) for sigma in options.noises]
        for (sweep, value, stored, queries), name in product(asked, options.normalizers):
            errors = (ask(name, queries, stored, options) - stored).square().flatten(1).sum(1)
            row = rows.setdefault((sweep, float(value), name), {"success": [], "error": []})
            row["success"].append((errors <= options.threshold).float().mean().item())
            row["error"].append(errors.mean().item())
    return [{"sweep": sweep, "value": value, "normalizer": name, **row} for (sweep, value, name), row in rows.items()]


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(rows: list[dict[str, Any]], options: Options) -> str:
    """Successes in percent, values down, normalisers across."""
    lines = [f"| | {' | '.join(options.normalizers)} |", "|---|" + "---|" * len(options.normalizers)]
    for sweep, value in dict.fromkeys((row["sweep"], row["value"]) for row in rows):
        found = [spread(row["success"]) for row in rows if (row["sweep"], row["value"]) == (sweep, value)]
        lines.append(f"| {sweep} {value:g} | " + " | ".join(f"{100 * m:.1f} ± {100 * s:.1f}" for m, s in found) + " |")
    return "\n".join(lines)


def curves(rows: list[dict[str, Any]], options: Options) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    for place, (measured, sweep) in enumerate(product(("success", "error"), ("size", "noise"))):
        axes = figure.add_subplot(2, 2, place + 1, xlabel=sweep, ylabel=measured)
        for name in options.normalizers:
            picked = [row for row in rows if (row["sweep"], row["normalizer"]) == (sweep, name)]
            centre, width = zip(*(spread(row[measured]) for row in picked), strict=True)
            axes.errorbar([row["value"] for row in picked], centre, width, label=name, capsize=2)
    figure.axes[0].legend(fontsize="small")
    return figure


def recall(images: Tensor, options: Options, shown: int = 8) -> Figure:
    """Images, the queries, and what each memory of `noise_size` images answers."""
    stored = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: options.noise_size]]
    names, query = ["stored", "query", *options.normalizers], upper_half(stored)
    pictures = [stored, query, *(ask(name, query, stored, options) for name in options.normalizers)]
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
    options.out.mkdir(parents=True, exist_ok=True)
    curves(rows, options).savefig(options.out / "memory.png", dpi=150)
    recall(images, options).savefig(options.out / "recall.png", dpi=150)
    print(table(rows, options))
    content = json.dumps({"options": asdict(options), "rows": rows}, indent=1, default=str)
    (options.out / "memory.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
