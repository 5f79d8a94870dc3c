"""Computes attention with scores that are carried across layers, in one of three equal forms.

H_l = b H_{l-1} + c S_l and heads = softmax(H_l + M) V. b = 0 and c = 1 is ordinary attention.
`Form.IN_PLACE`: all layers share one tensor H. Each layer updates H in place, and writes the mask into H as -inf. With
gradients, softmax and a product compute the heads. Without gradients, SDPA does, with b H_{l-1} as its mask.
`Form.TERMS`: for long sequences, H is never held as a tensor (see `hopfield.attend_long`).
`Form.REFERENCE`: the readable pipeline of `layer.compute` runs for everything else. `dispatch.carried_form` decides.
Modern Hopfield attention, eq. 10; docs/mathematics.md, section Modern Hopfield attention.
Axes: B batch, H head, Q query, K key, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import Call, FusedSoftmax, Hidden, Inputs
from . import hopfield
from .dispatch import Form


def attend(
    form: Form, inputs: Inputs, call: Call, sdpa: FusedSoftmax, below: Hidden | None, decay: float, share: float
) -> Tensor | None:
    """Compute the heads of one layer, and leave H for the layer above.

    Args:
        form: the form that `dispatch.carried_form` chose for this call.
        inputs: the tensors and the masks. The mask must not add numbers to scores.
        call: the call; H is kept in `call.context`.
        sdpa: the stock fused function.
        below: H of the layer below, or None for the first layer.
        decay: the factor b of H_{l-1}.
        share: the factor c of S_l.

    Returns:
        The heads (B,Q,H,D), or None if the readable form must run.

    Raises:
        ValueError: the layer below has another mask.
    """
    if form is Form.TERMS and (below is None or below.terms):
        return _long(inputs, call, below, decay, share)
    if form is Form.IN_PLACE:
        return _in_place(inputs, call, sdpa, below, decay, share)
    return None


def leave(hidden: Hidden | None, call: Call, *, drop: bool) -> None:
    """Keep H for the layer above. None means that no later layer reads H.

    With `drop`, H of the layer below is forgotten, which frees its memory.
    """
    assert call.context is not None
    if hidden is not None:
        call.context.scores[call.order] = hidden
    if drop:
        call.context.scores.pop(call.order - 1, None)
        call.context.raw.pop(call.order - 1, None)


def _in_place(
    inputs: Inputs, call: Call, sdpa: FusedSoftmax, below: Hidden | None, decay: float, share: float
) -> Tensor:
    """The heads (B,Q,H,D) by `Form.IN_PLACE`."""
    blocked, blind = inputs.masks.blocked()
    hidden, put = _moved_here(below, inputs.query, blocked)
    fresh = call.recomputed or (below is not None and hidden is not below.scores)
    if torch.is_grad_enabled() or inputs.dropout > 0:
        moved, heads = hopfield.attend(
            hidden,
            *inputs.three,
            decay=decay,
            weight=share * inputs.scaling,
            blocked=put,
            fresh=fresh,
            dropout=inputs.dropout,
        )
        leave(Hidden(moved, blocked=blocked), call, drop=not fresh)
        heads = heads.transpose(1, 2)
    else:
        heads = _read(inputs, call, sdpa, hidden, decay, share, put)
    return heads if blind is None else heads.masked_fill(blind.transpose(1, 2), 0.0)


def _read(
    inputs: Inputs,
    call: Call,
    sdpa: FusedSoftmax,
    hidden: Tensor | None,
    decay: float,
    share: float,
    put: Tensor | None,
) -> Tensor:
    """The heads (B,Q,H,D) without gradients: SDPA takes b H_{l-1} as its mask, and H_l then replaces H_{l-1}."""
    mask, causal = inputs.masks.dense()
    if hidden is not None:
        hidden = hidden.clone().mul_(decay) if call.recomputed else hidden.mul_(decay)
        mask, causal = hidden if put is None else hidden.masked_fill_(put, -torch.inf), False
        put = None
    heads = sdpa((inputs.query * share, inputs.key, inputs.value), mask, causal)
    left = None
    if not call.last:  # a later layer reads H
        moved = hopfield.advance(hidden, inputs.query, inputs.key, 1.0, share * inputs.scaling, put, fresh=False)
        left = Hidden(moved, blocked=inputs.masks.blocked()[0])
    leave(left, call, drop=not call.recomputed)
    return heads


def _moved_here(below: Hidden | None, query: Tensor, blocked: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Bring H of the layer below to this layer's device and dtype.

    Returns:
        H (B,H,Q,K), or None for the first layer; and the mask that must still be written into H, or None.

    Raises:
        ValueError: the layer below has another mask.
    """
    if below is None:
        return None, blocked
    scores = below.scores
    if scores is None or scores.device != query.device or scores.dtype != query.dtype:
        return below.plain().to(query), blocked
    if below.blocked is None:
        return scores, blocked
    if blocked is None or not (blocked is below.blocked or torch.equal(blocked, below.blocked)):
        raise ValueError("modern_hopfield: the layers of one pass have different masks; give every layer the same.")
    return scores, None


def _long(inputs: Inputs, call: Call, below: Hidden | None, decay: float, share: float) -> Tensor:
    """The heads (B,Q,H,D) by `Form.TERMS`: memory is linear in the length, and each lower layer costs one product."""
    device = inputs.query.device  # under a device map, lower layers may compute on another device
    lower = below.terms if below is not None else []
    terms = [(q.to(device), k.to(device), weight * decay) for q, k, weight in lower]
    terms.append((inputs.query, inputs.repeated(inputs.key), share * inputs.scaling))
    leave(Hidden(None, terms=terms), call, drop=not torch.is_grad_enabled())
    mask, causal = inputs.masks.dense()
    allowed = None if causal or mask is None else inputs.masks.allowed()
    value = inputs.repeated(inputs.value)
    return hopfield.attend_long(terms, value, allowed, causal, inputs.dropout).transpose(1, 2)
