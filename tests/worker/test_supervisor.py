"""Several workers and their supervisor: one that dies comes back where it was, and none outlives its job."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout.cli.main import parser_of
from rollout.cli.serve import command_line
from rollout.config import EngineSettings, ModelSettings, ServiceSettings, Settings, SupervisorSettings
from rollout.ranks.thread_stat import thread_stat
from rollout.settings_sources import load_settings, setting_keys
from rollout.supervisor import Supervisor, assign_devices, nth_endpoint
from tests.support.worker.harness import ONES, TWOS, check, is_gone, launch, subprocess_environment, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import ConnectionLost

LONG: dict[str, Any] = {"max_tokens": 30_000, "stream": "tokens", "stream_every": 8}
FLAGS: dict[str, Any] = {"workers": 2, "device": "cpu", "restart_backoff_s": 0.1, "max_context_tokens": 32_768}
STEPS = {0: 1, 1: 2}  # how far each version of the weights counts on


def says(worker: WorkerProcess) -> list[dict[str, Any]]:
    """What the supervisor said; the workers' own lines have no `worker` in them."""
    lines = [json.loads(line) for line in worker.log_path.read_text().splitlines() if line.startswith('{"event"')]
    return [line for line in lines if "worker" in line or "workers" in line]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("pair") / "worker.log"
    with launch(log=log, ready_timeout_s=120, **FLAGS) as worker:
        yield worker


def test_a_worker_that_is_killed_comes_back_and_the_other_goes_on(pair: WorkerProcess) -> None:
    first, second = pair.endpoints
    assert pair.endpoint == first != second and len({*pair.weights_endpoints, first, second}) == 4
    pids = pair.pids
    assert len({*pids, pair.pid}) == 3
    said = len(says(pair))
    with RolloutClient(pair.endpoints, timeout_s=60.0) as client:
        restarts = [status["restarts"] for status in client.statuses().values()]
        doomed = client.generate("17:", endpoint=first, **LONG)
        other = client.generate("17:", endpoint=second, **LONG | {"max_tokens": 600})  # or it takes a core for long
        next(doomed), next(other)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            doomed.wait()
        (partial,) = doomed.partials()
        check("17:", partial, STEPS)
        until(lambda: pair.pids[0] != pids[0], "the restart")
        assert pair.endpoints == (first, second) and pair.pids[1] == pids[1]
        (completion,) = client.generate("17:", endpoint=first, max_tokens=400).completions
        assert check("17:", completion, STEPS).tokens == 400
        statuses = client.statuses()
        assert [statuses[endpoint]["restarts"] for endpoint in (first, second)] == [restarts[0] + 1, restarts[1]]
        (completion,) = other.wait().completions  # nothing has happened to it
        assert completion.finish_reason == "length" and check("17:", completion, STEPS).tokens == 600
    until(lambda: len(says(pair)) >= said + 2, "both events")
    events = [(fact["event"], fact.get("worker"), fact.get("status")) for fact in says(pair)[said:]]
    assert events == [("worker_ended", 0, -signal.SIGKILL), ("worker_ready", 0, None)]


@pytest.mark.nightly
def test_a_worker_that_was_started_again_gets_the_newest_weights_and_serves_no_older_ones(pair: WorkerProcess) -> None:
    _, second = pair.endpoints
    with (
        RolloutClient(pair.endpoints, timeout_s=60.0) as client,
        WeightPublisher(pair.endpoints, keep=True) as publisher,
    ):
        publisher.publish(load_file(TWOS / "model.safetensors"), 1).applied(60)
        before, restarts = pair.pids[1], client.status(second)["restarts"]
        os.kill(before, signal.SIGKILL)
        until(lambda: pair.pids[1] != before, "the restart")  # with the checkpoint that it was launched with
        (completion,) = client.generate("17:", endpoint=second, max_tokens=60, min_version=1).completions
        assert completion.versions == [(1, 60)]
        check("17:", completion, {1: 2})
        status = client.status(second)
        assert (status["weights_version"], status["restarts"]) == (1, restarts + 1)


@pytest.mark.nightly
def test_sigterm_drains_all_workers(tmp_path: Path) -> None:
    with launch(log=tmp_path / "worker.log", ready_timeout_s=120, **FLAGS) as pair:
        with RolloutClient(pair.endpoints, timeout_s=60.0) as client:
            streams = [
                client.generate("17:", endpoint=endpoint, **{**LONG, "max_tokens": 600}) for endpoint in pair.endpoints
            ]
            for stream in streams:
                next(stream)
            os.kill(pair.pid, signal.SIGTERM)
            assert [stream.wait().completions[0].finish_reason for stream in streams] == ["length"] * 2
        assert until(lambda: pair.returncode is not None, "the end") and pair.returncode == 0
        ended = says(pair)[-1]
    assert ended["event"] == "ended" and [fact["status"] for fact in ended["workers"]] == [0, 0]


