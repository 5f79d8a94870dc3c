"""No public call changes what the user gave beside the model: tokenizer, processor, config, arguments.

The table `CALLS` has every public function; a test compares it with what the packages name as public.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import hf_attn_swap
from hf_attn_swap import analysis, conversion, dynamics, quantization
from hf_attn_swap.conversion.config import Distil
from tests.harness.byte_tokenizer import build

TEXTS = ["The attention of every loaded model is replaced, and 12 weights are kept. " * 4] * 12
OF_PATCHING = {"attn_swap", "attn_swap_masks", "attn_implementation"}
# They take no model that a user goes on with, or read and write a place that the tests of publishing have.
ELSEWHERE = {
    *("doctor", "list_variants", "from_pretrained", "push", "int8_loaded"),
    "merge_calibration",
}


def convert(given: Any, variant: str = "belief", **more: Any) -> None:
    stage = Distil(rank=2, batch=2)
    usual = dict(args=given.args, processor=given.tokenizer, length=32, tokens=128, stages=[stage], progress=False)
    hf_attn_swap.convert(given.model, variant, TEXTS, **(usual | more))


def quantize(given: Any) -> None:
    hf_attn_swap.quantize(
        given.model, TEXTS, args=given.args, processor=given.tokenizer, length=32, tokens=128, progress=False
    )


def patched(variant: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(given: Any) -> None:
        hf_attn_swap.patch_model(given.model, variant)
        call(given)

    return run


def int8_static(given: Any) -> None:
    quantization.int8_static(given.model, quantization.input_ranges(given.model, given.batches))


def int8_dynamic(given: Any) -> None:
    quantization.int8_dynamic(given.model)


def machine(given: Any) -> None:
    with torch.no_grad(), quantization.machine_w8a8(given.model, given.batches):
        given.model(**given.batches[0])


def fake(given: Any) -> None:
    with torch.no_grad(), quantization.fake_w8a8(given.model, given.batches):
        given.model(**given.batches[0])


def straight(given: Any) -> None:
    ranges = quantization.input_ranges(given.model, given.batches)
    with quantization.straight_through(given.model, ranges):
        given.model(**given.batches[0])


def lost_in_8_bits(given: Any) -> None:
    from hf_attn_swap.measuring.held_out import HeldOut

    quantization.lost_in_8_bits(given.model, given.batches, HeldOut(given.model, given.batches, progress=False))


def record(given: Any) -> None:
    with analysis.record(given.model):
        given.model(**given.batches[0])


def tasks(given: Any) -> None:
    words = " ".join(f"w{first}{second}s" for first in "abcdefgh" for second in "abcdefgh")
    rows = [build("llama")[1](words * 3)["input_ids"]]  # by another tokenizer than the user's
    made = analysis.tasks(given.model, rows, given.tokenizer, [900], samples=1)
    made.measure(given.model)


CALLS: dict[str, Callable[[Any], Any]] = {
    "convert": convert,
    "quantize": quantize,
    "patch_model": patched("belief", lambda given: None),
    "set_strength": patched("belief", lambda given: hf_attn_swap.set_strength(given.model, 0.5)),
    "unpatch_model": patched("belief", lambda given: hf_attn_swap.unpatch_model(given.model)),
    "describe": patched("belief", lambda given: hf_attn_swap.describe(given.model)),
    "absorb_sink": patched("sink", lambda given: conversion.absorb_sink(given.model, given.tokenizer, TEXTS)),
    "calibrate": patched("belief", lambda given: conversion.calibrate(given.model, given.batches)),
    "scale_values": patched("belief", lambda given: conversion.scale_values(given.model, given.batches)),
    "smooth": patched("belief", lambda given: conversion.smooth(given.model, given.batches * 2)),
    "layer_sensitivity": patched("belief", lambda given: conversion.sensitivity.layer_sensitivity(*given.measured)),
    "head_sensitivity": patched("window", lambda given: conversion.head_sensitivity(*given.measured)),
    "lost": patched("belief", lambda given: analysis.lost(given.model, given.batches)),
    "needle": lambda given: analysis.needle(given.model, given.ids, given.tokenizer, lengths=[500], depths=[0.5]),
    "recall": lambda given: analysis.recall(given.model, given.ids, distances=[100]),
    "key_values": lambda given: analysis.key_values(given.model, [list(range(4, 90))], given.tokenizer, pairs=[3]),
    "continuations": lambda given: analysis.continuations(given.model, given.ids[:1], given.tokenizer),
    "tasks": tasks,
    "record": record,
    "input_ranges": lambda given: quantization.input_ranges(given.model, given.batches),
    "int8_static": int8_static,
    "int8_dynamic": int8_dynamic,
    "machine_w8a8": machine,
    "fake_w8a8": fake,
    "straight_through": straight,
    "lost_in_8_bits": lost_in_8_bits,
    "embedded_tokens": lambda given: dynamics.embedded_tokens(given.model, given.tokenizer, TEXTS[0]),
    "head_matrices": lambda given: dynamics.head_matrices(given.model),
}


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """A model, a tokenizer without a token that pads, and arguments of a training."""
    model, tokenizer = build("llama")
    model.config.max_position_embeddings = 1024  # rotary: no table has this length
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    tokenizer.pad_token = None
    tokenizer("a text", truncation=True, max_length=7)  # what a user did before, and what is saved with the tokenizer
    batches = [{"input_ids": torch.tensor([row[:32] for row in ids[:2]])}]
    args = TrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        ids=ids,
        batches=batches,
        measured=(model, batches),
        args=args,
        folder=tmp_path,
    )


def state(given: Any) -> dict[str, Any]:
    """All that must not change, as plain data; the tokenizer as it would be saved."""
    folder = given.folder / "saved"
    given.tokenizer.save_pretrained(folder)
    config = {name: value for name, value in given.model.config.to_dict().items() if name not in OF_PATCHING}
    config.pop("quantization_config", None)  # of the integers, as the weights
    return {
        **{path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())},
        "pads with": given.tokenizer.pad_token,
        "config": config,
        "generation": given.model.generation_config.to_dict(),
        "arguments": given.args.to_dict(),
        "training modes": given.model.training,
        "requires_grad": {n: p.requires_grad for n, p in given.model.named_parameters() if p.is_floating_point()},
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_the_user_changes(name: str, given: Any) -> None:
    before = state(given)
    CALLS[name](given)
    after = state(given)
    flags = after.pop("requires_grad")
    known = before.pop("requires_grad")
    assert {name: flag for name, flag in flags.items() if name in known}.items() <= known.items()
    assert after == before


def test_every_public_function_is_in_the_table() -> None:
    for package in (hf_attn_swap, conversion, analysis, quantization):
        for name in package.__all__:
            if inspect.isfunction(getattr(package, name)):
                assert name in CALLS or name in ELSEWHERE, name
