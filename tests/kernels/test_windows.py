"""Blocks of queries with the keys of their window equal a masked reference in fp64, without a tensor of L x L."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_attn_swap import patch_model
from hf_attn_swap.core.call import Call, Inputs
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import windows
from hf_attn_swap.kernels.windows import Span
from hf_attn_swap.layer.compute import Places, reference
from tests import zoo
from tests.contract.harness import Recorder, fresh, perturb, refused

EXACT = 1e-12
SHAPES = [(1, 2, 2, 10, 10), (2, 4, 2, 17, 17), (2, 4, 1, 5, 13), (1, 6, 3, 1, 9), (2, 2, 2, 12, 12)]  # B,H,G,Q,K
SPANS = [(1, 0), (2, 1), (3, 20), (7, 3)]  # the window, and the first keys
PADDINGS = [None, "left", "right", "holes", "all"]


def key_mask(padding: str | None, batch: int, keys: int) -> Tensor | None:
    """Of the first row alone; "all" leaves it blind."""
    if padding is None:
        return None
    mask = torch.ones(batch, keys, dtype=torch.bool)
    hidden = {"left": slice(4), "right": slice(-4, None), "holes": slice(1, None, 3), "all": slice(None)}
    mask[0, hidden[padding]] = False
    return mask


def seen(masks: Masks, batch: int, span: Span) -> Tensor:
    """(B,1,Q,K) bool, one query and one key at a time."""
    visible = torch.zeros(batch, 1, masks.queries, masks.keys, dtype=torch.bool)
    real = torch.ones(batch, masks.keys) if masks.key_mask is None else masks.key_mask
    for (b, row), query in itertools.product(enumerate(real.tolist()), range(masks.queries)):
        place = masks.keys - masks.queries + query
        shown = [key for key, seen in enumerate(row) if seen and (key <= place or not masks.causal)]
        visible[b, 0, query, [key for key in shown if abs(place - key) < span.window or key in shown[: span.sinks]]] = (
            True
        )
    return visible


def slow(inputs: Inputs, span: Span) -> Tensor:
    """The heads (B,Q,H,D) by a mask of queries and keys; a blind query reads zeros."""
    groups = inputs.query.shape[1] // inputs.key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (inputs.key, inputs.value))
    allowed = seen(inputs.masks, len(key), span)
    exponentials = torch.exp(inputs.query @ key.mT * inputs.scaling) * allowed
    total = exponentials.sum(-1, keepdim=True)
    return (exponentials / total.where(total > 0, 1.0) @ value).transpose(1, 2)


def cases(shape: tuple[int, ...], padding: str | None) -> Iterator[tuple[Inputs, Span]]:
    batch, heads, groups, queries, keys = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, 8, generator=generator, dtype=torch.float64).requires_grad_()

    for (window, sinks), causal in itertools.product(SPANS, (True, False)):
        if queries < keys and not causal:
            continue
        hidden = key_mask(padding, batch, keys)
        if hidden is None and causal and queries < keys:  # as the mask function makes it
            hidden = torch.ones(batch, keys, dtype=torch.bool)
        masks = Masks(
            queries=queries, keys=keys, device=torch.device("cpu"), key_mask=hidden, causal=causal and queries > 1
        )
        tensors = drawn(batch, heads, queries), drawn(batch, groups, keys), drawn(batch, groups, keys)
        yield Inputs(*tensors, scaling=0.3, masks=masks, dropout=0.0), Span(window, sinks)


def assert_equal(inputs: Inputs, got: Tensor, wanted: Tensor) -> None:
    """Heads and gradients."""
    factors = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=wanted.dtype)
    assert float((got - wanted).detach().abs().max()) <= EXACT
    slopes = [torch.autograd.grad((heads * factors).sum(), inputs.three, retain_graph=True) for heads in (got, wanted)]
    for one, other in zip(*slopes, strict=True):
        assert float((one - other).abs().max()) <= EXACT * float(other.abs().max().clamp_min(1))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_and_mask_equal_one_key_at_a_time(
    shape: tuple[int, ...], padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SDPA in blocks, by blocks as rows of a batch for any other form, and by the mask of queries and keys."""
    monkeypatch.setattr(windows, "ROWS", 3)  # several blocks; the next test has one
    for inputs, span in cases(shape, padding):
        call = Call(x=inputs.query, start=shape[4] - shape[3])
        assert windows.fits(inputs, call)
        wanted = slow(inputs, span)
        assert_equal(inputs, windows.attend(inputs, span), wanted)
        blocks, inside = windows.folded(inputs, span)
        assert_equal(inputs, windows.unfolded(blocks, reference(Places(), inside, call)[0]), wanted)
        assert_equal(inputs, reference(Places(), windows.narrowed(inputs, span, call), call)[0], wanted)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] > 1], ids=str)
