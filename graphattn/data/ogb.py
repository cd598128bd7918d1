"""The node sets of the Open Graph Benchmark: OGB's csv.gz files, read directly or through `ogb`."""

import contextlib
import csv
import gzip
import io
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from graphattn.data.archive import SPLITS, Array, assemble
from graphattn.data.download import checksum, fetch


@dataclass(frozen=True)
class OgbSet:
    """What OGB's master table says about a node set."""

    metric: str
    num_classes: int
    split: str
    add_inverse_edge: bool
    has_features: bool
    node_files: tuple[str, ...] = ()


OGB = {
    "ogbn-arxiv": OgbSet("accuracy", 40, "time", False, True, ("node_year",)),
    "ogbn-products": OgbSet("accuracy", 47, "sales_ranking", True, True),
    "ogbn-proteins": OgbSet("rocauc", 2, "species", True, False, ("node_species",)),
}
MAG = "ogbn-mag"
MAG_CLASSES = 349
# SHA-256 of the official files, by their path in the set's folder.
CHECKSUMS = {
    "ogbn-arxiv": {
        "raw/edge.csv.gz": ("47629e986116407d27eff4c9d2e923f06bf5da5c85cbae93b660f530bc9355df"),
        "raw/node-feat.csv.gz": (
            "60a844c7aff2f129335d34da2f6b9271bd1cac03aff8c70c229e6f0d13624718"
        ),
        "raw/node-label.csv.gz": (
            "b06e7cf75d909de66ce49bc4188a6dc525224f85dd6dcb36137de3d9321830d1"
        ),
        "raw/node_year.csv.gz": (
            "fb97e19d6003deb09197f6df6b10ea1ab86ee49d98885836c3c857ab58d897f3"
        ),
        "raw/num-edge-list.csv.gz": (
            "430f1e00ae204bbb3208c5f494ab70170e9f2995fd3548d1754a74a8f59250d1"
        ),
        "raw/num-node-list.csv.gz": (
            "9aa60a342efd209408933ace51e6b0a814e81c2894a993c44f9b173e477e2e82"
        ),
        "split/time/train.csv.gz": (
            "84983391900af45194e5db8d977ec9e01d4eda96e20328f3d7575fdd45c6797c"
        ),
        "split/time/valid.csv.gz": (
            "ebe6cdcd77c75eedbce2064a05a49bc28e2c4a631f49d66b9e9ff317eef993eb"
        ),
        "split/time/test.csv.gz": (
            "588fb66ce57bcaef51ac0235f0a49a056370ac31fc27c8ebf556d3f5cdd02545"
        ),
    }
}


def folder_of(name: str, root: Path) -> Path:
    """Return OGB's folder of a set, `root/ogbn_arxiv` for ogbn-arxiv."""
    return root / name.replace("-", "_")


def raw_marker(name: str) -> str:
    """Return the file by which OGB's csv.gz layout is known, in the set's folder."""
    return "raw/triplet-type-list.csv.gz" if name == MAG else "raw/edge.csv.gz"


def find_raw(name: str, root: Path) -> Path | None:
    """Return the set's folder if its edges are there in OGB's csv.gz layout, else None."""
    folder = folder_of(name, root)
    return folder if (folder / raw_marker(name)).is_file() else None


def stale_cache(name: str, root: Path) -> str:
    """Return a sentence about ogb's pickled cache if it is all there is, else nothing."""
    cache = folder_of(name, root) / "processed"
    if name in (*OGB, MAG) and cache.is_dir() and any(cache.iterdir()):
        return (
            f" {cache} holds ogb's cache of pickled objects, which torch >= 2.6 refuses to load "
            "and which is not read: the csv.gz files are needed."
        )
    return ""


def verify(name: str, root: Path) -> int:
    """Compare the csv.gz files of a set with the official checksums.

    Args:
        name: A set in `OGB`.
        root: The folder that holds the set's folder.

    Returns:
        The number of files compared; 0 if no checksum is known.

    Raises:
        ValueError: If a file is not the official one.
    """
    known = CHECKSUMS.get(name, {})
    present = [path for path in known if (folder_of(name, root) / path).is_file()]
    for path in present:
        got = checksum(folder_of(name, root) / path)
        if got != known[path]:
            raise ValueError(
                f"verify: {folder_of(name, root) / path} has SHA-256 {got}, the official file "
                f"{known[path]}. It is damaged or of another release: delete its folder and get it "
                "again."
            )
    return len(present)


