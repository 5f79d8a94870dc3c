"""Fused forms in whole passes: shared work runs once per pass, and autocast and a compiler give the right result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import bidirectional_mask_function

from hf_attn_swap import list_variants, patch_model, set_strength
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.functional import CHUNK
from hf_attn_swap.kernels import dispatch, hopfield, linear
from hf_attn_swap.kernels import softmax_n as kernel
from hf_attn_swap.kernels.dispatch import Form, Setting
from hf_attn_swap.layer.compute import ORDINARY
from hf_attn_swap.wiring import seam
from tests import zoo
from tests.contract.cells import DEEP, is_linear
from tests.contract.harness import (  # fmt: skip
    LENGTH,
    TOLERANCE,
    assert_same,
    batch_of,
    distance,
    fresh,
    padding_side,
    perturb,
    real,
    run_all,
    swaps,
)
from tests.harness.places import turns

from .derivatives import KINDS

EXACT = TOLERANCE[torch.float64]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_mask_is_made_once_per_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(fresh(family), "outeffhop")
    given = []
    run = kernel.softmax_n_attention
    monkeypatch.setattr(kernel, "softmax_n_attention", lambda *args: given.append(args[3]) or run(*args))
    model(**zoo.inputs(family, batch=2, length=7, padded="left"))
    assert len(given) == model.config.num_hidden_layers > 1
    assert given[0].dtype == torch.float64
    assert all(mask is given[0] for mask in given)


@pytest.mark.parametrize("train", [False, True])
def test_what_is_blocked_is_worked_out_once_per_pass(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths beyond the small integers, which Python holds as one object each, included."""
    model = patch_model(fresh("llama", torch.float32, max_position_embeddings=300), "modern_hopfield")
    worked_out = []
    once = Masks.once

    def watched(masks: Masks, kind: tuple[Any, ...], make: Any) -> Any:
        return once(masks, kind, lambda: worked_out.append(kind[0]) or make())

    monkeypatch.setattr(Masks, "once", watched)
    with torch.set_grad_enabled(train):
        model(**zoo.inputs("llama", batch=2, length=290, padded="left"))
    assert worked_out.count("blocked") == 1 < model.config.num_hidden_layers


@pytest.mark.parametrize("name", KINDS)
def test_the_form_is_decided_once_per_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(fresh("llama", torch.float32, max_position_embeddings=200), name)
    decided = []
    of = dispatch.Setting.of
    monkeypatch.setattr(dispatch.Setting, "of", lambda *given: decided.append(1) or of(*given))
    model(**zoo.inputs("llama", batch=1, length=150))
    nothing_to_decide = all(
        swap.places() is ORDINARY and not swap.replaces for swap in swaps(model)
    )  # the stock function runs
    assert len(decided) == (0 if nothing_to_decide else model.config.num_hidden_layers)


@pytest.mark.parametrize(
    ("facts", "form"),
    [
        ({}, Form.BLOCKS),
        ({"causal": True, "tokens": (CHUNK + 1, CHUNK + 1)}, Form.BLOCKS),
        ({"causal": True, "tokens": (CHUNK, 2 * CHUNK)}, Form.PRODUCTS),
        ({"causal": False, "tokens": (1000, 1000)}, Form.PRODUCTS),
        ({"causal": True, "tokens": (1000, 1000), "recorded": True}, Form.PRODUCTS),
        ({"device": "cuda"}, Form.PRODUCTS),
        ({"dtypes": (torch.float32, torch.float32, torch.float64)}, Form.PRODUCTS),
    ],
)
def test_the_form_of_linear_attention(facts: dict[str, Any], form: Form) -> None:
    assert dispatch.linear_form(Setting(**{"device": "cpu", "dtypes": (torch.float32,), **facts})) is form


