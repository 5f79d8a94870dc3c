"""A fit that is registered here, in no file of the package, lives the whole life of a swapped model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate, merge_calibration
from hf_attn_swap.core.checks import check_keys
from hf_attn_swap.layer.fitted import AROUND, CALL, FITTED, HEADS, Fitted, fitted
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap.patch import need_installation
from hf_attn_swap.variants.base import VARIANTS, register
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, refused, swaps
from tests.golden.saved import CHECKPOINTS, entries, load
from tests.harness.damage import put, rewritten
from tests.harness.places import turns
from tests.lifecycle.steps import same_bits

VARIANTS_OF_EACH_ROAD = ("outeffhop", "belief_star", "simpletron_resl")  # with scores, with `read`, without scores


@pytest.fixture
def turned() -> Iterator[type[Fitted]]:
    """A fit with a parameter, a buffer and a value in the config: the heads times a gain and a sign, plus a number."""

    @fitted("turned")
    class Turned(Fitted):
        place = HEADS

        def __init__(self, shift: float, geometry: Any) -> None:
            super().__init__()
            self.shift = shift
            self.gain = nn.Parameter(torch.linspace(0.5, 2.0, geometry.heads))
            self.register_buffer("sign", torch.ones(geometry.heads))
            self.sign[0] = -1.0

        @classmethod
        def check(cls, spec: Any, classes: Any, strength: float) -> None:
            check_keys(spec, {"shift"}, "turned")
            if not isinstance(spec["shift"], float) or not abs(spec["shift"]) < 9:
                raise ValueError(f"turned: shift must be a small number, got {spec!r}.")

        @classmethod
        def from_spec(cls, spec: Any, geometry: Any) -> Fitted:
            return cls(spec["shift"], geometry)

        def spec(self) -> Any:
            return {"shift": self.shift}

        def words(self) -> str:
            return f"heads turned ({self.shift})"

        def forward(self, heads_BLHD: torch.Tensor) -> torch.Tensor:
            return heads_BLHD * (self.gain * self.sign)[:, None] + self.shift

        def linear(self) -> Any:
            if self.shift:
                return super().linear()
            return self.gain * self.sign, None

    yield Turned
    del FITTED["turned"]


def with_fit(cls: Any, name: str, variant: str, shift: float = 0.25, dtype: torch.dtype = torch.float64) -> Any:
    """A patched model whose layers have the fit."""
    model = perturb(patch_model(fresh(name, dtype), variant))
    for swap in swaps(model):
        swap.put(cls(shift, swap.geometry).placed_like(next(model.parameters())))
    need_installation(model).refresh()
    return model


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, VARIANTS_OF_EACH_ROAD))
def test_it_lives_as_long_as_the_swap(turned: Any, name: str, variant: str, tmp_path: Path) -> None:
    batch, stock = batch_of(name, torch.float32), forward(fresh(name, torch.float32), batch_of(name, torch.float32))
    without = forward(perturb(patch_model(fresh(name, torch.float32), variant)), batch)
    model = set_strength(with_fit(turned, name, variant, dtype=torch.float32), 0.7)
    wanted = forward(model, batch)
    assert distance(wanted, without) > 1e-3
    assert all(row.runs.endswith("; heads turned (0.25)") for row in describe(model).rows if row.strength is not None)
    copied = copy.deepcopy(model)
    assert same_bits(forward(copied, batch), wanted)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert same_bits(forward(loaded, batch), wanted)
    assert [swap.spec() for swap in swaps(loaded)] == [swap.spec() for swap in swaps(model)]
    assert not perturb(patch_model(fresh(name, torch.float32), variant)).load_state_dict(
        {key: value for key, value in model.state_dict().items() if ".turned." not in key}, strict=False
    )[1]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*turned\.gain"):
        patch_model(fresh(name, torch.float32), variant).load_state_dict(model.state_dict())
    for fitted_model in (model, copied, loaded):
        assert same_bits(forward(set_strength(fitted_model, 0.0), batch), stock)
        assert same_bits(forward(unpatch_model(fitted_model), batch), stock)


@pytest.mark.filterwarnings("ignore:layers .* lose the converted:UserWarning")
def test_what_it_changed_around_the_swap_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the swap leaves its layer, and before anything else is changed; a refusal leaves all as it is."""
    monkeypatch.setattr("hf_attn_swap.layer.fitted.FITTED", dict(FITTED))
    taken: list[str] = []

    class Scaled(Fitted):
        place = AROUND
        check = from_spec = classmethod(lambda cls, *_: cls())
        refuses = False

        def spec(self) -> Any:
            return True

        def words(self) -> str:
            return "scaled"

        def undo(self, root: nn.Module, path: str) -> Any:
            if self.refuses:
                raise ValueError("it is gone.")
            assert root.get_submodule(path) is not None
            return lambda: taken.append(path)

    fitted("scaled")(Scaled)
    model = patch_model(fresh("llama"), "outeffhop")
    fits = [Scaled() for _ in swaps(model)]
    for swap, fit in zip(swaps(model), fits, strict=True):
        swap.put(fit)
    need_installation(model).refresh()
    paths = [f"model.layers.{index}.self_attn" for index in range(3)]
    fits[2].refuses = True
    block = copy.deepcopy(model.config.attn_swap)
    for change in (lambda: unpatch_model(model), lambda: patch_model(model, "belief", layers=[1, 2])):
        with refused("it is gone."):
            change()
        assert taken == []
        assert model.config.attn_swap == block
    unpatch_model(model, layers=[0])
    patch_model(model, "belief", layers=[1])
    assert taken == paths[:2]
    fits[2].refuses = False
    unpatch_model(model)
    assert taken == paths


