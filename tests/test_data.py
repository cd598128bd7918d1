"""graphattn.data: every source of graphs, offline, with small files written by the tests."""

import gzip
import hashlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

import graphattn.data
import graphattn.data.archive
import graphattn.data.download
import graphattn.data.ogb
import graphattn.data.sources
from graphattn.data import (
    evaluate,
    from_networkx,
    known,
    load,
    relabel,
    synthetic_arxiv,
    to_networkx,
)
from graphattn.data.download import fetch
from graphattn.data.ogb import OGB, import_ogb, read_raw, read_with_ogb, verify
from graphattn.data.sources import SOURCES, Source, prepare

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "ogbn-arxiv.npz").is_file(), reason="the folder of real data sets is absent"
)


@pytest.fixture(autouse=True)
def local_only(monkeypatch):
    """No proxy of the machine, and no connection but to the machine itself."""
    for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    import socket

    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost"):
            raise AssertionError(f"connection to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


# Archives


def write_npz(path, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 0]], dtype=np.int32)


def test_load_archive_dense_features_and_one_split(tmp_path):
    write_npz(
        tmp_path / "mine.npz",
        edge_index=EDGES,
        x=np.arange(8.0).reshape(4, 2),
        y=np.array([0, 1, 2, 1], dtype=np.int16),
        split_code=np.array([1, 2, 3, 0], dtype=np.int8),
        edge_attr=np.arange(4, dtype=np.int64),
        node_year=np.array([2000, 2001, 2002, 2003], dtype=np.int16),
    )
    data = load("mine", root=str(tmp_path))
    assert data.validate()
    assert data.edge_index.dtype == torch.int64
    assert data.edge_index.tolist() == EDGES.tolist()  # as stored: directed, parallel edges kept
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.y.dtype == torch.int64
    assert (data.num_nodes, data.num_classes, data.metric, data.name) == (4, 3, "accuracy", "mine")
    assert data.train_mask.tolist() == [True, False, False, False]
    assert data.val_mask.tolist() == [False, True, False, False]
    assert data.test_mask.tolist() == [False, False, True, False]
    assert data.edge_attr.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert data.node_year.tolist() == [2000, 2001, 2002, 2003]


def test_load_archive_sparse_features_and_ten_splits(tmp_path):
    masks = np.zeros((10, 3), dtype=bool)
    masks[:, 0] = True
    arrays = {
        "edge_index": EDGES[:, :2],
        "y": np.array([0, 1, 0]),
        "x_shape": np.array([3, 4]),
        "x_indptr": np.array([0, 2, 2, 3], dtype=np.int32),
        "x_indices": np.array([1, 3, 0], dtype=np.uint16),
        "train_mask": masks,
        "val_mask": np.roll(masks, 1, axis=1),
        "test_mask": np.roll(masks, 2, axis=1),
    }
    write_npz(tmp_path / "tolokers.npz", **arrays)
    data = load("tolokers", root=tmp_path)
    assert data.x.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert data.train_mask.shape == (3, 10)
    assert data.train_mask[0].all()
    assert data.val_mask[1].all()
    assert data.test_mask[2].all()
    assert data.metric == "rocauc"  # by its name
    write_npz(tmp_path / "b.npz", **arrays, x_data=np.array([0.5, 2.0, 3.0]))
    assert load("b", root=tmp_path).x.tolist() == [[0, 0.5, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0]]


def test_load_archive_without_split_has_ten_fixed_random_ones(tmp_path):
    write_npz(tmp_path / "a.npz", edge_index=EDGES, y=np.arange(50) % 5)
    data = load("a", root=tmp_path)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.shape == (3, 50, 10)
    assert (masks.sum(dim=0) == 1).all()
    assert masks.sum(dim=1).tolist() == [[30] * 10, [10] * 10, [10] * 10]
    # The same on every machine and in every version of numpy.
    assert data.train_mask[:, 0].nonzero().flatten().tolist()[:8] == [0, 1, 2, 3, 6, 8, 11, 13]
    assert not torch.equal(data.train_mask[:, 0], data.train_mask[:, 1])


def test_load_archive_says_its_metric_and_classes(tmp_path):
    write_npz(
        tmp_path / "a.npz",
        edge_index=EDGES,
        y=np.array([0, 1, 1]),
        metric=np.array("rocauc"),
        num_classes=np.array(2),
    )
    assert load("a", root=tmp_path).metric == "rocauc"
    write_npz(tmp_path / "tasks.npz", edge_index=EDGES, y=np.ones((3, 5), dtype=np.int8))
    data = load("tasks", root=tmp_path)
    assert (data.metric, data.num_classes, data.y.dtype) == ("rocauc", 2, torch.float32)
    assert data.y.shape == (3, 5)


def test_c22_load_archive_never_guesses_the_number_of_nodes(tmp_path):
    one_edge = np.array([[0], [1]], dtype=np.int64)
    write_npz(tmp_path / "a.npz", edge_index=one_edge)
    with pytest.raises(ValueError, match=r"number of nodes is unknown.* isolated last nodes"):
        load("a", root=tmp_path)
    write_npz(tmp_path / "b.npz", edge_index=one_edge, num_nodes=np.array(3))
    data = load("b", root=tmp_path)
    assert data.num_nodes == 3
    assert "y" not in data
    assert "train_mask" not in data
    write_npz(tmp_path / "c.npz", edge_index=one_edge, x=np.ones((3, 1)))
    assert load("c", root=tmp_path).num_nodes == 3


@pytest.mark.parametrize("dtype", [np.float32, bool, np.uint8, np.int16])
def test_c26_load_archive_refuses_other_index_types(tmp_path, dtype):
    write_npz(tmp_path / "a.npz", edge_index=EDGES.astype(dtype), num_nodes=np.array(3))
    name = np.dtype(dtype).name
    with pytest.raises(TypeError, match=rf"a\.npz: edge_index must be int32 or int64, got {name}"):
        load("a", root=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": EDGES[0]}, r"edge_index must have shape \(2, num_edges\), got \(4,\)"),
        ({"edge_index": EDGES + 10**9}, r"must lie in 0..2, got .*graphattn\.data\.relabel"),
        ({"edge_index": EDGES - 1}, r"must lie in 0..2, got -1..1"),
        (
            {"x": np.zeros((3, 1, 1))},
            r"x must have shape \(num_nodes, num_features\), got \(3, 1, 1",
        ),
        ({"y": np.zeros((3, 1, 1), int)}, "y must have one or two dimensions"),
        ({"y": np.zeros(4, int)}, r"y must have one row per node, 3, got shape \(4,\)"),
        ({"y": np.zeros(3)}, "labels of one task must be integers, got float64"),
        ({"y": np.array([0, -1, 2])}, r"labels must lie in 0\.\.2, got -1\.\.2"),
        ({"num_classes": np.array(2)}, r"labels must lie in 0\.\.1, got 0\.\.2"),
        ({"metric": np.array("f1")}, "metric must be one of .* got 'f1'"),
        ({"edge_attr": np.zeros(3)}, r"edge_attr must have one row per edge, 4, got shape \(3,\)"),
        ({"split_code": np.array([1, 2, 9])}, r"split_code must hold 1 .* got \[9\]"),
        ({"train_mask": np.ones(3, bool)}, "train_mask only; it needs train_mask, val_mask and"),
        ({"x_shape": np.array([3, 2])}, "has x_shape but no x_indptr and no x_indices"),
        (
            {
                "x_shape": np.array([3, 2]),
                "x_indptr": np.arange(4),
                "x_indices": np.array([0, 1, 2]),
            },
            "do not describe one matrix",
        ),
        (
            {"x_shape": np.array([3, 10**10]), "x_indptr": np.arange(4), "x_indices": np.arange(3)},
            r"take 111\.8 GiB as a dense matrix, more than the 8\.0 GiB",
        ),
    ],
)
def test_load_archive_refuses_contradictions(tmp_path, change, message):
    arrays = {"edge_index": EDGES, "y": np.array([0, 1, 2]), "x": np.ones((3, 2)), **change}
    write_npz(tmp_path / "a.npz", **{"num_nodes": np.array(3), **arrays})
    with pytest.raises(ValueError, match=message) as caught:
        load("a", root=tmp_path)
    assert "a.npz" in str(caught.value)


