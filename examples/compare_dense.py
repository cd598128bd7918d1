"""Compares attention along edges with dense masked attention that has the same parameters.

    python examples/compare_dense.py
    python examples/compare_dense.py --nodes 1024 4096 16384 --degrees 8 64

``GraphMultiheadAttention`` on a random graph stands against ``torch.nn.MultiheadAttention`` with
the mask of that graph. For every size: the largest difference of outputs and of gradients, the time
of forward and backward, and the peak memory above what was held before. Dense attention is left out
where it would not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.utils import coalesce, remove_self_loops
from tqdm import tqdm

from graphattn import Graph
from graphattn.experiment import figure, integer, measure
from graphattn.nn import GraphMultiheadAttention

KINDS = ("sparse", "dense")


def random_graph(num_nodes: int, degree: int) -> Graph:
    """Every node attends to itself and to up to ``degree - 1`` random others."""
    dst = torch.arange(num_nodes).repeat_interleave(degree - 1)
    others = torch.stack([torch.randint(num_nodes, dst.shape), dst])
    return Graph(coalesce(remove_self_loops(others)[0]), num_nodes).add_self_loops()


def dense_mask(graph: Graph) -> Tensor:
    """The mask of ``torch.nn.MultiheadAttention``, where True forbids."""
    src, dst = graph.edge_index
    forbidden = torch.ones(graph.num_dst, graph.num_src, dtype=torch.bool, device=graph.device)
    forbidden[dst, src] = False
    return forbidden


def compare(num_nodes: int, degree: int, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    graph = random_graph(num_nodes, degree).to(device)
    dense = nn.MultiheadAttention(args.width, args.heads, batch_first=True, device=device)
    sparse = GraphMultiheadAttention.from_torch(dense)
    x = torch.randn(num_nodes, args.width, device=device, requires_grad=True)
    row: dict[str, Any] = {"nodes": num_nodes, "degree": degree, "edges": graph.num_edges}

    def attend_sparse() -> Tensor:
        return sparse(x, x, x, graph)

    results = {}
    steps = {"sparse": attend_sparse}
    # The least that dense attention takes: its mask, boolean and as numbers, and one gradient.
    need = num_nodes**2 * (1 + 4 + 4)
    if need <= args.dense_limit * 2**30:
        mask = dense_mask(graph)
        steps["dense"] = lambda: dense(x, x, x, attn_mask=mask, need_weights=False)[0]
    for kind, forward in steps.items():

        def step(forward: Callable[[], Tensor] = forward) -> tuple[Tensor, Tensor]:
            out = forward()
            (gradient,) = torch.autograd.grad(out.square().sum(), x)
            return out.detach(), gradient

        results[kind] = step()
        row[f"{kind}_seconds"], row[f"{kind}_bytes"] = measure(
            step, repeats=args.repeats, device=device
        )
    if "dense" in results:
        for name, ours, theirs in zip(("output", "gradient"), *results.values(), strict=True):
            row[f"{name}_difference"] = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return row


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Attention along edges and dense masked attention, same parameters")
    for column in ("nodes", "degree", "edges"):
        table.add_column(column, justify="right")
    for column in (
        "output diff.",
        "gradient diff.",
        "sparse ms",
        "dense ms",
        "sparse MiB",
        "dense MiB",
    ):
        table.add_column(column, justify="right")

    def cell(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else format(value * factor, form)

    for row in rows:
        table.add_row(
            *(f"{row[name]:,}" for name in ("nodes", "degree", "edges")),
            cell(row.get("output_difference"), ".1e"),
            cell(row.get("gradient_difference"), ".1e"),
            *(cell(row.get(f"{kind}_seconds"), ".1f", 1e3) for kind in KINDS),
            *(cell(row.get(f"{kind}_bytes"), ".1f", 2**-20) for kind in KINDS),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("Differences are the largest ones, relative to the largest value; - : would not fit.")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    drawing, panels = figure(2, height=4)
    degrees = sorted({row["degree"] for row in rows})
    for panel, what, unit, factor in zip(
        panels, ("seconds", "bytes"), ("ms", "MiB"), (1e3, 2**-20), strict=True
    ):
        for degree in degrees:
            for kind, style in zip(KINDS, ("o-", "s--"), strict=True):
                points = [
                    (row["nodes"], row[f"{kind}_{what}"] * factor)
                    for row in rows
                    if row["degree"] == degree and row.get(f"{kind}_{what}")
                ]
                if points:
                    color = f"C{degrees.index(degree)}"
                    panel.plot(
                        *zip(*points, strict=True),
                        style,
                        color=color,
                        label=f"{kind}, degree {degree}",
                    )
        panel.set(xscale="log", yscale="log", xlabel="nodes", ylabel=f"forward + backward, {unit}")
        panel.grid(alpha=0.3)
    panels[0].set_title("Time")
    panels[1].set_title("Peak memory")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    print(f"Written: {path}")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=integer(2), nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--degrees", type=integer(2), nargs="+", default=[8, 64])
    parser.add_argument("--width", type=integer(1), default=256, help="embedding size")
    parser.add_argument("--heads", type=integer(1), default=8)
    parser.add_argument("--repeats", type=integer(1), default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dense-limit", type=float, default=12.0, help="leave dense attention out above this GiB"
    )
    parser.add_argument("--plot", type=Path, default=Path("runs/compare_dense.png"))
    args = parser.parse_args(argv)
    if args.width % args.heads != 0:
        parser.error(f"--width {args.width} must be divisible by --heads {args.heads}")
    sizes = [(nodes, degree) for nodes in args.nodes for degree in args.degrees]
    rows = [compare(*size, args) for size in tqdm(sizes, unit="size", disable=None)]
    show(rows)
    draw(rows, args.plot)
    return rows


if __name__ == "__main__":
    main()
