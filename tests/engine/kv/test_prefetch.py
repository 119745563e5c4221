"""A prefetch brings known pages from the host before the turn; it takes no page from a row or a session."""

import random

import numpy as np
import pytest

from rollout.engine.messages.prompts import Prompt, TokenIds
from rollout.engine.messages.to_engine import Prefetch, PutAdapter
from rollout.engine.messages.to_service import Done, Failed
from tests.support.engine.adapted import make_adapters
from tests.support.engine.agents import Agents
from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench, load
from tests.support.engine.offloading import copies_pay, offloading
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import LateDevice
from tests.support.kernels.grids import nightly
from tests.support.peft_adapters import ALL


def host_of(bench: Bench):
    return copies_pay(bench).host


def push_out(bench: Bench, prompt_of) -> None:
    """Other requests take the whole pool."""
    for i in range(2 + bench.engine.roster.allocator.pool.total // 15):
        bench.complete(f"other{len(bench.done)}", prompt_of(60, 9000 + i), 1)


def prefetch(bench: Bench, prompt: list[int], adapter: str | None = None, salt: bytes = b"") -> int:
    """Ask, and wait until the copies have ended; returns what the answer says."""
    before = len(bench.events)
    bench.engine.inbox.put(Prefetch(Prompt((TokenIds(np.array(prompt, np.int32)),), salt=salt), adapter, 77))
    bench.run()
    (answer,) = (event for event in bench.events[before:] if isinstance(event, Done))
    assert answer.token == 77
    return int(answer.facts["tokens"])


@pytest.mark.parametrize("session", [True, False])
def test_what_was_prefetched_is_in_the_pool_when_the_turn_comes(model, prompt_of, greedy, session):
    bench = offloading(model, kv_pages=81)
    host = host_of(bench)
    talk = Conversation(bench, "s", prompt_of, session=session)
    talk.say(50)
    bench.engine.roster.allocator.sessions.evict_one()
    push_out(bench, prompt_of)
    fetched = host.counts.fetched
    assert prefetch(bench, [*talk.said, 1, 2, 3]) == 58
    assert host.counts.fetched > fetched
    fetched = host.counts.fetched
    assert talk.say(3) == greedy(talk.said[:-9], 9) and talk.reused == 58
    assert host.counts.fetched == fetched, "nothing was left to fetch"


def test_a_prefetch_of_what_is_there_or_unknown_copies_nothing(model, prompt_of):
    bench = offloading(model, kv_pages=81)
    host = host_of(bench)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(50)
    assert prefetch(bench, talk.said) == 58
    assert prefetch(bench, prompt_of(40, 5)) == 0
    assert prefetch(bench, talk.said, salt=b"other") == 0
    assert prefetch(bench, talk.said[:3]) == 0
    assert host.counts.fetched == 0
    bench.close()
    alone = Bench(model)
    alone.complete("r", prompt_of(33), 1)
    assert prefetch(alone, prompt_of(33)) == 33, "without host memory it says what is there"


def test_a_prefetch_takes_no_page_of_a_session_and_brings_what_fits(model, prompt_of):
    bench = offloading(model, kv_pages=81, session_share=1.0)
    host = host_of(bench)
    bench.complete("far", prompt_of(80, 1), 1)
    push_out(bench, prompt_of)
    near = Conversation(bench, "near", prompt_of)
    near.say(271)
    pages = bench.engine.roster.allocator.sessions.pages
    assert pages == 70
    assert prefetch(bench, prompt_of(80, 1)) == 40, "ten pages are left"
    assert bench.engine.roster.allocator.sessions.pages == pages and host.counts.fetched == 10
    near.say(3)
    assert near.reused == 279


def test_a_prefetch_brings_what_fits_without_pages_that_are_only_on_the_device(model, prompt_of):
    bench = offloading(model, kv_pages=81)
    host = host_of(bench)
    bench.complete("far", prompt_of(240, 1), 1)
    push_out(bench, prompt_of)
    pool = bench.engine.roster.allocator.pool
    assert (pool.available, pool.unseen) == (80, 40), "half of the pool is on the host, too"
    assert prefetch(bench, prompt_of(240, 1)) == 40 * 4 and host.counts.lost == 0
    assert prefetch(bench, prompt_of(240, 1)) == 60 * 4, "what was brought need not be copied again"


def test_rows_that_run_keep_a_page_each(model, prompt_of, greedy):
    bench = offloading(model, kv_pages=81)
    host_of(bench)
    bench.complete("far", prompt_of(60, 1), 1)
    push_out(bench, prompt_of)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(30, 40 + i), 40)
    bench.ticks(8)
    assert prefetch(bench, prompt_of(60, 1)) > 0
    assert [bench.tokens(f"r{i}") for i in range(3)] == [greedy(prompt_of(30, 40 + i), 40) for i in range(3)]
    assert bench.engine.roster.counters.preemptions == 0


