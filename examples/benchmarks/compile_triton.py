"""Compiles the Triton kernels for GPUs that need not be there, and says what they take.

    python examples/benchmarks/compile_triton.py                       # every variant and target
    python examples/benchmarks/compile_triton.py --target sm_90 --variant "8 x 32"

The arguments of each variant go the way of a real call, but for the launch. Exits with 1 if a
kernel does not compile, or if one for 8 heads of 32 or 4 heads of 64 channels spills registers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphattn import Graph
from graphattn.backends import triton as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Heads, key heads, channels of key and value.
SHAPES = {"8 x 32": (8, 8, 32, 32), "4 x 64": (4, 4, 64, 64)}
OTHER_SHAPES = {
    "1 x 1": (1, 1, 1, 1),
    "3 x 20, value 7": (3, 3, 20, 7),
    "16 x 16": (16, 16, 16, 16),
    "8 x 128": (8, 8, 128, 128),
    "2 x 256": (2, 2, 256, 256),
    "6 of 2 keys x 32": (6, 2, 32, 32),
    "16 of one key x 64": (16, 1, 64, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"bias": True},
    "dropout": {"dropout": 0.1},
    "edge features": {"edge_dim": 8},
    "all": {"bias": True, "dropout": 0.1, "edge_dim": 8},
    "weights": {"weights": True, "bias": True, "edge_dim": 8},
    "sorted": {"ordered": True},
    "light rows": {"nodes": 20_000},
    "one node": {"nodes": 1},
}
NO_SPILLS = tuple(SHAPES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def variants() -> dict[str, dict[str, Any]]:
    """Every variant by name: shapes with every option, other shapes with none and with all."""
    found = {}
    for shape in (*SHAPES, *OTHER_SHAPES):
        for option in OPTIONS if shape in SHAPES else ("", "all"):
            for dtype in DTYPES if shape in SHAPES and option in ("", "all") else ("float32",):
                name = ", ".join(part for part in (shape, dtype, option) if part)
                dims = {**SHAPES, **OTHER_SHAPES}[shape]
                found[name] = {"dims": dims, "dtype": DTYPES[dtype], **OPTIONS[option]}
    return found


class CompileOnly:
    """In place of Triton's driver: names a target, loads nothing, launches nothing."""

    class utils:
        """What loading a binary would find out, so that any may be launched."""

        @staticmethod
        def load_binary(name: str, *_: Any) -> tuple[None, int, int, int, int]:
            return None, 0, 0, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 17, "multiprocessor_count": 1, "warpSize": 32}

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """A number for each target: Triton keeps what it compiled by device."""
        return list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_variant(job: tuple[str, dict[str, Any], str]) -> list[dict[str, Any]]:
    """A row for each kernel of a forward and backward call; one with the error if it fails."""
    name, variant, target = job
    driver.set_active(CompileOnly(TARGETS[target]))
    compiled: list[Any] = []
    launch = kernels.Pass.launch
    kernels.Pass.launch = lambda *arguments: compiled.append(launch(*arguments))
    try:
        call(**variant)
    except Exception:
        return [{"variant": name, "target": target, "error": traceback.format_exc()}]
    finally:
        kernels.Pass.launch = launch
    used = used_by_nvidia if target.startswith("sm_") else used_by_amd
    return [
        {"variant": name, "target": target, "kernel": kernel.name, **used(kernel)}
        for kernel in compiled
    ]


def call(
    dims: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    nodes: int = 40,
    edges: int = 2 * kernels.CHUNK,
    bias: bool = False,
    dropout: float = 0.0,
    edge_dim: int | None = None,
    weights: bool = False,
    ordered: bool = False,
) -> None:
    """A forward and a backward call for all gradients. By default, rows may have to be cut."""
    heads, key_heads, head_dim, value_dim = dims
    edge_index = torch.randint(nodes, (2, edges))
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)] if ordered else edge_index
    graph = Graph(edge_index, nodes)
    inputs = (
        torch.zeros(nodes, heads, head_dim, dtype=dtype),
        torch.zeros(nodes, key_heads, head_dim, dtype=dtype),
        None if weights else torch.zeros(nodes, key_heads, value_dim, dtype=dtype),
        torch.zeros(edges, heads) if bias else None,
        None if edge_dim is None else torch.zeros(nodes, heads, edge_dim),
        None if edge_dim is None else torch.zeros(edges, edge_dim, dtype=dtype),
    )
    by_source = (graph.src_ptr, graph.dst_index, graph.edge_id_by_src)
    arrays = (graph.dst_ptr, graph.src_index, graph.edge_id, *by_source)
    seed = torch.tensor(1) if dropout > 0.0 else None
    arguments = (*inputs, *arrays, seed, 1.0, dropout)
    out, mixed, softmax = kernels.attention(*arguments)
    grad_mixed = None if weights or edge_dim is None else mixed
    needs = [True] * len(inputs)
    kernels.attention_backward(out, grad_mixed, *arguments, softmax, needs)


def used_by_nvidia(kernel: Any) -> dict[str, int]:
    """Registers of a thread, bytes it spills, and shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {report}")
    return {"registers": int(found[1]), "spilled": int(found[2]), "shared": kernel.metadata.shared}


def used_by_amd(kernel: Any) -> dict[str, int]:
    """The same of a kernel for AMD."""
    registers, spilled = (
        int(re.search(rf"\.vgpr_{name}:\s+(\d+)", kernel.asm["amdgcn"])[1])
        for name in ("count", "spill_count")
    )
    return {"registers": registers, "spilled": 4 * spilled, "shared": kernel.metadata.shared}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--variant", action="append", help="names that start with it; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so that there is nothing to compile")
    wanted = tuple(args.variant or [""])
    jobs = [
        (name, variant, target)
        for name, variant in variants().items()
        for target in args.target or TARGETS
        if name.startswith(wanted)
    ]
    if not jobs:
        parser.error(f"no variant starts with {wanted}; there are {', '.join(variants())}")
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        results = tqdm(pool.map(compile_variant, jobs), total=len(jobs), unit="variant")
        rows = [row for found in results for row in found]
    return report(rows)


KERNELS = (
    "attend",
    "merge",
    "weigh",
    "visit_targets",
    "merge_targets",
    "visit_sources",
    "merge_sources",
)


def report(rows: list[dict[str, Any]]) -> int:
    """Prints the rows; 1 if one of them is an error or may not spill but does, else 0."""
    failed = [row for row in rows if "error" in row]
    compiled = [row for row in rows if "error" not in row]
    table = Table(
        "target", "variant", *KERNELS, title="registers / shared bytes / spilled bytes, each kernel"
    )
    by_variant: dict[tuple[str, str], dict[str, str]] = {}
    for row in compiled:
        cells = by_variant.setdefault((row["target"], row["variant"]), {})
        cells[row["kernel"]] = "{registers} / {shared} / {spilled}".format(**row)
    for names, cells in by_variant.items():
        table.add_row(*names, *(cells.get(kernel, "") for kernel in KERNELS))
    Console(width=180).print(table)
    for row in failed:
        print(f"{row['target']}, {row['variant']} does not compile:\n{row['error']}")
    spilled = [row for row in compiled if row["spilled"] and row["variant"].startswith(NO_SPILLS)]
    for row in spilled:
        print(f"{row['target']}, {row['variant']}: {row['kernel']} spills {row['spilled']} bytes")
    print(
        f"triton {triton.__version__}: {len(compiled)} kernels compiled, {len(failed)} variants "
        f"failed, {len(spilled)} kernels spill where none may."
    )
    return 1 if failed or spilled else 0


if __name__ == "__main__":
    sys.exit(main())
