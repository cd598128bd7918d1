"""Archives of graphs: pickle-free npz files, their splits, and the checks of all sources."""

import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch_geometric.data import Data

Array = NDArray[Any]

# Sets that are judged by ROC-AUC; an archive can also say so itself, in `metric`.
ROCAUC = frozenset({"minesweeper", "ogbn-proteins", "questions", "tolokers"})
METRICS = ("accuracy", "rocauc")
SPLITS = ("train", "val", "test")
NUM_RANDOM_SPLITS = 10
# What numpy raises on a truncated, altered or foreign file.
DAMAGED = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    AttributeError,
    TypeError,
    SyntaxError,
    RuntimeError,  # an encrypted member
    NotImplementedError,  # an unknown compression
    zlib.error,
    zipfile.BadZipFile,
)
DENSE_LIMIT = 8 * 2**30  # bytes of a feature matrix that may be made dense


def read_archive(path: Path) -> Data:
    """Read the archive `path`, named after its stem, without unpickling anything.

    Keys: `edge_index` `[2, E]`; `y`; features as dense `x` `[N, F]` or as CSR in `x_shape`,
    `x_indptr`, `x_indices` and, unless every value is 1, `x_data`; one official split as
    `split_code` `[N]` (1 train, 2 validation, 3 test, 0 none) or as bool `train_mask`, `val_mask`,
    `test_mask` `[N]`, S splits as masks `[S, N]`; optionally `edge_attr` `[E, D]`, `num_nodes`,
    `num_classes`, `metric` and `node_*` `[N]` or `[N, K]`.

    Args:
        path: The npz file.

    Returns:
        What `load` returns.

    Raises:
        ValueError: If the file is damaged or its arrays contradict one another.
        TypeError: If `edge_index` is not of integers.
    """
    arrays = read_arrays(path)
    if "edge_index" not in arrays:
        raise ValueError(f"load: {path} has no edge_index; it holds: {', '.join(sorted(arrays))}.")
    x = dense_features(arrays, str(path)) if "x_shape" in arrays else arrays.get("x")
    return assemble(
        path.stem,
        str(path),
        edge_index=arrays["edge_index"],
        num_nodes=_count_nodes(arrays, x, path),
        x=x,
        y=arrays.get("y"),
        splits=_stored_splits(arrays, path),
        metric=str(arrays["metric"]) if "metric" in arrays else None,
        num_classes=int(arrays["num_classes"]) if "num_classes" in arrays else None,
        edge_attr=arrays.get("edge_attr"),
        extras={key: value for key, value in arrays.items() if key.startswith("node_")},
    )


def read_arrays(path: Path, keys: Iterable[str] | None = None) -> dict[str, Array]:
    """Read the arrays of an npz file without unpickling anything.

    Args:
        path: The npz file.
        keys: The arrays wanted. Default: all.

    Returns:
        The arrays by name.

    Raises:
        ValueError: If the file is damaged, is no npz file, holds pickled objects or lacks one of
            `keys`.
    """
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {key: file[key] for key in (file.files if keys is None else keys)}
    except (FileNotFoundError, PermissionError):
        raise
    except DAMAGED as error:
        raise ValueError(
            f"load: {path} is damaged, or is no archive of arrays ({type(error).__name__}: "
            f"{error}). Delete it and get it again."
        ) from error


