"""The structure that attention runs along: an ``edge_index``, checked once and sorted once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import is_torch_sparse_tensor
from torch_geometric.utils.sparse import ptr2index

from graphattn import _native

__all__ = ["Graph"]

_T = TypeVar("_T")


def _once(compute: Callable[[Graph], _T]) -> Callable[[Graph], _T]:
    """Kept in the graph. ``functools.cached_property`` takes a lock that no compiler can trace."""

    @wraps(compute)
    def kept(graph: Graph) -> _T:
        if compute.__name__ not in graph._kept:
            graph._kept[compute.__name__] = _lasting(compute, graph)
        return graph._kept[compute.__name__]

    return kept


def _lasting(compute: Callable[..., _T], *arguments: Any) -> _T:
    """What a graph keeps outlives the ``inference_mode`` or ``torch.func`` call it is made in."""
    with torch.inference_mode(False):
        if torch.compiler.is_compiling():
            return compute(*arguments)
        with torch._C._DisableFuncTorch():
            return compute(*arguments)


class Graph:
    r"""A directed graph in which every target (query) attends to its sources (keys, values).

    Build it once and hand it to every layer: indices are checked and sorted here, never in a call.
    A plain ``edge_index`` given to a layer is turned into a ``Graph`` behind the scenes and kept
    for as long as that very tensor lives unchanged (see :meth:`of`).

    Row 0 of ``edge_index`` holds sources, row 1 targets. The single edge ``0 -> 1`` lets node 1
    attend to node 0, and leaves node 0 with nothing to attend to:

    >>> graph = Graph(torch.tensor([[0], [1]]), num_nodes=3)
    >>> graph
    Graph(num_nodes=3, num_edges=1)
    >>> graph.in_degree()
    tensor([0, 1, 0])

    A graph is frozen. The arrays by target are made at construction, those by source when they are
    first asked for:

    Attributes:
        num_src: Number of sources (rows of key and value).
        num_dst: Number of targets (rows of query).
        num_edges: Number of edges; parallel edges count separately.
        dst_ptr: ``[num_dst + 1]`` int64. Edges of target ``i`` are ``dst_ptr[i]:dst_ptr[i + 1]`` of
            the by-target order.
        src_index: ``[num_edges]`` int64, source of each edge in by-target order.
        edge_id: ``[num_edges]`` int64, the caller's position of each edge in by-target order, or
            ``None`` when the caller's order already is by target.
        src_ptr: ``[num_src + 1]`` int64, like ``dst_ptr`` for the by-source order.
        dst_index: ``[num_edges]`` int64, target of each edge in by-source order.
        edge_id_by_src: ``[num_edges]`` int64, the caller's position of each edge in by-source
            order.

    Args:
        edge_index: ``[2, num_edges]``, int64 or int32, or a PyG ``EdgeIndex``, whose cached
            pointers are used instead of sorting again.
        num_nodes: Number of nodes, or ``(num_src, num_dst)`` when sources and targets are different
            sets. It is never guessed from the largest index; only an ``EdgeIndex`` with a complete
            ``sparse_size`` brings its own.
        validate: Check that every index is in range. Switch off only for indices known to be right.

    Raises:
        TypeError: ``edge_index`` is not an integer tensor of 32 or 64 bits, or ``num_nodes`` is
            missing.
        ValueError: Its shape is not ``[2, num_edges]``, or ``num_nodes`` is negative or disagrees
            with the size of an ``EdgeIndex``.
        IndexError: An index lies outside its own side's range.
    """

    num_src: int
    num_dst: int
    num_edges: int
    dst_ptr: Tensor
    src_index: Tensor
    edge_id: Tensor | None
    _kept: dict[str, Any]

    def __init__(
        self,
        edge_index: Tensor,
        num_nodes: int | tuple[int, int] | None = None,
        *,
        validate: bool = True,
    ) -> None:
        _check_edge_index(edge_index)
        num_src, num_dst = _resolve_num_nodes(edge_index, num_nodes)
        self._set(
            num_src,
            num_dst,
            *_lasting(_arrays_by_target, edge_index, num_src, num_dst, validate),
        )

    def _set(
        self,
        num_src: int,
        num_dst: int,
        dst_ptr: Tensor,
        src_index: Tensor,
        edge_id: Tensor | None,
    ) -> None:
        # Item by item, which compilers can trace.
        self.__dict__["num_src"] = num_src
        self.__dict__["num_dst"] = num_dst
        self.__dict__["num_edges"] = src_index.numel()
        self.__dict__["dst_ptr"] = dst_ptr
        self.__dict__["src_index"] = src_index
        self.__dict__["edge_id"] = edge_id
        self.__dict__["_kept"] = {}

    # Other ways in ################################################################################

    @classmethod
    def of(cls, edge_index: Graph | Tensor, num_nodes: int | tuple[int, int]) -> Graph:
        """The graph of an ``edge_index``, sorted the first time and remembered after that.

        The memory is weak: it ends with the tensor. An in-place change of the tensor is noticed and
        the graph built again (not a change through ``.data`` or a shared NumPy array, and tensors
        made under ``torch.inference_mode()`` are not remembered at all, since they do not count
        their changes).

        Args:
            edge_index: A :class:`Graph` (returned as it is, once its size agrees), an
                ``edge_index`` ``[2, num_edges]``, a PyG ``EdgeIndex`` or a torch sparse ``adj_t``
                ``[num_dst, num_src]``.
            num_nodes: As in :class:`Graph`; usually taken from the features.

        Raises:
            ValueError: The graph has another number of sources or targets than ``num_nodes`` says.
            TypeError, IndexError: As :class:`Graph`.
        """
        size = _as_pair(num_nodes)
        if isinstance(edge_index, Graph):
            return _checked_size(edge_index, size)
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                "Graph.of: expected a Graph, an edge_index [2, num_edges] or a torch sparse "
                f"adj_t, got {_describe(edge_index)}."
            )
        remember = not (torch.compiler.is_compiling() or edge_index.is_inference())
        graph = _recall(edge_index, size) if remember else None
        if graph is None:
            if is_torch_sparse_tensor(edge_index):
                graph = _checked_size(cls.from_sparse(edge_index), size)
            else:
                graph = cls(edge_index, size)
            if remember:
                _remember(edge_index, size, graph)
        return graph

    @classmethod
    def from_sparse(cls, adj_t: Tensor, *, validate: bool = True) -> Graph:
        """The graph of a torch sparse matrix: entry ``[i, j]`` lets target i attend to source j.

        This is PyG's ``adj_t``: rows are targets, as in a dense attention mask. Stored zeros are
        edges, repeated coordinates are parallel edges, and edges keep the order in which they are
        stored.

        Args:
            adj_t: ``[num_dst, num_src]``, COO, CSR or CSC. Values are ignored.
            validate: As in :class:`Graph`.

        >>> adj_t = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()
        >>> Graph.from_sparse(adj_t).edge_index
        tensor([[1],
                [0]])
        """
        if not isinstance(adj_t, Tensor) or not is_torch_sparse_tensor(adj_t):
            raise TypeError(
                "Graph.from_sparse: expected a torch sparse tensor (COO, CSR or CSC), got "
                f"{_describe(adj_t)}. Use Graph(edge_index, num_nodes) for an edge_index."
            )
        if adj_t.layout == torch.sparse_coo:
            dst, src = adj_t._indices()
        elif adj_t.layout == torch.sparse_csr:
            dst, src = ptr2index(adj_t.crow_indices()), adj_t.col_indices()
        else:
            dst, src = adj_t.row_indices(), ptr2index(adj_t.ccol_indices())
        num_dst, num_src = adj_t.shape[:2]
        return cls(torch.stack([src, dst]), (num_src, num_dst), validate=validate)

    @classmethod
    def from_mask(cls, allowed: Tensor) -> Graph:
        """The graph of a boolean attention mask, one edge for each True.

        Args:
            allowed: ``[num_dst, num_src]`` bool. ``allowed[i, j]`` lets query i attend to key j, as
                in ``torch.nn.functional.scaled_dot_product_attention``.
                ``torch.nn.MultiheadAttention`` means the opposite: give ``~attn_mask`` for its
                masks. A batch ``[B, num_dst, num_src]`` becomes one graph with the sequences side
                by side, for features ``x.flatten(0, 1)``.

        Raises:
            TypeError: ``allowed`` is not a bool tensor of two or three dimensions.

        >>> Graph.from_mask(torch.ones(3, 3, dtype=torch.bool).tril())
        Graph(num_nodes=3, num_edges=6)
        """
        if (
            not isinstance(allowed, Tensor)
            or allowed.dtype != torch.bool
            or allowed.dim() not in (2, 3)
        ):
            raise TypeError(
                "Graph.from_mask: allowed must be a bool tensor [num_dst, num_src] or [B, "
                f"num_dst, num_src], True where attention is allowed, got {_describe(allowed)}."
            )
        allowed = allowed.unsqueeze(0) if allowed.dim() == 2 else allowed
        batch, num_dst, num_src = allowed.shape
        which, dst, src = allowed.nonzero(as_tuple=True)
        edge_index = torch.stack([which * num_src + src, which * num_dst + dst])
        return cls(edge_index, (batch * num_src, batch * num_dst), validate=False)

    @classmethod
    def batch(cls, graphs: Sequence[Graph]) -> Graph:
        """One graph with the given ones side by side.

        Sources and targets are shifted by their own counts, so pairs of sets stay pairs.

        >>> pairs = [
        ...     Graph(torch.tensor([[1], [2]]), (2, 3)),
        ...     Graph(torch.tensor([[3], [0]]), (4, 1)),
        ... ]
        >>> Graph.batch(pairs).edge_index
        tensor([[1, 5],
                [2, 3]])
        """
        if len(graphs) == 0:
            raise ValueError("Graph.batch: expected at least one graph, got none.")
        edge_indices, num_src, num_dst = [], 0, 0
        for graph in graphs:
            offset = torch.tensor([[num_src], [num_dst]], device=graph.device)
            edge_indices.append(graph.edge_index + offset)
            num_src, num_dst = num_src + graph.num_src, num_dst + graph.num_dst
        return cls(torch.cat(edge_indices, dim=1), (num_src, num_dst), validate=False)

    # What it holds ################################################################################

    @property
    def device(self) -> torch.device:
        """Device of the index arrays."""
        return self.src_index.device

    @property
    @_once
    def target(self) -> Tensor:
        """Target of each edge in by-target order, ``[num_edges]`` int64."""
        return torch.repeat_interleave(self.in_degree(), output_size=self.num_edges)

    @property
    @_once
    def edge_index(self) -> Tensor:
        """The edges in the caller's order, ``[2, num_edges]`` int64."""
        by_target = torch.stack([self.src_index, self.target])
        if self.edge_id is None:
            return by_target
        return torch.empty_like(by_target).index_copy_(1, self.edge_id, by_target)

    @property
    @_once
    def _by_source(self) -> tuple[Tensor, Tensor, Tensor]:
        tracing = torch.compiler.is_compiling()
        if not tracing and self.device.type == "cpu" and _native.missing() is None:
            return _native.sort_by_source(self.dst_ptr, self.src_index, self.edge_id, self.num_src)
        src, order = torch.sort(self.src_index, stable=True)
        edge_id_by_src = order if self.edge_id is None else self.edge_id[order]
        return _pointers(src, self.num_src), self.target[order], edge_id_by_src

    @property
    def src_ptr(self) -> Tensor:  # noqa: D102 - see the class
        return self._by_source[0]

    @property
    def dst_index(self) -> Tensor:  # noqa: D102 - see the class
        return self._by_source[1]

    @property
    def edge_id_by_src(self) -> Tensor:  # noqa: D102 - see the class
        return self._by_source[2]

    def in_degree(self) -> Tensor:
        """Number of edges that arrive at each target, ``[num_dst]`` int64."""
        return self.dst_ptr.diff()

    def out_degree(self) -> Tensor:
        """Number of edges that leave each source, ``[num_src]`` int64."""
        return self.src_ptr.diff()

    # Graphs made from it ##########################################################################

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on another device; itself when it is there already."""
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        graph = Graph.__new__(Graph)
        with torch.inference_mode(False):
            edge_id = None if self.edge_id is None else self.edge_id.to(device)
            dst_ptr, src_index = self.dst_ptr.to(device), self.src_index.to(device)
            graph._set(self.num_src, self.num_dst, dst_ptr, src_index, edge_id)
            if "_by_source" in self._kept:
                graph._kept["_by_source"] = tuple(x.to(device) for x in self._by_source)
        return graph

    @property
    @_once
    def _reversed(self) -> Graph:
        graph = Graph.__new__(Graph)
        src_ptr, dst_index, edge_id_by_src = self._by_source
        graph._set(self.num_dst, self.num_src, src_ptr, dst_index, edge_id_by_src)
        return graph

    def reverse(self) -> Graph:
        """Every edge turned round, order kept: sources become targets."""
        return self._reversed

    def add_self_loops(self) -> Graph:
        """One edge from every node to itself, appended after the caller's edges.

        Raises:
            ValueError: Sources and targets are different sets, so that "itself" has no meaning.
        """
        if self.num_src != self.num_dst:
            raise ValueError(
                f"Graph.add_self_loops: sources ({self.num_src}) and targets ({self.num_dst}) are "
                "different nodes, so a node has no edge to itself."
            )
        loops = torch.arange(self.num_dst, device=self.device).expand(2, -1)
        return Graph(
            torch.cat([self.edge_index, loops], dim=1), (self.num_src, self.num_dst), validate=False
        )

    def __repr__(self) -> str:
        nodes = (
            f"num_nodes={self.num_dst}"
            if self.num_src == self.num_dst
            else f"num_src={self.num_src}, num_dst={self.num_dst}"
        )
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"Graph({nodes}, num_edges={self.num_edges}{device})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"Graph is frozen: cannot set {name}. Build a new Graph instead.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Graph is frozen: cannot delete {name}. Build a new Graph instead.")


# The graphs of plain edge_index tensors, by id: a weak reference to the tensor, the version it had,
# and its graph for each size. A graph owns its arrays, so it does not keep the tensor alive.
_cache: dict[int, tuple[weakref.ref[Tensor], int, dict[tuple[int, int], Graph]]] = {}


def _recall(edge_index: Tensor, size: tuple[int, int]) -> Graph | None:
    entry = _cache.get(id(edge_index))
    if entry is None or entry[0]() is not edge_index or entry[1] != edge_index._version:
        return None
    return entry[2].get(size)


def _remember(edge_index: Tensor, size: tuple[int, int], graph: Graph) -> None:
    key = id(edge_index)
    entry = _cache.get(key)
    if entry is None or entry[0]() is not edge_index or entry[1] != edge_index._version:
        entry = (weakref.ref(edge_index, lambda dead: _forget(key, dead)), edge_index._version, {})
        _cache[key] = entry
    entry[2][size] = graph


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    if key in _cache and _cache[key][0] is dead:
        del _cache[key]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _check_edge_index(edge_index: object) -> None:
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"Graph: edge_index must be a tensor [2, num_edges], got {_describe(edge_index)}. Use "
            "torch.as_tensor(edge_index)."
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(edge_index):
        raise TypeError(
            "Graph: torch.func.vmap cannot go over edge_index, because graphs differ in more than "
            "numbers. Use Graph.batch, which puts them side by side."
        )
    if is_torch_sparse_tensor(edge_index):
        raise TypeError("Graph: got a torch sparse tensor. Use Graph.from_sparse(adj_t).")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"Graph: edge_index must be int64 or int32, got {edge_index.dtype}. Use "
            "edge_index.long() if its values are node positions."
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Use edge_index.t()." if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(
            "Graph: edge_index must have shape (2, num_edges), got "
            f"{tuple(edge_index.shape)}.{hint}"
        )


def _as_pair(num_nodes: int | tuple[int, int]) -> tuple[int, int]:
    num_src, num_dst = num_nodes if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if num_src < 0 or num_dst < 0:
        raise ValueError(f"Graph: num_nodes must not be negative, got {num_nodes}.")
    return num_src, num_dst


def _resolve_num_nodes(
    edge_index: Tensor, num_nodes: int | tuple[int, int] | None
) -> tuple[int, int]:
    own = edge_index.sparse_size() if isinstance(edge_index, EdgeIndex) else (None, None)
    if num_nodes is None:
        if own[0] is None or own[1] is None:
            raise TypeError(
                "Graph: num_nodes is missing. It is never guessed from the largest index, because "
                "isolated last nodes would be lost. Give the number of nodes, or (num_src, "
                "num_dst)."
            )
        num_nodes = (own[0], own[1])
    size = _as_pair(num_nodes)
    if any(known is not None and known != given for known, given in zip(own, size, strict=True)):
        raise ValueError(
            f"Graph: num_nodes is {size}, but the EdgeIndex has sparse_size {tuple(own)}."
        )
    return size


def _arrays_by_target(
    edge_index: Tensor, num_src: int, num_dst: int, validate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dst_ptr, src_index, edge_id)``; none of them is the caller's memory."""
    plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    # Contiguous rows, whatever the caller's strides.
    src, dst = plain.to(torch.int64).contiguous().unbind(0)
    lends = (
        isinstance(edge_index, EdgeIndex)
        and edge_index.is_sorted
        and edge_index.sparse_size() == (num_src, num_dst)
    )
    # While a compiler traces, nothing may depend on what is in a tensor.
    tracing, in_order = torch.compiler.is_compiling(), False
    native = not tracing and src.device.type == "cpu" and _native.missing() is None
    if not tracing and (validate or not lends):
        if native:
            of_src, of_dst, in_order = _native.scan_edges(src, dst)
        else:
            of_src, of_dst = (_bounds(src), _bounds(dst)) if validate else ((0, -1), (0, -1))
            in_order = _is_sorted(dst)
        if validate:
            _check_range(*of_src, num_src, side="source", row=0)
            _check_range(*of_dst, num_dst, side="target", row=1)
            if isinstance(edge_index, EdgeIndex) and edge_index.is_sorted:
                _check_sorted(src if edge_index.is_sorted_by_row else dst, edge_index.sort_order)
    if lends:
        return _lent_by(edge_index)
    if native:
        return _native.sort_by_target(src, dst, num_dst, in_order=in_order)
    if in_order:
        return _pointers(dst, num_dst), src.clone(), None
    dst, edge_id = torch.sort(dst, stable=True)
    return _pointers(dst, num_dst), src[edge_id], edge_id


