"""Computes attention in a window: by a mask of queries and keys, or block after block of queries without such a mask.

A query i sees a key j that it may see anyway, if |i - j| < w, or if j is among the first keys that it may see. A block
of b queries needs b + w - 1 keys beside these first keys (twice as many more without causal order). The blocks become
rows of a batch, so that time and memory grow with L x w, and any form of attention computes all of them in one call.
Longformer (Beltagy et al., 2020), section 3.1; StreamingLLM (Xiao et al., 2024), section 3.2.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, N block, R query of a block, C key of a block,
F first key (sink).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .. import functional
from ..core.call import Call, Inputs
from ..core.masks import Masks, compiling

ROWS = 64  # a block has at least so many queries: with fewer, each key would be copied too often


class Span(NamedTuple):
    """How far a query sees.

    Attributes:
        window: keys at a distance below this number are seen, w.
        sinks: so many of the first keys that the query may see are seen as well.
        full: for each key/value head of the layer, True if its queries see every key; empty if all have the window.
    """

    window: int
    sinks: int
    full: tuple[bool, ...] = ()

    @property
    def alone(self) -> Span:
        """The same window in every head."""
        return self._replace(full=()) if self.full else self

    def full_of(self, heads: int) -> tuple[bool, ...]:
        """For each of so many heads, True if its queries see every key: query heads, or key/value heads (repeated).

        Raises:
            ValueError: a key/value head of the layer is none, or several, of these heads in part.
        """
        if heads % len(self.full):
            raise ValueError(
                f"window: full_heads counts {len(self.full)} key/value heads, but the module computes with {heads}; "
                "use a window without full_heads in this layer."
            )
        return tuple(full for full in self.full for _ in range(heads // len(self.full)))


@dataclass(frozen=True)
class Firsts:
    """The first keys of each text.

    Attributes:
        place: (B|1,F), their places among the keys; any place where `there` is False.
        there: (B|1,F) bool, False where a text has fewer real keys.
    """

    place: Tensor
    there: Tensor

    @staticmethod
    def of(masks: Masks, count: int) -> Firsts:
        """The first `count` keys that a mask of keys shows, or all keys if there is none."""
        places = torch.arange(min(count, masks.keys), device=masks.device)[None]
        if masks.key_mask is None:
            return Firsts(places, torch.ones_like(places, dtype=torch.bool))
        rank = masks.key_mask.cumsum(-1)
        wanted = (places + 1).expand(rank.shape[0], -1).contiguous()
        place = torch.searchsorted(rank, wanted)
        return Firsts(place.clamp(max=masks.keys - 1), place < masks.keys)

    def of_keys(self, tensor_BGKD: Tensor) -> Tensor:
        """The rows of keys or values at these places, (B,G,F,D)."""
        batch, groups, _, width = tensor_BGKD.shape
        index = self.place[:, None, :, None].expand(batch, groups, -1, width)
        return tensor_BGKD.gather(2, index)


@dataclass(frozen=True)
class Held:
    """What a cache holds of a text instead of all its keys, beside its last ones.

    Attributes:
        before: the number of keys in front of the last ones.
        key, value: (B,G,F,D), of the first keys of the text, as far as they are among those `before`.
        all_first: True if all first keys of the text are among those `before`.
    """

    before: int = 0
    key: Tensor | None = None
    value: Tensor | None = None
    all_first: bool = False

    def first(self, firsts: Firsts, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The first keys of the text and their values (B,G,F,D); key and value (B,G,K,D) are the last ones."""
        if self.key is None or self.value is None:
            return firsts.of_keys(key), firsts.of_keys(value)
        if self.all_first:
            return self.key, self.value
        later = Firsts((firsts.place - self.before).clamp_min(0), firsts.there)
        early = (firsts.place < self.before)[:, None, :, None]
        return torch.where(early, self.key, later.of_keys(key)), torch.where(early, self.value, later.of_keys(value))

    def without(self, count: int, firsts: Firsts | None, key: Tensor, value: Tensor) -> Held:
        """What is held after the first `count` of the last keys, key and value (B,G,K,D), are let go."""
        before = self.before + count
        if firsts is None:
            return Held(before)
        return Held(before, *self.first(firsts, key, value), bool((firsts.there & (firsts.place < before)).all()))


