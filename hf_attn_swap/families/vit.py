"""ViT: pre-LayerNorm encoder, W_o is `o_proj` inside the module, hidden dropout comes after it."""

from .base import Family, attributes

FAMILY = Family(
    name="vit",
    core="ViTAttention",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    geometry=attributes(heads="num_attention_heads", head_dim="head_dim"),
)
