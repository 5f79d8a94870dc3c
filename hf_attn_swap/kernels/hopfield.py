"""Computes attention whose scores are carried across layers, without a second copy of the scores.

The formula is softmax(b H + w q k^T + M) v; b = 0 and w = scaling is ordinary attention.
`advance` updates H in place; a pass without gradients needs no more. `attend` does the same with an exact backward
pass, which keeps the weights and nothing else of size Q x K. `attend_long` never holds H: the scores of a layer and
all lower layers are one longer dot product, [w_1 q_1, ..., w_l q_l] . [k_1, ..., k_l], which is computed for one block
of queries at a time.
Modern Hopfield attention, eq. 10; Rabe & Staats (2021) for the blocks.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, N = B G, R = Q H / G rows that share keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .blocks import OTHERWISE
from .double_backward import refuse_double_backward

BLOCK = 2**22  # the largest number of scores that one block of queries holds on a CPU: 16 MB in fp32
Term = tuple[Tensor, Tensor, float]  # q (B,H,Q,D), k (B,H,K,D) and the factor of q k^T in H


def rows(tensor_BHLD: Tensor, groups: int) -> Tensor:
    """Reshape (B,H,L,D) to (N,R,D). Heads that share a key/value head become rows of one product."""
    batch, heads, length, width = tensor_BHLD.shape
    return tensor_BHLD.reshape(batch * groups, heads // groups * length, width)


@torch.no_grad()
def advance(
    hidden: Tensor | None, query: Tensor, key: Tensor, decay: float, weight: float, blocked: Tensor | None, fresh: bool
) -> Tensor:
    """Compute H of this layer, b H + w q k^T, with -inf where `blocked` is True.

    Args:
        hidden: H of the layer below (B,H,Q,K), or None for the first layer.
        query: (B,H,Q,D).
        key: (B,G,K,D).
        decay: the factor b.
        weight: the factor w.
        blocked: bool, (B|1,H|1,Q|1,K), True where a query may not see a key; or None.
        fresh: write the result into new memory. Otherwise the result replaces `hidden`.

    Returns:
        H of this layer (B,H,Q,K).
    """
    groups, shape = key.shape[1], (*query.shape[:3], key.shape[2])
    q, k = rows(query, groups), key.flatten(0, 1).transpose(1, 2)
    # `moved` must be H itself and not a view of H, because autograd refuses to change a view in place.
    moved = q.new_empty(shape) if hidden is None or fresh else hidden
    flat = moved.view(q.shape[0], q.shape[1], shape[3])
    below = flat if hidden is None else hidden.view(flat.shape)
    torch.baddbmm(below, q, k, beta=0.0 if hidden is None else decay, alpha=weight, out=flat)
    return moved if blocked is None else moved.masked_fill_(blocked, -torch.inf)


def attend(
    hidden: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: float,
    weight: float,
    blocked: Tensor | None,
    fresh: bool,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `advance`, softmax, dropout of weights and the product with v, with gradients.

    The arguments are those of `advance`, and value (B,G,K,D) and the probability `dropout`.

    Returns:
        H of this layer (B,H,Q,K), and the heads (B,H,Q,D).
    """
    moved, heads = _Attend.apply(hidden, query, key, value, decay, weight, blocked, fresh, dropout)  # type: ignore[no-untyped-call]  # torch's
    return moved, heads


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        hidden, query, key, value, decay, weight, blocked, fresh, dropout = given
        moved = advance(hidden, query, key, decay, weight, blocked, fresh)
        if hidden is not None and not fresh:
            ctx.mark_dirty(hidden)
            moved = hidden
        weights, stays = torch.softmax(moved, -1), None
        read = weights
        if dropout > 0:
            read, stays = torch.native_dropout(weights, dropout, True)
        heads = (rows(read, key.shape[1]) @ value.flatten(0, 1)).view(*query.shape[:3], -1)
        ctx.save_for_backward(query, key, value, weights, heads, stays)
        ctx.decay, ctx.weight, ctx.first, ctx.kept = decay, weight, hidden is None, 1 - dropout
        ctx.set_materialize_grads(False)
        return moved, heads

    @staticmethod
    def backward(ctx: Any, grad_moved: Tensor | None, grad_heads: Tensor | None) -> Any:
        refuse_double_backward()
        query, key, value, weights, heads, stays = ctx.saved_tensors
        groups, scores, grad_value = key.shape[1], grad_moved, None
        q, k, v, p = rows(query, groups), key.flatten(0, 1), value.flatten(0, 1), rows(weights, groups)
        if grad_heads is not None:
            g = rows(grad_heads, groups)
            # With dropout, the heads are (p m) v, where m is 0 or 1 / (1 - dropout). So m scales the gradient of p.
            scale = None if stays is None else rows(stays, groups).to(p.dtype).div_(ctx.kept)
            read = p if scale is None else p * scale
            grad_value = (read.transpose(1, 2) @ g).view(value.shape)
            mean = (g * rows(heads, groups)).sum(-1, keepdim=True)
            grad_p = torch.bmm(g, v.transpose(1, 2))
            grad_p = (grad_p if scale is None else grad_p.mul_(scale)).sub_(mean)
            # The layer above made the gradient of H for this layer alone, so this tensor may change in place.
            scores = grad_p.mul_(p) if scores is None else scores.view(p.shape).addcmul_(grad_p, p)
        if scores is None:
            return (None,) * 9
        flat = scores.view(p.shape)
        empty = q.new_empty(1, 1, 1)
        grad_query = torch.baddbmm(empty, flat, k, beta=0, alpha=ctx.weight).view(query.shape)
        grad_key = torch.baddbmm(empty, flat.transpose(1, 2), q, beta=0, alpha=ctx.weight).view(key.shape)
        below = None if ctx.first else flat.mul_(ctx.decay).view(weights.shape)
        return below, grad_query, grad_key, grad_value, None, None, None, None, None


