"""The mask of one attention call, and the forms in which attention functions read this mask.

transformers hands over a mask in one of three ways: no tensor and a causal flag, a two-dimensional mask of keys, or a
mask of queries and keys. `Masks` gives each of them one meaning. A form of the mask that several layers of a forward
pass need is worked out once and kept in `made`, together with the mask that it was made from: a layer under another
mask never reads it. Axes: B batch, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """One form of a mask, and what it was made from."""

    key_mask: Tensor | None
    given: Tensor | None
    facts: tuple[Any, ...]
    value: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Masks:
    """What each query of a call may see.

    Attributes:
        queries, keys: Q and K.
        device: of the queries.
        key_mask: (B,K) bool, True where the key is a real token, or None. With `causal`, the queries are the last
            ones of the keys.
        given: bool or numbers to add to the scores, broadcastable to (B,H,Q,K), or None. Never together with
            `key_mask`.
        causal: plain causal order, on top of `key_mask`, or alone with as many keys as queries.
        made: forms that were worked out in this forward pass; the layers of a pass share this list.
    """

    queries: int
    keys: int
    device: torch.device
    key_mask: Tensor | None = None
    given: Tensor | None = None
    causal: bool = False
    made: list[Made] = field(default_factory=list)

    def dense(self) -> tuple[Tensor | None, bool]:
        """The mask (B|1,1|H,Q,K) for SDPA, and SDPA's causal flag; never both."""
        if self.key_mask is None:
            return self.given, self.causal
        return self._once(("dense",), self._expanded), False

    def additive(self, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """As `dense`, with the mask as finite numbers in `dtype`: its lowest number where a query may not look."""
        mask, causal = self.dense()
        if mask is None:
            return None, causal
        return self._once(("additive", dtype), lambda: _numbers(mask, dtype)), False

    def allowed(self) -> Tensor | None:
        """(B|1,1|H,Q,K) bool, True where the query may look; None means everywhere."""
        allowed: Tensor | None = self._once(("allowed",), self._allowed)
        return allowed

    def blocked(self) -> tuple[Tensor | None, Tensor | None]:
        """What a query may not see (B|1,1|H,Q,K), and the queries that may see nothing (B|1,1|H,Q,1), or None twice.

        A query that may see nothing is left out of the first mask, so that no row of the first mask is True throughout.
        """
        both: tuple[Tensor | None, Tensor | None] = self._once(("blocked",), self._blocked)
        return both

    def bias(self) -> Tensor | None:
        """The finite numbers that a mask of numbers adds to the scores, 0 where it forbids; None for other masks."""
        if self.given is None or self.given.dtype == torch.bool:
            return None
        bias: Tensor = self._once(("bias",), self._bias)
        return bias

    def has_bias(self) -> bool:
        """True if the mask adds a number other than 0. The answer waits for the device, once per forward pass."""
        bias = self.bias()
        return bias is not None and self._once(("has_bias",), lambda: bool(bias.any()))

    def _once(self, kind: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The form `kind` of this mask: the one that a layer of this pass already made, or a new one."""
        facts = (*kind, self.causal, self.queries, self.keys, self.device)
        for each in self.made:
            if each.key_mask is self.key_mask and each.given is self.given and each.facts == facts:
                return each.value
        value = make()
        self.made.append(Made(self.key_mask, self.given, facts, value))
        return value

    def _expanded(self) -> Tensor:
        assert self.key_mask is not None
        return expand_key_mask(self.key_mask, self.queries, self.causal)

    def _allowed(self) -> Tensor | None:
        mask, causal = self.dense()
        if causal:
            square = torch.ones(self.queries, self.keys, dtype=torch.bool, device=self.device)
            return square.tril()[None, None]
        if mask is None or mask.dtype == torch.bool:
            return mask
        return mask > torch.finfo(mask.dtype).min / 2

    def _blocked(self) -> tuple[Tensor | None, Tensor | None]:
        allowed = self.allowed()
        if allowed is None:
            return None, None
        blind = ~allowed.any(-1, keepdim=True)
        return ~(allowed | blind), blind

    def _bias(self) -> Tensor:
        assert self.given is not None
        return self.given.masked_fill(self.given <= torch.finfo(self.given.dtype).min / 2, 0.0)


def traced() -> bool:
    """True while a program is recorded (compiled, exported, traced or captured): then no number can be read."""
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or captured


def expand_key_mask(key_mask_BK: Tensor, queries: int, causal: bool) -> Tensor:
    """(B,K) bool to (B,1,Q,K) bool; in causal order the last query sees the last key."""
    keys = key_mask_BK.shape[1]
    dense = key_mask_BK[:, None, None, :].expand(-1, 1, queries, keys)
    if not causal:
        return dense
    return dense & torch.ones(queries, keys, dtype=torch.bool, device=key_mask_BK.device).tril(keys - queries)


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add; where all queries share a row, one row stands for all of them."""
    rows = mask[:, :, :1] if mask.stride(2) == 0 else mask
    lowest = torch.finfo(dtype).min
    if rows.dtype == torch.bool:
        return torch.zeros_like(rows, dtype=dtype).masked_fill_(~rows, lowest)
    return rows.to(dtype).clamp_min(lowest)
