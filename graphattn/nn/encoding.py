"""Where a node stands: positional encodings, which attention by itself does not have.

They come into a layer in one of three ways:

- Added to the features, ``x = x + encoding(position)``, before the first layer:
  :class:`SinusoidalEncoding`, :class:`LearnedEncoding`, :class:`LaplacianEncoding`.
- Added to the scores, ``layer(x, graph, bias=encoding(graph, position))``, or ``bias=`` of
  :func:`graphattn.graph_attention`; one bias may serve all layers: :class:`RelativeBias`,
  :class:`ShortestPathBias`, :class:`AlibiBias`.
- Rotating query and key (not the value) in every layer: :class:`RotaryEncoding`, which layers take
  as ``rotary``, or before :func:`graphattn.graph_attention`.

Positions are those of nodes that lie side by side, ``[N]``, or ``[N, k]`` where there are several
axes (row and column of a pixel): :func:`graphattn.patterns.position` and
:func:`graphattn.patterns.grid_position` give them. Encodings of structure read what
:mod:`graphattn.transforms` computes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn._checks import check_at_least
from graphattn.graph import Graph

__all__ = [
    "AlibiBias",
    "LaplacianEncoding",
    "LearnedEncoding",
    "RelativeBias",
    "RotaryEncoding",
    "ShortestPathBias",
    "SinusoidalEncoding",
]

_STD = 0.02  # of what is learned from scratch, as in BERT, ViT and Swin


# Added to the features ############################################################################


class SinusoidalEncoding(nn.Module):
    r"""Sines and cosines of the position at wavelengths from :math:`2\pi` to ``2 pi base``.

    .. math:: \mathrm{PE}(p, 2i) = \sin(p / \mathrm{base}^{2i/d}), \qquad
        \mathrm{PE}(p, 2i + 1) = \cos(p / \mathrm{base}^{2i/d})

    with :math:`d` channels; an odd :math:`d` ends with a sine. There is neither a parameter nor a
    table, so every position has an encoding: any length, negative and fractional numbers. Source:
    "Attention Is All You Need" (https://arxiv.org/abs/1706.03762), section 3.5.

    Args:
        channels: Number of channels.
        base: Ratio of the longest to the shortest wavelength.

    Raises:
        ValueError: ``channels`` is below 1, or ``base`` not positive.

    >>> encoding = SinusoidalEncoding(4)
    >>> encoding(torch.tensor([0, 1]))
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(self, channels: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_at_least("SinusoidalEncoding", 1, channels=channels)
        _check_base("SinusoidalEncoding", base)
        self.channels = channels
        self.base = base

    def forward(self, position: Tensor) -> Tensor:
        """Encodes.

        Args:
            position: ``[N]`` or a single number; or ``[N, k]`` for ``k`` axes. Each axis then has
                its own block of ``channels // k`` channels, in the order of the axes, and the first
                ``channels % k`` axes one channel more.

        Returns:
            ``[N, channels]`` (``[channels]`` for a single number) in the dtype of a floating point
            ``position``, else in the default dtype, in float32 at least. For features in half
            precision use ``x + encoding(position).to(x.dtype)``.

        Raises:
            TypeError: ``position`` is not a tensor of real numbers.
            ValueError: It has more than two dimensions, or there are more axes than channels.
        """
        _check_numbers("SinusoidalEncoding", position)
        if position.dim() > 2:
            raise ValueError(
                "SinusoidalEncoding: position must have shape (N,), or (N, k) for k axes, got "
                f"{tuple(position.shape)}. Put the sequences of a batch side by side."
            )
        axes = position.unbind(1) if position.dim() == 2 else (position,)
        if not 1 <= len(axes) <= self.channels:
            raise ValueError(
                f"SinusoidalEncoding: {self.channels} channels can be shared by 1 to "
                f"{self.channels} axes, got position of shape {tuple(position.shape)}."
            )
        fewest, more = divmod(self.channels, len(axes))
        blocks = [self._block(along, fewest + (i < more)) for i, along in enumerate(axes)]
        return torch.cat(blocks, dim=-1)

    def _block(self, position: Tensor, channels: int) -> Tensor:
        angle = _angles(position, channels, self.base)
        pairs = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
        return pairs[..., :channels].to(_encoding_dtype(position))

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.channels}, base={self.base:g}"


class LearnedEncoding(nn.Module):
    r"""A learned vector for each position; with several axes, the sum of one for each of them.

    .. math:: \mathrm{PE}(p) = \sum_{a} E^{(a)}_{p_a}

    As in BERT (https://arxiv.org/abs/1810.04805) and the Vision Transformer
    (https://arxiv.org/abs/2010.11929).

    Args:
        num_positions: Number of positions, or one number for each axis.
        channels: Number of channels.

    Attributes:
        weight: ``[sum(num_positions), channels]``, the tables of the axes one below the other; with
            a single axis, the ``weight`` of a ``torch.nn.Embedding``.

    Raises:
        ValueError: A number is below 1.

    >>> encoding = LearnedEncoding((2, 3), channels=8)
    >>> encoding(torch.tensor([[0, 0], [1, 2]])).shape
    torch.Size([2, 8])
    """

    def __init__(self, num_positions: int | tuple[int, ...], channels: int) -> None:
        super().__init__()
        check_at_least("LearnedEncoding", 1, num_positions=num_positions, channels=channels)
        self.num_positions = num_positions
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(sum(_as_tuple(num_positions)), channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the tables anew."""
        nn.init.trunc_normal_(self.weight, std=_STD)

    def forward(self, position: Tensor) -> Tensor:
        """Looks up.

        Args:
            position: ``[*]`` integers from 0; ``[*, k]`` if the layer was built for ``k`` axes.

        Returns:
            ``[*, channels]``.

        Raises:
            TypeError: ``position`` is not a tensor of integers.
            ValueError: Its last dimension is not the number of axes.
            IndexError: A position is negative, or beyond the table. Not checked while compiling.
        """
        _check_integers("LearnedEncoding", "position", position)
        sizes = _as_tuple(self.num_positions)
        if isinstance(self.num_positions, int):
            position = position.unsqueeze(-1)
        elif position.dim() == 0 or position.size(-1) != len(sizes):
            raise ValueError(
                f"LearnedEncoding: position must have shape (*, {len(sizes)}), one column for each "
                f"axis of num_positions={self.num_positions}, got {tuple(position.shape)}."
            )
        if position.numel() > 0 and not torch.compiler.is_compiling():
            for axis, size in enumerate(sizes):
                smallest, largest = (int(bound) for bound in position[..., axis].aminmax())
                if smallest < 0 or largest >= size:
                    raise IndexError(
                        f"LearnedEncoding: the table of axis {axis} has positions 0 to {size - 1}, "
                        f"got {smallest} to {largest}. Build it with more positions, or use "
                        "SinusoidalEncoding, which has no last one."
                    )
        start, rows = 0, []
        for axis, size in enumerate(sizes):
            rows.append(F.embedding(position[..., axis].long() + start, self.weight))
            start += size
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.num_positions}, {self.channels}"


class LaplacianEncoding(nn.Module):
    r"""A linear map of Laplacian eigenvectors, whose signs are drawn anew in training.

    .. math:: \mathrm{PE}_v = W \, (s_1 u_{1, v}, \dots, s_k u_{k, v})

    An eigenvector times -1 is as good as itself. So that nothing is learned from the sign that
    happens to come, each eigenvector of each graph is multiplied by a random :math:`s \in \{-1,
    1\}` in each call in training, and by 1 in evaluation. There is no bias in the map: what is not
    there encodes to zero. Sources: "A Generalization of Transformer Networks to Graphs"
    (https://arxiv.org/abs/2012.09699), "Benchmarking Graph Neural Networks"
    (https://arxiv.org/abs/2003.00982).

    Args:
        k: Number of eigenvectors, as in
            :class:`~graphattn.transforms.AddLaplacianEigenvectors`.
        channels: Number of channels.

    Raises:
        ValueError: ``k`` or ``channels`` is below 1.

    >>> encoding = LaplacianEncoding(k=2, channels=8)
    >>> encoding(torch.randn(3, 2)).shape
    torch.Size([3, 8])
    """

    def __init__(self, k: int, channels: int) -> None:
        super().__init__()
        check_at_least("LaplacianEncoding", 1, k=k, channels=channels)
        self.k = k
        self.channels = channels
        self.lin = nn.Linear(k, channels, bias=False)

    def reset_parameters(self) -> None:
        """Draws the map anew."""
        self.lin.reset_parameters()

    def forward(
        self,
        eigenvectors: Tensor,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        batch_size: int | None = None,
    ) -> Tensor:
        """Encodes.

        Args:
            eigenvectors: ``[N, k]``.
            mask: ``[N, k]`` bool, False for entries that are padding; default: none is.
            batch: ``[N]`` int64, the graph that each node belongs to (or its connected component);
                default: one graph.
            batch_size: Number of graphs. Default ``batch.max() + 1``.

        Returns:
            ``[N, channels]``.

        Raises:
            TypeError: ``mask`` is not bool.
            ValueError: A shape is another.
        """
        if eigenvectors.dim() != 2 or eigenvectors.size(1) != self.k:
            raise ValueError(
                f"LaplacianEncoding: eigenvectors must have shape (N, k={self.k}), got "
                f"{tuple(eigenvectors.shape)}."
            )
        if batch is not None and batch.shape != eigenvectors.shape[:1]:
            raise ValueError(
                f"LaplacianEncoding: batch must have shape ({eigenvectors.size(0)},), got "
                f"{tuple(batch.shape)}."
            )
        x = eigenvectors.to(self.lin.weight.dtype)
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(
                    f"LaplacianEncoding: mask must be bool, got {mask.dtype}. Use mask.bool()."
                )
            if mask.shape != x.shape:
                raise ValueError(
                    f"LaplacianEncoding: mask must have the shape of eigenvectors {tuple(x.shape)}"
                    f", got {tuple(mask.shape)}."
                )
            x = torch.where(mask, x, 0.0)
        if self.training:
            if batch_size is None:
                batch_size = 1 if batch is None else int(batch.max()) + 1 if batch.numel() else 0
            sign = 2 * torch.randint(2, (batch_size, self.k), device=x.device).to(x.dtype) - 1
            x = x * (sign if batch is None else sign[batch])
        return self.lin(x)


# Added to the scores ##############################################################################


class RelativeBias(nn.Module):
    r"""A learned bias for each head and each relative position of key and query.

    .. math:: b_e = B_{\mathrm{clip}(p_j - p_i, -m, m)}, \qquad e = (j \to i)

    Offsets beyond ``max_distance`` share the bias of the largest. With several axes there is a
    bias for each combination of offsets, and each axis is clipped by itself. Sources: "Self-
    Attention with Relative Position Representations" (https://arxiv.org/abs/1803.02155), whose
    clipping it is; as a bias of the scores, T5 (https://arxiv.org/abs/1910.10683) and, on two axes,
    Swin (https://arxiv.org/abs/2103.14030).

    Args:
        num_heads: Number of heads.
        max_distance: Largest offset with a bias of its own, or one for each axis.

    Attributes:
        weight: ``[(2 max_distance + 1), num_heads]``; with several axes the product of their
            numbers of offsets, the last axis running fastest. Offsets go from ``-max_distance``,
            the key before the query, to ``max_distance``.

    Raises:
        ValueError: ``num_heads`` is below 1, or a ``max_distance`` negative.

    >>> bias = RelativeBias(num_heads=2, max_distance=4)
    >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    >>> bias(edge_index, torch.arange(3)).shape
    torch.Size([3, 2])
    """

    def __init__(self, num_heads: int, max_distance: int | tuple[int, ...]) -> None:
        super().__init__()
        check_at_least("RelativeBias", 1, num_heads=num_heads)
        check_at_least("RelativeBias", 0, max_distance=max_distance)
        self.num_heads = num_heads
        self.max_distance = max_distance
        offsets = math.prod(2 * distance + 1 for distance in _as_tuple(max_distance))
        self.weight = nn.Parameter(torch.empty(offsets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the biases anew."""
        nn.init.trunc_normal_(self.weight, std=_STD)

    def forward(self, graph: Graph | Tensor, position: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Looks up.

        Args:
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            position: ``[N]`` integers, ``[N, k]`` if the layer was built for ``k`` axes; or a pair
                ``(of sources, of targets)`` for cross attention.

        Returns:
            ``[E, num_heads]`` in the order of the caller's edges.

        Raises:
            TypeError: ``position`` is not a tensor of integers, nor a pair of such.
            ValueError: It does not have one row for each node, or one column for each axis.
            IndexError: An edge leads to a node that has no position.
        """
        limits = _as_tuple(self.max_distance)
        columns = () if isinstance(self.max_distance, int) else (len(limits),)
        shape = f"(N, {len(limits)})" if columns else "(N,)"
        sides = _pair("RelativeBias", position)
        for side in sides:
            _check_integers("RelativeBias", "position", side)
            if side.dim() != 1 + len(columns) or side.shape[1:] != columns:
                raise ValueError(
                    f"RelativeBias: max_distance={self.max_distance} needs position of shape "
                    f"{shape}, got {tuple(side.shape)}."
                )
        offset = _offset(graph, sides).view(-1, len(limits))
        index = torch.zeros_like(offset[:, 0])
        for axis, limit in enumerate(limits):
            clipped = offset[:, axis].clamp(-limit, limit)
            index = index * (2 * limit + 1) + clipped + limit
        return F.embedding(index, self.weight)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.num_heads}, max_distance={self.max_distance}"


class ShortestPathBias(nn.Module):
    r"""A learned bias for each head and each shortest-path distance of key and query.

    .. math:: b_e = B_{d(j, i)}, \qquad e = (j \to i)

    Distances beyond ``max_distance`` share a bias, and pairs that no path joins have one too.
    Source: Graphormer's spatial encoding (https://arxiv.org/abs/2106.05234).

    Args:
        num_heads: Number of heads.
        max_distance: Largest distance with a bias of its own.

    Attributes:
        weight: ``[max_distance + 3, num_heads]``: distances 0 to ``max_distance``, larger ones,
            unreachable.

    Raises:
        ValueError: ``num_heads`` is below 1, or ``max_distance`` negative.

    >>> bias = ShortestPathBias(num_heads=2, max_distance=4)
    >>> bias(torch.tensor([0, 1, 9, -1])).shape
    torch.Size([4, 2])
    """

    def __init__(self, num_heads: int, max_distance: int) -> None:
        super().__init__()
        check_at_least("ShortestPathBias", 1, num_heads=num_heads)
        check_at_least("ShortestPathBias", 0, max_distance=max_distance)
        self.num_heads = num_heads
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(max_distance + 3, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the biases anew."""
        nn.init.trunc_normal_(self.weight, std=_STD)

    def forward(self, distance: Tensor) -> Tensor:
        """Looks up.

        Args:
            distance: ``[E]`` integers, the distance of each edge's ends; -1 (any negative number)
                where there is no path. :class:`~graphattn.transforms.AddAttentionEdges` stores it.

        Returns:
            ``[E, num_heads]``.

        Raises:
            TypeError: ``distance`` is not a tensor of integers.
        """
        _check_integers("ShortestPathBias", "distance", distance)
        index = distance.long().clamp(max=self.max_distance + 1)
        return F.embedding(index.where(index >= 0, self.max_distance + 2), self.weight)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.num_heads}, max_distance={self.max_distance}"


class AlibiBias(nn.Module):
    r"""Attention with linear biases: the further away a key, the lower its score.

    .. math:: b_e = -m_h \, |p_j - p_i|, \qquad m_h = 2^{-8h/H}, \quad h = 1, \dots, H, \quad
        e = (j \to i)

    If :math:`H` is not a power of two, the slopes are those of the largest power of two below it,
    followed by every other one of twice as many heads, from the first on, as in the paper's
    program. Nothing is learned. Source: "Train Short, Test Long"
    (https://arxiv.org/abs/2108.12409).

    Args:
        num_heads: Number of heads.

    Raises:
        ValueError: ``num_heads`` is below 1.

    >>> bias = AlibiBias(num_heads=2)
    >>> bias(torch.tensor([[0, 0], [1, 2]]), torch.arange(3))
    tensor([[-0.0625, -0.0039],
            [-0.1250, -0.0078]])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_at_least("AlibiBias", 1, num_heads=num_heads)
        self.num_heads = num_heads

    def forward(self, graph: Graph | Tensor, position: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Computes.

        Args:
            graph: :class:`~graphattn.Graph` or ``edge_index [2, E]``.
            position: ``[N]``, or a pair ``(of sources, of targets)`` for cross attention.

        Returns:
            ``[E, num_heads]`` in the order of the caller's edges, in the dtype of a floating point
            ``position``, else in the default dtype, in float32 at least.

        Raises:
            TypeError: ``position`` is not a tensor of real numbers, nor a pair of such.
            ValueError: It is not one number for each node.
            IndexError: An edge leads to a node that has no position.
        """
        sides = _pair("AlibiBias", position)
        for side in sides:
            _check_numbers("AlibiBias", side)
            if side.dim() != 1:
                raise ValueError(
                    f"AlibiBias: position must have shape (N,), got {tuple(side.shape)}."
                )
        distance = _offset(graph, sides).abs()
        distance = distance.to(_encoding_dtype(distance)).unsqueeze(1)
        # Made where they are needed: a buffer would be rounded by module.half().
        power = 2 ** (self.num_heads.bit_length() - 1)
        head = torch.arange(1, power + 1, dtype=distance.dtype, device=distance.device)
        between = head[: self.num_heads - power] - 0.5
        slope = torch.exp2(torch.cat([head, between]) * (-8.0 / power))
        return -slope * distance

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return str(self.num_heads)


# Rotating query and key ###########################################################################


class RotaryEncoding(nn.Module):
    r"""Rotates query and key by their positions, so that scores depend on the difference.

    .. math:: \begin{pmatrix} x'_{2i} \\ x'_{2i+1} \end{pmatrix} =
        \begin{pmatrix} \cos p\theta_i & -\sin p\theta_i \\ \sin p\theta_i & \cos p\theta_i
        \end{pmatrix} \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}, \qquad
        \theta_i = \mathrm{base}^{-2i/D}

    so that :math:`\langle R_p q, R_{p'} k \rangle = \langle q, R_{p' - p} k \rangle`. Neighbouring
    channels are a pair, as in the paper; programs that pair channel ``i`` with ``i + D / 2`` have
    the same channels in another order. Nothing is learned. Source: "RoFormer"
    (https://arxiv.org/abs/2104.09864).

    Args:
        head_dim: Number of channels of a head, even.
        base: Ratio of the longest to the shortest wavelength.

    Raises:
        ValueError: ``head_dim`` is odd or below 1, or ``base`` not positive.

    >>> from graphattn import graph_attention
    >>> rotary = RotaryEncoding(head_dim=8)
    >>> query = key = value = torch.randn(3, 2, 8)
    >>> position, edge_index = torch.arange(3), torch.tensor([[0, 1], [2, 2]])
    >>> graph_attention(rotary(query, position), rotary(key, position), value, edge_index).shape
    torch.Size([3, 2, 8])
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_at_least("RotaryEncoding", 1, head_dim=head_dim)
        if head_dim % 2 != 0:
            raise ValueError(
                f"RotaryEncoding: head_dim must be even, because channels are rotated in pairs, "
                f"got {head_dim}."
            )
        _check_base("RotaryEncoding", base)
        self.head_dim = head_dim
        self.base = base

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotates.

        Args:
            x: Query or key, ``[*, N, H, head_dim]``.
            position: ``[N]``.

        Returns:
            ``[*, N, H, head_dim]`` in the dtype of ``x``, computed in float32 at least.

        Raises:
            TypeError: ``x`` is not floating point, or ``position`` not a tensor of real numbers.
            ValueError: ``x`` has another ``head_dim``, or ``position`` is not one number for each
                of its nodes.
        """
        _check_numbers("RotaryEncoding", position)
        if not x.is_floating_point():
            raise TypeError(f"RotaryEncoding: x must be floating point, got {x.dtype}.")
        if x.dim() < 3 or x.size(-1) != self.head_dim:
            raise ValueError(
                f"RotaryEncoding: x must have shape (*, N, heads, head_dim={self.head_dim}), got "
                f"{tuple(x.shape)}."
            )
        if position.shape != x.shape[-3:-2]:
            raise ValueError(
                f"RotaryEncoding: position must have shape ({x.size(-3)},), one number for each "
                f"node of x {tuple(x.shape)}, got {tuple(position.shape)}."
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        angle = _angles(position, self.head_dim, self.base).unsqueeze(1)  # [N, 1, D / 2]
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return rotated.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return f"{self.head_dim}, base={self.base:g}"


# Parts ############################################################################################


def _angles(position: Tensor, channels: int, base: float) -> Tensor:
    """``position / base ** (2 i / channels)`` for each pair of channels, ``[*, channels / 2]``.

    In float64 where the device has it: at position 100,000 an angle in float32 is off by 0.004.
    """
    wide = torch.float32 if position.device.type == "mps" else torch.float64
    even = torch.arange(0, channels, 2, dtype=wide, device=position.device)
    return position.to(wide).unsqueeze(-1) * base ** (-even / channels)


def _encoding_dtype(position: Tensor) -> torch.dtype:
    own = position.dtype if position.is_floating_point() else torch.get_default_dtype()
    return torch.promote_types(own, torch.float32)


def _pair(name: str, position: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    pair = (position, position) if isinstance(position, Tensor) else position
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{name}: position must be a tensor or a pair (of sources, of targets), got "
            f"{type(position).__name__}."
        )
    return pair[0], pair[1]


def _offset(graph: Graph | Tensor, position: tuple[Tensor, Tensor]) -> Tensor:
    """Position of the source minus that of the target, of each edge in the caller's order."""
    of_source, of_target = (
        side.to(_encoding_dtype(side) if side.is_floating_point() else torch.int64)
        for side in position
    )
    graph = Graph.of(graph, (of_source.size(0), of_target.size(0)))
    src, dst = graph.edge_index
    return of_source[src] - of_target[dst]


def _as_tuple(number: int | tuple[int, ...]) -> tuple[int, ...]:
    return (number,) if isinstance(number, int) else tuple(number)


def _check_base(name: str, base: float) -> None:
    if not base > 0.0:
        raise ValueError(f"{name}: base must be positive, got {base}.")


def _check_numbers(name: str, position: Tensor) -> None:
    if (
        not isinstance(position, Tensor)
        or position.dtype == torch.bool
        or position.dtype.is_complex
    ):
        what = position.dtype if isinstance(position, Tensor) else type(position).__name__
        raise TypeError(f"{name}: position must be a tensor of real numbers, got {what}.")


def _check_integers(name: str, argument: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: {argument} must be a tensor of integers, got {type(tensor).__name__}."
        )
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(
            f"{name}: {argument} must be a tensor of integers, got {tensor.dtype}. Use "
            f"{argument}.long() if its values are whole numbers."
        )
