"""What must hold of the fused kernels on the device where they run, each as a step with its rows.

They are checked against float64 by the rule of the tests: twice (gradients: three times) as far off
as plain PyTorch at the same dtype, and a floor of a few units in the last place.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cases import DTYPES, skewed
from graphattn import Graph, graph_attention
from graphattn.dropout import draw_seed, keep_mask
from graphattn.nn import GraphAttentionConv
from graphattn.testing import GraphCase, assert_close_to_reference, edge_reference, zoo

Row = dict[str, Any]
Step = tuple[Row, Callable[[], list[Row] | None]]  # what its rows start with, and what it does

CALLS: dict[str, dict[str, Any]] = {
    "1 x 1": {"heads": 1, "dim": 1},
    "3 x 5, value 7, bias": {"heads": 3, "dim": 5, "value_dim": 7, "bias": True},
    "8 x 20, edge features": {"heads": 8, "dim": 20, "edge_dim": 3},
    "8 x 32": {"heads": 8, "dim": 32},
    "8 x 32, all": {"heads": 8, "dim": 32, "bias": True, "edge_dim": 8, "dropout": 0.3},
    "8 of 2 keys x 32, dropout": {"heads": 8, "key_heads": 2, "dim": 32, "dropout": 0.3},
    "4 x 64, bias": {"heads": 4, "dim": 64, "bias": True},
    "6 of 3 keys x 64, edge features": {"heads": 6, "key_heads": 3, "dim": 64, "edge_dim": 5},
    "1 x 128, value 20, dropout": {"heads": 1, "dim": 128, "value_dim": 20, "dropout": 0.5},
    "3 x 256, bias": {"heads": 3, "dim": 256, "bias": True},
    "leading 2 x 3, 4 of 2 keys x 20": {
        "leading": (2, 3),
        "heads": 4,
        "key_heads": 2,
        "dim": 20,
        "bias": True,
        "dropout": 0.3,
    },
    "leading 2, 8 x 32, bias of each": {
        "leading": (2,),
        "heads": 8,
        "dim": 32,
        "bias": True,
        "bias_leading": True,
    },
}
QUICK_CALLS = {
    "4 of 2 keys x 5, all": {
        "heads": 4,
        "key_heads": 2,
        "dim": 5,
        "bias": True,
        "edge_dim": 2,
        "dropout": 0.3,
    }
}
QUICK_ZOO = ("no edges", "one edge, isolated nodes", "parallel edges")
LIGHT = (20_000, 60_000, 700)  # so many rows of few edges that several share a program

triton_attention = partial(graph_attention, backend="triton")
eager_attention = partial(graph_attention, backend="eager")


class Skipped(Exception):
    """A step that cannot run here, with the reason."""


def run_steps(steps: Iterable[Step], until: float) -> Iterator[Row]:
    """The rows of each step, or one that says why there are none. No step ends the others."""
    for labels, step in steps:
        begun, rows, status = time.time(), None, "ok"
        try:
            if begun > until:
                raise Skipped("time")
            rows = step()
        except Skipped as reason:
            status = f"skipped: {reason}"
        except Exception as error:
            traceback.print_exc()
            status = f"failed: {one_line(error)}"
        seconds = round(time.time() - begun, 3)
        for row in rows or [{}]:
            yield {**labels, "status": status, "seconds": seconds, **row}


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# Every check ######################################################################################


def jobs(quick: bool, device: torch.device) -> dict[str, list[Step]]:
    """All checks, in groups that may run side by side in processes of their own."""
    found: dict[str, list[Step]] = {}
    for check in (
        beyond_2_to_31,
        star_in,
        star_out,
        cuda_graph,
        cuda_graph_dropout,
        no_synchronisation,
        compiled_layer,
        layer_under_autocast,
        dropout_mask,
        equal_values,
        second_derivative,
    ):
        name = check.__name__.replace("_", " ")
        found[name] = [({"what": name}, partial(check, device, quick))]
    for call, shape in (QUICK_CALLS if quick else CALLS).items():
        for dtype in ("float32", "bfloat16") if quick else ("float32", "bfloat16", "float16"):
            found[f"{call}, {dtype}"] = [
                (
                    {
                        "what": call,
                        "graph": case.name,
                        "num_nodes": case.num_dst,
                        "num_edges": case.edge_index.size(1),
                        "heads": shape["heads"],
                        "head_dim": shape["dim"],
                        "dtype": dtype,
                    },
                    partial(one_call, case, device, DTYPES[dtype], **shape),
                )
                for case in graphs_to_check(quick)
            ]
    return found


@cache
def graphs_to_check(quick: bool) -> list[GraphCase]:
    """The zoo, rows around the length at which they are cut, and rows that share a program."""
    if quick:
        return [case for case in zoo(hub=2) if case.name in QUICK_ZOO]
    degree = torch.tensor([255, 256, 257, 0, 511, 512, 513, 1, 1300])
    dst = torch.repeat_interleave(degree)
    src = torch.arange(dst.numel()) % 40
    cut, light = torch.stack([src, dst]), skewed(*LIGHT)
    return [
        *zoo(hub=2000),
        GraphCase("targets around a cut", cut, 40, degree.numel()),
        GraphCase("sources around a cut", cut.flip(0), degree.numel(), 40),
        GraphCase("light rows", light, LIGHT[0], LIGHT[0]),
    ]


def draw(
    case: GraphCase,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    dim: int,
    key_heads: int | None = None,
    value_dim: int | None = None,
    edge_dim: int | None = None,
    leading: tuple[int, ...] = (),
    bias: bool = False,
    bias_leading: bool = False,
) -> dict[str, Tensor]:
    """Arguments of the operator by name, each of which asks for a gradient."""
    key_heads = heads if key_heads is None else key_heads
    num_edges = case.edge_index.size(1)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*leading, case.num_dst, heads, dim),
        "key": (*leading, case.num_src, key_heads, dim),
        "value": (*leading, case.num_src, key_heads, dim if value_dim is None else value_dim),
    }
    if bias:
        shapes["bias"] = (*(leading if bias_leading else ()), num_edges, heads)
    if edge_dim is not None:
        shapes["edge_attr"] = (num_edges, edge_dim)
        shapes["edge_weight"] = (heads, dim, edge_dim)
    torch.manual_seed(0)
    return {
        name: torch.randn(shape, device=device).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def graph_on(case: GraphCase, device: torch.device) -> Graph:
    return Graph(case.edge_index.to(device), (case.num_src, case.num_dst))


def cotangent_for(tensors: dict[str, Tensor]) -> Tensor:
    """A gradient that arrives at the output of a call with these arguments."""
    query, value = tensors["query"], tensors["value"]
    shape = torch.Size((*query.shape[:-1], value.size(-1)))
    return torch.linspace(-1, 1, shape.numel(), device=query.device).view(shape).to(query.dtype)


def attend(
    tensors: dict[str, Tensor],
    graph: Graph,
    cotangent: Tensor,
    function: Callable[..., Any] = triton_attention,
    **options: Any,
) -> list[Tensor]:
    """Output, and the gradients of all tensors in their order; dropout has the same seed always."""
    torch.manual_seed(3)
    out = function(**tensors, graph=graph, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [*tensors.values()], cotangent.to(out.dtype))]


def in_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in tensors.items()}


def one_call(
    case: GraphCase, device: torch.device, dtype: torch.dtype, *, dropout: float = 0.0, **shape: Any
) -> None:
    """Output and all gradients by the rule of the tests, and bit for bit the same in a second run.

    Against the definition; where that would take too much memory, against eager.
    """
    tensors, graph = draw(case, device, dtype, **shape), graph_on(case, device)
    query, cotangent = tensors["query"], cotangent_for(tensors)
    found = attend(tensors, graph, cotangent, dropout=dropout)
    again = attend(tensors, graph, cotangent, dropout=dropout)
    for name, first, second in zip(("output", *tensors), found, again, strict=True):
        assert torch.equal(first, second), f"{name}: another result in a second run"
    small = query[..., 0].numel() * graph.num_edges <= 1 << 24
    expected = partial(edge_reference if small else eager_attention, dropout=dropout)
    if small and dropout > 0.0:
        torch.manual_seed(3)
        every = torch.arange(graph.num_edges, device=device)
        batch = query.shape[:-3].numel()
        keep = keep_mask(draw_seed(device), every, query.size(-2), dropout, batch=batch)
        shape = (*query.shape[:-3], graph.num_edges, query.size(-2))
        expected = partial(expected, keep=keep.movedim(1, 0).reshape(shape))
    plain = attend(tensors, graph, cotangent, expected)
    exact = attend(in_float64(tensors), graph, cotangent, expected)
    assert_right(found, plain, exact, graph, tensors)


def assert_right(
    found: list[Tensor],
    plain: list[Tensor],
    exact: list[Tensor],
    graph: Graph,
    names: Iterable[str],
) -> None:
    """By the rule for low precision; ``names`` are those of the gradients."""
    degrees = torch.cat([graph.in_degree(), graph.out_degree()])
    terms = max(1, int(degrees.max())) if degrees.numel() > 0 else 1
    for name, x, p, e in zip(("output", *names), found, plain, exact, strict=True):
        factor = 2.0 if name == "output" else 3.0
        try:
            assert_close_to_reference(x, p, e, factor=factor, in_degree=terms)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def close(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    """No further apart than so much of the largest number, or of 1."""
    for place, (x, y) in enumerate(zip(found, expected, strict=True)):
        error = float((x.double() - y.double()).abs().max())
        allowed = relative * max(1.0, float(y.abs().max()))
        what = "output" if place == 0 else f"gradient {place}"
        assert error <= allowed, f"{what}: error {error:.3g} exceeds {allowed:.3g}"


def small_case(quick: bool, name: str = "shuffled") -> GraphCase:
    name = "parallel edges" if quick else name
    return next(case for case in zoo() if case.name == name)


def require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("needs cuda")


def beyond_2_to_31(device: torch.device, quick: bool) -> None:
    """Query, key and value of more than 2**31 numbers, and edges at both of their ends."""
    heads, dim, dtype = 8, 32, torch.bfloat16
    nodes, few = (24, 4) if quick else (2**31 // (heads * dim) + 1000, 500)
    near = torch.arange(few, device=device)
    far = nodes - 1 - near
    src, dst = torch.cat([far, near, far]), torch.cat([near, far.flip(0), far.roll(1)])
    ends = torch.cat([near, far.flip(0)])
    tensors, few_rows = {}, {}
    for name in ("query", "key", "value", "cotangent"):
        few_rows[name] = torch.randn(2 * few, heads, dim, device=device).to(dtype)
        tensors[name] = torch.zeros(nodes, heads, dim, device=device, dtype=dtype)
        tensors[name][ends] = few_rows[name]
    cotangent, cotangent_of_few = tensors.pop("cotangent"), few_rows.pop("cotangent")
    assert quick or tensors["key"].numel() > 2**31
    for x in (*tensors.values(), *few_rows.values()):
        x.requires_grad_()
    small = Graph(torch.searchsorted(ends, torch.stack([src, dst])), 2 * few)
    found = attend(tensors, Graph(torch.stack([src, dst]), nodes), cotangent)
    at_ends = [x[ends] for x in found]
    for x in found:
        x[ends] = 0
        assert not x.any(), "not zero where there is no edge"
    assert_right(
        at_ends,
        attend(few_rows, small, cotangent_of_few, edge_reference),
        attend(in_float64(few_rows), small, cotangent_of_few, edge_reference),
        small,
        tensors,
    )


def star(device: torch.device, leaves: int, *, out: bool) -> None:
    """Against float64; what cancels in a sum over leaves is kept from being all of it."""
    center, every = torch.zeros(leaves, dtype=torch.int64), torch.arange(leaves)
    pair = [center, every] if out else [every, center]
    case = GraphCase("star", torch.stack(pair), 1 if out else leaves, leaves if out else 1)
    tensors = draw(case, device, torch.float32, heads=2, dim=16)
    with torch.no_grad():
        tensors["value"] += tensors["key"] + 1
    # So that a leaf's share of a gradient, or the sum of all, is of the order of 1.
    cotangent = torch.randn(case.num_dst, 2, 16, device=device)
    cotangent = (cotangent + 1) / leaves if out else cotangent * leaves
    graph, expected = graph_on(case, device), eager_attention if out else edge_reference
    found = attend(tensors, graph, cotangent)
    close(found, attend(in_float64(tensors), graph, cotangent, expected), 1e-5)


def star_in(device: torch.device, quick: bool) -> None:
    star(device, 7 if quick else 5_000_000, out=False)


def star_out(device: torch.device, quick: bool) -> None:
    star(device, 7 if quick else 5_000_000, out=True)


def replayed(device: torch.device, dropout: float) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Results of a captured forward and backward, and of the same call, with ever new inputs."""
    case = small_case(False, "power law")
    tensors = draw(case, device, torch.float32, heads=4, dim=16, bias=True)
    graph, leaves = graph_on(case, device), [*tensors.values()]
    cotangent = torch.randn(case.num_dst, 4, 16, device=device)

    def step() -> list[Tensor]:
        out = triton_attention(**tensors, graph=graph, dropout=dropout)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (*leaves, cotangent):
                x.copy_(torch.randn_like(x))
        for x in results:
            x.fill_(math.nan)
        captured.replay()
        yield [x.clone() for x in results], step()


