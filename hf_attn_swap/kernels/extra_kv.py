"""Holds pairs of a key and a value that stand beside the keys of the text, and puts them in front of those keys.

S' = [w q k'^T + b, S], so every query has N more keys; b is a number of the head, for pairs that have a score alone.
docs/mathematics.md, section Sinks. Axes: B batch, H head, G key/value head, Q query, K key, N pair, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Inputs
from ..functional.linear import without_autocast


@dataclass(kw_only=True)
class ExtraKV:
    """N pairs of a key and a value, the same for every row and every query.

    Attributes:
        key: (G,N,D), as after rotary embedding and norms of keys; or None for pairs that have a score alone.
        value: (G,N,D), or None for values of zeros.
        score: (H,N), the scores of pairs without a key, or None.
        share: (1,), the factor s of the exponentials of the scores; None for 1. Its logarithm is added to the scores
            after everything else, as a mask is.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
    share: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of pairs, N."""
        first = self.score if self.key is None else self.key
        assert first is not None, "pairs have a key or a score"
        return first.shape[1]

    def scores(self, inputs: Inputs) -> Tensor:
        """The scores of the pairs (B,H,Q,N), in fp32 at least."""
        query = inputs.query
        batch, heads, queries, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.key is None:
            assert self.score is not None
            scores = self.score.to(wide)[None, :, None, :].expand(batch, -1, queries, -1)
        else:
            key = self.key
            if not query.dtype == key.dtype == wide:  # a cast to the same dtype takes time, too
                query, key = query.to(wide), key.to(wide)
            with without_autocast(query.device):  # the heads of a group are rows of one product
                scores = query.reshape(batch, key.shape[0], -1, width) @ (key * inputs.scaling).mT
            scores = scores.view(batch, heads, queries, -1)
        return scores if self.share is None else scores + self.share.to(wide).log()

    def before(self, inputs: Inputs) -> Inputs:
        """The same inputs with the pairs in front of the keys of the text.

        A score without a key becomes one more dimension of queries and keys, in which the keys of the text are 0.
        """
        query, key, value = inputs.three
        batch, groups = key.shape[:2]
        if self.key is None:
            assert self.score is not None
            query = torch.cat([query, self._as_queries(inputs)], -1)
            own_key = F.pad(torch.eye(self.count, dtype=key.dtype, device=key.device), (key.shape[3], 0))
            own_key = own_key.expand(groups, -1, -1)
            key = F.pad(key, (0, self.count))
        else:
            own_key = repeated(self.key.to(key.dtype), groups)
        if self.value is None:
            own_value = value.new_zeros(groups, self.count, value.shape[3])
        else:
            own_value = repeated(self.value.to(value.dtype), groups)
        bias = inputs.position_bias
        return replace(
            inputs,
            query=query,
            key=torch.cat([own_key.expand(batch, -1, -1, -1), key], 2),
            value=torch.cat([own_value.expand(batch, -1, -1, -1), value], 2),
            masks=inputs.masks.with_extra_keys(self.count, self.share, query.dtype),
            position_bias=None if bias is None else F.pad(bias, (self.count, 0)),
            further=self.count,
        )

    def _as_queries(self, inputs: Inputs) -> Tensor:
        """The scores as dimensions of queries (B,H,Q,N), which the scale of q k^T brings to their size."""
        assert self.score is not None
        batch, _, queries, _ = inputs.query.shape
        numbers = (self.score / inputs.scaling).to(inputs.query.dtype)
        return numbers[None, :, None, :].expand(batch, -1, queries, -1)


def repeated(tensor_GND: Tensor, heads: int) -> Tensor:
    """Keys or values (G,N,D), repeated for each of `heads` heads of their group: (H,N,D)."""
    groups = heads // tensor_GND.shape[0]
    return tensor_GND if groups == 1 else tensor_GND.repeat_interleave(groups, 0)
