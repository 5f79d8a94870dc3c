"""Checks every variant on a GPU, and then measures it there: `make bench-gpu`, or `python benchmarks/bench_gpu.py`.

The check: for every variant the hidden states, the gradients of all matrices and the decoding with a cache, once with
full rows and once with padding, against the variant's readable formula in fp64 with the same weights. An error is the
norm of the difference, relative to the norm of what is right. It may be twice as large as the error of stock SDPA, or
of the variant's own readable formula, in the same dtype, whichever is larger. Short rows are among the shapes, because
there one more key changes most.
Then the table of `bench.py` follows: times and peak memory as ratios to stock.
`--device cpu` runs the same program without a GPU.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, fields
from typing import Any

import bench
import bench_models
import torch
import transformers
from bench_caches import cache_of, with_cache
from bench_figures import write
from torch import Tensor

from hf_attn_swap import describe, patch_model
from hf_attn_swap.text.table import markdown

TWICE = 2.0
DECODED = 3  # tokens that are decoded one by one
PASSES = ("forward", "gradients", "decoding")
# The gradient of sparsemax jumps where a key enters the support. Half precision rounds keys into the support or out of
# it, so that the right gradient is not near: there the gradient is left out.
JUMPING = "sparsemax"


@dataclass
class Options(bench.Options):
    """As in `bench.py`; and `dtypes` to check and measure, and the shapes (batch x length) to check."""

    models: str = "bert,llama"
    kinds: str = "forward,train,decode"
    device: str = "cuda"
    dtypes: str = "float32,bfloat16"
    checks: str = "4x12,2x130"
    out: str = "bench-gpu.json"


def built(name: str, length: int, options: Options) -> Any:
    """A stock model whose matrices are large enough that the weights of keys differ much."""
    model = bench_models.build(name, length, options.layers, options.width).to(options.device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5 * parameter.shape[1] ** -0.5 / parameter.std())
    return model


def given_to(model: str, shape: str, device: str, padded: bool) -> dict[str, Tensor]:
    """Inputs of the check. With `padded`, the first row has fewer tokens: on the left for models that generate."""
    batch, length = map(int, shape.split("x"))
    torch.manual_seed(0)
    result = bench_models.inputs(model, batch, length, device, torch.float32)
    if padded:
        mask = torch.ones(batch, length, dtype=torch.long, device=device)
        places = slice(length // 3) if model in bench_models.CAUSAL else slice(length - length // 3, None)
        mask[0, places] = 0
        result["attention_mask"] = mask
    return result


def hidden_states(model: Any, given: dict[str, Any], **words: Any) -> Tensor:
    """The last hidden states of all tokens (B,L,E), with zeros at padding. Images are given in the model's dtype."""
    given = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in given.items()}
    result: Tensor = model(**given, **words).last_hidden_state
    mask = given.get("attention_mask")
    return result if mask is None else result * mask[..., None]


def passes(model: Any, name: str, given: dict[str, Any], readable: bool) -> dict[str, Tensor]:
    """The result of each kind of pass of one model, in fp64."""
    words = {"output_attentions": True} if readable else {}
    model.zero_grad()
    heads = hidden_states(model, given, **words)
    weights = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0)).to(heads)
    (heads * weights).sum().backward()
    matrices = [
        parameter.grad for parameter in model.parameters() if parameter.dim() >= 2 and parameter.grad is not None
    ]
    gradients = torch.cat([matrix.double().flatten() for matrix in matrices])
    by_name = {"forward": heads.detach().double(), "gradients": gradients}
    if name in bench_models.CAUSAL:
        by_name["decoding"] = decoded(model, given, heads.detach(), readable)
    return by_name


@torch.no_grad()
def decoded(model: Any, given: dict[str, Any], heads: Tensor, readable: bool) -> Tensor:
    """The hidden states of the last tokens, decoded one by one; the readable formula reads all tokens at once."""
    if readable:
        return heads[:, -DECODED:].double()
    tokens, result = given["input_ids"].shape[1], []
    mask, cache, start = given.get("attention_mask"), None, 0
    for stop in range(tokens - DECODED, tokens + 1):
        words = {} if mask is None else {"attention_mask": mask[:, :stop]}
        out = model(given["input_ids"][:, start:stop], **with_cache(model, cache), use_cache=True, **words)
        cache, start = cache_of(out), stop
        result.append(out.last_hidden_state[:, -1:].double())
    return torch.cat(result[1:], 1)


