"""Lets a model train in 8 bits: it computes with rounded inputs and weights, and its weights stay wide.

The gradient passes through a rounding as if nothing had been rounded (straight-through estimator); an input outside of
its range has none. Bengio et al. (2013); Jacob et al. (2018), section 3. docs/mathematics.md, section Quantisation to
8 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from ..wiring.install import model_root
from .points import Point, Range, rounded_rows, rounded_tokens


@contextlib.contextmanager
def straight_through(model: nn.Module, ranges: Mapping[str, Range | None]) -> Iterator[None]:
    """Inside the `with` block, every Linear with a range computes as after `int8_static`, with gradients.

    The parameters stay the same objects, so that an optimizer of the model trains them; their names in the state dict
    are those of PyTorch's parametrizations. After the block the model is as before, with what it has learnt.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in floating point and without adapters.
        ranges: the ends of the range of each Linear's inputs, by its path, as `input_ranges` gives them; None for a
            range per token, as after `int8_dynamic`.
    """
    root = model_root(model)
    with contextlib.ExitStack() as stack:
        for path, ends in ranges.items():
            linear = root.get_submodule(path)
            train_rounded(linear, lambda weight: rounded_rows(weight, 0), stack)
            stack.callback(linear.register_forward_pre_hook(_rounds(path, ends)).remove)
        yield


def train_rounded(module: nn.Module, rounding: Callable[[Tensor], Tensor], stack: contextlib.ExitStack) -> None:
    """Let a module compute with its rounded weight and train the weight itself, until the stack closes."""
    register_parametrization(module, "weight", _Rounded(rounding))
    stack.callback(remove_parametrizations, module, "weight", leave_parametrized=False)


class _Rounded(nn.Module):
    """A rounded weight, whose gradient is that of the weight."""

    def __init__(self, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.rounding(weight.detach()) - weight.detach())


def _rounds(path: str, ends: Range | None) -> Any:
    point = None if ends is None else Point(path, low=ends[0], high=ends[1], seen=True)

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        rounded = x + (rounded_tokens(x.detach()) - x.detach()) if point is None else point.apply(x)
        return rounded, *args[1:]

    return hook
