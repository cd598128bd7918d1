"""Blocks that are made of the parts they are given: GraphGPS, the Conformer, Polynormer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.inits import reset

from graphattn._checks import check_at_least, check_choice, check_probability
from graphattn.graph import Graph
from graphattn.nn.attention import GraphMultiheadAttention
from graphattn.nn.block import activation_function
from graphattn.nn.convolution import NORMS

__all__ = ["ConformerLayer", "GPSLayer", "GraphSelfAttention", "PolynormerLayer"]


class GraphSelfAttention(nn.Module):
    """Attention with one ``x`` as query, key and value, as a part of a block.

    Args:
        attention: Attends; its output is of the size of ``x``.

    >>> import torch
    >>> attention = GraphSelfAttention(GraphMultiheadAttention(8, num_heads=2))
    >>> attention(torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 8])
    """

    def __init__(self, attention: GraphMultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.attention.reset_parameters()

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor,
        edge_attr: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        position: Tensor | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            x: ``[*, N, embed_dim]``.
            graph: As the rest, as in :class:`GraphMultiheadAttention`.
            edge_attr: ``[E, edge_dim]``.
            bias: ``[E, num_heads]``.
            position: ``[N]``.

        Returns:
            ``[*, N, embed_dim]``.
        """
        out: Tensor = self.attention(
            x, x, x, graph, edge_attr=edge_attr, bias=bias, position=position
        )
        return out


