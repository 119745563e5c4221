"""The service as a trainer uses it: a worker process, or several that share the work, and the project's client."""

import tempfile
import time
from pathlib import Path

import numpy as np

from scripts.bench.peers.experiments import Finished, Row
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import engine_settings
from scripts.bench.peers.workloads import Work
from scripts.bench.shapes import model_config, write_checkpoint
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
from trainer_bridge.wire.errors import RolloutError

_TIMEOUT_S = 900.0
_LOG_CHARS = 4000


class ServiceEngine:
    """`rollout serve` with random weights of the job's shape, and one client.

    Several workers have the rows of the job together. The client chooses a worker for each request.
    """

    keeps_prefixes = True
    sees_tokens = False
    can_repeat = False

    def __init__(self, job: Job) -> None:
        began_s = time.perf_counter()
        self._job, self._idle_gpu_s = job, 0.0
        self._folder = tempfile.TemporaryDirectory()
        engine = engine_settings(job, depth=2)
        self._worker = start_worker(
            write_checkpoint(job.shape, Path(self._folder.name), job.layers),
            load_format="random",
            device=job.device,
            tensor_parallel=job.ranks,
            workers=job.workers,
            max_rows=-(-engine.max_rows // job.workers),
            max_context_tokens=engine.max_context_tokens,
            kv_memory_fraction=engine.kv_memory_fraction,
            kv_memory_max_gib=engine.kv_memory_max_gib,
            wandb=False,
        )
        self._client = RolloutClient(self._worker.endpoints, timeout_s=_TIMEOUT_S)
        config = model_config(job.shape)
        self.vocab, self.hidden = config["vocab_size"], config["hidden_size"]
        pages = [status["pages"]["total"] for status in self._client.statuses().values()]
        self.capacity_tokens = sum(pages) * engine.page_size
        self._facts = {
            "start_s": time.perf_counter() - began_s,
            "kv_tokens": self.capacity_tokens,
            "rows_of_a_worker": -(-engine.max_rows // job.workers),
        }

    def generate(self, work: Work) -> Finished:
        """Make all completions of `work`, to their full lengths, all asked for at once."""
        requests = [
            {"prompt": np.asarray(prompt, dtype=np.int32), "max_tokens": length, "n": work.n, "seed": i}
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        ends, done = [], []
        busy_before_s, began_s = self._busy_s(), time.perf_counter()
        try:
            for settled in self._client.generate_as_completed(
                requests, temperature=1.0, stop={"ignore_eos": True}, timeout_s=_TIMEOUT_S
            ):
                ends += [time.perf_counter() - began_s] * work.n
                done.append((settled.index, settled.unwrap()))
        except RolloutError:
            print(self._worker.log_path.read_text(errors="replace")[-_LOG_CHARS:])
            raise
        for index, result in done:
            for completion in result.completions:
                assert len(completion.token_ids) == work.lengths[index], "a completion is too short"
                assert len(completion.logprobs) == work.lengths[index]
        self._client.ack([result.id for _, result in done])  # otherwise the worker keeps them
        self._idle_gpu_s = self._job.gpus * ends[-1] - (self._busy_s() - busy_before_s)
        return Finished(ends)

    def facts(self) -> Row:
        """Seconds until the workers were ready, the size of their KV together, and the rows of each."""
        return self._facts

    def last_steps(self) -> Row:
        """The seconds in which GPUs ran no step, over all GPUs, from the start of the last run to its end."""
        return {"idle_gpu_s": self._idle_gpu_s}

    def _busy_s(self) -> float:
        """Seconds since the start in which GPUs ran steps, over all GPUs; the ranks of a worker run the same ones."""
        return self._job.ranks * sum(status["gpu_busy_s"] for status in self._client.statuses().values())

    def close(self) -> None:
        """End the workers."""
        self._client.close()
        self._worker.stop()
        self._folder.cleanup()
