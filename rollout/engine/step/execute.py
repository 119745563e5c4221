"""Executes uploads: enqueues a step on the device's streams and reads its outputs.

    host      execute: enqueue                                                   read: wait for d2h_done
    h2d       h2d_start | copy | h2d_done
    compute                       wait h2d_done | start | begin, forward, sample | end
    d2h                                                                           wait end | copy | d2h_done

A step with constrained rows stops after its forward, until `draw` comes with their masks. Features read the
forward's results before the draw, and may copy their own results to the host.

`execute` waits for nothing on the device. All that it knows of a step is the upload: no sequence, no plan. So a process
that is sent header and words, and has the same model, KV and row state, computes the same tokens.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from rollout_kernels.parallel import TensorGroup

from rollout.engine.device.streams import Device, Event, Streams
from rollout.engine.kv.tiers.disk_pages import NO_DISK, DiskPages
from rollout.engine.kv.tiers.page_mover import CopyQueue, PageMover
from rollout.engine.schedule.step_feature import of_kind
from rollout.engine.step.device_feature import NO_ORDERS, NO_REPLAYS, AheadFeature, Orders
from rollout.engine.step.device_step import DeviceStep
from rollout.engine.step.graphs import NO_GRAPHS, DecodeGraphs
from rollout.engine.step.slot import Slot
from rollout.engine.upload import PLAIN, Header, RowNeeds, StepInput, StepOutput, Upload

# Flags of an enum are slow to test.
_CONSTRAIN = RowNeeds.CONSTRAIN.value
_NOT_PLAIN = ~PLAIN.value


class Movers(NamedTuple):
    """The streams of copies to the host and back."""

    kv: PageMover | None = None
    states: PageMover | None = None
    disk: DiskPages = NO_DISK
    state_disk: DiskPages = NO_DISK

    @property
    def all(self) -> list[PageMover]:
        """The existing queues of copies between device and host."""
        return [mover for mover in (self.kv, self.states) if mover is not None]

    def close(self) -> None:
        """End the streams, and the threads of files."""
        for mover in self.all:
            mover.close()
        self.disk.close()
        self.state_disk.close()


class RankRole(NamedTuple):
    """The executor's role in a tensor group."""

    orders: Orders = NO_ORDERS  # orders of the first rank to the others
    downloads: bool = True  # False on the other ranks: their outputs are not read
    compares: bool = False  # the ranks compare their drawn tokens after each step


_NO_MOVERS, _ALONE = Movers(), RankRole()


