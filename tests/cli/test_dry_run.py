"""`convert --dry-run` and `quantize --dry-run`: the memory of the whole model from models of a few layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_attn_swap_cli import dry_run
from hf_attn_swap_cli.dry_run import GIGA, HOST, Plan

from .conftest import Outcome

Command = Callable[..., Outcome]


def plan(layers: int, peaks: dict[int, dict[str, int]]) -> Plan:
    return Plan(model="BertModel", layers=layers, weights=2_000_000, size=8_000_000, peaks=peaks)


def test_memory_grows_by_the_same_amount_with_each_layer() -> None:
    found = plan(12, {2: {HOST: 700_000_000}, 4: {HOST: 900_000_000}})
    assert found.needed(HOST) == 1_700_000_000
    table = found.table()
    assert table.summary.startswith("BertModel: 2.0 million weights, 0.01 GB.")
    assert table.header == ["GB", "2 layers", "4 layers", "all 12", "this machine has"]
    ((*row, has),) = table.rows
    assert row == [HOST, "0.70", "0.90", "1.70"]
    assert float(has) == pytest.approx(dry_run.room({})[HOST] / GIGA, abs=0.01)


def test_a_model_of_few_layers_is_measured_whole() -> None:
    assert plan(2, {2: {HOST: 5}}).needed(HOST) == 5
    assert plan(4, {2: {HOST: 5}, 4: {HOST: 7}}).needed(HOST) == 7


@pytest.fixture
def six_layers(tiny_bert: Path, tmp_path: Path) -> Path:
    """The tiny model with six layers of random weights."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    model.config.num_hidden_layers = 6
    deep = type(model)(model.config)
    for each in (deep, AutoTokenizer.from_pretrained(tiny_bert)):
        each.save_pretrained(tmp_path / "six")
    return tmp_path / "six"


@pytest.mark.parametrize(
    "words",
    [("convert", "window", "--max-loss", "2%", "--layers", "4,5", "--option", "window=3"), ("quantize",)],
    ids=" ".join,
)
def test_the_command_runs_on_models_of_fewer_layers(
    words: tuple[str, ...], six_layers: Path, texts: Path, tmp_path: Path, command: Command, monkeypatch: Any
) -> None:
    """In this process, for the sake of time: the peaks are then those of all tests."""
    seen = []

    class Here:
        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def submit(self, function: Any, given: dict[str, Any], depth: int) -> Any:
            seen.append(depth)
            peaks = function(given, depth)
            return type("Done", (), {"result": lambda self: {HOST: peaks[HOST] + depth * 1_000_000_000}})()

    monkeypatch.setattr(dry_run, "ProcessPoolExecutor", Here)
    name, *more = words
    variant = [each for each in more if each == "window"]
    rest = [each for each in more if each != "window"]
    out = tmp_path / "out"
    done = command(name, six_layers, *variant, out, "--data", texts, "--tokens", "5M", *rest, "--dry-run")
    assert done.code == 0, done.err
    assert seen == [2, 4]
    head, columns, row = done.out.splitlines()
    assert head.startswith("BertForSequenceClassification: 0.1 million weights, 0.00 GB.")
    assert "all 6" in columns
    low, high, whole, _ = (float(each) for each in row.removeprefix(HOST).split())
    assert 1.9 < high - low < 2.5
    assert whole == pytest.approx(high + (high - low), abs=0.02)
    assert not out.exists()
    assert not list(tmp_path.glob("out*"))


def test_a_model_of_fewer_layers(tmp_path: Path) -> None:
    """Of the same kind and precision, with the kinds of its first layers."""
    kinds = ["sliding_attention", "full_attention"] * 3
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=40)
    config = Qwen2Config(**sizes, num_hidden_layers=6, use_sliding_window=True, layer_types=kinds, dtype="bfloat16")
    Qwen2ForCausalLM._from_config(config).save_pretrained(tmp_path / "whole")
    given = {"model": str(tmp_path / "whole"), "task": None, "revision": None, "token": None}
    for depth in (2, 4):
        dry_run._save_shallow(given, depth, tmp_path / "few")
        model = Qwen2ForCausalLM.from_pretrained(tmp_path / "few")
        assert len(model.model.layers) == depth
        assert model.config.layer_types == kinds[:depth]
        assert model.dtype == torch.bfloat16


def test_several_processes(
    tiny_bert: Path, texts: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = command("convert", tiny_bert, "belief", tmp_path / "out", "--data", texts, "--dry-run")
    assert (done.code, done.err.count("start --dry-run in one process")) == (2, 1)


@pytest.mark.slow
def test_processes_of_their_own(six_layers: Path, texts: Path, tmp_path: Path, command: Command) -> None:
    done = command("convert", six_layers, "belief", tmp_path / "out", "--data", texts, "--tokens", "100", "--dry-run")
    assert done.code == 0, done.err
    low, high, whole, has = (float(each) for each in done.out.splitlines()[-1].removeprefix(HOST).split())
    assert 0.1 < low < 2
    assert abs(high - low) < 0.1, "the layers are tiny"
    assert has > whole


def test_a_config_without_a_number_of_layers(tiny_bert: Path, texts: Path, tmp_path: Path, command: Command) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    done = command("convert", tmp_path / "t5", "belief", tmp_path / "out", "--data", texts, "--dry-run")
    assert done.code == 2
    assert "--dry-run measures models with fewer layers" in done.err
    assert "--low-memory" in done.err


def test_an_error_of_the_small_model_is_told(tiny_bert: Path, tmp_path: Path, command: Command) -> None:
    done = command("convert", tiny_bert, "belief", tmp_path / "out", "--data", tmp_path / "no.txt", "--dry-run")
    assert done.code == 2
    assert str(tmp_path / "no.txt") in done.err
