"""Measures attention along edges: graphattn and its rivals, first for being right, then for speed.

    python examples/benchmarks/attention.py --quick
    python examples/benchmarks/attention.py --graph ogbn-arxiv --shape 8x32,4x64 --threads 1,2
    python examples/benchmarks/attention.py --sweep --rivals graphattn,pyg-compiled,dgl

Every contestant is checked against a float64 reference, by the code and on the graph that are
timed. One that is wrong, or not installed, or would not fit in memory, is left out and listed with
the reason. The others run in turn, round by round. All that is measured goes into a CSV file;
report.py makes docs/benchmarks.md of such files.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch_geometric
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

import graphattn
import measure
import report
import rivals
from cases import DTYPES, ORDERS, SYNTHETIC, WHAT, Case, load_graph
from contest import graph_rows, run_case
from graphattn.experiment import commit, integer

_T = TypeVar("_T")

DEFAULTS = {
    "graph": ["synthetic-powerlaw", "synthetic-random"],
    "nodes": 50_000,
    "degree": 14,
    "shape": [(8, 32), (8, 16)],
    "what": "operator",
    "repeats": 7,
}
QUICK = {
    "graph": ["synthetic-powerlaw", "synthetic-random", "synthetic-star"],
    "nodes": 5_000,
    "shape": [(8, 16)],
    "what": "both",
    "repeats": 5,
}
SWEEP = {"nodes": 20_000, "degree": 16, "shape": [(8, 16)], "repeats": 5}
QUICK_SWEEP = {"nodes": 2_000}
FACTORS = (0.25, 0.5, 1, 2, 4)  # of a sweep

# Options ##########################################################################################


def comma(item: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Several values in one argument, as in ``1,2``."""

    def parse(text: str) -> list[_T]:
        return [item(part) for part in text.split(",")]

    parse.__name__ = f"list of {item.__name__}"
    return parse


def shape(text: str) -> tuple[int, int]:
    heads, _, head_dim = text.partition("x")
    if not (heads.isdigit() and head_dim.isdigit() and int(heads) and int(head_dim)):
        raise argparse.ArgumentTypeError(f"must be HEADSxCHANNELS, such as 8x32, got {text}")
    return int(heads), int(head_dim)


