"""ViT: an encoder that normalizes first; W_o is `o_proj`, and hidden dropout follows after the module."""

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
