"""Distils a model split by `fully_shard`, and compares it with the whole model; test_distil_fsdp runs it.

Arguments: the rank, the number of processes, and the port of the first process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import Trainer

from hf_attn_swap import patch_model
from hf_attn_swap.conversion.trainer import BESIDE
from tests.contract.harness import batch_of, forward, fresh

from .distilling import EVERY, adapted, distiller, teacher_of


def student() -> Any:
    return adapted(patch_model(fresh("bert", torch.float32), "simpletron_resl"))


def shard(model: Any, mesh: Any) -> None:
    for layer in model.base_model.model.bert.encoder.layer if hasattr(model, "peft_config") else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def steps(trainer: Any, model: Any, batch: dict[str, Any]) -> list[float]:
    """The losses of three steps of gradient descent."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found = []
    for _ in range(3):
        loss = trainer.compute_loss(model.train(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def gates_of_a_checkpoint(mesh: Any, rank: str) -> None:
    """What trains beside the adapters comes back from a checkpoint, which one process writes."""
    folder = Path(tempfile.gettempdir()) / f"gates-{os.environ['MASTER_PORT']}"
    model = adapted(patch_model(fresh("bert", torch.float32), "outeffhop+gated"))
    for name, parameter in model.named_parameters():
        if "gate." in name:
            parameter.requires_grad_(True)
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    trainer = distiller(model, folder)
    wanted = {name: each.detach().clone() for name, each in trainer._beside_adapters().items()}
    assert all("gate." in name for name in wanted)
    shard(model, mesh)
    trainer.args.distributed_state.process_index = int(rank)  # without it, each process takes itself for the first
    trainer.save_model(str(folder), True)
    dist.barrier()
    assert wanted.keys() == load_file(folder / BESIDE).keys()
    for parameter in trainer._beside_adapters().values():
        torch.nn.init.zeros_(parameter)
    trainer._load_beside_adapters(str(folder))
    for name, parameter in trainer._beside_adapters().items():
        assert torch.equal(parameter.full_tensor(), wanted[name]), name
    dist.barrier()
    if rank == "0":
        shutil.rmtree(folder)
    dist.barrier()
    with pytest.raises(ValueError, match=r"has no beside_adapters\.safetensors, which holds .*gate"):
        trainer._load_beside_adapters(str(folder))


def main(rank: str, size: str, port: str) -> None:
    warnings.filterwarnings("ignore")
    Trainer.save_model = lambda *_: None  # PEFT cannot save split weights by itself; accelerate does
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(size),))
    folder, batch = Path(tempfile.mkdtemp()), batch_of("bert", torch.float32)
    whole, split = student(), student()
    trainers = [distiller(model, folder, losses=EVERY) for model in (whole, split)]
    shard(split, mesh)
    assert torch.allclose(teacher_of(trainers[1], batch), forward(fresh("bert", torch.float32), batch), atol=1e-6)
    wanted, got = (steps(trainer, model, batch) for trainer, model in zip(trainers, (whole, split), strict=True))
    assert wanted[2] < wanted[0]
    assert got == pytest.approx(wanted, rel=1e-4)
    assert torch.allclose(teacher_of(trainers[1], batch), forward(fresh("bert", torch.float32), batch), atol=1e-6)
    for module in split.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a pass without gradients leaves the outermost weights gathered
    sharded = dict(split.named_parameters())
    for key, parameter in whole.named_parameters():
        assert torch.allclose(sharded[key].full_tensor(), parameter, atol=1e-5), key

    gates_of_a_checkpoint(mesh, rank)

    plain = patch_model(fresh("bert", torch.float32), "simpletron_resl")
    trainer = distiller(plain, folder, trainable="body")
    shard(plain, mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match="frozen copies cannot take the place of sharded weights"):
            trainer.compute_loss(plain, batch)
        with torch.no_grad():
            plain(**batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
