"""Says what is installed beside what was tested, and checks every variant on a tiny model of every known family."""

from __future__ import annotations

import copy
import logging
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .core.kind import Kind
from .families import FAMILIES, sites
from .families.base import Family
from .layer.registry import list_variants, tiny_options
from .layer.swap import Swap
from .patch import patch_model, set_strength
from .tested import LOGGER, OLDEST_TRANSFORMERS, TESTED, TESTED_PYTHONS, is_newer
from .text.table import Table

SCALE = 8.0  # fresh weights have a deviation of 0.02, at which the residual stream hides what attention adds
FIRST_ID = 4  # smaller numbers may be special tokens
# Two ways to compute the same numbers in fp32 differ by rounding alone: by at most 3e-6 of the largest output in all
# cells on a CPU. Another device adds in another order. A token that is left out changes 3e-2 or more.
SAME = 5e-5


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is installed, and which attention is right on which family here.

    Attributes:
        packages: name, installed version, tested versions, and how the two differ, of every package.
        cells: family, variant, and the result: "right", "refused: ..." as `patch_model` says, or "WRONG: ..." .
        device: the device of the check.
        seconds: how long the check took.
    """

    packages: tuple[tuple[str, str, str, str], ...]
    cells: tuple[tuple[str, str, str], ...]
    device: str
    seconds: float

    @property
    def wrong(self) -> tuple[tuple[str, str, str], ...]:
        """The cells that are wrong."""
        return tuple(cell for cell in self.cells if cell[2].startswith("WRONG"))

    @property
    def ok(self) -> bool:
        """True if no cell is wrong and at least one is right."""
        return not self.wrong and any(result == "right" for _, _, result in self.cells)

    def tables(self) -> tuple[Table, Table]:
        """The packages, and every cell that is not right."""
        right = sum(result == "right" for _, _, result in self.cells)
        summary = f"{right} of {len(self.cells)} cells right, {len(self.wrong)} wrong; on {self.device} in fp32, "
        return (
            Table(
                summary="Installed, and tested with this release",
                header=("", "installed", "tested", ""),
                rows=list(self.packages),
            ),
            Table(
                summary=f"{summary}{self.seconds:.0f} s",
                header=("family", "variant", "result"),
                rows=[cell for cell in self.cells if cell[2] != "right"],
            ),
        )

    def __str__(self) -> str:
        return "\n\n".join(table.text() for table in self.tables())

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {"ok": self.ok, **asdict(self)}


def doctor(*, device: str | None = None) -> Diagnosis:
    """Check this installation: every variant on a tiny random model of every known family, in seconds.

    At strength 0, the model must give the stock model's outputs bit for bit. At strength 1, the form that runs must
    give what the readable form of the formula gives, and something else than the stock model (the control: the same).

    Args:
        device: the device, such as "cpu" or "cuda:1"; None means CUDA, else MPS, else the CPU.

    Raises:
        ValueError: PyTorch has no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as problem:  # torch asserts that it was built with CUDA
        raise ValueError(f"PyTorch cannot use the device {device!r} here: {str(problem).splitlines()[0]}") from None
    start, level = time.perf_counter(), LOGGER.level
    LOGGER.setLevel(logging.ERROR)  # the line that a newer transformers gives would send the user here
    try:
        cells = []
        for family in sorted(FAMILIES.values(), key=lambda family: family.name):
            try:
                stock, batch = tiny(family, device)
            except Exception as error:  # noqa: BLE001  # the result of the check, which says so
                cells += [(family.name, variant, _broken(error)) for variant in list_variants()]
                continue
            cells += [(family.name, variant, check(stock, batch, variant)) for variant in list_variants()]
    finally:
        LOGGER.setLevel(level)
    seconds = time.perf_counter() - start
    return Diagnosis(packages=packages(), cells=tuple(cells), device=device, seconds=seconds)


