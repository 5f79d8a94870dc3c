"""The Long Range Arena's recipe end to end on tiny data, how it reads rows, and its model of pairs."""

from __future__ import annotations

import csv
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

import hf_attn_swap
from hf_attn_swap.publish.results import RunResult
from tests.harness.recipes import RECIPES, needs_recipes, recipe

pytestmark = needs_recipes
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SCHEDULE = ("--max_steps", "3", "--lr_scheduler_type", "inverse_sqrt", "--warmup_steps", "2", "--learning_rate", "1e-2")
QUIET = ("--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--dataloader_pin_memory", "false")
WORDS = ("good", "naïve", "日本", "bad", "plot")
TASKS = ("listops", "text", "matching")


@pytest.fixture
def lra(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("lra")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per task, with a training and a held-out split."""
    folder = tmp_path_factory.mktemp("lra")
    with pytest.MonkeyPatch.context() as patch:
        bounds = ("--train", "12", "--test", "6", "--min_length", "4", "--max_length", "20")
        recipe("listops.py", [str(folder / "listops"), *bounds], patch)
    rng = random.Random(0)
    for task, columns in (("text", ["text"]), ("matching", ["text1", "text2"])):
        (folder / task).mkdir()
        for split, count in (("train", 12), ("test", 6)):
            rows = [[" ".join(rng.choices(WORDS, k=rng.randint(1, 5))) for _ in columns] for _ in range(count)]
            write(folder / task / f"{split}.csv", columns, rows)
    return folder


def write(path: Path, columns: list[str], rows: list[list[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow([*columns, "label"])
        writer.writerows([*row, index % 2] for index, row in enumerate(rows))


def options(data: Path, task: str, out: Path, *more: str) -> list[str]:
    columns = ("--text_column_names", "text1", "text2") if task == "matching" else ("--text_column_names", "text")
    return [
        *(
            "--model_name_or_path",
            "bert",
            "--task",
            task,
            "--dataset_name",
            str(data / task),
            "--dataset_card_name",
            task,
            *columns,
        ),
        *(
            "--output_dir",
            str(out),
            "--config_overrides",
            json.dumps(SIZES),
            "--max_seq_length",
            "24",
            *SCHEDULE,
            *QUIET,
        ),
        *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4", "--save_strategy", "no", *more),
    ]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_beside_its_control(task: str, data: Path, tmp_path: Path, lra: Any, monkeypatch: Any) -> None:
    recipe("lra.py", options(data, task, tmp_path, "--variant", "simpletron"), monkeypatch)
    result = RunResult.load(tmp_path / "simpletron" / "results.json")
    assert (result.base.name, result.base.relation) == ("bert", "scratch")
    assert result.difference is not None
    assert (result.budget.steps, result.budget.batch_size) == (3, 2)
    assert result.data.rows == {"train": 12, "test": 6}
    assert "base_model" not in (tmp_path / "simpletron" / "README.md").read_text(encoding="utf-8").split("---")[1]
    kind = lra.Matcher if task == "matching" else BertForSequenceClassification
    swapped, plain = (kind.from_pretrained(tmp_path / run / "seed-0" / "model") for run in ("simpletron", "softmax"))
    assert "simpletron" in str(hf_attn_swap.describe(swapped))
    assert swapped.config.vocab_size == (2 + 15 if task == "listops" else 2 + 256)
    assert swapped.config.max_position_embeddings == 24
    assert swapped.config.num_labels == (10 if task == "listops" else 2)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in swapped.named_parameters() if "attn_swap" not in name] == names
    outcome = json.loads(next((tmp_path / "simpletron" / "seed-0").glob("*.json")).read_text(encoding="utf-8"))
    assert outcome["settings"]["task"] == task


@pytest.mark.parametrize("variant", ["simpletron_resl", "outeffhop"])
def test_pairs_are_encoded_alike_and_alone(variant: str, lra: Any) -> None:
    """The head sees [a, b, a * b, a - b] of what the encoder makes of each text without padding."""
    torch.manual_seed(0)
    config = lra.scratch_config("bert", json.dumps(SIZES), vocab_size=258, type_vocab_size=1, num_labels=2)
    model = hf_attn_swap.patch_model(lra.Matcher(config).eval(), variant)
    texts = [[[1, 7, 9, 30], [1, 8]], [[1, 40, 41], [1, 40, 41]]]
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        batch = lra.collate([{"input_ids": pair, "labels": index} for index, pair in enumerate(texts)])
        result = model(**batch)
        for pair, features in zip(texts, seen[0], strict=True):
            a, b = (model.bert(torch.tensor([text])).last_hidden_state[0, 0] for text in pair)
            torch.testing.assert_close(features, torch.cat([a, b, a * b, a - b]))
    assert seen[0][1, -16:].abs().max() < 1e-6, "equal texts"
    assert result.logits.shape == (2, 2)
    torch.testing.assert_close(result.loss, torch.nn.functional.cross_entropy(result.logits, batch["labels"]))