def read_raw(name: str, root: Path) -> Data:
    """Read a set from OGB's csv.gz files, without `ogb` and without its cache of pickled objects.

    Args:
        name: A set in `OGB`.
        root: The folder that holds the set's folder.

    Returns:
        What `load` returns; `x` is absent, with a warning, if the set's feature file is missing.

    Raises:
        FileNotFoundError: If a needed file is missing.
        ValueError: If a file is damaged or has another length than announced.
    """
    spec, folder = OGB[name], folder_of(name, root)
    raw, split = folder / "raw", folder / "split" / spec.split
    needed = [
        raw / f"{stem}.csv.gz" for stem in ("edge", "num-node-list", "num-edge-list", "node-label")
    ]
    needed += [split / f"{stem}.csv.gz" for stem in ("train", "valid", "test")]
    _check_present(name, folder, needed)
    num_nodes = int(_read_csv(raw / "num-node-list.csv.gz", np.int64)[0, 0])
    num_edges = int(_read_csv(raw / "num-edge-list.csv.gz", np.int64)[0, 0])
    edge_index = _read_csv(raw / "edge.csv.gz", np.int64, columns=2).T
    if edge_index.shape[1] != num_edges:
        raise ValueError(
            f"load: {raw / 'edge.csv.gz'} has {edge_index.shape[1]} edges, but "
            f"{raw / 'num-edge-list.csv.gz'} says {num_edges}."
        )
    x = _read_optional(raw / "node-feat.csv.gz", np.float32)
    if x is None and spec.has_features:
        warnings.warn(
            f"load: {raw / 'node-feat.csv.gz'} is missing, so {name!r} has no features (x).",
            stacklevel=3,
        )
    edge_attr = _read_optional(raw / "edge-feat.csv.gz", np.float32)
    if spec.add_inverse_edge:
        edge_index = _with_inverse(edge_index)
        edge_attr = None if edge_attr is None else edge_attr.repeat(2, axis=0)
    extras = {}
    for stem in spec.node_files:
        values = _read_optional(raw / f"{stem}.csv.gz", np.int64)
        if values is None:  # the released ogbn-proteins calls it species.csv.gz
            values = _read_optional(raw / f"{stem.removeprefix('node_')}.csv.gz", np.int64)
        if values is not None:
            extras[stem] = values
    return _build(
        name,
        str(folder),
        edge_index=edge_index,
        edge_attr=edge_attr,
        num_nodes=num_nodes,
        x=x,
        y=_read_csv(raw / "node-label.csv.gz", np.int64),
        split={
            key: _read_csv(split / f"{key}.csv.gz", np.int64, columns=1)[:, 0]
            for key in ("train", "valid", "test")
        },
        extras=extras,
    )


def read_mag(root: Path) -> HeteroData:
    """Read ogbn-mag from OGB's csv.gz files, as :func:`read_raw` reads the other sets.

    Args:
        root: The folder that holds the set's folder.

    Returns:
        What `load` returns for ogbn-mag.

    Raises:
        FileNotFoundError: If a needed file is missing.
        ValueError: If a file is damaged, or an index is not one of a node.
    """
    folder = folder_of(MAG, root)
    raw, split = folder / "raw", folder / "split" / "time" / "paper"
    feature, label = (
        raw / "node-feat/paper/node-feat.csv.gz",
        raw / "node-label/paper/node-label.csv.gz",
    )
    numbers, kinds = raw / "num-node-dict.csv.gz", folder / raw_marker(MAG)
    splits = {
        key: split / f"{stem}.csv.gz"
        for key, stem in zip(SPLITS, ("train", "valid", "test"), strict=True)
    }
    _check_present(MAG, folder, [feature, label, numbers, kinds, *splits.values()])
    relations = [tuple(row) for row in _read_words(kinds)]
    edges = {
        relation: raw / "relations" / "___".join(relation) / "edge.csv.gz" for relation in relations
    }
    _check_present(MAG, folder, list(edges.values()))

    data = HeteroData()
    types, counts = _read_words(numbers)
    for kind, count in zip(types, counts, strict=True):
        data[kind].num_nodes = int(count)
    paper, num_papers = data["paper"], data["paper"].num_nodes
    paper.x = torch.from_numpy(_read_csv(feature, np.float32))
    paper.y = torch.from_numpy(_read_csv(label, np.int64, columns=1)[:, 0])
    year = _read_optional(feature.with_name("node_year.csv.gz"), np.int64)
    if year is not None:
        paper.node_year = torch.from_numpy(year[:, 0])
    for what, rows in (("x", paper.x), ("y", paper.y)):
        if rows.size(0) != num_papers:
            raise ValueError(
                f"load: {folder}: {what} must have one row per paper, {num_papers}, got "
                f"{rows.size(0)}."
            )
    for key, path in splits.items():
        mask = torch.zeros(num_papers, dtype=torch.bool)
        mask[_indices(path, num_papers)] = True
        paper[f"{key}_mask"] = mask
    for relation, path in edges.items():
        src, _, dst = relation
        sizes = (data[src].num_nodes, data[dst].num_nodes)
        data[relation].edge_index = _indices(path, *sizes)
    data.name, data.metric, data.num_classes = MAG, "accuracy", MAG_CLASSES
    return data


