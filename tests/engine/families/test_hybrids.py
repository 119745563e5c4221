"""Models with linear attention through the whole engine: tokens are transformers', whatever happens to their states."""

import functools
import random

import numpy as np
import pytest
import torch

from rollout.engine.build import rebuild_engine
from rollout.engine.inspect import Inspector
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel, StopAt
from tests.support.engine.adapted import bench_of, greedy_is, make_adapters
from tests.support.engine.conversation import Conversation
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load, watch_prefills
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.kv_shadow import KVShadow, follows
from tests.support.engine.replay import agrees, replayed
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import BROKEN_BUS, BrokenBus, LateDevice
from tests.support.engine.updated import Load, Updated
from tests.support.engine.updates import Mailbox, Update, boundary, swap_in_the_middle
from tests.support.kernels.grids import nightly
from tests.support.peft_adapters import ALL

VOCAB = 83
prompt_of = functools.partial(any_prompt, vocab=VOCAB)


@pytest.fixture
def model(hybrid):
    return load(hybrid()[0])


@pytest.fixture(scope="module")
def hf_models(hybrid):
    return [hybrid(seed=seed)[1] for seed in (0, 1)]


# --- steps ---


@pytest.mark.parametrize(
    ("stem", "pages"),
    [("Qwen3_5", 75), ("Qwen3Next", 75), *nightly(("Qwen3_5", 600), ("Qwen3_5Moe", 75), ("OlmoHybrid", 75))],
)
def test_greedy_tokens_equal_transformers(hybrid, stem, pages):
    folder, hf_model = hybrid(stem)
    bench = Bench(load(folder), max_rows=5, kv_pages=pages, prefill_chunk_tokens=23)
    lengths = (3, 50, 17, 31, 1, 8)
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", prompt_of(length, i), 60 + 5 * i, n=2 if i == 1 else 1)
        for _ in range(3):
            bench.engine.tick()  # the batch changes as they come and go
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 75)
    for i, length in enumerate(lengths):
        assert len(bench.tokens(f"r{i}")) == 60 + 5 * i
        assert agrees(hf_model, prompt_of(length, i), bench.completions[f"r{i}", 0])
    assert bench.tokens("r1", 1) == bench.tokens("r1", 0)


def test_200_tokens_equal_transformers(model, hf_models):
    bench = Bench(model, kv_pages=200)
    bench.complete("r", prompt_of(140), 200)
    assert agrees(hf_models[0], prompt_of(140), bench.completions["r", 0])


@pytest.mark.parametrize("damage", ["recurrent", "conv"])
def test_a_damaged_state_is_seen(model, hf_models, damage):
    bench = Bench(model)
    bench.submit("r", prompt_of(30), 60)
    bench.ticks(6)
    seq, executor = bench.engine.roster.groups["c", "r"].sequences[0], bench.engine.executor
    recurrent, conv = executor.step.kv.states.layers[0]
    executor.compute.run(lambda: (recurrent if damage == "recurrent" else conv)[seq.row].mul_(-3.0))
    bench.run()
    assert not agrees(hf_models[0], prompt_of(30), bench.completions["r", 0])


def greedy(hf_model, prompt: list[int], count: int) -> list[int]:
    """Transformers' greedy choice."""
    tokens = list[int]()
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(hf_model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens


# --- adapters ---


@pytest.fixture(scope="module")
def adapters(hybrid, tmp_path_factory):
    folder, hf_model = hybrid()
    linear = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    return make_adapters(hf_model, folder, tmp_path_factory, (linear, (*ALL, *linear)))


@pytest.mark.parametrize("pages", [60, *nightly(300)])
def test_rows_of_one_batch_are_each_what_peft_merges(model, hf_models, adapters, pages):
    """Groups share a prompt within an adapter and never across; preempted rows go on with their adapter."""
    bench = bench_of(model, adapters, 2, max_rows=8, kv_pages=pages, prefill_chunk_tokens=16)
    expected = {None: hf_models[0], "a0": adapters[0][1], "a1": adapters[1][1]}
    for name in expected:
        bench.submit(f"g-{name}", prompt_of(30), 30, n=2, adapter=name)
        bench.submit(f"r-{name}", prompt_of(9, 1), 40, adapter=name)
        bench.engine.tick()
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 60)
    for name, reference in expected.items():
        for index in range(2):
            greedy_is(reference, prompt_of(30), bench.tokens(f"g-{name}", index))
        greedy_is(reference, prompt_of(9, 1), bench.tokens(f"r-{name}"))
    assert len({tuple(bench.tokens(f"g-{name}")) for name in expected}) == 3, "an adapter changes what is said"


