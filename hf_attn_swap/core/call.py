"""The data of one call of a swapped layer: its tensors, its context, and what the layers of a pass share.

These classes hold data and compute nothing but simple forms of this data.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .masks import Made, Masks

Strength = float | Tensor
T = TypeVar("T")
Three = tuple[Tensor, Tensor, Tensor]


class FusedSoftmax(Protocol):
    """A function that computes ordinary attention by PyTorch's fused function, as transformers calls that function."""

    def __call__(self, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool) -> Tensor:
        """Compute heads (B,Q,H,D) from query (B,H,Q,D), key (B,G,K,D) and value (B,G,K,D).

        The caller gives a mask, or sets `causal`, or neither; never both.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of one attention module.

    Attributes:
        heads: number of query heads, H.
        kv_heads: number of key/value heads, G.
        head_dim: width of a head, which is that of its values, D.
        hidden: width of the module's input and output, E.
        key_dim: width of a query and of a key; None means as wide as a value.
        query_scale: the factor by which the module itself has multiplied its queries, instead of a scaling of the
            attention function. A variant without scores divides by it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    key_dim: int | None = None
    query_scale: float = 1.0


class DeviceAndDtype(NamedTuple):
    """Where an attention module computes.

    Attributes:
        device: the device.
        dtype: the dtype, a floating point one.
    """

    device: torch.device
    dtype: torch.dtype


@dataclass
class Hidden:
    """The carried scores H of one layer, as a tensor or as a sum of products.

    Attributes:
        scores: H as a tensor (B,H,Q,K), or None if `terms` hold H.
        blocked: a mask, True where a query may not see a key. `scores` already hold -inf at these places. None means
            that `scores` hold finite numbers everywhere.
        terms: one triple (q, k, w) per layer so far, with H = sum of w q k^T. The shapes are q (B,H,Q,D) and
            k (B,H,K,D): the keys are repeated for each query head.
    """

    scores: Tensor | None
    blocked: Tensor | None = None
    terms: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of H, (B,H,Q,K)."""
        if self.scores is not None:
            return tuple(self.scores.shape)
        q, k, _ = self.terms[-1]
        return (*q.shape[:3], k.shape[2])

    def plain(self) -> Tensor:
        """H (B,H,Q,K) as finite numbers. The numbers at masked places have no meaning."""
        if self.scores is None:
            products = [weight * (q @ k.transpose(2, 3)) for q, k, weight in self.terms]
            return torch.stack(products).sum(0)
        if self.blocked is None:
            return self.scores
        return self.scores.clamp_min(torch.finfo(self.scores.dtype).min)

    def clone(self) -> Hidden:
        """A copy that no layer changes in place."""
        scores = None if self.scores is None else self.scores.clone()
        return Hidden(scores, self.blocked, self.terms)


def _passed_whole(cls: type[T]) -> type[T]:
    """Let programs that look for tensors inside dataclasses hand an object of this class on as it is.

    FSDP2 copies each dataclass with a tensor that needs a gradient, together with its dicts. What one layer then writes
    into its copy would not reach the layers after it.
    """
    del cls.__dataclass_fields__  # type: ignore[attr-defined]  # the one mark of a dataclass
    return cls


@_passed_whole
@dataclass
class ForwardContext:
    """What the layers of one stack share during one forward pass. Each pass makes a new `ForwardContext`.

    Attributes:
        scores: the carried scores H of each layer, by the layer's number among the layers that carry scores.
        raw: each layer's own scores S, by the same number; filled only if the scheme of `modern_hopfield` needs S.
        calls: how many times a shared module was called so far (ALBERT has one module for all layers).
        closed: True after the pass. A call that comes later belongs to a re-computation.
        want_weights: True if the caller asked for the attention weights.
        masks: the forms of masks that were worked out in this pass; see `Masks`.
        gradients: True if the pass computes gradients. A layer cannot see this under re-entrant checkpointing.
        arrived: True after a layer received this object, which shows that the model passes keyword arguments on.
        from_first_seen: True if the positions begin at 0 at the first seen token of each row (`wiring/positions.py`).
    """

    scores: dict[int, Hidden] = field(default_factory=dict)
    raw: dict[int, Tensor] = field(default_factory=dict)
    calls: int = 0
    closed: bool = False
    want_weights: bool = False
    masks: list[Made] = field(default_factory=list)
    gradients: bool = True
    arrived: bool = False
    from_first_seen: bool = False


