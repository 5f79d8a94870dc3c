"""Every architecture of transformers' own registry, built tiny and held against its stock attention.

`python -m tests.architectures.walk --variant belief bert llama` prints one line of JSON for each. `walked` runs the
whole registry in child processes, so that one architecture that dies or hangs takes no other with it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import math
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.core.swap import Phase, Swap
from hf_attn_swap.families import sites

from .feed import Batch, guesses
from .shrink import CHOICES, LAYERS, MANY_LAYERS, Choice, shrunk

EXACT, PART, REFUSED = "exact", "exact in part", "refused"
LATE, WRONG, NOT_BUILT = "refused late", "wrong", "not built"
TOLERANCE = 1e-5  # fp32, relative to the largest output
MOST_PARAMETERS, MOST_BUILT, SECONDS, CHUNK = 150_000_000, 6, 60, 60


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        model_type: its name in the registry.
        result: one of the six above; "exact in part" if some layers are exact and others are refused by name.
        sentence: of the refusal, or what is wrong.
        modules, run: attention modules swapped, and those of them that the inputs reached.
        nested: the configuration has sub-configurations.
        distance: from stock at strength 0, both with the shortcut and with the variant computed.
    """

    model_type: str
    result: str
    sentence: str
    modules: int = 0
    run: int = 0
    nested: bool = False
    distance: float = 0.0


class NotBuiltError(Exception):
    """This architecture cannot be made tiny, or what it needs as input is not known."""


def registry() -> list[str]:
    """Every model type that `AutoModel` can build."""
    return sorted(name for name in CONFIG_MAPPING.keys() if CONFIG_MAPPING[name] in MODEL_MAPPING)  # noqa: SIM118  # its own mapping: iterating it loads nothing else


