"""Attention that spreads over many edges with one matrix of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphattn import backends
from graphattn._checks import check_at_least, check_probability
from graphattn.functional import graph_attention
from graphattn.graph import Graph

__all__ = ["AttentionDiffusion"]


class AttentionDiffusion(nn.Module):
    r"""Spreads features along paths: attention by similarity, applied ``steps`` times.

    .. math:: z^{(0)} = x, \qquad z^{(t+1)}_i = (1 - a) \sum_{j \to i} \alpha_{ij} z^{(t)}_j + a \,
        x_i, \qquad \alpha_{ij} = \mathrm{softmax}_j \big( \beta \cos(x_i, x_j) \big)

    with the teleport probability :math:`a`. Weights :math:`\alpha` are those of AGNN
    ("Attention-based Graph Neural Network for Semi-supervised Learning",
    https://arxiv.org/abs/1803.03735), whose one parameter :math:`\beta` for each head a handful of
    labels can fit: 0 is the mean of the neighbours. Steps and teleport are the personalised
    PageRank of APPNP ("Predict then Propagate", https://arxiv.org/abs/1810.05997), here along
    attention as in MAGNA (https://arxiv.org/abs/2009.14332): far nodes are reached without a layer
    of parameters for each edge on the way. Many steps come to :math:`a (I - (1 - a) A)^{-1} x`,
    with :math:`A` the matrix of weights.

    A node without edges into it keeps :math:`a \, x_i`; self-loops (``graph.add_self_loops()``)
    let nodes keep more of themselves. A row of zeros is similar to nothing, itself included: its
    cosines are 0.

    Args:
        channels: Size of each node's features; a multiple of ``heads``.
        heads: Number of heads: each spreads a slice of the channels by the cosines of that slice.
        steps: How far features spread, in edges.
        teleport: Probability of going back to a node's own features in each step.
        dropout: Probability of dropping attention weights, in training: in each step anew.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``channels`` is not divisible by ``heads``, or a number is out of range.

    >>> diffusion = AttentionDiffusion(8, steps=3)
    >>> diffusion(torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 2]])).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        *,
        steps: int = 10,
        teleport: float = 0.1,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_at_least("AttentionDiffusion", 1, channels=channels, heads=heads, steps=steps)
        check_probability("AttentionDiffusion", teleport=teleport, dropout=dropout)
        backends.check_name(backend, function="AttentionDiffusion")
        if channels % heads != 0:
            raise ValueError(
                f"AttentionDiffusion: channels {channels} must be divisible by heads {heads}."
            )
        self.channels = channels
        self.heads = heads
        self.steps = steps
        self.teleport = teleport
        self.dropout = dropout
        self.backend = backend
        self.beta = nn.Parameter(torch.ones(heads))

    def reset_parameters(self) -> None:
        """Sets ``beta`` to 1."""
        nn.init.ones_(self.beta)

    def forward(self, x: Tensor, graph: Graph | Tensor) -> Tensor:
        """Spreads.

        Args:
            x: ``[*, N, channels]``.
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``, from nodes to the same nodes.

        Returns:
            ``[*, N, channels]``.

        Raises:
            ValueError: ``x`` has other channels.
            IndexError: ``graph`` points outside ``x``.
        """
        if x.dim() < 2 or x.size(-1) != self.channels:
            raise ValueError(
                f"AttentionDiffusion: x must have shape (*, num_nodes, {self.channels}), got "
                f"{tuple(x.shape)}."
            )
        graph = Graph.of(graph, x.size(-2))
        start = x.unflatten(-1, (self.heads, -1))
        norm = start.norm(dim=-1, keepdim=True)
        unit = start / norm.where(norm > 0.0, 1.0)  # so that a row of zeros has a gradient
        query = unit * self.beta[:, None].to(x.dtype)
        state = start
        for _ in range(self.steps):
            spread = graph_attention(
                query,
                unit,
                state,
                graph,
                dropout=self.dropout if self.training else 0.0,
                scale=1.0,
                backend=self.backend,
            )
            state = (1.0 - self.teleport) * spread + self.teleport * start
        return state.flatten(-2)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.channels}, heads={self.heads}, steps={self.steps}, teleport={self.teleport}"
