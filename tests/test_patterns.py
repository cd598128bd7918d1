"""Patterns against masks written down pair by pair, and against dense attention with that mask."""

import itertools

import pytest
import torch
from scipy.sparse.csgraph import connected_components
from torch_geometric.utils import to_scipy_sparse_matrix

from graphattn import Graph, dense_attention, graph_attention, patterns

SIZES = range(8)
BATCHES = [[0], [1], [5], [3, 0, 4], [1, 1], [], [0, 0], [2, 6, 1]]


def pairs(length, allowed):
    """The mask ``[N, N]`` in which query i may see key j of its sequence where ``allowed`` says."""
    mask = torch.zeros(sum(length), sum(length), dtype=torch.bool)
    start = 0
    for n in length:
        for i, j in itertools.product(range(n), range(n)):
            mask[start + i, start + j] = allowed(i, j, n)
        start += n
    return mask


def assert_is(edge_index, mask):
    """The edges of the mask, each once, sorted by target and source."""
    dst, src = mask.nonzero().unbind(1)
    assert edge_index.dtype == torch.int64
    assert edge_index.tolist() == [src.tolist(), dst.tolist()]
    graph = Graph(edge_index, (mask.size(1), mask.size(0)))
    assert graph.edge_id is None  # nothing was sorted


# Sequences ########################################################################################


@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_complete_and_causal(length):
    assert_is(patterns.complete(length), pairs(length, lambda i, j, n: True))
    assert_is(patterns.causal(length), pairs(length, lambda i, j, n: j <= i))


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("length", [*([n] for n in SIZES), [3, 0, 7], [1, 6]], ids=str)
def test_window(length, dilation):
    for left, right in itertools.product((0, 1, 2, 9), (0, 1, 3, 20)):
        mask = pairs(
            length,
            lambda i, j, n, left=left, right=right: (
                (j - i) % dilation == 0 and -left * dilation <= j - i <= right * dilation
            ),
        )
        assert_is(patterns.window(length, left, right, dilation=dilation), mask)


def test_window_is_symmetric_unless_told():
    assert torch.equal(patterns.window(9, 2), patterns.window(9, 2, 2))


def test_a_window_beyond_the_sequence_is_complete_and_one_to_the_left_causal():
    assert torch.equal(patterns.window([4, 6], 6), patterns.complete([4, 6]))
    assert torch.equal(patterns.window([4, 6], 100, 0), patterns.causal([4, 6]))


@pytest.mark.parametrize("num_src", [*([n] for n in range(4)), [2, 0, 3]], ids=str)
def test_cross(num_src):
    for num_dst in itertools.product(range(4), repeat=len(num_src)):
        for causal in (False, True):
            mask = torch.zeros(sum(num_dst), sum(num_src), dtype=torch.bool)
            row = column = 0
            for n, m in zip(num_src, num_dst, strict=True):
                for i, j in itertools.product(range(m), range(n)):
                    mask[row + i, column + j] = not causal or j - n <= i - m
                row, column = row + m, column + n
            assert_is(patterns.cross(num_src, num_dst, causal=causal), mask)


def test_c86_pairs_have_offsets_of_their_own_on_each_side():
    edge_index = patterns.cross([2, 4], [3, 1])
    assert edge_index.tolist() == [[0, 1, 0, 1, 0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]]


def test_causal_cross_of_equal_sides_is_causal():
    assert torch.equal(patterns.cross([3, 5], [3, 5], causal=True), patterns.causal([3, 5]))


@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_global_tokens(length):
    for tokens in (0, 1, 2, 9):
        mask = pairs(length, lambda i, j, n, tokens=tokens: i < tokens or j < tokens)
        assert_is(patterns.global_tokens(length, tokens), mask)
    chosen = torch.rand(sum(length)) < 0.4
    same = pairs(length, lambda i, j, n: True)
    assert_is(patterns.global_tokens(length, chosen), same & (chosen | chosen.unsqueeze(1)))


