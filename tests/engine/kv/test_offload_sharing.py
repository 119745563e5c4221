"""When a row is preempted, which pages it shares with others meanwhile, and what comes back with it."""

import threading

import pytest

from rollout.engine.messages.to_engine import Cancel, StopAt
from tests.support.engine.constraints import SIZE, Cycle, X, Y
from tests.support.engine.harness import watch_prefills
from tests.support.engine.offloading import counts, offloading, restoring, submit_six
from tests.support.engine.streams import InlineDevice, LateDevice


@pytest.mark.parametrize("early", [True, False])
def test_a_row_is_preempted_before_pages_run_out(model, prompt_of, monkeypatch, early):
    """Every row that decodes has its page in time, though pages are copied before they are given to it."""
    if not early:
        monkeypatch.setattr("rollout.engine.schedule.preemption._SOON", 0)
    bench = offloading(model, device=InlineDevice(), page_size=16, kv_pages=21, prefill_chunk_tokens=256)
    went_without = 0

    def watch(plan):
        nonlocal went_without
        if plan.kind == "decode":
            due = [seq for seq in bench.engine.roster.decoding if seq.launched < seq.max_tokens]
            went_without += len(due) - plan.rows

    bench.observer.at_launch.append(watch)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10 + 2 * i, i), 90)
    bench.run()
    assert counts(bench).restored == counts(bench).offloaded > 0
    assert (went_without == 0) == early


# --- pages that several share ---


def test_shared_pages_stay_while_another_row_uses_them(model, prompt_of, greedy):
    bench = offloading(model, kv_pages=46)
    books, sent = bench.engine.parts.tier.offload, []
    begin = books.page_moves.next_out

    def watched(most):
        moves = begin(most)
        assert all(bench.engine.roster.allocator.pool.refs[move.place] == 1 for move in moves)
        sent.extend(moves)
        return moves

    books.page_moves = books.page_moves._replace(next_out=watched)
    bench.submit("g", prompt_of(33), 50, n=4)
    bench.tick_until(lambda: books.counts.offloaded)
    victim = next(seq for seq in bench.engine.roster.groups["c", "g"].sequences if seq.kv.is_offloaded)
    assert all(page.pool_page and not page.outgoing for page in victim.kv.in_tier.offloaded.pages[:8]), (
        "the prompt's pages"
    )
    bench.run()
    assert books.counts.restored == books.counts.offloaded and sent
    assert all(bench.tokens("g", i) == greedy(prompt_of(33), 50) for i in range(4))


def test_pages_that_only_offloaded_sequences_share_are_copied_once_when_others_need_them(model, prompt_of, greedy):
    """All rows of a group are preempted for a row that needs nearly the whole pool."""
    bench = offloading(model)
    prefills = watch_prefills(bench)
    books, sent = bench.engine.parts.tier.offload, []
    begin = books.page_moves.next_out

    def watched(most):
        moves = begin(most)
        sent.extend((move.page, move.page.owners) for move in moves)
        return moves

    books.page_moves = books.page_moves._replace(next_out=watched)
    bench.submit("g", prompt_of(32), 90, n=3)
    bench.complete("high", prompt_of(4, 1), 140, priority=1)
    assert sum(owners > 1 for _, owners in sent) >= 8 and len({id(page) for page, _ in sent}) == len(sent)
    assert sum(prefills) == 32 + 2 + 4 + counts(bench).restored
    assert bench.tokens("high") == greedy(prompt_of(4, 1), 140)
    assert all(bench.tokens("g", i) == greedy(prompt_of(32), 90) for i in range(3))


def test_pages_that_parked_sequences_are_left_alone_with_go_when_pages_are_short(model, prompt_of, greedy):
    """The last running member of a group ends and its prompt's pages stay; then a request of higher rank needs them."""
    bench = offloading(model)
    bench.submit("g", prompt_of(32), 90, n=3)
    bench.submit("high", prompt_of(4, 1), 140, priority=1)
    running = []
    while len(running) != 1:
        bench.engine.tick()
        running = [seq for seq in bench.engine.roster.groups["c", "g"].sequences if not seq.kv.is_offloaded]
    (last,) = running
    bench.engine.inbox.put(StopAt(("c", "g"), last.index, len(last.tokens), "enough"))
    bench.complete("next", prompt_of(68, 2), 2, priority=2)
    assert list(bench.done)[0] == "next", "there is room for it before the other one ends"
    assert bench.tokens("high") == greedy(prompt_of(4, 1), 140)
    assert [len(bench.tokens("g", i)) == 90 for i in range(3)].count(True) == 2


def test_a_sequence_that_returns_immediately_is_not_copied(model, prompt_of, greedy):
    """Pages that are still in the pool are taken back as they are."""
    bus = threading.Event()

    def once_free() -> float:
        assert bus.wait(60), "the row waits for a copy"
        return 0.0

    late = LateDevice({"kv_out": once_free})
    bench = offloading(model, device=late, piece_pages=1, prefix_cache=False)  # known pages would be copied, too
    submitted = {f"r{i}": prompt_of(10, i) for i in range(4)}
    for name, prompt in submitted.items():
        bench.submit(name, prompt, 60)
    bench.tick_until(lambda: counts(bench).offloaded)
    for name in ("r0", "r1", "r2"):
        bench.engine.inbox.put(Cancel(("c", name)))
    bench.tick_until(lambda: counts(bench).restored)
    bus.set()
    bench.run()
    assert counts(bench).restored == 1 and counts(bench).pages_in == 0
    assert bench.tokens("r3") == greedy(submitted["r3"], 60)


def test_a_restored_prompt_is_found_by_other_requests(model, prompt_of):
    bench = offloading(model)
    submit_six(bench, prompt_of)
    bench.run()
    assert counts(bench).pages_in > 0
    bench.complete("again", prompt_of(10, 5) + bench.tokens("r5")[:22], 4)
    assert bench.done["r5"].preemptions > 0 and bench.done["again"].cached_tokens == 31


# --- what else a row has ---


def test_settings_of_sampling_and_scores_come_back_with_a_row(model, prompt_of):
    """Penalty counts, banned and biased tokens, masks and top tokens equal those of a row that stayed."""
    sampling = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": ((5, 2.0),)}
    runs = []
    for pages in (40, 600):
        bench = offloading(model, kv_pages=pages)
        for i in range(5):
            stop = {"token_ids": (3,), "min_tokens": 55}
            fields = {"logprobs": 3} if i % 2 else {"constraint": Cycle([X, Y, SIZE])} if i == 4 else {}
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
    bench.complete("next", said, 9, **session)
    assert bench.done["next"].cached_tokens == 57 and bench.tokens("next") == greedy(said, 9)


def test_a_turn_that_ends_while_its_kv_comes_back_leaves_nothing(model, prompt_of, greedy):
    """It has its pages, but their KV is not complete."""
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.05}), prefix_cache=False)
    session = {"session": ("c", "talk"), "session_lease_s": 1e6}
    for i in range(3):
        bench.submit(f"t{i}", prompt_of(8, i), 50, **(session if i == 2 else {}))
    seq = None
    while seq is None or not restoring(seq):
        bench.engine.tick()
        (seq,) = bench.engine.roster.groups["c", "t2"].sequences
    bench.engine.inbox.put(Cancel(("c", "t2")))
    bench.run()
    said = prompt_of(8, 2) + bench.tokens("t2") + prompt_of(5, 7)
    bench.complete("next", said, 9, **session)
    assert len(bench.tokens("t2")) > 8 and bench.tokens("next") == greedy(said, 9)
