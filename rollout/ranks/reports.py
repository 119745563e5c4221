"""The reports of followers to rank 0: a line of numbers and texts in shared memory, written by that follower alone.

Most numbers only grow. Rank 0 may read an old one: it then waits a little longer than it must.

A **lane** is the work of one thread or stream of a follower, in order. Every order of a lane has a number, and is
acknowledged in the same way:

    begin        it is given to the thread, or the device has begun it
    advance      a part of a long order is done
    end          it is carried out; or it failed, and a text says why
"""

from typing import Literal, get_args

import numpy as np

from rollout.ranks.rank_watch import LANES, LaneName, LaneProgress
from rollout.ranks.ring import SharedMemory

Number = Literal[
    "beat", "position", "sequence", "launched", "drawn", "done", "mapped", "offered", "prepared", "ready", "fault",
    "compiling", "memory_freed", "thread", "looks", "stage", "stage_done", "stage_total",
]  # fmt: skip
#: thread: of the system, which computes steps; 0 on a GPU. beat: of `beat.py`. position: in the ring. sequence: of the
#: last order carried out. launched: steps whose end is enqueued. drawn: those that waited for masks. done: those that
#: are complete on the device. mapped: the order by which this rank last mapped memory of rank 0's GPU. offered: the
#: order by which it last opened a publisher's. prepared: the last update that is ready to swap. fault: 1 + a rank that
#: sent nothing. compiling: 1 while a kernel is compiled, then 0 again. memory_freed: bytes that sleeps gave back.
#: looks: how often the main thread has looked for copies that began or ended. stage: of the start (`start_watch.py`),
#: with its finished parts, and their number in all; both begin anew with each stage.
NUMBERS: tuple[Number, ...] = get_args(Number)
_INDEX_OF = {name: index for index, name in enumerate(NUMBERS)}
_LANE_NUMBERS = 4
_BEGUN, _ENDED, _FAILED, _PARTS = range(_LANE_NUMBERS)
_TEXT_BYTES = 448
Topic = Literal["end"] | LaneName
#: Why the rank ends; why the last order of a lane failed that did.
TOPICS: tuple[Topic, ...] = ("end", *LANES)


class RankReports:
    """The table of all followers; follower i is rank i + 1."""

    def __init__(self, memory: SharedMemory, followers: int) -> None:
        lines = np.frombuffer(memory.map(), dtype=np.uint8)[: followers * self.line_bytes()]
        lines = lines.reshape(followers, self.line_bytes())
        numbers = 8 * (len(NUMBERS) + len(LANES) * _LANE_NUMBERS)
        self._numbers = lines[:, :numbers].view(np.int64)
        self._lanes = self._numbers[:, len(NUMBERS) :].reshape(followers, len(LANES), _LANE_NUMBERS)
        texts = lines[:, numbers : numbers + len(TOPICS) * _TEXT_BYTES]
        self._texts = texts.reshape(followers, len(TOPICS), _TEXT_BYTES)

    @staticmethod
    def line_bytes() -> int:
        """Bytes of one follower."""
        numbers = len(NUMBERS) + len(LANES) * _LANE_NUMBERS
        return -(-(8 * numbers + len(TOPICS) * _TEXT_BYTES) // 64) * 64

    def get(self, name: Number) -> list[int]:
        return self._numbers[:, _INDEX_OF[name]].tolist()

    def set(self, follower: int, name: Number, value: int) -> None:
        self._numbers[follower, _INDEX_OF[name]] = value

    def add(self, follower: int, name: Number, more: int = 1) -> None:
        self._numbers[follower, _INDEX_OF[name]] += more

    def text(self, follower: int, topic: Topic) -> str:
        """The last text of the follower about a topic, for people; may be empty."""
        return bytes(self._texts[follower, TOPICS.index(topic)]).split(b"\0")[0].decode(errors="replace")

    def set_text(self, follower: int, topic: Topic, text: str) -> None:
        """Write a text. The number that announces it is written afterwards."""
        sent = text.encode()[: _TEXT_BYTES - 1]
        line = self._texts[follower, TOPICS.index(topic)]
        line[:] = 0
        line[: len(sent)] = np.frombuffer(sent, dtype=np.uint8)

    # --- acknowledged orders ------------------------------------------------------------------------------------------

    def ended(self, lane: LaneName) -> list[int]:
        """The last order of a lane that each follower has carried out, or that failed there."""
        return self._lanes[:, LANES.index(lane), _ENDED].tolist()

    def done(self, lane: LaneName, number: int) -> bool:
        """Whether this order and all earlier orders have ended on all followers."""
        return min(self.ended(lane)) >= number

    def failures(self, lane: LaneName, since: int) -> list[str]:
        """Why orders of a lane failed, from number `since` on: of each follower the last one that did."""
        failed = enumerate(self._lanes[:, LANES.index(lane), _FAILED].tolist())
        return [f"rank {i + 1}: {self.text(i, lane)}" for i, number in failed if number >= since]

    def lanes(self, follower: int) -> dict[LaneName, LaneProgress]:
        """A follower's progress in each lane."""
        rows = zip(LANES, self._lanes[follower].tolist(), strict=True)
        return {lane: LaneProgress(begun > ended, ended + parts) for lane, (begun, ended, _, parts) in rows}


class LaneReport:
    """A follower's end of a lane. One thread begins orders, one ends orders, any thread may advance."""

    def __init__(self, reports: RankReports, follower: int, lane: LaneName) -> None:
        self.lane = lane
        self._reports, self._follower = reports, follower
        self._numbers = reports._lanes[follower, LANES.index(lane)]

    def begin(self, number: int) -> None:
        """An order is given to a thread, or begun by the device."""
        self._numbers[_BEGUN] = number

    def advance(self, parts: int = 1) -> None:
        """Parts of a long order are done."""
        self._numbers[_PARTS] += parts

    def advance_to(self, parts: int) -> None:
        """Note how many parts are done in all."""
        self._numbers[_PARTS] = parts

    def end(self, number: int, failure: str = "") -> None:
        """An order is carried out; with a `failure` it is not."""
        if failure:
            self._reports.set_text(self._follower, self.lane, failure)
            self._numbers[_FAILED] = number
        self._numbers[_ENDED] = number