def one_of(kind: str, known: list[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown {kind} {text}; one of {', '.join(known)}")
        return text

    parse.__name__ = kind
    return parse


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Options marked with a comma take several values, as in --threads 1,2.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--graph",
        type=comma(str),
        action="extend",
        metavar="NAME,...",
        help=f"{', '.join(SYNTHETIC)}; a path NAME.npz; or a set of --root such as ogbn-arxiv, "
        "made undirected",
    )
    what.add_argument("--root", type=Path, default=Path("datasets"), help="folder of the data sets")
    what.add_argument(
        "--reorder",
        choices=ORDERS,
        help="renumber nodes so that neighbours are near in memory",
    )
    what.add_argument("--nodes", type=integer(2), help="of synthetic graphs")
    what.add_argument(
        "--degree", type=integer(1), help="edges a node of synthetic graphs (no star)"
    )
    what.add_argument("--shape", type=comma(shape), metavar="HxD,...", help="heads and channels")
    what.add_argument(
        "--dtype",
        type=comma(one_of("dtype", list(DTYPES))),
        default=["float32"],
        metavar="NAME,...",
    )
    what.add_argument("--what", choices=(*WHAT, "both"), help="with or without the projections")
    what.add_argument(
        "--rivals",
        type=comma(one_of("contestant", rivals.names("operator"))),
        default=rivals.names("operator"),
        metavar="NAME,...",
        help=f"default: all of {', '.join(rivals.names('operator'))}",
    )
    what.add_argument(
        "--sweep",
        action="store_true",
        help="instead of --graph: synthetic graphs of growing edges, nodes, degree and channels",
    )
    what.add_argument(
        "--quick", action="store_true", help="small graphs: five minutes on two cores"
    )

    how = parser.add_argument_group("how")
    how.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    how.add_argument(
        "--threads",
        type=comma(integer(1)),
        default=[torch.get_num_threads()],
        metavar="N,...",
        help="CPU threads (default: torch's choice)",
    )
    how.add_argument("--repeats", type=integer(1), help="timings of which the median is taken")
    how.add_argument(
        "--allocator",
        choices=("default", "warm", "both"),
        default="both",
        help="warm: the process keeps its pages, for every contestant alike (glibc)",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--csv", type=Path, default=Path("runs/benchmarks/attention.csv"))
    output.add_argument(
        "--figures", type=Path, default=Path("runs/benchmarks"), help="folder of the figures"
    )
    args = parser.parse_args(argv)
    presets = [(args.sweep and args.quick, QUICK_SWEEP), (args.sweep, SWEEP), (args.quick, QUICK)]
    for name, value in ChainMap(*(preset for given, preset in presets if given), DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        args.device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device} is not a device torch knows")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no CUDA device is available")
    try:
        args.graphs = [] if args.sweep else list(graphs(args))
        args.cases = list(sweep(args) if args.sweep else cases(args))
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return args


def phases(args: argparse.Namespace) -> list[str]:
    """The allocators to measure with, the default one first: there is no way back from warm."""
    if args.device.type == "cuda":
        return ["torch"]
    found = measure.allocator_of_process()
    if found != "default":
        return [found]
    return ["default", "warm"] if args.allocator == "both" else [args.allocator]


def graphs(args: argparse.Namespace) -> Iterator[tuple[str, Tensor, int]]:
    size = {"nodes": args.nodes, "degree": args.degree}
    for name in args.graph:
        yield load_graph(name, **size, root=args.root, reorder=args.reorder, device=args.device)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    whats = WHAT if args.what == "both" else (args.what,)
    for graph in args.graphs:
        for what in whats:
            for dtype in args.dtype:
                for heads, head_dim in args.shape:
                    yield Case(*graph, heads, head_dim, DTYPES[dtype], what)


def sweep(args: argparse.Namespace) -> Iterator[Case]:
    """One size at a time goes from a quarter to four times its value."""
    nodes, degree, (heads, head_dim) = args.nodes, args.degree, args.shape[0]
    for factor in FACTORS:
        scaled = {
            "edges": (round(nodes * factor), degree, head_dim),
            "nodes, same edges": (round(nodes * factor), max(1, round(degree / factor)), head_dim),
            "edges a node": (nodes, max(1, round(degree * factor)), head_dim),
            "channels a head": (nodes, degree, max(1, round(head_dim * factor))),
        }
        for axis, (n, d, channels) in scaled.items():
            graph = load_graph("synthetic-random", nodes=n, degree=d, device=args.device)
            yield Case(*graph, heads, channels, DTYPES[args.dtype[0]], sweep=axis)


# All of them ######################################################################################


def run(args: argparse.Namespace) -> list[report.Row]:
    """All rows. Each is written to the CSV file, and each table shown, as soon as it is there."""
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "graphattn": graphattn.__version__,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "python": platform.python_version(),
        **measure.machine(args.device),
    }
    args.csv.unlink(missing_ok=True)
    copy = measure.CopyBandwidth(args.device)
    settings = [(allocator, threads) for allocator in phases(args) for threads in args.threads]
    rows: list[report.Row] = []
    with tqdm(total=len(settings) * len(args.cases), unit="case", disable=None) as bar:
        for allocator, threads in settings:
            if allocator == "warm" and measure.allocator_of_process() != "warm":
                measure.keep_pages()
            torch.set_num_threads(threads)
            setting = {**dict.fromkeys(report.COLUMNS), **common}
            setting |= {"allocator": allocator, "threads": threads, "sweep": ""}
            built = [row for graph in args.graphs for row in graph_rows(graph, args.repeats)]
            rows += keep([{**setting, **row} for row in built], args.csv, bar)
            for case in args.cases:
                names = [name for name in args.rivals if name in rivals.names(case.what)]
                measured = run_case(case, names, args.repeats, copy)
                rows += keep([{**setting, **row} for row in measured], args.csv, bar)
                bar.update()
    return rows


def keep(rows: list[report.Row], path: Path, bar: tqdm) -> list[report.Row]:
    report.append_rows(path, rows)
    with bar.external_write_mode(file=sys.stdout):
        for title, _, tables in report.case_tables(rows):
            for table in tables:
                show(title, table)
        built = report.graph_table(rows)
        if built is not None:
            show("Graph, once for all layers and steps", built)
    return rows


def show(title: str, table: report.Table) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    shown = Table(title=f"{title}\n{table.title}", title_justify="left", title_style="bold")
    for place, column in enumerate(table.header):
        shown.add_column(column, justify="right" if place else "left", no_wrap=place == 0)
    for line in table.body:
        shown.add_row(*line)
    console.print(shown)
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


def main(argv: list[str] | None = None) -> list[report.Row]:
    args = options(argv)
    try:
        rows = run(args)
    except KeyboardInterrupt:
        print(f"Stopped; what was measured before is in {args.csv}")
        raise SystemExit(130) from None
    points = report.sweep_table(rows)
    if points is not None:
        show(report.SWEEP, points)
    figures = report.draw(rows, args.figures, args.csv.stem)
    print("Written:", ", ".join(str(path) for path in (args.csv, *figures.values())))
    wrong = {
        f"{row['contestant']} on {row['graph']}: {row['status']}"
        for row in rows
        if row["contestant"].startswith(rivals.GRAPHATTN) and row["status"].startswith("wrong")
    }
    if wrong:
        raise SystemExit(f"error: {'; '.join(sorted(wrong))}")
    return rows


if __name__ == "__main__":
    main()
