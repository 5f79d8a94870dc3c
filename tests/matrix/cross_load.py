"""Checkpoints saved on one version of transformers load on another: `cross_load.py save|load DIR`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hf_attn_swap import describe, list_variants, patch_model, unpatch_model  # noqa: E402  # the path comes first
from hf_attn_swap.layer.swap import Swap  # noqa: E402
from tests import zoo  # noqa: E402
from tests.contract.cells import PAIRS  # noqa: E402

TOLERANCE = 1e-6  # of the largest logit: versions may order sums differently


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Family, name of the case, arguments: every variant and pair on all layers, every variant on the first alone."""
    for family in zoo.FAMILIES:
        for variant in (*list_variants(), *PAIRS):
            yield family, variant, {"strength": 1.0}
        for variant in list_variants():
            yield family, f"{variant}-first", {"strength": 0.3, "layers": [0]}


def logits(model: Any, family: str) -> torch.Tensor:
    with torch.no_grad():
        return zoo.output(model.eval()(**zoo.inputs(family))).contiguous()


def save(folder: Path) -> None:
    """Every case with its parameters moved, the logits it gives here, and those of the stock model."""
    for family, case, arguments in cases():
        model = patch_model(zoo.build(family), case.removesuffix("-first"), **arguments)
        generator = torch.Generator().manual_seed(0)
        for swap in (module for module in model.modules() if isinstance(module, Swap)):
            for parameter in swap.parameters():
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        target = folder / family / case
        model.save_pretrained(target)
        expected = {"swapped": logits(model, family), "stock": logits(zoo.build(family), family)}
        save_file(expected, target / "expected.safetensors")
        (target / "rows.txt").write_text(rows(model))
    (folder / "version.txt").write_text(transformers.__version__)
    print(f"{len(list(cases()))} checkpoints saved with transformers {transformers.__version__}")


def rows(model: Any) -> str:
    """What was swapped, as text that no version words differently."""
    return "\n".join(f"{row.layer} {row.attention} {row.strength} {row.options}" for row in describe(model).rows)


def load(folder: Path) -> None:
    """Load them all by the class that config.json names; compare, and compare again without the swap."""
    exact = 0
    for family, case, _ in cases():
        target = folder / family / case
        name = transformers.AutoConfig.from_pretrained(target).architectures[0]
        model = getattr(transformers, name).from_pretrained(target)
        assert rows(model) == (target / "rows.txt").read_text(), target
        expected = load_file(target / "expected.safetensors")
        exact += torch.equal(logits(model, family), expected["swapped"])
        compare(logits(model, family), expected["swapped"], f"{target} swapped")
        compare(logits(unpatch_model(model), family), expected["stock"], f"{target} unpatched")
    saved, here, count = (folder / "version.txt").read_text(), transformers.__version__, len(list(cases()))
    assert len(list(folder.glob("*/*/config.json"))) == count, "the folder holds other cases than these"
    print(f"{count} checkpoints of transformers {saved} loaded with {here}, {exact} bit for bit")


def compare(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    difference = float((got - wanted).abs().max() / wanted.abs().max())
    assert difference <= TOLERANCE, f"{what}: {difference:.1e}"


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