def cuda_graph(device: torch.device, quick: bool) -> None:
    """A replay gives the bits of the call with the same inputs."""
    require_cuda(device)
    for found, expected in replayed(device, 0.0):
        for place, (x, y) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(x, y), f"result {place}: another one in the replay"


def cuda_graph_dropout(device: torch.device, quick: bool) -> None:
    """Each replay draws another mask. With zeros for queries, only the mask can differ."""
    require_cuda(device)
    case = small_case(False, "complete")
    graph, query = graph_on(case, device), torch.zeros(case.num_dst, 4, 8, device=device)
    value = torch.ones_like(query)
    triton_attention(query, query, value, graph, dropout=0.5)  # compiles
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = triton_attention(query, query, value, graph, dropout=0.5)
    masks = []
    for _ in range(3):
        captured.replay()
        masks.append(out.clone())
    for first, second in ((0, 1), (1, 2)):
        assert not torch.equal(masks[first], masks[second]), "the same mask in two replays"
    for found, _ in replayed(device, 0.5):
        assert all(x.isfinite().all() for x in found)


def no_synchronisation(device: torch.device, quick: bool) -> None:
    """Nothing in a forward and backward waits for the device."""
    require_cuda(device)
    case = small_case(False, "power law")
    tensors = draw(case, device, torch.bfloat16, heads=4, dim=16, bias=True, edge_dim=3)
    graph, cotangent = graph_on(case, device), cotangent_for(tensors)

    def step() -> None:
        out = triton_attention(**tensors, graph=graph, dropout=0.3)
        torch.autograd.grad(out, [*tensors.values()], cotangent)

    step()  # compiles, and sorts by source
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers(device: torch.device, quick: bool, other: str) -> list[tuple[GraphAttentionConv, Any]]:
    """The same layer by two backends, each with its inputs."""
    case = small_case(quick)
    torch.manual_seed(0)
    inputs = torch.randn(case.num_dst, 6), torch.randn(case.edge_index.size(1), 3)
    x, edge_attr = (rows.to(device) for rows in inputs)
    pair = [
        GraphAttentionConv(6, 4, heads=2, edge_dim=3, beta=True, backend=name).to(device)
        for name in ("triton", other)
    ]
    pair[1].load_state_dict(pair[0].state_dict())
    graph = graph_on(case, device)
    _ = graph.src_ptr  # made now, or else by what is compiled
    return [(layer, (x, graph, edge_attr)) for layer in pair]


