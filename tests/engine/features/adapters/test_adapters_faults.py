"""Adapters and faults: of an adapter, of the device, and an engine that is built anew."""

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_engine import FeatureUpdate, PutAdapter
from rollout.engine.messages.to_service import Failed
from rollout.models.lora_slots import AdapterWeights
from tests.support.engine.adapted import bench_of, greedy_is, table_of, versions_of
from tests.support.engine.harness import Bench, prompt_of


@pytest.mark.parametrize("factor", [float("nan"), 1e30])
def test_an_adapter_that_is_no_good_harms_its_own_rows_alone(model, base, adapters, factor):
    """Also those that get its pages, in which there is no number, behind what they have written themselves."""
    bench = bench_of(model, adapters, 0, kv_pages=12, prefix_cache=False, max_rows=2)
    weights = adapters[1][0]
    parts = {place: (a * factor, b * factor) for place, (a, b) in weights.parts.items()}
    bench.engine.inbox.put(PutAdapter("bad", AdapterWeights(weights.rank, parts)))
    bench.complete("bad", prompt_of(30, 1), 8, adapter="bad")
    assert bench.completions["bad", 0].finish.reason == "error"
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(21, i), 10)
    bench.run()
    for i in range(3):
        assert bench.completions[f"r{i}", 0].finish.reason == "length"
        greedy_is(base, prompt_of(21, i), bench.tokens(f"r{i}"))


class Recorder:
    """The engine's side of a receiver that has one update."""

    def __init__(self, update: FeatureUpdate) -> None:
        self.updates, self.told = [update], []

    def take_ready(self) -> FeatureUpdate | None:
        return self.updates.pop() if self.updates else None

    def applied(self, update: FeatureUpdate, pause_s: float) -> None:
        self.told.append("applied")

    def refused(self, update: FeatureUpdate, message: str) -> None:
        self.told.append(f"refused: {message}")

    def failed(self, update: FeatureUpdate, message: str) -> None:
        self.told.append(f"failed: {message}")


class BrokenStream:
    """Of a device that is gone."""

    def wait(self, event: object) -> None:
        raise RuntimeError("the device is gone")


def test_the_sender_of_an_adapter_gets_the_fault_and_the_previous_one_is_served(model, adapters):
    recorder = Recorder(FeatureUpdate("a0", 9, 1, PutAdapter("a0", adapters[1][0], 9)))
    bench = Bench(model, adapter_slots=2, adapter_rank=16, receiver=recorder)
    recorder.updates, held = [], recorder.updates
    bench.engine.inbox.put(PutAdapter("a0", adapters[0][0]))
    bench.submit("r", prompt_of(9), 50, adapter="a0")
    bench.tick_until(lambda: bench.engine.roster.decoding)

    table_of(bench).compute = BrokenStream()
    recorder.updates = held
    with pytest.raises(RuntimeError):
        bench.engine.tick()
    (told,) = recorder.told  # or it would wait for ever
    assert told.startswith("failed: ") and "the device is gone" in told
    bench.engine.inbox.put(PutAdapter("a0", adapters[2][0], token=3))
    with pytest.raises(RuntimeError):
        bench.engine.tick()
    bench.engine.fail("a fault")
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert (failed.token, failed.code) == (3, "internal")
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("again", prompt_of(9), 6, adapter="a0")
    greedy_is(adapters[0][1], prompt_of(9), bench.tokens("again"))
    assert versions_of(bench, "again") == [0] * 6


def test_an_adapter_that_came_after_the_last_free_place_is_refused_as_its_begin_would_be(model, adapters):
    """Both were told that there is room; a command of the same tick came first."""
    recorder = Recorder(FeatureUpdate("late", 1, 1, PutAdapter("late", adapters[1][0], 1)))
    bench = Bench(model, adapter_slots=2, adapter_rank=16, max_adapters=1, receiver=recorder)
    bench.engine.inbox.put(PutAdapter("first", adapters[0][0]))
    bench.complete("r", prompt_of(9), 6, adapter="first")
    (told,) = recorder.told
    assert told.startswith("refused: ") and "max_adapters" in told
    assert [status.name for status in bench.status().adapters] == ["first"]
    greedy_is(adapters[0][1], prompt_of(9), bench.tokens("r"))


def test_an_engine_that_is_built_anew_knows_its_adapters(model, adapters):
    bench = bench_of(model, adapters, 2)
    bench.submit("lost", prompt_of(9), 50, adapter="a0")
    bench.tick_until(lambda: bench.engine.roster.decoding)
    bench.engine.fail("a fault")
    rebuild_engine(bench.engine, bench.settings)
    assert [(status.name, status.resident) for status in bench.status().adapters] == [
        ("a0", False),
        ("a1", False),
    ]
    for i in range(2):
        bench.submit(f"r{i}", prompt_of(9), 6, adapter=f"a{i}")
    bench.run()
    for i in range(2):
        greedy_is(adapters[i][1], prompt_of(9), bench.tokens(f"r{i}"))
