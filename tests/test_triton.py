"""The fused GPU kernels in Triton's interpreter: every call, cut rows, dropout, extremes, refusals.

What a compiler says of the same kernels is in test_triton_compiled.py.
"""

import json
import math

import pytest
import torch
from torch import library

from graphattn import Graph, attention_weights, backends, edge_softmax, graph_attention
from graphattn.dropout import keep_mask
from graphattn.nn import GraphAttentionConv
from graphattn.testing import GraphCase, assert_close_to_reference, edge_reference
from operands import (
    EDGE_IDS,
    SHUFFLED,
    SMALL,
    assert_right_at_its_dtype,
    assert_same,
    case_of_degrees,
    draw_mask,
    lent,
    linux,
    operator_inputs,
    run,
    run_script,
    tensors_for,
    with_edge_ids,
)

triton = pytest.importorskip("triton", reason="the triton package is not installed")
kernels = pytest.importorskip("graphattn.backends.triton")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = [torch.bfloat16, torch.float16]
# Degrees around those of a block and of a cut row, in an order that mixes them.
DEGREES = case_of_degrees("degrees", [0, 9, 1, 5, 0, 4, 3], [3, 0, 9, 4, 5, 1, 0])


@pytest.fixture
def cut_rows(monkeypatch):
    """Rows of more than 4 edges are cut, and two edges or pieces are taken at a time."""
    monkeypatch.setattr(kernels, "CHUNK", 4)
    monkeypatch.setattr(kernels, "TILE_EDGES", 2)
    monkeypatch.setattr(kernels, "MERGED_PIECES", 2)


@pytest.fixture
def small_tiles(monkeypatch):
    """No more than two heads of 4 channels in a tile."""
    monkeypatch.setattr(kernels, "TILE_CHANNELS", 8)


# Measuring coverage doubles the time of the interpreter, and other tests reach the same lines.
unmeasured = pytest.mark.no_cover

# Every call #######################################################################################


@unmeasured
@pytest.mark.parametrize("name", SMALL)
def test_zoo(name):
    case = SMALL[name]
    tensors = tensors_for(case, heads=3, dim=5, edge_dim=2, dtype=torch.float32)
    assert_right_at_its_dtype(case, "triton", tensors)


@unmeasured
@pytest.mark.usefixtures("cut_rows", "poisoned_memory")
@pytest.mark.parametrize("name", SMALL)
def test_zoo_of_cut_rows_in_memory_that_was_nan(name, monkeypatch):
    case = SMALL[name]
    if case.edge_index.size(1) > 40:
        monkeypatch.setattr(kernels, "CHUNK", 24)
        monkeypatch.setattr(kernels, "TILE_EDGES", 16)
    tensors = tensors_for(case, heads=2, key_heads=1, edge_dim=1, dtype=torch.float32)
    assert_right_at_its_dtype(case, "triton", tensors, 0.3)


CALLS = {
    "one head, no bias": {"heads": 1, "dim": 8, "bias": False},
    "dim 1, value 3": {"heads": 1, "dim": 1, "value_dim": 3},
    "3 heads, dim 20, value 7": {"heads": 3, "dim": 20, "value_dim": 7},
    "8 heads of 2 keys, edge features": {"heads": 8, "key_heads": 2, "dim": 4, "edge_dim": 3},
    "6 heads of 2 keys, edge features": {"heads": 6, "key_heads": 2, "dim": 4, "edge_dim": 5},
    "5 heads of one key, value 9": {"heads": 5, "key_heads": 1, "dim": 3, "value_dim": 9},
    "12 heads, dropout": {"heads": 12, "dim": 4, "edge_dim": 1, "dropout": 0.4},
    "no channels of value": {"value_dim": 0},
    "no edge features": {"edge_dim": 0},
    "dim 64": {"heads": 2, "dim": 64, "edge_dim": 2},
    "dim 256, value 100": {"heads": 2, "dim": 256, "value_dim": 100},
    "leading 0": {"leading": (0,), "edge_dim": 3, "dropout": 0.4},
    "leading 2, dropout": {"leading": (2,), "heads": 4, "key_heads": 2, "dropout": 0.4},
    "leading 2 x 1, edge features": {"leading": (2, 1), "heads": 1, "edge_dim": 2},
    "leading 1 x 2, bias too": {"leading": (1, 2), "bias_leading": True, "dropout": 0.25},
}


