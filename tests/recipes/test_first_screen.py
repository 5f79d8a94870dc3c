"""The recipe of README's first screen: the figures of its table, worked out here from the same record."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch

from hf_attn_swap_cli import run
from tests import zoo
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return import_module("first_screen")


def figures(perplexity: float, recall: float, written: list[list[int]], scores: list[float]) -> dict[str, Any]:
    return {
        "perplexity": {"news": perplexity},
        "recall": {"2000": recall},
        "written": written,
        "scores": [["vt", 1024, scores]],
    }


def test_the_table(module: Any) -> None:
    stock = figures(20.0, 4.0, [[1, 2, 3, 4], [5, 6, 7, 8]], [0.5, 0.5])
    ours = figures(22.0, 3.0, [[1, 2, 9, 4], [5, 6, 7, 8]], [0.25, 0.5]) | {"processor_minutes": 12.3}
    row = module.table({"stock": stock, "long texts": ours}).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["long texts", "1.100 ×", "0.75 ×", "88%, 3", "50.0% → 37.5% (-12.5% ± 24.5%)", "12"]


def test_perplexity(module: Any) -> None:
    model = zoo.build("llama", head="lm", vocab_size=64).eval()
    rows_NL = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_p_NLV = model(rows_NL).logits.log_softmax(-1)[:, :-1]
    wanted = math.exp(-log_p_NLV.gather(-1, rows_NL[:, 1:, None]).mean())
    assert module.perplexity(model, rows_NL) == pytest.approx(wanted, rel=1e-6)


def test_every_option_is_known(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words in module.CONVERSIONS.values():
        name, *others = words.split()
        run([name, "--help"])
        known = capsys.readouterr().out.replace(",", " ").split()
        assert {word for word in others if word.startswith("--")} <= set(known)
