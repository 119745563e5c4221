"""The summaries that benchmarks write."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from scripts.bench.moe_kernels import summary
from scripts.bench.output import DEFAULT_FOLDER, command_line, spread, summary_text, write_results
from scripts.bench.service_load import FIGURES, over_turns
from scripts.bench.swap_rate import over_rounds


def test_a_summary_has_the_circumstances_and_a_line_for_each_entry_and_row(tmp_path: Path) -> None:
    path, rows = tmp_path / "new" / "folder.json", [{"rows": 8, "us": [1.5, 2.25]}, {"rows": 32, "by": {1: None}}]
    write_results(path, rows, shape="toy", layers=2, runs=[{"at": 1}], none=[])
    text = path.read_text()
    told = json.loads(text)
    named = ["command", "date", "machine", "versions", "layers", "none", "runs", "shape", "rows"]
    assert list(told) == named and text.count("\n") == 2 + len(named) + (1 + 1) + (2 + 1)
    assert told["rows"] == [rows[0], {"rows": 32, "by": {"1": None}}] and told["none"] == []
    assert told["versions"]["torch"] == torch.__version__ and told["machine"]["cores"] > 0
    assert told["command"] == command_line()
    assert command_line(["--note", "two words"]).endswith(" --note 'two words'")


def test_a_spread_is_that_of_the_values() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0]) == {"least": 1.0, "median": 2.5, "most": 4.0}
    assert spread([]) == {}


def test_rounds_with_updates_are_one_row() -> None:
    rounds = [
        {"tokens_per_s": 5.0, "published": 3, "applied": 2, "errors": {"a": 1}, "wait_s": 0.5},
        {"tokens_per_s": 7.0, "published": 3, "applied": 0, "errors": {"a": 2, "b": 1}, "wait_s": None},
    ]
    assert over_rounds(rounds) == {
        "rounds": 2,
        "tokens_per_s": {"least": 5.0, "median": 6.0, "most": 7.0},
        "published": 6,
        "applied": 2,
        "errors": {"a": 3, "b": 1},
        "wait_s": {"least": 0.5, "median": 0.5, "most": 0.5},
    }
    assert over_rounds([{"tokens_per_s": 5.0}]) == {"rounds": 1, "tokens_per_s": spread([5.0])}


def test_turns_of_a_load_are_one_row() -> None:
    turns = [
        {"turn": turn, "load": load, **dict.fromkeys(FIGURES, base + turn)}
        for turn in range(3)
        for load, base in (("none", 1.0), ("clients", 2.0), ("templates", 3.0))
    ]
    rows = over_turns(turns)
    assert [row["load"] for row in rows] == ["none", "clients", "templates"]
    assert rows[1] == {"load": "clients", **dict.fromkeys(FIGURES, {"least": 2.0, "median": 3.0, "most": 4.0})}


def test_a_layer_of_experts_has_its_times_and_errors_by_path() -> None:
    path = {"us": 20.5, "tbps": 3.7, "of_floor": 0.97}
    paths: dict[str, Any] = {"chosen": path, "vllm": path | {"us": 30.3}}
    sizes = {"tokens": 8, "distinct": 51.6, "floor_us": 19.9}
    row: dict[str, Any] = {**sizes, "paths": paths}
    us = {"chosen": 20.5, "vllm": 30.3}
    assert summary("s", "plain", row) == {"shape": "s", "format": "plain", **sizes, "us": us}
    checked = {name: at | {"errors": {"relative": at["us"]}} for name, at in paths.items()}
    found = summary("s", "plain", row | {"paths": checked, "rounded": {"relative": 1}, "sorted_gemm": {"relative": 2}})
    by = {"rounded": 1, "sorted_gemm": 2, "chosen": 20.5, "vllm": 30.3}
    assert found["errors"] == {name: {"relative": error} for name, error in by.items()}


def named_results(pages: list[Path]) -> set[str]:
    """The names of result files in pages, with `{a,b}` replaced by its parts; they may have a `*`."""
    found = set()
    for page in pages:
        left = re.findall(r"[\w{},*]+\.json\b", page.read_text())
        while left:
            name = left.pop()
            if parts := re.search(r"\{([^{}]*)\}", name):
                left += [name[: parts.start()] + part + name[parts.end() :] for part in parts[1].split(",")]
            else:
                found.add(name)
    return found


def test_every_result_is_a_summary_that_a_page_names() -> None:
    results, docs = sorted(DEFAULT_FOLDER.iterdir()), Path(__file__).parents[3] / "docs"
    names = named_results(sorted(docs.rglob("*.md")))
    assert results and not [path.name for path in results if not any(fnmatch(path.name, name) for name in names)]
    for path in results:
        text = path.read_text()
        assert summary_text(json.loads(text)) == text, f"{path.name} was not written by scripts.bench.output"
    assert sum(path.read_text().count("\n") for path in results) <= 3000


def test_every_result_that_the_pages_of_figures_name_is_there() -> None:
    docs, results = Path(__file__).parents[3] / "docs", [path.name for path in DEFAULT_FOLDER.iterdir()]
    pages = [docs / "performance.md", *(docs / "benchmarks").glob("*.md")]
    assert not [name for name in named_results(pages) if not any(fnmatch(result, name) for result in results)]
