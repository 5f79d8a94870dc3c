"""Second derivatives of every variant and every kernel: right, or the refusal of PyTorch's own kernel.

A caller gets them by `autograd.grad` over `autograd.grad` (Hessian-vector products, influence functions), or by
`backward(create_graph=True)`. The readable formula, which runs when the caller wants the weights, and finite
differences say what is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import functional
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import blocks, dispatch, hopfield, linear, softmax_n, twice
from hf_attn_swap.kernels.dispatch import Form, Setting
from hf_attn_swap.kernels.stock_softmax import How
from hf_attn_swap.layer.swap import Phase
from tests import zoo
from tests.contract.cells import EVERY
from tests.contract.harness import swaps
from tests.harness.checkpointing import enable

from .derivatives import BATCH, BOTH, EXACT, FAMILIES, LENGTH, assert_close, inner, like, loss_of, math_kernel, model_of
from .drawn import drawn, masked
from .in_blocks import RULES, in_blocks, mask_of

LONGER = {"batch": 1, "length": 140}  # linear attention runs in blocks
OF_STOCK = "_scaled_dot_product"  # part of the message of PyTorch where its own kernel has no such derivative


def named(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    """A Hessian-vector product by `autograd.grad` over `autograd.grad`."""
    weights = list(inner(model).values())
    first = torch.autograd.grad(loss_of(model, batch, **kwargs), weights, create_graph=True)
    product = sum((one * other).sum() for one, other in zip(first, like(weights), strict=True))
    return list(torch.autograd.grad(product, weights))


def plain(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    """The same by `backward(create_graph=True)` and `backward`."""
    weights = list(inner(model).values())
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        loss_of(model, batch, **kwargs).backward(create_graph=True)
    first = [weight.grad for weight in weights]
    model.zero_grad(set_to_none=True)
    sum((one * other).sum() for one, other in zip(first, like(weights), strict=True)).backward()
    return [weight.grad for weight in weights]


def asks_sdpa(model: Any) -> bool:
    """True if a layer runs PyTorch's own kernel, which has no second derivative on a CPU."""
    for swap in swaps(model):
        setting = Setting(device="cpu", dtypes=(torch.float64,) * 3, between=swap.phase == Phase.BETWEEN)
        if swap.form(setting) is Form.SDPA or (swap.replacement is not None and setting.between):
            return True
    return False


@pytest.mark.parametrize("product", [named, plain])
@pytest.mark.parametrize(("family", "strength"), BOTH)
@pytest.mark.parametrize("name", EVERY)
def test_second_derivatives(name: str, family: str, strength: float, product: Callable[..., list[Tensor]]) -> None:
    """Right, or the refusal of PyTorch's own kernel; and always right by PyTorch's plain kernel."""
    model = model_of(family, name, strength)
    batch = zoo.inputs(family, batch=BATCH, length=LENGTH, padded="left" if strength == 1 else None)
    wanted = product(model, batch, output_attentions=True) if not asks_sdpa(model) else None
    with math_kernel():
        exact = named(model, batch, output_attentions=True)
        if product is named:
            assert_close(named(model, batch), exact)
    if wanted is None:
        with pytest.raises(RuntimeError, match=OF_STOCK):
            product(model, batch)
    else:
        assert_close(wanted, exact)
        assert_close(product(model, batch), exact)


