"""Caches linear attention: a state of constant size in place of all keys and values.

The state is S = sum_i k_i v_i^T and the count of real keys, for each key/value head. Decoding one token then takes
time and memory that do not grow with the context.
Without gradients, a token is added to the sums in place, so that no token copies them.
Assisted decoding takes tokens back, but a token cannot be taken out of a sum again. The state therefore also keeps the
keys and values of the last tokens. These tokens are the tail. The tail has at least `CROPPED` and at most twice as many
tokens, less the tokens that were taken back. `base` holds the sums over the tokens before the tail, and `full` holds
the sums over all tokens.
docs/mathematics.md, section SimpleTRON; Katharopoulos et al. (2020) for the state.
Axes: B batch, G key/value head, L token, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..functional.linear import without_autocast
from .implementations import NAME
from .state import CROPPED, Rows, State, removed


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens.

    Attributes:
        key, value: (B,G,L,D).
        real: (B,L) bool, True at real tokens and False at padding. None means that all tokens are real.
    """

    key: Tensor
    value: Tensor
    real: Tensor | None

    @property
    def length(self) -> int:
        """The number of tokens, padding included."""
        return self.key.shape[2]

    def part(self, start: int, stop: int) -> Chunk:
        """The tokens from `start` up to, but not including, `stop`. The result shares memory with this chunk."""
        real = None if self.real is None else self.real[:, start:stop]
        return Chunk(self.key[:, :, start:stop], self.value[:, :, start:stop], real)

    def rows(self, choose: Rows) -> Chunk:
        """The same tokens of other rows of the batch. `choose` maps a tensor to the tensor with the new rows."""
        real = None if self.real is None else choose(self.real)
        return Chunk(choose(self.key), choose(self.value), real)

    def copy(self) -> Chunk:
        """The same tokens in memory of their own. A part of a chunk would keep the memory of a long prompt."""
        return self.rows(torch.clone)

    def real_tokens(self) -> Tensor:
        """(B,L) bool, True at real tokens."""
        if self.real is not None:
            return self.real
        return self.key.new_ones(self.key.shape[0], self.length, dtype=torch.bool)

    @staticmethod
    def joined(chunks: list[Chunk]) -> Chunk:
        """Chunks that follow each other, as one chunk."""
        if len(chunks) == 1:
            return chunks[0]
        key = torch.cat([chunk.key for chunk in chunks], 2)
        value = torch.cat([chunk.value for chunk in chunks], 2)
        if all(chunk.real is None for chunk in chunks):
            return Chunk(key, value, None)
        return Chunk(key, value, torch.cat([chunk.real_tokens() for chunk in chunks], 1))


@dataclass(frozen=True)
class Sums:
    """The sums over earlier tokens that linear attention needs.

    Attributes:
        state: the sum of k v^T (B,G,D,D), in fp32 at least; None before the first token.
        seen: the number of real keys (B,); None before the first token.
        length: the number of tokens, padding included.
    """

    state: Tensor | None = None
    seen: Tensor | None = None
    length: int = 0

    def plus(self, chunk: Chunk, *, in_place: bool = False) -> Sums:
        """The sums after the tokens of this chunk were added. With `in_place`, the tensors of these sums change."""
        key, value = chunk.key, chunk.value
        if chunk.real is None:
            count = key.new_full(key.shape[:1], chunk.length, dtype=torch.long)
        else:
            count = chunk.real.sum(-1)
            key = key.masked_fill(~chunk.real[:, None, :, None], 0)
        wide = torch.promote_types(key.dtype, torch.float32)
        key, value = key.transpose(2, 3).to(wide), value.to(wide)
        length = self.length + chunk.length
        with without_autocast(key.device):
            if self.state is None or self.seen is None:
                return Sums(key @ value, count, length)
            if not in_place:
                return Sums(self.state + key @ value, self.seen + count, length)
            flat = self.state.view(-1, *self.state.shape[2:])
            flat.baddbmm_(key.flatten(0, 1), value.flatten(0, 1))
            return Sums(self.state, self.seen.add_(count), length)

    def rows(self, choose: Rows) -> Sums:
        """The sums of other rows of the batch. `choose` maps a tensor to the tensor with the new rows."""
        if self.state is None or self.seen is None:
            return self
        return Sums(choose(self.state), choose(self.seen), self.length)


