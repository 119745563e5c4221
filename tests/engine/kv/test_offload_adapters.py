"""Offloaded rows with adapters: they give up their slot, and their adapter may change before they return."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import DynamicCache

from rollout.engine.build import rebuild_engine
from rollout.engine.features.adapters.known_adapters import NO_SLOT
from rollout.engine.messages.to_engine import Cancel, DropAdapter, PutAdapter
from rollout.engine.messages.to_service import Done, Failed
from rollout.engine.schedule.plan import Plan
from tests.support.engine.adapted import Adapters, greedy_is, make_adapters, slots_of, table_of, versions_of
from tests.support.engine.harness import Bench, Completion, prompt_of
from tests.support.engine.offloading import counts, offloading, restoring
from tests.support.engine.streams import LateDevice
from tests.support.kernels.grids import nightly
from tests.support.peft_adapters import ALL


@pytest.fixture(scope="module")
def adapters(hf_models, folders, tmp_path_factory) -> Adapters:
    return make_adapters(hf_models[0], folders[0], tmp_path_factory, [ALL] * 4, seed=20)


def bench_of(model, adapters: Adapters, count: int = 1, slots: int = 2, **fields) -> Bench:
    """Adapters a0.. are known, and more rows can run than the pool has room for."""
    bench = offloading(model, adapter_slots=slots, adapter_rank=16, prefill_chunk_tokens=512, **fields)
    for i in range(count):
        bench.engine.inbox.put(PutAdapter(f"a{i}", adapters[i][0]))
    return bench


def six(bench: Bench, adapter: Sequence[str], **fields) -> dict[str, list[int]]:
    prompts = {f"r{i}": prompt_of(10, i) for i in range(6)}
    for i, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 60, adapter=adapter[i % len(adapter)], **fields)
    return prompts


def change(bench: Bench, adapters: Adapters, which: int = 1) -> None:
    """The next tick has a newer version of a0."""
    bench.engine.inbox.put(PutAdapter("a0", adapters[which][0]))


def offloaded(bench: Bench) -> list:
    """Sequences that wait with KV and have at least one token."""
    groups = bench.engine.roster.groups.values()
    return [seq for group in groups for seq in group.sequences if seq.kv.is_offloaded and seq.drawn.versions]


def until(bench: Bench, condition: Callable[[], object], ticks: int = 2000) -> None:
    for _ in range(ticks):
        if condition():
            return
        bench.engine.tick()
    raise AssertionError("it does not come to pass")


def is_replayed(models: Sequence[object], prompt: list[int], told: list[int], completion: Completion) -> None:
    """Each token is the top one of the version stamped on it, given KV of the versions stamped on that."""
    again = {position for position, _ in completion.recomputed}
    history, cache, fed = list(prompt), DynamicCache(), 0
    for i, (token, version) in enumerate(zip(completion.token_ids, told, strict=True)):
        if i in again:
            cache, fed = DynamicCache(), 0
        with torch.inference_mode():
            ids = torch.tensor([history[fed:]])
            logits = models[version](ids, past_key_values=cache, use_cache=True).logits[0, -1]
        fed = len(history)
        history.append(token)
        assert logits.max() - logits[token] < 1e-3, f"token {i}"


def test_preempted_rows_come_back_with_their_adapter_into_whatever_slot_it_has(model, adapters):
    """Others take the slots meanwhile; the adapter is loaded again, into another slot."""
    bench = bench_of(model, adapters, 3, prefix_cache=False)
    slots: dict[str, set[int]] = {}

    def note(plan: Plan) -> None:
        for span in plan.spans:
            slots.setdefault(span.seq.group.key[1], set()).add(span.seq.variant_use.slot.number)

    bench.observer.at_launch.append(note)
    prompts = six(bench, ["a0"])
    until(bench, lambda: offloaded(bench))
    for i, count in enumerate((60, 70), 1):
        bench.submit(f"h{i}", prompt_of(10, 6 + i), count, adapter=f"a{i}", priority=1)
    bench.run()
    assert counts(bench).restored == counts(bench).offloaded > 0
    assert any(len(numbers) == 2 for numbers in slots.values()), "nobody's adapter has moved"
    for name, prompt in prompts.items():
        assert bench.completions[name, 0].recomputed == () and versions_of(bench, name) == [0] * 60
        greedy_is(adapters[0][1], prompt, bench.tokens(name))
    for i in (1, 2):
        greedy_is(adapters[i][1], prompt_of(10, 6 + i), bench.tokens(f"h{i}"))


def test_a_parked_sequence_holds_no_slot(model, adapters):
    """The only slot goes to another adapter without a preemption for it, and comes back."""
    bench = bench_of(model, adapters, 2, slots=1)
    prompts = six(bench, ["a0"])
    until(bench, lambda: offloaded(bench))
    table, waiting = table_of(bench), offloaded(bench)
    running = bench.engine.roster.running
    assert all(seq.variant_use.slot is NO_SLOT for seq in waiting)
    assert table.known["a0"].slot.refs == running - sum(seq.row > 0 for seq in waiting)
    bench.complete("other", prompt_of(9, 8), 5, adapter="a1", priority=1)
    assert table.counts.evicted == 2, "from the first to the other, and back"
    assert list(bench.done).index("other") < list(bench.done).index(waiting[0].group.key[1])
    assert counts(bench).restored == counts(bench).offloaded
    greedy_is(adapters[1][1], prompt_of(9, 8), bench.tokens("other"))
    for name, prompt in prompts.items():
        greedy_is(adapters[0][1], prompt, bench.tokens(name))


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
@pytest.mark.parametrize("late", [True, *nightly(False)])
def test_an_adapter_changes_while_kv_that_it_made_is_offloaded(model, adapters, kv_on_swap, late):
    """As in rows that run: the KV is kept and reported with its versions, or computed again."""
    device = LateDevice({"kv_in": lambda: 0.002, "kv_out": lambda: 0.002}) if late else None
    bench = bench_of(model, adapters, device=device, kv_on_swap=kv_on_swap)
    prompts = six(bench, ["a0"], stream_every=3)
    until(bench, lambda: offloaded(bench))
    across = {seq.group.key[1] for seq in offloaded(bench)}
    change(bench, adapters)
    bench.run()
    keeps, models = kv_on_swap == "keep", [reference for _, reference in adapters[:2]]
    assert (counts(bench).restored == counts(bench).offloaded) == keeps
    for name, prompt in prompts.items():
        told, completion = versions_of(bench, name), bench.completions[name, 0]
        assert told == sorted(told) and (set(told) == {0, 1} or name not in across)
        assert bool(completion.recomputed) == (not keeps and set(told) == {0, 1})
        is_replayed(models, prompt, told, completion)
        if name in across and not keeps:
            first = told.index(1)
            greedy_is(models[1], prompt + completion.token_ids[:first], completion.token_ids[first:])


def test_a_sequence_parked_with_another_adapter_is_unaffected(model, adapters):
    """Nor do rows that run with it, where rows of the one that changes are computed again."""
    bench = bench_of(model, adapters, 2, kv_on_swap="recompute")
    prompts = six(bench, ["a0", "a1"])
    until(bench, lambda: any(seq.group.variant.name == "a1" for seq in offloaded(bench)))
    change(bench, adapters, which=2)
    bench.run()
    for i, (name, prompt) in enumerate(prompts.items()):
        completion = bench.completions[name, 0]
        if i % 2:
            assert completion.recomputed == () and versions_of(bench, name) == [0] * 60
            greedy_is(adapters[1][1], prompt, completion.token_ids)
        else:
            assert completion.recomputed


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_an_adapter_changes_while_kv_comes_back(model, adapters, kv_on_swap):
    bench = bench_of(model, adapters, device=LateDevice({"kv_in": lambda: 0.05}), kv_on_swap=kv_on_swap)
    prompts, prefilling = six(bench, ["a0"]), bench.engine.roster.prefilling
    until(bench, lambda: any(restoring(seq) for seq in prefilling))
    coming = [seq for seq in prefilling if restoring(seq)]
    change(bench, adapters)
    bench.run()
    for name, prompt in prompts.items():
        is_replayed(
            [reference for _, reference in adapters[:2]], prompt, versions_of(bench, name), bench.completions[name, 0]
        )
    (mine,) = [bench.completions[seq.group.key[1], 0] for seq in coming]
    assert (mine.recomputed == ()) == (kv_on_swap == "keep")
    assert set(versions_of(bench, coming[0].group.key[1])) == {0, 1}


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_a_prompt_whose_adapter_changes_before_it_has_a_token_is_computed_anew(model, adapters, kv_on_swap):
    """Half of it was computed when it gave way."""
    bench = offloading(model, adapter_slots=2, adapter_rank=16, kv_pages=60, prefill_chunk_tokens=8, max_rows=4,
                       kv_on_swap=kv_on_swap)  # fmt: skip
    bench.engine.inbox.put(PutAdapter("a0", adapters[0][0]))
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(8, i), 60)
    bench.submit("long", prompt_of(150, 9), 20, adapter="a0")
    until(bench, lambda: counts(bench).offloaded)
    (seq,) = bench.engine.roster.groups["c", "long"].sequences
    assert seq.kv.is_offloaded and 0 < seq.kv.in_tier.offloaded.length < 150 and not seq.tokens
    change(bench, adapters)
    bench.run()
    assert versions_of(bench, "long") == [1] * 20
    greedy_is(adapters[1][1], prompt_of(150, 9), bench.tokens("long"))


def test_a_turn_whose_adapter_changed_while_it_was_offloaded_leaves_nothing(model, adapters):
    """Its session would go on with KV of two versions."""
    bench = bench_of(model, adapters, prefix_cache=False)
    session = {"session": ("c", "talk"), "session_lease_s": 1e6, "adapter": "a0"}
    for i in range(3):
        bench.submit(f"t{i}", prompt_of(8, i), 50, **(session if i == 2 else {}))
    until(bench, lambda: offloaded(bench))
    (seq,) = offloaded(bench)
    assert seq.group.session is not None
    change(bench, adapters)
    bench.run()
    assert set(versions_of(bench, "t2")) == {0, 1} and counts(bench).restored == 1
    said = prompt_of(8, 2) + bench.tokens("t2") + prompt_of(5, 7)
    bench.complete("next", said, 9, **session)
    assert bench.done["next"].cached_tokens == 0
    greedy_is(adapters[1][1], said, bench.tokens("next"))


def test_kv_of_two_versions_of_an_adapter_is_not_cached(model, adapters):
    """A sequence offloaded before may look for pages of the older version: pages computed since are not among them."""
    bench = bench_of(model, adapters)
    six(bench, ["a0"])
    until(bench, lambda: offloaded(bench))
    across, pool, remembered = offloaded(bench), bench.engine.roster.allocator.pool, []
    change(bench, adapters)
    bench.engine.tick()
    remember = pool.remember
    pool.remember = lambda key, page: (remembered.append(page), remember(key, page))
    until(bench, lambda: all(not seq.kv.is_offloaded for seq in across))
    theirs = [page for seq in across for page in seq.kv.pages]
    while bench.engine.roster.groups.keys() & {seq.group.key for seq in across}:
        theirs += [page for seq in across for page in seq.kv.pages]
        bench.engine.tick()
    assert theirs and not set(theirs) & set(remembered)
    bench.run()


def test_an_adapter_is_unloaded_after_its_last_parked_sequence(model, adapters):
    """Not before; and another one by its name finds nothing of its KV, in the pool or on the host."""
    bench = bench_of(model, adapters)
    prompts = six(bench, ["a0"])
    until(bench, lambda: counts(bench).pages_out and offloaded(bench))
    for name in prompts.keys() - {seq.group.key[1] for seq in offloaded(bench)}:
        bench.engine.inbox.put(Cancel(("c", name)))
    waiting = {name: bench.engine.roster.groups["c", name].sequences[0] for name in prompts}
    waiting = {name: seq for name, seq in waiting.items() if seq.kv.is_offloaded}
    bench.engine.inbox.put(DropAdapter("a0", 1))
    for name in waiting:
        bench.engine.inbox.put(Cancel(("c", name)))
    bench.engine.inbox.put(DropAdapter("a0", 2))
    bench.engine.inbox.put(PutAdapter("a0", adapters[2][0], token=3))
    bench.run()
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert failed.token == 1 and f"{len(waiting)} unfinished" in failed.message
    assert Done(2) in bench.events and Done(3) in bench.events
    for name in prompts:
        again = prompts[name] + bench.tokens(name)
        bench.complete(f"{name} again", again, 12, adapter="a0")
        assert bench.done[f"{name} again"].cached_tokens == 0
        greedy_is(adapters[2][1], again, bench.tokens(f"{name} again"))


def test_a_rebuilt_engine_has_its_adapters_and_its_host_memory(model, adapters):
    bench = bench_of(model, adapters, 2)
    six(bench, ["a0", "a1"])
    until(bench, lambda: offloaded(bench))
    slots, memory = slots_of(bench), bench.engine.executor.mover.host_memory
    bench.engine.fail("a fault")
    rebuild_engine(bench.engine, bench.settings)
    assert slots_of(bench) is slots and bench.engine.executor.mover.host_memory is memory
    before = counts(bench).restored
    for i in range(6):
        bench.submit(f"again{i}", prompt_of(10, i), 60, adapter=f"a{i % 2}")
    bench.run()
    assert counts(bench).restored > before
    for i in range(6):
        greedy_is(adapters[i % 2][1], prompt_of(10, i), bench.tokens(f"again{i}"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 4))])
def test_under_random_versions_every_token_follows_from_the_kv_that_is_reported(
    model, hf_models, adapters, seed, tmp_path
):
    """Newer versions of two adapters at random times, groups, sessions, more adapters than slots, late streams."""
    rng = random.Random(300 + seed)
    names = ("compute", "d2h", "kv_out", "kv_in", "adapters")
    bench = bench_of(
        model,
        adapters,
        2,
        slots=1 + seed % 2,
        host_pages=rng.choice([20, 300]),
        piece_pages=rng.choice([1, 4]),
        device=LateDevice({name: lambda: rng.random() * 0.0005 for name in names}),
        kv_on_swap=("keep", "recompute")[seed // 2],
        pipeline_depth=rng.choice([1, 2]),
        disk_kv_gib=0.01,
        disk_kv_folder=str(tmp_path),
    )
    jobs = {}
    for i in range(8):
        fields = (
            {"session": ("c", f"s{i}"), "session_lease_s": 1e6} if rng.random() < 0.3 else {"n": rng.choice([1, 2])}
        )
        jobs[f"r{i}"] = (prompt_of(rng.randint(3, 20), i % 5), rng.choice([None, 0, 1]), fields)
    versions: list[list[int]] = [[0], [1]]  # which of `adapters` each version is
    for name, (prompt, which, fields) in jobs.items():
        adapter = None if which is None else f"a{which}"
        bench.submit(name, prompt, rng.randint(30, 60), adapter=adapter, stream_every=4, **fields)
        bench.ticks(rng.randint(0, 6))
    for _ in range(5):
        bench.ticks(rng.randint(5, 35))
        which = rng.randrange(2)
        versions[which].append(rng.randrange(4))
        bench.engine.inbox.put(PutAdapter(f"a{which}", adapters[versions[which][-1]][0]))
    bench.run()
    assert counts(bench).offloaded > 0
    for name, (prompt, which, fields) in jobs.items():
        models = [hf_models[0]] if which is None else [adapters[one][1] for one in versions[which]]
        for index in range(fields.get("n", 1)):
            completion = bench.completions[name, index]
            told = versions_of(bench, name, index) if which is not None else [0] * len(completion.token_ids)
            is_replayed(models, prompt, told, completion)
