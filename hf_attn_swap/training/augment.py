"""Augments the images of a training, by torchvision's own code: the settings of Table 10 of the modern Hopfield paper.

Only the rows to train on are changed. Mixup and cutmix give soft labels, which `SoftLabelTrainer` takes.
Axes: B batch, C class, S side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, default_data_collator
from transformers.models.vit.modeling_vit import ViTLayer

from ..text.typed import install

LEVELS = 11  # magnitudes of RandAugment: 0 to 10, as timm counts them, with which ViTs are usually trained


@dataclass(kw_only=True)
class AugmentArguments:
    """The arguments of a recipe that can augment images.

    Raises:
        ValueError: a value lies outside its range.
    """

    rand_augment: int = field(default=0, metadata={"help": "Magnitude of RandAugment, of 10, such as 9; 0 is none."})
    random_erasing: float = field(
        default=0.0, metadata={"help": "Probability that a rectangle of an image becomes noise; 0 is none."}
    )
    mixup: float = field(default=0.0, metadata={"help": "Alpha of mixup, such as 0.8; 0 is none."})
    cutmix: float = field(
        default=0.0, metadata={"help": "Alpha of cutmix, such as 1; beside mixup, a batch has one of both by chance."}
    )
    drop_path: float = field(
        default=0.0, metadata={"help": "Rate of stochastic depth in the last layer of a ViT, less below; 0 is none."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.rand_augment < LEVELS:
            raise ValueError(f"--rand_augment must lie in 0 to {LEVELS - 1}, got {self.rand_augment}.")
        for name in ("random_erasing", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 0 and below 1, got {getattr(self, name)}.")
        if self.mixup < 0 or self.cutmix < 0:
            raise ValueError(f"--mixup and --cutmix must be at least 0, got {self.mixup} and {self.cutmix}.")

    @property
    def augmentation(self) -> dict[str, float]:
        """The settings that are not 0, by name."""
        names = ("rand_augment", "random_erasing", "mixup", "cutmix", "drop_path")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class Augmentation:
    """What is done to the rows to train on.

    Args:
        own: the settings.
        classes: the number of classes.

    Raises:
        ImportError: torchvision is missing.
    """

    def __init__(self, own: AugmentArguments, classes: int) -> None:
        v2, self.classes = _torchvision().transforms.v2, classes
        mixes = [make(alpha=alpha) for make, alpha in ((v2.MixUp, own.mixup), (v2.CutMix, own.cutmix)) if alpha]
        self.mix = v2.RandomChoice(mixes) if mixes else None
        self.erase = v2.RandomErasing(own.random_erasing, value="random")
        self.augment: Callable[[Any], Any] = (
            v2.RandAugment(magnitude=own.rand_augment, num_magnitude_bins=LEVELS) if own.rand_augment else v2.Identity()
        )

    def pictures(self, images: list[Any]) -> list[Any]:
        """Pictures, before the processor."""
        return [self.augment(image) for image in images]

    def pixels(self, pixels_B3SS: Tensor) -> Tensor:
        """Pixels, after the processor."""
        return torch.stack([self.erase(image) for image in pixels_B3SS])

    def labels(self, labels: list[int]) -> list[Any]:
        """The labels of rows; with a share per class (C), if batches are mixed."""
        return list(F.one_hot(torch.tensor(labels), self.classes).float()) if self.mix else labels

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of rows, mixed if the labels are shares (B,C), as those of rows to train on."""
        batch = default_data_collator(rows)
        if self.mix is not None and batch["labels"].dim() == 2:
            batch["pixel_values"], batch["labels"] = self.mix(batch["pixel_values"], batch["labels"])
        return batch


def with_drop_path(model: PreTrainedModel, rate: float) -> PreTrainedModel:
    """The model itself, whose layers leave out a branch of some rows while it trains; the rate rises with the depth.

    Raises:
        ValueError: the model is no ViT.
        ImportError: torchvision is missing.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, ViTLayer)]
    if not layers:
        raise ValueError("--drop_path is for the architecture vit; others have a rate of their own in the config.")
    for layer, own in zip(layers, torch.linspace(0, rate, len(layers)).tolist(), strict=True):
        both = nn.Sequential(layer.dropout, _torchvision().ops.StochasticDepth(own, "row"))
        layer.dropout = both.train(layer.training)
    return model


def _torchvision() -> Any:
    """The package, with its transforms and operators.

    Raises:
        ImportError: it is missing, or is a build for another torch.
    """
    try:
        import torchvision
        import torchvision.transforms.v2  # not imported by the package
    except (ImportError, RuntimeError) as problem:  # a build for another torch lacks its operators
        raise ImportError(
            "augmented images, mixup, cutmix and --drop_path need a torchvision that fits torch: "
            f"{install('augment')} ({problem})."
        ) from problem
    return torchvision
