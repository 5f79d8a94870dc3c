"""Hidden numbers and values of keys: which texts are made, what is counted, against a plain loop; what is refused."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.measuring.retrieval import (
    DEPTHS,
    Prompt,
    Prompts,
    Retrieved,
    haystacks,
    key_values,
    needle,
    pair_texts,
)
from tests.contract.harness import fresh, refused
from tests.harness.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer("left")
REAL = "it was a dark and stormy night and the rain fell in torrents "
ROWS = [TOKENIZER(REAL * 30, add_special_tokens=False)["input_ids"]]
SENTENCE = re.compile(r" The special number of (\w+) is (\d{5})\.")
LENGTH = 640  # the eleven sentences take some 450 bytes
BREAK = 7
IDS = [list(range(4, 64)), list(range(10, 50))]  # 60 different tokens, and 59 without the line break: 29 pairs


def stock(name: str = "llama", **config: Any) -> Any:
    return fresh(name, torch.float64, **{"vocab_size": 260, "max_position_embeddings": 2048, **config})


def short(**config: Any) -> Any:
    return fresh("llama", torch.float64, **{"max_position_embeddings": 128, **config})


def lines(text: str, **_: Any) -> dict[str, list[int]]:
    assert text == "\n"
    return {"input_ids": [BREAK]}


def unbroken(text: str, **_: Any) -> dict[str, list[int]]:
    """As a tokenizer that drops white space."""
    return {"input_ids": []}


def by_a_loop(model: Any, texts: tuple[Prompt, ...]) -> dict[Any, tuple[list[float], list[bool]]]:
    """By the name of an answer, over all texts: the log-probability of each token, and whether it is the first."""
    read: dict[Any, tuple[list[float], list[bool]]] = {}
    for text in texts:
        for name, places_T in text.answers.items():
            log_p, first = read.setdefault(name, ([], []))
            for place in places_T.tolist():
                with torch.no_grad():
                    logits = model(input_ids=text.ids[None, :place]).logits[0, -1]
                token = int(text.ids[place])
                log_p.append(float(logits.log_softmax(-1)[token]))
                first.append(int(logits.argmax()) == token)
    return read


def is_mean(retrieved: Retrieved, count: int, log_p: list[float], first: list[bool]) -> bool:
    means = sum(log_p) / len(log_p), sum(first) / len(first)
    return retrieved.count == count and (retrieved.log_p, retrieved.token_accuracy) == pytest.approx(means, abs=1e-5)


def test_texts_with_numbers() -> None:
    """Each depth has a sentence at its place, all are asked for at the end, and one of them was not hidden."""
    (length, texts), *others = haystacks(stock(), ROWS, TOKENIZER, (LENGTH,)).texts.items()
    assert (length, len(texts), others) == (LENGTH, 4, [])
    seen, orders = set(), set()
    for text in texts:
        assert len(text.ids) == LENGTH
        words = TOKENIZER.decode(text.ids)
        sentences = [(match[1], match[2], match.start()) for match in SENTENCE.finditer(words)]
        hidden, asked_for = sentences[: len(DEPTHS)], sentences[len(DEPTHS) :]
        real = SENTENCE.sub("", words)
        assert real in REAL * 90, "one piece of the rows, joined to a circle"
        assert len({name for name, _, _ in asked_for}) == len(DEPTHS) + 1
        assert {sentence[:2] for sentence in hidden} < {sentence[:2] for sentence in asked_for}
        for place, (depth, (_, _, start)) in enumerate(zip(DEPTHS, hidden, strict=True)):
            before = sum(len(SENTENCE.search(words, at)[0]) for *_, at in hidden[:place])  # type: ignore[index]
            assert start - before == round(depth * len(real))
        for depth, digits_T in text.answers.items():
            number = "".join(TOKENIZER.decode([digit]) for digit in text.ids[digits_T])
            at = int(digits_T[0])
            assert at > asked_for[0][2], "the digits at the end are asked for"
            assert words[at : at + 5] == number
            wanted = dict(zip(DEPTHS, hidden, strict=True)).get(depth)
            assert (number in {sentence[1] for sentence in hidden}) is (depth is not None)
            assert wanted is None or number == wanted[1]
        seen.add(words)
        orders.add(tuple(sorted(text.answers, key=lambda depth: int(text.answers[depth][0]))))
    assert len(seen) == len(texts)
    assert len(orders) > 1, "not in the order in which they were hidden"


def test_texts_of_pairs() -> None:
    """Pairs of different tokens of the rows, once in one order and once in another; each value is asked for again."""
    made = pair_texts(short(), IDS, lines, (8, 16, 64), texts=3)
    assert {pairs: [len(text.ids) for text in texts] for pairs, texts in made.texts.items()} == {
        8: [48] * 3,
        16: [96] * 3,
    }
    for pairs, texts in made.texts.items():
        assert len({tuple(text.ids.tolist()) for text in texts}) == 3
        for text in texts:
            assert (text.ids[2::3] == BREAK).all()
            row = [token for token in text.ids.tolist() if token != BREAK]
            once, again = row[: 2 * pairs], row[2 * pairs :]
            assert len(set(once)) == 2 * pairs
            assert set(once) <= set(range(4, 64))
            first, second = (list(zip(tokens[::2], tokens[1::2], strict=True)) for tokens in (once, again))
            assert first != second
            assert set(first) == set(second)
            assert text.ids[torch.cat(list(text.answers.values()))].tolist() == again[1::2]


def test_numbers_against_a_plain_loop() -> None:
    model = patch_model(stock(), "window", window=8, sinks=1).eval()
    texts = haystacks(model, ROWS, TOKENIZER, (LENGTH,), texts=2)
    result, read = texts.measure(model), by_a_loop(model, texts.texts[LENGTH])
    assert is_mean(result.chance[LENGTH], 2, *read.pop(None))
    assert set(result.cells[LENGTH]) == set(read) == set(DEPTHS)
    assert all(is_mean(result.cells[LENGTH][depth], 2, *read[depth]) for depth in DEPTHS)
    log_p, first = (list(chain(*values)) for values in zip(*read.values(), strict=True))
    assert is_mean(result.together[LENGTH], 2 * len(DEPTHS), log_p, first)


@pytest.mark.parametrize("tokenizer", [lines, unbroken])
def test_values_against_a_plain_loop(tokenizer: Any) -> None:
    model = patch_model(short(), "window", window=4, sinks=1).eval()
    texts = pair_texts(model, IDS, tokenizer, (8, 16))
    result = texts.measure(model).by_pairs
    for pairs, prompts in texts.texts.items():
        log_p, first = (list(chain(*values)) for values in zip(*by_a_loop(model, prompts).values(), strict=True))
        assert is_mean(result[pairs], 4 * pairs, log_p, first)
        assert result[pairs].exact_match == result[pairs].token_accuracy


def test_an_answer_is_given_if_all_of_its_tokens_are() -> None:
    whole, partly = torch.ones(5).bool(), torch.tensor([True, True, True, True, False])
    result = Retrieved.of([(torch.full((5,), -1.0), whole), (torch.full((5,), -2.0), partly)])
    assert result == Retrieved(count=2, exact_match=0.5, token_accuracy=0.9, log_p=-1.5)


def test_lengths_and_pairs_that_do_not_fit_are_left_out() -> None:
    def sizes(texts: Prompts[Any]) -> list[int]:
        return list(texts.texts)

    lengths = (64, LENGTH, 1024, 4096)
    assert sizes(haystacks(stock(), ROWS, TOKENIZER, lengths)) == [LENGTH, 1024]
    bounded = haystacks(stock(max_position_embeddings=1000), ROWS, TOKENIZER, lengths)
    assert sizes(bounded) == [LENGTH]
    assert sizes(haystacks(stock(), [ROWS[0][:700]], TOKENIZER, lengths)) == [LENGTH]
    assert sizes(pair_texts(short(max_position_embeddings=95), IDS, lines, (8, 16))) == [8]


def test_refusals_of_numbers() -> None:
    with refused("asked for by the next token; BertForMaskedLM"):
        needle(fresh("bert"), ROWS, TOKENIZER)
    for more in ({"depths": ()}, {"depths": (0.5, 1.5)}, {"depths": (-0.1,)}, {"texts": 0}):
        with refused("at least one text and 1 to 10 depths"):
            needle(stock(), ROWS, TOKENIZER, **more)  # type: ignore[arg-type]
    with refused("no text of 64 tokens", "has 2,048 positions"):
        needle(stock(), ROWS, TOKENIZER, lengths=(64,))
    with refused("got the name 'gpt2'"):
        needle(stock(), ROWS, "gpt2")

    class Blind:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3] * len(text.split())}

        def decode(self, ids: list[int]) -> str:
            return "?" * len(ids)

    with refused("no tokens of digits"):
        needle(stock(), ROWS, Blind())


def test_refusals_of_pairs() -> None:
    with refused("asked for by the next token; BertForMaskedLM"):
        key_values(fresh("bert"), IDS, lines)
    for more in ({"pairs": ()}, {"pairs": (1, 8)}, {"texts": 0}):
        with refused("at least one text and numbers of pairs from 2"):
            key_values(short(), IDS, lines, **more)  # type: ignore[arg-type]
    with refused("32 pairs do not fit", "59 different tokens", "128 positions, of which it takes 6"):
        key_values(short(), IDS, lines, pairs=(32,))
    with refused("no rows"):
        key_values(short(), [], lines)
    with refused("got the name 'gpt2'"):
        key_values(short(), IDS, "gpt2")
