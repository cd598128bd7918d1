"""Positional encodings: their formulas, what they refuse, and what attention makes of them."""

import copy
import functools
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphattn import Graph, attention_weights, dense_attention, graph_attention
from graphattn.nn import GraphTransformerLayer
from graphattn.nn.encoding import (
    AlibiBias,
    LaplacianEncoding,
    LearnedEncoding,
    RelativeBias,
    RotaryEncoding,
    ShortestPathBias,
    SinusoidalEncoding,
)
from graphattn.testing import zoo
from operands import EXACT

EDGE_INDEX = torch.tensor([[0, 1, 2, 0, 3, 3, 1], [1, 2, 0, 2, 2, 0, 1]])  # four nodes
SHUFFLED = next(case for case in zoo(hub=5) if case.name == "shuffled")


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Sinusoidal #######################################################################################


def test_sinusoidal_gives_the_numbers_of_the_formula():
    # sin and cos of 1, 2, 3 and of a hundredth of them, from a table.
    expected = torch.tensor(
        [
            [0.0, 1.0, 0.0, 1.0],
            [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
            [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
            [0.1411200081, -0.9899924966, 0.0299955002, 0.9995500337],
        ],
        dtype=torch.float64,
    )
    position = torch.arange(4, dtype=torch.float64)
    torch.testing.assert_close(SinusoidalEncoding(4)(position), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("channels", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sinusoidal_is_the_formula_entry_by_entry(channels, base):
    positions = [0, 1, -3, 2.5, 17, 512, 100_001]
    encoding = SinusoidalEncoding(channels, base=base)(torch.tensor(positions))
    expected = [
        [
            (math.cos if c % 2 else math.sin)(p / base ** ((c - c % 2) / channels))
            for c in range(channels)
        ]
        for p in positions
    ]
    assert encoding.shape == (len(positions), channels)
    torch.testing.assert_close(encoding, torch.tensor(expected), rtol=0, atol=1e-6)


def test_sinusoidal_has_no_last_position():
    far = SinusoidalEncoding(2)(torch.tensor([10**7, 10**9]))
    expected = [[math.sin(p), math.cos(p)] for p in (10**7, 10**9)]
    torch.testing.assert_close(far, torch.tensor(expected), rtol=0, atol=1e-6)


def test_sinusoidal_takes_a_single_number_and_no_number():
    encoding = SinusoidalEncoding(6)
    assert torch.equal(encoding(torch.tensor(3)), encoding(torch.arange(5))[3])
    assert encoding(torch.arange(0)).shape == (0, 6)
    assert encoding(torch.empty(0, 2)).shape == (0, 6)


@pytest.mark.parametrize(
    ("channels", "axes", "shares"),
    [(8, 2, (4, 4)), (8, 3, (3, 3, 2)), (5, 2, (3, 2)), (4, 1, (4,)), (2, 2, (1, 1))],
)
def test_sinusoidal_shares_channels_among_axes(channels, axes, shares):
    position = torch.randint(50, (7, axes))
    blocks = [
        SinusoidalEncoding(share)(along)
        for share, along in zip(shares, position.unbind(1), strict=True)
    ]
    assert torch.equal(SinusoidalEncoding(channels)(position), torch.cat(blocks, dim=1))


def test_sinusoidal_keeps_the_dtype_of_positions():
    encoding = SinusoidalEncoding(4)
    assert encoding(torch.arange(3)).dtype == torch.float32
    assert encoding(torch.arange(3, dtype=torch.int32)).dtype == torch.float32
    assert encoding(torch.arange(3.0, dtype=torch.float64)).dtype == torch.float64
    assert encoding(torch.arange(3.0, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.usefixtures("_double")
def test_encodings_follow_the_default_dtype():
    position = torch.arange(4)
    assert SinusoidalEncoding(4)(position).dtype == torch.float64
    assert AlibiBias(2)(EDGE_INDEX, position).dtype == torch.float64
    assert RelativeBias(2, 3)(EDGE_INDEX, position).dtype == torch.float64


def test_sinusoidal_refuses_what_it_cannot_mean():
    encoding = SinusoidalEncoding(2)
    with pytest.raises(ValueError, match=r"\(N,\), or \(N, k\) for k axes, got \(2, 3, 4\)"):
        encoding(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="2 channels can be shared by 1 to 2 axes"):
        encoding(torch.zeros(5, 3))
    with pytest.raises(ValueError, match="can be shared by 1 to 2 axes"):
        encoding(torch.zeros(5, 0))
    with pytest.raises(TypeError, match="must be a tensor of real numbers, got list"):
        encoding([0, 1])
    with pytest.raises(TypeError, match=r"must be a tensor of real numbers, got torch.bool"):
        encoding(torch.tensor([True]))
    with pytest.raises(ValueError, match="channels must be at least 1, got 0"):
        SinusoidalEncoding(0)
    with pytest.raises(ValueError, match="base must be positive, got 0"):
        SinusoidalEncoding(4, base=0.0)


# Learned ##########################################################################################


def test_learned_is_an_embedding_and_loads_its_weights():
    embedding = nn.Embedding(6, 4)
    encoding = LearnedEncoding(6, 4)
    encoding.load_state_dict(embedding.state_dict(), strict=True)
    position = torch.tensor([[0, 5], [2, 2]])
    assert torch.equal(encoding(position), embedding(position))
    assert torch.equal(encoding(position.int()), embedding(position))


def test_learned_sums_over_axes():
    encoding = LearnedEncoding((2, 3), 4)
    rows, columns = encoding.weight.split((2, 3))
    position = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    expected = torch.stack([rows[i] + columns[j] for i, j in position.tolist()])
    assert torch.equal(encoding(position), expected)
    assert torch.equal(encoding(position.view(2, 3, 2)), expected.view(2, 3, 4))
    assert encoding(torch.empty(0, 2, dtype=torch.long)).shape == (0, 4)


def test_learned_says_which_positions_there_are():
    for position in ([0, 6], [-1, 3]):
        text = f"axis 0 has positions 0 to 5, got {position[0]} to {position[1]}"
        with pytest.raises(IndexError, match=text):
            LearnedEncoding(6, 4)(torch.tensor(position))
    # Inside the weight, but in the table of another axis.
    with pytest.raises(IndexError, match="axis 0 has positions 0 to 1, got 0 to 2"):
        LearnedEncoding((2, 3), 4)(torch.tensor([[0, 0], [2, 1]]))
    with pytest.raises(IndexError, match="axis 1 has positions 0 to 2, got 0 to 3"):
        LearnedEncoding((2, 3), 4)(torch.tensor([[0, 0], [1, 3]]))


def test_learned_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match=re.escape("shape (*, 2), one column for each axis")):
        LearnedEncoding((2, 3), 4)(torch.tensor([0, 1, 1]))
    with pytest.raises(TypeError, match=r"tensor of integers, got torch.float32. Use position.lo"):
        LearnedEncoding(6, 4)(torch.tensor([0.0]))
    with pytest.raises(TypeError, match="tensor of integers, got list"):
        LearnedEncoding(6, 4)([0])
    for sizes in (0, (2, 0), ()):
        with pytest.raises(ValueError, match="num_positions must be at least 1"):
            LearnedEncoding(sizes, 4)
    with pytest.raises(ValueError, match="channels must be at least 1, got 0"):
        LearnedEncoding(6, 0)


# Relative #########################################################################################


def relative_by_definition(weight, edge_index, of_source, of_target, limits):
    rows = []
    for j, i in edge_index.t().tolist():
        row = 0
        for axis, limit in enumerate(limits):
            offset = int(of_source[j][axis]) - int(of_target[i][axis])
            row = row * (2 * limit + 1) + max(-limit, min(limit, offset)) + limit
        rows.append(weight[row])
    return torch.stack(rows) if rows else weight.new_empty(0, weight.size(1))


@pytest.mark.parametrize("limit", [0, 2, 100])
def test_relative_bias_is_its_definition(limit):
    bias = RelativeBias(3, limit)
    position = torch.randint(-9, 9, (30,))
    expected = relative_by_definition(
        bias.weight, SHUFFLED.edge_index, position[:, None], position[:, None], [limit]
    )
    assert bias.weight.shape == (2 * limit + 1, 3)
    assert torch.equal(bias(SHUFFLED.edge_index, position), expected)
    assert torch.equal(bias(SHUFFLED.graph(), position), expected)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_relative_bias_on_any_axes_between_any_sets(data):
    limits = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    num_src, num_dst = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = data.draw(st.lists(pairs, max_size=12))
    edge_index = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    of_source = torch.randint(-6, 6, (num_src, len(limits)))
    of_target = torch.randint(-6, 6, (num_dst, len(limits)))
    bias = RelativeBias(2, limits)
    expected = relative_by_definition(bias.weight, edge_index, of_source, of_target, limits)
    assert bias.weight.shape == (math.prod(2 * m + 1 for m in limits), 2)
    assert torch.equal(bias(edge_index, (of_source, of_target)), expected)


def test_relative_bias_of_an_image_is_that_of_swin():
    # Swin looks up a 3 x 3 window in a table of 5 x 5 offsets by a matrix of indices.
    bias = RelativeBias(2, (2, 2))
    place = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    offset = place[None, :] - place[:, None] + 2  # of key j and query i
    dense = bias.weight[offset[..., 0] * 5 + offset[..., 1]]
    graph = Graph.from_mask(torch.ones(9, 9, dtype=torch.bool))
    src, dst = graph.edge_index
    assert torch.equal(bias(graph, place), dense[dst, src])


def test_relative_bias_tells_before_from_after():
    bias = RelativeBias(1, 1)
    with torch.no_grad():
        bias.weight.copy_(torch.tensor([[-1.0], [0.0], [1.0]]))
    edge_index = torch.tensor([[0, 1, 0, 4], [1, 0, 0, 0]])
    # A key before its query, one after it, the query itself, one far after it.
    assert bias(edge_index, torch.arange(5)).flatten().tolist() == [-1.0, 1.0, 0.0, 1.0]


def test_relative_bias_refuses_what_it_cannot_mean():
    bias, square = RelativeBias(2, 3), RelativeBias(2, (3, 3))
    position = torch.arange(4)
    with pytest.raises(ValueError, match=r"needs position of shape \(N,\), got \(4, 2\)"):
        bias(EDGE_INDEX, position[:, None].expand(4, 2))
    with pytest.raises(ValueError, match=r"needs position of shape \(N,\), got \(\)"):
        bias(EDGE_INDEX, torch.tensor(3))
    with pytest.raises(ValueError, match=r"needs position of shape \(N, 2\), got \(4,\)"):
        square(EDGE_INDEX, position)
    with pytest.raises(TypeError, match=r"tensor of integers, got torch.float32"):
        bias(EDGE_INDEX, position.float())
    with pytest.raises(TypeError, match="a tensor or a pair"):
        bias(EDGE_INDEX, [position, position, position])
    with pytest.raises(IndexError, match="its values go from 0 to 3"):
        bias(EDGE_INDEX, position[:3])
    with pytest.raises(ValueError, match="the graph has 4 sources and 4 targets"):
        bias(Graph(EDGE_INDEX, 4), torch.arange(5))
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        RelativeBias(0, 3)
    with pytest.raises(ValueError, match=r"max_distance must be at least 0, got \(3, -1\)"):
        RelativeBias(2, (3, -1))


# Shortest paths ###################################################################################


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_shortest_path_bias_has_entries_for_far_and_unreachable(dtype):
    bias = ShortestPathBias(2, max_distance=3)
    distance = torch.tensor([0, 1, 2, 3, 4, 100, -1, -7], dtype=dtype)
    assert bias.weight.shape == (6, 2)
    assert torch.equal(bias(distance), bias.weight[[0, 1, 2, 3, 4, 4, 5, 5]])
    assert bias(distance[:0]).shape == (0, 2)


def test_shortest_path_bias_refuses_what_it_cannot_mean():
    with pytest.raises(
        TypeError, match=r"distance must be a tensor of integers, got torch.float32"
    ):
        ShortestPathBias(2, 3)(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="max_distance must be at least 0, got -1"):
        ShortestPathBias(2, -1)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        ShortestPathBias(0, 3)


# ALiBi ############################################################################################


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
    ],
)
def test_alibi_has_the_slopes_of_the_paper(heads, slopes):
    bias = AlibiBias(heads)(torch.tensor([[0], [1]]), torch.tensor([0.0, 1.0]).double())
    torch.testing.assert_close(-bias[0], torch.tensor(slopes, dtype=torch.float64), **EXACT)


def test_alibi_falls_with_the_distance_on_both_sides():
    position = torch.tensor([5, 0, 9, 2])
    bias = AlibiBias(8)(EDGE_INDEX, position)
    src, dst = EDGE_INDEX
    expected = -(position[src] - position[dst]).abs()[:, None] * 2.0 ** -torch.arange(1, 9)
    torch.testing.assert_close(bias, expected)
    assert AlibiBias(8)(EDGE_INDEX[:, :0], position).shape == (0, 8)


def test_alibi_between_two_sets_and_at_any_precision():
    edge_index = torch.tensor([[2, 0], [0, 1]])
    of_source, of_target = torch.tensor([0, 1, 2]), torch.tensor([3, 3])
    bias = AlibiBias(1)(edge_index, (of_source, of_target))
    assert bias.flatten().tolist() == [-1 / 256, -3 / 256]
    # A module in half precision is as exact: distances above 2048 have no float16 of their own.
    halved = AlibiBias(1).half()(torch.tensor([[0], [1]]), torch.tensor([0, 4097]))
    assert halved.dtype == torch.float32
    assert halved.item() == -4097 / 256
    low = torch.tensor([0.0, 1.5], dtype=torch.bfloat16)
    assert AlibiBias(1)(torch.tensor([[0], [1]]), low).dtype == torch.float32


def test_alibi_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match=r"must have shape \(N,\), got \(4, 2\)"):
        AlibiBias(2)(EDGE_INDEX, torch.zeros(4, 2))
    with pytest.raises(TypeError, match="a tensor or a pair"):
        AlibiBias(2)(EDGE_INDEX, None)
    with pytest.raises(TypeError, match=r"real numbers, got torch.bool"):
        AlibiBias(2)(EDGE_INDEX, torch.ones(4, dtype=torch.bool))
    with pytest.raises(IndexError, match="its values go from 0 to 3"):
        AlibiBias(2)(EDGE_INDEX, torch.arange(2))
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        AlibiBias(0)


# Biases in attention ##############################################################################


def biases(position, distance):
    """Every bias by edges, and by all pairs from its definition."""
    offset = position[None, :] - position[:, None]  # [query, key]
    relative, path, alibi = RelativeBias(2, 3), ShortestPathBias(2, 3), AlibiBias(2)
    index = torch.where(distance < 0, 5, distance.clamp(max=4))
    slopes = torch.tensor([2**-4, 2**-8], dtype=torch.float64)
    yield (
        relative.double(),
        lambda graph: relative(graph, position),
        lambda: relative.weight[offset.clamp(-3, 3) + 3],
    )
    yield (
        path.double(),
        lambda graph: path(distance[graph.edge_index[1], graph.edge_index[0]]),
        lambda: path.weight[index],
    )
    yield (
        alibi,
        lambda graph: alibi(graph, position.double()),
        lambda: -offset.abs().double()[..., None] * slopes,
    )


@pytest.mark.parametrize("which", [0, 1, 2], ids=["relative", "shortest path", "alibi"])
def test_bias_in_graph_attention_equals_the_dense_bias_matrix(which, backend):
    position, distance = torch.randperm(30), torch.randint(-1, 7, (30, 30))
    module, by_edge, by_pair = list(biases(position, distance))[which]
    query, key, value = (torch.randn(30, 2, 4, dtype=torch.float64) for _ in range(3))
    src, dst = SHUFFLED.edge_index.unique(dim=1)  # a mask has no parallel edges
    order = torch.randperm(src.numel())
    graph = Graph(torch.stack([src, dst])[:, order], 30)
    allowed = torch.zeros(30, 30, dtype=torch.bool)
    allowed[dst, src] = True
    out = graph_attention(query, key, value, graph, bias=by_edge(graph), backend=backend)
    dense = by_pair().movedim(-1, 0)  # [H, N, N]
    expected, _ = dense_attention(query, key, value, allowed, bias=dense)
    torch.testing.assert_close(out, expected, **EXACT)
    for parameter in module.parameters():
        cotangent = torch.randn_like(out)
        actual = torch.autograd.grad((out * cotangent).sum(), parameter)[0]
        wanted = torch.autograd.grad((expected * cotangent).sum(), parameter)[0]
        torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["relative", "shortest path", "alibi"])
def test_bias_follows_the_nodes_and_the_order_of_edges(which):
    position, distance = torch.randint(9, (30,)), torch.randint(-1, 7, (30, 30))
    _, by_edge, by_pair = list(biases(position, distance))[which]
    edge_index = SHUFFLED.edge_index
    bias, order = by_edge(Graph(edge_index, 30)), torch.randperm(200)
    assert torch.equal(by_edge(Graph(edge_index[:, order], 30)), bias[order])
    torch.testing.assert_close(bias, by_pair()[edge_index[1], edge_index[0]], **EXACT)


def test_c38_relative_positions_of_a_batch_are_those_of_its_parts():
    bias = RelativeBias(2, 4)
    whole = bias(torch.tensor([[0, 1, 3, 4], [1, 2, 4, 3]]), torch.tensor([0, 1, 2, 0, 1]))
    parts = [
        bias(torch.tensor([[0, 1], [1, 2]]), torch.arange(3)),
        bias(torch.tensor([[0, 1], [1, 0]]), torch.arange(2)),
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_biases_go_into_layers_in_low_precision():
    layer = GraphTransformerLayer(8, 2, 16, dropout=0.0)
    position, x = torch.arange(4), torch.randn(4, 8)
    for bias in (RelativeBias(2, 3), AlibiBias(2)):
        given_bias = bias(EDGE_INDEX, position)
        expected = layer(x, EDGE_INDEX, bias=given_bias)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, EDGE_INDEX, bias=bias(EDGE_INDEX, position))
        torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1, check_dtype=False)
        low = copy.deepcopy(layer).bfloat16()
        out = low(
            x.bfloat16(), EDGE_INDEX, bias=copy.deepcopy(bias).bfloat16()(EDGE_INDEX, position)
        )
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


