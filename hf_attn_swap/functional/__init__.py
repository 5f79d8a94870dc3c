"""States the papers' formulas on plain tensors: the readable reference of every variant.

All functions take scores that are already scaled and masked. docs/mathematics.md states the formulas in one place.
Axes: B batch, H head, Q query, K key, L token, D head width, N pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .linear import CHUNK, Past, simple_attention
from .sparse import entmax, entmax15, sparsemax

__all__ = [
    "CHUNK",
    "Past",
    "belief_projection",
    "check_clip",
    "clip",
    "clipped_softmax",
    "entmax",
    "entmax15",
    "hopfield_energy",
    "hopfield_retrieve",
    "hopfield_scores",
    "no_op_patterns",
    "outside_window",
    "polynomial",
    "simple_attention",
    "softmax_n",
    "sparsemax",
]


def softmax_n(scores: Tensor, n: float | Tensor = 1.0, dim: int = -1) -> Tensor:
    """Softmax with n extra in the denominator: p_j = exp(s_j) / (n + sum_k exp(s_k)).

    Args:
        scores: any shape, scaled and masked.
        n: the number of further keys, of score 0 and value 0, that the row can attend to; at least 0. n = 0 is
            ordinary softmax.
        dim: the key axis.

    Returns:
        Weights of the same shape. For n > 0, each row sums to less than 1, and a fully masked row is all zeros.

    Raises:
        ValueError: n is negative.

    Source: OutEffHop (Hu et al., 2024), eq. 2.11; stable for every n by shifting with max(log n, max_j s_j).
    """
    if isinstance(n, (int, float)):
        if n < 0:
            raise ValueError(f"softmax_n needs n >= 0, got {n}; n = 0 is ordinary softmax.")
        log_n = scores.new_full((1,), math.log(n) if n > 0 else -math.inf)
    else:
        log_n = n.to(scores.dtype).log()
    # The weights do not depend on the shift, so the shift needs no gradient.
    shift = torch.maximum(scores.detach().amax(dim, keepdim=True), log_n.detach())
    exponentials = (scores - shift).exp()
    return exponentials / ((log_n - shift).exp() + exponentials.sum(dim, keepdim=True))


def clipped_softmax(
    scores: Tensor, gamma: float | Tensor, zeta: float | Tensor, dim: int = -1, n: float | Tensor = 0.0
) -> Tensor:
    """Stretched and clipped softmax: clip((zeta - gamma) * softmax_n(s) + gamma, 0, 1).

    Args:
        scores: any shape, scaled and masked.
        gamma: the lower end of the stretched weights, at most 0.
        zeta: the upper end of the stretched weights, at least 1. gamma = 0 and zeta = 1 change nothing.
        dim: the key axis.
        n: as in `softmax_n`; n = 0 is the paper's clipped softmax.

    Returns:
        Weights of the same shape. The caller must set masked positions to 0 afterwards.

    Raises:
        ValueError: gamma is a number above 0, or zeta is a number below 1.

    Source: Bondarenko et al. (2023), eq. 4; with n = 1, Clipped OutEffHop.
    """
    check_clip(gamma, zeta)
    if isinstance(n, (int, float)) and n == 0:
        weights = torch.softmax(scores, dim)
    else:
        weights = softmax_n(scores, n, dim)
    return clip(weights, gamma, zeta)


def check_clip(gamma: float | Tensor, zeta: float | Tensor) -> None:
    """Check the two ends of clipped softmax. Tensors are not checked, because reading a tensor waits for the device.

    Raises:
        ValueError: gamma is a number above 0, or zeta is a number below 1.
    """
    wrong_gamma = isinstance(gamma, (int, float)) and not gamma <= 0
    wrong_zeta = isinstance(zeta, (int, float)) and not zeta >= 1
    if wrong_gamma or wrong_zeta:
        raise ValueError(f"clipped_softmax needs gamma <= 0 and zeta >= 1, got gamma={gamma}, zeta={zeta}.")


def clip(weights: Tensor, gamma: float | Tensor, zeta: float | Tensor) -> Tensor:
    """Stretch weights of any shape to [gamma, zeta] and clip them to [0, 1].

    The derivative of the clip at exactly 0 and 1 is 1, so that gamma = 0 and zeta = 1 keep the ordinary gradient.
    """
    return torch.clamp((zeta - gamma) * weights + gamma, 0.0, 1.0)


def belief_projection(
    heads: Tensor, values: Tensor, *, per_head: bool = False, eps: float = 1e-8, squares: Tensor | None = None
) -> Tensor:
    """Subtract from each token's heads their projection on the token's own value.

    delta_i = y_i - (<y_i, v_i> / max(<v_i, v_i>, eps)) v_i, with all heads as one vector, or for each head alone.

    Args:
        heads: (B,L,H,D), the output of the heads.
        values: (B,L,H,D), the value vectors of each token itself (with bias, never rotated).
        per_head: project each head alone (the second term of `belief_star`), and not all heads as one vector.
        eps: the lowest number that <v, v> counts as. If v is zero, the heads stay as they are.
        squares: (H,D), weights S^2 of the inner products: <y, v> is the sum of S^2 y v. None is 1 everywhere. The same
            numbers come from values and heads times S, if the result is divided by S.

    Returns:
        (B,L,H,D) in the dtype of `heads`. Inner products are summed in fp32 at least.

    Source: BeliefFormer, eq. 10 (joined) and 13 (per head).
    """
    axes = (-1,) if per_head else (-2, -1)
    y, v, wide = heads, values, torch.promote_types(heads.dtype, torch.float32)
    if not y.dtype == v.dtype == wide:  # a cast to the same dtype takes time, too
        y, v = y.to(wide), v.to(wide)
    weighted = v if squares is None else v * squares.to(wide)
    share = (y * weighted).sum(axes, keepdim=True) / (v * weighted).sum(axes, keepdim=True).clamp_min(eps)
    read = torch.addcmul(y, share, v, value=-1)
    return read if heads.dtype == wide else read.to(heads.dtype)


def outside_window(places: Tensor, keys: int, shown: Tensor | None, window: int, sinks: int) -> Tensor:
    """The keys that a window hides: those at a distance of `window` or more, except the first ones of the text.

    Args:
        places: (Q), the place of each query among the keys.
        keys: the number of keys, K.
        shown: (...,Q|1,K) bool, True where a query may see a key without the window; None if it sees all.
        window: the distance from which on a key is hidden, at least 1.
        sinks: so many of the first keys that a query may see stay visible, at least 0.

    Returns:
        (...,Q,K) bool, True where the window hides the key.

    Source: Longformer (Beltagy et al., 2020), section 3.1; StreamingLLM (Xiao et al., 2024), section 3.2.
    """
    key = torch.arange(keys, device=places.device)
    far = (places[:, None] - key).abs() >= window
    rank = key + 1 if shown is None else shown.cumsum(-1, dtype=torch.int32)
    outside = far & (rank > sinks)
    return outside[None, None] if shown is None else outside


def hopfield_scores(scores: Tensor, previous: Tensor, alpha_prime: float | Tensor) -> Tensor:
    """Scores carried across layers: H_l = alpha' * H_{l-1} + (1 - alpha') * S_l.

    Args:
        scores: (B,H,Q,K), this layer's scaled scores before the mask.
        previous: (B,H,Q,K), H of the layer below; zeros for the first layer.
        alpha_prime: the share of `previous`, in [0, 1]; 0 is ordinary attention.

    Returns:
        The carried scores H of this layer, (B,H,Q,K).

    Source: modern Hopfield attention (MHA), eq. 10 with the second update of the hidden state.
    """
    return alpha_prime * previous + (1 - alpha_prime) * scores


def polynomial(scores: Tensor, order: int = 10, dim: int = -1) -> Tensor:
    """Weights by a power of the scores: p_j = s_j^order / sum_k s_k^order.

    Args:
        scores: any shape. Masked keys have score 0, not -inf. A common factor of a row's scores has no effect, so an
            inverse temperature has no effect either.
        order: the power. An even power gives a pattern and its negative the same weight.
        dim: the key axis.

    Returns:
        Weights of the same shape. The absolute values of each row sum to 1; a row of zeros stays zero.

    Source: Krotov & Hopfield (2016), eq. 2, as a separation function; order 10 is OutEffHop's baseline (appendix D.2).
    """
    largest = scores.detach().abs().amax(dim, keepdim=True)  # a power of the raw scores would overflow
    powers = (scores / torch.where(largest == 0, 1, largest)) ** order
    total = powers.abs().sum(dim, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


def no_op_patterns(patterns: Tensor, threshold: float, key_mask: Tensor | None = None) -> Tensor:
    """Find the stored patterns that are outliers: their cosine with every other pattern lies below a threshold.

    The paper does not say which similarity it means; this package uses the cosine.

    Args:
        patterns: (..., N, D).
        threshold: a cosine, in [-1, 1].
        key_mask: (..., N) bool, False at padding. Padding is compared with no pattern and is never an outlier.

    Returns:
        (..., N) bool, True at outliers. A pattern that can be compared with no other pattern is not an outlier.

    Raises:
        ValueError: the threshold does not lie in [-1, 1].

    Source: OutEffHop (Hu et al., 2024), appendix B.1, steps 1 to 3.
    """
    if not -1 <= threshold <= 1:
        raise ValueError(f"the no-op threshold is a cosine, between -1 and 1; got {threshold}.")
    unit = torch.nn.functional.normalize(patterns.to(torch.promote_types(patterns.dtype, torch.float32)), dim=-1)
    others = ~torch.eye(unit.shape[-2], dtype=torch.bool, device=unit.device)
    if key_mask is not None:
        others = others & key_mask[..., None, :] & key_mask[..., :, None]
    similar = (unit @ unit.mT >= threshold) & others
    return others.any(-1) & ~similar.any(-1)


def hopfield_retrieve(
    state: Tensor,
    patterns: Tensor,
    beta: float,
    *,
    n: float = 1.0,
    steps: int = 1,
    normalizer: str = "softmax_n",
    key_mask: Tensor | None = None,
) -> Tensor:
    """Retrieve from stored patterns: repeat xi <- patterns^T normalizer(beta * patterns xi).

    Args:
        state: (..., D), the states xi that are completed.
        patterns: (..., N, D), the stored patterns. Leading axes of size 1 are shared by all states and not copied.
        beta: the inverse temperature, a factor of the scores.
        n: as in `softmax_n`; the other normalizers ignore n.
        steps: the number of updates, at least 1.
        normalizer: "softmax_n", "softmax", "sparsemax", "entmax15" or "polynomial" (of order 10).
        key_mask: (..., N) bool, True at stored patterns and False at padding. None means that all patterns are stored.

    Returns:
        The states after the last update, (..., D).

    Raises:
        ValueError: `steps` is below 1, the normalizer is unknown, there are no patterns, or `key_mask` leaves a state
            without any pattern. With "softmax_n" and n > 0, a state without any pattern becomes zero instead.

    Source: OutEffHop (Hu et al., 2024), Lemma 2.1 and section 2.4.
    """
    weigh = _normalizer(normalizer, n)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not patterns.shape[-2]:
        raise ValueError("the memory is empty; store at least one pattern.")
    if key_mask is not None and not (normalizer == "softmax_n" and n > 0) and not bool(key_mask.any(-1).all()):
        raise ValueError(
            f"a row has no pattern left, so {normalizer} has nothing to read; drop such rows, or use "
            f"softmax_n (outeffhop), which returns zeros for such a row."
        )
    for _ in range(steps):
        scores = beta * torch.einsum("...nd,...d->...n", patterns, state)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask, 0.0 if normalizer == "polynomial" else -math.inf)
        state = torch.einsum("...n,...nd->...d", weigh(scores), patterns)
    return state


def hopfield_energy(state: Tensor, patterns: Tensor, beta: float, *, n: float = 1.0) -> Tensor:
    """The energy of a state: E(xi) = <xi, xi> / 2 - log(n + sum_j exp(beta <y_j, xi>)) / beta.

    Each update of `hopfield_retrieve` with the same beta and n lowers it, or leaves it as it is: the second term is
    concave, and the update is a step of the concave-convex procedure.

    Args:
        state: (..., D), the states xi.
        patterns: (..., N, D), the stored patterns y.
        beta: the inverse temperature, above 0.
        n: as in `softmax_n`. n = 0 is the energy of the dense model (eq. 2.3), without the constants that make it
            positive.

    Returns:
        The energies, (...).

    Raises:
        ValueError: n is negative.

    Source: OutEffHop (Hu et al., 2024), eq. 2.9 and 2.10, remark 2.3 (n) and Lemma 2.1.
    """
    if n < 0:
        raise ValueError(f"hopfield_energy needs n >= 0, got {n}; n = 0 is the energy of the dense model.")
    scores = beta * torch.einsum("...nd,...d->...n", patterns, state)
    zero = scores.new_full((*scores.shape[:-1], 1), math.log(n) if n > 0 else -math.inf)
    return state.square().sum(-1) / 2 - torch.cat([scores, zero], -1).logsumexp(-1) / beta


def _normalizer(name: str, n: float) -> Callable[[Tensor], Tensor]:
    """The function from scores to weights with this name.

    Raises:
        ValueError: the name is unknown.
    """
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "sparsemax": sparsemax,
        "entmax15": entmax15,
        "softmax_n": lambda scores: softmax_n(scores, n),
        "softmax": lambda scores: torch.softmax(scores, -1),
        "polynomial": polynomial,
    }
    if name not in known:
        raise ValueError(f"unknown normalizer {name!r}; known: {', '.join(known)}.")
    return known[name]
