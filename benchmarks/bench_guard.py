r"""What the checks around each swapped attention cost: a token is decoded with them and without them, in turn.

    python benchmarks/bench_guard.py --variant belief

After every call of a swapped attention, `hooks.after_call` checks that the attention function was asked; before every
pass, `hooks.KeepNext` keeps our hooks next to the forward. One of two equal models loses both hooks here, and nothing
else. The model has the sizes of SmolLM2-135M and random weights: the cost does not depend on the values of the weights.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from typing import Any

import torch
import transformers
from bench_caches import cache_of, with_cache
from bench_figures import cell, summary
from torch import nn

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.text.table import markdown
from hf_attn_swap.wiring import hooks

NAMES = ("without", "with", "without again")
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SIZES |= {"num_key_value_heads": 3, "vocab_size": 1024, "max_position_embeddings": 8192}
KIND = "decode"


def without_checks(model: nn.Module) -> nn.Module:
    """The same model, whose modules lose the hooks that check."""
    for module in model.modules():
        for held in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in list(held.items()):
                if hook is hooks.after_call or isinstance(hook, hooks.KeepNext):
                    del held[number]
    return model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="belief", choices=list_variants())
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: Any = patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval(), options.variant)
    models = {name: copy.deepcopy(model) if name == "with" else without_checks(copy.deepcopy(model)) for name in NAMES}
    ids = torch.randint(0, SIZES["vocab_size"], (1, options.context))
    caches = {name: cache_of(each(input_ids=ids, use_cache=True)) for name, each in models.items()}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-5, options.rounds):
        for name in random.sample(NAMES, len(NAMES)):
            words = with_cache(models[name], caches[name])
            start = time.perf_counter()
            models[name](input_ids=ids[:, :1], **words, use_cache=True)
            times[name] += [time.perf_counter() - start] if turn >= 0 else []
    rows = {name: summary(KIND, times[name], times["without"]) for name in NAMES}
    print(
        markdown(["checks", "a token"], [[name, cell(row, KIND, first=name == NAMES[0])] for name, row in rows.items()])
    )


if __name__ == "__main__":
    main()
