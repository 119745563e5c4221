"""What other threads see of an engine: its sequences in every state, its steps, and a swap between two of them."""

from __future__ import annotations

from rollout.engine.inspect import Inspector
from rollout.metrics.recording import Recording
from tests.support.engine.harness import Bench


class Swap:
    """A receiver with one update of the weights, which are the same as before."""

    version, nbytes, names = 1, 64, ()

    def __init__(self) -> None:
        self.ready = False

    def take_ready(self) -> Swap | None:
        ready, self.ready = self.ready, False
        return self if ready else None

    def copy_into(self) -> None:
        """Nothing differs."""

    def applied(self, update: object, pause_s: float) -> None:
        """No thread waits."""


def recording(bench: Bench, steps: int = 2000) -> Recording:
    return Recording.from_fields(Inspector(bench.engine).recording(steps))


def test_sequences_are_shown_from_prefill_to_their_last_token(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=8)
    views = Inspector(bench.engine)
    bench.submit("a", prompt_of(20), 6)
    bench.engine.tick()
    (first,) = views.sequences(10)
    assert (first.state, first.prompt_tokens, first.tokens, first.version) == ("prefill", 20, 0, None)
    seen = []
    while bench.engine.busy:
        bench.engine.tick()
        seen += [(entry.state, entry.tokens, entry.version) for entry in views.sequences(10)]
    assert ("decode", 5, 0) in seen and seen == sorted(seen, key=lambda entry: entry[1])
    assert views.sequences(10) == []


def test_the_oldest_sequences_come_first_and_no_more_than_asked_for(model, prompt_of):
    bench = Bench(model)
    for name in ("first", "second", "third"):
        bench.submit(name, prompt_of(5), 30)
    bench.ticks(6)
    views = Inspector(bench.engine)
    assert [entry.key[1] for entry in views.sequences(2)] == ["first", "second"]
    assert len(views.sequences(10)) == 3
    bench.run()


def test_a_recording_has_every_step_in_order_and_the_swap_between_two(model, prompt_of):
    receiver = Swap()
    bench = Bench(model, None, receiver)
    bench.submit("a", prompt_of(5), 40)
    bench.ticks(10)
    receiver.ready = True
    bench.run()
    kept = recording(bench)
    assert [step.kind for step in kept.steps] == ["prefill"] + ["decode"] * 39
    assert sum(step.tokens for step in kept.steps) == 40
    versions = [step.version for step in kept.steps]
    assert versions == sorted(versions) and set(versions) == {0, 1}
    (swap,) = kept.swaps
    before, after = versions.count(0) - 1, versions.count(0)
    assert swap.version == 1
    assert kept.steps[before].end_s <= swap.start_s <= swap.end_s <= kept.steps[after].start_s
    assert bench.engine.meter.totals()["off_policy/version_span"] == 1.0
    assert bench.engine.meter.totals()["weights/bytes"] == 64


def test_every_step_knows_when_its_turn_was_over_and_the_last_that_nothing_followed(model, prompt_of):
    bench = Bench(model)
    bench.complete("a", prompt_of(5), 10)
    steps = recording(bench).steps
    for step in steps:
        assert step.finalized_at_s is not None and step.finalized_at_s >= step.committed_at_s + step.commit_s
    assert [step.idle_after for step in steps] == [False] * 9 + [True]
    assert recording(bench, 3).steps[-1].tokens == steps[-1].tokens and len(recording(bench, 3).steps) == 3
