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
    tiny={
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "embd_pdrop": 0.0,
        "eos_token_id": 1,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 64,
        "pad_token_id": 2,
        "resid_pdrop": 0.0,
        "vocab_size": 64,
    },
)