# Rotary ###########################################################################################


def test_rotary_turns_pairs_of_neighbours_by_the_position():
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 4)
    out = RotaryEncoding(4)(x, torch.tensor([3])).flatten()
    # By an angle of 3, and by a hundredth of it: sin 3, cos 3, sin 0.03, cos 0.03 from a table.
    expected = [-0.9899924966, 0.1411200081, -2 * 0.0299955002, 2 * 0.9995500337]
    torch.testing.assert_close(out, torch.tensor(expected).double(), rtol=0, atol=1e-7)
    assert torch.equal(RotaryEncoding(4)(x, torch.tensor([0])), x)


@pytest.mark.parametrize("dim", [2, 6, 8])
def test_rotary_scores_depend_on_the_relative_position_only(dim):
    rotary = RotaryEncoding(dim)
    query, key = (torch.randn(1, 2, dim, dtype=torch.float64).expand(5, 2, dim) for _ in "qk")
    position = torch.tensor([0, 1, 3, 7, 8])

    def scores(shift):
        q, k = (rotary(x, position + shift) for x in (query, key))
        return torch.einsum("ihd,jhd->ijh", q, k)

    torch.testing.assert_close(scores(1000), scores(0), **EXACT)
    torch.testing.assert_close(scores(-7), scores(0), **EXACT)
    # Pairs at equal distance have equal scores (0 to 1 and 7 to 8), others do not.
    torch.testing.assert_close(scores(0)[0, 1], scores(0)[3, 4], **EXACT)
    assert (scores(0)[0, 1] - scores(0)[0, 2]).abs().min() > 1e-3
    assert (scores(0)[0, 1] - scores(0)[1, 0]).abs().min() > 1e-3


