"""The workers, the gateway and the trainer of the benchmark: this project's own processes, with random weights."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.agents.trace import Trajectory, count, longest
from scripts.bench.shapes import model_config, write_checkpoint
from scripts.bench.swap_trainer import Order, Trainer
from trainer_bridge.client.launch import WorkerProcess, start_worker

_PAGE = 16
_READY_S = 900.0
_START_S = 120.0
_UPDATE_S = 300.0


def checkpoint(shape: str, folder: Path, context: int) -> Path:
    """A checkpoint without weights whose model takes contexts of `context` tokens, where the shape takes fewer."""
    config = model_config(shape)
    write_checkpoint(shape, folder)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], context)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def pool_pages(trajectories: Sequence[Trajectory], agents: int, share: float) -> int:
    """Pages for this share of the KV that the first agents hold at their ends; at least for the longest context."""
    held = count(trajectories[:agents]).held
    return max(int(share * held), longest(trajectories) + 2 * _PAGE) // _PAGE + agents


def worker_flags(device: str, rows: int, context: int, pages: int | None) -> dict[str, Any]:
    """Flags of a worker with `rows` rows and `pages` pages (None: what fits)."""
    return {
        "load_format": "random", "device": device, "max_rows": rows, "max_context_tokens": context + _PAGE,
        "page_size": _PAGE, "kv_pages": pages, "metrics_port": 0, "interval_s": 0.5, "wandb": False,
    }  # fmt: skip


@contextlib.contextmanager
def workers(
    folder: Path, number: int, device: str, rows: int, context: int, pages: int | None, more: Mapping[str, str]
) -> Iterator[list[WorkerProcess]]:
    """Workers of a checkpoint, each with the flags of `worker_flags`. `more` are further flags.

    On GPUs each has its own one. The end of a log is printed if something fails.
    """
    flags = {**worker_flags(device, rows, context, pages), **more}
    with contextlib.ExitStack() as stack:
        started = []
        try:
            for i in range(number):
                own = {} if device == "cpu" or number == 1 else {"device": f"cuda:{i}"}
                started.append(
                    stack.enter_context(start_worker(folder, progress=False, wait=False, **{**flags, **own}))
                )
            for worker in started:
                worker.wait_ready(_READY_S)
            yield started
        except BaseException:
            for worker in started:
                print(worker.log_path.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
            raise


@contextlib.contextmanager
def gateway(endpoints: Sequence[str]) -> Iterator[str]:
    """A gateway in front of workers: its URL."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        words = ["gateway", *endpoints, "--port", "0", "--ready-file", str(ready)]
        command = [sys.executable, "-m", "rollout.cli.main", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end_s = time.monotonic() + _START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError("the gateway did not start; see its lines above")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"]
        finally:
            process.terminate()
            process.wait()


class Publisher:
    """A trainer in a process of its own, which publishes random weights of a checkpoint.

    It has memory for the first `layers` layers only, as `scripts.bench.swap` says.
    """

    def __init__(self, folder: Path, endpoints: Sequence[str], device: str, layers: int) -> None:
        order = Order(
            folder=str(folder),
            endpoints=list(endpoints),
            device="",
            bucket_bytes=None,
            disk="",
            limit_s=_UPDATE_S,
            layers=layers,
        )
        self._trainer = Trainer(order, [device])
        self._lock, self._version = threading.Lock(), 0

    def publish(self) -> tuple[int, float, float]:
        """Publish the next version; returns it, seconds until in use, and the pause. Raises RuntimeError."""
        with self._lock:  # a replay that ended may have left an update under way
            self._version += 1
            answer = self._trainer.ask("publish", version=self._version, transport="auto")
            if "error" in answer:
                raise RuntimeError(f"update {self._version} failed: {answer['error']}")
            return self._version, answer["report"]["seconds"], answer["report"]["pause_s"]

    def close(self) -> None:
        """End the trainer."""
        with self._lock:
            self._trainer.close()
