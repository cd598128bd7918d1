"""The operators ``torch.ops.graphattn`` of the fused kernels, and how they are differentiated.

``attention`` returns ``(out, mixed, softmax)``: for each target the weighted sum of values
``[*, N_dst, H, Dv]``; that of edge features ``[*, N_dst, H, C]``; and from its scores the largest
one and the reciprocal of the sum of exponentials, ``[*, N_dst, 2, H]``. Without value, ``out`` is
the weight of each edge, ``[*, E, H]``. With edge features comes what each target multiplies them
with, ``query_edge [*, N_dst, H, C]``. ``backend`` is the name of the kernels that run.

``attention_backward`` returns those of the six gradients that are asked for. The arrays by source
are needed for it only. A second derivative is taken through
:mod:`graphattn.backends.composite`, which can be differentiated again and again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from graphattn.backends import composite, cpu, eager

__all__ = ["attention"]

_INPUTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? bias, Tensor? query_edge, Tensor? edge_attr"
)
_GRAPH = (
    "Tensor dst_ptr, Tensor src_index, Tensor? edge_id, "
    "Tensor? src_ptr, Tensor? dst_index, Tensor? edge_id_by_src"
)
_NUM_INPUTS = 6

_library = library.Library("graphattn", "DEF")
_library.define(
    f"attention({_INPUTS}, {_GRAPH}, Tensor? seed, float scale, float dropout, str backend)"
    " -> (Tensor out, Tensor mixed, Tensor softmax)"
)
_library.define(
    f"attention_backward(Tensor? grad_out, Tensor? grad_mixed, {_INPUTS}, {_GRAPH}, Tensor? seed, "
    "float scale, float dropout, str backend, Tensor softmax, bool[6] needs) -> Tensor[]"
)


def _kernels(backend: str) -> Any:
    if backend == "cpu":
        return cpu
    if backend == "triton":
        from graphattn.backends import triton

        return triton
    raise ValueError(f"graphattn::attention: there are no kernels {backend!r}.")


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *rest, backend = arguments
    return _kernels(backend).attention(*rest)


def _attention_backward(*arguments: Any) -> list[Tensor]:
    *rest, backend, softmax, needs = arguments
    return _kernels(backend).attention_backward(*rest, softmax, needs)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)
    _library.impl("attention_backward", _attention_backward, _device)


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.graphattn.attention``, which ``torch.func`` transforms can go through as well."""
    if torch.compiler.is_compiling():
        return torch.ops.graphattn.attention(*arguments)
    # Not by way of the dispatcher: torch.func knows how to transform the function.
    return _autograd(*arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.graphattn.attention(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, ctx.dropout, ctx.backend = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_mixed: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, softmax = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:_NUM_INPUTS])
        arguments = (grad_out, grad_mixed, *tensors, ctx.scale, ctx.dropout, ctx.backend)
        if torch.is_grad_enabled():
            gradients = iter(_differentiable_backward(needs, *arguments))
        else:
            gradients = iter(torch.ops.graphattn.attention_backward(*arguments, softmax, needs))
        rest = [None] * (len(ctx.needs_input_grad) - _NUM_INPUTS)
        return *(next(gradients) if need else None for need in needs), *rest

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """One more leading dimension; dropout draws each of its rows a mask of its own."""
        if any(dim is not None for dim in in_dims[5:]):
            raise NotImplementedError(
                "graphattn: torch.func.vmap goes over query, key, value and bias; edge features, "
                "the graph and the dropout seed must be the same for all."
            )
        along_nodes: list[Any] = [
            _with_batch(x, dim, info.batch_size)
            for x, dim in zip(arguments[:5], in_dims[:5], strict=True)
        ]
        query, key, value, bias, query_edge = along_nodes
        if bias is not None:
            for _ in range(query.dim() - 1 - bias.dim()):  # leading dimensions it had not
                bias = bias.unsqueeze(1)
            bias = bias.expand(*query.shape[:-3], *bias.shape[-2:])
        out = _Attention.apply(query, key, value, bias, query_edge, *arguments[5:])
        return out, (0, 0, 0)


def _with_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _differentiable_backward(
    needs: list[bool], grad_out: Tensor | None, grad_mixed: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs = arguments[:_NUM_INPUTS]
    dst_ptr, src_index, edge_id, *_, seed, scale, dropout, _ = arguments[_NUM_INPUTS:]
    target = torch.repeat_interleave(dst_ptr.diff(), output_size=src_index.numel())
    edges = eager.EdgeOperations(src_index, target, dst_ptr.numel() - 1)
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    # Without values or edge features, there is nothing in mixed.
    grads: list[Any] = [grad_out, None if inputs[2] is None or inputs[5] is None else grad_mixed]
    if all(grad is None for grad in grads):
        return tuple(torch.zeros_like(x) for x in wanted)

    def outputs(*wanted: Any) -> list[Any]:
        given = iter(wanted)
        query, key, value, bias, query_edge, edge_attr = (
            next(given) if need else x for x, need in zip(inputs, needs, strict=True)
        )
        results: tuple[Any, Any] = composite.attention(
            edges,
            edge_id,
            query,
            key,
            value,
            bias,
            query_edge,
            edge_attr,
            seed,
            scale=scale,
            dropout=dropout,
        )
        pairs = zip(results, grads, strict=True)
        return [x.to(grad.dtype) for x, grad in pairs if grad is not None]

    backward = torch.func.vjp(outputs, *wanted)[1]
    return backward([grad for grad in grads if grad is not None])


def _autograd(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch._C._are_functorch_transforms_active():
        return _Attention.apply(*arguments)
    # What apply comes to without a transform. On the way there it reads the signature of forward in
    # every call, which on a graph of 30 nodes takes longer than the attention.
    return super(torch.autograd.Function, _Attention).apply(*arguments)


_library.impl("attention", _autograd, "Autograd")


def _autocast(device: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in the dtype that autocast asks for; the rest goes as it is."""
    dtype = torch.get_autocast_dtype(device)
    cast = (x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in arguments[:3])
    with torch.autocast(device, enabled=False):
        return torch.ops.graphattn.attention(*cast, *arguments[3:])


_library.impl("attention", lambda *arguments: _autocast("cpu", *arguments), "AutocastCPU")
_library.impl("attention", lambda *arguments: _autocast("cuda", *arguments), "AutocastCUDA")


@library.register_fake("graphattn::attention", lib=_library)
def _attention_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    query_edge: Tensor | None,
    edge_attr: Tensor | None,
    dst_ptr: Tensor,
    src_index: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    leading, (num_dst, heads) = query.shape[:-3], query.shape[-3:-1]
    rows = (*leading, num_dst, heads)
    wide = torch.promote_types(query.dtype, torch.float32)
    shape = (*leading, src_index.size(0), heads) if value is None else (*rows, value.size(-1))
    edge_dim = 0 if edge_attr is None else edge_attr.size(-1)
    return (
        query.new_empty(shape),
        query.new_empty((*rows, edge_dim), dtype=wide),
        query.new_empty((*leading, num_dst, 2, heads), dtype=wide),
    )


@library.register_fake("graphattn::attention_backward", lib=_library)
def _attention_backward_shapes(
    grad_out: Tensor | None, grad_mixed: Tensor | None, *arguments: Any
) -> list[Tensor]:
    inputs, needs = arguments[:_NUM_INPUTS], arguments[-1]
    return [x.new_empty(x.shape) for x, need in zip(inputs, needs, strict=True) if need]
