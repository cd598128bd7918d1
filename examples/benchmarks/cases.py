"""What is measured: a graph by name, and the inputs of one case."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops, to_scipy_sparse_matrix, to_undirected

from graphattn import patterns

WHAT = ("operator", "layer")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
# The projections of one layer, as PyG's TransformerConv calls them.
PROJECTIONS = ("lin_key", "lin_query", "lin_value", "lin_skip")


@dataclass(frozen=True)
class Case:
    """A graph, the shape and dtype of the inputs, and whether the operator or a layer runs."""

    graph: str
    edge_index: Tensor  # [2, E], without parallel edges, sorted by source as PyG leaves it
    num_nodes: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    what: str = "operator"
    sweep: str = ""  # the axis along which this case is one point

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        if self.what == "layer":
            return self.num_nodes, self.width
        return self.num_nodes, self.heads, self.head_dim

    @property
    def per_edge_bytes(self) -> int:
        """Of one tensor ``[E, H, D]``."""
        return self.num_edges * self.width * self.dtype.itemsize

    def inputs(self) -> dict[str, Tensor]:
        """What gradients are taken of: query, key and value, or ``x`` and a layer's parameters."""
        device = self.edge_index.device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            x = scale * torch.randn(shape, generator=generator, device=device)
            return x.to(self.dtype).requires_grad_()

        if self.what == "operator":
            return {name: draw(*self.shape) for name in ("query", "key", "value")}
        inputs = {"x": draw(*self.shape)}
        for name in PROJECTIONS:
            inputs[f"{name}.weight"] = draw(self.width, self.width, scale=self.width**-0.5)
            inputs[f"{name}.bias"] = draw(self.width)
        return inputs

    def cotangent(self) -> Tensor:
        """The gradient that arrives at the output."""
        device = self.edge_index.device
        generator = torch.Generator(device).manual_seed(1)
        return torch.randn(self.shape, generator=generator, device=device).to(self.dtype)


def load_graph(
    name: str,
    *,
    nodes: int,
    degree: int,
    root: Path = Path("datasets"),
    reorder: str | None = None,
    device: torch.device | str = "cpu",
) -> tuple[str, Tensor, int]:
    """``(name, edge_index, num_nodes)``: generated, or real and made undirected.

    Args:
        name: One of :data:`SYNTHETIC`, a path that ends in ``.npz``, or what
            :func:`graphattn.data.load` knows.
        nodes: Number of nodes of a generated graph.
        degree: Edges for each node of a generated graph, but for the stars.
        root: Folder of real graphs.
        reorder: One of :data:`ORDERS`: renumber the nodes by it, and say so in the name.
        device: Where the edges are put.

    Raises:
        ValueError: The name is unknown, the graph has no edges, or a generated one cannot have as
            many as asked for.
        FileNotFoundError: The graph is known and not there.
        ImportError: The order needs a package that is not installed.
    """
    if name in SYNTHETIC:
        edge_index = SYNTHETIC[name](nodes, degree, torch.Generator().manual_seed(0))
    else:
        from graphattn.data import load  # with SciPy, which generated graphs do without

        if name.endswith(".npz"):
            root, name = Path(name).parent, Path(name).stem
        data = load(name, root=root)
        if data.num_edges == 0:
            raise ValueError(f"{name} has no edges to attend along.")
        nodes = data.num_nodes
        edge_index = to_undirected(data.edge_index, num_nodes=nodes)
    if reorder is not None:
        rank = torch.empty(nodes, dtype=torch.int64)
        rank[ORDERS[reorder](edge_index, nodes)] = torch.arange(nodes)
        name, edge_index = f"{name} ({reorder} order)", rank[edge_index]
    return name, edge_index.to(device), nodes


