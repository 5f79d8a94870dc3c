"""STanHop-Net: a forecaster of multivariate time series whose layers are all Hopfield layers.

Each channel is cut into patches. A tandem block retrieves along time, within each channel, and then across the
channels, within each patch. Between two encoder blocks, neighbouring patches are merged (coarse-graining). Decoder
layer i reads the encoder at scale i, and the forecast is the sum of what the decoder layers forecast. The retrieval is
an argument, so that the retrievals of several papers can be compared in one model.
Wu et al. (2024), section 4, and the code that its authors published; OutEffHop (Hu et al., 2024), section 4.2, compares
retrievals in it. docs/mathematics.md, section STanHop-Net, has the formulas and what differs from the published code.
Axes: B batch, T row, C channel, P patch, E width, N rows of one retrieval, Q query, K stored pattern, H head, D head
width, M prototype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from ..core.probe import Probe
from ..functional import clip, entmax, entmax15, softmax_n, sparsemax

NORMALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores: torch.softmax(scores, -1),
    "sparsemax": sparsemax,
    "entmax15": entmax15,
    "outeffhop": softmax_n,
}
GENERALIZED = "generalized_sparse"
CLIPPED, GATED = "clipped_softmax", "gated"
START = 0.25  # of the gate's sigmoid, which is divided by it: a new gate is 1


def retrieval_parts(name: str) -> tuple[str, bool, bool]:
    """The normalizer of a retrieval, whether its weights are clipped, and whether its heads are gated.

    Raises:
        ValueError: the name is not made of known parts, joined by "+", with one normalizer at most.
    """
    parts = name.split("+")
    normalizers = [part for part in parts if part in NORMALIZERS or part == GENERALIZED]
    unknown = set(parts) - {*normalizers, CLIPPED, GATED}
    if unknown or len(normalizers) > 1 or len(set(parts)) < len(parts):
        known = ", ".join([*NORMALIZERS, GENERALIZED])
        raise ValueError(
            f"unknown retrieval {name!r}; take one of {known}, or {CLIPPED} or {GATED}, or join one of the first with "
            f"the last two by '+', such as 'outeffhop+{CLIPPED}'."
        )
    return (normalizers or ["softmax"])[0], CLIPPED in parts, GATED in parts


class STanHopConfig(PreTrainedConfig):
    """The shape of a STanHop-Net. The defaults are those of the one configuration that its authors published.

    Args:
        num_input_channels: C, the number of series.
        context_length: rows that the forecast is made from, at most; a shorter past is padded in front.
        prediction_length: rows to forecast.
        patch_length: rows of a patch.
        merge_size: patches that are merged between two encoder blocks; 1 merges none.
        d_model: E, the width.
        ffn_dim: the width inside the two layers of an MLP of a tandem block.
        num_attention_heads: H, a divisor of E.
        encoder_layers: the number of encoder blocks. There is one decoder layer more.
        num_prototypes: M, the learned queries that pool the channels.
        dropout: of the weights and of what is added to the residual stream.
        retrieval: how scores become what is read, see `retrieval_parts`: "softmax" (dense), "sparsemax" (sparse),
            "entmax15", "generalized_sparse" (alpha-entmax, with one learned alpha between 1 and 2 per layer),
            "outeffhop" (softmax_1), "clipped_softmax", "gated", or a composition.
        gamma: the lower end of stretched weights, at most 0, for clipped retrievals.
        baseline: add the mean of each channel's past to the forecast.

    Raises:
        ValueError: a number is too small, heads do not divide the width, gamma is above 0, or the retrieval is unknown.
    """

    model_type = "stanhop"

    def __init__(
        self,
        *,
        num_input_channels: int = 7,
        context_length: int = 168,
        prediction_length: int = 24,
        patch_length: int = 12,
        merge_size: int = 4,
        d_model: int = 256,
        ffn_dim: int = 512,
        num_attention_heads: int = 4,
        encoder_layers: int = 2,
        num_prototypes: int = 10,
        dropout: float = 0.3,
        retrieval: str = GENERALIZED,
        gamma: float = -0.025,
        baseline: bool = False,
        **kwargs: Any,
    ) -> None:
        sizes = {
            "num_input_channels": num_input_channels,
            "context_length": context_length,
            "prediction_length": prediction_length,
            "patch_length": patch_length,
            "merge_size": merge_size,
            "d_model": d_model,
            "ffn_dim": ffn_dim,
            "num_attention_heads": num_attention_heads,
            "encoder_layers": encoder_layers,
            "num_prototypes": num_prototypes,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
            setattr(self, name, size)
        if d_model % num_attention_heads:
            raise ValueError(f"{num_attention_heads} heads do not divide d_model = {d_model}; choose a divisor.")
        if not gamma <= 0:
            raise ValueError(f"gamma is the lower end of stretched weights, at most 0; got {gamma}.")
        retrieval_parts(retrieval)
        self.dropout, self.retrieval, self.gamma, self.baseline = dropout, retrieval, gamma, baseline
        super().__init__(**kwargs)


class Hopfield(nn.Module):
    """States R read stored patterns Y: Z = (g * (w V)) W_O with V = K W_V, K = Y W_K, Q = R W_Q.

    w = normalizer(Q K^T / sqrt(D)) per head; clipped, w is clip((1 - gamma) w + gamma, 0, 1), and 0 at what is left
    out; gated, g_h = sigmoid(r_h u_h + b_h) / 0.25 with the state's slice r_h (E / H), and otherwise 1. All linear maps
    have a bias. The values are computed from the keys, as in every Hopfield layer of this package.

    Source: Wu et al. (2024), section 3; OutEffHop, eq. 2.12 to 2.14; Bondarenko et al. (2023), eq. 4 and section 4.2.
    """

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__()
        self.heads, self.gamma = config.num_attention_heads, config.gamma
        self.normalizer, self.clipped, gated = retrieval_parts(config.retrieval)
        width = config.d_model // self.heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.d_model, config.d_model) for _ in range(4))
        self.scores, self.weights, self.read = Probe(), Probe(), Probe()
        self.dropout = nn.Dropout(config.dropout)
        self.alpha_logit = nn.Parameter(torch.empty(1)) if self.normalizer == GENERALIZED else None
        self.gate = nn.Parameter(torch.empty(self.heads, width + 1)) if gated else None  # the last column is the bias

    @property
    def alpha(self) -> Tensor | None:
        """The learned alpha (1), between 1 and 2, of the generalised sparse retrieval; None for the others."""
        return None if self.alpha_logit is None else 1 + torch.sigmoid(self.alpha_logit)

    def forward(self, state_NQE: Tensor, stored_NKE: Tensor, keep_NK: Tensor | None = None) -> Tensor:
        """What the states (N,Q,E) read: (N,Q,E). A mask (N,K), bool, is True at patterns that count."""
        keys = self.key(stored_NKE)
        query, key, value = (self._heads(x) for x in (self.query(state_NQE), keys, self.value(keys)))
        scores = self.scores(query @ key.mT / math.sqrt(key.shape[-1]))
        if keep_NK is not None:
            scores = scores.masked_fill(~keep_NK[:, None, None], -math.inf)
        alpha = self.alpha
        weights = NORMALIZERS[self.normalizer](scores) if alpha is None else entmax(scores, alpha)
        if self.clipped:
            weights = clip(weights, self.gamma, 1.0)
            if keep_NK is not None:
                weights = weights * keep_NK[:, None, None]
        read = self.read(self.dropout(self.weights(weights)) @ value)
        if self.gate is not None:
            weight, bias = self.gate[:, None, :-1], self.gate[:, None, -1]
            logits = (self._heads(state_NQE) * weight).sum(-1) + bias
            read = read * (torch.sigmoid(logits) / START).unsqueeze(-1)
        read_NQE: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return read_NQE

    def _heads(self, x_NLE: Tensor) -> Tensor:
        """(N,L,E) as (N,H,L,D)."""
        return torch.unflatten(x_NLE, -1, (self.heads, -1)).transpose(1, 2)


def mlp(width: int, inner: int) -> nn.Sequential:
    """Two linear maps with GELU between them."""
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Tandem(nn.Module):
    """A tandem block: retrieval along time within each channel, then across the channels within each patch.

        X <- norm(X + Hopfield(X, X)),   X <- norm(X + MLP(X))                 for each channel, over its patches
        L = Hopfield(R, X)                                                     for each patch, over the channels
        X <- norm(X + Hopfield(X, L)),   X <- norm(X + MLP(X))

    R (M,E) are learned prototypes: they pool the channels into M patterns, which every channel reads.

    Source: Wu et al. (2024), section 4.2 (TimeGSH and SeriesGSH).
    """

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__()
        self.time, self.pool, self.series = Hopfield(config), Hopfield(config), Hopfield(config)
        self.prototypes = nn.Parameter(torch.empty(config.num_prototypes, config.d_model))
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(config.d_model) for _ in range(4))
        self.mlp1, self.mlp2 = (mlp(config.d_model, config.ffn_dim) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BCPE: Tensor, keep_BP: Tensor | None = None) -> Tensor:
        """Map (B,C,P,E) to the same shape. A mask (B,P), bool, is True at patches that may be read along time."""
        batch, channels, patches, _ = x_BCPE.shape
        keep = None if keep_BP is None else keep_BP.repeat_interleave(channels, 0)
        x = x_BCPE.flatten(0, 1)
        x = self.norm1(x + self.dropout(self.time(x, x, keep)))
        x = self.norm2(x + self.dropout(self.mlp1(x)))
        x = torch.unflatten(x, 0, (batch, channels)).transpose(1, 2).flatten(0, 1)  # (BP,C,E)
        pooled = self.pool(self.prototypes.expand(len(x), -1, -1), x)
        x = self.norm3(x + self.dropout(self.series(x, pooled)))
        x = self.norm4(x + self.dropout(self.mlp2(x)))
        return torch.unflatten(x, 0, (batch, patches)).transpose(1, 2)


class Merge(nn.Module):
    """Coarse-graining: each `merge_size` neighbouring patches become one, W norm([x_1; ...; x_w]) + b.

    If their number is no multiple, the last patches are repeated behind the end. A patch that is left out counts as
    zeros, and a merged patch is left out if all of its patches are.

    Source: Wu et al. (2024), section 4.4, and its published code.
    """

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__()
        self.size = config.merge_size
        self.norm = nn.LayerNorm(self.size * config.d_model)
        self.linear = nn.Linear(self.size * config.d_model, config.d_model)

    def forward(self, x_BCPE: Tensor, keep_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B,C,P,E) and the mask (B,P) to (B,C,P/w,E) and (B,P/w), P/w rounded up."""
        patches = x_BCPE.shape[2]
        extra = -patches % self.size
        order = torch.arange(patches + extra, device=x_BCPE.device)
        order = torch.where(order < patches, order, (order - extra).clamp_min(0))
        x = torch.unflatten((x_BCPE * keep_BP[:, None, :, None])[:, :, order], 2, (-1, self.size)).flatten(3)
        return self.linear(self.norm(x)), torch.unflatten(keep_BP[:, order], 1, (-1, self.size)).any(-1)


