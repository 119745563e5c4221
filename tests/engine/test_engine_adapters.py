"""Adapters in a real engine: rows with different ones in one batch, slots that come and go, newer versions."""

from __future__ import annotations

import threading

import pytest
import torch
from harness import Bench, load
from transformers import Qwen3ForCausalLM

from rollout.engine.adapters import AdapterUpdate
from rollout.engine.build import rebuild_engine
from rollout.engine.types import Cancel, Delta, Done, DropAdapter, Failed, PutAdapter, Rejected
from rollout.models.adapters import AdapterWeights
from rollout.models.peft_tensors import load_peft_folder
from tests.engine.conftest import build_qwen3, prompt_of
from tests.peft_adapters import ALL, make_adapter, merged

COUNT = 9


@pytest.fixture(scope="module")
def base() -> Qwen3ForCausalLM:
    return build_qwen3(0)


@pytest.fixture(scope="module")
def adapters(base, folders, tmp_path_factory) -> list[tuple[AdapterWeights, Qwen3ForCausalLM]]:
    """Weights for slots of rank 16, and the model that PEFT merges of each."""
    spec, found = load(folders[0]).spec, []
    for i in range(COUNT):
        folder = make_adapter(base, tmp_path_factory.mktemp(f"adapter{i}"), i, ALL if i % 2 else ("q_proj", "up_proj"))
        found.append((load_peft_folder(folder, spec, 16, torch.float32), merged(base, folder)))
    return found


def continuation(reference, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                             pad_token_id=0, eos_token_id=None)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def bench_of(model, adapters, count: int = 0, slots: int = 8, **engine) -> Bench:
    bench = Bench(model, adapter_slots=slots, adapter_rank=16, **engine)
    for i in range(count):
        bench.engine.inbox.put(PutAdapter(f"a{i}", adapters[i][0], token=i))
    return bench


def table_of(bench: Bench):
    return bench.engine.scheduler.memory.adapters


def versions_of(bench: Bench, name: str, index: int = 0) -> list[int]:
    """Of each token."""
    deltas = [event for event in bench.events if isinstance(event, Delta) and event.key[1] == name]
    marks = [delta for delta in deltas if delta.index == index][-1].adapter_versions
    ends = [*(at for at, _ in marks[1:]), len(bench.tokens(name, index))]
    return [version for (at, version), end in zip(marks, ends, strict=True) for _ in range(at, end)]


def greedy_is(reference, prompt: list[int], got: list[int]) -> None:
    """Each token is the likeliest, or within rounding of it, after those before."""
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *got]])).logits[0, len(prompt) - 1 : -1]
    best, took = logits.max(-1).values, logits[torch.arange(len(got)), torch.tensor(got)]
    assert len(got) > 0 and (best - took).max() < 1e-3


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
    bench.close()


def test_a_prefix_is_shared_within_an_adapter_and_never_across(model, base, adapters):
    bench = bench_of(model, adapters, 2, max_rows=4)
    prompt = prompt_of(30)
    for name, adapter in (("plain", None), ("one", "a0"), ("two", "a1"), ("one again", "a0"), ("plain again", None)):
        bench.submit(name, prompt, 8, adapter=adapter)
        bench.run()
        greedy_is(base if adapter is None else adapters[int(adapter[1])][1], prompt, bench.tokens(name))
    cached = {name: done.cached_tokens for name, done in bench.done.items()}
    assert cached == {"plain": 0, "one": 0, "two": 0, "one again": 28, "plain again": 28}
    bench.close()


def test_a_group_shares_the_prefill_of_its_adapter(model, adapters):
    bench = bench_of(model, adapters, 1)
    prompt = prompt_of(21)
    bench.submit("g", prompt, 10, n=4, adapter="a0")
    bench.run()
    for index in range(4):
        greedy_is(adapters[0][1], prompt, bench.tokens("g", index))
    assert bench.engine.scheduler.counters.cached_tokens == 3 * 20
    bench.close()


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
    assert table_of(bench).evicted == COUNT - 2
    bench.close()


