"""How the package hangs together: who imports whom, what an import loads, what is documented."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from torch_geometric.nn import MessagePassing

import graphattn
from graphattn import backends

PACKAGE = Path(graphattn.__file__).parent

# Each may import those to its right, never those to its left.
ORDER = [
    "models",
    "nn",
    "functional",
    "_ops",
    "backends",
    "dropout",
    "transforms",
    "patterns",
    "graph",
    "_native",
    "_checks",
]


def modules():
    """Names and files of all modules of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


NAMES = {name for name, _ in modules()}


def imports(name, path):
    """The modules of the package that a module imports, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in NAMES else node.module
                for alias in node.names
            }
    return {module for module in found if module.split(".")[0] == "graphattn"}


IMPORTS = {name: imports(name, path) for name, path in modules()}


def layer(module):
    return module.split(".")[1] if "." in module else ""


def reached(module):
    """Everything of the package that importing a module brings in."""
    seen, left = set(), [module]
    while left:
        at = left.pop()
        if at not in seen:
            seen.add(at)
            left += IMPORTS.get(at, ())
    return seen


def test_the_rules_are_read_from_real_imports():
    assert "graphattn.functional" in IMPORTS["graphattn"]
    assert {"graphattn.graph", "graphattn.backends.scatter"} <= IMPORTS["graphattn.functional"]
    assert "graphattn.reference" in reached("graphattn.testing")


@pytest.mark.parametrize("module", sorted(name for name in NAMES if layer(name) in ORDER))
def test_left_uses_right_and_nothing_else(module):
    rank = ORDER.index(layer(module))
    for other in IMPORTS[module]:
        assert layer(other) in ORDER, f"{module} imports {other}"
        if layer(other) == layer(module):
            assert PACKAGE.joinpath(layer(module)).is_dir(), f"{module} imports {other}"
        else:
            assert ORDER.index(layer(other)) > rank, f"{module} imports {other}"


@pytest.mark.parametrize("module", sorted(n for n in NAMES if n.startswith("graphattn.backends")))
def test_backends_never_import_one_another_but_for_what_they_share(module):
    backend = ".".join(module.split(".")[:3])
    siblings = {other for other in IMPORTS[module] if other.startswith("graphattn.backends")}
    shared = {"graphattn.backends.composite", "graphattn.backends.arguments"}
    assert {other for other in siblings if not other.startswith(backend)} <= shared
    if module in shared | {"graphattn.backends"}:
        assert not siblings


@pytest.mark.parametrize("module", ["graphattn.reference", "graphattn.testing"])
def test_references_rest_on_no_backend(module):
    for other in reached(module):
        assert layer(other) not in ("backends", "functional", "_ops", "nn"), other


def test_no_module_imports_the_package_as_a_whole():
    inside = {name for name, found in IMPORTS.items() if "graphattn" in found}
    assert inside <= {"graphattn.__main__", "graphattn.experiment"}


def test_no_assert_outside_testing():
    for name, path in modules():
        if name == "graphattn.testing":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert not lines, f"{name}: assert in lines {lines}"


def loaded_by(statement, before="import torch, torch_geometric"):
    """Modules that a statement loads in a fresh interpreter which has run another before."""
    script = (
        f"import sys, warnings; warnings.simplefilter('ignore'); {before}; "
        f"start = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - start))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return set(result.stdout.split())


def test_import_loads_nothing_heavy_and_no_optional_backend():
    loaded = loaded_by("import graphattn")
    assert {"graphattn", "graphattn.functional", "graphattn.graph"} <= loaded
    heavy = {
        "ctypes.util",
        "distutils",
        "matplotlib",
        "networkx",
        "ogb",
        "pandas",
        "scipy",
        "setuptools",
        "subprocess",
        "torch_scatter",
        "tqdm",
        "triton",
    }
    assert not {name.split(".")[0] for name in loaded} & heavy
    assert not loaded & {f"graphattn.backends.{name}" for name in ("scatter", "triton")}
    assert not loaded & {"graphattn.nn", "graphattn.data", "graphattn.models", "graphattn.testing"}


def test_import_works_without_torch_scatter():
    block = "import sys; sys.modules['torch_scatter'] = None; import torch, torch_geometric"
    call = (
        "import graphattn; g = graphattn.Graph(torch.tensor([[0], [1]]), 2); "
        "x = torch.ones(2, 1, 1); graphattn.graph_attention(x, x, x, g)"
    )
    assert "graphattn.backends.scatter" not in loaded_by(call, before=block)


def public():
    """Every public object of the package with its full name."""
    found = {}
    for info in pkgutil.walk_packages([str(PACKAGE)], prefix="graphattn."):
        last = info.name.rpartition(".")[2]
        if last in ("__main__", "_cpu") or backends.missing(last) is not None:
            continue
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            found[f"{info.name}.{name}"] = getattr(value, "fn", value)  # of a Triton kernel
    found |= {f"graphattn.{name}": getattr(graphattn, name) for name in graphattn.__all__}
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_and_no_keyword_catch_all(name):
    value = PUBLIC[name]
    if not callable(value):
        return  # a constant, told about by a comment or its module
    assert inspect.getdoc(value), f"{name} has no docstring"
    if not (inspect.isclass(value) and issubclass(value, MessagePassing)):
        for parameter in inspect.signature(value).parameters.values():
            assert parameter.kind is not parameter.VAR_KEYWORD, f"{name} takes **{parameter.name}"
    if not inspect.isclass(value):
        return
    for member, function in vars(value).items():
        if member.startswith("_"):
            continue
        if isinstance(function, property):
            documented = function.__doc__ or f"{member}:" in inspect.getdoc(value)
            assert documented, f"{name}.{member} has no docstring"
        elif inspect.isfunction(function) or isinstance(function, (classmethod, staticmethod)):
            method = getattr(value, member)
            assert inspect.getdoc(method), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", graphattn.__all__)
def test_public_docstrings_show_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(graphattn, name))


def test_the_first_sentence_of_a_module_says_what_it_is_for():
    for name, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name


def test_c61_building_the_package_needs_no_torch():
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("the package is installed without its source tree")
    build = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert [requirement.split(">")[0] for requirement in build["requires"]] == ["setuptools"]
