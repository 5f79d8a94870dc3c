"""The readable formula of softmax_n over groups of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_attn_swap.functional import softmax_n


def softmax_n_reference(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scaling: float, n: Any) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return softmax_n(scores, n).masked_fill(~allowed, 0.0) @ v
