"""Fresh parameters are never uninitialised memory, models built from a config are neutral, and others untouched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hf_attn_swap import patch_model
from tests.contract.cells import DEEP, FAMILY_NAMES, OPTION_CELLS, label, swap_in
from tests.contract.harness import batch_of, forward, fresh, swaps
from tests.harness.one_swap import WITH_PARAMETERS
from tests.harness.places import in_turn, turns

from .steps import auto_class, heads

CELLS = [cell for cell in OPTION_CELLS if cell[0] in WITH_PARAMETERS]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every uninitialised tensor is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned")
def test_no_uninitialised_memory() -> None:
    """Whatever has parameters, with each of its options; the families take turns."""
    for name, cell in turns(FAMILY_NAMES, CELLS):
        model = swap_in(fresh(name, torch.bfloat16), cell[0], strength=0.3, **cell[1])
        for swap in swaps(model):
            assert float(swap.strength_value) == float(torch.tensor(0.3))
            for key, tensor in (*swap.named_parameters(), *swap.named_buffers()):
                assert tensor.isfinite().all(), f"{name}-{label(cell)}: {key}"


@in_turn()
@pytest.mark.usefixtures("poisoned")
def test_from_config(name: str, variant: str) -> None:
    """The swap is there with its neutral parameters, and the rest is drawn as if it were not."""
    config = patch_model(fresh(name, torch.float32), variant, strength=0.3).config
    auto, plain = getattr(transformers, auto_class(fresh(name))), fresh(name).config
    torch.manual_seed(9)
    stock = auto.from_config(plain).eval()
    state = torch.get_rng_state()
    torch.manual_seed(9)
    model = auto.from_config(config).eval()
    assert torch.equal(torch.get_rng_state(), state)
    batch = batch_of(name, torch.float32)
    wanted = patch_model(stock, variant, strength=0.3)
    assert len(swaps(model)) == len(swaps(wanted))
    for (key, one), (other, two) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert key == other
        assert torch.equal(one, two), key
    assert torch.equal(forward(model, batch), forward(wanted, batch))


@pytest.mark.parametrize("name", DEEP)
def test_other_models_are_untouched(name: str, tmp_path: Path) -> None:
    """While the package is imported, stock models build, save, load and report as ever."""
    stock = fresh(name, torch.float32)
    stock.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_class(stock)).from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, tuple)
    model, info = loaded
    assert set(info) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert not any("attn_swap" in str(line) for line in vars(model))
    assert not any("attn_swap" in key for module in model.modules() for key in vars(module))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "attn_swap")
    batch = batch_of(name, torch.float32)
    assert torch.equal(forward(model, batch), forward(stock, batch))
    plain = type(stock).from_pretrained(tmp_path)
    assert type(plain) is type(stock)
    for head in heads(stock.config).values():
        assert not hasattr(head(stock.config), "attn_swap_installation")
