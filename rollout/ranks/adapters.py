"""Adapters in a tensor group: rank 0 packs the parts of all ranks in shared memory, and each rank copies its own part.

    any thread   pack: a block of the memory gets one part for each rank
                 prepare --> each follower maps the block; if one cannot, no rank has the adapter
    loop         copy --> every rank copies its part to the slot
    own thread   nothing refers to the weights any more: forget --> the block may be used again

    memory       | part of rank 0 | part of rank 1 | .. |  part of rank 0 | ..
                 |<----------- a block ----------------->|

All parts of an adapter have the same layout: shards are of one size. A part is read until all its writes are done, on
every rank; only then is its block used again.
"""

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from rollout.checkpoint_folder import CheckpointError
from rollout.config import EngineSettings
from rollout.models.lora_slots import AdapterSlots, AdapterWeights, LayerProduct, SharedParts, model_products
from rollout.models.peft_tensors import AdapterPacker, AdapterPlan
from rollout.models.shard import spec_of_rank
from rollout.models.spec import ModelSpec
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.orders import OrderWriter, check_alive
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory
from rollout.weights.pinned_memory import PinnedMemory, touch
from trainer_bridge.wire.errors import Overloaded

log = logging.getLogger(__name__)

#: Blocks in addition to one for each loaded adapter: new weights arrive while the old ones are in use.
_SPARE = 8
_BLOCK_ALIGN = 2 << 20
_PART_ALIGN, _TENSOR_ALIGN = 4096, 64
#: A block becomes free within this time: loads that the loop has not taken, and followers, need no longer.
_BLOCK_S = 10.0
_POLL_S = 0.001


class PartTensor(NamedTuple):
    """The range of A or B of one product in a part."""

    layer: int
    product: str
    begin: int  # bytes
    rows: int
    columns: int


class _SharedAdapter(SharedParts):
    """The block of an adapter, which the weights of rank 0 refer to: after the last reference it may be used again."""

    def __init__(self, number: int, block: int, layout: list[PartTensor]) -> None:
        super().__init__(number)
        self.block, self.layout = block, layout
        self.order = 0  # the order by which the followers prepare it
        self.answered = False  # all followers have answered
        self.failures: list[str] = []


