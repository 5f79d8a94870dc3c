"""Chooses the scale in which belief attention reads the values, so that its projection takes little from the heads.

A token i keeps y_i - c_i v_i, with c_i = <y_i, v_i> / <v_i, v_i> over all dimensions of the heads. But the scale of one
dimension of the values has no meaning: multiply a row of W_v and divide the columns of W_o that read it, and the
pretrained layer is the same function. With the scales S, c_i = <y_i, S^2 v_i> / <v_i, S^2 v_i>. A large scale for the
dimensions in which tokens read little of what is like themselves makes c_i small. S minimises the mean over tokens of

    |c_i W_o v_i|^2 / |W_o y_i|^2,

the share of the layer's output that the projection takes, on the stream of the stock model; then S is rounded to
powers of two. The method is this package's own; docs/mathematics.md, section Scaled values.
Axes: B batch, L token, N token of all batches, G key/value head, H head, D head width, E model width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..layer.value_scale import LARGEST_SCALE, ValueScale
from ..measuring.batches import Batch, as_batches, evaluating, forward, read_by, refuse_other_tokens, token_mask
from ..patch import need_installation, softmax_swaps
from ..text.bar import bar
from ..wiring.device_and_dtype import device_and_dtype
from ..wiring.install import Installation
from ..wiring.layers import Layer

TOKENS = 4096  # so many tokens are enough,
NUMBERS = 2**22  # and so many numbers of them per layer, N * G * D: wide models read fewer tokens
STEPS = 300
RATE = 0.1  # of Adam, for log S^2
FLOOR = 1e-3  # a token's output counts as at least this share of the mean


@dataclass(frozen=True, kw_only=True)
class ValueScales:
    """What `scale_values` did.

    Attributes:
        before: by the layer's number, the share of the squared output that the projection takes, with all scales 1.
        after: the same, with the chosen scales.
    """

    before: dict[int, float]
    after: dict[int, float]

    def __str__(self) -> str:
        before, after = (sum(shares.values()) / len(shares) for shares in (self.before, self.after))
        return (
            f"The values of {len(self.after)} layers are scaled: the projection takes {after:.1%} of the "
            f"squared output of a layer on average, {before:.1%} before."
        )


def scale_values(model: nn.Module, batches: Iterable[Any], *, progress: bool = True) -> ValueScales:
    """Choose the scale of each value dimension for the projection of `belief` and `belief_star`, in place.

    No weight changes, and the model at strength 0 does not change. The model at strength 1 computes the paper's formula
    for the weights in another scale, in which the pretrained model is the same function. `config.attn_swap` says that
    values are scaled, the scales are saved with the weights, and `unpatch_model` removes them with the swap. Call this
    before a calibration and before any training, which fit the scales that they find; `calibrate` does so by itself.
    docs/mathematics.md, section Scaled values.

    Args:
        model: a model that is patched with a variant that projects on values.
        batches: dicts of tensors as the model takes them. The first batches are read, until they have 4,096 tokens
            (fewer in wide models).
        progress: show a progress bar.

    Raises:
        ValueError: the model is not patched or no variant projects on values; a calibration was merged, or a conversion
            trained weights; there is no batch, no token reaches a layer, or activations are not finite. The model is
            unchanged after an error.
    """
    installation = need_installation(model)
    projecting = [layer for layer in installation.layers() if layer.swap.projects]
    if not projecting:
        raise ValueError(
            "no swapped layer projects on values, so there is nothing to scale; layers with belief or belief_star do."
        )
    if trained := [layer.number for layer in projecting if layer.swap.retrained]:
        raise ValueError(
            f"a conversion trained the weights of layers {trained} for the scales that their values have; scale the "
            "values before the training."
        )
    shown = _watch(model, installation, projecting, batches)
    solved = {}
    for layer in bar(projecting, desc="scale values", unit="layer", shown=progress):
        solved[layer.number] = solve(*shown.pop(layer).joined())
    for layer in projecting:
        squares, _, _ = solved[layer.number]
        for swap in layer.copies:
            scale = ValueScale(swap.geometry)
            scale.squares.copy_(squares.view_as(scale.squares))
            swap.put(scale.placed_like(device_and_dtype(layer.site.container, layer.site.core)))
    installation.refresh()
    return ValueScales(
        before={index: before for index, (_, before, _) in solved.items()},
        after={index: after for index, (_, _, after) in solved.items()},
    )


@dataclass
class _Seen:
    """What one layer shows of its tokens: products by dimension, and the sizes of its output."""

    layer: Layer
    heads_values: list[Tensor] = field(default_factory=list)  # (N,G*D), y v summed over the heads of a group
    squares: list[Tensor] = field(default_factory=list)  # (N,G*D), v v summed over the heads of a group
    taken: list[Tensor] = field(default_factory=list)  # (N,), |W_o v|^2
    written: list[Tensor] = field(default_factory=list)  # (N,), |W_o y|^2

    @property
    def limit(self) -> int:
        """So many tokens are enough."""
        sizes = self.layer.swap.geometry
        return max(1, min(TOKENS, NUMBERS // (sizes.kv_heads * sizes.head_dim)))

    @property
    def enough(self) -> bool:
        """True if the layer has seen so many tokens."""
        return sum(map(len, self.taken)) >= self.limit

    def hook(self, batch: Batch) -> Any:
        """A forward pre-hook of the stock swap, which notes the tokens of one call."""
        batch = read_by(self.layer.site.core, batch)

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            call = args[1]
            assert isinstance(call, Call)

            def see(place: str, tensor: Tensor) -> Tensor:
                if place == "context":
                    self._note(tensor, call.own_values(self.layer.swap.geometry.kv_heads), batch)
                return tensor

            call.probe = see

        return before

    def _note(self, heads_BLHD: Tensor, values_BLGD: Tensor, batch: Batch) -> None:
        """Note what the scales are solved from, for some of the real tokens, spread over the batch."""
        real = token_mask(batch, heads_BLHD)
        step = max(1, math.ceil(int(real.sum()) / self.limit))
        y, v = heads_BLHD[real][::step], values_BLGD[real][::step]
        group = y.shape[1] // v.shape[1]
        self.taken.append(self._size(v.repeat_interleave(group, 1)))
        self.written.append(self._size(y))
        y, v = y.float(), v.float()
        self.heads_values.append((y.view(*v.shape[:2], group, v.shape[2]).sum(2) * v).flatten(1).cpu())
        self.squares.append((group * v * v).flatten(1).cpu())

    def _size(self, heads_NHD: Tensor) -> Tensor:
        """|W_o y|^2 of each token, without the bias; |y|^2 if the package does not know which module holds W_o."""
        flat = heads_NHD.flatten(1)
        site = self.layer.site
        if site.family.output is not None:
            projection = site.container.get_submodule(site.family.output)
            flat = projection(flat) - projection(torch.zeros_like(flat[:1]))
        return flat.float().square().sum(-1).cpu()

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """The products of some tokens at equal distances, and the weight of each token in the mean.

        Raises:
            ValueError: activations are not finite, or there are no tokens.
        """
        index = self.layer.number
        if not sum(map(len, self.taken)):
            raise ValueError(
                f"layer {index}: no real token of the batches reaches this layer; pass tokens that are not padding."
            )
        heads_values, squares, taken, written = map(
            torch.cat, (self.heads_values, self.squares, self.taken, self.written)
        )
        if not all(tensor.isfinite().all() for tensor in (heads_values, squares, taken, written)):
            raise ValueError(f"layer {index}: activations are not finite, so its values cannot be scaled; use float32.")
        step = math.ceil(len(taken) / self.limit)
        weight = taken / written.clamp_min(FLOOR * float(written.mean()))
        return heads_values[::step], squares[::step], weight[::step]


def _watch(
    model: nn.Module, installation: Installation, layers: list[Layer], batches: Iterable[Any]
) -> dict[Layer, _Seen]:
    """What the layers show of the tokens of the first batches, in the stock model."""
    plain = softmax_swaps(installation)
    shown_by = {layer: _Seen(layer) for layer in layers}
    cores = [layer.site.core for layer in layers]
    with evaluating(model), installation.temporarily(plain):
        for batch in as_batches(batches):
            refuse_other_tokens(installation.root, cores, batch)
            with contextlib.ExitStack() as hooked:
                for layer, shown in shown_by.items():
                    hooked.callback(plain[layer].register_forward_pre_hook(shown.hook(batch)).remove)
                forward(model, batch)
            if all(shown.enough for shown in shown_by.values()):
                break
    return shown_by


def solve(heads_values: Tensor, squares: Tensor, weight: Tensor) -> tuple[Tensor, float, float]:
    """S^2 of every dimension, and the share of the output that the projection takes before and after.

    If rounded scales are no better than none, all are 1.
    """

    def share(logarithm: Tensor) -> Tensor:
        scale = logarithm.exp()
        part = (heads_values @ scale) / (squares @ scale).clamp_min(1e-12)
        return (part.square() * weight).mean()

    with torch.enable_grad():
        logarithm = torch.zeros(squares.shape[1], requires_grad=True)
        optimizer = torch.optim.Adam([logarithm], lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            share(logarithm).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
    exponents = logarithm.detach() / (2 * math.log(2))
    exponents = (exponents - exponents.median()).round().clamp(-LARGEST_SCALE, LARGEST_SCALE)
    before, after = float(share(torch.zeros_like(exponents))), float(share(2 * math.log(2) * exponents))
    if not after < before:
        return torch.ones_like(exponents), before, before
    return 4.0**exponents, before, after
