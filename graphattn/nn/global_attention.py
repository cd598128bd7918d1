"""Self-attention of every node to all nodes of its graph: exact, and at linear cost."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import backends, patterns
from graphattn._checks import check_at_least, check_probability
from graphattn.functional import graph_attention
from graphattn.graph import Graph
from graphattn.nn.attention import GraphMultiheadAttention
from graphattn.nn.linear_cost import (
    Blocks,
    favor,
    favor_causal,
    lengths_of,
    ratio,
    read,
    wide,
    with_ones,
    without_autocast,
)

__all__ = [
    "GlobalAttention",
    "LinformerAttention",
    "PerformerAttention",
    "ReformerAttention",
]

# Rotations for one digit of a bucket's number, and digits: enough for 2 million buckets.
_ROTATIONS, _DIGITS = 64, 3


class _SelfAttention(nn.Module):
    """What the layers share: the parameters of multi-head attention, and how they are loaded.

    Inside, the head is the first dimension: ``[H, N, D]``.
    """

    in_proj_bias: nn.Parameter | None
    # What a layer has beside the parameters of exact attention.
    _own: tuple[str, ...] = ()

    def __init__(self, embed_dim: int, num_heads: int, bias: bool, *, projections: int = 3) -> None:
        super().__init__()
        self._name = type(self).__name__
        check_at_least(self._name, 1, embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads != 0:
            raise ValueError(
                f"{self._name}: embed_dim {embed_dim} must be divisible by num_heads {num_heads}."
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(projections * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(projections * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as ``torch.nn.MultiheadAttention`` does."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values ``[H, N, D]``."""
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return (
            packed.unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(1, 2, 0, 3).unbind()
        )

    def _merge(self, out: Tensor) -> Tensor:
        """The output ``[N, embed_dim]`` of what the heads give, ``[H, N, D]``."""
        merged: Tensor = self.out_proj(out.transpose(0, 1).flatten(1))
        return merged

    def _lengths(self, x: Tensor, batch: Tensor | None) -> Tensor:
        if x.dim() != 2 or x.size(1) != self.embed_dim:
            raise ValueError(
                f"{self._name}: x must have shape (num_nodes, embed_dim) = (N, {self.embed_dim}), "
                f"got {tuple(x.shape)}. Put sequences one after another and say with batch which "
                "node belongs to which."
            )
        return lengths_of(self._name, x, batch)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state of exact attention has none of these: the layer keeps its own.
        for name in self._own:
            if getattr(self, name) is not None:
                state_dict.setdefault(prefix + name, getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


class GlobalAttention(_SelfAttention):
    r"""Exact self-attention of every node to all nodes of its graph.

    .. math:: O_i = \sum_j \frac{e^{\langle q_i, k_j \rangle / \sqrt{D}}}
        {\sum_{j'} e^{\langle q_i, k_{j'} \rangle / \sqrt{D}}} \, v_j

    in each head, over the nodes of the graph of :math:`i`, with the projections of
    ``torch.nn.MultiheadAttention``, whose ``state_dict`` it loads. It is
    :class:`GraphMultiheadAttention` on :func:`graphattn.patterns.complete`, at the cost of the sum
    of the squares of the graphs' sizes, and what the layers of linear cost are measured against.
    The edges are made in each call; where many layers share them, build that graph once. Source:
    "Attention Is All You Need" (https://arxiv.org/abs/1706.03762).

    Args:
        embed_dim: Size of node features.
        num_heads: Number of heads; divides ``embed_dim``.
        dropout: Probability of dropping attention weights in training.
        bias: Learn a bias in the projections.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``embed_dim`` is not divisible by ``num_heads``, or a number is out of range.

    >>> attention = GlobalAttention(16, num_heads=4)
    >>> attention(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(embed_dim, num_heads, bias)
        check_probability(self._name, dropout=dropout)
        backends.check_name(backend, function=self._name)
        self.dropout = dropout
        self.backend = backend
        self.reset_parameters()

    @classmethod
    def from_exact(cls, module: Exact, *, backend: str = "auto") -> GlobalAttention:
        """The layer with a copy of an exact layer's parameters, its dropout and its mode.

        Args:
            module: A :class:`GraphMultiheadAttention` or a ``torch.nn.MultiheadAttention``.
            backend: As in the constructor.

        Raises:
            ValueError: The module has what is not here: other sizes of key and value, edge
                features, rotary encodings, keys of its own.
        """
        bias = _has_bias(cls.__name__, module)
        attention = cls(module.embed_dim, module.num_heads, module.dropout, bias, backend=backend)
        return _copy_parameters(module, attention)

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """Attends.

        Args:
            x: ``[N, embed_dim]``, the nodes of all graphs one after another.
            batch: Sorted graph of each node, ``[N]`` int64; default one graph.

        Returns:
            ``[N, embed_dim]``.

        Raises:
            ValueError: ``x`` has another shape, or ``batch`` is not a sorted ``[N]``.
        """
        lengths = self._lengths(x, batch)
        graph = Graph(patterns.complete(lengths), x.size(0), validate=False)
        query, key, value = (part.transpose(0, 1) for part in self._project(x))
        dropout = self.dropout if self.training else 0.0
        out = graph_attention(query, key, value, graph, dropout=dropout, backend=self.backend)
        return self._merge(out.transpose(0, 1))


class PerformerAttention(_SelfAttention):
    r"""Self-attention with random features instead of the softmax's exponentials: FAVOR+.

    .. math:: e^{\langle q, k \rangle / \sqrt{D}} \approx \langle \phi(q), \phi(k) \rangle, \qquad
        \phi(x)_m = \frac{1}{\sqrt{M}} e^{\langle w_m, x' \rangle - |x'|^2 / 2}, \qquad
        x' = x / D^{1/4}

    with :math:`M` random :math:`w_m` for each head, normal, and orthogonal to each other in groups
    of :math:`D`. The features are positive and right on average, and :func:`linear_attention` of
    them costs :math:`O(N M D)`. Its error falls as :math:`M` grows, and grows with the length of
    queries and keys. Source: "Rethinking Attention with Performers"
    (https://arxiv.org/abs/2009.14794).

    Each feature is taken relative to its largest among the keys of the same graph, which cancels
    exactly; all of it in float32 at least, whatever the dtype of the parameters.

    Parameters are those of ``torch.nn.MultiheadAttention``, whose ``state_dict`` can be loaded. The
    random ``projection [H, M, D]`` is a buffer, saved with the parameters; a state without it
    leaves it as it is. In training it is drawn anew after every ``redraw_interval`` calls, so that
    the layer does not learn to fit one draw; in evaluation never. The calls counted so far are not
    saved. Where a call is made twice, as in activation checkpointing, turn that off and call
    :meth:`redraw` between steps. There are no attention weights that dropout could act on.

    Args:
        embed_dim: Size of node features.
        num_heads: Number of heads; divides ``embed_dim``.
        num_features: M, features of each head. Default ``D ln D`` rounded up, and 16 at least.
        bias: Learn a bias in the projections.
        causal: Each node attends to itself and to those before it in its graph. It is then also a
            recurrence, :meth:`step`.
        redraw_interval: Calls in training between two draws; ``None`` for never.

    Raises:
        ValueError: ``embed_dim`` is not divisible by ``num_heads``, or a number is out of range.

    >>> attention = PerformerAttention(16, num_heads=4)
    >>> attention(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
    torch.Size([5, 16])
    """

    projection: Tensor
    _own = ("projection",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_features: int | None = None,
        *,
        bias: bool = True,
        causal: bool = False,
        redraw_interval: int | None = 1000,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias)
        check_at_least(self._name, 1, num_features=num_features, redraw_interval=redraw_interval)
        if num_features is None:
            num_features = max(16, math.ceil(self.head_dim * math.log(self.head_dim)))
        self.num_features = num_features
        self.causal = causal
        self.redraw_interval = redraw_interval
        self._calls = 0  # in training, since the last draw
        self.register_buffer("projection", torch.empty(num_heads, num_features, self.head_dim))
        self.reset_parameters()

    @classmethod
    def from_exact(
        cls,
        module: Exact,
        *,
        num_features: int | None = None,
        causal: bool = False,
        redraw_interval: int | None = 1000,
    ) -> PerformerAttention:
        """The layer with a copy of an exact layer's parameters, and its mode.

        Args:
            module: A :class:`GlobalAttention`, a :class:`GraphMultiheadAttention` or a
                ``torch.nn.MultiheadAttention``.
            num_features: As the rest, as in the constructor.
            causal: As there.
            redraw_interval: As there.

        Raises:
            ValueError: As :meth:`GlobalAttention.from_exact`.
        """
        bias = _has_bias(cls.__name__, module)
        attention = cls(
            module.embed_dim,
            module.num_heads,
            num_features,
            bias=bias,
            causal=causal,
            redraw_interval=redraw_interval,
        )
        return _copy_parameters(module, attention)

    def reset_parameters(self) -> None:
        """Draws all parameters and the random projection anew."""
        super().reset_parameters()
        self.redraw()

    def redraw(self) -> None:
        """Draws the random projection anew."""
        heads, count, dim = self.projection.shape
        options: dict[str, Any] = {
            "device": self.projection.device,
            "dtype": torch.promote_types(self.projection.dtype, torch.float32),
        }
        # With the signs of the triangular part, all rotations are equally likely.
        q, r = torch.linalg.qr(torch.randn(heads, -(-count // dim), dim, dim, **options))
        rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).flatten(1, 2)[:, :count]
        norm = torch.randn(heads, count, dim, **options).norm(dim=-1, keepdim=True)
        # A tensor of its own: a backward pass that is still to come needs the old one.
        self.projection = (rows * norm).to(self.projection.dtype)
        self._calls = 0

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """Attends. Arguments, result and errors as in :meth:`GlobalAttention.forward`."""
        blocks = Blocks(self._lengths(x, batch), x.size(0))
        if self.training and self.redraw_interval is not None:
            if self._calls == self.redraw_interval:
                self.redraw()
            self._calls += 1
        query, key, value = self._project(x)
        attend = favor_causal if self.causal else favor
        with without_autocast(x):
            out = attend(*self._log_features(query, key), with_ones(wide(value)), blocks)
        return self._merge(out.to(value.dtype))

    def step(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        r"""One more token of each sequence: the causal layer as a recurrence.

        The state holds :math:`\sum_j \phi(k_j) [v_j, 1]^\top` over the tokens so far, relative to
        the largest value that each feature has had, and that value: as large after a thousand
        tokens as after one. The outputs are those of :meth:`forward` on the whole sequence.

        Args:
            x: ``[B, embed_dim]``, the next token of each of ``B`` sequences.
            state: What the last step returned; ``None`` at the start. Its tensors have the sequence
                first, so that ``[part[chosen] for part in state]`` chooses sequences.

        Returns:
            ``[B, embed_dim]`` and the new state, ``([B, H, M], [B, H, M, D + 1])``.

        Raises:
            ValueError: The layer is not causal, ``x`` has another shape, or ``state`` is that of
                another number of sequences.
        """
        if not self.causal:
            raise ValueError(
                f"{self._name}.step: a recurrence needs causal attention. Use "
                f"{self._name}(..., causal=True)."
            )
        self._lengths(x, None)
        query, key, value = self._project(x)
        with without_autocast(x):
            log_query, log_key = (part.transpose(0, 1) for part in self._log_features(query, key))
            new = with_ones(wide(value)).transpose(0, 1)
            if state is None:
                top, total = log_key.detach(), new.new_zeros(1)
            elif state[0].shape != log_key.shape:
                raise ValueError(
                    f"{self._name}.step: state must be that of {x.size(0)} sequences, "
                    f"{tuple(log_key.shape)}, got {tuple(state[0].shape)}."
                )
            else:
                top = log_key.detach().maximum(state[0])
                total = state[1] * (state[0] - top).exp().unsqueeze(-1)
            total = total + (log_key - top).exp().unsqueeze(-1) * new.unsqueeze(-2)
            out, _ = read(log_query.unsqueeze(-2), top, total)
            out = ratio(out).squeeze(-2).transpose(0, 1)
        return self._merge(out.to(value.dtype)), (top, total)

    def _log_features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the features ``[H, N, M]``, but for factors that cancel."""
        query, key = (wide(x) * self.head_dim**-0.25 for x in (query, key))
        towards = self.projection.to(query.dtype).mT
        return query @ towards, key @ towards - key.square().sum(-1, keepdim=True) / 2

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{super().extra_repr()}, num_features={self.num_features}, causal={self.causal}"


class LinformerAttention(_SelfAttention):
    r"""Self-attention to a fixed number of mixtures of the keys, learned by position.

    .. math:: O = \mathrm{softmax}\big(Q (E_{:, :n} K)^\top / \sqrt{D}\big) \, F_{:, :n} V

    in each head of a graph of :math:`n` nodes, with learned :math:`E, F` of ``projected_length``
    rows and ``max_length`` columns, of which a graph takes the first :math:`n`: nothing is padded,
    and any length up to ``max_length`` will do. The cost is :math:`O(N k D)` for
    ``projected_length`` :math:`k`. Each mixture holds keys of all positions, so there is no causal
    form. Source: "Linformer: Self-Attention with Linear Complexity"
    (https://arxiv.org/abs/2006.04768).

    Parameters beside ``key_projection`` and ``value_projection`` are those of
    ``torch.nn.MultiheadAttention``, whose ``state_dict`` can be loaded and leaves these two as they
    are: normal, with variance ``1 / projected_length``, before training.

    Args:
        embed_dim: Size of node features.
        num_heads: Number of heads; divides ``embed_dim``.
        max_length: Nodes of a graph at most.
        projected_length: k, number of mixtures.
        dropout: Probability of dropping attention weights in training.
        bias: Learn a bias in the projections to queries, keys, values and output.
        shared: Values are mixed as keys are, by ``key_projection``; there is no
            ``value_projection`` then.
        per_head: Each head has mixtures of its own.

    Raises:
        ValueError: ``embed_dim`` is not divisible by ``num_heads``, or a number is out of range.

    >>> attention = LinformerAttention(16, num_heads=4, max_length=100, projected_length=8)
    >>> attention(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
    torch.Size([5, 16])
    """

    value_projection: nn.Parameter | None
    _own = ("key_projection", "value_projection")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        *,
        projected_length: int = 128,
        dropout: float = 0.0,
        bias: bool = True,
        shared: bool = True,
        per_head: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias)
        check_at_least(self._name, 1, max_length=max_length, projected_length=projected_length)
        check_probability(self._name, dropout=dropout)
        self.max_length = max_length
        self.projected_length = projected_length
        self.dropout = dropout
        shape = (num_heads if per_head else 1, projected_length, max_length)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = None if shared else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @classmethod
    def from_exact(
        cls,
        module: Exact,
        max_length: int,
        *,
        projected_length: int = 128,
        shared: bool = True,
        per_head: bool = False,
    ) -> LinformerAttention:
        """The layer with a copy of an exact layer's parameters, its dropout and its mode.

        Args:
            module: A :class:`GlobalAttention`, a :class:`GraphMultiheadAttention` or a
                ``torch.nn.MultiheadAttention``.
            max_length: As the rest, as in the constructor.
            projected_length: As there.
            shared: As there.
            per_head: As there.

        Raises:
            ValueError: As :meth:`GlobalAttention.from_exact`.
        """
        bias = _has_bias(cls.__name__, module)
        attention = cls(
            module.embed_dim,
            module.num_heads,
            max_length,
            projected_length=projected_length,
            dropout=module.dropout,
            bias=bias,
            shared=shared,
            per_head=per_head,
        )
        return _copy_parameters(module, attention)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        super().reset_parameters()
        for projection in (self.key_projection, self.value_projection):
            if projection is not None:
                nn.init.normal_(projection, std=self.projected_length**-0.5)

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """Attends. Arguments, result and errors as in :meth:`GlobalAttention.forward`.

        Raises:
            ValueError: Also where a graph has more than ``max_length`` nodes.
        """
        lengths = self._lengths(x, batch)
        longest = int(lengths.max()) if lengths.numel() > 0 else 0
        if longest > self.max_length:
            raise ValueError(
                f"{self._name}: a graph has {longest} nodes, but the layer was built with "
                f"max_length={self.max_length}. Use {self._name}(..., max_length={longest})."
            )
        blocks = Blocks(lengths, x.size(0))
        query, key, value = self._project(x)
        with without_autocast(x):
            queries, keys, values = (blocks.pad(wide(part)) for part in (query, key, value))
            if self.value_projection is None:
                both = _mix(self.key_projection, torch.cat([keys, values], dim=-1), blocks)
                keys, values = both.chunk(2, dim=-1)
            else:
                keys = _mix(self.key_projection, keys, blocks)
                values = _mix(self.value_projection, values, blocks)
            dropout = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout)
        return self._merge(blocks.unpad(out).to(value.dtype))

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"{super().extra_repr()}, max_length={self.max_length}, "
            f"projected_length={self.projected_length}"
        )


