"""Defines the base class of all variants, and the seven places of an attention layer that a variant may change.

The places are keys -> scores -> mask -> normalizer -> weights -> (product with V) -> read -> W_o -> write. A variant
names its places and overrides their methods. Everything else stays as in the pretrained layer, so a variant without
places is ordinary attention. Two variants compose if they change different places. docs/mathematics.md, section
Composition.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..core.call import Call, FusedSoftmax, Geometry, Inputs, Strength, Three
from ..core.kind import Kind
from ..core.options import Options
from ..kernels.dispatch import Form, Setting, weighted_form
from ..kernels.extra_kv import ExtraKV
from ..kernels.weighing import Rule
from ..kernels.windows import Span
from .about import About
from .stock_form import StockForm

PLACES = ("keys", "scores", "mask", "normalizer", "weights", "read", "write")
BEFORE_THE_HEADS = {"keys", "scores", "normalizer", "weights"}


def mix(start: Tensor, end: Tensor, strength: Strength) -> Tensor:
    """(1 - s) * start + s * end, for tensors of equal shape; at full strength, `end` itself.

    All three must have the same dtype.
    """
    if isinstance(strength, float) and strength == 1.0:
        return end
    return torch.lerp(start, end, strength)


def same_shape(variant: Variant, method: str, given: Tensor, changed: Tensor) -> Tensor:
    """What a method of a variant returned, if it has the shape of what the method was given.

    Another shape might be broadcast later, without an error.

    Raises:
        ValueError: the shapes differ.
    """
    # A tracer warns about every comparison of sizes.
    if not torch.jit.is_tracing() and changed.shape != given.shape:  # type: ignore[attr-defined,no-untyped-call]
        raise ValueError(
            f"{variant.name}: its method {method} returned a tensor of shape {tuple(changed.shape)}, expected "
            f"{tuple(given.shape)}, the shape that it was given; let it return one number for each number."
        )
    return changed


def unset_linear(width: int, out: int, *, bias: bool) -> nn.Linear:
    """A Linear without values. `reset` must set them, because drawing them here would use the global generator."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=bias)  # type: ignore[no-untyped-call]  # torch's
    return linear


