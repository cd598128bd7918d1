"""Speech frames: full attention, truncated attention and a Conformer.

Which sound is heard in each hundredth of a second? Utterances are synthesised as the voice makes
them: a source (pulses of the glottis, or noise) goes through a filter (the resonances of the mouth,
called formants), which glides from sound to sound. Each utterance has a speaker of its own: pitch,
size, loudness and the noise around are drawn at random. What the models see is what is usual in
speech recognition: the logarithm of the power in 40 mel bands, in windows of 25 ms, every 10 ms.
The labels are 17 sounds: vowels, nasals, fricatives, stops and silence.

One frame is not enough to tell. The closure of a stop is silent, whichever stop it is, and the
burst after it says which; the hum of the two nasals is nearly the same, and the glide of the vowel
beside it tells them apart. What helps is near, though. Four models are compared that differ in who
attends to whom: **alone** (each frame to itself only), **full** (to all frames of its utterance),
**truncated** (to its neighbours, `patterns.window`) and a **Conformer** (truncated, with a
convolution in each block). They have about the same number of parameters and are trained on the
same batches of short utterances. Positions are rotary: scores know only how far apart two frames
are. Attention starts out local in all models, because with equal biases on all queries and keys a
score falls, on the whole, with the distance.

The test is on recordings of other speakers, whole and cut into pieces: the same frames at every
length, so that only the context changes. Lengths above those of the training are new to all models,
but only full attention then meets distances that it has never seen, and more frames to choose from.

Costs are those of a training step on one utterance, forward and backward, the graph's construction
included. Full attention is measured in three forms that compute the same numbers: as a **matrix**
of all pairs that is stored, as the formula is written; by torch's **fused** kernel, which computes
the matrix piece by piece and keeps none of it, so that memory is linear and only time is quadratic
(it trains by this one); and as a **graph** with an edge for each pair, on the operator that
truncated attention uses, where the indices of the edges are what takes memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from scipy import fft, signal
from scipy.ndimage import uniform_filter1d
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from graphattn import Graph, keep_pages, patterns
from graphattn.experiment import PeakMemory, Report, figure, integer, option_parser, train
from graphattn.nn import (
    ConformerLayer,
    ConvolutionModule,
    GraphMultiheadAttention,
    GraphSelfAttention,
    GraphTransformerLayer,
    RotaryEncoding,
)

# Speech ###########################################################################################

RATE = 16_000  # samples a second
HOP, WINDOW, BANDS = 160, 400, 40  # a frame every 10 ms, of 25 ms
STEP, BLOCK = 80, 560  # the filter moves every 5 ms, and rings for at most 25 ms


class Sound(NamedTuple):
    """What the mouth does.

    Formants in Hz; parts, one after another: share of the time, and levels of the voice, of breath
    (noise through the formants) and of friction; centre and width of the friction in Hz.
    """

    formants: tuple[float, float, float]
    parts: tuple[tuple[float, float, float, float], ...] = ((1.0, 0.0, 0.0, 0.0),)
    friction: tuple[float, float] = (1000.0, 1000.0)


VOICE, HUM = ((1.0, 1.0, 0.0, 0.0),), ((1.0, 0.5, 0.0, 0.0),)
WEAK, STRONG = ((1.0, 0.0, 0.0, 0.5),), ((1.0, 0.0, 0.0, 1.5),)
HARD = ((0.6, 0.0, 0.0, 0.0), (0.15, 0.0, 0.0, 1.5), (0.25, 0.0, 0.6, 0.0))  # closed, burst, breath
SOFT = ((0.7, 0.0, 0.0, 0.0), (0.15, 0.0, 0.0, 1.5), (0.15, 0.7, 0.0, 0.0))  # closed, burst, voice
SOUNDS = {
    "a": Sound((730, 1090, 2440), VOICE),
    "e": Sound((530, 1840, 2480), VOICE),
    "i": Sound((280, 2250, 2900), VOICE),
    "o": Sound((500, 900, 2410), VOICE),
    "u": Sound((310, 870, 2240), VOICE),
    "m": Sound((270, 950, 2200), HUM),
    "n": Sound((270, 1700, 2650), HUM),
    "f": Sound((300, 950, 2200), WEAK, (4000, 6000)),
    "s": Sound((300, 1750, 2650), STRONG, (5500, 1800)),
    "sh": Sound((300, 2000, 2500), STRONG, (2900, 1200)),
    "p": Sound((300, 900, 2200), HARD, (900, 1500)),
    "t": Sound((300, 1750, 2700), HARD, (4200, 2000)),
    "k": Sound((300, 2050, 2300), HARD, (1900, 900)),
    "b": Sound((300, 900, 2200), SOFT, (900, 1500)),
    "d": Sound((300, 1750, 2700), SOFT, (4200, 2000)),
    "g": Sound((300, 2050, 2300), SOFT, (1900, 900)),
    "-": Sound((500, 1500, 2500)),
}
NAMES = list(SOUNDS)
KINDS = {
    "vowels": "aeiou",
    "nasals": "mn",
    "fricatives": ("f", "s", "sh"),
    "stops": "ptkbdg",
    "silence": "-",
}


def draw_sounds(seconds: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Syllables of one to three sounds: which they are ``[S]``, and where they meet ``[S + 1]``."""
    vowels, consonants = NAMES[:5], NAMES[5:-1]
    drawn: list[str] = []
    while len(drawn) * 0.05 < seconds:
        drawn += [consonants[rng.integers(len(consonants))]] if rng.random() < 0.9 else []
        drawn += [vowels[rng.integers(len(vowels))]]
        drawn += [consonants[rng.integers(len(consonants))]] if rng.random() < 0.35 else []
        drawn += ["-"] if rng.random() < 0.1 else []
    time_of = rng.uniform(0.05, 0.2, len(drawn)).cumsum()
    return np.array([NAMES.index(name) for name in drawn]), np.append(0.0, time_of)


