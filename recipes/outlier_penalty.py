"""Takes the outliers out of a pretrained classifier of texts: it teaches itself under a penalty on large activations.

    python recipes/outlier_penalty.py runs/ag_news/softmax/seed-0/model data/ag_news/train.parquet OUT
    python recipes/eight_bits.py OUT --ranges data/ag_news/train.parquet --texts data/ag_news/test.parquet \
        --length 32 --rows 1000 --range-rows 256 --batch 32 --protocol papers

The model as it came is the teacher, and labels are not read. Beside the distance to the teacher (logits, and the last
hidden states) the loss has the mean of (a / `--scale`)^4 over what the norms read, the sums of the residual stream:

    loss = KL + ||h - h*||^2 / ||h*||^2 + `--weight` * mean over norms, tokens and channels of (a / scale)^4

TWEO (2025) trains with such a penalty from random weights on; this is the same after the fact. All weights but the
embeddings and the head train. With `--weight 0` the model is its own teacher without a penalty, and stays as it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)

from hf_attn_swap import patch_model, unpatch_model
from hf_attn_swap.conversion import DistillationTrainer, Losses
from hf_attn_swap.measuring.batches import token_mask
from hf_attn_swap.quantization.places import is_norm


class Penalized(DistillationTrainer):
    """A distillation whose loss has the mean fourth power of what the norms of the student read as one more term."""

    def __init__(self, model: nn.Module, *args: Any, weight: float, scale: float, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.weight, self.scale = weight, scale
        self.read: list[Tensor] = []
        model.register_forward_pre_hook(lambda *_: self.read.clear())
        for module in model.modules():
            if is_norm(module):
                module.register_forward_pre_hook(self._reads)

    def _reads(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].dim() == 3:  # norms of queries and keys read heads
            self.read.append(args[0])

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of the distillation and the penalty of a batch, (), over its real tokens."""
        loss = super().compute_loss(model, inputs)
        if not self.weight:
            return loss
        real_BL = token_mask(inputs, self.read[0])
        penalties = [(read_BLE[real_BL] / self.scale).pow(4).mean() for read_BLE in self.read]
        return loss + self.weight * torch.stack(penalties).mean()


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="Name on the Hub, or folder, of a classifier of texts.")
    parser.add_argument("texts", help="A parquet file.")
    parser.add_argument("out", type=Path, help="Folder for the model.")
    parser.add_argument("--column", default="text", help="The column of the texts.")
    parser.add_argument("--length", type=int, default=32, help="Tokens of a text at most.")
    parser.add_argument("--rows", type=int, default=7680, help="Texts that are read, in an order of the seed.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--weight", type=float, default=1.0, help="Of the penalty.")
    parser.add_argument("--scale", type=float, default=10.0, help="Activations above it cost much.")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    set_seed(arguments.seed)
    student, teacher = (load(arguments.model) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = Dataset.from_parquet(arguments.texts).shuffle(seed=arguments.seed)
    rows = [
        tokenizer(text, truncation=True, max_length=arguments.length)
        for text in texts[: arguments.rows][arguments.column]
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Penalized(
            patch_model(student, "softmax"),  # stock attention: only the penalty changes the model
            TrainingArguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=arguments.batch,
                learning_rate=arguments.learning_rate,
                warmup_steps=0.1,
                logging_steps=20,
                save_strategy="no",
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to="none",
                seed=arguments.seed,
            ),
            teacher=teacher,
            losses=Losses(hidden=1.0, hidden_layers="last"),
            weight=arguments.weight,
            scale=arguments.scale,
            trainable="body",
            train_dataset=rows,
            data_collator=DataCollatorWithPadding(tokenizer),
        )
        trainer.train()
    unpatch_model(student)
    student.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"{arguments.out}: {len(rows):,} texts, seed {arguments.seed}", file=sys.stderr)


def load(path: str) -> Any:
    """The model in float32, with its own attention."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    return unpatch_model(model) if hasattr(model.config, "attn_swap") else model


if __name__ == "__main__":
    main()
