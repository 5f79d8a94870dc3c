"""A memory answers a state with the stored patterns that are most like it.

Z = normalizer(beta Q K^T) V with Q = R W_Q, K = Y W_K, V = K W_V; more steps put Q <- normalizer(beta Q K^T) K first.
Identity weights, one step: retrieval of a stored pattern; one step, learned weights: attention without a separate W_V.
OutEffHop (Hu et al., 2024), section 2.4, eq. 2.11 to 2.14; SparseHopfield and polynomial memories as its baselines.
Axes: B batch, Q query, N stored pattern, H head, D head width, I inner width (H x D), E width.

Masks are bool, True where a pattern is left out: `key_padding_mask` and `no_op` (outliers known by hand) are (B,N) or
(N), `mask` is (Q,N) or (B,Q,N). A forward raises ValueError for shapes that do not fit, an empty memory, and a row
with no pattern left; such a row is zero for "outeffhop", the only one whose weights need not sum to 1.
"""

from __future__ import annotations

import math

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from ..functional import hopfield_retrieve, no_op_patterns

# The layers' names, and the functions'.
NORMALIZERS = {name: name for name in ("outeffhop", "softmax", "sparsemax", "entmax", "polynomial")}
NORMALIZERS |= {"outeffhop": "softmax_n", "entmax": "entmax15"}


class _Memory(nn.Module, PyTorchModelHubMixin, library_name="hf-attn-swap", tags=["hopfield", "memory"]):
    """What the four share: the checked settings, and the retrieval dynamics per head."""

    def __init__(self, normalizer: str, steps: int, beta: float) -> None:
        super().__init__()
        if normalizer not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {normalizer!r}; choose one of {', '.join(NORMALIZERS)}.")
        if steps < 1:
            raise ValueError(f"steps must be at least 1 (steps = n applies the update n times), got {steps}.")
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"beta must be a positive number, got {beta}.")
        self.normalizer, self.steps, self.beta = normalizer, steps, beta

    def _retrieve(self, state_BHQD: Tensor, stored_BHND: Tensor, keep_BHQN: Tensor | None) -> Tensor:
        stored_BH1ND, name = stored_BHND.unsqueeze(2), NORMALIZERS[self.normalizer]
        return hopfield_retrieve(
            state_BHQD, stored_BH1ND, self.beta, steps=self.steps, normalizer=name, key_mask=keep_BHQN
        )


