"""A converted model loads in a program that does not import the package, if that program trusts the repository."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto import modeling_auto

import hf_attn_swap
from hf_attn_swap import list_variants, patch_model, unpatch_model
from hf_attn_swap.saved import shim
from tests.contract.cells import DEEP, FAMILY_NAMES, is_linear
from tests.contract.harness import batch_of, fresh, perturb, swaps
from tests.harness.adapters import lora
from tests.harness.damage import DAMAGE
from tests.harness.process import python
from tests.lifecycle.steps import auto_class

from .cases import expect, fresh_processes, save, trusting

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fresh processes are forks")


def swapped(name: str, variant: str) -> Any:
    return perturb(patch_model(fresh(name, torch.float32), variant))


def kinds() -> list[str]:
    """A variant that carries scores, a variant without scores, and one with parameters of its own."""
    made = {name: swaps(swapped("bert", name))[0] for name in list_variants()}
    carrying = next(name for name, swap in made.items() if swap.carries)
    linear = next(name for name in made if is_linear(name))
    learned = next(name for name, swap in made.items() if list(swap.parameters()) and name not in (carrying, linear))
    return [carrying, linear, learned]


def loads(name: str, variant: str, folder: Path, in_shards: bool) -> None:
    """A checkpoint of a family for a fresh process."""
    model, sizes = swapped(name, variant), {"max_shard_size": "8KB"} if in_shards else {}
    saved = save(model, batch_of(name, torch.float32), folder, auto_class(model), **sizes)
    assert (len(list(saved.glob("*.safetensors"))) > 1) == in_shards


@pytest.mark.slow
def test_every_family(tmp_path: Path) -> None:
    """The three kinds of variants take turns; every second checkpoint is in shards."""
    for place, name in enumerate(FAMILY_NAMES):
        loads(name, kinds()[place % 3], tmp_path / "cases" / name, in_shards=place % 2 == 1)
    assert fresh_processes(tmp_path / "cases") == dict.fromkeys(FAMILY_NAMES, "ok")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_config_names_every_auto_class(name: str, tmp_path: Path) -> None:
    model = swapped(name, "belief")
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    known = {
        auto: cls._model_mapping[type(model.config)]
        for auto, cls in vars(modeling_auto).items()
        if auto.startswith("AutoModel") and getattr(cls, "_model_mapping", None) is not None
        if type(model.config) in cls._model_mapping
    }
    assert set(written) == set(known) | ({"AutoBackbone"} & set(written))
    assert written[auto_class(model)] == f"attn_swap.{type(model).__name__}"
    assert (tmp_path / "attn_swap.py").read_bytes() == shim.SOURCE.read_bytes()
    assert not hasattr(model.config, "auto_map")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of BERT with the shim."""
    folder: Path = tmp_path_factory.mktemp("plain")
    swapped("bert", "outeffhop").save_pretrained(folder)
    return folder


def case(plain: Path, folder: Path, trust: bool | None = True) -> Path:
    """A copy of this checkpoint, for a fresh process."""
    batch = batch_of("bert", torch.float32)
    model = transformers.AutoModelForMaskedLM.from_pretrained(plain)
    expect(model, batch, folder, {"auto": "AutoModelForMaskedLM", "arguments": trusting(trust), "save": {}})
    (folder / "model").mkdir()
    for path in plain.iterdir():
        (folder / "model" / path.name).write_bytes(path.read_bytes())
    return folder / "model"


def leave_a_mark(folder: Path, mark: Path) -> None:
    """Let the shim of a checkpoint write a file when it runs."""
    text = (folder / "attn_swap.py").read_text()
    (folder / "attn_swap.py").write_text(text + f"\nopen({str(mark)!r}, 'w').close()\n")


def test_without_trust_nothing_runs(plain: Path, tmp_path: Path) -> None:
    for name, trust in (("none", None), ("no", False), ("yes", True)):
        leave_a_mark(case(plain, tmp_path / "cases" / name, trust), tmp_path / name)
    result = fresh_processes(tmp_path / "cases")
    assert result.pop("yes") == "AssertionError: the second save is another one"  # the mark is not saved again
    assert (tmp_path / "yes").exists(), "the test could not fail otherwise"
    for name, outcome in result.items():
        assert "hf_attn_swap" in outcome
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("trust", [None, False, True])
def test_a_process_with_the_package_runs_nothing(plain: Path, tmp_path: Path, trust: bool | None) -> None:
    folder = case(plain, tmp_path / "case")
    leave_a_mark(folder, tmp_path / "mark")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, **trusting(trust))
    assert type(model) is transformers.BertForMaskedLM
    assert not hasattr(model.config, "auto_map")
    assert not hasattr(transformers.AutoConfig.from_pretrained(folder, **trusting(trust)), "auto_map")
    assert not (tmp_path / "mark").exists()
    again = transformers.AutoModelForMaskedLM.from_config(model.config, **trusting(trust))
    assert len(swaps(again)) == len(swaps(model))


def test_old_package(plain: Path, tmp_path: Path) -> None:
    case(plain, tmp_path / "cases" / "old")
    old = tmp_path / "old"
    (old / "hf_attn_swap").mkdir(parents=True)
    (old / "hf_attn_swap" / "__init__.py").write_text('__version__ = "0.0.9"\n')
    outcome = fresh_processes(tmp_path / "cases", package=old)["old"]
    assert "needs hf-attn-swap 0.1.0 or newer, and 0.0.9 is installed" in outcome
    assert "pip install -U hf-attn-swap" in outcome