def test_what_an_adapter_computed_is_prefetched_for_it_alone(model, hf_models, folders, prompt_of, tmp_path_factory):
    ((weights, _),) = make_adapters(hf_models[0], folders[0], tmp_path_factory, [ALL])
    bench = offloading(model, kv_pages=81, adapter_slots=1, adapter_rank=16)
    host = host_of(bench)
    bench.engine.inbox.put(PutAdapter("a0", weights))
    prompt = prompt_of(41, 5)
    bench.complete("a", prompt, 1, adapter="a0")
    push_out(bench, prompt_of)
    fetched = host.counts.fetched
    assert prefetch(bench, prompt) == 0 and host.counts.fetched == fetched
    assert prefetch(bench, prompt, "a0") >= 40 and host.counts.fetched > fetched


def test_a_worker_that_sleeps_or_lacks_the_adapter_says_so(model, prompt_of):
    bench = Sleeping(model)
    prompt = Prompt.of_tokens(np.array(prompt_of(9), np.int32))
    assert isinstance(bench.sleep(), Done)
    asleep = bench.obeyed(bench.order(Prefetch, prompt, None))
    assert isinstance(asleep, Failed) and asleep.code == "unavailable"
    assert isinstance(bench.wake(), Done)
    lacks = bench.obeyed(bench.order(Prefetch, prompt, "none"))
    assert isinstance(lacks, Failed) and (lacks.field, lacks.code) == ("adapter", "bad_request")


# --- everything together ---


@pytest.fixture(scope="module")
def undisturbed(folders) -> Agents:
    """Agents that never ran short of pages."""
    bench = Bench(load(folders[0]), kv_pages=1000)
    agents = Agents(bench)
    agents.run()
    bench.close()
    return agents


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 12))])
def test_prefetches_and_leases_change_no_token(model, undisturbed, seed):
    """Random ones, while agents with too few pages and late copies work; afterwards nothing has leaked."""
    rng, rng_late = random.Random(seed), random.Random(seed)
    most_s = rng.choice([0.0, 0.002])
    late = {name: lambda: rng_late.random() * most_s for name in ("compute", "d2h", "kv_out", "kv_in")}
    pages = {"kv_pages": rng.choice([70, 110]), "max_rows": rng.choice([2, 8])}
    bench = offloading(model, rng.choice([20, 80, 600]), 3, LateDevice(late), **pages)
    host = host_of(bench)

    class Asking(Agents):
        def fields_of(self, agent: int) -> dict[str, object]:
            return {**super().fields_of(agent), "lease_s": rng.choice([0.0, 0.01, 1e6])}

        def tick(self) -> None:
            if rng.random() < 0.1:
                said = np.array(rng.choice(self.said), np.int32)
                bench.engine.inbox.put(Prefetch(Prompt.of_tokens(said[: rng.randint(1, len(said))]), None, 1))
            super().tick()

    agents = Asking(bench, sessions=seed % 2 == 0)
    agents.run()
    assert agents.said == undisturbed.said
    for mine, theirs in zip(agents.logprobs, undisturbed.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert seed or host.counts.fetched > 0