@pytest.mark.parametrize("product", [named, plain])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["simpletron_resl", "modern_hopfield"])
def test_second_derivatives_of_the_forms_for_long_sequences(
    name: str, family: str, product: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LONG", 8)
    monkeypatch.setattr(dispatch, "CHUNK", 4)
    monkeypatch.setattr(linear, "BLOCK", 4)
    model = model_of(family, name)
    batch = zoo.inputs(family, batch=BATCH, length=9, padded="left")
    assert_close(
        product(model, batch, use_cache=False) if family == "llama" else product(model, batch),
        named(model, batch, output_attentions=True),
    )


KINDS = ("none", "causal", "bool", "float", "row", "blind")
SIZES = (2, 4, 3, 4, 2)  # B, H, Q, K, D
CHECK = {"atol": 1e-6, "rtol": 1e-4}


def slopes(function: Callable[..., Any], inputs: list[Tensor], create_graph: bool) -> list[Tensor | None]:
    """The gradients of the inputs, from a sum of the results with fixed factors."""
    results = function(*inputs)
    results = [each for each in (results if isinstance(results, tuple) else (results,)) if each.requires_grad]
    learned = [each for each in inputs if each.requires_grad]
    return list(torch.autograd.grad(results, learned, like(results), create_graph=create_graph, allow_unused=True))


def checked(function: Callable[..., Any], inputs: list[Tensor], **kwargs: Any) -> None:
    """First and second derivatives by finite differences; the readable first ones are those of the kernel."""
    wanted, got = (slopes(function, inputs, create_graph) for create_graph in (False, True))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, **CHECK, **kwargs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, **CHECK, **kwargs)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("n", [1.0, 0.3, torch.tensor([0.7], dtype=torch.float64)])
@pytest.mark.parametrize("kind", KINDS)
def test_of_softmax_n(kind: str, n: Any, groups: int) -> None:
    batch, heads, queries, keys, width = SIZES
    keys = queries if kind == "causal" else keys
    mask, causal, _ = masked(kind, batch, queries, keys, 0)
    if mask is not None:
        mask = Masks(queries=queries, keys=keys, device=mask.device, given=mask).additive(torch.float64)[0]
    given = drawn(1, (batch, heads, queries, width), *[(batch, groups, keys, width)] * 2)
    checked(lambda q, k, v: softmax_n.softmax_n_attention(q, k, v, mask, causal, 0.9, n), given)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_of_softmax_n_with_further_pairs(kind: str, n: float, count: int, values: bool) -> None:
    batch, heads, queries, keys, width = SIZES
    keys = queries if kind == "causal" else keys
    mask, causal, _ = masked(kind, batch, queries, keys, 0)
    if mask is not None:
        mask = Masks(queries=queries, keys=keys, device=mask.device, given=mask).additive(torch.float64)[0]
    given = drawn(1, (batch, heads, queries, width), *[(batch, 2, keys, width)] * 2)
    pairs = drawn(2, (batch, heads, queries, count), (2, count, width))[: 1 + values]

    def heads_of(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, own: Tensor | None = None) -> Any:
        further = softmax_n.Further(scores, own)
        return softmax_n.softmax_n_attention(q, k, v, mask, causal, 0.9, n, further=further)

    checked(heads_of, [*given, *pairs])


def test_of_softmax_n_where_query_key_and_value_are_one_tensor() -> None:
    (one,) = drawn(1, (2, 2, 3, 4))
    checked(lambda x: softmax_n.softmax_n_attention(x, x, x, None, True, 0.9, 1.0), [one])


def test_of_softmax_n_if_some_need_no_gradient() -> None:
    q, k, v = drawn(1, *[(2, 2, 3, 4)] * 3)
    checked(lambda key: softmax_n.softmax_n_attention(q.detach(), key, v.detach(), None, False, 0.9, 1.0), [k])


def test_of_softmax_n_with_dropped_weights() -> None:
    """A kernel alone knows what it dropped, so that this is refused."""
    qkv = tuple(drawn(1, *[(2, 2, 3, 4)] * 3))
    with pytest.raises(ValueError, match=r"dropout of weights has no second derivative; call model.eval\(\)"):
        softmax_n._again(qkv, None, 0.0, How(False, 1.0, 0.1), torch.ones(2, 2, 3, 4))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("used", ["both", "scores", "heads"])
