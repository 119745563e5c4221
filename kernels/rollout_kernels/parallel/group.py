"""The ranks of one model, and their three operations to exchange tensors.

    all_reduce    the sum over ranks, in float32 and in the order of the ranks: every rank gets the same bits
    all_gather    the tensors of all ranks, in the order of the ranks
    all_to_all    each rank's part for this rank, in the order of the ranks

A rank is a process with a device of its own. A group of one rank exchanges nothing: its operations return their
arguments, and launch nothing. Other groups use a process group of torch.distributed that is connected already: gloo on
a CPU, NCCL on GPUs. All ranks must call the same operations in the same order, with tensors of the same shape and type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from rollout_kernels.parallel.peer_buffers import PeerBuffers, connect_peers

log = logging.getLogger(__name__)

#: Rows that are added over peers' memory, and bytes that a rank sends for them; more, as in prefills, go by NCCL. On
#: four H200 a sum and norm of 6 MB takes 27 us and by NCCL 30; of 12 MB 54 and 43.
MOST_PEER_ROWS, MOST_SENT_BYTES = 256, 8 << 20
#: Bytes of the rows of a sum up to which words are faster than flagged rows: 340 KB on two H200, 330 KB on four.
MOST_WORD_BYTES = 320 << 10
#: Words of a histogram that is exchanged over peers' memory: two for each of 2048 bins, and one more.
HISTOGRAM_WORDS = 2 * 2048 + 1


class TensorGroup:
    """One rank's view of a tensor group. This class is the group of one rank; `connected` makes the others."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks")
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu") if device is None else device
        # Where the ranks have been prepared for them:
        self.peers: PeerBuffers | None = None  # buffers for small sums
        self.large_peers: PeerBuffers | None = (
            None  # buffers for the other sums of few rows; they share the flag of `peers`
        )
        self.histogram_peers: PeerBuffers | None = None  # buffers for histograms of few rows that are truncated

    @staticmethod
    def single(device: torch.device | None = None) -> TensorGroup:
        """The group of one rank, which exchanges nothing."""
        return TensorGroup(device=device)

    @staticmethod
    def connected(processes: dist.ProcessGroup, device: torch.device) -> TensorGroup:
        """The group of the ranks of a connected process group: gloo for a CPU, NCCL for a GPU.

        Raises ValueError for a backend that does not fit the device.
        """
        if processes.size() == 1:
            return TensorGroup.single(device)
        backend, wanted = dist.get_backend(processes), "nccl" if device.type == "cuda" else "gloo"
        if backend != wanted:
            raise ValueError(f"ranks on {device.type} need a process group of {wanted}, and this one is of {backend}")
        return NcclGroup(processes, device) if device.type == "cuda" else GlooGroup(processes, device)

    @property
    def one_order(self) -> bool:
        """True if the values of a sum are added in the order of the ranks, however many rows it has."""
        return True

    def prepare(self, width: int, dtype: torch.dtype) -> None:
        """Get ready for sums of rows of `width` values, and for draws. All ranks call this first."""

    def peers_for(self, rows: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        """The buffers over which rows of `width` values are added, or None if they do not go over peers' memory."""
        if self.peers is not None and self.peers.fits(rows, width, dtype):
            return self.peers
        if self.large_peers is not None and self.large_peers.fits(rows, width, dtype):
            return self.large_peers
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in its dtype; added in float32. The sum may take the memory of `x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [ranks, ...]."""
        return x[None]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """From `x` [ranks, ...] of each rank, the parts for this one, [ranks, ...]."""
        return x


#: The group of one rank, on any device.
ONE_RANK = TensorGroup()


class GlooGroup(TensorGroup):
    """Ranks on a CPU."""

    def __init__(self, processes: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(processes.rank(), processes.size(), device)
        self._processes = processes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Like `TensorGroup.all_reduce`: every rank adds the gathered tensors itself."""
        first, *others = self.all_gather(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks in their order, [ranks, *x.shape]."""
        gathered = x.new_empty((self.size, *x.shape))
        # Bytes: gloo does not know every dtype.
        sent, received = x.contiguous().view(-1).view(torch.uint8), gathered.view(self.size, -1).view(torch.uint8)
        dist.all_gather(list(received.unbind(0)), sent, group=self._processes)
        return gathered

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Like `TensorGroup.all_to_all`, by a gather of everything."""
        return self.all_gather(x)[:, self.rank]


class NcclGroup(TensorGroup):
    """Ranks on GPUs of one host. Operations run on the current stream, and can be captured in a graph.

    Sums of few rows go over peers' memory (`triton_all_reduce`), if the GPUs can reach it, and all else by NCCL.
    """

    def __init__(
        self, processes: dist.ProcessGroup, device: torch.device, connect: Callable[..., PeerBuffers] = connect_peers
    ) -> None:
        super().__init__(processes.rank(), processes.size(), device)
        self._processes = processes
        self._connect = connect

    @property
    def one_order(self) -> bool:
        """Like `TensorGroup.one_order`: NCCL may begin with any rank, which two values do not show."""
        return self.size == 2

    def prepare(self, width: int, dtype: torch.dtype) -> None:
        """Like `TensorGroup.prepare`: connects the memory of the peers."""
        values = 2 if dtype.itemsize == 2 else 1
        if self.peers is not None or width % values:
            return
        words, connect = width // values, partial(self._connect, self._processes, self.device)
        most = max(1, min(MOST_PEER_ROWS, MOST_SENT_BYTES // ((self.size - 1) * 4 * words)))
        few = max(1, min(most, MOST_WORD_BYTES // (4 * words)))
        try:
            histogram_peers = connect(MOST_PEER_ROWS, HISTOGRAM_WORDS)  # has the counters of most rows
            large = connect(most, words, flagged=True, beside=histogram_peers)
            peers = connect(few, words, beside=histogram_peers)
        except RuntimeError as error:  # on all ranks: all take the same way
            log.warning("sums over ranks are slow: the GPUs cannot reach each other's memory: %s", error)
            return
        self.large_peers, self.peers, self.histogram_peers = large, peers, histogram_peers

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Like `TensorGroup.all_reduce`. NCCL chooses the order of more than two ranks; all have the same bits."""
        peers = self.peers_for(x.shape[0], x.shape[1], x.dtype) if x.dim() == 2 else None
        if peers is not None:
            from rollout_kernels.parallel.triton_all_reduce import all_reduce_rows

            return all_reduce_rows(x.contiguous()[None], peers)
        # The sum of two values is rounded once either way. NCCL rounds each partial sum of more to their dtype.
        total = x.contiguous() if self.size == 2 or x.dtype == torch.float32 else x.float()
        dist.all_reduce(total, group=self._processes)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks in their order, [ranks, *x.shape]."""
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self._processes)
        return gathered

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Like `TensorGroup.all_to_all`."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self._processes)
        return received
