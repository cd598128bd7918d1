"""The example of digits as images: its data, that the comparison is fair, what it writes."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("image_digits")


def test_quick_run_writes_all_and_repeats_itself(script, tmp_path, capsys):
    rows, tables = [], []
    for name in ("first", "second"):
        out = tmp_path / name
        rows.append(script.main(["--quick", "--threads", "1", "--out", str(out)]))
        tables.append(json.loads((out / "image_digits.json").read_text())["tables"])
        for number in (1, 2):
            assert (out / f"image_digits-{number}.png").read_bytes().startswith(b"\x89PNG")
    assert rows[0] == rows[1]
    assert tables[0] == tables[1]

    accuracies, trained = tables[0].values()
    assert accuracies == rows[0]
    assert [row["model"] for row in accuracies] == list(script.MODELS)
    assert list(accuracies[0]) == ["model", "20 images", "60 images"]
    for row in trained:
        tried = {rate: row[f"at {rate:g}"] for rate in script.RATES}
        assert tried[row["chosen"]] == max(tried.values())
    page = (tmp_path / "first" / "image_digits.md").read_text()
    assert page.startswith("# Images of digits: what a convolution knows beforehand")
    assert "The lead of the CNN over the best model of attention is" in page
    assert "The lead of the CNN" in capsys.readouterr().out


def test_data_are_all_of_scikit_learns_images_each_once(script):
    from sklearn.datasets import load_digits

    digits = load_digits()
    learn, test = script.load()
    assert learn.x.shape == (1200, 1, 8, 8)
    assert test.x.shape == (597, 1, 8, 8)
    assert learn.x.dtype == torch.float32

    def known(images, labels):
        pixels = np.asarray(images).reshape(len(labels), 64).round().astype(int)
        return sorted(
            (int(digit), *row) for digit, row in zip(labels, pixels.tolist(), strict=True)
        )

    ours = known(16 * torch.cat([learn.x, test.x]), torch.cat([learn.y, test.y]))
    assert ours == known(digits.images, digits.target)
    assert not set(known(16 * learn.x, learn.y)) & set(known(16 * test.x, test.y))
    assert set(test.y.bincount().tolist()) == {59, 60}
    again, _ = script.load()
    assert torch.equal(again.x, learn.x)


def test_any_start_of_an_order_is_balanced(script):
    labels = np.random.default_rng(1).permutation(np.arange(10).repeat(7))
    order = script.by_turns(labels, 3)
    assert sorted(order) == list(range(70))
    for size in (10, 25, 60):
        counts = np.bincount(labels[order[:size]], minlength=10)
        assert counts.max() - counts.min() <= 1
    assert not np.array_equal(order, script.by_turns(labels, 4))
    assert np.array_equal(order, script.by_turns(labels, 3))


def test_models_have_the_same_size(script):
    sizes = [sum(p.numel() for p in build().parameters()) for build in script.MODELS.values()]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize(("nodes", "side"), [("patches", 4), ("pixels", 8)])
def test_nodes_attend_to_all_or_to_a_window(script, nodes, side):
    everyone = script.MODELS[f"{nodes}, all"]().graph(8, 8)
    assert everyone.num_dst == side**2
    assert everyone.num_edges == side**4
    src, dst = script.MODELS[f"{nodes}, window"]().graph(8, 8).edge_index.tolist()
    near = {
        (row * side + column, other_row * side + other_column)
        for row in range(side)
        for column in range(side)
        for other_row in range(side)
        for other_column in range(side)
        if abs(row - other_row) <= 1 and abs(column - other_column) <= 1
    }
    assert set(zip(src, dst, strict=True)) == near
    assert len(src) == len(near)


class Watch(nn.Module):
    """Keeps what it is shown: an image's first pixel is its number."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(10))
        self.seen = []

    def forward(self, images):
        self.seen.append(images[:, 0, 0, 0].int().tolist())
        return self.scores.expand(len(images), -1)


