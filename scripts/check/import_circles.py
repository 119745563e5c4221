"""A contract for import-linter: no module imports itself through others. Imports for type checking count too."""

from collections.abc import Iterator

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class NoCircles(Contract):
    """Every set of modules that reach each other by imports is a circle; there may be none."""

    type_name = "no_circles"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the circles."""
        circles = sorted(_circles(graph), key=len)
        return ContractCheck(kept=not circles, metadata={"circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the circles."""
        for circle in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules in a circle: {', '.join(circle)}")


def _circles(graph: ImportGraph) -> Iterator[list[str]]:
    """Strongly connected components of more than one module."""
    reached = {module: _downstream(graph, module) for module in graph.modules}
    done: set[str] = set()
    for module in sorted(graph.modules):
        circle = sorted(other for other in reached[module] if module in reached[other])
        if module not in done and len(circle) > 1:
            done.update(circle)
            yield circle


def _downstream(graph: ImportGraph, module: str) -> set[str]:
    """The module and everything that it imports, directly or not."""
    found, todo = {module}, [module]
    while todo:
        new = graph.find_modules_directly_imported_by(todo.pop()) - found
        found |= new
        todo += new
    return found
