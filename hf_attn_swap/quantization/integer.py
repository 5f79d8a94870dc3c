"""Quantises weights and activations to 8 bits (W8A8) with the integer matrix products of torchao."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import TorchAoConfig
from transformers.quantizers.auto import AutoHfQuantizer

from ..wiring.install import model_root
from .checkpoint import own_config
from .places import quantizable, refuse_stacked

M = TypeVar("M", bound=nn.Module)


def int8_dynamic(model: M) -> M:
    """Quantise the projections of a model in place with torchao: int8 weights, int8 activations per token.

    Task heads and gates are not quantised. GPT-2's Conv1D is not quantised either, because torchao does not support it.
    The weights cannot be restored: to undo the quantisation, load the model again. `model.save_pretrained` saves the
    integers, and `from_pretrained` reads them with torchao.
    docs/mathematics.md, section Quantisation to 8 bits.

    Returns:
        The same model.

    Raises:
        ImportError: torchao is missing; it comes with `pip install "hf-attn-swap[torchao]"`.
        ValueError: the model has no Linear that torchao could quantise, or experts that are no Linears.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError:
        raise ImportError('torchao is not installed; pip install "hf-attn-swap[torchao]".') from None
    root: Any = model_root(model)
    refuse_stacked(root)
    chosen = {path for path, module in quantizable(root) if isinstance(module, nn.Linear)}
    if not chosen:
        name = type(root).__name__
        raise ValueError(f"{name} has no Linear that torchao could quantise (GPT-2 has Conv1D); use fake_w8a8 instead.")
    scheme = Int8DynamicActivationInt8WeightConfig()
    quantize_(root, scheme, filter_fn=lambda module, path: path in chosen)
    own_config(root)
    root.config.quantization_config = TorchAoConfig(scheme)
    root.hf_quantizer = AutoHfQuantizer.from_config(root.config.quantization_config, pre_quantized=False)
    return model
