"""examples/speech_frames.py: the speech is what it says, the models are comparable, it all runs."""

import argparse
import importlib
import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.signal import argrelmax

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = {"channels": 16, "heads": 2, "layers": 2, "window": 3}


@pytest.fixture
def speech(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("speech_frames")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def runs_of(label):
    return np.diff(np.flatnonzero(np.diff(label, prepend=-1, append=-1)))


# The whole ########################################################################################


def test_quick_run(speech, tmp_path, capsys, threads, monkeypatch):
    monkeypatch.setattr(speech, "keep_pages", lambda: True)  # other tests measure memory
    arguments = ["--quick", "--threads", "1", "--out"]
    rows = speech.main([*arguments, str(tmp_path / "a")])
    assert [row["model"] for row in rows] == ["alone", "full", "truncated", "Conformer"]
    out = capsys.readouterr().out
    assert "Truncated attention minus full attention, in points: " in out
    page = (tmp_path / "a" / "speech_frames.md").read_text()
    assert page.startswith("# Speech frames: full attention, truncated attention and a Conformer\n")
    for number in (1, 2):
        assert f"](speech_frames-{number}.png)" in page
        picture = tmp_path / "a" / f"speech_frames-{number}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "a" / "speech_frames.json").read_text())
    assert len(result["tables"]["A training step on one utterance"]) == 5 * 3

    def numbers(rows):
        return [{k: v for k, v in row.items() if k != "training, s"} for row in rows]

    assert numbers(speech.main([*arguments, str(tmp_path / "b")])) == numbers(rows)


def test_wrong_window(speech, capsys):
    with pytest.raises(SystemExit):
        speech.main(["--quick", "--window", "0"])
    assert "must be an integer of at least 1, got 0" in capsys.readouterr().err


# Speech ###########################################################################################


def test_sounds_follow_one_another_for_50_to_200_ms(speech):
    rng = np.random.default_rng(0)
    sound, border = speech.draw_sounds(20.0, rng)
    assert border[0] == 0
    assert border[-1] >= 20
    assert np.diff(border).min() >= 0.05
    assert np.diff(border).max() <= 0.2
    assert set(sound) == set(range(len(speech.NAMES)))
    vowel = np.isin(sound, [speech.NAMES.index(name) for name in "aeiou"])
    assert (vowel[:-2] | vowel[1:-1] | vowel[2:] | (sound == speech.NAMES.index("-"))[1:-1]).all()


def test_every_utterance_is_another(speech):
    first, second = (speech.speak([60, 60], np.random.default_rng(7), name="") for _ in range(2))
    for (x, label), (again, label_again) in zip(first, second, strict=True):
        assert torch.equal(x, again)
        assert torch.equal(label, label_again)
    assert not torch.equal(first[0][0], first[1][0])
    assert first[0][0].dtype == torch.float32
    assert first[0][0].shape == (60, 40)


def test_labels_are_those_of_the_middle_of_each_frame(speech):
    rng = np.random.default_rng(3)
    wave, label = speech.utterance(500, rng)
    assert len(wave) == 499 * 160 + 400
    assert label.shape == (500,)
    sound, border = speech.draw_sounds((len(wave) + 160) / 16_000, np.random.default_rng(3))
    for frame in range(0, 500, 7):
        middle = (160 * frame + 200) / 16_000
        (at,) = ((border[:-1] <= middle) & (middle < border[1:])).nonzero()[0]
        assert label[frame] == sound[at]
    assert runs_of(label)[:-1].min() >= 4


def test_resonances_are_where_the_table_has_them(speech):
    moment = np.array([0.5])
    for name in "aeiou":
        sound = np.array([speech.NAMES.index(name)])
        sizes = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            mouth, _ = speech.filters(sound, np.array([0.0, 1.0]), moment, rng)
            peaks = argrelmax(np.abs(mouth[0]))[0] * 16_000 / speech.BLOCK
            if len(peaks) == 5:  # none hides in the slope of another
                sizes.append(peaks[0] / speech.SOUNDS[name].formants[0])
                assert peaks[3] / 3500 == pytest.approx(peaks[4] / 4500, rel=0.05)
                second = peaks[1] / speech.SOUNDS[name].formants[1]
                assert second / (peaks[3] / 3500) == pytest.approx(1, abs=0.25)
        assert 0.7 < min(sizes) < 1 < max(sizes) < 1.45


def test_parts_of_a_stop(speech):
    sound, border = np.array([speech.NAMES.index("t"), speech.NAMES.index("a")]), [0.0, 0.2, 0.4]
    smooth = speech.levels(sound, np.array(border), np.arange(0, 0.4, 0.005))
    assert (smooth[:23] == 0).all()  # closed for 0.6 of its time
    for place, level in [(26, [0, 0, 1.5]), (35, [0, 0.6, 0]), (60, [1, 0, 0])]:  # burst, breath, a
        assert smooth[place].tolist() == pytest.approx(level)


def test_log_mel_finds_a_tone(speech):
    time = np.arange(16_000) / 16_000
    top = 2595 * math.log10(1 + 8000 / 700)
    for hertz in (300, 1000, 2500, 6000):
        features = speech.log_mel(np.sin(2 * np.pi * hertz * time))
        assert features.shape == ((16_000 - 400) // 160 + 1, 40)
        band = 2595 * math.log10(1 + hertz / 700) / top * 41 - 1  # in units of bands
        assert np.abs(features.argmax(1) - band).max() <= 1


def frames_of(speech, names, chosen, said):
    """Features of frames, and which of the sounds they belong to."""
    x, y = [], []
    for features, label in said:
        starts = np.flatnonzero(np.diff(label, prepend=-1))
        for first, last in pairwise(starts):
            name = speech.NAMES[label[first]]
            if name in names and last - first <= 20:
                x.append(features[first + int(chosen * (last - first))])
                y.append(names.index(name))
    return np.array(x), np.array(y)


def test_closures_sound_alike_and_what_follows_tells_them_apart(speech):
    def said(seed):
        rng = np.random.default_rng(seed)
        waves = [speech.utterance(400, rng) for _ in range(30)]
        return [(speech.log_mel(wave), label) for wave, label in waves]

    train, test = said(0), said(1)

    def right(names, chosen):
        """Of the frames at this share of each sound, by the nearest centroid."""
        x, y = frames_of(speech, names, chosen, train)
        centroid = np.stack([x[y == k].mean(0) for k in range(len(names))])
        x, y = frames_of(speech, names, chosen, test)
        far = ((x[:, None] - centroid) ** 2).sum(-1)
        return (far.argmin(1) == y).mean()

    stops = ["p", "t", "k", "b", "d", "g"]
    assert right(stops, 0.3) < 0.3
    assert right(["p", "t", "k"], 0.3) < 0.45
    assert right(["p", "t", "k"], 0.7) > 0.55
    assert right(["a", "i", "s"], 0.5) > 0.8


# Models ###########################################################################################


def sizes(**changed):
    return argparse.Namespace(**{**TINY, **changed})


def full_sizes(speech):
    return argparse.Namespace(window=24, **{name: both[0] for name, both in speech.SIZES.items()})


def test_models_have_equally_many_parameters(speech):
    args = full_sizes(speech)
    counts = [
        sum(p.numel() for p in speech.Labeller(kind, args).parameters())
        for kind in ("alone", "full", "graph", "truncated", "Conformer")
    ]
    assert max(counts) < 1.01 * min(counts)


def test_full_attention_is_the_same_in_all_its_forms(speech):
    args, lengths = sizes(), [5, 1, 9]
    dense, graph = speech.Labeller("full", args).eval(), speech.Labeller("graph", args).eval()
    graph.load_state_dict(dense.state_dict())
    x = torch.randn(15, 40)
    expected = dense(x, lengths)
    torch.testing.assert_close(graph(x, lengths), expected, rtol=0, atol=1e-5)
    with speech.sdpa_kernel(speech.SDPBackend.MATH):
        torch.testing.assert_close(dense(x, lengths), expected, rtol=0, atol=1e-5)
    parts = torch.cat([dense(part, [len(part)]) for part in x.split(lengths)])
    torch.testing.assert_close(parts, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "reach"), [("alone", 0), ("truncated", 6), ("Conformer", 6 + 2 * 7), ("full", 99)]
)
def test_how_far_a_model_sees(speech, kind, reach):
    model = speech.Labeller(kind, sizes()).eval()
    x, lengths = torch.randn(130, 40, requires_grad=True), [100, 30]
    model(x, lengths)[0].sum().backward()
    seen = x.grad.abs().sum(1).nonzero().squeeze(1)
    assert seen[-1] == reach


def test_attention_starts_out_local(speech):
    attention = speech.Labeller("full", full_sizes(speech)).layers[0].self_attn
    x = torch.zeros(16_000, 64)
    query, key, _ = attention.project(x, x, x, position=torch.arange(16_000))
    score = (query[:1] * key).sum(-1)[:, 0]
    assert score.argmax() == 0
    near, middle, far = score[:24].mean(), score[24:200].mean(), score[200:].mean()
    assert near > middle + 2 > far + 2


def test_predictions_are_those_of_pieces(speech):
    model = speech.Labeller("full", sizes()).eval()
    recordings = [(torch.randn(12, 40), torch.zeros(12).long()) for _ in range(2)]
    found = speech.predict(model, recordings, 4)
    pieces = torch.cat([x for x, _ in recordings]).split(4)
    assert found.tolist() == torch.cat([model(x, [4]).argmax(1) for x in pieces]).tolist()


# Costs ############################################################################################


def test_costs_stop_where_memory_does(speech, monkeypatch):
    recording = torch.randn(80, 40), torch.randint(17, (80,))
    args = sizes(lengths=(20, 40, 80))
    rows = speech.costs(recording, args)
    assert all(row["seconds"] > 0 for row in rows)
    assert [row["frames"] for row in rows] == [20, 40, 80] * 5

    monkeypatch.setattr(speech.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))

    class Peak(speech.PeakMemory):
        def __exit__(self, *error):
            self.bytes = 300_000

    monkeypatch.setattr(speech, "PeakMemory", Peak)
    rows = speech.costs(recording, args)
    # Four times as much would be 1.2 MB, and 0.8 MB may be taken.
    assert [row["seconds"] is not None for row in rows] == [True, False, False] * 5


