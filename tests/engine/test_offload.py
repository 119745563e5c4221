"""KV of preempted sequences goes to the host and comes back: the same tokens, and nothing computed twice."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from harness import Bench, Completion, load
from streams import InlineDevice, LateDevice, random_delays
from test_recomputed import replayed
from test_swap import Mailbox, Update

from rollout.engine.build import rebuild_engine
from rollout.engine.types import Cancel, StopAt

PAGE = 4


@pytest.fixture
def other(folders):
    return load(folders[1])


def offloading(model, host_pages: int = 512, piece_pages: int = 3, device=None, receiver=None, **engine) -> Bench:
    """An engine with room for so many pages on the host, copied so many at a time."""
    page_size = engine.setdefault("page_size", PAGE)
    page_bytes = model.spec.kv_bytes_per_token(torch.float32) * page_size
    fields = {"host_kv_gib": host_pages * page_bytes / 2**30, "host_kv_piece_mib": piece_pages * page_bytes / 2**20}
    return Bench(model, device, receiver, **{"kv_pages": 40, **fields, **engine})


def watch_prefills(bench: Bench) -> list[int]:
    """Gets the input tokens of every prefill step from now on."""
    sizes, launched = [], bench.engine.scheduler.launched
    bench.engine.scheduler.launched = lambda plan: (
        plan.kind == "prefill" and sizes.append(plan.tokens),
        launched(plan),
    )
    return sizes


def submit_six(bench: Bench, prompt_of) -> None:
    """More than the pool of 39 pages holds: 6 * 70 tokens."""
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60, sampling={"temperature": 1.0, "seed": i})


def counts(bench: Bench):
    return bench.engine.scheduler.memory.parking.counts


_undisturbed: dict[str, Completion] = {}  # of the first checkpoint, whose weights `model` has; made once


def assert_as_if_undisturbed(bench: Bench, model, prompt_of) -> None:
    if not _undisturbed:
        roomy = Bench(model, kv_pages=600)
        submit_six(roomy, prompt_of)
        roomy.run()
        roomy.close()
        _undisturbed.update({name: completion for (name, _), completion in roomy.completions.items()})
    for i in range(6):
        mine, theirs = bench.completions[f"r{i}", 0], _undisturbed[f"r{i}"]
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.raw_logprobs == pytest.approx(theirs.raw_logprobs, abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_offloaded_goes_on_where_it_was_and_computes_nothing_again(model, prompt_of, depth):
    bench = offloading(model, pipeline_depth=depth)
    prefills = watch_prefills(bench)
    submit_six(bench, prompt_of)
    bench.run()
    preemptions = bench.engine.scheduler.counters.preemptions
    assert preemptions > 0 and counts(bench).restored == counts(bench).parked == preemptions
    assert counts(bench).pages_out > 0 and counts(bench).pages_in > 0
    assert bench.engine.scheduler.counters.prompt_tokens == 6 * 10, "a return is no admission"
    assert sum(prefills) == 6 * 10 + preemptions, "each prompt once, and after a return the token that was drawn last"
    assert all(bench.completions[f"r{i}", 0].recomputed == () for i in range(6))
    bench.close()
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_the_tokens_are_transformers(model, prompt_of, greedy):
    bench = offloading(model)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    assert counts(bench).restored > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)
    bench.close()


@pytest.mark.parametrize("seed", range(4))
def test_late_streams_change_nothing(model, prompt_of, seed):
    rng = random.Random(seed)
    device = LateDevice({name: lambda: rng.random() * 0.001 for name in ("h2d", "compute", "d2h", "kv_out", "kv_in")})
    piece_pages = (1, 2, 7, 100)[seed]
    bench = offloading(model, piece_pages=piece_pages, device=device, pipeline_depth=1 + seed % 2)
    submit_six(bench, prompt_of)
    bench.run()
    assert counts(bench).restored > 0
    bench.close()
    assert_as_if_undisturbed(bench, model, prompt_of)


@pytest.mark.parametrize("direction", ["out", "back"])
def test_not_waiting_for_a_copy_is_seen(model, prompt_of, direction):
    """Pages that are given away before they are copied, rows that go on before their KV is there."""
    late = {"out": "kv_out", "back": "kv_in"}[direction]
    bench = offloading(model, device=LateDevice({late: lambda: 0.05}))
    lane = getattr(bench.engine.runner.mover, direction)

    def hasty():
        over = list(lane.flying)
        lane.flying.clear()
        lane._spare += over
        return over

    lane.landed, bench.engine.offload._note = hasty, lambda *of: None  # which asks when it ended
    submit_six(bench, prompt_of)
    bench.run()
    with pytest.raises(AssertionError):
        assert_as_if_undisturbed(bench, model, prompt_of)
    bench.close(check=False)


def test_what_is_brought_back_waits_for_the_steps_in_flight(model):
    """A page may be given back while a step in flight still copies from it."""
    bench = offloading(model, device=LateDevice({"compute": lambda: 0.05}))
    runner, mover, done = bench.engine.runner, bench.engine.runner.mover, []
    runner.compute.run(lambda: done.append("step"))
    copy, mover.back._copy = mover.back._copy, lambda *of: (done.append("copy"), copy(*of))
    mover.back.start([3], [5], None, mover.compute)
    mover.wait()
    assert done == ["step", "copy"] and len(mover.back.landed()) == 1
    bench.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_a_page_comes_back_as_it_was(model, kv_dtype):
    """Keys and values of all layers, scales of codes too; other pages are not touched."""
    page_bytes = model.spec.kv_bytes_per_token(torch.float8_e4m3fn if kv_dtype != "auto" else torch.float32) * 3
    bench = Bench(model, kv_pages=40, page_size=3, kv_dtype=kv_dtype, host_kv_gib=9 * page_bytes / 2**30)
    mover, tensors = bench.engine.runner.mover, bench.engine.runner.kv.tensors
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        noise = torch.randint(1, 100, tensor.shape, generator=generator)
        tensor.copy_(noise.to(tensor.dtype))
    before = [tensor.clone() for tensor in tensors]
    mover.out.start([7, 30, 2], [8, 0, 4], None)
    mover.wait()
    assert not mover.out.landed()[0].failure
    for tensor in tensors:
        tensor[[7, 30, 2]] = 0
    mover.back.start([11, 7], [8, 4], None, mover.compute)
    mover.wait()
    assert not mover.back.landed()[0].failure
    for tensor, was in zip(tensors, before, strict=True):
        was[11], was[7], was[30], was[2] = was[7].clone(), was[2].clone(), 0, 0
        assert torch.equal(tensor, was)
    bench.close()


def test_fp8_kv_goes_and_comes_with_its_scales(model, prompt_of):
    runs = []
    for host_kv_gib in (0.001, 0.0):
        bench = Bench(model, kv_pages=40 if host_kv_gib else 600, kv_dtype="fp8_e4m3", host_kv_gib=host_kv_gib)
        submit_six(bench, prompt_of)
        bench.run()
        assert not host_kv_gib or counts(bench).restored > 0
        runs.append([bench.tokens(f"r{i}") for i in range(6)])
        bench.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("host_pages", [1, 12])
def test_what_finds_no_room_is_computed_again(model, prompt_of, host_pages):
    bench = offloading(model, host_pages=host_pages)
    prefills = watch_prefills(bench)
    submit_six(bench, prompt_of)
    bench.run()
    preemptions = bench.engine.scheduler.counters.preemptions
    assert counts(bench).refused > 0 and counts(bench).parked + counts(bench).refused == preemptions
    assert counts(bench).restored == counts(bench).parked and (counts(bench).parked > 0) == (host_pages > 1)
    assert sum(prefills) > 60 + preemptions
    bench.close()
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_without_the_setting_there_is_nothing_of_it(model, prompt_of):
    bench = Bench(model, kv_pages=40)
    submit_six(bench, prompt_of)
    bench.run()
    engine = bench.engine
    assert engine.offload is None and engine.runner.mover is None and engine.scheduler.memory.parking is None
    assert engine.scheduler.counters.preemptions > 0 and engine.status().offload.pages_total == 0
    bench.close()


@pytest.mark.parametrize(("gib", "message"), [(1e-7, "holds no page of"), (1e6, "this machine has")])
def test_room_that_is_no_room_is_refused_with_the_numbers(model, gib, message):
    with pytest.raises(ValueError, match=message):
        Bench(model, host_kv_gib=gib)


# --- versions of weights ---


@pytest.mark.parametrize("late", [False, True])
def test_kept_kv_of_older_weights_stays_valid_on_the_host(model, other, prompt_of, hf_models, late):
    """Updates while sequences are parked: every token is that of the KV it had, which was never computed again."""
    mailbox = Mailbox()
    device = LateDevice({"kv_in": lambda: 0.003, "kv_out": lambda: 0.003}) if late else None
    bench = offloading(model, device=device, receiver=mailbox, prefill_chunk_tokens=256)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60, stream_every=3)
    while not counts(bench).parked:
        bench.engine.tick()
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored == counts(bench).parked > 0
    mixed = 0
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert completion.recomputed == ()
        assert replayed(hf_models, prompt, completion) == completion.token_ids
        mixed += len(set(completion.versions)) == 2 and bench.done[f"r{i}"].preemptions > 0
    assert mixed, "no sequence was parked across the update"
    bench.close()


def test_an_update_while_kv_comes_back_loses_nothing_of_it(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.05}), receiver=mailbox, prefix_cache=False)
    prompts = [prompt_of(10, i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60)
    coming = []
    while not coming:
        bench.engine.tick()
        coming = [seq for seq in bench.engine.scheduler.prefilling if seq.parked is not None and seq.parked.flying]
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored == counts(bench).parked
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert completion.recomputed == () and replayed(hf_models, prompt, completion) == completion.token_ids
    assert set(bench.completions[f"r{coming[0].group.key[1][1:]}", 0].versions) == {0, 1}
    bench.close()


def test_parked_kv_is_dropped_where_new_weights_compute_all_again(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = offloading(model, receiver=mailbox, kv_on_swap="recompute", prefill_chunk_tokens=256)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60, stream_every=3)
    while not counts(bench).parked:
        bench.engine.tick()
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert counts(bench).restored < counts(bench).parked
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert set(completion.versions) <= {0, 1} and len(completion.token_ids) == 60
        assert replayed(hf_models, prompt, completion) == completion.token_ids
    bench.close()


def test_an_interrupted_prefill_goes_on_or_begins_anew_under_new_weights(model, other, prompt_of, hf_models):
    """A long prompt, half of it computed, gives way; without an update it goes on where it was."""
    for update in (False, True):
        mailbox = Mailbox()
        bench = offloading(model, receiver=mailbox, kv_pages=60, prefill_chunk_tokens=8, max_rows=4)
        prefills = watch_prefills(bench)
        prompts = {f"r{i}": prompt_of(8, i) for i in range(3)} | {"long": prompt_of(150, 9)}
        for name, prompt in prompts.items():
            bench.submit(name, prompt, 20 if name == "long" else 60)
        while not counts(bench).parked:
            bench.engine.tick()
        (seq,) = bench.engine.scheduler.groups["c", "long"].sequences
        assert seq.parked is not None and 0 < seq.parked.kv_len < 150 and not seq.tokens
        if update:
            mailbox.ready = Update(1, other, model)
        bench.run()
        assert (sum(prefills) == 24 + 150) != update
        completion = bench.completions["long", 0]
        assert set(completion.versions) == {int(update)}
        assert replayed(hf_models, prompts["long"], completion) == completion.token_ids
        bench.close()


# --- whose turn it is ---


@pytest.mark.parametrize("early", [True, False])
def test_somebody_gives_way_before_pages_are_short(model, prompt_of, monkeypatch, early):
    """Every row that decodes has its page in time, though pages are copied before they are given to it."""
    if not early:
        monkeypatch.setattr("rollout.engine.shortage._SOON", 0)
    bench = offloading(model, device=InlineDevice(), page_size=16, kv_pages=21, prefill_chunk_tokens=256)
    scheduler, went_without = bench.engine.scheduler, 0
    launched = scheduler.launched

    def watched(plan):
        nonlocal went_without
        if plan.kind == "decode":
            due = [seq for seq in scheduler.decoding if seq.launched < seq.max_tokens]
            went_without += len(due) - len(plan.seqs)
        launched(plan)

    scheduler.launched = watched
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10 + 2 * i, i), 90)
    bench.run()
    assert counts(bench).restored == counts(bench).parked > 0
    assert (went_without == 0) == early
    bench.close()


# --- pages that several share ---


def test_shared_pages_stay_while_somebody_else_uses_them(model, prompt_of, greedy):
    bench = offloading(model, kv_pages=46)
    parking, sent = bench.engine.scheduler.memory.parking, []
    begin = parking.next_out

    def watched(most):
        places = begin(most)
        assert all(bench.engine.scheduler.memory.pool.refs[place.page] == 1 for place in places)
        sent.extend(places)
        return places

    parking.next_out = watched
    bench.submit("g", prompt_of(33), 50, n=4)
    while not parking.counts.parked:
        bench.engine.tick()
    victim = next(seq for seq in bench.engine.scheduler.groups["c", "g"].sequences if seq.parked is not None)
    assert all(place.page is not None and not place.going for place in victim.parked.places[:8]), "the prompt's pages"
    bench.run()
    assert parking.counts.restored == parking.counts.parked and sent
    assert all(bench.tokens("g", i) == greedy(prompt_of(33), 50) for i in range(4))
    bench.close()


def test_pages_that_only_parked_sequences_share_are_copied_once_when_others_need_them(model, prompt_of, greedy):
    """A group gives way altogether to a row that needs nearly the whole pool."""
    bench = offloading(model)
    prefills = watch_prefills(bench)
    parking, sent = bench.engine.scheduler.memory.parking, []
    begin = parking.next_out
    parking.next_out = lambda most: (places := begin(most), sent.extend((place, place.holders) for place in places))[0]
    bench.submit("g", prompt_of(32), 90, n=3)
    bench.submit("high", prompt_of(4, 1), 140, priority=1)
    bench.run()
    assert sum(holders > 1 for _, holders in sent) >= 8 and len({id(place) for place, _ in sent}) == len(sent)
    assert sum(prefills) == 32 + 2 + 4 + counts(bench).restored
    assert bench.tokens("high") == greedy(prompt_of(4, 1), 140)
    assert all(bench.tokens("g", i) == greedy(prompt_of(32), 90) for i in range(3))
    bench.close()


def test_pages_that_parked_sequences_are_left_alone_with_go_when_pages_are_short(model, prompt_of, greedy):
    """The last of a group that runs ends, and its prompt's pages stay; then somebody needs them who comes first."""
    bench = offloading(model)
    bench.submit("g", prompt_of(32), 90, n=3)
    bench.submit("high", prompt_of(4, 1), 140, priority=1)
    running = []
    while len(running) != 1:
        bench.engine.tick()
        running = [seq for seq in bench.engine.scheduler.groups["c", "g"].sequences if seq.parked is None]
    (last,) = running
    bench.engine.inbox.put(StopAt(("c", "g"), last.index, len(last.tokens), "enough"))
    bench.submit("next", prompt_of(68, 2), 2, priority=2)
    bench.run()
    assert list(bench.done)[0] == "next", "there is room for it before the other one ends"
    assert bench.tokens("high") == greedy(prompt_of(4, 1), 140)
    assert [len(bench.tokens("g", i)) == 90 for i in range(3)].count(True) == 2
    bench.close()


