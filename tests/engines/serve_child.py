"""Runs folders in vLLM, one after the other: `python serve_child.py JOBS RESULTS [WORD]`, both files of JSON.

A job has a folder, prompts (lists of numbers of tokens), the number of new tokens, and options of vLLM. Its result has
the tokens that vLLM generates, the log-probability of each token of the prompt (but the first) and of the text, and
the same for a second run, in which the prompts are in the cache; or the error. With "build" the model is only built,
and with "bypass" a module computes attention of its own. With the word "imported", the process
has imported hf_attn_swap before; with "absent", it cannot import it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
DEFAULTS = dict(dtype="float32", max_model_len=512, max_num_seqs=4, enforce_eager=True, disable_log_stats=True)


def generated(engine: Any, prompts: list[list[int]], count: int, *, of_prompt: bool) -> list[dict[str, Any]]:
    """The tokens and log-probabilities of each prompt and its text."""
    from vllm import SamplingParams

    # Log-probabilities of a prompt make vLLM compute all of it: without them it reads the prompt from its cache.
    greedy = SamplingParams(temperature=0, max_tokens=count, logprobs=1, prompt_logprobs=1 if of_prompt else None)
    rows = []
    for row in engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False):
        text = row.outputs[0]
        asked = zip(row.prompt_logprobs[1:], row.prompt_token_ids[1:], strict=True) if of_prompt else ()
        new = zip(text.logprobs, text.token_ids, strict=True)
        rows.append(
            {
                "tokens": list(text.token_ids),
                "prompt": [found[token].logprob for found, token in asked],
                "text": [found[token].logprob for found, token in new],
                "cached": row.num_cached_tokens,
            }
        )
    return rows


def bypass(model: Any) -> None:
    """Replace the forward of one attention module by one that does not ask for the attention function."""
    core = next(module for module in model.modules() if hasattr(module, "attn_swap"))
    core.forward = lambda hidden_states, **_: (hidden_states, None)


def served(job: dict[str, Any]) -> dict[str, Any]:
    """The result of one job."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = None
    try:
        engine = LLM(job["folder"], **{**DEFAULTS, **job.get("options", {})})
        if job.get("build"):
            return {"built": True}
        if job.get("bypass"):
            engine.apply_model(bypass)
        prompts, count = job["prompts"], job["tokens"]
        first = generated(engine, prompts, count, of_prompt=True)
        return {"first": first, "again": generated(engine, prompts, count, of_prompt=False)}
    except Exception as problem:  # noqa: BLE001  # any error is a result
        return {"error": f"{type(problem).__name__}: {problem}", "trace": traceback.format_exc()}
    finally:
        with contextlib.suppress(AttributeError):
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


class Absent:
    """A finder of modules that does not find hf_attn_swap."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Stop the search for this package."""
        if name.partition(".")[0] == "hf_attn_swap":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    if "imported" in sys.argv:
        import hf_attn_swap  # noqa: F401
    if "absent" in sys.argv:
        sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    jobs, results = (Path(word) for word in sys.argv[1:3])
    done = []
    for job in json.loads(jobs.read_text()):
        done.append(served(job))
        results.write_text(json.dumps(done))