def test_load_archive_damaged(tmp_path):
    path = write_npz(tmp_path / "cora.npz", edge_index=EDGES, y=np.arange(3))
    whole = path.read_bytes()
    for end in [0, 1, 10, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cora\.npz is damaged, .*Delete it and get it again"):
            load("cora", root=tmp_path)
    messages = []
    for at in range(30, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:  # a byte that is no part of the content may change
            data = load("cora", root=tmp_path)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
        else:
            assert data.edge_index.tolist() == EDGES.tolist()
    assert len(messages) > 20
    assert all("cora.npz" in message for message in messages)
    write_npz(tmp_path / "a.npz", y=np.arange(3))
    with pytest.raises(ValueError, match=r"a\.npz has no edge_index; it holds: y"):
        load("a", root=tmp_path)
    np.save(tmp_path / "array.npy", EDGES)
    os.replace(tmp_path / "array.npy", tmp_path / "b.npz")
    with pytest.raises(ValueError, match=r"b\.npz is damaged, or is no archive"):
        load("b", root=tmp_path)
    path.write_bytes(whole)
    real_load = np.load

    def forbidden(*args, **kwargs):
        raise PermissionError("not yours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "load", forbidden)
        with pytest.raises(PermissionError, match="not yours"):
            load("cora", root=tmp_path)
    assert np.load is real_load


def test_c80_load_archive_never_unpickles(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    objects = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "a.npz", edge_index=EDGES, y=objects)
    with pytest.raises(ValueError, match=r"a\.npz is damaged.*allow_pickle=False"):
        load("a", root=tmp_path)
    (tmp_path / "b.npz").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match=r"b\.npz is damaged"):
        load("b", root=tmp_path)


def test_write_archive_is_atomic_and_reads_back(tmp_path, monkeypatch):
    first = synthetic_arxiv(num_nodes=120)
    path = graphattn.data.archive.write_archive(tmp_path / "new" / "s.npz", first)
    second = load("s", root=tmp_path / "new")
    assert set(first.keys()) == set(second.keys())
    for key in first.keys():  # noqa: SIM118 (a Data iterates over pairs)
        if key != "name":
            a, b = first[key], second[key]
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        graphattn.data.archive.write_archive(path, first)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["s.npz"]


# Names


def test_load_unknown_name_lists_what_there_is(tmp_path):
    write_npz(tmp_path / "mine.npz", edge_index=EDGES, num_nodes=np.array(3))
    with pytest.raises(ValueError, match=r"unknown data set 'coral'. Known: .*cora, .*: mine\."):
        load("coral", root=tmp_path)
    with pytest.raises(ValueError, match=r"Archives in .*empty: none"):
        load("coral", root=tmp_path / "empty")
    with pytest.raises(ValueError, match="unknown data set"):
        load("../mine", root=tmp_path / "sub")
    with pytest.raises(TypeError, match="name must be a string, got int"):
        load(3)
    with pytest.raises(ValueError, match="'ogbn-mag' is not supported: it is heterogeneous"):
        load("ogbn-mag", root=tmp_path)
    assert {"karate", "cora", "ogbn-arxiv", "synthetic-arxiv"} <= set(known())


def test_load_absent_says_where_it_looked_and_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load("ogbn-arxiv", root=tmp_path)
    text = str(caught.value)
    for part in (
        str(tmp_path / "ogbn-arxiv.npz"),
        str(tmp_path / "ogbn_arxiv" / "raw" / "edge.csv.gz"),
        "download=True",
        "python datasets/prepare.py ogbn-arxiv",
    ):
        assert part in text
    with pytest.raises(FileNotFoundError, match=r"cora\.npz.* python datasets/prepare\.py cora"):
        load("cora", root=tmp_path)


def test_c81_c82_import_and_absent_set_offline_with_closed_stdin(tmp_path):
    program = """
import os, socket, sys
def refuse(*args): raise SystemExit("network used")
socket.socket.connect = socket.getaddrinfo = refuse
import torch_geometric.data, torch_geometric.utils
before = set(sys.modules)
import graphattn.data
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"ogb", "pandas", "matplotlib", "outdated", "networkx", "triton"}))
try:
    graphattn.data.load("ogbn-arxiv", root=sys.argv[1])
except FileNotFoundError as error:
    print("absent")
from graphattn.data.ogb import import_ogb
import_ogb()
import threading
print(threading.active_count(), "outdated" in sys.modules, os.environ.get("OUTDATED_IGNORE"))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert run.stdout.splitlines() == ["[]", "absent", "1 False None"], run.stderr


def test_import_ogb_restores_the_environment(monkeypatch):
    monkeypatch.setenv("OUTDATED_IGNORE", "mine")
    marker = object()
    monkeypatch.setitem(sys.modules, "outdated", marker)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ogb"]:
        monkeypatch.delitem(sys.modules, name)
    threads = threading.active_count()
    assert import_ogb().NodePropPredDataset is not None
    assert threading.active_count() == threads
    assert os.environ["OUTDATED_IGNORE"] == "mine"
    assert sys.modules["outdated"] is marker
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(
        ImportError, match=r"needs the ogb package .*pip install 'graphattn\[ogb\]'"
    ):
        import_ogb()


# OGB's csv.gz layout


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


def equal_data(a, b):
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118
        if torch.is_tensor(a[key]):
            assert a[key].dtype == b[key].dtype, key
            torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=0)
        else:
            assert a[key] == b[key], key


@pytest.mark.parametrize("name", sorted(OGB))
def test_c80_load_ogb_layout_equals_the_real_ogb_package(tmp_path, monkeypatch, name):
    folder = write_raw(tmp_path, name)
    (folder / "processed").mkdir()
    (folder / "processed" / "data_processed").write_bytes(b"a stale pickle")

    def refuse(*args, **kwargs):
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    ours = load(name, root=tmp_path)
    theirs = read_with_ogb(name, tmp_path)
    equal_data(ours, theirs)
    assert ours.validate()
    assert ours.num_nodes == 6
    assert ours.num_edges == (7 if name == "ogbn-arxiv" else 14)
    assert ours.test_mask.tolist() == [False, True, False, True, True, False]
    assert os.listdir(folder / "processed") == ["data_processed"]  # neither touched nor added to
    assert sorted(os.listdir(tmp_path)) == [folder.name]
    if name == "ogbn-arxiv":
        assert ours.node_year.tolist() == [2016, 2019, 2017, 2020, 2019, 2018]
        assert ours.num_classes == 40
    if name == "ogbn-proteins":
        assert ours.y.shape == (6, 112)
        assert (ours.y.dtype, ours.metric) == (torch.float32, "rocauc")
        assert ours.edge_attr.shape == (14, 8)
        assert ours.node_species.tolist() == [0, 100, 200, 300, 400, 500]
        assert "x" not in ours


def test_ogb_table_agrees_with_the_package():
    metrics = {"acc": "accuracy", "rocauc": "rocauc"}
    table = graphattn.data.ogb._master_table()
    for name, spec in OGB.items():
        row = table[name]
        assert metrics[row["eval metric"]] == spec.metric
        assert int(row["num classes"]) == spec.num_classes
        assert row["split"] == spec.split
        assert (row["add_inverse_edge"] == "True") == spec.add_inverse_edge
        assert (row["has_node_attr"] == "True") == spec.has_features
        assert row["additional node files"] == (",".join(spec.node_files) or "None")
        assert row["is hetero"] == row["binary"] == "False"


def test_load_ogb_layout_no_edges(tmp_path):
    write_raw(
        tmp_path, "ogbn-products", **{"raw/edge": np.zeros((0, 2), int), "raw/num-edge-list": [0]}
    )
    data = load("ogbn-products", root=tmp_path)
    assert data.edge_index.shape == (2, 0)
    assert data.num_nodes == 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"raw/node-label": None},
            FileNotFoundError,
            r"incomplete, it lacks .*node-label\.csv\.gz\. ",
        ),
        ({"split/time/valid": None}, FileNotFoundError, r"lacks .*valid\.csv\.gz"),
        (
            {"raw/node-feat": None},
            UserWarning,
            r"node-feat\.csv\.gz is missing, so 'ogbn-arxiv' has no",
        ),
        ({"raw/num-edge-list": [8]}, ValueError, r"edge\.csv\.gz has 7 edges, but .* says 8"),
        ({"raw/edge": [[0, 1, 2]]}, ValueError, r"edge\.csv\.gz must have 2 columns, got 3"),
        ({"raw/edge": [[0, 6]] * 7}, ValueError, r"edge_index must lie in 0\.\.5, got 0\.\.6"),
        ({"raw/node-label": [[0]] * 5}, ValueError, r"y must have one row per node, 6"),
        ({"split/time/test": [6]}, ValueError, r"test split must hold nodes 0\.\.5, got 6\.\.6"),
    ],
)
def test_load_ogb_layout_refuses_contradictions(tmp_path, change, error, message):
    write_raw(tmp_path, "ogbn-arxiv", **change)
    with pytest.raises(error, match=message):
        load("ogbn-arxiv", root=tmp_path)


def test_load_ogb_layout_damaged(tmp_path):
    folder = write_raw(tmp_path, "ogbn-arxiv")
    path = folder / "raw" / "edge.csv.gz"
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:20], b"no gzip", gzip.compress(b"1,2\nx,y\n")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"edge\.csv\.gz is damaged .*Get it again"):
            load("ogbn-arxiv", root=tmp_path)


def test_c80_stale_cache_is_explained(tmp_path):
    processed = tmp_path / "ogbn_arxiv" / "processed"
    processed.mkdir(parents=True)
    (processed / "data_processed").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match=r"pickled objects, which torch >= 2\.6 refuses"):
        load("ogbn-arxiv", root=tmp_path)


def test_read_with_ogb_other_release_does_not_prompt(tmp_path):
    folder = write_raw(tmp_path, "ogbn-arxiv")
    (folder / "RELEASE_v1.txt").unlink()
    with pytest.raises(ValueError, match=r"of another release than ogb expects.*RELEASE_v1\.txt"):
        read_with_ogb("ogbn-arxiv", tmp_path)


def test_read_with_ogb_without_symlinks(tmp_path, monkeypatch):
    write_raw(tmp_path, "ogbn-arxiv")

    def refuse(*args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    equal_data(read_with_ogb("ogbn-arxiv", tmp_path), read_raw("ogbn-arxiv", tmp_path))


def test_verify_names_the_wrong_file(tmp_path):
    write_raw(tmp_path, "ogbn-arxiv")
    with pytest.raises(
        ValueError, match=r"edge\.csv\.gz has SHA-256 \w{64}, the official file 47629e"
    ):
        verify("ogbn-arxiv", tmp_path)
    assert verify("ogbn-products", tmp_path) == 0


# Downloads


class Handler(BaseHTTPRequestHandler):
    """Serve `server.files`; `server.behaviour` says how."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        if server.behaviour == "hang":
            server.released.wait(10)
            return
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start, status = 0, 200
        if self.headers.get("Range") and server.behaviour != "no range":
            start, status = int(self.headers["Range"][6:-1]), 206
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
        body = content[start:]
        self.send_response(status)
        if server.behaviour != "no length":
            self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if server.behaviour == "cut" or (server.behaviour == "cut once" and start == 0):
            body = body[: server.cut]
        self.wfile.write(body)
        self.wfile.flush()
        if server.behaviour == "stall":
            server.released.wait(10)


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests = {"/file.bin": bytes(range(256)) * 40}, []
        server.behaviour, server.cut = "normal", 1000
        server.released = threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def test_fetch(tmp_path, server):
    content = server.files["/file.bin"]
    sha256 = hashlib.sha256(content).hexdigest()
    path = tmp_path / "sub" / "file.bin"
    assert fetch(f"{server.url}/file.bin", path, sha256=sha256) == path
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file.bin"]
    fetch(f"{server.url}/file.bin", path, sha256=sha256)
    fetch(f"{server.url}/file.bin", path)
    assert len(server.requests) == 1  # it was there
    path.write_bytes(b"another file")
    server.behaviour = "no length"
    fetch(f"{server.url}/file.bin", path, sha256=sha256)
    assert path.read_bytes() == content


def test_fetch_checksum_mismatch_removes_the_file(tmp_path, server):
    with pytest.raises(ValueError, match=r"has SHA-256 \w{64}, expected 00\. It was removed"):
        fetch(f"{server.url}/file.bin", tmp_path / "file.bin", sha256="00")
    assert os.listdir(tmp_path) == []


def test_c82_fetch_resumes_within_a_call(tmp_path, server):
    server.behaviour = "cut once"
    fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == server.files["/file.bin"]
    assert server.requests == [("/file.bin", None), ("/file.bin", "bytes=1000-")]


def test_c82_fetch_keeps_a_partial_download_and_resumes_it_later(tmp_path, server):
    server.behaviour = "cut"
    with pytest.raises(
        ConnectionError, match=r"broke off after 5000 bytes .* run it again to fetch"
    ):
        fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert os.listdir(tmp_path) == ["file.bin.part"]
    server.cut = 0  # no progress: no further tries
    count = len(server.requests)
    with pytest.raises(ConnectionError, match="broke off after 5000 bytes"):
        fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert len(server.requests) == count + 1
    server.behaviour = "normal"
    fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert server.requests[-1] == ("/file.bin", "bytes=5000-")
    assert (tmp_path / "file.bin").read_bytes() == server.files["/file.bin"]
    assert os.listdir(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("behaviour", ["normal", "no range"])
@pytest.mark.parametrize("more", [None, b"", b"older and longer"])
def test_fetch_part_of_other_length(tmp_path, server, more, behaviour):
    server.behaviour = behaviour  # without ranges the server starts anew, and so do we
    content = server.files["/file.bin"]
    part = b"another version" if more is None else content + more
    if more is None and behaviour == "normal":
        part = content[:15]
    (tmp_path / "file.bin.part").write_bytes(part)
    fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == content


def test_c82_fetch_refused_missing_and_slow(tmp_path, server, monkeypatch):
    with pytest.raises(ConnectionError, match=r"/none answered 404 .*https_proxy.* bring the file"):
        fetch(f"{server.url}/none", tmp_path / "none")
    with pytest.raises(
        ConnectionError, match=r"cannot reach http://127\.0\.0\.1:1/f .*refused.*15 sec"
    ):
        fetch("http://127.0.0.1:1/f", tmp_path / "f")
    assert graphattn.data.download.TIMEOUT == 15.0
    monkeypatch.setattr(graphattn.data.download, "TIMEOUT", 0.2)
    server.behaviour = "hang"
    with pytest.raises(ConnectionError, match=r"cannot reach .*timed out; limit 0\.2 seconds"):
        fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    server.files["/file.bin"] *= 2
    server.behaviour = "stall"
    server.files["/big"] = bytes(100)

    class Longer(bytes):
        def __len__(self):
            return 200

        def __getitem__(self, key):
            return Longer(bytes(self)[key])

    server.files["/big"] = Longer(bytes(100))
    with pytest.raises(ConnectionError, match=r"broke off after .* bytes \(TimeoutError"):
        fetch(f"{server.url}/big", tmp_path / "big")
    assert not (tmp_path / "big").exists()


def test_c82_fetch_uses_the_proxy(tmp_path, server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    server.files["http://far.invalid/file.bin"] = b"through the proxy"
    fetch("http://far.invalid/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == b"through the proxy"


def zip_of(folder):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent))
    return file.getvalue()


@pytest.fixture
def ogb_server(tmp_path, server, monkeypatch):
    """A server with a small ogbn-arxiv, to which the table of `ogb` points."""
    table = graphattn.data.ogb._master_table()
    table["ogbn-arxiv"]["url"] = f"{server.url}/arxiv.zip"
    monkeypatch.setattr(graphattn.data.ogb, "_master_table", lambda: table)
    monkeypatch.setattr(graphattn.data.ogb, "CHECKSUMS", {})
    server.source = write_raw(tmp_path / "origin", "ogbn-arxiv", folder="arxiv")
    server.files["/arxiv.zip"] = zip_of(server.source)
    return server


def test_c81_load_downloads_through_ogb_unattended(tmp_path, ogb_server, monkeypatch):
    def refuse(*args):
        raise AssertionError("asked")

    monkeypatch.setattr("builtins.input", refuse)
    closed = open(os.devnull)  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed)
    root = tmp_path / "datasets"
    data = load("ogbn-arxiv", root=root, download=True)
    assert sorted(os.listdir(root)) == ["downloads", "ogbn-arxiv.npz", "ogbn_arxiv"]
    assert os.listdir(root / "downloads") == []
    assert "processed" not in os.listdir(root / "ogbn_arxiv")
    assert len(ogb_server.requests) == 1
    ogb_server.behaviour = "hang"  # from here on everything is local
    equal_data(data, load("ogbn-arxiv", root=root))
    equal_data(data, load("ogbn-arxiv", root=root, download=True))
    (root / "ogbn-arxiv.npz").unlink()
    equal_data(data, load("ogbn-arxiv", root=root, download=True))
    assert len(ogb_server.requests) == 1


def test_c82_load_uses_an_archive_brought_from_elsewhere(tmp_path, ogb_server):
    downloads = tmp_path / "datasets" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "arxiv.zip").write_bytes(ogb_server.files["/arxiv.zip"])
    assert load("ogbn-arxiv", root=tmp_path / "datasets", download=True).num_nodes == 6
    assert ogb_server.requests == []


def test_load_download_failures(tmp_path, ogb_server, monkeypatch):
    root = tmp_path / "datasets"
    whole = ogb_server.files["/arxiv.zip"]
    ogb_server.files["/arxiv.zip"] = whole[:-30]
    with pytest.raises(ValueError, match=r"arxiv\.zip is damaged or not .*It was removed"):
        load("ogbn-arxiv", root=root, download=True)
    assert [str(path) for path in root.rglob("*")] == [str(root / "downloads")]
    ogb_server.files["/arxiv.zip"] = zip_of(write_raw(tmp_path, "ogbn-arxiv", folder="other"))
    with pytest.raises(ValueError, match=r"it has no arxiv/raw/edge\.csv\.gz\)\. It was removed"):
        load("ogbn-arxiv", root=root, download=True)
    ogb_server.files["/arxiv.zip"] = whole
    monkeypatch.undo()
    table = graphattn.data.ogb._master_table()
    table["ogbn-arxiv"]["url"] = f"{ogb_server.url}/arxiv.zip"
    monkeypatch.setattr(graphattn.data.ogb, "_master_table", lambda: table)
    with pytest.raises(
        ValueError, match=r"not the official set \(verify: .*has SHA-256"
    ):  # not the official edges
        load("ogbn-arxiv", root=root, download=True)
    assert not (root / "ogbn_arxiv").exists()
    (root / "ogbn_arxiv").mkdir()
    with pytest.raises(
        FileExistsError, match=r"exists but has no raw/edge\.csv\.gz\. Move it away"
    ):
        load("ogbn-arxiv", root=root, download=True)


# Other sources and the command line


def test_prepare_heterophilous(tmp_path, server, monkeypatch):
    masks = np.random.default_rng(0).random((10, 5)) < 0.5
    file = io.BytesIO()
    np.savez(
        file,
        node_features=np.eye(5, 3),
        node_labels=np.array([0, 1, 1, 0, 1]),
        edges=np.array([[0, 1], [1, 2], [3, 4]]),
        train_masks=masks,
        val_masks=~masks,
        test_masks=~masks,
    )
    server.files["/minesweeper.npz"] = file.getvalue()
    read = SOURCES["minesweeper"].read
    source = Source(read, f"{server.url}/minesweeper.npz", 5, 6)
    monkeypatch.setitem(SOURCES, "minesweeper", source)
    data = load("minesweeper", root=tmp_path, download=True)
    assert data.edge_index.tolist() == [[0, 1, 3], [1, 2, 4]]
    assert data.train_mask.tolist() == masks.T.tolist()
    assert data.metric == "rocauc"
    assert os.listdir(tmp_path / "downloads") == []
    (tmp_path / "minesweeper.npz").unlink()
    monkeypatch.setitem(SOURCES, "minesweeper", Source(read, source.address, 5, 8))
    with pytest.raises(ValueError, match=r"has 5 nodes and 6 symmetrised edges, expected 5 and 8"):
        prepare("minesweeper", tmp_path)
    server.files["/minesweeper.npz"] = b"<html>log in first</html>"
    with pytest.raises(ValueError, match=r"minesweeper\.npz is damaged, or is no archive"):
        prepare("minesweeper", tmp_path)
    assert os.listdir(tmp_path / "downloads") == []
    with pytest.raises(ValueError, match=r"prepare: unknown data set 'karate'. Known: actor"):
        prepare("karate", tmp_path)


def test_prepare_gnn_benchmark(tmp_path, server, monkeypatch):
    file = io.BytesIO()
    np.savez(
        file,
        adj_shape=np.array([3, 3]),
        adj_indptr=np.array([0, 2, 3, 3], dtype=np.int32),
        adj_indices=np.array([1, 2, 1], dtype=np.int32),
        attr_shape=np.array([3, 2]),
        attr_indptr=np.array([0, 1, 1, 2]),
        attr_indices=np.array([1, 0]),
        attr_data=np.array([2.0, 0.5]),
        labels=np.array([0, 1, 2]),
        idx_to_class=np.array(["a", None], dtype=object),  # pickled, never read
    )
    server.files["/photo.npz"] = file.getvalue()
    read = SOURCES["amazon-photo"].read
    monkeypatch.setitem(SOURCES, "amazon-photo", Source(read, f"{server.url}/photo.npz", 3, 4))
    data = load("amazon-photo", root=tmp_path, download=True)
    assert data.edge_index.tolist() == [[0, 0, 1], [1, 2, 1]]
    assert data.x.tolist() == [[0, 2], [0, 0], [0.5, 0]]
    assert data.train_mask.shape == (3, 10)


def test_prepare_planetoid(tmp_path, server, monkeypatch):
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(0)
    x, y = (rng.random((600, 4)) < 0.5).astype(np.float32), np.eye(3)[rng.integers(0, 3, 600)]
    graph = {i: [(i + 1) % 600, (i - 1) % 600] for i in range(600)}
    parts = {"x": csr_matrix(x[:30]), "allx": csr_matrix(x[:560]), "tx": csr_matrix(x[560:]),
             "y": y[:30], "ally": y[:560], "ty": y[560:], "graph": graph}  # fmt: skip
    for part, value in parts.items():
        server.files[f"/ind.cora.{part}"] = pickle.dumps(value)
    server.files["/ind.cora.test.index"] = "".join(f"{i}\n" for i in range(560, 600)).encode()
    monkeypatch.setitem(SOURCES, "cora", Source(SOURCES["cora"].read, server.url, 600, 1200))
    data = load("cora", root=tmp_path, download=True)
    assert torch.equal(data.x, torch.from_numpy(x))
    assert data.y.tolist() == y.argmax(axis=1).tolist()
    assert [int(data[f"{k}_mask"].sum()) for k in ("train", "val", "test")] == [30, 500, 40]
    assert data.num_edges == 1200


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "datasets" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prepare_command(tmp_path, command, capsys, monkeypatch, ogb_server):
    root = ["--root", str(tmp_path / "sets")]
    for arguments, message in (
        ([], "name a data set"),
        (["nope"], "unknown data set nope. Known: "),
    ):
        with pytest.raises(SystemExit) as caught:
            command.main([*root, *arguments])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert command.main([*root, "ogbn-arxiv"]) == 0
    out = capsys.readouterr().out
    assert "ogbn-arxiv: absent" in out
    assert "6 nodes, 7 stored edges, 3 features, 40 classes, metric accuracy" in out
    (tmp_path / "sets" / "ogbn-arxiv.npz").unlink()
    assert command.main([*root, "--list"]) == 0
    out = capsys.readouterr().out
    assert "OGB's files are here" in out
    assert out.count("absent") == len(command.NAMES) - 1
    assert command.main([*root, "ogbn-arxiv"]) == 0  # converts them
    assert command.main([*root, "ogbn-arxiv"]) == 0  # checks the archive
    assert "ready (" in capsys.readouterr().out
    ogb_server.files.clear()
    monkeypatch.setattr(command, "NAMES", ["cora", "ogbn-arxiv", "ogbn-products"])
    cora = Source(SOURCES["cora"].read, ogb_server.url, 1, 1)
    monkeypatch.setitem(SOURCES, "cora", cora)
    assert command.main([*root, "--all"]) == 1
    captured = capsys.readouterr()
    assert "answered 404" in captured.err
    assert captured.err.endswith("Not ready: cora.\n")
    assert "products" not in captured.out


# networkx's graphs and the synthetic set


def test_load_karate():
    data = load("karate")
    assert (data.num_nodes, data.num_edges, data.num_classes) == (34, 156, 2)
    assert data.y.bincount().tolist() == [17, 17]
    assert data.y[[0, 33]].tolist() == [0, 1]  # Mr. Hi, Officer
    assert data.edge_attr.shape == (156, 1)
    assert data.train_mask.shape == (34, 10)
    assert torch.equal(data.edge_index, to_undirected(data.edge_index)[:, order(data.edge_index)])


def order(edge_index):
    """Return the positions of the edges in the sorted order of to_undirected."""
    code = edge_index[0] * 10**6 + edge_index[1]
    return code.argsort().argsort()


@pytest.mark.parametrize(
    ("name", "nodes", "edges"),
    [("davis", 32, 178), ("florentine", 15, 40), ("les-miserables", 77, 508)],
)
def test_load_networkx_graphs(name, nodes, edges):
    data = load(name)
    assert (data.num_nodes, data.num_edges) == (nodes, edges)
    assert ("y" in data) == ("train_mask" in data) == ("metric" in data) == (name == "davis")
    if name == "davis":
        assert data.y.bincount().tolist() == [18, 14]


@pytest.fixture(scope="module")
def arxiv_like():
    return load("synthetic-arxiv")


def test_synthetic_arxiv_resembles_ogbn_arxiv(arxiv_like):
    data = arxiv_like
    assert data.validate()
    assert (data.num_nodes, data.num_edges, data.num_classes) == (169_343, 1_166_243, 40)
    sizes = [int(data[f"{key}_mask"].sum()) for key in ("train", "val", "test")]
    assert sizes == [90_941, 29_799, 48_603]
    assert (data.train_mask == (data.node_year <= 2017)).all()
    assert (data.val_mask == (data.node_year == 2018)).all()
    assert (data.test_mask == (data.node_year >= 2019)).all()
    assert not (data.edge_index[0] == data.edge_index[1]).any()
    code = data.edge_index[0] * data.num_nodes + data.edge_index[1]
    assert code.unique().numel() == data.num_edges
    degree = to_undirected(data.edge_index)[0].bincount(minlength=data.num_nodes)
    assert degree.median() == 6
    assert 12_000 < degree.max() < 15_000
    counts = data.y.bincount(minlength=40)
    assert counts.min() > 500
    assert counts.max() > 20_000


def test_synthetic_arxiv_needs_the_edges(arxiv_like):
    """A linear model that sees the neighbours' mean beats the same on the features alone."""
    data = arxiv_like
    source, target = to_undirected(data.edge_index)
    degree = target.bincount(minlength=data.num_nodes).clamp(min=1)[:, None]

    def mean(x):
        return torch.zeros_like(x).index_add_(0, target, x[source]) / degree

    def accuracy(x):
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        train = x[data.train_mask]
        onehot = torch.nn.functional.one_hot(data.y[data.train_mask], 40).float()
        eye = 10.0 * torch.eye(x.size(1))
        weight = torch.linalg.solve(train.t() @ train + eye, train.t() @ onehot)
        return evaluate("accuracy", x[data.test_mask] @ weight, data.y[data.test_mask])

    once = mean(data.x)
    alone, both = accuracy(data.x), accuracy(torch.cat([data.x, once, mean(once)], dim=1))
    assert 0.40 < alone < 0.56
    assert both > alone + 0.12


def test_synthetic_arxiv_sizes_and_seeds():
    first, again = synthetic_arxiv(num_nodes=1000), load("synthetic-arxiv-1000")
    equal_data(first, again)
    other = synthetic_arxiv(num_nodes=1000, seed=1)
    assert not torch.equal(first.edge_index, other.edge_index)
    assert first.y.unique().numel() == 40
    small = synthetic_arxiv(num_nodes=100)
    assert small.num_edges == 689
    with pytest.raises(ValueError, match="num_nodes must be at least 100, got 99"):
        load("synthetic-arxiv-99")
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        synthetic_arxiv(seed=-1)


# evaluate


def test_evaluate_accuracy_equals_ogb():
    torch.manual_seed(0)
    logits, target = torch.randn(500, 40), torch.randint(0, 40, (500,))
    classes = logits.argmax(dim=1)
    evaluator = import_ogb().Evaluator("ogbn-arxiv")
    theirs = evaluator.eval({"y_true": target[:, None], "y_pred": classes[:, None]})["acc"]
    for prediction in (logits, logits.bfloat16().float(), classes, classes[:, None].int()):
        assert evaluate("accuracy", prediction, target) == pytest.approx(
            theirs, abs=0.01 if prediction.dtype == torch.float32 else 0
        )
    assert evaluate("accuracy", logits, target[:, None]) == pytest.approx(theirs)
    assert isinstance(evaluate("accuracy", logits.requires_grad_(), target), float)


def test_evaluate_rocauc_equals_ogb():
    torch.manual_seed(0)
    target = torch.randint(0, 2, (300, 112)).float()
    scores = (torch.randn(300, 112) + target).mul(4).round()  # with many ties
    evaluator = import_ogb().Evaluator("ogbn-proteins")
    theirs = evaluator.eval({"y_true": target, "y_pred": scores})["rocauc"]
    assert evaluate("rocauc", scores, target) == pytest.approx(theirs, abs=1e-12)
    target[::3, 1:50] = float("nan")  # no label
    labelled = target.numpy()
    theirs = evaluator.eval({"y_true": labelled, "y_pred": scores.numpy()})["rocauc"]
    assert evaluate("rocauc", scores.half(), target) == pytest.approx(theirs, abs=1e-12)


def test_evaluate_rocauc_one_task():
    target, scores = torch.tensor([0, 0, 1, 1]), torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert evaluate("rocauc", scores, target) == 0.75
    assert evaluate("rocauc", scores[:, None], target.bool()) == 0.75
    assert evaluate("rocauc", torch.stack([-scores, scores], dim=1), target) == 0.75
    assert evaluate("rocauc", torch.zeros(4), target) == 0.5
    assert evaluate("rocauc", torch.tensor([-torch.inf, 0, 1, torch.inf]), target) == 1.0


@pytest.mark.parametrize(
    ("metric", "prediction", "target", "error", "message"),
    [
        ("f1", [0.0], [0], ValueError, "metric must be 'accuracy' or 'rocauc', got 'f1'"),
        (
            "accuracy",
            [0, 1],
            [0],
            ValueError,
            r"one row per node each, got shapes \(2,\) and \(1,\)",
        ),
        ("accuracy", [], [], ValueError, r"no node to evaluate \(0 rows\)"),
        ("accuracy", [[0.0, float("nan")]], [0], ValueError, "prediction holds 1 NaN values"),
        ("accuracy", [0.5, 1.0], [0, 1], ValueError, "accuracy needs logits of shape"),
        ("accuracy", [[0, 1]], [0], ValueError, r"integer classes of shape \(num_nodes,\)"),
        ("accuracy", [0], [0.0], TypeError, "needs an integer target, got torch.float32"),
        (
            "accuracy",
            [0],
            [[0, 1]],
            ValueError,
            r"needs target of shape \(num_nodes,\), got \(1, 2\)",
        ),
        ("rocauc", [float("nan"), 1.0], [0, 1], ValueError, "prediction holds 1 NaN values"),
        ("rocauc", [0.0, 1.0], [1, 1], ValueError, "undefined for 1 of 1 tasks, .*: 0\\."),
        ("rocauc", [[0.0] * 12] * 2, [[0] * 12] * 2, ValueError, "12 of 12 tasks.* and more"),
        ("rocauc", [0.0, 1.0], [1, 2], ValueError, "target of 0, 1 or NaN"),
        ("rocauc", [[0.0] * 3] * 2, [0, 1], ValueError, "one score per node and task"),
    ],
)
def test_evaluate_errors(metric, prediction, target, error, message):
    with pytest.raises(error, match=message):
        evaluate(metric, torch.tensor(prediction), torch.tensor(target))


# relabel


def test_c25_relabel_raw_identifiers():
    raw = torch.tensor([[10**9 + 1, 10**9], [10**9, 7]])
    edge_index, ids = relabel(raw)
    assert edge_index.tolist() == [[2, 1], [1, 0]]
    assert ids.tolist() == [7, 10**9, 10**9 + 1]
    assert torch.equal(ids[edge_index], raw)
    ids = torch.tensor([10**9, 5, 7, 10**9 + 1])  # in the order of the features; 5 is isolated
    edge_index, same = relabel(raw.int(), ids=ids)
    assert edge_index.tolist() == [[3, 0], [0, 2]]
    assert torch.equal(same, ids)
    empty, none = relabel(torch.zeros(2, 0, dtype=torch.int64))
    assert (empty.shape, none.shape) == ((2, 0), (0,))
    empty, ids = relabel(torch.zeros(2, 0, dtype=torch.int64), ids=none)
    assert (empty.shape, ids.shape) == ((2, 0), (0,))


def test_c25_c26_relabel_errors():
    edge_index = torch.tensor([[3, 4], [5, 3]])
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with pytest.raises(TypeError, match=f"edge_index must be int32 or int64, got {dtype}"):
            relabel(edge_index.to(dtype))
    with pytest.raises(TypeError, match=r"ids must be int32 or int64, got torch\.float64"):
        relabel(edge_index, ids=torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"shape \(2, num_edges\), got \(3,\)"):
        relabel(torch.arange(3))
    with pytest.raises(ValueError, match=r"ids must have shape \(num_nodes,\), got \(1, 3\)"):
        relabel(edge_index, ids=torch.arange(3)[None])
    with pytest.raises(ValueError, match=r"must not repeat, got twice: 4, 5\."):
        relabel(edge_index, ids=torch.tensor([5, 3, 4, 4, 5, 5]))
    with pytest.raises(ValueError, match=r"identifiers that ids lacks: 4, 5\."):
        relabel(edge_index, ids=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"lacks: 1, 2, .*, 10 and 21 more"):
        relabel(torch.arange(32).view(2, 16), ids=torch.tensor([0]))


# networkx


def test_c83_from_networkx_maps_labels_in_node_order():
    graph = nx.DiGraph()
    graph.add_nodes_from([4, 2, 6])
    graph.add_edges_from([(2, 6), (4, 2)])
    data, nodes = from_networkx(graph)
    assert nodes == [4, 2, 6]
    assert sorted(data.edge_index.t().tolist()) == [[0, 1], [1, 2]]
    assert data.edge_index.dtype == torch.int64
    back = to_networkx(data, nodes=nodes)
    assert nx.utils.graphs_equal(back, graph)
    assert list(back) == [4, 2, 6]
    assert list(to_networkx(data)) == [0, 1, 2]


def test_c83_c84_round_trip_of_mixed_labels_and_attributes():
    graph = nx.Graph()
    for i, label in enumerate(["b", ("c", 1), 7, None.__class__, 2.5]):
        graph.add_node(label, x=[float(i), 1.0], size=i)
    graph.add_edge("b", ("c", 1), x=3)
    graph.add_edge(7, 7, x=4)
    data, nodes = from_networkx(graph, node_attrs=["size", "x"], edge_attrs="x")
    assert data.x.tolist() == [[i, i, 1] for i in range(5)]
    assert data.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]  # the self-loop once
    assert data.edge_attr.tolist() == [[3], [3], [4]]
    back = to_networkx(data, nodes=nodes, node_attrs="x", edge_attrs=["edge_attr"], undirected=True)
    assert list(back) == list(graph)
    assert set(back.edges) == set(graph.edges)
    assert back.nodes[7] == {"x": [2.0, 2.0, 1.0]}
    assert back.edges["b", ("c", 1)] == {"edge_attr": [3.0]}


