"""Memory layers: a memory answers a state with the stored patterns that are most similar to the state.

Z = normalizer(beta Q K^T) V with Q = R W_Q, K = Y W_K, V = K W_V; R are the states, Y the stored patterns. Every step
but the last replaces Q by normalizer(beta Q K^T) K. With identity weights and one step this is the retrieval of a
stored pattern. With learned weights and one step it is attention whose values are computed from the keys.
OutEffHop (Hu et al., 2024), section 2.4, eq. 2.11 to 2.14. SparseHopfield's memory and polynomial memories are its
baselines; docs/mathematics.md, section Memory layers.
Axes: B batch, Q query, N stored pattern, H head, D head width, I inner width (H x D), E width.

Masks are bool, and True leaves a pattern out. `key_padding_mask` is (B,N) or (N). `no_op` has the same shape and names
outliers that the caller knows. `mask` is (Q,N) or (B,Q,N). Every forward raises ValueError if shapes do not fit, if the
memory is empty, or if a mask leaves a state without any pattern. With "outeffhop", whose weights need not sum to 1, a
state without any pattern reads zeros instead.
"""

from __future__ import annotations

import math

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from ..functional import hopfield_retrieve, no_op_patterns

# A layer's name of a normalizer, and the name that `hopfield_retrieve` gives it.
NORMALIZERS = {
    "outeffhop": "softmax_n",
    "softmax": "softmax",
    "sparsemax": "sparsemax",
    "entmax": "entmax15",
    "polynomial": "polynomial",
}


class _Memory(nn.Module, PyTorchModelHubMixin, library_name="hf-attn-swap", tags=["hopfield", "memory"]):
    """The base of the four memory layers: checks the settings, and retrieves per head."""

    def __init__(self, normalizer: str, steps: int, beta: float, n: float = 1.0) -> None:
        super().__init__()
        if normalizer not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {normalizer!r}; choose one of {', '.join(NORMALIZERS)}.")
        if steps < 1:
            raise ValueError(f"steps must be at least 1 (steps = n applies the update n times), got {steps}.")
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"beta must be a positive number, got {beta}.")
        if not (math.isfinite(n) and n >= 0) or (n != 1 and normalizer != "outeffhop"):
            raise ValueError(f"n must be a number of at least 0, and 1 for all but outeffhop; got {n}, {normalizer}.")
        self.normalizer, self.steps, self.beta, self.n = normalizer, steps, beta, n

    def _retrieve(self, state_BHQD: Tensor, stored_BHND: Tensor, keep_BHQN: Tensor | None) -> Tensor:
        stored_BH1ND, name = stored_BHND.unsqueeze(2), NORMALIZERS[self.normalizer]
        return hopfield_retrieve(
            state_BHQD, stored_BH1ND, self.beta, n=self.n, steps=self.steps, normalizer=name, key_mask=keep_BHQN
        )


