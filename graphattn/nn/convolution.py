"""The convolution of the Conformer, on sequences that lie side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import BatchNorm

from graphattn._checks import check_choice

__all__ = ["ConvolutionModule"]

NORMS: dict[str, Callable[[int], nn.LayerNorm | BatchNorm]] = {
    "layer": nn.LayerNorm,
    "batch": lambda channels: BatchNorm(channels, allow_single_element=True),
}


class ConvolutionModule(nn.Module):
    r"""A gated depthwise convolution along each sequence of a batch: that of the Conformer.

    .. math:: y = \mathrm{Dropout}\big(W_2 \, \mathrm{Swish}(\mathrm{Norm}(u))\big), \qquad
        u_i = b + \sum_{|r| \le k / 2} w_r \odot g_{i + r}, \qquad
        g = (W_a x) \odot \sigma(W_b x)

    with zero in place of what is before the first and after the last row of a sequence. Source:
    "Conformer: Convolution-augmented Transformer for Speech Recognition"
    (https://arxiv.org/abs/2005.08100), section 2.2, without the normalisation at its entrance,
    which is that of :class:`ConformerLayer`.

    Nothing is padded to the longest sequence: they lie in one buffer with ``kernel_size // 2`` zero
    rows between them, and one convolution goes over it. No sequence feels another, but for the
    statistics of batch normalisation in training.

    Args:
        channels: Size of each row's features.
        kernel_size: Number of rows that a row sees, itself in the middle; odd.
        dropout: Probability of dropping outputs in training.
        norm: Normalisation after the convolution: ``"layer"``, or ``"batch"`` as in the paper.

    Raises:
        ValueError: ``kernel_size`` is not odd and positive, ``channels`` not positive or ``norm``
            unknown.

    Two sequences, of three rows and of two:

    >>> convolution = ConvolutionModule(8, kernel_size=5)
    >>> convolution(torch.randn(5, 8), torch.tensor([0, 0, 0, 1, 1])).shape
    torch.Size([5, 8])
    """

    def __init__(
        self, channels: int, kernel_size: int = 31, *, dropout: float = 0.0, norm: str = "layer"
    ) -> None:
        super().__init__()
        if channels < 1 or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(
                "ConvolutionModule: expected positive channels and an odd kernel_size, so that a "
                f"row is in the middle of what it sees, got channels={channels}, "
                f"kernel_size={kernel_size}."
            )
        check_choice("ConvolutionModule", NORMS, norm=norm)
        self.channels = channels
        self.kernel_size = kernel_size
        self.pointwise1 = nn.Linear(channels, 2 * channels)
        self.depthwise = nn.Conv1d(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels
        )
        self.norm = NORMS[norm](channels)
        self.pointwise2 = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.pointwise1.reset_parameters()
        self.depthwise.reset_parameters()
        self.pointwise2.reset_parameters()
        self.norm.reset_parameters()

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """Convolves.

        Args:
            x: ``[N, channels]``, the sequences one after another.
            batch: ``[N]`` int64, the sequence that each row belongs to, sorted;
                :func:`graphattn.patterns.batch_vector` makes it from lengths.

        Returns:
            ``[N, channels]``.

        Raises:
            ValueError: ``x`` has other channels, or ``batch`` is not sorted or not ``[N]``.
        """
        if x.dim() != 2 or x.size(1) != self.channels:
            raise ValueError(
                f"ConvolutionModule: x must have shape (num_rows, {self.channels}), got "
                f"{tuple(x.shape)}."
            )
        if batch.shape != x.shape[:1]:
            raise ValueError(
                f"ConvolutionModule: batch must have one number for each of the {x.size(0)} rows, "
                f"got shape {tuple(batch.shape)}. Use patterns.batch_vector(length) for lengths."
            )
        x = F.glu(self.pointwise1(x), dim=-1)
        x = F.silu(self.norm(self._along_sequences(x, batch)))
        return self.dropout(self.pointwise2(x))

    def _along_sequences(self, x: Tensor, batch: Tensor) -> Tensor:
        """The depthwise convolution: ``[N, C] -> [N, C]``."""
        gap, step = self.kernel_size // 2, batch.diff(prepend=batch[:1])
        before = step.ne(0).cumsum(0)  # sequences that end before the row
        row = torch.arange(x.size(0), device=x.device) + gap * before
        size = 1
        if x.size(0) > 0:
            last, backward = torch.stack([row[-1], step.lt(0).sum()]).tolist()
            if not torch.compiler.is_compiling() and backward > 0:
                raise ValueError(
                    "ConvolutionModule: batch must be sorted, so that the rows of a sequence lie "
                    "together, but it falls. Sort x and batch by batch.argsort(stable=True)."
                )
            size = last + 1
        buffer = x.new_zeros(size, x.size(1)).index_copy(0, row, x)
        out: Tensor = self.depthwise(buffer.t().unsqueeze(0))
        return out.squeeze(0).t().index_select(0, row)
