"""The benchmarks: nothing wrong is timed, the arithmetic is right, the page is written whole."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import graphattn
from graphattn import graph_attention

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
# Nothing that is compiled: that takes seconds.
RIVALS = "graphattn,graphattn-eager,pyg,torch-scatter,dgl,torch-sparse,sdpa"
TINY = "--nodes 60 --degree 4 --shape 2x4 --repeats 2 --threads 1 --allocator default"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def results(script, tmp_path_factory):
    """The CSV file of one tiny run of everything."""
    folder = tmp_path_factory.mktemp("results")
    script("attention").main(
        (
            f"--quick --graph synthetic-random --what both --rivals {RIVALS} {TINY} "
            f"--csv {folder / 'tiny.csv'} --figures {folder}"
        ).split()
    )
    return folder / "tiny.csv"


def make_case(script, *, graph="synthetic-random", nodes=60, degree=4, dtype=torch.float32, **more):
    cases = script("cases")
    return cases.Case(*cases.load_graph(graph, nodes=nodes, degree=degree), 2, 4, dtype, **more)


def attend(script, function, case, monkeypatch):
    """Adds a contestant ``mine`` that calls ``function(query, key, value, edge_index)``."""
    rivals = script("rivals")

    def make(name, case, inputs):
        return rivals.Contestant(
            name, "mine 1", lambda: function(*inputs.values(), case.edge_index), inputs
        )

    monkeypatch.setitem(rivals.OPERATORS, "mine", make)


# One run ##########################################################################################


def test_a_run_writes_rows_that_hold_together(script, results):
    report = script("report")
    with results.open(newline="") as file:
        assert tuple(csv.DictReader(file).fieldnames) == report.COLUMNS
    rows = report.read_rows(results)
    for name in ("date", "commit", "torch", "cpu", "kernel", "allocator"):
        assert all(row[name] for row in rows)
    assert {row["num_edges"] for row in rows} == {240}
    assert {row["contestant"] for row in rows if row["what"] == "operator"} == set(
        RIVALS.split(",")
    )
    assert {row["contestant"] for row in rows if row["what"] == "layer"} == {
        "graphattn",
        "graphattn-eager",
        "pyg",
    }
    for row in rows:
        if row["status"] != "ok":
            assert row["status"].startswith("not ")
            assert row["contestant"] in ("dgl", "torch-scatter")
            assert row["median_s"] is None
            continue
        assert row["n"] == 2
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"] < 60
        if row["what"] == "graph":
            continue
        ns = row["median_s"] * 1e9 / (240 * 2)
        assert row["ns_per_edge_and_head"] == pytest.approx(ns)
        assert row["copy_bytes_per_s_min"] <= row["copy_bytes_per_s"]
        if row["contestant"] == "graphattn":
            assert row["ratio"] == 1
        if row["what"] == "operator":
            assert row["limit_ratio"] == pytest.approx(row["median_s"] / row["limit_s"])
        else:
            assert row["limit_s"] is None
    by_direction = [
        (row["contestant"], row["direction"]) for row in rows if row["what"] == "operator"
    ]
    assert ("torch-sparse", "forward") in by_direction
    assert ("torch-sparse", "backward") not in by_direction
    assert {direction for name, direction in by_direction if name == "pyg"} == {
        "forward",
        "backward",
        "forward+backward",
    }
    built = {row["direction"] for row in rows if row["what"] == "graph"}
    assert built == {
        f"{given}, {asked}"
        for given in ("unsorted", "sorted")
        for asked in ("by target", "both sides")
    }
    assert len(list(results.parent.glob("tiny-synthetic-random-*.svg"))) == 2


def test_a_sweep_goes_along_four_axes(script, tmp_path, capsys):
    rows = script("attention").main(
        (
            "--sweep --nodes 160 --degree 4 --shape 1x4 --repeats 1 --rivals graphattn "
            f"--allocator default --csv {tmp_path / 's.csv'} --figures {tmp_path}"
        ).split()
    )
    both = [row for row in rows if row["direction"] == "forward+backward"]
    axes = {
        axis: [row for row in both if row["sweep"] == axis] for axis in {r["sweep"] for r in both}
    }
    assert [row["num_edges"] for row in axes["edges"]] == [160, 320, 640, 1280, 2560]
    assert {row["num_edges"] for row in axes["nodes, same edges"]} == {640}
    assert [row["num_nodes"] for row in axes["nodes, same edges"]] == [40, 80, 160, 320, 640]
    assert [row["num_edges"] for row in axes["edges a node"]] == [160, 320, 640, 1280, 2560]
    assert {row["num_nodes"] for row in axes["edges a node"]} == {160}
    assert [row["head_dim"] for row in axes["channels a head"]] == [1, 2, 4, 8, 16]
    assert "nodes, same edges" in capsys.readouterr().out
    assert (tmp_path / "s-sweep.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--shape 8", "must be HEADSxCHANNELS, such as 8x32, got 8"),
        ("--rivals graphattn,none", "unknown contestant none; one of graphattn,"),
        ("--dtype int8", "unknown dtype int8; one of float32,"),
        ("--threads 1,0", "must be an integer of at least 1, got 0"),
        ("--device nowhere", "--device nowhere is not a device torch knows"),
        ("--graph nowhere", "unknown data set 'nowhere'"),
        ("--nodes 20 --degree 10", "degree must be below half of nodes 20, got 10"),
    ],
)
def test_options_are_checked_before_anything_runs(script, capsys, arguments, text):
    with pytest.raises(SystemExit):
        script("attention").main(arguments.split())
    assert text in capsys.readouterr().err


# Right first ######################################################################################


def right(query, key, value, edge_index):
    return graph_attention(query, key, value, edge_index)


def unscaled(query, key, value, edge_index):
    return graph_attention(query, key, value, edge_index, scale=1.0)


def turned(query, key, value, edge_index):
    return graph_attention(query, key, value, edge_index.flip(0))


def nearly(query, key, value, edge_index):
    return right(query, key, value, edge_index) * 1.0001


def doubled_gradient(query, key, value, edge_index):
    return right(query, 2 * key - key.detach(), value, edge_index)


def leaking(query, key, value, edge_index):
    return right(query, key, value, edge_index) + (key.sum() - key.sum().detach())


def not_finite(query, key, value, edge_index):
    return right(query, key, value, edge_index) / 0.0


def other_dtype(query, key, value, edge_index):
    return right(query, key, value, edge_index).double()


def raising(query, key, value, edge_index):
    raise RuntimeError("no kernel for this\nand more")


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (unscaled, "wrong: output: error"),
        (turned, "wrong: output: error"),
        (nearly, "wrong: output: error"),
        (doubled_gradient, "wrong: gradients of query, key, value: error"),
        (not_finite, "wrong: output: not finite"),
        (other_dtype, "wrong: output: torch.float64 of shape (60, 2, 4), expected torch.float32"),
        (raising, "cannot run: RuntimeError: no kernel for this"),
    ],
)
def test_a_wrong_contestant_is_refused_and_not_timed(script, monkeypatch, function, status):
    case, timed = make_case(script), []
    attend(script, function, case, monkeypatch)
    measure = script("measure")
    once = measure.time_once

    def recorded(contestant, cotangent):
        timed.append(contestant.name)
        return once(contestant, cotangent)

    monkeypatch.setattr(measure, "time_once", recorded)
    copy = measure.CopyBandwidth(torch.device("cpu"), 2**20)
    rows = script("contest").run_case(case, ["graphattn", "mine"], 1, copy)
    assert timed == ["graphattn"]
    (row,) = (row for row in rows if row["contestant"] == "mine")
    assert row["status"].startswith(status)
    assert "median_s" not in row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("graph", ["synthetic-star", "synthetic-star-out", "synthetic-powerlaw"])
def test_a_right_contestant_passes(script, monkeypatch, graph, dtype):
    case = make_case(script, graph=graph, nodes=600, dtype=dtype)
    attend(script, right, case, monkeypatch)
    inputs = case.inputs()
    reference = script("check").Reference(case, inputs)
    reference.check(script("rivals").prepare("mine", case, inputs))


def test_gradients_must_not_flow_from_where_there_are_none(script, monkeypatch):
    check, case = script("check"), make_case(script, graph="synthetic-star", nodes=600)
    attend(script, leaking, case, monkeypatch)
    inputs = case.inputs()
    reference = check.Reference(case, inputs, budget=500)  # without the hub: without an edge
    with pytest.raises(check.Wrong, match="gradient of key: not zero where nothing flows from"):
        reference.check(script("rivals").prepare("mine", case, inputs))


def test_the_layer_is_checked_too(script):
    case = make_case(script, what="layer")
    inputs = case.inputs()
    reference = script("check").Reference(case, inputs)
    contestant = script("rivals").prepare("pyg", case, inputs)
    reference.check(contestant)
    with torch.no_grad():
        contestant.leaves["lin_skip.bias"][0] += 0.1
    with pytest.raises(script("check").Wrong, match=r"output: error 0\.1"):
        reference.check(contestant)


def test_the_sample_has_the_hub_unless_it_is_beyond_the_budget(script):
    case = make_case(script, graph="synthetic-star", nodes=500)
    reference = script("check").Reference
    assert 0 in reference(case, case.inputs(), most=8).targets
    assert reference(case, case.inputs(), most=8).targets.numel() == 8
    assert reference(case, case.inputs(), budget=3 * 499).targets.numel() == 3
    assert 0 not in reference(case, case.inputs(), budget=400).targets


def test_graphattn_being_wrong_is_an_error(script, monkeypatch, tmp_path):
    rivals = script("rivals")
    attend(script, unscaled, make_case(script), monkeypatch)
    monkeypatch.setitem(rivals.OPERATORS, "graphattn", rivals.OPERATORS["mine"])
    arguments = f"--graph synthetic-random --rivals graphattn {TINY} --figures {tmp_path}"
    with pytest.raises(SystemExit, match="error: graphattn on synthetic-random: wrong: output"):
        script("attention").main([*arguments.split(), "--csv", str(tmp_path / "wrong.csv")])
    (row,) = (r for r in script("report").read_rows(tmp_path / "wrong.csv") if r["what"] != "graph")
    assert row["median_s"] is None


def test_cases_that_are_too_large_are_left_out_with_the_size(script, monkeypatch):
    rivals = script("rivals")
    large = make_case(script, nodes=20_000, degree=1)
    for name in ("sdpa", "flex"):
        with pytest.raises(
            rivals.LeftOut,
            match=r"too large: the mask of 20,000 x 20,000 pairs takes 1\.86 GiB, and the limit",
        ):
            rivals.prepare(name, large, large.inputs())
    monkeypatch.setattr(rivals, "free_memory", lambda device: 2**20)
    with pytest.raises(rivals.LeftOut, match=r"too large: needs about 0\.0 GiB, and 0\.0 GiB"):
        rivals.prepare("pyg", large, large.inputs())


# Arithmetic #######################################################################################


def test_bytes_of_the_limit(script):
    moved = script("measure").limit_bytes(3, 5, 2, 4, 4)
    forward = 2 * 3 * 8 * 4 + 4 * 3 * 2 + 4 * 5 + 8 * 4 + 2 * 5 * 8 * 4
    backward = 8 * 3 * 8 * 4 + 8 * 3 * 2 + 2 * (4 * 5 + 8 * 3) + 4 * 5 * 8 * 4 + 8 * 5 * 2
    assert (forward, backward) == (588, 1624)
    assert moved == {"forward": 588, "backward": 1624, "forward+backward": 2212}
    # ogbn-arxiv made undirected, 8 x 32, at 4.3 TB/s
    arxiv = script("measure").limit_bytes(169_343, 2_315_598, 8, 32, 4)
    assert arxiv["forward"] / 4.3e12 == pytest.approx(1.19e-3, rel=0.01)
    assert arxiv["backward"] / 4.3e12 == pytest.approx(2.57e-3, rel=0.01)


def test_ratios_of_a_row(script):
    case = make_case(script)
    seconds = {
        "graphattn": {"forward": [1.0, 2.0, 30.0]},
        "other": {"forward": [9.0, 5.0, 1.0]},
    }
    row = script("contest").timing_row(
        case, "other", "forward", seconds["other"]["forward"], seconds, [3e9, 1e9, 2e9]
    )
    assert (row["n"], row["min_s"], row["median_s"], row["max_s"]) == (3, 1.0, 5.0, 9.0)
    assert row["ratio"] == 2.5
    assert row["ns_per_edge_and_head"] == 5e9 / (240 * 2)
    moved = script("measure").limit_bytes(60, 240, 2, 4, 4)["forward"]
    assert row["limit_s"] == moved / 2e9
    assert row["limit_ratio"] == 5.0 / (moved / 2e9)
    alone = script("contest").timing_row(case, "other", "forward", [1.0], {}, [1e9])
    assert alone["ratio"] is None


def test_contestants_take_turns_and_each_round_starts_with_another(script, monkeypatch):
    measure, calls = script("measure"), []
    monkeypatch.setattr(
        measure, "time_once", lambda c, cotangent: calls.append(c.name) or {"forward": 1.0}
    )
    contestants = [script("rivals").Contestant(name, "", None, {}) for name in "abc"]
    seconds = measure.interleaved(contestants, None, 2, between=lambda: calls.append("-"))
    assert "".join(calls) == "-abc-bca"
    assert seconds["b"]["forward"] == [1.0, 1.0]


def test_warm_pages_are_asked_of_glibc_once_for_all(script, monkeypatch):
    measure = script("measure")
    monkeypatch.setattr(measure, "_warm", False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert measure.allocator_of_process() == "default"
    monkeypatch.setattr(graphattn, "keep_pages", lambda: True)
    measure.keep_pages()
    assert measure.allocator_of_process() == "warm"
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert measure.allocator_of_process() == "jemalloc"
    monkeypatch.setattr(graphattn, "keep_pages", lambda: False)
    with pytest.raises(OSError, match="need the allocator of glibc"):
        measure.keep_pages()


@pytest.mark.parametrize("order", ["rcm", "metis"])
def test_reordering_gives_the_same_graph_with_near_neighbours(script, order):
    cases = script("cases")
    ring = torch.randperm(6000)
    plain = torch.stack([ring, ring.roll(1)])
    nodes = cases.ORDERS[order](plain, 6000)
    assert nodes.sort().values.equal(torch.arange(6000))
    rank = nodes.argsort()
    assert (rank[plain[0]] - rank[plain[1]]).abs().median() < 1000

    size = {"nodes": 200, "degree": 2}
    name, plain, _ = cases.load_graph("synthetic-powerlaw", **size)
    again, moved, nodes = cases.load_graph("synthetic-powerlaw", **size, reorder=order)
    assert (again, nodes) == (f"{name} ({order} order)", 200)
    degrees = [
        sorted(torch.stack([end.bincount(minlength=200) for end in e]).t().tolist())
        for e in (plain, moved)
    ]
    assert degrees[0] == degrees[1]


def test_an_order_that_needs_a_missing_package_says_so(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(SystemExit):
        script("attention").options(["--graph", "synthetic-star", "--reorder", "metis"])
    assert "the metis order needs pymetis (pip install pymetis)" in capsys.readouterr().err


# Graphs ###########################################################################################


def test_the_window_is_a_sequence_in_its_own_order(script):
    _, edge_index, nodes = script("cases").load_graph("synthetic-window", nodes=9, degree=4)
    src, dst = edge_index
    assert ((src * nodes + dst).diff() > 0).all()  # sorted by source, and none twice
    place = torch.arange(9)
    offset = place - place.unsqueeze(1)  # of key from query
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[dst, src] = True
    assert torch.equal(mask, (offset >= -1) & (offset <= 2))


@pytest.mark.parametrize("kind", ["random", "powerlaw", "regular", "star", "star-out"])
def test_generated_graphs_have_the_size_asked_for(script, kind):
    load_graph = script("cases").load_graph
    name, edge_index, nodes = load_graph(f"synthetic-{kind}", nodes=200, degree=7)
    src, dst = edge_index
    assert (name, nodes) == (f"synthetic-{kind}", 200)
    assert edge_index.shape == (2, 199 if "star" in kind else 1400)
    assert edge_index.min() >= 0
    assert edge_index.max() < 200
    assert (src != dst).all()
    code = src * 200 + dst
    assert (code.diff() > 0).all()  # sorted by source, and none twice
    out_degree, in_degree = (side.bincount(minlength=200) for side in edge_index)
    if kind == "regular":
        assert (in_degree == 7).all()
        assert (out_degree == 7).all()
    elif kind == "powerlaw":
        assert in_degree.max() > 40
        assert out_degree.max() > 40
    elif kind == "random":
        assert in_degree.max() < 25
    else:
        assert (in_degree if kind == "star" else out_degree)[0] == 199
    assert torch.equal(load_graph(f"synthetic-{kind}", nodes=200, degree=7)[1], edge_index)


def test_generated_graphs_refuse_what_cannot_be(script):
    load_graph = script("cases").load_graph
    with pytest.raises(ValueError, match="degree must be below nodes 5, got 5"):
        load_graph("synthetic-regular", nodes=5, degree=5)
    with pytest.raises(ValueError, match="degree must be below half of nodes 9, got 5"):
        load_graph("synthetic-powerlaw", nodes=9, degree=5)


def test_real_graphs_are_made_undirected(script, tmp_path):
    load_graph = script("cases").load_graph
    y = np.zeros(4, dtype=np.int64)
    np.savez(tmp_path / "path.npz", edge_index=np.array([[0, 1], [1, 2]]), y=y)
    for name in (str(tmp_path / "path.npz"), "path"):
        loaded, edge_index, nodes = load_graph(name, nodes=0, degree=0, root=tmp_path)
        assert (loaded, nodes) == ("path", 4)
        assert edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    np.savez(tmp_path / "bare.npz", edge_index=np.zeros((2, 0), dtype=np.int64), y=y)
    with pytest.raises(ValueError, match="bare has no edges to attend along"):
        load_graph("bare", nodes=0, degree=0, root=tmp_path)


# The page #########################################################################################


def test_the_page_is_written_between_its_markers_and_again_the_same(script, results, tmp_path):
    report = script("report")
    page, figures = tmp_path / "benchmarks.md", tmp_path / "figures" / "benchmarks"
    page.write_text(f"# Mine\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    figures.mkdir(parents=True)
    (figures / "stale.svg").write_text("of results that are gone")

    def written():
        return {path.name: path.read_bytes() for path in [page, *figures.iterdir()]}

    arguments = ["--results", str(results.parent), "--page", str(page)]
    report.main(arguments)
    first, text = written(), page.read_text()
    report.main(arguments)
    assert written() == first
    assert "stale.svg" not in first
    assert text.startswith(f"# Mine\n\n{report.BEGIN}\n\n## Results: tiny\n")
    assert text.endswith(f"{report.END}\n\nAfter.\n")
    assert "old" not in text
    assert "### Synthetic-random, operator, 2 x 4, float32, 1 thread" in text
    assert "**Default allocator: 60 nodes, 240 edges**" in text
    assert re.search(r"^\| graphattn \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 1 \| 1 \|", text, re.M)
    assert re.search(r"^\| torch-sparse \| [\d.]+ \| - \| - \|", text, re.M)
    for link in re.findall(r"\]\((\S+)\)", text):
        assert (tmp_path / link).read_text().startswith("<?xml")

    report.main(["--results", str(tmp_path / "none"), "--page", str(page)])
    assert page.read_text() == f"# Mine\n\n{report.BEGIN}\n\n{report.END}\n\nAfter.\n"
    assert list(figures.iterdir()) == []


def test_a_page_or_a_file_of_another_kind_is_refused(script, tmp_path):
    report, page = script("report"), tmp_path / "page.md"
    page.write_text("# No markers\n")
    with pytest.raises(SystemExit, match="expected the lines <!-- results"):
        report.main(["--results", str(tmp_path), "--page", str(page)])
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="the columns are not those of this version"):
        report.main(["--results", str(tmp_path), "--page", str(page)])


def test_losses_and_refusals_are_named_under_the_table(script):
    report = script("report")
    row = {**dict.fromkeys(report.COLUMNS), "graph": "g", "sweep": "", "what": "operator"}
    row |= {"num_nodes": 3, "num_edges": 5, "heads": 1, "head_dim": 4, "dtype": "float32"}
    row |= {"threads": 1, "allocator": "warm", "direction": "forward", "status": "ok"}
    rows = [
        {**row, "contestant": "graphattn", "median_s": 0.002, "ratio": 1.0},
        {**row, "contestant": "fast", "median_s": 0.001, "ratio": 0.5},
        {**row, "contestant": "slow", "median_s": 0.25, "ratio": 125.0},
        {**row, "contestant": "bad", "direction": "all", "status": "wrong: output: error 1"},
    ]
    ((title, _, (table,)),) = report.case_tables(rows)
    assert title == "g, operator, 1 x 4, float32, 1 thread"
    assert table.title == "Warm pages: 3 nodes, 5 edges"
    assert [line[:2] for line in table.body] == [["graphattn", "2"], ["fast", "1"], ["slow", "250"]]
    assert table.notes == [
        "Quicker than graphattn: fast (forward, 0.50).",
        "Not timed: bad (wrong: output: error 1).",
    ]


def test_the_page_of_the_docs_has_both_markers(script):
    report = script("report")
    text = report.PAGE.read_text()
    assert 0 < text.index(report.BEGIN) < text.index(report.END)