def _check(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 3 or tensor.shape[-1] != width:
        raise ValueError(f"{name} must be (batch, length, {width}), got {tuple(tensor.shape)}.")


def _keep(state: Tensor, stored: Tensor, **left_out: Tensor | None) -> Tensor | None:
    """Join the masks that leave patterns out into one mask (B,1,Q or 1,N) that is True where a pattern counts.

    A mask named `mask` is (Q,N) or (B,Q,N); every other mask is (N), (1,N) or (B,N).
    """
    batch, queries, count = len(state), state.shape[1], stored.shape[1]
    if len(stored) not in (1, batch):
        raise ValueError(f"{batch} rows of states cannot read {len(stored)} rows of patterns; pass as many of both.")
    keep = None
    for name, mask in left_out.items():
        if mask is None:
            continue
        per_query = name == "mask"
        of_patterns = [(count,), (1, count), (batch, count)]
        shapes = [(queries, count), (batch, queries, count)] if per_query else of_patterns
        if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
            wanted = f"{name} must be bool, True to leave out, of shape {' or '.join(map(str, shapes))}"
            raise ValueError(f"{wanted}; got {mask.dtype}, {tuple(mask.shape)}.")
        kept = ~mask.reshape(-1, 1, queries if per_query else 1, count)
        keep = kept if keep is None else keep & kept
    return keep


class HopfieldRetrieval(_Memory):
    """Memory retrieval without weights: xi <- Y^T normalizer(beta Y xi), `steps` times.

    The paper's no-op classification adds one dimension to states and patterns, and maps all outliers to one vector that
    lies in this dimension alone. States are 0 there, so the vector's score is 0 for every state. The vector adds
    exp(0) = 1 to the denominator, even if there is no outlier, and adds nothing to what a state reads. That 1 is the
    extra 1 of softmax_1. The layer therefore never builds the dimension, and leaves outliers out of the memory. The
    other normalizers have no extra 1; they leave outliers out as well.

    Args:
        normalizer: one of `NORMALIZERS`.
        steps: updates per call; one call with steps = n equals n calls with steps = 1.
        beta: inverse temperature, inside the normalizer; "polynomial" does not depend on beta.
        n: the number of vectors that outliers are mapped to, one per kind of outlier; each adds 1 to the denominator
            of "outeffhop".
        no_op_threshold: a pattern is left out if its cosine with every other pattern is below this number; see
            `no_op_patterns`.

    Raises:
        ValueError: an unknown normalizer, steps < 1, beta <= 0, n < 0, n for another normalizer, or a threshold that
            is no cosine.

    Source: OutEffHop, section 2.2 (eq. 2.5, 2.6), remarks 2.1 and 2.3 (n), Lemma 2.1 (eq. 2.11) and mode 1 of section
    2.4. `functional.hopfield_energy` is the energy that each step lowers.
    """

    def __init__(
        self,
        *,
        normalizer: str = "outeffhop",
        steps: int = 1,
        beta: float = 1.0,
        n: float = 1.0,
        no_op_threshold: float | None = None,
    ) -> None:
        super().__init__(normalizer, steps, beta, n)
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
        """What states (B,Q,E) read from stored patterns (B,N,E), or (N,E) for all rows: (B,Q,E).

        The head of this file describes the masks.
        """
        stored_BNE = stored_BNE if stored_BNE.dim() == 3 else stored_BNE.unsqueeze(0)
        _check("stored", stored_BNE, stored_BNE.shape[-1])
        _check("state", state_BQE, stored_BNE.shape[-1])
        keep = _keep(state_BQE, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op, mask=mask)
        if self.no_op_threshold is not None:
            real = None if key_padding_mask is None else ~key_padding_mask
            outliers_BN = no_op_patterns(stored_BNE, self.no_op_threshold, real)
            keep = ~outliers_BN[:, None, None] if keep is None else keep & ~outliers_BN[:, None, None]
        return self._retrieve(state_BQE.unsqueeze(1), stored_BNE.unsqueeze(1), keep).squeeze(1)


class _Projected(_Memory):
    """The base of the layers with weights: splits into heads, and applies V = K W_V after the retrieval.

    The weights of a row multiply K first and W_V then, which is the same as to multiply V. One matrix (I,E) holds the
    W_V (D,E) of every head.
    """

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
        width: E, the width of the states R and of the output.
        stored_width: width of the stored patterns Y; default `width`.
        inner_width: I, the width of all heads together; default `width`.
        heads: H, a divisor of I.
        normalizer: one of `NORMALIZERS`.
        steps: updates of the projected state per call.
        beta: inverse temperature; default 1 / sqrt(I / H).

    Raises:
        ValueError: widths or heads that do not fit, an unknown normalizer, steps < 1, beta <= 0.

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
        """What states (B,Q,E) read from stored patterns (B,N,stored_width): (B,Q,E).

        The head of this file describes the masks.
        """
        _check("state", state_BQE, self.width)
        _check("stored", stored_BNE, self.key.in_features)
        keep = _keep(state_BQE, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op, mask=mask)
        return self._read(self.query(state_BQE), self.key(stored_BNE), keep)


class HopfieldPooling(_Projected):
    """Pooling: learned queries read a bag of patterns Y. With one query the bag becomes one vector.

    The queries are learned in the projected space, so there is no W_Q.

    Args and errors as for `HopfieldAssociation`; `queries` is the number of queries, at least 1.
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
        self.query = nn.Linear(inner, queries, bias=False)  # the weight (Q,I) is the learned queries

    def forward(
        self, stored_BNE: Tensor, *, key_padding_mask: Tensor | None = None, no_op: Tensor | None = None
    ) -> Tensor:
        """Pool the bags (B,N,E) to (B,Q,E)."""
        _check("stored", stored_BNE, self.width)
        state_BQI = self.query.weight.expand(len(stored_BNE), -1, -1)
        keep = _keep(state_BQI, stored_BNE, key_padding_mask=key_padding_mask, no_op=no_op)
        return self._read(state_BQI, self.key(stored_BNE), keep)


class HopfieldLayer(_Projected):
    """Lookup: states R read N patterns that are learned weights.

    K = W_K (N,I) and V = W_K W_V, so neither depends on the input.

    Args and errors as for `HopfieldAssociation`; `stored` is N, the number of patterns, at least 1.
    Source: OutEffHop, mode 4 of section 2.4. Another reading makes V a table of its own; here V = Y W_K W_V, as in the
    paper's other modes.
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
        self.key = nn.Linear(inner, stored, bias=False)  # the weight (N,I) is the memory

    def forward(self, state_BQE: Tensor) -> Tensor:
        """What states (B,Q,E) look up: (B,Q,E)."""
        _check("state", state_BQE, self.width)
        return self._read(self.query(state_BQE), self.key.weight.unsqueeze(0), None)
