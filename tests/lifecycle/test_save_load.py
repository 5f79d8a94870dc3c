"""Save, and load in a fresh process that only imports the package: exact for every family and variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hf_attn_swap import describe, list_variants, patch_model, set_strength, unpatch_model
from tests.contract.cells import DEEP, FAMILY_NAMES, OPTION_CELLS, PAIRS, label, swap_in
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps
from tests.harness.places import in_turn, one_per_place, turns
from tests.harness.process import python

from .steps import auto_class, heads


def hybrid(model: Any, variant: str) -> Any:
    """This variant on one layer at strength 0.3, the next one on another at full strength, the rest stock."""
    names = list_variants()
    other = names[(names.index(variant) + 1) % len(names)]
    count = sum(row.layer is not None for row in describe(model).rows)
    patch_model(model, variant, layers=[count - 1], strength=0.3)
    return perturb(patch_model(model, other, layers=[0]) if count > 1 else model)


def save(model: Any, folder: Path, **arguments: Any) -> None:
    """A checkpoint, with what a fresh process must compute from it."""
    name = model.config.model_type
    dtype = next(p.dtype for p in model.parameters())
    batch = batch_of(name, dtype)
    with torch.no_grad():
        out = model(**batch)[0]
    model.save_pretrained(folder / "model", **arguments)
    save_file({"out": out, **{f"in.{key}": value for key, value in batch.items()}}, folder / "expected.safetensors")
    (folder / "case.json").write_text(json.dumps({"auto": auto_class(model), "save": arguments}))


def reload(folder: Path, made: list[str]) -> None:
    """One fresh process loads and checks every checkpoint."""
    done = python("-m", "tests.lifecycle.reload_child", folder)
    assert sorted(done.stdout.split()) == sorted(made)


def test_fresh_process(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every variant, with options, on all layers; hybrids at strength 0.3; those again in bf16 and in shards.

    The families take turns.
    """
    made = []
    cells = [*({cell[0]: cell for cell in OPTION_CELLS}.values()), (PAIRS[0], {})]
    for name, cell in turns(FAMILY_NAMES, cells):
        made.append(f"{name}-{label(cell)}")
        save(perturb(swap_in(fresh(name, torch.float32), cell[0], **cell[1])), tmp_path / made[-1])
    for name, variant in turns(FAMILY_NAMES, one_per_place()):
        made.append(f"{name}-{variant}-hybrid")
        save(hybrid(fresh(name, torch.float32), variant), tmp_path / made[-1])
    for name, variant in turns(FAMILY_NAMES, one_per_place()):
        source = tmp_path_factory.mktemp("stock")
        fresh(name, torch.float32).save_pretrained(source)
        made.append(f"{name}-{variant}-bf16-shards")
        # `.to` would round rotary buffers too
        narrow = type(fresh(name)).from_pretrained(source, dtype=torch.bfloat16)
        save(hybrid(narrow, variant), tmp_path / made[-1], max_shard_size="8KB")
        assert len(list((tmp_path / made[-1] / "model").glob("model-*.safetensors"))) > 1
    reload(tmp_path, made)


