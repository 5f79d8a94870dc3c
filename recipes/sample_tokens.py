r"""Lets a language model write its own training data: rows of token ids, as a folder with parquet files.

    python recipes/sample_tokens.py MODEL OUT --tokens 10000000
    hf-attn-swap train language-modeling CONFIG --model_name_or_path MODEL --dataset_name OUT \
        --text_column_names input_ids

Every row starts with the model's first token (BOS) and has `--length` tokens, sampled from the model's distribution as
it is (temperature 1). No text is read, so a model can be converted on data of its own kind even if its training data
are not at hand. The same seed gives the same rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


def sample(model: PreTrainedModel, rows: int, length: int) -> torch.Tensor:
    """Token ids (rows,length) from the model's distribution, each row from the first token on."""
    first = torch.full((rows, 1), model.config.bos_token_id)
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length - 1)  # no end: a row goes on behind it
    model.generation_config = settings  # instead of the model's own
    sampled: torch.Tensor = model.generate(first, attention_mask=torch.ones_like(first))
    return sampled


def write(model: PreTrainedModel, path: Path, tokens: int, length: int, batch: int, seed: int) -> None:
    """Sample at least `tokens` tokens and write them as one parquet file."""
    torch.manual_seed(seed)
    rows: list[list[int]] = []
    wanted = -(-tokens // length)
    with tqdm(total=tokens, desc=path.stem, unit="token") as bar:
        while len(rows) < wanted:
            some = sample(model, min(batch, wanted - len(rows)), length)
            rows += some.tolist()
            bar.update(some.numel())
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict({"input_ids": rows}).to_parquet(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Name on the Hub, or folder, of a causal language model.")
    parser.add_argument("out", type=Path, help="Folder for train.parquet and test.parquet.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="Tokens to train on.")
    parser.add_argument("--test_tokens", type=int, default=32_768, help="Tokens to measure on, from another seed.")
    parser.add_argument("--length", type=int, default=256, help="Tokens per row.")
    parser.add_argument("--batch", type=int, default=512, help="Rows that are sampled at once.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    if model.config.bos_token_id is None:
        parser.exit(2, f"error: {arguments.model} names no first token (bos_token_id), from which to sample.\n")
    for split, tokens, seed in (
        ("test", arguments.test_tokens, arguments.seed + 1),
        ("train", arguments.tokens, arguments.seed),
    ):
        write(model, arguments.out / f"{split}.parquet", tokens, arguments.length, arguments.batch, seed)


if __name__ == "__main__":
    main()
