"""Recall at a distance: attention against a recurrent network.

In self-attention any two tokens are one step apart, however much lies between them: a token reads
from each other one directly. A recurrent network reads from left to right and has to carry all that
it may need later in a state of fixed size, past every token in between. That makes a new token
cheap, always the same work, while attention looks at more tokens the longer the text is. But what
is carried can be lost on the way, and what is to be learned has to be learned over all those steps.

Two tasks, with as many noise tokens between question and answer as the *distance* says:

- *copy*: a marker, a string of different symbols, the noise, the marker again; now the string has
  to be said once more. Such tasks are in "Long Short-Term Memory" (Hochreiter and Schmidhuber,
  1997) and "Unitary Evolution Recurrent Neural Networks" (https://arxiv.org/abs/1511.06464).
- *recall*: pairs of key and value, the noise, the keys again in any order; to each its value has to
  be said. It is multi-query associative recall as in "Zoology: Measuring and Improving Recall in
  Efficient Language Models" (https://arxiv.org/abs/2312.04927).

The models are *attention*, two causal layers with rotary positions; *window*, the same model along
a graph in which a token sees only some tokens before it, so that two layers reach back no farther
than twice that; and *GRU*, a `torch.nn.GRU` with about as many parameters. Each is trained from
random weights for each distance, on the same sequences in the same order and for at most the same
number of steps: training ends early once twenty batches in a row had no error. The learning rate of
attention and that of the GRU are for each task the best of the same four, by the accuracy on other
sequences; the window has that of attention. Loss and accuracy are those of the answers only, the
accuracy on sequences that were not used before. *Guess* is what comes out without any memory.

The row *GRU, distance grown* is the same GRU, but not from random weights: at each distance it goes
on from what it learned at the one before. So it has had more steps, and shows what a state of this
size can carry once the shorter distance is learned.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import Graph, keep_pages, patterns
from graphattn.experiment import Report, figure, integer, measure, option_parser, train
from graphattn.nn import GraphTransformerLayer, KeyValueCache, RotaryEncoding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS, COPIED = 16, 8
KEYS, VALUES, PAIRS = 4, 4, 2  # the first symbols are keys, the next ones values
NOISE = 8
MARKER = SYMBOLS + NOISE
TOKENS = MARKER + 1

WIDTH, HEADS, LAYERS = 32, 4, 2
SEEN = 24  # tokens before a token that it sees through the window

BATCH = 32
STREAK = 20  # batches in a row without an error, after which training ends
RATES = (5e-3, 1e-2, 2e-2, 4e-2)
TUNE, TEST = 1_000_000, 2_000_000  # seeds of the trainings to choose a rate by, and of the test
TESTED = 256  # sequences
TIMED = 4  # sequences in a step whose time is taken

ATTENTION, WINDOW, GRU, GROWN = "attention", "window", "GRU", "GRU, distance grown"
STYLES = {ATTENTION: ("C0", "-"), WINDOW: ("C0", ":"), GRU: ("C1", "-"), GROWN: ("C1", "--")}


# The tasks ########################################################################################


def distinct(batch: int, choices: int, take: int, generator: torch.Generator) -> Tensor:
    """``take`` different numbers below ``choices`` in random order, for each of a batch."""
    return torch.rand(batch, choices, generator=generator).argsort(dim=1)[:, :take]


def copy(batch: int, distance: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences ``[batch, tokens]``, and the answers ``[batch, answers]`` to their last tokens."""
    string = distinct(batch, SYMBOLS, COPIED, generator)
    noise = torch.randint(SYMBOLS, MARKER, (batch, distance), generator=generator)
    marker = torch.full((batch, 1), MARKER)
    return torch.cat([marker, string, noise, marker, string[:, :-1]], dim=1), string


