"""Makes the gradients of a kernel again by a readable formula, so that they can be differentiated once more.

A kernel's own backward pass computes numbers that autograd cannot look into. While a caller builds a graph of the
gradients (`create_graph=True`, for a second derivative), the backward pass must come from PyTorch's own operations.
An ordinary backward pass builds no such graph, and never gets here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def wanted() -> bool:
    """True in a backward pass whose gradients will be differentiated again (`create_graph=True`)."""
    return torch.is_grad_enabled()


def gradients(formula: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors`, which autograd can differentiate again.

    Args:
        formula: from the tensors to the kernel's result, by operations of PyTorch that have all derivatives.
        tensors: what the kernel was given, of any shapes.
        grad: the gradient of the kernel's result, in the shape of this result.

    Returns:
        A gradient per tensor, in its shape; None for a tensor that needs none.
    """
    with torch.enable_grad():
        own = [each.view_as(each) for each in tensors]  # one tensor may be given twice, as query and as key
        learned = [each for each in own if each.requires_grad]
        found = iter(torch.autograd.grad(formula(*own), learned, grad, create_graph=True))
    return tuple(next(found) if each.requires_grad else None for each in own)


def refuse(what: str, instead: str) -> None:
    """Refuse a second derivative that would be wrong.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{what} has no second derivative; {instead}.")
