"""Gives a pretrained image model and its processor another image size, which both keep when they are saved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

POSITIONS = "position_embeddings"


def image_processor(name: str, size: int | None) -> Any:
    """The processor of a pretrained model, for images of `size` x `size` pixels; None takes its own size."""
    sizes = {} if size is None else {"size": {"height": size, "width": size}, "do_center_crop": False}
    return AutoImageProcessor.from_pretrained(name, **sizes)


@torch.no_grad()
def resized(model: PreTrainedModel, size: int | None) -> PreTrainedModel:
    """A model with the same weights for images of `size` x `size` pixels; None takes the model as it is.

    Position embeddings are interpolated once, by the model's own rule. From then on they are those of the new size.

    Args:
        model: a model of images whose config has an `image_size`, as ViT, DeiT, DINOv2 and Swin.
        size: side of an image in pixels.

    Raises:
        ValueError: the model cannot be built for this size, or weights beside position embeddings depend on the size.
    """
    if size is None or getattr(model.config, "image_size", None) == size:
        return model
    config = copy.deepcopy(model.config)
    config.image_size = size
    try:
        new: Any = type(model)(config)
        new.to(model.dtype)
        weights = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(getattr(module, POSITIONS, None), nn.Parameter):
                weights[f"{name}.{POSITIONS}"] = _positions(module, new.get_submodule(name), size)
        new.load_state_dict(weights)
    except (RuntimeError, ValueError, AttributeError) as problem:
        raise ValueError(
            f"{type(model).__name__} cannot take images of {size} pixels instead of "
            f"{getattr(model.config, 'image_size', None)}; leave out --image_size."
        ) from problem
    made: PreTrainedModel = new.train(model.training)
    return made


def _positions(module: Any, new: Any, size: int) -> Tensor:
    """The position embeddings of the new size (1,T,E), with those of the class token."""
    like = torch.empty_like(new.position_embeddings)
    positions: Tensor = module.interpolate_pos_encoding(like, size, size)
    return positions
