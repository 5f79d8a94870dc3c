"""What one call of a swapped layer is given: its tensors, its context, and what the layers share.

Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .masks import Made, Masks

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
    """The carried scores H of one layer.

    Attributes:
        scores: (B,H,Q,K), or None where only `terms` are kept.
        blocked: the mask (True at what no query may see) whose places already hold -inf in `scores`, or None.
        terms: (q, k, w) of every layer so far, with H = sum w q k^T and one row of keys per query head.
    """

    scores: Tensor | None
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
        """H (B,H,Q,K) as finite numbers; the numbers at masked places have no meaning."""
        if self.scores is None:
            return torch.stack([weight * (q @ k.transpose(2, 3)) for q, k, weight in self.terms]).sum(0)
        return self.scores if self.blocked is None else self.scores.clamp_min(torch.finfo(self.scores.dtype).min)

    def clone(self) -> Hidden:
        """A copy that no layer changes in place."""
        return Hidden(None if self.scores is None else self.scores.clone(), self.blocked, self.terms)


@dataclass
class Carried:
    """What the layers of one stack share during one forward pass; every pass has a new one.

    Attributes:
        scores: H by the order of the layers that carry scores.
        raw: the layer's own scores S by the same order, where a scheme needs them.
        calls: how often a shared module was called so far (ALBERT has one module for all layers).
        closed: True after the pass; a call that comes later computes something again.
        want_weights: True if the caller asked for the attention weights.
        masks: forms of masks that were worked out in this pass, see `Masks`.
        gradients: True if the pass has gradients; re-entrant checkpointing hides this from the layers.
        arrived: True once a layer received this object, so the architecture passes keyword arguments on.
    """

    scores: dict[int, Hidden] = field(default_factory=dict)
    raw: dict[int, Tensor] = field(default_factory=dict)
    calls: int = 0
    closed: bool = False
    want_weights: bool = False
    masks: list[Made] = field(default_factory=list)
    gradients: bool = True
    arrived: bool = False


@dataclass
class Call:
    """One call of one swapped layer.

    Attributes:
        x: (B,Q,E), what the layer's own Q/K/V projections read.
        start: where the current tokens' values are among the keys (the cache's length before the update), or None.
        carried: what the layers share, or None where the architecture passes nothing on.
        order: place among the layers that carry scores.
        last: True if no layer above carries scores on.
        uniform: True if all layers of the model are under the same masks.
        residual: (B,Q,E), the block's residual stream, where a variant asked for it.
        strength: 1.0 at full strength. Below, a (1,) tensor in the dtype of the tensor that a variant's method is
            given, so that the product of both keeps this dtype.
        value: (B,G,K,D), the values of all keys.
        kept: what a variant's `read` leaves for its `write`.
        dropout: the model's hidden dropout, for variants that bypass W_o.
        recomputed: True if the enclosing layer is under activation checkpointing: carried scores must not change.
        state: the cache of linear attention, where there is one.
        tap: a function that sees "scores" (before the mask), "probabilities" and "context", and returns the tensor
            that takes its place.
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
    kept: Tensor | None = None
    dropout: Callable[[Tensor], Tensor] | None = None
    recomputed: bool = False
    state: Any = None
    tap: Callable[[str, Tensor], Tensor] | None = None
    exact_strength: Strength = 1.0

    def hand(self, dtype: torch.dtype) -> Call:
        """This call, with its strength in the dtype of the tensor that comes with the call."""
        exact = self.exact_strength
        self.strength = exact.to(dtype) if isinstance(exact, Tensor) else exact
        return self

    @property
    def between(self) -> bool:
        """True at a strength between 0 and 1."""
        return isinstance(self.exact_strength, Tensor)

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
        if own_BLGD.shape[2] == heads:
            return own_BLGD
        return own_BLGD.repeat_interleave(heads // own_BLGD.shape[2], 2)

    def tapped(self, place: str, tensor: Tensor) -> Tensor:
        """The tensor that goes on from here: the given one, or what the tap puts in its place."""
        return tensor if self.tap is None else self.tap(place, tensor)


@dataclass
class Inputs:
    """The tensors that an attention function was given.

    Attributes:
        query, key, value: (B,H,Q,D), (B,G,K,D), (B,G,K,D), after rotary embedding and q/k norms.
        scaling: factor of q k^T.
        masks: what each query may see.
        dropout: probability of dropping a weight, 0 in evaluation.
        softcap, position_bias: as the architecture passes them, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    masks: Masks
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: Tensor | None = None

    @property
    def three(self) -> Three:
        """Query, key and value."""
        return self.query, self.key, self.value

    def repeated(self, tensor_BGKD: Tensor) -> Tensor:
        """Key or value heads repeated per group: (B,G,K,D) -> (B,H,K,D)."""
        groups = self.query.shape[1] // tensor_BGKD.shape[1]
        return tensor_BGKD if groups == 1 else tensor_BGKD.repeat_interleave(groups, 1)
