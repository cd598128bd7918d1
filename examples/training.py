"""Node classification: the options, the loop, the checkpoints and the report.

What the training scripts have in common.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomllib
import torch
import torch_geometric
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import CorrectAndSmooth
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import scatter, to_undirected
from tqdm import tqdm

import graphattn
from graphattn import Graph, backends, graph_attention
from graphattn.data import evaluate, load
from graphattn.experiment import figure, integer, number, threads, warmup_cosine
from graphattn.models import GraphTransformer, mask_labels

# Options ##########################################################################################


CONFIGS = Path(__file__).parent / "configs"
SPARSE = 0.1  # features with fewer entries than this share become a sparse matrix


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options, in groups."""
    add_graph_options(parser)
    add_model_options(parser)
    add_label_options(parser)
    add_training_options(parser)
    add_file_options(parser)


def add_graph_options(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument_group("graph").add_argument, argparse.BooleanOptionalAction
    add("--directed", action="store_true", help="keep edges as stored, one-way")
    add("--directions", action=flag, help="tell stored edges and their reverses apart")
    add("--edge-features", action=flag, help="use features of edges, where the set has them")
    add("--self-loops", action=flag, help="let every node attend to itself")
    add("--normalize-features", action=flag, help="scale feature rows to sum to 1")
    add(
        "--degree-encoding",
        action=flag,
        help="an embedding of the degree as input (default: without node features)",
    )
    add(
        "--parts",
        type=integer(1),
        default=1,
        help="train on so many parts of the nodes, drawn anew in each epoch, and on the edges "
        "within them; evaluate on the whole graph, on the CPU",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument_group("model").add_argument, argparse.BooleanOptionalAction
    share = number(0, 1)
    add("--hidden", type=integer(1), default=128, help="width of the layers")
    add("--layers", type=integer(0), default=3, help="number of layers")
    add("--heads", type=integer(1), default=4, help="attention heads")
    add("--feedforward", type=integer(1), help="Transformer blocks of this width")
    add("--gated", action=flag, help="gated layers, as in Polynormer")
    add("--global-layers", type=integer(0), default=0, help="layers in which each node sees all")
    add("--diffusion-steps", type=integer(0), default=0, help="how far the last layer spreads")
    add("--teleport", type=share, default=0.1, help="back to a node's own features, in each step")
    add("--jumping-knowledge", choices=("cat", "max", "sum"), help="let the head read all layers")
    add("--head", choices=("linear", "attention"), default="linear", help="what makes the output")
    add("--input-projection", action=flag, default=True, help="project features first")
    add("--root-weight", action=flag, default=True, help="skip connection of attention layers")
    add("--beta", action=flag, help="gate the skip connection")
    add("--residual", action=flag, help="add the input of attention layers to their output")
    add("--norm", choices=("layer", "batch", "none"), default="layer", help="of attention layers")
    add("--degree-scaling", type=number(0), default=0.0, help="power of the degree in outputs")
    add("--activation", choices=("relu", "gelu", "elu"), default="relu", help="after the norm")
    add("--dropout", type=share, default=0.5, help="on features")
    add("--input-dropout", type=share, help="on the input (default: as --dropout)")
    add("--attention-dropout", type=share, default=0.0, help="on attention weights")
    add("--attention-gain", type=number(1e-6), default=1.0, help="of initial queries and keys")
    add("--edge-dropout", type=share, default=0.0, help="on edges")
    add("--backend", default="auto", choices=("auto", *backends.NAMES), help="of the operator")
    add("--compile", action="store_true", help="torch.compile; on a GPU with CUDA graphs")


def add_label_options(parser: argparse.ArgumentParser) -> None:
    add, flag = parser.add_argument_group("labels").add_argument, argparse.BooleanOptionalAction
    share = number(0, 1)
    add(
        "--label-rate",
        type=share,
        help="share of training labels shown as inputs in a step, 0 for none (default: 0 with "
        "node features, 0.625 without)",
    )
    add(
        "--label-propagation",
        type=integer(0),
        default=0,
        help="steps in which labels spread to nodes whose label is not shown, before they are "
        "inputs",
    )
    add(
        "--label-reuse",
        type=integer(0),
        default=0,
        help="how often predictions become inputs where no label is shown",
    )
    add("--correct-and-smooth", action=flag, help="spread errors and labels after training")
    add("--correction-alpha", type=share, default=0.8, help="how far errors spread")
    add("--smoothing-alpha", type=share, default=0.8, help="how far labels spread")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add, share = parser.add_argument_group("training").add_argument, number(0, 1)
    add("--runs", type=integer(1), default=10, help="number of seeds, or of splits")
    add("--epochs", type=integer(1), default=300, help="passes over the data in a run, at most")
    add("--evaluate-every", type=integer(1), default=1, help="epochs between two evaluations")
    add("--patience", type=integer(1), help="end a run so many epochs after its best")
    add("--lr", type=number(0), default=1e-3, help="learning rate of Adam")
    add("--warmup", type=integer(0), default=0, help="epochs in which the rate grows to --lr")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="of the rate then")
    add("--weight-decay", type=number(0), default=0.0, help="L2 penalty")
    add("--label-smoothing", type=share, default=0.0, help="of the loss")
    add("--clip", type=number(0), help="largest norm of the gradient")
    add("--ema", type=share, default=0.0, help="evaluate moving averages with this decay")
    add("--seed", type=integer(0), default=0, help="seed of the first run")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--autocast", action="store_true", help="bfloat16 where autocast has it")
    add("--threads", type=threads, help="CPU threads (default: torch's choice)")


def add_file_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="options in TOML, which those given here override (default: configs/DATASET.toml)",
    )
    add("--root", type=Path, default=Path("datasets"), help="folder of the data sets")
    add("--download", action="store_true", help="download the set if it is not there")
    add("--log-every", type=integer(1), default=20, help="epochs between two lines")
    add("--out", type=Path, help="folder for result.json, curve.png, checkpoint.pt")
    add("--json", type=Path, metavar="FILE", help="write the result here instead")
    add("--checkpoint-seconds", type=number(0), default=30.0, help="time between saves")
    add("--resume", action="store_true", help="go on where a stopped call was")
    add("--overwrite", action="store_true", help="drop an unfinished call's state")