def _indices(path: Path, *sizes: int) -> Tensor:
    """Read columns of node indices, each below its size: int64 `[columns, rows]`, or `[rows]`."""
    columns = torch.from_numpy(_read_csv(path, np.int64, columns=len(sizes)).T.copy())
    for column, size in zip(columns, sizes, strict=True):
        if column.numel() > 0 and (column.min() < 0 or column.max() >= size):
            raise ValueError(
                f"load: {path} must hold nodes 0..{size - 1}, got {column.min()}..{column.max()}."
            )
    return columns[0] if len(sizes) == 1 else columns


def _read_words(path: Path) -> list[list[str]]:
    try:
        with gzip.open(path, "rt", encoding="ascii", newline="") as file:
            return list(csv.reader(file))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"load: {path} is damaged ({error}). Get it again.") from error


def _check_present(name: str, folder: Path, needed: list[Path]) -> None:
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"load: {name!r} in {folder} is incomplete, it lacks {', '.join(missing)}. Add the "
            f"files, or move the folder away and run: python datasets/prepare.py {name}"
        )


def download_ogb(name: str, root: Path) -> Data | HeteroData:
    """Download a set from OGB's public address, check it, and read it with the `ogb` package.

    OGB's own files stay in the set's folder. `ogb` asks no question, does not look for updates, and
    leaves no cache.

    Args:
        name: A set in `OGB`, or `MAG`.
        root: The folder to put the set's folder in.

    Returns:
        What `load` returns.

    Raises:
        ImportError: If `ogb` is not installed.
        FileExistsError: If the set's folder exists without its edges.
        ConnectionError: If the download fails.
        ValueError: If what came is not the official set.
    """
    folder = folder_of(name, root)
    if folder.exists():
        raise FileExistsError(
            f"download: {folder} exists but has no {raw_marker(name)}. Move it away and try again."
        )
    entry = _master_table()[name]
    archive = fetch(entry["url"], root / "downloads" / entry["url"].rpartition("/")[2])
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as temporary:
        try:
            with zipfile.ZipFile(archive) as file:
                file.extractall(temporary)
            official = folder_of(name, Path(temporary))
            unpacked = Path(temporary) / entry["download_name"]
            if not (unpacked / raw_marker(name)).is_file():
                raise ValueError(f"it has no {entry['download_name']}/{raw_marker(name)}")
            os.replace(unpacked, official)
            verify(name, Path(temporary))
            unread = Path(temporary)
            data = read_mag(unread) if name == MAG else read_with_ogb(name, unread)
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            archive.unlink()
            raise ValueError(
                f"download: {entry['url']} is damaged or not the official set ({error}). It was "
                "removed: try again."
            ) from error
        os.replace(official, folder)
    archive.unlink()
    return data


def read_with_ogb(name: str, root: Path) -> Data:
    """Read a set from its csv.gz files with `ogb.nodeproppred.NodePropPredDataset`.

    Args:
        name: A set in `OGB`.
        root: The folder that holds the set's folder, with OGB's csv.gz layout complete.

    Returns:
        What `load` returns.

    Raises:
        ImportError: If `ogb` is not installed.
        ValueError: If the folder is of another release than the installed `ogb` expects.
    """
    folder = folder_of(name, root)
    dataset_class = import_ogb().NodePropPredDataset
    with tempfile.TemporaryDirectory(prefix=".ogb-", dir=root) as temporary:
        # A folder of links, so that neither an old cache is read nor a new one left behind.
        view = folder_of(name, Path(temporary))
        (view / "processed").mkdir(parents=True)
        for path in folder.iterdir():
            if path.name != "processed":
                _link(path, view / path.name)
        try:
            with _unattended():
                dataset = dataset_class(name=name, root=temporary)
                graph, labels = dataset[0]
                split = dataset.get_idx_split()
        except EOFError as error:  # it wanted to ask whether to update
            raise ValueError(
                f"load: {folder} is of another release than ogb expects: it has no "
                f"RELEASE_v{_master_table()[name]['version']}.txt. Move it away and get it again."
            ) from error
    return _build(
        name,
        str(folder),
        edge_index=graph["edge_index"],
        edge_attr=graph["edge_feat"],
        num_nodes=int(graph["num_nodes"]),
        x=graph["node_feat"],
        y=labels,
        split=split,
        extras={key: graph[key] for key in OGB[name].node_files},
    )


