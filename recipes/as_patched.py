r"""Shows what options do to a pretrained model as patched, before any training.

    python recipes/as_patched.py MODEL data/test.parquet --column text --length 512 \
        --try '{"variant": "clipped_softmax", "gamma": -0.025}' '{"variant": "clipped_softmax", "gamma": -0.00001}'
    python recipes/as_patched.py MODEL data/test.parquet --column text --length 512 --fit gain \
        --try '{"variant": "modern_hopfield", "alpha_prime": 0.1}' '{"variant": "modern_hopfield", "alpha_prime": 0.25}'
    python recipes/as_patched.py MODEL data/test.parquet --rows 12 --fit scale --try '{"variant": "belief"}'
    python recipes/as_patched.py MODEL data/test.parquet --rows 8 --fit sink --token '\n' \
        --try '{"variant": "sink"}' '{"variant": "sink+belief"}'

The first `--rows` rows are measured, and the next `--rows` rows serve the calibration. Text is joined and cut into
blocks of `--length` tokens; a column of token ids or of images is taken row by row. A causal language model gives its
perplexity. Any other model gives the relative error of its last hidden states, |h - h*| / |h*|, where h* are those of
the stock model. For `clipped_softmax`, the table also shows which share of the attention the clip cuts away, as a mean
over the layers and in the worst layer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import calibrate, scale_values
from hf_attn_swap.conversion.sink import TEXTS, Absorbed, absorb_rows
from hf_attn_swap.layer.registry import canonical_name
from hf_attn_swap.measuring.batches import read_by, token_mask
from hf_attn_swap.patch import need_installation
from hf_attn_swap.text.table import markdown, markdown_row

CAUSAL = ("ForCausalLM", "LMHeadModel")
HEADER = ("options", "cut, mean", "cut, worst layer", "result")
Batch = dict[str, torch.Tensor]


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="Name on the Hub, or folder.")
    parser.add_argument("data", help="A parquet file.")
    parser.add_argument("--column", default="text", help="The column of texts, token ids or images.")
    parser.add_argument("--length", type=int, default=512, help="Tokens per row.")
    parser.add_argument("--rows", type=int, default=4, help="Rows that are measured.")
    parser.add_argument(
        "--fit",
        choices=("gain", "map", "scale", "sink"),
        help="First calibrate on the next rows, scale the values alone, or absorb a sink.",
    )
    parser.add_argument(
        "--token",
        help="The text whose last token is the sink ('\\n' is a line break), or its number where the data are ids; "
        "without it, the next rows decide.",
    )
    parser.add_argument(
        "--try", dest="tried", nargs="+", type=json.loads, default=[], help="A variant with its options."
    )
    return parser.parse_args()


def rows_of(arguments: argparse.Namespace, count: int) -> list[Batch]:
    """The first rows of the data, one batch (1,L) or (1,C,S,S) per row.

    Raises:
        ValueError: the data have fewer rows.
    """
    data = Dataset.from_parquet(arguments.data)
    first = data[0][arguments.column]
    if isinstance(first, str):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        words = "".join(data[arguments.column])[
            : 12 * arguments.length * count
        ]  # a token has far fewer than 12 letters
        tokens = tokenizer(words, add_special_tokens=False)["input_ids"]
        cut = [
            tokens[start : start + arguments.length]
            for start in range(0, len(tokens) - arguments.length, arguments.length)
        ]
        rows = [{"input_ids": torch.tensor([block])} for block in cut[:count]]
    elif isinstance(first, list):
        rows = [{"input_ids": torch.tensor([ids[: arguments.length]])} for ids in data[:count][arguments.column]]
    else:
        processor = AutoImageProcessor.from_pretrained(arguments.model)
        images = (image.convert("RGB") for image in data[:count][arguments.column])
        rows = [{"pixel_values": processor(image, return_tensors="pt")["pixel_values"]} for image in images]
    if len(rows) < count:
        raise ValueError(f"{arguments.data} has {len(rows)} rows, but {count} are needed.")
    return rows


@torch.no_grad()
def outputs(model: Any, rows: list[Batch]) -> list[torch.Tensor]:
    """The logits (1,L,V) of a causal language model, or the last hidden states (1,L,E) of any other model."""
    return [model(**row)[0] for row in rows]


def result(logits: list[torch.Tensor], stock: list[torch.Tensor], rows: list[Batch], causal: bool) -> float:
    """The perplexity of logits, or the relative error of hidden states."""
    if causal:
        losses = [cross_entropy(out[0, :-1], row["input_ids"][0, 1:]) for out, row in zip(logits, rows, strict=True)]
        return float(torch.stack(losses).mean().exp())
    ours, theirs = torch.cat(logits, 1), torch.cat(stock, 1)
    return float((ours - theirs).norm() / theirs.norm())


def absorbed(model: Any, rows: list[Batch], arguments: argparse.Namespace) -> Absorbed:
    """Absorb a sink from rows of tokens. A column of token ids needs no tokenizer."""
    ids = isinstance(Dataset.from_parquet(arguments.data)[0][arguments.column], list)
    tokenizer = Ids(model.config) if ids else AutoTokenizer.from_pretrained(arguments.model)
    tokens = None
    if arguments.token is not None:
        tokens = tokenizer(arguments.token.replace("\\n", "\n"), add_special_tokens=False).input_ids[-1:]
    return absorb_rows(model, tokenizer, [row["input_ids"] for row in rows[:TEXTS]], tokens=tokens)


class Ids:
    """In the place of a tokenizer, where data are token ids: a text is a number, and special tokens are the model's."""

    def __init__(self, config: Any) -> None:
        ends = (config.bos_token_id, config.eos_token_id)
        self.all_special_ids = [token for token in ends if isinstance(token, int)]

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        """The number that a text is, as `input_ids`; none if it is another text."""
        return SimpleNamespace(input_ids=[int(text)] if text.isdecimal() else [])

    def decode(self, ids: list[int]) -> str:
        """The numbers."""
        return " ".join(map(str, ids))


