"""Says how much memory a conversion will need, before the model is loaded: `convert --dry-run`.

The same command runs on two models of the same kind with random weights, one of `DEPTHS[0]` and one of `DEPTHS[1]`
layers, each in a process of its own, for a few training steps. Memory grows by the same amount with each layer, so two
peaks give the peak of the whole model.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_attn_swap.text.table import Table

DEPTHS = (2, 4)
STEPS = 2  # of the training: the optimizer has its states after the first one
HOST = "memory of the process"
GIGA = 1e9
# What random weights cannot have, what takes time alone, and what is of the whole model or of its result.
NOT_THERE: Mapping[str, Any] = {
    "max_loss": None,
    "min_recall": None,
    "layers": "auto",
    "absorb": False,
    "revision": None,
    "base_model": None,
    "push": None,
    "keep_anyway": True,
    "overwrite": True,
    "quiet": True,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory of a conversion.

    Attributes:
        model: the class of the model.
        layers: its number of layers.
        weights: its number of weights.
        size: their size in bytes.
        peaks: by the number of layers, the largest memory in bytes of the process, and of each GPU.
    """

    model: str
    layers: int
    weights: int
    size: int
    peaks: Mapping[int, Mapping[str, int]]

    def needed(self, where: str) -> int:
        """The largest memory of the whole model in bytes: on the line through two peaks, or the only one."""
        points = [(layers, peaks[where]) for layers, peaks in self.peaks.items()]
        (first, low), (last, high) = points[0], points[-1]
        return high if first == last else round(high + (high - low) * (self.layers - last) / (last - first))

    def table(self) -> Table:
        """A row per place, a column per number of layers."""
        from hf_attn_swap.text.table import Table

        header = ["GB", *(f"{layers} layers" for layers in self.peaks), f"all {self.layers}", "this machine has"]
        rows = [
            [where, *(_giga(peaks[where]) for peaks in self.peaks.values()), _giga(self.needed(where)), _giga(has)]
            for where, has in room(self.peaks[max(self.peaks)]).items()
        ]
        words = f"{self.model}: {self.weights / 1e6:,.1f} million weights, {_giga(self.size)} GB."
        return Table(summary=f"{words} The largest memory of a conversion of all layers:", header=header, rows=rows)


def dry_run(given: Mapping[str, Any]) -> Plan:
    """Measure what a command needs on models of a few layers.

    Args:
        given: the parameters of the command `convert` or `quantize`.

    Raises:
        ValueError: several processes were started, the number of layers does not stand in the config, or the command
            fails on the small models.
    """
    from hf_attn_swap.publish.checkpoint import skeleton
    from hf_attn_swap.text.typed import parse_count

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("start --dry-run in one process: each process of a conversion needs as much memory as one.")
    whole = skeleton(given["model"], given["task"], revision=given["revision"], token=given["token"])
    layers = getattr(whole.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int) or whole.config.is_encoder_decoder:
        raise ValueError(
            f"--dry-run measures models with fewer layers, and the config of {type(whole).__name__} does not say their "
            "number in num_hidden_layers; try the command itself with --low-memory."
        )
    few = {**given, "tokens": str(min(parse_count(given["tokens"]), _tokens(whole, given)))}
    peaks = {}
    for depth in sorted({min(depth, layers) for depth in DEPTHS}):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # each with a peak of its own
            peaks[depth] = process.submit(_peaks, few, depth).result()
    return Plan(
        model=type(whole).__name__,
        layers=layers,
        weights=whole.num_parameters(),
        size=sum(each.numel() * _bytes(given["dtype"], whole, each) for each in whole.parameters()),
        peaks=peaks,
    )


def room(places: Mapping[str, int]) -> dict[str, int]:
    """The memory in bytes of this machine, and of its GPUs."""
    import torch

    found = {HOST: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    return found | {where: torch.cuda.get_device_properties(where).total_memory for where in places if where != HOST}


def _peaks(given: dict[str, Any], depth: int) -> dict[str, int]:
    """Run the command on a model of so many layers with random weights. Called in a process of its own."""
    import torch

    from hf_attn_swap.text.bar import hidden

    from .app import quieten
    from .conversions import run_conversion

    quieten(bars=False)
    with hidden(), tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        model = Path(place) / "model"
        _save_shallow(given, depth, model)
        tokenizer = given["tokenizer"] or given["model"]
        own = {"model": str(model), "tokenizer": tokenizer, "out": Path(place) / "out"}
        run_conversion(**{**given, **NOT_THERE, **own})
        found = {HOST: _peak_of_process()}
    for number in range(torch.cuda.device_count()):
        if reserved := torch.cuda.max_memory_reserved(number):
            found[f"cuda:{number}"] = reserved
    return found


def _save_shallow(given: Mapping[str, Any], depth: int, folder: Path) -> None:
    """Save a model as the given one with so many layers and random weights."""
    from hf_attn_swap.publish.checkpoint import hub_arguments, model_class, read_config

    config = read_config(given["model"], **hub_arguments(given["revision"], given["token"]))
    auto = model_class(config, given["task"])
    text = config.get_text_config()
    text.num_hidden_layers = depth
    if isinstance(kinds := getattr(text, "layer_types", None), list):
        text.layer_types = kinds[:depth]
    make = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    make(config, dtype=config.dtype).save_pretrained(folder)


def _tokens(whole: Any, given: Mapping[str, Any]) -> int:
    """The tokens of a few training steps: memory does not grow with the budget."""
    from hf_attn_swap.conversion.config import default_distil
    from hf_attn_swap.conversion.run import FEW_TOKENS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the command itself warns
        stage = default_distil(whole, given["variant"] or "softmax", low_memory=given.get("low_memory", False))
        rows = stage.batch or 1
    return STEPS * max(FEW_TOKENS, rows * int(given["length"]))


def _bytes(dtype: str, model: Any, parameter: Any) -> int:
    """The bytes of a number of this parameter when the model is loaded."""
    import torch

    if not parameter.is_floating_point():
        return int(parameter.element_size())
    named = model.config.dtype if dtype == "auto" else getattr(torch, dtype)
    return int((named or torch.float32).itemsize)


def _peak_of_process() -> int:
    """The largest memory of this process so far, in bytes.

    Raises:
        ValueError: the system does not say it.
    """
    try:
        import resource
    except ModuleNotFoundError as problem:
        raise ValueError("--dry-run needs a Unix system, which says how much memory a process had.") from problem
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _giga(size: int) -> str:
    return f"{size / GIGA:.2f}"
