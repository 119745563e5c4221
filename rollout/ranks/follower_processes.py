"""The processes of followers, with the memory that they inherit: started first, and told later what to run.

    rollout serve:  start followers --> import libraries --> check settings, find the checkpoint --> tell --> connect
    follower:                           import libraries --> wait until it is told ----------------> connect

Libraries take seconds to import, so all ranks do it at once. This module imports none that take long.
"""

import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.process.child_processes import import_path, module_command
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory

log = logging.getLogger(__name__)

_KILL_WAIT_S = 5.0


class FollowerProcesses:
    """A process for each rank but rank 0. The constructor starts them; the kernel ends them when this process ends.

    `memories` are the inherited memories, by name: `ring`, `reports`, `relayed`, `manifest`, `adapters`. `eventfds` and
    `cuts` have one for each process.
    """

    def __init__(self, count: int) -> None:
        sizes = {"ring": 0, "reports": count * RankReports.line_bytes(), "relayed": 0, "manifest": 0, "adapters": 0}
        self.memories = {name: SharedMemory.create(f"rollout-{name}", size) for name, size in sizes.items()}
        self.eventfds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count)]
        self.cuts = [SharedMemory.create("rollout-cuts", 0) for _ in range(count)]
        self.running = [self._start(*own) for own in zip(self.eventfds, self.cuts, strict=True)]

    def send_facts(self, facts: Mapping[str, Any]) -> None:
        """Have all go on, with what `rollout.ranks.follower.run_follower` must know. Once."""
        shared = {name: memory.descriptor for name, memory in self.memories.items()}
        for rank, (process, eventfd) in enumerate(zip(self.running, self.eventfds, strict=True), 1):
            assert process.stdin is not None
            own = {"eventfd": eventfd, "cuts": self.cuts[rank - 1].descriptor}
            told = {**facts, "rank": rank, "shared": {**shared, **own}}
            try:
                process.stdin.write(json.dumps(told).encode())
                process.stdin.close()
            except BrokenPipeError:  # the follower has ended, which the watch of the processes reports
                log.debug("a follower ended before it got its settings", extra={"rank": rank})

    def kill(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            try:
                process.wait(_KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # in a driver call that cannot be interrupted
                log.warning("a follower does not end", extra={"pid": process.pid})

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of all ranks except rank 0."""
        return [process.pid for process in self.running]

    def _start(self, eventfd: int, cuts: SharedMemory) -> subprocess.Popen[bytes]:
        command = module_command("rollout.ranks.entry", str(os.getpid()))
        inherited = [eventfd, cuts.descriptor, *(memory.descriptor for memory in self.memories.values())]
        environment = {**os.environ, **import_path()}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=inherited, env=environment)