def test_what_comes_back_at_once_is_not_copied(model, prompt_of, greedy):
    """Pages that are still in the pool are taken back as they are."""
    bus = threading.Event()
    bench = offloading(model, device=LateDevice({"kv_out": lambda: (bus.wait(10), 0.0)[1]}), piece_pages=1)
    submitted = {f"r{i}": prompt_of(10, i) for i in range(4)}
    for name, prompt in submitted.items():
        bench.submit(name, prompt, 60)
    while not counts(bench).parked:
        bench.engine.tick()
    for name in ("r0", "r1", "r2"):
        bench.engine.inbox.put(Cancel(("c", name)))
    while not counts(bench).restored:
        bench.engine.tick()
    bus.set()
    bench.run()
    assert counts(bench).restored == 1 and counts(bench).pages_in == 0
    assert bench.tokens("r3") == greedy(submitted["r3"], 60)
    bench.close()


def test_a_prompt_that_came_back_is_found_by_others(model, prompt_of):
    bench = offloading(model)
    submit_six(bench, prompt_of)
    bench.run()
    assert counts(bench).pages_in > 0
    bench.submit("again", prompt_of(10, 5) + bench.tokens("r5")[:22], 4)
    bench.run()
    assert bench.done["r5"].preemptions > 0 and bench.done["again"].cached_tokens == 28
    bench.close()


