"""The fused CPU kernel: instruction sets, cut rows, leftover memory, strides, threads, size."""

import itertools
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from graphattn import Graph, attention_weights, backends, graph_attention
from graphattn._native import library
from graphattn.dropout import keep_mask
from graphattn.testing import (
    GraphCase,
    assert_close_to_reference,
    edge_reference,
    zoo,
)
from operands import (
    EDGE_IDS,
    EXACT,
    SHUFFLED,
    SMALL,
    ZOO,
    assert_right,
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

pytestmark = pytest.mark.skipif(
    backends.missing("cpu") is not None, reason=f"backend cpu: {backends.missing('cpu')}"
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALF = [torch.bfloat16, torch.float16]

# Every instruction set ############################################################################

ISA = {"plain": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(params=ISA)
def isa(request):
    """Each instruction set that this processor has, one after the other."""
    use = library().graphattn_use_isa
    wanted = ISA[request.param]
    if use(wanted) != wanted:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    use(max(ISA.values()))


each_isa = pytest.mark.usefixtures("isa")

# Block borders are at 4, 8 and 16 edges; sources with many edges are not the targets with many.
DEGREES = case_of_degrees("degrees 0 to 40", list(range(41)), list(range(40, -1, -1)))

CALLS = {
    "one head, edge features 1": {"heads": 1, "dim": 8, "edge_dim": 1},
    "3 heads, value 7, no bias": {"heads": 3, "dim": 20, "value_dim": 7, "bias": False},
    "2 heads of one key, edge features 3": {"heads": 2, "key_heads": 1, "dim": 5, "edge_dim": 3},
    "8 heads of 2 keys, edge features 9": {"heads": 8, "key_heads": 2, "dim": 16, "edge_dim": 9},
    "17 heads, edge features 17": {"heads": 17, "dim": 3, "edge_dim": 17},
    "17 heads of one key, value 33": {"heads": 17, "key_heads": 1, "dim": 4, "value_dim": 33},
    "5 heads, dropout": {"heads": 5, "dim": 6, "edge_dim": 5, "dropout": 0.4},
    "leading 0": {"leading": (0,), "edge_dim": 3, "dropout": 0.4},
    "leading 1": {"leading": (1,), "heads": 3, "bias_leading": True},
    "leading 2, dropout": {"leading": (2,), "heads": 6, "key_heads": 3, "dropout": 0.4},
    "leading 2 x 3, edge features 7": {"leading": (2, 3), "heads": 2, "edge_dim": 7},
    "leading 2 x 3, bias too, dropout": {
        "leading": (2, 3),
        "bias_leading": True,
        "heads": 5,
        "dim": 3,
        "value_dim": 2,
        "dropout": 0.25,
    },
}


def assert_call_is_right(case, call, dtype):
    shape = {name: given for name, given in CALLS[call].items() if name != "dropout"}
    assert_right_at_its_dtype(
        case, "cpu", tensors_for(case, **shape, dtype=dtype), CALLS[call].get("dropout", 0.0)
    )


@each_isa
@pytest.mark.parametrize("name", SMALL)
def test_zoo_on_every_instruction_set(name):
    case = SMALL[name]
    assert_right(case, "cpu", tensors_for(case, heads=3, dim=5, edge_dim=2))
    assert_right(case, "cpu", tensors_for(case, heads=4, key_heads=2, dim=20, value_dim=7))


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_calls_on_every_degree(call, dtype):
    assert_call_is_right(DEGREES, call, DTYPES[dtype])


@each_isa
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["more targets than sources", "more sources than targets"])
def test_calls_on_two_sides(name, call):
    assert_call_is_right(SMALL[name], call, torch.float64)
    assert_call_is_right(SMALL[name], call, torch.float32)


DIMS = [1, 3, 5, 8, 16, 20, 32, 33, 64, 100, 128, 256]


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dim_with_two_value_dims(dim, dtype):
    for value_dim in (dim, DIMS[(DIMS.index(dim) + 5) % len(DIMS)]):
        tensors = tensors_for(DEGREES, dim=dim, value_dim=value_dim, dtype=DTYPES[dtype])
        assert_right_at_its_dtype(DEGREES, "cpu", tensors)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 17])
def test_every_number_of_heads_alone_and_grouped(heads, dtype):
    for key_heads in {1, heads}:
        tensors = tensors_for(DEGREES, heads=heads, key_heads=key_heads, dim=8, dtype=DTYPES[dtype])
        assert_right_at_its_dtype(DEGREES, "cpu", tensors)


