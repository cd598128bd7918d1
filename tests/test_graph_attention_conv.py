"""GraphAttentionConv against PyG's TransformerConv: the same numbers, whatever the options."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.aggr import MaxAggregation, SoftmaxAggregation, SumAggregation

from graphattn import Graph
from graphattn.nn import GraphAttentionConv
from graphattn.testing import GraphCase
from parity import (
    EDGE_INDEX,
    PATHS,
    TOLERANCE,
    ZOO,
    adjacency,
    assert_equal_to,
    assert_same_numbers,
    compare,
    leaf,
    make,
    pair_of_layers,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


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
    assert_same_numbers(ours, theirs, [x], x, EDGE_INDEX)
    ours, theirs = pair_of_layers(path, [5, 5], 4, 3)
    assert_same_numbers(ours, theirs, [x], [x, x], EDGE_INDEX)


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
    theirs(x, EDGE_INDEX, edge_attr)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_numbers(ours, theirs, [x, edge_attr], x, EDGE_INDEX, edge_attr)

    # A branch that has no edges in the first batch is materialised all the same.
    lazy = make(path, -1, 4, 2, edge_dim=-1)
    lazy(torch.randn(4, 5), EDGE_INDEX[:, :0], torch.randn(0, 3))
    shapes = {name: tuple(weight.shape) for name, weight in lazy.named_parameters()}
    assert shapes["lin_edge.weight"] == (8, 3)
    assert all(shapes[f"lin_{part}.weight"] == (8, 5) for part in ("key", "query", "value", "skip"))
    # And so is one whose first use is to load a state_dict, or to lend an uninitialised one.
    fresh = make(path, -1, 4, 2, edge_dim=-1)
    fresh.load_state_dict(make(path, -1, 4, 2, edge_dim=-1).state_dict(), strict=True)
    fresh.load_state_dict(lazy.state_dict(), strict=True)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    assert torch.equal(fresh(x, EDGE_INDEX, edge_attr), lazy(x, EDGE_INDEX, edge_attr))


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
        adjacency(layout, EDGE_INDEX, edge_attr, (4, 4)),
        their_inputs=(x, adjacency(layout, EDGE_INDEX, edge_attr, (4, 4))),
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
    assert torch.equal(conv(x, EDGE_INDEX.int()), conv(x, EDGE_INDEX))
    with pytest.raises(TypeError, match=re.escape("edge_index must be int64 or int32")):
        conv(x, EDGE_INDEX.float())


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
    out = ours(x, EDGE_INDEX)
    assert out.shape == (4, 16)
    torch.testing.assert_close(out.view(4, 2, 8)[..., :4].flatten(1), plain(x, EDGE_INDEX))


def test_aggr_none_leaves_it_to_a_subclass() -> None:
    class Doubled(GraphAttentionConv):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
            out = inputs.new_zeros(dim_size, *inputs.shape[1:])
            return 2.0 * out.index_add(0, index, inputs)

    conv = Doubled(5, 4, 2, aggr=None, root_weight=False)
    plain = GraphAttentionConv(5, 4, 2, root_weight=False)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(4, 5)
    torch.testing.assert_close(conv(x, EDGE_INDEX), 2.0 * plain(x, EDGE_INDEX))


def test_replaced_or_watched_aggregation_is_honoured() -> None:
    x = torch.randn(4, 5)
    conv, largest = make("eager", 5, 4), make("eager", 5, 4, aggr="max")
    largest.load_state_dict(conv.state_dict())
    seen = []
    handle = conv.aggr_module.register_forward_hook(lambda *args: seen.append(args[2]))
    out = conv(x, EDGE_INDEX)
    assert len(seen) == 1
    handle.remove()
    torch.testing.assert_close(conv(x, EDGE_INDEX), out)
    assert len(seen) == 1
    conv.aggr_module = MaxAggregation()
    torch.testing.assert_close(conv(x, EDGE_INDEX), largest(x, EDGE_INDEX))
    assert not torch.allclose(conv(x, EDGE_INDEX), out)


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
        conv(torch.randn(4, 5), EDGE_INDEX, *edges).square().sum().backward()
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
        conv(torch.randn(4, 5), EDGE_INDEX, torch.randn(6, 3), return_attention_weights=True)
        assert vars(conv) == before
        assert conv._alpha is None


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("aggr", ["add", "mean"])  # the operator, and messages
def test_c55_exports_in_eval_mode(aggr: str, edge_dim: int | None) -> None:
    conv = make("eager", 5, 4, 2, beta=True, edge_dim=edge_dim, aggr=aggr).eval()
    inputs = [torch.randn(4, 5), EDGE_INDEX, *([] if edge_dim is None else [torch.randn(6, 3)])]
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
        conv(x, EDGE_INDEX, edge_attr, return_attention_weights=True)
        conv(x, EDGE_INDEX, edge_attr).sum().backward()
        expected = conv.eval()(x, EDGE_INDEX, edge_attr)
        buffer = io.BytesIO()
        torch.save(conv.state_dict(), buffer)
        buffer.seek(0)
        loaded = make("eager", 5, 4, 2, edge_dim=3).eval()
        loaded.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
        for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), loaded):
            torch.testing.assert_close(twin(x, EDGE_INDEX, edge_attr), expected)
            assert bool(twin._message_forward_hooks) == (watched and twin is not loaded)
            twin.lin_key.weight.data.zero_()
        assert torch.equal(conv(x, EDGE_INDEX, edge_attr), expected)


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that pickle finds by its name."""


def test_repr() -> None:
    assert repr(GraphAttentionConv(5, 4, heads=2)) == "GraphAttentionConv(5, 4, heads=2)"
    assert repr(GraphAttentionConv((5, 3), 4)) == "GraphAttentionConv((5, 3), 4, heads=1)"


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
        GraphAttentionConv(5, 4)(torch.randn(4, 5), EDGE_INDEX, edge_weight=torch.ones(6))


@pytest.mark.parametrize("path", PATHS)
def test_flow_cannot_turn_what_knows_its_sides(path: str) -> None:
    conv, x = make(path, 5, 4, flow="target_to_source"), torch.randn(4, 5)
    text = "a Graph says itself which side is which. Use graph.reverse() and the default flow."
    with pytest.raises(ValueError, match=re.escape(text)):
        conv(x, Graph(EDGE_INDEX, 4))
    text = "a sparse adj_t says itself which side is which. Use adj_t.t() and the default flow."
    with pytest.raises(ValueError, match=re.escape(text)):
        conv(x, adjacency("coo", EDGE_INDEX, torch.ones(6), (4, 4)))


@pytest.mark.parametrize("path", PATHS)
def test_sizes_that_disagree(path: str) -> None:
    conv = make(path, 5, 4)
    text = "the graph has 4 sources and 4 targets, but the features have 3 and 3"
    for edge_index in (Graph(EDGE_INDEX, 4), adjacency("coo", EDGE_INDEX, torch.ones(6), (4, 4))):
        with pytest.raises(ValueError, match=text):
            conv(torch.randn(3, 5), edge_index)
    with pytest.raises(ValueError, match="but the EdgeIndex has sparse_size"):
        conv(torch.randn(5, 5), EdgeIndex(EDGE_INDEX, sparse_size=(4, 4)))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        GraphAttentionConv(5, 4, backend="cuda")(torch.randn(4, 5), EDGE_INDEX)
