"""Computes SimpleTRON: linear attention without softmax.

A_h = L^(-1/2) q_h (k_h^T v_h), where L is the number of keys that the query may see. simpletron: out = A, and
simpletron_res: out = x + A, both without W_o. simpletron_resl: out = x + A W_o + b_o, or with skip="block" A W_o + b_o.
At strength s, the layer computes (1 - s) (ordinary layer) + s (variant's layer); s = 0 is ordinary attention.
SimpleTRON (2021), section 3. The paper has no causal form, no length without padding and no strength; these are this
package's own. docs/mathematics.md, section SimpleTRON.
Axes: B batch, H head, G key/value head, Q query, K key, L token, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.call import Call, Geometry, Three
from ..core.options import Options
from ..functional import simple_attention
from ..functional.linear import length_factor, widened, without_autocast
from ..kernels import linear
from ..kernels.dispatch import Form, Setting, linear_form
from .about import About
from .base import Replacement, mix, register


@dataclass(frozen=True, kw_only=True)
class SimpletronOptions(Options):
    """The options of `simpletron`.

    Attributes:
        length: "true" counts the real keys that a query may see; "fixed" counts padding too.
    """

    length: Literal["true", "fixed"] = "true"


@dataclass(frozen=True, kw_only=True)
class SimpletronResOptions(SimpletronOptions):
    """The options of `simpletron_res` and `simpletron_resl`.

    Attributes:
        skip: "inner" adds x inside the layer; "block" adds nothing, so that only the block's own residual stays.
    """

    skip: Literal["inner", "block"] = "inner"


@register("simpletron", aliases=("simple",))
class Simpletron(Replacement):
    """Returns the product q (k^T v) alone, without W_o (no parameters)."""

    about = About(
        summary="no softmax: q (k^T v) in linear time, without W_o",
        formula="A = q (k^T v) / sqrt(L)",
        paper="SimpleTRON, 2021",
        fused="reordered products, chunked when causal",
    )
    Options = SimpletronOptions
    options: SimpletronOptions
    keeps_projection = False

    @classmethod
    def check(cls, options: Any, geometry: Geometry) -> None:
        if not cls.keeps_projection and geometry.heads * geometry.head_dim != geometry.hidden:
            raise ValueError(
                f"{cls.name} leaves out W_o, so heads * head width must equal the model width, got "
                f"{geometry.heads} * {geometry.head_dim} != {geometry.hidden}; use simpletron_resl."
            )

    @property
    def adds_input(self) -> bool:
        """True if the layer's input x is added inside the layer."""
        return False

    @property
    def shares(self) -> tuple[float, float]:
        return float(self.adds_input), 1.0

    def form(self, setting: Setting) -> Form:
        return linear_form(setting)

    def linear(self, qkv: Three, key_mask: Tensor | None, causal: bool, past: Three | None, form: Form) -> Tensor:
        """A (B,H,Q,D) in linear time. In causal order, the last query sees the last key."""
        length = self.options.length
        if form is Form.BLOCKS:
            return linear.attend(*qkv, key_mask=key_mask, length=length, past=past)
        return simple_attention(*qkv, causal=causal, key_mask=key_mask, length=length, past=past)

    def products(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        """L^(-1/2) q k^T (B,H,Q,K), in fp32 at least, for any mask: zeros where a query may not see a key."""
        with without_autocast(q.device):
            products = widened(q) @ widened(k).transpose(2, 3)
        if allowed is None:
            factor_BQ = length_factor(q, k, causal=False, key_mask=None, length=self.options.length, past=None)
            return products * factor_BQ[:, None, :, None]
        visible = allowed.sum(-1, keepdim=True) if self.options.length == "true" else self._span(allowed)
        return products.masked_fill(~allowed, 0.0) * visible.clamp_min(1).to(products.dtype).rsqrt()

    @staticmethod
    def _span(allowed: Tensor) -> Tensor:
        """The number of keys up to the last key that the query may see in any row of the batch, padding included."""
        keys = allowed.shape[-1]
        last = torch.where(allowed.any(0, keepdim=True), torch.arange(1, keys + 1, device=allowed.device), 0)
        return last.amax(-1, keepdim=True)

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        """Keep A for `write`. The layer applies W_o to the heads, but `write` does not use the output of W_o."""
        call.kept = heads_BLHD.flatten(2)
        return heads_BLHD

    def read_between(self, ordinary_BLHD: Tensor, heads_BLHD: Tensor, call: Call) -> Tensor:
        """Keep A for `write`, and let W_o read the heads of ordinary attention. `write` mixes both."""
        call.kept = heads_BLHD.flatten(2)
        return ordinary_BLHD

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        assert call.kept is not None
        variant = call.kept if call.dropout is None else call.dropout(call.kept)
        if self.adds_input:
            variant = variant + call.x
        return mix(out_BLE, variant.to(out_BLE), call.strength_in(out_BLE.dtype))


@register("simpletron_res", aliases=("simple_res",))
class SimpletronRes(Simpletron):
    """Returns the product plus the layer's input, without W_o (no parameters)."""

    about = replace(
        Simpletron.about, summary="no softmax and an inner skip, in linear time, without W_o", formula="x + A"
    )
    Options = SimpletronResOptions
    options: SimpletronResOptions

    @property
    def adds_input(self) -> bool:
        return self.options.skip == "inner"


@register("simpletron_resl", aliases=("simple_resl",))
class SimpletronResL(SimpletronRes):
    """Returns the product after W_o, plus the layer's input (no parameters)."""

    about = replace(
        Simpletron.about, summary="no softmax and an inner skip, in linear time, with W_o", formula="x + A W_o"
    )
    keeps_projection = True

    def read(self, heads_BLHD: Tensor, call: Call) -> Tensor:
        return heads_BLHD

    def read_between(self, ordinary_BLHD: Tensor, heads_BLHD: Tensor, call: Call) -> Tensor:
        return mix(ordinary_BLHD, heads_BLHD, call.strength_in(ordinary_BLHD.dtype))

    def write(self, out_BLE: Tensor, call: Call) -> Tensor:
        if not self.adds_input:
            return out_BLE
        return out_BLE + (call.strength_in(out_BLE.dtype) * call.x).to(out_BLE.dtype)
