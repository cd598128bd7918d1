"""The options of the training scripts' loop: each does what its source says."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tomllib
import torch
from torch.nn import functional as F
from torch_geometric.data import Data

from data_files import write_mag, write_raw
from graphattn import Graph
from graphattn.data import load

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--hidden", "8", "--layers", "2", "--heads", "2", "--threads", "1"]
TINY = ["--dataset", "karate", "--runs", "1", *SMALL]


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("training")


def options(training, *arguments, dataset="karate"):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default=dataset)
    training.add_options(parser)
    return training.parse(parser, [*SMALL, *arguments])


def run_of(training, *arguments, data=None):
    args = options(training, *arguments)
    data, graph = training.prepare(load("karate") if data is None else data, args)
    return training.Run(data, graph, args, 0)


# Configurations ###################################################################################


def test_options_come_before_the_configuration_and_that_before_defaults(training, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("layers = 5\nlr = 0.25\ngated = true\ninput-projection = false\n")
    args = options(training, "--config", str(path), "--lr", "0.5")
    assert (args.layers, args.lr, args.gated, args.input_projection) == (2, 0.5, True, False)
    args = training.parse(parser_of(training), ["--dataset", "karate", "--config", str(path)])
    assert (args.layers, args.lr, args.heads) == (5, 0.25, 4)


def parser_of(training):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset")
    training.add_options(parser)
    return parser


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "configs").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_configuration_is_understood(training, path):
    args = training.parse(parser_of(training), ["--dataset", "karate", "--config", str(path)])
    data, _ = training.prepare(load("karate"), args)
    assert training.make_model(data, args) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", "unrecognized arguments: --widht 3"),
        ("lr = 'fast'", "invalid number value: 'fast'"),
        ("lr = ", "Invalid value"),
        (None, "No such file"),
    ],
)
def test_mistakes_in_a_configuration_are_named(training, tmp_path, capsys, text, message):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        options(training, "--config", str(path))
    assert message in capsys.readouterr().err


def test_the_configuration_of_a_set_is_taken_unless_another_is_named(training):
    written = tomllib.loads((EXAMPLES / "configs" / "cora.toml").read_text())
    assert options(training, "--dataset", "cora").weight_decay == written["weight-decay"] > 0.0
    other = str(EXAMPLES / "configs" / "ogbn-arxiv.toml")
    assert options(training, "--dataset", "cora", "--config", other).weight_decay == 0.0


# The learning rate ################################################################################


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_rate_warms_up_and_then_follows_its_schedule(training, schedule):
    run = run_of(training, "--lr", "0.5", "--warmup", "4", "--epochs", "12", "--schedule", schedule)
    rates = []
    for _ in range(12):
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.step()
    np.testing.assert_allclose(rates[:4], [0.125, 0.25, 0.375, 0.5])
    after = [1.0] * 8
    if schedule == "cosine":
        after = [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    np.testing.assert_allclose(rates[4:], 0.5 * np.array(after))


# The loss and the gradient ########################################################################


def test_label_smoothing_is_that_of_the_loss(training):
    run = run_of(training, "--label-smoothing", "0.1")
    out, nodes = torch.randn(34, 2), run.masks["train"]
    log_prob = out.log_softmax(dim=1)[nodes]
    right = log_prob.gather(1, run.data.y[nodes, None]).squeeze(1)
    expected = -(0.9 * right + 0.1 * log_prob.mean(dim=1)).mean()
    torch.testing.assert_close(run.loss(out, run.data.y, nodes), expected)


def test_label_smoothing_of_several_labels(training):
    data = load("karate")
    data.y = torch.stack([data.y, 1 - data.y], dim=1).float()
    data.metric = "rocauc"
    run = run_of(training, "--label-smoothing", "0.2", data=data)
    out, nodes = torch.randn(34, 2), run.masks["train"]
    target = 0.1 + 0.8 * data.y[nodes]
    expected = F.binary_cross_entropy(out[nodes].sigmoid(), target)
    torch.testing.assert_close(run.loss(out, run.data.y, nodes), expected)


def test_clip_bounds_the_norm_of_the_gradient(training):
    run = run_of(training, "--clip", "0.01", "--dropout", "0")
    run.train_epoch()
    squares = sum(p.grad.square().sum() for p in run.model.parameters() if p.grad is not None)
    assert squares.sqrt() == pytest.approx(0.01, rel=1e-3)


# What is evaluated ################################################################################


def test_ema_evaluates_the_moving_average_of_the_weights(training):
    run = run_of(training, "--ema", "0.75", "--lr", "0.1", "--dropout", "0")
    average = None
    for _ in range(5):
        run.train_epoch()
        weight = run.model.head.weight.detach().clone()
        average = weight if average is None else 0.75 * average + 0.25 * weight
    torch.testing.assert_close(run.average.module.head.weight, average)
    metrics = run.evaluate()
    run.model.load_state_dict(run.average.module.state_dict())
    out = run.outputs(
        run.model.eval(),
        run.data,
        run.graph,
        None if run.args.label_rate == 0 else labels(training, run),
    )
    assert metrics == run.metrics(out)


def labels(training, run):
    return training.mask_labels(run.data.y, run.masks["train"], 1.0)[0]


def test_patience_ends_a_run_so_many_epochs_after_its_best(training):
    run = run_of(training, "--patience", "3", "--epochs", "20")
    run.history = [{"val": value} for value in (0.1, 0.5, 0.5, 0.4)]
    assert not run.is_over()
    run.history.append({"val": 0.5})  # as good as the best, but not better
    assert run.is_over()
    run.history.append({"val": 0.6})
    assert not run.is_over()
    run.history += [{"val": 0.7}] * 14
    assert len(run.history) == 20
    assert run.is_over()


def test_a_run_that_ended_early_is_reported_as_such(training, tmp_path, monkeypatch):
    script = importlib.import_module("node_classification")
    values = iter([0.2, 0.9, *[0.5] * 50])
    monkeypatch.setattr(
        training.Run,
        "metrics",
        lambda self, out: dict.fromkeys(("train", "val", "test"), next(values)),
    )
    result = script.main([*TINY, "--epochs", "40", "--patience", "5", "--out", str(tmp_path)])
    assert result["epochs"] == 7
    assert result["test"]["mean"] == pytest.approx(90.0)


# Inputs ###########################################################################################


def test_directions_tell_an_edge_from_its_reverse(training):
    data = Data(edge_index=torch.tensor([[0, 1, 2, 1], [1, 2, 1, 1]]), num_nodes=3)
    graph = Graph(torch.tensor([[0, 1, 1, 2, 1, 0], [1, 0, 2, 1, 1, 2]]), 3)
    expected = [[1, 0], [0, 1], [1, 1], [1, 1], [1, 1], [0, 0]]
    assert training.directions(data, graph).tolist() == expected


def test_directions_are_an_input_of_the_model(training, tmp_path):
    script = importlib.import_module("ogbn_arxiv")
    arguments = ["--dataset", "synthetic-arxiv-400", "--runs", "1", "--epochs", "2", "--heads", "2"]
    arguments += ["--hidden", "8"]
    arguments += ["--out", str(tmp_path)]
    plain = script.main(arguments)
    both = script.main([*arguments, "--directions", "--self-loops"])
    # An edge's two features make keys and values, in each of three layers.
    assert both["parameters"] - plain["parameters"] == 2 * (8 + 8 + 2 * 40)
    with pytest.raises(SystemExit):
        script.main([*arguments, "--directions", "--directed"])


def test_label_reuse_shows_predictions_where_no_label_is_shown(training):
    run = run_of(training, "--label-rate", "0.5", "--label-reuse", "2")
    run.model.eval()
    shown = torch.full((34,), -1)
    shown[:5] = run.data.y[:5]
    inputs = []
    run.model.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["labels"]), with_kwargs=True
    )
    out = run.outputs(run.model, run.data, run.graph, shown)
    assert [x.shape for x in inputs] == [(34,), (34, 2), (34, 2)]
    for soft in inputs[1:]:
        assert torch.equal(soft[:5], F.one_hot(shown[:5], 2).float())
    first = run.model(run.data.x, run.graph, labels=inputs[0]).softmax(dim=1)
    torch.testing.assert_close(inputs[1][5:], first[5:])
    last = run.model(run.data.x, run.graph, labels=inputs[2])
    torch.testing.assert_close(out, last)
    # Only the last pass is trained, and it sees no hidden label.
    assert not inputs[1].requires_grad


def test_label_propagation_spreads_shown_labels_only(training):
    run = run_of(training, "--label-propagation", "3")
    train, y, graph = run.masks["train"], run.data.y, run.graph
    shown = torch.where(train & (torch.arange(34) % 2 == 0), y, -1)
    adjacency = torch.zeros(34, 34)
    adjacency[graph.edge_index[1], graph.edge_index[0]] = 1.0
    known = F.one_hot(shown.clamp(min=0), 2) * (shown >= 0)[:, None].float()
    shares = known
    for _ in range(3):
        mean = adjacency @ shares / adjacency.sum(1, keepdim=True)
        shares = torch.where((shown >= 0)[:, None], known, mean)
    inputs = training.propagate(known, shown >= 0, graph, 3)
    torch.testing.assert_close(inputs, shares)
    assert (inputs.sum(1) <= 1.0 + 1e-6).all()
    expected = run.model.eval()(None, graph, labels=shares)
    torch.testing.assert_close(run.outputs(run.model, run.data, graph, shown), expected)


def test_label_reuse_needs_label_inputs(training):
    with pytest.raises(SystemExit, match="--label-reuse needs label inputs"):
        run_of(training, "--label-rate", "0", "--label-reuse", "1")


# Correct & Smooth #################################################################################


def test_correct_and_smooth_spreads_what_training_nodes_know(training):
    """By the paper's formulas, with dense matrices."""
    alphas = ["--correction-alpha", "0.6", "--smoothing-alpha", "0.7"]
    run = run_of(training, "--correct-and-smooth", *alphas)
    run.best = 3 * torch.randn(34, 2)
    train, y = run.masks["train"], F.one_hot(run.data.y, 2).double()
    adjacency = torch.zeros(34, 34).double()
    adjacency[run.graph.edge_index[1], run.graph.edge_index[0]] = 1.0
    degree = adjacency.sum(dim=1)
    spread = adjacency / (degree[:, None] * degree).sqrt()

    def propagate(start, alpha, low, high):
        out = start
        for _ in range(50):
            out = (alpha * spread @ out + (1 - alpha) * start).clamp(low, high)
        return out

    soft = run.best.double().softmax(dim=1)
    error = torch.where(train[:, None], y - soft, 0.0)
    sigma = error[train].abs().sum() / train.sum()
    error_of_all = propagate(error, 0.6, -1.0, 1.0)
    scale = sigma / error_of_all.abs().sum(dim=1, keepdim=True)
    scale = scale.masked_fill(~scale.isfinite() | (scale > 1000), 1.0)
    corrected = soft + scale * error_of_all
    corrected = torch.where(train[:, None], y, corrected)
    smooth = propagate(corrected, 0.7, 0.0, 1.0)
    found = {}
    run.metrics = lambda out: found.setdefault("out", out)
    run.corrected()
    torch.testing.assert_close(found["out"].double(), smooth, rtol=1e-4, atol=1e-5)


