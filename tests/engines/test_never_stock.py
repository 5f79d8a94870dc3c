"""No engine serves a converted checkpoint with stock attention: not without the plugin, and not without the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .tiny import converted, save, stock

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other packages
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "transformers": dict(model_impl="transformers"),
    "vllm": dict(model_impl="vllm"),
    "trust": dict(trust_remote_code=True),
    "both": dict(trust_remote_code=True, model_impl="transformers"),
}
PROCESSES: dict[str, tuple[str, dict[str, str]]] = {
    "without the plugin": ("", {"VLLM_PLUGINS": ""}),
    "without the plugin, imported": ("imported", {"VLLM_PLUGINS": ""}),
    "without the package": ("absent", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model without parameters of its own: its weights have the names of the stock model's."""
    return save(converted("llama", dict(variant="belief")), tmp_path_factory.mktemp("model") / "belief")


def renamed(folder: Path, target: Path) -> Path:
    """The same checkpoint as an earlier version saved it: with the names of transformers, and without the shim."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    del config["auto_map"], config["model_file"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("process", PROCESSES)
def test_vllm_refuses(process: str, folder: Path, serve: Any) -> None:
    words, env = PROCESSES[process]
    results = serve([dict(folder=str(folder), build=True, options=way) for way in WAYS.values()], words, **env)
    for way, result in zip(WAYS, results, strict=True):
        assert "built" not in result, way
        told = result["error"] + result["log"]
        assert "hf_attn_swap" in told or "HfAttnSwapLlamaForCausalLM" in told, (way, result["error"])


def test_an_older_checkpoint_runs_its_swaps(folder: Path, serve: Any, tmp_path: Path) -> None:
    """The plugin knows it by its block, although it names a class of transformers."""
    plain = save(stock("llama"), tmp_path / "stock")
    prompts = [list(range(20, 60))]
    jobs = [
        dict(folder=str(each), prompts=prompts, tokens=16)
        for each in (folder, renamed(folder, tmp_path / "old"), plain)
    ]
    new, old, other = (result["first"][0] for result in serve(jobs))
    assert new["tokens"] == old["tokens"] != other["tokens"]
    assert new["prompt"] == old["prompt"]


def test_the_converter_of_llama_cpp_refuses(folder: Path, tmp_path: Path) -> None:
    converter = Path(os.environ["HF_ATTN_SWAP_ENGINES"]) / "llama.cpp" / "convert_hf_to_gguf.py"
    command = [sys.executable, str(converter), str(folder), "--outfile", str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "HfAttnSwapLlamaForCausalLM is not supported" in done.stdout + done.stderr
    assert not (tmp_path / "model.gguf").exists()
