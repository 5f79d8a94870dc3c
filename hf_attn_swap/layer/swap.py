"""Defines the child module `attn_swap` of a swapped attention module: variants, parameters and strength.

Strength s = 0 is the pretrained layer, s = 1 is the paper's formula. docs/mathematics.md, section Strength and
exactness.
Axes: B batch, L token, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call, Carried, FusedSoftmax, Geometry, Inputs
from ..core.masks import transformed
from ..kernels.dispatch import Form, Setting
from ..variants.base import Replacement, Variant, mix
from .calibration import Calibration
from .compute import Places, attend, ordinary, reference, replaced
from .registry import Options, build_options
from .value_scale import ValueScale

STOCK = "attn_swap_stock"  # a keyword argument of an attention module: if True, the module runs as if not swapped

LARGEST_EXPONENT = 60  # of a neutral start: 2^-60 is far above the smallest number of fp32 and bf16


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
        dropout_path: the path from the container to the hidden dropout after W_o, or None.
        folded_path: the path to the matrix that a calibration is merged into: from the container to W_o, or from the
            core to W_v if the variant leaves W_o out. None if the path is not known.
    """

    path: str = ""
    order: int | None = 0
    first: bool = False
    last: bool = False
    uniform: bool = False
    states: Argument = Argument("", 0)
    others: tuple[Argument, ...] = ()
    mask: Argument | None = None
    cache_index: str | None = None
    caches: bool = False
    dropout_path: str | None = None
    folded_path: str | None = None


