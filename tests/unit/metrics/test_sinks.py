"""Sinks: nothing that one does reaches the loop or another sink; what was reported can be read back."""

import json
import logging
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from rollout.config import EngineSettings, MetricsSettings, ModelSettings, Settings
from rollout.engine.device.streams import CpuDevice
from rollout.engine.messages.requests import SamplingParams
from rollout.metrics.definitions import HISTOGRAMS, METRICS, TOTALS, VERSION_METRICS
from rollout.metrics.logprob_mismatch import MismatchSums
from rollout.metrics.meter import Meter
from rollout.metrics.prometheus import Health
from rollout.metrics.sinks import JsonlSink, MetricsThread, Report
from rollout.metrics.step_timing import StepTiming
from rollout.metrics.wandb_mode import wandb_mode
from rollout.metrics.wandb_sink import ContinuedRun, WandbSink
from rollout.models import load_model
from scripts.bench.driver import Driver
from scripts.bench.shapes import write_checkpoint
from scripts.dashboard.offline_run import OfflineRun, read_offline_run
from scripts.dashboard.summary import lines, read_runs
from tests.support.patience import PATIENCE_S
from tests.support.wandb_sync import serving, sync
from tests.support.worker.harness import until


class Recorder:
    at_once = False

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.closed = False

    def open(self) -> None:
        pass

    def write(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed = True


class Blocker(Recorder):
    """Blocks in `write` until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release, self.closing = threading.Event(), threading.Event(), threading.Event()

    def write(self, report: Report) -> None:
        self.entered.set()
        self.release.wait()
        super().write(report)

    def close(self) -> None:
        super().close()
        self.closing.set()


class Breaker(Recorder):
    """Raises in one method."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.calls = 0
        self._broken = method

    def open(self) -> None:
        self._maybe("open")

    def write(self, report: Report) -> None:
        self._maybe("write")

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, method: str) -> None:
        self.calls += 1
        if method == self._broken:
            raise RuntimeError(f"{method} is broken")


def test_blocked_sink_never_blocks_put_and_dropped_reports_are_counted():
    blocker = Blocker()
    thread = MetricsThread([blocker], capacity=3)
    thread.start()
    assert thread.put(0, {"a": 0.0})
    assert blocker.entered.wait(60)
    assert [thread.put(step, {"a": 1.0}) for step in range(1, 6)] == [True, True, True, False, False]
    assert thread.dropped == 2
    assert thread.close(deadline_s=0.01) is False  # the queue is full and the sink blocks: close returns all the same
    blocker.release.set()
    assert blocker.closing.wait(60)
    assert [report.step for report in blocker.reports] == [0, 1, 2, 3]
    assert blocker.closed


def test_close_writes_waiting_reports():
    recorder = Recorder()
    thread = MetricsThread([recorder])
    for step in range(20):
        thread.put(step, {"a": float(step)})
    thread.start()
    assert thread.close(deadline_s=60) is True
    assert [report.step for report in recorder.reports] == list(range(20))
    assert recorder.closed


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_broken_sink_is_logged_once_and_left_out_while_the_others_go_on(method, caplog):
    broken, recorder = Breaker(method), Recorder()
    thread = MetricsThread([broken, recorder])
    with caplog.at_level(logging.ERROR):
        thread.start()
        for step in range(3):
            thread.put(step, {"a": 1.0})
        assert thread.close(deadline_s=60)
    assert len(recorder.reports) == 3 and recorder.closed
    assert len([record for record in caplog.records if record.name.startswith("rollout.metrics.")]) == 1
    assert broken.calls == {"open": 1, "write": 2, "close": 5}[method]


