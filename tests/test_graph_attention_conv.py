"""GraphAttentionConv against PyG's TransformerConv, and each place where it means to differ."""

from __future__ import annotations

import copy
import importlib
import io
import itertools
import math
import pickle
import re
import sys
import types
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import HeteroConv, Linear, TransformerConv, to_hetero
from torch_geometric.nn.aggr import MaxAggregation, SoftmaxAggregation, SumAggregation
from torch_geometric.utils import k_hop_subgraph

import graphattn.nn.attention as attention_module
from graphattn import Graph, edge_softmax
from graphattn.backends import missing
from graphattn.nn import GraphAttentionConv
from graphattn.testing import GraphCase, zoo

ZOO = {case.name: case for case in zoo()}
# Through the operator on each backend, and through PyG's message passing.
PATHS = ["eager", "messages", *(["scatter"] if missing("scatter") is None else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

TRIANGLE = torch.tensor([[0, 1, 2, 0, 3, 3], [1, 2, 0, 2, 2, 0]])  # four nodes, 1 and 3 apart


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


def watch(conv: nn.Module) -> nn.Module:
    """Makes a layer send messages, by a hook that does nothing."""
    conv.register_message_forward_hook(lambda module, inputs, output: None)
    return conv


def make(path: str = "eager", *args: Any, **options: Any) -> GraphAttentionConv:
    conv = GraphAttentionConv(*args, **options, backend="auto" if path == "messages" else path)
    return watch(conv) if path == "messages" else conv


def assert_equal_to(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to 1e-5 in float32 and 1e-10 in float64, relative to the largest number there is."""
    size = expected.detach().abs().max().clamp(min=1.0).item() if expected.numel() else 1.0
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0.0,
        atol=TOLERANCE[expected.dtype] * size,
        msg=lambda text: f"{what}: {text}",
    )


def assert_same_numbers(
    ours: nn.Module,
    theirs: nn.Module,
    leaves: list[Tensor],
    *inputs: Any,
    their_inputs: tuple[Any, ...] | None = None,
) -> None:
    """Same output, and same gradients of ``leaves`` and of every parameter."""
    gradients, outputs = [], []
    for module, given_inputs in ((theirs, their_inputs or inputs), (ours, inputs)):
        module.zero_grad()
        for leaf in leaves:
            leaf.grad = None
        out = module(*given_inputs)
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        (out * weight).sum().backward()
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        found |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
        gradients.append(found)
        outputs.append(out.detach())
    assert_equal_to(outputs[1], outputs[0], "output")
    for name, gradient in gradients[1].items():
        assert gradient is not None, f"{name} has no gradient"
        assert_equal_to(gradient, gradients[0][name], f"gradient of {name}")


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def pair_of_layers(
    path: str, *args: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[GraphAttentionConv, TransformerConv]:
    theirs = TransformerConv(*args, **options).to(dtype)
    ours = make(path, *args, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def compare(
    case: GraphCase, path: str, dtype: torch.dtype, *, heads: int = 2, **options: Any
) -> None:
    """Layer against layer on one graph; a pair of inputs where the graph has two sides."""
    edge_dim = options.get("edge_dim")
    ours, theirs = pair_of_layers(path, (5, 3), 4, heads, dtype=dtype, **options)
    x = (leaf(case.num_src, 5, dtype=dtype), leaf(case.num_dst, 3, dtype=dtype))
    leaves, edges = list(x), []
    if edge_dim is not None:
        edges = [leaf(case.edge_index.size(1), edge_dim, dtype=dtype)]
    edge_index = case.edge_index
    if options.get("flow") == "target_to_source":
        edge_index = edge_index.flip(0)
    assert_same_numbers(ours, theirs, leaves + edges, x, edge_index, *edges)


# The same numbers #################################################################################

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one head": {"heads": 1},
    "edge features, no bias": {"edge_dim": 3, "bias": False},
    "mean of heads, gate": {"concat": False, "beta": True, "heads": 3},
    "gate, edge features": {"beta": True, "edge_dim": 1},
    "no skip, reversed": {"root_weight": False, "flow": "target_to_source", "edge_dim": 2},
}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("name", list(ZOO))
def test_equals_transformer_conv_on_the_zoo(
    name: str, variant: str, path: str, dtype: torch.dtype
) -> None:
    compare(ZOO[name], path, dtype, **VARIANTS[variant])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_equals_transformer_conv_for_every_option(
    heads: int, edge_dim: int | None, path: str
) -> None:
    flags = ("concat", "beta", "root_weight", "bias")
    for values in itertools.product((True, False), repeat=len(flags)):
        options = dict(zip(flags, values, strict=True))
        options |= {"edge_dim": edge_dim, "heads": heads}
        for dtype in TOLERANCE:
            compare(ZOO["more targets than sources"], path, dtype, **options)
            compare(ZOO["shuffled"], path, dtype, **options, flow="target_to_source")


@pytest.mark.parametrize("path", PATHS)
def test_one_tensor_for_both_sides(path: str) -> None:
    ours, theirs = pair_of_layers(path, 5, 4, 3, beta=True)
    x = leaf(4, 5)
    assert_same_numbers(ours, theirs, [x], x, TRIANGLE)
    ours, theirs = pair_of_layers(path, [5, 5], 4, 3)
    assert_same_numbers(ours, theirs, [x], [x, x], TRIANGLE)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_transformer_conv_on_random_graphs(data: st.DataObject) -> None:
    num_src, num_dst = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    edges = data.draw(
        st.lists(st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1)), max_size=20)
    )
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    compare(
        GraphCase("random", edge_index, num_src, num_dst),
        data.draw(st.sampled_from(PATHS)),
        torch.float64,
        heads=data.draw(st.integers(1, 3)),
        edge_dim=data.draw(st.sampled_from([None, 1, 2])),
        concat=data.draw(st.booleans()),
        beta=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("path", PATHS)
def test_same_seed_same_parameters(path: str) -> None:
    options = {"heads": 2, "edge_dim": 3, "beta": True}
    torch.manual_seed(3)
    theirs = TransformerConv(5, 4, **options)
    torch.manual_seed(3)
    ours = make(path, 5, 4, **options)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    theirs.reset_parameters()
    ours.reset_parameters()
    for name, parameter in ours.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} was not drawn anew"


@pytest.mark.parametrize("path", PATHS)
def test_c50_lazy_channels_materialise_in_one_forward(path: str) -> None:
    x, edge_attr = leaf(4, 5), leaf(6, 3)
    ours = make(path, (-1, -1), 4, 2, edge_dim=-1, beta=True).double()
    theirs = TransformerConv((-1, -1), 4, 2, edge_dim=-1, beta=True).double()
    theirs(x, TRIANGLE, edge_attr)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_numbers(ours, theirs, [x, edge_attr], x, TRIANGLE, edge_attr)

    # A branch that has no edges in the first batch is materialised all the same.
    lazy = make(path, -1, 4, 2, edge_dim=-1)
    lazy(torch.randn(4, 5), TRIANGLE[:, :0], torch.randn(0, 3))
    shapes = {name: tuple(weight.shape) for name, weight in lazy.named_parameters()}
    assert shapes["lin_edge.weight"] == (8, 3)
    assert all(shapes[f"lin_{part}.weight"] == (8, 5) for part in ("key", "query", "value", "skip"))
    # And so is one whose first use is to load a state_dict, or to lend an uninitialised one.
    fresh = make(path, -1, 4, 2, edge_dim=-1)
    fresh.load_state_dict(make(path, -1, 4, 2, edge_dim=-1).state_dict(), strict=True)
    fresh.load_state_dict(lazy.state_dict(), strict=True)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    assert torch.equal(fresh(x, TRIANGLE, edge_attr), lazy(x, TRIANGLE, edge_attr))


# Ways to give the edges ###########################################################################


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("with_size", [True, False])
@pytest.mark.parametrize(
    "name", ["shuffled", "more targets than sources", "no edges", "self-loops"]
)
def test_edge_index_class(
    name: str, with_size: bool, flow: str, sort_order: str | None, path: str
) -> None:
    case = ZOO[name]
    ours, theirs = pair_of_layers(path, (5, 3), 4, 2, edge_dim=2, flow=flow)
    x = leaf(case.num_src, 5), leaf(case.num_dst, 3)
    plain, sides = case.edge_index, (case.num_src, case.num_dst)
    if flow == "target_to_source":
        plain, sides = plain.flip(0), sides[::-1]
    if sort_order is not None:
        plain = plain[:, plain[0 if sort_order == "row" else 1].argsort(stable=True)]
    edge_index = EdgeIndex(plain, sparse_size=sides if with_size else None, sort_order=sort_order)
    edge_attr = leaf(plain.size(1), 2)
    # PyG takes the plain tensor, as it fails where an EdgeIndex does not know its size.
    assert_same_numbers(
        ours,
        theirs,
        [*x, edge_attr],
        x,
        edge_index,
        edge_attr,
        their_inputs=(x, edge_index if with_size else plain, edge_attr),
    )
    _, (returned, alpha) = ours(x, edge_index, edge_attr, return_attention_weights=True)
    assert returned is edge_index
    assert_equal_to(alpha, theirs(x, plain, edge_attr, return_attention_weights=True)[1][1])


def adjacency(layout: str, edge_index: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """``adj_t [num_dst, num_src]``, values as given for each edge in the order of ``layout``."""
    src, dst = edge_index
    shape = (size[1], size[0], *values.shape[1:])
    if layout == "coo":
        order = (dst * size[0] + src).argsort()
        indices = torch.stack([dst, src])[:, order]
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=True, check_invariants=True
        )
    make, row, col, num_rows = (
        (torch.sparse_csr_tensor, dst, src, size[1])
        if layout == "csr"
        else (torch.sparse_csc_tensor, src, dst, size[0])
    )
    order = (row * 1000 + col).argsort()
    pointer = nn.functional.pad(row.bincount(minlength=num_rows).cumsum(0), (1, 0))
    return make(pointer, col[order], values, shape, check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("features", [None, "values", "given"])
@pytest.mark.parametrize("name", ["complete", "chain", "bipartite", "no edges"])
def test_sparse_adj_t(name: str, features: str | None, layout: str, path: str) -> None:
    if name == "bipartite":
        case = GraphCase(name, torch.tensor([[2, 0, 1, 2, 0], [1, 2, 0, 0, 1]]), 3, 5)
    else:
        case = ZOO[name]
    num_edges, size = case.edge_index.size(1), (case.num_src, case.num_dst)
    ours, theirs = pair_of_layers(path, (5, 3), 4, 2, edge_dim=None if features is None else 2)
    x = leaf(case.num_src, 5), leaf(case.num_dst, 3)
    edge_attr = leaf(num_edges, 2)
    values = edge_attr if features == "values" else torch.rand(num_edges, dtype=torch.float64)
    edges = [edge_attr] if features == "given" else []
    leaves = [*x, *([] if features is None else [edge_attr])]
    adj_t = adjacency(layout, case.edge_index, values, size)
    if layout == "csc" or features == "values":
        # What PyG does not take, it gets as an edge_index in the order of the matrix.
        src, dst = case.edge_index
        order = (src * 1000 + dst if layout == "csc" else dst * 1000 + src).argsort()
        edges_of_pyg = [] if features is None else [edge_attr]
        their_inputs = (x, case.edge_index[:, order], *edges_of_pyg)
    else:
        their_inputs = (x, adjacency(layout, case.edge_index, values, size), *edges)
    assert_same_numbers(ours, theirs, leaves, x, adj_t, *edges, their_inputs=their_inputs)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
def test_sparse_adj_t_with_values_as_pyg_takes_them(layout: str) -> None:
    ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=2)
    x, edge_attr = leaf(4, 5), leaf(6, 2)
    assert_same_numbers(
        ours,
        theirs,
        [x, edge_attr],
        x,
        adjacency(layout, TRIANGLE, edge_attr, (4, 4)),
        their_inputs=(x, adjacency(layout, TRIANGLE, edge_attr, (4, 4))),
    )


def test_sparse_adj_t_that_is_not_coalesced() -> None:
    # Stored order counts, repeated coordinates are parallel edges, and the caller's matrix stays.
    indices = torch.tensor([[2, 0, 2, 1], [0, 1, 0, 2]])
    edge_attr, x = torch.randn(4, 2, dtype=torch.float64), leaf(3, 5)
    conv = make("eager", 5, 4, edge_dim=2).double()
    adj_t = torch.sparse_coo_tensor(indices, edge_attr, (3, 3, 2), check_invariants=True)
    assert_equal_to(conv(x, adj_t), conv(x, indices.flip(0), edge_attr))
    assert not adj_t.is_coalesced()
    assert adj_t._version == 0

    # PyG marks the matrix as coalesced, in place, whatever is in it.
    plain = torch.sparse_coo_tensor(indices, torch.ones(4), (3, 3), check_invariants=True)
    make("eager", 5, 4).double()(x, plain)
    assert not plain.is_coalesced()

    adj_t = torch.sparse_coo_tensor(
        indices, edge_attr.requires_grad_(), (3, 3, 2), check_invariants=True
    )
    with pytest.raises(ValueError, match="no gradient for the values of a COO adj_t that is not"):
        conv(x, adj_t)
    conv(x, adj_t.coalesce()).sum().backward()
    assert edge_attr.grad is not None


@pytest.mark.parametrize("path", PATHS)
def test_graph_equals_its_edge_index(path: str) -> None:
    conv = make(path, (5, 3), 4, 2, edge_dim=2).double()
    for case in (ZOO["shuffled"], ZOO["more targets than sources"]):
        x = leaf(case.num_src, 5), leaf(case.num_dst, 3)
        edge_attr = leaf(case.edge_index.size(1), 2)
        graph = case.graph()
        out, (returned, alpha) = conv(x, graph, edge_attr, return_attention_weights=True)
        expected, (_, weights) = conv(x, case.edge_index, edge_attr, return_attention_weights=True)
        assert returned is graph
        assert torch.equal(out, expected)
        assert torch.equal(alpha, weights)


def test_c26_int32_edge_index() -> None:
    conv, x = make("eager", 5, 4), torch.randn(4, 5)
    assert torch.equal(conv(x, TRIANGLE.int()), conv(x, TRIANGLE))
    with pytest.raises(TypeError, match=re.escape("edge_index must be int64 or int32")):
        conv(x, TRIANGLE.float())


# Aggregations #####################################################################################


@pytest.mark.parametrize(
    "options",
    [
        {"aggr": "add"},
        {"aggr": "sum"},
        {"aggr": "mean"},
        {"aggr": "max"},
        {"aggr": "min"},
        {"aggr": "std"},
        {"aggr": "softmax", "aggr_kwargs": {"learn": True}},
        {"aggr": ["add", "max"], "aggr_kwargs": {"mode": "sum"}},
        {"aggr": SumAggregation()},
        {"aggr": SoftmaxAggregation(t=0.5)},
    ],
    ids=lambda options: str(options["aggr"]),
)
@pytest.mark.parametrize("name", ["shuffled", "more targets than sources", "no edges", "no nodes"])
def test_aggr(name: str, options: dict[str, Any]) -> None:
    for dtype in TOLERANCE:
        for concat in (True, False):
            compare(ZOO[name], "eager", dtype, concat=concat, edge_dim=2, **options)


def test_aggr_that_concatenates_widens_every_head() -> None:
    # TransformerConv makes rows of it: [2 N, H C] instead of [N, 2 H C].
    ours = make("eager", 5, 4, 2, aggr=["add", "mean"], root_weight=False)
    plain = make("eager", 5, 4, 2, root_weight=False)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 5)
    out = ours(x, TRIANGLE)
    assert out.shape == (4, 16)
    torch.testing.assert_close(out.view(4, 2, 8)[..., :4].flatten(1), plain(x, TRIANGLE))


def test_aggr_none_leaves_it_to_a_subclass() -> None:
    class Doubled(GraphAttentionConv):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
            out = inputs.new_zeros(dim_size, *inputs.shape[1:])
            return 2.0 * out.index_add(0, index, inputs)

    conv = Doubled(5, 4, 2, aggr=None, root_weight=False)
    plain = GraphAttentionConv(5, 4, 2, root_weight=False)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(4, 5)
    torch.testing.assert_close(conv(x, TRIANGLE), 2.0 * plain(x, TRIANGLE))


def test_replaced_or_watched_aggregation_is_honoured() -> None:
    x = torch.randn(4, 5)
    conv, largest = make("eager", 5, 4), make("eager", 5, 4, aggr="max")
    largest.load_state_dict(conv.state_dict())
    seen = []
    handle = conv.aggr_module.register_forward_hook(lambda *args: seen.append(args[2]))
    out = conv(x, TRIANGLE)
    assert len(seen) == 1
    handle.remove()
    torch.testing.assert_close(conv(x, TRIANGLE), out)
    assert len(seen) == 1
    conv.aggr_module = MaxAggregation()
    torch.testing.assert_close(conv(x, TRIANGLE), largest(x, TRIANGLE))
    assert not torch.allclose(conv(x, TRIANGLE), out)


# Parameters and state_dict ########################################################################


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["lin_skip.bias", "lin_skip.weight"]),
        ({"root_weight": False}, []),
        ({"root_weight": False, "beta": True}, []),
        ({"edge_dim": 3}, ["lin_edge.weight", "lin_skip.bias", "lin_skip.weight"]),
        ({"beta": True}, ["lin_beta.weight", "lin_skip.bias", "lin_skip.weight"]),
        ({"bias": False, "concat": False}, ["lin_skip.weight"]),
    ],
    ids=str,
)
def test_c49_state_dict_names_are_stable(options: dict[str, Any], names: list[str]) -> None:
    always = [f"lin_{part}.weight" for part in ("key", "query", "value")]
    if options.get("bias", True):
        always += [f"lin_{part}.bias" for part in ("key", "query", "value")]
    assert sorted(GraphAttentionConv(5, 4, 2, **options).state_dict()) == sorted(always + names)


@pytest.mark.parametrize("nested", [False, True])
def test_c49_state_dicts_load_strictly_both_ways(nested: bool) -> None:
    def wrap(layer: nn.Module) -> nn.Module:
        return nn.ModuleDict({"first": nn.ModuleList([layer])}) if nested else layer

    for root_weight, beta, edge_dim, bias, concat in itertools.product(
        (True, False), (True, False), (None, 3), (True, False), (True, False)
    ):
        options = {
            "root_weight": root_weight,
            "beta": beta,
            "edge_dim": edge_dim,
            "bias": bias,
            "concat": concat,
        }
        ours = wrap(GraphAttentionConv(5, 4, 2, **options))
        theirs = wrap(TransformerConv(5, 4, 2, **options))
        state = theirs.state_dict()
        names = list(state)
        ours.load_state_dict(state, strict=True)
        assert list(state) == names, "the caller's state_dict was changed"
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, state[name])
        theirs = wrap(TransformerConv(5, 4, 2, **options))
        # PyG's layer has a skip projection that it never uses without root_weight.
        result = theirs.load_state_dict(ours.state_dict(), strict=root_weight)
        assert not result.unexpected_keys
        assert all("lin_skip" in name for name in result.missing_keys)
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name])


def test_c49_unknown_names_are_still_reported() -> None:
    conv = GraphAttentionConv(5, 4, root_weight=False)
    state = conv.state_dict() | {"lin_other.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"lin_other"):
        conv.load_state_dict(state)
    state = GraphAttentionConv(5, 4).state_dict()
    del state["lin_skip.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        GraphAttentionConv(5, 4).load_state_dict(state)


@pytest.mark.parametrize("path", PATHS)
def test_c51_every_parameter_gets_a_gradient(path: str) -> None:
    for heads, concat, beta, edge_dim, bias, root_weight in itertools.product(
        (1, 3), (True, False), (True, False), (None, 2), (True, False), (True, False)
    ):
        conv = make(path, 5, 4, heads, concat, beta, 0.0, edge_dim, bias, root_weight)
        edges = [] if edge_dim is None else [torch.randn(6, edge_dim)]
        conv(torch.randn(4, 5), TRIANGLE, *edges).square().sum().backward()
        for name, parameter in conv.named_parameters():
            assert parameter.grad is not None, name
            # The bias of the keys moves all scores of a target alike, which a softmax ignores.
            if name != "lin_key.bias":
                assert parameter.grad.abs().max() > 0.0, name
        assert (conv.lin_skip is None) == (not root_weight)
        assert (conv.lin_beta is None) == (not (beta and root_weight))


def test_c55_all_attributes_are_set_in_the_constructor() -> None:
    for path in PATHS:
        conv = make(path, 5, 4, 2, edge_dim=3, dropout=0.5)
        before = dict(vars(conv))
        conv(torch.randn(4, 5), TRIANGLE, torch.randn(6, 3), return_attention_weights=True)
        assert vars(conv) == before
        assert conv._alpha is None


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("aggr", ["add", "mean"])  # the operator, and messages
def test_c55_exports_in_eval_mode(aggr: str, edge_dim: int | None) -> None:
    conv = make("eager", 5, 4, 2, beta=True, edge_dim=edge_dim, aggr=aggr).eval()
    inputs = [torch.randn(4, 5), TRIANGLE, *([] if edge_dim is None else [torch.randn(6, 3)])]
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    shapes = ({0: nodes}, {1: edges}, None if edge_dim is None else {0: edges}, None)
    names = ("x", "edge_index", "edge_attr", "return_attention_weights")
    used = len(inputs)
    program = torch.export.export(
        conv, tuple(inputs), dynamic_shapes=dict(zip(names[:used], shapes[:used], strict=True))
    ).module()
    torch.testing.assert_close(program(*inputs), conv(*inputs))
    # Graph and sizes are inputs, not constants.
    other = [torch.randn(7, 5), torch.randint(7, (2, 12)), torch.randn(12, 3)][:used]
    torch.testing.assert_close(program(*other), conv(*other))


def test_copies_after_forward_and_backward() -> None:
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    for watched in (False, True):
        conv = make("eager", 5, 4, 2, edge_dim=3, dropout=0.3)
        if watched:
            conv.register_message_forward_hook(_nothing)
        conv(x, TRIANGLE, edge_attr, return_attention_weights=True)
        conv(x, TRIANGLE, edge_attr).sum().backward()
        expected = conv.eval()(x, TRIANGLE, edge_attr)
        buffer = io.BytesIO()
        torch.save(conv.state_dict(), buffer)
        buffer.seek(0)
        loaded = make("eager", 5, 4, 2, edge_dim=3).eval()
        loaded.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
        for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), loaded):
            torch.testing.assert_close(twin(x, TRIANGLE, edge_attr), expected)
            assert bool(twin._message_forward_hooks) == (watched and twin is not loaded)
            twin.lin_key.weight.data.zero_()
        assert torch.equal(conv(x, TRIANGLE, edge_attr), expected)


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that pickle finds by its name."""


def test_repr() -> None:
    assert repr(GraphAttentionConv(5, 4, heads=2)) == "GraphAttentionConv(5, 4, heads=2)"
    assert repr(GraphAttentionConv((5, 3), 4)) == "GraphAttentionConv((5, 3), 4, heads=1)"


# Where TransformerConv is wrong ###################################################################


@pytest.mark.parametrize("path", PATHS)
def test_c40_false_returns_a_tensor(path: str) -> None:
    conv, x = make(path, 5, 4, 2), torch.randn(4, 5)
    assert isinstance(TransformerConv(5, 4)(x, TRIANGLE, return_attention_weights=False), tuple)
    for flag in (False, None, 0):
        assert isinstance(conv(x, TRIANGLE, return_attention_weights=flag), Tensor)
    for flag in (True, 1):
        out, (edge_index, alpha) = conv(x, TRIANGLE, return_attention_weights=flag)
        assert torch.equal(out, conv(x, TRIANGLE))
        assert edge_index is TRIANGLE
        assert alpha.shape == (6, 2)


@pytest.mark.parametrize("path", PATHS)
def test_c29_edge_attr_without_edge_dim_is_refused(path: str) -> None:
    # TransformerConv adds them to the values as they are.
    conv, x = make(path, 5, 4, 2), torch.randn(4, 5)
    text = re.escape(
        "GraphAttentionConv: got edge_attr of shape (6, 3), but the layer was built without "
        "edge_dim. Use GraphAttentionConv(..., edge_dim=...), or leave edge_attr out."
    )
    with pytest.raises(ValueError, match=text):
        conv(x, TRIANGLE, torch.randn(6, 3))
    adj_t = adjacency("coo", TRIANGLE, torch.randn(6, 3), (4, 4))
    with pytest.raises(ValueError, match=text):
        conv(x, adj_t)


@pytest.mark.parametrize("path", PATHS)
def test_c29_missing_edge_attr(path: str) -> None:
    conv, x = make(path, 5, 4, edge_dim=3), torch.randn(4, 5)
    text = "GraphAttentionConv: edge_attr is missing; the layer was built with edge_dim=3"
    for edge_index in (
        TRIANGLE,
        Graph(TRIANGLE, 4),
        adjacency("coo", TRIANGLE, torch.ones(6), (4, 4)),
    ):
        with pytest.raises(ValueError, match=text):
            conv(x, edge_index)


@pytest.mark.parametrize("path", PATHS)
def test_c29_one_dimensional_edge_attr(path: str) -> None:
    x, distance = torch.randn(4, 5), torch.rand(6)
    for edge_dim in (1, -1):
        conv = make(path, 5, 4, 2, edge_dim=edge_dim)
        expected = conv(x, TRIANGLE, distance[:, None])
        torch.testing.assert_close(conv(x, TRIANGLE, distance), expected)
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (6,).")):
        make(path, 5, 4, edge_dim=3)(x, TRIANGLE, distance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_c29_integer_edge_attr(dtype: torch.dtype, path: str) -> None:
    text = re.escape(
        f"GraphAttentionConv: edge_attr must be floating point, got {dtype}. Cast numbers with "
        "edge_attr.float(), or embed categories with torch.nn.Embedding."
    )
    with pytest.raises(TypeError, match=text):
        make(path, 5, 4, edge_dim=1)(
            torch.randn(4, 5), TRIANGLE, torch.ones(6, 1, dtype=torch.int64).to(dtype)
        )
    with pytest.raises(
        TypeError, match=re.escape("must be a tensor (num_edges, edge_dim), got lis")
    ):
        make(path, 5, 4, edge_dim=1)(torch.randn(4, 5), TRIANGLE, [1.0] * 6)


@pytest.mark.parametrize("path", PATHS)
def test_c29_transposed_edge_attr(path: str) -> None:
    conv, x = make(path, 5, 4, edge_dim=3), torch.randn(4, 5)
    for edge_index in (TRIANGLE, Graph(TRIANGLE, 4)):
        text = re.escape(
            "edge_attr must have shape (num_edges, edge_dim) = (6, 3), got (3, 6). Use "
            "edge_attr.t()."
        )
        with pytest.raises(ValueError, match=text):
            conv(x, edge_index, torch.randn(3, 6))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (5, 3).") + "$"):
        conv(x, TRIANGLE, torch.randn(5, 3))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (6, 4).") + "$"):
        conv(x, TRIANGLE, torch.randn(6, 4))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_c29_number_of_edges_of_a_sparse_matrix(layout: str) -> None:
    adj_t = adjacency(layout, TRIANGLE, torch.ones(6), (4, 4))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (7, 3).")):
        make("eager", 5, 4, edge_dim=3)(torch.randn(4, 5), adj_t, torch.randn(7, 3))


@pytest.mark.parametrize("path", PATHS)
def test_c33_missing_features_of_one_side(path: str) -> None:
    conv, x = make(path, 5, 4), torch.randn(4, 5)
    with pytest.raises(TypeError, match=r"x_dst is NoneType\. Attention needs keys from"):
        conv((x, None), TRIANGLE)
    with pytest.raises(TypeError, match="x_src is NoneType"):
        conv((None, x), TRIANGLE)
    for wrong, kind in (((x,), "tuple"), ([x, x, x], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=re.escape(f"a pair (x_src, x_dst), got {kind}.")):
            conv(wrong, TRIANGLE)
    with pytest.raises(ValueError, match=re.escape("x_dst must have shape (*, num_nodes,")):
        conv((x, x[:, 0]), TRIANGLE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("leading", [(2,), (3, 2), (1,), (0,)], ids=str)
def test_c28_leading_dimensions(leading: tuple[int, ...], path: str) -> None:
    for options in (
        {"beta": True, "edge_dim": 2},
        {"concat": False},
        {"flow": "target_to_source"},
        {"aggr": "mean"},
    ):
        conv = make(path, (5, 3), 4, 3, **options).double()
        x_src, x_dst = leaf(*leading, 4, 5), leaf(*leading, 4, 3)
        edges = [leaf(6, 2)] if "edge_dim" in options else []
        out, (_, alpha) = conv((x_src, x_dst), TRIANGLE, *edges, return_attention_weights=True)
        assert out.shape == (*leading, 4, 4 if options.get("concat") is False else 12)
        assert alpha.shape == (*leading, 6, 3)
        for index in itertools.product(*map(range, leading)):
            alone, (_, weights) = conv(
                (x_src[index], x_dst[index]), TRIANGLE, *edges, return_attention_weights=True
            )
            assert_equal_to(out[index], alone)
            assert_equal_to(alpha[index], weights)
        assert_gradients_split(conv, x_src, x_dst, edges)


def assert_gradients_split(
    conv: nn.Module, x_src: Tensor, x_dst: Tensor, edges: list[Tensor]
) -> None:
    parameters = list(conv.parameters())
    together = torch.autograd.grad(
        conv((x_src, x_dst), TRIANGLE, *edges).square().sum(), parameters
    )
    alone = [torch.zeros_like(parameter) for parameter in parameters]
    for one_src, one_dst in zip(x_src.flatten(0, -3), x_dst.flatten(0, -3), strict=True):
        out = conv((one_src, one_dst), TRIANGLE, *edges).square().sum()
        for total, part in zip(alone, torch.autograd.grad(out, parameters), strict=True):
            total += part
    for actual, expected in zip(together, alone, strict=True):
        assert_equal_to(actual, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_c16_c17_no_edges(edge_dim: int | None, path: str) -> None:
    conv = make(path, 5, 4, 2, edge_dim=edge_dim)
    x = torch.randn(4, 5, requires_grad=True)
    edges = [] if edge_dim is None else [torch.randn(0, 3)]
    out, (_, alpha) = conv(x, TRIANGLE[:, :0], *edges, return_attention_weights=True)
    assert torch.equal(out, conv.lin_skip(x))
    assert alpha.shape == (0, 2)
    out.sum().backward()
    for name, parameter in conv.named_parameters():
        assert parameter.grad is not None, name
        if "skip" not in name:
            assert torch.count_nonzero(parameter.grad) == 0, name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("concat", [True, False])
def test_c18_c19_isolated_nodes_get_the_skip_only(concat: bool, path: str) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    edge_index = torch.tensor([[0, 2, 2], [2, 0, 2]])  # 1 and 3 have no in-edge
    conv = make(path, 5, 4, 2, concat=concat)
    out = conv(x, edge_index)
    assert torch.equal(out[[1, 3]], conv.lin_skip(x)[[1, 3]])
    bare = make(path, 5, 4, 2, concat=concat, root_weight=False)
    out = bare(x, edge_index)
    assert torch.count_nonzero(out[[1, 3]]) == 0
    out[[1, 3]].sum().backward()
    assert torch.count_nonzero(x.grad) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", [1, 2])
def test_c20_no_nodes(heads: int, path: str) -> None:
    conv = make(path, 5, 1, heads, edge_dim=3, beta=True)
    x = torch.randn(0, 5, requires_grad=True)
    out, (_, alpha) = conv(x, TRIANGLE[:, :0], torch.randn(0, 3), return_attention_weights=True)
    assert out.shape == (0, heads)
    assert alpha.shape == (0, heads)
    out.sum().backward()
    assert x.grad.shape == (0, 5)
    assert all(parameter.grad is not None for parameter in conv.parameters())


@pytest.mark.parametrize("path", PATHS)
def test_c22_last_nodes_without_edges_stay(path: str) -> None:
    assert make(path, 5, 4)(torch.randn(3, 5), torch.tensor([[0], [1]])).shape == (3, 4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_c24_index_out_of_range(flow: str, path: str) -> None:
    conv, x = make(path, 5, 4, flow=flow), torch.randn(3, 5)
    for wrong in (11, -1):
        with pytest.raises(IndexError, match="there are 3"):
            conv(x, torch.tensor([[0], [wrong]]))
    # Each row is checked against its own side.
    pair = (torch.randn(2, 5), torch.randn(3, 5))
    inside = torch.tensor([[1], [2]]) if flow == "source_to_target" else torch.tensor([[2], [1]])
    assert conv(pair, inside).shape == (3, 4)
    with pytest.raises(IndexError, match="there are 2"):
        conv(pair, inside.flip(0))


@pytest.mark.parametrize("path", PATHS)
def test_c32_c34_direction_and_no_self_loops(path: str) -> None:
    conv = make(path, 5, 4, root_weight=False)
    x = torch.randn(2, 5)
    out = conv(x, torch.tensor([[0], [1]]))
    torch.testing.assert_close(out[1], conv.lin_value(x[0]))
    assert torch.count_nonzero(out[0]) == 0
    reverse = make(path, 5, 4, root_weight=False, flow="target_to_source")
    reverse.load_state_dict(conv.state_dict())
    out = reverse(x, torch.tensor([[0], [1]]))
    torch.testing.assert_close(out[0], conv.lin_value(x[1]))
    assert torch.count_nonzero(out[1]) == 0
    # C32: two sides, one edge 0 -> 2.
    pair = (torch.randn(2, 5), torch.randn(3, 5))
    out = conv(pair, torch.tensor([[0], [2]]))
    torch.testing.assert_close(out[2], conv.lin_value(pair[0][0]))
    assert torch.count_nonzero(out[:2]) == 0


@pytest.mark.parametrize("path", PATHS)
def test_c35_reversed_flow_with_two_sides(path: str) -> None:
    x = leaf(2, 5), leaf(3, 3)
    edge_index = torch.tensor([[0, 2, 2], [1, 1, 0]])  # row 0: 3 targets, row 1: 2 sources
    ours, theirs = pair_of_layers(path, (5, 3), 4, 2, flow="target_to_source")
    assert_same_numbers(ours, theirs, list(x), x, edge_index)
    forward = make(path, (5, 3), 4, 2).double()
    forward.load_state_dict(ours.state_dict())
    out, (returned, alpha) = ours(x, edge_index, return_attention_weights=True)
    expected, (_, weights) = forward(x, edge_index.flip(0), return_attention_weights=True)
    assert returned is edge_index
    assert_equal_to(out, expected)
    assert_equal_to(alpha, weights)


@pytest.mark.parametrize("path", PATHS)
def test_c36_parallel_edges_are_separate_entries(path: str) -> None:
    conv = make(path, 5, 4, root_weight=False, edge_dim=2).double()
    x = leaf(3, 5)
    edge_index = torch.tensor([[0, 0, 2], [1, 1, 1]])
    edge_attr = leaf(3, 2)
    _, (_, alpha) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    key = conv.lin_key(x)[edge_index[0]] + conv.lin_edge(edge_attr)
    score = key @ conv.lin_query(x)[1] / math.sqrt(4)
    assert_equal_to(alpha[:, 0], score.softmax(0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}, {"flow": "target_to_source"}], ids=str)
def test_c39_weights_in_the_order_of_the_edges(options: dict[str, Any], path: str) -> None:
    ours, theirs = pair_of_layers(path, 5, 4, 2, dropout=0.5, **options)
    case = ZOO["shuffled"]
    x = leaf(case.num_src, 5)
    edges = [leaf(200, 3)] if "edge_dim" in options else []
    theirs.eval()
    _, (_, expected) = theirs(x, case.edge_index, *edges, return_attention_weights=True)
    # Before dropout, as PyG's.
    _, (edge_index, alpha) = ours(x, case.edge_index, *edges, return_attention_weights=True)
    assert edge_index is case.edge_index
    assert_equal_to(alpha, expected)
    target = case.edge_index[0 if "flow" in options else 1]
    total = torch.zeros(30, 2, dtype=torch.float64).index_add(0, target, alpha)
    assert_equal_to(total[target.unique()], torch.ones_like(total)[target.unique()])


@pytest.mark.parametrize("path", PATHS)
def test_weights_have_a_gradient(path: str) -> None:
    ours, theirs = pair_of_layers(path, 5, 4, 2, edge_dim=3)
    x, edge_attr = leaf(4, 5), leaf(6, 3)
    weight = torch.randn(6, 2, dtype=torch.float64)
    gradients = []
    for layer in (ours, theirs):
        _, (_, alpha) = layer(x, TRIANGLE, edge_attr, return_attention_weights=True)
        gradients.append(torch.autograd.grad((alpha * weight).sum(), [x, edge_attr]))
    for actual, expected in zip(*gradients, strict=True):
        assert_equal_to(actual, expected)


# Number formats ###################################################################################


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast(dtype: torch.dtype, edge_dim: int | None, path: str) -> None:
    conv = make(path, 5, 4, 2, beta=True, edge_dim=edge_dim)
    x = torch.randn(4, 5, requires_grad=True)
    edges = [] if edge_dim is None else [torch.randn(6, 3, requires_grad=True)]
    expected = conv(x, TRIANGLE, *edges)
    expected.square().sum().backward()
    full = {name: parameter.grad.clone() for name, parameter in conv.named_parameters()}
    conv.zero_grad()
    with torch.autocast("cpu", dtype):
        out, (_, alpha) = conv(x, TRIANGLE, *edges, return_attention_weights=True)
    assert out.dtype == dtype
    assert alpha.dtype == dtype
    out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    for name, parameter in conv.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        torch.testing.assert_close(parameter.grad, full[name], rtol=0.1, atol=0.3, msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_pure_low_precision(dtype: torch.dtype, path: str) -> None:
    conv = make(path, 5, 4, 2, beta=True, edge_dim=3)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    expected = conv(x, TRIANGLE, edge_attr)
    conv = conv.to(dtype)
    out, (_, alpha) = conv(
        x.to(dtype), TRIANGLE, edge_attr.to(dtype), return_attention_weights=True
    )
    assert out.dtype == alpha.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    for name, parameter in conv.named_parameters():
        assert parameter.grad.dtype == dtype, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_c01_c05_large_scores_in_low_precision(dtype: torch.dtype, path: str) -> None:
    conv = make(path, 4, 4, root_weight=False, bias=False).to(dtype)
    with torch.no_grad():
        for layer in (conv.lin_key, conv.lin_query, conv.lin_value):
            layer.weight.copy_(torch.eye(4))
    # Scores of target 0: 128 x 128 x 4 / 2 and its negative; node 2 has no in-edge.
    x = torch.tensor([[128.0] * 4, [-128.0] * 4, [1.0] * 4], dtype=dtype)
    out, (_, alpha) = conv(x, torch.tensor([[0, 1], [0, 0]]), return_attention_weights=True)
    assert alpha.flatten().tolist() == [1.0, 0.0]
    assert torch.equal(out[0], x[0])
    assert torch.count_nonzero(out[1:]) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_sums_in_low_precision_keep_float32_inside(dtype: torch.dtype, path: str) -> None:
    # Two messages that nearly cancel: rounded to 8 bits each, they would leave noise of 0.1.
    conv = make(path, 2, 2, root_weight=False, bias=False).to(dtype)
    with torch.no_grad():
        for layer in (conv.lin_key, conv.lin_query, conv.lin_value):
            layer.weight.copy_(torch.eye(2))
    sources = torch.tensor([[96.0, 0.25], [-96.0, 0.5], [1.0, 0.75]], dtype=dtype)
    target = torch.tensor([[0.0, 0.125]], dtype=dtype)
    edge_index = torch.tensor([[0, 1, 2], [0, 0, 0]])
    out = conv((sources, target), edge_index)
    assert out.dtype == dtype
    expected = conv.double()((sources.double(), target.double()), edge_index)
    assert 0.1 < expected[0, 0].abs() < 1.0
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=0.0)


# Training #########################################################################################


@pytest.mark.parametrize("path", PATHS)
def test_c45_dropout_in_training_only_and_unbiased(path: str) -> None:
    conv = make(path, 5, 4, 2, dropout=0.4, edge_dim=3)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    conv.eval()
    expected = conv(x, TRIANGLE, edge_attr)
    assert torch.equal(conv(x, TRIANGLE, edge_attr), expected)
    conv.train()
    assert not torch.equal(conv(x, TRIANGLE, edge_attr), expected)
    # Every row of a leading dimension draws a mask of its own.
    draws = conv(x.expand(20_000, 4, 5), TRIANGLE, edge_attr)
    error = (draws.mean(0) - expected).abs()
    assert (error <= 5.0 * draws.std(0) / math.sqrt(20_000) + 1e-5).all()
    # Half of the sum would be wrong by far more than this bound.
    assert (draws.std(0)[0] > 0.05).any()


def test_c45_every_path_draws_the_same_mask() -> None:
    x, edge_attr, expected = torch.randn(2, 30, 5), torch.randn(200, 3), None
    layers = {path: make(path, 5, 4, 2, dropout=0.5, edge_dim=3) for path in PATHS}
    for layer in layers.values():
        layer.load_state_dict(layers["eager"].state_dict())
        torch.manual_seed(7)
        out = layer(x, ZOO["shuffled"].edge_index, edge_attr)
        expected = out if expected is None else expected
        torch.testing.assert_close(out, expected)
        torch.manual_seed(8)
        assert not torch.allclose(layer(x, ZOO["shuffled"].edge_index, edge_attr), expected)


@pytest.mark.parametrize("path", PATHS)
def test_c46_train_without_dropout_equals_eval(path: str) -> None:
    conv, x = make(path, 5, 4, 2, beta=True), torch.randn(4, 5)
    assert torch.equal(conv.train()(x, TRIANGLE), conv.eval()(x, TRIANGLE))
    with torch.no_grad():
        assert torch.equal(conv(x, TRIANGLE), conv.train()(x, TRIANGLE))


@pytest.mark.parametrize("path", ["eager", "scatter"] if "scatter" in PATHS else ["eager"])
def test_c59_c60_gradients_of_every_order(path: str) -> None:
    conv = make(path, 3, 2, 2, edge_dim=2).double()
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 0]])  # parallel edges; 2 has no in-edge
    inputs = (leaf(3, 3), leaf(4, 2))

    def run(x: Tensor, edge_attr: Tensor) -> Tensor:
        return conv(x, edge_index, edge_attr)

    assert torch.autograd.gradcheck(run, inputs)
    if path == "eager":
        assert torch.autograd.gradgradcheck(run, inputs)


# Hooks and overridden parts #######################################################################


def count_operator_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, operator = [], attention_module.graph_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(attention_module, "graph_attention", counted)
    return calls


def record(layer: nn.Module) -> tuple[dict[str, Any], list[Any]]:
    seen: dict[str, Any] = {}
    handles = []
    for part in ("propagate", "message", "aggregate"):

        def before(module: nn.Module, inputs: Any, part: str = part) -> None:
            seen[f"{part} in"] = inputs

        def after(module: nn.Module, inputs: Any, output: Any, part: str = part) -> None:
            seen[f"{part} inputs after"] = inputs
            seen[f"{part} out"] = output

        handles.append(getattr(layer, f"register_{part}_forward_pre_hook")(before))
        handles.append(getattr(layer, f"register_{part}_forward_hook")(after))
    return seen, handles


def assert_same_view(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        if expected.is_floating_point():
            assert_equal_to(actual, expected, where)
        else:
            assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for name in expected:
            assert_same_view(actual[name], expected[name], f"{where}, {name}")
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), where
        for one, other in zip(actual, expected, strict=True):
            assert_same_view(one, other, where)
    else:
        assert actual == expected, where


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", ["shuffled", "more targets than sources", "no edges"])
def test_hooks_see_what_those_of_pyg_see(
    name: str, flow: str, edge_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ZOO[name]
    ours, theirs = pair_of_layers("eager", (5, 3), 4, 2, edge_dim=edge_dim, flow=flow)
    x = leaf(case.num_src, 5), leaf(case.num_dst, 3)
    edge_index = case.edge_index if flow == "source_to_target" else case.edge_index.flip(0)
    edges = [] if edge_dim is None else [leaf(edge_index.size(1), 3)]
    unwatched = ours(x, edge_index, *edges)
    (seen, handles), (expected, _) = record(ours), record(theirs)
    calls = count_operator_calls(monkeypatch)
    assert_same_numbers(ours, theirs, [*x, *edges], x, edge_index, *edges)
    assert not calls
    assert_same_view(seen, expected, "")
    for handle in handles:
        handle.remove()
    assert_equal_to(ours(x, edge_index, *edges), unwatched)
    assert calls == [1]


@pytest.mark.parametrize("part", ["propagate", "message", "aggregate"])
def test_each_single_hook_is_called_and_may_change_things(part: str) -> None:
    x = leaf(4, 5)

    def halve(module: nn.Module, inputs: Any) -> Any:
        changed = dict(inputs[-1])
        name = {"propagate": "value", "message": "value_j", "aggregate": "dim_size"}[part]
        if part != "aggregate":
            changed[name] = changed[name] / 2.0
        return (*inputs[:-1], changed)

    def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 2.0

    for kind, hook in (("forward_pre_hook", halve), ("forward_hook", double)):
        ours, theirs = pair_of_layers("eager", 5, 4, 2)
        plain = ours(x, TRIANGLE)
        for layer in (ours, theirs):
            getattr(layer, f"register_{part}_{kind}")(hook)
        assert_same_numbers(ours, theirs, [x], x, TRIANGLE)
        if not (part == "aggregate" and kind == "forward_pre_hook"):
            assert not torch.allclose(ours(x, TRIANGLE), plain)


def test_operator_is_used_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_operator_calls(monkeypatch)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    for options in ({}, {"aggr": "sum"}, {"aggr": SumAggregation()}, {"edge_dim": 3}):
        make("eager", 5, 4, **options)(x, TRIANGLE, edge_attr if "edge_dim" in options else None)
    # Forward hooks of the layer itself need no messages.
    conv = make("eager", 5, 4)
    seen = []
    conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    conv(x, TRIANGLE)
    assert len(seen) == 1
    assert len(calls) == 5


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_on_lin_edge_are_called(kind: str) -> None:
    conv = make("eager", 5, 4, edge_dim=3)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3, requires_grad=True)
    expected = conv(x, TRIANGLE, edge_attr)
    seen = []
    getattr(conv.lin_edge, f"register_{kind}")(lambda *args: seen.append(args))
    out = conv(x, TRIANGLE, edge_attr)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert len(seen) == 1


class LowRank(nn.Module):
    """A wrapper that adds a low-rank term to a frozen layer."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_channels, rank, bias=False)
        self.up = nn.Linear(rank, base.out_channels, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Squashed(Linear):
    """PyG's layer by inheritance, with something to add."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_replaced_lin_edge_is_honoured() -> None:
    x, edge_attr = leaf(4, 5), leaf(6, 3)
    changes = {
        "wrapper": lambda layer: LowRank(layer.lin_edge),
        "bias": lambda layer: Linear(3, 8, bias=True),
        "torch's": lambda layer: nn.Linear(3, 8, bias=False),
        "subclass": lambda layer: Squashed(3, 8, bias=False),
        "sequence": lambda layer: nn.Sequential(Linear(3, 8, bias=False), nn.Tanh()),
    }
    for name, change in changes.items():
        ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=3)
        plain = ours(x, TRIANGLE, edge_attr)
        theirs.lin_edge = change(theirs).double()
        ours.lin_edge = copy.deepcopy(theirs.lin_edge)
        leaves = [x, edge_attr]
        for layer in (ours, theirs):
            layer.requires_grad_(True)
        assert_same_numbers(ours, theirs, leaves, x, TRIANGLE, edge_attr)
        assert not torch.allclose(ours(x, TRIANGLE, edge_attr), plain), name

    ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=3)
    for layer in (ours, theirs):
        weight = layer.lin_edge.weight
        layer.lin_edge.forward = lambda features, weight=weight: 2.0 * features @ weight.t()
    assert_same_numbers(ours, theirs, leaves, x, TRIANGLE, edge_attr)


def test_parametrized_lin_edge() -> None:
    x, edge_attr = leaf(4, 5), leaf(6, 3)
    for wrap in (
        parametrizations.weight_norm,
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()),
    ):
        ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=3)
        wrap(ours.lin_edge)
        wrap(theirs.lin_edge)
        assert_same_numbers(ours, theirs, [x, edge_attr], x, TRIANGLE, edge_attr)


