r"""What 8 bits cost a pretrained model as it is, with smoothed channels, with a sink, with both, and rotated.

    python recipes/eight_bits.py MODEL --ranges data/wikitext-2/validation.parquet data/ag_news/train.parquet \
        --texts data/wikitext-2/test.parquet data/tinyshakespeare/test.parquet data/imdb/test.parquet
    python recipes/eight_bits.py runs/ag_news/softmax/seed-0/model --ranges data/ag_news/train.parquet \
        --texts data/ag_news/test.parquet --length 32 --rows 1000 --batch 32
    python recipes/eight_bits.py runs/cifar10/softmax/seed-0/model --ranges data/cifar10/train.parquet \
        --texts data/cifar10/test.parquet --column img --rows 500 --batch 32

A causal language model reads `--rows` blocks of `--length` tokens of each file, and is measured by perplexity. A
classifier of texts or images reads the first `--rows` rows with their labels, and is measured by accuracy. The files of
`--ranges` choose the sink's token (unless `--token` names it), the scales of the channels and the 8-bit ranges. Those
of `--texts` are measured. `--protocol machine` rounds what integer kernels read, `--protocol papers` every sum and
output.

Nothing is trained, unless `--tokens` says so: then a language model in full precision, with the sink, teaches the
rounded model (its norms and its sink train), on the blocks of `--ranges` behind those that give the ranges. By the
papers' protocol it trains without smoothed channels: a weight has one step there, which uneven columns make coarse.

`--rotate` adds the rows of the model with a rotated residual stream, as it is and with a sink; they begin at the stock
model again.

The table has the metric, beside it its ratio (of perplexities) or its difference (of accuracies, in points) to the
stock model in full precision with a paired 95 % interval (bootstrap of blocks of 64 tokens, or of rows), and the
largest number that any norm reads, its token and the norm: the residual stream, before a norm of post-norm models
shrinks it. Tokens are counted from 0: [CLS] or the class token is token 0, and token n of an image is its patch n.
`--figures` writes the same into a file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from as_patched import Batch, absorbed, rows_of  # as_patched.py lies beside this recipe
from datasets import Dataset
from rotate import rotate  # beside this recipe, too
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
)

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.analysis.largest import Largest
from hf_attn_swap.conversion import DistillationTrainer, smooth
from hf_attn_swap.layer.smoothing import Smoothing
from hf_attn_swap.measuring.batches import token_mask, without_labels
from hf_attn_swap.patch import need_installation
from hf_attn_swap.publish.results import versions
from hf_attn_swap.quantization import fake_w8a8, input_ranges, machine_w8a8, straight_through
from hf_attn_swap.quantization.places import is_norm
from hf_attn_swap.text.table import markdown, markdown_row
from hf_attn_swap.training.metrics import FUNCTIONS, paired_interval

BLOCK = 64  # tokens that a bootstrap draws together
PROTOCOLS = {"machine": machine_w8a8, "papers": fake_w8a8}
CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForImageClassification": AutoModelForImageClassification,
}


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="Name on the Hub, or folder.")
    parser.add_argument("--texts", nargs="+", required=True, help="Parquet files that are measured.")
    parser.add_argument("--ranges", nargs="+", required=True, help="Parquet files that choose ranges and scales.")
    parser.add_argument("--column", default="text", help="The column of texts, token ids or images.")
    parser.add_argument("--label", default="label", help="The column of labels, for classifiers.")
    parser.add_argument("--length", type=int, default=512, help="Tokens per block, or at most per row of a classifier.")
    parser.add_argument("--rows", type=int, default=8, help="Blocks or rows of each file.")
    parser.add_argument("--range-rows", type=int, help="The same for files of --ranges; without it, --rows.")
    parser.add_argument("--batch", type=int, default=1, help="Rows of a classifier at once.")
    parser.add_argument("--token", help="The text whose last token is the sink, as in as_patched.py.")
    parser.add_argument("--alpha", type=float, help="Of the smoothing; without it, a search for each place.")
    parser.add_argument("--rotate", action="store_true", help="Also with a rotated residual stream.")
    parser.add_argument("--tokens", type=int, default=0, help="Tokens of a training with rounding.")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="Of this training.")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="machine", help="What is rounded.")
    parser.add_argument("--figures", type=Path, help="A file for the figures, as JSON.")
    parser.add_argument("--name", help="The model's name in this file.")
    arguments = parser.parse_args()
    arguments.range_rows = arguments.range_rows or arguments.rows
    return arguments


@dataclass(kw_only=True)
class Measured:
    """What a model gives on the files that are measured.

    Attributes:
        values: of each file, the losses of its tokens, or for a classifier 1 for each row that is right and 0 else.
        largest: the largest number that a norm reads.
        norm: the path of this norm.
    """

    values: list[list[float]]
    largest: Largest
    norm: str


@torch.no_grad()
def measure(model: Any, texts: list[list[Batch]]) -> Measured:
    """Run the model on all files."""
    measured = Measured(values=[], largest=Largest(), norm="")
    now: Batch = {}

    def watch(path: str) -> Any:
        def hook(norm: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if args[0].dim() == 3:  # norms of queries and keys read heads
                largest = measured.largest.or_larger(args[0], token_mask(now, args[0]), now.get("input_ids"))
                if largest is not measured.largest:
                    measured.largest, measured.norm = largest, path

        return hook

    with contextlib.ExitStack() as hooked:
        for path, norm in model.named_modules():
            if is_norm(norm):
                hooked.callback(norm.register_forward_pre_hook(watch(path)).remove)
        for rows in texts:
            values: list[float] = []
            for now in rows:
                values += _values(model(**without_labels(now)).logits, now)
            measured.values.append(values)
    return measured


def _values(logits: torch.Tensor, row: Batch) -> list[float]:
    """The losses of the next tokens, or whether the classes are right."""
    if "labels" in row:
        return [float(right) for right in logits.argmax(-1) == row["labels"]]
    losses: list[float] = cross_entropy(logits[0, :-1], row["input_ids"][0, 1:], reduction="none").tolist()
    return losses


def labelled(arguments: argparse.Namespace, path: str, count: int) -> list[Batch]:
    """The first rows of a file with their labels, in batches.

    Raises:
        ValueError: the file has fewer rows.
    """
    data = Dataset.from_parquet(path)
    if len(data) < count:
        raise ValueError(f"{path} has {len(data)} rows, but {count} are needed.")
    words = isinstance(data[0][arguments.column], str)
    processor = (AutoTokenizer if words else AutoImageProcessor).from_pretrained(arguments.model)
    batches = []
    for start in range(0, count, arguments.batch):
        some = data[start : min(start + arguments.batch, count)]
        if words:
            batch = processor(
                list(some[arguments.column]),
                truncation=True,
                max_length=arguments.length,
                padding=True,
                return_tensors="pt",
            )
        else:
            batch = processor([image.convert("RGB") for image in some[arguments.column]], return_tensors="pt")
        batches.append({**batch, "labels": torch.tensor(some[arguments.label])})
    return batches


def trained(model: Any, ranges: list[Batch], texts: list[list[Batch]], arguments: argparse.Namespace) -> Measured:
    """What the model in 8 bits gives after the model before the rounding taught it, on blocks without ranges."""
    count = arguments.tokens // arguments.length // len(arguments.ranges)
    kinds = [
        rows_of(argparse.Namespace(**vars(arguments), data=path), arguments.range_rows + count)[arguments.range_rows :]
        for path in arguments.ranges
    ]
    rows = [{"input_ids": row["input_ids"][0]} for several in zip(*kinds, strict=True) for row in several]
    teacher = copy.deepcopy(model)
    if arguments.protocol == "machine":
        rounding: Any = straight_through(model, input_ranges(model, ranges))
    else:
        rounding = fake_w8a8(model, ranges, gradients=True)
    with tempfile.TemporaryDirectory() as folder, rounding:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            num_train_epochs=1,
            learning_rate=arguments.learning_rate,
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
        return measure(model.eval(), texts)


class Table:
    """Prints one row for each state of the model, and keeps the figures for a file.

    Args:
        arguments: the arguments.
        stock: what the stock model gives in full precision.
        words: tokens by their ids.
        metric: "perplexity" or "accuracy".
    """

    def __init__(self, arguments: argparse.Namespace, stock: Measured, words: dict[int, str], metric: str) -> None:
        self.arguments = arguments
        self.names = [short(path) for path in arguments.texts]
        self.stock = stock
        self.words = words
        self.metric = metric
        self.runs: dict[str, Any] = {}
        print(markdown(("", *self.names, "largest input of a norm"), []))

    def add(self, name: str, ours: Measured) -> None:
        """Print a row, and write the file anew."""
        figures = [self._figures(*pair) for pair in zip(ours.values, self.stock.values, strict=True)]
        word = self.words.get(ours.largest.token) if ours.largest.token is not None else None
        self.runs[name] = {
            "figures": dict(zip(self.names, figures, strict=True)),
            "largest": {**asdict(ours.largest), "word": word, "norm": ours.norm},
        }
        largest = f"{ours.largest.of(self.words)}, {ours.norm}"
        print(markdown_row((name, *map(self._cell, figures), largest)), flush=True)
        if self.arguments.figures is not None:
            self._write(self.arguments.figures)

    def _figures(self, own: list[float], stock: list[float]) -> tuple[float, float, float, float]:
        """The metric; and its ratio or its difference to the stock model's, with the interval."""
        if self.metric == "accuracy":
            truth = [1.0] * len(own)
            value = FUNCTIONS[self.metric](truth, own)
            return value, *paired_interval(self.metric, [own], [stock], truth)
        difference = [one - two for one, two in zip(own, stock, strict=True)]
        zeros = [0.0] * len(difference)  # their perplexity is 1, so the difference of the metric is the ratio less 1
        block = min(BLOCK, len(zeros) // 2)
        mean, low, high = paired_interval(self.metric, [difference], [zeros], zeros, block=block)
        return FUNCTIONS[self.metric](zeros, own), 1 + mean, 1 + low, 1 + high

    def _cell(self, figures: tuple[float, float, float, float]) -> str:
        value, mean, low, high = figures
        if self.metric == "accuracy":
            return f"{100 * value:.1f}, {100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        return f"{value:.2f} = {mean:.3f} ({low:.3f} to {high:.3f})"

    def _write(self, path: Path) -> None:
        about = {
            "name": self.arguments.name or Path(self.arguments.model).name,
            "metric": self.metric,
            "versions": versions(),
        }
        for name in ("protocol", "length", "rows", "range_rows", "batch", "tokens"):
            about[name] = getattr(self.arguments, name)
        about["ranges"] = list(map(short, self.arguments.ranges))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**about, "runs": self.runs}, indent=1) + "\n", encoding="utf-8")


