"""graphattn.attention_weights: the weights of graph_attention, edge by edge."""

import pytest
import torch

from graphattn import Graph, attention_weights, graph_attention
from graphattn.testing import edge_reference, zoo

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {case.name: case for case in zoo(hub=50)}


def tensors_for(case, *, heads=4, key_heads=2, dim=3, edge_dim=2, leading=()):
    num_edges = case.edge_index.size(1)
    shapes = {
        "query": (*leading, case.num_dst, heads, dim),
        "key": (*leading, case.num_src, key_heads, dim),
        "bias": (num_edges, heads),
        "edge_attr": (num_edges, edge_dim),
        "edge_weight": (heads, dim, edge_dim),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("leading", [(), (2, 3)])
@pytest.mark.parametrize("name", SMALL)
def test_zoo_equals_the_definition_forward_and_backward(name, leading, backend):
    case = SMALL[name]
    tensors = tensors_for(case, leading=leading)
    value = torch.zeros(*leading, case.num_src, 2, 3, dtype=torch.float64)
    weights = attention_weights(**tensors, graph=case.graph(), backend=backend)
    _, expected = edge_reference(**tensors, value=value, graph=case.graph())
    torch.testing.assert_close(weights, expected, **EXACT)
    cotangent = torch.randn_like(weights)
    torch.testing.assert_close(
        torch.autograd.grad(weights, list(tensors.values()), cotangent),
        torch.autograd.grad(expected, list(tensors.values()), cotangent),
        **EXACT,
    )


def test_c39_weights_are_in_the_callers_order_before_dropout(backend):
    edge_index = torch.tensor([[3, 0, 1, 2, 0, 3, 1], [2, 2, 0, 0, 3, 0, 2]])  # 4 nodes, 7 edges
    query, key, value = torch.randn(3, 4, 2, 5, dtype=torch.float64).unbind(0)
    weights = attention_weights(query, key, edge_index, backend=backend)
    assert weights.shape == (7, 2)
    score = (query[edge_index[1]] * key[edge_index[0]]).sum(-1) / 5**0.5
    for edge in range(7):
        rivals = edge_index[1] == edge_index[1, edge]
        share = score[edge].exp() / score[rivals].exp().sum(0)
        torch.testing.assert_close(weights[edge], share)
    out = torch.zeros_like(value).index_add(
        0, edge_index[1], weights.unsqueeze(-1) * value[edge_index[0]]
    )
    torch.testing.assert_close(
        graph_attention(query, key, value, edge_index, backend=backend), out, **EXACT
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_the_querys_and_sums_are_one(dtype, backend):
    case = SMALL["shuffled"]
    query, key = torch.randn(2, 30, 3, 8).to(dtype).unbind(0)
    weights = attention_weights(query, key, case.graph(), backend=backend)
    assert weights.dtype == dtype
    sums = torch.zeros(30, 3).index_add(0, case.edge_index[1], weights.float())
    expected = (case.graph().in_degree() > 0).float()[:, None].expand(30, 3)
    torch.testing.assert_close(sums, expected, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_scale(backend):
    case = SMALL["shuffled"]
    query, key = torch.randn(2, 30, 3, 8).unbind(0)
    weights = attention_weights(query, key, case.graph(), scale=0.0, backend=backend)
    share = 1.0 / case.graph().in_degree()[case.edge_index[1]]
    torch.testing.assert_close(weights, share[:, None].expand(-1, 3))


def test_refusals_bear_its_name():
    x = torch.zeros(3, 2, 4)
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match=r"^attention_weights: key must have the query's head_dim"):
        attention_weights(x, torch.zeros(3, 2, 5), edge_index)
    with pytest.raises(ValueError, match=r"^attention_weights: the graph has 4 sources"):
        attention_weights(x, x, Graph(edge_index, 4))
    with pytest.raises(ValueError, match=r"^attention_weights: bias must have shape"):
        attention_weights(x, x, edge_index, bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^attention_weights: edge_attr needs edge_weight"):
        attention_weights(x, x, edge_index, edge_attr=torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^attention_weights: unknown backend 'none'"):
        attention_weights(x, x, edge_index, backend="none")
    with pytest.raises(TypeError, match="positional"):
        attention_weights(x, x, edge_index, None)
