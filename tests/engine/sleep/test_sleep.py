"""An engine that gives its memory back and has it again: the tokens of one that never slept, and nothing stale."""

import time

import pytest

from rollout.engine.messages.to_engine import Cancel, Sleep
from rollout.engine.messages.to_service import Done, Failed, Rejected
from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import load
from tests.support.engine.sleeping import Sleeping, outcome, submit_some
from tests.support.engine.streams import LateDevice, random_delays
from tests.support.engine.updates import Mailbox, Update


@pytest.mark.parametrize("depth, late", [(1, False), (2, False), (2, True)])
def test_tokens_are_those_of_a_run_that_never_slept(model, never_slept, prompt_of, depth, late):
    bench = Sleeping(model, random_delays(3) if late else None, pipeline_depth=depth)
    submit_some(bench, prompt_of)
    for ticks in (0, 1, 4, 9, 30):
        bench.ticks(ticks)
        answer = bench.sleep()
        assert isinstance(answer, Done) and answer.facts["level"] == 1
        engine = bench.engine
        assert engine.pipeline.in_flight == engine.roster.running == engine.roster.allocator.pool.used == 0
        assert not bench.pages.backed and not engine.busy
        bench.ticks(3)
        assert isinstance(bench.wake(), Done) and len(bench.pages.backed) == len(bench.pages.spans)
    bench.run()
    assert outcome(bench) == never_slept
    assert any(done.recomputed for done in bench.completions.values())
    assert {version for done in bench.completions.values() for version in done.versions} == {0}


def test_rows_whose_kv_is_on_the_host_or_on_its_way_have_the_tokens_of_a_run_that_never_slept(folders, prompt_of):
    tokens = []
    for sleeps in (False, True):
        delays = LateDevice({"kv_out": lambda: 0.002, "kv_in": lambda: 0.002})
        bench = Sleeping(load(folders[0]), delays, kv_pages=50, host_kv_gib=0.001, host_kv_piece_mib=0.004)
        for i in range(6):
            bench.submit(f"r{i}", prompt_of(12, i), 90, sampling={"temperature": 1.0, "seed": i})
        tier, wanted = bench.engine.parts.tier, ["out", "back", "parked"] if sleeps else []
        while bench.engine.busy or not bench.done:
            bench.engine.tick()
            flying = {"out": tier.mover.out.under_way, "back": tier.mover.back.under_way}
            now = {**flying, "parked": not any(flying.values()) and tier.offload.status().sequences}
            if wanted and now[wanted[0]]:
                wanted.pop(0)
                assert isinstance(bench.sleep(), Done)
                assert not tier.moving and bench.engine.roster.allocator.pool.used == 0
                assert bench.wake().facts["parked"] == tier.offload.status().sequences > 1
        assert not wanted, "it slept in each of these states"
        assert not any(done.recomputed for done in bench.completions.values())
        tokens.append([bench.tokens(f"r{i}") for i in range(6)])
        bench.close()
    assert tokens[0] == tokens[1]


def test_the_answer_to_a_sleep_has_its_figures(model, prompt_of):
    bench = Sleeping(model)
    assert bench.status().sleep is None
    bench.submit("a", prompt_of(9), 5)
    token = bench.order(Sleep, 1)
    bench.engine.tick()
    assert bench.status().state == "asleep", "from the moment on at which it is asked to"
    answer = bench.obeyed(token) if bench.answer(token) is None else bench.answer(token)
    assert set(answer.facts) == {"level", "bytes", "seconds", "parked"} and answer.facts["seconds"] > 0
    status = bench.status()
    assert (status.sleep.level, status.sleep.requests) == (1, "wait") and status.sleep.age_s > 0
    assert (status.state, status.queue_waiting, status.rows_running) == ("asleep", 1, 0)
    woken = bench.wake()
    assert woken.facts["level"] == 1 and woken.facts["bytes"] == bench.sleeper.memory.nbytes
    assert bench.status().sleep is None and bench.status().state == "serving"
    bench.run()


# --- nothing stale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_no_prefix_and_no_session_outlives_a_sleep(model, folders, prompt_of, greedy, level):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    talk = Conversation(bench, "talk", prompt_of)
    talk.say(20)
    bench.complete("first", prompt_of(33), 5)
    bench.complete("cached", prompt_of(33), 5)
    assert bench.done["cached"].cached_tokens == 32
    bench.sleep(level)
    pool = bench.engine.roster.allocator.pool
    assert (pool.free, pool.cached) == (pool.total, 0) and bench.engine.roster.allocator.sessions.pages == 0
    bench.wake()
    if level == 2:
        mailbox.ready = Update(1, load(folders[1]), model)
    bench.submit("after", prompt_of(33), 5)
    tokens = talk.say(7)
    assert talk.reused == bench.done["after"].cached_tokens == 0
    which = 0 if level == 1 else 1
    assert bench.tokens("after") == greedy(prompt_of(33), 5, which)
    assert tokens == greedy(talk.said[: -len(tokens)], 9, which)
    tokens = talk.say(7)
    assert talk.reused > 30 and tokens == greedy(talk.said[: -len(tokens)], 9, which), "sessions go on after it"
    talk.bench.engine.roster.allocator.sessions.end("c")


def test_a_group_whose_members_wait_for_the_prompt_computes_it_anew(model, prompt_of, greedy):
    bench = Sleeping(model, max_rows=2, prefix_cache=False)
    bench.submit("a", prompt_of(30), 12, n=5)
    bench.ticks(4)
    assert bench.engine.roster.allocator.sharing
    bench.sleep()
    assert not bench.engine.roster.allocator.sharing
    bench.wake()
    bench.run()
    assert all(bench.tokens("a", i) == greedy(prompt_of(30), 12) for i in range(5))


