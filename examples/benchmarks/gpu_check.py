"""Checks the fused kernels on a GPU, then measures them: a few minutes, and a table of both.

    python examples/benchmarks/gpu_check.py --graph ogbn-arxiv.npz
    python examples/benchmarks/gpu_check.py --parts tuning --seconds 300
    TRITON_INTERPRET=1 python examples/benchmarks/gpu_check.py --quick --device cpu

It needs numpy, torch, torch-geometric and triton, and runs from a checkout. Parts that do not fit
into the time are cut short, and their rows say so. All rows go into gpu_check.csv and
gpu_check.json. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch_geometric
import triton
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.utils import to_undirected

import contest
import graphattn
import measure
import rivals
from cases import DTYPES, Case, load_graph, skewed
from graphattn import Graph, backends, experiment
from graphattn.models import GraphTransformer
from kernel_checks import Row, Skipped, Step, jobs, one_line, run_steps

ROOT = Path(__file__).resolve().parents[2]
TRITON = f"{rivals.GRAPHATTN}-triton"
COLUMNS = (
    *("part", "what", "graph", "num_nodes", "num_edges", "heads", "head_dim", "dtype"),
    *("direction", "contestant", "status", "seconds"),
    *("n", "ms", "min_ms", "max_ms", "host_ms", "ratio"),
    *("limit_bytes", "copy_bytes_per_s", "limit_ms", "limit_ratio", "peak_bytes"),
    *("device", "driver", "cuda", "torch", "triton", "torch_geometric", "graphattn", "python"),
    *("commit", "date"),
)

# Nodes, edges and largest degree of generated graphs; these are of the size of OGB's.
SIZES = {
    "arxiv-size": (169_343, 2_315_598, 13_161),
    "proteins-size": (132_534, 79_122_504, 7_750),
    "products-size": (2_449_029, 123_718_280, 17_500),
}
DENSE = "synthetic-random"  # small enough for attention over all pairs
QUICK_SIZES = {"tiny": (12, 36, 12)}

SHAPES = ((8, 32), (4, 64))
QUICK_SHAPES = ((2, 4),)
# Other values of constants of the kernels' module, tried one at a time.
TUNED = {
    "TILE_NUMBERS": (512, 1024, 2048),
    "TILE_CHANNELS": (64, 128, 256, 512),
    "CHUNK": (128, 256, 512),
}
COMPILED_RIVAL_SECONDS = 25  # what must be left for one to be tried


# Right? ###########################################################################################


def checks(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """The rows of all jobs, each in a process of its own, ``args.workers`` at a time.

    A kernel that hangs, or leaves the device unusable, so ends no other job; and the kernels of
    many jobs are compiled at the same time.
    """
    groups = jobs(args.quick, args.device)
    if args.workers == 0:
        for steps in groups.values():
            yield from run_steps(steps, until)
        return
    with ThreadPoolExecutor(args.workers) as pool:
        for rows in pool.map(lambda name: run_apart(name, args, until), groups):
            yield from rows


def run_apart(name: str, args: argparse.Namespace, until: float) -> list[Row]:
    """The rows of one job from a process of its own, as far as it came."""
    left = until - time.time()
    if left <= 0:
        return [{"what": name, "status": "skipped: time"}]
    command = [sys.executable, __file__, "--device", str(args.device), "--job", name]
    command += ["--until", str(until), *(["--quick"] if args.quick else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=left + 20)
        ended = f"exit status {process.returncode}: {err.strip()[-200:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        ended = "did not end in time"
    sys.stderr.write(err)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode != 0:
        rows.append({"what": name, "status": f"failed: {' '.join(ended.split())}"})
    return rows


# Fast? ############################################################################################


def timed(before: Callable[[], Any], call: Callable[[], Any], device: torch.device) -> Row:
    """Milliseconds that the device takes for a call, and the host to ask for it.

    ``before`` is asked for first: while the device is busy with it, the host gets ahead.
    """
    before()
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        ms = 1e3 * (time.perf_counter() - begun)
        return {"ms": ms, "host_ms": ms}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begun = time.perf_counter()
    call()
    host = time.perf_counter() - begun
    end.record()
    end.synchronize()
    return {"ms": start.elapsed_time(end), "host_ms": 1e3 * host}


def spread(values: list[Row]) -> Row:
    """Of the values of :func:`timed`."""
    ms = [value["ms"] for value in values]
    return {
        "n": len(ms),
        "ms": statistics.median(ms),
        "min_ms": min(ms),
        "max_ms": max(ms),
        "host_ms": statistics.median(value["host_ms"] for value in values),
    }


class Copy:
    """Copies on the device, timed like all else; their speed is what limits are taken at."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = measure.CopyBandwidth(device, 2**30 if device.type == "cuda" else 2**22)
        self.taken: list[Row] = []  # values of timed

    def time(self) -> None:
        source, target = self.buffers.source, self.buffers.target
        self.taken.append(timed(lambda: None, lambda: target.copy_(source), self.device))

    def there_and_back(self) -> None:
        """Keeps the device busy for a while, and leaves its caches cold."""
        self.buffers.target.copy_(self.buffers.source)
        self.buffers.source.copy_(self.buffers.target)

    def row(self) -> Row:
        """Bytes read and written in a second, by the median."""
        moved = 2 * self.buffers.source.nbytes
        return {"copy_bytes_per_s": moved / spread(self.taken)["ms"] * 1e3}


