"""Sinks: nothing that one does reaches the loop or another sink; what was reported can be read back."""

from __future__ import annotations

import json
import logging
import struct
import threading
from pathlib import Path

import pytest

from rollout.config import MetricsSettings
from rollout.metrics import JsonlSink, MetricsThread, Report, WandbSink
from rollout.metrics.wandb_mode import wandb_mode


class Recorder:
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
        self.entered, self.release = threading.Event(), threading.Event()

    def write(self, report: Report) -> None:
        self.entered.set()
        self.release.wait()
        super().write(report)


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


def test_blocked_sink_never_blocks_put_and_what_does_not_fit_is_counted():
    blocker = Blocker()
    thread = MetricsThread([blocker], capacity=3)
    thread.start()
    assert thread.put(0, {"a": 0.0})
    assert blocker.entered.wait(10)
    assert [thread.put(step, {"a": 1.0}) for step in range(1, 6)] == [True, True, True, False, False]
    assert thread.dropped == 2
    assert thread.close(deadline_s=0.01) is False  # the queue is full and the sink blocks: close returns all the same
    blocker.release.set()
    thread._thread.join(10)
    assert [report.step for report in blocker.reports] == [0, 1, 2, 3]
    assert blocker.closed


def test_close_writes_what_waits():
    recorder = Recorder()
    thread = MetricsThread([recorder])
    for step in range(20):
        thread.put(step, {"a": float(step)})
    thread.start()
    assert thread.close(deadline_s=10) is True
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
        assert thread.close(deadline_s=10)
    assert len(recorder.reports) == 3 and recorder.closed
    assert [record.message for record in caplog.records if "Breaker" in record.message] == [
        f"metrics: Breaker failed to {method} and is left out from now on"
    ]
    assert broken.calls == {"open": 1, "write": 2, "close": 5}[method]


def test_jsonl_has_a_line_a_report_and_is_appended_to(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for run in range(2):
        thread = MetricsThread([JsonlSink(path)])
        thread.start()
        thread.put(5, {"gpu/active_pct": 90.0 + run})
        thread.put(9, {"gpu/active_pct": 80.0 + run}, final=True)
        assert thread.close(deadline_s=10)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["gpu/active_pct"] for line in lines] == [90.0, 80.0, 91.0, 81.0]
    assert [line["step"] for line in lines] == [5, 9, 5, 9]
    assert [line.get("final", False) for line in lines] == [False, True, False, True]
    assert lines[0]["time"] <= lines[-1]["time"]


def test_jsonl_refuses_what_is_not_json(tmp_path, caplog):
    thread = MetricsThread([JsonlSink(tmp_path / "metrics.jsonl")])
    thread.start()
    thread.put(1, {"gpu/active_pct": float("nan")})
    assert thread.close(deadline_s=10)
    assert "JsonlSink failed to write" in caplog.text


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


def wandb_records(path: Path) -> list:
    """The records of a .wandb file: a log of 32 KiB blocks, each piece with a header of checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records, whole, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR", "WANDB_SILENT", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_offline_wandb_run_is_written_without_a_question_and_reads_back(tmp_path, no_account, capfd):
    settings = MetricsSettings(wandb_dir=str(tmp_path / "runs"), wandb_project="p", wandb_group="g", wandb_name="n")
    sink = WandbSink(settings, {"engine": {"max_rows": 8}})
    thread = MetricsThread([sink])
    thread.start()
    thread.put(10, {"gpu/active_pct": 91.5, "rollout/rows": 4})
    thread.put(10, {"gpu/active_pct": 92.5, "rollout/rows": 3})  # idle: no step since the last report
    thread.put(20, {"gpu/active_pct": 92.0}, final=True)
    assert thread.close(deadline_s=60)

    assert sink.run_path is not None
    folder = Path(sink.run_path)
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "runs")
    (path,) = folder.glob("*.wandb")
    records = wandb_records(path)
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.project, run.run_group, run.display_name) == ("p", "g", "n")
    rows = []
    for record in records:
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    assert rows == [
        {"step": 10, "gpu/active_pct": 91.5, "rollout/rows": 4},
        {"step": 10, "gpu/active_pct": 92.5, "rollout/rows": 3},
    ]
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summary["gpu/active_pct"] == 92.0
    assert capfd.readouterr().out == ""  # stdout belongs to the launcher


def test_wandb_run_goes_on_offline_when_the_server_does_not_answer(tmp_path, no_account, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(WandbSink, "ONLINE_TIMEOUT_S", 1.0)
    sink = WandbSink(MetricsSettings(wandb_dir=str(tmp_path / "runs")), {})
    thread = MetricsThread([sink])
    thread.start()
    thread.put(10, {"gpu/active_pct": 91.5})
    assert thread.close(deadline_s=60)
    assert "logged offline" in caplog.text
    (path,) = (tmp_path / "runs").glob("wandb/offline-run-*/*.wandb")
    assert any(record.HasField("history") for record in wandb_records(path))