# --- what else a row has ---


def test_settings_of_sampling_and_scores_come_back_with_a_row(model, prompt_of):
    """Counts for penalties, banned and biased tokens, masks and likeliest tokens are those of a row that stayed."""
    from test_constraints import SIZE, Cycle, X, Y

    sampling = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": ((5, 2.0),)}
    runs = []
    for pages in (40, 600):
        bench = offloading(model, kv_pages=pages)
        for i in range(5):
            stop = {"token_ids": (3,), "min_tokens": 55}
            fields = {"top_logprobs": 3} if i % 2 else {"constraint": Cycle([X, Y, SIZE])} if i == 4 else {}
            bench.submit(f"r{i}", prompt_of(10, i), 60, sampling={**sampling, "seed": i}, stop=stop, **fields)
        bench.run()
        assert (counts(bench).restored > 0) == (pages == 40)
        runs.append([bench.completions[f"r{i}", 0] for i in range(5)])
        bench.close()
    for tight, roomy in zip(*runs, strict=True):
        assert tight.token_ids == roomy.token_ids and tight.top_ids == roomy.top_ids
        assert tight.drawn_logprobs == pytest.approx(roomy.drawn_logprobs, abs=1e-4)


def test_a_turn_that_was_offloaded_leaves_its_kv_to_its_session(model, prompt_of, greedy):
    bench = offloading(model, prefix_cache=False)
    session = {"session": ("c", "talk"), "session_lease_s": 1e6}
    for i in range(3):
        bench.submit(f"t{i}", prompt_of(8, i), 50, **(session if i == 2 else {}))
    bench.run()
    assert counts(bench).restored > 0 and bench.done["t2"].preemptions > 0
    said = prompt_of(8, 2) + bench.tokens("t2") + prompt_of(5, 7)
    bench.submit("next", said, 9, **session)
    bench.run()
    assert bench.done["next"].cached_tokens == 57 and bench.tokens("next") == greedy(said, 9)
    bench.close()