@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_random_keys_are_others_of_the_sequence(length):
    sizes, same = patterns.position(length), pairs(length, lambda i, j, n: i != j)
    of_node = torch.tensor(length, dtype=torch.int64)[patterns.batch_vector(length)]
    assert sizes.numel() == of_node.numel()
    for num_keys in (0, 1, 3, 30):
        edge_index = patterns.random(length, num_keys)
        mask = patterns.to_mask(edge_index, sum(length))
        assert_is(edge_index, mask)
        assert not (mask & ~same).any()
        assert mask.sum(1).tolist() == (of_node - 1).clamp(max=num_keys).tolist()


def test_random_draws_every_set_of_keys_equally_often():
    length = [5] * 4000
    edge_index = patterns.random(length, 2)
    drawn = (edge_index[0] % 5).view(-1, 5, 2)  # [sequence, token, key], sorted
    for token in range(5):
        sets, count = drawn[:, token].unique(dim=0, return_counts=True)
        assert sets.size(0) == 6
        assert ((count / 4000 - 1 / 6).abs() < 0.03).all()  # five standard deviations


def test_random_patterns_follow_their_generator():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [
            patterns.random([9, 4], 3, generator=generator),
            patterns.expander([9, 4], 4, generator=generator),
            patterns.big_bird([9, 4], 1, 2, 1, generator=generator),
        ]

    for first, second, other in zip(draw(1), draw(1), draw(2), strict=True):
        assert torch.equal(first, second)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("length", BATCHES, ids=str)
@pytest.mark.parametrize("degree", [0, 2, 4])
def test_expander_is_symmetric_and_connects_each_sequence(length, degree):
    edge_index = patterns.expander(length, degree)
    mask = patterns.to_mask(edge_index, sum(length))
    assert_is(edge_index, mask)
    assert torch.equal(mask, mask.T)
    assert not (mask & ~pairs(length, lambda i, j, n: i != j)).any()
    assert (mask.sum(1) <= degree).all()
    if degree > 0 and sum(length) > 0:
        matrix = to_scipy_sparse_matrix(edge_index, num_nodes=sum(length))
        parts, _ = connected_components(matrix, directed=False)
        assert parts == sum(n > 0 for n in length)


def test_expander_has_a_wide_spectral_gap():
    """The second eigenvalue is near that of a Ramanujan graph, 2 sqrt(d - 1)."""
    adjacency = patterns.to_mask(patterns.expander(400, 6), 400).double()
    eigenvalues = torch.linalg.eigvalsh(adjacency)
    assert eigenvalues[-1] <= 6 + 1e-9
    assert eigenvalues[-2] < 1.1 * 2 * 5**0.5


@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_longformer_and_big_bird_are_unions(length):
    mask = pairs(length, lambda i, j, n: abs(i - j) in (0, 2) or i < 1 or j < 1)
    assert_is(patterns.longformer(length, 1, 1, dilation=2), mask)
    edge_index = patterns.big_bird(length, 1, 2, 1, generator=torch.Generator().manual_seed(3))
    keys = patterns.random(length, 2, generator=torch.Generator().manual_seed(3))
    mask = pairs(length, lambda i, j, n: abs(i - j) <= 1 or i < 1 or j < 1)
    assert_is(edge_index, mask | patterns.to_mask(keys, sum(length)))


# Images ###########################################################################################


