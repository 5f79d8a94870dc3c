"""Containers that fuse W_o with dropout and LayerNorm, with a place for what comes after W_o.

BERT-like: LayerNorm(x + write(dropout(W_o heads))). ALBERT likewise, with the projections in the same module.
The forward calls the stock submodules, so adapters on them still apply. Classes are made once per stock class and
survive copies and pickles: they are rebuilt from the stock class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

Write = Callable[[nn.Module, Tensor, dict[str, Any], nn.Module], Tensor]
Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Block:
    """What the classes below share; `stock_class` is the class that transformers wrote.

    Under a device map accelerate keeps, for each module, the forward method that it found. After `unpatch_model` it
    calls that method on a module of the stock class again, so each forward hands such a module to its own class.
    """

    stock_class: type[nn.Module]
    finish: Write
    attention: Attention

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return _rebuild, (cls.stock_class, cls.__mro__[1], cls.finish, cls.attention), self.__dict__


class BertBlock(Block):
    """`attention` of BERT, RoBERTa, ELECTRA and their like: the projections sit in `self`."""

    self: Any
    output: Any

    def forward(this, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:  # noqa: N805  # `this.self` reads better than `self.self`
        """(B,L,E) to the attention block's output (B,L,E) and the weights."""
        if not _swapped(this):  # see `Block`
            return type(this).forward(this, hidden_states, attention_mask=attention_mask, **kwargs)
        heads, weights = this.self(hidden_states, attention_mask=attention_mask, **kwargs)
        out = this.output.dropout(this.output.dense(heads))
        out = type(this).finish(this.self, out, kwargs, this.output.dropout)
        return this.output.LayerNorm(out + hidden_states), weights


class AlbertBlock(Block):
    """`attention` of ALBERT: the projections sit in the same module."""

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

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """(B,L,E) to the attention block's output (B,L,E) and the weights."""
        if not _swapped(self):  # see `Block`
            return type(self).forward(self, hidden_states, attention_mask=attention_mask, **kwargs)
        split = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (p(hidden_states).view(split).transpose(1, 2) for p in (self.query, self.key, self.value))
        dropout = self.attention_dropout.p if self.training else 0.0
        heads, weights = type(self).attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        out = self.output_dropout(self.dense(heads.flatten(2)))
        out = type(self).finish(self, out, kwargs, self.output_dropout)  # type: ignore[arg-type]  # mixed into a module
        return self.LayerNorm(hidden_states + out), weights


def _swapped(module: object) -> bool:
    return isinstance(module, Block)


BLOCKS: dict[str, Any] = {"bert": BertBlock, "albert": AlbertBlock}


@cache
def swapped_class(stock: Any, block: Any, finish: Write, attention: Attention) -> type[nn.Module]:
    """The class that stands in for `stock` while it is swapped, with one of the `BLOCKS` in front."""
    body = {"stock_class": stock, "finish": staticmethod(finish), "attention": staticmethod(attention)}
    return type(f"Swapped{stock.__name__}", (block, stock), body)


def _rebuild(stock: Any, block: Any, finish: Write, attention: Attention) -> nn.Module:
    cls = swapped_class(stock, block, finish, attention)
    return cls.__new__(cls)
