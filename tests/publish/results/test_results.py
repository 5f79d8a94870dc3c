"""`results.json` is read strictly: what is missing, unknown, of another type or not finite is an error naming it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from hf_attn_swap import __version__, list_variants, patch_model
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.results import Metric, RunResult, applied_swaps, read_swaps, versions

from .examples import FULL, full, metric, result, sparse

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
OBJECTS = [path for path in [(), *PLACES] if isinstance(at(FULL, path), dict) and path[-1:] not in [(n,) for n in FREE]]


def test_versions_are_those_that_a_run_reports() -> None:
    found = versions()
    assert found["hf_attn_swap"] == __version__
    assert torch.__version__.startswith(found["torch"])
    assert not any("+" in number for number in found.values())
    assert RunResult.from_dict({**full(), "versions": found}).versions == found


@pytest.mark.parametrize("data", [full(), sparse()], ids=["full", "sparse"])
def test_round_trip_is_exact(data: dict[str, Any], tmp_path: Path) -> None:
    first = RunResult.from_dict(data)
    first.save(tmp_path / "a.json")
    second = RunResult.load(tmp_path / "a.json")
    second.save(tmp_path / "b.json")
    assert second == first
    assert second.to_dict() == first.to_dict()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["version"] == 1


@pytest.mark.parametrize("path", FIELDS, ids=text)
def test_missing_field_is_named(path: Path_) -> None:
    data = full()
    del at(data, path[:-1])[path[-1]]
    with pytest.raises(ValueError, match="missing fields") as error:
        RunResult.from_dict(data)
    assert text(path) in str(error.value)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: text(path) or "top")
def test_unknown_field_is_named(path: Path_) -> None:
    data = full()
    at(data, path)["acuracy"] = 1
    with pytest.raises(ValueError, match="unknown fields") as error:
        RunResult.from_dict(data)
    assert text((*path, "acuracy")) in str(error.value)


@pytest.mark.parametrize("path", PLACES, ids=text)
def test_wrong_types_are_named(path: Path_) -> None:
    """Each value in turn becomes everything of another type."""
    right = type(at(FULL, path))
    fine = {float: (float, int), type(None): (type(None), str)}.get(right, (right,))
    if path[:1] in [("control",), ("cost",), ("difference",)] and len(path) == 1:
        fine = (dict, type(None))
    if path[-1] in ("revision", "config", "learning_rate", "optimizer", "outliers"):
        fine = (*fine, type(None), str) if path[-1] in ("revision", "config", "optimizer") else (*fine, type(None))
    if "options" in path[:-1]:
        fine = (str, bool, int, float, type(None))
    for wrong in (None, True, 3, 0.5, "some text", [[]], {"a": []}, object(), b"x", {1}, 1j):
        if type(wrong) in fine:
            continue
        data = full()
        at(data, path[:-1])[path[-1]] = wrong
        with pytest.raises(ValueError, match=r"must be|missing fields") as error:
            RunResult.from_dict(data)
        assert text(path) in str(error.value)


def test_study_and_steps_may_be_left_out() -> None:
    """Files of earlier runs have neither: nothing is made up for them."""
    found = RunResult.from_dict(full())
    assert (found.study, found.steps) == (None, None)
    assert not {"study", "steps"} & found.to_dict().keys()
    named = RunResult.from_dict(full(study="minilm", steps=["map", "transfer"]))
    assert (named.study, named.steps) == ("minilm", ("map", "transfer"))
    assert RunResult.from_dict(json.loads(json.dumps(named.to_dict()))) == named


def test_the_base_model_beside_which_no_control_was_trained() -> None:
    stock = full()["control"]
    found = RunResult.from_dict(full(control=None, difference=None, stock=stock))
    assert found.stock is not None
    assert RunResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert "stock" not in RunResult.from_dict(full()).to_dict()
    with pytest.raises(ValueError, match="stock must be null beside a control"):
        RunResult.from_dict(full(stock=stock))
    stock["metrics"][0]["name"] = "f1"
    with pytest.raises(ValueError, match=r"stock\.metrics must be the same as converted\.metrics"):
        RunResult.from_dict(full(control=None, difference=None, stock=stock))


def test_a_base_model_that_is_a_folder() -> None:
    data = full()
    data["base"] |= {"name": "checkpoint-400", "on_hub": False}
    found = RunResult.from_dict(data)
    assert RunResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert "on_hub" not in RunResult.from_dict(full()).to_dict()["base"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_refused_with_advice(bad: float) -> None:
    data = full()
    data["converted"]["metrics"][0]["values"][1] = bad
    with pytest.raises(ValueError, match=r"converted\.metrics\[0\]\.values\[1\] is .* leave the seed out"):
        RunResult.from_dict(data)


def test_numpy_scalars_become_pythons_own() -> None:
    data = full(modules=np.int64(6), wall_seconds=np.float32(0.5), parameters_added=np.uint8(3))
    data["converted"]["metrics"][0] = metric("accuracy", np.float32(0.1), np.float64(0.2), np.int64(1))
    data["converted"]["metrics"][0]["higher_is_better"] = np.bool_(True)
    data["swaps"][0]["layers"] = [np.int32(i) for i in (0, 1)]
    data["name"] = np.str_("run")
    got = RunResult.from_dict(data)
    assert got.converted.metrics[0].values == (float(np.float32(0.1)), 0.2, 1.0)
    for path in places(got.to_dict()):
        assert not isinstance(at(got.to_dict(), path), np.generic)
    json.dumps(got.to_dict())
    with pytest.raises(ValueError, match="must be a number"):
        Metric(name="a", higher_is_better=True, values=(torch.tensor(1.0),))
    with pytest.raises(ValueError, match="must be a list"):
        Metric(name="a", higher_is_better=True, values=np.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "name must be a name without an owner"),
        ({"name": "no spaces"}, "name must be a name on the Hub"),
        ({"modules": 4}, "modules must be above 4"),
        ({"swaps": []}, "swaps must be at least one"),
        ({"parameters_added": -1}, "at least 0"),
        ({"conversion": []}, "conversion must be at least one step"),
        ({"steps": ["map", "magic"]}, "steps must be of gain, map, transfer, distil, schedule, fine_tune"),
        ({"steps": "map"}, "steps must be a list"),
        ({"study": "minilm-bel"}, "study must be the beginning of minilm-belief-reviews, before a dash"),
        ({"limits": []}, "limits must be at least one sentence"),
        ({"license": "Apache 2.0"}, "license must be an identifier"),
        ({"task": "Text Classification"}, "task must be a pipeline tag"),
        ({"language": ["English"]}, "language must be codes"),
        ({"versions": {"torch": "2"}}, "versions must be of hf_attn_swap, torch, transformers"),
        ({"hardware": ""}, "hardware must be a line of text"),
        ({"hardware": "two\nlines"}, "hardware must be a line of text"),
        ({"hardware": "half \ud800"}, "hardware must be a line of text"),
        ({"wall_seconds": -1}, "wall_seconds must be at least 0"),
        ({"version": 2}, "version 2, and this hf_attn_swap reads version 1"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "version '1'"),
    ],
)
def test_values_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunResult.from_dict(full(**change))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("base", "relation"), "child", r"base\.relation must be one of adapter, finetune"),
        (("base", "auto_class"), "os system", r"base\.auto_class must be a model class"),
        (("base", "auto_class"), "os.path.AutoModel", r"base\.auto_class must be a model class"),
        (("base", "name"), "../../etc", r"base\.name must be a name on the Hub"),
        (("data", "name"), "a b", r"data\.name must be a name on the Hub"),
        (("data", "rows"), {"test": 0}, r"data\.rows must be counts above 0"),
        (("data", "evaluated"), "dev", r"data\.evaluated must be one of the splits"),
        (("swaps", 0, "strength"), 1.5, r"swaps\[0\]\.strength must be in \[0, 1\]"),
        (("swaps", 0, "layers"), [1, 1], r"swaps\[0\]\.layers must be one or more, all different"),
        (("swaps", 0, "layers"), [3], "swaps must be of different layers"),
        (("swaps", 0, "layers"), [-1], "counted from 0"),
        (("swaps", 0, "components"), [], r"swaps\[0\]\.components must be at least one"),
        (("converted", "seeds"), [0, 0, 1], r"converted\.seeds must be one or more, all different"),
        (("converted", "seeds"), [0, 1], r"accuracy has 3 values for 2 seeds"),
        (("converted", "metrics"), [], r"converted\.metrics must be at least one"),
        (("converted", "outliers"), [], r"converted\.outliers must be at least one, or null"),
        (("converted", "outliers", 0, "name"), "loss", "all of different names"),
        (("control", "metrics", 0, "name"), "f1", r"control\.metrics must be the same"),
        (("control", "metrics", 0, "higher_is_better"), False, r"control\.metrics must be the same"),
        (("control", "outliers"), None, r"control\.outliers must be the same"),
        (("cost", "ratio"), 0, r"cost\.ratio must be above 0"),
        (("budget", "batch_size"), 0, r"budget\.batch_size must be above 0"),
    ],
)
def test_nested_values_that_cannot_be(path: Path_, value: Any, message: str) -> None:
    data = full()
    at(data, path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        RunResult.from_dict(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[1, 2]", "JSON object"),
        (b'{"name": "x"}', "JSON object"),
        (b"\xff\xfe", "utf-8"),
        (b'{"version": 1, "version": 1}', "repeated fields: version"),
    ],
)
def test_files_that_are_no_results(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        RunResult.load(path)
    assert str(path) in str(error.value)


def test_a_file_with_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(full(wall_seconds=math.nan)))
    with pytest.raises(ValueError, match="wall_seconds is nan"):
        RunResult.load(path)


def test_mean_and_spread() -> None:
    assert Metric(name="a", higher_is_better=True, values=(1.0, 2.0, 4.5)).mean == 2.5
    assert Metric(name="a", higher_is_better=True, values=(1.0, 3.0)).spread == pytest.approx(math.sqrt(2))
    assert Metric(name="a", higher_is_better=True, values=(1.0,)).spread is None
    assert result().variant == "belief, outeffhop+gated"


def test_results_do_not_share_what_they_were_made_from() -> None:
    data = full()
    first = RunResult.from_dict(data)
    before = copy.deepcopy(first.to_dict())
    data["data"]["rows"]["test"] = 7
    data["swaps"][1]["components"][1]["options"]["kind"] = "mlp"
    assert first.to_dict() == before


def test_an_option_may_be_a_list_of_whole_numbers() -> None:
    data = full()
    options = data["swaps"][1]["components"][1]["options"]
    options["full_heads"] = [0, 2]
    assert RunResult.from_dict(data).swaps[1].components[1].options["full_heads"] == [0, 2]
    for wrong in ([0.5], ["0"], [True], [[0]], {"0": 1}):
        options["full_heads"] = wrong
        with pytest.raises(ValueError, match=r"swaps\[1\].components\[1\].options.full_heads(\[0\])? must be "):
            RunResult.from_dict(data)


@pytest.mark.parametrize("variant", list_variants())
def test_applied_swaps_say_what_the_model_runs(variant: str) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=8, **shape))
    with pytest.raises(ValueError, match="is not swapped; call patch_model first"):
        applied_swaps(model)
    patch_model(model, variant, layers=[1])
    modules, swaps = applied_swaps(model)
    assert modules == 2
    assert [(swap.variant, swap.layers, swap.strength) for swap in swaps] == [(variant, (1,), 1.0)]
    assert swaps[0].components[0].formula
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
    with pytest.raises(ValueError, match="components must be different variants"):
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
