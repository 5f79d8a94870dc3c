"""Computes attention whose formula needs the weights, without a tensor of queries and keys.

heads = dropout(clip(normalizer(f(w q k^T) + M))) v, one block of scores at a time. f is the formula of a variant, if it
has one. The forward pass keeps a few numbers per query. The backward pass computes each block's scores and weights
again. Without a formula, this is an operator of PyTorch, so a compiler calls it and does not unroll its blocks. A
formula is Python, so with one this is a function of autograd, which no compiler sees.
FlashAttention (Dao et al., 2022), section 3.1, for the backward pass.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, R numbers that are kept per row, N = sequences x
groups of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from ..core.call import Call, Inputs
from ..functional.linear import wide, widened, without_autocast
from .blocks import Block, split
from .double_backward import refuse_double_backward
from .formula import Formula
from .normalizers import Normalizer, normalizer
from .weighing import Rule, Weighing


def fits(inputs: Inputs) -> bool:
    """True if the operator can compute with these tensors: the mask needs no gradient, and each query has a key."""
    masks = inputs.masks
    learned = masks.given is not None and masks.given.requires_grad
    return not learned and masks.keys > 0 and not (masks.causal and masks.keys < masks.queries)


def attend(rule: Rule, inputs: Inputs, call: Call, formula: Formula | None) -> Tensor:
    """Compute the heads (B,Q,H,D) of one layer.

    Args:
        rule: how scores become weights.
        inputs: the tensors and the masks, for which `fits` is True.
        call: the call, for its strength.
        formula: changes the scores, or None.
    """
    masks = inputs.masks
    mask = masks.given if masks.key_mask is None else masks.key_mask[:, None, None, :]
    strength = call.exact_strength if isinstance(call.exact_strength, Tensor) else None
    seed = torch.randint(2**62, (1,)) if inputs.dropout > 0 else None
    qkv = [as_products(tensor) for tensor in inputs.three]
    if formula is not None:
        weighing = Weighing(rule, strength, inputs.dropout, 0 if seed is None else int(seed))
        arguments = (mask, masks.causal, inputs.scaling, weighing, formula)
        heads: Tensor = _ByFormula.apply(*arguments, *qkv, *formula.learned)  # type: ignore[no-untyped-call]  # torch's
        return heads
    numbers = (inputs.scaling, rule.normalizer, rule.n, rule.gamma, rule.zeta, inputs.dropout)
    heads, _ = weighted(*qkv, mask, strength, seed, masks.causal, *numbers)
    return torch.as_tensor(heads)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    strength: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scaling: float,
    rule: str,
    n: float,
    gamma: float,
    zeta: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Compute dropout(clip(normalizer(scaling q k^T + mask))) v. Sums are computed in fp32 at least.

    Args:
        q: (B,H,Q,D).
        k: (B,G,K,D).
        v: (B,G,K,D).
        mask: broadcastable to (B,H,Q,K): bool, True where the query may see the key; or numbers to add, where half the
            lowest number of the dtype and less forbids a key.
        strength: a (1,) tensor between 0 and 1, or None for full strength.
        seed: one whole number on the CPU, which decides what is dropped; None without dropout.
        causal: the last query sees all keys, the query before it one key less, and so on.
        scaling: the factor of q k^T.
        rule: the name of the normalizer, as in `Rule`.
        n: the n of softmax_n.
        gamma: the lower end of the stretched weights.
        zeta: the upper end of the stretched weights.
        dropout: the probability that a weight is dropped.

    Returns:
        The heads (B,Q,H,D) in the dtype of v, with zeros for a query that sees no key; and what the backward pass needs
        of each row (B,H,Q,R).
    """
    return _forward(_Work(q, k, v, mask, causal, scaling, _weighing(strength, seed, rule, n, gamma, zeta, dropout)))


class _Work(NamedTuple):
    """What is computed: the arguments of `compute`, with a formula or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float
    weighing: Weighing
    formula: Formula | None = None


def _forward(work: _Work) -> tuple[Tensor, Tensor]:
    """The heads and the rows, as in `compute`."""
    q, k, v, mask, causal, scaling, weighing, formula = work
    heads, rows = _empty(q, v, weighing.normalizer)
    with without_autocast(q.device):
        for block, keys, values in _blocks(q, k, v, causal):
            scores = block.scores(q, keys, scaling)
            if formula is not None:
                scores = formula(scores, block.corner)
            weights, rows[block.index] = weighing.normalizer.find(block.masked(scores, mask))
            weights = _times(weighing.clipped(weights), weighing.kept(weights, block.number))
            read = torch.bmm(block.flat(weights), values[:, : block.seen])
            heads.transpose(1, 2)[block.index] = read.view(*weights.shape[:3], -1)
    return heads, rows


weighted = library.custom_op("hf_attn_swap::weighted", compute, mutates_args=())


@weighted.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, strength, _, _, _, rule, *_ = others
    return _empty(q, v, normalizer(rule, strength))


def compute_backward(
    grad: Tensor,
    rows: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    strength: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scaling: float,
    rule: str,
    n: float,
    gamma: float,
    zeta: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of the heads and the rows of the forward pass; the rest as in `compute`."""
    weighing = _weighing(strength, seed, rule, n, gamma, zeta, dropout)
    grad_q, grad_k, grad_v = _gradients(grad, rows, _Work(q, k, v, mask, causal, scaling, weighing))
    return grad_q, grad_k, grad_v


