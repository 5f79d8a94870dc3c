"""Attention transfer runs every swapped layer twice: a cache would hold every token twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.bench_caches import with_cache
from hf_attn_swap import patch_model
from tests.contract.harness import CAUSAL_FAMILIES, batch_of, fresh, perturb, refused
from tests.harness.places import SMOKES
from tests.harness.transfer import loss_of, trainer_of


def trained(family: str, variant: str, folder: Path, *, use_cache: bool) -> Any:
    model = perturb(patch_model(fresh(family), variant))
    trainer = trainer_of(model, folder, family, trainable=("query", "key", "value", "swap"))
    model.config.use_cache = use_cache  # some versions of Trainer turn it off when they are made, others do not
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the student has learned: its keys and values are not the teacher's
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(parameter))
    return trainer


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
@pytest.mark.parametrize("variant", SMOKES)
@pytest.mark.parametrize("gradients", [False, True])
def test_the_teacher_sees_every_token_once(family: str, variant: str, gradients: bool, tmp_path: Path) -> None:
    batch = batch_of(family)
    wanted = loss_of(trained(family, variant, tmp_path, use_cache=False), batch)
    for use_cache, asked in ((True, {}), (False, {"use_cache": True})):
        trainer = trained(family, variant, tmp_path, use_cache=use_cache)
        with torch.set_grad_enabled(gradients):
            got = float(trainer.compute_loss(trainer.model, {**batch, **asked}).detach())
        assert got == pytest.approx(wanted, rel=1e-12, abs=1e-24)
        assert trainer.model.config.use_cache is use_cache


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_cache_of_ones_own_is_refused(family: str, tmp_path: Path) -> None:
    trainer = trained(family, "belief", tmp_path, use_cache=True)
    with refused("leave the cache out", "twice"):
        cache = DynamicCache(config=trainer.model.config)
        loss_of(trainer, {**batch_of(family), **with_cache(trainer.model, cache)})