def narrowed(inputs: Inputs, span: Span, call: Call) -> Inputs:
    """The same inputs with the window in their mask of queries and keys, at the strength of the call.

    At full strength the mask hides what is outside of the window. Below, log(1 - s) is added there.
    """
    masks = inputs.masks
    if not compiling() and masks.keys <= span.window:
        return inputs
    start, share = call.start, call.exact_strength
    first = masks.keys - masks.queries  # with a static cache, the places for later tokens are keys, too
    if isinstance(start, Tensor):
        outside = _outside(masks, span, start.clamp(max=first))
    else:
        first = first if start is None else min(start, first)
        outside = masks.once(("outside", span.alone, first), lambda: _outside(masks, span, first))
    if span.full:
        outside = _except(span.full_of(inputs.query.shape[1]), outside)
    if isinstance(share, Tensor):
        given = _added(masks, outside, share, inputs.query.dtype)
    elif isinstance(start, Tensor) or span.full:
        given = _hidden(masks, outside)
    else:
        given = masks.once(("window", span, first), lambda: _hidden(masks, outside))
    made = [] if span.full else masks.made  # a mask per head is large, and no other layer has the same
    return replace(inputs, masks=replace(masks, key_mask=None, given=given, causal=False, made=made))


def _outside(masks: Masks, span: Span, first: int | Tensor) -> Tensor:
    """(B|1,1|H,Q,K) bool, True where a key is outside of the window of a query. `first` is the first query's place."""
    places = torch.arange(masks.queries, device=masks.device) + first
    if masks.given is not None:
        shown = masks.closed().allowed()
    elif masks.key_mask is not None:
        shown = masks.key_mask[:, None, None, :]  # causal order hides the last keys, and so none of the first
    else:
        shown = None
    return functional.outside_window(places, masks.keys, shown, span.window, span.sinks)


def _except(full: Sequence[bool], outside: Tensor) -> Tensor:
    """(B|1,H,Q,K) bool, as `outside` (B|1,1|H,Q,K), but nothing is outside in the heads that are full."""
    outside_by_head, inside = outside.unbind(1), torch.zeros_like(outside[:, 0])
    return torch.stack(
        [inside if all_keys else outside_by_head[head % len(outside_by_head)] for head, all_keys in enumerate(full)], 1
    )


def _hidden(masks: Masks, outside: Tensor) -> Tensor:
    """The mask that hides these places too: bool, or numbers to add if the mask holds numbers."""
    if masks.given is not None and masks.given.dtype != torch.bool:
        return masks.given.masked_fill(outside, torch.finfo(masks.given.dtype).min)
    allowed = masks.allowed()
    return ~outside if allowed is None else allowed & ~outside