def test_the_way_back(turned: Any) -> None:
    """To the fits of before, which may be none; a later fit is a new one, and the old one is kept as it was."""
    model, batch = perturb(patch_model(fresh("bert"), "outeffhop")), batch_of("bert")
    none, without = [swap.fitted for swap in swaps(model)], forward(model, batch)
    calibrate(model, [batch_of("bert", seed=seed) for seed in range(12)], fit="gain", progress=False)
    before, wanted, block = [swap.fitted for swap in swaps(model)], forward(model, batch), model.config.attn_swap
    calibrate(model, [batch_of("bert", seed=99 + seed) for seed in range(12)], fit="map", progress=False)
    for swap in swaps(model):
        swap.put(turned(0.25, swap.geometry).placed_like(next(model.parameters())))
    need_installation(model).refresh()
    assert distance(forward(model, batch), wanted) > 1e-3
    for state, logits in ((before, wanted), (none, without), (before, wanted)):
        for swap, fits in zip(swaps(model), state, strict=True):
            swap.restore(fits)
        need_installation(model).refresh()
        assert same_bits(forward(model, batch), logits)
    assert model.config.attn_swap == block


@pytest.mark.parametrize("calibrated", [False, True])
def test_merged(turned: Any, calibrated: bool, tmp_path: Path) -> None:
    """Into W_o; behind a calibration it meets W_o first."""
    model, batch = with_fit(turned, "bert", "outeffhop", shift=0.0), batch_of("bert")
    if calibrated:
        calibrate(model, [batch_of("bert", seed=seed) for seed in range(12)], progress=False)
    wanted = forward(model, batch)
    merge_calibration(model)
    assert distance(forward(model, batch), wanted) < 1e-11
    assert not any(".turned." in key or ".calibration." in key for key in model.state_dict())
    assert "heads turned" not in str(describe(model))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert same_bits(forward(loaded, batch), forward(model, batch))


def test_a_fit_that_is_no_linear_map_is_not_merged(turned: Any) -> None:
    model, batch = with_fit(turned, "bert", "outeffhop"), batch_of("bert")
    wanted, block = forward(model, batch), copy.deepcopy(model.config.attn_swap)
    with refused("'turned' is no linear map", "keep it"):
        merge_calibration(model)
    assert same_bits(forward(model, batch), wanted)
    assert model.config.attn_swap == block


def test_a_class_that_is_no_fit_is_refused() -> None:
    class Empty(Fitted):
        place = CALL

    before = dict(FITTED)
    for name in (*FITTED, *VARIANTS, "layers", "retrained", "a.b", ""):
        with refused("cannot be the name of a fit"):
            fitted(name)(Empty)
    for place, method in ((CALL, "prepare"), (HEADS, "forward"), (AROUND, "undo")):
        with refused("needs the method", method):
            fitted("empty")(type("Empty", (Fitted,), {"place": place}))
    for method in ("check", "from_spec", "spec", "words"):
        others = {"prepare", "check", "from_spec", "spec", "words"} - {method}
        with refused("needs the method", method):
            fitted("empty")(type("Empty", (Fitted,), {"place": CALL, **dict.fromkeys(others, print)}))
    with refused("place must be one of"):
        fitted("empty")(type("Empty", (Fitted,), {}))
    assert before == FITTED


def test_a_variant_with_the_name_of_a_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_attn_swap.variants.base.VARIANTS", {})
    cls = register("calibration")(type("Named", (VARIANTS["softmax"],), {}))
    with refused("is the name of a fit"):
        Swap((cls,), {"calibration": {}}, swaps(patch_model(fresh("bert"), "softmax"))[0].geometry)


# ---- Damaged descriptions of every fit of the registry. The golden checkpoints have a whole one of each.


def described(name: str) -> list[tuple[Path, int, Any]]:
    """Where the golden checkpoints describe this fit: the folder, the number of the entry, and the description."""
    return [
        (folder, place, entry[name])
        for folder in CHECKPOINTS
        for place, entry in enumerate(entries(folder))
        if name in entry
    ]


def damaged(spec: Any) -> Iterator[Any]:
    """Values that are like a description of a fit, and are none."""
    yield from (None, False, -1, 0, 1.5, 10**30, float("nan"), "", "x" * 3000, "__import__('os')", [], {}, [spec])
    yield {"spec": spec}
    yield 1 if spec is True else True
    if isinstance(spec, list):
        yield from (
            spec[:-1],
            [*spec, len(spec)],
            [*spec, spec[0]],
            [*spec[1:], spec[1]],
            [str(entry) for entry in spec],
        )
    if isinstance(spec, dict):
        yield {**spec, "code": "print(1)"}
        for key, value in spec.items():
            yield {other: entry for other, entry in spec.items() if other != key}
            yield from ({**spec, key: wrong} for wrong in (None, 1, "other", [value]))


@pytest.mark.parametrize("name", FITTED)
def test_a_damaged_description_is_refused(name: str, tmp_path: Path) -> None:
    descriptions = described(name)
    assert descriptions, "no golden checkpoint has this fit; python -m tests.golden.make makes them"
    folder, place, spec = descriptions[0]
    load(rewritten(folder, tmp_path, put("attn_swap", "swaps", place, name, value=spec)))
    for wrong in damaged(spec):
        where = rewritten(folder, tmp_path, put("attn_swap", "swaps", place, name, value=wrong))
        with pytest.raises(ValueError, match=r"the swap described in config.json cannot be used") as caught:
            load(where)
        assert len(str(caught.value)) < 1000
