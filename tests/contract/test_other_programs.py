"""What other programs do to a patched model: they replace forwards, and they put hooks before the attention."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.families import sites
from tests.harness.bypass import with_own_attention

from .cells import FAMILY_NAMES, ONCE, Cell, over
from .harness import TOLERANCE, batch_of, distance, forward, fresh, perturb, refused

CELLS = tuple((family, cell) for family, cell in ONCE if cell[0] != "softmax")
PLACES = ("outeffhop", "belief", "modern_hopfield", "simpletron_resl")


def cores(model: Any) -> list[nn.Module]:
    return [site.core for site in sites(model)]


@pytest.mark.parametrize("by_class", [True, False], ids=["class", "instance"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("family", ["albert", "bert", "llama"])
def test_a_replaced_forward(family: str, before: bool, by_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention function is never asked, so no variant may be said to run: refused in the pass, by module."""
    for variant in PLACES:
        with monkeypatch.context() as patched:
            model = fresh(family)
            replaced = with_own_attention(cores(model)[0])

            def replace(model: Any, patched: Any = patched, replaced: Any = replaced) -> None:
                core = cores(model)[0]
                if by_class:
                    patched.setattr(type(core), "forward", replaced)
                else:
                    core.forward = types.MethodType(replaced, core)

            if before and by_class:
                replace(model)
                with refused("nothing can be swapped", "does not ask transformers"):
                    patch_model(model, variant)
                continue
            if before:
                replace(model)
            if before and family == "albert" and variant not in ("outeffhop", "belief"):
                with refused("its forward is already wrapped"):  # the swap's own class would go around it
                    patch_model(model, variant)
                continue
            patch_model(model, variant)
            if not before:
                replace(model)
            if family == "albert" and variant not in ("outeffhop", "belief"):
                continue  # the swap's own class computes the whole block, and the replaced forward is not called
            with refused(
                f"{sites(model)[0].path}: the forward of", "asked for the attention function 0 times", "unpatch_model"
            ):
                forward(model, batch_of(family))
            forward(set_strength(model, 0.0), batch_of(family))  # the stock model of that program
            forward(unpatch_model(model), batch_of(family))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_wrapped_forward_is_right(family: str) -> None:
    """accelerate and others call the forward that they replace."""
    for variant in PLACES:
        wanted = forward(patch_model(fresh(family), variant), batch_of(family))
        model = patch_model(fresh(family), variant)
        for site in sites(model):
            original = site.container.forward
            site.container.forward = lambda *args, original=original, **kwargs: original(*args, **kwargs)
        assert torch.equal(forward(model, batch_of(family)), wanted)


def noise(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Steering: another input for the attention."""
    if args:
        return (args[0] * 1.5 + 0.1, *args[1:]), kwargs
    name = next(iter(kwargs))
    assert kwargs[name].dim() == 3
    return args, {**kwargs, name: kwargs[name] * 1.5 + 0.1}


@over(CELLS)
def test_a_hook_before_the_attention(family: str, cell: Cell) -> None:
    """A hook that changes the input counts the same whether it is put in before or after the model is patched."""
    outputs = []
    for first in (True, False):
        model = fresh(family)
        if first:
            for site in sites(model):
                site.container.register_forward_pre_hook(noise, with_kwargs=True)
        perturb(patch_model(model, cell[0]))
        if not first:
            for site in sites(model):
                site.container.register_forward_pre_hook(noise, with_kwargs=True)
        outputs.append(forward(model, batch_of(family)))
    assert distance(*outputs) <= TOLERANCE[torch.float64]
    assert distance(outputs[0], forward(perturb(patch_model(fresh(family), cell[0])), batch_of(family))) > 1e-6


def scaled(module: nn.Module, args: Any, output: Any) -> Any:
    """Ablation or steering: another output of the attention."""
    return (output[0] * 0.5 + 0.1, *output[1:]) if isinstance(output, tuple) else output * 0.5 + 0.1


@over(CELLS)
def test_a_hook_after_the_attention(family: str, cell: Cell) -> None:
    """A hook that changes the output changes all of it, what the swap adds after W_o too, whenever it was put in."""
    outputs = []
    for when in ("before", "after", "in front"):
        model = fresh(family)
        if when != "before":
            perturb(patch_model(model, cell[0]))
        for site in sites(model):
            site.container.register_forward_hook(scaled, prepend=when == "in front")
        if when == "before":
            perturb(patch_model(model, cell[0]))
        outputs.append(forward(model, batch_of(family)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert distance(outputs[0], forward(perturb(patch_model(fresh(family), cell[0])), batch_of(family))) > 1e-6
