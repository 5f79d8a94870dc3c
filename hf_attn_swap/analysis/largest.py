"""The largest activation in the output of a layer, and the token that carries it.

A pretrained language model often has a token whose activations are a thousand times as large as all others, because
attention that wants nothing rests on it. Sun et al. (2024), massive activations. Axes: B batch, L token, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Largest:
    """The largest absolute value in the output of one layer.

    Attributes:
        value: the absolute value.
        place: the place of its token among the real tokens of its row, from 0; -1 before the first pass.
        token: the id of the token; None if the model reads no ids.
    """

    value: float = 0.0
    place: int = -1
    token: int | None = None

    def or_larger(self, states_BLE: Tensor, real_BL: Tensor, ids_BL: Tensor | None) -> Largest:
        """The larger of this activation and the largest of a pass.

        Args:
            states_BLE: the output of the layer.
            real_BL: True for real tokens.
            ids_BL: the ids of the tokens; they are left out if they do not belong to these states.
        """
        tops_BL = states_BLE.detach().abs().amax(-1).masked_fill(~real_BL, 0.0)
        row, column = divmod(int(tops_BL.argmax()), tops_BL.shape[1])
        value = float(tops_BL[row, column])
        if value <= self.value:
            return self
        known = ids_BL is not None and ids_BL.shape == tops_BL.shape
        token = int(ids_BL[row, column]) if known and ids_BL is not None else None
        return Largest(value, int(real_BL[row, :column].sum()), token)

    def of(self, words: Mapping[int, str]) -> str:
        """The value and its token in words: "25,600, token 0 'The'"."""
        name = "" if self.token is None else f" {words.get(self.token, self.token)!r}"
        value = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{value}, token {self.place}{name}"