def test_a_turn_that_ends_while_its_kv_comes_back_leaves_nothing(model, prompt_of, greedy):
    """Its pages are there, what should be in them is not."""
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.05}), prefix_cache=False)
    session = {"session": ("c", "talk"), "session_lease_s": 1e6}
    for i in range(3):
        bench.submit(f"t{i}", prompt_of(8, i), 50, **(session if i == 2 else {}))
    seq = None
    while seq is None or seq.parked is None or not seq.parked.flying:
        bench.engine.tick()
        (seq,) = bench.engine.scheduler.groups["c", "t2"].sequences
    bench.engine.inbox.put(Cancel(("c", "t2")))
    bench.run()
    said = prompt_of(8, 2) + bench.tokens("t2") + prompt_of(5, 7)
    bench.submit("next", said, 9, **session)
    bench.run()
    assert len(bench.tokens("t2")) > 8 and bench.tokens("next") == greedy(said, 9)
    bench.close()


# --- ends and faults ---


@pytest.mark.parametrize("extra", range(0, 24, 3))
def test_cancelling_at_any_moment_leaks_nothing(model, prompt_of, extra):
    """While pages go, while they come back, while a row waits: with copies that are late."""
    bench = offloading(model, device=LateDevice({"kv_out": lambda: 0.002, "kv_in": lambda: 0.004}), piece_pages=1)
    submit_six(bench, prompt_of)
    while not (counts(bench).restored if extra > 10 else counts(bench).parked):
        bench.engine.tick()
    for _ in range(extra % 12):
        bench.engine.tick()
    for i in range(5):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    bench.run()
    assert bench.completions["r5", 0].finish.reason == "length" and len(bench.tokens("r5")) == 60
    bench.close()


