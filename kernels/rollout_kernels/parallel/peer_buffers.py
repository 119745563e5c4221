"""Memory that the ranks of a host write to each other: each rank's buffer, and the addresses of all of them.

A word is 8 bytes: 4 of data, and the number of the exchange. The hardware writes it at once, so a reader that finds the
number finds the data. No other signal is needed, and a word takes one way over the link.

    buffer of rank 1   [2 turns, ranks, rows, words]
                            |      |
                            |      from rank 0 | from rank 1 (unused) | from rank 2 ...
                            exchanges of a row use both turns alternately

Invariants:

- An exchange writes words of the turn that the exchange before it did not use. A rank ends an exchange when it has all
  words of it, so its peers have begun it, and have read all of the exchange before. Nothing is overwritten unread.
- The number of an exchange is counted for each row, on the device: graphs can be replayed. All ranks exchange the same
  rows in the same order, so the counters agree.
- A word with a negative number has a row in it that its sender knows to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: Turns: how many exchanges of a row have a place in a buffer.
TURNS = 2


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """One rank's buffer, the addresses of all ranks' buffers in this process, and its counters."""

    rank: int
    words_2RMW: torch.Tensor  # int64, zero at first
    addresses_R: torch.Tensor  # int64, on the device
    exchanges_M: torch.Tensor  # int32: how many exchanges each row has had
    fault: torch.Tensor  # int32 [1]: 1 + the rank whose words did not come, or were wrong; then nothing waits any more
    owner: Any = None  # keeps the peers' memory mapped

    @property
    def size(self) -> int:
        """Ranks."""
        return self.words_2RMW.shape[1]

    @property
    def rows(self) -> int:
        """Rows that an exchange may have."""
        return self.words_2RMW.shape[2]

    @property
    def words(self) -> int:
        """Words of a row."""
        return self.words_2RMW.shape[3]

    def fits(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """True if an exchange of `rows` rows of `width` values is possible."""
        values = 4 // dtype.itemsize if dtype.itemsize <= 4 else 0
        return 0 < rows <= self.rows and values > 0 and width % values == 0 and width // values <= self.words

    @classmethod
    def of(
        cls,
        rank: int,
        words_2RMW: torch.Tensor,
        addresses: list[int],
        owner: Any = None,
        fault: torch.Tensor | None = None,
    ) -> PeerBuffers:
        """Buffers whose memory is connected already: `addresses` has one of each rank's `words_2RMW`.

        `fault` is the flag of other buffers of this rank, which these share.
        """
        device = words_2RMW.device
        return cls(
            rank,
            words_2RMW,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(words_2RMW.shape[2], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device) if fault is None else fault,
            owner,
        )


def connect_peers(
    processes: dist.ProcessGroup, device: torch.device, rows: int, words: int, fault: torch.Tensor | None = None
) -> PeerBuffers:
    """Buffers on the GPUs of a host, which read and write each other's memory over NVLink. All ranks call this.

    No multicast is used. `fault` is the flag of other buffers, which these share. Raises RuntimeError if the GPUs
    cannot reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    shape = (TURNS, processes.size(), rows, words)
    words_2RMW = symmetric_memory.empty(*shape, dtype=torch.int64, device=device)
    words_2RMW.zero_()
    handle = symmetric_memory.rendezvous(words_2RMW, processes)
    addresses = [handle.get_buffer(rank, shape, torch.int64).data_ptr() for rank in range(processes.size())]
    torch.cuda.synchronize(device)
    dist.barrier(processes, device_ids=[device.index])  # no rank writes before all have zeroed their memory
    return PeerBuffers.of(processes.rank(), words_2RMW, addresses, handle, fault)
