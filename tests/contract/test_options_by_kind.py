"""Options whose default depends on the kind of the attention module: chosen when a model is patched, and then kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import describe, patch_model
from hf_attn_swap.core.kind import Kind
from hf_attn_swap.families import sites
from hf_attn_swap.layer.registry import fit_options, parse, parse_options
from hf_attn_swap.variants import clipped_softmax
from tests import zoo

from .cells import EVERY, EXTRA_CELLS, FAMILY_NAMES, Cell
from .harness import assert_identical, batch_of, fresh, refused, run, swaps
from .llava import llava

PUBLISHED = {Kind.ENCODER: -0.025, Kind.DECODER: -12 / 512, Kind.IMAGE: -0.00001}
OF_SPEC = {"causal": Kind.DECODER, "image": Kind.IMAGE, "encoder": Kind.ENCODER}
CELLS: tuple[Cell, ...] = (*((name, {}) for name in EVERY), *EXTRA_CELLS)


def kind_of(name: str) -> Kind:
    return OF_SPEC[zoo.SPECS[name].kind]


def gammas(model: Any) -> set[float]:
    """The gamma of every layer as the config says it, and as the swaps hold it."""
    entries = model.config.attn_swap["swaps"]
    return {entry["options"]["clipped_softmax"]["gamma"] for entry in entries} | {
        swap.clipped_softmax.options.stretch for swap in swaps(model)
    }


@pytest.mark.parametrize("name", [name for name, spec in zoo.SPECS.items() if spec.kind in OF_SPEC])
def test_the_kind_of_every_architecture(name: str) -> None:
    kinds = {site.kind for site in sites(zoo.build(name)) if site.usable}
    assert kinds <= {kind_of(name)}
    assert kinds or name in zoo.UNSWAPPABLE


def test_each_part_of_a_model_has_its_own_kind() -> None:
    speech = {site.path.split(".")[1]: site.kind for site in sites(zoo.build("whisper")) if site.usable}
    assert speech == {"encoder": Kind.ENCODER, "decoder": Kind.DECODER}
    model = patch_model(llava(), "clipped_softmax")
    words = {row.module.split(".")[1]: row.options["clipped_softmax"]["gamma"] for row in describe(model).rows}
    assert words == {"vision_tower": PUBLISHED[Kind.IMAGE], "language_model": PUBLISHED[Kind.DECODER]}


def test_fitted_options_are_complete() -> None:
    """Fitting changes nothing that was given, and a second fit, even to another kind, changes nothing at all."""
    for cell, kind in itertools.product(CELLS, Kind):
        classes = parse(cell[0])
        chosen = parse_options(classes, cell[1])
        fitted = fit_options(classes, chosen, kind)
        assert all(fit_options(classes, fitted, other) == fitted for other in Kind), cell
        for name, values in chosen.items():
            given = {option: value for option, value in values.items() if value is not None}
            assert given.items() <= fitted[name].items(), cell


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_gamma_is_the_published_one(name: str) -> None:
    """The config, the swaps and `describe` hold the number, and the model computes with it."""
    wanted, batch = PUBLISHED[kind_of(name)], batch_of(name)
    model = patch_model(fresh(name), "clipped_softmax")
    assert gammas(model) == {wanted}
    assert f"gamma={wanted}" in str(describe(model))
    assert_identical(run(model, batch), run(patch_model(fresh(name), "clipped_softmax", gamma=wanted), batch))


def test_a_given_gamma_stays() -> None:
    for options, wanted in (({"gamma": -0.3}, -0.3), ({"gamma": 0.0}, 0.0), ({"alpha": 3.0, "length": 12}, -0.25)):
        assert gammas(patch_model(fresh("vit"), "clipped_softmax", **options)) == {wanted}
    composed = patch_model(fresh("vit"), "outeffhop+clipped_softmax", clipped_softmax={"gamma": -0.3})
    assert gammas(composed) == {-0.3}
    with refused("gamma <= 0"):
        patch_model(fresh("vit"), "clipped_softmax", gamma=0.3, alpha=1.0, length=2)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_checkpoint_keeps_its_gamma(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-0.025 was the gamma of every model once, and the numbers of today may change: a checkpoint does not."""
    for options, wanted in (({"gamma": -0.025}, -0.025), ({}, PUBLISHED[kind_of(name)])):
        folder = tmp_path / str(wanted)
        made = patch_model(fresh(name, torch.float32), "clipped_softmax", **options)
        made.save_pretrained(folder)
        with monkeypatch.context() as later:
            later.setattr(clipped_softmax, "PUBLISHED", dict.fromkeys(Kind, -0.5))
            loaded = type(made).from_pretrained(folder)
        assert gammas(loaded) == {wanted}
        batch = batch_of(name, torch.float32)
        with torch.no_grad():
            assert torch.equal(zoo.output(loaded(**batch)), zoo.output(made(**batch)))
