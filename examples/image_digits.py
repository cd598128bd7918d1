"""Images of digits: what a convolution knows beforehand and attention has to learn.

A convolution is self-attention with two restrictions: a pixel attends to the pixels around it only,
and the weights depend on the offset between two pixels only, not on where they are nor on what they
show. For an image that is a good guess, and whoever makes it needs fewer examples. Who does not has
to find out from the examples what belongs together, and could find something else where that is
better. So the restricted model should lead while examples are few, and its lead should melt as they
become more.

This script measures the lead. The images are the 1,797 handwritten digits of 8 x 8 pixels that
ship inside scikit-learn. A `graphattn.models.VisionTransformer` reads each of them as a set, of 16
*patches* of 2 x 2 pixels or of 64 *pixels*, along one of two graphs: *all* attend to all, or each
to a *window* of 3 x 3 around it. It learns a vector for each place, so nothing but patch and window
says which places are near each other. A small *CNN* of convolutions of 3 x 3 stands against it. All
have two or three layers, about the same number of parameters, and take the mean over all places.

All models follow the same rules: the same images in the same order, for a number of steps that
depends on the number of images only, the same optimizer, no augmentation, and the best of the same
three learning rates, found within the images to learn from. Each model starts anew from random
weights for each number of images and each seed. The seed also draws which images these are, of each
digit equally many as far as they go. The test set is the same for all, and nothing is chosen on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import keep_pages, patterns
from graphattn.experiment import Report, figure, integer, option_parser, train
from graphattn.models import VisionTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 8
TEST = 597
TUNE = 500  # images to learn from when the rate is chosen; the other 700 say which is best
RATES = (1e-3, 3e-3, 1e-2)
BATCH = 16


class Images(NamedTuple):
    """Images ``[N, 1, 8, 8]`` from 0 to 1, and which digit each shows, ``[N]``."""

    x: Tensor
    y: Tensor

    def take(self, index: np.ndarray) -> Images:
        return Images(self.x[index], self.y[index])


def load() -> tuple[Images, Images]:
    """1,200 images to learn from and 597 to test on, equally many of each digit among these."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("image_digits needs scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    images = Images(
        torch.from_numpy(digits.images).float().unsqueeze(1) / 16,
        torch.from_numpy(digits.target),
    )
    order = by_turns(digits.target, seed=0)
    return images.take(order[TEST:]), images.take(order[:TEST])


def by_turns(labels: np.ndarray, seed: int) -> np.ndarray:
    """A random order of images in which the digits take turns: any start of it is balanced."""
    order = np.random.default_rng(seed).permutation(len(labels))
    turn = np.empty(len(labels), dtype=int)
    for digit in np.unique(labels):
        (places,) = np.nonzero(labels[order] == digit)
        turn[places] = np.arange(len(places))
    return order[np.argsort(turn, kind="stable")]


# Models ###########################################################################################