def check(stock: Any, batch: dict[str, Tensor], variant: str) -> str:
    """The result of one cell, in words. An error is a wrong result, and is not raised."""
    try:
        wanted = output(stock, batch)
        try:
            model = patch_model(copy.deepcopy(stock), variant, strength=0.0, **tiny_options(variant))
        except ValueError as refusal:
            return f"refused: {' '.join(str(refusal).split())}"
        if not torch.equal(output(model, batch), wanted):
            return "WRONG: at strength 0, the outputs are not the stock model's bit for bit"
        _move_parameters(set_strength(model, 1.0))
        fast, readable = output(model, batch), output(model, batch, output_attentions=True)
        if not _distance(fast, readable) <= SAME:
            return f"WRONG: the form that runs differs from the readable form by {_distance(fast, readable):.2g}"
        if (_distance(fast, wanted) <= SAME) is not (variant == "softmax"):
            return f"WRONG: at strength 1, the outputs differ from the stock model's by {_distance(fast, wanted):.2g}"
    except Exception as error:  # noqa: BLE001  # the result of the check, which says so
        return _broken(error)
    return "right"


def _broken(error: Exception) -> str:
    """An error as the result of a cell."""
    return f"WRONG: {type(error).__name__}: {' '.join(str(error).split())}"


def tiny(family: Family, device: str) -> tuple[Any, dict[str, Tensor]]:
    """The stock model of a family and its inputs, the same at every call. PyTorch's generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which sets the devices' generators too
        config = AutoConfig.for_model(family.name, **family.tiny)
        model: Any = AutoModel.from_config(config)
        kind = sites(model)[0].kind
        if kind is Kind.DECODER:
            model = AutoModelForCausalLM.from_config(config)
        matter(model)
        if kind is Kind.IMAGE:
            batch = {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
        else:
            batch = {"input_ids": torch.randint(FIRST_ID, config.vocab_size, (2, 8))}
    return model.to(device).eval(), {name: tensor.to(device) for name, tensor in batch.items()}


def matter(model: nn.Module) -> None:
    """Scale fresh weights up and draw biases, so that attention decides about the outputs. Uses PyTorch's generator."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            embedding = any(part in key.lower() for part in ("embed", "wte", "wpe", "shared"))
            if parameter.dim() >= 2 and not embedding:
                parameter.mul_(SCALE)
            elif parameter.dim() == 1 and key.endswith("bias"):
                parameter.normal_(0, 0.1)


def output(model: Any, batch: dict[str, Tensor], **words: Any) -> Tensor:
    """The logits of a language model, or the last hidden state of another model, both (B,L,...)."""
    with torch.no_grad():
        result = model(**batch, **words)
    tensor: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return tensor


def packages() -> tuple[tuple[str, str, str, str], ...]:
    """Python, and every package of `TESTED` that is installed: its version, the tested ones, and how they differ."""
    python = (TESTED_PYTHONS[0], TESTED_PYTHONS[-1])
    rows = [("python", platform.python_version(), " to ".join(python), _note(platform.python_version()[:4], *python))]
    for name, newest in TESTED.items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        oldest = OLDEST_TRANSFORMERS if name == "transformers" else None
        tested = f"{oldest} to {newest}" if oldest else newest
        rows.append((name, here, tested, _note(here, oldest, newest)))
    return tuple(rows)


def _note(here: str, oldest: str | None, newest: str) -> str:
    """Whether a version was tested, or is older or newer than those that were, in words."""
    if is_newer(here, newest):
        return "newer than tested"
    if is_newer(oldest or newest, Version(here).public):
        return "older" if oldest is None else "older than tested"
    return "as tested"


def _distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest output; NaN if an output is no number."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def _move_parameters(model: nn.Module) -> None:
    """Change a variant's own parameters: at their first values, a gate changes nothing."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for swap in (module for module in model.modules() if isinstance(module, Swap)):
            for parameter in swap.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