def test_prompt_logprobs_and_tops_are_those_of_a_run_that_never_slept(model, prompt_of):
    runs = []
    for sleeps in (False, True):
        bench = Sleeping(model, prefill_chunk_tokens=16)
        bench.submit("a", prompt_of(60), 12, prompt_logprobs=True, logprobs=3)
        bench.ticks(3)
        if sleeps:
            bench.sleep(), bench.wake()
        bench.run()
        done = bench.completions["a", 0]
        runs.append((done.token_ids, done.top_ids, done.prompt_logprobs[1:].tolist()))
        bench.close()
    assert runs[0][:2] == runs[1][:2] and runs[0][2] == pytest.approx(runs[1][2], abs=1e-4)


# --- level 2 ---------------------------------------------------------------------------------------------------------


def test_after_level_2_nothing_is_generated_before_a_whole_update_came(model, folders, prompt_of, greedy):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    bench.submit("row", prompt_of(13), 30)
    bench.ticks(8)
    assert bench.sleep(2).facts["level"] == 2
    bench.submit("waits", prompt_of(9), 6)
    assert isinstance(bench.wake(), Done)
    bench.ticks(5)
    status = bench.status()
    assert status.state == "stale" and "publish a whole update" in status.stale
    assert bench.engine.pipeline.in_flight == 0 and not bench.engine.busy and bench.engine.gate.dropped
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.run()
    assert bench.status().state == "serving" and not bench.engine.gate.dropped
    assert bench.tokens("waits") == greedy(prompt_of(9), 6, 1)
    tokens, versions = bench.tokens("row"), bench.completions["row", 0].versions
    k = versions.index(1)
    assert 0 < k < 30 and set(versions) == {0, 1} and tokens[:k] == greedy(prompt_of(13), k)
    assert tokens[k:] == greedy(prompt_of(13) + tokens[:k], 30 - k, 1)


def test_the_same_weights_again_give_the_tokens_of_a_run_that_never_slept(model, folders, never_slept, prompt_of):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    submit_some(bench, prompt_of)
    for ticks in (4, 9):
        bench.ticks(ticks)
        bench.sleep(2)
        bench.wake()
        mailbox.ready = Update(0, load(folders[0]), model)
    bench.run()
    assert outcome(bench) == never_slept
    assert bench.engine.meter.report()["weights/version"] == 0


def test_the_pause_of_an_update_is_its_own_not_the_time_for_which_there_were_no_weights(model, folders):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    bench.sleep(2)
    bench.wake()
    woken_s = time.perf_counter()
    bench.ticks(20)
    mailbox.ready = Update(1, load(folders[1]), model)
    begun_s = time.perf_counter()
    bench.run()
    ((version, pause_s),) = mailbox.done
    assert version == 1 and 0 < pause_s <= time.perf_counter() - begun_s
    (swap,) = bench.engine.meter.recent_swaps()
    assert swap.start_s >= begun_s > woken_s


def test_a_worker_that_takes_no_weights_keeps_them(model):
    bench = Sleeping(model)
    answer = bench.sleep(2)
    assert isinstance(answer, Failed) and (answer.code, answer.field) == ("bad_request", "level")
    assert not bench.engine.gate.sleep.ordered and isinstance(bench.sleep(1), Done)
    bench.wake()


def test_a_deeper_sleep_drops_kept_kv_and_a_lighter_one_changes_nothing(model, prompt_of):
    bench = Sleeping(model, None, Mailbox())
    assert bench.sleep(1).facts["level"] == 1
    assert bench.sleep(2).facts["level"] == 2
    again = bench.sleep(1)
    assert again.facts["level"] == 2 and again.facts["seconds"] < 1
    assert bench.wake().facts["level"] == 2 and bench.status().state == "stale"
    assert not any(parameter.any() for parameter in model.parameters())


# --- requests and rows meanwhile -------------------------------------------------------------------------------------


def test_rows_are_aborted_and_requests_refused_where_that_is_wanted(model, prompt_of, greedy):
    bench = Sleeping(model)
    for i in range(10):
        bench.submit(f"r{i}", prompt_of(9, i), 40)
    bench.ticks(12)
    assert isinstance(bench.sleep(mode="abort", requests="refuse"), Done)
    for i in range(10):
        done = bench.completions[f"r{i}", 0]
        assert (
            done.finish.reason == "cancelled" and done.token_ids == greedy(prompt_of(9, i), 40)[: len(done.token_ids)]
        )
    bench.submit("late", prompt_of(9), 4)
    bench.engine.tick()
    (rejected,) = [event for event in bench.events if isinstance(event, Rejected)]
    assert rejected.code == "unavailable" and "asleep" in rejected.message
    bench.wake()
    bench.complete("after", prompt_of(9), 4)
    assert bench.tokens("after") == greedy(prompt_of(9), 4)


def test_deadlines_and_cancels_count_while_it_sleeps(model, prompt_of, greedy):
    bench = Sleeping(model)
    bench.submit("row", prompt_of(9), 30)
    bench.ticks(5)
    bench.sleep(mode="keep", requests="wait")
    bench.submit("overdue", prompt_of(9), 4, deadline_s=1e-9)
    bench.submit("unwanted", prompt_of(9), 4)
    bench.ticks(2)
    bench.engine.inbox.put(Cancel(("c", "unwanted")))
    bench.ticks(2)
    reasons = {name: bench.completions[name, 0].finish.reason for name in bench.done}
    assert reasons == {"overdue": "deadline", "unwanted": "cancelled"}
    bench.wake()
    bench.run()
    assert bench.tokens("row") == greedy(prompt_of(9), 30)
