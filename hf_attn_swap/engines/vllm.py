"""The plugin of vLLM: with it, `vllm serve FOLDER` runs a converted checkpoint.

vLLM loads it in each of its processes by the entry point `vllm.general_plugins`. It only says which class of vLLM runs
which architecture: that class is imported where a model is built (`vllm_model.py`).
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..saved import shim

MODEL = "hf_attn_swap.engines.vllm_model:SwappedForCausalLM"


def register() -> None:
    """Tell vLLM which class runs converted language models. A second call changes nothing.

    Raises:
        ImportError: vLLM has no registry of models where it was.
    """
    try:
        from vllm import ModelRegistry

        known = set(ModelRegistry.get_supported_archs())
        add = ModelRegistry.register_model
    except (ImportError, AttributeError) as missing:
        raise ImportError(f"hf-attn-swap finds no registry of models in {version()}: {missing}.") from missing
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in sorted({shim.saved_name(each) for each in names if isinstance(each, str)} - known):
        add(name, MODEL)


def version() -> str:
    """The installed vLLM, for errors."""
    import vllm

    return f"vLLM {getattr(vllm, '__version__', 'of an unknown version')}"
