"""torch.ops.graphattn: what torch expects of an operator, transforms, compilation, memory."""

import gc

import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from graphattn import Graph, attention_weights, backends, graph_attention
from graphattn.nn import GraphAttentionConv, GraphMultiheadAttention, GraphTransformerLayer
from graphattn.testing import GraphCase
from operands import EXACT, PARALLEL, SHUFFLED, SMALL, operator_inputs, tensors_for

pytestmark = pytest.mark.skipif(
    backends.missing("cpu") is not None, reason=f"backend cpu: {backends.missing('cpu')}"
)

operator = torch.ops.graphattn.attention
operator_backward = torch.ops.graphattn.attention_backward
NUM_INPUTS = 6  # query, key, value, bias, query_edge, edge_attr


def detached(arguments):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


# What torch expects of an operator ################################################################

RANDOM = SMALL["disjoint batch"]
VARIANTS = {
    "bias": (RANDOM, {}),
    "no bias, grouped, value_dim": (
        RANDOM,
        {"bias": False, "heads": 4, "key_heads": 2, "value_dim": 7},
    ),
    "edge features": (RANDOM, {"edge_dim": 3}),
    "dropout": (RANDOM, {"seed": 7, "dropout": 0.3}),
    "weights": (RANDOM, {"value": False, "edge_dim": 2}),
    "leading, bias too": (RANDOM, {"leading": (2,), "bias_leading": True}),
    "leading 2 x 3": (RANDOM, {"leading": (2, 3), "edge_dim": 1}),
    "leading 0": (RANDOM, {"leading": (0,), "edge_dim": 1}),
    "float64": (RANDOM, {"dtype": torch.float64, "edge_dim": 2}),
    "bfloat16": (RANDOM, {"dtype": torch.bfloat16, "edge_dim": 2}),
    "edges in order": (SMALL["chain"], {}),
    "no edges": (SMALL["no edges"], {"edge_dim": 2}),
    "no nodes": (SMALL["no nodes"], {"edge_dim": 2}),
    "no edges, weights": (SMALL["no edges"], {"value": False}),
    "two sides": (SMALL["more targets than sources"], {"edge_dim": 2}),
}


def arguments_of(variant):
    case, shape = VARIANTS[variant]
    return operator_inputs(case, **{"dtype": torch.float32, **shape})


def backward_arguments_of(variant, needs=None):
    arguments = detached(arguments_of(variant))
    out, mixed, softmax = operator(*arguments)
    given = [x is not None for x in arguments[:NUM_INPUTS]]
    needs = given if needs is None else [a and b for a, b in zip(given, needs, strict=True)]
    grad_mixed = torch.randn_like(mixed) if arguments[5] is not None else None
    return [torch.randn_like(out), grad_mixed, *arguments, softmax, needs]


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant):
    tolerance = {"atol": 1e-2, "rtol": 2e-2} if variant == "bfloat16" else {}
    library.opcheck(operator, arguments_of(variant), **tolerance)
    library.opcheck(operator, detached(arguments_of(variant)))
    library.opcheck(operator_backward, backward_arguments_of(variant))


def described(tensors):
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]


NEEDS = {
    "all": [True] * 6,
    "query": [True, False, False, False, False, False],
    "key and bias": [False, True, False, True, False, False],
    "value and edge features": [False, False, True, False, True, True],
    "none": [False] * 6,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_fakes_have_the_shapes_strides_and_dtypes_of_results(variant):
    arguments = detached(arguments_of(variant))
    backwards = [backward_arguments_of(variant, needs) for needs in NEEDS.values()]
    real = [operator(*arguments), *(operator_backward(*each) for each in backwards)]
    with FakeTensorMode() as mode:

        def faked(arguments):
            return [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]

        fake = [
            operator(*faked(arguments)),
            *(operator_backward(*faked(each)) for each in backwards),
        ]
    assert list(map(described, fake)) == list(map(described, real))


def test_outputs_have_the_documented_dtypes():
    for dtype, wide in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ):
        arguments = operator_inputs(RANDOM, edge_dim=2, dtype=dtype)
        assert [x.dtype for x in operator(*arguments)] == [dtype, wide, wide]