@each_isa
@pytest.mark.parametrize("degree", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
def test_a_graph_of_one_degree_ends_where_its_memory_ends(degree):
    """The last rows and edges are the last ones of their tensors, too."""
    case = case_of_degrees("one degree", [degree] * 6, [degree] * 6)
    for shape in ({"dim": 3, "edge_dim": 5}, {"dim": 16, "value_dim": 1, "leading": (2,)}):
        assert_right(case, "cpu", tensors_for(case, **shape))


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_edges", DTYPES)
def test_bias_and_edge_features_have_dtypes_of_their_own(of_edges, dtype):
    tensors = tensors_for(DEGREES, heads=3, dim=8, edge_dim=3, dtype=DTYPES[dtype])
    for name in ("bias", "edge_attr", "edge_weight"):
        tensors[name] = tensors[name].detach().to(DTYPES[of_edges]).requires_grad_()
    assert_right_at_its_dtype(DEGREES, "cpu", tensors)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_degree(dtype):
    tensors = tensors_for(DEGREES, heads=5, dim=6, edge_dim=3, dtype=DTYPES[dtype])
    del tensors["value"]
    graph = DEGREES.graph()

    def by_definition(query, key, **rest):
        return edge_reference(query, key, key, **rest)[1]

    actual = run(attention_weights, tensors, graph, backend="cpu")
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    expected = run(by_definition, exact, graph)
    if dtype == "float64":
        assert_same(actual, expected, **EXACT)
        return
    plain = run(by_definition, tensors, graph)
    assert_close_to_reference(actual[0], plain[0], expected[0], in_degree=40)
    for name, grad in actual[1].items():
        assert_close_to_reference(grad, plain[1][name], expected[1][name], factor=3, in_degree=40)


def all_of_16_bits(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@each_isa
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [1, 16, 37])
def test_every_number_of_16_bits_comes_through_and_is_rounded_as_torch_rounds(width, dtype):
    value = all_of_16_bits(dtype)
    value = value[: value.numel() // width * width].view(-1, 1, width)
    count = value.size(0)
    node = torch.arange(count)
    query = key = torch.zeros(count, 1, 1, dtype=dtype)
    alone = graph_attention(query, key, value, torch.stack([node, node]), backend="cpu")
    torch.testing.assert_close(alone, value, rtol=0, atol=0, equal_nan=True)
    # Ties between neighbours of the format, and sums of any two.
    for other in (value.flatten().roll(1), value.flatten().roll(12345)):
        pair = torch.cat([value, other.view(value.shape)])
        graph = Graph(
            torch.stack([torch.cat([node, node + count]), node.repeat(2)]), (2 * count, count)
        )
        mean = graph_attention(query, key.repeat(2, 1, 1), pair, graph, backend="cpu")
        expected = ((pair[:count].float() + pair[count:].float()) / 2).to(dtype)
        torch.testing.assert_close(mean, expected, rtol=0, atol=0, equal_nan=True)


@each_isa
@pytest.mark.parametrize("dtype", HALF)
def test_every_bias_of_16_bits_is_read_as_torch_reads_it(dtype):
    bias = all_of_16_bits(dtype)
    src = torch.arange(2 * bias.numel())
    graph = Graph(torch.stack([src, src % bias.numel()]), (src.numel(), bias.numel()))
    both = torch.cat([bias, torch.zeros_like(bias)]).unsqueeze(1)
    query, key = torch.zeros(bias.numel(), 1, 1), torch.zeros(src.numel(), 1, 1)
    weights = attention_weights(query, key, graph, bias=both, backend="cpu")
    expected = torch.softmax(both.float().view(2, -1), dim=0).view(-1, 1)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=2e-38, equal_nan=True)


@each_isa
@pytest.mark.parametrize(("dtype", "reach"), [(torch.float32, 87.3), (torch.float64, 708.3)])
def test_weights_are_accurate_wherever_they_are_normal_numbers(dtype, reach):
    bias = torch.linspace(-1.05 * reach, 1.05 * reach, 20_001, dtype=dtype)
    src = torch.arange(2 * bias.numel())
    graph = Graph(torch.stack([src, src % bias.numel()]), (src.numel(), bias.numel()))
    both = torch.cat([bias, torch.zeros_like(bias)]).unsqueeze(1)
    query, key = (torch.zeros(n, 1, 1, dtype=dtype) for n in (bias.numel(), src.numel()))
    weights = attention_weights(query, key, graph, bias=both, backend="cpu").flatten()
    expected = torch.sigmoid(torch.cat([bias, -bias]))
    inside = torch.cat([bias, -bias]) > -reach
    torch.testing.assert_close(
        weights[inside], expected[inside], rtol=4 * torch.finfo(dtype).eps, atol=0
    )
    assert (weights[~inside] <= expected[inside].min() * 1.1).all()


@each_isa
def test_the_instruction_set_is_the_one_asked_for(isa):
    """Sums of another order differ in their last bits, so each set has numbers of its own."""
    x = torch.randn(64, 1, 64)
    graph = Graph(torch.randint(64, (2, 2000)), 64)
    results, use = {}, library().graphattn_use_isa
    for name, number in ISA.items():
        if use(number) == number:
            results[name] = graph_attention(x, x, x, graph, backend="cpu")
    for name, out in results.items():
        assert name == isa or not torch.equal(out, results[isa])


# Rows that are cut ################################################################################

UNIT = 1024  # edges of the longest row that is not cut
DEGREES_OF_HUBS = [5000, 1025, 0, 0, 2048, 1024, 3, 1023, 0, 1026, 1]
HUBS = case_of_degrees("hubs in a row", DEGREES_OF_HUBS, DEGREES_OF_HUBS[::-1])

HUB_CALLS = {
    "plain": {"bias": False},
    "bias, edge features": {"heads": 3, "dim": 5, "edge_dim": 3},
    "grouped, dropout": {"heads": 4, "key_heads": 2, "value_dim": 3, "dropout": 0.3},
    "leading 2, edge features, dropout": {"leading": (2,), "edge_dim": 2, "dropout": 0.3},
    "leading 2 x 2, bias too": {"leading": (2, 2), "bias_leading": True, "value_dim": 20},
}


def attend_with(seed, **options):
    """graph_attention that draws the same mask each time."""

    def attend(**tensors):
        torch.manual_seed(seed)
        return graph_attention(**tensors, **options)

    return attend


def call_on(case, call, dtype=torch.float64):
    """Arguments of one of HUB_CALLS, and its dropout."""
    shape = {name: given for name, given in HUB_CALLS[call].items() if name != "dropout"}
    return tensors_for(case, **shape, dtype=dtype), HUB_CALLS[call].get("dropout", 0.0)


def assert_equals_eager(case, call):
    tensors, dropout = call_on(case, call)
    results = [
        run(attend_with(3, dropout=dropout, backend=name), tensors, case.graph())
        for name in ("cpu", "eager")
    ]
    assert_same(*results, **EXACT)


@pytest.mark.parametrize("call", HUB_CALLS)
@pytest.mark.parametrize("hub", [1023, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("name", ["in-star", "out-star"])
def test_star_at_the_border_of_a_cut(name, hub, call):
    assert_equals_eager(next(case for case in zoo(hub=hub) if case.name == name), call)


@each_isa
@pytest.mark.parametrize("call", HUB_CALLS)
def test_hubs_next_to_each_other_and_with_empty_rows_between(call):
    assert_equals_eager(HUBS, call)


@pytest.mark.parametrize("before", [0, 1, 1019, 1020, 1021, 1022, 1023, 1024, 2047])
@pytest.mark.parametrize("hub", [1024, 1025, 2047, 2048, 2049, 3072, 3073])
def test_a_hub_wherever_it_starts(before, hub):
    """Empty rows before it move a hub, and where its pieces lie, edge by edge."""
    degree = [0] * before + [hub, hub, 2]
    target = torch.repeat_interleave(torch.tensor(degree))
    source = torch.arange(target.numel()) % 7
    for edge_index, size in (
        (torch.stack([source, target]), (7, len(degree))),
        (torch.stack([target, source]), (len(degree), 7)),
    ):
        tensors = tensors_for(GraphCase("hub", edge_index, *size), heads=1, dim=1)
        actual, expected = (
            run(graph_attention, tensors, Graph(edge_index, size), backend=name)
            for name in ("cpu", "eager")
        )
        assert_same(actual, expected, **EXACT)


@each_isa
def test_weights_of_hubs():
    tensors = tensors_for(HUBS, heads=3, dim=5, edge_dim=2, leading=(2,))
    del tensors["value"]
    actual, expected = (
        run(attention_weights, tensors, HUBS.graph(), backend=name) for name in ("cpu", "eager")
    )
    assert_same(actual, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_hubs_in_low_precision_err_no_more_than_float32_sums(dtype):
    graph = HUBS.graph()
    tensors = tensors_for(HUBS, heads=2, dim=20, edge_dim=3, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    out, grads = run(graph_attention, tensors, graph, backend="cpu")
    plain, plain_grads = run(graph_attention, tensors, graph, backend="eager")
    expected, expected_grads = run(graph_attention, exact, graph, backend="eager")
    assert_close_to_reference(out, plain, expected, in_degree=5000)
    for name, grad in grads.items():
        assert_close_to_reference(
            grad, plain_grads[name], expected_grads[name], factor=3, in_degree=5000
        )


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", HUB_CALLS)
def test_hubs_are_bitwise_the_same_for_any_number_of_threads(call, dtype, set_threads):
    tensors, dropout = call_on(HUBS, call, dtype)
    attend, graph = attend_with(7, dropout=dropout, backend="cpu"), HUBS.graph()
    results = []
    for threads in (1, 2, 3, 7, 7, 2, 1):
        set_threads(threads)
        results.append(run(attend, tensors, graph))
    for result in results[1:]:
        assert_same(result, results[0], rtol=0, atol=0)


def run_operator(inputs):
    """Output, mixed and the gradients of all inputs of the operator itself."""
    out, mixed, _ = torch.ops.graphattn.attention(*inputs)
    cotangents = [
        torch.linspace(-1, 1, x.size(-1) * x.size(-2)).view(x.shape[-2:]).expand(x.shape)
        for x in (out, mixed)
    ]
    wanted = [x for x in inputs[:6] if x is not None]
    grads = torch.autograd.grad(
        [out, mixed], wanted, [c.to(x.dtype) for c, x in zip(cotangents, (out, mixed), strict=True)]
    )
    return [out.detach(), mixed.detach(), *grads]


@each_isa
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 3, "dim": 5, "edge_dim": 3},
        {"heads": 4, "key_heads": 2, "dim": 16, "value_dim": 20, "edge_dim": 1, "leading": (2,)},
    ],
)
def test_a_row_never_depends_on_what_else_is_in_the_graph(shape, dtype):
    """Not even in its last bit, be it cut or not."""
    cases = [SMALL["shuffled"], HUBS, SMALL["no edges"], ZOO["out-star"], DEGREES, HUBS]
    calls = [operator_inputs(case, **shape, dtype=dtype) for case in cases]
    together = [
        torch.cat(parts, dim=dim).detach().requires_grad_()
        for parts, dim in zip(
            list(zip(*calls, strict=True))[:6], (-3, -3, -3, -2, -3, 0), strict=True
        )
    ]
    graph = Graph.batch([case.graph() for case in cases])
    arrays = (graph.dst_ptr, graph.src_index, graph.edge_id)
    by_source = (graph.src_ptr, graph.dst_index, graph.edge_id_by_src)
    whole = run_operator([*together, *arrays, *by_source, *calls[0][12:]])
    alone = zip(*map(run_operator, calls), strict=True)
    for at, (found, parts) in enumerate(zip(whole, alone, strict=True)):
        dim = (-3, -3, -3, -3, -3, -2, -3, 0)[at]
        assert torch.equal(found, torch.cat(parts, dim=dim)), at


# Memory that nobody wrote #########################################################################


@pytest.mark.usefixtures("poisoned_memory", "isa")
@pytest.mark.parametrize("name", [*SMALL, "hubs"])
def test_c19_every_element_of_a_result_is_written(name):
    case = HUBS if name == "hubs" else SMALL[name]
    for shape in (
        {"heads": 3, "dim": 5, "edge_dim": 3},
        {"heads": 4, "key_heads": 2, "value_dim": 3, "leading": (2, 2), "bias_leading": True},
        {"leading": (0,), "edge_dim": 2},
    ):
        tensors = tensors_for(case, **shape, dtype=torch.float32)
        for dropout in (0.0, 0.5, 1.0):
            out, grads = run(graph_attention, tensors, case.graph(), dropout=dropout, backend="cpu")
            assert out.isfinite().all()
            for which, grad in grads.items():
                assert grad.isfinite().all(), which
        del tensors["value"]
        weights, grads = run(attention_weights, tensors, case.graph(), backend="cpu")
        assert weights.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.usefixtures("poisoned_memory")
def test_c19_gradients_of_a_part_of_the_inputs_are_written():
    tensors = tensors_for(SMALL["one edge, isolated nodes"], edge_dim=2, dtype=torch.float32)
    for wanted in tensors:
        given = {name: x.detach().requires_grad_(name == wanted) for name, x in tensors.items()}
        graph = SMALL["one edge, isolated nodes"].graph()
        out = graph_attention(**given, graph=graph, backend="cpu")
        assert torch.autograd.grad(out.sum(), given[wanted])[0].isfinite().all(), wanted


DIRTY = """
import torch
from graphattn import attention_weights, graph_attention
from graphattn._native import library
from operands import EXACT, SMALL, assert_right, assert_same, case_of_degrees, run, tensors_for

torch.set_num_threads(1)
hubs = case_of_degrees("hubs", [2500, 0, 1025, 1, 1024], [1024, 1, 1025, 0, 2500])
for isa in (0, 1, 2):
    if library().graphattn_use_isa(isa) != isa:
        continue
    for case in SMALL.values():
        assert_right(case, "cpu", tensors_for(case, heads=3, dim=5, edge_dim=3))
        assert_right(case, "cpu", tensors_for(case, heads=5, dim=3, value_dim=2, leading=(2,)))
    tensors = tensors_for(hubs, heads=5, dim=3, edge_dim=3)
    graph = hubs.graph()
    for function in (graph_attention, attention_weights):
        for dropout in (0.0, 0.5) if function is graph_attention else (None,):
            results = []
            for backend in ("cpu", "eager"):
                torch.manual_seed(0)
                options = {} if dropout is None else {"dropout": dropout}
                results.append(run(function, tensors, graph, backend=backend, **options))
            assert_same(*results, **EXACT)
        tensors.pop("value", None)
"""


def test_c19_memory_of_the_kernel_itself_may_hold_anything():
    """glibc fills what malloc hands out with 0xfe: numbers near -1e38 in either precision."""
    run_script(DIRTY, MALLOC_PERTURB_="1", OMP_NUM_THREADS="1")


# Dropout ##########################################################################################


@each_isa
@pytest.mark.parametrize("dropout", [1e-12, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("heads", [1, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_dropout_keeps_what_the_mask_keeps(leading, heads, dropout):
    """Equal scores, and a value that names its source: each output element is one weight."""
    num_src, num_dst = 13, 21
    pairs = torch.cartesian_prod(torch.arange(num_src), torch.arange(num_dst))
    src, dst = pairs[torch.randperm(pairs.size(0))].t()
    query = torch.zeros(*leading, num_dst, heads, 2)
    key = torch.zeros(*leading, num_src, heads, 2)
    value = torch.eye(num_src)[:, None].expand(*leading, num_src, heads, num_src)
    tensors = {"query": query, "key": key, "value": value.clone().requires_grad_()}
    keep = draw_mask(5, tensors, src.numel(), dropout)
    torch.manual_seed(5)
    graph = Graph(torch.stack([src, dst]), (num_src, num_dst))
    out = graph_attention(**tensors, graph=graph, dropout=dropout, backend="cpu")
    assert torch.equal(out[..., dst, :, src] > 0, keep.movedim(-2, 0))
    if dropout == 1e-12:
        assert keep.all()
    if dropout < 1.0:
        weight = 1 / (num_src * (1.0 - dropout))
        torch.testing.assert_close(out[out > 0], torch.tensor(weight).expand(int(keep.sum())))
    # The pass over sources draws the same mask again.
    (grad,) = torch.autograd.grad(out.sum(), tensors["value"])
    kept = torch.zeros(num_src, *leading, heads).index_add(0, src, keep.movedim(-2, 0).float())
    factor = 0.0 if dropout == 1.0 else 1 / (num_src * (1.0 - dropout))
    torch.testing.assert_close(grad, kept.movedim(0, -2)[..., None].expand(grad.shape) * factor)


# Extreme scores ###################################################################################

COUNTS = [1, 2, 4, 5, 8, 9, 16, 17, 33, UNIT + 1, 2 * UNIT + 5]  # of edges
PLACES = [(count, at) for count in COUNTS for at in {0, count // 2, count - 1}]


def one_target(count, dtype, heads=2, dim=3):
    """A query of zeros with ``count`` keys, and values that float16 can sum up."""
    graph = Graph(torch.stack([torch.arange(count), torch.zeros(count).long()]), (count, 1))
    query = torch.zeros(1, heads, dim, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(count, heads, dim).to(dtype).requires_grad_() for _ in range(2))
    return {"query": query, "key": key, "value": value}, graph


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_c01_one_score_far_above_the_others_takes_all(dtype):
    for count, at in PLACES:
        tensors, graph = one_target(count, DTYPES[dtype])
        bias = torch.full((count, 2), -1e5)
        bias[at] = 1e5
        bias.requires_grad_()
        given = {**tensors, "bias": bias}
        out, grads = run(graph_attention, given, graph, torch.ones(1, 2, 3), backend="cpu")
        assert torch.equal(out[0], tensors["value"][at])
        assert all(grads[name].eq(0).all() for name in ("key", "bias"))
        rounding = 16 * torch.finfo(torch.promote_types(DTYPES[dtype], torch.float32)).eps
        assert grads["query"].abs().max() <= rounding * tensors["key"].abs().max()
        assert grads["value"][at].eq(1).all()
        assert grads["value"].sum() == 6


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_c01_an_offset_of_all_scores_changes_no_bit(dtype):
    for count in COUNTS:
        tensors, graph = one_target(count, DTYPES[dtype])
        bias = torch.randint(-32, 32, (count, 2)) / 8  # what float32 can hold beside 1e5
        first, *others = (
            run(graph_attention, {**tensors, "bias": shifted}, graph, backend="cpu")
            for shifted in ((bias + by).requires_grad_() for by in (0.0, 1e5, -1e5))
        )
        for other in others:
            assert_same(other, first, rtol=0, atol=0)


def tolerance_of(dtype):
    return {"rtol": 0.02, "atol": 0.02} if dtype in HALF else {"rtol": 1e-5, "atol": 1e-5}


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_c08_a_row_of_the_smallest_or_largest_numbers_is_the_mean(dtype):
    dtype = DTYPES[dtype]
    for count in COUNTS:
        tensors, graph = one_target(count, dtype)
        exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
        mean = run(graph_attention, exact, graph, backend="eager")
        for extreme, of_bias in itertools.product(("min", "max"), {torch.float32, dtype}):
            bias = torch.full((count, 2), getattr(torch.finfo(of_bias), extreme), dtype=of_bias)
            out, grads = run(graph_attention, tensors, graph, bias=bias, backend="cpu")
            torch.testing.assert_close(out.double(), mean[0], **tolerance_of(dtype))
            for name in ("key", "value"):
                torch.testing.assert_close(
                    grads[name].double(), mean[1][name], **tolerance_of(dtype)
                )


MASKED = {
    "all": lambda position: position >= 0,
    "first half": lambda position: position < position.numel() // 2,
    "second half": lambda position: position >= position.numel() // 2,
    "every other": lambda position: position % 2 == 0,
    "all but one": lambda position: position != position.numel() // 3,
}


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", MASKED)
def test_c09_edges_of_minus_infinity_count_as_absent(masked, dtype):
    """Wherever they lie: a block, or a piece of a cut row, may have nothing else."""
    for count in COUNTS:
        tensors, graph = one_target(count, DTYPES[dtype])
        blocked = MASKED[masked](torch.arange(count))
        bias = torch.randn(count, 2).masked_fill(blocked[:, None], -math.inf).requires_grad_()
        given, cotangent = {**tensors, "bias": bias}, torch.ones(1, 2, 3)
        out, grads = run(graph_attention, given, graph, cotangent, backend="cpu")
        weights = attention_weights(
            tensors["query"], tensors["key"], graph, bias=bias, backend="cpu"
        )
        assert weights[blocked].eq(0).all()
        assert all(grads[name][blocked].eq(0).all() for name in ("key", "value", "bias"))
        if blocked.all():
            assert out.eq(0).all()
            assert grads["query"].eq(0).all()
            continue
        left = {
            name: x.detach().double()[slice(None) if name == "query" else ~blocked].requires_grad_()
            for name, x in given.items()
        }
        of_left = one_target(int((~blocked).sum()), torch.float64)[1]
        expected = run(graph_attention, left, of_left, cotangent, backend="eager")
        tolerance = tolerance_of(DTYPES[dtype])
        torch.testing.assert_close(out.double(), expected[0], **tolerance)
        for name, grad in grads.items():
            grad = grad if name == "query" else grad[~blocked]
            torch.testing.assert_close(grad.double(), expected[1][name], **tolerance)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [DEGREES, HUBS], ids=str)
def test_equal_values_send_no_gradient_through_sharp_scores(case, dtype):
    """Every weight has the same gradient, and what differs from their mean is rounding."""
    tensors = tensors_for(case, heads=2, dim=16, bias=False, dtype=DTYPES[dtype])
    with torch.no_grad():
        tensors["query"].mul_(20)
        tensors["value"].copy_(tensors["value"][:1].clone().expand_as(tensors["value"]))
    out, grads = run(graph_attention, tensors, case.graph(), backend="cpu")
    reached = case.graph().in_degree() > 0
    values = tensors["value"][:1].expand_as(out)
    torch.testing.assert_close(out[reached], values[reached], **tolerance_of(DTYPES[dtype]))
    eps = torch.finfo(torch.promote_types(DTYPES[dtype], torch.float32)).eps
    for name, other in (("query", "key"), ("key", "query")):
        # A gradient of order 1 times a key or query of this size, for each edge of a row.
        terms = max(case.graph().in_degree().max(), case.graph().out_degree().max()).item()
        bound = 32 * eps * math.sqrt(terms) * tensors[other].abs().max().double()
        assert grads[name].abs().max() <= bound, name


@each_isa
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value", "bias"])
def test_contract_7_nan_and_infinity_in_a_neighbour_spread_wherever_it_lies(which, poison):
    for count, at in PLACES:
        tensors, graph = one_target(count, torch.float32)
        tensors["bias"] = torch.randn(count, 2)
        with torch.no_grad():
            tensors["query"].add_(1)
            tensors[which][0 if which == "query" else at, 1] = poison
        out = graph_attention(**tensors, graph=graph, backend="cpu")
        assert not out[0, 1].isfinite().any()
        assert out[0, 0].isfinite().all()


@each_isa
def test_contract_7_nan_spreads_from_a_value_whose_weight_underflows():
    """A weight of zero times NaN, whether its block comes before the largest score or after."""
    found = []
    for count, at in PLACES:
        tensors, graph = one_target(count, torch.float32)
        tensors["value"].detach()[at] = math.nan
        for top in {0, count // 2, count - 1}:
            bias = torch.full((count, 2), -1e4)
            bias[top] = 0.0
            found.append(graph_attention(**tensors, graph=graph, bias=bias, backend="cpu"))
    assert all(out.isnan().all() for out in found)


@each_isa
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, 0x7FC00001),
        (torch.float32, 0x7FC000FF),
        (torch.float32, -1),
        (torch.float64, 0x7FF00000000007A2),  # NA of R
        (torch.float64, -1),
    ],
)
def test_contract_7_nan_of_any_bits_spreads(dtype, bits):
    whole = torch.int32 if dtype == torch.float32 else torch.int64
    nan = torch.tensor([bits], dtype=whole).view(dtype)
    assert nan.isnan()
    graph = Graph(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    query, key = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(2, 1, 1, dtype=dtype)
    bias = torch.stack([nan, torch.zeros(1, dtype=dtype)])
    assert graph_attention(query, key, key, graph, bias=bias, backend="cpu").isnan().all()


# Strides ##########################################################################################


def packed(x):
    """One of three that a projection makes side by side, ``[*, N, 3, H, D]``."""
    return torch.stack([x - 1, x, x + 1], dim=-3).select(-3, 1)


def nodes_first(x):
    """``[*, N, H, D]`` in memory as ``[N, *, H, D]``."""
    return x.movedim(-3, 0).contiguous().movedim(0, -3)


def every_other_row(x):
    return torch.stack([x, x + 1], dim=-3).flatten(-4, -3)[..., ::2, :, :]


def unaligned(x):
    return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)


def one_row_for_all(x):
    return x[..., :1, :, :].expand_as(x)


def one_batch_for_all(x):
    return x.flatten(0, -4)[:1].view(*[1] * (x.dim() - 3), *x.shape[-3:]).expand_as(x)


def heads_last(x):
    return x.mT.contiguous().mT


def columns_of_a_wider_one(x):
    return torch.cat([x, x + 1], dim=-1)[..., : x.size(-1)]


def one_head_for_all(x):
    return x[..., :1, :].expand_as(x)


def one_channel_for_all(x):
    return x[..., :1].expand_as(x)


def batch_reversed_in_memory(x):
    return x.movedim(0, 1).contiguous().movedim(1, 0)


AS_IT_IS = [packed, nodes_first, every_other_row, unaligned, one_row_for_all, one_batch_for_all]
COPIED = [
    heads_last,
    columns_of_a_wider_one,
    one_head_for_all,
    one_channel_for_all,
    batch_reversed_in_memory,
]


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [*AS_IT_IS, *COPIED], ids=lambda function: function.__name__)
def test_any_layout_gives_the_same_bits(layout, dtype):
    case = SHUFFLED
    tensors = tensors_for(
        case, heads=4, key_heads=2, dim=5, value_dim=3, leading=(3, 2), dtype=DTYPES[dtype]
    )
    del tensors["bias"]
    tensors = {name: layout(x.detach()).detach().requires_grad_() for name, x in tensors.items()}
    graph = case.graph()
    cotangent = layout(torch.randn(3, 2, 30, 4, 3).to(DTYPES[dtype]))
    assert all(x.stride() != x.contiguous().stride() for x in tensors.values()) or (
        layout is unaligned
    )
    plain = {
        name: x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, x in tensors.items()
    }
    assert_same(
        run(graph_attention, tensors, graph, cotangent, backend="cpu"),
        run(graph_attention, plain, graph, cotangent.contiguous(), backend="cpu"),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("layout", AS_IT_IS, ids=lambda function: function.__name__)
def test_rows_with_strides_are_not_copied(layout):
    tensors = tensors_for(SHUFFLED, heads=4, dim=5, leading=(2,), dtype=torch.float32)
    tensors = {name: x.detach() for name, x in tensors.items()}
    for name in ("query", "key", "value"):
        tensors[name] = layout(tensors[name]).requires_grad_()
    graph = SHUFFLED.graph()
    _ = graph.src_ptr
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        out = graph_attention(**tensors, graph=graph, backend="cpu")
        out.backward(out.detach())
    names = {event.key for event in recorded.key_averages()}
    assert "graphattn::attention_backward" in names
    assert not names & {"aten::clone", "aten::contiguous", "aten::reshape"}


def test_bias_and_edge_features_of_any_layout():
    tensors = tensors_for(SHUFFLED, heads=3, dim=4, edge_dim=2)
    expected = run(graph_attention, tensors, SHUFFLED.graph(), backend="cpu")
    for name in ("bias", "edge_attr", "edge_weight"):
        tensors[name] = tensors[name].detach().mT.contiguous().mT.requires_grad_()
    actual = run(graph_attention, tensors, SHUFFLED.graph(), backend="cpu")
    assert_same(actual, expected, rtol=0, atol=0)


def test_a_lazily_negated_tensor_is_read_with_its_sign():
    x = torch.randn(30, 2, 3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    plain = x.resolve_neg()
    graph = SHUFFLED.graph()
    assert torch.equal(
        graph_attention(x, x, x, graph, backend="cpu"),
        graph_attention(plain, plain, plain, graph, backend="cpu"),
    )


# Threads and processes ############################################################################

BUSY = GraphCase("busy", torch.randint(2000, (2, 20_000)), 2000, 2000)  # work for many threads


def busy_call(index=0):
    """A forward and a backward pass that use several threads where they may, torch's own do not."""
    generator = torch.Generator().manual_seed(index)
    leaves = [torch.randn(2000, 4, 16, generator=generator).requires_grad_() for _ in range(3)]
    out = graph_attention(*leaves, BUSY.edge_index, backend="cpu")
    return out.detach(), *torch.autograd.grad(out, leaves, out.detach())


def exit_status_of(child, seconds=60):
    """Exit status of a forked process that runs ``child``; it fails when it hangs or raises."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(child())
        finally:
            os._exit(status)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the forked process hung for {seconds} s")


# From 3.12 Python warns of any fork of a process with threads.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
@needs_fork
def test_a_forked_process_runs_after_its_parent_used_threads(set_threads):
    set_threads(4)
    expected = [x.numpy() for x in busy_call()]

    many_edges = torch.randint(2000, (2, 200_000))
    Graph(many_edges, 2000)

    def child():
        assert Graph(many_edges, 2000).num_edges == 200_000
        found = [x.numpy() for x in busy_call()]
        return not all((a == b).all() for a, b in zip(found, expected, strict=True))

    assert exit_status_of(child) == 0
    for found, wanted in zip(busy_call(), expected, strict=True):  # and the parent goes on
        assert (found.numpy() == wanted).all()


class Calls(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return busy_call(index)


@forks
@needs_fork
def test_workers_of_a_data_loader(set_threads):
    set_threads(3)
    expected = [busy_call(index) for index in range(6)]
    loader = DataLoader(
        Calls(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for found, wanted in zip(loader, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_several_python_threads_call_at_once(set_threads):
    set_threads(2)
    expected = [busy_call(index) for index in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(busy_call, range(8)), expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Size #############################################################################################


@linux
@pytest.mark.parametrize("row_stride", [2**29 + 8, 2**31 + 8, 2**32 + 8])
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
        run(graph_attention, apart, graph, far, backend="cpu"),
        run(graph_attention, plain, graph, cotangent, backend="cpu"),
        rtol=0,
        atol=0,
    )


@each_isa
def test_results_larger_than_caches_have_the_bits_of_small_ones():
    """Rows of those are written past the caches."""
    nodes, used, heads, dim = 65_600, 3_000, 8, 32
    assert nodes * heads * dim * 4 > 1 << 26
    edge_index = torch.randint(0, used, (2, 20_000))
    large = [torch.randn(nodes, heads, dim, requires_grad=True) for _ in range(3)]
    small = [x.detach()[:used].clone().requires_grad_() for x in large]
    results = []
    for tensors in (large, small):
        out = graph_attention(*tensors, Graph(edge_index, len(tensors[0])), backend="cpu")
        cotangent = torch.linspace(-1, 1, dim).expand_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, tensors, cotangent)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found[:used], expected)
        assert not found[used:].any()


@linux
def test_c64_batches_that_lie_gigabytes_apart():
    graph = Graph(torch.tensor([[0, 1, 2, 2], [2, 2, 1, 0]]), 3)
    x = torch.randn(3, 3, 2, 4)
    apart = lent(3, 3, 2, 4, stride=(2**32, 8, 4, 1)).copy_(x)
    assert torch.equal(
        graph_attention(apart, apart, apart, graph, backend="cpu"),
        graph_attention(x, x, x, graph, backend="cpu"),
    )


@linux
def test_c64_more_than_2_31_elements_of_key_and_value():
    rows, heads, dim = 2**22, 4, 256  # 2^32 elements
    key = lent(rows, heads, dim, stride=(heads * dim, dim, 1))
    src = torch.tensor([0, rows // 2 - 1, rows // 2, rows // 2 + 1, rows - 1])
    few = torch.randn(5, heads, dim)
    key[src] = few
    query = torch.randn(1, heads, dim)
    graph = Graph(torch.stack([src, torch.zeros(5).long()]), (rows, 1))
    small = Graph(torch.stack([torch.arange(5), torch.zeros(5).long()]), (5, 1))
    assert torch.equal(
        graph_attention(query, key, key, graph, backend="cpu"),
        graph_attention(query, few, few, small, backend="cpu"),
    )


def test_edges_beyond_2_32_draw_bits_of_their_own():
    """No graph of this size is made: the arrays say where its edges would lie."""
    count, heads = len(EDGE_IDS), 6
    query, key = torch.zeros(1, heads, 1), torch.zeros(count, heads, 1)
    value = torch.eye(count)[:, None].expand(count, heads, count).contiguous()
    differ = 0
    for seed in range(20):
        seed = torch.tensor(seed)
        inputs = with_edge_ids([query, key, value, None, None, None], EDGE_IDS)
        out, _, _ = torch.ops.graphattn.attention(*inputs, seed, 1.0, 0.5, "cpu")
        keep = keep_mask(seed, torch.tensor(EDGE_IDS), heads, 0.5)[:, 0]
        assert torch.equal(out[0] > 0, keep.t())
        differ += int((keep[0] != keep[4]).sum())
    assert differ > 0


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
        results.append(torch.ops.graphattn.attention(*inputs, None, 0.5, 0.0, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


HIGH_WATER = """
import torch
from pathlib import Path
from graphattn import Graph, graph_attention

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

def step(query, key, value, graph):
    out = graph_attention(query, key, value, graph, bias=None, backend="cpu")
    out.backward(torch.ones(()).expand_as(out))  # copied by the kernel, as any expanded gradient

torch.set_num_threads(1)
num_nodes, num_edges, heads, dim = 10_000, 1_000_000, 8, 32
warm = torch.zeros(2, heads, dim, requires_grad=True)
step(warm, warm, warm, Graph(torch.tensor([[0], [1]]), 2))
edge_index = torch.randint(num_nodes, (2, num_edges))
tensors = [torch.randn(num_nodes, heads, dim, requires_grad=True) for _ in range(3)]
graph = Graph(edge_index, num_nodes)
_ = graph.src_ptr
Path("/proc/self/clear_refs").write_text("5")
before = peak()
step(*tensors, graph)
print(peak() - before, tensors[0].nbytes, num_edges * heads * 4)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no /proc to read the peak of memory from"
)
def test_c66_memory_is_that_of_the_results():
    """Mean degree 100: out, its gradient and three gradients, and no tensor along edges."""
    extra, one, along_edges = map(int, run_script(HIGH_WATER, OMP_NUM_THREADS="1").split())
    assert along_edges > 3 * one
    assert extra <= 1.2 * 5 * one


def seconds_of(kind, num_edges):
    """Least time that this thread computes a graph, a forward and a backward pass."""
    position = torch.arange(num_edges)
    edge_index = {
        "in-star": torch.stack([position, torch.zeros_like(position)]),
        "out-star": torch.stack([torch.zeros_like(position), position]),
        "chain": torch.stack([position, position + 1]),
        "few nodes": torch.stack([position % 3, position * 7 % 5]),
        "few edges": torch.stack([position[:8], position[:8]]),
        "power law": (torch.rand(2, num_edges).pow(6) * num_edges).long(),
    }[kind]
    x = torch.randn(num_edges + 1, 1, 4, requires_grad=True)
    seconds = []
    for _ in range(2):
        start = time.thread_time()
        out = graph_attention(x, x, x, Graph(edge_index, num_edges + 1), backend="cpu")
        torch.autograd.grad(out, x, x.detach())
        seconds.append(time.thread_time() - start)
    return min(seconds)


@pytest.mark.parametrize(
    "kind", ["in-star", "out-star", "chain", "few nodes", "few edges", "power law"]
)
def test_c68_64_times_the_graph_is_not_4096_times_the_work(kind):
    # Time of a thread, not of a clock. Caches allow for some more than 64, nothing for 160.
    assert seconds_of(kind, 640_000) < 160 * seconds_of(kind, 10_000)
