"""Pairs of keys and values: which texts are made, what is counted, against a plain loop; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.measuring.key_values import KeyValues, PairTexts, Recalls, key_value_table, key_values
from tests.contract.harness import fresh, refused

BREAK = 7
ROWS = [list(range(4, 64)), list(range(10, 50))]  # 60 different tokens, and 59 without the line break: 29 pairs


def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
    assert text == "\n"
    return {"input_ids": [BREAK]}


def unbroken(text: str, **_: Any) -> dict[str, list[int]]:
    """As a tokenizer that drops white space."""
    return {"input_ids": []}


def stock(name: str = "llama", **config: Any) -> Any:
    return fresh(name, torch.float64, **{"max_position_embeddings": 128, **config})


def test_the_texts() -> None:
    """Pairs of different tokens of the rows, once in one order and once in another."""
    made = PairTexts.of(stock(), ROWS, tokenizer, (8, 16, 64), texts=3)
    assert {pairs: tuple(texts.shape) for pairs, texts in made.texts.items()} == {8: (3, 48), 16: (3, 96)}
    assert made.longest == 96
    for pairs, texts_NL in made.texts.items():
        assert len({tuple(row) for row in texts_NL.tolist()}) == 3
        assert (texts_NL[:, 2::3] == BREAK).all()
        for lines in texts_NL.tolist():
            row = [token for token in lines if token != BREAK]
            once, again = row[: 2 * pairs], row[2 * pairs :]
            assert len(set(once)) == 2 * pairs
            assert set(once) <= set(range(4, 64))
            first, second = (list(zip(each[::2], each[1::2], strict=True)) for each in (once, again))
            assert first != second
            assert set(first) == set(second)


@pytest.mark.parametrize(("tokenizes", "line"), [(tokenizer, 3), (unbroken, 2)])
def test_against_a_plain_loop(tokenizes: Any, line: int) -> None:
    model = patch_model(stock(), "window", window=4, sinks=1).eval()
    texts = PairTexts.of(model, ROWS, tokenizes, (8, 16))
    found = texts.measure(model)
    for pairs, texts_NL in texts.texts.items():
        log_p, first = [], []
        for row in texts_NL.tolist():
            for place in range(line * pairs + 1, 2 * line * pairs, line):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([row[:place]])).logits[0, -1]
                log_p.append(float(logits.log_softmax(-1)[row[place]]))
                first.append(int(logits.argmax()) == row[place])
        recalls = found.by_pairs[pairs]
        assert recalls.values == len(first) == 4 * pairs
        assert recalls.log_p == pytest.approx(sum(log_p) / len(log_p), abs=1e-5)
        assert recalls.found == pytest.approx(sum(first) / len(first))


def test_refusals() -> None:
    with refused("values are asked for by the next token; BertForMaskedLM is no causal language model."):
        key_values(fresh("bert"), ROWS, tokenizer)
    for more in ({"pairs": ()}, {"pairs": (1, 8)}, {"texts": 0}):
        with refused("key_values takes at least one text and numbers of pairs from 2"):
            key_values(stock(), ROWS, tokenizer, **more)  # type: ignore[arg-type]
    with refused("32 pairs do not fit: the rows have 59 different tokens", "has 128 positions, of which it takes 6."):
        key_values(stock(), ROWS, tokenizer, pairs=(32,))
    assert list(key_values(stock(max_position_embeddings=95), ROWS, tokenizer, pairs=(8, 16)).by_pairs) == [8]
    with refused("there are no rows"):
        key_values(stock(), [], tokenizer)
    with refused("tokenizer must be a loaded tokenizer", "got the name 'gpt2'"):
        key_values(stock(), ROWS, "gpt2")


def test_the_table_and_plain_data() -> None:
    made = KeyValues(by_pairs={16: Recalls(values=64, found=0.5, log_p=-1.0)})
    assert key_value_table({"first": made, "second": made}).text().splitlines()[1:] == [
        "pairs  first  second  a guess",
        "16     50.0%  50.0%   6.2%",
    ]
    assert str(made).splitlines()[1] == "pairs  found  a guess"
    assert "<td>50.0%</td>" in made._repr_html_()
    assert json.loads(json.dumps(made.to_dict())) == {"16": {"values": 64, "found": 0.5, "log_p": -1.0}}
