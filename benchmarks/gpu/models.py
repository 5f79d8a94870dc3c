"""A whole LLaMA of three billion random weights in bf16 (one billion on a small card), each variant beside stock.

"prefill" reads 2,048 tokens, "decode" writes 64 behind them, "LoRA" is a training step of adapters on one text of
1,024 tokens. `convert` runs for a few steps; its peak stands beside what `hf-attn-swap convert --dry-run` counts: the
weights, the adapters, their gradients and the optimizer, without activations. The integers are those of `int8_dynamic`.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bench_figures import peak_above
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_attn_swap
from hf_attn_swap.quantization import int8_dynamic

from .layers import FEWER, STOCK, decoding
from .record import Cell
from .timing import Task, beside

VARIANTS = (
    "outeffhop",
    "belief",
    "window",
    "sink",
    "softmax",
    "gated",
    "simpletron_resl",
    "modern_hopfield",
    "clipped_softmax",
    "entmax15",
)
KINDS = ("prefill", "decode", "LoRA")
THREE = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192}
ONE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
BOTH = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
TINY |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128}
LARGE_CARD = 40e9  # bytes from which on two models of three billion weights fit, with what a training step holds
BUDGET = 1.0  # seconds of the rounds of a figure
TOKENS = {"prefill": 2048, "decode": 2048, "LoRA": 1024, "written": 64, "row": 256}
FEW = {"prefill": 24, "decode": 24, "LoRA": 24, "written": 3, "row": 24}
ROWS, CONVERTED = 120, 2048  # rows of `convert`, and the tokens that it trains on


def cells(setup: Any) -> Iterator[Cell]:
    """The variants, and `convert` after the first three."""
    for place, variant in enumerate(VARIANTS[::FEWER] if setup.dry else VARIANTS):
        if place == 3:
            for converted in ("outeffhop", "window"):
                yield Cell(f"convert, {converted}", 20, functools.partial(conversion, converted, setup))
        for kind in KINDS:
            yield Cell(f"{variant}, {kind}", 6, functools.partial(model, variant, kind, setup))


def integers(setup: Any) -> Iterator[Cell]:
    """A prefill and decoding in 8-bit integers beside bf16, and one product alone."""
    yield Cell("PyTorch's product, alone", 2, functools.partial(product, setup))
    for kind in ("prefill", "decode"):
        yield Cell(f"int8, {kind}", 10, functools.partial(model, "int8", kind, setup))


@functools.lru_cache(maxsize=2)
def built(name: str, setup: Any) -> Any:
    """The stock model, or one with the same weights: swapped, or in integers."""
    gc.collect()  # hooks and models hold each other
    if name == STOCK:
        torch.manual_seed(0)
        with torch.device(setup.device):  # random numbers are drawn there, since a CPU would take a minute
            model = AutoModelForCausalLM.from_config(config(setup), dtype=torch.bfloat16)
        return model.to(setup.device).eval()
    model = copy.deepcopy(built(STOCK, setup))
    return int8_dynamic(model) if name == "int8" else hf_attn_swap.patch_model(model, name)


def config(setup: Any) -> LlamaConfig:
    """The sizes that fit the card."""
    if setup.dry:
        return LlamaConfig(**TINY)
    large = torch.cuda.get_device_properties(0).total_memory >= LARGE_CARD
    return LlamaConfig(**BOTH, **(THREE if large else ONE))


def model(name: str, kind: str, setup: Any) -> dict[str, Any]:
    """The figures of one model beside stock."""
    tokens = FEW if setup.dry else TOKENS
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (1, tokens[kind]), device=setup.device)
    if kind == "LoRA" and importlib.util.find_spec("peft") is None:
        return {"left_out": "peft is not installed"}
    make = {"prefill": prefill, "LoRA": lora}.get(kind, functools.partial(decoding, steps=tokens["written"]))
    stock, own = (make(built(which, setup), ids) for which in (STOCK, name))
    figures = beside(kind, stock, own, setup.device, 0 if setup.dry else BUDGET)
    figures["billions"] = built(STOCK, setup).num_parameters() / 1e9
    if kind == "LoRA":
        figures |= {name: peak_above(setup.device, task()) for name, task in (("peak_mb", own), ("stock_mb", stock))}
    if name == "int8":
        figures |= {f"{label}_mb": megabytes(built(which, setup)) for label, which in (("int8", name), ("bf16", STOCK))}
    return figures


def prefill(model: Any, ids: Tensor) -> Task:
    """A pass that fills a cache, with the logits of the last token."""

    def call() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return lambda: call


def lora(model: Any, ids: Tensor) -> Task:
    """A training step of adapters on a copy of a model."""
    from peft import LoraConfig, get_peft_model

    swapped = any(".attn_swap." in name for name, _ in model.named_parameters())
    more = {"modules_to_save": ["attn_swap"]} if swapped else {}  # new parameters train as they are
    adapters = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **more)
    adapted = get_peft_model(copy.deepcopy(model), adapters).train()
    optimizer = torch.optim.AdamW([parameter for parameter in adapted.parameters() if parameter.requires_grad])

    def call() -> None:
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: call


def conversion(variant: str, setup: Any) -> dict[str, Any]:
    """Some steps of `convert`: its peak and what was counted before, in GB, and the rows of its report."""
    if importlib.util.find_spec("peft") is None:
        return {"left_out": "peft is not installed"}
    from hf_attn_swap.conversion.config import default_distil
    from hf_attn_swap_cli.dry_run import ADAM, adapter_weights

    length = (FEW if setup.dry else TOKENS)["row"]
    drawn = torch.randint(0, 100, (ROWS, length), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row} for row in drawn.tolist()]
    model = copy.deepcopy(built(STOCK, setup))
    rank = default_distil(model, variant).rank
    planned = (4 + ADAM) * adapter_weights(model, rank) / 1e9
    weights = megabytes(model) * 2**20 / 1e9
    reports = []

    def convert() -> None:
        how = {"tokens": CONVERTED, "length": length, "fit": None, "absorb": False, "progress": False}
        reports.append(hf_attn_swap.convert(model, variant, rows, **how))

    peak = peak_above(setup.device, convert) * 2**20 / 1e9
    steps = ", ".join(f"{step.name} {step.seconds:.1f} s" for step in reports[0].steps)
    return {"peak_gb": weights + peak, "counted_gb": weights + planned, "weights_gb": weights, "steps": steps}


def product(setup: Any) -> dict[str, Any]:
    """A product of integers by PyTorch beside the same one in bf16: what integers could bring."""
    rows, width = (32, 64) if setup.dry else (2048, 4096)
    x = torch.randint(-127, 128, (rows, width), device=setup.device, dtype=torch.int8)
    weight = torch.randint(-127, 128, (width, width), device=setup.device, dtype=torch.int8)
    wide = x.bfloat16(), weight.bfloat16()

    def task(function: Callable[[], Tensor]) -> Task:
        return lambda: function

    stock, own = task(lambda: F.linear(*wide)), task(lambda: torch._int_mm(x, weight.t()))
    return beside("product", stock, own, setup.device, 0 if setup.dry else BUDGET)


def megabytes(model: Any) -> float:
    """The parameters and buffers of a model in MB, each memory once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / 2**20
