"""Prompts in flight are shared: each distinct token is computed once, whatever the order of arrival."""

import random
from itertools import product

import pytest

from rollout.engine.messages.to_engine import Cancel
from tests.support.engine.harness import VOCAB, Bench, load, watch_prefills
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import checkered, nightly

SAMPLED = {"temperature": 1.0}


def together(bench: Bench, prompts: list[list[int]], max_tokens: int = 6, **fields) -> None:
    """Submit a request for each prompt; all of them wait when the next tick begins."""
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, max_tokens, sampling={**SAMPLED, "seed": i}, **fields)


def alone(model, prompts: list[list[int]], max_tokens: int = 6, **fields) -> dict[str, list[int]]:
    """What each request gets when nothing is shared."""
    bench = Bench(model, prefix_cache=False, max_rows=1)
    together(bench, prompts, max_tokens, **fields)
    bench.finish()
    return {f"r{i}": bench.tokens(f"r{i}") for i in range(len(prompts))}


def assert_as_alone(bench: Bench, expected: dict[str, list[int]]) -> None:
    assert {name: bench.tokens(name) for name in expected} == expected
    bench.close()


@pytest.mark.parametrize(
    ("length", "chunk"),
    [*checkered([3, 4, 64, 65], [8, 64]), *nightly(*product([5, 60, 63], [8, 64]), *product([3, 4, 64, 65], [512]))],
)
def test_equal_prompts_that_arrive_together_are_computed_once(model, prompt_of, length, chunk):
    prompts = [prompt_of(length)] * 8
    bench = Bench(model, prefill_chunk_tokens=chunk)
    sizes = watch_prefills(bench)
    together(bench, prompts)
    bench.run()
    assert sum(sizes) == length + 7, "the prompt, and its last token again for each of the others"
    assert_as_alone(bench, alone(model, prompts))


def test_equal_prompts_beside_rows_that_decode_are_computed_once(model, prompt_of):
    busy = [prompt_of(9, seed) for seed in range(20, 24)]
    prompts = busy + [prompt_of(61)] * 4
    expected = alone(model, prompts, 12)
    bench = Bench(model, prefill_chunk_tokens=16)
    for i, prompt in enumerate(busy):
        bench.submit(f"r{i}", prompt, 12, sampling={**SAMPLED, "seed": i})
    bench.ticks(6)
    sizes = watch_prefills(bench)
    for i in range(4, 8):
        bench.submit(f"r{i}", prompts[i], 12, sampling={**SAMPLED, "seed": i})
    bench.run()
    assert sum(sizes) == 61 + 3
    assert_as_alone(bench, expected)


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_common_beginning_is_computed_once(model, prompt_of, chunk):
    beginning = prompt_of(48)
    prompts = [beginning + prompt_of(10 + i, 50 + i) for i in range(6)]
    bench = Bench(model, prefill_chunk_tokens=chunk)
    sizes = watch_prefills(bench)
    together(bench, prompts)
    bench.run()
    assert sum(sizes) == 48 + sum(10 + i for i in range(6))
    assert_as_alone(bench, alone(model, prompts))


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_that_is_the_first_pages_of_another_one_joins(model, prompt_of, length):
    prompts = [prompt_of(64), prompt_of(64)[:length]]
    bench = Bench(model, prefill_chunk_tokens=4)
    sizes = watch_prefills(bench)
    together(bench, prompts)
    bench.run()
    assert sum(sizes) == 64 + 1
    assert_as_alone(bench, alone(model, prompts))


def test_beginnings_of_several_levels_are_computed_once(model, prompt_of):
    system, shots = prompt_of(32), [prompt_of(16, 60), prompt_of(16, 61)]
    prompts = [system + shots[i % 2] + prompt_of(8, 70 + i) for i in range(6)]
    bench = Bench(model, prefill_chunk_tokens=8)
    sizes = watch_prefills(bench)
    together(bench, prompts)
    bench.run()
    assert sum(sizes) == 32 + 2 * 16 + 6 * 8
    assert_as_alone(bench, alone(model, prompts))


def test_a_prompt_that_arrives_half_way_joins(model, prompt_of):
    prompts = [prompt_of(64), prompt_of(64), prompt_of(64)[:40] + prompt_of(9, 5)]
    bench = Bench(model, prefill_chunk_tokens=8)
    sizes = watch_prefills(bench)
    bench.submit("r0", prompts[0], 6, sampling={**SAMPLED, "seed": 0})
    bench.tick_while(lambda: sum(sizes) < 24)
    for i in (1, 2):
        bench.submit(f"r{i}", prompts[i], 6, sampling={**SAMPLED, "seed": i})
    bench.run()
    assert sum(sizes) == 64 + 1 + 9
    assert_as_alone(bench, alone(model, prompts))


