"""graphattn.testing: the zoo is what it says, and every check fails on a wrong attention."""

import math

import pytest
import torch

from graphattn import Graph, graph_attention
from graphattn.testing import (
    GraphCase,
    assert_batch_equals_parts,
    assert_close_to_reference,
    assert_edge_order_is_free,
    assert_node_order_is_free,
    edge_reference,
    plain_attention,
    zoo,
)

ZOO = {case.name: case for case in zoo(hub=50)}


def right(query, key, value, graph):
    return edge_reference(query, key, value, graph)[0]


def softmax_over(groups, count, query, key, value, graph):
    """Attention whose softmax runs over other groups than the edges of one target."""
    src, dst = graph.edge_index
    weight = ((query[dst] * key[src]).sum(-1) / math.sqrt(query.size(-1))).exp()
    total = weight.new_zeros(count, weight.size(1)).index_add(0, groups, weight)
    weighted = (weight / total[groups]).unsqueeze(-1) * value[src]
    return value.new_zeros(graph.num_dst, *value.shape[1:]).index_add(0, dst, weighted)


def over_the_whole_batch(query, key, value, graph):
    groups = torch.zeros(graph.num_edges, dtype=torch.long)
    return softmax_over(groups, 1, query, key, value, graph)


def over_halves_of_the_edge_list(query, key, value, graph):
    groups = torch.arange(graph.num_edges) * 2 // max(graph.num_edges, 1)
    return softmax_over(groups, 2, query, key, value, graph)


def with_node_numbers(query, key, value, graph):
    numbers = torch.arange(key.size(0), dtype=key.dtype)[:, None, None]
    return right(query, key + numbers, value, graph)


def with_target_numbers(query, key, value, graph):
    numbers = torch.arange(graph.num_dst, dtype=query.dtype)[:, None, None]
    return right(query, key, value, graph) + numbers


def merged_parallel_edges(query, key, value, graph):
    once = graph.edge_index.unique(dim=1)
    return right(query, key, value, Graph(once, (graph.num_src, graph.num_dst)))


def last_edge_wins(query, key, value, graph):
    out = torch.zeros_like(query)
    for src, dst in graph.edge_index.t().tolist():
        out[dst] = value[src]
    return out


# The zoo ##########################################################################################


def test_zoo_has_every_kind_of_graph_under_a_name_of_its_own():
    cases = list(zoo())
    assert len({case.name for case in cases}) == len(cases)
    assert all(str(case) == case.name for case in cases)
    graphs = {case.name: case.graph() for case in cases}
    assert graphs["in-star"].in_degree().max() == graphs["out-star"].out_degree().max() == 2000
    for name, graph in graphs.items():
        assert torch.equal(graph.edge_index, next(c for c in cases if c.name == name).edge_index)
    assert graphs["no nodes"].num_dst == graphs["no edges"].num_edges == 0
    assert graphs["no sources"].num_src == graphs["no targets"].num_dst == 0
    assert graphs["no edges"].num_dst > 0
    assert (graphs["one edge, isolated nodes"].in_degree() == 0).sum() == 3
    loops = graphs["self-loops"].edge_index
    assert (loops[0] == loops[1]).any()
    parallel = graphs["parallel edges"].edge_index
    assert parallel.unique(dim=1).size(1) < parallel.size(1)
    assert graphs["more targets than sources"].num_dst > graphs["more targets than sources"].num_src
    assert graphs["more sources than targets"].num_dst < graphs["more sources than targets"].num_src
    assert graphs["shuffled"].edge_id is not None
    assert graphs["complete"].num_edges == graphs["complete"].num_dst ** 2
    degree = graphs["power law"].in_degree()
    assert degree.max() > 5 * degree.float().mean()


def test_zoo_is_the_same_each_time_and_takes_the_size_of_its_stars():
    torch.manual_seed(1)
    first = list(zoo(hub=20))
    torch.manual_seed(2)
    for a, b in zip(first, zoo(hub=20), strict=True):
        assert torch.equal(a.edge_index, b.edge_index)
    assert {case.name: case.num_src for case in first}["in-star"] == 21


def test_a_case_makes_a_fresh_graph_each_time():
    case = ZOO["shuffled"]
    assert isinstance(case, GraphCase)
    assert case.graph() is not case.graph()


# The references ###################################################################################