def recall(batch: int, distance: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences ``[batch, tokens]``, and the answers ``[batch, answers]`` to their last tokens."""
    key = distinct(batch, KEYS, PAIRS, generator)
    value = torch.randint(KEYS, KEYS + VALUES, (batch, PAIRS), generator=generator)
    noise = torch.randint(SYMBOLS, MARKER, (batch, distance), generator=generator)
    asked = distinct(batch, PAIRS, PAIRS, generator)
    pairs = torch.stack([key, value], dim=2).flatten(1)
    return torch.cat([pairs, noise, key.gather(1, asked)], dim=1), value.gather(1, asked)


TASKS = {"copy": copy, "recall": recall}
GUESS = {  # in percent; who copies has seen what was said already, and symbols do not repeat
    "copy": 100 * statistics.mean(1 / (SYMBOLS - said) for said in range(COPIED)),
    "recall": 100 / VALUES,
}


# The models #######################################################################################


class Attention(nn.Module):
    """Causal layers: a token attends to itself and to all before it, or to ``seen`` of these."""

    def __init__(self, seen: int | None = None) -> None:
        super().__init__()
        self.seen = seen
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            GraphTransformerLayer(
                WIDTH,
                HEADS,
                dim_feedforward=2 * WIDTH,
                dropout=0.0,
                norm_first=True,
                rotary=RotaryEncoding(WIDTH // HEADS),
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, answers: int) -> Tensor:
        """Logits ``[batch, answers, TOKENS]`` of what to answer to the last tokens."""
        x, length = self.embedding(tokens), tokens.size(1)
        for layer in self.layers:
            x = layer(x, graph(length, self.seen), position=torch.arange(length))
        return self.output(self.norm(x[:, -answers:]))

    def state(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """What a new token reads after ``length`` others: keys and values, here random ones."""
        kept = length if self.seen is None else min(length, self.seen)
        shape = (kept, HEADS, WIDTH // HEADS)
        return [(torch.randn(shape), torch.randn(shape)) for _ in self.layers]

    def read(self, token: Tensor, length: int, state: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits ``[1, TOKENS]`` after a new token ``[1]`` that follows ``length`` others."""
        x, sources = self.embedding(token), state[0][0].size(0) + 1
        edges = Graph(patterns.cross(sources, 1), (sources, 1))
        for layer, kept in zip(self.layers, state, strict=True):
            cache = KeyValueCache()
            cache.append(*kept)
            x = layer(x, edges, position=torch.tensor([length]), cache=cache)
        return self.output(self.norm(x))


@lru_cache(maxsize=2)
def graph(length: int, seen: int | None) -> Graph:
    """Along which the tokens of a sequence attend."""
    if seen is None:
        return Graph(patterns.causal(length), length)
    return Graph(patterns.window(length, seen, 0), length)


class Recurrent(nn.Module):
    """A GRU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.gru = nn.GRU(WIDTH, hidden, batch_first=True)
        self.output = nn.Linear(hidden, TOKENS)

    def forward(self, tokens: Tensor, answers: int) -> Tensor:
        """Logits ``[batch, answers, TOKENS]`` of what to answer to the last tokens."""
        return self.output(self.gru(self.embedding(tokens))[0][:, -answers:])

    def state(self, length: int) -> Tensor:
        """What a new token reads after ``length`` others: the hidden state, here a random one."""
        return torch.randn(1, self.gru.hidden_size)

    def read(self, token: Tensor, length: int, state: Tensor) -> Tensor:
        """Logits ``[1, TOKENS]`` after a new token ``[1]`` that follows ``length`` others."""
        return self.output(self.gru(self.embedding(token), state)[0])


def parameters(model: nn.Module) -> int:
    """Their number."""
    return sum(parameter.numel() for parameter in model.parameters())


@cache
def hidden_size() -> int:
    """Of the GRU that has as many parameters as attention, as near as it gets."""
    wanted, sizes = parameters(Attention()), range(WIDTH, 4 * WIDTH)
    return min(sizes, key=lambda size: abs(parameters(Recurrent(size)) - wanted))


def build(name: str, seed: int) -> Attention | Recurrent:
    """A model with random weights."""
    hidden = hidden_size()
    torch.manual_seed(seed)
    if name in (GRU, GROWN):
        return Recurrent(hidden)
    return Attention(SEEN if name == WINDOW else None)


# Training #########################################################################################


def learn(
    model: nn.Module, task: str, distance: int, *, steps: int, rate: float, seed: int, name: str
) -> int | None:
    """Trains until there are no more errors; how many steps that took, or ``None`` for too many."""
    generator = torch.Generator().manual_seed(seed)
    streak = 0

    def loss(step: int) -> Tensor:
        nonlocal streak
        tokens, answer = TASKS[task](BATCH, distance, generator)
        logits = model(tokens, answer.size(1))
        streak = streak + 1 if torch.equal(logits.argmax(dim=-1), answer) else 0
        return F.cross_entropy(logits.flatten(0, 1), answer.flatten())

    trained = train(
        model,
        loss,
        steps=steps,
        lr=rate,
        warmup=min(50, steps // 2),
        until=lambda: streak == STREAK,
        name=f"{task} over {distance}, {name}",
    )
    return len(trained.losses) if streak == STREAK else None


@torch.no_grad()
def accuracy(model: nn.Module, task: str, distance: int, *, seed: int) -> float:
    """Share of right answers, in percent."""
    tokens, answer = TASKS[task](TESTED, distance, torch.Generator().manual_seed(seed))
    return 100 * (model(tokens, answer.size(1)).argmax(dim=-1) == answer).double().mean().item()


def choose_rate(name: str, task: str, distance: int, steps: int) -> tuple[float, dict[str, Any]]:
    """The best rate on sequences that nothing else is done with, and what was found."""
    found = {}
    for rate in RATES:
        model = build(name, TUNE)
        tried = f"{name} at {rate:g}"
        learn(model, task, distance, steps=steps, rate=rate, seed=TUNE, name=tried)
        found[rate] = accuracy(model, task, distance, seed=TUNE + 1)
    best = max(RATES, key=lambda rate: found[rate])
    row = {"task": task, "model": name, "parameters": parameters(model)}
    return best, row | {f"at {rate:g}": found[rate] for rate in RATES} | {"chosen": best}


class Score(NamedTuple):
    """Of one model: test accuracy in percent, and steps until there were no errors, by seed."""

    task: str
    model: str
    distance: int
    accuracies: list[float]
    steps: list[int | None]

    @property
    def mean(self) -> float:
        """Of the accuracies."""
        return statistics.mean(self.accuracies)


def compare(task: str, rates: dict[str, float], args: argparse.Namespace) -> list[Score]:
    """Trains and tests all models at all distances."""
    scores = [Score(task, name, d, [], []) for name in STYLES for d in args.distances]
    for seed in range(args.seed, args.seed + args.seeds):
        for score in scores:
            if score.model != GROWN or score.distance == args.distances[0]:
                model = build(score.model, seed)
            steps = learn(
                model,
                task,
                score.distance,
                steps=args.steps,
                rate=rates[score.model],
                seed=seed,
                name=score.model,
            )
            score.steps.append(steps)
            score.accuracies.append(accuracy(model, task, score.distance, seed=TEST))
    return scores


def times(lengths: list[int], longest: int) -> list[dict[str, Any]]:
    """Milliseconds of a step of training, up to a length, and of a new token."""
    models = {name: build(name, 0) for name in (ATTENTION, WINDOW, GRU)}
    rows = []
    for length in lengths:
        tokens = torch.randint(TOKENS, (TIMED, length))
        row: dict[str, Any] = {"tokens": length}
        for name, model in models.items():
            step = measure(partial(_step, model, tokens)).seconds if length <= longest else None
            row[f"training, {name}"] = None if step is None else 1000 * step
        for name, model in models.items():
            read = partial(model.read, tokens[0, :1], length, model.state(length))
            with torch.no_grad():
                row[f"new token, {name}"] = 1000 * measure(read, repeats=30).seconds
        rows.append(row)
    return rows


def _step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens, 1).sum().backward()


# Results ##########################################################################################


def rows_of(scores: list[Score], cell: Callable[[Score], str]) -> list[dict[str, Any]]:
    """A row for each task and model, a cell for each distance."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for score in scores:
        row = {"task": score.task, "model": score.model}
        rows.setdefault((score.task, score.model), row)[f"{score.distance:,}"] = cell(score)
    return list(rows.values())


def shown_accuracy(score: Score) -> str:
    return f"{score.mean:.1f} ({min(score.accuracies):.1f})"


def shown_steps(score: Score) -> str:
    return ", ".join("-" if steps is None else f"{steps:,}" for steps in score.steps)


def beyond(distance: int) -> bool:
    """Whether the whole question is farther back than the window reaches with all its layers."""
    return distance + 1 > LAYERS * SEEN


def summary(scores: list[Score], distances: list[int]) -> str:
    """What the table of accuracies says, in words."""
    near, far = distances[0], distances[-1]
    lines = []
    for task in TASKS:
        mean = {(score.model, score.distance): score.mean for score in scores if score.task == task}
        lines.append(
            f"- *{task}*: over {near:,} tokens attention has {mean[ATTENTION, near]:.1f}% of the "
            f"answers right and the GRU {mean[GRU, near]:.1f}%, over {far:,} tokens "
            f"{mean[ATTENTION, far]:.1f}% and {mean[GRU, far]:.1f}%. The GRU that went on from "
            f"shorter distances has {mean[GROWN, far]:.1f}% there; guessing gives "
            f"{GUESS[task]:.1f}%."
        )
        hidden = [distance for distance in distances if beyond(distance)]
        if hidden:
            low, high = (most(mean[WINDOW, d] for d in hidden) for most in (min, max))
            lines.append(
                f"- *{task}* through the window: {LAYERS} layers that see {SEEN} tokens back reach "
                f"{LAYERS * SEEN}. At distance {hidden[0]:,} and more the question is farther back,"
                f" and {low:.1f}% to {high:.1f}% of the answers are right."
            )
    known = 100 * (1 / PAIRS + (1 - 1 / PAIRS) / VALUES)
    lines.append(
        f"- Who remembers the values but not whose they are, and says one of them, is right in "
        f"{known:.1f}% of the cases of *recall*."
    )
    for name in (ATTENTION, GRU):
        taken = [steps for score in scores if score.model == name for steps in score.steps]
        solved = [steps for steps in taken if steps is not None]
        span = f", in {min(solved):,} to {max(solved):,} steps" if solved else ""
        lines.append(
            f"- {name[0].upper()}{name[1:]} came to {STREAK} batches without an error in "
            f"{len(solved)} of {len(taken)} trainings{span}."
        )
    return "\n".join(lines)


def summary_of_times(rows: list[dict[str, Any]]) -> str:
    """What the table of times says, in words."""
    lines = []
    for work, what in (("training", "a step of training"), ("new token", "a new token")):
        timed = [row for row in rows if row[f"{work}, {GRU}"] is not None]
        first, last = timed[0], timed[-1]
        growth = ", ".join(
            f"{last[f'{work}, {name}'] / first[f'{work}, {name}']:.1f} times with {name}"
            for name in (ATTENTION, WINDOW, GRU)
        )
        ratio = last[f"{work}, {ATTENTION}"] / last[f"{work}, {GRU}"]
        lines.append(
            f"- From {first['tokens']:,} to {last['tokens']:,} tokens the time of {what} becomes "
            f"{growth}. At the end attention takes {ratio:,.1f} times as long as the GRU."
        )
    return "\n".join(lines)


def draw_accuracy(scores: list[Score]) -> Figure:
    """Accuracy over distance, a panel for each task."""
    picture, panels = figure(len(TASKS))
    for panel, task in zip(panels, TASKS, strict=True):
        for name, (color, style) in STYLES.items():
            own = [score for score in scores if (score.task, score.model) == (task, name)]
            x = [score.distance for score in own]
            panel.plot(x, [s.mean for s in own], style, color=color, marker="o", ms=4, label=name)
            lowest, highest = ([f(s.accuracies) for s in own] for f in (min, max))
            panel.fill_between(x, lowest, highest, color=color, alpha=0.15, lw=0)
        panel.axhline(GUESS[task], color="gray", lw=1, ls="-.", label="guess")
        panel.set_xscale("log", base=2)
        panel.set_xticks(x, [f"{distance:,}" for distance in x])
        panel.set(title=task, ylim=(0, 103), xlabel="noise tokens between question and answer")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("right answers, %")
    panels[0].legend()
    return picture


def draw_times(rows: list[dict[str, Any]]) -> Figure:
    """Time over length, for a step of training and for a new token."""
    picture, panels = figure(2)
    titles = {"training": f"a step of training, {TIMED} sequences", "new token": "a new token"}
    for panel, (work, title) in zip(panels, titles.items(), strict=True):
        for name in (ATTENTION, WINDOW, GRU):
            timed = [row for row in rows if row[f"{work}, {name}"] is not None]
            color, style = STYLES[name]
            x, y = ([row[key] for row in timed] for key in ("tokens", f"{work}, {name}"))
            panel.plot(x, y, style, color=color, marker="o", ms=4, label=name)
        panel.set(title=title, xscale="log", yscale="log", xlabel="tokens", ylabel="time, ms")
        panel.grid(alpha=0.3)
    panels[0].legend()
    return picture


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Trains, measures, reports; returns the table of accuracies."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--distances", type=integer(1), nargs="+", default=[16, 32, 64, 128, 256], metavar="TOKENS"
    )
    parser.add_argument("--steps", type=integer(1), default=500, help="at most, of each training")
    parser.add_argument("--seeds", type=integer(1), default=2, help="trainings of each model")
    args = parser.parse_args(argv)
    tuned_at, lengths, longest = 64, [2**power for power in range(5, 18, 2)], 2048
    if args.quick:
        args.distances, args.steps = [4, 64], 4
        tuned_at, lengths, longest = 4, [16, 64, 256], 64
    args.distances = sorted(set(args.distances))
    keep_pages()  # of tensors that are freed: on a CPU, quicker
    report = Report(__file__, __doc__, args)

    scores, tuned = [], []
    for task in TASKS:
        rates = {}
        for names in ((ATTENTION, WINDOW), (GRU, GROWN)):
            rate, row = choose_rate(names[0], task, tuned_at, args.steps)
            rates |= dict.fromkeys(names, rate)
            tuned.append(row)
        scores += compare(task, rates, args)
    rows = rows_of(scores, shown_accuracy)
    report.table(
        f"Right answers in percent by distance: mean of {args.seeds} seeds (the lowest)", rows
    )
    report.text(summary(scores, args.distances))
    report.picture(
        draw_accuracy(scores),
        f"Right answers over distance: mean of {args.seeds} seeds, and from the lowest to the "
        "highest of them.",
    )
    report.table(
        f"Steps until {STREAK} batches had no error, by seed; a dash for more than {args.steps:,}",
        rows_of(scores, shown_steps),
    )
    report.table(f"Right answers in percent by learning rate, at distance {tuned_at}", tuned)
    timed = times(lengths, longest)
    report.table(
        f"Milliseconds by length: a step of training with {TIMED} sequences, and a new token after "
        "as many others",
        timed,
    )
    report.text(summary_of_times(timed))
    report.picture(draw_times(timed), "Time over length, on logarithmic scales.")
    report.write()
    return rows


if __name__ == "__main__":
    main()
