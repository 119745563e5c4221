"""A real worker seen from outside: the page for Prometheus, its rows, its trace, and `rollout top` in a terminal."""

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
import threading
import urllib.request
from pathlib import Path

import pytest

from rollout.metrics.chrome_trace import TRACKS
from rollout.metrics.definitions import METRICS, TOP_METRICS
from rollout.metrics.prometheus import prometheus_name
from rollout.top.frame import frame
from rollout.top.poller import Poller
from rollout.top.screen import Screen
from tests.support.chrome_format import check_chrome_trace
from tests.support.http_page import get
from tests.support.patience import PATIENCE_S
from tests.support.reported_metrics import needs_no_drafts
from tests.support.worker.harness import ONES, facts, launch, paused_amid, rollout, subprocess_environment, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import BadRequest, NotFound

LONG = {"max_tokens": 20_000, "stream": "tokens", "stream_every": 8}


def page(worker: WorkerProcess) -> dict[str, float]:
    url = facts(worker.log_path)[0]["metrics_url"]
    with urllib.request.urlopen(url, timeout=60) as reply:
        assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/plain")
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_the_page_has_every_metric_of_the_report(worker: WorkerProcess, client: RolloutClient) -> None:
    pytest.importorskip("prometheus_client")
    before = client.status()["tokens"]

    def at_work() -> dict[str, float] | None:
        client.generate("17:", n=3, max_tokens=40)  # each time: an interval without steps has no times of them
        now = page(worker)
        ended = now.get("rollout_completion_finish_reason_length_total", 0)
        return now if ended >= 3 and now["rollout_step_decode_ms"] > 0 else None

    steps = until(at_work, "a report with all three completions")
    # Others come once a trainer reports, or something was drafted.
    always = [one for one in METRICS if needs_no_drafts(one.name) and not one.name.startswith("mismatch/")]
    assert {prometheus_name(metric) for metric in always} <= steps.keys()
    assert steps[f'rollout_worker_info{{model="{ONES}"}}'] == 1.0 and steps["rollout_step_decode_ms"] > 0
    assert steps["rollout_report_step"] >= 40
    assert steps["rollout_request_seconds_count"] >= 1 <= steps["rollout_queue_seconds_count"]
    assert steps["rollout_request_seconds_sum"] > steps["rollout_queue_seconds_sum"] >= 0
    assert client.status()["tokens"] >= before + 120


@pytest.mark.nightly
def test_a_port_that_is_taken_ends_the_start_with_one_line(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            *rollout("serve", str(ONES), "--no-wandb", "--bind", "tcp://127.0.0.1:0"),
            "--metrics-port",
            str(port),
        ]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=subprocess_environment()
        )
    assert ended.returncode == 1 and ended.stdout == ""
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"rollout: cannot serve metrics at 127.0.0.1:{port}: Address already in use")
    assert "Traceback" not in ended.stderr and "loading weights" not in ended.stderr


def test_health_is_200_while_the_worker_serves_and_503_with_the_reason_while_it_is_paused(
    worker: WorkerProcess, client: RolloutClient
) -> None:
    pytest.importorskip("prometheus_client")
    url = facts(worker.log_path)[0]["metrics_url"].replace("/metrics", "/health")
    assert get(url) == (200, "serving\n")
    client.pause()
    try:
        status, text = until(lambda: (now := get(url))[0] == 503 and now, "the pause")
        assert status == 503 and "paused" in text
    finally:
        client.resume()
    until(lambda: get(url)[0] == 200, "the end of the pause")


def test_the_status_has_the_metrics_of_the_last_report_that_top_shows(client: RolloutClient) -> None:
    client.generate("17:", max_tokens=40)
    names = {metric.name for metric in TOP_METRICS if needs_no_drafts(metric.name)}
    status = until(lambda: (now := client.status()).get("metrics", {}).get("step/decode_ms") and now, "a report")
    assert status["metrics"].keys() == names


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_unknown_wandb_mode_ends_the_start_with_one_line(workers: str, tmp_path: Path) -> None:
    environment = subprocess_environment(WANDB_MODE="foo", WANDB_DIR=str(tmp_path))
    command = [*rollout("serve", str(ONES), "--bind", "tcp://127.0.0.1:0", "--wandb"), "--workers", workers]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert ended.returncode == 2 and ended.stdout == "" and "Traceback" not in ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert "WANDB_MODE" in line and "'foo'" in line and "offline" in line and "loading weights" not in ended.stderr


# --- status and trace -------------------------------------------------------------------------------------------------