def test_replaced_node_projections_are_honoured() -> None:
    x = leaf(4, 5)
    ours, theirs = pair_of_layers("eager", 5, 4, 2)
    for part in ("lin_query", "lin_key", "lin_value", "lin_skip"):
        setattr(theirs, part, LowRank(getattr(theirs, part)).double())
        setattr(ours, part, copy.deepcopy(getattr(theirs, part)))
    for layer in (ours, theirs):
        layer.requires_grad_(True)
    assert_same_numbers(ours, theirs, [x], x, TRIANGLE)


class _Sharp:
    """A message() that doubles the scores, in PyG's words."""

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        score = 2.0 * (query_i * key_j).sum(dim=-1)
        alpha = edge_softmax(score, Graph(torch.stack([index, index]), size_i))
        self._alpha = alpha if self.keep else None
        return value_j * alpha.unsqueeze(-1)


class SharpConv(_Sharp, GraphAttentionConv):
    keep = True


class SharpPyG(_Sharp, TransformerConv):
    keep = True


class TimidConv(_Sharp, GraphAttentionConv):
    keep = False


def test_subclass_that_overrides_message() -> None:
    x = leaf(4, 5)
    theirs, ours = SharpPyG(5, 4, 2).double(), SharpConv(5, 4, 2).double()
    ours.load_state_dict(theirs.state_dict())
    assert_same_numbers(ours, theirs, [x], x, TRIANGLE)
    plain = make("eager", 5, 4, 2).double()
    plain.load_state_dict(theirs.state_dict())
    assert not torch.allclose(plain(x, TRIANGLE), ours(x, TRIANGLE))
    _, (_, alpha) = ours(x, TRIANGLE, return_attention_weights=True)
    assert_equal_to(alpha, theirs(x, TRIANGLE, return_attention_weights=True)[1][1])


