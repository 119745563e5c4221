"""Memory that the ranks of a host write to each other: each rank's buffer, and the addresses of all of them.

    buffer of rank 1   [2 halves, ranks, rows, words]
                            |      |
                            |      from rank 0 | from rank 1 (unused) | from rank 2 ...
                            exchanges of a row use both halves alternately

A buffer has one of two forms:

    words    A word is 8 bytes: 4 of data, and the number of the exchange. The hardware writes it at once, so a reader
             that finds the number finds the data. A word takes one way over the link and needs no other signal.
    flagged  A row is its data, and then its flag, which gets the number of the exchange after the data has arrived. So
             half as many bytes cross, but the sender has to wait for its data: better for large sums.

Invariants:

- A rank ends an exchange of a row when it has all parts of the row. So its peers have begun the exchange, and have read
  all of the exchange before, in any buffer. An exchange writes to the half that the exchange before it did not use.
  Nothing is overwritten unread.
- The number of an exchange is counted for each row, on the device: graphs can be replayed. All ranks exchange the same
  rows in the same order, so the counters agree. Buffers that are used alternately share their counters. After 2^31
  exchanges of a row, which take half a day or more, numbers begin anew: a word is only believed wrongly if it was
  unused for exactly as long.
- A negative number says that the sender knows the row to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

#: Exchanges of a row that have room in a buffer.
HALVES = 2
#: Int32 values after the data of a flagged row. The first is the flag; the others keep rows aligned.
TAIL = 16


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """One rank's buffer, the addresses of all ranks' buffers in this process, and its counters."""

    rank: int
    memory_2RMW: torch.Tensor  # zero at first; int64: words; int32: flagged rows, the last TAIL values are not data
    addresses_R: torch.Tensor  # int64, on the device
    exchanges_M: torch.Tensor  # int32: how many exchanges each row has had
    fault: torch.Tensor  # int32 [1]: 1 + the rank whose part did not come, or was wrong; then nothing waits any more
    owner: Any = None  # keeps the peers' memory mapped

    @property
    def size(self) -> int:
        """Ranks."""
        return self.memory_2RMW.shape[1]

    @property
    def rows(self) -> int:
        """Rows that an exchange may have."""
        return self.memory_2RMW.shape[2]

    @property
    def flagged(self) -> bool:
        """True if a row has one number, False if each of its words has."""
        return self.memory_2RMW.dtype == torch.int32

    @property
    def words(self) -> int:
        """Most pieces of four bytes that a row may have."""
        return self.memory_2RMW.shape[3] - (TAIL if self.flagged else 0)

    def fits(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """True if an exchange of `rows` rows of `width` values is possible."""
        values = 4 // dtype.itemsize if dtype.itemsize <= 4 else 0
        return 0 < rows <= self.rows and values > 0 and width % values == 0 and width // values <= self.words

    @classmethod
    def of(
        cls,
        rank: int,
        memory_2RMW: torch.Tensor,
        addresses: list[int],
        owner: Any = None,
        beside: PeerBuffers | None = None,
    ) -> PeerBuffers:
        """Buffers whose memory is connected already: `addresses` has one of each rank's `memory_2RMW`.

        `beside` are other buffers of this rank, with as many rows or more. These share their counters and their flag.
        """
        device = memory_2RMW.device
        assert beside is None or beside.exchanges_M.numel() >= memory_2RMW.shape[2]
        return cls(
            rank,
            memory_2RMW,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(memory_2RMW.shape[2], dtype=torch.int32, device=device)
            if beside is None
            else beside.exchanges_M,
            torch.zeros(1, dtype=torch.int32, device=device) if beside is None else beside.fault,
            owner,
        )


def buffer_layout(ranks: int, rows: int, words: int, flagged: bool) -> tuple[tuple[int, int, int, int], torch.dtype]:
    """Shape and dtype of `PeerBuffers.memory_2RMW` for rows of `words` pieces of four bytes."""
    if flagged:
        return (HALVES, ranks, rows, -(-words // TAIL) * TAIL + TAIL), torch.int32
    return (HALVES, ranks, rows, words), torch.int64


def connect_peers(
    processes: dist.ProcessGroup,
    device: torch.device,
    rows: int,
    words: int,
    flagged: bool = False,
    beside: PeerBuffers | None = None,
) -> PeerBuffers:
    """Buffers on the GPUs of a host, which read and write each other's memory over NVLink. All ranks call this.

    No multicast is used. Raises RuntimeError, on all ranks, if the GPUs cannot reach each other's memory.

    Args:
        processes: the ranks, connected by NCCL.
        device: the GPU of this rank.
        rows: most rows of an exchange.
        words: most pieces of four bytes of a row.
        flagged: the form of the buffers.
        beside: as in `PeerBuffers.of`.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    shape, dtype = buffer_layout(processes.size(), rows, words, flagged)

    def connected() -> tuple[Any, list[int]]:
        handle = symmetric_memory.rendezvous(memory_2RMW, processes)
        return handle, [handle.get_buffer(rank, shape, dtype).data_ptr() for rank in range(processes.size())]

    memory_2RMW = on_all(processes, device, lambda: symmetric_memory.empty(*shape, dtype=dtype, device=device).zero_())
    handle, addresses = on_all(processes, device, connected)  # no rank writes before all have zeroed their memory
    return PeerBuffers.of(processes.rank(), memory_2RMW, addresses, handle, beside)


def on_all(processes: dist.ProcessGroup, device: torch.device, work: Callable[[], T]) -> T:
    """The result of `work`, once all ranks have done it. If it raises RuntimeError on one rank, raises it on all.

    So no rank waits in the next exchange for a rank that has given up. Where `work` exchanges something itself, a rank
    can still wait there for a rank that fails amid it.
    """
    problem: RuntimeError | None = None
    try:
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        problem = error
    failed = torch.tensor([int(problem is not None)], device=device)
    dist.all_reduce(failed, group=processes)
    if problem is not None:
        raise problem
    if failed.item():
        raise RuntimeError(f"{failed.item()} of the other ranks could not")
    return result
