"""Attention dropout as a function of (seed, edge, head): every backend draws the same mask."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed", "drop", "keep_mask"]

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# Numbers drawn at once: the generator goes over them a hundred times, which a cache makes quick.
_SLICE_ELEMENTS = 1 << 18


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """A 0-dim int64 seed from torch's generator of a device (``torch.manual_seed``).

    It stays there, so that no device waits, and a CUDA graph draws another one in each replay.
    """
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor, edge_id: Tensor, heads: int, dropout: float, *, batch: int = 1
) -> Tensor:
    """Which attention weights survive dropout: True with probability ``1 - dropout``.

    The counter-based generator Philox-4x32 with 7 rounds: key is the seed, counter is (edge, group
    of four heads, batch), and one call gives four heads their 32 random bits. A weight is kept when
    its bits, as an unsigned integer, are at least ``round(dropout * 2**32)``. See "Parallel random
    numbers: as easy as 1, 2, 3" (https://doi.org/10.1145/2063384.2063405).

    Args:
        seed: 0-dim int64.
        edge_id: ``[E]`` int64, position of each edge in the caller's order.
        heads: Number of heads H.
        dropout: Probability of dropping, from 0 to 1.
        batch: Number of graphs B that share the edges (the product of leading dimensions).

    Returns:
        ``[E, batch, heads]`` bool.
    """
    if torch.compiler.is_compiling():
        return _keep(seed, edge_id, heads, dropout, batch)
    step = max(1, _SLICE_ELEMENTS // max(1, batch * heads))
    parts = [_keep(seed, part, heads, dropout, batch) for part in edge_id.split(step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keep(seed: Tensor, edge_id: Tensor, heads: int, dropout: float, batch: int) -> Tensor:
    device = edge_id.device
    groups = torch.arange(-(-heads // 4), device=device)
    rows = torch.arange(batch, device=device)
    shape = (edge_id.numel(), batch, groups.numel())
    c0 = (edge_id & _LOW)[:, None, None].expand(shape)
    c1 = ((edge_id >> 32) & _LOW)[:, None, None].expand(shape)
    c2 = groups.expand(shape)
    c3 = rows[:, None].expand(shape)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # A 32 x 32 bit product fills 64 bits; int64 wraps around, but the bits are the right ones.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    bits = torch.stack([c0, c1, c2, c3], dim=-1).flatten(2)[..., :heads]
    return bits >= round(dropout * 2**32)


def drop(weight: Tensor, seed: Tensor, edge_id: Tensor | None, dropout: float) -> Tensor:
    """Weights ``[E, B, H]`` that :func:`keep_mask` keeps, scaled by ``1 / (1 - dropout)``."""
    num_edges, batch, heads = weight.shape
    if edge_id is None:
        edge_id = torch.arange(num_edges, device=weight.device)
    kept = weight * keep_mask(seed, edge_id, heads, dropout, batch=batch)
    return kept if dropout == 1.0 else kept / (1.0 - dropout)