def test_the_least_recently_used_adapter_loses_its_slot(model, adapters):
    bench = bench_of(model, adapters, 3, slots=2)
    for i, adapter in enumerate(("a0", "a1", "a0", "a2")):
        bench.submit(f"r{i}", prompt_of(5), 2, adapter=adapter)
        bench.run()
    resident = {status.name for status in bench.engine.status().adapters if status.resident}
    assert resident == {"a0", "a2"}
    bench.close()


def test_a_slot_is_not_written_while_a_step_in_flight_names_its_row(model, adapters):
    """The zombie's step is still to be committed: whoever wants its slot waits for that."""
    bench = bench_of(model, adapters, 2, slots=1, max_rows=2)
    bench.submit("a", prompt_of(6), 50, adapter="a0")
    while not bench.completions:
        bench.engine.tick()
        if bench.engine.pipeline.in_flight and bench.engine.scheduler.decoding:
            break
    (seq,) = bench.engine.scheduler.decoding
    assert seq.inflight_refs > 0
    slot, table = seq.adapter_slot, table_of(bench)
    bench.submit("b", prompt_of(6, 1), 5, adapter="a1")
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.engine._take_commands()
    assert seq.finalized and seq.inflight_refs > 0
    assert slot.refs == 1 and not table.ready(table.known["a1"]), "its slot is not to be had"
    assert slot.adapter is table.known["a0"]
    bench.run()
    assert slot.refs == 0 and slot.adapter is table.known["a1"]
    greedy_is(adapters[1][1], prompt_of(6, 1), bench.tokens("b"))
    bench.close()


def test_preempted_rows_go_on_with_their_adapter(model, adapters):
    bench = bench_of(model, adapters, 4, slots=3, max_rows=6, kv_pages=24, prefix_cache=False)
    prompts = [prompt_of(9, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 30, adapter=f"a{i % 4}")
    bench.run()
    assert bench.engine.scheduler.counters.preemptions > 0
    for i, prompt in enumerate(prompts):
        greedy_is(adapters[i % 4][1], prompt, bench.tokens(f"r{i}"))
        assert versions_of(bench, f"r{i}") == [0] * 30
    bench.close()


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_a_newer_version_is_taken_amid_the_run_and_told(model, base, adapters, kv_on_swap):
    bench = bench_of(model, adapters, 1, kv_on_swap=kv_on_swap)
    prompt = prompt_of(10)
    bench.submit("r", prompt, 40, stream_every=1, adapter="a0")
    bench.submit("other", prompt, 40)
    while len(bench.tokens("r")) < 9:
        bench.engine.tick()
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0], token=7, version=5))
    bench.run()
    assert Done(7) in bench.events
    versions, got = versions_of(bench, "r"), bench.tokens("r")
    before = versions.count(0)
    assert versions == [0] * before + [5] * (40 - before) and 9 <= before <= 12
    greedy_is(adapters[0][1], prompt, got[:before])
    if kv_on_swap == "recompute":  # all of it is of the new version then
        greedy_is(adapters[1][1], prompt + got[:before], got[before:])
    greedy_is(base, prompt, bench.tokens("other"))
    bench.submit("again", prompt, 8, adapter="a0")
    bench.run()
    greedy_is(adapters[1][1], prompt, bench.tokens("again"))
    whole = 8 if kv_on_swap == "recompute" else 0
    assert bench.done["again"].cached_tokens == whole, "KV of the old version, or of both, is nobody's prefix"
    assert versions_of(bench, "again") == [5] * 8
    bench.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_token_of_a_newer_version_is_the_one_that_is_told(model, adapters, depth):
    """Tokens that were in flight are of the version before."""
    said = []
    for newer in (False, True):
        bench = bench_of(model, adapters, 1, pipeline_depth=depth)
        bench.submit("r", prompt_of(10), 40, stream_every=1, adapter="a0")
        while len(bench.tokens("r")) < 9:
            bench.engine.tick()
        if newer:
            bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
        bench.run()
        said.append(bench.tokens("r"))
        versions = versions_of(bench, "r")
        bench.close()
    same = next(i for i, (old, new) in enumerate(zip(*said, strict=True)) if old != new)
    assert same >= 9 and versions == [0] * same + [1] * (40 - same)


