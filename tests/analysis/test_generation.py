"""What models write: the samples hold what is asked for, the score counts it, texts are compared token by token."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.measuring import generation
from hf_attn_swap.measuring.generation import Answered, Tasks, Written, agreement, continuations, tasks
from tests.contract.harness import fresh, refused
from tests.harness.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer("left")
LENGTH = 4096  # in bytes
WORDS = [
    f"{first}{second}{third}{last}" for first in "bdfglm" for second in "aeo" for third in "nrst" for last in "aeo"
]
ROWS = [TOKENIZER(" ".join(WORDS * 6), add_special_tokens=False)["input_ids"]]


def stock(**config: Any) -> Any:
    return fresh("llama", torch.float32, **{"vocab_size": 260, "max_position_embeddings": 8192, **config}).eval()


@pytest.fixture(scope="module")
def made() -> Tasks:
    return tasks(stock(), ROWS, TOKENIZER, lengths=(LENGTH,), samples=3)


def texts(made: Tasks, task: str) -> list[tuple[str, tuple[str, ...]]]:
    samples = made.samples[task, LENGTH]
    assert all(LENGTH - 200 < len(sample.ids) + sample.tokens <= LENGTH for sample in samples)
    return [(TOKENIZER.decode(sample.ids), sample.expected) for sample in samples]


def test_the_key_that_is_asked_for_has_the_number(made: Tasks) -> None:
    for text, expected in texts(made, "niah_multikey"):
        numbers = dict(re.findall(r"numbers for (\w+) is: (\d{7})\.", text))
        assert len(numbers) == generation.KEYS
        (key,) = re.findall(r"number for (\w+) mentioned in the provided text\?", text)
        assert expected == (numbers[key],)


def test_the_chain_is_whole(made: Tasks) -> None:
    for text, expected in texts(made, "vt"):
        example, asked = text.split("Memorize and track")[1:]
        chains = [re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\n", part) for part in (example, asked)]
        for chain in chains:
            assert [given for _, given in chain[1:]] == [name for name, _ in chain[:-1]], "each from the one before"
            assert len(chain) == generation.HOPS + 1
        assert expected == tuple(name for name, _ in chains[1])
        assert f"the value {chains[1][0][1]}, they are:" in asked
        assert example.rstrip().endswith(" ".join(name for name, _ in chains[0])), "the example is solved"


def test_the_frequent_words_are_the_answer(made: Tasks) -> None:
    for text, expected in texts(made, "cwe"):
        listed = Counter(re.findall(r"\d+\. (\w+)", text.split("Below is")[2].split("Question")[0]))
        assert {word for word, _ in listed.most_common(generation.COMMON)} == set(expected)
        assert {listed[word] for word in expected} == {30}
        assert {count for word, count in listed.items() if word not in expected} == {3}


def test_the_score_is_the_share_of_the_words(made: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ""
    monkeypatch.setattr(generation, "_greedy", lambda *_: TOKENIZER(said, add_special_tokens=False)["input_ids"])
    assert set(made.measure(stock()).scores["vt", LENGTH]) == {0.0}
    sample = made.samples["vt", LENGTH][0]
    said = f"they are {' and '.join(sample.expected[:2])}".lower()
    assert made.measure(stock()).scores["vt", LENGTH] == (2 / 5, 0, 0)


def test_the_same_samples_for_all_models(made: Tasks) -> None:
    again = tasks(patch_model(stock(num_hidden_layers=1), "belief"), ROWS, TOKENIZER, lengths=(LENGTH,), samples=3)
    for name, samples in made.samples.items():
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(samples, again.samples[name], strict=True))


def test_texts_are_those_of_generate_and_differ_where_the_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PIECES", 4)
    model, other = stock(), patch_model(stock(), "window", window=4, sinks=0)
    prompts = continuations(model, ROWS, TOKENIZER)
    first, second = prompts.measure(model), prompts.measure(other)
    expected = model.generate(prompts.prompts[-1][None], max_new_tokens=64, do_sample=False)[0, 64:].tolist()
    assert list(first.ids[-1]) == expected
    assert agreement(first, first) == ([1.0] * 4, [len(ids) for ids in first.ids])
    equal, same = agreement(first, second)
    place = next(n for n, (a, b) in enumerate(zip(first.ids[-1], second.ids[-1], strict=True)) if a != b)
    assert same[-1] == place
    assert place / 64 <= equal[-1] < 1


def test_a_text_that_ends_sooner_is_another_text() -> None:
    short, long = Written(ids=((1, 2),), texts=("",)), Written(ids=((1, 2, 3, 4),), texts=("",))
    assert agreement(short, long) == ([0.5], [2])
    table = generation.agreement_table({"first": short, "second": long})
    assert [row[1] for row in table.rows] == ["50%", "2.0 of 2", "0 of 1"]


def test_the_interval_is_that_of_the_paired_difference() -> None:
    first = Answered(scores={("vt", 1024): (0.0, 0.2, 0.4, 0.6)})
    second = Answered(scores={("vt", 1024): (0.2, 0.2, 0.6, 0.6)})
    (row,) = generation.score_table({"first": first, "second": second}).rows
    assert row == ("vt", "1,024", "30.0%", "40.0%", "+10.0% ± 11.3%")


def test_a_length_is_left_out_that_is_too_short_for_a_task() -> None:
    """In bytes, the list of common words takes more than 1,024; and 4,096 are more than these rows have."""
    made = tasks(stock(), [ROWS[0][:2000]], TOKENIZER, lengths=(1024, 4096), samples=1)
    assert list(made.samples) == [("niah_multikey", 1024), ("vt", 1024)]


def test_refusals() -> None:
    model = stock()
    with refused("no text of 400 tokens"):
        tasks(model, ROWS, TOKENIZER, lengths=(400,))
    with refused("no text of 4096 tokens", "the model takes 128"):
        tasks(stock(max_position_embeddings=128), ROWS, TOKENIZER, (4096,))
    with refused("at least one sample"):
        tasks(model, ROWS, TOKENIZER, samples=0)
    with refused("take 50 different words"):
        tasks(model, [ROWS[0][:200]], TOKENIZER)
    with refused("is no causal language model"):
        continuations(fresh("bert"), ROWS, TOKENIZER)
    with refused("a text takes 128 tokens", "the model has 100 positions"):
        continuations(stock(max_position_embeddings=100), ROWS, TOKENIZER)
    with refused("a prompt takes 64 tokens"):
        continuations(model, [ROWS[0][:60]], TOKENIZER)