def test_subclass_whose_message_leaves_no_weights() -> None:
    conv, x = TimidConv(5, 4, 2), torch.randn(4, 5)
    assert conv(x, TRIANGLE).shape == (4, 8)
    text = re.escape(
        "TimidConv: return_attention_weights=True, but message() did not leave its weights in "
        "self._alpha."
    )
    with pytest.raises(ValueError, match=text):
        conv(x, TRIANGLE, return_attention_weights=True)


@pytest.mark.parametrize("name", ["aggregate", "update"])
def test_subclass_that_overrides_the_rest(name: str) -> None:
    def negate(self: Any, inputs: Tensor, *args: Any) -> Tensor:
        inputs = inputs if name == "update" else GraphAttentionConv.aggregate(self, inputs, *args)
        return -inputs

    def aggregate(self: Any, inputs: Tensor, index: Tensor, ptr: Any, dim_size: Any) -> Tensor:
        return negate(self, inputs, index, ptr, dim_size)

    def update(self: Any, inputs: Tensor) -> Tensor:
        return negate(self, inputs)

    body = {name: aggregate if name == "aggregate" else update}
    conv = type("Negative", (GraphAttentionConv,), body)(5, 4, root_weight=False)
    plain = make("eager", 5, 4, root_weight=False)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(4, 5)
    torch.testing.assert_close(conv(x, TRIANGLE), -plain(x, TRIANGLE))