def test_jsonl_has_a_line_a_report_and_is_appended_to(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for run in range(2):
        thread = MetricsThread([JsonlSink(path)])
        thread.start()
        thread.put(5, {"gpu/active_pct": 90.0 + run})
        thread.put(9, {"gpu/active_pct": 80.0 + run}, final=True)
        assert thread.close(deadline_s=60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["gpu/active_pct"] for line in lines] == [90.0, 80.0, 91.0, 81.0]
    assert [line["step"] for line in lines] == [5, 9, 5, 9]
    assert [line.get("final", False) for line in lines] == [False, True, False, True]
    assert lines[0]["time"] <= lines[-1]["time"]


def test_jsonl_refuses_values_that_are_not_json(tmp_path, caplog):
    thread = MetricsThread([JsonlSink(tmp_path / "metrics.jsonl")])
    thread.start()
    thread.put(1, {"gpu/active_pct": float("nan")})
    assert thread.close(deadline_s=60)
    assert [record.levelno for record in caplog.records if record.name == "rollout.metrics.sinks"] == [logging.ERROR]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


# --- W&B -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": "k" * 40}, "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_wandb_is_online_only_with_a_key_and_obeys_its_own_variable(tmp_path, environ, mode):
    assert wandb_mode({"HOME": str(tmp_path), **environ}) == mode


def test_wandb_key_in_netrc_counts_for_its_server_only(tmp_path):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert wandb_mode({"HOME": str(tmp_path)}) == "online"
    assert wandb_mode({"HOME": "/nowhere", "NETRC": str(netrc)}) == "online"
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.com"}) == "offline"
    netrc.write_text("machine\n")
    assert wandb_mode({"HOME": str(tmp_path)}) == "offline"


def test_unknown_wandb_mode_is_an_error_that_lists_the_modes(tmp_path):
    with pytest.raises(ValueError, match="online, offline, disabled"):
        wandb_mode({"WANDB_MODE": "of", "HOME": str(tmp_path)})


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_SILENT", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(PATIENCE_S))  # for the start of W&B's process


def test_offline_wandb_run_is_written_without_a_question_and_reads_back(tmp_path, no_account, capfd, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "g")
    monkeypatch.setenv("WANDB_NAME", "n")
    sink = WandbSink(MetricsSettings(wandb_project="p"), {"engine": {"max_rows": 8}})
    thread = MetricsThread([sink])
    thread.start()
    thread.put(10, {"gpu/active_pct": 91.5, "rollout/rows": 4})
    thread.put(10, {"gpu/active_pct": 92.5, "rollout/rows": 3})  # idle: no step since the last report
    thread.put(20, {"gpu/active_pct": 92.0}, final=True)
    assert thread.close(deadline_s=PATIENCE_S)

    assert sink.run_path is not None
    folder = Path(sink.run_path)
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "runs")
    assert capfd.readouterr().out == ""  # stdout belongs to the launcher
    rows = [
        {"step": 10, "gpu/active_pct": 91.5, "rollout/rows": 4},
        {"step": 10, "gpu/active_pct": 92.5, "rollout/rows": 3},
    ]
    run = read_offline_run(folder)
    assert (run.project, run.group, run.name) == ("p", "g", "n")
    assert [{key: value for key, value in row.items() if key[0] != "_"} for row in run.rows] == rows
    uploaded = sync(folder, tmp_path)
    assert [uploaded.run[key] for key in ("project", "groupName", "displayName")] == ["p", "g", "n"]
    assert json.loads(uploaded.run["config"])["engine"]["value"] == {"max_rows": 8}
    assert uploaded.rows == rows
    assert run.summary["gpu/active_pct"] == uploaded.summary["gpu/active_pct"] == 92.0


