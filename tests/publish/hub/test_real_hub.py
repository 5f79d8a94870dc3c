"""The round trip against the real Hub, with a write token in HF_ATTN_SWAP_HUB_TOKEN; HF_ENDPOINT names another one.

It creates one private repository under the token's account and deletes it at the end.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from .client import Client, RemoteError

TOKEN = os.environ.get("HF_ATTN_SWAP_HUB_TOKEN")


def client(folder: Path, name: str, token: str) -> Client:
    kept = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    return Client({**kept, "HF_HOME": str(folder / name), "HF_TOKEN": token}, folder / f"{name}.log")


@pytest.mark.slow
@pytest.mark.skipif(TOKEN is None, reason="needs a write token of the Hub in HF_ATTN_SWAP_HUB_TOKEN")
@pytest.mark.parametrize("config", [{}, {"vocab_size": 80_000}], ids=["small", "more than 10 MB"])
def test_round_trip(tmp_path: Path, config: dict[str, int]) -> None:
    assert TOKEN is not None
    publisher, reader = (client(tmp_path, name, TOKEN) for name in ("publisher", "reader"))
    repo = f"{publisher.call('api', method='whoami')['name']}/hf-attn-swap-test-{secrets.token_hex(4)}"
    arguments = {"repo": repo, "family": "bert", "answer": str(tmp_path / "logits.pt")}
    try:
        publisher.call("publish", variant="outeffhop+gated", config=config, private=True, **arguments)
        assert reader.call("load", **arguments)["equal"]
        assert reader.call("load", by="AutoModelForMaskedLM", **arguments)["equal"]
        with pytest.raises(RemoteError, match=r"404|401"):
            reader.call("load_without_a_model", repo=f"{repo}-none")
    finally:
        publisher.call("api", method="delete_repo", repo_id=repo)
        publisher.close()
        reader.close()
