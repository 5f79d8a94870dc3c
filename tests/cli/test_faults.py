"""A conversion killed while it saves, a full disk, two commands in one folder, folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hf_attn_swap.conversion import distill
from hf_attn_swap.writing import claimed
from tests.harness.process import python
from tests.training.conftest import options, tiny  # noqa: F401  # the tiny model and sentences of the recipes

from .conftest import NEUTRAL, Outcome
from .killed_child import PLACES

Command = Callable[..., Outcome]
TOKENS = 600


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(f"{NEUTRAL[i % 6]} {NEUTRAL[i // 6 % 6]} {NEUTRAL[5 * i % 6]}" for i in range(120)))
    return path


def words(model: Path, out: Path, texts: Path) -> list[str]:
    return [
        "convert",
        str(model),
        "simpletron_resl",
        str(out),
        "--data",
        str(texts),
        "--tokens",
        str(TOKENS),
        "--device",
        "cpu",
    ]


@pytest.fixture(scope="module")
def wanted(tiny_bert: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a conversion that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    python("-m", "hf_attn_swap_cli", *words(tiny_bert, out, texts))
    return load_file(out / "model.safetensors")


def same(out: Path, wanted: dict[str, torch.Tensor]) -> bool:
    weights = load_file(out / "model.safetensors")
    AutoModelForSequenceClassification.from_pretrained(out)
    return weights.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_killed_while_the_result_is_saved(
    place: str, tiny_bert: Path, texts: Path, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """Nothing loads that is half-saved, and the same command again gives the same weights."""
    out = tmp_path / "out"
    if place == "half replaced":
        out.mkdir()
    given = words(tiny_bert, out, texts)
    assert python("-m", "tests.cli.killed_child", place, *given, check=False).returncode == -9
    if place == "in its place":
        assert same(out, wanted)
    else:
        with pytest.raises((OSError, ValueError)):
            AutoModelForSequenceClassification.from_pretrained(out)
    python("-m", "hf_attn_swap_cli", *given)
    assert same(out, wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "--overwrite" in python("-m", "hf_attn_swap_cli", *given, check=False).stderr, "it is whole, and it stays"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk is mounted by root on Linux alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "kilobytes"), [(1, 8), (1, 40), (1, 120), (1, 400), (100, 460)])
def test_a_full_disk(
    every: int,
    kilobytes: int,
    command: Command,
    tiny_bert: Path,
    texts: Path,
    disk: Path,
    wanted: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first part of the work, at the first and the second checkpoint, and at the result."""
    monkeypatch.setattr(distill, "SAVE_EVERY", every)  # training steps between two checkpoints
    out, ballast = disk / "out", disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 1024 * kilobytes))
    told = command(*words(tiny_bert, out, texts))
    assert told.code == 2, told.err
    error = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert f"{out}" in error[0]
    assert "Make room; the same command then goes on." in error[0]
    assert not out.exists()
    assert ("saving in" in told.err) == (every == 100)
    ballast.unlink()
    assert command(*words(tiny_bert, out, texts)).code == 0
    assert same(out, wanted)
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_a_second_command_is_refused_at_once(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out):
        for given in (words(tiny_bert, out, texts), ["patch", tiny_bert, "belief", out]):
            told = command(*given)
            assert told.code == 2
            assert told.err.startswith(f"error: another process writes into {out}; wait until it ends")
    assert not out.exists()


@pytest.mark.slow
def test_two_conversions_at_once(tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    """One of them is refused; the other gives the result."""
    with ThreadPoolExecutor(2) as pool:
        ended = list(
            pool.map(
                lambda variant: python(
                    *("-m", "hf_attn_swap_cli", "convert", tiny_bert, variant, tmp_path / "out"),
                    *("--data", texts, "--tokens", "20k", "--device", "cpu"),
                    check=False,
                ),
                ("belief", "simpletron_resl"),
            )
        )
    assert sorted(process.returncode for process in ended) == [0, 2]
    (refused,) = (process for process in ended if process.returncode)
    assert "another process writes into" in refused.stderr


@pytest.fixture
def error_of(command: Command, tiny_bert: Path, texts: Path, tiny: Path) -> Callable[..., str]:  # noqa: F811  # fixture
    """What a command that fails tells: on a model, or else on a tiny one."""

    def error(name: str, out: Path, model: Path = tiny_bert) -> str:
        more = () if model == tiny_bert else ("--model_name_or_path", str(model))
        given: dict[str, list[Any]] = {
            "convert": words(model, out, texts),
            "quantize": ["quantize", model, out, "--data", texts],
            "patch": ["patch", model, "belief", out],
            "evaluate": ["evaluate", model, "--data", texts],
            "report": ["report", model, "--data", texts, "--variant", "belief", "--out", out],
            "dynamics": ["dynamics", "leaders", "--out", out],
            "train": ["train", "text-classification", *options(tiny, out, *more)],
        }
        try:
            told = command(*given[name])
        except SystemExit as ended:  # a recipe ends itself
            return str(ended.code)
        assert told.code == 2
        return told.err

    return error


@pytest.mark.parametrize("name", ["convert", "quantize", "patch", "report", "dynamics", "train"])
def test_a_folder_that_cannot_be_written(name: str, error_of: Callable[..., str], tmp_path: Path) -> None:
    """It is refused before anything is loaded or measured."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    reason = f"{out} cannot be written ({tmp_path / 'file'}: Not a directory); name another"
    assert error_of(name, out).startswith(f"error: {reason}")


@pytest.mark.parametrize("name", ["convert", "patch", "evaluate", "train"])
def test_damaged_weights_are_named(
    name: str,
    error_of: Callable[..., str],
    tiny_bert: Path,
    tiny: Path,  # noqa: F811  # the fixture
    tmp_path: Path,
) -> None:
    model = tmp_path / "damaged"
    model.mkdir()
    for path in (tiny / "model" if name == "train" else tiny_bert).iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    error = next(line for line in error_of(name, tmp_path / "out", model).splitlines() if line.startswith("error: "))
    assert error.startswith(f"error: {model}: the weights cannot be read (")
    assert name == "train" or not (tmp_path / "out").exists()
