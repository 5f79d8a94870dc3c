"""The cache of linear attention: a state of constant size in place of every key and value seen so far.

S = sum_i k_i v_i^T and the count of real keys, per key/value head; decoding a token is then O(1) in the context.
`LinearState.of` puts the state in place of an empty `DynamicLayer` on the first call of a layer, so `generate()` and
`model(..., use_cache=True)` use a state without asking.
A sum cannot give back one of its summands. Assisted decoding takes tokens back, so the state also keeps the keys and
values of the last tokens: the tail, at least `CROPPED` and at most twice as many, less what was taken back since.
`base` are the sums before the tail, `full` the sums over everything.
Axes: B batch, G key/value head, L token, D head width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

CROPPED = 64  # how far behind the longest text so far `crop` can go: assisted decoding proposes fewer tokens
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Chunk:
    """Keys and values (B,G,L,D) of tokens in a row, and which of them are real, (B,L); None means all."""

    key: Tensor
    value: Tensor
    real: Tensor | None

    @property
    def length(self) -> int:
        """How many tokens, padding counted."""
        return self.key.shape[2]

    def part(self, start: int, stop: int) -> Chunk:
        """The tokens from `start` to `stop`, as views."""
        real = None if self.real is None else self.real[:, start:stop]
        return Chunk(self.key[:, :, start:stop], self.value[:, :, start:stop], real)

    def rows(self, choose: Rows) -> Chunk:
        """Other rows of the batch."""
        return Chunk(choose(self.key), choose(self.value), None if self.real is None else choose(self.real))

    def copy(self) -> Chunk:
        """The same tokens in memory of their own: a view would keep all of a long prompt alive."""
        return self.rows(torch.clone)

    @staticmethod
    def joined(chunks: list[Chunk]) -> Chunk:
        """Chunks in a row as one."""
        if len(chunks) == 1:
            return chunks[0]
        key, value = (
            torch.cat(parts, 2) for parts in zip(*((chunk.key, chunk.value) for chunk in chunks), strict=True)
        )
        if all(chunk.real is None for chunk in chunks):
            return Chunk(key, value, None)
        every = [chunk.key.new_ones(chunk.key.shape[0], chunk.length, dtype=torch.bool) for chunk in chunks]
        real = [ones if chunk.real is None else chunk.real for chunk, ones in zip(chunks, every, strict=True)]
        return Chunk(key, value, torch.cat(real, 1))


@dataclass(frozen=True)
class Sums:
    """What linear attention reads of the tokens before: sum k v^T (B,G,D,D) in fp32 at least, and how many they are.

    Attributes:
        state: None before the first token.
        seen: (B,), real keys.
        length: tokens, padding counted.
    """

    state: Tensor | None = None
    seen: Tensor | None = None
    length: int = 0

    def plus(self, chunk: Chunk) -> Sums:
        """The sums after these tokens."""
        key, value = chunk.key, chunk.value
        if chunk.real is None:
            count = key.new_full(key.shape[:1], chunk.length, dtype=torch.long)
        else:
            count = chunk.real.sum(-1)
            key = key.masked_fill(~chunk.real[:, None, :, None], 0)
        wide = torch.promote_types(key.dtype, torch.float32)
        with torch.autocast(key.device.type, enabled=False):  # autocast would round the product to half precision
            added = key.transpose(2, 3).to(wide) @ value.to(wide)
        if self.state is not None and self.seen is not None:
            added, count = self.state + added, self.seen + count
        return Sums(added, count, self.length + chunk.length)

    def rows(self, choose: Rows) -> Sums:
        """Other rows of the batch."""
        if self.state is None or self.seen is None:
            return self
        return Sums(choose(self.state), choose(self.seen), self.length)


class LinearState(CacheLayerMixin):
    """One layer's cache: the sums over all tokens, the sums before the tail, and the tail.

    `keys` and `values` stay None: nothing has the length of the context.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.full, self.base = Sums(), Sums()
        self.tail: list[Chunk] = []
        self._claim: weakref.ref[nn.Module] | None = None

    @classmethod
    def of(cls, cache: Any, layer: int, *, start: bool) -> LinearState | None:
        """This layer's state: the one that is there, or with `start` a new one in place of an empty dynamic layer."""
        layers: Any = getattr(cache, "layers", ())
        if layer >= len(layers):
            return None
        if start and type(layers[layer]) is DynamicLayer and not layers[layer].is_initialized:
            layers[layer] = cls()
        return layers[layer] if isinstance(layers[layer], cls) else None

    @property
    def length(self) -> int:
        """Tokens seen, padding counted."""
        return self.full.length

    @property
    def state_BGDD(self) -> Tensor | None:  # noqa: N802  # axis suffix, as in argument names
        """The sum of k v^T over all tokens, in fp32 at least."""
        return self.full.state

    @property
    def seen_B(self) -> Tensor | None:  # noqa: N802  # as above
        """Real keys."""
        return self.full.seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is held before the first `absorb`."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def claim(self, core: nn.Module) -> None:
        """Say which swapped attention module is about to call `update`.

        The claim is good for one `update`, and only while the module computes linear attention at full strength: an
        error between `claim` and `update` leaves the claim behind, and the next to call may be ordinary attention.
        """
        self._claim = weakref.ref(core)

    def _claimed(self) -> bool:
        core = None if self._claim is None else self._claim()
        self._claim = None
        swap: Any = getattr(core, "attn_swap", None)  # gone after `unpatch_model`; PEFT wraps it
        return swap is not None and swap.phase == "full" and swap.places().replacement is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give the tokens back, and only them; `absorb` follows once their mask is known.

        Raises:
            ValueError: the layer that calls is not the linear attention that filled this cache.
        """
        if not self._claimed():
            raise ValueError(
                "this cache holds states of linear attention, not keys and values; start a new cache after "
                "unpatch_model, set_strength or a swap of other variants."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def past(self, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What `simple_attention` takes, per query head."""
        state, seen = self.full.state, self.full.seen
        if state is None or seen is None:
            return None
        return state.repeat_interleave(heads // state.shape[1], 1), seen, seen.new_full((1,), self.length)

    def absorb(self, key_BGLD: Tensor, value_BGLD: Tensor, real_BL: Tensor | None) -> None:
        """Take a call's keys and values into the state; `real_BL` is False at padding.

        A few tokens join the tail as they are, without a copy. Of many, the last `CROPPED` are the new tail.
        """
        real = None if real_BL is None else real_BL.clone()  # a view would keep masks of the whole context alive
        chunk = Chunk(key_BGLD, value_BGLD, real)
        if chunk.length > CROPPED:
            many = chunk.length - CROPPED
            self.base = self.full = self.full.plus(chunk.part(0, many))
            self.tail = []
            chunk = chunk.part(many, chunk.length).copy()
        self.full = self.full.plus(chunk)
        self.tail.append(chunk)
        kept = self.full.length - self.base.length
        if kept > 2 * CROPPED:  # so rarely that a token costs the same on average
            whole = Chunk.joined(self.tail)
            self.base = self.base.plus(whole.part(0, kept - CROPPED))
            self.tail = [whole.part(kept - CROPPED, kept).copy()]

    def get_seq_length(self) -> int:
        """Tokens seen, padding counted."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a dynamic cache: layers beside this one may hold keys of the whole context."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]  # a cache layer without options

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -n tokens, or (older transformers) all behind the first n.

        Raises:
            ValueError: more tokens than the tail holds; it starts `CROPPED` or more tokens before the longest text.
        """
        remove = -tokens_to_remove if tokens_to_remove <= 0 else self.length - tokens_to_remove
        if remove <= 0:
            return
        if remove >= self.length:
            self.full, self.base, self.tail = Sums(), Sums(), []
            return
        kept = self.length - self.base.length - remove
        if kept < 0:
            raise ValueError(
                f"a state of linear attention cannot go back {remove} tokens; only to {CROPPED} before the longest "
                "text that it has seen. Keep a copy of the cache from before them, or use use_cache=False."
            )
        left = Chunk.joined(self.tail).part(0, kept)
        self.tail = [left] if kept else []
        self.full = self.base.plus(left) if kept else self.base

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search."""
        self._rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._rows(lambda rows: rows[indices])

    def _rows(self, choose: Rows) -> None:
        self.full, self.base = self.full.rows(choose), self.base.rows(choose)
        if self.tail:
            self.tail = [Chunk.joined(self.tail).rows(choose)]

    def offload(self) -> None:
        """A state is small and stays where it is."""

    def prefetch(self) -> None:
        """As `offload`."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle is claimed by nobody: a weak reference cannot be written to a file."""
        return {**self.__dict__, "_claim": None}
