"""Whether a contestant is right: against attention in float64, before any time is taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cases import Case
from graphattn import Graph
from graphattn.testing import assert_close_to_reference, edge_reference, plain_attention
from rivals import Contestant

BY_NODE = {"query", "key", "value", "x"}  # inputs with one row for each node
HUB = 64  # in-edges from which a target is judged as a hub: long sums may be further off


class Wrong(Exception):
    """A contestant's result is not what it must be, with the number that is off."""


class Reference:
    """What some targets of a case must get, and the gradients that flow from them.

    A contestant computes the whole case, by the very code that is timed. The reference is computed
    for a sample of targets, the largest hub among them, in float64 by
    :func:`graphattn.testing.edge_reference`. The gradient that arrives at all other targets is
    zero, so the gradients of all inputs follow from the edges of the sample alone. How far a
    contestant may be off is the rule of the tests: twice (gradients: three times) as far as plain
    PyTorch at the same dtype, and a floor of a few units in the last place.

    Args:
        case: The case.
        inputs: Its inputs.
        most: Number of targets in the sample.
        budget: Largest number of pairs of a target and an edge in it, which the reference makes for
            each head.
    """

    def __init__(
        self, case: Case, inputs: dict[str, Tensor], *, most: int = 256, budget: int = 1 << 22
    ) -> None:
        self.case, self.inputs = case, inputs
        src, dst = case.edge_index
        in_degree = dst.bincount(minlength=case.num_nodes)
        self.targets = _sample(in_degree, most, budget)
        self.in_degree = in_degree[self.targets]
        # The edges that arrive at the sample; nodes and targets numbered anew.
        place = torch.full_like(in_degree, -1)
        place[self.targets] = torch.arange(self.targets.numel(), device=place.device)
        inside = place[dst] >= 0
        src, dst = src[inside], place[dst[inside]]
        self.nodes, row = torch.cat([self.targets, src]).unique(return_inverse=True)
        self.at, src = row.split([self.targets.numel(), src.numel()])
        self.graph = Graph(
            torch.stack([src, dst]), (self.nodes.numel(), self.targets.numel()), validate=False
        )
        self.cotangent = torch.zeros(case.shape, dtype=case.dtype, device=dst.device)
        self.cotangent[self.targets] = case.cotangent()[self.targets]
        self.exact = self._run(torch.float64, _by_head)
        self.plain = self._run(case.dtype, plain_attention)

    def check(self, contestant: Contestant) -> None:
        """Runs the contestant, forward without and with gradients, and backward.

        Raises:
            Wrong: The output or a gradient is off.
        """
        with torch.no_grad():
            self._check_output(contestant.forward())
        if contestant.leaves:
            out = contestant.forward()
            self._check_output(out.detach())
            grads = torch.autograd.grad(out, list(contestant.leaves.values()), self.cotangent)
            self._check_gradients(dict(zip(contestant.leaves, grads, strict=True)))

    def _run(
        self, dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor, Graph], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output ``[T, *]`` and gradients; those of inputs by node for the nodes of the sample."""
        leaves = {
            name: (x[self.nodes] if name in BY_NODE else x).detach().to(dtype).requires_grad_()
            for name, x in self.inputs.items()
        }
        if self.case.what == "operator":
            query, key, value = leaves.values()
            out = attend(query[self.at], key, value, self.graph)
        else:
            out = _layer(leaves, self.at, self.case.heads, self.graph, attend)
        cotangent = self.cotangent[self.targets].to(dtype)
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
        return out.detach(), dict(zip(leaves, grads, strict=True))

    def _check_output(self, out: Tensor) -> None:
        case = self.case
        if out.shape != case.shape or out.dtype != case.dtype:
            raise Wrong(
                f"output: {out.dtype} of shape {tuple(out.shape)}, expected {case.dtype} of shape "
                f"{case.shape}"
            )
        if not out.isfinite().all():
            raise Wrong("output: not finite")
        exact, plain = self.exact[0], self.plain[0]
        for rows in (self.in_degree <= HUB, self.in_degree > HUB):
            if rows.any():
                terms = max(1, int(self.in_degree[rows].max()))
                actual = out[self.targets][rows]
                _check_close("output", actual, plain[rows], exact[rows], 2.0, terms)

    def _check_gradients(self, grads: dict[str, Tensor]) -> None:
        elsewhere = torch.ones(self.case.num_nodes, dtype=torch.bool, device=self.nodes.device)
        elsewhere[self.nodes] = False
        for name in grads.keys() & BY_NODE:
            if grads[name][elsewhere].any():
                raise Wrong(f"gradient of {name}: not zero where nothing flows from")
            grads[name] = grads[name][self.nodes]
        # Judged together: plain PyTorch may get one of them exactly right by luck, such as zeros.
        by_node = [name for name in grads if name in BY_NODE]
        parameters = [name for name in grads if name not in BY_NODE]
        terms = {tuple(by_node): int(self.graph.out_degree().max())}
        terms[tuple(parameters)] = self.targets.numel()
        for names, count in terms.items():
            if names:
                actual, plain, exact = (
                    torch.cat([of[name].flatten() for name in names])
                    for of in (grads, self.plain[1], self.exact[1])
                )
                what = f"gradients of {', '.join(names)}"
                _check_close(what, actual, plain, exact, 3.0, max(1, count))


def _sample(in_degree: Tensor, most: int, budget: int) -> Tensor:
    """The largest hub, then others at random, while pairs of target and edge fit the budget."""
    generator = torch.Generator().manual_seed(2)
    others = torch.randperm(in_degree.numel(), generator=generator).to(in_degree.device)
    order = torch.cat([in_degree.argmax().view(1), others[others != in_degree.argmax()]])
    order = order[in_degree[order] <= budget][:most]
    pairs = in_degree[order].cumsum(0) * torch.arange(1, order.numel() + 1, device=order.device)
    return order[pairs <= budget]


def _by_head(query: Tensor, key: Tensor, value: Tensor, graph: Graph) -> Tensor:
    """The reference a head at a time, since it makes a row of all edges for every target."""
    heads = [
        edge_reference(*(x.narrow(-2, head, 1) for x in (query, key, value)), graph)[0]
        for head in range(query.size(-2))
    ]
    return torch.cat(heads, dim=-2)


def _layer(
    inputs: dict[str, Tensor],
    at: Tensor,
    heads: int,
    graph: Graph,
    attend: Callable[[Tensor, Tensor, Tensor, Graph], Tensor],
) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, inputs[f"{name}.weight"], inputs[f"{name}.bias"])

    x = inputs["x"]
    projected = (project("lin_query", x[at]), project("lin_key", x), project("lin_value", x))
    out = attend(*(rows.unflatten(-1, (heads, -1)) for rows in projected), graph)
    return out.flatten(-2) + project("lin_skip", x[at])


def _check_close(
    what: str, actual: Tensor, plain: Tensor, exact: Tensor, factor: float, terms: int
) -> None:
    try:
        assert_close_to_reference(actual, plain, exact, factor=factor, in_degree=terms)
    except AssertionError as error:
        raise Wrong(f"{what}: {error}") from None
