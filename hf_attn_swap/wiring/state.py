"""Puts cache layers of this package instead of the keys and values of a layer of transformers' cache.

`State.of` puts a state instead of an empty `DynamicLayer` on the first call of a layer, so that `generate()` and
`model(..., use_cache=True)` use the state by themselves.
Axes: B batch, G key/value head, L token, K key, D head width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

CROPPED = 64  # how many tokens `crop` can take back at least; assisted decoding proposes fewer tokens than that
Rows = Callable[[Tensor], Tensor]
S = TypeVar("S", bound="State")


class State(CacheLayerMixin):
    """The base class of cache layers that hold something else than all keys and values.

    `keys` and `values` of the base class hold no tokens, because a state holds no tensor as long as the context.

    Attributes:
        holds: what the state holds, for errors.
        visible: (B,K) bool, False at padding among all tokens so far; None means no padding. All layers of a pass share
            this tensor.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    holds: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.visible: Tensor | None = None
        self._claim: weakref.ref[nn.Module] | None = None
        self._place: tuple[weakref.ref[Any], int] | None = None  # the cache that this state was put into, and where
        self._given: tuple[Tensor, Tensor] | None = None  # keys and values between `update` and `absorb`

    @classmethod
    def of(cls: type[S], cache: Any, layer: int, *, start: bool, **how: Any) -> S | None:
        """The state of one layer in a cache, or None.

        Args:
            cache: a cache of transformers.
            layer: the number of the layer in the cache.
            start: put a new state in place of an empty `DynamicLayer`. Without `start`, only a state that is already
                in the cache is returned.
            how: the arguments of a new state.
        """
        layers: Any = getattr(cache, "layers", ())
        if layer >= len(layers):
            return None
        if start and type(layers[layer]) is DynamicLayer and not layers[layer].is_initialized:
            layers[layer] = cls(**how)
            layers[layer]._place = weakref.ref(cache), layer
        return layers[layer] if isinstance(layers[layer], cls) else None

    @property
    def length(self) -> int:
        """The number of tokens so far, padding included."""
        raise NotImplementedError

    def belongs_to(self, swap: Any) -> bool:
        """True if this swap reads such a state at full strength."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the dtype and the device, and hold keys and values of no tokens: some models look at their sizes."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        batch, groups = key_states.shape[:2]
        self.keys = key_states.new_empty(batch, groups, 0, key_states.shape[3])
        self.values = value_states.new_empty(batch, groups, 0, value_states.shape[3])

    def claim(self, core: nn.Module) -> None:
        """Note which swapped attention module is about to call `update`.

        A claim is good for one `update`, and only while the module computes what reads the state. An
        error between `claim` and `update` leaves the claim in place, and the next caller of `update` may be ordinary
        attention; the second condition refuses this caller.
        """
        self._claim = weakref.ref(core)

    def _claimed(self) -> bool:
        core = None if self._claim is None else self._claim()
        self._claim = None
        swap: Any = getattr(core, "attn_swap", None)  # absent after `unpatch_model`; under PEFT, a wrapper of the swap
        return swap is not None and swap.phase == "full" and self.belongs_to(swap)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the current tokens, without any earlier tokens.

        The attention function calls `absorb` later, when the mask of the tokens is known.

        Raises:
            ValueError: the caller is not the attention that filled this cache.
        """
        if not self._claimed():
            raise ValueError(
                f"this cache holds {self.holds}; start a new cache after unpatch_model, set_strength or a swap of "
                "other variants."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._given = None if self.length else (key_states, value_states)
        return key_states, value_states

    def give_up(self) -> bool:
        """Put ordinary keys and values in place of this state, if it has absorbed no token yet; True if it could.

        The first call of a layer may turn out to need each key: its mask hides single keys from single queries.
        """
        cache = None if self._place is None else self._place[0]()
        if cache is None or self._place is None or self._given is None or self.length:
            return False
        cache.layers[self._place[1]] = DynamicLayer()
        cache.layers[self._place[1]].update(*self._given)
        self._given = None
        return True

    def remembers(self, key_mask_BK: Tensor | None) -> bool:
        """True if a mask of keys hides just those earlier tokens that were padding when this state absorbed them.

        Args:
            key_mask_BK: (B,K) bool, True at tokens that may be seen, for the earlier and the current tokens; None means
                that all may be seen.
        """
        if key_mask_BK is None:
            return self.visible is None or bool(self.visible.all())
        earlier = key_mask_BK[:, : self.length]
        return bool(earlier.all()) if self.visible is None else torch.equal(earlier, self.visible)

    def get_seq_length(self) -> int:
        """The number of tokens so far, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and the offset of the mask, as for a dynamic cache.

        Other layers of the same cache may hold the keys of the whole context, and all layers share one mask.
        """
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1, which means that there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name of this method in older transformers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of the batch into the order that beam search chose; `beam_idx` (B,)."""
        self._rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        self._rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._rows(lambda rows: rows[indices])

    def cannot_go_back(self, tokens: int) -> ValueError:
        """The error of `crop` if so many tokens cannot be taken back."""
        return ValueError(
            f"a cache of {self.holds} cannot go back {tokens} tokens; only to {CROPPED} before the end of the longest "
            "text so far. Assisted generation must propose fewer tokens at once: generate with "
            f"prompt_lookup_num_tokens={CROPPED} at most, or set num_assistant_tokens={CROPPED} at most in the "
            "assistant's generation_config. Otherwise keep a copy of the cache from before these tokens, or use "
            "use_cache=False."
        )

    def _rows(self, choose: Rows) -> None:
        """Take other rows of the batch. `choose` maps a tensor to the tensor with the new rows."""
        self.visible = None if self.visible is None else choose(self.visible)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = choose(self.keys), choose(self.values)

    def offload(self) -> None:
        """Do nothing: a state is small and stays on its device."""

    def prefetch(self) -> None:
        """Do nothing, as `offload` moved nothing."""

    def __getstate__(self) -> dict[str, Any]:
        """The content of a copy or a pickle, without the claim and the place: a file cannot hold weak references."""
        return {**self.__dict__, "_claim": None, "_place": None, "_given": None}


def removed(tokens_to_remove: int, length: int) -> int:
    """How many of the last tokens `crop` must take back, at most all.

    Args:
        tokens_to_remove: a number -n takes back the last n tokens. A number n above 0 keeps the first n tokens and
            takes back all others, as older versions of transformers ask for.
        length: the number of tokens so far.
    """
    return min(-tokens_to_remove if tokens_to_remove <= 0 else length - tokens_to_remove, length)
