"""What compilers say of the Triton kernels, for GPUs that need not be there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton package is not installed")

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"


def compiled(*arguments, **environment):
    """Exit status and output of the script in a Python of its own, without the interpreter."""
    root = str(BENCHMARKS.parent.parent)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "compile_triton.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": root, **environment},
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compile_triton")


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_kernel_compiles_and_none_spills(target):
    """With nothing optional and with all of it; `make check-triton` goes over all variants."""
    status, output = compiled(
        *("--target", target, "--variant", "8 x 32, bfloat16", "--variant", "4 x 64, float32, w")
    )
    assert status == 0, output
    assert "19 kernels compiled, 0 variants failed, 0 kernels spill" in output


def test_the_interpreter_compiles_nothing():
    status, output = compiled(TRITON_INTERPRET="1")
    assert status == 2
    assert "TRITON_INTERPRET is set" in output


COUNT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from triton.runtime import driver
import compile_triton as script

driver.set_active(script.CompileOnly(script.TARGETS["sm_90"]))
forward, backward = script.kernels.forward, script.kernels.backward
for nodes, edges in ((40, 512), (33, 1000), (160, 1600), (17, 777), (40, 100_000)):
    script.call((8, 8, 32, 32), torch.float32, nodes=nodes, edges=edges)
for kernel in (forward.attend, forward.merge, backward.visit_targets, backward.visit_sources):
    print(sum(len(caches[0]) for caches in kernel.device_caches.values()))
"""


def test_c56_no_kernel_is_compiled_anew_for_other_numbers_of_nodes_and_edges():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(BENCHMARKS.parent.parent)},
    )
    assert result.stdout.split() == ["1"] * 4, result.stdout + result.stderr


def row(**changes):
    return {
        "variant": "8 x 32, float32",
        "target": "sm_90",
        "kernel": "attend",
        "registers": 255,
        "shared": 0,
        "spilled": 0,
        **changes,
    }


def test_a_kernel_that_spills_or_does_not_compile_fails_the_check(script, capsys):
    assert script.report([row()]) == 0
    assert script.report([row(spilled=8, variant="2 x 256, float32")]) == 0
    assert script.report([row(), row(kernel="merge", spilled=8)]) == 1
    assert "8 x 32, float32: merge spills 8 bytes" in capsys.readouterr().out
    assert script.report([{"variant": "v", "target": "sm_90", "error": "at 4:18"}]) == 1
    assert "sm_90, v does not compile:\nat 4:18" in capsys.readouterr().out


def test_every_variant_differs_from_the_others(script):
    found = [str(variant) for variant in script.variants().values()]
    assert len(set(found)) == len(found) > 30
