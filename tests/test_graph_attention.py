"""graphattn.graph_attention: every backend against its definition, the contract, known traps."""

import gc
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphattn import Graph, attention_weights, backends, dense_attention, graph_attention
from graphattn.dropout import draw_seed, keep_mask
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

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ZOO = {case.name: case for case in zoo()}
SMALL = {case.name: case for case in zoo(hub=50)}
SHUFFLED, PARALLEL = ZOO["shuffled"], ZOO["parallel edges"]
ISOLATED = ZOO["one edge, isolated nodes"]  # 0 -> 1 of 4 nodes


def tensors_for(
    case,
    *,
    heads=2,
    key_heads=None,
    dim=4,
    value_dim=None,
    edge_dim=None,
    leading=(),
    bias=True,
    bias_leading=False,
    dtype=torch.float64,
):
    """Arguments of the operator by name, all of them leaves that ask for a gradient."""
    key_heads = heads if key_heads is None else key_heads
    num_edges = case.edge_index.size(1)
    shapes = {
        "query": (*leading, case.num_dst, heads, dim),
        "key": (*leading, case.num_src, key_heads, dim),
        "value": (*leading, case.num_src, key_heads, dim if value_dim is None else value_dim),
    }
    if bias:
        shapes["bias"] = (*(leading if bias_leading else ()), num_edges, heads)
    if edge_dim is not None:
        shapes["edge_attr"] = (num_edges, edge_dim)
        shapes["edge_weight"] = (heads, dim, edge_dim)
    return {
        name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()
    }


def run(function, tensors, graph, cotangent=None, **options):
    """Output, and gradients of all tensors by name."""
    out = function(graph=graph, **tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    if cotangent is None:
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, list(tensors.values()), cotangent.to(out.dtype))
    return out.detach(), dict(zip(tensors, grads, strict=True))


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(actual[0], expected[0], **tolerance, msg=lambda m: f"output: {m}")
    for name, grad in expected[1].items():
        torch.testing.assert_close(
            actual[1][name], grad, **tolerance, msg=lambda m, name=name: f"grad of {name}: {m}"
        )


def assert_right(case, backend, tensors, **options):
    graph = case.graph()
    actual = run(graph_attention, tensors, graph, backend=backend, **options)
    expected = run(edge_reference, tensors, graph, **options)
    assert actual[0].isfinite().all()
    assert_same(actual, expected, **EXACT)


# Against the definition ###########################################################################

