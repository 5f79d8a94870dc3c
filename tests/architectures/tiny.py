"""Builds tiny models with random weights of any model type in transformers' registry."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from .shrink import CHOICES, LAYERS, Choice, shrunk

MOST_PARAMETERS = 150_000_000


class NotBuiltError(Exception):
    """This architecture cannot be made tiny, or what it needs as input is not known."""


def registry() -> list[str]:
    """Every model type that `AutoModel` can build."""
    return sorted(name for name in CONFIG_MAPPING.keys() if CONFIG_MAPPING[name] in MODEL_MAPPING)  # noqa: SIM118  # its own mapping: iterating it loads nothing else


def configurations(model_type: str, layers: int, reasons: list[str]) -> Iterator[PreTrainedConfig]:
    """Every small configuration that its class allows, each once; the others leave their reason in `reasons`."""
    seen: set[str] = set()
    for choice in CHOICES:
        try:
            config = configured(model_type, choice, layers)
        except NotBuiltError as problem:
            reasons.append(str(problem))
            continue
        if (words := config.to_json_string()) not in seen:
            seen.add(words)
            yield config


def configured(model_type: str, choice: Choice, layers: int = LAYERS) -> PreTrainedConfig:
    """A small configuration.

    Raises:
        NotBuiltError: with the reason that transformers gave.
    """
    try:
        return shrunk(CONFIG_MAPPING[model_type], choice, layers)
    except Exception as failure:  # the reason becomes the table's sentence
        raise NotBuiltError(f"{type(failure).__name__}: {one_line(failure)}") from failure


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A tiny model with random weights of a size that lets attention be seen.

    Raises:
        NotBuiltError: with the reason that transformers gave.
    """
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModel.from_config(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                raise NotBuiltError(f"{size / 1e6:.0f} million parameters after shrinking")
            model = AutoModel.from_config(config).float().eval()
            _weigh(model)
    except NotBuiltError:
        raise
    except Exception as failure:  # the reason becomes the table's sentence
        raise NotBuiltError(f"{type(failure).__name__}: {one_line(failure)}") from failure
    return model


def _weigh(model: nn.Module) -> None:
    """Fresh weights of deviation 0.02 hide attention behind the residual stream, and zeros hide it wholly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            embedding = "embed" in name.lower() and "proj" not in name.lower()
            if not torch.isfinite(parameter).all() or parameter.abs().max() < 1e-3:
                parameter.normal_(0, 0.1 if parameter.dim() < 2 or embedding else 1 / math.sqrt(parameter[0].numel()))
            elif parameter.dim() == 2 and not embedding and parameter.std() > 1e-6:  # not the ones of a norm
                parameter.mul_(1 / math.sqrt(parameter.shape[1]) / parameter.std())


def one_line(problem: BaseException, most: int = 300) -> str:
    """What an exception says, as one line that is the same on every machine, of at most so many characters."""
    words = without_paths(" ".join(str(problem).split()))
    return words if len(words) <= most else words[: most - 3] + "..."


def without_paths(sentence: str) -> str:
    """The sentence without the files that Python names with modules: they differ from machine to machine."""
    return re.sub(r" from '/[^']*('|$)", "", sentence)
