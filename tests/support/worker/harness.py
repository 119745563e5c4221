"""Real workers for tests: starting them, waiting for a state, checking the tokens that they count."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.demo.counting import CountingReport, check_completion
from tests.support.patience import PATIENCE_S
from tests.support.worker.zygote import forked
from trainer_bridge.client.blocking import RolloutClient, Stream
from trainer_bridge.client.launch import WorkerProcess, flag_list, start_worker, worker_environment
from trainer_bridge.client.results import Completion
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.scratch import ScratchFolder
from trainer_bridge.wire.keys import ClientCurve

ROOT = Path(__file__).parents[3]
CHECKPOINTS = ROOT / "rollout" / "demo" / "checkpoints"
ONES, TWOS = CHECKPOINTS / "ones", CHECKPOINTS / "twos"

_SETTINGS = ("ROLLOUT_", "WANDB_")
#: The sources come first, then what the tests' own process was given, such as packages of a GPU machine.
_QUICK = ROOT / "tests" / "support" / "quick_transformers"
_PATHS = [str(ROOT), str(ROOT / "kernels"), str(_QUICK), *filter(None, [os.environ.get("PYTHONPATH")])]
#: Variables that nothing reads at its import, but a test's own `sitecustomize`, which a forked process runs too.
_READ_LATE = {"PYTHONPATH", "TMPDIR", "FAULTY_FOLLOWER", "SLOW_S"}
_ALWAYS = {"PYTHONPATH": os.pathsep.join(_PATHS), "OMP_NUM_THREADS": "1"}

#: Token texts by id, as in the checkpoints' tokenizer.json.
TEXTS = ("<pad>", "<eos>", "<unk>", *"0123456789 :\n")
EOS, SPACE, COLON = 1, TEXTS.index(" "), TEXTS.index(":")


def subprocess_environment(**changes: str) -> dict[str, str]:
    """This environment without settings of a worker and without a W&B account, and with the sources on the path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}
    return {**kept, **_ALWAYS, **changes}


def hooked(name: str) -> dict[str, str]:
    """The variable by which Python imports `sitecustomize` of the folder `name` beside this file at its start."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / name), _ALWAYS["PYTHONPATH"]])}


def launch(
    model: Path | str = ONES, *, log: Path, wait: bool = True, env: Mapping[str, str | None] | None = None, **flags: Any
) -> WorkerProcess:
    """A worker without W&B, and with KV for 65,536 tokens of ONES: all of it is written to at the start.

    It is forked (`tests.support.worker.zygote`), unless `env` has a variable that libraries may read at their import.
    """
    flags = {"wandb": False, "drain_s": 60, "kv_memory_max_gib": 1 / 32, **flags}
    if env and not _READ_LATE.issuperset(env):
        without = {name: None for name in os.environ if name.startswith(_SETTINGS)}
        return start_worker(model, log_file=log, wait=wait, env={**without, **_ALWAYS, **env}, **flags)
    return _fork(model, log, wait, env or {}, **flags)


def _fork(
    model: Path | str,
    log: Path,
    wait: bool,
    late: Mapping[str, str],
    ready_timeout_s: float = 900.0,
    command: Sequence[str] = (sys.executable, "-m", "rollout.cli.main", "serve"),
    args: Sequence[str] = (),
    curve: ClientCurve | None = None,
    **flags: Any,
) -> WorkerProcess:
    """What `start_worker` does, with a fork."""
    scratch = ScratchFolder("worker")
    ready_file = scratch.path / "ready.json"
    given = {"bind": "tcp://127.0.0.1:0", **flags, "ready_file": ready_file, "exit_with_parent": True}
    _, _, module, *words = command
    words += [os.fspath(model), *flag_list(given), *args]
    process: Any = forked(module, words, worker_environment(subprocess_environment(), {}), late, log)
    worker = WorkerProcess(process, scratch, ready_file, log, curve)
    if wait:
        try:
            worker.wait_ready(ready_timeout_s)
        except BaseException:
            worker.kill()
            raise
    return worker


def launch_shared(log: Path) -> WorkerProcess:
    """A worker that counts in ones, with room for the tests that share it."""
    flags: dict[str, Any] = {"max_rows": 8, "max_queue": 24, "max_context_tokens": 32_768}
    if importlib.util.find_spec("prometheus_client") is not None:
        flags |= {"metrics_port": 0, "interval_s": 0.5}
    return launch(log=log, ready_timeout_s=120, **flags)


def rollout(*arguments: str) -> list[str]:
    """The command line of the `rollout` command."""
    return [sys.executable, "-m", "rollout.cli.main", *arguments]


def until(condition: Callable[[], Any], what: str, deadline_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"still waiting for {what}"
        time.sleep(0.002)
    return value


def token_ids(text: str) -> list[int]:
    """Token ids of a counting text; one a character."""
    return [TEXTS.index(character) for character in text]


def text_of(tokens: Any) -> str:
    """The text of tokens that are not special."""
    return "".join(TEXTS[token] for token in tokens)


def check(prompt: str, completion: Completion, steps: dict[int, int]) -> CountingReport:
    """Check every token against the version stamped on it; `steps` maps a version to the step that it counts in."""
    return check_completion(prompt, completion.token_ids.tolist(), completion.versions, steps, TEXTS.__getitem__)


def is_gone(pid: int) -> bool:
    """True if there is no such process, or it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def facts(log: Path) -> list[dict[str, Any]]:
    """The JSON lines of a worker's output: ready and, at the end, ended."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"event"')]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint that counts in `step`: 1 or 2."""
    return load_file({1: ONES, 2: TWOS}[step] / "model.safetensors")


def kill_publisher_half_way(endpoint: str, version: int, amid: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Start a publisher, kill it in the middle of its buckets; the weights' status once the worker had some of them.

    `amid` is called right before it is killed.
    """
    command = [sys.executable, "-m", "scripts.check.soak.half_publisher", endpoint, str(TWOS), str(version)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=subprocess_environment()) as process,
        WeightPublisher(endpoint) as watcher,
    ):
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        assert process.poll() is None

        def receiving() -> dict[str, Any] | None:
            status = watcher.status()[0]
            return status if (status["incoming"] or {}).get("arrived_bytes") else None

        try:
            status = until(receiving, "the first buckets")
            amid()
        finally:
            process.kill()
    return status


def paused_amid(client: RolloutClient, **request: Any) -> Stream:
    """The stream of one completion, of which a paused worker has a part; it is asked for again if the pause came late.

    On a busy machine a short one may be over before the pause comes.
    """

    def over() -> bool:
        return sum(map(len, stream.partials())) == request["max_tokens"]

    def held() -> bool:
        status = client.status()
        return status["slots"]["in_flight"] == 0 and status["rows"]["running"] + status["queue"]["waiting"] == 1

    while True:
        stream = client.generate(**request, stream="tokens")
        next(stream)
        client.pause("keep")
        until(lambda: held() or over(), "the last step")
        if not over():
            return stream
        client.resume()
        stream.wait()


def assert_idle(worker: WorkerProcess) -> None:
    """Wait until no row, page or slot is in use and no request waits; the worker must not be paused or asleep."""
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:

        def idle() -> bool:
            status = client.status()
            pages, slots = status["pages"], status["slots"]["in_flight"]
            busy = status["rows"]["running"], status["queue"]["waiting"], pages["used"], slots
            return busy == (0, 0, 0, 0) and pages["free"] + pages["cached"] == pages["total"]

        left_in = client.status()["state"]
        if left_in == "paused":
            client.pause("abort")  # so that the next test has a chance
            client.resume()
        until(idle, "the worker to be idle again")
        assert left_in == "serving"