def parse(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    config: Callable[[argparse.Namespace], str] = lambda args: args.dataset,
) -> argparse.Namespace:
    """Options of the command line, then of the configuration, then general defaults.

    Without ``--config`` it is the file of ``config(args)``'s name, if there is one.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    path = args.config or CONFIGS / f"{config(args)}.toml"
    if args.config is not None or path.exists():
        args = parser.parse_args([*configured(parser, path), *argv])
    if args.hidden % args.heads != 0:
        parser.error(f"--hidden {args.hidden} must be divisible by --heads {args.heads}")
    if args.label_rate == 1.0:
        parser.error("--label-rate must be below 1: at 1 no label is left to predict")
    if args.directed and args.directions:
        parser.error("--directions needs edges both ways, and --directed keeps one")
    if args.parts > 1 and args.compile:
        parser.error("--compile needs one graph of one size, and --parts makes many")
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device} is not a device torch knows")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no CUDA device is available")
    return args


def configured(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """The options in a file, as they would be given on the command line."""
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        parser.error(f"--config {path}: {error}")
    arguments = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


# Data #############################################################################################


def load_or_exit(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    try:
        return load(args.dataset, root=args.root, download=args.download)
    except (OSError, ImportError, ValueError) as error:
        parser.error(str(error).replace("Pass download=True", "Pass --download"))


def prepare(data: Data, args: argparse.Namespace) -> tuple[Data, Graph]:
    """The features as asked for and the graph to attend along; says what was done."""
    if "y" not in data:
        raise SystemExit(f"error: {data.name} has no labels to learn")
    if not data.train_mask.any(dim=0).all():
        raise SystemExit(f"error: {data.name} has a split without training nodes")
    data = data.clone()
    graph = prepare_edges(data, args)
    prepare_features(data, args)
    prepare_labels(data, args)
    return data, graph


def prepare_edges(data: Data, args: argparse.Namespace) -> Graph:
    """The graph, whose edges and their features take the place of those in ``data``."""
    stored, edge_index = data.edge_index.size(1), data.edge_index
    edge_attr = data.edge_attr if args.edge_features else None
    if args.edge_features and edge_attr is None:
        raise SystemExit(f"error: {data.name} has no edge features: leave out --edge-features")
    if not args.directed:
        edge_index, edge_attr = to_undirected(edge_index, edge_attr, reduce="mean")
    graph = Graph(edge_index, data.num_nodes)
    kind = "kept directed" if args.directed else "made undirected, duplicates merged"
    print(
        f"Data: {data.name}, {data.num_nodes:,} nodes, {data.num_classes} classes, "
        f"{stored:,} edges -> {graph.num_edges:,} ({kind})"
    )
    if edge_attr is not None and data.x is None:
        data.x = scatter(edge_attr, edge_index[1], dim_size=data.num_nodes, reduce="mean")
        print("Inputs: no node features; the mean of those of a node's edges instead")
    if args.self_loops:
        graph = graph.add_self_loops()
        if edge_attr is not None:
            loops = edge_attr.new_zeros(data.num_nodes, edge_attr.size(1))
            edge_attr = torch.cat([edge_attr, loops])
        print(f"Self-loops: one for each node, {graph.num_edges:,} edges in all")
    if args.directions:
        both = directions(data, graph)
        edge_attr = both if edge_attr is None else torch.cat([edge_attr, both], dim=1)
    data.edge_index, data.edge_attr = graph.edge_index, edge_attr
    return graph


def prepare_features(data: Data, args: argparse.Namespace) -> None:
    """Scales ``data.x`` if asked to, and makes it sparse where that is quicker."""
    if data.x is None:
        args.input_projection = True
        return
    if args.normalize_features:
        data.x = NormalizeFeatures()(data).x
    if args.parts == 1 and data.x.count_nonzero() < SPARSE * data.x.numel():
        with warnings.catch_warnings():  # which call the layout new
            warnings.simplefilter("ignore", UserWarning)
            data.x = data.x.to_sparse_csr()


def prepare_labels(data: Data, args: argparse.Namespace) -> None:
    """Decides which labels are inputs, and checks that they can be."""
    multi_label = data.y.is_floating_point()
    if args.label_rate is None:
        args.label_rate = 0.0 if data.x is not None or multi_label else 0.625
    shown = args.label_rate > 0.0
    if shown and multi_label:
        raise SystemExit(
            f"error: {data.name} has several labels a node, and label inputs need one: "
            "--label-rate must be 0"
        )
    if args.correct_and_smooth and multi_label:
        raise SystemExit("error: --correct-and-smooth needs one label a node")
    for option in ("label_propagation", "label_reuse"):
        if getattr(args, option) and not shown:
            name = option.replace("_", "-")
            raise SystemExit(f"error: --{name} needs label inputs: give a --label-rate")
    if data.x is None:
        inputs = "label inputs and degrees" if shown else "degrees"
        print(f"Inputs: no node features here; trains from {inputs} alone")
    if shown:
        print(
            f"Label inputs: {args.label_rate:g} of the training labels shown in each step, the "
            "loss on the others; at test time all training labels and no others"
        )


def directions(data: Data, graph: Graph) -> Tensor:
    """Of each edge of ``graph``, whether ``data`` has it, and whether it has its reverse."""
    stored, there = (src * data.num_nodes + dst for src, dst in (data.edge_index, graph.edge_index))
    back = graph.edge_index[1] * data.num_nodes + graph.edge_index[0]
    return torch.stack([torch.isin(there, stored), torch.isin(back, stored)], dim=1).float()


def num_outputs(data: Data) -> int:
    """One for each class, or for each of several labels a node."""
    return data.y.size(1) if data.y.is_floating_point() else data.num_classes


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


MakeModel = Callable[[Data, argparse.Namespace], torch.nn.Module]


def make_model(data: Data, args: argparse.Namespace) -> GraphTransformer:
    return GraphTransformer(
        0 if data.x is None else data.x.size(1),
        args.hidden,
        num_outputs(data),
        args.layers,
        args.heads,
        feedforward=args.feedforward,
        gated=args.gated,
        head=args.head,
        jumping_knowledge=args.jumping_knowledge,
        global_layers=args.global_layers,
        diffusion_steps=args.diffusion_steps,
        teleport=args.teleport,
        label_classes=data.num_classes if args.label_rate > 0.0 else 0,
        degree_encoding=data.x is None if args.degree_encoding is None else args.degree_encoding,
        input_projection=args.input_projection,
        edge_dim=None if data.edge_attr is None else data.edge_attr.size(1),
        root_weight=args.root_weight,
        beta=args.beta,
        residual=args.residual,
        norm=None if args.norm == "none" else args.norm,
        degree_scaling=args.degree_scaling,
        activation=args.activation,
        dropout=args.dropout,
        input_dropout=args.input_dropout,
        attention_dropout=args.attention_dropout,
        attention_gain=args.attention_gain,
        edge_dropout=args.edge_dropout,
        backend=args.backend,
    )


def split_of(data: Data, run: int) -> dict[str, Tensor]:
    """The masks of a run: split ``run`` where there are several."""
    masks = {name: data[f"{name}_mask"] for name in ("train", "val", "test")}
    return {
        name: mask if mask.dim() == 1 else mask[:, run % mask.size(1)]
        for name, mask in masks.items()
    }


def neighbour_mean(x: Tensor, graph: Graph) -> Tensor:
    """The mean of the neighbours' rows: attention whose scores are all equal.

    Args:
        x: ``[num_src, C]``.
        graph: Who has which neighbours.

    Returns:
        ``[num_dst, C]``, zeros for nodes without neighbours.
    """
    query, key = (x.new_zeros(size, 1, 1) for size in (graph.num_dst, graph.num_src))
    return graph_attention(query, key, x[:, None], graph)[:, 0]


def propagate(known: Tensor, shown: Tensor, graph: Graph, steps: int) -> Tensor:
    """Label propagation: nodes that are not ``shown`` take the mean of their neighbours' shares.

    Source: "Learning from Labeled and Unlabeled Data with Label Propagation", Zhu and Ghahramani,
    2002.

    Args:
        known: ``[N, C]``, labels as shares of classes, zeros where they are not shown.
        shown: ``[N]`` bool.
        graph: The graph, both ways.
        steps: How far labels spread, in edges.

    Returns:
        ``[N, C]``, ``known`` where it is shown.
    """
    shares = known
    for _ in range(steps):
        shares = torch.where(shown[:, None], known, neighbour_mean(shares, graph))
    return shares


# The loop #########################################################################################


class Run:
    """One seed: a model, its optimiser, and the history of its metrics."""

    def __init__(
        self,
        data: Data,
        graph: Graph,
        args: argparse.Namespace,
        index: int,
        make_model: MakeModel = make_model,
    ) -> None:
        torch.manual_seed(args.seed + index)
        self.masks = split_of(data, index)
        self.data, self.graph, self.args, self.index = copy.copy(data), graph, args, index
        self.data.train_mask = self.masks["train"]
        self.model = make_model(data, args).to(args.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=args.lr, weight_decay=args.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.average: AveragedModel | None = None
        if args.ema > 0.0:
            decay = get_ema_multi_avg_fn(args.ema)
            self.average = AveragedModel(self.model, multi_avg_fn=decay, use_buffers=True)
        on_gpu = args.device != "cpu"
        mode = "reduce-overhead" if on_gpu else "default"
        self.compiled = torch.compile(self.model, mode=mode) if args.compile else self.model
        self.history: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.best: Tensor | None = None  # outputs at the best epoch, for what comes after training

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch over its highest."""
        if self.args.schedule == "constant" and epoch >= self.args.warmup:
            return 1.0
        return warmup_cosine(epoch, steps=self.args.epochs, warmup=self.args.warmup)

    def train_epoch(self) -> float:
        """A step for each part of the nodes; returns the mean loss."""
        self.model.train()
        losses = [self.train_step(*part) for part in self.parts()]
        self.schedule.step()
        return torch.stack(losses).mean().item()

    def parts(self) -> Iterator[tuple[Data, Graph]]:
        """The whole graph, or the subgraphs of a random partition of its nodes."""
        if self.args.parts == 1:
            yield self.data, self.graph
            return
        for part in RandomNodeLoader(self.data, self.args.parts, shuffle=True):
            if part.train_mask.any():
                part = part.to(self.args.device)
                yield part, Graph(part.edge_index, part.num_nodes)

    def train_step(self, data: Data, graph: Graph) -> Tensor:
        self.optimizer.zero_grad()
        labels, hidden = None, data.train_mask
        if self.args.label_rate > 0.0:
            hidden = torch.zeros_like(hidden)
            while not hidden.any():  # something must be left to predict
                labels, hidden = mask_labels(data.y, data.train_mask, self.args.label_rate)
        loss = self.loss(self.outputs(self.compiled, data, graph, labels), data.y, hidden)
        loss.backward()
        if self.args.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return loss.detach()

    def outputs(
        self, model: torch.nn.Module, data: Data, graph: Graph, labels: Tensor | None
    ) -> Tensor:
        """Logits ``[N, C]``, after as many passes as labels and predictions are reused."""
        inputs, edge_attr = labels, data.edge_attr
        steps, passes = self.args.label_propagation, self.args.label_reuse
        if labels is not None and (steps or passes):
            shown = labels >= 0
            known = F.one_hot(labels.clamp(min=0), data.num_classes).float() * shown[:, None]
            inputs = propagate(known, shown, graph, steps) if steps else labels
        with torch.autocast(data.y.device.type, torch.bfloat16, enabled=self.args.autocast):
            out = model(data.x, graph, labels=inputs, edge_attr=edge_attr)
            for _ in range(passes):
                inputs = torch.where(shown[:, None], known, out.detach().float().softmax(dim=1))
                out = model(data.x, graph, labels=inputs, edge_attr=edge_attr)
        return out.float()

    def loss(self, out: Tensor, target: Tensor, nodes: Tensor) -> Tensor:
        """The mean over these nodes, by a mask: no shape depends on how many they are."""
        smoothing = self.args.label_smoothing
        if not target.is_floating_point():
            target = torch.where(nodes, target, -100)  # which counts as nothing
            return F.cross_entropy(out, target, label_smoothing=smoothing)
        known = nodes[:, None] & ~target.isnan()
        target = target.nan_to_num() * (1.0 - smoothing) + 0.5 * smoothing
        losses = F.binary_cross_entropy_with_logits(out, target, reduction="none")
        return losses.where(known, 0.0).sum() / known.sum()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        model = self.compiled if self.average is None else self.average
        model.eval().to(self.data.y.device)
        labels = None
        if self.args.label_rate > 0.0:
            labels, _ = mask_labels(self.data.y, self.data.train_mask, 1.0)
        out = self.outputs(model, self.data, self.graph, labels)
        model.to(self.args.device)
        metrics = self.metrics(out)
        if self.args.correct_and_smooth and self.is_best(metrics):
            self.best = out
        return metrics

    def metrics(self, out: Tensor) -> dict[str, float]:
        return {
            name: evaluate(self.data.metric, out[mask], self.data.y[mask])
            for name, mask in self.masks.items()
        }

    def is_best(self, metrics: dict[str, float]) -> bool:
        return all(metrics["val"] > epoch["val"] for epoch in evaluated(self.history))

    def is_over(self) -> bool:
        """Whether all epochs are done, or the best is ``--patience`` epochs ago."""
        epochs, patience = len(self.history), self.args.patience
        if epochs == self.args.epochs or patience is None or not evaluated(self.history):
            return epochs == self.args.epochs
        return epochs - 1 - self.history.index(best_epoch(self.history)) >= patience

    def corrected(self) -> dict[str, float] | None:
        """The metrics after Correct & Smooth, which spreads what is known of training nodes.

        "Combining Label Propagation and Simple Models Out-performs Graph Neural Networks"
        (https://arxiv.org/abs/2010.13993), along the edges with symmetric normalisation.
        """
        if not self.args.correct_and_smooth or self.best is None:
            return None
        spread = CorrectAndSmooth(
            50, self.args.correction_alpha, 50, self.args.smoothing_alpha, autoscale=True
        )
        train = self.masks["train"]
        adj = gcn_norm(self.graph.edge_index, num_nodes=self.data.num_nodes, add_self_loops=False)
        soft = spread.correct(self.best.softmax(dim=1), self.data.y[train], train, *adj)
        return self.metrics(spread.smooth(soft, self.data.y[train], train, *adj))

    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        loss = self.train_epoch()
        if self.args.device != "cpu":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        epoch = len(self.history) + 1
        due = epoch % self.args.evaluate_every == 0 or epoch == self.args.epochs
        self.history.append({"loss": loss, **(self.evaluate() if due else {})})
        return self.history[-1]

    def state(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "best": self.best,
            "history": self.history,
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.args.device != "cpu" else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.history, self.seconds, self.best = state["history"], state["seconds"], state["best"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])


