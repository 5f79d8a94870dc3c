"""Shows how equal tokens become over the layers of any model, and of an untrained ViT-T of attention alone.

    python recipes/rank_collapse.py --model MODEL --data data/test.parquet --variants modern_hopfield --draw pairs.png
    python recipes/rank_collapse.py --dataset uoft-cs/cifar10 --out rank_collapse.json

With a model of texts or images (Figures 2 and 6 to 22 of the modern Hopfield paper), stock and under each variant at
strength 1: the cosines of all pairs of tokens of a row after each layer, and the entropies of all rows of weights, as a
table and as violins in one picture. A layer has a peak near 1 if one of the five bins of 0.02 above 0.9 holds more
pairs than any of the five below, and at least 1 % of all pairs lie above 0.9.

Without a model, Table 8: no MLP and no residual connection, x <- alpha x' + (1 - alpha) softmax(H) V W_o
with x' = LayerNorm(x) and H <- alpha' H + (1 - alpha') S. The recipe computes all four cells of (alpha, alpha'); the
paper prints only the two with equal values. The pictures are CIFAR-10's own 32 x 32 pixels in patches of 4; the paper
names no size for this table. Measured is the residual ratio of the tokens (docs/mathematics.md, section Diagnostics)
after each layer, on real images, for several seeds of the weights. The computation is in fp64, because the ratio cannot
fall below 2e-7 in fp32. For alpha = 0, of which the paper's theorems speak, a second table has the decay of the
residual in each layer, |Res(out)| / |Res(x')|, beside the one that Lemma D.2 allows, and the share of images that meet
its condition; a dash where all tokens are equal but for rounding.
Axes: B batch, T token, H head, D head width, E model width.
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
from as_patched import CAUSAL, rows_of
from datasets import load_dataset
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.analysis import Recording, plots, record
from hf_attn_swap.analysis.metrics import residual_ratio
from hf_attn_swap.analysis.recording import Layer
from hf_attn_swap.functional import hopfield_scores
from hf_attn_swap.text.finite import finite
from hf_attn_swap.text.table import markdown

STOCK = "stock"
WIDTH, HEADS, DEPTH, PATCH = 192, 3, 12, 4
CONDITION = 1.256  # the widest rows of scores under which the paper's Lemma D.1 is proved
ROUNDING = 1e-12  # a residual ratio below this one is rounding, and its decay says nothing
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


def size(matrix: Tensor) -> Tensor:
    """The paper's norm of the matrices of the last two axes: sqrt(largest column sum x largest row sum)."""
    return ((magnitude := matrix.abs()).sum(-2).amax(-1) * magnitude.sum(-1).amax(-1)).sqrt()


