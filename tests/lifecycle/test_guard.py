"""A swapped attention that another program goes around ends the pass in an error, in whatever way the model is run.

And a model that nobody went around passes: each test asks both.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.families import sites
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.harness import TOLERANCE, batch_of, distance, forward, fresh, run_all
from tests.harness.bypass import go_around
from tests.harness.checkpointing import enable
from tests.harness.places import in_turn, one_per_place, turns
from tests.harness.process import python

AROUND = "the forward of .* asked for the attention function 0 times"
FAMILIES = ("bert", "llama")
# A compiler sees two kinds of variants: those that write the residual stream after W_o, and the others.
KINDS = list({"write" in VARIANTS[name].places: name for name in one_per_place()}.values())


@in_turn()
def test_every_family(name: str, variant: str) -> None:
    """The error is the guard's for every variant, also where the swap computes something after W_o."""
    model = patch_model(fresh(name), variant)
    path = go_around(model, 1 if len(sites(model)) > 1 else 0)
    with pytest.raises(ValueError, match=f"^{path}: {AROUND}"):
        forward(model, batch_of(name))


@in_turn(FAMILIES)
def test_threads(name: str, variant: str) -> None:
    """Two threads run one model at the same time; only one of two models was gone around."""
    model, other = patch_model(fresh(name), variant), patch_model(fresh(name), variant)
    wanted, path = forward(model, batch_of(name)), go_around(other, 1)
    results: list[Any] = []
    start = threading.Barrier(4)

    def run(mine: Any) -> None:
        start.wait()
        for _ in range(5):
            try:
                results.append((mine is other, forward(mine, batch_of(name))))
            except ValueError as problem:
                results.append((mine is other, str(problem)))

    threads = [threading.Thread(target=run, args=(mine,)) for mine in (model, other) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for around, result in results:
        if around:
            assert str(result).startswith(f"{path}: the forward of")
        else:
            assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    ("name", "variant", "reentrant"),
    [(*row, reentrant) for row, reentrant in turns(turns(FAMILIES, one_per_place()), [True, False])],
)
def test_checkpointing(name: str, variant: str, reentrant: bool) -> None:
    model = patch_model(fresh(name), variant).train()
    enable(model, activation_checkpointing_kwargs={"use_reentrant": reentrant})
    if not (reentrant and "modern_hopfield" in variant):  # refused with a sentence of its own
        run_all(model, batch_of(name))
    go_around(model)
    with pytest.raises(ValueError, match=f"{AROUND}|re-entrant"):
        run_all(model, batch_of(name))


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
@pytest.mark.parametrize(("name", "variant"), list(zip(FAMILIES, KINDS, strict=True)))
def test_compiled(name: str, variant: str) -> None:
    """The guard breaks no graph. It is part of it: a forward that is replaced later makes the compiler look again."""
    model = patch_model(fresh(name, num_hidden_layers=2), variant)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(forward(whole, batch_of(name)), forward(model, batch_of(name))) <= TOLERANCE[torch.float64]
    go_around(model, 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=AROUND):
        forward(whole, batch_of(name))


@pytest.mark.slow
@pytest.mark.usefixtures("_forget_graphs")
def test_compiled_layer_by_layer() -> None:
    """Each layer on its own, as programs compile large models."""
    model = patch_model(fresh("llama", num_hidden_layers=2), KINDS[0])
    wanted = forward(model, batch_of("llama"))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert distance(forward(model, batch_of("llama")), wanted) <= TOLERANCE[torch.float64]
    go_around(model, 1)
    with pytest.raises(ValueError, match=AROUND):
        forward(model, batch_of("llama"))


@pytest.mark.slow
def test_sharded() -> None:
    """`fully_shard` (FSDP2) over two processes, in fp32 and with parameters in bf16."""
    python("-m", "tests.lifecycle.guard_fsdp_child")