def output_and_gradients(layer: torch.nn.Module, run: Callable[..., Tensor], inputs: Any) -> Any:
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out.float().pow(2).sum(), [*layer.parameters()])]


def compiled_layer(device: torch.device, quick: bool) -> None:
    """A layer compiled whole gives what it gives by itself."""
    (layer, inputs), (same, _) = layers(device, quick, "triton")
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = output_and_gradients(layer, compiled, inputs)
    close(found, output_and_gradients(same, same, inputs), 1e-4)


def layer_under_autocast(device: torch.device, quick: bool) -> None:
    """In bfloat16, as eager."""
    found = []
    for layer, inputs in layers(device, quick, "eager"):
        with torch.autocast(device.type, torch.bfloat16):
            found.append(output_and_gradients(layer, layer, inputs))
    assert found[0][0].dtype == torch.bfloat16, f"output: {found[0][0].dtype}"
    close(*found, 0.05)


def dropout_mask(device: torch.device, quick: bool) -> None:
    """Under equal scores, with values that name their source, each output element is one weight."""
    num_src, num_dst, batch, heads = 5, 6, 2, 5
    pairs = torch.cartesian_prod(torch.arange(num_src), torch.arange(num_dst))
    src, dst = pairs[torch.randperm(pairs.size(0))].t()
    graph = Graph(torch.stack([src, dst]).to(device), (num_src, num_dst))
    query, key = (torch.zeros(batch, n, heads, 2, device=device) for n in (num_dst, num_src))
    value = torch.eye(num_src, device=device)[:, None].expand(batch, num_src, heads, num_src)
    inputs = (query, key, value.contiguous(), None, None, None)
    arrays = (graph.dst_ptr, graph.src_index, graph.edge_id, None, None, None)
    for seed in (7,) if quick else (0, -1, 7, 2**62 + 5, -(2**63)):
        given = (torch.tensor(seed, device=device), 1.0, 0.4, "triton")
        out, _, _ = torch.ops.graphattn.attention(*inputs, *arrays, *given)
        keep = keep_mask(torch.tensor(seed), torch.arange(src.numel()), heads, 0.4, batch=batch)
        kept = out.cpu()[:, dst, :, src] > 0  # [E, batch, heads]
        assert torch.equal(kept, keep), f"seed {seed}: {int((kept != keep).sum())} weights differ"


