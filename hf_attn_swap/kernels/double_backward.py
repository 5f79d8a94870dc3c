"""Refuses second derivatives of the kernels.

A kernel's own backward pass computes numbers that autograd cannot look into: a derivative of its gradients would lack a
part without an error. PyTorch's `once_differentiable` does not suffice. If the caller names the inputs, autograd leaves
the error that it makes out of the graph. The readable formula has all derivatives.
"""

from __future__ import annotations

import torch


def refuse_double_backward() -> None:
    """Refuse a backward pass whose gradients are to be differentiated again. Every kernel's backward pass calls this.

    Raises:
        ValueError: the caller builds a graph of the gradients (`create_graph=True`).
    """
    if torch.is_grad_enabled():  # in a backward pass, this is `create_graph`
        raise ValueError(
            "the attention kernels have no second derivative (create_graph=True); call the model with "
            "output_attentions=True, or use the transforms of torch.func: the readable formula then runs, which has "
            "all derivatives."
        )
