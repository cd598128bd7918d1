r"""Edge operations in plain PyTorch: any device, any floating dtype, derivatives of any order.

Everything follows from one trilinear form over the edges ``j -> i``,

.. math:: T(w, q, v) = \sum_{j \to i} w_{ji} \, \langle q_i, v_j \rangle

whose three partial derivatives are the edge operations of attention: the dot product of the two
ends (scores), the weighted sum at the targets (output), and the weighted sum at the sources
(gradients of key and value). The gradient of each is made of the other two, so every order of
derivative exists. An operation keeps its arguments and nothing else: rows of ``E`` edges are
gathered a slice at a time and dropped again, so that memory is O(N H D + E H), not O(E H D).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["EdgeOperations"]

# Elements of one gathered slice of edges: some MB, which a processor's cache holds.
_SLICE_ELEMENTS = 1 << 20


class EdgeOperations:
    """Edges in by-target order, from the graph's ``src_index`` and ``target``."""

    def __init__(self, src: Tensor, dst: Tensor, num_dst: int) -> None:
        self.src, self.dst, self.num_dst = src, dst, num_dst

    def dot(self, q: Tensor, k: Tensor) -> Tensor:
        """``[N_dst, P, G, D], [N_src, P, D] -> [E, P, G]``."""
        return _EdgeDot.apply(q, k, self.dst, self.src)

    def sum(self, w: Tensor, v: Tensor) -> Tensor:
        """``[E, P, G], [N_src, P, D] -> [N_dst, P, G, D]``."""
        return _EdgeSum.apply(w, v, self.dst, self.src, self.num_dst)

    def dot_edge(self, q: Tensor, rows: Tensor) -> Tensor:
        """``[N_dst, P, G, C], [E, C] -> [E, P, G]``."""
        return _EdgeDot.apply(q, rows[:, None], self.dst, self._every_edge())

    def sum_edge(self, w: Tensor, rows: Tensor) -> Tensor:
        """``[E, P, G], [E, C] -> [N_dst, P, G, C]``."""
        return _EdgeSum.apply(w, rows[:, None], self.dst, self._every_edge(), self.num_dst)

    def softmax(self, score: Tensor) -> Tensor:
        """``[E, K] -> [E, K]``, over the in-edges of each target."""
        return _EdgeSoftmax.apply(score, self.dst, self.num_dst)

    def _every_edge(self) -> Tensor:
        return torch.arange(self.dst.numel(), device=self.dst.device)


def _slices(num_edges: int, row_elements: int) -> Iterator[slice]:
    """Slices of edges that are gathered at once; everything at once while a compiler traces."""
    if torch.compiler.is_compiling():
        yield slice(None)
        return
    step = max(64, _SLICE_ELEMENTS // max(1, row_elements))
    for start in range(0, num_edges, step):
        yield slice(start, start + step)


class _EdgeDot(torch.autograd.Function):
    """``[E, P, G]``: dot product of the features at the two ends of each edge."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        out = q.new_empty(dst.numel(), *q.shape[1:3])
        for part in _slices(dst.numel(), q[0].numel() if q.size(0) else 1):
            q_rows, k_rows = q.index_select(0, dst[part]), k.index_select(0, src[part])
            out[part] = q_rows.mul_(k_rows.unsqueeze(2)).sum(dim=-1)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, dst, src = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        grad_q = _EdgeSum.apply(grad, k, dst, src, q.size(0)) if needs_q else None
        grad_k = _EdgeSumAtSource.apply(grad, q, dst, src, k.shape[:2]) if needs_k else None
        return grad_q, grad_k, None, None


class _EdgeSum(torch.autograd.Function):
    """``[N_dst, P, G, D]``: weighted sum of the source features of each target's in-edges."""

    @staticmethod
    def forward(w: Tensor, v: Tensor, dst: Tensor, src: Tensor, num_dst: int) -> Tensor:
        out = w.new_zeros(num_dst, *w.shape[1:], v.size(-1))
        for part in _slices(dst.numel(), out[0].numel() if num_dst else 1):
            rows = w[part].unsqueeze(-1) * v.index_select(0, src[part]).unsqueeze(2)
            out.view(num_dst, -1).index_add_(0, dst[part], rows.flatten(1))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, v, dst, src = ctx.saved_tensors
        needs_w, needs_v = ctx.needs_input_grad[:2]
        grad_w = _EdgeDot.apply(grad, v, dst, src) if needs_w else None
        grad_v = _EdgeSumAtSource.apply(w, grad, dst, src, v.shape[:2]) if needs_v else None
        return grad_w, grad_v, None, None, None


class _EdgeSumAtSource(torch.autograd.Function):
    """``[N_src, P, D]``: weighted sum of the target features of each source's out-edges.

    Summed over ``G``, and over ``P`` when ``shape`` has one row there (edge features, shared by all
    heads).
    """

    @staticmethod
    def forward(w: Tensor, q: Tensor, dst: Tensor, src: Tensor, shape: torch.Size) -> Tensor:
        num_src, rows_p = shape
        out = w.new_zeros(num_src, rows_p, q.size(-1))
        for part in _slices(dst.numel(), q[0].numel() if q.size(0) else 1):
            rows = (q.index_select(0, dst[part]).mul_(w[part].unsqueeze(-1))).sum(2)
            rows = rows.sum_to_size(rows.size(0), rows_p, rows.size(-1))
            out.view(num_src, -1).index_add_(0, src[part], rows.flatten(1))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, q, dst, src = ctx.saved_tensors
        needs_w, needs_q = ctx.needs_input_grad[:2]
        grad_w = _EdgeDot.apply(q, grad, dst, src) if needs_w else None
        grad_q = _EdgeSum.apply(w, grad, dst, src, q.size(0)) if needs_q else None
        return grad_w, grad_q, None, None, None


class _EdgeSoftmax(torch.autograd.Function):
    """``[E, K]``: softmax of each column over the in-edges of each target.

    Each target's own maximum is subtracted first. A target whose scores are all ``-inf`` has
    nothing to attend to: its weights are zero, as is their gradient.
    """

    @staticmethod
    def forward(score: Tensor, dst: Tensor, num_dst: int) -> Tensor:
        index = dst[:, None].expand_as(score)
        shape = (num_dst, score.size(1))
        top = score.new_full(shape, float("-inf")).scatter_reduce_(0, index, score, "amax")
        top.masked_fill_(top == float("-inf"), 0.0)
        weight = (score - top.index_select(0, dst)).exp_()
        total = score.new_zeros(shape).index_add_(0, dst, weight)
        total.masked_fill_(total == 0.0, 1.0)
        # Not in place: torch.compile of torch 2.11 would save what the weight was before.
        return weight / total.index_select(0, dst)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.num_dst = inputs[2]
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dst, weight = ctx.saved_tensors
        product = weight * grad
        mean = product.new_zeros(ctx.num_dst, product.size(1)).index_add(0, dst, product)
        return product - weight * mean.index_select(0, dst), None, None
