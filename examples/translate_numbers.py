"""Translation: the words of a number, from English to Chinese.

A Transformer translates "two hundred and thirty-four" into 二百三十四, one character after the
other. Nobody tells it what a number is: it sees pairs of sentences and learns from them. Word by
word it could not be done, as the two languages say numbers in different ways. English counts in
thousands, Chinese in ten-thousands (万): "three hundred thousand" is thirty times 万. "Thirteen"
alone is two characters (十三), in "one hundred and thirteen" it is three (一百一十三). And in each
block of four digits 零 stands for zeros before another digit, however many, but not for those at
the end of the block.

The model is `graphattn.models.Transformer`: an encoder of the English words, a decoder of the
Chinese characters, and between them cross-attention, by which the decoder reads the source. All
three are one operator on different graphs: all words of a sentence to each other, each character to
itself and those after it, all words to all characters. Sentences of a batch have different lengths
and lie side by side; nothing is padded. The numbers have one to eight digits, each length as often
as the others, and in half of them most digits are 0. Some of each length are held out and never
seen in training, except of the ten that have one digit.

A translation is right if every character is. Greedy decoding takes the most likely character each
time; beam search keeps several beginnings and returns the most likely whole. The cache keeps keys
and values of what was written before; without it they are computed anew, with the same result.
The picture shows where the decoder looks while the right translation is written: each row is the
character that comes next, in pinyin (how it is pronounced), each column an English word. For a
digit one can say where to look: at the word that the digit comes from.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from graphattn import keep_pages
from graphattn.experiment import Report, figure, integer, option_parser, train
from graphattn.models import Transformer

try:
    from cn2an import an2cn
    from num2words import num2words
except ImportError as error:
    raise SystemExit("translate_numbers needs number words: pip install num2words cn2an") from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONES = [num2words(number) for number in range(20)]
TENS = [num2words(number) for number in range(20, 100, 10)]
WORDS = [*ONES, *TENS, "hundred", "thousand", "million", "and"]

SOUNDS = ["líng", "yī", "èr", "sān", "sì", "wǔ", "liù", "qī", "bā", "jiǔ"]
PINYIN = dict(zip("零一二三四五六七八九", SOUNDS, strict=True))
PINYIN |= {"十": "shí", "百": "bǎi", "千": "qiān", "万": "wàn"}
CHARACTERS = ["start", "end", *PINYIN]
START, END = 0, 1

DIGITS = 8  # of the longest number
LONGEST = 20  # characters that a translation may have; the right ones have at most 15
BEAMS = {1: "greedy", 4: "beam of 4"}
LISTED = (110, 1001, 10_010, 100_010, 1_000_000, 20_002_000)  # held out, and in the table
DRAWN = (4_613, 305_017, 20_350_480)  # held out, and in the picture


# Numbers and sentences ############################################################################


class Pair(NamedTuple):
    """A number in both languages; ``tgt`` has START before the characters, and END after."""

    number: int
    words: list[str]
    characters: str
    src: Tensor
    tgt: Tensor


def translations(numbers: Iterable[int]) -> list[Pair]:
    """The right ones. Hyphens and commas are left out."""
    made = []
    for number in numbers:
        words, characters = re.findall("[a-z]+", num2words(number)), an2cn(number)
        src = torch.tensor([WORDS.index(word) for word in words])
        tgt = torch.tensor([START, *map(CHARACTERS.index, characters), END])
        made.append(Pair(number, words, characters, src, tgt))
    return made


def draw(digits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers of so many digits. Of those after the first, a tenth or six tenths are 0."""
    value = rng.integers(1, 10, (len(digits), DIGITS))
    value[rng.random(value.shape) < rng.choice([0.1, 0.6], (len(digits), 1))] = 0
    power = np.arange(DIGITS)
    value[power >= digits[:, None]] = 0
    value[power == digits[:, None] - 1] = rng.integers(digits > 1, 10)
    return value @ 10**power