def test_what_is_corrected_is_the_output_of_the_best_epoch(training, tmp_path):
    script = importlib.import_module("node_classification")
    arguments = [*TINY, "--epochs", "6", "--lr", "0.05", "--out", str(tmp_path)]
    result = script.main([*arguments, "--correct-and-smooth"])
    assert result["correct_and_smooth"] is True
    plain = script.main(arguments)
    assert plain["correct_and_smooth"] is False
    written = json.loads((tmp_path / "result.json").read_text())
    best = max(written["history"][0], key=lambda epoch: epoch["val"])
    assert plain["test"]["runs"] == [100 * best["test"]]

    run = run_of(training, "--correct-and-smooth", "--lr", "0.05")
    for _ in range(30):
        run.step()
    best = training.best_epoch(run.history)
    assert run.metrics(run.best) == {name: best[name] for name in ("train", "val", "test")}
    assert run.history.index(best) < 29  # so that the last is not the best


# The page of results ##############################################################################


def test_results_are_kept_and_made_a_page(training, tmp_path, capsys):
    script, results = (importlib.import_module(name) for name in ("node_classification", "results"))
    with pytest.raises(SystemExit):
        results.main(["--docs", str(tmp_path / "docs")])
    assert "there is no result in" in capsys.readouterr().err
    script.main([*TINY, "--epochs", "2", "--runs", "2", "--out", str(tmp_path / "out")])
    path = tmp_path / "out" / "result.json"
    result = json.loads(path.read_text())
    result["command"] = (
        "python examples/node_classification.py --dataset karate --root /data --out=x --threads 1 "
        "--overwrite --lr 0.1"
    )
    path.write_text(json.dumps(result))
    results.main([str(path), "--docs", str(tmp_path / "docs")])
    (kept,) = (tmp_path / "docs" / "results").glob("*.json")
    assert kept.name == "karate-no-features.json"
    text = kept.read_text()
    assert "history" not in text
    assert str(tmp_path) not in text
    page = (tmp_path / "docs" / "results.md").read_text()
    test, val = (
        f"{result[name]['mean']:.2f} ± {result[name]['std']:.2f}" for name in ("test", "val")
    )
    inputs = "degrees, training labels"
    row = f"| karate, no features | accuracy | **{test}** | - | {val} | 2 | {inputs} | - |"
    assert row in page
    assert "Below the target" not in page
    assert "\npython examples/node_classification.py --dataset karate --lr 0.1\n" in page

    result.update(dataset="tolokers", inputs="features", label_inputs_at_test="none")
    result.update(metric="rocauc", correct_and_smooth=True)
    path.write_text(json.dumps(result))
    results.main([str(path), "--docs", str(tmp_path / "docs")])
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| tolokers | ROC-AUC |" in page
    assert "| 84.5, missed by " in page
    assert "\n- tolokers: " in page
    assert "| features, Correct & Smooth | [GCN](https://arxiv.org/abs/2302.11640) 83.64" in page
    assert "karate, no features" in page


