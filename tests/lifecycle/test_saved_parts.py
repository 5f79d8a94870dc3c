"""A part of a patched model, or another head on it, saves a block of its own and loads to the same function."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_attn_swap import describe, patch_model, unpatch_model
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.layer.swap import Swap
from tests import zoo
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps
from tests.harness.places import one_per_place, turns

from .composite import CELLS, PARTS, make, out

KEYS = ("attn_swap", "attn_implementation")


def keys(config: Any) -> dict[str, Any]:
    """What a config says of a swap, in memory."""
    return {key: copy.deepcopy(config.__dict__[key]) for key in KEYS if key in config.__dict__}


def on_disk(folder: Path) -> Any:
    """The config.json in a folder."""
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("whole", "path", "variant"), CELLS)
def test_a_part_loads_to_what_ran(whole: str, path: str, variant: str, tmp_path: Path) -> None:
    model = perturb(patch_model(make(whole), variant, strength=0.7, **tiny_options(variant)))
    part = model.get_submodule(path)
    before, wanted = (keys(model.config), keys(part.config)), out(part)
    assert not torch.allclose(wanted, out(make(whole).get_submodule(path)), atol=1e-3)
    part.save_pretrained(tmp_path)
    assert (keys(model.config), keys(part.config)) == before
    loaded = type(part).from_pretrained(tmp_path)
    assert torch.equal(out(loaded), wanted)
    assert [swap.spec() for swap in swaps(loaded)] == [swap.spec() for swap in swaps(part)]
    assert torch.equal(out(part), wanted)
    unpatch_model(loaded)
    assert torch.equal(out(loaded), out(make(whole).get_submodule(path)))


@pytest.mark.parametrize(("whole", "path"), PARTS)
def test_a_part_without_a_swap_is_saved_as_stock(whole: str, path: str, tmp_path: Path) -> None:
    """Also if it shares its config with a model that has one."""
    model = make(whole)
    inside = [row.layer for row in describe(model.get_submodule(path)).rows if row.layer is not None]
    rows = [row for row in describe(model).rows if row.layer is not None and not row.module.startswith(f"{path}.")]
    assert inside
    if not rows:  # the part holds every module
        return
    patch_model(model, "belief", layers=[row.layer for row in rows])
    part = model.get_submodule(path)
    part.save_pretrained(tmp_path)
    assert not set(KEYS) & set(on_disk(tmp_path))
    loaded = type(part).from_pretrained(tmp_path)
    assert torch.allclose(out(loaded), out(part), atol=1e-4)
    assert describe(model).summary().startswith(f"{type(model).__name__}: {len(rows)} of")


@pytest.mark.parametrize(("name", "variant"), turns(["albert", "bert", "gpt2", "llama", "opt"], one_per_place()))
def test_another_head_on_a_shared_model(name: str, variant: str, tmp_path: Path) -> None:
    """Patched through one head, saved through the other."""
    head = "classification" if name in zoo.CAUSAL else "token"  # BERT for masked texts has no pooler
    one, other = fresh(name, torch.float32), zoo.build(name, head=head)
    stock = forward(copy.deepcopy(other), batch_of(name, torch.float32))
    setattr(other, other.base_model_prefix, one.base_model)
    perturb(patch_model(one, variant, strength=0.7, **tiny_options(variant)))
    batch = batch_of(name, torch.float32)
    wanted = forward(other, batch)
    other.save_pretrained(tmp_path)
    assert not keys(other.config)
    loaded = type(other).from_pretrained(tmp_path)
    assert torch.equal(forward(loaded, batch), wanted)
    assert not torch.allclose(stock, wanted, atol=1e-5)


@pytest.mark.parametrize("variant", ["belief_star", "modern_hopfield"])
def test_a_whole_with_a_part_that_was_patched_alone(variant: str, tmp_path: Path) -> None:
    """The whole is saved with a block of its own, and the part with another."""
    model = make("pair")
    perturb(patch_model(model.encoder, variant, strength=0.7, **tiny_options(variant)))
    ids = torch.arange(6, 18).view(2, 6)
    given = {"input_ids": ids, "decoder_input_ids": ids}
    wanted = forward(model, given)
    model.save_pretrained(tmp_path / "whole")
    model.encoder.save_pretrained(tmp_path / "part")
    loaded = type(model).from_pretrained(tmp_path / "whole")
    assert torch.equal(forward(loaded, given), wanted)
    assert not torch.allclose(forward(make("pair"), given), wanted, atol=1e-3)
    part = type(model.encoder).from_pretrained(tmp_path / "part")
    assert torch.equal(out(part), out(model.encoder))
    joined = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "part", tmp_path / "part")
    joined.eval().save_pretrained(tmp_path / "joined")
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "joined")
    assert torch.equal(forward(again, given), forward(joined, given))
    assert not set(KEYS) & set(on_disk(tmp_path / "joined")["encoder"])


def test_a_part_that_cannot_be_described_stops_before_anything_is_written(tmp_path: Path) -> None:
    """A swap at a place where this model alone has none that counts."""
    model, lone = patch_model(fresh("bert"), "belief"), fresh("bert")
    lone.extra = nn.ModuleList([swaps(model)[0]])
    with pytest.raises(ValueError, match=r"extra\.0 is swapped in a larger model.*save the whole model"):
        lone.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    assert isinstance(lone.extra[0], Swap)


def test_a_stock_model_beside_a_swap_that_cannot_run_our_attention(tmp_path: Path, monkeypatch: Any) -> None:
    model = make("pair")
    patch_model(model.encoder, "belief")
    monkeypatch.setattr("hf_attn_swap.saving.obstacle", lambda whole, found=None: "its softmax has attention sinks")
    with pytest.raises(ValueError, match="attention sinks; save the swapped part alone"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