def short(path: str) -> str:
    """The name of a file in a table: its folder and its own name."""
    return f"{Path(path).parent.name}/{Path(path).stem}"


def smoothed(model: Any, ranges: list[Batch], arguments: argparse.Namespace) -> bool:
    """Smooth the channels of a patched model. False, with the reason on stderr, if no place is free."""
    try:
        print(smooth(model, ranges, arguments.alpha, progress=False), file=sys.stderr)
    except ValueError as problem:
        print(f"Nothing is smoothed: {problem}", file=sys.stderr)
        return False
    return True


def rotated(model: Any, ranges: list[Batch]) -> bool:
    """Rotate the residual stream of a stock model. False, with the reason on stderr, if it cannot be rotated."""
    try:
        print(f"Rotated; relative error of the outputs: {rotate(model, ranges):.1e}.", file=sys.stderr)
    except ValueError as problem:
        print(f"Nothing is rotated: {problem}", file=sys.stderr)
        return False
    return True


def with_sink(model: Any, ranges: list[Batch], arguments: argparse.Namespace) -> bool:
    """Put an absorbed sink into the model. False, with the reason on stderr, if none can stand there."""
    patch_model(model, "sink")
    try:
        if "input_ids" not in ranges[0]:
            raise ValueError("a sink is a token before a text, and this model reads none.")
        print(absorbed(model, ranges, argparse.Namespace(**vars(arguments), data=arguments.ranges[0])), file=sys.stderr)
    except ValueError as problem:
        print(f"There is no sink: {problem}", file=sys.stderr)
        return False
    return True


