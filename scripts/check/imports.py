"""Finds imports of our own modules and names that do not exist: `python -m scripts.check.imports`.

It reads sources only. So a compiled file of a deleted module does not hide the fault. Imports inside of functions and
below `TYPE_CHECKING` count, too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: Our packages, and the folder that each is in.
PACKAGES = {
    "rollout": ".",
    "rollout_gateway": ".",
    "trainer_bridge": ".",
    "rollout_kernels": "kernels",
    "scripts": ".",
    "tests": ".",
}


def problems(root: Path) -> list[str]:
    """Imports below `root` without a module or a name, a line each."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in _sources(root)}
    modules = {_module(root, file): _names(tree) for file, tree in trees.items()}
    # A folder is a module, too, with or without an `__init__.py`.
    for module in [*modules]:
        while "." in module:
            module, _, name = module.rpartition(".")
            modules.setdefault(module, set()).add(name)
    return [
        f"{file.relative_to(root)}:{line}: there is no {missing}"
        for file, tree in trees.items()
        for line, missing in _missing(tree, _package(root, file), modules)
    ]


def _sources(root: Path) -> Iterator[Path]:
    for package, folder in PACKAGES.items():
        yield from sorted((root / folder / package).rglob("*.py"))


def _module(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[parts[0] == "kernels" : -1 if parts[-1] == "__init__" else None])


def _package(root: Path, file: Path) -> list[str]:
    """The parts of the package that holds a file, from which its relative imports count."""
    return _module(root, file.parent / "__init__.py").split(".")


def _names(tree: ast.Module) -> set[str]:
    """What the statements of a module bind outside of functions and classes."""
    names = set()
    statements: list[ast.AST] = [tree]
    while statements:
        node = statements.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in imported)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
        statements += ast.iter_child_nodes(node)
    if "__getattr__" in names:  # gives names that the module has as strings
        names.update(str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return names


def _missing(tree: ast.Module, package: list[str], modules: dict[str, set[str]]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES and alias.name not in modules:
                    yield node.lineno, f"module {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            if module.partition(".")[0] not in PACKAGES:
                continue
            if module not in modules:
                yield node.lineno, f"module {module}"
                continue
            for alias in node.names:
                if alias.name != "*" and alias.name not in modules[module]:
                    yield node.lineno, f"{alias.name} in {module}"


def main() -> int:
    """Print the problems; returns 1 if there is any."""
    found = problems(Path.cwd())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
