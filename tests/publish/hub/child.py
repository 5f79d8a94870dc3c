"""A client of the Hub in a process of its own: reads calls of the functions below as lines of JSON, answers in JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from transformers import AutoTokenizer, BertTokenizer, PreTrainedModel, pipeline

import hf_attn_swap
from hf_attn_swap.publish.hub import from_pretrained, push, push_folder

from ... import zoo

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


def converted(family: str, variant: str, **config: Any) -> PreTrainedModel:
    """A tiny converted model whose new parameters are not what they start as."""
    model = zoo.build(family, **config)
    hf_attn_swap.patch_model(model, variant)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn_swap." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: PreTrainedModel, family: str) -> torch.Tensor:
    with torch.no_grad():
        return zoo.output(model(**zoo.inputs(family)))


def publish(
    repo: str,
    family: str,
    variant: str,
    answer: str,
    plain: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    words: str | None = None,
    sound: bool = False,
    **arguments: Any,
) -> str:
    """Push a converted model and keep its logits in `answer`; `plain` pushes with transformers' own method."""
    model = converted(family, variant, **(config or {}))
    torch.save(logits(model, family), answer)
    if plain is not None:
        return str(model.push_to_hub(repo, **plain))
    if words is not None:
        Path(words).write_text("\n".join(WORDS))
        arguments["tokenizer"] = BertTokenizer(words)
    if sound:
        arguments["tokenizer"] = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8_000)
    return str(push(model, repo, **arguments))


def publish_folder(repo: str, folder: str, family: str, variant: str, extra: dict[str, str], **arguments: Any) -> str:
    """Save a converted model, put more files beside it, and push the folder."""
    converted(family, variant).save_pretrained(folder)
    for name, text in extra.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(text)
    return str(push_folder(folder, repo, **arguments))


def train_and_publish(repo: str, folder: str, answer: str) -> list[str]:
    """One step of transformers' Trainer, which pushes by itself."""
    model = converted("bert", "outeffhop+gated")
    rows = [{"input_ids": row, "labels": row} for row in zoo.inputs("bert")["input_ids"]]
    settings = transformers.TrainingArguments(
        folder, hub_model_id=repo, push_to_hub=True, max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model, settings, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    torch.save(logits(model.eval(), "bert"), answer)
    return sorted(HfApi().list_repo_files(repo))


def publish_adapter(repo: str, base: str, answer: str) -> None:
    """A LoRA adapter on a converted base that is on the Hub."""
    import peft  # slow to import, and only here

    model = peft.get_peft_model(from_pretrained(base), peft.LoraConfig(target_modules=["query", "value"], r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    torch.save(logits(model.eval(), "bert"), answer)
    model.push_to_hub(repo)


def load_adapter(repo: str, base: str, answer: str) -> list[bool]:
    """The adapter on a base loaded strictly, and by plain transformers, which finds the base by itself."""
    import peft

    models = (
        peft.PeftModel.from_pretrained(from_pretrained(base), repo),
        transformers.AutoModelForMaskedLM.from_pretrained(repo),
    )
    return [torch.equal(logits(model.eval(), "bert"), torch.load(answer)) for model in models]


def load(repo: str, family: str, answer: str, by: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Load strictly, or `by` a class of transformers; say whether the logits are the pushed model's bit for bit."""
    loader = from_pretrained if by is None else getattr(transformers, by).from_pretrained
    model = loader(repo, **arguments)
    swapped = [name for name, module in model.named_modules() if name.endswith("attn_swap")]
    equal = torch.equal(logits(model, family), torch.load(answer))
    return {"class": type(model).__name__, "swapped": len(swapped), "equal": equal, "training": model.training}


def load_without_a_model(repo: str, **arguments: Any) -> None:
    """Load strictly and drop what comes back: for calls that must raise."""
    from_pretrained(repo, **arguments)


def classify(repo: str, text: str) -> dict[str, Any]:
    """A pipeline, with the repository's own tokenizer."""
    run = pipeline("text-classification", model=repo)
    return {**run(text)[0], "tokens": AutoTokenizer.from_pretrained(repo).tokenize(text)}


def sampling_rate(repo: str) -> int:
    return int(transformers.AutoFeatureExtractor.from_pretrained(repo).sampling_rate)


def api(method: str, **arguments: Any) -> Any:
    """A call of huggingface_hub, of which only plain data come back."""
    value = getattr(HfApi(), method)(**arguments)
    return value if isinstance(value, dict) else str(value)


def _serve(answers: Any) -> None:
    functions: dict[str, Callable[..., Any]] = {k: v for k, v in globals().items() if callable(v) and k[0] != "_"}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"value": functions[name](**arguments)}
        except Exception as problem:  # noqa: BLE001  # whatever it is, the parent wants to see it
            kinds = [cls.__name__ for cls in type(problem).__mro__]
            reply = {"kinds": kinds, "message": f"{problem} {problem.__cause__ or ''}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    _serve(answers)
