"""The doctor finds nothing wrong here, and each of its checks fails on the fault that it is for."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import hf_attn_swap
from hf_attn_swap import list_variants
from hf_attn_swap.doctor import Cell, Diagnosis, cells, diagnosis, installed, models
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.variants.base import VARIANTS
from hf_attn_swap.wiring.cache import LinearState

CPU = torch.device("cpu")
LINEAR = "simpletron_resl"


def settings() -> tuple[Any, ...]:
    """What the doctor may change while it runs, and must leave as it was."""
    logs = transformers.utils.logging
    level = logging.getLogger("hf_attn_swap").level
    return torch.get_rng_state().tolist(), logs.get_verbosity(), logs.is_progress_bar_enabled(), level


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    """The whole self-check, once."""
    before = settings()
    result = hf_attn_swap.doctor(device="cpu")
    assert settings() == before
    return result


def test_every_variant_is_right_on_every_family(found: Diagnosis) -> None:
    names = {family.name for family in FAMILIES.values()}
    assert {(cell.family, cell.variant) for cell in found.cells} == {(f, v) for f in names for v in list_variants()}
    assert len(found.cells) == len(names) * len(list_variants())
    assert not found.sentences()
    assert {cell.words for cell in found.cells} == {"right"}
    assert found.ok


def test_the_cells_have_the_checks_that_they_need(found: Diagnosis) -> None:
    run = {(cell.family, cell.variant): {check.name for check in cell.checks} for cell in found.cells}
    always = {"strength 0", "strength 1", "context", "readable", "saved", "unpatched"}
    assert run["vit", "belief"] == always
    assert run["bert", "belief"] == always | {"padded"}
    assert run["llama", "belief"] == always | {"padded", "cached"}
    assert run["llama", LINEAR] == set(cells.CHECKS)


def test_the_result_as_text_and_as_data(found: Diagnosis) -> None:
    text = str(found)
    for word in (transformers.__version__, torch.__version__, "tested", "cpu", *list_variants(), *run_families()):
        assert word in text
    assert found.summary() in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["ok"] is found.ok
    assert [cell["result"] for cell in data["cells"]] == [cell.result for cell in found.cells]
    assert {package["name"] for package in data["packages"]} >= {"python", "torch", "transformers", "hf-attn-swap"}
    assert "<table>" in found._repr_html_()


def run_families() -> list[str]:
    return [family.name for family in FAMILIES.values()]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_has_a_tiny_configuration_without_dropout(family: Any) -> None:
    assert family.tiny
    stock = stock_of(family.name)
    assert sum(parameter.numel() for parameter in stock.model.parameters()) < 100_000
    assert not [key for key, value in stock.model.config.to_dict().items() if key.endswith("drop") and value]
    assert not [m for m in stock.model.modules() if isinstance(m, torch.nn.Dropout) and m.p]


# One fault for each check. Each takes the fixture monkeypatch and breaks the variant of its cell.
Fault = Callable[[pytest.MonkeyPatch], None]


def changed(name: str, method: str, change: Callable[..., Any]) -> Fault:
    """A method of a variant whose result is changed: `change` gets the result and the arguments."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        owner = VARIANTS[name]
        right = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda self, *args: change(right(self, *args), *args))

    return apply