def test_models_see_the_same_images_in_the_same_order(script, monkeypatch):
    class Wide(Watch):
        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.randn(999))  # draws more numbers

    monkeypatch.setattr(script, "MODELS", {"narrow": Watch, "wide": Wide})
    images = script.Images(torch.arange(24.0).view(24, 1, 1, 1), torch.arange(24) % 10)
    options = {"lr": 1e-3, "steps": 6}
    narrow, wide = (script.fit(name, images, seed=0, **options).seen for name in ("narrow", "wide"))
    assert narrow == wide
    assert [len(batch) for batch in narrow] == [script.BATCH] * 6
    flat = [number for batch in narrow for number in batch]
    for start in range(0, 96, 24):
        assert sorted(flat[start : start + 24]) == list(range(24))
    assert flat[:24] != flat[24:48]
    assert script.fit("narrow", images, seed=1, **options).seen != narrow


def test_rates_are_chosen_on_images_apart(script, monkeypatch):
    monkeypatch.setattr(script, "MODELS", {"watch": Watch})
    checked, learned = [], []
    fit = script.fit

    def watched_fit(name, images, **options):
        learned.append(images.x[:, 0, 0, 0].int().tolist())
        return fit(name, images, **options)

    def watched_accuracy(model, images):
        checked.append(images.x[:, 0, 0, 0].int().tolist())
        return 50.0

    monkeypatch.setattr(script, "fit", watched_fit)
    monkeypatch.setattr(script, "accuracy", watched_accuracy)
    images = script.Images(torch.arange(1200.0).view(-1, 1, 1, 1), torch.arange(1200) % 10)
    found = script.choose_rates(images, 0, 0.001)
    assert found == {"watch": dict.fromkeys(script.RATES, 50.0)}
    assert len(learned) == len(checked) == len(script.RATES)
    for learn, check in zip(learned, checked, strict=True):
        assert len(learn) == script.TUNE
        assert sorted(learn + check) == list(range(1200))


@pytest.mark.parametrize("name", ["patches, window", "CNN"])
def test_models_learn(script, name):
    learn, test = script.load()
    images = learn.take(script.by_turns(learn.y.numpy(), 0)[:200])
    model = script.fit(name, images, lr=1e-2, seed=0, steps=100)
    assert script.accuracy(model, images) > 75
    assert script.accuracy(model, test) > 60


def test_accuracy_is_the_percent_of_right_answers(script):
    images = script.Images(torch.zeros(8, 1, 1, 1), torch.tensor([3, 3, 3, 3, 3, 3, 1, 2]))
    assert script.accuracy(lambda x: torch.eye(10)[3].expand(len(x), -1), images) == 75


def test_summary_and_picture_show_the_numbers(script):
    means = {"patches, all": (70, 97), "patches, window": (75, 97.5), "pixels, all": (72, 96)}
    means |= {"pixels, window": (74, 95), "CNN": (90, 97)}
    scores = [
        script.Score(name, size, [mean - 1, mean + 1])
        for name, both in means.items()
        for size, mean in zip((50, 1200), both, strict=True)
    ]
    text = script.summary(scores, [50, 1200])
    assert "is +15.0 points of accuracy with 50 images and -0.5 with 1,200:" in text
    assert "- 50 images: 90.0% against 75.0% (patches, window), +15.0 points." in text
    assert "among patches: +5.0 with 50 images, +0.5 with 1,200 images." in text
    assert "among pixels: +2.0 with 50 images, -1.0 with 1,200 images." in text
    assert "standard error, of 0.6 to 1.9 points here" in text  # of 97.5% and of 70%

    right, wrong = script.draw(scores, [50, 1200]).axes
    for line in right.lines:
        assert tuple(line.get_ydata()) == means[line.get_label()]
    assert [tuple(100 - line.get_ydata()) for line in wrong.lines] == list(means.values())


def test_map_shows_the_weights_of_one_pixel(script):
    image = torch.zeros(1, 8, 8)
    image[0, 7, 2] = 1
    picture = script.draw_attention({"window": script.MODELS["pixels, window"]()}, image)
    shown, *maps = [panel.images[0].get_array() for panel in picture.axes if panel.images]
    assert shown[7, 2] == 1
    assert len(maps) == 2
    for weights in maps:
        weights = np.ma.filled(weights, np.nan)
        assert np.isfinite(weights[6:, 1:4]).all()
        assert np.isfinite(weights).sum() == 6
        assert np.nansum(weights) == pytest.approx(100, abs=1e-3)


def test_errors(script, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        script.main(["--sizes", "50", "1300"])
    assert "there are 1200 images to learn from, got 1300" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--sizes", "5"])
    assert "must be an integer of at least 10, got 5" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        script.main(["--quick"])
