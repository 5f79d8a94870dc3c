"""PEFT: adapters before and after patching, on every projection; and training the swap's own parameters with them."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.layer.registry import parse
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, swaps
from tests.harness.adapters import adapted, fill, lora, projections
from tests.harness.one_swap import WITH_PARAMETERS
from tests.harness.places import in_turn, one_per_place, turns

# PEFT 0.21 reads a property that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


WAYS = [(True, False), (False, False), (True, True), (False, True)]  # adapters before the swap, and DoRA


@pytest.mark.parametrize(
    ("name", "variant", "before"),
    [(*row, before) for row, before in turns(turns(FAMILY_NAMES, one_per_place()), [True, False])],
)
def test_every_adapter_matters(name: str, variant: str, before: bool) -> None:
    """Changing the adapters of each projection changes the output, unless the variant does without W_o."""
    batch = batch_of(name)
    stock = forward(fresh(name), batch)
    neutral = forward(adapted(name, variant, before, strength=0.0), batch)
    assert torch.equal(neutral, stock)
    model = adapted(name, variant, before)
    untouched = forward(model, batch)
    for role, path in projections(name).items():
        fill(model, path)
        unused = role == "output" and all(getattr(c, "keeps_projection", True) is False for c in parse(variant))
        assert torch.equal(forward(model, batch), untouched) == unused, role
        fill(model, path, 0.0)
        assert torch.equal(forward(model, batch), untouched)


@pytest.mark.parametrize(
    ("name", "variant", "before", "use_dora"),
    [(*row, *way) for row, way in turns(turns(FAMILY_NAMES, one_per_place()), WAYS)],
)
def test_merging_changes_nothing(name: str, variant: str, before: bool, use_dora: bool) -> None:
    """And off, it is stock attention with the same adapters."""
    model, stock, batch = (
        adapted(name, variant, before, use_dora=use_dora),
        adapted(name, "softmax", before, use_dora=use_dora),
        batch_of(name),
    )
    untouched = forward(model, batch)
    for path in set(projections(name).values()):
        fill(model, path)
        fill(stock, path)
    wanted = forward(model, batch)
    assert not torch.allclose(wanted, untouched)
    assert distance(forward(set_strength(model, 0.0), batch), forward(stock, batch)) <= 1e-10
    merged = set_strength(model, 1.0).merge_and_unload()
    assert swaps(merged)
    assert distance(forward(merged, batch), wanted) <= 1e-10


@in_turn()
def test_unpatching_under_adapters(name: str, variant: str) -> None:
    batch = batch_of(name)
    wanted = peft.get_peft_model(fresh(name), lora(name)).eval()
    model = adapted(name, variant, before=True)
    for path in set(projections(name).values()):
        fill(model, path)
        fill(wanted, path)
    with torch.no_grad():
        held = {key: value for key, value in model.state_dict().items() if ".attn_swap." not in key}
        wanted.load_state_dict(held)
    assert torch.equal(forward(unpatch_model(model), batch), forward(wanted, batch))


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, WITH_PARAMETERS))
def test_modules_to_save(name: str, variant: str, tmp_path: Path) -> None:
    """They train, follow the strength, save with the adapter, load again, and switch off with it."""
    batch = batch_of(name)
    model = adapted(name, variant, before=False, strength=0.5, modules_to_save=["attn_swap"])
    started = forward(model, batch)
    trainable = {key for key, p in model.named_parameters() if p.requires_grad and ".attn_swap." in key}
    assert trainable
    assert all("modules_to_save" in key for key in trainable)
    model.train()
    zoo.output(model(**batch)).square().mean().backward()
    for key, parameter in model.named_parameters():
        if key in trainable:
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key
    model.eval()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key in trainable:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    moved = forward(model, batch)
    assert not torch.allclose(moved, started)
    with model.disable_adapter():
        assert torch.equal(forward(model, batch), started)
    assert torch.equal(forward(set_strength(model, 0.0), batch), forward(fresh(name), batch))
    set_strength(model, 0.5)
    with pytest.warns(UserWarning, match="an adapter is saved alone"):
        model.save_pretrained(tmp_path)
    base = perturb(patch_model(fresh(name), variant, strength=0.5))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(forward(loaded, batch), moved)


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, WITH_PARAMETERS))
def test_frozen_parameters_are_warned_about(name: str, variant: str) -> None:
    batch = batch_of(name)
    model = peft.get_peft_model(patch_model(fresh(name), variant), lora(name)).train()
    with pytest.warns(UserWarning, match=r"frozen.*modules_to_save=\['attn_swap'\]"):
        model(**batch)


@pytest.mark.parametrize("variant", WITH_PARAMETERS)
def test_no_warning_without_a_reason(variant: str) -> None:
    batch = batch_of("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kept = peft.get_peft_model(patch_model(fresh("bert"), variant), lora("bert", modules_to_save=["attn_swap"]))
        kept.train()(**batch)
        first = patch_model(peft.get_peft_model(fresh("bert"), lora("bert")), variant)
        first.train()(**batch)
        alone = peft.get_peft_model(patch_model(fresh("bert"), variant), lora("bert"))
        alone.eval()(**batch)


def test_a_wrapper_forgets_a_swap_that_is_taken_out_of_the_model_inside() -> None:
    """The wrapper holds the patched copy of the config, and the inner model's unpatching does not reach the wrapper."""
    model = fresh("bert")
    text = model.config.to_json_string()
    wrapper = peft.get_peft_model(model, lora("bert"))
    patch_model(wrapper, "belief")
    assert hasattr(wrapper.config, "attn_swap")
    unpatch_model(model)
    assert not hasattr(wrapper.config, "attn_swap")
    assert wrapper.config.to_json_string() == text