@pytest.mark.parametrize("where", ["device", "enqueue"])
@pytest.mark.parametrize("direction", ["out", "back"])
@pytest.mark.parametrize("piece", [0, 2])
def test_a_copy_that_fails_ends_in_computing_again(model, prompt_of, direction, where, piece):
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.001}))
    lane, left = getattr(bench.engine.runner.mover, direction), [piece]

    def failing(work):
        def run(*of):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("the bus is broken")
            work(*of)

        return run

    if where == "device":
        lane._copy = failing(lane._copy)
    else:
        lane.stream.run = failing(lane.stream.run)
    submit_six(bench, prompt_of)
    bench.run()
    assert "the bus is broken" in bench.engine.offload.failure
    assert counts(bench).restored < bench.engine.scheduler.counters.preemptions
    bench.close()
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_a_rebuilt_engine_parks_again_in_the_same_room(model, prompt_of, greedy):
    from test_recovery import fail_a_step

    bench = offloading(model, device=LateDevice({"kv_out": lambda: 0.005, "kv_in": lambda: 0.005}))
    submit_six(bench, prompt_of)
    while not counts(bench).parked:
        bench.engine.tick()
    message, room, parked = fail_a_step(bench), bench.engine.runner.mover.room, counts(bench).parked
    for i in range(6):
        completion = bench.completions[f"r{i}", 0]
        assert completion.finish is not None and completion.finish.error in (message, None)
    rebuild_engine(bench.engine, bench.settings)
    assert bench.engine.runner.mover.room is room and counts(bench).parked == parked
    for i in range(6):
        bench.submit(f"again{i}", prompt_of(10, i), 60)
    bench.run()
    assert counts(bench).restored > 0
    for i in range(6):
        assert bench.tokens(f"again{i}") == greedy(prompt_of(10, i), 60)
    bench.close()