def equal_values(device: torch.device, quick: bool) -> None:
    """With equal values and sharp scores, query and key get no gradient but rounding."""
    for name in ("shuffled",) if quick else ("shuffled", "power law", "in-star"):
        case = small_case(quick, name)
        tensors = draw(case, device, torch.bfloat16, heads=2, dim=16)
        with torch.no_grad():
            tensors["query"] *= 20
            tensors["value"].copy_(tensors["value"][:1].clone().expand_as(tensors["value"]))
        graph, cotangent = graph_on(case, device), cotangent_for(tensors)
        _, *grads = attend(tensors, graph, cotangent)
        passed = (cotangent * tensors["value"][0]).detach().float().abs().sum(-1)
        terms = int(torch.cat([graph.in_degree(), graph.out_degree()]).max())
        rounding = 64 * torch.finfo(torch.float32).eps * math.sqrt(terms)
        for of, other in ((0, "key"), (1, "query")):
            size = max(1.0, float(passed.max())) * float(tensors[other].detach().abs().max())
            largest = float(grads[of].abs().max())
            assert largest <= rounding * size, (
                f"{name}: gradient {largest:.3g} exceeds {rounding * size:.3g}"
            )


def second_derivative(device: torch.device, quick: bool) -> None:
    """That of eager."""
    case = small_case(quick)
    tensors = draw(case, device, torch.float32, heads=2, dim=4, bias=True, edge_dim=2)
    graph, leaves, found = graph_on(case, device), [*tensors.values()], []
    for backend in ("triton", "eager"):
        out = graph_attention(**tensors, graph=graph, backend=backend)
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves)
        found.append([out.detach(), *second])
    close(*found, 1e-4)
