"""What one call of a swapped layer is given: its tensors and masks, its context, and what the layers share.

Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Strength = float | Tensor
Three = tuple[Tensor, Tensor, Tensor]


class FusedSoftmax(Protocol):
    """Ordinary attention by the stock fused function: heads (B,Q,H,D) from q, k, v, mask and causal flag."""

    def __call__(self, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool) -> Tensor:
        """One mask or the flag, never both."""
        ...


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one attention module: heads H, kv_heads G, head_dim D, hidden E (width of input and output)."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


@dataclass
class Hidden:
    """The carried scores H of one layer, in the form that the layer above reads fastest.

    Attributes:
        scores: (B,H,Q,K), `factor` times H, or None where only `terms` are kept.
        factor: see `scores`.
        blocked: the mask (True at what no query may see) that already put -inf into `scores`, or None.
        terms: (q, k, w) of every layer so far, H = sum w q k^T, with keys per query head.
    """

    scores: Tensor | None
    factor: float = 1.0
    blocked: Tensor | None = None
    terms: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B,H,Q,K)."""
        if self.scores is not None:
            return tuple(self.scores.shape)
        q, k, _ = self.terms[-1]
        return (*q.shape[:3], k.shape[2])

    def plain(self) -> Tensor:
        """H (B,H,Q,K), finite everywhere; what lies under its mask means nothing."""
        if self.scores is None:
            return torch.stack([weight * (q @ k.transpose(2, 3)) for q, k, weight in self.terms]).sum(0)
        scores = self.scores if self.factor == 1 else self.scores / self.factor
        return scores if self.blocked is None else scores.clamp_min(torch.finfo(scores.dtype).min)

    def clone(self) -> Hidden:
        """A copy that no layer moves on."""
        return Hidden(None if self.scores is None else self.scores.clone(), self.factor, self.blocked, self.terms)


@dataclass
class Carried:
    """What the layers of one stack share during one forward pass; made anew for every pass."""

    scores: dict[int, Hidden] = field(default_factory=dict)  # H by layer order
    raw: dict[int, Tensor] = field(default_factory=dict)  # likewise S, where a scheme needs it
    calls: int = 0  # of a shared module so far (ALBERT)
    closed: bool = False  # the pass is over; a later call is a re-computation
    want_weights: bool = False  # the caller asked for the attention weights
    key_mask: tuple[Tensor, Tensor] | None = None  # the last 2-D mask and its 4-D form: it is expanded once
    additive: tuple[Tensor, Tensor] | None = None  # the last dense mask and the numbers it stands for
    seen: tuple[Any, Tensor | None, Tensor | None] | None = None  # the last masks, what they block, blind rows
    gradients: bool = True  # the pass has gradients; re-entrant checkpointing hides them from the layers
    arrived: bool = False  # a layer was handed this: the architecture passes keyword arguments on


