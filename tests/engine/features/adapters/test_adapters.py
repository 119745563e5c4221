"""Adapters in a real engine: rows with different ones in one batch, slots that come and go."""

import threading

import numpy as np
import pytest
import torch

from rollout.engine.messages.requests import NOTHING_BEFORE, Prior, Prompt
from rollout.engine.messages.to_engine import Cancel, DropAdapter, Prefetch, PutAdapter
from rollout.engine.messages.to_service import Delta, Done, Failed, Rejected
from rollout.engine.schedule.preemption import change_weights
from tests.support.engine.adapted import SOME, Adapters, bench_of, greedy_is, make_adapters, table_of, versions_of
from tests.support.engine.harness import Bench, prompt_of
from tests.support.peft_adapters import ALL

COUNT = 9


@pytest.fixture(scope="module")
def adapters(hf_models, folders, tmp_path_factory) -> Adapters:
    return make_adapters(hf_models[0], folders[0], tmp_path_factory, ([SOME, ALL] * COUNT)[:COUNT])


def continuation(reference, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                             pad_token_id=0, eos_token_id=None)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("count", [1, 4, 8])
def test_rows_of_one_batch_are_each_what_peft_merges(model, base, adapters, count):
    bench = bench_of(model, adapters, count, max_rows=count + 1, prefill_chunk_tokens=16)
    prompts = {f"r{i}": prompt_of(7 + 3 * i, i) for i in range(count + 1)}
    for i, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 12, adapter=f"a{i}" if i < count else None)
    bench.run()
    for i, (name, prompt) in enumerate(prompts.items()):
        greedy_is(adapters[i][1] if i < count else base, prompt, bench.tokens(name))
        assert versions_of(bench, name) == [0] * 12 if i < count else True
    assert bench.tokens("r0") != continuation(base, prompts["r0"], 12), "the adapter changes what is said"


def test_a_prefix_is_shared_within_an_adapter_and_never_across(model, base, adapters):
    bench = bench_of(model, adapters, 2, max_rows=4)
    prompt = prompt_of(30)
    for name, adapter in (("plain", None), ("one", "a0"), ("two", "a1"), ("one again", "a0"), ("plain again", None)):
        bench.complete(name, prompt, 8, adapter=adapter)
        greedy_is(base if adapter is None else adapters[int(adapter[1])][1], prompt, bench.tokens(name))
    cached = {name: done.cached_tokens for name, done in bench.done.items()}
    assert cached == {"plain": 0, "one": 0, "two": 0, "one again": 29, "plain again": 29}


def test_a_group_shares_the_prefill_of_its_adapter(model, adapters):
    bench = bench_of(model, adapters, 1)
    prompt = prompt_of(21)
    bench.complete("g", prompt, 10, n=4, adapter="a0")
    for index in range(4):
        greedy_is(adapters[0][1], prompt, bench.tokens("g", index))
    assert bench.engine.roster.counters.cached_tokens == 3 * 20


def test_more_adapters_than_slots_take_turns(model, adapters):
    bench = bench_of(model, adapters, COUNT, slots=2, max_rows=4)
    prompts = [prompt_of(6 + i, i) for i in range(COUNT)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 6, adapter=f"a{i}")
        bench.submit(f"s{i}", prompt, 9, adapter=f"a{i}")
    bench.run()
    for i, prompt in enumerate(prompts):
        greedy_is(adapters[i][1], prompt, bench.tokens(f"r{i}"))
        greedy_is(adapters[i][1], prompt, bench.tokens(f"s{i}"))
    assert table_of(bench).counts.evicted == COUNT - 2


def ends_of(bench) -> list[str]:
    """The names of requests, in the order of their ends."""
    ends: list[str] = []
    while bench.engine.busy or not ends:
        bench.engine.tick()
        ends += [name for (name, _), completion in bench.completions.items() if completion.finish and name not in ends]
    return ends


