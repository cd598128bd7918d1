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
from data_files import (
    equal_data,
    write_raw,
)
from graphattn.data import (
    load,
)
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
