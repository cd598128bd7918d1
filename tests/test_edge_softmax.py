"""graphattn.edge_softmax: softmax over the in-edges of each target."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from graphattn import Graph, edge_softmax
from graphattn.testing import zoo

SMALL = {case.name: case for case in zoo(hub=50)}


def by_loop(scores, edge_index):
    """Each group on its own with torch.softmax."""
    out = torch.zeros_like(scores)
    for target in edge_index[1].unique():
        group = (edge_index[1] == target).nonzero().flatten()
        out = out.index_copy(0, group, torch.softmax(scores[group], dim=0))
    return out


@pytest.mark.parametrize("trailing", [(), (1,), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("name", SMALL)
def test_zoo_equals_torch_softmax_of_each_group(name, trailing, backend):
    case = SMALL[name]
    shape = (case.edge_index.size(1), *trailing)
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = edge_softmax(scores, case.graph(), backend=backend)
    expected = by_loop(scores, case.edge_index)
    assert weights.shape == scores.shape
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    if scores.numel():
        cotangent = torch.randn_like(scores)
        torch.testing.assert_close(
            torch.autograd.grad(weights, scores, cotangent),
            torch.autograd.grad(expected, scores, cotangent),
            rtol=1e-12,
            atol=1e-12,
        )


def test_gradcheck_and_gradgradcheck(backend):
    case = SMALL["parallel edges"]
    scores = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    graph = case.graph()
    assert gradcheck(lambda x: edge_softmax(x, graph, backend=backend), (scores,))
    assert gradgradcheck(lambda x: edge_softmax(x, graph, backend=backend), (scores,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c01_scores_as_far_apart_as_the_dtype_allows(dtype, backend):
    graph = Graph(torch.tensor([[0, 1, 0], [2, 2, 1]]), 3)
    far = min(1e5, torch.finfo(dtype).max)
    scores = torch.tensor([far, -far, 7.0], dtype=dtype, requires_grad=True)
    weights = edge_softmax(scores, graph, backend=backend)
    assert weights.dtype == dtype
    assert weights.tolist() == [1.0, 0.0, 1.0]
    weights[0].backward()
    assert scores.grad.eq(0).all()


def test_c08_minus_infinity_is_nothing_and_the_lowest_number_is_a_score(backend):
    graph = Graph(torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 1, 2, 2]]), 3)
    lowest = torch.finfo(torch.float32).min
    scores = torch.tensor(
        [-math.inf, -math.inf, -math.inf, 3.0, lowest, lowest], requires_grad=True
    )
    weights = edge_softmax(scores, graph, backend=backend)
    assert weights.tolist() == [0.0, 0.0, 0.0, 1.0, 0.5, 0.5]
    weights.sum().backward()
    assert scores.grad.eq(0).all()


def test_contract_7_nan_stays_in_its_group_and_column(backend):
    graph = Graph(torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]), 2)
    scores = torch.tensor([[math.nan, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]])
    weights = edge_softmax(scores, graph, backend=backend)
    assert weights[:2, 0].isnan().all()
    assert weights[:2, 1].isfinite().all()
    assert weights[2:].isfinite().all()


def test_under_autocast_the_dtype_stays(backend):
    case = SMALL["shuffled"]
    scores = torch.randn(200, 2)
    with torch.autocast("cpu", torch.bfloat16):
        weights = edge_softmax(scores, case.graph(), backend=backend)
    torch.testing.assert_close(weights, by_loop(scores, case.edge_index))


def test_refusals():
    edge_index = torch.tensor([[0], [1]])
    graph = Graph(edge_index, 2)
    with pytest.raises(
        TypeError,
        match=r"edge_softmax: graph must be a Graph, got Tensor\. Use Graph\(edge_index, num_nodes",
    ):
        edge_softmax(torch.zeros(1), edge_index)
    with pytest.raises(
        TypeError, match=r"edge_softmax: scores must be floating point, got torch.i"
    ):
        edge_softmax(torch.zeros(1, dtype=torch.long), graph)
    with pytest.raises(TypeError, match=r"edge_softmax: scores must be a tensor, got list"):
        edge_softmax([0.0], graph)
    for scores in (torch.zeros(()), torch.zeros(2), torch.zeros(2, 1)):
        with pytest.raises(
            ValueError, match=r"edge_softmax: scores must have one row for each of the 1 edges, got"
        ):
            edge_softmax(scores, graph)
    with pytest.raises(ValueError, match=r"edge_softmax: scores is on cpu, but the graph is on me"):
        edge_softmax(torch.zeros(1), graph.to("meta"))
    with pytest.raises(ValueError, match=r"edge_softmax: unknown backend 'none'"):
        edge_softmax(torch.zeros(1), graph, backend="none")
