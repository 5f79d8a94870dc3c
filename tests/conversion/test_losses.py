"""The losses: those that cannot be used are refused, and that of the layers compares with the original attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.bench_caches import with_cache
from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.losses import LayerErrors, Losses
from tests import zoo
from tests.contract.harness import batch_of, distance, refused
from tests.harness.checkpointing import enable

from .converting import ADAPTERS, BODY, converted, rows, stock
from .distilling import distiller, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
LAYERS_ALONE = Losses(logits=0.0, layers=1.0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"logits": 0.0}, "one must be above 0"),
        ({"hidden": -1.0}, "must be at least 0"),
        ({"logits": float("nan")}, "must be at least 0"),
        ({"hidden_layers": "first"}, "must be 'all' or 'last'"),
        ({"hidden_layers": "last"}, "belongs to the loss 'hidden'"),
    ],
)
def test_values_are_refused(given: dict[str, Any], reason: str) -> None:
    for kind in (Losses, Distil):
        with refused(reason):
            kind(**given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rank": 4, "trainable": ("query",)}, "with a rank, adapters train; leave out trainable, or the rank."),
        ({"tokens": 9, "epochs": 2.0}, "distil: give tokens or epochs, not both."),
    ],
)
def test_values_of_a_stage_without_effect_are_refused(given: dict[str, Any], reason: str) -> None:
    with refused(reason):
        Distil(**given)


def test_convert_refuses_before_anything_is_trained() -> None:
    """A loss that the model cannot have, and epochs, which `convert` does not count."""
    with refused("the model gives no logits; set the loss 'logits' to 0"):
        converted(zoo.build("bert", head="base"), "belief", rows("bert"), stages=[Distil(hidden=1.0)])
    with refused("leave out the stage's tokens and epochs"):
        converted(stock("bert"), "belief", rows("bert"), stages=[Distil(epochs=3)])


def test_layers_at_strength_0_have_no_error(tmp_path: Path) -> None:
    """The loss `layers` compares the layers that run their variant: those of a conversion's groups so far."""
    model = set_strength(patch_model(zoo.build("bert"), "simpletron_resl"), 0.0)
    set_strength(model, 1.0, layers=[1])
    trainer = distiller(model, tmp_path, losses=Losses(logits=0.0, layers=1.0), trainable="body")
    assert trainer.errors is not None
    assert len(trainer.errors.swapped) == 1


@pytest.mark.parametrize("stage", [BODY, ADAPTERS], ids=["weights", "adapters"])
def test_every_training_compares_layers_with_the_original_attention(stage: Distil, monkeypatch: Any) -> None:
    """Also after a training changed their weights: the teacher of a layer is the layer as it was before the swap."""
    frozen: list[tuple[Any, dict[str, torch.Tensor]]] = []
    made = LayerErrors.__init__

    def watched(errors: LayerErrors, *given: Any, **more: Any) -> None:
        made(errors, *given, **more)
        frozen.extend((site.container, values) for site, values in zip(errors.swapped, errors.frozen, strict=True))

    monkeypatch.setattr(LayerErrors, "__init__", watched)
    model, first = stock("bert"), stock("bert").state_dict()
    paths = {module: path for path, module in model.named_modules()}
    converted(model, "simpletron_resl", rows("bert"), stages=[replace(stage, layers=1.0)], max_loss=1e-12)
    assert len(frozen) == 2, "the group trains again while a budget needs it"
    for container, values in frozen:
        assert values
        for name, value in values.items():
            if not {"attn_swap", "lora_A", "lora_B"} & set(name.split(".")):
                assert torch.equal(value, first[f"{paths[container]}.{name.replace('.base_layer', '')}"])


@pytest.mark.parametrize("variant", ["modern_hopfield", "simpletron_resl"])
def test_the_loss_of_layers_under_activation_checkpointing(variant: str, tmp_path: Path) -> None:
    """The same loss and gradients: a layer that is computed again is not compared again."""
    batch, seen = batch_of("llama", torch.float32), []
    for checkpointed in (False, True):
        model = patch_model(zoo.build("llama"), variant)
        trainer = distiller(model, tmp_path, "llama", losses=LAYERS_ALONE, trainable="body")
        if checkpointed:
            enable(model, activation_checkpointing_kwargs={"use_reentrant": False})
        loss = trainer.compute_loss(model.train(), batch)
        loss.backward()
        seen.append((float(loss.detach()), {name: weight.grad for name, weight in model.named_parameters()}))
    (plain, wanted), (saved, got) = seen
    assert saved == pytest.approx(plain, rel=1e-5)
    for name, gradient in wanted.items():
        assert (gradient is None) == (got[name] is None), name
        if gradient is not None:
            assert distance(got[name], gradient) < 1e-4, name


def test_the_loss_of_layers_without_a_cache(tmp_path: Path) -> None:
    """Every layer runs twice, and a cache would hold every token twice: none is made, and one that is given refused."""
    batch, model = batch_of("llama", torch.float32), patch_model(zoo.build("llama"), "belief")
    trainer = distiller(model, tmp_path, "llama", losses=LAYERS_ALONE, trainable="body")
    wanted = loss_of(trainer, batch)
    model.config.use_cache = True
    assert loss_of(trainer, {**batch, "use_cache": True}) == wanted
    assert model.config.use_cache is True
    with refused("leave the cache out"):
        loss_of(trainer, {**batch, **with_cache(model, DynamicCache(config=model.config))})