def test_groups_and_requests_share_one_prompt(model, prompt_of):
    bench = Bench(model)
    sizes = watch_prefills(bench)
    for name in ("a", "b", "c"):
        bench.submit(name, prompt_of(50), 5, n=3)
    bench.run()
    assert sum(sizes) == 50 + 8
    assert len({tuple(bench.tokens(name, i)) for name in "abc" for i in range(3)}) == 1


def test_first_turns_of_sessions_share_their_prompt(model, prompt_of):
    bench = Bench(model)
    sizes = watch_prefills(bench)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(50), 5, session=("c", f"s{i}"), session_lease_s=60.0)
    bench.run()
    assert sum(sizes) == 50 + 3
    assert len({tuple(bench.tokens(f"r{i}")) for i in range(4)}) == 1
    bench.close(check=False)


def test_a_sequence_that_waits_has_neither_row_nor_pages(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=8)
    together(bench, [prompt_of(64)] * 6)
    bench.engine.tick()
    roster = bench.engine.roster
    assert roster.running == 1 and roster.waiting == 5
    assert roster.allocator.pool.used == 17
    bench.run()


def test_more_important_requests_do_not_wait_for_others(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=8)
    bench.submit("low", prompt_of(64), 5)
    bench.engine.tick()
    bench.submit("high", prompt_of(64), 5, priority=1)
    bench.engine.tick()
    assert bench.engine.roster.running == 2
    bench.run()
    assert bench.tokens("low") == bench.tokens("high")


def test_a_cancel_of_the_row_that_computes_hands_the_work_on(model, prompt_of):
    prompts = [prompt_of(64)] * 4
    expected = alone(model, prompts)
    bench = Bench(model, prefill_chunk_tokens=8)
    sizes = watch_prefills(bench)
    together(bench, prompts)
    bench.tick_while(lambda: sum(sizes) < 24)
    bench.engine.inbox.put(Cancel(("c", "r0")))
    bench.run()
    assert sum(sizes) <= 64 + 8 + 2, "what the first one computed is used; a chunk may have been on its way"
    assert bench.tokens("r0") == []
    assert_as_alone(bench, {name: tokens for name, tokens in expected.items() if name != "r0"})


def test_a_cancel_of_one_that_waits_leaves_the_others(model, prompt_of):
    prompts = [prompt_of(64)] * 4
    expected = alone(model, prompts)
    bench = Bench(model, prefill_chunk_tokens=8)
    together(bench, prompts)
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "r2")))
    bench.run()
    assert bench.tokens("r2") == []
    assert_as_alone(bench, {name: tokens for name, tokens in expected.items() if name != "r2"})


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_after_a_swap_the_others_share_a_prefill_under_the_new_weights(folders, prompt_of, on_swap):
    model, mailbox = load(folders[0]), Mailbox()
    bench = Bench(model, receiver=mailbox, prefill_chunk_tokens=8, kv_on_swap=on_swap)
    sizes = watch_prefills(bench)
    together(bench, [prompt_of(64)] * 4)
    bench.tick_while(lambda: sum(sizes) < 24)
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.run()
    assert sum(sizes) <= 24 + 16 + (64 + 2 if on_swap == "recompute" else 40 + 64 + 2) + 1
    expected = alone(load(folders[1]), [prompt_of(64)] * 4)
    for i in range(0 if on_swap == "recompute" else 1, 4):
        assert bench.tokens(f"r{i}") == expected[f"r{i}"]


def test_prompt_logprobs_are_computed_by_each_request_that_asks(model, prompt_of):
    bench = Bench(model)
    sizes = watch_prefills(bench)
    together(bench, [prompt_of(40)] * 3, prompt_logprobs=True)
    bench.run()
    assert sum(sizes) == 3 * 40


