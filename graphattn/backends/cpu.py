"""The fused kernels for CPU: arguments of ``cpu.cpp`` from tensors, and its results as tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graphattn import _native
from graphattn._native import check_status, library
from graphattn.backends import arguments

__all__ = ["attention", "attention_backward"]


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Attention(ctypes.Structure):
    """``struct Attention`` of ``cpu.cpp``, where its fields are described."""

    _fields_ = (
        *_fields(ctypes.c_int64, "batch num_dst num_src num_edges heads key_heads"),
        *_fields(ctypes.c_int64, "head_dim value_dim edge_dim dtype threads"),
        *_fields(ctypes.c_void_p, "dst_ptr src_index edge_id"),
        *_fields(ctypes.c_void_p, "src_ptr dst_index edge_id_by_src"),
        *_fields(ctypes.c_double, "scale dropout"),
        *_fields(ctypes.c_int64, "seed"),
        *_fields(_Rows, "query key value"),
        *_fields(ctypes.c_void_p, "bias edge_attr"),
        *_fields(ctypes.c_int64, "bias_dtype bias_batch_stride edge_attr_dtype"),
        *_fields(ctypes.c_void_p, "query_edge out weights mixed softmax"),
        *_fields(_Rows, "grad_out"),
        *_fields(ctypes.c_void_p, "grad_weights grad_mixed grad_query grad_key grad_value"),
        *_fields(ctypes.c_void_p, "grad_bias grad_query_edge grad_edge_attr"),
    )


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
    wide = torch.promote_types(query.dtype, torch.float32)
    edge_dim = 0 if edge_attr is None else edge_attr.size(-1)
    mixed = query.new_empty(*leading, num_dst, heads, edge_dim, dtype=wide)
    softmax = query.new_empty(*leading, num_dst, 2, heads, dtype=wide)
    call, kept = _call(query, key, value, bias, query_edge, edge_attr, seed, scale, dropout)
    _by_target(call, dst_ptr, src_index, edge_id)
    call.mixed, call.softmax = mixed.data_ptr(), softmax.data_ptr()
    if value is None:
        out = query.new_empty(*leading, src_index.numel(), heads)
        call.weights = out.data_ptr()
    else:
        out = query.new_empty(*leading, num_dst, heads, value.size(-1))
        call.out = out.data_ptr()
    check_status(library().graphattn_forward(ctypes.byref(call)))
    del kept
    return out, mixed, softmax


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
    call, kept = _call(query, key, value, bias, query_edge, edge_attr, seed, scale, dropout)
    _by_target(call, dst_ptr, src_index, edge_id)
    call.softmax = softmax.data_ptr()
    if value is None:
        grad_weights = None if grad_out is None else grad_out.contiguous()
        call.grad_weights = _pointer(grad_weights)
        call.grad_out = call.query
        kept += (grad_weights,)
    else:
        if grad_out is None:
            grad_out = query.new_zeros(*query.shape[:-1], value.size(-1))
        call.grad_out, grad_rows = _rows(grad_out)
        kept += (grad_rows,)
    grad_mixed = None if grad_mixed is None else grad_mixed.contiguous()
    call.grad_mixed = _pointer(grad_mixed)

    # Those of edge features and bias are summed up in the wide dtype.
    wide = softmax.dtype
    inputs = (query, key, value, bias, query_edge, edge_attr)
    # With no rows at all, nobody writes the gradients of what the rows would share.
    make = torch.zeros if call.batch == 0 else torch.empty
    gradients = [
        make(x.shape, dtype=wide if place > 2 else x.dtype) if need and x is not None else None
        for place, (x, need) in enumerate(zip(inputs, needs, strict=True))
    ]
    call.grad_query, call.grad_key, call.grad_value = map(_pointer, gradients[:3])
    call.grad_bias, call.grad_query_edge, call.grad_edge_attr = map(_pointer, gradients[3:])
    if needs[1] or needs[2] or needs[3] or needs[5]:
        by_source = arguments.by_source(src_ptr, dst_index, edge_id_by_src)
        call.src_ptr, call.dst_index, call.edge_id_by_src = (x.data_ptr() for x in by_source)
    check_status(library().graphattn_backward(ctypes.byref(call)))
    del kept
    return [
        grad.to(x.dtype)
        for x, grad in zip(inputs, gradients, strict=True)
        if x is not None and grad is not None
    ]


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[_Attention, tuple[Tensor | None, ...]]:
    """The inputs of a call, and the tensors that have to stay alive during it."""
    call = _Attention()
    call.batch = query.shape[:-3].numel()
    call.num_dst, call.heads, call.head_dim = query.shape[-3:]
    call.num_src, call.key_heads = key.shape[-3:-1]
    call.dtype, call.threads = _native.DTYPES.index(query.dtype), _native.num_threads()
    call.scale, call.dropout = scale, dropout
    if seed is not None:
        call.seed = seed.item()
    call.query, q = _rows(query)
    call.key, k = _rows(key)
    v = None
    if value is None:
        call.value = call.key
    else:
        call.value_dim = value.size(-1)
        call.value, v = _rows(value)
    if bias is not None:
        bias = bias.contiguous()
        call.bias, call.bias_dtype = bias.data_ptr(), _native.DTYPES.index(bias.dtype)
        call.bias_batch_stride = bias.shape[-2:].numel() if bias.dim() > 2 else 0
    if edge_attr is not None and query_edge is not None:
        edge_attr, query_edge = edge_attr.contiguous(), query_edge.contiguous()
        call.edge_attr, call.edge_attr_dtype = (
            edge_attr.data_ptr(),
            _native.DTYPES.index(edge_attr.dtype),
        )
        call.edge_dim, call.query_edge = edge_attr.size(-1), query_edge.data_ptr()
    return call, (q, k, v, bias, edge_attr, query_edge)


def _by_target(
    call: _Attention, dst_ptr: Tensor, src_index: Tensor, edge_id: Tensor | None
) -> None:
    call.num_edges = src_index.numel()
    call.dst_ptr, call.src_index = dst_ptr.data_ptr(), src_index.data_ptr()
    call.edge_id = _pointer(edge_id)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(tensor: Tensor) -> tuple[_Rows, Tensor]:
    """``[*, N, H, D]`` as the kernel reads it, and the tensor to keep."""
    tensor, batch_stride, row_stride = arguments.rows(tensor)
    return _Rows(tensor.data_ptr(), batch_stride, row_stride), tensor
