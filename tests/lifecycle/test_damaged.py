"""Damaged, foreign, newer and hostile checkpoints raise clear errors and never load silently as stock models."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_attn_swap import patch_model
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, swaps
from tests.harness.places import in_turn
from tests.lifecycle.steps import same_bits

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("checkpoint")
    patch_model(fresh("bert", torch.float32), "outeffhop+gated", strength=0.3).save_pretrained(where)
    return where


def rewritten(folder: Path, where: Path, change: Change) -> Path:
    """A copy of a checkpoint with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (where / "config.json").write_text(json.dumps(config))
    (where / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return where


def put(*path: str | int, value: Any) -> Change:
    """Set one entry of the config."""

    def change(config: dict[str, Any]) -> None:
        place: Any = config
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    """Remove one entry of the config."""

    def change(config: dict[str, Any]) -> None:
        place: Any = config
        for part in path[:-1]:
            place = place[part]
        del place[path[-1]]

    return change


def twice(config: dict[str, Any]) -> None:
    config["attn_swap"]["swaps"].append(copy.deepcopy(config["attn_swap"]["swaps"][0]))


BLOCK, SWAP = ("attn_swap",), ("attn_swap", "swaps", 0)
DAMAGE: dict[str, tuple[Change, str]] = {
    "empty": (put(*BLOCK, value={}), "must have exactly"),
    "a list": (put(*BLOCK, value=[]), "must have exactly"),
    "a string": (put(*BLOCK, value="softmax"), "must have exactly"),
    "false": (put(*BLOCK, value=False), "must have exactly"),
    "extra key": (put(*BLOCK, "code", value="print(1)"), "must have exactly"),
    "newer": (put(*BLOCK, "version", value=2), "newer hf_attn_swap"),
    "newer and of another shape": (put(*BLOCK, value={"version": 7, "layers": {}}), "newer hf_attn_swap"),
    "version 0": (put(*BLOCK, "version", value=0), "version must be 1"),
    "version true": (put(*BLOCK, "version", value=True), "version must be 1"),
    "version text": (put(*BLOCK, "version", value="1"), "version must be 1"),
    **{f"without {key}": (drop(*BLOCK, key), "must have exactly") for key in ("version", "modules", "swaps")},
    **{f"no {key}": (drop(*SWAP, key), "must have exactly") for key in ("variant", "layers", "options", "strength")},
    "modules text": (put(*BLOCK, "modules", value="3"), "modules must be"),
    "modules 0": (put(*BLOCK, "modules", value=0), "modules must be"),
    "modules huge": (put(*BLOCK, "modules", value=10**30), "modules must be"),
    "modules of another model": (put(*BLOCK, "modules", value=99), "another model"),
    "swaps empty": (put(*BLOCK, "swaps", value=[]), "swaps must be"),
    "swaps a mapping": (put(*BLOCK, "swaps", value={"0": {}}), "swaps must be"),
    "swaps of text": (put(*BLOCK, "swaps", value=["belief"]), "must have exactly"),
    "swaps of null": (put(*BLOCK, "swaps", value=[None]), "must have exactly"),
    "swap twice": (twice, "swapped twice"),
    "swaps too many": (put(*BLOCK, "swaps", value=[None] * 50), "swaps must be"),
    "layers empty": (put(*SWAP, "layers", value=[]), "layers must be"),
    "layers text": (put(*SWAP, "layers", value="012"), "layers must be"),
    "layers true": (put(*SWAP, "layers", value=[True]), "layers must be"),
    "layers fractional": (put(*SWAP, "layers", value=[0.0]), "layers must be"),
    "layers negative": (put(*SWAP, "layers", value=[-1]), "layers must be"),
    "layers too high": (put(*SWAP, "layers", value=[3]), "layers must be"),
    "layers huge": (put(*SWAP, "layers", value=[10**30]), "layers must be"),
    "layers nested": (put(*SWAP, "layers", value=[[0]]), "layers must be"),
    "layers repeated": (put(*SWAP, "layers", value=[0, 0]), "swapped twice"),
    "variant null": (put(*SWAP, "variant", value=None), "variant must be a name"),
    "variant a list": (put(*SWAP, "variant", value=["gated"]), "variant must be a name"),
    "variant unknown": (put(*SWAP, "variant", value="flash"), "unknown variant"),
    "variant empty": (put(*SWAP, "variant", value=""), "unknown variant"),
    "variant code": (put(*SWAP, "variant", value="__import__('os').abort()"), "unknown variant"),
    "variant path": (put(*SWAP, "variant", value="../../gated"), "unknown variant"),
    "variant dotted": (put(*SWAP, "variant", value="os.system"), "unknown variant"),
    "variant dunder": (put(*SWAP, "variant", value="__class__"), "unknown variant"),
    "variant long": (put(*SWAP, "variant", value="+".join(["gated"] * 50)), "both change the read"),
    "options null": (put(*SWAP, "options", value=None), "must have exactly"),
    "options flat": (put(*SWAP, "options", value={"kind": "linear"}), "must have exactly"),
    "options foreign": (put(*SWAP, "options", "belief", value={}), "must have exactly"),
    "options a list": (put(*SWAP, "options", "gated", value=[1]), "options of gated must be a dict"),
    "option unknown": (put(*SWAP, "options", "gated", "depth", value=3), "gated: unknown option 'depth'"),
    "option dunder": (
        put(*SWAP, "options", "gated", "__class__", value=3),
        "gated: unknown option '__class__'",
    ),
    "option of another type": (put(*SWAP, "options", "gated", "pi_init", value="0.25"), "pi_init must be"),
    "option a mapping": (put(*SWAP, "options", "gated", "kind", value={"a": 1}), "kind must be"),
    "option out of range": (put(*SWAP, "options", "gated", "pi_init", value=1.5), "between 0 and 1"),
    "option not a number": (put(*SWAP, "options", "gated", "pi_init", value=math.nan), "pi_init must be"),
    "strength text": (put(*SWAP, "strength", value="1"), "strength must be"),
    "strength true": (put(*SWAP, "strength", value=True), "strength must be"),
    "strength null": (put(*SWAP, "strength", value=None), "strength must be"),
    "strength above 1": (put(*SWAP, "strength", value=1.5), "strength must be"),
    "strength negative": (put(*SWAP, "strength", value=-0.1), "strength must be"),
    "strength not a number": (put(*SWAP, "strength", value=math.nan), "strength must be"),
    "strength infinite": (put(*SWAP, "strength", value=math.inf), "strength must be"),
    **{
        f"neutral start {value!r}": (put(*SWAP, "neutral_start", value=value), "neutral_start must be a whole number")
        for value in (0, -1, 61, 10**30, True, "10", 1.5, None, [10])
    },
    **{
        f"retrained {value!r}": (put(*SWAP, "retrained", value=value), "retrained must be true or absent")
        for value in (False, None, 1, "yes")
    },
    **{
        f"value scale {value!r}": (put(*SWAP, "value_scale", value=value), "value_scale must be true")
        for value in (False, None, 1, True)  # the swap is of a variant that does not project
    },
    "another attention": (put("attn_implementation", value="sdpa"), "cannot run with"),
    "no attention": (drop("attn_implementation"), "cannot run with"),
}


@pytest.mark.parametrize(("change", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_block(folder: Path, tmp_path: Path, change: Change, reason: str) -> None:
    where = rewritten(folder, tmp_path, change)
    with pytest.raises(ValueError, match=reason) as caught:
        transformers.AutoModelForMaskedLM.from_pretrained(where)
    assert len(str(caught.value)) < 2000
    assert "swap" in str(caught.value)
    with pytest.raises(ValueError, match=f"{reason}|was not patched"):
        transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(where)).eval()(
            **batch_of("bert", torch.float32)
        )


def test_without_its_block(folder: Path, tmp_path: Path) -> None:
    """Our attention is named, but nothing says what was swapped: the weights left over, or the first call, say so."""
    where = rewritten(folder, tmp_path, drop("attn_swap"))
    with pytest.raises(ValueError, match=r"attn_swap|not patched"):
        forward(transformers.AutoModelForMaskedLM.from_pretrained(where), batch_of("bert", torch.float32))


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_by_hand(name: str, other: str, tmp_path: Path) -> None:
    patch_model(fresh(name, torch.float32), "belief").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="leave that argument out"):
        type(fresh(name)).from_pretrained(tmp_path, attn_implementation=other)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_wish_for_an_attention(name: str, tmp_path: Path) -> None:
    """Tools such as the server of transformers pass None for "no wish", to classes and to Auto classes."""
    model = patch_model(fresh(name, torch.float32), "belief")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=None)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation=None)
    batch = batch_of(name, torch.float32)
    assert same_bits(forward(again, batch), forward(model, batch))
    assert same_bits(forward(type(model).from_pretrained(tmp_path, config=config), batch), forward(model, batch))


