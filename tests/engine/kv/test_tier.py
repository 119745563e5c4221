"""Known KV goes to the host before the pool needs its room, and is fetched: the same tokens, little computed twice."""

import random
import threading

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.inspect import Inspector
from rollout.engine.kv.pool import PagePool, PrefixEnds
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.tier import TierPrefix
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.known import KnownBooks
from rollout.engine.kv.tiers.moves import CopyCosts
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.sequence.sequence import SequenceState
from tests.support.engine.agents import Agents
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load, watch_prefills
from tests.support.engine.offloading import PAGE, copies_pay, offloading
from tests.support.engine.routing import assert_routed, routing_of
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import BROKEN_BUS, BrokenBus, InlineDevice, LateDevice
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint

SMALL = 110  # pages: a third of what the agents hold


def tier_of(bench: Bench) -> KnownBooks:
    return copies_pay(bench)


def pushed_out(bench: Bench, prompt_of, *prompts: list[int]) -> None:
    """Compute prompts, and others until the pool has no page of them any more; the host keeps them."""
    pool = bench.engine.roster.allocator.pool
    others = [prompt_of(60, 5000 + i) for i in range(-(-pool.total // 15))]
    for prompt in [*prompts, *others]:
        bench.complete(f"before{len(bench.done)}", prompt, 1)


# --- agents that come back ---


@pytest.fixture(scope="module")
def undisturbed(folders) -> dict[int, Agents]:
    """By seed, agents that never ran short of pages."""
    made: dict[int, Agents] = {}

    def agents(seed: int) -> Agents:
        if seed not in made:
            bench = Bench(load(folders[0]), kv_pages=1000)
            made[seed] = Agents(bench, seed=seed)
            made[seed].run()
            bench.close()
        return made[seed]

    return agents


def assert_equal(mine: Agents, theirs: Agents) -> None:
    assert mine.said == theirs.said
    for some, others in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert some == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("sessions", [False, True])
def test_agents_compute_their_prompts_once(model, undisturbed, sessions):
    bench = offloading(model, 600, 8, InlineDevice(), kv_pages=SMALL)
    tier = tier_of(bench)
    agents = Agents(bench, sessions=sessions)
    agents.run()
    assert agents.computed <= 1.05 * agents.to_compute  # a page that a row takes before its copy has ended is lost
    assert tier.host.counts.fetched > 0
    bench.close()
    assert_equal(agents, undisturbed(0))


@pytest.mark.parametrize("seed", [0, 1])
def test_pool_and_host_together_hold_what_agents_said(model, undisturbed, seed):
    """With copies of all that the pool has, they compute 1.36 and 1.42 times as much, in place of 1.18."""
    bench = offloading(model, 180, 8, InlineDevice(), kv_pages=SMALL)
    tier = tier_of(bench)
    agents = Agents(bench, seed=seed)
    agents.run()
    assert sum(len(said) // PAGE for said in agents.said) > 180 + SMALL / 2
    assert agents.computed <= 1.25 * agents.to_compute
    assert tier.host.counts.written <= 3 * tier.host.total
    bench.close()
    assert_equal(agents, undisturbed(seed))


def test_without_host_memory_they_compute_them_again_and_again(model, undisturbed):
    bench = Bench(model, kv_pages=SMALL)
    agents = Agents(bench)
    agents.run()
    assert agents.computed > 2 * agents.distinct
    bench.close()
    assert_equal(agents, undisturbed(0))


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 12))])
def test_late_copies_change_nothing(model, undisturbed, seed):
    rng, rng_late = random.Random(seed), random.Random(seed)
    most_s = rng.choice([0.0, 0.001, 0.004])
    late = {name: lambda: rng_late.random() * most_s for name in ("compute", "d2h", "kv_out", "kv_in")}
    bench = offloading(
        model,
        rng.choice([20, 80, 600]),
        rng.choice([1, 3, 20]),
        LateDevice(late),
        kv_pages=rng.choice([70, SMALL]),
        max_rows=rng.choice([2, 8]),
        pipeline_depth=1 + seed % 2,
        prefill_chunk_tokens=rng.choice([7, 64]),
    )
    tier_of(bench)
    agents = Agents(bench, sessions=rng.random() < 0.5, seed=seed % 3)
    agents.run()
    bench.close()
    assert_equal(agents, undisturbed(seed % 3))


