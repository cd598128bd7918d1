"""GraphTransformerDecoderLayer against torch's; caches and positions of all attention."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphattn import Graph, patterns
from graphattn.nn.attention import GraphMultiheadAttention, KeyValueCache
from graphattn.nn.block import GraphTransformerDecoderLayer, GraphTransformerLayer
from parity import BACKENDS, TOLERANCE, assert_equal_to, assert_same_gradients, leaf

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "function": torch.tanh, "module": nn.SiLU()}
NONE = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(41)


def torch_layer(
    d_model: int = 8, nhead: int = 2, *, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.TransformerDecoderLayer:
    """Torch's layer in which every parameter has been moved from where it starts."""
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True} | options
    layer = nn.TransformerDecoderLayer(d_model, nhead, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def blocked_causal(length: int) -> Tensor:
    """True where attention is blocked, as torch means it: what comes later."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# The same numbers #################################################################################


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [True, False])
def test_equals_transformer_decoder_layer(
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
        ours = GraphTransformerDecoderLayer.from_torch(theirs, backend=backend)
        x, memory = leaf(5, 8, dtype=dtype), leaf(7, 8, dtype=dtype)
        out = ours(x, memory, patterns.causal(5), patterns.cross(7, 5))
        expected = theirs(x, memory, tgt_mask=blocked_causal(5))
        assert_same_gradients(ours, theirs, out, expected, [x, memory])
        own, cross = torch.rand(5, 5) < 0.5, torch.rand(5, 7) < 0.5
        own[:, 0] = cross[:, 0] = False
        out = ours(x, memory, Graph.from_mask(~own), Graph.from_mask(~cross))
        expected = theirs(x, memory, tgt_mask=own, memory_mask=cross)
        assert_same_gradients(ours, theirs, out, expected, [x, memory])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_side_by_side_equal_a_padded_batch(backend: str, norm_first: bool) -> None:
    theirs = torch_layer(norm_first=norm_first)
    ours = GraphTransformerDecoderLayer.from_torch(theirs, backend=backend)
    x, memory = leaf(3, 4, 8), leaf(3, 6, 8)
    lengths, sources = torch.tensor([4, 1, 2]), torch.tensor([2, 6, 3])
    padding = torch.arange(4) >= lengths[:, None]
    no_source = torch.arange(6) >= sources[:, None]
    expected = theirs(
        x,
        memory,
        tgt_mask=blocked_causal(4),
        tgt_key_padding_mask=padding,
        memory_key_padding_mask=no_source,
    )[~padding]
    out = ours(
        x[~padding],
        memory[~no_source],
        patterns.causal(lengths),
        patterns.cross(sources, lengths),
    )
    assert_same_gradients(ours, theirs, out, expected, [x, memory])


def test_leading_dimensions_share_the_graphs() -> None:
    theirs = torch_layer()
    ours = GraphTransformerDecoderLayer.from_torch(theirs)
    x, memory = leaf(3, 4, 8), leaf(3, 6, 8)
    out = ours(x, memory, patterns.causal(4), patterns.cross(6, 4))
    expected = theirs(x, memory, tgt_mask=blocked_causal(4))
    assert_same_gradients(ours, theirs, out, expected, [x, memory])


@pytest.mark.parametrize("norm_first", [True, False])
def test_biases_are_float_masks(norm_first: bool) -> None:
    theirs = torch_layer(norm_first=norm_first)
    ours = GraphTransformerDecoderLayer.from_torch(theirs)
    x, memory, own, cross = leaf(5, 8), leaf(7, 8), leaf(5, 5), leaf(5, 7)
    out = ours(
        x,
        memory,
        patterns.complete(5),
        patterns.cross(7, 5),
        bias=own.flatten()[:, None].expand(-1, 2),
        cross_bias=cross.flatten()[:, None].expand(-1, 2),
    )
    expected = theirs(x, memory, tgt_mask=own, memory_mask=cross)
    assert_same_gradients(ours, theirs, out, expected, [x, memory, own, cross])


@pytest.mark.parametrize("norm_first", [True, False])
def test_stack_from_the_layers_of_a_decoder(norm_first: bool) -> None:
    decoder = nn.TransformerDecoder(torch_layer(norm_first=norm_first), num_layers=3)
    for layer in decoder.layers:
        nn.init.normal_(layer.linear1.weight, std=0.3)
    stack = nn.ModuleList(
        GraphTransformerDecoderLayer.from_torch(layer) for layer in decoder.layers
    )
    x, memory = leaf(5, 8), leaf(7, 8)
    graph, cross_graph, out = patterns.causal(5), patterns.cross(7, 5), x
    for layer in stack:
        out = layer(out, memory, graph, cross_graph)
    expected = decoder(x, memory, tgt_mask=blocked_causal(5))
    assert_same_gradients(stack, decoder.layers, out, expected, [x, memory])
    stack.load_state_dict(decoder.layers.state_dict(), strict=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c51_c52_every_parameter_gets_a_gradient(backend: str) -> None:
    for norm_first, bias, activation in itertools.product(
        (True, False), (True, False), ("relu", nn.PReLU())
    ):
        layer = GraphTransformerDecoderLayer(
            8, 2, 12, activation=activation, norm_first=norm_first, bias=bias, backend=backend
        )
        out = layer(torch.randn(4, 8), torch.randn(6, 8), patterns.causal(4), patterns.cross(6, 4))
        (out * torch.randn_like(out)).sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0.0, name
        layer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c39_weights_of_attention_to_the_memory(backend: str, norm_first: bool) -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12, norm_first=norm_first, backend=backend).eval()
    x, memory, cross_bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(24, 2)
    inputs = (x, memory, patterns.causal(4), patterns.cross(6, 4))
    out, weights = layer(*inputs, cross_bias=cross_bias, return_attention_weights=True)
    assert torch.equal(out, layer(*inputs, cross_bias=cross_bias))
    assert weights.shape == (24, 2)
    torch.testing.assert_close(weights.view(4, 6, 2).sum(1), torch.ones(4, 2))
    again = layer(*inputs, cross_bias=cross_bias, return_attention_weights=True)[1]
    assert torch.equal(weights, again)
    assert not torch.allclose(weights, layer(*inputs, return_attention_weights=True)[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_c16_c20_no_edges_no_memory_and_no_nodes(backend: str) -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12, backend=backend)
    for num_dst, num_src in ((0, 3), (4, 0), (4, 3), (0, 0)):
        x, memory = torch.randn(num_dst, 8), torch.randn(num_src, 8)
        out = layer(x, memory, NONE, NONE)
        assert out.shape == (num_dst, 8)
        assert out.isfinite().all()


# Parameters #######################################################################################


@pytest.mark.parametrize("bias", [True, False])
def test_c49_state_dicts_load_strictly_both_ways(bias: bool) -> None:
    theirs = torch_layer(bias=bias)
    ours = GraphTransformerDecoderLayer(8, 2, 12, bias=bias).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, memory = leaf(5, 8), leaf(3, 8)
    out = ours.eval()(x, memory, patterns.complete(5), patterns.cross(3, 5))
    assert_equal_to(out, theirs.eval()(x, memory))
    theirs.load_state_dict(
        GraphTransformerDecoderLayer(8, 2, 12, bias=bias).state_dict(), strict=True
    )


def test_same_defaults_as_torch() -> None:
    ours, theirs = GraphTransformerDecoderLayer(8, 2), nn.TransformerDecoderLayer(8, 2)
    for name, parameter in theirs.named_parameters():
        assert ours.get_parameter(name).shape == parameter.shape
    for name in ("dropout", "dropout1", "dropout2", "dropout3"):
        assert getattr(ours, name).p == getattr(theirs, name).p
    for name in ("self_attn", "multihead_attn"):
        assert getattr(ours, name).dropout == getattr(theirs, name).dropout
    assert ours.norm3.eps == theirs.norm3.eps
    assert ours.activation is theirs.activation
    assert ours.norm_first == theirs.norm_first


def test_from_torch_copies() -> None:
    for dtype, training in ((torch.float64, True), (torch.bfloat16, False)):
        theirs = torch_layer(activation=nn.PReLU(), dtype=dtype, dropout=0.1).train(training)
        # As people change it after construction.
        theirs.self_attn.dropout, theirs.multihead_attn.dropout, theirs.dropout.p = 0.5, 0.6, 0.2
        theirs.dropout2.p, theirs.dropout3.p, theirs.norm3.eps = 0.3, 0.4, 1e-2
        ours = GraphTransformerDecoderLayer.from_torch(theirs, backend="eager")
        assert (ours.self_attn.dropout, ours.multihead_attn.dropout, ours.dropout.p) == (
            0.5,
            0.6,
            0.2,
        )
        assert (ours.dropout1.p, ours.dropout2.p, ours.dropout3.p) == (0.1, 0.3, 0.4)
        assert (ours.norm2.eps, ours.norm3.eps) == (1e-5, 1e-2)
        assert (ours.training, ours.multihead_attn.training) == (training, training)
        assert ours.multihead_attn.backend == "eager"
        originals = dict(theirs.named_parameters())
        assert set(originals) == {name for name, _ in ours.named_parameters()}
        for name, parameter in ours.named_parameters():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, originals[name]), name
            assert parameter.data_ptr() != originals[name].data_ptr(), f"{name} is shared"
    assert GraphTransformerDecoderLayer.from_torch(theirs).self_attn.backend == "auto"


def test_reset_parameters_draws_everything_anew() -> None:
    layer = GraphTransformerDecoderLayer(64, 4, 96, activation=nn.PReLU())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert not (parameter == 7.0).any(), name


# Training #########################################################################################


@pytest.mark.parametrize(
    "place", ["self_attn", "multihead_attn", "dropout", "dropout1", "dropout2", "dropout3"]
)
@pytest.mark.parametrize("norm_first", [True, False])
def test_c45_each_dropout_acts_where_torch_has_it_and_in_training_only(
    norm_first: bool, place: str
) -> None:
    theirs = torch_layer(dtype=torch.float32, norm_first=norm_first)
    module = theirs.get_submodule(place)
    setattr(module, "dropout" if "attn" in place else "p", 0.3)
    ours = GraphTransformerDecoderLayer.from_torch(theirs)
    x, memory = torch.randn(4, 8).expand(10_000, 4, 8), torch.randn(6, 8).expand(10_000, 6, 8)
    graphs = (patterns.complete(4), patterns.cross(6, 4))
    draws, others = ours(x, memory, *graphs), theirs(x, memory)
    torch.testing.assert_close(draws.std(0), others.std(0), rtol=0.15, atol=0.0)
    assert draws.std(0).min() > 0.0
    ours.eval()
    out = ours(x[:2], memory[:2], *graphs)
    assert torch.equal(out[0], out[1])
    assert_equal_to(out, theirs.eval()(x[:2], memory[:2]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast_and_pure_low_precision(dtype: torch.dtype, backend: str) -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12, 0.0, norm_first=True, backend=backend)
    x, memory = torch.randn(4, 8), torch.randn(6, 8)
    graphs = (patterns.causal(4), patterns.cross(6, 4))
    expected = layer(x, memory, *graphs)
    with torch.autocast("cpu", dtype):
        out = layer(x, memory, *graphs)
    assert out.dtype == torch.float32  # the residual stream keeps its precision
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    out = layer.to(dtype)(x.to(dtype), memory.to(dtype), *graphs)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_after_forward_and_backward(make: Callable[[nn.Module], nn.Module]) -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12, 0.0)
    inputs = (torch.randn(4, 8), torch.randn(6, 8), patterns.causal(4), patterns.cross(6, 4))
    expected = layer(*inputs)
    expected.sum().backward()
    assert torch.equal(make(layer)(*inputs), expected)


def test_c55_attributes_and_export() -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12).eval()
    inputs = (torch.randn(4, 8), torch.randn(6, 8), patterns.causal(4), patterns.cross(6, 4))
    before = dict(vars(layer))
    expected = layer(*inputs)
    assert vars(layer) == before
    program = torch.export.export(layer, inputs)
    torch.testing.assert_close(program.module()(*inputs), expected)


# Caches ###########################################################################################


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_token_by_token_with_a_cache_equals_all_at_once(norm_first: bool, backend: str) -> None:
    layer = GraphTransformerDecoderLayer(8, 2, 12, norm_first=norm_first, backend=backend)
    layer = layer.double().eval()
    x, memory = torch.randn(6, 8).double(), torch.randn(7, 8).double()
    expected = layer(x, memory, patterns.causal(6), patterns.cross(7, 6))
    cache, projected = KeyValueCache(), layer.multihead_attn.project_source(memory, memory)
    out = [
        layer(
            rows,
            projected,
            patterns.cross(seen, len(rows), causal=True),
            patterns.cross(7, len(rows)),
            cache=cache,
        )
        for rows, seen in ((x[:3], 3), (x[3:4], 4), (x[4:], 6))
    ]
    torch.testing.assert_close(torch.cat(out), expected, rtol=0.0, atol=1e-12)
    assert cache.key.shape == cache.value.shape == (6, 2, 4)


def test_cache_of_an_encoder_layer_with_leading_dimensions() -> None:
    layer, x = GraphTransformerLayer(8, 2, 12).double().eval(), torch.randn(3, 4, 8).double()
    cache = KeyValueCache()
    out = [
        layer(x[:, i : i + 1], patterns.cross(i + 1, 1, causal=True), cache=cache) for i in range(4)
    ]
    expected = layer(x, patterns.causal(4))
    torch.testing.assert_close(torch.cat(out, dim=1), expected, rtol=0.0, atol=1e-12)
    assert cache.key.shape == (3, 4, 2, 4)


def test_projected_memory_has_the_same_gradients() -> None:
    theirs = torch_layer()
    ours = GraphTransformerDecoderLayer.from_torch(theirs)
    x, memory = leaf(5, 8), leaf(7, 8)
    projected = ours.multihead_attn.project_source(memory, memory)
    out = ours(x, projected, patterns.complete(5), patterns.cross(7, 5))
    assert_same_gradients(ours, theirs, out, theirs(x, memory), [x, memory])


def test_forward_is_project_and_attend() -> None:
    attention = GraphMultiheadAttention(8, 2, kdim=5, vdim=3)
    inputs = (torch.randn(4, 8), torch.randn(6, 5), torch.randn(6, 3))
    graph = patterns.cross(6, 4)
    expected = attention(*inputs, graph)
    assert torch.equal(attention.attend(*attention.project(*inputs), graph), expected)
    query = attention.project_query(inputs[0])
    key, value = attention.project_source(*inputs[1:])
    assert (query.shape, key.shape, value.shape) == ((4, 2, 4), (6, 2, 4), (6, 2, 4))
    assert torch.equal(attention.attend(query, key, value, graph), expected)


# Positions ########################################################################################


class Turn(nn.Module):
    """Adds to each channel its position, so that scores tell which position came where."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + position.to(x.dtype)[:, None, None]


def test_rotary_is_given_queries_with_their_positions_and_keys_with_theirs() -> None:
    plain = GraphMultiheadAttention(8, 2).double()
    turned = GraphMultiheadAttention(8, 2, rotary=Turn()).double()
    turned.load_state_dict(plain.state_dict())
    src, dst = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6])
    query, source, graph = leaf(3, 8), leaf(5, 8), patterns.cross(5, 3)
    q, k, v = plain.project(query, source, source)
    expected = plain.attend(q + dst.view(3, 1, 1), k + src.view(5, 1, 1), v, graph)
    out = turned(query, source, source, graph, position=(src, dst))
    assert_same_gradients(turned, plain, out, expected, [query, source])
    q, k, v = plain.project(query, query, query)
    expected = plain.attend(q + dst.view(3, 1, 1), k + dst.view(3, 1, 1), v, patterns.complete(3))
    out = turned(query, query, query, patterns.complete(3), position=dst)
    assert_same_gradients(turned, plain, out, expected, [query])


