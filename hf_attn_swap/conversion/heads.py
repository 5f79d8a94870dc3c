"""Lets the heads of a layer meet the carried scores of the heads that are most like them.

`mha` mixes the scores of head h with those that the layers below left under the number h. But the numbers of the heads
of a layer have no meaning: the rows of W_q, W_k and W_v and the columns of W_o can be exchanged, head by head, and the
function stays the same. So which heads meet is free. `match_heads` exchanges no weights. Each layer gets an order: the
list that says which own head meets each head of the carried scores.

Layer after layer, the order is chosen that makes sum_h <S^order(h), H^h> largest, where S are the layer's own scores,
H are the carried scores (by the orders below), and the mean of every row is taken away: a linear assignment.
The method is this package's own; docs/mathematics.md, section Matched heads.
Axes: B batch, L token, H head, Q query, K key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..core.call import Call, Inputs
from ..core.registry import parse, parse_options
from ..core.swap import Swap
from ..patch import build_swap, need_installation, swappable
from ..wiring.install import Installation
from .batches import Batch, as_batches, forward, token_mask

ROWS = 4  # the scores of all layers are held for so many rows of a batch
TOKENS = 256  # and for so many tokens of each row


@dataclass(frozen=True, kw_only=True)
class HeadOrder:
    """What `match_heads` did.

    Attributes:
        orders: by the layer's number, the own head that meets each head of the carried scores.
        before, after: the mean over layers of the correlation of the scores that meet, by number and in this order.
    """

    orders: dict[int, tuple[int, ...]]
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"The heads of {len(self.orders)} layers meet the carried scores that are most like their own: correlation "
            f"{self.before:.2f} by number, {self.after:.2f} now."
        )


def match_heads(model: nn.Module, batches: Iterable[Any], *, progress: bool = True) -> HeadOrder:
    """Choose which head of each layer meets which head of the carried scores, in place.

    No weight changes, and the model at strength 0 does not change. `config.attn_swap` records the orders, and
    `unpatch_model` removes them with the swap. A module that serves several layers (ALBERT) keeps its heads: they read
    the same weights in every layer, so they match already. docs/mathematics.md, section Matched heads.

    Args:
        model: a model that is patched with a variant that carries scores (`mha`).
        batches: dicts of tensors as the model takes them. The first batches are read, until they
            have four rows; the first 256 tokens of a row decide.
        progress: show a progress bar.

    Raises:
        ValueError: the model is not patched, no variant carries scores, or there is no batch. The model is unchanged.
    """
    installation = need_installation(model)
    carrying = {index: swaps for index, swaps in installation.swaps().items() if swaps[0].carries}
    if not carrying:
        raise ValueError("no swapped layer carries scores, so there are no heads to match; mha does, by default.")
    numbered = {index: swaps for index, swaps in carrying.items() if _number(swaps[0]) is not None}
    orders: dict[int, tuple[int, ...]] = {}
    alike: list[tuple[float, float]] = []
    seen = _scores(model, installation, list(numbered), batches, progress=progress)
    reads: list[Tensor] = []
    for index, swaps in numbered.items():
        own = seen[index]
        share = float(_alpha_prime(swaps[0]))
        if _number(swaps[0]) == 0 or [each.shape for each in own] != [each.shape for each in reads]:
            reads = [torch.zeros_like(each) for each in own]
        elif reads:
            orders[index], found = _assign(own, reads)
            alike.append(found)
            own = [each[:, list(orders[index])] for each in own]
        reads = [share * below + (1 - share) * each for below, each in zip(reads, own, strict=True)]
    for index, order in orders.items():
        for swap in numbered[index]:
            swap.head_order = order
    installation.refresh()
    before, after = (sum(each) / max(1, len(alike)) for each in zip(*alike, strict=True)) if alike else (1.0, 1.0)
    return HeadOrder(orders=orders, before=before, after=after)


def _number(swap: Swap) -> int | None:
    """The layer's number among the layers that carry scores; None for a module that serves several layers."""
    return None if swap.wiring is None else swap.wiring.order


def _alpha_prime(swap: Swap) -> float:
    """The share of the carried scores at strength 1."""
    variant = swap.at("scores")
    assert variant is not None
    share: float = variant.options.alpha_prime
    return share


def _assign(own: list[Tensor], below: list[Tensor]) -> tuple[tuple[int, ...], tuple[float, float]]:
    """The best order of the own heads, and the mean correlation by number and in this order."""
    from scipy.optimize import linear_sum_assignment

    products = sum(torch.einsum("bhqk,bgqk->gh", one, other).double() for one, other in zip(own, below, strict=True))
    assert isinstance(products, Tensor)
    sizes = [
        sum((each.double().square().sum((0, 2, 3)) for each in scores), torch.zeros(1, dtype=torch.float64)).sqrt()
        for scores in (below, own)
    ]
    like = products / (sizes[0][:, None] * sizes[1][None]).clamp_min(torch.finfo(torch.float64).tiny)
    places, heads = linear_sum_assignment(products.numpy(), maximize=True)
    return tuple(heads.tolist()), (float(like.diag().mean()), float(like[places, heads].mean()))


def _scores(
    model: nn.Module, installation: Installation, layers: list[int], batches: Iterable[Any], *, progress: bool
) -> dict[int, list[Tensor]]:
    """The scores (B,H,Q,K) of the stock model by layer, a tensor per batch, with the mean of each row taken away."""
    usable = swappable(installation.root)
    classes = parse("softmax")
    plain = {index: build_swap(usable[index], classes, parse_options(classes, {}), index) for index in layers}
    found: dict[int, list[Tensor]] = {index: [] for index in layers}
    with _evaluated(model), installation.temporarily(plain):
        for batch in tqdm(first_rows(batches), desc="match heads", unit="batch", disable=not progress):
            with contextlib.ExitStack() as hooked:
                for index, swap in plain.items():
                    hooked.callback(swap.register_forward_pre_hook(_watch(found[index], batch)).remove)
                forward(model, batch)
    return found


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

        call.tap = see

    return before


def _centred(scores_BHQK: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
    """A part of the scores in fp32 on the CPU, without the mean of each row of keys; 0 where masked."""
    allowed = inputs.masks.allowed()
    seen = torch.ones_like(scores_BHQK, dtype=torch.bool) if allowed is None else allowed.expand_as(scores_BHQK)
    if seen.shape[2] == seen.shape[3]:  # queries that are padding
        seen = seen & token_mask(batch, scores_BHQK.transpose(1, 2))[:, None, :, None]
    cut = (slice(ROWS), slice(None), slice(TOKENS), slice(TOKENS))
    scores, seen = scores_BHQK[cut].detach().float(), seen[cut]
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


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
