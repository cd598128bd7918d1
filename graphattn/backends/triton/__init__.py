"""The fused kernels for GPU: launches from tensors, on the stream that is current.

No call waits for the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
from torch import Tensor

from graphattn.backends import arguments
from graphattn.backends.triton import backward, forward, tuning
from graphattn.backends.triton.edges import (
    LOOKED_OVER,
    Attended,
    Dropout,
    Order,
    Plan,
    Rows,
)

__all__ = ["attention", "attention_backward"]

# Edges of the longest row that is not cut, and of a piece of one that is.
CHUNK = 256
# Channels of all heads in a tile, which a warp reads in one or two loads of 16 bytes a thread.
TILE_CHANNELS = 256
# Numbers in a tile of edges, heads and channels, which a warp holds in registers, and most edges.
TILE_NUMBERS = 1024
TILE_EDGES = 16
# Pieces of a row that are put together at a time, and numbers of them, which four warps hold.
MERGED_PIECES = 64
MERGED_NUMBERS = 4096


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    dst_ptr: Tensor,
    src_index: Tensor,
    edge_id: Tensor | None,
    src_ptr: Tensor | None,
    dst_index: Tensor | None,
    edge_id_by_src: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mixed edge features and softmax; see :mod:`graphattn._ops`."""
    arguments.check(query, key, value, query_edge, (dst_ptr, src_index, edge_id), seed, dropout)
    leading, (num_dst, heads) = query.shape[:-3], query.shape[-3:-1]
    targets = Pass(query, key, value, edge_attr, dst_ptr, src_index)
    plan, order = targets.plan, targets.order
    out = query.new_empty(*leading, num_dst, heads, plan.value_dim)
    mixed = query.new_empty(*leading, num_dst, heads, plan.edge_dim, dtype=torch.float32)
    softmax = query.new_empty(*leading, num_dst, 2, heads, dtype=torch.float32)
    results = Attended(*_largest_and_total(softmax), _rows(out), _rows(mixed))
    parts = Attended(
        *_largest_and_total(targets.empty_parts(2, heads)),
        _rows(targets.empty_parts(heads, plan.value_dim)),
        _rows(targets.empty_parts(heads, plan.edge_dim)),
    )
    inputs = _inputs(query, key, value, bias, query_edge, edge_attr)
    random = _dropout(seed, dropout, query)
    targets.visit(forward.attend, *inputs, *order, edge_id, random, scale, results, parts)
    targets.merge(forward.merge, heads, results, parts, random)
    if value is not None:
        return out, mixed, softmax
    weights = query.new_empty(*leading, src_index.numel(), heads)
    q, k, _, *along_edges = inputs
    targets.visit(
        forward.weigh, q, k, *along_edges, *order, edge_id, scale, results, _numbers(weights)
    )
    return weights, mixed, softmax


