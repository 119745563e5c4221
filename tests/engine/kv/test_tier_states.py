"""States of linear attention in host memory: agents of hybrid models come back and compute little twice."""

import functools
import random
import time
from pathlib import Path

import pytest
import torch

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_service import Done
from tests.support.engine.agents import Agents
from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.offloading import PAGE, copies_pay
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import BROKEN_BUS, BrokenBus, InlineDevice, LateDevice, random_delays
from tests.support.engine.updated import Load, Updated
from tests.support.engine.updates import Mailbox
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.hybrids import make_hybrid

SMALL = 84  # pages: a third of what the agents hold
VOCAB = 83
prompt_of = functools.partial(any_prompt, vocab=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("hybrid")
    make_hybrid("Qwen3_5", made, 0)
    return made


@pytest.fixture
def model(folder):
    return load(folder)


def played(bench: Bench, **fields) -> Agents:
    agents = Agents(bench, count=6, turns=3, prompt_of=prompt_of, **fields)
    agents.run()
    return agents


def hosting(model, device=None, receiver=None, states: int = 100, make=Bench, **engine) -> Bench:
    """An engine with host memory for so many states, and as much for KV."""
    host_gib = 2 * states * model.spec.state_bytes(torch.float32) / 2**30
    fields = {"kv_pages": SMALL, "host_kv_gib": host_gib, "page_size": PAGE, "max_rows": 8, "state_snapshots": 8}
    bench = make(model, device, receiver, **{**fields, **engine})
    copies_pay(bench)
    return bench


def on_disk(model, folder: Path, states: int) -> Bench:
    """An engine with room for so many states on the host, and for all on disk, where nothing comes too late."""
    bench = hosting(model, InlineDevice(), states=states, disk_kv_gib=0.05, disk_kv_folder=str(folder))
    tick = bench.engine.tick
    bench.engine.tick = lambda: (tick(), written(bench))
    return bench


def written(bench: Bench) -> None:
    """Wait until all that leaves the host is written."""
    tier, until_s = bench.engine.parts.tier.known, time.perf_counter() + 20
    while any(host.short or host.disk.writing for host in (tier.host, tier.states)) and time.perf_counter() < until_s:
        tier.use_disk()
        time.sleep(0.001)


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Agents that never ran short of pages or of places, by seed, and with sessions or without."""
    made: dict[tuple[int, bool], Agents] = {}

    def agents(seed: int, sessions: bool) -> Agents:
        if (seed, sessions) not in made:
            bench = Bench(load(folder), kv_pages=1500, page_size=PAGE, max_rows=8, state_snapshots=100)
            made[seed, sessions] = played(bench, seed=seed, sessions=sessions)
            bench.close()
        return made[seed, sessions]

    return agents


def assert_equal(mine: Agents, theirs: Agents) -> None:
    assert mine.said == theirs.said
    for some, others in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert some == pytest.approx(others, abs=2e-4)


@pytest.mark.parametrize("sessions", [False, True])
def test_agents_of_a_hybrid_find_their_states_on_the_host(model, undisturbed, sessions):
    bench = hosting(model, InlineDevice())
    agents = played(bench, sessions=sessions)
    states = bench.engine.parts.tier.known.states
    assert states.kept > 8 and bench.engine.parts.tier.known.host.counts.fetched > 0
    assert agents.computed <= 1.2 * undisturbed(0, sessions).computed
    bench.close()
    assert_equal(agents, undisturbed(0, sessions))


def test_without_host_memory_they_compute_them_again(model, undisturbed):
    bench = Bench(model, kv_pages=SMALL, page_size=PAGE, max_rows=8, state_snapshots=8)
    agents = played(bench, sessions=True)
    assert agents.computed > 1.3 * undisturbed(0, True).computed
    bench.close()
    assert_equal(agents, undisturbed(0, True))


@pytest.mark.parametrize("sessions", [False, True])
def test_agents_of_a_hybrid_find_on_disk_what_the_host_has_no_room_for(model, undisturbed, tmp_path, sessions):
    bench = on_disk(model, tmp_path, states=3)
    tier = bench.engine.parts.tier.known
    agents = played(bench, sessions=sessions)
    assert tier.states.counts.disk_read > 0 and tier.host.counts.disk_read > 0
    without = hosting(model, InlineDevice(), states=3)
    alone = played(without, sessions=sessions)
    assert agents.computed < 0.9 * alone.computed
    bench.close(), without.close()
    assert_equal(agents, undisturbed(0, sessions))
    assert list(tmp_path.iterdir()) == [], "the files are deleted"


def spoil(path: Path, how: str) -> None:
    if how == "lost":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("how", "of"), checkered(["whole", "lost", "flipped"], ["states", "pages"]))
def test_a_conversation_goes_on_from_its_state_on_disk_or_is_computed(model, tmp_path, how, of):
    bench, roomy = on_disk(model, tmp_path, states=12), Bench(model, kv_pages=1500, page_size=PAGE)
    talk, other = (Conversation(some, "talk", prompt_of) for some in (bench, roomy))
    for some in (talk, other):
        some.say(50)
    for salt in (500, 600, 700):
        crowd_out(bench, salt)
    tier = bench.engine.parts.tier.known
    books = tier.states if of == "states" else tier.host
    for path in (path for path in tmp_path.glob("*/*") if path.name != "lock"):
        if how != "whole" and (path.stat().st_size > 100 + 2 * tier.host.page_bytes) == (of == "states"):
            spoil(path, how)
    for some in (talk, other):
        some.say(7)
    assert talk.reused == (58 if how == "whole" else 0) and talk.said == other.said
    failed = books.counts.disk_failed
    assert (failed > 0) == (how != "whole")
    bench.engine.fail("a fault")
    rebuild_engine(bench.engine, bench.settings)
    assert bench.status().kept.disk_failed == failed, "totals go on"
    bench.close(), roomy.close()


@pytest.mark.parametrize("seed", [1, *nightly(0, *range(2, 20))])
def test_late_copies_change_nothing(model, undisturbed, tmp_path, seed):
    rng, rng_late = random.Random(seed), random.Random(seed)
    most_s = rng.choice([0.0, 0.001, 0.004])
    names = ("compute", "d2h", "kv_out", "kv_in", "state_out", "state_in")
    bench = hosting(
        model,
        LateDevice({name: lambda: rng_late.random() * most_s for name in names}),
        states=rng.choice([2, 9, 100]),
        kv_pages=rng.choice([60, SMALL]),
        max_rows=rng.choice([2, 8]),
        pipeline_depth=1 + seed % 2,
        prefill_chunk_tokens=rng.choice([7, 64]),
        state_snapshots=rng.choice([2, 5, 8]),
        **rng.choice([{}, {"disk_kv_gib": rng.choice([0.0003, 0.01]), "disk_kv_folder": str(tmp_path)}]),
    )
    sessions = rng.random() < 0.7
    agents = played(bench, sessions=sessions, seed=seed % 3)
    bench.close()
    assert_equal(agents, undisturbed(seed % 3, sessions))


@pytest.mark.parametrize(("seed", "age"), [(0, 9), *nightly((1, 4), (2, 2), (3, 9))])
def test_no_state_older_than_the_bound_comes_from_the_host(folder, tmp_path, seed, age):
    rng = random.Random(seed)
    hf_models = make_hybrid("Qwen3_5", tmp_path / "0", 0), make_hybrid("Qwen3_5", tmp_path / "1", 1)
    sources = [load(tmp_path / "0"), load(tmp_path / "1")]
    fields = {"kv_pages": 45, "max_rows": 6, "state_snapshots": 3, "device": random_delays(seed, 0.001)}
    run = Updated(load(tmp_path / "0"), sources, make=hosting, max_kv_age=age, **fields)
    agents = Load(run, rng, prompt_of, 20)
    agents.go_on(lambda: run.bench.engine.parts.tier.known.states.counts.fetched > 0)
    agents.check(hf_models)
    run.bench.close()


def crowd_out(bench: Bench, salt: int = 500) -> None:
    """Requests that take the pages and places of all that was before, first one at a time."""
    for i in range(20):
        bench.submit(f"crowd{salt}{i}", prompt_of(100, salt + i), 2)
        if i < 8 or i % 3 == 2:
            bench.run()
    bench.run()


@pytest.mark.parametrize("session", [True, False])
def test_a_conversation_goes_on_from_its_state_on_the_host(model, session):
    bench, roomy = hosting(model), Bench(model, kv_pages=1500, page_size=PAGE)
    talk, other = (Conversation(some, "talk", prompt_of, session) for some in (bench, roomy))
    for some in (talk, other):
        some.say(50)
    crowd_out(bench)
    assert bench.status().sessions.evicted == session
    tier = bench.engine.parts.tier.known
    before = tier.host.counts.fetched
    for some in (talk, other):
        some.say(7)
    assert tier.host.counts.fetched - before >= 12
    assert talk.reused == (58 if session else 49)
    assert talk.said == other.said
    bench.close(), roomy.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_does_not_wait_for_what_a_fetch_brings_meanwhile(model, level):
    """The state that it brings is a cached snapshot with a half-full page, which nobody else would give up."""
    bench = hosting(model, receiver=Mailbox(), make=Sleeping)
    talk = Conversation(bench, "talk", prompt_of, session=False)
    talk.say(50)
    crowd_out(bench)
    talk.submit(7)
    bench.tick_until(lambda: bench.engine.parts.tier.known.fetches.busy)
    assert isinstance(bench.sleep(level), Done) and isinstance(bench.wake(), Done)
    bench.close(check=False)


@pytest.mark.parametrize(("direction", "piece"), checkered(["out", "in"], [0, 4]))
def test_a_state_copy_that_fails_ends_in_computing_again(model, undisturbed, direction, piece):
    bench = hosting(model, BrokenBus(f"state_{direction}", piece))
    agents = played(bench, sessions=True)
    tier = bench.engine.parts.tier.known
    assert BROKEN_BUS in bench.engine.parts.tier.failure and tier.states.kept == tier.host.kept == 0
    bench.close()
    assert_equal(agents, undisturbed(0, True))


def test_rows_that_are_preempted_take_the_room_of_kept_states(model):
    bench = hosting(model, states=4, max_rows=4)
    tier = bench.engine.parts.tier.known
    crowd_out(bench)
    assert tier.states.kept == 4
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(60, i), 80)
    bench.run()
    counts = bench.engine.parts.tier.offload.counts
    assert counts.restored == counts.offloaded > 0


def test_an_engine_without_a_prefix_cache_keeps_no_states(model):
    bench = hosting(model, prefix_cache=False, receiver=Mailbox())
    crowd_out(bench)
    assert bench.engine.parts.tier.known.states.kept == 0
