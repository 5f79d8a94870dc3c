r"""Prepares chemical reactions (SMILES) for an ALBERT that was pretrained on reactions, as in RXNMapper.

    pip install rdkit
    python recipes/prepare_reactions.py MODEL OUT --train eval.csv --test test.csv
    python recipes/language_modeling.py recipes/configs/distil_albert.yaml --variant belief \
        --model_name_or_path MODEL --dataset_name OUT

A CSV file has a column `reactants>reagents>production`, as the files of USPTO-50k have. Atom maps are removed, and the
molecules are written in RDKit's canonical form, since the model was pretrained on such text. The script also writes
the tokenizer of `MODEL/vocab.txt` into MODEL, so that `AutoTokenizer` can read it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

COLUMN = "reactants>reagents>production"
# One token per atom, bond, bracket, ring number or arrow; an atom in square brackets is one token.
# Schwaller et al., Molecular Transformer, ACS Central Science 2019.
TOKEN = r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"


def tokenizer_of(vocabulary: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of reactions: one token per line of the file, `[CLS]` before and `[SEP]` after a reaction."""
    words = vocabulary.read_text(encoding="utf-8").splitlines()
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), behavior="isolated")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    named = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "CLS", "SEP", "PAD", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def reactions(path: Path) -> Iterator[str]:
    """The reactions of a file as `reactants>>product`, without atom maps."""
    from rdkit import Chem

    def canonical(smiles: str) -> str:
        molecule = Chem.MolFromSmiles(smiles)
        for atom in molecule.GetAtoms():
            atom.SetAtomMapNum(0)
        return str(Chem.MolToSmiles(molecule))

    with path.open(encoding="utf-8", newline="") as lines:
        for row in tqdm(csv.DictReader(lines), desc=path.name, unit="reaction"):
            reactants, _, product = row[COLUMN].split(">")
            yield f"{canonical(reactants)}>>{canonical(product)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = tokenizer_of(arguments.model / "vocab.txt")
    tokenizer.save_pretrained(arguments.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [tokenizer(text)["input_ids"] for text in reactions(getattr(arguments, split))]
        unknown = sum(row.count(tokenizer.unk_token_id) for row in rows)
        Dataset.from_dict({"input_ids": rows}).to_parquet(arguments.out / f"{split}.parquet")
        print(f"{split}: {len(rows):,} reactions, {sum(map(len, rows)):,} tokens, {unknown:,} of them unknown")


if __name__ == "__main__":
    main()
