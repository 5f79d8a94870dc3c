"""The five places of an attention layer that a variant may change, and what each is given.

scores -> normaliser -> weights -> (weights @ values) -> read -> W_o -> write. A variant overrides the methods of
the places it names; everything else stays the pretrained layer. Two variants compose when their places differ.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..core.call import Call, FusedSoftmax, Geometry, Inputs, Strength, Three
from ..core.options import Options
from ..kernels.dispatch import Form, Setting

PLACES = ("scores", "normaliser", "weights", "read", "write")


def mix(start: Tensor, end: Tensor, strength: Strength) -> Tensor:
    """(1 - s) * start + s * end; `end` itself at full strength. All three have one dtype."""
    if isinstance(strength, float) and strength == 1.0:
        return end
    return torch.lerp(start, end, strength)


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
        fused: the exact fast form, in words, for the documentation.
        then: what follows the heads, in words, for `describe`; for example "the projection".
        explicit: True if there is no fused form, because the variant needs the weights as a tensor.
        keeps_projection: False if the read-out is the layer's output, without W_o.
        projections: its own projections of the heads beside W_o, which quantisation treats like W_o.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    formula: ClassVar[str]
    paper: ClassVar[str]
    parameters_added: ClassVar[str] = "none"
    fused: ClassVar[str]
    then: ClassVar[str] = ""
    places: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    explicit: ClassVar[bool] = False
    keeps_projection: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Any]] = Options

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

    def form(self, setting: Setting) -> Form:
        """The form that computes the heads in this setting; `heads` or the readable pipeline runs accordingly."""
        return Form.REFERENCE if self.explicit else Form.SDPA

    @property
    def follows(self) -> str:
        """What follows the heads with these options, in words."""
        return self.then

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

    def heads(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax) -> Tensor | None:
        """Scores or normaliser, fused: heads (B,Q,H,D) without the weights; None leaves it to the readable form."""
        return None

    def linear(self, qkv: Three, key_mask: Tensor | None, causal: bool, past: Three | None) -> Tensor:
        """replaces: heads (B,H,Q,D), as `simple_attention`; causal is aligned to the bottom right."""
        raise NotImplementedError

    def products(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        """replaces: the (B,H,Q,K) factors of v under any mask (bool, True where a query may look)."""
        raise NotImplementedError

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        """read: from the heads as read to what W_o is given."""
        raise NotImplementedError

    def read_between(self, ordinary_BLHD: Tensor, heads_BLHD: Tensor, call: Call) -> Tensor:
        """replaces: as `read` at a strength between 0 and 1, from the heads of ordinary attention and the variant's."""
        raise NotImplementedError

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """write: from W_o's output (after hidden dropout, where that sits in the attention module) to the layer's."""
        raise NotImplementedError


VARIANTS: dict[str, type[Variant]] = {}
V = TypeVar("V", bound=type[Variant])
METHODS = {"scores": "carry", "normaliser": "normalise", "weights": "adjust", "read": "read", "write": "write"}
REPLACING = ("linear", "products", "read", "read_between", "write")


def register(name: str) -> Callable[[V], V]:
    """Make a variant known under `name`: tests, command line and documentation pick the variant up from here.

    Raises:
        ValueError: the name is taken or is no identifier, or the class's methods and declared places disagree.
    """

    def add(cls: V) -> V:
        if name in VARIANTS:
            raise ValueError(f"variant {name!r} is registered already; choose another name.")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be the name of a variant; use letters, digits and underscores.")
        for problem in _disagreements(cls):
            raise ValueError(f"variant {name!r} ({cls.__name__}): {problem}")
        cls.name = name
        VARIANTS[name] = cls
        return cls

    return add


def _disagreements(cls: type[Variant]) -> Iterator[str]:
    """What a class declares but does not do, or does but does not declare; an undeclared method would never run."""

    def own(attribute: str) -> bool:
        return getattr(cls, attribute) is not getattr(Variant, attribute)

    if unknown := set(cls.places) - set(PLACES):
        yield f"places names {sorted(unknown)}; the places are {', '.join(PLACES)}."
    if cls.replaces:
        if set(cls.places) != set(PLACES) or not cls.alone:
            yield "a variant with replaces = True takes all places and composes with nothing; set places and alone so."
        if missing := [method for method in REPLACING if not own(method)]:
            yield f"replaces = True needs the methods {', '.join(missing)}."
        needless: tuple[str, ...] = ("carry", "normalise", "adjust", "heads")
    else:
        for place, method in METHODS.items():
            if place in cls.places and not own(method):
                yield f"places has {place!r}, but the class has no method {method}; add the method or drop the place."
            if place not in cls.places and own(method):
                yield f"the method {method} would never run; add {place!r} to places."
        needless = ("linear", "products", "read_between")
    if wrong := [method for method in needless if own(method)]:
        yield f"the methods {', '.join(wrong)} would never run with replaces = {cls.replaces}; remove them."
    if ("scores" in cls.places and not cls.replaces) != own("carries"):
        yield "scores travel between layers through `carry`: set carries = True together with the place 'scores'."
    if own("heads") and not {"scores", "normaliser"} & set(cls.places):
        yield "the method heads would never run; it belongs to the places 'scores' and 'normaliser'."
    if own("wants_residual") and "write" not in cls.places:
        yield "wants_residual has a meaning for the place 'write' alone; add 'write' to places."
