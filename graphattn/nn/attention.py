"""Attention layers with the interfaces of PyG's and PyTorch's own."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, SumAggregation
from torch_geometric.nn.dense import Linear
from torch_geometric.utils import is_torch_sparse_tensor, softmax

from graphattn import backends
from graphattn._checks import check_at_least, check_probability
from graphattn.dropout import draw_seed, drop
from graphattn.functional import attention_weights, graph_attention
from graphattn.graph import Graph

__all__ = ["GraphAttentionConv", "GraphMultiheadAttention", "KeyValueCache"]


class GraphAttentionConv(MessagePassing):
    r"""Multi-head attention over the in-neighbours of each node: a drop-in for ``TransformerConv``.

    .. math:: \mathbf{x}'_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{e = (j \to i)} \alpha_e
        \left( \mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{x}_e \right), \qquad
        \alpha_e = \mathrm{softmax}_i \left( \frac{(\mathbf{W}_3 \mathbf{x}_i)^\top
        (\mathbf{W}_4 \mathbf{x}_j + \mathbf{W}_6 \mathbf{x}_e)}{\sqrt{d}} \right)

    with a bias in :math:`\mathbf{W}_1` to :math:`\mathbf{W}_4`. Source: "Masked Label Prediction:
    Unified Message Passing Model for Semi-Supervised Classification"
    (https://arxiv.org/abs/2009.03509). Constructor, parameter names and numbers are those of
    ``torch_geometric.nn.TransformerConv``, and so is the ``state_dict``; what differs is listed in
    the docs under "Migrating". The operator :func:`graphattn.graph_attention` does the work, unless
    somebody wants to see messages: a hook on them, an explainer, an ``aggr`` other than the sum, or
    a subclass that overrides them. Then :meth:`message` and :meth:`aggregate` run as in any PyG
    layer.

    Args:
        in_channels: Size of each node's features, or ``(source, target)`` sizes; -1 takes it from
            the first input.
        out_channels: Size of each head's output.
        heads: Number of heads.
        concat: Concatenate the heads (output ``heads * out_channels``); otherwise average them
            (``out_channels``).
        beta: Mix skip and attention by a learned gate, :math:`\beta_i \mathbf{W}_1 \mathbf{x}_i +
            (1 - \beta_i) \mathbf{m}_i` with :math:`\beta_i = \sigma(\mathbf{w}_5^\top
            [\mathbf{m}_i, \mathbf{W}_1 \mathbf{x}_i, \mathbf{m}_i - \mathbf{W}_1 \mathbf{x}_i])`.
            Needs ``root_weight``; without it, no gate is made.
        dropout: Probability of dropping attention weights in training.
        edge_dim: Size of each edge's features, which are then required; ``None`` for none.
        bias: Learn a bias in the projections.
        root_weight: Add the projection :math:`\mathbf{W}_1 \mathbf{x}_i` of the node itself (the
            skip connection).
        aggr: Aggregation of PyG's base class; anything but ``"add"`` goes through messages.
        aggr_kwargs: Arguments of ``aggr``.
        flow: ``"source_to_target"``: row 1 of ``edge_index`` holds the queries;
            ``"target_to_source"``: row 0.
        decomposed_layers: Of PyG's base class; attention needs all channels of a key at once, so
            only 1 is possible.
        backend: As in :func:`graphattn.graph_attention`, for the operator; messages are PyG's.

    Shapes:
        ``x [*, N, in_channels]`` or ``(x_src [*, N_src, F_src], x_dst [*, N_dst, F_dst])``;
        ``edge_attr [E, edge_dim]``; output ``[*, N_dst, heads * out_channels]``, or ``[*, N_dst,
        out_channels]`` when ``concat=False``.

    Raises:
        ValueError: ``heads``, ``out_channels``, ``dropout``, ``edge_dim`` or ``decomposed_layers``
            is out of range.

    >>> conv = GraphAttentionConv(16, 8, heads=4)
    >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
    >>> conv(torch.randn(3, 16), edge_index).shape
    torch.Size([3, 32])
    >>> out, (edge_index, alpha) = conv(
    ...     torch.randn(3, 16), edge_index, return_attention_weights=True
    ... )
    >>> alpha.shape
    torch.Size([3, 4])
    """

    _alpha: Tensor | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        aggr: str | list[str] | Aggregation | None = "add",
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = "source_to_target",
        decomposed_layers: int = 1,
        backend: str = "auto",
    ) -> None:
        check_at_least("GraphAttentionConv", 1, heads=heads, out_channels=out_channels)
        if edge_dim != -1:
            check_at_least("GraphAttentionConv", 1, edge_dim=edge_dim)
        check_probability("GraphAttentionConv", dropout=dropout)
        backends.check_name(backend, function="GraphAttentionConv")
        if decomposed_layers != 1:
            raise ValueError(
                "GraphAttentionConv: decomposed_layers must be 1, because a score needs all "
                f"channels of query and key, got {decomposed_layers}. Memory does not grow with "
                "edges times channels here."
            )
        # Nodes are the third dimension from the right, so that x may have leading dimensions.
        super().__init__(aggr, aggr_kwargs=aggr_kwargs, flow=flow, node_dim=-3)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.beta = beta and root_weight
        self.dropout = dropout
        self.edge_dim = edge_dim
        self.root_weight = root_weight
        self.backend = backend
        self._alpha = None

        src_channels, dst_channels = (
            in_channels if isinstance(in_channels, (tuple, list)) else (in_channels, in_channels)
        )
        width = heads * out_channels
        out_width = width if concat else out_channels
        self.lin_key = Linear(src_channels, width, bias=bias)
        self.lin_query = Linear(dst_channels, width, bias=bias)
        self.lin_value = Linear(src_channels, width, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, width, bias=False)
        self.lin_skip = Linear(dst_channels, out_width, bias=bias) if root_weight else None
        self.lin_beta = Linear(3 * out_width, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        super().reset_parameters()
        for layer in self.children():
            if isinstance(layer, Linear):
                layer.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor | Graph, Tensor]]:
        """Attends.

        Args:
            x: ``[*, N, in_channels]``, or ``(x_src, x_dst)`` when keys and queries are different
                nodes.
            edge_index: ``[2, E]``, a PyG ``EdgeIndex``, a torch sparse ``adj_t`` ``[N_dst, N_src]``
                or a :class:`~graphattn.Graph`.
            edge_attr: ``[E, edge_dim]``; ``[E]`` is taken as ``[E, 1]`` when ``edge_dim`` is 1.
            return_attention_weights: Also return ``(edge_index, weights)`` with weights ``[*, E,
                heads]`` before dropout, in the order of ``edge_index``.

        Raises:
            TypeError: ``edge_attr`` is not floating point, or ``x`` is not a tensor or a pair of
                tensors.
            ValueError: ``edge_attr`` is missing, not expected or of the wrong shape, or the sizes
                do not agree.
            IndexError: ``edge_index`` points outside ``x``.
        """
        x_src, x_dst = self._pair(x)
        edge_attr = self._edge_features(edge_index, edge_attr)
        by_head = (self.heads, self.out_channels)
        query = self.lin_query(x_dst).unflatten(-1, by_head)
        key = self.lin_key(x_src).unflatten(-1, by_head)
        value = self.lin_value(x_src).unflatten(-1, by_head)
        graph = self._graph(edge_index, (key.size(-3), query.size(-3)))

        alpha: Tensor | None = None
        if self._sends_messages():
            try:
                out = self.propagate(
                    graph.edge_index
                    if self.flow == "source_to_target"
                    else graph.edge_index.flip(0),
                    query=query,
                    key=key,
                    value=value,
                    edge_attr=edge_attr,
                ).to(query.dtype)
                alpha = self._alpha
            finally:
                self._alpha = None
        else:
            edge_weight = (
                None if self.lin_edge is None else self.lin_edge.weight.unflatten(0, by_head)
            )
            out = graph_attention(
                query,
                key,
                value,
                graph,
                edge_attr=edge_attr,
                edge_weight=edge_weight,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            )
            if return_attention_weights:
                alpha = attention_weights(
                    query,
                    key,
                    graph,
                    edge_attr=edge_attr,
                    edge_weight=edge_weight,
                    backend=self.backend,
                )

        out = out.flatten(-2) if self.concat else out.mean(dim=-2)
        if self.lin_skip is not None:
            skip = self.lin_skip(x_dst)
            if self.lin_beta is None:
                out = out + skip
            else:
                gate = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = gate * skip + (1 - gate) * out
        if not return_attention_weights:
            return out
        if alpha is None:
            raise ValueError(
                f"{type(self).__name__}: return_attention_weights=True, but message() did not "
                "leave its weights in self._alpha."
            )
        return out, (edge_index, alpha)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: Tensor | None,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        """What each edge sends, ``[*, E, H, C]``: its weight times value plus edge features.

        In float32 at least, as are the scores.
        """
        if self.lin_edge is not None:
            edge_attr = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            key_j, value_j = key_j + edge_attr, value_j + edge_attr
        compute = torch.promote_types(query_i.dtype, torch.float32)
        score = (query_i.to(compute) * key_j).sum(dim=-1) / math.sqrt(self.out_channels)
        alpha = softmax(score, index, ptr, size_i, dim=-2)
        self._alpha = alpha.to(query_i.dtype)
        if self.training and self.dropout > 0.0:
            by_edge = alpha.unsqueeze(0).flatten(0, -3).movedim(0, 1)  # [E, B, H]
            alpha = (
                drop(by_edge, draw_seed(alpha.device), None, self.dropout)
                .movedim(1, 0)
                .view(alpha.shape)
            )
        return value_j * alpha.unsqueeze(-1)

    def _sends_messages(self) -> bool:
        return bool(
            self.explain
            or not _is_plain(self.aggr_module, SumAggregation)
            # Overridden in a subclass or on this very layer.
            or any(
                getattr(type(self), name) is not getattr(GraphAttentionConv, name)
                or name in self.__dict__
                for name in ("message", "aggregate", "update")
            )
            or self._propagate_forward_pre_hooks
            or self._propagate_forward_hooks
            or self._message_forward_pre_hooks
            or self._message_forward_hooks
            or self._aggregate_forward_pre_hooks
            or self._aggregate_forward_hooks
            # The operator takes the weight of lin_edge, so lin_edge has to be no more than its
            # weight.
            or (
                self.lin_edge is not None
                and (not _is_plain(self.lin_edge, Linear) or self.lin_edge.bias is not None)
            )
        )

    def _pair(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if isinstance(x, Tensor):
            x = (x, x)
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise TypeError(
                "GraphAttentionConv: x must be a tensor or a pair (x_src, x_dst), got "
                f"{type(x).__name__}."
            )
        for side, features in zip(("x_src", "x_dst"), x, strict=True):
            if not isinstance(features, Tensor):
                raise TypeError(
                    f"GraphAttentionConv: {side} is {type(features).__name__}. Attention needs "
                    "keys from the sources and queries from the targets: give features to both, "
                    "for instance an embedding (torch.nn.Embedding) where nodes have none."
                )
            if features.dim() < 2:
                raise ValueError(
                    f"GraphAttentionConv: {side} must have shape (*, num_nodes, channels), got "
                    f"{tuple(features.shape)}. Use x.unsqueeze(-1) for one channel."
                )
        return x[0], x[1]

    def _edge_features(self, edge_index: Tensor | Graph, edge_attr: Tensor | None) -> Tensor | None:
        if edge_attr is None:
            edge_attr = _stored_features(edge_index)
        if edge_attr is None:
            if self.edge_dim is not None:
                raise ValueError(
                    "GraphAttentionConv: edge_attr is missing; the layer was built with "
                    f"edge_dim={self.edge_dim}."
                )
            return None
        if not isinstance(edge_attr, Tensor):
            raise TypeError(
                "GraphAttentionConv: edge_attr must be a tensor (num_edges, edge_dim), got "
                f"{type(edge_attr).__name__}. Use torch.as_tensor(edge_attr)."
            )
        if self.edge_dim is None:
            raise ValueError(
                f"GraphAttentionConv: got edge_attr of shape {tuple(edge_attr.shape)}, but the "
                "layer was built without edge_dim. Use GraphAttentionConv(..., edge_dim=...), or "
                "leave edge_attr out."
            )
        if not edge_attr.is_floating_point():
            raise TypeError(
                f"GraphAttentionConv: edge_attr must be floating point, got {edge_attr.dtype}. "
                "Cast numbers with edge_attr.float(), or embed categories with "
                "torch.nn.Embedding."
            )
        if edge_attr.dim() == 1 and self.edge_dim in (1, -1):
            edge_attr = edge_attr.unsqueeze(-1)
        expected = (
            _num_edges(edge_index),
            edge_attr.size(-1) if self.edge_dim == -1 else self.edge_dim,
        )
        if edge_attr.shape != expected:
            hint = " Use edge_attr.t()." if tuple(edge_attr.shape) == expected[::-1] else ""
            raise ValueError(
                "GraphAttentionConv: edge_attr must have shape (num_edges, edge_dim) = "
                f"{expected}, got {tuple(edge_attr.shape)}.{hint}"
            )
        return edge_attr

    def _graph(self, edge_index: Tensor | Graph, size: tuple[int, int]) -> Graph:
        if self.flow == "source_to_target":
            return Graph.of(edge_index, size)
        if isinstance(edge_index, Graph) or is_torch_sparse_tensor(edge_index):
            what = "a Graph" if isinstance(edge_index, Graph) else "a sparse adj_t"
            turned = "graph.reverse()" if isinstance(edge_index, Graph) else "adj_t.t()"
            raise ValueError(
                "GraphAttentionConv: flow='target_to_source' reads an edge_index the other way "
                f"round, but {what} says itself which side is which. Use {turned} and the default "
                "flow."
            )
        return Graph.of(edge_index, size[::-1]).reverse()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # PyG's layer has a skip projection even where root_weight=False leaves it unused.
        if self.lin_skip is None:
            for name in ("weight", "bias"):
                state_dict.pop(f"{prefix}lin_skip.{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


class GraphMultiheadAttention(nn.Module):
    r"""Multi-head attention with input and output projections, along the edges of a graph.

    .. math:: \mathrm{MHA}(Q, K, V) = [\mathrm{head}_1, \dots, \mathrm{head}_H] W^O, \qquad
        \mathrm{head}_h = \mathrm{Attention}(Q W^Q_h, K W^K_h, V W^V_h)

    where each query attends to its in-neighbours. Parameters, their names and their initialisation
    are those of ``torch.nn.MultiheadAttention``, whose ``state_dict`` it loads; on a complete
    graph, or the graph of a mask, it equals it. Where that gives NaN, for a query that may see
    nothing, this gives the output projection of zero. Source: "Attention Is All You Need"
    (https://arxiv.org/abs/1706.03762), section 3.2.2.

    Args:
        embed_dim: Size of queries and outputs.
        num_heads: Number of heads; divides ``embed_dim``.
        dropout: Probability of dropping attention weights in training.
        bias: Learn a bias in the projections.
        kdim: Size of keys. Default ``embed_dim``.
        vdim: Size of values. Default ``embed_dim``.
        edge_dim: Size of each edge's features, which are projected and added to key and value of
            the edge; ``None`` for none. The projection ``lin_edge`` has no counterpart in
            ``torch.nn.MultiheadAttention``.
        rotary: Turns projected queries and keys by their positions, such as
            :class:`~graphattn.nn.encoding.RotaryEncoding`, called as ``rotary(x [*, N, H, D],
            position [N])``; ``None`` for none.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``embed_dim`` is not divisible by ``num_heads``, or a number is out of range.

    >>> attention = GraphMultiheadAttention(16, num_heads=4)
    >>> x = torch.randn(5, 16)
    >>> causal = Graph.from_mask(torch.ones(5, 5, dtype=torch.bool).tril())
    >>> attention(x, x, x, causal).shape
    torch.Size([5, 16])
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        edge_dim: int | None = None,
        rotary: nn.Module | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_at_least(
            "GraphMultiheadAttention",
            1,
            embed_dim=embed_dim,
            num_heads=num_heads,
            kdim=kdim,
            vdim=vdim,
            edge_dim=edge_dim,
        )
        check_probability("GraphMultiheadAttention", dropout=dropout)
        backends.check_name(backend, function="GraphMultiheadAttention")
        if embed_dim % num_heads != 0:
            raise ValueError(
                f"GraphMultiheadAttention: embed_dim {embed_dim} must be divisible by num_heads "
                f"{num_heads}."
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.edge_dim = edge_dim
        self.backend = backend

        packed = self.kdim == embed_dim and self.vdim == embed_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (embed_dim, self.kdim),
            "v_proj_weight": None if packed else (embed_dim, self.vdim),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, shape and nn.Parameter(torch.empty(shape)))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, embed_dim, bias=False)
        self.rotary = rotary
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as ``torch.nn.MultiheadAttention`` does."""
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.lin_edge is not None:
            self.lin_edge.reset_parameters()

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, backend: str = "auto"
    ) -> GraphMultiheadAttention:
        """The graph form of a ``torch.nn.MultiheadAttention``, with a copy of its parameters.

        Raises:
            ValueError: The module adds keys of its own (``add_bias_kv``, ``add_zero_attn``), which
                no edge leads to.
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "GraphMultiheadAttention.from_torch: add_bias_kv and add_zero_attn add a key that "
                "is no node. Add that node to the sources and an edge from it to every query."
            )
        weight = module.out_proj.weight
        attention = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
            backend=backend,
        ).to(weight.device, weight.dtype)
        attention.load_state_dict(module.state_dict())
        return attention.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: Graph | Tensor,
        *,
        bias: Tensor | None = None,
        edge_attr: Tensor | None = None,
        position: Tensor | tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends: :meth:`project`, then :meth:`attend`.

        Args:
            query: ``[*, N_dst, embed_dim]``. Leading dimensions share the graph; sequences that
                differ in their mask are put side by side with :meth:`graphattn.Graph.batch` or a
                batched :meth:`graphattn.Graph.from_mask`.
            key: ``[*, N_src, kdim]``.
            value: ``[*, N_src, vdim]``.
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            bias: ``[E, num_heads]``, added to the scores.
            edge_attr: ``[E, edge_dim]``.
            position: ``[N]``, or ``(src, dst)`` where sources and targets differ, for ``rotary``.
            cache: Keys and values of earlier calls. Those of this call are appended to it, and the
                sources of the graph are all that it then holds.
            return_attention_weights: Also return the weights ``[*, E, num_heads]``, before dropout.

        Returns:
            ``[*, N_dst, embed_dim]``, or a pair with the weights.

        Raises:
            ValueError: ``edge_attr`` is given without ``edge_dim`` or the reverse, ``position``
                without ``rotary`` or the reverse, or shapes do not agree.
        """
        q, k, v = self.project(query, key, value, position=position)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.attend(
            q,
            k,
            v,
            graph,
            bias=bias,
            edge_attr=edge_attr,
            return_attention_weights=return_attention_weights,
        )

    def project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        position: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, ``[*, N, num_heads, head_dim]``.

        Arguments as in :meth:`forward`.
        """
        src, dst = position if isinstance(position, tuple) else (position, position)
        if self.in_proj_weight is not None and query is key and key is value:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = packed.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
            return self._rotate(q, dst), self._rotate(k, src), v
        q = self.project_query(query, position=dst)
        return q, *self.project_source(key, value, position=src)

    def project_query(self, query: Tensor, *, position: Tensor | None = None) -> Tensor:
        """Queries of each head, ``[*, N_dst, num_heads, head_dim]``."""
        return self._rotate(self._linear(0, query), position)

    def project_source(
        self, key: Tensor, value: Tensor, *, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of each head, ``[*, N_src, num_heads, head_dim]``."""
        return self._rotate(self._linear(1, key), position), self._linear(2, value)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: Graph | Tensor,
        *,
        bias: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends with what is projected already, and projects the output.

        Args:
            query: ``[*, N_dst, num_heads, head_dim]``.
            key: ``[*, N_src, num_heads, head_dim]``.
            value: ``[*, N_src, num_heads, head_dim]``.
            graph: As the rest, as in :meth:`forward`.
            bias: ``[E, num_heads]``.
            edge_attr: ``[E, edge_dim]``.
            return_attention_weights: Also return the weights.

        Returns:
            ``[*, N_dst, embed_dim]``, or a pair with the weights ``[*, E, num_heads]``.
        """
        if (edge_attr is None) != (self.edge_dim is None):
            given = "missing" if edge_attr is None else "given"
            raise ValueError(
                f"GraphMultiheadAttention: edge_attr is {given}, but the layer was built with "
                f"edge_dim={self.edge_dim}."
            )
        by_head = (self.num_heads, self.head_dim)
        edge_weight = None if self.lin_edge is None else self.lin_edge.weight.unflatten(0, by_head)
        out = graph_attention(
            query,
            key,
            value,
            graph,
            bias=bias,
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        out = self.out_proj(out.flatten(-2))
        if not return_attention_weights:
            return out
        weights = attention_weights(
            query,
            key,
            graph,
            bias=bias,
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            backend=self.backend,
        )
        return out, weights

    def _linear(self, which: int, x: Tensor) -> Tensor:
        """The projection of queries (0), keys (1) or values (2)."""
        if self.in_proj_weight is not None:
            weight = self.in_proj_weight.chunk(3)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        return F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim))

    def _rotate(self, x: Tensor, position: Tensor | None) -> Tensor:
        if (position is None) != (self.rotary is None):
            given = "missing" if position is None else "given"
            built = "with rotary" if position is None else "without rotary"
            raise ValueError(
                f"GraphMultiheadAttention: position is {given}, but the layer was built {built}."
            )
        return x if self.rotary is None else self.rotary(x, position)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