def _added(masks: Masks, outside: Tensor, strength: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers, with log(1 - s) added at these places."""
    share = torch.log1p(-strength.to(torch.promote_types(dtype, torch.float32))).to(dtype)
    numbers = masks.numbers(dtype)
    allowed = masks.allowed()
    moved = outside if allowed is None else outside & allowed
    return torch.where(moved, numbers + share, numbers)


def fits(inputs: Inputs, call: Call) -> bool:
    """True if blocks can compute these inputs: no mask of queries and keys, and the queries are the last keys."""
    masks = inputs.masks
    if masks.given is not None or masks.keys < masks.queries:
        return False
    last = isinstance(call.start, int) and call.start >= masks.keys - masks.queries
    return masks.keys == masks.queries or (last and (masks.causal or masks.queries == 1))


@dataclass(frozen=True)
class Blocks:
    """The sizes of blocks of queries and of their keys.

    Attributes:
        queries, keys: the numbers of queries and keys of the text, Q and K. The queries are the last keys.
        causal: True in causal order; otherwise a query sees keys on both sides.
        reach: the number of keys before the first query of a block, w - 1.
        rows: the number of queries of a block, R.
    """

    queries: int
    keys: int
    causal: bool
    reach: int
    rows: int

    @staticmethod
    def of(masks: Masks, span: Span) -> Blocks:
        """Blocks in which a key is copied about three times at most."""
        rows = min(masks.queries, max(ROWS, -(-span.window // 2)))
        return Blocks(masks.queries, masks.keys, masks.causal or masks.queries == 1, span.window - 1, rows)

    @property
    def count(self) -> int:
        """The number of blocks, N."""
        return -(-self.queries // self.rows)

    @property
    def width(self) -> int:
        """The number of keys of a block, C, without the first keys of the text."""
        return self.rows + self.reach * (1 if self.causal else 2)

    def of_queries(self, query_BHQD: Tensor) -> Tensor:
        """The queries by block: (B,H,N,R,D). The last block is filled up with zeros."""
        missing = self.count * self.rows - self.queries
        filled = F.pad(query_BHQD, (0, 0, 0, missing)) if missing else query_BHQD
        return filled.reshape(*filled.shape[:2], self.count, self.rows, -1)

    def of_keys(self, tensor_BGKD: Tensor, before: int) -> Tensor:
        """The keys or the values near the queries of each block: (B,G,N,C,D). Places outside of the text are zeros.

        Args:
            tensor_BGKD: (B,G,K - before,D), the last keys or values.
            before: the number of keys in front of them, none of which is near a query.
        """
        first = self.keys - self.queries - self.reach
        near = tensor_BGKD[:, :, max(first, 0) - before :]
        missing, wanted = max(-first, 0), (self.count - 1) * self.rows + self.width
        if near.shape[2] < wanted:
            near = F.pad(near, (0, 0, missing, wanted - near.shape[2] - missing))
        return near.unfold(2, self.width, self.rows).transpose(3, 4)

    def seen(self, masks: Masks, firsts: Firsts | None, window: int) -> Tensor:
        """(B|1,N,R,F + C) bool, True where a query of a block sees a key of the block; the first keys come first."""
        device = masks.device
        block = torch.arange(self.count, device=device)[:, None, None] * self.rows + (self.keys - self.queries)
        query_place = block + torch.arange(self.rows, device=device)[:, None]  # (N,R,1)
        key_place = block - self.reach + torch.arange(self.width, device=device)  # (N,1,C)
        near = (query_place - key_place < window) & (key_place >= 0) & (key_place < self.keys)
        near &= query_place >= key_place if self.causal else key_place - query_place < window
        near = near[None]
        if masks.key_mask is not None:
            near = near & masks.key_mask[:, key_place.clamp(0, self.keys - 1)]
        if firsts is not None:
            distance = query_place[None] - firsts.place[:, None, None, :]
            far = (distance >= window) | (False if self.causal else distance <= -window)
            far = far & firsts.there[:, None, None, :]
            batch = max(near.shape[0], far.shape[0])
            near = torch.cat([far.expand(batch, -1, -1, -1), near.expand(batch, -1, -1, -1)], -1)
        return near | (
            query_place[None] >= self.keys
        )  # a query that fills a block up sees anything, and nobody reads it


def firsts_of(masks: Masks, span: Span) -> Firsts | None:
    """The first keys of each text that the span shows; None if it shows none."""
    if not span.sinks:
        return None
    firsts: Firsts = masks.once(("firsts", span.sinks), lambda: Firsts.of(masks, span.sinks))
    return firsts


def next_token(inputs: Inputs, span: Span, held: Held) -> Inputs | None:
    """The keys that the next token of a long text without padding sees, without a mask; None for any other call.

    The arguments are those of `attend`.
    """
    masks, all_keys = inputs.masks, (inputs.key, inputs.value)
    if masks.queries > 1 or masks.key_mask is not None or masks.keys < span.window + span.sinks:
        return None
    key, value = [tensor[:, :, -span.window :] for tensor in all_keys]
    if (firsts := firsts_of(masks, span)) is not None:
        key, value = [torch.cat(parts, 2) for parts in zip(held.first(firsts, *all_keys), (key, value), strict=True)]
    masks = Masks(queries=1, keys=key.shape[2], device=masks.device)
    return Inputs(**{**vars(inputs), "key": key, "value": value, "masks": masks})


def _blocked(inputs: Inputs, span: Span, held: Held) -> tuple[Blocks, Tensor, Tensor, Tensor, Tensor]:
    """The blocks; their queries (B,N,H,R,D), keys and values (B,N,G,F + C,D), and what they see, as `Blocks.seen`."""
    masks = inputs.masks
    blocks, firsts = Blocks.of(masks, span), firsts_of(masks, span)
    seen = masks.once(("blocks", blocks, span), lambda: blocks.seen(masks, firsts, span.window))
    near = [blocks.of_keys(tensor, held.before).transpose(1, 2) for tensor in (inputs.key, inputs.value)]
    if firsts is not None:
        first = held.first(firsts, inputs.key, inputs.value)
        near = [
            torch.cat([sink[:, None].expand(-1, blocks.count, -1, -1, -1), close], 3)
            for sink, close in zip(first, near, strict=True)
        ]
    return blocks, blocks.of_queries(inputs.query).transpose(1, 2), near[0], near[1], seen


ALL = Held()


def attend(inputs: Inputs, span: Span, held: Held = ALL) -> Tensor:
    """Compute ordinary attention in a window, in blocks: the heads (B,Q,H,D).

    The blocks hold each key about three times, and their mask in the dtype of the numbers. A backward pass makes them
    again: to keep them would take more memory than ordinary attention takes.

    Args:
        inputs: the tensors and the masks, for which `fits` is True. With `held`, key and value are the last ones, and
            the masks are those of all keys.
        span: how far a query sees.
        held: what a cache holds of the earlier keys.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs.three):
        return _attended(inputs, span, held)
    kernels = _allowed_kernels()  # each later computation must choose among the same ones

    def heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(kernels):
            return _attended(replace(inputs, query=query, key=key, value=value), span, held)

    read: Tensor = checkpoint(heads, *inputs.three, use_reentrant=False, preserve_rng_state=inputs.dropout > 0)
    return read


