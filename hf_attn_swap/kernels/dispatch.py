"""Decides which form of a computation runs: one function per kernel.

The functions look at facts such as the device and the dtype, and never at the content of a tensor. `layer.compute` asks
them once per call and hands the form on. `describe` asks the same functions, so that `describe` prints the form that
runs. All forms of one computation give equal results; they differ in speed and memory.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from ..core.call import Call, Inputs
from ..core.masks import compiling, recorded, transformed
from ..functional.linear import CHUNK, under_autocast
from .stock_softmax import kernels
from .weighing import Rule

LONG = 4096  # from this number of tokens on, H is not held as a tensor; for 12 heads, H would take 800 MB per layer
MIDDLE = 512  # the same number for a user who wants to save memory; for 12 heads, H would take 12 MB per layer
JOINED = ("softmax", "softmax_n")  # the normalizers that a log-sum-exp can be joined to


class Form(Enum):
    """The ways to compute the heads of a layer. `describe` prints the value."""

    STOCK = "stock"
    SDPA = "SDPA"
    RESCALED = "SDPA rescaled by its log-sum-exp"
    ZERO_KEY = "SDPA with a zero key"
    JOINED = "SDPA joined with the pairs by its log-sum-exp"
    FURTHER_KEYS = "SDPA with further keys"
    IN_PLACE = "H moved on in place by baddbmm, then softmax (without gradients: SDPA with H as mask)"
    TERMS = "H as a sum of products, a block of queries at a time"
    PRODUCTS = "reordered products"
    BLOCKS = "reordered products, in blocks by a CPU operator when causal"
    WEIGHTED = "weights, a block of queries at a time"
    REFERENCE = "reference"


class Setting(NamedTuple):
    """The facts that decide about a form.

    Attributes:
        device: the type of the device, such as "cpu".
        dtypes: the dtypes of query, key and value.
        between: True if the strength lies between 0 and 1.
        dropout: True if weights are dropped.
        compiling: True under a compiler, which plans memory by itself, and under `torch.jit.trace`.
        recorded: True while a program is recorded for later, without this package: exported, traced or captured.
        transformed: True inside a transform of `torch.func`, such as `grad` or `vmap`, and in forward mode.
        uniform: True if all layers of the model have the same masks.
        causal: True if the order is causal, without another mask; None if this is not known yet, as in `describe`.
        tokens: the numbers of queries and keys (Q, K); None if they are not known yet, as in `describe`.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    between: bool = False
    dropout: bool = False
    compiling: bool = False
    recorded: bool = False
    transformed: bool = False
    uniform: bool = True
    causal: bool | None = None
    tokens: tuple[int, int] | None = None

    @classmethod
    def of(cls, inputs: Inputs, call: Call) -> Setting:
        """The facts of one call."""
        query, key, value = inputs.query, inputs.key, inputs.value
        device, program = query.device.type, compiling()
        return cls(
            device=device,
            dtypes=(query.dtype, key.dtype, value.dtype),
            between=isinstance(call.exact_strength, torch.Tensor),
            dropout=inputs.dropout > 0,
            compiling=program,
            recorded=(program or device != "cpu") and recorded(),  # a CUDA graph records no work of a CPU
            transformed=transformed(query, key, value),
            uniform=call.uniform,
            causal=inputs.masks.causal or call.state is not None,  # a state stands for earlier tokens
            tokens=(inputs.masks.queries, inputs.masks.keys),
        )

    @property
    def one_dtype(self) -> bool:
        """True if query, key and value have the same dtype."""
        return len(set(self.dtypes)) == 1


def softmax_n_form(setting: Setting) -> Form:
    """The form of softmax_n: by the log-sum-exp of a stock kernel, or by SDPA with one more key of value 0."""
    if setting.compiling or not setting.one_dtype:
        return Form.ZERO_KEY
    if setting.recorded and setting.device != "cpu":  # the padding for CUDA would be that of this length
        return Form.ZERO_KEY
    if kernels(setting.device, setting.dtypes[0], setting.dropout):
        return Form.RESCALED
    return Form.ZERO_KEY


def joined_form(setting: Setting, rule: Rule) -> bool:
    """True if pairs beside the keys can join the output of a stock kernel by its log-sum-exp."""
    if rule.normalizer not in JOINED or rule.clips or setting.dropout:
        return False  # only the kernel knows what it dropped
    return softmax_n_form(setting) is Form.RESCALED


def carried_form(setting: Setting, *, low: bool = False) -> Form:
    """The form of carried scores: H updated in place, H as a sum of products for long sequences, or the reference.

    With `low`, sequences of middle length count as long.
    """
    if setting.between or setting.compiling:
        return Form.REFERENCE
    if setting.tokens is not None and setting.tokens[0] * setting.tokens[1] >= (MIDDLE if low else LONG) ** 2:
        return Form.TERMS
    if under_autocast(setting.device) or not setting.uniform or not setting.one_dtype:
        return Form.REFERENCE
    return Form.IN_PLACE


def weighted_form(setting: Setting) -> Form:
    """The form of a formula that needs the weights: in blocks of queries, by an operator of this package."""
    return Form.REFERENCE if setting.recorded else Form.WEIGHTED


def formula_form(setting: Setting) -> Form:
    """The form of a `score_mod`. A compiler reads the formula itself, and joins it with what stands around it."""
    return Form.REFERENCE if setting.compiling else weighted_form(setting)


def windows_form(setting: Setting) -> bool:
    """True if attention in a window can run in blocks of queries, without a mask of queries and keys.

    At a strength between 0 and 1 every query sees every key. A program that is recorded or compiled gets the mask.
    """
    return not (setting.between or setting.compiling or setting.recorded or setting.transformed)


def linear_form(setting: Setting) -> Form:
    """The form of linear attention: reordered products, or a CPU operator for long sequences in causal order."""
    short = setting.tokens is not None and setting.tokens[0] <= CHUNK  # a single chunk has no running sum
    if setting.recorded or setting.transformed or setting.causal is False or short:
        return Form.PRODUCTS
    return Form.BLOCKS if setting.device == "cpu" and setting.one_dtype else Form.PRODUCTS