def bandwidth(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """What a copy on the device reads and writes in a second."""

    def step() -> list[Row]:
        copy = Copy(args.device)
        for _ in range(21):
            copy.time()
        del copy.taken[0]  # the first is no measure of the others
        return [{**spread(copy.taken), **copy.row()}]

    yield from run_steps([({"what": "copy"}, step)], until)


def time_in_turn(
    contestants: list[rivals.Contestant], cotangent: Tensor, copy: Copy, seconds: float
) -> dict[str, dict[str, list[Row]]]:
    """Values of :func:`timed` by contestant and direction, each call with cold caches.

    At least one round, and at most 15: as many as begin within ``seconds``.
    """
    taken: dict[str, dict[str, list[Row]]] = {c.name: defaultdict(list) for c in contestants}
    until = time.time() + seconds
    while contestants and (not copy.taken or (len(copy.taken) < 15 and time.time() < until)):
        copy.time()
        for contestant in contestants:
            of = taken[contestant.name]
            with torch.no_grad():
                of["forward"].append(timed(copy.there_and_back, contestant.forward, copy.device))
            if contestant.leaves:
                out, leaves = contestant.forward(), [*contestant.leaves.values()]
                backward = partial(torch.autograd.grad, out, leaves, cotangent)
                of["backward"].append(timed(copy.there_and_back, backward, copy.device))
                del out, backward
    return taken


def measured(case: Case, names: list[str], seconds: float) -> list[Row]:
    """A row for each contestant and direction: first right, then timed in turn."""
    inputs, cotangent = case.inputs(), case.cotangent()
    copy = Copy(cotangent.device)  # now: a rival finds as little memory when checked as when timed
    right, refused = contest.checked(case, names, inputs)
    size = {"num_nodes": case.num_nodes, "num_edges": case.num_edges}
    rows = [{**size, **row} for row in refused]
    for row in rows:
        if row["contestant"] == TRITON:
            row["status"] = f"failed: {row['status']}"
    if not right:
        return rows
    peaks = {contestant.name: measure.peak_bytes(contestant, cotangent) for contestant in right}
    taken = time_in_turn(right, cotangent, copy, seconds)
    limits = measure.limit_bytes(
        case.num_nodes, case.num_edges, case.heads, case.head_dim, case.dtype.itemsize
    )
    for name, directions in taken.items():
        for direction, values in directions.items():
            row = {**size, "contestant": name, "direction": direction}
            row |= {**spread(values), **copy.row(), "limit_bytes": limits[direction]}
            row["limit_ms"] = row["limit_bytes"] / row["copy_bytes_per_s"] * 1e3
            row["limit_ratio"] = row["ms"] / row["limit_ms"]
            base = taken.get(TRITON)
            row["ratio"] = None if base is None else row["ms"] / spread(base[direction])["ms"]
            held = "forward+backward" if direction == "backward" else "forward"
            rows.append({**row, "peak_bytes": peaks[name][held]})
    return rows


@lru_cache(maxsize=1)
def generated(nodes: int, edges: int, largest: int, device: torch.device) -> tuple[Tensor, int]:
    return skewed(nodes, edges, largest, device), nodes


@lru_cache(maxsize=1)
def stored(path: Path, device: torch.device | str = "cpu") -> tuple[Tensor, int]:
    """``(edge_index, num_nodes)`` of an archive as graphattn.data reads it, made undirected."""
    with np.load(path, allow_pickle=False) as arrays:
        nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else len(arrays["y"])
        edge_index = torch.from_numpy(arrays["edge_index"]).long()
    if edge_index.numel() == 0:
        raise ValueError("it has no edges to attend along")
    return to_undirected(edge_index.to(device), num_nodes=nodes), nodes


def graphs(args: argparse.Namespace) -> dict[str, Callable[[], tuple[Tensor, int]]]:
    """Each graph by name, as what makes it; that of a file in place of the first."""
    sizes = QUICK_SIZES if args.quick else SIZES
    makes = {name: partial(generated, *size, args.device) for name, size in sizes.items()}
    if args.graph is None:
        return makes
    others = list(makes.items())[1:]
    return {args.graph.stem: partial(stored, args.graph, args.device), **dict(others)}


def case_step(
    name: str,
    make: Callable[[], tuple[Tensor, int]],
    shape: tuple[int, int],
    dtype: str,
    contestants: list[str],
    seconds: float,
    before: Callable[[], None] = lambda: None,
) -> Step:
    labels = {"graph": name, "heads": shape[0], "head_dim": shape[1], "dtype": dtype}
    labels |= {"what": "operator", "contestant": contestants[-1]}

    def step() -> list[Row]:
        before()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return measured(Case(name, *make(), *shape, DTYPES[dtype]), contestants, seconds)

    return labels, step


def cases(
    args: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[], tuple[Tensor, int]], tuple[int, int], str]]:
    """All graphs in each shape and dtype, the most telling ones first."""
    for shape in QUICK_SHAPES if args.quick else SHAPES:
        for name, make in graphs(args).items():
            for dtype in ("float32",) if args.quick else ("float32", "bfloat16"):
                yield name, make, shape, dtype


