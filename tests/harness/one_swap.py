"""One swap of each variant with each of its options, made once: for questions about a variant before the tests run."""

from __future__ import annotations

import functools
from typing import Any

from hf_attn_swap import list_variants
from hf_attn_swap.layer.swap import Swap
from tests import zoo
from tests.contract.cells import Cell, swap_in


def one_swap(cell: Cell) -> Swap:
    """The swap of the first layer of a tiny BERT; it is shared, so nobody changes it."""
    return _made(cell[0], tuple(sorted(cell[1].items())))


@functools.cache
def _made(name: str, options: tuple[tuple[str, Any], ...]) -> Swap:
    model = swap_in(zoo.build("bert"), name, **dict(options))
    return next(module for module in model.modules() if isinstance(module, Swap))


def has_parameters(cell: Cell) -> bool:
    """True if the swap has parameters of its own."""
    return next(one_swap(cell).parameters(), None) is not None


WITH_PARAMETERS = [v for v in list_variants() if has_parameters((v, {}))]
