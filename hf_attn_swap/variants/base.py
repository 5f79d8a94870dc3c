"""The five places of an attention layer that a variant may change, and what each is given.

scores -> normaliser -> weights -> (weights @ values) -> read -> W_o -> write. A variant overrides the methods of
the places it names; everything else stays the pretrained layer. Two variants compose when their places differ.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

PLACES = ("scores", "normaliser", "weights", "read", "write")
Strength = float | Tensor
Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one attention module: heads H, kv_heads G, head_dim D, hidden E (width of input and output)."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """A variant without options."""


@dataclass
class Carried:
    """What the layers of one stack share during one forward pass; made anew for every pass."""

    scores: dict[int, Tensor] = field(default_factory=dict)  # H by layer order
    raw: dict[int, Tensor] = field(default_factory=dict)  # likewise S, where a scheme needs it
    calls: int = 0  # of a shared module so far (ALBERT)
    closed: bool = False  # the pass is over; a later call is a re-computation
    want_weights: bool = False  # the caller asked for the attention weights
    key_mask: tuple[Tensor, Tensor] | None = None  # the last 2-D mask and its 4-D form: it is expanded once
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


def in_dtype(strength: Strength, like: Tensor) -> Strength:
    """The strength in the dtype of `like`, so that products with it are not rounded to fp32."""
    return strength.to(like.dtype) if isinstance(strength, Tensor) else strength


def mix(start: Tensor, end: Tensor, strength: Strength) -> Tensor:
    """(1 - s) * start + s * end; `end` itself at full strength."""
    if isinstance(strength, float) and strength == 1.0:
        return end
    return torch.lerp(start, end, in_dtype(strength, start))


def unset_linear(width: int, out: int, *, bias: bool) -> nn.Linear:
    """A Linear whose values `reset` must set: drawing them here would move the global generator."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=bias)  # type: ignore[no-untyped-call]  # torch's
    return linear


class Variant(nn.Module):
    """Base of all variants: subclass, name the places, override their methods, `@register`.

    Class attributes:
        places: which of `PLACES` it changes (order as there).
        replaces: True if it computes the heads itself (no scores, no weights): SimpleTRON.
        alone: True if it composes with nothing.
        fused: the exact fast form, in words, for `describe` and the documentation.
        explicit: True if there is no fused form: it needs the weights as a tensor.
        keeps_projection: False if the read-out is the layer's output, without W_o.
        projections: its own projections of the heads beside W_o, which quantisation treats like W_o.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    formula: ClassVar[str]
    paper: ClassVar[str]
    parameters_added: ClassVar[str] = "none"
    fused: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    explicit: ClassVar[bool] = False
    keeps_projection: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__()
        self.options = options
        self.geometry = geometry
        self.check(options, geometry)

    @classmethod
    def check(cls, options: Any, geometry: Geometry) -> None:
        """Raise ValueError if the variant does not fit a module of these sizes."""

    @property
    def carries(self) -> bool:
        """True if this layer reads or writes scores of other layers."""
        return False

    @property
    def writes(self) -> bool:
        """True if something comes after W_o."""
        return "write" in self.places

    @property
    def wants_residual(self) -> bool:
        """True if `write` reads the block's residual stream."""
        return False

    @property
    def shares(self) -> tuple[float, float]:
        """(c, m) where the layer's output at full strength is c x + m (what W_o gives): what a fit must undo."""
        return 0.0, 1.0

    @property
    def runs(self) -> str:
        """The fused form with these options, in words."""
        return self.fused

    def warn(self) -> str | None:
        """A sentence for the user when this is put on a pretrained model, or None."""
        return None

    def reset(self, generator: torch.Generator) -> None:
        """Draw the parameters: exact on a pretrained model, from this generator alone."""

    def carry(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        """scores: from this layer's scaled scores before the mask to the ones that are normalised."""
        raise NotImplementedError

    def normalise(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        """normaliser: from masked scores (fp32 at least) to weights; the caller sets masked positions to 0."""
        raise NotImplementedError

    def adjust(self, weights_BHQK: Tensor, call: Call) -> Tensor:
        """weights: from weights to weights; the caller sets masked positions to 0."""
        raise NotImplementedError

    def accumulate(self, query_BHQD: Tensor, key_BHKD: Tensor, scaling: float, call: Call) -> Tensor | None:
        """scores, fused: the carried scores straight from q and k; None if `carry` must do it."""
        return None

    def fuse(self, qkv: Three, mask: Tensor | None, causal: bool, call: Call) -> tuple[Three, Tensor | None, bool]:
        """normaliser, fused: the three tensors, mask and flag for plain SDPA; with the flag, row 0 is a dummy.

        Args:
            qkv: query (B,H,Q,D), key and value (B,G,K,D).
            mask: bool or additive float, broadcastable to (B,H,Q,K), or None.
            causal: SDPA's flag (square; never together with a mask).
            call: for the strength.
        """
        raise NotImplementedError

    def linear(self, qkv: Three, key_mask: Tensor | None, causal: bool, past: Three | None) -> Tensor:
        """replaces: heads (B,H,Q,D), as `simple_attention`; causal is aligned to the bottom right."""
        raise NotImplementedError

    def products(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        """replaces: the (B,H,Q,K) factors of v under any mask (bool, True where a query may look)."""
        raise NotImplementedError

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        """read: from the heads as read to what W_o is given."""
        raise NotImplementedError

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """write: from W_o's output (after hidden dropout, where that sits in the attention module) to the layer's."""
        raise NotImplementedError


VARIANTS: dict[str, type[Variant]] = {}
V = TypeVar("V", bound=type[Variant])


def register(name: str) -> Callable[[V], V]:
    """Make a variant known under `name`: tests, command line and documentation pick it up from here."""

    def add(cls: V) -> V:
        assert name not in VARIANTS, f"{name!r} is taken"
        assert name.isidentifier(), f"{name!r} is no identifier"
        assert set(cls.places) <= set(PLACES), f"{name}: unknown place in {cls.places}"
        cls.name = name
        VARIANTS[name] = cls
        return cls

    return add
