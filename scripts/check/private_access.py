"""Finds accesses to private names of another package: `python -m scripts.check.private_access`.

A name is private to the folder in which a class, a function or an attribute of it is made. Names of other libraries and
the methods of named tuples do not count. The product has no such access. Tests have the ones that
`private_access_allowed.txt` lists, a line each: `file: expression`. A line that no test needs is an error, too.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCT = "rollout", "rollout_gateway", "trainer_bridge", "kernels"
ALLOWED = Path(__file__).with_name("private_access_allowed.txt")
#: Public by the names that a library gives them.
_OF_LIBRARIES = {"_replace", "_asdict", "_fields", "_make", "_sleep", "_schema", "_attn_implementation"}


class Access(NamedTuple):
    """A private name that is used outside of its folder. `file` is relative to the root."""

    file: Path
    line: int
    expression: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.expression} is private to another package"

    @property
    def entry(self) -> str:
        """Its line in the list of allowed accesses."""
        return f"{self.file}: {self.expression}"


def accesses(root: Path) -> tuple[list[Access], list[Access]]:
    """Accesses of the product and of the tests below `root`."""
    product = {file: _tree(file) for folder in PRODUCT for file in sorted((root / folder).rglob("*.py"))}
    homes: dict[str, set[Path]] = defaultdict(set)
    for file, tree in product.items():
        for name in _made(tree):
            homes[name].add(file.parent)
    outside = [access for file, tree in product.items() for access in _uses(root, file, tree, homes)]
    tests = [(file, _tree(file)) for file in sorted((root / "tests").rglob("*.py"))]
    return outside, [access for file, tree in tests for access in _uses(root, file, tree, homes, _made(tree))]


def problems(root: Path, allowed: set[str]) -> list[str]:
    """Accesses that are not allowed, and allowed ones that no test has any more."""
    outside, of_tests = accesses(root)
    new = [*outside, *(access for access in of_tests if access.entry not in allowed)]
    unused = sorted(allowed - {access.entry for access in of_tests})
    return [*map(str, new), *(f"{ALLOWED.name}: remove the line {entry!r}: no test needs it" for entry in unused)]


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
    root: Path, file: Path, tree: ast.Module, homes: dict[str, set[Path]], own: frozenset[str] | set[str] = frozenset()
) -> Iterator[Access]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not _private(node.attr) or node.attr in own:
            continue
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not of_itself and node.attr in homes and file.parent not in homes[node.attr]:
            yield Access(file.relative_to(root), node.lineno, ast.unparse(node))


def main() -> int:
    """Print the problems; returns 1 if there is any."""
    found = problems(Path.cwd(), set(ALLOWED.read_text(encoding="utf-8").splitlines()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
