"""GraphTransformer: every option trains, every input does what it says, every mistake is named."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from graphattn import Graph, _native
from graphattn.models import GraphTransformer, graph_transformer, mask_labels

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


KINDS = [{}, {"feedforward": 32}, {"gated": True}]


@pytest.mark.parametrize("global_layers", [0, 2])
@pytest.mark.parametrize("jumping_knowledge", ["cat", "max", "sum", None])
@pytest.mark.parametrize("kind", KINDS)
def test_c51_layers_of_every_kind_and_what_comes_after(kind, jumping_knowledge, global_layers):
    options = {"jumping_knowledge": jumping_knowledge, "global_layers": global_layers}
    model = GraphTransformer(8, 16, 3, 3, 4, edge_dim=2, **options, **kind)
    out = model(X, EDGES, edge_attr=torch.randn(6, 2))
    assert out.shape == (5, 3)
    every_parameter_has_a_gradient(model, out)


def outputs_of_layers(model):
    """What each layer gives, once the model is called."""
    outputs = []
    for index, layer in enumerate(model.layers):
        # With a normalisation and an activation after it, that counts.
        last = model.norms[index] if index < len(model.norms) else layer
        last.register_forward_hook(
            lambda _, inputs, out: outputs.append(out.relu() if model.plain else out)
        )
    return outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jump", ["cat", "max", "sum"])
def test_jumping_knowledge_reads_all_layers(kind, jump):
    model = GraphTransformer(8, 16, 3, 3, 4, jumping_knowledge=jump, **kind).eval()
    outputs = outputs_of_layers(model)
    out = model(X, EDGES)
    assert len(outputs) == 3
    if jump == "cat":
        joined = torch.cat(outputs, dim=1) @ model.lin_jump.weight.T + model.lin_jump.bias
    else:
        joined = torch.stack(outputs).sum(0) if jump == "sum" else torch.stack(outputs).max(0)[0]
    if model.final_norm is not None:
        joined = model.final_norm(joined)
    torch.testing.assert_close(model.head(joined), out)


def test_diffusion_spreads_what_the_layers_made_to_the_head():
    model = GraphTransformer(8, 16, 3, 2, 4, diffusion_steps=3, teleport=0.2).eval()
    outputs = outputs_of_layers(model)
    out = model(X, EDGES)
    assert (model.diffusion.steps, model.diffusion.teleport, model.diffusion.heads) == (3, 0.2, 4)
    torch.testing.assert_close(model.head(model.diffusion(outputs[-1], EDGES)), out)
    without = GraphTransformer(8, 16, 3, 2, 4)
    assert without.diffusion is None


def test_no_layers_but_diffusion_is_agnn():
    model = GraphTransformer(8, 16, 3, 0, 4, diffusion_steps=2)
    assert [name for name, _ in model.named_parameters()] == [
        *("lin_in.weight", "lin_in.bias", "diffusion.beta", "head.weight", "head.bias")
    ]
    out = model.eval()(X, EDGES)
    torch.testing.assert_close(model.head(model.diffusion(model.lin_in(X).relu(), EDGES)), out)
    every_parameter_has_a_gradient(model, out)


@pytest.mark.parametrize("kind", [*KINDS, {"global_layers": 1}])
def test_diffusion_after_layers_of_every_kind(kind):
    model = GraphTransformer(
        8, 16, 3, 2, 4, diffusion_steps=2, dropout=0.1, attention_dropout=0.1, **kind
    )
    every_parameter_has_a_gradient(model, model(X, EDGES))


def test_residual_adds_the_input_of_each_layer():
    torch.manual_seed(0)
    model = GraphTransformer(8, 16, 3, 2, 4, residual=True, norm=None).eval()
    h = X @ model.lin_in.weight.T + model.lin_in.bias
    for conv in model.layers:
        h = h + conv(h, EDGES).relu()
    torch.testing.assert_close(model(X, EDGES), model.head(h))
    # The first layer changes the size: there is nothing to add.
    model = GraphTransformer(8, 16, 3, 1, 4, residual=True, input_projection=False).eval()
    h = model.norms[0](model.layers[0](X, EDGES)).relu()
    torch.testing.assert_close(model(X, EDGES), model.head(h))


def test_gated_model_is_a_sum_of_its_layers_then_attention_to_all():
    model = GraphTransformer(
        8, 16, 3, 2, 4, gated=True, jumping_knowledge="sum", global_layers=1
    ).eval()
    h, total = model.lin_in(X), 0.0
    for layer in model.layers:
        h = layer(h, EDGES)
        total = total + h
    nodes = torch.zeros(5, dtype=torch.int64)
    h = model.global_layers[0](model.global_norm(total), nodes)
    torch.testing.assert_close(model(X, EDGES), model.head(h))


@pytest.mark.parametrize("kind", KINDS)
def test_c75_global_layers_do_not_mix_graphs(kind):
    model = GraphTransformer(8, 16, 3, 2, 4, global_layers=2, **kind).eval()
    edges = torch.cat([EDGES, EDGES + 5], dim=1)
    batch = torch.tensor([0] * 5 + [1] * 5)
    together = model(torch.cat([X, 2 * X]), edges, batch=batch)
    torch.testing.assert_close(together, torch.cat([model(X, EDGES), model(2 * X, EDGES)]))
    # The isolated node hears of all others, as it does not without global layers.
    changed = X.clone()
    changed[0] += 1.0
    assert not torch.allclose(model(changed, EDGES)[4], model(X, EDGES)[4])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_gain_scales_queries_and_keys_at_the_start(kind):
    torch.manual_seed(0)
    model = GraphTransformer(8, 16, 3, 2, 4, **kind).eval()
    torch.manual_seed(0)
    scaled = GraphTransformer(8, 16, 3, 2, 4, attention_gain=0.5, **kind).eval()
    state = scaled.state_dict()
    for name, parameter in model.state_dict().items():
        if name.endswith(("lin_query.weight", "lin_key.weight")):
            parameter *= 0.5
        elif name.endswith("in_proj_weight"):
            parameter[:32] *= 0.5
        assert torch.equal(state[name], parameter), name
    flat = GraphTransformer(8, 16, 3, 2, 4, attention_gain=1e-6, **kind).eval()
    flat.reset_parameters()
    weights = flat(X, EDGES, return_attention_weights=True)[1]
    degree = torch.bincount(EDGES[1])[EDGES[1]]
    torch.testing.assert_close(weights[0], (1.0 / degree)[:, None].expand(-1, 4))


def test_degree_scaling_tells_how_many_neighbours_agree():
    # Two hubs, of 3 and of 15 neighbours, all nodes alike: their means are too.
    edges = torch.stack([torch.arange(2, 20), torch.tensor([0] * 3 + [1] * 15)])
    degree = torch.bincount(edges[1], minlength=20).unsqueeze(1)
    before_norm = {}
    for power in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        model = GraphTransformer(8, 16, 3, 1, 4, norm="batch", degree_scaling=power).eval()
        model.norms[0].register_forward_pre_hook(
            lambda _, inputs, power=power: before_norm.update({power: inputs[0].detach()})
        )
        model(torch.ones(20, 8), edges)
        torch.testing.assert_close(before_norm[power], before_norm[0.0] * (1 + degree) ** power)
    torch.testing.assert_close(before_norm[0.0][0], before_norm[0.0][1])
    torch.testing.assert_close(before_norm[0.5][1], 2 * before_norm[0.5][0])
    # Degrees are those of the whole graph, also while edges are dropped: here all of them.
    model.edge_dropout = 1.0
    model.train()(torch.ones(20, 8), edges)
    alone = model.layers[0](model.lin_in(torch.ones(20, 8)), edges[:, :0])
    torch.testing.assert_close(before_norm[1.0], alone * (1 + degree))


def test_input_dropout_is_that_of_features():
    model = GraphTransformer(
        8, 16, 3, 2, 4, dropout=1.0, input_dropout=0.0, input_projection=False, norm=None
    )
    reached = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0]))
    model.layers[1].register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0]))
    model(X, EDGES)
    assert torch.equal(reached[0], X)
    assert not reached[1].any()
    model = GraphTransformer(8, 16, 3, 2, 4, dropout=0.0, input_dropout=1.0)
    torch.testing.assert_close(model(X, EDGES), model(0 * X, EDGES))
    assert not torch.allclose(model.eval()(X, EDGES), model(0 * X, EDGES))
    assert GraphTransformer(8, 16, 3, dropout=0.3).input_dropout == 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_edge_dropout_leaves_out_edges_in_training(kind, monkeypatch):
    model = GraphTransformer(8, 16, 3, 2, 4, edge_dim=2, edge_dropout=0.5, **kind)
    edge_attr = torch.randn(6, 2)
    monkeypatch.setattr(
        torch, "rand", lambda *size, **_: torch.tensor([0.1, 0.9, 0.5, 0.4, 0.6, 0.2])
    )
    out, kept = model(X, EDGES, edge_attr=edge_attr), torch.tensor([1, 2, 4])
    torch.testing.assert_close(out, model.eval()(X, EDGES[:, kept], edge_attr=edge_attr[kept]))
    assert not torch.allclose(out, model(X, EDGES, edge_attr=edge_attr))


def test_edge_dropout_at_its_ends_and_with_weights():
    model = GraphTransformer(8, 16, 3, 2, 4, edge_dropout=1.0)
    torch.testing.assert_close(model(X, EDGES), model(X, EDGES[:, :0]))
    with pytest.raises(ValueError, match="return_attention_weights=True while edge_dropout"):
        model(X, EDGES, return_attention_weights=True)
    out, weights = model.eval()(X, EDGES, return_attention_weights=True)
    assert out.shape == (5, 3)
    assert weights[0].shape == (6, 4)


def test_shares_of_labels_are_inputs_too():
    model = GraphTransformer(8, 16, 3, 2, 4, label_classes=3).eval()
    hard = torch.tensor([2, -1, 0, 1, -1])
    soft = torch.zeros(5, 3)
    soft[[0, 2, 3], [2, 0, 1]] = 1.0
    torch.testing.assert_close(model(X, EDGES, labels=soft), model(X, EDGES, labels=hard))
    soft[1] = torch.tensor([0.2, 0.3, 0.5])
    expected = model.lin_in(X) + soft @ model.label_embedding.weight[1:]
    torch.testing.assert_close(model._inputs(X, Graph(EDGES, 5), soft, None), expected)


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
    for options in KINDS:
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


@pytest.mark.parametrize(
    "options", [{}, {"feedforward": 32}, {"norm": "batch"}, {"gated": True, "global_layers": 1}]
)
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
    "options",
    [
        {"head": "attention"},
        {"feedforward": 32},
        {"input_projection": False},
        {"gated": True, "jumping_knowledge": "cat", "global_layers": 1},
        {"diffusion_steps": 2},
    ],
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
        ({"num_layers": 0}, "expected num_layers >= 1 and .* num_layers=0"),
        ({"num_layers": -1, "diffusion_steps": 2}, "expected num_layers >= 0 and"),
        ({"num_layers": 0, "diffusion_steps": 2, "gated": True}, "num_layers=0 leaves no layers"),
        ({"num_layers": 0, "diffusion_steps": 2, "edge_dim": 3}, "num_layers=0 leaves no layers"),
        ({"diffusion_steps": -1}, "diffusion_steps must be at least 0, got -1"),
        ({"teleport": 2.0}, "teleport must be a probability from 0 to 1"),
        ({"head": "attention", "diffusion_steps": 1}, "no global_layers and no diffusion_steps"),
        ({"in_channels": 0}, "there is no input"),
        ({"input_projection": False, "feedforward": 32}, "input_projection=False needs features"),
        ({"input_projection": False, "label_classes": 3}, "input_projection=False needs features"),
        ({"head": "attention", "feedforward": 32}, "head='attention' needs target='node'"),
        ({"head": "attention", "target": "graph"}, "head='attention' needs target='node'"),
        ({"head": "attention", "gated": True}, "head='attention' needs target='node'"),
        ({"head": "attention", "global_layers": 1}, "no jumping_knowledge, no global_layers"),
        ({"gated": True, "feedforward": 32}, "gated=True and feedforward exclude each other"),
        ({"gated": True, "input_projection": False}, "input_projection=False needs features"),
        ({"jumping_knowledge": "lstm"}, "jumping_knowledge must be one of 'cat', 'max', 'sum', N"),
        ({"attention_gain": 0.0}, "attention_gain must be above 0, got 0.0"),
        ({"degree_scaling": 0.5}, "degree_scaling needs attention layers .* norm='layer'"),
        ({"degree_scaling": 1.0, "norm": "batch", "gated": True}, "degree_scaling needs"),
        ({"degree_scaling": 1.0, "norm": "batch", "feedforward": 8}, "degree_scaling needs"),
        ({"global_layers": -1}, "global_layers must be at least 0, got -1"),
        ({"edge_dropout": 1.5}, "edge_dropout must be a probability from 0 to 1, got 1.5"),
        ({"input_dropout": -0.1}, "input_dropout must be a probability from 0 to 1, got -0.1"),
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


NEW = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")


@NEW
@pytest.mark.parametrize(
    "options", [{}, {"input_projection": False}, {"gated": True}, {"feedforward": 32}]
)
def test_sparse_features_give_what_dense_ones_give(options):
    torch.manual_seed(0)
    x = torch.rand(20, 30) * (torch.rand(20, 30) < 0.1)
    edge_index = torch.randint(20, (2, 60))
    model = GraphTransformer(30, 16, 3, 2, 4, dropout=0.5, **options).eval()
    results = []
    for rows in (x, x.to_sparse_csr()):
        out = model(rows, edge_index)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(*results)
    loss = model.train()(x.to_sparse_csr(), edge_index).sum()  # with dropout of what is stored
    loss.backward()
    assert loss.isfinite()


@NEW
def test_dropout_of_sparse_features_keeps_their_expectation():
    rows = torch.ones(200, 50).to_sparse_csr()
    dropped = graph_transformer._dropout(rows, 0.4, True).to_dense()
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)
    assert graph_transformer._dropout(rows, 0.4, False).to_dense().eq(1.0).all()
