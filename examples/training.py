"""Full-batch node classification: the options, the loop, the checkpoints and the report.

What ``ogbn_arxiv.py`` and ``node_classification.py`` have in common.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_undirected
from tqdm import tqdm

import graphattn
from graphattn import Graph, backends
from graphattn.data import evaluate
from graphattn.experiment import figure, integer, number
from graphattn.models import GraphTransformer, mask_labels

# Options ##########################################################################################


def add_options(parser: argparse.ArgumentParser) -> None:
    flag = argparse.BooleanOptionalAction
    data = parser.add_argument_group("data")
    data.add_argument("--root", type=Path, default=Path("datasets"), help="folder of the data sets")
    data.add_argument("--download", action="store_true", help="download the set if it is not there")
    data.add_argument("--directed", action="store_true", help="keep edges as stored, one-way")
    data.add_argument("--self-loops", action=flag, help="let every node attend to itself")
    data.add_argument("--normalize-features", action=flag, help="scale feature rows to sum to 1")

    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=integer(1), help="width of the layers")
    model.add_argument("--layers", type=integer(1), help="number of layers")
    model.add_argument("--heads", type=integer(1), help="attention heads")
    model.add_argument("--feedforward", type=integer(1), help="Transformer blocks of this width")
    model.add_argument("--head", choices=("linear", "attention"), help="what makes the output")
    model.add_argument("--input-projection", action=flag, help="project features first")
    model.add_argument("--root-weight", action=flag, help="skip connection of attention layers")
    model.add_argument("--beta", action=flag, help="gate the skip connection")
    model.add_argument("--norm", choices=("layer", "batch", "none"), help="normalisation")
    model.add_argument("--activation", choices=("relu", "gelu", "elu"))
    model.add_argument("--dropout", type=number(0, 1), help="on features")
    model.add_argument("--attention-dropout", type=number(0, 1), help="on attention weights")
    model.add_argument(
        "--label-rate",
        type=number(0, 1),
        help="share of training labels shown as inputs in a step, 0 for none "
        "(default: 0 with node features, 0.625 without)",
    )
    model.add_argument("--backend", default="auto", choices=("auto", *backends.NAMES))

    loop = parser.add_argument_group("training")
    loop.add_argument("--runs", type=integer(1), help="number of seeds, or of splits")
    loop.add_argument("--epochs", type=integer(1), help="steps of one run")
    loop.add_argument("--lr", type=number(0), help="learning rate of Adam")
    loop.add_argument("--weight-decay", type=number(0), help="L2 penalty")
    loop.add_argument("--seed", type=integer(0), help="seed of the first run")
    loop.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    loop.add_argument("--autocast", action="store_true", help="bfloat16 where autocast has it")
    loop.add_argument(
        "--compile", action="store_true", help="torch.compile; on a GPU with CUDA graphs"
    )
    loop.add_argument("--threads", type=integer(1), help="CPU threads (default: torch's choice)")

    output = parser.add_argument_group("output")
    output.add_argument("--log-every", type=integer(1), help="print every so many epochs")
    output.add_argument("--out", type=Path, help="folder for result.json, curve.png, checkpoint.pt")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result here instead")
    output.add_argument(
        "--checkpoint-seconds", type=number(0), default=30.0, help="time between saves"
    )
    output.add_argument("--resume", action="store_true", help="go on where a stopped call was")
    output.add_argument("--overwrite", action="store_true", help="drop an unfinished call's state")


DEFAULTS = {
    "self_loops": False,
    "normalize_features": False,
    "hidden": 128,
    "layers": 3,
    "heads": 4,
    "head": "linear",
    "input_projection": True,
    "root_weight": True,
    "beta": False,
    "norm": "layer",
    "activation": "relu",
    "dropout": 0.3,
    "attention_dropout": 0.0,
    "runs": 10,
    "epochs": 500,
    "lr": 1e-3,
    "weight_decay": 0.0,
    "seed": 0,
    "log_every": 1,
}


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, preset: Callable[..., dict[str, Any]]
) -> argparse.Namespace:
    """Options of the command line, then of the data set's preset, then general defaults."""
    args = parser.parse_args(argv)
    for name, value in {**DEFAULTS, **preset(args)}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.hidden % args.heads != 0:
        parser.error(f"--hidden {args.hidden} must be divisible by --heads {args.heads}")
    if args.label_rate == 1.0:
        parser.error("--label-rate must be below 1: at 1 no label is left to predict")
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device} is not a device torch knows")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no CUDA device is available")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


# Data #############################################################################################


