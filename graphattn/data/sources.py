"""Where the named sets come from: fetch, check, convert to `NAME.npz`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

from graphattn.data.archive import (
    SPLITS,
    Array,
    assemble,
    dense_features,
    read_archive,
    read_arrays,
    write_archive,
)
from graphattn.data.download import fetch
from graphattn.data.ogb import MAG, OGB, download_ogb, find_raw, folder_of, read_raw, verify

HETEROPHILOUS = "https://github.com/yandex-research/heterophilous-graphs/raw/main/data"
GNN_BENCHMARK = "https://github.com/shchur/gnn-benchmark/raw/master/data/npz"
PLANETOID = "https://github.com/kimiyoung/planetoid/raw/master/data"


@dataclass(frozen=True)
class Source:
    """Where one set comes from, and how many nodes and symmetrised edges it must have."""

    read: "Callable[[str, Source, Path], Data]"
    address: str
    nodes: int
    edges: int


def prepare(name: str, root: Path) -> Path:
    """Make sure that `root/NAME.npz` is there and whole: fetch, check and convert what is missing.

    ogbn-mag, which no archive can hold, is only fetched and stays in OGB's folder.

    Args:
        name: A set in `OGB` or `SOURCES`, or `MAG`.
        root: The folder; made if it does not exist.

    Returns:
        The path of the archive, or of ogbn-mag's folder.

    Raises:
        ValueError: If the name is unknown, or a file is damaged or not the official one.
        ConnectionError: If a download fails.
        ImportError: If a set of OGB has to be downloaded and `ogb` is not installed.
    """
    if name == MAG:
        if find_raw(name, root) is None:
            download_ogb(name, root)
        return folder_of(name, root)
    archive = root / f"{name}.npz"
    if archive.is_file():
        read_archive(archive)
        return archive
    if name in OGB:
        if find_raw(name, root) is None:
            return write_archive(archive, download_ogb(name, root))
        verify(name, root)
        return write_archive(archive, read_raw(name, root))
    if name not in SOURCES:
        raise ValueError(
            f"prepare: unknown data set {name!r}. Known: {', '.join(sorted({*OGB, *SOURCES}))}."
        )
    source = SOURCES[name]
    data = source.read(name, source, root / "downloads")
    edges = to_undirected(remove_self_loops(data.edge_index)[0], num_nodes=data.num_nodes).size(1)
    if (data.num_nodes, edges) != (source.nodes, source.edges):
        raise ValueError(
            f"prepare: {source.address} has {data.num_nodes} nodes and {edges} symmetrised edges, "
            f"expected {source.nodes} and {source.edges}: it is not the set that results are "
            "published for."
        )
    return write_archive(archive, data)


def _read_heterophilous(name: str, source: Source, folder: Path) -> Data:
    """Fetch and read an archive of the heterophilous-graphs project, with its ten splits."""
    masks = [f"{key}_masks" for key in SPLITS]
    arrays = _fetch_arrays(source, folder, ["edges", "node_features", "node_labels", *masks])
    return assemble(
        name,
        source.address,
        edge_index=_integers(arrays["edges"]).T,
        num_nodes=arrays["node_labels"].shape[0],
        x=arrays["node_features"],
        y=_integers(arrays["node_labels"]),
        splits={key: arrays[f"{key}_masks"].astype(bool).T for key in SPLITS},
    )


def _read_gnn_benchmark(name: str, source: Source, folder: Path) -> Data:
    """Fetch and read an archive of the gnn-benchmark project, a CSR adjacency without splits."""
    keys = [f"{what}_{part}" for what in ("adj", "attr") for part in ("indices", "indptr", "shape")]
    arrays = _fetch_arrays(source, folder, [*keys, "attr_data", "labels"])
    num_nodes = int(arrays["adj_shape"][0])
    rows = np.repeat(np.arange(num_nodes), np.diff(arrays["adj_indptr"]))
    return assemble(
        name,
        source.address,
        edge_index=_integers(np.stack([rows, arrays["adj_indices"]])),
        num_nodes=num_nodes,
        x=dense_features(
            {
                f"x_{part}": arrays[f"attr_{part}"]
                for part in ("shape", "indptr", "indices", "data")
            },
            source.address,
        ),
        y=_integers(arrays["labels"]),
    )


def _fetch_arrays(source: Source, folder: Path, keys: list[str]) -> dict[str, Array]:
    """Fetch an npz file, read the arrays named `keys`, and delete it."""
    path = fetch(source.address, folder / source.address.rpartition("/")[2])
    try:
        return read_arrays(path, keys)
    finally:
        path.unlink()


def _integers(array: Array) -> Array:
    return array.astype(np.int64)


def _read_planetoid(name: str, source: Source, folder: Path) -> Data:
    """Fetch the eight files of a Planetoid set, and read them with PyG.

    They are pickles, the only form in which the set is published: PyG unpickles them.
    """
    from torch_geometric.io import read_planetoid_data

    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        fetch(f"{source.address}/ind.{name}.{part}", folder / f"ind.{name}.{part}")
    data = read_planetoid_data(str(folder), name)
    return assemble(
        name,
        source.address,
        edge_index=data.edge_index.numpy(),
        num_nodes=data.x.size(0),
        x=data.x.numpy(),
        y=data.y.numpy(),
        splits={key: data[f"{key}_mask"].numpy() for key in SPLITS},
    )


def _heterophilous(file: str, nodes: int, edges: int) -> Source:
    return Source(_read_heterophilous, f"{HETEROPHILOUS}/{file}.npz", nodes, edges)


def _gnn_benchmark(file: str, nodes: int, edges: int) -> Source:
    return Source(_read_gnn_benchmark, f"{GNN_BENCHMARK}/{file}.npz", nodes, edges)


SOURCES = {
    "actor": _heterophilous("actor", 7_600, 53_318),
    "amazon-computers": _gnn_benchmark("amazon_electronics_computers", 13_752, 491_722),
    "amazon-photo": _gnn_benchmark("amazon_electronics_photo", 7_650, 238_162),
    "amazon-ratings": _heterophilous("amazon_ratings", 24_492, 186_100),
    "chameleon-filtered": _heterophilous("chameleon_filtered", 890, 17_708),
    "citeseer": Source(_read_planetoid, PLANETOID, 3_327, 9_104),
    "coauthor-cs": _gnn_benchmark("ms_academic_cs", 18_333, 163_788),
    "coauthor-physics": _gnn_benchmark("ms_academic_phy", 34_493, 495_924),
    "cora": Source(_read_planetoid, PLANETOID, 2_708, 10_556),
    "cornell": _heterophilous("cornell", 183, 554),
    "minesweeper": _heterophilous("minesweeper", 10_000, 78_804),
    "pubmed": Source(_read_planetoid, PLANETOID, 19_717, 88_648),
    "questions": _heterophilous("questions", 48_921, 307_080),
    "roman-empire": _heterophilous("roman_empire", 22_662, 65_854),
    "squirrel-filtered": _heterophilous("squirrel_filtered", 2_223, 93_996),
    "texas": _heterophilous("texas", 183, 558),
    "tolokers": _heterophilous("tolokers", 11_758, 1_038_000),
    "wisconsin": _heterophilous("wisconsin", 251, 900),
}
