"""graphattn._native: sorting in the compiled library, and what happens where there is none."""

import importlib.machinery
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import graphattn
from graphattn import Graph, _native, attention_weights, backends, edge_softmax, graph_attention
from graphattn import __main__ as report
from graphattn._native import library
from graphattn.testing import zoo
from operands import run_script

compiled = pytest.mark.skipif(
    backends.missing("cpu") is not None, reason=f"backend cpu: {backends.missing('cpu')}"
)

# Sorting ##########################################################################################


def power_law(size, count):
    return (torch.rand(count).pow(6) * size).long()


MANY = 165_000  # edges enough for each of five threads to have a part
KINDS = {
    "no edges": lambda: (torch.zeros(0).long(), torch.zeros(0).long(), 5, 7),
    "no nodes": lambda: (torch.zeros(0).long(), torch.zeros(0).long(), 0, 0),
    "no targets": lambda: (torch.zeros(0).long(), torch.zeros(0).long(), 3, 0),
    "one edge": lambda: (torch.tensor([2]), torch.tensor([0]), 3, 1),
    "few": lambda: (torch.randint(5, (40,)), torch.randint(9, (40,)), 5, 9),
    "random": lambda: (torch.randint(999, (MANY,)), torch.randint(777, (MANY,)), 999, 777),
    "in order": lambda: (torch.randint(999, (MANY,)), torch.arange(MANY) // 300, 999, 700),
    "in order by source": lambda: (torch.arange(MANY) // 300, torch.randint(99, (MANY,)), 700, 99),
    "reversed": lambda: (torch.arange(MANY), torch.arange(MANY).flip(0), MANY, MANY),
    "one target": lambda: (torch.randint(9, (MANY,)), torch.full((MANY,), 3), 9, 5),
    "one source": lambda: (torch.full((MANY,), 4), torch.randint(9, (MANY,)), 5, 9),
    "all equal": lambda: (torch.zeros(MANY).long(), torch.zeros(MANY).long(), 1, 1),
    "power law": lambda: (power_law(500, MANY), power_law(3000, MANY), 500, 3000),
    "more nodes than edges": lambda: (
        torch.randint(300_000, (1000,)),
        torch.randint(400_000, (1000,)),
        300_000,
        400_000,
    ),
    "many of both": lambda: (torch.randint(MANY, (MANY,)), torch.randint(9, (MANY,)), MANY, 9),
    "only the ends": lambda: (
        torch.randint(2, (MANY,)) * 9999,
        torch.randint(2, (MANY,)) * 8888,
        10_000,
        8889,
    ),
}


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pointers(index, size):
    return torch.nn.functional.pad(torch.bincount(index, minlength=size).cumsum(0), (1, 0))


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_sorting_equals_that_of_torch(kind, threads):
    src, dst, num_src, num_dst = KINDS[kind]()
    order = torch.sort(dst, stable=True).indices
    dst_ptr, src_index, edge_id = _native.sort_by_target(src, dst, num_dst, in_order=False)
    assert torch.equal(dst_ptr, pointers(dst, num_dst))
    assert torch.equal(src_index, src[order])
    assert torch.equal(edge_id, order)

    by_source = torch.sort(src_index, stable=True).indices
    src_ptr, dst_index, edge_id_by_src = _native.sort_by_source(
        dst_ptr, src_index, edge_id, num_src
    )
    assert torch.equal(src_ptr, pointers(src, num_src))
    assert torch.equal(dst_index, dst[order][by_source])
    assert torch.equal(edge_id_by_src, order[by_source])


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_edges_in_order_are_counted_and_not_sorted(kind, threads):
    src, dst, num_src, num_dst = KINDS[kind]()
    dst = dst.sort().values
    dst_ptr, src_index, edge_id = _native.sort_by_target(src, dst, num_dst, in_order=True)
    assert edge_id is None
    assert torch.equal(dst_ptr, pointers(dst, num_dst))
    assert torch.equal(src_index, src)
    assert src.numel() == 0 or src_index.data_ptr() != src.data_ptr()

    by_source = torch.sort(src, stable=True).indices
    src_ptr, dst_index, edge_id_by_src = _native.sort_by_source(dst_ptr, src, None, num_src)
    assert torch.equal(src_ptr, pointers(src, num_src))
    assert torch.equal(dst_index, dst[by_source])
    assert torch.equal(edge_id_by_src, by_source)


@compiled
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]()[0].numel() > 0])
def test_scan_finds_the_bounds_and_the_order(kind, threads):
    src, dst, *_ = KINDS[kind]()
    of_src, of_dst = ((int(row.min()), int(row.max())) for row in (src, dst))
    assert _native.scan_edges(src, dst) == (of_src, of_dst, bool((dst.diff() >= 0).all()))


