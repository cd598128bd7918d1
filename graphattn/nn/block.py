"""The Transformer's blocks on a graph: the layers of its encoder and of its decoder."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.inits import reset

from graphattn._checks import check_at_least
from graphattn.graph import Graph
from graphattn.nn.attention import GraphMultiheadAttention, KeyValueCache

__all__ = ["GraphTransformerDecoderLayer", "GraphTransformerLayer"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


def activation_function(
    owner: str, activation: str | Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The function that is called ``"relu"`` or ``"gelu"``; any other function is itself."""
    if not isinstance(activation, str):
        return activation
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{owner}: activation must be 'relu', 'gelu' or a function, got {activation!r}."
        )
    return _ACTIVATIONS[activation]


class _TransformerLayer(nn.Module):
    """What both layers are made of: attention, a feed-forward network, residuals and norms."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float,
        activation: str | Callable[[Tensor], Tensor],
        layer_norm_eps: float,
        *,
        cross: bool,
        norm_first: bool,
        bias: bool,
        attention_dropout: float | None,
        edge_dim: int | None,
        rotary: nn.Module | None,
        backend: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_at_least(name, 1, dim_feedforward=dim_feedforward)
        activation = activation_function(name, activation)
        if attention_dropout is None:
            attention_dropout = dropout
        # Modules come in the order of torch's layers, and so does the state_dict.
        self.self_attn = GraphMultiheadAttention(
            d_model,
            nhead,
            attention_dropout,
            bias,
            edge_dim=edge_dim,
            rotary=rotary,
            backend=backend,
        )
        if cross:
            self.multihead_attn = GraphMultiheadAttention(
                d_model, nhead, attention_dropout, bias, backend=backend
            )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        if cross:
            self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
            self.dropout3 = nn.Dropout(dropout)
        self.activation: Callable[[Tensor], Tensor] = activation
        self.norm_first = norm_first

    def _load(self, module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
        """Takes the parameters of torch's layer, its device, dtype and mode."""
        self.to(module.linear1.weight.device, module.linear1.weight.dtype)
        self.load_state_dict(module.state_dict())
        # Each has its own, which may have been changed since construction.
        for name, child in self.named_children():
            theirs = getattr(module, name)
            if isinstance(child, GraphMultiheadAttention):
                child.dropout = theirs.dropout
            elif isinstance(child, nn.Dropout):
                child.p = theirs.p
            elif isinstance(child, nn.LayerNorm):
                child.eps = theirs.eps
        self.train(module.training)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for child in self.children():
            reset(child)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What a sublayer reads."""
        return norm(x) if self.norm_first else x

    def _after(self, x: Tensor, out: Tensor, norm: nn.Module, dropout: nn.Module) -> Tensor:
        """The residual stream behind a sublayer that read ``x`` and gave ``out``."""
        x = x + dropout(out)
        return x if self.norm_first else norm(x)

    def _feed_forward(self, x: Tensor, norm: nn.Module, dropout: nn.Module) -> Tensor:
        y = self._before(x, norm)
        y = self.linear2(self.dropout(self.activation(self.linear1(y))))
        return self._after(x, y, norm, dropout)


class GraphTransformerLayer(_TransformerLayer):
    r"""Self-attention along edges and a feed-forward network, each with residual and normalisation.

    .. math::
        \text{post-norm:} \quad & y = \mathrm{LN}(x + \mathrm{MHA}(x)), & z = \mathrm{LN}(y +
        \mathrm{FFN}(y)) \\ \text{pre-norm:} \quad & y = x + \mathrm{MHA}(\mathrm{LN}(x)), & z = y +
        \mathrm{FFN}(\mathrm{LN}(y))

    Parameters and their names are those of ``torch.nn.TransformerEncoderLayer``: a checkpoint of a
    dense Transformer runs on a sparse graph, and on a complete graph gives the same numbers.
    Sources: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762); pre-norm, "On Layer
    Normalization in the Transformer Architecture" (https://arxiv.org/abs/2002.04745).

    Args:
        d_model: Size of node features.
        nhead: Number of heads; divides ``d_model``.
        dim_feedforward: Size of the hidden layer of the feed-forward network.
        dropout: Probability of dropping attention weights, hidden units and residual branches in
            training.
        activation: ``"relu"``, ``"gelu"`` or a function on tensors.
        layer_norm_eps: Constant of the layer normalisations.
        norm_first: Pre-norm instead of post-norm.
        bias: Learn biases in linear layers and normalisations.
        attention_dropout: Probability of dropping attention weights. Default ``dropout``.
        edge_dim: Size of each edge's features; ``None`` for none.
        rotary: Turns queries and keys by their positions, as in
            :class:`~graphattn.nn.GraphMultiheadAttention`; ``None`` for none.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``activation`` is unknown, or a number is out of range.

    >>> import torch
    >>> layer = GraphTransformerLayer(16, nhead=4, dim_feedforward=32, norm_first=True)
    >>> layer(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        *,
        norm_first: bool = False,
        bias: bool = True,
        attention_dropout: float | None = None,
        edge_dim: int | None = None,
        rotary: nn.Module | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            cross=False,
            norm_first=norm_first,
            bias=bias,
            attention_dropout=attention_dropout,
            edge_dim=edge_dim,
            rotary=rotary,
            backend=backend,
        )

    @classmethod
    def from_torch(
        cls, module: nn.TransformerEncoderLayer, *, backend: str = "auto"
    ) -> GraphTransformerLayer:
        """The graph form of a ``torch.nn.TransformerEncoderLayer``, parameters copied."""
        layer = cls(**_options_of(module), backend=backend)
        layer._load(module)
        return layer

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor,
        *,
        bias: Tensor | None = None,
        edge_attr: Tensor | None = None,
        position: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends, then transforms.

        Args:
            x: ``[*, N, d_model]``.
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            bias: ``[E, nhead]``, added to the scores.
            edge_attr: ``[E, edge_dim]``.
            position: ``[N]``, for ``rotary``.
            cache: Keys and values of earlier rows, to which those of ``x`` are appended. The
                sources of the graph are then all rows that it holds.
            return_attention_weights: Also return the weights ``[*, E, nhead]``, before dropout.

        Returns:
            ``[*, N, d_model]``, or a pair with the weights.
        """
        y = self._before(x, self.norm1)
        out = self.self_attn(
            y,
            y,
            y,
            graph,
            bias=bias,
            edge_attr=edge_attr,
            position=position,
            cache=cache,
            return_attention_weights=return_attention_weights,
        )
        weights = None
        if return_attention_weights:
            out, weights = out
        x = self._after(x, out, self.norm1, self.dropout1)
        x = self._feed_forward(x, self.norm2, self.dropout2)
        return x if weights is None else (x, weights)


class GraphTransformerDecoderLayer(_TransformerLayer):
    r"""Self-attention, attention to the encoder's output, and a feed-forward network.

    .. math::
        \text{post-norm:} \quad & y = \mathrm{LN}(x + \mathrm{MHA}(x)), & y' = \mathrm{LN}(y +
        \mathrm{MHA}(y, m)), & \quad z = \mathrm{LN}(y' + \mathrm{FFN}(y')) \\
        \text{pre-norm:} \quad & y = x + \mathrm{MHA}(\mathrm{LN}(x)), & y' = y +
        \mathrm{MHA}(\mathrm{LN}(y), m), & \quad z = y' + \mathrm{FFN}(\mathrm{LN}(y'))

    for the memory :math:`m`, each attention along a graph of its own. Parameters and their names
    are those of ``torch.nn.TransformerDecoderLayer``, and on the graphs of its masks it gives the
    same numbers. Source: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762).

    Args:
        d_model: Size of node features, and of those of the memory.
        nhead: Number of heads; divides ``d_model``.
        dim_feedforward: Size of the hidden layer of the feed-forward network.
        dropout: Probability of dropping attention weights, hidden units and residual branches in
            training.
        activation: ``"relu"``, ``"gelu"`` or a function on tensors.
        layer_norm_eps: Constant of the layer normalisations.
        norm_first: Pre-norm instead of post-norm.
        bias: Learn biases in linear layers and normalisations.
        attention_dropout: Probability of dropping attention weights. Default ``dropout``.
        rotary: Turns queries and keys of self-attention by their positions, as in
            :class:`~graphattn.nn.GraphMultiheadAttention`; ``None`` for none.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``activation`` is unknown, or a number is out of range.

    Three targets, each attending to itself and the one before it, and to all of four sources:

    >>> import torch
    >>> from graphattn import patterns
    >>> layer = GraphTransformerDecoderLayer(16, nhead=4, dim_feedforward=32)
    >>> x, memory = torch.randn(3, 16), torch.randn(4, 16)
    >>> layer(x, memory, patterns.window(3, 1, 0), patterns.cross(4, 3)).shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        *,
        norm_first: bool = False,
        bias: bool = True,
        attention_dropout: float | None = None,
        rotary: nn.Module | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            cross=True,
            norm_first=norm_first,
            bias=bias,
            attention_dropout=attention_dropout,
            edge_dim=None,
            rotary=rotary,
            backend=backend,
        )

    @classmethod
    def from_torch(
        cls, module: nn.TransformerDecoderLayer, *, backend: str = "auto"
    ) -> GraphTransformerDecoderLayer:
        """The graph form of a ``torch.nn.TransformerDecoderLayer``, parameters copied."""
        layer = cls(**_options_of(module), backend=backend)
        layer._load(module)
        return layer

    def forward(
        self,
        x: Tensor,
        memory: Tensor | tuple[Tensor, Tensor],
        graph: Graph | Tensor,
        cross_graph: Graph | Tensor,
        *,
        bias: Tensor | None = None,
        cross_bias: Tensor | None = None,
        position: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends to itself, then to the memory, then transforms.

        Args:
            x: ``[*, N, d_model]``.
            memory: ``[*, M, d_model]``, or its keys and values as
                ``multihead_attn.project_source(memory, memory)`` gives them, which need not be
                projected again for each new token.
            graph: Among targets: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            cross_graph: From the ``M`` rows of the memory to the ``N`` targets, ``[2, E']``.
            bias: ``[E, nhead]``, added to the scores of self-attention.
            cross_bias: ``[E', nhead]``, added to those of attention to the memory.
            position: ``[N]``, for ``rotary``.
            cache: Keys and values of earlier rows, to which those of ``x`` are appended. The
                sources of ``graph`` are then all rows that it holds.
            return_attention_weights: Also return the weights of attention to the memory, ``[*, E',
                nhead]``, before dropout.

        Returns:
            ``[*, N, d_model]``, or a pair with the weights.
        """
        y = self._before(x, self.norm1)
        out = self.self_attn(y, y, y, graph, bias=bias, position=position, cache=cache)
        x = self._after(x, out, self.norm1, self.dropout1)
        y = self._before(x, self.norm2)
        if isinstance(memory, Tensor):
            out = self.multihead_attn(
                y,
                memory,
                memory,
                cross_graph,
                bias=cross_bias,
                return_attention_weights=return_attention_weights,
            )
        else:
            out = self.multihead_attn.attend(
                self.multihead_attn.project_query(y),
                *memory,
                cross_graph,
                bias=cross_bias,
                return_attention_weights=return_attention_weights,
            )
        weights = None
        if return_attention_weights:
            out, weights = out
        x = self._after(x, out, self.norm2, self.dropout2)
        x = self._feed_forward(x, self.norm3, self.dropout3)
        return x if weights is None else (x, weights)


def _options_of(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict[str, Any]:
    """What the constructor must be told about torch's layer before its parameters fit."""
    return {
        "d_model": module.linear1.in_features,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "activation": deepcopy(module.activation),
        "norm_first": module.norm_first,
        "bias": module.linear1.bias is not None,
    }
