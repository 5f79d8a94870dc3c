"""Trains a causal or masked language model with a swapped attention, and the softmax control beside it.

    hf-attn-swap train language-modeling wikitext2 --variant belief
    hf-attn-swap train language-modeling wikitext2 --objective masked --model_name_or_path roberta-base
    hf-attn-swap train language-modeling scratch_gpt2 --variant outeffhop

The text is cut into blocks of `--max_seq_length` tokens. The metric is the perplexity on held-out blocks. It is
measured twice: when the attention is swapped and nothing is fitted or trained (`perplexity_before`), and at the end.
Beside it stand KL to the pretrained model, the share of tokens with the same first choice, and, with `--other_dataset`,
the perplexity on text of another kind than the text of the conversion.
With `--from_scratch`, `--model_name_or_path` names a model or an architecture ("gpt2", "opt", "llama"), and
`--config_overrides` changes its sizes. `--tokenizer_name bytes` needs no files.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    default_data_collator,
)

from ...conversion.rows import is_blank, token_ids
from ...measuring.lost import lost
from ...text.bar import bar
from .. import (
    About,
    ModelArguments,
    ScratchArguments,
    Task,
    TextDataArguments,
    launch,
    load_rows,
    load_splits,
    made_of,
    scratch_config,
)

FIGURE_BLOCKS = 16  # held-out blocks for KL, agreement and the other text
TOKENS = "input_ids"  # a column of token ids, which no tokenizer has to read
AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}


@dataclass(kw_only=True)
class RecipeArguments(ScratchArguments):
    """Arguments of this recipe alone."""

    objective: str = field(default="causal", metadata={"help": '"causal" or "masked".'})
    train_tokens: int | None = field(default=None, metadata={"help": "Tokens to train on; all if left out."})
    train_length: int | None = field(
        default=None, metadata={"help": "Tokens per block to train on; --max_seq_length, which measures, if left out."}
    )
    test_tokens: int | None = field(default=None, metadata={"help": "Tokens to measure on; all if left out."})
    tokenizer_name: str | None = field(default=None, metadata={"help": '"bytes" or a model; needs --from_scratch.'})
    other_dataset: str | None = field(
        default=None,
        metadata={"help": "Text of another kind, to measure on too: a name on the Hub, a folder or a file."},
    )

    def __post_init__(self) -> None:
        if self.objective not in AUTO:
            raise ValueError(f"objective must be one of {', '.join(AUTO)}, got {self.objective!r}.")
        if not self.from_scratch and (self.tokenizer_name or self.config_overrides != "{}"):
            raise ValueError("--tokenizer_name and --config_overrides need --from_scratch: weights fit one vocabulary.")


def blocks(split: Dataset, column: str, tokenizer: Any, length: int, tokens: int | None) -> list[list[int]]:
    """Join the texts to one stream of tokens, and cut the stream into whole blocks. Rows of token ids are blocks."""
    wanted = None if tokens is None else -(-tokens // length) * length
    if column == TOKENS:
        rows = [list(row[:length]) for row in split[column] if len(row) >= length]
        return rows if wanted is None else rows[: wanted // length]
    texts = (text for text in split[column] if not is_blank(text))
    ids = itertools.chain.from_iterable(ids for text in texts for ids in token_ids(text, tokenizer))
    stream = list(itertools.islice(ids, wanted))
    rows = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    if not rows:
        raise ValueError(f"the text has {len(stream)} tokens, less than one block of {length} (--max_seq_length).")
    return rows


def figures(
    trainer: Any, test: Dataset, load: Callable[[], Any], own: RecipeArguments, other: Dataset | None, shift: int
) -> dict[str, float]:
    """KL to the pretrained model and agreement with it, on the first held-out blocks; and perplexity on other text."""
    model, first = trainer.model.eval(), test.select(range(min(FIGURE_BLOCKS, len(test))))
    measured: dict[str, float] = {}
    if not own.from_scratch:
        batches = ({"input_ids": torch.tensor([row["input_ids"]])} for row in first)
        compared = lost(model, batches, stock=load())
        assert compared.divergence is not None
        assert compared.agreement is not None
        measured |= {"kl_to_pretrained": compared.divergence, "agreement": compared.agreement}
    if other is not None:
        losses, _ = predict(trainer, other, shift)
        measured["perplexity_other"] = math.exp(sum(losses) / len(losses))
    return measured


@torch.no_grad()
def predict(trainer: Any, test: Dataset, shift: int) -> tuple[list[float], list[float]]:
    """The mean loss of every held-out block, and zeros."""
    model = trainer.model.eval()
    losses: list[float] = []
    for batch in bar(trainer.get_test_dataloader(test), desc="perplexity", unit="batch", leave=False):
        labels = batch["labels"]
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        end = logits.shape[1] - shift
        loss_BL = F.cross_entropy(logits[:, :end].transpose(1, 2).float(), labels[:, shift:], reduction="none")
        counted = (labels[:, shift:] != -100).sum(1)
        losses += trainer.accelerator.gather_for_metrics(loss_BL.sum(1) / counted.clamp_min(1)).tolist()
    return losses, [0.0] * len(losses)


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a model; "bytes" takes bytes as tokens."""
    return ByT5Tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(name)


