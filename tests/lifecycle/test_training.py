"""Training: dropout, modes, optimizers, and the random numbers of the rest of the program."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from hf_attn_swap import list_variants, patch_model, set_strength
from hf_attn_swap.kernels import dispatch
from hf_attn_swap.layer.registry import parse
from tests import zoo
from tests.contract.cells import DEEP, FAMILY_NAMES, label, swap_in
from tests.contract.harness import batch_of, fresh, perturb, swaps
from tests.harness.one_swap import WITH_PARAMETERS
from tests.harness.places import in_turn, one_per_place, turns

ATTENTION = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
HIDDEN = ("hidden_dropout_prob", "resid_pdrop", "dropout")


def dropping(name: str, names: tuple[str, ...], rate: float = 0.5) -> Any:
    """A family with one kind of dropout alone, None where it has no such kind."""
    config = fresh(name).config.to_dict()
    others = {key: 0.0 for key in (*ATTENTION, *HIDDEN, "embd_pdrop") if key in config}
    own = {key: rate for key in names if key in config}
    return fresh(name, torch.float32, **{**others, **own}).train() if own else None


def seeded(model: Any, batch: dict[str, Any], seed: int) -> torch.Tensor:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return zoo.output(model(**batch))


KINDS = [(name, kind) for name in FAMILY_NAMES for kind in (ATTENTION, HIDDEN) if dropping(name, kind) is not None]


@pytest.mark.parametrize(
    ("name", "kind", "variant"),
    [(*row, variant) for row, variant in turns(KINDS, list_variants())],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_dropout(name: str, variant: str, kind: tuple[str, ...]) -> None:
    """Active in training alone, repeatable by seed, stock bits at strength 0; SimpleTRON has no weights to drop."""
    model, batch = dropping(name, kind), batch_of(name, torch.float32)
    stock = seeded(model, batch, 1)
    assert not torch.equal(stock, seeded(model, batch, 2))
    perturb(patch_model(model, variant, strength=0.0))
    assert torch.equal(seeded(model, batch, 1), stock)
    for strength in (0.5, 1.0):
        set_strength(model, strength)
        first = seeded(model, batch, 1)
        assert torch.isfinite(first).all()
        assert torch.equal(seeded(model, batch, 1), first)
        without_weights = kind is ATTENTION and strength == 1 and any(cls.replaces for cls in parse(variant))
        assert torch.equal(seeded(model, batch, 2), first) == without_weights
    model.eval()
    assert torch.equal(seeded(model, batch, 1), seeded(model, batch, 2))


def assert_weights_keep_their_mean(name: str, variant: str, strength: float) -> None:
    """Over many draws the heads' mean is that of evaluation, and their variance that of weights kept with p and 1/p.

    Var = (1 / p - 1) sum_j w_j^2 v_j^2 with p = 1/2, once per weight, after everything that changes the weights.
    """
    rates = {key: 0.5 for key in ATTENTION if key in fresh(name).config.to_dict()}
    model = patch_model(fresh(name, num_hidden_layers=1, **rates), variant, strength=strength)
    batch = {key: value[:1].repeat(2000, 1) for key, value in batch_of(name).items()}
    seen: list[torch.Tensor] = []
    (swap,) = swaps(model)
    swap.register_forward_hook(lambda module, args, output: seen.extend((output[0], args[0].value)))
    for train in (False, True):
        seeded(model.train(train), batch, 3)
    (evaluated, value), (drawn, _) = seen[:2], seen[2:]
    with torch.no_grad():
        weights = model.eval()(**{key: tensor[:1] for key, tensor in batch.items()}, output_attentions=True).attentions[
            0
        ]
    heads = weights.shape[1]
    values = value[:1].repeat_interleave(heads // value.shape[1], 1)
    spread = (weights.square() @ values.square()).transpose(1, 2)[0]
    error = (spread / len(drawn)).sqrt() + 1e-12
    assert float(((drawn.mean(0) - evaluated[0]).abs() / error).max()) < 6
    some = spread > 1e-6 * spread.max()
    ratio = drawn.var(0)[some] / spread[some]
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.25


LINEAR_IN_WEIGHTS = [  # what drops weights, and reads them out as they are
    name for name in list_variants() if not any(cls.replaces or "read" in cls.places for cls in parse(name))
]


@pytest.mark.parametrize(
    ("variant", "name", "strength"),
    [(variant, *call) for variant, call in turns(LINEAR_IN_WEIGHTS, list(zip(DEEP, (0.5, 1.0), strict=True)))],
)
def test_dropped_weights_keep_their_mean(name: str, variant: str, strength: float) -> None:
    """By the fused form or the readable one, with a mask by the causal flag and without any."""
    assert_weights_keep_their_mean(name, variant, strength)


@pytest.mark.parametrize("name", DEEP)
def test_dropped_weights_of_long_sequences_keep_their_mean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carried scores that are never held: a block of queries at a time."""
    monkeypatch.setattr(dispatch, "LONG", 1)
    assert_weights_keep_their_mean(name, "modern_hopfield", 1.0)