# Edge features ####################################################################################


def test_edge_features_follow_their_edges(training):
    data = Data(
        edge_index=torch.tensor([[0, 1, 2], [1, 0, 1]]),
        edge_attr=torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        y=torch.tensor([0, 1, 0]),
        num_classes=2,
        num_nodes=3,
        name="small",
        metric="accuracy",
        **{f"{name}_mask": torch.ones(3, dtype=torch.bool) for name in ("train", "val", "test")},
    )
    data, graph = training.prepare(data, options(training, "--edge-features"))
    found = {
        tuple(edge): attr
        for edge, attr in zip(graph.edge_index.T.tolist(), data.edge_attr.tolist(), strict=True)
    }
    # Stored both ways, an edge has the mean; its reverse has the features of one stored once.
    assert found == {(0, 1): [2, 3], (1, 0): [2, 3], (1, 2): [5, 6], (2, 1): [5, 6]}
    assert data.x.tolist() == [[2, 3], [3.5, 4.5], [5, 6]]
    both = ["--edge-features", "--self-loops", "--directions"]
    data, graph = training.prepare(data, options(training, *both))
    assert data.edge_attr.shape == (7, 4)
    loops = graph.edge_index[0] == graph.edge_index[1]
    assert (data.edge_attr[loops] == 0.0).all()


