"""README and documentation: the code runs, the output is what it says, links lead somewhere."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PUBLIC = (
    "graphattn",
    "graphattn.nn",
    "graphattn.models",
    "graphattn.transforms",
    "graphattn.patterns",
    "graphattn.data",
    "graphattn.experiment",
    "graphattn.testing",
)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str, str, int]]:
    """Language, title, text and first line of every fenced block."""
    text = page.read_text()
    return [
        (
            match[2],
            match[3].strip(),
            textwrap.dedent(match[4]),
            text.count("\n", 0, match.start(4)) + 1,
        )
        for match in FENCE.finditer(text)
    ]


def with_python() -> list[Path]:
    return [page for page in PAGES if any(block[0] == "python" for block in blocks(page))]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


# Code #############################################################################################


@pytest.mark.parametrize("page", with_python(), ids=page_id)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace. A block titled "Output" is what the block before it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "page"}
    printed = ""
    for language, title, text, line in blocks(page):
        if language == "python":
            # Blank lines in front, so that a traceback names the line of the page.
            code = compile("\n" * (line - 1) + text, str(page), "exec", dont_inherit=True)
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(code, namespace)
            printed = stream.getvalue()
        elif title == 'title="Output"':
            assert printed.rstrip() == text.rstrip(), f"{page_id(page)}:{line}"


def test_readme_example_is_about_ten_lines() -> None:
    language, _, text, _ = blocks(ROOT / "README.md")[0]
    code = [line for line in text.splitlines() if line and not line.startswith(("import", "from"))]
    assert language == "python"
    assert len(code) <= 10


def rows_of(page: Path, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``first``."""
    table = re.search(
        rf"^\| {first} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    )
    assert table is not None
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


def test_readme_has_the_accuracies_of_the_results_page() -> None:
    results = {row[0]: row for row in rows_of(DOCS / "results.md", "set")}
    rows = rows_of(ROOT / "README.md", "set")
    for name, ours, published in rows:
        assert results[name][2] == f"**{ours}**"
        quoted = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", results[name][7]).split("; ")
        assert set(published.split(", ")) <= set(quoted)
        best = max(quoted, key=lambda text: float(re.findall(r"\d+\.\d+", text)[0]))
        assert best in published
    below = {name for name, row in results.items() if "missed" in row[3]}
    assert below <= {row[0] for row in rows}


def test_readme_has_what_the_attention_study_found() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    found = {}
    for name, _, _, *cells, _ in rows_of(DOCS / "examples/attention_study.md", "set"):
        found[name] = [[float(number) for number in cell.split(" ± ")] for cell in cells]
    (attention, _), (mean, _) = found.pop("lookup")
    assert f"attention is right in {attention} % of cases, means in {mean} %" in readme
    assert "on five real graphs means are as good, within a standard deviation" in readme
    assert len(found) == 5
    for (attention, std), (mean, std_of_mean) in found.values():
        assert attention - mean <= max(std, std_of_mean)


def test_readme_has_the_times_of_the_benchmarks() -> None:
    measured: dict[tuple[str, str], dict[str, str]] = {}
    with (ROOT / "examples/benchmarks/results/ogbn-arxiv.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            keys = ("what", "heads", "head_dim", "dtype", "threads", "direction")
            case = tuple(row[key] for key in keys)
            if case == ("operator", "8", "32", "float32", "2", "forward+backward"):
                measured[row["allocator"], row["contestant"]] = row
    rows = {row[0].split(":")[0]: row[1:] for row in rows_of(ROOT / "README.md", "contestant")}
    assert {("default", name) for name in rows} == {key for key in measured if key[0] == "default"}
    for name, (seconds, warm, peak) in rows.items():
        assert seconds == f"{float(measured['default', name]['median_s']):.2f}"
        assert warm == f"{float(measured['jemalloc', name]['median_s']):.2f}"
        assert peak == f"{float(measured['default', name]['peak_bytes']) / 2**20:,.0f}"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


# Links and names ##################################################################################


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if path == "" else page.parent / path
        assert file.is_file(), f"{page_id(page)}: {target} leads nowhere"
        if anchor:
            assert anchor in anchors(file), f"{page_id(page)}: {target} has no such heading"


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .+: (\S+\.md)$", config, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_on_the_api_page(name: str) -> None:
    documented = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    here = {path for path in documented if path.rpartition(".")[0] == name}
    assert here == {f"{name}.{public}" for public in importlib.import_module(name).__all__}


def test_names_in_backquoted_references_are_public() -> None:
    documented = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    for page in PAGES:
        for path in re.findall(r"`\]\[([\w.]+)\]", page.read_text()):
            assert path in documented, f"{page_id(page)}: {path}"


# The site #########################################################################################


def test_site_builds_strictly_and_shows_no_sphinx_markup(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs the docs extra: make docs")
    pytest.importorskip("material", reason="needs the docs extra: make docs")
    mkdocs = [sys.executable, "-W", "ignore", "-m", "mkdocs"]
    options = ["--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(
        [*mkdocs, "build", "--strict", "--quiet", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for markup in (":func:", ":class:", ":meth:", ":math:", ".. math::", "&gt;&gt;&gt; </p>"):
        assert markup not in api
    for name in PUBLIC:
        for public in importlib.import_module(name).__all__:
            assert f'id="{name}.{public}"' in api
    assert '<span class="arithmatex">' in api
    assert '<div class="arithmatex">' in api
    # A link from a docstring, to the anchor of what it names.
    assert re.search(r'<a [^>]*href="#graphattn\.graph_attention"[^>]*><code>', api)


def test_sphinx_forms_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe", reason="needs the docs extra: make docs")
    monkeypatch.syspath_prepend(str(DOCS))
    to_markdown = importlib.import_module("sphinx_roles").to_markdown
    assert to_markdown("See :func:`~a.b.f`.", lambda name: None) == "See `f()`."
    assert to_markdown("See :class:`C`.", lambda name: "a.C") == (
        'See <autoref identifier="a.C" optional><code>C</code></autoref>.'
    )
    assert to_markdown(r"with :math:`\alpha_e` in it") == r"with \(\alpha_e\) in it"
    assert to_markdown(".. math:: a = b\n    + c\n\nText.") == "\n\\[\na = b\n+ c\n\\]\n\n\nText."
    assert r"\begin{aligned}" in to_markdown(".. math::\n    a & b \\\\ c & d")
    assert to_markdown("    >>> 1 + 1\n    2\n\nText.") == (
        "    ```pycon\n    >>> 1 + 1\n    2\n    ```\n\nText."
    )
