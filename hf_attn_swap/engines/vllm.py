"""The plugin of vLLM: with it, `vllm serve FOLDER` runs a converted checkpoint.

vLLM loads it in each of its processes by the entry point `vllm.general_plugins`. It only says which class of vLLM runs
which architecture: that class is imported where a model is built (`vllm_model.py`).
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ..saved import shim

TESTED = "0.32"
MODEL = "hf_attn_swap.engines.vllm_model:SwappedForCausalLM"


def register() -> None:
    """Tell vLLM which class runs converted language models. A second call changes nothing.

    vLLM itself goes on if it has no registry of models where it was: then it refuses converted models.
    """
    try:
        from vllm import ModelRegistry

        known = set(ModelRegistry.get_supported_archs())
        add = ModelRegistry.register_model
    except (ImportError, AttributeError) as missing:
        logging.get_logger(__name__).error(
            f"hf-attn-swap finds no registry of models in {version()} ({missing}), which therefore refuses converted "
            f"models; install a vLLM that it was tested with ({TESTED})."
        )
        return
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in sorted({shim.saved_name(name) for name in names if isinstance(name, str)} - known):
        add(name, MODEL)


def version() -> str:
    """The installed vLLM, for errors."""
    import vllm

    return f"vLLM {getattr(vllm, '__version__', 'of an unknown version')}"
