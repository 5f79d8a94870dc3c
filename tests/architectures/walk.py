"""Every architecture of transformers' own registry, built tiny and held against its stock attention.

An architecture is built, fed and run once; each variant is patched on a copy. `children.py` runs the whole registry.
"""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.families import obstacle, sites
from hf_attn_swap.layer.swap import Phase, Swap
from tests.contract.harness import perturb

from .cached import Decoding, decodings
from .probe import Probe, Seen, distance, find_probes, in_double, run_and_watch, same_bits
from .shrink import LAYERS, MANY_LAYERS
from .tiny import NotBuiltError, build, configurations, one_line

# One variant of each place, and of each way to compute at this place.
VARIANTS = ("outeffhop", "clipped_softmax", "sparsemax", "belief", "belief_star", "modern_hopfield", "simpletron_resl")
OPTIONS = {"window": {"window": 2, "sinks": 1}}  # so that short inputs have hidden keys
EXACT, PART, REFUSED = "exact", "exact in part", "refused"
LATE, WRONG, NOT_BUILT = "refused late", "wrong", "not built"
TOLERANCE = 1e-5  # fp32, relative to the largest output
# A difference up to this may come from a model that makes rounding larger, as a projection on a small value does. Then
# the same tolerance is held in fp64.
ROUNDING = 1e-2
MOST_BUILT = 6
OUR_OWN = 1000  # characters: sentences of this package are not cut, so that equal ones are found to be equal


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture with one variant.

    Attributes:
        model_type: its name in the registry.
        variant: the variant's name.
        result: one of the six above; "exact in part" if some layers are exact and others are refused by name.
        sentence: of the refusal, or what is wrong.
        modules, run: attention modules swapped, and those of them that the inputs reached.
        nested: the configuration has sub-configurations.
        distance: from stock at strength 0, both with the shortcut and with the variant computed.
        ways: to decode with a cache (with padding, without) that were held against a pass without a cache.
        left_out: why other ways were not: the stock model cannot go them.
        where: the innermost lines of transformers and of this package that an exception came through.
    """

    model_type: str
    variant: str
    result: str
    sentence: str
    modules: int = 0
    run: int = 0
    nested: bool = False
    distance: float = 0.0
    ways: int = 0
    left_out: str = ""
    where: str = ""

    @property
    def may_be_rounding(self) -> bool:
        """True if two numbers differ too much, but not by more than a model can make of rounding."""
        size = re.match(r"[\d.]+e[+-]\d+", self.sentence)
        return self.result == WRONG and size is not None and float(size[0]) <= ROUNDING


@dataclass
class Stock:
    """A tiny stock model, its inputs, and what it gives for them.

    Attributes:
        model_type: its name in the registry.
        model: the model, which no variant touches.
        probes, seen: the inputs, and what the model gives; empty if nothing can be swapped.
        decodings, left_out: the ways to decode with a cache, and why others are left out.
        unfed: why no inputs were found, or "".
    """

    model_type: str
    model: PreTrainedModel
    probes: list[Probe] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    decodings: list[Decoding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unfed: str = ""


def hold(model_type: str, variant: str = "belief") -> Outcome:
    """Build, patch, compare and unpatch one architecture, at the first size at which that can be done."""
    try:
        stock = find(model_type)
    except NotBuiltError as problem:
        return Outcome(model_type, variant, NOT_BUILT, str(problem))
    return compare(stock, variant)


def find(model_type: str) -> Stock:
    """The stock model at the first size at which it can be built and fed.

    An architecture in which nothing goes through the interface is built once more with many layers: attention may
    come first in the eighth.

    Raises:
        NotBuiltError: with the first reason that transformers gave.
    """
    reasons: list[str] = []
    stock = None
    with _stock_warnings():
        for layers in (LAYERS, MANY_LAYERS):
            stock = _first_that_runs(model_type, layers, reasons) or stock
            if stock is None or any(True for _ in sites(stock.model)):
                break
    if stock is None:
        raise NotBuiltError(reasons[0])
    return stock


def _first_that_runs(model_type: str, layers: int, reasons: list[str]) -> Stock | None:
    """The first size that runs, or else the first that was built."""
    unfed = None
    for config in configurations(model_type, layers, reasons):
        try:
            stock = Stock(model_type, build(config))
        except NotBuiltError as problem:
            reasons.append(str(problem))
            if "ImportError" in reasons[-1]:
                break
            continue
        try:
            _feed(stock)
        except NotBuiltError as problem:
            reasons.append(str(problem))
            unfed = unfed or stock
            unfed.unfed = unfed.unfed or str(problem)
            if sum("no inputs" in reason for reason in reasons) >= MOST_BUILT:
                break
            continue
        return stock
    return unfed


def _feed(stock: Stock) -> None:
    """Find inputs for what can be swapped, and note what the stock model gives for them.

    Raises:
        NotBuiltError: there are no inputs, or the numbers are others when the model is called again.
    """
    usable = {site.path for site in sites(stock.model) if site.usable}
    if not usable or obstacle(stock.model, sites(stock.model)) is not None:
        return
    _note(stock, find_probes(stock.model, usable))


def _note(stock: Stock, probes: list[Probe]) -> None:
    """Note what the stock model gives for these inputs.

    Raises:
        NotBuiltError: the numbers are others when the model is called again.
    """
    stock.seen = [run_and_watch(stock.model, probe) for probe in probes]
    again = [run_and_watch(stock.model, probe) for probe in probes]
    if not all(same_bits(one.outside, two.outside) for one, two in zip(stock.seen, again, strict=True)):
        raise NotBuiltError("the stock model gives other numbers when it is called again")
    stock.probes = probes
    stock.decodings, stock.left_out = decodings(stock.model, probes, TOLERANCE)


def compare(stock: Stock, variant: str) -> Outcome:
    """Patch a copy of this stock model, compare and unpatch it.

    Some models make a rounding error of attention a hundred times larger. Where numbers differ by as little as that,
    both are compared once more in fp64, with the same tolerance.
    """
    outcome = _compare(stock, variant)
    if outcome.may_be_rounding:
        with _default_dtype(torch.float64):  # for what a model's own code makes
            if (wide := _in_double(stock)) is not None:
                return _compare(wide, variant)
    return outcome


def _in_double(stock: Stock) -> Stock | None:
    """The stock model in fp64 with the same inputs; None if its own code computes in fp32."""
    wide = Stock(stock.model_type, copy.deepcopy(stock.model).double())
    probes = [replace(probe, batch=in_double(probe.batch)) for probe in stock.probes]
    try:
        with _stock_warnings():
            _note(wide, probes)
    except Exception:  # noqa: BLE001  # whatever it is, fp64 shows nothing here
        return None
    return wide


def _compare(stock: Stock, variant: str) -> Outcome:
    with _stock_warnings():
        patched = copy.deepcopy(stock.model)
        refusal = _patch(patched, variant)
        perturb(patched)  # a gate starts as no gate
        swapped = {path for path, module in patched.named_modules() if _is_swapped(module)}
        reached = [bool(swapped.intersection(probe.reached)) for probe in stock.probes]

        def outcome(result: str, sentence: str, off: float = 0.0, where: str = "") -> Outcome:
            nested = bool(getattr(stock.model.config, "sub_configs", None))
            ran = len(swapped.intersection(path for probe in stock.probes for path in probe.reached))
            return Outcome(
                model_type=stock.model_type,
                variant=variant,
                result=result,
                sentence=sentence,
                modules=len(swapped),
                run=ran,
                nested=nested,
                distance=off,
                ways=len(stock.decodings),
                left_out="; ".join(stock.left_out),
                where=where,
            )

        if not swapped:
            return outcome(REFUSED, str(refusal))
        if not any(reached):
            return outcome(NOT_BUILT, stock.unfed or "no inputs found: no module was reached")
        try:
            problem, off = _difference(stock, patched, variant, reached)
        except ValueError as late:
            return outcome(LATE, one_line(late, OUR_OWN), where=_where(late))
        except Exception as failure:  # noqa: BLE001  # whatever it is, it is what the table says of this architecture
            return outcome(WRONG, f"raises {type(failure).__name__}: {one_line(failure)}", where=_where(failure))
        if problem is not None:
            return outcome(WRONG, problem, off)
        return outcome(EXACT if refusal is None else PART, refusal or "", off)


def _difference(stock: Stock, patched: nn.Module, variant: str, reached: list[bool]) -> tuple[str | None, float]:
    """What is wrong with the patched model, or None; and its distance from stock at strength 0."""
    probes = [probe for probe, ran in zip(stock.probes, reached, strict=True) if ran]
    wanted = [seen for seen, ran in zip(stock.seen, reached, strict=True) if ran]

    def seen() -> list[Seen]:
        return [run_and_watch(patched, probe) for probe in probes]

    exact = _furthest(seen(), wanted)
    for swap in (module for module in patched.modules() if isinstance(module, Swap)):
        swap.phase = Phase.BETWEEN  # compute the variant at s = 0: without this the stock function would run
    off = max(exact, _furthest(seen(), wanted))
    if not off <= TOLERANCE:
        return f"{off:.1e} from stock at strength 0", off
    set_strength(patched, 1.0)
    moved = seen()
    if not all(torch.isfinite(tensor).all() for each in moved for tensor in each.outside):
        return "strength 1 gives numbers that are not finite", off
    for one, two in zip(moved, wanted, strict=True):
        still = max(distance(one.outside, two.outside), distance(one.inside, two.inside)) <= TOLERANCE
        if variant != "softmax" and still:
            return "strength 1 changes nothing", off
    for decoding in stock.decodings:
        try:
            apart = decoding.distance(patched)
        except Exception as failure:
            failure.args = (f"with a cache{decoding.words}: {failure}",)
            raise
        if not apart <= TOLERANCE:
            return f"{apart:.1e} between cached and uncached{decoding.words}", off
    unpatch_model(patched)
    if not all(same_bits(one.outside, two.outside) for one, two in zip(seen(), wanted, strict=True)):
        return "not the stock model after unpatching", off
    return None, off


def _furthest(got: list[Seen], wanted: list[Seen]) -> float:
    return max(distance(one.outside, two.outside) for one, two in zip(got, wanted, strict=True))


def _patch(model: PreTrainedModel, variant: str) -> str | None:
    """Patch all layers, or else each layer that lets itself be patched; the sentence of the first refusal, or None."""
    options: dict[str, Any] = OPTIONS.get(variant, {})
    try:
        patch_model(model, variant, strength=0.0, **options)
    except ValueError as first:
        sentence = one_line(first, OUR_OWN)
    else:
        return None
    for layer in range(sum(site.usable for site in sites(model))):
        with contextlib.suppress(ValueError):  # the same refusal as the first, for another layer
            patch_model(model, variant, strength=0.0, layers=[layer], **options)
    return sentence


def _is_swapped(module: nn.Module) -> bool:
    return any(isinstance(child, Swap) for child in module.children())


@contextlib.contextmanager
def _stock_warnings() -> Iterator[None]:
    """Let stock models warn about their own configurations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of this dtype where no dtype is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _where(problem: BaseException) -> str:
    """The innermost line of transformers and of this package, inside first."""
    found: dict[str, str] = {}
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        for package in ("transformers", "hf_attn_swap"):
            _, inside, path = frame.filename.rpartition(f"/{package}/")
            if inside:
                found.setdefault(package, f"{package}/{path}:{frame.lineno} {frame.name}")
    return "; ".join(found.values())
