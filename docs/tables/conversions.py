"""The tables of studies of conversion, made from what their recipes and benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hf_attn_swap.text.table import markdown

from .names import canonical_label

ROOT = Path(__file__).parents[2]
CURVE = ROOT / "recipes" / "figures" / "distil-curve-stories260k.json"
CURVE_SMOLLM2 = ROOT / "recipes" / "figures" / "distil-curve-smollm2.json"
LAYERS = (
    ROOT / "recipes" / "figures" / "which-layers-smollm2-simple-resl.json",
    ROOT / "recipes" / "figures" / "which-layers-smollm2-250k.json",
    ROOT / "recipes" / "figures" / "which-layers-smollm2-all-weights-20k.json",
    ROOT / "recipes" / "figures" / "which-layers-smollm2-all-weights.json",
    ROOT / "recipes" / "figures" / "which-layers-smollm2-bf16.json",
)
EMBEDDINGS = {
    "AG News": ROOT / "recipes" / "figures" / "embeddings-minilm.json",
    "STS-B, train": ROOT / "recipes" / "figures" / "embeddings-minilm-stsb.json",
}
NEWS = ROOT / "recipes" / "figures" / "compare-minilm-ag-news.json"
SENTENCES = ROOT / "recipes" / "figures" / "compare-minilm-sst2.json"
HYBRIDS = ROOT / "recipes" / "figures" / "compare-minilm-glue-layers.json"
PHOTOS = ROOT / "recipes" / "figures" / "compare-vit-s-cifar10.json"
BUDGET = ROOT / "recipes" / "figures" / "convert-smollm2-belief.json"
DECODE = ROOT / "benchmarks" / "figures" / "bench-decode-hybrid.json"
DECODE_HEADS = ROOT / "benchmarks" / "figures" / "bench-decode-heads.json"
DECODE_WINDOW = ROOT / "benchmarks" / "figures" / "bench-decode-window.json"


def curve_table(record: Path = CURVE) -> str:
    """What a swap loses against the tokens of distillation: `recipes/distil_curve.py`."""
    runs = _read(record)["runs"]
    first: list[dict[str, float]] = next(iter(runs.values()))
    tokens = (f"{point['tokens']:,}" for point in first)
    lines = []
    for name, points in runs.items():
        cells = (f"{point['kl']:.3g} ({point['perplexity_ratio']:.3g})" for point in points)
        lines.append((f"`{canonical_label(name)}`", *cells))
    return markdown(("attention", *tokens), lines)


def layers_table() -> str:
    """Which layers to convert: `recipes/which_layers.py`."""
    lines = []
    records = [_read(path) for path in LAYERS]
    runs = [run | {"trained": _trained(record["options"])} for record in records for run in record["runs"]]
    for run in sorted(runs, key=lambda run: (run["count"], run["rule"] != "auto", run["rule"], run["tokens"])):
        layers = f"{run['count']} of {run['of']}"
        ended = (f"{1 + run['loss']:.3f}", f"{run['kl']:.3f}", f"{run['agreement']:.1%}")
        started = (run["trained"], f"{run['tokens']:,}", f"{1 + run['fitted']:,.2f}")
        lines.append((layers, run["rule"], *ended, *started))
    figures = ("perplexity, stock = 1", "KL", "same first choice", "trained", "tokens", "perplexity after the fit")
    return markdown(("linear layers", "rule", *figures), lines)


def _trained(options: dict[str, Any]) -> str:
    """What a run of `recipes/which_layers.py` trained, and how."""
    return ("adapters" if options["rank"] else "all weights") + (", --bf16" if options.get("bf16") else "")


def embeddings_table() -> str:
    """What a conversion costs sentence embeddings, by the texts that it read: `recipes/embeddings.py`."""
    lines = []
    for texts, path in EMBEDDINGS.items():
        record = _read(path)
        for variant, run in record["runs"].items():
            low, high = run["difference_95"]
            figures = (f"{value:.2f}" for value in (run["converted"], record["stock"], run["patched"]))
            difference = f"{run['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"
            lines.append((f"`{variant}`", texts, difference, *figures, f"{run['tokens']:,}"))
    return markdown(("attention", "texts", "difference [95 %]", "converted", "stock", "as patched", "tokens"), lines)


def compared_table(record: Path) -> str:
    """A fine-tuned model beside what `convert` made of it: `hf-attn-swap compare --json`, one entry per run.

    The figures are accuracies, or rank correlations x 100. A run may name its task, and the number of its layers.
    """
    runs = _read(record)["runs"]
    lines = []
    for name in dict.fromkeys(map(_attention, runs)):
        gains = []
        for run in (run for run in runs if _attention(run) == name):
            result = run["compare"]
            measure, unit = ("accuracy", "%") if "accuracy" in result else ("correlation", "")
            figures = (f"{100 * result[which]:.2f}{unit}" for which in (measure, f"stock_{measure}"))
            gains.append(100 * (result[measure] - result[f"stock_{measure}"]))
            difference = f"{gains[-1]:+.2f} ± {100 * result[f'{measure}_margin']:.2f}"
            how = f"{run['tokens']:,}" + (", --bf16" if run["bf16"] else "")
            far = f"{result['divergence']:.3f}" if "divergence" in result else "-"
            lines.append((name, f"{run['seed']}", difference, *figures, how, far))
        if len(gains) > 1:
            spread = f"{fmean(gains):+.2f}, standard deviation {stdev(gains):.2f}"
            lines.append((name, f"mean of {len(gains)}", spread, "", "", "", ""))
    header = ("attention", "seed", "difference, points (95 %)", "converted", "control", "tokens", "KL")
    return markdown(header, lines)


def _attention(run: dict[str, Any]) -> str:
    """The variant of a run; in a study of several tasks or numbers of layers, these too."""
    task = f"{run['task']}, " if "task" in run else ""
    layers = f", {run['layers']} of {run['of']} layers" if "layers" in run else ""
    return f"{task}`{run['variant']}`{layers}"


def budget_table(record: Path = BUDGET) -> str:
    """A conversion within a budget, group by group: `conversion.json` of `hf-attn-swap convert --max-loss`."""
    lines: list[list[str]] = []
    for step in _read(record)["steps"]:
        lost = step["lost"]
        loss = f"{lost['perplexity'] / lost['stock_perplexity'] - 1:+.1%}"
        if step["name"].startswith("group"):
            lines.append(
                [str(len(step["layers"])), loss, "within the budget already", f"{lost['divergence']:.3f}", "0"]
            )
        elif step["name"].startswith("distil"):
            lines[-1][2:] = [loss, f"{lost['divergence']:.3f}", f"{step['tokens']:,}"]
    header = ("layers", "loss when the group is swapped", "loss after the group's distillation", "KL", "tokens")
    return markdown(header, lines)


def decoding_table(record: Path = DECODE, name: str = "the hybrid") -> str:
    """Decoding with a swapped model beside the stock one: `benchmarks/bench_decode.py`."""
    rows = _read(record)["rows"]
    lines = []
    for stock, swapped in zip(rows[::2], rows[1::2], strict=True):
        low, high = swapped["decode_95"]
        ratio = f"{swapped['decode']:.2f} [{low:.2f}, {high:.2f}]"
        caches = (f"{row['cache_mb']:.1f} MB" for row in (stock, swapped))
        lines.append((f"{stock['context']:,}", ratio, *caches))
    return markdown(("context", "a token, stock = 1", "cache of the stock model", f"cache of {name}"), lines)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
