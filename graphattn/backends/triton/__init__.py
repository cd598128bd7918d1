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
    Gradients,
    Inputs,
    Order,
    Plan,
    Rows,
    SourceGradients,
    TargetGradients,
)

__all__ = ["attention", "attention_backward"]

# Edges of the longest row that is not cut, and of a piece of one that is.
CHUNK = 256
# Channels of all heads in a tile, which a warp reads in one or two loads of 16 bytes a thread.
TILE_CHANNELS = 256
# Numbers in a tile of edges, heads and channels, which a warp holds in registers, and most edges.
TILE_NUMBERS = 1024
TILE_EDGES = 16


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
    inputs = _inputs(query, key, value, bias, query_edge, edge_attr, seed, scale, dropout)
    targets = Pass(inputs, dst_ptr, src_index, edge_id)
    value_dim, edge_dim = targets.plan.value_dim, targets.plan.edge_dim
    out = query.new_empty(*leading, num_dst, heads, value_dim)
    mixed = query.new_empty(*leading, num_dst, heads, edge_dim, dtype=torch.float32)
    softmax = query.new_empty(*leading, num_dst, 2, heads, dtype=torch.float32)
    results = Attended(*_largest_and_total(softmax), _rows(out), _rows(mixed))
    parts = Attended(
        *_largest_and_total(targets.empty_parts(2, heads)),
        _rows(targets.empty_parts(heads, value_dim)),
        _rows(targets.empty_parts(heads, edge_dim)),
    )
    targets.visit(forward.attend, inputs, targets.order, results, parts)
    targets.merge(forward.merge, heads, targets.order, results, parts, inputs.dropout)
    if value is not None:
        return out, mixed, softmax
    weights = query.new_empty(*leading, src_index.numel(), heads)
    targets.visit(forward.weigh, inputs, targets.order, results, _numbers(weights))
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
    inputs = _inputs(*tensors, seed, scale, dropout)
    attended = Attended(*_largest_and_total(softmax), None, None)
    if value is not None and grad_out is None:
        grad_out = query.new_zeros(*query.shape[:-1], value.size(-1))
    grads = Gradients(
        out=None if value is None else _rows(grad_out),
        mixed=_rows(grad_mixed),
        weights=None if value is not None else _numbers(grad_out),
        delta=_numbers(query.new_empty(query.shape[:-1], dtype=torch.float32)),
    )
    targets = Pass(inputs, dst_ptr, src_index, edge_id)
    at_targets = _visit_targets(targets, inputs, attended, grads, needs)
    at_sources: tuple[Tensor | None, Tensor | None] = (None, None)
    along_edges = at_sources
    if needs[1] or needs[2] or needs[3] or needs[5]:
        by_source = arguments.by_source(src_ptr, dst_index, edge_id_by_src)
        sources = Pass(inputs, *by_source, tiles_of_keys=True)
        at_sources, along_edges = _visit_sources(sources, inputs, attended, grads, needs)
    gradients = (at_targets[0], *at_sources, along_edges[0], at_targets[1], along_edges[1])
    return [
        gradient.view(x.shape).to(x.dtype)
        for x, gradient in zip(tensors, gradients, strict=True)
        if x is not None and gradient is not None
    ]


