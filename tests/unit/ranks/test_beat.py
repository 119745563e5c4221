"""What a follower reports of its device: steps that are complete, and a wait in vain."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from rollout_kernels.parallel.peer_buffers import PeerBuffers

from rollout.engine.device.streams import CpuDevice, DeviceStream
from rollout.engine.step.slot import Slot
from rollout.engine.upload import StepOutput
from rollout.ranks.beat import DeviceProgress
from rollout.ranks.orders import OrderWriter
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import RingWriter, SharedMemory
from tests.support.worker.harness import until

DEVICE = CpuDevice()


@pytest.fixture
def stream() -> Iterator[DeviceStream]:
    made = DEVICE.stream("compute")
    yield made
    made.close()


def test_steps_count_once_their_end_is_reached(stream: DeviceStream) -> None:
    slots = [Slot(DEVICE, 64, 2, 40, 16) for _ in range(2)]
    progress, gates = DeviceProgress(DEVICE, slots, None), [threading.Event() for _ in range(3)]
    assert progress.done() == 0
    for number, gate in enumerate(gates[:2]):
        stream.run(gate.wait)
        stream.record(slots[number].end)
        progress.enqueued += 1
    assert progress.done() == 0
    gates[0].set()
    until(lambda: progress.done() == 1, "the first step")
    stream.run(gates[2].wait)
    stream.record(slots[0].end)  # the slot is used again
    progress.enqueued += 1
    assert progress.done() == 1
    gates[1].set()
    until(lambda: progress.done() == 2, "the second step")
    gates[2].set()
    until(lambda: progress.done() == 3, "the third step")


def test_the_flag_of_the_peer_buffers_tells_the_rank_that_is_missing() -> None:
    words = torch.zeros(2, 4, 1, 8, dtype=torch.int64)
    peers = PeerBuffers.of(1, words, [words.data_ptr()] * 4)
    progress = DeviceProgress(DEVICE, [], peers)
    for _ in range(20):
        assert progress.lost_rank() is None
    peers.fault[0] = 1 + 3
    assert until(progress.lost_rank, "the flag") == 3
    assert DeviceProgress(DEVICE, [], None).lost_rank() is None


class LostError(RuntimeError):
    """A rank is lost."""


@pytest.mark.parametrize(("logprobs", "asks"), [([-0.5, -1e9, float("-inf")], False), ([-0.5, float("nan")], True)])
def test_log_probs_that_are_nan_make_rank_0_ask_the_others(logprobs: list[float], asks: bool) -> None:
    def settle() -> None:
        raise LostError

    reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
    ring = RingWriter(SharedMemory.create("ring", 4096), [], lambda: [0], 1.0)
    output = StepOutput([1] * len(logprobs), logprobs, logprobs, logprobs)
    with pytest.raises(LostError) if asks else nullcontext():
        OrderWriter(ring, 0, reports, settle).confirm(output)
