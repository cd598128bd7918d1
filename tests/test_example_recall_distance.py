"""The example of recall at a distance: its data, that the comparison is fair, what it writes."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("recall_distance")


def draw(script, task, distance, batch=50):
    return script.TASKS[task](batch, distance, torch.Generator().manual_seed(3))


def after_the_last(tokens):
    """What came after the last occurrence of the last token before now."""
    *before, now = tokens
    return before[len(before) - 1 - before[::-1].index(now) + 1]


def test_quick_run_writes_all_and_repeats_itself(script, tmp_path, capsys):
    rows, tables = [], []
    for name in ("first", "second"):
        out = tmp_path / name
        rows.append(script.main(["--quick", "--threads", "1", "--out", str(out)]))
        tables.append(json.loads((out / "recall_distance.json").read_text())["tables"])
        for number in (1, 2):
            assert (out / f"recall_distance-{number}.png").read_bytes().startswith(b"\x89PNG")
    *learned, times = zip(*(table.items() for table in tables), strict=True)
    assert rows[0] == rows[1]
    assert all(one == other for one, other in learned)
    assert times[0] != times[1]

    accuracies, _, tuned = (table for (_, table), _ in learned)
    assert accuracies == rows[0]
    assert [(row["task"], row["model"]) for row in accuracies] == [
        (task, model) for task in ("copy", "recall") for model in script.STYLES
    ]
    assert list(accuracies[0]) == ["task", "model", "4", "64"]
    for row in tuned:
        tried = {rate: row[f"at {rate:g}"] for rate in script.RATES}
        assert tried[row["chosen"]] == max(tried.values())
    assert [row["training, GRU"] is None for row in times[0][1]] == [False, False, True]
    page = (tmp_path / "first" / "recall_distance.md").read_text()
    assert page.startswith("# Recall at a distance: attention against a recurrent network\n")
    assert "- *copy*: over 4 tokens attention has" in page
    assert "At distance 64 and more the question is farther back" in capsys.readouterr().out


@pytest.mark.parametrize("distance", [1, 16])
def test_copy_asks_for_the_string_before_the_noise(script, distance):
    tokens, answers = draw(script, "copy", distance)
    size = script.COPIED
    assert tokens.shape == (50, 1 + size + distance + size)
    assert answers.shape == (50, size)
    for row, string in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert len(set(string)) == size
        assert all(0 <= symbol < script.SYMBOLS for symbol in string)
        assert row[: 1 + size] == [script.MARKER, *string]
        noise = row[1 + size : 1 + size + distance]
        assert all(script.SYMBOLS <= token < script.MARKER for token in noise)
        assert row[1 + size + distance :] == [script.MARKER, *string[:-1]]


@pytest.mark.parametrize("distance", [1, 16])
def test_recall_asks_for_the_value_of_each_key(script, distance):
    tokens, answers = draw(script, "recall", distance)
    size = script.PAIRS
    assert tokens.shape == (50, 2 * size + distance + size)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        value = dict(zip(row[: 2 * size : 2], row[1 : 2 * size : 2], strict=True))
        assert len(value) == size
        assert all(0 <= key < script.KEYS for key in value)
        assert all(script.KEYS <= v < script.KEYS + script.VALUES for v in value.values())
        noise = row[2 * size : 2 * size + distance]
        assert all(script.SYMBOLS <= token < script.MARKER for token in noise)
        asked = row[2 * size + distance :]
        assert set(asked) == set(value)
        assert answer == [value[key] for key in asked]


@pytest.mark.parametrize("task", ["copy", "recall"])
def test_every_answer_followed_the_same_token_before(script, task):
    tokens, answers = draw(script, task, 16)
    size = answers.size(1)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        ends = range(len(row) - size + 1, len(row) + 1)
        assert [after_the_last(row[:end]) for end in ends] == answer


def test_guesses_are_right_as_often_as_it_says(script):
    generator = torch.Generator().manual_seed(0)
    _, answers = script.copy(2000, 1, generator)
    right = [
        symbol == next(s for s in torch.randperm(16, generator=generator).tolist() if s not in said)
        for row in answers.tolist()
        for said, symbol in ((row[:place], symbol) for place, symbol in enumerate(row))
    ]
    assert script.GUESS["copy"] == pytest.approx(100 * sum(right) / len(right), abs=1)
    _, answers = script.recall(2000, 1, generator)
    assert script.GUESS["recall"] == pytest.approx(
        100 * (answers == script.KEYS).double().mean(), abs=2
    )


def test_models_have_equally_many_parameters(script):
    count = {name: script.parameters(script.build(name, 0)) for name in script.STYLES}
    assert count["window"] == count["attention"]
    assert count["GRU, distance grown"] == count["GRU"]
    assert count["GRU"] == pytest.approx(count["attention"], rel=0.02)


def test_models_see_the_same_sequences_and_test_sets_are_others(script, monkeypatch):
    seen = []

    def watched(batch, distance, generator):
        tokens, answers = copy(batch, distance, generator)
        seen.append(tokens)
        return tokens, answers

    copy = script.copy
    monkeypatch.setitem(script.TASKS, "copy", watched)
    for name in script.STYLES:
        options = {"steps": 2, "rate": 0.01, "seed": 5, "name": name}
        script.learn(script.build(name, 5), "copy", 3, **options)
        script.accuracy(script.build(name, 5), "copy", 3, seed=script.TEST)
    kinds = [torch.stack(seen[i::3]) for i in range(3)]
    for kind in kinds:
        assert (kind == kind[0]).all()
    first, second, test = ({tuple(row) for row in kind[0].tolist()} for kind in kinds)
    assert not first & second
    assert not (first | second) & test


@pytest.mark.parametrize("name", ["attention", "window", "GRU"])
def test_reading_one_token_is_the_end_of_reading_all(script, name):
    model, length = script.build(name, 1).eval(), 40
    tokens = torch.randint(script.TOKENS, (1, length + 1))
    with torch.no_grad():
        expected = model(tokens, 1)[0]
        random = model.state(length)
        if name == "GRU":
            state = model.gru(model.embedding(tokens[:, :-1]))[1][0]
            assert random.shape == state.shape
        else:
            state, x = [], model.embedding(tokens[0, :-1])
            position = torch.arange(length)
            for layer, (key, _) in zip(model.layers, random, strict=True):
                y = layer.norm1(x)
                kept = layer.self_attn.project_source(y, y, position=position)
                state.append(tuple(rows[-key.size(0) :] for rows in kept))
                x = layer(x, script.graph(length, model.seen), position=position)
            assert random[0][0].shape == state[0][0].shape
            assert random[0][0].size(0) == (script.SEEN if name == "window" else length)
        torch.testing.assert_close(
            model.read(tokens[0, -1:], length, state), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("task", ["copy", "recall"])
@pytest.mark.parametrize("name", ["attention", "window"])
def test_two_windows_reach_as_far_as_it_says(script, task, name):
    distances = range(script.LAYERS * script.SEEN - 3, script.LAYERS * script.SEEN + 3)
    assert {script.beyond(distance) for distance in distances} == {False, True}
    model = script.build(name, 2).eval()
    asked = 1 + script.COPIED if task == "copy" else 2 * script.PAIRS
    for distance in distances:
        tokens, answers = draw(script, task, distance, batch=4)
        other = tokens.clone()
        other[:, :asked] = (other[:, :asked] + 1) % script.TOKENS
        with torch.no_grad():
            one, two = (model(x, answers.size(1)) for x in (tokens, other))
        sees = name == "attention" or not script.beyond(distance)
        assert torch.equal(one, two) != sees


class Knowing(nn.Module):
    """Answers right from the given call on."""

    def __init__(self, tokens, first):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.tokens, self.first, self.calls = tokens, first, 0

    def forward(self, tokens, answers):
        self.calls += 1
        right = [
            [after_the_last(row[:end]) for end in range(len(row) - answers + 1, len(row) + 1)]
            for row in tokens.tolist()
        ]
        shift = self.calls <= self.first
        return self.weight * nn.functional.one_hot(
            (torch.tensor(right) + shift) % self.tokens, self.tokens
        )


def test_training_ends_after_a_streak_without_an_error(script):
    options = {"steps": 30, "rate": 0.01, "seed": 0, "name": "test"}
    model = Knowing(script.TOKENS, first=4)
    assert script.learn(model, "recall", 2, **options) == 4 + script.STREAK
    assert script.accuracy(model, "recall", 2, seed=0) == 100
    assert script.learn(Knowing(script.TOKENS, first=11), "recall", 2, **options) is None
    assert script.accuracy(Knowing(script.TOKENS, first=9), "recall", 2, seed=0) == 0


def test_attention_learns_to_copy(script):
    model = script.build("attention", 0)
    script.learn(model, "copy", 4, steps=150, rate=5e-3, seed=0, name="test")
    assert script.accuracy(model, "copy", 4, seed=script.TEST) > 95


@pytest.mark.parametrize("option", ["--distances", "--steps", "--seeds"])
def test_wrong_options_are_named(script, capsys, option):
    with pytest.raises(SystemExit) as stop:
        script.main([option, "0"])
    assert stop.value.code == 2
    assert "must be an integer of at least 1, got 0" in capsys.readouterr().err
