r"""What 8 bits cost a pretrained causal language model as machines run them: with a sink, smoothed, both, neither.

    python recipes/eight_bits.py MODEL --ranges data/wikitext-2/validation.parquet data/ag_news/train.parquet \
        --texts data/wikitext-2/test.parquet data/tinyshakespeare/test.parquet data/imdb/test.parquet

Nothing is trained, unless `--tokens` says so: then the model in full precision, with the sink, teaches the rounded
model (its norms and its sink train), on the blocks of `--ranges` behind those that give the ranges. `--rows` blocks of
`--length` tokens of each file of `--ranges` choose the sink's token (unless `--token` names it), the scales of the
channels and the 8-bit ranges. The first `--rows` blocks of each file of `--texts` are measured. The table has
perplexities, and their ratios to the stock model in full precision with a paired 95 % interval (bootstrap of blocks of
64 tokens).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from as_patched import Batch, absorbed, rows_of  # as_patched.py lies beside this recipe
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.conversion import DistillationTrainer, smooth
from hf_attn_swap.quantization import fake_w8a8, input_ranges, machine_w8a8, straight_through
from hf_attn_swap.text.table import markdown, markdown_row
from hf_attn_swap.training.metrics import FUNCTIONS, paired_interval

BLOCK = 64  # tokens that a bootstrap draws together
PROTOCOLS = {"machine": machine_w8a8, "papers": fake_w8a8}
Losses = list[list[float]]  # of each text, token by token


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="Name on the Hub, or folder.")
    parser.add_argument("--texts", nargs="+", required=True, help="Parquet files that are measured.")
    parser.add_argument("--ranges", nargs="+", required=True, help="Parquet files that choose ranges and scales.")
    parser.add_argument("--column", default="text", help="The column of texts or token ids.")
    parser.add_argument("--length", type=int, default=512, help="Tokens per block.")
    parser.add_argument("--rows", type=int, default=8, help="Blocks of each file.")
    parser.add_argument("--token", help="The text whose last token is the sink. '\\n' is a line break.")
    parser.add_argument("--alpha", type=float, help="Of the smoothing; without it, a search for each place.")
    parser.add_argument("--tokens", type=int, default=0, help="Tokens of a training with rounding.")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="Of this training.")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="machine", help="What is rounded.")
    given = parser.parse_args()
    if given.tokens and given.protocol != "machine":
        parser.error("--tokens trains and measures as machines round; leave out --protocol.")
    return given


@torch.no_grad()
def losses(model: Any, texts: list[list[Batch]]) -> Losses:
    """The losses of all predicted tokens, text by text."""
    found = []
    for rows in texts:
        each = [cross_entropy(model(**row)[0][0, :-1], row["input_ids"][0, 1:], reduction="none") for row in rows]
        found.append(torch.cat(each).tolist())
    return found


def trained(model: Any, ranges: list[Batch], texts: list[list[Batch]], given: argparse.Namespace) -> Losses:
    """The losses in 8 bits after the model before the rounding taught the rounded one, on blocks without ranges."""
    each = given.tokens // given.length // len(given.ranges)
    kinds = [
        rows_of(argparse.Namespace(**vars(given), data=path), given.rows + each)[given.rows :] for path in given.ranges
    ]
    rows = [{"input_ids": row["input_ids"][0]} for several in zip(*kinds, strict=True) for row in several]
    teacher = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder, straight_through(model, input_ranges(model, ranges)):
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            num_train_epochs=1,
            learning_rate=given.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            weight_decay=0.0,
            logging_steps=10,
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        )
        trainer = DistillationTrainer(model, args, teacher=teacher, trainable=("vectors", "swap"), train_dataset=rows)
        with contextlib.redirect_stdout(sys.stderr):  # the table alone goes to the output
            trainer.train()
        return losses(model.eval(), texts)


def shown(name: str, ours: Losses, stock: Losses) -> str:
    """One row of the table, in Markdown."""
    cells = []
    for own, other in zip(ours, stock, strict=True):
        difference = [one - two for one, two in zip(own, other, strict=True)]
        zeros = [0.0] * len(difference)  # their perplexity is 1, so the difference of the metric is the ratio less 1
        mean, low, high = paired_interval("perplexity", [difference], [zeros], zeros, block=min(BLOCK, len(zeros) // 2))
        value = FUNCTIONS["perplexity"](zeros, own)
        cells.append(f"{value:.2f} = {1 + mean:.3f} ({1 + low:.3f} to {1 + high:.3f})")
    return markdown_row((name, *cells))


def main() -> None:
    """Print the table, row by row."""
    given = parse()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    texts, chosen = (
        [rows_of(argparse.Namespace(**vars(given), data=path), given.rows) for path in paths]
        for paths in (given.texts, given.ranges)
    )
    ranges = [row for rows in zip(*chosen, strict=True) for row in rows]  # held-out rows come from every file

    def in_8_bits() -> Losses:
        with PROTOCOLS[given.protocol](model, ranges):
            return losses(model, texts)

    stock = losses(model, texts)
    names = [f"{path.parent.name}/{path.stem}" for path in map(Path, given.texts)]
    print(markdown(("", *names), []))
    print(shown("stock, full precision", stock, stock), flush=True)
    print(shown("stock, 8 bits", in_8_bits(), stock), flush=True)
    print(smooth(patch_model(model, "softmax"), ranges, given.alpha, progress=False), file=sys.stderr)
    print(shown("smoothed, 8 bits", in_8_bits(), stock), flush=True)
    patch_model(unpatch_model(model), "sink")
    print(absorbed(model, ranges, given), file=sys.stderr)
    print(shown("sink, full precision", losses(model, texts), stock), flush=True)
    print(shown("sink, 8 bits", in_8_bits(), stock), flush=True)
    print(smooth(model, ranges, given.alpha, progress=False), file=sys.stderr)
    print(shown("sink, smoothed, 8 bits", in_8_bits(), stock), flush=True)
    if given.tokens:
        print(shown("sink, smoothed, trained, 8 bits", trained(model, ranges, texts, given), stock), flush=True)


if __name__ == "__main__":
    main()