def allowed(x_BTE: Tensor, below_BHTT: Tensor, maps: list[Tensor], alpha_prime: float) -> tuple[Tensor, Tensor]:
    """The decay (B) that Lemma D.2 allows a layer, and the width (B) of the scores in its condition.

    Args:
        x_BTE: what the layer reads.
        below_BHTT: H of the layer below, scaled.
        maps: W_q, W_k, W_v (E,E), whose columns are cut into heads, and W_o (E,E), whose rows are.
        alpha_prime: the share of H.
    """
    q, k, v = (each.view(WIDTH, HEADS, -1).transpose(0, 1) for each in maps[:3])
    joined, read = q @ k.mT, v @ maps[3].view(HEADS, -1, WIDTH)
    rest, scale = (x_BTE - x_BTE.mean(1, keepdim=True)), (WIDTH // HEADS) ** -0.5
    first = (size(read) * joined.abs().sum(-2).amax(-1)).amax() * scale
    second = (size(read) * below_BHTT.abs().sum(-2).amax(-1)).amax(-1)
    uneven = (1 - alpha_prime) * scale * (rest[:, None] @ joined @ rest[:, None].mT) + alpha_prime * below_BHTT
    decay = 4 * HEADS * ((1 - alpha_prime) * first * size(rest).square() + alpha_prime * second)
    return decay, (uneven.amax(-1) - uneven.amin(-1)).amax((1, 2))


def ratios(images: Tensor, alpha: float, alpha_prime: float, seed: int) -> list[dict[str, float]]:
    """Means over images after each layer: the residual ratio, and for alpha = 0 what Lemma D.2 says of the layer."""
    generator = torch.Generator().manual_seed(seed)
    x_BTE = tokens(images, generator)
    hidden_BHTT = x_BTE.new_zeros(len(images), HEADS, x_BTE.shape[1], x_BTE.shape[1])
    means = []
    for _ in range(DEPTH):
        x_BTE = F.layer_norm(x_BTE, (WIDTH,))
        split = (*x_BTE.shape[:2], HEADS, WIDTH // HEADS)
        maps = [kaiming(WIDTH, WIDTH, generator) for _ in range(4)]
        q, k, v = ((x_BTE @ each).view(split).transpose(1, 2) for each in maps[:3])
        scores = q @ k.transpose(2, 3) * split[3] ** -0.5
        decay, width = allowed(x_BTE, hidden_BHTT, maps, alpha_prime)
        before = size(x_BTE - x_BTE.mean(1, keepdim=True))
        hidden_BHTT = hopfield_scores(scores, hidden_BHTT, alpha_prime)
        heads = (hidden_BHTT.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x_BTE = alpha * x_BTE + (1 - alpha) * heads @ maps[3]
        layer = {"ratio": residual_ratio(x_BTE).mean().item()}
        if alpha == 0:
            layer["decay"] = (size(x_BTE - x_BTE.mean(1, keepdim=True)) / before).mean().item()
            layer["allowed"] = decay.mean().item()
            layer["condition"] = (width <= CONDITION).double().mean().item()
        means.append(layer)
    return means


def measure(images: Tensor, seeds: int) -> list[dict[str, Any]]:
    """One row per cell and layer, with the geometric mean and the range over seeds."""
    rows = []
    for alpha, alpha_prime in CELLS:
        by_seed = [ratios(images, alpha, alpha_prime, seed) for seed in range(seeds)]
        for layer, found in enumerate(zip(*by_seed, strict=True), 1):
            values = [each.pop("ratio") for each in found]
            centre = statistics.geometric_mean(max(value, 1e-300) for value in values)
            row = {"alpha": alpha, "alpha_prime": alpha_prime, "layer": layer, "values": values}
            row |= {name: statistics.mean(each[name] for each in found) for name in found[0]}
            rows.append({**row, "mean": centre, "low": min(values), "high": max(values)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a row per layer and a column per cell."""
    lines = []
    for layer in range(1, DEPTH + 1):
        cells = [row for row in rows if row["layer"] == layer]
        lines.append((str(layer), *(f"{c['mean']:.2g} ({c['low']:.2g} to {c['high']:.2g})" for c in cells)))
    return markdown(("layer", *(f"α = {a:g}, α′ = {b:g}" for a, b in CELLS)), lines)


def theorem_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the decay in each layer: measured, allowed, and the share of images under the condition."""
    lines, cells = [], [cell for cell in CELLS if cell[0] == 0]
    for layer in range(1, DEPTH + 1):
        found = [row for row in rows if row["layer"] == layer and row["alpha"] == 0]
        shown = [
            f"{row['decay']:.2g}, allowed {row['allowed']:.2g} ({row['condition']:.0%})"
            if row["low"] > ROUNDING
            else "–"
            for row in found
        ]
        lines.append((str(layer), *shown))
    return markdown(("layer", *(f"decay, α = {a:g}, α′ = {b:g}" for a, b in cells)), lines)


def recorded(model: Any, rows: list[dict[str, Tensor]], variants: list[str]) -> dict[str, Recording]:
    """What each layer gives on these rows, of the model as it came and under each variant."""
    found = {}
    for name in (STOCK, *variants):
        if name != STOCK:
            patch_model(model, name)
        with record(model) as found[name], torch.no_grad():
            for row in rows:
                model(**row)
    return found


def figures(layer: Layer) -> dict[str, float | None]:
    """The figures of a layer's violins: means, the most frequent cosine, the share of pairs above 0.9, and the peak."""
    share = layer.pairs.counts / layer.pairs.counts.sum()
    middles = torch.linspace(layer.pairs.low, layer.pairs.high, 2 * len(share) + 1)[1::2]
    near, below = share[-5:], share[-10:-5]
    return {
        "cosine": statistics.mean(layer.similarity),
        "mode": float(middles[share.argmax()]),
        "near_one": float(near.sum()),
        "peak": float(middles[-5:][near.argmax()]) if near.max() > below.max() and near.sum() >= 0.01 else None,
        "entropy": finite(float(layer.entropy.value.mean())),
    }


def pairs_table(study: dict[str, list[dict[str, float | None]]]) -> str:
    """A Markdown table with a row per layer and a column per attention."""
    lines = []
    for number, cells in enumerate(zip(*study.values(), strict=True)):
        shown = []
        for cell in cells:
            peak = "" if cell["peak"] is None else f" with a peak at {cell['peak']:.2f}"
            entropy = "no entropy" if cell["entropy"] is None else f"entropy {cell['entropy']:.2f}"
            shown.append(
                f"{cell['cosine']:.2f}, mode {cell['mode']:.2f}, {cell['near_one']:.1%} above 0.9{peak}, {entropy}"
            )
        lines.append((str(number), *shown))
    return markdown(("layer", *study), lines)


def of_model(arguments: argparse.Namespace) -> None:
    """Print and write the figures of a model, and draw them."""
    classes = AutoConfig.from_pretrained(arguments.model).architectures or ()
    auto = AutoModelForCausalLM if any(name.endswith(CAUSAL) for name in classes) else AutoModel
    model = auto.from_pretrained(arguments.model, dtype=torch.float32).eval()
    found = recorded(model, rows_of(arguments, arguments.rows), arguments.variants)
    study = {name: [figures(layer) for layer in recording.in_order] for name, recording in found.items()}
    words = {"model": arguments.model, "data": Path(arguments.data).name, "rows": arguments.rows}
    arguments.out.write_text(json.dumps({**words, "layers": study}, indent=1) + "\n", encoding="utf-8")
    print(pairs_table(study))
    if arguments.draw:
        plots.spread(found).savefig(arguments.draw, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Name on the Hub, or folder; without it, Table 8 is computed.")
    parser.add_argument("--data", help="A parquet file, for a model.")
    parser.add_argument("--variants", nargs="*", default=[], help="Variants beside the stock model.")
    parser.add_argument("--length", type=int, default=256, help="Tokens per row of text.")
    parser.add_argument("--rows", type=int, default=4, help="Rows that a model reads.")
    parser.add_argument("--draw", type=Path, help="A file for the picture of a model.")
    parser.add_argument("--dataset", default="uoft-cs/cifar10", help="Name on the Hub, or folder, for Table 8.")
    parser.add_argument("--column", help="The column of texts, token ids or images; by default text, or img.")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("rank_collapse.json"))
    arguments = parser.parse_args()
    arguments.column = arguments.column or ("text" if arguments.model else "img")
    if arguments.model:
        of_model(arguments)
        return
    pictures = load_dataset(arguments.dataset, split="test").select(range(arguments.images))[arguments.column]
    arrays = np.stack([np.asarray(picture.convert("RGB"), dtype=np.float64) / 127.5 - 1 for picture in pictures])
    rows = measure(torch.from_numpy(arrays).permute(0, 3, 1, 2), arguments.seeds)
    arguments.out.write_text(json.dumps({"images": arguments.images, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(table(rows), theorem_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
