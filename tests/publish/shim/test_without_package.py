"""In a virtual environment without the package, transformers refuses a converted model and says what is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import hf_attn_swap
from tests import zoo

CHECK = """
import json, sys
from transformers import AutoModel, AutoModelForMaskedLM, BertForMaskedLM, pipeline
found = {}
calls = {cls.__name__: cls.from_pretrained for cls in (AutoModel, AutoModelForMaskedLM, BertForMaskedLM)}
calls["pipeline"] = lambda repo: pipeline("fill-mask", model=repo)
calls["trusted"] = lambda repo: AutoModelForMaskedLM.from_pretrained(repo, trust_remote_code=True)
calls["eager first"] = lambda repo: AutoModel.from_pretrained(repo).set_attn_implementation("eager")
for name, call in calls.items():
    try:
        found[name] = f"loaded {type(call(sys.argv[1])).__name__}"
    except Exception as problem:
        found[name] = f"{type(problem).__name__}: {problem}"
try:
    import hf_attn_swap
except ImportError:
    found["package"] = "missing"
print(json.dumps(found))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A virtual environment with every installed package but ours."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    there = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "hf_attn_swap" not in entry.name and not (there / entry.name).exists():
                (there / entry.name).symlink_to(entry)
    return python


@pytest.mark.skipif(sys.platform == "win32", reason="the environment is made of symbolic links")
def test_plain_transformers_refuses(python: Path, tmp_path: Path) -> None:
    hf_attn_swap.patch_model(zoo.build("bert"), "belief").save_pretrained(tmp_path / "model")
    command = [str(python), "-c", CHECK, str(tmp_path / "model")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)  # it may lead to the package
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("package") == "missing"
    assert len(result) == 6
    assert "pip install hf_attn_swap" in result["trusted"]
    for outcome in result.values():
        assert "hf_attn_swap" in outcome
        assert not outcome.startswith("loaded")
