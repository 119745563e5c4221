"""Processes that are the ranks of a tensor group on a CPU: a test gives them functions to run.

The functions are at the top of their modules, so that a spawned process finds them. They are called with the rank's
`TensorGroup` and the arguments, and what they return comes back by rank. An exception on one rank is raised in the
test, and ends the processes: the other ranks may wait for it.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_kernels.parallel import TensorGroup

from tests.support.quick_interpreter import make_quick

#: More than any test takes on a busy machine.
TIMEOUT_S = 240


class Ranks:
    """`size` ranks, started once and used by many tests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, Path(self._folder.name) / "store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(group, *arguments)` returns on each rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S if not errors else 5):
                errors.append(f"rank {rank} gave no answer")
                continue
            failed, result = pipe.recv()
            (errors if failed else results).append(result)
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        make_quick()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    group = TensorGroup.connected(dist.group.WORLD, torch.device("cpu"))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the test process is gone
            return
        try:
            answer = (False, function(group, *arguments))
        except BaseException:  # the outcome of a failed `pytest.raises` is no Exception
            answer = (True, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
