"""Lets the heads of a layer meet the carried scores of the heads that are most like them.

`modern_hopfield` mixes the scores of head h with those that the layers below left under the number h. But the numbers
of the heads of a layer have no meaning: the rows of W_q, W_k and W_v and the columns of W_o can be exchanged, head by
head, and the function stays the same. So which heads meet is free. `match_heads` exchanges no weights. Each layer gets
an order: the list that says which own head meets each head of the carried scores.

Layer after layer, the order is chosen that makes sum_h <S^order(h), H^h> largest: a linear assignment. S are the
layer's own scores in the stock model, and H are the carried scores of the layers below in their orders. The mean of
every row of keys is taken away from both, because softmax does not see it.
The method is this package's own; docs/mathematics.md, section Matched heads.
Axes: B batch, L token, H head, Q query, K key.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call, Inputs, heads_in_order
from ..layer.head_order import MatchedHeads
from ..layer.registry import parse, parse_options
from ..layer.swap import Swap
from ..measuring.batches import Batch, as_batches, evaluating, forward, read_by, refuse_other_tokens, token_mask
from ..patch import build_swap, need_installation
from ..text.bar import bar
from ..wiring.install import Installation
from ..wiring.layers import Layer

ROWS = 4  # so many rows of all batches together are enough
TOKENS = 256  # and so many tokens of each row: the scores of all layers are held at once


@dataclass(frozen=True, kw_only=True)
class HeadOrder:
    """What `match_heads` did.

    Attributes:
        orders: by the layer's number, the own head that meets each head of the carried scores.
        before: the correlation of a head's scores with the carried scores that it meets if all heads meet by number;
            the mean over heads, and over the layers of `orders`. Not-a-number if there is no such layer.
        after: the same, in these orders.
    """

    orders: dict[int, tuple[int, ...]]
    before: float
    after: float

    def __str__(self) -> str:
        if not self.orders:
            return "No layer has heads to match: none reads the scores of another attention module."
        return (
            f"The heads of {len(self.orders)} layers meet the carried scores that are most like their own: correlation "
            f"{self.before:.2f} by number, {self.after:.2f} now."
        )


def match_heads(model: nn.Module, batches: Iterable[Any], *, progress: bool = True) -> HeadOrder:
    """Choose which head of each layer meets which head of the carried scores, in place.

    No weight changes, and the model at strength 0 does not change. `config.attn_swap` records the orders, and
    `unpatch_model` removes them with the swap. The first layer of a stack keeps its order, because it reads no carried
    scores. So does a module that serves several layers (ALBERT): its heads read the same weights in every layer.
    Call this before a calibration and before any training, which fit the orders that they find; `calibrate` does so by
    itself. docs/mathematics.md, section Matched heads.

    Args:
        model: a model that is patched with a variant that carries scores (`modern_hopfield`).
        batches: dicts of tensors as the model takes them. The first batches are read, until they have four rows; the
            first four rows of a batch and the first 256 tokens of a row decide.
        progress: show a progress bar.

    Raises:
        ValueError: the model is not patched or no variant carries scores; a calibration was merged, or a conversion
            trained weights; there is no batch, or scores are not finite. The model is unchanged after an error.
        ImportError: SciPy is missing; it comes with `pip install "hf-attn-swap[train]"`.
    """
    installation = need_installation(model)
    carrying = [layer for layer in installation.layers() if layer.swap.carries]
    if not carrying:
        raise ValueError(
            "no swapped layer carries scores, so there are no heads to match; modern_hopfield does, by default."
        )
    _refuse_trained(installation, carrying)
    layers = [layer for layer in carrying if _number(layer.swap) is not None]
    scores = _scores(model, installation, layers, batches, progress=progress)
    orders: dict[int, tuple[int, ...]] = {}
    before, after = [], []
    by_number: list[Tensor] = []  # the carried scores below, if all heads meet by number
    matched: list[Tensor] = []  # the carried scores below, by the orders found so far
    for layer in layers:
        index, swap = layer.number, layer.swap
        own = ordered = scores.pop(layer)
        if swap.is_first(_number(swap) or 0) or _shapes(own) != _shapes(matched):
            by_number = matched = _start(own, swap)
        elif own:
            orders[index] = assign(own, matched, index)
            ordered = [heads_in_order(each, orders[index]) for each in own]
            before.append(_correlation(own, by_number))
            after.append(_correlation(ordered, matched))
        by_number = _moved(own, by_number, swap)
        matched = _moved(ordered, matched, swap)
    for layer in carrying:
        for swap in layer.copies:
            swap.drop(MatchedHeads.name)
            if layer.number in orders:
                swap.put(MatchedHeads(orders[layer.number]))
    installation.refresh()
    return HeadOrder(orders=orders, before=_mean(before), after=_mean(after))


def _refuse_trained(installation: Installation, carrying: list[Layer]) -> None:
    """Refuse layers whose weights fit the orders that their heads have now.

    Raises:
        ValueError: a calibration was merged into the weights of a layer, or a conversion trained them.
    """
    installation.refuse_merged("matched", carrying)
    if trained := [layer.number for layer in carrying if layer.swap.retrained]:
        raise ValueError(
            f"a conversion trained the weights of layers {trained} for the orders that their heads have; match heads "
            "before the training."
        )


def _number(swap: Swap) -> int | None:
    """The layer's number among the layers that carry scores; None for a module that serves several layers."""
    return None if swap.wiring is None else swap.wiring.order


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [each.shape for each in tensors]