def test_the_operator_under_autocast_casts_query_key_and_value():
    arguments = operator_inputs(RANDOM, edge_dim=2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, mixed, softmax = operator(*arguments)
    assert out.dtype == torch.bfloat16
    assert mixed.dtype == softmax.dtype == torch.float32
    low = [x.detach().bfloat16() for x in arguments[:3]]
    assert torch.equal(out, operator(*low, *arguments[3:])[0])
    wanted = arguments[:NUM_INPUTS]
    grads = torch.autograd.grad([out.float().sum() + mixed.sum()], wanted)
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in grads)
    double = operator_inputs(RANDOM, edge_dim=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert operator(*double)[0].dtype == torch.float64


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 2, "key_heads": 1, "dim": 2, "edge_dim": 2},
        {"dim": 2, "edge_dim": 1, "seed": 5, "dropout": 0.4},
        {"heads": 1, "dim": 2, "edge_dim": 1, "leading": (2,), "bias_leading": True},
        {"heads": 3, "dim": 1, "value_dim": 2},
        {"dim": 2, "value": False},
    ],
)
def test_first_and_second_derivatives_of_the_operator_itself(shape):
    arguments = operator_inputs(PARALLEL, **shape)

    def outputs(*wanted):
        given = iter(wanted)
        inputs = [None if x is None else next(given) for x in arguments[:NUM_INPUTS]]
        out, mixed, softmax = operator(*inputs, *arguments[NUM_INPUTS:])
        assert not softmax.requires_grad
        return (out, mixed) if mixed.numel() > 0 else out

    wanted = tuple(x for x in arguments[:NUM_INPUTS] if x is not None)
    assert gradcheck(outputs, wanted)
    assert gradgradcheck(outputs, wanted)


@pytest.mark.parametrize("which", ["out", "mixed"])
def test_one_output_alone_has_a_gradient(which):
    arguments = operator_inputs(SHUFFLED, edge_dim=2)
    out, mixed, _ = operator(*arguments)
    for create_graph in (False, True):
        grads = torch.autograd.grad(
            {"out": out, "mixed": mixed}[which].sin().sum(),
            arguments[:NUM_INPUTS],
            create_graph=create_graph,
            retain_graph=True,
            materialize_grads=True,
        )
        assert (grads[2].abs().sum() > 0) == (which == "out")
        assert all(x.isfinite().all() for x in grads)
        if not create_graph:
            first = grads
    torch.testing.assert_close(grads, first, **EXACT)


def test_edges_are_sorted_by_source_only_when_a_gradient_will_need_it():
    tensors, graph = tensors_for(SHUFFLED), SHUFFLED.graph()
    with torch.no_grad():
        graph_attention(**tensors, graph=graph, backend="cpu")
    graph_attention(**{k: v.detach() for k, v in tensors.items()}, graph=graph, backend="cpu")
    of_query = {k: v.detach() for k, v in tensors.items()} | {"query": tensors["query"]}
    out = graph_attention(**of_query, graph=graph, backend="cpu")
    (found,) = torch.autograd.grad(out.sum(), tensors["query"])
    assert "_by_source" not in graph._kept
    out = graph_attention(**tensors, graph=graph, backend="cpu")
    assert "_by_source" in graph._kept
    assert torch.equal(found, torch.autograd.grad(out.sum(), tensors["query"])[0])


def test_the_operator_without_arrays_by_source_refuses_their_gradients():
    arguments = operator_inputs(SHUFFLED)
    arguments[9:12] = [None] * 3
    query, *rest = detached(arguments)
    for wanted in (query, rest[0]):
        wanted.requires_grad_()
        out, _, _ = operator(query, *rest)
        if wanted is query:
            assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()
        else:
            with pytest.raises(
                ValueError, match="gradients of key, value, bias and edge_attr need"
            ):
                torch.autograd.grad(out.sum(), wanted)


# torch.func #######################################################################################


def attend(query, key, value, bias=None, backend="cpu", **options):
    return graph_attention(
        query, key, value, SHUFFLED.graph(), bias=bias, backend=backend, **options
    )