def test_c34_from_networkx_direction():
    data, _ = from_networkx(nx.DiGraph([("source", "target")]))
    assert data.edge_index.tolist() == [[0], [1]]


def test_c36_parallel_edges_are_kept():
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([0, 1, 2])
    graph.add_edge(0, 1, w=1.0)
    graph.add_edge(0, 1, w=2.0)
    graph.add_edge(2, 1, w=3.0)
    data, nodes = from_networkx(graph, edge_attrs="w")
    assert data.edge_index.tolist() == [[0, 0, 2], [1, 1, 1]]
    assert data.edge_attr.flatten().tolist() == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"1 parallel edges would be lost: \(0, 1\)\. Pass multigraph"
    ):
        to_networkx(data, nodes=nodes)
    back = to_networkx(data, nodes=nodes, edge_attrs="edge_attr", multigraph=True)
    assert [back.edges[0, 1, k]["edge_attr"] for k in (0, 1)] == [[1.0], [2.0]]


def test_c84_missing_attributes_are_listed():
    graph = nx.path_graph(3)
    nx.set_node_attributes(graph, {0: 1.0, 2: 3.0}, "x")
    nx.set_edge_attributes(graph, {(0, 1): 5}, "w")
    with pytest.raises(
        ValueError, match=r"node attribute 'x' is missing on 1 of 3 nodes: 1\. Set it"
    ):
        from_networkx(graph, node_attrs="x")
    with pytest.raises(
        ValueError, match=r"edge attribute 'w' is missing on 1 of 2 edges: \(1, 2\)"
    ):
        from_networkx(graph, edge_attrs=["w"])
    data, _ = from_networkx(graph, node_attrs="x", edge_attrs="w", fill=-1.0)
    assert data.x.tolist() == [[1], [-1], [3]]
    assert data.edge_attr.tolist() == [[5], [5], [-1], [-1]]
    data, _ = from_networkx(graph)
    assert "x" not in data
    assert "edge_attr" not in data
    with pytest.raises(ValueError, match=r"missing on 30 of 30 nodes: 0, .*, 9 and 20 more"):
        from_networkx(nx.path_graph(30), node_attrs="x")
    data, _ = from_networkx(nx.path_graph(3), node_attrs="x", fill=0.5)
    assert data.x.tolist() == [[0.5]] * 3