@pytest.mark.parametrize(("length", "blocks"), [(CHUNK, 0), (CHUNK + 1, 1)])
def test_linear_attention_runs_the_form_that_was_chosen(
    length: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    attend = linear.attend
    monkeypatch.setattr(linear, "attend", lambda *args, **kwargs: ran.append(1) or attend(*args, **kwargs))
    model = patch_model(fresh("llama", torch.float32, max_position_embeddings=200), "simpletron_resl")
    with torch.no_grad():
        wanted = model(**zoo.inputs("llama", batch=1, length=length), use_cache=False).logits
        assert len(ran) == blocks * model.config.num_hidden_layers
        got = model(**zoo.inputs("llama", batch=1, length=length), use_cache=True).logits  # onto a state
    assert len(ran) == 2 * blocks * model.config.num_hidden_layers
    torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_a_compiler_is_given_the_general_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans memory by itself, and would unroll the blocks of a long sequence."""
    model = perturb(patch_model(fresh("bert", num_hidden_layers=2), "modern_hopfield"))
    batch = zoo.inputs("bert", batch=2, length=9)
    wanted = model(**batch).logits
    monkeypatch.setattr(dispatch, "LONG", 9)
    monkeypatch.setattr(hopfield, "attend_long", None)
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager", fullgraph=True)(**batch).logits
    torch._dynamo.reset()
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["simpletron_resl", "modern_hopfield", "outeffhop", "entmax15", "clipped_softmax"])
def test_autocast_over_several_blocks(name: str) -> None:
    """Operators of ours are opaque to autocast: inside, products must not be cast one by one."""
    model = patch_model(fresh("llama", torch.float32, max_position_embeddings=200), name)
    batch = zoo.inputs("llama", batch=1, length=150)
    wanted = model(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        got = model(**batch).logits
    got.float().sum().backward()
    assert (got - wanted).norm() <= 0.03 * wanted.norm()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


class Waits(TorchDispatchMode):
    """How often the program waits for the device to read a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KINDS)
def test_a_float_mask_is_looked_into_once_per_pass(name: str) -> None:
    """A mask of numbers may hold a bias, which only the device knows: one question for all layers, not one each."""
    stock, model = fresh("bert"), patch_model(fresh("bert"), name)
    batch = zoo.inputs("bert", batch=2, length=7)
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    mask[..., -1] = torch.finfo(torch.float64).min
    batch["attention_mask"] = mask
    counts = []
    for module in (stock, model):
        with torch.no_grad(), Waits() as waits:
            module(**batch)
        counts.append(waits.count)
    assert counts[1] - counts[0] <= 1
    if is_linear(name):
        assert counts[1] - counts[0] == 1, "the mask was looked into"


def test_layers_under_different_masks_share_no_form_of_a_mask() -> None:
    """Each form that is kept for a pass remembers the mask that it was made from."""
    made: list[Any] = []
    one, other = (torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in (0, 1))
    given = [Masks(queries=4, keys=4, device=one.device, given=mask, made=made) for mask in (one, other, one, other)]
    for masks, mask in zip(given, (one, other, one, other), strict=True):
        added = masks.additive(torch.float32)[0]
        assert torch.equal(added == 0, mask)
        assert torch.equal(masks.allowed(), mask)
        blocked, blind = masks.blocked()
        assert torch.equal(blind, ~mask.any(-1, keepdim=True))
        assert torch.equal(blocked, ~mask & ~blind)
    assert len(made) == 2 * 3, "each form once for each of the two masks"
    causal = Masks(queries=4, keys=4, device=one.device, causal=True, made=made)
    assert torch.equal(causal.allowed(), torch.ones(4, 4, dtype=torch.bool).tril()[None, None])


def test_the_mask_function_asks_what_transformers_asks() -> None:
    """Under a tracer that is no compiler the values of a mask cannot be read: then the mask is always built."""
    config = patch_model(fresh("bert"), next(name for name in list_variants() if is_linear(name))).config
    full = torch.ones(2, 5, dtype=torch.bool)
    asked = {"config": config, "allow_is_bidirectional_skip": True, "mask_function": bidirectional_mask_function}
    assert seam.mask_for_swap(2, 5, 5, attention_mask=full, **asked) is None
    with FakeTensorMode() as mode:
        traced = seam.mask_for_swap(2, 5, 5, attention_mask=mode.from_tensor(full), **asked)
    assert traced is not None
    assert traced.shape == (2, 1, 1, 5)


