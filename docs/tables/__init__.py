"""The tables of the documentation, made from what they are about. `docs/hooks.py` puts them into the pages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.text.table import markdown

from .conversions import (
    CURVE_SMOLLM2,
    DECODE_HEADS,
    DECODE_WINDOW,
    HYBRIDS,
    NEWS,
    PHOTOS,
    SENTENCES,
    budget_table,
    compared_table,
    curve_table,
    decoding_table,
    embeddings_table,
    layers_table,
)
from .eight_bits import eight_bits_table, largest_table
from .engines import engines_table
from .first_screen import first_screen_table
from .memory import bags_table, recall_table
from .names import canonical_label
from .outliers import penalty_table, scratch_outliers_table
from .overview import results_table
from .papers import claims_table, coverage_table
from .runs import (
    conversion_table,
    minutes_table,
    perplexities_table,
    published_table,
    recorded,
    scratch_table,
    tasks_table,
)
from .simpletron import depth_table, deviation_table
from .speed import (
    compile_table,
    lra_table,
    operator_table,
    serving_table,
    small_llama_table,
    speed_table,
    weighted_table,
    window_table,
)
from .stanhop import simple_table, stanhop_table

FIGURES = Path(__file__).parents[2] / "recipes" / "figures"
MEASURED = Path(__file__).parents[2] / "benchmarks" / "figures"
ROUNDING = 1e-12  # a residual ratio below this one is rounding
SHOWN_LAYERS = (1, 2, 3, 4, 8, 12)


def variants_table() -> str:
    """One Markdown row per registered variant."""
    rows = []
    for name in list_variants():
        cls = get_variant(name)
        about = cls.about
        options = ", ".join(f"`{field.name}={field.default!r}`" for field in dataclasses.fields(cls.Options))
        formula = f"`{about.formula}`"
        rows.append(
            (
                f"`{name}`",
                about.summary,
                formula,
                options or "–",
                about.parameters_added,
                about.fused,
                about.paper,
            )
        )
    header = ("name", "what changes", "formula", "options", "extra parameters", "fused form", "paper")
    return markdown(header, rows)


def rank_table() -> str:
    """The residual ratio after some layers, for each cell of (alpha, alpha')."""
    rows = json.loads((FIGURES / "rank_collapse.json").read_text("utf-8"))["rows"]
    cells = sorted({(row["alpha"], row["alpha_prime"]) for row in rows})
    lines = []
    for layer in SHOWN_LAYERS:
        by_name = {(row["alpha"], row["alpha_prime"]): row for row in rows if row["layer"] == layer}
        shown = [f"{by_name[c]['mean']:.2g} ({by_name[c]['low']:.2g} to {by_name[c]['high']:.2g})" for c in cells]
        lines.append((str(layer), *shown))
    return markdown(("layer", *(f"α = {a:g}, α′ = {b:g}" for a, b in cells)), lines)


def allowed_table() -> str:
    """The decay of the residual in a layer for alpha = 0: measured, allowed, and the share under the condition."""
    rows = json.loads((FIGURES / "rank_collapse.json").read_text("utf-8"))["rows"]
    found = [row for row in rows if row["alpha"] == 0]
    lines = []
    for layer in range(1, max(row["layer"] for row in found if row["low"] > ROUNDING) + 1):
        cells: list[str] = []
        for row in sorted((row for row in found if row["layer"] == layer), key=lambda row: row["alpha_prime"]):
            allowed = float(f"{row['allowed']:.2g}")
            told = (f"{row['decay']:.2g}", f"{allowed:,.0f}", f"{row['condition']:.0%}")
            cells += told if row["low"] > ROUNDING else ("–", "–", "–")
        lines.append((str(layer), *cells))
    header = ("decay", "allowed", "under the condition")
    return markdown(("layer", *(f"{words}, α′ = {share}" for share in ("0", "0.5") for words in header)), lines)


def pairs_table() -> str:
    """One row per model and attention of every file that `recipes/rank_collapse.py --model` wrote."""
    rows = []
    for path in sorted(FIGURES.glob("pairs-*.json")):
        study = json.loads(path.read_text("utf-8"))
        for name, layers in study["layers"].items():
            figures = ("near_one", "cosine", "entropy")
            shares, cosines, entropies = ([layer[figure] for layer in layers] for figure in figures)
            rows.append(
                (
                    study["model"],
                    canonical_label(name) if name != "stock" else name,
                    f"{cosines[0]:.2f}, {max(cosines[:-1]):.2f}, {cosines[-1]:.2f}",
                    _peaks(layers),
                    f"{max(shares):.1%} (layer {shares.index(max(shares))})",
                    f"{min(entropies):.2f} to {max(entropies):.2f}",
                )
            )
    header = ("model", "attention", "mean cosine: first layer, highest, last", "layers with a peak near 1")
    return markdown((*header, "most pairs above 0.9", "mean entropy of a layer"), rows)


def _peaks(layers: list[dict[str, float | None]]) -> str:
    """Which layers have a peak near 1, and where it lies."""
    found = [(number, layer["peak"]) for number, layer in enumerate(layers) if layer["peak"] is not None]
    if not found:
        return "none"
    numbers, places = zip(*found, strict=True)
    between = f"{min(places):.2f} to {max(places):.2f}" if min(places) < max(places) else f"{places[0]:.2f}"
    return f"{len(found)} of {len(layers)}: {numbers[0]} to {numbers[-1]}, at {between}"


def outlier_table() -> str:
    """One row per model of every file that `recipes/outliers.py` wrote."""
    rows = []
    for path in sorted(FIGURES.glob("outliers-*.json")):
        study = json.loads(path.read_text("utf-8"))
        name, unit = study["metric"], 1 if study["metric"] == "perplexity" else 100
        where = f"{study['model'].split('/')[-1]}, {study['data'].split('/')[-1]}"
        for run, row in study["runs"].items():
            integer = f"{unit * row['int8_dynamic']:.2f}" if "int8_dynamic" in row else "–"
            cells = (
                where,
                f"`{canonical_label(run)}`",
                f"{row['kurtosis']:.0f}",
                f"{row['max_inf_norm']:.1f}",
                f"{unit * row[name]:.2f}",
                f"{unit * row['fake_w8a8']:.2f} ({_interval(row['fake_cost'], unit)})",
                integer,
                f"{row['similarity_first']:.2f} to {row['similarity_last']:.2f}",
                f"{row['entropy']:.2f}",
            )
            rows.append(cells)
    figures = ("kurtosis", "largest", "metric", "8 bits, static [95 %]", "torchao", "similarity", "entropy")
    return markdown(("model, data", "run", *figures), rows)


def report_table() -> str:
    """One row per model and attention of the summaries of `hf-attn-swap report`, as patched."""
    names = ("similarity_first", "similarity_last", "entropy", "sinks", "max_inf_norm")
    rows = []
    done: set[tuple[str, str]] = set()
    for path in sorted(FIGURES.glob("report-*.json")):
        study = json.loads(path.read_text("utf-8"))
        for run, row in study["summary"].items():
            if (study["model"], run) not in done:
                done.add((study["model"], run))
                where = f"{study['model']}, {study['data']} ({study['rows']} rows)"
                values = (f"{row[name]:,.4g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in names)
                rows.append((where, canonical_label(run), *values))
    figures = ("similarity, first layer", "last layer", "entropy", "on sinks", "largest activation")
    return markdown(("model, data", "attention", *figures), rows)


def cost_table() -> str:
    """Seconds of a simulation against tokens and width."""
    study = json.loads((MEASURED / "dynamics_cost.json").read_text("utf-8"))
    rows = []
    for row in study["rows"]:
        ratio = row["loop_seconds"] / row["seconds"]
        size = (str(row["tokens"]), str(row["width"]))
        rows.append((*size, f"{row['seconds']:.2f}", f"{row['loop_seconds']:.0f}", f"{ratio:.0f}"))
    return markdown(("tokens", "width", "seconds", "loop over particles", "times faster"), rows)


TABLES = {
    "variants": variants_table,
    "published": published_table,
    "minutes": minutes_table,
    "engines": engines_table,
    "conversion": conversion_table,
    "table-1": scratch_outliers_table,
    "penalty": penalty_table,
    "results": results_table,
    "scratch": scratch_table,
    "coverage": coverage_table,
    "deviation": deviation_table,
    "depth": lambda: depth_table({run.name: run for run in recorded()}),
    "papers": lambda: claims_table({run.name: run for run in recorded()}),
    "curve": curve_table,
    "curve-smollm2": lambda: curve_table(CURVE_SMOLLM2),
    "embeddings": embeddings_table,
    "news": lambda: compared_table(NEWS),
    "sst2": lambda: compared_table(SENTENCES),
    "budget": budget_table,
    "glue": lambda: tasks_table("minilm-distilled"),
    "photos": lambda: compared_table(PHOTOS),
    "glue-layers": lambda: compared_table(HYBRIDS),
    "images": lambda: tasks_table("vit-s-distilled"),
    "reactions": lambda: perplexities_table("albert-distilled-reactions"),
    "small-models": lambda: perplexities_table("gpt2-distilled-imdb", "opt-distilled-imdb"),
    "layers": layers_table,
    "hybrid": decoding_table,
    "rank": rank_table,
    "pairs": pairs_table,
    "allowed": allowed_table,
    "outliers": outlier_table,
    "eight-bits": lambda: eight_bits_table("perplexity"),
    "eight-bits-classifiers": lambda: eight_bits_table("accuracy"),
    "eight-bits-largest": largest_table,
    "reports": report_table,
    "dynamics-cost": cost_table,
    "recall": recall_table,
    "bags": bags_table,
    "stanhop": stanhop_table,
    "stanhop-simple": simple_table,
    "speed": speed_table,
    "weighted": weighted_table,
    "operator": operator_table,
    "lra": lra_table,
    "small-llama": small_llama_table,
    "window": window_table,
    "heads-decode": lambda: decoding_table(DECODE_HEADS, "the windows"),
    "window-decode": lambda: decoding_table(DECODE_WINDOW, "the windows"),
    "serving": serving_table,
    "compile": compile_table,
    "first-screen": first_screen_table,
}


def _interval(values: list[float], unit: int) -> str:
    mean, low, high = (unit * value for value in values)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
