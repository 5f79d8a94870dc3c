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
    tiny={
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "hidden_size": 32,
        "image_size": 16,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_labels": 3,
        "patch_size": 4,
    },
)
