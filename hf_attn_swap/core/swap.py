"""The child `attn_swap` of a swapped attention module: its variants, their parameters, and the strength.

Axes: B batch, L token, H head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..variants.base import Variant, mix
from .calibration import Calibration
from .call import Call, Carried, FusedSoftmax, Geometry, Inputs
from .compute import Places, attend
from .registry import Options, build_options

STOCK = "attn_swap_stock"  # True in the keyword arguments of an attention module: run it as if it were not swapped


class Swap(nn.Module):
    """The child `attn_swap` of a swapped attention module: its variants, their parameters, and the strength.

    The Python float `strength` is the truth; the fp32 buffer mirrors it for the computation, and `phase`
    ("off", "between", "full") is all that code branches on.
    """

    strength_value: Tensor
    calibration: Calibration | None

    def __init__(self, classes: tuple[type[Variant], ...], options: Options, geometry: Geometry) -> None:
        super().__init__()
        self.names = tuple(cls.name for cls in classes)
        self.geometry = geometry
        self.order: int | None = 0  # place among the layers that carry scores; None counts calls
        self.last = False  # of those layers
        self.uniform = False  # all layers of the model are under the same masks
        self.cache_position: int | None = None  # of the cache among the container's positional arguments
        self.mask_position: int | None = None  # likewise of the attention mask
        self.dropout_path: str | None = None  # of the hidden dropout behind W_o, from the container
        self.folded_path: str | None = None  # of W_o from the container, or of W_v from the core without W_o
        self.fresh = True
        self.merged: str | None = None  # the fit that was folded into the weights
        self.strength, self.phase = 1.0, "full"
        self.options = options
        for cls in classes:
            self.add_module(cls.name, cls(build_options(cls, options[cls.name]), geometry))
        self.register_module("calibration", None)
        self.register_buffer("strength_value", torch.ones(1, dtype=torch.float32), persistent=False)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in the order of the name."""
        return tuple(child for child in self.children() if isinstance(child, Variant))

    def at(self, place: str) -> Variant | None:
        """The variant that changes this place, if any."""
        return next((variant for variant in self.variants if place in variant.places), None)

    def places(self) -> Places:
        """Who changes what, for the computation."""
        replacement = self.variants[0] if self.variants[0].replaces else None
        scores, normaliser, weights = (self.at(place) for place in ("scores", "normaliser", "weights"))
        carrier = scores if scores is not None and scores.carries else None
        return Places(carrier=carrier, normaliser=normaliser, adjuster=weights, replacement=replacement)

    @property
    def carries(self) -> bool:
        """True if scores travel between layers."""
        return any(variant.carries for variant in self.variants)

    @property
    def writes(self) -> bool:
        """True if something comes after W_o."""
        return any(variant.writes for variant in self.variants)

    @property
    def keeps_projection(self) -> bool:
        """False if the read-out is the layer's output, without W_o."""
        return all(variant.keeps_projection for variant in self.variants)

    @property
    def wants_residual(self) -> bool:
        """True if the block's residual stream must be handed in."""
        return any(variant.wants_residual for variant in self.variants)

    def place_in(self, carried: Carried | None) -> int:
        """The layer's place among those that carry scores; a shared module counts its calls.

        Raises:
            ValueError: a shared module is computed again after the pass.
        """
        if self.order is not None or carried is None:
            return self.order or 0
        if carried.closed and self.carries:
            raise ValueError(
                "a module that serves several layers was computed again after the pass (activation checkpointing): "
                "its place is not known any more; train this model without checkpointing, or with another variant "
                "than mha."
            )
        carried.calls += 1
        return carried.calls - 1

    def spec(self) -> dict[str, Any]:
        """What config.json says of this layer: variant, options and strength."""
        spec = {"variant": "+".join(self.names), "options": self.options, "strength": self.strength}
        fit = self.calibration.fit if self.calibration is not None else self.merged
        return spec if fit is None else {**spec, "calibration": {"fit": fit, "merged": self.calibration is None}}

    def calibrate(self, fit: str, like: Tensor) -> Calibration:
        """Put a neutral calibration in, on the device and in the dtype of `like`."""
        self.calibration = Calibration(fit, self.geometry).to(like)
        return self.calibration

    def set_strength(self, strength: float, *, never_off: bool = False) -> None:
        """Set s; `never_off` keeps the layer computing at s = 0, for a neighbour that reads its scores."""
        self.strength = float(strength)
        self.phase = "full" if strength == 1 else "off" if strength == 0 and not never_off else "between"
        self.refill()

    def refill(self) -> None:
        """Write the strength into its buffer again: a load or a cast leaves it without its value."""
        if self.strength_value.dtype != torch.float32:
            self.strength_value = torch.empty(1, dtype=torch.float32, device=self.strength_value.device)
        if not self.strength_value.is_meta:
            self.strength_value.fill_(self.strength)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Swap:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.refill()  # a cast to bf16 would round the strength, `to_empty` would lose it
        return self

    def forward(
        self, inputs: Inputs, call: Call, sdpa: FusedSoftmax, want_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Heads (B,Q,H,D) as W_o is given them, and the weights (B,H,Q,K) where wanted."""
        call.strength = 1.0 if self.phase == "full" else self.strength_value
        call.value = inputs.value
        places = self.places()
        heads, weights = attend(places, inputs, call, sdpa, want_weights)
        heads = heads if call.tap is None else call.tap("context", heads)
        if self.calibration is not None and places.replacement is not None:
            heads = self.calibration(heads)  # the variant's branch alone: `read` mixes it with the ordinary one
        reader = self.at("read")
        heads = reader.read(heads, call) if reader is not None else heads
        if self.calibration is not None and places.replacement is None:
            heads = mix(heads, self.calibration(heads), call.strength)
        return heads, weights

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        """What comes after W_o."""
        for variant in self.variants:
            if variant.writes:
                out_BLE = variant.write(out_BLE, call)
        return out_BLE

    def path(self) -> str:
        """How this layer runs when nothing forces the reference, in words."""
        if self.phase == "off":
            return "stock"
        fit = f"; calibrated ({self.calibration.fit})" if self.calibration is not None else ""
        fit = f"; calibrated ({self.merged}, merged)" if self.merged is not None else fit
        return self._form() + fit

    def _form(self) -> str:
        explicit = [variant.name for variant in self.variants if variant.explicit]
        if explicit:
            return f"reference ({', '.join(explicit)} needs the weights)"
        if self.carries and (self.phase == "between" or self.at("normaliser") is not None):
            return "reference (explicit scores)"
        runs = [variant.runs for variant in self.variants]
        return next((words for words in runs if words.startswith("reference")), "; ".join(runs))