# --- one fetch ---


def test_a_sequence_waits_for_its_fetch_without_a_row_and_computes_only_the_rest(model, prompt_of, greedy):
    gate = threading.Semaphore(0)
    bench = offloading(model, 200, 3, LateDevice({"kv_in": lambda: (gate.acquire(), 0.0)[1]}))
    tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.submit("runs", prompt_of(5, 2), 30)
    bench.engine.tick()
    prefills = watch_prefills(bench)
    bench.submit("back", prompt, 8)
    bench.ticks(20)
    (seq,) = bench.engine.roster.groups["c", "back"].sequences
    assert seq.state is SequenceState.WAITING and not seq.kv.pages and len(bench.engine.roster.decoding) == 1
    assert len(bench.engine.roster.groups["c", "runs"].sequences[0].tokens) > 10, "the row that runs does not wait"
    gate.release(100)
    bench.run()
    assert sum(prefills) == 1 and bench.done["back"].cached_tokens == 49
    assert bench.tokens("back") == greedy(prompt, 8)
    assert tier_of(bench).host.counts.fetched == 13


def test_sequences_that_want_the_same_pages_wait_for_one_fetch(model, prompt_of, greedy):
    bench = offloading(model, 200, 3, LateDevice({"kv_in": lambda: 0.01}))
    tier_of(bench)
    prompts = [prompt_of(40, 1) + prompt_of(3 + i, 10 + i) for i in range(3)]
    pushed_out(bench, prompt_of, prompts[0])
    for i, prompt in enumerate(prompts):
        bench.submit(f"back{i}", prompt, 5, n=1 + i)
    bench.run()
    assert tier_of(bench).host.counts.fetched == 11, "the first one finds the end of its prompt"
    for i, prompt in enumerate(prompts):
        assert bench.done[f"back{i}"].cached_tokens >= 40 and bench.tokens(f"back{i}", i) == greedy(prompt, 5)


def test_pieces_of_several_fetches_take_turns(model, prompt_of):
    bench = offloading(model, 200, 1, LateDevice({"kv_in": lambda: 0.02}))
    tier = tier_of(bench)
    long, short = prompt_of(80, 1), prompt_of(16, 2)
    pushed_out(bench, prompt_of, long, short)
    bench.submit("long", long, 1)
    bench.complete("short", short, 1)
    assert list(bench.done)[-2:] == ["short", "long"] and tier.host.counts.fetched >= 19 + 3


@pytest.mark.parametrize("when", ["queued", "over"])
def test_a_request_that_ends_while_it_waits_leaves_nothing(model, prompt_of, when):
    bench = offloading(model, 200, 1, LateDevice({"kv_in": lambda: 0.005}))
    tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.submit("back", prompt, 8)
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "back")))
    if when == "over":
        bench.run()
    bench.complete("again", prompt, 2)
    assert bench.done["again"].cached_tokens == 49


def test_pages_can_be_fetched_without_a_sequence(model, prompt_of):
    """A hint: who knows that a conversation goes on has its pages brought back before the request."""
    bench = offloading(model, 200)
    tier_of(bench)
    prompt = prompt_of(50, 1)
    bench.submit("first", prompt, 1)
    bench.tick_until(lambda: bench.engine.roster.decoding)
    (seq,) = bench.engine.roster.groups["c", "first"].sequences
    keys = list(seq.kv.keys)[:12]
    bench.run()
    pushed_out(bench, prompt_of)
    allocator = bench.engine.roster.allocator
    assert not any(allocator.pool.find(key) for key in keys)
    tier, prefix = bench.engine.parts.tier, TierPrefix([], keys)
    assert tier.fetch(allocator, prefix, 0, spare=30) is None, "there is no room for that"
    assert tier.fetch(allocator, prefix, 0, spare=0) is not None
    bench.run()
    assert all(allocator.pool.find(key) for key in keys)
    bench.complete("back", prompt, 2)
    assert bench.done["back"].cached_tokens == 49 and allocator.tier.known.host.counts.fetched == 13


