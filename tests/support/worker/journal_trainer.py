"""A trainer with a journal, which may kill itself in the middle of a write.

    python -m tests.support.worker.journal_trainer ENDPOINT JOURNAL OUT KILL_AT

It asks for `REQUESTS` and writes their tokens and log-probs to OUT (npz). With KILL_AT, it writes that many chunks to
the journal and half of the next one, and is gone.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trainer_bridge.client import journal
from trainer_bridge.client.blocking import RolloutClient

TOKENS = 1200
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "n": 4, "seed": 3, "request_id": "step 1, prompt 0"},
    {"prompt": [8, 9], "n": 3, "temperature": 0.8, "top_p": 0.9, "seed": 4, "request_id": "step 1, prompt 1"},
    {"prompt": [1, 50, 4, 33], "seed": 5, "request_id": "step 1, prompt 2"},
]
COMMON: dict[str, Any] = {"max_tokens": TOKENS, "stop": {"ignore_eos": True}, "stream_every": 32}


def die_in_a_write(after: int) -> None:
    """Have the journal's writes end half-way through a chunk, and this process with them."""
    write, chunks = journal._write_all, 0

    def counting(fd: int, data: bytes) -> None:
        nonlocal chunks
        chunks += b"chunk" in data[:32]
        if chunks > after:
            write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(fd, data)

    journal._write_all = counting


def as_arrays(results: list[Any]) -> dict[str, np.ndarray]:
    """Everything of every completion, by name."""
    arrays = {}
    for number, result in enumerate(results):
        for completion in result.completions:
            for name in ("token_ids", "logprobs", "raw_logprobs", "drawn_logprobs", "versions"):
                value = getattr(completion, name)
                if value is not None:
                    arrays[f"{number}.{completion.index}.{name}"] = np.asarray(value)
    return arrays


def main(endpoint: str, journal_path: str, out: str, kill_at: int) -> None:
    """Ask, and write down what came."""
    if kill_at:
        die_in_a_write(kill_at)
    with RolloutClient(endpoint, journal=journal_path, timeout_s=60.0) as client:
        results = client.generate_many(REQUESTS, **COMMON)
    np.savez(Path(out), **as_arrays(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