def _pointers(index: Tensor, size: int) -> Tensor:
    """Where each position from 0 to ``size`` starts in a sorted ``index``, ``[size + 1]``."""
    return torch.searchsorted(index, torch.arange(size + 1, device=index.device))


def _lent_by(edge_index: EdgeIndex) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same from a sorted PyG EdgeIndex whose size is known, which keeps what it computes."""
    (dst_ptr, src_index), edge_id = edge_index.get_csc()
    # Copies are quick beside sorting. The memory of the EdgeIndex could change under the graph.
    return (
        dst_ptr.to(torch.int64, copy=True),
        src_index.to(torch.int64, copy=True),
        None if edge_id is None else edge_id.to(torch.int64, copy=True),
    )


def _bounds(index: Tensor) -> tuple[int, int]:
    """Smallest and largest; of nothing, the smallest is larger."""
    if index.numel() == 0:
        return 0, -1
    smallest, largest = torch.aminmax(index)
    return int(smallest), int(largest)


def _check_range(smallest: int, largest: int, size: int, *, side: str, row: int) -> None:
    if smallest < 0 or largest >= size:
        raise IndexError(
            f"Graph: edge_index[{row}] holds {side} positions and there are {size} {side}s, but "
            f"its values go from {smallest} to {largest}. Pass the right num_nodes, or map raw "
            "identifiers to positions with graphattn.data.relabel(edge_index)."
        )


def _is_sorted(index: Tensor) -> bool:
    return bool((index[1:] >= index[:-1]).all())


def _check_sorted(index: Tensor, sort_order: object) -> None:
    if not _is_sorted(index):
        raise ValueError(
            f"Graph: the EdgeIndex says that it is sorted (sort_order={sort_order}), but it is "
            "not. Sort it with edge_index.sort_by('col'), or leave sort_order out."
        )


def _checked_size(graph: Graph, size: tuple[int, int]) -> Graph:
    if (graph.num_src, graph.num_dst) != size:
        raise ValueError(
            f"Graph: the graph has {graph.num_src} sources and {graph.num_dst} targets, but the "
            f"features have {size[0]} and {size[1]}."
        )
    return graph