def shown(name: str, shares: list[float], value: float) -> str:
    """One row of the table, in Markdown."""
    cut = (f"{sum(shares) / len(shares):.2%}", f"{max(shares):.2%}") if shares else ("–", "–")
    return markdown_row((name, *cut, f"{value:.4g}"))


def main() -> None:
    """Print the table: the stock model first, then every choice of options."""
    arguments = parse()
    classes = AutoConfig.from_pretrained(arguments.model).architectures or ()
    causal = any(name.endswith(CAUSAL) for name in classes)
    stock = (AutoModelForCausalLM if causal else AutoModel).from_pretrained(arguments.model, dtype=torch.float32).eval()
    rows = rows_of(arguments, 2 * arguments.rows if arguments.fit else arguments.rows)
    measured, rest = rows[: arguments.rows], rows[arguments.rows :]
    wanted = outputs(stock, measured)
    print(markdown(HEADER, []))
    print(shown("stock", [], result(wanted, wanted, measured, causal)), flush=True)
    for choice in arguments.tried or ():
        options = {name: value for name, value in choice.items() if name != "variant"}
        model = patch_model(copy.deepcopy(stock), choice["variant"], **options)
        if arguments.fit == "scale":
            print(scale_values(model, rest, progress=False), file=sys.stderr)
        elif arguments.fit == "sink":
            print(absorbed(model, rest, arguments), file=sys.stderr)
        elif arguments.fit:
            calibrate(model, rest, fit=arguments.fit, progress=False)
        shares = []
        if canonical_name(choice["variant"]) == "clipped_softmax":
            gamma = model.config.attn_swap["swaps"][0]["options"]["clipped_softmax"]["gamma"]
            shares = cut_shares(stock, measured, gamma)
        print(shown(json.dumps(choice), shares, result(outputs(model, measured), wanted, measured, causal)), flush=True)


def cut_shares(stock: Any, batches: list[Batch], gamma: float) -> list[float]:
    """What a clip with this gamma cuts of each layer's attention in the stock model, as a share of all weights.

    With zeta = 1, a weight p loses min(p, |gamma| (1 - p)). Queries that are padding do not count.
    """
    model = patch_model(copy.deepcopy(stock), "softmax").eval()
    layers = need_installation(model).layers()
    lost, whole = [0.0] * len(layers), [0.0] * len(layers)

    def watch(place: int, batch: Batch) -> Any:
        def see(name: str, weights_BHQK: torch.Tensor) -> torch.Tensor:
            if name == "probabilities":
                rows = weights_BHQK.transpose(1, 2)
                rows = rows[token_mask(batch, rows)].double()
                lost[place] += float(torch.minimum(rows, -gamma * (1 - rows)).sum())
                whole[place] += float(rows.sum())
            return weights_BHQK

        return lambda module, args: setattr(args[1], "probe", see)

    for batch in batches:
        with contextlib.ExitStack() as hooked, torch.no_grad():
            for place, layer in enumerate(layers):
                hook = watch(place, read_by(layer.site.core, batch))
                hooked.callback(layer.swap.register_forward_pre_hook(hook).remove)
            model(**batch)
    return [part / total for part, total in zip(lost, whole, strict=True) if total]


if __name__ == "__main__":
    main()
