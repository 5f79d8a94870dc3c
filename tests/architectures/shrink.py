"""Small configurations of any architecture, by rules over the names of their fields; no list of architectures.

A configuration is built anew from the fields that a rule changed, so that everything that its class derives from
them (kinds of layers, head widths, sub-configurations) is derived again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

HEADS, LAYERS, VOCABULARY, IMAGE = 4, 4, 128, 32
MANY_LAYERS = 9  # for architectures that mix kinds of layers: attention may come first in the fifth or eighth
MISSING = {
    "vocab_size": VOCABULARY,
    "num_key_value_heads": HEADS,
    "head_dim": 128,
    "num_experts_per_tok": 2,
    "prediction_length": 4,
    "pad_token_id": 1,
    "mask_token_id": 3,
    "vocabulary_map": {"<image>": 10},
}

# Attention that is off by default, or not of the kind that goes through the interface, is chosen: by name, what the
# class starts with, and what it is given.
CHOSEN: dict[tuple[str, Any], Any] = {
    ("self_attn", False): True,  # PatchTSMixer has attention only then
    ("attention_type", "prob"): "full",  # Informer computes its own, ProbSparse attention otherwise
}

Rule = tuple[str, Callable[[int], int]]


def fixed(size: int) -> Callable[[int], int]:
    """A rule that never makes anything larger; 0 and -1 mean "none" and stay."""
    return lambda value: min(value, size) if value > 0 else value


DEPTH = r"(num_|n_)?(\w+_)?(num_|n_)?(hidden_)?layers?$|(\w+_)?depths?$|num_\w*blocks$|[lxr]_layers$"
SIZE_RULES: tuple[Rule, ...] = (
    (r"(moe_layer_end_index|first_k_dense_replace|num_dense_layers|max_window_layers)$", fixed(1)),
    (r"(num_|n_)(\w+_)?experts$|moe_num_experts$", fixed(4)),
    (r"(moe_topk|moe_k|num_experts_per_tok(en)?|top_k_experts)$", fixed(2)),
    (r"(n_group|topk_group|num_expert_group)$", fixed(1)),
    (r"((\w+_)?vocab_size(_per_layer_input)?|\w*hash_byte_group_vocab|ngram_vocab_size_base)$", fixed(VOCABULARY)),
    (r"(\w+_)?(max_position_embeddings|n_positions|max_(source|target)_positions|n_ctx|context_length)$", fixed(256)),
    (r"(\w+_)?(intermediate_size|ffn_dim|dim_feedforward|d_ff|dff|n_inner|mlp_dim|ffn_hidden_size)$", fixed(96)),
    (r"(pretrain_)?image_size$", fixed(64)),
)


def width_rules(head_width: int, kv_heads: int) -> tuple[Rule, ...]:
    """Four heads of this width, and a model as wide as they are together."""
    width = HEADS * head_width
    return (
        (
            r"(?!.*(per_layer_input|bottleneck))(\w+_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim)$",
            fixed(width),
        ),
        (r"((\w+_)?(embedding_size|projection_dim|hidden_sizes)|dim|vision_output_dim)$", fixed(width)),
        (r"(out_hidden_size|output_dim|text_hidden_size|projector_hidden_size|query_dim|\w*proj_dims?)$", fixed(width)),
        (r"(\w+_)?(num_(attention_)?heads|attention_heads|n_heads?|encoder_attention_heads)$", fixed(HEADS)),
        (r"(\w+_)?(num_key_value_heads|num_kv_heads)$", fixed(kv_heads)),
        (r"(\w+_)?(head_dim|d_kv|kv_channels|v_head_dim|attention_head_size|dim_head|d_head)$", fixed(head_width)),
        (r"(qk_(rope|nope)_head_dim|rotary_dim)$", fixed(head_width)),
        (r"\w*lora_rank$", fixed(16)),
    )


# Smaller than the tests' texts: a window or a choice of keys that holds everything could be ignored unseen.
NARROW: tuple[Rule, ...] = (
    (r"(\w+_)?sliding_window$|local_attention$|(\w+_)?attention_chunk_size$|attention_window_size$", fixed(4)),
    (r"index_topk(_blocks)?$|index_block_size$|keep_window_size$", fixed(4)),
)
IMAGE_RULES: tuple[Rule, ...] = ((r"(pretrain_)?image_size$", fixed(IMAGE)), (r"patch_size$", fixed(8)))
STEPS: tuple[tuple[Rule, ...], ...] = (
    (*NARROW, *IMAGE_RULES, *width_rules(16, 2), *SIZE_RULES),
    (*NARROW, *width_rules(16, HEADS), *SIZE_RULES),
    (*IMAGE_RULES, *width_rules(16, 2), *SIZE_RULES),
    (*width_rules(16, 2), *SIZE_RULES),
    (*width_rules(16, HEADS), *SIZE_RULES),
    (*width_rules(64, HEADS), *SIZE_RULES),
    (*width_rules(128, 2), *SIZE_RULES),
    SIZE_RULES,
    (),
)
Choice = tuple[tuple[Rule, ...], bool]
CHOICES: tuple[Choice, ...] = tuple((rules, fill) for fill in (False, True) for rules in STEPS)


def shrunk(config_class: type[PreTrainedConfig], choice: Choice, layers: int = LAYERS) -> PreTrainedConfig:
    """A configuration of this class in which every field that a rule names is small.

    The choice is a set of rules, and whether the fields in `MISSING` that are None are given a value.

    Raises:
        Exception: whatever the class says of a combination that it does not allow.
    """
    rules, fill = choice
    return _rebuilt(config_class(), ((DEPTH, fixed(layers)), *rules) if rules else rules, layers, fill)


def _rebuilt(default: PreTrainedConfig, rules: tuple[Rule, ...], layers: int, fill: bool) -> PreTrainedConfig:
    """The same configuration with small fields, sub-configurations first."""
    changed: dict[str, Any] = {}
    usual = vars(type(default)())  # a part of a whole may have been given other values than its class starts from
    depth = default.__dict__.get("num_hidden_layers")
    for name, value in _fields(default).items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = _rebuilt(value, rules, layers, fill)
        elif isinstance(value, (bool, str)) and (name, value) in CHOSEN:
            changed[name] = CHOSEN[name, value]
        elif re.search(r"(token_id|token_index|token_ids)$", name):
            changed[name] = _token(value, len(changed))
        elif rules and isinstance(value, (list, tuple)) and _count(depth) and len(value) == depth > layers:
            changed[name] = type(value)(_small(name, value, rules)[:layers])
        elif (small := _small(name, value, rules)) != usual.get(name):
            changed[name] = small
    if fill:
        taken = {field.name for field in dataclasses.fields(default)}
        changed |= {
            n: _small(n, v, rules) for n, v in MISSING.items() if n in taken and default.__dict__.get(n) is None
        }
    return type(default)(**changed)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What the class takes, with the values that an instance without arguments has; what it derives is left out."""
    taken = {field.name for field in dataclasses.fields(config)}
    derived = {field.name for field in dataclasses.fields(config) if field.default is None}
    values = {name: config.__dict__.get(name) for name in taken}
    kept = {name: value for name, value in values.items() if name not in derived or _sub(value) or _count(value)}
    return {name: value for name, value in sorted(kept.items()) if not name.startswith("_")}


def _sub(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: Any, rules: tuple[Rule, ...]) -> Any:
    """The value under the first rule whose pattern is the whole name; lists number by number."""
    rule = next((change for pattern, change in rules if re.match(rf"(?:{pattern})", name)), None)
    if rule is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return rule(value)
    if isinstance(value, (list, tuple)) and value and all(_count(item) for item in value):
        return type(value)(rule(item) for item in value)
    return value


def _token(value: Any, place: int) -> Any:
    """A token's number inside the small vocabulary; different tokens keep different numbers where there is room."""
    if _count(value):
        return value if value < VOCABULARY // 2 else VOCABULARY - 1 - place % (VOCABULARY // 4)
    if isinstance(value, (list, tuple)):
        return type(value)(_token(item, place) for item in value)
    return value