def test_a_snapshot_serves_its_adapter_alone(model, hf_models, adapters):
    bench = bench_of(model, adapters, 2)
    for name, adapter, cached in (("1", "a0", 0), ("2", "a1", 0), ("3", None, 0), ("4", "a0", 19)):
        bench.complete(name, prompt_of(20), 8, adapter=adapter)
        reference = hf_models[0] if adapter is None else adapters[int(adapter[1])][1]
        greedy_is(reference, prompt_of(20), bench.tokens(name))
        assert bench.done[name].cached_tokens == cached


# --- groups and known prefixes ---


@pytest.mark.parametrize("length", [1, 24, 25, *nightly(2, 21)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_computes_its_prompt_once(model, hf_models, length, prefix_cache):
    bench = Bench(model, prefix_cache=prefix_cache, prefill_chunk_tokens=16)
    sizes = watch_prefills(bench)
    bench.complete("g", prompt_of(length), 12, n=5)
    assert sum(sizes) == length + 4  # each follower computes the last token
    for i in range(5):
        assert agrees(hf_models[0], prompt_of(length), bench.completions["g", i])
    Inspector(bench.engine).set_gauges()
    assert bench.engine.meter.report()["state/snapshot_loads"] == (4 if length > 1 else 0)


def test_without_places_for_snapshots_every_member_computes_the_prompt(model, hf_models):
    bench = Bench(model, state_snapshots=0, kv_pages=300)
    sizes = watch_prefills(bench)
    bench.complete("g", prompt_of(40), 9, n=3)
    assert sum(sizes) == 3 * 40
    assert all(agrees(hf_models[0], prompt_of(40), bench.completions["g", i]) for i in range(3))


def test_a_prompt_that_begins_with_a_known_prompt_goes_on_from_its_snapshot(model, hf_models):
    bench = Bench(model)
    sizes = watch_prefills(bench)
    base = prompt_of(30, 1)
    for name, prompt, computed in (
        ("first", base, 30),
        ("equal", base, 1),
        ("longer", base + prompt_of(11, 2), 12),  # the last token of the first prompt again
        ("shorter", base[:20], 20),  # a state cannot be cut
        ("other", base[:29] + prompt_of(4, 3), 4),
        ("longest", base + prompt_of(11, 2) + prompt_of(3, 4), 4),
    ):
        sizes.clear()
        bench.complete(name, prompt, 9)
        assert sum(sizes) == computed, name
        assert agrees(hf_models[0], prompt, bench.completions[name, 0]), name


def test_equal_prompts_that_come_together_are_computed_once(model, hf_models):
    bench = Bench(model, prefill_chunk_tokens=8)
    sizes = watch_prefills(bench)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(50), 9)
    bench.complete("longer", prompt_of(50) + prompt_of(7, 1), 9)
    assert sum(sizes) == 50 + 3 + 8
    for i in range(4):
        assert agrees(hf_models[0], prompt_of(50), bench.completions[f"r{i}", 0])
    assert agrees(hf_models[0], prompt_of(50) + prompt_of(7, 1), bench.completions["longer", 0])


def test_the_cache_gives_up_snapshots_for_newer_ones_and_pages_for_rows(model, hf_models):
    bench = Bench(model, state_snapshots=3, kv_pages=40)
    sizes = watch_prefills(bench)
    for i in (0, 1, 2, 3, 3, 0):
        sizes.clear()
        name = f"r{len(bench.done)}"
        bench.complete(name, prompt_of(30, i), 9)
        assert agrees(hf_models[0], prompt_of(30, i), bench.completions[name, 0])
        assert sum(sizes) == (1 if name == "r4" else 30)
    bench.complete("large", prompt_of(100, 9), 50)  # takes nearly all pages
    assert agrees(hf_models[0], prompt_of(100, 9), bench.completions["large", 0])


# --- updates ---


@pytest.mark.parametrize("stem", ["Qwen3_5", *nightly("Qwen3Next")])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_swap_in_the_middle_gives_the_tokens_of_both_versions(hybrid, stem, mode):
    folders, hf_models = zip(*(hybrid(stem, seed) for seed in (0, 1)), strict=True)
    model, mailbox = load(folders[0]), Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap=mode, prefill_chunk_tokens=16)
    sizes = watch_prefills(bench)
    bench.submit("g", prompt_of(30), 40, n=3)
    bench.submit("r", prompt_of(45, 1), 40)
    swap_in_the_middle(bench, mailbox, Update(1, load(folders[1]), model), ticks=25)
    before = boundary(bench, "g")
    assert 5 < before < 40
    for name, index, prompt in (("g", 0, prompt_of(30)), ("g", 2, prompt_of(30)), ("r", 0, prompt_of(45, 1))):
        completion = bench.completions[name, index]
        assert replayed(hf_models, prompt, completion) == completion.token_ids
    assert replayed([hf_models[0]] * 2, prompt_of(30), bench.completions["g", 0]) != bench.tokens("g")
    if mode == "recompute":  # the prompt of the group once, as before the swap
        again = sum(len(bench.tokens("g", i)[: boundary(bench, "g", i)]) for i in range(3)) + boundary(bench, "r")
        assert sum(sizes) == 2 * (30 + 45) + 4 + again
    # No prompt goes on from a snapshot of the old weights.
    bench.complete("after", prompt_of(30), 9)
    assert agrees(hf_models[1], prompt_of(30), bench.completions["after", 0])


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_update_frees_the_places_of_old_snapshots(hybrid, mode):
    """No prompt can go on from them any more; the key of a snapshot has the version."""
    folders = [hybrid(seed=seed)[0] for seed in (0, 1)]
    model, mailbox = load(folders[0]), Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap=mode, state_snapshots=6)
    Conversation(bench, "s", prompt_of).say(12)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(20, i), 5)
    bench.run()
    snapshots = bench.engine.roster.allocator.prefixes.snapshots
    assert snapshots.used == 5
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.tick_until(lambda: mailbox.done)
    assert snapshots.used == 0


