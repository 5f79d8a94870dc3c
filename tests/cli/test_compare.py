"""`compare`, `evaluate` and `describe` on saved models: lengths, hidden numbers, and what is refused in a sentence."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizerFast,
)

from hf_attn_swap import patch_model
from hf_attn_swap.measuring import generation
from hf_attn_swap.measuring.generation import agreement, continuations
from hf_attn_swap.measuring.recall import recall
from hf_attn_swap.measuring.retrieval import key_values, needle
from tests import zoo
from tests.harness.byte_tokenizer import byte_tokenizer

from .conftest import Outcome

Command = Callable[..., Outcome]


@pytest.fixture
def windowed(tiny_llama: Path, tmp_path: Path) -> Path:
    """Folder of the language model in a window, with its tokenizer."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(tiny_llama), "window", window=4, sinks=1)
    model.save_pretrained(tmp_path / "windowed")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "windowed")
    return tmp_path / "windowed"


def stream(data: Path, folder: Path) -> torch.Tensor:
    words = [word for line in data.read_text().splitlines()[1:] for word in line.split(",")[0].split()]
    return torch.tensor(AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(words))


def test_the_loss_by_position(command: Command, tiny_llama: Path, windowed: Path, long_texts: Path) -> None:
    words = ("compare", tiny_llama, windowed, "--data", long_texts, "--rows", "3", "--length", "100")
    bins = json.loads(command(*words, "--json").out)["by_position"]
    ids = stream(long_texts, tiny_llama)[:300].view(3, 100)
    for name, folder in (("stock_loss", tiny_llama), ("loss", windowed)):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(3, 99)
        assert [row[name] for row in bins] == pytest.approx(
            [float(loss[:, :63].mean()), float(loss[:, 63:].mean())], rel=1e-4
        )
    assert [(row["first"], row["last"], row["tokens"]) for row in bins] == [(1, 63, 189), (64, 127, 108)]
    printed = command(*words).out
    assert f"\n64-127         {bins[1]['stock_loss']:.3f}  {bins[1]['loss']:.3f}  " in printed
    assert "Loss by position" not in command(*words[:-1], "50").out, "one bin says no more than the perplexity"


def test_rows_longer_than_the_positions_of_a_model(
    command: Command, tiny_llama: Path, windowed: Path, long_texts: Path
) -> None:
    words = ("--data", long_texts, "--rows", "4", "--length", "513")
    for arguments in (("compare", tiny_llama, windowed), ("evaluate", tiny_llama)):
        outcome = command(*arguments, *words)
        assert outcome.code == 2
        assert "the rows have up to 513" in outcome.err


