"""graphattn.graph_attention in situations that are known to go wrong."""

import pytest
import torch

from graphattn import Graph, attention_weights, dense_attention, graph_attention
from graphattn.testing import (
    GraphCase,
)
from operands import (
    EXACT,
    ISOLATED,
    SHUFFLED,
    SMALL,
    ZOO,
    assert_right,
    assert_same,
    run,
    tensors_for,
)

# Known traps ######################################################################################


def two_scores(first, second, dtype, backend):
    """Weights of two in-edges with these scores, by a bias; and the gradient of the bias."""
    graph = Graph(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    query, key = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(2, 1, 1, dtype=dtype)
    bias = torch.tensor([[first], [second]], dtype=torch.float32, requires_grad=True)
    value = torch.tensor([1.0, 0.0], dtype=dtype).view(2, 1, 1)
    out = graph_attention(query, key, value, graph, bias=bias, backend=backend)
    out.sum().backward()
    weights = attention_weights(query, key, graph, bias=bias.detach(), backend=backend)
    torch.testing.assert_close(weights[0, 0], out.detach().view(()))
    return weights.flatten().float(), bias.grad.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scores", [(1e5, -1e5), (12.0, -12.0), (-1e5, -1e5 + 1), (88.0, 90.0)])
def test_c01_maximum_is_subtracted_before_the_exponential(scores, dtype, backend):
    weights, grad = two_scores(*scores, dtype, backend)
    expected = torch.softmax(torch.tensor(scores), 0)
    torch.testing.assert_close(weights, expected, rtol=2e-3, atol=2e-3)
    assert weights.sum() == pytest.approx(1.0, abs=5e-3)
    assert grad.isfinite().all()


def test_c03_scores_0_and_3_do_not_get_equal_weight(backend):
    weights, _ = two_scores(0.0, 3.0, torch.float32, backend)
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([0.0, 3.0]), 0))


def test_c04_weights_are_normalised_over_in_edges(backend):
    edge_index = torch.tensor([[1, 2, 3, 0, 0], [0, 0, 0, 3, 2]])
    query, key = torch.randn(2, 4, 3, 5).unbind(0)
    weights = attention_weights(query, key, edge_index, backend=backend)
    sums = torch.zeros(4, 3).index_add(0, edge_index[1], weights)
    torch.testing.assert_close(sums, torch.tensor([1.0, 0, 1, 1])[:, None].expand(4, 3))
    assert (weights[:3] < 0.999).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c05_empty_groups_need_no_constant_in_half_precision(dtype, backend):
    tensors = tensors_for(ISOLATED, dtype=dtype)
    out, grads = run(graph_attention, tensors, ISOLATED.graph(), backend=backend)
    torch.testing.assert_close(out[1], tensors["value"][0])
    assert out[[0, 2, 3]].eq(0).all()
    assert all(grad.isfinite().all() for grad in grads.values())


def test_c08_a_row_of_the_smallest_numbers_is_the_mean(backend):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        lowest = torch.finfo(dtype).min
        weights, grad = two_scores(lowest, lowest, dtype, backend)
        torch.testing.assert_close(weights, torch.tensor([0.5, 0.5]))
        assert grad.isfinite().all()
    # -1e9 does not fit float16: what arrives is -inf, and nothing is left to attend to
    graph = Graph(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    x = torch.ones(2, 1, 1, dtype=torch.float16)
    bias = torch.full((2, 1), -1e9).half()
    assert graph_attention(x[:1], x, x, graph, bias=bias, backend=backend).item() == 0.0


def test_c09_c10_a_node_that_sees_nothing_agrees_with_a_mask_row_of_false(backend):
    allowed = torch.tensor([[True, True, False], [False] * 3, [True, False, True]])
    case = GraphCase("mask", Graph.from_mask(allowed).edge_index, 3, 3)
    tensors = tensors_for(case, bias=False)

    def dense(query, key, value, graph):
        return dense_attention(query, key, value, allowed)

    actual = run(graph_attention, tensors, case.graph(), backend=backend)
    assert actual[0][1].eq(0).all()
    assert_same(actual, run(dense, tensors, case.graph()), **EXACT)


def test_c10_an_empty_row_left_out_of_the_loss_poisons_no_parameter(backend):
    project = torch.nn.Linear(4, 3 * 2 * 4)
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])  # node 0 sees nothing
    query, key, value = project(torch.randn(4, 4)).view(4, 3, 2, 4).unbind(1)
    out = graph_attention(query, key, value, edge_index, backend=backend)
    weights = attention_weights(query, key, edge_index, backend=backend)
    (out[1:].pow(2).sum() + weights.pow(2).sum()).backward()
    assert all(p.grad.isfinite().all() for p in project.parameters())


