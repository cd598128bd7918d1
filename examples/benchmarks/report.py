"""Turns result rows into tables and figures, and writes them into docs/benchmarks.md.

    python examples/benchmarks/report.py

Every CSV file in examples/benchmarks/results/, written there by attention.py, becomes one section
of the page, between its two markers. The rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
BEGIN = "<!-- results: written by examples/benchmarks/report.py, not by hand -->"
END = "<!-- end of results -->"

Row = dict[str, Any]

TEXT = (
    *("date", "commit", "graphattn", "torch", "torch_geometric", "python"),
    *("cpu", "caches", "kernel", "device", "allocator"),
    *("graph", "sweep", "what", "dtype", "contestant", "version", "direction", "status"),
)
COLUMNS = (
    *("date", "commit", "graphattn", "torch", "torch_geometric", "python"),
    *("cpu", "cores", "caches", "memory_bytes", "kernel", "device"),
    *("allocator", "threads"),
    *("graph", "sweep", "what", "num_nodes", "num_edges", "heads", "head_dim", "dtype"),
    *("contestant", "version", "direction", "status", "n", "min_s", "median_s", "max_s"),
    *("ratio", "ns_per_edge_and_head", "peak_bytes", "limit_s", "limit_ratio"),
    *("copy_bytes_per_s", "copy_bytes_per_s_min", "copy_bytes_per_s_max"),
)
CASE = ("graph", "what", "num_nodes", "num_edges", "heads", "head_dim", "dtype", "threads")
BOTH = "forward+backward"
BASE = "graphattn"  # the contestant that ratios are taken to

# Rows #############################################################################################


def read_rows(path: Path) -> list[Row]:
    """Rows as they were written; an empty number is ``None``."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path}: the columns are not those of this version. Run the benchmark again."
            )
        return [
            {name: text if name in TEXT else _number(text) for name, text in row.items()}
            for row in reader
        ]


