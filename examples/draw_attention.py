"""Draws what an attention layer looks at, on Zachary's karate club.

    python examples/draw_attention.py --out docs/images/karate.png

One attention layer learns to tell the two factions of the club from each member's friends alone: it
sees no features but a member's number, and has no skip connection. Its weights, averaged over the
heads, are drawn as arrows from the friend that is looked at to the member who looks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data

from graphattn import Graph
from graphattn.data import load, to_networkx
from graphattn.experiment import figure, integer
from graphattn.nn import GraphAttentionConv

FACTIONS = ("faction of Mr. Hi", "faction of the officer")
COLORS = ("#3b6fb6", "#e08a1e")


def train(data: Data, *, heads: int, epochs: int, seed: int) -> tuple[Tensor, float]:
    """Attention weights ``[E]``, averaged over heads, and the accuracy on the held-out members."""
    torch.manual_seed(seed)
    graph = Graph(data.edge_index, data.num_nodes)
    member = torch.eye(data.num_nodes)
    train_mask, test_mask = data.train_mask[:, 0], ~data.train_mask[:, 0]
    conv = GraphAttentionConv(
        data.num_nodes, data.num_classes, heads, concat=False, root_weight=False
    )
    optimizer = torch.optim.Adam(conv.parameters(), lr=0.05, weight_decay=5e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        out = conv(member, graph)
        F.cross_entropy(out[train_mask], data.y[train_mask]).backward()
        optimizer.step()
    with torch.no_grad():
        out, (_, weights) = conv(member, graph, return_attention_weights=True)
    right = out.argmax(dim=-1) == data.y
    return weights.mean(dim=-1), right[test_mask].float().mean().item()


def draw(data: Data, weights: Tensor, path: Path) -> None:
    from matplotlib import cm, colors
    from matplotlib.lines import Line2D

    club = to_networkx(data)
    place = nx.kamada_kawai_layout(club.to_undirected())
    order = weights.argsort().tolist()  # strong arrows on top
    arrows = [tuple(data.edge_index[:, e].tolist()) for e in order]
    values = weights[order]
    scale = colors.Normalize(0.0, 1.0)
    shade = cm.ScalarMappable(
        scale,
        colors.LinearSegmentedColormap.from_list(
            "attention", ["#d9d9de", "#a78bb5", "#6a2a7a", "#2d0a3c"]
        ),
    )

    drawing, axes = figure(width=8.4, height=6.2)
    for (source, target), value in zip(arrows, values.tolist(), strict=True):
        nx.draw_networkx_edges(
            club,
            place,
            [(source, target)],
            ax=axes,
            node_size=330,
            arrowsize=4 + 6 * value**0.5,
            width=0.5 + 3.5 * value,
            edge_color=[shade.to_rgba(value)],
            connectionstyle="arc3,rad=0.09",
        )
    nx.draw_networkx_nodes(
        club,
        place,
        ax=axes,
        node_size=330,
        edgecolors="white",
        linewidths=1.2,
        node_color=[COLORS[label] for label in data.y.tolist()],
    )
    nx.draw_networkx_labels(club, place, ax=axes, font_size=8, font_color="white")
    axes.set_axis_off()
    axes.set_title(
        "An arrow from A to B: B attends to A. The weights of the arrows into a member sum to 1.",
        fontsize=10,
    )
    drawing.suptitle("Attention in the karate club", fontsize=14)
    axes.legend(
        handles=[
            Line2D([], [], marker="o", linestyle="", markersize=10, color=color, label=label)
            for color, label in zip(COLORS, FACTIONS, strict=True)
        ],
        loc="lower left",
        frameon=False,
        fontsize=10,
    )
    bar = drawing.colorbar(shade, ax=axes, shrink=0.55, pad=0.01)
    bar.set_label("attention weight, mean over the heads", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120, metadata={"Software": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw attention weights on the karate club.")
    parser.add_argument("--out", type=Path, default=Path("docs/images/karate.png"))
    parser.add_argument("--heads", type=integer(1), default=4)
    parser.add_argument("--epochs", type=integer(1), default=300)
    parser.add_argument("--seed", type=integer(0), default=0)
    args = parser.parse_args(argv)
    data = load("karate")
    weights, accuracy = train(data, heads=args.heads, epochs=args.epochs, seed=args.seed)
    source, target = data.edge_index
    within = data.y[source] == data.y[target]
    attention, edges = weights[within].sum() / weights.sum(), within.float().mean()
    print(f"Accuracy on members not trained on: {100 * accuracy:.1f}%")
    print(
        f"Within the own faction: {100 * attention:.1f}% of attention, {100 * edges:.1f}% of edges"
    )
    draw(data, weights, args.out)
    print(f"Written: {args.out}")


if __name__ == "__main__":
    main()
