"""Sequences of sleep and wake, during updates, ends and faults, and without enough memory."""

import random

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_engine import Cancel, Pause, Resume, Shutdown, Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Failed
from tests.support.engine.harness import load
from tests.support.engine.sleeping import Sleeping, SomeHost, outcome, submit_some
from tests.support.engine.streams import LateDevice, random_delays
from tests.support.engine.updates import InPlace, Mailbox, Update
from tests.support.kernels.grids import nightly

# --- orders ----------------------------------------------------------------------------------------------------------


def test_an_engine_without_such_memory_refuses(model):
    bench = Sleeping(model, sleep=False)
    for answer in (bench.sleep(), bench.wake()):
        assert isinstance(answer, Failed) and (answer.code, answer.field) == ("bad_request", "op")
    assert not bench.sleeper.memory.sleeps and bench.engine.gate.sleep_status() is None


def test_waking_an_awake_engine_changes_nothing(model, prompt_of, greedy):
    bench = Sleeping(model)
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(6)
    rows = bench.engine.roster.running
    answer = bench.wake()
    assert isinstance(answer, Done) and (answer.facts["level"], answer.facts["bytes"]) == (0, 0)
    assert bench.engine.roster.running == rows == 1
    bench.run()
    assert bench.tokens("a") == greedy(prompt_of(9), 20) and not bench.completions["a", 0].recomputed


def test_orders_are_obeyed_in_turn(model, prompt_of, greedy):
    bench = Sleeping(model, LateDevice({"compute": lambda: 0.002}), Mailbox())
    bench.submit("a", prompt_of(9), 30)
    bench.ticks(6)
    tokens = [bench.order(Sleep, 1), bench.order(WakeUp), bench.order(Sleep, 1), bench.order(Sleep, 2)]
    levels = [bench.obeyed(token).facts["level"] if bench.answer(token) is None else bench.answer(token).facts["level"]
              for token in tokens]  # fmt: skip
    assert levels == [1, 1, 1, 2] and bench.engine.gate.asleep
    order = [event.token for event in bench.events if isinstance(event, Done)]
    assert order == tokens
    tokens = [bench.order(WakeUp), bench.order(WakeUp)]
    assert [bench.obeyed(tokens[1]).facts["level"], bench.answer(tokens[0]).facts["level"]] == [0, 2]
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()


def test_a_wake_that_finds_too_little_leaves_all_of_it_asleep_and_a_later_one_succeeds(model, prompt_of, never_slept):
    bench = Sleeping(model, host_kv_gib=0.001)
    submit_some(bench, prompt_of)
    bench.ticks(10)
    bench.sleep()
    bench.pages.short_after = 3
    for _ in range(2):
        answer = bench.wake()
        assert isinstance(answer, Failed) and answer.code == "unavailable" and "GiB are missing" in answer.message
        assert not bench.pages.backed and bench.engine.gate.asleep and bench.status().state == "asleep"
        bench.ticks(2)
    bench.pages.short_after = None
    assert isinstance(bench.wake(), Done)
    bench.run()
    assert outcome(bench) == never_slept


def test_weights_that_the_host_cannot_keep_leave_it_awake_with_all_its_kv(model, prompt_of, greedy):
    bench = Sleeping(model, host := SomeHost())
    bench.complete("prefix", prompt_of(33), 5)
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(6)
    host.free = 0
    answer = bench.sleep()
    assert isinstance(answer, Failed) and answer.code == "unavailable" and "level 2" in answer.message
    assert bench.status().state == "serving" and bench.engine.gate.admit_update()
    bench.engine.gate.updates_done()
    bench.complete("cached", prompt_of(33), 5)
    assert bench.tokens("a") == greedy(prompt_of(9), 20) and not bench.completions["a", 0].recomputed
    assert bench.done["cached"].cached_tokens == 32


def test_a_pause_outlasts_a_sleep_and_a_resume_during_it_launches_nothing(model, prompt_of, greedy):
    bench = Sleeping(model)
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(6)
    bench.engine.inbox.put(Pause("keep", 1))
    bench.sleep()
    bench.wake()
    bench.ticks(4)
    assert bench.status().state == "paused" and bench.engine.roster.running == 0
    bench.sleep()
    bench.engine.inbox.put(Resume(2))
    bench.ticks(4)
    assert bench.engine.pipeline.in_flight == 0 and bench.status().state == "asleep"
    bench.wake()
    assert bench.status().state == "serving"
    bench.run()
    assert bench.tokens("a") == greedy(prompt_of(9), 20)


