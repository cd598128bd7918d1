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

__all__ = ["attention", "attention_weights", "edge_softmax"]


class EdgeOperations(Protocol):
    """What a backend provides."""

    num_dst: int

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

    def empty(self) -> Tensor:
        """The targets without in-edges, ``[N_dst]`` bool."""


def attention(
    edges: EdgeOperations,
    edge_id: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    seed: Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> Tensor:
    """Output ``[*, N_dst, H, Dv]``; arguments as in :func:`graphattn.graph_attention`."""
    leading, heads = query.shape[:-3], query.size(-2)
    compute = torch.promote_types(query.dtype, torch.float32)
    weight = _weights(edges, edge_id, query, key, bias, edge_attr, edge_weight, scale)  # [E, P, G]
    if seed is not None:
        by_head = weight.view(weight.size(0), leading.numel(), heads)
        weight = drop(by_head, seed, edge_id, dropout).view(weight.shape)

    out = _by_head(edges.sum(weight, _source_layout(value.to(compute))), heads)  # [N_dst, B, H, Dv]
    if edge_attr is not None and edge_weight is not None:
        # sum_e a_e (W e) = W (sum_e a_e e): what is summed over edges is edge_dim wide, not H * Dv.
        mixed = edges.sum_edge(weight, _by_target(edge_attr.to(compute), edge_id))
        out = out + torch.einsum("nbhc,hdc->nbhd", _by_head(mixed, heads), edge_weight.to(compute))
        out = out.masked_fill(_empty_rows(edges), 0.0)
    return out.movedim(1, 0).reshape(*leading, edges.num_dst, heads, value.size(-1)).to(query.dtype)


def attention_weights(
    edges: EdgeOperations,
    edge_id: Tensor | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """Weights ``[*, E, H]`` in the caller's edge order."""
    leading, heads = query.shape[:-3], query.size(-2)
    weight = _weights(edges, edge_id, query, key, bias, edge_attr, edge_weight, scale)
    num_edges = weight.size(0)
    by_batch = _by_caller(weight, edge_id).view(num_edges, leading.numel(), heads).movedim(1, 0)
    return by_batch.reshape(*leading, num_edges, heads).to(query.dtype)


def edge_softmax(edges: EdgeOperations, edge_id: Tensor | None, scores: Tensor) -> Tensor:
    """Softmax of ``scores`` ``[E, *]`` over each target's in-edges, in the caller's edge order."""
    compute = torch.promote_types(scores.dtype, torch.float32)
    columns = scores.to(compute).reshape(scores.size(0), scores.shape[1:].numel())
    weight = edges.softmax(_by_target(columns, edge_id))
    return _by_caller(weight, edge_id).view(scores.shape).to(scores.dtype)


def _weights(
    edges: EdgeOperations,
    edge_id: Tensor | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    scale: float,
) -> Tensor:
    heads = query.size(-2)
    compute = torch.promote_types(query.dtype, torch.float32)
    q = _target_layout(query.to(compute), key.size(-2))
    score = edges.dot(q, _source_layout(key.to(compute)))  # [E, P, G]
    if edge_attr is not None and edge_weight is not None:
        # <q, W e> = <W^T q, e>: one [H, edge_dim] query for each node instead of one [H, D] key an
        # edge.
        rows_q = _by_head(q, heads).masked_fill(_empty_rows(edges), 0.0)
        turned = torch.einsum("nbhd,hdc->nbhc", rows_q, edge_weight.to(compute))
        turned = turned.reshape(*q.shape[:-1], edge_attr.size(-1))
        score = score + edges.dot_edge(turned, _by_target(edge_attr.to(compute), edge_id))
    score = score * scale
    if bias is not None:
        rows = bias.to(compute).unsqueeze(0).flatten(0, -3).movedim(0, 1)  # [E, B or 1, H]
        by_head = score.view(score.size(0), query.shape[:-3].numel(), heads)
        score = (by_head + _by_target(rows, edge_id)).view(score.shape)
    return edges.softmax(score.flatten(1)).view(score.shape)


def _empty_rows(edges: EdgeOperations) -> Tensor:
    """Targets without in-edges, ``[N_dst, 1, 1, 1]`` bool.

    The gradient of ``edge_weight`` is a sum over all targets. These take no part: unless they are
    set to zero, a NaN of theirs in query or gradient would reach it.
    """
    return edges.empty()[:, None, None, None]


def _target_layout(x: Tensor, key_heads: int) -> Tensor:
    """``[*, N, H, D] -> [N, P, G, D]``."""
    rows = x.unsqueeze(0).flatten(0, -4).movedim(1, 0)  # [N, B, H, D]
    n, batch, heads, dim = rows.shape
    return rows.reshape(n, batch * key_heads, heads // key_heads, dim)


def _source_layout(x: Tensor) -> Tensor:
    """``[*, N, Hk, D] -> [N, P, D]``."""
    return x.unsqueeze(0).flatten(0, -4).movedim(1, 0).flatten(1, 2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[N, P, G, D] -> [N, B, H, D]``."""
    return x.reshape(x.size(0), x.size(1) * x.size(2) // heads, heads, x.size(-1))


def _by_target(by_caller: Tensor, edge_id: Tensor | None) -> Tensor:
    return by_caller if edge_id is None else by_caller.index_select(0, edge_id)


def _by_caller(by_target: Tensor, edge_id: Tensor | None) -> Tensor:
    if edge_id is None:
        return by_target
    return torch.empty_like(by_target).index_copy(0, edge_id, by_target)
