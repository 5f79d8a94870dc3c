"""Converts the original files of AG News, GLUE, CIFAR-10, IMDB and others into folders with the Hub's columns.

    python recipes/prepare_data.py SOURCE OUT

The folders are for machines without access to the Hub: `--dataset_name OUT/ag_news` takes the place of
`--dataset_name fancyzhx/ag_news`, and `--dataset_card_name fancyzhx/ag_news` keeps its name on the card. The script
looks in SOURCE for `ag_news/`, `glue/<task>/`, `cifar10/`, `imdb/`, `wikitext-2/` and `tinyshakespeare/`, and skips
every folder that is missing. `OUT/mixture` has text of three kinds, `OUT/kinds` further kinds too (the text files of
`--kinds`), `OUT/pairs` pairs of sentences of three tasks, `OUT/reviews` sentences about films.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset

AG_NEWS = ["World", "Sports", "Business", "Sci/Tech"]
IMDB = ["neg", "pos"]
# The columns of text, and the names of the classes; None means that the label is a number.
GLUE: dict[str, tuple[list[str], list[str] | None]] = {
    "SST-2": (["sentence"], ["negative", "positive"]),
    "CoLA": (["sentence"], ["unacceptable", "acceptable"]),
    "MRPC": (["#1 String", "#2 String"], ["not_equivalent", "equivalent"]),
    "RTE": (["sentence1", "sentence2"], ["entailment", "not_entailment"]),
    "STS-B": (["sentence1", "sentence2"], None),
}
LABELS = {"MRPC": "Quality", "STS-B": "score"}


def save(rows: list[dict[str, Any]], path: Path, label: ClassLabel | Value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features({name: label if name == "label" else Value("string") for name in rows[0]})
    Dataset.from_list(rows, features=features).to_parquet(path)
    print(f"{path}: {len(rows):,} rows")


def ag_news(source: Path, out: Path) -> None:
    """In the test file a row is class (from 1), title, description; in the training file text and class (from 0)."""
    label = ClassLabel(names=AG_NEWS)
    with (source / "test.csv").open(encoding="utf-8", newline="") as lines:
        rows = [{"text": f"{title} {body}", "label": int(kind) - 1} for kind, title, body in csv.reader(lines)]
    save(rows, out / "test.parquet", label)
    with (source / "train_subset_merged.csv").open(encoding="utf-8", newline="") as lines:
        rows = [{"text": row["text"], "label": int(row["label"])} for row in csv.DictReader(lines)]
    save(rows, out / "train.parquet", label)


def glue(source: Path, out: Path, task: str) -> None:
    """The dev file becomes the Hub's validation split. The labels of the test file are not public."""
    columns, names = GLUE[task]
    label = Value("float32") if names is None else ClassLabel(names=names)
    for file, split in (("train.tsv", "train"), ("dev.tsv", "validation")):
        rows = []
        for row in tsv(source / file, task):
            texts = [row[column] for column in columns]
            if len(texts) == 1:
                texts_of: dict[str, Any] = {"sentence": texts[0]}
            else:
                texts_of = {f"sentence{number}": text for number, text in enumerate(texts, 1)}
            rows.append({**texts_of, "label": label_of(row["label"], label)})
        save(rows, out / f"{split}.parquet", label)


def label_of(text: str, label: ClassLabel | Value) -> float | int:
    """The label of a row as a number: a score, or the number of a class that is given by number or by name."""
    if not isinstance(label, ClassLabel):
        return float(text)
    return int(text) if text.isdecimal() else label.str2int(text)


