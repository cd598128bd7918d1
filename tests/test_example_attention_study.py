"""The study of attention, means and an MLP: models of equal size, that see what they should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from graphattn import Graph

EXAMPLES = Path(__file__).parent.parent / "examples"
SETS = ["synthetic-arxiv-200", "lookup"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("attention_study")


def test_report(script, tmp_path, capsys):
    arguments = ["--quick", "--threads", "1", "--runs", "2", "--sets", *SETS]
    rows = script.main([*arguments, "--out", str(tmp_path)])
    assert [row["set"] for row in rows] == SETS
    assert all(0.0 < row["homophily"] < 1.0 for row in rows)
    page = (tmp_path / "attention_study.md").read_text()
    assert page.startswith("# When attention pays: against the mean of neighbours and an MLP")
    assert (tmp_path / "attention_study-1.png").read_bytes().startswith(b"\x89PNG")
    tables = json.loads((tmp_path / "attention_study.json").read_text())["tables"]
    metrics, sizes = tables.values()
    assert [row["attention"] for row in metrics] == [row["attention"] for row in rows]
    for row in sizes:
        assert row["attention, layers"] in script.LAYERS
    assert "Written: " in capsys.readouterr().out


@pytest.mark.parametrize("layers", [2, 4])
def test_models_are_of_equal_size(script, layers):
    args = options(script, layers)
    data = Data(x=torch.randn(6, 50), y=torch.arange(6), num_classes=6)
    sizes = {}
    for name, make_model in script.MODELS.items():
        model = make_model(data, args)
        sizes[name] = script.training.num_parameters(model)
        assert not any(parameter.is_meta for parameter in model.parameters())
    wanted = sizes[script.ATTENTION]
    for name in (script.MEAN, script.ALONE):
        assert wanted <= sizes[name] <= 1.06 * wanted


def test_only_the_mlp_is_blind_to_edges(script):
    args = options(script, 2)
    data = Data(x=torch.randn(6, 50), y=torch.arange(6), num_classes=6)
    one, other = (Graph(torch.tensor(edges), 6) for edges in ([[0], [1]], [[2], [1]]))
    for name, make_model in script.MODELS.items():
        model = make_model(data, args).eval()
        blind = torch.equal(model(data.x, one), model(data.x, other))
        assert blind == (name == script.ALONE)


def test_mean_reads_the_sources_of_a_target(script):
    """Edges 1 -> 0, 2 -> 0 and 0 -> 2: node 0 gets the mean of 1 and 2, node 1 nothing."""
    graph = Graph(torch.tensor([[1, 2, 0], [0, 0, 2]]), 3)
    data = Data(x=torch.eye(3), y=torch.arange(3), num_classes=3)
    model = script.mean_model(data, options(script, 1), 4)
    (conv,) = model.model.convs
    got = conv(torch.eye(3), script.adjacency(graph)) - conv.lin_r(torch.eye(3))
    mean = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.allclose(got, conv.lin_l(mean))


def test_lookup_has_one_answer(script):
    data = script.lookup(60, seed=0)
    edge_index = to_undirected(data.edge_index)
    keys = (data.x.size(1) - data.num_classes) // 2
    asked, key, value = (words.argmax(1) for words in data.x.split([keys, keys, 5], dim=1))
    for node in range(60):
        neighbors = edge_index[0, edge_index[1] == node]
        assert len(neighbors) == 8
        (answer,) = neighbors[key[neighbors] == asked[node]]
        assert data.y[node] == value[answer]


def options(script, layers):
    parser = script.argparse.ArgumentParser()
    parser.add_argument("--dataset")
    script.training.add_options(parser)
    given = ["--dataset", "karate", "--layers", str(layers), "--label-rate", "0"]
    return script.training.parse(parser, given, lambda _: "attention-study")