class ConvNet(nn.Module):
    """Three convolutions of 3 x 3, and the mean over all places."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self._convolution(1, channels),
            *self._convolution(channels, channels),
            nn.MaxPool2d(2),
            *self._convolution(channels, channels),
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))

    @staticmethod
    def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()


def attention(patch: int, window: int | None) -> VisionTransformer:
    model = VisionTransformer(
        SIZE,
        patch,
        in_channels=1,
        hidden_channels=32,
        out_channels=10,
        num_layers=2,
        heads=4,
        feedforward=64,
        pattern=None if window is None else partial(patterns.grid, window=window),
        pool="mean",
    )
    # Places as different from each other as pixels are: at the usual 0.02 they take long to learn.
    nn.init.normal_(model.encoding.weight, std=0.5)
    return model


CNN = "CNN"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "patches, all": partial(attention, 2, None),
    "patches, window": partial(attention, 2, 3),
    "pixels, all": partial(attention, 1, None),
    "pixels, window": partial(attention, 1, 3),
    CNN: ConvNet,
}


# Training #########################################################################################


def steps_for(size: int, share: float) -> int:
    """More images take more steps, equally many for every model."""
    return max(2, round(share * (200 + 1.2 * size)))


def fit(name: str, images: Images, *, lr: float, seed: int, steps: int) -> nn.Module:
    """A trained model. All images are seen, each time in a new order, before any is seen again."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    size = len(images.y)
    generator = torch.Generator().manual_seed(seed)
    rounds = 1 + steps * BATCH // size
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(rounds)])

    def loss(step: int) -> Tensor:
        batch = order[step * BATCH : (step + 1) * BATCH]
        return F.cross_entropy(model(images.x[batch]), images.y[batch])

    train(
        model,
        loss,
        steps=steps,
        lr=lr,
        warmup=steps // 10,
        weight_decay=0.05,
        name=f"{name}: {size} images",
    )
    return model


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Percent of the images whose digit is found."""
    return 100 * (model(images.x).argmax(dim=1) == images.y).double().mean().item()


def choose_rates(images: Images, seed: int, share: float) -> dict[str, dict[float, float]]:
    """Of each model and rate, the accuracy on a part of the images after learning from the rest."""
    order = by_turns(images.y.numpy(), seed)
    learn, check = images.take(order[:TUNE]), images.take(order[TUNE:])
    steps = steps_for(TUNE, share)
    return {
        name: {lr: accuracy(fit(name, learn, lr=lr, seed=seed, steps=steps), check) for lr in RATES}
        for name in MODELS
    }


# Results ##########################################################################################


class Score(NamedTuple):
    """Test accuracies of a model, one for each seed, after training on this many images."""

    model: str
    images: int
    accuracies: list[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds."""
        return statistics.stdev(self.accuracies)


def summary(scores: list[Score], sizes: list[int]) -> str:
    """What the curves say, in words."""
    at = {(score.model, score.images): score.mean for score in scores}
    best = {
        size: max((name for name in MODELS if name != CNN), key=lambda name: at[name, size])
        for size in sizes
    }
    lead = {size: at[CNN, size] - at[best[size], size] for size in sizes}
    few, many = sizes[0], sizes[-1]
    head = (
        f"The lead of the CNN over the best model of attention is {lead[few]:+.1f} points of "
        f"accuracy with {few:,} images and {lead[many]:+.1f} with {many:,}:"
    )
    lines = [
        f"- {size:,} images: {at[CNN, size]:.1f}% against {at[best[size], size]:.1f}% "
        f"({best[size]}), {lead[size]:+.1f} points."
        for size in sizes
    ]
    for nodes in ("patches", "pixels"):
        gains = (
            f"{at[f'{nodes}, window', size] - at[f'{nodes}, all', size]:+.1f} with {size:,} images"
            for size in sizes
        )
        lines.append(f"- What the window adds to attention among {nodes}: {', '.join(gains)}.")
    errors = [(share * (100 - share) / TEST) ** 0.5 for share in at.values()]
    lines.append(
        f"- A share of {TEST} images has a standard error, of {min(errors):.1f} to "
        f"{max(errors):.1f} points here, besides the spread over the seeds."
    )
    return "\n".join([head, "", *lines])


def draw(scores: list[Score], sizes: list[int]) -> Figure:
    """Accuracy over the number of training images, and how many are wrong, in logarithms."""
    picture, panels = figure(2, width=5.0, height=4.0)
    for number, name in enumerate(MODELS):
        own = [score for score in scores if score.model == name]
        mean = np.array([score.mean for score in own])
        spread = np.array([score.spread for score in own])
        style = "-" if name == CNN else ":" if name.endswith("all") else "--"
        color = "black" if name == CNN else f"C{number // 2}"
        for panel, center in zip(panels, (mean, 100 - mean), strict=True):
            panel.plot(sizes, center, style, marker="o", ms=4, color=color, label=name)
            low = np.maximum(center - spread, 0.1 if panel is panels[1] else 0)
            panel.fill_between(sizes, low, center + spread, color=color, alpha=0.12, lw=0)
    for panel, label in zip(panels, ("right", "wrong"), strict=True):
        panel.set(xscale="log", xlabel="training images", ylabel=f"test images {label}, %")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panels[0].set_title("Accuracy")
    panels[1].set_title("Error, on a logarithmic scale")
    panels[1].set_yscale("log")
    panels[1].set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    for panel in panels:
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower right")
    return picture


