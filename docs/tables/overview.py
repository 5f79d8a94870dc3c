"""The results of conversion on one screen: a row per model and data, a column per attention, from the records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.text.table import markdown

from .conversions import EMBEDDINGS, LAYERS, NEWS, PHOTOS, SENTENCES
from .runs import has_card, link, recorded

ROOT = Path(__file__).parents[2]
COLUMNS = ("outeffhop", "belief", "modern_hopfield", "simpletron_resl")
# The studies of one model on one data set that are shown, and what they are called; then the comparisons of models that
# were converted after fine-tuning, whose record is one file.
STUDIES = {
    "smollm2-distilled": "SmolLM2-135M, WikiText-2",
    "minilm-ag-news": "MiniLM, AG News",
    "minilm-distilled-sst2": "MiniLM, SST-2",
    "minilm-distilled-cola": "MiniLM, CoLA",
    "minilm-distilled-mrpc": "MiniLM, MRPC",
    "minilm-distilled-rte": "MiniLM, RTE",
    "minilm-distilled-stsb": "MiniLM, STS-B",
    "vit-s-distilled-cifar10": "ViT-S, CIFAR-10",
    "albert-distilled-reactions": "ALBERT, reactions",
    "gpt2-distilled-imdb": "GPT-2 of bytes, IMDB",
    "opt-distilled-imdb": "OPT of bytes, IMDB",
}
COMPARED = {
    NEWS: "MiniLM, AG News, more texts",
    SENTENCES: "MiniLM, SST-2, more texts",
    PHOTOS: "ViT-S, CIFAR-10, more images",
}


def results_table() -> str:
    """The difference of each attention to its control, each with a link to its record."""
    rows = [_row(name, _of_study(study)) for study, name in STUDIES.items()]
    rows += [_row(name, _compared(record)) for record, name in COMPARED.items()]
    rows += [_row(f"MiniLM as an encoder, {texts}", _embedded(record)) for texts, record in EMBEDDINGS.items()]
    rows.append(_row("SmolLM2-135M, linear in", _layers()))
    return markdown(("model, data", *(f"`{name}`" for name in COLUMNS), "others"), rows)


def _row(name: str, cells: dict[str, str]) -> tuple[str, ...]:
    others = ", ".join(f"`{each}` {cell}" for each, cell in cells.items() if each not in COLUMNS)
    return (name, *(cells.get(each, "") for each in COLUMNS), others)


def _of_study(study: str) -> dict[str, str]:
    """By attention, the run with a card, or else the only one with the usual options."""
    runs = [run for run in recorded() if run.study == study]
    chosen = {
        run.variant: run for run in runs if run.name == f"{study}-{run.variant.replace('_', '-').replace('+', '-')}"
    }
    chosen |= {run.variant: run for run in runs if has_card(run)}
    return {variant: f"[{_gain(run)}]({link(run)})" for variant, run in chosen.items()}


def _gain(run: RunResult) -> str:
    assert run.control is not None
    ours, control = run.converted.metrics[0], run.control.metrics[0]
    return _points(100 * (ours.mean - control.mean)) if ours.higher_is_better else f"{ours.mean / control.mean:.3f} ×"


def _compared(record: Path) -> dict[str, str]:
    """By attention, the mean difference of the seeds; of several mixtures of texts, the one that loses least."""
    gains: dict[str, dict[str, list[float]]] = {}
    for run in _read(record)["runs"]:
        gain = 100 * (run["compare"]["accuracy"] - run["compare"]["stock_accuracy"])
        gains.setdefault(run["variant"], {}).setdefault(run.get("task", ""), []).append(gain)
    return {name: _linked(_points(max(map(fmean, each.values()))), record) for name, each in gains.items()}


def _embedded(record: Path) -> dict[str, str]:
    runs = _read(record)["runs"]
    return {name: _linked(_points(run["difference"]), record) for name, run in runs.items()}


def _layers() -> dict[str, str]:
    """SmolLM2 with linear attention in some layers: for each number of layers, the run that loses least."""
    best: dict[int, tuple[float, Path]] = {}
    for record in LAYERS:
        for run in _read(record)["runs"]:
            before = best.get(run["count"])
            if before is None or run["loss"] < before[0]:
                best[run["count"]] = (run["loss"], record)
    return {f"{count} layers": _linked(f"{1 + loss:.2f} ×", record) for count, (loss, record) in sorted(best.items())}


def _points(gain: float) -> str:
    return f"{round(gain, 1) + 0:+.1f}"  # + 0 makes 0 of -0


def _linked(words: str, record: Path) -> str:
    return f"[{words}]({_repository()}/blob/main/{record.relative_to(ROOT).as_posix()})"


def _repository() -> str:
    """The address that `pyproject.toml` gives."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (address,) = re.findall(r'^Repository = "([^"]+)"', text, flags=re.MULTILINE)
    return str(address)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