def test_rotary_in_attention_does_not_see_a_shift():
    rotary, graph = RotaryEncoding(4), SHUFFLED.graph()
    query, key = (torch.randn(30, 2, 4, dtype=torch.float64) for _ in "qk")
    position = torch.randint(50, (30,))
    weights = [
        attention_weights(rotary(query, position + s), rotary(key, position + s), graph)
        for s in (0, 12345)
    ]
    torch.testing.assert_close(weights[1], weights[0], **EXACT)
    plain = attention_weights(query, key, graph)
    assert (weights[0] - plain).abs().max() > 0.01


def test_rotary_keeps_lengths_shapes_and_dtypes():
    rotary, position = RotaryEncoding(8), torch.arange(5)
    x = torch.randn(2, 3, 5, 4, 8)
    out = rotary(x, position)
    assert torch.equal(out[1, 2], rotary(x[1, 2], position))
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert rotary(torch.empty(0, 4, 8), position[:0]).shape == (0, 4, 8)
    for dtype in (torch.float16, torch.bfloat16):
        # Rounded once, at the end.
        low = x.to(dtype)
        assert torch.equal(rotary(low, position), rotary(low.float(), position).to(dtype))


def test_rotary_is_exact_far_from_the_start():
    x = torch.tensor([1.0, 0.0]).view(1, 1, 2)
    far = RotaryEncoding(2)(x, torch.tensor([10**8])).flatten()
    expected = torch.tensor([math.cos(10**8), math.sin(10**8)])
    torch.testing.assert_close(far, expected, rtol=0, atol=1e-6)


