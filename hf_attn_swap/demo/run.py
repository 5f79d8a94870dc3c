"""Runs the demo: trains, measures and compares the models, saves the best, and reloads it in a new process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .. import __version__, describe
from ..core.registry import parse
from ..publish.results import RESULTS_FILE
from .data import load_sentences, model_source, require_packages
from .measure import Batch, Scores, evaluate, train_step_ms
from .options import CONTROL, DemoOptions
from .published import demo_result
from .reload import MODEL_FOLDER, write_check
from .report import Row, as_json, best_converted, make_rows, make_table, reading
from .train import Trained, encode, fine_tune, held_out_batches

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
    trained: dict[str, Trained] = {}
    scores: dict[str, Scores] = {}
    test = encode(sentences.test, tokenizer, options.max_length)
    for name in (CONTROL, *options.converted):
        trained[name] = fine_tune(name, source, sentences, tokenizer, options)
        batches = held_out_batches(test, tokenizer, options.batch_size, trained[name].model.device)
        scores[name] = evaluate(trained[name].model, batches, name)
        console.print(
            f"  {name}: trained in {trained[name].seconds:.0f} s, accuracy {100 * scores[name].accuracy:.1f} %"
        )
    batch = batches[len(batches) * 3 // 4]
    times = train_step_ms({name: one.model for name, one in trained.items()}, batch)
    rows = make_rows(trained, scores, times)
    console.print(make_table(rows, f"{sentences.name}, {len(sentences.train)} sentences, seed {options.seed}"))
    console.print("\n".join(reading(rows, len(sentences.test))), highlight=False)
    best = best_converted(rows).variant
    reloaded = _save_and_reload(trained[best].model, tokenizer, batch, best, options.out, console)
    if options.model is None and options.dataset is None:
        seconds = time.perf_counter() - start
        demo_result(options, rows, sentences, trained[best].model, seconds).save(
            options.out / MODEL_FOLDER / RESULTS_FILE
        )
    return _write_result(options, rows, best, describe(trained[best].model).to_dict(), reloaded, start, console)


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
        "versions": {"hf_attn_swap": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
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
