"""GraphMultiheadAttention against torch.nn.MultiheadAttention, of which it has the parameters."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from graphattn import Graph
from graphattn.nn import GraphMultiheadAttention
from graphattn.testing import zoo
from parity import (
    BACKENDS,
    EDGE_INDEX,
    TOLERANCE,
    assert_equal_to,
    assert_same_gradients,
    leaf,
)

SIZES = {"packed": {}, "kdim and vdim": {"kdim": 5, "vdim": 7}, "kdim": {"kdim": 5}}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(21)


def torch_layer(
    embed_dim: int = 8, heads: int = 2, *, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.MultiheadAttention:
    """Torch's layer, batch first, with biases that are not zero."""
    layer = nn.MultiheadAttention(embed_dim, heads, batch_first=True, **options).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return layer


def blocked_masks(num_dst: int, num_src: int) -> dict[str, Tensor]:
    """Masks as torch's layer means them: True is blocked. Every query sees something."""
    i, j = torch.arange(num_dst)[:, None], torch.arange(num_src)
    random = torch.rand(num_dst, num_src) < 0.6
    random[:, 0] = False
    return {
        "nothing blocked": torch.zeros(num_dst, num_src, dtype=torch.bool),
        "causal": j > i,
        "window": (i - j).abs() > 1,
        "one key each": j != i % num_src,
        "random": random,
    }


# The same numbers #################################################################################


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", ["nothing blocked", "causal", "window", "one key each", "random"])
def test_self_attention_with_any_mask(
    mask: str, bias: bool, backend: str, dtype: torch.dtype
) -> None:
    for heads in (1, 2, 8):
        theirs = torch_layer(8, heads, bias=bias, dtype=dtype)
        ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
        x, blocked = leaf(6, 8, dtype=dtype), blocked_masks(6, 6)[mask]
        out = ours(x, x, x, Graph.from_mask(~blocked))
        expected, _ = theirs(x, x, x, attn_mask=blocked)
        assert_same_gradients(ours, theirs, out, expected, [x])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(bias: bool, sizes: str, backend: str, dtype: torch.dtype) -> None:
    theirs = torch_layer(8, 4, bias=bias, dtype=dtype, **SIZES[sizes])
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    for (num_dst, num_src), name in itertools.product(
        [(6, 3), (3, 6)], ["nothing blocked", "random", "one key each"]
    ):
        query = leaf(num_dst, 8, dtype=dtype)
        key = leaf(num_src, theirs.kdim, dtype=dtype)
        value = leaf(num_src, theirs.vdim, dtype=dtype)
        blocked = blocked_masks(num_dst, num_src)[name]
        graph = Graph.from_mask(~blocked)
        assert (graph.num_src, graph.num_dst) == (num_src, num_dst)
        out = ours(query, key, value, graph)
        expected, _ = theirs(query, key, value, attn_mask=blocked)
        assert_same_gradients(ours, theirs, out, expected, [query, key, value])


