"""A step whose ranks waited in vain is never committed."""

import math
from collections.abc import Iterator

import pytest
import torch
from rollout_kernels.parallel.peer_buffers import PeerBuffers

from rollout.engine.build import build_engine
from rollout.engine.device.streams import DeviceError
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.step.device_feature import Orders
from rollout.engine.upload import StepOutput
from tests.support.engine.harness import Bench


@pytest.fixture
def peers(model) -> Iterator[PeerBuffers]:
    """Peer buffers of the model's group: only their flag matters here."""
    words, before = torch.zeros(2, 2, 1, 8, dtype=torch.int64), model.group.peers
    model.group.peers = PeerBuffers.of(0, words, [words.data_ptr()] * 2)
    yield model.group.peers
    model.group.peers = before


def running(bench: Bench) -> Sequence:
    """The only sequence, once it has some tokens."""
    while not (decoding := bench.engine.roster.decoding) or len(decoding[0].tokens) < 5:
        bench.engine.tick()
    return decoding[0]


def test_the_flag_ends_the_engine_before_the_step_is_committed(model, prompt_of, peers: PeerBuffers) -> None:
    bench = Bench(model)
    bench.submit("a", prompt_of(9), max_tokens=200)
    seq = running(bench)
    bench.engine.executor.finish()  # what is in flight is right; its flag is copied
    in_flight, known = bench.engine.pipeline.in_flight, len(seq.tokens)
    peers.fault[0] = 2
    with pytest.raises(DeviceError, match="rank 1 did not send"):
        bench.ticks(10)
    assert len(seq.tokens) == known + in_flight, "the steps before the flag are committed, and none after it"
    bench.engine.fail("the ranks are lost")
    completion = bench.completions["a", 0]
    assert completion.finish.reason == "error"
    assert completion.token_ids == list(seq.tokens)
    alone = Bench(model)
    peers.fault[0] = 0
    alone.complete("a", prompt_of(9), max_tokens=len(completion.token_ids))
    assert alone.tokens("a") == completion.token_ids
    for each in (bench, alone):
        each.close(check=False)


class Doubts(Orders):
    """The other ranks, one of which knows that a step is wrong."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.after = math.inf

    def confirm(self, output: StepOutput) -> None:
        self.outputs.append(output)
        if len(self.outputs) > self.after:
            raise DeviceError("rank 1 waited in vain")


def test_another_rank_is_asked_before_a_step_is_committed(model, prompt_of) -> None:
    bench, doubts = Bench(model), Doubts()
    bench.engine.executor.close()
    bench.engine = build_engine(bench.settings, bench.device, model, bench.links, lead=lambda *sizes: doubts)
    bench.submit("a", prompt_of(9), max_tokens=200)
    seq = running(bench)
    doubts.after, known = len(doubts.outputs), len(seq.tokens)
    with pytest.raises(DeviceError, match="waited in vain"):
        bench.ticks(10)
    assert len(seq.tokens) == known
    bench.close(check=False)