@torch.no_grad()
def draw_attention(models: dict[str, VisionTransformer], image: Tensor) -> Figure:
    """What the brightest pixel of an image ``[1, 8, 8]`` attends to in each layer."""
    pixel = int(image.argmax())
    maps = {"the image": image[0].numpy()}
    for name, model in models.items():
        src, dst = model.graph(SIZE, SIZE).edge_index
        for number, weights in enumerate(model(image[None], return_attention_weights=True)[1]):
            seen = np.full(SIZE * SIZE, np.nan)  # what is not attended to stays white
            seen[src[dst == pixel]] = 100 * weights[0, dst == pixel].mean(dim=1)
            maps[f"{name}\nlayer {number + 1}"] = seen.reshape(SIZE, SIZE)
    picture, panels = figure(len(maps), width=2.3, height=2.7)
    for panel, (title, values) in zip(panels, maps.items(), strict=True):
        first = panel is panels[0]
        shown = panel.imshow(values, cmap="gray" if first else "viridis", vmin=0)
        panel.plot(pixel % SIZE, pixel // SIZE, "s", ms=11, mec="red", mfc="none", mew=1.5)
        panel.set(title=title, xticks=[], yticks=[])
        if not first:
            picture.colorbar(shown, ax=panel, orientation="horizontal", label="weight, %")
    return picture


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--sizes", type=integer(10), nargs="+", default=[50, 100, 200, 500, 1200], metavar="SIZE"
    )
    parser.add_argument("--seeds", type=integer(2), default=3, help="runs of each model and size")
    args = parser.parse_args(argv)
    share = 1.0
    if args.quick:
        args.sizes, args.seeds, share = [20, 60], 2, 0.005
    keep_pages()  # of tensors that are freed: on a CPU, quicker
    learn, test = load()
    sizes = sorted(set(args.sizes))
    if sizes[-1] > len(learn.y):
        parser.error(f"--sizes: there are {len(learn.y)} images to learn from, got {sizes[-1]}")
    report = Report(__file__, __doc__, args)

    found = choose_rates(learn, args.seed, share)
    rates = {name: max(RATES, key=lambda lr: found[name][lr]) for name in MODELS}
    scores = []
    models: dict[str, nn.Module] = {}
    for size in sizes:
        runs: dict[str, list[float]] = {name: [] for name in MODELS}
        for seed in range(args.seed, args.seed + args.seeds):
            images = learn.take(by_turns(learn.y.numpy(), seed)[:size])
            for name in MODELS:
                steps = steps_for(size, share)
                models[name] = fit(name, images, lr=rates[name], seed=seed, steps=steps)
                runs[name].append(accuracy(models[name], test))
        scores += [Score(name, size, accuracies) for name, accuracies in runs.items()]

    rows = [
        {"model": name}
        | {
            f"{score.images:,} images": f"{score.mean:.1f} ± {score.spread:.1f}"
            for score in scores
            if score.model == name
        }
        for name in MODELS
    ]
    report.table(f"Accuracy on {TEST} test images in percent, {args.seeds} seeds", rows)
    report.text(summary(scores, sizes))
    report.picture(
        draw(scores, sizes),
        f"Accuracy on the test set, and the same as errors on a logarithmic scale: mean of "
        f"{args.seeds} seeds and their standard deviation.",
    )
    report.table(
        "Size and training",
        [
            {"model": name, "parameters": sum(p.numel() for p in model.parameters())}
            | {f"at {lr:g}": found[name][lr] for lr in RATES}
            | {"chosen": rates[name], f"{sizes[-1]:,} learned": accuracy(model, images)}
            for name, model in models.items()
        ],
    )
    report.text(
        f"The columns of rates: accuracy in percent on {len(learn.y) - TUNE} images after learning "
        f"from the {TUNE} others. The last column: accuracy of the last model on the images that "
        "it learned from."
    )
    report.picture(
        draw_attention(
            {name: model for name, model in models.items() if name.startswith("pixels")}, test.x[0]
        ),
        "What the brightest pixel of a test image (red) attends to, mean of the heads, in the last "
        "models trained.",
    )
    report.write()
    return rows


if __name__ == "__main__":
    main()