def write_archive(path: Path, data: Data) -> Path:
    """Write `data` as an archive that `read_archive` reads; whole or not at all.

    Args:
        path: The npz file; an existing one is replaced at once, never half written.
        data: What `load` returns.

    Returns:
        `path`.
    """
    arrays: dict[str, Array] = {
        "edge_index": data.edge_index.numpy().astype(np.int32),
        "num_nodes": np.array(data.num_nodes),
    }
    for key in ("metric", "num_classes"):
        if key in data:
            arrays[key] = np.array(data[key])
    for key, value in data.to_dict().items():
        if key in ("x", "y", "edge_attr") or (key.startswith("node_") and torch.is_tensor(value)):
            arrays[key] = value.numpy()
        elif key.endswith("_mask"):
            arrays[key] = np.ascontiguousarray(value.numpy().T)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def assemble(
    name: str,
    source: str,
    *,
    edge_index: Array,
    num_nodes: int,
    x: Array | None = None,
    y: Array | None = None,
    splits: Mapping[str, Array] | None = None,
    metric: str | None = None,
    num_classes: int | None = None,
    edge_attr: Array | None = None,
    extras: Mapping[str, Array] | None = None,
) -> Data:
    """Check the arrays of one data set against each other and build the `Data` that `load` returns.

    Args:
        name: The name of the set.
        source: Where the arrays come from, for error messages.
        edge_index: Integers `[2, E]`.
        num_nodes: N.
        x: Features `[N, F]`.
        y: Labels `[N]`, `[N, 1]` or, for T binary tasks, `[N, T]`.
        splits: Boolean `[N]` or `[N, S]` for each of train, val, test; default ten random splits.
        metric: "accuracy" or "rocauc"; default by name and label shape.
        num_classes: Number of classes; default the largest label plus one.
        edge_attr: `[E, D]`.
        extras: Further arrays per node.

    Returns:
        The `Data`.

    Raises:
        ValueError: If two of them disagree.
        TypeError: If `edge_index` is neither int32 nor int64.
    """
    if edge_index.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"load: {source}: edge_index must be int32 or int64, got {edge_index.dtype}."
        )
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"load: {source}: edge_index must have shape (2, num_edges), got {edge_index.shape}."
        )
    if edge_index.size > 0 and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
        raise ValueError(
            f"load: {source}: edge_index must lie in 0..{num_nodes - 1}, got "
            f"{edge_index.min()}..{edge_index.max()}. For raw identifiers use "
            "graphattn.data.relabel."
        )
    data = Data(edge_index=_tensor(edge_index, torch.int64), num_nodes=num_nodes, name=name)
    per_node = {
        "x": x,
        "y": y,
        **(extras or {}),
        **{f"{k}_mask": v for k, v in (splits or {}).items()},
    }
    for key, array in per_node.items():
        if array is not None and array.shape[:1] != (num_nodes,):
            raise ValueError(
                f"load: {source}: {key} must have one row per node, {num_nodes}, got shape "
                f"{array.shape}."
            )
    if x is not None:
        if x.ndim not in (1, 2):
            raise ValueError(
                f"load: {source}: x must have shape (num_nodes, num_features), got {x.shape}."
            )
        data.x = _tensor(x if x.ndim == 2 else x[:, None], torch.float32)
    if edge_attr is not None:
        if edge_attr.shape[:1] != edge_index.shape[1:]:
            raise ValueError(
                f"load: {source}: edge_attr must have one row per edge, {edge_index.shape[1]}, got "
                f"shape {edge_attr.shape}."
            )
        data.edge_attr = _tensor(edge_attr, torch.float32)
        if data.edge_attr.dim() == 1:
            data.edge_attr = data.edge_attr.unsqueeze(-1)
    for key, array in (extras or {}).items():
        data[key] = _tensor(array, torch.int64 if array.dtype.kind in "iu" else torch.float32)
    if y is not None:
        _set_labels(data, source, y, metric, num_classes)
        for key, mask in (splits or random_splits(num_nodes)).items():
            data[f"{key}_mask"] = _tensor(mask, torch.bool)
    return data


