"""Decodes with a cache, token by token, and without one: both must give the same.

The cache is found in the output by its type, and the forward's argument for it by its annotation: its name has changed
between versions of transformers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .feed import LENGTH, PADDING, Batch
from .probe import Probe, distance, tensors
from .tiny import one_line

PREFILL = 5  # tokens of the first pass; the rest follow one by one
TEXT = {"input_ids", "decoder_input_ids", "attention_mask"}


@dataclass(frozen=True)
class Decoding:
    """One way to decode that the stock model can go.

    Attributes:
        path: of the part that is called.
        batch: its arguments, all tokens at once.
        words: what is special about it, for a sentence.
    """

    path: str
    batch: Batch
    words: str

    @property
    def stepped(self) -> str:
        """The argument whose tokens are given one by one."""
        return "decoder_input_ids" if "decoder_input_ids" in self.batch else "input_ids"

    def distance(self, model: nn.Module) -> float:
        """Between the numbers with a cache and without, at real positions."""
        part = model.get_submodule(self.path)
        whole, by_steps = self._whole(part), self._by_steps(part)
        mask = self.batch.get("attention_mask")
        if self.stepped == "input_ids" and mask is not None and whole.shape[:2] == mask.shape == by_steps.shape[:2]:
            whole, by_steps = whole[mask.bool()], by_steps[mask.bool()]
        return distance([by_steps], [whole])

    def _whole(self, part: nn.Module) -> Tensor:
        with torch.no_grad():
            return next(tensors(part(**self.batch, use_cache=False)))

    def _by_steps(self, part: nn.Module) -> Tensor:
        name, cache, found = cache_argument(part), None, []
        bounds = [0, *range(PREFILL, LENGTH + 1)]
        for start, stop in itertools.pairwise(bounds):
            given = dict(self.batch)
            given[self.stepped] = self.batch[self.stepped][:, start:stop]
            if self.stepped == "input_ids" and "attention_mask" in given:
                given["attention_mask"] = given["attention_mask"][:, :stop]
            if cache is not None:
                assert name is not None
                given[name] = cache
            with torch.no_grad():
                output = part(**given, use_cache=True)
            cache = cache_in(output)
            found.append(next(tensors(output)))
        return torch.cat(found, 1)


def decodings(model: nn.Module, probes: list[Probe], tolerance: float) -> tuple[list[Decoding], list[str]]:
    """The ways to decode that the stock model can go, and why others are left out.

    A model whose own rounding comes near the tolerance would be called wrong by chance.
    """
    kept, left_out = [], []
    for each in _possible(model, probes):
        try:
            off = each.distance(model)
        except Exception as failure:  # noqa: BLE001  # the stock model cannot be decoded so, whatever the reason
            left_out.append(f"stock{each.words} raises {type(failure).__name__}: {one_line(failure)}")
            continue
        if off <= tolerance / 10:
            kept.append(each)
        else:
            left_out.append(f"stock{each.words}: {off:.1e} between cached and uncached")
    return kept, left_out


def _possible(model: nn.Module, probes: list[Probe]) -> Iterator[Decoding]:
    for probe in probes:
        part, ids = model.get_submodule(probe.path), probe.batch.get("input_ids")
        text = set(probe.batch) <= TEXT and isinstance(ids, Tensor) and tuple(ids.shape[1:]) == (LENGTH,)
        if not text or cache_argument(part) is None or not _gives_cache(part, probe.batch):
            continue
        plain = {name: value for name, value in probe.batch.items() if name != "attention_mask"}
        yield Decoding(probe.path, plain, "")
        if "attention_mask" in probe.batch and "decoder_input_ids" not in probe.batch:
            mask = torch.ones(ids.shape[:2], dtype=torch.long)  # type: ignore[union-attr]  # a tensor, see above
            mask[0, :PADDING] = 0
            yield Decoding(probe.path, {**plain, "attention_mask": mask}, " with left padding")


def cache_argument(part: nn.Module) -> str | None:
    """The name of the argument that takes a cache, if the forward takes `use_cache` too; or None."""
    parameters = inspect.signature(type(part).forward).parameters
    if "use_cache" not in parameters and all(each.kind != each.VAR_KEYWORD for each in parameters.values()):
        return None
    return next((name for name, each in parameters.items() if "Cache" in str(each.annotation)), None)


def cache_in(output: Any) -> Cache | None:
    """The cache among the values of an output."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((value for value in values if isinstance(value, Cache)), None)


def _gives_cache(part: nn.Module, batch: Batch) -> bool:
    try:
        with torch.no_grad():
            return cache_in(part(**batch, use_cache=True)) is not None
    except Exception:  # noqa: BLE001  # a model that cannot be asked for a cache has none
        return False
