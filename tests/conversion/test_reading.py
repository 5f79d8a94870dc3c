"""No more of the data is read than is needed, however large they are; and a stream may have no end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from PIL import Image

from hf_attn_swap import convert
from hf_attn_swap.conversion import distill
from hf_attn_swap.conversion import rows as rows_module
from hf_attn_swap.conversion.distill import StopWithin
from hf_attn_swap.conversion.rows import Rows, as_rows, parts_of, shuffled, split
from tests.contract.harness import refused

from .converting import CALM, Killed, converted, rows, same, stock, timeless, weights
from .letters import Words
from .pixels import Pixels


class Endless:
    """A stream without an end, which counts the rows that it gave."""

    def __init__(self, row: Any = lambda number: f"{number:020d}") -> None:
        self.row, self.given = row, 0

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            self.given += 1
            yield self.row(number)


class Noted(list[Any]):
    """A list that notes which rows were read."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.seen: set[int] = set()

    def __getitem__(self, place: Any) -> Any:
        self.seen |= set(range(*place.indices(len(self)))) if isinstance(place, slice) else {place}
        return super().__getitem__(place)


# -- Places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 64, 1000])
def test_all_places_once_in_a_random_order(count: int) -> None:
    order = list(shuffled(count))
    assert sorted(order) == list(range(count))
    assert order == list(shuffled(count))
    if count == 1000:
        assert sum(abs(after - before) for before, after in itertools.pairwise(order)) / 999 > 300


def test_a_long_text_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_attn_swap.conversion.rows.LONG", 10)
    for text in ("", "a b", "one two three\nfour five", "a" * 35, " " * 25):
        assert "".join(parts_of(text)) == text
        assert all(len(part) <= 10 for part in parts_of(text))
    assert list(parts_of("one two three")) == ["one two", " three"]


# -- Rows --------------------------------------------------------------------------------------------------------------


def test_a_stream_of_text_gives_what_is_needed() -> None:
    stream = Endless()
    found = as_rows(stock("llama"), stream, Words(), length=5, most=200)
    assert (len(found), found.whole, stream.given) == (40, False, 10)
    whole = as_rows(stock("llama"), [f"{number:020d}" for number in range(10)], Words(), length=5)
    assert list(found.rows) == list(whole.rows)
    with refused("data must be a sequence of texts, images or rows that are ready, got Endless"):
        as_rows(stock("llama"), stream, Words(), length=5)


@pytest.mark.parametrize(
    ("name", "row", "processor", "unit", "read"),
    [
        ("bert", lambda number: "abcd" if number % 2 else " ", Words(), "tokens", 50),
        ("bert", lambda _: ("ab", "cd"), Words(), "tokens", 25),
        ("bert", lambda _: {"input_ids": [4, 5, 6, 7]}, None, "tokens", 25),
        ("vit", lambda _: Image.new("RGB", (4, 4)), Pixels(), "patches", 25),
        ("vit", lambda _: {"pixel_values": torch.zeros(3, 16, 16)}, None, "patches", 25),
        ("whisper", lambda _: rows("whisper", 1)[0], None, "rows", 7),
    ],
)
def test_streams_of_every_kind(name: str, row: Any, processor: Any, unit: str, read: int) -> None:
    stream = Endless(row)
    found = as_rows(stock(name), stream, processor, most=100, most_rows=7)
    assert (found.unit, found.whole, stream.given) == (unit, False, read)
    assert next(found.batches(2))
    again = as_rows(stock(name), itertools.islice(Endless(row), 4), processor, most=100)
    assert again.whole


def test_a_stream_of_blanks_and_of_nothing() -> None:
    with refused("every text is blank"):
        as_rows(stock("bert"), iter([None, " "]), Words(), most=5)
    with refused("there are no rows to convert on"):
        as_rows(stock("bert"), iter([]), Words(), most=5)
    with refused("row 1 is no text, as other rows are, but 3"):
        as_rows(stock("bert"), iter(["a", 3]), Words(), most=50)


def test_a_long_text_is_read_in_places_that_are_spread() -> None:
    texts = Noted(f"{number:06d}" for number in range(10_000))
    found = as_rows(stock("llama"), texts, Words(), length=30, most=3000)
    assert 3000 <= 30 * len(found) < 3600
    assert len(texts.seen) < 1100, "and some that tell how long the texts are"
    places = sorted(texts.seen)
    assert max(after - before for before, after in itertools.pairwise([*places, 10_000])) < 1000
    assert not found.whole


def test_very_many_rows_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MOST_ROWS", 10)
    for name, data, processor in (
        ("bert", ["abc"] * 1000, Words()),
        ("bert", [{"input_ids": [4, 5]}] * 1000, None),
        ("vit", [Image.new("RGB", (4, 4))] * 1000, Pixels()),
    ):
        found = as_rows(stock(name), data, processor)
        assert (len(found), found.whole) == (10, False)
        assert next(found.batches(10))


# -- Training rows and held-out rows -----------------------------------------------------------------------------------


def numbers(some: Rows) -> list[int]:
    return [row["input_ids"][0] for row in some.rows]


