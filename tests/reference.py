"""An independent slow oracle: a stock model whose attention is recomputed literally from the formulas.

It shares no code with the package. Every attention module of a deep copy is replaced by one that projects Q, K and
V itself, forms the scores in the open, and applies the variant at any strength; the model runs its eager masks.
Axes: B batch, L token, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .slow import slow_belief_projection, slow_entmax15, slow_simple_attention, slow_softmax_n, slow_sparsemax

CAUSAL = ("GPT2Attention", "LlamaAttention", "OPTAttention", "Qwen2Attention")
CORES = ("AlbertAttention", "BertAttention", "ViTAttention", *CAUSAL)
GAMMAS = {"ViTAttention": -1e-5} | dict.fromkeys(CAUSAL, -12 / 512)  # of the papers; BERT and ALBERT: -0.025
DEFAULTS: dict[str, dict[str, Any]] = {
    "outeffhop": {"n": 1.0, "beta": 1.0},
    "belief": {"kind": "joined"},
    "clipped_softmax": {"gamma": None, "zeta": 1.0, "alpha": None, "length": None},
    "sink": {"tokens": 1, "kind": "key_value"},
    "window": {"window": 128, "sinks": 4, "full_heads": ()},
    "gated": {"kind": "linear", "pi_init": 0.25},
    "simpletron": {"length": "true"},
    "simpletron_res": {"length": "true", "skip": "inner"},
    "simpletron_resl": {"length": "true", "skip": "inner"},
    "modern_hopfield": {
        "alpha": 0.5,
        "alpha_prime": 0.5,
        "init": "zero",
        "skip": "input",
        "scheme": "forward_backward",
    },
}


@dataclass
class Shared:
    """H and S of the swapped layer below, and the residual stream of the block that is running."""

    hidden: Tensor | None = None
    scores: Tensor | None = None
    residual: dict[int, Tensor] = field(default_factory=dict)

    def restart(self, *_: Any) -> None:
        self.hidden = self.scores = None


def reference_model(
    stock: nn.Module,
    variant: str,
    *,
    options: dict[str, Any] | None = None,
    strength: float = 1.0,
    layers: set[int] | None = None,
    parameters: list[dict[str, Tensor]] | None = None,
) -> Any:
    """A copy of an unpatched model (a family, or Qwen2) that computes `variant` slowly; call it without a cache."""
    model: Any = copy.deepcopy(stock)
    model.set_attn_implementation("eager")
    names = variant.split("+")
    given = options or {}
    chosen = {n: DEFAULTS.get(n, {}) | dict(given if len(names) == 1 else given.get(n, {})) for n in names}
    shared = Shared()
    model.register_forward_pre_hook(shared.restart)
    sites = [(path, module) for path, module in model.named_modules() if type(module).__name__ in CORES]
    wanted = sorted(range(len(sites)) if layers is None else layers)
    for index, (path, module) in enumerate(sites):
        swapped = index in wanted  # other layers are recomputed too: stock eager rounds its weights to fp32
        own = parameters[wanted.index(index)] if swapped and parameters else {}
        slow = SlowLayer(module, chosen if swapped else {"softmax": {}}, strength, own, shared)
        parent, _, child = path.rpartition(".")
        block = model.get_submodule(parent)
        setattr(block, child, slow)
        block.register_forward_pre_hook(slow.remember, with_kwargs=True)
    return model


class SlowLayer(nn.Module):
    """One attention module, recomputed; it keeps the stock module's parameters under their own names."""

    def __init__(
        self,
        stock: nn.Module,
        chosen: dict[str, dict[str, Any]],
        strength: float,
        own: dict[str, Tensor],
        shared: Shared,
    ) -> None:
        super().__init__()
        self.kind = type(stock).__name__
        for name, child in stock.named_children():
            self.add_module(name, child)
        self.stock_sizes = _sizes(stock)
        self.chosen, self.s, self.own, self.shared = chosen, strength, own, shared

    def remember(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.shared.residual[id(self)] = args[0] if args else kwargs["hidden_states"]

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = hidden_states
        if attention_mask is None:
            attention_mask = kwargs.get("attention_mask")
        q, k, v, scaling = self.project(x, kwargs.get("position_embeddings"))
        out = self.attention(x, q, k, v, scaling, attention_mask)
        if self.kind == "BertAttention":
            return self.output.LayerNorm(out + x), None
        if self.kind == "AlbertAttention":
            return self.LayerNorm(x + out), None
        return out, None

    def project(self, x: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        """q, k, v as (B,H,L,D), repeated per group, and the factor of q k^T."""
        width = self.stock_sizes
        if self.kind == "GPT2Attention":
            q, k, v = self.c_attn(x).chunk(3, -1)
        elif self.kind == "BertAttention":
            q, k, v = self.self.query(x), self.self.key(x), self.self.value(x)
        elif self.kind == "AlbertAttention":
            q, k, v = self.query(x), self.key(x), self.value(x)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.reshape(*x.shape[:2], -1, width).transpose(1, 2) for t in (q, k, v))
        if rotary is not None:
            q, k = apply_rotary_pos_emb(q, k, *rotary)
        self.groups = groups = q.shape[1] // k.shape[1]
        k, v = (torch.stack([t[:, h // groups] for h in range(q.shape[1])], 1) for t in (k, v))
        return q, k, v, width**-0.5

    def output_projection(self, joined: Tensor) -> Tensor:
        names = {"BertAttention": "output.dense", "AlbertAttention": "dense", "GPT2Attention": "c_proj"}
        names |= {"OPTAttention": "out_proj", "LlamaAttention": "o_proj", "ViTAttention": "o_proj"}
        names |= {"Qwen2Attention": "o_proj"}
        return self.get_submodule(names[self.kind])(joined)

    def attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """(B,L,E): what the layer gives, without the block's own residual."""
        if "outeffhop" in self.chosen:
            q = q * (1 + self.s * (self.chosen["outeffhop"]["beta"] - 1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scaling
        allowed = torch.ones_like(scores, dtype=torch.bool)
        bias = torch.zeros_like(scores)
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            full = mask.expand_as(scores)
            allowed = full > torch.finfo(full.dtype).min / 2
            bias = torch.where(allowed, full, torch.zeros_like(full))
        linear = [name for name in self.chosen if name.startswith("simpletron")]
        if linear:
            return self.simple(linear[0], x, (q, k, v), scores + bias, allowed)
        keys_values = v
        if "window" in self.chosen:
            bias, allowed = self.window(bias, allowed)
        if "sink" in self.chosen:
            own, keys_values = self.sink(q, v, scaling)
            scores = torch.cat([own, scores], -1)
            bias = torch.cat([torch.full_like(own, math.log(self.s) if self.s > 0 else 0.0), bias], -1)
            allowed = torch.cat([torch.full_like(own, self.s > 0, dtype=torch.bool), allowed], -1)
        if "modern_hopfield" in self.chosen:
            scores = self.hopfield(scores)
        weights = self.weights(scores + bias, allowed)
        heads = torch.einsum("bhqk,bhkd->bqhd", weights, keys_values)
        heads, added = self.read(heads, v.transpose(1, 2), x)
        out = self.output_projection(heads.flatten(2))
        if added is not None:
            out = out + added
        if "modern_hopfield" in self.chosen:
            options = self.chosen["modern_hopfield"]
            skip = x if options["skip"] == "input" else self.shared.residual[id(self)]
            out = self.s * options["alpha"] * skip + (1 - self.s * options["alpha"]) * out
        return out

    def sink(self, q: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """The scores (B,H,Q,N) of the learned pairs, and the values of the pairs and of the text (B,H,N + K,D)."""
        own, heads = {name.rpartition(".")[2]: tensor for name, tensor in self.own.items()}, q.shape[1]
        per_head = {
            name: torch.stack([tensor[h * tensor.shape[0] // heads] for h in range(heads)])
            for name, tensor in own.items()
            if name in ("key", "value", "score")
        }
        if "key" in per_head:
            scores = torch.einsum("bhqd,hnd->bhqn", q, per_head["key"]) * scaling
        else:
            scores = per_head["score"][None, :, None, :].expand(len(q), -1, q.shape[2], -1)
        zeros = torch.zeros(heads, scores.shape[3], v.shape[3], dtype=v.dtype)
        values = per_head.get("value", zeros)
        return scores, torch.cat([values.expand(len(v), -1, -1, -1), v], 2)

    def window(self, bias: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the scores (B,H,Q,K), and what a query may see: one query and one key at a time."""
        width, sinks, full = (self.chosen["window"][name] for name in ("window", "sinks", "full_heads"))
        outside, seen = torch.zeros_like(allowed), allowed.tolist()
        for b, h, i in itertools.product(*map(range, allowed.shape[:3])):
            if h // self.groups in full:
                continue
            for j in [j for j, shown in enumerate(seen[b][h][i]) if shown][sinks:]:
                outside[b, h, i, j] = not i - width < j < i + width
        if self.s == 1:
            return bias, allowed & ~outside
        return bias + outside.to(bias.dtype) * math.log(1 - self.s), allowed

    def hopfield(self, scores: Tensor) -> Tensor:
        options = self.chosen["modern_hopfield"]
        below, raw = self.shared.hidden, self.shared.scores
        if options["scheme"] == "forward_backward":
            share = self.s * options["alpha_prime"]
            start = scores if options["init"] == "first" else torch.zeros_like(scores)
            hidden = share * (start if below is None else below) + (1 - share) * scores
            result = hidden
        else:
            share = options["alpha_prime"]
            if below is None or raw is None:
                hidden = scores if options["init"] == "first" else torch.zeros_like(scores)
            else:
                hidden = share * below + (1 - share) * raw
            result = (1 - self.s) * scores + self.s * hidden
        self.shared.hidden, self.shared.scores = hidden, scores
        return result

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        plain = slow_softmax_n(scores, 0.0, allowed)
        weights = plain
        if "outeffhop" in self.chosen and self.s > 0:
            weights = slow_softmax_n(scores, self.s * self.chosen["outeffhop"]["n"], allowed)
        for name, formula in (("sparsemax", slow_sparsemax), ("entmax15", slow_entmax15)):
            if name in self.chosen:
                weights = (1 - self.s) * plain + self.s * formula(scores, allowed)
        if "clipped_softmax" in self.chosen:
            options = self.chosen["clipped_softmax"]
            given = options["gamma"] if options["gamma"] is not None else GAMMAS.get(self.kind, -0.025)
            gamma = given if options["alpha"] is None else -options["alpha"] / options["length"]
            gamma, zeta = self.s * gamma, 1 + self.s * (options["zeta"] - 1)
            weights = ((zeta - gamma) * weights + gamma).clamp(0, 1) * allowed
        return weights

    def read(self, heads: Tensor, values: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B,L,H,D) after the read-out, and what is added after W_o."""
        added = None
        if "gated" in self.chosen:
            gate = torch.sigmoid(self.gate_logits(x)) / self.chosen["gated"]["pi_init"]
            heads = heads * (1 + self.s * (gate - 1)).unsqueeze(-1)
        if "belief" in self.chosen or "belief_star" in self.chosen:
            kind = self.chosen.get("belief", {}).get("kind")
            whole = slow_belief_projection(heads, values, per_head=kind == "per_head")
            new = (1 - self.s) * heads + self.s * (heads - values if kind == "difference" else whole)
            if "belief_star" in self.chosen:
                split = (1 - self.s) * heads + self.s * slow_belief_projection(heads, values, per_head=True)
                added = self.s * split.flatten(2) @ self.own["belief_star.w_s.weight"].T
            heads = new
        return heads, added

    def gate_logits(self, x: Tensor) -> Tensor:
        kind, own = self.chosen["gated"]["kind"], self.own
        bias = own["gated.gate.bias"]
        if kind == "per_head":
            return bias.expand(*x.shape[:2], -1)
        if kind == "all_features":
            return x @ own["gated.gate.weight"].T + bias
        heads = bias.shape[0]
        logits = []
        for head, part in enumerate(x.chunk(heads, -1)):
            if kind == "mlp":
                part = (part @ own["gated.hidden.weight"][head].T + own["gated.hidden.bias"][head]).relu()
            logits.append(part @ own["gated.gate.weight"][head] + bias[head])
        return torch.stack(logits, -1)

    def simple(
        self, name: str, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], scores: Tensor, allowed: Tensor
    ) -> Tensor:
        """(1 - s) of the ordinary layer and s of the variant's."""
        q, k, v = qkv
        options = self.chosen[name]
        ordinary = torch.einsum("bhqk,bhkd->bqhd", slow_softmax_n(scores, 0.0, allowed), v)
        causal = self.kind in CAUSAL
        linear = slow_simple_attention(q, k, v, causal=causal, length=options["length"], allowed=allowed)
        joined = linear.transpose(1, 2).flatten(2)
        layer = self.output_projection(joined) if name == "simpletron_resl" else joined
        if options.get("skip") == "inner":
            layer = layer + x
        return (1 - self.s) * self.output_projection(ordinary.flatten(2)) + self.s * layer


def _sizes(stock: nn.Module) -> int:
    core: Any = getattr(stock, "self", stock)
    return int(getattr(core, "head_dim", None) or core.attention_head_size)
