"""What a fault leaves: an end for every request, with whole tokens, and an engine that can be made whole."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.device.streams import DeviceError
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Pause, Resume, Shutdown
from rollout.engine.messages.to_service import Done
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench


def test_a_rebuilt_engine_gives_the_right_tokens_whatever_the_fault_left_in_its_memory(model, prompt_of, greedy):
    bench = Bench(model, max_rows=3)
    for name in "abcde":  # two of them wait
        bench.submit(name, prompt_of(9), 60, n=1)
    bench.ticks(12)
    message = fail_a_step(bench)
    for name in "abcde":
        finish = bench.completions[name, 0].finish
        assert finish is not None and (finish.reason, finish.error) == ("error", message)
        assert bench.tokens(name) == greedy(prompt_of(9), 60)[: len(bench.tokens(name))]
        assert name in bench.done
    assert len(bench.tokens("a")) >= 5 and bench.tokens("e") == []
    kv = bench.engine.executor.step.kv
    for cache in (*kv.k, *kv.v):
        cache.fill_(float("nan"))
    bench.engine.executor.step.rows.ints.fill_(10**9)
    counted = bench.engine.roster.counters.tokens
    rebuild_engine(bench.engine, bench.settings)
    assert bench.engine.executor.step.kv is kv and bench.engine.roster.counters.tokens == counted
    bench.submit("again", prompt_of(9), 60)
    bench.complete("other", prompt_of(5, 1), 30, n=4)
    assert bench.tokens("again") == greedy(prompt_of(9), 60)
    assert [bench.tokens("other", i) for i in range(4)] == [greedy(prompt_of(5, 1), 30)] * 4


@pytest.mark.parametrize("column", ["tokens", "logprobs", "raw_logprobs", "drawn_logprobs"])
def test_half_a_token_is_not_handed_back(model, prompt_of, column):
    """A fault between two columns of one token leaves all of them as long as the whole tokens are."""
    bench = Bench(model)
    prior = Prior(np.array([5, 6, 7], dtype=np.int32))
    bench.submit("a", prompt_of(4), 40, sampling={"temperature": 0.0, "presence_penalty": 0.1}, prior=prior)
    bench.ticks(10)
    (group,) = bench.engine.roster.groups.values()
    (seq,) = group.sequences
    whole = len(seq.tokens)
    assert whole > 5
    columns = ["tokens", "logprobs", "raw_logprobs", "drawn_logprobs"]
    for name in columns[: columns.index(column) + 1]:
        getattr(seq.drawn, name).append(1)
    bench.engine.fail("torn")
    completion = bench.completions["a", 0]
    assert len(completion.token_ids) == whole - 3 == len(completion.drawn_logprobs)
    assert isinstance(seq.tokens, array) and bench.engine.roster.rescue("again") == []
    bench.close(check=False)


def test_the_state_and_the_waiting_commands_outlive_a_fault(model, prompt_of, greedy):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 60)
    bench.ticks(6)
    bench.engine.inbox.put(Pause("keep", 1))
    fail_a_step(bench)
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("b", prompt_of(9), 20)
    assert Done(1) in bench.events and bench.engine.gate.state == "paused" and bench.tokens("b") == []
    bench.engine.inbox.put(Resume(2))
    bench.run()
    assert bench.tokens("b") == greedy(prompt_of(9), 20)
    bench.submit("c", prompt_of(9), 60)
    bench.ticks(6)
    bench.engine.inbox.put(Shutdown("drain", 3))
    fail_a_step(bench)
    assert Done(3) in bench.events
    bench.close(check=False)


def test_every_shutdown_is_confirmed(model):
    bench = Bench(model)
    bench.engine.inbox.put(Shutdown("drain", 1))
    bench.engine.inbox.put(Shutdown("drain", 2))
    bench.run()
    assert {Done(1), Done(2)} <= {event for event in bench.events if isinstance(event, Done)}


class BrokenUpdate:
    """New weights that cannot be copied, for an engine that has nothing else to do; and who hears of it."""

    version = 1
    nbytes = 0
    names = ()

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._taken = False

    def copy_into(self) -> None:
        raise RuntimeError("no such memory")

    def take_ready(self) -> BrokenUpdate | None:
        taken, self._taken = self._taken, True
        return None if taken else self

    def applied(self, update: BrokenUpdate, pause_s: float) -> None:
        raise AssertionError("it was not")

    def failed(self, update: BrokenUpdate, message: str) -> None:
        self.failures.append(message)


def test_weights_that_were_being_changed_are_not_trusted(model):
    update = BrokenUpdate()
    bench = Bench(model, None, update)
    with pytest.raises(DeviceError, match="no such memory"):
        bench.run()
    bench.engine.fail("no such memory")
    assert update.failures == ["no such memory"]
    with pytest.raises(RuntimeError, match="interrupted a change of the weights"):
        rebuild_engine(bench.engine, bench.settings)
    bench.close(check=False)
