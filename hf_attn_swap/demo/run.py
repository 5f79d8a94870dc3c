"""Runs the demo: trains, measures and compares the models, saves the best, and reloads it in a new process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .. import describe
from ..core.registry import parse
from ..publish.results import RESULTS_FILE, versions
from ..training import Outcome
from .data import load_sentences, model_source, require_packages
from .measure import Batch, train_step_ms
from .options import CONTROL, DemoOptions
from .published import demo_result
from .reload import MODEL_FOLDER, write_check
from .report import Row, as_json, best_converted, make_rows, make_table, reading
from .train import Setup, set_up

RESULT_FILE = "demo.json"


def run_demo(options: DemoOptions, console: Console | None = None) -> dict[str, Any]:
    """Train the control and every variant in the same way, print the table, save and reload the best converted model.

    Returns:
        The content of `demo.json`: the settings, one row per model, and the outcome of the reload.

    Raises:
        ImportError: a package is missing; the message names the extra to install.
        ValueError: a variant is unknown, the data set does not fit, or the folder is not an earlier demo's.
        RuntimeError: the reloaded model gives other logits.
    """
    console = console or _console()
    start = time.perf_counter()
    require_packages(options)
    for name in options.converted:
        parse(name)
    sentences = load_sentences(options)
    source = model_source(options)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    _prepare_folder(options.out)
    console.print(_headline(options, sentences.name))
    with tempfile.TemporaryDirectory() as folder:
        setup = set_up(options, sentences, tokenizer, source, Path(folder))
        outcomes = _train_all(setup, console)
        models = {name: setup.trained(name) for name in outcomes}
        batch = setup.batch()
        rows = make_rows(outcomes, train_step_ms(models, batch))
        best = best_converted(rows)
        console.print(make_table(rows, f"{sentences.name}, {len(sentences.train)} sentences, seed {options.seed}"))
        console.print("\n".join(reading(rows, len(sentences.test))), highlight=False)
        reloaded = _save_and_reload(models[best.variant], tokenizer, batch, best.variant, options.out, console)
        if options.model is None and options.dataset is None:
            result = demo_result(setup, best, outcomes[best.variant], outcomes[CONTROL])
            result.save(options.out / MODEL_FOLDER / RESULTS_FILE)
    description = describe(models[best.variant]).to_dict()
    return _write_result(options, rows, best.variant, description, reloaded, start, console)


def _train_all(setup: Setup, console: Console) -> dict[str, Outcome]:
    """The control and every variant, trained and measured alike."""
    outcomes: dict[str, Outcome] = {}
    for name in (CONTROL, *setup.options.converted):
        outcomes[name] = outcome = setup.fine_tune(name)
        accuracy = 100 * outcome.metrics["accuracy"]
        console.print(f"  {name}: trained and measured in {outcome.wall_seconds:.0f} s, accuracy {accuracy:.1f} %")
    return outcomes


def _headline(options: DemoOptions, data: str) -> str:
    return (
        f"{options.model or 'all-MiniLM-L6-v2'} on {data}: {1 + len(options.converted)} models, each one pass over "
        f"{options.train_size} sentences, strength 0 to 1 over the first {100 * options.ramp:.0f} % of the steps"
    )


def _prepare_folder(out: Path) -> None:
    """Make the folder, or remove an earlier demo's files from it. A folder with any other content is an error."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / RESULT_FILE).exists())):
        raise ValueError(f"{out} exists and is not the result of an earlier demo; name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT_FILE).write_text("{}\n", encoding="utf-8")
    shutil.rmtree(out / MODEL_FOLDER, ignore_errors=True)


def _save_and_reload(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Batch,
    name: str,
    out: Path,
    console: Console,
) -> dict[str, Any]:
    """Save as safetensors, load in a fresh process with a plain AutoModel, and compare the logits."""
    write_check(model, batch, out)
    model.save_pretrained(out / MODEL_FOLDER)
    tokenizer.save_pretrained(out / MODEL_FOLDER)
    console.print(f"Saved the best converted model, {name}, in {out / MODEL_FOLDER}; reloading it in a fresh process")
    done = subprocess.run(
        [sys.executable, "-m", "hf_attn_swap.demo.reload", str(out)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Reloading {out / MODEL_FOLDER} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # Batch and machine are the same. Only another number of threads could round differently.
    if outcome["max_difference"] > 1e-5:
        raise RuntimeError(
            f"The reloaded model's logits differ by {outcome['max_difference']:.1e} from the saved one's."
        )
    exact = "bit for bit" if outcome["equal"] else f"to {outcome['max_difference']:.0e}"
    console.print(f"{outcome['class']}: all {outcome['logits']} logits equal {exact}")
    return outcome


def _write_result(
    options: DemoOptions,
    rows: Sequence[Row],
    best: str,
    description: dict[str, Any],
    reloaded: dict[str, Any],
    start: float,
    console: Console,
) -> dict[str, Any]:
    result = {
        "settings": {**asdict(options), "out": str(options.out)},
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "rows": as_json(rows),
        "best_converted": best,
        "description": description,
        "reload": reloaded,
        "seconds": round(time.perf_counter() - start, 1),
    }
    (options.out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"All figures are in {options.out / RESULT_FILE}; the demo took {result['seconds']:.0f} s")
    return result


def _console() -> Console:
    """A console as wide as the terminal, or wide enough for the table in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
