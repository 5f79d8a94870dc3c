r"""Writes ListOps of the Long Range Arena (Tay et al. 2020): nested operations on digits, whose value is a digit.

    python recipes/listops.py OUT --train 96000 --test 2000 --min_length 500 --max_length 2000 --seed 0

The value of [MAX 2 9 [MIN 4 7 ] 0 ] is 9. Above the deepest level, a node is an operation with probability 1/4, and
otherwise a digit. An operation is one of four and has 2 to `max_args` arguments, all equally likely. An expression is
kept if it has more than `min_length` and fewer than `max_length` tokens and was not drawn before. The files have no
parentheses. The original files have them, and `value` skips them. No function is recursive, so any depth works.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value
from tqdm import tqdm

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda digits: int(
        statistics.median(digits)
    ),  # truncated for an even number of digits, as in the original files
    "[SM": lambda digits: sum(digits) % 10,
}
NAMES, DIGITS, END, PARENTHESES = tuple(OPERATORS), tuple("0123456789"), "]", ("(", ")")
TOKENS = (*NAMES, *DIGITS, END)
OPERATION_SHARE = 0.25
PATIENCE = 20_000  # the search stops after this many draws in a row without a new expression


def tokens(text: str) -> list[str]:
    """The tokens of an expression, without parentheses.

    Raises:
        ValueError: a token is unknown.
    """
    words = [word for word in text.split() if word not in PARENTHESES]
    if unknown := [word for word in words if word not in TOKENS]:
        raise ValueError(f"unknown token {unknown[0]!r}; known: {' '.join(TOKENS)}.")
    return words


def value(text: str) -> int:
    """The value of an expression.

    Raises:
        ValueError: a token is unknown, or the expression is not complete.
    """
    open_: list[tuple[str, list[int]]] = [("", [])]  # operations that are not closed yet, with their arguments so far
    for place, word in enumerate(tokens(text)):
        if len(open_) == 1 and open_[0][1]:
            raise ValueError(f"token {place}, {word!r}, comes after the end of the expression.")
        if word in OPERATORS:
            open_.append((word, []))
        elif word != END:
            open_[-1][1].append(int(word))
        elif len(open_) == 1:
            raise ValueError(f"token {place}, ']', closes nothing.")
        else:
            name, digits = open_.pop()
            if not digits:
                raise ValueError(f"token {place}, ']', closes {name} without arguments.")
            open_[-1][1].append(OPERATORS[name](digits))
    if len(open_) > 1:
        raise ValueError(f"{open_[-1][0]} is not closed; {len(open_) - 1} ']' missing at the end.")
    if not open_[0][1]:
        raise ValueError("the expression is empty.")
    return open_[0][1][0]


def draw(generator: random.Random, max_length: int, max_depth: int, max_args: int) -> list[str]:
    """A random expression, or the first `max_length` tokens of an expression that is longer."""
    words: list[str] = []
    left = [1]  # number of arguments that are missing at each level; level 0 is the expression itself
    while len(words) < max_length:
        if left[-1] == 0:
            left.pop()
            if not left:
                break
            words.append(END)
            continue
        left[-1] -= 1
        if len(left) < max_depth and generator.random() < OPERATION_SHARE:
            words.append(generator.choice(NAMES))
            left.append(generator.randint(2, max_args))
        else:
            words.append(generator.choice(DIGITS))
    return words


def expressions(
    count: int, min_length: int, max_length: int, max_depth: int = 10, max_args: int = 10, seed: int = 0
) -> list[str]:
    """`count` different expressions, each of more than `min_length` and fewer than `max_length` tokens.

    Raises:
        ValueError: `max_args` is below 2, or the bounds allow too few expressions.
    """
    if max_args < 2:
        raise ValueError(f"max_args must be at least 2, got {max_args}.")
    generator, vain = random.Random(seed), 0
    texts: dict[str, None] = {}
    with tqdm(total=count, desc="ListOps", unit="row") as bar:
        while len(texts) < count:
            words = draw(generator, max_length, max_depth, max_args)
            text = " ".join(words)
            if min_length < len(words) < max_length and text not in texts:
                texts[text] = None
                bar.update()
                vain = 0
            elif (vain := vain + 1) == PATIENCE:
                raise ValueError(f"{PATIENCE:,} draws brought nothing new; widen the lengths or ask for fewer rows.")
    return list(texts)


def save(texts: list[str], path: Path) -> None:
    """Write expressions and their values as the columns text and label."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(DIGITS))})
    Dataset.from_dict({"text": texts, "label": [value(text) for text in texts]}, features).to_parquet(path)
    print(f"{path}: {len(texts):,} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=96_000, help="Rows to train on.")
    parser.add_argument("--test", type=int, default=2_000, help="Rows held out; the same for any --train.")
    parser.add_argument("--min_length", type=int, default=500, help="Expressions have more tokens than this,")
    parser.add_argument("--max_length", type=int, default=2_000, help="and fewer than this.")
    parser.add_argument("--max_depth", type=int, default=10, help="Levels, that of the last digits counted.")
    parser.add_argument("--max_args", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    bounds = (chosen.min_length, chosen.max_length, chosen.max_depth, chosen.max_args)
    if min(chosen.train, chosen.test) < 1:
        parser.error(f"--train and --test must be at least 1, got {chosen.train} and {chosen.test}.")
    try:
        texts = expressions(chosen.test + chosen.train, *bounds, chosen.seed)
    except ValueError as problem:
        parser.error(str(problem))
    chosen.out.mkdir(parents=True, exist_ok=True)
    save(texts[: chosen.test], chosen.out / "test.parquet")
    save(texts[chosen.test :], chosen.out / "train.parquet")


if __name__ == "__main__":
    main()