# --- faults, updates, sleep ---


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("piece", [0, 5])
def test_a_copy_that_fails_ends_in_computing_again(model, undisturbed, direction, piece):
    bench = offloading(model, 600, 3, BrokenBus(f"kv_{direction}", piece), kv_pages=SMALL)
    tier = tier_of(bench)
    agents = Agents(bench)
    agents.run()
    assert BROKEN_BUS in bench.engine.parts.tier.failure and tier.host.kept == 0
    bench.close()
    assert_equal(agents, undisturbed(0))


@pytest.mark.parametrize("when", ["kept", "fetching"])
def test_new_weights_forget_what_is_kept(model, folders, prompt_of, hf_models, when):
    bench = offloading(model, 200, 1, LateDevice({"kv_in": lambda: 0.005}), Mailbox())
    tier = tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    assert tier.host.kept > 12
    if when == "fetching":
        bench.submit("back", prompt, 8)
        bench.tick_until(lambda: bench.engine.executor.mover.back.under_way)
    bench.links.receiver.ready = Update(1, load(folders[1]), bench.engine.executor.step.model)
    bench.tick_while(lambda: bench.engine.roster.version == 0)
    assert tier.host.kept == 0
    if when == "kept":
        bench.submit("back", prompt, 8)
    bench.run()
    assert bench.done["back"].cached_tokens == 0 and bench.completions["back", 0].versions == [1] * 8
    alone = Bench(load(folders[1]))
    alone.complete("back", prompt, 8)
    assert bench.tokens("back") == alone.tokens("back")
    alone.close(), bench.close()


def test_preempted_rows_take_the_room_of_kept_pages(model, prompt_of, greedy):
    bench = offloading(model, 60)
    tier_of(bench)
    pushed_out(bench, prompt_of, *(prompt_of(40, i) for i in range(6)))
    assert tier_of(bench).host.kept > 50
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    counts = bench.engine.parts.tier.offload.counts
    assert counts.refused == 0 and counts.restored == counts.offloaded > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)


def test_a_sequence_may_fetch_its_prompt_after_each_row_that_it_loses(model, prompt_of, greedy):
    """The limit of its fetches is one between two rows."""
    bench = offloading(model, 200)
    tier, roster = tier_of(bench), bench.engine.roster
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.submit("back", prompt, 30)
    for _ in range(5):
        fetched = tier.host.counts.fetched
        bench.tick_until(lambda: roster.decoding)
        assert tier.host.counts.fetched >= fetched + 12
        roster.take_off(roster.decoding[0])
        bench.tick_while(lambda: roster.ending)
        roster.allocator.empty_pool()
    bench.run()
    assert bench.tokens("back") == greedy(prompt, 30)


def test_a_prompt_that_loses_its_fetched_pages_again_and_again_before_it_gets_a_row_is_computed(
    model, prompt_of, greedy
):
    may_copy = threading.Event()
    device = LateDevice({"kv_in": lambda: (may_copy.wait(), 0.0)[1]})
    bench = offloading(model, 200, 20, device, max_rows=1)
    tier, roster, prompt = tier_of(bench), bench.engine.roster, prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.submit("back", prompt, 8)
    fetches = 0
    for i in range(10):
        bench.engine.tick()
        if roster.groups["c", "back"].sequences[0].state is not SequenceState.WAITING:
            break
        fetches += 1
        assert tier.fetches.busy
        bench.submit(f"row {i}", prompt_of(5, 10 + i), 30)  # takes the row while the fetch is under way
        bench.tick_until(lambda: roster.decoding)
        may_copy.set()
        bench.tick_while(lambda: tier.fetches.busy)
        may_copy.clear()
        roster.allocator.empty_pool()
        bench.engine.inbox.put(Cancel(("c", f"row {i}")))
        bench.tick_while(lambda: roster.decoding or roster.ending)
    may_copy.set()
    bench.run()
    assert fetches == 3 and tier.host.counts.fetched == 3 * 13
    assert bench.done["back"].cached_tokens == 0 and bench.tokens("back") == greedy(prompt, 8)


@pytest.mark.parametrize("level", [1, 2])
def test_what_the_host_keeps_outlives_a_sleep_that_keeps_the_weights(model, folders, prompt_of, level):
    page_bytes = 1536
    bench = Sleeping(model, None, Mailbox(), kv_pages=40, host_kv_gib=200 * page_bytes / 2**30)
    tier = tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    kept = tier.host.kept
    bench.sleep(level=level)
    assert tier.host.kept >= kept if level == 1 else tier.host.kept == 0
    bench.wake()
    if level == 2:
        bench.links.receiver.ready = Update(1, load(folders[0]), bench.engine.executor.step.model)
    bench.complete("back", prompt, 2)
    assert bench.done["back"].cached_tokens == (49 if level == 1 else 0)


