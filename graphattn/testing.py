"""What this library is tested with, for anyone who writes attention on graphs.

A zoo of graphs that break such code, an attention that is obviously right, the rule for how far low
precision may be off, and the laws that must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.graph import Graph
from graphattn.reference import dense_attention

__all__ = [
    "GraphCase",
    "assert_batch_equals_parts",
    "assert_close_to_reference",
    "assert_edge_order_is_free",
    "assert_node_order_is_free",
    "edge_reference",
    "plain_attention",
    "zoo",
]

Attend = Callable[[Tensor, Tensor, Tensor, Graph], Tensor]
"""``(query, key, value, graph) -> output``, as :func:`graphattn.graph_attention`."""


@dataclass(frozen=True)
class GraphCase:
    """One graph of the zoo: its name, its edges as a caller gives them, the numbers of nodes."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int

    def graph(self) -> Graph:
        """A fresh :class:`~graphattn.Graph` of the case."""
        return Graph(self.edge_index, (self.num_src, self.num_dst))

    def __str__(self) -> str:
        return self.name


def zoo(*, hub: int = 2000) -> Iterator[GraphCase]:
    """Graphs on which attention code goes wrong, small ones first.

    Args:
        hub: Number of leaves of the two stars.
    """
    generator = torch.Generator().manual_seed(0)

    def case(
        name: str, src: object, dst: object, num_src: int, num_dst: int | None = None
    ) -> GraphCase:
        pair = [torch.as_tensor(side, dtype=torch.int64) for side in (src, dst)]
        return GraphCase(name, torch.stack(pair), num_src, num_src if num_dst is None else num_dst)

    def random(num_src: int, num_dst: int, num_edges: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randint(num_src, (num_edges,), generator=generator),
            torch.randint(num_dst, (num_edges,), generator=generator),
        )

    yield case("no nodes", [], [], 0)
    yield case("no edges", [], [], 4)
    yield case("no sources", [], [], 0, 3)
    yield case("no targets", [], [], 3, 0)
    yield case("one node, self-loop", [0], [0], 1)
    yield case("one edge, isolated nodes", [0], [1], 4)
    yield case("self-loops", [0, 1, 2, 0], [0, 1, 2, 2], 3)
    yield case("parallel edges", [0, 0, 2, 0, 1], [1, 1, 1, 2, 2], 3)
    yield case("empty groups between", [1, 0, 3, 2], [0, 0, 2, 2], 4)
    yield case("chain", range(9), range(1, 10), 10)
    yield case(
        "cycle, reversed order", range(11, -1, -1), [(i + 1) % 12 for i in range(11, -1, -1)], 12
    )
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    yield case("complete", pairs[:, 0], pairs[:, 1], 7)
    yield case("more targets than sources", *random(5, 17, 40), 5, 17)
    yield case("more sources than targets", *random(17, 5, 40), 17, 5)
    yield case("shuffled", *random(30, 30, 200), 30)

    sizes = (3, 1, 6, 4)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [random(n, n, 2 * n) for n in sizes]
    yield case(
        "disjoint batch",
        torch.cat([src + offset for (src, _), offset in zip(parts, offsets, strict=True)]),
        torch.cat([dst + offset for (_, dst), offset in zip(parts, offsets, strict=True)]),
        sum(sizes),
    )
    rank = torch.rand(600, generator=generator).pow(4)
    yield case("power law", torch.randint(60, (600,), generator=generator), (rank * 60).long(), 60)
    yield case("in-star", range(1, hub + 1), [0] * hub, hub + 1)
    yield case("out-star", [0] * hub, range(1, hub + 1), hub + 1)


def edge_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: Graph,
    *,
    bias: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """:func:`graphattn.graph_attention` by its definition, with every edge as a key of its own.

    The dense reference over ``N_dst`` queries and ``E`` keys, in which target ``i`` may see edge
    ``e`` when ``e`` arrives at ``i``. O(N_dst E): for small graphs.

    Args:
        query: ``[*, N_dst, H, D]``; the other tensors as in :func:`graphattn.graph_attention`. Give
            float64.
        key: ``[*, N_src, Hk, D]``.
        value: ``[*, N_src, Hk, Dv]``.
        graph: The graph.
        bias: ``[E, H]`` or ``[*, E, H]``.
        edge_attr: ``[E, C]``.
        edge_weight: ``[H, D, C]``.
        scale: Default ``1 / sqrt(D)``.
        keep: ``[E, H]`` or ``[*, E, H]`` bool, the weights that dropout keeps.
        dropout: Its probability.

    Returns:
        ``(output, weights)``: ``[*, N_dst, H, Dv]`` and, before dropout, ``[*, E, H]``.
    """
    heads = query.size(-2)
    src, dst = graph.edge_index
    repeats = heads // key.size(-2)
    key_e = key.repeat_interleave(repeats, dim=-2).index_select(-3, src)
    value_e = value.repeat_interleave(repeats, dim=-2).index_select(-3, src)
    if edge_attr is not None and edge_weight is not None:
        features = torch.einsum("ec,hdc->ehd", edge_attr, edge_weight)
        key_e, value_e = key_e + features, value_e + features
    allowed = dst == torch.arange(graph.num_dst, device=dst.device)[:, None]  # [N_dst, E]
    additive = None if bias is None else bias.movedim(-1, -2).unsqueeze(-2)  # [*, H, 1, E]
    output, weights = dense_attention(query, key_e, value_e, allowed, bias=additive, scale=scale)
    if keep is not None:
        factor = keep.movedim(-1, -2).unsqueeze(-2).to(weights.dtype)
        factor = factor / (1.0 - dropout) if dropout < 1.0 else factor
        output = ((weights * factor) @ value_e.movedim(-2, -3)).movedim(-3, -2)
    by_edge = weights.sum(dim=-2).movedim(-1, -2)  # each edge is seen by its own target only
    return output, by_edge


