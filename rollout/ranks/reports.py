"""What each follower reports to rank 0: a line of numbers and texts in shared memory, written by that follower alone.

Most numbers only grow. Rank 0 may read an old one: it then waits a little longer than it must.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from rollout.ranks.ring import SharedMemory

Number = Literal[
    "beat", "position", "sequence", "launched", "drawn", "done", "opened", "taken", "mapped", "unmapped", "prepared",
    "refused", "swapped", "ready", "fault", "compiling", "adapter_seen", "adapter_refused", "forgotten", "wrote",
    "kv_out", "kv_in", "state_out", "state_in", "memory_done", "memory_failed", "memory_freed", "memory_parts",
    "updates_given", "updates_ended", "updates_parts", "adapters_given", "adapters_ended", "adapters_parts",
    "thread", "looks", "writes_begun", "kv_out_begun", "kv_in_begun", "state_out_begun", "state_in_begun", "swap_begun",
    "swap_parts", "stage", "stage_done", "stage_total",
]  # fmt: skip
#: thread: of the system, which computes steps; 0 on a GPU.
#: beat: of `beat.py`. position: in the ring. sequence: of the last order carried out. launched: steps whose end is
#: enqueued. drawn: those that waited for masks. done: those that are complete on the device. opened, prepared, refused:
#: the last update that fits, is ready to swap, or is neither. taken: pieces of updates. mapped, unmapped: the last
#: memory of rank 0's GPU that this rank can read, or cannot. swapped: the last update whose copy is done. fault: 1 + a
#: rank that sent nothing. compiling: 1 while a kernel is compiled, then 0 again. adapter_seen, adapter_refused:
#: the last adapter that was mapped or refused, or refused. forgotten: the last order to forget one that is carried out.
#: wrote: copies to adapter slots that are done. kv_out to state_in: pieces that were moved to the host or back. looks:
#: how often the main thread has looked for copies that have begun or ended. memory_done, memory_failed: the last order
#: of a sleep that is done, or that failed. memory_freed: bytes that sleeps gave back. .._given, .._ended: what a thread
#: was given and has done. .._begun: copies that the device has begun; those of `kv_out` and so on, of `wrote` and of
#: `swapped` have ended. .._parts: parts of what is under way that are done. stage: of the start (`start.py`), with its
#: parts that are done, of those in all; these begin anew with each stage.
NUMBERS: tuple[Number, ...] = get_args(Number)
_PLACES = {name: place for place, name in enumerate(NUMBERS)}
_TEXT_BYTES = 448
Topic = Literal["end", "update", "adapter", "memory"]
#: Why the rank ends; why it refused the last update, the last adapter, the last order of a sleep. Each topic has a
#: thread of its own in the follower.
TOPICS: tuple[Topic, ...] = get_args(Topic)


class Reports:
    """The table of all followers; follower i is rank i + 1."""

    def __init__(self, memory: SharedMemory, followers: int) -> None:
        lines = np.frombuffer(memory.map(), dtype=np.uint8)[: followers * self.line_bytes()]
        lines = lines.reshape(followers, self.line_bytes())
        numbers = 8 * len(NUMBERS)
        self._numbers = lines[:, :numbers].view(np.int64)
        texts = lines[:, numbers : numbers + len(TOPICS) * _TEXT_BYTES]
        self._texts = texts.reshape(followers, len(TOPICS), _TEXT_BYTES)

    @staticmethod
    def line_bytes() -> int:
        """Bytes of one follower."""
        return -(-(8 * len(NUMBERS) + len(TOPICS) * _TEXT_BYTES) // 64) * 64

    def get(self, name: Number) -> list[int]:
        """A number of every follower."""
        return self._numbers[:, _PLACES[name]].tolist()

    def set(self, follower: int, name: Number, value: int) -> None:
        """Report a number."""
        self._numbers[follower, _PLACES[name]] = value

    def add(self, follower: int, name: Number) -> None:
        """Add 1 to a number."""
        self._numbers[follower, _PLACES[name]] += 1

    def text(self, follower: int, topic: Topic) -> str:
        """What the follower said last of a topic, for people; may be empty."""
        return bytes(self._texts[follower, TOPICS.index(topic)]).split(b"\0")[0].decode(errors="replace")

    def say(self, follower: int, topic: Topic, text: str) -> None:
        """Leave a text, before the number that tells of it."""
        sent = text.encode()[: _TEXT_BYTES - 1]
        line = self._texts[follower, TOPICS.index(topic)]
        line[:] = 0
        line[: len(sent)] = np.frombuffer(sent, dtype=np.uint8)