@compiled
def test_scan_sees_one_wrong_index_and_one_step_down_anywhere(threads):
    for place in (0, 1, MANY // 5 - 1, MANY // 5, MANY // 2, MANY - 1):
        src, dst = torch.full((MANY,), 5), torch.arange(MANY)
        src[place] = -7
        assert _native.scan_edges(src, dst) == ((-7, 5), (0, MANY - 1), True)
        src[place] = 2**40
        dst[place:] -= 2  # a step down before this place, unless nothing is before it
        of_src, _, in_order = _native.scan_edges(src, dst)
        assert of_src == (5, 2**40)
        assert in_order == (place == 0)


@compiled
def test_scan_of_no_edges_is_in_order_and_within_any_bounds():
    of_src, of_dst, in_order = _native.scan_edges(*torch.zeros(2, 0).long())
    assert of_src[0] > of_src[1]
    assert of_dst[0] > of_dst[1]
    assert in_order


def arrays_of(graph):
    edge_id = torch.arange(graph.num_edges) if graph.edge_id is None else graph.edge_id
    by_target = (graph.dst_ptr, graph.src_index, edge_id)
    return *by_target, graph.src_ptr, graph.dst_index, graph.edge_id_by_src


@pytest.fixture
def no_library(monkeypatch):
    """The package as it is installed without a compiler."""
    monkeypatch.setattr(_native, "_library", None)
    monkeypatch.setattr(_native, "_reason", "it was not compiled. Install g++")


@compiled
@pytest.mark.parametrize("case", list(zoo(hub=50)), ids=str)
def test_graph_without_the_library_has_the_same_arrays(case, request):
    expected, order = arrays_of(case.graph()), case.graph().edge_id
    request.getfixturevalue("no_library")
    graph = case.graph()
    assert (graph.edge_id is None) == (order is None)
    for found, wanted in zip(arrays_of(graph), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("library", [pytest.param("as it is", marks=compiled), "missing"])
@pytest.mark.parametrize(
    ("edge_index", "text"),
    [
        (
            [[0, 3], [1, 0]],
            (
                r"Graph: edge_index\[0\] holds source positions and there are 3 sources, but its "
                r"values go from 0 to 3\. Pass the right num_nodes, or map raw identifiers"
            ),
        ),
        ([[0, 1], [1, 9]], r"edge_index\[1\] holds target positions .* values go from 1 to 9\."),
        ([[0, -1], [1, 0]], r"edge_index\[0\] .* values go from -1 to 0\."),
        ([[0, 0], [-5, 9]], r"edge_index\[1\] .* values go from -5 to 9\."),
    ],
)
def test_c24_the_same_text_with_and_without_the_library(edge_index, text, library, request):
    if library == "missing":
        request.getfixturevalue("no_library")
    with pytest.raises(IndexError, match=text):
        Graph(torch.tensor(edge_index), 3)


@compiled
def test_c24_an_edge_of_a_graph_without_nodes_is_refused():
    with pytest.raises(IndexError, match=r"there are 0 sources, but its values go from 0 to 0\."):
        Graph(torch.tensor([[0], [0]]), 0)


# Threads ##########################################################################################


def test_num_threads_is_that_of_torch(threads):
    assert _native.num_threads() == threads


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_num_threads_is_1_in_a_forked_process(threads):
    pid = os.fork()
    if pid == 0:
        os._exit(_native.num_threads())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert _native.num_threads() == threads


# No memory ########################################################################################


class Full:
    """A library that never finds memory."""

    def __getattr__(self, name):
        return lambda *_: 1


TEXT = r"graphattn: not enough memory for what the CPU kernel works in\."


def test_check_status():
    _native.check_status(0)
    with pytest.raises(MemoryError, match=TEXT):
        _native.check_status(1)


@compiled
def test_every_call_that_finds_no_memory_raises_memory_error(monkeypatch):
    graph, not_yet_by_source = (Graph(torch.tensor([[1, 0], [1, 0]]), 2) for _ in range(2))
    x = torch.ones(2, 1, 3, requires_grad=True)
    out = graph_attention(x, x, x, graph, backend="cpu")
    monkeypatch.setattr(_native, "_library", Full())
    calls = (
        lambda: graph_attention(x, x, x, graph, backend="cpu"),
        lambda: attention_weights(x, x, graph, backend="cpu"),
        lambda: out.sum().backward(),
        lambda: Graph(torch.tensor([[1, 0], [1, 0]]), 2, validate=False),
        lambda: not_yet_by_source.src_ptr,
    )
    for call in calls:
        with pytest.raises(MemoryError, match=TEXT):
            call()


@compiled
def test_the_library_says_so_when_it_finds_no_memory():
    one = torch.zeros(1).long()
    pointer = one.data_ptr()
    sort = library().graphattn_sort_by_target
    assert sort(1, 2**60, 1, pointer, pointer, pointer, pointer, pointer) == 1
    assert sort(1, 1, 1, pointer, pointer, torch.zeros(2).long().data_ptr(), pointer, pointer) == 0


KEEPING = """
import os
from pathlib import Path
import torch
from graphattn import keep_pages

def after_a_large_tensor():
    tensor = torch.ones(2**25)
    del tensor
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = after_a_large_tensor()
print(keep_pages(), after_a_large_tensor() - before, 2**27)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_keep_pages_keeps_the_memory_of_a_freed_tensor():
    done, kept, size = run_script(KEEPING, OMP_NUM_THREADS="1").split()
    assert done == "True"
    assert int(kept) > 0.9 * int(size)


@pytest.mark.parametrize("mallopt", [None, lambda *_: 0])
def test_keep_pages_says_so_where_the_allocator_does_not(mallopt, monkeypatch):
    monkeypatch.setattr(_native.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert graphattn.keep_pages() is False


# No library #######################################################################################

X, EDGES = torch.ones(3, 1, 2), torch.tensor([[0, 1], [1, 2]])


@pytest.mark.usefixtures("no_library")
def test_a_missing_library_is_named_and_auto_takes_eager():
    assert backends.missing("cpu") == "it was not compiled. Install g++"
    graph = Graph(EDGES, 3)
    calls = (
        ("graph_attention", lambda **k: graph_attention(X, X, X, graph, **k)),
        ("attention_weights", lambda **k: attention_weights(X, X, graph, **k)),
        ("edge_softmax", lambda **k: edge_softmax(torch.ones(2), graph, **k)),
    )
    for name, call in calls:
        with pytest.raises(
            ValueError,
            match=rf"{name}: backend='cpu' cannot run this call: it was not compiled\. Install "
            r"g\+\+\. Use backend='eager' or 'auto'\.",
        ):
            call(backend="cpu")
        assert torch.equal(call(), call(backend="eager"))
    with pytest.raises(
        RuntimeError, match=r"the library of the CPU kernels is missing: it was not"
    ):
        library()


@compiled
def test_every_reason_against_a_call_is_given():
    meta = torch.device("meta")
    with pytest.raises(
        ValueError,
        match=r"backend='cpu' cannot run this call: the tensors are on 'meta'; torch\.complex64 is "
        r"not supported\. Use backend='eager' or 'auto'\.",
    ):
        backends.choose("cpu", meta, torch.complex64, function="graph_attention")
    assert backends.choose("auto", meta, torch.float32, function="graph_attention") == "eager"
    assert backends.choose("auto", X.device, X.dtype, function="graph_attention") == "cpu"


@pytest.mark.usefixtures("no_library")
def test_the_report_says_why_the_library_is_missing(capsys):
    report.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split(maxsplit=2)[:2] == ["backend", "cpu"]
        and line.endswith("missing: it was not compiled. Install g++")
        for line in lines
    )
    assert any(line.startswith("backend auto") and "takes eager" in line for line in lines)


@compiled
def test_the_report_of_this_installation(capsys):
    report.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["backend", "cpu", "available"] in lines
    assert ["backend", "auto", "takes", "cpu", "on", "CPU"] in lines


@pytest.fixture
def installed_in(tmp_path, monkeypatch):
    """A folder of a package, where the library would be."""
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    return tmp_path


def test_a_library_that_was_never_compiled(installed_in):
    library, reason = _native._load()
    assert library is None
    assert reason.startswith("it was not compiled when graphattn was installed. Install g++")


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def test_c62_a_file_that_is_no_library_is_named(installed_in):
    (installed_in / f"_cpu{SUFFIX}").write_text("of another machine")
    library, reason = _native._load()
    assert library is None
    assert reason.startswith(f"_cpu{SUFFIX} cannot be loaded: ")
    assert "file too short" in reason or "invalid ELF header" in reason or "mach-o" in reason


def test_c62_a_library_of_another_version_is_named(installed_in):
    other = next(Path(torch.__file__).parent.glob(f"_C{SUFFIX}"))
    (installed_in / f"_cpu{SUFFIX}").symlink_to(other)
    library, reason = _native._load()
    assert library is None
    assert reason.startswith(f"_cpu{SUFFIX} cannot be loaded: ")
    assert "graphattn_scan_edges" in reason


@compiled
def test_the_library_of_this_installation_is_found_again():
    library, reason = _native._load()
    assert reason == ""
    assert library.graphattn_use_isa(2) in (0, 1, 2)


# Building #########################################################################################

ROOT = Path(graphattn.__file__).parent.parent


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="installed without its source tree")
def test_a_build_without_a_compiler_succeeds_and_warns(tmp_path):
    pytest.importorskip("setuptools")
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
    )
    assert result.returncode == 0, result.stderr
    assert 'building extension "graphattn._cpu" failed' in result.stdout + result.stderr
    assert not list(tmp_path.rglob("_cpu*"))
