r"""OutEffHop's Table 1 in small: BERT, OPT and ViT from random weights with six attentions; outliers and 8 bits.

    python recipes/table_1.py runs/table_1                                # every cell; once more goes on after a stop
    python recipes/table_1.py runs/table_1 --models bert --arms softmax outeffhop --seeds 0 -- --max_steps 300
    python recipes/table_1.py runs/table_1 --draw                         # the table and curves.png of what is there

A cell is a model, an attention and a seed. It is trained as its configuration says (`table_1_bert`, `table_1_opt`,
`table_1_vit`), with the words behind `--` after it, such as the names of data. Then its folder gets `results.json`:
kurtosis and largest activation over the steps and of held-out rows, and the metric in full precision and in 8 bits in
the papers' protocol. A cell that has this file is not run again, and one that was stopped goes on from its last
checkpoint. `--models bert_base` is BERT at the paper's size, for a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from matplotlib.figure import Figure
from outliers import OutlierArguments, measure
from transformers import TrainingArguments

from hf_attn_swap.analysis import OutlierCallback
from hf_attn_swap.publish.results import hardware, versions
from hf_attn_swap.text.table import markdown
from hf_attn_swap.training import (
    ConversionArguments,
    ImageDataArguments,
    ModelArguments,
    TextDataArguments,
    parse,
    run,
)

RECIPES = {
    "bert": "language_modeling",
    "opt": "language_modeling",
    "vit": "image_classification",
    "bert_base": "language_modeling",
}
ARMS = ("softmax", "outeffhop", "clipped_softmax", "outeffhop+clipped_softmax", "gated", "outeffhop+gated")
SCRATCH = {"from_scratch": False, "config_overrides": "{}"}  # the trained model is read as a pretrained one
FIGURES = ("kurtosis", "max_inf_norm", "full", "w8a8")
Cells = dict[tuple[str, str], list[dict[str, Any]]]  # the results of all seeds by model and attention


def folder_of(out: Path, model: str, arm: str, seed: int) -> Path:
    """The folder of a cell, which is that of its run."""
    return out / model / arm.replace("+", "-").replace("_", "-") / f"seed-{seed}"


def cell(out: Path, name: str, arm: str, seed: int, every: int, words: list[str]) -> dict[str, Any]:
    """Train and measure one cell, with its outliers each so many steps, and write its results."""
    recipe = importlib.import_module(f"hf_attn_swap.training.recipes.{RECIPES[name]}")
    images = RECIPES[name] == "image_classification"
    rows = ImageDataArguments if images else TextDataArguments
    classes = (ModelArguments, rows, ConversionArguments, recipe.RecipeArguments, TrainingArguments)
    own = ["--output_dir", str(out / name), "--variant", arm, "--seeds", str(seed)]
    model, data, conversion, its, training = parse(classes, [f"table_1_{name}", *words, *own], recipe=RECIPES[name])
    training.remove_unused_columns = not images
    task = recipe.build_task(model, data, its)
    task = replace(task, callbacks=(functools.partial(OutlierCallback, every=every),))
    outcome = run(task, model, conversion, training, seed)
    folder = folder_of(out, name, arm, seed)
    trained = replace(model, model_name_or_path=str(folder / "model"))
    of_text = {} if images else {"tokenizer_name": None}
    task = recipe.build_task(trained, data, replace(its, **SCRATCH, **of_text))
    figures = measure(task, training, OutlierArguments(seed_of_runs=seed, integer=False))
    metric = task.metrics[0]
    result = {
        "model": name,
        "arm": arm,
        "seed": seed,
        "metric": metric,
        "full": figures[metric],
        "w8a8": figures["fake_w8a8"],
        "kurtosis": figures["kurtosis"],
        "max_inf_norm": figures["max_inf_norm"],
        "curve": outcome.outliers,
        "steps": outcome.steps,
        "seconds": outcome.wall_seconds,
        "words": words,
        "hardware": hardware(training),
        "versions": versions(),
    }
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def read_results(out: Path, models: list[str], arms: list[str], seeds: list[int]) -> Cells:
    """The results that are there, by model and attention."""
    cells: Cells = {}
    for model in models:
        for arm in arms:
            paths = [folder_of(out, model, arm, seed) / "results.json" for seed in seeds]
            if there := [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]:
                cells[model, arm] = there
    return cells


def table(cells: Cells) -> str:
    """Table 1: means over the seeds with their standard deviations."""
    rows = []
    for (model, arm), results in cells.items():
        values = ([result[name] for result in results] for name in FIGURES)
        figures = [
            f"{statistics.mean(of_seeds):.4g}" + (f" ± {statistics.stdev(of_seeds):.2g}" if len(of_seeds) > 1 else "")
            for of_seeds in values
        ]
        rows.append((model, f"`{arm}`", *figures, str(len(results))))
    header = ("model", "attention", "kurtosis", "largest activation", "full precision", "8 bits", "seeds")
    return markdown(header, rows)


def draw(cells: Cells) -> Figure:
    """Kurtosis and largest activation over the steps: a row per model, a line per attention, its seeds as a band."""
    models = list(dict.fromkeys(model for model, _ in cells))
    figure = Figure(figsize=(10, 3.2 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), 2, squeeze=False)
    for (model, arm), results in cells.items():
        steps = [step for step, *_ in results[0]["curve"]]
        for place, title in ((1, "kurtosis"), (2, "largest activation")):
            panel = axes[models.index(model)][place - 1]
            seeds = list(zip(*([point[place] for point in result["curve"]] for result in results), strict=True))
            (line,) = panel.plot(steps, [statistics.mean(step) for step in seeds], label=arm, lw=1.2)
            panel.fill_between(steps, list(map(min, seeds)), list(map(max, seeds)), color=line.get_color(), alpha=0.15)
            panel.set(yscale="log", xlabel="step", title=f"{model}: {title}")
    axes[0][0].legend(fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Folder of the cells.")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES)[:3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=50, help="Steps between two points of a curve.")
    parser.add_argument("--draw", action="store_true", help="Run no cell.")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, words = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    transformers.utils.logging.set_verbosity_error()
    for seed in [] if given.draw else given.seeds:
        for model in given.models:
            for arm in given.arms:
                if not (folder_of(given.out, model, arm, seed) / "results.json").exists():
                    result = cell(given.out, model, arm, seed, given.every, words)
                    print(json.dumps({name: result[name] for name in ("model", "arm", "seed", *FIGURES)}), flush=True)
                    gc.collect()
    cells = read_results(given.out, given.models, given.arms, given.seeds)
    if not cells:
        sys.exit(f"error: there are no results in {given.out}.")
    print(table(cells))
    draw(cells).savefig(given.out / "curves.png", dpi=150)


if __name__ == "__main__":
    main()
