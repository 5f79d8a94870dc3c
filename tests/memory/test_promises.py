"""What every memory module promises: shapes, gradients, independent rows, masks, precision, saving and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_attn_swap.memory import HopfieldRetrieval

from .harness import SUM_TO_ONE, built, close, every_module, every_normalizer, with_memory


@every_normalizer
@every_module
def test_shapes_and_gradients(name: str, normalizer: str) -> None:
    module, inputs = built(name, normalizer, steps=2)
    inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    got = module(*inputs)
    assert got.shape == ((3, 2, 6) if name == "pooling" else (3, 4, 6))
    got.square().sum().backward()
    for tensor in (*inputs, *module.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@every_normalizer
@every_module
def test_rows_are_independent(name: str, normalizer: str) -> None:
    module, inputs = built(name, normalizer, steps=2)
    whole = module(*inputs)
    for row in range(3):
        close(module(*(tensor[row : row + 1] for tensor in inputs)), whole[row : row + 1])


@every_normalizer
@with_memory
@pytest.mark.parametrize("mask", ["key_padding_mask", "no_op"])
def test_what_is_left_out_changes_nothing(name: str, mask: str, normalizer: str) -> None:
    """Rows of 3, 5 and 4 real patterns: as each alone without the rest, in values and gradients."""
    module, (*state, stored) = built(name, normalizer, steps=2)
    lengths = torch.tensor([3, 5, 4])
    left_out = torch.arange(5) >= lengths[:, None]
    noisy = torch.where(left_out[..., None], 100 * stored, stored).requires_grad_()
    got = module(*state, noisy, **{mask: left_out})
    got.square().sum().backward()
    assert noisy.grad is not None
    assert not noisy.grad[left_out].any()
    for row, length in enumerate(lengths.tolist()):
        alone = slice(row, row + 1)
        close(got[alone], module(*(tensor[alone] for tensor in state), stored[alone, :length]))


@every_normalizer
@pytest.mark.parametrize("name", ["retrieval", "association"])
def test_mask_per_query(name: str, normalizer: str) -> None:
    module, (state, stored) = built(name, normalizer)
    mask = torch.ones(4, 5).triu(2).bool()  # query q sees the patterns up to q + 1
    got = module(state, stored, mask=mask)
    close(got, module(state, stored, mask=mask.expand(3, 4, 5)))
    for query in range(4):
        close(got[:, query : query + 1], module(state[:, query : query + 1], stored[:, : query + 2]))


@every_normalizer
def test_projected_steps_update_in_the_projected_space(normalizer: str) -> None:
    module, (state, stored) = built("association", normalizer, steps=3, heads=1)
    inner = module.query(state)
    one = HopfieldRetrieval(normalizer=normalizer, beta=8**-0.5)
    for _ in range(3):
        inner = one(inner, module.key(stored))
    close(module(state, stored), module.value(inner))


@with_memory
def test_a_row_without_patterns(name: str) -> None:
    left_out = torch.tensor([[True] * 5, [False] * 5, [False] * 5])
    module, (*state, stored) = built(name, "outeffhop")
    got = module(*state, stored.requires_grad_(), key_padding_mask=left_out)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    got.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (stored, *module.parameters()))
    for normalizer in SUM_TO_ONE:
        module, (*state, stored) = built(name, normalizer)
        with pytest.raises(ValueError, match="no pattern left"):
            module(*state, stored, key_padding_mask=left_out)


STATE, STORED = torch.zeros(2, 3, 6), torch.zeros(2, 5, 6)


@every_module
def test_save_and_load(name: str, tmp_path: Path) -> None:
    normalizer = "sparsemax"
    module, inputs = built(name, normalizer, steps=2, beta=0.4)
    module = module.float()
    inputs = tuple(tensor.float() for tensor in inputs)
    module.save_pretrained(tmp_path)
    loaded = type(module).from_pretrained(tmp_path)
    assert torch.equal(loaded(*inputs), module(*inputs))
    assert (loaded.normalizer, loaded.steps, loaded.beta) == (normalizer, 2, 0.4)
