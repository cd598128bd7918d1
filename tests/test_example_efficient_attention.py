"""The example of efficient attention: its costs, errors and expressions, and that it is fair."""

import argparse
import importlib
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from graphattn import patterns

EXAMPLES = Path(__file__).parent.parent / "examples"
MEASURED = ("graph, ms", "layer, ms", "memory, MB", "ms per step")
NAMES = ["exact", "window", "BigBird", "Performer", "Linformer", "Reformer"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("efficient_attention")


def encoder(script, name, budget=8):
    torch.manual_seed(0)
    return script.Encoder(name, budget, 64, 16, 2).eval()


def generator():
    return torch.Generator().manual_seed(0)


def options(script, **changed):
    """Those of a quick run."""
    return argparse.Namespace(**{"seed": 0, **script.QUICK, **changed})


def test_quick_run_writes_all_and_repeats_itself(script, tmp_path, capsys):
    runs = []
    for name in ("first", "second"):
        out = tmp_path / name
        rows = script.main(["--quick", "--threads", "1", "--out", str(out)])
        written = json.loads((out / "efficient_attention.json").read_text())
        assert [row for table in written["tables"].values() for row in table] == rows
        assert written["options"]["steps"] == "5"
        for number in (1, 2, 3):
            picture = out / f"efficient_attention-{number}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")
        runs.append([{k: v for k, v in row.items() if k not in MEASURED} for row in rows])
    assert runs[0] == runs[1]

    costs, errors, learned = written["tables"].values()
    assert [row["attention"] for row in costs] == 2 * ["exact, graph", "exact, fused", *NAMES[1:]]
    assert all(row["layer, ms"] > 0 for row in costs)
    built = {row["attention"] for row in costs if row["graph, ms"] is not None}
    assert built == {"exact, graph", "window", "BigBird"}
    assert [(row["tokens"], row["attention"]) for row in errors] == [
        (length, name) for length in (64, 128) for name in NAMES[1:]
    ]
    assert [row["attention"] for row in learned] == [
        *NAMES,
        *("chance", "majority", "outermost operator"),
    ]
    page = (tmp_path / "first" / "efficient_attention.md").read_text()
    assert page.startswith("# Efficient attention: what is saved")
    for sentence in ("From 64 tokens to 128, time grows", "the error is least for", "Exact attent"):
        assert sentence in page
        assert sentence in capsys.readouterr().out + page


def test_lengths_and_steps_are_options(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "METHODS", {name: script.METHODS[name] for name in NAMES[:2]})
    monkeypatch.setattr(script, "GRAPH_LIMIT", 32)
    options = ["--quick", "--threads", "1", "--out", str(tmp_path)]
    rows = script.main([*options, "--lengths", "48", "32", "--steps", "1"])
    graphs = [row["tokens"] for row in rows if row["attention"] == "exact, graph"]
    assert graphs == [32]
    assert "1 steps of 32 expressions" in (tmp_path / "efficient_attention.md").read_text()
    with pytest.raises(SystemExit):
        script.main(["--lengths", "1"])
    assert "must be an integer of at least 2, got 1" in capsys.readouterr().err


# Forms of attention ###############################################################################


def test_exact_attention_is_the_same_in_both_forms(script):
    exact, x = script.setting("sharp", 50, 0)
    sizes = torch.tensor([50])
    found = [
        script.COSTS[name].attention(exact, 8, 50)(x, script.COSTS[name].where(sizes, 8, None))
        for name in ("exact, graph", "exact, fused")
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["window", "BigBird", "Reformer"])
def test_with_a_large_budget_edges_are_all(script, monkeypatch, name):
    monkeypatch.setattr(script, "RESTRICTED", {name: script.METHODS[name]})
    assert all(script.errors(30, 240, 0)[0][kind] < 1e-5 for kind in script.SETTINGS)
    assert all(script.errors(30, 16, 0)[0][kind] > 1e-3 for kind in script.SETTINGS)


