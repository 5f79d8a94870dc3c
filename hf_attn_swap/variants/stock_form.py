"""Says how attention classes of transformers compute a variant: by a window of the layer, and by sinks of its heads.

A sink is one more key whose score does not depend on the query, with a value. Classes that call it `sinks` have a score
per head and a value of zeros; with weights w of the text's keys and w_0 of the sink, sum_j w_j v_j + w_0 u =
sum_j w_j (v_j - u) + u, so a value u goes into the biases of the value and the output projections.
docs/mathematics.md, section Sinks. Axes: H head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StockForm:
    """What an attention layer of transformers has beside ordinary attention.

    Attributes:
        window: the number of last keys that a query sees; None if it sees all.
        score: the score of the sink (H,), or None if there is no sink.
        value: the value of the sink (H,D), or None for zeros.
    """

    window: int | None = None
    score: Tensor | None = None
    value: Tensor | None = None

    def with_sink_of(self, other: StockForm) -> StockForm:
        """This form with the sink of another form beside its own: two constant scores of one head are one score."""
        if self.score is None or other.score is None:
            form = other if self.score is None else self
            return StockForm(window=self.window, score=form.score, value=form.value)
        scores = torch.stack([self.score, other.score]).double()
        value = None
        if self.value is not None or other.value is not None:
            shares = scores.softmax(0)[..., None]
            parts = [
                share * given.double()
                for share, given in zip(shares, (self.value, other.value), strict=True)
                if given is not None
            ]
            value = sum(parts[1:], parts[0])
        return StockForm(window=self.window, score=scores.logsumexp(0), value=value)
