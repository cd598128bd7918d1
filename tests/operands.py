"""What the tests of the operator share: its arguments, its gradients, and how to compare them."""

import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphattn
from graphattn import backends, graph_attention
from graphattn.dropout import draw_seed, keep_mask
from graphattn.testing import (
    GraphCase,
    assert_close_to_reference,
    edge_reference,
    zoo,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}
# Those with float64. That of Triton runs in an interpreter here and has tests of its own.
BACKENDS = [name for name in backends.NAMES if name != "triton"]
ZOO = {case.name: case for case in zoo()}
SMALL = {case.name: case for case in zoo(hub=50)}
SHUFFLED, PARALLEL = ZOO["shuffled"], ZOO["parallel edges"]
ISOLATED = ZOO["one edge, isolated nodes"]  # 0 -> 1 of 4 nodes


SHAPES = {
    "heads 1, dim 1": {"heads": 1, "dim": 1, "edge_dim": 1},
    "dim 5, value 3": {"heads": 3, "dim": 5, "value_dim": 3},
    "dim 5, edge features": {"heads": 3, "dim": 5, "edge_dim": 2},
    "dim 20, grouped": {"heads": 4, "key_heads": 2, "dim": 20, "edge_dim": 3},
    "dim 4, one key head, value 7": {"heads": 4, "key_heads": 1, "dim": 4, "value_dim": 7},
    "dim 64": {"heads": 2, "dim": 64},
    "dim 128": {"heads": 1, "dim": 128, "edge_dim": 2},
    "dim 256": {"heads": 1, "dim": 256, "value_dim": 1},
    "no bias": {"bias": False},
    "leading 2": {"leading": (2,), "edge_dim": 3},
    "leading 2 x 3, grouped": {"leading": (2, 3), "heads": 4, "key_heads": 2, "value_dim": 3},
    "leading 2 x 1, bias too": {"leading": (2, 1), "bias_leading": True},
    "leading 0": {"leading": (0,), "edge_dim": 2},
}


def case_of_degrees(name, in_degree, out_degree):
    """Edges in random order between targets and sources of these degrees, equal in their sum."""
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.repeat_interleave(torch.tensor(degree)) for degree in (out_degree, in_degree))
    src = src[torch.randperm(src.numel(), generator=generator)]
    order = torch.randperm(dst.numel(), generator=generator)
    return GraphCase(name, torch.stack([src, dst])[:, order], len(out_degree), len(in_degree))


def tensors_for(
    case,
    *,
    heads=2,
    key_heads=None,
    dim=4,
    value_dim=None,
    edge_dim=None,
    leading=(),
    bias=True,
    bias_leading=False,
    dtype=torch.float64,
):
    """Arguments of the operator by name, all of them leaves that ask for a gradient."""
    key_heads = heads if key_heads is None else key_heads
    num_edges = case.edge_index.size(1)
    shapes = {
        "query": (*leading, case.num_dst, heads, dim),
        "key": (*leading, case.num_src, key_heads, dim),
        "value": (*leading, case.num_src, key_heads, dim if value_dim is None else value_dim),
    }
    if bias:
        shapes["bias"] = (*(leading if bias_leading else ()), num_edges, heads)
    if edge_dim is not None:
        shapes["edge_attr"] = (num_edges, edge_dim)
        shapes["edge_weight"] = (heads, dim, edge_dim)
    return {
        name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()
    }


def operator_inputs(
    case, *, edge_dim=None, seed=None, dropout=0.0, value=True, backend="cpu", **shape
):
    """What torch.ops.graphattn.attention takes, in its order; shapes as in :func:`tensors_for`."""
    tensors = tensors_for(case, **shape)
    query, graph = tensors["query"], case.graph()
    query_edge = edge_attr = None
    if edge_dim is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        query_edge = torch.randn(*query.shape[:-1], edge_dim, dtype=wide, requires_grad=True)
        edge_attr = torch.randn(graph.num_edges, edge_dim, dtype=query.dtype, requires_grad=True)
    return [
        query,
        tensors["key"],
        tensors["value"] if value else None,
        tensors.get("bias"),
        query_edge,
        edge_attr,
        graph.dst_ptr,
        graph.src_index,
        graph.edge_id,
        graph.src_ptr,
        graph.dst_index,
        graph.edge_id_by_src,
        None if seed is None else torch.tensor(seed),
        0.5,
        dropout,
        backend,
    ]