def error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to the norm of `wanted`; infinite if a number is not finite."""
    result = float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny))
    return result if torch.isfinite(got).all() else float("inf")


def errors(model: Any, name: str, given: dict[str, Any], readable: bool, exact: dict[str, Tensor]) -> dict[str, float]:
    """The error of the model in each kind of pass."""
    result = passes(model, name, given, readable)
    return {kind: error(result[kind], exact[kind]) for kind in exact}


def check(name: str, shape: str, dtype: str, padded: bool, options: Options) -> list[dict[str, Any]]:
    """One row for each variant of one model: its form, and its errors as multiples of those of stock or the formula."""
    given = given_to(name, shape, options.device, padded)
    stock = built(name, int(shape.split("x")[1]), options).to(getattr(torch, dtype))
    sdpa = errors(stock, name, given, False, passes(copy.deepcopy(stock).double(), name, given, False))
    rows = []
    for variant in options.variants.split(","):
        model = patch_model(copy.deepcopy(stock), variant)
        exact = passes(copy.deepcopy(model).double(), name, given, True)
        if JUMPING in variant.split("+") and stock.dtype.itemsize < 4:
            del exact["gradients"]
        own, plain = (errors(model, name, given, readable, exact) for readable in (False, True))
        times = {kind: own[kind] / max(plain[kind], sdpa[kind]) for kind in own}
        forms = sorted({row.runs for row in describe(model).rows})
        row = {"model": name, "shape": shape, "dtype": dtype, "padded": padded, "variant": variant}
        row |= {"form": ", ".join(forms), "times": times, "equal": all(time <= TWICE for time in times.values())}
        rows.append(row)
    return rows


def checks(options: Options) -> list[dict[str, Any]]:
    """The rows of all models, shapes and dtypes, with full rows and with padding."""
    rows = []
    for dtype in options.dtypes.split(","):
        for name in options.models.split(","):
            for shape in options.checks.split(","):
                for padded in (False, True) if name != "vit" else (False,):
                    rows += check(name, shape, dtype, padded, options)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The check as a Markdown table."""
    lines = []
    for row in rows:
        where = f"{row['model']} {row['shape']}, {row['dtype']}{', padded' if row['padded'] else ''}"
        results = [f"{row['times'][kind]:.2f}" if kind in row["times"] else "" for kind in PASSES]
        lines.append([where, row["variant"], row["form"], *results, "yes" if row["equal"] else "NO"])
    text = markdown(["model, batch x length", "attention", "form", *PASSES, "equal"], lines)
    return f"Errors, as multiples of those of stock SDPA or of the readable formula in the same dtype:\n\n{text}"


def measured(options: Options, dtype: str) -> bench.Options:
    """The options of `bench.py` for one dtype."""
    taken = {field.name: getattr(options, field.name) for field in fields(bench.Options)}
    return bench.Options(**{**taken, "dtype": dtype})


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device here; run this on a machine with one, or add --device cpu.")
    torch.set_num_threads(options.threads)
    bench.refuse_unknown(options)
    rows = checks(options)
    print(table(rows), flush=True)
    times = {}
    for dtype in options.dtypes.split(","):
        times[dtype], fits = bench.run(measured(options, dtype))
        print(f"\n{dtype}\n\n{bench.tables(times[dtype], fits)}", flush=True)
    write(options.out, options, check=rows, times=times)
    if wrong := [row for row in rows if not row["equal"]]:
        names = sorted({f"{row['variant']} ({row['model']}, {row['dtype']})" for row in wrong})
        sys.exit(f"Not equal to the readable formula: {', '.join(names)}. Please report this with {options.out}.")


if __name__ == "__main__":
    main()
