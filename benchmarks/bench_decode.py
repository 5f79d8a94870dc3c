r"""Decodes one token at a time onto long contexts: a stock model beside a converted one, or one that is only swapped.

    python benchmarks/bench_decode.py --model HuggingFaceTB/SmolLM2-135M-Instruct --converted my-hybrid
    python benchmarks/bench_decode.py --model HuggingFaceTB/SmolLM2-135M-Instruct --variant simpletron_resl \
        --layers 0-21

Both models read the same random tokens. At each context both decode the same tokens in turn, in random order; the
result is the median of the rounds' ratios with its bootstrap 95 % interval. The memory of a cache is the sum of its
tensors. Speed and memory do not depend on the values of the weights, so a swap without a conversion has the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from bench_caches import cache_of, with_cache
from bench_figures import cell, summary, write
from bench_models import CLOCKS
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.text.table import markdown
from hf_attn_swap.text.typed import parse_layers

KIND = "decode"
NAMES = ("stock", "converted")
CHUNK = 1024  # tokens of the context that are read at once


@dataclass
class Options:
    """What to measure."""

    model: str = field(metadata={"help": "The stock model: a name on the Hub, or a folder."})
    converted: str = field(default="", metadata={"help": "A converted model; or leave it out, and name a variant."})
    variant: str = "simpletron_resl"
    variant_options: str = field(default="{}", metadata={"help": "Options of the variant, as JSON."})
    layers: str = field(default="", metadata={"help": 'Layers to swap, such as "0-21"; all if left out.'})
    contexts: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    batch: int = 1
    rounds: int = 15
    threads: int = 2
    clock: str = field(default="wall", metadata={"help": '"processor" for one thread on a machine with other work.'})
    dtype: str = "float32"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    out: str = "bench-decode.json"


def load(name: str, options: Options) -> Any:
    """One of the two models, in eval mode."""
    source = options.converted if name == "converted" and options.converted else options.model
    model = AutoModelForCausalLM.from_pretrained(source, dtype=options.dtype).to(options.device).eval()
    if name == "converted" and not options.converted:
        more = json.loads(options.variant_options)
        patch_model(model, options.variant, layers=parse_layers(options.layers or None), **more)
    return model


def seconds(model: Any, ids: Tensor, cache: Any, clock: str) -> float:
    """Seconds of one pass that extends the cache."""
    words, now = with_cache(model, cache), CLOCKS[clock]
    start = now()
    model(input_ids=ids, **words, use_cache=True, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return now() - start


def megabytes(cache: Any) -> float:
    """The memory of all tensors of a cache, also of those inside the state of linear attention."""
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors(cache.layers)}
    return sum(sizes.values()) / 2**20


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside an object, its lists and the objects of this package and of transformers that it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif type(value).__module__.startswith(("hf_attn_swap", "transformers")) and hasattr(value, "__dict__"):
        yield from tensors(list(vars(value).values()))


@torch.no_grad()
def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    models = {name: load(name, options) for name in NAMES}
    caches: dict[str, Any] = dict.fromkeys(NAMES)
    rows: list[dict[str, Any]] = []
    vocabulary, read = models["stock"].config.vocab_size, 0
    for context in sorted(options.contexts):
        while read < context:
            size = min(CHUNK, context - read)
            ids = torch.randint(0, vocabulary, (options.batch, size), device=options.device)
            for name, model in models.items():
                out = model(input_ids=ids, **with_cache(model, caches[name]), use_cache=True, logits_to_keep=1)
                caches[name] = cache_of(out)
            read += size
        sizes = {name: megabytes(cache) for name, cache in caches.items()}
        times: dict[str, list[float]] = {name: [] for name in NAMES}
        for turn in tqdm(range(-2, options.rounds), desc=f"context {context}", unit="token"):
            ids = torch.randint(0, vocabulary, (options.batch, 1), device=options.device)
            for name in random.sample(NAMES, len(NAMES)):
                taken = seconds(models[name], ids, caches[name], options.clock)
                times[name] += [taken] if turn >= 0 else []
            read += 1
        for name in NAMES:
            measured = summary(KIND, times[name], times["stock"])
            rows.append({"context": context, "model": name, **measured, "cache_mb": sizes[name]})
    write(options.out, options, rows=rows)
    lines = [
        [str(row["context"]), row["model"], cell(row, KIND, first=row["model"] == "stock"), f"{row['cache_mb']:.2f} MB"]
        for row in rows
    ]
    print(markdown(["context", "model", "a token", "cache"], lines))


if __name__ == "__main__":
    main()
