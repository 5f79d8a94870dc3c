"""An adapter that is saved alone: right if its base was saved with the swap, and otherwise a warning with the lines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps
from tests.harness.adapters import fill, lora, projections
from tests.harness.places import one_per_place, turns

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def on_disk(name: str, folder: Path) -> Any:
    """A stock model that was loaded from a folder, so that an adapter can name it."""
    fresh(name, torch.float32).save_pretrained(folder)
    return type(fresh(name, torch.float32)).from_pretrained(folder)


def adapted(model: Any, name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapper = peft.get_peft_model(model, lora(name)).eval()
    fill(wrapper, projections(name)["query"], 0.3)
    return wrapper


def lines(caught: Any) -> list[str]:
    """The lines of code in a warning."""
    (text,) = [str(warning.message) for warning in caught if "adapter is saved alone" in str(warning.message)]
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(("name", "variant"), turns(FAMILY_NAMES, one_per_place()))
def test_the_lines_of_the_warning_bring_the_swap_back(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch = batch_of(name, torch.float32)
    model = adapted(
        perturb(patch_model(on_disk(name, tmp_path / "stock"), variant, strength=0.7, **tiny_options(variant))), name
    )
    wanted = forward(model, batch)
    with pytest.warns(UserWarning, match="an adapter is saved alone") as caught:
        model.save_pretrained("adapter")
    stock = peft.AutoPeftModel.from_pretrained("adapter").eval()
    assert not torch.allclose(forward(stock, batch), wanted, atol=1e-5)
    known = {"peft": peft, "model": model, **vars(transformers)}
    known[type(stock.get_base_model()).__name__] = type(stock.get_base_model())
    for line in lines(caught)[:2]:
        exec(line, known)
    assert torch.allclose(forward(known["model"].eval(), batch), wanted, atol=1e-6)


@pytest.mark.parametrize("variant", one_per_place())
def test_an_adapter_on_a_saved_swap_loads_alone(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines of the warning: the adapter names a checkpoint with the swap, and no warning comes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch, stock = batch_of("llama", torch.float32), on_disk("llama", tmp_path / "stock")
    perturb(patch_model(stock, variant, strength=0.7, **tiny_options(variant))).save_pretrained("converted")
    model = adapted(type(stock).from_pretrained("converted"), "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained("adapter")
        loaded = peft.AutoPeftModel.from_pretrained("adapter").eval()
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    set_strength(model, 0.3)
    with pytest.warns(UserWarning, match="an adapter is saved alone"):
        model.save_pretrained("adapter")


def test_adapters_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`add_adapter`: the same, in `save_pretrained` of the model itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch, model = batch_of("llama", torch.float32), on_disk("llama", tmp_path / "stock")
    patch_model(model, "belief")
    model.save_pretrained("converted")
    try:
        model.add_adapter(lora("llama"))
    except ValueError as refusal:  # this transformers wants a newer PEFT than there is
        pytest.skip(str(refusal))
    with pytest.warns(UserWarning, match=r"an adapter is saved alone.*'.*stock'.*belief"):
        model.save_pretrained("adapter")
    kept = type(model).from_pretrained("converted")
    kept.add_adapter(lora("llama"))
    fill(kept, projections("llama")["query"], 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kept.save_pretrained("adapter")
        loaded = transformers.AutoModelForCausalLM.from_pretrained("adapter")
    assert len(swaps(loaded)) == len(swaps(model))
    assert torch.equal(forward(loaded, batch), forward(kept, batch))


def test_prompts_and_other_readers_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained prompt is warned about too; reading the weights of a patched model without PEFT is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = patch_model(on_disk("llama", tmp_path / "stock"), "belief")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.nn.ModuleDict({"model": model}).state_dict()
        model.state_dict()
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.warns(UserWarning, match="an adapter is saved alone") as caught:
        peft.get_peft_model(model, prompt).save_pretrained("adapter")
    assert lines(caught)[0] == 'model.get_base_model().save_pretrained("converted")'
