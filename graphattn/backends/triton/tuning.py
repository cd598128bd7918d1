"""Sizes of the kernels that were measured instead of derived, kept on disk for the next process.

Off unless the environment variable ``GRAPHATTN_AUTOTUNE`` is 1: sums of another order differ in
their last bits, so what was measured on one machine would change results on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from graphattn.backends.triton.edges import Plan

__all__ = ["is_on", "sizes"]

_found: dict[str, list[int]] = {}


def is_on() -> bool:
    """Whether sizes are measured; not while a CUDA graph is captured, where nothing can be."""
    if os.environ.get("GRAPHATTN_AUTOTUNE") != "1":
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def sizes(key: str, plan: Plan, run: Callable[[int, int], object]) -> tuple[int, int]:
    """Edges in a tile and warps in a program that take the least time for ``key``.

    Args:
        key: Names all that the best sizes may depend on.
        plan: Half, once and twice the edges of its tiles are tried, with one and two warps.
        run: Launches the kernel with so many edges and warps. Called many times.
    """
    if key not in _found:
        _found.update(_read())
    if key not in _found:
        tried = [(edges, warps) for edges in _around(plan.block) for warps in (1, 2)]
        seconds = [triton.testing.do_bench(lambda: run(*each)) for each in tried]  # noqa: B023
        _found[key] = list(tried[seconds.index(min(seconds))])
        _write()
    edges, warps = _found[key]
    return edges, warps


def _around(edges: int) -> list[int]:
    return sorted({max(1, edges // 2), edges, 2 * edges})


def _file() -> Path:
    return Path(triton.knobs.cache.dir) / "graphattn.json"


def _read() -> dict[str, list[int]]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_file().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _write() -> None:
    """What other processes have written in the meantime stays; nobody reads half a file."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        json.dump(_read() | _found, new, indent=1)
    os.replace(new.name, file)
