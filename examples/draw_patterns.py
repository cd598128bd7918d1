"""Draws who attends to whom under each pattern, as a mask of queries and keys.

python examples/draw_patterns.py --out docs/images/patterns.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from graphattn import patterns
from graphattn.experiment import figure, integer


def gallery(seed: int) -> dict[str, tuple[Tensor, tuple[int, int]]]:
    """By the call that makes it: an ``edge_index`` and its numbers of sources and targets."""
    generator = torch.Generator().manual_seed(seed)
    hashes = torch.randint(4, (24,), generator=generator)
    points = torch.rand(24, 2, generator=generator)
    square = (24, 24)
    return {
        "complete([10, 8, 6])": (patterns.complete([10, 8, 6]), square),
        "causal(24)": (patterns.causal(24), square),
        "window(24, 2)": (patterns.window(24, 2), square),
        "window(24, 5, 0)": (patterns.window(24, 5, 0), square),
        "window(24, 2, dilation=3)": (patterns.window(24, 2, dilation=3), square),
        "grid(4, 6, 3)": (patterns.grid(4, 6, 3), square),
        "cross([6, 10], [8, 4])": (patterns.cross([6, 10], [8, 4]), (16, 12)),
        "cross(16, 12, causal=True)": (patterns.cross(16, 12, causal=True), (16, 12)),
        "global_tokens(24, 2)": (patterns.global_tokens(24, 2), square),
        "longformer(24, 2, 2)": (patterns.longformer(24, 2, 2), square),
        "random(24, 3)": (patterns.random(24, 3, generator=generator), square),
        "big_bird(24, 1, 2, 2)": (patterns.big_bird(24, 1, 2, 2, generator=generator), square),
        "expander(24, 4)": (patterns.expander(24, 4, generator=generator), square),
        "lsh_buckets(hashes)": (patterns.lsh_buckets(hashes), square),
        "knn(points, 4)": (patterns.knn(points, 4), square),
        "virtual_nodes([14, 10], 1)": (patterns.virtual_nodes([14, 10], 1), (26, 26)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/patterns.png"))
    parser.add_argument("--seed", type=integer(0), default=0)
    args = parser.parse_args(argv)
    drawn = gallery(args.seed)
    picture, panels = figure(4, rows=len(drawn) // 4, width=2.5, height=2.7)
    for axes, (call, (edge_index, size)) in zip(panels.flat, drawn.items(), strict=True):
        axes.imshow(patterns.to_mask(edge_index, size), cmap="Purples", vmin=0, vmax=1.3)
        axes.set_title(f"{call}\n{edge_index.size(1)} edges", fontsize=8)
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel("keys", fontsize=7)
        axes.set_ylabel("queries", fontsize=7)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(args.out, dpi=120, metadata={"Software": None})
    print(f"Written: {args.out}")


if __name__ == "__main__":
    main()