def loss(query, key, value, bias, backend="cpu"):
    return attend(query, key, value, bias, backend).pow(3).sum()


def batched(*sizes, **shape):
    """Query, key, value and bias with leading dimensions, nothing asks for a gradient."""
    tensors = tensors_for(SHUFFLED, leading=sizes, bias_leading=True, **shape)
    return [x.detach() for x in tensors.values()]


def test_func_grad_and_vjp_equal_autograd():
    given = batched()
    leaves = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(grad(loss, argnums=(0, 1, 2, 3))(*given), expected, **EXACT)
    value, pull = vjp(loss, *given)
    torch.testing.assert_close(value, loss(*given), **EXACT)
    torch.testing.assert_close(pull(torch.ones_like(value)), expected, **EXACT)


def test_func_grad_of_grad_equals_autograd():
    given = batched(dim=2)

    def penalty(query):
        return grad(loss)(query, *given[1:]).pow(2).sum()

    leaf = given[0].clone().requires_grad_()
    first = torch.autograd.grad(loss(leaf, *given[1:]), leaf, create_graph=True)[0]
    expected = torch.autograd.grad(first.pow(2).sum(), leaf)[0]
    torch.testing.assert_close(grad(penalty)(given[0]), expected, **EXACT)


def test_func_grad_of_a_module():
    layer = GraphAttentionConv(4, 3, heads=2, edge_dim=2, backend="cpu").double()
    x, edge_attr = torch.randn(30, 4, dtype=torch.float64), torch.randn(200, 2, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def objective(parameters):
        return functional_call(layer, parameters, (x, SHUFFLED.graph(), edge_attr)).pow(2).sum()

    found = grad(objective)(parameters)
    layer(x, SHUFFLED.graph(), edge_attr).pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, **EXACT)


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [
        (1, torch.Tensor.float, "query, key and value must have one dtype"),
        (2, torch.Tensor.half, "query, key and value must have one dtype"),
        (4, torch.Tensor.float, r"query_edge must be torch\.float64"),
        (6, torch.Tensor.int, "the arrays of the graph must be int64"),
        (8, torch.Tensor.int, "the arrays of the graph must be int64"),
        (12, lambda seed: None, "dropout needs a seed"),
    ],
)
def test_the_operator_refuses_what_it_would_misread(place, change, text):
    arguments = detached(operator_inputs(SHUFFLED, edge_dim=2, seed=1, dropout=0.5))
    arguments[place] = change(arguments[place])
    with pytest.raises((TypeError, ValueError), match=text):
        operator(*arguments)


def test_a_second_derivative_where_mixed_has_nothing():
    """Its gradient arrives all the same when a caller of the operator sums all outputs."""
    query, *rest = operator_inputs(SHUFFLED)
    out, mixed, _ = operator(query, *rest)
    (first,) = torch.autograd.grad(out.pow(2).sum() + mixed.sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), query)
    assert second.abs().sum() > 0
    (none,) = torch.autograd.grad(operator(query, *rest)[1].sum(), query, create_graph=True)
    assert none.eq(0).all()


@pytest.mark.parametrize("transform", [jacrev, lambda f: vmap(grad(f))])
def test_vmap_of_second_derivatives_is_refused(transform):
    """torch.func keeps the way to second derivatives open, and that has no rule for vmap."""
    with pytest.raises(RuntimeError, match="vmap"):
        transform(loss)(*batched(3))


@pytest.mark.parametrize(
    "in_dims",
    [
        (0, 0, 0, 0),
        (0, None, None, None),
        (None, 0, None, None),
        (None, None, 0, None),
        (None, None, None, 0),
        (1, 2, 0, 1),
        (-1, 3, 2, -1),
    ],
)
def test_vmap_over_query_key_value_and_bias_equals_a_loop(in_dims):
    size = 3
    rows = batched(size, heads=4, key_heads=2, dim=5, value_dim=2)
    given = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(rows, in_dims, strict=True)
    ]
    alone = [
        attend(*(x[0 if dim is None else i] for x, dim in zip(rows, in_dims, strict=True)))
        for i in range(size)
    ]
    assert torch.equal(vmap(attend, in_dims=in_dims)(*given), torch.stack(alone))