@pytest.mark.parametrize("stem", ["Qwen3_5", *nightly("Qwen3Next")])
@pytest.mark.parametrize("age", [0, 1])
def test_within_the_age_states_of_older_weights_are_used_after_an_update(hybrid, stem, age):
    """By the next turn of a session, by an equal prompt, and by members of a group."""
    folders, hf_models = zip(*(hybrid(stem, seed) for seed in (0, 1)), strict=True)
    model, mailbox = load(folders[0]), Mailbox()
    bench = Bench(model, receiver=mailbox, max_kv_age=age, state_snapshots=12, max_rows=3)
    shadow, talk = KVShadow(bench), Conversation(bench, "s", prompt_of)
    talk.say(21, 12)
    bench.complete("p", prompt_of(30, 5), 4)
    bench.submit("g", prompt_of(26, 6), 20, n=6)
    bench.ticks(6)
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.run()
    bench.submit("again", prompt_of(30, 5), 9)
    talk.say(4, 9)
    assert talk.reused == (32 if age else 0) and bench.done["again"].cached_tokens == (29 if age else 0)
    told = bench.completions["again", 0].kv_versions, bench.completions[talk.turn, 0].kv_versions
    assert told == ((((0, 0, 29),), ((0, 0, 32),)) if age else ((), ()))
    prompts = {("again", 0): prompt_of(30, 5), (talk.turn, 0): talk.said[:-9]}
    prompts |= {("g", i): prompt_of(26, 6) for i in range(6)}
    for name, prompt in prompts.items():
        done, versions = bench.completions[name], [slot.version for slot in shadow.of[name]]
        assert follows(hf_models, prompt, done.token_ids, versions[: len(prompt) + len(done.token_ids) - 1])
    assert (shadow.older > 29 + 32) == bool(age)
    mailbox.ready = Update(2, load(folders[0]), model)
    bench.run()
    assert talk.say(4, 9) and talk.reused == 0 and bench.completions[talk.turn, 0].kv_versions == ()


