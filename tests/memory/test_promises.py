"""What every memory module promises: shapes, gradients, independent rows, masks, precision, saving and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import functional
from hf_attn_swap.memory import HopfieldAssociation, HopfieldLayer, HopfieldPooling, HopfieldRetrieval, no_op_patterns

from .harness import SUM_TO_ONE, built, close, every_module, every_normalizer, normal, with_memory


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
def test_steps_are_calls(normalizer: str) -> None:
    state, stored = normal(1, 2, 4, 6), normal(2, 5, 6)
    wanted = state
    for _ in range(3):
        wanted = HopfieldRetrieval(normalizer=normalizer, beta=0.7)(wanted, stored)
    assert torch.equal(HopfieldRetrieval(normalizer=normalizer, beta=0.7, steps=3)(state, stored), wanted)


@every_normalizer
def test_projected_steps_update_in_the_projected_space(normalizer: str) -> None:
    module, (state, stored) = built("association", normalizer, steps=3, heads=1)
    inner = module.query(state)
    one = HopfieldRetrieval(normalizer=normalizer, beta=8**-0.5)
    for _ in range(3):
        inner = one(inner, module.key(stored))
    close(module(state, stored), module.value(inner))


@every_normalizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(normalizer: str, dtype: torch.dtype) -> None:
    module, inputs = built("association", normalizer, steps=2)
    wanted = module(*inputs)
    got = module.to(dtype)(*(tensor.to(dtype) for tensor in inputs))
    assert got.dtype == dtype
    close(got.double(), wanted, 0.1)


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


STATE, STORED = torch.zeros(2, 3, 6), torch.zeros(2, 5, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "softmax_1"}, "unknown normalizer 'softmax_1'"),
        ({"steps": 0}, "steps must be"),
        ({"beta": 0.0}, "beta must be"),
        ({"beta": float("nan")}, "beta must be"),
        ({"heads": 3}, "3 heads do not divide"),
        ({"heads": 0}, "0 heads do not divide"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built("association", **{"normalizer": "softmax", **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HopfieldRetrieval(no_op_threshold=2.0), "a cosine"),
        (lambda: no_op_patterns(STORED, -2.0), "a cosine"),
        (lambda: HopfieldPooling(6, queries=0), "one query"),
        (lambda: HopfieldLayer(6, 0), "one stored pattern"),
        (lambda: HopfieldPooling(6)(STORED[:, :0]), "memory is empty"),
        (lambda: HopfieldPooling(6)(STATE[0]), "stored must be"),
        (lambda: HopfieldPooling(7)(STORED), "stored must be"),
        (lambda: HopfieldLayer(7, 2)(STATE), "state must be"),
        (lambda: functional.hopfield_retrieve(STATE[0], STORED[0, :0], 1.0), "memory is empty"),
        (
            lambda: functional.hopfield_retrieve(STATE[0], STORED[0], 1.0, n=0.0, key_mask=torch.zeros(5).bool()),
            "no pattern left",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["retrieval", "association"])
@pytest.mark.parametrize(
    ("state", "stored", "masks", "message"),
    [
        (STATE, STORED[..., :5], {}, "must be"),
        (STATE[0], STORED, {}, "state must be"),
        (STATE[:1], STORED, {}, "rows of states"),
        (STATE, STORED[:, :0], {}, "memory is empty"),
        (
            STATE,
            STORED,
            {"mask": torch.zeros(5, 3).bool()},
            "mask must be",
        ),
        (STATE, STORED, {"no_op": torch.zeros(2, 5)}, "no_op must be bool"),
        (
            STATE,
            STORED,
            {"key_padding_mask": torch.zeros(3, 5).bool()},
            "key_padding_mask must be",
        ),
    ],
)
def test_refused_inputs(name: str, state: Any, stored: Any, masks: dict[str, Any], message: str) -> None:
    module = HopfieldRetrieval() if name == "retrieval" else HopfieldAssociation(6)
    with pytest.raises(ValueError, match=message):
        module(state, stored, **masks)