def import_ogb() -> ModuleType:
    """Import `ogb.nodeproppred` without the network request and the variable that come with it.

    On import `ogb` sets `OUTDATED_IGNORE` and asks the package index for a newer release, in a
    thread, if the package `outdated` is there. It is hidden for that moment, and the environment
    put back.

    Returns:
        The module `ogb.nodeproppred`.

    Raises:
        ImportError: If `ogb` is not installed.
    """
    absent = object()
    hidden: Any = sys.modules.get("outdated", absent)
    variable = os.environ.get("OUTDATED_IGNORE")
    sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ogb.nodeproppred
    except ImportError as error:
        raise ImportError(
            f"load: downloading OGB's sets needs the ogb package ({error}): pip install "
            "'graphattn[ogb]'"
        ) from error
    finally:
        if hidden is absent:
            del sys.modules["outdated"]
        else:
            sys.modules["outdated"] = hidden
        if variable is None:
            os.environ.pop("OUTDATED_IGNORE", None)
        else:
            os.environ["OUTDATED_IGNORE"] = variable
    return ogb.nodeproppred


def _master_table() -> dict[str, dict[str, str]]:
    """Read the table of sets that comes with `ogb`: for each its address, split, task and so on."""
    path = Path(str(import_ogb().__file__)).with_name("master.csv")
    with open(path, newline="", encoding="utf-8") as file:
        (_, *names), *rows = csv.reader(file)
    return {
        name: {row[0]: row[column] for row in rows} for column, name in enumerate(names, start=1)
    }


@contextlib.contextmanager
def _unattended() -> Iterator[None]:
    """Let code run that prints and asks: prints are dropped, every question fails at once."""
    stdin = sys.stdin
    sys.stdin = io.StringIO("")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.stdin = stdin


def _link(source: Path, target: Path) -> None:
    """Link `target` to `source`, or copy where the file system has no links."""
    try:
        os.symlink(source.resolve(), target, target_is_directory=source.is_dir())
    except OSError:
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def _build(
    name: str,
    source: str,
    *,
    edge_index: Array,
    num_nodes: int,
    x: Array | None,
    y: Array,
    split: dict[str, Array],
    edge_attr: Array | None,
    extras: dict[str, Array],
) -> Data:
    """Turn OGB's arrays into the `Data` that `load` returns: index lists become masks."""
    splits = {}
    for key, theirs in zip(SPLITS, ("train", "valid", "test"), strict=True):
        nodes = split[theirs]
        if nodes.size > 0 and (nodes.min() < 0 or nodes.max() >= num_nodes):
            raise ValueError(
                f"load: {source}: the {theirs} split must hold nodes 0..{num_nodes - 1}, got "
                f"{nodes.min()}..{nodes.max()}."
            )
        splits[key] = np.zeros(num_nodes, dtype=bool)
        splits[key][nodes] = True
    return assemble(
        name,
        source,
        edge_index=edge_index,
        num_nodes=num_nodes,
        x=x,
        y=y,
        splits=splits,
        metric=OGB[name].metric,
        num_classes=OGB[name].num_classes,
        edge_attr=edge_attr,
        extras={
            key: value[:, 0] if value.shape == (num_nodes, 1) else value
            for key, value in extras.items()
        },
    )


def _with_inverse(edge_index: Array) -> Array:
    """Put the reverse of each edge right after it, the order of OGB's loader."""
    both = edge_index.repeat(2, axis=1)
    both[:, 1::2] = edge_index[::-1]
    return both


def _read_csv(path: Path, dtype: DTypeLike, *, columns: int | None = None) -> Array:
    """Read a csv.gz file of numbers as `[rows, columns]`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*input contained no data", category=UserWarning
            )
            with gzip.open(path, "rt", encoding="ascii") as file:
                values = np.loadtxt(file, dtype=dtype, delimiter=",", ndmin=2)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"load: {path} is damaged ({type(error).__name__}: {error}). Get it again."
        ) from error
    if values.size == 0:
        return values.reshape(0, columns if columns is not None else 1)
    if columns is not None and values.shape[1] != columns:
        raise ValueError(f"load: {path} must have {columns} columns, got {values.shape[1]}.")
    return values


def _read_optional(path: Path, dtype: DTypeLike) -> Array | None:
    return _read_csv(path, dtype) if path.is_file() else None
