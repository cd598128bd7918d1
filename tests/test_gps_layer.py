"""GPSLayer against PyG's GPSConv and by hand; ConformerLayer and PolynormerLayer by hand."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv, GINEConv, GPSConv, SAGEConv
from torch_geometric.utils import to_dense_batch

from graphattn import Graph
from graphattn.nn import GraphAttentionConv, GraphMultiheadAttention
from graphattn.nn.convolution import ConvolutionModule
from graphattn.nn.global_attention import (
    GlobalAttention,
    LinformerAttention,
    PerformerAttention,
    ReformerAttention,
)
from graphattn.nn.gps import ConformerLayer, GPSLayer, GraphSelfAttention, PolynormerLayer
from graphattn.patterns import batch_vector, complete, position, window
from parity import assert_equal_to, leaf

# Graphs of 4, 1 and 3 nodes; node 3 is isolated.
EDGE_INDEX = torch.tensor([[0, 1, 2, 0, 5, 6, 7], [1, 2, 0, 2, 6, 7, 5]])
LENGTHS = [4, 1, 3]
BATCH = batch_vector(LENGTHS)


class DenseAttention(nn.MultiheadAttention):
    """Global attention as a padded batch: the independent way to what ``(x, batch)`` means."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, heads, batch_first=True)

    def reset_parameters(self) -> None:
        self._reset_parameters()

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        padded, mask = to_dense_batch(x, batch)
        return super().forward(padded, padded, padded, key_padding_mask=~mask)[0][mask]


def self_attention(channels: int, heads: int, **options: object) -> GraphSelfAttention:
    return GraphSelfAttention(GraphMultiheadAttention(channels, heads, **options))