def test_rotary_gradient():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: RotaryEncoding(4)(x, torch.arange(3)), x)


def test_rotary_refuses_what_it_cannot_mean():
    rotary = RotaryEncoding(4)
    with pytest.raises(ValueError, match=r"head_dim must be even, .*, got 5"):
        RotaryEncoding(5)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        RotaryEncoding(0)
    with pytest.raises(ValueError, match="base must be positive"):
        RotaryEncoding(4, base=-1.0)
    with pytest.raises(ValueError, match=r"\(\*, N, heads, head_dim=4\), got \(3, 4\)"):
        rotary(torch.zeros(3, 4), torch.arange(3))
    with pytest.raises(ValueError, match=r"head_dim=4\), got \(3, 2, 6\)"):
        rotary(torch.zeros(3, 2, 6), torch.arange(3))
    with pytest.raises(ValueError, match=r"position must have shape \(3,\).*got \(2,\)"):
        rotary(torch.zeros(3, 2, 4), torch.arange(2))
    with pytest.raises(TypeError, match=r"x must be floating point, got torch.int64"):
        rotary(torch.zeros(3, 2, 4).long(), torch.arange(3))
    with pytest.raises(TypeError, match="position must be a tensor of real numbers, got range"):
        rotary(torch.zeros(3, 2, 4), range(3))


