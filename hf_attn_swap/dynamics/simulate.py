"""Moves tokens by heads: dx_i/dt = sum_h sum_j P^h_ij V_h x_j. Time takes the place of layers.

x grows, so z = e^{-tR} x is integrated instead: dz_i/dt = sum_h sum_j P^h_ij V_h z_j - R z_i. R is the sum of V_h over
heads if that sum commutes with every V_h; otherwise R is the identity times the spectral abscissa of that sum, which is
the largest real part of the sum's eigenvalues. P is computed from x, whose scores grow like e^{2 rho t}; this factor is
capped at a size where softmax is one-hot to machine precision. For one head with V = I the equation is
dz_i/dt = sum_j P_ij (z_j - z_i). Geshkovski et al. (2023), eq. 1.1 and 1.3; docs/mathematics.md, section Dynamics of
tokens.
Axes: T time, N token, H head, D head width, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torchdiffeq import odeint

from .heads import HeadMatrices

METHODS = {"rk4": "rk4", "dopri5": "dopri5", "published": "euler"}
EXPONENT_CAP = 600.0  # times e^600, any difference of scores above 1e-258 makes the softmax one-hot
DIVERGED = 1e100  # a coordinate above this means that the integrator diverged


@dataclass(frozen=True, kw_only=True)
class Field:
    """The velocity of tokens that some heads move, as a function of time and state for an ODE solver.

    Attributes:
        heads: the heads that move the tokens.
        shared: (E,E), one value matrix for all heads; None if each head has its own.
        rate: (E,E), the matrix R of z = e^{-tR} x; zeros if x itself is integrated.
        abscissa: rho, the largest real part of the eigenvalues of R.
    """

    heads: HeadMatrices
    shared: Tensor | None
    rate: Tensor
    abscissa: float

    def attention(self, time: Tensor | float, z_NE: Tensor) -> Tensor:
        """The attention weights P (H,N,N) at a time."""
        heads, t = self.heads, float(time)
        bounded = self.rate - self.abscissa * torch.eye(heads.width, dtype=z_NE.dtype, device=z_NE.device)
        x_NE = z_NE @ torch.matrix_exp(t * bounded).T if bool(bounded.any()) else z_NE
        growth = math.exp(min(2 * self.abscissa * t, EXPONENT_CAP))
        return torch.softmax(heads.scale * growth * ((x_NE @ heads.query) @ (x_NE @ heads.key).mT), -1)

    def __call__(self, time: Tensor, z_NE: Tensor) -> Tensor:
        """The velocity dz/dt (N,E)."""
        weights_HNN = self.attention(time, z_NE)
        if self.shared is not None:
            moved_NE = weights_HNN.sum(0) @ z_NE @ self.shared.T
        else:
            moved_NE = (weights_HNN @ (z_NE @ self.heads.value) @ self.heads.output).sum(0)
        return moved_NE - z_NE @ self.rate.T


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The states of the tokens over time.

    Attributes:
        times: (T,), the recorded times.
        z: (T,N,E), the rescaled tokens, or the tokens themselves.
        field: the velocity that moved the tokens.
    """

    times: Tensor
    z: Tensor
    field: Field

    @property
    def x(self) -> Tensor:
        """The tokens themselves, x = e^{tR} z; infinite where x is too large for float64."""
        growth_TEE = torch.stack([torch.matrix_exp(time * self.field.rate) for time in self.times]).mT
        return self.z @ growth_TEE

    def attention(self, index: int) -> Tensor:
        """The attention weights P (H,N,N) at one of the recorded times."""
        return self.field.attention(self.times[index], self.z[index])


@torch.no_grad()
def simulate(
    tokens: Tensor,
    heads: HeadMatrices,
    *,
    time: float,
    step: float,
    method: str = "rk4",
    value: str | Tensor = "identity",
    rescale: bool = True,
) -> Trajectory:
    """Integrate the movement of tokens in float64, on the device of the tokens.

    Args:
        tokens: (N,E).
        heads: one head or several.
        time: length of the simulation.
        step: length of a step of "rk4" and "published". "dopri5" chooses its own steps, and is recorded at multiples
            of `step`.
        method: "rk4" (order 4, Kutta's 3/8 rule), "dopri5" (adaptive), or "published", the multi-head report's scheme.
            Its stages add one vector to all tokens and hold the attention fixed, so that all stages are equal and
            forward Euler remains.
        value: "identity", "head" (each head's own V_h), or one matrix (E,E) for all heads, which multiplies column
            vectors.
        rescale: True integrates z, which stays bounded; False integrates x, which overflows at long times.

    Raises:
        ValueError: the sizes, the method or the time do not fit, a token is not finite, or the simulation diverges.
    """
    _check(tokens, heads, time, step, method)
    start = tokens.double()
    field = _field(heads.to(start.device), value, rescale)
    steps = max(round(time / step), 1)
    times = torch.linspace(0.0, time, steps + 1, dtype=torch.float64, device=start.device)
    options = {"rtol": 1e-9, "atol": 1e-9} if method == "dopri5" else {}
    states: Tensor = odeint(field, start, times, method=METHODS[method], **options)
    large = (~states.isfinite() | (states.abs() > DIVERGED)).flatten(1).any(1)
    if bool(large.any()):
        at = float(times[int(large.int().argmax())])
        cure = "use a smaller step" if rescale else "use a smaller step, or rescale=True"
        raise ValueError(f"the simulation diverged at t = {at:.3g} with a step of {step:g}; {cure}.")
    return Trajectory(times=times, z=states, field=field)


def _field(heads: HeadMatrices, value: str | Tensor, rescale: bool) -> Field:
    width, device = heads.width, heads.query.device
    identity = torch.eye(width, dtype=torch.float64, device=device)
    shared: Tensor | None = None
    if isinstance(value, Tensor):
        if value.shape != (width, width):
            raise ValueError(f"value must be a {width} x {width} matrix, got {tuple(value.shape)}.")
        shared = value.to(device, torch.float64)
    elif value == "identity":
        shared = identity
    elif value != "head":
        raise ValueError(f"value must be 'identity', 'head' or a matrix, got {value!r}.")
    total = len(heads) * shared if shared is not None else heads.V.sum(0)
    if not rescale:
        return Field(heads=heads, shared=shared, rate=torch.zeros_like(identity), abscissa=0.0)
    abscissa = float(torch.linalg.eigvals(total).real.max())
    commutes = shared is not None or len(heads) == 1
    return Field(heads=heads, shared=shared, rate=total if commutes else abscissa * identity, abscissa=abscissa)


def _check(tokens: Tensor, heads: HeadMatrices, time: float, step: float, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if tokens.dim() != 2 or tokens.shape[-1] != heads.width or not tokens.numel():
        raise ValueError(f"tokens must be (N, {heads.width}), got {tuple(tokens.shape)}.")
    if not bool(torch.isfinite(tokens).all()):
        raise ValueError("the initial tokens are not finite; check the model or the matrix that they come from.")
    if not 0 < step <= time:
        raise ValueError(f"choose 0 < step <= time; got step = {step:g} and time = {time:g}.")
