"""When attention pays: against the mean of neighbours and an MLP of equal size.

Three models classify the nodes of six graphs. They differ only in what a layer adds to a linear
map of the node itself: *attention*, the neighbours' values weighted by queries and keys; the *mean*
of the neighbours (PyTorch Geometric's GraphSAGE), which spends the parameters of queries and keys
on a greater width; nothing, an *MLP*, which does not know the edges. Each is just wide
enough to have at least as many parameters as attention, and has as many layers as do best on
validation nodes.

Homophily is the share of a node's neighbours that have its label, as the mean over nodes. Where it
is high, neighbours vote, and a mean counts the votes.

The last graph, *lookup*, is generated such that only one neighbour matters: 10,000 nodes with eight
neighbours each hold a key, a value and the key of one of their neighbours, whose value is their
label. No two neighbours of a node have the same key. It is trained without dropout, which would
hide the question.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import MLP, GraphSAGE
from torch_geometric.utils import homophily
from tqdm import tqdm

import training
from graphattn import Graph, keep_pages
from graphattn.data.archive import assemble
from graphattn.experiment import Report, figure, integer, option_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKUP = "lookup"
SETS = ("cora", "amazon-photo", "tolokers", "minesweeper", "squirrel-filtered", LOOKUP)
LAYERS = (2, 4)
ATTENTION, MEAN, ALONE = "attention", "mean", "MLP"


class Baseline(nn.Module):
    """A model of PyTorch Geometric, called as the training loop calls a GraphTransformer."""

    def __init__(self, model: nn.Module, dropout: float) -> None:
        super().__init__()
        self.model, self.dropout = model, dropout

    def forward(self, x: Tensor, graph: Graph, **unused: Tensor | None) -> Tensor:
        x = F.dropout(x.to_dense(), self.dropout, self.training)
        edges = (adjacency(graph),) if isinstance(self.model, GraphSAGE) else ()
        return self.model(x, *edges)


def adjacency(graph: Graph) -> Tensor:
    """``[N, N]``, a row for each target: with it PyTorch Geometric copies nothing to edges."""
    values = torch.ones(graph.num_edges)
    size = (graph.num_dst, graph.num_src)
    with warnings.catch_warnings():  # which call the layout new
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(graph.dst_ptr, graph.src_index, values, size)


def mean_model(data: Data, args: argparse.Namespace, width: int) -> nn.Module:
    sizes = (data.x.size(1), width, args.layers, training.num_outputs(data))
    return Baseline(GraphSAGE(*sizes, dropout=args.dropout, norm="layer_norm"), args.dropout)


def mlp_model(data: Data, args: argparse.Namespace, width: int) -> nn.Module:
    sizes = [data.x.size(1), *[width] * (args.layers - 1), training.num_outputs(data)]
    return Baseline(MLP(sizes, dropout=args.dropout, norm="layer_norm"), args.dropout)


def of_equal_size(
    make: Callable[[Data, argparse.Namespace, int], nn.Module],
) -> training.MakeModel:
    """The narrowest of these models that has at least as many parameters as attention."""

    def make_model(data: Data, args: argparse.Namespace) -> nn.Module:
        with torch.device("meta"):
            wanted = training.num_parameters(training.make_model(data, args))
            width = bisect_left(
                range(8 * args.hidden),
                wanted,
                lo=1,
                key=lambda width: training.num_parameters(make(data, args, width)),
            )
        return make(data, args, width)

    return make_model


MODELS: dict[str, training.MakeModel] = {
    ATTENTION: training.make_model,
    MEAN: of_equal_size(mean_model),
    ALONE: of_equal_size(mlp_model),
}


def lookup(num_nodes: int, seed: int) -> Data:
    """A graph in which a label is the value of the neighbour whose key a node asks for."""
    degree, classes = 8, 5
    net = nx.random_regular_graph(degree, num_nodes, seed=seed)
    colors = nx.greedy_color(nx.power(net, 2))  # all neighbours of a node differ
    key = torch.tensor([colors[node] for node in range(num_nodes)])
    neighbors = torch.tensor([list(net[node]) for node in range(num_nodes)])
    rng = torch.Generator().manual_seed(seed)
    value = torch.randint(classes, (num_nodes,), generator=rng)
    choice = torch.randint(degree, (num_nodes, 1), generator=rng)
    asked = neighbors.gather(1, choice).squeeze(1)
    words = [F.one_hot(word) for word in (key[asked], key, value)]
    return assemble(
        LOOKUP,
        "the study",
        edge_index=np.array(net.edges).T,
        num_nodes=num_nodes,
        x=torch.cat(words, dim=1).numpy(),
        y=value[asked].numpy(),
        num_classes=classes,
    )


def best_run(
    data: Data, graph: Graph, args: argparse.Namespace, split: int, make_model: training.MakeModel
) -> dict[str, float]:
    """The metrics of one training at its best epoch."""
    run = training.Run(data, graph, args, split, make_model)
    while not run.is_over():
        run.step()
    return training.best_epoch(run.history)


def study(name: str, options: argparse.Namespace, bar: tqdm[None]) -> dict[str, Any]:
    """A row of the table: test metrics of the three models, each with its best depth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset")
    training.add_options(parser)
    given = ["--dataset", name, "--root", str(options.root), "--seed", str(options.seed)]
    given += ["--download"] if options.download else []
    given += ["--epochs", "4"] if options.quick else []
    given += ["--dropout", "0"] if name == LOOKUP else []
    args = training.parse(parser, given, lambda _: "attention-study")
    if name == LOOKUP:
        data = lookup(200 if options.quick else 10_000, options.seed)
    else:
        data = training.load_or_exit(parser, args)
    data, graph = training.prepare(data, args)
    row: dict[str, Any] = {"set": name, "metric": data.metric}
    row["homophily"] = homophily(graph.edge_index, data.y.long(), method="node")
    for model, make_model in MODELS.items():
        tried = {}
        for args.layers in LAYERS:
            tried[args.layers] = []
            for split in range(options.runs):
                tried[args.layers].append(best_run(data, graph, args, split, make_model))
                bar.update()
        args.layers = max(tried, key=lambda layers: mean(tried[layers], "val"))
        tests = [100 * run["test"] for run in tried[args.layers]]
        std = f" ± {statistics.stdev(tests):.1f}" if len(tests) > 1 else ""
        row[model] = f"{statistics.fmean(tests):.1f}{std}"
        row[f"{model}, layers"] = args.layers
        row[f"{model}, parameters"] = training.num_parameters(make_model(data, args))
    return row


