"""Caches attention in a window: the first keys of a text and the last ones, in place of all keys and values.

Decoding one token then takes time and memory that do not grow with the context. transformers' own sliding layer keeps
no first keys, and knows nothing of padding, behind which the first keys of a row lie.
Where some heads of a layer see every key, the same cache layer holds all keys of these heads.
Assisted decoding takes tokens back, so more of the last keys are kept than a window shows: at least `CROPPED` and at
most twice as many.
docs/mathematics.md, section Window; StreamingLLM (Xiao et al., 2024a), section 3.2; DuoAttention (Xiao et al., 2024b).
Axes: B batch, G key/value head, L token, K key, D head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.call import Inputs
from ..core.masks import Masks
from ..kernels.windows import ALL, Held, Span, firsts_of
from .state import CROPPED, Rows, State, removed


class WindowState(State):
    """The cache of one layer: the last keys and values, and the first ones of the text as far as they are no last ones.

    Args:
        span: how far a query of the layer sees. Of the heads that see every key, all keys are held.
    """

    holds = "the keys and values of a window alone"

    def __init__(self, span: Span) -> None:
        super().__init__()
        self.span = span
        self.held = ALL
        self.last: tuple[Tensor, Tensor] | None = None  # (B,G,L,D), the last keys and their values
        self.whole: tuple[Tensor, Tensor] | None = None  # (B,G,K,D), all keys and values of heads that see every key

    @property
    def length(self) -> int:
        """The number of tokens so far, padding included."""
        return self.held.before + (0 if self.last is None else self.last[0].shape[2])

    def belongs_to(self, swap: Any) -> bool:
        """True for attention in a window of this size, with all keys in the same heads."""
        return bool(swap.keeps_window and swap.span == self.span)

    def joined(self, inputs: Inputs) -> tuple[Inputs, Held]:
        """The inputs of a call with the last keys in front of the current ones; and what is held of the earlier ones.

        The masks of these inputs are those of all keys so far.
        """
        return self._behind(self.last, inputs), ALL if self.last is None else self.held

    def joined_whole(self, inputs: Inputs) -> Inputs:
        """As `joined`, for the heads that see every key: the inputs with all earlier keys in front."""
        return self._behind(self.whole, inputs)

    def _behind(self, earlier: tuple[Tensor, Tensor] | None, inputs: Inputs) -> Inputs:
        """The inputs with earlier keys and values in front of the current ones, and the masks of all keys so far."""
        if earlier is None:
            return inputs
        key, value = (torch.cat([old, new], 2) for old, new in zip(earlier, (inputs.key, inputs.value), strict=True))
        masks = Masks(**{**vars(inputs.masks), "keys": self.length + inputs.key.shape[2]})  # `replace` takes longer
        return Inputs(**{**vars(inputs), "key": key, "value": value, "masks": masks})

    def absorb(self, inputs: Inputs, whole: Inputs | None = None) -> None:
        """Keep the keys of a call: those that `joined` and `joined_whole` returned.

        The keys that no later query sees are let go, at most once per `CROPPED` tokens, so that the average cost of a
        token is constant.
        """
        key, value, masks = inputs.key, inputs.value, inputs.masks
        self._given, self.visible = None, masks.key_mask
        self.whole = None if whole is None else (whole.key, whole.value)
        room = self.span.window - 1 + CROPPED
        count = key.shape[2] - room
        if count > CROPPED:
            self.held = self.held.without(count, firsts_of(masks, self.span), key, value)
            key, value = (tensor[:, :, count:].clone() for tensor in (key, value))  # a view would keep the whole text
        self.last = key, value

    def reset(self) -> None:
        """Forget all tokens. The state stays where it was put, so that it can still give its place up."""
        place = self._place
        self.__init__(self.span)  # type: ignore[misc]
        self._place = place

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back.

        Args:
            tokens_to_remove: as in `removed`.

        Raises:
            ValueError: a query would then see keys that were let go. `CROPPED` tokens, counted from the longest text so
                far, can always be taken back.
        """
        remove = removed(tokens_to_remove, self.length)
        if remove <= 0 or self.last is None:
            return
        length = self.length - remove
        if length == 0:
            self.held, self.last, self.whole, self.visible = ALL, None, None, None
            return
        kept = length - self.held.before
        if self.held.before and kept < self.span.window - 1:
            raise self.cannot_go_back(remove)
        self.last = self.last[0][:, :, :kept], self.last[1][:, :, :kept]
        if self.whole is not None:
            self.whole = self.whole[0][:, :, :length], self.whole[1][:, :, :length]
        self.visible = None if self.visible is None else self.visible[:, :length]

    def _rows(self, choose: Rows) -> None:
        super()._rows(choose)
        if self.last is not None:
            self.last = choose(self.last[0]), choose(self.last[1])
        if self.whole is not None:
            self.whole = choose(self.whole[0]), choose(self.whole[1])
        if self.held.key is not None and self.held.value is not None:
            self.held = replace(self.held, key=choose(self.held.key), value=choose(self.held.value))