@_passed_whole
@dataclass
class Call:
    """One call of one swapped layer.

    Attributes:
        x: (B,Q,E), the tensor that the layer's own query, key and value projections read.
        start: the position of the first current token among the keys, which is the length of the cache before the
            update; None if the call has no cache.
        context: what the layers share, or None if the model does not pass keyword arguments on.
        order: the layer's number among the layers that carry scores, from 0.
        first: True for the first of these layers, which takes no scores from a layer below.
        last: True if no later layer reads the carried scores.
        uniform: True if all layers of the model have the same masks.
        residual: (B,Q,E), the residual stream of the block, or None if no variant asked for the residual stream.
        value: (B,G,K,D), the values of all keys.
        kept: a tensor that the variant's `read` keeps for the variant's `write`.
        dropout: the model's hidden dropout, for variants that add something beside W_o.
        recomputed: True if the block is under activation checkpointing. Carried scores must then not change in place.
        state: what the cache holds of this layer in place of all keys and values (linear attention, a window), or None.
        probe: a function that is given a name and a tensor, and returns the tensor that the computation goes on with.
            The names are "scores" (before the mask), "probabilities" (the weights that multiply the values) and
            "context" (the heads).
        exact_strength: 1.0 at full strength, and below a (1,) tensor in fp32. A variant asks for it by `strength_in`.
        value_squares: (H,D), the squares of the scales of the values (scaled values); None if all are 1.
        used: how often the attention function was asked with this call.
    """

    x: Tensor
    start: int | Tensor | None = None
    context: ForwardContext | None = None
    order: int = 0
    first: bool = True
    last: bool = False
    uniform: bool = False
    residual: Tensor | None = None
    value: Tensor | None = None
    kept: Tensor | None = None
    dropout: Callable[[Tensor], Tensor] | None = None
    recomputed: bool = False
    state: Any = None
    probe: Callable[[str, Tensor], Tensor] | None = None
    exact_strength: Strength = 1.0
    value_squares: Tensor | None = None
    used: int = 0

    def strength_in(self, dtype: torch.dtype) -> Strength:
        """The strength: 1.0 at full strength, and below a (1,) tensor in `dtype`.

        A variant gives the dtype of the tensor that it changes, so that the product of both keeps this dtype.
        """
        exact = self.exact_strength
        return exact.to(dtype) if isinstance(exact, Tensor) else exact

    @property
    def between(self) -> bool:
        """True if the strength lies between 0 and 1."""
        return isinstance(self.exact_strength, Tensor)

    def own_values(self, heads: int) -> Tensor:
        """The rows of V that belong to the current tokens, repeated for each query head: (B,Q,H,D).

        Raises:
            ValueError: the position of the current tokens among the keys is not known.
        """
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
                f"{queries} tokens attend to {keys} keys, but no argument of the module holds a cache, so the tokens' "
                "own values cannot be found; generate with use_cache=False."
            )
        else:
            own_BGQD = self.value.narrow(2, min(self.start, keys - queries), queries)
        own_BLGD = own_BGQD.transpose(1, 2)
        if own_BLGD.shape[2] == heads:
            return own_BLGD
        return own_BLGD.repeat_interleave(heads // own_BLGD.shape[2], 2)

    def probed(self, place: str, tensor: Tensor) -> Tensor:
        """The tensor that the computation goes on with: `tensor`, or what the probe returns for `tensor`."""
        return tensor if self.probe is None else self.probe(place, tensor)


@dataclass
class Inputs:
    """The tensors and numbers that transformers gives to the attention function.

    Attributes:
        query, key, value: (B,H,Q,D), (B,G,K,D) and (B,G,K,D), after rotary embedding and norms of queries and keys.
        scaling: the factor of q k^T.
        masks: what each query may see.
        dropout: the probability that a weight is dropped; 0 in evaluation.
        softcap: the bound c of scores, which become c tanh(scores / c); None if the architecture has no bound.
        position_bias: numbers to add to the scores, broadcastable to (B,H,Q,K); None if the architecture has none.
        further: the number of keys in front that are no keys of the text (the place "keys").
        own_window: the number of last keys that the model's own mask shows in this layer; None if it shows all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    masks: Masks
    dropout: float
    softcap: float | None = None
    position_bias: Tensor | None = None
    further: int = 0
    own_window: int | None = None

    @property
    def three(self) -> Three:
        """The query, the key and the value, as one tuple."""
        return self.query, self.key, self.value

    def repeated(self, tensor_BGKD: Tensor) -> Tensor:
        """Keys or values, repeated for each query head of their group: from (B,G,K,D) to (B,H,K,D)."""
        groups = self.query.shape[1] // tensor_BGKD.shape[1]
        return tensor_BGKD if groups == 1 else tensor_BGKD.repeat_interleave(groups, 1)
