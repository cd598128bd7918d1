"""The contestants: graphattn by each backend, and what people use for the same job today.

A contestant is a function of no arguments that computes the output of one case from its inputs, as
a user of its library would write it. What it needs only once for a graph is made before, untimed.
"""

from __future__ import annotations

import math
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch_geometric
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import TransformerConv

import graphattn
from cases import Case
from graphattn import Graph, backends, graph_attention
from graphattn.nn import GraphAttentionConv

GRAPHATTN = "graphattn"  # with backend="auto": what all others are compared with
# Above this, attention over all pairs is left out: it takes many seconds a call and no less.
DENSE_LIMIT = 3 * 2**29
# How many tensors [E, H, D] are alive at the peak where rows of edges are gathered by plain calls.
GATHERED = 7

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class LeftOut(Exception):
    """A contestant that does not run, with the reason: not installed, or too large a case."""


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case."""

    name: str
    version: str
    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]  # what gradients are taken of; empty where there is no backward


def names(what: str) -> list[str]:
    """All contestants of the operator or of the layer."""
    return list(OPERATORS if what == "operator" else LAYERS)


def prepare(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    """The contestant ``name``, ready to run on ``inputs``.

    Raises:
        LeftOut: It is not installed, or the case is too large for it.
    """
    make = (OPERATORS if case.what == "operator" else LAYERS)[name]
    return make(name, case, inputs)


# The operator: query, key and value are given #####################################################


def _operator(
    name: str, label: str, inputs: dict[str, Tensor], attend: Attend, *, backward: bool = True
) -> Contestant:
    return Contestant(name, label, partial(attend, **inputs), inputs if backward else {})


def _graphattn(
    name: str, case: Case, inputs: dict[str, Tensor], *, backend: str = "auto"
) -> Contestant:
    _require_backend(backend, case)
    graph = Graph(case.edge_index, case.num_nodes)
    attend = partial(graph_attention, graph=graph, backend=backend)
    return _operator(name, GRAPHATTN_VERSION, inputs, attend)


def _pyg(name: str, case: Case, inputs: dict[str, Tensor], *, compiled: bool = False) -> Contestant:
    _require_memory(case, (1 if compiled else GATHERED) * case.per_edge_bytes)
    conv = TransformerConv(1, case.head_dim, heads=case.heads)  # its projections are not used

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = conv.propagate(case.edge_index, query=query, key=key, value=value, edge_attr=None)
        conv._alpha = None  # as at the end of its forward
        return out

    return _operator(name, PYG, inputs, _compile(attend) if compiled else attend)


def _torch_scatter(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    reason = backends.missing("scatter")
    if reason is not None:
        raise LeftOut(f"not available: {reason}")
    from torch_scatter import scatter_softmax, scatter_sum

    _require_memory(case, GATHERED * case.per_edge_bytes)
    src, dst = case.edge_index

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        score = (query[dst] * key[src]).sum(dim=-1) / math.sqrt(case.head_dim)
        alpha = scatter_softmax(score, dst, dim=0, dim_size=case.num_nodes)
        return scatter_sum(alpha.unsqueeze(-1) * value[src], dst, dim=0, dim_size=case.num_nodes)

    return _operator(name, f"torch-scatter {version('torch-scatter')}", inputs, attend)


def _dgl(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    dgl = _import_dgl()
    src, dst = case.edge_index
    graph = dgl.graph((src, dst), num_nodes=case.num_nodes)
    graph.create_formats_()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        score = dgl.ops.u_dot_v(graph, key, query) / math.sqrt(case.head_dim)  # [E, H, 1]
        return dgl.ops.u_mul_e_sum(graph, value, dgl.ops.edge_softmax(graph, score))

    return _operator(name, f"dgl {dgl.__version__}", inputs, attend)


def _torch_sparse(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    graph = Graph(case.edge_index, case.num_nodes)
    ptr, degree, square = graph.dst_ptr, graph.in_degree(), (case.num_nodes, case.num_nodes)
    # Rows are targets. Checking what is known to be right would be timed with every product.
    matrix = partial(torch.sparse_csr_tensor, ptr, graph.src_index, size=square)
    torch.sparse.check_sparse_tensor_invariants.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state", once
        mask = matrix(torch.zeros(case.num_edges, dtype=case.dtype, device=ptr.device))

    def attend_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sampled = torch.sparse.sampled_addmm(mask, query, key.t(), beta=0.0)
        score = sampled.values() / math.sqrt(case.head_dim)
        top = torch.segment_reduce(score, "max", offsets=ptr, initial=float("-inf"))
        weight = (score - top.repeat_interleave(degree)).exp()
        total = torch.segment_reduce(weight, "sum", offsets=ptr)
        return matrix(weight / total.repeat_interleave(degree)) @ value

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
        with torch.no_grad():
            return torch.stack([attend_head(*head) for head in heads], dim=1)

    return _operator(name, TORCH, inputs, attend, backward=False)


def _sdpa(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    mask = _dense_mask(case)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, H, N, D]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

    return _operator(name, TORCH, inputs, attend)


def _flex(name: str, case: Case, inputs: dict[str, Tensor]) -> Contestant:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, device = _dense_mask(case), case.edge_index.device

    def allowed(batch: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
        return mask[target, source]

    n = case.num_nodes
    blocks = create_block_mask(allowed, None, None, n, n, device=device.type)
    compiled = _compile(flex_attention)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return compiled(q, k, v, block_mask=blocks)[0].transpose(0, 1)

    if device.type == "cpu":  # where it has no backward, and refuses inputs that ask for one
        inputs = {key: x.detach() for key, x in inputs.items()}
        return _operator(name, TORCH, inputs, attend, backward=False)
    return _operator(name, TORCH, inputs, attend)


# The layer: projections of x, attention, skip connection ##########################################


def _layer(
    name: str,
    label: str,
    layer: nn.Module,
    graph: Graph | Tensor,
    inputs: dict[str, Tensor],
    *,
    compiled: bool = False,
) -> Contestant:
    x, parameters = inputs["x"], {key: value for key, value in inputs.items() if key != "x"}
    layer.to(x.device, x.dtype).load_state_dict(parameters)
    run = _compile(layer) if compiled else layer
    return Contestant(
        name, label, partial(run, x, graph), {"x": x, **dict(layer.named_parameters())}
    )


def _graphattn_layer(
    name: str, case: Case, inputs: dict[str, Tensor], *, backend: str = "auto"
) -> Contestant:
    _require_backend(backend, case)
    layer = GraphAttentionConv(case.width, case.head_dim, heads=case.heads, backend=backend)
    return _layer(name, GRAPHATTN_VERSION, layer, Graph(case.edge_index, case.num_nodes), inputs)


def _pyg_layer(
    name: str, case: Case, inputs: dict[str, Tensor], *, compiled: bool = False
) -> Contestant:
    _require_memory(case, (1 if compiled else GATHERED) * case.per_edge_bytes)
    layer = TransformerConv(case.width, case.head_dim, heads=case.heads)
    return _layer(name, PYG, layer, case.edge_index, inputs, compiled=compiled)


# What they need ###################################################################################


def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled for the very sizes of the case, and with nothing left to the interpreter."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def _require_backend(backend: str, case: Case) -> None:
    reason = None if backend == "auto" else backends.missing(backend)
    if reason is not None:
        raise LeftOut(f"not available: {reason}")
    if backend == "scatter":
        _require_memory(case, GATHERED * case.per_edge_bytes)


def _require_memory(case: Case, need: int) -> None:
    """Raises unless ``need`` bytes are free: a process that takes more is killed, not told."""
    free = free_memory(case.edge_index.device)
    if free is not None and need > free:
        raise LeftOut(
            f"too large: needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB were free"
        )


@cache
def free_memory(device: torch.device) -> int | None:
    """Bytes free at the first look; later this process may keep pages that it can use again."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def dense_bytes(num_nodes: int, itemsize: int) -> int:
    """The mask of all pairs, as booleans and as the numbers that kernels add to the scores."""
    return num_nodes**2 * (1 + itemsize)


