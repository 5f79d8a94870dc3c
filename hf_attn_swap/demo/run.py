"""Runs the demo: fine-tunes the control, converts it to each attention, saves one of the models, and loads it again."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import patch_model
from ..conversion.convert import convert
from ..layer.registry import parse
from ..publish.results import versions
from ..training import Outcome
from ..writing import check_writable, saved_whole, told_where
from .control import Bench
from .data import load_sentences, model_source, require_packages
from .options import DemoOptions
from .report import Row, make_row, make_table

MODEL_FOLDER, RESULT_FILE = "model", "demo.json"
NEARLY = 1e-5  # logits of the same model on the same batches: another kernel may round differently


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Fine-tune the control, convert it to every variant without labels, measure all, and print the table.

    Returns:
        The content of `demo.json`: the settings, one row per variant, and the outcome of the reload.

    Raises:
        ImportError: a package is missing; the message names the extra to install.
        ValueError: a variant is unknown, the data set does not fit, or the folder is not an earlier demo's.
        RuntimeError: the reloaded model gives other logits.
    """
    start = time.perf_counter()
    require_packages(options)
    for name in options.variants:
        parse(name)
    sentences = load_sentences(options)
    check_writable(options.out)
    source = model_source(options)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    _prepare_folder(options.out)
    print(f"{options.model or 'all-MiniLM-L6-v2'}, {sentences.name}: {options.test_size:,} sentences are held out")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options=options, sentences=sentences, source=source, tokenizer=tokenizer, folder=Path(folder))
        control, outcome = bench.fine_tune()
        accuracy = 100 * outcome.metrics["accuracy"]
        print(
            f"control: fine-tuned on {options.train_size:,} labelled sentences with its own attention, "
            f"accuracy {accuracy:.1f} %, {outcome.wall_seconds:.0f} s"
        )
        rows, reloaded = [], {}
        for variant in options.variants:
            row, model, logits = _converted(bench, control, outcome, variant)
            rows.append(row)
            print(
                f"{variant}: converted without labels, accuracy {100 * row.patched:.1f} % as patched, "
                f"{100 * row.converted:.1f} % converted, {row.seconds:.0f} s"
            )
            if variant == options.variants[0]:
                reloaded = save_and_reload(bench, model, logits)
    return _finish(options, sentences.name, rows, reloaded, start)


def _converted(
    bench: Bench, control: PreTrainedModel, outcome: Outcome, variant: str
) -> tuple[Row, PreTrainedModel, Tensor]:
    """Convert a copy of the control. Returns its measurements, the converted model, and its logits."""
    options = bench.options
    patched = bench.logits(patch_model(copy.deepcopy(control), variant), f"{variant}, as patched")
    start = time.perf_counter()
    model = copy.deepcopy(control)
    report = convert(
        model,
        variant,
        bench.sentences.texts,
        processor=bench.tokenizer,
        tokens=options.tokens,
        max_loss=options.max_loss,
        length=options.max_length,
    )
    seconds = time.perf_counter() - start
    logits = bench.logits(model, f"{variant}, converted")
    return make_row(patched, logits, outcome, report, seconds), model, logits


def _prepare_folder(out: Path) -> None:
    """Make the folder, or remove an earlier demo's files from it. A folder with any other content is an error."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / RESULT_FILE).exists())):
        raise ValueError(f"{out} exists and is not the result of an earlier demo; name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT_FILE).write_text("{}\n", encoding="utf-8")
    shutil.rmtree(out / MODEL_FOLDER, ignore_errors=True)


def save_and_reload(bench: Bench, model: PreTrainedModel, logits: Tensor) -> dict[str, Any]:
    """Save the model, load it by a plain AutoModel class, and compare the logits of all held-out sentences."""
    folder = bench.options.out / MODEL_FOLDER
    with told_where(folder), saved_whole(folder) as part:
        model.save_pretrained(part)
        bench.tokenizer.save_pretrained(part)
    again = AutoModelForSequenceClassification.from_pretrained(folder)
    found = bench.logits(again, "reloaded")
    difference = float((found - logits).abs().max())
    if difference > NEARLY:
        raise RuntimeError(f"The logits of the model in {folder} differ by {difference:.1e} from the saved one's.")
    exact = "bit for bit" if difference == 0 else f"to {difference:.0e}"
    print(f"  saved in {folder} and loaded again as {type(again).__name__}: {found.numel():,} logits equal {exact}")
    return {"class": type(again).__name__, "logits": found.numel(), "max_difference": difference}


def _finish(
    options: DemoOptions, data: str, rows: Sequence[Row], reloaded: dict[str, Any], start: float
) -> dict[str, Any]:
    """Write `demo.json`, and print the table as the last lines."""
    result = {
        "settings": {**asdict(options), "out": str(options.out)},
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) for row in rows],
        "reload": reloaded,
        "seconds": round(time.perf_counter() - start, 1),
    }
    (options.out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"All figures are in {options.out / RESULT_FILE}; the demo took {result['seconds']:.0f} s\n")
    summary = (
        f"Accuracy in % on {options.test_size:,} held-out sentences of {data}, each attention\n"
        f"converted without labels by at most {options.tokens:,} tokens. The interval of\n"
        "converted minus control covers the choice of these sentences alone."
    )
    print(make_table(rows, summary).text())
    return result
