"""The examples, on tiny inputs: what they print, what they write, and that nothing is lost."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import SHARED, needs_shared
from graphattn import backends
from graphattn.data import load

BEST = "cpu" if backends.missing("cpu") is None else "eager"
EXAMPLES = Path(__file__).parent.parent / "examples"

FOUR = {f"{name}_mask": np.array([True, True, True, True]) for name in ("train", "val", "test")}
TINY = ("--hidden", "8", "--layers", "2", "--heads", "2")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def history(path: Path) -> list:
    return json.loads(path.read_text())["history"]


def test_ogbn_arxiv_speaks_as_ogbs_logger_does(script, tmp_path, capsys):
    result = script("ogbn_arxiv").main(
        [
            *(
                f"--dataset synthetic-arxiv-400 --runs 2 --epochs 3 --out {tmp_path} --heads 2"
            ).split(),
            *TINY,
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("Run: 01, Epoch: 01, Loss: ")
        and "%, Valid: " in line
        and "% Test: " in line
        for line in lines
    )
    assert lines[0].startswith("graphattn ")
    assert f"backend auto -> {BEST}" in lines[0]
    assert " edges -> " in lines[1]
    for label in ("Run 01:", "Run 02:", "All runs:"):
        at = lines.index(label)
        assert [line.split(":")[0].strip() for line in lines[at + 1 : at + 4]] == [
            "Highest Valid",
            "Final Train",
            "Final Test",
        ]
    assert "±" in lines[lines.index("All runs:") + 1]
    (summary,) = (
        line for line in lines if line.startswith("Result: synthetic-arxiv-400, accuracy")
    )
    assert "s per epoch, peak memory" in summary

    written = json.loads((tmp_path / "result.json").read_text())
    assert written["dataset"] == "synthetic-arxiv-400" == result["dataset"]
    assert [len(run) for run in written["history"]] == [3, 3]
    best = [max(run, key=lambda epoch: epoch["val"]) for run in written["history"]]
    assert written["test"]["runs"] == [100 * epoch["test"] for epoch in best]
    assert written["test"]["std"] == pytest.approx(np.std(written["test"]["runs"], ddof=1))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "checkpoint.pt").exists()


def test_training_learns_and_repeats_itself(script, tmp_path):
    arguments = ["--dataset", "synthetic-arxiv-400", "--runs", "1", "--epochs", "15", *TINY]
    arguments += ["--lr", "0.02", "--label-rate", "0.5", "--attention-dropout", "0.2"]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for path in (first, second):
        script("ogbn_arxiv").main([*arguments, "--out", str(tmp_path), "--json", str(path)])
    assert history(first) == history(second)
    losses = [epoch["loss"] for epoch in history(first)[0]]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_autocast_and_compile_give_nearly_the_same(script, tmp_path, monkeypatch):
    arguments = ["--dataset", "synthetic-arxiv-400", "--runs", "1", "--epochs", "2", *TINY]
    arguments += ["--dropout", "0", "--out", str(tmp_path)]
    script("ogbn_arxiv").main([*arguments, "--json", str(tmp_path / "plain.json")])
    compile_it, modes = torch.compile, []

    def compile_quickly(model, mode):
        modes.append(mode)
        return compile_it(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_quickly)
    options = ["--autocast", "--compile", "--json", str(tmp_path / "both.json")]
    script("ogbn_arxiv").main([*arguments, *options])
    assert modes == ["default"]
    plain, both = (history(tmp_path / f"{name}.json")[0] for name in ("plain", "both"))
    losses = [[epoch["loss"] for epoch in run] for run in (plain, both)]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.02)


def test_demo_says_which_set_it_takes_and_why(script, tmp_path, capsys, monkeypatch):
    module = script("ogbn_arxiv")

    def offline(name, **options):
        if name == "ogbn-arxiv":
            raise ConnectionError("the host cannot be reached. Check the network.")
        return load("synthetic-arxiv-300")

    monkeypatch.setattr(module, "load", offline)
    arguments = ["--demo", "--epochs", "2", "--out", str(tmp_path), *TINY]
    (tmp_path / "checkpoint.pt").write_bytes(b"left over by a stopped demo")
    result = module.main(arguments)
    out = capsys.readouterr().out
    assert "Demo on synthetic-arxiv" in out
    assert "cannot be downloaded (the host cannot be reached)" in out
    assert result["dataset"] == "synthetic-arxiv-300"

    monkeypatch.setattr(module, "load", lambda name, **options: load("synthetic-arxiv-300"))
    module.main(arguments)
    assert "Demo on ogbn-arxiv, found in datasets/" in capsys.readouterr().out


def test_without_node_features_it_trains_from_labels_and_degrees(script, tmp_path, capsys):
    data = load("synthetic-arxiv-400")
    masks = {f"{name}_mask": data[f"{name}_mask"].numpy() for name in ("train", "val", "test")}
    np.savez(tmp_path / "bare.npz", edge_index=data.edge_index.numpy(), y=data.y.numpy(), **masks)
    arguments = ["--dataset", "bare", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--runs", "1", "--epochs", "2", *TINY]
    result = script("node_classification").main(arguments)
    out = capsys.readouterr().out
    assert "no node features here; trains from label inputs and degrees alone" in out
    assert "at test time all training labels and no others" in out
    assert result["inputs"] == "degrees"
    assert result["label_inputs_at_test"] == "training labels"
    result = script("node_classification").main([*arguments, "--label-rate", "0"])
    assert "trains from degrees alone" in capsys.readouterr().out
    assert result["label_inputs_at_test"] == "none"


def test_several_labels_a_node_and_none(script, tmp_path, capsys):
    edge_index, y = np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), np.eye(4, 3)
    np.savez(tmp_path / "tasks.npz", edge_index=edge_index, y=y, metric="rocauc", **FOUR)
    arguments = f"--dataset tasks --root {tmp_path} --out {tmp_path} --runs 1 --epochs 2".split()
    with pytest.raises(SystemExit, match="several labels a node, and label inputs need one"):
        script("node_classification").main([*arguments, *TINY, "--label-rate", "0.5"])
    result = script("node_classification").main([*arguments, *TINY])
    assert result["metric"] == "rocauc"
    assert result["inputs"] == "degrees"
    masks = {**FOUR, "train_mask": np.zeros(4, dtype=bool)}
    np.savez(tmp_path / "idle.npz", edge_index=edge_index, y=np.arange(4), **masks)
    with pytest.raises(SystemExit, match="idle has a split without training nodes"):
        script("node_classification").main(["--dataset", "idle", "--root", str(tmp_path)])
    np.savez(tmp_path / "bare.npz", edge_index=edge_index, num_nodes=4)
    with pytest.raises(SystemExit, match="bare has no labels to learn"):
        script("node_classification").main(["--dataset", "bare", "--root", str(tmp_path)])


def test_label_inputs_always_leave_something_to_predict(script, tmp_path):
    result = script("node_classification").main(
        f"--dataset karate --runs 1 --epochs 5 --label-rate 0.99 --out {tmp_path}".split()
    )
    assert all(np.isfinite(epoch["loss"]) for epoch in history(tmp_path / "result.json")[0])
    assert result["label_inputs_at_test"] == "training labels"


def test_directed_keeps_edges_and_the_default_doubles_them(script, tmp_path, capsys):
    arguments = ["--dataset", "synthetic-arxiv-400", "--out", str(tmp_path), "--runs", "1"]
    arguments += ["--epochs", "1", *TINY]
    stored = load("synthetic-arxiv-400").edge_index.size(1)
    assert script("ogbn_arxiv").main([*arguments, "--directed"])["num_edges"] == stored
    assert f"{stored:,} edges -> {stored:,} (kept directed)" in capsys.readouterr().out
    assert script("ogbn_arxiv").main(arguments)["num_edges"] > 1.9 * stored
    looped = script("ogbn_arxiv").main([*arguments, "--self-loops", "--directed"])
    assert looped["num_edges"] == stored + 400


ARGUMENTS = ["--dataset", "synthetic-arxiv-400", "--runs", "2", "--epochs", "4", *TINY]
ARGUMENTS += ["--label-rate", "0.5", "--attention-dropout", "0.3", "--log-every", "100"]


@pytest.mark.parametrize("stop_after", [1, 4, 6])
def test_resume_gives_the_numbers_of_an_uninterrupted_call(
    script, tmp_path, monkeypatch, capsys, stop_after
):
    module, training = script("ogbn_arxiv"), script("training")
    module.main([*ARGUMENTS, "--out", str(tmp_path / "whole")])

    step, steps = training.Run.step, []

    def interrupted(self):
        if len(steps) == stop_after:
            raise KeyboardInterrupt
        steps.append(1)
        return step(self)

    stopped = [*ARGUMENTS, "--out", str(tmp_path / "stopped"), "--checkpoint-seconds", "0"]
    monkeypatch.setattr(training.Run, "step", interrupted)
    with pytest.raises(SystemExit, match="130"):
        module.main(stopped)
    assert "Stopped; --resume goes on from" in capsys.readouterr().out
    monkeypatch.setattr(training.Run, "step", step)
    torch.manual_seed(12345)  # whatever state the new process is in
    module.main([*stopped, "--resume"])
    assert history(tmp_path / "stopped" / "result.json") == history(
        tmp_path / "whole" / "result.json"
    )


def test_a_killed_process_can_be_resumed(script, tmp_path):
    arguments = [*ARGUMENTS, "--runs", "1", "--epochs", "40", "--threads", "1"]
    script("ogbn_arxiv").main([*arguments, "--out", str(tmp_path / "whole")])
    stopped = [*arguments, "--out", str(tmp_path / "stopped"), "--checkpoint-seconds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "ogbn_arxiv.py", *stopped],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    checkpoint = tmp_path / "stopped" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output.decode()
    assert len(torch.load(checkpoint, weights_only=True)["run"]["history"]) < 40
    script("ogbn_arxiv").main([*stopped, "--resume"])
    assert history(tmp_path / "stopped" / "result.json") == history(
        tmp_path / "whole" / "result.json"
    )


def test_unfinished_calls_are_neither_lost_nor_mixed(script, tmp_path, monkeypatch, capsys):
    module, training = script("ogbn_arxiv"), script("training")
    arguments = [*ARGUMENTS, "--out", str(tmp_path), "--checkpoint-seconds", "0"]
    with monkeypatch.context() as patch:
        step = training.Run.step
        calls = iter([step])
        patch.setattr(training.Run, "step", lambda self: next(calls)(self))
        with pytest.raises(StopIteration):
            module.main(arguments)
    with pytest.raises(SystemExit, match=r"holds an unfinished call\. Go on with it by --resume"):
        module.main(arguments)
    with pytest.raises(SystemExit, match=r"--lr was 0\.001, now 0\.5"):
        module.main([*arguments, "--resume", "--lr", "0.5"])
    module.main([*arguments, "--overwrite"])
    capsys.readouterr()
    module.main([*arguments, "--resume"])
    assert "Nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "10", "--heads", "4"], "--hidden 10 must be divisible by --heads 4"),
        (["--runs", "0"], "must be an integer of at least 1, got 0"),
        (["--epochs", "many"], "invalid integer value: 'many'"),
        (["--dropout", "1.5"], "must be a number from 0 to 1, got 1.5"),
        (["--lr", "-1"], "must be a number of at least 0, got -1"),
        (["--lr", "fast"], "invalid number value: 'fast'"),
        (["--device", "abacus"], "--device abacus is not a device torch knows"),
        (["--label-rate", "1"], "--label-rate must be below 1"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--dataset", "atlantis"], "unknown data set 'atlantis'"),
        (["--dataset", "ogbn-arxiv", "--root", "/nowhere"], "prepare.py ogbn-arxiv"),
        (["--norm", "group"], "invalid choice: 'group'"),
        (["--backend", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_wrong_options_are_named(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        script("ogbn_arxiv").main(["--dataset", "synthetic-arxiv-400", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(script, capsys):
    with pytest.raises(SystemExit):
        script("ogbn_arxiv").main(["--device", "cuda"])
    assert "no CUDA device is available" in capsys.readouterr().err


def test_node_classification_on_karate_with_transformer_blocks(script, tmp_path):
    result = script("node_classification").main(
        [
            *(
                "--dataset karate --runs 2 --epochs 3 --feedforward 16 --threads 1 --out "
                f"{tmp_path}"
            ).split(),
            *TINY,
        ]
    )
    assert result["dataset"] == "karate"
    assert len(result["test"]["runs"]) == 2


def test_compare_dense_agrees(script, tmp_path, capsys):
    rows = script("compare_dense").main(
        (
            "--nodes 32 64 --degrees 4 --width 16 --heads 2 --repeats 1 --plot "
            f"{tmp_path / 'plot.png'}"
        ).split()
    )
    assert len(rows) == 2
    for row in rows:
        assert row["output_difference"] < 1e-5
        assert row["gradient_difference"] < 1e-5
        assert row["sparse_seconds"] > 0
    assert "dense MiB" in capsys.readouterr().out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (row,) = script("compare_dense").main(
        (
            "--nodes 64 --degrees 4 --width 16 --heads 2 --repeats 1 --dense-limit 0 "
            f"--plot {tmp_path / 'plot.png'}"
        ).split()
    )
    assert "dense_seconds" not in row
    with pytest.raises(SystemExit):
        script("compare_dense").main(["--width", "10", "--heads", "4"])


@pytest.mark.data
@needs_shared
def test_ogbn_arxivs_real_graph(script, tmp_path, capsys):
    result = script("ogbn_arxiv").main(
        (
            f"--root {SHARED} --runs 1 --epochs 2 --hidden 8 --layers 2 --heads 1 --lr "
            f"0.02 --out {tmp_path}"
        ).split()
    )
    out = capsys.readouterr().out
    assert "169,343 nodes, 40 classes, 1,166,243 edges -> 2,315,598" in out
    assert "no node features here" in out
    losses = [epoch["loss"] for epoch in history(tmp_path / "result.json")[0]]
    assert losses[1] < losses[0]
    assert result["num_edges"] == 2_315_598


@pytest.mark.data
@needs_shared
@pytest.mark.parametrize("name", ["cora", "tolokers"])
def test_real_sets_with_one_and_with_ten_splits(script, tmp_path, name):
    result = script("node_classification").main(
        (
            f"--root {SHARED} --dataset {name} --runs 2 --epochs 2 --hidden 8 --heads "
            f"2 --out {tmp_path}"
        ).split()
    )
    assert result["metric"] == {"cora": "accuracy", "tolokers": "rocauc"}[name]


def test_installation_report(capsys):
    from graphattn.__main__ import main

    main()
    out = capsys.readouterr().out
    for word in ("graphattn ", "torch ", "torch-geometric ", "threads", "GPU", "backend eager"):
        assert word in out
    assert f"backend auto     takes {BEST} on CPU" in out


def test_draw_attention(script, tmp_path, capsys):
    path = tmp_path / "karate.png"
    script("draw_attention").main(["--out", str(path), "--epochs", "100"])
    out = capsys.readouterr().out
    accuracy = float(out.split("not trained on: ")[1].split("%")[0])
    assert accuracy > 80
    assert "of attention" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        script("draw_attention").main(["--heads", "0"])
    assert "must be an integer of at least 1, got 0" in capsys.readouterr().err
