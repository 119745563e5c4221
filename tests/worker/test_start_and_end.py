"""How a real worker starts and ends: its output, its files, its exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker.harness import (
    ONES,
    facts,
    is_gone,
    launch,
    rollout,
    subprocess_environment,
    text_of,
    token_ids,
    until,
)
from tests.support.worker.raw_client import RawClient
from tests.support.worker.wandb_file import history_keys
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerFailed, WorkerProcess, start_worker
from trainer_bridge.wire.errors import Unavailable

LONG = {"max_tokens": 30_000, "stream": "tokens", "stream_every": 8}
RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}


def test_sigterm_finishes_running_completions_and_leaves_all_records(tmp_path: Path) -> None:
    """Started by hand, as an operator would, with W&B and everything else that a worker can write."""
    ready_file, jsonl = tmp_path / "ready.json", tmp_path / "metrics.jsonl"
    flags = ["--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready_file), "--interval-s", "0.2"]
    flags += ["--jsonl", str(jsonl), "--max-rows", "4"]
    flags += ["--max-context-tokens", "4096", "--drain-s", "200"]
    environ = subprocess_environment(HOME=str(tmp_path), WANDB_DIR=str(tmp_path))
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            rollout("serve", str(ONES), *flags), stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ
        ) as process,
    ):
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready == json.loads(ready_file.read_text())
        assert ready["event"] == "ready" and ready["pid"] == process.pid and ready["model"] == str(ONES)
        assert ready["weights_version"] == 0 and not ready["endpoint"].endswith(":0")
        assert list(tmp_path.glob("ready.json*")) == [ready_file]
        with RolloutClient(ready["endpoint"], timeout_s=240.0) as client:
            assert client.status()["weights_endpoint"] == ready["weights_endpoint"] != ready["endpoint"]
            with client.generate("17:", n=2, max_tokens=800, stream="tokens", stream_every=8) as stream:
                next(stream)
                process.send_signal(signal.SIGTERM)
                until(lambda: client.status()["state"] == "draining", "the drain")
                with pytest.raises(Unavailable):
                    client.generate("17:", max_tokens=4)
                completions = stream.wait().completions
        assert [(len(completion), completion.finish_reason) for completion in completions] == [(800, "length")] * 2
        ended, nothing = process.stdout.readline(), process.stdout.read()
        assert process.wait(60) == 0 and nothing == "" and not ready_file.exists()
    _check_records(json.loads(ended), jsonl, tmp_path)


def _check_records(ended: dict, jsonl: Path, folder: Path) -> None:
    assert ended["event"] == "ended"
    totals = ended["totals"]
    assert totals["total/tokens"] == 1600 and totals["total/completions"] == 2
    assert 0 < totals["gpu/active_pct"] <= 100 and totals["completion/length_mean"] == 800
    lines = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert len(lines) >= 2 and [line.get("final", False) for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all("gpu/active_pct" in line and "queue/waiting" in line for line in lines)
    assert max(line["rollout/rows"] for line in lines) == 2
    run = Path(ended["wandb_run"])
    assert run.is_relative_to(folder) and run.name.startswith("offline-run-")
    (file,) = run.glob("*.wandb")
    assert {"gpu/active_pct", "rollout/tokens_per_s", "weights/version", "step/decode_ms"} <= history_keys(file)


@pytest.mark.nightly
def test_a_second_sigterm_returns_running_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    worker = start_worker(ONES, log_file=tmp_path / "worker.log", wandb=False, kv_memory_max_gib=0.03)
    with worker, RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        inherited = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
        assert not {entry.partition(b"=")[0].decode() for entry in inherited} & RANK.keys()
        with client.generate("17:", n=3, **LONG) as stream:
            next(stream)
            os.kill(worker.pid, signal.SIGTERM)
            until(lambda: client.status()["state"] == "draining", "the drain")
            next(stream)  # it goes on
            os.kill(worker.pid, signal.SIGTERM)
            completions = stream.wait().completions
        for completion in completions:
            assert completion.finish_reason == "cancelled" and 8 <= len(completion) < 30_000
            assert text_of(completion.token_ids[:6]) == " 18 19"
        assert until(lambda: worker.returncode is not None, "the end") and worker.returncode == 0
    assert [fact["event"] for fact in facts(tmp_path / "worker.log")] == ["ready", "ended"]


@pytest.mark.nightly
def test_shutdown_messages_are_answered_once_the_worker_has_ended(tmp_path: Path) -> None:
    with launch(log=tmp_path / "worker.log") as worker:
        with RawClient(worker.endpoint) as raw, RawClient(worker.endpoint) as other:
            raw.send("generate", "g", prompt=token_ids("17:"), n=2, max_tokens=30_000)
            raw.send("shutdown", "drain")
            assert raw.ask("status", "s")["state"] == "draining"
            refused = other.ask("generate", "g", prompt="17:", max_tokens=4)
            assert (refused["op"], refused["code"]) == ("error", "unavailable")
            assert other.ask("shutdown", "now", mode="now")["op"] == "ok"
            replies = {reply["id"]: reply for reply in (raw.receive(), raw.receive())}
            assert replies["drain"]["op"] == "ok", replies["drain"]
            assert {completion["finish_reason"] for completion in replies["g"]["completions"]} == {"cancelled"}
        assert until(lambda: worker.returncode is not None, "the end") and worker.returncode == 0


JOB = """
import signal, sys
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
worker = start_worker(sys.argv[1], wandb=False, drain_s=0, log_file=sys.argv[2], kv_memory_max_gib=0.03)
client = RolloutClient(worker.endpoint)
stream = client.generate("17:", max_tokens=30_000, stream="tokens")
next(stream)
print(worker.pid, flush=True)
signal.pause()
"""


@pytest.mark.nightly
def test_a_worker_ends_with_the_job_that_launched_it(tmp_path: Path) -> None:
    """Its parent is killed while it generates, and has no time to say anything."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-c", JOB, str(ONES), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=subprocess_environment()) as job:
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        assert not is_gone(pid)
        job.send_signal(signal.SIGKILL)
    until(lambda: is_gone(pid), "the worker to be gone", 30.0)
    assert [fact["event"] for fact in facts(log)] == ["ready", "ended"]  # an orderly end


def test_a_wrong_model_folder_is_one_line_and_status_1(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="status 1") as caught:
        launch(tmp_path / "nothing", log=tmp_path / "worker.log")
    said = (tmp_path / "worker.log").read_text().splitlines()
    assert len(said) == 1 and said[0].startswith("rollout: ") and str(tmp_path / "nothing") in said[0]
    assert said[0] in str(caught.value)


def test_a_port_that_is_taken_is_one_line_and_status_1_before_a_model_is_looked_for(
    tmp_path: Path, worker: WorkerProcess
) -> None:
    with pytest.raises(WorkerFailed, match="status 1"):
        launch(tmp_path / "nothing", log=tmp_path / "worker.log", bind=worker.endpoint)
    said = (tmp_path / "worker.log").read_text().splitlines()
    assert len(said) == 1 and said[0].startswith(f"rollout: cannot bind {worker.endpoint}"), said


def test_an_unknown_setting_is_one_line_and_status_2(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="status 2") as caught:
        launch(log=tmp_path / "worker.log", max_row=8)
    assert "did you mean --max-rows?" in str(caught.value)
    assert len((tmp_path / "worker.log").read_text().splitlines()) == 1
