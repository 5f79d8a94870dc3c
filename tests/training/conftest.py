"""A tiny BERT with a tokenizer, and labelled sentences whose class shows in their words, all on disk."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers

WORDS = {"0": ("good", "fine", "great", "warm"), "1": ("bad", "poor", "cold", "dull")}
FILLER = ("the", "film", "was", "and", "very", "a", "story")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_rows(path: Path, count: int, seed: int, header: tuple[str, str] = ("text", "label")) -> Path:
    """A CSV of sentences of three to twelve words."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(header)
        for index in range(count):
            label = str(index % 2)
            words = [rng.choice(FILLER) for _ in range(rng.randint(2, 11))]
            words.insert(rng.randrange(len(words)), rng.choice(WORDS[label]))
            writer.writerow((" ".join(words), label))
    return path


def pictures(path: Path, count: int) -> Path:
    """Images as structs of bytes and path, without the metadata that `datasets` writes."""
    rows = []
    for number in range(count):
        PIL.Image.new("RGB", (16, 16), (number % 2 * 200, 9, 9)).save(file := io.BytesIO(), "png")
        rows.append({"img": {"bytes": file.getvalue(), "path": f"{number}.png"}, "label": number % 2})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/{train,test}.csv`."""
    folder = tmp_path_factory.mktemp("tiny")
    words = [*SPECIAL, *FILLER, *WORDS["0"], *WORDS["1"]]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    write_rows(folder / "data" / "train.csv", 48, seed=1)
    write_rows(folder / "data" / "test.csv", 32, seed=2)
    return folder


def options(tiny: Path, out: Path, *more: str) -> list[str]:
    """Command-line options of a recipe on the tiny model."""
    return [
        *("--model_name_or_path", str(tiny / "model"), "--dataset_name", str(tiny / "data"), "--output_dir", str(out)),
        *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--learning_rate", "1e-2"),
        *("--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--dataloader_pin_memory", "false"),
        *more,
    ]
