"""The kernels of the forward pass: what each target sums up, and the weights by themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from graphattn.backends.triton.edges import (
    LOWEST,
    SIZES,
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

__all__ = ["attend", "merge", "weigh"]


@triton.jit
def finish(
    results, batch, row, heads, largest, total, values, features, dropout, plan: tl.constexpr
):
    """Stores the results of one target, :class:`Attended`, from what it summed up."""
    one = tl.arange(0, 1)
    finite = tl.where(largest == LOWEST, 0.0, largest)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    store_numbers(results.largest, batch, row + one, heads, one == 0, finite[None, :])
    store_numbers(results.total, batch, row + one, heads, one == 0, inverse[None, :])
    if dropout is not None:
        inverse *= dropout.factor
    store_row(results.value, batch, row, heads, values * inverse[:, None], plan.value_dim)
    store_row(results.feature, batch, row, heads, features * inverse[:, None], plan.edge_dim)


@triton.jit(do_not_specialize=SIZES)
def attend(
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
    results,
    parts,
    TILES: tl.constexpr,
    plan: tl.constexpr,
):
    """Results of all targets but those that are cut, and of these the parts, both Attended."""
    order = Order(ptr, other, num_rows, num_edges, slots, units)
    unit = unit_of(order, TILES, plan)
    batch, tile = unit.batch, unit.tile
    heads = all_heads_of(tile, plan)
    for row in range(unit.first, unit.last):
        begin, end, own = edges_of(row, unit, order, plan)
        if own:
            # [1, heads, channels]
            q = row_tile(query, batch, row, tile, plan.head_dim, plan, False)
            q_edge = row_tile(query_edge, batch, row, tile, plan.edge_dim, plan, False)
            largest = tl.full(heads.query.shape, LOWEST, tl.float32)
            total = tl.zeros(heads.query.shape, tl.float32)
            values = zeros(heads, plan.value_dim)
            features = zeros(heads, plan.edge_dim)
            for block in range(begin, end, plan.block):
                source, edge, valid = edges_at(block, end, order, edge_id, plan)
                # [block, heads, channels]
                k = node_tile(key, batch, source, tile, valid, plan.head_dim, plan, True)
                v = node_tile(value, batch, source, tile, valid, plan.value_dim, plan, True)
                x = edge_tile(edge_attr, edge, valid, plan.edge_dim)
                # [block, heads]
                scores = score(q, k, q_edge, x, bias, batch, edge, heads, valid, scale)
                before = largest
                largest = tl.maximum(before, tl.max(scores, axis=0))
                finite = tl.where(largest == LOWEST, 0.0, largest)
                shrink = tl.exp(before - finite)
                weight = tl.exp(scores - finite[None, :])
                total = total * shrink + tl.sum(weight, axis=0)
                if dropout is not None:
                    weight = tl.where(kept(dropout, batch, edge, heads), weight, 0.0)
                if v is not None:
                    values = values * shrink[:, None] + tl.sum(weight[:, :, None] * v, axis=0)
                if x is not None:
                    features = features * shrink[:, None] + tl.sum(weight[:, :, None] * x, axis=0)
            if unit.is_piece:
                one = tl.arange(0, 1)
                at = unit.slot + one
                store_numbers(parts.largest, batch, at, heads, one == 0, largest[None, :])
                store_numbers(parts.total, batch, at, heads, one == 0, total[None, :])
                store_row(parts.value, batch, unit.slot, heads, values, plan.value_dim)
                store_row(parts.feature, batch, unit.slot, heads, features, plan.edge_dim)
            else:
                finish(
                    results,
                    batch,
                    row,
                    heads,
                    largest,
                    total,
                    values,
                    features,
                    dropout,
                    plan,
                )


@triton.jit(do_not_specialize=["num_rows"])
def merge(
    ptr,
    num_rows,
    results,
    parts,
    dropout,
    HEADS: tl.constexpr,
    plan: tl.constexpr,
):
    """Results of targets that were cut, from their parts."""
    MERGED: tl.constexpr = plan.merged
    batch, head, first, last = rows_to_merge(ptr, num_rows, HEADS, plan)
    heads = one_head(head)
    for row in range(first, last):
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
        if end - begin > plan.chunk:
            # Each lane has sums of its own until the end: [merged, 1], and [merged, channels].
            lanes = tl.zeros([MERGED, 1], tl.float32)
            largest = lanes + LOWEST
            total = lanes
            values = lanes + zeros(heads, plan.value_dim)
            features = lanes + zeros(heads, plan.edge_dim)
            for piece in range(0, tl.cdiv(end - begin, plan.chunk), MERGED):
                slot, valid = pieces_at(piece, begin, end, plan)
                top = part_tile(parts.largest, batch, slot, head, valid, 1)
                top = tl.where(valid[:, None], top, LOWEST)
                before = largest
                largest = tl.maximum(before, top)
                finite = tl.where(largest == LOWEST, 0.0, largest)
                shrink = tl.exp(before - finite)
                grow = tl.exp(top - finite)
                total = total * shrink + part_tile(parts.total, batch, slot, head, valid, 1) * grow
                v = part_tile(parts.value, batch, slot, head, valid, plan.value_dim)
                x = part_tile(parts.feature, batch, slot, head, valid, plan.edge_dim)
                values = values * shrink + v * grow
                features = features * shrink + x * grow
            top = tl.max(largest, axis=0)
            share = tl.exp(largest - tl.where(top == LOWEST, 0.0, top)[None, :])
            total = tl.sum(total * share, axis=0)
            values = tl.sum(values * share, axis=0)[None, :]
            features = tl.sum(features * share, axis=0)[None, :]
            finish(results, batch, row, heads, top, total, values, features, dropout, plan)


@triton.jit(do_not_specialize=SIZES)
def weigh(
    query,
    key,
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
    scale,
    softmax,
    weights,
    TILES: tl.constexpr,
    plan: tl.constexpr,
):
    """The weight of each edge, from the softmax of its target, Attended."""
    order = Order(ptr, other, num_rows, num_edges, slots, units)
    unit = unit_of(order, TILES, plan)
    batch, tile = unit.batch, unit.tile
    heads = all_heads_of(tile, plan)
    for row in range(unit.first, unit.last):
        begin, end, own = edges_of(row, unit, order, plan)
        if own:
            one = tl.arange(0, 1)
            q = row_tile(query, batch, row, tile, plan.head_dim, plan, False)
            q_edge = row_tile(query_edge, batch, row, tile, plan.edge_dim, plan, False)
            largest = number_tile(softmax.largest, batch, row + one, heads, one == 0)
            inverse = number_tile(softmax.total, batch, row + one, heads, one == 0)
            for block in range(begin, end, plan.block):
                source, edge, valid = edges_at(block, end, order, edge_id, plan)
                k = node_tile(key, batch, source, tile, valid, plan.head_dim, plan, True)
                x = edge_tile(edge_attr, edge, valid, plan.edge_dim)
                scores = score(q, k, q_edge, x, bias, batch, edge, heads, valid, scale)
                weight = tl.exp(scores - largest) * inverse
                store_numbers(weights, batch, edge, heads, valid, weight)