def mean(runs: list[dict[str, float]], split: str) -> float:
    return statistics.fmean(run[split] for run in runs)


def draw(rows: list[dict[str, Any]]) -> Figure:
    drawing, axes = figure(width=7, height=3.6)
    for offset, model in enumerate(MODELS):
        values = [float(row[model].split()[0]) for row in rows]
        places = [place + 0.27 * (offset - 1) for place in range(len(rows))]
        bars = axes.bar(places, values, 0.25, label=model)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["set"] for row in rows], fontsize=8)
    axes.set(ylabel="test metric (%)", ylim=(0, 112))
    axes.legend(ncols=3, loc="upper center")
    return drawing


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(str(__doc__))
    parser.add_argument("--root", type=Path, default=Path("datasets"), help="folder of the sets")
    parser.add_argument("--download", action="store_true", help="download sets that are not there")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NAME", help="which sets")
    parser.add_argument("--runs", type=integer(1), default=5, help="splits, or seeds, of each set")
    options = parser.parse_args(argv)
    report = Report(__file__, str(__doc__), options)
    total = len(options.sets) * len(MODELS) * len(LAYERS) * options.runs
    with tqdm(total=total, unit="training", dynamic_ncols=True, disable=None) as bar:
        rows = [study(name, options, bar) for name in options.sets]
    report.table(
        "Test metric of each model, in percent",
        [{name: row[name] for name in ("set", "metric", "homophily", *MODELS)} for row in rows],
    )
    report.table(
        "Layers and parameters",
        [
            {
                "set": row["set"],
                **{
                    f"{m}, {what}": row[f"{m}, {what}"]
                    for m in MODELS
                    for what in ("layers", "parameters")
                },
            }
            for row in rows
        ],
    )
    report.picture(draw(rows), "Test metric of attention, of means and of an MLP of equal size.")
    report.write()
    return rows


if __name__ == "__main__":
    keep_pages()  # of tensors that are freed: on a CPU, twice as fast
    main()