def moved(module: nn.Module) -> nn.Module:
    """In float64, with every parameter moved from where it starts."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def assert_trains(module: nn.Module, out: Tensor) -> None:
    """C51: every parameter gets a gradient, and one that is not zero."""
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0.0, name


# GraphGPS #########################################################################################


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("local", [True, False])
def test_equals_pygs_layer(local: bool, activation: str, norm: str, training: bool) -> None:
    conv = SAGEConv(8, 8) if local else None
    # PyG's "layer_norm" takes the statistics of all nodes together; one for each node is ours.
    theirs = GPSConv(8, conv, heads=2, act=activation, norm=None if norm == "layer" else norm)
    if norm == "layer":
        theirs.norm1, theirs.norm2, theirs.norm3 = (nn.LayerNorm(8) for _ in range(3))
        theirs.norm1 = theirs.norm1 if local else None
    moved(theirs).train(training)
    attention = DenseAttention(8, 2).double()
    attention.load_state_dict(theirs.attn.state_dict())
    ours = GPSLayer(8, copy.deepcopy(conv), attention, activation=activation, norm=norm).double()
    ours.norm_local, ours.norm_global, ours.norm = theirs.norm1, theirs.norm2, theirs.norm3
    ours.feedforward.linear1, ours.feedforward.linear2 = theirs.mlp[0], theirs.mlp[3]
    x = leaf(8, 8)
    out = ours.train(training)(x, EDGE_INDEX, batch=BATCH)
    assert_equal_to(out, theirs(x, EDGE_INDEX, BATCH))


@pytest.mark.parametrize("parts", ["both", "local", "global"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_c52_equals_a_hand_written_block(norm_first: bool, parts: str) -> None:
    local = None if parts == "global" else GATConv(8, 4, heads=2)
    attention = None if parts == "local" else DenseAttention(8, 2)
    layer = moved(
        GPSLayer(
            8, local, attention, dim_feedforward=12, activation=torch.tanh, norm_first=norm_first
        )
    )
    weights, x = dict(layer.named_parameters()), leaf(8, 8)

    def norm(y: Tensor, name: str) -> Tensor:
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return y * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def transform(y: Tensor) -> Tensor:
        first, second = ("feedforward.linear1", "feedforward.linear2")
        y = (y @ weights[f"{first}.weight"].t() + weights[f"{first}.bias"]).tanh()
        return y @ weights[f"{second}.weight"].t() + weights[f"{second}.bias"]

    if norm_first:
        y = x
        if local is not None:
            y = y + local(norm(x, "norm_local"), EDGE_INDEX)
        if attention is not None:
            y = y + attention(norm(x, "norm_global"), BATCH)
        expected = y + transform(norm(y, "norm"))
    else:
        y = torch.zeros(8, 8)
        if local is not None:
            y = y + norm(x + local(x, EDGE_INDEX), "norm_local")
        if attention is not None:
            y = y + norm(x + attention(x, BATCH), "norm_global")
        expected = norm(y + transform(y), "norm")
    assert_equal_to(layer(x, EDGE_INDEX, batch=BATCH), expected)


def test_c51_c52_every_parameter_gets_a_gradient() -> None:
    for parts, norm, norm_first, activation in itertools.product(
        ("both", "local", "global"), ("layer", "batch"), (True, False), ("relu", nn.PReLU())
    ):
        layer = GPSLayer(
            8,
            None if parts == "global" else SAGEConv(8, 8),
            None if parts == "local" else GlobalAttention(8, 2),
            dropout=0.1,
            activation=activation,
            norm=norm,
            norm_first=norm_first,
        )
        # Batch normalisation takes away what is added to all nodes alike.
        for part in (layer.local, layer.global_attention):
            if part is not None and norm == "batch" and not norm_first:
                out = part.lin_l if isinstance(part, SAGEConv) else part.out_proj
                out.bias.requires_grad_(False)
        assert_trains(layer, layer(torch.randn(8, 8), EDGE_INDEX, batch=BATCH))
        layer.zero_grad()


def test_parts_with_what_they_take() -> None:
    x, edge_attr, bias = torch.randn(8, 8), torch.randn(7, 3), torch.randn(7, 2)
    graph = Graph(EDGE_INDEX, 8)
    takes_edges = {"edge_attr": edge_attr}
    gine = GINEConv(nn.Linear(8, 8), edge_dim=3)
    for local, edges, given in (
        (SAGEConv(8, 8), EDGE_INDEX, {}),
        (GCNConv(8, 8), EDGE_INDEX, {"edge_attr": edge_attr[:, 0].abs()}),
        (gine, EDGE_INDEX, takes_edges),
        (GATConv(8, 4, 2, edge_dim=3, add_self_loops=False), EDGE_INDEX, takes_edges),
        (GraphAttentionConv(8, 4, 2, edge_dim=3), graph, takes_edges),
        (GraphAttentionConv(8, 4, 2), EDGE_INDEX, {}),
        (self_attention(8, 2, edge_dim=3), graph, takes_edges),
        (self_attention(8, 2), EDGE_INDEX, {"bias": bias}),
        (ConvolutionModule(8, 3), BATCH, {}),
    ):
        layer = GPSLayer(8, local, DenseAttention(8, 2), norm_first=True).eval()
        out = layer(x, edges, batch=BATCH, **given)
        part = [local(layer.norm_local(x), edges, *given.values())] if "bias" not in given else []
        part = part or [local(layer.norm_local(x), edges, bias=bias)]
        y = x + part[0] + layer.global_attention(layer.norm_global(x), BATCH)
        torch.testing.assert_close(out, y + layer.feedforward(layer.norm(y)))


class Turn(nn.Module):
    """A rotary encoding of the simplest kind."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turn = torch.complex(first, second) * torch.exp(1j * at)[:, None, None]
        return torch.cat([turn.real, turn.imag], dim=-1)


def test_position_reaches_a_rotary_attention() -> None:
    x, at = torch.randn(8, 8), position(LENGTHS)
    local = self_attention(8, 2, rotary=Turn())
    layer = GPSLayer(8, local, None)
    y = layer.norm_local(x + local.attention(x, x, x, EDGE_INDEX, position=at))
    out = layer(x, EDGE_INDEX, position=at)
    torch.testing.assert_close(out, layer.norm(y + layer.feedforward(y)))


torch.manual_seed(0)
GLOBAL = {
    "exact": GlobalAttention(8, 2),
    "performer": PerformerAttention(8, 2),
    "linformer": LinformerAttention(8, 2, max_length=20, projected_length=4),
    "reformer": ReformerAttention(8, 2, bucket_size=2),
}


def layers() -> Iterator[tuple[str, nn.Module]]:
    for name, attention in GLOBAL.items():
        yield f"gps, {name}", GPSLayer(8, SAGEConv(8, 8), copy.deepcopy(attention))
    yield "gps, pre-norm", GPSLayer(8, SAGEConv(8, 8), GlobalAttention(8, 2), norm_first=True)
    yield "gps, convolution", GPSLayer(8, ConvolutionModule(8, 3), GlobalAttention(8, 2))
    yield "conformer", ConformerLayer(8, self_attention(8, 2), ConvolutionModule(8, 3), dropout=0.0)
    yield "polynormer, local", PolynormerLayer(8, GraphAttentionConv(8, 4, heads=2))
    yield "polynormer, global", PolynormerLayer(8, copy.deepcopy(GLOBAL["performer"]))


