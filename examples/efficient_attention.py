"""Efficient attention: what is saved, what is lost, and what a model still learns.

Exact self-attention compares each token with each: its cost grows with the square of the length.
Five restricted forms of it give each token a *budget* of things to compare it with that does not
grow. A **window** takes the tokens around it. **BigBird** takes fewer of these, some tokens at
random, and a few tokens that see everything and are seen by everyone. **Reformer** hashes queries
and keys, and takes the tokens in the same bucket in any of two rounds of hashing, in each head
other ones. These three are exact attention along fewer edges. The others change the formula:
**Performer** replaces the exponentials of the softmax by products of random features, as many as
the budget says, and **Linformer** the keys and values by learned mixtures of them, again as many.

*Cost* is the time and the peak memory of one layer, forward and backward. Exact attention comes in
two forms that give the same numbers. Along the edges of the complete *graph* it stores an index for
each pair of tokens, which is why it is not run on the longest sequences. The *fused* kernel of
PyTorch goes over the same pairs piece by piece and stores none: its memory is linear and only its
time is quadratic. The graphs of a window and of BigBird are built once for all layers and steps,
which is timed apart but counted in the memory; Reformer hashes anew in every call. Below a megabyte
or so, what is measured as memory is mostly the allocator's doing.

*Error* is the difference from exact attention with the same weights, ``|O - O_exact| / |O_exact|``,
so that 1 is the error of answering zero. It depends on what there is to attend to. With *flat*
attention, that of weights as they are drawn on independent tokens, nearly all tokens count alike,
and what is averaged over them nearly cancels. *Sharp* has the same tokens but longer queries and
keys, so that a query has about twenty tokens to attend to (the exponential of the entropy of its
weights), anywhere. *Near* is as sharp, but neighbours are alike and queries look for what they are
like, so that what counts is mostly close by. Linformer's mixtures are random here: they are meant
to be trained, and its error is that before training.

*ListOps* is a task of the [Long Range Arena](https://arxiv.org/abs/2011.04006), from the [ListOps
paper](https://arxiv.org/abs/1804.06028). An expression such as `[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8
9 2 ] ]` has a value from 0 to 9, here 5, and the model has to say it. The operators are maximum,
minimum, median (rounded down) and sum modulo ten; each argument is an expression with a
probability of 1/4, else a digit. The arena's expressions have 500 to 2,000 tokens, up to ten
arguments and are nested up to ten deep (`--tokens 500 2000 --depth 10 --arguments 10`); by default
those here are shorter and flatter, so that six models can be trained on a CPU. All models are the
same encoder with another attention. They have the same parameters (Linformer has its mixtures
besides, shared by its layers), start from the same numbers, see the same batches for as many steps,
at the same learning rate. Three baselines put the numbers in place: *chance*, the *majority*
answer, and the most frequent answer for each *outermost operator*, which needs one token only.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import Graph, keep_pages, patterns
from graphattn.experiment import PeakMemory, Report, figure, integer, measure, option_parser, train
from graphattn.nn import (
    GPSLayer,
    GraphMultiheadAttention,
    GraphSelfAttention,
    LinformerAttention,
    PerformerAttention,
    ReformerAttention,
    SinusoidalEncoding,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEADS = 128, 4  # of the layer that is measured
GRAPH_LIMIT = 4096  # tokens of the longest complete graph: 17 million edges

FULL: dict[str, Any] = {
    "lengths": [256, 1024, 4096, 16384],
    "budget": 128,
    "expressions": (100_000, 4000),  # to train on, to test on
    "tokens": [20, 60],  # of an expression, at least and at most
    "depth": 3,
    "arguments": 5,
    "listops_budget": 16,
    "width": 64,
    "layers": 3,
    "steps": 5000,
}
QUICK: dict[str, Any] = {
    "lengths": [64, 128],
    "budget": 16,
    "expressions": (500, 100),
    "tokens": [20, 40],
    "depth": 3,
    "arguments": 5,
    "listops_budget": 8,
    "width": 16,
    "layers": 2,
    "steps": 5,
}
NESTED = 0.25  # share of arguments that are expressions
TRIES = 100_000  # in a row without a new expression, after which it is said that there are none
BATCH, RATE = 32, 3e-3

# Forms of attention ###############################################################################

Where = Graph | Tensor


class Method(NamedTuple):
    """What becomes of an exact layer, and what the new one is called with beside ``x``.

    ``attention(exact, budget, longest)`` is a module, ``where(length, budget, generator)`` a graph,
    or the sequence of each token.
    """

    attention: Callable[[GraphMultiheadAttention, int, int], nn.Module]
    where: Callable[[Tensor, int, torch.Generator], Where]


def along(pattern: Callable[[Tensor, int, torch.Generator], Tensor]) -> Method:
    """Exact attention along the edges of a pattern."""

    def where(length: Tensor, budget: int, generator: torch.Generator) -> Graph:
        edge_index = pattern(length, budget, generator)
        return Graph(edge_index, int(length.sum()), validate=False)

    return Method(lambda exact, budget, longest: GraphSelfAttention(exact), where)


def layer(attention: Callable[[GraphMultiheadAttention, int, int], nn.Module]) -> Method:
    """A layer that finds out by itself what it compares."""
    return Method(attention, lambda length, budget, generator: patterns.batch_vector(length))


class Fused(nn.Module):
    """Exact attention of one sequence, by PyTorch's kernel."""

    def __init__(self, exact: GraphMultiheadAttention) -> None:
        super().__init__()
        self.exact = exact

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        parts = (part.transpose(0, 1).unsqueeze(0) for part in self.exact.project(x, x, x))
        out = F.scaled_dot_product_attention(*parts)  # [1, H, N, D]
        return self.exact.out_proj(out.squeeze(0).transpose(0, 1).flatten(1))


