"""A recipe from end to end on a tiny model: record, card, the same again, other settings, errors before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainingArguments

import hf_attn_swap
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.training import parse
from hf_attn_swap.training.arguments import ConversionArguments, ModelArguments, TextDataArguments
from tests.harness.recipes import NO_SAVING, needs_recipes, recipe

from .conftest import options

pytestmark = needs_recipes


def test_converted_beside_its_control(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ("--variant", "simpletron_resl", "--seeds", "0", "1", "--stages", "calibrate", "distil", "fine_tune")
    grouped = ("--train_sampling_strategy", "group_by_length")
    arguments = options(tiny, tmp_path, *words, *grouped, *NO_SAVING)
    recipe("text_classification.py", arguments, monkeypatch)
    result = RunResult.load(tmp_path / "simpletron-resl" / "results.json")
    assert result.control is not None
    assert result.difference is not None
    assert (result.converted.seeds, result.control.seeds) == ((0, 1), (0, 1))
    assert result.difference.mean == pytest.approx(result.converted.metrics[0].mean - result.control.metrics[0].mean)
    assert len(result.conversion) == 4
    assert (result.study, result.steps) == (
        result.name.removesuffix("-simpletron-resl"),
        ("map", "distil"),
    )
    assert "simpletron_resl" in (tmp_path / "simpletron-resl" / "README.md").read_text()
    trained = tmp_path / "simpletron-resl" / "seed-1" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    assert "calibrated (map)" in str(hf_attn_swap.describe(model))
    assert not list(tmp_path.rglob("checkpoint-*"))
    before = (trained / "model.safetensors").stat().st_mtime_ns
    recipe("text_classification.py", arguments, monkeypatch)  # nothing is done twice
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(SystemExit, match=r"holds a run with epochs = 1\.0, not 2\.0"):
        recipe("text_classification.py", [*arguments, "--num_train_epochs", "2"], monkeypatch)
    with pytest.raises(SystemExit, match=r"holds a run with scheduler = None, not cosine"):
        recipe("text_classification.py", [*arguments, "--lr_scheduler_type", "cosine"], monkeypatch)
    assert "difference to the softmax control" in capsys.readouterr().out


@pytest.mark.slow
def test_transfer_back(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Queries, keys and values stay those that the variant learned."""
    recipe(
        "transfer_back.py",
        options(tiny, tmp_path, "--variant", "simpletron_resl", *NO_SAVING),
        monkeypatch,
    )
    by_name = {}
    for name in ("simpletron-resl", "softmax-from-simpletron-resl", "softmax"):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "seed-0" / "model")
        core = model.bert.encoder.layer[0].attention
        by_name[name] = (core.self.key.weight, core.output.dense.weight)
    key, projection = zip(*by_name.values(), strict=True)
    assert torch.equal(key[0], key[1])
    assert not torch.equal(key[1], key[2])
    assert not torch.equal(projection[0], projection[1])


def test_linear_probe(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    arguments = options(
        tiny, tmp_path, "--variant", "modern_hopfield", "--stages", '{"stage": "calibrate", "rows": 48}'
    )
    recipe("linear_probe.py", arguments, monkeypatch)
    assert "1: calibrate: accuracy" in capsys.readouterr().out
    assert (tmp_path / "probe-modern-hopfield.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text_column_names", "body"), "no column 'body'"),
        (("--dataset_name", "/nowhere"), "there is no folder '/nowhere'"),
        (
            (
                "--variant",
                "modern_hopfield",
                "--stages",
                '{"stage": "calibrate", "fit": "gain"}',
                "--options",
                '{"alpha": 1.0}',
            ),
            "drops the read-out",
        ),
    ],
)
def test_one_line(words: tuple[str, ...], message: str, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        recipe("text_classification.py", options(tiny, tmp_path, *NO_SAVING, *words), monkeypatch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--variant", "nonsense"), "unknown variant 'nonsense'"),
        (("--options", "[1]"), "--options must be a JSON object"),
        (("--seeds", "1", "1"), "seeds must be one or more, all different"),
        (("--dtype", "float8"), "dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_arguments_refused(words: tuple[str, ...], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        parse((ModelArguments,), ["--model_name_or_path", "x", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_yaml_first_options_win(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: x\nvariant: belief\nseeds: [3, 4]\nstages: [calibrate]\n")
    model, conversion = parse((ModelArguments, ConversionArguments), [str(file), "--variant", "modern_hopfield"])
    assert (model.variant, model.seeds, conversion.stages) == ("modern_hopfield", [3, 4], ["calibrate"])
    with pytest.raises(SystemExit):
        parse((ModelArguments,), [str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize("there", [False, True])
def test_without_an_accelerator_training_is_told_to_use_the_cpu(there: bool, monkeypatch: Any) -> None:
    """So that one YAML with bf16 runs on a GPU and on a CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    precision = [] if there else ["--bf16", "true"]
    (training,) = parse((TrainingArguments,), ["--output_dir", "x", *precision])
    assert training.use_cpu is not there
    (training,) = parse((TrainingArguments,), ["--output_dir", "x", "--use_cpu", "false"])
    assert not training.use_cpu, "what the user says wins"


def test_names_on_the_card(tmp_path: Path) -> None:
    """A name for the card stands for what is read from this machine only: else the card would name another set."""
    for here, named, shown in (
        ("bert-base-uncased", None, "bert-base-uncased"),
        ("bert-base-uncased", "some/other", "bert-base-uncased"),
        (str(tmp_path), None, tmp_path.name),
        (str(tmp_path), "some/other", "some/other"),
    ):
        assert ModelArguments(model_name_or_path=here, base_model_card_name=named).published_name == shown
        assert ModelArguments(model_name_or_path=here, base_model_card_name=named).on_hub is (shown != tmp_path.name)
        assert TextDataArguments(dataset_name=here, dataset_card_name=named).published_name == shown
    files = TextDataArguments(train_file="rows.csv", test_file="b.csv", dataset_card_name="some/rows")
    assert files.published_name == "some/rows"


def test_a_push_needs_a_name(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit, match="--push_to_hub needs --hub_model_id"):
        recipe("text_classification.py", options(tiny, tmp_path / "out", "--push_to_hub"), monkeypatch)
    assert not (tmp_path / "out").exists()


def test_a_misspelt_option(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse((ModelArguments,), ["--model_name_or_path", "x", "--varient", "belief"])
    assert "--varient" in capsys.readouterr().err
