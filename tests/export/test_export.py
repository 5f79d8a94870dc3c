"""An exported folder is an ordinary model of transformers, with the logits of the converted model; or it is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor

from hf_attn_swap import export, list_variants, patch_model, set_strength
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.doctor import matter
from hf_attn_swap.engines import targets
from hf_attn_swap.engines.export import stock_model
from hf_attn_swap.engines.gguf import find_converter, write_gguf
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap_cli import run

from ..harness.byte_tokenizer import byte_tokenizer

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, head_dim=8)
MULTIPLIERS = dict(embedding_multiplier=2.0, logits_scaling=3.0, residual_multiplier=0.5, attention_multiplier=0.25)
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "granite": ("Granite", MULTIPLIERS),
}
ENCODER = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LEAVE = ("softmax", "outeffhop")  # variants that leave with their default options


def model(base: str = "llama", **words: Any) -> Any:
    """A small model whose attention decides about its logits."""
    name, own = BASES.get(base, (base, {}))
    torch.manual_seed(0)
    config = getattr(T, f"{name}Config")(**{**SMALL, **own, **words})
    made = getattr(T, f"{name}ForCausalLM")(config).eval()
    matter(made)
    return made


def drawn(model: Any) -> Any:
    """The model with other parameters of its swaps than at their start."""
    generator = torch.Generator().manual_seed(1)
    for swap in (module for module in model.modules() if isinstance(module, Swap)):
        for parameter in swap.parameters():
            parameter.data.normal_(generator=generator)
    return model


def difference(converted: Any, stock: Any, length: int = 40) -> float:
    """The largest difference of the logits, as a share of the largest."""
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, got = converted(ids).logits, stock(ids).logits
    return float((wanted - got).abs().max() / wanted.abs().max())


def exact(converted: Any) -> Any:
    """The stock model, checked."""
    stock, _ = stock_model(converted)
    assert difference(converted, stock) < 1e-5
    assert not [name for name in stock.state_dict() if "attn_swap" in name]
    assert "attn_swap" not in json.dumps(stock.config.to_dict())
    return stock


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("outeffhop", {}),
        ("outeffhop", dict(n=4, beta=1.5)),
        ("sink", dict(kind="score")),
        ("sink", dict(kind="score_value")),
        ("window", dict(window=8, sinks=0)),
        ("sink+window", dict(sink=dict(kind="score_value"), window=dict(window=8, sinks=0))),
        ("outeffhop+window", dict(window=dict(window=8, sinks=0))),
    ],
)
def test_what_can_leave_is_exact(base: str, variant: str, options: dict[str, Any]) -> None:
    stock = model(base)
    converted = drawn(patch_model(model(base), variant, **options))
    assert difference(converted, stock) > 1e-3  # the swap shows
    assert type(exact(converted)).__name__ == "GraniteSWAForCausalLM" or "sink" not in variant


@pytest.mark.parametrize("variant", list_variants())
def test_every_variant_leaves_exactly_or_is_refused(variant: str) -> None:
    converted = drawn(patch_model(model(), variant, **tiny_options(variant)))
    if variant in LEAVE:
        exact(converted)
        return
    with pytest.raises(ValueError, match=r"self_attn cannot be exported: .*(plugin|transformers|target=)"):
        stock_model(converted)


def test_two_sinks_of_one_head_are_one() -> None:
    """With one key/value head per query head, `sink+outeffhop` folds, too; otherwise heads would share a value."""
    options: dict[str, Any] = dict(sink=dict(kind="score_value"))
    exact(drawn(patch_model(model(num_key_value_heads=4), "sink+outeffhop", **options)))
    exact(drawn(patch_model(model(), "sink+outeffhop", sink=dict(kind="score"))))
    with pytest.raises(ValueError, match="share values"):
        stock_model(drawn(patch_model(model(), "sink+outeffhop", **options)))


def test_a_sink_of_keys_leaves_only_if_its_score_is_constant() -> None:
    exact(patch_model(model(), "sink"))  # its keys start as zeros
    with pytest.raises(ValueError, match="turns with the query"):
        stock_model(drawn(patch_model(model(), "sink")))


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_strengths_below_one(strength: float) -> None:
    exact(set_strength(patch_model(model(), "outeffhop", n=4, beta=1.5), strength))
    exact(set_strength(drawn(patch_model(model(), "sink", kind="score_value")), strength))


def test_some_layers() -> None:
    converted = patch_model(model(), "window", layers=[0], window=8, sinks=0)
    drawn(patch_model(converted, "sink", layers=[2], kind="score_value"))
    stock = exact(converted)
    assert stock.config.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert stock.config.sliding_window == 8


def test_two_windows_are_refused() -> None:
    converted = patch_model(model(), "window", layers=[0], window=8, sinks=0)
    patch_model(converted, "window", layers=[1], window=4, sinks=0)
    with pytest.raises(ValueError, match="windows 4, 8"):
        stock_model(converted)


def test_a_window_of_the_model_itself_stays() -> None:
    converted = patch_model(model("mistral", sliding_window=6), "outeffhop")
    assert exact(converted).config.sliding_window == 6


@pytest.mark.parametrize("fit", ["gain", "map"])
def test_calibrations_are_folded(fit: str) -> None:
    rows: list[dict[str, Tensor]] = [{"input_ids": torch.randint(1, 64, (2, 24))} for _ in range(4)]
    converted = patch_model(model(), "outeffhop")
    calibrate(converted, rows, fit=fit)
    assert any("calibration" in name for name in converted.state_dict())
    exact(converted)


def test_norms_of_queries_and_keys() -> None:
    """Qwen3's own class has windows and no sinks."""
    assert type(exact(patch_model(model("Qwen3"), "window", window=8, sinks=0))).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match=r"no class .* with sinks .*norm.weight"):
        stock_model(patch_model(model("Qwen3"), "outeffhop"))


