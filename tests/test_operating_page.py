"""docs/operating.md says what the code says: its metrics, its sizes, and the messages that it has cures for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from rollout.config import EngineSettings
from rollout.engine.device.capacity import DeviceMemory, kv_pages, weight_bytes
from rollout.engine.kv.memory import pages_for
from rollout.engine.step.rehearsal import StepNeeds
from rollout.engine.step.row_state import RowState
from rollout.metrics.report import METRICS, VERSION_METRICS
from rollout.models.decoder import Decoder
from rollout.models.registry import spec_from_config
from rollout.models.source import read_config
from scripts.bench.shapes import write_checkpoint

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
_GIB = 2**30
#: Messages that are put together from parts.
_COMPOSED = {
    "the weight receiver has ended": ("the weight receiver", " has ended"),
    "the metrics thread has ended": ("the metrics thread", " has ended"),
}
#: What a trainer's process logs, not a worker.
_TRAINERS = {"group_ranks.py", "journal.py", "kept_update.py", "publisher.py", "transport_choice.py"}
_TRAINERS_LINES = {"sending weights failed"}


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    folders = (ROOT / "rollout", ROOT / "trainer_bridge")
    paths = sorted(path for folder in folders for path in folder.rglob("*.py") if "bench" not in path.parts)
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def text_of(node: ast.AST) -> str | None:
    """A string of the code; what is filled in is a line break."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\w|\.\d\w|\d\w)", "\n", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "\n" for value in node.values)
    return None


@cache
def strings() -> list[str]:
    nodes = (node for _, tree in sources() for node in ast.walk(tree))
    return [text for text in map(text_of, nodes) if text]


def logged() -> Iterator[tuple[str, str]]:
    """File and message of every line that a worker logs at `warning` or above."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("warning", "error", "critical", "exception")
                and ast.unparse(node.func.value) in ("log", "logger", "_log")
                and (text := text_of(node.args[0])) is not None
            ):
                yield path.name, text


def messages() -> list[str]:
    """The messages of the tables, and of the sentence below them."""
    text = section("Messages and their cures")
    told = [cell for line in text.splitlines() if line.startswith("| `") for cell in [line.split(" | ")[0]]]
    client = text.split("To a client, as `code`")[1]
    codes = set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", client, re.M))
    found = [name for cell in told for name in re.findall(r"`([^`]+)`", cell)]
    return [name for name in found if name not in {code for pair in codes for code in pair}]


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(r"[\s\S]*?".join(re.escape(part.strip()) for part in message.split("...") if part.strip()))


def test_every_metric_that_a_worker_logs_has_advice():
    advice = PAGE.split("<!-- advice: begin -->")[1].split("<!-- advice: end -->")[0]
    names = re.findall(r"^\| `([^`]+)` \|", advice, re.M)
    table = PAGE.split("<!-- metrics: begin -->")[1].split("<!-- metrics: end -->")[
        0
    ]  # that of the code: test_settings
    assert sorted(names) == sorted(re.findall(r"^\| `([^`]+)` \|", table, re.M))
    assert {metric.name for metric in (*METRICS, *VERSION_METRICS)} <= set(names)


@pytest.mark.parametrize("message", messages())
def test_every_message_with_a_cure_is_one_that_the_code_says(message: str):
    for part in _COMPOSED.get(message, (message,)):
        assert any(pattern(part).search(text) for text in strings()), f"nothing says {part!r}"


def test_every_warning_and_error_that_a_worker_logs_has_a_cure():
    known = [pattern(message) for message in messages()]
    missing = [
        (file, text)
        for file, text in logged()
        if file not in _TRAINERS
        and text not in _TRAINERS_LINES
        and text.strip()
        and not any(p.search(text) for p in known)
    ]
    assert not missing, missing


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-30b-a3b"])
def test_the_worked_example_is_what_the_code_would_do(shape: str, tmp_path: Path):
    config, architecture = read_config(write_checkpoint(shape, tmp_path))
    model = Decoder(spec_from_config(config, architecture), torch.bfloat16, torch.device("meta"))
    rows, context, settings = 128, 40_960, EngineSettings(max_rows=128)
    state = RowState.nbytes(rows, pages_for(context, 16), model.spec.vocab)
    free = 139 * _GIB - weight_bytes(model) - state
    memory = DeviceMemory(weight_bytes(model), free, StepNeeds(3 * _GIB, 0))
    pages = kv_pages(settings, model, torch.bfloat16, context, memory)
    token = model.spec.kv_bytes_per_token(torch.bfloat16)
    text = section("How many rows, how much KV")
    for said in (
        f"{token // 1024} KiB | {16 * token / 2**20:g} MiB | {weight_bytes(model) / _GIB:.1f} GiB",
        f"139 - {weight_bytes(model) / _GIB:.1f} - {state / _GIB:.1f} = {free / _GIB:.1f} GiB",
        f"{free / _GIB:.1f} * 0.85 - 3 = {free * 0.85 / _GIB - 3:.1f} GiB",
        f"{16 * token / 2**20:g} MiB = {pages:,}",
        f"| {16 * pages:,} |",
    ):
        assert said in text, said
    column = 1 if shape == "qwen3-8b" else 2
    for label, each in (("of 40,960", context), ("of 1,024 + 16,384", 17_408), ("the same, started", 9_216)):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {label}") or label in line and "|" in line)
        assert row.split("|")[column + 1].strip() == str(16 * pages // each)