def prepare(data: Data, args: argparse.Namespace) -> tuple[Data, Graph]:
    """The features as asked for and the graph to attend along; says what was done."""
    if "y" not in data:
        raise SystemExit(f"error: {data.name} has no labels to learn")
    if not data.train_mask.any(dim=0).all():
        raise SystemExit(f"error: {data.name} has a split without training nodes")
    stored = data.edge_index.size(1)
    edge_index = data.edge_index if args.directed else to_undirected(data.edge_index)
    graph = Graph(edge_index, data.num_nodes)
    kind = "kept directed" if args.directed else "made undirected, duplicates merged"
    print(
        f"Data: {data.name}, {data.num_nodes:,} nodes, {data.num_classes} classes, "
        f"{stored:,} edges -> {graph.num_edges:,} ({kind})"
    )
    if args.self_loops:
        graph = graph.add_self_loops()
        print(f"Self-loops: one for each node, {graph.num_edges:,} edges in all")
    features, multi_label = data.x is not None, data.y.is_floating_point()
    if features and args.normalize_features:
        data = NormalizeFeatures()(data)
    if args.label_rate is None:
        args.label_rate = 0.0 if features or multi_label else 0.625
    if args.label_rate > 0.0 and multi_label:
        raise SystemExit(
            f"error: {data.name} has several labels a node, and label inputs need one: "
            f"--label-rate "
            "must be 0"
        )
    if not features:
        args.input_projection = True
        inputs = "label inputs and degrees" if args.label_rate > 0.0 else "degrees"
        print(f"Inputs: no node features here; trains from {inputs} alone")
    if args.label_rate > 0.0:
        print(
            f"Label inputs: {args.label_rate:g} of the training labels shown in each step, the "
            "loss on the others; at test time all training labels and no others"
        )
    return data, graph


def make_model(data: Data, args: argparse.Namespace) -> GraphTransformer:
    multi_label = data.y.is_floating_point()
    return GraphTransformer(
        0 if data.x is None else data.x.size(1),
        args.hidden,
        data.y.size(1) if multi_label else data.num_classes,
        args.layers,
        args.heads,
        feedforward=args.feedforward,
        head=args.head,
        label_classes=data.num_classes if args.label_rate > 0.0 else 0,
        degree_encoding=data.x is None,
        input_projection=args.input_projection,
        root_weight=args.root_weight,
        beta=args.beta,
        norm=None if args.norm == "none" else args.norm,
        activation=args.activation,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        backend=args.backend,
    )


def split_of(data: Data, run: int) -> dict[str, Tensor]:
    """The masks of a run: split ``run`` where there are several."""
    masks = {name: data[f"{name}_mask"] for name in ("train", "val", "test")}
    return {
        name: mask if mask.dim() == 1 else mask[:, run % mask.size(1)]
        for name, mask in masks.items()
    }


# The loop #########################################################################################


class Run:
    """One seed: a model, its optimiser, and the history of its metrics."""

    def __init__(self, data: Data, graph: Graph, args: argparse.Namespace, index: int) -> None:
        torch.manual_seed(args.seed + index)
        self.data, self.graph, self.args, self.index = data, graph, args, index
        self.masks = split_of(data, index)
        self.model = make_model(data, args).to(args.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=args.lr, weight_decay=args.weight_decay
        )
        on_gpu = args.device != "cpu"
        mode = "reduce-overhead" if on_gpu else "default"
        self.compiled = torch.compile(self.model, mode=mode) if args.compile else self.model
        self.history: list[dict[str, float]] = []
        self.seconds: list[float] = []

    def train_epoch(self) -> float:
        self.model.train()
        self.optimizer.zero_grad()
        train = self.masks["train"]
        labels, hidden = None, train
        if self.args.label_rate > 0.0:
            hidden = torch.zeros_like(train)
            while not hidden.any():  # something must be left to predict
                labels, hidden = mask_labels(self.data.y, train, self.args.label_rate)
        loss = self.loss(self.outputs(labels), hidden)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def outputs(self, labels: Tensor | None) -> Tensor:
        device = torch.device(self.args.device).type
        with torch.autocast(device, torch.bfloat16, enabled=self.args.autocast):
            out = self.compiled(self.data.x, self.graph, labels=labels)
        return out.float()

    def loss(self, out: Tensor, nodes: Tensor) -> Tensor:
        """The mean over these nodes, by a mask: no shape depends on how many they are."""
        target = self.data.y
        if not target.is_floating_point():
            return F.cross_entropy(out, torch.where(nodes, target, -100))  # -100 counts as nothing
        known = nodes[:, None] & ~target.isnan()
        losses = F.binary_cross_entropy_with_logits(out, target.nan_to_num(), reduction="none")
        return losses.where(known, 0.0).sum() / known.sum()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        labels = None
        if self.args.label_rate > 0.0:
            labels, _ = mask_labels(self.data.y, self.masks["train"], 1.0)
        out = self.outputs(labels)
        return {
            name: evaluate(self.data.metric, out[mask], self.data.y[mask])
            for name, mask in self.masks.items()
        }

    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        loss = self.train_epoch()
        if self.args.device != "cpu":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.history.append({"loss": loss, **self.evaluate()})
        return self.history[-1]

    def state(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.args.device != "cpu" else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history, self.seconds = state["history"], state["seconds"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])


