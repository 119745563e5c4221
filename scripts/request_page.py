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
and its four tokens. `python -m scripts.check.request_path --write` runs such a worker and writes the list. Reports
of the worker about itself are left out.

Read the core in this order.
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
#: The second part, in the order in which to read it.
QUEUE_AND_FORWARD = (
    "rollout/engine/schedule/queue_feed.py",
    "rollout/engine/kv/prefixes.py",
    "rollout/engine/step/pipeline.py",
    "rollout/engine/step/row_state.py",
    "rollout/models/decoder.py",
    "rollout/models/layers.py",
    "rollout/models/batch.py",
    "kernels/rollout_kernels/attention/paged.py",
)


def listed_files() -> list[str]:
    """The files that the page lists."""
    return re.findall(r"^\|(?:\d+\|)?`(\S+\.py)`\|", PAGE.read_text(encoding="utf-8"), re.M)


def request_page(files: Iterable[str]) -> str:
    """The text of the page for these files: what each is, by the beginning of its docstring."""
    read = (*CORE, *QUEUE_AND_FORWARD)
    rows = [(f"{number}", f"`{file}`", _subject(_ROOT / file)) for number, file in enumerate(read, start=1)]
    others = [(f"`{file}`", _subject(_ROOT / file)) for file in sorted(set(files) - set(read))]
    lines = [_INTRODUCTION, "## The core", "", *table(("", "file", "subject"), rows[: len(CORE)]), ""]
    lines += ["## The queue and the forward", "", *table(("", "file", "subject"), rows[len(CORE) :]), ""]
    lines += ["## The others", "", *table(("file", "subject"), others)]
    return "\n".join(lines) + "\n"


def _subject(path: Path) -> str:
    """A module's subject: its docstring up to a full stop, a colon or the only comma, without parentheses."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = re.sub(r" \([^)]*\)", "", " ".join(docstring.partition("\n\n")[0].split()))
    subject = re.split(r"[.:;](?: |$)", first)[0]
    if subject.count(", ") == 1:  # two commas are around an insertion, or in a list
        subject = subject.partition(", ")[0]
    return re.sub(r"^(?:An?|The) ", "", subject)