def append_rows(path: Path, rows: list[Row]) -> None:
    """Adds rows to a file, which is made with its header when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    return int(text) if text.isdigit() else float(text)


def grouped(rows: Iterable[Row], names: tuple[str, ...]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _value(rows: list[Row], contestant: str, direction: str, column: str) -> float | None:
    for row in rows:
        if (row["contestant"], row["direction"]) == (contestant, direction):
            return row[column]
    return None


def _timed(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for row in rows if row["median_s"] is not None))


# Tables ###########################################################################################


@dataclass(frozen=True)
class Table:
    """One case under one allocator, or the graphs that were built."""

    title: str
    header: list[str]
    body: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.header)]
        lines += [_line(["---", *(["---:"] * (len(self.header) - 1))]), *map(_line, self.body)]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])


def case_tables(rows: list[Row]) -> Iterator[tuple[str, list[Row], list[Table]]]:
    """Title, rows and tables (one for each allocator) of every case that is no part of a sweep."""
    cases = [row for row in rows if row["sweep"] == "" and row["what"] != "graph"]
    for key, case in grouped(cases, CASE).items():
        graph, what, nodes, edges, heads, dim, dtype, threads = key
        title = f"{graph}, {what}, {heads} x {dim}, {dtype}, {_threads(threads)}"
        allocators = grouped(case, ("allocator",)).values()
        yield title, case, [_case_table(part, nodes, edges) for part in allocators]


def _case_table(rows: list[Row], num_nodes: int, num_edges: int) -> Table:
    header = ["contestant", "forward ms", "backward ms", "both ms"]
    header += ["forward ratio", "both ratio", "ns / edge / head"]
    header += ["forward / limit", "backward / limit", "peak MiB"]
    body = []
    for name in _timed(rows):
        ms = (
            _cell(_value(rows, name, direction, "median_s"), 1e3)
            for direction in ("forward", "backward", BOTH)
        )
        ratios = (_cell(_value(rows, name, direction, "ratio")) for direction in ("forward", BOTH))
        limits = (
            _cell(_value(rows, name, direction, "limit_ratio"))
            for direction in ("forward", "backward")
        )
        longest = BOTH if _value(rows, name, BOTH, "median_s") is not None else "forward"
        ns = _cell(_value(rows, name, longest, "ns_per_edge_and_head"))
        peak = _cell(_value(rows, name, longest, "peak_bytes"), 2**-20)
        body.append([name, *ms, *ratios, ns, *limits, peak])
    copy = [row for row in rows if row["copy_bytes_per_s"] is not None]
    title = f"{_allocator(rows[0]['allocator'])}: {num_nodes:,} nodes, {num_edges:,} edges"
    return Table(title, header, body, [*_copy_note(copy), *_notes(rows)])


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _allocator(name: str) -> str:
    return {"default": "Default allocator", "warm": "Warm pages"}.get(name, f"Allocator {name}")


def _copy_note(rows: list[Row]) -> Iterator[str]:
    if rows:
        median, least, most = (
            rows[0][f"copy_bytes_per_s{which}"] / 1e9 for which in ("", "_min", "_max")
        )
        yield f"Copy bandwidth {median:.1f} GB/s (from {least:.1f} to {most:.1f})."


def _notes(rows: list[Row]) -> Iterator[str]:
    """What a table alone would hide: who won against graphattn, and who was not timed."""
    quicker = [
        f"{row['contestant']} ({row['direction']}, {row['ratio']:.2f})"
        for row in rows
        if row["ratio"] is not None and row["ratio"] < 1 and not row["contestant"].startswith(BASE)
    ]
    if quicker:
        yield f"Quicker than {BASE}: {', '.join(quicker)}."
    left_out = [f"{row['contestant']} ({row['status']})" for row in rows if row["status"] != "ok"]
    if left_out:
        yield f"Not timed: {'; '.join(left_out)}."


def graph_table(rows: list[Row]) -> Table | None:
    """What it took to build each graph, or ``None`` if none was built."""
    built = [row for row in rows if row["what"] == "graph"]
    if not built:
        return None
    directions = list(dict.fromkeys(row["direction"] for row in built))
    body = [
        [
            f"{graph}, {_allocator(allocator).lower()}, {_threads(threads)}",
            *(_cell(_value(part, "Graph", direction, "median_s"), 1e3) for direction in directions),
        ]
        for (graph, allocator, threads), part in grouped(
            built, ("graph", "allocator", "threads")
        ).items()
    ]
    title = "ms to build the graph, from unsorted edges or edges sorted by target"
    return Table(title, ["graph", *directions], body, [])


def sweep_table(rows: list[Row]) -> Table | None:
    """Time of forward and backward at each point of a sweep, or ``None`` if there was none."""
    rows = [row for row in rows if row["sweep"] != ""]
    if not rows:
        return None
    contestants = _timed(rows)
    point = ("sweep", "num_nodes", "num_edges", "head_dim", "allocator", "threads")
    body = [
        [
            axis,
            *(f"{number:,}" for number in (nodes, edges, head_dim)),
            f"{_allocator(allocator).lower()}, {_threads(threads)}",
            *(_cell(_value(part, name, BOTH, "median_s"), 1e3) for name in contestants),
        ]
        for (axis, nodes, edges, head_dim, allocator, threads), part in grouped(rows, point).items()
    ]
    header = ["growing", "nodes", "edges", "channels", "setting", *contestants]
    return Table(f"{BOTH}, ms", header, sorted(body, key=lambda line: line[0]), [])


def _cell(value: float | None, factor: float = 1.0) -> str:
    """Three digits, and no exponent."""
    if value is None:
        return "-"
    value *= factor
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


# Figures ##########################################################################################


def draw_case(title: str, rows: list[Row], path: Path) -> None:
    """Medians with their range, one panel for each direction, on a logarithmic axis."""
    plt, contestants = _pyplot(), _timed(rows)[::-1]
    figure, panels = plt.subplots(
        1, 2, figsize=(9, 1.3 + 0.3 * len(contestants)), sharey=True, layout="constrained"
    )
    for panel, direction in zip(panels, ("forward", BOTH), strict=True):
        panel.set(xscale="log", xlabel="ms", title=direction)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(axis="x", which="both", alpha=0.25)
        for color, ((allocator,), part) in enumerate(grouped(rows, ("allocator",)).items()):
            for place, name in enumerate(contestants):
                low, middle, high = (
                    _value(part, name, direction, f"{which}_s")
                    for which in ("min", "median", "max")
                )
                if low is None or middle is None or high is None:
                    continue
                style = {"color": f"C{color}", "linewidth": 1.5, "markersize": 5}
                at = place + 0.12 - 0.24 * color
                panel.plot([low * 1e3, high * 1e3], [at, at], **style)
                panel.plot(middle * 1e3, at, "o", **style)
            limit = _value(part, BASE, direction, "limit_s")
            if limit is not None:
                panel.axvline(limit * 1e3, color=f"C{color}", linestyle="--", linewidth=1)
                panel.set_xlabel("ms; dashed: no-reuse limit")
            panel.plot([], [], "o-", color=f"C{color}", label=_allocator(allocator).lower())
    panels[0].set_yticks(range(len(contestants)), contestants)
    panels[0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    _save(figure, path)


def draw_sweep(rows: list[Row], path: Path) -> None:
    """Time and peak memory of forward and backward along each axis, for the first setting."""
    plt = _pyplot()
    rows = [row for row in rows if row["sweep"] != ""]
    setting, rows = next(iter(grouped(rows, ("allocator", "threads")).items()))
    axes, contestants = grouped(rows, ("sweep",)), _timed(rows)
    figure, panels = plt.subplots(
        2, len(axes), figsize=(3 * len(axes), 5.5), squeeze=False, layout="constrained"
    )
    for column, ((axis,), part) in enumerate(axes.items()):
        for panel, what, factor in zip(
            panels[:, column], ("median_s", "peak_bytes"), (1e3, 2**-20), strict=True
        ):
            for color, name in enumerate(contestants):
                points = sorted(
                    (_place(row, axis), row[what] * factor)
                    for row in part
                    if (row["contestant"], row["direction"]) == (name, BOTH) and row[what]
                )
                if points:
                    panel.plot(*zip(*points, strict=True), "o-", color=f"C{color}", label=name)
            places = sorted({_place(row, axis) for row in part})
            panel.set(xscale="log", yscale="log", xlabel=axis)
            panel.set_xticks(places, [f"{place:,.0f}" for place in places], fontsize="small")
            panel.xaxis.set_minor_locator(plt.NullLocator())
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(plt.NullFormatter())
            panel.grid(which="both", alpha=0.25)
    panels[0][0].set_ylabel(f"{BOTH}, ms")
    panels[1][0].set_ylabel("peak memory, MiB")
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{_allocator(setting[0])}, {_threads(setting[1])}", fontsize="medium")
    _save(figure, path)


def _place(row: Row, axis: str) -> float:
    """Where a row stands on an axis of the sweep."""
    if axis == "channels a head":
        return row["head_dim"]
    if axis == "edges a node":
        return row["num_edges"] / row["num_nodes"]
    return row["num_nodes" if axis.startswith("nodes") else "num_edges"]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # The same rows give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "graphattn"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)


def draw(rows: list[Row], folder: Path, stem: str) -> dict[str, Path]:
    """Figures of all cases and of the sweep into ``folder``; their paths by title."""
    paths = {}
    for title, case, _ in case_tables(rows):
        if _timed(case):
            paths[title] = folder / f"{stem}-{_slug(title)}.svg"
            draw_case(title, case, paths[title])
    if any(row["sweep"] != "" for row in rows):
        paths[SWEEP] = folder / f"{stem}-sweep.svg"
        draw_sweep(rows, paths[SWEEP])
    return paths


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


# The page #########################################################################################

SWEEP = "Along edges, nodes, degree and channels"


def section(rows: list[Row], stem: str, figures: dict[str, str]) -> str:
    """Markdown of one file of results; ``figures`` holds links by title."""
    first = rows[0]
    versions = {
        f"torch {first['torch']}",
        f"torch-geometric {first['torch_geometric']}",
        f"Python {first['python']}",
        *(row["version"] for row in rows if row["version"]),
    }
    versions.remove(f"graphattn {first['graphattn']}")
    machine = (
        f"{first['cpu']}, {first['cores']} cores ({first['caches']}), "
        f"{first['memory_bytes'] / 2**30:.0f} GiB, {first['kernel']}; device {first['device']}; "
        f"{first['date']}. graphattn {first['graphattn']} at commit {first['commit']}, "
        f"{', '.join(sorted(versions))}."
    )
    lines = [f"## Results: {stem}", "", machine, ""]
    for title, _, tables in case_tables(rows):
        lines += [f"### {title[0].upper()}{title[1:]}", ""]
        lines += [table.markdown() for table in tables]
        if title in figures:
            lines += [f"![{title}: time of each contestant]({figures[title]})", ""]
    for title, table in (
        (SWEEP, sweep_table(rows)),
        ("Building the graph, once for all layers and steps", graph_table(rows)),
    ):
        if table is not None:
            lines += [f"### {title}", "", table.markdown()]
        if title in figures:
            lines += [f"![Time and peak memory along each axis]({figures[title]})", ""]
    return "\n".join(lines)


def write_page(page: Path, results: list[Path]) -> None:
    """Puts the sections of ``results`` between the markers of ``page``, and figures beside it.

    Raises:
        ValueError: The page does not have both markers, in order.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END}.")
    folder = page.parent / "figures" / "benchmarks"
    sections, drawn = [], set()
    for path in results:
        rows = read_rows(path)
        figures = draw(rows, folder, path.stem)
        drawn |= set(figures.values())
        links = {
            title: figure.relative_to(page.parent).as_posix() for title, figure in figures.items()
        }
        sections.append(section(rows, path.stem, links))
    for old in set(folder.glob("*.svg")) - drawn:
        old.unlink()
    part = page.with_suffix(".part")
    part.write_text("\n\n".join([before + BEGIN, *sections, END + after]))
    os.replace(part, page)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of CSV files"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the two markers")
    args = parser.parse_args(argv)
    results = sorted(args.results.glob("*.csv"))
    try:
        write_page(args.page, results)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"Written: {args.page}, from {len(results)} file(s) of results")


if __name__ == "__main__":
    main()