def test_error_of_the_performer_falls_with_the_budget(script, monkeypatch):
    monkeypatch.setattr(script, "RESTRICTED", {"Performer": script.METHODS["Performer"]})
    few, many = (
        np.mean([script.errors(64, budget, seed)[0]["near"] for seed in range(3)])
        for budget in (32, 2048)
    )
    assert many < 0.8 * few


@pytest.mark.parametrize(("name", "least"), [("window", 128), ("BigBird", 110)])
def test_a_token_sees_as_many_as_the_budget_says(script, name, least):
    graph = script.METHODS[name].where(torch.tensor([1000]), 128, generator())
    inside = graph.in_degree()[200:-200].float()
    assert least <= inside.mean() <= 129


@pytest.mark.parametrize("name", NAMES)
def test_expressions_of_a_batch_do_not_see_each_other(script, name):
    # BigBird draws others for each batch, unless it takes all.
    model = encoder(script, name, 240 if name == "BigBird" else 8)
    tokens, length = torch.randint(1, 16, (90,)), torch.tensor([20, 40, 30])
    with torch.no_grad():
        together = model(tokens, length, generator())
        alone = [
            model(part, torch.tensor([len(part)]), generator())
            for part in tokens.split(length.tolist())
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


# Settings #########################################################################################


def attention_of(exact, x):
    """To how many keys queries attend, and the share of the weights of those nearby."""
    query, key, _ = (part.transpose(0, 1) for part in exact.project(x, x, x))
    weights = (query @ key.mT / np.sqrt(32)).softmax(-1).detach().double()
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    near = patterns.to_mask(patterns.window(len(x), 32), len(x))
    return entropy.exp().mean(), weights[:, near].sum() / weights.sum()


@pytest.mark.parametrize(
    ("kind", "attended", "near"),
    [
        ("flat", (200, 256), (0.2, 0.3)),
        ("sharp", (15, 25), (0.2, 0.3)),
        ("near", (15, 25), (0.9, 1)),
    ],
)
def test_attention_is_what_it_is_called(script, kind, attended, near):
    found = attention_of(*script.setting(kind, 256, 0))
    assert attended[0] < found[0] < attended[1]
    assert near[0] < found[1] < near[1]


def test_near_tokens_are_alike(script):
    _, x = script.setting("near", 256, 0)
    # As varied as the tokens of the others, but what is far apart has nothing in common.
    assert x.std() == pytest.approx(1, abs=0.1)
    common = [(x[:-shift] * x[shift:]).mean().item() for shift in (1, 16, 32)]
    assert common == pytest.approx([31 / 32, 0.5, 0], abs=0.1)


# ListOps ##########################################################################################


def evaluate(words):
    """Value, nesting and numbers of arguments, with a stack, apart from how they are made."""
    stack, deepest, counts = [], 0, []
    for word in words:
        if word.startswith("["):
            stack.append([word[1:]])
            deepest = max(deepest, len(stack))
            continue
        if word == "]":
            operator, *values = stack.pop()
            counts.append(len(values))
            word = {
                "MAX": np.max,
                "MIN": np.min,
                "MED": np.median,
                "SM": lambda values: np.sum(values) % 10,
            }[operator](values)
        if not stack:
            return int(word), deepest, counts
        stack[-1].append(int(word))
    raise ValueError("not closed")


def test_the_papers_example(script):
    text = "[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]"
    words = text.split()
    assert evaluate(words) == (5, 2, [2, 5, 6])
    assert set(words) <= set(script.WORDS)


def test_values_of_expressions(script):
    names = list(script.WORDS)
    assert len(names) == 16
    seen, operators = set(), Counter()
    for part in script.listops(options(script, expressions=(1500, 500), tokens=(20, 60))):
        for tokens, value in zip(part.tokens, part.value.tolist(), strict=True):
            first, *words = (names[token] for token in tokens)
            assert first == "class"
            assert 20 <= len(words) <= 60
            found, deepest, counts = evaluate(words)
            assert found == value
            assert deepest <= 3
            assert all(2 <= count <= 5 for count in counts)
            assert tuple(words) not in seen
            seen.add(tuple(words))
            operators[words[0]] += 1
    assert len(seen) == 2000
    assert set(operators) == {"[MAX", "[MIN", "[MED", "[SM"}
    assert min(operators.values()) > 400


def test_expressions_are_drawn_as_the_arena_does(script):
    rng = random.Random(0)
    drawn = [script.expression(rng, 2, 5)[0] for _ in range(2000)]
    counts = [evaluate(words)[2] for words in drawn]
    arguments = np.array([count[-1] for count in counts])  # of the outermost, which closes last
    nested = sum(len(count) - 1 for count in counts)
    assert np.bincount(arguments)[2:] / 2000 == pytest.approx(np.full(4, 0.25), abs=0.04)
    assert nested / arguments.sum() == pytest.approx(0.25, abs=0.02)
    digits = Counter(word for words in drawn for word in words if word.isdigit())
    assert len(digits) == 10
    assert min(digits.values()) > 0.9 * max(digits.values())


def test_expressions_as_long_as_those_of_the_arena(script):
    args = options(script, expressions=(6, 2), tokens=(500, 2000), depth=10, arguments=10)
    names = list(script.WORDS)
    drawn = [[names[token] for token in tokens[1:]] for tokens in script.listops(args)[0].tokens]
    assert all(500 <= len(words) <= 2000 for words in drawn)
    assert max(evaluate(words)[1] for words in drawn) > 3
    assert max(max(evaluate(words)[2]) for words in drawn) == 10


def test_too_few_expressions(script, monkeypatch):
    monkeypatch.setattr(script, "TRIES", 1000)
    with pytest.raises(SystemExit, match=r"of 20 to 40 tokens, 1 deep and with 5 arguments: 0 f"):
        script.listops(options(script, depth=1))


def test_models_differ_in_attention_only(script, monkeypatch):
    full = script.FULL
    shape = (full["listops_budget"], full["tokens"][1] + 1, full["width"], full["layers"])
    models = {}
    for name in NAMES:
        torch.manual_seed(0)
        models[name] = script.Encoder(name, *shape)

    def values(model):
        """Parameters, but for Linformer's mixtures; names differ by how attention is wrapped."""
        return [p for n, p in model.named_parameters() if not n.endswith("key_projection")]

    for name, model in models.items():
        for ours, theirs in zip(values(model), values(models["exact"]), strict=True):
            assert torch.equal(ours, theirs), name
    size = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert size["Linformer"] - size["exact"] == shape[0] * shape[1]
    assert size["Linformer"] < 1.03 * size["exact"]


@pytest.mark.parametrize("name", NAMES)
def test_every_model_learns(script, name, monkeypatch):
    """What the outermost operator says is learned by all within few steps."""
    monkeypatch.setattr(script, "RATE", 1e-2)
    args = options(script, expressions=(600, 200), tokens=(4, 20), steps=60)
    sets = script.listops(args)
    row = script.learn(name, *sets, args)
    assert row["accuracy, %"] > 5 + script.most_frequent(*sets, lambda words: 0)


def test_baselines(script):
    learn, test = script.listops(options(script, expressions=(400, 100)))
    answers = Counter(learn.value.tolist()).most_common(1)[0][0]
    majority = 100 * np.mean([value == answers for value in test.value.tolist()])
    assert script.most_frequent(learn, test, lambda words: 0) == pytest.approx(majority)
    assert script.most_frequent(test, test, lambda words: hash(tuple(words.tolist()))) == 100
    operator = script.most_frequent(learn, test, lambda words: int(words[1]))
    assert operator > majority


# Results ##########################################################################################


def test_growth_where_memory_is_unknown(script):
    costs = [
        {"tokens": n, "attention": "window", "layer, ms": float(n), "memory, MB": None}
        for n in (10, 40)
    ]
    assert script.growth(costs, 10, 40) == (
        "From 10 tokens to 40, time grows by factors of 4.0 (window); no memory was measured."
    )
