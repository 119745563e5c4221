"""Charts and tables of docs/benchmarks: the committed files are what the script makes of the committed summaries."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rollout.config import EngineSettings
from scripts.bench import charts
from scripts.bench.bars import Panel, draw
from scripts.bench.output import DEFAULT_FOLDER
from scripts.bench.summaries import figure, row, rows, shown_command, source
from scripts.bench.tables import Table, page

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_files_are_what_the_script_writes_from_the_summaries() -> None:
    assert charts.stale(charts.FOLDER) == []


def test_a_changed_missing_or_left_over_file_is_found_and_mended(tmp_path: Path) -> None:
    charts.main(["--folder", str(tmp_path)])
    charts.main(["--check", "--folder", str(tmp_path)])
    chart, table, extra = tmp_path / "decode.svg", tmp_path / "groups.md", tmp_path / "old.svg"
    chart.write_text(chart.read_text().replace("3.88", "3.87"))
    table.unlink()
    extra.write_text("")
    assert charts.stale(tmp_path) == ["decode.svg", "groups.md", "old.svg"]
    with pytest.raises(SystemExit) as ended:
        charts.main(["--check", "--folder", str(tmp_path)])
    assert ended.value.code == 1
    charts.main(["--folder", str(tmp_path)])
    assert charts.stale(tmp_path) == []


def test_performance_shows_every_chart() -> None:
    shown = re.findall(r"\]\(benchmarks/(\w+\.svg)\)", (charts.FOLDER.parent / "performance.md").read_text())
    assert sorted(shown) == sorted(f"{name}.svg" for name in charts.CHARTS)


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_is_well_formed_and_nothing_is_outside_of_it(name: str) -> None:
    drawing = ET.fromstring(charts.CHARTS[name]())
    width, height = (float(drawing.attrib[side]) for side in ("width", "height"))
    for box in drawing.iter(f"{SVG}rect"):
        x, y, wide, tall = (float(box.attrib.get(side, 0)) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and wide > 0 and tall >= 0 and x + wide <= width and y + tall <= height


def test_bars_are_as_high_as_their_figures_and_the_floor_stands_at_its_own() -> None:
    panel = Panel("a < b", ["1", "8"], {"here": [2.0, 8.0], "vLLM": [4.0, None]}, [1.0, None])
    drawing = ET.fromstring(draw("title", [[panel]]))
    bars = [box for box in drawing.iter(f"{SVG}rect")][3:]  # after the background and two boxes of the legend
    tall = [float(bar.attrib["height"]) for bar in bars]
    assert [height / tall[0] for height in tall] == pytest.approx([1, 2, 4])
    lines = [line for line in drawing.iter(f"{SVG}line") if line.attrib.get("stroke-width") == "2"][1:]
    (floor,) = lines
    base = float(bars[0].attrib["y"]) + tall[0]
    assert base - float(floor.attrib["y1"]) == pytest.approx(tall[0] / 2)
    assert "a < b" in [text.text for text in drawing.iter(f"{SVG}text")]


def test_a_panel_with_a_figure_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="steps"):
        draw("title", [[Panel("steps", ["1", "8"], {"here": [2.0]})]])


def test_a_table_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="steps"):
        page("title", [Table("steps", ("rows",), [[1, 2]], ())])


@pytest.fixture
def summaries(tmp_path: Path) -> Path:
    work = {"engine": "service", "experiment": "decode", "shape": "toy"}
    found = [
        {**work, "rows": 1, "ms": 2.0, "run": "2026-11-26T02:04:34Z"},
        {**work, "rows": 1, "ms": 1.0, "run": "2026-11-27T02:04:34Z"},
        {**work, "rows": 8, "ms": 3.0, "run": "2026-11-26T02:04:34Z"},
        {**work, "rows": 32, "skipped": "no room", "run": "2026-11-27T02:04:34Z"},
        {**work, "rows": 32, "error": "ran out of time", "run": "2026-11-27T02:04:34Z"},
        {**work, "engine": "vllm", "rows": 1, "ms": 4.0, "run": "2026-11-27T06:00:00Z"},
    ]
    facts = [
        {"run": "2026-11-27T02:04:34Z", "ceilings": {"gpu": "NVIDIA H200"}},
        {"run": "2026-11-27T06:00:00Z", "engine": "vllm", "version": "0.26.0"},
    ]
    (tmp_path / "toy.json").write_text(json.dumps({"note": "another machine", "facts": facts, "rows": found}))
    return tmp_path


def test_of_several_runs_the_latest_counts_for_each_row_alone(summaries: Path) -> None:
    here = rows("toy", folder=summaries, engine="here")
    assert [(found["rows"], found["ms"]) for found in here] == [(1, 1.0), (8, 3.0)]
    assert row("toy", folder=summaries, rows=32) is None
    with pytest.raises(ValueError):
        row("toy", folder=summaries, rows=1)


def test_a_source_says_when_each_engine_ran_and_what_the_summary_notes(summaries: Path) -> None:
    told = source("toy", folder=summaries)
    assert (told.file, told.machine, told.note) == ("toy.json", "H200", "another machine")
    assert told.when == "2026-11-26, again 24 hours later; vLLM 0.26.0 28 hours later"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "-"),
        ("x", "x"),
        (0, "0"),
        (0.0, "0"),
        (0.0314159, "0.0314"),
        (0.9999, "1.00"),
        (9.999, "10.0"),
        (3.884, "3.88"),
        (159.84, "159.8"),
        (999.96, "1,000"),
        (1234567, "1,234,567"),
        (-0.00093, "-0.000930"),
    ],
)
def test_a_figure_has_three_digits_or_more(cell: str | float | None, text: str) -> None:
    assert figure(cell) == text


def test_every_command_of_a_summary_names_a_module_that_exists() -> None:
    commands = [
        shown_command(json.loads(path.read_text()).get("command", "")) for path in DEFAULT_FOLDER.glob("*.json")
    ]
    modules = {module for command in commands for module in re.findall(r"-m (scripts[\w.]+)", command)}
    assert modules and not [module for module in modules if importlib.util.find_spec(module) is None]
    assert not [command for command in commands if command and "python -m scripts." not in command]
    given = " ".join(found for command in commands for found in re.findall(r"--set ((?:\w+=\S+ ?)+)", command))
    settings = {pair.partition("=")[0] for pair in given.split()}
    assert settings and settings <= EngineSettings.model_fields.keys()