@pytest.mark.parametrize(("seed", "age"), [(3, 5), *nightly((1, 3), (2, 2), (4, 1))])
def test_no_state_older_than_the_bound_is_used_under_load(hybrid, seed, age):
    folders, hf_models = zip(*(hybrid(seed=which) for which in (0, 1)), strict=True)
    rng = random.Random(seed)
    run = Updated(load(folders[0]), [load(folder) for folder in folders], max_kv_age=age, kv_pages=60, max_rows=6,
                  state_snapshots=16, prefill_chunk_tokens=rng.choice((5, 64)))  # fmt: skip
    agents = Load(run, rng, prompt_of, 30)
    agents.go_on()
    agents.check(hf_models)
    run.bench.close()


# --- completions that go on, and that end early ---


def test_a_completion_continues_from_its_tokens(model, hf_models):
    bench = Bench(model)
    bench.complete("whole", prompt_of(30), 40)
    tokens = bench.tokens("whole")
    bench.complete("rest", prompt_of(30), 40, prior=Prior(np.array(tokens[:15], np.int32)))
    assert bench.tokens("rest") == tokens[15:]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_continues_from_its_tokens(model, hf_models, prefix_cache):
    """Each member goes on from the same tokens, after the snapshot of the prompt if its leader saved one."""
    bench = Bench(model, prefix_cache=prefix_cache, prefill_chunk_tokens=16)
    bench.complete("whole", prompt_of(30), 40)
    tokens = bench.tokens("whole")
    bench.complete("rest", prompt_of(30), 40, n=3, prior=Prior(np.array(tokens[:15], np.int32)))
    for i in range(3):
        assert bench.tokens("rest", i) == tokens[15:]


def test_a_turn_continues_from_its_tokens(model, hf_models):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(20)
    prompt = [*talk.said, *prompt_of(6, 7)]
    expected = greedy(hf_models[0], prompt, 12)
    in_session = {"session": ("c", "s"), "session_lease_s": 100.0}
    bench.complete("t", prompt, 12, prior=Prior(np.array(expected[:5], np.int32)), **in_session)
    assert bench.tokens("t") == expected[5:] and bench.done["t"].cached_tokens > 0
    bench.complete("next", [*prompt, *expected, 3], 9, **in_session)
    assert agrees(hf_models[0], [*prompt, *expected, 3], bench.completions["next", 0])
    assert bench.done["next"].cached_tokens == len(prompt) + 11


def test_logprobs_of_a_prompt_are_those_of_transformers(model, hf_models):
    """They need a forward of the whole prompt, also where a snapshot of it is known."""
    bench = Bench(model, prefill_chunk_tokens=16)
    for name in ("first", "again"):
        bench.complete(name, prompt_of(40), 5, prompt_logprobs=True)
        with torch.inference_mode():
            logits = hf_models[0](torch.tensor([prompt_of(40)])).logits[0]
        exact = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt_of(40))[1:, None])[:, 0]
        got = torch.tensor(bench.completions[name, 0].prompt_logprobs)[1:]
        assert torch.allclose(got, exact, atol=1e-4, rtol=0)
        assert agrees(hf_models[0], prompt_of(40), bench.completions[name, 0])