def test_c84_odd_attributes():
    graph = nx.Graph()
    graph.add_node("a", t=torch.tensor([1.0, 2.0]), s="text")
    graph.nodes["a"][0] = True  # an integer key
    graph.add_node("b", t=np.array([3, 4]), s=1)
    graph.nodes["b"][0] = np.float64(2.0)
    data, _ = from_networkx(graph, node_attrs=[0, "t"])
    assert data.x.tolist() == [[1, 1, 2], [2, 3, 4]]
    assert from_networkx(graph, node_attrs=0)[0].x.tolist() == [[1], [2]]
    with pytest.raises(TypeError, match=r"'s' must be a number .* on 'a' it is 'text' \(str\)"):
        from_networkx(graph, node_attrs="s")
    graph.nodes["b"]["t"] = [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"must have one size; it is 2 on the first node but not on 'b'"
    ):
        from_networkx(graph, node_attrs="t")
    graph.nodes["b"]["t"] = [[1], [2, 3]]
    with pytest.raises(TypeError, match="flat sequence of numbers"):
        from_networkx(graph, node_attrs="t")
    with pytest.raises(TypeError, match="must be a networkx graph, got dict"):
        from_networkx({"a": ["b"]})


def test_c84_graph_without_edges_or_nodes():
    data, nodes = from_networkx(nx.empty_graph(3), node_attrs=[], edge_attrs=["w", "v"])
    assert data.edge_index.shape == (2, 0)
    assert data.edge_index.dtype == torch.int64
    assert data.num_nodes == 3
    assert data.edge_attr.shape == (0, 2)
    assert data.x.shape == (3, 0)
    assert list(to_networkx(data, nodes=nodes)) == nodes
    data, nodes = from_networkx(nx.Graph(), node_attrs="x")
    assert (data.num_nodes, nodes, data.x.shape) == (0, [], (0, 1))
    assert len(to_networkx(data, nodes=nodes)) == 0