def test_a_rebuilt_engine_keeps_nothing_and_has_the_same_memory(model, prompt_of, greedy):
    bench = offloading(model, 200)
    tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.submit("runs", prompt_of(5, 2), 30)
    bench.engine.tick()
    fail_a_step(bench)
    memory, written = bench.engine.executor.mover.host_memory, tier_of(bench).host.counts.written
    rebuild_engine(bench.engine, bench.settings)
    tier = tier_of(bench)
    assert bench.engine.executor.mover.host_memory is memory
    assert tier.host.kept == 0 and tier.host.counts.written == written > 0
    pushed_out(bench, prompt_of, prompt)
    bench.complete("back", prompt, 8)
    assert bench.done["back"].cached_tokens == 49 and bench.tokens("back") == greedy(prompt, 8)


# --- what goes along, and whether it is worth it ---


def test_fetched_pages_have_the_experts_of_their_tokens(tmp_path, prompt_of):
    hf_model = make_checkpoint("qwen3_moe", tmp_path, 0)
    bench = Bench(load(tmp_path), kv_pages=40, routing=True, host_kv_gib=0.01)
    tier_of(bench)
    prompt = [token % 71 for token in prompt_of(50, 1)]
    bench.complete("first0", prompt, 1)
    for i in range(4):
        bench.complete(f"other{i}", [token % 71 for token in prompt_of(60, 9 + i)], 1)
    bench.complete("back", prompt, 8, routing_from=0)
    assert bench.done["back"].cached_tokens == 49 and tier_of(bench).host.counts.fetched == 13
    assert_routed(hf_model, prompt, bench.tokens("back"), routing_of(bench, "back"), 0)


def test_copies_that_take_longer_than_computing_are_not_made(model, prompt_of):
    bench = offloading(model, 200)
    tier = bench.engine.parts.tier.known
    tier.costs.copied(1, 10.0)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.complete("back", prompt, 2)
    assert not tier.costs.pays and tier.host.counts.written == 0 and bench.done["back"].cached_tokens == 0


def test_costs_compare_the_quickest_of_the_last_copies_with_prompt_steps():
    costs = CopyCosts(page_size=16)
    assert costs.pays, "nothing is measured"
    costs.copied(2, 20.0)
    assert costs.pays
    costs.computed(1600, 100.0)  # a second a page
    assert not costs.pays
    costs.copied(4, 2.0)
    assert costs.pays
    for _ in range(8):
        costs.copied(1, 9.0)
    assert not costs.pays
    for _ in range(50):
        costs.computed(16, 4.0)
    assert costs.pays


def test_what_an_update_makes_too_old_leaves_the_host():
    host = HostPageBooks(2)
    for key, oldest in ((b"old", 1), (b"new", 3)):
        host.end_write(host.begin_write(), key, oldest)
    host.forget_older(2)
    assert (host.has(b"old"), host.has(b"new"), host.free) == (False, True, 1)
    host.check()


def test_a_copy_may_take_longer_than_computing_because_it_runs_beside_steps():
    costs = CopyCosts(page_size=16)
    costs.computed(16, 1.0)
    costs.copied(1, 7.0)
    assert costs.pays
    for _ in range(8):
        costs.copied(1, 9.0)
    assert not costs.pays


def test_status_and_metrics_tell_what_is_kept(model, prompt_of):
    bench = offloading(model, 200)
    tier_of(bench)
    prompt = prompt_of(50, 1)
    pushed_out(bench, prompt_of, prompt)
    bench.complete("back", prompt, 2)
    status, offload = bench.status().kept, bench.status().offload
    page_bytes = bench.engine.executor.mover.host_memory.page_bytes
    assert (status.fetched_tokens, status.bytes_in) == (52, 13 * page_bytes)
    assert status.bytes_out >= status.pages * page_bytes > 0 and status.lost_pages >= 0
    assert (offload.pages, offload.bytes_out) == (0, 0), "that is of preempted sequences alone"
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert (report["kv/kept_bytes"], report["kv/fetched_tokens"]) == (status.bytes_out, 52)
    assert report["kv/host_kept_pct"] == 100 * status.pages / 200 and report["kv/lost_pages"] == status.lost_pages


