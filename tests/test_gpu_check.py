"""The script for GPUs, tried on CPU: what it checks and times, and what it leaves behind."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
# None of the rest means anything where the kernels are interpreted.
NEEDS_CUDA = {"cuda graph", "cuda graph dropout", "no synchronisation"}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def check(script):
    return script("gpu_check")


@pytest.fixture(scope="module")
def whole_run(check, tmp_path_factory):
    """Exit status and folder of a run of everything."""
    folder = tmp_path_factory.mktemp("run")
    return run(check, folder), folder


def run(check, folder, arguments=""):
    return check.main(["--quick", "--device", "cpu", "--out", str(folder), *arguments.split()])


def rows_of(folder):
    return json.loads((folder / "gpu_check.json").read_text())


def only(monkeypatch, check, *names):
    """Leaves no more than these jobs."""
    jobs = check.jobs
    monkeypatch.setattr(
        check, "jobs", lambda *options: {name: jobs(*options).get(name) for name in names}
    )


# A whole run ######################################################################################


def test_a_run_checks_and_times_and_leaves_rows_of_all_columns(check, whole_run):
    status, folder = whole_run
    rows = rows_of(folder)
    assert status == 0
    with (folder / "gpu_check.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames) == check.COLUMNS
        as_csv = list(reader)
    assert [tuple(row) for row in rows] == [check.COLUMNS] * len(rows)
    texts = [{name: "" if x is None else str(x) for name, x in row.items()} for row in rows]
    assert as_csv == texts
    for row in rows:
        assert row["device"] == "cpu, interpreter"
        for name in ("commit", "date", "torch", "triton", "torch_geometric", "graphattn"):
            assert row[name], name
        needs_cuda = row["part"] == "checks" and row["what"] in NEEDS_CUDA
        assert row["status"] == ("skipped: needs cuda" if needs_cuda else "ok"), row
        assert row["seconds"] >= 0
    assert list(dict.fromkeys(row["part"] for row in rows)) == [
        *("checks", "bandwidth", "speed", "training", "rivals")
    ]
    assert {row["what"] for row in rows} >= NEEDS_CUDA


def test_every_graph_of_the_quick_zoo_is_checked_in_two_dtypes(whole_run):
    checked = [row for row in rows_of(whole_run[1]) if row["part"] == "checks" and row["graph"]]
    assert {(row["graph"], row["dtype"]) for row in checked} == set(
        itertools.product(
            ("no edges", "one edge, isolated nodes", "parallel edges"), ("float32", "bfloat16")
        )
    )


def test_times_limits_and_ratios_hold_together(whole_run):
    rows = [row for row in rows_of(whole_run[1]) if row["what"] == "operator"]
    assert {(row["part"], row["graph"], row["contestant"], row["direction"]) for row in rows} == {
        (part, graph, contestant, direction)
        for part, graph, contestants in (
            ("speed", "tiny", ["graphattn-triton"]),
            ("rivals", "tiny", ["graphattn-triton", "pyg"]),
            ("rivals", "synthetic-random", ["graphattn-triton", "sdpa"]),
        )
        for contestant in contestants
        for direction in ("forward", "backward")
    }
    for row in rows:
        assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"] < 60_000
        assert row["limit_ms"] == pytest.approx(row["limit_bytes"] / row["copy_bytes_per_s"] * 1e3)
        assert row["limit_ratio"] == pytest.approx(row["ms"] / row["limit_ms"])
        (base,) = (
            other
            for other in rows
            if other["contestant"] == "graphattn-triton"
            and all(other[name] == row[name] for name in ("part", "graph", "direction"))
        )
        assert row["ratio"] == pytest.approx(row["ms"] / base["ms"])
        if row["graph"] == "tiny":  # 2 heads of 4 channels, 4 bytes each
            assert (row["num_nodes"], row["num_edges"]) == (12, 36)
            forward = 2 * 12 * 32 + 4 * 12 * 2 + 4 * 36 + 8 * 13 + 2 * 36 * 32
            backward = 8 * 12 * 32 + 8 * 12 * 2 + 2 * (4 * 36 + 8 * 12) + 4 * 36 * 32 + 8 * 36 * 2
            limit = {"forward": forward, "backward": backward}
            assert row["limit_bytes"] == limit[row["direction"]]
    built = {row["direction"] for row in rows_of(whole_run[1]) if row["what"] == "graph"}
    assert "unsorted, both sides" in built


def test_the_table_says_what_matters_in_few_lines(check, whole_run):
    lines = check.table(rows_of(whole_run[1]))
    text = "\n".join(lines)
    assert len(lines) < 40
    assert lines[0].startswith("cpu, interpreter, driver -, commit ")
    assert "checks: 14 ok, 3 skipped" in lines
    assert "TB/s" in text
    assert "s a step, peak memory unknown" in text
    (line,) = (line for line in lines if line.startswith("tiny  "))
    assert line.split()[1:5] == ["2", "x", "4", "float32"]
    head = next(line for line in lines if line.startswith("graph  "))
    assert head.split("  ")[-1] == "pyg / triton"


# Whatever goes wrong ##############################################################################


def test_a_wrong_result_fails_the_run_and_leaves_the_other_rows(
    check, monkeypatch, tmp_path, capsys
):
    kernels = importlib.import_module("graphattn.backends.triton")
    attention = kernels.attention

    def one_percent_more(*arguments):
        out, *rest = attention(*arguments)
        return out * 1.01, *rest

    monkeypatch.setattr(kernels, "attention", one_percent_more)
    only(monkeypatch, check, "dropout mask", "4 of 2 keys x 5, all, float32")
    assert run(check, tmp_path, "--parts bandwidth,checks") == 1
    rows = rows_of(tmp_path)
    mask, *calls, copy = rows
    assert (mask["what"], mask["status"]) == ("dropout mask", "ok")
    assert [row["graph"] for row in calls] == [
        *("no edges", "one edge, isolated nodes", "parallel edges")
    ]
    assert [row["status"].partition(" error")[0] for row in calls] == [
        *("ok", *["failed: AssertionError: output:"] * 2)
    ]
    assert copy["copy_bytes_per_s"] > 0
    assert (
        "checks, 4 of 2 keys x 5, all, parallel edges, float32: failed: Asser"
        in capsys.readouterr().out
    )


def test_a_part_that_raises_leaves_what_it_had_and_the_others(check, monkeypatch, tmp_path):
    def breaks(args, until):
        yield {"what": "first", "status": "ok"}
        raise RuntimeError("no more\nof this")

    monkeypatch.setitem(check.PARTS, "bandwidth", (0.1, breaks))
    only(monkeypatch, check, "cuda graph")
    assert run(check, tmp_path, "--parts checks,bandwidth") == 1
    assert [row["status"] for row in rows_of(tmp_path)] == [
        "skipped: needs cuda",
        "ok",
        "failed: RuntimeError: no more of this",
    ]


def test_a_rival_is_timed_where_the_kernels_fail(check, monkeypatch, tmp_path, capsys):
    def fails(case, names, seconds):
        rival = {"contestant": names[-1], "ms": 1.0, "limit_ratio": 2.0, "direction": "forward"}
        status = "failed: cannot run: InterpreterError"
        return [{"contestant": names[0], "direction": "all", "status": status}, rival]

    monkeypatch.setattr(check, "measured", fails)
    assert run(check, tmp_path, "--parts rivals") == 1
    assert "tiny              2 x 4  float32  -                   -" in capsys.readouterr().out


def test_a_wrong_rival_is_reported_and_fails_nothing(check, monkeypatch, tmp_path):
    def wrong(case, names, seconds):
        assert names[0] == check.TRITON
        return [{"contestant": names[-1], "direction": "all", "status": "wrong: output: error 1"}]

    monkeypatch.setattr(check, "measured", wrong)
    assert run(check, tmp_path, "--parts rivals") == 0
    assert [row["status"] for row in rows_of(tmp_path)] == ["wrong: output: error 1"] * 2


def test_wrong_kernels_are_not_timed(check, script, monkeypatch):
    contest = script("contest")
    refused = [{"contestant": check.TRITON, "direction": "all", "status": "wrong: output"}]
    monkeypatch.setattr(contest, "checked", lambda *arguments: ([], refused))
    case = script("cases").Case("g", torch.tensor([[0], [1]]), 2, 2, 4)
    (row,) = check.measured(case, [check.TRITON], 0)
    assert row["status"] == "failed: wrong: output"
    assert "ms" not in row


def test_parts_without_time_are_reported_as_skipped(check, tmp_path):
    assert run(check, tmp_path, "--seconds 0 --tune") == 0
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows} == {"skipped: time"}
    assert {row["part"] for row in rows} == set(check.PARTS)
    assert {row["graph"] for row in rows if row["part"] == "rivals"} == {"tiny", "synthetic-random"}


def test_jobs_run_in_processes_of_their_own(check, monkeypatch, tmp_path):
    only(monkeypatch, check, "cuda graph", "nowhere")
    assert run(check, tmp_path, "--parts checks --workers 2") == 1
    skipped, failed = rows_of(tmp_path)
    assert (skipped["what"], skipped["status"]) == ("cuda graph", "skipped: needs cuda")
    assert failed["what"] == "nowhere"
    assert failed["status"].startswith("failed: exit status 1: ")
    assert "KeyError: 'nowhere'" in failed["status"]
    assert run(check, tmp_path, "--parts checks --workers 2 --seconds 0") == 0
    assert {row["status"] for row in rows_of(tmp_path)} == {"skipped: time"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--device nowhere", "--device nowhere is not a device torch knows"),
        ("--device cpu --parts speed,none", "--parts: unknown none; there are checks, bandwidth,"),
        ("--device cpu --graph no/such.npz", "--graph no/such.npz: FileNotFoundError:"),
        ("--device cpu --graph {file}", "damaged.npz: ValueError:"),
        ("--device cpu --graph {bare}", "bare.npz: ValueError: it has no edges to attend along"),
    ],
)
def test_options_are_checked_before_anything_runs(check, capsys, tmp_path, arguments, text):
    file, bare = tmp_path / "damaged.npz", tmp_path / "bare.npz"
    file.write_text("nothing")
    np.savez(bare, edge_index=np.zeros((2, 0), dtype=np.int64), num_nodes=np.array(3))
    with pytest.raises(SystemExit):
        check.main(arguments.format(file=file, bare=bare).split())
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_without_the_interpreter_it_says_what_to_do(check, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        check.main([])
    assert "--device cuda: no CUDA device is available" in capsys.readouterr().err
    monkeypatch.setattr(importlib.import_module("graphattn.backends"), "_INTERPRETED", False)
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu"])
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err


# Graphs and the rest ##############################################################################


def test_generated_graphs_have_the_size_and_the_largest_degree(script):
    skewed = script("cases").skewed
    edge_index = skewed(2000, 40_000, 800)
    src, dst = edge_index
    assert edge_index.shape == (2, 40_000)
    out_degree, in_degree = (side.bincount(minlength=2000) for side in edge_index)
    assert torch.equal(out_degree, in_degree)
    assert 700 < int(in_degree.max()) < 900
    assert int(in_degree.median()) < 16 < float(in_degree.float().mean())
    code = src * 2000 + dst
    assert (code.diff() >= 0).all()  # sorted by source
    assert torch.equal(code, (dst * 2000 + src).sort().values)  # every edge both ways
    assert code.unique().numel() > 0.9 * 40_000
    assert torch.equal(skewed(2000, 40_000, 800), edge_index)


@pytest.mark.parametrize(("edges", "largest"), [(7, 3), (40, 4), (40, 40)])
def test_generated_graphs_refuse_what_cannot_be(script, edges, largest):
    with pytest.raises(ValueError, match=f"nodes=10, edges={edges}, largest={largest}"):
        script("cases").skewed(10, edges, largest)


def test_sizes_are_those_of_the_real_graphs(check):
    for nodes, edges, largest in check.SIZES.values():
        assert edges % 2 == 0
        exponent = math.log(nodes) / math.log(edges / largest)
        assert 1 < exponent < 2.5


def test_a_real_graph_takes_the_place_of_the_first(check, tmp_path):
    edges = np.array([[0, 1], [1, 2]], dtype=np.int32)
    np.savez(tmp_path / "path.npz", edge_index=edges, y=np.zeros(4))
    args = check.options(["--device", "cpu", "--graph", str(tmp_path / "path.npz")])
    graphs = check.graphs(args)
    assert list(graphs) == ["path", *list(check.SIZES)[1:]]
    edge_index, nodes = graphs["path"]()
    assert nodes == 4
    assert edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]


def test_the_full_list_of_checks(check, script):
    checks = script("kernel_checks")
    jobs = check.jobs(False, torch.device("cpu"))
    calls = checks.CALLS.values()
    assert {call["heads"] for call in calls} >= {1, 3, 8}
    assert {call["dim"] for call in calls} == {1, 5, 20, 32, 64, 128, 256}
    names = {labels["graph"] for labels, _ in jobs["8 x 32, float16"]}
    assert names >= {case.name for case in checks.zoo()}
    assert names >= {"targets around a cut", "sources around a cut", "light rows"}


def test_constants_are_tried_one_at_a_time_and_put_back(check, monkeypatch, tmp_path, capsys):
    kernels = importlib.import_module("graphattn.backends.triton")
    names = ("TILE_NUMBERS", "TILE_CHANNELS", "CHUNK")
    before, seen = [getattr(kernels, name) for name in names], []

    def measured(case, contestants, seconds):
        seen.append([getattr(kernels, name) for name in names])
        row = {"contestant": check.TRITON, "status": "ok", "ms": 1.0}
        return [{**row, "direction": direction} for direction in ("forward", "backward")]

    monkeypatch.setattr(check, "measured", measured)
    monkeypatch.setitem(check.TUNED, "NONE", (1,))
    assert run(check, tmp_path, "--parts tuning") == 0
    assert seen == [[512, *before[1:]], [before[0], 64, before[2]], [*before[:2], 128]]
    assert [getattr(kernels, name) for name in names] == before
    assert rows_of(tmp_path)[-1]["status"] == "skipped: the kernels have no constant NONE"
    assert "CHUNK = 128         1.000 / 1.000" in capsys.readouterr().out


def test_the_commit_is_read_without_git(check, script, monkeypatch, tmp_path):
    monkeypatch.setattr(check.experiment, "commit", lambda: "unknown")
    assert check.commit(tmp_path) == "unknown"
    git = tmp_path / ".git"
    (git / "refs").mkdir(parents=True)
    (git / "HEAD").write_text("0123456789\n")
    assert check.commit(tmp_path) == "0123456"
    (git / "HEAD").write_text("ref: refs/main\n")
    (git / "packed-refs").write_text("# pack-refs\nabcdef0123 refs/other\n1234567890 refs/main\n")
    assert check.commit(tmp_path) == "1234567"
    (git / "refs" / "main").write_text("fedcba9876\n")
    assert check.commit(tmp_path) == "fedcba9"