# Laplacian ########################################################################################


def test_laplacian_encoding_in_evaluation_is_a_linear_map():
    encoding = LaplacianEncoding(3, 5).eval()
    x = torch.randn(6, 3)
    assert torch.equal(encoding(x), x @ encoding.lin.weight.t())
    assert torch.equal(encoding(x), encoding(x))
    assert [name for name, _ in encoding.named_parameters()] == ["lin.weight"]


def test_laplacian_encoding_draws_a_sign_for_each_eigenvector_of_each_graph():
    encoding = LaplacianEncoding(3, 3)
    with torch.no_grad():
        encoding.lin.weight.copy_(torch.eye(3))
    batch = torch.tensor([0, 0, 1, 1, 1, 3])
    x = torch.rand(6, 3) + 0.5
    signs = torch.stack([encoding(x, batch=batch) / x for _ in range(200)])  # [draws, N, k]
    assert torch.equal(signs.abs(), torch.ones(200, 6, 3))
    for graph in (0, 1, 3):
        own = signs[:, batch == graph]
        assert torch.equal(own, own[:, :1].expand_as(own))  # one for all nodes of a graph
    per_graph = signs[:, [0, 2, 5]].flatten(1)  # nine signs, each independent of the others
    assert per_graph.mean(0).abs().max() < 0.3
    assert torch.corrcoef(per_graph.t()).fill_diagonal_(0).abs().max() < 0.35


