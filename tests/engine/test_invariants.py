"""Invariants of docs/architecture.md, seen to hold, and seen to be caught when they are broken."""

import random

import pytest

from rollout.engine.messages.to_engine import Cancel
from rollout.engine.messages.to_service import Delta
from rollout.engine.schedule.completion_events import make_delta
from rollout.engine.sequence.sequence import Sequence, SequenceState
from tests.support.engine.harness import Bench
from tests.support.kernels.grids import nightly

SAMPLED = {"temperature": 1.0, "seed": 7}


def stop_token(model, prompt: list[int], at: int) -> int:
    """A token that the plain run draws first at position `at` or later."""
    bench = Bench(model)
    bench.complete("probe", prompt, at + 30, sampling=SAMPLED)
    tokens = bench.tokens("probe")
    bench.close()
    return next(token for i, token in enumerate(tokens) if i >= at and token not in tokens[:i])


# --- 2, 3: slots and order ---


def test_a_slot_is_free_only_after_the_commit_that_read_it(model, prompt_of):
    bench = Bench(model)
    free, seen = bench.engine.pipeline.free_slots, []
    bench.observer.at_commit.append(lambda step, output: seen.append(step.slot not in free))
    bench.complete("a", prompt_of(9), 20)
    assert len(seen) == 20 and all(seen)


def test_slots_are_used_in_turn(model, prompt_of):
    bench = Bench(model)
    used = []
    bench.observer.at_commit.append(lambda step, output: used.append(step.slot))
    bench.complete("a", prompt_of(9), 20)
    assert used[0] is not used[1] and all(used[i] is used[i % 2] for i in range(len(used)))


def test_retiring_out_of_order_is_refused(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 20)
    bench.engine.tick()
    engine = bench.engine
    engine.launch(engine.scheduler.plan(), 0.0)
    newest = engine.pipeline.newest()
    with pytest.raises(AssertionError, match="FIFO"):
        engine.pipeline.retire(newest)
    engine.commit_oldest()
    bench.run()


# --- 5: references, zombies, release ---


