"""Measures a layer without computing the blocks below it: with their variants off, these give what they gave before.

The outputs of all blocks are recorded once. Then a layer in the first block still costs a whole pass, and a layer in
the last block costs one block, so that measuring every layer takes half of the work in the blocks. The figures are
those of whole passes, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor, nn

from ..measuring.held_out import HeldOut
from ..wiring.install import Installation
from ..wiring.layers import Layer

MOST = 2**31  # bytes of recorded outputs at most


class Replay:
    """The outputs of a stack of blocks, pass by pass, of one measurement on held-out rows.

    Args:
        blocks: the blocks, in the order in which a pass calls them.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.passes: list[list[Any]] = []  # of each pass, the output of each block
        self.now = 0

    @classmethod
    def of(cls, installation: Installation, held: HeldOut) -> Replay | None:
        """Record a model as it is now, without variants.

        Args:
            installation: of the model; its swaps are at strength 0, and their layers will run one by one.
            held: the rows. Each measurement on them takes the same passes.

        Returns:
            The recorded outputs. None where a block leaves something for blocks above that is not its output: shared
            modules, carried scores, borrowed keys, a dict or list that all blocks are given; where a block reads
            something else than the output of the block below; where the outputs take more than 2 GiB; and where the
            figures of replayed passes are not the same.
        """
        model, swapped = installation.root, installation.layers()
        stacks = {id(stack): stack for stack, _ in (block_of(model, layer) for layer in swapped)}
        (stack, *others) = stacks.values()
        if others or not isinstance(stack, nn.ModuleList):
            return None
        if any(layer.site.borrows or layer.site.family.shared for layer in installation.numbered()):
            return None
        if any(layer.swap.carries for layer in swapped):
            return None
        replay = cls(list(stack))
        with replay._recording():
            lost = held.lost(model)
        if not replay._whole():
            return None
        with replay.below(len(replay.blocks)):
            same = held.lost(model) == lost
        return replay if same else None

    @contextlib.contextmanager
    def below(self, count: int) -> Iterator[None]:
        """Inside, the first blocks are not computed; one measurement on the held-out rows may be made.

        Args:
            count: the number of blocks that give again what they gave.
        """
        self.now = -1
        own = [vars(block).get("forward") for block in self.blocks[:count]]  # accelerate's, if it has one
        try:
            for number, block in enumerate(self.blocks[:count]):
                block.forward = self._again(number)
            yield
        finally:
            for block, forward in zip(self.blocks, own, strict=False):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def _again(self, number: int) -> Any:
        """The forward method of a block that gives again what it gave: a copy, which the next block may change."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.now += number == 0
            return _copy(self.passes[self.now][number])

        return forward

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Inside, the outputs of all blocks are kept, as long as each reads the output of the one before it."""
        size, broken = 0, False
        before: Any = None  # what the last block gave

        def record(number: int) -> Any:
            def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                nonlocal size, broken, before
                if number == 0:
                    self.passes.append([])
                hidden = args[0] if args else kwargs.get("hidden_states")
                size += sum(tensor.nbytes for tensor in _tensors(output))
                in_order = bool(self.passes) and len(self.passes[-1]) == number and (number == 0 or hidden is before)
                given = any(isinstance(value, (MutableMapping, MutableSequence)) for value in (*args, *kwargs.values()))
                broken |= size > MOST or given or not in_order
                if broken:
                    self.passes.clear()
                else:
                    self.passes[-1].append(_copy(output))
                before = output[0] if isinstance(output, (tuple, list)) else output

            return hook

        with contextlib.ExitStack() as hooks:
            for number, block in enumerate(self.blocks):
                hooks.callback(block.register_forward_hook(record(number), with_kwargs=True).remove)
            yield
        if broken:
            self.passes.clear()

    def _whole(self) -> bool:
        """True if each block was called once in each pass."""
        return bool(self.passes) and all(len(outputs) == len(self.blocks) for outputs in self.passes)


def block_of(model: nn.Module, layer: Layer) -> tuple[nn.Module | None, int]:
    """The list that holds the block of a layer, and the number of the block there; None if no list does."""
    parts = layer.path.split(".")
    places = [place for place, part in enumerate(parts) if part.isdigit()]
    if not places:
        return None, 0
    return model.get_submodule(".".join(parts[: places[-1]])), int(parts[places[-1]])


def _copy(output: Any) -> Any:
    """An output with copies of its tensors."""
    if isinstance(output, Tensor):
        return output.clone()
    return type(output)(map(_copy, output)) if type(output) in (tuple, list) else output


def _tensors(output: Any) -> Iterator[Tensor]:
    values = output if isinstance(output, (tuple, list)) else (output,)
    return (value for value in values if isinstance(value, Tensor))
