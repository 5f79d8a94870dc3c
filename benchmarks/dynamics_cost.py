"""Measures the seconds of 200 RK4 steps of a simulation of n tokens of width d, beside a loop over tokens.

    python benchmarks/dynamics_cost.py --figures benchmarks/figures/dynamics_cost.json

The heads are random and of width d / heads, every value matrix is the identity, and the computation is in float64. The
loop computes the softmax and the step of each token alone, as the published code does. The loop is timed over a few
evaluations, and its velocity is compared with that of the simulation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_attn_swap.dynamics import HeadMatrices, random_tokens, simulate
from hf_attn_swap.text.table import markdown

SIZES = ((25, 256), (50, 256), (100, 256), (200, 256), (400, 256), (100, 64), (100, 128), (100, 512))
STAGES = 4  # evaluations of the velocity in a step of RK4


def random_heads(count: int, width: int) -> HeadMatrices:
    """Random heads whose scores are of the order of 1 for tokens in [-5, 5]^d."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, width, width // count)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) / width for _ in range(3))
    return HeadMatrices(query=query, key=key, value=value, output=value.mT, scale=(width // count) ** -0.5)


def particle_loop(z: Tensor, heads: HeadMatrices, growth: float) -> Tensor:
    """The velocity of the tokens, computed token by token and head by head."""
    moved = torch.zeros_like(z)
    for i in range(len(z)):
        for head in range(len(heads)):
            query, key = z[i] @ heads.query[head], z @ heads.key[head]
            weights = torch.softmax(heads.scale * growth * (key @ query), 0)
            moved[i] += weights @ z
        moved[i] -= len(heads) * z[i]
    return moved


def seconds(call: Any, rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls."""
    results = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        results.append(time.perf_counter() - start)
    return min(results)


def measure(count: int, width: int, heads: int, steps: int) -> dict[str, float]:
    """One row of the table."""
    matrices, tokens = random_heads(heads, width), random_tokens(count, width)
    whole = seconds(lambda: simulate(tokens, matrices, time=0.1 * steps, step=0.1), 2)
    trajectory = simulate(tokens, matrices, time=0.1, step=0.1)
    at = torch.tensor(0.1, dtype=torch.float64)
    slow = particle_loop(trajectory.z[-1], matrices, math.exp(2 * heads * 0.1))
    assert torch.allclose(slow, trajectory.field(at, trajectory.z[-1][None])[0], atol=1e-9)
    loop = seconds(lambda: particle_loop(tokens, matrices, 1.0), 1) * steps * STAGES
    return {"tokens": count, "width": width, "heads": heads, "steps": steps, "seconds": whole, "loop_seconds": loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--figures", type=Path, default=Path("dynamics_cost.json"))
    arguments = parser.parse_args()
    rows = [measure(count, width, arguments.heads, arguments.steps) for count, width in tqdm(SIZES, desc="simulate")]
    lines = []
    for row in rows:
        ratio = row["loop_seconds"] / row["seconds"]
        size = (str(row["tokens"]), str(row["width"]))
        lines.append((*size, f"{row['seconds']:.2f}", f"{row['loop_seconds']:.0f}", f"{ratio:.0f}"))
    print(markdown(("n", "d", "seconds", "loop over particles", "ratio"), lines))
    about = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__.partition("+")[0]}
    arguments.figures.parent.mkdir(parents=True, exist_ok=True)
    arguments.figures.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