def tsv(path: Path, task: str) -> Iterator[dict[str, str]]:
    """The rows of one of GLUE's files, which has tabs and no quoting. CoLA's file has no header."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        head = ["source", "label", "star", "sentence"] if task == "CoLA" else next(reader)
        for row in reader:
            if len(row) == len(head):
                cells = dict(zip(head, row, strict=True))
                yield {**cells, "label": cells[LABELS.get(task, "label")]}


def cifar10(source: Path, out: Path) -> None:
    label = ClassLabel(names=(source / "classes.txt").read_text(encoding="utf-8").split())
    for file in sorted(source.glob("*.parquet")):
        images = load_dataset("parquet", data_files=str(file), split="train").select_columns(["img", "label"])
        images = images.cast_column("img", Image()).cast_column("label", label)
        path = out / f"{file.name.partition('_')[0]}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        images.to_parquet(path)
        print(f"{path}: {len(images):,} rows")


def imdb(source: Path, out: Path) -> None:
    """Read aclImdb*.tar.gz, which holds <split>/<class>/<name>.txt. The rows are shuffled, so that classes mix."""
    label = ClassLabel(names=IMDB)
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {"train": [], "test": []}
    (file,) = source.glob("aclImdb*.tar.gz")
    with tarfile.open(file) as archive:
        for member in archive:
            *_, split, kind, _ = ["", "", *member.name.split("/")]
            if split in rows and kind in IMDB and (text := archive.extractfile(member)):
                row = {"text": text.read().decode("utf-8"), "label": label.str2int(kind)}
                rows[split].append((member.name, row))
    for split, reviews in rows.items():
        reviews.sort(key=lambda row: row[0])
        random.Random(0).shuffle(reviews)
        save([row for _, row in reviews], out / f"{split}.parquet", label)


def wikitext(source: Path, out: Path) -> None:
    for file in sorted(source.glob("*.txt")):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        name = {"valid": "validation"}.get(file.stem, file.stem)
        save([{"text": line} for line in lines], out / f"{name}.parquet", Value("string"))


def tinyshakespeare(source: Path, out: Path) -> None:
    texts = (source / "input.txt").read_text(encoding="utf-8").split("\n\n")
    save([{"text": f"{text}\n\n"} for text in texts], out / "test.parquet", Value("string"))


def mixture(out: Path, name: str = "mixture", files: Sequence[Path] = ()) -> None:
    """Pieces of about 2,000 characters, in turn from WikiText-2 (validation), IMDB, AG News and each of the files.

    It is text to convert on. It ends with the kind of which there is least.
    """
    parts = [pieces(file.read_text(encoding="utf-8").splitlines(keepends=True), 2000) for file in files]
    for folder, split in (("wikitext-2", "validation"), ("imdb", "train"), ("ag_news", "train")):
        texts = load_dataset("parquet", data_files=str(out / folder / f"{split}.parquet"), split="train")["text"]
        parts.append(pieces(texts, 2000))
    rows = [{"text": text} for turn in zip(*parts, strict=False) for text in turn]
    save(rows, out / name / "train.parquet", Value("string"))
    shutil.copy(out / "wikitext-2" / "test.parquet", out / name / "test.parquet")


def pairs(out: Path) -> None:
    """The training pairs of MRPC, RTE and STS-B without labels, shuffled: to convert a classifier of two texts."""
    rows = []
    for task in ("mrpc", "rte", "stsb"):
        pairs_of_task = load_dataset("parquet", data_files=str(out / "glue" / task / "train.parquet"), split="train")
        rows += [{name: row[name] for name in ("sentence1", "sentence2")} for row in pairs_of_task]
    random.Random(0).shuffle(rows)
    save(rows, out / "pairs" / "train.parquet", Value("string"))


def reviews(out: Path) -> None:
    """SST-2's training texts of 8 words or more, and 60,000 sentences of IMDB's reviews: to convert its classifier."""
    shuffle = random.Random(0).shuffle
    texts = load_dataset("parquet", data_files=str(out / "imdb" / "train.parquet"), split="train")["text"]
    ends = re.compile(r"(?<=[.!?])\s+")
    sentences = [sentence.lower() for text in texts for sentence in ends.split(text.replace("<br />", " "))]
    sentences = [sentence for sentence in sentences if 5 <= len(sentence.split()) <= 40]
    shuffle(sentences)
    phrases = load_dataset("parquet", data_files=str(out / "glue" / "sst2" / "train.parquet"), split="train")
    chosen = [phrase for phrase in phrases["sentence"] if len(phrase.split()) >= 8]
    shuffle(chosen)
    chosen += sentences[:60_000]
    shuffle(chosen)
    save([{"sentence": sentence} for sentence in chosen], out / "reviews" / "train.parquet", Value("string"))


def pieces(texts: list[str], size: int) -> Iterator[str]:
    """Join texts to pieces of at least `size` characters."""
    held = ""
    for text in texts:
        held += text if text.endswith("\n") else f"{text}\n"
        if len(held) >= size:
            yield held
            held = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", type=Path, nargs="+", default=[], help="Text files, each of a further kind of text.")
    arguments = parser.parse_args()
    source, out = arguments.source, arguments.out
    for folder, prepare in (
        ("ag_news", ag_news),
        ("cifar10", cifar10),
        ("imdb", imdb),
        ("wikitext-2", wikitext),
        ("tinyshakespeare", tinyshakespeare),
    ):
        if (source / folder).is_dir():
            prepare(source / folder, out / folder)
    if all((out / folder).is_dir() for folder in ("ag_news", "imdb", "wikitext-2")):
        mixture(out)
        if arguments.kinds:
            mixture(out, "kinds", arguments.kinds)
    elif arguments.kinds:
        parser.error("--kinds are mixed with ag_news, imdb and wikitext-2; put these three folders into SOURCE.")
    for task in GLUE:
        if (source / "glue" / task).is_dir():
            glue(source / "glue" / task, out / "glue" / task.replace("-", "").lower(), task)
    if all((out / "glue" / task).is_dir() for task in ("mrpc", "rte", "stsb")):
        pairs(out)
    if (out / "imdb").is_dir() and (out / "glue" / "sst2").is_dir():
        reviews(out)


if __name__ == "__main__":
    main()
