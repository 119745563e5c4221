"""Parts of an update that rank 0 reads out of GPU memory which the other trainer ranks lend; all on one host.

    rank 0, packing buckets                                     ranks that send parts
    LEND bytes, host                     == broadcast ==>       a buffer on the rank's GPU, room for two rounds
    mapped                               <-- handle, or why not --
    BUCKETS 0, 1, into the first half    == broadcast ==>       the rank's portions of a round of buckets are packed
                                         <-- done, once the copies have run --
    BUCKETS 2, 3, into the second half   == broadcast ==>       packed, while rank 0
    reads round 0 into its own buckets                          reads
    BUCKETS 4, 5, into the first half, once the reads of round 0 have run, ..
    RELEASED: all buffers are unmapped   == broadcast ==>       the buffer is kept for the next update

`trainer_ranks` carries the messages. In a portion a tensor's rows follow each other, at the tensor's offset in the
bucket, so no table is sent.

Invariants:

- A round is requested into a half only when all reads out of that half have run.
- A GPU that a trainer rank shares with a worker gives each of them a turn of milliseconds. So a round has several
  buckets: fewer turns are waited for.
- A rank answers when its copies have run, not when they are enqueued.
- Buffers are mapped only during an update. CUDA does not define what happens to memory that is freed while another
  process has it mapped, and a rank hears no commands between two updates, when it may close its publisher. A rank that
  closes in the middle of an update does not free its buffer.
- Either all ranks lend, or none: if one cannot, all parts of the update come through host memory.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from trainer_bridge.transports.cuda_ipc import HANDLE_BYTES, CudaIpcMemory, IpcMemory, IpcReader
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shm import boot_id
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import Manifest

_REASON_BYTES = 256
ANSWER_BYTES = HANDLE_BYTES + _REASON_BYTES
_HOST_BYTES = 7  # fit in an int64
_ROUND = 2  # buckets of a round


@functools.cache
def ipc_memory(device: torch.device) -> IpcMemory | None:
    """Memory of a GPU that other processes can map; None for a CPU. Raises OSError if the GPU has no such memory."""
    return CudaIpcMemory(device) if device.type == "cuda" else None


def host_number() -> int:
    """A number that identifies this host; 0 if it has no such number."""
    name = boot_id()
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_HOST_BYTES).digest()) if name else 0


def answer(handle: bytes = b"", why_not: str = "") -> torch.Tensor:
    """The answer to LEND or BUCKETS, uint8 [ANSWER_BYTES]; `why_not` is empty unless the rank failed."""
    reason = why_not.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    return torch.frombuffer(bytearray(handle.ljust(HANDLE_BYTES, b"\0") + reason), dtype=torch.uint8)


def read_answer(data: torch.Tensor) -> tuple[bytes, str]:
    """The handle and the reason in an answer."""
    raw = data.numpy().tobytes()
    return raw[:HANDLE_BYTES], raw[HANDLE_BYTES:].rstrip(b"\0").decode(errors="replace")


class LentBuffer:
    """The buffer of a rank other than 0, kept from update to update."""

    def __init__(self) -> None:
        self._memory: IpcMemory | None = None  # the allocator of the buffer
        self._buffer: torch.Tensor | None = None
        self._lent = False  # rank 0 may have it mapped

    def lend(self, memory: IpcMemory | None, nbytes: int, host: int) -> bytes:
        """The handle of a buffer of at least `nbytes` bytes. Raises OSError if rank 0 cannot have one."""
        if not host or host != host_number():
            raise OSError(0, "it is not on the host of rank 0")
        if memory is None:
            raise OSError(0, "its tensors are not on a GPU")
        if self._buffer is None or self._memory is not memory or self._buffer.numel() < nbytes:
            self.free()
            self._memory, self._buffer = memory, _allocate(memory, nbytes)
        self._lent = True
        return memory.handle(self._buffer)

    def pack(self, payload: Payload, first: int, count: int, at: int) -> None:
        """Pack this rank's portions of `count` buckets from number `first` on, from byte `at` of the buffer on."""
        assert self._buffer is not None, "rank 0 has it mapped"
        room = _room(payload.manifest)
        payload.pack_portions({first + i: self._buffer[at + i * room :][:room] for i in range(count)})

    def end_loan(self) -> None:
        """Note that rank 0 does not map the buffer any more."""
        self._lent = False

    def free(self) -> None:
        """Free the buffer; if rank 0 may have it mapped, it is freed with the end of the process."""
        if self._buffer is not None and self._memory is not None and not self._lent:
            with contextlib.suppress(OSError, RuntimeError):  # the device may be gone
                self._memory.free(self._buffer)
        self._memory = self._buffer = None