def test_message_replaced_on_one_layer() -> None:
    conv, x = make("eager", 5, 4, root_weight=False), torch.randn(4, 5)
    plain = conv(x, TRIANGLE)
    inherited = conv.message
    conv.message = types.MethodType(lambda self, **inputs: -inherited(**inputs), conv)
    torch.testing.assert_close(conv(x, TRIANGLE), -plain)


def test_weights_are_forgotten_when_a_hook_fails() -> None:
    conv, x = make("eager", 5, 4), torch.randn(4, 5)

    def fail(module: nn.Module, inputs: Any, output: Tensor) -> None:
        raise RuntimeError("a hook of the user")

    conv.register_aggregate_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the user"):
        conv(x, TRIANGLE)
    assert conv._alpha is None


# In PyG's company #################################################################################


class Stack(nn.Module):
    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__()
        self.first = kind(5, 4, heads=2, **options)
        self.second = kind(8, 3, heads=1, concat=False, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index, edge_attr).relu()
        return self.second(x, edge_index, edge_attr)


def stacks(**options: Any) -> tuple[Stack, Stack]:
    ours, theirs = Stack(GraphAttentionConv, **options), Stack(TransformerConv, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_gnn_explainer(edge_dim: int | None) -> None:
    case = ZOO["shuffled"]
    x = torch.randn(30, 5)
    edges = {} if edge_dim is None else {"edge_attr": torch.randn(200, 3)}
    found = []
    models = stacks(edge_dim=edge_dim)
    for model in models:
        torch.manual_seed(0)
        explainer = Explainer(
            model,
            GNNExplainer(epochs=5),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        found.append(explainer(x, case.edge_index, index=4, **edges))
    for name in ("edge_mask", "node_mask"):
        assert found[0][name].abs().max() > 0.0
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
    # Afterwards nobody watches any more.
    assert not models[0].first._sends_messages()
    out = [model(x, case.edge_index, *edges.values()) for model in models]
    torch.testing.assert_close(*out)


def test_attention_explainer() -> None:
    case = ZOO["shuffled"]
    x = torch.randn(30, 5)
    masks = []
    for model in stacks():
        explainer = Explainer(
            model,
            AttentionExplainer(),
            explanation_type="model",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        masks.append(explainer(x, case.edge_index, index=4).edge_mask)
    assert masks[0].max() > 0.0
    torch.testing.assert_close(*masks)


TYPES = (["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper")])
BOTH_WAYS = (TYPES[0], [*TYPES[1], ("paper", "written_by", "author")])


def hetero_inputs() -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    x = {"paper": torch.randn(6, 5), "author": torch.randn(4, 5)}
    edges = {
        ("paper", "cites", "paper"): torch.randint(6, (2, 9)),
        ("author", "writes", "paper"): torch.stack(
            [torch.randint(4, (7,)), torch.randint(6, (7,))]
        ),
        ("paper", "written_by", "author"): torch.stack(
            [torch.randint(6, (7,)), torch.randint(4, (7,))]
        ),
    }
    return x, edges


class Lazy(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.first = kind((-1, -1), 4, heads=2)
        self.second = kind((-1, -1), 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def test_to_hetero() -> None:
    x, edges = hetero_inputs()
    ours = to_hetero(Lazy(GraphAttentionConv), BOTH_WAYS)
    theirs = to_hetero(Lazy(TransformerConv), BOTH_WAYS)
    ours(x, edges)
    theirs(x, edges)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    actual, expected = ours(x, edges), theirs(x, edges)
    assert set(actual) == set(expected) == {"paper", "author"}
    for kind in expected:
        torch.testing.assert_close(actual[kind], expected[kind])
    sum(out.sum() for out in actual.values()).backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.parametrize("aggr", ["sum", "cat"])
def test_hetero_conv(aggr: str) -> None:
    x, edges = hetero_inputs()
    ours, theirs = (
        HeteroConv({edge_type: kind((-1, -1), 4, heads=2) for edge_type in edges}, aggr=aggr)
        for kind in (GraphAttentionConv, TransformerConv)
    )
    ours(x, edges)
    theirs(x, edges)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    actual, expected = ours(x, edges), theirs(x, edges)
    assert set(actual) == set(expected)
    for kind in expected:
        torch.testing.assert_close(actual[kind], expected[kind])


def test_c43_type_that_is_never_a_target_is_absent() -> None:
    # HeteroConv hands out what its layers made; a skip of the author's own is the caller's to add.
    x, edges = hetero_inputs()
    writes = ("author", "writes", "paper")
    with pytest.warns(UserWarning, match="do not occur as destination type"):
        conv = HeteroConv({writes: GraphAttentionConv((5, 5), 4)})
    out = conv(x, {writes: edges[writes]})
    assert set(out) == {"paper"}
    assert out["paper"].shape == (6, 4)
    # No edge of the relation in this batch: the layer still answers, for every paper.
    out = conv(x, {writes: edges[writes][:, :0]})
    assert torch.equal(out["paper"], conv.convs[writes].lin_skip(x["paper"]))


def test_sequential() -> None:
    def model(kind: type) -> nn.Module:
        return pyg_nn.Sequential(
            "x, edge_index",
            [
                (kind(5, 4, heads=2), "x, edge_index -> x"),
                nn.ReLU(),
                (kind(8, 3), "x, edge_index -> x"),
            ],
        )

    ours, theirs = model(GraphAttentionConv).double(), model(TransformerConv).double()
    ours.load_state_dict(theirs.state_dict())
    x = leaf(4, 5)
    assert_same_numbers(ours, theirs, [x], x, TRIANGLE)


def test_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyG prints the table with tabulate, which need not be there.
    tabulate = types.ModuleType("tabulate")
    tabulate.tabulate = lambda rows, **options: rows
    monkeypatch.setitem(sys.modules, "tabulate", tabulate)
    summary = importlib.import_module("torch_geometric.nn.summary").summary
    tables = [
        summary(layer, torch.randn(4, 5), TRIANGLE, torch.randn(6, 3), leaf_module=None)
        for layer in pair_of_layers("eager", 5, 4, 2, edge_dim=3, dtype=torch.float32)
    ]
    assert tables[0][1][1:] == tables[1][1][1:]
    by_name = [{row[0].strip("├─└│ "): row[1:] for row in table[2:]} for table in tables]
    assert by_name[0] == by_name[1]
    assert any("lin_edge" in name and row[0] == "[6, 3]" for name, row in by_name[0].items())
    assert any("aggr_module" in name and row[1] == "[4, 2, 4]" for name, row in by_name[0].items())


@pytest.mark.parametrize("path", PATHS)
def test_batch_equals_its_parts(path: str) -> None:
    graphs = []
    for num_nodes in (3, 1, 6, 4):
        edge_index = torch.randint(num_nodes, (2, 2 * num_nodes))
        x, edge_attr = torch.randn(num_nodes, 5), torch.randn(2 * num_nodes, 3)
        graphs.append(Data(x=x, edge_index=edge_index, edge_attr=edge_attr))
    batch = Batch.from_data_list(graphs)
    conv = make(path, 5, 4, 2, edge_dim=3, beta=True)
    together = conv(batch.x, batch.edge_index, batch.edge_attr)
    alone = torch.cat([conv(data.x, data.edge_index, data.edge_attr) for data in graphs])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("path", PATHS)
def test_sampled_blocks_equal_the_full_graph(path: str) -> None:
    case = ZOO["power law"]
    x = torch.randn(60, 5)
    first, second = make(path, 5, 4, 2), make(path, 8, 3)
    expected = second(first(x, case.edge_index).relu(), case.edge_index)
    seeds = torch.tensor([0, 7, 31])
    # The induced subgraph of everything within two hops.
    nodes, edge_index, place, _ = k_hop_subgraph(seeds, 2, case.edge_index, relabel_nodes=True)
    out = second(first(x[nodes], edge_index).relu(), edge_index)
    torch.testing.assert_close(out[place], expected[seeds])
    # Two blocks with fewer targets than sources, targets first among the sources.
    sources, blocks = seeds, []
    for _ in range(2):
        inside = torch.isin(case.edge_index[1], sources)
        edges, targets = case.edge_index[:, inside], sources
        new = edges[0][~torch.isin(edges[0], targets)].unique()
        sources = torch.cat([targets, new])
        position = torch.full((60,), -1)
        position[sources] = torch.arange(sources.numel())
        blocks.append((position[edges], targets.numel()))
    x = x[sources]
    for conv, (edge_index, num_targets) in zip((first, second), reversed(blocks), strict=True):
        x = conv((x, x[:num_targets]), edge_index)
        x = x.relu() if conv is first else x
    torch.testing.assert_close(x, expected[seeds])


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 0}, "GraphAttentionConv: heads must be at least 1, got 0."),
        ({"out_channels": -2}, "GraphAttentionConv: out_channels must be at least 1, got -2."),
        ({"edge_dim": 0}, "GraphAttentionConv: edge_dim must be at least 1, got 0."),
        ({"edge_dim": -2}, "GraphAttentionConv: edge_dim must be at least 1, got -2."),
        (
            {"dropout": 1.5},
            "GraphAttentionConv: dropout must be a probability from 0 to 1",
        ),
        ({"dropout": -0.1}, "dropout must be a probability from 0 to 1, got -0.1"),
        ({"dropout": math.nan}, "dropout must be a probability from 0 to 1, got nan"),
        (
            {"decomposed_layers": 2},
            "GraphAttentionConv: decomposed_layers must be 1, because a score needs all channels",
        ),
        ({"flow": "sideways"}, "Expected 'flow' to be either 'source_to_target' or"),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        GraphAttentionConv(**({"in_channels": 5, "out_channels": 4} | options))


def test_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'negative_slope'"):
        GraphAttentionConv(5, 4, negative_slope=0.2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'edge_weight'"):
        GraphAttentionConv(5, 4)(torch.randn(4, 5), TRIANGLE, edge_weight=torch.ones(6))


@pytest.mark.parametrize("path", PATHS)
def test_flow_cannot_turn_what_knows_its_sides(path: str) -> None:
    conv, x = make(path, 5, 4, flow="target_to_source"), torch.randn(4, 5)
    text = "a Graph says itself which side is which. Use graph.reverse() and the default flow."
    with pytest.raises(ValueError, match=re.escape(text)):
        conv(x, Graph(TRIANGLE, 4))
    text = "a sparse adj_t says itself which side is which. Use adj_t.t() and the default flow."
    with pytest.raises(ValueError, match=re.escape(text)):
        conv(x, adjacency("coo", TRIANGLE, torch.ones(6), (4, 4)))


@pytest.mark.parametrize("path", PATHS)
def test_sizes_that_disagree(path: str) -> None:
    conv = make(path, 5, 4)
    text = "the graph has 4 sources and 4 targets, but the features have 3 and 3"
    for edge_index in (Graph(TRIANGLE, 4), adjacency("coo", TRIANGLE, torch.ones(6), (4, 4))):
        with pytest.raises(ValueError, match=text):
            conv(torch.randn(3, 5), edge_index)
    with pytest.raises(ValueError, match="but the EdgeIndex has sparse_size"):
        conv(torch.randn(5, 5), EdgeIndex(TRIANGLE, sparse_size=(4, 4)))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        GraphAttentionConv(5, 4, backend="cuda")(torch.randn(4, 5), TRIANGLE)
