"""`results.json` is read strictly: what is missing, unknown, of another type or not finite is an error naming it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from hf_attn_swap import __version__, list_variants, patch_model
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.results import Metric, RunResult, read_swaps, versions

from .examples import FULL, full, metric, sparse

Path_ = tuple[str | int, ...]


def places(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of every field and element below `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(data: Any, path: Path_) -> Any:
    for key in path:
        data = data[key]
    return data


def text(path: Path_) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]


FREE = ("options", "rows", "versions")  # objects whose names are the user's
PLACES = list(places({key: value for key, value in FULL.items() if key != "version"}))
FIELDS = [path for path in PLACES if isinstance(path[-1], str) and path[-2:-1] not in [(name,) for name in FREE]]


def test_versions_are_those_that_a_run_reports() -> None:
    found = versions()
    assert found["hf_attn_swap"] == __version__
    assert not any("+" in number for number in found.values())
    assert RunResult.from_dict({**full(), "versions": found}).versions == found


STOCK = full(control=None, difference=None, stock=FULL["control"])
NAMED = full(study="minilm", steps=["map", "transfer"], license="mit")


@pytest.mark.parametrize("data", [full(), sparse(), STOCK, NAMED], ids=["full", "sparse", "stock", "named"])
def test_round_trip_is_exact(data: dict[str, Any], tmp_path: Path) -> None:
    first = RunResult.from_dict(data)
    first.save(tmp_path / "a.json")
    assert RunResult.load(tmp_path / "a.json") == first
    assert json.loads((tmp_path / "a.json").read_text()) == data


def test_every_field_is_needed_known_and_of_its_type() -> None:
    """Each field in turn is left out, misspelt, and of every other type; the error names it."""
    optional = {"license"}
    for path in FIELDS:
        data = full()
        value = at(data, path[:-1]).pop(path[-1])
        if path[-1] not in optional:
            with pytest.raises(ValueError, match=rf"missing fields: .*{re.escape(text(path))}"):
                RunResult.from_dict(data)
        at(data, path[:-1])[f"{path[-1]}_"] = value
        with pytest.raises(ValueError, match=rf"unknown fields: .*{re.escape(text(path))}_"):
            RunResult.from_dict(data)
    for path in PLACES:
        for wrong in (object(), b"x", 1j, math.nan, "two\nlines", [[object()]]):
            data = full()
            at(data, path[:-1])[path[-1]] = wrong
            with pytest.raises(ValueError, match=re.escape(text(path))):
                RunResult.from_dict(data)


def test_what_is_not_finite_is_refused_with_advice() -> None:
    data = full()
    data["converted"]["metrics"][0]["values"][1] = np.float32("nan")
    with pytest.raises(ValueError, match=r"converted\.metrics\[0\]\.values\[1\] is nan.* leave the seed out"):
        RunResult.from_dict(data)


def test_numpy_scalars_become_pythons_own() -> None:
    data = full(modules=np.int64(6), wall_seconds=np.float32(0.5))
    data["converted"]["metrics"][0] = metric("accuracy", np.float32(0.1), np.float64(0.2), np.int64(1))
    run = RunResult.from_dict(data)
    assert run.converted.metrics[0].values == (float(np.float32(0.1)), 0.2, 1.0)
    json.dumps(run.to_dict())
    with pytest.raises(ValueError, match="values"):
        Metric(name="a", higher_is_better=True, values=(torch.tensor(1.0),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("name",), "a/b", "name must be"),
        (("name",), "no spaces", "name must be a name on the Hub"),
        (("modules",), 4, "swaps must be"),
        (("swaps",), [], "swaps must be"),
        (("steps",), ["map", "magic"], "steps must be of"),
        (("study",), "bert", "study must be"),
        (("license",), "Apache 2.0", "license must be"),
        (("task",), "Text Classification", "task must be"),
        (("language",), ["<b>"], "language must be"),
        (("versions",), {"torch": "2"}, "versions must be"),
        (("version",), 2, "version is 2"),
        (("base", "relation"), "child", r"base\.relation must be one of"),
        (("base", "auto_class"), "os.path.AutoModel", r"base\.auto_class must be"),
        (("base", "name"), "../../etc", r"base\.name must be a name on the Hub"),
        (("data", "name"), "a b", r"data\.name must be a name on the Hub"),
        (("data", "rows"), {"test": 0}, r"data\.rows must be"),
        (("data", "evaluated"), "dev", r"data\.evaluated must be one of"),
        (("swaps", 0, "strength"), 1.5, r"swaps\[0\]\.strength must be in"),
        (("swaps", 0, "layers"), [1, 1], r"swaps\[0\]\.layers must be"),
        (("swaps", 0, "layers"), [3], "swaps must be of different layers"),
        (("swaps", 0, "layers"), [-1], r"swaps\[0\]\.layers must be"),
        (("swaps", 0, "components"), [], r"swaps\[0\]\.components must be"),
        (("converted", "seeds"), [0, 0, 1], r"converted\.seeds must be"),
        (("converted", "seeds"), [0, 1], r"converted\.seeds must be"),
        (("converted", "metrics"), [], r"converted\.metrics must be"),
        (("converted", "outliers", 0, "name"), "loss", "different names"),
        (("control", "metrics", 0, "name"), "f1", "control must be of the metrics"),
        (("control", "outliers"), None, "control must be of the metrics"),
        (("control",), None, "difference must be null"),
        (("stock",), FULL["control"], "stock must be null"),
    ],
)
def test_values_that_cannot_be(path: Path_, value: Any, message: str) -> None:
    data = full()
    at(data, path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        RunResult.from_dict(data)


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
    data["swaps"][0]["components"].append({**data["swaps"][0]["components"][0], "name": name})
    with pytest.raises(ValueError, match="different variants"):
        RunResult.from_dict(data)


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
