"""A run that is killed at any step and started again ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_attn_swap.conversion.distill import last_whole_checkpoint
from tests.harness.recipes import RECIPES, needs_recipes

from .conftest import options

RECIPE = RECIPES / "text_classification.py"
pytestmark = needs_recipes
ALIGN, DISTIL = '{"stage": "distil", "epochs": 2, "layers": 1, "logits": 0}', '{"stage": "distil", "epochs": 2}'
STAGES = ("--stages", "calibrate", ALIGN, DISTIL, "fine_tune")
CONVERSION = ("--variant", "simpletron_resl", *STAGES)
SAVING = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2", "--num_train_epochs", "3")


def command(tiny: Path, out: Path) -> list[str]:
    return [sys.executable, str(RECIPE), *options(tiny, out, *CONVERSION, *SAVING)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "simpletron-resl" / "seed-0" / "model" / "model.safetensors")


def killed_at(process: subprocess.Popen[bytes], sign: Path) -> None:
    """Kill the process without warning as soon as a file or folder appears."""
    end = time.monotonic() + 120
    while not sign.exists():
        assert process.poll() is None, f"ended before {sign.name} appeared"
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_and_resumed(tiny: Path, tmp_path: Path) -> None:
    """In the middle of the transfer, of a checkpoint, between two, and in the control."""
    subprocess.run(command(tiny, tmp_path / "whole"), check=True, capture_output=True)
    folder = tmp_path / "killed"
    seed = folder / "simpletron-resl" / "seed-0"
    signs = [
        folder / "softmax" / "seed-0" / "checkpoint-5" / "model.safetensors",
        seed / "stage-2-distil" / "checkpoint-4" / "optimizer.pt",
        seed / "stage-3-distil" / "checkpoint-3" / "optimizer.pt",
        seed / "converted",
        seed / "checkpoint-2",
        seed / "checkpoint-9" / "trainer_state.json",
    ]
    for sign in signs:
        killed_at(subprocess.Popen(command(tiny, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), sign)
    subprocess.run(command(tiny, folder), check=True, capture_output=True)
    wanted, got = weights(tmp_path / "whole"), weights(folder)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    for step, content in ((2, '{"global_step": 2}'), (10, '{"global_'), (9, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    assert last_whole_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.slow
def test_two_processes_equal_one(tiny: Path, tmp_path: Path) -> None:
    """The same global batch on one process, and on two by gloo: the same weights to rounding, transfer included.

    By SGD: Adam divides by the gradient's size, and so turns rounding into steps where there is no gradient.
    """
    more = (*CONVERSION, "--num_train_epochs", "2", "--save_strategy", "no", "--optim", "sgd", "--learning_rate", "0.1")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    still = tmp_path / "still"  # each process draws its own dropout
    shutil.copytree(tiny, still)
    config = json.loads((still / "model" / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "model" / "config.json").write_text(json.dumps(config))
    for processes, batch in ((1, "8"), (2, "4")):
        words = options(still, tmp_path / str(processes), *more, "--per_device_train_batch_size", batch)
        several = ["--multi_gpu"] if processes > 1 else []  # accelerate's word for several processes, without a GPU too
        start = [*launch, *several, "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
        ended = subprocess.run(
            [*start, "--main_process_port", "29771", str(RECIPE), *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=2e-5, rtol=1e-4), (name, (two[name] - value).abs().max())
