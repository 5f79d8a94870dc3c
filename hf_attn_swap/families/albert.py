"""ALBERT: one module serves all layers, and holds the projections, W_o (`dense`), dropout and LayerNorm."""

from .base import Family, attributes

FAMILY = Family(
    name="albert",
    core="AlbertAttention",
    query="query",
    key="key",
    value="value",
    output="dense",
    dropout="output_dropout",
    block="albert",
    shared=True,
    geometry=attributes(heads="num_attention_heads", head_dim="attention_head_size"),
    tiny={
        "attention_probs_dropout_prob": 0.0,
        "embedding_size": 16,
        "hidden_dropout_prob": 0.0,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": 64,
    },
)