def hold(model_type: str, variant: str = "belief") -> Outcome:
    """Build, patch, compare and unpatch one architecture, at the first size at which that can be done.

    An architecture in which nothing goes through the interface is built once more with many layers: attention may
    come first in the eighth.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stock models, about their own configurations
        return _first_that_can_be_held(model_type, variant)


def _first_that_can_be_held(model_type: str, variant: str) -> Outcome:
    reasons: list[str] = []
    outcome = None
    for layers in (LAYERS, MANY_LAYERS):
        for config in _configurations(model_type, layers, reasons):
            try:
                outcome = _hold(build(config), model_type, variant)
            except NotBuiltError as problem:
                reasons.append(str(problem))
                if "ImportError" in reasons[-1] or sum("no inputs" in reason for reason in reasons) == MOST_BUILT:
                    break
                continue
            break
        if outcome is None or not (outcome.result == REFUSED and "no attention module goes" in outcome.sentence):
            break
    return outcome or Outcome(model_type, NOT_BUILT, reasons[0])


def _configurations(model_type: str, layers: int, reasons: list[str]) -> Iterator[PreTrainedConfig]:
    """Every small configuration that its class allows, each once; the others leave their reason."""
    seen: set[str] = set()
    for choice in CHOICES:
        try:
            config = configured(model_type, choice, layers)
        except NotBuiltError as problem:
            reasons.append(str(problem))
            continue
        if (words := config.to_json_string()) not in seen:
            seen.add(words)
            yield config


def _hold(model: PreTrainedModel, model_type: str, variant: str) -> Outcome:
    nested = bool(getattr(model.config, "sub_configs", None))
    patched = copy.deepcopy(model)
    refusal = _patch(patched, variant)
    modules = sum(isinstance(module, Swap) for module in patched.modules())
    if modules == 0:
        return Outcome(model_type, REFUSED, str(refusal), nested=nested)
    probes = find_probes(model, {name for name, module in patched.named_modules() if _is_swapped(module)})
    stock = [run(model, probe) for probe in probes]
    stock_inner = [run_inside(model, probe) for probe in probes]
    _steady(model, probes, stock)
    reached = sum(len(probe.reached) for probe in probes)

    def outcome(result: str, sentence: str, off: float = 0.0) -> Outcome:
        return Outcome(model_type, result, sentence, modules, reached, nested, off)

    try:
        exact = _furthest(patched, probes, stock)
        for swap in (module for module in patched.modules() if isinstance(module, Swap)):
            swap.phase = Phase.BETWEEN  # compute the variant at s = 0: without this the stock function would run
        computed = _furthest(patched, probes, stock)
        set_strength(patched, 1.0)
        moved = [run(patched, probe) for probe in probes]
        inner = [run_inside(patched, probe) for probe in probes]
        unpatch_model(patched)
        after = [run(patched, probe) for probe in probes]
    except ValueError as late:
        return outcome(LATE, _line(late))
    except Exception as failure:  # noqa: BLE001  # whatever it is, it is what the table says of this architecture
        return outcome(WRONG, f"raises {type(failure).__name__}: {_line(failure)}")
    off = max(exact, computed)
    if not off <= TOLERANCE:
        return outcome(WRONG, f"{off:.1e} from stock at strength 0", off)
    if not all(torch.isfinite(tensor).all() for tensors in moved for tensor in tensors):
        return outcome(WRONG, "strength 1 gives numbers that are not finite", off)
    still = [distance(one, two) <= TOLERANCE for one, two in zip(moved, stock, strict=True)]
    same = [distance(one, two) <= TOLERANCE for one, two in zip(inner, stock_inner, strict=True)]
    if variant != "softmax" and any(outside and inside for outside, inside in zip(still, same, strict=True)):
        return outcome(WRONG, "strength 1 changes nothing", off)
    if any(not torch.equal(a, b) for one, two in zip(after, stock, strict=True) for a, b in zip(one, two, strict=True)):
        return outcome(WRONG, "not the stock model after unpatching", off)
    return outcome(EXACT if refusal is None else PART, refusal or "", off)


def _patch(model: PreTrainedModel, variant: str) -> str | None:
    """Patch all layers, or else each layer that lets itself be patched; the sentence of the first refusal, or None."""
    try:
        patch_model(model, variant, strength=0.0)
    except ValueError as first:
        sentence = _line(first)
    else:
        return None
    for layer in range(sum(site.usable for site in sites(model))):
        with contextlib.suppress(ValueError):  # the same refusal as the first, for another layer
            patch_model(model, variant, strength=0.0, layers=[layer])
    return sentence


def _is_swapped(module: nn.Module) -> bool:
    return any(isinstance(child, Swap) for child in module.children())


def configured(model_type: str, choice: Choice, layers: int = LAYERS) -> PreTrainedConfig:
    """A small configuration.

    Raises:
        NotBuiltError: with the reason that transformers gave.
    """
    try:
        return shrunk(CONFIG_MAPPING[model_type], choice, layers)
    except Exception as failure:  # the reason becomes the table's sentence
        raise NotBuiltError(f"{type(failure).__name__}: {_line(failure)}") from failure


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A tiny model with random weights of a size that lets attention be seen.

    Raises:
        NotBuiltError: with the reason that transformers gave.
    """
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModel.from_config(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                raise NotBuiltError(f"{size / 1e6:.0f} million parameters after shrinking")
            model = AutoModel.from_config(config).float().eval()
            _weigh(model)
    except NotBuiltError:
        raise
    except Exception as failure:  # the reason becomes the table's sentence
        raise NotBuiltError(f"{type(failure).__name__}: {_line(failure)}") from failure
    return model


def _weigh(model: nn.Module) -> None:
    """Fresh weights of deviation 0.02 hide attention behind the residual stream, and zeros hide it wholly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            embedding = "embed" in name.lower() and "proj" not in name.lower()
            if not torch.isfinite(parameter).all() or parameter.abs().max() < 1e-3:
                parameter.normal_(0, 0.1 if parameter.dim() < 2 or embedding else 1 / math.sqrt(parameter[0].numel()))
            elif parameter.dim() == 2 and not embedding:
                parameter.mul_(1 / math.sqrt(parameter.shape[1]) / parameter.std().clamp_min(1e-6))


@dataclass
class Probe:
    """One call: of the whole model (path "") or of a part that the whole model's inputs do not reach."""

    path: str
    batch: Batch
    reached: list[str]


def find_probes(model: PreTrainedModel, wanted: set[str]) -> list[Probe]:
    """Calls that reach as many of these modules as we find inputs for.

    Raises:
        NotBuiltError: none could be made, or none reaches any of them.
    """
    missing, probes, reasons = set(wanted), [], []
    parts = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for path, part in parts.items():
        inside = {each for each in missing if not path or each.startswith(f"{path}.")}
        if not inside:
            continue
        batch, reached, reason = _feed(part, path, inside)
        reasons.append(reason)
        if batch is not None and reached:
            probes.append(Probe(path, batch, sorted(reached)))
            missing -= reached
    if not probes:
        raise NotBuiltError(f"no inputs found: {next((each for each in reasons if each), 'no module was reached')}")
    return probes


def _feed(part: PreTrainedModel, path: str, wanted: set[str]) -> tuple[Batch | None, set[str], str]:
    """The first guess that runs and reaches any wanted module, what it reaches, and why the first guess failed."""
    reached: set[str] = set()
    handles = [
        part.get_submodule(name.removeprefix(f"{path}.") if path else name).register_forward_hook(
            lambda module, args, output, name=name: reached.add(name)
        )
        for name in wanted
    ]
    reasons: list[str] = []
    try:
        for batch in guesses(part):
            reached.clear()
            try:
                if any(not torch.isfinite(each).all() for each in _call(part, batch)):
                    reasons.append("the stock model's numbers are not finite")
                    continue
            except Exception as failure:  # noqa: BLE001  # the next guess; the reason is kept
                reasons.append(f"{type(failure).__name__}: {_line(failure)}")
                continue
            if reached:
                return batch, set(reached), ""
    finally:
        for handle in handles:
            handle.remove()
    return None, set(), reasons[0] if reasons else ""


def run(model: nn.Module, probe: Probe) -> list[Tensor]:
    """The tensors that this call gives, at real positions."""
    return _call(model.get_submodule(probe.path), probe.batch)


def run_inside(model: nn.Module, probe: Probe) -> list[Tensor]:
    """What the attention modules themselves give: a model that rounds to codes may hide a change."""
    found: list[Tensor] = []
    handles = [
        model.get_submodule(path).register_forward_hook(lambda module, args, output: found.extend(_tensors(output)))
        for path in probe.reached
    ]
    try:
        run(model, probe)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _call(model: nn.Module, batch: Batch) -> list[Tensor]:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
        found = list(_tensors(model(**given)))
    mask = batch.get("attention_mask")
    return [tensor[mask.bool()] if mask is not None and tensor.shape[:2] == mask.shape else tensor for tensor in found]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of any output, relative to that output's largest entry."""
    if [each.shape for each in got] != [each.shape for each in wanted]:
        return math.inf
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if b.numel()]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs), default=0.0)


