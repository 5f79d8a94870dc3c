"""Is every variant right on the GPU? Forward, gradients and decoding, against the readable form in fp64 on the CPU.

A figure is three errors: of the form that runs on the GPU; of the readable form in the same dtype on the CPU; and of
the stock model on the GPU, against the stock model in fp64. An error is the norm of the difference, relative to the
norm of what is right. The first may be `TIMES` as large as the larger of the other two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from bench_caches import cache_of, with_cache
from torch import Tensor
from transformers import AutoConfig, AutoModel

from hf_attn_swap import describe, list_variants, patch_model
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.functional import softmax_n
from hf_attn_swap.kernels.softmax_n import softmax_n_attention
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.layer.swap import Swap

from .record import Cell

TIMES = 3.0
CAUSAL = ("gpt2", "llama", "opt")
DECODED, REAL = 3, 9  # tokens that are decoded one by one, and tokens of the padded row
# Sizes with heads of width 64 in place of those of the tiny models; an image has 17 x 17 patches.
TEXT = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}
WIDE: dict[str, dict[str, int]] = {
    "albert": TEXT,
    "bert": TEXT,
    "gpt2": {"n_embd": 256, "n_positions": 256},
    "llama": TEXT,
    "opt": {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "max_position_embeddings": 256},
    "vit": {"hidden_size": 256, "intermediate_size": 512, "image_size": 68},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, dict(tiny_options(name))) for name in list_variants()},
    "window of 16, one whole head": ("window", {"window": 16, "full_heads": (0,)}),
    "window+outeffhop": ("window+outeffhop", {"window": {"window": 16}}),
    "sink of a score and a value": ("sink", {"kind": "score_value"}),
    "sink of two pairs+outeffhop": ("sink+outeffhop", {"sink": {"tokens": 2}}),
    "outeffhop+gated": ("outeffhop+gated", {}),
    "outeffhop+clipped_softmax": ("outeffhop+clipped_softmax", {}),
    "modern_hopfield+belief": ("modern_hopfield+belief", {}),
    "modern_hopfield, low memory": ("modern_hopfield", {"memory": "low"}),
}
CASES = (
    ("float32", "plain"),
    ("bfloat16", "plain"),
    ("bfloat16", "padded"),
    ("float32", "padded"),
    ("autocast", "plain"),
    ("bfloat16", "strength 0.5"),
    ("float32", "strength 0.5"),
)
# The gradient of sparsemax jumps where a key enters the support, and half precision rounds keys into it and out of it.
JUMPING = "sparsemax"


def cells(setup: Any) -> Iterator[Cell]:
    """A cell per dtype, case, family and variant; on a CPU a few that have all of them in turn."""
    for dtype in ("bfloat16", "float32"):
        yield Cell(f"dropped weights, {dtype}", 3, functools.partial(dropped, dtype, setup.device))
    every = [
        (dtype, case, family, name)
        for dtype, case in CASES
        for family in WIDE
        for name in VARIANTS
        if not (family == "vit" and case == "padded")
    ]
    for dtype, case, family, name in every[:: 29 if setup.dry else 1]:
        work = functools.partial(check, dtype, case, family, name, setup)
        yield Cell(f"{family}, {name}, {dtype}, {case}", 1, work)


@functools.lru_cache(maxsize=1)
def built(family: str, dtype: str, setup: Any) -> Any:
    """A stock model whose matrices are large enough that the weights of keys differ much."""
    sizes = dict(next(kind.tiny for kind in FAMILIES.values() if kind.name == family))
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(family, **(sizes if setup.dry else sizes | WIDE[family])))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5 * parameter.shape[1] ** -0.5 / parameter.std())
    return model.to(setup.device, torch.bfloat16 if dtype == "bfloat16" else torch.float32).eval()


def given_to(family: str, case: str, setup: Any) -> dict[str, Tensor]:
    """Inputs on the CPU. "padded" leaves few tokens in the first row, on the right for models that generate."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        side = 16 if setup.dry else WIDE["vit"]["image_size"]
        return {"pixel_values": torch.randn(2, 3, side, side, generator=generator).bfloat16().float()}
    ids = torch.randint(4, 64, (2, 14 if setup.dry else 130), generator=generator)
    if case != "padded":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, slice(-REAL) if family in CAUSAL else slice(REAL, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def moved(model: Any) -> Any:
    """The model with its new parameters away from their start, where many variants are ordinary attention."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for swap in (module for module in model.modules() if isinstance(module, Swap)):
            for parameter in swap.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def check(dtype: str, case: str, family: str, name: str, setup: Any) -> dict[str, Any]:
    """The figures of one cell."""
    stock, given = built(family, dtype, setup), given_to(family, case, setup)
    variant, options = VARIANTS[name]
    model = patch_model(copy.deepcopy(stock), variant, strength=0.5 if "0.5" in case else 1.0, **options)
    moved(model)
    forms = ", ".join(sorted({row.runs for row in describe(model).rows}))
    one_by_one = family in CAUSAL and case in ("plain", "padded") and dtype != "autocast"
    half = dtype == "autocast"
    exact = passes(copy.deepcopy(model).cpu().double(), given, True, False, one_by_one)
    plain = passes(copy.deepcopy(model).cpu(), given, True, half, one_by_one)
    own = passes(model, given, False, half, one_by_one)
    control = stock_errors(family, dtype, case, setup, one_by_one)
    figures: dict[str, Any] = {"right": True, "form": forms}
    for kind in exact:
        if JUMPING in variant and dtype != "float32" and "gradients" in kind:
            continue
        both = error(plain[kind], exact[kind]), control.get(kind, 0.0)
        figures[kind] = (error(own[kind], exact[kind]), *both)
        figures["right"] &= figures[kind][0] <= TIMES * max(both)
    return figures


@functools.lru_cache(maxsize=1)
def stock_errors(family: str, dtype: str, case: str, setup: Any, one_by_one: bool) -> dict[str, float]:
    """The errors of the stock model on the device."""
    stock, given = built(family, dtype, setup), given_to(family, case, setup)
    exact = passes(copy.deepcopy(stock).cpu().double(), given, False, False, one_by_one)
    own = passes(stock, given, False, dtype == "autocast", one_by_one)
    return {kind: error(own[kind], exact[kind]) for kind in exact}


def passes(model: Any, given: dict[str, Tensor], readable: bool, autocast: bool, one_by_one: bool) -> dict[str, Tensor]:
    """What one model gives, in fp64 on the CPU: hidden states, the gradients of matrices and of new parameters.

    With `one_by_one`, also the last hidden states, decoded with a cache; the readable form reads all tokens at once.
    """
    device = model.device
    given = {name: x.to(device, model.dtype if x.is_floating_point() else None) for name, x in given.items()}
    model.zero_grad()
    with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
        states = hidden_states(model, given, **({"output_attentions": True} if readable else {}))
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).bfloat16()  # exact in every dtype
    (states * weights.to(states)).sum().backward()
    grads = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    result = {
        "forward": wide(states),
        "gradients": torch.cat([wide(grad).flatten() for name, grad in grads if grad.dim() > 1]),
    }
    if new := [wide(grad).flatten() for name, grad in grads if ".attn_swap." in name]:
        result["gradients of new parameters"] = torch.cat(new)
    if one_by_one:
        result["decoding"] = wide(states)[:, -DECODED:] if readable else decoded(model, given)
    return result


def hidden_states(model: Any, given: dict[str, Tensor], **words: Any) -> Tensor:
    """The last hidden states of all tokens (B,L,E), with zeros at padding."""
    states: Tensor = model(**given, **words).last_hidden_state
    mask = given.get("attention_mask")
    return states if mask is None else states * mask[..., None]


@torch.no_grad()
def decoded(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The hidden states of the last tokens, decoded one by one."""
    tokens, result, cache, start = given["input_ids"].shape[1], [], None, 0
    for stop in range(tokens - DECODED, tokens + 1):
        words = {name: mask[:, :stop] for name, mask in given.items() if name == "attention_mask"}
        out = model(given["input_ids"][:, start:stop], **with_cache(model, cache), use_cache=True, **words)
        cache, start = cache_of(out), stop
        result.append(wide(out.last_hidden_state[:, -1:]))
    return torch.cat(result[1:], 1)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in fp64 on the CPU."""
    return tensor.detach().cpu().double()


def error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to the norm of `wanted`; infinite if a number is not finite."""
    result = float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny))
    return result if math.isfinite(result) else math.inf


