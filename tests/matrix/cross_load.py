"""Checkpoints saved on one version of transformers load on another: `cross_load.py save|load DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hf_attn_swap import list_variants, patch_model  # noqa: E402  # the path comes first
from hf_attn_swap.swap import Swap  # noqa: E402
from tests import zoo  # noqa: E402

TOLERANCE = 1e-6  # of the largest logit: versions may order sums differently


def save(folder: Path) -> None:
    """Every family with every variant, its parameters moved, with the logits it gives here."""
    for family in zoo.FAMILIES:
        for variant in (*list_variants(), "outeffhop+gated", "mha+belief"):
            model = patch_model(zoo.build(family), variant, strength=0.7)
            generator = torch.Generator().manual_seed(0)
            for swap in (module for module in model.modules() if isinstance(module, Swap)):
                for parameter in swap.parameters():
                    parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
            target = folder / family / variant
            model.save_pretrained(target)
            with torch.no_grad():
                save_file({"logits": zoo.output(model(**zoo.inputs(family)))}, target / "expected.safetensors")
    print(f"saved with transformers {transformers.__version__}")


def load(folder: Path) -> None:
    """Load them all and compare."""
    checked = 0
    for target in sorted(path.parent for path in folder.glob("*/*/config.json")):
        family = target.parent.name
        model = type(zoo.build(family)).from_pretrained(target).eval()
        assert any(isinstance(module, Swap) for module in model.modules()), target
        expected = load_file(target / "expected.safetensors")["logits"]
        with torch.no_grad():
            got = zoo.output(model(**zoo.inputs(family)))
        difference = float((got - expected).abs().max() / expected.abs().max())
        assert difference <= TOLERANCE, f"{target}: {difference:.1e}"
        checked += 1
    assert checked == len(zoo.FAMILIES) * (len(list_variants()) + 2), checked
    print(f"{checked} checkpoints loaded with transformers {transformers.__version__}")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
