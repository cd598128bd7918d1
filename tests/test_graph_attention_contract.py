"""The contract of graphattn.graph_attention, point by point, for every backend."""

import math

import pytest
import torch

from graphattn import Graph, attention_weights, backends, graph_attention
from graphattn import graph as graph_module
from graphattn.dropout import draw_seed, keep_mask
from graphattn.testing import (
    GraphCase,
    assert_batch_equals_parts,
    edge_reference,
)
from operands import (
    EXACT,
    ISOLATED,
    PARALLEL,
    SHAPES,
    SHUFFLED,
    SMALL,
    ZOO,
    assert_right,
    assert_same,
    run,
    tensors_for,
)

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
    best = "cpu" if backends.missing("cpu") is None else "eager"
    assert torch.equal(auto, graph_attention(**tensors, graph=PARALLEL.graph(), backend=best))
    with pytest.raises(
        ValueError,
        match=r"graph_attention: unknown backend 'fast'\. Use one of 'auto', 'eager', 'scatter', "
        r"'cpu', 'triton'\.",
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
    check = graph_module._check_range
    monkeypatch.setattr(
        graph_module, "_check_range", lambda *args, **rest: checks.append(1) or check(*args, **rest)
    )
    edge_index = SHUFFLED.edge_index.clone()
    tensors = tensors_for(SHUFFLED)
    for _ in range(3):
        run(graph_attention, tensors, edge_index, backend=backend)
    assert len(checks) == 2  # one for each row
