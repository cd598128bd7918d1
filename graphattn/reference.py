"""Dense masked attention, the N x N form: what every sparse path is judged by."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from graphattn.graph import Graph

__all__ = ["dense_attention"]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | Graph | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Multi-head attention over all pairs of query and key, with a mask; output and weights.

    .. math:: O_i = \sum_j A_{ij} V_j, \qquad
        A_{ij} = \frac{m_{ij} \, e^{s_{ij} - \max_k s_{ik}}}{\sum_k m_{ik} \, e^{s_{ik} - \max_l
        s_{il}}}, \qquad s_{ij} = \mathrm{scale} \cdot \langle Q_i, K_j \rangle + b_{ij}

    where :math:`m_{ij}` is 1 where attention is allowed and 0 elsewhere; for a
    :class:`~graphattn.Graph` it is the number of parallel edges. A query that may attend to nothing
    gets zero, and so do its gradients. Computed in the dtype of the inputs, float32 at least; give
    float64 for a reference. Source: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762),
    eq. 1, with a mask.

    Args:
        query: ``[*, N_dst, H, D]``.
        key: ``[*, N_src, Hk, D]`` with ``Hk`` dividing ``H``; head ``h`` of the query reads head
            ``h // (H / Hk)``.
        value: ``[*, N_src, Hk, Dv]``.
        allowed: bool ``[*, H or 1, N_dst, N_src]`` or ``[N_dst, N_src]``, True where query i may
            attend to key j; or a ``Graph``; or ``None`` for all pairs.
        bias: Added to the scores. With a mask or none: broadcastable to ``[*, H, N_dst, N_src]``.
            With a ``Graph``: ``[E, H]`` or ``[*, E, H]``, one number for each edge and head, in the
            caller's edge order.
        scale: Factor on the dot products. Default ``1 / sqrt(D)``.
        max_bytes: Refuse a call whose N x N tensors would take more. Default: the memory of the
            device.

    Returns:
        ``(output, weights)``: ``[*, N_dst, H, Dv]`` and ``[*, H, N_dst, N_src]``, both in the
        query's dtype. The weight of a pair with parallel edges is the sum over them.

    Raises:
        TypeError: ``allowed`` is neither bool nor a ``Graph``.
        ValueError: The graph has other numbers of sources or targets, or the heads of key do not
            divide those of query.
        MemoryError: The call needs more than ``max_bytes``.

    >>> from graphattn import Graph, dense_attention
    >>> x = torch.eye(3).view(3, 1, 3)
    >>> output, weights = dense_attention(x, x, x, Graph(torch.tensor([[0], [1]]), num_nodes=3))
    >>> weights[0]
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [0., 0., 0.]])
    """
    if isinstance(allowed, Tensor) and allowed.dtype != torch.bool:
        raise TypeError(
            "dense_attention: allowed must be bool (True where attention is allowed), got "
            f"{allowed.dtype}. Give additive masks as bias."
        )
    if allowed is not None and not isinstance(allowed, (Tensor, Graph)):
        raise TypeError(
            "dense_attention: allowed must be a bool tensor or a Graph, got "
            f"{type(allowed).__name__}."
        )
    num_dst, heads, head_dim = query.shape[-3:]
    num_src, key_heads = key.shape[-3:-1]
    if isinstance(allowed, Graph) and (allowed.num_src, allowed.num_dst) != (num_src, num_dst):
        raise ValueError(
            f"dense_attention: the graph has {allowed.num_src} sources and {allowed.num_dst} "
            f"targets, but key has {num_src} rows and query {num_dst}."
        )
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(
            f"dense_attention: the number of key heads must divide the {heads} query heads, got "
            f"{key_heads}."
        )
    compute = torch.promote_types(query.dtype, torch.float32)
    _refuse_if_too_large(
        query.shape[:-3].numel() * heads,
        num_dst,
        num_src,
        compute.itemsize,
        query.device,
        max_bytes,
    )

    q = query.to(compute).movedim(-2, -3)  # [*, H, N_dst, D]
    k = key.to(compute).movedim(-2, -3).repeat_interleave(heads // key_heads, dim=-3)
    v = value.to(compute).movedim(-2, -3).repeat_interleave(heads // key_heads, dim=-3)
    extra = None if bias is None else bias.to(compute)
    if isinstance(allowed, Graph):
        extra, allowed = _pairs(allowed, extra, compute)
    # 0 * NaN is NaN: with NaN or inf about, what is not allowed must not even be multiplied by
    # zero.
    by_pair = allowed is not None and not all(bool(x.isfinite().all()) for x in (q, k, v))

    score = (q.unsqueeze(-2) * _at_pairs(k, allowed)).sum(-1) if by_pair else q @ k.mT
    score = score * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    if extra is not None:
        score = score + extra
    if allowed is not None:
        score = score.masked_fill(~allowed, float("-inf"))
    nothing = (score == float("-inf")).all(dim=-1, keepdim=True)
    weight = torch.softmax(score.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)
    output = (weight.unsqueeze(-1) * _at_pairs(v, allowed)).sum(-2) if by_pair else weight @ v
    output = output.masked_fill(nothing, 0.0)  # stops a NaN gradient that arrives at such a row
    return output.movedim(-3, -2).to(query.dtype), weight.to(query.dtype)


def _at_pairs(x: Tensor, allowed: Tensor | None) -> Tensor:
    """``[*, N_src, D] -> [*, N_dst, N_src, D]``, zero where attention is not allowed."""
    pairs = x.unsqueeze(-3)
    return pairs if allowed is None else pairs.masked_fill(~allowed.unsqueeze(-1), 0.0)


def _pairs(graph: Graph, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(log sum exp(bias) over the parallel edges of each pair, pairs that have an edge)``."""
    src, dst = graph.edge_index
    if bias is None:
        bias = torch.zeros(graph.num_edges, 1, dtype=dtype, device=graph.device)
    rows = bias.movedim(-1, -2)  # [*, H, E]
    pair = (dst * graph.num_src + src).expand(rows.shape)
    shape = (*rows.shape[:-1], graph.num_dst * graph.num_src)
    top = rows.new_full(shape, float("-inf")).scatter_reduce(-1, pair, rows.detach(), "amax")
    top = top.masked_fill(top == float("-inf"), 0.0)
    total = rows.new_zeros(shape).scatter_add(-1, pair, (rows - top.gather(-1, pair)).exp())
    allowed = total > 0
    # log(0) of an absent pair is kept out of the graph of derivatives: its gradient would be
    # infinite.
    extra = total.masked_fill(~allowed, 1.0).log() + top
    square = (*rows.shape[:-1], graph.num_dst, graph.num_src)
    return extra.view(square), allowed.view(square)


def _refuse_if_too_large(
    rows: int,
    num_dst: int,
    num_src: int,
    itemsize: int,
    device: torch.device,
    max_bytes: int | None,
) -> None:
    # Scores, their masked copy and the weights; backward needs as much again, but is not always
    # run.
    need = 3 * rows * num_dst * num_src * itemsize
    if max_bytes is None:
        max_bytes = _memory_of(device)
    if need > max_bytes:
        raise MemoryError(
            f"dense_attention: {num_dst} x {num_src} scores for {rows} heads need about "
            f"{need / 2**30:.1f} GiB, more than {max_bytes / 2**30:.1f} GiB. Use graph_attention, "
            "whose memory grows with the edges."
        )


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
