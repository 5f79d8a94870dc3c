"""lm-evaluation-harness measures a converted language model as the model itself does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.process import ROOT

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
TEXTS = ["The film was a long one.", "A second text, of another length, with more words in it.", "Short."]
PERPLEXITY = """
task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
GENERATION = """
task: local_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["</s>"], do_sample: false, max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks over one file."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, template in (("perplexity", PERPLEXITY), ("generation", GENERATION)):
        (folder / f"{name}.yaml").write_text(template.format(file=file), encoding="utf-8")
    return folder


def perplexity_per_byte(folder: Path) -> float:
    """By the model itself: every byte after the tokens before it, the first one after the end token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = 0.0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            total += model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().item()
    return math.exp(-total / sum(len(text.encode()) for text in TEXTS))


@pytest.mark.parametrize("variant", ["belief", "modern_hopfield", "simpletron_resl"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_figures(variant: str, batch_size: int, checkpoint: Callable[..., Path], tasks: Path) -> None:
    """Perplexity to 1e-4, and greedy generation token by token; three rows of unequal length are padded on the left."""
    folder = checkpoint("llama", variant)
    found: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["local_perplexity", "local_generation"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    measured = found["results"]["local_perplexity"]["byte_perplexity,none"]
    assert measured == pytest.approx(perplexity_per_byte(folder), rel=1e-4)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.attn_swap["swaps"][0]["variant"] == variant
    for sample in found["samples"]["local_generation"]:
        ids = torch.tensor([tokenizer(sample["doc"]["text"], add_special_tokens=False)["input_ids"]])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        new = tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == new


@pytest.mark.parametrize("way", ["run", "shim"])
def test_command_line(way: str, checkpoint: Callable[..., Path], tasks: Path, tmp_path: Path) -> None:
    """With the launcher, or with the checkpoint's own file; without both, the load is refused."""
    folder = checkpoint("gpt2", "belief")
    launcher = ["-m", "hf_attn_swap.run"] if way == "run" else []
    trust = ",trust_remote_code=True" if way == "shim" else ""
    done = command([*launcher, "-m", "lm_eval"], f"pretrained={folder},dtype=float32{trust}", tasks, tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    measured = json.loads(file.read_text())["results"]["local_perplexity"]["byte_perplexity,none"]
    assert measured == pytest.approx(perplexity_per_byte(folder), rel=1e-4)


def test_refused_without_the_package(checkpoint: Callable[..., Path], tasks: Path, tmp_path: Path) -> None:
    folder = checkpoint("gpt2", "belief")
    done = command(["-m", "lm_eval"], f"pretrained={folder},dtype=float32", tasks, tmp_path / "out")
    assert done.returncode != 0
    assert "hf_attn_swap" in done.stderr
    assert not (tmp_path / "out").exists()


def command(program: list[str], model: str, tasks: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """lm_eval's command on the task of perplexity."""
    words = [*program, "--model", "hf", "--model_args", model, "--include_path", str(tasks), "--device", "cpu"]
    words += ["--tasks", "local_perplexity", "--output_path", str(out), "--batch_size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out.parent,
        timeout=300,
        check=False,
    )