def test_the_run_of_a_worker_goes_on_when_it_is_started_again(tmp_path, no_account, monkeypatch):
    """Offline a process writes a folder each; W&B and the summary take them for one run, which counts all of them."""
    home, totals = tmp_path / "runs", tmp_path / "totals.json"
    monkeypatch.setenv("WANDB_RUN_GROUP", "g")
    settings = MetricsSettings()
    counted = {metric.name: 0 for metric in TOTALS}
    for tokens in (30, 12):
        sink = WandbSink(settings, {"model": {"path": "m"}}, "ones-0", ContinuedRun("job-0", totals))
        sink.write(
            Report(1.0, 1, {"rollout/rows": 4}, totals=counted | {"total/tokens": tokens - 5, "rollout/rows": 3})
        )
        sink.write(Report(2.0, 2, {"rollout/rows": 2}, totals=counted | {"total/tokens": tokens, "rollout/rows": 3}))
        sink.close()
    folders = sorted(home.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    uploaded = sync(folders, tmp_path)
    assert [row["step"] for row in uploaded.rows] == [1, 2, 1, 2] and uploaded.run["displayName"] == "ones-0"
    assert uploaded.summary["total/tokens"] == 42 and uploaded.summary["rollout/rows"] == 3
    for folder in folders:
        run = read_offline_run(folder)
        assert [row["step"] for row in run.rows] == [1, 2, 1, 2] and run.processes == 2
        assert (run.id, run.name, run.summary["total/tokens"]) == ("job-0", "ones-0", 42)
    (again,) = read_runs(home / "wandb")
    assert any("total/tokens" in line and "42" in line for line in lines([again]))
    assert any("model.path" in line for line in lines([again], everything=True))
    sums = list(lines([again, replace(again, id="job-1", name="ones-1")]))
    assert any("total/tokens" in line and "84" in line for line in sums[-len(TOTALS) :])


def test_an_online_run_goes_on_when_its_worker_is_started_again(tmp_path, no_account, monkeypatch):
    settings = MetricsSettings()
    with serving() as (account, uploaded):
        for name, value in account.items():
            monkeypatch.setenv(name, value)
        for tokens in (30, 12):
            sink = WandbSink(settings, {}, "ones-0", ContinuedRun("job-0", tmp_path / "totals.json"))
            sink.write(Report(1.0, 1, {"rollout/rows": 4}, totals={"total/tokens": tokens}))
            assert sink.run_path is not None and sink.run_path.startswith("http")
            sink.close()
    assert [row["step"] for row in uploaded.rows] == [1, 1] and uploaded.summary["total/tokens"] == 42


@pytest.mark.parametrize("reports", [0, 1])
def test_a_process_that_is_killed_leaves_what_it_has_reported_or_no_run(tmp_path, no_account, reports):
    code = f"""
import time
from rollout.config import MetricsSettings
from rollout.metrics.sinks import Report
from rollout.metrics.wandb_sink import WandbSink
sink = WandbSink(MetricsSettings(), {{}})
sink.open()
for _ in range({reports}):
    sink.write(Report(1.0, 1, {{"rollout/rows": 4}}, totals={{"total/tokens": 7}}))
print("written", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"

        def read() -> OfflineRun | None:
            found = [run for path in tmp_path.glob("runs/wandb/*/*.wandb") if (run := read_offline_run(path)).rows]
            return found[0] if found else None

        if reports:
            until(read, "the file of the run")
        process.kill()
    if reports:
        run = read()
        assert run is not None and run.summary["total/tokens"] == 7
    else:
        assert not list(tmp_path.glob("runs/wandb/*"))


def busy_meter() -> Meter:
    """A meter with a value for every metric."""
    meter = Meter()
    now_s = time.perf_counter()
    parts: dict = dict(rows=3, zombie_rows=1, tokens=2, plan_s=1e-4, launch_s=1e-4, commit_s=1e-4, version=0)
    meter.step(StepTiming(kind="prefill", start_s=now_s, end_s=now_s + 1e-3, **parts))
    meter.step(StepTiming(kind="decode", start_s=now_s + 2e-3, end_s=now_s + 3e-3, **parts))
    for length in (5, 6, 900):
        meter.completion(length, "stop", 1)
    meter.observe("queue/seconds", 0.2)
    meter.observe("request/seconds", 7.0)
    meter.swap(now_s + 3e-3, now_s + 4e-3, 5, 1024)
    meter.mismatch(MismatchSums(4, 1.0, 2.0, 0.75))
    meter.set({metric.name: 50.0 for metric in METRICS if metric.first is None})
    return meter


def test_a_disabled_run_lies_nowhere(tmp_path, no_account, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = WandbSink(MetricsSettings(), {})
    sink.open()
    assert sink.run_path is None
    sink.close()


def test_every_documented_name_is_in_the_run_that_wandb_reads_back(tmp_path, no_account):
    """With W&B's own reader: what `wandb sync` uploads."""
    meter = busy_meter()
    sink = WandbSink(MetricsSettings(), {})
    thread = MetricsThread([sink])
    thread.start()
    thread.put(2, meter.report(), histograms=meter.histograms(), versions=meter.ended_versions())
    meter.completion(30)
    last = {name: histogram.whole_run() for name, histogram in meter.histograms().items()}
    thread.put(2, meter.totals(), histograms=last, versions=meter.ended_versions(and_this=True), final=True)
    assert thread.close(deadline_s=PATIENCE_S)
    assert sink.run_path is not None
    uploaded = sync(Path(sink.run_path), tmp_path)

    first, row, second = uploaded.rows
    assert row.keys() == {"step", *(metric.name for metric in (*METRICS, *HISTOGRAMS))}
    assert row["queue/seconds"] == {"_type": "histogram", "values": [1], "bins": [0.1, 0.25]}
    assert row["completion/length"] == {"_type": "histogram", "values": [2, *[0] * 14, 1], "bins": ANY}
    edges = row["completion/length"]["bins"]
    assert (len(edges), edges[:2], edges[-2:]) == (17, [4.5, 6.5], [768.5, 1024.5])
    assert row["mismatch/k3_kl"] == 0.25 and row["weights/version"] == 5
    assert first.keys() == {"weights/version", *(metric.name for metric in VERSION_METRICS)}
    assert (first["weights/version"], second["weights/version"]) == (0, 5)
    assert first["by_version/completions"] == 3 and second["by_version/completions"] == 1
    assert uploaded.step_metrics == {"by_version/*": "weights/version"}
    assert {metric.name for metric in (*METRICS, *HISTOGRAMS)} <= uploaded.summary.keys()
    assert sum(uploaded.summary["completion/length"]["values"]) == 4
    assert uploaded.summary["total/completions"] == 4


def test_a_sink_that_blocks_for_longer_than_a_minute_costs_the_loop_nothing(tmp_path):
    """Reports of 75 seconds at the usual interval while the sink is stuck, and then of ten minutes."""
    interval_s = MetricsSettings().interval_s
    blocker, meter = Blocker(), busy_meter()
    thread = MetricsThread([blocker, other := Recorder()])
    thread.start()
    took_s, count = list[float](), round(75 / interval_s)

    def put(reports: int) -> list[bool]:
        taken = []
        for _ in range(reports):
            reported = meter.report(), meter.histograms(), meter.ended_versions()
            began_s = time.perf_counter()
            taken.append(thread.put(meter.steps, reported[0], histograms=reported[1], versions=reported[2]))
            took_s.append(time.perf_counter() - began_s)
        return taken

    put(1)
    assert blocker.entered.wait(60)
    assert all(put(count)) and thread.dropped == 0, "a minute fits into the queue"
    later = put(round(600 / interval_s))
    assert later.count(False) == thread.dropped > 0 and len(later) - later.count(False) + count == 64
    assert not blocker.reports and not other.reports and thread.alive
    # A put is some microseconds, also where nothing fits. Any one of them may wait for a core.
    assert statistics.median(took_s) < 2e-3 and statistics.median(took_s[-thread.dropped :]) < 2e-3
    blocker.release.set()
    assert thread.close(deadline_s=60)
    assert len(blocker.reports) == len(other.reports) == 65 and blocker.closed


def test_the_page_for_prometheus_goes_on_while_another_sink_is_stuck():
    prometheus = pytest.importorskip("rollout.metrics.prometheus")
    blocker, page = Blocker(), prometheus.PrometheusSink("127.0.0.1", 0, "m", Health())
    thread = MetricsThread([blocker, page], capacity=2)
    thread.start()
    for step in range(6):
        thread.put(step, {"gpu/active_pct": float(step)})
        assert blocker.entered.wait(60)
    assert thread.dropped > 0
    with urllib.request.urlopen(page.url, timeout=60) as reply:
        assert "rollout_gpu_active_pct 5.0" in reply.read().decode()
    blocker.release.set()
    assert thread.close(deadline_s=60)


def test_an_engine_generates_at_its_pace_while_the_sink_is_stuck(tmp_path):
    """The loop as the worker runs it, with a report a step, so that the queue is full in no time."""
    model = load_model(
        ModelSettings(path=str(write_checkpoint("toy", tmp_path)), load_format="random"), torch.device("cpu")
    ).model
    driver = Driver(Settings(engine=EngineSettings(max_rows=2, max_context_tokens=256)), CpuDevice(), model)
    blocker = Blocker()
    thread = MetricsThread([blocker])
    thread.start()
    engine, meter = driver.engine, driver.engine.meter
    driver.submit("a", [1, 2, 3], 200, SamplingParams())
    while engine.busy or meter.steps == 0:
        engine.tick()
        thread.put(meter.steps, meter.report(), histograms=meter.histograms(), versions=meter.ended_versions())
    assert meter.totals()["total/tokens"] == 200 and not blocker.reports
    assert thread.dropped > 100 and thread.alive
    assert thread.close(deadline_s=0.01) is False, "and it ends all the same"
    blocker.release.set()
    driver.close()


def test_wandb_run_goes_on_offline_when_the_server_does_not_answer(tmp_path, no_account, monkeypatch, caplog):
    class Impatient(WandbSink):
        ONLINE_TIMEOUT_S = 1.0

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # a closed port
    sink = Impatient(MetricsSettings(), {})
    thread = MetricsThread([sink])
    thread.start()
    thread.put(10, {"gpu/active_pct": 91.5})
    assert thread.close(deadline_s=PATIENCE_S)
    assert any(record.levelno == logging.WARNING for record in caplog.records)
    (folder,) = (tmp_path / "runs").glob("wandb/offline-run-*")
    assert [row["gpu/active_pct"] for row in read_offline_run(folder).rows] == [91.5]