def assert_call_is_right(case, call, dtype):
    shape = {name: given for name, given in CALLS[call].items() if name != "dropout"}
    tensors = tensors_for(case, **shape, dtype=dtype)
    assert_right_at_its_dtype(case, "triton", tensors, CALLS[call].get("dropout", 0.0))


@unmeasured
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_calls(call, dtype):
    assert_call_is_right(DEGREES, call, DTYPES[dtype])


@unmeasured
@pytest.mark.usefixtures("cut_rows", "small_tiles")
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_cut_rows_and_many_tiles(call):
    assert_call_is_right(DEGREES, call, torch.float32)


@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("dtype", HALF)
def test_cut_rows_in_low_precision(dtype):
    assert_call_is_right(DEGREES, "6 heads of 2 keys, edge features", dtype)


@pytest.mark.parametrize("of_edges", DTYPES)
def test_bias_and_edge_features_have_dtypes_of_their_own(of_edges):
    tensors = tensors_for(DEGREES, heads=3, edge_dim=3, dtype=torch.bfloat16)
    for name in ("bias", "edge_attr", "edge_weight"):
        tensors[name] = tensors[name].detach().to(DTYPES[of_edges]).requires_grad_()
    assert_right_at_its_dtype(DEGREES, "triton", tensors)


def weights_by_definition(query, key, **rest):
    return edge_reference(query, key, key, **rest)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_weights(is_cut, dtype, request):
    if is_cut:
        request.getfixturevalue("cut_rows")
    tensors = tensors_for(DEGREES, heads=3, edge_dim=3, dtype=DTYPES[dtype])
    del tensors["value"]
    graph = DEGREES.graph()
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    actual = run(attention_weights, tensors, graph, backend="triton")
    expected = run(weights_by_definition, exact, graph)
    plain = run(weights_by_definition, tensors, graph)
    assert_close_to_reference(actual[0], plain[0], expected[0], in_degree=9)
    for name, grad in actual[1].items():
        assert_close_to_reference(grad, plain[1][name], expected[1][name], factor=3, in_degree=9)


@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)])
def test_edge_softmax(trailing):
    graph = SHUFFLED.graph()
    scores = torch.randn(200, *trailing, requires_grad=True)
    found, expected = (edge_softmax(scores, graph, backend=name) for name in ("triton", "eager"))
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(found)
    torch.testing.assert_close(
        *(torch.autograd.grad(weights, scores, cotangent)[0] for weights in (found, expected))
    )


@pytest.mark.parametrize("which", ["query", "key", "value", "bias", "edge_attr", "edge_weight"])
@pytest.mark.usefixtures("cut_rows", "poisoned_memory")
def test_one_gradient_alone(which):
    case = SMALL["more sources than targets"]
    tensors, graph = tensors_for(case, edge_dim=2, dtype=torch.float32), case.graph()
    _, expected = run(graph_attention, tensors, graph, backend="cpu")
    given = {name: x.detach().requires_grad_(name == which) for name, x in tensors.items()}
    out = graph_attention(**given, graph=graph, backend="triton")
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (found,) = torch.autograd.grad(out, given[which], cotangent)
    torch.testing.assert_close(found, expected[which], rtol=1e-4, atol=1e-5)


def nodes_first(x):
    return x.movedim(-3, 0).contiguous().movedim(0, -3)


def every_other_row(x):
    return torch.stack([x, x + 1], dim=-3).flatten(-4, -3)[..., ::2, :, :]


