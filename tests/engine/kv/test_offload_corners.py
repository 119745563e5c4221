"""Offload beside other events: a return during a copy, a session that shares pages, a pause during a wait."""

import threading
import time

from rollout.engine.messages.to_engine import Cancel, Pause, Resume
from tests.support.engine.offloading import counts, offloading
from tests.support.engine.streams import LateDevice


def test_a_copy_of_a_page_that_was_written_to_since_is_never_used(model, prompt_of, greedy):
    """A sequence returns while its half full page is being copied, writes to it, and is preempted again."""
    copied, over = threading.Event(), threading.Event()

    def wait(work):
        work()
        copied.set(), over.wait(60)

    bench = offloading(model, 512, 1, LateDevice({}, {"kv_out": wait}), page_size=8, kv_pages=22, prefix_cache=False)
    out = bench.engine.executor.mover.out
    prompts = [prompt_of(10 + 5 * (i == 3), i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60)
    bench.tick_until(lambda: counts(bench).offloaded)
    (seq,) = bench.engine.roster.groups["c", "r3"].sequences
    assert seq.kv.is_offloaded and seq.kv.in_tier.offloaded.length % 8, "its last page is not half full"
    half_full = seq.kv.in_tier.offloaded.pages[-1].pool_page
    for name in ("r0", "r1"):
        bench.engine.inbox.put(Cancel(("c", name)))
    bench.engine.tick()
    copied.wait()
    bench.tick_until(lambda: counts(bench).restored)
    bench.ticks(4)
    for i in range(6):
        bench.submit(f"h{i}", prompt_of(4, i), 30, priority=1)
    bench.tick_while(lambda: counts(bench).offloaded == 1)
    assert seq.kv.is_offloaded and out.under_way[0].entries[1][0].place == half_full, (
        "it was not preempted again during the copy"
    )
    over.set()
    bench.run()
    assert counts(bench).restored == counts(bench).offloaded > 1
    assert bench.tokens("r3") == greedy(prompts[3], 60)


def test_a_row_that_launched_nothing_is_not_offloaded(model, prompt_of, greedy):
    """The page that it would write to is not copied yet from the one that was found."""
    bench = offloading(model, kv_pages=80, prefill_chunk_tokens=8)
    prompt, roster = prompt_of(18, 1), bench.engine.roster
    bench.complete("first", prompt, 1)
    bench.submit("long", prompt_of(60, 2), 4)
    bench.submit("again", prompt, 8)
    bench.tick_while(lambda: len(roster.prefilling) < 2)
    (seq,) = roster.groups["c", "again"].sequences
    assert seq.kv.length == 17 and seq.kv.copy_source and not seq.row_ready
    roster.preempt(seq)
    bench.run()
    assert counts(bench).offloaded == 0 and bench.tokens("again") == greedy(prompt, 8)


def test_pages_shared_by_a_session_and_a_parked_sequence_can_be_freed(model, prompt_of, greedy):
    """Nothing runs, and the first needs nearly the whole pool: the session lets go, then the pages are copied."""
    bench = offloading(model)
    bench.submit("turn", prompt_of(40), 58, session=("c", "talk"), session_lease_s=1e6)
    bench.tick_until(lambda: bench.engine.roster.decoding)
    bench.submit("other", prompt_of(40), 70)
    bench.tick_until(lambda: counts(bench).offloaded)
    (other,) = bench.engine.roster.groups["c", "other"].sequences
    assert other.kv.is_offloaded and not any(page.outgoing for page in other.kv.in_tier.offloaded.pages[:9]), (
        "nothing is shared"
    )
    bench.submit("high", prompt_of(130, 1), 4, priority=1)
    bench.run(5000)
    assert list(bench.done) == ["turn", "high", "other"]
    assert bench.tokens("high") == greedy(prompt_of(130, 1), 4)
    assert bench.tokens("other") == greedy(prompt_of(40), 70)


def test_a_pause_does_not_show_as_waiting_for_pages(model, prompt_of):
    """KV comes back while generation is paused; who waits for the rest of it waits since the pause was over."""
    pieces = threading.Semaphore(0)  # that may come back; a tick waits for one at most
    late = LateDevice({"kv_in": lambda: (pieces.acquire(), 0.0)[1]})
    bench = offloading(model, device=late, piece_pages=1, prefix_cache=False)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.tick_while(lambda: counts(bench).pages_out < 8)
    for i in range(3):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    mover, books = bench.engine.executor.mover, bench.engine.parts.tier.offload
    while not counts(bench).pages_in:
        if mover.back.under_way or books.to_copy_in:
            pieces.release()
        bench.engine.tick()
    told, tell = [], bench.engine.meter.offload
    bench.engine.meter.offload = lambda start_s, end_s: (told.append(start_s), tell(start_s, end_s))
    bench.engine.inbox.put(Pause("keep", 1))
    for _ in range(2):
        pieces.release()
        bench.engine.tick()
    assert not told
    over_s = time.perf_counter()
    bench.engine.inbox.put(Resume(2))
    pieces.release(100)
    bench.run()
    assert told and min(told) >= over_s and len(set(told)) == 1
