"""The dashboard: its layout has every metric that declares a panel; it becomes a W&B view and a picture."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.metrics.definitions import HISTOGRAMS, METRICS, VERSION_METRICS
from scripts.dashboard.layout import LAYOUT, Panel, panels
from scripts.dashboard.offline_run import OfflineRun, read_offline_run
from scripts.dashboard.picture import series, write_dashboard
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"scripts.dashboard.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRON, cwd=ROOT)


def test_every_metric_is_in_the_panel_that_it_declares():
    shown = [name for panel in panels() for name in panel.metrics]
    declared = {metric.name for metric in (*METRICS, *HISTOGRAMS, *VERSION_METRICS) if metric.panel is not None}
    assert set(shown) == declared and len(shown) == len(set(shown))
    for panel in panels():
        assert all(name.startswith("by_version/") == (panel.over == "version") for name in panel.metrics)
        assert panel.kind != "histogram" or len(panel.metrics) == 1
    histograms = {panel.metrics[0] for panel in panels() if panel.kind == "histogram"}
    assert histograms == {metric.name for metric in HISTOGRAMS}
    assert len({section.name for section in LAYOUT}) == len(LAYOUT)


def test_the_view_has_the_panels_of_the_layout():
    pytest.importorskip("wandb_workspaces")
    model = "workspace('e', 'p', 'n')._to_model().model_dump_json(by_alias=True)"
    code = f"from scripts.dashboard.wandb_view import workspace; print({model})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRON, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout.splitlines()[-1])
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.name for section in LAYOUT]
    for sent, section in zip(sections, LAYOUT, strict=True):
        for drawn, panel in zip(sent["panels"], section.panels, strict=True):
            config = drawn["config"]
            assert (config["chartTitle"], tuple(config["metrics"])) == (panel.title, panel.metrics)
            assert config["xAxis"] == ("weights/version" if panel.over == "version" else "_runtime")


HISTOGRAM = {"_type": "histogram", "values": [2], "bins": [0.5, 1.5]}
ROWS = [
    {"_timestamp": 100.0, "weights/version": 0, "gpu/active_pct": 50.0, "completion/length": HISTOGRAM},
    {"_timestamp": 105.0, "weights/version": 0, "by_version/tokens_per_s": 7.0},
    {"_timestamp": 105.0, "weights/version": 1, "gpu/active_pct": 60.0, "gpu/run/active_pct": 55.0},
]  # fmt: skip


def test_series_are_over_time_or_over_versions_with_what_the_rows_have():
    active, by_version = LAYOUT[0].panels[0], LAYOUT[-1].panels[0]
    assert series(ROWS, active) == {
        "gpu/active_pct": ([0.0, 5.0], [50.0, 60.0]),
        "gpu/run/active_pct": ([5.0], [55.0]),
    }
    assert series(ROWS, by_version) == {"by_version/tokens_per_s": ([0], [7.0])}
    assert series(ROWS, Panel("x", ("mismatch/k3_kl",), "nats")) == series([], active) == {}


@pytest.mark.nightly
def test_it_is_drawn_with_what_is_there_and_not_without_rows(tmp_path):
    pytest.importorskip("matplotlib")
    write_dashboard(OfflineRun("p", "g", "n", ROWS, {}), tmp_path / "new" / "d.png", "three rows")
    png = (tmp_path / "new" / "d.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) < 300_000
    with pytest.raises(ValueError, match="no rows"):
        write_dashboard(OfflineRun("p", "g", "n", [], {}), tmp_path / "none.png", "none")


@pytest.mark.parametrize(
    ("script", "arguments", "status", "says"),
    [
        ("wandb_view", (), 2, "--entity"),
        ("picture", ("x",), 2, "FILE"),
        ("picture", ("/nowhere", "x.png"), 1, "/nowhere"),
    ],
)
def test_wrong_use_of_a_script_is_one_clear_line(script, arguments, status, says):
    done = run_script(script, *arguments)
    assert done.returncode == status and says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# --- the file of an offline run ---------------------------------------------------------------------------------------


def log_of(*records: bytes) -> bytes:
    """A file as W&B writes it, without checksums: records cut at blocks of 32 KiB."""
    data = bytearray(b":W&B" + bytes(3))
    for record in records:
        first = True
        while True:
            left = 32_768 - len(data) % 32_768
            if left < 7:
                data += bytes(left)
                left = 32_768
            piece, record = record[: left - 7], record[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
            data += struct.pack("<IHB", 0, len(piece), kind) + piece
            first = False
            if not record:
                break
    return bytes(data)


def history(**values: object) -> bytes:
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()
    for key, value in values.items():
        record.history.item.add(key=key, value_json=json.dumps(value))
    return record.SerializeToString()


def test_records_are_read_across_blocks_and_up_to_where_the_file_breaks_off(tmp_path):
    rows = [{"a": i, f"text{i}": "x" * length} for i, length in enumerate((1, 32_000, 700, 100_000, 5, 32_700, 3))]
    data = log_of(*(history(**row) for row in rows))
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    assert read_offline_run(tmp_path).rows == read_offline_run(path).rows == rows
    path.write_bytes(data[:-1])
    assert read_offline_run(path).rows == rows[:-1]


def test_a_file_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"0 files"):
        read_offline_run(tmp_path)
    (tmp_path / "x.wandb").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a W&B run"):
        read_offline_run(tmp_path)