def attend_long(
    terms: Sequence[Term], value: Tensor, allowed: Tensor | None, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(sum_j w_j q_j k_j^T + M) v in memory that is linear in the length.

    Args:
        terms: the terms of all layers so far. The term of this layer comes last.
        value: (B,H,K,D).
        allowed: bool, (B|1,H|1,Q|1,K), True where a query may see a key; or None.
        causal: query t (from 0) sees the first t + 1 keys. Not together with `allowed`.
        dropout: the probability that a weight is dropped.

    Returns:
        The heads (B,H,Q,D). A query that may see no key gets zeros.
    """
    queries, keys = terms[-1][0].shape[2], value.shape[2]
    block = BLOCK if value.device.type == "cpu" else OTHERWISE
    size = max(1, block // (value.shape[0] * value.shape[1] * keys))
    blocks = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        allowed_here = allowed if allowed is None or allowed.shape[2] == 1 else allowed[:, :, start:stop]
        arguments = (start, stop, stop if causal else keys, allowed_here, causal, dropout, terms, value)
        if torch.is_grad_enabled():
            blocks.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            blocks.append(_block(*arguments))
    return torch.cat(blocks, 2)


def _block(
    start: int,
    stop: int,
    seen: int,
    allowed: Tensor | None,
    causal: bool,
    dropout: float,
    terms: Sequence[Term],
    value: Tensor,
) -> Tensor:
    """The heads of the queries from `start` up to, but not including, `stop`: (B,H,stop - start,D).

    They see the first `seen` keys. The other arguments are those of `attend_long`.
    """
    batch, heads = value.shape[:2]
    scores: Tensor | None = None
    for q, k, weight in terms:
        left, right = q[:, :, start:stop].flatten(0, 1), k[:, :, :seen].flatten(0, 1).transpose(1, 2)
        base = left.new_empty(1, 1, 1) if scores is None else scores
        scores = torch.baddbmm(base, left, right, beta=float(scores is not None), alpha=weight)
    assert scores is not None
    scores = scores.view(batch, heads, stop - start, seen)
    if causal:
        allowed = torch.ones(stop - start, seen, dtype=torch.bool, device=scores.device).tril(start)[None, None]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    p = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    out = F.dropout(p, dropout) @ value[:, :, :seen]
    return out if allowed is None else out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
