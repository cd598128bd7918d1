"""What the fused backends make of their arguments: checks and rows in memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["by_source", "check", "rows"]


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_edge: Tensor | None,
    arrays: tuple[Tensor | None, ...],
    seed: Tensor | None,
    dropout: float,
) -> None:
    """Raises for what would be read as something else if a caller of the operator got it wrong."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if key.dtype != query.dtype or (value is not None and value.dtype != query.dtype):
        raise TypeError("graphattn::attention: query, key and value must have one dtype.")
    if query_edge is not None and query_edge.dtype != wide:
        raise TypeError(f"graphattn::attention: query_edge must be {wide}.")
    if any(array is not None and array.dtype != torch.int64 for array in arrays):
        raise TypeError("graphattn::attention: the arrays of the graph must be int64.")
    if dropout > 0.0 and seed is None:
        raise ValueError("graphattn::attention: dropout needs a seed.")


def by_source(
    src_ptr: Tensor | None, dst_index: Tensor | None, edge_id_by_src: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays by source. Raises ``ValueError`` where the forward call left them out."""
    if src_ptr is None or dst_index is None or edge_id_by_src is None:
        raise ValueError(
            "graphattn::attention_backward: gradients of key, value, bias and edge_attr need "
            "src_ptr, dst_index and edge_id_by_src, which the call of graphattn::attention left "
            "out."
        )
    return src_ptr, dst_index, edge_id_by_src


def rows(tensor: Tensor) -> tuple[Tensor, int, int]:
    """``[*, N, H, D]`` as kernels read it: ``(tensor, batch stride, row stride)`` in elements.

    Heads and channels of a row are contiguous; a copy is made only where they are not, or where the
    leading dimensions do not make one.
    """
    heads, dim = tensor.shape[-2:]
    if (dim > 1 and tensor.stride(-1) != 1) or (heads > 1 and tensor.stride(-2) != dim):
        tensor = tensor.contiguous()
    if tensor.dim() > 4:
        tensor = tensor.flatten(0, -4)
    return tensor, tensor.stride(0) if tensor.dim() == 4 else 0, tensor.stride(-3)