class DecoderLayer(nn.Module):
    """A tandem block on the future's patches, which then read the encoder's patches of the same channel.

    X <- Tandem(X),   X <- norm(X + Hopfield(X, Y)),   X <- norm(X + MLP(X))

    Source: Wu et al. (2024), section 4.4, and its published code.
    """

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__()
        self.tandem, self.cross = Tandem(config), Hopfield(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.mlp = mlp(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BCPE: Tensor, encoded_BCKE: Tensor, keep_BK: Tensor) -> Tensor:
        """Map the future's patches (B,C,P,E) to the same shape; the encoder has K patches."""
        batch, channels = x_BCPE.shape[:2]
        x, encoded = self.tandem(x_BCPE).flatten(0, 1), encoded_BCKE.flatten(0, 1)
        x = self.norm1(x + self.dropout(self.cross(x, encoded, keep_BK.repeat_interleave(channels, 0))))
        return torch.unflatten(self.norm2(x + self.mlp(x)), 0, (batch, channels))


class STanHopModel(nn.Module):
    """The body: patch embedding, encoder blocks and decoder layers, without the linear maps to the forecast."""

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__()
        self.context, self.patch = config.context_length, config.patch_length
        past, future = (-(-length // self.patch) for length in (config.context_length, config.prediction_length))
        self.embed = nn.Linear(self.patch, config.d_model)
        self.past_positions = nn.Parameter(torch.empty(config.num_input_channels, past, config.d_model))
        self.future_positions = nn.Parameter(torch.empty(config.num_input_channels, future, config.d_model))
        self.norm = nn.LayerNorm(config.d_model)
        self.encoder = nn.ModuleList(Tandem(config) for _ in range(config.encoder_layers))
        merges = config.encoder_layers - 1 if config.merge_size > 1 else 0
        self.merge = nn.ModuleList(Merge(config) for _ in range(merges))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.encoder_layers + 1))
        self.normalizer = retrieval_parts(config.retrieval)[0]

    def forward(self, past_BTC: Tensor, observed_BT: Tensor, stored_NTC: Tensor | None = None) -> list[Tensor]:
        """The states (B,C,P,E) of the future's patches after each decoder layer."""
        stored = None if stored_NTC is None else self.encode(stored_NTC, torch.ones_like(stored_NTC[..., 0]).bool())
        states = []
        x = self.future_positions.expand(len(past_BTC), -1, -1, -1)
        encoded = self.encode(past_BTC, observed_BT, stored)
        for layer, (scale, keep) in zip(self.decoder, encoded, strict=True):
            x = layer(x, scale, keep)
            states.append(x)
        return states

    def encode(
        self, past_BTC: Tensor, observed_BT: Tensor, stored: list[tuple[Tensor, Tensor]] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """The patches before the first block and after each block, with the mask (B,P) of those that count.

        With `stored`, which is what this method gave for the windows of a memory, each block first reads the memory at
        its own scale.
        """
        x, keep = self.patches(past_BTC, observed_BT)
        x = self.norm(self.embed(x) + self.past_positions)
        scales = [(x, keep)]
        for number, block in enumerate(self.encoder):
            if stored is not None:
                x = self.recall(x, *stored[number])
            if number and self.merge:
                x, keep = self.merge[number - 1](x, keep)
            x = block(x, keep)
            scales.append((x, keep))
        return scales

    def patches(self, past_BTC: Tensor, observed_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the past into patches (B,C,P,patch), padded in front; the mask (B,P) is True where a row was observed.

        Rows in front of the first observed row repeat it.
        """
        first = observed_BT.int().argmax(1)[:, None]
        rows = torch.arange(past_BTC.shape[1], device=past_BTC.device).maximum(first)
        past_BTC = past_BTC.gather(1, rows[..., None].expand_as(past_BTC))
        missing = self.past_positions.shape[1] * self.patch - past_BTC.shape[1]
        past_BTC = torch.cat([past_BTC[:, :1].expand(-1, missing, -1), past_BTC], 1)
        observed = F.pad(observed_BT, (missing, 0))
        cut = (-1, self.patch)
        return torch.unflatten(past_BTC.mT, 2, cut), torch.unflatten(observed, 1, cut).any(-1)

    def recall(self, x_BCPE: Tensor, stored_NCPE: Tensor, keep_NP: Tensor) -> Tensor:
        """Plug-and-play memory: the mean of each patch and of what it retrieves from the stored patches of its channel.

        The retrieval has no weights: normalizer(X Y^T / sqrt(E)) Y, with 1.5-entmax where alpha is learned. So a model
        that was trained without a memory can be given one.
        """
        count = keep_NP.flatten()
        stored = stored_NCPE.transpose(0, 1).flatten(1, 2)[:, count]
        states = x_BCPE.transpose(0, 1).flatten(1, 2)
        scores = states @ stored.mT / math.sqrt(stored.shape[-1])
        read = NORMALIZERS.get(self.normalizer, entmax15)(scores) @ stored
        return (x_BCPE + torch.unflatten(read, 1, (len(x_BCPE), -1)).transpose(0, 1)) / 2


@dataclass
class STanHopOutput(ModelOutput):
    """What `STanHopForPrediction` gives.

    Attributes:
        loss: the mean squared error; None without `future_values`.
        prediction_outputs: the forecast (B,T,C), in the unit of the past.
    """

    loss: Tensor | None = None
    prediction_outputs: Tensor | None = None


class STanHopForPrediction(PreTrainedModel):
    """STanHop-Net: forecasts `prediction_length` rows of C series from up to `context_length` rows.

    Source: Wu et al. (2024), section 4.
    """

    config_class = STanHopConfig
    base_model_prefix = "model"
    main_input_name = "past_values"

    def __init__(self, config: STanHopConfig) -> None:
        super().__init__(config)
        self.model = STanHopModel(config)
        self.heads = nn.ModuleList(nn.Linear(config.d_model, config.patch_length) for _ in self.model.decoder)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers'

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's own start for linear maps and norms; positions, prototypes and alpha's logits are N(0, 1)."""
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("prototypes", "past_positions", "future_positions", "alpha_logit"):
                nn.init.normal_(parameter)
            elif name == "gate":
                nn.init.zeros_(parameter[:, :-1])
                nn.init.constant_(parameter[:, -1], math.log(START / (1 - START)))

    def forward(
        self,
        past_values: Tensor,
        future_values: Tensor | None = None,
        past_observed_mask: Tensor | None = None,
        memory_values: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Forecast, and measure the forecast if the future is given.

        Args:
            past_values: (B,T,C), T at most `context_length`, in any unit, for example z-scores.
            future_values: (B,prediction_length,C).
            past_observed_mask: (B,T), True (or 1) from each row's first observed value on, for pasts of different
                lengths that are padded in front. What stands in the padding does not matter.
            memory_values: (N,T,C), windows of a plug-and-play memory; None leaves the memory out.
            return_dict: False gives a tuple.

        Returns:
            A `STanHopOutput`.

        Raises:
            ValueError: a shape does not fit, a row of the mask has no observed value, or has one in front of padding.
        """
        config = self.config
        for name, values in (("past_values", past_values), ("memory_values", memory_values)):
            if values is None:
                continue
            if values.dim() != 3 or values.shape[2] != config.num_input_channels or not values.shape[0]:
                raise ValueError(
                    f"{name} must be (batch, rows, {config.num_input_channels}), got {tuple(values.shape)}."
                )
            if not 1 <= values.shape[1] <= config.context_length:
                raise ValueError(
                    f"{name} has {values.shape[1]} rows; give 1 to {config.context_length} (the last ones)."
                )
        observed = self._observed(past_values, past_observed_mask)
        states = self.model(past_values, observed, memory_values)
        patches = torch.stack([head(state) for head, state in zip(self.heads, states, strict=True)]).sum(0)
        forecast = patches.flatten(2)[..., : config.prediction_length].mT
        if config.baseline:
            real = observed.unsqueeze(-1)
            forecast = forecast + past_values.where(real, 0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        loss = None if future_values is None else F.mse_loss(forecast, future_values)
        output = STanHopOutput(loss=loss, prediction_outputs=forecast)
        return output if return_dict is None or return_dict else output.to_tuple()

    @staticmethod
    def _observed(past_BTC: Tensor, mask_BT: Tensor | None) -> Tensor:
        if mask_BT is None:
            return torch.ones_like(past_BTC[..., 0], dtype=torch.bool)
        if mask_BT.shape != past_BTC.shape[:2]:
            raise ValueError(
                f"past_observed_mask must be (batch, rows) = {tuple(past_BTC.shape[:2])}, got {tuple(mask_BT.shape)}."
            )
        mask = mask_BT.bool()
        if not bool(mask[:, -1].all()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise ValueError("past_observed_mask may hide rows in front alone; fill gaps, and pad on the left.")
        return mask
