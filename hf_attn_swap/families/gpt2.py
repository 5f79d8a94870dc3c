"""GPT-2: one fused Conv1D computes Q, K and V; W_o is `c_proj`, and hidden dropout follows inside the module."""

from .base import Family, attributes

FAMILY = Family(
    name="gpt2",
    core="GPT2Attention",
    query="c_attn",
    key="c_attn",
    value="c_attn",
    output="c_proj",
    dropout="resid_dropout",
    geometry=attributes(heads="num_heads", head_dim="head_dim", hidden="embed_dim"),
)
