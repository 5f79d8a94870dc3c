"""OPT: queries are scaled before the scores; W_o is `out_proj`, and hidden dropout follows after the module."""

from .base import Family, attributes

FAMILY = Family(
    name="opt",
    core="OPTAttention",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    geometry=attributes(heads="num_heads", head_dim="head_dim", hidden="embed_dim"),
    tiny={
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dropout": 0.0,
        "eos_token_id": 1,
        "ffn_dim": 48,
        "hidden_size": 32,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pad_token_id": 2,
        "vocab_size": 64,
        "word_embed_proj_dim": 32,
    },
)
