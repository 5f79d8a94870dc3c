"""A neutral start scales the skip where the norm's scale is free, and is then the same as other weights of the norm."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as T
from torch import nn

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate, neutral_start
from hf_attn_swap.conversion.neutral import EXPONENT
from hf_attn_swap.families import Site, sites
from hf_attn_swap.layer.registry import parse, parse_options
from hf_attn_swap.layer.swap import Swap
from tests.contract.cells import DEFAULT_CELLS, EXTRA_CELLS, FAMILY_NAMES, Cell, composes, label, swap_in
from tests.contract.harness import assert_identical, batch_of, forward, fresh, refused, run, swaps
from tests.generic import harness as generic
from tests.generic.harness import SUBJECTS

from .geometry import SIZES
from .left_behind import modes_and_hooks

# PEFT reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
DTYPES = (torch.float32, torch.bfloat16)
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
SMALL |= dict(max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, num_key_value_heads=4)

STREAM = "the input is the residual stream itself (post-norm)"
BESIDE = "the norm in front also feeds something else than this attention"
NO_NORM = "no norm was found right in front of this attention"
LEFT = {"roberta": STREAM, "electra": STREAM, "bert_cross": STREAM}  # others start neutrally
LEFT["distilbert"] = BESIDE
FIRST_LEFT = {"modernbert": BESIDE}  # the norm of the embeddings is the first layer's input and the residual stream


def with_skip(cells: tuple[Cell, ...], wanted: bool = True) -> list[Any]:
    """The cells of variants and options whose layers add a multiple of their input, or (False) the other cells."""
    found = []
    for name, options in cells:
        classes = parse(name)
        if Swap(classes, parse_options(classes, options), SIZES).adds_input is wanted:
            found.append(pytest.param((name, options), id=label((name, options))))
    return found


SKIPS = with_skip(DEFAULT_CELLS)
MORE_SKIPS = with_skip(EXTRA_CELLS)
WITHOUT = with_skip(DEFAULT_CELLS + EXTRA_CELLS, wanted=False)


def post_norm(name: str) -> bool:
    return sites(fresh(name, torch.float32))[0].family.post_norm


PRE_NORM = [name for name in FAMILY_NAMES if not post_norm(name)]


def exponents(model: Any) -> list[int | None]:
    return [None if swap.neutral_start is None else swap.neutral_start.exponent for swap in swaps(model)]


def in_config(model: Any) -> list[int | None]:
    """The exponent in the config's block, layer by layer."""
    found = {i: entry.get("neutral_start") for entry in model.config.attn_swap["swaps"] for i in entry["layers"]}
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("cell", SKIPS)
def test_which_layers(name: str, cell: Cell) -> None:
    model = patch_model(fresh(name, torch.float32), cell[0])
    count = len(swaps(model))
    report = neutral_start(model)
    if post_norm(name):
        assert report.layers == ()
        assert set(report.left) == set(range(count))
        assert all(STREAM in reason for reason in report.left.values())
        assert "left alone" in str(report)
        wanted: Any = None
    else:
        assert report.layers == tuple(range(count))
        assert not report.left
        assert str(report) == f"The skip of {count} layers starts at 2^-{EXPONENT} of the input."
        wanted = EXPONENT
    assert exponents(model) == in_config(model) == [wanted] * count


@pytest.mark.parametrize("name", SUBJECTS)
def test_which_layers_of_other_architectures(name: str) -> None:
    """With a batch, and with a made-up one where the model reads tokens or images."""
    if not generic.behind_the_interface(name) or generic.refusal(name, "modern_hopfield") is not None:
        pytest.skip("this transformers does not let modern_hopfield into this architecture")
    model = patch_model(generic.build(name, torch.float32), "modern_hopfield", alpha_prime=0.0)
    report = neutral_start(model, generic.batch_of(name, torch.float32))
    if name in LEFT:
        assert all(LEFT[name] in reason for reason in report.left.values())
        assert exponents(model) == [None] * len(swaps(model))
    else:
        left = {0: FIRST_LEFT[name]} if name in FIRST_LEFT else {}
        assert report.left == left
        assert report.layers == tuple(range(len(left), len(swaps(model))))
    if name.startswith("whisper"):
        with refused("reads input_features; pass a batch"):
            neutral_start(model)
    else:
        assert neutral_start(model) == report


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("Phi", {}, BESIDE),  # attention and MLP side by side, behind one norm
        ("Cohere", {}, BESIDE),
        ("GPTNeoX", {"use_parallel_residual": True}, None),  # side by side, each behind a norm of its own
        ("Olmo", {}, NO_NORM),  # a norm without parameters
        ("Olmo2", {}, NO_NORM),  # norms behind attention and MLP alone
        ("OPT", {"do_layer_norm_before": False, "ffn_dim": 48}, BESIDE),
    ],
)
def test_where_a_norm_is_shared_or_absent(name: str, more: dict[str, Any], reason: str | None) -> None:
    model = getattr(T, f"{name}ForCausalLM")(getattr(T, f"{name}Config")(**SMALL, **more)).eval()
    report = neutral_start(patch_model(model, "modern_hopfield", alpha_prime=0.0))
    assert len(report.left) + len(report.layers) == 2
    if reason is None:
        assert not report.left
    else:
        assert reason in report.left[1]
        assert report.layers == ()


