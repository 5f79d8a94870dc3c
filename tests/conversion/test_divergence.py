"""The divergence of distributions and its gradient equal the plain formula, in chunks and behind output heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_attn_swap.measuring import divergence as module
from hf_attn_swap.measuring.divergence import divergence

TOKENS, WIDTH, WORDS = 7, 5, 11


def numbers(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def weights() -> Tensor:
    """Unequal, with two tokens of padding."""
    return torch.tensor([0.5, 0.0, 1.0, 0.25, 0.0, 2.0, 0.125], dtype=torch.float64)


def plain(student: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's own formula and gradient in fp64, a token at a time; a head's logits arrive computed."""
    leaf = student.detach().double().requires_grad_()
    log_p, target = (each.log_softmax(-1) for each in (leaf, teacher.detach().double()))
    each = F.kl_div(log_p, target, reduction="none", log_target=True).sum(-1)
    loss = (weight.double() * each).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def head(seed: int) -> nn.Linear:
    """From hidden states to logits; frozen, as the function needs it."""
    made = nn.Linear(WIDTH, WORDS)
    with torch.no_grad():
        made.weight.copy_(numbers(WORDS, WIDTH, seed=seed))
        made.bias.copy_(numbers(WORDS, seed=seed + 1))
    return made.requires_grad_(False)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    assert float((got.double() - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.fixture(params=[1, 2, 3, TOKENS, 100])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of tokens in a chunk."""
    monkeypatch.setattr(module, "CHUNK", request.param * WORDS)
    return int(request.param)


def test_equals_the_formula(rows: int) -> None:
    student = numbers(TOKENS, WORDS, seed=1).float().requires_grad_()
    teacher, weight = numbers(TOKENS, WORDS, seed=2).float(), weights()
    loss = divergence(student, teacher, weight)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    wanted, gradient = plain(student, teacher, weight)
    close(loss.detach(), wanted)
    (got,) = torch.autograd.grad(3.0 * loss, student)
    close(got, 3.0 * gradient)
    assert not got[weight == 0].any(), "padding has no gradient"
    assert got[weight > 0].any(1).all()


@pytest.mark.parametrize("teacher_head", [True, False])
def test_behind_a_head(rows: int, teacher_head: bool) -> None:
    """The gradient reaches the hidden states; teacher and student have heads of their own."""
    ours, theirs = head(3), head(5)
    student = numbers(TOKENS, WIDTH, seed=1, scale=0.7).float().requires_grad_()
    hidden, weight = numbers(TOKENS, WIDTH, seed=2, scale=0.7).float(), weights()
    given = {"teacher_head": theirs} if teacher_head else {}
    teacher = hidden if teacher_head else theirs(hidden)
    loss = divergence(student, teacher, weight, head=ours, **given)
    wanted, slope = plain(ours(student), theirs(hidden), weight)
    close(loss.detach(), wanted)
    (got,) = torch.autograd.grad(loss, student)
    close(got, slope @ ours.weight.double(), 1e-5)


def test_extreme_logits() -> None:
    """Certain and impossible classes give finite numbers."""
    student = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]).requires_grad_()
    teacher = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, -1e4]])
    loss = divergence(student, teacher, torch.ones(2))
    wanted, gradient = plain(student, teacher, torch.ones(2))
    close(loss.detach(), wanted)
    close(torch.autograd.grad(loss, student)[0], gradient)


def test_no_second_derivative() -> None:
    """The gradient is a constant to autograd: a second derivative, of named inputs too, would lack a part."""
    student = numbers(TOKENS, WORDS, seed=1).float().requires_grad_()
    loss = divergence(student.square(), numbers(TOKENS, WORDS).float(), weights())
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(loss, student, create_graph=True)