@in_turn()
def test_weights(name: str, variant: str, tmp_path: Path) -> None:
    """One weight gone, one too many, one of another shape: each is named."""
    model, batch = patch_model(fresh(name, torch.float32), variant), batch_of(name, torch.float32)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    own = sorted(key for key in whole if ".attn_swap." in key)

    def load(state: dict[str, torch.Tensor], **arguments: Any) -> Any:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return type(model).from_pretrained(tmp_path, **arguments)

    core = next(key for key, module in model.named_modules() if getattr(module, "attn_swap", None) is swaps(model)[0])
    extra = f"{core}.attn_swap.foreign.weight"
    with pytest.raises(ValueError, match=f"unexpected weights of the swapped attention.*{extra}"):
        load({**whole, extra: torch.ones(3)})
    for key in own[:1] + own[-1:]:
        end = key.partition(".attn_swap.")[2]  # transformers may rename what leads to the module
        with pytest.raises(ValueError, match=f"missing weights of the swapped attention.*{end}"):
            load({other: value for other, value in whole.items() if other != key})
        with pytest.raises(ValueError, match=f"mismatched weights of the swapped attention.*{end}"):
            load({**whole, key: torch.ones(1, 1, 7)}, ignore_mismatched_sizes=True)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own refusal
            load({**whole, key: torch.ones(1, 1, 7)})
    assert torch.equal(forward(load(whole), batch), forward(model, batch))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_weights_of_another_variant(name: str, tmp_path: Path) -> None:
    patch_model(fresh(name, torch.float32), "belief_star").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = patch_model(fresh(name, torch.float32), "gated").config.attn_swap
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_swap": other}))
    with pytest.raises(ValueError, match=r"missing weights of the swapped attention.*gated"):
        type(fresh(name)).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_config_with_other_layers(name: str, tmp_path: Path) -> None:
    """A depth that does not fit the block: the class that was saved, or nothing."""
    patch_model(fresh(name, torch.float32), "softmax").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_swap"]["modules"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="another number of attention modules"):
        type(fresh(name)).from_pretrained(tmp_path)
