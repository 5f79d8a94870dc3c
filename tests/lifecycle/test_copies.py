"""Copies, pickles and threads: a swap works in each copy of the model, in another process and in several threads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from hf_attn_swap import describe, list_variants, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps
from tests.harness.places import in_turn, turns
from tests.harness.process import python


@in_turn()
def test_deep_copy(name: str, variant: str) -> None:
    """The copy gives the same; each computes with its own weights, strength and way back."""
    stock, batch = fresh(name), batch_of(name)
    model = perturb(patch_model(fresh(name), variant, strength=0.7))
    wanted = forward(model, batch)
    twin = copy.deepcopy(model)
    assert torch.equal(forward(twin, batch), wanted)
    assert str(describe(twin)) == str(describe(model))
    assert twin.config is not model.config
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(forward(twin, batch), wanted)
    emptied = forward(model, batch)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(forward(twin, batch), emptied)
    set_strength(model, 0.2)
    assert {swap.strength for swap in swaps(twin)} == {0.7}
    twin.load_state_dict(stock.state_dict(), strict=False)
    assert torch.equal(forward(unpatch_model(twin), batch), forward(stock, batch))
    assert swaps(model)
    assert not swaps(twin)


CHILD = """
import pickle, sys, torch
from pathlib import Path
for file in sorted(Path(sys.argv[1]).glob("*.pickle")):
    model, batch, wanted, rows = pickle.loads(file.read_bytes())
    with torch.no_grad():
        got = model(**batch)[0]
    assert torch.equal(got, wanted), file
    from hf_attn_swap import describe, set_strength, unpatch_model
    assert str(describe(model)) == rows, file
    with torch.no_grad():
        stock = set_strength(model, 0.0)(**batch)[0]
        assert torch.equal(unpatch_model(model)(**batch)[0], stock), file
    print(file.stem)
"""


def test_pickle_in_a_fresh_process(tmp_path: Path) -> None:
    made = set()
    for name, variant in turns(FAMILY_NAMES, list_variants()):
        model = perturb(patch_model(fresh(name, torch.float32), variant, strength=0.6))
        batch = batch_of(name, torch.float32)
        with torch.no_grad():
            wanted = model(**batch)[0]
        stem = f"{name}-{variant}"
        (tmp_path / f"{stem}.pickle").write_bytes(pickle.dumps((model, batch, wanted, str(describe(model)))))
        made.add(stem)
    assert set(python("-c", CHILD, tmp_path).stdout.split()) == made


# -- State dicts and configs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "fit", "parts"),
    [("outeffhop", "map", ["calibration"]), ("belief", "gain", ["calibration", "value_scale"])],
)
def test_a_state_dict_with_a_calibration_needs_a_calibrated_model(variant: str, fit: str, parts: list[str]) -> None:
    """torch alone would drop the values of a child that is None, and say that all keys match."""
    batches = [batch_of("llama", torch.float32, seed=seed) for seed in range(12)]
    fitted = patch_model(fresh("llama", torch.float32), variant)
    calibrate(fitted, batches, fit=fit, progress=False)
    state = fitted.state_dict()
    plain = patch_model(fresh("llama", torch.float32), variant)
    with pytest.raises(RuntimeError, match="Unexpected key") as error:
        plain.load_state_dict(state)
    assert [f"attn_swap.{part}." in str(error.value) for part in parts] == [True] * len(parts)
    copied = copy.deepcopy(fitted)
    assert not copied.load_state_dict(state).unexpected_keys
    assert torch.equal(forward(copied, batches[0]), forward(fitted, batches[0]))


@pytest.mark.parametrize("loaded", [False, True])
def test_what_the_user_changed_in_the_config_stays(loaded: bool, tmp_path: Path) -> None:
    model = patch_model(fresh("bert", torch.float32), "belief")
    if loaded:
        model.save_pretrained(tmp_path / "swapped")
        model = type(model).from_pretrained(tmp_path / "swapped")
    model.resize_token_embeddings(80, mean_resizing=False)
    model.config.id2label = {0: "no", 1: "yes"}
    unpatch_model(model)
    assert (model.config.vocab_size, model.config.id2label) == (80, {0: "no", 1: "yes"})
    assert not hasattr(model.config, "attn_swap")
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path / "stock")
    again = type(model).from_pretrained(tmp_path / "stock")
    assert torch.equal(forward(again, batch_of("bert")), forward(model, batch_of("bert")))