@pytest.mark.parametrize("name", ["parallel edges", "more targets than sources", "shuffled"])
def test_edge_reference_equals_a_loop_over_edges(name):
    case = ZOO[name]
    num_edges = case.edge_index.size(1)
    query = torch.randn(case.num_dst, 4, 3, dtype=torch.float64)
    key, value = torch.randn(2, case.num_src, 2, 3, dtype=torch.float64).unbind(0)
    bias = torch.randn(num_edges, 4, dtype=torch.float64)
    edge_attr = torch.randn(num_edges, 5, dtype=torch.float64)
    edge_weight = torch.randn(4, 3, 5, dtype=torch.float64)
    keep = torch.rand(num_edges, 4) < 0.7
    output, weights = edge_reference(
        query,
        key,
        value,
        case.graph(),
        bias=bias,
        edge_attr=edge_attr,
        edge_weight=edge_weight,
        scale=0.7,
        keep=keep,
        dropout=0.3,
    )
    expected = torch.zeros(case.num_dst, 4, 3, dtype=torch.float64)
    src, dst = case.edge_index.tolist()
    for h in range(4):
        extra = edge_attr @ edge_weight[h].t()
        score = [
            0.7 * query[dst[e], h] @ (key[src[e], h // 2] + extra[e]) + bias[e, h]
            for e in range(num_edges)
        ]
        for e in range(num_edges):
            total = sum(score[f].exp() for f in range(num_edges) if dst[f] == dst[e])
            weight = score[e].exp() / total
            torch.testing.assert_close(weights[e, h], weight)
            factor = float(keep[e, h]) / 0.7
            expected[dst[e], h] += weight * factor * (value[src[e], h // 2] + extra[e])
    torch.testing.assert_close(output, expected)


def test_edge_reference_with_everything_dropped_is_zero():
    x = torch.randn(3, 1, 2, dtype=torch.float64)
    graph = ZOO["parallel edges"].graph()
    keep = torch.zeros(5, 1, dtype=torch.bool)
    output, weights = edge_reference(x, x, x, graph, keep=keep, dropout=1.0)
    assert output.eq(0).all()
    assert weights.sum() == pytest.approx(2.0)  # before dropout


@pytest.mark.parametrize("name", ZOO)
def test_plain_attention_is_right_in_float64(name):
    case = ZOO[name]
    query = torch.randn(case.num_dst, 2, 3, dtype=torch.float64)
    key, value = torch.randn(2, case.num_src, 2, 3, dtype=torch.float64).unbind(0)
    torch.testing.assert_close(
        plain_attention(query, key, value, case.graph()), right(query, key, value, case.graph())
    )


# The tolerance rule ###############################################################################


def test_tolerance_rule_lets_an_equal_error_pass_and_stops_a_larger_one():
    reference = torch.zeros(10, dtype=torch.float64)
    plain = torch.full((10,), 1e-3)
    assert_close_to_reference(plain, plain, reference)
    assert_close_to_reference(1.9 * plain, plain, reference)
    with pytest.raises(
        AssertionError, match=r"error 0\.0021 exceeds 2\.0 x 0\.001 \(plain PyTorch"
    ):
        assert_close_to_reference(2.1 * plain, plain, reference)
    assert_close_to_reference(2.1 * plain, plain, reference, factor=3)
    with pytest.raises(AssertionError, match=r"exceeds 3 x"):
        assert_close_to_reference(3.1 * plain, plain, reference, factor=3)


def test_tolerance_rule_has_a_floor_of_a_few_units_that_grows_with_the_terms():
    reference = torch.ones(4, dtype=torch.float64)
    lucky = torch.ones(4)
    eps = torch.finfo(torch.float32).eps
    assert_close_to_reference(lucky + eps, lucky, reference)
    with pytest.raises(AssertionError, match=r"torch\.float32"):
        assert_close_to_reference(lucky + 8 * eps, lucky, reference)
    assert_close_to_reference(lucky + 8 * eps, lucky, reference, in_degree=100)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_tolerance_rule_refuses_nan_and_another_shape(poison):
    reference = torch.zeros(3, dtype=torch.float64)
    actual = torch.tensor([0.0, poison, 0.0])
    with pytest.raises(AssertionError, match=r"error (nan|inf) exceeds"):
        assert_close_to_reference(actual, torch.zeros(3), reference)
    with pytest.raises(AssertionError, match=r"shape \(2,\) != \(3,\)"):
        assert_close_to_reference(torch.zeros(2), torch.zeros(3), reference)
    empty = torch.zeros(0, 2)
    assert_close_to_reference(empty, empty, empty.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tolerance_rule_stops_a_softmax_over_the_wrong_groups(dtype):
    case = ZOO["shuffled"]
    exact = torch.randn(3, 30, 2, 8, dtype=torch.float64)
    low = exact.to(dtype)
    reference = right(*exact, case.graph())
    plain = plain_attention(*low, case.graph())
    assert_close_to_reference(graph_attention(*low, case.graph()), plain, reference, in_degree=20)
    wrong = softmax_over(case.edge_index[0], 30, *low, case.graph())
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close_to_reference(wrong, plain, reference, in_degree=20)


# The laws #########################################################################################


@pytest.mark.parametrize("attend", [right, plain_attention, graph_attention])
def test_right_attention_keeps_every_law(attend):
    for case in ZOO.values():
        assert_edge_order_is_free(attend, case)
        assert_node_order_is_free(attend, case)
    # edge_reference sums over all edges at once, in an order of its own
    if attend is not right:
        assert_batch_equals_parts(attend, [ZOO["chain"], ZOO["parallel edges"], ZOO["self-loops"]])


@pytest.mark.parametrize("attend", [last_edge_wins, over_halves_of_the_edge_list])
def test_law_of_edge_order_fails_on_attention_that_depends_on_it(attend):
    with pytest.raises(AssertionError, match="not close"):
        assert_edge_order_is_free(attend, ZOO["shuffled"])


@pytest.mark.parametrize("attend", [with_node_numbers, with_target_numbers])
def test_law_of_node_order_fails_on_attention_that_depends_on_it(attend):
    for name in ("shuffled", "more targets than sources", "more sources than targets"):
        with pytest.raises(AssertionError, match="not close"):
            assert_node_order_is_free(attend, ZOO[name])
        assert_edge_order_is_free(attend, ZOO[name])  # another law, which they keep


@pytest.mark.parametrize(
    "attend", [over_the_whole_batch, over_halves_of_the_edge_list, with_node_numbers]
)
def test_law_of_batches_fails_on_attention_across_graphs(attend):
    with pytest.raises(AssertionError, match="a graph's result depends on its batch mates"):
        assert_batch_equals_parts(attend, [ZOO["chain"], ZOO["self-loops"], ZOO["chain"]])


def test_merged_parallel_edges_are_seen_by_the_reference():
    case = ZOO["parallel edges"]
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            merged_parallel_edges(x, x, x, case.graph()), right(x, x, x, case.graph())
        )