@pytest.mark.parametrize("ticks", [2, 3, 5, *nightly(1, 4, 6, 8)])
def test_cancelled_completions_leave_nothing_behind(model, hf_models, ticks):
    bench = Bench(model, prefill_chunk_tokens=16)
    bench.submit("g", prompt_of(40), 30, n=3)
    bench.submit("s", prompt_of(40), 30, session=("c", "s"), session_lease_s=1e6)
    bench.ticks(ticks)
    bench.engine.inbox.put(Cancel(("c", "g")))
    bench.engine.inbox.put(Cancel(("c", "s")))
    bench.run()
    bench.engine.check_integrity()
    bench.complete("next", prompt_of(40), 30)
    assert agrees(hf_models[0], prompt_of(40), bench.completions["next", 0])


# --- sessions ---


@pytest.mark.parametrize(("prefix_cache", "depth"), [(True, 2), (False, 1)])
def test_a_turn_goes_on_from_the_end_of_the_one_before(model, hf_models, prefix_cache, depth):
    bench = Bench(model, prefix_cache=prefix_cache, pipeline_depth=depth)
    sizes, talk = watch_prefills(bench), Conversation(bench, "s", prompt_of)
    for turn, new in enumerate((21, 6, 1, 17)):
        sizes.clear()
        tokens = talk.say(new)
        assert agrees(hf_models[0], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])
        assert sum(sizes) == new + (turn > 0)  # a completion that ends by length leaves its last token
        bench.complete(f"other{turn}", prompt_of(10, turn), 5)  # takes the row of the turn
    assert bench.status().sessions.hits == 3


def test_a_turn_that_ended_by_a_stop_string_goes_on_from_its_prompt(model, hf_models):
    """The tokens in flight are not the completion's, and the row's state has seen them."""
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.submit(20, 60)
    bench.ticks(20)
    bench.engine.inbox.put(StopAt(("c", talk.turn), 0, 10, "x"))
    bench.run()
    talk.ended()
    tokens = talk.say(5)
    assert agrees(hf_models[0], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])
    assert talk.reused >= 19


def test_sessions_give_up_places_to_groups(model, hf_models):
    bench = Bench(model, state_snapshots=4)
    talks = [Conversation(bench, name, prompt_of) for name in ("a", "bb", "ccc")]
    for talk in talks:
        talk.say(20)
    sizes = watch_prefills(bench)
    for i in range(2):
        bench.complete(f"g{i}", prompt_of(30, 50 + i), 9, n=3)
    assert sum(sizes) == 2 * (30 + 2)
    for talk in talks:
        tokens = talk.say(4)
        assert agrees(hf_models[0], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])


# --- sleeps and faults ---


def test_states_are_computed_again_after_a_sleep(model, hf_models):
    """The memory of rows and snapshots is given back; what it holds afterwards is read by nobody."""
    bench = Sleeping(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(20)
    bench.submit("g", prompt_of(30), 40, n=3)
    bench.ticks(15)
    assert bench.engine.roster.running == 3
    bench.sleep()
    assert not bench.pages.backed
    bench.wake()
    bench.run()
    for i in range(3):
        assert agrees(hf_models[0], prompt_of(30), bench.completions["g", i])
    tokens = talk.say(5)
    assert agrees(hf_models[0], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])


def test_an_engine_that_is_built_again_reads_no_state_from_before(model, hf_models):
    bench = Bench(model)
    bench.submit("a", prompt_of(30), 40, n=2)
    bench.ticks(9)
    fail_a_step(bench)
    for state in bench.engine.executor.step.kv.states.tensors:
        state.fill_(float("nan"))
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("b", prompt_of(30), 40, n=3)
    for i in range(3):
        assert agrees(hf_models[0], prompt_of(30), bench.completions["b", i])


# --- states on the host ---


def hosting(model, rows: int = 8, bench: type[Bench] = Bench, **options) -> Bench:
    """An engine with host memory for `rows` states, and as much for KV, which is enough."""
    each = model.spec.state_bytes(torch.float32)
    return bench(model, **{"host_kv_gib": 2 * rows * each / 2**30, "kv_pages": 40, "max_rows": 8, **options})


def submit_six(bench: Bench) -> None:
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)


def assert_six(bench: Bench, hf_model) -> None:
    for i in range(6):
        assert agrees(hf_model, prompt_of(10, i), bench.completions[f"r{i}", 0])


