"""Push, then load in another process with an empty cache: the logits are equal bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_attn_swap.publish.card import validate
from hf_attn_swap.saved import shim

from ..results.examples import BELIEF, full
from .client import ROOT, RemoteError
from .conftest import PART_SIZE, Setup

FAMILIES = {
    "albert": ("AlbertForMaskedLM", "AutoModelForMaskedLM"),
    "bert": ("BertForMaskedLM", "AutoModelForMaskedLM"),
    "gpt2": ("GPT2LMHeadModel", "AutoModelForCausalLM"),
    "opt": ("OPTForCausalLM", "AutoModelForCausalLM"),
    "llama": ("LlamaForCausalLM", "AutoModelForCausalLM"),
    "vit": ("ViTForImageClassification", "AutoModelForImageClassification"),
}
VARIANTS = ("belief", "belief_star", "gated", "outeffhop+gated")
WIDE = {"vocab_size": 80_000}  # 10 MB of embeddings, tied to the head
WIDER = {"vocab_size": 120_000}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bit_for_bit(world: Setup, family: str, variant: str) -> None:
    repo, answer = f"me/{family}-{variant.replace('+', '-')}", str(world.folder / f"{family}-{variant}.pt")
    world.publisher.call("publish", repo=repo, family=family, variant=variant, answer=answer)
    strict = world.reader.call("load", repo=repo, family=family, answer=answer)
    plain = world.reader.call("load", repo=repo, family=family, answer=answer, by=FAMILIES[family][1])
    assert strict == plain
    assert strict == {"class": FAMILIES[family][0], "swapped": strict["swapped"], "equal": True, "training": False}
    assert strict["swapped"] == (1 if family == "albert" else 3)
    history = world.hub.repository(repo).history()
    assert [commit.title for commit in history] == [f"Upload {variant} model with hf_attn_swap", "initial commit"]
    assert {"README.md", "config.json", "model.safetensors"} <= set(history[0].files)
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in history[0].files)


def test_large_file_in_one_piece(world: Setup) -> None:
    answer = str(world.folder / "large.pt")
    arguments = {"repo": "me/large", "family": "bert", "answer": answer}
    world.publisher.call("publish", variant="belief_star", config=WIDE, **arguments)
    size = world.hub.repository("me/large").at().files["model.safetensors"].size
    assert 10_000_000 < size < PART_SIZE
    assert [entry.size for entry in world.hub.requests("PUT", "/objects/")] == [size]
    assert world.reader.call("load", **arguments)["equal"]


def test_large_file_in_parts(world: Setup) -> None:
    answer = str(world.folder / "parts.pt")
    arguments = {"repo": "me/parts", "family": "bert", "answer": answer}
    world.publisher.call("publish", variant="outeffhop+gated", config=WIDER, **arguments)
    size = world.hub.repository("me/parts").at().files["model.safetensors"].size
    assert [entry.size for entry in world.hub.requests("PUT", "/parts/")] == [PART_SIZE, size - PART_SIZE]
    assert world.reader.call("load", **arguments)["equal"]


def test_shards_and_a_later_push_in_one_piece(world: Setup) -> None:
    """transformers' own push keeps the swap too; ours leaves no shards behind."""
    answer = str(world.folder / "shards.pt")
    arguments = {"repo": "me/shards", "family": "llama", "answer": answer}
    world.publisher.call("publish", variant="belief_star", plain={"max_shard_size": "40KB"}, **arguments)
    files = world.hub.repository("me/shards").at().files
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert "model.safetensors.index.json" in files
    assert world.reader.call("load", **arguments)["equal"]
    world.publisher.call("publish", variant="gated", **arguments)
    files = world.hub.repository("me/shards").at().files
    assert [name for name in files if "safetensors" in name] == ["model.safetensors"]
    assert world.reader.call("load", **arguments)["equal"]


def test_branch(world: Setup) -> None:
    main, other = (str(world.folder / f"{name}.pt") for name in ("main", "other"))
    arguments = {"repo": "me/branches", "family": "gpt2"}
    world.publisher.call("publish", variant="belief", answer=main, **arguments)
    world.publisher.call("publish", variant="gated", answer=other, revision="v2/gated", **arguments)
    repository = world.hub.repository("me/branches")
    assert set(repository.branches) == {"main", "v2/gated"}
    assert len(repository.history("main")) == 2
    assert world.reader.call("load", answer=main, **arguments)["equal"]
    assert world.reader.call("load", answer=other, revision="v2/gated", **arguments)["equal"]
    commit = repository.at().oid
    assert world.reader.call("load", answer=main, revision=commit, **arguments)["equal"]
    with pytest.raises(RemoteError, match="Revision Not Found"):
        world.reader.call("load", answer=main, revision="v3", **arguments)


def test_the_same_again_is_no_new_commit(world: Setup) -> None:
    answer = str(world.folder / "again.pt")
    arguments = {"repo": "me/again", "family": "bert", "variant": "belief", "answer": answer}
    world.publisher.call("publish", **arguments)
    world.publisher.call("publish", **arguments)
    assert len(world.hub.repository("me/again").history()) == 2


def results_of(modules: int = 3) -> dict[str, object]:
    return full(modules=modules, swaps=[{"components": [BELIEF], "layers": [0, 1, 2], "strength": 1.0}])


