"""`hf-attn-swap doctor`: tables or JSON, and exit code 1 if a cell is wrong. The checks have their tests elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hf_attn_swap import tested
from hf_attn_swap.doctor import diagnosis
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.variants.base import VARIANTS

from .conftest import Outcome

Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT with the control and with belief."""
    monkeypatch.setattr(diagnosis, "FAMILIES", {"BertSelfAttention": FAMILIES["BertSelfAttention"]})
    monkeypatch.setattr(diagnosis, "list_variants", lambda: ("softmax", "belief"))


def break_belief(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Any, heads: Any, call: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(VARIANTS["belief"], "read", crash)


def test_a_right_installation(command: Command) -> None:
    outcome = command("doctor", "--device", "cpu")
    assert outcome.code == 0
    assert "2 of 2 cells right, 0 refused, 0 wrong; on cpu" in outcome.out
    assert f"{tested.OLDEST_TRANSFORMERS} to {tested.NEWEST_TRANSFORMERS}" in outcome.out
    assert outcome.err == "checking this installation; it takes half a minute\n"


def test_a_wrong_cell_is_named_and_gives_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    break_belief(monkeypatch)
    outcome = command("doctor", "--device", "cpu")
    assert outcome.code == 1
    assert "1 of 2 cells right, 0 refused, 1 wrong" in outcome.out
    assert "belief on bert: RuntimeError: broken" in outcome.out
    assert "Traceback" not in outcome.out + outcome.err


@pytest.mark.parametrize("broken", [False, True])
def test_json(command: Command, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    if broken:
        break_belief(monkeypatch)
    outcome = command("doctor", "--device", "cpu", "--json")
    data = json.loads(outcome.out)
    assert outcome.code == int(broken)
    assert data["ok"] is not broken
    assert [cell["result"] for cell in data["cells"]] == ["right", "wrong" if broken else "right"]


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
    assert outcome.err.splitlines()[-1].startswith("error: PyTorch cannot use the device 'nonsense' here")