def random_splits(num_nodes: int) -> dict[str, Array]:
    """Draw ten random splits of 60/20/20 percent of the nodes.

    Args:
        num_nodes: N.

    Returns:
        Boolean `[N, 10]` for each of train, val, test. They come from sorting raw 64-bit words of
        PCG64, a stream that numpy keeps the same in every version and on every machine.
    """
    splits = {key: np.zeros((num_nodes, NUM_RANDOM_SPLITS), dtype=bool) for key in SPLITS}
    bounds = (0, num_nodes * 6 // 10, num_nodes * 8 // 10, num_nodes)
    for seed in range(NUM_RANDOM_SPLITS):
        order = np.argsort(np.random.PCG64(seed).random_raw(num_nodes), kind="stable")
        for key, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
            splits[key][order[start:stop], seed] = True
    return splits


def _tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(dtype)


def _set_labels(
    data: Data, source: str, y: Array, metric: str | None, num_classes: int | None
) -> None:
    """Store `y` as classes `[N]` or as binary tasks `[N, T]`, and what goes with it."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2):
        raise ValueError(f"load: {source}: y must have one or two dimensions, got shape {y.shape}.")
    if metric is None:
        metric = "rocauc" if data.name in ROCAUC or y.ndim == 2 else "accuracy"
    if metric not in METRICS:
        raise ValueError(f"load: {source}: metric must be one of {METRICS}, got {metric!r}.")
    data.metric = metric
    if y.ndim == 2:
        data.y = _tensor(y, torch.float32)
        data.num_classes = 2
        return
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"load: {source}: labels of one task must be integers, got {y.dtype}. Store several "
            "binary tasks as y of shape (num_nodes, num_tasks)."
        )
    largest = int(y.max(initial=-1))
    if num_classes is None:
        num_classes = largest + 1
    if y.min(initial=0) < 0 or largest >= num_classes:
        raise ValueError(
            f"load: {source}: labels must lie in 0..{num_classes - 1}, got {y.min()}..{largest}."
        )
    data.y = _tensor(y, torch.int64)
    data.num_classes = num_classes


def _count_nodes(arrays: Mapping[str, Array], x: Array | None, path: Path) -> int:
    """Take N from the arrays with one row per node, never from the largest index."""
    if "num_nodes" in arrays:
        return int(arrays["num_nodes"])
    for array in (x, arrays.get("y")):
        if array is not None:
            return int(array.shape[0])
    raise ValueError(
        f"load: {path}: the number of nodes is unknown: the archive needs x, y or num_nodes. It is "
        "not guessed from the largest index, which would lose isolated last nodes."
    )


def dense_features(arrays: Mapping[str, Array], source: str) -> Array:
    """Make the matrix given in CSR form by `x_shape`, `x_indptr`, `x_indices` and `x_data` dense.

    Args:
        arrays: The four arrays; without `x_data` every value is 1.
        source: Where they come from, for error messages.

    Returns:
        float32 `[rows, columns]`.

    Raises:
        ValueError: If they contradict each other, or the matrix would take more than 8 GiB.
    """
    missing = [key for key in ("x_indptr", "x_indices") if key not in arrays]
    if missing:
        raise ValueError(f"load: {source} has x_shape but no {' and no '.join(missing)}.")
    indptr, indices = arrays["x_indptr"].astype(np.int64), arrays["x_indices"].astype(np.int64)
    rows, columns = (int(size) for size in arrays["x_shape"])
    size = rows * columns * 4
    if size > DENSE_LIMIT:
        raise ValueError(
            f"load: {source}: features of shape ({rows}, {columns}) take {size / 2**30:.1f} GiB as "
            f"a dense matrix, more than the {DENSE_LIMIT / 2**30:.1f} GiB allowed. Read x_indptr "
            "and x_indices with numpy.load and reduce the features first."
        )
    values = arrays.get("x_data", np.ones(indices.shape, dtype=np.float32))
    if (
        indptr.shape != (rows + 1,)
        or (indptr[0], indptr[-1]) != (0, indices.size)
        or (np.diff(indptr) < 0).any()
        or values.shape != indices.shape
        or (indices.size > 0 and (indices.min() < 0 or indices.max() >= columns))
    ):
        raise ValueError(
            f"load: {source}: x_shape, x_indptr, x_indices and x_data do not describe one matrix."
        )
    matrix = csr_array((values.astype(np.float32), indices, indptr), shape=(rows, columns))
    return cast(Array, matrix.toarray())


def _stored_splits(arrays: Mapping[str, Array], path: Path) -> dict[str, Array] | None:
    """Return the official splits as `[N]` or `[N, S]`, or None if the archive has none."""
    if "split_code" in arrays:
        code = arrays["split_code"]
        if not np.isin(code, (0, 1, 2, 3)).all():
            raise ValueError(
                f"load: {path}: split_code must hold 1 (train), 2 (validation), 3 (test) or 0 "
                f"(none), got {sorted(set(np.unique(code).tolist()) - {0, 1, 2, 3})}."
            )
        return {key: code == i for i, key in enumerate(SPLITS, start=1)}
    present = [key for key in SPLITS if f"{key}_mask" in arrays]
    if not present:
        return None
    if len(present) < len(SPLITS):
        raise ValueError(
            f"load: {path} has {', '.join(f'{key}_mask' for key in present)} only; it needs "
            "train_mask, val_mask and test_mask, or none of them."
        )
    return {key: arrays[f"{key}_mask"].T for key in SPLITS}
