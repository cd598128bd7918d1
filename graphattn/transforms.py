"""Structural encodings and attention edges, as transforms of PyG's ``Data``.

They go wherever PyG takes a transform: ``torch_geometric.transforms.Compose``, ``transform=`` or
``pre_transform=`` of a data set, or a call on a ``Data`` object, before batching or after. None of
them touches ``edge_index``. :class:`AddAttentionEdges` stores the edges that attention runs along
beside it, so encodings are those of the graph as it was, in whichever order transforms run.

>>> from torch_geometric.data import Data
>>> from torch_geometric.transforms import Compose
>>> transform = Compose(
...     [
...         AddAttentionEdges(patterns.complete, max_distance=3),
...         AddLaplacianEigenvectors(k=2),
...         AddRandomWalk(walk_length=4),
...     ]
... )
>>> transform(Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
Data(edge_index=[2, 2], num_nodes=3, attention_edge_index=[2, 9], attention_is_original=[9],
     attention_distance=[9], laplacian_eigenvectors=[3, 2], laplacian_eigenvectors_mask=[3, 2],
     random_walk=[3, 4])
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_array, eye_array
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh, splu
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import get_laplacian, to_scipy_sparse_matrix, to_undirected

from graphattn import patterns
from graphattn._checks import check_at_least, check_choice
from graphattn.graph import Graph

__all__ = ["AddAttentionEdges", "AddLaplacianEigenvectors", "AddRandomWalk"]

_DENSE = 512  # nodes of a component up to which all eigenvectors are as quick as a few
_FACTORISE = 10**9  # multiplications for which a Laplacian is factorised, at most
# Where ARPACK has found all that its start leads to, it goes on from a generator (scipy >= 1.17).
_SEED = {"rng": 0} if "rng" in inspect.signature(eigsh).parameters else {}
_BLOCK = 2**24  # entries of a block of rows, at most, where rows may fill up


class AddLaplacianEigenvectors(BaseTransform):
    r"""Stores the first ``k`` non-trivial eigenvectors of each node's connected component.

    .. math:: L = D - A, \qquad L_{\mathrm{sym}} = I - D^{-1/2} A D^{-1/2}, \qquad
        L_{\mathrm{rw}} = I - D^{-1} A

    where :math:`A_{ij} = 1` if an edge joins the nodes, in either direction: the graph is made
    undirected, parallel edges count once, self-loops and edge weights not at all. Each connected
    component is a graph of its own here: it has one trivial eigenvector (eigenvalue 0), which is
    left out, and the next ones, by increasing eigenvalue, fill its rows. Each has length 1 within
    its component. A component of :math:`n` nodes has :math:`n - 1` of them; what is missing up to
    ``k`` is zero, and False in the mask.

    With ``sign="fixed"``, each is turned so that its entry of largest absolute value is positive,
    and of entries that tie for the largest (within 1e-6 of it) the one of the first node. Numbering
    the nodes anew permutes the rows, but for the signs of eigenvectors in which such entries have
    opposite signs, and but for eigenvalues that occur more than once, of which any basis of their
    eigenvectors is as good. Models should not rely on signs:
    :class:`~graphattn.nn.encoding.LaplacianEncoding` draws them anew in training.

    ``torch_geometric.transforms.AddLaplacianEigenvectorPE`` raises on graphs of up to ``k`` nodes,
    takes real parts of a non-symmetric problem on directed graphs, and drops only one of several
    trivial eigenvectors. Source: "Benchmarking Graph Neural Networks"
    (https://arxiv.org/abs/2003.00982).

    Args:
        k: Number of eigenvectors.
        normalization: ``"sym"``, ``"rw"``, or ``None`` for :math:`L` itself.
        attr_name: Name of the result, ``[N, k]`` in the default dtype; its mask, ``[N, k]`` bool,
            is ``attr_name + "_mask"``.
        sign: ``"fixed"``, by the rule above, or ``"random"``, drawn by torch's generator in each
            call.

    Raises:
        TypeError: The argument of a call is not a ``Data``.
        ValueError: ``k`` is below 1, or a name is unknown; in a call, there are no edges, or
            nothing tells the number of nodes.
        IndexError: In a call, an edge leads to a node that is not there.

    Of the path 0 -> 1 -> 2, and of two nodes for themselves:

    >>> from torch_geometric.data import Data
    >>> data = Data(edge_index=torch.tensor([[0, 1, 3], [1, 2, 4]]), num_nodes=5)
    >>> data = AddLaplacianEigenvectors(k=2, normalization=None)(data)
    >>> data.laplacian_eigenvectors.round(decimals=2) + 0.0
    tensor([[ 0.7100, -0.4100],
            [ 0.0000,  0.8200],
            [-0.7100, -0.4100],
            [ 0.7100,  0.0000],
            [-0.7100,  0.0000]])
    >>> data.laplacian_eigenvectors_mask[:, 1]
    tensor([ True,  True,  True, False, False])
    """

    def __init__(
        self,
        k: int,
        *,
        normalization: str | None = "sym",
        attr_name: str = "laplacian_eigenvectors",
        sign: str = "fixed",
    ) -> None:
        name = "AddLaplacianEigenvectors"
        check_at_least(name, 1, k=k)
        check_choice(name, ("sym", "rw", None), normalization=normalization)
        check_choice(name, ("fixed", "random"), sign=sign)
        self.k = k
        self.normalization = normalization
        self.attr_name = attr_name
        self.sign = sign

    def forward(self, data: Data) -> Data:
        """Stores ``attr_name`` and its mask in ``data``."""
        edge_index, num_nodes = _structure("AddLaplacianEigenvectors", data)
        values = np.zeros((num_nodes, self.k))
        mask = np.zeros((num_nodes, self.k), dtype=bool)
        for nodes, laplacian, degree in _components(edge_index, num_nodes, self.normalization):
            count = min(self.k, len(nodes) - 1)
            trivial = np.sqrt(degree) if self.normalization is not None else np.ones(len(nodes))
            vectors = _eigenvectors(laplacian, trivial, count)
            if self.normalization == "rw":
                vectors = vectors / np.sqrt(degree)[:, None]
                vectors = vectors / np.linalg.norm(vectors, axis=0)
            values[nodes, :count] = vectors * self._signs(vectors)
            mask[nodes, :count] = True
        device = data.edge_index.device
        data[self.attr_name] = torch.from_numpy(values).to(device, torch.get_default_dtype())
        data[f"{self.attr_name}_mask"] = torch.from_numpy(mask).to(device)
        return data

    def _signs(self, vectors: NDArray[Any]) -> NDArray[Any]:
        if self.sign == "random":
            return 2.0 * torch.randint(2, (vectors.shape[1],)).numpy() - 1.0
        size = np.abs(vectors)
        first = (size >= (1.0 - 1e-6) * size.max(axis=0)).argmax(axis=0)
        return np.sign(vectors[first, np.arange(vectors.shape[1])])

    def __repr__(self) -> str:
        return (
            f"AddLaplacianEigenvectors({self.k}, normalization={self.normalization!r}, "
            f"attr_name={self.attr_name!r}, sign={self.sign!r})"
        )


class AddRandomWalk(BaseTransform):
    r"""Stores how likely a random walk from each node is back there after 1, 2, ... steps.

    .. math:: p_v = \left( P_{vv}, (P^2)_{vv}, \dots, (P^{T})_{vv} \right), \qquad P = D^{-1} A

    Each step takes one of the edges that leave the node, all of them equally likely; parallel edges
    are as many ways to go, self-loops are ways to stay, edge weights are not read. A walk ends at a
    node that no edge leaves: its row of :math:`P` is zero, as are the encodings of isolated nodes.
    In a graph without directed cycles no walk returns, and all encodings are zero; use
    ``undirected=True`` there.

    The numbers are those of ``torch_geometric.transforms.AddRandomWalkPE`` on graphs without
    parallel edges, of which that one keeps only one in up to 2,000 nodes; no ``[N, N]`` tensor is
    made. Source: "Graph Neural Networks with Learnable Structural and Positional Representations"
    (https://arxiv.org/abs/2110.07875).

    Args:
        walk_length: Number of steps :math:`T`.
        undirected: Let the walk go along every edge both ways.
        attr_name: Name of the result, ``[N, walk_length]`` in the default dtype.

    Raises:
        TypeError: The argument of a call is not a ``Data``.
        ValueError: ``walk_length`` is below 1; in a call, there are no edges, or nothing tells the
            number of nodes.
        IndexError: In a call, an edge leads to a node that is not there.

    From the middle of a path every second step leads back, from its ends every second of those:

    >>> from torch_geometric.data import Data
    >>> data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    >>> AddRandomWalk(walk_length=4, undirected=True)(data).random_walk
    tensor([[0.0000, 0.5000, 0.0000, 0.5000],
            [0.0000, 1.0000, 0.0000, 1.0000],
            [0.0000, 0.5000, 0.0000, 0.5000]])
    """

    def __init__(
        self, walk_length: int, *, undirected: bool = False, attr_name: str = "random_walk"
    ) -> None:
        check_at_least("AddRandomWalk", 1, walk_length=walk_length)
        self.walk_length = walk_length
        self.undirected = undirected
        self.attr_name = attr_name

    def forward(self, data: Data) -> Data:
        """Stores ``attr_name`` in ``data``."""
        edge_index, num_nodes = _structure("AddRandomWalk", data)
        if self.undirected:
            edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        src = edge_index[0].numpy()
        share = 1.0 / np.bincount(src, minlength=num_nodes)[src]
        landing = np.zeros((num_nodes, self.walk_length))
        step = _adjacency(edge_index, num_nodes, share)
        for start, end in _blocks(num_nodes):
            walk = step[start:end]
            for length in range(self.walk_length):
                walk = walk if length == 0 else walk @ step
                landing[start:end, length] = walk[:, start:end].diagonal()
        data[self.attr_name] = torch.from_numpy(landing).to(
            data.edge_index.device, torch.get_default_dtype()
        )
        return data

    def __repr__(self) -> str:
        return (
            f"AddRandomWalk({self.walk_length}, undirected={self.undirected}, "
            f"attr_name={self.attr_name!r})"
        )


class AddAttentionEdges(BaseTransform):
    """Stores the edges that attention runs along: the graph's own and those of a pattern.

    ``edge_index`` stays as it is, for convolutions and encodings. Give ``attention_edge_index`` to
    attention layers. Stored are

    - ``attention_edge_index`` ``[2, E']``: the union, each pair of nodes once, sorted by target and
      then by source;
    - ``attention_is_original`` ``[E']`` bool: whether the pair is an edge of ``edge_index``;
    - with ``max_distance``, ``attention_distance`` ``[E']`` int64: number of edges of the shortest
      path from source to target along ``edge_index``; 0 for a self-loop, -1 where there is no path
      of up to ``max_distance`` edges. It is what
      :class:`~graphattn.nn.encoding.ShortestPathBias` reads.

    PyG's loaders batch them as they do ``edge_index``. A batch may also be transformed: each of its
    graphs then gets edges of its own. Examples of such edges are those of Graphormer
    (https://arxiv.org/abs/2106.05234), all pairs, and Exphormer (https://arxiv.org/abs/2303.06147),
    an expander.

    Args:
        pattern: From a number of nodes to an ``edge_index``, such as
            :func:`graphattn.patterns.complete`, or ``functools.partial(patterns.expander,
            degree=4)``.
        max_distance: Also store distances up to this one. They are searched from each node no
            further than that; memory is bounded, time grows with what is reached.

    Raises:
        TypeError: The argument of a call is not a ``Data``.
        ValueError: ``max_distance`` is below 1; in a call, there are no edges, or nothing tells the
            number of nodes.
        IndexError: In a call, an edge leads to a node that is not there.

    >>> from torch_geometric.data import Data
    >>> data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    >>> data = AddAttentionEdges(patterns.complete, max_distance=3)(data)
    >>> data.attention_edge_index
    tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2],
            [0, 0, 0, 1, 1, 1, 2, 2, 2]])
    >>> data.attention_is_original.int()
    tensor([0, 0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.int32)
    >>> data.attention_distance
    tensor([ 0, -1, -1,  1,  0, -1,  2,  1,  0])
    """

    def __init__(
        self, pattern: Callable[[int], Tensor], *, max_distance: int | None = None
    ) -> None:
        check_at_least("AddAttentionEdges", 1, max_distance=max_distance)
        self.pattern = pattern
        self.max_distance = max_distance

    def forward(self, data: Data) -> Data:
        """Stores what is listed above in ``data``."""
        edge_index, num_nodes = _structure("AddAttentionEdges", data)
        parts, start = [edge_index], 0
        for size in _sizes("AddAttentionEdges", data, num_nodes):
            parts.append(Graph(self.pattern(size), size).edge_index.cpu() + start)
            start += size
        pairs = patterns.union(*parts)
        device = data.edge_index.device
        data.attention_edge_index = pairs.to(device)
        data.attention_is_original = torch.isin(
            _numbered(pairs, num_nodes), _numbered(edge_index, num_nodes)
        ).to(device)
        if self.max_distance is not None:
            distance = _distances(edge_index, num_nodes, pairs, self.max_distance)
            data.attention_distance = torch.from_numpy(distance).to(device)
        return data

    def __repr__(self) -> str:
        return f"AddAttentionEdges({self.pattern!r}, max_distance={self.max_distance})"


# Parts ############################################################################################


def _structure(name: str, data: Data) -> tuple[Tensor, int]:
    """The edges, on CPU, and the number of nodes, if that is known."""
    if not isinstance(data, Data):
        raise TypeError(f"{name}: expected a torch_geometric.data.Data, got {type(data).__name__}.")
    if data.edge_index is None:
        raise ValueError(
            f"{name}: data has no edge_index. Use torch.empty(2, 0, dtype=torch.int64) for a graph "
            "without edges, and transforms that remove edge_index after this one."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Unable to accurately infer 'num_nodes'", UserWarning)
        try:
            num_nodes = data.num_nodes
        except UserWarning:
            raise ValueError(
                f"{name}: nothing in data tells the number of nodes, and it is never guessed from "
                "the largest index, because isolated last nodes would be lost. Set data.num_nodes."
            ) from None
    return Graph(data.edge_index, num_nodes).edge_index.cpu(), num_nodes


def _sizes(name: str, data: Data, num_nodes: int) -> list[int]:
    """Number of nodes of each graph in ``data`` that has any."""
    batch = data.batch
    if batch is None:
        return [num_nodes] if num_nodes > 0 else []
    if (batch.diff() < 0).any():
        raise ValueError(
            f"{name}: data.batch must be sorted. Put the nodes of each graph together."
        )
    return batch.unique_consecutive(return_counts=True)[1].tolist()


def _components(
    edge_index: Tensor, num_nodes: int, normalization: str | None
) -> Iterator[tuple[NDArray[Any], csr_array, NDArray[Any]]]:
    """Of each component of two nodes at least: its nodes, symmetric Laplacian and degrees."""
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    edge_index = to_undirected(edge_index, num_nodes=num_nodes)
    weighted = get_laplacian(
        edge_index,
        normalization=None if normalization is None else "sym",
        dtype=torch.float64,
        num_nodes=num_nodes,
    )
    if edge_index.size(1) == 0:
        return
    laplacian = csr_array(to_scipy_sparse_matrix(*weighted, num_nodes=num_nodes))
    degree = np.bincount(edge_index[0].numpy(), minlength=num_nodes)
    number, component = connected_components(laplacian, directed=False)
    order = component.argsort(kind="stable")
    laplacian = laplacian[order][:, order]  # one block after the other
    ends = np.bincount(component, minlength=number).cumsum()
    for start, end in zip(ends - np.bincount(component), ends, strict=True):
        if end - start > 1:
            nodes = order[start:end]
            yield nodes, laplacian[start:end, start:end], degree[nodes]


def _eigenvectors(laplacian: csr_array, trivial: NDArray[Any], count: int) -> NDArray[Any]:
    """The first ``count`` eigenvectors but the trivial one, by eigenvalue, ``[n, count]``."""
    size = len(trivial)
    if size > max(_DENSE, 4 * count):
        try:
            return _iterated_eigenvectors(laplacian, trivial, count)
        except ArpackError:
            # Rare, where nearly all eigenvalues are the same, as those of complete graphs.
            if size > 8 * _DENSE:
                raise
    return eigh(laplacian.toarray(), subset_by_index=(1, count))[1]


def _iterated_eigenvectors(laplacian: csr_array, trivial: NDArray[Any], count: int) -> NDArray[Any]:
    size, largest = len(trivial), laplacian.diagonal().max()
    order = reverse_cuthill_mckee(laplacian.tocsr(), symmetric_mode=True)
    ordered = laplacian[order][:, order].tocoo()
    bandwidth = int(np.abs(ordered.row - ordered.col).max())
    if size * bandwidth**2 > _FACTORISE:
        top = 2.0 * largest
        return _leading(lambda x: top * x - laplacian @ x, trivial, count)
    # Long graphs, such as paths and grids, have eigenvalues close together, and factorise well.
    shifted = (ordered + 1e-9 * largest * eye_array(size)).tocsc()
    factors = splu(shifted, permc_spec="NATURAL", diag_pivot_thresh=0.0)
    return _leading(factors.solve, trivial[order], count)[order.argsort()]


def _leading(
    multiply: Callable[[NDArray[Any]], NDArray[Any]], trivial: NDArray[Any], count: int
) -> NDArray[Any]:
    """Eigenvectors of the largest eigenvalues of a symmetric operator, but the trivial one."""
    size = len(trivial)
    found = (trivial / np.linalg.norm(trivial))[:, None]
    generator = np.random.default_rng(0)

    def among_the_rest(number: int, tolerance: float) -> tuple[NDArray[Any], NDArray[Any]]:
        def project(x: NDArray[Any]) -> NDArray[Any]:
            return x - found @ (found.T @ x)

        return eigsh(
            LinearOperator(
                (size, size), lambda x: project(multiply(project(x.ravel()))), dtype=float
            ),
            number,
            which="LA",
            v0=project(generator.standard_normal(size)),
            ncv=max(40, 2 * number + 1),
            tol=tolerance,
            **_SEED,
        )

    values, vectors = among_the_rest(count, 0.0)
    while True:
        # Of an eigenvalue that occurs more than once, the iteration may find one vector too few:
        # is there something left that is larger than the smallest found?
        found = np.column_stack([found[:, 0], vectors])
        largest_left = among_the_rest(1, 1e-6)[0][0]
        if largest_left <= values.min() * (1.0 + 1e-6):
            return vectors[:, (-values).argsort(kind="stable")]
        value, vector = among_the_rest(1, 0.0)
        keep = np.arange(count) != values.argmin()
        values = np.append(values[keep], value)
        vectors = np.column_stack([vectors[:, keep], vector])


def _distances(
    edge_index: Tensor, num_nodes: int, pairs: Tensor, max_distance: int
) -> NDArray[np.int64]:
    """Length of the shortest path of each pair, by search from all sources of a block at once."""
    src, dst = pairs.numpy()
    order = src.argsort(kind="stable")
    by_source = src[order]
    distance = np.full(len(src), -1)
    adjacency = _adjacency(edge_index, num_nodes, np.ones(edge_index.size(1), dtype=bool))
    for start, end in _blocks(num_nodes):
        first, last = np.searchsorted(by_source, (start, end))
        wanted = order[first:last]
        # Nodes that were reached in this step, and in any, from each node of the block.
        nodes = np.arange(end - start)
        reached = latest = csr_array(
            (np.ones(end - start, dtype=bool), (nodes, nodes + start)), (end - start, num_nodes)
        )
        for length in range(max_distance + 1):
            if length > 0:
                latest = latest @ adjacency > reached
                reached = reached + latest
            found = np.isin(
                (src[wanted] - start) * num_nodes + dst[wanted],
                _rows(latest) * num_nodes + latest.indices,
            )
            distance[wanted[found]] = length
            wanted = wanted[~found]
            if len(wanted) == 0 or latest.nnz == 0:
                break
    return distance


def _adjacency(edge_index: Tensor, num_nodes: int, values: NDArray[Any]) -> csr_array:
    """``[N, N]``, rows are sources; the values of parallel edges are added."""
    return csr_array((values, tuple(edge_index.numpy())), (num_nodes, num_nodes))


def _rows(matrix: csr_array) -> NDArray[np.int64]:
    """Row of each entry."""
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))


def _numbered(edge_index: Tensor, num_nodes: int) -> Tensor:
    return edge_index[0] * num_nodes + edge_index[1]


def _blocks(num_nodes: int) -> Iterator[tuple[int, int]]:
    size = max(1, _BLOCK // max(1, num_nodes))
    for start in range(0, num_nodes, size):
        yield start, min(start + size, num_nodes)