def _allocate(memory: IpcMemory, nbytes: int) -> torch.Tensor:
    """Memory to lend. If memory is short, torch gives back its cache. Raises OSError."""
    try:
        return memory.allocate(nbytes)
    except OSError:
        if not torch.cuda.is_initialized():
            raise
        torch.cuda.empty_cache()
        return memory.allocate(nbytes)


def map_buffers(memory: IpcMemory, handles: Mapping[int, bytes], nbytes: int) -> dict[int, IpcReader]:
    """Rank 0: map all buffers, by rank. Raises OSError, with none mapped, if one cannot be."""
    readers: dict[int, IpcReader] = {}
    try:
        for rank, handle in handles.items():
            readers[rank] = memory.reader(handle, nbytes)
    except (OSError, RuntimeError) as error:
        close_all(readers.values())
        if not isinstance(error, OSError):
            raise
        raise OSError(error.errno, f"rank 0 cannot map the memory of rank {rank}: {error.strerror}") from error
    return readers


def close_all(readers: Iterable[IpcReader]) -> None:
    for reader in readers:
        with contextlib.suppress(OSError, RuntimeError):  # the device may be gone
            reader.close()


def buffer_bytes(manifest: Manifest) -> int:
    """Bytes that each rank lends for an update."""
    return _room(manifest) * _together(manifest) * _halves(manifest)


def _room(manifest: Manifest) -> int:
    """Bytes of a buffer for one bucket."""
    return max(1, min(manifest.bucket_bytes, manifest.total_bytes))


def _together(manifest: Manifest) -> int:
    """Buckets with portions in half a buffer."""
    return min(_ROUND, max(1, manifest.bucket_count))


def _halves(manifest: Manifest) -> int:
    """Halves of a buffer that are used: one is enough for one round."""
    return 1 if manifest.bucket_count <= _ROUND else 2


class BorrowedParts:
    """Rank 0's access to the buffers during one update; `LentParts` of `shards`. `readers` are the buffers by rank.

    `request(first, count, at)` has all ranks pack `count` buckets from number `first` on, from byte `at` of their
    buffers on; `wait_packed` returns when they have. Both raise `RolloutError`. `reads_done` makes an event after the
    enqueued work of the current stream, or None where copies have run on return.
    """

    def __init__(
        self,
        request: Callable[[int, int, int], None],
        wait_packed: Callable[[], None],
        readers: Mapping[int, IpcReader],
        manifest: Manifest,
        reads_done: Callable[[], torch.cuda.Event | None] | None = None,
    ) -> None:
        self._ask, self._wait_packed, self._reads_done = request, wait_packed, reads_done or _event
        self._readers, self._manifest = readers, manifest
        self._room, self._halves, self._together = _room(manifest), _halves(manifest), _together(manifest)
        self._half = self._halves - 1  # the half of the last request
        self._requested = range(0)  # the buckets of the last request, unless it was waited for
        self._packed, self._packed_half = range(0), 0  # the buckets that can be read, and their half
        self._read: list[torch.cuda.Event | None] = [None, None]  # the end of the reads from each half
        self._begin = 0  # the place in the buffers of the stream's first byte, for the bucket that is read

    @contextlib.contextmanager
    def bucket(self, index: int) -> Iterator[None]:
        """Have all ranks pack their portions of a bucket; they can be read inside. Meanwhile they pack more."""
        if not self._readers:  # rank 0 has all parts
            yield
            return
        if index not in self._packed:
            if index not in self._requested:
                self._request(index - index % self._together)
            packed, self._requested = self._requested, range(0)
            self._wait_packed()
            self._packed, self._packed_half = packed, self._half
            if packed.stop < self._manifest.bucket_count:
                self._request(packed.stop)
        place = self._packed_half * self._together + index - self._packed.start
        self._begin = place * self._room - self._manifest.bucket_span(index)[0]
        try:
            yield
        finally:
            self._read[self._packed_half] = self._reads_done()

    def read(self, rank: int, byte: int, out: torch.Tensor) -> None:
        """Copy the packed bytes of a rank at the place of this byte of the stream, on the current stream."""
        try:
            self._readers[rank].read(self._begin + byte, out)
        except OSError as error:
            raise RolloutError(f"gather: the part of rank {rank} cannot be read: {error}") from error

    def close(self) -> None:
        """Unmap the buffers; all reads have run."""
        readers, self._readers = self._readers, {}
        close_all(readers.values())

    def _request(self, first: int) -> None:
        self._half = (self._half + 1) % self._halves
        if self._half == self._packed_half:
            self._packed = range(0)
        if (read := self._read[self._half]) is not None:
            read.synchronize()
        count = min(self._together, self._manifest.bucket_count - first)
        self._ask(first, count, self._half * self._together * self._room)
        self._requested = range(first, first + count)


def _event() -> torch.cuda.Event | None:
    """An event after the enqueued work of the current stream; None without a GPU, where copies have run on return."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