@pytest.fixture
def bytewise(tmp_path: Path) -> Path:
    """Folder of a tiny language model of bytes with 1,024 positions, and its tokenizer, which has digits."""
    folder = tmp_path / "bytewise"
    tokenizer = byte_tokenizer("left")
    zoo.build("llama", vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_hidden_numbers_and_pairs(command: Command, bytewise: Path, tmp_path: Path) -> None:
    """Of both models, on the rows that are measured, as far as they reach."""
    windowed = patch_model(AutoModelForCausalLM.from_pretrained(bytewise), "window", window=4, sinks=1)
    windowed.save_pretrained(tmp_path / "narrow")
    data = tmp_path / "letters.txt"
    data.write_text(f"{string.ascii_letters} 0123456789 the quick brown fox. " * 20)
    words = (
        "compare",
        bytewise,
        tmp_path / "narrow",
        "--data",
        data,
        "--rows",
        "8",
        "--length",
        "128",
        "--recall",
        "--needle",
    )
    report = json.loads(command(*words, "--json").out)
    tokenizer = byte_tokenizer("left")
    ids = tokenizer(data.read_text(), add_special_tokens=False)["input_ids"][: 8 * 128]
    for name, model in (("first", AutoModelForCausalLM.from_pretrained(bytewise)), ("second", windowed)):
        wanted = needle(model, [ids], tokenizer, lengths=(1024,))
        assert list(report[name]["needle"]) == ["1024"], "256 are too few for the sentences in bytes, 4096 too many"
        assert report[name]["needle"]["1024"]["log_p"] == pytest.approx(wanted.together[1024].log_p, abs=1e-4)
        pairs = key_values(model, [ids], tokenizer, pairs=(16,)).by_pairs[16]
        assert report[name]["key_values"]["16"]["log_p"] == pytest.approx(pairs.log_p, abs=1e-4)
        gains = recall(model, [ids], distances=(64,))
        assert list(report[name]["recall"]) == ["64", "200", "512"], "2,048 tokens more would not fit"
        assert report[name]["recall"]["64"]["gain"] == pytest.approx(gains.mean(64), abs=1e-4)
    assert report["first"]["needle"] != report["second"]["needle"]
    printed = command(*words).out
    assert "\ntokens between  first" in printed
    assert "\ndepth                1,024 first  1,024 second\n" in printed
    assert "\npairs  first  second  a guess\n16 " in printed
    assert "needle" not in json.loads(command(*words[:-1], "--json").out)["first"]


def test_what_both_write(command: Command, bytewise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts behind the same prompts, and the scores of both in the same tasks; few of each."""
    monkeypatch.setattr(generation, "PIECES", 2)
    monkeypatch.setattr(generation.tasks, "__defaults__", (generation.LENGTHS, 1))
    windowed = patch_model(AutoModelForCausalLM.from_pretrained(bytewise), "window", window=4, sinks=1)
    windowed.save_pretrained(tmp_path / "narrow")
    data = tmp_path / "words.txt"
    data.write_text(" ".join("".join(word) for word in itertools.product("bdfg", "aeo", "nrst", "aeo")) + ". ")
    data.write_text(data.read_text() * 3)
    words = ("compare", bytewise, tmp_path / "narrow", "--data", data, "--rows", "8", "--length", "128", "--generate")
    report = json.loads(command(*words, "--json").out)
    tokenizer = byte_tokenizer("left")
    ids = tokenizer(data.read_text(), add_special_tokens=False)["input_ids"][: 8 * 128]
    stock = AutoModelForCausalLM.from_pretrained(bytewise)
    wanted = [continuations(windowed, [ids], tokenizer).measure(model) for model in (stock, windowed)]
    assert [report[name]["continuations"]["texts"] for name in ("first", "second")] == [list(w.texts) for w in wanted]
    assert (report["equal_tokens"], report["tokens_before_difference"]) == agreement(*wanted)
    assert set(report["second"]["tasks"]) == {"niah_multikey 1024", "vt 1024"}, "of bytes, cwe takes more"


def test_models_of_different_vocabularies(
    command: Command, tiny_bert: Path, texts: Path, bytewise: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Refused before anything is measured: the ids of one would be other words to the other."""
    outcome = command("compare", tiny_llama, bytewise, "--data", texts)
    assert outcome.code == 2
    assert f"{tiny_llama} and {bytewise} have different vocabularies, of 17 and 260 tokens: the same row" in outcome.err
    turned = tmp_path / "turned"
    AutoModelForSequenceClassification.from_pretrained(tiny_bert).save_pretrained(turned)
    words = list(AutoTokenizer.from_pretrained(tiny_bert).get_vocab().items())
    vocabulary = {word: place for word, place in words if place < 5} | {
        word: 21 - place for word, place in words if place >= 5
    }
    BertTokenizerFast(vocab=vocabulary).save_pretrained(turned)
    assert "have different vocabularies, of 17" in command("compare", tiny_bert, turned, "--data", texts).err
    for path in turned.glob("*token*"):
        path.unlink()
    (turned / "vocab.txt").unlink(missing_ok=True)
    assert command("compare", tiny_bert, turned, "--data", texts).code == 0, "without a tokenizer, the sizes count"


def test_what_cannot_be_evaluated(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    """A model without a head, and a head that was made anew because the checkpoint has none."""
    AutoModel.from_pretrained(tiny_bert).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "bare")
    bare = command("evaluate", tmp_path / "bare", "--data", texts)
    assert bare.code == 2
    assert f"{tmp_path / 'bare'} is a BertModel, which has no head, so it predicts nothing" in bare.err
    fresh = ("--data", texts, "--task", "sequence-classification")
    for arguments in (
        ("evaluate", tmp_path / "bare", *fresh),
        ("compare", tiny_bert, tmp_path / "bare", *fresh),
        ("report", tmp_path / "bare", *fresh, "--variant", "belief"),
    ):
        outcome = command(*arguments)
        assert outcome.code == 2
        assert (
            "has no weights for classifier.bias, classifier.weight: AutoModelForSequenceClassification would run with "
            "random ones, and what it gives would say nothing; fine-tune the model first"
        ) in outcome.err


def test_the_tokenizer_of_another_folder(command: Command, tiny_llama: Path, texts: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(bare)
    words = ("--data", texts, "--length", "16", "--json")
    wanted = json.loads(command("evaluate", tiny_llama, *words).out)
    assert "has no tokenizer that can" in command("evaluate", bare, *words).err
    assert json.loads(command("evaluate", bare, *words, "--tokenizer", tiny_llama).out) == wanted
    both = command("compare", bare, bare, *words, "--tokenizer", tiny_llama)
    assert json.loads(both.out)["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-5)
    done = command(
        "convert", bare, "belief", tmp_path / "out", "--data", texts, "--length", "8", "--tokens", "1",
        "--tokenizer", tiny_llama,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 17, "the tokenizer goes with the model"
    byte_tokenizer("left").save_pretrained(tmp_path / "bytes")
    large = command("evaluate", bare, *words, "--tokenizer", tmp_path / "bytes")
    assert f"the tokenizer of '{tmp_path / 'bytes'}' has 260 tokens, and the model knows 17; name the" in large.err


def test_what_a_variant_would_do(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    """`describe --variant` says what `patch` does."""
    words = ("--variant", "window", "--layers", "1", "-o", "window=7")
    told = json.loads(command("describe", tiny_llama, *words, "--json").out)
    assert command("patch", tiny_llama, "window", tmp_path / "out", *words[2:]).code == 0
    assert told == json.loads(command("describe", tmp_path / "out", "--json").out)
    assert [row["attention"] for row in told["rows"]] == ["softmax (stock)", "window"]
    assert told["rows"][1]["options"] == {"window": {"window": 7, "sinks": 4, "full_heads": []}}
    assert "1 of 2 self-attention modules swapped" in command("describe", tiny_llama, *words).out
    for wrong, said in (
        ((tiny_llama, "--variant", "simpletrom"), "did you mean 'simpletron'?"),
        ((tiny_llama, "--layers", "1"), "name it with --variant"),
        ((tiny_llama, "--variant", "window", "--layers", "5"), "layers"),
        ((tmp_path / "out", *words), "is converted already"),
    ):
        outcome = command("describe", *wrong)
        assert outcome.code == 2
        assert said in outcome.err
