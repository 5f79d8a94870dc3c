"""The configurations that ship: found by name or by path, read by their recipe, and the base of every sweep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from hf_attn_swap import configurations
from hf_attn_swap.training import ModelArguments, parse, scratch_config
from hf_attn_swap.training import recipes as package
from tests.harness.command_line import classes

SHIPPED = configurations.shipped()


def test_every_recipe_has_configurations_of_different_names() -> None:
    files = [path for path in configurations.FOLDER.rglob("*") if path.suffix in configurations.SUFFIXES]
    assert sorted(SHIPPED.values()) == sorted(files)
    modules = {path.stem for path in Path(str(package.__file__)).parent.glob("*.py")}
    assert {path.parent.name for path in files} <= modules


@pytest.mark.parametrize("name", SHIPPED)
def test_a_configuration_is_what_its_recipe_takes(name: str) -> None:
    path = SHIPPED[name]
    model, data, _, _, training = parse(classes(path.parent.name), [name, "--use_cpu", "true"], recipe=path.parent.name)
    given = {key: value for source in configurations.read(path) for key, value in source.items()}
    assert (model.model_name_or_path, data.dataset_name) == (given["model_name_or_path"], given["dataset_name"])
    assert training.output_dir == given["output_dir"]
    assert re.fullmatch(r"[^#].*\.", configurations.first_line(path)), "a sentence, for `hf-attn-swap train --list`"


@pytest.mark.parametrize(
    ("name", "millions", "batch", "drop_path"),
    [
        ("hopfield_vit_tiny", 5.5, 256, 0.1),
        ("hopfield_vit_small", 22, 256, 0.2),
        ("hopfield_vit_base", 86, 128, 0.2),
        ("hopfield_vit_large", 303, 32, 0.3),
        ("hopfield_gpt2", 124, 12, None),
        ("hopfield_gpt2_medium", 350, 4, None),
    ],
)
def test_tables_9_and_10_of_the_modern_hopfield_paper(
    name: str, millions: float, batch: int, drop_path: float | None
) -> None:
    """The sizes that the paper names, and what differs between them in its tables."""
    folder = SHIPPED[name].parent.name
    _, _, _, own, training = parse(classes(folder), [name, "--use_cpu", "true"], recipe=folder)
    image = drop_path is not None
    auto = AutoModelForImageClassification if image else AutoModelForCausalLM
    values = {"num_labels": 10, "image_size": own.image_size} if image else {}
    with torch.device("meta"):
        model = auto.from_config(scratch_config("vit" if image else "gpt2", own.config_overrides, **values))
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.02)
    assert training.per_device_train_batch_size == batch
    assert getattr(own, "drop_path", None) == drop_path


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("{}")
    (tmp_path / "ag_news").mkdir()  # such as a folder of the data
    monkeypatch.chdir(tmp_path)
    assert configurations.find("ag_news") == SHIPPED["ag_news"]
    assert configurations.find("own.yaml").samefile(tmp_path / "own.yaml")
    monkeypatch.chdir("/")
    assert configurations.find("own.yaml", relative_to=tmp_path) == tmp_path / "own.yaml"


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        (
            "ag_nws",
            None,
            f"is called 'ag_nws'; the configurations that ship are {', '.join(SHIPPED)}.",
        ),
        ("cifar10", "text_classification", "the configurations of text_classification that ship are ag_news, depth"),
        ("ag_news.yaml", "text_classification", "there is no file 'ag_news.yaml'; the configurations of text_class"),
    ],
)
def test_a_wrong_name_lists_the_names(
    name: str, recipe: str | None, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        parse((ModelArguments,), [name], recipe=recipe)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "in a file"])
def test_later_data_and_models_replace_what_a_configuration_says_of_its_own(typed: bool, tmp_path: Path) -> None:
    values = {"model_name_or_path": "gpt2", "train_file": "a.csv", "test_file": "b.csv", "max_eval_samples": "7"}
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    if not typed:
        (tmp_path / "own.yaml").write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
        words = [str(tmp_path / "own.yaml")]
    model, data, _, own, training = parse(
        classes("text_classification"), ["glue_mnli", *words, "--use_cpu", "true"], recipe="text_classification"
    )
    assert (data.dataset_name, data.train_file, data.test_file) == (None, "a.csv", "b.csv")
    assert (data.dataset_config_name, data.test_split_name, own.second_test_split_name) == (None, "test", None)
    assert (data.max_train_samples, data.max_eval_samples) == (None, 7)
    assert (model.model_name_or_path, own.card_name) == ("gpt2", None)
    assert data.text_column_names == ["premise", "hypothesis"], "what is no place of data stays"
    assert training.output_dir == "runs/mnli"
