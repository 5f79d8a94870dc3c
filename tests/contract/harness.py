"""What the contract tests share: cached tiny models, one way to run them, tolerances, and a call recorder.

The loss is a fixed random projection of the logits of real tokens, so that every gradient is exercised.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from hf_attn_swap.layer.swap import Swap
from tests import reference, zoo

from .cells import FAMILY_NAMES, Cell, swap_in

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # docs/mathematics.md, section Strength and exactness
LENGTH, BATCH = 6, 2
CAUSAL_FAMILIES = tuple(name for name in FAMILY_NAMES if name in zoo.CAUSAL)
TEXT_FAMILIES = tuple(name for name in FAMILY_NAMES if "input_ids" in zoo.inputs(name))
Gradients = dict[str, Tensor]


SMALL = {"patch_size": 8}  # for image models: 5 tokens, not 17


@functools.cache
def _built(name: str, dtype: torch.dtype, overrides: tuple[tuple[str, Any], ...]) -> nn.Module:
    return zoo.build(name, dtype=dtype, **dict(overrides)).eval()


def fresh(name: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """A stock model of one's own; equal arguments give equal weights."""
    chosen = overrides if name in TEXT_FAMILIES else SMALL | overrides
    return copy.deepcopy(_built(name, dtype, tuple(sorted(chosen.items()))))


def padding_side(name: str) -> str | None:
    """The side on which this family is padded, None for images."""
    return "left" if name in CAUSAL_FAMILIES else "right" if name in TEXT_FAMILIES else None


def batch_of(name: str, dtype: torch.dtype = torch.float64, padded: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """Inputs of a family; floating point ones in the model's dtype."""
    made = zoo.inputs(name, batch=BATCH, length=LENGTH, padded=padded, **kwargs)
    if padded == "left" and name == "llama" and "attention_mask" in made:
        # The pairs of a sink count positions from the first seen token. With the same positions for all variants, their
        # numbers agree to the last bits: angles are fp32. test_left_padding.py has batches without positions.
        made["position_ids"] = (made["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()}


def real(output: Tensor, batch: dict[str, Any]) -> Tensor:
    """The outputs of real tokens; all of them without a 2-D mask."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2 or output.dim() != 3 or output.shape[:2] != mask.shape:
        return output
    return output[mask.bool()]


def forward(model: Any, batch: dict[str, Any], **kwargs: Any) -> Tensor:
    """Outputs of real tokens, without gradients."""
    with torch.no_grad():
        return real(zoo.output(model(**batch, **kwargs)), batch)


def run(model: nn.Module, batch: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Gradients]:
    """Outputs of real tokens, and the gradients of all pretrained parameters."""
    out, gradients = run_all(model, batch, **kwargs)
    return out, {name: gradient for name, gradient in gradients.items() if ".attn_swap." not in name}


def run_all(model: nn.Module, batch: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Gradients]:
    """Outputs of real tokens, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    out = real(zoo.output(model(**batch, **kwargs)), batch)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    (out * weights).sum().backward()
    named = model.named_parameters()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
    return out.detach(), gradients


def distance(got: Tensor, wanted: Tensor) -> float:
    """Largest difference of two outputs, relative to their largest entry (or to 1 if that is smaller)."""
    assert got.shape == wanted.shape
    assert torch.isfinite(got).all()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1))


def gradient_distance(got: Gradients, wanted: Gradients) -> float:
    """Norm of the difference of all gradients, relative to their global norm."""
    assert set(got) == set(wanted)
    square = sum(float((got[name] - wanted[name]).double().square().sum()) for name in wanted)
    scale = sum(float(wanted[name].double().square().sum()) for name in wanted)
    assert scale > 0
    return float((square / scale) ** 0.5)


def assert_same(got: tuple[Tensor, Gradients], wanted: tuple[Tensor, Gradients], slack: float = 1.0) -> None:
    """Values and gradients agree to the tolerance for their dtype."""
    tolerance = TOLERANCE[wanted[0].dtype] * slack
    assert distance(got[0], wanted[0]) <= tolerance
    assert gradient_distance(got[1], wanted[1]) <= tolerance


def assert_identical(got: tuple[Tensor, Gradients], wanted: tuple[Tensor, Gradients]) -> None:
    """Values and gradients agree bit for bit."""
    assert torch.equal(got[0], wanted[0])
    assert set(got[1]) == set(wanted[1])
    for name, gradient in wanted[1].items():
        assert torch.equal(got[1][name], gradient), name


def swaps(model: nn.Module) -> list[Swap]:
    """All swaps of a model, in module order."""
    return [module for module in model.modules() if isinstance(module, Swap)]


def without_shortcut(model: nn.Module) -> nn.Module:
    """At strength 0 compute the variant with s = 0 instead of running the stock function."""
    for swap in swaps(model):
        assert swap.phase == "off" or swap.carries
        assert float(swap.strength_value) == 0
        swap.phase = "between"
    return model


def perturb(model: nn.Module, seed: int = 3) -> nn.Module:
    """Move the variant's own parameters away from their neutral start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for swap in swaps(model):
            for parameter in swap.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def swapped(family: str, cell: Cell, strength: float = 1.0, dtype: torch.dtype = torch.float64) -> Any:
    """A patched model whose own parameters are away from their neutral start."""
    return perturb(swap_in(fresh(family, dtype), cell[0], strength=strength, **cell[1]))


def neutral(model: nn.Module) -> bool:
    """True for the control, and for options under which the formula is ordinary attention."""
    variants = swaps(model)[0].variants
    return all(not type(v).places or getattr(v.options, "stretch", None) == 0 == v.options.zeta - 1 for v in variants)


@contextlib.contextmanager
def refused(*reasons: str) -> Iterator[None]:
    """A ValueError that names all of these, word for word."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the words are checked below
        yield
    for reason in reasons:
        assert reason in str(caught.value)


class Recorder(TorchFunctionMode):
    """Names of the torch functions called inside, and the shapes of the tensors they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append((resolve_name(func) or func.__name__).rpartition(".")[2])
        if isinstance(result, Tensor):
            self.shapes.add(tuple(result.shape))
        return result

    def count(self, *names: str) -> int:
        return sum(name in names for name in self.names)


__all__ = [name for name in dir() if not name.startswith("__")] + ["reference"]