# --- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_a_swap_that_is_under_way_is_over_before_it_sleeps(model, folders, prompt_of, greedy, at_once):
    mailbox = Mailbox()
    bench = Sleeping(model, LateDevice({"compute": lambda: 0.002}), mailbox)
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(4)
    mailbox.ready = Update(1, load(folders[1]), model)
    if not at_once:
        bench.engine.tick()
        assert bench.engine.gate.swapping
    assert isinstance(bench.sleep(), Done)
    assert [version for version, _ in mailbox.done] == [1]
    mailbox.ready = Update(2, load(folders[0]), model)
    bench.ticks(5)
    assert mailbox.ready is not None, "nothing is applied while it sleeps"
    mailbox.ready = None
    bench.wake()
    bench.complete("b", prompt_of(9), 9)
    assert bench.tokens("b") == greedy(prompt_of(9), 9, 1)


def test_it_waits_for_an_update_that_is_being_received_and_lets_no_other_in(model, folders, prompt_of):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    gate = bench.engine.gate
    bench.submit("a", prompt_of(9), 40)
    bench.ticks(6)
    assert gate.admit_update()
    granted = []
    gate.request_hold(lambda: granted.append(1))  # in place
    token = bench.order(Sleep, 1)
    bench.ticks(10)
    assert bench.answer(token) is None and granted and not bench.engine.gate.asleep and not gate.admit_update()
    assert bench.engine.pipeline.in_flight == 0 and not bench.engine.busy, "it rests meanwhile"
    Update(1, load(folders[1]), model).copy_into()
    mailbox.ready = InPlace(1)
    bench.ticks(3)
    assert mailbox.done and bench.answer(token) is None
    gate.updates_done()
    assert isinstance(bench.obeyed(token), Done)
    bench.wake()
    assert gate.admit_update()
    gate.updates_done()
    bench.run()
    assert set(bench.completions["a", 0].versions) == {0, 1}


def test_stale_weights_are_stale_after_a_sleep(model, folders, prompt_of):
    mailbox = Mailbox()
    bench = Sleeping(model, None, mailbox)
    bench.engine.gate.request_hold(lambda: None)
    bench.ticks(3)
    bench.engine.gate.fail_hold("version 1 came in part")
    bench.sleep()
    bench.wake()
    assert bench.status().stale == "version 1 came in part" and bench.status().state == "stale"
    mailbox.ready = Update(2, load(folders[1]), model)
    bench.complete("a", prompt_of(9), 5)
    assert set(bench.completions["a", 0].versions) == {2}


# --- ends and faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("mode", ["drain", "now"])
def test_a_worker_that_ends_answers_waiting_requests(model, prompt_of, greedy, mode, asleep):
    bench = Sleeping(model, None, Mailbox(), host_kv_gib=0.001)
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(6)
    token = bench.order(Sleep, 1)
    if asleep:
        bench.obeyed(token)
    else:
        bench.engine.gate.admit_update()  # an update that it would wait for
        bench.ticks(3)
    bench.submit("waits", prompt_of(9), 5)
    bench.engine.inbox.put(Shutdown(mode, 7))
    late = bench.order(Sleep, 1)
    for _ in range(200):
        bench.engine.tick()
        if bench.engine.gate.stopped:
            break
    assert bench.engine.gate.stopped and bench.answer(7) == Done(7)
    assert bench.answer(late).code == "unavailable"
    done = bench.completions["a", 0]
    assert done.token_ids == greedy(prompt_of(9), 20)[: len(done.token_ids)] and len(done.token_ids) > 0
    if asleep or mode == "now":
        assert done.finish.reason == bench.completions["waits", 0].finish.reason == "cancelled"
    else:
        assert bench.answer(token).code == "unavailable" and len(done.token_ids) == 20


