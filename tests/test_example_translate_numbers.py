"""translate_numbers: both languages are right, nothing tested was trained on, and it learns."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

EXAMPLES = Path(__file__).parent.parent / "examples"
TABLES = [
    "Exact match and time",
    "Exact match by number of digits",
    "A dozen translations, greedy",
]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("translate_numbers")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def pupil(script):
    """A small model that knows some sentences by heart, and these."""
    torch.manual_seed(0)
    pairs = script.translations([0, 7, 13, 20, 42, 110, 305, 1001, 30_017, 100_010, 20_350_480])
    model = script.Transformer(
        32,
        4,
        1,
        1,
        64,
        dropout=0.0,
        src_tokens=len(script.WORDS),
        tgt_tokens=len(script.CHARACTERS),
        norm_first=True,
    )
    script.train(model, lambda step: script.cross_entropy(model, pairs), steps=120, lr=1e-2)
    return model, pairs


# Numbers and sentences ############################################################################


@pytest.mark.parametrize(
    ("number", "words", "characters"),
    [
        (0, "zero", "零"),
        (10, "ten", "十"),
        (13, "thirteen", "十三"),
        (20, "twenty", "二十"),
        (100, "one hundred", "一百"),
        (101, "one hundred and one", "一百零一"),
        (110, "one hundred and ten", "一百一十"),
        (113, "one hundred and thirteen", "一百一十三"),
        (1001, "one thousand and one", "一千零一"),
        (1010, "one thousand and ten", "一千零一十"),
        (1100, "one thousand one hundred", "一千一百"),
        (10_000, "ten thousand", "一万"),
        (10_010, "ten thousand and ten", "一万零一十"),
        (10_100, "ten thousand one hundred", "一万零一百"),
        (11_000, "eleven thousand", "一万一千"),
        (100_010, "one hundred thousand and ten", "十万零一十"),
        (130_000, "one hundred and thirty thousand", "十三万"),
        (300_000, "three hundred thousand", "三十万"),
        (1_000_000, "one million", "一百万"),
        (1_001_000, "one million one thousand", "一百万一千"),
        (10_100_000, "ten million one hundred thousand", "一千零一十万"),
        (20_002_000, "twenty million two thousand", "二千万二千"),
        (20_020_002, "twenty million twenty thousand and two", "二千零二万零二"),
    ],
)
def test_sentences_are_those_that_people_say(script, number, words, characters):
    (pair,) = script.translations([number])
    assert pair.number == number
    assert " ".join(pair.words) == words
    assert pair.characters == characters
    assert [script.WORDS[token] for token in pair.src] == pair.words
    assert [script.CHARACTERS[token] for token in pair.tgt] == ["start", *characters, "end"]


def english_value(script, words):
    total = part = 0
    for word in words:
        if word in script.ONES:
            part += script.ONES.index(word)
        elif word in script.TENS:
            part += 10 * (2 + script.TENS.index(word))
        elif word == "hundred":
            part *= 100
        elif word != "and":
            total, part = total + part * {"thousand": 1000, "million": 1_000_000}[word], 0
    return total + part


def chinese_value(characters):
    total = block = digit = 0
    for character in characters:
        if character in "零一二三四五六七八九":
            digit = "零一二三四五六七八九".index(character)
        elif character == "万":
            total, block, digit = 10_000 * (block + digit), 0, 0
        else:  # 十 at the beginning has no 一 before it
            block, digit = block + (digit or 1) * 10 ** (1 + "十百千".index(character)), 0
    return total + block + digit


def test_both_languages_say_the_same_number(script, rng):
    numbers = script.draw(rng.integers(1, 9, 3000), rng).tolist()
    pairs = script.translations([*range(1000), *numbers])
    for pair in pairs:
        assert english_value(script, pair.words) == pair.number
        assert chinese_value(pair.characters) == pair.number
    assert max(len(pair.characters) for pair in pairs) == 15 < script.LONGEST
    # Different numbers are different sentences in both languages, and all tokens are needed.
    assert len({pair.characters for pair in pairs}) == len({pair.number for pair in pairs})
    assert set(torch.cat([pair.src for pair in pairs]).tolist()) == {*range(len(script.WORDS))}
    assert set(torch.cat([pair.tgt for pair in pairs]).tolist()) == {*range(len(script.CHARACTERS))}


def test_numbers_have_the_digits_asked_for_and_many_zeros(script, rng):
    digits = np.repeat(np.arange(1, 9), 2000)
    numbers = script.draw(digits, rng)
    text = numbers.astype(str)
    assert [len(number) for number in text] == digits.tolist()
    assert set(text[:2000]) == set("0123456789")
    zeros = np.array([number[1:].count("0") / 7 for number in text[-2000:]])
    assert zeros.mean() == pytest.approx(0.35, abs=0.02)
    assert np.var(zeros) > 0.06  # one rate for all would be 0.0325


def test_nothing_tested_was_trained_on(script, rng):
    train, test = script.split(5000, 300, rng)
    assert len(train) == 5000
    assert not set(train.tolist()) & set(test.tolist())
    assert {*script.LISTED, *script.DRAWN} <= set(test.tolist())
    assert len(set(test.tolist())) == len(test)
    assert set(range(10)) <= set(train.tolist())
    lengths = np.bincount([len(str(number)) for number in test], minlength=9)
    assert lengths[:3].tolist() == [0, 0, 9]
    assert 90 <= lengths[3] <= 92
    assert all(300 <= length <= 303 for length in lengths[4:])
    often = np.bincount([len(str(number)) for number in train], minlength=9)[1:]
    assert (abs(often / 625 - 1) < 0.2).all()


# The model ########################################################################################


def test_the_loss_of_a_batch_is_that_of_its_sentences(script, pupil):
    model, pairs = pupil
    total = count = 0
    for pair in pairs:
        logits = model(pair.src, pair.tgt[:-1])
        total += F.cross_entropy(logits, pair.tgt[1:], reduction="sum")
        count += len(pair.tgt) - 1
    torch.testing.assert_close(script.cross_entropy(model, pairs), total / count)


@pytest.mark.parametrize("beams", [1, 4])
def test_what_was_learned_by_heart_is_translated(script, pupil, beams):
    model, pairs = pupil
    row, found = script.search(model, pairs, beams)
    assert found == [pair.characters for pair in pairs]
    assert row["exact match %"] == 100
    assert row["same translation"] == "11 of 11"
    # More sentences than fit into a batch, and answers to another question are wrong.
    assert script.translate(model, pairs * 30, num_beams=beams) == found * 30
    assert script.is_right(found, pairs[1:] + pairs[:1]) == [False] * 11


def test_exact_match_by_digits_counts_each_number_once(script):
    pairs = script.translations([10, 11, 123, 4567])
    right = [pair.characters for pair in pairs]
    rows = script.by_digits(
        script.translations([*range(10, 12), 123, 4567, 10_000, 100_000, 1_000_000, 10_000_000]),
        {1: [right[0], "", *right[2:], *[""] * 4], 4: [""] * 8},
    )
    assert [row["digits"] for row in rows] == [2, 3, 4, 5, 6, 7, 8]
    assert [row["held-out numbers"] for row in rows] == [2, 1, 1, 1, 1, 1, 1]
    assert [row["exact match %, greedy"] for row in rows] == [50, 100, 100, 0, 0, 0, 0]
    assert {row["exact match %, beam of 4"] for row in rows} == {0}


def test_each_digit_has_the_word_that_it_comes_from(script, rng):
    (pair,) = script.translations([305_017])
    assert pair.characters == "三十万五千零一十七"
    assert " ".join(pair.words) == "three hundred and five thousand and seventeen"
    assert script.sources(pair) == {0: 0, 3: 3, 6: 6, 8: 6}

    for pair in script.translations([*range(1000), *script.draw(rng.integers(4, 9, 1000), rng)]):
        sources = script.sources(pair)
        digits = [i for i, name in enumerate(pair.characters) if name in "一二三四五六七八九"]
        assert sorted(sources) == digits
        for place, word in sources.items():
            digit = "零一二三四五六七八九".index(pair.characters[place])
            value = english_value(script, [pair.words[word]])
            assert digit in {value // 10, value % 10}  # of seventeen both
        # Both read from left to right.
        assert [sources[place] for place in digits] == sorted(sources.values())


def test_cross_attention_is_that_of_one_sentence(script, pupil):
    model, pairs = pupil
    pair = pairs[-1]
    (weights,) = script.cross_attention(model, pair)
    assert weights.shape == (len(pair.characters) + 1, len(pair.words))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(weights)))


def test_alignment_counts_where_the_largest_weights_are(script, monkeypatch):
    pairs = script.translations([305_017, 42])

    def first_layer_right_second_at_the_first_word(model, pair):
        right = torch.zeros(len(pair.characters) + 1, len(pair.words))
        for place, word in script.sources(pair).items():
            right[place, word] = 1
        first = torch.zeros_like(right)
        first[:, 0] = 1
        return [right, first]

    monkeypatch.setattr(script, "cross_attention", first_layer_right_second_at_the_first_word)
    text = script.alignment(None, pairs)
    assert "Of 6 digits it is for 100.00% in layer 1 and 33.33% in layer 2" in text
    assert text.endswith("for 26.19%.")  # 4 digits of 7 words, 2 of 2


# The script #######################################################################################


def test_quick_run_writes_page_numbers_and_picture_and_repeats_itself(script, tmp_path, capsys):
    pages = []
    for name in ("a", "b"):
        rows = script.main(["--quick", "--threads", "1", "--out", str(tmp_path / name)])
        page = (tmp_path / name / "translate_numbers.md").read_text(encoding="utf-8")
        result = json.loads((tmp_path / name / "translate_numbers.json").read_text("utf-8"))
        for row in result["tables"][TABLES[0]]:
            assert row.pop("ms a sentence, with cache") > 0
            assert row.pop("ms without") > 0
        pages.append((result["tables"], page.split("When a digit comes next")[1].split("\n")[0]))
    assert pages[0] == pages[1]

    tables = result["tables"]
    assert list(tables) == TABLES
    assert [row["search"] for row in rows] == ["greedy", "beam of 4"]
    (held_out,) = {row["same translation"] for row in rows}
    count = sum(row["held-out numbers"] for row in tables[TABLES[1]])
    assert held_out == f"{count} of {count}"
    assert len(tables[TABLES[2]]) == 12
    assert {*script.LISTED} <= {row["number"] for row in tables[TABLES[2]]}
    for row in tables[TABLES[2]]:
        (pair,) = script.translations([row["number"]])
        right = row["translation"] == pair.characters
        assert row["right"] == ("yes" if right else f"no: {pair.characters}")
    assert page.startswith("# Translation: the words of a number, from English to Chinese\n")
    assert "![Cross-attention of three held-out numbers](translate_numbers-1.png)" in page
    picture = tmp_path / "b" / "translate_numbers-1.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"about {count} numbers that were held out" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["num2words", "cn2an"])
def test_a_missing_package_is_named(script, monkeypatch, package):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "translate_numbers")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="pip install num2words cn2an"):
        importlib.import_module("translate_numbers")


def test_wrong_options_are_named(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--steps", "0"])
    assert stop.value.code == 2
    assert "must be an integer of at least 1, got 0" in capsys.readouterr().err