class GPSLayer(nn.Module):
    r"""Local message passing beside global attention, then a feed-forward network: GraphGPS.

    .. math::
        \text{post-norm:} \quad & y = \mathrm{N}(x + \mathrm{local}(x)) + \mathrm{N}(x +
        \mathrm{global}(x)), & z = \mathrm{N}(y + \mathrm{FFN}(y)) \\ \text{pre-norm:} \quad & y = x
        + \mathrm{local}(\mathrm{N}(x)) + \mathrm{global}(\mathrm{N}(x)), & z = y +
        \mathrm{FFN}(\mathrm{N}(y))

    each with a normalisation of its own; a part that is ``None`` leaves its term out. Source:
    "Recipe for a General, Powerful, Scalable Graph Transformer" (https://arxiv.org/abs/2205.12454);
    the paper's layer is post-norm with batch normalisation.

    The parts are modules, called as

    - ``local(x, graph)``, or ``local(x, graph, edge_attr)`` where there are edge features, with
      ``bias=`` and ``position=`` only where they are given: any convolution of PyG,
      :class:`GraphAttentionConv`, :class:`GraphSelfAttention`;
    - ``global_attention(x, batch)``: :class:`GlobalAttention`, :class:`PerformerAttention` and the
      others with a ``batch`` vector.

    What is given as ``graph`` reaches ``local`` as it is, whatever that takes there. With
    :class:`ConvolutionModule`, which takes a batch vector, the layer is called as ``layer(x, batch,
    batch=batch)``.

    Args:
        channels: Size of node features, which the parts keep.
        local: Local module, or ``None``.
        global_attention: Global module, or ``None``.
        dim_feedforward: Size of the hidden layer of the feed-forward network. Default ``2 *
            channels``, as in the paper.
        dropout: Probability of dropping hidden units and the output of each part, in training. What
            the parts drop inside is their own.
        activation: ``"relu"``, ``"gelu"`` or a function on tensors.
        norm: ``"layer"``, or ``"batch"``, whose statistics in training are those of all nodes of
            the batch.
        norm_first: Pre-norm instead of post-norm.

    Raises:
        ValueError: There is neither part, a name is unknown or ``dim_feedforward`` is below 1.

    Two graphs, of three nodes and of two:

    >>> import torch
    >>> from torch_geometric.nn import SAGEConv
    >>> layer = GPSLayer(8, SAGEConv(8, 8), None, norm_first=True)
    >>> edge_index, batch = torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 1, 1])
    >>> layer(torch.randn(5, 8), edge_index, batch=batch).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        channels: int,
        local: nn.Module | None,
        global_attention: nn.Module | None,
        *,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        norm: str = "layer",
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        if local is None and global_attention is None:
            raise ValueError(
                "GPSLayer: local and global_attention are both None. Give at least one of them."
            )
        check_choice("GPSLayer", NORMS, norm=norm)
        self.channels = channels
        self.local = local
        self.global_attention = global_attention
        self.norm_local = None if local is None else NORMS[norm](channels)
        self.norm_global = None if global_attention is None else NORMS[norm](channels)
        self.norm = NORMS[norm](channels)
        self.feedforward = _FeedForward(
            "GPSLayer",
            channels,
            2 * channels if dim_feedforward is None else dim_feedforward,
            dropout,
            activation_function("GPSLayer", activation),
        )
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def reset_parameters(self) -> None:
        """Draws all parameters anew, those of the parts included."""
        for child in self.children():
            reset(child)

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor | None,
        *,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        bias: Tensor | None = None,
        position: Tensor | None = None,
    ) -> Tensor:
        """Runs the parts and transforms.

        Args:
            x: ``[N, channels]``.
            graph: For ``local``: an ``edge_index [2, E]`` for PyG's layers, that or a
                :class:`~graphattn.Graph` for those of this package. ``None`` will do where there is
                no ``local``.
            batch: ``[N]`` int64, the graph that each node belongs to, sorted. Required with
                ``global_attention``, which would mix the graphs of a batch without it.
            edge_attr: ``[E, *]``, for ``local``.
            bias: ``[E, heads]``, for a ``local`` that takes it.
            position: ``[N]``, for a ``local`` that takes it.

        Returns:
            ``[N, channels]``.

        Raises:
            ValueError: What a part needs is missing, something is given for a part that is not
                there, or the output of a part has another shape than ``x``.
        """
        if self.global_attention is not None and batch is None:
            raise ValueError(
                "GPSLayer: batch is missing, and global attention without it would join all graphs "
                "of a batch. Give the graph of each node: data.batch, or "
                "torch.zeros(num_nodes, dtype=torch.int64) for a single graph."
            )
        for_local = {"edge_attr": edge_attr, "bias": bias, "position": position}
        given = [name for name, value in for_local.items() if value is not None]
        if self.local is None and given:
            raise ValueError(
                f"GPSLayer: {given[0]} is given, but there is no local module to use it."
            )
        if self.local is not None and graph is None:
            raise ValueError("GPSLayer: graph is None, but the local module needs it.")
        terms = [x] if self.norm_first else []
        if self.local is not None and self.norm_local is not None:
            y = self.norm_local(x) if self.norm_first else x
            y = self.dropout(_call("GPSLayer", self.local, y, graph, edge_attr, bias, position))
            terms.append(y if self.norm_first else self.norm_local(x + y))
        if self.global_attention is not None and self.norm_global is not None:
            y = self.norm_global(x) if self.norm_first else x
            y = self.dropout(_call("GPSLayer", self.global_attention, y, batch))
            terms.append(y if self.norm_first else self.norm_global(x + y))
        x = sum(terms[1:], start=terms[0])
        if self.norm_first:
            return x + self.feedforward(self.norm(x))
        out: Tensor = self.norm(x + self.feedforward(x))
        return out


class ConformerLayer(nn.Module):
    r"""Attention and convolution between two half feed-forward networks: the Conformer's block.

    .. math::
        u &= x + \tfrac{1}{2} \mathrm{FFN}_1(\mathrm{LN}(x)) \\
        v &= u + \mathrm{attention}(\mathrm{LN}(u)) \\
        w &= v + \mathrm{convolution}(\mathrm{LN}(v)) \\
        z &= \mathrm{LN}\big(w + \tfrac{1}{2} \mathrm{FFN}_2(\mathrm{LN}(w))\big)

    with a Swish inside each feed-forward network. Source: "Conformer: Convolution-augmented
    Transformer for Speech Recognition" (https://arxiv.org/abs/2005.08100), eq. 1.

    The parts are modules as in :class:`GPSLayer`, here one after the other: ``attention(x, graph)``
    and ``convolution(x, batch)``. Attention to all frames of an utterance is
    :class:`GraphSelfAttention` on :func:`graphattn.patterns.complete`, truncated attention on
    :func:`graphattn.patterns.window`. What is given as ``graph`` reaches ``attention`` as it is;
    with :class:`PerformerAttention`, which takes a batch vector, the layer is called as ``layer(x,
    batch, batch=batch)``.

    Args:
        channels: Size of each frame's features, which the parts keep.
        attention: Such as :class:`GraphSelfAttention`.
        convolution: Such as :class:`ConvolutionModule`.
        dim_feedforward: Size of the hidden layers of the feed-forward networks. Default ``4 *
            channels``, as in the paper.
        dropout: Probability of dropping hidden units and the outputs of attention and feed-forward
            networks, in training. What the parts drop inside is their own.

    Raises:
        ValueError: ``dim_feedforward`` is below 1.

    Two utterances, of three frames and of two, each frame attending to its neighbours:

    >>> import torch
    >>> from graphattn.nn.convolution import ConvolutionModule
    >>> from graphattn.patterns import batch_vector, window
    >>> attention = GraphSelfAttention(GraphMultiheadAttention(8, num_heads=2))
    >>> layer = ConformerLayer(8, attention, ConvolutionModule(8, kernel_size=3))
    >>> layer(torch.randn(5, 8), window([3, 2], 1), batch=batch_vector([3, 2])).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        channels: int,
        attention: nn.Module,
        convolution: nn.Module,
        *,
        dim_feedforward: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        hidden = 4 * channels if dim_feedforward is None else dim_feedforward
        self.channels = channels
        self.norm_feedforward1 = nn.LayerNorm(channels)
        self.feedforward1 = _FeedForward("ConformerLayer", channels, hidden, dropout, F.silu)
        self.norm_attention = nn.LayerNorm(channels)
        self.attention = attention
        self.norm_convolution = nn.LayerNorm(channels)
        self.convolution = convolution
        self.norm_feedforward2 = nn.LayerNorm(channels)
        self.feedforward2 = _FeedForward("ConformerLayer", channels, hidden, dropout, F.silu)
        self.norm = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, those of the parts included."""
        for child in self.children():
            reset(child)

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor,
        *,
        batch: Tensor,
        edge_attr: Tensor | None = None,
        bias: Tensor | None = None,
        position: Tensor | None = None,
    ) -> Tensor:
        """Runs the block.

        Args:
            x: ``[N, channels]``, the sequences one after another.
            graph: For ``attention``: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            batch: For ``convolution``: ``[N]`` int64, the sequence that each row belongs to,
                sorted.
            edge_attr: ``[E, *]``, for an ``attention`` that takes it.
            bias: ``[E, heads]``, for an ``attention`` that takes it.
            position: ``[N]``, for an ``attention`` that takes it.

        Returns:
            ``[N, channels]``.

        Raises:
            ValueError: The output of a part has another shape than ``x``.
        """
        x = x + 0.5 * self.feedforward1(self.norm_feedforward1(x))
        y = self.norm_attention(x)
        y = _call("ConformerLayer", self.attention, y, graph, edge_attr, bias, position)
        x = x + self.dropout(y)
        x = x + _call("ConformerLayer", self.convolution, self.norm_convolution(x), batch)
        x = x + 0.5 * self.feedforward2(self.norm_feedforward2(x))
        out: Tensor = self.norm(x)
        return out


class PolynormerLayer(nn.Module):
    r"""Attention whose output is multiplied by a projection of its input: Polynormer's layer.

    .. math:: y = \mathrm{ReLU}(\mathrm{attention}(x)), \qquad h = \mathrm{ReLU}(W_h x + b_h),
        \qquad z = (1 - \beta) \odot \mathrm{LN}(h \odot y) + \beta \odot y, \qquad
        \beta = \sigma(\gamma)

    with a learned :math:`\gamma` for each channel. Each such layer doubles the degree of the
    polynomial of the inputs that a model can be. Source: "Polynormer: Polynomial-Expressive Graph
    Transformer in Linear Time" (https://arxiv.org/abs/2403.01232).

    The attention is a module, called as in :class:`GPSLayer`: a local one as ``attention(x,
    graph)``, such as :class:`GraphAttentionConv` with its skip connection ``root_weight``, which is
    the paper's; a global one as ``attention(x, batch)``, such as :class:`PerformerAttention`.

    Args:
        channels: Size of node features, which the attention keeps.
        attention: Local or global attention.
        dropout: Probability of dropping entries of :math:`y`, in training.

    Raises:
        ValueError: ``channels`` or ``dropout`` is out of range.

    >>> import torch
    >>> from graphattn.nn import GraphAttentionConv
    >>> layer = PolynormerLayer(8, GraphAttentionConv(8, 4, heads=2))
    >>> layer(torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 8])
    """

    def __init__(self, channels: int, attention: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_at_least("PolynormerLayer", 1, channels=channels)
        check_probability("PolynormerLayer", dropout=dropout)
        self.channels = channels
        self.attention = attention
        self.lin_gate = nn.Linear(channels, channels)
        self.norm = nn.LayerNorm(channels)
        self.mix = nn.Parameter(torch.zeros(channels))
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, those of the attention included."""
        for child in self.children():
            reset(child)
        nn.init.zeros_(self.mix)

    def forward(
        self,
        x: Tensor,
        where: Graph | Tensor | None,
        *,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Any:
        """Attends and multiplies.

        Args:
            x: ``[N, channels]``.
            where: What the attention takes: a :class:`~graphattn.Graph` or ``edge_index``, or the
                graph of each node ``[N]``.
            edge_attr: ``[E, *]``, for an attention that takes it.
            return_attention_weights: Also return the weights, of an attention that has them.

        Returns:
            ``[N, channels]``, or a pair with what the attention returns beside its output.

        Raises:
            ValueError: The output of the attention has another shape than ``x``.
        """
        if return_attention_weights:
            y, weights = self.attention(x, where, edge_attr, return_attention_weights=True)
        else:
            y, weights = _call("PolynormerLayer", self.attention, x, where, edge_attr), None
        y = self.dropout(F.relu(y))
        mix = self.mix.sigmoid()
        out: Tensor = (1 - mix) * self.norm(F.relu(self.lin_gate(x)) * y) + mix * y
        return (out, weights) if return_attention_weights else out


class _FeedForward(nn.Module):
    """Two linear layers with an activation between, and dropout after each."""

    def __init__(
        self,
        owner: str,
        channels: int,
        hidden: int,
        dropout: float,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        check_at_least(owner, 1, dim_feedforward=hidden)
        self.linear1 = nn.Linear(channels, hidden)
        self.activation = activation
        self.linear2 = nn.Linear(hidden, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.activation(self.linear1(x)))
        return self.dropout(self.linear2(x))


def _call(
    owner: str,
    part: nn.Module,
    x: Tensor,
    second: Graph | Tensor | None,
    edge_attr: Tensor | None = None,
    bias: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """What a part makes of ``x``, given only the arguments that there are."""
    third = () if edge_attr is None else (edge_attr,)
    options = {"bias": bias, "position": position}
    out: Tensor = part(
        x, second, *third, **{name: value for name, value in options.items() if value is not None}
    )
    if out.shape != x.shape:
        raise ValueError(
            f"{owner}: {type(part).__name__} must keep the shape of x {tuple(x.shape)}, but "
            f"returned {tuple(out.shape)}."
        )
    return out
