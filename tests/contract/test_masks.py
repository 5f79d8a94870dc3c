"""4-D masks on every variant: a plain 4-D mask equals its 2-D form; any other mask equals the slow reference model."""

from __future__ import annotations

import torch
from torch import Tensor

from tests import reference

from .cells import COVERING, ONCE, Cell, is_linear, over, over_in_turn
from .harness import (
    BATCH,
    CAUSAL_FAMILIES,
    LENGTH,
    TEXT_FAMILIES,
    assert_same,
    batch_of,
    fresh,
    refused,
    run_all,
    swapped,
    swaps,
)  # fmt: skip


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def drawn_mask(family: str) -> Tensor:
    """(B,1,Q,K) bool: any pattern; causal families also keep the order that their own masks have."""
    generator = torch.Generator().manual_seed(8)
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.6
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    return mask.tril() if family in CAUSAL_FAMILIES else mask


def shown(family: str, mask: Tensor) -> dict[str, Tensor]:
    """Inputs with a mask of one's own; positions too, which OPT would count over a 2-D mask."""
    batch = batch_of(family)
    return {**batch, "attention_mask": mask, "position_ids": torch.arange(LENGTH).expand(BATCH, -1)}


def equals_slow(family: str, cell: Cell, strength: float, mask: Tensor) -> None:
    model, batch = swapped(family, cell, strength), shown(family, mask)
    own = [dict(swap.named_parameters()) for swap in swaps(model)]
    slow = reference.reference_model(fresh(family), cell[0], options=cell[1], strength=strength, parameters=own)
    wanted = run_all(slow, batch)
    got = run_all(model, batch)
    assert_same((got[0], {name: got[1][name] for name in wanted[1]}), wanted)


@over(ONCE, TEXT_FAMILIES)
def test_any_bool_mask(family: str, cell: Cell) -> None:
    equals_slow(family, cell, 1.0, drawn_mask(family))


@over(ONCE, TEXT_FAMILIES)
def test_any_float_mask_in_between(family: str, cell: Cell) -> None:
    """Finite entries are a bias on the scores, and are not carried; without scores there is no place for them."""
    mask = additive(drawn_mask(family))
    if not is_linear(cell[0]):
        generator = torch.Generator().manual_seed(9)
        mask = mask + torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    equals_slow(family, cell, 0.5, mask)


@over_in_turn(ONCE, "kind", ["bool", "float"], TEXT_FAMILIES)
def test_a_row_that_may_see_nothing(family: str, cell: Cell, kind: str) -> None:
    """It reads zeros, or the pairs of a sink, never NaN, and its gradients are finite.

    With a finite float mask SDPA itself reads the mean of all values there; softmax_n has zeros under any mask.
    """
    mask = drawn_mask(family)
    mask[0, :, 2] = False
    model, batch = swapped(family, cell), shown(family, mask if kind == "bool" else additive(mask))
    out, gradients = run_all(model, batch)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    seen: list[Tensor] = []
    hook = swaps(model)[0].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(**batch)
    hook.remove()
    assert seen[0].any()
    if swaps(model)[0].further_keys:
        assert seen[0][0, 2].any()
    elif kind == "bool" or "outeffhop" in cell[0]:
        assert not seen[0][0, 2].any()


@over_in_turn(
    tuple(("llama", cell) for cell in COVERING), ("dtype", "strength"), [(torch.int64, 1.0), (torch.uint8, 0.0)]
)
def test_a_mask_of_whole_numbers_is_refused(family: str, cell: Cell, strength: float, dtype: torch.dtype) -> None:
    """Its 0 and 1 would be added to the scores and mask nothing. PyTorch's own attention refuses such a mask too."""
    mask = drawn_mask(family)
    model = swapped(family, cell, strength)
    for want in (False, True):
        with refused(f"mask with the dtype {dtype}", "pass mask.bool()"):
            model(**shown(family, mask.to(dtype)), output_attentions=want)