METHODS = {
    "exact": along(lambda length, budget, generator: patterns.complete(length)),
    "window": along(lambda length, budget, generator: patterns.window(length, budget // 2)),
    "BigBird": along(
        lambda length, budget, generator: patterns.big_bird(
            length, budget // 4, 3 * budget // 8, budget // 8, generator=generator
        )
    ),
    "Performer": layer(
        lambda exact, budget, longest: PerformerAttention.from_exact(exact, num_features=budget)
    ),
    "Linformer": layer(
        lambda exact, budget, longest: LinformerAttention.from_exact(
            exact, longest, projected_length=budget
        )
    ),
    "Reformer": layer(
        lambda exact, budget, longest: ReformerAttention.from_exact(
            exact, num_hashes=2, bucket_size=budget // 2
        )
    ),
}
RESTRICTED = {name: method for name, method in METHODS.items() if name != "exact"}
FUSED = layer(lambda exact, budget, longest: Fused(exact))
COSTS = {"exact, graph": METHODS["exact"], "exact, fused": FUSED, **RESTRICTED}

# Cost and error of a layer ########################################################################

SETTINGS = ("flat", "sharp", "near")
ATTENDED = 20  # tokens that a query attends to where attention is sharp
REACH = 32  # tokens from which on two have nothing in common where attention is near


@torch.no_grad()
def setting(kind: str, length: int, seed: int) -> tuple[GraphMultiheadAttention, Tensor]:
    """A layer, and tokens ``[length, WIDTH]`` for it."""
    torch.manual_seed(seed)
    exact = GraphMultiheadAttention(WIDTH, HEADS)
    if kind == "near":
        exact.in_proj_weight[WIDTH : 2 * WIDTH] = exact.in_proj_weight[:WIDTH]
        x = math.sqrt(REACH) * torch.randn(length + REACH - 1, WIDTH).unfold(0, REACH, 1).mean(-1)
    else:
        x = torch.randn(length, WIDTH)
    if kind != "flat":
        # How much longer queries and keys must be, by bisection between 1 and 100 times.
        query, key, _ = (part.transpose(0, 1) for part in exact.project(x, x, x))
        query, least, most = query[:, torch.randperm(length)[:64]], 0.0, math.log(100)
        for _ in range(20):
            middle = (least + most) / 2
            too_flat = attended(math.exp(2 * middle) * query, key) > ATTENDED
            least, most = (middle, most) if too_flat else (least, middle)
        exact.in_proj_weight[: 2 * WIDTH] *= math.exp(least)
    return exact, x


def attended(query: Tensor, key: Tensor) -> float:
    """To how many keys ``[H, N, D]`` a query attends: the exponential of the weights' entropy."""
    weights = (query @ key.mT / math.sqrt(query.size(-1))).softmax(-1)
    return torch.special.entr(weights).sum(-1).exp().mean().item()


def cost(name: str, length: int, budget: int, seed: int) -> dict[str, Any]:
    """Time and peak memory of a layer, forward and backward, where attention is sharp."""
    exact, x = setting("sharp", length, seed)
    attention = COSTS[name].attention(exact, budget, length)
    gradient = torch.randn_like(x)
    x.requires_grad_()

    def build() -> Where:
        generator = torch.Generator().manual_seed(seed)
        return COSTS[name].where(torch.tensor([length]), budget, generator)

    def step(where: Where) -> None:
        attention(x, where).backward(gradient)

    time = measure(partial(step, build()), repeats=3 if length <= GRAPH_LIMIT else 1)
    with PeakMemory(x.device) as peak:
        step(build())
    ready = None  # both orders of the edges, as forward and backward need them
    if isinstance(attention, GraphSelfAttention):
        ready = measure(lambda: build().dst_index, repeats=1).seconds
    return {
        "tokens": length,
        "attention": name,
        "graph, ms": None if ready is None else 1000 * ready,
        "layer, ms": 1000 * time.seconds,
        "memory, MB": None if peak.bytes is None else peak.bytes / 1e6,
    }


@torch.no_grad()
def errors(length: int, budget: int, seed: int) -> list[dict[str, Any]]:
    """A row for each restricted form, with its error in each setting."""
    rows = {name: {"tokens": length, "attention": name} for name in RESTRICTED}
    for kind in SETTINGS:
        exact, x = setting(kind, length, seed)
        found = {}
        for name, method in {"exact": FUSED, **RESTRICTED}.items():
            generator = torch.Generator().manual_seed(seed)
            where = method.where(torch.tensor([length]), budget, generator)
            found[name] = method.attention(exact, budget, length)(x, where)
        for name, row in rows.items():
            row[kind] = ((found[name] - found["exact"]).norm() / found["exact"].norm()).item()
    return list(rows.values())


# ListOps ##########################################################################################

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
WORDS = {word: i for i, word in enumerate(["class", *"0123456789", *OPERATORS, "]"])}


def expression(rng: random.Random, depth: int, arguments: int) -> tuple[list[str], int]:
    """A random expression, nested at most ``depth`` deep, and its value."""
    operator = rng.choice(list(OPERATORS))
    words, values = [operator], []
    for _ in range(rng.randint(2, arguments)):
        if depth > 1 and rng.random() < NESTED:
            inner, value = expression(rng, depth - 1, arguments)
        else:
            value = rng.randrange(10)
            inner = [str(value)]
        words += inner
        values.append(value)
    return [*words, "]"], OPERATORS[operator](values)


class Expressions(NamedTuple):
    """The class token and the words of each expression, and its value ``[N]``."""

    tokens: list[Tensor]
    value: Tensor

    def batch(self, index: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens of some expressions side by side, and the length of each."""
        tokens = [self.tokens[i] for i in index]
        return torch.cat(tokens), torch.tensor([len(words) for words in tokens])


def listops(args: argparse.Namespace) -> tuple[Expressions, Expressions]:
    """Expressions to train on and others to test on, none of them twice."""
    rng, found, tries = random.Random(args.seed), {}, 0
    least, most = args.tokens
    while len(found) < sum(args.expressions):
        words, value = expression(rng, args.depth, args.arguments)
        known, tries = len(found), tries + 1
        if least <= len(words) <= most:
            found[tuple(words)] = value
        if len(found) > known:
            tries = 0
        if tries == TRIES:
            raise SystemExit(
                f"There are too few expressions of {least} to {most} tokens, {args.depth} deep and "
                f"with {args.arguments} arguments: {len(found):,} found. Allow more of them."
            )
    tokens = [torch.tensor([WORDS["class"], *map(WORDS.get, words)]) for words in found]
    value = torch.tensor(list(found.values())).split(args.expressions)
    size = args.expressions[0]
    return Expressions(tokens[:size], value[0]), Expressions(tokens[size:], value[1])


class Encoder(nn.Module):
    """A Transformer's encoder that reads the value of an expression at the class token."""

    def __init__(self, name: str, budget: int, longest: int, width: int, layers: int) -> None:
        super().__init__()
        self.where = partial(METHODS[name].where, budget=budget)
        self.embedding = nn.Embedding(len(WORDS), width)
        self.position = SinusoidalEncoding(width)
        exact = [GraphMultiheadAttention(width, HEADS) for _ in range(layers)]
        self.layers = nn.ModuleList(
            GPSLayer(width, attention, None, activation="gelu", norm_first=True)
            for attention in exact
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        # Only now is attention changed: all else starts from the same numbers.
        for block, attention in zip(self.layers, exact, strict=True):
            block.local = METHODS[name].attention(attention, budget, longest)
            if isinstance(block.local, LinformerAttention):
                block.local.key_projection = self.layers[0].local.key_projection

    def forward(self, tokens: Tensor, length: Tensor, generator: torch.Generator) -> Tensor:
        where = self.where(length, generator=generator)
        x = self.embedding(tokens) + self.position(patterns.position(length))
        for block in self.layers:
            x = block(x, where)
        return self.head(self.norm(x[length.cumsum(0) - length]))


def learn(
    name: str, train_set: Expressions, test_set: Expressions, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains an encoder with a form of attention and tests it: a row of the results."""
    torch.manual_seed(args.seed)
    model = Encoder(name, args.listops_budget, 1 + args.tokens[1], args.width, args.layers)
    generator = torch.Generator().manual_seed(args.seed)
    size = len(train_set.tokens)
    epochs = 1 + args.steps * BATCH // size
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(epochs)])

    def loss(step: int) -> Tensor:
        index = order[step * BATCH : (step + 1) * BATCH]
        out = model(*train_set.batch(index.tolist()), generator)
        return F.cross_entropy(out, train_set.value[index])

    trained = train(
        model, loss, steps=args.steps, lr=RATE, warmup=args.steps // 10, name=f"ListOps, {name}"
    )
    generator.manual_seed(args.seed)
    with torch.no_grad():
        parts = torch.arange(len(test_set.tokens)).split(100)
        found = [model(*test_set.batch(part.tolist()), generator).argmax(dim=1) for part in parts]
    return {
        "attention": name,
        "accuracy, %": percent(torch.cat(found), test_set.value),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ms per step": 1000 * trained.seconds / args.steps,
    }


def percent(found: Tensor, value: Tensor) -> float:
    return 100 * (found == value).double().mean().item()


def most_frequent(
    train_set: Expressions, test_set: Expressions, key: Callable[[Tensor], int]
) -> float:
    """Percent of correct answers of who knows no more of an expression than a key."""
    seen = defaultdict(Counter)
    for words, value in zip(train_set.tokens, train_set.value.tolist(), strict=True):
        seen[key(words)][value] += 1
    best = {k: counter.most_common(1)[0][0] for k, counter in seen.items()}
    return percent(torch.tensor([best[key(words)] for words in test_set.tokens]), test_set.value)


# Results ##########################################################################################

COLOURS = dict(
    zip(
        [*COSTS, "exact"],
        ["grey", "black", "tab:blue", "tab:cyan", "tab:red", "tab:orange", "tab:green", "black"],
        strict=True,
    )
)


def by_name(rows: list[dict[str, Any]], column: str) -> dict[str, dict[int, float]]:
    """A figure of each form of attention by length, where there is one."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row[column]:
            found.setdefault(row["attention"], {})[row["tokens"]] = row[column]
    return found


def draw(rows: list[dict[str, Any]], panels: dict[str, str]) -> Figure:
    """Curves of columns over the length, both axes logarithmic; a panel for each title."""
    page, axes = figure(len(panels))
    for axis, (title, column) in zip(axes, panels.items(), strict=True):
        for name, curve in by_name(rows, column).items():
            axis.plot(list(curve), list(curve.values()), "o-", color=COLOURS[name], label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        lengths = sorted({row["tokens"] for row in rows})
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0].legend()
    return page


def draw_accuracy(rows: list[dict[str, Any]], baselines: dict[str, float]) -> Figure:
    page, axis = figure(width=7.0)
    names = [row["attention"] for row in rows]
    height = [row["accuracy, %"] for row in rows]
    bars = axis.bar(names, height, color=[COLOURS[name] for name in names], alpha=0.8)
    axis.bar_label(bars, fmt="%.1f")
    for style, (name, share) in zip((":", "--", "-."), baselines.items(), strict=True):
        axis.axhline(share, color="black", linestyle=style, linewidth=1, label=name)
    axis.set(ylabel="correct answers to ListOps, %", ylim=(0, 1.25 * max(height)))
    axis.legend(ncols=3, loc="upper center")
    return page


def growth(costs: list[dict[str, Any]], before: int, last: int) -> str:
    parts = []
    for column, what in (("layer, ms", "time"), ("memory, MB", "memory")):
        curves = by_name(costs, column).items()
        grown = {name: c[last] / c[before] for name, c in curves if {before, last} <= c.keys()}
        times = ", ".join(f"{factor:.1f} ({name})" for name, factor in grown.items())
        parts.append(f"{what} grows by factors of {times}" if times else f"no {what} was measured")
    return f"From {before:,} tokens to {last:,}, {'; '.join(parts)}."


def least_error(rows: list[dict[str, Any]]) -> str:
    last = rows[-1]["tokens"]
    parts = []
    for kind in SETTINGS:
        best = min((row for row in rows if row["tokens"] == last), key=lambda row: row[kind])
        parts.append(f"{best['attention']} where attention is {kind} ({best[kind]:.2g})")
    return f"At {last:,} tokens the error is least for {', for '.join(parts)}."


def summary(rows: list[dict[str, Any]], baselines: dict[str, float], tests: int) -> str:
    exact, *others = rows
    best = max(others, key=lambda row: row["accuracy, %"])
    share = exact["accuracy, %"] / 100
    return (
        f"Exact attention answers {exact['accuracy, %']:.1f}% of {tests:,} test expressions, who "
        f"knows the outermost operator {baselines['outermost operator']:.1f}%, the majority answer "
        f"{baselines['majority']:.1f}%. The best of the restricted forms is {best['attention']} "
        f"with {best['accuracy, %']:.1f}%. The choice of test expressions alone gives a percentage "
        f"a standard error of {100 * math.sqrt(share * (1 - share) / tests):.1f}, and each model "
        "was trained once: small differences mean nothing."
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(__doc__)
    parser.add_argument("--lengths", type=integer(2), nargs="+", help="tokens, for cost and error")
    parser.add_argument("--steps", type=integer(1), help="of training on ListOps")
    parser.add_argument(
        "--tokens", type=integer(4), nargs=2, metavar=("LEAST", "MOST"), help="of an expression"
    )
    parser.add_argument("--depth", type=integer(1), help="of expressions in each other, at most")
    parser.add_argument("--arguments", type=integer(2), help="of an operator, at most")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    report = Report(__file__, __doc__, args)

    lengths = sorted(set(args.lengths))
    costs = [
        cost(name, length, args.budget, args.seed)
        for length in lengths
        for name in COSTS
        if name != "exact, graph" or length <= GRAPH_LIMIT
    ]
    report.table(f"Cost of a layer of width {WIDTH}, forward and backward", costs)
    if len(lengths) > 1:
        report.text(growth(costs, *lengths[-2:]))
    page = draw(costs, {"time of a layer, ms": "layer, ms", "peak memory, MB": "memory, MB"})
    report.picture(page, f"Cost of a layer with a budget of {args.budget}, forward and backward.")

    rows = [row for length in lengths for row in errors(length, args.budget, args.seed)]
    report.table("Error against exact attention with the same weights", rows)
    report.text(least_error(rows))
    page = draw(rows, {f"error, {kind} attention": kind for kind in SETTINGS})
    report.picture(page, f"Error of the output with a budget of {args.budget}.")

    keep_pages()
    sets = listops(args)
    baselines = {
        "chance": 10.0,
        "majority": most_frequent(*sets, lambda words: 0),
        "outermost operator": most_frequent(*sets, lambda words: int(words[1])),
    }
    learned = [learn(name, *sets, args) for name in METHODS]
    empty = dict.fromkeys(learned[0])
    table = [
        *learned,
        *({**empty, "attention": name, "accuracy, %": x} for name, x in baselines.items()),
    ]
    mean = statistics.mean(len(words) - 1 for words in sets[1].tokens)
    report.table(
        f"ListOps: {args.steps:,} steps of {BATCH} expressions of {args.tokens[0]} to "
        f"{args.tokens[1]} tokens (on average {mean:.0f}), a budget of {args.listops_budget}",
        table,
    )
    report.text(summary(learned, baselines, args.expressions[1]))
    report.picture(draw_accuracy(learned, baselines), "Correct answers to ListOps.")
    report.write()
    return [*costs, *rows, *table]


if __name__ == "__main__":
    main()