LAYERS = dict(layers())


def call(name: str, layer: nn.Module, x: Tensor, lengths: list[int]) -> Tensor:
    batch = batch_vector(lengths)
    graph = batch if name.endswith(("convolution", "global")) else window(lengths, 1)
    return layer(x, graph) if "polynormer" in name else layer(x, graph, batch=batch)


@pytest.mark.parametrize("name", list(LAYERS))
def test_c75_no_graph_feels_another(name: str) -> None:
    layer, x = copy.deepcopy(LAYERS[name]).double().eval(), torch.randn(9, 8).double()
    together = call(name, layer, x, [3, 1, 5])
    alone = [call(name, layer, part, [len(part)]) for part in x.split([3, 1, 5])]
    assert_equal_to(together, torch.cat(alone))
    x[4:] = float("nan")
    assert_equal_to(call(name, layer, x, [3, 1, 5])[:4], together[:4])


@pytest.mark.parametrize("name", list(LAYERS))
def test_c20_no_nodes(name: str) -> None:
    out = call(name, LAYERS[name], torch.randn(0, 8, requires_grad=True), [])
    assert out.shape == (0, 8)
    out.sum().backward()


@pytest.mark.parametrize("name", list(LAYERS))
def test_copy_pickle_and_reset(name: str) -> None:
    layer, x = copy.deepcopy(LAYERS[name]).eval(), torch.randn(8, 8)
    out = call(name, layer, x, LENGTHS)
    assert torch.equal(call(name, pickle.loads(pickle.dumps(layer)), x, LENGTHS), out)
    twin = copy.deepcopy(layer)
    assert torch.equal(call(name, twin, x, LENGTHS), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    twin.reset_parameters()
    for parameter_name, parameter in twin.named_parameters():
        assert not (parameter == 7.0).any(), parameter_name


# Rounded hashes may put a node into another bucket.
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "gps, reformer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast(dtype: torch.dtype, name: str) -> None:
    layer, x = copy.deepcopy(LAYERS[name]).eval(), torch.randn(8, 8)
    expected = call(name, layer, x, LENGTHS)
    with torch.autocast("cpu", dtype):
        out = call(name, layer, x, LENGTHS)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_c45_dropout_in_training_only() -> None:
    for layer in (
        GPSLayer(8, self_attention(8, 2), DenseAttention(8, 2), dropout=0.5),
        ConformerLayer(8, self_attention(8, 2), ConvolutionModule(8, 3), dropout=0.5),
    ):
        x, graph = torch.randn(8, 8), complete(LENGTHS)
        assert not torch.equal(layer(x, graph, batch=BATCH), layer(x, graph, batch=BATCH))
        layer.eval()
        assert torch.equal(layer(x, graph, batch=BATCH), layer(x, graph, batch=BATCH))


def test_c45_what_is_dropped() -> None:
    """All of it at a probability of 1."""
    x, graph, parts = torch.randn(8, 8), complete(LENGTHS), (SAGEConv(8, 8), DenseAttention(8, 2))
    layer = GPSLayer(8, *parts, dropout=1.0, norm_first=True)
    assert torch.equal(layer(x, graph, batch=BATCH), x)
    layer = GPSLayer(8, *parts, dropout=1.0)
    expected = layer.norm(layer.norm_local(x) + layer.norm_global(x))
    torch.testing.assert_close(layer(x, graph, batch=BATCH), expected)

    widths = []
    layer.feedforward.dropout.register_forward_hook(lambda *call: widths.append(call[2].size(1)))
    layer(x, graph, batch=BATCH)
    assert widths == [16, 8]  # hidden units, outputs

    layer = ConformerLayer(8, DenseAttention(8, 2), ConvolutionModule(8, 3), dropout=1.0)
    expected = layer.norm(x + layer.convolution(layer.norm_convolution(x), BATCH))
    torch.testing.assert_close(layer(x, BATCH, batch=BATCH), expected)


def test_batch_norm_is_that_of_all_nodes() -> None:
    layer = GPSLayer(8, SAGEConv(8, 8), None, norm="batch")
    out = layer(torch.randn(50, 8), torch.randint(50, (2, 90)))
    torch.testing.assert_close(out.mean(0), torch.zeros(8), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(out.var(0, unbiased=False), torch.ones(8), rtol=1e-3, atol=0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_c56_compiles_without_a_break_for_changing_sizes() -> None:
    traced = []

    def count(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    layers = (
        GPSLayer(8, GraphAttentionConv(8, 4, 2), self_attention(8, 2)),
        ConformerLayer(8, self_attention(8, 2), ConvolutionModule(8, 3), dropout=0.0),
    )
    for layer, lengths in itertools.product(layers, ([3, 2], [1, 6, 2])):
        if lengths == [3, 2]:
            torch._dynamo.reset()
            traced.clear()
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
        x, edges = torch.randn(sum(lengths), 8), complete(lengths)
        batch = edges if isinstance(layer, GPSLayer) else batch_vector(lengths)
        torch.testing.assert_close(compiled(x, edges, batch=batch), layer(x, edges, batch=batch))
        assert len(traced) <= 2
    torch._dynamo.reset()


# The Conformer ####################################################################################


def test_conformer_equals_a_hand_written_block() -> None:
    layer = moved(
        ConformerLayer(
            8, self_attention(8, 2), ConvolutionModule(8, 3), dim_feedforward=12, dropout=0.0
        )
    )
    weights, x = dict(layer.named_parameters()), leaf(8, 8)

    def norm(y: Tensor, name: str) -> Tensor:
        return F.layer_norm(y, (8,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(y: Tensor, name: str) -> Tensor:
        return F.linear(y, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def transform(y: Tensor, which: int) -> Tensor:
        y = linear(norm(y, f"norm_feedforward{which}"), f"feedforward{which}.linear1")
        return linear(y * y.sigmoid(), f"feedforward{which}.linear2")

    def attend(y: Tensor) -> Tensor:
        multihead = nn.MultiheadAttention(8, 2).double()
        multihead.load_state_dict(layer.attention.attention.state_dict())
        return multihead(y, y, y)[0]

    def convolve(y: Tensor) -> Tensor:
        value, gate = linear(y, "convolution.pointwise1").chunk(2, dim=-1)
        kernel = weights["convolution.depthwise.weight"]  # [8, 1, 3]
        padded = F.pad(value * gate.sigmoid(), (0, 0, 1, 1))
        y = weights["convolution.depthwise.bias"] + sum(
            kernel[:, 0, r] * padded[r : r + len(y)] for r in range(3)
        )
        y = norm(y, "convolution.norm")
        return linear(y * y.sigmoid(), "convolution.pointwise2")

    expected = []
    for y in x.split(LENGTHS):
        y = y + 0.5 * transform(y, 1)
        y = y + attend(norm(y, "norm_attention"))
        y = y + convolve(norm(y, "norm_convolution"))
        y = y + 0.5 * transform(y, 2)
        expected.append(norm(y, "norm"))
    assert_equal_to(layer(x, complete(LENGTHS), batch=BATCH), torch.cat(expected))


def test_c51_c52_conformer_trains_every_parameter() -> None:
    bias, edge_attr = torch.randn(26, 2), torch.randn(26, 3)
    for options, given in (({}, {"bias": bias}), ({"edge_dim": 3}, {"edge_attr": edge_attr})):
        layer = ConformerLayer(8, self_attention(8, 2, **options), ConvolutionModule(8, 3))
        assert_trains(layer, layer(torch.randn(8, 8), complete(LENGTHS), batch=BATCH, **given))


def test_conformer_with_attention_that_takes_a_batch_vector() -> None:
    layer = ConformerLayer(8, DenseAttention(8, 2), ConvolutionModule(8, 3)).eval().double()
    same = ConformerLayer(8, self_attention(8, 2), ConvolutionModule(8, 3)).eval().double()
    same.attention.attention.load_state_dict(layer.attention.state_dict())
    weights = {k: v for k, v in layer.state_dict().items() if not k.startswith("attention.")}
    same.load_state_dict(weights, strict=False)
    x = leaf(8, 8)
    assert_equal_to(layer(x, BATCH, batch=BATCH), same(x, complete(LENGTHS), batch=BATCH))


# Polynormer #######################################################################################


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_polynormer_equals_a_hand_written_layer(edge_dim: int | None) -> None:
    attention = GraphAttentionConv(8, 4, heads=2, edge_dim=edge_dim)
    layer, x = moved(PolynormerLayer(8, attention)), torch.randn(8, 8).double()
    edge_attr = None if edge_dim is None else torch.randn(7, edge_dim).double()
    y = layer.attention(x, EDGE_INDEX, edge_attr).clamp(min=0.0)
    h = (x @ layer.lin_gate.weight.T + layer.lin_gate.bias).clamp(min=0.0)
    product = h * y
    centred = product - product.mean(dim=1, keepdim=True)
    normal = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    normal = normal * layer.norm.weight + layer.norm.bias
    beta = 1 / (1 + (-layer.mix).exp())
    out, weights = layer(x, EDGE_INDEX, edge_attr=edge_attr, return_attention_weights=True)
    torch.testing.assert_close(out, (1 - beta) * normal + beta * y)
    torch.testing.assert_close(layer(x, EDGE_INDEX, edge_attr=edge_attr), out)
    assert weights[1].shape == (7, 2)


def test_c51_polynormer_trains_every_parameter() -> None:
    x = torch.randn(8, 8).double()
    for name in ("polynormer, local", "polynormer, global"):
        layer = moved(copy.deepcopy(LAYERS[name]))
        assert_trains(layer, call(name, layer, x, LENGTHS))


def test_polynormer_drops_what_attention_gives() -> None:
    layer, x = PolynormerLayer(8, GraphAttentionConv(8, 4, heads=2), dropout=1.0), torch.randn(8, 8)
    torch.testing.assert_close(layer(x, EDGE_INDEX), torch.zeros(8, 8))
    assert (layer.eval()(x, EDGE_INDEX) != 0.0).any()


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local": None}, "local and global_attention are both None. Give at least one of them."),
        ({"activation": "swish"}, "activation must be 'relu', 'gelu' or a function, got 'swish'."),
        ({"norm": "group"}, "GPSLayer: norm must be one of 'layer', 'batch', got 'group'."),
        ({"dim_feedforward": 0}, "GPSLayer: dim_feedforward must be at least 1, got 0."),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        GPSLayer(**({"channels": 8, "local": SAGEConv(8, 8), "global_attention": None} | options))
    with pytest.raises(ValueError, match="ConformerLayer: dim_feedforward must be at least 1"):
        ConformerLayer(8, nn.Identity(), nn.Identity(), dim_feedforward=0)
    with pytest.raises(ValueError, match="PolynormerLayer: dropout must be a probability from 0"):
        PolynormerLayer(8, nn.Identity(), dropout=1.5)


def test_c38_global_attention_needs_to_know_the_graphs() -> None:
    layer, x = GPSLayer(8, SAGEConv(8, 8), DenseAttention(8, 2)), torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"batch is missing, .*data\.batch, or torch\.zeros\(num"):
        layer(x, EDGE_INDEX)
    one_graph = torch.zeros(8, dtype=torch.int64)
    assert not torch.allclose(
        layer(x, EDGE_INDEX, batch=one_graph), layer(x, EDGE_INDEX, batch=BATCH)
    )
    GPSLayer(8, SAGEConv(8, 8), None)(x, EDGE_INDEX)  # there it says nothing


def test_what_is_missing_or_too_much_is_named() -> None:
    x = torch.randn(8, 8)
    alone = GPSLayer(8, None, DenseAttention(8, 2))
    assert torch.equal(alone(x, None, batch=BATCH), alone(x, EDGE_INDEX, batch=BATCH))
    for name in ("edge_attr", "bias", "position"):
        with pytest.raises(ValueError, match=f"{name} is given, but there is no local module"):
            alone(x, None, batch=BATCH, **{name: torch.randn(7, 2)})
    with pytest.raises(ValueError, match="graph is None, but the local module needs it"):
        GPSLayer(8, SAGEConv(8, 8), None)(x, None)
    with pytest.raises(TypeError, match="bias"):
        GPSLayer(8, SAGEConv(8, 8), None)(x, EDGE_INDEX, bias=torch.randn(7, 2))


def test_a_part_of_another_width_is_named() -> None:
    x = torch.randn(8, 8)
    text = r"GPSLayer: SAGEConv must keep the shape of x \(8, 8\), but returned \(8, 1\)\."
    with pytest.raises(ValueError, match=text):
        GPSLayer(8, SAGEConv(8, 1), None)(x, EDGE_INDEX)
    layer = ConformerLayer(8, SAGEConv(8, 1), ConvolutionModule(8, 3))
    with pytest.raises(ValueError, match="ConformerLayer: SAGEConv must keep the shape of x"):
        layer(x, EDGE_INDEX, batch=BATCH)
    with pytest.raises(ValueError, match="PolynormerLayer: SAGEConv must keep the shape of x"):
        PolynormerLayer(8, SAGEConv(8, 1))(x, EDGE_INDEX)
