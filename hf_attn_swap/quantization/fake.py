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
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..core.call import NORMALIZED
from ..families import sites
from ..layer.swap import Phase, Swap
from ..measuring.batches import as_batches, forward
from ..measuring.watched import watched
from ..wiring.layers import layers_at
from .places import is_matmul, is_norm, quantizable
from .points import Point, Quantized


@contextlib.contextmanager
def fake_w8a8(model: nn.Module, batches: Iterable[Mapping[str, Any]], *, momentum: float = 0.9) -> Iterator[Quantized]:
    """Inside the `with` block, the model computes with 8-bit weights and activations in fake quantisation.

    The batches are run once to find the ranges of the activations. After the block the model is as before.
    OutEffHop, section 4; docs/mathematics.md, section Quantisation to 8 bits.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in evaluation mode. Its task head is not quantised.
        batches: dicts of tensors, from the training data; labels are ignored.
        momentum: the weight of the earlier range in the running mean, from 0 to 1.

    Yields:
        The quantised tensors with their ranges, and the share of the matmul FLOPs that is covered.

    Raises:
        ValueError: there is no batch, the model is in training mode, gradients are enabled, a tensor has no range
            because no batch reached it, or weights or activations are not finite.
    """
    if model.training:
        raise ValueError("8-bit ranges are fitted in evaluation; call model.eval() first.")
    with watched(model) as root, contextlib.ExitStack() as stack:
        quantizer = _Quantizer(root, momentum)
        quantizer.place(stack)
        for batch in tqdm(as_batches(batches), desc="8-bit ranges", unit="batch", leave=False):
            forward(root, batch)
        quantizer.fitting = False
        yield Quantized(tuple(quantizer.points.values()), quantizer.covered())


class _Quantizer:
    """The hooks of one quantised model, the ranges of its tensors, and the FLOPs that the hooks counted."""

    def __init__(self, root: Any, momentum: float) -> None:
        self.root = root
        self.momentum = momentum
        self.fitting = True
        self.points: dict[str, Point] = {}
        self.calls: dict[str, int] = {}  # calls in this pass, by name: a shared module has a range per call
        self.flops = {"covered": 0.0, "rest": 0.0}

    def place(self, stack: contextlib.ExitStack) -> None:
        """Put the rounded weights and all hooks in place. When the stack closes, it removes them."""
        chosen = dict(quantizable(self.root))
        stack.callback(self.root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for path, module in chosen.items():
            self._weight(path, module, stack)
            if is_norm(module):
                stack.callback(module.register_forward_pre_hook(self._input(path)).remove)
            stack.callback(module.register_forward_hook(self._output(path)).remove)
        for path, module in self.root.named_modules():
            if is_matmul(module) and path not in chosen:
                stack.callback(module.register_forward_hook(self._uncovered).remove)
        for layer in layers_at(sites(self.root)):
            config = getattr(layer.site.core, "config", None)
            rotary = getattr(config, "rope_parameters", None) is not None
            for swap in layer.copies:  # PEFT runs one of them
                stack.callback(swap.register_forward_pre_hook(self._attention(layer.path, rotary)).remove)

    def covered(self) -> float:
        """The share of the matmul FLOPs whose two factors are rounded to 8 bits."""
        return self.flops["covered"] / (self.flops["covered"] + self.flops["rest"])

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.calls.clear()
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            return args, kwargs
        # The hooks round the input of a norm in place. The first norm may read the caller's tensor: pass a copy.
        return args, {**kwargs, "inputs_embeds": embeddings.clone()}

    def _round(self, name: str, tensor: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("a model in fake quantisation has no gradients; call the model under torch.no_grad().")
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] > 1:
            name = f"{name}, call {self.calls[name]}"
        point = self.points.setdefault(name, Point(name))
        if self.fitting:
            point.observe(tensor, self.momentum)
        elif not point.seen:
            raise ValueError(f"{name} has no 8-bit range: no batch reached it; call the model as the batches did.")
        rounded = point.apply(tensor)
        if self.fitting:
            point.compare(tensor, rounded)
        return rounded

    def _weight(self, path: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        weight = module.weight
        if not isinstance(weight, nn.Parameter):
            return  # this norm has no parameters
        with torch.no_grad():
            end = float(weight.abs().max())
            if not math.isfinite(end):
                raise ValueError(f"{path}.weight is not finite; check the checkpoint.")
            point = Point(f"{path}.weight", low=-128 / 127 * end, high=end, seen=True)
            rounded = point.apply(weight)
            point.compare(weight, rounded)
        self.points[point.name] = point
        module.weight = nn.Parameter(rounded, requires_grad=False)  # a tied task head keeps the original weight
        stack.callback(setattr, module, "weight", weight)

    def _input(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].copy_(
                self._round(f"{path}.input", args[0])
            )  # the rounded sum also continues as the residual stream

        return hook

    def _output(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self._count("covered", module, output)
            return self._round(f"{path}.output", output)

        return hook

    def _uncovered(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._count("rest", module, output)

    def _count(self, which: str, module: nn.Module, output: Tensor) -> None:
        if self.fitting and is_matmul(module):
            assert isinstance(module.weight, Tensor)
            if isinstance(module, nn.Conv2d):  # every output position uses the whole weight
                products = module.weight.numel() * output.numel() / output.shape[1]
            else:  # every output number uses one column of the weight
                products = module.weight.numel() / output.shape[-1] * output.numel()
            self.flops[which] += 2 * products

    def _attention(self, path: str, rotary: bool) -> Any:
        def hook(swap: Swap, args: tuple[Any, ...]) -> None:
            inputs, call = args[:2]
            if rotary:
                inputs.query = self._round(f"{path}.query", inputs.query)
                inputs.key = self._round(f"{path}.key", inputs.key)
            call.tap = lambda name, tensor: tensor if name == NORMALIZED else self._round(f"{path}.{name}", tensor)
            if self.fitting:
                self._count_attention(swap, inputs.query.shape, inputs.key.shape[2])

        return hook

    def _count_attention(self, swap: Swap, query_BHQD: torch.Size, keys: int) -> None:
        """Count the FLOPs of the two matrix products of one attention.

        Ordinary attention multiplies queries with keys, and probabilities with values; all four factors are rounded to
        8 bits. Linear attention computes q (k^T v). The factors k and v are rounded to 8 bits, so k^T v counts as
        covered. The product k^T v is not rounded, so its product with q counts as not covered.
        """
        batch, heads, queries, width = query_BHQD
        linear = swap.places().replacement is not None
        product = 2 * batch * heads * queries * width
        self.flops["covered"] += product * (width if linear else 2 * keys)
        if linear:
            self.flops["rest"] += product * width
        if linear and swap.phase != Phase.FULL:  # the ordinary attention runs too, in full precision
            self.flops["rest"] += 2 * product * keys