class Swap(nn.Module):
    """The child module `attn_swap` of a swapped attention module: its variants, their parameters, and the strength.

    The Python float `strength` is the truth. The fp32 buffer `strength_value` (1,) is a copy of the float for the
    computation, and `phase` is the only form of the strength that code branches on. `wiring` is None while the swap
    belongs to no model.

    Args:
        classes: the variants, in the order of the name.
        options: the options of each variant, by the variant's name, complete with defaults.
        geometry: the sizes of the attention module.

    Raises:
        ValueError: a variant does not fit an attention module of these sizes.
    """

    strength_value: Tensor
    calibration: Calibration | None
    value_scale: ValueScale | None

    def __init__(self, classes: tuple[type[Variant], ...], options: Options, geometry: Geometry) -> None:
        super().__init__()
        self.names = tuple(cls.name for cls in classes)
        self.geometry = geometry
        self.wiring: Wiring | None = None
        self.fresh = True  # False if a checkpoint has given the new parameters their values
        self.merged: str | None = None  # the name of the fit, if a calibration was merged into the model's weights
        self.neutral: int | None = None  # k, if a neutral start scales the skip by 2^-k
        self.head_order: tuple[int, ...] | None = None  # the own head that meets each head of the carried scores
        self.retrained = False  # True if a conversion trained weights: strength 0 is no longer the original
        self.selection: str | None = None  # the argument `modules` that chose this layer
        self.strength = 1.0
        self.phase = Phase.FULL
        self.options = options
        for cls in classes:
            self.add_module(cls.name, cls(build_options(cls, options[cls.name]), geometry))
        self.register_module("calibration", None)
        self.register_module("value_scale", None)
        self.register_buffer("strength_value", torch.ones(1, dtype=torch.float32), persistent=False)

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
        """As in torch, but keys of a calibration that this swap does not have are unexpected keys.

        torch takes the keys of a child that is None for expected ones, and drops their values.
        """
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        absent = tuple(f"{prefix}{name}." for name in ("calibration", "value_scale") if getattr(self, name) is None)
        unexpected_keys.extend(key for key in state_dict if key.startswith(absent))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in the order of the name."""
        return tuple(child for child in self._modules.values() if isinstance(child, Variant))

    def at(self, place: str) -> Variant | None:
        """The variant that changes this place, or None."""
        return next((variant for variant in self.variants if place in variant.places), None)

    def places(self) -> Places:
        """The variants that change the steps between the scores and the heads."""
        at = {place: variant for variant in self.variants for place in variant.changes}
        return Places(
            keys=at.get("keys") if self.replacement is None else None,
            carrier=at.get("scores"),
            normalizer=at.get("normalizer"),
            adjuster=at.get("weights"),
            replacement=self.replacement,
        )

    @property
    def replacement(self) -> Replacement | None:
        """The variant that computes the heads without scores, or None."""
        first = self.variants[0]
        return first if isinstance(first, Replacement) else None

    @property
    def carries(self) -> bool:
        """True if the layer reads scores from, or leaves scores for, other layers."""
        return any("scores" in variant.changes for variant in self.variants)

    @property
    def further_keys(self) -> int:
        """The number of keys that stand beside those of the text."""
        return sum(variant.further_keys for variant in self.variants)

    @property
    def writes(self) -> bool:
        """True if a variant changes the output of W_o."""
        return any("write" in variant.changes for variant in self.variants)

    @property
    def keeps_projection(self) -> bool:
        """False if the heads are the layer's output, without W_o."""
        return all(variant.keeps_projection for variant in self.variants)

    @property
    def wants_residual(self) -> bool:
        """True if a variant needs the residual stream of the block."""
        return any(variant.wants_residual for variant in self.variants)

    @property
    def adds_input(self) -> bool:
        """True if the layer's output contains a multiple of the layer's input (a skip)."""
        return any(variant.shares[0] != 0 for variant in self.variants) and not self.wants_residual

    @property
    def projects(self) -> bool:
        """True if a variant projects heads on values."""
        return any(variant.projects for variant in self.variants)

    @property
    def skip_scale(self) -> float:
        """The factor of the layer's input in the skip: 1, or 2^-k after a neutral start."""
        return 1.0 if self.neutral is None else 2.0**-self.neutral

    def place_in(self, carried: Carried | None) -> int:
        """The layer's number among the layers that carry scores. For a shared module, the number of the call.

        Raises:
            ValueError: a shared module that carries scores is computed again after the pass.
        """
        order = self.wiring.order if self.wiring is not None else 0
        if order is not None or carried is None:
            return order or 0
        if carried.closed and self.carries:
            raise ValueError(
                "a module that serves several layers was computed again after the pass (activation checkpointing), so "
                "hf_attn_swap cannot know which layer this call is; train this model without checkpointing, or use a "
                "variant that does not carry scores across layers (modern_hopfield does)."
            )
        carried.calls += 1
        return carried.calls - 1

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
        if self.neutral is not None:
            spec["neutral_start"] = self.neutral
        if self.head_order is not None:
            spec["head_order"] = list(self.head_order)
        if self.value_scale is not None:
            spec["value_scale"] = True
        if self.retrained:
            spec["retrained"] = True
        fit = self.calibration.fit if self.calibration is not None else self.merged
        if fit is not None:
            spec["calibration"] = {"fit": fit, "merged": self.calibration is None}
        return spec

    def calibrate(self, fit: str, like: Tensor) -> Calibration:
        """Add a calibration that changes nothing yet, on the device and in the dtype of `like`.

        Raises:
            ValueError: `fit` is neither "gain" nor "map".
        """
        self.calibration = Calibration(fit, self.geometry).to(like)
        return self.calibration

    def scale_values(self, like: Tensor) -> ValueScale:
        """Add scales of the values that change nothing yet, on the device of `like`."""
        self.value_scale = ValueScale(self.geometry).to(like.device)
        return self.value_scale

    def set_strength(self, strength: float, *, never_off: bool = False) -> None:
        """Set the strength, a number from 0 to 1.

        With `never_off`, the layer computes the variant at strength 0 too, because another layer reads its scores.
        """
        self.strength = float(strength)
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
        call.exact_strength = 1.0 if self.phase == Phase.FULL else self.strength_value
        call.value = inputs.value
        call.value_squares = None if self.value_scale is None else self.value_scale()
        places = self.places()
        if places.replacement is not None:
            return self._replaced(places.replacement, inputs, call, sdpa, want_weights)
        heads, weights = attend(places, inputs, call, sdpa, want_weights)
        heads = call.tapped("context", heads)
        reader = self.at("read")
        if reader is not None:
            heads = reader.read(heads, call.hand(heads.dtype))
        if self.calibration is not None:
            heads = mix(heads, self.calibration(heads), call.hand(heads.dtype).strength)
        return heads, weights

    def _replaced(
        self, variant: Replacement, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, for a variant without scores. The calibration changes the variant's heads alone."""
        heads, weights = replaced(variant, inputs, call, want_weights)
        heads = call.tapped("context", heads)
        if self.calibration is not None:
            heads = self.calibration(heads)
        if call.between:
            if transformed(*inputs.three):  # the stock function has no forward mode
                other = reference(Places(), inputs, Call(x=call.x))[0]
            else:
                other = ordinary(inputs, sdpa)
            return variant.read_between(other, heads.to(other.dtype), call.hand(other.dtype)), weights
        return variant.read(heads, call.hand(heads.dtype)), weights

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """Let the variants change the output of W_o: from (B,L,E) to (B,L,E)."""
        for variant in self.variants:
            if "write" in variant.changes:
                out_BLE = variant.write(out_BLE, call.hand(out_BLE.dtype))
        return out_BLE

    def form(self, setting: Setting) -> Form:
        """The form that computes this layer's heads in this setting."""
        if self.phase == Phase.OFF:
            return Form.STOCK
        return self.places().form(setting)