def test_layers_pass_positions_on_to_self_attention() -> None:
    position, x, memory = torch.tensor([2, 0, 5]), leaf(3, 8), leaf(4, 8)
    graph, cross_graph = patterns.complete(3), patterns.cross(4, 3)
    for kind, inputs in (
        (GraphTransformerLayer, (x, graph)),
        (GraphTransformerDecoderLayer, (x, memory, graph, cross_graph)),
    ):
        layer = kind(8, 2, 12, 0.0, rotary=Turn()).double()
        assert not list(layer.self_attn.rotary.parameters())
        out = layer(*inputs, position=position)
        assert not torch.allclose(out, layer(*inputs, position=position + 1))
        attended = layer.self_attn(x, x, x, graph, position=position)
        assert_equal_to(layer.norm1(x + attended), first_residual(layer, inputs, position))
        with pytest.raises(ValueError, match="position is missing, but the layer was built with r"):
            layer(*inputs)
        with pytest.raises(ValueError, match="position is given, but the layer was built without"):
            kind(8, 2, 12)(
                *(i.float() if i.is_floating_point() else i for i in inputs), position=position
            )


def first_residual(layer: nn.Module, inputs: tuple[Tensor, ...], position: Tensor) -> Tensor:
    """What comes out of the first normalisation of a post-norm layer."""
    seen = []
    with layer.norm1.register_forward_hook(lambda module, given, out: seen.append(out)):
        layer(*inputs, position=position)
    return seen[0]


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"activation": "swish"},
            "DecoderLayer: activation must be 'relu', 'gelu' or a function, got 'swish'.",
        ),
        (
            {"dim_feedforward": 0},
            "GraphTransformerDecoderLayer: dim_feedforward must be at least 1, got 0.",
        ),
        ({"nhead": 3}, "embed_dim 8 must be divisible by num_heads 3"),
        ({"dropout": -0.1}, "dropout must be a probability from 0 to 1, got -0.1"),
    ],
    ids=str,
)
def test_c42_constructor_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        GraphTransformerDecoderLayer(**({"d_model": 8, "nhead": 2} | options))


def test_graphs_that_do_not_fit() -> None:
    layer, x, memory = GraphTransformerDecoderLayer(8, 2, 12), torch.randn(4, 8), torch.randn(6, 8)
    with pytest.raises(IndexError, match="there are 4 sources"):
        layer(x, memory, patterns.cross(6, 4), patterns.cross(6, 4))
    with pytest.raises(ValueError, match="the graph has 4 sources and 4 targets, but key has 6"):
        layer(x, memory, patterns.causal(4), Graph(patterns.complete(4), 4))