@pytest.mark.parametrize("inside", [nn.GELU(), nn.LayerNorm(32)], ids=["gelu", "norm"])
def test_an_attention_that_reads_its_input_by_more_than_matrices(inside: nn.Module) -> None:
    """No other scale of the norm is the same function there, so the skip would leave the paper's formula."""
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL)).eval()
    core = model.model.layers[1].self_attn
    core.q_proj = nn.Sequential(inside, core.q_proj)
    patch_model(model, "modern_hopfield", alpha_prime=0.0)
    report = neutral_start(model)
    assert report.layers == (0,)
    assert report.left == {1: "this attention reads the norm's output not by matrices alone"}
    assert exponents(model) == [EXPONENT, None]


@pytest.mark.parametrize("name", ["Phi", "GPTNeoX"])
def test_a_frozen_model_answers_as_one_that_trains(name: str) -> None:
    model = getattr(T, f"{name}ForCausalLM")(getattr(T, f"{name}Config")(**SMALL)).eval()
    patch_model(model, "modern_hopfield", alpha_prime=0.0)
    trained = neutral_start(model)
    assert neutral_start(model.requires_grad_(False)) == trained
    with torch.inference_mode():
        assert neutral_start(model) == trained
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("cell", SKIPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stock_model_stays(name: str, cell: Cell, dtype: torch.dtype) -> None:
    """Strength 0 and the unpatched model, in values and gradients, and every weight: to the bit."""
    batch, stock = batch_of(name, dtype), fresh(name, dtype)
    wanted = run(stock, batch)
    model = patch_model(fresh(name, dtype), cell[0])
    paper = run(model, batch)
    neutral_start(model)
    weights = stock.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items() if key in weights)
    if not post_norm(name):
        assert not torch.equal(run(model, batch)[0], paper[0])
    assert_identical(run(set_strength(model, 0.0), batch), wanted)
    neutral_start(set_strength(model, 1.0), exponent=0)
    assert exponents(model) == in_config(model) == [None] * len(swaps(model))
    assert_identical(run(model, batch), paper)
    neutral_start(model)
    assert_identical(run(unpatch_model(model), batch), wanted)
    assert not hasattr(model.config, "attn_swap")


def readers(model: Any, batch: Any) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Of every attention: the norm in front, and the modules inside that multiply its output by a matrix."""
    norms: dict[int, nn.Module] = {}
    kept, found = [], []

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        norms[id(output)] = module
        kept.append(output)

    def reads(module: nn.Module, args: Any, kwargs: Any, site: Site) -> None:
        x = site.input(args, kwargs)
        found.append((norms[id(x)], []))
        for inside in site.container.modules():
            if getattr(inside, "weight", None) is not None:
                hooks.append(inside.register_forward_pre_hook(functools.partial(read, x=x, into=found[-1][1])))

    def read(module: nn.Module, args: Any, x: Any, into: list[nn.Module]) -> None:
        if args[0] is x:
            into.append(module)

    hooks = [m.register_forward_hook(leaves) for m in model.modules() if type(m).__name__.endswith("Norm")]
    for site in sites(model):
        hooks.append(site.core.register_forward_pre_hook(functools.partial(reads, site=site), with_kwargs=True))
    forward(model, batch)
    for hook in hooks:
        hook.remove()
    return found


def fold(model: Any, exponent: int, batch: Any) -> None:
    """Scale every norm by 2^-k and whatever reads it by 2^k, a gate included: other weights of the same function."""
    with torch.no_grad():
        for swap, (norm, read) in zip(swaps(model), readers(model, batch), strict=True):
            assert read
            gates = [getattr(each, "hidden", getattr(each, "gate", None)) for each in swap.variants]
            first = [gate.weight for gate in gates if isinstance(gate, nn.Module) and hasattr(gate, "weight")]
            for parameter in norm.parameters():
                parameter.mul_(2.0**-exponent)
            for weight in {id(weight): weight for weight in (*(each.weight for each in read), *first)}.values():
                weight.mul_(2.0**exponent)


def stir(model: Any) -> Any:
    """Values for the norms and the gates, which are 1 and 0 in a fresh model."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".attn_swap." in key or parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


