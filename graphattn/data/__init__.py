"""Graphs to train on: archives, Open Graph Benchmark, networkx and a synthetic stand-in.

One call returns one PyTorch Geometric `Data` with features, labels, splits and the metric:

    >>> from graphattn.data import load
    >>> data = load("karate")
    >>> data.num_nodes, data.num_edges, data.num_classes, data.metric
    (34, 156, 2, 'accuracy')

Nothing is downloaded, and neither `ogb` nor `pandas` is imported, unless `download=True` is given.
"""

import re
from pathlib import Path
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from graphattn.data.archive import ROCAUC, assemble, read_archive
from graphattn.data.metrics import evaluate
from graphattn.data.networkx import from_networkx, to_networkx
from graphattn.data.ogb import (
    MAG,
    OGB,
    find_raw,
    folder_of,
    raw_marker,
    read_mag,
    read_raw,
    stale_cache,
)
from graphattn.data.sources import SOURCES, prepare
from graphattn.data.synthetic import synthetic_arxiv

__all__ = [
    "evaluate",
    "from_networkx",
    "known",
    "load",
    "relabel",
    "synthetic_arxiv",
    "to_networkx",
]

# name -> (function of networkx, node attribute that serves as the label)
NETWORKX: dict[str, tuple[str, str | None]] = {
    "davis": ("davis_southern_women_graph", "bipartite"),
    "florentine": ("florentine_families_graph", None),
    "karate": ("karate_club_graph", "club"),
    "les-miserables": ("les_miserables_graph", None),
}


def known() -> list[str]:
    """Return every name that `load` knows, sorted, whether its files are present or not.

    Returns:
        The names. `load` also takes any NAME for which `root/NAME.npz` exists.

    Example:
        >>> "ogbn-arxiv" in known()
        True
    """
    return sorted({*NETWORKX, *OGB, MAG, *SOURCES, "synthetic-arxiv"})


@overload
def load(
    name: Literal["ogbn-mag"], *, root: str | Path = "datasets", download: bool = False
) -> HeteroData: ...


@overload
def load(name: str, *, root: str | Path = "datasets", download: bool = False) -> Data: ...


def load(name: str, *, root: str | Path = "datasets", download: bool = False) -> Data | HeteroData:
    r"""Load a graph with its features, labels, splits and metric.

    Where a name is looked for, in this order:

    1. The graphs that come with networkx (`karate`, `davis`, `florentine`, `les-miserables`) and
       the generated `synthetic-arxiv` (169,343 nodes; `synthetic-arxiv-5000` has 5,000) need no
       file.
    2. `root/NAME.npz`, an archive as `datasets/README.md` describes it.
    3. For ogbn-arxiv, ogbn-products, ogbn-proteins and ogbn-mag: the csv.gz files in OGB's own
       layout, such as `root/ogbn_arxiv/raw/edge.csv.gz` and
       `root/ogbn_arxiv/split/time/train.csv.gz`.
    4. With `download=True`: the set's public address, once; the result is kept as `root/NAME.npz`
       (ogbn-mag: as it came).

    Nothing asks on standard input, and nothing is downloaded without `download=True`. OGB's cache
    of pickled objects (`processed/`), which torch >= 2.6 refuses to load, is never used.

    Args:
        name: One of `known()`, or the stem of an npz file in `root`.
        root: Folder of the archives and of OGB's folders.
        download: Whether the network may be used if the set is not in `root`. OGB's sets need the
            `ogb` package for it (`pip install 'graphattn[ogb]'`).

    Returns:
        A `Data` with

        - `edge_index`, int64 `[2, E]`, row 0 the source, row 1 the target, exactly as stored:
          ogbn-arxiv is directed (use `torch_geometric.utils.to_undirected`), ogbn-products and
          ogbn-proteins have both directions as in OGB's own loader;
        - `x`, float32 `[N, F]`, absent if the set has no features;
        - `y`, int64 `[N]`, or float32 `[N, T]` for T binary tasks (ogbn-proteins);
        - `train_mask`, `val_mask`, `test_mask`, bool `[N]` for one official split, `[N, S]` for S
          splits. A set without official splits has ten random ones of 60/20/20 percent, the same on
          every machine;
        - `num_nodes`, `num_classes` and `name`; `metric`, `"accuracy"` or `"rocauc"`, for
          `evaluate`;
        - where the set has them: `edge_attr` float32 `[E, D]`, `node_year`, `node_species`.

        `florentine` and `les-miserables` have no labels: no `y`, masks, metric or `num_classes`.

        ogbn-mag is a `HeteroData`: `x`, `y`, `node_year` and the masks belong to the node type
        `"paper"`, the three other types have `num_nodes`, the four relations `edge_index`.

    Raises:
        ValueError: If the name is unknown, or a file is damaged or contradicts itself.
        FileNotFoundError: If the set is known but not in `root`, with the paths looked at.
        ConnectionError: If a download fails. What has arrived is kept, and the next try resumes.

    Example:
        >>> data = load("synthetic-arxiv-1000")
        >>> data.x.shape, data.num_classes, int(data.train_mask.sum())
        (torch.Size([1000, 128]), 40, 537)
    """
    if not isinstance(name, str):
        raise TypeError(f"load: name must be a string, got {type(name).__name__}.")
    folder = Path(root).expanduser()
    if name in NETWORKX:
        return _load_networkx(name)
    if name == "synthetic-arxiv":
        return synthetic_arxiv()
    sized = re.fullmatch(r"synthetic-arxiv-([0-9]+)", name)
    if sized is not None:
        return synthetic_arxiv(num_nodes=int(sized[1]))
    if name == "ogbn-papers100M":
        raise ValueError(
            f"load: {name!r} is not supported: with 111 million nodes it does not fit in one Data. "
            "Use ogb's own loader."
        )
    is_plain = re.fullmatch(r"\w[\w.+-]*", name) is not None  # no path, so nothing outside root
    archive = folder / f"{name}.npz"
    if is_plain and archive.is_file():
        return read_archive(archive)
    if name not in (*OGB, MAG, *SOURCES):
        found = sorted(path.stem for path in folder.glob("*.npz"))
        raise ValueError(
            f"load: unknown data set {name!r}. Known: {', '.join(known())}. Archives in {folder}: "
            f"{', '.join(found) if found else 'none'}."
        )
    looked_at = [str(archive)]
    if name in (*OGB, MAG):
        if find_raw(name, folder) is not None:
            return read_raw(name, folder) if name in OGB else read_mag(folder)
        looked_at.append(str(folder_of(name, folder) / raw_marker(name)))
    if download:
        path = prepare(name, folder)
        return read_archive(path) if name != MAG else read_mag(folder)
    raise FileNotFoundError(
        f"load: {name!r} is not here: looked for "
        f"{' and '.join(looked_at)}.{stale_cache(name, folder)} Pass download=True, or run: python "
        f"datasets/prepare.py {name}"
    )