def test_of_carried_scores(used: str, first: bool, blocked: bool, dropout: float) -> None:
    """Two layers, the second in place; what is used afterwards decides which gradients come back."""
    batch, heads, queries, keys, width = SIZES
    mask = torch.ones(queries, keys, dtype=torch.bool).triu(2)[None, None] if blocked else None
    shapes = (batch, heads, queries, width), *[(batch, 2, keys, width)] * 2
    given = drawn(2, (batch, heads, queries, keys), *shapes, *shapes)

    def layers(below: Tensor, q: Tensor, k: Tensor, v: Tensor, *above: Tensor) -> Any:
        torch.manual_seed(0)
        how: Any = {"weight": 0.4, "blocked": mask, "dropout": dropout}
        below = None if first else below * 1.0
        hidden, one = hopfield.attend(below, q, k, v, decay=0.6, fresh=first, **how)
        hidden, two = hopfield.attend(hidden, *above, decay=0.5, fresh=False, **how)
        hidden = hidden * 1.0 if mask is None else hidden.masked_fill(mask, 0.0)  # a layer above owns the gradient of H
        return {"both": (hidden, one, two), "scores": hidden, "heads": (one, two)}[used]

    if first:
        given[0].requires_grad_(False)
    if used == "scores":  # no value is read
        given[3].requires_grad_(False)
        given[6].requires_grad_(False)
    with torch.random.fork_rng():
        checked(layers, given)