def test_a_slot_takes_its_share_of_rows_before_an_adapter_that_waits_gets_it(model, adapters):
    """Its share are all 4 rows: each `later` passes, and each `last` comes after the adapter that waits."""
    bench = bench_of(model, adapters, 2, slots=1, max_rows=4)
    bench.submit("runs", prompt_of(6), 40, adapter="a0")
    bench.submit("waits", prompt_of(6), 5, adapter="a1")
    bench.submit("plain", prompt_of(6), 5)
    for name in ("later 1", "later 2", "later 3", "last 1", "last 2"):
        bench.submit(name, prompt_of(6, 1), 5, adapter="a0")
    ends = ends_of(bench)
    assert set(ends[:4]) == {"plain", "later 1", "later 2", "later 3"}
    assert ends[4:] == ["runs", "waits", "last 1", "last 2"]
    greedy_is(adapters[1][1], prompt_of(6), bench.tokens("waits"))
    assert table_of(bench).counts.loaded == 3


def test_an_endless_stream_for_adapters_in_slots_starves_none(model, adapters):
    """As soon as a completion of a busy adapter ends, the next one is sent; the others wait together."""
    bench = bench_of(model, adapters, COUNT, slots=2, max_rows=6)
    sent = 0

    def keep_busy() -> None:
        nonlocal sent
        while sent - sum(name.startswith("busy") for name in bench.done) < 16:
            bench.submit(f"busy{sent}", prompt_of(6, sent), 6, adapter=f"a{sent % 2}")
            sent += 1

    keep_busy()
    bench.ticks(20)
    for i in range(2, COUNT):
        bench.submit(f"r{i}", prompt_of(6, i), 6, adapter=f"a{i}")
    ended: dict[str, int] = {}
    while len(ended) < COUNT - 2:
        keep_busy()
        bench.engine.tick()
        for (name, _), completion in bench.completions.items():
            if name[0] == "r" and completion.finish and name not in ended:
                ended[name] = sent
    assert list(ended) == [f"r{i}" for i in range(2, COUNT)], "slots come in the order of the queue"
    assert sent < 400
    for i in range(2, COUNT):
        greedy_is(adapters[i][1], prompt_of(6, i), bench.tokens(f"r{i}"))
    bench.run()


def test_an_endless_stream_of_a_higher_priority_keeps_its_slot_and_starves_no_other_adapter(model, adapters):
    """Its slot has the fewest rows, but never comes free: the slot of the other stream does."""
    bench = bench_of(model, adapters, 3, slots=2, max_rows=6)
    sent = {"high": 0, "same": 0}

    def keep_busy(kind: str, most: int, **fields: object) -> None:
        while sent[kind] - sum(name.startswith(kind) for name in bench.done) < most:
            bench.submit(f"{kind}{sent[kind]}", prompt_of(6, sent[kind]), 6 + sent[kind] % 3, **fields)
            sent[kind] += 1

    def tick() -> None:
        keep_busy("high", 2, adapter="a0", priority=1)
        keep_busy("same", 12, adapter="a1")
        bench.engine.tick()

    for _ in range(40):
        tick()
    bench.submit("waits", prompt_of(6), 5, adapter="a2")
    most = sent["same"] + 150
    while "waits" not in bench.done:
        tick()
        assert sent["same"] < most
    greedy_is(adapters[2][1], prompt_of(6), bench.tokens("waits"))
    bench.run()


def test_all_rows_are_in_use_while_many_adapters_wait_for_few_slots(model, adapters):
    """Requests come in turn for each adapter: a row for each slot would be a third of the rows, and 36 copies."""
    bench = bench_of(model, adapters, COUNT, slots=2, max_rows=6, prefill_chunk_tokens=64)
    for i in range(4 * COUNT):
        bench.submit(f"r{i}", prompt_of(6, i), 12, adapter=f"a{i % COUNT}")
    bench.run()
    for i in range(4 * COUNT):
        greedy_is(adapters[i % COUNT][1], prompt_of(6, i), bench.tokens(f"r{i}"))
    assert table_of(bench).counts.loaded == 2 * COUNT, "three of four requests come with their adapter's first one"