@in_turn(times=2)
def test_loaded_model_can_be_unpatched(name: str, variant: str, tmp_path: Path) -> None:
    """Taking the swap out of a loaded checkpoint leaves the stock model, in computation and on disk."""
    batch = batch_of(name, torch.float32)
    stock = forward(fresh(name, torch.float32), batch)
    model = hybrid(fresh(name, torch.float32), variant)
    model.save_pretrained(tmp_path / "swapped")
    loaded = type(model).from_pretrained(tmp_path / "swapped", dtype="auto")
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    assert str(describe(loaded)) == str(describe(model))
    assert torch.equal(forward(set_strength(loaded, 0.0), batch), stock)
    unpatch_model(set_strength(loaded, 1.0))
    assert torch.equal(forward(loaded, batch), stock)
    assert not any("attn_swap" in key for key in loaded.state_dict())
    loaded.save_pretrained(tmp_path / "stock")
    written = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert not {"attn_swap", "attn_implementation"} & set(written)
    again, info = type(model).from_pretrained(tmp_path / "stock", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(forward(again, batch), stock)


@pytest.mark.parametrize("name", [*DEEP, "vit"])
def test_other_heads_load_from_the_checkpoint(name: str, tmp_path: Path) -> None:
    """The bare model and every other head, whose new weights may be missing; the swap must be whole."""
    model = perturb(patch_model(fresh(name, torch.float32), "belief_star", strength=0.3))
    model.save_pretrained(tmp_path)
    batch = batch_of(name, torch.float32)
    wanted = model.base_model(**batch)[0]
    stock = tmp_path / "stock"
    fresh(name, torch.float32).save_pretrained(stock)
    for auto, cls in heads(model.config).items():
        _, info = cls.from_pretrained(stock, output_loading_info=True)
        if any("attn" in key or "attention" in key for key in info["missing_keys"]):
            with pytest.raises(ValueError, match="missing weights of the swapped attention"):
                cls.from_pretrained(tmp_path)  # the stock checkpoint does not fit either (LLaMA's question answering)
            continue
        loaded, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
        assert len(swaps(loaded)) == len(swaps(model))
        assert {swap.strength for swap in swaps(loaded)} == {0.3}
        assert not [key for key in info["missing_keys"] if "attn_swap" in key]
        with torch.no_grad():
            got = loaded.base_model(**batch)[0]
        assert torch.equal(got, wanted), auto


@pytest.mark.parametrize("name", DEEP)
def test_a_head_loads_from_a_bare_checkpoint(name: str, tmp_path: Path) -> None:
    source = fresh(name, torch.float32)
    bare = next(
        iter(cls for auto, cls in heads(source.config).items() if auto in ("AutoModel", "AutoModelForTextEncoding"))
    )
    stock = bare(source.config)
    stock.save_pretrained(tmp_path / "stock")
    missing = type(source).from_pretrained(tmp_path / "stock", output_loading_info=True)[1]["missing_keys"]
    if len(missing) > len(stock.state_dict()) / 2:
        pytest.skip("this transformers cannot load its own bare checkpoint of this architecture into a head")
    model = perturb(patch_model(bare(source.config).eval(), "gated"))
    model.save_pretrained(tmp_path)
    batch = batch_of(name, torch.float32)
    loaded = type(source).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.base_model(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize("variant", ["belief_star", "simpletron_resl"])
def test_other_ways_to_load(variant: str, tmp_path: Path) -> None:
    """Through the config object, a device map, a dtype, a state dict, and with our own name given by hand."""
    model = perturb(patch_model(fresh("bert", torch.float32), variant, strength=0.3))
    model.save_pretrained(tmp_path)
    batch, cls = batch_of("bert", torch.float32), type(model)
    wanted = forward(model, batch)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert torch.equal(forward(cls.from_pretrained(tmp_path, config=config), batch), wanted)
    assert torch.equal(forward(cls.from_pretrained(tmp_path, config=config), batch), wanted)
    assert torch.equal(forward(cls.from_pretrained(tmp_path, device_map="cpu"), batch), wanted)
    assert torch.equal(forward(cls.from_pretrained(str(tmp_path), attn_implementation="hf_attn_swap"), batch), wanted)
    assert torch.equal(forward(cls.from_pretrained(pretrained_model_name_or_path=tmp_path), batch), wanted)
    narrow = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(forward(narrow, batch), forward(model.to(torch.bfloat16), batch))
    assert {float(swap.strength_value) for swap in swaps(narrow)} == {float(torch.tensor(0.3))}


WITHOUT = """
import sys, torch, transformers
for argument in sys.argv[1:]:
    folder, auto = argument.split("=")
    try:
        getattr(transformers, auto).from_pretrained(folder)
    except Exception as problem:
        assert "hf_attn_swap" in str(problem), problem
        print(folder)
assert "hf_attn_swap" not in sys.modules
"""


def test_without_the_package(tmp_path: Path) -> None:
    """A program that does not import the package cannot load the checkpoint, and the error names it."""
    arguments = []
    for name in FAMILY_NAMES:
        model = patch_model(fresh(name, torch.float32), "belief")
        model.save_pretrained(tmp_path / name)
        arguments.append(f"{tmp_path / name}={auto_class(model)}")
    assert len(python("-c", WITHOUT, *arguments).stdout.split()) == len(FAMILY_NAMES)
