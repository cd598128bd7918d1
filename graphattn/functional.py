"""Attention along the edges of a graph: document, validate, choose the backend, call it."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from graphattn import _ops, backends
from graphattn._checks import check_probability
from graphattn.backends import composite
from graphattn.dropout import draw_seed
from graphattn.graph import Graph

__all__ = ["attention_weights", "edge_softmax", "graph_attention"]

_T = TypeVar("_T", Tensor, "Tensor | None")


def graph_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: Graph | Tensor,
    *,
    bias: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Multi-head attention in which every target attends to its in-neighbours only.

    .. math:: O_i = \sum_{e = (j \to i)} a_e \, (V_j + W x_e), \qquad
        a_e = \frac{e^{s_e}}{\sum_{e' = (k \to i)} e^{s_{e'}}}, \qquad
        s_e = \mathrm{scale} \cdot \langle Q_i, K_j + W x_e \rangle + b_e

    for each head, with edge features :math:`x_e` and bias :math:`b_e` where they are given. It is
    the softmax attention of "Attention Is All You Need" (https://arxiv.org/abs/1706.03762) with
    everything but the edges masked; with edge features, that of UniMP
    (https://arxiv.org/abs/2009.03509).

    A target without in-edges gets exactly zero. Parallel edges are separate entries of the softmax.
    Self-loops are never added. Scores, softmax and sums are taken in float32 at least. Under
    autocast, query, key and value are cast to its dtype, as for
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: ``[*, N_dst, H, D]``; leading dimensions share the graph.
        key: ``[*, N_src, Hk, D]`` with ``Hk`` dividing ``H`` (grouped-query attention): head ``h``
            of the query reads head ``h // (H / Hk)``.
        value: ``[*, N_src, Hk, Dv]``.
        graph: A :class:`~graphattn.Graph` with ``N_src`` sources and ``N_dst`` targets, or an
            ``edge_index`` ``[2, E]`` (see :meth:`graphattn.Graph.of` for what it is remembered by).
        bias: ``[E, H]``, or ``[*, E, H]``, added to the scores, in the caller's edge order. An edge
            with ``-inf`` has weight zero.
        edge_attr: ``[E, C]``, features added to key and value of each edge after the map
            ``edge_weight``; no ``[E, H, D]`` tensor is made for them.
        edge_weight: ``[H, D, C]``, the map W; needs ``Dv = D``.
        dropout: Probability of dropping each attention weight, the others being scaled by ``1 / (1
            - dropout)``. It acts whenever it is not zero: pass 0 in evaluation. The mask is a
            function of a seed drawn from torch's generator of the device, the edge and the head,
            and so is the same for every backend.
        scale: Factor on the dot products. Default ``1 / sqrt(D)``.
        backend: ``"auto"``, ``"eager"``, ``"scatter"``, ``"cpu"`` or ``"triton"``. Only ``"auto"``
            may choose: any other value runs or raises.

    Returns:
        ``[*, N_dst, H, Dv]`` in the query's dtype.

    Raises:
        TypeError: A dtype is not floating point, or query, key and value differ in it.
        ValueError: Shapes or devices do not fit together, ``dropout`` is not in [0, 1], or the
            backend cannot run the call.
        IndexError: An ``edge_index`` points outside the features.

    Node 2 has two equal keys to attend to, and takes the mean of their values; the others have
    none:

    >>> edge_index = torch.tensor([[0, 1], [2, 2]])
    >>> query = key = torch.ones(3, 1, 4)
    >>> value = torch.tensor([[2.0], [4.0], [8.0]]).view(3, 1, 1)
    >>> graph_attention(query, key, value, edge_index).flatten()
    tensor([0., 0., 3.])

    Keys with four heads of eight, for eight query heads, and a bias for each edge and head:

    >>> query, key = torch.randn(3, 8, 8), torch.randn(3, 4, 8)
    >>> graph_attention(query, key, key, edge_index, bias=torch.zeros(2, 8)).shape
    torch.Size([3, 8, 8])
    """
    name = "graph_attention"
    _check_floating(name, query=query)
    device = query.device.type
    query, key, value = (_autocast(x, device) for x in (query, key, value))
    edge_attr, edge_weight = _autocast(edge_attr, device), _autocast(edge_weight, device)
    _check_query_and_key(name, query, key)
    _check_value(name, query, key, value)
    graph = _as_graph(name, graph, query, key)
    _check_device(name, graph.device, value=value)
    _check_edge_tensors(name, query, graph, bias, edge_attr, edge_weight)
    if edge_weight is not None and value.size(-1) != query.size(-1):
        raise ValueError(
            f"{name}: edge features are added to key and value, so value_dim must equal head_dim "
            f"{query.size(-1)}, got {value.size(-1)}."
        )
    check_probability(name, dropout=dropout)
    out = _attention(
        _choose(name, backend, query, value, edge_attr),
        query,
        key,
        value,
        graph,
        bias,
        edge_attr,
        edge_weight,
        1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
        dropout,
    )
    return out if out.dtype == query.dtype else out.to(query.dtype)


