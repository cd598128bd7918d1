"""What the tests of the layers share: how to compare a layer with the one that it stands in for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

import operands
from graphattn import backends
from graphattn.nn import GraphAttentionConv
from graphattn.testing import GraphCase, zoo

BACKENDS = [name for name in operands.BACKENDS if backends.missing(name) is None]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
EDGE_INDEX = torch.tensor([[0, 1, 2, 0, 3, 3], [1, 2, 0, 2, 2, 0]])  # four nodes


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random input that takes a gradient."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def assert_equal_to(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to 1e-5 in float32 and 1e-10 in float64, relative to the largest number there is."""
    size = expected.detach().abs().max().clamp(min=1.0).item() if expected.numel() else 1.0
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0.0,
        atol=TOLERANCE[expected.dtype] * size,
        msg=lambda text: f"{what}: {text}",
    )


def assert_same_gradients(
    ours: nn.Module, theirs: nn.Module, out: Tensor, expected: Tensor, leaves: list[Tensor]
) -> None:
    """Equal outputs, and equal gradients of the inputs and of every parameter."""
    assert_equal_to(out, expected, "output")
    weight = torch.randn_like(expected)
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in theirs.named_parameters()]
    found = torch.autograd.grad((out * weight).sum(), [*leaves, *ours.parameters()])
    wanted = torch.autograd.grad((expected * weight).sum(), [*leaves, *theirs.parameters()])
    inputs = [f"input {i}" for i in range(len(leaves))]
    for actual, gradient, name in zip(found, wanted, inputs + names, strict=True):
        assert_equal_to(actual, gradient, f"gradient of {name}")


# GraphAttentionConv beside TransformerConv ########################################################

ZOO = {case.name: case for case in zoo()}
# Through the operator on each backend, and through PyG's message passing.
PATHS = [*BACKENDS, "messages"]


def watch(conv: nn.Module) -> nn.Module:
    """Makes a layer send messages, by a hook that does nothing."""
    conv.register_message_forward_hook(lambda module, inputs, output: None)
    return conv


def make(path: str = "eager", *args: Any, **options: Any) -> GraphAttentionConv:
    conv = GraphAttentionConv(*args, **options, backend="auto" if path == "messages" else path)
    return watch(conv) if path == "messages" else conv


def assert_same_numbers(
    ours: nn.Module,
    theirs: nn.Module,
    leaves: list[Tensor],
    *inputs: Any,
    their_inputs: tuple[Any, ...] | None = None,
) -> None:
    """Same output, and same gradients of ``leaves`` and of every parameter."""
    gradients, outputs = [], []
    for module, given_inputs in ((theirs, their_inputs or inputs), (ours, inputs)):
        module.zero_grad()
        for leaf in leaves:
            leaf.grad = None
        out = module(*given_inputs)
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        (out * weight).sum().backward()
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        found |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
        gradients.append(found)
        outputs.append(out.detach())
    assert_equal_to(outputs[1], outputs[0], "output")
    for name, gradient in gradients[1].items():
        assert gradient is not None, f"{name} has no gradient"
        assert_equal_to(gradient, gradients[0][name], f"gradient of {name}")


def pair_of_layers(
    path: str, *args: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[GraphAttentionConv, TransformerConv]:
    theirs = TransformerConv(*args, **options).to(dtype)
    ours = make(path, *args, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def compare(
    case: GraphCase, path: str, dtype: torch.dtype, *, heads: int = 2, **options: Any
) -> None:
    """Layer against layer on one graph; a pair of inputs where the graph has two sides."""
    edge_dim = options.get("edge_dim")
    ours, theirs = pair_of_layers(path, (5, 3), 4, heads, dtype=dtype, **options)
    x = (leaf(case.num_src, 5, dtype=dtype), leaf(case.num_dst, 3, dtype=dtype))
    leaves, edges = list(x), []
    if edge_dim is not None:
        edges = [leaf(case.edge_index.size(1), edge_dim, dtype=dtype)]
    edge_index = case.edge_index
    if options.get("flow") == "target_to_source":
        edge_index = edge_index.flip(0)
    assert_same_numbers(ours, theirs, leaves + edges, x, edge_index, *edges)


def adjacency(layout: str, edge_index: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """``adj_t [num_dst, num_src]``, values as given for each edge in the order of ``layout``."""
    src, dst = edge_index
    shape = (size[1], size[0], *values.shape[1:])
    if layout == "coo":
        order = (dst * size[0] + src).argsort()
        indices = torch.stack([dst, src])[:, order]
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=True, check_invariants=True
        )
    make, row, col, num_rows = (
        (torch.sparse_csr_tensor, dst, src, size[1])
        if layout == "csr"
        else (torch.sparse_csc_tensor, src, dst, size[0])
    )
    order = (row * 1000 + col).argsort()
    pointer = nn.functional.pad(row.bincount(minlength=num_rows).cumsum(0), (1, 0))
    return make(pointer, col[order], values, shape, check_invariants=True)
