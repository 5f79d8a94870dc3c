"""Heads with all keys in a conversion: which ones stay, what the report and the model say, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_attn_swap.wiring.install as install
from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.analysis import Lost, lost
from hf_attn_swap.conversion import calibrate, head_sensitivity
from hf_attn_swap.conversion.journal import NAME
from hf_attn_swap.conversion.replay import Replay
from hf_attn_swap.conversion.report import Sensitivity
from hf_attn_swap.families import sites
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.measuring.recall import Passages, Recall
from hf_attn_swap.wiring.install import installation_of, model_root
from tests.contract.harness import assert_identical, batch_of, refused, run, swaps

from .converting import GAIN, WINDOW, converted, long, names, same, text, timeless, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT


FAST = {"tokens": 1, "max_loss": 1.0}  # no training, and no fit is tried, as any loss is within the budget
Head = tuple[int, int]


def near(model: Any) -> set[Head]:
    """The heads (layer, head) that have the window now."""
    found = installation_of(model_root(model))
    running = [] if found is None else [layer for layer in found.layers() if layer.swap.strength > 0]
    return {
        (layer.number, head)
        for layer in running
        for head in set(range(2)) - set(layer.swap.options["window"]["full_heads"])
    }


def planted(monkeypatch: pytest.MonkeyPatch, *recalling: Head) -> list[set[Head]]:
    """From now on, these heads alone recall; the others lose a hundredth each. Gives the heads that were measured."""
    asked: list[set[Head]] = []

    def measure(self: Passages, model: Any, *, progress: bool = False) -> Recall:
        ((distance, texts),) = self.texts.items()
        asked.append(near(model))
        gain = GAIN - sum(GAIN if head in recalling else 0.01 * GAIN for head in asked[-1])
        return Recall(gains={distance: (gain,) * len(texts)})

    monkeypatch.setattr(Passages, "measure", measure)
    return asked


def test_the_heads_that_recall_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = planted(monkeypatch, (0, 1), (2, 0))
    model = long()
    report = converted(model, "window", text(), heads="auto", keep=0.34, **FAST, **WINDOW)
    every = [(layer, head) for layer in range(3) for head in range(2)]
    assert [each for each in asked if len(each) == 1] == [{head} for head in every], "a pass for each head"
    assert near(model) == set(every) - {(0, 1), (2, 0)}
    assert names(report) == ["swap", "heads chosen", *names(report)[2:]]
    assert report.lost.recall == pytest.approx(0.96 * GAIN)
    assert "2 of 6 key/value heads keep all keys (layer.head): 0.1, 2.0." in report.notes()
    assert report.layers == (0, 1, 2)
    assert not report.kept
    found = report.head_sensitivity
    assert found is not None
    assert set(found.order[-2:]) == {"0.1", "2.0"}
    assert [line.split()[0] for line in str(found).splitlines()[-3:]] == [*found.order[-2:], "all"]
    assert report.save(tmp_path).read_text().count("what each key/value head alone costs") == 1
    assert Sensitivity.from_dict(json.loads((tmp_path / "conversion.json").read_text())["head_sensitivity"]) == found


def test_heads_are_exchanged_while_all_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two heads that do the same, one is enough: alone both cost most, but beside one the other is useless."""
    pair = {(0, 0), (1, 1)}
    alone = {(0, 0): 0.3, (1, 1): 0.29, (2, 0): 0.1}

    def measure(self: HeldOut, model: Any, *, progress: bool = False) -> Lost:
        hidden = near(model)
        both = hidden & pair
        kl = sum(alone.get(head, 0.01) for head in hidden - both)
        kl += sum(alone[head] for head in both) if both == pair or len(hidden) == 1 else 0.0
        return Lost(tokens=1, divergence=kl, perplexity=1 + kl, stock_perplexity=1.0, recall=3.0, stock_recall=3.0)

    monkeypatch.setattr(HeldOut, "lost", measure)
    model = long()
    converted(model, "window", text(), heads="auto", keep=1 / 3, **FAST, **WINDOW)
    assert near(model) == {(0, 1), (1, 0), (2, 1), (1, 1)}


