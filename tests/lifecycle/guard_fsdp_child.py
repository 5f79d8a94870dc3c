"""Runs the guard on models split by `fully_shard` over two processes; test_guard runs it."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_attn_swap import patch_model
from hf_attn_swap.families import sites
from hf_attn_swap.wiring.placed import layer_of
from tests.contract.harness import batch_of, fresh
from tests.harness.bypass import go_around
from tests.harness.places import one_per_place, turns

PROCESSES = 2


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for number, (family, variant) in enumerate(turns(("bert", "llama"), one_per_place())):
        batch, dtype = batch_of(family, torch.float32), (None, torch.bfloat16)[number // 2 % 2]
        whole, sharded = (patch_model(fresh(family, torch.float32), variant) for _ in range(2))
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for site in sites(sharded):
            fully_shard(layer_of(sharded, site.path), mesh=mesh, mp_policy=policy)
        fully_shard(sharded, mesh=mesh, mp_policy=policy)
        wanted, got = whole(**batch)[0], sharded(**batch)[0]
        wanted.square().sum().backward()
        got.float().square().sum().backward()
        if dtype is None:
            assert torch.equal(got, wanted), (family, variant)
            for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
                if other.grad is not None:
                    assert torch.allclose(mine.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5), (family, variant)
        path = go_around(sharded)
        try:
            sharded(**batch)
        except ValueError as problem:
            assert str(problem).startswith(f"{path}: the forward of"), str(problem)  # noqa: PT017  # no pytest here
            assert "asked for the attention function 0 times" in str(problem)  # noqa: PT017
        else:
            raise AssertionError((family, variant, dtype))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=main, args=(rank, meeting)) for rank in range(PROCESSES)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        sys.exit(sum(each.exitcode or 0 for each in ranks))
