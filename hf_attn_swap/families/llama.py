"""LLaMA: Q and K get a rotary embedding, heads share keys and values in groups, and W_o is `o_proj`."""

from .base import Family, attributes

FAMILY = Family(
    name="llama",
    core="LlamaAttention",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    geometry=attributes(heads="config.num_attention_heads", kv_heads="config.num_key_value_heads", head_dim="head_dim"),
    tiny={
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 2,
        "vocab_size": 64,
    },
)