class Executor:
    """Runs steps: `step` says what they do, `graphs` are the captured ones. The movers end with it."""

    def __init__(
        self,
        device: Device,
        streams: Streams,
        step: DeviceStep,
        graphs: DecodeGraphs = NO_GRAPHS,
        movers: Movers = _NO_MOVERS,
        rank: RankRole = _ALONE,
    ) -> None:
        self.device = device
        self.streams = streams
        self.h2d, self.compute, self.d2h = streams.h2d, streams.compute, streams.d2h
        self.step = step
        self.graphs = graphs
        self.movers = movers
        self.mover, self.state_mover = movers.kv, movers.states
        self.orders, self._downloads, self._compares = rank
        self._ahead_features = of_kind(step.features, AheadFeature)  # type: ignore[type-abstract]

    def execute(self, upload: Upload, slot: Slot) -> None:
        """Enqueue a step. Waits only for room in the ring of a tensor group."""
        self.orders.step(upload)
        header, step = upload.header, slot.input_for(upload)
        self.h2d.record(slot.h2d_start)
        self.h2d.run(functools.partial(step.receive, upload.words))
        self.h2d.record(slot.h2d_done)

        self.compute.wait(slot.h2d_done)
        self.compute.record(slot.start)
        self.compute.run(functools.partial(self.run, step, slot))
        if header.needs & _CONSTRAIN:
            self.compute.record(slot.forward_end)
        else:
            self._finish(header, slot)

    def draw(self, header: Header, slot: Slot, at: Seq[int], refused: Seq[int] = ()) -> None:
        """Enqueue the draw of a step that waits for masks; mask i belongs to the drawing row `at[i]`.

        `refused` are the indices of tokens ahead that have no mask.
        """
        slot.masks.set_rows(at, refused)
        self.orders.draw(slot.masks)
        self.draw_with_masks(header, slot)

    def draw_with_masks(self, header: Header, slot: Slot) -> None:
        """Enqueue the same draw with the masks that the slot has."""
        self.h2d.run(slot.masks.copy)
        self.h2d.record(slot.masks.arrived)
        self.compute.wait(slot.masks.arrived)
        self.compute.record(slot.draw_start)
        self.compute.run(functools.partial(self.run_draw, header, slot))
        self._finish(header, slot)

    def read(self, header: Header, slot: Slot) -> StepOutput:
        """Wait for the outputs of a step. Raises DeviceError if anything on the device failed, here or on a peer."""
        slot.d2h_done.synchronize()
        self.check()
        slot.fault.check()
        output = slot.read(header)
        self.orders.confirm(output)
        return output

    def _finish(self, header: Header, slot: Slot) -> None:
        self.compute.record(slot.end)
        if not self._downloads:
            return
        self.d2h.wait(slot.end)
        self.d2h.record(slot.d2h_start)
        self.d2h.run(functools.partial(slot.download, header))
        for copy in slot.downloads(header):
            self.d2h.run(copy)
        self.d2h.record(slot.d2h_done)

    # --- on the compute stream ---------------------------------------------------------------------------------------

    def run(self, step: StepInput, slot: Slot) -> None:
        """A forward, and the draw unless that waits for masks."""
        header = step.header
        self.step.begin(step)
        if header.layout:
            forwarded = self.step.prefill(step, slot.outputs)
        elif not header.size:
            forwarded = self.step.decode(step, slot.outputs)
        elif header.needs & _NOT_PLAIN:
            forwarded = self.graphs.forward(step, slot.outputs)
        else:
            self.graphs.run(slot, header.size, "behind" in step)
            self.end_step(step, slot)
            return
        slot.forwarded = forwarded
        if forwarded is None:
            self.end_step(step, slot)
            return
        self.step.computed(step, forwarded[0], slot.outputs)
        if not header.needs & _CONSTRAIN:
            self.run_draw(header, slot)

    def run_draw(self, header: Header, slot: Slot) -> None:
        """Draw from the logits of the slot's forward, if any row draws."""
        forwarded, slot.forwarded = slot.forwarded, None
        if forwarded is not None:
            self.step.sample(*forwarded, RowNeeds(header.needs), slot.output, slot.masks)
            self.end_step(StepInput(header, slot.input), slot)

    def end_step(self, step: StepInput, slot: Slot) -> None:
        """End a step, after its tokens are drawn."""
        if self._compares and step.header.draws:
            compare_tokens(self.step.group, slot.output[0, : step.header.draws])
        rows, kv = self.step.rows, self.step.kv
        for feature in self._ahead_features:
            replays = self.graphs.replays.get(feature.name, NO_REPLAYS)
            feature.step_ends(rows, step, kv, slot.drawn, slot.outputs[feature.name], replays)

    # --- between the steps --------------------------------------------------------------------------------------------

    def swap(self, version: int, copy: Callable[[], object], start: Event, end: Event) -> None:
        """Run the copy of an update on the compute stream, between the last launched step and the next."""
        self.orders.swap(version)
        self.compute.record(start)
        self.compute.run(copy)
        self.compute.record(end)

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured."""
        return bool(self.graphs.sizes.whole)

    @property
    def copy_queues(self) -> list[CopyQueue]:
        """The queues of copies to the host and back."""
        return [queue for mover in self.movers.all for queue in (mover.out, mover.back)]

    def finish(self) -> None:
        """Return when all enqueued work is done. Raises DeviceError if any of it failed."""
        for stream in self.streams.all():
            done = self.device.event()
            stream.record(done)
            done.synchronize()
        self.check()

    def check(self) -> None:
        """Raise DeviceError if work on a stream failed."""
        for stream in self.streams.all():
            stream.check()

    def close(self) -> None:
        """Finish the enqueued work, end the streams and free the memory of the captured steps."""
        self.streams.close()
        self.graphs = NO_GRAPHS
        self.movers.close()


def compare_tokens(group: TensorGroup, tokens_S: torch.Tensor) -> None:
    """Fail, on every rank and on its stream, if the ranks drew different tokens."""
    drawn_RS = group.all_gather(tokens_S)
    same = (drawn_RS == drawn_RS[0]).all()
    message = "the ranks drew different tokens"
    if tokens_S.is_cuda:
        torch._assert_async(same, message)
    elif not same:
        raise RuntimeError(f"{message}: {drawn_RS.tolist()}")
