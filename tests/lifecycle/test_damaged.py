"""Damaged, foreign, newer and hostile checkpoints raise clear errors and never load silently as stock models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_attn_swap import patch_model
from tests.contract.cells import DEEP
from tests.contract.harness import batch_of, forward, fresh, swaps
from tests.harness.damage import LEFT_OUT, WRONG, Place, drop, put, rewritten
from tests.harness.places import in_turn, turns
from tests.lifecycle.steps import same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("checkpoint")
    model = patch_model(fresh("bert", torch.float32), "outeffhop+gated", layers=[0, 1], strength=0.3)
    patch_model(model, "modern_hopfield", layers=[2]).save_pretrained(where)
    return where


def assert_refused(where: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        transformers.AutoModelForMaskedLM.from_pretrained(where)
    assert type(caught.value) is ValueError
    assert "swap" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("place", WRONG, ids=lambda place: "-".join(map(str, place)))
def test_a_wrong_value(place: Place, folder: Path, tmp_path: Path) -> None:
    """A config may come from a stranger: nothing in it is trusted or executed."""
    reason, values = WRONG[place]
    for value in values:
        where = rewritten(folder, tmp_path, put(*place, value=value))
        assert_refused(where, reason)
    with pytest.raises(ValueError, match=f"{reason}|was not patched"):
        transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(where)).eval()(
            **batch_of("bert", torch.float32)
        )
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(("place", "reason"), LEFT_OUT.items(), ids=lambda value: str(value[-1]))
def test_a_missing_entry(place: Place, reason: str, folder: Path, tmp_path: Path) -> None:
    assert_refused(rewritten(folder, tmp_path, drop(*place)), reason)


def test_without_its_block(folder: Path, tmp_path: Path) -> None:
    """Our attention is named, but nothing says what was swapped: the weights left over, or the first call, say so."""
    where = rewritten(folder, tmp_path, drop("attn_swap"))
    with pytest.raises(ValueError, match=r"attn_swap|not patched"):
        forward(transformers.AutoModelForMaskedLM.from_pretrained(where), batch_of("bert", torch.float32))


@pytest.mark.parametrize(("name", "other"), turns(DEEP, ["sdpa", "eager"]))
def test_another_attention_by_hand(name: str, other: str, tmp_path: Path) -> None:
    patch_model(fresh(name, torch.float32), "belief").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="leave that argument out"):
        type(fresh(name)).from_pretrained(tmp_path, attn_implementation=other)


@pytest.mark.parametrize("name", DEEP)
def test_no_wish_for_an_attention(name: str, tmp_path: Path) -> None:
    """Tools such as the server of transformers pass None for "no wish", to classes and to Auto classes."""
    model = patch_model(fresh(name, torch.float32), "belief")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=None)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation=None)
    batch = batch_of(name, torch.float32)
    assert same_bits(forward(again, batch), forward(model, batch))
    assert same_bits(forward(type(model).from_pretrained(tmp_path, config=config), batch), forward(model, batch))


@in_turn()
def test_weights(name: str, variant: str, tmp_path: Path) -> None:
    """One weight gone, one too many, one of another shape: each is named."""
    model, batch = patch_model(fresh(name, torch.float32), variant), batch_of(name, torch.float32)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    own = sorted(key for key in whole if ".attn_swap." in key)

    def load(state: dict[str, torch.Tensor], **arguments: Any) -> Any:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return type(model).from_pretrained(tmp_path, **arguments)

    core = next(key for key, module in model.named_modules() if getattr(module, "attn_swap", None) is swaps(model)[0])
    extra = f"{core}.attn_swap.foreign.weight"
    with pytest.raises(ValueError, match=f"unexpected weights of the swapped attention.*{extra}"):
        load({**whole, extra: torch.ones(3)})
    for key in own[:1] + own[-1:]:
        end = key.partition(".attn_swap.")[2]  # transformers may rename what leads to the module
        with pytest.raises(ValueError, match=f"missing weights of the swapped attention.*{end}"):
            load({other: value for other, value in whole.items() if other != key})
        with pytest.raises(ValueError, match=f"mismatched weights of the swapped attention.*{end}"):
            load({**whole, key: torch.ones(1, 1, 7)}, ignore_mismatched_sizes=True)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own refusal
            load({**whole, key: torch.ones(1, 1, 7)})
    assert torch.equal(forward(load(whole), batch), forward(model, batch))


@pytest.mark.parametrize("name", DEEP)
def test_weights_of_another_variant(name: str, tmp_path: Path) -> None:
    patch_model(fresh(name, torch.float32), "belief_star").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = patch_model(fresh(name, torch.float32), "gated").config.attn_swap
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_swap": other}))
    with pytest.raises(ValueError, match=r"missing weights of the swapped attention.*gated"):
        type(fresh(name)).from_pretrained(tmp_path)
