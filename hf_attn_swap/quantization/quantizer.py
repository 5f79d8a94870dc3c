"""What every protocol of fake quantisation shares: the tensors in 8 bits, their ranges, and the counted products.

Fake quantisation rounds a tensor to 256 values and computes in floating point. A protocol (`fake.py`, `machine.py`)
says which tensors are rounded; the places come from `places.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.swap import Phase, Swap
from ..measuring.batches import as_batches, forward
from ..measuring.instrumented import instrumented
from ..text.bar import bar
from .places import is_matmul, refuse_stacked
from .points import MOMENTUM, Point, Quantized
from .straight_through import train_rounded


@contextlib.contextmanager
def quantized(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], quantizer: Callable[[Any], Quantizer]
) -> Iterator[Quantized]:
    """Inside the `with` block, the model computes by a protocol of fake quantisation. The batches give the ranges.

    Raises:
        ValueError: as `fake_w8a8`.
    """
    if model.training:
        raise ValueError("8-bit ranges are fitted in evaluation; call model.eval() first.")
    with instrumented(model) as root, contextlib.ExitStack() as stack:
        refuse_stacked(root)
        placed = quantizer(root)
        if placed.gradients and any(getattr(module, "gradient_checkpointing", False) for module in root.modules()):
            raise ValueError(
                "a model in fake quantisation has no gradients under activation checkpointing, which computes a layer "
                "a second time; switch the checkpointing off."
            )
        placed.place(stack)
        for batch in bar(as_batches(batches), desc="8-bit ranges", unit="batch", leave=False):
            forward(root, batch)
        placed.fitting = False
        yield Quantized(tuple(placed.points.values()), placed.covered())


class Quantizer:
    """The hooks of one quantised model, the ranges of its tensors, and the FLOPs that the hooks counted.

    A protocol is a subclass. It puts its hooks in place. The ranges are running means with this momentum.
    With `gradients`, the model can train: a gradient passes through a rounding as if nothing had been rounded.
    """

    def __init__(self, root: Any, momentum: float = MOMENTUM, *, gradients: bool = False) -> None:
        self.root = root
        self.momentum = momentum
        self.gradients = gradients
        self.fitting = True
        self.points: dict[str, Point] = {}
        self.calls: dict[str, int] = {}  # calls in this pass, by name: a shared module has a range per call
        self.flops = {"covered": 0.0, "rest": 0.0}

    def place(self, stack: contextlib.ExitStack) -> None:
        """Put the rounded weights and all hooks in place. When the stack closes, it removes them."""
        stack.callback(self.root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)

    def rounded_weight(self, module: nn.Module, weight: Tensor, point: Point) -> Tensor:
        """A weight in 8 bits. The point holds its largest range."""
        raise NotImplementedError

    def covered(self) -> float:
        """The share of the matmul FLOPs whose two factors are rounded to 8 bits."""
        return self.flops["covered"] / (self.flops["covered"] + self.flops["rest"])

    def count_others(self, stack: contextlib.ExitStack, chosen: Container[str]) -> None:
        """Count the products of the matrices that stay as they are."""
        for path, module in self.root.named_modules():
            if is_matmul(module) and path not in chosen:
                stack.callback(module.register_forward_hook(self._uncovered).remove)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.calls.clear()
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            return args, kwargs
        # Hooks may round the input of a norm in place. The first norm may read the caller's tensor: pass a copy.
        return args, {**kwargs, "inputs_embeds": embeddings.clone()}

    def round(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in 8 bits. While the batches run, its range follows it."""
        if torch.is_grad_enabled() and not self.gradients:
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

    def weight(self, path: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        """Put a rounded weight instead of a module's weight, until the stack closes."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            return  # a norm without a scale
        with torch.no_grad():
            point = _widest(f"{path}.weight", weight)
            rounded = self.rounded_weight(module, weight, point)
            point.compare(weight, rounded)
        self.points[point.name] = point
        if self.gradients:  # the step follows the weight while it trains
            train_rounded(module, lambda now: self.rounded_weight(module, now, _widest(point.name, now)), stack)
            return
        module.weight = nn.Parameter(rounded, requires_grad=False)  # a tied task head keeps the original weight
        stack.callback(setattr, module, "weight", weight)

    def _uncovered(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.count("rest", module, output)

    def count(self, which: str, module: nn.Module, output: Tensor) -> None:
        """Count the FLOPs of a matrix that gave this output, in the first pass."""
        if self.fitting and is_matmul(module):
            assert isinstance(module.weight, Tensor)
            if isinstance(module, nn.Conv2d):  # every output position uses the whole weight
                products = module.weight.numel() * output.numel() / output.shape[1]
            else:  # every output number uses one column of the weight
                products = module.weight.numel() / output.shape[-1] * output.numel()
            self.flops[which] += 2 * products

    def attention(self, swap: Swap, args: tuple[Any, ...]) -> tuple[float, float]:
        """The FLOPs of one attention: products of queries, keys, values and probabilities, and all others.

        Ordinary attention multiplies queries with keys, and probabilities with values. Linear attention computes
        q (k^T v), and the product of k^T v with q is one of the others. So is the ordinary attention that also runs
        where linear attention is not at full strength.
        """
        batch, heads, queries, width = args[0].query.shape
        keys = args[0].key.shape[2]
        product = 2.0 * batch * heads * queries * width
        if not swap.replaces:
            return 2 * keys * product, 0.0
        return width * product, (width if swap.phase == Phase.FULL else width + 2 * keys) * product


def _widest(name: str, weight: Tensor) -> Point:
    """The point of a weight, symmetric, with its largest range.

    Raises:
        ValueError: the weight is not finite.
    """
    if not math.isfinite(end := float(weight.abs().max())):
        raise ValueError(f"{name} is not finite; check the checkpoint.")
    return Point(name, low=-128 / 127 * end, high=end, seen=True)