class ReformerAttention(_SelfAttention):
    r"""Self-attention within the buckets of a hash that puts near queries and keys together.

    .. math:: h(x) = \arg\max \, [x R; -x R]

    with random directions :math:`R`, in each head. A graph of :math:`n` nodes has :math:`n` /
    ``bucket_size`` buckets, rounded up to an even number, and one where that is enough; more than
    128 take a second hash, whose value is the next digit of the bucket's number. Buckets become
    edges by :func:`graphattn.patterns.lsh_buckets`: a node attends, exactly, to those with which it
    shares a bucket in any of ``num_hashes`` rounds. Any length will do. Source: "Reformer: The
    Efficient Transformer" (https://arxiv.org/abs/2001.04451).

    The paper attends in each round apart, divides the weight of a pair by the number of rounds in
    which it meets, and adds the rounds up in proportion to their sums of exponentials. That is
    attention to the union, which is computed here at once: a pair counts once, however often it
    meets. With a single bucket it is exact attention.

    Parameters are those of ``torch.nn.MultiheadAttention``, whose ``state_dict`` can be loaded, but
    with ``shared_qk``, as in the paper, one projection makes queries and keys:
    ``in_proj_weight [2 E, E]``. The score of a pair is then :math:`\langle q_i, q_j / |q_j|
    \rangle`, and a node attends to itself only where there is nobody else. A state with three
    projections can be loaded where those of query and key are equal. Without ``shared_qk`` a node
    always attends to itself, so that nobody is left with nothing.

    The random ``rotations`` are a buffer, saved with the parameters; a state without it leaves it
    as it is. Hashing is not continuous: where two components are equal to rounding, rounding
    decides who attends to whom.

    Args:
        embed_dim: Size of node features.
        num_heads: Number of heads; divides ``embed_dim``.
        num_hashes: Rounds of hashing. The error falls, and the cost grows, with each.
        bucket_size: Nodes in a bucket, on average.
        dropout: Probability of dropping attention weights in training.
        bias: Learn a bias in the projections.
        shared_qk: Queries and keys are made by one projection, as in the paper.
        causal: Each node attends to itself and to those before it in its graph.
        chunk: Bounds the cost where buckets are uneven, as in
            :func:`graphattn.patterns.lsh_buckets`; the paper has ``bucket_size``. Default no bound.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: ``embed_dim`` is not divisible by ``num_heads``, or a number is out of range.

    >>> attention = ReformerAttention(16, num_heads=4, bucket_size=2)
    >>> attention(torch.randn(5, 16), torch.tensor([0, 0, 0, 1, 1])).shape
    torch.Size([5, 16])
    """

    rotations: Tensor
    _own = ("rotations",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_hashes: int = 4,
        bucket_size: int = 64,
        dropout: float = 0.0,
        bias: bool = True,
        shared_qk: bool = True,
        causal: bool = False,
        chunk: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(embed_dim, num_heads, bias, projections=2 if shared_qk else 3)
        check_at_least(self._name, 1, num_hashes=num_hashes, bucket_size=bucket_size, chunk=chunk)
        check_probability(self._name, dropout=dropout)
        backends.check_name(backend, function=self._name)
        self.num_hashes = num_hashes
        self.bucket_size = bucket_size
        self.dropout = dropout
        self.shared_qk = shared_qk
        self.causal = causal
        self.chunk = chunk
        self.backend = backend
        shape = (num_hashes, _DIGITS, self.head_dim, _ROTATIONS)
        self.register_buffer("rotations", torch.empty(shape))
        self.reset_parameters()

    @classmethod
    def from_exact(
        cls,
        module: Exact,
        *,
        num_hashes: int = 4,
        bucket_size: int = 64,
        shared_qk: bool = False,
        causal: bool = False,
        chunk: int | None = None,
        backend: str = "auto",
    ) -> ReformerAttention:
        """The layer with a copy of an exact layer's parameters, its dropout and its mode.

        Args:
            module: A :class:`GlobalAttention`, a :class:`GraphMultiheadAttention` or a
                ``torch.nn.MultiheadAttention``.
            num_hashes: As the rest, as in the constructor.
            bucket_size: As there.
            shared_qk: As there, but not the default, since few layers have equal projections.
            causal: As there.
            chunk: As there.
            backend: As there.

        Raises:
            ValueError: As :meth:`GlobalAttention.from_exact`; with ``shared_qk``, the projections
                of query and key differ.
        """
        bias = _has_bias(cls.__name__, module)
        attention = cls(
            module.embed_dim,
            module.num_heads,
            num_hashes=num_hashes,
            bucket_size=bucket_size,
            dropout=module.dropout,
            bias=bias,
            shared_qk=shared_qk,
            causal=causal,
            chunk=chunk,
            backend=backend,
        )
        return _copy_parameters(module, attention)

    def reset_parameters(self) -> None:
        """Draws all parameters and the random rotations anew."""
        super().reset_parameters()
        # Directions of one length: a longer one would fill its buckets more than others.
        self.rotations = F.normalize(torch.randn_like(self.rotations), dim=-2)

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        """Attends. Arguments, result and errors as in :meth:`GlobalAttention.forward`."""
        lengths = self._lengths(x, batch)
        *parts, value = self._project(x)
        # Heads differ in their buckets, so each head of each graph is a graph of its own.
        lengths = lengths.repeat(self.num_heads)
        query, *keys, value = (part.flatten(0, 1) for part in (*parts, value))
        graph = self._graph(lengths, query.detach(), *(key.detach() for key in keys))
        key = keys[0] if keys else _normalised(query)
        out = graph_attention(
            query.unsqueeze(1),
            key.unsqueeze(1),
            value.unsqueeze(1),
            graph,
            dropout=self.dropout if self.training else 0.0,
            scale=1.0 if self.shared_qk else None,
            backend=self.backend,
        )
        return self._merge(out.view(self.num_heads, -1, self.head_dim))

    def _graph(self, lengths: Tensor, *hashed: Tensor) -> Graph:
        """Who attends to whom, by the hashes of queries, or of queries and keys, ``[N, D]``."""
        batch = patterns.batch_vector(lengths)
        with without_autocast(batch):
            buckets = [self._buckets(wide(x), lengths, batch) for x in hashed]
        if not self.shared_qk:
            # One more round, in which everyone is alone.
            alone = patterns.position(lengths).unsqueeze(0)
            buckets = [torch.cat([bucket, alone]) for bucket in buckets]
        edge_index = patterns.lsh_buckets(
            buckets[0],
            key_bucket=None if self.shared_qk else buckets[1],
            batch=batch,
            chunk=self.chunk,
            causal=self.causal,
        )
        if self.shared_qk:
            src, dst = edge_index
            lonely = dst.bincount(minlength=batch.numel()) == 1
            edge_index = edge_index[:, (src != dst) | lonely[dst]]
        return Graph(edge_index, batch.numel(), validate=False)

    def _buckets(self, x: Tensor, lengths: Tensor, batch: Tensor) -> Tensor:
        """The bucket of each row ``[N, D]`` in each round, ``[num_hashes, N]``."""
        bucket = torch.zeros(self.num_hashes, x.size(0), dtype=torch.int64, device=x.device)
        # Each hash gives a digit; a graph takes as many of them as it needs.
        left = (lengths + self.bucket_size - 1) // self.bucket_size
        for digit in range(_DIGITS):
            half = ((left + 1) // 2).where(left > 1, 0).clamp(max=_ROTATIONS)
            if not half.any():
                break
            base = (2 * half).clamp(min=1)
            left = (left + base - 1) // base
            half = half[batch]
            unused = (torch.arange(_ROTATIONS, device=x.device) >= half.unsqueeze(1)).repeat(1, 2)
            for of_round, rotation in zip(bucket, self.rotations[:, digit], strict=True):
                turned = x @ rotation.to(x.dtype)  # the length of x will not matter
                both = torch.cat([turned, -turned], dim=1).masked_fill(unused, -math.inf)
                of_round.mul_(2 * _ROTATIONS).add_(both.argmax(dim=1).where(half > 0, 0))
        return bucket

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("in_proj_weight", "in_proj_bias") if self.shared_qk else ():
            packed = state_dict.get(prefix + name)
            if packed is None or packed.size(0) != 3 * self.embed_dim:
                continue
            query, key, value = packed.chunk(3)
            if not torch.equal(query, key):
                raise ValueError(
                    f"{self._name}: {prefix}{name} has projections of query and key that differ, "
                    "but the layer has one for both. Use shared_qk=False."
                )
            state_dict[prefix + name] = torch.cat([query, value])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"{super().extra_repr()}, num_hashes={self.num_hashes}, "
            f"bucket_size={self.bucket_size}, shared_qk={self.shared_qk}, causal={self.causal}"
        )


Exact = GlobalAttention | GraphMultiheadAttention | nn.MultiheadAttention
"""The layers whose parameters the others can take over."""

_T = TypeVar("_T", bound=_SelfAttention)


def _mix(projection: Tensor, x: Tensor, blocks: Blocks) -> Tensor:
    """A graph's rows mixed by position, for each block: ``[H, blocks, c, D]`` to ``[.., k, D]``."""
    columns = projection.to(x.dtype).index_select(2, blocks.position).mT
    # What is the same for all heads is not repeated for each.
    return blocks.sum_of_graph(torch.einsum("hbck,hbcd->hbkd", blocks.pad(columns), x))


def _normalised(query: Tensor) -> Tensor:
    """Of length one, but for zeros, which stay."""
    norm = wide(query).norm(dim=-1, keepdim=True)
    return (query / norm.where(norm > 0, 1.0)).to(query.dtype)


# Arguments ########################################################################################


def _has_bias(name: str, module: Exact) -> bool:
    """Whether an exact layer has biases, once it is known to have nothing that would be lost."""
    if not isinstance(module, (GlobalAttention, GraphMultiheadAttention, nn.MultiheadAttention)):
        raise TypeError(
            f"{name}.from_exact: module must be a GlobalAttention, a GraphMultiheadAttention or a "
            f"torch.nn.MultiheadAttention, got {type(module).__name__}."
        )
    lost = {
        "kdim or vdim": module.in_proj_weight is None,
        "edge_dim": getattr(module, "edge_dim", None) is not None,
        "rotary": getattr(module, "rotary", None) is not None,
        "add_bias_kv": getattr(module, "bias_k", None) is not None,
        "add_zero_attn": getattr(module, "add_zero_attn", False),
    }
    found = [option for option, there in lost.items() if there]
    if found:
        raise ValueError(
            f"{name}.from_exact: the module was built with {' and '.join(found)}, which "
            "self-attention to all nodes of a graph does not have. Use a module without."
        )
    return module.in_proj_bias is not None


def _copy_parameters(module: Exact, attention: _T) -> _T:
    weight = module.out_proj.weight
    attention.to(weight.device, weight.dtype).load_state_dict(module.state_dict())
    return attention.train(module.training)