def cache_of(args: Any, kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of an attention module, whatever its name: a `Cache`, or what has its methods.

    Raises:
        ValueError: the cache is paged: it takes keys and values, but has no length of one text.
    """
    for value in (*kwargs.values(), *args):
        if isinstance(value, Cache):
            return value
        if value is None or isinstance(value, (Tensor, tuple, Mapping)) or not hasattr(value, "update"):
            continue
        if not hasattr(value, "get_seq_length"):
            raise ValueError(
                f"{NAME} cannot swap attention with a paged cache (continuous batching, {type(value).__name__}); "
                "use the stock attention for this model."
            )
        return value
    return None


def keep_all_keys(cache: Any) -> None:
    """Let the sliding layers of an empty cache keep all keys, as the other layers do.

    Scores that are carried from a layer with all keys to a layer with a window must be of the same keys. The mask still
    hides what lies outside of a window.
    """
    layers: Any = getattr(cache, "layers", ())
    if len({type(layer) for layer in layers}) == 1 or any(getattr(layer, "is_initialized", False) for layer in layers):
        return
    for place, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            layers[place] = DynamicLayer()


class LinearState(State):
    """The cache of one layer: the sums over all tokens, the sums over the tokens before the tail, and the tail."""

    holds = "states of linear attention, not keys and values"

    def __init__(self) -> None:
        super().__init__()
        self.full, self.base = Sums(), Sums()
        self.tail: list[Chunk] = []
        self._alone = False  # True if nothing but `full` holds the tensors of `full`

    @property
    def length(self) -> int:
        """The number of tokens so far, padding included."""
        return self.full.length

    def belongs_to(self, swap: Any) -> bool:
        """True for linear attention."""
        return bool(swap.replaces)

    def past(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The sums over all tokens so far, as `simple_attention` takes them. The next `absorb` may change them.

        Returns:
            The sum of k v^T (B,G,D,D), the number of real keys (B,) and the number of all keys (1,); None before the
            first token.
        """
        state, seen = self.full.state, self.full.seen
        if state is None or seen is None:
            return None
        return state, seen, seen.new_full((1,), self.length)

    def absorb(
        self, key_BGLD: Tensor, value_BGLD: Tensor, real_BL: Tensor | None, visible_BK: Tensor | None = None
    ) -> None:
        """Add the keys and values of a call to the state.

        `real_BL` (B,L) is False at padding; None means no padding. `visible_BK` (B,K) says the same of all tokens so
        far, these included. The state keeps this tensor, of one byte per token, which all layers of a pass share.

        Up to `CROPPED` tokens become a part of the tail without a copy. Of more tokens, the last `CROPPED` become the
        new tail. Without gradients the sums change in place, unless the sums before the tail or a graph of gradients
        hold the same tensors.
        """
        self._given, self.visible = None, visible_BK
        real = None if real_BL is None else real_BL.clone()  # a view would keep the masks of the whole context
        chunk = Chunk(key_BGLD, value_BGLD, real)
        if chunk.length > CROPPED:
            many = chunk.length - CROPPED
            self.base = self.full = self.full.plus(chunk.part(0, many))
            self._alone = False
            self.tail = []
            chunk = chunk.part(many, chunk.length).copy()
        self.full = self.full.plus(chunk, in_place=self._alone and _changeable(self.full.state))
        self._alone = not torch.is_grad_enabled()
        self.tail.append(chunk)
        kept = self.full.length - self.base.length
        if kept > 2 * CROPPED:  # at most once per CROPPED tokens, so that the average cost of a token is constant
            whole = Chunk.joined(self.tail)
            self.base = self.base.plus(whole.part(0, kept - CROPPED))
            self.tail = [whole.part(kept - CROPPED, kept).copy()]

    def reset(self) -> None:
        """Forget all tokens. The state stays where it was put, so that it can still give its place up."""
        place = self._place
        self.__init__()  # type: ignore[misc]  # a cache layer without options
        self._place = place

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back.

        Args:
            tokens_to_remove: as in `removed`.

        Raises:
            ValueError: the tail holds fewer tokens than must be taken back. `CROPPED` tokens, counted from the longest
                text so far, can always be taken back.
        """
        remove = removed(tokens_to_remove, self.length)
        if remove <= 0:
            return
        self._alone = False
        if self.visible is not None:
            self.visible = self.visible[:, : max(self.length - remove, 0)]
        if remove >= self.length:
            self.full, self.base, self.tail, self.visible = Sums(), Sums(), [], None
            return
        kept = self.length - self.base.length - remove
        if kept < 0:
            raise self.cannot_go_back(remove)
        left = Chunk.joined(self.tail).part(0, kept)
        self.tail = [left] if kept else []
        self.full = self.base.plus(left) if kept else self.base

    def _rows(self, choose: Rows) -> None:
        super()._rows(choose)
        self._alone = False
        self.full, self.base = self.full.rows(choose), self.base.rows(choose)
        if self.tail:
            self.tail = [Chunk.joined(self.tail).rows(choose)]

    def __getstate__(self) -> dict[str, Any]:
        """As in the base class. A shallow copy shares the tensors, so neither changes them in place after this."""
        self._alone = False
        return super().__getstate__()


def _changeable(tensor: Tensor | None) -> bool:
    """True if PyTorch lets this tensor change in place now, and no gradient needs its present numbers."""
    if tensor is None or torch.is_grad_enabled():
        return False
    return torch.is_inference_mode_enabled() or not tensor.is_inference()
