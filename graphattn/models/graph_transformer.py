"""Graph transformers for targets on nodes, edges or graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import BatchNorm, global_mean_pool
from torch_geometric.nn.inits import reset

from graphattn._checks import check_at_least, check_choice, check_probability
from graphattn.graph import Graph
from graphattn.nn import (
    AttentionDiffusion,
    GPSLayer,
    GraphAttentionConv,
    GraphMultiheadAttention,
    GraphTransformerLayer,
    PerformerAttention,
    PolynormerLayer,
)

__all__ = ["GraphTransformer", "mask_labels"]

_DEGREE_BINS = 32
_JUMPS = ("cat", "max", "sum", None)
_NORMS: dict[str | None, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "batch": lambda channels: BatchNorm(channels, allow_single_element=True),
    None: lambda channels: nn.Identity(),
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "elu": F.elu}


class GraphTransformer(nn.Module):
    r"""A graph transformer for targets on nodes, edges or graphs.

    Inputs are projected and summed, pass through the layers, and a head makes the output:

    .. math:: h^{(0)} = W x + E_{\mathrm{label}} + E_{\mathrm{degree}} + P p, \qquad
        h^{(l)} = \mathrm{layer}_l(h^{(l-1)}, \text{edges}), \qquad y = \mathrm{head}(h^{(L)})

    with only those terms that are asked for. Layers are of one of three kinds:

    - attention, normalisation and activation, as in UniMP (https://arxiv.org/abs/2009.03509), which
      also takes known labels as inputs (see :func:`mask_labels`);
    - with ``feedforward``, pre-norm Transformer blocks (https://arxiv.org/abs/2002.04745);
    - with ``gated``, :class:`~graphattn.nn.PolynormerLayer` (https://arxiv.org/abs/2403.01232).

    After them may come ``global_layers`` in which every node sees all nodes of its graph, at linear
    cost, and :class:`~graphattn.nn.AttentionDiffusion`, which spreads what the layers made over
    ``diffusion_steps`` edges. With few labels that alone is best: no layers before it, AGNN
    (https://arxiv.org/abs/1803.03735).

    Args:
        in_channels: Size of node features; 0 when nodes have none.
        hidden_channels: Width of the layers; a multiple of ``heads``.
        out_channels: Number of outputs: classes, or regression targets.
        num_layers: Number of layers, an attention head included. 0 needs ``diffusion_steps``: then
            the activation comes after the projection of the inputs.
        heads: Number of attention heads.
        feedforward: Width of the feed-forward networks of Transformer blocks; ``None`` for the
            other kinds.
        gated: Layers whose attention is multiplied by a projection of their input.
        target: What an output belongs to: ``"node"``, ``"edge"`` or ``"graph"``.
        head: ``"linear"``, or ``"attention"``: the last attention layer itself gives the outputs,
            its heads averaged, as in GAT and UniMP (node targets and attention layers only).
        jumping_knowledge: What the head reads: ``None``, the last layer; ``"cat"``, a projection of
            all layers side by side; ``"max"``, the largest of them, channel by channel; ``"sum"``,
            their sum. Source: "Representation Learning on Graphs with Jumping Knowledge Networks"
            (https://arxiv.org/abs/1806.03536).
        global_layers: Layers of :class:`~graphattn.nn.PerformerAttention` after the others: gated
            ones with ``gated``, else Transformer blocks of width ``feedforward``, by default ``2 *
            hidden_channels``.
        diffusion_steps: How many edges far the head's input spreads; 0 for not at all.
        teleport: Of that diffusion, the probability of going back to a node's own features.
        label_classes: Take known labels as inputs, of this many classes; 0 for none.
        degree_encoding: Add an embedding of each node's in-degree, by powers of two.
        encoding_channels: Size of the positional encodings given to ``forward``; 0 for none.
        input_projection: Project the features first. ``False`` lets the first attention layer read
            them as they are; it needs features, no other input, and attention layers.
        edge_dim: Size of edge features; ``None`` for none.
        root_weight: Skip connection of attention layers. Transformer blocks always have theirs.
        beta: Gate that skip connection.
        residual: Add the input of each attention layer to its output, where sizes agree. The other
            kinds always have ways around their attention.
        norm: Normalisation after each attention layer: ``"layer"``, ``"batch"`` or ``None``.
            The other kinds always use layer normalisation.
        degree_scaling: Multiply what an attention layer makes of node ``i``, before the norm, by
            ``(1 + in_degree(i)) ** degree_scaling``. Attention is a mean, which cannot tell two
            neighbours from two hundred; at 0.5 it grows as in a GCN, at 1 as a sum. Source:
            "Principal Neighbourhood Aggregation for Graph Nets" (https://arxiv.org/abs/2004.05718).
            Needs attention layers and ``norm="batch"``: layer normalisation would undo it.
        activation: ``"relu"``, ``"gelu"`` or ``"elu"``.
        dropout: Probability of dropping features, before each layer and before the head, in
            training.
        input_dropout: Probability of dropping entries of ``x``, in training. Default ``dropout``.
        attention_dropout: Probability of dropping attention weights, in training.
        attention_gain: Factor of the initial weights of queries and keys, above 0. Below 1,
            attention starts closer to the mean of the neighbours.
        edge_dropout: Probability of leaving out an edge, in training: in each forward pass anew,
            for all layers alike.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: A number is out of range, a name is unknown, or options exclude each other.

    >>> model = GraphTransformer(8, 16, out_channels=3, num_layers=2, heads=4)
    >>> model(torch.randn(5, 8), torch.tensor([[0, 1, 2], [1, 2, 4]])).shape
    torch.Size([5, 3])

    Graph classification with Transformer blocks:

    >>> model = GraphTransformer(8, 16, 2, num_layers=2, heads=4, feedforward=32, target="graph")
    >>> batch = torch.tensor([0, 0, 0, 1, 1])
    >>> model(torch.randn(5, 8), torch.tensor([[0, 3], [1, 4]]), batch=batch).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 3,
        heads: int = 4,
        *,
        feedforward: int | None = None,
        gated: bool = False,
        target: str = "node",
        head: str = "linear",
        jumping_knowledge: str | None = None,
        global_layers: int = 0,
        diffusion_steps: int = 0,
        teleport: float = 0.1,
        label_classes: int = 0,
        degree_encoding: bool = False,
        encoding_channels: int = 0,
        input_projection: bool = True,
        edge_dim: int | None = None,
        root_weight: bool = True,
        beta: bool = False,
        residual: bool = False,
        norm: str | None = "layer",
        degree_scaling: float = 0.0,
        activation: str = "relu",
        dropout: float = 0.0,
        input_dropout: float | None = None,
        attention_dropout: float = 0.0,
        attention_gain: float = 1.0,
        edge_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_choice("GraphTransformer", ("node", "edge", "graph"), target=target)
        check_at_least(
            "GraphTransformer", 0, global_layers=global_layers, diffusion_steps=diffusion_steps
        )
        check_probability(
            "GraphTransformer",
            dropout=dropout,
            input_dropout=dropout if input_dropout is None else input_dropout,
            edge_dropout=edge_dropout,
            teleport=teleport,
        )
        check_choice("GraphTransformer", ("linear", "attention"), head=head)
        check_choice("GraphTransformer", _JUMPS, jumping_knowledge=jumping_knowledge)
        check_choice("GraphTransformer", _NORMS, norm=norm)
        check_choice("GraphTransformer", _ACTIVATIONS, activation=activation)
        if not attention_gain > 0.0:
            raise ValueError(
                f"GraphTransformer: attention_gain must be above 0, got {attention_gain}."
            )
        least = 0 if diffusion_steps else 1
        if num_layers < least or heads < 1 or hidden_channels % heads != 0:
            raise ValueError(
                f"GraphTransformer: expected num_layers >= {least} and hidden_channels divisible "
                "by heads, got "
                f"num_layers={num_layers}, hidden_channels={hidden_channels}, heads={heads}."
            )
        more_inputs = bool(label_classes or degree_encoding or encoding_channels)
        if in_channels == 0 and not more_inputs:
            raise ValueError(
                "GraphTransformer: there is no input: in_channels is 0 and neither labels, degrees "
                "nor "
                "positional encodings are asked for."
            )
        if gated and feedforward is not None:
            raise ValueError(
                "GraphTransformer: gated=True and feedforward exclude each other: layers are of "
                "one kind."
            )
        plain = feedforward is None and not gated
        if not input_projection and (in_channels == 0 or more_inputs or not plain):
            raise ValueError(
                "GraphTransformer: input_projection=False needs features, attention layers (no "
                "feedforward, not gated) and no label, degree or positional inputs."
            )
        for_layers = not plain or edge_dim is not None or jumping_knowledge is not None
        if num_layers == 0 and (for_layers or not input_projection):
            raise ValueError(
                "GraphTransformer: num_layers=0 leaves no layers for feedforward, gated, edge_dim, "
                "jumping_knowledge or input_projection=False."
            )
        if degree_scaling != 0.0 and (not plain or norm != "batch"):
            raise ValueError(
                "GraphTransformer: degree_scaling needs attention layers (no feedforward, not "
                f"gated) and norm='batch', got feedforward={feedforward}, gated={gated}, "
                f"norm={norm!r}."
            )
        after_layers = jumping_knowledge is not None or global_layers > 0 or diffusion_steps > 0
        if head == "attention" and (target != "node" or not plain or after_layers):
            raise ValueError(
                "GraphTransformer: head='attention' needs target='node', attention layers (no "
                "feedforward, not gated), no jumping_knowledge, no global_layers and no "
                f"diffusion_steps, got target={target!r}, feedforward={feedforward}, "
                f"gated={gated}, jumping_knowledge={jumping_knowledge!r}, "
                f"global_layers={global_layers}, diffusion_steps={diffusion_steps}."
            )
        self.in_channels = in_channels
        self.label_classes = label_classes
        self.encoding_channels = encoding_channels
        self.target = target
        self.dropout = dropout
        self.input_dropout = dropout if input_dropout is None else input_dropout
        self.attention_gain = attention_gain
        self.edge_dropout = edge_dropout
        self.residual = residual
        self.degree_scaling = degree_scaling
        self.plain = plain
        self.jumping_knowledge = jumping_knowledge
        self.activation = _ACTIVATIONS[activation]

        hidden = hidden_channels
        self.lin_in = nn.Linear(in_channels, hidden) if in_channels and input_projection else None
        self.label_embedding = (
            nn.Embedding(label_classes + 1, hidden, padding_idx=0) if label_classes else None
        )
        self.degree_embedding = nn.Embedding(_DEGREE_BINS, hidden) if degree_encoding else None
        self.lin_encoding = (
            nn.Linear(encoding_channels, hidden, bias=False) if encoding_channels else None
        )
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        for index in range(num_layers):
            if feedforward is not None:
                block = GraphTransformerLayer(
                    hidden,
                    heads,
                    feedforward,
                    dropout,
                    self.activation,
                    norm_first=True,
                    attention_dropout=attention_dropout,
                    edge_dim=edge_dim,
                    backend=backend,
                )
                self.layers.append(block)
                continue
            gives_output = head == "attention" and index == num_layers - 1
            conv = GraphAttentionConv(
                hidden if index > 0 or input_projection else in_channels,
                out_channels if gives_output else hidden // heads,
                heads,
                concat=not gives_output,
                beta=beta,
                dropout=attention_dropout,
                edge_dim=edge_dim,
                root_weight=root_weight,
                backend=backend,
            )
            self.layers.append(PolynormerLayer(hidden, conv, dropout=dropout) if gated else conv)
            if plain and not gives_output:
                self.norms.append(_NORMS[norm](hidden))
        self.lin_jump = (
            nn.Linear(num_layers * hidden, hidden) if jumping_knowledge == "cat" else None
        )
        self.global_layers: nn.ModuleList = nn.ModuleList()
        for _ in range(global_layers):
            attention = PerformerAttention(hidden, heads)
            self.global_layers.append(
                PolynormerLayer(hidden, attention, dropout=dropout)
                if gated
                else GPSLayer(
                    hidden,
                    None,
                    attention,
                    dim_feedforward=feedforward,
                    dropout=dropout,
                    activation=self.activation,
                    norm_first=True,
                )
            )
        # Pre-norm blocks leave their sum as it is; gated layers need one before attention to all.
        blocks = feedforward is not None or (global_layers > 0 and not gated)
        self.final_norm = nn.LayerNorm(hidden) if blocks else None
        self.global_norm = nn.LayerNorm(hidden) if global_layers > 0 and gated else None
        self.diffusion = (
            AttentionDiffusion(
                hidden,
                heads,
                steps=diffusion_steps,
                teleport=teleport,
                dropout=attention_dropout,
                backend=backend,
            )
            if diffusion_steps
            else None
        )
        self.head: nn.Module | None = None
        if target == "edge":
            self.head = nn.Sequential(
                nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, out_channels)
            )
        elif head == "linear":
            self.head = nn.Linear(hidden, out_channels)
        self._scale_attention()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for child in self.children():
            reset(child)
        self._scale_attention()

    @torch.no_grad()
    def _scale_attention(self) -> None:
        for module in self.modules():
            if isinstance(module, GraphAttentionConv):
                module.lin_query.weight.mul_(self.attention_gain)
                module.lin_key.weight.mul_(self.attention_gain)
            elif isinstance(module, GraphMultiheadAttention) and module.in_proj_weight is not None:
                module.in_proj_weight[: 2 * module.embed_dim].mul_(self.attention_gain)

    def forward(
        self,
        x: Tensor | None,
        graph: Graph | Tensor,
        *,
        edge_attr: Tensor | None = None,
        labels: Tensor | None = None,
        encoding: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        edge_label_index: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Runs the model.

        Args:
            x: ``[N, in_channels]``, or ``None`` when nodes have no features. Where most entries are
                zero, as in bags of words, a CSR tensor (``x.to_sparse_csr()``) gives the same in
                less time and memory.
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            edge_attr: ``[E, edge_dim]``.
            labels: ``[N]`` int64, the known label of each node and -1 where it is not known; or
                ``[N, label_classes]`` floating, the share of each class, zeros where nothing is
                known, so that predictions can be inputs too.
            encoding: ``[N, encoding_channels]``, positional encodings.
            batch: ``[N]`` int64, the graph that each node belongs to; needed for
                ``target="graph"``. With ``global_layers`` it must be sorted, and the default is one
                graph.
            batch_size: Number of graphs. Default ``batch.max() + 1``; give it when the last ones
                have no nodes.
            edge_label_index: ``[2, L]``, the pairs of nodes to predict; needed for
                ``target="edge"``.
            return_attention_weights: Also return the weights ``[E, heads]`` of each layer, before
                dropout, in the caller's edge order: of ``layers``, not of ``global_layers``.

        Returns:
            ``[N, out_channels]`` for nodes, ``[L, out_channels]`` for edges, ``[B, out_channels]``
            for graphs; or a pair with the list of weights.

        Raises:
            ValueError: An input that the model was built for is missing, or one that it was not is
                given; attention weights are asked for while edges are dropped.
        """
        for name, given, expected in (
            ("x", x, self.in_channels > 0),
            ("labels", labels, self.label_classes > 0),
            ("encoding", encoding, self.encoding_channels > 0),
            ("batch", batch, self.target == "graph"),
            ("edge_label_index", edge_label_index, self.target == "edge"),
        ):
            if expected and given is None:
                raise ValueError(
                    f"GraphTransformer: {name} is missing; the model was built for it."
                )
            # A batch vector is at hand wherever graphs are batched, and does no harm.
            if not expected and given is not None and name != "batch":
                raise ValueError(
                    f"GraphTransformer: {name} is given, but the model was built without it."
                )
        graph = self._graph(graph, x, labels, encoding, batch)
        h = self._inputs(x, graph, labels, encoding)
        scale: Tensor | None = None
        if self.degree_scaling != 0.0:  # by the whole graph, also where edges are dropped
            degree = graph.in_degree().unsqueeze(1).to(h.dtype)
            scale = (1 + degree) ** self.degree_scaling  # [N, 1]
        if self.training and self.edge_dropout > 0.0:
            if return_attention_weights:
                raise ValueError(
                    "GraphTransformer: return_attention_weights=True while edge_dropout leaves out "
                    "edges. Call model.eval() first."
                )
            kept = torch.rand(graph.num_edges, device=graph.device) >= self.edge_dropout
            edge_attr = None if edge_attr is None else edge_attr[kept]
            size = (graph.num_src, graph.num_dst)
            graph = Graph(graph.edge_index[:, kept], size, validate=False)
        weights: list[Tensor] = []
        outputs: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if self.plain:
                raw = index == 0 and x is not None and self.lin_in is None
                h = _dropout(h, self.input_dropout if raw else self.dropout, self.training)
            out = layer(
                h, graph, edge_attr=edge_attr, return_attention_weights=return_attention_weights
            )
            if return_attention_weights:
                out, alpha = out
                weights.append(alpha[1] if isinstance(alpha, tuple) else alpha)
            if index < len(self.norms):
                if scale is not None:
                    out = out * scale
                out = self.activation(self.norms[index](out))
                if self.residual and out.shape == h.shape:
                    out = out + h
            h = out
            outputs.append(h)
        h = self._jump(outputs) if outputs else self.activation(h)
        if self.global_norm is not None:
            h = self.global_norm(h)
        nodes = h.new_zeros(h.size(0), dtype=torch.int64) if batch is None else batch
        for layer in self.global_layers:
            gated = isinstance(layer, PolynormerLayer)
            h = layer(h, nodes) if gated else layer(h, None, batch=nodes)
        if self.final_norm is not None:
            h = self.final_norm(h)
        if self.diffusion is not None:
            h = self.diffusion(F.dropout(h, self.dropout, self.training), graph)
        out = self._head(h, batch, batch_size, edge_label_index)
        return (out, weights) if return_attention_weights else out

    def _jump(self, outputs: list[Tensor]) -> Tensor:
        if self.jumping_knowledge is None:
            return outputs[-1]
        if self.lin_jump is not None:
            return self.lin_jump(torch.cat(outputs, dim=-1))
        stacked = torch.stack(outputs)
        return stacked.sum(0) if self.jumping_knowledge == "sum" else stacked.amax(0)

    def _graph(self, graph: Graph | Tensor, *per_node: Tensor | None) -> Graph:
        if isinstance(graph, Graph):
            return graph
        num_nodes = next((rows.size(0) for rows in per_node if rows is not None), None)
        if num_nodes is None:
            raise ValueError(
                "GraphTransformer: nothing tells the number of nodes. Give a Graph instead of an "
                "edge_index."
            )
        return Graph.of(graph, num_nodes)

    def _inputs(
        self, x: Tensor | None, graph: Graph, labels: Tensor | None, encoding: Tensor | None
    ) -> Tensor:
        terms = []
        if x is not None:
            terms.append(x)
            if self.lin_in is not None:
                terms = [self.lin_in(_dropout(x, self.input_dropout, self.training))]
        if self.label_embedding is not None and labels is not None:
            terms.append(
                labels.to(self.label_embedding.weight.dtype) @ self.label_embedding.weight[1:]
                if labels.is_floating_point()
                else self.label_embedding(labels + 1)
            )
        if self.degree_embedding is not None:
            bins = torch.log2(graph.in_degree().float() + 1).long()
            terms.append(self.degree_embedding(bins.clamp(max=_DEGREE_BINS - 1)))
        if self.lin_encoding is not None and encoding is not None:
            terms.append(self.lin_encoding(encoding))
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def _head(
        self,
        h: Tensor,
        batch: Tensor | None,
        batch_size: int | None,
        edge_label_index: Tensor | None,
    ) -> Tensor:
        if self.head is None:
            return h
        if self.target == "graph":
            h = global_mean_pool(h, batch, batch_size)
        elif edge_label_index is not None:
            h = h[edge_label_index].movedim(0, 1).flatten(1)  # [L, 2 * hidden]
        return self.head(F.dropout(h, self.dropout, self.training))


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """``F.dropout``, also of CSR tensors: zeros stay zeros, so only stored values are drawn."""
    if x.layout != torch.sparse_csr:
        return F.dropout(x, p, training)
    values = F.dropout(x.values(), p, training)
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )


def mask_labels(
    y: Tensor, known: Tensor, rate: float, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Hides part of the known labels, to be predicted from the rest: masked label prediction.

    A model that sees a node's label as input must not be asked for it, so each training step shows
    a random part of the training labels and takes the loss on the others. Source: UniMP
    (https://arxiv.org/abs/2009.03509), section 3.2.

    Args:
        y: ``[N]`` int64, labels.
        known: ``[N]`` bool, nodes whose label may be used (the training nodes).
        rate: Share of known labels to show, from 0 to 1. At 1 all are shown and none is left to
            predict, as for a forward pass at test time.
        generator: Source of randomness. Default: torch's.

    Returns:
        ``(labels, hidden)``: ``[N]`` int64 with -1 where no label is shown, the model's input; and
        ``[N]`` bool, known nodes whose label is hidden, for the loss.

    Raises:
        ValueError: ``rate`` is not from 0 to 1.

    >>> labels, hidden = mask_labels(
    ...     torch.tensor([3, 1, 2]), torch.tensor([True, True, False]), 1.0
    ... )
    >>> labels.tolist(), hidden.tolist()
    ([3, 1, -1], [False, False, False])
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"mask_labels: rate must be from 0 to 1, got {rate}.")
    draw = torch.rand(known.shape, generator=generator, device=known.device)
    shown = known & (draw < rate)
    return torch.where(shown, y, -1), known & ~shown
