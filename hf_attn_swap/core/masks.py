"""Holds the mask of one attention call, and makes the forms in which attention functions read this mask.

transformers hands over a mask in one of three ways: no tensor and a causal flag, a two-dimensional mask of keys, or a
mask of queries and keys. `Masks` gives each of them one meaning. If several layers of a forward pass need the same
form of a mask, the form is worked out once and kept in `made`, together with the mask that the form was made from. A
layer with another mask therefore never reads this form.
Axes: B batch, H head, Q query, K key. In a shape, 1|H means 1 or H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

# Without this function of PyTorch, the answer is that of bool(): False.
_transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
HIDING = -10_000.0  # a number that hides a key: softmax gives exp(-10000) = 0


class Made(NamedTuple):
    """One form of a mask, and what the form was made from.

    Attributes:
        key_mask, given: the mask, as in `Masks`.
        facts: the kind of the form, and what else decides about the form: the causal flag, the sizes and the device.
        value: the form itself.
    """

    key_mask: Tensor | None
    given: Tensor | None
    facts: tuple[Any, ...]
    value: Any


@dataclass(kw_only=True, eq=False)
class Masks:
    """What each query of a call may see. Nothing changes an object of this class; a frozen one takes longer to make.

    Attributes:
        queries, keys: the numbers of queries and keys, Q and K.
        device: the device of the queries.
        key_mask: (B|1,K) bool, True where the key is a real token, or None. If `causal` is True too, the queries belong
            to the last Q keys.
        given: a mask of queries and keys, broadcastable to (B,H,Q,K): bool, or numbers to add to the scores. None if
            there is no such mask. Never together with `key_mask`.
        causal: True for plain causal order, either together with `key_mask`, or alone with as many keys as queries.
        made: the forms that were worked out in this forward pass. The layers of a pass share this list.
    """

    queries: int
    keys: int
    device: torch.device
    key_mask: Tensor | None = None
    given: Tensor | None = None
    causal: bool = False
    made: list[Made] = field(default_factory=list)

    @property
    def per_head(self) -> bool:
        """True if the heads have different masks."""
        return self.given is not None and self.given.dim() == 4 and self.given.shape[1] > 1

    def dense(self) -> tuple[Tensor | None, bool]:
        """The mask (B|1,1|H,Q,K) and the causal flag, as SDPA takes them; never both."""
        if self.key_mask is None:
            return self.given, self.causal
        return self.once(("dense",), self._expanded), False

    def additive(self, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """As `dense`, with the mask as finite numbers to add, in `dtype`.

        Where a query may not see a key, the mask holds half the lowest number of `dtype`: kernels that compute with
        powers of 2 multiply the mask by log2(e), which must not give -inf.
        """
        mask, causal = self.dense()
        if mask is None:
            return None, causal
        return self.once(("additive", dtype), lambda: _numbers(mask, dtype)), False

    def allowed(self) -> Tensor | None:
        """The mask (B|1,1|H,Q,K) as bool, True where the query may see the key; None if every query sees every key."""
        allowed: Tensor | None = self.once(("allowed",), self._allowed)
        return allowed

    def blocked(self) -> tuple[Tensor | None, Tensor | None]:
        """Two bool masks: keys that a query may not see, and queries that may see no key.

        Returns:
            The first mask (B|1,1|H,Q,K) is True where the query may not see the key. The second mask (B|1,1|H,Q,1) is
            True where the query may see no key at all. The rows of such queries are False in the first mask, so that
            no row of the first mask is True throughout. Both are None if every query sees every key.
        """
        both: tuple[Tensor | None, Tensor | None] = self.once(("blocked",), self._blocked)
        return both

    def closed(self) -> Masks:
        """The same masks, where a number of -10,000 or below hides a key, as models before `finfo.min` wrote it."""
        if self.given is None or self.given.dtype == torch.bool:
            return self
        given = self.given
        lowest = torch.finfo(given.dtype).min
        closed = self.once(("closed",), lambda: given.masked_fill(given <= HIDING, lowest))
        return replace(self, given=closed)

    def with_extra_keys(self, pairs: int, share: Tensor | None, dtype: torch.dtype) -> Masks:
        """The masks of the same keys and of more keys in front of them, which every query sees.

        Args:
            pairs: the number of keys in front.
            share: (1,), the factor of the exponentials of their scores; None for 1.
            dtype: the dtype of a mask of numbers, which holds the logarithm of this factor.
        """
        if share is not None:
            column = share.to(torch.promote_types(dtype, torch.float32)).log().to(dtype).view(1, 1, 1, 1)
            numbers = self.numbers(dtype)
            given = torch.cat([column.expand(*numbers.shape[:-1], pairs), numbers], -1)
            return replace(self, keys=self.keys + pairs, key_mask=None, given=given, causal=False)
        extended = replace(self, keys=self.keys + pairs)
        mask = self.key_mask if self.given is None else self.given
        if mask is not None:
            shown = 1.0 if mask.dtype == torch.bool else 0.0
            wider = self.once(("extra keys", pairs), lambda: F.pad(mask, (pairs, 0), value=shown))
            return replace(extended, given=wider) if self.given is not None else replace(extended, key_mask=wider)
        if self.causal:
            ones = self.once(
                ("extra keys", pairs), lambda: torch.ones(1, self.keys + pairs, dtype=torch.bool, device=self.device)
            )
            return replace(extended, key_mask=ones)
        return extended

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add (B|1,1|H,Q,K), with the lowest number of `dtype` where it hides a key."""
        if self.given is not None and self.given.dtype != torch.bool:
            return self.given.to(dtype)
        allowed = self.allowed()
        if allowed is None:
            return torch.zeros(1, 1, self.queries, self.keys, dtype=dtype, device=self.device)
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

    def bias(self) -> Tensor | None:
        """The finite numbers that a mask of numbers adds to the scores; None for any other mask.

        The number is 0 where the mask forbids a key.
        """
        if self.given is None or self.given.dtype == torch.bool:
            return None
        bias: Tensor = self.once(("bias",), self._bias)
        return bias

    def has_bias(self) -> bool:
        """True if the mask adds a number other than 0. The first call of a forward pass waits for the device."""
        bias = self.bias()
        return bias is not None and self.once(("has_bias",), lambda: bool(bias.any()))

    def once(self, kind: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The form `kind` of this mask: the form that a layer of this pass already made, or a new form."""
        facts = (*kind, self.causal, self.queries, self.keys, self.device)
        for form in self.made:
            if form.key_mask is self.key_mask and form.given is self.given and form.facts == facts:
                return form.value
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
    return torch.compiler.is_compiling() or recorded()


def compiling() -> bool:
    """True while a program is recorded that may run on other lengths: compiled, exported, or by `torch.jit.trace`.

    A branch on a length would be frozen, or would restrict the lengths of the program. So the form that is right for
    all lengths runs.
    """
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]  # torch's


def recorded() -> bool:
    """True while a program is recorded for later: exported, traced or captured, but not compiled.

    PyTorch 2.6 cannot tell an export from a compilation, so both are taken for an export there.
    """
    if torch.compiler.is_compiling():
        return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # torch's
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # torch's


def transformed(*tensors: Tensor) -> bool:
    """True inside a transform of `torch.func`, such as `grad` or `vmap`, or if a tensor has a tangent (forward mode).

    There, operators of PyTorch alone may run. Other operators raise an error, or lose the tangents without an error.
    PyTorch has no public way to ask for a transform; `torch.autograd.Function` itself decides by this question. If a
    later version has no such function, forward mode is still seen, and PyTorch raises an error for other transforms.
    """
    if _transforms_active():
        return True
    if getattr(forward_ad, "_current_level", 0) < 0 or torch.compiler.is_compiling():  # no level: nothing has a tangent
        return False
    return any(map(_has_tangent, tensors))


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]  # torch's


def expand_key_mask(key_mask_BK: Tensor, queries: int, causal: bool) -> Tensor:
    """Turn a mask of keys (B,K) into a mask of queries and keys (B,1,Q,K), both bool.

    In causal order, the last query sees the last key.
    """
    keys = key_mask_BK.shape[1]
    dense = key_mask_BK[:, None, None, :].expand(-1, 1, queries, keys)
    if not causal:
        return dense
    order = torch.ones(queries, keys, dtype=torch.bool, device=key_mask_BK.device).tril(keys - queries)
    return dense & order


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to scores. If all queries share one row, the result has this one row."""
    rows = mask[:, :, :1] if mask.stride(2) == 0 else mask
    lowest = torch.finfo(dtype).min / 2
    if rows.dtype == torch.bool:
        return torch.zeros_like(rows, dtype=dtype).masked_fill_(~rows, lowest)
    return rows.to(dtype).clamp_min(lowest)
