r"""Time, memory and tokens of a causal model in real 8-bit integers, beside fp32 and bf16.

    python benchmarks/bench_integers.py --model HuggingFaceTB/SmolLM2-135M --text valid.txt --sink

The ranges come from the first tokens of the text, and the prompts from what follows. All models read the same tokens in
turn, in random order; a result is the median of the rounds' ratios to fp32 with its bootstrap 95 % interval. A prefill
gives the logits of the last token, as `generate` asks for them. On a busy machine --clock processor counts the seconds
of this process on the processors instead of the time that passed.

"Same tokens" is the share of greedy steps at which the integers choose the token that the fake quantisation chose: the
same model with inputs rounded by PyTorch's own fake quantisation and exact sums in fp64 continues the prompts greedily,
and the integers read each of its tokens. The sums must be exact: where they differ by 1e-7, some input is rounded to
its other neighbour, which is a difference of a whole step, and a few layers later all inputs differ.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_caches import cache_of, with_cache
from bench_figures import cell, summary, write
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import absorb_sink
from hf_attn_swap.quantization import Int8Linear, input_ranges, int8_static
from hf_attn_swap.text.table import markdown

NAMES = ("fp32", "bf16", "int8, fp32 elsewhere", "int8, bf16 elsewhere")
BATCH = 8  # prompts that are continued at once


@dataclass
class Options:
    """What to measure."""

    model: str = field(metadata={"help": "The model: a name on the Hub, or a folder."})
    text: str = field(metadata={"help": "A text file."})
    sink: bool = field(default=False, metadata={"help": "Absorb the attention sink first."})
    calibration: int = field(default=4096, metadata={"help": "Tokens of the text that give the ranges."})
    lengths: list[int] = field(default_factory=lambda: [512, 2048])
    rounds: int = 11
    threads: int = 1
    clock: str = field(default="wall", metadata={"choices": ["wall", "processor"]})
    prompts: int = field(default=32, metadata={"help": "Prompts that are continued greedily."})
    prompt: int = field(default=64, metadata={"help": "Tokens of a prompt."})
    steps: int = field(default=64, metadata={"help": "Tokens that are appended to a prompt."})
    out: str = "bench-integers.json"


class Faked(nn.Module):
    """A Linear in fake quantisation: inputs rounded by PyTorch's own function, exact sums in fp64."""

    def __init__(self, integers: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers.weight.double(), requires_grad=False)
        self.bias, self.steps = integers.bias, integers.weight_scale.flatten()
        self.step, self.zero = float(integers.input_scale), int(integers.input_zero_point) + 128

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        rounded = torch.fake_quantize_per_tensor_affine(x, self.step, self.zero, 0, 255).double() / self.step
        y = nn.functional.linear(rounded.round(), self.weight).float() * (self.steps * self.step)
        return y if self.bias is None else y + self.bias


def fake(model: Any) -> Any:
    """A model of integers in fake quantisation."""
    made = copy.deepcopy(model)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Int8Linear):
                setattr(parent, name, Faked(child))
    return made


def megabytes(model: Any) -> dict[str, float]:
    """The memory of the model's parts in MB: the Linears of its layers, and its embeddings and head."""
    head = {id(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    linears = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear | Int8Linear) and id(module.weight) not in head
    ]
    sizes = {id(t): t.nbytes for module in linears for t in (*module.parameters(), *module.buffers())}
    whole = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return {
        "linears_mb": sum(sizes.values()) / 2**20,
        "embeddings_mb": sum(whole[each] for each in head) / 2**20,
        "model_mb": sum(whole.values()) / 2**20,
    }


def read(model: Any, ids: Tensor, **words: Any) -> Any:
    """A pass that fills or extends a cache, with the logits of the last token."""
    return model(input_ids=ids, **words, use_cache=True, logits_to_keep=1)


def rounds(kind: str, runs: dict[str, Callable[[], Any]], rows: dict[str, dict[str, Any]], options: Options) -> None:
    """Time every model in turn, and write the results into the rows."""
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in tqdm(range(-1, options.rounds), desc=kind, unit="round"):
        for name in random.sample(list(runs), len(runs)):
            start = clock()
            runs[name]()
            times[name] += [clock() - start] if turn >= 0 else []
    for name in runs:
        rows[name] |= summary(kind, times[name], times["fp32"])


def same_tokens(faked: Any, integers: Any, prompts: Tensor, steps: int) -> float:
    """The share of greedy steps of the fake quantisation at which the integers choose the same token."""
    same = []
    for batch in prompts.split(BATCH):
        outs = [read(model, batch) for model in (faked, integers)]
        for _ in range(steps):
            wanted, chosen = (out.logits[:, -1:].argmax(-1) for out in outs)
            same.append((chosen == wanted).float())
            outs = [
                read(model, wanted, **with_cache(model, cache_of(out)))
                for model, out in zip((faked, integers), outs, strict=True)
            ]
    return float(torch.cat(same).mean())


def table(rows: dict[str, dict[str, Any]], kinds: list[str]) -> str:
    """The results as a table in markdown."""
    lines = []
    for name, row in rows.items():
        times = [cell(row, kind, first=name == "fp32") for kind in kinds]
        share = f"{row['same_tokens']:.2%}" if "same_tokens" in row else ""
        sizes = [f"{row[size]:.0f} MB" for size in ("linears_mb", "embeddings_mb", "model_mb")]
        lines.append([name, *times, *sizes, share])
    return markdown(["model", *kinds, "Linears", "embeddings", "all", "same tokens"], lines)


@torch.no_grad()
def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")
    models = {
        name: AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    if options.sink:
        results = [absorb_sink(patch_model(model, "sink"), tokenizer, [text]) for model in models.values()]
        print(results[0])
    ids = torch.tensor(tokenizer(text).input_ids)
    longest = min(max(options.lengths), options.calibration)
    rows_to_fit, rest = ids[: options.calibration], ids[options.calibration :]
    ranges = input_ranges(models["fp32"], [{"input_ids": row[None]} for row in rows_to_fit.split(min(longest, 512))])
    for name in ("fp32", "bf16"):
        models[f"int8, {name} elsewhere"] = int8_static(copy.deepcopy(models[name]), ranges)
    rows = {name: megabytes(models[name]) for name in NAMES}
    kinds = [*(f"prefill {length}" for length in options.lengths), "a token"]
    for kind, length in zip(kinds, options.lengths, strict=False):
        part = rest[None, :length]
        rounds(kind, {name: partial(read, model, part) for name, model in models.items()}, rows, options)
    caches = {name: cache_of(read(model, rest[None, : options.lengths[0]])) for name, model in models.items()}
    token = rest[None, :1]
    rounds(
        kinds[-1],
        {name: partial(read, m, token, **with_cache(m, caches[name])) for name, m in models.items()},
        rows,
        options,
    )
    integers = models["int8, fp32 elsewhere"]
    prompts = rest[: options.prompts * options.prompt].view(options.prompts, options.prompt)
    rows["int8, fp32 elsewhere"]["same_tokens"] = same_tokens(fake(integers), integers, prompts, options.steps)
    write(options.out, options, rows=rows)
    print(table(rows, kinds))


if __name__ == "__main__":
    main()