def test_vmap_of_edge_features_that_all_share_equals_a_loop():
    query, key, value, _ = batched(3)
    features = {
        name: tensors_for(SHUFFLED, edge_dim=2)[name].detach()
        for name in ("edge_attr", "edge_weight")
    }

    def with_features(*given):
        return attend(*given, **features)

    alone = [with_features(*each) for each in zip(query, key, value, strict=True)]
    torch.testing.assert_close(vmap(with_features)(query, key, value), torch.stack(alone), **EXACT)


def test_vmap_of_weights_and_of_vmap():
    query, key, value, bias = batched(2, 3)

    def weights(query, key, bias):
        return attention_weights(query, key, SHUFFLED.graph(), bias=bias, backend="cpu")

    expected = weights(query, key, bias)
    assert torch.equal(vmap(vmap(weights))(query, key, bias), expected)
    expected = attend(query, key, value, bias)
    assert torch.equal(vmap(vmap(attend))(query, key, value, bias), expected)


@pytest.mark.parametrize("in_dim", [0, None])
def test_vmap_over_query_with_leading_dimensions_and_a_bias_without(in_dim):
    query, key, value, _ = batched(3, 2)
    bias = batched(3)[3] if in_dim == 0 else batched()[3]
    alone = [
        attend(query[i], key[i], value[i], bias if in_dim is None else bias[i]) for i in range(3)
    ]
    found = vmap(attend, in_dims=(0, 0, 0, in_dim))(query, key, value, bias)
    torch.testing.assert_close(found, torch.stack(alone), **EXACT)


@pytest.mark.parametrize("wanted", ["all", "key", "value", "bias"])
def test_autograd_through_vmap_equals_autograd_of_a_loop(wanted):
    names = ("query", "key", "value", "bias")
    given = [
        x.requires_grad_(wanted in ("all", name)) for name, x in zip(names, batched(3), strict=True)
    ]
    leaves = [x for x in given if x.requires_grad]
    found = torch.autograd.grad(vmap(attend)(*given).pow(3).sum(), leaves)
    alone = torch.stack([attend(*each) for each in zip(*given, strict=True)])
    torch.testing.assert_close(found, torch.autograd.grad(alone.pow(3).sum(), leaves), **EXACT)


def test_autograd_through_vmap_over_query_alone():
    query, key, value, bias = batched(3)
    query.requires_grad_()
    found = torch.autograd.grad(
        vmap(lambda q: attend(q, key[0], value[0], bias[0]))(query).pow(3).sum(), query
    )
    alone = torch.stack([attend(q, key[0], value[0], bias[0]) for q in query])
    torch.testing.assert_close(found, torch.autograd.grad(alone.pow(3).sum(), query), **EXACT)


def test_vmap_over_edge_features_or_masks_is_refused():
    query, key, value, _ = batched()
    rows = tensors_for(SHUFFLED, edge_dim=2)
    edge_weight = rows["edge_weight"].detach()

    def with_features(edge_attr):
        return attend(query, key, value, edge_attr=edge_attr, edge_weight=edge_weight)

    text = r"torch\.func\.vmap goes over query, key, value and bias; edge features, the graph and"
    with pytest.raises(NotImplementedError, match=text):
        vmap(with_features)(rows["edge_attr"].detach().expand(3, -1, -1))
    with pytest.raises(NotImplementedError, match=text):
        vmap(lambda q: attend(q, key, value, dropout=0.5), randomness="different")(
            query.expand(3, -1, -1, -1)
        )


def test_vmap_over_the_graph_is_refused():
    query, key, value, _ = batched()
    edge_index = SHUFFLED.edge_index.expand(3, -1, -1)
    with pytest.raises((NotImplementedError, TypeError), match="vmap"):
        vmap(lambda edges: graph_attention(query, key, value, edges, backend="cpu"))(edge_index)