def test_a_mixture_of_experts() -> None:
    experts = model("GraniteMoe", num_local_experts=4, num_experts_per_tok=2, **MULTIPLIERS)
    assert type(exact(patch_model(experts, "outeffhop"))).__name__ == "GraniteMoeSWAForCausalLM"


def test_windows_leave_without_a_class_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older transformers has Cwm alone, which has windows, and neither sinks nor biases."""
    monkeypatch.setattr("hf_attn_swap.engines.export.TARGETS", targets.TARGETS[-1:])
    converted = patch_model(model(), "window", window=8, sinks=0)
    assert type(exact(converted)).__name__ == "CwmForCausalLM"
    with pytest.raises(ValueError, match="with sinks"):
        stock_model(patch_model(model(), "outeffhop"))


def test_an_encoder_is_refused() -> None:
    bert = T.BertForMaskedLM(T.BertConfig(**{name: SMALL[name] for name in ENCODER}))
    for variant in ("softmax", "outeffhop"):
        with pytest.raises(ValueError, match="causal"):
            stock_model(patch_model(bert, variant))


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    """What is folded rounds once more; what is not folded stays exact."""
    model().save_pretrained(tmp_path / "stock")
    load: Any = partial(T.AutoModelForCausalLM.from_pretrained, tmp_path / "stock", dtype=torch.bfloat16)
    exported = export(patch_model(load(), "outeffhop"), tmp_path / "plain")
    assert exported.difference < 1e-4
    converted = drawn(patch_model(load(), "sink", kind="score_value"))
    with pytest.raises(ValueError, match="--dtype float32"):  # values as large as these round too much
        export(converted, tmp_path / "folded")
    for swap in (module for module in converted.modules() if isinstance(module, Swap)):
        swap.sink.learned.value.data.mul_(0.1)
    folded = export(converted, tmp_path / "folded")
    assert 1e-4 < folded.difference < torch.finfo(torch.bfloat16).eps
    assert T.AutoConfig.from_pretrained(tmp_path / "folded").dtype == torch.bfloat16


def test_another_architecture_is_refused() -> None:
    gpt2 = T.GPT2LMHeadModel(T.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64))
    with pytest.raises(ValueError, match=r"no class .* with sinks"):
        stock_model(patch_model(gpt2, "outeffhop"))
    with pytest.raises(ValueError, match="not patched"):
        stock_model(model())


def test_a_wrong_folder_is_never_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loaded folder gives other logits than the converted model, nothing is written."""
    monkeypatch.setattr(
        "hf_attn_swap.engines.export._scores",
        lambda target, forms, heads: {f"{path}.{target.sinks}": torch.full((heads,), -1e4) for path in forms},
    )
    with pytest.raises(ValueError, match="other logits"):
        export(patch_model(model(), "outeffhop"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_transformers_without_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(model_type: str, **words: Any) -> Any:
        raise ValueError(f"Unrecognized model identifier: {model_type}")

    monkeypatch.setattr(T.AutoConfig, "for_model", unknown)
    with pytest.raises(ValueError, match=r"has no granite_swa; install transformers>=5\.15"):
        stock_model(patch_model(model(), "outeffhop"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted, out = tmp_path / "converted", tmp_path / "out"
    tokenizer = byte_tokenizer("left")
    made = patch_model(model(vocab_size=len(tokenizer)), "outeffhop+window", window=dict(window=8, sinks=0))
    made.save_pretrained(converted)
    assert run(["export", str(converted), str(out)]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    tokenizer.save_pretrained(converted)
    assert run(["export", str(converted), str(out), "--quiet"]) == 0
    assert "GraniteSWAForCausalLM, 3 layers with a window, 3 with a sink" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GraniteSWAForCausalLM"]
    assert not {"auto_map", "attn_swap", "model_file"} & config.keys()
    assert not list(out.glob("*.py"))
    ids = tokenizer("a text", return_tensors="pt").input_ids
    texts = [
        loaded.generate(ids, max_new_tokens=12, do_sample=False).tolist()
        for loaded in (made, T.AutoModelForCausalLM.from_pretrained(out))
    ]
    assert texts[0] == texts[1]
    assert run(["export", str(converted), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    (tmp_path / "model.gguf").write_text("mine")
    assert run(["export", str(converted), str(tmp_path / "again"), "--gguf", str(tmp_path / "model.gguf")]) == 2
    assert "model.gguf exists" in capsys.readouterr().err
    assert run(["export", str(out), str(tmp_path / "again")]) == 2
    assert "no converted model" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "nothing"), str(tmp_path / "again")]) == 2
    assert not (tmp_path / "again").exists()


def test_the_converter_of_llama_cpp(tmp_path: Path) -> None:
    """Its own words come back, and half a file does not stay. tests/engines runs the real one."""
    with pytest.raises(ValueError, match="has no convert_hf_to_gguf"):
        find_converter(tmp_path)
    program = tmp_path / "convert_hf_to_gguf.py"
    program.write_text("import sys, pathlib; pathlib.Path(sys.argv[3]).write_text('half'); sys.exit(sys.argv[5])")
    assert find_converter(tmp_path) == program
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text('{"dtype": "float64"}')
    with pytest.raises(ValueError, match=r"float64 .* --dtype float32"):
        write_gguf(tmp_path / "wide", tmp_path / "model.gguf", program)
    with pytest.raises(ValueError, match="stopped: bf16"):
        write_gguf(tmp_path, tmp_path / "model.gguf", program)
    assert not (tmp_path / "model.gguf").exists()
