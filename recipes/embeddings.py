r"""Measures what a conversion costs sentence embeddings: Spearman's correlation with the scores of STS-B.

    python recipes/embeddings.py --model sentence-transformers/all-MiniLM-L6-v2 --texts fancyzhx/ag_news \
        --sts nyu-mll/glue --variants belief modern_hopfield simpletron_resl --tokens 300000 --out embeddings.json

The model is converted by `convert` on texts without labels: its hidden states are brought back to those of the original
model. An embedding is the mean of the last hidden states over real tokens, and the score of a pair is the cosine of its
two embeddings, as in sentence-transformers. The validation part of STS-B, which no conversion reads, is measured. The
control is the original model. The interval of the difference is a bootstrap over the pairs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from hf_attn_swap import convert, patch_model
from hf_attn_swap.text.table import markdown
from hf_attn_swap.text.typed import parse_options

HEADER = ("attention", "as patched", "converted", "stock", "difference [95 %]", "tokens")
DRAWS = 2000  # of the bootstrap


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True, help="Name on the Hub, or folder.")
    parser.add_argument("--texts", required=True, help="Data set of texts; the train part is read, without labels.")
    parser.add_argument("--column", default="text", help="The column of the texts.")
    parser.add_argument("--sts", required=True, help="Data set with the pairs of STS-B; the validation part is read.")
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--option", nargs="+", default=[], help="Options of the variants, such as window=8.")
    parser.add_argument("--tokens", type=int, default=300_000, help="Tokens of distillation.")
    parser.add_argument("--length", type=int, default=64, help="Tokens that are kept of a text to convert on.")
    parser.add_argument("--out", type=Path, required=True, help="A file for the figures.")
    return parser.parse_args()


def read(name: str, part: str, config: str | None = None) -> Any:
    """One part of a data set on the Hub, or of a folder of parquet files."""
    return load_dataset(name, None if Path(name).is_dir() else config, split=part)


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Embeddings (texts, width): the mean of the last hidden states over real tokens."""
    order = np.argsort([len(text) for text in texts])
    vectors = torch.empty(len(texts), model.config.hidden_size)
    model.eval()
    for start in tqdm(range(0, len(texts), 64), desc="embed", unit="batch", leave=False):
        places = order[start : start + 64]
        batch = tokenizer([texts[place] for place in places], padding=True, truncation=True, return_tensors="pt")
        hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        vectors[torch.from_numpy(places)] = (hidden * real).sum(1) / real.sum(1)
    return vectors


def similarity(model: Any, tokenizer: Any, pairs: Any) -> np.ndarray:
    """The cosine of the two embeddings of every pair."""
    first, second = (embed(model, tokenizer, list(pairs[f"sentence{place}"])) for place in (1, 2))
    return cosine_similarity(first, second).numpy()


def correlation(scores: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's correlation, times 100."""
    return 100 * float(spearmanr(scores, labels).statistic)


def interval(converted: np.ndarray, stock: np.ndarray, labels: np.ndarray) -> list[float]:
    """The middle 95 % of the difference of the two correlations over pairs drawn again."""
    generator = np.random.default_rng(0)
    differences = []
    for _ in range(DRAWS):
        drawn = generator.integers(len(labels), size=len(labels))
        differences.append(correlation(converted[drawn], labels[drawn]) - correlation(stock[drawn], labels[drawn]))
    low, high = np.quantile(differences, (0.025, 0.975))
    return [float(low), float(high)]


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    pairs = read(arguments.sts, "validation", "stsb")
    labels = np.asarray(pairs["label"])
    texts = list(read(arguments.texts, "train")[arguments.column])

    def load() -> Any:
        return AutoModel.from_pretrained(arguments.model, dtype=torch.float32)

    stock = similarity(load(), tokenizer, pairs)
    record: dict[str, Any] = {"tokens": arguments.tokens, "pairs": len(labels), "stock": correlation(stock, labels)}
    record["runs"] = {}
    options = parse_options(arguments.option, composed=False)
    for variant in arguments.variants:
        patched = correlation(similarity(patch_model(load(), variant, **options), tokenizer, pairs), labels)
        model = load()
        how = {"processor": tokenizer, "tokens": arguments.tokens, "length": arguments.length}
        report = convert(model, variant, texts, **how, **options)
        scores = similarity(model, tokenizer, pairs)
        record["runs"][variant] = {
            "patched": patched,
            "converted": correlation(scores, labels),
            "difference": correlation(scores, labels) - record["stock"],
            "difference_95": interval(scores, stock, labels),
            "tokens": sum(step.tokens for step in report.steps),
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(markdown(HEADER, [row(variant, record) for variant in arguments.variants]))


def row(variant: str, record: dict[str, Any]) -> list[str]:
    """One row of the table."""
    run = record["runs"][variant]
    low, high = run["difference_95"]
    figures = [f"{value:.2f}" for value in (run["patched"], run["converted"], record["stock"])]
    return [f"`{variant}`", *figures, f"{run['difference']:+.2f} [{low:+.2f}, {high:+.2f}]", f"{run['tokens']:,}"]


if __name__ == "__main__":
    main()