def test_exchanges_are_measured_the_same_without_recorded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among windows in other layers, too, a block below the changed head gives what it gave."""
    shares: list[float] = []
    real, recorded = Sensitivity.share, Replay.of
    used: list[bool] = []

    def share(self: Sensitivity, lost: Lost) -> float:
        shares.append(real(self, lost))
        return shares[-1]

    def of(*arguments: Any) -> Replay | None:
        used.append((replay := recorded(*arguments)) is not None)
        return replay

    def measured() -> list[float]:
        shares.clear()
        converted(long(), "window", text(), heads="auto", keep=0.5, **FAST, **WINDOW)
        return list(shares)

    monkeypatch.setattr(Sensitivity, "share", share)
    monkeypatch.setattr(Replay, "of", of)
    with_blocks = measured()
    assert used == [True, True], "for each head alone, and for the exchanges"
    assert len(set(with_blocks)) > 6
    monkeypatch.setattr(Replay, "of", lambda *_: None)
    assert measured() == with_blocks


def test_the_saved_model_has_the_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, (1, 1))
    model = long()
    converted(model, "window", text(), heads="auto", keep=1 / 6, **FAST, **WINDOW)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert [swap.options["window"]["full_heads"] for swap in swaps(again)] == [[], [1], []]
    assert [swap.span for swap in swaps(again)] == [swap.span for swap in swaps(model)], "as the caches read it"
    batch = batch_of("llama", torch.float32)
    assert_identical(run(again, batch), run(model.eval(), batch))


def test_a_layer_whose_heads_all_stay_has_no_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, (1, 0), (1, 1))
    model = long()
    report = converted(model, "window", text(), heads="auto", keep=1 / 3, **FAST, **WINDOW)
    assert report.layers == (0, 2)
    assert "Layer 1 kept its own attention: all its heads keep all keys." in report.notes()
    assert not any("chosen" in name for name in names(report)[2:]), "these layers together were measured once"
    assert [layer.number for layer in installation_of(model).layers()] == [0, 2]


def test_heads_of_some_layers_and_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, (0, 0))
    model = long()
    converted(model, "window", text(), heads="auto", keep=0.25, layers=[0, 1], **FAST, **WINDOW)
    assert {head for each in asked if len(each) == 1 for head in each} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert near(model) == {(0, 1), (1, 0), (1, 1)}
    model = long()
    report = converted(model, "window", text(), heads="auto", keep=1 / 6, min_recall=0.97, tokens=1, **WINDOW)
    assert report.met
    assert 0 < len(report.layers) < 3, "each head loses a hundredth"
    assert report.sensitivity is not None


def test_a_conversion_goes_on_after_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        model = long()
        report = converted(model, "window", text(), heads="auto", keep=0.34, output_dir=folder, tokens=1, **WINDOW)
        return timeless(report), weights(model)

    asked = planted(monkeypatch, (0, 1), (2, 0))
    wanted = convert(tmp_path)
    path = tmp_path / NAME
    journal = json.loads(path.read_text())
    keys = list(journal["entries"])
    known = {key: journal["entries"][key] for key in keys[: keys.index("heads") + 1]}
    path.write_text(json.dumps(journal | {"entries": known}))
    asked.clear()
    found = convert(tmp_path)
    assert not any(len(each) == 1 for each in asked), "no head is measured again"
    assert found[0] == wanted[0]
    assert same(found[1], wanted[1])
    with refused("holds another conversion (heads differ)"):
        converted(long(), "window", text(), keep=0.34, output_dir=tmp_path, tokens=1, **WINDOW)


@pytest.mark.parametrize("variant", ["window", "outeffhop+window"])
def test_each_head_alone(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As strengths and options by hand, with one search and no new wiring; the model stays as it was."""

    def nested(**options: Any) -> Any:
        window = WINDOW | options
        return window if variant == "window" else {"window": window}

    def state() -> Any:
        found = [(swap.options, *(each.options for each in swap.variants), swap.phase) for swap in swaps(model)]
        return copy.deepcopy((found, model.config.attn_swap))

    def by_hand(layer: int, head: int) -> Lost:
        alone = patch_model(long(), variant, **nested())
        patch_model(alone, variant, layers=layer, **nested(full_heads=[1 - head]))
        set_strength(alone, 0.0)
        set_strength(alone, 1.0, layers=[layer])
        return lost(alone, batch)

    batch = {"input_ids": torch.stack([row["input_ids"] for row in text(3)])}
    model = patch_model(long(), variant, **nested())
    patch_model(model, variant, layers=2, **nested(full_heads=[0, 1]))
    before, searches = state(), []
    monkeypatch.setattr(install, "sites", lambda root: searches.append(root) or sites(root))
    monkeypatch.setattr(install.Installation, "_wire", None)
    found = head_sensitivity(model, batch, layers=[1, 2], progress=False)
    monkeypatch.undo()
    assert len(searches) == 1
    assert state() == before
    assert found.alone == {f"{layer}.{head}": by_hand(layer, head) for layer in (1, 2) for head in (0, 1)}
    assert len({cost.divergence for cost in found.alone.values()}) == 4
    assert Sensitivity.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_refusals() -> None:
    with refused('heads="auto" chooses the heads that keep all keys', "keep=0.5"):
        converted(long(), "window", text(), heads="auto", **WINDOW)
    with refused("outeffhop changes all heads of a layer", "full_heads: window"):
        converted(long(), "outeffhop", text(), heads="auto", keep=0.5)
    with refused('heads is "auto" or None, got [0]', "patch_model(model, variant, layers=..., full_heads=...)"):
        converted(long(), "window", text(), heads=[0], keep=0.5, **WINDOW)
    for variant, options in (("window", {"full_heads": [0]}), ("outeffhop+window", {"window": {"full_heads": [0]}})):
        with refused('heads="auto" chooses full_heads; leave one of them out'):
            converted(long(), variant, text(), heads="auto", keep=0.5, **options)
    model = patch_model(long(), "window", **WINDOW)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in text(3)])}
    calibrate(model, batch, fit="gain", progress=False)
    with refused("layer 0 has a fit (calibration)", "before the fit"):
        head_sensitivity(model, batch, progress=False)
