"""Counts the positions of a row from its first seen token, where pairs stand beside the keys.

The key of a pair stands after rotary embedding, at the place before a text that begins at position 0. Rotary positions
count relatively, so a row with padding in front gets positions that begin at 0 behind the padding. Nothing but the
distance to the pairs changes, and no kernel knows of it. Learned positions never reach an attention module: they stay
as they are, and so do rows without padding in front.
`FromFirstSeen` does this for a stack, which alone knows the mask of all tokens so far. `rotated_from_first_seen` does
it for one attention module, if a program passed by the hooks of the stack.
docs/mathematics.md, section Sinks. Axes: B batch, H head, Q query, K key, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.call import ForwardContext
from ..core.masks import Masks, traced
from ..families import Site, stock_class
from ..families.source import arguments
from ..layer.swap import Argument, Phase, Swap
from .cache import cache_of
from .seam import CONTEXT

MASK, POSITIONS, ROTARY = "attention_mask", "position_ids", "position_embeddings"  # transformers' public names
TOKENS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True, eq=False)
class FromFirstSeen:
    """A hook that runs before a stack of layers with pairs, and gives it positions from each row's first seen token.

    Attributes:
        mask, positions: the stack's arguments for the mask and for the positions.
        tokens: its arguments for tokens or their embeddings, (B,Q,...).
    """

    mask: Argument
    positions: Argument
    tokens: tuple[Argument, ...]

    @staticmethod
    def of(stack: nn.Module, sites: list[Site]) -> FromFirstSeen | None:
        """The hook of a stack; None if its positions, or those of a mask, do not reach these attention modules."""
        names = arguments(stock_class(stack))
        reached = {name for site in sites for name in arguments(stock_class(site.core))}
        if not {MASK, POSITIONS} <= set(names) or not {POSITIONS, ROTARY} & reached:
            return None
        mask, positions = (Argument(name, names.index(name)) for name in (MASK, POSITIONS))
        tokens = tuple(Argument(name, names.index(name)) for name in TOKENS if name in names)
        return FromFirstSeen(mask, positions, tokens)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give the stack other positions, if a row has padding in front.

        Raises:
            ValueError: the place of the first seen token, or its position, cannot be known.
        """
        context: ForwardContext | None = kwargs.get(CONTEXT)
        if context is not None:
            context.from_first_seen = True
        mask, given = self.mask.of(args, kwargs), self.positions.of(args, kwargs)
        if isinstance(mask, Mapping):  # one mask for each kind of layers
            mask = next((of_kind for of_kind in mask.values() if of_kind is not None), None)
        if not isinstance(mask, Tensor) or not _padded_in_front(mask) or not _has_pairs(module):
            return args, kwargs
        cache = cache_of(args, kwargs)
        earlier = 0 if cache is None else cache.get_seq_length()
        earlier = earlier if traced() else int(earlier)
        current = next(tensor for tensor in (token.of(args, kwargs) for token in self.tokens) if tensor is not None)
        places = torch.arange(current.shape[1], device=mask.device) + earlier
        positions = places[None] if given is None else given.to(mask.device)
        if isinstance(earlier, int) and earlier == 0:
            first = _first_positions(mask, positions)
        elif given is not None and (mask.dim() > 2 or given.dim() > 2):
            return args, kwargs  # a model's own code made them, and begins every text at 0
        else:
            first = _first_positions_before(mask, positions, places)
        moved = torch.where(_seen(mask)[:, places], positions - first, 0)
        return self.positions.put(args, kwargs, moved if given is None else moved.to(given.device))


