"""Finds accesses to private names of another package: `python -m scripts.check.private_access`.

A name is private to the folder in which a class, a function or an attribute of it is made. Names of other libraries and
the methods of named tuples do not count. Tests have some left; no new one may come.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCT = "rollout", "trainer_bridge", "kernels"
#: Public by the names that a library gives them.
_OF_LIBRARIES = {"_replace", "_asdict", "_fields", "_make", "_sleep", "_schema", "_attn_implementation"}


#: Accesses of tests that are left. Lower it when one goes.
MOST_OF_TESTS = 62


class Access(NamedTuple):
    """A private name that is used outside of its folder."""

    file: Path
    line: int
    expression: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.expression} is private to another package"


def accesses(root: Path) -> tuple[list[Access], list[Access]]:
    """Accesses of the product and of the tests below `root`."""
    product = {file: _tree(file) for folder in PRODUCT for file in sorted((root / folder).rglob("*.py"))}
    homes: dict[str, set[Path]] = defaultdict(set)
    for file, tree in product.items():
        for name in _made(tree):
            homes[name].add(file.parent)
    outside = [access for file, tree in product.items() for access in _uses(file, tree, homes)]
    tests = [(file, _tree(file)) for file in sorted((root / "tests").rglob("*.py"))]
    return outside, [access for file, tree in tests for access in _uses(file, tree, homes, _made(tree))]


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _OF_LIBRARIES


def _made(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(name)):  # an entry of __slots__
                names.add(name)
    return {name for name in names if _private(name)}


def _uses(
    file: Path, tree: ast.Module, homes: dict[str, set[Path]], own: frozenset[str] | set[str] = frozenset()
) -> Iterator[Access]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not _private(node.attr) or node.attr in own:
            continue
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not of_itself and node.attr in homes and file.parent not in homes[node.attr]:
            yield Access(file, node.lineno, ast.unparse(node))


def main() -> int:
    """Print what was found and is not allowed; returns 1 if there is any."""
    outside, of_tests = accesses(Path.cwd())
    found = [*outside, *(of_tests if len(of_tests) > MOST_OF_TESTS else [])]
    for access in found:
        print(access)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
