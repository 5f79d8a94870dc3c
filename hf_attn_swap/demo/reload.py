"""Checks a saved model in a new process: `python -m hf_attn_swap.demo.reload FOLDER`.

FOLDER holds the saved `model/`, and `reload_check.safetensors` with one batch and the model's logits for that batch
before it was saved. Once the package is imported, the plain `AutoModel` classes rebuild the swap.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel

CHECK_FILE = "reload_check.safetensors"
MODEL_FOLDER = "model"


@torch.no_grad()
def write_check(model: PreTrainedModel, batch: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a batch and the model's logits for the batch, computed on the CPU, beside the saved model."""
    inputs = {key: tensor.cpu().contiguous() for key, tensor in batch.items() if key != "labels"}
    logits = model.cpu().eval()(**inputs).logits
    save_file({**inputs, "logits": logits.contiguous()}, folder / CHECK_FILE)


@torch.no_grad()
def check(folder: Path) -> dict[str, object]:
    """Load the saved model, and compare its logits with the written logits."""
    expected = load_file(folder / CHECK_FILE)
    logits = expected.pop("logits")
    model = AutoModelForSequenceClassification.from_pretrained(folder / MODEL_FOLDER).eval()
    loaded = model(**expected).logits
    return {
        "class": type(model).__name__,
        "logits": logits.numel(),
        "equal": torch.equal(loaded, logits),
        "max_difference": float((loaded - logits).abs().max()),
    }


if __name__ == "__main__":
    print(json.dumps(check(Path(sys.argv[1]))))