def test_c22_to_networkx_never_guesses_the_number_of_nodes():
    data = Data(edge_index=torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="number of nodes is unknown"):
        to_networkx(data)
    assert list(to_networkx(data, nodes="abc")) == ["a", "b", "c"]
    data.num_nodes = 3
    assert len(to_networkx(data)) == 3


def test_to_networkx_errors():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3, y=torch.arange(3))
    with pytest.raises(ValueError, match="data has no edge_index"):
        to_networkx(Data(num_nodes=3))
    with pytest.raises(ValueError, match="one label per node, 3, got 2"):
        to_networkx(data, nodes=["a", "b"])
    with pytest.raises(ValueError, match=r"must not repeat a label, got twice: 'a'\."):
        to_networkx(data, nodes=["a", "b", "a"])
    with pytest.raises(
        ValueError, match=r"both directions; without reverse: \('a', 'b'\), \('b', 'c'\)"
    ):
        to_networkx(data, nodes=["a", "b", "c"], undirected=True)
    with pytest.raises(ValueError, match=r"'x' must be a tensor .* per node, 3, got no such field"):
        to_networkx(data, node_attrs="x")
    with pytest.raises(ValueError, match=r"'y' must be a tensor .* per edge, 2, got \(3,\)"):
        to_networkx(data, edge_attrs="y")
    data.name = "text"
    with pytest.raises(ValueError, match="got str"):
        to_networkx(data, node_attrs="name")
    assert to_networkx(data, node_attrs=["y"]).nodes[2] == {"y": 2}
    data.edge_index = torch.tensor([[0, 1], [1, 0]])
    data.edge_attr = torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match=r"equal attributes in both directions; they differ for \(0, 1\)"
    ):
        to_networkx(data, edge_attrs="edge_attr", undirected=True)
    data.edge_index = torch.tensor([[0, 1], [1, 3]])
    with pytest.raises(IndexError, match=r"must lie in 0\.\.2, got 0\.\.3"):
        to_networkx(data)


