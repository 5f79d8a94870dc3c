"""Static quantisation of weights and activations to 8 bits (W8A8) after training, computed as fake quantisation.

Fake quantisation rounds a tensor to 256 values and computes in floating point, as the outlier papers do.
Weights: symmetric, one step per tensor, max |w| / 127. Activations: asymmetric, one range per tensor with 256 values.
The range is a running mean of each batch's minimum and maximum with momentum 0.9, and it always holds 0.
Quantised: weights and outputs of projections, norms and embeddings; residual sums (the inputs of norms); scores before
the mask; attention weights; heads. Not quantised: biases, masks, task heads and gates.
Bondarenko et al. (2023); OutEffHop (Hu et al., 2024), section 4; docs/mathematics.md, section Quantisation to 8 bits.
Axes: B batch, H head, Q query, K key, D head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.probe import Probe
from ..families import sites
from ..layer.swap import Swap
from ..wiring.layers import layers_at
from .places import is_norm, quantizable
from .points import MOMENTUM, Point
from .quantizer import Quantizer, quantized


@contextlib.contextmanager
def fake_w8a8(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    momentum: float = MOMENTUM,
    gradients: bool = False,
) -> Iterator[tuple[Point, ...]]:
    """Inside the `with` block, the model computes with 8-bit weights and activations in fake quantisation.

    The batches are run once to find the ranges of the activations. After the block the model is as before.
    OutEffHop, section 4; docs/mathematics.md, section Quantisation to 8 bits.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in evaluation mode. Its task head is not quantised.
        batches: dicts of tensors, from the training data; labels are ignored.
        momentum: the weight of the earlier range in the running mean, from 0 to 1.
        gradients: True lets the model train inside the block, as in `straight_through`: a gradient passes through a
            rounding as if nothing had been rounded. The ranges of the activations stay as they were fitted.

    Yields:
        The quantised tensors with their ranges: first the weights, then the activations in the order of the pass.

    Raises:
        ValueError: there is no batch, the model is in training mode, gradients are enabled without `gradients=True`, or
            with it under activation checkpointing, a tensor has no range because no batch reached it, or weights or
            activations are not finite.
    """
    with quantized(model, batches, lambda root: _Papers(root, momentum, gradients=gradients)) as inside:
        yield inside


class _Papers(Quantizer):
    """Rounds all sums and outputs, with ranges that are running means, and weights with one step per tensor."""

    def place(self, stack: contextlib.ExitStack) -> None:
        super().place(stack)
        for path, module in quantizable(self.root):
            self.weight(path, module, stack)
            if is_norm(module):
                stack.callback(module.register_forward_pre_hook(self._input(path)).remove)
            stack.callback(module.register_forward_hook(self._output(path)).remove)
        for layer in layers_at(sites(self.root)):
            config = getattr(layer.site.core, "config", None)
            rotary = getattr(config, "rope_parameters", None) is not None
            for swap in layer.copies:  # PEFT runs one of them
                stack.callback(swap.register_forward_pre_hook(self._attention(layer.path, rotary)).remove)
        for path, module in self.root.named_modules():
            if isinstance(module, Probe):
                stack.callback(module.register_forward_hook(self._probe(path)).remove)

    def rounded_weight(self, module: nn.Module, weight: Tensor, point: Point) -> Tensor:
        return point.apply(weight)

    def _input(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].copy_(self.round(f"{path}.input", args[0]))  # the rounded sum also continues as the residual stream

        return hook

    def _output(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self.round(f"{path}.output", output)

        return hook

    def _probe(self, path: str) -> Any:
        def hook(module: Probe, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self.round(path, output)

        return hook

    def _attention(self, path: str, rotary: bool) -> Any:
        def hook(swap: Swap, args: tuple[Any, ...]) -> None:
            inputs, call = args[:2]
            if rotary:
                inputs.query = self.round(f"{path}.query", inputs.query)
                inputs.key = self.round(f"{path}.key", inputs.key)
            call.probe = lambda name, tensor: self.round(f"{path}.{name}", tensor)

        return hook