def test_hostile_block(plain: Path, tmp_path: Path) -> None:
    for name in DAMAGE:
        folder = case(plain, tmp_path / "cases" / name)
        config = json.loads((folder / "config.json").read_text())
        DAMAGE[name][0](config)
        (folder / "config.json").write_text(json.dumps(config))
    result = fresh_processes(tmp_path / "cases")
    assert set(result) == set(DAMAGE)
    for name, outcome in result.items():
        assert outcome.startswith("ValueError")
        assert DAMAGE[name][1] in outcome


def test_the_oldest_version_is_one_that_exists() -> None:
    oldest = re.search(r'^OLDEST = "(.*)"$', shim.SOURCE.read_text(), re.M)
    assert oldest is not None
    assert Version(oldest.group(1)) <= Version(hf_attn_swap.__version__)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_adapter_on_a_base(tmp_path: Path) -> None:
    """The adapter names its base, and the base brings the shim."""
    base = tmp_path / "base"
    swapped("llama", "belief").save_pretrained(base)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), lora("llama")).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.fill_(0.1)
    where = tmp_path / "cases" / "adapter"
    named = {"auto": "AutoModelForCausalLM", "arguments": trusting(True), "model": "adapter"}
    expect(model, batch_of("llama", torch.float32), where, named)
    model.save_pretrained(where / "adapter")
    assert not (where / "adapter" / "config.json").exists()
    assert fresh_processes(tmp_path / "cases") == {"adapter": "ok"}


@pytest.mark.parametrize("name", DEEP)
def test_unpatched_model_has_no_shim(name: str, tmp_path: Path) -> None:
    model = swapped(name, "belief")
    model.save_pretrained(tmp_path / "swapped")
    for each, folder in ((model, "first"), (type(model).from_pretrained(tmp_path / "swapped"), "second")):
        unpatch_model(each).save_pretrained(tmp_path / folder)
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert written["architectures"] == [type(model).__name__]
        assert not {"auto_map", "model_file"} & set(written)
        assert not (tmp_path / folder / "attn_swap.py").exists()


TOKENIZER = {"AutoTokenizer": ["tok.T", None]}
LEFT_OVER = {"AutoConfig": "configuration_x.X", "AutoModelForMaskedLM": "modeling_x.X", **TOKENIZER}


def test_names_of_code_that_the_model_does_not_run(tmp_path: Path) -> None:
    """Some repositories name code of their own beside a model that transformers has built in."""
    model = fresh("bert", torch.float32)
    model.config.auto_map = dict(LEFT_OVER)
    patch_model(model, "belief").save_pretrained(tmp_path / "swapped")
    written = json.loads((tmp_path / "swapped" / "config.json").read_text())["auto_map"]
    assert written["AutoTokenizer"] == TOKENIZER["AutoTokenizer"]
    assert written["AutoModelForMaskedLM"] == "attn_swap.BertForMaskedLM"
    assert "AutoConfig" not in written
    assert unpatch_model(model).config.auto_map == LEFT_OVER
    loaded = unpatch_model(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "swapped"))
    assert loaded.config.auto_map == TOKENIZER


OWN = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForMaskedLM
import hf_attn_swap
folder, swapped, stock = map(Path, sys.argv[1:])
ids = torch.arange(4, 12)[None]
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__name__ == "OwnBert" and model.marked
type(model).register_for_auto_class("AutoModelForMaskedLM")  # transformers 5.10 saves the code only of such classes
before = model(ids).logits
hf_attn_swap.patch_model(model, "belief").save_pretrained(swapped)
names = json.loads((swapped / "config.json").read_text())["auto_map"]
assert names == {"AutoModelForMaskedLM": "modeling_own.OwnBert"}, names
assert (swapped / "modeling_own.py").exists() and not (swapped / "attn_swap.py").exists()
config = json.loads((swapped / "config.json").read_text())
assert config["architectures"] == ["HfAttnSwapOwnBert"] and "model_file" not in config
again = AutoModelForMaskedLM.from_pretrained(swapped, trust_remote_code=True)
type(again).register_for_auto_class("AutoModelForMaskedLM")
assert again.marked and torch.equal(again(ids).logits, model(ids).logits)
assert not torch.equal(before, model(ids).logits)
hf_attn_swap.unpatch_model(again).save_pretrained(stock)
assert json.loads((stock / "config.json").read_text())["auto_map"] == names
last = AutoModelForMaskedLM.from_pretrained(stock, trust_remote_code=True)
assert last.marked and torch.equal(last(ids).logits, before)
"""


def test_model_with_code_of_its_own(tmp_path: Path) -> None:
    """It keeps its code and gets no shim."""
    folder = tmp_path / "own"
    fresh("bert", torch.float32).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForMaskedLM": "modeling_own.OwnBert"}, "architectures": ["OwnBert"]}
    (folder / "config.json").write_text(json.dumps(config))
    code = "from transformers import BertForMaskedLM\n\n\nclass OwnBert(BertForMaskedLM):\n    marked = True\n"
    (folder / "modeling_own.py").write_text(code)
    python("-c", OWN, folder, tmp_path / "swapped", tmp_path / "stock")
