"""The formula of attention in terms of edge operations, shared by ``eager`` and ``scatter``.

Layout inside: ``P`` stands for leading dimensions times key heads, ``G`` for the query heads that
share a key head. Features of targets are ``[N_dst, P, G, D]``, of sources ``[N_src, P, D]``; edges
are in by-target order and carry ``[E, P, G]`` numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graphattn.dropout import drop

__all__ = ["add_mixed", "attention", "project_query"]


class EdgeOperations(Protocol):
    """What a backend provides."""

    def dot(self, q: Tensor, k: Tensor) -> Tensor:
        """Dot product at each edge, ``[N_dst, P, G, D], [N_src, P, D] -> [E, P, G]``."""

    def sum(self, w: Tensor, v: Tensor) -> Tensor:
        """Weighted sum at each target, ``[E, P, G], [N_src, P, D] -> [N_dst, P, G, D]``."""

    def dot_edge(self, q: Tensor, rows: Tensor) -> Tensor:
        """Dot product with edge features, ``[N_dst, P, G, C], [E, C] -> [E, P, G]``."""

    def sum_edge(self, w: Tensor, rows: Tensor) -> Tensor:
        """Weighted sum of edge features, ``[E, P, G], [E, C] -> [N_dst, P, G, C]``."""

    def softmax(self, score: Tensor) -> Tensor:
        """Softmax of each column over each target's in-edges, ``[E, K] -> [E, K]``."""


def attention(
    edges: EdgeOperations,
    edge_id: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    seed: Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Weighted sums of values ``[*, N_dst, H, Dv]`` and edge features ``[*, N_dst, H, C]``.

    Both in float32 at least. Without ``value``, the first is the weights ``[*, E, H]`` in the
    caller's edge order.

    Args:
        edges: The edges, by target.
        edge_id: As in :class:`graphattn.Graph`.
        query: As in :func:`graphattn.graph_attention`, as are the next three.
        key: ``[*, N_src, Hk, D]``.
        value: ``[*, N_src, Hk, Dv]``.
        bias: ``[E, H]`` or ``[*, E, H]``.
        query_edge: ``[*, N_dst, H, C]``, what :func:`project_query` makes for ``edge_attr``.
        edge_attr: ``[E, C]``.
        seed: Of the dropout, ``None`` for none.
        scale: Factor on the scores.
        dropout: Probability of dropping a weight.
    """
    leading, heads = query.shape[:-3], query.size(-2)
    wide = torch.promote_types(query.dtype, torch.float32)
    q = _target_layout(query.to(wide), key.size(-2))
    score = edges.dot(q, _source_layout(key.to(wide)))  # [E, P, G]
    rows = None if edge_attr is None else _by_target(edge_attr.to(wide), edge_id)
    if query_edge is not None and rows is not None:
        score = score + edges.dot_edge(_target_layout(query_edge, key.size(-2)), rows)
    score = score * scale
    if bias is not None:
        by_batch = bias.to(wide).unsqueeze(0).flatten(0, -3).movedim(0, 1)  # [E, B or 1, H]
        by_head = score.view(score.size(0), leading.numel(), heads)
        score = (by_head + _by_target(by_batch, edge_id)).view(score.shape)
    weight = edges.softmax(score.flatten(1)).view(score.shape)
    if value is None:
        by_batch = _by_caller(weight, edge_id).view(weight.size(0), leading.numel(), heads)
        return by_batch.movedim(1, 0).reshape(*leading, weight.size(0), heads), None
    if seed is not None:
        by_head = weight.view(weight.size(0), leading.numel(), heads)
        weight = drop(by_head, seed, edge_id, dropout).view(weight.shape)
    out = _by_batch(edges.sum(weight, _source_layout(value.to(wide))), leading, heads)
    if rows is None:
        return out, None
    return out, _by_batch(edges.sum_edge(weight, rows), leading, heads)


def project_query(query: Tensor, edge_weight: Tensor, empty: Tensor) -> Tensor:
    """``[*, N_dst, H, C]``, what each target multiplies its edge features with.

    ``<q, W e> = <W^T q, e>``: one ``[H, C]`` query for each target instead of one ``[H, D]`` key
    for each edge. Targets without in-edges, ``empty`` ``[N_dst]``, take no part: the gradient of
    ``edge_weight`` is a sum over all targets, and a NaN of theirs would reach it.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(wide).masked_fill(empty[:, None, None], 0.0)
    return torch.einsum("...nhd,hdc->...nhc", rows, edge_weight.to(wide))


def add_mixed(out: Tensor, mixed: Tensor, edge_weight: Tensor, empty: Tensor) -> Tensor:
    """``out`` plus the values of edge features, in float32 at least.

    ``sum_e a_e (W e) = W (sum_e a_e e)``: what is summed over edges is C wide, not ``H * Dv``.
    """
    values = torch.einsum("...nhc,hdc->...nhd", mixed, edge_weight.to(mixed.dtype))
    return (out.to(mixed.dtype) + values).masked_fill(empty[:, None, None], 0.0)


def _target_layout(x: Tensor, key_heads: int) -> Tensor:
    """``[*, N, H, D] -> [N, P, G, D]``."""
    rows = x.unsqueeze(0).flatten(0, -4).movedim(1, 0)  # [N, B, H, D]
    n, batch, heads, dim = rows.shape
    return rows.reshape(n, batch * key_heads, heads // key_heads, dim)


def _source_layout(x: Tensor) -> Tensor:
    """``[*, N, Hk, D] -> [N, P, D]``."""
    return x.unsqueeze(0).flatten(0, -4).movedim(1, 0).flatten(1, 2)


def _by_batch(x: Tensor, leading: torch.Size, heads: int) -> Tensor:
    """``[N, P, G, D] -> [*, N, H, D]``."""
    by_head = x.reshape(x.size(0), leading.numel(), heads, x.size(-1))
    return by_head.movedim(1, 0).reshape(*leading, x.size(0), heads, x.size(-1))


def _by_target(by_caller: Tensor, edge_id: Tensor | None) -> Tensor:
    return by_caller if edge_id is None else by_caller.index_select(0, edge_id)


def _by_caller(by_target: Tensor, edge_id: Tensor | None) -> Tensor:
    if edge_id is None:
        return by_target
    return torch.empty_like(by_target).index_copy(0, edge_id, by_target)