def attention_weights(
    query: Tensor,
    key: Tensor,
    graph: Graph | Tensor,
    *,
    bias: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """The weights :math:`a_e` of :func:`graph_attention`, before dropout.

    Arguments and errors are those of :func:`graph_attention`.

    Returns:
        ``[*, E, H]`` in the query's dtype and the caller's edge order. Those of one target's
        in-edges sum to 1.

    >>> edge_index = torch.tensor([[0, 1, 0], [2, 2, 1]])
    >>> attention_weights(torch.ones(3, 1, 4), torch.ones(3, 1, 4), edge_index).flatten()
    tensor([0.5000, 0.5000, 1.0000])
    """
    name = "attention_weights"
    _check_floating(name, query=query)
    device = query.device.type
    query, key = _autocast(query, device), _autocast(key, device)
    edge_attr, edge_weight = _autocast(edge_attr, device), _autocast(edge_weight, device)
    _check_query_and_key(name, query, key)
    graph = _as_graph(name, graph, query, key)
    _check_edge_tensors(name, query, graph, bias, edge_attr, edge_weight)
    weights = _attention(
        _choose(name, backend, query, None, edge_attr),
        query,
        key,
        None,
        graph,
        bias,
        edge_attr,
        edge_weight,
        1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
        0.0,
    )
    return weights if weights.dtype == query.dtype else weights.to(query.dtype)


def edge_softmax(scores: Tensor, graph: Graph, *, backend: str = "auto") -> Tensor:
    r"""Softmax of scores over the in-edges of each target.

    .. math:: a_e = \frac{e^{s_e - m_i}}{\sum_{e' = (k \to i)} e^{s_{e'} - m_i}}, \qquad
        m_i = \max_{e' = (k \to i)} s_{e'}, \qquad e = (j \to i)

    Args:
        scores: ``[E, *]``, in the caller's edge order; each trailing position is a softmax of its
            own.
        graph: The graph, whose number of targets a plain ``edge_index`` would not tell.
        backend: As in :func:`graph_attention`.

    Returns:
        ``[E, *]`` in the dtype of ``scores``, computed in float32 at least.

    Raises:
        TypeError: ``scores`` is not floating point, or ``graph`` is not a
            :class:`~graphattn.Graph`.
        ValueError: ``scores`` does not have one row for each edge, or is on another device.

    >>> graph = Graph(torch.tensor([[0, 1, 0], [2, 2, 1]]), num_nodes=3)
    >>> edge_softmax(torch.tensor([1e5, -1e5, 7.0]), graph)
    tensor([1., 0., 1.])
    """
    name = "edge_softmax"
    if not isinstance(graph, Graph):
        raise TypeError(
            f"{name}: graph must be a Graph, got {type(graph).__name__}. Use Graph(edge_index, "
            "num_nodes)."
        )
    _check_floating(name, scores=scores)
    if scores.dim() == 0 or scores.size(0) != graph.num_edges:
        raise ValueError(
            f"{name}: scores must have one row for each of the {graph.num_edges} edges, got shape "
            f"{tuple(scores.shape)}."
        )
    _check_device(name, graph.device, scores=scores)
    chosen = backends.choose(backend, scores.device, scores.dtype, function=name)
    if scores.numel() == 0:
        return scores.clone()
    # The weights of attention whose scores are all bias: every column is a head of no channels.
    columns = scores.flatten(1) if scores.dim() > 1 else scores.unsqueeze(1)
    query, key = (columns.new_empty(n, columns.size(1), 0) for n in (graph.num_dst, graph.num_src))
    weights = _attention(chosen, query, key, None, graph, columns, None, None, 1.0, 0.0)
    return weights.view(scores.shape).to(scores.dtype)


def _attention(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    graph: Graph,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """The output, or the weights where there is no ``value``: the one way to every backend."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _attention(
                backend, query, key, value, graph, bias, edge_attr, edge_weight, scale, dropout
            )
    seed = draw_seed(query.device) if dropout > 0.0 else None
    empty = query_edge = None
    if edge_attr is not None and edge_weight is not None:
        empty = graph.in_degree() == 0
        query_edge = composite.project_query(query, edge_weight, empty)
    inputs = (query, key, value, bias, query_edge, edge_attr)
    mixed: Tensor | None
    if backend in backends.FUSED:
        arrays = _arrays(graph, inputs)
        out, mixed, _ = _ops.attention(*inputs, *arrays, seed, scale, dropout, backend)
    else:
        out, mixed = composite.attention(
            _edge_operations(backend, graph),
            graph.edge_id,
            *inputs,
            seed,
            scale=scale,
            dropout=dropout,
        )
    if value is None or edge_weight is None or empty is None or mixed is None:
        return out
    return composite.add_mixed(out, mixed, edge_weight, empty)


def _choose(
    name: str, backend: str, query: Tensor, value: Tensor | None, edge_attr: Tensor | None
) -> str:
    dims = {"head_dim": query.size(-1)}
    if value is not None:
        dims["value_dim"] = value.size(-1)
    if edge_attr is not None:
        dims["edge_dim"] = edge_attr.size(-1)
    return backends.choose(backend, query.device, query.dtype, dims, function=name)


def _arrays(graph: Graph, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The graph as the operators take it; sorted by source only if a gradient will need that."""
    by_target = (graph.dst_ptr, graph.src_index, graph.edge_id)
    _, key, value, bias, _, edge_attr = inputs
    needed = any(x is not None and x.requires_grad for x in (key, value, bias, edge_attr))
    if not needed and not torch.compiler.is_compiling():
        # A transform of torch.func may take gradients of what it hides here.
        needed = torch._C._are_functorch_transforms_active()
    if needed and torch.is_grad_enabled():
        return *by_target, graph.src_ptr, graph.dst_index, graph.edge_id_by_src
    return *by_target, None, None, None


def _edge_operations(backend: str, graph: Graph) -> composite.EdgeOperations:
    if backend == "scatter":
        from graphattn.backends import scatter

        return scatter.EdgeOperations(
            graph.dst_ptr, graph.edge_id, graph.src_ptr, graph.edge_id_by_src
        )
    from graphattn.backends import eager

    return eager.EdgeOperations(graph.src_index, graph.target, graph.num_dst)


# Validation #######################################################################################


def _autocast(x: _T, device: str) -> _T:
    """``x`` in the dtype that autocast asks for on ``device``; float64 stays, as in torch."""
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(device):
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))