class RankAdapters(AdapterPacker):
    """Rank 0's end. Any thread may call it; `orders` is None until the followers are ready.

    `settings` have the number of adapters that may be loaded, and their largest rank. `lost` says why the group is
    lost, if it is.
    """

    def __init__(
        self,
        memory: SharedMemory,
        spec: ModelSpec,
        settings: EngineSettings,
        dtype: torch.dtype,
        device: torch.device,
        orders: Callable[[], OrderWriter | None],
        lost: Callable[[], str],
    ) -> None:
        super().__init__()
        self.size = spec.shard.size
        self._specs = [spec_of_rank(spec, rank) for rank in range(self.size)]
        tensors = 2 * len(model_products(spec))
        needed = AdapterSlots.bytes_for(spec, 1, settings.adapter_rank, dtype) + tensors * _TENSOR_ALIGN
        self.part_bytes = -(-needed // _PART_ALIGN) * _PART_ALIGN
        self.block_bytes = -(-self.part_bytes * len(self._specs) // _BLOCK_ALIGN) * _BLOCK_ALIGN
        blocks = settings.max_adapters + _SPARE
        memory.grow(self.block_bytes * blocks)  # pages of a block take no memory until they are written
        self._map, self._device, self._pins = memory.map(), device, device.type == "cuda"
        self._orders, self._lost = orders, lost
        self._lock = threading.Lock()
        self.free_blocks = list(range(blocks - 1, -1, -1))
        # Filled wherever the last reference ends, also amid a garbage collection.
        self._unused: SimpleQueue[_Unused] = SimpleQueue()
        self._number = 0
        self._asked: _SharedAdapter | None = None  # the adapter that the followers are preparing
        threading.Thread(target=self._give_blocks_back, name="adapter-blocks", daemon=True).start()

    def pack(self, plan: AdapterPlan, tensors: Mapping[str, torch.Tensor], since_s: float) -> AdapterWeights | None:
        """Pack like `AdapterPlan.pack`, with the parts of the other ranks. They are of use once `ready` is true.

        None while no block is free: ask again. `since_s` is the `time.monotonic` at which it was asked for. Raises
        `Overloaded` when no block came free in `_BLOCK_S`, `InternalError` if the group is lost.
        """
        check_alive(self._lost)
        with self._lock:
            if not self.free_blocks:
                if time.monotonic() - since_s < _BLOCK_S:
                    return None
                raise Overloaded("the memory for adapters is in use; try again in a moment", retry_after_s=1.0)
            self._number += 1
            number, block = self._number, self.free_blocks.pop()
        begin = block * self.block_bytes
        unused = _Unused(block, number, None)
        try:
            for rank, spec in reversed(list(enumerate(self._specs))):  # the weights of rank 0 come last
                part = _Part(self._map, begin + rank * self.part_bytes, self.part_bytes)
                weights = plan.of(spec).pack(tensors, zeros=part.zeros)
            shared = _SharedAdapter(number, block, _layout(weights, begin, self._map))
            if self._pins:
                unused = unused._replace(pinned=_pin(self._map, begin, self.part_bytes, self._device))
        except BaseException:
            self._unused.put(unused)
            raise
        weakref.finalize(shared, self._unused.put, unused)
        return AdapterWeights(weights.rank, weights.parts, shared)

    def ready(self, weights: AdapterWeights) -> bool:
        """Whether all ranks can copy their parts; asks them at the first call. One adapter is asked about at a time.

        Raises CheckpointError with the reason if one of them cannot, `InternalError` if the group is lost.
        """
        shared = weights.shared
        assert isinstance(shared, _SharedAdapter)
        check_alive(self._lost)
        with self._lock:
            orders = self._orders()
            if orders is None:
                return False
            if (asked := self._asked) is not None and orders.done("adapters", asked.order):
                asked.answered, asked.failures = True, orders.failures("adapters", asked.order)
                self._asked = None
            if shared.order == 0 and self._asked is None:
                begin = shared.block * self.block_bytes
                shared.order = orders.give("adapters", "prepare", shared.number, begin, self.part_bytes, shared.layout)
                self._asked = shared
            if shared.failures:
                raise CheckpointError(shared.failures[0])
            return shared.answered

    def _give_blocks_back(self) -> None:
        """Have the followers forget each unused adapter, then free its block. Runs in a thread of its own."""
        while True:
            unused = self._unused.get()
            while (orders := self._orders()) is None:  # the followers are still loading
                time.sleep(_POLL_S)
            number = orders.give("adapters", "forget", unused.number)
            while not orders.done("adapters", number):
                if self._lost():
                    return
                time.sleep(_POLL_S)
            try:
                if unused.pinned is not None:
                    unused.pinned.free()
                self._map.madvise(mmap.MADV_REMOVE, unused.block * self.block_bytes, self.block_bytes)
            except (OSError, RuntimeError):  # the block can be used again, but its memory stays taken meanwhile
                log.exception("the memory of an adapter cannot be given back")
            with self._lock:
                self.free_blocks.append(unused.block)


class _Unused(NamedTuple):
    """A block, with the number of the adapter in it."""

    block: int
    number: int
    pinned: PinnedMemory | None


class _Part:
    """Hands out tensors in one rank's part of a block."""

    def __init__(self, memory: mmap.mmap, begin: int, nbytes: int) -> None:
        self._memory, self._at, self._end = memory, begin, begin + nbytes

    def zeros(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor; aligned."""
        count, at = shape[0] * shape[1], self._at
        self._at = -(-(at + count * dtype.itemsize) // _TENSOR_ALIGN) * _TENSOR_ALIGN
        assert self._at <= self._end, "a part has room for an adapter of all modules"
        return torch.frombuffer(self._memory, dtype=dtype, offset=at, count=count).view(shape).zero_()


def _layout(weights: AdapterWeights, begin: int, memory: mmap.mmap) -> list[PartTensor]:
    """The ranges of the tensors, A and then B of each product."""
    base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() + begin
    return [
        PartTensor(layer, product, tensor.data_ptr() - base, *tensor.shape)
        for (layer, product), pair in weights.parts.items()
        for tensor in pair
    ]


def _pin(memory: mmap.mmap, begin: int, nbytes: int, device: torch.device) -> PinnedMemory:
    """Pin memory until `free`."""
    pins = PinnedMemory()
    with torch.cuda.device(device):  # else CUDA would use the first GPU, the device of rank 0
        pins.add(torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=nbytes))
    return pins


class AdapterCopies:
    """A follower's end: its parts of the adapters that rank 0 has packed. They are mapped in a thread of their own."""

    def __init__(
        self, memory: SharedMemory, rank: int, dtype: torch.dtype, device: torch.device, reports: RankReports
    ) -> None:
        self._memory, self._rank, self._dtype, self._device = memory, rank, dtype, device
        self._lock = threading.Lock()
        self._known: dict[int, tuple[AdapterWeights, PinnedMemory | None]] = {}
        self._work = OrderedWork("adapters", device, reports, rank - 1)

    def carry_out(self, number: int, what: str, *fields: Any) -> None:
        """Begin to carry out an order, to prepare an adapter or to forget one."""
        if what == "prepare":
            self._work.put(number, lambda: self._prepare(*fields), "an adapter cannot be mapped")
        else:
            self._work.put(number, lambda: self._forget(*fields))

    def weights(self, number: int) -> AdapterWeights:
        """The part of a prepared adapter that belongs to this rank."""
        with self._lock:
            return self._known[number][0]

    def _prepare(self, number: int, begin: int, part_bytes: int, layout: list[Any]) -> None:
        begin += self._rank * part_bytes
        mapped = self._memory.map()
        parts = _read_parts(mapped, begin, self._dtype, [PartTensor(*row) for row in layout])
        pinned = None
        if self._device.type == "cuda":
            touch(torch.frombuffer(mapped, dtype=torch.uint8, offset=begin, count=part_bytes), self._work.advance)
            pinned = _pin(mapped, begin, part_bytes, self._device)
        with self._lock:
            self._known[number] = AdapterWeights(0, parts), pinned

    def _forget(self, number: int) -> None:
        with self._lock:
            known = self._known.pop(number, None)
        if known is not None and known[1] is not None:
            known[1].free()


def _read_parts(
    memory: mmap.mmap, begin: int, dtype: torch.dtype, layout: list[PartTensor]
) -> dict[LayerProduct, tuple[torch.Tensor, torch.Tensor]]:
    tensors = [
        torch.frombuffer(memory, dtype=dtype, offset=begin + at, count=rows * columns).view(rows, columns)
        for _, _, at, rows, columns in layout
    ]
    keys: list[Any] = [(row.layer, row.product) for row in layout[::2]]
    return {key: (a, b) for key, a, b in zip(keys, tensors[::2], tensors[1::2], strict=True)}
