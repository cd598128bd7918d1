"""GraphTransformerLayer against torch's TransformerEncoderLayer, of which it has the parameters."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import Graph, dense_attention
from graphattn.nn import GraphTransformerLayer
from parity import (
    BACKENDS,
    EDGE_INDEX,
    TOLERANCE,
    assert_equal_to,
    assert_same_gradients,
    leaf,
)

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "function": torch.tanh, "module": nn.SiLU()}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


def torch_layer(
    d_model: int = 8, nhead: int = 2, *, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.TransformerEncoderLayer:
    """Torch's layer in which every parameter has been moved from where it starts."""
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True} | options
    layer = nn.TransformerEncoderLayer(d_model, nhead, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def complete(num_nodes: int) -> Graph:
    return Graph.from_mask(torch.ones(num_nodes, num_nodes, dtype=torch.bool))


def window(num_nodes: int) -> Tensor:
    """True where attention is blocked, as torch means it: further than one step away."""
    place = torch.arange(num_nodes)
    return (place[:, None] - place).abs() > 1


# The same numbers #################################################################################


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [True, False])
def test_equals_transformer_encoder_layer(
    bias: bool, activation: str, norm_first: bool, backend: str, dtype: torch.dtype
) -> None:
    for heads, eps in ((1, 1e-5), (4, 0.1)):
        theirs = torch_layer(
            8,
            heads,
            bias=bias,
            activation=ACTIVATIONS[activation],
            norm_first=norm_first,
            layer_norm_eps=eps,
            dtype=dtype,
        )
        ours = GraphTransformerLayer.from_torch(theirs, backend=backend)
        x = leaf(6, 8, dtype=dtype)
        assert_same_gradients(ours, theirs, ours(x, complete(6)), theirs(x), [x])
        blocked = window(6)
        out, expected = ours(x, Graph.from_mask(~blocked)), theirs(x, src_mask=blocked)
        assert_same_gradients(ours, theirs, out, expected, [x])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_c46_train_and_eval_agree_with_torch(
    activation: str, norm_first: bool, backend: str
) -> None:
    # In eval and without gradients torch takes a fast path of its own.
    theirs = torch_layer(dtype=torch.float32, activation=activation, norm_first=norm_first)
    ours = GraphTransformerLayer.from_torch(theirs, backend=backend)
    x, blocked = torch.randn(3, 6, 8), window(6)
    graph = Graph.from_mask(~blocked)
    train = ours(x, graph)
    assert_equal_to(train, theirs(x, src_mask=blocked))
    with torch.no_grad():
        out = ours.eval()(x, graph)
        assert torch.equal(out, train)
        assert_equal_to(out, theirs.eval()(x, src_mask=blocked))