def speed(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """Time to build each graph, and the kernels alone in every case."""

    def build(make: Callable[[], tuple[Tensor, int]]) -> list[Row]:
        edge_index, nodes = make()
        size = {"num_nodes": nodes, "num_edges": edge_index.size(1)}
        built = measure.build_graph(edge_index, nodes, 1 if args.quick else 4)
        return [
            {
                **size,
                "direction": direction,
                **spread([{"ms": 1e3 * s, "host_ms": 1e3 * s} for s in values]),
            }
            for direction, values in built.items()
        ]

    steps: list[Step] = [
        ({"what": "graph", "graph": name}, partial(build, make))
        for name, make in graphs(args).items()
    ]
    steps += [case_step(*case, [TRITON], 0 if args.quick else 2) for case in cases(args)]
    yield from run_steps(steps, until)


def against_rivals(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """Each rival in turn with the kernels: over all pairs of a small graph, then as PyG has it."""

    def time_to_compile() -> None:
        if time.time() + COMPILED_RIVAL_SECONDS > until:
            raise Skipped("time")

    def dense() -> tuple[Tensor, int]:
        size = {"nodes": 9, "degree": 4} if args.quick else {"nodes": 4096, "degree": 32}
        return load_graph(DENSE, **size, device=args.device)[1:]

    seconds = 0 if args.quick else 3
    steps = []
    for dtype in ("float32",) if args.quick else ("float32", "bfloat16"):
        shape = (QUICK_SHAPES if args.quick else SHAPES)[0]
        steps.append(case_step(DENSE, dense, shape, dtype, [TRITON, "sdpa"], seconds))
    for case in cases(args):
        steps.append(case_step(*case, [TRITON, "pyg"], seconds))
        if not args.quick:
            names = [TRITON, "pyg-compiled"]
            steps.append(case_step(*case, names, seconds, time_to_compile))
    yield from run_steps(steps, until)


def training(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """Steps of three attention layers on all nodes of a graph of the size of ogbn-products."""
    name = "tiny" if args.quick else "products-size"
    sizes = {**SIZES, **QUICK_SIZES}[name]
    hidden, heads, steps = (8, 2, 1) if args.quick else (256, 8, 5)

    def step() -> list[Row]:
        device = args.device
        edge_index, nodes = generated(*sizes, device)
        torch.manual_seed(0)
        model = GraphTransformer(100, hidden, 47, num_layers=3, heads=heads, backend="triton")
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x, y = torch.randn(nodes, 100, device=device), torch.randint(47, (nodes,), device=device)
        graph, train = Graph(edge_index, nodes), torch.arange(0, nodes, 12, device=device)
        losses = []

        def optimize() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x, graph)[train].float(), y[train])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        if not args.quick:
            optimize()  # compiles
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = [timed(lambda: None, optimize, device) for _ in range(steps)]
        assert all(loss.isfinite() for loss in losses), f"losses {losses}"
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        size = {"num_nodes": nodes, "num_edges": edge_index.size(1)}
        return [{**size, "direction": "step", **spread(taken), "peak_bytes": peak}]

    labels = {"what": "training of three layers, all memory", "graph": name, "contestant": TRITON}
    labels |= {"heads": heads, "head_dim": hidden // heads, "dtype": "bfloat16"}
    yield from run_steps([(labels, step)], until)


def tuning(args: argparse.Namespace, until: float) -> Iterator[Row]:
    """The kernels with other values of their constants, one at a time."""
    from graphattn.backends import triton as kernels

    def with_constant(name: str, value: int, step: Callable[[], Any]) -> list[Row]:
        if not hasattr(kernels, name):
            raise Skipped(f"the kernels have no constant {name}")
        before = getattr(kernels, name)
        setattr(kernels, name, value)
        try:
            return step()
        finally:
            setattr(kernels, name, before)

    steps = []
    for case_name, make, shape, dtype in cases(args):
        if case_name == "proteins-size":
            continue
        labels, step = case_step(case_name, make, shape, dtype, [TRITON], 0 if args.quick else 1)
        for name, values in TUNED.items():
            for value in values[:1] if args.quick else values:
                what = {**labels, "what": f"{name} = {value}"}
                steps.append((what, partial(with_constant, name, value, step)))
    yield from run_steps(steps, until)


# What comes out ###################################################################################

# With the share of the time that each may take.
PARTS: dict[str, tuple[float, Callable[[argparse.Namespace, float], Iterator[Row]]]] = {
    "checks": (0.34, checks),
    "bandwidth": (0.02, bandwidth),
    "speed": (0.26, speed),
    "training": (0.08, training),
    "rivals": (0.3, against_rivals),
    "tuning": (0.5, tuning),
}


def environment(args: argparse.Namespace) -> Row:
    """What the numbers depend on."""
    on_gpu = args.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu, interpreter",
        "driver": driver() if on_gpu else "",
        "cuda": torch.version.cuda if on_gpu else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torch_geometric": torch_geometric.__version__,
        "graphattn": graphattn.__version__,
        "python": platform.python_version(),
        "commit": args.commit or commit(),
        "date": datetime.date.today().isoformat(),
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def commit(root: Path = ROOT) -> str:
    """Of the checkout: by git, or from its files where there is no git."""
    found = experiment.commit()
    if found != "unknown":
        return found
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:7]
        name = head.removeprefix("ref: ")
        loose, packed = root / ".git" / name, root / ".git" / "packed-refs"
        if loose.exists():
            return loose.read_text()[:7]
        lines = (line.split() for line in packed.read_text().splitlines())
        return next((line[0][:7] for line in lines if line[1:] == [name]), "unknown")
    except OSError:
        return "unknown"


def whole(row: Row) -> Row:
    """With all columns; ``None`` for what the row does not have."""
    return {name: row.get(name) for name in COLUMNS}


def write(rows: list[Row], folder: Path) -> None:
    """All rows so far, as CSV and as JSON."""
    with (folder / "gpu_check.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "gpu_check.json").write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: list[Row]) -> list[str]:
    """What matters, in few lines."""
    lines = [f"{rows[0]['device']}, driver {rows[0]['driver'] or '-'}, commit {rows[0]['commit']}"]
    for part in dict.fromkeys(row["part"] for row in rows):
        found = Counter(row["status"].partition(":")[0] for row in rows if row["part"] == part)
        lines.append(f"{part}: " + ", ".join(f"{n} {status}" for status, n in found.items()))
    failed = [row for row in rows if row["status"].startswith("failed")]
    for row in failed[:6]:
        labels = [row[name] for name in ("part", "what", "graph", "dtype") if row[name]]
        lines.append(f"  {', '.join(labels)}: {row['status']}"[:150])
    lines += [f"  ... and {len(failed) - 6} more"] if len(failed) > 6 else []
    for row in rows:
        if row["ms"] and row["part"] == "bandwidth":
            lines.append(f"copy: {row['copy_bytes_per_s'] / 1e12:.3f} TB/s")
        if row["ms"] and row["direction"] == "unsorted, both sides":
            lines.append(f"{row['graph']} sorted by target and by source: {row['ms']:.1f} ms")
        if row["ms"] and row["part"] == "training":
            peak = f"{row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else "unknown"
            lines.append(f"training: {row['ms'] / 1e3:.3f} s a step, peak memory {peak}")
    return lines + speed_table(rows) + tuning_table(rows)


def speed_table(rows: list[Row]) -> list[str]:
    """A line for each case: milliseconds (times the limit), and ratios of the rivals."""
    operator = [row for row in rows if row["what"] == "operator"]
    seen = {row["contestant"] for row in operator}
    names = [name for name in ("sdpa", "pyg", "pyg-compiled") if name in seen]
    lines = []
    cases: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in operator:
        cases[row["graph"], f"{row['heads']} x {row['head_dim']}", row["dtype"]].append(row)
    for case, of in cases.items():
        cells = [
            f"{row['ms']:.3f} ({row['limit_ratio']:.2f})" if row else "-"
            for row in (find(of, TRITON, direction) for direction in ("forward", "backward"))
        ]
        for name in names:
            pair = [find(of, name, direction) for direction in ("forward", "backward")]
            ratios = (row["ratio"] if row else None for row in pair)
            cells.append(" / ".join("-" if x is None else f"{x:.1f}" for x in ratios))
        lines.append([*case, *cells])
    head = ["graph", "shape", "dtype", "forward ms (limit)", "backward ms (limit)"]
    head += [f"{name} / triton" for name in names]
    return columns([head, *lines]) if lines else []


def tuning_table(rows: list[Row]) -> list[str]:
    """A line for each value of a constant: milliseconds forward and backward in each case."""
    tuned: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["part"] == "tuning":
            case = f"{row['graph']} {row['heads']} x {row['head_dim']} {row['dtype']}"
            cell = f"{row['ms']:.3f}" if row["ms"] else row["status"].partition(":")[0]
            tuned[row["what"]][case].append(cell)
    cases = list(dict.fromkeys(case for cells in tuned.values() for case in cells))
    lines = [[what, *(" / ".join(cells[case]) for case in cases)] for what, cells in tuned.items()]
    return columns([["constant", *cases], *lines]) if lines else []


def find(rows: list[Row], contestant: str, direction: str) -> Row | None:
    """The first row of this contestant and direction, which has its time."""
    wanted = (contestant, direction)
    return next((row for row in rows if (row["contestant"], row["direction"]) == wanted), None)


def columns(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu is for trying out")
    parser.add_argument("--graph", type=Path, help="NAME.npz in place of the graph of arxiv's size")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder")
    parser.add_argument("--seconds", type=float, default=450, help="for all parts together")
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--tune", action="store_true", help="the part tuning as well")
    parser.add_argument("--quick", action="store_true", help="tiny graphs, to try this script")
    parser.add_argument("--workers", type=int, help="processes of the checks; 0: this one")
    parser.add_argument("--commit", help="default: that of the checkout")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device} is not a device torch knows")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no CUDA device is available")
    if args.device.type == "cuda" and args.device.index is not None:
        torch.cuda.set_device(args.device)
    reasons = backends.unsupported("triton", args.device, torch.float32)
    if reasons:
        parser.error(f"--device {args.device}: {'; '.join(reasons)}")
    if args.graph is not None:
        try:
            stored(args.graph)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            parser.error(f"--graph {args.graph}: {one_line(error)}")
    chosen = args.parts.split(",") if args.parts else [name for name in PARTS if name != "tuning"]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--parts: unknown {', '.join(unknown)}; there are {', '.join(PARTS)}")
    args.parts = [name for name in PARTS if name in chosen or (name == "tuning" and args.tune)]
    if args.workers is None:
        cores = os.cpu_count() or 1
        args.workers = max(1, min(12, cores - 2)) if args.device.type == "cuda" else 0
    return args


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    if args.job is not None:
        torch.set_num_threads(1)
        for row in run_steps(jobs(args.quick, args.device)[args.job], args.until):
            print(json.dumps(row), flush=True)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    common, rows = environment(args), []
    written = until = time.time()
    shares = sum(PARTS[name][0] for name in args.parts)
    for name in args.parts:
        share, part = PARTS[name]
        until += args.seconds * share / shares
        print(f"{name}: until {until - time.time():.0f} s from now", file=sys.stderr, flush=True)
        try:
            for row in part(args, until):
                rows.append(whole({"part": name, **common, **row}))
                if time.time() > written + 10:
                    write(rows, args.out)
                    written = time.time()
        except Exception as error:
            traceback.print_exc()
            status = f"failed: {one_line(error)}"
            rows.append(whole({"part": name, **common, "status": status}))
        write(rows, args.out)
    print("\n".join(table(rows)))
    print(f"Written: {args.out / 'gpu_check.csv'}, {args.out / 'gpu_check.json'}")
    return 1 if any(row["status"].startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