class Variant(nn.Module):
    """The base class of all variants. A subclass names its places, overrides their methods, and uses `@register`.

    Attributes:
        name: the variant's canonical name; `register` sets this attribute.
        aliases: other names of the variant, which users may give; `register` sets this attribute.
        about: what the documentation says of the variant; empty while a variant is tried out.
        places: the places that the variant may change, in the order of `PLACES`. No other variant of a composition may
            take them.
        replaces: True for a `Replacement`.
        alone: True if the variant composes with no other variant.
        keeps_projection: False if the heads are the layer's output, without W_o.
        projects: True if the variant projects heads on values, so that the scale of the values matters.
        masks_of_keys: True if the variant computes long texts without a mask of queries and keys, so that a model must
            make a mask of keys where it can.
        tiny: options with which a text of a few tokens shows the variant, if the defaults are for long texts. `doctor`
            and the tests take them.
        projections: the names of the variant's own projections of the heads beside W_o. Quantisation treats these
            projections like W_o.
        Options: the dataclass of the variant's options.

    Args:
        options: an instance of `Options`.
        geometry: the sizes of the attention module.

    Raises:
        ValueError: the variant does not fit an attention module of these sizes.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    about: ClassVar[About] = About()
    places: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    keeps_projection: ClassVar[bool] = True
    projects: ClassVar[bool] = False
    masks_of_keys: ClassVar[bool] = False
    tiny: ClassVar[Mapping[str, Any]] = {}
    projections: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Any]] = Options

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__()
        self.options = options
        self.geometry = geometry
        self.check(options, geometry)

    @classmethod
    def check(cls, options: Any, geometry: Geometry) -> None:
        """Check that the variant fits an attention module of these sizes.

        Raises:
            ValueError: the variant does not fit.
        """

    @classmethod
    def fit_options(cls, options: Any, kind: Kind) -> Any:
        """Fill in the options that depend on the kind of the attention module.

        A swap holds the result, and so does the saved config: a checkpoint never depends on a later default.

        Args:
            options: an instance of `Options`.
            kind: the kind of the module.

        Returns:
            An instance of `Options` without such gaps. Options that are complete come back as they are.
        """
        return options

    @classmethod
    def reach(cls, options: Any) -> int | None:
        """How many of the last keys a query sees as keys of its own; None if it sees every key that it saw before.

        By this number, a conversion knows that the model may recall less, and how far back it has to ask. A variant
        at the place "mask" with a width overrides this method.

        Args:
            options: an instance of `Options`.
        """
        return 0 if cls.replaces or "mask" in cls.places else None

    @property
    def changes(self) -> tuple[str, ...]:
        """The places that the variant changes with these options. With "scores", scores travel between layers."""
        return self.places

    @property
    def further_keys(self) -> int:
        """The number of pairs that the place "keys" adds."""
        return 0

    @property
    def wants_residual(self) -> bool:
        """True if `write` needs the residual stream of the block."""
        return False

    @property
    def shares(self) -> tuple[float, float]:
        """The numbers (c, m) if the layer's output at full strength is c x + m (the output of W_o).

        Calibration fits the heads to a target, and must first undo this skip.
        """
        return 0.0, 1.0

    @property
    def sharpness(self) -> float:
        """The factor of the products q k^T at full strength, for the place "normalizer"; 1 leaves them as they are."""
        return 1.0

    def form(self, setting: Setting) -> Form:
        """The form that computes the heads in this setting. The readable pipeline runs for `Form.REFERENCE`.

        By default: SDPA if the variant leaves the scores and the weights alone, or has a method `heads`; blocks of
        weights if it has a `rule`; otherwise the readable pipeline.
        """
        if not BEFORE_THE_HEADS & set(self.places) or type(self).heads is not Variant.heads:
            return Form.SDPA
        return Form.REFERENCE if self.rule(Rule()) is None else weighted_form(setting)

    def rule(self, rule: Rule) -> Rule | None:
        """How scores become weights with this variant in its place, so that blocks of scores can be computed in turn.

        Without it, the readable pipeline computes `normalize` and `adjust`, with all scores as one tensor. A subclass
        of a variant that has a rule gives its own, or None.

        Args:
            rule: the rule without the variant.

        Returns:
            The changed rule, or None if no rule can say what the variant's methods compute.
        """
        return None

    def stock_form(self, strength: float) -> StockForm:
        """How attention classes of transformers compute this variant, for the export to other programs.

        Args:
            strength: the strength of the layer, above 0.

        Raises:
            ValueError: no such class computes it. The message says what to do, as the end of a sentence.
        """
        if self.changes:
            raise ValueError(f"no attention class of transformers computes {self.name}")
        return StockForm()

    def warn(self) -> str | None:
        """A warning for users who put the variant on a pretrained model, or None."""
        return None

    def reset(self, generator: torch.Generator) -> None:
        """Set the parameters, so that a pretrained model stays close to its old output. Use this generator alone."""

    def extra_kv(self, inputs: Inputs, call: Call) -> ExtraKV:
        """Place "keys": pairs of a key and a value beside the keys of the text, for every query.

        What follows sees these keys in front of the others. `further_keys` must be their number.
        """
        raise NotImplementedError

    def span(self) -> Span:
        """Place "mask": how far a query sees. A query sees no key that it could not see without the variant."""
        raise NotImplementedError

    def carry(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        """Place "scores": from this layer's scaled scores before the mask to the scores that are normalized."""
        raise NotImplementedError

    def score_mod(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Place "scores", too: from scaled scores before the mask to scores, by a formula of a score and its place.

        The signature is that of FlexAttention's `score_mod`. The arguments are tensors that broadcast, so the formula
        has no `if`: `torch.where(kv_idx > q_idx, ..., score)`. -inf hides a key. What the formula learns is a
        parameter of the variant.

        Args:
            score: (B,H,Q,K), or a block of it, in fp32 at least.
            batch: (B,1,1,1), the number of the sequence.
            head: (1,H,1,1), the number of the query head.
            q_idx: (1,1,Q,1), the place of the query in its text. Tokens in the cache and padding count.
            kv_idx: (1,1,1,K), the place of the key in its text.

        Returns:
            The changed scores, one for each score.
        """
        raise NotImplementedError

    @classmethod
    def has_score_mod(cls) -> bool:
        """True if the class has a `score_mod`, and so carries no scores across layers."""
        return cls.score_mod is not Variant.score_mod

    def modified(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """What `score_mod` returns.

        Raises:
            ValueError: it returns another shape than that of `score`.
        """
        return same_shape(self, "score_mod", score, self.score_mod(score, batch, head, q_idx, kv_idx))

    def normalize(self, scores_BHQK: Tensor, call: Call) -> Tensor:
        """Place "normalizer": from masked scores, in fp32 at least, to weights. The caller sets masked places to 0."""
        raise NotImplementedError

    def adjust(self, weights_BHQK: Tensor, call: Call) -> Tensor:
        """Place "weights": from weights to weights. The caller sets masked places to 0."""
        raise NotImplementedError

    def heads(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, form: Form) -> Tensor | None:
        """The fused form of the places "scores" and "normalizer": the heads (B,Q,H,D), without the weights.

        `form` is what the method `form` returned for this call. None means that the readable pipeline must run.
        """
        return None

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        """Place "read": from the heads to the heads that W_o is applied to, both (B,L,H,D)."""
        raise NotImplementedError

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """Place "write": from the output of W_o to the output of the layer.

        If the attention module has a hidden dropout, `out_BLE` is the tensor after this dropout.
        """
        raise NotImplementedError


class Replacement(Variant):
    """A variant that computes the heads without scores and weights, as SimpleTRON does.

    It takes all places and composes with nothing. It needs the methods `linear`, `products`, `read`, `read_between` and
    `write`.
    """

    places = PLACES
    replaces = True
    alone = True
    masks_of_keys = True

    @property
    def changes(self) -> tuple[str, ...]:
        """The heads and the output: there are no scores, and no weights."""
        return ("read", "write")

    def linear(self, qkv: Three, key_mask: Tensor | None, causal: bool, past: Three | None, form: Form) -> Tensor:
        """The heads (B,H,Q,D), with arguments as in `functional.simple_attention`.

        `form` is what the method `form` returned for this call.
        """
        raise NotImplementedError

    def products(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        """The factors of v (B,H,Q,K) for any mask. `allowed` is True where a query may see a key."""
        raise NotImplementedError

    def read_between(self, ordinary_BLHD: Tensor, heads_BLHD: Tensor, call: Call) -> Tensor:
        """As `read`, at a strength between 0 and 1.

        Args:
            ordinary_BLHD: the heads of ordinary attention.
            heads_BLHD: the variant's heads.
            call: the call.
        """
        raise NotImplementedError


VARIANTS: dict[str, type[Variant]] = {}
V = TypeVar("V", bound=type[Variant])
METHODS = {
    "keys": "extra_kv",
    "scores": "carry",
    "mask": "span",
    "normalizer": "normalize",
    "weights": "adjust",
    "read": "read",
    "write": "write",
}
REPLACING = ("linear", "products", "read", "read_between", "write")


def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[V], V]:
    """Register a variant under `name`. Tests, command line and documentation find the variant in `VARIANTS`.

    A variant that gets a better name keeps the old name as an alias, so that saved models still load. The keys of a
    variant's parameters start with its name, so a variant with parameters cannot get another name.

    Args:
        name: the canonical name, under which everything is shown and saved.
        aliases: other names that users may give.

    Raises:
        ValueError: a name is known or is no identifier, or the class's methods and its declared places disagree.
    """

    def add(cls: V) -> V:
        known = {known_name for variant in VARIANTS.values() for known_name in (variant.name, *variant.aliases)}
        for new_name in (name, *aliases):
            if new_name in known:
                raise ValueError(f"variant {new_name!r} is registered already; choose another name.")
            if not new_name.isidentifier():
                raise ValueError(f"{new_name!r} cannot be the name of a variant; use letters, digits and underscores.")
            known.add(new_name)
        for problem in _disagreements(cls):
            raise ValueError(f"variant {name!r} ({cls.__name__}): {problem}")
        cls.name, cls.aliases = name, aliases
        VARIANTS[name] = cls
        return cls

    return add


def _disagreements(cls: type[Variant]) -> Iterator[str]:
    """Sentences on what a class declares but does not define, and on what it defines but does not declare.

    A method of a place that is not declared would never run.
    """
    base = Replacement if cls.replaces else Variant

    def defines(attribute: str) -> bool:
        return getattr(cls, attribute, None) is not getattr(base, attribute, None)

    if not isinstance(getattr(cls, "about", None), About):
        yield "about holds no words; set about = About(summary=..., formula=..., paper=..., fused=...)."
    if unknown := set(cls.places) - set(PLACES):
        yield f"places names {sorted(unknown)}; the places are {', '.join(PLACES)}."
    if cls.replaces:
        if not issubclass(cls, Replacement):
            yield "replaces = True is for subclasses of Replacement; let the class inherit from it."
        if cls.places != PLACES or not cls.alone:
            yield "a Replacement takes all places and composes with nothing; leave places and alone as they are."
        if missing := [method for method in REPLACING if not defines(method)]:
            yield f"a Replacement needs the methods {', '.join(missing)}."
        needless: tuple[str, ...] = ("extra_kv", "span", "carry", "score_mod", "normalize", "adjust", "heads")
    else:
        for place, method in METHODS.items():
            if place in cls.places and not defines(method) and not (method == "carry" and cls.has_score_mod()):
                yield f"places has {place!r}, but the class has no method {method}; add the method or drop the place."
            if place not in cls.places and defines(method):
                yield f"the method {method} would never run; add {place!r} to places."
        if cls.has_score_mod() and "scores" not in cls.places:
            yield "the method score_mod would never run; add 'scores' to places."
        if cls.has_score_mod() and (defines("carry") or defines("heads")):
            yield "a class with the method score_mod has no method carry or heads; they would never run."
        needless = ("linear", "products", "read_between")
    if wrong := [method for method in needless if defines(method)]:
        yield f"the methods {', '.join(wrong)} would never run in a {base.__name__}; remove them."
    if defines("heads") and not {"scores", "normalizer"} & set(cls.places):
        yield "the method heads would never run; it belongs to the places 'scores' and 'normalizer'."
    if defines("wants_residual") and "write" not in cls.places:
        yield "wants_residual has a meaning for the place 'write' alone; add 'write' to places."