def run(function, tensors, graph, cotangent=None, **options):
    """Output, and gradients of all tensors by name."""
    out = function(graph=graph, **tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    if cotangent is None:
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, list(tensors.values()), cotangent.to(out.dtype))
    return out.detach(), dict(zip(tensors, grads, strict=True))


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(actual[0], expected[0], **tolerance, msg=lambda m: f"output: {m}")
    for name, grad in expected[1].items():
        torch.testing.assert_close(
            actual[1][name], grad, **tolerance, msg=lambda m, name=name: f"grad of {name}: {m}"
        )


def assert_right(case, backend, tensors, **options):
    graph = case.graph()
    actual = run(graph_attention, tensors, graph, backend=backend, **options)
    expected = run(edge_reference, tensors, graph, **options)
    assert actual[0].isfinite().all()
    assert_same(actual, expected, **EXACT)


def draw_mask(seed, tensors, num_edges, dropout):
    """The mask ``[*, E, H]`` of a call under this seed of torch."""
    leading, heads = tensors["query"].shape[:-3], tensors["query"].size(-2)
    torch.manual_seed(seed)
    keep = keep_mask(draw_seed(), torch.arange(num_edges), heads, dropout, batch=math.prod(leading))
    return keep.movedim(1, 0).reshape(*leading, num_edges, heads)


def assert_right_at_its_dtype(case, backend, tensors, dropout=0.0):
    """Output and gradients: 1e-10 in float64, the rule for low precision elsewhere."""
    graph = case.graph()
    masked = {}
    if dropout > 0.0:
        keep = draw_mask(3, tensors, graph.num_edges, dropout)
        masked = {"keep": keep, "dropout": dropout}
    torch.manual_seed(3)
    actual = run(graph_attention, tensors, graph, dropout=dropout, backend=backend)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    expected = run(edge_reference, exact, graph, **masked)
    assert actual[0].dtype == tensors["query"].dtype
    assert all(actual[1][name].dtype == x.dtype for name, x in tensors.items())
    if all(x.dtype == torch.float64 for x in tensors.values()):
        assert_same(actual, expected, **EXACT)
        return
    plain = run(edge_reference, tensors, graph, **masked)
    terms = max([1, *graph.in_degree().tolist(), *graph.out_degree().tolist()])
    assert_close_to_reference(actual[0], plain[0], expected[0], in_degree=terms)
    for name, grad in actual[1].items():
        assert_close_to_reference(
            grad, plain[1][name], expected[1][name], factor=3, in_degree=terms
        )


EDGE_IDS = [3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5]


def with_edge_ids(inputs, edge_id):
    """The operator's arguments for one target whose edges lie at these places of the caller."""
    edge_id = torch.tensor(edge_id)
    count = edge_id.numel()
    dst_ptr, every = torch.tensor([0, count]), torch.arange(count)
    src_ptr, zeros = torch.arange(count + 1), torch.zeros(count).long()
    return [*inputs, dst_ptr, every, edge_id, src_ptr, zeros, edge_id]


def lent(*shape, stride, dtype=torch.float32):
    """Zeros over more memory than there is, of which only what is touched is taken."""
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except (OSError, ValueError) as error:
        pytest.skip(f"no address space for {elements} elements: {error}")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved and not taken")


def run_script(script, **environment):
    """Runs a script in a Python of its own, in which this folder and the package are found."""
    folders = [str(Path(__file__).parent), str(Path(graphattn.__file__).parent.parent)]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