def test_c12_scores_are_not_clamped(backend):
    weights, grad = two_scores(6.0, 9.0, torch.float32, backend)
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([6.0, 9.0]), 0))
    slope = float(weights[0] * weights[1])
    torch.testing.assert_close(grad, torch.tensor([slope, -slope]))


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_c16_c17_graph_without_edges(num_nodes, backend):
    edge_index = torch.zeros(2, 0, dtype=torch.long)
    x = torch.randn(num_nodes, 2, 3, requires_grad=True)
    out = graph_attention(x, x, x, edge_index, backend=backend)
    assert out.shape == (num_nodes, 2, 3)
    assert out.eq(0).all()
    out.sum().backward()
    assert x.grad.eq(0).all()


def test_c18_node_without_in_edges_gets_a_zero_message(backend):
    x = torch.randn(2, 1, 3)
    out = graph_attention(x, x, x, torch.tensor([[0], [1]]), backend=backend)
    assert out[0].eq(0).all()
    torch.testing.assert_close(out[1], x[0])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SMALL)
def test_c19_no_leftover_memory_shows(name, backend):
    case = SMALL[name]
    assert_right(case, backend, tensors_for(case, edge_dim=2))
    assert_right(case, backend, tensors_for(case, heads=4, key_heads=2, leading=(2,)))


def test_c19_empty_groups_between_and_after_are_zero(backend):
    case = ZOO["empty groups between"]  # targets 0, 0, 2, 2 of 4
    out, grads = run(graph_attention, tensors_for(case), case.graph(), backend=backend)
    assert out[[1, 3]].eq(0).all()
    assert out[[0, 2]].ne(0).all()
    assert grads["query"][[1, 3]].eq(0).all()


@pytest.mark.parametrize("name", ["no nodes", "no edges", "no sources", "no targets"])
def test_c20_zero_element_tensors_with_a_graph_of_derivatives(name, backend):
    case = ZOO[name]
    tensors = tensors_for(case, heads=1, dim=1)
    weights = attention_weights(
        tensors["query"], tensors["key"], case.graph(), bias=tensors["bias"], backend=backend
    )
    assert weights.shape == (0, 1)
    assert weights.requires_grad
    grads = torch.autograd.grad(weights.sum(), [tensors["query"], tensors["bias"]])
    assert grads[0].shape == tensors["query"].shape
    assert grads[1].shape == (0, 1)


@pytest.mark.parametrize("leading", [(2,), (3, 2)])
def test_c28_leading_dimensions_equal_a_loop_without_copies_of_the_index(leading, backend):
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    query, key, value = (torch.randn(*leading, 3, 2, 4) for _ in range(3))
    out = graph_attention(query, key, value, edge_index, backend=backend)
    weights = attention_weights(query, key, edge_index, backend=backend)
    assert out.shape == (*leading, 3, 2, 4)
    assert weights.shape == (*leading, 3, 2)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in leading)).view(-1, len(leading)):
        at = tuple(at.tolist())
        alone = graph_attention(query[at], key[at], value[at], edge_index, backend=backend)
        torch.testing.assert_close(out[at], alone)
        torch.testing.assert_close(
            weights[at], attention_weights(query[at], key[at], edge_index, backend=backend)
        )
    assert Graph.of(edge_index, 3).num_edges == 3