def dropped(dtype: str, device: str) -> dict[str, Any]:
    """Dropout of weights inside a fused kernel: the heads show what was dropped, because the values are the identity.

    On a CPU no kernel drops weights, so nothing is dropped there.
    """
    rate, length, width = (0.4, 48, 64) if device == "cuda" else (0.0, 48, 64)
    torch.manual_seed(0)
    drawn = torch.randn(3, 2, 4, length, width).to(device, getattr(torch, dtype))
    q, k, grad = drawn.clone()
    v = torch.eye(length, width, device=device, dtype=q.dtype).expand(2, 4, -1, -1).contiguous()
    three = [tensor.requires_grad_() for tensor in (q, k, v)]
    heads = softmax_n_attention(*three, None, False, width**-0.5, 1.0, rate)
    if heads is None:
        raise RuntimeError("no kernel takes these tensors")
    heads.backward(grad)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in three]
    read = softmax_n(exact[0] @ exact[1].mT * width**-0.5)
    kept = (wide(heads)[..., :length] != 0).double() / (1 - rate)
    wanted = (read * kept) @ exact[2]
    wanted.backward(wide(grad))
    pairs = {"forward": (wide(heads), wanted.detach())}
    pairs |= {f"gradient of {n}": (wide(a.grad), b.grad) for n, a, b in zip("qkv", three, exact, strict=True)}
    errors = {name: error(*pair) for name, pair in pairs.items()}
    share = 1 - float(kept.mean()) * (1 - rate)
    near = all(one <= (1e-4 if dtype == "float32" else 3e-2) for one in errors.values())
    return {"right": near and abs(share - rate) < 0.02, "share dropped": share, **errors}
