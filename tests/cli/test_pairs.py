"""`--column`, given twice: the model reads pairs of texts, as a classifier of paraphrases does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from .conftest import Outcome

Command = Callable[..., Outcome]
FIRST = ("the film was great", "dull", "great great film", "the dull film was the film", "was", "film dull")
SECOND = ("the plot was weak", "lovely cast", "poor", "fine", "and the cast was fine", "weak plot")
PAIRS = [(one, other) for one in FIRST for other in SECOND]
BOTH = ("--column", "one", "--column", "other")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A CSV file with two columns of texts, a class, and a column of blanks."""
    path = tmp_path / "pairs.csv"
    rows = (f"{one},{other},{row % 2},{' ' if row else 'film'}" for row, (one, other) in enumerate(PAIRS))
    path.write_text("\n".join(["one,other,class,rare", *rows]) + "\n")
    return path


def test_evaluate_reads_both_columns(command: Command, tiny_bert: Path, pairs: Path) -> None:
    where = ("evaluate", tiny_bert, "--data", pairs, "--label", "class", "--json", "--device", "cpu")
    accuracy = json.loads(command(*where, *BOTH).out)["accuracy"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert).eval()
    classes = torch.arange(len(PAIRS)) % 2
    with torch.no_grad():
        right = [
            int(model(**tokenizer(*pair, return_tensors="pt")).logits.argmax()) == int(label)
            for pair, label in zip(PAIRS, classes, strict=True)
        ]
    assert accuracy == pytest.approx(sum(right) / len(right))


def test_a_regression_has_a_rank_correlation(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    """As models of the likeness of two sentences."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=1, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        outputs = [float(model.eval()(**tokenizer(*pair, return_tensors="pt")).logits) for pair in PAIRS]
    numbers = [(row % 5) * -0.5 for row in range(len(PAIRS))]
    wanted = spearmanr(outputs, numbers).statistic
    data = tmp_path / "pairs.jsonl"
    rows = ({"one": one, "other": other, "score": score} for (one, other), score in zip(PAIRS, numbers, strict=True))
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ("--data", data, *BOTH, "--device", "cpu", "--json", "--label", "score")
    report = json.loads(command("evaluate", tmp_path / "model", *words).out)
    assert report["spearmanr"] == pytest.approx(wanted)
    beside = json.loads(command("compare", tmp_path / "model", tmp_path / "model", *words).out)
    assert (beside["correlation"], beside["loss"]) == (pytest.approx(wanted), 0.0)


@pytest.mark.parametrize(("classes", "value"), [(2, "good"), (2, 0.5), (2, -1), (1, "good"), (1, -1)])
def test_labels_of_another_kind_are_refused_before_anything_is_measured(
    command: Command, tiny_bert: Path, tmp_path: Path, classes: int, value: Any
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_bert, num_labels=classes, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": text, "label": value}) for text in FIRST))
    words = ("--data", data, "--label", "label", "--device", "cpu")
    for outcome in (
        command("evaluate", tmp_path / "model", *words),
        command("compare", tmp_path / "model", tmp_path / "model", *words),
    ):
        assert outcome.code == 2
        assert "--label label: " in outcome.err
        assert "name another column, or another --split" in outcome.err