def test_members_of_a_group_that_start_later_take_no_kv_of_the_older_version(model, adapters):
    bench = bench_of(model, adapters, 1, max_rows=2)
    prompt = prompt_of(15)
    bench.submit("g", prompt, 24, n=4, adapter="a0")
    while len(bench.engine.scheduler.decoding) < 2:
        bench.engine.tick()
    assert bench.engine.scheduler.memory.sharing, "the others are to take the prompt of the first"
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    for index in (2, 3):
        greedy_is(adapters[1][1], prompt, bench.tokens("g", index))
        assert versions_of(bench, "g", index) == [1] * 24
    bench.close()


def test_rows_go_on_while_an_adapter_is_copied(model, adapters):
    bench = bench_of(model, adapters, 2)
    bench.submit("a", prompt_of(6), 200, adapter="a0", stream_every=1)
    while not bench.tokens("a"):
        bench.engine.tick()
    copied = threading.Event()
    table_of(bench).loads.run(lambda: copied.wait(60))
    bench.submit("b", prompt_of(6, 1), 5, adapter="a1")
    begun = len(bench.tokens("a"))
    for _ in range(30):
        bench.engine.tick()
    assert len(bench.tokens("a")) > begun + 20 and bench.engine.scheduler.waiting == 1
    copied.set()
    bench.run()
    greedy_is(adapters[1][1], prompt_of(6, 1), bench.tokens("b"))
    bench.close()


def test_while_nothing_runs_the_loop_waits_for_a_copy_and_does_not_spin(model, adapters):
    bench = bench_of(model, adapters, 3, slots=1, max_rows=1)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(5), 4, adapter=f"a{i}")
    bench.run(ticks=60)
    bench.close()


def test_a_newer_version_of_an_adapter_that_rests_is_loaded_when_it_is_wanted(model, adapters):
    bench = bench_of(model, adapters, 1)
    for version in range(2):
        bench.submit(f"r{version}", prompt_of(10), 6, adapter="a0")
        bench.run()
        greedy_is(adapters[version][1], prompt_of(10), bench.tokens(f"r{version}"))
        bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
        bench.run()
    assert bench.engine.status().adapters[0].version == 2
    bench.close()


def test_sessions_go_on_with_their_adapter_alone(model, base, adapters):
    bench = bench_of(model, adapters, 2, prefix_cache=False)
    prompt = prompt_of(14)
    for name, adapter in (("1", "a0"), ("2", "a0"), ("3", "a1"), ("4", None)):
        bench.submit(name, prompt, 5, adapter=adapter, session=("c", "s"), session_lease_s=100.0)
        bench.run()
        prompt = [*prompt, *bench.tokens(name), 3]
    assert [bench.done[name].cached_tokens > 0 for name in "1234"] == [False, True, False, False]
    assert bench.engine.scheduler.memory.sessions.counts.hits == 1
    bench.close()


def test_a_turn_during_which_its_adapter_changed_leaves_nothing(model, adapters):
    bench = bench_of(model, adapters, 1, prefix_cache=False)
    session = {"session": ("c", "s"), "session_lease_s": 100.0, "adapter": "a0"}
    bench.submit("1", prompt_of(14), 30, **session)
    while not bench.engine.scheduler.decoding or len(bench.engine.scheduler.decoding[0].tokens) < 5:
        bench.engine.tick()
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    prompt = [*prompt_of(14), *bench.tokens("1"), 3]
    bench.submit("2", prompt, 6, **session)
    bench.run()
    assert bench.done["2"].cached_tokens == 0
    greedy_is(adapters[1][1], prompt, bench.tokens("2"))
    bench.close()


