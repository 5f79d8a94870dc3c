"""Compares a schedule of strengths on a model split by `fully_shard` with the whole model; test_schedule runs it."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import StrengthSchedule
from tests.contract.harness import batch_of, fresh


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    whole, sharded = (patch_model(fresh("bert", torch.float32), "simpletron_resl", strength=0.0) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    schedule, batch = StrengthSchedule(share=1.0), batch_of("bert", torch.float32)
    state = type("State", (), {"max_steps": 3})()
    for state.global_step in range(-1, 3):
        for model in (whole, sharded):
            schedule.on_step_begin(None, state, None, model=model)
        wanted, got = whole(**batch)[0], sharded(**batch)[0]
        assert torch.equal(got, wanted), state.global_step
        got.sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
