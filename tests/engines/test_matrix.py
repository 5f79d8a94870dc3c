"""Every variant in every engine computes what transformers computes, or is refused; no engine serves it otherwise.

The cells are written into benchmarks/figures/engines.json, from which the table in docs/results/engines.md is made.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from docs.tables.engines import RECORD
from hf_attn_swap import export, list_variants
from hf_attn_swap.engines.gguf import find_converter, write_gguf
from hf_attn_swap.layer.registry import tiny_options
from tests.harness.byte_tokenizer import byte_tokenizer

from .expected import differences
from .tiny import converted, save, stock

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other packages
TOLERANCE = 1e-3
TOKENS = 24
PROMPTS = [[20 + (7 * place) % 200 for place in range(length)] for length in (5, 17, 40)]
TEXT = "No engine serves a converted checkpoint with stock attention"
OTHERS: dict[str, dict[str, Any]] = {
    "sink, kind=score": dict(variant="sink", kind="score"),
    "sink, kind=score_value": dict(variant="sink", kind="score_value"),
    "window, sinks=0": dict(variant="window", window=8, sinks=0),
    "both of these": dict(variant="sink+window", sink={"kind": "score_value"}, window={"window": 8, "sinks": 0}),
}
ROWS = {name: dict(variant=name, **tiny_options(name)) for name in list_variants()} | OTHERS
EXACT, REFUSED = "exact", "refused"
COLUMNS = ("vLLM, plugin", "vLLM, exported", "llama.cpp, exported")
LLAMA = Path(os.environ.get("HF_ATTN_SWAP_ENGINES", ".")) / "llama.cpp"


@functools.cache
def model(row: str) -> Any:
    made = converted("llama", ROWS[row])
    made.config.bos_token_id, made.config.eos_token_id, made.config.pad_token_id = 1, 2, 0
    made.generation_config.eos_token_id = made.generation_config.pad_token_id = None
    return made


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that llama.cpp knows, of the vocabulary's size, trained on this package's sources."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = [file.read_text() for file in Path(__file__).parent.glob("*.py")]
    (folder / "text").write_text("\n".join(words))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=260,
        model_type="bpe",
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path | str]]:
    """For each row the converted model's folder, and the exported one, or why there is none."""
    made: dict[str, tuple[Path, Path | str]] = {}
    for row in ROWS:
        root = tmp_path_factory.mktemp("row")
        out: Path | str = root / "exported"
        try:
            export(model(row), out, byte_tokenizer("left"))
        except ValueError as refusal:
            out = str(refusal)
        made[row] = save(model(row), root / "converted"), out
    return made


@pytest.fixture(scope="module")
def in_vllm(folders: Any, serve: Any) -> Callable[[str, int], Any]:
    """What vLLM gives for the converted folder by the plugin (0), and for the exported one without the package (1)."""
    results: dict[tuple[str, int], Any] = {}
    for place, words in enumerate(((), ("absent",))):
        rows = [row for row in ROWS if isinstance(folders[row][place], Path)]
        jobs = [dict(folder=str(folders[row][place]), prompts=PROMPTS, tokens=TOKENS) for row in rows]
        results |= {(row, place): result for row, result in zip(rows, serve(jobs, *words), strict=True)}
    return lambda row, place: results.get((row, place))


@pytest.fixture(scope="module")
def record() -> Any:
    """Write the cells, if all tests of this file have run."""
    cells: dict[str, dict[str, str]] = {row: {} for row in ROWS}
    yield cells
    if all(len(columns) == len(COLUMNS) for columns in cells.values()):
        RECORD.write_text(json.dumps({"columns": COLUMNS, "rows": cells}, indent=1) + "\n")


def agrees(row: str, result: Any) -> str:
    """The cell for vLLM's result."""
    found = differences(model(row), PROMPTS, result)
    assert max(found["prompt"], found["text"], found["again"]) <= TOLERANCE, found
    assert found["other texts"] == 0, found
    return EXACT


@pytest.mark.parametrize("row", ROWS)
def test_plugin(row: str, in_vllm: Any, record: Any) -> None:
    result = in_vllm(row, 0)
    if "error" in result:
        assert "hf-attn-swap run transformers serve FOLDER" in result["error"], result["error"]
    record[row][COLUMNS[0]] = REFUSED if "error" in result else agrees(row, result)


@pytest.mark.parametrize("row", ROWS)
def test_exported_in_vllm(row: str, folders: Any, in_vllm: Any, record: Any) -> None:
    refusal = folders[row][1]
    if isinstance(refusal, str):
        assert "cannot be exported: " in refusal
    record[row][COLUMNS[1]] = REFUSED if isinstance(refusal, str) else agrees(row, in_vllm(row, 1))


@pytest.mark.parametrize("row", ROWS)
def test_exported_in_llama_cpp(row: str, folders: Any, pieces: Path, tmp_path: Path, record: Any) -> None:
    converted_folder, folder = folders[row]
    converter = find_converter(LLAMA)
    if isinstance(folder, str):  # the converted folder is what a user could try next
        with pytest.raises(ValueError, match="HfAttnSwapLlamaForCausalLM is not supported"):
            write_gguf(converted_folder, tmp_path / "model.gguf", converter)
        record[row][COLUMNS[2]] = REFUSED
        return
    for file in (*folder.glob("*config.json"), *folder.glob("*.safetensors"), pieces):
        if not file.name.startswith("tokenizer_"):
            shutil.copy(file, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", converter)
    words = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    ids = torch.tensor([[1, *words.encode(TEXT)]])
    assert completion(tmp_path / "model.gguf").startswith(greedy(model(row), ids, words))
    if row != "softmax":
        assert greedy(stock("llama"), ids, words) != greedy(model(row), ids, words)
    record[row][COLUMNS[2]] = EXACT


def greedy(model: Any, ids: Any, words: Any) -> str:
    """The text that transformers writes after these tokens."""
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return str(words.decode(made[0, 1:].tolist())).removeprefix(TEXT)


def completion(file: Path) -> str:
    """The text that llama.cpp writes after the same text, and more: it sometimes ends before its last words are out."""
    program = LLAMA / "build" / "bin" / "llama-completion"
    command = [program, "-m", file, "-p", TEXT, "-n", str(2 * TOKENS), "--temp", "0", "--ignore-eos", "-no-cnv"]
    precision = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    done = subprocess.run([*command, *precision, "--no-display-prompt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
