import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import hf_attn_swap
import hf_attn_swap_cli as cli
from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish import checkpoint
from tests.harness.places import turns
from tests.harness.process import python

from .conftest import Outcome

Command = Callable[..., Outcome]


def is_one_error(outcome: Outcome) -> bool:
    lines = outcome.err.splitlines()
    return outcome.code == 2 and not outcome.out and len(lines) == 1 and lines[0].startswith("error: ")


def test_version(command: Command) -> None:
    assert command("--version") == Outcome(0, f"hf-attn-swap {hf_attn_swap.__version__}\n", "")


def test_without_arguments_it_shows_help(command: Command) -> None:
    outcome = command()
    assert outcome.code == 0
    assert all(name in outcome.out for name in ("variants", "patch", "describe", "demo"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("bogus",),
        ("patch", "only-one"),
        ("patch", "/no/such/folder", "belief", "out"),
        ("describe", "./nowhere"),
        ("patch", "MODEL", "bogus", "out"),
        ("patch", "MODEL", "modern_hopfield", "out", "-o", "alpha=2"),
        ("patch", "MODEL", "modern_hopfield", "out", "-o", "nonsense"),
        ("patch", "MODEL", "modern_hopfield", "out", "--layers", "1-"),
        ("patch", "MODEL", "modern_hopfield", "out", "--layers", "7"),
        ("patch", "MODEL", "modern_hopfield", "out", "--strength", "2"),
        ("patch", "MODEL", "modern_hopfield", "out", "--task", "image-classification"),
        ("patch", "MODEL", "modern_hopfield+clipped_softmax", "out", "-o", "alpha=0.1"),
        ("patch", "MODEL", "simpletron+belief", "out"),
        ("describe", "MODEL", "--task", "bogus"),
        ("demo", "--variants", "softmax"),
        ("demo", "--variants", "belief,belief"),
        ("demo", "--train-size", "0"),
    ],
    ids=" ".join,
)
def test_errors_are_one_line(
    command: Command, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    progress = ("loading ", "reading ", "Loading weights", "\r")
    outcome = command(*(str(tiny_bert) if argument == "MODEL" else argument for argument in arguments))
    last = [line for line in outcome.err.splitlines() if line.strip() and not line.startswith(progress)]
    assert is_one_error(Outcome(outcome.code, outcome.out, "\n".join(last)))
    assert not (tmp_path / "out").exists()


def test_an_unforeseen_error_names_its_type(command: Command, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("hidden_size")

    monkeypatch.setattr(checkpoint, "skeleton", broken)
    assert "error: KeyError: 'hidden_size' (run again with --debug" in command("describe", tiny_bert).err
    with pytest.raises(KeyError):
        cli.run(["--debug", "describe", str(tiny_bert)])


def test_an_interrupt_is_one_word(command: Command, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "skeleton", broken)
    outcome = command("describe", tiny_bert)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[1:] == ["interrupted"]


@pytest.mark.slow
def test_only_debug_shows_a_traceback() -> None:
    """No variable of the environment does. The traceback is Python's own, which shows no values of variables."""
    names = ("DEBUG", "HF_ATTN_SWAP_DEBUG", "_TYPER_STANDARD_TRACEBACK", "TYPER_STANDARD_TRACEBACK", "HF_DEBUG")
    environment = dict.fromkeys(names, "1")
    words = ["describe", "./nowhere", "--token", "hf_secret"]
    quiet, loud = (
        python("-m", "hf_attn_swap_cli", *more, *words, env=environment, check=False) for more in ([], ["--debug"])
    )
    assert quiet.returncode == 2
    assert quiet.stderr.splitlines()[-1] == "error: There is no folder './nowhere'."
    assert "Traceback" not in quiet.stderr
    assert loud.returncode == 1
    assert "Traceback (most recent call last):" in loud.stderr
    assert "hf_secret" not in loud.stderr


def test_a_mistyped_folder_is_told_from_a_name_on_the_hub(command: Command) -> None:
    outcome = command("describe", "nowhere")
    assert outcome.code == 2
    assert "error: There is no folder 'nowhere', and the Hub did not give it: " in outcome.err


WRONG = [
    (("--device", "nothing"), "the device 'nothing' cannot be used here"),
    (("--dtype", "int7"), "--dtype takes auto"),
    (("--device", "meta"), "the device 'meta' cannot be used here"),
]


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [(name, *wrong) for name, wrong in turns(["evaluate", "compare", "report", "convert", "patch"], WRONG)],
)
def test_devices_and_precisions_that_there_are_not(
    command: Command,
    tiny_bert: Path,
    labelled_texts: Path,
    tmp_path: Path,
    name: str,
    words: tuple[str, ...],
    reason: str,
) -> None:
    data = ("--data", labelled_texts, "--column", "sentence")
    arguments: dict[str, tuple[object, ...]] = {
        "evaluate": (tiny_bert, *data),
        "compare": (tiny_bert, tiny_bert, *data),
        "report": (tiny_bert, "--variant", "belief", *data),
        "convert": (tiny_bert, "belief", tmp_path / "out", *data),
        "patch": (tiny_bert, "belief", tmp_path / "out"),
    }
    if (name, words[0]) == ("patch", "--device"):
        reason = "No such option"  # a patch computes nothing, so it needs no device
    errors = [line for line in command(name, *arguments[name], *words).err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert reason in errors[0]
    assert not (tmp_path / "out").exists()


def test_patch_saves_in_another_precision(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    assert command("patch", tiny_bert, "gated", tmp_path / "out", "--dtype", "bfloat16").code == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_patch_saves_what_plain_from_pretrained_loads(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--layers", "1", "--strength", "0.5", "-o", "gated.kind=mlp")
    outcome = command("patch", tiny_bert, "outeffhop+gated", out, *options)
    assert (outcome.code, outcome.out) == (0, "")
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    expected = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    hf_attn_swap.patch_model(expected, "outeffhop+gated", layers=[1], strength=0.5, gated={"kind": "mlp"})
    inputs = AutoTokenizer.from_pretrained(out)(["the film was great", "dull"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, expected.eval()(**inputs).logits)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / file).read_bytes() == (tiny_bert / file).read_bytes()


def test_patch_keeps_the_saved_class_and_takes_another(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    assert command("patch", tiny_bert, "belief", tmp_path / "same").code == 0
    assert AutoConfig.from_pretrained(tmp_path / "same").architectures == ["HfAttnSwapBertForSequenceClassification"]
    outcome = command("patch", tiny_bert, "belief", tmp_path / "other", "--task", "token-classification")
    assert outcome.code == 0
    assert "newly initialised: classifier" not in outcome.err  # the checkpoint has a classifier of that shape
    assert AutoConfig.from_pretrained(tmp_path / "other").architectures == ["HfAttnSwapBertForTokenClassification"]
    outcome = command("patch", tiny_bert, "belief", tmp_path / "third", "--auto-class", "AutoModelForQuestionAnswering")
    assert "newly initialised: qa_outputs.bias, qa_outputs.weight" in outcome.err


def test_patch_writes_over_nothing(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    assert is_one_error(command("patch", tiny_bert, "belief", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert command("patch", tiny_bert, "belief", tmp_path, "--overwrite").code == 0
    assert (tmp_path / "model.safetensors").exists()


def test_patch_never_writes_into_the_model_s_own_folder(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "own")
    before = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    outcome = command("patch", tmp_path / "own", "belief", tmp_path / "own", "--overwrite")
    assert (outcome.code, "is the folder of the model" in outcome.err) == (2, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()} == before


def test_patch_copies_the_modules_of_sentence_transformers(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    """Without them, sentence-transformers takes the mean of the tokens, whatever the model was trained for."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_bert, source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (source / "modules.json").write_text("[]")
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert command("patch", source, "belief", out).code == 0
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_a_file_or_a_folder_without_a_model_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    outcome = command("describe", tmp_path / "notes.txt")
    assert outcome.code == 2
    assert "notes.txt is a file; name" in outcome.err
    outcome = command("describe", tmp_path)
    assert outcome.code == 2
    assert f"The folder {tmp_path} holds no model: it has no config.json." in outcome.err


def test_describe_stock_and_converted(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    stock = command("describe", tiny_bert)
    assert stock.code == 0
    assert "0 of 2 self-attention modules swapped" in stock.out
    assert "Layers 0 to 1 can be swapped" in stock.out
    assert f"hf-attn-swap describe {tiny_bert} --variant VARIANT" in stock.out
    command("patch", tiny_bert, "modern_hopfield", tmp_path / "out", "--layers", "0", "--strength", "0.25")
    converted = command("describe", tmp_path / "out")
    assert "1 of 2 self-attention modules swapped" in converted.out
    assert "modern_hopfield" in converted.out
    assert "can be swapped" not in converted.out
    rows = json.loads(command("describe", tmp_path / "out", "--json").out)["rows"]
    assert [row["strength"] for row in rows] == [0.25, None]


def test_patch_inside_some_modules(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    out, inside = tmp_path / "swapped", r"encoder\.layer\.1"
    assert command("patch", tiny_bert, "belief", out, "--modules", inside, "--layers", "0").code == 0
    assert json.loads((out / "config.json").read_text())["attn_swap"]["swaps"][0]["modules"] == inside
    printed = command("describe", out).out
    assert "1 of 2 self-attention modules swapped, chosen by modules=" in printed
    assert "encoder" in printed.partition("chosen by")[2]
    outcome = command("patch", tiny_bert, "belief", tmp_path / "other", "--modules", "vision_tower")
    assert outcome.code != 0
    assert "fits no swappable attention module" in outcome.err


@pytest.mark.parametrize("name", list_variants())
def test_one_variant_in_full(command: Command, name: str) -> None:
    outcome = command("variants", name)
    assert outcome.code == 0
    variant = get_variant(name)
    for text in (variant.about.formula, variant.about.paper, variant.about.summary, *variant.places, *variant.aliases):
        assert text in outcome.out
    for field in dataclasses.fields(variant.Options):
        assert f"{field.name} = {field.default!r}" in outcome.out
    for alias in variant.aliases:
        assert command("variants", alias) == outcome
    (shown,) = json.loads(command("variants", name, "--json").out)
    assert (shown["name"], shown["aliases"]) == (name, list(variant.aliases))
    defaults = {field.name: field.default for field in dataclasses.fields(variant.Options)}
    assert shown["options"] == json.loads(json.dumps(defaults))


def test_all_variants(command: Command) -> None:
    lines = command("variants").out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == list(list_variants())
