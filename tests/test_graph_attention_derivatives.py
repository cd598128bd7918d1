"""Derivatives, memory and compilation of graphattn.graph_attention."""

import gc
import os
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphattn import Graph, attention_weights, dense_attention, graph_attention
from graphattn.testing import (
    GraphCase,
    edge_reference,
)
from operands import (
    EXACT,
    PARALLEL,
    SHUFFLED,
    SMALL,
    ZOO,
    run,
    tensors_for,
)

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
    budget = 1 << 20  # a slice of gathered rows; [E, H, D] has 24 times as many
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