def plain_attention(query: Tensor, key: Tensor, value: Tensor, graph: Graph) -> Tensor:
    """What plain PyTorch makes of it at the dtype of its inputs, with no care taken.

    The measure of :func:`assert_close_to_reference`. ``[N_dst, H, D], [N_src, H, D], [N_src, H, Dv]
    -> [N_dst, H, Dv]``.
    """
    src, dst = graph.edge_index
    score = (query[dst] * key[src]).sum(-1) / math.sqrt(query.size(-1))
    index = dst[:, None].expand_as(score)
    top = score.new_full((graph.num_dst, score.size(1)), float("-inf"))
    top = top.scatter_reduce(0, index, score.detach(), "amax")
    weight = (score - top[dst]).exp()
    weight = weight / weight.new_zeros(top.shape).index_add(0, dst, weight)[dst]
    out = value.new_zeros(graph.num_dst, value.size(1), value.size(2))
    return out.index_add(0, dst, weight.unsqueeze(-1) * value[src])


def assert_close_to_reference(
    actual: Tensor, plain: Tensor, reference: Tensor, *, factor: float = 2.0, in_degree: int = 1
) -> None:
    """Low precision may err at most ``factor`` times as much as plain PyTorch does.

    A floor of a few units in the last place, growing with the square root of the number of terms,
    allows for plain PyTorch being right by luck. Use ``factor=3`` for gradients.

    Args:
        actual: Result under test, in its own dtype.
        plain: The same from :func:`plain_attention` at that dtype.
        reference: The same in float64.
        factor: How many times plain PyTorch's largest error is allowed.
        in_degree: Largest number of terms in a sum.

    Raises:
        AssertionError: With both errors, when the rule is broken, or ``actual`` is not finite where
            the reference is.
    """
    assert actual.shape == reference.shape, (
        f"shape {tuple(actual.shape)} != {tuple(reference.shape)}"
    )
    if reference.numel() == 0:
        return
    error = (actual.double() - reference).abs().max().item()
    allowed = (plain.double() - reference).abs().max().item()
    eps = torch.finfo(actual.dtype).eps
    floor = 2.0 * eps * math.sqrt(in_degree) * max(1.0, reference.abs().max().item())
    assert error <= factor * allowed + floor, (
        f"error {error:.3g} exceeds {factor} x {allowed:.3g} (plain PyTorch at {actual.dtype}) + "
        f"{floor:.3g}"
    )


# Laws #############################################################################################


def _features(case: GraphCase, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(count, heads, dim, generator=generator, dtype=torch.float64)
        for count in (case.num_dst, case.num_src, case.num_src)
    )
    return query, key, value


def assert_edge_order_is_free(
    attend: Attend, case: GraphCase, *, heads: int = 2, dim: int = 4
) -> None:
    """The order in which edges are listed changes nothing."""
    query, key, value = _features(case, heads, dim)
    shuffled = case.edge_index[:, torch.randperm(case.edge_index.size(1))]
    torch.testing.assert_close(
        attend(query, key, value, Graph(shuffled, (case.num_src, case.num_dst))),
        attend(query, key, value, case.graph()),
    )


def assert_node_order_is_free(
    attend: Attend, case: GraphCase, *, heads: int = 2, dim: int = 4
) -> None:
    """Renumbering sources changes nothing, renumbering targets permutes the rows of the output."""
    query, key, value = _features(case, heads, dim)
    new_src, new_dst = torch.randperm(case.num_src), torch.randperm(case.num_dst)
    src, dst = case.edge_index
    renamed = Graph(torch.stack([new_src[src], new_dst[dst]]), (case.num_src, case.num_dst))
    moved_query = torch.empty_like(query).index_copy_(0, new_dst, query)
    moved_key = torch.empty_like(key).index_copy_(0, new_src, key)
    moved_value = torch.empty_like(value).index_copy_(0, new_src, value)
    torch.testing.assert_close(
        attend(moved_query, moved_key, moved_value, renamed)[new_dst],
        attend(query, key, value, case.graph()),
    )


def assert_batch_equals_parts(
    attend: Attend, cases: list[GraphCase], *, heads: int = 2, dim: int = 4
) -> None:
    """Graphs side by side in one batch give bit for bit what each gives alone."""
    features = [_features(case, heads, dim) for case in cases]
    graphs = [case.graph() for case in cases]
    query, key, value = (torch.cat(side) for side in zip(*features, strict=True))
    together = attend(query, key, value, Graph.batch(graphs))
    alone = [attend(*each, graph) for each, graph in zip(features, graphs, strict=True)]
    assert torch.equal(together, torch.cat(alone)), "a graph's result depends on its batch mates"
