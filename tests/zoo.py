"""Tiny random models of every architecture the tests use, and inputs for them; no network, no global randomness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_attn_swap.doctor import matter
from hf_attn_swap.families import FAMILIES as _REGISTERED

VOCABULARY, HIDDEN, LAYERS, HEADS = 64, 32, 3, 4

ENCODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=48,
    max_position_embeddings=64,
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
TOKENS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
GROUPED = dict(**ENCODER, **TOKENS, num_key_value_heads=2)
IMAGE = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, image_size=16, patch_size=4)


@dataclass(frozen=True)
class Spec:
    """One architecture: its config, its classes by head, and what it reads."""

    config: str
    arguments: dict[str, Any]
    heads: dict[str, str]
    kind: str = "encoder"
    extra: dict[str, Any] = field(default_factory=dict)


def _text(name: str, lm: str = "ForMaskedLM") -> dict[str, str]:
    heads = {"base": "Model", "lm": lm, "classification": "ForSequenceClassification"}
    heads |= {"token": "ForTokenClassification", "qa": "ForQuestionAnswering"}
    return {head: name + suffix for head, suffix in heads.items()}


def _decoder(name: str) -> dict[str, str]:
    return _text(name, "ForCausalLM")


def _vision(name: str) -> dict[str, str]:
    return {"classification": f"{name}ForImageClassification", "base": f"{name}Model"}


_TINY = {family.name: dict(family.tiny) for family in _REGISTERED.values()}
_DISTIL = dict(vocab_size=VOCABULARY, dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, hidden_dim=48)
_DISTIL |= dict(max_position_embeddings=64, dropout=0.0, attention_dropout=0.0)
_WHISPER = dict(
    vocab_size=VOCABULARY, d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS
)
_WHISPER |= dict(decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, dropout=0.0)
_WHISPER |= dict(max_source_positions=10, max_target_positions=32, decoder_start_token_id=3, suppress_tokens=None)
_WHISPER |= dict(begin_suppress_tokens=None, **TOKENS)
_T5 = dict(vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0)
_T5 |= dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
_MODERN = dict(**ENCODER, **TOKENS, local_attention=8, cls_token_id=0, sep_token_id=1)
_SMALL = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN)
_MPT = dict(vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=HEADS, max_seq_len=64)
_NEOX_LIKE = dict(**ENCODER, **TOKENS)

SPECS: dict[str, Spec] = {
    "albert": Spec("AlbertConfig", _TINY["albert"], _text("Albert")),
    "bert": Spec("BertConfig", _TINY["bert"], _text("Bert")),
    "gpt2": Spec("GPT2Config", _TINY["gpt2"], _text("GPT2", "LMHeadModel"), "causal"),
    "opt": Spec("OPTConfig", _TINY["opt"], {k: v for k, v in _decoder("OPT").items() if k != "token"}, "causal"),
    "llama": Spec("LlamaConfig", _TINY["llama"], _decoder("Llama"), "causal"),
    "vit": Spec("ViTConfig", _TINY["vit"], _vision("ViT"), "image"),
    "roberta": Spec("RobertaConfig", ENCODER | NO_DROPOUT | dict(pad_token_id=1), _text("Roberta")),
    "distilbert": Spec("DistilBertConfig", _DISTIL, _text("DistilBert")),
    "electra": Spec("ElectraConfig", ENCODER | NO_DROPOUT | dict(embedding_size=16), _text("Electra")),
    "deit": Spec("DeiTConfig", IMAGE | NO_DROPOUT | dict(intermediate_size=48, num_labels=3), _vision("DeiT"), "image"),
    "dinov2": Spec("Dinov2Config", IMAGE | NO_DROPOUT | dict(mlp_ratio=2, num_labels=3), _vision("Dinov2"), "image"),
    "mistral": Spec("MistralConfig", GROUPED | dict(sliding_window=6), _decoder("Mistral"), "causal"),
    "qwen2": Spec("Qwen2Config", GROUPED, _decoder("Qwen2"), "causal"),
    "qwen3": Spec("Qwen3Config", GROUPED | dict(head_dim=16), _decoder("Qwen3"), "causal"),
    "gemma": Spec("GemmaConfig", GROUPED | dict(num_key_value_heads=1, head_dim=8), _decoder("Gemma"), "causal"),
    "gpt_neox": Spec("GPTNeoXConfig", _NEOX_LIKE, _decoder("GPTNeoX"), "causal"),
    "modernbert": Spec("ModernBertConfig", _MODERN, _text("ModernBert")),
    "whisper": Spec("WhisperConfig", _WHISPER, {"lm": "WhisperForConditionalGeneration"}, "speech"),
    "clip_vision": Spec("CLIPVisionConfig", IMAGE | dict(intermediate_size=48), {"base": "CLIPVisionModel"}, "image"),
    "gemma2": Spec("Gemma2Config", GROUPED | dict(head_dim=8, sliding_window=6), _decoder("Gemma2"), "causal"),
    "t5": Spec("T5Config", _T5, {"lm": "T5ForConditionalGeneration"}, "seq2seq"),
    "bert_cross": Spec(
        "BertConfig",
        ENCODER | NO_DROPOUT | dict(is_decoder=True, add_cross_attention=True),
        {"lm": "BertLMHeadModel"},
        "causal",
        {"encoder_hidden_states": (5, HIDDEN)},
    ),
    "bloom": Spec("BloomConfig", _SMALL | dict(n_layer=2, n_head=HEADS), {"base": "BloomModel"}, "causal"),
    "falcon": Spec(
        "FalconConfig", _SMALL | dict(num_hidden_layers=2, num_attention_heads=HEADS), {"base": "FalconModel"}, "causal"
    ),
    "mpt": Spec("MptConfig", _MPT, {"base": "MptModel"}, "causal"),
}
FAMILIES = tuple(sorted(family.name for family in _REGISTERED.values()))
GENERIC = (
    "roberta",
    "distilbert",
    "electra",
    "deit",
    "dinov2",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gpt_neox",
    "modernbert",
    "whisper",
    "clip_vision",
)
UNSWAPPABLE = ("bloom", "falcon", "mpt")
CAUSAL = tuple(name for name, spec in SPECS.items() if spec.kind == "causal")
DEFAULT_HEAD = ("lm", "classification", "base")


class WideNorm(nn.Module):
    """An RMSNorm that computes in its input's dtype: the stock ones round to fp32 even in a float64 model."""

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + getattr(self, "variance_epsilon", 1e-6))
        weight = self.weight + 1 if "Gemma" in self.stock_class.__name__ else self.weight
        return hidden * scale * weight