def test_c32_no_self_loop_is_added_to_a_two_sided_graph(backend):
    query = torch.randn(3, 1, 4, requires_grad=True)
    key = torch.randn(2, 1, 4, requires_grad=True)
    value = torch.randn(2, 1, 4, requires_grad=True)
    out = graph_attention(query, key, value, torch.tensor([[0], [2]]), backend=backend)
    torch.testing.assert_close(out[2], value[0])
    assert out[:2].eq(0).all()
    out.sum().backward()
    assert value.grad[1].eq(0).all()


def test_c36_parallel_edges_with_features_of_their_own(backend):
    edge_index = torch.tensor([[0, 0, 2], [1, 1, 1]])
    case = GraphCase("parallel", edge_index, 3, 3)
    assert_right(case, backend, tensors_for(case, edge_dim=3))


def test_c45_no_dropout_unless_it_is_asked_for(backend):
    tensors = tensors_for(SHUFFLED)
    first, second = (
        graph_attention(**tensors, graph=SHUFFLED.graph(), backend=backend) for _ in range(2)
    )
    assert torch.equal(first, second)
    dropped = graph_attention(**tensors, graph=SHUFFLED.graph(), dropout=0.6, backend=backend)
    assert not torch.allclose(first, dropped)


def hubs(kind, num_nodes, num_edges):
    if kind == "star":
        return torch.stack([torch.arange(num_edges) % num_nodes, torch.zeros(num_edges).long()])
    if kind == "small range":
        return torch.stack([torch.arange(num_edges) % 3, torch.arange(num_edges) % 5])
    if kind == "power law":
        return (torch.rand(2, num_edges).pow(6) * num_nodes).long()
    return torch.randint(num_nodes, (2, num_edges))


@pytest.mark.parametrize("kind", ["star", "power law", "uniform", "small range"])
def test_c68_hubs_skew_and_uniform_are_right_and_sorted_once(kind, backend, monkeypatch):
    edge_index = hubs(kind, 1000, 20_000)
    case = GraphCase(kind, edge_index, 1000, 1000)
    tensors = tensors_for(case, heads=2, dim=8, bias=False, dtype=torch.float32)
    exact = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    sort, sorts = torch.sort, []
    monkeypatch.setattr(torch, "sort", lambda *a, **k: sorts.append(1) or sort(*a, **k))
    for _ in range(3):
        actual = run(graph_attention, tensors, edge_index, backend=backend)
    assert len(sorts) <= 2
    expected = run(graph_attention, exact, edge_index, backend="eager")
    low = actual[0].double(), {k: v.double() for k, v in actual[1].items()}
    assert_same(low, expected, rtol=1e-3, atol=1e-4)


def test_c69_the_deterministic_switch_is_honoured(backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2, dtype=torch.float32)
    expected = run(graph_attention, tensors, SHUFFLED.graph(), backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        actual = run(graph_attention, tensors, SHUFFLED.graph(), backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(actual, expected, rtol=0, atol=0)


def test_c63_every_floating_dtype_and_head_size_has_a_path():
    graph = Graph(torch.tensor([[0, 1, 2], [1, 1, 0]]), 3)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for head_dim in (1, 3, 5, 257):
            x = torch.ones(3, 2, head_dim, dtype=dtype)
            out = graph_attention(x, x, x, graph)
            assert out.dtype == dtype
            assert torch.equal(out, x * torch.tensor([1.0, 1.0, 0.0]).to(dtype).view(3, 1, 1))


def test_c65_many_small_graphs_in_one_batch(backend):
    count, size = 65_537, 4
    one = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    edges = (one[:, None] + size * torch.arange(count)[None, :, None]).flatten(1)
    query, key, value = torch.randn(3, size, 1, 2)
    alone = graph_attention(query, key, value, one, backend=backend)
    together = graph_attention(
        *(x.repeat(count, 1, 1) for x in (query, key, value)), edges, backend=backend
    )
    assert torch.equal(together, alone.repeat(count, 1, 1))
