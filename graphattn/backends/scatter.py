"""Edge operations on ``torch_scatter``: all sums sorted, so repeatable bit by bit on every device.

Rows are gathered from, and summed into, targets by the by-target pointers and sources by the
by-source pointers; a permutation leads from one edge order to the other. No atomic addition takes
part. Unlike the other backends it keeps ``[E, H, D]`` tensors for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_scatter import gather_csr, segment_csr

__all__ = ["EdgeOperations"]


class EdgeOperations:
    """Edges in by-target order, from the graph's pointers and edge positions."""

    def __init__(
        self, dst_ptr: Tensor, edge_id: Tensor | None, src_ptr: Tensor, edge_id_by_src: Tensor
    ) -> None:
        self.dst_ptr, self.src_ptr = dst_ptr, src_ptr
        self.num_dst, self.num_edges = dst_ptr.numel() - 1, edge_id_by_src.numel()
        every = torch.arange(edge_id_by_src.numel(), device=edge_id_by_src.device)
        place = torch.empty_like(every).index_copy_(0, edge_id_by_src, every)
        # Where each edge of the by-target order stands in the by-source order.
        self.by_source = place if edge_id is None else place[edge_id]

    def dot(self, q: Tensor, k: Tensor) -> Tensor:
        """``[N_dst, P, G, D], [N_src, P, D] -> [E, P, G]``."""
        return (self._at_target(q) * self._at_source(k).unsqueeze(2)).sum(-1)

    def sum(self, w: Tensor, v: Tensor) -> Tensor:
        """``[E, P, G], [N_src, P, D] -> [N_dst, P, G, D]``."""
        return _Sum.apply(w.unsqueeze(-1) * self._at_source(v).unsqueeze(2), self.dst_ptr)

    def dot_edge(self, q: Tensor, rows: Tensor) -> Tensor:
        """``[N_dst, P, G, C], [E, C] -> [E, P, G]``."""
        return (self._at_target(q) * rows[:, None, None]).sum(-1)

    def sum_edge(self, w: Tensor, rows: Tensor) -> Tensor:
        """``[E, P, G], [E, C] -> [N_dst, P, G, C]``."""
        return _Sum.apply(w.unsqueeze(-1) * rows[:, None, None], self.dst_ptr)

    def softmax(self, score: Tensor) -> Tensor:
        """``[E, K] -> [E, K]``, over the in-edges of each target; zero if all are ``-inf``."""
        if score.numel() == 0:
            return score
        top = segment_csr(score.detach(), self.dst_ptr, reduce="max")
        top = top.masked_fill(top == float("-inf"), 0.0)
        weight = (score - self._at_target(top)).exp()
        total = _Sum.apply(weight, self.dst_ptr)
        total = total.masked_fill(total == 0.0, 1.0)
        return weight / self._at_target(total)

    def _at_target(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.dst_ptr, self.num_edges)

    def _at_source(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.src_ptr, self.num_edges).index_select(0, self.by_source)


# The derivatives that torch_scatter brings stop at the first order without a word, and it leaves
# memory uninitialised where there are no elements at all. Gather and sum are each other's
# derivative.


class _Gather(torch.autograd.Function):
    """``[N, *] -> [E, *]``: the row of each edge's group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ptr: Tensor, num_edges: int) -> Tensor:
        ctx.save_for_backward(ptr)
        if num_edges == 0 or x.numel() == 0:
            return x.new_empty(num_edges, *x.shape[1:])
        return gather_csr(x, ptr)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    """``[E, *] -> [N, *]``: sum of the rows of each group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ptr: Tensor) -> Tensor:
        ctx.save_for_backward(ptr)
        ctx.num_edges = rows.size(0)
        if rows.numel() == 0:
            return rows.new_zeros(ptr.numel() - 1, *rows.shape[1:])
        return segment_csr(rows, ptr)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(grad, *ctx.saved_tensors, ctx.num_edges), None
