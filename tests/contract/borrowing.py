"""The architectures of transformers whose upper layers take keys and values from lower layers, small."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_attn_swap.doctor import matter

KINDS = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, sliding_window=32
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0)
SIZES |= dict(layer_types=2 * KINDS, num_kv_shared_layers=2, bos_token_id=1, eos_token_id=2)
FURTHER: dict[str, Any] = dict(global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)
FURTHER |= dict(laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4, num_global_key_value_heads=2)


def _fields(name: str) -> set[str]:
    return set(CONFIG_MAPPING[name]().to_dict()) if "gemma" in name and "text" in name else set()


NAMES = [
    name
    for name in sorted(CONFIG_MAPPING.keys())
    if "num_kv_shared_layers" in _fields(name) and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING
]
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def build(name: str) -> Any:
    config: PreTrainedConfig = CONFIG_MAPPING[name](
        **SIZES, **{key: value for key, value in FURTHER.items() if key in _fields(name)}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        matter(model)
    return model.double().eval()
