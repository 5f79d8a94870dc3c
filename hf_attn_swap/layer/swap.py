"""Defines the child module `attn_swap` of a swapped attention module: variants, parameters and strength.

Strength s = 0 is the pretrained layer, s = 1 is the paper's formula. docs/mathematics.md, section Strength and
exactness.
Axes: B batch, L token, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.call import Call, ForwardContext, FusedSoftmax, Geometry, Inputs
from ..core.masks import transformed
from ..kernels.dispatch import Form, Setting
from ..kernels.weighing import Rule
from ..variants.base import Replacement, Variant, mix, same_shape
from .compute import ORDINARY, Places, attend, ordinary, reference, replaced
from .fitted import CALL, FITTED, HEADS, Fitted
from .registry import Options, build_options

STEPS = ("keys", "scores", "normalizer", "weights")  # the places whose variants `Places` holds, in its order
STOCK = "attn_swap_stock"  # a keyword argument of an attention module: if True, the module runs as if not swapped

F = TypeVar("F", bound=Fitted)


class Phase(str, Enum):
    """The three cases of the strength: 0, between 0 and 1, and 1.

    Code branches on the phase and never on the number, so that a compiler makes at most three versions of a layer.
    """

    OFF = "off"
    BETWEEN = "between"
    FULL = "full"


@dataclass(frozen=True)
class Argument:
    """An argument of a module's forward.

    Attributes:
        name: its name.
        position: its position among the positional arguments, from 0; None if it is given by name alone.
    """

    name: str
    position: int | None

    def of(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives for this argument; None if the call leaves it out."""
        if self.position is not None and len(args) > self.position:
            return args[self.position]
        return kwargs.get(self.name)

    def put(self, args: Any, kwargs: dict[str, Any], value: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call with another value here, given by position if it was given by position."""
        if self.position is not None and len(args) > self.position:
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The place of one swap in its model.

    Attributes:
        path: the path of the attention module in its model.
        order: the layer's number among the layers that carry scores, from 0. None for a module that serves several
            layers; such a module counts its calls.
        first, last: True for the first and for the last of the layers that carry scores, in one list of layers.
        uniform: True if all layers of the model have the same masks.
        states: the name of the container's first argument, the input of the attention.
        others: the arguments that are the states of another sequence, if they are given.
        mask: the argument that is the attention mask, or None if the source does not show one.
        cache_index: the attribute of the core that is the number of its layer in a cache; None if the source shows
            no attribute.
        caches: True if the core gives keys and values to a cache.
        borrows: True if the keys and values of the core are those of another layer, which alone are in a cache.
        lent: True if a layer of the stack borrows the keys and values of another layer.
        dropout_path: the path from the container to the hidden dropout after W_o, or None.
    """

    path: str
    order: int | None
    first: bool
    last: bool
    uniform: bool
    states: Argument
    others: tuple[Argument, ...]
    mask: Argument | None
    cache_index: str | None
    caches: bool
    borrows: bool
    lent: bool
    dropout_path: str | None


class Swap(nn.Module):
    """The child module `attn_swap` of a swapped attention module: its variants, its fits, and the strength.

    The Python float `strength` is the truth; `Installation.set_strength` changes it. The fp32 buffer `strength_value`
    (1,) is a copy of the float for the computation, and `phase` is the only form of the strength that code branches on.
    `wiring` is None while the swap belongs to no model.

    What the variants change is worked out once for their options: a call reads plain attributes. They hold names
    of variants and never the modules themselves, so that every copy of a swap computes with its own modules.

    Attributes:
        names: the names of the variants, in the order of the name.
        changed: by each place that a variant changes, the name of this variant.
        replaces: True if the variant computes the heads without scores (a `Replacement`).
        carries: True if the layer reads scores from, or leaves scores for, other layers.
        writes: True if a variant changes the output of W_o.
        reads_input: True if a variant needs the rows of the module's input, one per query.
        span: how far a query sees, if a variant hides keys; None if none does.
        rule: how scores become weights, or None if only the variants' methods say it.
        keeps_window: True if a cache may hold the keys of the window alone. Scores that are carried are those of all
            keys. Where some heads see every key, a layer keeps all keys of all heads if another variant changes heads
            together.
        further_keys: the number of keys that stand beside those of the text.
        keeps_projection: False if the heads are the layer's output, without W_o.
        wants_residual: True if a variant needs the residual stream of the block.
        projects: True if a variant projects heads on values.

    Args:
        classes: the variants, in the order of the name.
        options: the options of each variant, by the variant's name, complete with defaults.
        geometry: the sizes of the attention module.
        strength: a number from 0 to 1.
        selection: the argument `modules` that chose this layer, or None.

    Raises:
        ValueError: a variant does not fit an attention module of these sizes, or has the name of a fit.
    """

    strength_value: Tensor

    def __init__(
        self,
        classes: tuple[type[Variant], ...],
        options: Options,
        geometry: Geometry,
        *,
        strength: float = 1.0,
        selection: str | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(cls.name for cls in classes)
        self.geometry = geometry
        self.wiring: Wiring | None = None
        self.fresh = True  # False if a checkpoint has given the new parameters their values
        self.seed = 0  # of the values at the start
        self.retrained = False  # True if a conversion changed weights: strength 0 is no longer the original
        self.selection = selection
        self.options = options
        for cls in classes:
            if cls.name in FITTED:
                raise ValueError(f"{cls.name!r} is the name of a fit; register the variant under another name.")
            self.add_module(cls.name, cls(build_options(cls, options[cls.name]), geometry))
        for name in FITTED:
            self.register_module(name, None)
        self._note_changes()
        self._note_fits()
        self.register_buffer("strength_value", torch.ones(1, dtype=torch.float32), persistent=False)
        self.compute_at(strength)

    def set_options(self, options: Options) -> None:
        """Let the variants compute with other options, and the parameters that they have, from the next call on.

        For options that need no other parameters and no other hooks. `Installation.refresh` has to follow.

        Args:
            options: as in the constructor.

        Raises:
            ValueError: an option is unknown or has a wrong value.
        """
        for variant in self.variants:
            variant.options = build_options(type(variant), options[variant.name])
        self.options = options
        self._note_changes()

    def _note_changes(self) -> None:
        """Note what the variants change, with the options that they have."""
        variants = self.variants
        self.changed = {place: variant.name for variant in variants for place in variant.changes}
        self.replaces = isinstance(variants[0], Replacement)
        scorer = self.at("scores")
        self.carries = scorer is not None and not scorer.has_score_mod()
        self.writes = "write" in self.changed
        self.reads_input = not self.changed.keys().isdisjoint(("scores", "read", "write"))
        self.span = next((variant.span() for variant in variants if "mask" in variant.changes), None)
        self.rule = None if self.carries else Rule()
        for name in (self.changed.get("normalizer"), self.changed.get("weights")):
            if name is not None and self.rule is not None:
                self.rule = self.get_submodule(name).rule(self.rule)  # type: ignore[operator]  # a variant
        self._steps = tuple(map(self.changed.get, STEPS))
        self._reader = self.changed.get("read")
        self._ordinary = self.span is None and not any(self._steps)
        self.keeps_window = (
            self.span is not None and self.places().anywhere and (not self.span.full or self.places().apart)
        )
        self.further_keys = sum(variant.further_keys for variant in variants)
        self.keeps_projection = all(variant.keeps_projection for variant in variants)
        self.wants_residual = any(variant.wants_residual for variant in variants)
        self.projects = any(variant.projects for variant in variants)
        self._sharpness = math.prod(variant.sharpness for variant in variants)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As in torch, but keys of a fit that this swap does not have are unexpected keys.

        torch takes the keys of a child that is None for expected ones, and drops their values.
        """
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        absent = tuple(f"{prefix}{name}." for name in FITTED if self._modules.get(name) is None)
        unexpected_keys.extend(key for key in state_dict if key.startswith(absent))

    @property
    def strength(self) -> float:
        """The strength, a number from 0 to 1."""
        return self._strength

    @property
    def sharpness(self) -> float:
        """The factor of the products q k^T at this strength; `export` multiplies W_q by it."""
        return 1 + self._strength * (self._sharpness - 1)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in the order of the name."""
        return tuple(child for child in self._modules.values() if isinstance(child, Variant))

    @property
    def fitted(self) -> dict[str, Fitted]:
        """What conversions fitted into this layer, by name. `restore` brings exactly this back."""
        return {name: child for name, child in self._modules.items() if isinstance(child, Fitted)}

    def fit_of(self, cls: type[F]) -> F | None:
        """The fit of this class, or None."""
        return next((child for child in self._modules.values() if isinstance(child, cls)), None)

    def put(self, fit: Fitted) -> None:
        """Add a fit, in the mode of this layer. It takes the place of an earlier fit of the same name."""
        self.register_module(fit.name, fit.train(self.training))
        self._note_fits()

    def drop(self, name: str) -> None:
        """Remove the fit of this name, if there is one."""
        if name in self.fitted:
            self._modules[name] = None
            self._note_fits()

    def restore(self, before: Mapping[str, Fitted]) -> None:
        """Let the layer have exactly these fits, which `fitted` gave before."""
        for name in self.fitted:
            self.drop(name)
        for fit in before.values():
            self.put(fit)

    def _note_fits(self) -> None:
        """Note the names of the fits that act in a call: those that prepare it, and those that change the heads."""
        fits = self.fitted.items()
        self._preparing = tuple(name for name, fit in fits if fit.place == CALL)
        self._correcting = tuple(name for name, fit in fits if fit.place == HEADS)

    def at(self, place: str) -> Variant | None:
        """The variant that changes this place, or None."""
        name = self.changed.get(place)
        return None if name is None else self._modules[name]  # type: ignore[return-value]  # by the name of a variant

    def places(self) -> Places:
        """The variants that change the steps between the scores and the heads."""
        if self._ordinary:
            return ORDINARY
        get: Any = self._modules.get  # the variants by their names; None has none
        keys, scorer, normalizer, adjuster = map(get, self._steps)
        carrier, by_place = (scorer, None) if self.carries else (None, scorer)
        return Places(keys, carrier, normalizer, adjuster, self.span, self.rule, by_place)

    @property
    def replacement(self) -> Replacement | None:
        """The variant that computes the heads without scores, or None."""
        return self._modules[self.names[0]] if self.replaces else None  # type: ignore[return-value]  # as `replaces` says

    def place_in(self, context: ForwardContext | None) -> int:
        """The layer's number among the layers that carry scores. For a shared module, the number of the call.

        Raises:
            ValueError: a shared module that carries scores is computed again after the pass.
        """
        order = self.wiring.order if self.wiring is not None else 0
        if order is not None or context is None:
            return order or 0
        if context.closed and self.carries:
            raise ValueError(
                "a module that serves several layers was computed again after the pass (activation checkpointing), so "
                "hf_attn_swap cannot know which layer this call is; train this model without checkpointing, or use a "
                "variant that does not carry scores across layers (modern_hopfield does)."
            )
        context.calls += 1
        return context.calls - 1

    def is_first(self, order: int) -> bool:
        """True if the layer takes no scores from a layer below, in the call that `place_in` gave this number."""
        if self.wiring is None or self.wiring.order is None:
            return order == 0
        return self.wiring.first

    def spec(self) -> dict[str, Any]:
        """The description of this layer in config.json: variant, options, strength, and what else applies."""
        spec = {"variant": "+".join(self.names), "options": self.options, "strength": self.strength}
        if self.selection is not None:
            spec["modules"] = self.selection
        if self.retrained:
            spec["retrained"] = True
        return spec | {name: fit.spec() for name, fit in self.fitted.items()}

    def compute_at(self, strength: float, *, never_off: bool = False) -> None:
        """Compute at this strength from now on, a number from 0 to 1: a part of `Installation.set_strength`.

        With `never_off`, the layer computes the variant at strength 0 too, because another layer reads its scores.
        """
        self._strength = float(strength)
        if strength == 1:
            self.phase = Phase.FULL
        elif strength == 0 and not never_off:
            self.phase = Phase.OFF
        else:
            self.phase = Phase.BETWEEN
        self.refill()

    def refill(self) -> None:
        """Write the strength into its buffer again. The buffer loses its value when a model is loaded or cast."""
        if self.strength_value.dtype != torch.float32:
            self.strength_value = torch.empty(1, dtype=torch.float32, device=self.strength_value.device)
        if not self.strength_value.is_meta:
            self.strength_value.fill_(self.strength)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Swap:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.refill()  # a cast to bf16 would round the strength, and `to_empty` would lose the strength
        return self

    def forward(
        self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the heads that the layer's own W_o is applied to.

        Returns:
            The heads (B,Q,H,D); and the weights (B,H,Q,K), or None if they were not computed.

        Raises:
            ValueError: the call has something that a variant cannot compute; the error says what.
        """
        self.prepare(call, inputs.value)
        if self.replaces:
            return self._replaced(inputs, call, sdpa, want_weights)
        if self._sharpness != 1:
            factor = 1 + call.exact_strength * (self._sharpness - 1)
            factor = factor.to(inputs.query.dtype) if isinstance(factor, Tensor) else factor
            inputs = replace(inputs, query=inputs.query * factor)
        heads, weights = attend(self.places(), inputs, call, sdpa, want_weights)
        if self._reader is not None or self._correcting or call.probe is not None:
            heads = self.read(heads, call)
        return heads, weights

    def prepare(self, call: Call, value_BGKD: Tensor) -> None:
        """Put into a call what the variants read: the strength, the values (B,G,K,D), and what fits give them."""
        call.exact_strength = 1.0 if self.phase == Phase.FULL else self.strength_value
        call.value = value_BGKD
        for name in self._preparing:
            self._modules[name].prepare(call)  # type: ignore[union-attr,operator]  # the name of a fit

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        """Let the variant at the place `read`, and then the fits, change the heads: from (B,L,H,D) to (B,L,H,D)."""
        heads = heads_BLHD if call.probe is None else call.probe("context", heads_BLHD)
        if self._reader is not None:
            reader: Any = self._modules[self._reader]
            heads = same_shape(reader, "read", heads, reader.read(heads, call))
        if self._correcting:
            heads = mix(heads, self._corrected(heads), call.strength_in(heads.dtype))
        return heads

    def _corrected(self, heads_BLHD: Tensor) -> Tensor:
        """The heads (B,L,H,D) with the fits that act on them."""
        for name in self._correcting:
            heads_BLHD = self._modules[name](heads_BLHD)  # type: ignore[misc]  # the name of a fit
        return heads_BLHD

    def _replaced(
        self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, for a variant without scores. Fits change the variant's heads alone."""
        variant = self.replacement
        assert variant is not None
        heads, weights = replaced(variant, inputs, call, want_weights)
        heads = self._corrected(call.probed("context", heads))
        if call.between:
            if transformed(*inputs.three):  # the stock function has no forward mode
                softmax_heads = reference(ORDINARY, inputs, Call(x=call.x))[0]
            else:
                softmax_heads = ordinary(inputs, sdpa)
            return variant.read_between(softmax_heads, heads.to(softmax_heads.dtype), call), weights
        return variant.read(heads, call), weights

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """Let the variant at the place `write` change the output of W_o: from (B,L,E) to (B,L,E)."""
        variant = self.at("write")
        return out_BLE if variant is None else same_shape(variant, "write", out_BLE, variant.write(out_BLE, call))

    def reset(self, seed: int) -> None:
        """Give the new parameters their values at the start, drawn by a generator of their own with this seed."""
        self.seed = seed
        with torch.device("cpu"):  # the device of the generator
            generator = torch.Generator().manual_seed(seed)
            for variant in self.variants:
                variant.reset(generator)

    def new_parameters(self) -> list[nn.Parameter]:
        """The parameters of the variants, without those of fits."""
        return [parameter for variant in self.variants for parameter in variant.parameters()]

    @property
    def trained(self) -> bool:
        """True if the parameters of the variants are no longer those at the start. They must not be on meta."""
        parameters = self.new_parameters()
        if any(parameter.is_meta or type(parameter).__name__ == "DTensor" for parameter in parameters):
            return False
        start = copy.deepcopy(self)
        start.reset(self.seed)
        return any(not torch.equal(now, then) for now, then in zip(parameters, start.new_parameters(), strict=True))

    def form(self, setting: Setting) -> Form:
        """The form that computes this layer's heads in this setting."""
        if self.phase == Phase.OFF:
            return Form.STOCK
        return self.places().form(setting) if self.replacement is None else self.replacement.form(setting)

    def in_blocks(self, setting: Setting) -> bool:
        """True if this form computes one block of queries after the other, with the keys of their window."""
        return self.phase != Phase.OFF and self.places().in_blocks(setting)
