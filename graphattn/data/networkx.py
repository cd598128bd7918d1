"""From networkx and back: labels to positions, attributes to tensors, undirected edges to pairs."""

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

if TYPE_CHECKING:
    import networkx as nx

Names = Hashable | Sequence[Hashable]


def from_networkx(
    graph: "nx.Graph",
    *,
    node_attrs: Names | None = None,
    edge_attrs: Names | None = None,
    fill: float | None = None,
) -> tuple[Data, list[Hashable]]:
    r"""Convert a networkx graph of any kind to `Data`, with the list of its node labels.

    Node number i of the result is the i-th node that was added to `graph`, whatever it is called.
    An edge u -> v has u as its source (row 0) and v as its target (row 1). An undirected edge
    becomes the two directed ones, next to each other; a self-loop stays one. Parallel edges of a
    multigraph are kept.

    Args:
        graph: `Graph`, `DiGraph`, `MultiGraph` or `MultiDiGraph`.
        node_attrs: The node attribute, or the list of them, that becomes `x`, in this order. A
            value is a number or a flat sequence of numbers (list, array, tensor). Default: none,
            whatever the nodes hold.
        edge_attrs: The same for edges and `edge_attr`; independent of `node_attrs`.
        fill: Number for nodes and edges that lack an attribute. Default: a missing one is an error.

    Returns:
        `(data, nodes)`: a `Data` with `edge_index` int64 `[2, E]`, `num_nodes` and, if asked for,
        `x` float32 `[N, F]` and `edge_attr` float32 `[E, D]`; and the labels, so that `nodes[i]` is
        the label of node i. `to_networkx(data, nodes=nodes)` is the way back.

    Raises:
        TypeError: If `graph` is no networkx graph, or a value is not numeric.
        ValueError: If nodes or edges lack an attribute and `fill` is None, or hold it in different
            sizes; the text lists them.

    Example:
        >>> import networkx as nx
        >>> graph = nx.DiGraph([("b", "a"), ("a", ("c", 1))])
        >>> data, nodes = from_networkx(graph)
        >>> data.edge_index
        tensor([[0, 1],
                [1, 2]])
        >>> nodes
        ['b', 'a', ('c', 1)]
    """
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise TypeError(
            f"from_networkx: graph must be a networkx graph, got {type(graph).__name__}."
        )
    nodes = list(graph.nodes)
    position = {label: i for i, label in enumerate(nodes)}
    directed = graph.is_directed()
    pairs: list[tuple[int, int]] = []
    stored: list[int] = []  # for each directed edge, the edge of `graph` that it comes from
    edges = list(graph.edges(data=True))
    for i, (source, target, _) in enumerate(edges):
        u, v = position[source], position[target]
        pairs.append((u, v))
        stored.append(i)
        if not directed and u != v:
            pairs.append((v, u))
            stored.append(i)
    data = Data(
        edge_index=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous(),
        num_nodes=len(nodes),
    )
    if node_attrs is not None:
        held = [graph.nodes[label] for label in nodes]
        data.x = _matrix("node", node_attrs, nodes, held, fill)
    if edge_attrs is not None:
        ends = [(source, target) for source, target, _ in edges]
        matrix = _matrix("edge", edge_attrs, ends, [values for _, _, values in edges], fill)
        data.edge_attr = matrix[torch.tensor(stored, dtype=torch.int64)]
    return data, nodes


