"""Rows that sleep with their KV on the host: nothing is computed again, and no copy holds a sleep up for ever."""

import threading
import time

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_engine import Cancel, Sleep
from rollout.engine.messages.to_service import Done, Failed
from tests.support.engine.harness import load
from tests.support.engine.replay import replayed
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import BROKEN_BUS, BrokenBus, LateDevice
from tests.support.engine.updates import Mailbox, Update

PAGE = 1536  # bytes of a page of the checkpoint, in float32
PENALIZED = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3}


def keeping(model, device=None, receiver=None, host_pages: int = 500, **engine) -> Sleeping:
    return Sleeping(model, device, receiver, **{"host_kv_gib": host_pages * PAGE / 2**30, **engine})


def host(bench: Sleeping):
    return bench.status().offload


def four(bench: Sleeping, prompt_of, **fields) -> None:
    """Rows that decode, with eight pages or so each."""
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(12, i), 40, **fields)
    bench.ticks(22)
    assert len(bench.engine.roster.decoding) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_completions_are_bit_for_bit_those_of_a_run_that_never_slept(folders, prompt_of, depth):
    runs = []
    for sleeps in (False, True):
        bench = keeping(load(folders[0]), pipeline_depth=depth)
        bench.submit("greedy", prompt_of(13), 60, logprobs=2)
        bench.submit("penalized", prompt_of(6, 2), 40, sampling=PENALIZED)
        bench.submit("group", prompt_of(21, 1), 50, sampling={"temperature": 1.0, "seed": 3}, n=3)
        for ticks in (12, 5, 22):
            bench.ticks(ticks)
            if sleeps:
                rows = bench.engine.roster.running
                assert rows >= 4 and bench.sleep().facts["parked"] == rows
                assert bench.engine.roster.allocator.pool.used == 0 and not bench.pages.backed
                assert bench.wake().facts["parked"] == rows
        bench.run()
        assert not sleeps or (host(bench).restored == host(bench).parked >= 13 and host(bench).pages == 0)
        runs.append(
            {
                at: (done.token_ids, done.logprobs, done.raw_logprobs, done.top_logprobs, done.recomputed)
                for at, done in bench.completions.items()
            }
        )
        bench.close()
    assert runs[0] == runs[1] and all(run[4] == () for run in runs[1].values())


def test_kv_without_room_on_the_host_is_recomputed_lowest_rank_first(model, prompt_of, greedy):
    """Shared pages are kept for the sequences that find room."""
    bench = keeping(model, host_pages=16)
    bench.submit("group", prompt_of(12), 40, n=4)
    bench.ticks(22)
    assert len(bench.engine.roster.decoding) == 4
    assert bench.sleep().facts["parked"] == 2 and host(bench).refused == 2
    bench.wake()
    bench.run()
    assert [bool(bench.completions["group", i].recomputed) for i in range(4)] == [False, False, True, True]
    assert all(bench.tokens("group", i) == greedy(prompt_of(12), 40) for i in range(4))


def test_an_interrupted_prompt_and_its_logprobs_go_on_where_they_were(model, prompt_of):
    runs = []
    for sleeps in (False, True):
        bench = keeping(model, prefill_chunk_tokens=16)
        bench.submit("a", prompt_of(60), 12, prompt_logprobs=True)
        bench.ticks(3)
        if sleeps:
            assert bench.sleep().facts["parked"] == 1
            bench.wake()
        bench.run()
        assert bench.engine.roster.counters.prompt_tokens == 60 and host(bench).restored == sleeps
        done = bench.completions["a", 0]
        runs.append((done.token_ids, done.prompt_logprobs[1:].tolist()))
        bench.close()
    assert runs[0][0] == runs[1][0] and runs[0][1] == pytest.approx(runs[1][1], abs=1e-4)