SHAPES = {
    "heads 1, dim 1": {"heads": 1, "dim": 1, "edge_dim": 1},
    "dim 5, value 3": {"heads": 3, "dim": 5, "value_dim": 3},
    "dim 5, edge features": {"heads": 3, "dim": 5, "edge_dim": 2},
    "dim 20, grouped": {"heads": 4, "key_heads": 2, "dim": 20, "edge_dim": 3},
    "dim 4, one key head, value 7": {"heads": 4, "key_heads": 1, "dim": 4, "value_dim": 7},
    "dim 64": {"heads": 2, "dim": 64},
    "dim 128": {"heads": 1, "dim": 128, "edge_dim": 2},
    "dim 256": {"heads": 1, "dim": 256, "value_dim": 1},
    "no bias": {"bias": False},
    "leading 2": {"leading": (2,), "edge_dim": 3},
    "leading 2 x 3, grouped": {"leading": (2, 3), "heads": 4, "key_heads": 2, "value_dim": 3},
    "leading 2 x 1, bias too": {"leading": (2, 1), "bias_leading": True},
    "leading 0": {"leading": (0,), "edge_dim": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SMALL)
def test_zoo_equals_its_definition(name, shape, backend):
    assert_right(SMALL[name], backend, tensors_for(SMALL[name], **SHAPES[shape]))


@pytest.mark.parametrize("name", ["in-star", "out-star"])
def test_star_of_2000_equals_its_definition(name, backend):
    assert_right(ZOO[name], backend, tensors_for(ZOO[name], heads=2, dim=3, edge_dim=2))


@pytest.mark.parametrize("name", ["in-star", "out-star"])
def test_star_of_20000_equals_eager_in_float64(name, backend):
    case = next(case for case in zoo(hub=20_000) if case.name == name)
    tensors = tensors_for(case, heads=2, dim=16, edge_dim=2)
    expected = run(graph_attention, tensors, case.graph(), backend="eager")
    actual = run(graph_attention, tensors, case.graph(), backend=backend)
    assert_same(actual, expected, **EXACT)
    single = {k: v.detach().float().requires_grad_() for k, v in tensors.items()}
    low = run(graph_attention, single, case.graph(), backend=backend)
    assert_same(
        (low[0].double(), {k: v.double() for k, v in low[1].items()}),
        expected,
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("name", SMALL)
def test_zoo_equals_dense_attention(name, backend):
    case = SMALL[name]
    tensors = tensors_for(case)
    actual = run(graph_attention, tensors, case.graph(), backend=backend)

    def dense(query, key, value, bias, graph):
        return dense_attention(query, key, value, graph, bias=bias)

    assert_same(actual, run(dense, tensors, case.graph()), **EXACT)


def turned(x):
    """The same values in memory of another order."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def spaced(x):
    return torch.stack([x, x.detach()], dim=-1)[..., 0]


@pytest.mark.parametrize("layout", [turned, spaced])
@pytest.mark.parametrize("name", ["shuffled", "more targets than sources", "no edges"])
def test_non_contiguous_inputs(name, layout, backend):
    case = SMALL[name]
    tensors = tensors_for(case, heads=4, key_heads=2, dim=5, edge_dim=2)

    def attend(graph, **given):
        given = {k: layout(v) for k, v in given.items()}
        assert name == "no edges" or not any(v.is_contiguous() for v in given.values())
        return graph_attention(graph=graph, **given, backend=backend)

    assert_same(
        run(attend, tensors, case.graph()), run(edge_reference, tensors, case.graph()), **EXACT
    )


@pytest.mark.parametrize("name", ["shuffled", "more sources than targets"])
def test_expanded_inputs_and_an_expanded_gradient(name, backend):
    case = SMALL[name]
    num_edges = case.edge_index.size(1)
    base = {
        "query": torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True),
        "key": torch.randn(case.num_src, 1, 4, dtype=torch.float64, requires_grad=True),
        "value": torch.randn(case.num_src, 3, 1, dtype=torch.float64, requires_grad=True),
        "bias": torch.randn(1, 3, dtype=torch.float64, requires_grad=True),
        "edge_attr": torch.randn(1, 2, dtype=torch.float64, requires_grad=True),
        "edge_weight": torch.randn(1, 1, 2, dtype=torch.float64, requires_grad=True),
    }

    def expand(function, **options):
        def attend(graph, query, key, value, bias, edge_attr, edge_weight):
            return function(
                query.expand(case.num_dst, 3, 4),
                key.expand(case.num_src, 3, 4),
                value.expand(case.num_src, 3, 4),
                graph,
                bias=bias.expand(num_edges, 3),
                edge_attr=edge_attr.expand(num_edges, 2),
                edge_weight=edge_weight.expand(3, 4, 2),
                **options,
            )

        return attend

    ones = torch.ones((), dtype=torch.float64).expand(case.num_dst, 3, 4)
    for cotangent in (None, ones):
        assert_same(
            run(expand(graph_attention, backend=backend), base, case.graph(), cotangent),
            run(expand(edge_reference), base, case.graph(), cotangent),
            **EXACT,
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plain_edge_index_of_either_width(dtype, backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    actual = run(graph_attention, tensors, SHUFFLED.edge_index.to(dtype), backend=backend)
    assert_same(actual, run(edge_reference, tensors, SHUFFLED.graph()), **EXACT)


@pytest.mark.parametrize("scale", [0.0, 0.3, -1.0])
def test_scale(scale, backend):
    assert_right(SHUFFLED, backend, tensors_for(SHUFFLED, edge_dim=2), scale=scale)


def test_scale_zero_is_zero_and_not_the_default(backend):
    tensors = tensors_for(SHUFFLED, bias=False)
    out = graph_attention(**tensors, graph=SHUFFLED.graph(), scale=0.0, backend=backend)
    src, dst = SHUFFLED.edge_index
    degree = torch.bincount(dst, minlength=30).clamp(min=1)
    total = torch.zeros_like(out).index_add(0, dst, tensors["value"][src])
    torch.testing.assert_close(out, total / degree[:, None, None], **EXACT)


def test_many_more_edges_than_one_slice_holds(backend):
    edge_index = torch.randint(300, (2, 5000))
    case = GraphCase("random", edge_index, 300, 300)
    assert_right(case, backend, tensors_for(case, heads=4, dim=64, edge_dim=2))


@st.composite
def any_call(draw):
    num_src, num_dst = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    edge = st.tuples(st.integers(0, max(num_src - 1, 0)), st.integers(0, max(num_dst - 1, 0)))
    edges = draw(st.lists(edge, max_size=12)) if num_src and num_dst else []
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    key_heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    edge_dim = draw(st.none() | st.integers(1, 3))
    shape = {
        "heads": key_heads * draw(st.integers(1, 3)),
        "key_heads": key_heads,
        "dim": dim,
        "value_dim": draw(st.integers(1, 6)) if edge_dim is None else None,
        "edge_dim": edge_dim,
        "leading": tuple(draw(st.lists(st.integers(0, 3), max_size=2))),
        "bias": draw(st.booleans()),
        "bias_leading": draw(st.booleans()),
    }
    return GraphCase("any", edge_index, num_src, num_dst), shape


@pytest.mark.parametrize("name", backends.NAMES)
def test_any_graph_and_shape_equals_its_definition(name):
    if backends.missing(name) is not None:
        pytest.skip(backends.missing(name))

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(any_call())
    def check(call):
        case, shape = call
        assert_right(case, name, tensors_for(case, **shape))

    check()


# Low precision ####################################################################################

LOW = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", [*(n for n in SMALL if "star" not in n), "in-star", "out-star"])
def test_low_precision_errs_no_more_than_plain_pytorch(name, dtype, backend):
    case, dtype = ZOO[name], LOW[dtype]
    graph = case.graph()
    tensors = tensors_for(case, heads=2, dim=32, bias=False, dtype=dtype)
    exact = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    out, grads = run(graph_attention, tensors, graph, backend=backend)
    plain, plain_grads = run(plain_attention, tensors, graph)
    reference, reference_grads = run(graph_attention, exact, graph, backend="eager")
    assert out.dtype == dtype
    in_degree = max([1, *graph.in_degree().tolist(), *graph.out_degree().tolist()])
    assert_close_to_reference(out, plain, reference, in_degree=in_degree)
    for which, grad in grads.items():
        assert grad.dtype == dtype
        assert_close_to_reference(
            grad, plain_grads[which], reference_grads[which], factor=3, in_degree=in_degree
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_softmax_and_sums_are_taken_in_float32(dtype, backend):
    # 4,096 equal terms of 1: a sum in half precision stops at 256 or 2,048.
    n = 4096
    graph = Graph(torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)]), (n, 1))
    query, key = torch.zeros(1, 1, 2, dtype=dtype), torch.zeros(n, 1, 2, dtype=dtype)
    value = torch.full((n, 1, 1), 3.0, dtype=dtype)
    assert graph_attention(query, key, value, graph, backend=backend).item() == 3.0
    # A dot product whose terms overflow float16 on their own.
    query = torch.full((1, 1, 2), 300.0, dtype=dtype)
    key = torch.tensor([[300.0, -300.0], [0.0, 0.0]], dtype=dtype).view(2, 1, 2)
    value = torch.tensor([1.0, 3.0], dtype=dtype).view(2, 1, 1)
    graph = Graph(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    assert graph_attention(query, key, value, graph, backend=backend).item() == 2.0


def test_c07_autocast_needs_no_casts_by_the_user(backend):
    case = SHUFFLED
    tensors = tensors_for(case, heads=2, dim=8, edge_dim=3, dtype=torch.float32)
    expected = run(graph_attention, tensors, case.graph(), backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = graph_attention(**tensors, graph=case.graph(), backend=backend)
        weights = attention_weights(
            tensors["query"], tensors["key"].bfloat16(), case.graph(), backend=backend
        )
    assert out.dtype == weights.dtype == torch.bfloat16
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, list(tensors.values()), cotangent.bfloat16())
    assert all(grad.dtype == torch.float32 for grad in grads)
    low = out.detach().float(), dict(zip(tensors, grads, strict=True))
    assert_same(low, expected, rtol=0.05, atol=0.1)


def test_c07_autocast_with_a_linear_map_before_and_after(backend):
    project, back = torch.nn.Linear(6, 3 * 2 * 4), torch.nn.Linear(8, 5)
    x = torch.randn(30, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        query, key, value = project(x).view(30, 3, 2, 4).unbind(1)
        out = back(graph_attention(query, key, value, SHUFFLED.graph(), backend=backend).flatten(1))
        loss = out.float().pow(2).mean()
    loss.backward()
    for parameter in (*project.parameters(), *back.parameters(), x):
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_c07_float64_stays_float64_under_autocast(backend):
    tensors = tensors_for(SHUFFLED)
    with torch.autocast("cpu", torch.bfloat16):
        out = graph_attention(**tensors, graph=SHUFFLED.graph(), backend=backend)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_pure_half_precision(dtype, backend):
    tensors = tensors_for(SHUFFLED, heads=2, dim=8, edge_dim=3, dtype=dtype)
    out, grads = run(graph_attention, tensors, SHUFFLED.graph(), backend=backend)
    assert out.dtype == dtype
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads.values())


# The contract, point by point #####################################################################


def test_contract_1_row_0_is_the_source_and_row_1_the_target(backend):
    # Not symmetric, so that the wrong way round shows: three leaves point at a centre.
    edge_index = torch.tensor([[1, 2, 3], [0, 0, 0]])
    query, key, value = torch.randn(3, 4, 2, 5).unbind(0)
    weights = attention_weights(query, key, edge_index, backend=backend)
    torch.testing.assert_close(weights.sum(0), torch.ones(2))
    expected = torch.softmax((query[:1] * key[1:]).sum(-1) / math.sqrt(5), dim=0)
    torch.testing.assert_close(weights, expected)
    out = graph_attention(query, key, value, edge_index, backend=backend)
    torch.testing.assert_close(out[0], (expected.unsqueeze(-1) * value[1:]).sum(0))
    assert out[1:].eq(0).all()


@pytest.mark.parametrize("name", ["no nodes", "no edges", "no sources", "no targets"])
@pytest.mark.parametrize("edge_dim", [None, 2])
def test_contract_2_no_edges_no_nodes(name, edge_dim, backend):
    case = ZOO[name]
    tensors = tensors_for(case, heads=3, dim=2, edge_dim=edge_dim, dtype=torch.float32)
    out, grads = run(graph_attention, tensors, case.graph(), backend=backend, dropout=0.5)
    assert out.shape == (case.num_dst, 3, 2)
    assert out.dtype == torch.float32
    assert out.eq(0).all()
    for which, grad in grads.items():
        assert grad.shape == tensors[which].shape
        assert grad.eq(0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_contract_2_target_without_edges_is_zero_and_sends_no_gradient(poison, backend):
    """Even where a NaN stands in its query, or arrives as its gradient."""
    case = ISOLATED
    tensors = tensors_for(case, edge_dim=2)
    with torch.no_grad():
        for which in ("query", "key", "value"):
            tensors[which][2] = poison
    cotangent = torch.ones(4, 2, 4)
    cotangent[[0, 2, 3]] = poison
    out, grads = run(graph_attention, tensors, case.graph(), cotangent, backend=backend)
    assert out[[0, 2, 3]].eq(0).all()
    assert grads["query"][[0, 2, 3]].eq(0).all()
    assert all(grad.isfinite().all() for grad in grads.values())
    alone = {
        k: v.detach()[:2].requires_grad_() if k in ("query", "key", "value") else v
        for k, v in tensors.items()
    }
    pair = Graph(case.edge_index, 2)
    expected = run(graph_attention, alone, pair, torch.ones(2, 2, 4), backend="eager")
    torch.testing.assert_close(out[1], expected[0][1])
    torch.testing.assert_close(grads["edge_weight"], expected[1]["edge_weight"])


def test_contract_2_edges_that_are_all_minus_infinity(backend):
    tensors = tensors_for(PARALLEL)
    _, dst = PARALLEL.edge_index
    with torch.no_grad():
        tensors["bias"][dst == 1] = -math.inf
    actual = run(graph_attention, tensors, PARALLEL.graph(), backend=backend)
    assert actual[0][1].eq(0).all()
    assert_same(actual, run(edge_reference, tensors, PARALLEL.graph()), **EXACT)
    assert all(grad.isfinite().all() for grad in actual[1].values())


def test_contract_3_edge_tensors_are_in_the_callers_order(backend):
    case = SHUFFLED
    tensors = tensors_for(case, edge_dim=2)
    order = torch.randperm(case.edge_index.size(1))
    moved = {
        k: v.detach()[order].requires_grad_() if k in ("bias", "edge_attr") else v
        for k, v in tensors.items()
    }
    again = Graph(case.edge_index[:, order], 30)
    first = run(graph_attention, tensors, case.graph(), backend=backend)
    second = run(graph_attention, moved, again, backend=backend)
    for which in ("bias", "edge_attr"):
        first[1][which] = first[1][which][order]
    assert_same(second, first, **EXACT)
    given = {k: v for k, v in tensors.items() if k != "value"}
    weights = attention_weights(**given, graph=case.graph(), backend=backend)
    given = {k: v for k, v in moved.items() if k != "value"}
    torch.testing.assert_close(
        attention_weights(**given, graph=again, backend=backend), weights[order], **EXACT
    )


def test_contract_4_parallel_edges_are_entries_of_their_own(backend):
    edge_index = torch.tensor([[0, 0, 2], [1, 1, 1]])
    query, key, value = torch.randn(3, 3, 1, 4, dtype=torch.float64).unbind(0)
    out = graph_attention(query, key, value, edge_index, backend=backend)
    s0, s2 = (float(query[1, 0] @ key[j, 0]) / 2.0 for j in (0, 2))
    doubled = 2 * math.exp(s0) / (2 * math.exp(s0) + math.exp(s2))
    torch.testing.assert_close(out[1, 0], doubled * value[0, 0] + (1 - doubled) * value[2, 0])
    assert out[[0, 2]].eq(0).all()  # no self-loop was added


def test_contract_5_sources_and_targets_differ_in_number(backend):
    for name in ("more targets than sources", "more sources than targets"):
        case = ZOO[name]
        assert_right(case, backend, tensors_for(case, edge_dim=2))
    # counts come from the features, not from the largest index
    query, key, value = torch.randn(7, 1, 2), torch.randn(9, 1, 2), torch.randn(9, 1, 2)
    edge_index = torch.tensor([[0], [0]])
    assert graph_attention(query, key, value, edge_index, backend=backend).shape == (7, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_contract_6_output_and_gradients_have_the_callers_dtype(dtype, backend):
    tensors = tensors_for(SHUFFLED, dtype=dtype)
    tensors["bias"] = tensors["bias"].detach().float().requires_grad_()  # may differ
    out, grads = run(graph_attention, tensors, SHUFFLED.graph(), backend=backend)
    assert out.dtype == dtype
    assert {k: g.dtype for k, g in grads.items()} == {k: t.dtype for k, t in tensors.items()}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_contract_7_nan_in_a_non_neighbour_never_spreads(poison, backend):
    # Two parts: 0 -> 1 -> 2 -> 0 and 3 -> 4, 4 -> 3; the second is poisoned everywhere.
    edge_index = torch.tensor([[4, 0, 3, 1, 2], [3, 1, 4, 2, 0]])
    case = GraphCase("two parts", edge_index, 5, 5)
    tensors = tensors_for(case)
    clean = run(graph_attention, tensors, case.graph(), backend=backend)
    with torch.no_grad():
        for which in ("query", "key", "value"):
            tensors[which][3:] = poison
        tensors["bias"][[0, 2]] = poison
    cotangent = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 2, 4)
    cotangent[3:] = poison
    out, grads = run(graph_attention, tensors, case.graph(), cotangent, backend=backend)
    assert torch.equal(out[:3], clean[0][:3])
    for which in ("query", "key", "value"):
        assert torch.equal(grads[which][:3], clean[1][which][:3]), which
    assert torch.equal(grads["bias"][[1, 3, 4]], clean[1]["bias"][[1, 3, 4]])


@pytest.mark.parametrize("which", ["key", "value"])
def test_contract_7_nan_in_a_neighbour_spreads(which, backend):
    edge_index = torch.tensor([[0, 1, 1], [2, 2, 0]])
    case = GraphCase("three", edge_index, 3, 3)
    tensors = tensors_for(case, dim=2)
    with torch.no_grad():
        tensors[which][0, 1, 0] = math.nan  # node 0, head 1
    out, grads = run(graph_attention, tensors, case.graph(), backend=backend)
    assert out[2, 1].isnan().any()
    assert out[2, 0].isfinite().all()  # the other head
    assert out[:2].isfinite().all()  # the other targets
    assert grads["query"][2, 1].isnan().any()
    assert grads["query"][2, 0].isfinite().all()
    assert grads["query"][:2].isfinite().all()


def test_contract_7_a_batch_equals_its_parts(backend):
    def attend(*given):
        return graph_attention(*given, backend=backend)

    cases = [case for case in SMALL.values() if "star" not in case.name]
    assert_batch_equals_parts(attend, cases)
    assert_batch_equals_parts(attend, cases, heads=1, dim=64)


@pytest.mark.parametrize("name", ["shuffled", "power law", "in-star", "out-star"])
def test_contract_8_bitwise_repeatable_for_any_number_of_threads(name, backend):
    case = ZOO[name]
    tensors = tensors_for(case, heads=2, dim=16, edge_dim=2, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(7)
            results.append(
                run(graph_attention, tensors, case.graph(), backend=backend, dropout=0.2)
            )
    finally:
        torch.set_num_threads(before)
    for out, grads in results[1:]:
        assert torch.equal(out, results[0][0])
        for which, grad in grads.items():
            assert torch.equal(grad, results[0][1][which]), which


@pytest.mark.parametrize("shape", ["dim 20, grouped", "leading 2 x 3, grouped"])
def test_contract_9_dropout_takes_the_mask_of_seed_edge_and_head(shape, backend):
    case = SHUFFLED
    tensors = tensors_for(case, **SHAPES[shape])
    leading, heads = tensors["query"].shape[:-3], tensors["query"].size(-2)
    torch.manual_seed(3)
    actual = run(graph_attention, tensors, case.graph(), backend=backend, dropout=0.3)
    torch.manual_seed(3)
    keep = keep_mask(draw_seed(), torch.arange(200), heads, 0.3, batch=leading.numel())
    keep = keep.movedim(1, 0).reshape(*leading, 200, heads)
    assert 0.6 < keep.double().mean() < 0.8
    if leading:  # batch rows draw masks of their own
        assert not torch.equal(keep[0, 0], keep[1, 0])
    expected = run(edge_reference, tensors, case.graph(), keep=keep, dropout=0.3)
    assert_same(actual, expected, **EXACT)


def test_contract_9_dropout_is_seeded_unbiased_and_the_same_for_every_backend(backend):
    case = SHUFFLED
    graph = case.graph()
    tensors = {k: v.detach() for k, v in tensors_for(case, heads=5, dim=3).items()}

    def draw(seed, name=backend):
        torch.manual_seed(seed)
        return graph_attention(**tensors, graph=graph, dropout=0.4, backend=name)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.testing.assert_close(draw(1), draw(1, "eager"), **EXACT)
    mean = sum(draw(seed) for seed in range(200)) / 200
    expected = graph_attention(**tensors, graph=graph, backend=backend)
    assert (mean - expected).abs().mean() < 0.05


def test_contract_9_dropout_0_draws_nothing_and_1_drops_everything(backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    state = torch.get_rng_state()
    graph_attention(**tensors, graph=SHUFFLED.graph(), dropout=0.0, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)
    out, grads = run(graph_attention, tensors, SHUFFLED.graph(), dropout=1.0, backend=backend)
    assert out.eq(0).all()
    assert all(grad.eq(0).all() for grad in grads.values())


def test_contract_10_only_auto_may_choose(backend, monkeypatch):
    tensors = tensors_for(PARALLEL)
    auto = graph_attention(**tensors, graph=PARALLEL.graph())
    assert torch.equal(auto, graph_attention(**tensors, graph=PARALLEL.graph(), backend="eager"))
    with pytest.raises(
        ValueError,
        match=r"graph_attention: unknown backend 'fast'\. Use one of 'auto', 'eager', 'scatter'",
    ):
        graph_attention(**tensors, graph=PARALLEL.graph(), backend="fast")
    monkeypatch.setattr(backends, "unsupported", lambda *_: ["it is Monday", "it rains"])
    with pytest.raises(
        ValueError,
        match=rf"graph_attention: backend='{backend}' cannot run this call: it is Monday; it "
        r"rains\. Use backend='eager' or 'auto'\.",
    ):
        graph_attention(**tensors, graph=PARALLEL.graph(), backend=backend)


def test_contract_11_indices_are_checked_once_per_graph_and_never_per_call(backend, monkeypatch):
    checks = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: checks.append(1) or aminmax(x))
    edge_index = SHUFFLED.edge_index.clone()
    tensors = tensors_for(SHUFFLED)
    for _ in range(3):
        run(graph_attention, tensors, edge_index, backend=backend)
    assert len(checks) == 2  # one for each row


# Laws #############################################################################################


@pytest.mark.parametrize("name", SMALL)
def test_order_of_edges_and_of_nodes_is_free(name, backend):
    def attend(*given):
        return graph_attention(*given, backend=backend)

    assert_edge_order_is_free(attend, SMALL[name])
    assert_node_order_is_free(attend, SMALL[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_complete_graph_is_scaled_dot_product_attention(dtype, backend):
    case = ZOO["complete"]
    tensors = tensors_for(case, heads=4, dim=8, bias=False, dtype=dtype)

    def dense(query, key, value, graph):
        by_head = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*by_head).transpose(0, 1)

    tolerance = EXACT if dtype == torch.float64 else {}
    actual = run(graph_attention, tensors, case.graph(), backend=backend)
    assert_same(actual, run(dense, tensors, case.graph()), **tolerance)


def test_a_causal_graph_is_causal_attention(backend):
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    case = GraphCase("causal", Graph.from_mask(mask).edge_index, 9, 9)
    tensors = tensors_for(case, heads=2, dim=8, bias=False)

    def dense(query, key, value, graph):
        by_head = (x.transpose(0, 1) for x in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*by_head, is_causal=True).transpose(0, 1)

    actual = run(graph_attention, tensors, case.graph(), backend=backend)
    assert_same(actual, run(dense, tensors, case.graph()), **EXACT)


def test_equal_scores_give_the_mean(backend):
    case = ZOO["in-star"]
    query, key = torch.ones(2001, 1, 4), torch.ones(2001, 1, 4)
    value = torch.randn(2001, 1, 4)
    out = graph_attention(query, key, value, case.graph(), backend=backend)
    torch.testing.assert_close(out[0], value[1:].mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("constant", [1e5, -1e5, 1e3])
def test_a_constant_added_to_a_targets_scores_changes_nothing(constant, backend):
    case = SHUFFLED
    tensors = {
        k: v.detach() for k, v in tensors_for(case, heads=2, dim=4, dtype=torch.float32).items()
    }
    # Scores that float32 can hold beside 1e5, so that only the softmax can lose them.
    tensors["query"].zero_()
    tensors["bias"].mul_(8).round_().div_(8)
    shift = constant * torch.randint(-1, 2, (30, 2)).float()
    bias = tensors["bias"] + shift[case.edge_index[1]]
    out = graph_attention(**tensors, graph=case.graph(), backend=backend)
    shifted = graph_attention(**{**tensors, "bias": bias}, graph=case.graph(), backend=backend)
    torch.testing.assert_close(shifted, out)


# Derivatives ######################################################################################

DERIVATIVES = {
    "all six, grouped, parallel and isolated": {
        "heads": 2,
        "key_heads": 1,
        "dim": 2,
        "edge_dim": 2,
    },
    "value_dim 3": {"heads": 2, "dim": 2, "value_dim": 3},
    "leading 2": {"heads": 1, "dim": 2, "edge_dim": 1, "leading": (2,), "bias_leading": True},
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("shape", DERIVATIVES)
def test_c59_c60_gradcheck_and_gradgradcheck_of_every_input(shape, dropout, backend):
    case = PARALLEL if "leading" not in shape else SMALL["empty groups between"]
    tensors = tensors_for(case, **DERIVATIVES[shape])
    graph = case.graph()

    def attend(*given):
        torch.manual_seed(5)
        arguments = dict(zip(tensors, given, strict=True))
        return graph_attention(**arguments, graph=graph, dropout=dropout, backend=backend)

    values = tuple(tensors.values())
    assert gradcheck(attend, values)
    assert gradgradcheck(attend, values)


def test_c59_gradgradcheck_of_weights(backend):
    tensors = tensors_for(PARALLEL, heads=2, dim=2, edge_dim=2)
    del tensors["value"]

    def attend(*given):
        arguments = dict(zip(tensors, given, strict=True))
        return attention_weights(**arguments, graph=PARALLEL.graph(), backend=backend)

    assert gradcheck(attend, tuple(tensors.values()))
    assert gradgradcheck(attend, tuple(tensors.values()))


@pytest.mark.parametrize("name", ["no edges", "no nodes", "one edge, isolated nodes"])
def test_c59_second_derivative_exists_on_empty_graphs(name, backend):
    tensors = tensors_for(ZOO[name], edge_dim=2)
    out = graph_attention(**tensors, graph=ZOO[name].graph(), backend=backend)
    first = torch.autograd.grad(
        out.pow(2).sum(), list(tensors.values()), create_graph=True, materialize_grads=True
    )
    second = torch.autograd.grad(
        sum(g.pow(2).sum() for g in first), list(tensors.values()), materialize_grads=True
    )
    assert all(g.isfinite().all() for g in second)


def test_c59_gradient_penalty_equals_that_of_the_reference(backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    penalties = []
    for function in (lambda **k: graph_attention(**k, backend=backend), edge_reference):
        out = function(**tensors, graph=SHUFFLED.graph())
        out = out[0] if isinstance(out, tuple) else out
        values = list(tensors.values())
        first = torch.autograd.grad(out.sin().sum(), values, create_graph=True)
        penalty = sum(g.pow(2).sum() for g in first)
        penalties.append((penalty.detach(), torch.autograd.grad(penalty, values)))
    torch.testing.assert_close(penalties[0], penalties[1], rtol=1e-8, atol=1e-8)


def test_c59_third_derivative(backend):
    query = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    graph = PARALLEL.graph()

    def slope(query):
        out = graph_attention(query, query, query, graph, backend=backend).pow(2).sum()
        return torch.autograd.grad(out, query, create_graph=True)[0]

    assert gradgradcheck(slope, (query,))


def test_c60_bias_and_edge_features_alone_can_ask_for_a_gradient(backend):
    for wanted in ("query", "key", "value", "bias", "edge_attr", "edge_weight"):
        tensors = {
            k: v.detach().requires_grad_(k == wanted)
            for k, v in tensors_for(SHUFFLED, edge_dim=2).items()
        }
        graph = SHUFFLED.graph()
        out = graph_attention(**tensors, graph=graph, backend=backend).sin().sum()
        expected = edge_reference(**tensors, graph=graph)[0].sin().sum()
        torch.testing.assert_close(
            torch.autograd.grad(out, tensors[wanted]),
            torch.autograd.grad(expected, tensors[wanted]),
            **EXACT,
        )


def test_c48_backward_twice_with_retain_graph(backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    out = graph_attention(**tensors, graph=SHUFFLED.graph(), dropout=0.2, backend=backend).sum()
    first = torch.autograd.grad(out, list(tensors.values()), retain_graph=True)
    second = torch.autograd.grad(out, list(tensors.values()), retain_graph=True)
    third = torch.autograd.grad(out, list(tensors.values()))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, list(tensors.values()))


def test_autograd_functional(backend):
    query = torch.randn(3, 1, 2, dtype=torch.float64)
    graph = PARALLEL.graph()

    def sparse(x):
        return graph_attention(x, x, x, graph, backend=backend).pow(3).sum()

    def reference(x):
        return edge_reference(x, x, x, graph)[0].pow(3).sum()

    for derivative in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
        torch.testing.assert_close(derivative(sparse, query), derivative(reference, query))


def test_func_grad_is_right_or_refused(backend):
    query = torch.randn(3, 1, 2, dtype=torch.float64)
    graph = PARALLEL.graph()

    def loss(x, backend):
        return graph_attention(x, x, x, graph, backend=backend).pow(3).sum()

    leaf = query.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf, "eager"), leaf)[0]
    if backend == "scatter":
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(loss)(query, backend)
    else:
        torch.testing.assert_close(torch.func.grad(loss)(query, backend), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_replays_the_dropout_mask(use_reentrant, backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    graph = SHUFFLED.graph()

    def attend(*given):
        arguments = dict(zip(tensors, given, strict=True))
        return graph_attention(**arguments, graph=graph, dropout=0.5, backend=backend)

    results = []
    for wrapped in (False, True):
        torch.manual_seed(11)
        values = list(tensors.values())
        out = (
            checkpoint(attend, *values, use_reentrant=use_reentrant) if wrapped else attend(*values)
        )
        torch.rand(3)  # the generator moves on before backward
        for value in values:
            value.grad = None
        out.sin().sum().backward()
        results.append((out.detach(), [value.grad.clone() for value in values]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_inference_mode_and_no_grad(backend):
    tensors = tensors_for(SHUFFLED, edge_dim=2)
    expected = graph_attention(**tensors, graph=SHUFFLED.graph(), backend=backend)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = graph_attention(**tensors, graph=SHUFFLED.graph(), backend=backend)
        assert not out.requires_grad
        assert torch.equal(out, expected)


# Memory ###########################################################################################


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that owns new memory."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, held)
        return result


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_c66_c67_no_tensor_of_edges_times_channels_and_none_of_nodes_squared(edge_dim):
    num_nodes, num_edges, heads, dim = 4000, 200_000, 4, 32
    case = GraphCase("big", torch.randint(num_nodes, (2, num_edges)), num_nodes, num_nodes)
    tensors = tensors_for(case, heads=heads, dim=dim, edge_dim=edge_dim, dtype=torch.float32)
    graph = case.graph()
    _ = graph.src_ptr
    with Largest() as largest:
        run(graph_attention, tensors, graph, backend="eager", dropout=0.1)
    budget = 1 << 22  # a slice of gathered rows; [E, H, D] has six times as many
    per_edge = num_edges * max(heads, edge_dim or 0)
    assert largest.elements <= max(budget, per_edge, num_nodes * heads * dim)
    assert largest.elements < num_edges * heads * dim // 4
    assert largest.elements < num_nodes**2 // 3


def saved_elements(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        function()
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.element_size()
        for x in saved
    }


def test_c66_nothing_of_edges_times_channels_is_kept_for_backward():
    num_nodes, num_edges, heads, dim = 100, 20_000, 2, 32
    case = GraphCase("big", torch.randint(num_nodes, (2, num_edges)), num_nodes, num_nodes)
    tensors = tensors_for(case, heads=heads, dim=dim, edge_dim=3, dtype=torch.float32)
    kept = saved_elements(
        lambda: graph_attention(**tensors, graph=case.graph(), dropout=0.1, backend="eager")
    )
    assert max(kept.values()) <= num_edges * 3


def test_c67_a_sparse_graph_of_100_000_nodes_costs_its_edges(backend):
    num_nodes = 100_000
    edge_index = torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)])
    x = torch.randn(num_nodes, 1, 2)
    with Largest() as largest:
        out = graph_attention(x, x, x, edge_index, backend=backend)
    torch.testing.assert_close(out[1:], x[:-1])
    assert largest.elements <= 1 << 21
    with pytest.raises(MemoryError):
        dense_attention(x, x, x, Graph(edge_index, num_nodes), max_bytes=2**33)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read memory from")
def test_c48_memory_is_flat_over_200_training_steps(backend):
    edge_index = torch.randint(2000, (2, 2000))  # a plain tensor: its graph is remembered
    case = GraphCase("random", edge_index, 2000, 2000)
    tensors = tensors_for(case, heads=2, dim=32, dtype=torch.float32)
    optimizer = torch.optim.SGD(tensors.values(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        out = graph_attention(**tensors, graph=edge_index, dropout=0.1, backend=backend)
        out.pow(2).mean().backward(retain_graph=True)
        out.pow(2).mean().backward()
        optimizer.step()

    def objects():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    for _ in range(20):
        step()
    gc.collect()
    tensors_before, bytes_before = objects(), resident_bytes()
    gc.disable()  # reference counts alone must free everything
    try:
        for _ in range(200):
            step()
        tensors_after, bytes_after = objects(), resident_bytes()
    finally:
        gc.enable()
    assert tensors_after <= tensors_before
    # one tensor of node features left behind by each step would be 100 MB
    assert bytes_after - bytes_before < 40e6


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


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory is filled with NaN, that of extensions too."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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


# Compilation ######################################################################################


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_c56_compiles_without_a_break_for_changing_sizes():
    traced = []

    def count(module, example_inputs):
        traced.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(graph_attention, fullgraph=True, dynamic=True, backend=count)
    for num_nodes, num_edges in ((3, 4), (5, 9), (7, 0), (20, 90), (21, 60)):
        graph = Graph(torch.randint(num_nodes, (2, num_edges)), num_nodes)
        x = torch.randn(num_nodes, 2, 4, requires_grad=True)
        bias = torch.randn(num_edges, 2)
        out = compiled(x, x, x, graph, bias=bias, backend="eager")
        expected = graph_attention(x, x, x, graph, bias=bias, backend="eager")
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x)
        )
    torch._dynamo.reset()
    assert len(traced) <= 4


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, x, edge_index):
            return graph_attention(x, x, x, edge_index, backend="eager")

    x, edge_index = torch.randn(4, 2, 3), torch.tensor([[3, 0, 1], [1, 0, 1]])
    exported = torch.export.export(Layer(), (x, edge_index)).module()
    other = torch.tensor([[2, 2, 1], [3, 0, 3]])
    for edges in (edge_index, other):
        torch.testing.assert_close(exported(x, edges), graph_attention(x, x, x, edges))


# Refusals #########################################################################################

X = torch.zeros(3, 2, 4)
EDGES = torch.tensor([[0, 1], [1, 2]])


def refusal(query=X, key=X, value=X, graph=EDGES, **options):
    return lambda: graph_attention(query, key, value, graph, **options)


REFUSALS = {
    "list": (refusal(query=[1.0]), TypeError, r"query must be a tensor, got list\."),
    "no value": (refusal(value=None), TypeError, r"value must be a tensor, got NoneType\."),
    "integers": (
        refusal(key=X.long()),
        TypeError,
        r"key must be floating point, got torch\.int64\. Use key\.float\(\), or embed categories",
    ),
    "integer features": (
        refusal(edge_attr=torch.zeros(2, 1).long(), edge_weight=torch.zeros(2, 4, 1)),
        TypeError,
        r"edge_attr must be floating point, got torch\.int64\.",
    ),
    "query of two dimensions": (
        refusal(query=torch.zeros(3, 4)),
        ValueError,
        (
            r"query must have shape \(\*, num_dst, heads, head_dim\), got \(3, 4\)\. Use "
            r"query\.unsqueeze\(1\) for one head\."
        ),
    ),
    "query of one dimension": (
        refusal(query=torch.zeros(3)),
        ValueError,
        r"query must have shape \(\*, num_dst, heads, head_dim\), got \(3,\)\.$",
    ),
    "no heads": (
        refusal(query=torch.zeros(3, 0, 4)),
        ValueError,
        r"query needs at least one head and one channel, got \(3, 0, 4\)\.",
    ),
    "no channels": (
        refusal(query=torch.zeros(3, 2, 0)),
        ValueError,
        r"query needs at least one head and one channel, got \(3, 2, 0\)\.",
    ),
    "dtypes": (
        refusal(key=X.double()),
        TypeError,
        (
            r"query, key and value must have one dtype, got torch\.float32 for query and "
            r"torch\.float64 for key\. Use key\.to\(query\.dtype\)\."
        ),
    ),
    "dtype of value": (refusal(value=X.half()), TypeError, r"torch\.float16 for value\. Use value"),
    "flat key": (
        refusal(key=torch.zeros(3, 8)),
        ValueError,
        (
            r"key must have shape \(num_src, heads, head_dim\) = \(3, 2, 4\), got \(3, 8\)\. Use "
            r"key\.view\(-1, 2, 4\)\."
        ),
    ),
    "flat value": (refusal(value=torch.zeros(3, 8)), ValueError, r"Use value\.view\(-1, 2, 4\)\."),
    "leading dimensions": (
        refusal(key=torch.zeros(5, 3, 2, 4)),
        ValueError,
        (
            r"key must have shape \(\*, num_src, heads, dim\) with the query's leading dimensions "
            r"\(\), got \(5, 3, 2, 4\) for a query of \(3, 2, 4\)\."
        ),
    ),
    "other leading dimensions": (
        refusal(query=X.expand(2, 3, 2, 4), key=X.expand(5, 3, 2, 4)),
        ValueError,
        r"leading dimensions \(2,\), got \(5, 3, 2, 4\)",
    ),
    "head_dim": (
        refusal(key=torch.zeros(3, 2, 5)),
        ValueError,
        r"key must have the query's head_dim 4, got shape \(3, 2, 5\)\.",
    ),
    "key heads": (
        refusal(query=torch.zeros(3, 4, 4), key=torch.zeros(3, 3, 4)),
        ValueError,
        r"the number of key heads must divide the 4 query heads, got 3\.",
    ),
    "no key heads": (
        refusal(key=torch.zeros(3, 0, 4)),
        ValueError,
        r"the number of key heads must divide the 2 query heads, got 0\.",
    ),
    "rows of value": (
        refusal(value=torch.zeros(4, 2, 4)),
        ValueError,
        r"value must have the sources and heads of key \(3, 2\), got \(4, 2\)\.",
    ),
    "heads of value": (
        refusal(value=torch.zeros(3, 1, 4)),
        ValueError,
        r"value must have the sources and heads of key \(3, 2\), got \(3, 1\)\.",
    ),
    "graph of another size": (
        refusal(graph=Graph(EDGES, (4, 3))),
        ValueError,
        r"the graph has 4 sources and 3 targets, but key has 3 rows and query 3\.",
    ),
    "no graph": (refusal(graph=[[0], [1]]), TypeError, "expected a Graph, an edge_index"),
    "device": (
        refusal(graph=Graph(EDGES, 3).to("meta")),
        ValueError,
        (
            r"query is on cpu, but the graph is on meta\. Move one of them, for example "
            r"graph\.to\('cpu'\)\."
        ),
    ),
    "shape of bias": (
        refusal(bias=torch.zeros(2)),
        ValueError,
        (
            r"bias must have shape \(num_edges, heads\) = \(2, 2\), or the query's leading "
            r"dimensions before it, got \(2,\)\."
        ),
    ),
    "bias of one head": (refusal(bias=torch.zeros(2, 1)), ValueError, r"got \(2, 1\)\."),
    "edge_attr alone": (
        refusal(edge_attr=torch.zeros(2, 1)),
        ValueError,
        r"edge_attr needs edge_weight beside it\.",
    ),
    "edge_weight alone": (
        refusal(edge_weight=torch.zeros(2, 4, 1)),
        ValueError,
        r"edge_weight needs edge_attr beside it\.",
    ),
    "edge_attr turned": (
        refusal(edge_attr=torch.zeros(5, 2), edge_weight=torch.zeros(2, 4, 5)),
        ValueError,
        (
            r"edge_attr must have shape \(num_edges, edge_dim\) with 2 edges, got \(5, 2\)\. Use "
            r"edge_attr\.t\(\)\."
        ),
    ),
    "edge_attr of one dimension": (
        refusal(edge_attr=torch.zeros(2), edge_weight=torch.zeros(2, 4, 1)),
        ValueError,
        r"with 2 edges, got \(2,\)\.$",
    ),
    "edge_attr of other edges": (
        refusal(edge_attr=torch.zeros(3, 1), edge_weight=torch.zeros(2, 4, 1)),
        ValueError,
        r"with 2 edges, got \(3, 1\)\.$",
    ),
    "edge_weight": (
        refusal(edge_attr=torch.zeros(2, 3), edge_weight=torch.zeros(4, 2, 3)),
        ValueError,
        (
            r"edge_weight must have shape \(heads, head_dim, edge_dim\) = \(2, 4, 3\), got "
            r"\(4, 2, 3\)\."
        ),
    ),
    "edge features beside another value_dim": (
        refusal(
            value=torch.zeros(3, 2, 5),
            edge_attr=torch.zeros(2, 1),
            edge_weight=torch.zeros(2, 4, 1),
        ),
        ValueError,
        r"edge features are added to key and value, so value_dim must equal head_dim 4, got 5\.",
    ),
    "dropout above 1": (
        refusal(dropout=1.5),
        ValueError,
        r"dropout must be a probability from 0 to 1, got 1\.5\.",
    ),
    "dropout below 0": (refusal(dropout=-0.1), ValueError, r"got -0\.1\."),
    "dropout nan": (refusal(dropout=math.nan), ValueError, r"got nan\."),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_what_was_expected_what_came_and_what_to_do(name):
    call, error, text = REFUSALS[name]
    with pytest.raises(error, match=text) as caught:
        call()
    assert str(caught.value).startswith(("graph_attention: ", "Graph"))


def test_everything_after_the_graph_is_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        graph_attention(X, X, X, EDGES, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ModuleNotFoundError("No module named 'torch_scatter'", name="torch_scatter"),
            r"torch_scatter is not installed: pip install --no-build-isolation torch-scatter",
        ),
        (
            ImportError("half of it is gone"),
            r"torch_scatter cannot be imported: half of it is gone",
        ),
        (
            OSError("undefined symbol"),
            r"torch_scatter does not match this torch: undefined symbol\. Use backend='eager'",
        ),
    ],
)
def test_c62_a_missing_or_broken_torch_scatter_is_named(error, text, monkeypatch):
    def broken(name):
        raise error

    monkeypatch.setattr(backends.importlib, "import_module", broken)
    with pytest.raises(ValueError, match=f"backend='scatter' cannot run this call: {text}"):
        graph_attention(X, X, X, EDGES, backend="scatter")
    graph_attention(X, X, X, EDGES)  # auto goes on


def test_scatter_names_a_device_it_has_no_kernels_for():
    if backends.missing("scatter") is None:
        with pytest.raises(ValueError, match="torch_scatter has no kernels for device 'mps'"):
            backends.choose("scatter", torch.device("mps"), function="graph_attention")
    assert backends.unsupported("eager", torch.device("mps")) == []