def test_data_of_a_usual_size_are_divided_as_before() -> None:
    """The order that the figures of earlier conversions were made with."""
    data = [{"input_ids": [number]} for number in range(400)]
    train, held = split(stock("bert"), data, None, None, 5, tokens=10)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()
    assert (numbers(train), numbers(held)) == (sorted(order[20:]), sorted(order[:20]))


def test_a_text_of_a_usual_size_is_divided_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [chr(97 + number % 26) * (number % 7) for number in range(4000)]
    joined = Words()("".join(letters))["input_ids"]
    blocks = [{"input_ids": joined[start : start + 5]} for start in range(0, len(joined) - 4, 5)]
    train, held = split(stock("llama"), letters, None, Words(), 5, tokens=10)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    count = len(blocks) // 20
    assert list(train.rows) == [blocks[place] for place in sorted(order[count:])]
    assert list(held.rows) == [blocks[place] for place in sorted(order[:count])]
    for name, value in (("POOL", 10), ("HELD_TOKENS", 100), ("FEWEST_ROWS", 8), ("HELD_ROWS", 8)):
        monkeypatch.setattr(rows_module, name, value)
    train, held = split(stock("llama"), letters, None, Words(), 5, tokens=300)
    assert 400 <= 5 * (len(train) + len(held)) < 1000
    assert len(held) == 20


def test_held_out_data_are_read_as_far_as_they_are_measured() -> None:
    stream = Endless()
    _, held = split(stock("bert"), ["ab"] * 20, stream, Words(), 20, tokens=10, eval_tokens=100)
    assert (len(held), stream.given, held.whole) == (5, 5, False)
    texts = [f"{number:020d}" for number in range(1000)]
    _, held = split(stock("bert"), ["ab"] * 20, texts, Words(), 20, tokens=10, eval_tokens=100)
    assert len(held) == 5
    assert len({row["input_ids"][-3] for row in held.rows}) > 3, "from everywhere"
    _, held = split(stock("bert"), ["ab"] * 20, texts, Words(), 20, tokens=10, eval_tokens=90)
    assert len(held) == 5, "not fewer tokens than that"
    _, held = split(stock("bert"), ["ab"] * 20, texts[:5], Words(), 20, tokens=10, eval_tokens=100)
    assert (len(held), held.whole) == (5, True)
    _, held = split(stock("bert"), ["ab"] * 20, texts, Words(), 20, tokens=10)
    assert len(held) == 1000, "20,000 tokens are below the usual bound"


# -- Conversions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read beside the budget is little."""
    for name, value in (("HELD_TOKENS", 80), ("HELD_ROWS", 8), ("FEWEST_TOKENS", 0), ("FEWEST_ROWS", 0)):
        monkeypatch.setattr(rows_module, name, value)


@pytest.mark.usefixtures("little")
def test_convert_reads_what_its_budget_needs() -> None:
    """And a generator, which can be read once, gives the same as an `IterableDataset`."""
    stages = [CALM]
    reports, models = [], [stock("llama"), stock("llama")]
    for budget, (model, make) in zip((400, 400), zip(models, (iter, column), strict=True), strict=True):
        stream = Endless()
        reports.append(
            converted(model, "belief", make(stream), processor=Words(), length=10, tokens=budget, stages=stages)
        )
        assert 24 <= stream.given <= 25, "480 tokens of 20 in a row"
    assert timeless(reports[0]) == timeless(reports[1])
    assert same(weights(models[0]), weights(models[1]))
    assert reports[0].held_out == 8
    assert sum(step.tokens for step in reports[0].steps) == 400


@pytest.mark.usefixtures("little")
def test_the_tokenizer_may_stand_behind_the_texts() -> None:
    report = convert(stock("llama"), "belief", ["ab"] * 40, Words(), length=10, tokens=0, progress=False)
    assert (report.held_out, report.row_length) == (4, 10)


def column(stream: Endless) -> Any:
    """The column of an `IterableDataset`."""

    def generated() -> Iterator[dict[str, str]]:
        return ({"text": text} for text in stream)

    return IterableDataset.from_generator(generated)["text"]


def test_convert_says_that_it_measured_on_a_part() -> None:
    held = rows("bert", 24, first=100)
    report = converted(stock("bert"), "belief", rows("bert"), eval_data=held, eval_tokens=40, tokens=1)
    assert report.held_out < 24
    assert f"The loss was measured on {report.held_out} rows, a part of the held-out data" in str(report)
    report = converted(stock("bert"), "belief", rows("bert"), eval_data=held, tokens=1)
    assert report.held_out == 24
    assert "a part of the held-out data" not in str(report)


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_a_conversion_of_a_stream_goes_on_at_the_same_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {"processor": Words(), "length": 10, "tokens": 640, "stages": [CALM]}
    whole, again = stock("llama"), stock("llama")
    wanted = converted(whole, "belief", Endless(), **given)
    monkeypatch.setattr(distill, "SAVE_EVERY", 4)

    def killed(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StopWithin, "on_step_end", killed)
        with pytest.raises(Killed):
            converted(stock("llama"), "belief", Endless(), output_dir=tmp_path, **given)
    assert list(tmp_path.glob("distil-1/checkpoint-4"))
    found = converted(again, "belief", Endless(), output_dir=tmp_path, **given)
    assert timeless(found) == timeless(wanted)
    assert same(weights(again), weights(whole))
