"""Pages: sharing, caching, growth, preemption."""

import gc
import os

import pytest
import torch

from rollout.engine.build import longest_sequence
from rollout.engine.kv.pool import PagePool
from rollout.engine.messages.to_service import Rejected
from rollout.engine.schedule.preemption import change_weights
from rollout.models.batch import KVCache
from tests.support.engine.harness import Bench, watch_plans, watch_prefills

SAMPLED = {"temperature": 1.0, "seed": 5}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_group_prefills_its_prompt_once(model, prompt_of, greedy, length, prefix_cache):
    bench = Bench(model, prefix_cache=prefix_cache)
    sizes = watch_prefills(bench)
    bench.complete("g", prompt_of(length), 20, n=5)
    assert sum(sizes) == length + 4, "the prompt once, and its last token again for each follower"
    expected = greedy(prompt_of(length), 20)
    assert all(bench.tokens("g", i) == expected for i in range(5))


def test_followers_that_wait_for_rows_still_share(model, prompt_of):
    bench = Bench(model, max_rows=2, prefix_cache=False)
    sizes = watch_prefills(bench)
    bench.complete("g", prompt_of(31), 9, n=7, sampling=SAMPLED)
    assert sum(sizes) == 31 + 6


def test_the_tests_see_a_share_without_its_copy(model, prompt_of):
    """Without copy-on-write of the last page the followers read an empty one, and their tokens are wrong."""
    right = Bench(model)
    right.complete("g", prompt_of(31), 20, n=3, sampling=SAMPLED)
    wrong = Bench(model)
    wrong.engine.executor.step._copy_pages = lambda copies: None
    wrong.complete("g", prompt_of(31), 20, n=3, sampling=SAMPLED)
    assert [wrong.tokens("g", i) for i in (1, 2)] != [right.tokens("g", i) for i in (1, 2)]
    right.close(), wrong.close()


def test_a_prompt_seen_before_is_taken_from_the_cache(model, prompt_of, greedy):
    bench = Bench(model)
    prompt = prompt_of(50)
    bench.complete("a", prompt, 8)
    sizes = watch_prefills(bench)
    bench.submit("b", prompt, 8)
    bench.complete("c", prompt[:41] + prompt_of(9, 3), 8)
    assert bench.done["b"].cached_tokens == 49 and bench.done["c"].cached_tokens == 40
    assert sum(sizes) == 1 + 10
    assert bench.tokens("b") == bench.tokens("a") == greedy(prompt, 8)
    assert bench.tokens("c") == greedy(prompt[:41] + prompt_of(9, 3), 8)


def test_generated_tokens_are_cached_too(model, prompt_of, greedy):
    bench = Bench(model)
    prompt = prompt_of(10)
    bench.complete("a", prompt, 30)
    turn = prompt + bench.tokens("a") + prompt_of(5, 9)
    bench.complete("b", turn, 8)
    assert bench.done["b"].cached_tokens == 39, "all but the last token"
    assert bench.tokens("b") == greedy(turn, 8)


def test_the_cache_evicts_the_least_recently_used_page_first(model, prompt_of):
    bench = Bench(model, kv_pages=33)
    for name in ("a", "b"):
        bench.complete(name, prompt_of(40, ord(name)), 4)
    bench.complete("a2", prompt_of(40, ord("a")), 4)  # a is used again: b is the oldest now
    bench.complete("c", prompt_of(40, 7), 30)
    bench.submit("a3", prompt_of(40, ord("a")), 1)
    bench.complete("b3", prompt_of(40, ord("b")), 1)
    assert bench.done["a3"].cached_tokens > bench.done["b3"].cached_tokens > 0, "the end of a prefix goes first"


def test_admission_takes_the_prompt_and_one_page_never_max_tokens(model, prompt_of):
    bench = Bench(model, max_rows=8, kv_pages=41)
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(8, i), 150)
    bench.engine.tick()
    assert bench.engine.roster.running == 8, "eight times max_tokens would need 316 pages"
    assert all(len(seq.kv.pages) == 3 for seq in bench.engine.roster.prefilling + bench.engine.roster.decoding)
    bench.run()


def test_preempted_completions_have_the_tokens_of_an_undisturbed_run(model, prompt_of):
    tight, roomy = Bench(model, kv_pages=40), Bench(model, kv_pages=600)
    for bench in (tight, roomy):
        for i in range(6):
            bench.submit(f"r{i}", prompt_of(10, i), 60, sampling={"temperature": 1.0, "seed": i})
        bench.finish()
    assert tight.engine.roster.counters.preemptions > 0 == roomy.engine.roster.counters.preemptions
    assert sum(done.preemptions for done in tight.done.values()) == tight.engine.roster.counters.preemptions
    for i in range(6):
        assert tight.tokens(f"r{i}") == roomy.tokens(f"r{i}")
        assert tight.completions[f"r{i}", 0].logprobs == pytest.approx(roomy.completions[f"r{i}", 0].logprobs, abs=1e-4)


def test_the_lowest_priority_then_the_youngest_is_preempted_first(model, prompt_of):
    bench = Bench(model, kv_pages=31)
    order = []
    preempt = bench.engine.roster.preempt
    bench.engine.roster.preempt = lambda seq: (order.append(seq.group.key[1]), preempt(seq))
    for name, priority in (("low", -1), ("old", 0), ("young", 0), ("high", 1)):
        bench.submit(name, prompt_of(8, ord(name[0])), 60, priority=priority)
    bench.run()
    assert order[:2] == ["low", "young"] and "high" not in order


