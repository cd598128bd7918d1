"""The compiled library of the CPU kernels: where it is, why it is missing, and how it sorts edges.

It is made from ``backends/cpu.cpp`` when the package is built, includes nothing of torch, and is
loaded with ctypes, which releases the interpreter lock during calls. The functions for threads that
it needs are those that torch has loaded, so both share one pool.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "check_status",
    "keep_pages",
    "library",
    "missing",
    "num_threads",
    "scan_edges",
    "sort_by_source",
    "sort_by_target",
]

# What the kernels take, in the order of the enumeration in cpu.cpp.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def num_threads() -> int:
    """Threads that a call may use: torch's number, and one in a forked process.

    The pool of threads does not survive a fork, and waiting for it would never end.
    """
    return 1 if _forked else torch.get_num_threads()


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_cpu{suffix}"
        if path.exists():
            try:
                return _declare(ctypes.CDLL(str(path))), ""
            except (OSError, AttributeError) as error:
                return None, f"{path.name} cannot be loaded: {error}"
    return None, (
        "it was not compiled when graphattn was installed. Install g++, then graphattn again: "
        "pip install --force-reinstall --no-deps graphattn"
    )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    library.graphattn_scan_edges.argtypes = [integer] * 2 + [pointer] * 3
    library.graphattn_scan_edges.restype = None
    library.graphattn_sort_by_target.argtypes = [integer] * 3 + [pointer] * 5
    library.graphattn_sort_by_source.argtypes = [integer] * 4 + [pointer] * 6
    library.graphattn_forward.argtypes = library.graphattn_backward.argtypes = [pointer]
    return library


_library, _reason = _load()


def missing() -> str | None:
    """Why the library cannot be used; ``None`` when it can."""
    return _reason if _library is None else None


def library() -> ctypes.CDLL:
    """The library. Raises ``RuntimeError`` where it is missing."""
    if _library is None:
        raise RuntimeError(f"graphattn: the library of the CPU kernels is missing: {_reason}")
    return _library


def keep_pages() -> bool:
    """Lets this process keep the memory of tensors that are freed, for the next ones.

    By default glibc takes every large tensor from the system and gives it back when it is freed. On
    a CPU the first touch of such fresh pages can take longer than all arithmetic: training on large
    graphs is often twice as fast after this call. The process keeps about as much memory as it once
    needed, and somewhat more at its peak.

    Returns:
        Whether the allocator of the process did as it was told; glibc's does.

    >>> if __name__ == "__main__":
    ...     kept = keep_pages()
    """
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, -1))


def check_status(status: int) -> None:
    """Raises ``MemoryError`` when a call found no memory for what it works in."""
    if status != 0:
        raise MemoryError("graphattn: not enough memory for what the CPU kernel works in.")


def scan_edges(source: Tensor, target: Tensor) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Smallest and largest source, the same of targets, and whether targets are in order.

    Where there are no edges, the smallest is larger than the largest.

    Args:
        source: ``[E]`` int64 on the CPU, contiguous, as all arguments here.
        target: ``[E]``.
    """
    found = (ctypes.c_int64 * 5)()
    library().graphattn_scan_edges(
        source.numel(), num_threads(), source.data_ptr(), target.data_ptr(), found
    )
    return (found[0], found[1]), (found[2], found[3]), bool(found[4])


def sort_by_target(
    source: Tensor, target: Tensor, num_dst: int, *, in_order: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dst_ptr, src_index, edge_id)`` of edges whose targets are less than ``num_dst``.

    ``edge_id`` is ``None`` where targets are in order already.
    """
    dst_ptr, src_index = target.new_empty(num_dst + 1), torch.empty_like(source)
    edge_id = None if in_order else torch.empty_like(source)
    status = library().graphattn_sort_by_target(
        source.numel(),
        num_dst,
        num_threads(),
        source.data_ptr(),
        target.data_ptr(),
        dst_ptr.data_ptr(),
        src_index.data_ptr(),
        None if edge_id is None else edge_id.data_ptr(),
    )
    check_status(status)
    return dst_ptr, src_index, edge_id


def sort_by_source(
    dst_ptr: Tensor, src_index: Tensor, edge_id: Tensor | None, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(src_ptr, dst_index, edge_id_by_src)`` from the arrays by target."""
    src_ptr = dst_ptr.new_empty(num_src + 1)
    dst_index, edge_id_by_src = torch.empty_like(src_index), torch.empty_like(src_index)
    status = library().graphattn_sort_by_source(
        src_index.numel(),
        dst_ptr.numel() - 1,
        num_src,
        num_threads(),
        dst_ptr.data_ptr(),
        src_index.data_ptr(),
        None if edge_id is None else edge_id.data_ptr(),
        src_ptr.data_ptr(),
        dst_index.data_ptr(),
        edge_id_by_src.data_ptr(),
    )
    check_status(status)
    return src_ptr, dst_index, edge_id_by_src