def test_a_turn_whose_last_step_is_of_the_version_before_leaves_nothing(model, adapters):
    """It has ended and its adapter has changed, but KV that the step in flight writes is of the old one."""
    bench = bench_of(model, adapters, 1, prefix_cache=False)
    session = {"session": ("c", "s"), "session_lease_s": 100.0, "adapter": "a0"}
    bench.submit("1", prompt_of(14), 30, **session)
    decoding = bench.engine.scheduler.decoding
    while not decoding or len(decoding[0].tokens) < 5 or not decoding[0].inflight_refs:
        bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "1")))
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    assert bench.engine.scheduler.memory.sessions.pages == 0
    prompt = [*prompt_of(14), *bench.tokens("1"), 3]
    bench.submit("2", prompt, 6, **session)
    bench.run()
    assert bench.done["2"].cached_tokens == 0
    greedy_is(adapters[1][1], prompt, bench.tokens("2"))
    bench.close()


@pytest.mark.parametrize("factor", [float("nan"), 1e30])
def test_an_adapter_that_is_no_good_harms_its_own_rows_alone(model, base, adapters, factor):
    """Also those that get its pages, in which there is no number, behind what they have written themselves."""
    bench = bench_of(model, adapters, 0, kv_pages=12, prefix_cache=False, max_rows=2)
    weights = adapters[1][0]
    parts = {place: (a * factor, b * factor) for place, (a, b) in weights.parts.items()}
    bench.engine.inbox.put(PutAdapter("bad", AdapterWeights(weights.rank, parts)))
    bench.submit("bad", prompt_of(30, 1), 8, adapter="bad")
    bench.run()
    assert bench.completions["bad", 0].finish.reason == "error"
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(21, i), 10)
    bench.run()
    for i in range(3):
        assert bench.completions[f"r{i}", 0].finish.reason == "length"
        greedy_is(base, prompt_of(21, i), bench.tokens(f"r{i}"))
    bench.close()


class Recorder:
    """The engine's side of a receiver that has one update."""

    def __init__(self, update: AdapterUpdate) -> None:
        self.updates, self.told = [update], []

    def take_ready(self) -> AdapterUpdate | None:
        return self.updates.pop() if self.updates else None

    def applied(self, update: AdapterUpdate, pause_s: float) -> None:
        self.told.append("applied")

    def failed(self, update: AdapterUpdate, message: str) -> None:
        self.told.append(message)


class BrokenStream:
    """Of a device that is gone."""

    def wait(self, event: object) -> None:
        raise RuntimeError("the device is gone")


def test_whoever_sent_an_adapter_hears_of_a_fault_and_the_one_before_is_served(model, adapters):
    recorder = Recorder(AdapterUpdate("a0", 9, 1, adapters[1][0]))
    bench = Bench(model, adapter_slots=2, adapter_rank=16, receiver=recorder)
    recorder.updates, held = [], recorder.updates
    bench.engine.inbox.put(PutAdapter("a0", adapters[0][0]))
    bench.submit("r", prompt_of(9), 50, adapter="a0")
    while not bench.engine.scheduler.decoding:
        bench.engine.tick()

    table_of(bench).compute = BrokenStream()
    recorder.updates = held
    with pytest.raises(RuntimeError):
        bench.engine.tick()
    assert len(recorder.told) == 1 and "the device is gone" in recorder.told[0], "or it would wait for ever"
    bench.engine.inbox.put(PutAdapter("a0", adapters[2][0], token=3))
    with pytest.raises(RuntimeError):
        bench.engine.tick()
    bench.engine.fail("a fault")
    (failed,) = [event for event in bench.events if isinstance(event, Failed)]
    assert (failed.token, failed.code) == (3, "internal")
    rebuild_engine(bench.engine, bench.settings)
    bench.submit("again", prompt_of(9), 6, adapter="a0")
    bench.run()
    greedy_is(adapters[0][1], prompt_of(9), bench.tokens("again"))
    assert versions_of(bench, "again") == [0] * 6
    bench.close()


