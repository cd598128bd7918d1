"""Trains attention on ogbn-mag: predict the venue of a paper in a graph of papers, authors,
institutions and fields of study.

    python examples/ogbn_mag.py --download --device cuda     # ten seeds, full batch

Each relation, and the reverse of each, has its own attention layer, PyTorch Geometric's
``HeteroConv`` adds them up, and each type of node has its own skip connection and normalisation.
Only papers have features. The other nodes take the mean over the nodes around them that have some:
authors and fields of study that of their papers, institutions that of their authors.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, HeteroDictLinear
from torch_geometric.transforms import ToUndirected
from torch_geometric.typing import EdgeType

from graphattn import Graph, backends, keep_pages
from graphattn.experiment import integer, number
from graphattn.nn import GraphAttentionConv
from training import (
    add_file_options,
    add_training_options,
    load_or_exit,
    neighbour_mean,
    parse,
    train,
)

TARGET = "paper"


class Relations(dict[EdgeType, Graph]):
    """The graph of each relation."""

    @property
    def num_edges(self) -> int:
        return sum(graph.num_edges for graph in self.values())

    def to(self, device: str) -> Relations:
        return Relations({relation: graph.to(device) for relation, graph in self.items()})


class HeteroAttention(nn.Module):
    """Layers of attention along every relation; outputs for the target's type of node."""

    def __init__(
        self,
        in_channels: dict[str, int],
        relations: list[EdgeType],
        out_channels: int,
        args: argparse.Namespace,
    ) -> None:
        super().__init__()
        hidden, self.dropout = args.hidden, args.dropout
        self.lin_in = HeteroDictLinear(in_channels, hidden)
        self.convs, self.skips, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(args.layers):
            convs = {
                relation: GraphAttentionConv(
                    (hidden, hidden),
                    hidden // args.heads,
                    args.heads,
                    root_weight=False,
                    dropout=args.attention_dropout,
                    backend=args.backend,
                )
                for relation in relations
            }
            self.convs.append(HeteroConv(convs, aggr="sum"))
            self.skips.append(HeteroDictLinear(dict.fromkeys(in_channels, hidden), hidden))
            self.norms.append(nn.ModuleDict({kind: nn.LayerNorm(hidden) for kind in in_channels}))
        self.head = nn.Linear(hidden, out_channels)

    def forward(
        self,
        x: dict[str, Tensor],
        graphs: Relations,
        *,
        labels: Tensor | None = None,  # what the loop offers every model; neither is used here
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        h = self.lin_in(x)
        for conv, skip, norms in zip(self.convs, self.skips, self.norms, strict=True):
            h = {kind: F.dropout(rows, self.dropout, self.training) for kind, rows in h.items()}
            attended, kept = conv(h, graphs), skip(h)
            h = {kind: F.relu(norms[kind](attended[kind] + kept[kind])) for kind in h}
        return self.head(F.dropout(h[TARGET], self.dropout, self.training))


def prepare(data: HeteroData, args: argparse.Namespace) -> tuple[Data, Relations]:
    """What the loop trains on: features of every type of node, targets, and the graphs."""
    stored = data.num_edges
    data = ToUndirected(merge=True)(data)
    graphs = Relations(
        {
            relation: Graph(
                data[relation].edge_index,
                (data[relation[0]].num_nodes, data[relation[2]].num_nodes),
            )
            for relation in data.edge_types
        }
    )
    print(
        f"Data: {data.name}, {data.num_nodes:,} nodes of {len(data.node_types)} types, "
        f"{data.num_classes} classes, {stored:,} edges of {len(data.edge_types)} relations -> "
        f"{graphs.num_edges:,} (with reverses, duplicates merged)"
    )
    paper = data[TARGET]
    view = Data(
        x=spread_features(data, graphs),
        y=paper.y,
        num_nodes=data.num_nodes,
        relations=data.edge_types,
        num_classes=data.num_classes,
        name=data.name,
        metric=data.metric,
        **{f"{split}_mask": paper[f"{split}_mask"] for split in ("train", "val", "test")},
    )
    return view, graphs


def spread_features(data: HeteroData, graphs: Relations) -> dict[str, Tensor]:
    """Features of each type of node; those without have the mean over their neighbours'."""
    x = {TARGET: data[TARGET].x}
    while len(x) < len(data.node_types):
        found = next((edge for edge in data.edge_types if edge[0] in x and edge[2] not in x), None)
        if found is None:
            raise SystemExit(f"error: {data.name} has nodes that no relation joins to papers")
        src, _, dst = found
        x[dst] = neighbour_mean(x[src], graphs[found])
    return {kind: x[kind] for kind in data.node_types}


def make_model(data: Data, args: argparse.Namespace) -> HeteroAttention:
    sizes = {kind: rows.size(1) for kind, rows in data.x.items()}
    relations = [tuple(relation) for relation in data.relations]  # lists since Data.to
    return HeteroAttention(sizes, relations, data.num_classes, args)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="Train attention along the relations of ogbn-mag, full batch."
    )
    # What the loop asks for and this model has not: one graph, and labels as inputs.
    parser.set_defaults(dataset="ogbn-mag", parts=1, compile=False, directed=False)
    parser.set_defaults(directions=False, label_rate=0.0, label_propagation=0, label_reuse=0)
    parser.set_defaults(correct_and_smooth=False)
    add, share = parser.add_argument_group("model").add_argument, number(0, 1)
    add("--hidden", type=integer(1), default=256, help="width of the layers")
    add("--layers", type=integer(1), default=2, help="number of layers")
    add("--heads", type=integer(1), default=4, help="attention heads of each relation")
    add("--dropout", type=share, default=0.5, help="on features")
    add("--attention-dropout", type=share, default=0.0, help="on attention weights")
    add("--backend", default="auto", choices=("auto", *backends.NAMES), help="of the operator")
    add_training_options(parser)
    add_file_options(parser)
    args = parse(parser, argv)
    return train(load_or_exit(parser, args), args, prepare, make_model)


if __name__ == "__main__":
    keep_pages()  # of tensors that are freed: on a CPU, twice as fast
    main()
