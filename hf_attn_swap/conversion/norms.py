"""Finds out by calling a norm what it multiplies and adds, and whether it commutes with a rotation.

A norm here is n(x) * (a + w) + b: n has no weights, w is a parameter, a is 0 or 1 (Gemma), and b a bias or nothing.
Nothing of this is known by a name. Axes: N token, C channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

SAMPLES = 16
ROUNDING = 1e-4  # the largest relative difference that is rounding, in fp32


@dataclass(frozen=True)
class Affine:
    """The parameters of a norm.

    Attributes:
        weight: the name of w.
        bias: the name of b; None without one.
        neutral: the value of w with which the norm multiplies by 1.
        scale: what the norm multiplies by, a + w, (C,) in float64.
        shift: b, (C,) in float64; None without one.
    """

    weight: str
    bias: str | None
    neutral: float
    scale: Tensor
    shift: Tensor | None

    @property
    def behind(self) -> Tensor | None:
        """The bias b / (a + w), which gives b once a + w is in the matrices behind; not finite where that is 0."""
        return None if self.shift is None else torch.where(self.shift == 0, self.shift, self.shift / self.scale)


@torch.no_grad()
def affine(norm: nn.Module, channels: int) -> Affine | None:
    """The parameters of a norm; None if it does not have this form."""
    own = dict(norm.named_parameters())
    x_NC = _samples(next(iter(own.values())), channels)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in own.items()}
    bare = _call(norm, zeros, x_NC)
    changes = {name: _call(norm, zeros | {name: torch.ones_like(own[name])}, x_NC) - bare for name in own}
    shifts = [name for name, change in changes.items() if _near(change, torch.ones_like(change))]
    weights = [name for name in own if name not in shifts]
    if len(weights) != 1 or len(shifts) > 1 or own[weights[0]].shape != (channels,):
        return None
    unit = changes[weights[0]]
    a = round(float((bare * unit).sum() / unit.square().sum().clamp_min(1e-30)))
    scale = a + own[weights[0]].cpu().double()
    shift = own[shifts[0]].cpu().double() if shifts else None
    if not _near(_call(norm, own, x_NC), unit * scale + (0 if shift is None else shift)):
        return None
    return Affine(weights[0], shifts[0] if shifts else None, 1.0 - a, scale, shift)


@torch.no_grad()
def commutes(norm: nn.Module, form: Affine, rotation_CC: Tensor) -> bool:
    """True if n(x Q) = n(x) Q, where n is the norm with neutral parameters."""
    own = dict(norm.named_parameters())
    plain = {name: torch.full_like(each, form.neutral if name == form.weight else 0) for name, each in own.items()}
    x_NC = _samples(own[form.weight], len(rotation_CC))
    turned = _call(norm, plain, (x_NC.cpu().double() @ rotation_CC).to(x_NC.dtype).to(x_NC.device))
    return _near(turned, _call(norm, plain, x_NC) @ rotation_CC)


def _samples(like: Tensor, channels: int) -> Tensor:
    """Tokens of different sizes and channels with different means, (N,C)."""
    generator = torch.Generator().manual_seed(0)
    x_NC = torch.randn(SAMPLES, channels, generator=generator, dtype=torch.float64) + 0.5
    x_NC = x_NC * torch.exp(torch.randn(channels, generator=generator, dtype=torch.float64))
    return (x_NC * torch.logspace(-1, 2, SAMPLES, dtype=torch.float64)[:, None]).to(like.dtype).to(like.device)


def _call(norm: nn.Module, parameters: Mapping[str, Tensor], x_NC: Tensor) -> Tensor:
    """What the norm gives with other parameters, in float64 (which some devices do not have)."""
    out: Tensor = functional_call(norm, dict(parameters), (x_NC[None],))
    return out[0].cpu().double()


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= ROUNDING * other.norm())