def _furthest(model: nn.Module, probes: list[Probe], stock: list[list[Tensor]]) -> float:
    return max(distance(run(model, probe), wanted) for probe, wanted in zip(probes, stock, strict=True))


def _steady(model: nn.Module, probes: list[Probe], stock: list[list[Tensor]]) -> None:
    for probe, wanted in zip(probes, stock, strict=True):
        again = run(model, probe)
        if any(not torch.equal(a, b) for a, b in zip(again, wanted, strict=True)):
            raise NotBuiltError("the stock model gives other numbers when it is called again")


def _line(problem: BaseException) -> str:
    words = without_paths(" ".join(str(problem).split()))
    return words if len(words) <= 300 else words[:297] + "..."


def without_paths(sentence: str) -> str:
    """The sentence without the files that Python names with modules: they differ from machine to machine."""
    return re.sub(r" from '/[^']*('|$)", "", sentence)


class TimeLimitError(BaseException):
    """One architecture took too long."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Stop what runs inside after this many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def walked(variant: str = "belief", names: list[str] | None = None) -> list[Outcome]:
    """All architectures of the registry, or these, in child processes."""
    left = registry() if names is None else list(names)
    found: dict[str, Outcome] = {}
    while left:
        chunk, left = left[:CHUNK], left[CHUNK:]
        command = [sys.executable, "-m", "tests.architectures.walk", "--variant", variant, *chunk]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in child.stdout.splitlines():
            if line.startswith('{"model_type"'):
                outcome = Outcome(**json.loads(line))
                found[outcome.model_type] = outcome
        if missing := [name for name in chunk if name not in found]:  # the process died at the first of them
            found[missing[0]] = Outcome(missing[0], NOT_BUILT, f"the process ended with {child.returncode}")
            left = [*missing[1:], *left]
    return [found[name] for name in sorted(found)]


def main() -> None:
    """Print an outcome per architecture that is named, all of them if none is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--variant", default="belief")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in arguments.names or registry():
        try:
            with time_limit(SECONDS):
                outcome = hold(name, arguments.variant)
        except TimeLimitError:
            outcome = Outcome(name, NOT_BUILT, f"took longer than {SECONDS} seconds")
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