def _visit_targets(
    targets: Pass, inputs: Inputs, attended: Attended, grads: Gradients, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Delta, in ``grads``, and the gradients of query and query_edge."""
    plan, heads = targets.plan, inputs.query.data.size(-2)
    grad_query = _empty_like(inputs.query, needs[0])
    grad_query_edge = _empty_like(inputs.query_edge, needs[4])
    results = TargetGradients(grads.delta, _rows(grad_query), _rows(grad_query_edge), None, None)
    dims = (1, *(plan.head_dim, plan.edge_dim) * 2)
    asked = (True, *(needs[0], needs[4]) * 2)
    parts = TargetGradients(
        *(
            _rows(targets.empty_parts(heads, dim)) if need else None
            for dim, need in zip(dims, asked, strict=True)
        )
    )
    order = targets.order
    targets.visit(backward.visit_targets, inputs, order, attended, grads, results, parts)
    targets.merge(backward.merge_targets, heads, order, results, parts, inputs.scale)
    return grad_query, grad_query_edge


def _visit_sources(
    sources: Pass, inputs: Inputs, attended: Attended, grads: Gradients, needs: list[bool]
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """The gradients of key and value, and those of bias and edge_attr."""
    plan, order = sources.plan, sources.order
    query, bias, edge_attr = inputs.query.data, inputs.bias, inputs.edge_attr
    grad_key, grad_value = _empty_like(inputs.key, needs[1]), _empty_like(inputs.value, needs[2])
    # What a batch or the tiles of heads share is kept apart first, for a sum in a fixed order.
    grad_bias = grad_edge_attr = None
    if needs[3]:
        shape = (sources.batch, order.edges, query.size(-2))
        grad_bias = query.new_empty(shape, dtype=torch.float32)
    if needs[5]:
        shape = (sources.batch * sources.tiles * plan.parts, *edge_attr.shape)
        grad_edge_attr = query.new_empty(shape, dtype=torch.float32)
    results = SourceGradients(
        _rows(grad_key),
        _rows(grad_value),
        _numbers(grad_bias),
        None if grad_edge_attr is None else Rows(grad_edge_attr, edge_attr.numel(), plan.edge_dim),
    )
    parts = SourceGradients(
        _rows(sources.empty_parts(plan.key_heads, plan.head_dim)) if needs[1] else None,
        _rows(sources.empty_parts(plan.key_heads, plan.value_dim)) if needs[2] else None,
        None,
        None,
    )
    sources.visit(backward.visit_sources, inputs, order, attended, grads, results, parts)
    if needs[1] or needs[2]:
        sources.merge(backward.merge_sources, plan.key_heads, order, results, parts)
    if grad_bias is not None and bias.data.dim() == 3:
        grad_bias = grad_bias.sum(0)
    if grad_edge_attr is not None:
        grad_edge_attr = grad_edge_attr.sum(0)
    return (grad_key, grad_value), (grad_bias, grad_edge_attr)


class Pass:
    """A pass over edges that are sorted by the rows it owns: how its work is cut, and launched."""

    def __init__(
        self,
        inputs: Inputs,
        ptr: Tensor,
        other: Tensor,
        edge_id: Tensor | None,
        *,
        tiles_of_keys: bool = False,
    ) -> None:
        num_rows, num_edges = ptr.numel() - 1, other.numel()
        self.plan = plan = _plan(inputs, num_rows, num_edges)
        slots = 2 * triton.cdiv(num_edges, CHUNK) if num_edges > CHUNK else 0
        units = slots + triton.cdiv(num_rows, plan.rows)
        self.order = Order(ptr, other, edge_id, num_rows, num_edges, slots, units)
        self.tiles = triton.cdiv(plan.key_heads, plan.keys) * (1 if tiles_of_keys else plan.parts)
        self.query = inputs.query.data
        self.batch = inputs.query.data.shape[:-3].numel()

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
        inputs, order = operands[0], self.order
        options = [name for name in ("bias", "dropout") if getattr(inputs, name) is not None]
        degree = 2 ** round(math.log2(max(1, order.edges) / max(1, order.rows)))
        device = torch.cuda.get_device_name(self.query.device) if self.query.is_cuda else "cpu"
        plan = self.plan._replace(rows=0)
        return (
            f"{device}: {kernel.__name__}, {self.query.dtype}, {plan}, {options}, degree {degree}"
        )

    def merge(self, kernel: Any, heads: int, *operands: Any) -> None:
        """Runs a kernel that puts together rows that were cut, if there can be any."""
        if self.order.slots > 0:
            blocks = triton.cdiv(self.order.rows, LOOKED_OVER.value)
            self.launch(kernel, heads * blocks, 4, *operands, heads, self.plan)

    def launch(self, kernel: Any, programs: int, warps: int, *operands: Any) -> Any:
        """Launches so many programs for each batch; returns the kernel as it was compiled."""
        grid = (self.batch * programs,)
        if grid[0] == 0:
            return None
        # Triton launches on the device that is current.
        on_gpu = self.query.is_cuda
        with torch.cuda.device(self.query.device) if on_gpu else contextlib.nullcontext():
            return kernel[grid](*operands, num_warps=warps, enable_fp_fusion=True)


def _plan(inputs: Inputs, num_rows: int, num_edges: int) -> Plan:
    """Sizes for these inputs. Only the rows of a program depend on the graph: no result does."""
    heads, head_dim = inputs.query.data.shape[-2:]
    key_heads = inputs.key.data.size(-2)
    group = heads // key_heads
    value_dim = 0 if inputs.value is None else inputs.value.data.size(-1)
    edge_dim = 0 if inputs.edge_attr is None else inputs.edge_attr.size(-1)
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
    merged = max(8, min(64, 4096 // channels))
    return Plan(key_heads, group, *dims, keys, shared, parts, block, CHUNK, rows, merged)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> Inputs:
    random = None
    if seed is not None:
        factor = 1.0 if dropout == 1.0 else 1.0 / (1.0 - dropout)
        random = Dropout(seed.to(query.device, non_blocking=True), round(dropout * 2**32), factor)
    return Inputs(
        _rows(query),
        _rows(key),
        _rows(value),
        _numbers(bias),
        _rows(query_edge),
        None if edge_attr is None else edge_attr.contiguous(),
        random,
        scale,
    )


def _rows(tensor: Tensor | None) -> Any:
    """``[*, N, H, D]``."""
    return None if tensor is None else Rows(*arguments.rows(tensor))


def _numbers(tensor: Tensor | None) -> Any:
    """``[*, N, H]`` or ``[*, E, H]``; one without leading dimensions is the same for all."""
    return None if tensor is None else _rows(tensor.contiguous().unsqueeze(-1))


def _largest_and_total(softmax: Tensor) -> tuple[Rows, Rows]:
    """The halves of ``[*, N, 2, H]``."""
    return _rows(softmax.select(-2, 0).unsqueeze(-1)), _rows(softmax.select(-2, 1).unsqueeze(-1))


def _empty_like(rows: Rows | None, needed: bool) -> Tensor | None:
    if rows is None or not needed:
        return None
    return torch.empty_like(rows.data, memory_format=torch.contiguous_format)
