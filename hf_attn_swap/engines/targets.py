"""The classes of transformers that a converted model can become, and their configs.

A class can be the result if its attention has a window by layer, or sinks, beside what the source has. All else of its
config is taken from the source's by name. Whether the class then computes the same, `export` measures.
Axes: H head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..variants.stock_form import StockForm

FULL, SLIDING = "full_attention", "sliding_attention"  # values of `layer_types`
FILE = {"architectures", "transformers_version", "auto_map", "model_file"}  # what a config says of its own file
OWN = FILE | {"model_type", "layer_types", "sliding_window"}  # what a new config gets from its class and the layers
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
NO_SINK = -1e4  # a score whose exponential is 0 beside every score of a text


@dataclass(frozen=True, kw_only=True)
class Target:
    """A class of language models with a window by layer, or with sinks.

    Attributes:
        model_type: its name in transformers' configs.
        since: the first transformers that has it.
        sinks: the parameter of an attention module that holds the scores of the sinks (H,); None if it has no sinks.
        biases: True if all four projections can have a bias (`attention_bias`).
        scaling: the name of the factor of q k^T in its config; None if the factor is 1 / sqrt(D).
        windowed: True if a model must have a layer with a window, because llama.cpp takes no other.
    """

    model_type: str
    since: str
    sinks: str | None = None
    biases: bool = False
    scaling: str | None = None
    windowed: bool = False


# `TARGETS` are in the order in which they are tried. vLLM and llama.cpp ran the first one.
GRANITE = Target(
    model_type="granite_swa",
    since="5.15",
    sinks="sinks",
    biases=True,
    scaling="attention_multiplier",
    windowed=True,
)
TARGETS = (GRANITE, replace(GRANITE, model_type="granitemoe_swa"), Target(model_type="cwm", since="4.57"))


def own_windows(config: PreTrainedConfig, layers: int) -> list[int | None]:
    """The window of each layer in the stock model, None for a layer that sees all keys.

    Raises:
        ValueError: a layer is of another kind than these two.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * layers
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(f"its layers are of other kinds ({', '.join(unknown)})")
    return [window if kind == SLIDING else None for kind in kinds]


def windows_of(config: PreTrainedConfig, forms: Sequence[StockForm]) -> list[int | None]:
    """The window of each layer, that of the model and that of the variant together.

    Raises:
        ValueError: there are several windows, which one config cannot say.
    """
    both = zip(own_windows(config, len(forms)), (form.window for form in forms), strict=True)
    windows = [min(filter(None, pair), default=None) for pair in both]
    if len(different := sorted({window for window in windows if window is not None})) > 1:
        raise ValueError(f"the layers have the windows {', '.join(map(str, different))}, and a config has one")
    return windows


def config_for(
    target: Target, source: PreTrainedConfig, windows: Sequence[int | None], *, biased: bool
) -> PreTrainedConfig:
    """The config of a target, with the numbers of the source's config.

    Raises:
        ValueError: the transformers at hand has no such class, or the source is another kind of model.
    """
    if missing := [name for name in SIZES if not hasattr(source, name)]:
        raise ValueError(f"the model's config has no {missing[0]}")
    known = _default(target).to_dict()
    given = {name: value for name, value in source.to_dict().items() if name in known and name not in OWN}
    width = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    given["head_dim"] = width
    if target.scaling is not None:
        given.setdefault(target.scaling, width**-0.5)
    if target.biases:
        given["attention_bias"] = biased
    given |= windowed(windows, source.max_position_embeddings if target.windowed else None)
    return AutoConfig.for_model(target.model_type, **given)


def windowed(windows: Sequence[int | None], longest: int | None) -> dict[str, Any]:
    """The names and values by which a config tells windows.

    Args:
        windows: the window of each layer, or None.
        longest: if given, a layer gets a window of so many tokens where no layer has one.
    """
    window = next(filter(None, windows), None)
    kinds = [FULL if own is None else SLIDING for own in windows]
    if window is None and longest is not None:
        window, kinds = longest, [SLIDING, *kinds[1:]]
    return {"layer_types": kinds, "sliding_window": window}


def same_class(model: PreTrainedModel, windows: Sequence[int | None]) -> PreTrainedConfig | None:
    """The source's own config with these windows; None if it cannot say them."""
    source = model.config
    stock = source.to_dict()
    given = {name: value for name, value in stock.items() if not name.startswith("attn_") and name not in FILE}
    if list(windows) != own_windows(source, len(windows)):
        if "layer_types" not in stock or "sliding_window" not in stock:
            return None
        given |= windowed(windows, None)
        if "use_sliding_window" in stock:
            given["use_sliding_window"] = True
    return type(source).from_dict(given)


def _default(target: Target) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(target.model_type)
    except (ValueError, KeyError):
        raise ValueError(
            f"transformers {transformers.__version__} has no {target.model_type}; install transformers>={target.since}"
        ) from None