def _check_floating(name: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}.")
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name}: {argument} must be floating point, got {tensor.dtype}. Use "
                f"{argument}.float(), or embed categories first."
            )


def _check_device(name: str, device: torch.device, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{name}: {argument} is on {tensor.device}, but the graph is on {device}. Move one "
                f"of them, for example graph.to({str(tensor.device)!r})."
            )


def _check_query_and_key(name: str, query: Tensor, key: Tensor) -> None:
    _check_floating(name, key=key)
    if query.dim() < 3:
        raise ValueError(
            f"{name}: query must have shape (*, num_dst, heads, head_dim), got "
            f"{tuple(query.shape)}."
            + (" Use query.unsqueeze(1) for one head." if query.dim() == 2 else "")
        )
    heads, head_dim = query.shape[-2:]
    if head_dim == 0 or heads == 0:
        raise ValueError(
            f"{name}: query needs at least one head and one channel, got {tuple(query.shape)}."
        )
    _check_source(name, "key", key, query, (heads, head_dim))
    if key.size(-1) != head_dim:
        raise ValueError(
            f"{name}: key must have the query's head_dim {head_dim}, got shape {tuple(key.shape)}."
        )
    if key.size(-2) == 0 or heads % key.size(-2) != 0:
        raise ValueError(
            f"{name}: the number of key heads must divide the {heads} query heads, got "
            f"{key.size(-2)}."
        )


