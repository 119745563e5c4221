"""Tables of generated pages."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *cells)]
