"""A griffe extension: docstrings with Sphinx's roles, as the Markdown that mkdocstrings renders.

The docstrings of the package read well in an editor and in ``help()``. Some of their forms mean
nothing to Markdown and are rewritten when the site is built: roles (``:func:`name```), formulas
(``:math:`` and ``.. math::``) and bare doctests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?P<role>func|class|meth|mod|attr|exc|data):`(?P<target>[^`]+)`")
INLINE_MATH = re.compile(r":math:`(?P<tex>[^`]+)`")
# Griffe takes what stands before a colon for the type; here it is the names of what is returned.
NAMED = re.compile(r"(?<=Returns:\n)( *`+\([^`]*\)`+):")
WIDE = 100  # characters of TeX that fit the width of a page
DIRECTIVE = re.compile(r"^(?P<indent> *)\.\. math::(?P<rest>.*)$")


class SphinxRoles(griffe.Extension):
    """Rewrites every docstring of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visits the objects of the package, each where it is defined."""
        visit(pkg)


def visit(obj: griffe.Object) -> None:
    """Rewrites the docstring of ``obj`` and of all it holds."""
    if obj.docstring is not None:
        obj.docstring.value = to_markdown(obj.docstring.value, lambda name: resolve(obj, name))
    for member in obj.members.values():
        if not member.is_alias:
            visit(member)


def resolve(obj: griffe.Object, name: str) -> str | None:
    """The full path of ``name`` as it is seen from ``obj``; ``None`` when it names nothing."""
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        return name if "." in name else None


def to_markdown(text: str, resolve: Callable[[str], str | None] = lambda name: name) -> str:
    """A docstring in Markdown.

    Args:
        text: The docstring, in Google form, with Sphinx's roles.
        resolve: From the name in a role to the full path of the object, or ``None``.
    """
    out: list[str] = []
    lines = text.splitlines()
    while lines:
        directive = DIRECTIVE.match(lines[0])
        if directive is not None:
            out += formula(directive["indent"], directive["rest"], lines)
        elif lines[0].lstrip().startswith(">>> "):
            out += doctest(lines)
        else:
            out.append(lines.pop(0))
    text = NAMED.sub(r"\1&#58;", "\n".join(out))
    text = INLINE_MATH.sub(lambda match: rf"\({match['tex']}\)", text)
    return ROLE.sub(lambda match: link(match["target"], match["role"], resolve), text)


def formula(indent: str, rest: str, lines: list[str]) -> list[str]:
    """Takes a ``.. math::`` directive off the front of ``lines``."""
    lines.pop(0)
    tex = [rest.strip()]
    while lines and lines[0].strip() and lines[0].startswith(indent + " "):
        tex.append(lines.pop(0).strip())
    body = "\n".join(line for line in tex if line)
    if "&" in body and r"\begin" not in body:  # Sphinx aligns at & by itself
        body = f"\\begin{{aligned}}\n{body}\n\\end{{aligned}}"
    elif len(body) > WIDE and r"\qquad" in body:
        parts = [part.strip() for part in body.split(r"\qquad")]
        body = "\\begin{gathered}\n" + "\\\\[0.6em]\n".join(parts) + "\n\\end{gathered}"
    block = ["", r"\[", *body.splitlines(), r"\]", ""]
    return [indent + line if line else line for line in block]


def doctest(lines: list[str]) -> list[str]:
    """Takes a doctest off the front of ``lines``, up to the next blank line, into a fence."""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    block = [f"{indent}```pycon"]
    while lines and lines[0].strip():
        block.append(lines.pop(0))
    return [*block, f"{indent}```"]


def link(target: str, role: str, resolve: Callable[[str], str | None]) -> str:
    """A name in code style, and a link where the site documents the object."""
    hidden = target.startswith("~")
    target = target.lstrip("~")
    shown = target.rpartition(".")[2] if hidden else target
    shown += "()" if role in ("func", "meth") else ""
    path = resolve(target)
    if path is None:
        return f"`{shown}`"
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