def spectrum(x: np.ndarray) -> np.ndarray:
    return fft.rfft(x.astype(np.float32), BLOCK, axis=-1)


def resonance(centre: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The denominator of a digital resonator, ``[*, 3]``; centre and width in Hz."""
    radius = np.exp(-np.pi * width / RATE)
    turn = 2 * radius * np.cos(2 * np.pi * centre / RATE)
    return np.stack([np.ones_like(turn), -turn, radius**2], axis=-1)


def filters(
    sound: np.ndarray, border: np.ndarray, moment: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Responses of the mouth and to friction at each moment, ``[M, BLOCK / 2 + 1]`` each."""
    now = np.searchsorted(border, moment, side="right") - 1
    size = rng.uniform(0.85, 1.2)  # the shorter the mouth, the higher its resonances
    aim = np.array([SOUNDS[name].formants for name in NAMES])[sound]
    aim = aim * np.exp(0.05 * rng.standard_normal(aim.shape))  # never said the same way twice
    held = (border[:-1, None] + np.diff(border)[:, None] * [0.35, 0.65]).ravel()
    glide = [np.interp(moment, held, track.repeat(2)) for track in aim.T]
    nasal = np.isin(sound, [NAMES.index(name) for name in KINDS["nasals"]])[now]
    mouth = np.ones((len(moment), 1))
    for centre, width in zip([*glide, 3500.0, 4500.0], [70, 100, 140, 250, 300], strict=True):
        pole = resonance(size * centre + 0 * moment, width * np.where(nasal, 3, 1))
        terms = [np.pad(mouth * pole[:, k, None], ((0, 0), (k, 2 - k))) for k in range(3)]
        mouth = np.sum(terms, axis=0)  # the product of polynomials
    mouth = mouth.sum(axis=1, keepdims=True).astype(np.float32) / spectrum(mouth)
    centre, width = np.array([SOUNDS[name].friction for name in NAMES]).T
    friction = 1 / spectrum(resonance(size * centre, width))
    friction /= np.abs(friction).max(axis=1, keepdims=True)
    return mouth, friction[sound[now]]


def levels(sound: np.ndarray, border: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """How loud voice, breath and friction are at each moment, ``[M, 3]``."""
    parts = [SOUNDS[NAMES[s]].parts for s in sound]
    shares = [np.cumsum([0.0, *(part[0] for part in own[:-1])]) for own in parts]
    start = np.concatenate(
        [
            at + long * share
            for at, long, share in zip(border, np.diff(border), shares, strict=False)
        ]
    )
    level = np.array([part[1:] for own in parts for part in own])
    level = level[np.searchsorted(start, moment, side="right") - 1]
    return uniform_filter1d(level, 3, axis=0).astype(np.float32)


def coloured(noise: np.ndarray, pole: float) -> np.ndarray:
    """Louder at low frequencies, of mean 0 and variance 1."""
    out = signal.lfilter([1.0], [1.0, -pole], noise)
    return (out - out.mean()) / out.std()


def utterance(frames: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What somebody says: samples, and the sound in the middle of each frame."""
    samples = (frames - 1) * HOP + WINDOW
    moment = np.arange(0, samples + STEP, STEP) / RATE
    sound, border = draw_sounds(moment[-1] + STEP / RATE, rng)
    mouth, friction = filters(sound, border, moment, rng)
    loud = levels(sound, border, moment)

    # The source in overlapping pieces, each through the filter of its moment.
    beat = np.interp(moment, 0.3 * np.arange(len(sound)), rng.standard_normal(len(sound)))
    pitch = rng.uniform(90, 230) * np.exp(0.1 * beat).repeat(STEP)[:samples]
    pulses = np.diff(np.floor(np.cumsum(pitch / RATE)), prepend=0.0)
    taper = signal.windows.hann(2 * STEP, sym=False)
    voice, noise = (
        spectrum(sliding_window_view(np.pad(source, (STEP, 2 * STEP)), 2 * STEP)[::STEP] * taper)
        for source in (coloured(pulses, 0.9), rng.standard_normal(samples))
    )
    voice, noise = voice[: len(moment)], noise[: len(moment)]
    heard = (loud[:, :1] * voice + loud[:, 1:2] * noise) * mouth + loud[:, 2:] * noise * friction
    pieces = fft.irfft(heard, BLOCK)
    wave = np.zeros((len(moment) + BLOCK // STEP, STEP))
    for k in range(BLOCK // STEP):
        wave[k : k + len(moment)] += pieces[:, k * STEP : (k + 1) * STEP]
    speech = wave.ravel()[STEP : STEP + samples]
    around = coloured(rng.standard_normal(samples), 0.8) * 10 ** (-rng.uniform(0, 20) / 20)
    middle = (np.arange(frames) * HOP + WINDOW / 2) / RATE
    gain = 10 ** (rng.uniform(-10, 10) / 20)
    label = sound[np.searchsorted(border, middle, side="right") - 1]
    return gain * (speech / speech.std() + around), label


def log_mel(wave: np.ndarray) -> np.ndarray:
    """Logarithm of the power in mel bands, ``[frames, BANDS]``."""
    frames = sliding_window_view(wave, WINDOW)[::HOP] * np.hamming(WINDOW)
    edge = 700 * np.expm1(np.linspace(0, np.log1p(RATE / 2 / 700), BANDS + 2))
    frequency = np.fft.rfftfreq(BLOCK, 1 / RATE)[:, None]
    rise = (frequency - edge[:-2]) / np.diff(edge)[:-1]
    fall = (edge[2:] - frequency) / np.diff(edge)[1:]
    bands = np.minimum(rise, fall).clip(min=0).astype(np.float32)
    return np.log(np.abs(spectrum(frames)) ** 2 @ bands + 1e-6)


Frames = tuple[Tensor, Tensor]  # features [N, BANDS], labels [N]


def speak(lengths: list[int], rng: np.random.Generator, *, name: str) -> list[Frames]:
    """Utterances of these numbers of frames."""
    said = []
    for frames in tqdm(lengths, desc=name, unit="utterance", dynamic_ncols=True, disable=None):
        wave, label = utterance(frames, rng)
        said.append((torch.from_numpy(log_mel(wave)), torch.from_numpy(label)))
    return said


# Models ###########################################################################################


class DenseAttention(GraphMultiheadAttention):
    """To all frames of the own utterance, by torch; ``graph`` is the list of lengths."""

    def attend(self, query, key, value, graph, **_: Any):
        heads_first = (
            x.transpose(0, 1).unsqueeze(0).split(graph, dim=2) for x in (query, key, value)
        )
        parts = zip(*heads_first, strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=2)
        return self.out_proj(out.squeeze(0).transpose(0, 1).flatten(-2))


class Labeller(nn.Module):
    """Blocks of attention between a linear map of the features and one to the sounds.

    Args:
        kind: Who attends to whom: ``"alone"``, ``"full"``, ``"graph"`` (the same as a graph),
            ``"truncated"`` or ``"Conformer"``.
        args: Sizes.
    """

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        super().__init__()
        self.kind, self.reach = kind, 0 if kind == "alone" else args.window
        channels, heads = args.channels, args.heads
        self.linear, self.layers = nn.Linear(BANDS, channels), nn.ModuleList()
        for _ in range(args.layers):
            rotary = RotaryEncoding(channels // heads, base=1000.0)
            attention = DenseAttention if kind == "full" else GraphMultiheadAttention
            attend = attention(channels, heads, rotary=rotary)
            # Score = 1.5**2 sum(cos(angle)) at first, which falls with the distance.
            nn.init.constant_(attend.in_proj_bias[: 2 * channels], 1.5)
            if kind == "Conformer":
                local = ConvolutionModule(channels, kernel_size=15)
                width = 9 * channels // 8  # as many parameters as the others
                layer = ConformerLayer(
                    channels, GraphSelfAttention(attend), local, dim_feedforward=width
                )
            else:
                layer = GraphTransformerLayer(channels, heads, 4 * channels, norm_first=True)
                layer.self_attn = attend
            self.layers.append(layer)
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, len(NAMES))

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Scores of sounds ``[N, 17]`` for utterances side by side, ``[N, BANDS]``."""
        graph: Any = lengths
        if self.kind == "graph":
            graph = Graph(patterns.complete(lengths), x.size(0))
        elif self.kind != "full":
            graph = Graph(patterns.window(lengths, self.reach), x.size(0))
        options = {"position": patterns.position(lengths)}
        if self.kind == "Conformer":
            options["batch"] = patterns.batch_vector(lengths)
        x = self.linear(x)
        for layer in self.layers:
            x = layer(x, graph, **options)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: list[Frames]) -> Tensor:
    features, labels = (torch.cat(side) for side in zip(*batch, strict=True))
    return F.cross_entropy(model(features, [len(x) for x, _ in batch]), labels)


@torch.no_grad()
def predict(model: nn.Module, recordings: list[Frames], length: int) -> Tensor:
    """Sounds of all frames of recordings that are cut into pieces of ``length``."""
    pieces = (piece for x, _ in recordings for piece in x.split(length))
    return torch.cat([model(piece, [len(piece)]).argmax(1) for piece in pieces])


# Costs ############################################################################################

FORMS = {
    "full, matrix": ("full", SDPBackend.MATH),
    "full, fused": ("full", SDPBackend.FLASH_ATTENTION),
    "full, graph": ("graph", None),
    "truncated": ("truncated", None),
    "Conformer": ("Conformer", None),
}


def seconds_of_step(model: nn.Module, batch: list[Frames]) -> float:
    start = time.perf_counter()
    model.zero_grad()
    loss_of(model, batch).backward()
    return time.perf_counter() - start


def costs(recording: Frames, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory of a training step on one utterance, in every form, at every length.

    What would not fit into the memory that is free, going by the length before, is not run.
    """
    rows = []
    for form, (kind, kernel) in FORMS.items():
        model, last, expected = Labeller(kind, args), args.lengths[0], 0.0
        for length in args.lengths:
            batch = [(recording[0][:length], recording[1][:length])]
            expected, last = expected * (length / last) ** 2, length
            row = {"model": form, "frames": length, "seconds": None, "MB": None}
            rows.append(row)
            if expected > 0.8 * psutil.virtual_memory().available:
                continue
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                with PeakMemory(torch.device("cpu")) as peak:
                    first = seconds_of_step(model, batch)
                seconds: list[float] = []
                while len(seconds) < 5 and first + sum(seconds) < 5:
                    seconds.append(seconds_of_step(model, batch))
            row["seconds"] = statistics.median(seconds or [first])
            if peak.bytes is not None:
                expected, size = float(peak.bytes), peak.bytes / 1e6
                row["MB"] = round(size) if size >= 100 else size
            print(f"{form}, {length:,} frames: {row['seconds']:.2f} s")
    return rows


# Pictures #########################################################################################


COLOUR = {"alone": "0.5", "full": "C0", "truncated": "C1", "Conformer": "C2"}


def draw_labels(x: Tensor, label: Tensor, predicted: dict[str, Tensor]) -> Any:
    """A spectrogram, and below it what was said and what each model heard."""
    from matplotlib.patches import Rectangle

    drawing, axes = figure(width=12, height=5)
    second = HOP / RATE
    extent = (0, len(x) * second, 0, BANDS)
    shown = axes.imshow(x.T.numpy(), origin="lower", aspect="auto", extent=extent)
    drawing.colorbar(shown, label="log power, standardised", pad=0.01)
    kilohertz = (0.5, 1, 2, 4, 8)
    ticks = [(BANDS * np.log1p(f / 0.7) / np.log1p(8 / 0.7), f"{f:g} kHz") for f in kilohertz]
    for row, (name, heard) in enumerate([("said", label), *predicted.items()], start=1):
        bottom = -5.0 * row
        ticks.append((bottom + 2, name))
        wrong = heard != label
        change = (heard.diff() != 0) | (wrong[1:] != wrong[:-1])
        for first, last in pairwise([0, *(change.nonzero().squeeze(1) + 1).tolist(), len(x)]):
            box = ((first * second, bottom), (last - first) * second, 4)
            axes.add_patch(Rectangle(*box, fc="C1" if wrong[first] else "w", ec="0.6", lw=0.5))
            if last - first > 2:
                middle = ((first + last) / 2 * second, bottom + 1.8)
                axes.annotate(NAMES[heard[first]], middle, ha="center", va="center", fontsize=8)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set(ylim=(bottom - 1, BANDS), xlabel="seconds")
    return drawing


def draw_lengths(args: argparse.Namespace, accuracy: list, cost: list) -> Any:
    drawing, axes = figure(3)
    for row in accuracy:
        name, right = row["model"], [row[f"{n:,} frames, %"] for n in args.lengths]
        axes[0].plot(args.lengths, right, "o-", color=COLOUR[name], label=name)
    for form in FORMS:
        own = [row for row in cost if row["model"] == form and row["seconds"] is not None]
        line = {"matrix": "o:", "graph": "o--"}.get(form.split(" ")[-1], "o-")
        for ax, column in zip(axes[1:], ("seconds", "MB"), strict=True):
            at, values = [row["frames"] for row in own], [row[column] or math.nan for row in own]
            ax.plot(at, values, line, color=COLOUR[form.split(",")[0]], label=form)
            ax.set_yscale("log")
    labels = "right frames, %", "seconds of a training step", "peak memory of a training step, MB"
    for ax, label in zip(axes, labels, strict=True):
        ax.set(xscale="log", xlabel="frames of an utterance", ylabel=label)
        ax.set_xticks(args.lengths, [f"{n:,}" for n in args.lengths])
        ax.xaxis.minorticks_off()
        ax.legend(fontsize=8)
    return drawing


# All together #####################################################################################

MODELS = ("alone", "full", "truncated", "Conformer")
SIZES = {  # of the full run, and of --quick
    "channels": (64, 16),
    "heads": (4, 2),
    "layers": (3, 2),
    "utterances": (900, 12),  # to train on
    "train_lengths": ((400, 1000), (40, 80)),
    "batch": (3, 3),
    "steps": (600, 4),
    "runs": (2, 1),  # trainings of each model
    "recordings": (6, 2),  # to test on
    "lengths": ((1000, 4000, 16_000), (50, 100, 200)),  # each divides the last
}


def report_accuracy(
    report: Report,
    args: argparse.Namespace,
    label: Tensor,
    predicted: dict[str, list[list[Tensor]]],
    models: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """``predicted[model][run]`` has the sounds heard at each length."""
    right = {
        name: 100 * np.array([[(p == label).double().mean().item() for p in run] for run in runs])
        for name, runs in predicted.items()
    }  # [runs, lengths]
    columns = [f"{length:,} frames, %" for length in args.lengths]
    rows = [
        {
            "model": name,
            **models[name],
            **dict(zip(columns, of_model.mean(0).tolist(), strict=True)),
            "runs differ by": float(np.ptp(of_model[:, 0])),
        }
        for name, of_model in right.items()
    ]
    report.table("Frames labelled right", rows)
    gains = zip((right["truncated"] - right["full"]).mean(0), args.lengths, strict=True)
    low, high = args.train_lengths
    report.text(
        "Truncated attention minus full attention, in points: "
        + ", ".join(f"{gain:+.1f} at {length:,} frames" for gain, length in gains)
        + f". Both were trained on utterances of {low:,} to {high:,} frames."
    )
    kinds = []
    for kind, names in KINDS.items():
        own = torch.isin(label, torch.tensor([NAMES.index(name) for name in names]))
        row = {"sound": kind, "share of the frames": 100 * own.double().mean().item()}
        for name, runs in predicted.items():
            hits = torch.stack([(run[0] == label)[own] for run in runs]).double()
            row[name] = 100 * hits.mean().item() if own.any() else None
        kinds.append(row)
    report.table(f"Labelled right in pieces of {args.lengths[0]:,} frames, by kind, %", kinds)
    return rows


def report_costs(report: Report, cost: list[dict[str, Any]]) -> None:
    truncated = {row["frames"]: row for row in cost if row["model"] == "truncated"}
    largest: dict[str, float] = {}
    for row in cost:
        for column in ("seconds", "MB"):
            own, other = row[column], truncated[row["frames"]][column]
            row[f"{column} / truncated"] = own / other if own and other else None
        if row["model"].startswith("full"):
            largest[row["model"]] = row["MB / truncated"] or largest.get(row["model"], math.nan)
    report.table("A training step on one utterance", cost)
    times = ", ".join(f"{ratio:.3g} ({form})" for form, ratio in largest.items())
    report.text(
        "Memory of full attention over that of truncated attention, at the greatest length that "
        f"was measured: {times}."
    )
    skipped = [f"{row['model']} at {row['frames']:,} frames" for row in cost if not row["seconds"]]
    if skipped:
        report.text(f"Not run, because memory would not have sufficed: {'; '.join(skipped)}.")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = option_parser(__doc__)
    parser.add_argument("--window", type=integer(1), default=24, help="frames seen on each side")
    args = parser.parse_args(argv)
    vars(args).update({name: sizes[args.quick] for name, sizes in SIZES.items()})
    report = Report(__file__, __doc__, args)

    rng = np.random.default_rng(args.seed)
    low, high = args.train_lengths
    pool = speak(rng.integers(low, high + 1, args.utterances).tolist(), rng, name="to train on")
    recordings = speak([args.lengths[-1]] * args.recordings, rng, name="to test on")
    heard = torch.cat([x for x, _ in pool])
    mean, std = heard.mean(0), heard.std(0)
    pool = [((x - mean) / std, label) for x, label in pool]
    recordings = [((x - mean) / std, label) for x, label in recordings]
    cost = costs(recordings[0], args)  # before the process keeps its memory

    keep_pages()
    predicted: dict[str, list[list[Tensor]]] = {name: [] for name in MODELS}
    models: dict[str, dict[str, Any]] = {}
    for run in range(args.runs):
        draws = np.random.default_rng([args.seed, run])
        batches = draws.integers(0, len(pool), (args.steps, args.batch))
        for name in MODELS:
            torch.manual_seed(args.seed + run)
            model = Labeller(name, args)
            trained = train(
                model,
                lambda i, model=model, batches=batches: loss_of(
                    model, [pool[k] for k in batches[i]]
                ),
                steps=args.steps,
                lr=2e-3,
                warmup=args.steps // 10,
                name=f"{name}, run {run + 1}",
            )
            parameters = sum(p.numel() for p in model.parameters())
            models[name] = {"parameters": parameters, "training, s": trained.seconds}
            predicted[name].append([predict(model, recordings, n) for n in args.lengths])

    label = torch.cat([label for _, label in recordings])
    rows = report_accuracy(report, args, label, predicted, models)
    report_costs(report, cost)
    shown = slice(0, min(250, args.lengths[0]))
    report.picture(
        draw_labels(
            recordings[0][0][shown],
            label[shown],
            {name: runs[0][0][shown] for name, runs in predicted.items()},
        ),
        "The beginning of a recording: power in mel bands; below it what was said, and what each "
        "model heard, orange where it is wrong.",
    )
    report.picture(draw_lengths(args, rows, cost), "Accuracy and cost by length.")
    report.write()
    return rows


if __name__ == "__main__":
    main()