def test_heads_with_all_keys_beside_heads_in_the_window(shape: tuple[int, ...], padding: str | None) -> None:
    """In two parts, and by a mask of each head: values and gradients of both groups of heads."""
    heads, groups = shape[1:3]
    full = tuple(group % 2 == 1 for group in range(groups))
    of_query = torch.tensor([full[head // (heads // groups)] for head in range(heads)])[:, None]
    for inputs, alone in cases(shape, padding):
        span, call = Span(alone.window, alone.sinks, full), Call(x=inputs.query, start=shape[4] - shape[3])
        wanted = torch.where(of_query, slow(inputs, Span(shape[4], 0)), slow(inputs, alone))
        whole, near = windows.parted(inputs, span)
        assert (whole.key.shape[1], near.key.shape[1]) == (sum(full), groups - sum(full))
        parts = reference(Places(), whole, call)[0], windows.attend(near, span.alone)
        assert_equal(inputs, windows.united(span, *parts), wanted)
        assert_equal(inputs, reference(Places(), windows.narrowed(inputs, span, call), call)[0], wanted)


def test_the_next_token_needs_no_mask() -> None:
    """If no first key is near, and none is padding."""
    inputs, _ = next(cases((2, 4, 2, 1, 9), None))
    inputs.masks = Masks(queries=1, keys=9, device=torch.device("cpu"))
    for span in (Span(3, 2), Span(9, 0), Span(7, 2)):
        inside = windows.next_token(inputs, span, windows.ALL)
        assert inside is not None
        assert inside.masks.dense() == (None, False)
        assert_equal(inputs, reference(Places(), inside, Call(x=inputs.query))[0], slow(inputs, span))
    assert windows.next_token(inputs, Span(8, 2), windows.ALL) is None


def test_heads_of_a_span() -> None:
    """Keys may come repeated for each query head; heads that are no multiple are refused."""
    span = Span(3, 1, (True, False))
    assert span.full_of(4) == (True, True, False, False)
    with refused("full_heads counts 2 key/value heads, but the module computes with 3"):
        span.full_of(3)
    assert span.alone == Span(3, 1)


def test_what_blocks_do_not_compute() -> None:
    """A mask of queries and keys, queries in the middle of a static cache, and tokens that see each other there."""
    inputs, _ = next(cases((1, 2, 2, 5, 9), None))
    place = Call(x=inputs.query, start=4)
    assert windows.fits(inputs, place)
    assert not windows.fits(inputs, Call(x=inputs.query, start=torch.tensor(4)))
    assert not windows.fits(inputs, Call(x=inputs.query, start=2))
    assert not windows.fits(inputs, Call(x=inputs.query))
    given = Masks(queries=5, keys=9, device=torch.device("cpu"), given=torch.ones(1, 1, 5, 9, dtype=torch.bool))
    free = Masks(queries=5, keys=9, device=torch.device("cpu"), key_mask=torch.ones(1, 9, dtype=torch.bool))
    for masks in (given, free):
        assert not windows.fits(Inputs(*inputs.three, scaling=1.0, masks=masks, dropout=0.0), place)


LENGTH = 300


@pytest.mark.parametrize(
    ("variant", "family", "padded"),
    [
        ("window", "llama", False),
        ("outeffhop+window", "bert", True),
        ("sparsemax+window", "llama", True),
        ("sink+window", "bert", False),
    ],
)
def test_no_tensor_of_queries_and_keys(variant: str, family: str, padded: bool) -> None:
    options = {"window": 9} if variant == "window" else {"window": {"window": 9}}
    model = perturb(patch_model(fresh(family, torch.float32, max_position_embeddings=LENGTH), variant, **options))
    side = {"llama": "left", "bert": "right"}[family]
    batch = zoo.inputs(family, batch=2, length=LENGTH, padded=side if padded else None)
    with Recorder() as seen:
        zoo.output(model(**batch)).sum().backward()
    assert not [shape for shape in seen.shapes if sum(size >= LENGTH for size in shape) > 1]
    with torch.no_grad(), Recorder() as seen:
        model(**batch, output_attentions=True)
    assert [shape for shape in seen.shapes if sum(size >= LENGTH for size in shape) > 1], (
        "the weights are such a tensor"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_the_mask(dtype: torch.dtype) -> None:
    for inputs, span in itertools.islice(cases(SHAPES[1], "left"), 8):
        exact = slow(inputs, span)
        half = Inputs(
            *(tensor.detach().to(dtype) for tensor in inputs.three), scaling=0.3, masks=inputs.masks, dropout=0.0
        )
        call = Call(x=half.query, start=0)
        blocks = windows.attend(half, span)
        masked = reference(Places(), windows.narrowed(half, span, call), call)[0]
        assert blocks.dtype == dtype
        assert (blocks - exact).norm() <= 2 * (masked - exact).norm()


def test_dropout_keeps_the_mean() -> None:
    inputs, _ = next(cases((1, 2, 2, 10, 10), None))
    dropping = Inputs(*(tensor.detach() for tensor in inputs.three), scaling=0.3, masks=inputs.masks, dropout=0.5)
    torch.manual_seed(0)
    drawn = torch.stack([windows.attend(dropping, Span(3, 1)) for _ in range(4000)])
    wanted = windows.attend(inputs, Span(3, 1)).detach()
    assert drawn.std(0).max() > 0.1
    assert float((drawn.mean(0) - wanted).abs().max()) < 5 * float(drawn.std(0).max()) / 4000**0.5


class Made(TorchDispatchMode):
    """Inside, the memory that operations make; `held` is what of it still exists."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(made) if isinstance(tensor, Tensor)):
            self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return made

    @property
    def held(self) -> int:
        return sum(size for made, size in self.sizes.items() if not made.expired())


def test_a_backward_pass_makes_the_blocks_again() -> None:
    """Between the passes, the inputs, the heads and one mask are held, and no copy of the keys and values."""
    three = [torch.randn(1, 2, 512, 8, requires_grad=True) for _ in range(3)]
    masks = Masks(queries=512, keys=512, device=torch.device("cpu"), causal=True)
    inputs, span = Inputs(*three, scaling=0.3, masks=masks, dropout=0.0), Span(16, 4)
    with Made() as made:
        heads = windows.attend(inputs, span)
    blocks, inside = windows.folded(inputs, span)
    mask = inside.masks.given
    assert mask is not None
    held = heads.nbytes + mask.nbytes + sum(tensor.nbytes for tensor in three)  # a view of an input is its memory
    assert held <= made.held < held + inside.key.nbytes
    assert blocks.count == 8


def test_a_backward_pass_takes_the_kernels_of_the_forward_pass() -> None:
    inputs, span = next(cases((2, 4, 2, 17, 17), "left"))
    wanted = slow(inputs, span)
    with sdpa_kernel(SDPBackend.MATH):
        got = windows.attend(inputs, span)
    assert_equal(inputs, got, wanted)


def test_dropout_is_that_of_the_forward_pass() -> None:
    """The heads are linear in the values: their product with the gradient is the sum of the heads."""
    inputs, span = next(cases((1, 2, 2, 10, 10), None))
    dropping = Inputs(*inputs.three, scaling=0.3, masks=inputs.masks, dropout=0.5)
    heads = windows.attend(dropping, span)
    total = heads.sum()
    (slope,) = torch.autograd.grad(total, [inputs.value])
    assert float((slope * inputs.value).sum().detach() - total.detach()) == pytest.approx(0, abs=EXACT)
    assert float(total.detach()) != pytest.approx(float(windows.attend(inputs, span).sum().detach()))