def test_an_adapter_that_nothing_waits_for_loses_its_slot_first(model, adapters):
    bench = bench_of(model, adapters, 4, slots=3, max_rows=2)
    for i in range(3):
        bench.complete(f"r{i}", prompt_of(5), 3, adapter=f"a{i}")
    for name, adapter in (("next", "a3"), ("again", "a0")):  # a0 is the least recently used one
        bench.submit(name, prompt_of(5), 3, adapter=adapter)
    bench.run()
    assert {status.name for status in bench.status().adapters if status.resident} == {"a0", "a2", "a3"}
    assert table_of(bench).counts.evicted == 1


def test_the_least_recently_used_adapter_loses_its_slot(model, adapters):
    bench = bench_of(model, adapters, 3, slots=2)
    for i, adapter in enumerate(("a0", "a1", "a0", "a2")):
        bench.complete(f"r{i}", prompt_of(5), 2, adapter=adapter)
    resident = {status.name for status in bench.status().adapters if status.resident}
    assert resident == {"a0", "a2"}


def test_a_slot_is_not_written_while_a_step_in_flight_names_its_row(model, adapters):
    """The zombie's step is not committed yet: a request for its adapter slot waits for the commit."""
    bench = bench_of(model, adapters, 2, slots=1, max_rows=2)
    bench.submit("a", prompt_of(6), 50, adapter="a0")
    while not bench.completions:
        bench.engine.tick()
        if bench.engine.pipeline.in_flight and bench.engine.roster.decoding:
            break
    (seq,) = bench.engine.roster.decoding
    assert seq.inflight_refs > 0
    slot, table = seq.variant_use.slot, table_of(bench)
    bench.submit("b", prompt_of(6, 1), 5, adapter="a1")
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.engine.commands.take(bench.engine.parts)
    assert seq.finalized and seq.inflight_refs > 0
    assert slot.refs == 1 and not table.ready([table.known["a1"]]), "its slot is not to be had"
    assert slot.adapter is table.known["a0"]
    bench.run()
    assert slot.refs == 0 and slot.adapter is table.known["a1"]
    greedy_is(adapters[1][1], prompt_of(6, 1), bench.tokens("b"))


def test_preempted_rows_go_on_with_their_adapter(model, adapters):
    bench = bench_of(model, adapters, 4, slots=3, max_rows=6, kv_pages=24, prefix_cache=False)
    prompts = [prompt_of(9, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 30, adapter=f"a{i % 4}")
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    for i, prompt in enumerate(prompts):
        greedy_is(adapters[i % 4][1], prompt, bench.tokens(f"r{i}"))
        assert versions_of(bench, f"r{i}") == [0] * 30


def test_rows_go_on_while_an_adapter_is_copied(model, adapters):
    bench = bench_of(model, adapters, 2)
    bench.submit("a", prompt_of(6), 200, adapter="a0", stream_every=1)
    bench.tick_until(lambda: bench.tokens("a"))
    copied = threading.Event()
    table_of(bench).loads.run(lambda: copied.wait(60))
    bench.submit("b", prompt_of(6, 1), 5, adapter="a1")
    begun = len(bench.tokens("a"))
    bench.ticks(30)
    assert len(bench.tokens("a")) > begun + 20 and bench.engine.roster.waiting == 1
    copied.set()
    bench.run()
    greedy_is(adapters[1][1], prompt_of(6, 1), bench.tokens("b"))


def test_while_nothing_runs_the_loop_waits_for_a_copy_and_does_not_spin(model, adapters):
    bench = bench_of(model, adapters, 3, slots=1, max_rows=1)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(5), 4, adapter=f"a{i}")
    bench.run(ticks=60)


def test_sessions_go_on_with_their_adapter_alone(model, base, adapters):
    bench = bench_of(model, adapters, 2, prefix_cache=False)
    prompt = prompt_of(14)
    for name, adapter in (("1", "a0"), ("2", "a0"), ("3", "a1"), ("4", None)):
        bench.complete(name, prompt, 5, adapter=adapter, session=("c", "s"), session_lease_s=100.0)
        prompt = [*prompt, *bench.tokens(name), 3]
    assert [bench.done[name].cached_tokens > 0 for name in "1234"] == [False, True, False, False]
    assert bench.engine.roster.allocator.sessions.counts.hits == 1


