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
)