def words_of(texts: list[list[Batch]], arguments: argparse.Namespace) -> dict[int, str]:
    """The tokens of texts as words, by their ids. Data of token ids have none."""
    if not isinstance(Dataset.from_parquet(arguments.texts[0])[0][arguments.column], str):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = {int(token) for rows in texts for row in rows for token in row["input_ids"].unique()}
    return {token: tokenizer.decode([token]) for token in ids}


def main() -> None:
    """Print the table, row by row."""
    arguments = parse()
    kind = (AutoConfig.from_pretrained(arguments.model).architectures or [""])[0]
    auto = next((auto for end, auto in CLASSIFIERS.items() if kind.endswith(end)), AutoModelForCausalLM)
    causal = auto is AutoModelForCausalLM
    if arguments.tokens and not causal:
        raise SystemExit("error: --tokens trains language models alone; leave it out.")

    def loaded() -> Any:
        """The stock model. The control of a study has a swap that computes what the stock model computes."""
        model = auto.from_pretrained(arguments.model, dtype=torch.float32).eval()
        return unpatch_model(model) if hasattr(model.config, "attn_swap") else model

    def read(path: str, count: int) -> list[Batch]:
        return (
            rows_of(argparse.Namespace(**vars(arguments), data=path), count)
            if causal
            else labelled(arguments, path, count)
        )

    texts = [read(path, arguments.rows) for path in arguments.texts]
    several = [read(path, arguments.range_rows) for path in arguments.ranges]
    ranges = [row for rows in zip(*several, strict=True) for row in rows]  # held-out rows come from every file

    def in_8_bits(model: Any) -> Measured:
        with PROTOCOLS[arguments.protocol](model, ranges):
            return measure(model, texts)

    model = loaded()
    stock = measure(model, texts)
    table = Table(arguments, stock, words_of(texts, arguments), "perplexity" if causal else "accuracy")
    table.add("stock, full precision", stock)
    table.add("stock, 8 bits", in_8_bits(model))
    patch_model(model, "softmax")
    if smoothed(model, ranges, arguments):
        table.add("smoothed, 8 bits", in_8_bits(model))
    unpatch_model(model)
    if with_sink(model, ranges, arguments):
        table.add("sink, full precision", measure(model, texts))
        table.add("sink, 8 bits", in_8_bits(model))
        if smoothed(model, ranges, arguments):
            table.add("sink, smoothed, 8 bits", in_8_bits(model))
        if arguments.tokens:
            name = "sink, smoothed, trained, 8 bits"
            if (
                arguments.protocol == "papers"
            ):  # with one step for a whole weight, uneven columns cost more than channels
                need_installation(model).drop(Smoothing.name)
                name = "sink, trained, 8 bits"
            table.add(name, trained(model, ranges, texts, arguments))
    if arguments.rotate and rotated(model := loaded(), ranges):
        table.add("rotated, 8 bits", in_8_bits(model))
        if with_sink(model, ranges, arguments):
            table.add("rotated, sink, 8 bits", in_8_bits(model))


if __name__ == "__main__":
    main()