def _allowed_kernels() -> list[SDPBackend]:
    """The kernels of SDPA that are allowed now."""
    backends = torch.backends.cuda
    allowed = {
        SDPBackend.FLASH_ATTENTION: backends.flash_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
        SDPBackend.EFFICIENT_ATTENTION: backends.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
        SDPBackend.CUDNN_ATTENTION: backends.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
        SDPBackend.MATH: backends.math_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
    }
    return [kernel for kernel, may in allowed.items() if may]


def _attended(inputs: Inputs, span: Span, held: Held) -> Tensor:
    """As `attend`."""
    blocks, query, key, value, seen = _blocked(inputs, span, held)
    batch, _, heads, rows, width = query.shape
    groups = key.shape[2]
    share = heads // groups
    # The heads of a group are rows of one block, so that no key is copied for each of them.
    query = query.reshape(-1, groups, share * rows, width)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    mask = _per_row(seen, batch)[:, None, None].expand(-1, 1, share, -1, -1).flatten(2, 3)
    read = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=inputs.dropout, scale=inputs.scaling
    )
    read = read.view(batch, blocks.count, heads, rows, -1).transpose(2, 3)
    return read.flatten(1, 2)[:, : blocks.queries]


def folded(inputs: Inputs, span: Span, held: Held = ALL) -> tuple[Blocks, Inputs]:
    """The blocks as rows of a batch, for any form of attention: B * N rows of R queries and F + C keys.

    The arguments are those of `attend`.
    """
    blocks, query, key, value, seen = _blocked(inputs, span, held)
    masks, batch = inputs.masks, query.shape[0]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    given = masks.once(("folded", blocks, span, batch), lambda: _per_row(seen, batch)[:, None])
    masks = Masks(queries=blocks.rows, keys=key.shape[2], device=masks.device, given=given, made=masks.made)
    return blocks, replace(inputs, query=query, key=key, value=value, masks=masks)


def unfolded(blocks: Blocks, heads: Tensor) -> Tensor:
    """The heads of the text (B,Q,H,D), from those of the blocks (B * N,R,H,D)."""
    joined = heads.reshape(-1, blocks.count * blocks.rows, *heads.shape[2:])
    return joined[:, : blocks.queries]


def _per_row(seen: Tensor, batch: int) -> Tensor:
    """(B * N,R,C) from (B|1,N,R,C)."""
    return seen.expand(batch, -1, -1, -1).flatten(0, 1)


def parted(inputs: Inputs, span: Span) -> tuple[Inputs, Inputs]:
    """The inputs of the heads that see every key, and those of the heads in the window; each keeps its order."""
    flags = [span.full_of(tensor.shape[1]) for tensor in inputs.three]

    def of(wanted: bool) -> Inputs:
        query, key, value = (
            torch.stack([head for head, full in zip(tensor.unbind(1), sees_all, strict=True) if full is wanted], 1)
            for tensor, sees_all in zip(inputs.three, flags, strict=True)
        )
        return replace(inputs, query=query, key=key, value=value)

    return of(True), of(False)


def united(span: Span, whole_BQHD: Tensor, near_BQHD: Tensor) -> Tensor:
    """The heads of a layer (B,Q,H,D) in their order, from those that see every key and those in the window."""
    whole, near = iter(whole_BQHD.unbind(2)), iter(near_BQHD.unbind(2))
    count = whole_BQHD.shape[2] + near_BQHD.shape[2]
    return torch.stack([next(whole if full else near) for full in span.full_of(count)], 2)