def to_networkx(
    data: Data,
    *,
    nodes: Sequence[Hashable] | None = None,
    node_attrs: str | Sequence[str] | None = None,
    edge_attrs: str | Sequence[str] | None = None,
    undirected: bool = False,
    multigraph: bool = False,
) -> "nx.Graph":
    """Convert `Data` to a networkx graph, with the labels that `from_networkx` returned.

    Args:
        data: A `Data` with `edge_index` `[2, E]`; row 0 is the source.
        nodes: The label of each node. Default: 0, 1, ..., N - 1.
        node_attrs: The field of `data`, or the list of them, to store on each node under its own
            name: a number for `[N]`, a list for `[N, F]`. Default: none.
        edge_attrs: The same for fields with one row per edge.
        undirected: Whether to join u -> v and v -> u to one edge, the inverse of what
            `from_networkx` does with an undirected graph. Every edge but self-loops must then occur
            in both directions, with equal attributes.
        multigraph: Whether parallel edges are allowed, and kept.

    Returns:
        A `DiGraph`; `Graph` if `undirected`; `MultiDiGraph` or `MultiGraph` if `multigraph`. Nodes
        and edges are in the order of `data`.

    Raises:
        ValueError: If there are parallel edges without `multigraph=True`, an edge lacks its reverse
            with `undirected=True`, `nodes` has the wrong length or repeats a label, a field is
            absent or of the wrong length, or the number of nodes is not known.
        IndexError: If `edge_index` goes beyond the nodes.

    Example:
        >>> import networkx as nx
        >>> data, nodes = from_networkx(nx.Graph([("a", "b"), ("b", "c")]))
        >>> to_networkx(data, nodes=nodes, undirected=True).edges
        EdgeView([('a', 'b'), ('b', 'c')])
    """
    import networkx as nx

    if data.edge_index is None:
        raise ValueError("to_networkx: data has no edge_index.")
    num_nodes = _num_nodes(data, nodes)
    labels: Sequence[Hashable] = range(num_nodes) if nodes is None else list(nodes)
    if len(labels) != num_nodes:
        raise ValueError(
            f"to_networkx: nodes must have one label per node, {num_nodes}, got {len(labels)}."
        )
    if len(set(labels)) != num_nodes:
        repeated = [label for i, label in enumerate(labels) if label in labels[:i]]
        raise ValueError(
            f"to_networkx: nodes must not repeat a label, got twice: {_listing(repeated)}."
        )
    pairs = [(int(u), int(v)) for u, v in data.edge_index.t().tolist()]
    ends = [end for pair in pairs for end in pair]
    if ends and (min(ends) < 0 or max(ends) >= num_nodes):
        raise IndexError(
            f"to_networkx: edge_index must lie in 0..{num_nodes - 1}, got {min(ends)}..{max(ends)}."
        )
    on_nodes = _columns("node", data, node_attrs, num_nodes)
    on_edges = _columns("edge", data, edge_attrs, len(pairs))
    if undirected:
        pairs, on_edges = _join(pairs, on_edges, labels)
    if not multigraph and len(set(pairs)) < len(pairs):
        seen: set[tuple[int, int]] = set()
        parallel = [pair for pair in pairs if pair in seen or seen.add(pair)]  # type: ignore[func-returns-value]
        raise ValueError(
            f"to_networkx: {len(parallel)} parallel edges would be lost: "
            f"{_listing((labels[u], labels[v]) for u, v in parallel)}. Pass multigraph=True to "
            "keep them."
        )
    kinds = {(False, False): nx.DiGraph, (True, False): nx.Graph,
             (False, True): nx.MultiDiGraph, (True, True): nx.MultiGraph}  # fmt: skip
    graph = kinds[bool(undirected), bool(multigraph)]()
    for i, label in enumerate(labels):
        graph.add_node(label)
        graph.nodes[label].update({name: values[i] for name, values in on_nodes.items()})
    for i, (u, v) in enumerate(pairs):
        key = graph.add_edge(labels[u], labels[v])
        held = graph.edges[(labels[u], labels[v], key) if multigraph else (labels[u], labels[v])]
        held.update({name: values[i] for name, values in on_edges.items()})
    return graph


def _listing(items: Iterable[Any], limit: int = 10) -> str:
    texts = [repr(item) for item in items]
    more = len(texts) - limit
    return ", ".join(texts[:limit]) + (f" and {more} more" if more > 0 else "")


def _names(names: Any) -> list[Any]:
    """Return a list of names from one name or several."""
    return list(names) if isinstance(names, (list, tuple, set, frozenset)) else [names]


def _matrix(
    kind: str,
    names: Names,
    owners: Sequence[Any],
    held: Sequence[Mapping[Any, Any]],
    fill: float | None,
) -> Tensor:
    """Stack the attributes `names` of all nodes or edges to float32 `[len(owners), width]`."""
    blocks = [_column(kind, name, owners, held, fill) for name in _names(names)]
    if not blocks:
        return torch.zeros(len(owners), 0)
    return torch.from_numpy(np.concatenate(blocks, axis=1))


