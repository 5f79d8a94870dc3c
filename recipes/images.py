"""Reads images from MNIST's idx files or from parquet files as tensors, for the recipes beside this file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Image
from torch import Tensor


def idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(
        path.read_bytes()
    )  # the file holds two zeros, the type, the number of axes, the axes' lengths, the data
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(np.frombuffer(raw, ">i4", raw[3], 4))


def read_images(folder: Path, split: str, column: str = "img") -> tuple[Tensor, Tensor]:
    """The images (N,C,H,W) in [0, 1] and the labels (N) of the split "train" or "test"."""
    prefix = {"train": "train", "test": "t10k"}[split]
    if (folder / f"{prefix}-images-idx3-ubyte.gz").exists():
        images, labels = (idx(folder / f"{prefix}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
        return torch.from_numpy(images[:, None] / np.float32(255)), torch.from_numpy(labels.astype(np.int64))
    files = sorted(map(str, folder.glob(f"{split}*.parquet")))
    if not files:
        raise ValueError(f"{folder} has neither {prefix}-images-idx3-ubyte.gz nor {split}*.parquet; name their folder.")
    rows = Dataset.from_parquet(files).cast_column(column, Image(mode="RGB"))
    images = np.stack([np.asarray(image, dtype=np.float32) / 255 for image in rows[column]])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(rows["label"])
