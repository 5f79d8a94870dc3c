"""Table 8 of the modern Hopfield paper: how fast all tokens become equal in an untrained ViT-T of attention alone.

    python recipes/rank_collapse.py --dataset uoft-cs/cifar10 --out rank_collapse.json

The network has no MLP and no residual connection: x <- alpha x' + (1 - alpha) softmax(H) V W_o with x' = LayerNorm(x)
and H <- alpha' H + (1 - alpha') S. The recipe computes all four cells of (alpha, alpha'); the paper prints only the two
with equal values. The pictures are CIFAR-10's own 32 x 32 pixels in patches of 4; the paper names no size for this
table. Measured is the residual ratio of the tokens (docs/mathematics.md, section Diagnostics) after each
layer, on real images, for several seeds of the weights. The computation is in fp64, because the ratio cannot fall below
2e-7 in fp32. Axes: B batch, T token, H head, D head width, E model width.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import Tensor

from hf_attn_swap.analysis.metrics import residual_ratio
from hf_attn_swap.functional import hopfield_scores
from hf_attn_swap.text.table import markdown

WIDTH, HEADS, DEPTH, PATCH = 192, 3, 12, 4
CELLS = ((0.0, 0.0), (0.0, 0.5), (0.5, 0.0), (0.5, 0.5))


def kaiming(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """PyTorch's default start of a linear map (Kaiming's with a = sqrt(5)): uniform in +-1 / sqrt(rows)."""
    return (2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1) * rows**-0.5


def tokens(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B,3,S,S) as tokens (B,T,E): a class token and the patches, with positions."""
    patches = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
    embedded = patches @ kaiming(patches.shape[2], WIDTH, generator)
    start = 0.02 * torch.randn(1, 1, WIDTH, generator=generator, dtype=torch.float64)
    positions = 0.02 * torch.randn(1, 1 + patches.shape[1], WIDTH, generator=generator, dtype=torch.float64)
    return torch.cat([start.expand(len(images), -1, -1), embedded], 1) + positions


def ratios(images: Tensor, alpha: float, alpha_prime: float, seed: int) -> list[float]:
    """Mean residual ratio over images after each layer."""
    generator = torch.Generator().manual_seed(seed)
    x_BTE = tokens(images, generator)
    hidden_BHTT: Tensor | float = 0.0
    means = []
    for _ in range(DEPTH):
        x_BTE = F.layer_norm(x_BTE, (WIDTH,))
        split = (*x_BTE.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = ((x_BTE @ kaiming(WIDTH, WIDTH, generator)).view(split).transpose(1, 2) for _ in range(3))
        scores = q @ k.transpose(2, 3) * split[3] ** -0.5
        hidden_BHTT = hopfield_scores(scores, hidden_BHTT, alpha_prime)
        heads = (hidden_BHTT.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x_BTE = alpha * x_BTE + (1 - alpha) * heads @ kaiming(WIDTH, WIDTH, generator)
        means.append(residual_ratio(x_BTE).mean().item())
    return means


def measure(images: Tensor, seeds: int) -> list[dict[str, Any]]:
    """One row per cell and layer, with the geometric mean and the range over seeds."""
    rows = []
    for alpha, alpha_prime in CELLS:
        by_seed = [ratios(images, alpha, alpha_prime, seed) for seed in range(seeds)]
        for layer, values in enumerate(zip(*by_seed, strict=True), 1):
            centre = statistics.geometric_mean(max(value, 1e-300) for value in values)
            row = {"alpha": alpha, "alpha_prime": alpha_prime, "layer": layer, "values": list(values)}
            rows.append({**row, "mean": centre, "low": min(values), "high": max(values)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a row per layer and a column per cell."""
    lines = []
    for layer in range(1, DEPTH + 1):
        cells = [row for row in rows if row["layer"] == layer]
        lines.append((str(layer), *(f"{c['mean']:.2g} ({c['low']:.2g} to {c['high']:.2g})" for c in cells)))
    return markdown(("layer", *(f"α = {a:g}, α′ = {b:g}" for a, b in CELLS)), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="uoft-cs/cifar10", help="Name on the Hub, or folder.")
    parser.add_argument("--column", default="img")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("rank_collapse.json"))
    arguments = parser.parse_args()
    pictures = load_dataset(arguments.dataset, split="test").select(range(arguments.images))[arguments.column]
    arrays = np.stack([np.asarray(picture.convert("RGB"), dtype=np.float64) / 127.5 - 1 for picture in pictures])
    rows = measure(torch.from_numpy(arrays).permute(0, 3, 1, 2), arguments.seeds)
    arguments.out.write_text(json.dumps({"images": arguments.images, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
