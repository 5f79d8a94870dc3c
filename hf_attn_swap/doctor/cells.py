"""The checks of one cell: one variant on the tiny model of one family.

Each check states what would be wrong, and can fail: the weights are such that attention decides about the outputs, the
parameters of a variant are moved from their neutral start, and at strength 1 the outputs must differ from the stock
model's and depend on other tokens.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..core.kind import Kind
from ..layer.registry import parse, tiny_options
from ..layer.swap import Swap
from ..patch import patch_model, set_strength, unpatch_model
from .models import Tiny, output

# Two ways to compute the same numbers in fp32 differ by rounding alone: by at most 3e-6 of the largest output in all
# cells on a CPU. Another device adds in another order. A token that is left out changes 3e-2 or more.
SAME = 5e-5
# The smallest difference that counts as one. clipped_softmax with its small clip for images changes 2e-4, and all other
# variants change 4e-2 or more.
MOVED = 1e-4
NEW = 4  # tokens of a generation
SHORT, LONG, PERIOD = 160, 320, 32  # tokens in a cache: more than a state of linear attention keeps as they are


class Wrong(Exception):  # noqa: N818  # what a check found, no error of the program
    """A check failed; the message says how."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: the name of the check, a key of `CHECKS`.
        wrong: how the result is wrong, in words; None if it is right.
    """

    name: str
    wrong: str | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant on one family.

    Attributes:
        family: the model type.
        variant: the name of the variant.
        refused: why `patch_model` refused the model, in its own words; None if the model was patched.
        checks: the results; empty if the model was refused.
    """

    family: str
    variant: str
    refused: str | None
    checks: tuple[Check, ...]

    @property
    def wrong(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.wrong is not None)

    @property
    def result(self) -> str:
        """One word: "right", "refused" or "wrong"."""
        if self.refused is not None:
            return "refused"
        return "wrong" if self.wrong else "right"

    @property
    def words(self) -> str:
        """The result as the table shows it, with the names of the checks that failed."""
        return "WRONG: " + ", ".join(check.name for check in self.wrong) if self.wrong else self.result


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What a check is given: the stock model with its inputs, and the patched model.

    Attributes:
        stock: the stock model and its inputs.
        model: the patched model, at strength 1.
        control: True if the variant is ordinary attention.
        linear: True if the variant has no scores.
    """

    stock: Tiny
    model: Any
    control: bool
    linear: bool


def check_cell(family: str, variant: str, stock: Tiny) -> Cell:
    """Run all checks that the family and the variant have. An error in a check is a wrong result, and is not raised."""
    try:
        model = patch_model(copy.deepcopy(stock.model), variant, strength=0.0, **tiny_options(variant))
    except ValueError as refusal:
        return Cell(family=family, variant=variant, refused=one_line(refusal), checks=())
    except Exception as error:  # noqa: BLE001  # the result of the check, which says so
        return broken(family, variant, error)
    _move_parameters(model)
    classes = parse(variant)
    patched = Patched(
        stock=stock,
        model=model,
        control=not any(cls.places for cls in classes),
        linear=any(cls.replaces for cls in classes),
    )
    found = [
        Check(name=name, wrong=_run(check.run, patched)) for name, check in CHECKS.items() if check.applies(patched)
    ]
    return Cell(family=family, variant=variant, refused=None, checks=tuple(found))


def broken(family: str, variant: str, error: Exception) -> Cell:
    """The cell of a model that could not be built or patched."""
    wrong = f"{type(error).__name__}: {one_line(error)}"
    return Cell(family=family, variant=variant, refused=None, checks=(Check(name="patch", wrong=wrong),))


def one_line(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())


def _run(check: Callable[[Patched], None], patched: Patched) -> str | None:
    try:
        check(patched)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:  # noqa: BLE001  # the result of the check, which says so
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def _move_parameters(model: nn.Module) -> None:
    """Change a variant's own parameters: at their first values, a gate changes nothing."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for swap in (module for module in model.modules() if isinstance(module, Swap)):
            for parameter in swap.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))


