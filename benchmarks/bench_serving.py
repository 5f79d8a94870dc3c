r"""`generate` on long contexts, several texts at once: a stock LLaMA beside a hybrid whose other layers are linear.

    python benchmarks/bench_serving.py --layers 13 --linear 10 --context 16384 --batch 8

Both models have the shape of SmolLM2-135M, fewer layers, and random weights; speed and memory do not depend on the
values of the weights. One text is read in pieces, and its cache is copied for every text of the batch. Then both models
generate the same number of tokens in turn, in random order; the result is the median of the rounds' ratios with its
bootstrap 95 % interval. The memory is that of the weights and of the cache at the end.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from bench_caches import with_cache
from bench_decode import CHUNK, megabytes
from bench_figures import summary, write
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.text.table import markdown

KIND = "generate"
NAMES = ("stock", "hybrid")
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
VOCABULARY = 49152


@dataclass
class Options:
    """What to measure."""

    layers: int = field(default=13, metadata={"help": "Layers of both models."})
    linear: int = field(default=10, metadata={"help": "Layers of the hybrid with linear attention, spread evenly."})
    variant: str = "simpletron_resl"
    context: int = 16384
    batch: int = 8
    tokens: int = field(default=8, metadata={"help": "Tokens that a round generates for each text."})
    rounds: int = 9
    threads: int = 1
    dtype: str = "float32"
    vocabulary: int = VOCABULARY
    out: str = "bench-serving.json"


def chosen(layers: int, linear: int) -> list[int]:
    """The numbers of the linear layers; the layers with softmax lie evenly between them."""
    softmax = {round((place + 0.5) * layers / (layers - linear) - 0.5) for place in range(layers - linear)}
    return [layer for layer in range(layers) if layer not in softmax]


def build(name: str, options: Options) -> Any:
    """One of the two models."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMOLLM2,
        num_hidden_layers=options.layers,
        vocab_size=options.vocabulary,
        max_position_embeddings=2 * options.context,
        tie_word_embeddings=True,
        dtype=options.dtype,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    if name == "hybrid":
        patch_model(model, options.variant, layers=chosen(options.layers, options.linear))
    return model


def read(model: Any, ids: Tensor, batch: int) -> DynamicCache:
    """Read one text in pieces, all but its last token, and copy its cache for every text of the batch."""
    cache = DynamicCache(config=model.config)
    for piece in tqdm(ids[:, :-1].split(CHUNK, dim=1), desc="reading", unit="piece"):
        model(input_ids=piece, **with_cache(model, cache), use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    return cache


def weights(model: Any) -> float:
    """The memory of the weights in MB."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20


@torch.no_grad()
def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    models = {name: build(name, options) for name in NAMES}
    text = torch.randint(0, options.vocabulary, (1, options.context))
    caches = {name: read(model, text, options.batch) for name, model in models.items()}
    texts = dict.fromkeys(NAMES, text.expand(options.batch, -1))
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in tqdm(range(-1, options.rounds), desc="generating", unit="round"):
        for name in random.sample(NAMES, len(NAMES)):
            cache = with_cache(models[name], caches[name])
            start = time.perf_counter()
            texts[name] = models[name].generate(
                texts[name],
                attention_mask=torch.ones_like(texts[name]),
                **cache,
                max_new_tokens=options.tokens,
                do_sample=False,
                pad_token_id=0,
            )
            times[name] += [time.perf_counter() - start] if turn >= 0 else []
    rows = []
    for name, model in models.items():
        measured = summary(KIND, times[name], times["stock"])
        rate = 1e3 * options.batch * options.tokens / measured[f"{KIND}_ms"]
        memory = {"weights_mb": weights(model), "cache_mb": megabytes(caches[name])}
        rows.append({"model": name, "tokens_per_second": rate, **measured, **memory})
    write(options.out, options, rows=rows)
    lines = [
        [row["model"], *(f"{row[key]:.3g}" for key in ("tokens_per_second", KIND, "weights_mb", "cache_mb"))]
        for row in rows
    ]
    print(markdown(["model", "tokens per second", "time, stock = 1", "weights, MB", "cache, MB"], lines))


if __name__ == "__main__":
    main()
