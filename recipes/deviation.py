r"""SimpleTRON's Figures 3 and 5 of any text classifier: the training loss, and the deviation of what attention reads.

    python recipes/deviation.py runs/deviation depth                      # every arm; once more goes on after a stop
    python recipes/deviation.py runs/deviation depth --arms softmax simpletron -- --max_steps 300
    python recipes/deviation.py runs/deviation depth --draw               # the table and the picture of what is there
    python recipes/deviation.py runs/listops recipes/configs/lra_listops.yaml --recipe lra --arms softmax simpletron

The configuration is one of `hf-attn-swap train text-classification`, or a YAML file of this recipe or of lra.py, which
gives the curves of Figure 2; the words behind `--` go after it.
An arm is a variant, with its options as in `simpletron_resl:skip=block`. The first step and each n-th one measure, per
layer and over the real tokens of the step's own batch, the standard deviation of the heads before W_o, and that of
q k^T v: for softmax this is (q k^T / sqrt(D)) v, the softmax left out, as the paper draws it; for linear attention it
is the heads. `deviation.json` and `deviation.png` are written into the folder of the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_attn_swap.core.call import Inputs
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap.patch import need_installation
from hf_attn_swap.publish.results import hardware, versions
from hf_attn_swap.text.table import markdown
from hf_attn_swap.text.typed import parse_options
from hf_attn_swap.training import ConversionArguments, ModelArguments, TextDataArguments, parse, run
from hf_attn_swap.wiring.install import model_root

RECIPES = {"text_classification": "hf_attn_swap.training.recipes.text_classification", "lra": "lra"}
ARMS = ("softmax", "simpletron_resl:skip=block", "simpletron", "simpletron_resl")  # those of Figures 3 and 5
CURVE, COLUMNS = "curve.json", 3
Cell = dict[str, Any]


def products(inputs: Inputs) -> Tensor:
    """The products q k^T v (B,Q,H,D) with the scaling of the model, and without softmax: a hidden key adds nothing."""
    key, value = inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    scores = inputs.query @ key.transpose(2, 3) * inputs.scaling
    allowed = inputs.masks.allowed()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, 0.0)
    return (scores @ value).transpose(1, 2)


class DeviationCallback(TrainerCallback):
    """Logs `heads_<layer>` and `products_<layer>`, and writes all that was logged beside the run at its end."""

    def __init__(self, trainer: Trainer, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.hooks = contextlib.ExitStack()
        self.mask: Tensor | None = None
        self.seen: dict[str, list[float]] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Place the hooks, if this step is measured."""
        number = state.global_step + 1
        if number == 1 or number % self.every == 0:
            root, self.seen = model_root(model), {}
            self.hooks.callback(root.register_forward_pre_hook(self.start, with_kwargs=True).remove)
            for place, layer in enumerate(need_installation(root).layers()):
                hook = functools.partial(self.read, place)
                self.hooks.callback(layer.swap.register_forward_hook(hook).remove)

    def start(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note which tokens are real."""
        self.mask = kwargs.get("attention_mask")

    @torch.no_grad()
    def read(self, place: int, swap: Swap, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        """Note both deviations of a layer over the real tokens of a batch."""
        heads = output[0]
        found = {"heads": heads, "products": heads if swap.replaces else products(args[0])}
        for name, tensor in found.items():
            real = tensor if self.mask is None else tensor[self.mask.bool()]
            self.seen.setdefault(f"{name}_{place}", []).append(float(real.float().std()))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the hooks, and log what they saw."""
        self.hooks.close()
        if self.seen:
            due = control.should_log  # this log is beside those of the loss
            self.trainer.log({name: sum(values) / len(values) for name, values in self.seen.items()})
            control.should_log, self.seen = due, {}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the curves."""
        self.hooks.close()
        history = state.log_history
        layers = range(sum(name.startswith("heads_") for name in next(e for e in history if "heads_0" in e)))
        curve: Cell = {"losses": [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]}
        for name in ("heads", "products"):
            curve[name] = [(e["step"], *(e[f"{name}_{place}"] for place in layers)) for e in history if "heads_0" in e]
        (Path(str(args.output_dir)) / CURVE).write_text(json.dumps(curve) + "\n", encoding="utf-8")


def cell(out: Path, config: str, recipe: str, arm: str, seed: int, every: int, words: list[str]) -> Cell:
    """Train one arm with one seed, or find it, and return its curves and its metrics."""
    module = importlib.import_module(RECIPES[recipe])
    variant, *pairs = arm.split(":")
    options = json.dumps(parse_options(pairs, composed="+" in variant))
    own = ["--output_dir", str(out), "--variant", variant, "--options", options, "--label", label(arm)]
    classes = (ModelArguments, TextDataArguments, ConversionArguments, module.RecipeArguments, TrainingArguments)
    ships = recipe if recipe == "text_classification" else None
    model, data, conversion, its, training = parse(classes, [config, *words, *own, "--seeds", str(seed)], recipe=ships)
    task = module.build_task(model, data, its)
    task = replace(task, callbacks=(functools.partial(DeviationCallback, every=every),))
    outcome = run(task, model, conversion, training, seed)
    folder = out / model.run_name / f"seed-{seed}"
    result = {
        "arm": arm,
        "seed": seed,
        "steps": outcome.steps,
        "rows": outcome.rows,
        "made": outcome.conversion,
        "metrics": outcome.metrics,
        "seconds": outcome.wall_seconds,
        "hardware": hardware(training),
        "versions": versions(),
        **json.loads((folder / CURVE).read_text(encoding="utf-8")),
    }
    (folder / "cell.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def label(arm: str) -> str:
    """The name of an arm's folder."""
    return arm.replace(":", "-").replace("=", "-").replace("+", "-").replace("_", "-")


def found(out: Path, arms: list[str], seed: int) -> list[Cell]:
    """The arms that are there."""
    paths = [out / label(arm) / f"seed-{seed}" / "cell.json" for arm in arms]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def table(cells: list[Cell]) -> str:
    """A row per arm: metric, last loss, and the deviation of q k^T v in the first and the last layer over training."""
    rows = []
    for each in cells:
        name, value = next(iter(each["metrics"].items()))
        first, last = each["products"][0], each["products"][-1]
        ends = [f"{first[place]:.3g} to {last[place]:.3g}" for place in (1, -1)]
        rows.append((f"`{each['arm']}`", f"{name} {value:.4f}", f"{each['losses'][-1][1]:.3f}", *ends))
    return markdown(("attention", "held out", "last loss", "deviation, first layer", "deviation, last layer"), rows)


def draw(cells: list[Cell]) -> Figure:
    """The training losses, and a panel per layer: q k^T v as lines, and the heads of softmax as a dotted line."""
    layers = len(cells[0]["heads"][0]) - 1
    rows = math.ceil((layers + 1) / COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for number, each in enumerate(cells):
        colour = f"C{number}"
        panels[0].plot(*zip(*each["losses"], strict=True), color=colour, label=each["arm"], lw=1)
        for place in range(1, layers + 1):
            steps = [point[0] for point in each["products"]]
            for name, style in (("heads", ":"), ("products", "-")):
                panels[place].plot(steps, [point[place] for point in each[name]], style, color=colour, lw=1)
            panels[place].set(title=f"block {place}", yscale="log")
    panels[0].set(title="training loss")
    panels[0].legend(fontsize=6)
    for panel in panels[layers + 1 :]:
        panel.remove()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Folder of the runs.")
    parser.add_argument("config", help="A configuration of text classification, or a YAML file.")
    parser.add_argument("--recipe", choices=RECIPES, default="text_classification")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="Steps between two points of a curve.")
    parser.add_argument("--draw", action="store_true", help="Run no arm.")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, words = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    transformers.utils.logging.set_verbosity_error()
    for arm in [] if given.draw else given.arms:
        cell(given.out, given.config, given.recipe, arm, given.seed, given.every, words)
        gc.collect()
    cells = found(given.out, given.arms, given.seed)
    if not cells:
        sys.exit(f"error: there are no results in {given.out}.")
    (given.out / "deviation.json").write_text(json.dumps(cells) + "\n", encoding="utf-8")
    print(table(cells))
    draw(cells).savefig(given.out / "deviation.png", dpi=90)


if __name__ == "__main__":
    main()
