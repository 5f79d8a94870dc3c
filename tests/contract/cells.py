"""The cells of the contract, generated from the registries: no name of a variant or family is written here.

Variants come from `list_variants`, compositions from the places that the variants declare, options from their
dataclasses: a new variant is one file, and every test of this folder picks it up.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.core.kind import Kind
from hf_attn_swap.core.options import choices as literal_choices
from hf_attn_swap.families import FAMILIES
from hf_attn_swap.layer.registry import fit_options, parse, parse_options, tiny_options
from hf_attn_swap.variants.base import PLACES, VARIANTS

FAMILY_NAMES = tuple(sorted(family.name for family in FAMILIES.values()))
SINGLES = list_variants()
Cell = tuple[str, dict[str, Any]]


def composes(names: tuple[str, ...]) -> bool:
    """True if the variants may be composed (docs/mathematics.md, section Composition)."""
    classes = [VARIANTS[name] for name in names]
    places = [place for cls in classes for place in cls.places]
    return not any(cls.alone for cls in classes) and len(places) == len(set(places))


def _sets(size: int) -> list[tuple[str, ...]]:
    return [names for names in itertools.combinations(SINGLES, size) if composes(names)]


PAIRS = tuple("+".join(names) for names in _sets(2))
LARGER = tuple("+".join(names) for size in range(3, 6) for names in _sets(size))
LARGEST = tuple(name for name in LARGER if not any(set(name.split("+")) < set(other.split("+")) for other in LARGER))
COMPOSITIONS = PAIRS + LARGER
EVERY = SINGLES + PAIRS


def choices(cls: type[Any], field: str) -> tuple[str, ...]:
    """The values of an option that takes one of several names, as its type lists them; nothing for other options."""
    names: tuple[str, ...] = literal_choices(typing.get_type_hints(cls)[field])
    return names


def _accepts(cls: type[Any], values: dict[str, Any]) -> bool:
    try:
        cls(**values)
    except ValueError:
        return False
    return True


EQUAL = ("memory",)  # options that change no result, only memory and speed: tests/kernels has their tests


def option_sets(name: str) -> list[dict[str, Any]]:
    """All combinations of the options that take a name, then each number with other values, then the optional ones.

    An option of several numbers, such as those of heads, names the first.

    Numbers with equal defaults get different values beside a string that is not the default: otherwise a formula that
    reads the wrong one of them would give the same result.
    """
    cls = VARIANTS[name].Options
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    strings = [field.name for field in fields if choices(cls, field.name) and field.name not in EQUAL]
    combinations = itertools.product(*(choices(cls, field) for field in strings))
    tiny = tiny_options(name)
    sets: list[dict[str, Any]] = [tiny | dict(zip(strings, values, strict=True)) for values in combinations]
    sets = [chosen if is_default(name, chosen) else chosen | unequal(cls) for chosen in sets]
    defaults = text_options((name, tiny))
    for option, default in defaults.items():
        if isinstance(default, float):
            trials = ({option: value} for value in (0.0, default / 2, 1.1))
            sets += [trial for trial in trials if trial[option] != default and _accepts(cls, trial)]
        elif hints[option] is int:
            sets += [trial for chosen in list(sets) if _accepts(cls, trial := chosen | {option: default + 1})]
        elif typing.get_origin(hints[option]) is tuple:
            sets.append(tiny | {option: (0,)})
    optional = {option: _example(hints[option]) for option, default in defaults.items() if default is None}
    return [*sets, optional] if optional else sets


def text_options(cell: Cell) -> dict[str, Any]:
    """All options of a cell, as they are in a text encoder.

    Some options depend on the kind of the model, and those for images may be too small to show on a tiny model.
    """
    classes = parse(cell[0])
    chosen = fit_options(classes, parse_options(classes, cell[1]), Kind.ENCODER)
    return chosen if len(classes) > 1 else chosen[cell[0]]


def unequal(cls: type[Any]) -> dict[str, float]:
    """Values for all numbers of an options class whose default another number before them has, too."""
    hints = typing.get_type_hints(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls) if hints[field.name] is float}
    values: dict[str, float] = {}
    for place, (name, default) in enumerate(defaults.items()):
        before = list(defaults.values())[:place].count(default)
        if before:
            values[name] = default / 2**before
    assert _accepts(cls, values)
    return values


def _example(hint: Any) -> Any:
    assert isinstance(hint, types.UnionType)
    return {float: 0.3, int: 10}[next(part for part in typing.get_args(hint) if part is not type(None))]


def is_default(name: str, options: dict[str, Any]) -> bool:
    """True if these options are those of the cell that every variant has."""
    return VARIANTS[name].Options(**options) == VARIANTS[name].Options(**tiny_options(name))


def shown(name: str) -> Cell:
    """The cell of a variant or a composition with its defaults, or with options that a tiny text shows."""
    return name, tiny_options(name)


OPTION_CELLS: tuple[Cell, ...] = tuple((name, options) for name in SINGLES for options in option_sets(name))
EXTRA_CELLS: tuple[Cell, ...] = tuple(cell for cell in OPTION_CELLS if not is_default(*cell))
DEFAULT_CELLS: tuple[Cell, ...] = tuple(shown(name) for name in SINGLES)


def label(cell: Cell) -> str:
    """A readable test id."""
    name, options = cell
    return name + "".join(f"-{key}={value}" for key, value in options.items())


def swap_in(model: Any, variant: str, **arguments: Any) -> Any:
    """`patch_model`, with the one sentence of advice that options may bring left out (it has its own test)."""
    with warnings.catch_warnings():
        for sentence in filter(None, (advice(name, arguments) for name in variant.split("+"))):
            warnings.filterwarnings("ignore", message=re.escape(sentence))
        return patch_model(model, variant, **arguments)


def advice(name: str, arguments: dict[str, Any]) -> str | None:
    """What the variant warns of with these options."""
    cls = VARIANTS[name]
    known = {field.name for field in dataclasses.fields(cls.Options)}
    alone = {k: v for k, v in arguments.items() if k in known}
    given = arguments[name] if isinstance(arguments.get(name), dict) else alone
    probe = cls.__new__(cls)
    object.__setattr__(probe, "__dict__", {"options": cls.Options(**given)})
    return cls.warn(probe)


def is_linear(variant: str) -> bool:
    """True if the variant has no scores: SimpleTRON."""
    return any(cls.replaces for cls in parse(variant))


LINEAR = [name for name in SINGLES if is_linear(name)]
# Two families that differ most: a post-LayerNorm encoder whose W_o sits outside the core, and a pre-LayerNorm decoder
# with rotary embedding and grouped heads. The other families meet a few cells that together change every place.
DEEP = ("bert", "llama")
REST = tuple(name for name in FAMILY_NAMES if name not in DEEP)


def _covering() -> tuple[str, ...]:
    """A variant that reads, a composition that changes every other place, and the last variant without scores."""
    reading = next(name for name in SINGLES if VARIANTS[name].places == ("read",))
    places = {name: {place for cls in parse(name) for place in cls.places} for name in LARGEST}
    return reading, next(name for name in LARGEST if places[name] >= {*PLACES} - {"read"}), LINEAR[-1]


def _composed() -> Iterator[str]:
    """A pair for each two sets of places: by turns the first and the last pair that changes them."""
    by_places: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for pair in PAIRS:
        by_places.setdefault(frozenset(cls.places for cls in parse(pair)), []).append(pair)
    yield from (pairs[-(number % 2)] for number, pairs in enumerate(by_places.values()))


FamilyCell = tuple[str, Cell]
COVERING: tuple[Cell, ...] = tuple(shown(name) for name in _covering())
WIDE: tuple[FamilyCell, ...] = tuple(
    (family, cell) for family in FAMILY_NAMES for cell in (DEFAULT_CELLS if family in DEEP else COVERING)
)
# The same where only the wiring differs between families: each variant meets one of the two, by turns.
ONCE: tuple[FamilyCell, ...] = tuple((DEEP[place % 2], cell) for place, cell in enumerate(DEFAULT_CELLS)) + tuple(
    (family, cell) for family in REST for cell in COVERING
)
COMPOSED: tuple[FamilyCell, ...] = tuple((DEEP[place % 2], shown(name)) for place, name in enumerate(_composed()))
OPTIONS: tuple[FamilyCell, ...] = tuple((DEEP[place % 2], cell) for place, cell in enumerate(EXTRA_CELLS))


def over(cells: tuple[FamilyCell, ...], families: tuple[str, ...] = FAMILY_NAMES) -> Any:
    """Parametrise a test over the cells of these families."""
    chosen = [(family, cell) for family, cell in cells if family in families]
    rows = [pytest.param(family, cell, id=f"{family}-{label(cell)}") for family, cell in chosen]
    return pytest.mark.parametrize(("family", "cell"), rows)


def over_in_turn(
    cells: tuple[FamilyCell, ...],
    names: str | tuple[str, ...],
    settings: Sequence[Any],
    families: tuple[str, ...] = FAMILY_NAMES,
) -> Any:
    """Parametrise a test over the cells of these families; the settings take turns.

    The settings are the values of the arguments `names`. A variant meets other settings in the next family of `DEEP`.
    """
    names = (names,) if isinstance(names, str) else names
    rows, places = [], Counter[str]({DEEP[1]: 1})
    for family, cell in [cell for cell in cells if cell[0] in families]:
        setting = settings[places[family] % len(settings)]
        places[family] += 1
        values = setting if len(names) > 1 else (setting,)
        rows.append(pytest.param(family, cell, *values, id="-".join([family, label(cell), *map(str, values)])))
    return pytest.mark.parametrize(("family", "cell", *names), rows)
