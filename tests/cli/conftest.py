"""A tiny random BERT and a labelled text set on disk, and a way to run one command."""

import csv
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_attn_swap_cli import run

GOOD, BAD, NEUTRAL = (
    ("fine", "great", "lovely"),
    ("dull", "poor", "weak"),
    ("the", "film", "plot", "was", "and", "cast"),
)
WORDS = ("the film was great", "dull", "great great film", "the dull film was the film", "was", "film dull")


@dataclass(frozen=True)
class Outcome:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Run the command line in this process, and undo what it sets for the whole process."""
    verbosity = transformers.utils.logging.get_verbosity(), huggingface_hub.utils.logging.get_verbosity()

    def call(*arguments: object) -> Outcome:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield call
    transformers.utils.logging.set_verbosity(verbosity[0])
    huggingface_hub.utils.logging.set_verbosity(verbosity[1])
    transformers.utils.logging.enable_progress_bar()
    huggingface_hub.utils.enable_progress_bars()
    os.environ.pop("HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer BERT classifier with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *NEUTRAL]
    BertTokenizerFast(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def labelled_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.csv and test.csv: columns `sentence` and `sentiment`."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for name, size in (("train", 64), ("test", 32)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence", "sentiment"])
            for _ in range(size):
                label = rng.choice(("good", "bad"))
                words = [*rng.choices(NEUTRAL, k=rng.randint(2, 9)), rng.choice(GOOD if label == "good" else BAD)]
                writer.writerow([" ".join(words), label])
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A CSV file with texts, and a column of labels that no model could use."""
    path = tmp_path / "texts.csv"
    rows = (f"{WORDS[row % len(WORDS)]} {WORDS[row // len(WORDS)]},none" for row in range(len(WORDS) ** 2))
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


@pytest.fixture
def tiny_llama(tiny_bert: Path, tmp_path: Path) -> Path:
    """Folder of a two-layer language model with the tokenizer of the classifier."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.5, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny-llama")
    tokenizer.save_pretrained(tmp_path / "tiny-llama")
    return tmp_path / "tiny-llama"


@pytest.fixture
def long_texts(texts: Path, tmp_path: Path) -> Path:
    """The same texts many times: some 4,000 tokens."""
    path = tmp_path / "long.csv"
    path.write_text(texts.read_text() + "\n".join(texts.read_text().splitlines()[1:] * 40) + "\n")
    return path