def test_laplacian_encoding_of_one_graph_and_of_none():
    encoding = LaplacianEncoding(2, 4)
    x = torch.rand(5, 2)
    plain = encoding.eval()(x)
    flipped = [x * torch.tensor(sign) for sign in ([1.0, 1], [1, -1], [-1, 1], [-1, -1])]
    options = [encoding(y) for y in flipped]
    out = encoding.train()(x)
    assert any(torch.equal(out, option) for option in options)
    assert torch.equal(options[0], plain)
    none = torch.empty(0, 2)
    assert encoding(none).shape == (0, 4)
    assert encoding(none, batch=torch.empty(0, dtype=torch.long)).shape == (0, 4)
    assert encoding(none, batch=torch.empty(0, dtype=torch.long), batch_size=3).shape == (0, 4)


@pytest.mark.parametrize("training", [True, False])
def test_c70_what_is_masked_encodes_to_zero(training):
    encoding = LaplacianEncoding(2, 4).train(training)
    x = torch.tensor([[0.5, float("nan")], [float("inf"), float("nan")]])
    mask = torch.tensor([[True, False], [False, False]])
    out = encoding(x, mask, torch.tensor([0, 1]))
    torch.testing.assert_close(out[0].abs(), 0.5 * encoding.lin.weight[:, 0].abs())
    assert torch.equal(out[1], torch.zeros(4))
    out.sum().backward()
    assert encoding.lin.weight.grad.isfinite().all()


