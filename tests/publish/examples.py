"""Hand-made results, as plain data: what a results.json holds."""

from __future__ import annotations

import copy
from typing import Any

from hf_attn_swap.publish.results import RunResult

BELIEF = {"name": "belief", "formula": "Y - (<Y, V> / <V, V>) V", "paper": "BeliefFormer, eq. 10", "options": {}}
OUTEFFHOP = {
    "name": "outeffhop",
    "formula": "exp(S) / (s + sum exp(S))",
    "paper": "OutEffHop (Hu et al., 2024)",
    "options": {},
}
GATED = {
    "name": "gated",
    "formula": "g_h Y_h, g = sigmoid(G(x)) / pi_init",
    "paper": "Bondarenko et al., 2023; OutEffHop (Hu et al., 2024)",
    "options": {"kind": "linear", "pi_init": 0.25},
}


def metric(name: str, *values: float, higher: bool = True) -> dict[str, Any]:
    return {"name": name, "higher_is_better": higher, "values": list(values)}


def measured(*accuracy: float) -> dict[str, Any]:
    seeds = list(range(len(accuracy)))
    return {
        "seeds": seeds,
        "metrics": [metric("accuracy", *accuracy), metric("loss", *(1 - a for a in accuracy), higher=False)],
        "outliers": [metric("kurtosis", *(20.0 + s for s in seeds), higher=False)],
        "wall_seconds": 61.5,
    }


FULL: dict[str, Any] = {
    "version": 1,
    "name": "minilm-belief-reviews",
    "base": {
        "name": "sentence-transformers/all-MiniLM-L6-v2",
        "revision": None,
        "relation": "finetune",
        "auto_class": "AutoModelForSequenceClassification",
    },
    "modules": 6,
    "swaps": [
        {"components": [BELIEF], "layers": [0, 1, 2, 4], "strength": 1.0},
        {"components": [OUTEFFHOP, GATED], "layers": [3], "strength": 0.5},
    ],
    "parameters_added": 396,
    "conversion": ["Swapped at strength 0.", "Strength rose to 1 over the first half of the steps."],
    "task": "text-classification",
    "data": {
        "name": "cornell-movie-review-data/rotten_tomatoes",
        "config": None,
        "revision": "main",
        "rows": {"train": 1600, "test": 1000},
        "evaluated": "test",
    },
    "converted": measured(0.81, 0.83, 0.82),
    "control": measured(0.80, 0.81, 0.82),
    "difference": {"mean": 0.01, "low": -0.005, "high": 0.025, "of": "95 %, paired bootstrap over the test rows"},
    "cost": {"ratio": 1.12, "of": "median time of a training step, 16 × 64 tokens, in turns"},
    "budget": {
        "steps": 100,
        "batch_size": 16,
        "sequence_length": 64,
        "learning_rate": 1e-4,
        "optimizer": "AdamW, linear schedule, 10 % warm-up",
    },
    "versions": {"hf_attn_swap": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    "hardware": "2 CPU cores",
    "wall_seconds": 130.25,
    "intended_use": "Showing what belief attention does to a small encoder.",
    "limits": ["Short English sentences only.", "Three seeds on 1,000 sentences tell differences of 2 points."],
    "license": "apache-2.0",
    "language": ["en"],
}


def full(**changes: Any) -> dict[str, Any]:
    """All fields filled: several seeds, a control, a hybrid of two swaps, outliers, cost."""
    return {**copy.deepcopy(FULL), **changes}


def sparse(**changes: Any) -> dict[str, Any]:
    """Every optional field empty: one seed, no control, no cost, no outliers, an image model."""
    data = full(control=None, difference=None, cost=None, language=[], task="image-classification", name="vit-simple")
    data["swaps"] = [{"components": [{**BELIEF, "options": {}}], "layers": list(range(6)), "strength": 1}]
    data["converted"] = {**measured(0.5), "outliers": None}
    data["budget"] |= {"steps": 0, "learning_rate": None, "optimizer": None}
    data["data"] |= {"revision": None, "config": "plain"}
    return {**data, **changes}


def result(**changes: Any) -> RunResult:
    return RunResult.from_dict(full(**changes))
