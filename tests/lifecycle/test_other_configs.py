"""A converted checkpoint loaded with a config, or another argument, that knows nothing of the swap."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps
from tests.harness.places import one_per_place, turns

from .composite import make
from .steps import auto_class


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, one_per_place()))
def test_a_stock_config_gets_the_swap_of_the_checkpoint(name: str, variant: str, tmp_path: Path) -> None:
    stock = fresh(name, torch.float32)
    model = perturb(patch_model(fresh(name, torch.float32), variant, strength=0.7, **tiny_options(variant)))
    model.save_pretrained(tmp_path / "model")
    stock.save_pretrained(tmp_path / "stock")
    batch, cls = batch_of(name, torch.float32), type(model)
    wanted = forward(model, batch)
    assert not torch.allclose(forward(stock, batch), wanted, atol=1e-5)
    auto = getattr(transformers, auto_class(model))
    read = transformers.AutoConfig.from_pretrained(tmp_path / "stock")
    made = type(stock.config)(**{k: v for k, v in stock.config.to_dict().items() if k != "model_type"})
    for config in (read, made, stock.config):
        before = copy.deepcopy(config.__dict__)
        for load in (cls.from_pretrained, auto.from_pretrained):
            assert torch.equal(forward(load(tmp_path / "model", config=config), batch), wanted)
        assert config.__dict__ == before
    with pytest.raises(ValueError, match="says nothing of it; leave config= out"):
        cls.from_pretrained(tmp_path / "model", config=str(tmp_path / "stock"))
    loaded = cls.from_pretrained(tmp_path / "model", config=str(tmp_path / "model"))
    assert torch.equal(forward(loaded, batch), wanted)
    again = cls.from_pretrained(tmp_path / "stock", config=read)
    assert not swaps(again)


def test_a_config_with_another_swap_is_refused(tmp_path: Path) -> None:
    """Another strength is not another swap: a user may set it."""
    model, other = (patch_model(fresh("bert", torch.float32), v, layers=[0, 1]) for v in ("belief", "outeffhop"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="describes another swap than the checkpoint"):
        type(model).from_pretrained(tmp_path, config=other.config)
    set_strength(model, 0.5)
    loaded = type(model).from_pretrained(tmp_path, config=model.config)
    batch = batch_of("bert", torch.float32)
    assert torch.equal(forward(loaded, batch), forward(model, batch))


@pytest.mark.parametrize("whole", ["pair", "clip", "llava"])
def test_a_stock_config_of_a_composite(whole: str, tmp_path: Path) -> None:
    model = patch_model(make(whole), "belief")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, config=make(whole).config)
    assert [swap.spec() for swap in swaps(loaded)] == [swap.spec() for swap in swaps(model)]


def test_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    model = patch_model(fresh("llama", torch.float32), "belief")
    model.save_pretrained(tmp_path)
    config = fresh("llama", torch.float32, num_hidden_layers=2).config
    with pytest.raises(ValueError, match="another number of attention modules"):
        type(model).from_pretrained(tmp_path, config=config)


def test_weights_without_a_folder(tmp_path: Path) -> None:
    """A state dict with weights of a swap is refused where the config has none."""
    model = perturb(patch_model(fresh("llama", torch.float32), "belief_star"))
    batch, weights = batch_of("llama", torch.float32), model.state_dict()
    stock = fresh("llama", torch.float32).config
    with pytest.raises(ValueError, match="unexpected weights of the swapped attention"):
        type(model).from_pretrained(None, config=stock, state_dict=weights)
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=weights)
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    built = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    built.load_state_dict(weights)
    assert torch.equal(forward(built, batch), forward(model, batch))
    with pytest.raises(RuntimeError, match="attn_swap"):
        fresh("llama", torch.float32).load_state_dict(weights)


@pytest.mark.parametrize("variant", ["belief", "gated"])
def test_a_class_of_another_model_type(variant: str, tmp_path: Path) -> None:
    """All weights would be new, and those of the swap too if it has any."""
    patch_model(fresh("llama", torch.float32), variant).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of the type 'llama'.*of the type 'bert'"):
        transformers.BertModel.from_pretrained(tmp_path)