def test_sentences_come_from_the_numbers(speech):
    said = []
    report = SimpleNamespace(table=lambda title, rows: said.append(rows), text=said.append)
    args = argparse.Namespace(lengths=(10, 20), train_lengths=(5, 10))
    label = torch.zeros(40, dtype=torch.int64)
    half = torch.arange(40) % 2
    predicted = {
        "full": [[label, half], [label, half]],
        "truncated": [[half, label], [label, label]],
    }
    speech.report_accuracy(report, args, label, predicted, {"full": {}, "truncated": {}})
    accuracy, gains, kinds = said
    assert [row["10 frames, %"] for row in accuracy] == [100, 75]
    assert [row["runs differ by"] for row in accuracy] == [0, 50]
    assert (
        "-25.0 at 10 frames, +50.0 at 20 frames. Both were trained on utterances of 5 to" in gains
    )
    assert [row["full"] for row in kinds] == [100, None, None, None, None]

    cost = [
        {"model": form, "frames": n, "seconds": n / 10, "MB": 40.0 if "graph" in form else 4.0}
        for form in speech.FORMS
        for n in (10, 20)
    ]
    cost[1].update(seconds=None, MB=None)
    said.clear()
    speech.report_costs(report, cost)
    rows, sizes, skipped = said
    assert [row["MB / truncated"] for row in rows] == [1, None, 1, 1, 10, 10, 1, 1, 1, 1]
    assert rows[0]["seconds / truncated"] == 1
    assert "was measured: 1 (full, matrix), 1 (full, fused), 10 (full, graph)." in sizes
    assert skipped.endswith("sufficed: full, matrix at 20 frames.")
