"""README and the pages of docs: Python runs as written, on tiny models; commands, options and files exist."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import torch
import typer
import yaml
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, LlamaConfig, LlamaForCausalLM

import hf_attn_swap
from hf_attn_swap import analysis, configurations, conversion, dynamics, functional, memory, quantization
from hf_attn_swap.layer.fitted import FITTED
from hf_attn_swap.training.stages import read_stages
from hf_attn_swap.variants.base import VARIANTS
from hf_attn_swap_cli.app import app
from tests.harness.command_line import classes

from .pages import PAGES, ROOT

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "fine", "and", "dull"]
# What the pages name, and what stands for it here.
TINY = {
    "bert-base-uncased": "tiny-bert",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "tiny-llama",
    "HuggingFaceTB/SmolLM2-135M": "tiny-llama",
    "runs/distil_glue/stsb/softmax/seed-0/model": "tiny-bert",
    "tokens=300_000": "tokens=96",
    "tokens=10_000": "tokens=96",
    "tokens=7_680": "tokens=96",
}


def blocks(language: str) -> dict[str, list[str]]:
    """The code blocks of one language, by page."""
    by_name = {name: re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.M) for name, text in PAGES.items()}
    return {name: texts for name, texts in by_name.items() if texts}


def commands() -> list[str]:
    """Every line of a console block that starts with the prompt, without its comment."""
    lines = [line for texts in blocks("console").values() for text in texts for line in text.splitlines()]
    return [re.sub(r"\s{2,}#.*", "", line[2:]) for line in lines if line.startswith("$ ")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny classifier and a tiny language model, each with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=48)).save_pretrained(folder / "tiny-bert")
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, pad_token_id=0)).save_pretrained(folder / "tiny-llama")
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate(WORDS)}, model_max_length=512)
    for name in ("tiny-bert", "tiny-llama"):
        tokenizer.save_pretrained(folder / name)
    return folder


@contextlib.contextmanager
def without_new_names() -> Iterator[None]:
    """Forget the variants and the fits that an example registers."""
    before = [(table, dict(table)) for table in (VARIANTS, FITTED)]
    try:
        yield
    finally:
        for table, names in before:
            table.clear()
            table.update(names)


@pytest.mark.parametrize("page", blocks("python"))
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # no accelerator here
def test_python_runs_as_written(page: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny-bert", "tiny-llama"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "recipes")  # `from rotate import rotate` runs in this folder
    batch = torch.arange(48).view(4, 12)
    names: dict[str, object] = {
        "batches": [{"input_ids": batch}],
        "rows": [{"input_ids": row} for row in batch],
        "labelled": [{"input_ids": row, "labels": place % 2} for place, row in enumerate(batch)],
        "texts": ["the film was fine and dull " * 20] * 20,
    }
    texts = datasets.Dataset.from_dict({"text": names["texts"]})
    streams = {False: texts, True: texts.to_iterable_dataset()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, streaming=False, **__: streams[streaming])
    monkeypatch.setitem(sys.modules, "gradio", Mock())  # tests/tools/test_gradio.py runs these lines with Gradio
    with without_new_names():
        for block in blocks("python")[page]:
            for there, here in TINY.items():
                block = block.replace(there, here)
            exec(compile(block, page, "exec"), names)


def test_every_table_has_a_header() -> None:
    """An empty line in a table would turn the rest of the table into plain text."""
    text = "\n\n".join(PAGES.values())
    first_lines = re.findall(r"(?:^|\n)(?!\|)[^\n]*\n(\|[^\n]*\n[^\n]*)", text)
    assert first_lines
    assert not [lines for lines in first_lines if not re.search(r"\n\|[-:| ]+\|$", lines)]


@pytest.mark.parametrize("line", [line for line in commands() if "hf-attn-swap" in shlex.split(line)[0]])
def test_the_command_line_takes_these_arguments(line: str) -> None:
    _, name, *arguments = shlex.split(line)[:3] if line.endswith("-swap demo") else shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, list(arguments))


@pytest.mark.parametrize("line", [line for line in commands() if re.search(r"\b(recipes|benchmarks)/\w+\.py", line)])
def test_scripts_configurations_and_options_exist(line: str) -> None:
    words = shlex.split(line)
    start = next(place for place, word in enumerate(words) if word.endswith(".py"))
    script, arguments = ROOT / words[start], words[start + 1 :]
    assert script.is_file()
    for word in arguments:
        if word.endswith(".yaml"):
            assert (ROOT / word).is_file()
    sources = [script, *script.parent.glob("*.py"), *(ROOT / "hf_attn_swap" / "training").rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    for word in arguments:
        if word.startswith("--"):
            option = word[2:].partition("=")[0]
            assert re.search(rf'^ +{option}: |"--{option}"', text, re.M), option


@pytest.mark.parametrize("line", [line for line in commands() if re.search(r" train \w", line)])
def test_recipes_that_ship_take_these_arguments(line: str) -> None:
    recipe, *words = shlex.split(line.partition(" train ")[2])
    module = recipe.replace("-", "_")
    named = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    assert {word for word in named if not word.endswith(".yaml")} <= set(configurations.shipped(module))
    known = {"help", *(field.name for cls in classes(module) for field in dataclasses.fields(cls))}
    assert {word[2:] for word in words if word.startswith("--")} <= known


def test_make_has_these_targets() -> None:
    targets = {shlex.split(line)[1] for line in commands() if line.startswith("make ")}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def test_lists_of_stages_are_stages() -> None:
    configurations_of_stages = [yaml.safe_load(text) for texts in blocks("yaml").values() for text in texts]
    assert configurations_of_stages
    for configuration in configurations_of_stages:
        assert read_stages(
            [stage if isinstance(stage, str) else json.dumps(stage) for stage in configuration["stages"]]
        )


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(text for page, text in PAGES.items() if page.startswith("api/"))
    shown = set(re.findall(r"^(?:::: .*\.| +- )(\w+)$", text, re.M))
    wanted = {"convert", "layer_sensitivity", "ConversionReport"}
    for module in (hf_attn_swap, conversion, analysis, dynamics, memory, quantization):
        wanted |= set(module.__all__)
    wanted |= {name for name in functional.__all__ if callable(getattr(functional, name))}
    assert wanted <= shown