def test_card_and_tokenizer_come_in_the_same_commit(world: Setup) -> None:
    run, answer = world.folder / "run.json", str(world.folder / "card.pt")
    run.write_text(json.dumps(results_of()))
    arguments = {"repo": "me/card", "family": "bert", "variant": "belief", "answer": answer}
    world.publisher.call("publish", results=str(run), words=str(world.folder / "vocab.txt"), **arguments)
    repository = world.hub.repository("me/card")
    assert len(repository.history()) == 2
    files = repository.at().files
    card = files["README.md"].data.decode()
    validate(card)
    assert 'from_pretrained("me/card")' in card
    assert json.loads(files["results.json"].data) == json.loads(run.read_text())
    assert "tokenizer_config.json" in files
    assert world.hub.requests("GET", "/api/models/me/card")
    world.publisher.call("publish", **arguments)  # without results the card stays
    assert repository.at().files["README.md"].data.decode() == card
    run.write_text(json.dumps(results_of(modules=4)))
    with pytest.raises(
        RemoteError, match=r"ValueError: the results are of another model: .* of 4, and the model .* of 3"
    ):
        world.publisher.call("publish", results=str(run), **arguments)
    assert len(repository.history()) == 2


def test_pipelines_and_processors(world: Setup) -> None:
    common = {"variant": "outeffhop+gated", "answer": str(world.folder / "pipeline.pt")}
    words = str(world.folder / "vocab.txt")
    world.publisher.call("publish", repo="me/words", family="bert", words=words, **common)
    with pytest.raises(RemoteError, match="unexpected: cls"):
        world.reader.call("load_without_a_model", repo="me/words", auto_class="AutoModelForSequenceClassification")
    got = world.reader.call("classify", repo="me/words", text="good film")
    assert got["tokens"] == ["good", "film"]
    world.publisher.call("publish", repo="me/sound", family="vit", sound=True, **common)
    assert world.reader.call("sampling_rate", repo="me/sound") == 8_000


def test_folder_leaves_out_what_could_be_a_program(world: Setup, tmp_path: Path) -> None:
    extra = {"pytorch_model.bin": "x", "optimizer.pt": "x", "modeling_x.py": "x", ".git/config": "x", "notes.md": "x"}
    extra |= {"attn_swap.py": "not the shim"}
    extra |= {"results.json": json.dumps(results_of()), "deep/more.json": "{}"}
    arguments = {"repo": "me/folder", "folder": str(tmp_path), "family": "bert", "variant": "belief", "extra": extra}
    world.publisher.call("publish_folder", **arguments)
    wanted = {"README.md", "config.json", "deep/more.json", "model.safetensors", "notes.md", "results.json"}
    files = world.hub.repository("me/folder").at().files
    assert set(files) - {"generation_config.json"} == wanted | {"attn_swap.py"}
    assert files["attn_swap.py"].data == shim.SOURCE.read_bytes()


TRUSTING = """
import sys, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained("me/shim", trust_remote_code=True)
names = {name for name, _ in model.named_modules() if name.endswith("attn_swap")}
model.save_pretrained(sys.argv[1])
print(type(model).__module__, len(names))
"""


def test_a_program_that_does_not_import_the_package(world: Setup, tmp_path: Path) -> None:
    """It loads from the Hub through the shim. A process with the package does not ask for the shim at all."""
    answer = str(tmp_path / "shim.pt")
    arguments = {"repo": "me/shim", "family": "bert", "answer": answer}
    world.publisher.call("publish", variant="belief_star", **arguments)
    files = world.hub.repository("me/shim").at().files
    assert files["attn_swap.py"].data == shim.SOURCE.read_bytes()
    assert world.reader.call("load", by="AutoModelForMaskedLM", trust_remote_code=True, **arguments)["equal"]
    assert not world.hub.requests("GET", "attn_swap.py")
    environment = {**world.hub.env(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TRUSTING, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["transformers.models.bert.modeling_bert", "3"]
    assert world.hub.requests("GET", "attn_swap.py")
    for name in ("config.json", "attn_swap.py"):
        assert (tmp_path / "saved" / name).read_bytes() == files[name].data


@pytest.mark.slow
def test_xet(xet_world: Setup) -> None:
    answer = str(xet_world.folder / "xet.pt")
    arguments = {"repo": "me/xet", "family": "opt", "answer": answer}
    xet_world.publisher.call("publish", variant="belief_star", **arguments)
    assert xet_world.hub.requests("GET", "/xet-write-token/")
    assert not xet_world.hub.store.objects, "nothing went the other way"
    assert xet_world.reader.call("load", **arguments)["equal"]
    assert xet_world.hub.requests("GET", "/xet-read-token/")


@pytest.mark.slow
def test_trainer_pushes_the_swap(world: Setup) -> None:
    answer = str(world.folder / "trained.pt")
    training = {"repo": "me/trained", "folder": str(world.folder / "trained"), "answer": answer}
    files = world.publisher.call("train_and_publish", **training)
    assert "model.safetensors" in files
    arguments = {"repo": "me/trained", "family": "bert", "answer": answer}
    assert world.reader.call("load", **arguments)["equal"]
    assert world.reader.call("load", by="AutoModelForMaskedLM", **arguments)["equal"]


@pytest.mark.slow
def test_adapter_on_a_converted_base(world: Setup) -> None:
    answer = str(world.folder / "base.pt")
    world.publisher.call("publish", repo="me/base", family="bert", variant="belief_star", answer=answer)
    arguments = {"repo": "me/adapter", "base": "me/base", "answer": str(world.folder / "adapter.pt")}
    world.publisher.call("publish_adapter", **arguments)
    assert world.reader.call("load_adapter", **arguments) == [True, True]
