"""Splits attention into blocks of scores that are small enough to be made one after the other.

A block has whole rows of scores. It spans queries of one group of heads if these fill it, else several groups, else
several sequences. So its products are large, and on a CPU a block stays in the processor's cache.
Rabe & Staats (2021). Axes: B batch, H head, G key/value head, Q query, K key, D head width, N = sequences x groups of a
block, R = rows of a block that share keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = {"cpu": 2**20}  # how many scores a block holds, by the type of device; on a CPU it should fit in the cache
OTHERWISE = 2**24  # for other devices, which want large products: 64 MB in fp32
ROWS = 64  # a block has at least so many rows: with fewer, the sums over queries would cost more than the products


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of scores.

    Attributes:
        batches, groups, heads, queries: the places of the block.
        seen: the number of keys that its last query sees by the causal order, and all keys without this order.
        causal: True in causal order: each query before the last sees one key less.
        number: the block's number among all blocks.
    """

    batches: slice
    groups: slice
    heads: slice
    queries: slice
    seen: int
    causal: bool
    number: int

    @property
    def index(self) -> tuple[slice, slice, slice]:
        """The block's place in a tensor (B,H,Q,...)."""
        return self.batches, self.heads, self.queries

    @property
    def corner(self) -> tuple[int, int, int]:
        """The block's first sequence, head and query."""
        return self.batches.start, self.heads.start, self.queries.start

    @property
    def shared(self) -> tuple[slice, slice]:
        """The place of the block's keys and values in a tensor (B,G,K,D)."""
        return self.batches, self.groups

    def flat(self, tensor: Tensor) -> Tensor:
        """(b,h,q,...), a part of a tensor of queries, as (N,R,...)."""
        products = tensor.shape[0] * (self.groups.stop - self.groups.start)
        return tensor.reshape(products, -1, tensor.shape[-1])

    def scores(self, query: Tensor, keys_NKD: Tensor, scaling: float) -> Tensor:
        """The scaled scores (b,h,q,seen) of the block.

        Args:
            query: (B,H,Q,D), of all blocks.
            keys_NKD: the block's keys in the dtype of the scores.
            scaling: the factor of q k^T.
        """
        queries = query[self.index].to(keys_NKD.dtype)
        base = keys_NKD.new_empty(1, 1, 1)
        keys = keys_NKD[:, : self.seen].transpose(1, 2)
        scores = torch.baddbmm(base, self.flat(queries), keys, beta=0, alpha=scaling)
        return scores.view(*queries.shape[:3], self.seen)

    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """The block's scores, in place, with the mask added; -inf where a query may not see a key.

        Args:
            scores: (b,h,q,seen).
            mask: of all blocks, broadcastable to (B,H,Q,K): bool, or numbers to add; or None.
        """
        if mask is not None:
            scores += _numbers(self._of(mask), scores.dtype)
        if self.causal:
            later = scores.new_full((scores.shape[2], scores.shape[2]), -torch.inf).triu_(1)
            scores[..., -later.shape[0] :] += later
        return scores

    def _of(self, mask: Tensor) -> Tensor:
        """The block's part of a mask. Axes of size 1, which all blocks share, stay."""
        mask = mask.expand(*[1] * (4 - mask.dim()), *mask.shape)
        places = (*self.index, slice(self.seen))
        return mask[tuple(slice(1) if size == 1 else place for size, place in zip(mask.shape, places, strict=True))]


def split(query: Tensor, key: Tensor, causal: bool) -> Iterator[Block]:
    """The blocks of query (B,H,Q,D) and key (B,G,K,D). Blocks with the same keys follow each other."""
    (batch, heads, queries), (groups, keys) = query.shape[:3], key.shape[1:3]
    share, room = heads // groups, SCORES.get(query.device.type, OTHERWISE)
    of_group = max(1, share * queries * keys)
    batch_step = max(1, room // (of_group * groups))
    group_step = min(groups, max(1, room // of_group))
    query_step = even(queries, max(ROWS, room // max(1, share * keys)))
    number = 0
    for b in range(0, batch, batch_step):
        for g in range(0, groups, group_step):
            last = min(g + group_step, groups)
            for start in range(0, queries, query_step):
                stop = min(start + query_step, queries)
                yield Block(
                    batches=slice(b, min(b + batch_step, batch)),
                    groups=slice(g, last),
                    heads=slice(g * share, last * share),
                    queries=slice(start, stop),
                    seen=stop + keys - queries if causal else keys,
                    causal=causal,
                    number=number,
                )
                number += 1


def even(total: int, most: int) -> int:
    """The size of equal steps through `total`, none above `most`."""
    return max(1, -(-total // max(1, -(-total // most))))


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to scores, -inf where it forbids a key."""
    if mask.dtype == torch.bool:
        return 1 - mask.to(dtype).reciprocal_()  # 1 - 1 or 1 - inf: far faster on a CPU than to fill by a bool mask
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
