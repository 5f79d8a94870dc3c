"""An image processor of a few pixels."""

from __future__ import annotations

import torch
from PIL import Image


class Pixels:
    """An image processor."""

    def __call__(self, image: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
        assert image.mode == "RGB"
        return {"pixel_values": torch.full((1, 3, 16, 16), float(image.size[0]))}
