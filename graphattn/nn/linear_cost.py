"""Attention at linear cost: sums over positive features, in blocks of graphs of unequal size."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphattn import patterns

__all__ = ["linear_attention"]

# Nodes in a block at most: what is held for each block is then small beside what each node has.
_BLOCK = 64


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    batch: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    r"""Attention whose weights are products of positive features, at linear cost.

    .. math:: O_i = \frac{\sum_j \langle \phi(q_i), \phi(k_j) \rangle \, v_j}
        {\sum_j \langle \phi(q_i), \phi(k_j) \rangle}
        = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)}

    for each head, over the nodes :math:`j` of the graph of :math:`i`, with ``causal`` only over
    :math:`j \le i`. The sums on the right are made once for each graph, or block by block along it,
    so that no pair of nodes costs anything beyond a block of 64. With ``causal`` it is a
    recurrence: token by token, the sums grow by one term, and are all that must be remembered.
    Source: "Transformers are RNNs" (https://arxiv.org/abs/2006.16236).

    Sums are taken in float32 at least. A query whose features meet no key's gets zero.

    Args:
        query_features: :math:`\phi(q)`, ``[N, H, M]``, not negative.
        key_features: :math:`\phi(k)`, ``[N, H, M]``, not negative.
        value: ``[N, H, Dv]``.
        batch: Sorted graph of each node, ``[N]`` int64; default one graph.
        causal: Leave out what comes after in the sequence.

    Returns:
        ``[N, H, Dv]`` in the query's dtype.

    Raises:
        TypeError: A dtype is not floating point.
        ValueError: Shapes do not fit together, or ``batch`` is not a sorted ``[N]``.

    With features that are all one, attention is the mean of the graph, or of what came before:

    >>> ones, value = torch.ones(5, 1, 2), torch.tensor([1.0, 2.0, 6.0, 0.0, 8.0]).view(5, 1, 1)
    >>> batch = torch.tensor([0, 0, 0, 1, 1])
    >>> linear_attention(ones, ones, value, batch=batch).flatten()
    tensor([3., 3., 3., 4., 4.])
    >>> linear_attention(ones, ones, value, batch=batch, causal=True).flatten()
    tensor([1.0000, 1.5000, 3.0000, 0.0000, 4.0000])
    """
    name = "linear_attention"
    tensors = {"query_features": query_features, "key_features": key_features, "value": value}
    for argument, x in tensors.items():
        if not x.is_floating_point():
            raise TypeError(f"{name}: {argument} must be floating point, got {x.dtype}.")
        if x.dim() != 3 or x.shape[:2] != query_features.shape[:2]:
            raise ValueError(
                f"{name}: {argument} must have shape (num_nodes, heads, channels) with as many "
                f"nodes and heads as query_features {tuple(query_features.shape)}, got "
                f"{tuple(x.shape)}."
            )
    if key_features.shape != query_features.shape:
        raise ValueError(
            f"{name}: query_features and key_features must have the same shape, got "
            f"{tuple(query_features.shape)} and {tuple(key_features.shape)}."
        )
    blocks = Blocks(lengths_of(name, query_features, batch), query_features.size(0))
    with without_autocast(value):
        query, key, values = (wide(x).transpose(0, 1) for x in tensors.values())
        query, key, values = (blocks.pad(x) for x in (query, key, with_ones(values)))
        sums = key.mT @ values
        if causal:
            before, _ = blocks.sum_before(sums, sums.new_zeros(sums.shape[:-1]))
            out = query @ before + (query @ key.mT).tril() @ values
        else:
            out = query @ blocks.sum_of_graph(sums)
        return ratio(blocks.unpad(out)).transpose(0, 1).to(query_features.dtype)


# Random features ##################################################################################


def favor(log_query: Tensor, log_key: Tensor, values: Tensor, blocks: Blocks) -> Tensor:
    """Attention with features given by their logarithms ``[H, N, M]``; values end with a one."""
    log_key = blocks.pad(log_key, -math.inf)
    top = blocks.max_of_graph(log_key.detach().amax(dim=2))
    key = (log_key - top.unsqueeze(2)).exp_()
    total = blocks.sum_of_graph(key.mT @ blocks.pad(values))
    out, _ = read(blocks.pad(log_query), top, total)
    return ratio(blocks.unpad(out))


def favor_causal(log_query: Tensor, log_key: Tensor, values: Tensor, blocks: Blocks) -> Tensor:
    """The same, with nothing that comes after, not even in what features are relative to.

    A query meets its own key, in each pair of neighbours the second meets the key of the first,
    then in pairs of two, of four and so on, up to the halves of a block, and then all blocks
    before. Keys that are met together come before all the queries that meet them.
    """
    query, key = blocks.pad(log_query), blocks.pad(log_key, -math.inf)
    values = blocks.pad(values)
    own = query + key
    top = _largest(own, dim=-1)
    out = (own - top).exp_().sum(-1, keepdim=True) * values
    half = 1
    while half < blocks.size:
        halves = [x.unflatten(2, (-1, 2, half)).unbind(3) for x in (query, key, values, out, top)]
        (_, right), (left, _), (left_values, _), (before, after), (before_top, after_top) = halves
        limit = _largest(left, dim=-2)
        found = read(right, limit.squeeze(-2), (left - limit).exp_(), left_values)
        after, after_top = _join((after, after_top), found)
        out = torch.stack([before, after], dim=3).flatten(2, 4)
        top = torch.stack([before_top, after_top], dim=3).flatten(2, 4)
        half *= 2
    limit = _largest(key, dim=2)
    sums, limit = blocks.sum_before((key - limit).exp_().mT @ values, limit.squeeze(2))
    out, _ = _join((out, top), read(query, limit, sums))
    return ratio(blocks.unpad(out))


def read(
    log_query: Tensor, top: Tensor, features: Tensor, values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What queries find in sums that are relative to ``top``, and the log of what that lacks.

    ``[*, n, M], [*, M], [*, M, C] -> [*, n, C], [*, n, 1]``; or the sums are those of few keys
    ``[*, n', M]`` with their values ``[*, n', C]``. The divisor, the last of C, is at least 1: the
    feature with the largest product of query and top has weight 1, and a key of 1.
    """
    shifted = log_query + top.unsqueeze(-2)
    largest = _largest(shifted, dim=-1)
    query = (shifted - largest).exp_()
    return query @ features if values is None else (query @ features.mT) @ values, largest


def _largest(x: Tensor, dim: int) -> Tensor:
    """What logarithms are taken relative to; it cancels. Not ``-inf``, where there is no key."""
    return x.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).min)


