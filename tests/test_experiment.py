"""What experiments share: options, the training loop, measurements, and the page of results."""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from torch import nn

from graphattn import experiment

CPU = torch.device("cpu")

# Options ##########################################################################################


def test_every_experiment_has_the_same_options():
    parser = experiment.option_parser("Counts sheep.\n\nMany of them.")
    assert parser.description == "Counts sheep."
    args = parser.parse_args([])
    assert (args.quick, args.seed, args.threads, args.out) == (False, 0, None, Path("runs"))
    before = torch.get_num_threads()
    args = parser.parse_args(["--quick", "--seed", "3", "--threads", "1", "--out", "x"])
    assert (args.quick, args.seed, args.threads, args.out) == (True, 3, 1, Path("x"))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        (experiment.integer(1), "0", "must be an integer of at least 1, got 0"),
        (experiment.number(0, 1), "1.5", "must be a number from 0 to 1, got 1.5"),
        (experiment.number(2), "1", "must be a number of at least 2, got 1"),
        (experiment.integer(1), "x", "invalid integer value: 'x'"),
    ],
)
def test_options_out_of_range(kind, text, error, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=kind)
    with pytest.raises(SystemExit):
        parser.parse_args(["--n", text])
    assert error in capsys.readouterr().err


# Training #########################################################################################


def test_train_finds_the_minimum():
    model = nn.Linear(3, 1, bias=False)
    wanted = torch.tensor([[1.0, -2.0, 0.5]])

    def loss(step):
        assert model.training
        x = torch.randn(32, 3)
        return (model(x) - x @ wanted.T).square().mean()

    trained = experiment.train(model, loss, steps=300, lr=0.05, warmup=10)
    assert len(trained.losses) == 300
    assert trained.seconds > 0
    assert not model.training
    torch.testing.assert_close(model.weight.detach(), wanted, rtol=0, atol=0.02)


def test_the_rate_warms_up_and_falls_to_nothing(monkeypatch):
    rates = []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    model = nn.Linear(2, 1)
    experiment.train(model, lambda step: model(torch.ones(2)).sum(), steps=9, lr=1.0, warmup=4)
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[5:] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 5)) for i in range(1, 5)])


def test_the_gradient_is_clipped(monkeypatch):
    norms = []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda p, most: norms.append(most))
    model = nn.Linear(2, 1)
    experiment.train(model, lambda step: model(torch.ones(2)).sum(), steps=2, lr=1.0, clip=0.3)
    assert norms == [0.3, 0.3]


def test_training_ends_early_once_enough_is_learned():
    model = nn.Linear(2, 1)
    asked = iter([False, False, True])
    trained = experiment.train(
        model, lambda step: model(torch.ones(2)).sum(), steps=9, lr=0.1, until=lambda: next(asked)
    )
    assert len(trained.losses) == 3
    assert not model.training


def test_a_loss_that_is_lost_stops_the_training():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"train: the loss of step 1 of toy is nan"):
        experiment.train(
            model,
            lambda step: model(torch.ones(2)).sum() * (math.nan if step else 1.0),
            steps=3,
            lr=0.1,
            name="toy",
        )


# Time and memory ##################################################################################


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peak_memory_counts_what_is_held_at_once():
    size = 50_000_000
    with experiment.PeakMemory(CPU) as one:
        torch.ones(size // 4)
    with experiment.PeakMemory(CPU) as two:
        kept = [torch.ones(size // 4) for _ in range(2)]
    with experiment.PeakMemory(CPU) as none:
        pass
    del kept
    assert one.bytes == pytest.approx(size, rel=0.1)
    assert two.bytes == pytest.approx(2 * size, rel=0.1)
    assert none.bytes < size / 10


def test_peak_memory_is_unknown_where_the_system_does_not_tell(monkeypatch):
    def forbidden(self, text):
        raise PermissionError(self)

    monkeypatch.setattr(Path, "write_text", forbidden)
    with experiment.PeakMemory(CPU) as peak:
        pass
    assert peak.bytes is None


def test_measure_warms_up_and_takes_the_median(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    calls = []
    monkeypatch.setattr(experiment.time, "perf_counter", lambda: next(clock))
    measured = experiment.measure(lambda: calls.append(1), repeats=3)
    assert len(calls) == 5
    assert measured.seconds == 2.0
    assert measured.bytes is None or measured.bytes < 10_000_000


def test_commit_is_unknown_outside_git(monkeypatch, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{4,}(\+dirty)?|unknown", experiment.commit())
    monkeypatch.setattr(experiment.graphattn, "__file__", str(tmp_path / "__init__.py"))
    assert experiment.commit() == "unknown"


def test_the_processor_has_a_name_without_proc_too(monkeypatch):
    assert experiment.cpu_model()

    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert experiment.cpu_model()


# The report #######################################################################################


def test_a_report_is_a_page_with_tables_pictures_and_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["examples/sheep.py", "--out", str(tmp_path)])
    args = argparse.Namespace(out=tmp_path / "page", quick=False)
    report = experiment.Report("examples/sheep.py", "Sheep, counted.\n\nMany of them.\n", args)
    rows = [
        {"field": "north", "sheep": 12_000, "share": 0.123456, "fenced": True},
        {"field": "south", "sheep": 3, "share": None, "fenced": False},
    ]
    report.table("By field", rows)
    report.text("Sheep are counted **twice**.")
    figure, axes = experiment.figure(2)
    assert len(axes) == 2
    report.picture(figure, "Two fields.")
    report.write()
    page = (tmp_path / "page" / "sheep.md").read_text()
    assert page.startswith("# Sheep, counted\n\nMany of them.\n\n```bash\npython examples/sheep.py")
    assert "| field | sheep | share | fenced |\n| --- | ---: | ---: | ---: |\n" in page
    assert "| north | 12,000 | 0.123 | True |\n| south | 3 | - | False |\n" in page
    assert "\n\nSheep are counted **twice**.\n\n![Two fields.](sheep-1.png)\n\nTwo fields." in page
    assert (tmp_path / "page" / "sheep-1.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "page" / "sheep.json").read_text())
    assert numbers["tables"] == {"By field": rows}
    assert numbers["command"] == f"python examples/sheep.py --out {tmp_path}"
    assert numbers["options"]["quick"] == "False"
    printed = capsys.readouterr().out
    assert "By field" in printed
    assert "12,000" in printed
    assert "Sheep are counted **twice**." in printed
    assert f"Written: {tmp_path / 'page' / 'sheep.md'}" in printed


def test_figures_are_not_kept():
    before = pyplot.get_fignums()
    for _ in range(30):
        experiment.figure(2)
    assert pyplot.get_fignums() == before
