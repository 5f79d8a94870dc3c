"""Every form of a mask hides the same keys, whichever way transformers gives the mask; and who records a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap

from hf_attn_swap.core.masks import Masks, recorded, traced, transformed

QUERIES, KEYS, HEADS = 3, 5, 2
LOWEST = torch.finfo(torch.float32).min
REAL = torch.tensor([[False, True, True, True, True], [True, True, False, True, True]])
DRAWN = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)[None, None]


def masks(queries: int = QUERIES, **given: Any) -> Masks:
    return Masks(queries=queries, keys=KEYS, device=torch.device("cpu"), **given)


def numbers(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, LOWEST)


OLD = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own forward mode scripts, too
IN_ORDER = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
WAYS: dict[str, tuple[Masks, Tensor | None]] = {
    "nothing": (masks(), None),
    "causal": (masks(KEYS, causal=True), torch.ones(KEYS, KEYS, dtype=torch.bool).tril()[None, None]),
    "keys": (masks(key_mask=REAL), REAL[:, None, None].expand(-1, 1, QUERIES, -1)),
    "keys in order": (masks(key_mask=REAL, causal=True), REAL[:, None, None] & IN_ORDER),
    "bool": (masks(given=DRAWN), DRAWN),
    "numbers": (masks(given=numbers(DRAWN)), DRAWN),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_forms_agree(way: str) -> None:
    given, allowed = WAYS[way]
    found, (blocked, blind) = given.allowed(), given.blocked()
    mask, causal = given.dense()
    added, flag = given.additive(torch.float32)
    assert flag == causal == (way == "causal")
    if allowed is None:
        assert (found, blocked, blind, mask, added) == (None,) * 5
        return
    assert found is not None
    assert blocked is not None
    assert blind is not None
    assert torch.equal(found, allowed)
    assert torch.equal(blind, ~allowed.any(-1, keepdim=True))
    assert torch.equal(blocked, ~allowed & ~blind)
    if causal:
        assert mask is None
        assert added is None
    else:
        assert mask is not None
        assert added is not None
        assert torch.equal(mask if mask.dtype == torch.bool else mask == 0, allowed)
        assert torch.equal(added.expand(allowed.shape), torch.where(allowed, 0.0, LOWEST / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_a_mask(dtype: torch.dtype) -> None:
    """What is half the lowest number or less hides a key, and is no number to add."""
    half = torch.finfo(torch.float32).min / 2
    given = torch.tensor([[0.25, half, LOWEST, -torch.inf, -3.0]]).expand(1, 1, QUERIES, -1)
    mask = masks(given=given)
    allowed, bias, added = mask.allowed(), mask.bias(), mask.additive(dtype)[0]
    assert allowed is not None
    assert bias is not None
    assert added is not None
    assert allowed[0, 0, 0].tolist() == [True, False, False, False, True]
    assert bias[0, 0, 0].tolist() == [0.25, 0.0, 0.0, 0.0, -3.0]
    assert mask.has_bias()
    lowest = torch.finfo(dtype).min / 2
    assert added.shape == (1, 1, 1, KEYS), "all queries share one row"
    assert added[0, 0, 0].tolist() == [0.25, lowest, lowest, lowest, -3.0]
    assert not masks(given=numbers(DRAWN)).has_bias()
    assert masks(given=DRAWN).bias() is None


def test_old_models_hide_keys_by_ten_thousand() -> None:
    given = torch.tensor([0.0, -9_999.0, -10_000.0, -20_000.0, LOWEST]).expand(1, 1, QUERIES, -1)
    closed = masks(given=given).closed()
    assert closed.given is not None
    assert closed.given[0, 0, 0].tolist() == [0.0, -9_999.0, LOWEST, LOWEST, LOWEST]
    for plain in (masks(given=DRAWN), masks(key_mask=REAL)):
        assert plain.closed() is plain


def test_masks_of_heads() -> None:
    assert masks(given=DRAWN.expand(-1, HEADS, -1, -1)).per_head
    assert not masks(given=DRAWN).per_head
    assert not masks(given=DRAWN[0].expand(HEADS, -1, -1)).per_head
    assert not masks(key_mask=REAL).per_head


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [None, torch.tensor([0.25])])
def test_further_keys_in_front(way: str, share: Tensor | None) -> None:
    """Every query sees them. What the text shows stays; a share is added as its logarithm."""
    given, allowed = WAYS[way]
    wider = given.with_extra_keys(2, share, torch.float32)
    assert wider.keys == given.keys + 2
    assert wider.queries == given.queries
    if allowed is None and share is None:
        assert wider.allowed() is None
        return
    text = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool) if allowed is None else allowed
    found = wider.allowed()
    assert found is not None
    assert torch.equal(found, torch.cat([torch.ones_like(text[..., :2]), text], -1))
    bias = wider.bias()
    if share is not None:
        assert bias is not None
        assert bias[..., :2].unique().tolist() == pytest.approx([float(share.log())])
        assert not bias[..., 2:].any()
    else:
        assert bias is None or not bias.any()


def test_a_form_is_made_once_for_a_mask() -> None:
    made: list[Any] = []
    mask = masks(given=numbers(DRAWN), made=made)
    first = mask.allowed()
    assert mask.allowed() is first
    assert masks(given=mask.given, made=made).allowed() is first
    assert masks(given=numbers(DRAWN), made=made).allowed() is not first, "another mask of the same numbers"
    real = masks(key_mask=REAL, made=made)
    assert real.dense()[0] is real.dense()[0]
    ordered = masks(key_mask=REAL, causal=True, made=made).dense()[0]
    shorter = masks(KEYS - 1, key_mask=REAL, made=made).dense()[0]
    assert ordered is not None
    assert shorter is not None
    assert not torch.equal(ordered, real.dense()[0])
    assert shorter.shape[2] == KEYS - 1


@OLD
def test_who_records() -> None:
    """A compiler reads no number; a trace and an export are also kept for later, without this package."""
    seen: list[tuple[bool, bool]] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append((traced(), recorded()))
        return tensor + 1

    class Part(torch.nn.Module):
        def forward(self, tensor: Tensor) -> Tensor:
            return tensor + 1 if recorded() and traced() else tensor - 1

    x = torch.zeros(2)
    note(x)
    torch.jit.trace(note, (x,), check_trace=False)
    assert seen == [(False, False), (True, True)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: t + (1 if traced() else 0) + (2 if recorded() else 0), backend="eager")
    exporting = hasattr(torch.compiler, "is_exporting")  # before, a compilation counts as an export
    assert compiled(x).tolist() == [1.0 if exporting else 3.0] * 2
    torch._dynamo.reset()
    assert torch.export.export(Part(), (x,), strict=False).module()(x).tolist() == [1.0, 1.0]


@OLD
def test_who_transforms() -> None:
    x, seen = torch.zeros(2), []

    def note(tensor: Tensor) -> Tensor:
        seen.append(transformed(x))
        return tensor

    assert not transformed(x)
    vmap(note)(x)
    assert seen == [True]
    with forward_ad.dual_level():
        assert not transformed(x)
        assert transformed(x, forward_ad.make_dual(x, x))
    assert not transformed(x)