LABELS = st.one_of(
    st.integers(-3, 10**12), st.text(max_size=3), st.tuples(st.integers(0, 3), st.text(max_size=2))
)


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(LABELS, unique=True, max_size=8),
    pairs=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 99)), max_size=20
    ),
    directed=st.booleans(),
    multigraph=st.booleans(),
)
def test_c83_round_trip_of_random_graphs(labels, pairs, directed, multigraph):
    kinds = {(False, False): nx.Graph, (True, False): nx.DiGraph,
             (False, True): nx.MultiGraph, (True, True): nx.MultiDiGraph}  # fmt: skip
    graph = kinds[directed, multigraph]()
    graph.add_nodes_from(labels)
    for u, v, weight in pairs:
        if max(u, v) < len(labels):
            graph.add_edge(labels[u], labels[v], weight=weight)
    data, nodes = from_networkx(graph, edge_attrs="weight")
    assert data.num_nodes == len(labels)
    loops = sum(u == v for u, v in graph.edges())
    edges = graph.number_of_edges()
    assert data.num_edges == (edges if directed else 2 * edges - loops)
    back = to_networkx(
        data, nodes=nodes, edge_attrs="edge_attr", undirected=not directed, multigraph=multigraph
    )
    assert type(back) is type(graph)
    assert list(back) == list(graph)

    def count(graph, value):
        return Counter(
            ((u, v) if directed else frozenset((u, v)), value(values))
            for u, v, values in graph.edges(data=True)
        )

    assert count(back, lambda a: a["edge_attr"][0]) == count(graph, lambda a: a["weight"])