class Checkpoint:
    """What has been done so far, in one file, replaced in one step."""

    # Options that do not change what is computed.
    FREE = (
        *("config", "resume", "overwrite", "checkpoint_seconds", "json", "out", "log_every"),
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
    make_model: MakeModel,
) -> list[dict[str, Any]]:
    """The history of every run, those in the checkpoint's ``state`` included."""
    finished: list[dict[str, Any]] = [] if state is None else state["finished"]
    started = None if state is None else state["run"]
    total, done = args.runs * args.epochs, len(finished) * args.epochs
    # disable=None: no bar where nobody watches a terminal.
    with tqdm(total=total, initial=done, unit="epoch", dynamic_ncols=True, disable=None) as bar:
        for index in range(len(finished), args.runs):
            run = Run(data, graph, args, index, make_model)
            if started is not None:
                run.load(started)
                bar.update(len(run.history))
                started = None
            while not run.is_over():
                metrics = run.step()
                epoch = len(run.history)
                due = epoch % args.log_every < args.evaluate_every or epoch in (1, args.epochs)
                if due and "val" in metrics:
                    bar.write(epoch_line(index, epoch, metrics), file=sys.stdout)
                    sys.stdout.flush()
                bar.update(1)
                checkpoint.save(finished, run, force=False)
            bar.update(args.epochs - len(run.history))
            final = run.corrected() or best_epoch(run.history)
            finished.append(
                {
                    "seed": args.seed + index,
                    "history": run.history,
                    "seconds": run.seconds,
                    "final": final,
                }
            )
            checkpoint.save(finished, None, force=True)
            bar.write(run_summary(index, final), file=sys.stdout)
    return finished


