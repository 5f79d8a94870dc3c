"""A variant has one canonical name, and an alias means the same: the same model, config and refusals."""

from __future__ import annotations

import re

import pytest

from hf_attn_swap import describe, list_variants, patch_model
from hf_attn_swap.layer.registry import canonical_name, get_variant, parse, parse_options
from hf_attn_swap.variants.base import VARIANTS

from .cells import PAIRS, SINGLES
from .harness import assert_identical, batch_of, fresh, refused, run

ALIASES = [(alias, cls.name) for cls in VARIANTS.values() for alias in cls.aliases]
RENAMED = {  # names that saved models hold, which must keep their meaning
    "clipped": "clipped_softmax",
    "entmax": "entmax15",
    "mha": "modern_hopfield",
    "simple": "simpletron",
    "simple_res": "simpletron_res",
    "simple_resl": "simpletron_resl",
    "sparse_hopfield": "sparsemax",
}


def other_names(variant: str) -> str:
    """A composition under the aliases of its variants, where they have one."""
    return "+".join((*get_variant(name).aliases, name)[0] for name in variant.split("+"))


@pytest.mark.parametrize(("alias", "name"), [*ALIASES, (other_names(PAIRS[0]), PAIRS[0])])
def test_an_alias_gives_the_same_model_and_config(alias: str, name: str) -> None:
    one, other = patch_model(fresh("bert"), name), patch_model(fresh("bert"), alias)
    assert other.config.attn_swap == one.config.attn_swap
    assert describe(other) == describe(one)
    assert_identical(run(other, batch_of("bert")), run(one, batch_of("bert")))


def test_names_of_saved_models_keep_their_meaning() -> None:
    assert {old: canonical_name(old) for old in RENAMED} == RENAMED


def test_only_canonical_names_are_listed() -> None:
    assert list_variants() == tuple(VARIANTS) == tuple(canonical_name(name) for name in VARIANTS)
    assert not {alias for alias, _ in ALIASES} & set(list_variants())


def test_options_go_under_any_name_of_the_component() -> None:
    for names in PAIRS:
        classes = parse(other_names(names))
        for cls in classes:
            for key in (cls.name, *cls.aliases):
                assert list(parse_options(classes, {key: {}})) == names.split("+")
                with refused(f"{cls.name}: unknown option 'no_such'"):
                    parse_options(classes, {key: {"no_such": 1}})


def test_one_variant_under_two_names_is_refused() -> None:
    """As components of a composition, and as keys of options."""
    for alias, name in [pair for pair in ALIASES if not get_variant(pair[1]).alone]:
        for both in (f"{alias}+{name}", f"{name}+{alias}"):
            with refused(both, "both change the", f"{name!r} and {name!r}"):
                parse(both)
        pair = next(pair for pair in PAIRS if name in pair.split("+"))
        with refused(f"{name!r} is given twice"):
            parse_options(parse(pair), {alias: {}, name: {}})


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    for name in (*SINGLES, *(alias for alias, _ in ALIASES)):
        with refused(f"(did you mean {canonical_name(name)!r}?)"):
            parse(f"x{name}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("hopfield", "'modern_hopfield' or 'sparsemax'"),
        ("Hopfield", "'modern_hopfield' or 'sparsemax'"),
        ("linear", "'simpletron' or 'simpletron_res' or 'simpletron_resl'"),
        ("linear_attention", "'simpletron' or 'simpletron_res' or 'simpletron_resl'"),
        ("window_attention", "'window'"),
        ("gate", "'gated'"),
        ("longformer", "'window'"),
    ],
)
def test_a_word_of_a_name_or_a_summary_is_answered_with_those_that_have_it(word: str, meant: str) -> None:
    proposed = re.search(r"\(did you mean (.*?)\?\)", _refusal(word))
    assert proposed is not None
    assert sorted(proposed[1].split(" or ")) == sorted(meant.split(" or "))


def _refusal(name: str) -> str:
    with pytest.raises(ValueError, match="unknown variant") as caught:
        parse(name)
    return str(caught.value)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with refused("unknown variant 'qqqq'; known: ", *list_variants(), "A variant of your own"):
        parse("qqqq")