def test_two_slots_in_flight_and_base_swaps_leave_adapters_alone(model, adapters):
    """Base weights change: KV computed with adapters is old, too."""
    bench = bench_of(model, adapters, 1)
    prompt = prompt_of(17)
    bench.complete("r0", prompt, 4, adapter="a0")
    change_weights(bench.engine.roster, 3, recompute=False)
    bench.complete("r1", prompt, 4, adapter="a0")
    assert bench.done["r1"].cached_tokens == 0
    assert bench.tokens("r0") == bench.tokens("r1") and versions_of(bench, "r1") == [0] * 4


@pytest.mark.parametrize("known", [0, 30])
def test_a_prefill_under_two_versions_of_an_adapter_tells_that_it_had_two_parts(model, adapters, known):
    """Of weights of one version: what changed between is the adapter."""
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prior = Prior(np.array(prompt_of(known, 1), np.int32)) if known else NOTHING_BEFORE
    bench.submit("r", prompt_of(30), known + 9, adapter="a0", prior=prior)
    bench.ticks(2)
    bench.engine.inbox.put(PutAdapter("a0", adapters[2][0]))
    bench.run()
    assert bench.completions["r", 0].recomputed == ((known, 0), (known, 0))
    (told,) = [event for event in bench.events if isinstance(event, Delta)]
    assert told.adapter_versions == ((known, 1),)


def test_unsupported_adapters_are_refused_with_the_reason(model, adapters):
    bench = bench_of(model, adapters, 1, max_adapters=1)
    bench.submit("unknown", prompt_of(4), 4, adapter="nobody")
    bench.submit("runs", prompt_of(4), 30, adapter="a0")
    bench.engine.tick()
    for command in (
        PutAdapter("a1", adapters[1][0], token=100),
        PutAdapter("a0", adapters[1][0], version=0, token=101),
        DropAdapter("a0", 102),
        DropAdapter("nobody", 103),
    ):
        bench.engine.inbox.put(command)
    bench.run()
    (rejected,) = [event for event in bench.events if isinstance(event, Rejected)]
    assert rejected.code == "bad_request" and rejected.field == "adapter"
    failed = {event.token: event.message for event in bench.events if isinstance(event, Failed)}
    assert failed.keys() == {100, 101, 102, 103}
    assert "max_adapters" in failed[100] and "version 0" in failed[101]
    assert "1 unfinished" in failed[102] and "not loaded" in failed[103]
    greedy_is(adapters[0][1], prompt_of(4), bench.tokens("runs"))
    bench.engine.inbox.put(DropAdapter("a0", 104))
    bench.run()
    assert Done(104) in bench.events and bench.status().adapters == ()


def test_an_engine_without_adapters_refuses_whatever_names_one(model, adapters):
    bench = Bench(model)
    bench.submit("names", prompt_of(4), 4, adapter="a0")
    prompt = Prompt.of_tokens(np.array(prompt_of(4), dtype=np.int32))
    for command in (PutAdapter("a0", adapters[0][0], token=1), DropAdapter("a0", 2), Prefetch(prompt, "a0", 3)):
        bench.engine.inbox.put(command)
    bench.submit("plain", prompt_of(4), 4)
    bench.run()
    (rejected,) = [event for event in bench.events if isinstance(event, Rejected)]
    failed = {event.token: event.message for event in bench.events if isinstance(event, Failed)}
    assert rejected.key == ("c", "names") and rejected.code == "bad_request" and rejected.field == "adapter"
    assert failed[3] == rejected.message and failed[1] == failed[2]
    assert all("--adapter-slots" in failed[token] for token in (1, 2, 3))
    assert bench.done.keys() == {"plain"} and bench.status().adapters is None


def test_other_requests_pay_nothing(model, adapters):
    """Steps without adapters are the same as in an engine that has none, bit for bit."""
    found = []
    for slots in (0, 4):
        bench = Bench(model, adapter_slots=slots)
        for i in range(3):
            bench.submit(f"r{i}", prompt_of(8, i), 10, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        found.append([bench.completions[f"r{i}", 0].logprobs for i in range(3)])
        assert (not bench.engine.executor.step.rows.columns) == (slots == 0)
        bench.close()
    assert found[0] == found[1]
