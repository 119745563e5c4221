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
runs such a worker and writes the list. What a worker does to report about itself
is left out.

A plain row goes from the socket to its tokens in the files with a number. Read these, in this order; the others return
at once for it, or are parts to look up.
"""
#: The core, in the order in which to read it.
CORE = (
    "rollout/service/server.py",
    "rollout/service/generation.py",
    "rollout/engine/loop.py",
    "rollout/engine/schedule/scheduler.py",
    "rollout/engine/sequence/sequence.py",
    "rollout/engine/schedule/roster.py",
    "rollout/engine/schedule/admission.py",
    "rollout/engine/kv/allocator.py",
    "rollout/engine/kv/pool.py",
    "rollout/engine/sequence/sequence_kv.py",
    "rollout/engine/schedule/plan.py",
    "rollout/engine/step/pack.py",
    "rollout/engine/upload.py",
    "rollout/engine/step/execute.py",
    "rollout/engine/step/slot.py",
    "rollout/engine/step/device_step.py",
    "rollout/engine/step/sampler.py",
    "rollout/engine/sequence/drawn_tokens.py",
    "rollout/engine/schedule/completion_events.py",
)


def listed_files() -> list[str]:
    """The files that the page lists."""
    return re.findall(r"^\|`(\S+\.py)`\|", PAGE.read_text(encoding="utf-8"), re.M)


def request_page(files: Iterable[str]) -> str:
    """The text of the page for these files: what each is, by the beginning of its docstring."""
    numbers = {file: number for number, file in enumerate(CORE, start=1)}
    rows = [(f"`{file}`", f"{numbers.get(file, '')}", _subject(_ROOT / file)) for file in files]
    return "\n".join([_INTRODUCTION, f"{len(rows)} files:", "", *table(("file", "read", "subject"), rows)]) + "\n"


def _subject(path: Path) -> str:
    """A module's subject: the first clause of its docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    subject = re.split(r"[.,:;] ", first)[0].rstrip(".:")
    return re.sub(r"^(?:An?|The) ", "", subject)