def attention_backward(
    grad_out: Tensor | None,
    grad_mixed: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    dst_ptr: Tensor,
    src_index: Tensor,
    edge_id: Tensor | None,
    src_ptr: Tensor | None,
    dst_index: Tensor | None,
    edge_id_by_src: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    softmax: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of query, key, value, bias, query_edge and edge_attr, where ``needs`` asks."""
    tensors = (query, key, value, bias, query_edge, edge_attr)
    needs = [need and x is not None for need, x in zip(needs, tensors, strict=True)]
    if value is not None and grad_out is None:
        grad_out = query.new_zeros(*query.shape[:-1], value.size(-1))
    delta = query.new_empty(query.shape[:-1], dtype=torch.float32)
    # What both passes read beside the order of their edges.
    inputs, random = _inputs(*tensors), _dropout(seed, dropout, query)
    given = (
        *_largest_and_total(softmax),
        None if value is None else _rows(grad_out),
        _rows(grad_mixed),
        None if value is not None else _numbers(grad_out),
        _numbers(delta),
    )
    grad_query, grad_query_edge = _empty_like(query, needs[0]), _empty_like(query_edge, needs[4])
    targets = Pass(query, key, value, edge_attr, dst_ptr, src_index)
    sums, parts = _at_targets(targets, delta, grad_query, grad_query_edge)
    ordered = (*targets.order, edge_id, random, scale)
    targets.visit(backward.visit_targets, *inputs, *ordered, *given, *sums[1:], *parts)
    targets.merge(backward.merge_targets, query.size(-2), scale, *sums, *parts)

    grad_key, grad_value = _empty_like(key, needs[1]), _empty_like(value, needs[2])
    grad_bias = grad_edge_attr = None
    if needs[1] or needs[2] or needs[3] or needs[5]:
        ptr, dst_index, edge_id = arguments.by_source(src_ptr, dst_index, edge_id_by_src)
        sources = Pass(query, key, value, edge_attr, ptr, dst_index, tiles_of_keys=True)
        order, plan = sources.order, sources.plan
        # Sums over what shares a bias or edge features are taken afterwards, in a fixed order.
        if needs[3]:
            grad_bias = delta.new_empty(sources.batch, order.num_edges, query.size(-2))
        if needs[5]:
            tiles = sources.batch * sources.tiles * plan.parts
            grad_edge_attr = delta.new_empty(tiles, order.num_edges, plan.edge_dim)
        results = (_rows(_filled(grad_key)), _rows(_filled(grad_value)))
        parts = (
            _rows(sources.empty_parts(plan.key_heads, plan.head_dim)) if needs[1] else None,
            _rows(sources.empty_parts(plan.key_heads, plan.value_dim)) if needs[2] else None,
        )
        along_edges = (_numbers(grad_bias), _numbers(_filled(grad_edge_attr)))
        ordered = (*order, edge_id, random, scale)
        sources.visit(
            backward.visit_sources, *inputs, *ordered, *given, *results, *along_edges, *parts
        )
        if needs[1] or needs[2]:
            sources.merge(backward.merge_sources, plan.key_heads, *results, *parts)
        if grad_bias is not None and bias is not None and bias.dim() == 2:
            grad_bias = _sum(grad_bias)
        if grad_edge_attr is not None:
            grad_edge_attr = _sum(grad_edge_attr)
    gradients = (grad_query, grad_key, grad_value, grad_bias, grad_query_edge, grad_edge_attr)
    return [
        gradient.view(x.shape).to(x.dtype)
        for x, gradient in zip(tensors, gradients, strict=True)
        if x is not None and gradient is not None
    ]


def _at_targets(
    targets: Pass, delta: Tensor, grad_query: Tensor | None, grad_query_edge: Tensor | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Rows of delta and the gradients at targets, and of what pieces sum up for them."""
    heads = delta.size(-1)

    def two_sums(gradient: Tensor | None) -> list[Any]:
        if gradient is None:
            return [None, None]
        return [_rows(targets.empty_parts(heads, gradient.size(-1))) for _ in range(2)]

    sums = (_numbers(delta), _rows(_filled(grad_query)), _rows(_filled(grad_query_edge)))
    part_delta = _rows(targets.empty_parts(heads, 1))
    return sums, (part_delta, *two_sums(grad_query), *two_sums(grad_query_edge))


class Pass:
    """A pass over edges that are sorted by the rows it owns: how its work is cut, and launched."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        edge_attr: Tensor | None,
        ptr: Tensor,
        other: Tensor,
        *,
        tiles_of_keys: bool = False,
    ) -> None:
        num_rows, num_edges = ptr.numel() - 1, other.numel()
        self.plan = plan = _plan(query, key, value, edge_attr, num_rows, num_edges)
        slots = 2 * triton.cdiv(num_edges, CHUNK) if num_edges > CHUNK else 0
        units = slots + triton.cdiv(num_rows, plan.rows)
        self.order = Order(ptr, other, num_rows, num_edges, slots, units)
        self.tiles = triton.cdiv(plan.key_heads, plan.keys) * (1 if tiles_of_keys else plan.parts)
        self.query, self.batch = query, query.shape[:-3].numel()

    def empty_parts(self, heads: int, dim: int) -> Tensor:
        """What pieces of rows leave in their slots, ``[batch, slots, heads, dim]``."""
        shape = (self.batch, self.order.slots, heads, dim)
        return self.query.new_empty(shape, dtype=torch.float32)

    def visit(self, kernel: Any, *operands: Any) -> None:
        """Runs a kernel on all units of work."""

        def run(edges: int, warps: int) -> None:
            plan = self.plan._replace(block=edges)
            self.launch(kernel, self.tiles * self.order.units, warps, *operands, self.tiles, plan)

        sizes = self.plan.block, 1
        if tuning.is_on() and self.batch * self.tiles * self.order.units > 0:
            sizes = tuning.sizes(self._describe(kernel, operands), self.plan, run)
        run(*sizes)

    def _describe(self, kernel: Any, operands: tuple[Any, ...]) -> str:
        """All that the best sizes of a kernel may depend on."""
        order = self.order
        given = "".join("." if operand is None else "x" for operand in operands)
        degree = 2 ** round(math.log2(max(1, order.num_edges) / max(1, order.num_rows)))
        device = torch.cuda.get_device_name(self.query.device) if self.query.is_cuda else "cpu"
        plan = self.plan._replace(rows=0)
        return f"{device}: {kernel.__name__} {given}, {self.query.dtype}, {plan}, degree {degree}"

    def merge(self, kernel: Any, heads: int, *operands: Any) -> None:
        """Runs a kernel that puts together rows that were cut, if there can be any."""
        ptr, num_rows = self.order.ptr, self.order.num_rows
        if self.order.slots > 0:
            blocks = triton.cdiv(num_rows, LOOKED_OVER.value)
            self.launch(kernel, heads * blocks, 4, ptr, num_rows, *operands, heads, self.plan)

    def launch(self, kernel: Any, programs: int, warps: int, *operands: Any) -> Any:
        """Launches so many programs for each batch; returns the kernel as it was compiled."""
        grid = (self.batch * programs,)
        if grid[0] == 0:
            return None
        # Triton launches on the device that is current.
        on_gpu = self.query.is_cuda
        with torch.cuda.device(self.query.device) if on_gpu else contextlib.nullcontext():
            return kernel[grid](*operands, num_warps=warps, enable_fp_fusion=True)


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    edge_attr: Tensor | None,
    num_rows: int,
    num_edges: int,
) -> Plan:
    """Sizes for these inputs. Only the rows of a program depend on the graph: no result does."""
    (heads, head_dim), key_heads = query.shape[-2:], key.size(-2)
    group = heads // key_heads
    value_dim = 0 if value is None else value.size(-1)
    edge_dim = 0 if edge_attr is None else edge_attr.size(-1)
    channels = triton.next_power_of_2(max(head_dim, value_dim, edge_dim, 1))
    most_heads = max(1, TILE_CHANNELS // channels)
    shared = min(triton.next_power_of_2(group), most_heads)
    keys = min(triton.next_power_of_2(key_heads), most_heads // shared)
    tiles = 2 if edge_dim > 0 else 1
    block = max(1, min(TILE_EDGES, TILE_NUMBERS // (keys * shared * channels * tiles)))
    # A program of few edges takes longer to start than to run, where there are enough for all.
    rows = 1
    while rows < 8 and rows * (num_edges + num_rows) < 16 * num_rows and num_rows > 1 << 14:
        rows *= 2
    dims = (head_dim, value_dim, edge_dim)
    parts = triton.cdiv(group, shared)
    merged = min(MERGED_PIECES, MERGED_NUMBERS // channels)
    return Plan(key_heads, group, *dims, keys, shared, parts, block, CHUNK, rows, merged)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
) -> tuple[Any, ...]:
    """What attention is computed from, as the kernels read it."""
    features = None if edge_attr is None else edge_attr.contiguous()
    return _rows(query), _rows(key), _rows(value), _numbers(bias), _rows(query_edge), features


def _dropout(seed: Tensor | None, dropout: float, query: Tensor) -> Dropout | None:
    if seed is None:
        return None
    factor = 1.0 if dropout == 1.0 else 1.0 / (1.0 - dropout)
    return Dropout(seed.to(query.device, non_blocking=True), round(dropout * 2**32), factor)


def _rows(tensor: Tensor | None) -> Any:
    """``[*, N, H, D]``."""
    return None if tensor is None else Rows(*arguments.rows(tensor))


def _numbers(tensor: Tensor | None) -> Any:
    """``[*, N, H]`` or ``[*, E, H]``; one without leading dimensions is the same for all."""
    return None if tensor is None else _rows(tensor.contiguous().unsqueeze(-1))


def _largest_and_total(softmax: Tensor) -> tuple[Rows, Rows]:
    """The halves of ``[*, N, 2, H]``."""
    return _rows(softmax.select(-2, 0).unsqueeze(-1)), _rows(softmax.select(-2, 1).unsqueeze(-1))


def _sum(shares: Tensor) -> Tensor:
    """Over the first dimension; without a copy where there is one share."""
    return shares[0] if shares.size(0) == 1 else shares.sum(0)


def _filled(gradient: Tensor | None) -> Tensor | None:
    """``None`` also where there are no channels to fill."""
    return None if gradient is None or gradient.size(-1) == 0 else gradient


def _empty_like(tensor: Tensor | None, needed: bool) -> Tensor | None:
    if tensor is None or not needed:
        return None
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
