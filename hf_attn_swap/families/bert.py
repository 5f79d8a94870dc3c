"""BERT: `attention.self` holds the three projections; `attention.output` holds W_o, dropout and LayerNorm."""

from .base import Family, attributes

FAMILY = Family(
    name="bert",
    core="BertSelfAttention",
    query="query",
    key="key",
    value="value",
    output="output.dense",
    dropout="output.dropout",
    block="bert",
    geometry=attributes(heads="num_attention_heads", head_dim="attention_head_size"),
)
