"""A later transformers may give arguments and attributes other names: each variant is then right, or refused at once.

The attention classes of the six families are written again with other names (`renamed`), and patched. Nothing may
differ silently: the model must compute what the model with the usual names computes, or `patch_model` must refuse it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.families import sites
from hf_attn_swap.wiring.preconditions import PRECONDITIONS, check
from tests import zoo
from tests.harness.places import one_per_place, turns

from .cells import DEEP
from .harness import CAUSAL_FAMILIES, distance, forward, padding_side, perturb, refused, swaps, without_shortcut
from .renamed import arguments_of, renamed

FEW = ("belief_star", "simpletron_resl")  # of each place that needs arguments or attributes of the module
KEYWORDS = ("dropout", "scaling")  # that every module gives to the attention function
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The renamed modules leave nothing behind."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("_renamed"):
            del sys.modules[name]


def batch_of(family: str) -> dict[str, Tensor]:
    return zoo.inputs(family, length=6, padded=padding_side(family))


def like(family: str, module: Any) -> Any:
    """The renamed model with the weights of the usual one; submodules that were renamed keep their order."""
    usual = zoo.build(family)
    model = getattr(module, type(usual).__name__)(usual.config)
    keys = dict(zip(usual.state_dict(), model.state_dict(), strict=True))
    model.load_state_dict({keys[name]: value for name, value in usual.state_dict().items()})
    return model.eval()


@torch.no_grad()
def outputs(model: Any, family: str) -> list[Tensor]:
    """What a model computes in one pass over padded rows; and from a cache, if it has one."""
    logits = [forward(model, batch_of(family))]
    if family in CAUSAL_FAMILIES:
        model.generation_config.eos_token_id = None
        made = model.generate(
            **batch_of(family), max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits += [*made.logits]
    return logits


@functools.cache
def usual(family: str, variant: str) -> list[Tensor]:
    return outputs(perturb(patch_model(zoo.build(family), variant)), family)


def assert_near(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(distance(one, two) <= TOLERANCE for one, two in zip(got, wanted, strict=True))


def assert_right(model: Any, family: str, variant: str) -> None:
    """Patched, it computes what the model with the usual names does; and at strength 0 its own stock attention."""
    stock = outputs(model, family)
    assert_near(outputs(perturb(patch_model(model, variant)), family), usual(family, variant))
    assert_near(outputs(without_shortcut(set_strength(model, 0.0)), family), stock)
    assert all(torch.equal(one, two) for one, two in zip(outputs(unpatch_model(model), family), stock, strict=True))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_arguments(family: str, tmp_path: Path) -> None:
    """Every argument of the attention's forward has another name; the families and the places take turns."""
    module = renamed(family, tmp_path, arguments={name: f"{name}_of_tomorrow" for name in arguments_of(family)})
    for variant in [variant for name, variant in turns(zoo.FAMILIES, one_per_place()) if name == family]:
        model = like(family, module)
        assert not any(site.refused for site in sites(model))
        assert_right(model, family, variant)


def attributes_of(family: str) -> list[str]:
    """The numbers and submodules of a family's attention module."""
    core = sites(zoo.build(family))[0].core
    return [name for name in (*vars(core), *core._modules) if not name.startswith("_") and name not in TORCH]


TORCH = ("training",)  # attributes of every module of PyTorch
ATTRIBUTES = [(family, name) for family in DEEP for name in attributes_of(family)]


@pytest.mark.parametrize(
    ("family", "attribute", "variant"), [(*row, FEW[number % 2]) for number, row in enumerate(ATTRIBUTES)]
)
def test_an_attribute(family: str, attribute: str, variant: str, tmp_path: Path) -> None:
    """The variants take turns."""
    module = renamed(family, tmp_path, attributes={attribute: f"{attribute}_of_tomorrow"})
    try:
        model = like(family, module)
    except AttributeError:
        pytest.skip(f"the constructor of the whole model reads {attribute} by a way that `renamed` does not follow")
    if all(site.refused for site in sites(model)):
        with refused("nothing can be swapped", "install a newer hf_attn_swap"):
            patch_model(model, variant)
        assert not swaps(model)
    else:
        assert_right(model, family, variant)


@pytest.mark.parametrize(("family", "keyword"), turns(zoo.FAMILIES, KEYWORDS))
def test_what_the_attention_function_does_not_know_is_refused(family: str, keyword: str, tmp_path: Path) -> None:
    """Under another name, dropout or the scale would be left out without a word."""
    module = renamed(family, tmp_path, keywords={keyword: f"{keyword}_of_tomorrow"})
    model = like(family, module)
    with refused(f"{keyword}_of_tomorrow to the attention function", "does not know"):
        patch_model(model, "belief")
    assert not swaps(model)


@pytest.mark.parametrize("what", PRECONDITIONS)
def test_a_change_inside_transformers_is_refused_when_patched(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECONDITIONS, what, lambda: False)
    check.cache_clear()
    model = zoo.build("llama")
    with refused("installed transformers", what, "hf-attn-swap doctor"):
        patch_model(model, "belief")
    assert not swaps(model)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    check.cache_clear()
    patch_model(model, "belief")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_preconditions_while_a_model_loads(dtype: torch.dtype) -> None:
    """`from_pretrained` builds the model on the meta device, in the dtype of the checkpoint; this may come first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            check.__wrapped__()
    finally:
        torch.set_default_dtype(before)