# Real data, where it is at hand

COUNTS = {
    "cora": (2_708, 10_556, 1_433, 7),
    "citeseer": (3_327, 9_104, 3_703, 6),
    "pubmed": (19_717, 88_648, 500, 3),
    "amazon-photo": (7_650, 238_162, 745, 8),
    "amazon-computers": (13_752, 491_722, 767, 10),
    "coauthor-cs": (18_333, 163_788, 6_805, 15),
    "coauthor-physics": (34_493, 495_924, 8_415, 5),
    "tolokers": (11_758, 1_038_000, 10, 2),
    "minesweeper": (10_000, 78_804, 7, 2),
    "chameleon-filtered": (890, 17_708, 2_325, 5),
    "squirrel-filtered": (2_223, 93_996, 2_089, 5),
    "actor": (7_600, 53_318, 932, 5),
    "texas": (183, 558, 1_703, 5),
    "wisconsin": (251, 900, 1_703, 5),
    "cornell": (183, 554, 1_703, 5),
}


@needs_shared
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_real_archives(name):
    data = load(name, root=SHARED)
    edges = to_undirected(remove_self_loops(data.edge_index)[0], num_nodes=data.num_nodes).size(1)
    assert (data.num_nodes, edges, data.x.size(1), data.num_classes) == COUNTS[name]
    assert (SOURCES[name].nodes, SOURCES[name].edges) == COUNTS[name][:2]
    assert data.metric == ("rocauc" if name in ("tolokers", "minesweeper") else "accuracy")
    official = name in ("cora", "citeseer", "pubmed")
    assert data.train_mask.shape == ((data.num_nodes,) if official else (data.num_nodes, 10))
    shares = [float(data[f"{key}_mask"].float().mean()) for key in ("train", "val", "test")]
    if name in ("tolokers", "minesweeper"):
        assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    elif name.startswith(("amazon", "coauthor")):
        assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.001)
    elif official:
        sizes = [int(data[f"{key}_mask"].sum()) for key in ("train", "val", "test")]
        assert sizes == [20 * data.num_classes, 500, 1000]
    else:
        assert shares == pytest.approx([0.48, 0.32, 0.2], abs=0.01)


