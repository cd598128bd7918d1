"""What the lecture says about attention, one statement in each test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from graphattn import attention_weights, graph_attention
from graphattn.nn import GraphMultiheadAttention, SinusoidalEncoding, linear_attention
from graphattn.patterns import complete, grid, random, to_mask


def one_head(x: Tensor) -> Tensor:
    """``[N, D] -> [N, 1, D]``, as the operator takes it."""
    return x.unsqueeze(1)


def test_the_vector_view_is_the_matrix_view_is_a_complete_graph() -> None:
    n, d = 5, 8
    Q, K, V = torch.randn(3, n, d, dtype=torch.float64)

    # One query at a time: compare it with every key, then mix the values.
    by_vector = []
    for q in Q:
        scores = torch.stack([q @ k for k in K]) / math.sqrt(d)
        weights = scores.exp() / scores.exp().sum()
        by_vector.append(sum(weight * v for weight, v in zip(weights, V, strict=True)))

    # All queries at once.
    by_matrix = torch.softmax(Q @ K.T / math.sqrt(d), dim=-1) @ V

    # A graph in which every node has an edge to every node.
    by_graph = graph_attention(one_head(Q), one_head(K), one_head(V), complete(n)).squeeze(1)

    torch.testing.assert_close(torch.stack(by_vector), by_matrix, rtol=0.0, atol=1e-10)
    torch.testing.assert_close(by_graph, by_matrix, rtol=0.0, atol=1e-10)


def test_a_query_with_four_keys_by_hand() -> None:
    q = torch.tensor([[1.7, 1.0]])
    K = torch.tensor([[1.0, -1.7], [1.7, 0.0], [0.0, -1.0], [-1.0, 1.7]])
    V = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    four_edges = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]])  # all lead to the one query

    torch.testing.assert_close(q @ K.T, torch.tensor([[0.0, 2.89, -1.0, 0.0]]))
    # Divided by sqrt(2): 0, 2.044, -0.707, 0. Exponentials: 1, 7.72, 0.49, 1. Their sum: 10.21.
    weights = attention_weights(one_head(q), one_head(K), four_edges).flatten()
    assert [round(weight, 3) for weight in weights.tolist()] == [0.098, 0.756, 0.048, 0.098]
    output = graph_attention(one_head(q), one_head(K), one_head(V), four_edges)
    assert output.item() == pytest.approx(
        0.098 * 10 + 0.756 * 20 + 0.048 * 30 + 0.098 * 40, abs=0.02
    )


def test_scaling_keeps_the_gradient_of_the_softmax_alive() -> None:
    def typical_gradient(d: int, scale: float) -> float:
        """Median over 1,024 softmaxes of 64 keys, queries and keys of unit variance."""
        query, key = torch.randn(2, 64, 16, d)
        scores = torch.zeros(64 * 64, 16, requires_grad=True)
        weights = attention_weights(query, key, complete(64), bias=scores, scale=scale)
        (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), scores)
        return gradient.view(64, 64, 16).norm(dim=1).median().item()  # for each query and head

    sizes = (4, 16, 64, 256, 1024)
    unscaled = [typical_gradient(d, scale=1.0) for d in sizes]
    scaled = [typical_gradient(d, scale=1 / math.sqrt(d)) for d in sizes]
    assert max(scaled) < 1.5 * min(scaled)
    assert unscaled[1:] == sorted(unscaled[1:], reverse=True)  # 0.23, 0.11, 0.016, 0.0002
    assert unscaled[-1] < scaled[-1] / 100


def test_multi_head_is_concatenated_heads_times_an_output_matrix() -> None:
    n, size, heads = 6, 12, 3
    d = size // heads
    layer = GraphMultiheadAttention(size, heads, bias=False).double()
    X, edges = torch.randn(n, size, dtype=torch.float64), random(n, 3)
    W_Q, W_K, W_V = layer.in_proj_weight.chunk(3)
    W_O = layer.out_proj.weight

    outputs = []
    for h in range(heads):
        own = slice(h * d, (h + 1) * d)  # the rows of this head
        Q, K, V = X @ W_Q[own].T, X @ W_K[own].T, X @ W_V[own].T
        outputs.append(graph_attention(one_head(Q), one_head(K), one_head(V), edges).squeeze(1))

    expected = torch.cat(outputs, dim=-1) @ W_O.T
    torch.testing.assert_close(layer(X, X, X, edges), expected, rtol=0.0, atol=1e-10)


def test_attention_is_blind_to_order_until_positions_are_encoded() -> None:
    n, size = 7, 16
    layer = GraphMultiheadAttention(size, num_heads=4).double()
    X, order = torch.randn(n, size, dtype=torch.float64), torch.randperm(n)

    def attend(X: Tensor) -> Tensor:
        return layer(X, X, X, complete(n))

    # Tokens in another order: the same outputs in that order.
    torch.testing.assert_close(attend(X[order]), attend(X)[order], rtol=0.0, atol=1e-10)

    P = SinusoidalEncoding(size).double()(torch.arange(n))
    assert not torch.allclose(attend(X[order] + P), attend(X + P)[order], atol=0.01)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_a_convolution_is_attention(kernel_size: int) -> None:
    height, width, channels_in, channels_out = 5, 7, 3, 4
    images = torch.randn(2, channels_in, height, width)
    kernel = torch.randn(channels_out, channels_in, kernel_size, kernel_size)
    expected = torch.conv2d(images, kernel, padding="same")

    # A pixel attends to the pixels under the kernel. One head for each place of the kernel.
    edges = grid(height, width, kernel_size)
    heads = kernel_size**2
    source, target = edges
    down = source // width - target // width + kernel_size // 2
    right = source % width - target % width + kernel_size // 2
    place = down * kernel_size + right  # of the source, under a kernel centred on the target

    # A position bias lets each head see its own place and nothing else. Queries and keys are zero.
    bias = torch.where(place[:, None] == torch.arange(heads), 0.0, -torch.inf)
    zeros = torch.zeros(2, height * width, heads, 1)
    pixels = images.flatten(2).mT  # [2, N, channels_in]
    values = pixels.unsqueeze(2).expand(-1, -1, heads, -1)  # W^V is the identity, for each head
    seen = graph_attention(zeros, zeros, values, edges, bias=bias)
    # Where a place is outside the image, its head sees nothing and gives zero: zero padding.

    W_O = kernel.permute(2, 3, 1, 0).reshape(heads * channels_in, channels_out)
    out = (seen.flatten(2) @ W_O).mT.unflatten(2, (height, width))
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-5)


def test_linear_causal_attention_is_a_recurrence() -> None:
    n, d = 300, 4
    query, key, V = torch.randn(3, n, d, dtype=torch.float64)
    Q, K = nn.functional.elu(query) + 1, nn.functional.elu(key) + 1  # positive features

    # All tokens at once: the weight of key j for query i is proportional to their product.
    at_once = linear_attention(one_head(Q), one_head(K), one_head(V), causal=True).squeeze(1)
    products = (Q @ K.T).tril()
    weights = products / products.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(at_once, weights @ V, rtol=0.0, atol=1e-10)

    # Token by token: two sums are all that must be remembered, however long the sequence is.
    state, divisor = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    for q, k, v, expected in zip(Q, K, V, at_once, strict=True):
        state, divisor = state + torch.outer(k, v), divisor + k
        torch.testing.assert_close(q @ state / (q @ divisor), expected, rtol=0.0, atol=1e-10)


def test_attention_along_edges_is_dense_attention_with_zero_weights_elsewhere() -> None:
    n, d = 7, 4
    Q, K, V = torch.randn(3, n, d, dtype=torch.float64)
    edges = random(n, 3)
    allowed = to_mask(edges, n)

    exponentials = (Q @ K.T / math.sqrt(d)).exp() * allowed  # zero where there is no edge
    weights = exponentials / exponentials.sum(dim=-1, keepdim=True)

    along_edges = graph_attention(one_head(Q), one_head(K), one_head(V), edges).squeeze(1)
    torch.testing.assert_close(along_edges, weights @ V, rtol=0.0, atol=1e-10)
    of_edges = attention_weights(one_head(Q), one_head(K), edges).squeeze(1)
    torch.testing.assert_close(of_edges, weights[edges[1], edges[0]], rtol=0.0, atol=1e-10)