def test_a_prompt_of_two_versions_is_shared_with_nobody(model, adapters):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("g", prompt, 8, n=2, adapter="a0")
    while not any(seq.kv_len for seq in bench.engine.scheduler.prefilling):
        bench.engine.tick()
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    greedy_is(adapters[1][1], prompt, bench.tokens("g", 1))
    bench.close()


def test_what_has_launched_nothing_takes_no_kv_of_the_older_version_along(model, adapters):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("before", prompt, 2, adapter="a0")
    bench.run()
    bench.submit("first", prompt_of(30, 1), 2)
    bench.submit("r", prompt, 8, adapter="a0")
    bench.engine.tick()
    seq = bench.engine.scheduler.prefilling[-1]
    assert seq.kv_len == 28 and not seq.row_ready, "it is admitted, with pages of the first"
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    greedy_is(adapters[1][1], prompt, bench.tokens("r"))
    bench.close()


def test_log_probs_of_a_prompt_are_of_one_version(model, adapters):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("r", prompt, 8, adapter="a0", prompt_logprobs=True)
    while not any(seq.kv_len for seq in bench.engine.scheduler.prefilling):
        bench.engine.tick()
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    with torch.no_grad():
        exact = adapters[1][1](torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = exact[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    told = torch.from_numpy(bench.completions["r", 0].prompt_logprobs)
    assert torch.allclose(told[1:], expected, atol=1e-3)
    bench.close()


def test_two_slots_in_flight_and_base_swaps_leave_adapters_alone(model, adapters):
    """Base weights change: KV of adapters is of the old ones, too."""
    bench = bench_of(model, adapters, 1)
    prompt = prompt_of(17)
    bench.submit("r0", prompt, 4, adapter="a0")
    bench.run()
    bench.engine.scheduler.weights_changed(3, recompute=False)
    bench.submit("r1", prompt, 4, adapter="a0")
    bench.run()
    assert bench.done["r1"].cached_tokens == 0
    assert bench.tokens("r0") == bench.tokens("r1") and versions_of(bench, "r1") == [0] * 4
    bench.close()


def test_an_engine_that_is_built_anew_knows_its_adapters(model, adapters):
    bench = bench_of(model, adapters, 2)
    bench.submit("lost", prompt_of(9), 50, adapter="a0")
    while not bench.engine.scheduler.decoding:
        bench.engine.tick()
    bench.engine.fail("a fault")
    rebuild_engine(bench.engine, bench.settings)
    assert [(status.name, status.resident) for status in bench.engine.status().adapters] == [
        ("a0", False),
        ("a1", False),
    ]
    for i in range(2):
        bench.submit(f"r{i}", prompt_of(9), 6, adapter=f"a{i}")
    bench.run()
    for i in range(2):
        greedy_is(adapters[i][1], prompt_of(9), bench.tokens(f"r{i}"))
    bench.close()


def test_what_cannot_be_done_is_said(model, adapters):
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
    assert Done(104) in bench.events and bench.engine.status().adapters == ()
    bench.close()


def test_other_requests_pay_nothing(model, adapters):
    """Steps without adapters are the same as in an engine that has none, bit for bit."""
    found = []
    for slots in (0, 4):
        bench = Bench(model, adapter_slots=slots)
        for i in range(3):
            bench.submit(f"r{i}", prompt_of(8, i), 10, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        found.append([bench.completions[f"r{i}", 0].logprobs for i in range(3)])
        assert (bench.engine.runner.rows.adapters is None) == (slots == 0)
        bench.close()
    assert found[0] == found[1]
