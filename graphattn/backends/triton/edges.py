"""What all kernels share: which rows, edges and heads a program has, how it reads and scores them.

Edges come sorted by the rows that a pass owns: targets, or sources. A row of at most ``chunk``
edges is worked off by one program. A longer one is cut into pieces of ``chunk`` edges, counted from
its own first edge, so that its result depends on nothing else in the graph. Pieces are found
without a table: the one that starts at edge ``e`` has slot ``2 * (e // chunk)``, plus 1 if it is
the first of its row. First pieces start more than ``chunk`` edges apart, and so do later ones of
different rows: no slot is taken twice, and a binary search finds what is in it.

A program is one warp. It holds tiles ``[block, heads, channels]``, ``block`` edges at a time: what
it reads of an edge is one burst, and sums over edges stay inside a thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "Attended",
    "Dropout",
    "Heads",
    "Order",
    "Plan",
    "Rows",
    "all_heads_of",
    "edge_tile",
    "edges_at",
    "edges_of",
    "kept",
    "node_tile",
    "number_tile",
    "one_head",
    "part_tile",
    "pieces_at",
    "row_tile",
    "rows_to_merge",
    "score",
    "store_numbers",
    "store_row",
    "unit_of",
    "zeros",
]

# Of the fields of Order, those for whose values nothing is compiled anew.
SIZES = ["num_rows", "num_edges", "slots", "units"]
LOWEST = tl.constexpr(float("-inf"))
LOOKED_OVER = tl.constexpr(32)  # rows in which one program looks for such as were cut


class Rows(NamedTuple):
    """A tensor ``[batch, nodes, heads, dim]`` with contiguous heads and dims; strides in elements.

    Instead of nodes it may have edges, or slots; instead of heads and dims, one number a head.
    """

    data: Any
    batch_stride: Any
    row_stride: Any


class Dropout(NamedTuple):
    """Seed ``[]`` int64, the smallest random number that is kept, the factor on what is kept."""

    seed: Any
    threshold: Any
    factor: Any


class Order(NamedTuple):
    """Edges sorted by the rows of a pass, and how the work is divided."""

    ptr: Any  # [rows + 1]
    other: Any  # [edges], the node at the other end
    num_rows: Any
    num_edges: Any
    slots: Any  # 0 where no row can be long enough to be cut
    units: Any  # programs for each batch and tile: one for each slot, then those for rows


class Attended(NamedTuple):
    """Rows for what is summed up over the edges of a target, or of a piece of it."""

    largest: Any  # score
    total: Any  # sum of exponentials; of a finished target, its reciprocal
    value: Any
    feature: Any


class Plan(NamedTuple):
    """What a kernel is compiled for: dims of the tensors, and sizes of its own."""

    key_heads: int
    group: int  # query heads of each key head
    head_dim: int
    value_dim: int
    edge_dim: int
    keys: int  # key heads in a tile, a power of two, as are the next two
    shared: int  # query heads of each of them in a tile
    parts: int  # tiles that the query heads of a key head make
    block: int  # edges in a tile
    chunk: int  # edges of the longest row that is not cut
    rows: int  # that one program takes
    merged: int  # pieces that are put together at a time


class Heads(NamedTuple):
    """Query heads, their key heads, and which of them exist."""

    query: Any
    key: Any
    exist: Any


class Unit(NamedTuple):
    """Work of a program: rows from ``first`` to ``last``, or the edges of a piece of one."""

    tile: Any
    batch: Any
    is_piece: Any
    slot: Any
    first: Any
    last: Any
    begin: Any
    end: Any


# The work of a program ############################################################################


@triton.jit
def piece_of_slot(slot, order, plan: tl.constexpr):
    """``(row, begin, end)`` of the piece in a slot, with no edges where there is none."""
    window = slot // 2 * plan.chunk
    is_first = slot % 2 == 1
    # A first piece is longer than a window, so that its row goes on where the next window starts.
    position = window + slot % 2 * plan.chunk
    low = slot * 0
    high = low + order.num_rows
    while high - low > 1:  # for the last row that starts at this position or before it
        middle = (low + high) // 2
        if tl.load(order.ptr + middle) <= position:
            low = middle
        else:
            high = middle
    row_begin = tl.load(order.ptr + low)
    row_end = tl.load(order.ptr + low + 1)
    earlier = (window - row_begin + plan.chunk - 1) // plan.chunk  # pieces before this window
    begin = tl.where(is_first, row_begin, row_begin + earlier * plan.chunk)
    is_here = tl.where(is_first, (row_begin >= window) & (row_begin < position), earlier > 0)
    is_here &= (row_end - row_begin > plan.chunk) & (position < order.num_edges) & (begin < row_end)
    return low, begin, tl.where(is_here, tl.minimum(begin + plan.chunk, row_end), begin)


@triton.jit
def unit_of(order, TILES: tl.constexpr, plan: tl.constexpr):
    """The unit of this program. Those of a tile follow one another: caches hold what they share."""
    program = tl.program_id(0)
    unit = (program % order.units).to(tl.int64)
    is_piece = unit < order.slots
    if is_piece:
        first, begin, end = piece_of_slot(unit, order, plan)
        last = first + (end > begin)
    else:
        first = (unit - order.slots) * plan.rows
        last = tl.minimum(first + plan.rows, order.num_rows)
        begin = first * 0
        end = first * 0
    tile = program // order.units % TILES
    batch = (program // (order.units * TILES)).to(tl.int64)
    return Unit(tile, batch, is_piece, unit, first, last, begin, end)


@triton.jit
def edges_of(row, unit, order, plan: tl.constexpr):
    """``(begin, end, whether they are those of this program)``: a row that is cut has units."""
    begin = unit.begin
    end = unit.end
    if not unit.is_piece:
        begin = tl.load(order.ptr + row)
        end = tl.load(order.ptr + row + 1)
    return begin, end, unit.is_piece | (end - begin <= plan.chunk)


@triton.jit
def edges_at(block, end, order, edge_id, plan: tl.constexpr):
    """``(other, edge, valid)``, each ``[block]``: node at the other end, caller's position."""
    place = block + tl.arange(0, plan.block).to(tl.int64)
    valid = place < end
    edge = place
    if edge_id is not None:  # else the caller's order is this one
        edge = tl.load(edge_id + place, mask=valid, other=0)
    return tl.load(order.other + place, mask=valid, other=0), edge, valid


