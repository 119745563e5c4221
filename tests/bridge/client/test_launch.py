"""Starting and ending a worker process. The worker here is a few lines of Python with the same command line."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.process.logs import JsonFormatter, TextFormatter
from tests.support.bridge.fake_worker import FAKE_WORKER
from tests.support.patience import PATIENCE_S
from trainer_bridge.client.launch import WorkerFailed, WorkerProcess, flag_list, start_worker, worker_environment


def start(code: str = FAKE_WORKER, **settings: Any) -> WorkerProcess:
    return start_worker(
        "some/model", command=(sys.executable, "-c", code), **{"ready_timeout_s": PATIENCE_S, **settings}
    )


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(("mode", "status"), [("drain", 3), ("now", 4)])
def test_a_worker_is_asked_to_end(mode: Any, status: int) -> None:
    with start() as worker:
        assert worker.endpoint.startswith("tcp://127.0.0.1:") and worker.weights_endpoint == worker.endpoint
        assert worker.model == "some/model" and worker.returncode is None
        assert worker.endpoints == (worker.endpoint,) and worker.weights_endpoints == (worker.weights_endpoint,)
        assert worker.pids == (worker.pid,)
        assert worker.stop(mode) == status
        assert worker.returncode == status


@pytest.mark.parametrize("form", [TextFormatter, JsonFormatter])
def test_what_takes_long_at_the_start_is_told_on_stderr_unless_asked_not_to(
    form: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def line(logger: str, message: str) -> str:
        facts = {"name": logger, "levelname": "INFO", "msg": message, "stage": "loading weights", "done": 9}
        return form("box:7").format(logging.makeLogRecord(facts))

    log = tmp_path / "worker.log"
    log.write_text(line("rollout.progress", "of the worker before") + "\n")
    said = [("rollout.progress", "loading weights: 45 %"), ("rollout.engine.build", "beside it"), ("x", "of others")]
    lines = ["{", '{"a":' * 5000, *(line(*each) for each in said)]  # lines in another form are ignored
    code = f"print(*{lines!r}, sep='\\n', flush=True)\n{FAKE_WORKER}"
    with start(code, log_file=log):
        assert capfd.readouterr().err == "worker box:7: loading weights: 45 %\n"
    with start(code, log_file=log, progress=False):
        assert capfd.readouterr().err == ""


def test_leaving_the_context_ends_the_worker_at_once() -> None:
    with start() as worker:
        pass
    assert worker.returncode == 4


def test_a_worker_that_does_not_answer_is_terminated() -> None:
    with start(args=["--deaf"]) as worker:
        assert worker.stop(timeout_s=0.1) == -15


def test_a_worker_that_dies_first_leaves_its_last_words() -> None:
    with pytest.raises(WorkerFailed, match=r"status 7\nthe GPU is on fire") as caught:
        start("import sys; print('the GPU is on fire', flush=True); sys.exit(7)")
    assert caught.value.code == "worker_failed"


def test_a_worker_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    worker = start(code, wait=False)
    with pytest.raises(RuntimeError, match="still starting"):
        _ = worker.endpoint
    with pytest.raises(WorkerFailed, match="not ready after 0.05 s"):
        worker.wait_ready(0.05)
    worker.kill()
    assert is_gone(worker.pid)


def test_failing_to_start_kills_what_was_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"""
import json, os, sys, time
open({str(told)!r}, "w").write(str(os.getpid()))
path = sys.argv[sys.argv.index("--ready-file") + 1]
open(path, "w").write(json.dumps({{"endpoint": "x"}}))
time.sleep(600)
"""
    with pytest.raises(WorkerFailed, match="lacks 'weights_endpoint'") as caught:
        start(code)
    assert is_gone(int(told.read_text())), caught  # which keeps the worker's object alive


def test_a_worker_ends_with_the_job_that_forgot_it(tmp_path: Path) -> None:
    job = f"""
import sys
from trainer_bridge.client.launch import start_worker
worker = start_worker("m", command=(sys.executable, "-c", {FAKE_WORKER!r}))
print(worker.pid)
"""
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert is_gone(int(done.stdout))


def test_a_fork_of_the_job_does_not_end_the_worker() -> None:
    with start() as worker:
        end = worker._end  # Python calls it when the object goes, or the process ends
        child = os.fork()
        if child == 0:
            try:
                end()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert worker.returncode is None and not is_gone(worker.pid) and worker.log_path.exists()


def test_flags_and_environment_reach_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    log = tmp_path / "worker.log"
    with start(log_file=log, env={"EXTRA": "yes"}, args=["--last"], max_rows=8, wandb=False, dtype=None):
        pass
    line = log.read_text().splitlines()[0]
    assert line.startswith("ready ['some/model', '--bind', 'tcp://127.0.0.1:0', '--max-rows', '8', '--no-wandb',")
    assert re.search(r"'--ready-file', '/[^']+', '--exit-with-parent', '--last'\] None yes$", line)


def test_flags_are_spelt_as_on_the_command_line() -> None:
    flags = {"kv_pages": 64, "prefix_cache": False, "exit_with_parent": True, "config": None, "bind": "tcp://*:1"}
    assert flag_list(flags) == ["--kv-pages", "64", "--no-prefix-cache", "--exit-with-parent", "--bind", "tcp://*:1"]


def test_what_a_launcher_of_ranks_sets_does_not_leak() -> None:
    base = {
        "PATH": "/bin",
        "ROLLOUT_ENGINE__MAX_ROWS": "4",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "WANDB_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    kept = worker_environment(base, {"CUDA_VISIBLE_DEVICES": "7", "PATH": None, "ROLE": "w"})
    assert kept == {"ROLLOUT_ENGINE__MAX_ROWS": "4", "CUDA_VISIBLE_DEVICES": "7", "ROLE": "w"}


@pytest.mark.parametrize(
    ("base", "changes", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, {}, "1"),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "x"}, {}, "4"),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, {"OMP_NUM_THREADS": "1"}, "1"),
    ],
)
def test_a_number_of_threads_that_is_not_torchruns_stays(base: dict, changes: dict, threads: str) -> None:
    assert worker_environment(base, changes) == {"OMP_NUM_THREADS": threads}


def test_a_job_that_is_killed_leaves_its_folder_to_the_next_start(tmp_path: Path) -> None:
    job = f"""
import os, signal, sys
from trainer_bridge.client.launch import start_worker
worker = start_worker("m", command=(sys.executable, "-c", {FAKE_WORKER!r}))
print(worker.log_path.parent, worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, timeout=PATIENCE_S)
    folder, pid = done.stdout.split()
    try:
        assert Path(folder, "ready.json").exists()
        with start() as first, start() as second:
            assert not Path(folder).exists()
            assert first.log_path.exists() and second.log_path.exists(), "those of live jobs stay"
    finally:
        os.killpg(int(pid), signal.SIGKILL)  # this worker does not look after its parent


def test_a_worker_that_cannot_be_started_leaves_no_folder(tmp_path: Path, temporary_folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_worker("m", command=("/no/such/command",))
    with pytest.raises(FileNotFoundError):
        start(log_file=tmp_path / "no" / "such" / "folder.log")
    assert list(temporary_folder.iterdir()) == []


def test_a_stopped_worker_leaves_no_folder() -> None:
    with start() as worker:
        folder = worker.log_path.parent
        assert folder.is_dir() and "ready" in worker.log_tail()
    assert not folder.exists()
    assert "gone" in worker.log_tail()