PROTEINS = {
    "raw/node-label": np.arange(6)[:, None] % 2 ^ np.arange(112) % 2,
    **{f"split/species/{name}": np.arange(6) for name in ("train", "valid", "test")},
}


def test_ogbn_proteins_in_ogbs_own_layout(training, tmp_path, capsys):
    write_raw(tmp_path, "ogbn-proteins", **PROTEINS)
    script = importlib.import_module("ogbn_proteins")
    arguments = ["--root", str(tmp_path), "--out", str(tmp_path / "out"), *SMALL]
    result = script.main([*arguments, "--runs", "2", "--epochs", "3", "--feedforward", "16"])
    assert (result["metric"], result["inputs"]) == ("rocauc", "features")
    assert "the mean of those of a node's edges instead" in capsys.readouterr().out
    wrong = [*arguments[2:], "--no-edge-features", "--label-rate", "0.5", "--root", str(tmp_path)]
    with pytest.raises(SystemExit, match="several labels a node"):
        script.main(wrong)
    cora = Data(
        edge_index=torch.zeros(2, 0, dtype=torch.int64),
        y=torch.zeros(2, dtype=torch.int64),
        train_mask=torch.ones(2, dtype=torch.bool),
        name="cora",
    )
    args = options(training, "--edge-features")
    with pytest.raises(SystemExit, match="cora has no edge features"):
        training.prepare(cora, args)


PRODUCTS = {f"split/sales_ranking/{name}": np.arange(6) for name in ("train", "valid", "test")}


def test_ogbn_products_in_ogbs_own_layout(training, tmp_path):
    write_raw(tmp_path, "ogbn-products", **PRODUCTS)
    script = importlib.import_module("ogbn_products")
    arguments = ["--root", str(tmp_path), "--out", str(tmp_path / "out"), *SMALL]
    result = script.main([*arguments, "--runs", "1", "--epochs", "4", "--parts", "2"])
    assert (result["dataset"], result["num_nodes"]) == ("ogbn-products", 6)
    assert result["epochs"] == 4


def test_ogbn_mag_in_ogbs_own_layout(training, tmp_path, capsys):
    write_mag(tmp_path)
    script = importlib.import_module("ogbn_mag")
    arguments = ["--root", str(tmp_path), "--out", str(tmp_path / "out")]
    small = ["--hidden", "8", "--heads", "2", "--runs", "1", "--epochs", "3"]
    result = script.main([*arguments, *small])
    assert (result["dataset"], result["num_nodes"]) == ("ogbn-mag", 15)
    out = capsys.readouterr().out
    assert "15 nodes of 4 types, 349 classes, 21 edges of 7 relations" in out
    assert "Model: HeteroAttention" in out
    with pytest.raises(SystemExit):
        script.main([*arguments, "--label-rate", "0.5"])  # an option that would do nothing


