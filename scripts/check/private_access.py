"""Finds accesses to private names of another package: `python -m scripts.check.private_access`.

A name is private to the folder in which a class, a function or an attribute of it is made. Names of other libraries and
the methods of named tuples do not count. The product has no such access. Tests have the ones that
`private_access_allowed.txt` lists, a line each: `file: expression  # why`; `monkeypatch.setattr` of a private name is
one, too. A line that no test needs, or without a reason, is an error.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
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


def problems(root: Path, lines: Iterable[str]) -> list[str]:
    """Accesses that are not allowed, and lines of allowed ones that no test has any more, or that give no reason."""
    reasons = {entry: why for entry, _, why in (line.partition("  # ") for line in lines)}
    outside, of_tests = accesses(root)
    allowed = {entry for entry, why in reasons.items() if why.strip()}
    new = [*outside, *(access for access in of_tests if access.entry not in allowed)]
    unused = sorted(reasons.keys() - {access.entry for access in of_tests})
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
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=entries):
                names |= {str(entry.value) for entry in ast.walk(entries) if isinstance(entry, ast.Constant)}
    return {name for name in names if _private(name)}


def _uses(
    root: Path, file: Path, tree: ast.Module, homes: dict[str, set[Path]], own: frozenset[str] | set[str] = frozenset()
) -> Iterator[Access]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                expression = ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(expression)), _]):
                name = expression.rpartition(".")[2]
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[owner, ast.Constant(value=str(name)), _]):
                expression = f"{ast.unparse(owner)}.{name}"
            case _:
                continue
        if _private(name) and name not in own and name in homes and file.parent not in homes[name]:
            yield Access(file.relative_to(root), node.lineno, expression)


def main() -> int:
    """Print the problems; returns 1 if there is any."""
    found = problems(Path.cwd(), ALLOWED.read_text(encoding="utf-8").splitlines())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
