"""Makes inputs for an unknown model from the signature of its forward, its main input and its configuration.

Several guesses are made, the plainest first; the first that the stock model can run is taken.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, PADDING, FRAMES = 2, 8, 2, 2
MOST_BATCHES = 16  # of one choice of arguments
Batch = dict[str, Any]


def guesses(model: Any) -> Iterator[Batch]:
    """Batches that this model may be able to read."""
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name in parameters if name != "self"]
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty and parameters[n].kind.value == 1]
    main = getattr(model, "main_input_name", None)
    main = main[0] if isinstance(main, list) else main
    text = [name for name in ("input_ids", "decoder_input_ids") if name in names]
    seen: list[list[str]] = []
    for chosen in (
        [*text, *required],
        [main, *required],
        [main, *text[1:], *required],
        [main, *text, *required],
        [name for name in names if _floats(name)][:1] + required,
        [*text, *[name for name in names if _floats(name)], *required],
        *([*text, name, *required] for name in names if _floats(name)),
    ):
        wanted = [name for name in dict.fromkeys(chosen) if name in names and not name.endswith("mask")]
        if not wanted or wanted in seen:
            continue
        seen.append(wanted)
        for batch in itertools.islice(_batches(model, wanted), MOST_BATCHES):
            masks = _masks(names, batch)
            for ones in _ones(names, [name for name in required if name.endswith("mask")], batch):
                yield {**batch, **masks, **ones}
                if masks:
                    yield {**batch, **ones}


def _floats(name: str) -> bool:
    return bool(re.search(r"pixel_values|input_features|input_values|audio|past_values|image|video", name))


def _batches(model: Any, names: list[str]) -> Iterator[Batch]:
    """Every combination of what each name may be given. Some names bring others with them."""
    if not names:
        yield {}
        return
    for part in _alternatives(model, names[0], names[1:]):
        for rest in _batches(model, [name for name in names[1:] if name not in part]):
            yield {**rest, **part}


def _masks(names: list[str], batch: Batch) -> Batch:
    """A padding mask over the first row's end for text, nothing for images and sound."""
    if "attention_mask" not in names or "input_ids" not in batch:
        return {}
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -PADDING:] = 0
    return {"attention_mask": mask}


def _ones(names: list[str], required: list[str], batch: Batch) -> Iterator[Batch]:
    """Masks of frames that mask nothing: where the model insists on them, or else as a last resort."""
    needed = [name for name in required if name not in batch]
    wanted = needed or [f"{name}_mask" for name in batch if f"{name}_mask" in names]
    tensor = next((value for value in batch.values() if value.dim() == 3), None)
    if not needed or tensor is None:
        yield {}
    if wanted and tensor is not None:
        for axis in (1, 2):  # sound may have its frames last
            yield {name: torch.ones(tensor.shape[0], tensor.shape[axis], dtype=torch.long) for name in wanted}


def _alternatives(model: Any, name: str, others: list[str]) -> Iterator[Batch]:
    config, generator = model.config, torch.Generator().manual_seed(len(name))
    if name == "past_values":
        yield from _series(model, generator)
    if name in ("pixel_values", "hidden_states"):  # first the patches that come with what the model insists on
        yield from (batch for batch in _patches(config, name, generator, others) if not set(others).isdisjoint(batch))
    if name.endswith("input_ids") or name in ("input", "labels", "tokens"):
        ids = _ids(config, generator)
        yield {name: ids}
        books = _number(config, "num_codebooks") or _number(config, "num_quantizers") or 1
        yield {name: ids[..., None].expand(-1, -1, books).contiguous()}
        yield {name: ids[:, None].expand(-1, books, -1).contiguous()}
        return
    shapes = list(_shapes(config, name))
    for shape in shapes:
        yield {name: torch.randn(shape, generator=generator)}
    if "pixel_values" in name or name == "hidden_states":
        yield from _patches(config, name, generator, others)


def _series(model: Any, generator: torch.Generator) -> Iterator[Batch]:
    """Time series: as long as the context and the longest lag need, with everything that goes beside them."""
    config, names = model.config, inspect.signature(type(model).forward).parameters
    length = (_number(config, "context_length") or 32) + max(getattr(config, "lags_sequence", None) or [0])
    ahead, features = _number(config, "prediction_length") or 4, _number(config, "num_time_features") or 0
    for channels in ((), (_first(config, "num_input_channels", "input_size") or 1,)):
        batch = {
            "past_values": torch.randn(BATCH, length, *channels, generator=generator),
            "past_observed_mask": torch.ones(BATCH, length, *channels),
            "past_time_features": torch.randn(BATCH, length, features, generator=generator),
            "future_values": torch.randn(BATCH, ahead, *channels, generator=generator),
            "future_time_features": torch.randn(BATCH, ahead, features, generator=generator),
            "past_values_padding": torch.zeros(BATCH, length, dtype=torch.long),
            "freq": torch.zeros(BATCH, 1, dtype=torch.long),
        }
        yield {name: value for name, value in batch.items() if name in names}


