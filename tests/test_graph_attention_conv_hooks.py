"""GraphAttentionConv when somebody looks at its messages, and in the company of PyG's modules."""

from __future__ import annotations

import copy
import importlib
import re
import sys
import types
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_geometric.data import Batch, Data
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import HeteroConv, Linear, TransformerConv, to_hetero
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import k_hop_subgraph

import graphattn.nn.attention as attention_module
from graphattn import Graph, edge_softmax
from graphattn.nn import GraphAttentionConv
from parity import (
    EDGE_INDEX,
    PATHS,
    ZOO,
    assert_equal_to,
    assert_same_numbers,
    leaf,
    make,
    pair_of_layers,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


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
        plain = ours(x, EDGE_INDEX)
        for layer in (ours, theirs):
            getattr(layer, f"register_{part}_{kind}")(hook)
        assert_same_numbers(ours, theirs, [x], x, EDGE_INDEX)
        if not (part == "aggregate" and kind == "forward_pre_hook"):
            assert not torch.allclose(ours(x, EDGE_INDEX), plain)


def test_operator_is_used_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_operator_calls(monkeypatch)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3)
    for options in ({}, {"aggr": "sum"}, {"aggr": SumAggregation()}, {"edge_dim": 3}):
        make("eager", 5, 4, **options)(x, EDGE_INDEX, edge_attr if "edge_dim" in options else None)
    # Forward hooks of the layer itself need no messages.
    conv = make("eager", 5, 4)
    seen = []
    conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    conv(x, EDGE_INDEX)
    assert len(seen) == 1
    assert len(calls) == 5


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_on_lin_edge_are_called(kind: str) -> None:
    conv = make("eager", 5, 4, edge_dim=3)
    x, edge_attr = torch.randn(4, 5), torch.randn(6, 3, requires_grad=True)
    expected = conv(x, EDGE_INDEX, edge_attr)
    seen = []
    getattr(conv.lin_edge, f"register_{kind}")(lambda *args: seen.append(args))
    out = conv(x, EDGE_INDEX, edge_attr)
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
        plain = ours(x, EDGE_INDEX, edge_attr)
        theirs.lin_edge = change(theirs).double()
        ours.lin_edge = copy.deepcopy(theirs.lin_edge)
        leaves = [x, edge_attr]
        for layer in (ours, theirs):
            layer.requires_grad_(True)
        assert_same_numbers(ours, theirs, leaves, x, EDGE_INDEX, edge_attr)
        assert not torch.allclose(ours(x, EDGE_INDEX, edge_attr), plain), name

    ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=3)
    for layer in (ours, theirs):
        weight = layer.lin_edge.weight
        layer.lin_edge.forward = lambda features, weight=weight: 2.0 * features @ weight.t()
    assert_same_numbers(ours, theirs, leaves, x, EDGE_INDEX, edge_attr)


def test_parametrized_lin_edge() -> None:
    x, edge_attr = leaf(4, 5), leaf(6, 3)
    for wrap in (
        parametrizations.weight_norm,
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()),
    ):
        ours, theirs = pair_of_layers("eager", 5, 4, 2, edge_dim=3)
        wrap(ours.lin_edge)
        wrap(theirs.lin_edge)
        assert_same_numbers(ours, theirs, [x, edge_attr], x, EDGE_INDEX, edge_attr)


def test_replaced_node_projections_are_honoured() -> None:
    x = leaf(4, 5)
    ours, theirs = pair_of_layers("eager", 5, 4, 2)
    for part in ("lin_query", "lin_key", "lin_value", "lin_skip"):
        setattr(theirs, part, LowRank(getattr(theirs, part)).double())
        setattr(ours, part, copy.deepcopy(getattr(theirs, part)))
    for layer in (ours, theirs):
        layer.requires_grad_(True)
    assert_same_numbers(ours, theirs, [x], x, EDGE_INDEX)


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
    assert_same_numbers(ours, theirs, [x], x, EDGE_INDEX)
    plain = make("eager", 5, 4, 2).double()
    plain.load_state_dict(theirs.state_dict())
    assert not torch.allclose(plain(x, EDGE_INDEX), ours(x, EDGE_INDEX))
    _, (_, alpha) = ours(x, EDGE_INDEX, return_attention_weights=True)
    assert_equal_to(alpha, theirs(x, EDGE_INDEX, return_attention_weights=True)[1][1])


def test_subclass_whose_message_leaves_no_weights() -> None:
    conv, x = TimidConv(5, 4, 2), torch.randn(4, 5)
    assert conv(x, EDGE_INDEX).shape == (4, 8)
    text = re.escape(
        "TimidConv: return_attention_weights=True, but message() did not leave its weights in "
        "self._alpha."
    )
    with pytest.raises(ValueError, match=text):
        conv(x, EDGE_INDEX, return_attention_weights=True)


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
    torch.testing.assert_close(conv(x, EDGE_INDEX), -plain(x, EDGE_INDEX))


def test_message_replaced_on_one_layer() -> None:
    conv, x = make("eager", 5, 4, root_weight=False), torch.randn(4, 5)
    plain = conv(x, EDGE_INDEX)
    inherited = conv.message
    conv.message = types.MethodType(lambda self, **inputs: -inherited(**inputs), conv)
    torch.testing.assert_close(conv(x, EDGE_INDEX), -plain)


def test_weights_are_forgotten_when_a_hook_fails() -> None:
    conv, x = make("eager", 5, 4), torch.randn(4, 5)

    def fail(module: nn.Module, inputs: Any, output: Tensor) -> None:
        raise RuntimeError("a hook of the user")

    conv.register_aggregate_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the user"):
        conv(x, EDGE_INDEX)
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
    assert_same_numbers(ours, theirs, [x], x, EDGE_INDEX)


def test_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyG prints the table with tabulate, which need not be there.
    tabulate = types.ModuleType("tabulate")
    tabulate.tabulate = lambda rows, **options: rows
    monkeypatch.setitem(sys.modules, "tabulate", tabulate)
    summary = importlib.import_module("torch_geometric.nn.summary").summary
    tables = [
        summary(layer, torch.randn(4, 5), EDGE_INDEX, torch.randn(6, 3), leaf_module=None)
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
