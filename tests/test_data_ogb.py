"""OGB's node sets: its csv.gz layout, read directly and through the ogb package."""

import gzip
import os

import numpy as np
import pytest
import torch

import graphattn.data
import graphattn.data.archive
import graphattn.data.download
import graphattn.data.ogb
import graphattn.data.sources
from data_files import MAG_EDGES, equal_data, write_mag, write_raw
from graphattn.data import load
from graphattn.data.ogb import OGB, read_raw, read_with_ogb, verify

# OGB's csv.gz layout


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


# ogbn-mag


def test_load_ogbn_mag_equals_what_ogb_reads(tmp_path):
    from ogb.io.read_graph_raw import (
        read_csv_heterograph_raw,
        read_node_label_hetero,
        read_nodesplitidx_split_hetero,
    )

    folder = write_mag(tmp_path)
    data = load("ogbn-mag", root=tmp_path)
    (graph,) = read_csv_heterograph_raw(
        str(folder / "raw"), additional_node_files=["node_year"], additional_edge_files=[]
    )
    paper = data["paper"]
    assert {kind: data[kind].num_nodes for kind in data.node_types} == graph["num_nodes_dict"]
    assert set(data.edge_types) == set(graph["edge_index_dict"]) == set(MAG_EDGES)
    for relation, edges in graph["edge_index_dict"].items():
        assert data[relation].edge_index.tolist() == edges.tolist()
    torch.testing.assert_close(paper.x, torch.from_numpy(graph["node_feat_dict"]["paper"]))
    assert paper.y.tolist() == read_node_label_hetero(str(folder / "raw"))["paper"][:, 0].tolist()
    assert paper.node_year.tolist() == graph["node_year"]["paper"][:, 0].tolist()
    split = read_nodesplitidx_split_hetero(str(folder / "split" / "time"))
    for key, part in zip(("train", "val", "test"), split, strict=True):
        assert paper[f"{key}_mask"].nonzero()[:, 0].tolist() == sorted(part["paper"].tolist())
    assert (data.name, data.metric, data.num_classes) == ("ogbn-mag", "accuracy", 349)
    assert data.validate()
    row = graphattn.data.ogb._master_table()["ogbn-mag"]
    assert (row["eval metric"], row["num classes"], row["split"]) == ("acc", "349", "time")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"raw/node-label/paper/node-label": None}, FileNotFoundError, "lacks .*node-label.csv.gz"),
        ({"raw/relations/paper___cites___paper/edge": None}, FileNotFoundError, "cites.*edge.csv"),
        (
            {"raw/relations/author___writes___paper/edge": np.array([[0, 6]])},
            ValueError,
            r"nodes 0\.\.5, got 6\.\.6",
        ),
        ({"split/time/paper/train": np.array([-1])}, ValueError, r"nodes 0\.\.5, got -1\.\.-1"),
        (
            {"raw/node-feat/paper/node-feat": np.zeros((5, 3))},
            ValueError,
            "x must have one row per paper, 6, got 5",
        ),
    ],
)
def test_load_ogbn_mag_names_what_is_wrong(tmp_path, change, error, message):
    write_mag(tmp_path, **change)
    with pytest.raises(error, match=message):
        load("ogbn-mag", root=tmp_path)


def test_load_ogbn_mag_damaged_or_absent(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ogbn_mag/raw/triplet-type-list\.csv\.gz"):
        load("ogbn-mag", root=tmp_path)
    folder = write_mag(tmp_path)
    (folder / "raw" / "num-node-dict.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"num-node-dict\.csv\.gz is damaged"):
        load("ogbn-mag", root=tmp_path)
