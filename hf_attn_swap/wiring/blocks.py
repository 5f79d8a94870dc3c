"""Replaces the forward of containers that apply W_o, dropout and LayerNorm in one step, as BERT and ALBERT do.

No hook can reach the tensor between W_o and LayerNorm. The classes of this file compute
LayerNorm(x + write(dropout(W_o heads))), where `write` is what a variant does after W_o.
Each forward calls the submodules of the stock container, so adapters on these submodules still apply. There is one
class per stock class. Copies and pickles of a model work, because the class is made again from the stock class.
Axes: B batch, L token, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

Write = Callable[[nn.Module, Tensor, Tensor, dict[str, Any], nn.Module], Tensor]
Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Facts:
    """What the source of a stock container says.

    Attributes:
        arguments: the names of the arguments of its forward, in order; the first is the hidden states.
        handed_on: the name of each argument there, and the name by which the container gives it to its core.
        returns_tuple: True if it returns a tuple, False if it returns one tensor.
    """

    arguments: tuple[str, ...]
    handed_on: tuple[tuple[str, str], ...] = ()
    returns_tuple: bool = True


class Block:
    """The base class of the replaced containers.

    Under a device map, accelerate keeps the forward method that each module had at that time. After `unpatch_model`,
    accelerate still calls this method, now on a module of the stock class. Each forward below therefore passes such a
    module on to the forward of the module's own class.

    Attributes:
        stock_class: the container's class in transformers.
        facts: what the source of the stock container says.
        finish: a function that lets the variants change the output of W_o, see `hooks.finish`.
        attention: the attention function, see `seam.attention_forward`.
    """

    stock_class: type[nn.Module]
    facts: Facts
    finish: Write
    attention: Attention

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return _rebuild, (cls.stock_class, cls.__mro__[1], cls.facts, cls.finish, cls.attention), self.__dict__


class BertBlock(Block):
    """The container `attention` of BERT, RoBERTa, ELECTRA and similar models: the core is its submodule `self`."""

    self: Any
    output: Any

    def forward(this, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # `this.self` reads better than `self.self`
        """Compute the container's output (B,L,E) from the hidden states (B,L,E), its first argument.

        Returns:
            The output and the weights, or the output alone, as the stock container does.
        """
        cls = type(this)
        if not _swapped(this):  # see `Block`
            return cls.forward(this, *args, **kwargs)
        names = cls.facts.arguments
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden_states = given.pop(names[0])
        handed = dict(cls.facts.handed_on)
        result = this.self(hidden_states, **{handed.get(name, name): value for name, value in given.items()})
        heads, rest = (result, ()) if isinstance(result, Tensor) else (result[0], result[1:])
        out = this.output.dropout(this.output.dense(heads))
        out = cls.finish(this.self, out, hidden_states, kwargs, this.output.dropout)
        out = this.output.LayerNorm(out + hidden_states)
        return (out, *rest) if cls.facts.returns_tuple else out


class AlbertBlock(Block):
    """The container `attention` of ALBERT, which is the core too: all projections are its own submodules."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    dense: nn.Module
    output_dropout: nn.Module
    LayerNorm: nn.Module
    attention_dropout: nn.Dropout
    attention_head_size: int
    scaling: float
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the container's output (B,L,E) and the weights, from the hidden states (B,L,E) and the mask."""
        if not _swapped(self):  # see `Block`
            return type(self).forward(self, *args, **kwargs)
        names = type(self).facts.arguments
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden_states, attention_mask = kwargs.pop(names[0]), kwargs.pop(names[1], None)
        split = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query = self.query(hidden_states).view(split).transpose(1, 2)
        key = self.key(hidden_states).view(split).transpose(1, 2)
        value = self.value(hidden_states).view(split).transpose(1, 2)
        dropout = self.attention_dropout.p if self.training else 0.0
        heads, weights = type(self).attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        out = self.output_dropout(self.dense(heads.flatten(2)))
        out = type(self).finish(self, out, hidden_states, kwargs, self.output_dropout)  # type: ignore[arg-type]  # mixed into a module
        return self.LayerNorm(hidden_states + out), weights


def _swapped(module: object) -> bool:
    return isinstance(module, Block)


BLOCKS: dict[str, Any] = {"bert": BertBlock, "albert": AlbertBlock}


@cache
def swapped_class(stock: Any, block: Any, facts: Facts, finish: Write, attention: Attention) -> type[nn.Module]:
    """The class that takes the place of `stock` while the container is swapped: one of `BLOCKS`, then `stock`."""
    body = {
        "stock_class": stock,
        "facts": facts,
        "finish": staticmethod(finish),
        "attention": staticmethod(attention),
    }
    return type(f"Swapped{stock.__name__}", (block, stock), body)


def _rebuild(stock: Any, block: Any, facts: Facts, finish: Write, attention: Attention) -> nn.Module:
    cls = swapped_class(stock, block, facts, finish, attention)
    return cls.__new__(cls)