def _join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of two results of :func:`read`."""
    top = torch.maximum(one[1], other[1])
    return one[0] * (one[1] - top).exp() + other[0] * (other[1] - top).exp(), top


def with_ones(value: Tensor) -> Tensor:
    """The values and a one, whose sum is the divisor."""
    return F.pad(value, (0, 1), value=1.0)


def ratio(summed: Tensor) -> Tensor:
    """Values over their divisor, the last channel; zero where that is zero."""
    divisor = summed[..., -1:]
    return summed[..., :-1] / divisor.where(divisor != 0, 1.0)


# Graphs of unequal size ###########################################################################


class Blocks:
    """The nodes of each graph in blocks of at most 64, none of which is of two graphs.

    A block is as large as a graph is on average, rounded up to a power of two: there are never much
    more than three rows for each node, however unequal graphs are. Padding is zeros.

    Attributes:
        size: Rows of a block.
        graph: Of each block.
        position: Of each node in its graph.
    """

    def __init__(self, lengths: Tensor, num_nodes: int) -> None:
        mean = -(-num_nodes // max(1, lengths.numel()))
        self.size = min(_BLOCK, 1 << max(0, mean - 1).bit_length())
        count = (lengths + self.size - 1) // self.size
        self._num_graphs = lengths.numel()
        self.graph = torch.repeat_interleave(count)
        first = count.cumsum(0) - count
        self._rank = torch.arange(self.graph.numel(), device=lengths.device) - first[self.graph]
        self.position = patterns.position(lengths)
        self._row = first[torch.repeat_interleave(lengths)] * self.size + self.position

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[H, N, C] -> [H, blocks, size, C]``."""
        blocks = self.graph.numel()
        rows = x.new_full((x.size(0), blocks * self.size, x.size(2)), fill)
        return rows.index_copy(1, self._row, x).unflatten(1, (blocks, self.size))

    def unpad(self, x: Tensor) -> Tensor:
        """``[H, blocks, size, C] -> [H, N, C]``."""
        return x.flatten(1, 2).index_select(1, self._row)

    def sum_of_graph(self, sums: Tensor) -> Tensor:
        """For each block, the sum over all blocks of its graph, ``[H, blocks, M, C]``."""
        total = sums.new_zeros(sums.size(0), self._num_graphs, *sums.shape[2:])
        return total.index_add(1, self.graph, sums).index_select(1, self.graph)

    def max_of_graph(self, top: Tensor) -> Tensor:
        """The same for the largest, ``[H, blocks, M]``."""
        largest = top.new_full((top.size(0), self._num_graphs, top.size(2)), -math.inf)
        index = self.graph[:, None].expand_as(top)
        return largest.scatter_reduce(1, index, top, "amax").index_select(1, self.graph)

    def sum_before(self, sums: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """For each block, the sum over the blocks before it in its graph, and the largest ``top``.

        Args:
            sums: ``[H, blocks, M, C]``, relative to ``exp(top)``.
            top: ``[H, blocks, M]``.

        Returns:
            The sums relative to the exponentials of the second, which is ``-inf`` for a first
            block.
        """
        # The first block of each graph, then the second of those that have one, and so on.
        order = self._rank.argsort(stable=True)
        sizes = self._rank.bincount().tolist() or [0]
        blocks = order.split(sizes)
        own_sums = sums.index_select(1, order).split(sizes, dim=1)
        own_tops = top.index_select(1, order).split(sizes, dim=1)
        all_before = [torch.zeros_like(own_sums[0])]
        all_limits = [torch.full_like(own_tops[0], -math.inf)]
        for last, now in pairwise(range(len(sizes))):
            limit = all_limits[last].maximum(own_tops[last])
            after = all_before[last] * (all_limits[last] - limit).exp().unsqueeze(-1)
            after = after + own_sums[last] * (own_tops[last] - limit).exp().unsqueeze(-1)
            # The blocks of a graph are numbered in a row.
            row = torch.searchsorted(blocks[last], blocks[now] - 1)
            all_before.append(after.index_select(1, row))
            all_limits.append(limit.index_select(1, row))
        back = order.argsort()
        return (
            torch.cat(all_before, dim=1).index_select(1, back),
            torch.cat(all_limits, dim=1).index_select(1, back),
        )


# Arguments ########################################################################################


def lengths_of(name: str, x: Tensor, batch: Tensor | None) -> Tensor:
    """The number of nodes of each graph, ``[B]`` int64."""
    num_nodes = x.size(0)
    if batch is None:
        return torch.tensor([num_nodes], device=x.device)
    if batch.dtype != torch.int64 or batch.shape != (num_nodes,) or batch.device != x.device:
        raise ValueError(
            f"{name}: batch must be an int64 tensor of shape ({num_nodes},) on {x.device}, the "
            f"graph of each node, got a {batch.dtype} tensor of shape {tuple(batch.shape)} on "
            f"{batch.device}."
        )
    if num_nodes > 0 and (batch[0] < 0 or (batch.diff() < 0).any()):
        raise ValueError(
            f"{name}: batch must be sorted and not negative, as PyG makes it. Use batch, order = "
            "batch.sort(stable=True) and x[order]."
        )
    return batch.bincount()


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Where tensors keep the dtype that they were given."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