def test_status_lists_the_oldest_rows_when_asked(client: RolloutClient) -> None:
    with client.generate("17:", n=3, request_id="three", **LONG) as stream:
        next(stream)
        with client.generate("18:", request_id="younger", **LONG) as other:
            next(other)
            assert "sequences" not in client.status()
            listed = client.control("status", sequences=64)[0]["sequences"]
            assert [(entry["id"], entry["index"]) for entry in listed] == [
                ("three", 0), ("three", 1), ("three", 2), ("younger", 0),
            ]  # fmt: skip
            for entry in listed:
                assert entry["state"] == "decode" and entry["owner"].startswith("connection:")
                assert (entry["prompt_tokens"], entry["max_tokens"], entry["version"]) == (3, 20_000, 0)
                assert 0 < entry["tokens"] <= 20_000 and entry["pages"] > 0 and 0 < entry["age_s"] < 60
            assert len(client.control("status", sequences=2)[0]["sequences"]) == 2
            other.cancel()
        stream.cancel()
    with pytest.raises(BadRequest, match="sequences"):
        client.control("status", sequences=1025)


def test_a_request_of_another_client_is_cancelled_by_its_owner_and_id(
    worker: WorkerProcess, client: RolloutClient
) -> None:
    with RolloutClient(worker.endpoint, timeout_s=30.0) as other:
        stream = other.generate("17:", n=2, request_id="x", **LONG)
        next(stream)
        (owner,) = {entry["owner"] for entry in client.control("status", sequences=8)[0]["sequences"]}
        for target, of in (("x", "client:nobody"), ("y", owner)):
            with pytest.raises(NotFound):
                client.control("cancel", target=target, owner=of)
        client.control("cancel", target="x", owner=owner)
        assert {completion.finish_reason for completion in stream.wait().completions} == {"cancelled"}