@pytest.mark.parametrize("cell", [(name, {}) for name in WITH_PARAMETERS], ids=label)
def test_random_numbers_are_left_alone(cell: Any) -> None:
    """Patching draws from its own generator: global state stays, and the same call gives the same parameters."""
    torch.manual_seed(5)
    random.seed(5)
    before, own = torch.get_rng_state(), random.getstate()
    first = swap_in(fresh("bert"), cell[0], **cell[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == own
    torch.manual_seed(6)
    second = swap_in(fresh("bert"), cell[0], **cell[1])
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("variant", WITH_PARAMETERS)
def test_an_optimizer_from_before_is_warned_about(variant: str) -> None:
    model = fresh("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="optimizer you already made"):
        patch_model(model, variant)
    assert optimizer.param_groups


@pytest.mark.parametrize("variant", one_per_place())
def test_no_optimizer_warning_without_a_reason(variant: str) -> None:
    other = torch.optim.SGD(fresh("bert").parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = patch_model(fresh("bert"), variant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in model.parameters()} <= held
    assert other.param_groups


@in_turn()
def test_training_moves_every_parameter(name: str, variant: str) -> None:
    """A few steps from the neutral start, at half strength: the loss falls and every parameter of the swap moves."""
    model, batch = patch_model(fresh(name), variant, strength=0.5).train(), batch_of(name)
    target = zoo.output(fresh(name)(**batch)).detach() + 0.3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    started = {key: p.detach().clone() for key, p in model.named_parameters() if ".attn_swap." in key}
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (zoo.output(model(**batch)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for key, parameter in model.named_parameters():
        assert key not in started or not torch.equal(parameter, started[key]), key


def test_patching_again_says_what_is_lost() -> None:
    """A gate that has trained, and a mark of weights that were trained for the swap, which the new swap keeps."""
    model = patch_model(fresh("bert"), "gated")
    with torch.no_grad():
        swaps(model)[0].gated.gate.bias.add_(1.0)
    swaps(model)[1].retrained = True
    with pytest.warns(UserWarning, match="lose the converted gated") as caught:
        patch_model(model, "belief")
    told = " ".join(str(warning.message) for warning in caught)
    assert "layers [0] lose the converted gated (trained parameters)" in told
    assert "layers [1]" in told
    assert "layers [2]" not in told
    assert [swap.retrained for swap in swaps(model)] == [False, True, False]


@pytest.mark.parametrize("variant", WITH_PARAMETERS)
def test_patching_an_untrained_swap_again_loses_nothing(variant: str) -> None:
    model = patch_model(fresh("bert"), variant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, "belief")


@pytest.mark.parametrize("variant", WITH_PARAMETERS)
def test_another_default_device(variant: str) -> None:
    """New parameters are drawn on the model's device, with equal values, whatever device is the default."""
    usual, other = patch_model(fresh("bert"), variant), fresh("bert")
    with torch.device("meta"):
        patch_model(other, variant)
    assert all(torch.equal(one, two) for one, two in zip(usual.parameters(), other.parameters(), strict=True))