def _options(swap: Swap) -> Any:
    """The options of the variant that carries scores, which has `alpha_prime` and `init`."""
    variant = swap.at("scores")
    assert variant is not None
    return variant.options


def _start(own: list[Tensor], swap: Swap) -> list[Tensor]:
    """The carried scores below the first layer of a stack."""
    return own if _options(swap).init == "first" else [torch.zeros_like(each) for each in own]


def _moved(own: list[Tensor], below: list[Tensor], swap: Swap) -> list[Tensor]:
    """The carried scores that the layer above reads at strength 1; for the scheme "forward_forward" too."""
    share = float(_options(swap).alpha_prime)
    return [share * lower + (1 - share) * each for lower, each in zip(below, own, strict=True)]


def assign(own: list[Tensor], below: list[Tensor], index: int) -> tuple[int, ...]:
    """The order of the own heads with the largest sum of products with the heads of the carried scores.

    Raises:
        ValueError: scores are not finite.
        ImportError: SciPy is missing.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ImportError('SciPy is not installed; pip install "hf-attn-swap[train]".') from None
    pairs = zip(own, below, strict=True)
    products = torch.stack([torch.einsum("bhqk,bgqk->gh", one, other).double() for one, other in pairs]).sum(0)
    if not products.isfinite().all():
        raise ValueError(f"layer {index}: scores are not finite, so its heads cannot be matched; use float32.")
    return tuple(linear_sum_assignment(products.numpy(), maximize=True)[1].tolist())


def _correlation(own: list[Tensor], below: list[Tensor]) -> float:
    """The correlation of the scores of each head with those of the head of the same number: the mean over heads."""
    products, squares, others = (
        torch.stack([(one * other).double().sum((0, 2, 3)) for one, other in zip(left, right, strict=True)]).sum(0)
        for left, right in ((own, below), (own, own), (below, below))
    )
    return float((products / (squares * others).sqrt().clamp_min(torch.finfo(torch.float64).tiny)).mean())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _scores(
    model: nn.Module, installation: Installation, layers: list[Layer], batches: Iterable[Any], *, progress: bool
) -> dict[Layer, list[Tensor]]:
    """The scores (B,H,Q,K) of these layers in the stock model, a tensor per batch, as `_centred` keeps them."""
    found: dict[Layer, list[Tensor]] = {layer: [] for layer in layers}
    if not layers:
        return found
    plain = softmax_swaps(installation)
    with evaluating(model), installation.temporarily(plain):
        cores = [layer.site.core for layer in layers]
        for batch in bar(first_rows(batches), desc="match heads", unit="batch", shown=progress):
            refuse_other_tokens(installation.root, cores, batch)
            with contextlib.ExitStack() as hooked:
                for layer, kept in found.items():
                    hook = _watch(kept, read_by(layer.site.core, batch))
                    hooked.callback(plain[layer].register_forward_pre_hook(hook).remove)
                forward(model, batch)
    return found


def softmax_swaps(installation: Installation) -> dict[Layer, Swap]:
    """A swap with ordinary attention for every swapped layer, to watch the stock model."""
    classes = parse("softmax")
    options = parse_options(classes, {})
    return {layer: build_swap(layer, classes, options) for layer in installation.layers()}


def _watch(found: list[Tensor], batch: Batch) -> Any:
    """A forward pre-hook of a swap, which keeps the scores of one call."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs, call = args[0], args[1]
        assert isinstance(inputs, Inputs)
        assert isinstance(call, Call)

        def see(place: str, tensor: Tensor) -> Tensor:
            if place == "scores":
                found.append(_centred(tensor, inputs, batch))
            return tensor

        call.probe = see

    return before


def _centred(scores_BHQK: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
    """The first rows and tokens of scores in fp32 on the CPU, less the mean of each row of keys; 0 where masked."""
    scores = scores_BHQK[:ROWS, :, :TOKENS, :TOKENS].detach().float()
    seen = torch.ones_like(scores, dtype=torch.bool)
    if (allowed := inputs.masks.allowed()) is not None:
        seen = seen & allowed.expand_as(scores_BHQK)[:ROWS, :, :TOKENS, :TOKENS]
    if scores_BHQK.shape[2] == scores_BHQK.shape[3]:  # one query per token: leave out those that are padding
        seen = seen & token_mask(batch, scores_BHQK.transpose(1, 2))[:ROWS, None, :TOKENS, None]
    mean = scores.masked_fill(~seen, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return (scores - mean).masked_fill(~seen, 0.0).cpu()


def first_rows(batches: Iterable[Any]) -> Iterator[Batch]:
    """The first batches, until they have `ROWS` rows."""
    rows = 0
    for batch in as_batches(batches):
        yield batch
        rows += next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))
        if rows >= ROWS:
            return