@pytest.mark.parametrize("create_graph", [False, True])
def test_of_carried_scores_that_nothing_reads(create_graph: bool) -> None:
    """What follows has no gradient for the heads: then nothing below has one."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, heads: Tensor) -> Tensor:
            return heads.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    given = drawn(2, *[(1, 2, 3, 2)] * 3)
    how: Any = {"decay": 0.0, "weight": 0.4, "blocked": None, "fresh": True}
    stopped = Stop.apply(hopfield.attend(None, *given, **how)[1])
    found = torch.autograd.grad(stopped.sum(), given, create_graph=create_graph, allow_unused=True)
    assert found == (None, None, None)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_of_carried_scores_as_a_sum_of_products(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is computed again in the backward pass, and drops the same weights as before."""
    monkeypatch.setattr(hopfield, "BLOCK", 2 * 2 * 4)
    q, k, below, value = drawn(2, *[(2, 2, 4, 2)] * 4)

    def attend(q: Tensor, k: Tensor, below: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(0)
        return hopfield.attend_long([(below, k, 0.3), (q, k, 0.4)], value, None, True, dropout)

    with torch.random.fork_rng():
        checked(attend, [q, k, below, value])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ends", [(0.0, 1.0), (-0.05, 1.1)])
@pytest.mark.parametrize("strength", [None, 0.3])
@pytest.mark.parametrize("block", [(1, 2), (2**20, 64)])
@pytest.mark.parametrize(("kind", "causal", "dropout"), [("none", True, 0.0), ("padding", False, 0.4),
                                                         ("numbers", True, 0.0), ("blind", True, 0.4)])  # fmt: skip
def test_of_weights_in_blocks(
    rule: str, ends: Any, strength: float | None, block: Any, kind: str, causal: bool, dropout: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(blocks.SCORES, "cpu", block[0])
    monkeypatch.setattr(blocks, "ROWS", block[1])
    batch, heads, queries, keys, width = SIZES
    given = drawn(1, (batch, heads, queries, width), *[(batch, 2, keys, width)] * 2)
    mask = mask_of(kind, batch, heads, queries, keys, 0)
    checked(lambda q, k, v: in_blocks(q, k, v, mask, causal, (rule, *ends, strength), dropout, 3), given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("past", [False, True])
def test_of_linear_attention_in_blocks(causal: bool, past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "BLOCK", 2)
    monkeypatch.setattr(linear, "ALL_BLOCK", 2)
    monkeypatch.setattr(linear, "SPAN", 2)
    batch, heads, queries, keys, width = SIZES
    given = drawn(1, (batch, heads, queries, width), *[(batch, heads, keys, width)] * 2, (batch, 2, width, width))
    real = torch.tensor([[True] * 4, [False] * 2 + [True] * 2])

    def attend(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
        sums = (state, torch.tensor([2, 1]), torch.tensor([2])) if past else None
        return linear.attend(q, k, v, key_mask=real, length="true", past=sums, causal=causal)

    given[3].requires_grad_(past and causal)
    checked(attend, given)


@pytest.mark.parametrize("normalizer", [functional.softmax_n, functional.sparsemax, functional.entmax15,
                                        functional.polynomial])  # fmt: skip
def test_of_the_formulas(normalizer: Callable[[Tensor], Tensor]) -> None:
    checked(normalizer, drawn(1, (5, 6)))


def test_of_the_third_order() -> None:
    """Beyond the second derivative too."""
    qkv = drawn(1, *[(1, 2, 3, 2)] * 3)

    def first_of(attend: Callable[..., Tensor]) -> Callable[..., Any]:
        def first(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)

        return first

    checked(first_of(lambda q, k, v: softmax_n.softmax_n_attention(q, k, v, None, False, 0.9, 1.0)), qkv)
    how: Any = {"decay": 1.0, "weight": 0.4, "blocked": None, "fresh": True}
    checked(first_of(lambda q, k, v: hopfield.attend(None, q, k, v, **how)[1]), qkv)
    checked(first_of(lambda q, k, v: in_blocks(q, k, v, None, False, ("entmax15", 0.0, 1.0, None))), qkv)


@pytest.mark.parametrize("name", EVERY)
def test_an_ordinary_step_makes_no_readable_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of second derivatives costs a training step nothing."""
    monkeypatch.setattr(twice, "gradients", None)
    monkeypatch.setattr(hopfield, "_again", None)
    model = model_of("llama", name, max_position_embeddings=200)
    loss_of(model, zoo.inputs("llama", **LONGER)).backward()


ONE_PER_KERNEL = ("outeffhop", "modern_hopfield", "entmax15", "simpletron_resl")


@pytest.mark.parametrize("name", ONE_PER_KERNEL)
def test_under_checkpointing(name: str) -> None:
    """Kernels run again in the backward pass, with a graph of the gradients."""
    model, batch = model_of("llama", name, max_position_embeddings=200), zoo.inputs("llama", **LONGER)
    wanted = named(model, batch, use_cache=False)
    enable(model.train(), activation_checkpointing_kwargs={"use_reentrant": False})
    assert_close(named(model, batch, use_cache=False), wanted)


@pytest.mark.parametrize("name", ONE_PER_KERNEL)
def test_under_autocast(name: str) -> None:
    """The readable gradients of a kernel are as precise as those of the readable form."""
    model, batch = model_of("bert", name, max_position_embeddings=200), zoo.inputs("bert", **LONGER)
    exact = named(model, batch)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        pairs = [named(model, batch), named(model, batch, output_attentions=True)]
    own, readable = ([float((one - other).norm()) for one, other in zip(each, exact, strict=True)] for each in pairs)
    assert all(error <= 2 * other for error, other in zip(own, readable, strict=True)), (own, readable)


@pytest.mark.parametrize("name", EVERY)
def test_many_gradients_at_once(name: str) -> None:
    """`is_grads_batched` runs the backward pass inside `vmap`: the same as one gradient after the other."""
    model = model_of("bert", name)
    weights = list(inner(model).values())
    out = zoo.output(model(**zoo.inputs("bert", batch=BATCH, length=LENGTH)))
    given = like([out.expand(3, *out.shape)])[0]
    wanted = [torch.autograd.grad(out, weights, each, retain_graph=True) for each in given]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        got = torch.autograd.grad(out, weights, given, is_grads_batched=True)
    assert_close(got, [torch.stack(each) for each in zip(*wanted, strict=True)])
