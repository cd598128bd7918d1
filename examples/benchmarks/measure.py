"""Time, peak memory, copy bandwidth and its limit, and the machine they are taken on."""

from __future__ import annotations

import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphattn
from graphattn import Graph
from graphattn.experiment import PeakMemory, cpu_model
from rivals import Contestant

DIRECTIONS = ("forward", "backward", "forward+backward")

# Time #############################################################################################


def interleaved(
    contestants: list[Contestant],
    cotangent: Tensor,
    repeats: int,
    *,
    between: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each contestant in each direction, ``repeats`` of each.

    All contestants run once in every round, so that what disturbs the machine meets all of them;
    each round starts with another one. ``between`` is called before each round.
    """
    seconds: dict[str, dict[str, list[float]]] = {c.name: defaultdict(list) for c in contestants}
    for repeat in range(repeats):
        between()
        first = repeat % max(1, len(contestants))
        for contestant in contestants[first:] + contestants[:first]:
            for direction, value in time_once(contestant, cotangent).items():
                seconds[contestant.name][direction].append(value)
    return seconds


def time_once(contestant: Contestant, cotangent: Tensor) -> dict[str, float]:
    """Seconds by direction.

    Forward is that of inference, without gradients. Backward is timed by itself within a forward
    and backward that are timed as a whole.
    """
    now = _clock(cotangent.device)
    start = now()
    with torch.no_grad():
        out = contestant.forward()
    seconds = {"forward": now() - start}
    del out
    if contestant.leaves:
        leaves = list(contestant.leaves.values())
        start = now()
        out = contestant.forward()
        middle = now()
        torch.autograd.grad(out, leaves, cotangent)
        end = now()
        seconds |= {"backward": end - middle, "forward+backward": end - start}
    return seconds


def build_graph(edge_index: Tensor, num_nodes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds to build a :class:`graphattn.Graph`, by what is given and what is asked for."""
    now = _clock(edge_index.device)
    order = torch.randperm(edge_index.size(1), device=edge_index.device)
    given = {
        "unsorted": edge_index[:, order],
        "sorted": edge_index[:, edge_index[1].argsort(stable=True)],
    }
    seconds = defaultdict(list)
    for _ in range(repeats):
        for name, edges in given.items():
            start = now()
            graph = Graph(edges, num_nodes)
            seconds[f"{name}, by target"].append(now() - start)
            _ = graph.src_ptr
            seconds[f"{name}, both sides"].append(now() - start)
    return seconds


class CopyBandwidth:
    """What a copy of 256 MB reads and writes in a second: the speed that limits are taken at."""

    def __init__(self, device: torch.device, size: int = 2**28) -> None:
        self.source = torch.ones(size // 4, device=device)
        self.target = torch.zeros_like(self.source)
        self.now = _clock(device)
        self.seen: list[float] = []  # bytes a second

    def measure(self) -> None:
        start = self.now()
        self.target.copy_(self.source)
        self.seen.append(2 * self.source.nbytes / (self.now() - start))


def _clock(device: torch.device) -> Callable[[], float]:
    def after_the_device() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_the_device if device.type == "cuda" else time.perf_counter


# The limit ########################################################################################


def limit_bytes(
    num_nodes: int, num_edges: int, heads: int, head_dim: int, itemsize: int
) -> dict[str, int]:
    """Bytes by direction when every row that an edge gathers is read from memory: no reuse.

    With 32-bit indices, 64-bit pointers and one float32 log-sum-exp for each target and head.
    Forward reads query, writes the output and gathers key and value. Backward makes two passes, by
    target and by source, and gathers two rows in each.
    """
    n, e, h, f = num_nodes, num_edges, heads, heads * head_dim
    rows, index, pointers = f * itemsize, 4 * e, 8 * (n + 1)
    forward = 2 * n * rows + 4 * n * h + index + pointers + 2 * e * rows
    backward = 8 * n * rows + 8 * n * h + 2 * (index + 8 * n) + 4 * e * rows + 8 * e * h
    return dict(zip(DIRECTIONS, (forward, backward, forward + backward), strict=True))


# Memory ###########################################################################################


def peak_bytes(contestant: Contestant, cotangent: Tensor) -> dict[str, int | None]:
    """Bytes above what is held before, outputs and gradients included, by direction."""

    def forward() -> Any:
        with torch.no_grad():
            return contestant.forward()

    def both() -> Any:
        out = contestant.forward()
        return out, torch.autograd.grad(out, list(contestant.leaves.values()), cotangent)

    steps = {"forward": forward, "forward+backward": both}
    if not contestant.leaves:
        del steps["forward+backward"]
    return {name: _peak(step, cotangent.device) for name, step in steps.items()}


def _peak(step: Callable[[], Any], device: torch.device) -> int | None:
    if device.type == "cpu" and allocator_of_process() != "default":
        return None  # other allocators keep what is freed, and that would hide the next peak
    with PeakMemory(device) as peak:
        kept = step()
    del kept
    return peak.bytes


# The allocator ####################################################################################

_warm = False


def allocator_of_process() -> str:
    """``"default"``, ``"warm"`` after :func:`keep_pages`, or the name of a preloaded one."""
    preloaded = re.search(r"jemalloc|tcmalloc|mimalloc", os.environ.get("LD_PRELOAD", ""))
    if preloaded is not None:
        return preloaded[0]
    return "warm" if _warm else "default"


def keep_pages() -> None:
    """From now on this process returns no memory to the system, for every contestant alike.

    By default glibc takes each large tensor from the system and gives it back when it is freed, so
    that the next one starts with pages that fault at the first touch.

    Raises:
        OSError: The allocator of the process is not glibc's.
    """
    global _warm
    if not graphattn.keep_pages():
        raise OSError(
            "warm pages need the allocator of glibc, which this process lacks. Use --allocator "
            "default"
        )
    _warm = True


# The machine ######################################################################################


def machine(device: torch.device) -> dict[str, str | int]:
    """What the numbers depend on besides the code."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "caches": ", ".join(_caches()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _caches() -> Iterator[str]:
    """Those of the first core, such as ``L1d 48K``."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (folder / name).read_text().strip() for name in ("level", "type", "size")
        )
        if kind != "Instruction":
            yield f"L{level}{'d' if kind == 'Data' else ''} {size}"
