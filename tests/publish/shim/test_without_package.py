"""Where the package is not installed, transformers refuses a converted model and says what is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hf_attn_swap
from tests import zoo
from tests.harness.process import python

CHECK = """
import json, sys
class Missing:
    def find_spec(self, name, *_):
        if name == "hf_attn_swap":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
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


@pytest.mark.skipif(sys.platform == "win32", reason="the fresh processes are forks")
def test_plain_transformers_refuses(tmp_path: Path) -> None:
    hf_attn_swap.patch_model(zoo.build("bert"), "belief").save_pretrained(tmp_path / "model")
    result = json.loads(python("-c", CHECK, tmp_path / "model", cwd=tmp_path).stdout.splitlines()[-1])
    assert result.pop("package") == "missing"
    assert len(result) == 6
    assert "pip install hf_attn_swap" in result["trusted"]
    for outcome in result.values():
        assert "hf_attn_swap" in outcome
        assert not outcome.startswith("loaded")