def _shapes(config: Any, name: str) -> Iterator[tuple[int, ...]]:
    if "pixel" in name or "image" in name or "video" in name:
        channels = _number(config, "num_channels") or _number(config, "in_channels") or 3
        for height, width in _image_sizes(config):
            frames = _number(config, "num_frames") or _number(config, "frames_per_clip") or FRAMES
            yield (BATCH, channels, height, width)
            yield (BATCH, frames, channels, height, width)
            yield (BATCH, channels, frames, height, width)
        return
    widths = (
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "n_mels",
        "input_dim",
        "feature_projection_input_dim",
        "input_size",
    )
    mels = _first(config, *widths) or 80
    longest = _first(config, "max_source_positions", "max_length") or 64
    if name in ("input_values", "audio_values", "input_audio"):
        yield from ((BATCH, 6400), (BATCH, 1, 6400), (BATCH, longest, mels), (BATCH, 64, mels))
    width = _first(config, "hidden_size", "d_model", "feature_projection_input_dim") or 64
    yield from ((BATCH, mels, 2 * longest), (BATCH, 64, mels), (BATCH, mels, 64), (BATCH, 64, width), (BATCH, width))
    yield from ((BATCH, 64, other) for each in widths if (other := _number(config, each)) not in (None, mels, width))
    yield from ((BATCH, 6400), (BATCH, 1, 6400))


def _patches(config: Any, name: str, generator: torch.Generator, others: list[str]) -> Iterator[Batch]:
    """Images cut into patches beforehand, rows and columns given beside them (Qwen-VL and its like)."""
    patch = _first(config, "patch_size") or 8
    channels = _first(config, "in_channels", "num_channels", "in_chans") or 3
    sizes = {"merge_sizes": torch.tensor([1])} if "merge_sizes" in others else {}
    grids = [each for each in others if "grid" in each] or ["grid_thw", "image_grid_thw"]
    for depth in sorted({_first(config, "temporal_patch_size") or 1, 1}, reverse=True):
        for pixels in (
            torch.randn(16, channels * depth * patch * patch, generator=generator),
            torch.randn(16, channels, patch, patch, generator=generator),
        ):
            for grid in grids:
                yield {name: pixels, grid: torch.tensor([[1, 4, 4]]), **sizes}
    flat = torch.randn(BATCH, 16, channels * patch * patch, generator=generator)
    shape = torch.tensor([[4, 4]] * BATCH)
    yield {name: flat, "spatial_shapes": shape, "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}
    yield {name: flat, "attention_mask": torch.ones(BATCH, 16, dtype=torch.long), "spatial_shapes": shape}
    rows = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
    yield {name: flat, "pixel_position_ids": rows.expand(BATCH, -1, -1).contiguous()}


def _image_sizes(config: Any) -> list[tuple[int, int]]:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if isinstance(size, dict):
        size = (size.get("height", 64), size.get("width", 64))
    known = [(size, size)] if isinstance(size, int) else [tuple(size[:2])] if isinstance(size, (list, tuple)) else []
    return list(dict.fromkeys([*known, (64, 64), (224, 224)]))  # type: ignore[list-item]  # pairs of numbers


def _ids(config: Any, generator: torch.Generator) -> Tensor:
    """Ordinary tokens: none that the configuration gives a meaning."""
    words = min(_all(config, r"(?!.*type).*vocab_size$", int) or {64})
    special = _all(config, r".*(token_id|token_index|token_ids)$", int)
    plain = torch.tensor([each for each in range(min(words, 64)) if each not in special and each > 2] or [0])
    return plain[torch.randint(len(plain), (BATCH, LENGTH), generator=generator)]


def _all(config: Any, pattern: str, kind: type) -> set[Any]:
    """Every value of this kind under such a name, in sub-configurations too."""
    numbers: set[Any] = set()
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            numbers |= _all(value, pattern, kind)
        elif re.match(pattern, name):
            values = value if isinstance(value, (list, tuple)) else [value]
            numbers |= {
                number for number in values if isinstance(number, kind) and not isinstance(number, bool) and number > 0
            }
    return numbers


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := _number(config, name)) is not None), None)


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None