def heads(name: str) -> tuple[str, ...]:
    """The heads that `build` knows for this architecture."""
    return tuple(head for head, cls in SPECS[name].heads.items() if hasattr(T, cls))


def build(name: str, dtype: torch.dtype = torch.float32, head: str | None = None, **config: Any) -> PreTrainedModel:
    """A deterministic tiny model in evaluation mode; the global generator is left alone."""
    spec = SPECS[name]
    head = head or next(h for h in DEFAULT_HEAD if h in spec.heads)
    settings = getattr(T, spec.config)(**(spec.arguments | config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(T, spec.heads[head])(settings)
        matter(model)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                stock = type(module)
                module.__class__ = _wide(stock)
    return model.to(dtype).eval()


_WIDE: dict[type, type] = {}


def _wide(stock: type) -> type:
    if stock not in _WIDE:
        _WIDE[stock] = type(stock.__name__, (WideNorm,), {"stock_class": stock})
    return _WIDE[stock]


def inputs(
    name: str,
    batch: int = 2,
    length: int = 7,
    padded: str | None = None,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Inputs of one architecture; `padded` pads the first row by two tokens."""
    generator = torch.Generator().manual_seed(seed)
    spec = SPECS[name]
    ids = torch.randint(4, VOCABULARY, (batch, length), generator=generator)
    if spec.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator, dtype=dtype)}
    if spec.kind == "speech":
        features = torch.randn(batch, 8, 20, generator=generator, dtype=dtype)
        return {"input_features": features, "decoder_input_ids": ids}
    given: dict[str, Tensor] = {"input_ids": ids}
    if padded is not None:
        mask = torch.ones_like(ids)
        mask[0, slice(-2, None) if padded == "right" else slice(2)] = 0
        given["attention_mask"] = mask
    if spec.kind == "seq2seq":
        given["decoder_input_ids"] = ids[:, :5]
    for key, shape in spec.extra.items():
        given[key] = torch.randn(batch, *shape, generator=generator, dtype=dtype)
    return given


def output(result: Any) -> Tensor:
    """The tensor that tests compare."""
    for name in ("logits", "start_logits", "prediction_outputs", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            tensor: Tensor = getattr(result, name)
            return tensor
    raise AssertionError(f"{type(result).__name__} has nothing to compare")