def test_a_full_queue_is_overloaded(model, prompt_of):
    bench = Bench(model, max_queue=3)
    for i in range(5):
        bench.submit(f"r{i}", prompt_of(5, i), 4)
    bench.run()
    refusals = [event for event in bench.events if isinstance(event, Rejected)]
    assert [(r.code, r.key[1]) for r in refusals] == [("overloaded", "r3"), ("overloaded", "r4")]


def test_a_long_prompt_never_holds_up_decoding_for_more_than_one_chunk(model, prompt_of):
    bench = Bench(model, max_rows=8, kv_pages=400, prefill_chunk_tokens=16)
    plans = watch_plans(bench)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(6, i), 120)
    bench.ticks(10)
    plans.clear()
    bench.submit("long", prompt_of(800), 4)
    bench.tick_while(lambda: bench.engine.roster.groups.get(("c", "r0")))
    steps = [plan.kind for plan in plans]
    assert steps.count("prefill") == 800 // 16
    assert not any(a == b == "prefill" for a, b in zip(steps, steps[1:], strict=False))
    assert all(plan.tokens <= 16 for plan in plans if plan.kind == "prefill")
    bench.run()


def test_a_shared_prompt_gives_way_before_it_blocks_the_only_candidate(model, prompt_of):
    """The pool has room for one completion: the page that the share keeps for a copy must not keep the follower out."""
    bench = Bench(model, max_rows=2, kv_pages=9, prefix_cache=False)
    bench.submit("g", prompt_of(15), 17, n=3, sampling=SAMPLED)
    bench.run(ticks=2000)
    assert all(len(bench.tokens("g", i)) == 17 for i in range(3))


def test_page_pool_counts_and_evicts():
    pool = PagePool(4)
    pages = [pool.allocate() for _ in range(3)]
    assert 0 not in pages and not pool.allocate()
    pool.remember(b"k", pages[0], 0)
    pool.release(pages[0])
    assert (pool.free, pool.cached, pool.used) == (0, 1, 2) and pool.find(b"k") == pages[0]
    assert pool.allocate() == pages[0] and not pool.find(b"k")
    pool.check()
    with pytest.raises(AssertionError, match="more often"):
        for _ in range(2):
            pool.release(pages[1])


def test_pages_with_mixed_versions_are_not_remembered(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(10), 40)
    bench.ticks(12)
    change_weights(bench.engine.roster, 1, recompute=False)
    bench.run()
    assert bench.engine.roster.allocator.pool.cached == 0
    bench.complete("b", prompt_of(10), 40)
    assert bench.done["b"].cached_tokens == 0 and bench.engine.roster.allocator.pool.cached > 0


def test_the_tests_see_keys_without_the_version(model, prompt_of, monkeypatch):
    begin = classmethod(lambda cls, version, edition=0, rank=0: cls([b"same"]))
    monkeypatch.setattr("rollout.engine.sequence.sequence_kv.PrefixKeys.begin", begin)
    bench = Bench(model)
    allocator = bench.engine.roster.allocator
    allocator.forget_all = lambda: None
    allocator.prefixes.oldest_for = lambda group, version: 0
    bench.complete("a", prompt_of(10), 4)
    change_weights(bench.engine.roster, 1, recompute=False)
    bench.complete("b", prompt_of(10), 4)
    assert bench.done["b"].cached_tokens == 9, "old KV was reused: this is what versions of keys and pages prevent"


@pytest.mark.parametrize(("pages", "longest"), [(9, 32), (600, 1024)])
def test_the_longest_sequence_is_bounded_by_model_and_pool(model, prompt_of, pages, longest):
    bench = Bench(model, kv_pages=pages)
    assert longest_sequence(bench.settings, model, bench.engine) == longest
    bench.complete("fits", prompt_of(longest - 20), 20)
    assert len(bench.tokens("fits")) == 20
    bench.complete("too long", prompt_of(longest - 19), 20)
    (refusal,) = (event for event in bench.events if isinstance(event, Rejected))
    assert (refusal.key[1], refusal.code, refusal.field) == ("too long", "bad_request", "max_tokens")
    assert f"{longest + 1} tokens" in refusal.message and f"at most {longest}" in refusal.message


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_on_a_cpu_takes_memory_as_its_pages_are_used(model, dtype):
    """A worker may have a pool of gigabytes, of which a few completions use little."""
    page = model.spec.kv_bytes_per_token(dtype) * 16
    pages = (256 << 20) // page
    gc.collect()  # other tests' memory, which could go meanwhile
    before = resident_bytes()
    cache = KVCache.allocate(model.spec, pages, 16, dtype, "cpu")
    assert sum(tensor.nbytes for tensor in cache.tensors) == pages * page
    assert resident_bytes() - before < 32 << 20
    assert all(int(tensor.reshape(-1)[-1]) == 0 and tensor.data_ptr() % 64 == 0 for tensor in cache.tensors)
    for tensor in cache.tensors:
        tensor.fill_(1)
    assert resident_bytes() - before > 128 << 20  # all 256 MiB, less what the process has given back meanwhile
