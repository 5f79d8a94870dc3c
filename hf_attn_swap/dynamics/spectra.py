"""Eigenvalues of trained heads, and the heads that meet the condition of the hyperplane theorem.

The condition: the leading eigenvalue of V, the eigenvalue with the largest modulus, is real, positive and simple, and
its eigenvector phi has <Q phi, K phi> > 0. The paper calls such Q, K and V a good triple. Geshkovski et al. (2023),
theorem 5.2 and figure 10; docs/mathematics.md, section Dynamics of tokens.
Axes: H head, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import HeadMatrices

VALUE_FLOOR, FORM_FLOOR = 1e-4, 1e-6  # smaller eigenvalues are rounding: V has rank D, and B has rank 2 D at most
RELATIVE_GAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The eigenvalues of one head.

    Attributes:
        head: counted from 0.
        value: complex eigenvalues of V_h whose modulus is above 1e-4, the largest modulus first.
        form: eigenvalues of B_h whose modulus is above 1e-6, in rising order.
        alignment: <Q phi, K phi> for the unit eigenvector phi of the leading eigenvalue; NaN if that eigenvalue is
            complex.
    """

    head: int
    value: Tensor
    form: Tensor
    alignment: float

    @property
    def leading(self) -> complex:
        """The eigenvalue of V_h with the largest modulus; 0 if no modulus is above 1e-4."""
        return complex(self.value[0]) if len(self.value) else 0j

    @property
    def positive(self) -> bool:
        """True if the leading eigenvalue is real and positive."""
        return self.leading.imag == 0 and self.leading.real > 0

    @property
    def simple(self) -> bool:
        """True if no other eigenvalue has the modulus of the leading eigenvalue."""
        if len(self.value) < 2:
            return len(self.value) == 1
        gap = float(self.value[0].abs() - self.value[1].abs())
        return gap > RELATIVE_GAP * abs(self.leading)

    @property
    def satisfies(self) -> bool:
        """True if the head meets the condition of the hyperplane theorem."""
        return self.positive and self.simple and self.alignment > 0


def spectra(heads: HeadMatrices) -> list[Spectrum]:
    """The spectrum of every head.

    V = (W_V W_O)^T has the eigenvalues of the small matrix (W_O W_V)^T, and zeros; W_O^T takes its eigenvectors to V's.
    """
    of_heads = []
    forms = heads.B
    for head in range(len(heads)):
        eigenvalues, vectors = torch.linalg.eig((heads.output[head] @ heads.value[head]).T)
        order = eigenvalues.abs().argsort(descending=True)
        eigenvalues, leading = eigenvalues[order], heads.output[head].T.to(vectors) @ vectors[:, order[0]]
        alignment = float("nan")
        if eigenvalues[0].imag == 0:
            phi = leading.real / leading.real.norm()
            alignment = heads.scale * float((phi @ heads.query[head]) @ (phi @ heads.key[head]))
        form = torch.linalg.eigvalsh(forms[head])
        of_heads.append(
            Spectrum(
                head=head,
                value=eigenvalues[eigenvalues.abs() > VALUE_FLOOR],
                form=form[form.abs() > FORM_FLOOR],
                alignment=alignment,
            )
        )
    return of_heads
