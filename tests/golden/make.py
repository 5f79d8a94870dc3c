"""Writes the golden checkpoints: tiny models that this version saved, and the logits that they gave.

Usage: python -m tests.golden.make

It writes the checkpoints that are missing, into the folder of the package's version (0.1 for 0.1.0). It never writes
one again: `test_golden.py` holds every later version to what an earlier one saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import hf_attn_swap
from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.conversion.calibrate import calibrate
from hf_attn_swap.conversion.smooth import smooth
from hf_attn_swap.conversion.trainer import note_retrained
from hf_attn_swap.layer.registry import canonical_name, tiny_options
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap.patch import need_installation

FOLDER = Path(__file__).parent
SIZES = dict(vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
SIZES |= dict(max_position_embeddings=16, initializer_range=0.5)  # wide enough that attention shows in the logits


def missing() -> Iterator[tuple[str, Any]]:
    """The name and the model of every checkpoint that no version has written yet."""
    written = {canonical_name(folder.name) for folder in checkpoints()}
    makers = {
        name: lambda name=name: moved(patch_model(llama(), name, **tiny_options(name))) for name in list_variants()
    }
    makers |= {"hybrid": hybrid, "calibrated": calibrated, "scaled_values": scaled_values}
    makers |= {"smoothed": smoothed}
    for name, make in makers.items():
        if name not in written:
            torch.manual_seed(0)
            yield name, make().eval()


def checkpoints() -> list[Path]:
    """The folders of all golden checkpoints, of all versions."""
    return sorted(config.parent for config in FOLDER.glob("*/*/config.json"))


def llama() -> Any:
    """A random Llama with two query heads for each key head."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def bert() -> Any:
    """A random BERT that classifies."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def hybrid() -> Any:
    """A composition in one layer, another variant in the other, both between the pretrained model and the formula."""
    model = patch_model(bert(), "outeffhop+gated", layers=[0], strength=0.3, gated={"kind": "mlp"})
    return moved(patch_model(model, "belief_star", modules="layer.1", strength=0.7))


def calibrated() -> Any:
    """A calibration, with weights that were trained afterwards."""
    model = moved(patch_model(llama(), "modern_hopfield"))
    calibrate(model, [{"input_ids": torch.randint(16, (64, 12))}], progress=False)
    note_retrained(need_installation(model))
    return model


def scaled_values() -> Any:
    """Scales of the values, and a calibration after them."""
    model = moved(patch_model(llama(), "belief"))
    calibrate(model, [{"input_ids": torch.randint(16, (64, 12))}], fit="gain", progress=False)
    return model


def smoothed() -> Any:
    """Channels of like sizes around every layer."""
    model = moved(patch_model(llama(), "sink"))
    smooth(model, [{"input_ids": torch.randint(16, (64, 12))}], 0.5, progress=False)
    return model


def moved(model: Any) -> Any:
    """The same model, its new parameters away from their neutral start, which would hide a parameter that is lost."""
    for swap in (module for module in model.modules() if isinstance(module, Swap)):
        for parameter in swap.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def write(name: str, model: Any) -> None:
    """Save a checkpoint; beside it, a batch and the logits that the model gives."""
    version = ".".join(hf_attn_swap.__version__.split(".")[:2])
    folder = FOLDER / version / name
    model.save_pretrained(folder)
    (folder / "attn_swap.py").unlink(missing_ok=True)  # tests/publish/shim/ holds the shim
    rows = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=rows).logits.contiguous()
    save_file({"input_ids": rows, "logits": logits}, folder / "expected.safetensors")
    print(folder.relative_to(FOLDER))


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    for name, model in missing():
        write(name, model)
