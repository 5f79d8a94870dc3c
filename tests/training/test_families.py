"""`hf-attn-swap train` on a tiny model of each family, as its checkpoints are on the Hub, and on all tasks of GLUE."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    ViTImageProcessorPil,
)

from hf_attn_swap import configurations
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.training.recipes.text_classification import pad_alike
from hf_attn_swap_cli import run

from .conftest import FILLER, WORDS, options, pictures, tiny, write_rows  # noqa: F401  # the fixture

KNOWN = {family.name: family for family in FAMILIES.values()}
ENCODERS = ("albert", "bert")
NO_PAD_IN_CONFIG = ("gpt2", "llama")  # as on the Hub; OPT's config has one
TASKS = {  # the official metrics: GLUE, arXiv:1804.07461, table 1
    "cola": ({"matthews_correlation"}, ["sentence"]),
    "sst2": ({"accuracy"}, ["sentence"]),
    "mrpc": ({"accuracy", "f1"}, ["sentence1", "sentence2"]),
    "qqp": ({"accuracy", "f1"}, ["question1", "question2"]),
    "stsb": ({"pearsonr", "spearmanr"}, ["sentence1", "sentence2"]),
    "mnli": ({"accuracy", "accuracy_validation_mismatched"}, ["premise", "hypothesis"]),
    "qnli": ({"accuracy"}, ["question", "sentence"]),
    "rte": ({"accuracy"}, ["sentence1", "sentence2"]),
    "wnli": ({"accuracy"}, ["sentence1", "sentence2"]),
}
SHORT = ("--max_steps", "1", "--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--save_strategy", "no")
SHORT += ("--disable_tqdm", "true", "--use_cpu", "true", "--seeds", "0")


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Words as tokens, and the special tokens that the family has on the Hub: a decoder has none for padding."""
    special = {"unk_token": "<unk>"}
    if family in ENCODERS:
        first, special = ["<pad>", "<unk>"], {**special, "pad_token": "<pad>"}
    else:
        first, special = ["<s>", "</s>", "<pad>", "<unk>"], {**special, "bos_token": "<s>", "eos_token": "</s>"}
    words = [*first, *FILLER, *WORDS["0"], *WORDS["1"]]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def checkpoint(family: str, folder: Path) -> Path:
    values = {**KNOWN[family].tiny, **({"pad_token_id": None} if family in NO_PAD_IN_CONFIG else {})}
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(family, **values)).save_pretrained(folder)
    if family == "vit":
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    else:
        tokenizer_of(family).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def glue(folder: Path, task: str, count: int = 16) -> Path:
    """A folder with the splits and columns of a task, as on the Hub."""
    rng = random.Random(0)
    columns = TASKS[task][1]
    splits = ["validation_matched", "validation_mismatched"] if task == "mnli" else ["validation"]
    classes = 3 if task == "mnli" else 2
    label = Value("float32") if task == "stsb" else ClassLabel(names=[str(number) for number in range(classes)])
    for split in ("train", *splits):
        rows: dict[str, list[Any]] = {
            name: [" ".join(rng.choices(FILLER, k=5)) for _ in range(count)] for name in columns
        }
        rows["label"] = [number / 4 if task == "stsb" else number % classes for number in range(count)]
        features = Features({**dict.fromkeys(columns, Value("string")), "label": label})
        (folder / task / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(
            folder / task / "data" / f"{split}-00000-of-00001.parquet"
        )
    return folder / task


def trained(*words: object) -> RunResult:
    """Run `hf-attn-swap train`, and read its record."""
    assert run(["train", *map(str, words)]) == 0
    out, variant = (str(words[words.index(name) + 1]) for name in ("--output_dir", "--variant"))
    return RunResult.load(Path(out, variant, "results.json"))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "vit"])  # encoder, two kinds of padding, images
def test_a_checkpoint_as_on_the_hub(family: str, tmp_path: Path, capsys: Any) -> None:
    model, out = checkpoint(family, tmp_path / family), tmp_path / "out"
    words = ["--model_name_or_path", model, "--variant", "belief", *SHORT, "--output_dir"]
    if family == "vit":
        rows = [
            "--train_file",
            pictures(tmp_path / "a.parquet", 16),
            "--test_file",
            pictures(tmp_path / "b.parquet", 6),
        ]
        runs = [trained("image-classification", "cifar10", "--image_size", "16", *rows, *words, out)]
    else:
        rows = [
            "--train_file",
            write_rows(tmp_path / "a.csv", 16, 1),
            "--test_file",
            write_rows(tmp_path / "b.csv", 6, 2),
        ]
        task = ["--dataset_name", glue(tmp_path, "rte"), *words, tmp_path / "glue"]
        runs = [trained("text-classification", "ag_news", *rows, *words, out)]
        if family in ("bert", "llama"):
            runs.append(trained("text-classification", "glue_rte", *task))
    assert [run.name for run in runs] == [f"{family}-{data}-belief" for data in ("a", "rte")[: len(runs)]]
    card = ModelCard.load(out / "belief" / "README.md")
    assert (card.data.get("license"), runs[0].license) == ("mit", "mit")
    assert runs[0].data.rows == {"train": 16, "test": 6}
    if family != "vit":
        alone_as_in_a_batch(out / "belief" / "seed-0" / "model")


def alone_as_in_a_batch(folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    assert tokenizer.pad_token_id == model.config.pad_token_id
    texts = ["the film", "the film was good and very warm"]
    with torch.no_grad():
        together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone)


def test_every_task_of_glue_has_its_columns_and_metrics() -> None:
    for task, (metrics, columns) in TASKS.items():
        said = {name: value for source in read(task) for name, value in source.items()}
        assert {*said["metrics"]} >= {name for name in metrics if "mismatched" not in name}, task
        assert said["text_column_names"] == columns


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb", "mnli"])  # of each number of labels, texts and metrics
def test_a_run_on_glue(task: str, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    words = options(tiny, tmp_path / "out", "--dataset_name", str(glue(tmp_path, task)), "--variant", "softmax", *SHORT)
    enough = ("--max_train_samples", "16") if "max_train_samples" in "".join(map(str, read(task))) else ()
    result = trained("text-classification", f"glue_{task}", *words, *enough)
    assert {metric.name for metric in result.converted.metrics} >= TASKS[task][0]
    config = AutoConfig.from_pretrained(tmp_path / "out" / "softmax" / "seed-0" / "model")
    assert config.num_labels == {"stsb": 1, "mnli": 3}.get(task, 2)


def read(task: str) -> list[dict[str, Any]]:
    return configurations.read(configurations.find(f"glue_{task}"))


def test_padding_is_the_same_for_tokenizer_and_config() -> None:
    tokenizer, config = tokenizer_of("llama"), AutoConfig.for_model("llama", vocab_size=64, pad_token_id=None)
    config.pad_token_id = -1  # as in the first LLaMA
    pad_alike(tokenizer, config, "x")
    assert (tokenizer.pad_token, config.pad_token_id) == ("</s>", tokenizer.eos_token_id)
    tokenizer, config.pad_token_id = tokenizer_of("bert"), 5
    pad_alike(tokenizer, config, "x")
    assert (tokenizer.pad_token, config.pad_token_id) == ("<pad>", 0)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    config.vocab_size = 8
    with pytest.raises(ValueError, match="8 embeddings"):
        pad_alike(tokenizer, config, "x")
    tokenizer.pad_token = config.pad_token_id = None
    with pytest.raises(ValueError, match="neither a padding token"):
        pad_alike(tokenizer, config, "x")