def test_laplacian_encoding_at_the_precision_of_its_map():
    encoding = LaplacianEncoding(2, 4).bfloat16()
    assert encoding(torch.randn(3, 2)).dtype == torch.bfloat16


def test_laplacian_encoding_refuses_what_it_cannot_mean():
    encoding, x = LaplacianEncoding(2, 4), torch.randn(3, 2)
    with pytest.raises(ValueError, match=r"must have shape \(N, k=2\), got \(3, 4\)"):
        encoding(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"batch must have shape \(3,\), got \(2,\)"):
        encoding(x, batch=torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeError, match=r"mask must be bool, got torch.float32"):
        encoding(x, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"mask must have the shape of eigenvectors \(3, 2\), got"):
        encoding(x, torch.ones(3, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        LaplacianEncoding(0, 4)


# All ##############################################################################################

POSITION = torch.arange(4)
X = torch.linspace(-1, 1, 32).view(4, 2, 4)
MODULES = {
    "sinusoidal": (SinusoidalEncoding(4), (POSITION,)),
    "learned": (LearnedEncoding(4, 5), (POSITION,)),
    "learned, two axes": (LearnedEncoding((4, 4), 5), (torch.stack([POSITION, POSITION], 1),)),
    "laplacian": (LaplacianEncoding(4, 5), (X[:, 0],)),
    "relative": (RelativeBias(2, 2), (EDGE_INDEX, POSITION)),
    "shortest path": (ShortestPathBias(2, 1), (torch.tensor([0, 1, 2, -1]),)),
    "alibi": (AlibiBias(2), (EDGE_INDEX, POSITION)),
    "rotary": (RotaryEncoding(4), (X, POSITION)),
}
each = pytest.mark.parametrize("name", MODULES)


@each
def test_c51_every_parameter_gets_a_gradient(name):
    module, inputs = copy.deepcopy(MODULES[name])
    out = module(*inputs)
    if name in ("sinusoidal", "alibi", "rotary"):
        assert not module.state_dict()
        return
    out.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert (parameter.grad != 0).any(dim=1).all()


@each
def test_copies_and_pickles_give_the_same(name):
    module, inputs = MODULES[name]
    module = copy.deepcopy(module).eval()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*inputs), module(*inputs))


@each
def test_reset_and_print(name):
    module, _ = copy.deepcopy(MODULES[name])
    before = [parameter.clone() for parameter in module.parameters()]
    if before:
        module.reset_parameters()
    for old, new in zip(before, module.parameters(), strict=True):
        assert not torch.equal(old, new)
    assert re.match(r"\w+\(.*\d", repr(module), re.DOTALL)


@each
def test_c56_a_compiler_traces_it_without_breaks(name):
    module, inputs = MODULES[name]
    module = copy.deepcopy(module).eval()
    compiled = torch.compile(functools.partial(module.forward), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), module(*inputs))