def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear attention that sums over padding too, in both of its forms."""
    owner = VARIANTS[LINEAR]
    linear, products = owner.linear, owner.products
    monkeypatch.setattr(owner, "linear", lambda self, qkv, mask, *rest: linear(self, qkv, None, *rest))
    monkeypatch.setattr(owner, "products", lambda self, q, k, allowed: products(self, q, k, None))


def little_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cells.set_strength
    monkeypatch.setattr(cells, "set_strength", lambda model, strength: right(model, max(strength, 1e-3)))


def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]  # of the class method

    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = right(cls, *args, **kwargs)
        next(model.parameters()).data.add_(1e-6)
        return model

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))


def left_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cells.unpatch_model

    def unpatch(model: Any) -> Any:
        right(model).config.trace = True
        return model

    monkeypatch.setattr(cells, "unpatch_model", unpatch)


def no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearState, "of", lambda *args, **words: None)


FAULTS: dict[str, tuple[str, str, Fault]] = {
    "strength 0": ("bert", "belief", little_strength),
    "strength 1": ("bert", "belief", changed("belief", "read", lambda out, heads, call: heads)),
    "context": ("vit", "belief", changed("belief", "read", lambda out, heads, call: torch.zeros_like(heads))),
    "readable": (
        "bert",
        "outeffhop",
        changed("outeffhop", "heads", lambda out, *_: None if out is None else out * 1.01),
    ),
    "padded": ("bert", LINEAR, no_padding),
    "cached": (
        *("gpt2", "gated"),
        changed("gated", "read", lambda out, heads, call: out * (1.01 if out.shape[1] == 1 else 1)),
    ),
    "state": ("llama", LINEAR, no_state),
    "saved": ("albert", "belief_star", other_weights),
    "unpatched": ("bert", "softmax", left_a_trace),
}


@functools.cache
def stock_of(family: str) -> models.Tiny:
    return models.tiny(next(each for each in FAMILIES.values() if each.name == family), CPU)


def cell_of(family: str, variant: str) -> Cell:
    return cells.check_cell(family, variant, stock_of(family))


def test_every_check_has_its_fault() -> None:
    assert list(FAULTS) == list(cells.CHECKS)


@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_found_by_its_check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, variant, fault = FAULTS[check]
    if check != "state":  # on a right installation; `test_every_variant_is_right_on_every_family` holds all others
        assert cell_of(family, variant).result == "right"
    fault(monkeypatch)
    broken = cell_of(family, variant)
    assert broken.result == "wrong"
    assert check in {each.name for each in broken.wrong}
    assert check in broken.words


@pytest.mark.parametrize("check", ["strength 0", "context", "readable", "cached", "state", "saved", "unpatched"])
def test_a_fault_is_found_by_its_check_alone(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, variant, fault = FAULTS[check]
    fault(monkeypatch)
    assert [each.name for each in cell_of(family, variant).wrong] == [check]


def test_a_crash_is_a_wrong_cell_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Any, heads: Any, call: Any) -> Any:
        raise KeyError("two\nlines")

    monkeypatch.setattr(VARIANTS["belief"], "read", crash)
    cell = cell_of("bert", "belief")
    assert {check.name for check in cell.wrong} == {"strength 1", "context", "readable", "padded", "saved"}
    assert {check.wrong for check in cell.wrong} == {r"KeyError: 'two\nlines'"}


def test_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    changed("belief", "read", lambda out, heads, call: out * float("nan"))(monkeypatch)
    assert "an output is infinite or not a number" in {check.wrong for check in cell_of("bert", "belief").wrong}


def few(monkeypatch: pytest.MonkeyPatch, *variants: str) -> None:
    """A doctor that looks at BERT alone, and at these variants."""
    monkeypatch.setattr(diagnosis, "FAMILIES", {"BertSelfAttention": FAMILIES["BertSelfAttention"]})
    monkeypatch.setattr(diagnosis, "list_variants", lambda: variants)


def test_a_refusal_when_patching_is_no_fault_and_one_later_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("it does not fit; use another one.")

    few(monkeypatch, "softmax", "belief")
    monkeypatch.setattr(VARIANTS["belief"], "check", refuse)
    found = hf_attn_swap.doctor(device="cpu")
    assert [cell.words for cell in found.cells] == ["right", "refused"]
    assert found.ok
    (sentence,) = found.sentences()
    assert sentence.startswith("refused: belief on bert: ")
    assert sentence.endswith("it does not fit; use another one.")
    monkeypatch.undo()
    few(monkeypatch, "softmax", "belief")
    monkeypatch.setattr(VARIANTS["belief"], "read", refuse)
    found = hf_attn_swap.doctor(device="cpu")
    assert [cell.result for cell in found.cells] == ["right", "wrong"]
    assert not found.ok


def test_refusals_alone_are_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **words: Any) -> None:
        raise ValueError("nothing can be swapped.")

    few(monkeypatch, "softmax", "belief")
    monkeypatch.setattr(cells, "patch_model", refuse)
    found = hf_attn_swap.doctor(device="cpu")
    assert {cell.result for cell in found.cells} == {"refused"}
    assert not found.ok


def test_a_model_that_cannot_be_built_or_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, "softmax", "belief")
    family = dataclasses.replace(FAMILIES["BertSelfAttention"], tiny={"hidden_size": 30, "num_attention_heads": 4})
    monkeypatch.setattr(diagnosis, "FAMILIES", {"BertSelfAttention": family})
    found = hf_attn_swap.doctor(device="cpu")
    assert [cell.words for cell in found.cells] == ["WRONG: patch"] * 2
    assert "ValueError: The hidden size" in found.sentences()[0]
    few(monkeypatch, "softmax")
    monkeypatch.setattr(cells, "patch_model", lambda *args, **words: {}["gone"])
    assert [cell.words for cell in hf_attn_swap.doctor(device="cpu").cells] == ["WRONG: patch"]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="PyTorch cannot use the device 'nonsense' here"):
        hf_attn_swap.doctor(device="nonsense")


@pytest.mark.parametrize(
    ("here", "oldest", "note"),
    [
        ("5.999.0", "5.10.1", "newer than tested"),
        ("5.24.0", "5.10.1", "as tested"),
        ("5.24.0+local", "5.10.1", "as tested"),
        ("5.10.1", "5.10.1", "as tested"),
        ("5.9.0", "5.10.1", "older than tested"),
        ("5.9.0", None, "older"),
    ],
)
def test_the_note_on_a_version(here: str, oldest: str | None, note: str) -> None:
    assert installed.note_on(here, oldest, "5.24.0") == note


def test_a_package_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "TESTED", {"no-such-package": "1.0", "torch": None})
    rows = installed.installed()
    assert [row.name for row in rows] == ["python", "hf-attn-swap", "torch"]
    assert rows[-1].note == "not tested"
