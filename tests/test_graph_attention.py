"""graphattn.graph_attention: every backend against its definition, the laws, the refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphattn import Graph, attention_weights, backends, dense_attention, graph_attention
from graphattn.testing import (
    GraphCase,
    assert_close_to_reference,
    assert_edge_order_is_free,
    assert_node_order_is_free,
    edge_reference,
    plain_attention,
    zoo,
)
from operands import (
    BACKENDS,
    EXACT,
    SHAPES,
    SHUFFLED,
    SMALL,
    ZOO,
    assert_right,
    assert_same,
    run,
    tensors_for,
)

# Against the definition ###########################################################################


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


@pytest.mark.parametrize("name", BACKENDS)
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
    "device of value": (
        refusal(value=X.to("meta")),
        ValueError,
        r"value is on meta, but the graph is on cpu\. Move one of them",
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


MPS = torch.device("mps")


def test_scatter_names_a_device_it_has_no_kernels_for():
    if backends.missing("scatter") is None:
        with pytest.raises(ValueError, match="torch_scatter has no kernels for device 'mps'"):
            backends.choose("scatter", MPS, torch.float32, function="graph_attention")
    assert backends.unsupported("eager", MPS, torch.float32) == []
