"""GraphAttentionConv where TransformerConv is wrong, in low precision and in training."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from graphattn import Graph
from parity import (
    EDGE_INDEX,
    PATHS,
    ZOO,
    adjacency,
    assert_equal_to,
    assert_same_numbers,
    leaf,
    make,
    pair_of_layers,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


# Where TransformerConv is wrong ###################################################################


@pytest.mark.parametrize("path", PATHS)
def test_c40_false_returns_a_tensor(path: str) -> None:
    conv, x = make(path, 5, 4, 2), torch.randn(4, 5)
    assert isinstance(TransformerConv(5, 4)(x, EDGE_INDEX, return_attention_weights=False), tuple)
    for flag in (False, None, 0):
        assert isinstance(conv(x, EDGE_INDEX, return_attention_weights=flag), Tensor)
    for flag in (True, 1):
        out, (edge_index, alpha) = conv(x, EDGE_INDEX, return_attention_weights=flag)
        assert torch.equal(out, conv(x, EDGE_INDEX))
        assert edge_index is EDGE_INDEX
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
        conv(x, EDGE_INDEX, torch.randn(6, 3))
    adj_t = adjacency("coo", EDGE_INDEX, torch.randn(6, 3), (4, 4))
    with pytest.raises(ValueError, match=text):
        conv(x, adj_t)


@pytest.mark.parametrize("path", PATHS)
def test_c29_missing_edge_attr(path: str) -> None:
    conv, x = make(path, 5, 4, edge_dim=3), torch.randn(4, 5)
    text = "GraphAttentionConv: edge_attr is missing; the layer was built with edge_dim=3"
    for edge_index in (
        EDGE_INDEX,
        Graph(EDGE_INDEX, 4),
        adjacency("coo", EDGE_INDEX, torch.ones(6), (4, 4)),
    ):
        with pytest.raises(ValueError, match=text):
            conv(x, edge_index)


@pytest.mark.parametrize("path", PATHS)
def test_c29_one_dimensional_edge_attr(path: str) -> None:
    x, distance = torch.randn(4, 5), torch.rand(6)
    for edge_dim in (1, -1):
        conv = make(path, 5, 4, 2, edge_dim=edge_dim)
        expected = conv(x, EDGE_INDEX, distance[:, None])
        torch.testing.assert_close(conv(x, EDGE_INDEX, distance), expected)
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (6,).")):
        make(path, 5, 4, edge_dim=3)(x, EDGE_INDEX, distance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_c29_integer_edge_attr(dtype: torch.dtype, path: str) -> None:
    text = re.escape(
        f"GraphAttentionConv: edge_attr must be floating point, got {dtype}. Cast numbers with "
        "edge_attr.float(), or embed categories with torch.nn.Embedding."
    )
    with pytest.raises(TypeError, match=text):
        make(path, 5, 4, edge_dim=1)(
            torch.randn(4, 5), EDGE_INDEX, torch.ones(6, 1, dtype=torch.int64).to(dtype)
        )
    with pytest.raises(
        TypeError, match=re.escape("must be a tensor (num_edges, edge_dim), got lis")
    ):
        make(path, 5, 4, edge_dim=1)(torch.randn(4, 5), EDGE_INDEX, [1.0] * 6)


@pytest.mark.parametrize("path", PATHS)
def test_c29_transposed_edge_attr(path: str) -> None:
    conv, x = make(path, 5, 4, edge_dim=3), torch.randn(4, 5)
    for edge_index in (EDGE_INDEX, Graph(EDGE_INDEX, 4)):
        text = re.escape(
            "edge_attr must have shape (num_edges, edge_dim) = (6, 3), got (3, 6). Use "
            "edge_attr.t()."
        )
        with pytest.raises(ValueError, match=text):
            conv(x, edge_index, torch.randn(3, 6))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (5, 3).") + "$"):
        conv(x, EDGE_INDEX, torch.randn(5, 3))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (6, 4).") + "$"):
        conv(x, EDGE_INDEX, torch.randn(6, 4))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_c29_number_of_edges_of_a_sparse_matrix(layout: str) -> None:
    adj_t = adjacency(layout, EDGE_INDEX, torch.ones(6), (4, 4))
    with pytest.raises(ValueError, match=re.escape("= (6, 3), got (7, 3).")):
        make("eager", 5, 4, edge_dim=3)(torch.randn(4, 5), adj_t, torch.randn(7, 3))


@pytest.mark.parametrize("path", PATHS)
def test_c33_missing_features_of_one_side(path: str) -> None:
    conv, x = make(path, 5, 4), torch.randn(4, 5)
    with pytest.raises(TypeError, match=r"x_dst is NoneType\. Attention needs keys from"):
        conv((x, None), EDGE_INDEX)
    with pytest.raises(TypeError, match="x_src is NoneType"):
        conv((None, x), EDGE_INDEX)
    for wrong, kind in (((x,), "tuple"), ([x, x, x], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=re.escape(f"a pair (x_src, x_dst), got {kind}.")):
            conv(wrong, EDGE_INDEX)
    with pytest.raises(ValueError, match=re.escape("x_dst must have shape (*, num_nodes,")):
        conv((x, x[:, 0]), EDGE_INDEX)


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
        out, (_, alpha) = conv((x_src, x_dst), EDGE_INDEX, *edges, return_attention_weights=True)
        assert out.shape == (*leading, 4, 4 if options.get("concat") is False else 12)
        assert alpha.shape == (*leading, 6, 3)
        for index in itertools.product(*map(range, leading)):
            alone, (_, weights) = conv(
                (x_src[index], x_dst[index]), EDGE_INDEX, *edges, return_attention_weights=True
            )
            assert_equal_to(out[index], alone)
            assert_equal_to(alpha[index], weights)
        assert_gradients_split(conv, x_src, x_dst, edges)


def assert_gradients_split(
    conv: nn.Module, x_src: Tensor, x_dst: Tensor, edges: list[Tensor]
) -> None:
    parameters = list(conv.parameters())
    together = torch.autograd.grad(
        conv((x_src, x_dst), EDGE_INDEX, *edges).square().sum(), parameters
    )
    alone = [torch.zeros_like(parameter) for parameter in parameters]
    for one_src, one_dst in zip(x_src.flatten(0, -3), x_dst.flatten(0, -3), strict=True):
        out = conv((one_src, one_dst), EDGE_INDEX, *edges).square().sum()
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
    out, (_, alpha) = conv(x, EDGE_INDEX[:, :0], *edges, return_attention_weights=True)
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
    out, (_, alpha) = conv(x, EDGE_INDEX[:, :0], torch.randn(0, 3), return_attention_weights=True)
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
        _, (_, alpha) = layer(x, EDGE_INDEX, edge_attr, return_attention_weights=True)
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
    expected = conv(x, EDGE_INDEX, *edges)
    expected.square().sum().backward()
    full = {name: parameter.grad.clone() for name, parameter in conv.named_parameters()}
    conv.zero_grad()
    with torch.autocast("cpu", dtype):
        out, (_, alpha) = conv(x, EDGE_INDEX, *edges, return_attention_weights=True)
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
    expected = conv(x, EDGE_INDEX, edge_attr)
    conv = conv.to(dtype)
    out, (_, alpha) = conv(
        x.to(dtype), EDGE_INDEX, edge_attr.to(dtype), return_attention_weights=True
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
    expected = conv(x, EDGE_INDEX, edge_attr)
    assert torch.equal(conv(x, EDGE_INDEX, edge_attr), expected)
    conv.train()
    assert not torch.equal(conv(x, EDGE_INDEX, edge_attr), expected)
    # Every row of a leading dimension draws a mask of its own.
    draws = conv(x.expand(20_000, 4, 5), EDGE_INDEX, edge_attr)
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
    assert torch.equal(conv.train()(x, EDGE_INDEX), conv.eval()(x, EDGE_INDEX))
    with torch.no_grad():
        assert torch.equal(conv(x, EDGE_INDEX), conv.train()(x, EDGE_INDEX))


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