@pytest.mark.parametrize(("family", "options"), [("bert", {}), ("llama", {"init": "first"}), ("vit", {})])
def test_the_general_form_of_carried_scores(family: str, options: dict[str, Any]) -> None:
    """Autocast leaves float64 as it is, but sends the layers another way: the same values and gradients.

    Masks with a causal order and without one, and none at all.
    """
    model = patch_model(fresh(family), "modern_hopfield", **options)
    batch = batch_of(family, padded=padding_side(family))
    wanted = run_all(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        got = run_all(model, batch)
    assert_same(got, wanted)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_rows_that_see_nothing_in_the_general_form(family: str) -> None:
    """They read zeros there as well."""
    model, batch = patch_model(fresh(family), "modern_hopfield"), batch_of(family)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[0, :, 2] = False
    batch |= {"attention_mask": mask}
    seen: list[torch.Tensor] = []
    swaps(model)[1].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    wanted = run_all(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run_all(model, batch), wanted)
    for heads in seen:
        assert not heads[0, 2].any()
        assert heads[0, 3].any()


STRENGTHS = [(1.0, 0.0, 1.0), (1.0, 0.5, 1.0), (0.5, 1.0, 0.0), (0.0, 1.0, 0.5)]


@pytest.mark.parametrize(("strengths", "family"), turns(STRENGTHS, DEEP))
def test_carrying_layers_of_different_strengths(family: str, strengths: tuple[float, ...]) -> None:
    """A fused layer leaves its scores to a readable one above, and takes them from one below; the mask goes along."""
    model, batch = patch_model(fresh(family), "modern_hopfield"), batch_of(family, padded=padding_side(family))
    layers = range(len(swaps(model)))
    for layer in layers:
        set_strength(model, strengths[layer], layers=layer)
    wanted = run_all(model, batch, output_attentions=True)
    assert_same(run_all(model, batch), wanted)
    with torch.no_grad():
        got = real(zoo.output(model(**batch)), batch)
    assert distance(got, wanted[0]) <= EXACT


BY_SDPA = ["outeffhop", "sink", "sink+outeffhop", "window", "modern_hopfield"]
CALLS = [("bert", 0.5, False), ("llama", 1.0, True), ("bert", 1.0, True), ("llama", 0.5, False)]


@pytest.mark.parametrize(("name", "call"), turns(BY_SDPA, CALLS, 2), ids=str)
def test_without_the_flash_kernel(name: str, call: tuple[str, float, bool]) -> None:
    """PyTorch's plain SDPA, for tensors that the fused kernel does not take: the readable form's values and slopes."""
    family, strength, padded = call
    model = perturb(patch_model(fresh(family), name, strength=strength))
    batch = batch_of(family, padded=padding_side(family) if padded else None)
    wanted = run_all(model, batch, output_attentions=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got = run_all(model, batch)
    assert_same(got, wanted)


@pytest.mark.parametrize("name", [name for name in list_variants() if is_linear(name)])
def test_a_float_mask_is_not_read_while_a_program_is_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer records what was read as a constant, so nothing may be read from the mask."""
    model = patch_model(fresh("bert"), name).base_model
    batch = zoo.inputs("bert", batch=2, length=7)
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    mask[..., -1] = torch.finfo(torch.float64).min
    wanted = model(batch["input_ids"], mask).last_hidden_state
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    with torch.no_grad(), Waits() as waits:
        got = model(batch["input_ids"], mask).last_hidden_state
    assert waits.count == 0
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("scheme", ["forward_backward", "forward_forward"])
def test_a_pass_without_gradients_forgets_only_what_no_layer_reads(scheme: str) -> None:
    """Without gradients, a layer lets go of the scores of the layer below, and keeps its own."""
    model, batch = patch_model(fresh("llama"), "modern_hopfield", scheme=scheme), batch_of("llama")
    wanted = model(**batch).logits
    kept: list[tuple[list[int], list[int]]] = []

    def note(module: Any, args: Any, output: Any) -> None:
        context = args[1].context
        kept.append((list(context.scores), list(context.raw)))

    for swap in swaps(model):
        swap.register_forward_hook(note)
    with torch.no_grad():
        got = model(**batch).logits
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
    assert all(len(scores) <= 1 and len(raw) <= 1 for scores, raw in kept)