def rotated_from_first_seen(
    core: nn.Module, mask: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The arguments of an attention module with the angles of positions from each row's first seen token.

    Angles that begin at 0 stay as they are, so this may follow a `FromFirstSeen` whose mark did not arrive.

    Raises:
        ValueError: the first seen token is in the cache, or the module works out the angles itself.
    """
    angles = [value for value in (*args, *kwargs.values()) if _are_angles(value)]
    rotates = bool(angles) or POSITIONS in arguments(stock_class(core))
    if not rotates or not isinstance(mask, Tensor) or not _padded_in_front(mask):
        return args, kwargs
    seen = _seen(mask)
    if angles and all(_complex(value).shape[-2] == seen.shape[1] for value in angles):
        first = seen.int().argmax(-1)

        def turned(value: Any) -> Any:
            return _turned(core, value, first) if _are_angles(value) else value

        return tuple(map(turned, args)), {name: turned(value) for name, value in kwargs.items()}
    positions = kwargs.get(POSITIONS)
    known = traced() or (positions is not None and bool((positions[..., -1] == seen.sum(-1) - 1).all()))
    if not angles or not known:
        _refuse(core)
    return args, kwargs


def _refuse(core: nn.Module) -> NoReturn:
    raise ValueError(
        f"{type(core).__name__}: the pairs of sink stand before the first token that a row sees, whose position cannot "
        "be known here: a program calls model.forward(...), and a row is padded in front. Call model(...) instead, or "
        "pad on the right."
    )


def _turned(core: nn.Module, angles: Any, first: Tensor) -> Any:
    """The same angles, less the angle at the place `first` (B,) of each row.

    As complex numbers, a difference of angles is a quotient. Cosines and sines come in either order: the sines of
    position 0 are zeros.

    Raises:
        ValueError: nothing tells the cosines from the sines.
    """
    numbers = _complex(angles)
    swapped = None
    if not isinstance(angles, Tensor):
        swapped, known = (_some_place_is_zero(cos_or_sin) for cos_or_sin in angles)
        if not traced() and not bool(swapped | known):
            _refuse(core)
        numbers = torch.where(swapped, torch.complex(numbers.imag, numbers.real), numbers)
    numbers = numbers.expand(*numbers.shape[:-3], len(first), -1, -1)
    own = numbers.gather(-2, first[:, None, None].expand(*numbers.shape[:-2], 1, numbers.shape[-1]))
    moved = numbers * own.conj() / own.abs()
    if swapped is None:
        return moved
    one, other = torch.where(swapped, moved.imag, moved.real), torch.where(swapped, moved.real, moved.imag)
    return one.to(angles[0]), other.to(angles[1])


def _some_place_is_zero(tensor: Tensor) -> Tensor:
    """() bool, True if all numbers of some place are 0."""
    return (tensor == 0).all(-1).any()


def _are_angles(value: Any) -> bool:
    """True for cosines and sines of one shape (B|1,Q,D), and for complex numbers."""
    if isinstance(value, Tensor):
        return value.is_complex() and value.dim() > 2
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(tensor, Tensor) for tensor in value)
    return pair and value[0].is_floating_point() and value[0].dim() > 2 and value[0].shape == value[1].shape


def _complex(value: Any) -> Tensor:
    """Angles as complex numbers, in fp32 at least."""
    if isinstance(value, Tensor):
        return value
    wide = torch.promote_types(value[0].dtype, torch.float32)
    return torch.complex(value[0].to(wide), value[1].to(wide))


def _has_pairs(module: nn.Module) -> bool:
    """True if a layer of the stack computes with pairs now."""
    swaps = (submodule for submodule in module.modules() if isinstance(submodule, Swap))
    return any(swap.phase != Phase.OFF and swap.further_keys > 0 for swap in swaps)


def _allowed(mask: Tensor) -> Tensor:
    """A mask of queries and keys (B,1|H,Q,K) as bool, True where a query sees a key."""
    masks = Masks(queries=mask.shape[2], keys=mask.shape[3], device=mask.device, given=mask)
    allowed = masks.closed().allowed()
    assert allowed is not None
    return allowed


def _seen(mask: Tensor) -> Tensor:
    """(B,K) bool, True at the keys that a query sees."""
    return mask.bool() if mask.dim() == 2 else _allowed(mask).any(1).any(1)


def _padded_in_front(mask: Tensor) -> bool:
    """True if a row does not see its first key. While a program is recorded, nothing can be read."""
    if mask.dim() > 2 and mask.dtype != torch.bool and not mask.is_floating_point():
        return False  # the attention function refuses it
    return traced() or not bool(_seen(mask)[:, 0].all())


def _first_positions(mask: Tensor, positions: Tensor) -> Tensor:
    """The position of each row's first seen token (...,B,1), if all tokens are current ones.

    Raises:
        ValueError: queries of one row see first tokens at other positions (a window, packed texts).
    """
    seen = _seen(mask)
    positions = positions.expand(*positions.shape[:-2], len(seen), -1)

    def at(place: Tensor) -> Tensor:
        return positions.gather(-1, place.expand(*positions.shape[:-2], *place.shape))

    first = at(seen.int().argmax(-1)[:, None])
    if mask.dim() > 2 and not traced():
        allowed = _allowed(mask).any(1)
        own = at(allowed.int().argmax(-1))
        if bool(((own != first) & (first != 0) & allowed.any(-1)).any()):
            raise ValueError(
                "the pairs of sink stand before the first token that a row sees, and the queries of this 4-D mask see "
                "other first tokens (a window, or packed texts) behind padding; pass position_ids that begin at 0 in "
                "every text, or pad on the right."
            )
    return first


def _first_positions_before(mask: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """The position of each row's first seen token (B,1), which is in the cache: 0, or its place.

    Raises:
        ValueError: the positions of the current tokens count neither seen tokens nor places; or the mask may be that of
            a window, which hides the first token of a long text.
    """
    if mask.dim() > 2:
        raise ValueError(
            "the pairs of sink stand before the first token that a row sees, which a 4-D mask behind a cache does not "
            "show; pass position_ids that begin at 0 behind the padding, or a mask of all tokens so far, (B,K)."
        )
    seen = mask.bool()
    so_far = seen & (torch.arange(seen.shape[1], device=seen.device) <= places[-1])
    last, counted = positions[:, -1], so_far.sum(-1) - 1
    by_place = (last == places[-1]) & (last != counted)
    if not traced() and not bool((by_place | (last == counted) | ~seen[:, places[-1]]).all()):
        raise ValueError(
            "the pairs of sink stand before the first token that a row sees, whose position cannot be known from "
            "position_ids that count neither the tokens that are seen nor all places of the row; pass "
            "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), and of these the current ones."
        )
    return torch.where(by_place, seen.int().argmax(-1), 0)[:, None]