def split(
    train_size: int, test_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers to train on, in which short ones repeat, and others to test on.

    ``test_size`` of each length are held out, but at most a tenth of those that there are; and
    those that are shown.
    """
    held = [np.array(LISTED + DRAWN)]
    for digits in range(2, DIGITS + 1):
        found = np.unique(draw(np.full(4 * test_size + 100, digits), rng))
        held.append(rng.permutation(found)[: min(test_size, 9 * 10 ** (digits - 2))])
    test = np.unique(np.concatenate(held))
    numbers = draw(rng.integers(1, DIGITS + 1, train_size), rng)
    while (known := np.isin(numbers, test)).any():
        numbers[known] = draw(rng.integers(1, DIGITS + 1, known.sum()), rng)
    return numbers, test


# The model ########################################################################################


def cross_entropy(model: Transformer, batch: Sequence[Pair]) -> Tensor:
    """Of each character, given those before it."""
    logits = model(
        torch.cat([pair.src for pair in batch]),
        torch.cat([pair.tgt[:-1] for pair in batch]),
        [len(pair.src) for pair in batch],
        [len(pair.tgt) - 1 for pair in batch],
    )
    return F.cross_entropy(logits, torch.cat([pair.tgt[1:] for pair in batch]))


def translate(
    model: Transformer, pairs: Sequence[Pair], *, num_beams: int = 1, use_cache: bool = True
) -> list[str]:
    """What the model makes of the English words, 256 sentences at once."""
    found = []
    for i in range(0, len(pairs), 256):
        batch = pairs[i : i + 256]
        generated = model.generate(
            torch.cat([pair.src for pair in batch]),
            [len(pair.src) for pair in batch],
            start=START,
            end=END,
            max_length=LONGEST,
            num_beams=num_beams,
            use_cache=use_cache,
        )
        found += ["".join(CHARACTERS[token] for token in row) for row in generated.tokens]
    return found


@torch.no_grad()
def cross_attention(model: Transformer, pair: Pair) -> list[Tensor]:
    """``[characters, words]`` of each layer, the mean of its heads; the last row is the end's."""
    _, weights = model(pair.src, pair.tgt[:-1], return_attention_weights=True)
    return [alpha.mean(dim=1).view(-1, len(pair.src)) for alpha in weights]


def sources(pair: Pair) -> dict[int, int]:
    """Of the place of each digit, 一 to 九, among the characters: that of its word."""
    word_of: dict[int, int] = {}  # each power of ten
    scale = shift = 0
    for place, word in reversed(list(enumerate(pair.words))):
        if word in ("thousand", "million"):
            scale, shift = (3 if word == "thousand" else 6), 0
        elif word == "hundred":
            shift = 2
        elif word in TENS:
            word_of[scale + 1] = place
        elif word in ONES[:10]:
            word_of[scale + shift] = place
        elif word in ONES:
            word_of[scale + 1] = word_of[scale] = place
    places = [place for place, name in enumerate(pair.characters) if name in CHARACTERS[3:12]]
    powers = [power for power in range(DIGITS) if pair.number // 10**power % 10]
    # From the end, as a leading 十 has no 一 before it.
    return {place: word_of[power] for place, power in zip(reversed(places), powers, strict=False)}


# The results ######################################################################################


def percent(hits: Sequence[bool] | np.ndarray) -> float:
    return 100 * float(np.mean(hits))


def is_right(found: Sequence[str], test: Sequence[Pair]) -> list[bool]:
    return [text == pair.characters for text, pair in zip(found, test, strict=True)]


def search(
    model: Transformer, test: Sequence[Pair], beams: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of the table, and the translations."""
    found, milliseconds = [], []
    for use_cache in (True, False):
        start = time.perf_counter()
        found.append(translate(model, test, num_beams=beams, use_cache=use_cache))
        milliseconds.append(1000 * (time.perf_counter() - start) / len(test))
    same = sum(cached == anew for cached, anew in zip(*found, strict=True))
    row = {
        "search": BEAMS[beams],
        "exact match %": percent(is_right(found[0], test)),
        "ms a sentence, with cache": milliseconds[0],
        "ms without": milliseconds[1],
        "same translation": f"{same:,} of {len(test):,}",
    }
    return row, found[0]


def by_digits(test: Sequence[Pair], found: dict[int, list[str]]) -> list[dict[str, Any]]:
    rows = []
    for digits in range(2, DIGITS + 1):
        some = np.array([len(str(pair.number)) == digits for pair in test])
        row: dict[str, Any] = {"digits": digits, "held-out numbers": int(some.sum())}
        for beams, name in BEAMS.items():
            row[f"exact match %, {name}"] = percent(np.array(is_right(found[beams], test))[some])
        rows.append(row)
    return rows


def alignment(model: Transformer, test: Sequence[Pair]) -> str:
    """How often cross-attention points at the word of the digit that comes next."""
    hits, chance = [], []
    for pair in test:
        looked = [weights.argmax(dim=1).tolist() for weights in cross_attention(model, pair)]
        for place, word in sources(pair).items():
            hits.append([rows[place] == word for rows in looked])
            chance.append(1 / len(pair.words))
    layers = " and ".join(
        f"{percent(layer):.2f}% in layer {number}"
        for number, layer in enumerate(zip(*hits, strict=True), 1)
    )
    return (
        "When a digit comes next, the largest weight of cross-attention, in the mean of the heads, "
        f"should be at the word that the digit comes from. Of {len(hits):,} digits it is for "
        f"{layers} of the decoder; at a word picked at random it would be for "
        f"{100 * float(np.mean(chance)):.2f}%."
    )


def heat_maps(model: Transformer, pairs: Sequence[Pair]) -> Figure:
    drawing, axes = figure(len(pairs), width=4.6, height=4.8)
    for axis, pair in zip(axes, pairs, strict=True):
        weights = cross_attention(model, pair)[-1]
        image = axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(pair.words)), pair.words, rotation=60, ha="right")
        axis.set_yticks(range(len(weights)), [*(PINYIN[c] for c in pair.characters), "(end)"])
        axis.set(xlabel="key: English word", title=f"{pair.number:,}")
    axes[0].set_ylabel("query: the character that comes next, in pinyin")
    drawing.colorbar(image, ax=axes, label="weight, mean of the heads of the last layer")
    return drawing


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=integer(1), help="of training (default: 1500)")
    parser.add_argument("--sentences", type=integer(1), help="to train on (default: 20000)")
    parser.add_argument("--batch", type=integer(1), default=128, help="sentences a step")
    args = parser.parse_args(argv)
    args.steps = args.steps or (30 if args.quick else 1500)
    args.sentences = args.sentences or (500 if args.quick else 20_000)
    keep_pages()
    report = Report(__file__, __doc__, args)

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    numbers, held_out = split(args.sentences, 5 if args.quick else 300, rng)
    pairs, test = translations(numbers.tolist()), translations(held_out.tolist())
    width = 32 if args.quick else 128
    model = Transformer(
        width,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=4 * width,
        dropout=0.0,
        src_tokens=len(WORDS),
        tgt_tokens=len(CHARACTERS),
        norm_first=True,
    )

    def loss(step: int) -> Tensor:
        return cross_entropy(model, [pairs[i] for i in rng.integers(len(pairs), size=args.batch)])

    trained = train(model, loss, steps=args.steps, lr=1e-3, warmup=args.steps // 10)
    report.text(
        f"A model of {sum(p.numel() for p in model.parameters()):,} parameters was trained on "
        f"{len(pairs):,} sentences ({len(np.unique(numbers)):,} different numbers), in "
        f"{args.steps:,} steps of {args.batch} sentences and {trained.seconds / 60:.1f} minutes. "
        f"All that follows is about {len(test):,} numbers that were held out."
    )

    translate(model, test)  # to warm up
    rows, found = [], {}
    for beams in BEAMS:
        row, found[beams] = search(model, test, beams)
        rows.append(row)
    report.table("Exact match and time", rows)
    report.table("Exact match by number of digits", by_digits(test, found))

    others = [i for i, pair in enumerate(test) if pair.number not in LISTED]
    drawn = rng.choice(others, 12 - len(LISTED), replace=False).tolist()
    report.table(
        "A dozen translations, greedy",
        [
            {
                "number": test[i].number,
                "English": " ".join(test[i].words),
                "translation": found[1][i],
                "right": "yes"
                if found[1][i] == test[i].characters
                else f"no: {test[i].characters}",
            }
            for i in sorted({*range(len(test))} - {*others} | {*drawn})
        ],
    )
    shown = [pair for pair in test if pair.number in DRAWN]
    report.picture(heat_maps(model, shown), "Cross-attention of three held-out numbers")
    report.text(alignment(model, test))
    report.write()
    return rows


if __name__ == "__main__":
    main()