def train(
    data: Data,
    args: argparse.Namespace,
    prepare: Callable[[Data, argparse.Namespace], tuple[Data, Graph]] = prepare,
    make_model: MakeModel = make_model,
) -> dict[str, Any]:
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
    if args.parts == 1:  # else only parts go there
        data, graph = data.to(args.device), graph.to(args.device)
    if args.compile:
        _ = graph.edge_index, graph.src_ptr  # made now, or else by what is compiled
    try:
        model = make_model(data, args)
    except ValueError as error:  # options that exclude each other
        raise SystemExit(f"error: {error}") from None
    parameters = num_parameters(model)
    print(f"Model: {type(model).__name__}, {parameters:,} parameters")

    try:
        finished = run_all(data, graph, args, checkpoint, state, make_model)
    except KeyboardInterrupt:
        exists = checkpoint.path.exists()
        print("Stopped;", f"--resume goes on from {checkpoint.path}" if exists else "nothing saved")
        raise SystemExit(130) from None
    result = summarise(data, graph, args, parameters, finished)
    print_result(result)
    write(result, finished, args)
    checkpoint.path.unlink(missing_ok=True)
    return result


def run(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """What a script does: read the options, load the set, train."""
    add_options(parser)
    args = parse(parser, argv)
    return train(load_or_exit(parser, args), args)


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


def evaluated(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The epochs that have metrics: all, or one in ``--evaluate-every``."""
    return [epoch for epoch in history if "val" in epoch]


def best_epoch(history: list[dict[str, float]]) -> dict[str, float]:
    """The epoch with the highest validation metric, the first of equals."""
    return max(evaluated(history), key=lambda epoch: epoch["val"])


def run_summary(run: int, final: dict[str, float]) -> str:
    return (
        f"Run {run + 1:02d}:\n"
        f"Highest Valid: {100 * final['val']:.2f}\n"
        f"  Final Train: {100 * final['train']:.2f}\n"
        f"   Final Test: {100 * final['test']:.2f}"
    )


def summarise(
    data: Data,
    graph: Graph,
    args: argparse.Namespace,
    parameters: int,
    finished: list[dict[str, Any]],
) -> dict[str, Any]:
    numbers = {}
    for name in ("val", "train", "test"):
        values = [100 * run["final"][name] for run in finished]
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
        "correct_and_smooth": bool(args.correct_and_smooth),
        "num_nodes": data.num_nodes,
        "num_edges": graph.num_edges,
        "parameters": parameters,
        **numbers,
        "seconds_per_epoch": statistics.median(seconds),
        "peak_memory_bytes": peak,
        "epochs": max(len(run["history"]) for run in finished),
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
                [i + 1 for i, epoch in enumerate(epochs) if name in epoch],
                [100 * epoch[name] for epoch in epochs if name in epoch],
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
