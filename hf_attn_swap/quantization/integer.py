"""W8A8 as people deploy it: integer matrix products, by torchao."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..wiring.install import model_root
from .places import quantizable

M = TypeVar("M", bound=nn.Module)


def int8_dynamic(model: M) -> M:
    """Quantise the projections of a model in place with torchao: int8 weights, int8 activations per token.

    Integer matrix products, as people deploy them. Task heads and gates stay as they are, and so does GPT-2's Conv1D,
    which torchao does not know. There is no way back: load the model again.

    Raises:
        ImportError: torchao is missing; it comes with `pip install "hf-attn-swap[quant]"`.
        ValueError: the model has no Linear that torchao could quantise.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError:
        raise ImportError('torchao is not installed; pip install "hf-attn-swap[quant]".') from None
    root = model_root(model)
    chosen = {path for path, module in quantizable(root) if isinstance(module, nn.Linear)}
    if not chosen:
        name = type(root).__name__
        raise ValueError(f"{name} has no Linear that torchao could quantise (GPT-2 has Conv1D); use fake_w8a8.")
    quantize_(root, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda module, path: path in chosen)
    return model
