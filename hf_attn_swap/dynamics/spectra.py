"""Eigenvalues of trained heads, and which heads the hyperplane theorem speaks of.

A head is a good triple if the eigenvalue of V with the largest modulus is real, positive and simple, and its
eigenvector phi has <Q phi, K phi> > 0. Geshkovski et al. (2023), theorem 5.2 and figure 10; SPEC 8.
Axes: H head, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import HeadMatrices

VALUE_FLOOR, FORM_FLOOR = 1e-4, 1e-6  # smaller ones are rounding: V and B have rank D at most 2 D
RELATIVE_GAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """One head.

    Attributes:
        head: counted from 0.
        value: eigenvalues of V_h above 1e-4 in modulus, the largest modulus first, complex.
        form: eigenvalues of B_h above 1e-6 in modulus, rising.
        alignment: <Q phi, K phi> with the unit eigenvector of the leading eigenvalue; NaN if that is complex.
    """

    head: int
    value: Tensor
    form: Tensor
    alignment: float

    @property
    def leading(self) -> complex:
        """The eigenvalue of V_h with the largest modulus; 0 if all are tiny."""
        return complex(self.value[0]) if len(self.value) else 0j

    @property
    def positive(self) -> bool:
        """True if it is real and positive."""
        return self.leading.imag == 0 and self.leading.real > 0

    @property
    def simple(self) -> bool:
        """True if no other eigenvalue has its modulus."""
        return len(self.value) == 1 or (
            len(self.value) > 1 and float(self.value[0].abs() - self.value[1].abs()) > RELATIVE_GAP * abs(self.leading)
        )

    @property
    def satisfies(self) -> bool:
        """True if the theorem's condition holds: a good triple."""
        return self.positive and self.simple and self.alignment > 0


def spectra(heads: HeadMatrices) -> list[Spectrum]:
    """The spectrum of every head."""
    found = []
    values, forms = heads.V, heads.B
    for head in range(len(heads)):
        eigenvalues, vectors = torch.linalg.eig(values[head])
        order = eigenvalues.abs().argsort(descending=True)
        eigenvalues, leading = eigenvalues[order], vectors[:, order[0]]
        alignment = float("nan")
        if eigenvalues[0].imag == 0:
            phi = leading.real / leading.real.norm()
            alignment = heads.scale * float((phi @ heads.query[head]) @ (phi @ heads.key[head]))
        form = torch.linalg.eigvalsh(forms[head])
        found.append(
            Spectrum(
                head=head,
                value=eigenvalues[eigenvalues.abs() > VALUE_FLOOR],
                form=form[form.abs() > FORM_FLOOR],
                alignment=alignment,
            )
        )
    return found
