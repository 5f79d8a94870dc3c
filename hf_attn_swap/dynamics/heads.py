"""The matrices of trained heads: B_h compares two tokens, and V_h x_j is what a head reads from token j.

B_h = (W_Q W_K^T + its transpose) / (2 sqrt(D)), V_h = (W_V W_O)^T per head, so that a head adds sum_j P_ij V_h x_j to
token i. Biases and rotary embeddings are left out. Geshkovski et al. (2023), section 5; docs/mathematics.md, section
Dynamics of tokens.
Axes: H head, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..families import sites
from ..wiring.install import model_root


@dataclass(frozen=True, kw_only=True)
class HeadMatrices:
    """The projections of some heads, in float64, as they multiply row vectors x (1,E).

    Attributes:
        query, key, value: (H,E,D); key/value heads that serve a group of query heads are repeated.
        output: (H,D,E), the rows of W_O of each head.
        scale: the factor of the scores, 1 / sqrt(D) for trained heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float

    @classmethod
    def plain(cls, query: Tensor, key: Tensor, value: Tensor | None = None) -> HeadMatrices:
        """One head as the theory has it: scores <Q x_i, K x_j> without a factor, and a value matrix V.

        Args:
            query: Q (E,E), which multiplies column vectors.
            key: K (E,E), likewise.
            value: V (E,E), likewise; the identity if left out.
        """
        width = query.shape[1]
        identity = torch.eye(width, dtype=torch.float64)
        value = identity if value is None else value
        q, k, v = (matrix.double().T[None] for matrix in (query, key, value))
        return cls(query=q, key=k, value=v, output=identity[None], scale=1.0)

    def __len__(self) -> int:
        return len(self.query)

    def __getitem__(self, chosen: Sequence[int]) -> HeadMatrices:
        """Some of the heads, counted from 0.

        Raises:
            ValueError: the layer has no head of that number.
        """
        if not chosen or any(not 0 <= index < len(self) for index in chosen):
            raise ValueError(f"head {chosen}: there are heads 0 to {len(self) - 1} (the papers count from 1).")
        picked = torch.tensor(list(chosen))
        return replace(self, **{name: getattr(self, name)[picked] for name in ("query", "key", "value", "output")})

    def to(self, device: torch.device | str) -> HeadMatrices:
        """The same heads on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("query", "key", "value", "output")})

    @property
    def width(self) -> int:
        """The width of the model, E."""
        return self.query.shape[1]

    @property
    def V(self) -> Tensor:  # noqa: N802  # the papers' name
        """(H,E,E): V_h = (W_V W_O)^T, which multiplies column vectors."""
        return (self.value @ self.output).transpose(1, 2)

    @property
    def B(self) -> Tensor:  # noqa: N802  # as above
        """(H,E,E): B_h, the symmetric part of the bilinear form that gives the scores."""
        form = self.query @ self.key.transpose(1, 2)
        return 0.5 * self.scale * (form + form.transpose(1, 2))


def head_matrices(model: nn.Module, layer: int = 0) -> HeadMatrices:
    """The matrices of the heads of one self-attention layer.

    Args:
        model: a `PreTrainedModel`, stock or swapped, or a wrapper that holds one.
        layer: the number of the layer, counted from 0 in module order among the self-attention modules.

    Raises:
        ValueError: there is no such layer, the places of its projections are not known, or its weights are not finite.
    """
    usable = [site for site in sites(model_root(model)) if site.usable]
    if not 0 <= layer < len(usable):
        raise ValueError(f"layer {layer}: this model has self-attention layers 0 to {len(usable) - 1}.")
    site = usable[layer]
    family, sizes = site.family, site.family.geometry(site.core)
    if family.query is None or family.key is None or family.value is None or family.output is None:
        raise ValueError(
            f"{site.path}: the package does not know where {type(site.core).__name__} keeps its projections; choose "
            "another model."
        )
    if family.query == family.key:  # one module holds all three projections, side by side
        per_key = sizes.kv_heads * sizes.head_dim
        widths = [sizes.heads * sizes.head_dim, per_key, per_key]
        matrices = torch.split(_matrix(site.core.get_submodule(family.query), site.path), widths, 1)
    else:
        paths = (family.query, family.key, family.value)
        matrices = tuple(_matrix(site.core.get_submodule(path), site.path) for path in paths)
    query, key, value = (matrix.view(sizes.hidden, -1, sizes.head_dim).transpose(0, 1) for matrix in matrices)
    groups = sizes.heads // sizes.kv_heads
    output = _matrix(site.container.get_submodule(family.output), site.path)
    return HeadMatrices(
        query=query,
        key=key.repeat_interleave(groups, 0),
        value=value.repeat_interleave(groups, 0),
        output=output.view(sizes.heads, sizes.head_dim, -1),
        scale=sizes.head_dim**-0.5,
    )


def _matrix(module: nn.Module, path: str) -> Tensor:
    """The module's weight as (in,out) in float64; a Linear stores (out,in), a Conv1D (in,out)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    matrix = weight.detach().double() if type(module).__name__ == "Conv1D" else weight.detach().double().T
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{path}: its weights are not finite; check the checkpoint.")
    return matrix