def test_leaked_room_is_seen(model, prompt_of):
    bench = offloading(model)
    submit_six(bench, prompt_of)
    bench.run()
    bench.engine.scheduler.memory.parking._free.pop()
    with pytest.raises(AssertionError, match="host room"):
        bench.engine.check_integrity()
    bench.close(check=False)


# --- what is told of it ---


def test_status_and_gauges_count_what_was_moved(model, prompt_of):
    bench = offloading(model)
    submit_six(bench, prompt_of)
    while not counts(bench).parked:
        bench.engine.tick()
    status = bench.engine.status().offload
    assert status.sequences >= 1 and 0 < status.pages < status.pages_total == 512
    bench.run()
    status, page_bytes = bench.engine.status().offload, bench.engine.runner.mover.room.page_bytes
    assert (status.sequences, status.pages) == (0, 0)
    assert status.parked == status.restored == bench.engine.scheduler.counters.preemptions and status.refused == 0
    assert status.bytes_out == counts(bench).pages_out * page_bytes >= status.bytes_in > 0
    recent = bench.engine.offload.recent
    assert sum(move.pages for move in recent if move.direction == "out") == counts(bench).pages_out
    assert all(0 < move.pages <= 3 and move.start_s <= move.end_s for move in recent)
    bench.engine.set_gauges()
    report = bench.engine.meter.report()
    assert (report["kv/restores"], report["kv/offloaded_bytes"]) == (status.restored, status.bytes_out)
    assert (report["kv/brought_back_bytes"], report["kv/host_used_pct"]) == (status.bytes_in, 0)
    bench.close()


