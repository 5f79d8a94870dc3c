"""The geometry of one tiny layer."""

from __future__ import annotations

from hf_attn_swap.core.call import Geometry

SIZES = Geometry(heads=4, kv_heads=4, head_dim=8, hidden=32)
