"""What `push` sends: one commit with the card, and a model that another program loads bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForMaskedLM, BertTokenizer

import hf_attn_swap
from hf_attn_swap.publish.hub import files_to_publish, push, push_folder
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.saved import shim
from tests import zoo
from tests.harness.hub import WRITER, Hub

from .examples import BELIEF, full

ROOT = Path(__file__).parents[2]
RESULTS = full(modules=3, swaps=[{"components": [BELIEF], "layers": [0, 1, 2], "strength": 1.0}])
# huggingface_hub uploads by a call that httpx warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
LOAD = """
import json, sys
import torch, transformers
assert "hf_attn_swap" not in sys.modules
repo, answer = sys.argv[1:]
model = transformers.AutoModelForMaskedLM.from_pretrained(repo, trust_remote_code=True)
swaps = sum(name.endswith("attn_swap") for name, _ in model.named_modules())
stored = torch.load(answer)
with torch.no_grad():
    equal = torch.equal(model(stored["input_ids"]).logits, stored["logits"])
print(json.dumps([type(model).__module__, swaps, equal]))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub to which huggingface_hub's client in this process sends, and from which it reads."""
    with Hub() as running:
        settings = {"ENDPOINT": running.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield running


def saved(folder: Path, variant: str, **options: str) -> Path:
    """A tiny converted model in a folder, and beside the folder what it gives."""
    model = hf_attn_swap.patch_model(zoo.build("bert"), variant)
    ids = zoo.inputs("bert")["input_ids"]
    with torch.no_grad():
        torch.save({"input_ids": ids, "logits": model(ids).logits}, folder.with_suffix(".pt"))
    model.save_pretrained(folder, **options)
    return folder


def loaded(hub: Hub, repo: str, folder: Path) -> list[object]:
    """What a program without the package loads: the model's module, its swaps, and whether its logits are equal."""
    command = [sys.executable, "-c", LOAD, repo, str(folder.with_suffix(".pt"))]
    environment = hub.env(folder.parent / "reader", None) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[object] = json.loads(done.stdout)
    return answers


def test_model_card_and_tokenizer_in_one_commit(hub: Hub, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "belief")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    for name in ("pytorch_model.bin", "optimizer.pt", "modeling_x.py", "attn_swap.py", ".hidden.json"):
        (folder / name).write_text("this could be a program")
    planned, *_ = files_to_publish(folder, "me/card")
    push_folder(folder, "me/card")
    assert set(planned) == set(hub.repositories["me/card"].files()) - {".gitattributes"}
    repository = hub.repositories["me/card"]
    files = repository.files()
    assert repository.titles == ["initial commit", "Upload belief model with hf_attn_swap"]
    wanted = {"README.md", "config.json", "model.safetensors", "results.json", "tokenizer_config.json", "attn_swap.py"}
    assert wanted <= set(files)
    assert not {name for name in files if name.endswith((".bin", ".pt", ".py")) or name[0] == "."} - {"attn_swap.py"}
    assert files["attn_swap.py"] == shim.SOURCE.read_bytes()
    card = files["README.md"].decode()
    assert ModelCard(card).data.to_dict()["base_model"] == RESULTS["base"]["name"]
    assert 'from_pretrained("me/card")' in card
    assert loaded(hub, "me/card", folder) == ["transformers.models.bert.modeling_bert", 3, True]
    model = AutoModelForMaskedLM.from_pretrained("me/card", cache_dir=tmp_path / "cache")
    expected = torch.load(folder.with_suffix(".pt"))
    with torch.no_grad():
        assert torch.equal(model(expected["input_ids"]).logits, expected["logits"])
    # Without results, the card stays. Results of another model are refused before anything is sent.
    push_folder(saved(tmp_path / "other", "gated"), "me/card")
    assert repository.files()["README.md"].decode() == card
    with pytest.raises(ValueError, match="another model"):
        push_folder(tmp_path / "other", "me/card", results=folder / "results.json")
    assert len(repository.commits) == 3


def test_a_variant_of_ones_own(hub: Hub, own_files: Path, tmp_path: Path) -> None:
    """Its file is published as this process has it, whatever the folder holds, and a program that trusts runs it."""
    folder = saved(tmp_path / "model", "damped")
    (folder / "damped.py").write_text("this could be another program")
    planned, *_ = files_to_publish(folder, "me/own")
    push_folder(folder, "me/own")
    files = hub.repositories["me/own"].files()
    assert {name for name in planned if name.endswith(".py")} == {"attn_swap.py", "damped.py"}
    assert files["damped.py"] == (own_files / "damped.py").read_bytes()
    assert loaded(hub, "me/own", folder) == ["transformers.models.bert.modeling_bert", 3, True]


def test_shards_of_an_earlier_push_go_and_a_branch_stays(hub: Hub, tmp_path: Path) -> None:
    push_folder(saved(tmp_path / "shards", "belief", max_shard_size="20KB"), "me/shards")
    repository = hub.repositories["me/shards"]
    assert sum(name.endswith(".safetensors") for name in repository.files()) > 2
    assert "No results were published" in repository.files()["README.md"].decode()
    model = hf_attn_swap.patch_model(zoo.build("bert"), "gated")
    push(model, "me/shards", revision="v2/gated")
    assert sum(name.endswith(".safetensors") for name in repository.files()) > 2
    push(model, "me/shards")
    for branch in ("main", "v2/gated"):
        files = repository.files(branch)
        assert [name for name in files if "safetensors" in name] == ["model.safetensors"]
        assert json.loads(files["config.json"])["attn_swap"]["swaps"][0]["variant"] == "gated"


def test_what_is_meant_to_be_private_is_not_published(hub: Hub, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "gated")
    push_folder(folder, "me/closed", private=True)
    assert hub.repositories["me/closed"].private
    push_folder(folder, "me/open")
    with pytest.raises(ValueError, match="private"):
        push_folder(folder, "me/open", private=True)
    assert len(hub.repositories["me/open"].commits) == 2


def test_a_model_that_was_only_quantized(tmp_path: Path) -> None:
    """It runs without the package: its config keeps the names of transformers, and no shim goes with it."""
    zoo.build("bert").save_pretrained(tmp_path)
    softmax = {"name": "softmax", "formula": "softmax(S)", "paper": "Vaswani et al., 2017", "options": {}}
    swaps = [{"components": [softmax], "layers": [0, 1, 2], "strength": 1.0}]
    results = RunResult.from_dict(full(base=RESULTS["base"] | {"relation": "quantized"}, modules=3, swaps=swaps))
    files, *_ = files_to_publish(tmp_path, "me/int8", results)
    assert files["config.json"] == tmp_path / "config.json"
    assert "attn_swap.py" not in files


def test_what_is_no_converted_model_is_refused(tmp_path: Path) -> None:
    stock = zoo.build("bert")
    stock.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="patch_model"):
        push_folder(tmp_path, "me/stock")
    with pytest.raises(ValueError, match="patch_model"):
        push(stock, "me/stock")
    with pytest.raises(ValueError, match="tokenizer"):
        push(stock, "me/stock", tokenizer="gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear"):
        push(torch.nn.Linear(2, 2), "me/stock")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"config\.json"):
        push_folder(tmp_path / "nowhere", "me/stock")