JOB = """
import os, sys
from trainer_bridge.client.launch import start_worker
if os.environ["RANK"] == "0":
    worker = start_worker(sys.argv[1], workers=2, device="cpu", wandb=False, drain_s=0, log_file=sys.argv[2])
    print("pids", worker.pid, *worker.pids, flush=True)
    sys.stdin.read()
"""


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


@pytest.mark.nightly
def test_workers_of_a_torchrun_job_have_none_of_its_variables_and_end_with_their_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = subprocess_environment()
    with subprocess.Popen(
        [*command, str(script), str(ONES), str(tmp_path / "log")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=plain,
    ) as job:  # fmt: skip
        assert job.stdout is not None and job.stdin is not None
        line = next(line for line in job.stdout if line.startswith("pids"))
        supervisor, *workers = map(int, line.split()[1:])
        assert len(workers) == 2
        for pid in (supervisor, *workers):
            environ = environment_of(pid)
            added = set(environ) - set(plain)
            assert not {name for name in added if "RANK" in name or "WORLD" in name or "TORCHELASTIC" in name}
            assert not added & {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: all(map(is_gone, workers)), "the workers to be gone", 30.0)
        job.stdin.close()
        assert job.wait(60) == 0


# --- the supervisor alone: its workers are a few lines of Python -----------------------------------------------------

#: Runs a supervisor whose worker 0 reports ready and ends with the status in argv[2].
SUPERVISE = """
import json, os, sys
from rollout.config import EngineSettings, ServiceSettings, Settings, SupervisorSettings
from rollout.supervisor import Supervisor
worker = '''
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
place, status = flags["--bind"][-1], int(os.environ["STATUS"])
if place == "0" and os.environ["GO"] == "never":
    sys.exit(status)
told = {"event": "ready", "endpoint": flags["--bind"], "weights_endpoint": "x", "pid": os.getpid(), "model": "m"}
if place == "1":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # not the end of Python, in which another one would kill
path = flags["--ready-file"]
open(path + ".part", "w").write(json.dumps(told | {"weights_version": 0}))
said = " ".join(["started", place, flags["--restarts"], str(os.environ.get("RANK"))])
os.write(2, (said + chr(10)).encode())  # at once: the other worker has the same pipe
os.replace(path + ".part", path)
if place == "0" and os.path.exists(os.environ["GO"]):
    sys.exit(status)
while not (place == "0" and os.path.exists(os.environ["GO"])):
    time.sleep(0.01)
sys.exit(status)
'''
settings = Settings(
    ready_file=os.environ["READY"],
    service=ServiceSettings(bind="tcp://127.0.0.1:7000", drain_s=0),
    supervisor=SupervisorSettings(workers=2, max_restarts=2, restart_backoff_s=0.01),
    engine=EngineSettings(rank_stall_s=None if os.environ["STALL_S"] == "none" else 8.0),
)
sys.exit(Supervisor(settings, [sys.executable, "-c", worker], [None, None]).run())
"""


class Supervised:
    """The script above, and what it says."""

    def __init__(self, folder: Path, status: int, stall_s: str = "8") -> None:
        self.go, self._ready_file = folder / "go", folder / "ready.json"
        settings = {"STATUS": str(status), "STALL_S": stall_s, "RANK": "1"}
        environ = subprocess_environment(**settings, GO=str(self.go), READY=str(self._ready_file))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def told(self) -> list[tuple[bool, int | None]]:
        """Of each worker in the ready file: whether there is a process, and the status that it left for good."""
        workers = json.loads(self._ready_file.read_text())["workers"]
        return [(worker["pid"] is not None, worker.get("status")) for worker in workers]

    def end(self) -> tuple[int, list[str]]:
        assert self.process.stderr is not None
        lines = [line for line in self.process.stderr.read().splitlines() if line.startswith("started ")]
        return self.process.wait(60), lines


def test_a_worker_that_was_never_ready_ends_all_with_its_status(tmp_path: Path) -> None:
    environ = subprocess_environment(STATUS="7", STALL_S="8", GO="never", READY=str(tmp_path / "ready.json"))
    done = subprocess.run([sys.executable, "-c", SUPERVISE], capture_output=True, text=True, env=environ, timeout=150)
    assert done.returncode == 7 and "a worker ended before it could serve" in done.stderr
    (ended,) = map(json.loads, done.stdout.splitlines())  # and no `ready`
    assert ended["workers"][0]["status"] == 7


def test_a_worker_that_dies_too_often_is_given_up_and_the_other_serves_on(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, status=3)
    assert [worker["endpoint"][-4:] for worker in supervised.ready["workers"]] == ["7000", "7001"]
    assert supervised.ready["pid"] == supervised.process.pid
    supervised.go.touch()
    facts: list[dict[str, Any]] = []
    while not facts or facts[-1].get("restart_in_s", 0) is not None:
        facts.append(supervised.next())
    ends = [(fact["status"], fact["restart_in_s"]) for fact in facts if fact["event"] == "worker_ended"]
    assert ends == [(3, 0.01), (3, 0.02), (3, None)]
    assert supervised.process.poll() is None and supervised.told() == [(False, 3), (True, None)]
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.next() == {
        "event": "ended",
        "workers": [{"worker": 0, "status": 3, "restarts": 2}, {"worker": 1, "status": 0, "restarts": 0}],
    }
    status, lines = supervised.end()
    assert status == 1, "a worker was given up"
    assert sorted(lines) == ["started 0 0 None", "started 0 1 None", "started 0 2 None", "started 1 0 None"]


def test_a_worker_that_ended_in_order_stays_away(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, status=0)
    assert supervised.told() == [(True, None)] * 2
    supervised.go.touch()
    until(lambda: supervised.told() == [(False, 0), (True, None)], "the ready file to be right")
    os.kill(supervised.ready["workers"][1]["pid"], signal.SIGTERM)
    assert [fact["status"] for fact in supervised.next()["workers"]] == [0, 0]
    status, lines = supervised.end()
    assert status == 0 and len(lines) == 2


def test_a_stopped_worker_is_killed_and_started_again(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, status=3)
    stopped_s = time.monotonic()
    os.kill(supervised.ready["workers"][1]["pid"], signal.SIGSTOP)
    assert supervised.next() == {"event": "worker_ended", "worker": 1, "status": -signal.SIGKILL, "restart_in_s": 0.01}
    assert time.monotonic() - stopped_s > 5.8  # a look counts up to 0.1 s, a part of it perhaps before the stop
    assert supervised.next()["event"] == "worker_ready"
    supervised.process.send_signal(signal.SIGTERM)
    status, lines = supervised.end()
    assert status == 0 and "started 1 1 None" in lines


@pytest.mark.nightly
def test_a_stopped_worker_stays_where_nothing_is_to_be_ended(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, status=3, stall_s="none")
    os.kill(supervised.ready["workers"][1]["pid"], signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        supervised.process.wait(12.0)
    assert supervised.told() == [(True, None)] * 2
    os.kill(supervised.ready["workers"][1]["pid"], signal.SIGCONT)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.end()[0] == 0


def test_a_second_signal_is_passed_on(tmp_path: Path) -> None:
    """Worker 0 ends with the first, by default; worker 1 is SIGTERM's own."""
    supervised = Supervised(tmp_path, status=0)
    supervised.process.send_signal(signal.SIGTERM)
    supervised.process.send_signal(signal.SIGINT)
    assert [fact["status"] for fact in supervised.next()["workers"]] == [-signal.SIGTERM, 0]
    assert supervised.end()[0] == 0


def test_a_supervised_worker_leaves_ctrl_c_to_its_supervisor() -> None:
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's `&` ignores it
        "from rollout.cli import serve; serve._serve = lambda *_: "
        "sys.exit(10 + (signal.getsignal(signal.SIGINT) is signal.SIG_IGN)); from rollout.cli.main import main; main()"
    )
    for flags, status in ((["--restarts", "0"], 11), ([], 10)):
        command = [sys.executable, "-c", script, "serve", "m", *flags]
        assert subprocess.run(command, env=subprocess_environment()).returncode == status


def test_a_worker_that_is_back_while_the_first_is_down_keeps_all_endpoints_listed(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    service = ServiceSettings(bind="tcp://127.0.0.1:7000")
    settings = Settings(service=service, ready_file=str(ready), supervisor=SupervisorSettings(workers=2))
    supervisor = Supervisor(settings, [sys.executable, "-c", ""], [None, None])

    def comes(index: int, pid: int) -> None:
        worker = supervisor.workers[index]
        told = {"endpoint": worker.bind, "weights_endpoint": "w", "pid": pid, "weights_version": 0, "model": "m"}
        supervisor.ready_file_of(worker).write_text(json.dumps(told))
        supervisor.read_ready_file(worker)

    comes(0, 10), comes(1, 11)
    for worker in supervisor.workers:
        supervisor.start(worker)
        assert worker.process is not None and worker.process.wait(60) == 0
    comes(1, 21)
    told = json.loads(ready.read_text())
    assert told["endpoint"] == "tcp://127.0.0.1:7000"
    assert [(worker["endpoint"][-4:], worker["pid"]) for worker in told["workers"]] == [("7000", 10), ("7001", 21)]
    supervisor.folder.close()


def test_a_worker_that_is_stopped_during_its_start_is_not_killed(tmp_path: Path) -> None:
    """No client waits yet, and if this worker ended, all workers would be ended."""
    supervisor = Supervisor(Settings(), [sys.executable, "-c", "import time; time.sleep(60)"], [None])
    (worker,) = supervisor.workers
    supervisor.start(worker)
    assert worker.process is not None
    worker.process.send_signal(signal.SIGSTOP)
    until(lambda: thread_stat(worker.process.pid, worker.process.pid).state == "T", "the stop")
    for _ in range(3):
        supervisor.check(worker, 60.0)
    assert worker.process is not None and worker.process.poll() is None
    worker.ready = True
    supervisor.check(worker, 60.0)
    assert worker.process.wait(60) == -signal.SIGKILL
    supervisor.folder.close()


def test_a_worker_that_waits_for_its_restart_is_not_started_after_a_signal(tmp_path: Path) -> None:
    supervisor = Supervisor(Settings(supervisor=SupervisorSettings(workers=2)), [sys.executable, "-c", ""], [None] * 2)
    first, second = supervisor.workers
    supervisor.start(first)
    second.due_s = 0.0
    supervisor.on_signal(signal.SIGTERM, None)
    for _ in range(3):  # the other one takes a while to end
        supervisor.check(second, 0.05)
    assert (second.process, second.status) == (None, 0)
    assert first.process is not None and first.process.wait(60) == 0
    supervisor.folder.close()


# --- plain functions -------------------------------------------------------------------------------------------------


def settings_for(workers: int, device: str = "auto", ranks: int = 1) -> Settings:
    return Settings(
        model=ModelSettings(device=device),
        engine=EngineSettings(tensor_parallel=ranks),
        supervisor=SupervisorSettings(workers=workers),
    )


def test_each_worker_has_a_device_of_its_own() -> None:
    assert assign_devices(settings_for(2, "cuda"), {"CUDA_VISIBLE_DEVICES": "3, 5,7"}) == ["3", "5"]
    assert assign_devices(settings_for(2), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ["GPU-a", "GPU-b"]
    assert assign_devices(settings_for(3, "cpu"), {"CUDA_VISIBLE_DEVICES": "0"}) == [None] * 3
    assert assign_devices(settings_for(2), {"CUDA_VISIBLE_DEVICES": ""}) == [None] * 2
    assert assign_devices(settings_for(1, "cuda:1"), {"CUDA_VISIBLE_DEVICES": "0,1"}) == [None]
    for device, message in (("cuda:1", "single device for 2 workers"), ("cuda", "1 CUDA devices are visible")):
        with pytest.raises(ValueError, match=message):
            assign_devices(settings_for(2, device), {"CUDA_VISIBLE_DEVICES": "0"})


def test_each_rank_of_each_worker_has_a_device_of_its_own() -> None:
    six = {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2"}
    assert assign_devices(settings_for(2, ranks=2), six) == ["7,6", "5,4"]
    assert assign_devices(settings_for(1, "cuda", ranks=4), six) == ["7,6,5,4"]
    assert assign_devices(settings_for(3, ranks=2), six) == ["7,6", "5,4", "3,2"]
    assert assign_devices(settings_for(2, "cpu", ranks=2), six) == [None] * 2
    assert assign_devices(settings_for(1, ranks=2), {"CUDA_VISIBLE_DEVICES": ""}) == [None]
    for workers, ranks in ((2, 4), (1, 8), (4, 2)):
        message = f"workers is {workers} of {ranks} devices each, but 6 CUDA devices are visible"
        with pytest.raises(ValueError, match=message):
            assign_devices(settings_for(workers, ranks=ranks), six)


@pytest.mark.parametrize(
    ("bind", "third"),
    [
        ("tcp://0.0.0.0:5757", "tcp://0.0.0.0:5759"),
        ("tcp://[::1]:80", "tcp://[::1]:82"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///tmp/socket", "ipc:///tmp/socket-2"),
    ],
)
def test_endpoints_count_up(bind: str, third: str) -> None:
    assert nth_endpoint(bind, 2) == third


#: Runs a supervisor whose workers write down their flags and W&B's variables, and end once all have.
WRITE_FLAGS = """
import json, sys
from rollout.config import Settings
from rollout.supervisor import Supervisor
worker = '''
import json, os, sys, time
folder = os.environ["FOLDER"]
path = os.path.join(folder, str(os.getpid()))
names = [word for name in ("WANDB_NAME", "WANDB_RUN_GROUP") for word in (name, os.environ[name])]
open(path + ".part", "w").write(json.dumps([*sys.argv[1:], *names]))
os.replace(path + ".part", path)
while len([name for name in os.listdir(folder) if name.isdigit()]) < 2:
    time.sleep(0.01)
'''
settings = Settings(**json.loads(sys.argv[1]))
Supervisor(settings, [sys.executable, "-c", worker], [None, None]).run()
"""


def flags_of_workers(
    folder: Path, metrics: dict[str, Any], model: str = "m", wandb: dict[str, str] | None = None
) -> list[list[str]]:
    """The flags that a supervisor adds for each of two workers, then W&B's variables and their values."""
    given = {
        "model": {"path": model},
        "metrics": metrics,
        "service": {"bind": "tcp://127.0.0.1:7000"},
        "supervisor": {"workers": 2},
    }
    environ = subprocess_environment(FOLDER=str(folder), **(wandb or {}))
    command = [sys.executable, "-c", WRITE_FLAGS, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    flags = [json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdigit()]
    assert len(flags) == 2, done.stderr
    return sorted(flags, key=lambda flags: flags[flags.index("--bind") + 1])


def test_workers_do_not_share_a_file_or_a_name(tmp_path: Path) -> None:
    metrics = {"jsonl": "runs/m.jsonl", "metrics_port": 9400}
    flags = flags_of_workers(tmp_path, metrics, wandb={"WANDB_NAME": "job"})[1]
    for pair in (
        ("--jsonl", "runs/m-1.jsonl"),
        ("WANDB_NAME", "job-1"),
        ("--metrics-port", "9401"),
    ):
        assert pair in list(zip(flags, flags[1:], strict=False))


def test_each_worker_has_a_run_of_its_own_with_a_name_that_people_can_read(tmp_path: Path) -> None:
    runs, names = [], []
    for flags in flags_of_workers(tmp_path, {}, model="/models/ones"):
        at = flags.index("--continued-run")
        runs.append(flags[at + 1 : at + 3])
        names.append(flags[flags.index("WANDB_NAME") + 1])
    assert names == ["ones-0", "ones-1"]
    (first, file), (second, other) = runs
    assert first != second and file != other and first.rpartition("-")[0] == second.rpartition("-")[0]


@pytest.mark.parametrize("own", [None, "job"])
def test_the_runs_of_all_workers_are_in_one_group(own: str | None, tmp_path: Path) -> None:
    wandb = {} if own is None else {"WANDB_RUN_GROUP": own}
    first, second = (flags[flags.index("WANDB_RUN_GROUP") + 1] for flags in flags_of_workers(tmp_path, {}, wandb=wandb))
    assert first == second and first == (own or first) != ""


def test_a_command_line_written_out_again_means_the_same() -> None:
    """Every flag, with a value that is not the default, and one that begins with a dash."""
    words = ["the model", "--no-wandb", "--exit-with-parent", "--no-prefix-cache", "--wandb-project=-x"]
    words += ["--max-rows", "7", "--kv-pages", "none", "--weights-bind", "tcp://*:1", "--config", "file.toml"]

    def given(words: list[str]) -> tuple[str, dict[str, Any]]:
        args = vars(parser_of("serve").parse_args(words))
        return args["config"], {key.path: args[key.path] for key in setting_keys() if key.path in args}

    again = given(command_line(*given(words)))
    assert again == given(words) and again[1]["metrics.wandb_project"] == "-x"
    own = ["--workers", "1", "--bind", "tcp://127.0.0.1:9"]
    flags = given([*command_line(None, {**again[1], "supervisor.workers": "4"}), *own])[1]
    settings = load_settings(None, {}, flags)
    assert settings.supervisor.workers == 1 and settings.service.bind == "tcp://127.0.0.1:9"
    assert settings.engine.max_rows == 7 and settings.metrics.wandb_project == "-x"
