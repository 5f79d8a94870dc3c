"""A layer is one object: found once in a call, never stale, and with one setter of its strength."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from hf_attn_swap import describe, families, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion.trainer import Teacher
from hf_attn_swap.patch import need_installation
from hf_attn_swap.wiring.layers import Layer

from .harness import batch_of, fresh, swaps

# PEFT 0.21 reads a property that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def with_copies(model: Any) -> Any:
    """The model in a wrapper of PEFT that keeps a copy of every swap."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["attn_swap"])
    return peft.get_peft_model(model, config).eval()


def layers(model: nn.Module) -> tuple[Layer, ...]:
    return need_installation(model).layers()


@pytest.mark.parametrize("name", ["albert", "bert", "llama"])
def test_a_call_finds_the_layers_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of each attention module is read once in a call of the package."""
    model, made = fresh(name), list[str]()
    stock = families.Site

    def counted(**values: Any) -> Any:
        made.append(values["path"])
        return stock(**values)

    monkeypatch.setattr(families, "Site", counted)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: patch_model(model, "modern_hopfield"),
        lambda: patch_model(model, "belief", layers=0),
        lambda: set_strength(model, 0.5),
        lambda: describe(model),
        lambda: unpatch_model(model, layers=0) if name != "albert" else describe(model),
        lambda: unpatch_model(model),
    )
    for call in calls:
        made.clear()
        call()
        assert len(made) == len(set(made)) > 0


def test_a_teacher_switches_off_copies_that_came_later() -> None:
    """A teacher lives longer than a call, so it finds the layers anew."""
    batch = batch_of("llama")
    student = patch_model(fresh("llama"), "belief")
    teacher = Teacher(student.requires_grad_(False))
    wrapped = with_copies(student)
    given = teacher(wrapped, wrapped, batch).logits
    assert torch.equal(given, fresh("llama")(**batch).logits)


def test_a_strength_has_one_setter() -> None:
    """It brings phase, buffer and config up to date; an assignment, which would not, is an error."""
    model = patch_model(fresh("bert"), "modern_hopfield")
    with pytest.raises(AttributeError, match="strength"):
        swaps(model)[0].strength = 0.5  # type: ignore[misc]  # that is the test
    installation = need_installation(model)
    first, second, third = installation.layers()
    installation.set_strength({first: 0.0, second: 0.5})
    assert [swap.phase for swap in swaps(model)] == ["between", "between", "full"]  # the first passes its scores on
    assert [float(swap.strength_value) for swap in swaps(model)] == [0.0, 0.5, 1.0]
    assert [entry["strength"] for entry in model.config.attn_swap["swaps"]] == [0.0, 0.5, 1.0]
    with installation.strengths_kept():
        installation.set_strength({third: 0.25})
        assert third.swap.strength == 0.25
    assert [entry["strength"] for entry in model.config.attn_swap["swaps"]] == [0.0, 0.5, 1.0]