COMPOSED = [pytest.param(("gated+modern_hopfield", {"gated": {"kind": kind}}), id=kind) for kind in ("linear", "mlp")]
assert composes(("gated", "modern_hopfield"))


FOLDS = [  # all cells on one family, the plain ones in fp32 on all; the others take long
    pytest.param(name, cell.values[0], dtype, id=f"{name}-{cell.id}-{dtype}", marks=() if fast else pytest.mark.slow)
    for name in PRE_NORM
    for cell in (*SKIPS, *MORE_SKIPS, *COMPOSED)
    for dtype in DTYPES
    for fast in [name == "llama" or (cell in SKIPS and dtype == torch.float32)]
]


@pytest.mark.parametrize(("name", "cell", "dtype"), FOLDS)
def test_is_another_scale_of_the_norm(name: str, cell: Cell, dtype: torch.dtype) -> None:
    """Bit for bit the model whose norms are 2^-k as large and whose projections are 2^k as large, with the whole skip.

    `readers` finds the norm and the projections by itself.
    """
    variant, options = cell
    batch = batch_of(name, dtype)
    other = stir(swap_in(fresh(name, dtype), variant, **options))
    model = stir(swap_in(fresh(name, dtype), variant, **options))
    neutral_start(model)
    stock = forward(set_strength(other, 0.0), batch)
    fold(other, EXPONENT, batch)
    assert torch.equal(forward(other, batch), stock)
    for strength in (1.0, 0.5):
        got = forward(set_strength(model, strength), batch)
        assert torch.equal(got, forward(set_strength(other, strength), batch))
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("cell", SKIPS)
def test_saved_and_loaded(name: str, cell: Cell, tmp_path: Path) -> None:
    model, batch = patch_model(fresh(name, torch.float32), cell[0], strength=0.7), batch_of(name, torch.float32)
    neutral_start(model, exponent=7)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert exponents(loaded) == exponents(model) == in_config(loaded)
    assert loaded.config.attn_swap == model.config.attn_swap
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    stock = fresh(name, torch.float32)
    assert torch.equal(forward(unpatch_model(loaded), batch), forward(stock, batch))


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("cell", SKIPS)
@pytest.mark.parametrize("neutral", [True, False])
def test_calibration_starts_neutrally(name: str, cell: Cell, neutral: bool) -> None:
    """The report names the skip only where it stays."""
    model = patch_model(fresh(name, torch.float32), cell[0], strength=0.5)
    batches = [batch_of(name, torch.float32, seed=seed) for seed in range(12)]
    report = calibrate(model, iter(batches), progress=False, neutral=neutral)
    skip = swaps(model)[0].variants[0].shares[0]
    started = neutral and not post_norm(name)
    assert in_config(model) == [EXPONENT if started else None] * len(swaps(model))
    again = calibrate(patch_model(fresh(name, torch.float32), cell[0]), batches, progress=False, neutral=neutral)
    assert report.layers == again.layers, "a batch is counted once, and an iterator of batches is read once"
    if post_norm(name):
        assert report.left == 0
    else:
        assert report.left == (skip * 2**-EXPONENT if neutral else skip)
    assert ("no fit can undo" in report.summary()) == (not post_norm(name) and not neutral)


def test_a_skip_that_the_weights_know_stays() -> None:
    """Weights that were trained with a skip keep it, and nothing is left."""
    model = patch_model(fresh("llama"), "simpletron_resl")
    report = calibrate(
        model, [batch_of("llama", seed=seed) for seed in range(12)], source="simpletron_res", progress=False
    )
    assert exponents(model) == [None] * 3
    assert report.left == 0