def test_the_trace_of_a_worker_at_work_is_true(worker: WorkerProcess, client: RolloutClient, tmp_path: Path) -> None:
    client.generate("17:", n=3, max_tokens=300)
    out, png = tmp_path / "new" / "trace.json", tmp_path / "trace.png"
    arguments = ["trace", worker.endpoint, "--steps", "100", "-o", str(out), "--png", str(png)]
    ran = subprocess.run(
        rollout(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=subprocess_environment()
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{out}: 100 steps in ") and "host and device" in ran.stdout
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    slices = check_chrome_trace(json.loads(out.read_text()))
    for number in range(100):
        own = {event["name"]: event for event in slices if event["args"].get("step") == number}
        assert own.keys() == {"plan", "launch", "commit", "finalize", "h2d", "decode", "d2h"}
        begin, end = ({name: event["ts"] + part * event["dur"] for name, event in own.items()} for part in (0, 1))
        assert begin["launch"] - 1 < begin["decode"] >= end["h2d"] - 1 and begin["plan"] < begin["h2d"]
        assert end["decode"] <= begin["d2h"] + 1 and end["d2h"] <= begin["commit"] + 1
        assert begin["finalize"] == pytest.approx(end["commit"], abs=0.01)
        facts_of = own["decode"]["args"]
        assert facts_of["rows"] == (3 if number < 99 else 2)  # the first row had its first token a step earlier
        assert facts_of["tokens"] == facts_of["rows"] - facts_of["zombie_rows"] and facts_of["version"] == 0
        assert own["decode"]["tid"] == TRACKS["compute"].tid


@pytest.mark.parametrize("steps", ["1", "2"])
def test_a_trace_of_hardly_any_steps_is_drawn_too(
    worker: WorkerProcess, client: RolloutClient, tmp_path, steps
) -> None:
    client.generate("17:", max_tokens=4)
    out, png = tmp_path / "trace.json", tmp_path / "trace.png"
    arguments = ["trace", worker.endpoint, "--steps", steps, "-o", str(out), "--png", str(png)]
    ran = subprocess.run(
        rollout(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=subprocess_environment()
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{steps} steps in " in ran.stdout and png.stat().st_size > 1000
    check_chrome_trace(json.loads(out.read_text()))


def test_a_trace_asked_for_again_and_again_leaves_the_tokens_alone(
    worker: WorkerProcess, client: RolloutClient
) -> None:
    stop = threading.Event()

    def ask() -> None:
        with RolloutClient(worker.endpoint, timeout_s=30.0) as other:
            while not stop.is_set():
                assert len(other.control("trace", steps=2000)[0]["steps"]["kind"]) <= 2000
                other.control("status", sequences=1024)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        result = client.generate("17:", n=4, max_tokens=600, temperature=0.0)
    finally:
        stop.set()
        asker.join()
    texts = {completion.text or tuple(completion.token_ids.tolist()) for completion in result.completions}
    assert len(texts) == 1 and all(len(completion) == 600 for completion in result.completions)


# --- rollout top ------------------------------------------------------------------------------------------------------


def test_a_frame_of_a_real_worker_fits_80_columns(worker: WorkerProcess, client: RolloutClient) -> None:
    with client.generate("17:", n=10, request_id="long one", **LONG) as stream:
        next(stream)
        poller = Poller(RolloutClient(worker.endpoint, timeout_s=30.0), interval_s=1.0)
        until(lambda: poller.poll().status["queue"]["waiting"] == 2, "the queue")
        lines = [line.plain for line in frame([poller.view], Screen(), 80, 24)]
        poller.close()
        stream.cancel()
    assert all(len(line) == 80 for line in lines) and len(lines) <= 24
    text = "\n".join(lines)
    assert worker.endpoint in text and "serving" in text and "8/8" in text and "queue 2" in text
    assert sum("long one" in line and "decode" in line for line in lines) == 8


def test_once_prints_text_or_json_and_a_silent_worker_is_status_1(worker: WorkerProcess, client: RolloutClient) -> None:
    environment = subprocess_environment(COLUMNS="80")
    with paused_amid(client, prompt="17:", request_id="one", max_tokens=400) as stream:
        as_json = ["top", worker.endpoint, "tcp://127.0.0.1:1", "--once", "--json", "--timeout-s", "10"]
        ran = subprocess.run(rollout(*as_json), capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        shown = subprocess.run(
            rollout("top", worker.endpoint, "--once"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
        )
        stream.cancel()
        client.resume()
    assert ran.returncode == 1 and shown.returncode == 0, (ran.stderr, shown.stderr)
    answered, silent = map(json.loads, ran.stdout.splitlines())
    assert answered.keys() == {"endpoint", "time", "status"} and silent.keys() == {"endpoint", "time", "error"}
    status = answered["status"]
    assert [entry["id"] for entry in status["sequences"]] == ["one"] and len(status["tokens_by_second"]) == 10
    assert status["idle_pct"].keys() == {"no_work", "prefill", "swap", "offload", "bubble"} and isinstance(
        status["swaps"], list
    )
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and any(line.startswith("  one ") for line in lines)


class Terminal:
    """A command in a terminal of 80 by 24, and what it has written there so far."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        environment = subprocess_environment(TERM="xterm-256color", PYTHONIOENCODING="utf-8")
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            self.shown += data.decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def attributes(self) -> list:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)


def test_c_and_y_in_a_terminal_cancel_the_selected_request(worker: WorkerProcess, client: RolloutClient) -> None:
    with client.generate("17:", request_id="victim", max_tokens=30_000, stream="tokens") as stream:
        next(stream)
        client.pause()  # it is not to be over before the keys come
        terminal = Terminal(*rollout("top", worker.endpoint, "--interval-s", "0.2"))
        try:
            until(lambda: "victim" in terminal.shown, "the row")
            terminal.type("\x1b[B")
            until(lambda: "> victim" in terminal.shown, "the selection")
            terminal.type("c")
            until(lambda: "Cancel request victim" in terminal.shown, "the question")
            assert client.status()["rows"]["running"] == 1
            terminal.type("y")
            until(lambda: "Request victim was cancelled" in terminal.shown, "the answer")
            terminal.type("q")
            assert terminal.process.wait(60) == 0
            assert terminal.attributes() == terminal.before
        finally:
            terminal.close()
            client.resume()
        (completion,) = stream.wait().completions
    assert completion.finish_reason == "cancelled" and len(completion) < 30_000


@pytest.mark.nightly
def test_a_worker_that_dies_or_hangs_meanwhile_is_told_of_and_q_leaves_at_once(tmp_path: Path) -> None:
    with launch(ONES, log=tmp_path / "worker.log", max_rows=2, max_context_tokens=256) as dying:
        how = ("--interval-s", "0.2", "--timeout-s", "600")
        terminal = Terminal(*rollout("top", dying.endpoint, "tcp://127.0.0.1:1", *how))
        try:
            until(lambda: "serving" in terminal.shown, "the worker")
            os.kill(dying.pid, signal.SIGSTOP)
            until(lambda: "no answer for" in terminal.shown, "the silence")
            os.kill(dying.pid, signal.SIGKILL)
            silent = f"no answer from {dying.endpoint}"  # if the question was given up before the worker's end
            until(lambda: "was lost" in terminal.shown or silent in terminal.shown, "the end")
            terminal.type("q")
            assert terminal.process.wait(60) == 0, "it does not wait 600 s for two silent workers"
            assert terminal.attributes() == terminal.before
        finally:
            terminal.close()
