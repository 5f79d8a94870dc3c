"""transformers' pipelines compute with a converted checkpoint what they compute with the converted model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import pipeline

from hf_attn_swap import patch_model
from tests import zoo
from tests.harness.byte_tokenizer import build

TASKS = {
    "text-generation": "lm",
    "fill-mask": "lm",
    "text-classification": "classification",
    "token-classification": "token",
    "feature-extraction": "base",
    "image-classification": "classification",
    "image-feature-extraction": "base",
}
TEXT = "The film was a long one."


def cases() -> list[tuple[str, str]]:
    """Every task on a family that has the head for it; the families take turns."""
    found = []
    for place, (task, head) in enumerate(TASKS.items()):
        fitting = [family for family in zoo.FAMILIES if fits(task, head, family)]
        found.append((task, fitting[place % len(fitting)]))
    return found


def fits(task: str, head: str, family: str) -> bool:
    kind = zoo.SPECS[family].kind
    if (kind == "image") != task.startswith("image") or head not in zoo.heads(family):
        return False
    return head != "lm" or (kind == "causal") == (task == "text-generation")


def inputs(task: str) -> Any:
    if task.startswith("image"):
        return Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    return f"{TEXT[:9]}<mask>{TEXT[9:]}" if task == "fill-mask" else TEXT


def numbers(value: Any) -> list[Any]:
    """What a pipeline returned, as a flat list."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    return [value.item() if hasattr(value, "item") else value]


@pytest.mark.filterwarnings("ignore")  # a pipeline warns of its own defaults
@pytest.mark.parametrize(("task", "family"), cases())
def test_every_task(task: str, family: str, checkpoint: Callable[..., Path]) -> None:
    """From a folder as from the converted model in memory, and not as from the stock model."""
    folder = checkpoint(family, "belief", head=TASKS[task])
    found = answer(task, str(folder), None)
    stock, processor = build(family, TASKS[task])
    unchanged = answer(task, stock.eval(), processor)
    model, processor = build(family, TASKS[task])
    assert found == answer(task, patch_model(model, "belief").eval(), processor)
    assert found != unchanged


def answer(task: str, model: Any, processor: Any) -> list[Any]:
    """The numbers and words that a pipeline gives."""
    name = "image_processor" if task.startswith("image") else "tokenizer"
    given = {} if processor is None else {name: processor}
    run = pipeline(task, model=model, device="cpu", **given)
    if task == "text-generation":
        return numbers(run(inputs(task), max_new_tokens=8, do_sample=False))
    return numbers(run(inputs(task)))
