"""A config may come from a stranger: nothing in it is trusted or executed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM

import hf_attn_swap
from tests import zoo

HUGE = 10**400
LONG = "a" * 10_000
NUMBERS = (None, True, -1, HUGE, -HUGE, "1", "x", [], {})
TEXTS = (None, True, 0, "", "x", LONG, "../../etc/passwd", "os.system", "__import__('os')", "antigravity", [], {})
LISTS = (None, 0, "0-2", {}, [None], [True], ["0"], [0.0], [-1], [3], [HUGE], [0, 0], [[0]], list(range(100_001)))
HOSTILE: dict[tuple[str | int, ...], tuple[Any, ...]] = {
    (): (True, 0, "x", [], {}, [1], {"version": 1}, {"__class__": "os.system"}),
    ("version",): (*NUMBERS, 0, 2, 1.0),
    ("modules",): (*NUMBERS, 0, 2, 4, 3.0, 10**9),
    ("swaps",): (None, 0, "x", {}, [], [None], [[]], ["belief"], [{}]),
    ("swaps", 0, "variant"): (*TEXTS, "belief+belief", "softmax+belief", "+", "outeffhop+", "gated+modern_hopfield"),
    ("swaps", 0, "layers"): LISTS,
    ("swaps", 0, "modules"): tuple(text for text in TEXTS if not isinstance(text, str) or text in ("", LONG)),
    ("swaps", 0, "strength"): (*NUMBERS, 2, 1.5, float("nan"), float("inf")),
    ("swaps", 0, "options"): (None, 0, "x", [], {}, {"gated": {}}, {"os.system": {}}),
    ("swaps", 0, "options", "gated"): (None, 0, "x", [], {"__class__": "x"}, {"kind": {}}),
    ("swaps", 0, "options", "gated", "kind"): TEXTS,
    ("swaps", 0, "options", "gated", "pi_init"): (
        None,
        True,
        HUGE,
        -HUGE,
        -1,
        "1",
        "x",
        [],
        {},
        2,
        float("nan"),
        float("inf"),
    ),
}
CASES = [(path, value) for path, values in HOSTILE.items() for value in values]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zoo.build("bert")
    hf_attn_swap.patch_model(model, "outeffhop+gated", layers=[0, 1])
    hf_attn_swap.patch_model(model, "modern_hopfield", layers=[2])
    folder = tmp_path_factory.mktemp("strict") / "model"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the config of a saved model."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def put(config: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    place: Any = config
    full = ("attn_swap", *path)
    for key in full[:-1]:
        place = place[key]
    place[full[-1]] = value


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_hostile_blocks_are_clear_errors(saved: Path) -> None:
    before = set(sys.modules)
    pristine = (saved / "config.json").read_text()
    for path, value in CASES:
        (saved / "config.json").write_text(pristine)
        edit(saved, lambda config, path=path, value=value: put(config, path, value))
        with pytest.raises(ValueError, match=r"attn_swap|in config\.json") as error:
            BertForMaskedLM.from_pretrained(saved)
        assert type(error.value) is ValueError, (path, value)
    assert "antigravity" not in sys.modules
    assert not {name for name in set(sys.modules) - before if name.startswith("anti")}


def test_a_block_of_nothing_is_no_model(saved: Path) -> None:
    """Without a block, the weights of a swap are refused."""
    edit(saved, lambda config: config.pop("attn_swap"))
    with pytest.raises(ValueError, match="unexpected weights of the swapped attention"):
        BertForMaskedLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(next(k for k in t if ".attn_swap." in k)), "missing.*attn_swap"),
        (
            lambda t: t.update({"bert.encoder.layer.2.attention.self.attn_swap.x": torch.ones(1)}),
            "unexpected.*attn_swap",
        ),
        (
            lambda t: t.update({next(k for k in t if ".attn_swap." in k): torch.ones(7)}),
            "ignore_mismatched_sizes",
        ),  # transformers names it in its report
    ],
    ids=["missing", "unexpected", "mismatched"],
)
def test_weights_of_a_swap_that_do_not_match_are_named(
    saved: Path, change: Callable[[Any], object], words: str
) -> None:
    weights(saved, change)
    with pytest.raises((ValueError, RuntimeError), match=words):
        BertForMaskedLM.from_pretrained(saved)
