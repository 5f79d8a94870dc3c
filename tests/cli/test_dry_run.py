"""`convert --dry-run` and `quantize --dry-run` count what the conversion itself would train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from hf_attn_swap.conversion.trainable import choose_trainable, with_adapters
from hf_attn_swap_cli.dry_run import adapter_weights

from .conftest import Outcome

Command = Callable[..., Outcome]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_adapters_are_counted_as_peft_makes_them(tiny_bert: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    count = adapter_weights(model, 3)
    assert count == with_adapters(model, 3).num_parameters(only_trainable=True)


@pytest.mark.parametrize("words", [("convert", "belief"), ("quantize",)], ids=" ".join)
def test_weights_that_train_and_their_optimizer(
    words: tuple[str, ...], tiny_bert: Path, texts: Path, tmp_path: Path, command: Command
) -> None:
    """The counts are those of the loaded model; nothing is written."""
    name, *variant = words
    out = tmp_path / "out"
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    done = command(name, tiny_bert, *variant, out, "--data", texts, "--tokens", "5M", "--dry-run")
    assert done.code == 0, done.err
    head, _, weights, trained, _ = done.out.splitlines()
    assert head.startswith("BertForSequenceClassification")
    assert f"{model.num_parameters():,}" in weights.split()
    choose_trainable(model, "body")
    assert f"{model.num_parameters(only_trainable=True):,}" in trained.split()
    assert not list(tmp_path.glob("out*"))


def test_what_changes_the_counts(tiny_bert: Path, texts: Path, tmp_path: Path, command: Command) -> None:
    """Without a training, the weights alone; in half precision, or with little memory, adapters."""
    words = ("convert", tiny_bert, "belief", tmp_path / "out", "--data", texts, "--dry-run")
    assert len(command(*words, "--tokens", "0").out.splitlines()) == 4
    for more in (("--low-memory",), ("--dtype", "bfloat16")):
        assert "adapters of rank" in command(*words, *more).out
    assert command(*words, "--dtype", "float8").code == 2
