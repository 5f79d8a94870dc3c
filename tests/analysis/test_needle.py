"""Hidden numbers: which texts are made, what is counted, against a plain loop; and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.measuring.needle import DEPTHS, Finds, Haystacks, Needle, needle, needle_table
from tests.contract.harness import fresh, refused
from tests.harness.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer("left")
REAL = "it was a dark and stormy night and the rain fell in torrents "
ROWS = [TOKENIZER(REAL * 30, add_special_tokens=False)["input_ids"]]
SENTENCE = re.compile(r" The special number of (\w+) is (\d{5})\.")
LENGTH = 640  # the eleven sentences take some 450 bytes


def stock(name: str = "llama", **config: Any) -> Any:
    return fresh(name, torch.float64, **{"vocab_size": 260, "max_position_embeddings": 2048, **config})


def test_the_texts() -> None:
    """Each depth has a sentence at its place, all are asked for at the end, and one of them was not hidden."""
    (length, texts), *others = Haystacks.of(stock(), ROWS, TOKENIZER, (LENGTH,)).texts.items()
    assert (length, len(texts), others) == (LENGTH, 4, [])
    seen, orders = set(), set()
    for text in texts:
        assert len(text.ids) == LENGTH
        words = TOKENIZER.decode(text.ids)
        found = [(match[1], match[2], match.start()) for match in SENTENCE.finditer(words)]
        hidden, asked_for = found[: len(DEPTHS)], found[len(DEPTHS) :]
        real = SENTENCE.sub("", words)
        assert real in REAL * 90, "one piece of the rows, joined to a circle"
        assert len({name for name, _, _ in asked_for}) == len(DEPTHS) + 1
        assert {each[:2] for each in hidden} < {each[:2] for each in asked_for}
        for place, (depth, (_, _, start)) in enumerate(zip(DEPTHS, hidden, strict=True)):
            before = sum(len(SENTENCE.search(words, at)[0]) for *_, at in hidden[:place])  # type: ignore[index]
            assert start - before == round(depth * len(real))
        for depth, digits_T in text.places.items():
            number = "".join(TOKENIZER.decode([each]) for each in text.ids[digits_T])
            at = int(digits_T[0])
            assert at > asked_for[0][2], "the digits at the end are asked for"
            assert words[at : at + 5] == number
            wanted = dict(zip(DEPTHS, hidden, strict=True)).get(depth)  # type: ignore[arg-type]
            assert (number in {each[1] for each in hidden}) is (depth is not None)
            assert wanted is None or number == wanted[1]
        seen.add(words)
        orders.add(tuple(sorted(text.places, key=lambda depth: int(text.places[depth][0]))))
    assert len(seen) == len(texts)
    assert len(orders) > 1, "not in the order in which they were hidden"


def test_against_a_plain_loop() -> None:
    model = patch_model(stock(), "window", window=8, sinks=1).eval()
    texts = Haystacks.of(model, ROWS, TOKENIZER, (LENGTH,), texts=2)
    found = texts.measure(model)
    log_p: dict[float | None, list[float]] = {}
    first: dict[float | None, list[bool]] = {}
    with torch.no_grad():
        for text in texts.texts[LENGTH]:
            logits = model(input_ids=text.ids[None]).logits[0]
            for depth, digits_T in text.places.items():
                for place in digits_T.tolist():
                    token = int(text.ids[place])
                    log_p.setdefault(depth, []).append(float(logits[place - 1].log_softmax(-1)[token]))
                    first.setdefault(depth, []).append(int(logits[place - 1].argmax()) == token)
    for depth in (*DEPTHS, None):
        finds = found.chance[LENGTH] if depth is None else found.cells[LENGTH][depth]
        assert finds.log_p == pytest.approx(sum(log_p[depth]) / 10, abs=1e-5)
        assert (finds.numbers, finds.digits) == (2, pytest.approx(sum(first[depth]) / 10))
    every = [value for depth in DEPTHS for value in log_p[depth]]
    assert found.together[LENGTH].log_p == pytest.approx(sum(every) / len(every), abs=1e-5)
    assert found.together[LENGTH].numbers == 2 * len(DEPTHS)


def test_a_number_is_found_if_all_of_its_digits_are() -> None:
    whole, part = torch.ones(5).bool(), torch.tensor([True, True, True, True, False])
    found = Finds.of([(torch.full((5,), -1.0), whole), (torch.full((5,), -2.0), part)])
    assert found == Finds(numbers=2, found=0.5, digits=0.9, log_p=-1.5)


def test_lengths_that_do_not_fit_are_left_out() -> None:
    lengths = (64, LENGTH, 1024, 4096)
    assert list(Haystacks.of(stock(), ROWS, TOKENIZER, lengths).texts) == [LENGTH, 1024]
    bounded = Haystacks.of(stock(max_position_embeddings=1000), ROWS, TOKENIZER, lengths)
    assert (list(bounded.texts), bounded.longest) == ([LENGTH], LENGTH)
    assert list(Haystacks.of(stock(), [ROWS[0][:700]], TOKENIZER, lengths).texts) == [LENGTH]


def test_refusals() -> None:
    with refused("hidden numbers are asked for by the next token; BertForMaskedLM is no causal language model."):
        needle(fresh("bert"), ROWS, TOKENIZER)
    for more in ({"depths": ()}, {"depths": (0.5, 1.5)}, {"depths": (-0.1,)}, {"texts": 0}):
        with refused("a needle needs at least one text and 1 to 10 depths from 0 to 1"):
            needle(stock(), ROWS, TOKENIZER, **more)  # type: ignore[arg-type]
    with refused("no text of 64 tokens can hide numbers: ", "the model has 2,048 positions"):
        needle(stock(), ROWS, TOKENIZER, lengths=(64,))
    with refused("tokenizer must be a loaded tokenizer", "got the name 'gpt2'; pass AutoTokenizer.from_pretrained("):
        needle(stock(), ROWS, "gpt2")

    class Blind:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3] * len(text.split())}

        def decode(self, ids: list[int]) -> str:
            return "?" * len(ids)

    with refused("the tokenizer has no tokens of digits"):
        needle(stock(), ROWS, Blind())


def test_the_table_and_plain_data() -> None:
    def finds(digits: float, found: float = 0.0, numbers: int = 4) -> Finds:
        return Finds(numbers=numbers, found=found, digits=digits, log_p=-1.0)

    made = Needle(
        cells={256: {0.0: finds(1.0), 0.5: finds(0.5)}},
        together={256: finds(0.75, 0.5, 8)},
        chance={256: finds(0.1)},
    )
    assert needle_table({"first": made, "second": made}).text().splitlines()[1:] == [
        "depth                256 first  256 second",
        "0%                   100%       100%",
        "50%                  50%        50%",
        "all                  75%        75%",
        "not hidden (chance)  10%        10%",
        "numbers found        4 of 8     4 of 8",
    ]
    assert str(made).splitlines()[1] == "depth                256"
    assert "<td>4 of 8</td>" in made._repr_html_()
    plain = json.loads(json.dumps(made.to_dict()))["256"]
    assert (plain["found"], plain["depths"]["0.5"]["digits"], plain["chance"]["digits"]) == (0.5, 0.5, 0.1)


def test_the_model_is_as_before() -> None:
    model = stock("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    first, second = (needle(model, ROWS, TOKENIZER, lengths=(LENGTH,), texts=1) for _ in range(2))
    assert first == second
    assert model.training