def _check(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 3 or tensor.shape[-1] != width:
        raise ValueError(f"{name} must be (batch, length, {width}), got {tuple(tensor.shape)}.")


def _keep(state: Tensor, stored: Tensor, **left_out: Tensor | None) -> Tensor | None:
    """(B,1,Q or 1,N), True where a pattern counts, from bool masks (N), (B,N) or, if named `mask`, (Q,N) or (B,Q,N)."""
    batch, queries, count = len(state), state.shape[1], stored.shape[1]
    if len(stored) not in (1, batch):
        raise ValueError(f"{batch} rows of states cannot read {len(stored)} rows of patterns; pass as many of both.")
    keep = None
    for name, mask in left_out.items():
        if mask is None:
            continue
        seen = [(queries, count), (batch, queries, count)] if name == "mask" else [(count,), (1, count), (batch, count)]
        if mask.dtype != torch.bool or tuple(mask.shape) not in seen:
            wanted = f"{name} must be bool, True to leave out, of shape {' or '.join(map(str, seen))}"
            raise ValueError(f"{wanted}; got {mask.dtype}, {tuple(mask.shape)}.")
        kept = ~(mask if name == "mask" else mask.unsqueeze(-2)).reshape(-1, 1, queries if name == "mask" else 1, count)
        keep = kept if keep is None else keep & kept
    return keep


class HopfieldRetrieval(_Memory):
    """Memory retrieval without weights: xi <- Y^T normalizer(beta Y xi), `steps` times.

    No-op classification gives states (0) and patterns one more dimension and maps all outliers to one vector that has
    only this. Its score is 0 for every state: it adds exp(0) = 1 to the denominator, once and without outliers too, and
    nothing to what is read. That 1 is softmax_1's, so the dimension is never built, and outliers are left out; the
    other normalisers have no such class and lose them as well.

    Args:
        normalizer: one of `NORMALIZERS`.
        steps: updates per call; steps = n equals n calls.
        beta: inverse temperature, inside the normaliser ("polynomial" does not depend on it).
        no_op_threshold: leave out patterns whose cosine with all others is below this, see `no_op_patterns`.

    Raises:
        ValueError: an unknown normaliser, steps < 1, beta <= 0 or a threshold that is no cosine.

    Source: OutEffHop, section 2.2 (eq. 2.5, 2.6), Lemma 2.1 (eq. 2.11) and mode 1 of section 2.4.
    """

    def __init__(
        self, *, normalizer: str = "outeffhop", steps: int = 1, beta: float = 1.0, no_op_threshold: float | None = None
    ) -> None:
        super().__init__(normalizer, steps, beta)
        if no_op_threshold is not None and not -1 <= no_op_threshold <= 1:
            raise ValueError(f"no_op_threshold is a cosine, between -1 and 1; got {no_op_threshold}.")
        self.no_op_threshold = no_op_threshold

    def forward(
        self,
        state_BQE: Tensor,
        stored_BNE: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        no_op: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What is read from stored patterns (B,N,E), or (N,E) for all rows: (B,Q,E). Masks as above."""
        stored_BNE = stored_BNE if stored_BNE.dim() == 3 else stored_BNE.unsqueeze(0)
        _check("stored", stored_BNE, stored_BNE.shape[-1])
        _check("state", state_BQE, stored_BNE.shape[-1])
        keep = _keep(state_BQE, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op, mask=mask)
        if self.no_op_threshold is not None:
            real = None if key_padding_mask is None else ~key_padding_mask
            found_BN = no_op_patterns(stored_BNE, self.no_op_threshold, real)
            keep = ~found_BN[:, None, None] if keep is None else keep & ~found_BN[:, None, None]
        return self._retrieve(state_BQE.unsqueeze(1), stored_BNE.unsqueeze(1), keep).squeeze(1)


class _Projected(_Memory):
    """Heads, and the read-out V = K W_V: on all heads at once, so that one matrix holds each head's own W_V (D,E)."""

    def __init__(self, width: int, inner: int, heads: int, normalizer: str, steps: int, beta: float | None) -> None:
        if min(width, inner, heads) < 1 or inner % heads:
            raise ValueError(f"{heads} heads do not divide inner_width = {inner}; choose a divisor (width is {width}).")
        super().__init__(normalizer, steps, (inner // heads) ** -0.5 if beta is None else beta)
        self.width, self.heads = width, heads
        self.value = nn.Linear(inner, width, bias=False)

    def _read(self, state_BQI: Tensor, stored_BNI: Tensor, keep_BHQN: Tensor | None) -> Tensor:
        state, stored = (torch.unflatten(x, 2, (self.heads, -1)).transpose(1, 2) for x in (state_BQI, stored_BNI))
        read_BQE: Tensor = self.value(self._retrieve(state, stored, keep_BHQN).transpose(1, 2).flatten(2))
        return read_BQE


class HopfieldAssociation(_Projected):
    """Association: states R query stored patterns Y, both projected; Y = R is self-attention.

    Args:
        width: E of R and of the output.
        stored_width: of Y; default `width`.
        inner_width: I, all heads together; default `width`.
        heads: H, a divisor of I.
        normalizer: one of `NORMALIZERS`.
        steps: updates of the projected state.
        beta: default 1 / sqrt(I / H).

    Raises:
        ValueError: widths or heads that do not fit, an unknown normaliser, steps < 1, beta <= 0.

    Source: OutEffHop, eq. 2.12 to 2.14 and mode 2 of section 2.4.
    """

    def __init__(
        self,
        width: int,
        *,
        stored_width: int | None = None,
        inner_width: int | None = None,
        heads: int = 1,
        normalizer: str = "outeffhop",
        steps: int = 1,
        beta: float | None = None,
    ) -> None:
        inner = width if inner_width is None else inner_width
        super().__init__(width, inner, heads, normalizer, steps, beta)
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width if stored_width is None else stored_width, inner, bias=False)

    def forward(
        self,
        state_BQE: Tensor,
        stored_BNE: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        no_op: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What states (B,Q,E) read from stored patterns (B,N,stored_width): (B,Q,E). Masks as above."""
        _check("state", state_BQE, self.width)
        _check("stored", stored_BNE, self.key.in_features)
        keep = _keep(state_BQE, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op, mask=mask)
        return self._read(self.query(state_BQE), self.key(stored_BNE), keep)


class HopfieldPooling(_Projected):
    """Pooling: learned queries, already in the projected space, read a bag Y; one query makes it one vector.

    Args and errors as for `HopfieldAssociation`; `queries` is how many, at least 1.
    Source: OutEffHop, mode 3 of section 2.4.
    """

    def __init__(
        self,
        width: int,
        *,
        queries: int = 1,
        inner_width: int | None = None,
        heads: int = 1,
        normalizer: str = "outeffhop",
        steps: int = 1,
        beta: float | None = None,
    ) -> None:
        inner = width if inner_width is None else inner_width
        if queries < 1:
            raise ValueError(f"pooling needs at least one query, got queries = {queries}.")
        super().__init__(width, inner, heads, normalizer, steps, beta)
        self.key = nn.Linear(width, inner, bias=False)
        self.query = nn.Linear(inner, queries, bias=False)  # its weight (Q,I) is what is learned

    def forward(
        self, stored_BNE: Tensor, *, key_padding_mask: Tensor | None = None, no_op: Tensor | None = None
    ) -> Tensor:
        """The bags (B,N,E) as (B,Q,E)."""
        _check("stored", stored_BNE, self.width)
        state_BQI = self.query.weight.expand(len(stored_BNE), -1, -1)
        keep = _keep(state_BQI, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op)
        return self._read(state_BQI, self.key(stored_BNE), keep)


class HopfieldLayer(_Projected):
    """Lookup: states R read patterns that are weights, Y = 1, so K = W_K (N,I) and V = W_K W_V do not see the input.

    Args and errors as for `HopfieldAssociation`; `stored` is N, at least 1.
    Source: OutEffHop, mode 4 of section 2.4; V as a table of its own is another reading, not taken (V = Y W_K W_V).
    """

    def __init__(
        self,
        width: int,
        stored: int,
        *,
        inner_width: int | None = None,
        heads: int = 1,
        normalizer: str = "outeffhop",
        steps: int = 1,
        beta: float | None = None,
    ) -> None:
        if stored < 1:
            raise ValueError(f"the layer needs at least one stored pattern, got stored = {stored}.")
        inner = width if inner_width is None else inner_width
        super().__init__(width, inner, heads, normalizer, steps, beta)
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(inner, stored, bias=False)  # its weight (N,I) is the memory

    def forward(self, state_BQE: Tensor) -> Tensor:
        """What states (B,Q,E) look up: (B,Q,E)."""
        _check("state", state_BQE, self.width)
        return self._read(self.query(state_BQE), self.key.weight.unsqueeze(0), None)