def masked(rows: list[dict[str, Any]], hide: Callable[[Any], Any]) -> Any:
    """A batch of rows, with tokens hidden unless the rows have labels: those that measure hide their tokens already."""
    return default_data_collator(rows) if "labels" in rows[0] else hide(rows)


def vocabulary(tokenizer: Any) -> dict[str, Any]:
    """The config values that a tokenizer decides. Without a tokenizer, --config_overrides must hold them."""
    if tokenizer is None:
        return {}
    ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ("bos", "eos", "pad")}
    return {"vocab_size": len(tokenizer), **ends}


def build_task(model: ModelArguments, data: TextDataArguments, own: RecipeArguments) -> Task:
    """Read and check the data and the options, before any training."""
    train, test, _ = load_splits(data, labelled=False)
    name = own.tokenizer_name or model.model_name_or_path
    auto, causal = AUTO[own.objective], own.objective == "causal"
    # Rows of token ids need no tokenizer, but a masked model needs the tokenizer's mask token.
    tokenizer: Any = None if causal and data.input_columns[0] == TOKENS else tokenizer_of(name)
    if own.from_scratch:
        config = scratch_config(model.model_name_or_path, own.config_overrides, **vocabulary(tokenizer))
        load = functools.partial(auto.from_config, config, dtype=torch.float32)
    else:
        load = functools.partial(auto.from_pretrained, model.model_name_or_path, dtype=model.dtype)
    cut = functools.partial(blocks, column=data.input_columns[0], tokenizer=tokenizer, length=data.max_seq_length)
    length = own.train_length or data.max_seq_length
    rows = {"train": cut(train, tokens=own.train_tokens, length=length), "test": cut(test, tokens=own.test_tokens)}
    sets = {name: Dataset.from_dict({"input_ids": ids, "labels": ids}) for name, ids in rows.items()}
    other = None
    if own.other_dataset is not None:
        split = load_rows(own.other_dataset, None, None, data.input_columns[0])
        some = cut(split, tokens=FIGURE_BLOCKS * data.max_seq_length)
        other = Dataset.from_dict({"input_ids": some, "labels": some})
    collate = default_data_collator
    if not causal:
        hide = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
        hidden = [hide([{"input_ids": row}]) for row in rows["test"]]  # the same tokens are hidden from every model
        sets["test"] = Dataset.from_list([{name: value[0].tolist() for name, value in row.items()} for row in hidden])
        sets["train"] = sets["train"].remove_columns("labels")
        collate = functools.partial(masked, hide=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15))
    return Task(
        load=load,
        train=sets["train"],
        test=sets["test"],
        collate=collate,
        metrics=["perplexity"],
        predict=functools.partial(predict, shift=int(causal)),
        settings=data.settings | vars(own),
        processor=tokenizer,
        mean_loss=False,
        before=not own.from_scratch,
        figures=functools.partial(figures, load=load, own=own, other=other, shift=int(causal)) if causal else None,
        scratch=made_of(
            model.published_name, own.config_overrides, f"{'token ids' if tokenizer is None else name} as tokens"
        )
        if own.from_scratch
        else "",
    )


def about(own: RecipeArguments) -> About:
    """The sentences of the card."""
    return About(
        prefix=own.card_name,
        task="text-generation" if own.objective == "causal" else "fill-mask",
        auto_class=AUTO[own.objective].__name__,
        intended_use="Compares attentions of a language model on this text.",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe with these words, or with those of the command line."""
    launch(RecipeArguments, build_task, about, arguments, recipe="language_modeling")
