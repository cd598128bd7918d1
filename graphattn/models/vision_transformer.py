"""The Vision Transformer: an image is a set of patches, and a graph says which see which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from graphattn import patterns
from graphattn._checks import check_at_least, check_choice
from graphattn.graph import Graph
from graphattn.nn.block import GraphTransformerLayer
from graphattn.nn.encoding import LearnedEncoding, RelativeBias, SinusoidalEncoding

__all__ = ["VisionTransformer"]

_POOLS = ("class", "mean")
_POSITIONS = ("learned", "sinusoidal", "relative", None)
_GRAPHS_KEPT = 8


class VisionTransformer(nn.Module):
    r"""A Transformer that classifies images, their patches or single pixels being the nodes.

    .. math:: h^{(0)}_i = E x_i + P_i, \qquad h^{(l)} = \mathrm{layer}_l(h^{(l-1)}, \text{edges}),
        \qquad y = W \, \mathrm{LN}(h^{(L)}_{\mathrm{class}})

    with :math:`x_i` the pixels of patch :math:`i`, pre-norm layers, and a class token that attends
    to all patches and itself and is attended by all, whatever the patches see of one another.
    Source: "An Image is Worth 16x16 Words" (https://arxiv.org/abs/2010.11929).

    All images of a batch share one graph, which is made once for each image size.

    Args:
        image_size: Pixels along each axis, or ``(height, width)``, of the images that positions are
            learned for. Others can be given where ``position`` allows it.
        patch_size: Pixels along each axis of a patch; 1 makes every pixel a node.
        in_channels: Channels of an image.
        hidden_channels: Width of the layers; a multiple of ``heads``.
        out_channels: Number of outputs.
        num_layers: Number of layers.
        heads: Number of attention heads.
        feedforward: Width of the feed-forward networks. Default ``4 * hidden_channels``.
        pattern: Which patches see which: ``pattern(rows, columns)`` returns the ``edge_index`` of
            an image of ``rows`` times ``columns`` patches, numbered row by row, such as
            ``functools.partial(graphattn.patterns.grid, window=5)``. Default: all see all.
        pool: What is classified: ``"class"``, the class token, or ``"mean"``, the mean of the
            patches, without a class token.
        position: How patches know where they are. ``"learned"``: an embedding of each place, for
            images no larger than ``image_size``. ``"sinusoidal"``: the same, not learned, of any
            size. ``"relative"``: a learned bias of each head for each offset, shared by all layers;
            offsets that ``image_size`` does not have take that of the nearest. ``None``: they do
            not.
        activation: As in :class:`~graphattn.nn.GraphTransformerLayer`.
        dropout: Probability of dropping features, in training.
        attention_dropout: Probability of dropping attention weights, in training.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: A number is out of range, a name is unknown, or ``image_size`` is no multiple of
            ``patch_size``.

    >>> model = VisionTransformer(8, 2, in_channels=3, hidden_channels=16, out_channels=10)
    >>> model(torch.randn(5, 3, 8, 8)).shape
    torch.Size([5, 10])

    Pixels that see the 3 x 3 pixels around them:

    >>> from functools import partial
    >>> window = partial(patterns.grid, window=3)
    >>> model = VisionTransformer(8, 1, 1, 16, 10, pattern=window, position="relative")
    >>> model(torch.randn(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch_size: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 3,
        heads: int = 4,
        *,
        feedforward: int | None = None,
        pattern: Callable[[int, int], Tensor] | None = None,
        pool: str = "class",
        position: str | None = "learned",
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_choice("VisionTransformer", _POOLS, pool=pool)
        check_choice("VisionTransformer", _POSITIONS, position=position)
        check_at_least(
            "VisionTransformer",
            1,
            patch_size=patch_size,
            in_channels=in_channels,
            num_layers=num_layers,
        )
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.pattern = pattern
        self.pool = pool
        self.position = position
        height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
        rows, columns = self._patches("image_size", height, width)
        self.rows, self.columns = rows, columns

        self.patch_embedding = nn.Conv2d(in_channels, hidden_channels, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.empty(hidden_channels)) if pool == "class" else None
        self.encoding: nn.Module | None = None
        if position == "learned":
            self.encoding = LearnedEncoding(rows * columns, hidden_channels)
        elif position == "sinusoidal":
            self.encoding = SinusoidalEncoding(hidden_channels)
        self.relative = self.class_bias = None
        if position == "relative":
            self.relative = RelativeBias(heads, (rows - 1, columns - 1))
            if pool == "class":
                self.class_bias = nn.Parameter(torch.empty(3, heads))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            GraphTransformerLayer(
                hidden_channels,
                heads,
                4 * hidden_channels if feedforward is None else feedforward,
                dropout,
                activation,
                norm_first=True,
                attention_dropout=attention_dropout,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        self.head = nn.Linear(hidden_channels, out_channels)
        # Of each size and device: the graph, that of the patches alone, their positions.
        self._graphs: dict[tuple[int, int, torch.device], tuple[Graph, Graph, Tensor]] = {}
        self._reset_own()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for child in self.children():
            reset(child)
        self._reset_own()

    def _reset_own(self) -> None:
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=0.02)
        if self.class_bias is not None:
            nn.init.zeros_(self.class_bias)

    def forward(
        self, images: Tensor, *, return_attention_weights: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Classifies.

        Args:
            images: ``[B, in_channels, height, width]``.
            return_attention_weights: Also return the weights ``[B, E, heads]`` of each layer,
                before dropout, for the edges of :meth:`graph`.

        Returns:
            ``[B, out_channels]``, or a pair with the list of weights.

        Raises:
            ValueError: The images have another number of channels, or sizes that are no multiples
                of ``patch_size``, or are too large for a learned position.
        """
        if images.dim() != 4 or images.size(1) != self.in_channels:
            raise ValueError(
                f"VisionTransformer: images must have shape (batch, {self.in_channels}, height, "
                f"width), got {tuple(images.shape)}."
            )
        rows, columns = self._patches("the size of images", images.size(2), images.size(3))
        if self.position == "learned" and (rows > self.rows or columns > self.columns):
            raise ValueError(
                f"VisionTransformer: positions are learned for {self.rows} x {self.columns} "
                f"patches, but images have {rows} x {columns}. Use a larger image_size, or "
                "position='sinusoidal' or 'relative', which know any size."
            )
        graph, among_patches, position = self._graph(rows, columns, images.device)
        bias = self._bias(among_patches, position)
        x = self.patch_embedding(images).flatten(2).mT  # [B, N, hidden]
        if self.encoding is not None:
            if self.position == "learned":  # a place keeps its number whatever the size
                position = position[:, 0] * self.columns + position[:, 1]
            x = x + self.encoding(position).to(self.norm.weight.dtype)
        if self.class_token is not None:
            x = torch.cat([x, self.class_token.expand(x.size(0), 1, -1)], dim=1)
        x = self.dropout(x)
        weights: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, graph, bias=bias, return_attention_weights=return_attention_weights)
            if return_attention_weights:
                x, of_layer = x
                weights.append(of_layer)
        x = self.norm(x)
        out = self.head(x.mean(dim=1) if self.class_token is None else x[:, -1])
        return (out, weights) if return_attention_weights else out

    def graph(self, height: int, width: int, *, device: torch.device | str = "cpu") -> Graph:
        """The graph of an image of this many pixels: patches row by row, then the class token.

        It is kept for later calls. ``torch.compile`` traces a model whose graph is there already:
        ask for each image size first.

        Raises:
            ValueError: The size is no multiple of ``patch_size``.

        >>> model = VisionTransformer(8, 4, 1, 16, 10)
        >>> model.graph(8, 8)  # 2 x 2 patches and the class token, all see all
        Graph(num_nodes=5, num_edges=25)
        """
        return self._graph(*self._patches("the size", height, width), torch.device(device))[0]

    def _patches(self, what: str, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches."""
        if min(height, width) < 1 or height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"VisionTransformer: {what} must be a multiple of patch_size {self.patch_size}, "
                f"got {height} x {width}. Crop or pad the images."
            )
        return height // self.patch_size, width // self.patch_size

    def _graph(self, rows: int, columns: int, device: torch.device) -> tuple[Graph, Graph, Tensor]:
        key = (rows, columns, device)
        if key not in self._graphs:
            num_patches = rows * columns
            edge_index = (
                patterns.complete(num_patches)
                if self.pattern is None
                else self.pattern(rows, columns)
            ).to(device)
            among_patches = graph = Graph(edge_index, num_patches)
            if self.class_token is not None:
                every = torch.arange(num_patches + 1, device=device)
                token = torch.full_like(every, num_patches)
                to_all = torch.stack([token, every])[:, :-1]
                from_all = torch.stack([every, token])
                graph = Graph(torch.cat([edge_index, to_all, from_all], dim=1), num_patches + 1)
            position = patterns.grid_position(rows, columns).to(device)
            self._graphs[key] = (graph, among_patches, position)
            if len(self._graphs) > _GRAPHS_KEPT:
                del self._graphs[next(iter(self._graphs))]  # the oldest
        return self._graphs[key]

    def _bias(self, among_patches: Graph, position: Tensor) -> Tensor | None:
        """``[E, heads]``, in the order of the edges."""
        if self.relative is None:
            return None
        bias: Tensor = self.relative(among_patches, position)
        if self.class_bias is None:
            return bias
        # From the token to each patch, from each patch to the token, from the token to itself.
        there, back, itself = self.class_bias.unbind()
        num_patches = position.size(0)
        token = (there.expand(num_patches, -1), back.expand(num_patches, -1), itself[None])
        return torch.cat([bias, *token])