class RefWatch:
    """Looks at every sequence before each commit and after each tick."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.most = 0
        self.zombies: set[Sequence] = set()

    def look(self) -> None:
        roster = self.bench.engine.roster
        in_flight = [span.seq for step in self.bench.engine.pipeline.steps() for span in step.plan.spans]
        for seq in in_flight:
            assert seq.inflight_refs == in_flight.count(seq), "refs are the steps in flight that name the row"
            assert 0 < seq.inflight_refs <= 2
            assert seq.launched <= seq.max_tokens, "drafts count as drawn until they are refused"
            self.most = max(self.most, seq.inflight_refs)
            assert seq.row and seq.row not in roster.free_rows, "a row in flight belongs to one sequence"
            assert all(roster.allocator.pool.refs[page] > 0 for page in seq.kv.pages), "pages in flight are not free"
            self.zombies |= {seq} if seq.finalized else set()


def run_watched(bench: Bench) -> RefWatch:
    watch = RefWatch(bench)
    bench.observer.at_commit.append(lambda step, output: watch.look())  # two steps are in flight only here
    bench.engine.tick()
    while bench.engine.busy:
        watch.look()
        bench.engine.tick()
    return watch


def test_an_early_stop_makes_one_zombie_whose_row_and_pages_stay_until_it_lands(model, prompt_of):
    prompt = prompt_of(9)
    stop = stop_token(model, prompt, 12)
    bench = Bench(model)
    bench.submit("a", prompt, 40, sampling=SAMPLED, stop={"token_ids": (stop,)})
    watch = run_watched(bench)
    assert bench.tokens("a")[-1] == stop
    assert bench.completions["a", 0].finish.reason == "stop"
    assert len(watch.zombies) == 1 and bench.engine.roster.counters.zombie_rows == 1


def test_releasing_a_zombie_early_is_seen(model, prompt_of):
    prompt = prompt_of(9)
    stop = stop_token(model, prompt, 12)
    bench = Bench(model)
    settle = bench.engine.roster.settle

    def hasty(seq):
        refs, seq.inflight_refs = seq.inflight_refs, 0
        settle(seq)
        seq.inflight_refs = refs

    bench.engine.roster.settle = hasty
    bench.submit("a", prompt, 40, sampling=SAMPLED, stop={"token_ids": (stop,)})
    with pytest.raises(AssertionError, match="a row in flight|pages in flight"):
        run_watched(bench)
    bench.close(check=False)


def test_a_zombies_token_is_never_sent(model, prompt_of):
    prompt = prompt_of(9)
    stop = stop_token(model, prompt, 12)
    bench = Bench(model)
    bench.complete("a", prompt, 40, sampling=SAMPLED, stop={"token_ids": (stop,)}, stream_every=1)
    sent = [event for event in bench.events if isinstance(event, Delta)]
    assert sum(len(delta.token_ids) for delta in sent) == len(bench.tokens("a"))
    assert sent[-1].finish is not None and sent[-1].token_ids.tolist()[-1:] == [stop]


def test_sending_a_zombies_token_is_seen(model, prompt_of):
    """A commit that forgets `finalized` appends and sends after the end; the harness refuses that."""
    prompt = prompt_of(9)
    stop = stop_token(model, prompt, 12)
    bench = Bench(model)
    commit = bench.engine.scheduler.commit

    def forgetful(plan, output):
        dead = [seq for seq in plan.sampled if seq.finalized]
        commit(plan, output)
        for i, seq in enumerate(plan.sampled):
            if seq in dead:
                seq.tokens.append(output.tokens[i])
                seq.drawn.logprobs.append(0.0), seq.drawn.raw_logprobs.append(0.0)
                seq.drawn.versions[-1][1] += 1
                bench.engine.roster.events.append(make_delta(seq))

    bench.engine.scheduler.commit = forgetful
    bench.submit("a", prompt, 40, sampling=SAMPLED, stop={"token_ids": (stop,)})
    with pytest.raises(AssertionError, match="nothing comes after the end"):
        bench.run()
    bench.close(check=False)


def test_rows_that_end_by_length_make_no_zombie_and_no_extra_launch(model, prompt_of):
    bench = Bench(model)
    lengths = [1, 2, 3, 17, 40]
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", prompt_of(6, i), length, sampling=SAMPLED)
    watch = run_watched(bench)
    counters = bench.engine.roster.counters
    assert counters.zombie_rows == 0 and watch.most == 2
    assert counters.decode_rows == sum(length - 1 for length in lengths)


# --- 6: cancel ---


def test_a_cancelled_request_ends_with_its_tokens_and_frees_everything(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 400, n=3)
    bench.submit("b", prompt_of(9, 1), 30, sampling=SAMPLED)
    bench.ticks(20)
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    for i in range(3):
        assert bench.completions["a", i].finish.reason == "cancelled"
        assert 0 < len(bench.tokens("a", i)) < 30
    assert len(bench.tokens("b")) == 30


@pytest.mark.parametrize("ticks", range(8))
def test_cancelling_at_any_moment_leaks_nothing(model, prompt_of, ticks):
    bench = Bench(model, max_rows=2, prefill_chunk_tokens=8, kv_pages=24)
    bench.submit("a", prompt_of(30), 40, n=4)
    bench.submit("b", prompt_of(30, 1), 10)
    bench.ticks(ticks)
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    assert {bench.completions["a", i].finish.reason for i in range(4)} == {"cancelled"}
    assert len(bench.tokens("b")) == 10


# --- 10: nothing leaks ---


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6))])
def test_random_traffic_through_a_small_pool_leaks_nothing_and_changes_no_token(model, prompt_of, seed):
    """Groups, priorities, cancels, preemptions and stops; every completion equals its run alone."""
    rng = random.Random(seed)
    jobs = {}
    for i in range(12):
        prompt = prompt_of(rng.choice([3, 4, 5, 23, 40]), rng.choice([1, 2, 3]))
        jobs[f"r{i}"] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 50),
            "n": rng.choice([1, 1, 3]),
            "priority": rng.choice([0, 0, 1]),
            "sampling": {"temperature": rng.choice([0.0, 1.0]), "seed": i},
            "stop": {"token_ids": tuple(rng.sample(range(97), 2))},
        }
    crowd = Bench(model, max_rows=4, kv_pages=30, page_size=4, prefill_chunk_tokens=rng.choice([5, 16, 64]))
    cancelled = set()
    for name, job in jobs.items():
        crowd.submit(name, **dict(job))
        crowd.ticks(rng.randint(0, 6))
        if rng.random() < 0.15:
            cancelled.add(name)
            crowd.engine.inbox.put(Cancel(("c", name)))
    watch = run_watched(crowd)
    assert watch.most == 2
    crowd.close()
    alone = Bench(model, max_rows=4, kv_pages=600, prefix_cache=False)
    for name, job in jobs.items():
        alone.complete(name, **dict(job))
        for i in range(job["n"]):
            mine, theirs = crowd.tokens(name, i), alone.tokens(name, i)
            assert mine == (theirs[: len(mine)] if name in cancelled else theirs), name


def test_a_leaked_page_is_seen(model, prompt_of):
    bench = Bench(model)
    bench.complete("a", prompt_of(9), 5)
    bench.engine.roster.allocator.pool.allocate()
    with pytest.raises(AssertionError):
        bench.engine.check_integrity()
    bench.close(check=False)


def test_states_follow_the_life_of_a_sequence(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=4)
    bench.submit("a", prompt_of(10), 5)
    states = []
    bench.engine.tick()
    seq = bench.engine.roster.groups["c", "a"].sequences[0]
    while bench.engine.busy:
        states.append(seq.state)
        bench.engine.tick()
    assert states[0] is SequenceState.PREFILL and states[-1] is SequenceState.DECODE and seq.finalized
