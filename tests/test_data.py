"""graphattn.data: archives, names, generated graphs, metrics, relabelling, and the real sets."""

import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch_geometric.utils import remove_self_loops, to_undirected

import graphattn.data
import graphattn.data.archive
import graphattn.data.download
import graphattn.data.ogb
import graphattn.data.sources
from data_files import EDGES, ROOT, SHARED, equal_data, needs_shared, write_csv, write_npz
from graphattn.data import (
    evaluate,
    known,
    load,
    relabel,
    synthetic_arxiv,
)
from graphattn.data.ogb import import_ogb, read_with_ogb, verify
from graphattn.data.sources import SOURCES

# Archives


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
    with pytest.raises(ValueError, match="'ogbn-papers100M' is not supported: with 111 million"):
        load("ogbn-papers100M", root=tmp_path)
    assert {"karate", "cora", "ogbn-arxiv", "ogbn-mag", "synthetic-arxiv"} <= set(known())


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