def _check_value(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    _check_floating(name, value=value)
    _check_source(name, "value", value, query, (key.size(-2), query.size(-1)))
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"{name}: value must have the sources and heads of key {tuple(key.shape[-3:-1])}, got "
            f"{tuple(value.shape[-3:-1])}."
        )


def _check_source(
    name: str, argument: str, tensor: Tensor, query: Tensor, heads_and_dim: tuple[int, int]
) -> None:
    if tensor.dtype != query.dtype:
        raise TypeError(
            f"{name}: query, key and value must have one dtype, got {query.dtype} for query and "
            f"{tensor.dtype} for {argument}. Use {argument}.to(query.dtype)."
        )
    if tensor.dim() == query.dim() - 1 and tensor.size(-1) == math.prod(heads_and_dim):
        shape = (tensor.size(-2), *heads_and_dim)
        view = ", ".join(str(size) for size in (-1, *heads_and_dim))
        raise ValueError(
            f"{name}: {argument} must have shape (num_src, heads, head_dim) = {shape}, got "
            f"{tuple(tensor.shape)}. Use {argument}.view({view})."
        )
    if tensor.dim() != query.dim() or tensor.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            f"{name}: {argument} must have shape (*, num_src, heads, dim) with the query's leading "
            f"dimensions {tuple(query.shape[:-3])}, got {tuple(tensor.shape)} for a query of "
            f"{tuple(query.shape)}."
        )


def _as_graph(name: str, graph: Graph | Tensor, query: Tensor, key: Tensor) -> Graph:
    num_src, num_dst = key.size(-3), query.size(-3)
    if isinstance(graph, Graph) and (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(
            f"{name}: the graph has {graph.num_src} sources and {graph.num_dst} targets, but key "
            f"has {num_src} rows and query {num_dst}."
        )
    graph = Graph.of(graph, (num_src, num_dst))
    _check_device(name, graph.device, query=query, key=key)
    return graph


def _check_edge_tensors(
    name: str,
    query: Tensor,
    graph: Graph,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
) -> None:
    optional = {"bias": bias, "edge_attr": edge_attr, "edge_weight": edge_weight}
    given = {argument: tensor for argument, tensor in optional.items() if tensor is not None}
    _check_floating(name, **given)
    _check_device(name, graph.device, **given)
    num_edges, (heads, head_dim) = graph.num_edges, query.shape[-2:]
    if bias is not None and bias.shape not in (
        (num_edges, heads),
        (*query.shape[:-3], num_edges, heads),
    ):
        raise ValueError(
            f"{name}: bias must have shape (num_edges, heads) = {(num_edges, heads)}, or the "
            f"query's leading dimensions before it, got {tuple(bias.shape)}."
        )
    if (edge_attr is None) != (edge_weight is None):
        one, other = (
            ("edge_attr", "edge_weight") if edge_weight is None else ("edge_weight", "edge_attr")
        )
        raise ValueError(f"{name}: {one} needs {other} beside it.")
    if edge_attr is None or edge_weight is None:
        return
    if edge_attr.dim() != 2 or edge_attr.size(0) != num_edges:
        hint = (
            " Use edge_attr.t()." if edge_attr.dim() == 2 and edge_attr.size(1) == num_edges else ""
        )
        raise ValueError(
            f"{name}: edge_attr must have shape (num_edges, edge_dim) with {num_edges} edges, got "
            f"{tuple(edge_attr.shape)}.{hint}"
        )
    if edge_weight.shape != (heads, head_dim, edge_attr.size(1)):
        raise ValueError(
            f"{name}: edge_weight must have shape (heads, head_dim, edge_dim) = "
            f"{(heads, head_dim, edge_attr.size(1))}, got {tuple(edge_weight.shape)}."
        )
