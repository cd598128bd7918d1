"""Small files of every layout that the data tests read."""

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from graphattn.data.ogb import OGB

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "ogbn-arxiv.npz").is_file(), reason="the folder of real data sets is absent"
)
EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 0]], dtype=np.int32)


def write_npz(path, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def write_csv(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.asarray(values)
    fmt = "%d" if values.dtype.kind in "iub" else "%.6f"
    with gzip.open(path, "wt", compresslevel=1) as file:
        np.savetxt(file, values if values.ndim == 2 else values[:, None], fmt=fmt, delimiter=",")


def write_raw(root, name, *, folder=None, **change):
    """Write a small set in OGB's layout: 6 nodes, 7 edges."""
    folder = root / (folder or name.replace("-", "_"))
    rng = np.random.default_rng(0)
    files = {
        "raw/edge": rng.integers(0, 5, (7, 2)),  # node 5 is isolated
        "raw/num-node-list": np.array([6]),
        "raw/num-edge-list": np.array([7]),
        "raw/node-label": np.array([0, 3, 1, 2, 0, 39]),
        "raw/node-feat": rng.standard_normal((6, 3)),
        f"split/{OGB[name].split}/train": np.array([0, 2]),
        f"split/{OGB[name].split}/valid": np.array([5]),
        f"split/{OGB[name].split}/test": np.array([4, 1, 3]),
    }
    if name == "ogbn-arxiv":
        files["raw/node_year"] = np.array([2016, 2019, 2017, 2020, 2019, 2018])
    if name == "ogbn-proteins":
        del files["raw/node-feat"]
        files["raw/species"] = np.arange(6) * 100
        files["raw/edge-feat"] = rng.random((7, 8))
        files["raw/node-label"] = rng.integers(0, 2, (6, 112))
    for path, values in {**files, **change}.items():
        if values is not None:
            write_csv(folder / f"{path}.csv.gz", values)
    (folder / "RELEASE_v1.txt").touch()
    return folder


MAG_EDGES = {
    ("author", "affiliated_with", "institution"): (3, 2),
    ("author", "writes", "paper"): (3, 6),
    ("paper", "cites", "paper"): (6, 6),
    ("paper", "has_topic", "field_of_study"): (6, 4),
}


def write_mag(root, **change):
    """Write a small ogbn-mag in OGB's layout: 15 nodes of four types."""
    folder = root / "ogbn_mag"
    rng = np.random.default_rng(0)
    files = {
        "raw/node-feat/paper/node-feat": rng.standard_normal((6, 3)),
        "raw/node-feat/paper/node_year": np.arange(2014, 2020),
        "raw/node-label/paper/node-label": np.array([0, 3, 1, 2, 0, 348]),
        "split/time/paper/train": np.array([0, 2]),
        "split/time/paper/valid": np.array([5]),
        "split/time/paper/test": np.array([4, 1, 3]),
    }
    for relation, sizes in MAG_EDGES.items():
        # Every node has an edge, so that each type can take the features of another.
        edges = [[row % size for size in sizes] for row in range(max(sizes))]
        files[f"raw/relations/{'___'.join(relation)}/edge"] = np.array(edges)
        files[f"raw/relations/{'___'.join(relation)}/num-edge-list"] = np.array([max(sizes)])
    for path, values in {**files, **change}.items():
        if values is not None:
            write_csv(folder / f"{path}.csv.gz", values)
    kinds = "author,field_of_study,institution,paper\n"
    only_papers = f"{kinds}False,False,False,True\n"
    words = {
        "split/time/nodetype-has-split": only_papers,
        "raw/nodetype-has-feat": only_papers,
        "raw/nodetype-has-label": only_papers,
        "raw/num-node-dict": f"{kinds}3,4,2,6\n",
        "raw/triplet-type-list": "".join(f"{','.join(relation)}\n" for relation in MAG_EDGES),
    }
    for name, text in words.items():
        with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
            file.write(text)
    return folder


def equal_data(a, b):
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118
        if torch.is_tensor(a[key]):
            assert a[key].dtype == b[key].dtype, key
            torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=0)
        else:
            assert a[key] == b[key], key


def zip_of(folder):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent))
    return file.getvalue()
