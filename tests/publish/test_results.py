"""`results.json`: what was written is read, and what cannot be is an error that names the file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel

from hf_attn_swap import __version__, list_variants, patch_model
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.results import RunResult, read_swaps, versions

from .examples import FULL, full, sparse


def test_versions_are_those_that_a_run_reports() -> None:
    result = versions()
    assert result["hf_attn_swap"] == __version__
    assert not any("+" in number for number in result.values())
    assert RunResult.from_dict({**full(), "versions": result}).versions == result


STOCK = full(control=None, difference=None, stock=FULL["control"])
NAMED = full(study="minilm", steps=["map", "transfer"], license="mit")


@pytest.mark.parametrize("data", [full(), sparse(), STOCK, NAMED], ids=["full", "sparse", "stock", "named"])
def test_round_trip_is_exact(data: dict[str, Any], tmp_path: Path) -> None:
    first = RunResult.from_dict(data)
    first.save(tmp_path / "a.json")
    assert RunResult.load(tmp_path / "a.json") == first
    assert json.loads((tmp_path / "a.json").read_text()) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": 4}, "different layers"),
        ({"swaps": []}, "different layers"),
        ({"version": 2}, "version is 2"),
        ({"name": "no spaces"}, "no spaces"),
        ({"nothing": 1}, "nothing"),
        ({"base": {**FULL["base"], "relation": "child"}}, "relation"),
        ({"base": {"name": "me/model"}}, "relation"),
        ({"base": {**FULL["base"], "name": "../../etc"}}, "etc"),
        ({"converted": {**FULL["converted"], "seeds": [0, 1]}}, "each seed"),
        ({"converted": {**FULL["converted"], "metrics": []}}, "metrics"),
        ({"control": {**FULL["control"], "outliers": None}}, "same metrics"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_values_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunResult.from_dict(full(**change))


def test_a_figure_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    data = full()
    data["converted"]["metrics"][0]["values"][1] = math.nan
    with pytest.raises(ValueError, match="JSON"):
        RunResult.from_dict(data).save(tmp_path / "results.json")


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"name": "x"}', b"\xff\xfe"])
def test_files_that_are_no_results(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        RunResult.load(tmp_path / "results.json")


def test_every_record_of_the_repository_is_read() -> None:
    paths = sorted((Path(__file__).parents[2] / "model_cards").rglob("results.json"))
    assert paths
    for path in paths:
        assert json.loads(RunResult.load(path).to_json()) == json.loads(path.read_text("utf-8")), path


@pytest.mark.parametrize("variant", list_variants())
def test_the_swaps_of_a_config_are_what_the_model_runs(variant: str) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = patch_model(BertModel(BertConfig(vocab_size=8, **shape)), variant, layers=[1])
    modules, swaps = read_swaps(model.config.attn_swap)
    assert modules == 2
    assert [(swap.variant, swap.layers, swap.strength) for swap in swaps] == [(variant, (1,), 1.0)]
    assert swaps[0].components[0].options == model.config.attn_swap["swaps"][0]["options"][variant]


ALIASES = [(alias, name) for name in list_variants() for alias in get_variant(name).aliases]


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_records_of_older_names_are_read_under_the_canonical_name(alias: str, name: str) -> None:
    data = full()
    data["swaps"][0]["components"][0]["name"] = alias
    run = RunResult.from_dict(data)
    assert run.swaps[0].variant == name
    assert run.to_dict()["swaps"][0]["components"][0]["name"] == name
    entry = {"variant": alias, "options": {alias: {}}, "layers": [0], "strength": 1.0}
    _, (swap,) = read_swaps({"modules": 1, "swaps": [entry]})
    assert swap.variant == name


def test_a_record_of_a_variant_that_is_not_registered_is_read() -> None:
    """The card of a variant from another package can be shown without this package."""
    data = full()
    data["swaps"][0]["components"][0]["name"] = "from_elsewhere"
    assert RunResult.from_dict(data).swaps[0].variant == "from_elsewhere"


def test_layers_that_differ_only_in_their_fits_are_one_swap() -> None:
    """And layers of another strength are another swap."""
    options = {"modern_hopfield": {"alpha": 0.5}}
    entries: list[dict[str, Any]] = [
        {
            "variant": "modern_hopfield",
            "options": options,
            "layers": [1, 3],
            "strength": 1.0,
            "calibration": {"fit": "gain"},
        },
        {
            "variant": "modern_hopfield",
            "options": options,
            "layers": [2],
            "strength": 1.0,
            "calibration": {"fit": "map"},
        },
        {"variant": "modern_hopfield", "options": options, "layers": [0], "strength": 0.5},
    ]
    modules, swaps = read_swaps({"modules": 4, "swaps": entries})
    assert modules == 4
    assert [(swap.layers, swap.strength) for swap in swaps] == [((1, 2, 3), 1.0), ((0,), 0.5)]
