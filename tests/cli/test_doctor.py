"""`hf-attn-swap doctor`: what is installed, and that a fault of a variant is found and gives exit code 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_attn_swap import tested
from hf_attn_swap.doctor import doctor, tiny
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.variants.base import VARIANTS

from .conftest import Outcome

Command = Callable[..., Outcome]
DOCTOR = doctor.__globals__


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT with the control and with belief."""
    monkeypatch.setitem(DOCTOR, "FAMILIES", {"BertSelfAttention": FAMILIES["BertSelfAttention"]})
    monkeypatch.setitem(DOCTOR, "list_variants", lambda: ("softmax", "belief"))


def test_everything_is_right_here() -> None:
    state, level = torch.get_rng_state(), tested.LOGGER.level
    diagnosis = doctor(device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert tested.LOGGER.level == level
    assert len(diagnosis.cells) == len({family.name for family in FAMILIES.values()}) * len(VARIANTS)
    assert {result for _, _, result in diagnosis.cells} == {"right"}
    assert torch.__version__ in str(diagnosis)


@pytest.mark.usefixtures("few")
def test_a_right_installation(command: Command) -> None:
    outcome = command("doctor", "--device", "cpu")
    assert outcome.code == 0
    assert "2 of 2 cells right, 0 wrong; on cpu" in outcome.out
    assert tested.NEWEST_TRANSFORMERS in outcome.out


def crash(out: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("variant", "method", "change", "words"),
    [
        ("belief", "read", crash, "RuntimeError: broken"),
        ("belief", "read", lambda out: out * float("nan"), "readable form"),
        ("outeffhop", "heads", lambda out: None if out is None else out * 1.01, "readable form"),
    ],
    ids=["crash", "no number", "fast form"],
)
def test_a_fault_is_found(
    command: Command, monkeypatch: pytest.MonkeyPatch, variant: str, method: str, change: Any, words: str
) -> None:
    monkeypatch.setitem(DOCTOR, "list_variants", lambda: ("softmax", variant))
    right = getattr(VARIANTS[variant], method)
    monkeypatch.setattr(VARIANTS[variant], method, lambda self, *given: change(right(self, *given)))
    outcome = command("doctor", "--device", "cpu", "--json")
    data = json.loads(outcome.out)
    results = {cell[1]: cell[2] for cell in data["cells"]}
    assert results["softmax"] == "right"
    assert (outcome.code, data["ok"]) == (1, False)
    assert words in results[variant]


@pytest.mark.usefixtures("few")
def test_other_weights_at_strength_0_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DOCTOR["patch_model"]
    monkeypatch.setitem(DOCTOR, "patch_model", lambda *args, **words: right(*args, **{**words, "strength": 1e-3}))
    assert {cell[1] for cell in doctor(device="cpu").wrong} == {"belief"}


@pytest.mark.usefixtures("few")
def test_a_variant_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARIANTS["belief"], "read", lambda self, heads, call: heads)
    ((_, variant, result),) = doctor(device="cpu").wrong
    assert variant == "belief"
    assert "strength 1" in result


@pytest.mark.usefixtures("few")
def test_a_refusal_is_no_fault_but_nothing_right_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **words: Any) -> None:
        raise ValueError("it does not fit; use another one.")

    monkeypatch.setitem(DOCTOR, "patch_model", refuse)
    diagnosis = doctor(device="cpu")
    assert {result for _, _, result in diagnosis.cells} == {"refused: it does not fit; use another one."}
    assert not diagnosis.ok
    assert not diagnosis.wrong


@pytest.mark.usefixtures("few")
def test_the_doctor_does_not_send_to_itself(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line would tell a user of the doctor to run the doctor."""
    tested.tell_if_newer.cache_clear()
    monkeypatch.setattr(tested.transformers, "__version__", "5.999.0")
    assert command("doctor", "--device", "cpu").code == 0
    assert not [record for record in caplog.records if record.name == "hf_attn_swap"]
    tested.tell_if_newer.cache_clear()


def test_a_device_that_is_not_here(command: Command) -> None:
    outcome = command("doctor", "--device", "nonsense")
    assert (outcome.code, outcome.out) == (2, "")
    assert "the device 'nonsense'" in outcome.err


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_has_a_tiny_configuration_without_dropout(family: Any) -> None:
    model, _ = tiny(family, "cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p]
