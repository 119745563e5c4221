"""Sessions: the KV of a conversation between its turns, invisible to other requests."""

import gc
import random

import numpy as np
import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import Cancel, EndSession, StopAt
from rollout.engine.messages.to_service import Done, Rejected
from rollout.engine.sequence.sequence_kv import NO_KEYS, KeptSession, SessionKV
from tests.support.alive import alive
from tests.support.engine.conversation import Conversation, admissions
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load, watch_prefills
from tests.support.engine.routing import assert_routed, routing_of
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint

SAMPLED = {"temperature": 1.0, "seed": 3}


def pages_of(bench: Bench) -> int:
    return bench.engine.roster.allocator.sessions.pages


def stop_at(greedy, prompt: list[int], least: int) -> int:
    """A token that ends the greedy continuation after at least `least` tokens and not before."""
    tokens = greedy(prompt, least + 30)
    return next(token for i, token in enumerate(tokens) if i >= least and token not in tokens[:i])


# --- what is reused ---


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("chunk", "page_size", "depth"), [(3, 4, 2), (7, 16, 1), (64, 4, 1), (64, 16, 2)])
def test_turns_have_transformers_tokens_and_only_new_tokens_are_computed(
    model, prompt_of, greedy, chunk, page_size, depth, prefix_cache
):
    options = {"prefill_chunk_tokens": chunk, "page_size": page_size, "pipeline_depth": depth}
    bench, plain = Bench(model, prefix_cache=prefix_cache, **options), Bench(model, prefix_cache=False, **options)
    sizes = watch_prefills(bench)
    talk, alone = Conversation(bench, "s", prompt_of), Conversation(plain, "s", prompt_of, session=False)
    for turn, new in enumerate((21, 6, 1, 17)):
        sizes.clear()
        tokens = talk.say(new)
        assert tokens == alone.say(new) == greedy(talk.said[: -len(tokens)], 9)
        mine, theirs = bench.completions[talk.turn, 0], plain.completions[alone.turn, 0]
        assert np.allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        # The last token of a completion that ends by length never goes through the model, until the next turn.
        assert sum(sizes) == new + (turn > 0)
        assert talk.reused == len(talk.said) - 9 - sum(sizes)
    status = bench.status().sessions
    assert (status.turns, status.hits, status.reused_tokens) == (4, 3, 29 + 44 + 54)
    assert (status.holding, status.pages) == (1, -(-(len(talk.said) - 1) // page_size))
    bench.close(), plain.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_that_ends_at_a_stop_token_leaves_all_that_went_through_the_model(model, prompt_of, greedy, depth):
    """At depth 2 so did the stop token itself, in the step that was in flight when it was read."""
    bench = Bench(model, pipeline_depth=depth)
    talk = Conversation(bench, "s", prompt_of)
    stop = stop_at(greedy, prompt_of(10, 1001), 5)
    tokens = talk.say(10, 50, stop={"token_ids": (stop,)})
    assert tokens[-1] == stop and 5 < len(tokens) < 50
    assert talk.say(4) == greedy(talk.said[:-9], 9)
    assert talk.reused == 10 + len(tokens) - (depth == 1)


@pytest.mark.parametrize("same", [0, 1, 7, 8, 9, 22, 24])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_longest_prefix_that_is_the_same_is_reused_and_the_rest_let_go(
    model, prompt_of, greedy, same, prefix_cache
):
    """As if a template drops the reasoning: the conversation goes on from a position inside the held KV."""
    bench = Bench(model, prefix_cache=prefix_cache)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(16)
    before = talk.said
    other = [*before[:same], (before[same] + 1) % 97, *prompt_of(6, 9)]
    tokens = talk.say(0, prompt=other)
    assert talk.reused == same
    assert tokens == greedy(other, 9)
    assert pages_of(bench) == -(-(len(other) + 8) // 4), "what the last turn has left and nothing else"
    back = talk.say(0, prompt=before)
    assert back == greedy(before, 9), "the copied page is not the one that others read"


def test_the_same_prompt_again_computes_its_last_token(model, prompt_of, greedy):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    first = talk.say(17)
    assert talk.say(0, prompt=talk.said[:17]) == first == greedy(talk.said[:17], 9)
    assert talk.reused == 16


def test_a_longer_cached_prefix_of_other_requests_is_preferred(model, prompt_of, greedy):
    bench = Bench(model)
    talk, other = Conversation(bench, "s", prompt_of), Conversation(bench, "o", prompt_of)
    talk.say(10)
    longer = talk.said + prompt_of(30, 7)
    other.say(0, prompt=longer)
    assert talk.say(0, prompt=[*longer, 5]) == greedy([*longer, 5], 9)
    assert talk.reused == 48 and bench.status().sessions.reused_tokens == 18


def test_sampled_turns_have_the_tokens_of_a_run_without_sessions(model, prompt_of):
    def run(session: bool) -> list[list[int]]:
        bench = Bench(model, random_delays(1) if session else None)
        talk = Conversation(bench, "s", prompt_of, session=session)
        penal = {**SAMPLED, "repetition_penalty": 1.2, "top_k": 20}  # counts of reused tokens are there, too
        turns = [talk.say(13, 20, sampling=SAMPLED), talk.say(3, 20, sampling=penal), talk.say(5, 20, sampling=SAMPLED)]
        bench.close()
        return turns

    assert run(True) == run(False)


def test_a_turn_whose_prompt_is_scored_computes_it_and_leaves_it(model, prompt_of, greedy):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(12)
    assert talk.say(4, prompt_logprobs=True) == greedy(talk.said[:-9], 9)
    assert talk.reused == 0 and np.isfinite(bench.done[talk.turn].prompt_logprobs[1:]).all()
    assert talk.say(4) == greedy(talk.said[:-9], 9) and talk.reused == len(talk.said) - 9 - 5


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_turns_have_the_experts_of_all_their_tokens(tmp_path, prompt_of, prefix_cache):
    """Entries of the earlier turns come with their pages, also if a page is copied."""
    hf_model = make_checkpoint("qwen3_moe", tmp_path, 0)
    bench = Bench(load(tmp_path), routing=True, prefix_cache=prefix_cache, prefill_chunk_tokens=7)
    talk = Conversation(bench, "s", lambda length, seed: [token % 71 for token in prompt_of(length, seed)])
    for new in (19, 3, 6):
        tokens = talk.say(new, routing_from=0)
        assert_routed(hf_model, talk.said[: -len(tokens)], tokens, routing_of(bench, talk.turn), 0)
    assert talk.reused == len(talk.said) - 9 - 7


# --- one turn at a time ---


@pytest.mark.parametrize("reason", ["stop", "cancelled", "stop string"])
def test_a_turn_waits_until_no_step_in_flight_names_the_one_before(model, prompt_of, greedy, reason):
    bench = Bench(model)
    talk, seen = Conversation(bench, "s", prompt_of), admissions(bench)
    prompt = prompt_of(10, 1001)
    stop = {"token_ids": (stop_at(greedy, prompt, 5),)} if reason == "stop" else {}
    bench.submit("neighbour", prompt_of(5), 40)
    talk.submit(10, 50, stop=stop)
    bench.engine.tick()
    seq, key = bench.engine.roster.groups["c", talk.turn].sequences[0], ("c", talk.turn)
    bench.tick_while(lambda: not (seq.finalized if reason == "stop" else len(seq.tokens) == 12))
    assert seq.inflight_refs == 1, "it ends with a step in flight"
    if reason != "stop":  # the end and the next turn come together
        bench.engine.inbox.put(Cancel(key) if reason == "cancelled" else StopAt(key, 0, 12, "x"))
    talk.said += seq.tokens.tolist()
    talk.submit(3)
    bench.run()
    assert talk.ended() == greedy(talk.said[:-9], 9)
    assert seen[-1] == (talk.turn, 0)
    assert talk.reused == 10 + len(seq.tokens), "the last token went through the model in the step that was in flight"
    assert bench.tokens("neighbour") == greedy(prompt_of(5), 40)


def test_a_second_turn_at_once_is_refused_and_one_after_a_cancel_is_not(model, prompt_of, greedy):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.submit(10, 400)
    bench.engine.tick()
    talk.submit(3)
    bench.engine.tick()
    rejected = [event for event in bench.events if isinstance(event, Rejected)]
    assert [(event.key[1], event.code, event.field) for event in rejected] == [(talk.turn, "bad_request", "session")]
    bench.engine.inbox.put(Cancel(("c", "s1")))
    assert talk.say(0, prompt=prompt_of(10, 1001)) == greedy(prompt_of(10, 1001), 9)
    assert bench.completions["s1", 0].finish.reason == "cancelled"


def test_a_turn_that_never_ran_leaves_the_session_as_it_was(model, prompt_of):
    bench = Bench(model, max_rows=1)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(10)
    bench.submit("long", prompt_of(5), 60)
    bench.ticks(4)
    said = talk.said
    talk.submit(3)
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", talk.turn)))
    bench.run()
    talk.said = said
    talk.say(2)
    assert talk.reused == 18


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_page_that_a_turn_never_came_to_copy_is_not_left_to_its_session(model, prompt_of, greedy, prefix_cache):
    """The turn has its row and is cancelled while another prompt takes the chunks: its own page is still empty."""
    bench = Bench(model, prefix_cache=prefix_cache, prefill_chunk_tokens=8)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(14)  # 22 positions, and the last page holds two
    said = talk.said
    bench.submit("long", prompt_of(60), 5)
    talk.submit(1)
    bench.engine.tick()
    (seq,) = bench.engine.roster.prefilling[1:]
    assert seq.kv.copy_source and seq.kv.length == 22
    bench.engine.inbox.put(Cancel(("c", talk.turn)))
    bench.run()
    talk.said = said
    assert talk.say(2) == greedy(talk.said[:-9], 9)
    assert talk.reused == (22 if prefix_cache else 20), "what is shared is there still"


@pytest.mark.parametrize("running", [True, False])
def test_a_session_that_is_ended_gives_its_pages_back(model, prompt_of, greedy, running):
    bench = Bench(model, prefix_cache=False)
    talk, other = Conversation(bench, "s", prompt_of), Conversation(bench, "o", prompt_of)
    other.say(9)
    if running:
        talk.submit(10)
        bench.engine.tick()
    else:
        talk.say(10)
        assert bench.status().sessions.holding == 2
    bench.engine.inbox.put(EndSession("c", "s", token=7))
    bench.run()
    assert Done(7) in bench.events
    assert bench.status().sessions.holding == 1, "the other one has its own"
    if running:
        assert talk.ended() == greedy(prompt_of(10, 1001), 9)
    talk.say(3)
    assert talk.reused == 0
    bench.engine.inbox.put(EndSession("c"))
    bench.run()
    assert bench.status().pages_used == 0


def test_a_turn_that_failed_leaves_nothing(model, prompt_of):
    bench = Bench(model, prefix_cache=False)
    talk = Conversation(bench, "s", prompt_of)
    talk.submit(10, 50)
    bench.ticks(6)
    bench.engine.roster.end(("c", talk.turn), "error", "its logits are not finite")
    bench.run()
    assert bench.status().pages_used == 0


# --- leases, the budget, pages that rows need ---


def test_a_lease_counts_from_the_end_of_the_last_turn(model, prompt_of):
    now = [0.0]
    bench = Bench(model, clock=lambda: now[0])
    talks = {name: Conversation(bench, name, prompt_of) for name in ("a", "bb", "ccc")}
    for name, lease_s in (("a", 5.0), ("bb", 50.0), ("ccc", 5.0)):
        talks[name]._fields["session_lease_s"] = lease_s
        talks[name].say(8)

    def holding(at: float) -> int:
        now[0] = at
        bench.engine.tick()
        return bench.status().sessions.holding

    assert holding(4.9) == 3
    talks["ccc"].submit(3, 30)
    bench.engine.tick()
    assert holding(6.0) == 1, "the lease of a is over, ccc has a turn"
    now[0] = 7.0
    bench.run()
    assert [holding(at) for at in (11.0, 12.1, 49.9, 50.1)] == [2, 1, 1, 0]
    assert bench.status().pages_used == 0


def test_many_short_turns_leave_no_trail_of_leases(model, prompt_of):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    for _ in range(60):
        talk.say(1, 1)
    assert max(len(gc.get_referrers(session)) for session in alive(KeptSession)) < 30


def test_sessions_never_have_more_than_their_share_and_the_oldest_goes_first(model, prompt_of):
    bench = Bench(model, kv_pages=101, session_share=0.25, prefix_cache=False)
    talks = [Conversation(bench, name, prompt_of) for name in ("a", "bb", "ccc")]
    for talk in talks:
        talk.say(32)  # 40 positions, 10 pages
        assert pages_of(bench) <= 25
    talks[1].say(1, 1)
    talks[0].say(1, 1)
    assert [talk.reused > 0 for talk in talks] == [False, True, False]
    talks[2].say(1, 1)
    assert talks[2].reused == 0, "a's turn took its pages: bb was used later"
    talks[0].say(1, 1)
    assert talks[0].reused == 42
    huge = Conversation(bench, "dddd", prompt_of)
    huge.say(200)
    assert pages_of(bench) == 25, "the beginning of one that is larger than the share"
    huge.say(1, 1)
    assert huge.reused == 100


@pytest.mark.parametrize(("most_pages", "pages", "most"), [(20, 1, 20), (20, 20, 20), (200, 160, 80), (200, 200, 64)])
def test_sessions_that_share_all_their_pages_are_bounded_too(most_pages, pages, most):
    """Pages count once, but each session has its tokens in host memory."""
    pool = PagePool(201)
    sessions, shared = Sessions(pool, 4, most_pages, Snapshots(0, 0, pool)), [pool.allocate() for _ in range(pages)]
    prompt = np.zeros(1000, np.int32)
    for i in range(100):
        name = f"s{i}"
        session = sessions.begin(
            Request(("c", name), Prompt.of_tokens(prompt), 1, session=("c", name), session_lease_s=1e6)
        )
        sessions.keep(session, SessionKV(prompt[: 4 * pages], shared, 0, NO_KEYS), 0.0)
        sessions.check()
    assert sessions.status().holding == most and sessions.pages == pages
    held, _ = sessions.match(session, prompt, 0)
    assert held.tokens.base is None, "only the held part of the prompt"
    sessions.end("c")
    sessions.check()
    assert sessions.status().holding == 0 and pool.used == pages


def test_a_share_of_nothing_keeps_nothing(model, prompt_of, greedy):
    bench = Bench(model, session_share=0.0, prefix_cache=False)
    talk = Conversation(bench, "s", prompt_of)
    for _ in range(3):
        assert talk.say(9) == greedy(talk.said[:-9], 9)
        assert talk.reused == 0 and bench.status().pages_used == 0


@pytest.mark.parametrize("session_share", [0.0, 1.0])
def test_rows_take_idle_sessions_pages_and_run_as_if_there_were_none(model, prompt_of, greedy, session_share):
    """A pool that the sessions fill: rows are admitted and grow as in an empty one, without a preemption."""
    bench = Bench(model, kv_pages=61, session_share=session_share, prefix_cache=False, max_rows=4)
    talks = [Conversation(bench, name, prompt_of) for name in ("a", "bb", "ccc", "dddd")]
    for talk in talks:
        talk.say(50)
    assert pages_of(bench) == (60 if session_share else 0)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(20, i), 38)
    bench.engine.tick()
    assert bench.engine.roster.running == 4
    bench.run()
    assert [bench.tokens(f"r{i}") for i in range(4)] == [greedy(prompt_of(20, i), 38) for i in range(4)]
    assert bench.engine.roster.counters.preemptions == 0
    evicted = bench.status().sessions.evicted
    assert evicted == (4 if session_share else 0) and pages_of(bench) == 0
    assert talks[3].say(1) == greedy(talks[3].said[:-9], 9), "what was lost is computed again"


def test_a_prompt_that_does_not_fit_anyway_costs_no_session_its_pages(model, prompt_of):
    bench = Bench(model, kv_pages=61, session_share=0.5, prefix_cache=False)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(40)
    bench.submit("row", prompt_of(120), 30)
    bench.engine.tick()
    bench.submit("large", prompt_of(112, 1), 5)  # 29 pages and one to spare; 17 are free, and the session's 12
    bench.ticks(3)
    assert (pages_of(bench), bench.engine.roster.waiting) == (12, 1)
    bench.run()
    assert len(bench.tokens("large")) == 5


def test_a_turn_that_cannot_come_in_yet_costs_other_sessions_nothing(model, prompt_of, greedy):
    """Pages that its own session holds are not counted twice."""
    bench = Bench(model, kv_pages=61, session_share=1.0, prefix_cache=False)
    talk, other = Conversation(bench, "s", prompt_of), Conversation(bench, "o", prompt_of)
    talk.say(40), other.say(4)
    bench.submit("row", prompt_of(120), 5)
    bench.engine.tick()
    talk.submit(60)  # 17 pages more and one to spare; 14 are free, 3 are the other session's and 12 its own
    bench.engine.tick()
    assert (pages_of(bench), bench.engine.roster.waiting) == (15, 1)
    bench.run()
    assert talk.ended() == greedy(talk.said[:-9], 9) and talk.reused == 48
    other.say(1)
    assert other.reused == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_admission_is_tried_again_when_a_session_gets_pages(model, prompt_of, greedy, depth):
    """A row ends and its session keeps all its pages: nothing came free, but the one that waits can have them.

    At depth 2 it is tried in between, too, while the row is a zombie and its pages cannot be given away.
    """
    bench = Bench(model, kv_pages=41, session_share=1.0, prefix_cache=False, pipeline_depth=depth)
    talk = Conversation(bench, "s", prompt_of)
    prompt = prompt_of(60, 1001)
    talk.submit(60, 60, stop={"token_ids": (stop_at(greedy, prompt, 15),)})
    bench.engine.tick()
    bench.submit("waits", prompt_of(90, 1), 9)
    bench.run(200)
    talk.ended()
    assert bench.tokens("waits") == greedy(prompt_of(90, 1), 9)


@pytest.mark.parametrize("same", [21, 24, 40])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_turn_that_takes_the_whole_pool_has_no_page_to_copy_from(model, prompt_of, greedy, same, prefix_cache):
    """The page to copy from its session is one page too many; without it the turn fits."""
    bench = Bench(model, kv_pages=17, session_share=1.0, prefix_cache=prefix_cache)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(33)
    prompt = [*talk.said[:same], *prompt_of(60 - same, 5)]
    talk.submit(0, 4, prompt=prompt)
    bench.run(200)
    assert talk.ended() == greedy(prompt, 4)
    assert talk.reused == bench.status().sessions.reused_tokens == same // 4 * 4


def test_turns_are_right_while_rows_are_preempted(model, prompt_of, greedy):
    bench = Bench(model, kv_pages=40, max_rows=6)
    talks = [Conversation(bench, "s" * (i + 1), prompt_of) for i in range(5)]
    for new in (11, 5, 3):
        for talk in talks:
            talk.submit(new, 16)
        bench.run()
        for talk in talks:
            tokens = talk.ended()
            assert tokens == greedy(talk.said[:-16], 16)
    assert bench.engine.roster.counters.preemptions > 0


# --- versions, faults ---


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_no_kv_of_older_weights_is_reused(model, folders, prompt_of, greedy, kv_on_swap):
    mailbox, other = Mailbox(), load(folders[1])
    bench = Bench(model, None, mailbox, kv_on_swap=kv_on_swap)
    idle, straddling = Conversation(bench, "i", prompt_of), Conversation(bench, "ss", prompt_of)
    idle.say(20)
    straddling.submit(20, 40)
    bench.ticks(12)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.status().sessions.holding == (kv_on_swap == "recompute"), "the idle one has nothing any more"
    straddling.ended()
    assert set(bench.completions[straddling.turn, 0].versions) == {0, 1}
    for talk in (idle, straddling):
        assert talk.say(5) == greedy(talk.said[:-9], 9, which=1)
    assert idle.reused == 0
    assert straddling.reused == (59 if kv_on_swap == "recompute" else 0), (
        "computed anew, all of it is the new version's"
    )
    for talk in (idle, straddling):
        assert talk.say(2) == greedy(talk.said[:-9], 9, which=1)
        assert talk.reused == len(talk.said) - 9 - 3


def test_a_turn_that_ends_while_the_weights_change_leaves_no_old_kv(model, folders, prompt_of, greedy):
    """The swap comes at every moment of a turn's end, also while it is a zombie."""
    other = load(folders[1])
    stop = stop_at(greedy, prompt_of(10, 1001), 5)
    first = {name: view.clone() for name, view in model.hf_views().items()}
    for ticks in range(4, 14):
        mailbox = Mailbox()
        bench = Bench(model, None, mailbox)
        talk = Conversation(bench, "s", prompt_of)
        talk.submit(10, 50, stop={"token_ids": (stop,)})
        bench.ticks(ticks)
        mailbox.ready = Update(1, other, model)
        bench.run()
        talk.ended()
        assert talk.say(4) == greedy(talk.said[:-9], 9, which=1)
        bench.close()
        for name, view in model.hf_views().items():
            view.copy_(first[name])


def test_after_a_fault_the_next_turn_is_computed_as_a_whole(model, prompt_of, greedy):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(12)
    bench.submit("x", prompt_of(5), 50)
    fail_a_step(bench)
    rebuild_engine(bench.engine, bench.settings)
    assert talk.say(4) == greedy(talk.said[:-9], 9) and talk.reused == 0
    status = bench.status().sessions
    assert (status.turns, status.hits, status.holding) == (2, 0, 1)


@pytest.mark.parametrize("seed", [2, *nightly(0, 1)])
def test_random_conversations_have_the_right_tokens_and_lose_no_page(model, prompt_of, greedy, seed):
    """Turns of several conversations among other rows in a tight pool; ends, cancels, stops, branches, late streams."""
    rng = random.Random(seed)
    bench = Bench(
        model,
        random_delays(seed, 0.0005),
        kv_pages=rng.choice([45, 70, 200]),
        max_rows=rng.choice([2, 5]),
        prefill_chunk_tokens=rng.choice([5, 64]),
        prefix_cache=rng.random() < 0.5,
        session_share=rng.choice([0.2, 1.0]),
    )
    talks = [Conversation(bench, "s" * (i + 1), prompt_of) for i in range(4)]
    busy: dict[Conversation, list[int]] = {}
    checked = 0
    for step in range(100):
        talk = rng.choice(talks)
        if talk not in busy:
            prompt = None
            if len(talk.said) > 60:
                prompt = talk.said[: rng.randrange(1, 40)]
            stop = {"token_ids": tuple(range(0, 97, 7))} if rng.random() < 0.5 else {}
            talk.submit(rng.randrange(1, 12), rng.randrange(1, 14), prompt=prompt, stop=stop)
            busy[talk] = talk.said
        elif rng.random() < 0.1:
            bench.engine.inbox.put(Cancel(("c", talk.turn)))
        elif rng.random() < 0.05:
            bench.engine.inbox.put(EndSession("c", talk.name))
        if rng.random() < 0.1:
            bench.submit(f"r{step}", prompt_of(rng.randrange(1, 30), step), rng.randrange(1, 30))
        bench.ticks(rng.randrange(1, 6))
        sessions = bench.engine.roster.allocator.sessions
        sessions.check()
        for talk in [talk for talk in busy if bench.completions[talk.turn, 0].finish]:
            prompt, tokens = busy.pop(talk), talk.ended()
            if tokens:
                assert tokens == greedy(prompt, len(tokens))
                checked += 1
    bench.run()
    assert checked > 20 and bench.status().sessions.hits > 2


# --- room ---


def test_status_says_for_how_many_more_sessions_there_is_room(model, prompt_of):
    bench = Bench(model, kv_pages=61)
    assert bench.status().sessions.room is None
    talks = [Conversation(bench, name, prompt_of) for name in ("a", "bb", "ccc")]
    for i, talk in enumerate(talks):
        talk.say(12)  # 5 pages
        assert bench.status().sessions.room == (60 - 5 * (i + 1)) // 5
    talks[0].say(12)  # now 10
    status = bench.status()
    assert status.sessions.room == (60 - status.sessions.pages) * 3 // status.sessions.pages < 8
    talks[1].submit(1, max_tokens=40)
    bench.ticks(12)
    busy = bench.status()
    assert busy.rows_running == 1 and 3 <= busy.sessions.room <= status.sessions.room
    bench.run()
    for talk in talks:
        bench.engine.inbox.put(EndSession("c", talk.name))
    bench.run()
    assert bench.status().sessions.room is None
