"""The reference page of the files that one prompt runs through; `scripts.check.request_path` finds them."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from scripts.tables import table

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "reference" / "request_path.md"

_INTRODUCTION = """\
# The files of one prompt

For engineers who read the code: the modules in which a worker on the CPU calls a function for one prompt of token ids
and its four tokens, in the order of the first call (by several threads). `python -m scripts.check.request_path --write`
runs such a worker and writes the list.
"""


def listed_files() -> list[str]:
    """The files that the page lists."""
    return re.findall(r"^\|`(\S+\.py)`\|", PAGE.read_text(encoding="utf-8"), re.M)


def request_page(files: Iterable[str]) -> str:
    """The text of the page for these files: what each is, by the beginning of its docstring."""
    rows = [(f"`{file}`", _subject(_ROOT / file)) for file in files]
    return "\n".join([_INTRODUCTION, f"{len(rows)} files:", "", *table(("file", "subject"), rows)]) + "\n"


def _subject(path: Path) -> str:
    """A module's subject: the first clause of its docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    subject = re.split(r"[.,:;] ", first)[0].rstrip(".:")
    return re.sub(r"^(?:An?|The) ", "", subject)