def test_ogbn_mag_features_are_means_of_neighbours(training, tmp_path):
    write_mag(tmp_path)
    script = importlib.import_module("ogbn_mag")
    data = load("ogbn-mag", root=tmp_path)
    view, graphs = script.prepare(data, None)
    for src, dst in (("paper", "field_of_study"), ("paper", "author"), ("author", "institution")):
        (edges,) = (graph for (s, _, d), graph in graphs.items() if (s, d) == (src, dst))
        mean = torch.zeros(edges.num_dst, edges.num_src)
        mean[edges.edge_index[1], edges.edge_index[0]] = 1.0
        torch.testing.assert_close(view.x[dst], mean / mean.sum(1, keepdim=True) @ view.x[src])


def test_parts_are_a_random_partition_with_the_edges_inside(training):
    run = run_of(training, "--parts", "3")
    run.data.node = torch.arange(34)
    drawn = [list(run.parts()), list(run.parts())]
    first, second = ([part.node.tolist() for part, _ in parts] for parts in drawn)
    assert first != second  # drawn anew
    for parts, nodes in zip(drawn, (first, second), strict=True):
        assert sorted(itertools.chain(*nodes)) == list(range(34))
        for part, graph in parts:
            inside = torch.isin(run.graph.edge_index, part.node).all(0)
            ours = part.node[graph.edge_index].T.tolist()
            assert sorted(ours) == sorted(run.graph.edge_index[:, inside].T.tolist())
            assert torch.equal(part.y, run.data.y[part.node])


def test_evaluation_of_every_nth_epoch_and_the_last(training, tmp_path, capsys):
    script = importlib.import_module("node_classification")
    arguments = [*TINY, "--epochs", "11", "--evaluate-every", "4", "--out", str(tmp_path)]
    result = script.main([*arguments, "--log-every", "1"])
    (history,) = json.loads((tmp_path / "result.json").read_text())["history"]
    assert len(history) == result["epochs"] == 11
    with_metrics = [i + 1 for i, epoch in enumerate(history) if "val" in epoch]
    assert with_metrics == [4, 8, 11]
    out = capsys.readouterr().out
    printed = [line.split("Epoch: ")[1][:2] for line in out.splitlines() if "Epoch: " in line]
    assert printed == ["04", "08", "11"]
    best = max(epoch["val"] for epoch in history if "val" in epoch)
    assert result["val"]["mean"] == pytest.approx(100.0 * best)


def test_bags_of_words_are_a_sparse_matrix(training):
    x = torch.zeros(34, 40)
    x[torch.arange(34), torch.arange(34)] = 1.0
    data = load("karate")
    data.x = x
    run = run_of(training, data=data)
    assert run.data.x.layout == torch.sparse_csr
    assert torch.equal(run.data.x.to_dense(), x)
    assert math.isfinite(run.step()["loss"])
    parts = run_of(training, "--parts", "2", data=data)  # rows of which are taken
    assert math.isfinite(parts.step()["loss"])
    data.x = torch.ones(34, 40)
    assert run_of(training, data=data).data.x.layout == torch.strided


def test_degree_encoding_beside_features(training, tmp_path):
    data = load("karate")
    assert run_of(training, data=data).model.degree_embedding is not None  # without features
    data.x = torch.ones(34, 4)
    assert run_of(training, data=data).model.degree_embedding is None
    assert run_of(training, "--degree-encoding", data=data).model.degree_embedding is not None
    args = options(training, "--degree-encoding", "--no-input-projection", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match="input_projection=False needs features"):
        training.train(data, args)


def test_diffusion_options_are_those_of_the_model(training):
    run = run_of(training, "--layers", "0", "--diffusion-steps", "3", "--teleport", "0.3")
    assert (run.model.diffusion.steps, run.model.diffusion.teleport) == (3, 0.3)
    assert len(run.model.layers) == 0
    assert math.isfinite(run.step()["loss"])
    with pytest.raises(ValueError, match="expected num_layers >= 1"):
        run_of(training, "--layers", "0")


def test_normalised_features_sum_to_one(training):
    data = load("karate")
    data.x = 9.0 * torch.rand(34, 6) + torch.eye(34, 6)
    found = run_of(training, "--normalize-features", data=data).data.x
    torch.testing.assert_close(found.sum(1), torch.ones(34))
    assert torch.equal(run_of(training, data=data).data.x, data.x)