def test_some_of_query_key_and_value_are_one_tensor() -> None:
    theirs = torch_layer()
    ours = GraphMultiheadAttention.from_torch(theirs)
    graph = Graph.from_mask(torch.ones(5, 5, dtype=torch.bool))
    a, b = leaf(5, 8), leaf(5, 8)
    for query, key, value in ((a, a, a), (a, b, b), (a, a, b), (a, b, a)):
        expected, _ = theirs(query, key, value)
        assert_same_gradients(ours, theirs, ours(query, key, value, graph), expected, [a])


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_mask_is_a_bias(backend: str) -> None:
    theirs = torch_layer(8, 2)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    x = leaf(5, 8)
    graph = Graph.from_mask(torch.ones(5, 5, dtype=torch.bool))
    source, target = graph.edge_index
    # One for all heads, and one for each, values between and -inf.
    shared, by_head = leaf(5, 5), leaf(2, 5, 5)
    holes = torch.zeros(5, 5, dtype=torch.float64)
    holes[[0, 3, 3], [1, 0, 2]] = -math.inf
    for mask in (shared, by_head, shared + holes, holes):
        bias = mask[..., target, source].expand(2, -1).t()
        expected, _ = theirs(x, x, x, attn_mask=mask)
        out = ours(x, x, x, graph, bias=bias)
        leaves = [x] + [tensor for tensor in (shared, by_head) if mask is tensor]
        assert_same_gradients(ours, theirs, out, expected, leaves)
    # What is blocked by -inf in a bias is the same as an edge that is not there.
    sparse = Graph.from_mask(holes == 0.0)
    assert_equal_to(ours(x, x, x, graph, bias=bias), ours(x, x, x, sparse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_c15_float_mask_in_train_and_eval(backend: str) -> None:
    theirs = torch_layer(8, 2, dtype=torch.float32)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    x, mask = torch.randn(1, 5, 8), torch.randn(5, 5)
    graph = Graph.from_mask(torch.ones(5, 5, dtype=torch.bool))
    bias = mask[graph.edge_index[1], graph.edge_index[0]][:, None].expand(-1, 2)
    expected = ours(x, x, x, graph, bias=bias)
    assert_equal_to(expected, theirs(x, x, x, attn_mask=mask)[0])
    with torch.no_grad():
        out = ours.eval()(x, x, x, graph, bias=bias)
        assert torch.equal(out, expected)
        assert_equal_to(out, theirs.eval()(x, x, x, attn_mask=mask, need_weights=False)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_key_padding_mask_of_a_batch(causal: bool, backend: str) -> None:
    theirs = torch_layer(8, 2)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    x = leaf(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    blocked = blocked_masks(5, 5)["causal" if causal else "nothing blocked"]
    graph = Graph.from_mask(~blocked & ~padding[:, None, :])
    rows = x.flatten(0, 1)
    out = ours(rows, rows, rows, graph).view(3, 5, 8)
    expected, _ = theirs(x, x, x, attn_mask=blocked, key_padding_mask=padding)
    assert_same_gradients(ours, theirs, out, expected, [x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_c46_columns_masked_for_the_whole_batch(backend: str) -> None:
    # Torch's fast path once cut such columns off.
    theirs = torch_layer(8, 2, dtype=torch.float32)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    x = torch.randn(3, 6, 8)
    padding = (torch.arange(6) >= 1).expand(3, 6)
    graph = Graph.from_mask(~padding[:, None, :].expand(3, 6, 6))
    rows = x.flatten(0, 1)
    train = ours(rows, rows, rows, graph).view(3, 6, 8)
    with torch.no_grad():
        out = ours.eval()(rows, rows, rows, graph).view(3, 6, 8)
    assert torch.equal(out, train)
    assert_equal_to(train, theirs(x, x, x, key_padding_mask=padding)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leading", [(4,), (2, 3)], ids=str)
def test_c28_leading_dimensions_share_the_graph(leading: tuple[int, ...], backend: str) -> None:
    theirs = torch_layer(8, 2)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    blocked = blocked_masks(5, 5)["window"]
    x = leaf(*leading, 5, 8)
    graph = Graph.from_mask(~blocked)
    out, weights = ours(x, x, x, graph, return_attention_weights=True)
    rows = x.flatten(0, -3)
    expected, dense = theirs(rows, rows, rows, attn_mask=blocked, average_attn_weights=False)
    source, target = graph.edge_index
    assert_equal_to(weights.flatten(0, -3), dense[..., target, source].movedim(1, 2))
    assert_same_gradients(ours, theirs, out, expected.view(out.shape), [x])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["nothing blocked", "causal", "random"])
def test_c39_weights_of_every_head(mask: str, backend: str) -> None:
    theirs = torch_layer(8, 4, dropout=0.5).eval()
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend).train()
    x, blocked = leaf(6, 8), blocked_masks(6, 6)[mask]
    graph = Graph.from_mask(~blocked)
    order = torch.randperm(graph.num_edges)
    edge_index = graph.edge_index[:, order]  # not sorted by target
    _, weights = ours(x, x, x, edge_index, return_attention_weights=True)
    _, dense = theirs(x, x, x, attn_mask=blocked, need_weights=True, average_attn_weights=False)
    assert weights.shape == (graph.num_edges, 4)
    expected = dense[:, edge_index[1], edge_index[0]].t()
    assert_equal_to(weights, expected, "before dropout, in the caller's order")
    factor = torch.randn_like(weights)
    assert_equal_to(
        torch.autograd.grad((weights * factor).sum(), x)[0],
        torch.autograd.grad((expected * factor).sum(), x)[0],
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_torch_on_random_masks(data: st.DataObject) -> None:
    num_dst, num_src = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    row = st.lists(st.booleans(), min_size=num_src, max_size=num_src).filter(any)
    allowed = torch.tensor(data.draw(st.lists(row, min_size=num_dst, max_size=num_dst)))
    heads = data.draw(st.sampled_from([1, 2, 4]))
    theirs = torch_layer(4, heads, kdim=data.draw(st.sampled_from([4, 3])))
    ours = GraphMultiheadAttention.from_torch(theirs)
    query, key, value = leaf(num_dst, 4), leaf(num_src, theirs.kdim), leaf(num_src, 4)
    expected, _ = theirs(query, key, value, attn_mask=~allowed)
    out = ours(query, key, value, Graph.from_mask(allowed))
    assert_same_gradients(ours, theirs, out, expected, [query, key, value])


def test_c88_true_means_the_opposite_in_torch() -> None:
    theirs = torch_layer()
    ours = GraphMultiheadAttention.from_torch(theirs)
    x = leaf(4, 8)
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    causal = ours(x, x, x, Graph.from_mask(lower))
    assert_equal_to(causal, theirs(x, x, x, attn_mask=~lower)[0])
    assert not torch.allclose(causal, theirs(x, x, x, attn_mask=lower)[0])
    # The first token sees itself only.
    alone = ours(x[:1], x[:1], x[:1], Graph.from_mask(lower[:1, :1]))
    assert_equal_to(causal[:1], alone)


# Where torch gives NaN ############################################################################


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_c09_c10_query_that_may_see_nothing(bias: bool, need_weights: bool, backend: str) -> None:
    theirs = torch_layer(8, 2, bias=bias)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    x = leaf(4, 8)
    blocked = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()
    out = ours(x, x, x, Graph.from_mask(~blocked), return_attention_weights=need_weights)
    out, weights = out if need_weights else (out, None)
    nothing = ours.out_proj(torch.zeros(8, dtype=torch.float64))
    assert torch.equal(out[1], nothing)
    if need_weights:
        assert theirs(x, x, x, attn_mask=blocked)[0][1].isnan().all()
        assert weights.shape == (6, 2)

    # The other rows, and their gradients, are those of torch with that row opened.
    opened = blocked.clone()
    opened[1] = False
    expected, _ = theirs(x, x, x, attn_mask=opened, need_weights=need_weights)
    others = [0, 2, 3]
    assert_same_gradients(ours, theirs, out[others], expected[others], [x])

    # A loss on the empty row reaches the output projection's bias and nothing else.
    out = ours(x, x, x, Graph.from_mask(~blocked))
    gradients = torch.autograd.grad(out[1].sum(), [x, *ours.parameters()])
    names = ["x", *(name for name, _ in ours.named_parameters())]
    for name, gradient in zip(names, gradients, strict=True):
        if name == "out_proj.bias":
            assert torch.equal(gradient, torch.ones_like(gradient))
        else:
            assert torch.count_nonzero(gradient) == 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_c08_rows_that_two_masks_fill_together(backend: str) -> None:
    # Causal and left padding leave the first query nothing; masks are combined logically.
    padding = torch.tensor([True, False, False])
    causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        attention = GraphMultiheadAttention(8, 2, backend=backend).to(dtype)
        x = torch.randn(3, 8, dtype=dtype)
        out = attention(x, x, x, Graph.from_mask(~causal & ~padding))
        assert out.isfinite().all()
        assert torch.equal(out[0], attention.out_proj(torch.zeros(8, dtype=dtype)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_c16_c20_no_edges_and_no_nodes(backend: str) -> None:
    attention = GraphMultiheadAttention(8, 2, edge_dim=3, backend=backend)
    for num_dst, num_src in ((4, 4), (0, 0), (3, 0), (0, 3)):
        query = torch.randn(num_dst, 8, requires_grad=True)
        key = torch.randn(num_src, 8, requires_grad=True)
        graph = Graph(torch.empty(2, 0, dtype=torch.int64), (num_src, num_dst))
        out, weights = attention(
            query, key, key, graph, edge_attr=torch.randn(0, 3), return_attention_weights=True
        )
        assert out.shape == (num_dst, 8)
        assert weights.shape == (0, 2)
        assert torch.equal(out, attention.out_proj.bias.expand(num_dst, 8))
        attention.zero_grad()
        out.sum().backward()
        assert torch.count_nonzero(query.grad) == 0
        assert torch.count_nonzero(key.grad) == 0
        assert all(parameter.grad is not None for parameter in attention.parameters())


# Parameters #######################################################################################


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("bias", [True, False])
def test_c49_state_dicts_load_strictly_both_ways(bias: bool, sizes: str) -> None:
    theirs = torch_layer(8, 2, bias=bias, **SIZES[sizes])
    ours = GraphMultiheadAttention(8, 2, bias=bias, **SIZES[sizes]).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = leaf(4, 8), leaf(5, theirs.kdim), leaf(5, theirs.vdim)
    graph = Graph.from_mask(torch.ones(4, 5, dtype=torch.bool))
    assert_equal_to(ours(*x, graph), theirs(*x)[0])
    theirs.load_state_dict(
        GraphMultiheadAttention(8, 2, bias=bias, **SIZES[sizes]).state_dict(), strict=True
    )


def test_c49_state_dict_names_are_stable() -> None:
    rest = ["in_proj_bias", "out_proj.bias", "out_proj.weight"]
    separate = ["k_proj_weight", "q_proj_weight", "v_proj_weight"]
    for options, names in (
        ({}, ["in_proj_weight", *rest]),
        ({"vdim": 5}, [*separate, *rest]),
        ({"kdim": 8, "vdim": 8}, ["in_proj_weight", *rest]),
        ({"bias": False}, ["in_proj_weight", "out_proj.weight"]),
        ({"edge_dim": 3}, ["in_proj_weight", "lin_edge.weight", *rest]),
    ):
        assert sorted(GraphMultiheadAttention(8, 2, **options).state_dict()) == sorted(names)


@pytest.mark.parametrize("sizes", list(SIZES))
def test_from_torch_copies(sizes: str) -> None:
    for dtype, training, dropout in ((torch.float64, True, 0.2), (torch.bfloat16, False, 0.0)):
        theirs = torch_layer(8, 2, dropout=dropout, dtype=dtype, **SIZES[sizes]).train(training)
        ours = GraphMultiheadAttention.from_torch(theirs, backend="eager")
        assert (ours.dropout, ours.training, ours.backend) == (dropout, training, "eager")
        assert (ours.embed_dim, ours.num_heads, ours.head_dim) == (8, 2, 4)
        assert (ours.kdim, ours.vdim) == (theirs.kdim, theirs.vdim)
        for (name, parameter), (_, original) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert parameter.dtype == dtype
            assert torch.equal(parameter, original), name
            assert parameter.data_ptr() != original.data_ptr(), name
    assert GraphMultiheadAttention.from_torch(theirs).backend == "auto"


def test_from_torch_whatever_the_order_of_dimensions() -> None:
    theirs = nn.MultiheadAttention(8, 2)  # [L, B, E]
    ours = GraphMultiheadAttention.from_torch(theirs)
    x = torch.randn(5, 3, 8)
    graph = Graph.from_mask(torch.ones(5, 5, dtype=torch.bool))
    rows = x.transpose(0, 1)
    assert_equal_to(ours(rows, rows, rows, graph).transpose(0, 1), theirs(x, x, x)[0])


@pytest.mark.parametrize("sizes", list(SIZES))
def test_reset_parameters_draws_as_torch_does(sizes: str) -> None:
    options = {**SIZES[sizes], "kdim": SIZES[sizes].get("kdim", 64)} if SIZES[sizes] else {}
    ours = GraphMultiheadAttention(64, 4, edge_dim=3, **options)
    theirs = nn.MultiheadAttention(64, 4, **options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7.0)
    ours.reset_parameters()
    for name, parameter in ours.named_parameters():
        assert not (parameter == 7.0).any(), name
        if name != "lin_edge.weight":
            like = theirs.get_parameter(name)
            assert parameter.abs().max() <= 1.05 * like.abs().max(), name
            torch.testing.assert_close(parameter.std(), like.std(), rtol=0.15, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", list(SIZES))
def test_c51_every_parameter_gets_a_gradient(sizes: str, backend: str) -> None:
    for bias, edge_dim, heads in itertools.product((True, False), (None, 3), (1, 4)):
        attention = GraphMultiheadAttention(
            8, heads, bias=bias, edge_dim=edge_dim, backend=backend, **SIZES[sizes]
        )
        key, value = torch.randn(4, attention.kdim), torch.randn(4, attention.vdim)
        edges = {} if edge_dim is None else {"edge_attr": torch.randn(6, 3)}
        out = attention(torch.randn(4, 8), key, value, EDGE_INDEX, **edges)
        out.square().sum().backward()
        for name, parameter in attention.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0.0, name


# Edge features ####################################################################################


@pytest.mark.parametrize("backend", BACKENDS)
def test_edge_features_are_added_to_key_and_value(backend: str) -> None:
    attention = GraphMultiheadAttention(8, 2, edge_dim=3, backend=backend).double()
    x, edge_attr = leaf(4, 8), leaf(6, 3)
    out, weights = attention(
        x, x, x, EDGE_INDEX, edge_attr=edge_attr, return_attention_weights=True
    )
    # The same with every edge as a node of its own: keys and values are those of the edges.
    source, target = EDGE_INDEX
    q, k, v = linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    extra = attention.lin_edge(edge_attr)
    k, v = (k[source] + extra).view(6, 2, 4), (v[source] + extra).view(6, 2, 4)
    score = torch.einsum("nhd,ehd->hne", q.view(4, 2, 4), k) / 2.0
    seen = target == torch.arange(4)[:, None]
    dense = score.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    heads = torch.einsum("hne,ehd->nhd", dense, v).flatten(1)
    expected = attention.out_proj(heads)
    assert_equal_to(weights, dense.sum(1).t())
    assert_same_gradients(attention, attention, out, expected, [x, edge_attr])


def test_edge_attr_given_or_missing() -> None:
    x = torch.randn(4, 8)
    plain, with_edges = GraphMultiheadAttention(8, 2), GraphMultiheadAttention(8, 2, edge_dim=3)
    text = "edge_attr is given, but the layer was built with edge_dim=None"
    with pytest.raises(ValueError, match=f"GraphMultiheadAttention: {text}"):
        plain(x, x, x, EDGE_INDEX, edge_attr=torch.randn(6, 3))
    text = "edge_attr is missing, but the layer was built with edge_dim=3"
    with pytest.raises(ValueError, match=f"GraphMultiheadAttention: {text}"):
        with_edges(x, x, x, EDGE_INDEX)
    with pytest.raises(ValueError, match=r"Use edge_attr\.t\(\)"):
        with_edges(x, x, x, EDGE_INDEX, edge_attr=torch.randn(3, 6))


# Dropout, dtypes, copies ##########################################################################


@pytest.mark.parametrize("backend", BACKENDS)
def test_c45_dropout_in_training_only_and_unbiased(backend: str) -> None:
    attention = GraphMultiheadAttention(8, 2, dropout=0.4, backend=backend).eval()
    x = torch.randn(4, 8)
    expected = attention(x, x, x, EDGE_INDEX)
    assert torch.equal(attention(x, x, x, EDGE_INDEX), expected)
    attention.train()
    many = x.expand(20_000, 4, 8)  # each draws a mask of its own
    draws = attention(many, many, many, EDGE_INDEX)
    error = (draws.mean(0) - expected).abs()
    assert (error <= 5.0 * draws.std(0) / math.sqrt(20_000) + 1e-5).all()
    assert draws.std(0)[0].max() > 0.02
    torch.manual_seed(1)
    once = attention(x, x, x, EDGE_INDEX)
    torch.manual_seed(1)
    assert torch.equal(attention(x, x, x, EDGE_INDEX), once)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_spreads_as_that_of_torch(backend: str) -> None:
    theirs = torch_layer(8, 2, dropout=0.3, dtype=torch.float32)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    many = torch.randn(4, 8).expand(10_000, 4, 8)
    graph = Graph.from_mask(torch.ones(4, 4, dtype=torch.bool))
    draws, others = ours(many, many, many, graph), theirs(many, many, many)[0]
    torch.testing.assert_close(draws.std(0), others.std(0), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast_and_pure_low_precision(dtype: torch.dtype, backend: str) -> None:
    attention = GraphMultiheadAttention(8, 2, edge_dim=3, backend=backend)
    x, edge_attr = torch.randn(4, 8), torch.randn(6, 3)
    expected = attention(x, x, x, EDGE_INDEX, edge_attr=edge_attr)
    for key in (x, x.clone()):  # packed projection and separate ones
        attention.zero_grad()
        with torch.autocast("cpu", dtype):
            out = attention(x, key, key, EDGE_INDEX, edge_attr=edge_attr)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
        out.sum().backward()
        for name, parameter in attention.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert parameter.grad.isfinite().all(), name
    attention = copy.deepcopy(attention).to(dtype)
    x, edge_attr = x.to(dtype), edge_attr.to(dtype)
    out = attention(x, x, x, EDGE_INDEX, edge_attr=edge_attr)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_copies_after_forward_and_backward() -> None:
    attention, x = GraphMultiheadAttention(8, 2, edge_dim=3), torch.randn(4, 8)
    edge_attr = torch.randn(6, 3)
    expected = attention(x, x, x, EDGE_INDEX, edge_attr=edge_attr)
    expected.sum().backward()
    for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(twin(x, x, x, EDGE_INDEX, edge_attr=edge_attr), expected)


def test_c55_attributes_and_export() -> None:
    attention, x = GraphMultiheadAttention(8, 2).eval(), torch.randn(4, 8)
    before = dict(vars(attention))
    inputs = (x, torch.randn(4, 8), torch.randn(4, 8), EDGE_INDEX)
    expected = attention(*inputs)
    assert vars(attention) == before
    program = torch.export.export(attention, inputs)
    torch.testing.assert_close(program.module()(*inputs), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zoo_as_masks_with_multiplicity(backend: str) -> None:
    # Against torch with the logarithm of the number of parallel edges as its mask.
    theirs = torch_layer(8, 2)
    ours = GraphMultiheadAttention.from_torch(theirs, backend=backend)
    for case in zoo(hub=20):
        count = torch.zeros(case.num_dst, case.num_src, dtype=torch.float64)
        source, target = case.edge_index
        count.index_put_((target, source), torch.ones(len(source)).double(), accumulate=True)
        reached = count.sum(1) > 0.0
        if not reached.any():
            continue
        query, key = leaf(case.num_dst, 8), leaf(case.num_src, 8)
        expected, _ = theirs(query[reached], key, key, attn_mask=count[reached].log())
        out = ours(query, key, key, case.graph())
        assert_same_gradients(ours, theirs, out[reached], expected, [query, key])
        assert torch.equal(out[~reached], ours.out_proj.bias.expand(int((~reached).sum()), 8))


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim 10 must be divisible by num_heads 4."),
        ({"embed_dim": 0}, "embed_dim must be at least 1, got 0."),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0."),
        ({"kdim": 0}, "kdim must be at least 1, got 0."),
        ({"vdim": -1}, "vdim must be at least 1, got -1."),
        ({"edge_dim": 0}, "edge_dim must be at least 1, got 0."),
        ({"dropout": 2.0}, "dropout must be a probability from 0 to 1, got 2.0."),
    ],
    ids=str,
)
def test_c42_constructor_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"GraphMultiheadAttention: {text}")):
        GraphMultiheadAttention(**({"embed_dim": 8, "num_heads": 2} | options))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_from_torch_refuses_keys_that_are_no_nodes(option: str) -> None:
    text = re.escape(
        "GraphMultiheadAttention.from_torch: add_bias_kv and add_zero_attn add a key that is no "
        "node. Add that node to the sources and an edge from it to every query."
    )
    with pytest.raises(ValueError, match=text):
        GraphMultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, **{option: True}))


def test_graph_and_bias_that_do_not_fit() -> None:
    attention, x = GraphMultiheadAttention(8, 2), torch.randn(4, 8)
    with pytest.raises(ValueError, match="the graph has 3 sources and 4 targets, but key has 4"):
        attention(x, x, x, Graph.from_mask(torch.ones(4, 3, dtype=torch.bool)))
    with pytest.raises(ValueError, match="bias must have shape"):
        attention(x, x, x, EDGE_INDEX, bias=torch.zeros(6, 3))
    with pytest.raises(IndexError, match="there are 4"):
        attention(x, x, x, torch.tensor([[0], [4]]))
    with pytest.raises(ValueError, match="unknown backend"):
        GraphMultiheadAttention(8, 2, backend="flash")(x, x, x, EDGE_INDEX)
    with pytest.raises(TypeError, match="unexpected keyword argument 'add_bias_kv'"):
        GraphMultiheadAttention(8, 2, add_bias_kv=True)


def test_repr() -> None:
    assert "8, num_heads=2" in repr(GraphMultiheadAttention(8, 2))
