"""The strict loader: exactly the model that was saved, or an error; nothing in a config is trusted or executed."""

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
from transformers import BertForMaskedLM, BertModel

import hf_attn_swap
from hf_attn_swap.publish.hub import from_pretrained, push, push_folder

from ... import zoo

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
    ("swaps", 0, "options", "gated", "pi_init"): (None, True, -1, "1", "x", [], {}, 2, float("nan"), float("inf")),
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


@pytest.mark.parametrize("loader", [from_pretrained, BertForMaskedLM.from_pretrained], ids=["strict", "plain"])
def test_hostile_blocks_are_clear_errors(saved: Path, loader: Callable[[Path], Any]) -> None:
    before = set(sys.modules)
    pristine = (saved / "config.json").read_text()
    for path, value in CASES:
        (saved / "config.json").write_text(pristine)
        edit(saved, lambda config, path=path, value=value: put(config, path, value))
        with pytest.raises(ValueError, match=r"attn_swap|in config\.json") as error:
            loader(saved)
        assert type(error.value) is ValueError, (path, value)
    assert "antigravity" not in sys.modules
    assert not {name for name in set(sys.modules) - before if name.startswith("anti")}


@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["huge", "-huge"])
def test_hostile_numbers_in_options(saved: Path, value: int) -> None:
    edit(saved, lambda config: put(config, ("swaps", 0, "options", "gated", "pi_init"), value))
    with pytest.raises(ValueError, match="attn_swap"):
        from_pretrained(saved)


def test_a_block_of_nothing_is_no_model(saved: Path) -> None:
    """Without a block both loaders refuse the weights of a swap."""
    edit(saved, lambda config: config.update(attn_swap=None))
    with pytest.raises(ValueError, match="holds no swapped attention"):
        from_pretrained(saved)
    edit(saved, lambda config: config.pop("attn_swap"))
    with pytest.raises(ValueError, match="holds no swapped attention"):
        from_pretrained(saved)
    with pytest.raises(ValueError, match="unexpected weights of the swapped attention"):
        BertForMaskedLM.from_pretrained(saved)


def test_stock_checkpoint_is_refused(tmp_path: Path) -> None:
    zoo.build("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no swapped attention .* swap it with patch_model"):
        from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no swapped attention; call patch_model before"):
        push_folder(tmp_path, "me/stock")
    with pytest.raises(ValueError, match="not swapped; call patch_model first"):
        push(zoo.build("bert"), "me/stock")
    named = "tokenizer must be a loaded tokenizer or image processor, got the name .gpt2."
    with pytest.raises(ValueError, match=named):
        push(zoo.build("bert"), "me/stock", tokenizer="gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="push takes a transformers model, got Linear"):
        push(torch.nn.Linear(2, 2), "me/stock")
    with pytest.raises(ValueError, match=r"there is no config\.json in it"):
        push_folder(tmp_path / "nowhere", "me/stock")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("bert.encoder.layer.0.output.dense.bias"), r"missing: bert\.encoder\.layer\.0\.output"),
        (lambda t: t.pop(next(k for k in t if ".attn_swap." in k)), r"missing.*attn_swap"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected: extra"),
        (
            lambda t: t.update({"bert.encoder.layer.2.attention.self.attn_swap.x": torch.ones(1)}),
            "unexpected.*attn_swap",
        ),
        (lambda t: t.update({"bert.encoder.layer.0.output.dense.bias": torch.ones(3)}), "mismatched: bert"),
        (lambda t: t.update({next(k for k in t if ".attn_swap." in k): torch.ones(7)}), "mismatched.*attn_swap"),
    ],
    ids=["missing", "missing swap", "unexpected", "unexpected swap", "mismatched", "mismatched swap"],
)
def test_keys_that_do_not_match_are_named(saved: Path, change: Callable[[Any], object], words: str) -> None:
    weights(saved, change)
    with pytest.raises(ValueError, match=words):
        from_pretrained(saved)


def test_loads_what_was_saved(saved: Path) -> None:
    expected = zoo.output(BertForMaskedLM.from_pretrained(saved)(**zoo.inputs("bert")))
    for auto_class in (None, "AutoModelForMaskedLM", "BertForMaskedLM", BertForMaskedLM):
        model = from_pretrained(saved, auto_class)
        assert type(model) is BertForMaskedLM
        assert torch.equal(zoo.output(model(**zoo.inputs("bert"))), expected)
    model, info = from_pretrained(saved, output_loading_info=True, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    model = from_pretrained(str(saved), device_map="auto")
    assert torch.equal(zoo.output(model(**zoo.inputs("bert"))), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"auto_class": "AutoConfig"}, "'AutoConfig' is no model class"),
        ({"auto_class": "os.system"}, "'os.system' is no model class"),
        ({"auto_class": "pipeline"}, "'pipeline' is no model class"),
        ({"auto_class": 3}, "3 is no model class"),
        ({"auto_class": BertModel}, "unexpected: cls"),
        ({"auto_class": "AutoModelForSequenceClassification"}, r"missing: .*classifier\.bias"),
        ({"attn_implementation": "eager"}, "attn_implementation would change or loosen"),
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes would change or loosen"),
        ({"config": {}}, "config would change or loosen"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_cannot_be(saved: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_pretrained(saved, **arguments)


@pytest.mark.parametrize("names", [[], None, ["AutoConfig"], ["os.system"], ["nope"]])
def test_architectures_are_not_trusted(saved: Path, names: Any) -> None:
    edit(saved, lambda config: config.update(architectures=names))
    with pytest.raises(ValueError, match=r"pass auto_class|architectures"):
        from_pretrained(saved)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"x" * 100])
def test_files_that_are_no_safetensors(saved: Path, content: bytes) -> None:
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(Exception):  # noqa: B017, PT011  # safetensors has an error class of its own
        from_pretrained(saved)