@pytest.mark.parametrize("batch_first", [True, False])
def test_batches_in_either_layout(batch_first: bool) -> None:
    theirs = torch_layer(batch_first=batch_first)
    ours = GraphTransformerLayer.from_torch(theirs)
    x, blocked = leaf(3, 6, 8), window(6)
    expected = theirs(x if batch_first else x.transpose(0, 1), src_mask=blocked)
    expected = expected if batch_first else expected.transpose(0, 1)
    assert_same_gradients(ours, theirs, ours(x, Graph.from_mask(~blocked)), expected, [x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_batch(backend: str) -> None:
    theirs = torch_layer()
    ours = GraphTransformerLayer.from_torch(theirs, backend=backend)
    x = leaf(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    graph = Graph.from_mask(~padding[:, None, :].expand(3, 5, 5))
    out = ours(x.flatten(0, 1), graph).view(3, 5, 8)
    expected = theirs(x, src_key_padding_mask=padding)
    assert_same_gradients(ours, theirs, out, expected, [x])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
def test_stack_from_the_layers_of_an_encoder(with_norm: bool, norm_first: bool) -> None:
    encoder = nn.TransformerEncoder(
        torch_layer(norm_first=norm_first),
        num_layers=3,
        norm=nn.LayerNorm(8).double() if with_norm else None,
        enable_nested_tensor=False,
    )
    for layer in encoder.layers:
        nn.init.normal_(layer.linear1.weight, std=0.3)
    stack = nn.ModuleList(GraphTransformerLayer.from_torch(layer) for layer in encoder.layers)
    x, blocked = leaf(6, 8), window(6)
    graph, out = Graph.from_mask(~blocked), x
    for layer in stack:
        out = layer(out, graph)
    out = out if encoder.norm is None else encoder.norm(out)
    assert_same_gradients(stack, encoder.layers, out, encoder(x, mask=blocked), [x])
    # The names of a stack's parameters are those of the encoder's layers.
    stack.load_state_dict(encoder.layers.state_dict(), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_c52_equals_a_hand_written_block(norm_first: bool, backend: str) -> None:
    layer = GraphTransformerLayer(
        8, 2, 12, 0.0, "gelu", 1e-3, norm_first=norm_first, edge_dim=3, backend=backend
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    weights = dict(layer.named_parameters())
    x, edge_attr, bias = leaf(4, 8), leaf(6, 3), leaf(6, 2)

    def norm(y: Tensor, which: int) -> Tensor:
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
        return y * weights[f"norm{which}.weight"] + weights[f"norm{which}.bias"]

    def attend(y: Tensor) -> Tensor:
        q, k, v = F.linear(
            y, weights["self_attn.in_proj_weight"], weights["self_attn.in_proj_bias"]
        ).chunk(3, dim=-1)
        extra = edge_attr @ weights["self_attn.lin_edge.weight"].t()
        source, target = EDGE_INDEX
        out, _ = dense_attention(
            q.view(4, 2, 4),
            (k[source] + extra).view(6, 2, 4),
            (v[source] + extra).view(6, 2, 4),
            target == torch.arange(4)[:, None],
            bias=bias.t()[:, None],
        )
        return F.linear(
            out.flatten(1), weights["self_attn.out_proj.weight"], weights["self_attn.out_proj.bias"]
        )

    def transform(y: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(y, weights["linear1.weight"], weights["linear1.bias"]))
        return F.linear(hidden, weights["linear2.weight"], weights["linear2.bias"])

    if norm_first:
        y = x + attend(norm(x, 1))
        expected = y + transform(norm(y, 2))
    else:
        y = norm(x + attend(x), 1)
        expected = norm(y + transform(y), 2)
    out = layer(x, EDGE_INDEX, bias=bias, edge_attr=edge_attr)
    assert_same_gradients(layer, layer, out, expected, [x, edge_attr, bias])


@pytest.mark.parametrize("backend", BACKENDS)
def test_c51_c52_every_parameter_gets_a_gradient(backend: str) -> None:
    for norm_first, bias, edge_dim, activation in itertools.product(
        (True, False), (True, False), (None, 3), ("relu", nn.PReLU())
    ):
        layer = GraphTransformerLayer(
            8,
            2,
            12,
            activation=activation,
            norm_first=norm_first,
            bias=bias,
            edge_dim=edge_dim,
            backend=backend,
        )
        edges = {} if edge_dim is None else {"edge_attr": torch.randn(6, 3)}
        out = layer(torch.randn(4, 8), EDGE_INDEX, **edges)
        (out * torch.randn_like(out)).sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0.0, name
        layer.zero_grad(set_to_none=True)


# Edges ############################################################################################


@pytest.mark.parametrize("norm_first", [True, False])
def test_bias_is_a_float_mask(norm_first: bool) -> None:
    theirs = torch_layer(norm_first=norm_first)
    ours = GraphTransformerLayer.from_torch(theirs)
    x, mask, graph = leaf(5, 8), leaf(5, 5), complete(5)
    bias = mask[graph.edge_index[1], graph.edge_index[0]][:, None].expand(-1, 2)
    out, expected = ours(x, graph, bias=bias), theirs(x, src_mask=mask)
    assert_same_gradients(ours, theirs, out, expected, [x, mask])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_c39_weights_on_request(norm_first: bool, backend: str) -> None:
    layer = GraphTransformerLayer(
        8, 2, 12, norm_first=norm_first, edge_dim=3, backend=backend
    ).eval()
    x, edge_attr, bias = torch.randn(4, 8), torch.randn(6, 3), torch.randn(6, 2)
    out, weights = layer(
        x, EDGE_INDEX, edge_attr=edge_attr, bias=bias, return_attention_weights=True
    )
    assert torch.equal(out, layer(x, EDGE_INDEX, edge_attr=edge_attr, bias=bias))
    y = layer.norm1(x) if norm_first else x
    _, expected = layer.self_attn(
        y, y, y, EDGE_INDEX, edge_attr=edge_attr, bias=bias, return_attention_weights=True
    )
    assert torch.equal(weights, expected)
    total = torch.zeros(4, 2).index_add(0, EDGE_INDEX[1], weights)
    torch.testing.assert_close(total[:3], torch.ones(3, 2))  # node 3 has no in-edge
    leading = layer(
        x.expand(2, 3, 4, 8), EDGE_INDEX, edge_attr=edge_attr, return_attention_weights=True
    )
    assert [tuple(tensor.shape) for tensor in leading] == [(2, 3, 4, 8), (2, 3, 6, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_c09_c18_node_without_in_edges(norm_first: bool, backend: str) -> None:
    theirs = torch_layer(norm_first=norm_first)
    ours = GraphTransformerLayer.from_torch(theirs, backend=backend)
    x = leaf(4, 8)
    out = ours(x, EDGE_INDEX)
    # Node 3 gets what a block makes of its own features when attention says nothing.
    with torch.no_grad():
        theirs.self_attn.in_proj_weight[16:].zero_()
        theirs.self_attn.in_proj_bias[16:].zero_()
    assert_equal_to(out[3:], theirs(x[3:]))
    out[:3].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_c16_c20_no_edges_and_no_nodes(backend: str) -> None:
    layer = GraphTransformerLayer(8, 2, 12, backend=backend)
    for num_nodes in (0, 4):
        x = torch.randn(num_nodes, 8, requires_grad=True)
        layer.zero_grad()
        out = layer(x, torch.empty(2, 0, dtype=torch.int64))
        assert out.shape == (num_nodes, 8)
        assert out.isfinite().all()
        out.sum().backward()
        assert x.grad.shape == (num_nodes, 8)
        assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_side_by_side_equal_each_alone(backend: str) -> None:
    layer = GraphTransformerLayer(8, 2, 12, backend=backend).eval()
    graphs = [complete(3), Graph(torch.empty(2, 0, dtype=torch.int64), 2), complete(5)]
    x = [torch.randn(graph.num_dst, 8) for graph in graphs]
    together = layer(torch.cat(x), Graph.batch(graphs))
    alone = torch.cat([layer(one, graph) for one, graph in zip(x, graphs, strict=True)])
    torch.testing.assert_close(together, alone)


# Parameters #######################################################################################


@pytest.mark.parametrize("bias", [True, False])
def test_c49_state_dicts_load_strictly_both_ways(bias: bool) -> None:
    theirs = torch_layer(bias=bias)
    ours = GraphTransformerLayer(8, 2, 12, bias=bias).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = leaf(5, 8)
    assert_equal_to(ours.eval()(x, complete(5)), theirs.eval()(x))
    theirs.load_state_dict(GraphTransformerLayer(8, 2, 12, bias=bias).state_dict(), strict=True)


def test_c49_state_dict_names_are_stable() -> None:
    names = [
        "linear1.bias",
        "linear1.weight",
        "linear2.bias",
        "linear2.weight",
        "norm1.bias",
        "norm1.weight",
        "norm2.bias",
        "norm2.weight",
        "self_attn.in_proj_bias",
        "self_attn.in_proj_weight",
        "self_attn.out_proj.bias",
        "self_attn.out_proj.weight",
    ]
    assert sorted(GraphTransformerLayer(8, 2, 12).state_dict()) == names
    with_edges = sorted(GraphTransformerLayer(8, 2, 12, edge_dim=3).state_dict())
    assert with_edges == sorted([*names, "self_attn.lin_edge.weight"])


def test_same_defaults_as_torch() -> None:
    ours, theirs = GraphTransformerLayer(8, 2), nn.TransformerEncoderLayer(8, 2)
    for name, parameter in theirs.named_parameters():
        assert ours.get_parameter(name).shape == parameter.shape
    for name in ("dropout", "dropout1", "dropout2"):
        assert getattr(ours, name).p == getattr(theirs, name).p
    assert ours.self_attn.dropout == theirs.self_attn.dropout
    assert (ours.norm1.eps, ours.norm2.eps) == (theirs.norm1.eps, theirs.norm2.eps)
    assert ours.activation is theirs.activation
    assert ours.norm_first == theirs.norm_first


def test_from_torch_copies() -> None:
    for dtype, training in ((torch.float64, True), (torch.bfloat16, False)):
        theirs = torch_layer(activation=nn.PReLU(), dtype=dtype, dropout=0.1).train(training)
        # As people change it after construction.
        theirs.self_attn.dropout, theirs.dropout.p, theirs.dropout1.p = 0.5, 0.2, 0.3
        theirs.dropout2.p, theirs.norm2.eps = 0.4, 1e-2
        ours = GraphTransformerLayer.from_torch(theirs, backend="eager")
        assert (ours.self_attn.dropout, ours.dropout.p, ours.dropout1.p) == (0.5, 0.2, 0.3)
        assert (ours.dropout2.p, ours.norm1.eps, ours.norm2.eps) == (0.4, 1e-5, 1e-2)
        assert (ours.training, ours.self_attn.training) == (training, training)
        assert ours.self_attn.backend == "eager"
        originals = dict(theirs.named_parameters())
        assert set(originals) == {name for name, _ in ours.named_parameters()}
        for name, parameter in ours.named_parameters():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, originals[name]), name
            assert parameter.data_ptr() != originals[name].data_ptr(), f"{name} is shared"
    assert GraphTransformerLayer.from_torch(theirs).self_attn.backend == "auto"


def test_reset_parameters_draws_everything_anew() -> None:
    layer = GraphTransformerLayer(64, 4, 96, activation=nn.PReLU(), edge_dim=3)
    theirs = nn.TransformerEncoderLayer(64, 4, 96, activation=nn.PReLU())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert not (parameter == 7.0).any(), name
        if "lin_edge" in name:
            continue
        like = theirs.get_parameter(name)
        assert parameter.abs().max() <= 1.1 * like.abs().max(), name
        if like.numel() > 1000:
            torch.testing.assert_close(parameter.std(), like.std(), rtol=0.15, atol=0.0)
        elif "norm" in name or "in_proj_bias" in name:
            assert torch.equal(parameter, like), name
    assert torch.equal(layer.activation.weight, torch.full((1,), 0.25))


# Training #########################################################################################


@pytest.mark.parametrize("norm_first", [True, False])
def test_c45_dropout_in_training_only(norm_first: bool) -> None:
    theirs = torch_layer(8, 2, dropout=0.3, norm_first=norm_first, dtype=torch.float32)
    ours = GraphTransformerLayer.from_torch(theirs)
    x, graph = torch.randn(4, 8), complete(4)
    many = x.expand(20_000, 4, 8)
    draws, others = ours(many, graph), theirs(many)
    noise = (draws.var(0) + others.var(0)).sqrt() / math.sqrt(20_000)
    assert ((draws.mean(0) - others.mean(0)).abs() <= 5.0 * noise).all()
    torch.testing.assert_close(draws.std(0), others.std(0), rtol=0.1, atol=0.0)
    ours.eval()
    assert torch.equal(ours(x, graph), ours(x, graph))
    assert_equal_to(ours(x, graph), theirs.eval()(x))


@pytest.mark.parametrize("place", ["self_attn", "dropout", "dropout1", "dropout2"])
def test_c45_each_dropout_acts_where_torch_has_it(place: str) -> None:
    theirs = torch_layer(dtype=torch.float32)
    module = theirs.get_submodule(place)
    if place == "self_attn":
        module.dropout = 0.3
    else:
        module.p = 0.3
    ours = GraphTransformerLayer.from_torch(theirs)
    many = torch.randn(4, 8).expand(20_000, 4, 8)
    draws, others = ours(many, complete(4)), theirs(many)
    torch.testing.assert_close(draws.std(0), others.std(0), rtol=0.1, atol=0.0)
    assert draws.std(0).min() > 0.0


def test_a_hidden_activation_is_called_once() -> None:
    calls = []

    def activation(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x.relu()

    layer = GraphTransformerLayer(8, 2, 12, 0.0, activation)
    plain = GraphTransformerLayer(8, 2, 12, 0.0)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(layer(x, EDGE_INDEX), plain(x, EDGE_INDEX))
    assert calls == [(4, 12)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast_and_pure_low_precision(dtype: torch.dtype, backend: str) -> None:
    layer = GraphTransformerLayer(8, 2, 12, 0.0, norm_first=True, edge_dim=3, backend=backend)
    x, edge_attr = torch.randn(4, 8), torch.randn(6, 3)
    expected = layer(x, EDGE_INDEX, edge_attr=edge_attr)
    with torch.autocast("cpu", dtype):
        out = layer(x, EDGE_INDEX, edge_attr=edge_attr)
    assert out.dtype == torch.float32  # the residual stream keeps its precision
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
    layer = layer.to(dtype)
    out = layer(x.to(dtype), EDGE_INDEX, edge_attr=edge_attr.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_after_forward_and_backward(
    make: Callable[[GraphTransformerLayer], GraphTransformerLayer],
) -> None:
    layer, x = GraphTransformerLayer(8, 2, 12, 0.0, edge_dim=3), torch.randn(4, 8)
    edge_attr = torch.randn(6, 3)
    expected = layer(x, EDGE_INDEX, edge_attr=edge_attr)
    expected.sum().backward()
    assert torch.equal(make(layer)(x, EDGE_INDEX, edge_attr=edge_attr), expected)


def test_c55_attributes_and_export() -> None:
    layer, inputs = GraphTransformerLayer(8, 2, 12).eval(), (torch.randn(4, 8), EDGE_INDEX)
    before = dict(vars(layer))
    expected = layer(*inputs)
    assert vars(layer) == before
    program = torch.export.export(layer, inputs)
    torch.testing.assert_close(program.module()(*inputs), expected)


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"activation": "swish"},
            "GraphTransformerLayer: activation must be 'relu', 'gelu' or a function, got 'swish'.",
        ),
        (
            {"dim_feedforward": 0},
            "GraphTransformerLayer: dim_feedforward must be at least 1, got 0.",
        ),
        ({"nhead": 3}, "embed_dim 8 must be divisible by num_heads 3"),
        ({"dropout": -0.1}, "dropout must be a probability from 0 to 1, got -0.1"),
        ({"edge_dim": 0}, "edge_dim must be at least 1, got 0"),
    ],
    ids=str,
)
def test_c42_constructor_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        GraphTransformerLayer(**({"d_model": 8, "nhead": 2} | options))


def test_edge_attr_given_or_missing() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="edge_attr is given, but the layer was built with edge_"):
        GraphTransformerLayer(8, 2, 12)(x, EDGE_INDEX, edge_attr=torch.randn(6, 3))
    with pytest.raises(ValueError, match="edge_attr is missing, but the layer was built with edge"):
        GraphTransformerLayer(8, 2, 12, edge_dim=3)(x, EDGE_INDEX)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_first'"):
        GraphTransformerLayer(8, 2, batch_first=True)