@pytest.mark.parametrize(("rows", "depth"), [(1, 2), (8, 1), (8, 2)])
def test_preempted_rows_go_on_with_their_states(model, hf_models, rows, depth):
    bench = hosting(model, rows, pipeline_depth=depth)
    submit_six(bench)
    bench.run()
    offload = bench.status().offload
    assert offload.restored >= 1 and offload.sequences == 0 and (offload.refused > 0) == (rows == 1)
    assert rows == 1 or bench.engine.roster.counters.prefilled_tokens == 6 * 10 + offload.restored
    assert_six(bench, hf_models[0])


@pytest.mark.parametrize("ticks", [50, 60, *nightly(45, 55, 65)])
def test_rows_that_end_while_their_states_are_copied_leave_nothing_behind(model, hf_models, ticks):
    bench = hosting(model, device=LateDevice({"state_out": lambda: 0.004, "state_in": lambda: 0.004}))
    submit_six(bench)
    bench.ticks(ticks)
    for i in (5, 4, 3):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    bench.run()
    for i in range(3):
        assert agrees(hf_models[0], prompt_of(10, i), bench.completions[f"r{i}", 0])


@pytest.mark.parametrize("direction", ["out", "in"])
def test_after_a_failed_copy_states_are_computed_again(model, hf_models, direction):
    bench = hosting(model, device=BrokenBus(f"state_{direction}"))
    submit_six(bench)
    bench.run()
    assert BROKEN_BUS in bench.engine.parts.tier.failure
    assert_six(bench, hf_models[0])


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_swap_while_states_are_on_the_host(hybrid, hf_models, mode):
    folders = [hybrid(seed=seed)[0] for seed in (0, 1)]
    model, mailbox = load(folders[0]), Mailbox()
    bench = hosting(model, receiver=mailbox, kv_on_swap=mode)
    submit_six(bench)
    for _ in range(500):
        bench.engine.tick()
        if bench.status().offload.sequences:
            break
    groups = bench.engine.roster.groups
    on_host = [i for i in range(6) if groups["c", f"r{i}"].sequences[0].kv.is_offloaded]
    assert on_host
    swap_in_the_middle(bench, mailbox, Update(1, load(folders[1]), model), ticks=1)
    for i in (0, *on_host):
        completion = bench.completions[f"r{i}", 0]
        assert replayed(hf_models, prompt_of(10, i), completion) == completion.token_ids


def test_states_sleep_on_the_host(model, hf_models):
    bench = hosting(model, bench=Sleeping, kv_pages=200)
    submit_six(bench)
    for _ in range(2):
        bench.ticks(14)
        assert bench.sleep().facts["parked"] == 6
        assert not bench.pages.backed
        bench.wake()
    bench.run()
    assert all(bench.completions[f"r{i}", 0].recomputed == () for i in range(6))
    assert_six(bench, hf_models[0])


def test_a_state_that_comes_back_to_the_row_of_a_turn_does_not_become_its_snapshot(model, hf_models):
    bench = hosting(model, rows=1, max_rows=1)
    talk = Conversation(bench, "s", prompt_of)
    bench.submit("r", prompt_of(10), 30)
    bench.ticks(9)
    bench.engine.roster.preempt(bench.engine.roster.decoding[0])
    talk.submit(12, priority=1)  # takes the only row, and ends in it
    bench.run()
    assert agrees(hf_models[0], prompt_of(10), bench.completions["r", 0])
    talk.ended()
    tokens = talk.say(5)
    assert agrees(hf_models[0], talk.said[: -len(tokens)], bench.completions[talk.turn, 0])


# --- what is not possible ---


def test_host_memory_that_holds_no_state_is_an_error_with_the_numbers(model):
    with pytest.raises(ValueError, match="host_kv_gib.*states of linear attention"):
        hosting(model, rows=0.4)


def test_memory_that_does_not_hold_the_states_is_an_error_with_the_numbers(model):
    with pytest.raises(ValueError, match=r"max_rows = 4000.*state_snapshots"):
        Bench(model, max_rows=4000, state_snapshots=50_000_000)