def _dense_mask(case: Case) -> Tensor:
    need = dense_bytes(case.num_nodes, case.dtype.itemsize)
    if need > DENSE_LIMIT:
        raise LeftOut(
            f"too large: the mask of {case.num_nodes:,} x {case.num_nodes:,} pairs takes "
            f"{need / 2**30:.2f} GiB, and the limit is {DENSE_LIMIT / 2**30:.2f} GiB"
        )
    src, dst = case.edge_index
    mask = torch.zeros(case.num_nodes, case.num_nodes, dtype=torch.bool, device=src.device)
    mask[dst, src] = True
    return mask


def _import_dgl() -> types.ModuleType:
    if find_spec("dgl") is None:
        raise LeftOut("not installed")
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else it asks, and writes a file in the home
    if "dgl" not in sys.modules:
        # Its module for data loading, which the operators do not use, loads a library that was
        # built for another torch. With an empty one in its place the rest can be imported.
        sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")
    try:
        import dgl
    except Exception as error:  # libraries of another torch fail in many ways
        raise LeftOut(f"not available: cannot be imported: {error}") from error
    return dgl


TORCH = f"torch {torch.__version__}"
GRAPHATTN_VERSION = f"graphattn {graphattn.__version__}"
PYG = f"torch-geometric {torch_geometric.__version__}"

OPERATORS: dict[str, Callable[[str, Case, dict[str, Tensor]], Contestant]] = {
    GRAPHATTN: _graphattn,
    **{f"{GRAPHATTN}-{name}": partial(_graphattn, backend=name) for name in backends.NAMES},
    "pyg": _pyg,
    "pyg-compiled": partial(_pyg, compiled=True),
    "torch-scatter": _torch_scatter,
    "dgl": _dgl,
    "torch-sparse": _torch_sparse,
    "sdpa": _sdpa,
    "flex": _flex,
}
LAYERS: dict[str, Callable[[str, Case, dict[str, Tensor]], Contestant]] = {
    GRAPHATTN: _graphattn_layer,
    **{f"{GRAPHATTN}-{name}": partial(_graphattn_layer, backend=name) for name in backends.NAMES},
    "pyg": _pyg_layer,
    "pyg-compiled": partial(_pyg_layer, compiled=True),
}
