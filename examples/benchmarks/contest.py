"""One case: every contestant is checked, and those that are right are timed in turn."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

import measure
import rivals
from cases import Case
from check import Reference, Wrong
from report import Row


def run_case(case: Case, names: list[str], repeats: int, copy: measure.CopyBandwidth) -> list[Row]:
    """The rows of a case: who is right is timed, in turn with the others."""
    inputs, cotangent = case.inputs(), case.cotangent()
    right, rows = checked(case, names, inputs)
    peaks: dict[str, dict[str, int | None]] = {}
    if measure.allocator_of_process() == "warm":
        measure.interleaved(right, cotangent, 1)  # the heap grows to what all of them need
    else:
        peaks = {c.name: measure.peak_bytes(c, cotangent) for c in right}
    copy.seen.clear()
    seconds = measure.interleaved(right, cotangent, repeats, between=copy.measure)
    timed = [
        timing_row(case, contestant.name, direction, values, seconds, copy.seen)
        | {
            "version": contestant.version,
            "peak_bytes": peaks.get(contestant.name, {}).get(direction),
        }
        for contestant in right
        for direction, values in seconds[contestant.name].items()
    ]
    return [{**describe(case), **row} for row in timed + rows]


def checked(
    case: Case, names: list[str], inputs: dict[str, Tensor]
) -> tuple[list[rivals.Contestant], list[Row]]:
    """The contestants that are right, and for every other one a row with the reason."""
    torch.compiler.reset()  # what was compiled for other cases counts against a limit
    reference = Reference(case, inputs)
    right, rows = [], []
    for name in names:
        status = "ok"
        try:
            contestant = rivals.prepare(name, case, inputs)
            reference.check(contestant)
            right.append(contestant)
        except rivals.LeftOut as reason:
            status = str(reason)
        except Wrong as error:
            status = f"wrong: {error}"
        except Exception as error:  # whatever a library raises for what it does not support
            status = f"cannot run: {first_line(error)}"
        if status != "ok":
            rows.append({"contestant": name, "direction": "all", "status": status})
    return right, rows


def first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"[:160]


def timing_row(
    case: Case,
    name: str,
    direction: str,
    values: list[float],
    seconds: dict[str, dict[str, list[float]]],
    copies: list[float],
) -> Row:
    median = statistics.median(values)
    bandwidth = statistics.median(copies)
    base = seconds.get(rivals.GRAPHATTN, {}).get(direction)
    row = {
        "contestant": name,
        "direction": direction,
        "status": "ok",
        **spread(values),
        "ratio": None if base is None else median / statistics.median(base),
        "ns_per_edge_and_head": median * 1e9 / (case.num_edges * case.heads),
        "copy_bytes_per_s": bandwidth,
        "copy_bytes_per_s_min": min(copies),
        "copy_bytes_per_s_max": max(copies),
    }
    if case.what == "operator":
        moved = measure.limit_bytes(
            case.num_nodes, case.num_edges, case.heads, case.head_dim, case.dtype.itemsize
        )
        limit = moved[direction] / bandwidth
        row |= {"limit_s": limit, "limit_ratio": median / limit}
    return row


def spread(values: list[float]) -> Row:
    return {
        "n": len(values),
        "min_s": min(values),
        "median_s": statistics.median(values),
        "max_s": max(values),
    }


def describe(case: Case) -> Row:
    return {
        "graph": case.graph,
        "sweep": case.sweep,
        "what": case.what,
        "num_nodes": case.num_nodes,
        "num_edges": case.num_edges,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
    }


def graph_rows(graph: tuple[str, Tensor, int], repeats: int) -> list[Row]:
    """What it takes to build the graph, apart from all calls on it."""
    name, edge_index, num_nodes = graph
    size = {"num_nodes": num_nodes, "num_edges": edge_index.size(1)}
    what = {"graph": name, "what": "graph", "contestant": "Graph", "status": "ok", **size}
    built = measure.build_graph(edge_index, num_nodes, repeats)
    return [
        {**what, "direction": direction, "version": rivals.GRAPHATTN_VERSION, **spread(values)}
        for direction, values in built.items()
    ]
