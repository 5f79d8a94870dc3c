"""config.json of a converted model names a class that no other program has, and a file that MLX does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_attn_swap import patch_model
from hf_attn_swap.publish.checkpoint import add_shim
from hf_attn_swap.saved.shim import KEYS
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import fresh, swaps


def content(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return result


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_on_disk_and_in_memory(name: str, tmp_path: Path) -> None:
    model = patch_model(fresh(name, torch.float32), "outeffhop")
    model.save_pretrained(tmp_path)
    stock, saved = type(model).__name__, f"HfAttnSwap{type(model).__name__}"
    assert content(tmp_path)["architectures"] == [saved]
    assert content(tmp_path)["model_file"] == "attn_swap.py"
    assert not hasattr(transformers, saved)
    loaded = type(model).from_pretrained(tmp_path)
    for config in (model.config, loaded.config):
        assert config.architectures == [stock]
        assert not hasattr(config, "model_file")
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == [saved]
    assert type(read).from_dict(content(tmp_path)).architectures == [saved]
    assert type(read).get_config_dict(tmp_path)[0]["architectures"] == [saved]
    read.save_pretrained(tmp_path / "config")
    again = content(tmp_path / "config")
    assert {key: again[key] for key in KEYS} == {key: content(tmp_path)[key] for key in KEYS}
    assert type(model).from_pretrained(tmp_path, config=read).config.architectures == [stock]


def test_a_second_save_is_the_same(tmp_path: Path) -> None:
    patch_model(fresh("bert", torch.float32), "outeffhop").save_pretrained(tmp_path / "first")
    transformers.BertForMaskedLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert content(tmp_path / "first") == content(tmp_path / "second")


def test_the_saved_class_is_chosen_among_several(tmp_path: Path) -> None:
    """Two classes of Funnel answer to `AutoModel`, and the config says which one."""
    config = transformers.FunnelConfig(
        vocab_size=40, d_model=32, n_head=2, d_head=16, d_inner=32, block_sizes=[1], num_decoder_layers=1
    )
    config.architectures = ["FunnelBaseModel"]
    config.attn_swap = {}
    config.save_pretrained(tmp_path)
    assert content(tmp_path)["architectures"] == ["HfAttnSwapFunnelBaseModel"]
    assert content(tmp_path)["auto_map"]["AutoModel"] == "attn_swap.FunnelBaseModel"


def test_parts_of_a_model(tmp_path: Path) -> None:
    """llama.cpp reads the names of the text model, if the config of this part has names."""
    text = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])
    config = transformers.LlavaConfig(text_config=text, vision_config=transformers.CLIPVisionConfig())
    config.architectures, config.attn_swap = ["LlavaForConditionalGeneration"], {}
    config.save_pretrained(tmp_path)
    written = content(tmp_path)
    assert written["architectures"] == ["HfAttnSwapLlavaForConditionalGeneration"]
    assert written["text_config"]["architectures"] == ["HfAttnSwapLlamaForCausalLM"]
    assert config.architectures == ["LlavaForConditionalGeneration"]
    assert config.text_config.architectures == ["LlamaForCausalLM"]
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == written["architectures"]
    assert read.text_config.architectures == written["text_config"]["architectures"]


def test_a_checkpoint_from_before(tmp_path: Path) -> None:
    """It has the names of transformers, loads with them, and `add_shim` changes them."""
    patch_model(fresh("bert", torch.float32), "outeffhop").save_pretrained(tmp_path)
    before = {key: value for key, value in content(tmp_path).items() if key not in ("auto_map", "model_file")}
    (tmp_path / "config.json").write_text(json.dumps(before | {"architectures": ["BertForMaskedLM"]}))
    assert swaps(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path))
    add_shim(tmp_path)
    assert content(tmp_path)["architectures"] == ["HfAttnSwapBertForMaskedLM"]
    assert content(tmp_path)["model_file"] == "attn_swap.py"
    assert swaps(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path))
