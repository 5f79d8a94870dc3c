"""Architectures with a habit that once made a swap wrong or late: each is right now, or refused when it is patched.

Every line has the habit, the architectures that have it, and the variants that met it.
"""

from __future__ import annotations

import pytest

from .named import named
from .walk import EXACT, NOT_BUILT, PART, REFUSED, VARIANTS, hold

HABITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chooses keys by another way under another name than sdpa": (("deepseek_v32", "axk2"), VARIANTS),
    "gives the other sequence by position": (("efficientloftr",), ("belief", "simpletron_resl")),
    "values have other heads than keys": (("nemo_speechlm",), ("outeffhop", "modern_hopfield")),
    "each stage has its own width": (("swin",), ("belief_star",)),
    "windows are shifted from layer to layer": (("swin", "lw_detr"), ("modern_hopfield",)),
    "several lists of layers in one stack": (("videoprism", "hrm_text"), ("modern_hopfield",)),
    "keywords do not reach the layers": (("idefics3", "longt5", "voxtral", "stablelm"), ("modern_hopfield",)),
    "layers take no keywords": (("lightglue",), ("modern_hopfield",)),
    "the container returns a tensor": (
        ("chinese_clip", "markuplm", "layoutlmv3"),
        ("modern_hopfield", "belief_star", "simpletron_resl"),
    ),
    "the module looks into its mask": (("doge",), ("simpletron_resl",)),
    "the mask holds numbers": (("parakeet_ctc", "swin"), ("simpletron_resl",)),
    "the model asks for the keys of the cache": (("mllama",), ("simpletron_resl",)),
    "a mask for each kind of layer": (("zaya",), ("simpletron_resl",)),
    "the place in the cache is worked out": (("hrm_text", "zamba2"), ("belief", "simpletron_resl")),
    "windows in the cache beside layers with all keys": (("gemma2", "llama4_text"), ("modern_hopfield",)),
}
CASES = [
    pytest.param(model_type, variants, id=f"{habit}-{model_type}")
    for habit, (model_types, variants) in HABITS.items()
    for model_type in model_types
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "variants"), CASES)
def test_right_or_refused_when_patched(model_type: str, variants: tuple[str, ...]) -> None:
    outcomes = [hold(named(model_type), variant) for variant in variants]
    if all(outcome.result == NOT_BUILT for outcome in outcomes):
        pytest.skip(outcomes[0].sentence)
    assert not [outcome for outcome in outcomes if outcome.result not in (EXACT, PART, REFUSED)]