def test_waiting_for_pages_is_told_as_such(model, prompt_of):
    """The only row left is on the host: nothing can be launched before it is back."""
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.01}), piece_pages=1, prefix_cache=False)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    while not counts(bench).pages_out >= 4:
        bench.engine.tick()
    for i in range(3):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    bench.run()
    idle = bench.engine.meter.idle_seconds()
    assert counts(bench).pages_in >= 3 and idle["offload"] > 0
    bench.close()


# --- random schedules ---


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_leaks_nothing_and_changes_no_token(model, prompt_of, seed):
    """Groups, priorities, cancels, stops, sessions and late streams; every completion equals its run alone."""
    rng = random.Random(seed)
    jobs = {}
    for i in range(14):
        prompt = prompt_of(rng.choice([3, 4, 5, 23, 40]), rng.choice([1, 2, 3]))
        jobs[f"r{i}"] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 60),
            "n": (n := rng.choice([1, 1, 3])),
            "priority": rng.choice([0, 0, 1]),
            "sampling": {"temperature": rng.choice([0.0, 1.0]), "seed": i},
            "stop": {"token_ids": tuple(rng.sample(range(97), 2))},
            **({"session": ("c", f"s{i}"), "session_lease_s": 1e6} if n == 1 and rng.random() < 0.3 else {}),
        }
    lateness = rng.choice([0.0, 0.0005, 0.002])
    late = {name: lambda: rng.random() * lateness for name in ("compute", "d2h", "kv_out", "kv_in")}
    crowd = offloading(
        model,
        host_pages=rng.choice([8, 25, 300]),
        piece_pages=rng.choice([1, 2, 5]),
        device=LateDevice(late),
        max_rows=rng.choice([3, 5]),
        kv_pages=30,
        prefix_cache=rng.random() < 0.7,
        pipeline_depth=rng.choice([1, 2]),
        prefill_chunk_tokens=rng.choice([5, 16, 64]),
    )
    cancelled = set()
    for name, job in jobs.items():
        crowd.submit(name, **dict(job))
        for _ in range(rng.randint(0, 8)):
            crowd.engine.tick()
        if rng.random() < 0.15:
            cancelled.add(name)
            crowd.engine.inbox.put(Cancel(("c", name)))
    crowd.run()
    crowd.close()
    alone = Bench(model, max_rows=4, kv_pages=600, prefix_cache=False)
    for name, job in jobs.items():
        alone.submit(name, **{**job, "session": None})
        alone.run()
        for i in range(job["n"]):
            mine, theirs = crowd.tokens(name, i), alone.tokens(name, i)
            assert mine == (theirs[: len(mine)] if name in cancelled else theirs), name
    alone.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_updates_leave_every_token_to_the_kv_it_says_it_had(folders, hf_models, prompt_of, seed):
    rng = random.Random(100 + seed)
    models, mailbox = [load(folder) for folder in folders], Mailbox()
    model = load(folders[0])
    bench = offloading(
        model,
        host_pages=rng.choice([20, 300]),
        piece_pages=rng.choice([1, 4]),
        device=random_delays(seed, 0.001),
        receiver=mailbox,
        kv_on_swap=("keep", "recompute")[seed % 2],
        prefill_chunk_tokens=256,
    )
    prompts = {f"r{i}": prompt_of(rng.randint(3, 20), i) for i in range(7)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, rng.randint(30, 60), stream_every=4)
    for version in (1, 2, 3):
        for _ in range(rng.randint(10, 45)):
            bench.engine.tick()
        mailbox.ready = Update(version, models[version % 2], model)
    bench.run()
    assert counts(bench).parked > 0
    weights = {version: hf_models[version % 2] for version in range(4)}
    for name, prompt in prompts.items():
        assert replayed(weights, prompt, bench.completions[name, 0]) == bench.tokens(name)
    bench.close()