def test_without_a_prefix_cache_nothing_is_joined(model, prompt_of):
    bench = Bench(model, prefix_cache=False)
    sizes = watch_prefills(bench)
    together(bench, [prompt_of(40)] * 3)
    bench.run()
    assert sum(sizes) == 3 * 40


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6))])
def test_random_arrivals_have_their_own_tokens_and_lose_no_page(model, prompt_of, seed):
    """Few pages, common beginnings, groups, priorities, cancels and swaps of rows."""
    rng = random.Random(seed)
    stems = [prompt_of(rng.choice((7, 16, 33)), 80 + i) for i in range(3)]
    prompts = [rng.choice(stems) + prompt_of(rng.choice((0, 1, 3, 8, 21)), 90 + rng.randint(0, 2)) for _ in range(24)]
    lengths = [rng.randint(1, 14) for _ in prompts]
    single = Bench(model, prefix_cache=False, max_rows=1)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        single.submit(f"r{i}", prompt, length, sampling={**SAMPLED, "seed": i})
    single.run()
    bench = Bench(
        model, kv_pages=rng.choice((40, 70, 256)), prefill_chunk_tokens=rng.choice((4, 16, 64)),
        host_kv_gib=rng.choice((0, 0.001)),
    )  # fmt: skip
    cancelled = set()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        bench.submit(f"r{i}", prompt, length, priority=rng.randint(0, 1), sampling={**SAMPLED, "seed": i})
        bench.ticks(rng.choice((0, 0, 1, 4)))
        if rng.random() < 0.15:
            victim = f"r{rng.randint(0, i)}"
            cancelled.add(victim)
            bench.engine.inbox.put(Cancel(("c", victim)))
    bench.run()
    for i in range(len(prompts)):
        expected = single.tokens(f"r{i}")
        found = bench.tokens(f"r{i}")
        assert found == (expected[: len(found)] if f"r{i}" in cancelled else expected)
    bench.close(), single.close()


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 40))])
def test_random_arrivals_compute_each_page_once(model, prompt_of, seed):
    """With pages for all: whatever the order, chunk, clients and cancels of rows that wait, groups and last tokens."""
    rng = random.Random(seed)
    stems = [prompt_of(rng.choice((7, 16, 33)), 80 + i) for i in range(3)]
    prompts = [rng.choice(stems) + prompt_of(rng.choice((0, 1, 3, 8, 21)), 90 + rng.randint(0, 2)) for _ in range(24)]
    prompts += [[*prompt[:-1], (prompt[-1] + 1) % VOCAB] for prompt in rng.sample(prompts, 8)]
    rng.shuffle(prompts)
    bench = Bench(
        model, kv_pages=4096, prefill_chunk_tokens=rng.choice((3, 4, 16, 64)), max_rows=rng.choice((2, 8, 32))
    )
    page, sizes, pages, most = 4, watch_prefills(bench), set(), 0
    for i, prompt in enumerate(prompts):
        n = rng.choice((1, 1, 3))
        bench.submit(f"r{i}", prompt, rng.randint(1, 6), client=rng.choice("abc"), n=n, sampling={**SAMPLED, "seed": i})
        pages.update(tuple(prompt[:end]) for end in range(page, len(prompt) + 1, page))
        # The tokens after the last full page, which only equal prompts share, or the last token again.
        most += (len(prompt) % page or 1) + n - 1
        bench.ticks(rng.choice((0, 0, 1, 4)))
    bench.run()
    assert sum(sizes) <= page * len(pages) + most


def test_equal_prompts_take_as_many_pages_as_one_request_for_all(model, prompt_of):
    used = []
    for requests, n in ((8, 1), (1, 8)):
        bench = Bench(model)
        for i in range(requests):
            bench.submit(f"r{i}", prompt_of(61), 6, n=n)
        while len(bench.engine.roster.decoding) < 8:
            bench.engine.tick()
        used.append(bench.engine.roster.allocator.pool.used)
        bench.finish()
    assert used[0] <= used[1]


@pytest.mark.parametrize(("length", "tokens"), [(36, 4), (34, 6), (33, 7)])
def test_a_prompt_that_needs_every_page_can_do_without_the_copy_of_its_end(model, prompt_of, length, tokens):
    """The page to copy would be one too many, and nothing runs that could give one back."""
    bench = Bench(model, kv_pages=11, page_size=4)
    for name in ("a", "b"):
        bench.complete(name, prompt_of(length), tokens)
    assert bench.tokens("a") == bench.tokens("b")


def test_a_prefill_of_lower_priority_does_not_keep_others_from_sharing(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=8, max_rows=8)
    sizes = watch_prefills(bench)
    bench.submit("low", prompt_of(64), 4)
    bench.engine.tick()
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(64), 4, priority=1)
    bench.run()
    assert sum(sizes) <= 2 * 64 + 6