class KeyValueCache:
    """Projected keys and values of all rows seen so far: what a decoder need not compute again.

    Rows of all sequences lie side by side in the order in which they came; the graph of each call
    says which of them a query attends to. It starts empty, is filled by
    ``GraphMultiheadAttention(..., cache=cache)``, and belongs to one layer.

    Attributes:
        key: ``[*, N_src, H, D]``, or ``None`` while it is empty.
        value: ``[*, N_src, H, D]``, or ``None`` while it is empty.

    >>> attention, cache = GraphMultiheadAttention(8, num_heads=2), KeyValueCache()
    >>> x, causal = torch.randn(3, 8), torch.tensor([[0, 0, 1, 0, 1, 2], [0, 1, 1, 2, 2, 2]])
    >>> first = attention(x[:2], x[:2], x[:2], causal[:, :3], cache=cache)
    >>> last = attention(x[2:], x[2:], x[2:], torch.tensor([[0, 1, 2], [0, 0, 0]]), cache=cache)
    >>> torch.allclose(torch.cat([first, last]), attention(x, x, x, causal), atol=1e-6)
    True
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds rows; returns the keys and values of all rows."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], dim=-3), torch.cat([self.value, value], dim=-3)
        self.key, self.value = key, value
        return key, value


def _num_edges(edge_index: Tensor | Graph) -> int:
    if isinstance(edge_index, Graph):
        return edge_index.num_edges
    if is_torch_sparse_tensor(edge_index):
        return (
            edge_index.values().size(0)
            if edge_index.layout != torch.sparse_coo
            else edge_index._nnz()
        )
    return edge_index.size(-1)


def _stored_features(edge_index: Tensor | Graph) -> Tensor | None:
    """Edge features ``[E, C]`` that are the values of a sparse ``adj_t``, as they are stored."""
    if not isinstance(edge_index, Tensor) or not is_torch_sparse_tensor(edge_index):
        return None
    if edge_index.dense_dim() == 0:
        return None
    if edge_index.layout != torch.sparse_coo or edge_index.is_coalesced():
        return edge_index.values()
    if edge_index.requires_grad:
        raise ValueError(
            "GraphAttentionConv: torch has no gradient for the values of a COO adj_t that is not "
            "coalesced. Give edge_index and edge_attr instead, or adj_t.coalesce(), which adds up "
            "parallel edges."
        )
    return edge_index._values()


def _is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` is no more than what ``kind`` computes, with nobody watching."""
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not module._forward_pre_hooks
        and not module._forward_hooks
        and not module._backward_pre_hooks
        and not module._backward_hooks
    )