def test_a_calibration_that_fails_leaves_no_neutral_start() -> None:
    model = patch_model(fresh("llama"), "modern_hopfield")
    for batches in ([], [{"input_ids": torch.ones(1, 2, dtype=torch.long)}]):
        with pytest.raises(ValueError, match=r"there are no batches|2 real tokens are too few"):
            calibrate(model, batches, progress=False)
        assert exponents(model) == in_config(model) == [None] * 3
    neutral_start(model, exponent=3)
    with refused("has parameters or scores of its own"):
        calibrate(model, [batch_of("llama")], source="belief_star", progress=False)
    assert exponents(model) == in_config(model) == [3] * 3


@pytest.mark.parametrize("cell", WITHOUT)
def test_a_variant_without_a_skip(cell: Cell) -> None:
    """Among them modern_hopfield with skip='residual', which adds something else than its input."""
    model = swap_in(fresh("llama"), cell[0], **cell[1])
    with refused("no swapped layer adds its input"):
        neutral_start(model)
    assert exponents(model) == [None] * 3
    calibrates = all(variant.shares[1] for variant in swaps(model)[0].variants)
    if calibrates:
        calibrate(model, [batch_of("llama", seed=seed) for seed in range(2)], progress=False)
        assert exponents(model) == [None] * 3


def test_the_residual_stream_is_no_multiple_of_the_input() -> None:
    assert "modern_hopfield-init=zero-skip=residual-scheme=forward_backward" in "\n".join(
        str(cell.id) for cell in WITHOUT
    )


def test_only_the_layers_with_a_skip() -> None:
    model = patch_model(
        patch_model(fresh("llama"), "modern_hopfield", alpha_prime=0.0, layers=[0, 2]), "belief", layers=[1]
    )
    assert neutral_start(model).layers == (0, 2)
    assert exponents(model) == in_config(model) == [EXPONENT, None, EXPONENT]


def test_refused() -> None:
    with refused("not patched"):
        neutral_start(fresh("llama"))
    model = patch_model(fresh("llama"), "modern_hopfield")
    for exponent in (-1, 61, 1.5, "10", True, None):
        with refused("exponent must be a whole number from 0 to 60, got"):
            neutral_start(model, exponent=exponent)
    for batch in ([], {}, torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"there are no batches|a batch is a dict of tensors"):
            neutral_start(model, batch)
    assert exponents(model) == [None] * 3
    for exponent in (1, 60):
        assert neutral_start(model, exponent=exponent).exponent == exponent


def test_copies_keep_it_and_a_second_swap_loses_it() -> None:
    batch = batch_of("llama", torch.float32)
    model = patch_model(fresh("llama", torch.float32), "simpletron_resl")
    neutral_start(model, exponent=4)
    wanted = forward(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward(twin, batch), wanted)
        assert exponents(twin) == in_config(twin) == [4] * 3
        neutral_start(twin, exponent=0)
        assert not torch.equal(forward(twin, batch), wanted)
    assert torch.equal(forward(model, batch), wanted)
    patch_model(model, "simpletron_resl", layers=[1])
    assert exponents(model) == in_config(model) == [4, None, 4]
    unpatch_model(model)
    assert exponents(patch_model(model, "simpletron_resl")) == [None] * 3


def test_every_copy_that_peft_keeps() -> None:
    model: Any = patch_model(fresh("llama"), "gated+modern_hopfield")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_swap"]))
    assert len(swaps(model)) == 6
    assert neutral_start(model).layers == (0, 1, 2)
    assert exponents(model) == [EXPONENT] * 6


def test_nothing_is_left_behind() -> None:
    """Modes, hooks, strengths and buffers are as before, also after an error on the way."""
    model = patch_model(fresh("llama"), "modern_hopfield", strength=0.3).train()
    model.model.layers[1].eval()
    paths = [path for path, _ in model.named_modules()]
    before = [modes_and_hooks(model.get_submodule(path)) for path in paths]
    neutral_start(model)
    with pytest.raises(IndexError):
        neutral_start(model, {"input_ids": torch.full((1, 3), 10**6)})
    assert [modes_and_hooks(model.get_submodule(path)) for path in paths] == before
    assert {(swap.strength, swap.phase.value) for swap in swaps(model)} == {(0.3, "between")}