@pytest.fixture(scope="module")
def arxiv():
    return load("ogbn-arxiv", root=SHARED)


@needs_shared
def test_real_ogbn_arxiv_facts(arxiv):
    assert (arxiv.num_nodes, arxiv.num_edges, arxiv.num_classes) == (169_343, 1_166_243, 40)
    assert not (arxiv.edge_index[0] == arxiv.edge_index[1]).any()
    both = to_undirected(arxiv.edge_index)
    assert both.size(1) == 2_315_598
    degree = both[0].bincount(minlength=arxiv.num_nodes)
    assert degree.max() == 13_161
    assert degree.median() == 6
    sizes = [int(arxiv[f"{key}_mask"].sum()) for key in ("train", "val", "test")]
    assert sizes == [90_941, 29_799, 48_603]
    assert (arxiv.train_mask == (arxiv.node_year <= 2017)).all()


@needs_shared
def test_real_ogbn_arxiv_label_propagation(arxiv):
    from scipy.sparse import csr_array

    source, target = to_undirected(arxiv.edge_index).numpy()
    degree = np.bincount(target, minlength=arxiv.num_nodes)
    # The column-normalised form, clipped to [0, 1], is the one that the known figures belong to:
    # a label counts less the more neighbours its node has.
    weights = (1.0 / degree[source]).astype(np.float32)
    matrix = csr_array((weights, (target, source)), shape=(arxiv.num_nodes, arxiv.num_nodes))
    labels = torch.nn.functional.one_hot(arxiv.y, 40).float()
    labels[~arxiv.train_mask] = 0
    start = labels.numpy()
    result = start
    for _ in range(30):
        result = np.clip(0.9 * (matrix @ result) + 0.1 * start, 0.0, 1.0)
    scores = torch.from_numpy(result)
    valid, test = (
        100 * evaluate("accuracy", scores[mask], arxiv.y[mask])
        for mask in (arxiv.val_mask, arxiv.test_mask)
    )
    assert valid == pytest.approx(70.2, abs=0.2)
    assert test == pytest.approx(68.3, abs=0.2)


@needs_shared
def test_real_ogbn_arxiv_through_the_ogb_package(tmp_path, arxiv):
    folder = tmp_path / "ogbn_arxiv"
    (folder / "raw").mkdir(parents=True)
    for path in (SHARED / "ogbn_arxiv_raw").glob("*.csv.gz"):
        (folder / "raw" / path.name).write_bytes(path.read_bytes())
    assert (
        verify("ogbn-arxiv", tmp_path) == 4
    )  # labels, years and both counts are the official files
    write_csv(folder / "raw" / "edge.csv.gz", arxiv.edge_index.t().numpy())
    write_csv(folder / "raw" / "node-feat.csv.gz", np.zeros((arxiv.num_nodes, 1)))
    for key, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        nodes = arxiv[f"{key}_mask"].nonzero().numpy()
        write_csv(folder / "split" / "time" / f"{name}.csv.gz", nodes)
    (folder / "RELEASE_v1.txt").touch()
    theirs = read_with_ogb("ogbn-arxiv", tmp_path)
    start = time.perf_counter()
    ours = load("ogbn-arxiv", root=tmp_path)
    assert time.perf_counter() - start < 60
    equal_data(ours, theirs)
    del ours.x
    equal_data(ours, arxiv)
