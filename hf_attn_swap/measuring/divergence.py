"""How far a student's distributions are from a teacher's, without holding both over a whole vocabulary.

    loss = sum_n w_n KL(p*_n || p_n),   p = softmax(z),   d loss / d z_n = w_n (p_n - p*_n)

The gradient has a closed form, so it is computed together with the loss, a chunk of tokens at a time. If the output
head is given, the logits of a chunk are computed from the hidden states, and forgotten after the chunk.
Axes: N token, E model width, V vocabulary (or class).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

CHUNK = 2**23  # numbers of logits at a time; the head is read once per chunk


def divergence(
    student: Tensor,
    teacher: Tensor,
    weight_N: Tensor,
    *,
    head: nn.Module | None = None,
    teacher_head: nn.Module | None = None,
) -> Tensor:
    """The sum over tokens of weight * KL(teacher || student), () in fp32.

    Args:
        student: logits (N,V); or hidden states (N,E), whose logits `head` computes.
        teacher: logits (N,V); or hidden states (N,E), whose logits `teacher_head` computes.
        weight_N: the weight of every token; 0 leaves a token out.
        head: from hidden states to logits; no parameter of this module may train.
        teacher_head: the same for the teacher.
    """
    loss: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        student, teacher, weight_N, head, teacher_head
    )
    return loss


def divergence_of_numbers(root: PreTrainedModel, student_BN: Tensor, teacher_BN: Tensor) -> Tensor:
    """The mean over rows of KL(teacher || student), () in fp32, for outputs that are no logits of classes.

    The outputs of a regression count as means of normal distributions of variance 1, so KL is half the squared error.
    Labels that do not exclude each other are one yes or no each; KL is summed over them.
    """
    ours, theirs = student_BN.float(), teacher_BN.float()
    if getattr(root.config, "problem_type", None) != "multi_label_classification":
        return (ours - theirs).square().sum(-1).mean() / 2
    target = theirs.sigmoid()
    cross_entropy = binary_cross_entropy_with_logits(ours, target, reduction="none")
    entropy = binary_cross_entropy_with_logits(theirs, target, reduction="none")
    return (cross_entropy - entropy).sum(-1).mean()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weight_N: Tensor,
        head: nn.Module | None,
        teacher_head: nn.Module | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(student) if wanted else None
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        width = student.shape[1] if head is None else _width(head, student)
        size = max(1, CHUNK // width)
        for first in range(0, student.shape[0], size):
            last = first + size
            ours, theirs, weight = student[first:last], teacher[first:last], weight_N[first:last].float()
            if teacher_head is not None:
                theirs = teacher_head(theirs)
            if head is None:
                error, slope = _chunk(ours, theirs, weight, wanted)
            else:
                with torch.set_grad_enabled(wanted):
                    leaf = ours.detach().requires_grad_(wanted)
                    logits = head(leaf)
                error, slope = _chunk(logits.detach(), theirs, weight, wanted)
                if wanted:
                    (slope,) = torch.autograd.grad(logits, leaf, slope)
            total += error
            if gradient is not None:
                gradient[first:last] = slope
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if torch.is_grad_enabled():  # the gradient was computed in the forward pass, and is a constant to autograd
            raise ValueError("the distillation loss has no second derivative; leave out create_graph=True.")
        (gradient,) = ctx.saved_tensors
        return outer.to(gradient.dtype) * gradient, None, None, None, None


def kl(log_p_NV: Tensor, target_NV: Tensor, log_target_NV: Tensor) -> Tensor:
    """KL(p* || p), (N,), in nats, of log p, p* and log p*."""
    return (target_NV * (log_target_NV - log_p_NV)).sum(-1)


def _chunk(ours_NV: Tensor, theirs_NV: Tensor, weight_N: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, and its gradient to their logits (the logits themselves if no gradient is wanted)."""
    log_p_NV, log_target_NV = ours_NV.float().log_softmax(-1), theirs_NV.float().log_softmax(-1)
    target_NV = log_target_NV.exp()
    error = (kl(log_p_NV, target_NV, log_target_NV) * weight_N).sum()
    if not wanted:
        return error, ours_NV
    slope = log_p_NV.exp_().sub_(target_NV).mul_(weight_N[:, None])
    return error, slope.to(ours_NV.dtype)


def _width(head: nn.Module, hidden_NE: Tensor) -> int:
    """The number of logits of a token."""
    return int(head(hidden_NE[:1]).shape[-1])


def relative_error(out_BLE: Tensor, teacher_BLE: Tensor, real_BL: Tensor) -> Tensor:
    """Return the mean over rows of ||out - teacher||^2 / ||teacher||^2 over real tokens, (), in fp32 at least.

    More axes may follow L: a model of time series gives (B,C,P,E), and C, its channels, takes the place of L.
    """
    wide = torch.promote_types(out_BLE.dtype, torch.float32)
    hidden_BL1 = ~real_BL.reshape(*real_BL.shape, *[1] * (out_BLE.dim() - 2))
    out = out_BLE.to(wide).masked_fill(hidden_BL1, 0.0)
    teacher = teacher_BLE.to(wide).masked_fill(hidden_BL1, 0.0)
    error_B = (out - teacher).square().flatten(1).sum(1)
    size_B = teacher.square().flatten(1).sum(1)
    return (error_B / size_B.clamp_min(torch.finfo(wide).tiny)).mean()
