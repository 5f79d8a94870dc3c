"""Fine-tunes an image classifier with a swapped attention, and the softmax control beside it.

    hf-attn-swap train image-classification cifar10 --variant outeffhop

The data set needs a column of images. It may be on the Hub, in parquet files, or in a folder with one folder per class.
If `--image_size` differs from the model's size, position embeddings are interpolated once, and the saved model and its
processor have the new size. A smaller size has fewer patches and is several times faster. With `--from_scratch`,
`--model_name_or_path vit` and `--config_overrides` define the model. skip_free.py describes `--skip_free`, and
training/augment.py what augments the images to train on.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedModel,
    ViTImageProcessorPil,
    default_data_collator,
)

from .. import (
    About,
    ImageDataArguments,
    ModelArguments,
    ScratchArguments,
    Task,
    launch,
    load_splits,
    made_of,
    scratch_config,
)
from ..augment import AugmentArguments, Augmentation, with_drop_path
from ..penalty import PenaltyArguments
from .skip_free import without_skips
from .text_classification import predict

AUTO = AutoModelForImageClassification
POSITIONS = "position_embeddings"


@dataclass(kw_only=True)
class RecipeArguments(AugmentArguments, PenaltyArguments, ScratchArguments):
    """Arguments of this recipe alone."""

    image_size: int | None = field(default=None, metadata={"help": "Side in pixels; the processor's if left out."})
    skip_free: bool = field(default=False, metadata={"help": "No residual connections; needs --from_scratch."})

    def __post_init__(self) -> None:
        AugmentArguments.__post_init__(self)
        PenaltyArguments.__post_init__(self)
        if not self.from_scratch and (self.skip_free or self.config_overrides != "{}"):
            raise ValueError(
                "--skip_free and --config_overrides need --from_scratch: pretrained weights fit one model."
            )

    def changed(self) -> dict[str, Any]:
        """The arguments on which the metrics depend, if they differ from the default."""
        names = ["from_scratch", "config_overrides", "skip_free"] if self.from_scratch else []
        own = {name: getattr(self, name) for name in names}
        return {"image_size": self.image_size, **own, **self.penalty, **self.augmentation}


def prepare(
    rows: dict[str, list[Any]], column: str, processor: Any, flip: bool, augmentation: Augmentation | None = None
) -> dict[str, Any]:
    """The pixels (3,S,S) of some rows. The data set calls this function when the rows are used."""
    images, labels = [image.convert("RGB") for image in rows[column]], rows["labels"]
    if augmentation is not None:
        images, labels = augmentation.pictures(images), augmentation.labels(labels)
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    if flip:
        mirrored = torch.rand(len(images)) < 0.5
        pixels[mirrored] = pixels[mirrored].flip(-1)
    if augmentation is not None:
        pixels = augmentation.pixels(pixels)
    return {"pixel_values": list(pixels), "labels": labels}


def pretrained(model: ModelArguments, size: int | None, values: dict[str, Any]) -> tuple[Any, Any]:
    """A function that loads the pretrained model, and its processor; both for images of this size."""
    load = functools.partial(AUTO.from_pretrained, model.model_name_or_path, dtype=model.dtype, **values)
    return lambda: resized(load(), size), image_processor(model.model_name_or_path, size)


def from_scratch(name: str, own: RecipeArguments, values: dict[str, Any]) -> tuple[Any, Any]:
    """A function that builds the model with random weights, and its processor."""
    sized: dict[str, Any] = {} if own.image_size is None else {"image_size": own.image_size}
    config = scratch_config(name, own.config_overrides, **values, **sized)
    side = {"height": config.image_size, "width": config.image_size}
    load = functools.partial(without_skips if own.skip_free else AUTO.from_config, config)
    return load, ViTImageProcessorPil(size=side)


def build_task(model: ModelArguments, data: ImageDataArguments, own: RecipeArguments) -> Task:
    """Read and check the data and the options, before any training."""
    train, test, classes = load_splits(data)
    values = {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: index for index, name in enumerate(classes)},
    }
    more = ["without residual connections"] if own.skip_free else []
    load, processor = (
        from_scratch(model.model_name_or_path, own, values)
        if own.from_scratch
        else pretrained(model, own.image_size, values)
    )
    ready = functools.partial(prepare, column=data.image_column_name, processor=processor)
    augmentation = Augmentation(own, len(classes)) if own.augmentation else None
    return Task(
        load=(lambda: with_drop_path(load(), own.drop_path)) if own.drop_path else load,
        train=train.with_transform(functools.partial(ready, flip=True, augmentation=augmentation)),
        test=test.with_transform(functools.partial(ready, flip=False)),
        collate=default_data_collator if augmentation is None else augmentation.collate,
        metrics=data.metrics,
        predict=predict,
        settings=data.settings | own.changed(),
        processor=processor,
        scratch=made_of(model.published_name, own.config_overrides, *more) if own.from_scratch else "",
        penalty=own.penalty,
    )


def about(own: RecipeArguments) -> About:
    """The sentences of the card."""
    return About(
        prefix=own.card_name,
        task="image-classification",
        auto_class="skip_free.SkipFreeViTForImageClassification" if own.skip_free else AUTO.__name__,
        intended_use="Compares attentions on this task; a classifier of images like those it was trained on.",
        language=(),
    )


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


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe with these words, or with those of the command line."""
    launch(
        RecipeArguments,
        build_task,
        about,
        arguments,
        keep_columns=True,
        recipe="image_classification",
        data=ImageDataArguments,
    )
