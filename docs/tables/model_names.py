"""What people call a model type, and whether it has attention at all, by transformers' own classes and source."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ATTENTION = r"^class \w*Attention|MultiheadAttention|scaled_dot_product"
# How people write what a class name cannot say.
SPELLINGS = (
    (r"(?<=\d)_(?=\d)", "."),
    (r"_", " "),
    (r"(Text|Vision|Audio|Video|Encoder|Decoder)$", r", \1"),
    (r"^Deepseek(?=V\d)", "DeepSeek-"),
    (r"^Deepseek", "DeepSeek-"),
    (r"^(Gemma|Llama|Mistral|Ministral|Granite|Phi)(?=\d)", r"\1 "),
    (r"^(?:GPT|Gpt)(?=\w)", "GPT-"),
    (r"(?<= \d)(?=[A-Z][a-z])", " "),
    (r"Albert", "ALBERT"),
    (r"Roberta", "RoBERTa"),
    (r"Bert", "BERT"),
    (r"Moe", " MoE"),
    (r"Oss", "OSS"),
)


def called(model_type: str) -> str:
    """The name of a model type for readers, from the name of its configuration: "Gemma 3, text", "DeepSeek-V3"."""
    name = _config(model_type).__name__.removesuffix("Config")
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return re.sub(r", (\w)", lambda found: found[0].lower(), name).strip()


@functools.cache
def has_attention(model_type: str) -> bool:
    """False if transformers' source of this model has no class of attention, and calls none of torch's."""
    spec = importlib.util.find_spec(_config(model_type).__module__)
    if spec is None or spec.origin is None:
        return True
    sources = [path.read_text("utf-8") for path in Path(spec.origin).parent.glob("modeling_*.py")]
    return not sources or any(re.search(ATTENTION, text, re.MULTILINE) for text in sources)


def _config(model_type: str) -> type:
    config: type = CONFIG_MAPPING[model_type]
    return config