def grid_mask(height, width, window, boundary):
    """Offset by offset, as the docstring defines them."""

    def seen(i, size, k):
        offsets = range(-((k - 1) // 2), k // 2 + 1)
        if k >= size and boundary != "clip":
            return set(range(size))
        if boundary == "wrap":
            return {(i + r) % size for r in offsets}
        if boundary == "shift":
            first = min(max(i + offsets[0], 0), size - k)
            return set(range(first, first + k))
        return {i + r for r in offsets if 0 <= i + r < size}

    mask = torch.zeros(height, width, height, width, dtype=torch.bool)
    for i, j in itertools.product(range(height), range(width)):
        for row, column in itertools.product(seen(i, height, window[0]), seen(j, width, window[1])):
            mask[i, j, row, column] = True
    return mask.view(height * width, height * width)


@pytest.mark.parametrize("boundary", ["clip", "shift", "wrap"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 12, (1, 3), (2, 5)], ids=str)
def test_grid(window, boundary):
    both = window if isinstance(window, tuple) else (window, window)
    for height, width in itertools.product((0, 1, 2, 3, 5), (0, 1, 4, 6)):
        edge_index = patterns.grid(height, width, window, boundary=boundary)
        assert_is(edge_index, grid_mask(height, width, both, boundary))


def test_grid_sees_what_a_convolution_with_same_padding_sees():
    image = torch.eye(20).view(20, 1, 4, 5)
    for k in (1, 2, 3, 4, 5):
        before, after = (k - 1) // 2, k // 2  # torch's own "same" pads so, and warns of even ones
        padded = torch.nn.functional.pad(image, (before, after, before, after))
        seen = torch.nn.functional.conv2d(padded, torch.ones(1, 1, k, k))
        assert torch.equal(patterns.to_mask(patterns.grid(4, 5, k), 20), seen.view(20, 20).T.bool())


def test_grid_of_images_of_unequal_sizes_is_the_images_side_by_side():
    sizes = [(3, 2), (0, 4), (1, 1), (2, 5)]
    heights, widths = zip(*sizes, strict=True)
    for boundary in ("clip", "shift", "wrap"):
        masks = [grid_mask(*size, (3, 2), boundary) for size in sizes]
        edge_index = patterns.grid(heights, widths, (3, 2), boundary=boundary)
        assert_is(edge_index, torch.block_diag(*masks).bool())
    assert torch.equal(patterns.grid([3, 3], 2, 3), patterns.grid([3, 3], [2, 2], 3))
    expected = [[i, j] for height, width in sizes for i in range(height) for j in range(width)]
    assert patterns.grid_position(heights, widths).tolist() == expected


# Points, hashes, extra nodes ######################################################################


@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_knn(length):
    x = torch.randn(sum(length), 3)
    batch = patterns.batch_vector(length)
    distance = torch.cdist(x, x).masked_fill(batch != batch.unsqueeze(1), torch.inf)
    distance.fill_diagonal_(torch.inf)
    for k in (0, 1, 3, 10):
        mask = torch.zeros_like(distance, dtype=torch.bool)
        nearest = distance.argsort(dim=1)[:, :k]
        mask.scatter_(1, nearest, True)
        assert_is(patterns.knn(x, k, batch=batch), mask & distance.isfinite())


def test_knn_of_equal_points_leaves_itself_out():
    edge_index = patterns.knn(torch.zeros(6, 2), 2)
    assert (edge_index[0] != edge_index[1]).all()
    assert Graph(edge_index, 6).in_degree().tolist() == [2] * 6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", BATCHES, ids=str)
def test_lsh_buckets(length, causal):
    batch = patterns.batch_vector(length)
    bucket = torch.randint(3, (2, sum(length)))
    shared = (bucket.unsqueeze(1) == bucket.unsqueeze(2)).any(0)
    mask = shared & pairs(length, lambda i, j, n: j <= i or not causal)
    assert_is(patterns.lsh_buckets(bucket, batch=batch, causal=causal), mask)
    one = bucket[0].unsqueeze(0) == bucket[0].unsqueeze(1)
    mask = one & pairs(length, lambda i, j, n: j <= i or not causal)
    assert_is(patterns.lsh_buckets(bucket[0], batch=batch, causal=causal), mask)


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_lsh_buckets_in_chunks(chunk):
    length = [9, 0, 6]
    batch = patterns.batch_vector(length)
    bucket = torch.randint(2, (3, 15))
    mask = torch.zeros(15, 15, dtype=torch.bool)
    for of_node in bucket.tolist():
        for start, size in ((0, 9), (9, 6)):
            order = sorted(range(start, start + size), key=lambda i: (of_node[i], i))
            for a, b in itertools.product(range(size), repeat=2):
                i, j = order[a], order[b]
                near = a // chunk - b // chunk in (0, 1)
                mask[i, j] |= near and of_node[i] == of_node[j]
    assert_is(patterns.lsh_buckets(bucket, batch=batch, chunk=chunk), mask)
    assert mask.sum() <= 2 * chunk * 3 * 15


def test_lsh_buckets_of_one_bucket_is_complete():
    batch = patterns.batch_vector([4, 3])
    bucket = torch.zeros(7, dtype=torch.int64)
    assert torch.equal(patterns.lsh_buckets(bucket, batch=batch), patterns.complete([4, 3]))


@pytest.mark.parametrize("length", BATCHES, ids=str)
@pytest.mark.parametrize("num_virtual", [0, 1, 3])
def test_virtual_nodes(length, num_virtual):
    num_nodes, batch = sum(length), patterns.batch_vector(length)
    of_virtual = torch.arange(len(length)).repeat_interleave(num_virtual)
    owner = torch.cat([batch, of_virtual])
    is_virtual = torch.arange(owner.numel()) >= num_nodes
    mask = (owner == owner.unsqueeze(1)) & (is_virtual != is_virtual.unsqueeze(1))
    assert_is(patterns.virtual_nodes(length, num_virtual), mask)


# Masks and unions #################################################################################


def test_masks_there_and_back():
    mask = torch.rand(5, 7) < 0.4
    assert torch.equal(patterns.to_mask(patterns.from_mask(mask), (7, 5)), mask)
    batch = torch.rand(3, 2, 4) < 0.5
    expected = torch.block_diag(*batch.int()).bool()
    assert_is(patterns.from_mask(batch), expected)


def test_union_sorts_and_merges():
    first, second = torch.randint(6, (2, 20)), torch.randint(6, (2, 20))
    mask = patterns.to_mask(first, 6) | patterns.to_mask(second, 6)
    assert_is(patterns.union(first, second), mask)
    assert_is(patterns.union(first), patterns.to_mask(first, 6))
    assert patterns.union(first.new_empty(2, 0)).shape == (2, 0)


ALL = {
    "complete": patterns.complete,
    "causal": patterns.causal,
    "window": lambda n: patterns.window(n, 2, 1),
    "cross": lambda n: patterns.cross(n, n, causal=True),
    "global tokens": lambda n: patterns.global_tokens(n, 1),
    "random": lambda n: patterns.random(n, 2),
    "expander": lambda n: patterns.expander(n, 4),
    "longformer": lambda n: patterns.longformer(n, 1, 1),
    "big bird": lambda n: patterns.big_bird(n, 1, 1, 1),
    "grid": lambda n: patterns.grid(n, 1, 3),
    "virtual nodes": lambda n: patterns.virtual_nodes(n, 1),
}


@pytest.mark.parametrize("name", ALL)
def test_attention_along_a_pattern_is_dense_attention_with_its_mask(name):
    length = [4, 0, 7]
    num_nodes = sum(length) + (len(length) if name == "virtual nodes" else 0)
    edge_index = ALL[name](length)
    query, key, value = torch.randn(3, num_nodes, 2, 4, dtype=torch.float64)
    out = graph_attention(query, key, value, Graph(edge_index, num_nodes))
    mask = patterns.to_mask(edge_index, num_nodes)
    expected, _ = dense_attention(query, key, value, mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_lengths_may_be_integers_lists_or_tensors(name):
    def make(length):
        torch.manual_seed(1)
        return ALL[name](length)

    assert torch.equal(make(5), make([5]))
    assert torch.equal(make([5, 2]), make(torch.tensor([5, 2])))
    assert torch.equal(make((5, 2)), make(torch.tensor([5, 2], dtype=torch.int32)))


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("complete", "causal")])
def test_cost_is_linear(name):
    """Sizes whose squares would not fit in memory."""
    if name == "cross":
        edge_index = patterns.cross(200_000, 1, causal=True)
    else:
        edge_index = ALL[name](200_000)
    assert edge_index.size(1) <= 10 * 200_000


def test_c65_many_small_sequences():
    edge_index = patterns.complete([4] * 70_000)
    assert edge_index.shape == (2, 16 * 70_000)
    assert edge_index[:, -1].tolist() == [279_999, 279_999]


# Errors ###########################################################################################


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: patterns.complete(-1), ValueError, "complete: a length must not be negative"),
        (lambda: patterns.causal([2.0]), TypeError, r"causal: a length must be .* got \[2.0\]"),
        (lambda: patterns.causal(torch.ones(2)), TypeError, "got a torch.float32 tensor of shape"),
        (lambda: patterns.causal([[1, 2]]), TypeError, "causal: a length must be an integer"),
        (lambda: patterns.window(3, -1), ValueError, "window: left must be at least 0, got -1"),
        (lambda: patterns.window(3, 1, -2), ValueError, "window: right must be at least 0"),
        (lambda: patterns.window(3, 1, dilation=0), ValueError, "dilation must be at least 1"),
        (lambda: patterns.cross([1, 2], 3), ValueError, "one number for each pair, got 2 and 1"),
        (lambda: patterns.global_tokens(3, -1), ValueError, "tokens must be at least 0"),
        (
            lambda: patterns.global_tokens(3, torch.ones(2, dtype=torch.bool)),
            ValueError,
            r"tokens must be a number or a bool tensor of shape \(3,\)",
        ),
        (lambda: patterns.random(3, -1), ValueError, "num_keys must be at least 0"),
        (lambda: patterns.expander(3, 3), ValueError, "degree must be even, got 3"),
        (lambda: patterns.expander(3, -2), ValueError, "degree must be at least 0"),
        (lambda: patterns.grid(3, 3, 0), ValueError, "grid: window must be at least 1, got 0"),
        (
            lambda: patterns.grid(3, 3, (3, 0)),
            ValueError,
            r"grid: window must be at least 1, got \(3, 0\)",
        ),
        (lambda: patterns.grid(3, 3, 3, boundary="x"), ValueError, "one of .*'clip'.* got 'x'"),
        (lambda: patterns.grid([1, 2], [1, 2, 3], 3), ValueError, "each image, got 2 and 3"),
        (lambda: patterns.knn(torch.ones(3), 1), ValueError, r"x must have shape \(num_nodes"),
        (
            lambda: patterns.knn(torch.ones(3, 1), 1, batch=torch.tensor([1, 0, 0])),
            ValueError,
            r"knn: batch must be a sorted int64 tensor of shape \(3,\)",
        ),
        (lambda: patterns.lsh_buckets(torch.ones(3)), TypeError, "bucket must be an int64"),
        (lambda: patterns.lsh_buckets(torch.tensor([-1])), ValueError, "must not be negative"),
        (
            lambda: patterns.lsh_buckets(torch.tensor([1]), chunk=0),
            ValueError,
            "chunk must be at least 1",
        ),
        (lambda: patterns.virtual_nodes(3, -1), ValueError, "num_virtual must be at least 0"),
        (lambda: patterns.union(), ValueError, "give at least one edge_index"),
        (lambda: patterns.union(torch.ones(2, 3)), TypeError, r"int64 tensor \[2, num_edges\]"),
        (lambda: patterns.from_mask(torch.ones(2, 2)), TypeError, "must be a bool tensor"),
        (lambda: patterns.to_mask(torch.tensor([[3], [0]]), 2), IndexError, "go from 3 to 3"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
