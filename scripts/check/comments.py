"""Checks that comments and docstrings name their things: `python -m scripts.check.comments`.

Half a sentence, such as `x: int  # of its upload`, leaves its subject to the reader. A comment that begins with one of
these words is half a sentence, unless it goes on a comment of the line before. "That of", "of which", "have what" and
"of before" leave out a noun, too. "Gets short", "are no room" and "come back later" have plainer words.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = "rollout", "rollout_gateway", "trainer_bridge", "kernels"
_WORDS = "of by for with which whose that so and or but than to from also"
#: A capital begins a sentence, as in "With tied embeddings the output ...", except with these words. "What a step
#: keeps" stands in place of a noun.
_CAPITALS = "Of Whose And Or Than What Those As"
_HALF = re.compile(rf"#?:?\s*(?:{'|'.join(_WORDS.split())}|{'|'.join(_CAPITALS.split())})\b(?!-)")
_ELLIPSIS = re.compile(
    r"\b(?:(?:that|those|others) of|of (?:which|before)|(?:have|has|had) what|what (?:have|has|had)|in vain|"
    r"gets? short|are no room|comes? back later)\b"
)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The comments, with the lines that follow in one: the number of the first line, and the text from `#` on."""
    begin, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if not (alone and last == token.start[0] - 1):
                if lines:
                    yield begin, " ".join(lines)
                begin, lines = token.start[0], []
            lines.append(token.string.lstrip("#: ") if lines else token.string)
            last = token.start[0] if alone else -1
    if lines:
        yield begin, " ".join(lines)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings: the line of the definition, and the text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node)
            if found:
                yield getattr(node, "lineno", 1), found


def problems(root: Path) -> list[str]:
    """A line for each comment and docstring that leaves a noun to the reader."""
    found = []
    for file in (file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        for line, comment in (*comments(text), *docstrings(text)):
            if _HALF.match(comment):
                found.append(f"{name}:{line}: half a sentence; begin with a noun: {comment:.100}")
            words = " ".join(comment.split())
            for match in _ELLIPSIS.finditer(words):
                near = words[max(0, match.start() - 50) : match.end() + 50]
                found.append(f"{name}:{line}: write plainer words, or the noun, in place of '{match[0]}': {near}")
    return found


def main() -> int:
    """Print the problems; returns 1 if there is any."""
    found = problems(Path.cwd())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
