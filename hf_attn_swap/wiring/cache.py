"""The cache of linear attention: a state of constant size in place of every key and value seen so far.

S = sum_i k_i v_i^T and the count of real keys, per key/value head; decoding a token is then O(1) in the context.
It takes the place of an empty `DynamicLayer` on the first call of a layer (`LinearState.of`), so `generate()`
and `model(..., use_cache=True)` have it without asking. Axes: B batch, G key/value head, L token, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

CROPPED = 64  # tokens of the last call that `crop` can take back: more than assisted decoding ever proposes


class LinearState(CacheLayerMixin):
    """One layer's cache: the state and count before the last call, and that call's own keys and values.

    `keys` and `values` stay None: there is nothing of the context's length to hold.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.length = 0  # tokens, padding counted
        self.state_BGDD: Tensor | None = None  # fp32 at least
        self.seen_B: Tensor | None = None  # real keys
        self.claimed = False  # the layer that calls next knows what a state is
        self._undo: tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None] | None = None

    @classmethod
    def of(cls, cache: Any, layer: int, *, start: bool) -> LinearState | None:
        """This layer's state: the one that is there, or with `start` a new one in place of an empty dynamic layer."""
        layers: Any = getattr(cache, "layers", ())
        if layer >= len(layers):
            return None
        if start and type(layers[layer]) is DynamicLayer and not layers[layer].is_initialized:
            layers[layer] = cls()
        return layers[layer] if isinstance(layers[layer], cls) else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is held before the first `absorb`."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give the tokens back, and only them; `absorb` follows once their mask is known.

        Raises:
            ValueError: the layer that calls is not the linear attention that filled this cache.
        """
        if not self.claimed:
            raise ValueError(
                "this cache holds states of linear attention, not keys and values; start a new cache after "
                "unpatch_model, set_strength or a swap of other variants."
            )
        self.claimed = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def past(self, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What `simple_attention` takes, per query head."""
        if self.state_BGDD is None or self.seen_B is None:
            return None
        repeated = self.state_BGDD.repeat_interleave(heads // self.state_BGDD.shape[1], 1)
        return repeated, self.seen_B, self.seen_B.new_tensor([self.length])

    def absorb(self, key_BGLD: Tensor, value_BGLD: Tensor, real_BL: Tensor | None) -> None:
        """Take a call's keys and values into the state; `real_BL` is False at padding."""
        few = key_BGLD.shape[2] <= CROPPED
        self._undo = (self.state_BGDD, self.seen_B, key_BGLD, value_BGLD, real_BL) if few else None
        if real_BL is not None:
            key_BGLD = key_BGLD.masked_fill(~real_BL[:, None, :, None], 0)
        wide = torch.promote_types(key_BGLD.dtype, torch.float32)
        added = key_BGLD.transpose(2, 3).to(wide) @ value_BGLD.to(wide)
        count = key_BGLD.new_full(key_BGLD.shape[:1], key_BGLD.shape[2], dtype=torch.long)
        count = count if real_BL is None else real_BL.sum(-1)
        self.length += key_BGLD.shape[2]
        self.state_BGDD = added if self.state_BGDD is None else self.state_BGDD + added
        self.seen_B = count if self.seen_B is None else self.seen_B + count

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
            ValueError: more than the last call brought, or than `CROPPED`: a state forgets its summands.
        """
        remove = -tokens_to_remove if tokens_to_remove <= 0 else self.length - tokens_to_remove
        if remove <= 0:
            return
        if self._undo is None or remove > self._undo[2].shape[2]:
            raise ValueError(
                f"a state of linear attention cannot go back {remove} tokens, only within its last call and at most "
                f"{CROPPED}; keep a copy of the cache, or use use_cache=False."
            )
        self.state_BGDD, self.seen_B, key, value, real = self._undo
        self.length -= key.shape[2]
        kept = key.shape[2] - remove
        self.absorb(key[:, :, :kept], value[:, :, :kept], None if real is None else real[:, :kept])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search."""
        self._rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._rows(lambda rows: rows[indices])

    def _rows(self, choose: Any) -> None:
        def chosen(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else choose(rows)

        self.state_BGDD, self.seen_B = chosen(self.state_BGDD), chosen(self.seen_B)
        if self._undo is not None:
            state, seen, key, value, real = self._undo
            self._undo = (chosen(state), chosen(seen), choose(key), choose(value), chosen(real))

    def offload(self) -> None:
        """It is small: it stays where it is."""

    def prefetch(self) -> None:
        """As `offload`."""
