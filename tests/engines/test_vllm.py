"""vLLM serves a converted model as transformers computes it, by the plugin alone, or refuses it with a sentence."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_attn_swap.layer.calibration import Calibration
from hf_attn_swap.layer.value_scale import ValueScale
from hf_attn_swap.wiring.install import installation_of
from tests.harness.process import ROOT

from .expected import differences
from .tiny import converted, save, stock

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other packages
TOLERANCE = 1e-3
SCORE = {"kind": "score"}
NEAR = {"window": 8, "sinks": 0}
LENGTHS = (3, 5, 17, 33, 64, 100, 129, 40)
PROMPTS = [[random.Random(length).randrange(4, 260) for _ in range(length)] for length in LENGTHS]
SERVED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "belief": ("llama", [dict(variant="belief")]),
    "belief, biases and groups": ("qwen2", [dict(variant="belief")]),
    "belief, strength 0.4": ("llama", [dict(variant="belief", strength=0.4)]),
    "belief_star": ("qwen2", [dict(variant="belief_star")]),
    "gated": ("llama", [dict(variant="gated")]),
    "gated, all features": ("qwen2", [dict(variant="gated", kind="all_features")]),
    "gated, per head, two of four layers": ("llama", [dict(variant="gated", kind="per_head", layers=[1, 3])]),
    "outeffhop": ("llama", [dict(variant="outeffhop")]),
    "outeffhop, slots": ("llama", [dict(variant="outeffhop", n=4, beta=1.5)]),
    "outeffhop, strength 0.5": ("qwen2", [dict(variant="outeffhop", strength=0.5)]),
    "sink of a score": ("qwen2", [dict(variant="sink", **SCORE)]),
    "window in two layers": ("llama", [dict(variant="window", **NEAR, layers=[0, 2])]),
    "windows of two sizes": (
        "llama",
        [dict(variant="window", **NEAR, layers=[0]), dict(variant="window", window=24, sinks=0, layers=[1, 2])],
    ),
    "all of it": ("qwen2", [dict(variant="sink+window+outeffhop+belief_star", sink=SCORE, window=NEAR)]),
    "all of it, strength 0.7": ("llama", [dict(variant="sink+outeffhop+gated", sink=SCORE, strength=0.7)]),
    "strength 0": ("llama", [dict(variant="sparsemax", strength=0.0)]),
    "fits": ("llama", [dict(variant="belief")]),
    "fits, strength 0.6": ("qwen2", [dict(variant="sink+belief_star", sink=SCORE, strength=0.6)]),
}
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "modern_hopfield": ([dict(variant="modern_hopfield")], "its scores go from layer to layer"),
    "sparsemax": ([dict(variant="sparsemax")], "it needs the scores of all keys"),
    "entmax15": ([dict(variant="entmax15")], "it needs the scores of all keys"),
    "clipped_softmax": ([dict(variant="clipped_softmax")], "it needs the scores of all keys"),
    "simpletron": ([dict(variant="simpletron")], "linear attention keeps a state"),
    "simpletron_res": ([dict(variant="simpletron_res")], "linear attention keeps a state"),
    "simpletron_resl": ([dict(variant="simpletron_resl")], "linear attention keeps a state"),
    "sink of a pair": ([dict(variant="sink")], "its pairs have keys"),
    "sink of a key": ([dict(variant="sink+belief", sink={"kind": "key"})], "its pairs have keys"),
    "window with first tokens": ([dict(variant="window", window=8)], "and no first tokens"),
    "window in some heads": ([dict(variant="window", **NEAR, full_heads=(0,))], "one window for all heads"),
    "window, strength 0.5": ([dict(variant="window", **NEAR, strength=0.5)], "set the strength to 1"),
    "one layer of several": (
        [dict(variant="belief", layers=[0, 1, 2]), dict(variant="sparsemax", layers=[3])],
        "layers.3.self_attn: vLLM does not run sparsemax",
    ),
}


def with_fits(model: Any) -> Any:
    """The model with a calibration and scaled values in each layer."""
    installation = installation_of(model)
    generator = torch.Generator().manual_seed(2)
    for layer in installation.layers():
        calibration, scale = Calibration("map", layer.swap.geometry), ValueScale(layer.swap.geometry)
        with torch.no_grad():
            for parameter in calibration.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            scale.squares.copy_(4.0 ** torch.randint(-2, 3, scale.squares.shape, generator=generator))
        layer.swap.put(calibration)
        layer.swap.put(scale)
    installation.refresh()
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a served, or of a stock model, by its name."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(name: str) -> Path:
        family, swaps = SERVED.get(name, ("llama", []))
        model = converted(family, *swaps) if swaps else stock(family)
        return save(with_fits(model) if name.startswith("fits") else model, root / str(len(list(root.iterdir()))))

    return made


def compare(folder: Path, prompts: list[list[int]], result: dict[str, Any]) -> dict[str, float]:
    """The differences between vLLM's result and transformers."""
    assert "error" not in result, result["error"] + result["trace"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = differences(model, prompts, result)
    assert max(found["prompt"], found["text"], found["again"]) <= TOLERANCE, found
    assert found["other texts"] == 0, found
    return found


@pytest.fixture(scope="module")
def results(folders: Any, serve: Any) -> dict[str, Any]:
    """What vLLM gives for each model, with eight prompts of other lengths in batches of four."""
    jobs = [dict(folder=str(folders(name)), prompts=PROMPTS, tokens=24) for name in SERVED]
    return dict(zip(SERVED, serve(jobs), strict=True))


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, folders: Any, results: dict[str, Any], record_property: Any) -> None:
    """With the prompts new, and with their beginnings in vLLM's cache of prefixes."""
    found = compare(folders(name), PROMPTS, results[name])
    assert found["cached"] > 0, "no prompt was in the cache"
    record_property("largest difference", found)


