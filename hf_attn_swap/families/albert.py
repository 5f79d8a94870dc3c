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
)
