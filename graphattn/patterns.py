"""Who may attend to whom, as an ``edge_index``: sequences, images, Transformers, sparse attention.

Every function returns the edges ``[2, E]`` int64 of a pattern, sources (keys) in row 0, targets
(queries) in row 1, sorted by target and then by source, each once: :class:`graphattn.Graph` takes
them without sorting again. No dense mask is ever made but by :func:`to_mask`.

A batch is a list of lengths. Its sequences lie side by side, ``N = sum(length)`` nodes, as in
``torch.cat(sequences)``: nothing is padded, and no edge leads from one sequence to another.

>>> edge_index = window([3, 2], 1, 0)  # each token attends to itself and the one before it
>>> edge_index
tensor([[0, 0, 1, 1, 2, 3, 3, 4],
        [0, 1, 1, 2, 2, 3, 4, 4]])
>>> to_mask(edge_index, 5).int()
tensor([[1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1]], dtype=torch.int32)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.spatial import KDTree
from torch import Tensor

from graphattn._checks import check_at_least, check_choice
from graphattn.graph import Graph

__all__ = [
    "batch_vector",
    "big_bird",
    "causal",
    "complete",
    "cross",
    "expander",
    "from_mask",
    "global_tokens",
    "grid",
    "grid_position",
    "knn",
    "longformer",
    "lsh_buckets",
    "position",
    "random",
    "to_mask",
    "union",
    "virtual_nodes",
    "window",
]

Length = int | Sequence[int] | Tensor
"""One length, or one for each sequence of a batch: integers or an int64 tensor ``[B]``."""


def position(length: Length) -> Tensor:
    """Where each node stands in its own sequence, ``[N]`` int64, from 0.

    >>> position([3, 2])
    tensor([0, 1, 2, 0, 1])
    """
    return _place("position", length)[1]


def batch_vector(length: Length) -> Tensor:
    """Which sequence each node belongs to, ``[N]`` int64: PyG's ``batch``.

    >>> batch_vector([3, 2])
    tensor([0, 0, 0, 1, 1])
    """
    return torch.repeat_interleave(_lengths("batch_vector", length))


# Sequences ########################################################################################


def complete(length: Length) -> Tensor:
    """Everyone attends to everyone of the same sequence and to itself: ``sum(length ** 2)`` edges.

    The graph of ordinary self-attention ("Attention Is All You Need",
    https://arxiv.org/abs/1706.03762).

    Raises:
        TypeError, ValueError: ``length`` is no length, or negative.

    >>> complete([2, 1])
    tensor([[0, 1, 0, 1, 2],
            [0, 0, 1, 1, 2]])
    """
    sizes, _, start = _place("complete", length)
    return _ranges(start, sizes)


def causal(length: Length) -> Tensor:
    """Each token attends to itself and to all before it: ``sum(n * (n + 1) / 2)`` edges.

    The graph of a Transformer's decoder and of language models.

    Raises:
        TypeError, ValueError: As :func:`complete`.

    >>> to_mask(causal(3), 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    _, place, start = _place("causal", length)
    return _ranges(start, place + 1)


def window(length: Length, left: int, right: int | None = None, *, dilation: int = 1) -> Tensor:
    r"""Truncated self-attention: itself, ``left`` tokens before and ``right`` tokens after.

    Token :math:`i` attends to :math:`i + d\,r` for :math:`-\mathrm{left} \le r \le
    \mathrm{right}` with dilation :math:`d`, where that is in the sequence: at most
    ``N (left + right + 1)`` edges. "A Time-Restricted Self-Attention Layer for ASR" (Povey et al.,
    2018); dilated in Longformer (https://arxiv.org/abs/2004.05150).

    Args:
        length: One length, or one for each sequence.
        left: Tokens seen before; any number, also beyond the sequence.
        right: Tokens seen after. Default ``left``; 0 for a causal window.
        dilation: Distance from one token seen to the next.

    Raises:
        TypeError, ValueError: As :func:`complete`; ``left`` or ``right`` is negative or
            ``dilation`` below 1.

    >>> to_mask(window(5, 1, dilation=2), 5).int()
    tensor([[1, 0, 1, 0, 0],
            [0, 1, 0, 1, 0],
            [1, 0, 1, 0, 1],
            [0, 1, 0, 1, 0],
            [0, 0, 1, 0, 1]], dtype=torch.int32)
    """
    right = left if right is None else right
    check_at_least("window", 0, left=left, right=right)
    check_at_least("window", 1, dilation=dilation)
    sizes, place, start = _place("window", length)
    before = (place // dilation).clamp(max=left)
    after = ((sizes - 1 - place) // dilation).clamp(max=right)
    return _ranges(start + place - before * dilation, before + after + 1, step=dilation)


def cross(num_src: Length, num_dst: Length, *, causal: bool = False) -> Tensor:
    """Cross attention: each target of a pair attends to all its sources, ``n_src * n_dst`` edges.

    Sources and targets are counted apart: those of pair ``b`` start at ``sum(num_src[:b])`` and
    ``sum(num_dst[:b])``. Give both numbers to :class:`graphattn.Graph`.

    Args:
        num_src: One number of sources, or one for each pair.
        num_dst: One number of targets, or one for each pair.
        causal: Targets are the last of the sources in time: the last target sees all, the one
            before it all but the last source, and so on, as for new tokens beside a key/value
            cache. A target with no source to see stays without edges.

    Raises:
        TypeError, ValueError: As :func:`complete`; the numbers of pairs differ.

    >>> cross([2, 1], [1, 2])
    tensor([[0, 1, 2, 2],
            [0, 0, 1, 2]])
    >>> to_mask(cross(4, 2, causal=True), (4, 2)).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    sources, targets = _lengths("cross", num_src), _lengths("cross", num_dst)
    if sources.numel() != targets.numel():
        raise ValueError(
            "cross: num_src and num_dst must have one number for each pair, got "
            f"{sources.numel()} and {targets.numel()}."
        )
    sizes, place, _ = _place("cross", targets)
    pair = torch.repeat_interleave(targets)
    count = sources[pair]
    if causal:
        count = (place + 1 + count - sizes).clamp(min=0).minimum(count)
    return _ranges((sources.cumsum(0) - sources)[pair], count)


def global_tokens(length: Length, tokens: int | Tensor) -> Tensor:
    """Some tokens attend to all and are attended to by all; no other pair is joined.

    At most ``2 N`` edges for each global token. A part of :func:`longformer` and
    :func:`big_bird`; a single one is a Transformer's class token.

    Args:
        length: One length, or one for each sequence.
        tokens: The number of tokens at the start of each sequence (all where it is shorter), or
            which nodes, ``[N]`` bool.

    Raises:
        TypeError, ValueError: As :func:`complete`; ``tokens`` is negative or no ``[N]`` bool.

    >>> to_mask(global_tokens(4, 1), 4).int()
    tensor([[1, 1, 1, 1],
            [1, 0, 0, 0],
            [1, 0, 0, 0],
            [1, 0, 0, 0]], dtype=torch.int32)
    """
    sizes, place, start = _place("global_tokens", length)
    if isinstance(tokens, Tensor):
        if tokens.dtype != torch.bool or tokens.shape != place.shape:
            raise ValueError(
                f"global_tokens: tokens must be a number or a bool tensor of shape "
                f"{tuple(place.shape)}, got a {tokens.dtype} tensor of shape {tuple(tokens.shape)}."
            )
        is_global = tokens
    else:
        check_at_least("global_tokens", 0, tokens=tokens)
        is_global = place < tokens
    nodes = is_global.nonzero().squeeze(1)
    # Of each node's sequence: where its global tokens start among all global tokens, and how many.
    before = _before(is_global)
    first = before[start]
    count = before[start + sizes] - first
    to_all = _ranges(start, sizes.where(is_global, 0))
    src, dst = _ranges(first, count.where(~is_global, 0))
    return _by_target(torch.cat([to_all, torch.stack([nodes[src], dst])], dim=1))


def random(length: Length, num_keys: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Each token attends to ``num_keys`` others of its sequence, drawn without replacement.

    Where there are fewer others it attends to all of them, never to itself. A part of
    :func:`big_bird`.

    Args:
        length: One length, or one for each sequence.
        num_keys: Number of others for each token.
        generator: Where the draws come from. Default torch's own.

    Raises:
        TypeError, ValueError: As :func:`complete`; ``num_keys`` is negative.

    >>> random(2, 5)
    tensor([[1, 0],
            [0, 1]])
    """
    check_at_least("random", 0, num_keys=num_keys)
    sizes, place, start = _place("random", length)
    others = sizes - 1
    count = others.clamp(max=num_keys)
    most = int(count.max()) if count.numel() > 0 else 0
    drawn = start.new_empty(start.numel(), most)
    # Floyd's sampling: the step draws from the first ``limit + 1`` others, and takes the last of
    # them where the draw is in the sample already.
    for step in range(most):
        limit = others - count + step
        draw = _below(limit + 1, generator)
        taken = (drawn[:, :step] == draw.unsqueeze(1)).any(dim=1)
        drawn[:, step] = limit.where(taken, draw)
    used = torch.arange(most, device=start.device) < count.unsqueeze(1)
    dst, other = used.nonzero()[:, 0], drawn[used]
    src = start[dst] + other + (other >= place[dst])
    return _unique(torch.stack([src, dst]))


def expander(length: Length, degree: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A sparse graph in which everyone reaches everyone in a few steps: random cycles, joined.

    Edges of ``degree / 2`` random Hamiltonian cycles of each sequence, both ways, duplicates
    merged: at most ``degree`` in-edges each, connected, without self-loops. A union of random
    cycles is close to the best spectral gap there is (Friedman, https://arxiv.org/abs/cs/0405020);
    Exphormer (https://arxiv.org/abs/2303.06147) attends along such edges.

    Args:
        length: One length, or one for each sequence.
        degree: Number of neighbours, even.
        generator: Where the draws come from. Default torch's own.

    Raises:
        TypeError, ValueError: As :func:`complete`; ``degree`` is odd or negative.

    >>> expander(3, 2)
    tensor([[1, 2, 0, 2, 0, 1],
            [0, 0, 1, 1, 2, 2]])
    """
    check_at_least("expander", 0, degree=degree)
    if degree % 2 != 0:
        raise ValueError(f"expander: degree must be even, got {degree}.")
    sizes, place, start = _place("expander", length)
    sequence = torch.repeat_interleave(_lengths("expander", length))
    ways = []
    for _ in range(degree // 2):
        draw = torch.rand(
            sizes.numel(), generator=generator, device=_device_of(generator, sizes)
        ).to(sizes.device)
        order = draw.argsort()
        order = order[sequence[order].argsort(stable=True)]  # shuffled within each sequence
        following = order[start + (place + 1) % sizes]
        ways += [torch.stack([order, following]), torch.stack([following, order])]
    edges = torch.cat(ways, dim=1) if ways else start.new_empty(2, 0)
    return _unique(edges[:, edges[0] != edges[1]])


def longformer(length: Length, radius: int, tokens: int | Tensor, *, dilation: int = 1) -> Tensor:
    """Longformer's attention: a window around each token, and some global tokens.

    Source: https://arxiv.org/abs/2004.05150.

    Args:
        length: One length, or one for each sequence.
        radius: Tokens seen on each side.
        tokens: Global tokens, as in :func:`global_tokens`.
        dilation: As in :func:`window`.

    Raises:
        TypeError, ValueError: As :func:`window` and :func:`global_tokens`.

    >>> to_mask(longformer(5, 1, 1), 5).int()
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 0, 1, 1, 1],
            [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    return union(window(length, radius, dilation=dilation), global_tokens(length, tokens))


def big_bird(
    length: Length,
    radius: int,
    num_keys: int,
    tokens: int | Tensor,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """BigBird's attention: a window around each token, random keys, and some global tokens.

    Of single tokens, where the paper's program takes blocks of 64 to suit its hardware. Source:
    https://arxiv.org/abs/2007.14062.

    Args:
        length: One length, or one for each sequence.
        radius: Tokens seen on each side.
        num_keys: Random keys of each token, as in :func:`random`.
        tokens: Global tokens, as in :func:`global_tokens`.
        generator: Where the draws come from. Default torch's own.

    Raises:
        TypeError, ValueError: As :func:`window`, :func:`random` and :func:`global_tokens`.

    >>> big_bird([300, 200], 3, 2, 1).shape[1] < 500 * (3 + 3 + 1 + 2 + 2)
    True
    """
    return union(
        window(length, radius),
        random(length, num_keys, generator=generator),
        global_tokens(length, tokens),
    )


# Images ###########################################################################################


def grid_position(height: Length, width: Length) -> Tensor:
    """Row and column of each pixel of an image, row by row, ``[N, 2]`` int64.

    >>> grid_position(2, 2)
    tensor([[0, 0],
            [0, 1],
            [1, 0],
            [1, 1]])
    """
    heights, widths = _images("grid_position", height, width)
    _, place, _ = _place("grid_position", heights * widths)
    columns = widths[torch.repeat_interleave(heights * widths)]
    return torch.stack([place // columns, place % columns], dim=1)


def grid(
    height: Length, width: Length, window: int | tuple[int, int], *, boundary: str = "clip"
) -> Tensor:
    r"""Each pixel attends to a rectangle of pixels around it, and to itself.

    Pixels are numbered row by row. A window of :math:`k` spans the offsets
    :math:`-\lfloor (k - 1) / 2 \rfloor` to :math:`\lfloor k / 2 \rfloor`, as in
    ``torch.nn.Conv2d(..., padding="same")``: an odd one is centred, an even one sees one pixel more
    below and to the right. One that is larger than the image sees all of it, each pixel once.

    Args:
        height: Rows of the image, or of each image of a batch.
        width: Columns of the image, or of each image.
        window: Pixels seen along each axis, or ``(rows, columns)``.
        boundary: What happens where the window leaves the image. ``"clip"``: there is nothing to
            attend to. ``"shift"``: the window is moved inside, so that all pixels see equally many
            (Neighborhood Attention, https://arxiv.org/abs/2204.07143). ``"wrap"``: it goes on at
            the other side.

    Raises:
        TypeError, ValueError: As :func:`complete`; a window below 1, an unknown ``boundary``, or
            as many heights as widths are not given.

    >>> to_mask(grid(2, 2, (1, 2)), 4).int()
    tensor([[1, 1, 0, 0],
            [0, 1, 0, 0],
            [0, 0, 1, 1],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    heights, widths = _images("grid", height, width)
    rows, columns = window if isinstance(window, tuple) else (window, window)
    check_at_least("grid", 1, window=window)
    check_choice("grid", ("clip", "shift", "wrap"), boundary=boundary)
    row_src, row_first, row_count = _axis(heights, rows, boundary)
    column_src, column_first, column_count = _axis(widths, columns, boundary)

    sizes, place, start = _place("grid", heights * widths)
    image = torch.repeat_interleave(heights * widths)
    wide = widths[image]
    row = (heights.cumsum(0) - heights)[image] + place // wide
    column = (widths.cumsum(0) - widths)[image] + place % wide
    rank, dst = _ranges(torch.zeros_like(sizes), row_count[row] * column_count[column])
    row, column = row[dst], column[dst]
    seen = column_count[column]
    src_row = row_src[row_first[row] + rank // seen]
    src_column = column_src[column_first[column] + rank % seen]
    return torch.stack([start[dst] + src_row * wide[dst] + src_column, dst])


def _axis(sizes: Tensor, window: int, boundary: str) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis: positions seen, and for each target where its own start and how many."""
    size, place, _ = _place("grid", sizes)
    left = (window - 1) // 2
    if boundary == "clip":
        first = (place - left).clamp(min=0)
        count = (place + window // 2 + 1).minimum(size) - first
    else:
        count = size.clamp(max=window)
        first = torch.zeros_like(place).where(size <= window, place - left)
        if boundary == "shift":
            first = first.clamp(min=0).minimum(size - count)
    src, dst = _ranges(first, count)
    src = _by_target(torch.stack([src % size[dst], dst]))[0]
    return src, count.cumsum(0) - count, count


# Points, hashes, extra nodes ######################################################################


def knn(x: Tensor, k: int, *, batch: Tensor | None = None) -> Tensor:
    """Each point attends to the ``k`` points nearest to it, not to itself: at most ``N k`` edges.

    By Euclidean distance, found by ``scipy.spatial.KDTree`` on the CPU. Where distances are equal,
    which of the points are taken is not defined; where a graph has fewer others, all are.

    Args:
        x: Positions or features, ``[N, C]``.
        k: Number of neighbours.
        batch: Sorted graph of each point, ``[N]``; default one graph.

    Raises:
        TypeError, ValueError: ``x`` is not ``[N, C]``, ``k`` is negative, or ``batch`` is not a
            sorted ``[N]``.

    >>> knn(torch.tensor([[0.0], [1.0], [3.0]]), 1)
    tensor([[1, 0, 1],
            [0, 1, 2]])
    """
    check_at_least("knn", 0, k=k)
    if x.dim() != 2:
        raise ValueError(f"knn: x must have shape (num_nodes, channels), got {tuple(x.shape)}.")
    length = _lengths_of("knn", batch, x.size(0), x.device)
    points, found, at = x.detach().double().cpu(), [x.new_empty(2, 0, dtype=torch.int64)], 0
    for size in length.tolist():
        count = min(k, size - 1)
        if count > 0:
            own = points[at : at + size].numpy()
            near = torch.from_numpy(KDTree(own).query(own, count + 1)[1]).to(x.device)
            itself = near == torch.arange(size, device=x.device).unsqueeze(1)
            # Among many equal points it may not have found itself; then the last one goes.
            itself[:, -1] |= ~itself.any(dim=1)
            src = at + near[~itself]
            dst = torch.repeat_interleave(torch.arange(at, at + size, device=x.device), count)
            found.append(torch.stack([src, dst]))
        at += size
    return _by_target(torch.cat(found, dim=1))


def lsh_buckets(
    bucket: Tensor,
    *,
    key_bucket: Tensor | None = None,
    batch: Tensor | None = None,
    chunk: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Reformer's attention: those attend to each other whom a hash has put in the same bucket.

    With several rounds of hashing, two nodes are joined when they share a bucket in any of them.
    Everyone is in its own bucket and so attends to itself, unless keys have buckets of their own.
    Source: https://arxiv.org/abs/2001.04451.

    Args:
        bucket: Bucket of each node, ``[N]`` or ``[rounds, N]`` int64, not negative. Those of
            different graphs have nothing to do with each other.
        key_bucket: Bucket of each node as a key, shaped as ``bucket``, which then is that of each
            node as a query. Default the same.
        batch: Sorted graph of each node, ``[N]``; default one graph.
        chunk: Bound the cost where buckets are uneven, as the paper does: keys are sorted by
            bucket, then by position, cut into chunks of this many, and a node sees those of its
            bucket that are in its own chunk or in the one before; its own is the one where a key of
            its bucket and position stands. At most ``2 * chunk * rounds * N`` edges; without it,
            the sum of the squares of the buckets' sizes.
        causal: Leave out what comes after in the sequence.

    Raises:
        TypeError, ValueError: ``bucket`` is no int64 tensor of one or two dimensions, or has
            negative entries; ``key_bucket`` has another shape; ``batch`` is not a sorted ``[N]``;
            ``chunk`` is below 1.

    >>> lsh_buckets(torch.tensor([5, 2, 5]))
    tensor([[0, 2, 1, 0, 2],
            [0, 0, 1, 2, 2]])
    """
    key_bucket = bucket if key_bucket is None else key_bucket
    for argument, given in (("bucket", bucket), ("key_bucket", key_bucket)):
        if given.dtype != torch.int64 or given.dim() not in (1, 2):
            raise TypeError(
                f"lsh_buckets: {argument} must be an int64 tensor [N] or [rounds, N], got a "
                f"{given.dtype} tensor of shape {tuple(given.shape)}."
            )
        if (given < 0).any():
            raise ValueError(f"lsh_buckets: {argument} must not be negative.")
    if key_bucket.shape != bucket.shape:
        raise ValueError(
            f"lsh_buckets: key_bucket must have the shape of bucket {tuple(bucket.shape)}, got "
            f"{tuple(key_bucket.shape)}."
        )
    check_at_least("lsh_buckets", 1, chunk=chunk)
    num_nodes = bucket.size(-1)
    length = _lengths_of("lsh_buckets", batch, num_nodes, bucket.device)
    _, place, start = _place("lsh_buckets", length)
    graph = torch.repeat_interleave(length)
    found = [bucket.new_empty(2, 0)]
    # Rounds, and in each of them buckets as queries and as keys.
    rounds = torch.stack([bucket, key_bucket], dim=-2)
    for both in rounds.unsqueeze(0) if bucket.dim() == 1 else rounds:
        # Buckets of all graphs, numbered from 0 in the order of graph and bucket.
        numbered = both.unique(return_inverse=True)[1] + 2 * num_nodes * graph
        query, key = numbered.unique(return_inverse=True)[1]
        key, order = key.sort(stable=True)
        first, end = torch.searchsorted(key, query), torch.searchsorted(key, query, right=True)
        if chunk is not None:
            node = start + place
            at = torch.searchsorted(key * num_nodes + order, query * num_nodes + node)
            own = start + (at - start) // chunk * chunk  # where its chunk starts
            first, end = first.maximum(own - chunk), end.minimum(own + chunk)
        src, dst = _ranges(first, (end - first).clamp(min=0))
        src = order[src]
        if causal:
            src, dst = src[src <= dst], dst[src <= dst]
        found.append(torch.stack([src, dst]))
    return found[1] if len(found) == 2 else _unique(torch.cat(found, dim=1))


def virtual_nodes(length: Length, num_virtual: int) -> Tensor:
    """Extra nodes through which all nodes of a graph reach each other: ``2 N num_virtual`` edges.

    They come after all other nodes: number ``v`` of graph ``b`` is node ``N + b * num_virtual + v``
    of ``N + B * num_virtual``. Each attends to all nodes of its graph, and they to it. Join it to
    the graph's own edges with :func:`union`.

    Args:
        length: Number of nodes of the graph, or of each graph.
        num_virtual: Number of extra nodes for each graph.

    Raises:
        TypeError, ValueError: As :func:`complete`; ``num_virtual`` is negative.

    >>> virtual_nodes([2, 1], 1)
    tensor([[3, 3, 4, 0, 1, 2],
            [0, 1, 2, 3, 3, 4]])
    """
    check_at_least("virtual_nodes", 0, num_virtual=num_virtual)
    length = _lengths("virtual_nodes", length)
    graph, num_nodes = torch.repeat_interleave(length), int(length.sum())
    src, dst = _ranges(num_nodes + graph * num_virtual, torch.full_like(graph, num_virtual))
    there = torch.stack([src, dst])
    return torch.cat([there, _by_target(there.flip(0))], dim=1)


# Masks and unions #################################################################################


def from_mask(allowed: Tensor) -> Tensor:
    """The edges of a boolean mask: True in row ``i``, column ``j`` lets query i attend to key j.

    Args:
        allowed: ``[num_dst, num_src]`` bool, or a batch ``[B, num_dst, num_src]``, whose sequences
            come side by side.

    Raises:
        TypeError: ``allowed`` is not a bool tensor of two or three dimensions.

    >>> from_mask(torch.tensor([[True, False], [True, True]]))
    tensor([[0, 0, 1],
            [0, 1, 1]])
    """
    return Graph.from_mask(allowed).edge_index


def to_mask(edge_index: Tensor, num_nodes: int | tuple[int, int]) -> Tensor:
    """The dense mask of some edges, to look at or to compare with.

    Args:
        edge_index: ``[2, E]``. Parallel edges are one True.
        num_nodes: Number of nodes, or ``(num_src, num_dst)``.

    Returns:
        ``[num_dst, num_src]`` bool.

    Raises:
        TypeError, ValueError, IndexError: As :class:`graphattn.Graph`.
    """
    graph = Graph(edge_index, num_nodes)
    allowed = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.bool, device=graph.device)
    allowed[graph.target, graph.src_index] = True
    return allowed


def union(*edge_indices: Tensor) -> Tensor:
    """The edges that are in any of the patterns, each once, sorted.

    Args:
        edge_indices: Each ``[2, E]`` int64, on the same nodes. Also sorts a single one and merges
            its parallel edges.

    Raises:
        TypeError, ValueError: There is none, or one is no int64 tensor ``[2, E]``.

    >>> union(torch.tensor([[1, 0], [1, 0]]), torch.tensor([[1], [0]]))
    tensor([[0, 1, 1],
            [0, 0, 1]])
    """
    if not edge_indices:
        raise ValueError("union: give at least one edge_index.")
    for edge_index in edge_indices:
        if (
            not isinstance(edge_index, Tensor)
            or edge_index.dtype != torch.int64
            or edge_index.dim() != 2
            or edge_index.size(0) != 2
        ):
            raise TypeError("union: every edge_index must be an int64 tensor [2, num_edges].")
    return _unique(torch.cat(edge_indices, dim=1))


# Parts ############################################################################################


def _ranges(first: Tensor, count: Tensor, *, step: int = 1) -> Tensor:
    """Target ``i`` attends to ``first[i] + step * r`` for ``r`` from 0 to ``count[i] - 1``."""
    dst = torch.repeat_interleave(count)
    shift = first - step * (count.cumsum(0) - count)
    return torch.stack([step * torch.arange(dst.numel(), device=dst.device) + shift[dst], dst])


def _place(name: str, length: Length) -> tuple[Tensor, Tensor, Tensor]:
    """Of each node: the size of its sequence, its place there, and where the sequence starts."""
    sizes = _lengths(name, length)
    sequence = torch.repeat_interleave(sizes)
    start = (sizes.cumsum(0) - sizes)[sequence]
    return sizes[sequence], torch.arange(sequence.numel(), device=sizes.device) - start, start


def _before(chosen: Tensor) -> Tensor:
    """How many are chosen before each position, ``[N + 1]``."""
    return torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])


def _by_target(edge_index: Tensor) -> Tensor:
    """Sorted by target, then by source."""
    by_source = edge_index[:, edge_index[0].argsort(stable=True)]
    return by_source[:, by_source[1].argsort(stable=True)]


def _unique(edge_index: Tensor) -> Tensor:
    """Sorted by target, then by source, each once."""
    if edge_index.size(1) == 0:
        return edge_index
    span = int(edge_index[0].max()) + 1
    key = torch.unique(edge_index[1] * span + edge_index[0])
    return torch.stack([key % span, key // span])


def _below(limit: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform integers from 0 to ``limit - 1``, and 0 where the limit is below 1."""
    draw = torch.rand(
        limit.shape, dtype=torch.float64, generator=generator, device=_device_of(generator, limit)
    )
    return (draw.to(limit.device) * limit).long().minimum(limit - 1).clamp(min=0)


def _device_of(generator: torch.Generator | None, like: Tensor) -> torch.device:
    return like.device if generator is None else generator.device


def _lengths(name: str, length: Length) -> Tensor:
    """``[B]`` int64."""
    sizes = length if isinstance(length, Tensor) else torch.as_tensor(length)
    if sizes.numel() == 0 and not isinstance(length, Tensor):
        sizes = sizes.long()  # an empty list has no dtype of its own
    if sizes.dtype not in (torch.int64, torch.int32) or sizes.dim() > 1:
        raise TypeError(
            f"{name}: a length must be an integer, a list of integers or an int64 tensor [B], got "
            + (
                f"a {sizes.dtype} tensor of shape {tuple(sizes.shape)}."
                if isinstance(length, Tensor)
                else f"{length!r}."
            )
        )
    if (sizes < 0).any():
        raise ValueError(f"{name}: a length must not be negative, got {sizes.tolist()}.")
    return sizes.long().reshape(-1)


def _lengths_of(name: str, batch: Tensor | None, num_nodes: int, device: torch.device) -> Tensor:
    """Lengths of the graphs that a ``batch`` vector tells apart."""
    if batch is None:
        return torch.tensor([num_nodes], device=device)
    if batch.dtype != torch.int64 or batch.shape != (num_nodes,) or (batch.diff() < 0).any():
        raise ValueError(
            f"{name}: batch must be a sorted int64 tensor of shape ({num_nodes},), got a "
            f"{batch.dtype} tensor of shape {tuple(batch.shape)}."
        )
    return batch.bincount()


def _images(name: str, height: Length, width: Length) -> tuple[Tensor, Tensor]:
    heights, widths = _lengths(name, height), _lengths(name, width)
    if heights.numel() != widths.numel() and 1 not in (heights.numel(), widths.numel()):
        raise ValueError(
            f"{name}: height and width must have one number for each image, got "
            f"{heights.numel()} and {widths.numel()}."
        )
    heights, widths = torch.broadcast_tensors(heights, widths)
    return heights, widths