def test_the_tiny_models_show_their_attention(folders: Any, results: dict[str, Any]) -> None:
    """Stock attention on the same weights has other texts, so the comparison would see it."""
    model = stock("llama")
    for name in ("belief", "gated", "outeffhop", "window in two layers"):
        assert differences(model, PROMPTS, results[name])["other texts"] > 0, name


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks of a prompt": dict(max_num_batched_tokens=32, enable_chunked_prefill=True),
    "no cache of prefixes": dict(enable_prefix_caching=False),
    "a compiler": dict(enforce_eager=False),
}
LONG = ("belief", "all of it")


@pytest.fixture(scope="module")
def with_options(folders: Any, serve: Any) -> dict[tuple[str, str], Any]:
    """What vLLM gives with other options, and with 200 new tokens."""
    cells = [(name, option) for name in LONG for option in (*OPTIONS, "long")]
    jobs = [
        dict(
            folder=str(folders(name)),
            prompts=PROMPTS[-4:] if option == "long" else PROMPTS,
            tokens=200 if option == "long" else 16,
        )
        | dict(options=OPTIONS.get(option, {}))
        for name, option in cells
    ]
    return dict(zip(cells, serve(jobs), strict=True))


@pytest.mark.parametrize("option", [*OPTIONS, "long"])
@pytest.mark.parametrize("name", LONG)
def test_options(name: str, option: str, folders: Any, with_options: Any) -> None:
    prompts = PROMPTS[-4:] if option == "long" else PROMPTS
    found = compare(folders(name), prompts, with_options[name, option])
    assert (found["cached"] == 0) == (option == "no cache of prefixes")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory, serve: Any) -> dict[str, Any]:
    """What vLLM says to models that its attention cannot compute."""
    root = tmp_path_factory.mktemp("refused")
    jobs = [
        dict(folder=str(save(converted("llama", *swaps), root / str(place))), build=True)
        for place, (swaps, _) in enumerate(REFUSED.values())
    ]
    return dict(zip(REFUSED, serve(jobs), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_built(name: str, refusals: dict[str, Any]) -> None:
    error = refusals[name]["error"]
    assert error.startswith("ValueError: layers."), error
    assert REFUSED[name][1] in error
    assert 'run the model by "hf-attn-swap run transformers serve FOLDER"' in error


def test_weights_that_are_missing(serve: Any, tmp_path: Path) -> None:
    folder = save(converted("llama", dict(variant="gated")), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    config["attn_swap"]["swaps"][0]["options"]["gated"]["kind"] = "mlp"
    (folder / "config.json").write_text(json.dumps(config))
    (result,) = serve([dict(folder=str(folder), build=True)])
    assert "the weights of its swap cannot be loaded" in result["error"]
    assert "gated.hidden.weight" in result["error"]


def test_weights_in_8_bits(serve: Any, tmp_path: Path) -> None:
    folder = save(converted("llama", dict(variant="belief")), tmp_path / "integers")
    config = json.loads((folder / "config.json").read_text())
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**integers, "strategy": "channel", "dynamic": False},
        "input_activations": {**integers, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (result,) = serve([dict(folder=str(folder), build=True)])
    assert "weights in 8 bits" in result["error"]


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_model_in_parts(option: str, folders: Any, serve: Any) -> None:
    """vLLM tells the reason in its log, because its workers are other processes."""
    (result,) = serve([dict(folder=str(folders("belief")), build=True, options={option: 2})])
    assert "error" in result
    assert "without tensor and pipeline parallelism" in result["log"]


def test_a_module_that_computes_attention_of_its_own(folders: Any, serve: Any) -> None:
    (result,) = serve([dict(folder=str(folders("belief")), prompts=PROMPTS[:1], tokens=2, bypass=True)])
    assert "asked for the attention function 0 times instead of once" in result["log"] + result["error"]


def test_a_score_mod_is_refused() -> None:
    """The file of a user's variant may be imported by the server; vLLM's kernels have no place for its formula."""
    command = (sys.executable, "-c", SCORE_MOD)
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "vLLM does not run soft_cap: it needs the scores of all keys" in outcome.stderr


SCORE_MOD = """
import torch
from hf_attn_swap import patch_model
from hf_attn_swap.engines.vllm_model import check
from hf_attn_swap.variants.base import Variant, register
from hf_attn_swap.wiring.install import installation_of
from tests import zoo

@register("soft_cap")
class SoftCap(Variant):
    places = ("scores",)

    def score_mod(self, score, batch, head, q_idx, kv_idx):
        return torch.tanh(score)

model = patch_model(zoo.build("llama", head="lm"), "soft_cap")
(layer, *_) = installation_of(model).layers()
check(layer.path, layer.swap)
"""