def _column(
    kind: str,
    name: Any,
    owners: Sequence[Any],
    held: Sequence[Mapping[Any, Any]],
    fill: float | None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return one attribute of all nodes or edges as float32 `[len(owners), width]`."""
    missing = [i for i, values in enumerate(held) if values.get(name) is None]
    if missing and fill is None:
        raise ValueError(
            f"from_networkx: {kind} attribute {name!r} is missing on {len(missing)} of "
            f"{len(owners)} {kind}s: {_listing(owners[i] for i in missing)}. Set it there, or pass "
            "fill=0.0."
        )
    rows = {
        i: _numbers(kind, name, owners[i], values[name])
        for i, values in enumerate(held)
        if values.get(name) is not None
    }
    width = next(iter(rows.values())).size if rows else 1
    uneven = [i for i, row in rows.items() if row.size != width]
    if uneven:
        raise ValueError(
            f"from_networkx: {kind} attribute {name!r} must have one size; it is {width} on the "
            f"first {kind} but not on {_listing(owners[i] for i in uneven)}."
        )
    block = np.full((len(owners), width), 0.0 if fill is None else fill, dtype=np.float32)
    for i, row in rows.items():
        block[i] = row
    return block


def _numbers(kind: str, name: Any, owner: Any, value: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a number or a flat sequence of numbers as float32 `[width]`."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # lists within a list, of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" or array.ndim > 1:
        raise TypeError(
            f"from_networkx: {kind} attribute {name!r} must be a number or a flat sequence of "
            f"numbers, but on {owner!r} it is {value!r} ({type(value).__name__}). Encode it as "
            "numbers first."
        )
    return array.reshape(-1).astype(np.float32)


def _num_nodes(data: Data, nodes: Sequence[Hashable] | None) -> int:
    """Return N from `data`, else from `nodes`; never from the largest index."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            num_nodes = data.num_nodes
    except UserWarning:
        num_nodes = None if nodes is None else len(nodes)
    if num_nodes is None:
        raise ValueError(
            "to_networkx: the number of nodes is unknown. Set data.num_nodes or pass nodes; it is "
            "not guessed from the largest index, which would lose isolated last nodes."
        )
    return num_nodes


def _columns(
    kind: str, data: Data, names: str | Sequence[str] | None, length: int
) -> dict[str, list[Any]]:
    """Return the fields `names` as one Python value per node or edge."""
    columns = {}
    for name in [] if names is None else _names(names):
        value = data.to_dict().get(name)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != length:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"to_networkx: {kind} attribute {name!r} must be a tensor with one row per {kind}, "
                f"{length}, got {found if value is not None else 'no such field'}."
            )
        columns[name] = value.detach().cpu().tolist()
    return columns


def _join(
    pairs: list[tuple[int, int]], columns: dict[str, list[Any]], labels: Sequence[Hashable]
) -> tuple[list[tuple[int, int]], dict[str, list[Any]]]:
    """Join the k-th u -> v with the k-th v -> u, and keep the one that comes first."""
    waiting: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(pairs):
        waiting.setdefault(pair, []).append(i)
    single = [(u, v) for (u, v), ids in waiting.items() if len(waiting.get((v, u), ())) < len(ids)]
    if single:
        raise ValueError(
            "to_networkx: undirected=True needs every edge in both directions; without reverse: "
            f"{_listing((labels[u], labels[v]) for u, v in single)}."
        )
    kept: list[int] = []
    unequal = []
    for (u, v), ids in waiting.items():
        if u == v:
            kept += ids
        elif u < v:
            for i, j in zip(ids, waiting[v, u], strict=True):
                kept.append(min(i, j))
                if any(values[i] != values[j] for values in columns.values()):
                    unequal.append((labels[u], labels[v]))
    if unequal:
        raise ValueError(
            "to_networkx: undirected=True needs equal attributes in both directions; they differ "
            f"for {_listing(unequal)}."
        )
    kept.sort()
    return [pairs[i] for i in kept], {
        key: [values[i] for i in kept] for key, values in columns.items()
    }
