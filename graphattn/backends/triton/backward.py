"""The kernels of the backward pass: gradients at targets, then those at sources and along edges.

An edge of weight ``a``, on which the loss has gradient ``g``, passes ``a (g - delta)`` on to its
score, where ``delta = sum a g`` over the edges of its target. The pass over targets reads each edge
once. It sums ``a g``, ``a g k`` and ``a k``, from which come delta, for the pass over sources, and
the gradient of the query: ``sum a g k - delta sum a k``. No rounded output takes part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphattn.backends.triton.edges import (
    SIZES,
    Heads,
    Order,
    all_heads_of,
    edge_tile,
    edges_at,
    edges_of,
    kept,
    node_tile,
    number_tile,
    one_head,
    part_tile,
    pieces_at,
    row_tile,
    rows_to_merge,
    score,
    store_numbers,
    store_row,
    unit_of,
    zeros,
)

__all__ = ["merge_sources", "merge_targets", "visit_sources", "visit_targets"]


@triton.jit
def weight_gradient(grad_weights, g, v, g_mixed, x, batch, edge, heads, valid):
    """``g`` of each edge and head, before dropout, ``[block, heads]``."""
    gradient = tl.zeros([valid.shape[0], heads.query.shape[0]], tl.float32)
    if grad_weights is not None:
        gradient += number_tile(grad_weights, batch, edge, heads, valid)
    if v is not None:
        gradient += tl.sum(g * v, axis=2)
    if g_mixed is not None:
        gradient += tl.sum(g_mixed * x, axis=2)
    return gradient


@triton.jit
def finish_target(
    delta_rows,
    grad_query,
    grad_query_edge,
    batch,
    row,
    heads,
    scale,
    delta,
    keys,
    features,
    weighted_keys,
    weighted_features,
    plan: tl.constexpr,
):
    """Stores delta and the gradients of one target from what it summed up."""
    one = tl.arange(0, 1)
    store_numbers(delta_rows, batch, row + one, heads, one == 0, delta[None, :])
    if grad_query is not None:
        gradient = (keys - delta[:, None] * weighted_keys) * scale
        store_row(grad_query, batch, row, heads, gradient, plan.head_dim)
    if grad_query_edge is not None:
        gradient = (features - delta[:, None] * weighted_features) * scale
        store_row(grad_query_edge, batch, row, heads, gradient, plan.edge_dim)


@triton.jit(do_not_specialize=SIZES)
def visit_targets(
    query,
    key,
    value,
    bias,
    query_edge,
    edge_attr,
    ptr,
    other,
    num_rows,
    num_edges,
    slots,
    units,
    edge_id,
    dropout,
    scale,
    largest_rows,
    inverse_rows,
    grad_out,
    grad_mixed,
    grad_weights,
    delta_rows,
    grad_query,
    grad_query_edge,
    part_delta,
    part_keys,
    part_weighted_keys,
    part_features,
    part_weighted_features,
    TILES: tl.constexpr,
    plan: tl.constexpr,
):
    """Results of all targets but those that are cut, and of these the parts."""
    order = Order(ptr, other, num_rows, num_edges, slots, units)
    unit = unit_of(order, TILES, plan)
    batch, tile = unit.batch, unit.tile
    heads = all_heads_of(tile, plan)
    for row in range(unit.first, unit.last):
        begin, end, own = edges_of(row, unit, order, plan)
        if own:
            one = tl.arange(0, 1)
            # [1, heads, channels], and [1, heads]
            q = row_tile(query, batch, row, tile, plan.head_dim, plan, False)
            q_edge = row_tile(query_edge, batch, row, tile, plan.edge_dim, plan, False)
            g = row_tile(grad_out, batch, row, tile, plan.value_dim, plan, False)
            g_mixed = None
            if grad_mixed is not None:
                g_mixed = row_tile(grad_mixed, batch, row, tile, plan.edge_dim, plan, False)
            largest = number_tile(largest_rows, batch, row + one, heads, one == 0)
            inverse = number_tile(inverse_rows, batch, row + one, heads, one == 0)
            delta = tl.zeros(heads.query.shape, tl.float32)
            keys = zeros(heads, plan.head_dim)
            features = zeros(heads, plan.edge_dim)
            weighted_keys = zeros(heads, plan.head_dim)
            weighted_features = zeros(heads, plan.edge_dim)
            for block in range(begin, end, plan.block):
                source, edge, valid = edges_at(block, end, order, edge_id, plan)
                # [block, heads, channels]
                k = node_tile(key, batch, source, tile, valid, plan.head_dim, plan, True)
                v = node_tile(value, batch, source, tile, valid, plan.value_dim, plan, True)
                x = edge_tile(edge_attr, edge, valid, plan.edge_dim)
                # [block, heads]
                scores = score(q, k, q_edge, x, bias, batch, edge, heads, valid, scale)
                weight = tl.exp(scores - largest) * inverse
                gradient = weight_gradient(
                    grad_weights, g, v, g_mixed, x, batch, edge, heads, valid
                )
                if dropout is not None:
                    keep = kept(dropout, batch, edge, heads)
                    gradient = tl.where(keep, gradient * dropout.factor, 0.0)
                gradient *= weight
                delta += tl.sum(gradient, axis=0)
                if grad_query is not None:
                    keys += tl.sum(gradient[:, :, None] * k, axis=0)
                    weighted_keys += tl.sum(weight[:, :, None] * k, axis=0)
                if grad_query_edge is not None:
                    features += tl.sum(gradient[:, :, None] * x, axis=0)
                    weighted_features += tl.sum(weight[:, :, None] * x, axis=0)
            if unit.is_piece:
                slot = unit.slot
                store_numbers(part_delta, batch, slot + one, heads, one == 0, delta[None, :])
                if grad_query is not None:
                    store_row(part_keys, batch, slot, heads, keys, plan.head_dim)
                    store_row(part_weighted_keys, batch, slot, heads, weighted_keys, plan.head_dim)
                if grad_query_edge is not None:
                    store_row(part_features, batch, slot, heads, features, plan.edge_dim)
                    store_row(
                        part_weighted_features,
                        batch,
                        slot,
                        heads,
                        weighted_features,
                        plan.edge_dim,
                    )
            else:
                finish_target(
                    delta_rows,
                    grad_query,
                    grad_query_edge,
                    batch,
                    row,
                    heads,
                    scale,
                    delta,
                    keys,
                    features,
                    weighted_keys,
                    weighted_features,
                    plan,
                )


@triton.jit
def sum_of_parts(rows, batch, begin, end, head, DIM: tl.constexpr, plan: tl.constexpr):
    """``[1, channels]``: the sum over the pieces of a row that was cut."""
    MERGED: tl.constexpr = plan.merged
    sums = tl.zeros([MERGED, 1], tl.float32) + zeros(one_head(head), DIM)
    if rows is not None:
        for piece in range(0, tl.cdiv(end - begin, plan.chunk), MERGED):
            slot, valid = pieces_at(piece, begin, end, plan)
            sums += part_tile(rows, batch, slot, head, valid, DIM)
    return tl.sum(sums, axis=0)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def merge_targets(
    ptr,
    num_rows,
    scale,
    delta_rows,
    grad_query,
    grad_query_edge,
    part_delta,
    part_keys,
    part_weighted_keys,
    part_features,
    part_weighted_features,
    HEADS: tl.constexpr,
    plan: tl.constexpr,
):
    """Results of targets that were cut, from their parts."""
    batch, head, first, last = rows_to_merge(ptr, num_rows, HEADS, plan)
    heads = one_head(head)
    for row in range(first, last):
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
        if end - begin > plan.chunk:
            finish_target(
                delta_rows,
                grad_query,
                grad_query_edge,
                batch,
                row,
                heads,
                scale,
                tl.sum(sum_of_parts(part_delta, batch, begin, end, head, 1, plan), axis=1),
                sum_of_parts(part_keys, batch, begin, end, head, plan.head_dim, plan),
                sum_of_parts(part_features, batch, begin, end, head, plan.edge_dim, plan),
                sum_of_parts(part_weighted_keys, batch, begin, end, head, plan.head_dim, plan),
                sum_of_parts(part_weighted_features, batch, begin, end, head, plan.edge_dim, plan),
                plan,
            )


@triton.jit
def store_keys(rows, batch, row, unit, values, DIM: tl.constexpr, plan: tl.constexpr):
    """Stores ``[keys * shared, channels]``, added up over the query heads of each key head."""
    if DIM > 0:
        if plan.shared > 1:
            by_key = tl.reshape(values, [plan.keys, plan.shared, values.shape[1]])
            values = tl.sum(by_key, axis=1)
        key = unit.tile * plan.keys + tl.arange(0, plan.keys)
        store_row(rows, batch, row, Heads(key, key, key < plan.key_heads), values, DIM)


@triton.jit(do_not_specialize=SIZES)
def visit_sources(
    query,
    key,
    value,
    bias,
    query_edge,
    edge_attr,
    ptr,
    other,
    num_rows,
    num_edges,
    slots,
    units,
    edge_id,
    dropout,
    scale,
    largest_rows,
    inverse_rows,
    grad_out,
    grad_mixed,
    grad_weights,
    delta_rows,
    grad_key,
    grad_value,
    grad_bias,
    grad_edge_attr,
    part_key,
    part_value,
    TILES: tl.constexpr,
    plan: tl.constexpr,
):
    """Gradients of all sources but those that are cut, of these the parts; those along edges."""
    order = Order(ptr, other, num_rows, num_edges, slots, units)
    unit = unit_of(order, TILES, plan)
    batch = unit.batch
    for row in range(unit.first, unit.last):
        begin, end, own = edges_of(row, unit, order, plan)
        if own:
            key_gradient = zeros(all_heads_of(0, plan), plan.head_dim)
            value_gradient = zeros(all_heads_of(0, plan), plan.value_dim)
            for part in range(plan.parts):
                tile = unit.tile * plan.parts + part
                heads = all_heads_of(tile, plan)
                # [1, heads, channels]
                k = row_tile(key, batch, row, tile, plan.head_dim, plan, True)
                v = row_tile(value, batch, row, tile, plan.value_dim, plan, True)
                for block in range(begin, end, plan.block):
                    target, edge, valid = edges_at(block, end, order, edge_id, plan)
                    # [block, heads, channels]
                    q = node_tile(query, batch, target, tile, valid, plan.head_dim, plan, False)
                    g = node_tile(grad_out, batch, target, tile, valid, plan.value_dim, plan, False)
                    q_edge = node_tile(
                        query_edge, batch, target, tile, valid, plan.edge_dim, plan, False
                    )
                    g_mixed = None
                    if grad_mixed is not None:
                        g_mixed = node_tile(
                            grad_mixed, batch, target, tile, valid, plan.edge_dim, plan, False
                        )
                    x = edge_tile(edge_attr, edge, valid, plan.edge_dim)
                    # [block, heads]
                    largest = number_tile(largest_rows, batch, target, heads, valid)
                    inverse = number_tile(inverse_rows, batch, target, heads, valid)
                    delta = number_tile(delta_rows, batch, target, heads, valid)
                    scores = score(q, k, q_edge, x, bias, batch, edge, heads, valid, scale)
                    weight = tl.exp(scores - largest) * inverse
                    gradient = weight_gradient(
                        grad_weights, g, v, g_mixed, x, batch, edge, heads, valid
                    )
                    kept_weight = weight
                    if dropout is not None:
                        keep = kept(dropout, batch, edge, heads)
                        gradient = tl.where(keep, gradient * dropout.factor, 0.0)
                        kept_weight = tl.where(keep, weight * dropout.factor, 0.0)
                    of_score = weight * (gradient - delta)
                    if grad_key is not None:
                        key_gradient += tl.sum(of_score[:, :, None] * q, axis=0)
                    if grad_value is not None:
                        value_gradient += tl.sum(kept_weight[:, :, None] * g, axis=0)
                    if grad_bias is not None:
                        store_numbers(grad_bias, batch, edge, heads, valid, of_score)
                    if grad_edge_attr is not None:
                        of_edge = tl.sum((of_score * scale)[:, :, None] * q_edge, axis=1)
                        if g_mixed is not None:
                            of_edge += tl.sum(kept_weight[:, :, None] * g_mixed, axis=1)
                        channel = tl.arange(0, of_edge.shape[1])
                        of_tile = batch * TILES * plan.parts + tile
                        at = of_tile * grad_edge_attr.batch_stride + edge * plan.edge_dim
                        tl.store(
                            grad_edge_attr.data + at[:, None] + channel[None, :],
                            of_edge,
                            mask=valid[:, None] & (channel < plan.edge_dim)[None, :],
                        )
            key_gradient *= scale
            if grad_key is not None:
                if unit.is_piece:
                    store_keys(part_key, batch, unit.slot, unit, key_gradient, plan.head_dim, plan)
                else:
                    store_keys(grad_key, batch, row, unit, key_gradient, plan.head_dim, plan)
            if grad_value is not None:
                if unit.is_piece:
                    store_keys(
                        part_value, batch, unit.slot, unit, value_gradient, plan.value_dim, plan
                    )
                else:
                    store_keys(grad_value, batch, row, unit, value_gradient, plan.value_dim, plan)


@triton.jit(do_not_specialize=["num_rows"])
def merge_sources(
    ptr,
    num_rows,
    grad_key,
    grad_value,
    part_key,
    part_value,
    HEADS: tl.constexpr,
    plan: tl.constexpr,
):
    """Gradients of sources that were cut, from their parts."""
    batch, head, first, last = rows_to_merge(ptr, num_rows, HEADS, plan)
    heads = one_head(head)
    for row in range(first, last):
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
        if end - begin > plan.chunk:
            if grad_key is not None:
                gradient = sum_of_parts(part_key, batch, begin, end, head, plan.head_dim, plan)
                store_row(grad_key, batch, row, heads, gradient, plan.head_dim)
            if grad_value is not None:
                gradient = sum_of_parts(part_value, batch, begin, end, head, plan.value_dim, plan)
                store_row(grad_value, batch, row, heads, gradient, plan.value_dim)
