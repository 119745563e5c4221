"""The log of real workers that fail to order: JSON on every line, few of them, and the last steps where it matters."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.config import EngineConstants
from rollout.engine.inspect import LAST_STEPS
from tests.support.worker.harness import launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import InternalError

SCRIPT = "tests.support.worker.faulty_worker"
COLUMNS = {
    *("step", "state", "kind", "rows", "zombies", "input", "kept", "context", "version"),
    *("plan_ms", "launch_ms", "device_ms", "commit_ms", "ago_s"),
}
STEPS = 400
SETTINGS: dict[str, dict[str, Any]] = {
    "faulty": {"log_format": "json", "wandb": True},
    "hanging": {"stall_exit_s": 5.0, "log_format": "json"},
    "text": {},
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[WorkerProcess, Path]]]:
    """Starts the worker of a test, and tells the folder in which its faults are ordered."""
    started: list[WorkerProcess] = []

    def start_one(name: str) -> tuple[WorkerProcess, Path]:
        command = (sys.executable, "-m", SCRIPT, str(tmp_path), "serve")
        flags = {"command": command, "max_context_tokens": 8192, **SETTINGS[name]}
        env: dict[str, str | None] = {"WANDB_DIR": str(tmp_path)}
        started.append(launch(log=tmp_path / "worker.log", ready_timeout_s=120, env=env, **flags))
        return started[-1], tmp_path

    yield start_one
    for worker in started:
        worker.kill()


def told(worker: WorkerProcess) -> list[dict[str, Any]]:
    """What the worker printed, on both streams; every line is an object."""
    lines = [json.loads(line) for line in worker.log_path.read_text().splitlines()]
    assert all(isinstance(line, dict) and ("event" in line or "logger" in line) for line in lines)
    return [line for line in lines if "event" not in line]


def fail(worker: WorkerProcess, folder: Path, kind: str, name: str) -> None:
    """Have a fault happen amid a named client's request that has run for a while."""
    with RolloutClient(worker.endpoint, timeout_s=60.0, client=name) as client:
        stream = client.generate(
            "17:", request_id=f"of#{name}", n=3, max_tokens=8000, stream="tokens", stream_every=STEPS
        )
        next(stream)
        (folder / kind).touch()
        assert stream.wait().completions[0].finish_reason == "error"


def check_block(line: dict[str, Any], name: str, last_states: set[str]) -> None:
    """The line names the running requests and the last steps; unread steps come last."""
    assert line["level"] == "critical" and line["worker"].endswith(f":{line['worker'].rpartition(':')[2]}")
    assert line["requests"] == [{"client": f"client:{name}", "request": f"of#{name}"}] and line["running"] == 1
    steps = line["steps"]
    assert len(steps) == LAST_STEPS and all(set(step) == COLUMNS for step in steps)
    assert [step["step"] for step in steps] == list(range(steps[0]["step"], steps[0]["step"] + LAST_STEPS))
    done = [step for step in steps if step["state"] == "done"]
    assert LAST_STEPS > len(done) >= LAST_STEPS - 3 and {step["state"] for step in steps[len(done) :]} <= last_states
    assert all((step["kind"], step["rows"], step["kept"], step["zombies"]) == ("decode", 3, 3, 0) for step in done)
    assert all(step["device_ms"] > 0 and step["plan_ms"] >= 0 and step["version"] == 0 for step in done)
    contexts = [step["context"] for step in steps]
    assert contexts == list(range(contexts[0], contexts[0] + LAST_STEPS)), "each step is a token longer"
    assert steps[-1]["kept"] is None and steps[-1]["device_ms"] is None


@pytest.mark.nightly
def test_a_fault_that_is_recovered_from_and_one_that_is_not_print_the_last_steps(start: Callable) -> None:
    worker, folder = start("faulty")
    repaired = EngineConstants().max_faults
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        for count in range(1, repaired + 1):
            fail(worker, folder, "device", f"fault {count}")
            until(lambda count=count: client.status()["faults"] == count, "the fault to be counted")  # type: ignore[misc]
    fail(worker, folder, "commit", "last")
    until(lambda: worker.returncode is not None, "the end")
    lines = told(worker)
    *recovered, last = (line for line in lines if "steps" in line)
    for count, line in enumerate(recovered, start=1):
        check_block(line, f"fault {count}", {"in flight", "launching"})
        assert "RuntimeError: device" in line["trace"]
    check_block(last, "last", {"in flight"})
    assert len(recovered) == repaired and "AssertionError: commit" in last["trace"]
    whole = [(line["version"], line["faults"]) for line in lines if "faults" in line and "version" in line]
    assert whole == [(0, count) for count in range(1, repaired + 1)]
    (end,) = (line for line in lines if "max_faults" in line)
    assert (end["faults"], end["max_faults"]) == (repaired + 1, repaired)


@pytest.mark.nightly
def test_a_hang_that_lasts_prints_the_last_steps(start: Callable) -> None:
    worker, folder = start("hanging")
    fail(worker, folder, "hang", "late")
    until(lambda: worker.returncode is not None, "the end")
    (line,) = (line for line in told(worker) if "steps" in line)
    check_block(line, "late", {"in flight"})
    assert line["silent_s"] >= 4.0 and all(step["ago_s"] >= 4.0 for step in line["steps"][-2:])


@pytest.mark.nightly
def test_some_hundred_steps_leave_no_line_and_a_lost_prompt_says_whose_it_was(start: Callable) -> None:
    """And in text the last steps are one block, indented below the line that they belong to."""
    worker, folder = start("text")

    def lines() -> list[str]:
        return worker.log_path.read_text().splitlines()

    before = len(lines())
    with RolloutClient(worker.endpoint, timeout_s=60.0, client="many") as client:
        for _ in range(3):
            client.generate("17:", n=2, max_tokens=STEPS)
        assert client.control("trace", steps=2000)[0]["steps"]["rows"].size >= 3 * STEPS - 10
        assert len(lines()) == before
        with pytest.raises(InternalError):
            kill_prompt_process(client, worker)
    said = "\n".join(lines()[before:])
    assert "ERROR" in said and "[request=lost client=client:many why=" in said
    fail(worker, folder, "device", "text")
    begin = lines().index("  requests:", before)
    assert not lines()[begin - 1].startswith(" "), "the block belongs to a line"
    block = lines()[begin : begin + 2 + 1 + LAST_STEPS + 2]
    assert all(line.startswith("  ") for line in block)
    assert block[2].split() == ["client:text", "of#text"] and block[3] == "  steps:"
    assert block[4].split()[:4] == ["step", "state", "kind", "rows"]


def kill_prompt_process(client: RolloutClient, worker: WorkerProcess) -> None:
    """Have the process that prepares prompts stopped, given a prompt, and killed."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    (pid,) = [int(pid) for pid in children if "rollout.service.text" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(pid, signal.SIGSTOP)
    pending = client.generate("17:", request_id="lost", max_tokens=4, stream="tokens")
    until(lambda: client.status()["queue"]["waiting"] == 1, "the prompt to wait")
    os.kill(pid, signal.SIGKILL)
    pending.wait()
