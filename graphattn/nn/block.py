"""The Transformer block on a graph."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn
from torch.nn import functional as F

from graphattn.graph import Graph
from graphattn.nn.attention import GraphMultiheadAttention

__all__ = ["GraphTransformerLayer"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class GraphTransformerLayer(nn.Module):
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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if dim_feedforward < 1:
            raise ValueError(
                f"GraphTransformerLayer: dim_feedforward must be at least 1, got {dim_feedforward}."
            )
        if isinstance(activation, str):
            if activation not in _ACTIVATIONS:
                raise ValueError(
                    "GraphTransformerLayer: activation must be 'relu', 'gelu' or a function, got "
                    f"{activation!r}."
                )
            activation = _ACTIVATIONS[activation]
        self.self_attn = GraphMultiheadAttention(
            d_model,
            nhead,
            dropout if attention_dropout is None else attention_dropout,
            bias,
            edge_dim=edge_dim,
            backend=backend,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation: Callable[[Tensor], Tensor] = activation
        self.norm_first = norm_first

    @classmethod
    def from_torch(
        cls, module: nn.TransformerEncoderLayer, *, backend: str = "auto"
    ) -> GraphTransformerLayer:
        """The graph form of a ``torch.nn.TransformerEncoderLayer``, parameters copied."""
        weight = module.linear1.weight
        layer = cls(
            module.linear1.in_features,
            module.self_attn.num_heads,
            module.linear1.out_features,
            module.dropout.p,
            deepcopy(module.activation),
            module.norm1.eps,
            norm_first=module.norm_first,
            bias=module.linear1.bias is not None,
            attention_dropout=module.self_attn.dropout,
            backend=backend,
        ).to(weight.device, weight.dtype)
        layer.load_state_dict(module.state_dict())
        # Each has its own, which may have been changed since construction.
        layer.dropout1.p, layer.dropout2.p = module.dropout1.p, module.dropout2.p
        layer.norm2.eps = module.norm2.eps
        return layer.train(module.training)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for child in self.children():
            reset = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor,
        *,
        bias: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends, then transforms.

        Args:
            x: ``[*, N, d_model]``.
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            bias: ``[E, nhead]``, added to the scores.
            edge_attr: ``[E, edge_dim]``.
            return_attention_weights: Also return the weights ``[*, E, nhead]``, before dropout.

        Returns:
            ``[*, N, d_model]``, or a pair with the weights.
        """
        y = self.norm1(x) if self.norm_first else x
        out = self.self_attn(
            y,
            y,
            y,
            graph,
            bias=bias,
            edge_attr=edge_attr,
            return_attention_weights=return_attention_weights,
        )
        weights = None
        if return_attention_weights:
            out, weights = out
        x = x + self.dropout1(out)
        if not self.norm_first:
            x = self.norm1(x)
        y = self.norm2(x) if self.norm_first else x
        x = x + self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(y)))))
        if not self.norm_first:
            x = self.norm2(x)
        return x if weights is None else (x, weights)