def rcm(edge_index: Tensor, nodes: int) -> Tensor:
    """Nodes in the reverse Cuthill-McKee order, by SciPy."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    matrix = to_scipy_sparse_matrix(edge_index, num_nodes=nodes).tocsr()
    return torch.from_numpy(reverse_cuthill_mckee(matrix).astype("int64"))


def metis(edge_index: Tensor, nodes: int) -> Tensor:
    """Nodes by parts of about 2,500 with few edges between them, by METIS."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(f"the metis order needs pymetis (pip install pymetis): {error}") from None
    undirected = to_undirected(remove_self_loops(edge_index)[0], num_nodes=nodes)
    matrix = to_scipy_sparse_matrix(undirected, num_nodes=nodes).tocsr()
    adjacency = pymetis.CSRAdjacency(matrix.indptr, matrix.indices)
    part = pymetis.part_graph(1 + nodes // 2500, adjacency).vertex_part
    return torch.tensor(part).argsort(stable=True)


ORDERS: dict[str, Callable[[Tensor, int], Tensor]] = {"rcm": rcm, "metis": metis}


def star(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """One node attends to all others: ``nodes - 1`` edges, whatever ``degree`` is."""
    leaves = torch.arange(1, nodes)
    return torch.stack([leaves, torch.zeros_like(leaves)])


def star_out(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """All others attend to one node: ``nodes - 1`` edges, whatever ``degree`` is."""
    return star(nodes, degree, generator).flip(0)


def random(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """Sources and targets drawn alike: ``nodes * degree`` edges."""
    return _distinct(nodes, degree, generator, exponent=1.0)


def powerlaw(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """Few nodes have most of the ``nodes * degree`` edges, at both ends.

    The share of the node of rank r goes as r^-0.6. At the size of ogbn-arxiv made undirected, the
    largest in-degree is 14,700 and the median 9, where the real graph has 13,161 and 6.
    """
    return _distinct(nodes, degree, generator, exponent=2.5)


def regular(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """Every node has ``degree`` in-edges and ``degree`` out-edges, with far ends at random."""
    if degree >= nodes:
        raise ValueError(f"synthetic-regular: degree must be below nodes {nodes}, got {degree}.")
    steps = 1 + torch.randperm(nodes - 1, generator=generator)[:degree]
    src = torch.arange(nodes).repeat_interleave(degree)
    dst = (src + steps.repeat(nodes)) % nodes
    return _renamed(torch.stack([src, dst]), nodes, generator)


def window(nodes: int, degree: int, generator: torch.Generator) -> Tensor:
    """A sequence in which every token attends to ``degree`` around it, itself among them."""
    # Sorted by target; turned round, by source.
    return patterns.window(nodes, degree // 2, (degree - 1) // 2).flip(0)


def skewed(nodes: int, edges: int, largest: int, device: torch.device | str = "cpu") -> Tensor:
    """``edges`` at the ends of ``edges / 2`` random pairs, so that the largest degree is as given.

    Every pair is there both ways, so that in- and out-degree of a node are the same. Pairs may
    repeat, and a node may be paired with itself: of as many edges as here, few are. Drawn on
    ``device``, with the same result for every call on it.

    Raises:
        ValueError: ``edges`` is odd, or ``largest`` is not between the mean degree and ``edges``.
    """
    if edges % 2 or not edges < largest * nodes < edges * nodes:
        raise ValueError(
            "skewed: expected an even number of edges, and largest between the mean degree "
            f"{edges / nodes:g} and edges, got nodes={nodes}, edges={edges}, largest={largest}."
        )
    # Node floor(nodes * u ** exponent) is the first with probability nodes ** (-1 / exponent).
    exponent = math.log(nodes) / math.log(edges / largest)
    generator = torch.Generator(device).manual_seed(0)
    u = torch.rand(2, edges // 2, generator=generator, dtype=torch.float64, device=device)
    pairs = (nodes * u**exponent).long().clamp_(max=nodes - 1)
    return _renamed(torch.cat([pairs, pairs.flip(0)], dim=1), nodes, generator)


def _distinct(nodes: int, degree: int, generator: torch.Generator, *, exponent: float) -> Tensor:
    """Distinct pairs without self-loops; node ``floor(nodes * u ** exponent)`` for uniform u."""
    wanted = nodes * degree
    if 2 * degree >= nodes:
        raise ValueError(
            f"synthetic graphs: degree must be below half of nodes {nodes}, got {degree}."
        )
    pairs = torch.empty(0, dtype=torch.int64)  # source * nodes + target
    while pairs.numel() < wanted:
        u = torch.rand(2, wanted, generator=generator, dtype=torch.float64)
        src, dst = (nodes * u**exponent).long()
        pairs = torch.cat([pairs, (src * nodes + dst)[src != dst]]).unique()
    pairs = pairs[torch.randperm(pairs.numel(), generator=generator)[:wanted]]
    return _renamed(torch.stack([pairs // nodes, pairs % nodes]), nodes, generator)


def _renamed(edge_index: Tensor, nodes: int, generator: torch.Generator) -> Tensor:
    """Nodes shuffled, so that neighbours are no neighbours in memory; edges sorted by source."""
    src, dst = torch.randperm(nodes, generator=generator, device=generator.device)[edge_index]
    order = torch.argsort(src * nodes + dst)
    return torch.stack([src[order], dst[order]])


SYNTHETIC: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "synthetic-star": star,
    "synthetic-star-out": star_out,
    "synthetic-powerlaw": powerlaw,
    "synthetic-regular": regular,
    "synthetic-random": random,
    "synthetic-window": window,
}