def _distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest output.

    Raises:
        Wrong: the shapes differ, or an output is no finite number.
    """
    if got.shape != wanted.shape:
        raise Wrong(f"the outputs have the shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
    if not got.isfinite().all():
        raise Wrong("an output is infinite or not a number")
    return float((got - wanted).abs().max() / wanted.abs().max())


def _need_same(got: Tensor, wanted: Tensor) -> None:
    """Raises Wrong if two results that must agree differ by more than rounding."""
    difference = _distance(got, wanted)
    if difference > SAME:
        raise Wrong(f"the outputs differ by {difference:.2g} of the largest; rounding explains {SAME:g} at most")


def _need_moved(got: Tensor, before: Tensor, reason: str) -> None:
    """Raises Wrong if two results that must differ agree."""
    difference = _distance(got, before)
    if difference < MOVED:
        raise Wrong(f"{reason} (the outputs differ by {difference:.2g} of the largest)")


def _need_bits(got: Tensor, wanted: Tensor) -> None:
    """Raises Wrong if two results are not equal bit for bit."""
    difference = _distance(got, wanted)
    if difference != 0:
        raise Wrong(f"the outputs are not equal bit for bit: they differ by {difference:.2g} of the largest")


def _need_weights(model: nn.Module, wanted: nn.Module) -> None:
    """Raises Wrong if two models do not have the same weights under the same names, bit for bit."""
    here, there = model.state_dict(), wanted.state_dict()
    if other := sorted(here.keys() ^ there.keys()):
        raise Wrong(f"the weights have other names: {', '.join(other[:3])}")
    if changed := [name for name in here if not torch.equal(here[name], there[name])]:
        raise Wrong(f"weights changed: {', '.join(changed[:3])}")


def _strength_0(patched: Patched) -> None:
    set_strength(patched.model, 0.0)
    try:
        _need_bits(output(patched.model, patched.stock.batch), patched.stock.out)
        if patched.stock.padded is not None:
            padded = patched.stock.padded
            _need_bits(output(patched.model, padded), output(patched.stock.model, padded))
    finally:
        set_strength(patched.model, 1.0)


def _strength_1(patched: Patched) -> None:
    out = output(patched.model, patched.stock.batch)
    if patched.control:
        _need_same(out, patched.stock.out)
    else:
        _need_moved(out, patched.stock.out, "the variant changes nothing at strength 1")


def _context(patched: Patched) -> None:
    last, other = (output(patched.model, each)[:, -1] for each in (patched.stock.batch, patched.stock.other))
    _need_moved(other, last, "the last token does not depend on the first one")


def _readable(patched: Patched) -> None:
    batch = patched.stock.padded or patched.stock.batch
    real = batch["attention_mask"].bool() if "attention_mask" in batch else ...
    readable = output(patched.model, batch, output_attentions=True)
    _need_same(output(patched.model, batch)[real], readable[real])


def _padded(patched: Patched) -> None:
    batch = patched.stock.padded
    assert batch is not None
    real = batch["attention_mask"][0].bool()
    alone = {"input_ids": batch["input_ids"][:1, real], "attention_mask": batch["attention_mask"][:1, real]}
    both = [output(patched.model, _with_positions(patched.model, each)) for each in (batch, alone)]
    _need_same(both[0][0, real], both[1][0])


def _with_positions(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with positions that count real tokens, as `generate` gives them to a model that takes positions."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return batch
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


def _cached(patched: Patched) -> None:
    with_cache, without = (_generated(patched, use_cache=use) for use in (True, False))
    _need_same(with_cache, without)


def _generated(patched: Patched, *, use_cache: bool) -> Tensor:
    """The logits (B,NEW,V) of new tokens after a padded prompt."""
    prompt = patched.stock.padded
    assert prompt is not None
    out = patched.model.generate(
        **prompt,
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(out.logits, 1)


def _state(patched: Patched) -> None:
    short, long = (_cache_bytes(patched.model, count) for count in (SHORT, LONG))
    if short != long:
        raise Wrong(f"the cache grows: {short:,} bytes after {SHORT} tokens, {long:,} bytes after {LONG}")


def _cache_bytes(model: Any, count: int) -> int:
    """The memory of the cache after this many tokens. The positions repeat, so that a tiny model has enough of them."""
    positions = torch.arange(count, device=model.device)[None] % PERIOD
    with torch.no_grad():
        result = model(input_ids=positions + model.config.vocab_size - PERIOD, position_ids=positions, use_cache=True)
    cache = next(value for value in result.values() if isinstance(value, Cache))
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(cache.layers)}
    return sum(storages.values())


def _tensors(thing: Any) -> Iterator[Tensor]:
    """All tensors that an object holds."""
    if isinstance(thing, Tensor):
        yield thing
        return
    parts = thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    for part in parts:
        yield from _tensors(part)


def _saved(patched: Patched) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps a mapped file open
        copy.deepcopy(patched.model).save_pretrained(folder)  # transformers writes into the config that it saves
        loaded = type(patched.model).from_pretrained(folder).to(patched.model.device).eval()
        _need_weights(loaded, patched.model)
        if loaded.config.attn_swap != patched.model.config.attn_swap:
            raise Wrong("the loaded config describes another swap")
        _need_same(output(loaded, patched.stock.batch), output(patched.model, patched.stock.batch))
        del loaded


def _unpatched(patched: Patched) -> None:
    model = unpatch_model(patched.model)
    _need_bits(output(model, patched.stock.batch), patched.stock.out)
    _need_weights(model, patched.stock.model)
    if model.config.to_dict() != patched.stock.model.config.to_dict():
        raise Wrong("the config is another one than before")


@dataclass(frozen=True)
class _Definition:
    """What a check holds, in words; the function that raises if it does not hold; and the cells that have the check."""

    words: str
    run: Callable[[Patched], None]
    applies: Callable[[Patched], bool] = lambda patched: True


def _decodes(patched: Patched) -> bool:
    return patched.stock.kind is Kind.DECODER


CHECKS = {  # in this order: the last one takes the swap out
    "strength 0": _Definition("strength 0 equals the stock model bit for bit", _strength_0),
    "strength 1": _Definition("strength 1 differs from the stock model; the control equals it", _strength_1),
    "context": _Definition("a token depends on earlier tokens", _context),
    "readable": _Definition("the fast form equals the readable form", _readable),
    "padded": _Definition(
        "a padded row equals the row alone", _padded, lambda patched: patched.stock.padded is not None
    ),
    "cached": _Definition("generation with a cache equals generation without", _cached, _decodes),
    "state": _Definition(
        "the cache of linear attention does not grow", _state, lambda patched: patched.linear and _decodes(patched)
    ),
    "saved": _Definition("a saved and loaded model equals the model", _saved),
    "unpatched": _Definition("after unpatch_model, the model is the stock model bit for bit", _unpatched),
}