def test_a_sequence_that_ends_asleep_frees_its_host_memory(model, prompt_of, greedy):
    """A group whose members share a prompt, a turn of a session, one with a deadline; one of all goes on."""
    now_s = time.perf_counter()
    bench = keeping(model, clock=lambda: now_s)
    bench.submit("group", prompt_of(30), 40, n=3)
    bench.submit("turn", prompt_of(20, 1), 40, session=("c", "talk"), session_lease_s=1e6)
    bench.submit("due", prompt_of(20, 2), 40, deadline_s=5.0)
    bench.submit("stays", prompt_of(9), 40)
    bench.ticks(16)
    assert bench.sleep().facts["parked"] == 6
    pages = host(bench).pages
    assert pages < sum(-(-seq.kv.in_tier.offloaded.length // 4) for group in bench.engine.roster.groups.values()
                       for seq in group.sequences), "what is shared is copied once"  # fmt: skip
    for end in ("group", "turn", "due"):
        if end == "due":
            now_s += 6
        else:
            bench.engine.inbox.put(Cancel(("c", end)))
        bench.ticks(1)
        assert host(bench).pages < pages and bench.completions[end, 0].finish is not None
        pages = host(bench).pages
    assert host(bench).sequences == 1 and not bench.engine.busy
    bench.wake()
    bench.run()
    assert bench.tokens("stays") == greedy(prompt_of(9), 40) and not bench.completions["stays", 0].recomputed
    assert host(bench).pages == 0 and host(bench).restored == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_rows_that_share_a_prompt_share_it_again_in_any_order_of_return(model, prompt_of, greedy, prefix_cache):
    """Rows of a group come back together, except two that wait for a free row."""
    bench = keeping(model, LateDevice({"kv_in": lambda: 0.001}), prefix_cache=prefix_cache, max_rows=6)
    bench.submit("group", prompt_of(40), 40, n=6)
    bench.ticks(9)
    pool = bench.engine.roster.allocator.pool
    shared = pool.used
    assert shared < 10 + 6 * 5 and bench.sleep().facts["parked"] == 6 and host(bench).pages <= shared
    for i in range(2):
        bench.submit(f"first{i}", prompt_of(5, i), 12, priority=1)
    bench.wake()
    bench.tick_while(lambda: host(bench).restored < 6)
    assert host(bench).bytes_in <= host(bench).bytes_out and pool.used <= shared + 6 * 4
    bench.run()
    assert all(bench.tokens("group", i) == greedy(prompt_of(40), 40) for i in range(6))


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_an_update_after_the_wake_finds_kv_that_it_may_keep_or_not(model, folders, hf_models, prompt_of, kv_on_swap):
    mailbox = Mailbox()
    bench = keeping(model, None, mailbox, kv_on_swap=kv_on_swap)
    four(bench, prompt_of)
    bench.sleep()
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.ticks(3)
    assert mailbox.ready is not None and host(bench).sequences == 4
    bench.wake()
    bench.run()
    for i in range(4):
        done = bench.completions[f"r{i}", 0]
        assert set(done.versions) == {0, 1} and bool(done.recomputed) == (kv_on_swap == "recompute")
        assert replayed(hf_models, prompt_of(12, i), done) == done.token_ids


def test_a_sleep_of_level_2_keeps_no_kv_and_one_that_becomes_it_gives_it_up(model, folders, prompt_of, greedy):
    mailbox = Mailbox()
    bench = keeping(model, None, mailbox)
    four(bench, prompt_of)
    for levels in ((1, 2), (2,)):
        kept = [bench.sleep(level).facts["parked"] for level in levels]
        assert kept == [4, 0][-len(levels) :] and host(bench).pages == 0
        bench.wake()
        mailbox.ready = Update(0, load(folders[0]), model)
        bench.ticks(4)
    bench.run()
    assert all(bench.completions[f"r{i}", 0].recomputed for i in range(4))
    assert all(bench.tokens(f"r{i}") == greedy(prompt_of(12, i), 40) for i in range(4))


# --- what goes wrong half-way ----------------------------------------------------------------------------------------


class Stuck:
    """A device whose copies to the host do not end before `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.device = LateDevice({"kv_out": lambda: (self.free.wait(60), 0.0)[1]})


def test_a_sleep_whose_copies_hang_is_refused_and_all_goes_on(model, folders, prompt_of, greedy):
    stuck, mailbox, now_s = Stuck(), Mailbox(), [time.perf_counter()]
    bench = keeping(model, stuck.device, mailbox, sleep_kv_s=1.0, clock=lambda: now_s[0])
    four(bench, prompt_of)
    token, out = bench.order(Sleep, 1), bench.engine.parts.tier.mover.out
    bench.tick_until(lambda: out.under_way)
    bench.ticks(2)
    now_s[0] += 0.9
    bench.ticks(2)
    assert bench.answer(token) is None and bench.engine.busy
    now_s[0] += 0.2
    bench.ticks(2)
    assert not out.under_way[0].end.query(), "the loop has waited for it"
    answer = bench.answer(token)
    assert isinstance(answer, Failed) and answer.code == "unavailable"
    assert bench.status().state == "serving" and bench.engine.gate.admit_update()
    bench.engine.gate.updates_done()
    bench.ticks(6)
    assert len(bench.engine.roster.decoding) == 4, "they took back what had not left"
    stuck.free.set()
    assert bench.sleep(2).facts["parked"] == 0
    bench.wake()
    assert not any(parameter.any() for parameter in model.parameters()), "what the first one saved is forgotten"
    mailbox.ready = Update(0, load(folders[0]), model)
    bench.run()
    assert all(bench.tokens(f"r{i}") == greedy(prompt_of(12, i), 40) for i in range(4))


def test_a_fault_while_kv_leaves_ends_the_sleep_and_leaves_a_whole_engine(model, prompt_of, greedy):
    stuck = Stuck()
    bench = keeping(model, stuck.device)
    four(bench, prompt_of)
    token = bench.order(Sleep, 1)
    bench.tick_until(lambda: bench.engine.parts.tier.mover.out.under_way)
    bench.engine.fail("broken")
    assert bench.answer(token).code == "internal" and not bench.engine.gate.sleep.ordered
    stuck.free.set()
    rebuild_engine(bench.engine, bench.settings)
    bench.submit("b", prompt_of(9), 20)
    bench.ticks(8)
    assert bench.sleep().facts["parked"] == 1 and isinstance(bench.wake(), Done)
    bench.run()
    assert bench.tokens("b") == greedy(prompt_of(9), 20) and not bench.completions["b", 0].recomputed


@pytest.mark.parametrize("direction", ["out", "in"])
def test_copies_that_fail_end_in_computing_again(model, prompt_of, greedy, direction):
    bench = keeping(model, BrokenBus(f"kv_{direction}"))
    four(bench, prompt_of)
    assert bench.sleep().facts["parked"] == (0 if direction == "out" else 4)
    assert isinstance(bench.wake(), Done)
    bench.run()
    assert BROKEN_BUS in bench.engine.parts.tier.failure and host(bench).restored == 0
    assert all(bench.completions[f"r{i}", 0].recomputed for i in range(4))
    assert all(bench.tokens(f"r{i}") == greedy(prompt_of(12, i), 40) for i in range(4))