# --- the books ---


def books(pages: int = 9, host_pages: int = 4) -> tuple[PagePool, HostPageBooks, KnownBooks]:
    host = HostPageBooks(host_pages)
    pool = PagePool(pages, host.note_evicted)
    snapshots = Snapshots(0, 0, pool)
    return pool, host, KnownBooks(Sessions(pool, PAGE, 8, snapshots), host, HostPageBooks(0), closed=False)


def cached(pool: PagePool, *keys: bytes) -> list[int]:
    pages = []
    for key in keys:
        page = pool.allocate()
        assert page
        pool.remember(key, page, 0)
        pages.append(page)
    for page in pages:
        pool.release(page)
    return pages


def test_the_oldest_cached_pages_are_copied_when_the_pool_gets_short():
    pool, host, tier = books()
    cached(pool, b"a", b"b", b"c", b"d")
    assert tier.next_pages(3) == [] and not tier.busy, "half of the pool is free"
    cached(pool, b"e", b"f")
    out = tier.next_pages(8)
    assert [page.key for page in out] == [b"a", b"b"], "as many as are missing"
    tier.pages_ended(out, failed=False)
    assert host.has(b"a") and not tier.busy
    pool.check(), tier.check()


def test_no_sequence_gets_a_page_before_its_copy_while_the_pool_is_short():
    pool, host, tier = books()
    cached(pool, *(bytes([i]) for i in range(6)))
    assert pool.available - tier.writing == 2, "the free ones"
    out = tier.next_pages(1)
    assert pool.available - tier.writing == 2
    tier.pages_ended(out, failed=False)
    assert pool.available - tier.writing == 3
    out = tier.next_pages(8)
    assert len(out) == 1 and not tier.next_pages(8), "half of the pool can be evicted without loss, or is being copied"
    tier.pages_ended(out, failed=False)
    assert pool.available - tier.writing == 4 and not tier.busy
    tier.wanted = 6
    out = tier.next_pages(8)
    assert len(out) == 2, "an admission waits for six pages"
    tier.pages_ended(out, failed=False)
    assert pool.available - tier.writing == 6 and not tier.busy
    tier.wanted = 0
    cached(pool, b"new", b"newer", b"newest")
    assert tier.writing == 5 and [pool.find(bytes([key])) > 0 for key in range(3)] == [False, True, True]
    tier.close()
    assert tier.writing == 0, "nothing will be copied"


def test_a_turn_that_fills_the_pool_gets_a_row_though_its_last_page_cannot_be_copied(model, prompt_of):
    bench = offloading(model, kv_pages=25)
    copies_pay(bench)
    bench.complete("first", prompt_of(80), 14)
    pool = bench.engine.roster.allocator.pool
    assert (pool.cached, pool.total) == (24, 24)
    bench.submit("second", [*prompt_of(80), *bench.tokens("first"), 7], 1)
    bench.run(ticks=30_000)
    assert bench.engine.roster.counters.prefilled_tokens <= 80 + 3, "the full pages are shared"
    bench.close()


def test_pages_that_an_attempt_retained_are_still_seen_and_those_a_sequence_had_are_not():
    pool, host, tier = books()
    pages = cached(pool, b"a", b"b")
    for _ in pages:
        pool.look()
    for page in pages:
        pool.retain(page), pool.retain(page)
        pool.release(page, unchanged=page == pages[0])
        pool.release(page, unchanged=True)
    assert pool.unseen == 1 and pool.look() == (b"b", pages[1])
    pool.check(), tier.check()


def test_pages_are_copied_for_a_sequence_until_it_leaves_the_queue(model, prompt_of):
    bench = offloading(model)
    tier = bench.engine.parts.tier.known
    bench.submit("runs", prompt_of(60, 1), 80)
    bench.ticks(4)
    bench.submit("waits", prompt_of(120, 2), 20)
    bench.ticks(2)
    assert tier.wanted == 32, "31 pages, and one for the row that runs"
    bench.engine.inbox.put(Cancel(("c", "waits")))
    bench.ticks(2)
    assert tier.wanted == 0
    bench.finish()


