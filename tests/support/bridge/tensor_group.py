"""A tiny model in shards, and a worker around a real WeightReceiver whose followers are threads, without an engine."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgpack
import torch

from rollout.models.cut import Cut, CutView
from rollout.ranks.follower_updates import FollowerUpdates
from rollout.ranks.orders import END, OrderWriter
from rollout.ranks.relay import RELAY_SIZES, RelaySizes
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory
from rollout.ranks.updates import RankUpdates, write_cuts
from rollout.weights.kept_memory import InPlaceMemory, StagedMemory
from rollout.weights.parameter_map import ParameterMap
from rollout.weights.pinned_memory import BLOCK_BYTES
from rollout.weights.staged_weights import Copy, StagedWeights, SwapCopies
from rollout.weights.staging import WeightStaging
from tests.support.bridge.harness import EXPERTS, HIDDEN, INTER, TinyModel, Worker, wait_for
from trainer_bridge.transports.cuda_ipc import IpcMemory

VOCAB = 11


def share(whole: int, rank: int, size: int) -> tuple[int, int]:
    """The entries of a rank; the first ranks have one more where they do not divide."""
    begin = rank * (whole // size) + min(rank, whole % size)
    return begin, begin + whole // size + (rank < whole % size)


class TinyShard:
    """The part of a `TinyModel` that one rank keeps; `views` take whole tensors."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        tokens, q, kv, width = (share(whole, rank, size) for whole in (VOCAB, 8, 4, INTER))

        def zeros(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(sizes, device=device, dtype=dtype)

        heads, groups, inner = q[1] - q[0], kv[1] - kv[0], width[1] - width[0]
        self.parameters = p = {
            "embed": zeros(tokens[1] - tokens[0], HIDDEN),
            "norm": zeros(HIDDEN, dtype=torch.float32),
            "qkv": zeros(heads + 2 * groups, HIDDEN),
            "gate_up": zeros(EXPERTS, 2 * inner, HIDDEN),
            "down": zeros(EXPERTS, HIDDEN, inner),
        }
        by_token, by_width = Cut(0, VOCAB, (tokens,)), Cut(0, INTER, (width,))
        halves = Cut(2, 2 * INTER, (width, (INTER + width[0], INTER + width[1])))
        places: dict[str, tuple[torch.Tensor, Cut | None]] = {
            "embed.weight": (p["embed"], by_token),
            "lm_head.weight": (p["embed"], by_token),
            "norm.weight": (p["norm"], None),
            "q.weight": (p["qkv"][:heads], Cut(0, 8, (q,))),
            "k.weight": (p["qkv"][heads : heads + groups], Cut(0, 4, (kv,))),
            "v.weight": (p["qkv"][heads + groups :], Cut(0, 4, (kv,))),
            "experts.gate_up": (p["gate_up"].transpose(1, 2), halves),
            "experts.down": (p["down"], by_width.at(2)),
        }
        for e in range(EXPERTS):
            places[f"experts.{e}.gate.weight"] = p["gate_up"][e, :inner], by_width
            places[f"experts.{e}.up.weight"] = p["gate_up"][e, inner:], by_width
            places[f"experts.{e}.down.weight"] = p["down"][e], by_width.at(1)
        self.views = {name: CutView.of(part, cut) for name, (part, cut) in places.items()}

    def serves(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the parameters are this shard's parts of `tensors`."""
        return all(torch.equal(self.part(name), self._expected(name, tensor)) for name, tensor in tensors.items())

    def part(self, name: str) -> torch.Tensor:
        """The kept part of a tensor."""
        view = self.views[name]
        return view.kept_part if isinstance(view, CutView) else view

    def _expected(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        view = self.views[name]
        if isinstance(view, CutView):
            kept = [index for begin, end in view.cut.ranges for index in range(begin, end)]
            tensor = tensor.index_select(view.cut.dim, torch.tensor(kept, dtype=torch.int64, device=tensor.device))
        part = self.part(name)
        return tensor.to(part.device, part.dtype)


class GroupWorker(Worker):
    """A worker of several ranks. The followers read no orders while `reading` is not set, and copy no swap while
    `swapping` is not set: as on a GPU, copies end after their order is carried out.

    `peers` is by rank what takes the place of its GPU's memory, if pieces may go from device to device.
    """

    def __init__(
        self,
        size: int,
        relay_bytes: int = 1 << 20,
        piece_bytes: int = RELAY_SIZES.piece,
        block_bytes: int = BLOCK_BYTES,
        shared: Path | None = None,
        peers: Sequence[IpcMemory | None] = (),
        device: str = "cpu",
        staging: Literal["auto", "device", "host"] = "auto",
        **settings: Any,
    ) -> None:
        self.shards = [TinyShard(rank, size, device=device) for rank in range(size)]
        count, ring = size - 1, SharedMemory.create("orders", 1 << 20)
        table = SharedMemory.create("lines", count * RankReports.line_bytes())
        self.reports = RankReports(table, count)
        self.relayed, manifest = SharedMemory.create("pieces", 0), SharedMemory.create("manifest", 0)
        eventfds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count)]
        self._descriptors = [*eventfds, *(memory.descriptor for memory in (ring, table, self.relayed, manifest))]
        writer = RingWriter(ring, eventfds, lambda: self.reports.get("position"))
        mine = peers[0] if peers else None

        def staging_of(shard: TinyShard) -> WeightStaging:
            if settings.get("apply") == "in_place":
                return WeightStaging(InPlaceMemory(shard.views))
            return WeightStaging(StagedMemory(shard.views, staging, shard=True, block_bytes=block_bytes))

        self.stagings = [staging_of(shard) for shard in self.shards]
        sizes = RelaySizes(relay_bytes, piece_bytes)
        memories = {"relayed": self.relayed, "manifest": manifest}
        cuts = [SharedMemory.create("cuts", 0) for _ in range(count)]
        self._descriptors += [memory.descriptor for memory in cuts]
        for memory, of_rank in zip(cuts, self.stagings[1:], strict=True):
            write_cuts(memory, of_rank.cuts)
        ranks = RankUpdates(self.stagings[0], memories, self.reports, lambda: self.orders, mine, sizes, cuts=cuts)
        self.orders = OrderWriter(writer, 0, self.reports, lambda: None, ranks)
        self.reading = threading.Event()
        self.reading.set()
        self.swapping = threading.Event()
        self.swapping.set()
        self.followers = []
        for number, eventfd in enumerate(eventfds):
            parameters = ParameterMap(self.shards[1 + number].views)
            relayed = SharedMemory(self.relayed.descriptor)  # a map of its own, as in a process of its own
            peer = peers[1 + number] if peers else None
            staging_of_rank = self.stagings[1 + number]
            updates = FollowerUpdates(parameters, staging_of_rank, relayed, manifest, self.reports, number, peer)
            reader = RingReader(ring, eventfd, lambda at, me=number: self.reports.set(me, "position", at))  # type: ignore[misc]
            follow = threading.Thread(target=self._follow, args=(reader, updates, number), daemon=True)
            follow.start()
            self.followers.append(follow)
        super().__init__(model=_Views(self.shards[0]), shared=shared, memories=ranks, staging=staging, **settings)

    def serve(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether all ranks serve these tensors, once the followers have carried out every order."""
        self.wait_followers()
        if self.shards[0].parameters["norm"].is_cuda:
            torch.cuda.synchronize()
        return all(shard.serves(tensors) for shard in self.shards)

    def wait_followers(self) -> None:
        """Wait until every order that was given is carried out."""
        last = self.orders.ordered
        wait_for(lambda: min(self.reports.get("sequence")) >= last, "the followers")
        wait_for(lambda: self.orders.done("swap", self.orders.swapped), "the swap of all ranks")

    def snapshot(self) -> list[torch.Tensor]:
        """The parameters of all ranks."""
        self.wait_followers()
        return [tensor.clone() for shard in self.shards for tensor in shard.parameters.values()]

    def apply(self, update: StagedWeights) -> None:
        self.orders.swap(update.version)
        update.copy_into()

    def close(self) -> None:
        super().close()
        self.reading.set()
        self.swapping.set()
        self.orders.end()
        for follower in self.followers:
            follower.join(20)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _follow(self, reader: RingReader, updates: FollowerUpdates, number: int) -> None:
        """What a follower's main thread does, without steps."""
        while True:
            if not (self.reading.wait(1.0) and reader.wait(0.05)):
                continue
            head, body = reader.read()
            fields = msgpack.unpackb(body)
            body.release()
            if head.kind != END:
                lane, order, *rest = fields
                if lane == "updates":
                    updates.carry_out(order, *rest)
                elif lane == "update_reads":
                    updates.read(order, *rest)
                elif lane == "swap":
                    copies = updates.take(order, *rest)
                    threading.Thread(target=self._copy, args=(copies, number, order)).start()
            reader.done(head)
            self.reports.set(number, "sequence", head.sequence)
            if head.kind == END:
                return

    def _copy(self, copies: list[Copy], number: int, update: int) -> None:
        """What a follower's compute stream does in a swap."""
        self.swapping.wait()
        SwapCopies().enqueue(copies)
        LaneReport(self.reports, number, "swap").end(update)


class _Views(TinyModel):
    """A shard as the worker's model."""

    def __init__(self, shard: TinyShard) -> None:
        super().__init__()
        self.parameters, self.views = shard.parameters, shard.views