@dataclass
class Call:
    """One call of one swapped layer.

    Attributes:
        x: (B,Q,E), what the layer's own Q/K/V projections read.
        start: where the current tokens' values are among the keys (the cache's length before the update), or None.
        carried: what the layers share, or None where the architecture passes nothing on.
        order: place among the layers that carry scores.
        last: no layer above carries scores on.
        uniform: all layers of the model are under the same masks.
        residual: (B,Q,E), the block's residual stream, where a variant asked for it.
        strength: 1.0, or a (1,) tensor in between.
        value: (B,G,K,D), the values of all keys.
        kept: what `read` leaves for `write`.
        dropout: the model's hidden dropout, for variants that bypass W_o.
        recomputed: the enclosing layer is under activation checkpointing, so carried scores must stay as they are.
        state: the cache of linear attention, where one is in use.
        tap: sees "scores" (before the mask), "probabilities" and "context", and gives what goes on in their place.
    """

    x: Tensor
    start: int | Tensor | None = None
    carried: Carried | None = None
    order: int = 0
    last: bool = False
    uniform: bool = False
    residual: Tensor | None = None
    strength: Strength = 1.0
    value: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    dropout: Callable[[Tensor], Tensor] | None = None
    recomputed: bool = False
    state: Any = None
    tap: Callable[[str, Tensor], Tensor] | None = None

    def own_values(self, heads: int) -> Tensor:
        """The rows of V that belong to the current tokens, repeated per group: (B,Q,H,D)."""
        assert self.value is not None
        queries, keys = self.x.shape[1], self.value.shape[2]
        if isinstance(self.start, Tensor):
            first = self.start.clamp(max=keys - queries)
            rows = first + torch.arange(queries, device=self.value.device)
            own_BGQD = self.value.index_select(2, rows)
        elif keys == queries:
            own_BGQD = self.value
        elif self.start is None:
            raise ValueError(
                f"{queries} tokens attend to {keys} keys, but this architecture hands its cache over under a name that "
                "we do not know, so their own values cannot be found; generate with use_cache=False."
            )
        else:
            own_BGQD = self.value.narrow(2, min(self.start, keys - queries), queries)
        own_BLGD = own_BGQD.transpose(1, 2)
        return own_BLGD.repeat_interleave(heads // own_BLGD.shape[2], 2) if heads != own_BLGD.shape[2] else own_BLGD


@dataclass
class Inputs:
    """What the attention function was given, with one meaning for every mask.

    Attributes:
        query, key, value: (B,H,Q,D), (B,G,K,D), (B,G,K,D), after rotary embedding and q/k norms.
        scaling: factor of q k^T.
        key_mask: (B,K) bool, or None; with `causal` it is aligned to the bottom right.
        mask: bool or additive float, broadcastable to (B,H,Q,K), or None. Never together with `key_mask`.
        causal: plain causal order on top of `key_mask`, or alone with as many keys as queries.
        dropout: probability, 0 in evaluation.
        softcap, position_bias: as the architecture passes them, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    key_mask: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: Tensor | None = None

    def dense_mask(self, call: Call) -> tuple[Tensor | None, bool]:
        """The mask for SDPA, with its causal flag: a 2-D mask is expanded once per forward pass."""
        if self.key_mask is None:
            return self.mask, self.causal
        seen = call.carried.key_mask if call.carried is not None else None
        if seen is not None and seen[0] is self.key_mask:
            return seen[1], False
        dense = expand_key_mask(self.key_mask, self.query.shape[2], self.causal)
        if call.carried is not None and self.causal:
            call.carried.key_mask = (self.key_mask, dense)
        return dense, False

    def additive_mask(self, call: Call) -> tuple[Tensor | None, bool]:
        """`dense_mask` as finite numbers in the dtype of the scores: made once per forward pass."""
        mask, causal = self.dense_mask(call)
        if mask is None:
            return None, causal
        seen = call.carried.additive if call.carried is not None else None
        if seen is not None and seen[0] is mask and seen[1].dtype == self.query.dtype:
            return seen[1], False
        rows = mask[:, :, :1] if mask.stride(2) == 0 else mask  # one row stands for all
        lowest = torch.finfo(self.query.dtype).min
        if rows.dtype == torch.bool:
            made = torch.zeros_like(rows, dtype=self.query.dtype).masked_fill_(~rows, lowest)
        else:
            made = rows.to(self.query.dtype).clamp_min(lowest)
        if call.carried is not None:
            call.carried.additive = (mask, made)
        return made, False

    def allowed(self, call: Call) -> Tensor | None:
        """(B|1,1|H,Q,K) bool, True where the query may look; None means everywhere."""
        mask, causal = self.dense_mask(call)
        if causal:
            square = torch.ones(self.query.shape[2], self.key.shape[2], dtype=torch.bool, device=self.query.device)
            return square.tril()[None, None]
        if mask is None or mask.dtype == torch.bool:
            return mask
        return mask > torch.finfo(mask.dtype).min / 2

    def repeated(self, tensor_BGKD: Tensor) -> Tensor:
        """Key or value heads repeated per group: (B,G,K,D) -> (B,H,K,D)."""
        groups = self.query.shape[1] // tensor_BGKD.shape[1]
        return tensor_BGKD if groups == 1 else tensor_BGKD.repeat_interleave(groups, 1)

    def blocked(self, carried: Carried) -> tuple[Tensor | None, Tensor | None]:
        """What no query may see (B|1,1|H,Q,K), and the queries that may see nothing (B|1,1|H,Q,1), or None twice.

        Blind queries are not in the first, so that no row of it is True throughout. Worked out once per pass.
        """
        masks = (self.mask, self.key_mask, self.causal, self.query.shape[2])
        if carried.seen is None or not _same(carried.seen[0], masks):
            allowed = self.allowed(Call(x=self.query, carried=carried))
            blind = None if allowed is None else ~allowed.any(-1, keepdim=True)
            blocked = None if allowed is None or blind is None else ~(allowed | blind)
            carried.seen = (masks, blocked, blind)
        return carried.seen[1:]

    def mask_bias(self) -> Tensor | None:
        """What an additive float mask adds where it does not forbid, or None."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return self.mask.masked_fill(self.mask <= torch.finfo(self.mask.dtype).min / 2, 0.0)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Tensors by identity, the rest by value."""
    return all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def expand_key_mask(key_mask_BK: Tensor, queries: int, causal: bool) -> Tensor:
    """(B,K) bool to (B,1,Q,K) bool; causal order is aligned to the bottom right."""
    keys = key_mask_BK.shape[1]
    dense = key_mask_BK[:, None, None, :].expand(-1, 1, queries, keys)
    if not causal:
        return dense
    return dense & torch.ones(queries, keys, dtype=torch.bool, device=key_mask_BK.device).tril(keys - queries)
