"""The matrices of heads against the models they come from, and against weights made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import patch_model
from hf_attn_swap.dynamics import HeadMatrices, embedded_tokens, head_matrices, simulate, spectra
from hf_attn_swap.families import sites
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, fresh


def first_layer(name: str, swapped: bool) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model without biases; its first layer's input (B,N,E), attention (B,H,N,N) and W_o's output (B,N,E)."""
    model = fresh(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
    if swapped:
        patch_model(model, "softmax")
    else:
        model.set_attn_implementation("eager")
    site = next(site for site in sites(model) if site.usable)
    seen: dict[str, Tensor] = {}

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.setdefault("x", args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, args: Any, output: Tensor) -> None:
        seen.setdefault("out", output)

    site.core.register_forward_pre_hook(before, with_kwargs=True)
    site.container.get_submodule(site.family.output).register_forward_hook(after)
    with torch.no_grad():
        weights = model(**batch_of(name), output_attentions=True).attentions[0]
    return model, seen["x"], weights, seen["out"].view_as(seen["x"])


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("swapped", [False, True])
def test_values_and_scores_are_the_models(name: str, swapped: bool) -> None:
    """sum_h P_h x V_h^T is what W_o gives, and P_h is the softmax of x Q K^T x^T (rotary embeddings apart)."""
    model, x_BNE, weights_BHNN, out_BNE = first_layer(name, swapped)
    heads = head_matrices(model)
    moved = (weights_BHNN @ (x_BNE[:, None] @ heads.V.transpose(1, 2))).sum(1)
    assert torch.allclose(moved, out_BNE, atol=1e-9)
    if name == "llama":
        return
    scores = heads.scale * (x_BNE[:, None] @ heads.query) @ (x_BNE[:, None] @ heads.key).transpose(2, 3)
    if name in zoo.CAUSAL:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    assert torch.allclose(scores.softmax(-1), weights_BHNN, atol=1e-6)  # eager softmax is in fp32
    form = heads.scale * heads.query[1] @ heads.key[1].T
    assert torch.allclose(heads.B[1], (form + form.T) / 2)


def test_grouped_heads_share_keys_and_values() -> None:
    model = fresh("llama")
    heads, attention = head_matrices(model), model.model.layers[0].self_attn
    assert (len(heads), heads.width, heads.query.shape[2]) == (4, zoo.HIDDEN, 8)
    assert torch.equal(heads.key[0], heads.key[1])
    assert not torch.equal(heads.key[1], heads.key[2])
    assert torch.equal(heads.key[2], attention.k_proj.weight[8:16].T.double())
    assert torch.equal(heads.output[3], attention.o_proj.weight[:, 24:32].T.double())


def test_spectrum_by_hand() -> None:
    """V = diag(2, -1, 0) acts along the axes; the leading eigenvector is the first axis, and Q K^T there is 3."""
    axis = torch.eye(3, dtype=torch.float64)
    value = torch.diag(torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64))
    query = torch.diag(torch.tensor([3.0, -1.0, 1.0], dtype=torch.float64))
    (spectrum,) = spectra(HeadMatrices.plain(query, axis, value))
    assert spectrum.value.real.tolist() == [2.0, -1.0]
    assert spectrum.form.tolist() == [-1.0, 1.0, 3.0]
    assert (spectrum.leading, spectrum.alignment) == (2, 3.0)
    assert spectrum.satisfies
    assert not spectra(HeadMatrices.plain(-query, axis, value))[0].satisfies, "its keys point away"
    assert not spectra(HeadMatrices.plain(query, axis, -value))[0].positive
    assert not spectra(HeadMatrices.plain(query, axis, axis))[0].simple
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 0.5]], dtype=torch.float64)
    assert not spectra(HeadMatrices.plain(query, axis, turn))[0].positive, "a rotation has complex eigenvalues"


def test_a_transposed_matrix_would_show() -> None:
    """Columns and rows are not exchanged: V = e_1 e_2^T moves tokens along e_1, by their second coordinate."""
    value = torch.zeros(2, 2, dtype=torch.float64)
    value[0, 1] = 1
    heads = HeadMatrices.plain(torch.zeros(2, 2), torch.zeros(2, 2), value)
    token = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    moved = simulate(token, heads, time=1, step=0.1, value="head", rescale=False).z[-1]
    assert moved.tolist() == [[pytest.approx(1.0), 1.0]]


def test_embedded_tokens_are_what_the_first_layer_reads() -> None:
    from transformers import BertTokenizer

    for name in ("bert", "albert"):
        model = fresh(name)
        tokenizer = BertTokenizer(
            vocab={w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
        )
        tokens, names = embedded_tokens(model, tokenizer, "a b a")
        assert names == ["[CLS]", "a", "b", "a", "[SEP]"]
        assert tokens.shape == (5, zoo.HIDDEN)
        assert tokens.dtype == torch.float64
