r"""Makes the figures of README's first screen again: its conversions, each measured beside the stock model.

    python recipes/first_screen.py --data wikitext/valid.txt --mixture data/mixture/train.parquet \
        --tests wikitext/test.txt shakespeare.txt --out runs/first-screen          # some hours
    make figures FIGURES="--data ... --mixture ... --tests ..."

Each conversion is the command that README and the guides name, in a process of its own. Then the models are measured
one after another: perplexity on each text of `--tests`; recall after 200 and 2,000 tokens of the first one; and what
they write, as `compare --generate` does: how far greedy texts equal those of the stock model, and the scores of three
tasks. A model whose folder is there is not converted again. The record is `first-screen.json` in `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_attn_swap.analysis import continuations, recall, tasks
from hf_attn_swap.measuring.generation import Answered, Written, agreement, score_table
from hf_attn_swap.publish.results import versions
from hf_attn_swap.text.table import markdown

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WINDOW = "--option window={} --length {} --tokens {} --dtype float32"
CONVERSIONS = {
    "8 bits": "quantize {model} {out} --data {data}",
    "long texts": "convert {model} window {out} --data {data} --heads auto --keep 0.25 " + WINDOW.format(64, 512, 7680),
    "another attention": "convert {model} belief {out} --data {mixture} --tokens 20k --dtype float32",
    "engines": "convert {model} window {out} --data {data} --layers 8-29 --fit none --target engine "
    + WINDOW.format(128, 256, 6000),
}
LENGTH = 512  # tokens of a row whose perplexity is measured


def convert(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the command of a conversion; its minutes of the clock and of the processors."""
    folder = options.out / name.replace(" ", "-")
    places = {"model": options.model, "out": folder, "data": options.data, "mixture": options.mixture}
    words = [word.format(**places) for word in CONVERSIONS[name].split()]
    if not folder.exists():
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "hf_attn_swap_cli", *words], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        minutes = {"minutes": (time.monotonic() - began) / 60, "processor_minutes": used / 60}
        (folder / "minutes.json").write_text(json.dumps(minutes), encoding="utf-8")
    kept = folder / "minutes.json"
    return {"command": " ".join(words), **(json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {})}


@torch.no_grad()
def perplexity(model: Any, rows_NL: torch.Tensor) -> float:
    """Of rows of token ids (N,L)."""
    losses = [float(model(input_ids=row_L[None], labels=row_L[None]).loss) for row_L in rows_NL]
    return math.exp(fmean(losses))


def measure(folder: str, texts: dict[str, list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (first, *_) = texts.values()
    result: dict[str, Any] = {"perplexity": {}}
    for name, ids in texts.items():
        count = min(options.rows, len(ids) // LENGTH)
        result["perplexity"][name] = perplexity(model, torch.tensor(ids[: count * LENGTH]).view(count, LENGTH))
    gains = recall(model, [first], distances=(200, 2000), passages=4)
    result["recall"] = {str(distance): gains.mean(distance) for distance in gains.gains}
    result["written"] = continuations(model, [first], tokenizer).measure(model).ids
    asked = tasks(model, [first], tokenizer, lengths=options.lengths, samples=options.samples).measure(model)
    result["scores"] = [[task, length, scores] for (task, length), scores in asked.scores.items()]
    return result


def answered(figures: dict[str, Any]) -> Answered:
    """The scores of a model, from its figures."""
    return Answered(scores={(task, length): tuple(scores) for task, length, scores in figures["scores"]})


def table(models: dict[str, dict[str, Any]]) -> str:
    """A row per conversion: perplexity and recall, stock = 1, and what it writes beside the stock model."""
    stock = models["stock"]
    lines = []
    for name, figures in models.items():
        if name == "stock":
            continue
        lost = [f"{ours / stock['perplexity'][text]:.3f} ×" for text, ours in figures["perplexity"].items()]
        kept = [f"{ours / stock['recall'][distance]:.2f} ×" for distance, ours in figures["recall"].items()]
        theirs, mine = (Written(ids=tuple(map(tuple, each["written"])), texts=()) for each in (stock, figures))
        equal, same = agreement(theirs, mine)
        scores = [
            f"{row[2]} → {row[3]} ({row[4]})"
            for row in score_table({"a": answered(stock), "b": answered(figures)}).rows
        ]
        minutes = f"{figures['processor_minutes']:.0f}" if "processor_minutes" in figures else ""
        lines.append((name, *lost, *kept, f"{fmean(equal):.0%}, {fmean(same):.0f}", *scores, minutes))
    texts = [f"perplexity, {Path(text).stem}" for text in stock["perplexity"]]
    recalls = [f"recall after {int(distance):,}" for distance in stock["recall"]]
    named = [f"`{task}`, {length:,}" for task, length, _ in stock["scores"]]
    header = ("", *texts, *recalls, "equal tokens of 64, before the first difference", *named, "processor minutes")
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="Name or folder of the stock model.")
    parser.add_argument("--data", required=True, help="File of the texts that conversions read.")
    parser.add_argument("--mixture", required=True, help="File of mixed texts, for another attention.")
    parser.add_argument("--tests", nargs="+", required=True, help="Files of texts that no conversion reads.")
    parser.add_argument("--conversions", nargs="+", choices=CONVERSIONS, default=list(CONVERSIONS))
    parser.add_argument("--rows", type=int, default=32, help=f"Rows of {LENGTH} tokens of each text.")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024], help="Tokens of a sample of the tasks.")
    parser.add_argument("--samples", type=int, default=10, help="Samples of each task and length.")
    parser.add_argument("--out", type=Path, default=Path("runs/first-screen"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {
        Path(file).parent.name: tokenizer(Path(file).read_text(encoding="utf-8"))["input_ids"] for file in options.tests
    }
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "first-screen.json"
    models: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["models"] if record.exists() else {}
    for name in tqdm(["stock", *options.conversions], desc="first screen"):
        if name in models:
            continue
        about = {} if name == "stock" else convert(name, options)
        folder = options.model if name == "stock" else str(options.out / name.replace(" ", "-"))
        models[name] = {**about, **measure(folder, texts, options)}
        about = {"model": options.model, "rows": options.rows, "length": LENGTH, "samples": options.samples}
        record.write_text(json.dumps({**about, "versions": versions(), "models": models}, indent=1) + "\n", "utf-8")
    print(table(models))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
