"""GraphTransformer: every option trains, every input does what it says, every mistake is named."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from graphattn import Graph, _native
from graphattn.models import GraphTransformer, mask_labels

EDGES = torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 0, 0, 1, 1]])
X = torch.linspace(-1.0, 1.0, 40).view(5, 8)  # node 4 is isolated


def every_parameter_has_a_gradient(model: GraphTransformer, out: torch.Tensor) -> None:
    out.square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize(
    ("head", "norm", "beta", "root_weight", "edge_dim"),
    list(
        itertools.product(
            ("linear", "attention"),
            ("layer", "batch", None),
            (False, True),
            (False, True),
            (None, 3),
        )
    ),
)
def test_attention_layers_with_every_option(head, norm, beta, root_weight, edge_dim):
    model = GraphTransformer(
        8,
        16,
        3,
        num_layers=2,
        heads=4,
        head=head,
        norm=norm,
        beta=beta,
        root_weight=root_weight,
        edge_dim=edge_dim,
        dropout=0.1,
        attention_dropout=0.1,
    )
    edge_attr = None if edge_dim is None else torch.randn(6, edge_dim)
    out = model(X, EDGES, edge_attr=edge_attr)
    assert out.shape == (5, 3)
    every_parameter_has_a_gradient(model, out)


@pytest.mark.parametrize("activation", ["relu", "gelu", "elu"])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_c51_transformer_blocks_train_every_parameter(activation, edge_dim):
    model = GraphTransformer(
        8, 16, 3, 2, 4, feedforward=32, activation=activation, edge_dim=edge_dim
    )
    edge_attr = None if edge_dim is None else torch.randn(6, edge_dim)
    every_parameter_has_a_gradient(model, model(X, EDGES, edge_attr=edge_attr))


def test_every_input_together():
    model = GraphTransformer(
        8, 16, 3, 2, 4, label_classes=3, degree_encoding=True, encoding_channels=2
    )
    labels = torch.tensor([0, -1, 2, 1, -1])
    encoding = torch.randn(5, 2)
    out = model(X, EDGES, labels=labels, encoding=encoding)
    every_parameter_has_a_gradient(model, out)


def test_labels_alone_are_an_input_and_unknown_ones_are_not():
    torch.manual_seed(0)
    model = GraphTransformer(0, 16, 3, 2, 4, label_classes=3).eval()
    graph = Graph(EDGES, 5)
    unknown = torch.full((5,), -1)
    known = torch.tensor([2, -1, -1, -1, -1])
    silent, told = (model(None, graph, labels=labels) for labels in (unknown, known))
    changed = (silent != told).any(dim=1)
    # Node 0 reaches itself and node 1 in one step, node 2 in two; 3 and 4 have no path from it.
    assert changed.tolist() == [True, True, True, False, False]


def test_degrees_alone_tell_a_hub_from_a_leaf():
    model = GraphTransformer(0, 16, 2, 1, 2, degree_encoding=True, root_weight=True).eval()
    star = Graph(torch.tensor([range(1, 9), [0] * 8]), 9)
    out = model(None, star)
    assert not torch.allclose(out[0], out[1])
    assert torch.equal(out[1], out[8])


def test_weights_of_each_layer_come_in_the_callers_edge_order():
    for options in ({}, {"feedforward": 32}):
        model = GraphTransformer(8, 16, 3, num_layers=3, heads=4, **options).eval()
        out, weights = model(X, EDGES, return_attention_weights=True)
        torch.testing.assert_close(out, model(X, EDGES))
        assert [tuple(alpha.shape) for alpha in weights] == [(6, 4)] * 3
        for alpha in weights:
            sums = torch.zeros(5, 4).index_add(0, EDGES[1], alpha)
            torch.testing.assert_close(sums[:3], torch.ones(3, 4))
            assert torch.equal(sums[3:], torch.zeros(2, 4))


def test_c17_graph_target_with_empty_graphs():
    model = GraphTransformer(8, 16, 2, 2, 4, target="graph").eval()
    batch = torch.tensor([0, 0, 0, 0, 2])
    out = model(X, EDGES, batch=batch, batch_size=4)
    assert out.shape == (4, 2)
    assert out.isfinite().all()
    assert torch.equal(out[1], out[3])


@pytest.mark.parametrize("options", [{}, {"feedforward": 32}, {"norm": "batch"}])
def test_a_batch_of_graphs_equals_its_parts(options):
    model = GraphTransformer(8, 16, 2, 2, 4, target="graph", **options).eval()
    other = torch.tensor([[0, 1], [1, 2]])
    x = torch.randn(3, 8)
    together = model(
        torch.cat([X, x]),
        torch.cat([EDGES, other + 5], dim=1),
        batch=torch.tensor([0] * 5 + [1] * 3),
    )
    alone = [
        model(X, EDGES, batch=torch.zeros(5, dtype=torch.long)),
        model(x, other, batch=torch.zeros(3, dtype=torch.long)),
    ]
    torch.testing.assert_close(together, torch.cat(alone))


def test_edge_target_is_directed():
    model = GraphTransformer(8, 16, 1, 2, 4, target="edge").eval()
    out = model(X, EDGES, edge_label_index=torch.tensor([[0, 1, 4], [1, 0, 0]]))
    assert out.shape == (3, 1)
    assert not torch.allclose(out[0], out[1])
    model = GraphTransformer(8, 16, 1, 2, 4, target="edge", feedforward=32)
    every_parameter_has_a_gradient(
        model, model(X, EDGES, edge_label_index=torch.tensor([[0], [1]]))
    )


def test_renaming_nodes_permutes_the_output():
    model = GraphTransformer(8, 16, 3, 2, 4, feedforward=32, degree_encoding=True).eval()
    order = torch.tensor([3, 0, 4, 1, 2])  # node i becomes order[i]
    moved = torch.empty_like(X).index_copy_(0, order, X)
    torch.testing.assert_close(model(moved, order[EDGES])[order], model(X, EDGES))


def test_c45_dropout_is_off_in_evaluation():
    for options in ({}, {"feedforward": 32}):
        model = GraphTransformer(8, 16, 3, 2, 4, dropout=0.5, attention_dropout=0.5, **options)
        assert not torch.equal(model(X, EDGES), model(X, EDGES))
        model.eval()
        assert torch.equal(model(X, EDGES), model(X, EDGES))


@pytest.mark.parametrize(
    "options", [{"head": "attention"}, {"feedforward": 32}, {"input_projection": False}]
)
def test_state_dict_copy_and_reset(options):
    torch.manual_seed(0)
    model = GraphTransformer(8, 16, 3, 2, 4, **options).eval()
    out = model(X, EDGES)
    twin = GraphTransformer(8, 16, 3, 2, 4, **options).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(X, EDGES), out)
    assert torch.equal(copy.deepcopy(model)(X, EDGES), out)
    torch.manual_seed(1)
    twin.reset_parameters()
    assert not torch.equal(twin(X, EDGES), out)


def test_an_edge_index_is_sorted_once_for_all_layers(monkeypatch):
    calls = []

    def count(module, name):
        sort = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(name) or sort(*a, **k))

    count(torch, "sort")
    count(_native, "sort_by_target")
    edges = EDGES.clone()
    model = GraphTransformer(8, 16, 3, num_layers=10, heads=4)
    with torch.no_grad():
        model(X, edges)
        model(X, edges)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "nodes"}, "target must be one of 'node', 'edge', 'graph', got 'nodes'"),
        ({"head": "mlp"}, "head must be one of 'linear', 'attention', got 'mlp'"),
        ({"norm": "group"}, "norm must be one of 'layer', 'batch', None, got 'group'"),
        ({"activation": "tanh"}, "activation must be one of 'relu', 'gelu', 'elu', got 'tanh'"),
        ({"heads": 3}, "hidden_channels=16, heads=3"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"in_channels": 0}, "there is no input"),
        ({"input_projection": False, "feedforward": 32}, "input_projection=False needs features"),
        ({"input_projection": False, "label_classes": 3}, "input_projection=False needs features"),
        ({"head": "attention", "feedforward": 32}, "head='attention' needs target='node'"),
        ({"head": "attention", "target": "graph"}, "head='attention' needs target='node'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformer(**{"in_channels": 8, "hidden_channels": 16, "out_channels": 3, **options})


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"labels": torch.zeros(5, dtype=torch.long)}, "labels is given, but"),
        ({}, {"encoding": torch.zeros(5, 2)}, "encoding is given, but"),
        (
            {},
            {"edge_label_index": torch.zeros(2, 1, dtype=torch.long)},
            "edge_label_index is given",
        ),
        ({"label_classes": 3}, {}, "labels is missing"),
        ({"encoding_channels": 2}, {}, "encoding is missing"),
        ({"target": "edge"}, {}, "edge_label_index is missing"),
        ({"in_channels": 0, "degree_encoding": True}, {}, "x is given, but"),
    ],
)
def test_wrong_inputs_are_named(options, given, message):
    model = GraphTransformer(
        **{"in_channels": 8, "hidden_channels": 16, "out_channels": 3, **options}
    )
    with pytest.raises(ValueError, match=message):
        model(X, EDGES, **given)


def test_c38_graph_target_needs_to_know_the_graphs():
    model = GraphTransformer(8, 16, 3, target="graph")
    with pytest.raises(ValueError, match="batch is missing"):
        model(X, EDGES)


def test_c22_missing_features_and_an_edge_index_do_not_tell_the_number_of_nodes():
    model = GraphTransformer(0, 16, 3, degree_encoding=True)
    with pytest.raises(ValueError, match="nothing tells the number of nodes"):
        model(None, EDGES)
    assert model(None, Graph(EDGES, 7)).shape == (7, 3)
    with pytest.raises(ValueError, match="x is missing"):
        GraphTransformer(8, 16, 3)(None, EDGES)


def test_mask_labels_shows_the_rate_and_hides_the_rest():
    y = torch.arange(10_000) % 7
    known = torch.arange(10_000) % 2 == 0
    labels, hidden = mask_labels(y, known, 0.625, generator=torch.Generator().manual_seed(0))
    shown = labels >= 0
    assert not (shown & hidden).any()
    assert torch.equal(shown | hidden, known)
    assert torch.equal(labels[shown], y[shown])
    assert 0.60 < shown.sum() / known.sum() < 0.65
    again, _ = mask_labels(y, known, 0.625, generator=torch.Generator().manual_seed(0))
    assert torch.equal(labels, again)


def test_mask_labels_at_the_ends_and_beyond():
    y, known = torch.arange(4), torch.tensor([True, False, True, False])
    labels, hidden = mask_labels(y, known, 0.0)
    assert labels.tolist() == [-1] * 4
    assert torch.equal(hidden, known)
    labels, hidden = mask_labels(y, known, 1.0)
    assert labels.tolist() == [0, -1, 2, -1]
    assert not hidden.any()
    with pytest.raises(ValueError, match=r"rate must be from 0 to 1, got 1\.5"):
        mask_labels(y, known, 1.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"feedforward": 16}])
def test_c56_compiles_without_a_break_for_changing_sizes(options):
    traced = []

    def count(module, example_inputs):
        traced.append(module)
        return module.forward

    torch._dynamo.reset()
    model = GraphTransformer(8, 16, 3, 2, 4, **options)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for num_nodes, num_edges in ((5, 9), (3, 4), (7, 0), (20, 90)):
        x, edge_index = torch.randn(num_nodes, 8), torch.randint(num_nodes, (2, num_edges))
        x.requires_grad_()
        out, expected = compiled(x, edge_index), model(x, edge_index)
        torch.testing.assert_close(out, expected)
        leaves = [x, *model.parameters()]
        weight = torch.randn_like(out)
        for actual, gradient in zip(
            torch.autograd.grad(out, leaves, weight, allow_unused=True),
            torch.autograd.grad(expected, leaves, weight, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(actual, gradient)
    torch._dynamo.reset()
    assert len(traced) <= 3