def test_forward_mode_is_refused():
    query, key, value, _ = batched()
    text = "implement the jvp function"
    with pytest.raises(NotImplementedError, match=text):
        jvp(lambda x: attend(x, key, value), (query,), (query,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        attend(forward_ad.make_dual(query, query), key, value)


# Compilation ######################################################################################

SIZES = [(6, 12), (11, 40), (7, 0), (30, 200)]


@pytest.fixture
def compiled():
    """``compiled(function)`` counts how often it is compiled, into ``aot_eager``."""
    torch._dynamo.reset()
    counters = []

    def compile_and_count(function):
        counters.append(CompileCounterWithBackend("aot_eager"))
        return torch.compile(function, fullgraph=True, dynamic=True, backend=counters[-1])

    yield compile_and_count
    torch._dynamo.reset()
    for counter in counters:
        assert 1 <= counter.frame_count <= 4  # sizes fixed, free, and E = 0


def random_graph(num_nodes, num_edges):
    """Never in order of targets, when there are edges."""
    edge_index = torch.randint(num_nodes, (2, num_edges))
    edge_index[1, :2] = torch.tensor([1, 0])[:num_edges]
    return edge_index


def assert_compiled_equals_eager_mode(compiled, function, leaves, *inputs, **options):
    results = []
    for call in (compiled, function):
        torch.manual_seed(3)
        out = call(*inputs, **options)
        cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        results.append((out, torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)))
    torch.testing.assert_close(*results)


compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@compiles
def test_c56_graph_attention_compiles_for_changing_sizes(compiled):
    function = compiled(graph_attention)
    for num_nodes, num_edges in SIZES:
        graph = Graph(random_graph(num_nodes, num_edges), num_nodes)
        case = GraphCase("random", graph.edge_index, num_nodes, num_nodes)
        tensors = tensors_for(case, edge_dim=3, dtype=torch.float32)
        assert_compiled_equals_eager_mode(
            function,
            graph_attention,
            list(tensors.values()),
            graph=graph,
            dropout=0.5,
            backend="cpu",
            **tensors,
        )


@compiles
def test_c56_attention_weights_compile_for_changing_sizes(compiled):
    function = compiled(attention_weights)
    for num_nodes, num_edges in SIZES:
        graph = Graph(random_graph(num_nodes, num_edges), num_nodes)
        x = torch.randn(num_nodes, 2, 4, requires_grad=True)
        assert_compiled_equals_eager_mode(
            function, attention_weights, [x], x, x, graph, backend="cpu"
        )


@compiles
def test_c56_inference_compiles_for_changing_sizes(compiled):
    function = compiled(graph_attention)
    for num_nodes, num_edges in SIZES:
        graph = Graph(random_graph(num_nodes, num_edges), num_nodes)
        x = torch.randn(num_nodes, 2, 4)
        with torch.no_grad():
            found = function(x, x, x, graph, backend="cpu")
        torch.testing.assert_close(found, graph_attention(x, x, x, graph, backend="cpu"))


@compiles
def test_c56_layers_compile_for_changing_sizes(compiled):
    conv = GraphAttentionConv(8, 4, heads=2, edge_dim=3, dropout=0.3, backend="cpu")
    function = compiled(conv)
    for num_nodes, num_edges in SIZES:
        x = torch.randn(num_nodes, 8, requires_grad=True)
        edge_attr = torch.randn(num_edges, 3, requires_grad=True)
        leaves = [x, edge_attr, *conv.parameters()]
        assert_compiled_equals_eager_mode(
            function, conv, leaves, x, random_graph(num_nodes, num_edges), edge_attr
        )


@compiles
@pytest.mark.parametrize(
    "layer",
    [
        GraphAttentionConv(8, 4, heads=2, backend="cpu"),
        GraphMultiheadAttention(8, 2, backend="cpu"),
        GraphTransformerLayer(8, 2, backend="cpu"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_c66_a_compiled_layer_calls_the_operator(layer):
    """And not the messages of PyG, one for each edge, which would give the same numbers."""
    called = []

    def record(module, _):
        called.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch._dynamo.reset()
    x, edge_index = torch.randn(6, 8), random_graph(6, 12)
    inputs = (x, x, x) if isinstance(layer, GraphMultiheadAttention) else (x,)
    torch.compile(layer, fullgraph=True, backend=record)(*inputs, edge_index)
    assert called.count("graphattn.attention") == 1


@compiles
def test_c56_a_transformer_layer_compiles_for_changing_sizes(compiled):
    layer = GraphTransformerLayer(8, 2, dropout=0.0)
    function = compiled(layer)
    for num_nodes, num_edges in SIZES:
        x = torch.randn(num_nodes, 8, requires_grad=True)
        assert_compiled_equals_eager_mode(
            function, layer, [x, *layer.parameters()], x, random_graph(num_nodes, num_edges)
        )


@compiles
def test_c56_compiles_under_autocast(compiled):
    graph = SHUFFLED.graph()

    def both(x):
        with torch.autocast("cpu", torch.bfloat16):
            return graph_attention(x, x, x, graph, backend="cpu")

    x = torch.randn(30, 2, 4, requires_grad=True)
    found = compiled(both)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, both(x))
    torch.testing.assert_close(
        torch.autograd.grad(found.float().sum(), x), torch.autograd.grad(both(x).float().sum(), x)
    )


# Memory ###########################################################################################


def kept_for_backward(function):
    """Sizes of what autograd keeps, by the memory that it lies in."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = function()
    assert result.requires_grad
    return {x.untyped_storage().data_ptr(): x.numel() for x in saved}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_c66_nothing_of_edges_times_heads_is_kept_for_backward(dropout):
    num_nodes, num_edges, heads = 50, 5000, 7
    case = GraphCase("many edges", torch.randint(num_nodes, (2, num_edges)), num_nodes, num_nodes)
    tensors = tensors_for(case, heads=heads, dim=4, bias=False, dtype=torch.float32)
    graph = case.graph()
    kept = kept_for_backward(
        lambda: graph_attention(**tensors, graph=graph, dropout=dropout, backend="cpu")
    )
    assert max(kept.values()) == num_edges  # the index arrays
    own = {x.untyped_storage().data_ptr() for x in tensors.values()}
    own |= {x.untyped_storage().data_ptr() for x in graph._by_source}
    own |= {x.untyped_storage().data_ptr() for x in (graph.dst_ptr, graph.src_index, graph.edge_id)}
    new = [size for place, size in kept.items() if place not in own]
    assert sorted(new) == ([1] if dropout else []) + [num_nodes * heads * 2]  # seed, softmax


def test_c48_memory_of_second_derivatives_is_flat_over_100_steps():
    case, graph = SHUFFLED, SHUFFLED.graph()
    tensors = tensors_for(case, edge_dim=2)
    values = list(tensors.values())

    def step():
        out = graph_attention(**tensors, graph=graph, dropout=0.2, backend="cpu").sin().sum()
        first = torch.autograd.grad(out, values, create_graph=True)
        torch.autograd.grad(sum(x.pow(2).sum() for x in first), values, retain_graph=True)
        torch.autograd.grad(out, values)

    def count():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()  # reference counts alone must free everything
    try:
        before = count()
        for _ in range(100):
            step()
        assert count() <= before
    finally:
        gc.enable()


def test_c48_backward_twice_gives_the_same_bits():
    tensors = tensors_for(SHUFFLED, edge_dim=2, dtype=torch.float32)
    out = graph_attention(**tensors, graph=SHUFFLED.graph(), dropout=0.5, backend="cpu").sum()
    values = list(tensors.values())
    first = torch.autograd.grad(out, values, retain_graph=True)
    again = torch.autograd.grad(out, values, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # The differentiable backward draws the same mask.
    exact = torch.autograd.grad(out, values, create_graph=True)
    torch.testing.assert_close(exact, first)


def test_an_input_changed_in_place_after_the_forward_pass_is_noticed():
    tensors = tensors_for(SHUFFLED)
    scaled = {name: x * 1 for name, x in tensors.items()}
    out = graph_attention(**scaled, graph=SHUFFLED.graph(), backend="cpu")
    with torch.no_grad():
        scaled["key"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