def _gradients(grad: Tensor, rows: Tensor, work: _Work) -> tuple[Tensor, ...]:
    """As `compute_backward`. What the formula learned gets its gradients behind those of q, k and v."""
    q, k, v, mask, causal, scaling, weighing, formula = work
    grad_q, grad_k, grad_v = (torch.empty_like(tensor) for tensor in (q, k, v))
    of_learned = [] if formula is None else [torch.zeros_like(tensor) for tensor in formula.learned]
    with without_autocast(q.device):
        for block, keys, values in _blocks(q, k, v, causal):
            if block.queries.start == 0:
                sum_k, sum_v = torch.zeros_like(keys), torch.zeros_like(values)
            queries, g = (block.flat(widened(tensor[block.index])) for tensor in (q, grad.transpose(1, 2)))
            scores = changed = block.scores(q, keys, scaling)
            if formula is not None:
                with torch.enable_grad():
                    changed = formula(scores.requires_grad_(), block.corner)
            unclipped = weighing.normalizer.recompute(block.masked(changed.detach(), mask), rows[block.index])
            weights = weighing.normalizer.mixed(unclipped)
            kept = weighing.kept(weights, block.number)
            read = block.flat(_times(weighing.clipped(weights), kept))
            sum_v[:, : block.seen].baddbmm_(read.transpose(1, 2), g)
            of_read = torch.bmm(g, values[:, : block.seen].transpose(1, 2)).view(weights.shape)
            of_weights = weighing.clipped_back(weights, _times(of_read, kept))
            of_scores = weighing.normalizer.backward(unclipped, of_weights)
            if formula is not None:
                of_scores, *more = formula.gradients(scores, changed, of_scores)
                of_learned = [total + part for total, part in zip(of_learned, more, strict=True)]
            of_scores = block.flat(of_scores)
            sum_k[:, : block.seen].baddbmm_(of_scores.transpose(1, 2), queries, alpha=scaling)
            of_q = torch.bmm(of_scores, keys[:, : block.seen]).mul_(scaling)
            grad_q[block.index] = of_q.view(*weights.shape[:3], -1)
            if block.queries.stop == q.shape[2]:
                grad_k[block.shared] = sum_k.view(grad_k[block.shared].shape)
                grad_v[block.shared] = sum_v.view(grad_v[block.shared].shape)
    return grad_q, grad_k, grad_v, *of_learned


_backward = library.custom_op("hf_attn_swap::weighted_backward", compute_backward, mutates_args=())


@_backward.register_fake
def _(grad: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:6])
    ctx.others = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _of_operator(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    return *_backward(grad, *ctx.saved_tensors, *ctx.others), *(None,) * 10


weighted.register_autograd(_of_operator, setup_context=_save)


class _ByFormula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, *arguments: Any) -> Any:
        causal, scaling, weighing, formula, q, k, v, *_ = arguments
        heads, rows = _forward(_Work(q, k, v, mask, causal, scaling, weighing, formula))
        ctx.save_for_backward(rows, q, k, v, mask)
        ctx.others = causal, scaling, weighing, formula
        return heads

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward()
        rows, *tensors = ctx.saved_tensors
        return *(None,) * 5, *_gradients(grad, rows, _Work(*tensors, *ctx.others))


def _weighing(
    strength: Tensor | None, seed: Tensor | None, rule: str, n: float, gamma: float, zeta: float, dropout: float
) -> Weighing:
    """The operator's arguments as one object."""
    number = 0 if seed is None else int(seed)
    return Weighing(Rule(normalizer=rule, n=n, gamma=gamma, zeta=zeta), strength, dropout, number)


def _empty(q: Tensor, v: Tensor, by: Normalizer) -> tuple[Tensor, Tensor]:
    """Memory for the results of `compute`."""
    batch, heads, queries = q.shape[:3]
    rows = q.new_empty(batch, heads, queries, by.kept, dtype=wide(q))
    return v.new_empty(batch, queries, heads, v.shape[3]), rows


def _blocks(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Each block with its keys and its values (N,K,D), in fp32 at least. Blocks with the same keys share them."""
    for block in split(q, k, causal):
        if block.queries.start == 0:  # the first of the blocks with the same keys
            keys, values = (widened(tensor[block.shared]).flatten(0, 1) for tensor in (k, v))
        yield block, keys, values


def as_products(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that autocast gives to products; without autocast, the tensor itself."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(device))


def _times(tensor: Tensor, factors: Tensor | None) -> Tensor:
    return tensor if factors is None else tensor * factors
