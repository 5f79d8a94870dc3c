"""Changes scores by a function of a score and of its place, with the signature of FlexAttention's `score_mod`.

S' = (1 - s) S + s score_mod(S). Where `score_mod` hides a key by -inf, the exponential of its score is multiplied by
1 - s, as in a window. Dong et al. (2024), FlexAttention, section 3.1.
Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.call import Call, Inputs


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A `score_mod` in one call of one layer.

    Attributes:
        score_mod: from scores (B,H,Q,K) and the numbers of their sequences (B,1,1,1), heads (1,H,1,1), queries
            (1,1,Q,1) and keys (1,1,1,K) to scores.
        learned: the parameters that it reads, as far as they need a gradient.
        strength: a (1,) tensor between 0 and 1, or None for full strength.
        first_query, first_key: the numbers of the first query and of the first key in their text.
        further: the number of keys in front that are no keys of the text. Their scores stay.
    """

    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    learned: tuple[Tensor, ...]
    strength: Tensor | None
    first_query: int | Tensor
    first_key: int | Tensor
    further: int

    @staticmethod
    def of(
        score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
        parameters: Iterable[Tensor],
        inputs: Inputs,
        call: Call,
    ) -> Formula:
        """The formula in this call.

        A layer with a window of its own may have let the first keys of its text go.
        """
        before = inputs.masks.keys - inputs.further - inputs.masks.queries
        start = before if call.start is None else call.start
        gone = start - before
        return Formula(
            score_mod=score_mod,
            learned=tuple(parameter for parameter in parameters if parameter.requires_grad),
            strength=call.exact_strength if isinstance(call.exact_strength, Tensor) else None,
            first_query=start,
            first_key=gone.clamp_min(0) if isinstance(gone, Tensor) else max(gone, 0),
            further=inputs.further,
        )

    def __call__(self, scores_BHQK: Tensor, corner: tuple[int, int, int] = (0, 0, 0)) -> Tensor:
        """The changed scores, in memory of their own.

        Args:
            scores_BHQK: scaled scores before the mask; a block of them, or all.
            corner: the first sequence, head and query of the block.
        """
        text = scores_BHQK[..., self.further :]
        firsts = (corner[0], corner[1], corner[2] + self.first_query, self.first_key)
        places = []
        for axis, (first, size) in enumerate(zip(firsts, text.shape, strict=True)):
            place = torch.arange(size, dtype=torch.int, device=text.device) + first
            places.append(place.view([-1 if other == axis else 1 for other in range(4)]))
        changed = self.score_mod(text, *places).to(text.dtype, copy=True)
        if self.strength is not None:
            strength = self.strength.to(text.dtype)
            between = torch.lerp(text, changed, strength)
            changed = torch.where(changed == -torch.inf, text + torch.log1p(-strength), between)
        return changed if not self.further else torch.cat([scores_BHQK[..., : self.further], changed], -1)

    def gradients(self, scores_BHQK: Tensor, changed: Tensor, grad: Tensor) -> list[Tensor]:
        """The gradients of scores and of what is learned, from that of the changed scores.

        Args:
            scores_BHQK: what the formula was given, with `requires_grad`.
            changed: what the formula made of them, with its graph.
            grad: the gradient of `changed`.
        """
        of = [scores_BHQK, *self.learned]
        if not changed.requires_grad:  # the formula reads neither
            return [torch.zeros_like(tensor) for tensor in of]
        return list(torch.autograd.grad(changed, of, grad, materialize_grads=True))