def test_a_page_that_is_evicted_during_its_copy_is_not_kept():
    pool, host, tier = books()
    pages = cached(pool, *(bytes([i]) for i in range(8)))
    out = tier.next_pages(8)
    assert [page.place for page in out] == pages[:4]
    taken = [pool.allocate() for _ in range(6)]
    assert taken == [*pages[4:], *pages[:2]], "pages that are being copied go last"
    assert host.counts.lost == 6
    tier.pages_ended(out, failed=False)
    assert [host.has(key) for key in (b"\0", b"\1", b"\2", b"\3")] == [False, False, True, True]
    assert pool.allocate() == pages[2] and host.counts.lost == 6, "the host has it"


def test_a_fetch_ends_without_a_page_that_is_neither_on_the_host_nor_on_disk():
    pool, host, tier = books()
    host.end_write(host.begin_write(), b"here")
    here, gone = pool.allocate(), pool.allocate()
    fetch = tier.fetches.begin([here, gone], [(b"here", here), (b"gone", gone)])
    tier.use_disk()
    assert tier.fetches.of(b"here") is fetch and tier.fetches.of(b"gone") is None
    tier.page_moves.in_ended(tier.page_moves.next_in(8), False)
    assert tier.fetches.take_ended() == [fetch] and pool.find(b"here") == here and not pool.find(b"gone")
    pool.check(), tier.check()


def test_newer_kv_takes_the_place_of_older_kv_with_the_same_key():
    host = HostPageBooks(3)
    for oldest in (4, 7, 5):
        host.end_write(host.begin_write(), b"a", oldest)
        assert host.kept == 1
    assert host.has(b"a", 7) and not host.use(b"a", 8) and host.room == 3
    kept = host.begin_read(b"a")
    host.end_write(host.begin_write(), b"a", 9)
    assert kept.oldest == 7 and host.kept == 1 and host.free == 1, "a copy reads the older one"
    host.end_read(b"a", kept.page)
    assert host.has(b"a", 9) and host.free == 2
    host.check()


def test_a_kept_page_is_not_copied_again_and_the_least_recently_used_gives_way():
    pool, host, tier = books(host_pages=2)
    cached(pool, *(bytes([i]) for i in range(8)))
    tier.pages_ended(tier.next_pages(8), failed=False)
    assert host.kept == 2 and host.has(b"\0") and host.has(b"\1")
    again = [pool.find(b"\0"), pool.find(b"\1")]
    for page in again:
        pool.retain(page)
    for page in again:
        pool.release(page)
    assert [page.key for page in tier.next_pages(1)] == [b"\2"]
    assert not host.has(b"\0") and host.has(b"\1")
    assert host.room == 1 and host.take() is not None
    assert host.room == 0


def test_copies_of_pages_that_a_sequence_has_got_give_way_first():
    host = HostPageBooks(4)
    for key in (b"old", b"first", b"second", b"leased"):
        host.end_write(host.begin_write(), key)
    host.lease([b"leased"], 9.0)
    assert host.spare == 0
    host.in_pool([b"first", b"second", b"third", b"leased"])
    assert host.spare == 2, "a lease counts"
    host.end_write(host.begin_write(), b"new")
    assert not host.has(b"second") and host.has(b"old") and host.spare == 1
    assert host.use(b"first") and host.spare == 0, "the pool looks at it: it may evict it"
    host.end_write(host.begin_write(), b"newer")
    assert not host.has(b"old") and host.has(b"first")
    host.in_pool([b"new", b"newer"])
    host.note_evicted(b"new")
    assert host.spare == 1 and host.counts.lost == 0, "that copy is the only one now"
    host.pool_emptied()
    assert host.spare == 0
    host.note_evicted(b"second")
    assert host.counts.lost == 1
    host.check()


def test_the_ends_of_prefixes_are_found_longest_first_and_the_oldest_are_lost():
    ends = PrefixEnds(2)
    for digest, after in ((b"a", 3), (b"b", 1), (b"a", 7), (b"a", 3)):
        ends.note(digest, after)
    assert ends.after(b"a") == [7, 3] and ends.after(b"b") == [1] and ends.after(b"c") == []
    assert ends.after(b"a")
    ends.note(b"c", 2)
    assert ends.after(b"b") == [] and ends.after(b"a") == [7, 3] and ends.after(b"c") == [2]
