"""sentence-transformers embeds, trains and saves with a converted encoder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.harness.process import ROOT

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
TEXTS = ["A man plays a flute.", "Somebody plays music.", "It rains."]
LOAD = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], trust_remote_code=sys.argv[2] == "True", device="cpu")
np.save(sys.argv[3], model.encode(eval(sys.argv[4])))
"""


def mean_pooled(folder: Path) -> np.ndarray:
    """The embeddings by the model itself, one text after the other."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return np.stack([model(**tokenizer(each, return_tensors="pt")).last_hidden_state[0].mean(0) for each in TEXTS])


@pytest.mark.parametrize("variant", ["belief", "modern_hopfield", "simpletron_resl"])
def test_embeddings(variant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Texts of unequal length in one batch; then a save by sentence-transformers, and a load of what it saved."""
    folder = checkpoint("bert", variant, head="base")
    wanted = mean_pooled(folder)
    model = st.SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(model.encode(TEXTS), wanted, rtol=1e-4, atol=1e-5)
    model.save(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert again[0].auto_model.config.attn_swap["swaps"][0]["variant"] == variant


@pytest.mark.parametrize("trust", [True, False])
def test_program_without_the_package(trust: bool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A fresh process that does not import the package: equal with trust, refused by name without."""
    folder, out = checkpoint("bert", "belief", head="base"), tmp_path / "found.npy"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(trust), str(out), repr(TEXTS)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    if trust:
        assert done.returncode == 0, done.stderr[-2000:]
        np.testing.assert_allclose(np.load(out), mean_pooled(folder), rtol=1e-4, atol=1e-5)
    else:
        assert done.returncode != 0
        assert "hf_attn_swap" in done.stderr


def test_cross_encoder_trains_and_keeps_its_swap(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from datasets import Dataset

    folder = checkpoint("bert", "belief", head="classification", num_labels=1)
    model = st.CrossEncoder(str(folder), num_labels=1, device="cpu")
    pairs = [(first, second) for first in TEXTS for second in TEXTS]
    labels = [float(first == second) for first, second in pairs]
    rows = Dataset.from_dict({"one": [a for a, _ in pairs], "two": [b for _, b in pairs], "label": labels})
    before = model.predict(pairs)
    args = st.CrossEncoderTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    st.CrossEncoderTrainer(
        model=model, args=args, train_dataset=rows, loss=st.cross_encoder.losses.BinaryCrossEntropyLoss(model)
    ).train()
    after = model.predict(pairs)
    assert np.abs(after - before).max() > 1e-3
    model.save_pretrained(str(tmp_path / "saved"))
    again = st.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.predict(pairs), after, rtol=1e-5, atol=1e-6)
    assert again.model.config.attn_swap["swaps"][0]["variant"] == "belief"