class Checkpoint:
    """What has been done so far, in one file, replaced in one step."""

    # Options that do not change what is computed.
    FREE = (
        *("resume", "overwrite", "checkpoint_seconds", "json", "out", "log_every"),
        *("root", "download", "threads"),
    )

    def __init__(self, args: argparse.Namespace) -> None:
        self.path = args.out / "checkpoint.pt"
        self.options = {
            name: str(value) for name, value in vars(args).items() if name not in self.FREE
        }
        self.seconds = args.checkpoint_seconds
        self.saved_at = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        state = torch.load(self.path, weights_only=True)
        changed = [
            f"--{name.replace('_', '-')} was {was}, now {self.options.get(name)}"
            for name, was in state["options"].items()
            if self.options.get(name) != was
        ]
        if changed:
            raise SystemExit(
                f"error: {self.path} was written with other options: {'; '.join(changed)}"
            )
        return state

    def save(self, finished: list[dict[str, Any]], run: Run | None, *, force: bool) -> None:
        if not force and time.monotonic() - self.saved_at < self.seconds:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        state = {"options": self.options, "finished": finished}
        torch.save({**state, "run": None if run is None else run.state()}, part)
        os.replace(part, self.path)
        self.saved_at = time.monotonic()


def run_all(
    data: Data,
    graph: Graph,
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    state: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """The history of every run, those in the checkpoint's ``state`` included."""
    finished: list[dict[str, Any]] = [] if state is None else state["finished"]
    started = None if state is None else state["run"]
    total, done = args.runs * args.epochs, len(finished) * args.epochs
    # disable=None: no bar where nobody watches a terminal.
    with tqdm(total=total, initial=done, unit="epoch", dynamic_ncols=True, disable=None) as bar:
        for index in range(len(finished), args.runs):
            run = Run(data, graph, args, index)
            if started is not None:
                run.load(started)
                bar.update(len(run.history))
                started = None
            while len(run.history) < args.epochs:
                metrics = run.step()
                epoch = len(run.history)
                if epoch % args.log_every == 0 or epoch in (1, args.epochs):
                    bar.write(epoch_line(index, epoch, metrics), file=sys.stdout)
                    sys.stdout.flush()
                bar.update(1)
                checkpoint.save(finished, run, force=False)
            finished.append(
                {"seed": args.seed + index, "history": run.history, "seconds": run.seconds}
            )
            checkpoint.save(finished, None, force=True)
            bar.write(run_summary(index, best_epoch(run.history)), file=sys.stdout)
    return finished


def train(data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """All runs, with the report on the screen; returns the result that is written as JSON."""
    print_versions(args)
    if args.out is None:
        args.out = Path("runs") / args.dataset
    checkpoint = Checkpoint(args)
    state = None
    if args.resume:
        state = checkpoint.load()
        if state is None:
            print(f"Nothing to resume: {checkpoint.path} does not exist; starting from run 1")
    elif checkpoint.path.exists() and not args.overwrite:
        raise SystemExit(
            f"error: {checkpoint.path} holds an unfinished call. Go on with it by --resume, or "
            "drop it by --overwrite"
        )
    data, graph = prepare(data, args)
    data, graph = data.to(args.device), graph.to(args.device)
    if args.compile:
        _ = graph.edge_index, graph.src_ptr  # made now, or else by what is compiled
    parameters = sum(p.numel() for p in make_model(data, args).parameters())
    print(f"Model: GraphTransformer, {parameters:,} parameters")

    try:
        finished = run_all(data, graph, args, checkpoint, state)
    except KeyboardInterrupt:
        exists = checkpoint.path.exists()
        print("Stopped;", f"--resume goes on from {checkpoint.path}" if exists else "nothing saved")
        raise SystemExit(130) from None
    result = summarise(data, graph, args, parameters, finished)
    print_result(result)
    write(result, finished, args)
    checkpoint.path.unlink(missing_ok=True)
    return result


# The report #######################################################################################


def print_versions(args: argparse.Namespace) -> None:
    backend = args.backend
    if backend == "auto":
        device = torch.device(args.device)
        chosen = backends.choose("auto", device, torch.float32, function="training")
        backend = f"auto -> {chosen}"
    print(
        f"graphattn {graphattn.__version__}, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}, Python {platform.python_version()}; device {args.device}, "
        f"{torch.get_num_threads()} threads, backend {backend}"
    )


def epoch_line(run: int, epoch: int, metrics: dict[str, float]) -> str:
    return (
        f"Run: {run + 1:02d}, Epoch: {epoch:02d}, Loss: {metrics['loss']:.4f}, "
        f"Train: {100 * metrics['train']:.2f}%, Valid: {100 * metrics['val']:.2f}% "
        f"Test: {100 * metrics['test']:.2f}%"
    )


def best_epoch(history: list[dict[str, float]]) -> dict[str, float]:
    """The epoch with the highest validation metric, the first of equals."""
    return max(history, key=lambda epoch: epoch["val"])


def run_summary(run: int, best: dict[str, float]) -> str:
    return (
        f"Run {run + 1:02d}:\n"
        f"Highest Valid: {100 * best['val']:.2f}\n"
        f"  Final Train: {100 * best['train']:.2f}\n"
        f"   Final Test: {100 * best['test']:.2f}"
    )


def summarise(
    data: Data,
    graph: Graph,
    args: argparse.Namespace,
    parameters: int,
    finished: list[dict[str, Any]],
) -> dict[str, Any]:
    best = [best_epoch(run["history"]) for run in finished]
    numbers = {}
    for name in ("val", "train", "test"):
        values = [100 * epoch[name] for epoch in best]
        numbers[name] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "runs": values,
        }
    seconds = [value for run in finished for value in run["seconds"]]
    if args.device == "cpu":
        # ru_maxrss is in KiB, but in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    else:
        peak = torch.cuda.max_memory_allocated()
    return {
        "dataset": data.name,
        "metric": data.metric,
        "inputs": "degrees" if data.x is None else "features",
        "label_inputs_at_test": "training labels" if args.label_rate > 0.0 else "none",
        "num_nodes": data.num_nodes,
        "num_edges": graph.num_edges,
        "parameters": parameters,
        **numbers,
        "seconds_per_epoch": statistics.median(seconds),
        "peak_memory_bytes": peak,
        "epochs": args.epochs,
        "versions": {"graphattn": graphattn.__version__, "torch": torch.__version__},
        "command": " ".join(["python", *sys.argv]),
        "options": {name: str(value) for name, value in sorted(vars(args).items())},
    }


def print_result(result: dict[str, Any]) -> None:
    def line(label: str, name: str) -> str:
        std = result[name]["std"]
        spread = "(one run)" if std is None else f"± {std:.2f}"
        return f"{label}: {result[name]['mean']:.2f} {spread}"

    print("All runs:")
    print(line("Highest Valid", "val"))
    print(line("  Final Train", "train"))
    print(line("   Final Test", "test"))
    print(
        f"Result: {result['dataset']}, {result['metric']}, {line('test', 'test')} over "
        f"{len(result['test']['runs'])} run(s) of {result['epochs']} epochs; "
        f"{result['seconds_per_epoch']:.2f} s per epoch, peak memory "
        f"{result['peak_memory_bytes'] / 2**30:.2f} GiB, {result['parameters']:,} parameters"
    )


def write(result: dict[str, Any], finished: list[dict[str, Any]], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.json or args.out / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    history = [run["history"] for run in finished]
    path.write_text(json.dumps({**result, "history": history}, indent=1) + "\n")

    drawing, axes = figure(width=6.4, height=4)
    colors = {"train": "tab:gray", "val": "tab:orange", "test": "tab:blue"}
    for number_of_run, epochs in enumerate(history):
        for name, color in colors.items():
            axes.plot(
                range(1, len(epochs) + 1),
                [100 * epoch[name] for epoch in epochs],
                color=color,
                alpha=0.9 if len(history) == 1 else 0.5,
                linewidth=1.2,
                label=name if number_of_run == 0 else None,
            )
    mean = result["test"]["mean"]
    axes.set(
        xlabel="epoch",
        ylabel=f"{result['metric']} (%)",
        title=f"{result['dataset']}: test {mean:.2f} % at the best validation epoch",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    curve = args.out / "curve.png"
    drawing.savefig(curve, dpi=120)
    print(f"Written: {path}, {curve}")
