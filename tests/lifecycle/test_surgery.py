"""Layers that are removed, appended or copied after patching: saving says what runs, or stops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.harness import batch_of, fresh, perturb, swaps
from tests.contract.harness import forward as run
from tests.harness.one_swap import one_swap
from tests.harness.places import one_per_place, turns

LAYERS = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers", "opt": "model.decoder.layers"}
LAYERS["vit"] = "vit.layers" if hasattr(fresh("vit").vit, "layers") else "vit.encoder.layer"
CHANGES = {
    "last": lambda layers: layers[:-1],
    "first": lambda layers: layers[1:],
    "middle": lambda layers: [layers[0], layers[2]],
    "copies": lambda layers: [*layers, copy.deepcopy(layers[-1]), copy.deepcopy(layers[0])],
    "swapped": lambda layers: [layers[2], layers[1], layers[0]],
}


def change(model: Any, name: str, kind: str, *, config: bool = True, changes: Any = CHANGES) -> None:
    """Change the list of layers, and perhaps the config with it."""
    path, _, last = LAYERS[name].rpartition(".")
    holder = model.get_submodule(path)
    layers = nn.ModuleList(changes[kind](list(getattr(holder, last))))
    setattr(holder, last, layers)
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    if config:
        model.config.num_hidden_layers = len(layers)


def forward(model: Any, name: str) -> torch.Tensor:
    """The model's output without a cache, with gradients switched off."""
    return run(model, batch_of(name, torch.float32), **({} if name in ("bert", "vit") else {"use_cache": False}))


# The places and the changes take turns on both ways to hook an attention module; all families with one variant.
CELLS = [(name, variant, kind) for name in ("bert", "llama") for variant, kind in turns(one_per_place(), list(CHANGES))]
CELLS += [(name, "modern_hopfield", kind) for name, kind in turns(["gpt2", "opt", "vit"], list(CHANGES))]


@pytest.mark.parametrize(("name", "variant", "kind"), CELLS)
def test_saved_after_surgery(name: str, variant: str, kind: str, tmp_path: Path) -> None:
    model = perturb(patch_model(fresh(name, torch.float32), variant, strength=0.7, **tiny_options(variant)))
    change(model, name, kind)
    model.save_pretrained(tmp_path)
    wanted = forward(model, name)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(forward(loaded, name), wanted)
    assert len(swaps(loaded)) == len(swaps(model)) == model.config.num_hidden_layers
    stock = fresh(name, torch.float32)
    change(stock, name, kind)
    assert not torch.allclose(forward(stock, name), wanted, atol=1e-5)
    assert torch.equal(forward(unpatch_model(model), name), forward(stock, name))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["last", "copies"])
def test_a_config_that_was_left_behind_stops_the_save(name: str, kind: str, tmp_path: Path) -> None:
    """Also after `set_strength`, which counts the layers again."""
    model = patch_model(fresh(name, torch.float32), "belief")
    change(model, name, kind, config=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"but its config builds 3.*num_hidden_layers"):
            model.save_pretrained(tmp_path)
        assert not any(tmp_path.iterdir())
        set_strength(model, 0.5)
    model.config.num_hidden_layers = len(swaps(model))
    model.save_pretrained(tmp_path)
    assert torch.equal(forward(type(model).from_pretrained(tmp_path), name), forward(model, name))


@pytest.mark.parametrize("variant", one_per_place())
def test_layers_copied_from_a_patched_model_into_a_stock_model(variant: str) -> None:
    """Patching says what to do with them."""
    model, source = (
        fresh("llama", torch.float32),
        patch_model(fresh("llama", torch.float32), variant, **tiny_options(variant)),
    )
    model.model.layers.append(copy.deepcopy(source.model.layers[0]))
    with pytest.raises(ValueError, match="unpatch_model"):
        patch_model(model, variant, **tiny_options(variant))


CARRYING = [name for name in one_per_place() if one_swap((name, {})).carries]
MOVES = {
    **CHANGES,
    "between": lambda layers: [layers[0], copy.deepcopy(layers[0]), *layers[1:]],
    "replaced": lambda layers: [layers[0], copy.deepcopy(layers[2]), layers[2]],
    "twice": lambda layers: [*layers, layers[0]],
}


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_carried_scores_after_surgery(name: str, kind: str) -> None:
    """Before anything counts the layers again: right, or refused in the next pass with what to do; then right."""
    (variant,) = CARRYING
    model = perturb(patch_model(fresh(name, torch.float32), variant, **tiny_options(variant)))
    change(model, name, kind, changes=MOVES)
    if kind == "twice":  # one module has one place among the layers
        for _ in range(2):
            with pytest.raises(ValueError, match="is in its list of layers twice"):
                forward(model, name)
            set_strength(model, 1.0)
        return
    other = fresh(name, torch.float32)
    change(other, name, kind, changes=MOVES)
    patch_model(other, variant, **tiny_options(variant))
    other.load_state_dict(model.state_dict())
    wanted = forward(other, name)
    if kind == "last":  # nobody reads what the layer below leaves
        assert torch.equal(forward(model, name), wanted)
    else:
        with pytest.raises(ValueError, match=r"changed since the model was patched.*set_strength\(model, 1.0\)"):
            forward(model, name)
    set_strength(model, 1.0)
    assert torch.equal(forward(model, name), wanted)


@pytest.mark.slow
def test_carried_scores_after_surgery_in_a_compiled_model() -> None:
    (variant,) = CARRYING
    torch._dynamo.reset()
    model = patch_model(fresh("llama", torch.float32), variant, **tiny_options(variant))
    whole = torch.compile(model, backend="eager", fullgraph=True)
    wanted = forward(model, "llama")
    assert torch.allclose(forward(whole, "llama"), wanted, atol=1e-5)
    change(model, "llama", "copies")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="changed since the model was patched"):
        forward(whole, "llama")
    torch._dynamo.reset()