def test_after_a_fault_before_it_slept_it_is_awake_and_whole(model, prompt_of, greedy):
    bench = Sleeping(model, None, Mailbox())
    bench.submit("a", prompt_of(9), 20)
    bench.ticks(6)
    bench.engine.gate.admit_update()
    token = bench.order(Sleep, 1)
    bench.ticks(2)
    bench.engine.fail("broken")
    answer = bench.answer(token)
    assert isinstance(answer, Failed) and answer.code == "internal"
    bench.engine.gate.updates_done()
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("b", prompt_of(9), 20)
    assert bench.tokens("b") == greedy(prompt_of(9), 20)
    assert isinstance(bench.sleep(), Done) and not bench.pages.backed
    bench.wake()
    bench.complete("c", prompt_of(9), 20)
    assert bench.tokens("c") == greedy(prompt_of(9), 20)


def test_an_engine_that_fails_asleep_is_not_built_anew(model):
    bench = Sleeping(model)
    bench.sleep()
    bench.engine.fail("broken")
    with pytest.raises(RuntimeError, match="during a sleep"):
        rebuild_engine(bench.engine, bench.settings)
    bench.close(check=False)


def test_an_engine_that_fails_while_its_weights_come_back_is_not_built_anew_around_them(model):
    bench = Sleeping(model, host := SomeHost())
    bench.sleep()
    host.broken = True
    token = bench.order(WakeUp)
    with pytest.raises(ZeroDivisionError):
        bench.engine.tick()
    host.broken = False
    bench.engine.fail("broken")
    assert bench.answer(token).code == "internal"
    with pytest.raises(RuntimeError, match="during a sleep"):
        rebuild_engine(bench.engine, bench.settings)
    bench.close(check=False)


# --- any mixture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *nightly(0, 2, 3)])
def test_any_mixture_of_orders_updates_and_requests_has_the_right_tokens_and_loses_nothing(
    model, folders, prompt_of, greedy, seed
):
    rng, mailbox = random.Random(seed), Mailbox()
    offload = {"host_kv_gib": 0.001, "host_kv_piece_mib": 0.004} if seed % 2 else {}
    pages, depth = rng.choice((40, 256)), rng.choice((1, 2))
    bench = Sleeping(model, random_delays(seed, 0.0005), mailbox, kv_pages=pages, pipeline_depth=depth, **offload)
    same, version, tokens, sent = load(folders[0]), 0, [], {}
    for i in range(60):
        what = rng.choice(("request", "request", "group", "turn", "sleep", "wake", "wake", "update", "cancel", "tick"))
        if what in ("request", "group", "turn"):
            name, length = f"r{i}", rng.randint(1, 40)
            fields = {"n": 3} if what == "group" else {}
            if what == "turn":
                fields = {"session": ("c", f"s{i % 3}"), "session_lease_s": 1e6}
            sent[name] = length, rng.randint(1, 20)
            bench.submit(name, prompt_of(length, length), sent[name][1], **fields)
        elif what in ("sleep", "wake"):
            more = {"mode": rng.choice((None, None, "abort"))} if what == "sleep" else {}
            order, level = (Sleep, [rng.randint(1, 2)]) if what == "sleep" else (WakeUp, [])
            tokens.append(bench.order(order, *level, **more))
        elif what == "cancel" and sent:
            bench.engine.inbox.put(Cancel(("c", rng.choice(list(sent)))))
        elif what == "update" and mailbox.ready is None and not bench.engine.gate.sleep.ordered:
            version += 1
            mailbox.ready = Update(version, same, model)
        bench.ticks(rng.randint(0, 6))
    tokens.append(bench.order(WakeUp))
    answers = [bench.obeyed(token) if bench.answer(token) is None else bench.answer(token) for token in tokens]
    assert all(isinstance(answer, Done) for answer in answers) and not bench.engine.gate.sleep.ordered
    mailbox.ready = Update(version + 1, same, model)
    bench.run()
    for (name, _), done in bench.completions.items():
        length, most = sent[name]
        assert done.finish.reason in ("length", "cancelled")
        assert done.token_ids == greedy(prompt_of(length, length), most)[: len(done.token_ids)]
        assert done.finish.reason == "cancelled" or len(done.token_ids) == most
    bench.engine.roster.allocator.sessions.end("c")