def heads_last(x):
    return x.mT.contiguous().mT


def one_row_for_all(x):
    return x[..., :1, :, :].expand_as(x)


@unmeasured
@pytest.mark.parametrize("layout", [nodes_first, every_other_row, heads_last, one_row_for_all])
def test_any_layout_gives_the_same_bits(layout):
    case = SMALL["parallel edges"]
    tensors = tensors_for(case, dim=3, leading=(2, 2), bias=False, dtype=torch.float32)
    tensors = {name: layout(x.detach()).detach().requires_grad_() for name, x in tensors.items()}
    plain = {
        name: x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, x in tensors.items()
    }
    cotangent = layout(torch.randn(2, 2, 3, 2, 3))
    graph = case.graph()
    assert_same(
        run(graph_attention, tensors, graph, cotangent, backend="triton"),
        run(graph_attention, plain, graph, cotangent.contiguous(), backend="triton"),
        rtol=0,
        atol=0,
    )


# Cut rows #########################################################################################


@triton.jit
def _piece_of_slot(order, found, plan: triton.language.constexpr):
    slot = triton.language.program_id(0).to(triton.language.int64)
    row, begin, end = kernels.edges.piece_of_slot(slot, order, plan)
    triton.language.store(found + 3 * slot, row)
    triton.language.store(found + 3 * slot + 1, begin)
    triton.language.store(found + 3 * slot + 2, end)


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_piece_of_every_cut_row_has_one_slot(seed, chunk):
    generator = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 14, (7,), generator=generator)
    degree[torch.randperm(7, generator=generator)[:3]] = 0
    ptr = torch.cat([torch.zeros(1).long(), degree.cumsum(0)])
    edges = int(ptr[-1])
    slots = 2 * -(-edges // chunk)
    order = kernels.Order(ptr, ptr, 7, edges, slots, slots)
    plan = kernels.Plan(1, 1, 1, 1, 0, 1, 1, 1, 1, chunk, 1, 8)
    found = torch.empty(slots, 3, dtype=torch.int64)
    _piece_of_slot[(slots,)](order, found, plan)
    pieces = {
        2 * (begin // chunk) + (begin == int(ptr[row])): [row, begin, min(begin + chunk, end)]
        for row, (start, end) in enumerate(zip(ptr.tolist(), ptr[1:].tolist(), strict=False))
        if end - start > chunk
        for begin in range(start, end, chunk)
    }
    for slot, (row, begin, end) in enumerate(found.tolist()):
        if slot in pieces:
            assert [row, begin, end] == pieces.pop(slot)
        else:
            assert end <= begin
    assert not pieces


@pytest.mark.usefixtures("cut_rows", "poisoned_memory")
def test_a_row_never_depends_on_what_else_is_in_the_graph():
    """Not even in its last bit, be it cut or not."""
    cases = [SMALL[name] for name in ("parallel edges", "no edges", "empty groups between")]
    cases.insert(1, DEGREES)
    calls = [tensors_for(each, edge_dim=2, dtype=torch.float32) for each in cases]
    graphs = [each.graph() for each in cases]
    together = {
        name: x if name == "edge_weight" else torch.cat([call[name] for call in calls]).detach()
        for name, x in calls[0].items()
    }
    for call in calls:
        call["edge_weight"] = together["edge_weight"]
    leaves = {name: x.detach().requires_grad_() for name, x in together.items()}

    def attend(tensors, graph):
        out = graph_attention(**tensors, graph=graph, backend="triton")
        wanted = [x for name, x in tensors.items() if name != "edge_weight"]
        return [out, *torch.autograd.grad(out, wanted, out.detach().sign())]

    whole = attend(leaves, Graph.batch(graphs))
    alone = zip(*map(attend, calls, graphs), strict=True)
    for found, parts in zip(whole, alone, strict=True):
        assert torch.equal(found, torch.cat(parts))


@pytest.mark.usefixtures("cut_rows")
def test_results_are_bitwise_repeatable():
    tensors = tensors_for(DEGREES, edge_dim=2, dtype=torch.bfloat16)
    first, second = (
        run(graph_attention, tensors, DEGREES.graph(), backend="triton") for _ in range(2)
    )
    assert_same(first, second, rtol=0, atol=0)


def test_a_program_of_several_rows_gives_the_same_bits(monkeypatch):
    tensors, graph = tensors_for(DEGREES, dtype=torch.float32), DEGREES.graph()
    expected = run(graph_attention, tensors, graph, backend="triton")
    plan = kernels._plan

    def of_four_rows(*arguments):
        return plan(*arguments)._replace(rows=4)

    monkeypatch.setattr(kernels, "_plan", of_four_rows)
    assert_same(run(graph_attention, tensors, graph, backend="triton"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("num_rows", "num_edges", "rows"),
    [
        (100, 200, 1),
        (10**6, 10**8, 1),
        (10**6, 15 * 10**6, 1),
        (10**6, 5 * 10**6, 4),
        (10**6, 0, 8),
    ],
)
def test_light_rows_share_a_program_where_there_are_many(num_rows, num_edges, rows):
    x = torch.zeros(1, 8, 32)
    assert kernels._plan(x, x, x, None, num_rows, num_edges).rows == rows


# Measured sizes ###################################################################################


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Turns tuning on; the calls that are measured, of which the later ones take less time."""
    calls = []

    def do_bench(run):
        run()
        calls.append(run)
        return -len(calls)

    monkeypatch.setenv("GRAPHATTN_AUTOTUNE", "1")
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(kernels.tuning, "_found", {})
    return calls


def test_measured_sizes_are_kept_on_disk(measured, tmp_path, monkeypatch):
    case = SMALL["parallel edges"]
    tensors, graph = tensors_for(case, dim=200, dtype=torch.float32), case.graph()
    expected = run(graph_attention, tensors, graph, backend="cpu")
    with torch.no_grad():
        first = graph_attention(**tensors, graph=graph, backend="triton")
    assert len(measured) == 6  # half, once and twice the edges, one and two warps
    torch.testing.assert_close(first, expected[0])
    (key,) = json.loads((tmp_path / "graphattn.json").read_text())
    assert key.startswith("cpu: attend ")
    monkeypatch.setattr(kernels.tuning, "_found", {})  # as in another process
    assert_same(run(graph_attention, tensors, graph, backend="triton"), expected)
    assert len(measured) == 18  # the passes of backward are new
    monkeypatch.setattr(kernels.tuning, "_found", {})
    run(graph_attention, tensors, graph, backend="triton")
    assert len(measured) == 18
    assert len(json.loads((tmp_path / "graphattn.json").read_text())) == 3


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_broken_file_of_sizes_is_written_anew(text, tmp_path):
    (tmp_path / "graphattn.json").write_text(text)
    plan = kernels.Plan(1, 1, 1, 1, 0, 1, 1, 1, 1, 256, 1, 8)
    assert kernels.tuning.sizes("key", plan, lambda edges, warps: None) == (2, 2)
    assert json.loads((tmp_path / "graphattn.json").read_text()) == {"key": [2, 2]}


def test_nothing_is_measured_unless_it_is_asked_for(measured, monkeypatch):
    monkeypatch.delenv("GRAPHATTN_AUTOTUNE")
    x = torch.randn(3, 2, 4)
    graph_attention(x, x, x, SMALL["parallel edges"].graph(), backend="triton")
    assert not measured


# Dropout ##########################################################################################


@unmeasured
@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("dropout", [1e-12, 0.3, 1.0])
def test_dropout_keeps_what_the_mask_keeps(dropout):
    """Equal scores, and a value that names its source: each output element is one weight."""
    num_src, num_dst, heads, leading = 5, 6, 5, (2,)
    pairs = torch.cartesian_prod(torch.arange(num_src), torch.arange(num_dst))
    src, dst = pairs[torch.randperm(pairs.size(0))].t()
    query = torch.zeros(*leading, num_dst, heads, 2)
    key = torch.zeros(*leading, num_src, heads, 2)
    value = torch.eye(num_src)[:, None].expand(*leading, num_src, heads, num_src)
    tensors = {"query": query, "key": key, "value": value.clone().requires_grad_()}
    keep = draw_mask(5, tensors, src.numel(), dropout)
    torch.manual_seed(5)
    graph = Graph(torch.stack([src, dst]), (num_src, num_dst))
    out = graph_attention(**tensors, graph=graph, dropout=dropout, backend="triton")
    assert torch.equal(out[..., dst, :, src] > 0, keep.movedim(-2, 0))
    if dropout < 1.0:
        weight = 1 / (num_src * (1.0 - dropout))
        torch.testing.assert_close(out[out > 0], torch.tensor(weight).expand(int(keep.sum())))
    # The pass over sources draws the same mask again.
    (grad,) = torch.autograd.grad(out.sum(), tensors["value"])
    kept = torch.zeros(num_src, *leading, heads).index_add(0, src, keep.movedim(-2, 0).float())
    factor = 0.0 if dropout == 1.0 else 1 / (num_src * (1.0 - dropout))
    torch.testing.assert_close(grad, kept.movedim(0, -2)[..., None].expand(grad.shape) * factor)


@unmeasured
def test_edges_beyond_2_32_draw_bits_of_their_own():
    """No graph of this size is made: the arrays say where its edges would lie."""
    count, heads = len(EDGE_IDS), 6
    query, key = torch.zeros(1, heads, 1), torch.zeros(count, heads, 1)
    value = torch.eye(count)[:, None].expand(count, heads, count).contiguous()
    inputs = with_edge_ids([query, key, value, None, None, None], EDGE_IDS)
    differ = 0
    for seed in torch.arange(-10, 10):
        out, _, _ = torch.ops.graphattn.attention(*inputs, seed, 1.0, 0.5, "triton")
        keep = keep_mask(seed, torch.tensor(EDGE_IDS), heads, 0.5)[:, 0]
        assert torch.equal(out[0] > 0, keep.t())
        differ += int((keep[0] != keep[4]).sum())
    assert differ > 0


# Size #############################################################################################


@linux
@pytest.mark.parametrize("row_stride", [2**31 + 8, 2**32 + 8])
def test_c64_rows_that_lie_gigabytes_apart(row_stride):
    graph = Graph(torch.tensor([[0, 1, 2, 2], [2, 2, 1, 0]]), 3)
    plain = {name: torch.randn(3, 2, 4).requires_grad_() for name in ("query", "key", "value")}
    apart = {
        name: lent(3, 2, 4, stride=(row_stride, 4, 1)).copy_(x.detach()).requires_grad_()
        for name, x in plain.items()
    }
    cotangent = torch.randn(3, 2, 4)
    far = lent(3, 2, 4, stride=(row_stride, 4, 1)).copy_(cotangent)
    assert_same(
        run(graph_attention, apart, graph, far, backend="triton"),
        run(graph_attention, plain, graph, cotangent, backend="triton"),
        rtol=0,
        atol=0,
    )


@linux
def test_c64_bias_and_edge_features_of_more_than_2_31_elements():
    count, heads, edge_dim = 3, 2, 2
    edge_id = [1, 2**31 // heads + 7, 2**32 // heads + 9]
    far, near = {}, {}
    for name in ("bias", "edge_attr"):
        far[name] = lent(max(edge_id) + 1, heads, stride=(heads, 1))
        far[name][edge_id] = near[name] = torch.randn(count, heads)
    query, query_edge = torch.randn(1, heads, 3), torch.randn(1, heads, edge_dim)
    key = torch.randn(count, heads, 3)
    results = []
    for tensors, places in ((far, edge_id), (near, list(range(count)))):
        bias, edge_attr = tensors["bias"], tensors["edge_attr"]
        inputs = with_edge_ids([query, key, key, bias, query_edge, edge_attr], places)
        results.append(torch.ops.graphattn.attention(*inputs, None, 0.5, 0.0, "triton"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Extreme scores ###################################################################################

COUNTS = [1, 2, 3, 5, 9]  # of edges


def one_target(count, dtype, heads=2, dim=3):
    """A query of zeros with ``count`` keys, and values that float16 can sum up."""
    graph = Graph(torch.stack([torch.arange(count), torch.zeros(count).long()]), (count, 1))
    query = torch.zeros(1, heads, dim, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(count, heads, dim).to(dtype).requires_grad_() for _ in range(2))
    return {"query": query, "key": key, "value": value}, graph


@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("dtype", DTYPES)
def test_c01_one_score_far_above_the_others_takes_all(dtype):
    for count in COUNTS:
        at = count // 2
        tensors, graph = one_target(count, DTYPES[dtype])
        bias = torch.full((count, 2), -1e5)
        bias[at] = 1e5
        given = {**tensors, "bias": bias.requires_grad_()}
        out, grads = run(graph_attention, given, graph, torch.ones(1, 2, 3), backend="triton")
        assert torch.equal(out[0], tensors["value"][at])
        assert all(grads[name].eq(0).all() for name in ("key", "bias"))
        assert grads["value"][at].eq(1).all()
        assert grads["value"].sum() == 6


@pytest.mark.usefixtures("cut_rows")
def test_c01_an_offset_of_all_scores_changes_no_bit():
    for count in COUNTS:
        tensors, graph = one_target(count, torch.float32)
        bias = torch.randint(-32, 32, (count, 2)) / 8  # what float32 can hold beside 1e5
        first, *others = (
            run(graph_attention, {**tensors, "bias": shifted}, graph, backend="triton")
            for shifted in ((bias + by).requires_grad_() for by in (0.0, 1e5, -1e5))
        )
        for other in others:
            assert_same(other, first, rtol=0, atol=0)


@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("extreme", ["min", "max"])
def test_c08_a_row_of_the_smallest_or_largest_numbers_is_the_mean(extreme):
    for count in COUNTS:
        tensors, graph = one_target(count, torch.float32)
        bias = torch.full((count, 2), getattr(torch.finfo(torch.float32), extreme))
        found = run(graph_attention, tensors, graph, bias=bias, backend="triton")
        assert_same(found, run(graph_attention, tensors, graph, backend="eager"))


MASKED = {
    "all": lambda position: position >= 0,
    "first half": lambda position: position < position.numel() // 2,
    "second half": lambda position: position >= position.numel() // 2,
    "all but one": lambda position: position != position.numel() // 3,
}


@unmeasured
@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("masked", MASKED)
def test_c09_edges_of_minus_infinity_count_as_absent(masked):
    """Wherever they lie: a block, or a piece of a cut row, may have nothing else."""
    for count in COUNTS:
        tensors, graph = one_target(count, torch.float32)
        blocked = MASKED[masked](torch.arange(count))
        bias = torch.randn(count, 2).masked_fill(blocked[:, None], -math.inf)
        given = {**tensors, "bias": bias.requires_grad_()}
        found = run(graph_attention, given, graph, torch.ones(1, 2, 3), backend="triton")
        assert_same(found, run(graph_attention, given, graph, torch.ones(1, 2, 3), backend="cpu"))
        if blocked.all():
            assert all(x.eq(0).all() for x in (found[0], *found[1].values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_equal_values_send_no_gradient_through_sharp_scores(is_cut, dtype, request):
    """Every weight has the same gradient, and what differs from their mean is rounding."""
    if is_cut:
        request.getfixturevalue("cut_rows")
    tensors = tensors_for(DEGREES, heads=2, dim=16, bias=False, dtype=DTYPES[dtype])
    with torch.no_grad():
        tensors["query"].mul_(20)
        tensors["value"].copy_(tensors["value"][:1].clone().expand_as(tensors["value"]))
    _, grads = run(graph_attention, tensors, DEGREES.graph(), backend="triton")
    eps = torch.finfo(torch.float32).eps
    for name, other in (("query", "key"), ("key", "query")):
        # A gradient of order 1 times a key or query of this size, for each edge of a row.
        bound = 32 * eps * math.sqrt(9) * tensors[other].abs().max().double()
        assert grads[name].abs().max() <= bound, name


# Warnings of NumPy, in which the interpreter computes.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.usefixtures("cut_rows")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value", "bias"])
def test_contract_7_nan_and_infinity_in_a_neighbour_spread(which, poison):
    for count in COUNTS:
        tensors, graph = one_target(count, torch.float32)
        tensors["bias"] = torch.randn(count, 2)
        with torch.no_grad():
            tensors["query"].add_(1)
            tensors[which][0 if which == "query" else count // 2, 1] = poison
        out = graph_attention(**tensors, graph=graph, backend="triton")
        assert not out[0, 1].isfinite().any()
        assert out[0, 0].isfinite().all()


@pytest.mark.usefixtures("cut_rows")
def test_contract_7_nan_elsewhere_never_spreads():
    """In a node that nobody attends to, and in a query that has nothing to attend to."""
    case = GraphCase("star of 6 and two more", torch.tensor([[0, 1, 2, 3, 4, 5], [7] * 6]), 8, 8)
    tensors = tensors_for(case, edge_dim=2, dtype=torch.float32)
    graph = case.graph()
    expected = run(graph_attention, tensors, graph, backend="triton")
    with torch.no_grad():
        tensors["key"][6:], tensors["value"][6:], tensors["query"][:7] = (math.nan,) * 3
    found = run(graph_attention, tensors, graph, backend="triton")
    assert_same(found, expected, rtol=0, atol=0)


# Under torch ######################################################################################


def test_opcheck():
    shape = {"heads": 2, "edge_dim": 2, "dtype": torch.float32, "backend": "triton"}
    library.opcheck(
        torch.ops.graphattn.attention, operator_inputs(SMALL["parallel edges"], **shape)
    )


def test_second_derivatives_equal_those_of_eager():
    case = SMALL["parallel edges"]
    tensors, graph = tensors_for(case, edge_dim=2, dtype=torch.float32), case.graph()
    found = []
    for backend in ("triton", "eager"):
        out = graph_attention(**tensors, graph=graph, backend=backend)
        leaves = list(tensors.values())
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_vmap_equals_a_loop():
    query = torch.randn(3, 7, 2, 4)
    key, value = torch.randn(2, 7, 2, 4)

    def attend(query):
        return graph_attention(query, key, value, DEGREES.graph(), backend="triton")

    assert torch.equal(torch.func.vmap(attend)(query), torch.stack([attend(x) for x in query]))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_layer_gives_what_it_gives_on_cpu(dtype):
    layers = [
        GraphAttentionConv(6, 4, heads=2, edge_dim=3, beta=True, dropout=0.2, backend=name)
        for name in ("triton", "cpu")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    case = SMALL["disjoint batch"]
    x, edge_attr = torch.randn(case.num_src, 6), torch.randn(case.edge_index.size(1), 3)
    results = []
    for layer in layers:
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = layer(x, case.graph(), edge_attr)
        grads = torch.autograd.grad(out.float().pow(2).sum(), list(layer.parameters()))
        results.append([out.detach(), *grads])
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(*results, **tolerance)


def test_a_compiled_call_draws_another_mask_each_time():
    graph = SMALL["complete"].graph()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(x):
        return graph_attention(x, x, x, graph, dropout=0.5, backend="triton")

    x = torch.randn(7, 2, 4, requires_grad=True)
    torch.manual_seed(1)
    first, second = attend(x), attend(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(
        graph_attention(x, x, x, graph, dropout=0.5, backend="triton").detach(), first
    )
    assert torch.autograd.grad(second.sum(), x)[0].isfinite().all()


# What it refuses ##################################################################################


def test_every_reason_for_a_refusal_is_given():
    x, wide = torch.randn(5, 1, 4), torch.randn(5, 1, 300)
    edges = torch.tensor([[0], [1]])
    with pytest.raises(
        ValueError,
        match=r"graph_attention: backend='triton' cannot run this call: torch.float64 is not "
        r"supported; value_dim 300 exceeds 256\. Use backend='eager' or 'auto'\.",
    ):
        graph_attention(x.double(), x.double(), wide.double(), edges, backend="triton")
    with pytest.raises(ValueError, match=r"call: head_dim 300 exceeds 256\. Use"):
        attention_weights(wide, wide, edges, backend="triton")
    features = {"edge_attr": torch.randn(1, 257), "edge_weight": torch.randn(1, 4, 257)}
    with pytest.raises(ValueError, match="call: edge_dim 257 exceeds 256"):
        graph_attention(x, x, x, edges, **features, backend="triton")


def test_auto_takes_it_on_a_gpu_where_it_supports_the_call():
    def chosen(device, dtype=torch.float32, **dims):
        return backends.choose("auto", torch.device(device), dtype, dims, function="test")

    assert chosen("cpu") != "triton"
    assert chosen("meta") == "eager"


WITHOUT_INTERPRETER = """
import torch
from graphattn import backends, graph_attention

cpu, gpu = torch.device("cpu"), torch.device("cuda")
if not torch.cuda.is_available():
    assert "no GPU is visible to torch" in backends.missing("triton")
    x = torch.ones(2, 1, 1)
    try:
        graph_attention(x, x, x, torch.tensor([[0], [1]]), backend="triton")
    except ValueError as error:
        assert "TRITON_INTERPRET=1 before graphattn is imported" in str(error)
    else:
        raise AssertionError
for dtype, dims, name in (
    (torch.float32, {"head_dim": 256}, "triton"),
    (torch.bfloat16, {"head_dim": 5, "value_dim": 256}, "triton"),
    (torch.float64, {"head_dim": 5}, "eager"),
    (torch.float32, {"head_dim": 257}, "eager"),
):
    assert backends.choose("auto", gpu, dtype, dims, function="test") == name
assert backends.choose("auto", cpu, torch.float32, {}, function="test") != "triton"
"""


def test_without_the_interpreter_it_wants_a_gpu():
    run_script(WITHOUT_INTERPRETER, TRITON_INTERPRET="0")


def test_an_old_gpu_is_named_and_auto_does_without(monkeypatch):
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capability, chosen in (((7, 5), "eager"), ((8, 0), "triton"), ((12, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        arguments = (torch.device("cuda"), torch.float32)
        assert backends.choose("auto", *arguments, function="test") == chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert backends.unsupported("triton", *arguments) == [
        "the GPU has compute capability 7.5, and Triton needs 8.0"
    ]


def test_without_triton_the_package_says_so(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in backends._no_triton()


def test_an_old_triton_is_named(monkeypatch):
    monkeypatch.setattr(backends.importlib.metadata, "version", lambda name: "3.5.1")
    assert backends._no_triton() == "triton 3.5.1 is too old: 3.6 or newer is needed"


def test_the_operator_knows_its_kernels_by_name():
    arguments = operator_inputs(SHUFFLED, dtype=torch.float32, backend="cuda")
    with pytest.raises(ValueError, match="there are no kernels 'cuda'"):
        torch.ops.graphattn.attention(*arguments)
