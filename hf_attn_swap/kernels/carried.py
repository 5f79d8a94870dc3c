"""Which form attention with carried scores takes: H_l = b H_{l-1} + c S_l, heads = softmax(H_l + M) V; all are equal.

Long sequences never hold H. Otherwise one H serves all layers, moved on in place, with the mask in it as -inf; without
gradients SDPA reads b H_{l-1} as its mask. Dropout, half precision, autocast, a compiler and masks that differ between
layers take the general form. Axes: B batch, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Call, FusedSoftmax, Hidden, Inputs
from . import hopfield

LONG = 4096  # tokens from which on H is not held: for 12 heads it would take 800 MB per layer
IN_PLACE = (torch.float32, torch.float64)


def attend(inputs: Inputs, call: Call, sdpa: FusedSoftmax, below: Hidden | None, decay: float, share: float) -> Tensor:
    """Heads (B,Q,H,D), in the form that fits; H is left for the layer above.

    Args:
        inputs: tensors and masks; no mask that adds a bias.
        call: its `carried` is what the layers share.
        sdpa: the stock fused function.
        below: H of the layer below, or None below the first.
        decay: b.
        share: c.
    """
    traced = torch.compiler.is_compiling()  # a compiler plans memory by itself
    if not traced and inputs.query.shape[2] * inputs.key.shape[2] >= LONG**2 and (below is None or below.terms):
        return _long(inputs, call, below, decay, share)
    types = {inputs.query.dtype, inputs.key.dtype, inputs.value.dtype}
    cast = torch.is_autocast_enabled(inputs.query.device.type)
    plain = call.uniform and not cast and inputs.dropout == 0 and len(types) == 1 and inputs.query.dtype in IN_PLACE
    if traced or not plain:
        return _general(inputs, call, below, decay, share)
    return _in_place(inputs, call, sdpa, below, decay, share)


def leave(hidden: Hidden | None, call: Call, *, drop: bool) -> None:
    """Leave H for the layer above, and drop the one below where nothing needs it any more."""
    assert call.carried is not None
    if hidden is not None:
        call.carried.scores[call.order] = hidden
    if drop:
        call.carried.scores.pop(call.order - 1, None)
        call.carried.raw.pop(call.order - 1, None)


def _in_place(
    inputs: Inputs, call: Call, sdpa: FusedSoftmax, below: Hidden | None, decay: float, share: float
) -> Tensor:
    assert call.carried is not None
    device, gradients = inputs.query.device, torch.is_grad_enabled()
    blocked, blind = inputs.blocked(call.carried)
    here = below is not None and below.scores is not None and below.scores.device == device
    put = blocked  # what has yet to become -inf in H
    if below is not None and below.blocked is not None and here:
        if blocked is None or not (blocked is below.blocked or torch.equal(blocked, below.blocked)):
            raise ValueError("mha: the layers of one pass have different masks; give every layer the same.")
        put = None
    hidden, factor, fresh = None, 1.0, call.recomputed
    if below is not None and here and (below.factor == 1 or not gradients):
        hidden, factor = below.scores, below.factor
    elif below is not None:
        hidden, fresh, put = below.plain().to(device), True, blocked
    if gradients:
        qkv = (inputs.query, inputs.key, inputs.value)
        hidden, heads = hopfield.attend(hidden, *qkv, decay, share * inputs.scaling, put, fresh)
        leave(Hidden(hidden, blocked=blocked), call, drop=not fresh)
        heads = heads.transpose(1, 2)
    else:
        hidden = _as_mask(hidden, decay / factor, put, fresh)
        heads = _read(inputs, call, sdpa, hidden, decay, share)
    return heads if blind is None else heads.masked_fill(blind.transpose(1, 2), 0.0)


def _as_mask(hidden: Tensor | None, factor: float, put: Tensor | None, fresh: bool) -> Tensor | None:
    """H times `factor` with the mask in it, in place unless `fresh`."""
    if hidden is None:
        return None
    hidden = hidden.clone() if fresh else hidden
    hidden = hidden if factor == 1 else hidden.mul_(factor)
    return hidden if put is None else hidden.masked_fill_(put, -torch.inf)


def _read(inputs: Inputs, call: Call, sdpa: FusedSoftmax, below: Tensor | None, decay: float, share: float) -> Tensor:
    """SDPA with b H_{l-1} (or, in the first layer, the mask) as its mask; then b H_l takes its place, if it is read."""
    assert call.carried is not None
    mask, causal = (below, False) if below is not None else inputs.dense_mask(call)
    query = inputs.query if share == 1 else inputs.query * share
    heads = sdpa((query, inputs.key, inputs.value), mask, causal)
    left = None
    if not call.last:
        blocked = inputs.blocked(call.carried)[0]
        weight = decay * share * inputs.scaling
        put = blocked if below is None else None
        moved = hopfield.advance(below, inputs.query, inputs.key, decay, weight, put, fresh=False)
        left = Hidden(moved, decay, blocked)
    leave(left, call, drop=True)
    return heads


def _general(inputs: Inputs, call: Call, below: Hidden | None, decay: float, share: float) -> Tensor:
    """H without masks, and softmax beside it.

    In place is safe for gradients: softmax keeps its output, masking its mask, never H. A checkpointed layer is
    computed again from H below, so there H is a new tensor.
    """
    key, value = inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    weight, gradients = share * inputs.scaling, torch.is_grad_enabled()
    q, k = inputs.query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    if below is None:
        flat = torch.baddbmm(q.new_empty(1, 1, 1), q, k, beta=0, alpha=weight)
    else:
        flat = below.plain().to(q.device).flatten(0, 1)
        fresh = call.recomputed or torch.compiler.is_compiling() or flat.is_inference() or flat.dtype != q.dtype
        step = torch.baddbmm if fresh else Tensor.baddbmm_
        flat = step(flat.to(q.dtype), q, k, beta=decay, alpha=weight)
        gradients = gradients and fresh
    hidden = flat.view(*inputs.query.shape[:3], key.shape[2])
    leave(Hidden(hidden), call, drop=not gradients)
    allowed = inputs.allowed(call)
    scores = hidden if allowed is None else hidden.masked_fill(~allowed, torch.finfo(hidden.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    heads = F.dropout(weights.to(value.dtype), inputs.dropout) @ value
    if allowed is not None:  # a row that may see nothing reads nothing, as in SDPA
        heads = heads.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return heads.transpose(1, 2)


def _long(inputs: Inputs, call: Call, below: Hidden | None, decay: float, share: float) -> Tensor:
    """H as the sum of its terms: memory linear in the length, at one more product per layer below."""
    device = inputs.query.device  # under a device map, lower layers may compute on another
    lower = below.terms if below is not None else []
    terms = [(q.to(device), k.to(device), weight * decay) for q, k, weight in lower]
    terms.append((inputs.query, inputs.repeated(inputs.key), share * inputs.scaling))
    leave(Hidden(None, terms=terms), call, drop=not torch.is_grad_enabled())
    mask, causal = inputs.dense_mask(call)
    allowed = None if causal or mask is None else inputs.allowed(call)
    value = inputs.repeated(inputs.value)
    return hopfield.attend_long(terms, value, allowed, causal, inputs.dropout).transpose(1, 2)
