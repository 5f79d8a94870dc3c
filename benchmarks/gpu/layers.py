"""Time and memory of attention layers with the sizes of LLaMA-8B in bf16, and of operators alone, beside stock.

Two layers nearly without a feed-forward part, one text. "train" is a forward and a backward pass, and its memory is the
peak above the model at rest. "decode" adds tokens one by one to a cache of that length. The operators read queries
(1, 32, L, 128) and keys and values (1, 8, L, 128) in causal order, and stand beside PyTorch's SDPA as it chooses its
kernel. `first_ms` is the first call: in it, kernels are loaded and built.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bench_caches import cache_of, with_cache
from bench_figures import peak_above
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModel, LlamaConfig

from hf_attn_swap import patch_model
from hf_attn_swap.functional import simple_attention
from hf_attn_swap.kernels.softmax_n import softmax_n_attention

from .record import Cell
from .timing import Task, beside

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]
STOCK = "stock"
VARIANTS = (
    "softmax",
    "outeffhop",
    "belief",
    "window",
    "sink",
    "gated",
    "simpletron_resl",
    "modern_hopfield",
    "clipped_softmax",
    "entmax15",
    "sparsemax",
)
KINDS = ("forward", "train", "decode")
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FEWER = 3  # of so many variants, one runs dry
STEPS = 8  # tokens of "decode"
BUDGET = 0.5  # seconds of the rounds of a figure


def cells(setup: Any) -> Iterator[Cell]:
    """Layers of two lengths, operators of one, layers of two other lengths, and last what has to be compiled."""

    def layers(*lengths: int) -> Iterator[Cell]:
        variants = VARIANTS[::FEWER] if setup.dry else VARIANTS
        for length, variant, kind in itertools.product(lengths, variants, KINDS):
            work = functools.partial(layer, variant, length, kind, setup)
            yield Cell(f"{variant}, {length} tokens, {kind}", 3 if length < 20_000 else 8, work)

    def operators(names: Iterable[str], length: int, seconds: float) -> Iterator[Cell]:
        for name, kind in itertools.product(names, ("forward", "train")):
            work = functools.partial(operator, name, length, kind, setup)
            yield Cell(f"{name} alone, {length} tokens, {kind}", seconds, work)

    quick = [name for name in OPERATORS if name != COMPILED]
    if setup.dry:
        yield from (*layers(24), *operators(quick, 24, 1))
        return
    yield from (*layers(4096, 32768), *operators(quick, 16384, 2))
    yield from (*layers(1024, 16384), *operators([COMPILED], 16384, 45))


@functools.lru_cache(maxsize=2)
def built(variant: str, setup: Any) -> Any:
    """The stock layers, or swapped ones with the same weights."""
    gc.collect()  # hooks and models hold each other
    if variant != STOCK:
        return patch_model(copy.deepcopy(built(STOCK, setup)), variant)
    sizes = TINY if setup.dry else SIZES
    more = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 2**16}
    torch.manual_seed(0)
    model = AutoModel.from_config(LlamaConfig(**sizes, **more, use_cache=False))
    return model.to(setup.device, torch.bfloat16).eval()


def layer(variant: str, length: int, kind: str, setup: Any) -> dict[str, Any]:
    """The figures of one variant."""
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (1, length), device=setup.device)
    make = {"forward": forward, "train": training, "decode": decoding}[kind]
    stock, own = (make(built(name, setup), ids) for name in (STOCK, variant))
    figures = beside(kind, stock, own, setup.device, 0.0 if setup.dry else BUDGET)
    if kind == "train":
        for model in (built(STOCK, setup), built(variant, setup)):
            model.zero_grad()
        figures |= {name: peak_above(setup.device, task()) for name, task in (("peak_mb", own), ("stock_mb", stock))}
    return figures


def forward(model: Any, ids: Tensor) -> Task:
    """A forward pass without gradients."""

    def call() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    return lambda: call


def training(model: Any, ids: Tensor) -> Task:
    """A forward and a backward pass."""

    def call() -> None:
        model(input_ids=ids).last_hidden_state.square().mean().backward()
        model.zero_grad()

    return lambda: call


def decoding(model: Any, ids: Tensor, steps: int = STEPS) -> Task:
    """So many tokens, one by one, onto a copy of a cache."""
    with torch.no_grad():
        filled = cache_of(model(input_ids=ids, use_cache=True))

    def task() -> Callable[[], None]:
        cache = copy.deepcopy(filled)
        return functools.partial(steps_onto, model, cache, ids[:, -1:], steps)

    return task


@torch.no_grad()
def steps_onto(model: Any, cache: Any, token: Tensor, steps: int) -> None:
    """Decode the same token again and again; the cache grows."""
    for _ in range(steps):
        model(input_ids=token, **with_cache(model, cache), use_cache=True)


def sdpa(*kernel: SDPBackend) -> Operator:
    """PyTorch's SDPA, by this kernel if one is named."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(list(kernel)) if kernel else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def softmax_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax_1 by the log-sum-exp of a stock kernel."""
    heads = softmax_n_attention(q, k, v, None, True, q.shape[-1] ** -0.5, 1.0)
    if heads is None:
        raise RuntimeError("no kernel takes these tensors")
    return heads


def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as many as queries."""
    groups = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention as reordered products."""
    return simple_attention(*repeated(q, k, v), causal=True)


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention of the package flash-linear-attention, which has the heads behind the tokens."""
    from fla.ops.linear_attn import chunk_linear_attn

    three = (tensor.transpose(1, 2).contiguous() for tensor in repeated(q, k, v))
    heads: Tensor = chunk_linear_attn(*three, scale=1.0, normalize=False)[0]
    return heads.transpose(1, 2)


@functools.cache
def compiled(length: int, device: str) -> Operator:
    """softmax_1 by FlexAttention and its log-sum-exp, compiled for one length."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return heads * torch.sigmoid(lse)[..., None].to(heads.dtype)

    return torch.compile(attend, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `compiled`."""
    return compiled(q.shape[2], q.device.type)(q, k, v)


COMPILED = "softmax_1 by FlexAttention"
OPERATORS: dict[str, Operator] = {
    "SDPA": sdpa(),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA memory-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "softmax_1": softmax_1,
    "linear": linear,
    "linear by fla": fla,
    COMPILED: flex,
}


def operator(name: str, length: int, kind: str, setup: Any) -> dict[str, Any]:
    """The figures of one operator; SDPA's row says which kernel PyTorch chose."""
    sizes = TINY if setup.dry else SIZES
    heads, groups, width = (sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    torch.manual_seed(0)
    shapes = ((1, count, length, width) for count in (heads, groups, groups))
    q, k, v = (torch.randn(shape).to(setup.device, torch.bfloat16) for shape in shapes)
    grad, train = torch.ones_like(q), kind == "train"
    for tensor in (q, k, v):
        tensor.requires_grad_(train)

    def task(function: Operator) -> Task:
        def call() -> None:
            out = function(q, k, v)
            if train:
                torch.autograd.grad(out, (q, k, v), grad)

        return lambda: call

    stock, own = (task(OPERATORS[operator_name]) for operator_name in ("SDPA", name))
    try:
        figures = beside(kind, stock, own, setup.device, 0 if setup.dry else BUDGET)
    except ImportError as missing:
        return {"left_out": f"{missing.name} is not installed"}
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
            raise
        return {"left_out": "PyTorch's kernel does not take these tensors"}
    if name == "SDPA":
        chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        figures["kernel"] = SDPBackend(chosen).name
    return figures
