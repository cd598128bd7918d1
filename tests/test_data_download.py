"""Downloads: resumed, checked, unattended; the sources of the sets and the command line."""

import hashlib
import importlib.util
import io
import os
import pickle
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

import graphattn.data
import graphattn.data.archive
import graphattn.data.download
import graphattn.data.ogb
import graphattn.data.sources
from data_files import ROOT, equal_data, write_mag, write_raw, zip_of
from graphattn.data import (
    load,
)
from graphattn.data.download import fetch
from graphattn.data.sources import SOURCES, Source, prepare

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


def test_load_downloads_ogbn_mag_and_keeps_it_as_it_came(
    tmp_path, server, command, monkeypatch, capsys
):
    table = graphattn.data.ogb._master_table()
    table["ogbn-mag"]["url"] = f"{server.url}/mag.zip"
    monkeypatch.setattr(graphattn.data.ogb, "_master_table", lambda: table)
    origin = write_mag(tmp_path / "origin")
    server.files["/mag.zip"] = zip_of(origin.rename(origin.with_name("mag")))
    root = tmp_path / "datasets"
    data = load("ogbn-mag", root=root, download=True)
    assert data["paper"].x.shape == (6, 3)
    assert sorted(os.listdir(root)) == ["downloads", "ogbn_mag"]
    server.files.clear()  # from here on everything is local
    assert load("ogbn-mag", root=root, download=True)["paper"].y.tolist()[-1] == 348
    assert command.main(["--root", str(root), "ogbn-mag"]) == 0
    out = capsys.readouterr().out
    assert "ready, in OGB's files" in out
    assert "15 nodes, 21 stored edges, 3 features, 349 classes, metric accuracy" in out


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