@triton.jit
def heads_of(tile, local, plan: tl.constexpr):
    """The heads at these places of a tile. Tiles of the same key heads follow one another."""
    key = tile // plan.parts * plan.keys + local // plan.shared
    of_group = tile % plan.parts * plan.shared + local % plan.shared
    exist = (key < plan.key_heads) & (of_group < plan.group)
    return Heads(key * plan.group + of_group, key, exist)


@triton.jit
def all_heads_of(tile, plan: tl.constexpr):
    """All heads of a tile, each ``[keys * shared]``."""
    return heads_of(tile, tl.arange(0, plan.keys * plan.shared), plan)


# Reading and writing ##############################################################################


@triton.jit
def zeros(heads, DIM: tl.constexpr):
    """``[heads, channels]`` to sum up in; one channel that means nothing where there are none."""
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM) if DIM > 0 else 1
    return tl.zeros([heads.query.shape[0], CHANNELS], tl.float32)


@triton.jit
def node_tile(
    rows, batch, node, tile, valid, DIM: tl.constexpr, plan: tl.constexpr, OF_KEYS: tl.constexpr
):
    """``[nodes, heads, channels]`` in float32; ``None`` where there are no channels."""
    loaded = None
    if DIM > 0:
        # First as [nodes, heads * channels]: in this layout a warp goes along a row, not across.
        HEADS: tl.constexpr = plan.keys * plan.shared
        CHANNELS: tl.constexpr = triton.next_power_of_2(DIM)
        column = tl.arange(0, HEADS * CHANNELS)
        heads = heads_of(tile, column // CHANNELS, plan)
        channel = column % CHANNELS
        if OF_KEYS:
            at = heads.key * DIM + channel
        else:
            at = heads.query * DIM + channel
        start = batch * rows.batch_stride + node * rows.row_stride
        inside = valid[:, None] & (heads.exist & (channel < DIM))[None, :]
        flat = tl.load(rows.data + (start[:, None] + at[None, :]), mask=inside, other=0.0)
        loaded = tl.reshape(flat, [node.shape[0], HEADS, CHANNELS]).to(tl.float32)
    return loaded


@triton.jit
def row_tile(rows, batch, row, tile, DIM: tl.constexpr, plan: tl.constexpr, OF_KEYS: tl.constexpr):
    """``[1, heads, channels]``: that of one node."""
    one = tl.arange(0, 1)
    return node_tile(rows, batch, row + one, tile, one == 0, DIM, plan, OF_KEYS)


@triton.jit
def store_row(rows, batch, row, heads, values, DIM: tl.constexpr):
    """Stores ``values`` ``[heads, channels]`` of one node."""
    if DIM > 0:
        channel = tl.arange(0, triton.next_power_of_2(DIM))
        start = batch * rows.batch_stride + row * rows.row_stride
        at = start + (heads.query * DIM)[:, None] + channel[None, :]
        inside = heads.exist[:, None] & (channel < DIM)[None, :]
        tl.store(rows.data + at, values.to(rows.data.dtype.element_ty), mask=inside)


@triton.jit
def number_tile(rows, batch, node, heads, valid):
    """``[nodes, heads]`` in float32, of rows with one number a head."""
    at = (batch * rows.batch_stride + node * rows.row_stride)[:, None] + heads.query[None, :]
    inside = valid[:, None] & heads.exist[None, :]
    return tl.load(rows.data + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(rows, batch, node, heads, valid, numbers):
    """Stores ``numbers`` ``[nodes, heads]`` in rows with one number a head."""
    at = (batch * rows.batch_stride + node * rows.row_stride)[:, None] + heads.query[None, :]
    inside = valid[:, None] & heads.exist[None, :]
    tl.store(rows.data + at, numbers.to(rows.data.dtype.element_ty), mask=inside)


@triton.jit
def edge_tile(edge_attr, edge, valid, DIM: tl.constexpr):
    """``[edges, 1, channels]`` in float32; ``None`` where there are no edge features."""
    tile = None
    if DIM > 0:
        channel = tl.arange(0, triton.next_power_of_2(DIM))
        at = (edge * DIM)[:, None, None] + channel[None, None, :]
        inside = valid[:, None, None] & (channel < DIM)[None, None, :]
        tile = tl.load(edge_attr + at, mask=inside, other=0.0).to(tl.float32)
    return tile


# What belongs to an edge and a head ###############################################################


@triton.jit
def score(q, k, q_edge, features, bias, batch, edge, heads, valid, scale):
    """Scores ``[block, heads]``, and minus infinity where there is no edge."""
    scores = tl.zeros([valid.shape[0], heads.query.shape[0]], tl.float32)
    if k is not None:
        scores += tl.sum(q * k, axis=2)
    if features is not None:
        scores += tl.sum(q_edge * features, axis=2)
    scores *= scale
    if bias is not None:
        scores += number_tile(bias, batch, edge, heads, valid)
    return tl.where(valid[:, None], scores, LOWEST)


@triton.jit
def kept(dropout, batch, edge, heads):
    """Which weights dropout keeps, ``[block, heads]``: the mask of :mod:`graphattn.dropout`."""
    zero = tl.zeros([edge.shape[0], heads.query.shape[0]], tl.uint32)
    bits0, bits1, bits2, bits3 = tl.philox(
        tl.load(dropout.seed),
        zero + (edge & 0xFFFFFFFF).to(tl.uint32)[:, None],
        zero + (edge >> 32).to(tl.uint32)[:, None],
        zero + (heads.query // 4).to(tl.uint32)[None, :],
        zero + batch.to(tl.uint32),
        n_rounds=7,
    )
    lane = (heads.query % 4)[None, :]
    low = tl.where(lane == 0, bits0, bits1)
    high = tl.where(lane == 2, bits2, bits3)
    return tl.where(lane < 2, low, high).to(tl.int64) >= dropout.threshold


# Rows that were cut ###############################################################################


@triton.jit
def rows_to_merge(ptr, num_rows, HEADS: tl.constexpr, plan: tl.constexpr):
    """``(batch, head, first, last)``: one head, and rows to look over if any of them was cut."""
    program = tl.program_id(0)
    units = tl.cdiv(num_rows, LOOKED_OVER)
    first = (program % units).to(tl.int64) * LOOKED_OVER
    rows = first + tl.arange(0, LOOKED_OVER)
    inside = rows < num_rows
    begin = tl.load(ptr + rows, mask=inside, other=0)
    end = tl.load(ptr + rows + 1, mask=inside, other=0)
    last = tl.where(tl.max(end - begin, axis=0) > plan.chunk, first + LOOKED_OVER, first)
    head = program // units % HEADS
    return (program // (units * HEADS)).to(tl.int64), head, first, tl.minimum(last, num_rows)


@triton.jit
def pieces_at(piece, begin, end, plan: tl.constexpr):
    """``(slot, valid)`` of the next pieces of a row, each ``[merged]``."""
    piece += tl.arange(0, plan.merged)
    slot = 2 * (begin // plan.chunk + piece) + (piece == 0)
    return slot, begin + piece * plan.chunk < end


@triton.jit
def part_tile(rows, batch, slot, head, valid, DIM: tl.constexpr):
    """``[merged, channels]``, what pieces left in their slots for one head; zeros without any."""
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM) if DIM > 0 else 1
    tile = tl.zeros([slot.shape[0], CHANNELS], tl.float32)
    if DIM > 0:
        channel = tl.arange(0, CHANNELS)
        start = batch * rows.batch_stride + slot * rows.row_stride + head * DIM
        inside = valid[:, None] & (channel < DIM)[None, :]
        tile = tl.load(rows.data + (start[:, None] + channel[None, :]), mask=inside, other=0.0)
    return tile


@triton.jit
def one_head(head):
    """The Heads of one, to store its numbers."""
    own = head + tl.arange(0, 1)
    return Heads(own, own, own >= 0)