def relabel(edge_index: Tensor, *, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Replace raw identifiers (database keys, say) by the positions 0, 1, ..., N - 1.

    Args:
        edge_index: int32 or int64 `[2, E]` of raw identifiers.
        ids: The identifiers in the order wanted, int32 or int64 `[N]` without duplicates: give it
            to follow the row order of your features, or to keep nodes without edges. Default: those
            that occur in `edge_index`, sorted.

    Returns:
        `(edge_index, ids)`: int64 `[2, E]` of positions, and int64 `[N]`, so that
        `ids[edge_index]` is the input. The number of nodes is `ids.numel()`.

    Raises:
        TypeError: If a dtype is neither int32 nor int64.
        ValueError: If a shape is wrong, or `ids` repeats one identifier or lacks one.

    Example:
        >>> import torch
        >>> relabel(torch.tensor([[10**9 + 1], [10**9]]))
        (tensor([[1],
                [0]]), tensor([1000000000, 1000000001]))
    """
    for what, tensor in (("edge_index", edge_index), ("ids", ids)):
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"relabel: {what} must be int32 or int64, got {tensor.dtype}.")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"relabel: edge_index must have shape (2, num_edges), got {tuple(edge_index.shape)}."
        )
    edge_index = edge_index.long()
    if ids is None:
        unique, positions = torch.unique(edge_index, return_inverse=True)
        return positions, unique
    if ids.dim() != 1:
        raise ValueError(f"relabel: ids must have shape (num_nodes,), got {tuple(ids.shape)}.")
    ids = ids.long()
    ordered, order = ids.sort()
    repeated = ordered[1:][ordered[1:] == ordered[:-1]].unique()
    if repeated.numel() > 0:
        raise ValueError(f"relabel: ids must not repeat, got twice: {_some(repeated)}.")
    missing = torch.unique(edge_index)
    missing = missing[~torch.isin(missing, ids)]
    if missing.numel() > 0:
        raise ValueError(f"relabel: edge_index holds identifiers that ids lacks: {_some(missing)}.")
    if edge_index.numel() == 0:
        return edge_index, ids
    return order[torch.searchsorted(ordered, edge_index)], ids


def _some(values: Tensor, limit: int = 10) -> str:
    shown = ", ".join(str(value) for value in values[:limit].tolist())
    more = values.numel() - limit
    return shown if more <= 0 else f"{shown} and {more} more"


def _load_networkx(name: str) -> Data:
    import networkx as nx

    function, label = NETWORKX[name]
    graph = getattr(nx, function)()
    weighted = all("weight" in values for _, _, values in graph.edges(data=True))
    data, nodes = from_networkx(graph, edge_attrs="weight" if weighted else None)
    y = None
    if label is not None:
        classes = {
            value: i for i, value in enumerate(sorted(set(dict(graph.nodes(label)).values())))
        }
        y = np.array([classes[graph.nodes[node][label]] for node in nodes])
    return assemble(
        name,
        f"networkx.{function}",
        edge_index=data.edge_index.numpy(),
        num_nodes=len(nodes),
        y=y,
        metric="rocauc" if name in ROCAUC else "accuracy",
        edge_attr=data.edge_attr.numpy() if weighted else None,
    )
