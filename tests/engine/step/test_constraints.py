"""Constrained rows through the engine: every token allowed, neighbours undisturbed, and what hangs ends alone."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.constraints.constraint_progress import ConstraintProgress
from rollout.constraints.matcher import AllowList, Matcher, mask_words
from rollout.engine.features.drafts.row_drafts import Acceptance, Drafts, RowDrafts
from rollout.engine.messages.requests import Prior, StopParams
from rollout.engine.step import masks as masks_module
from rollout.engine.step.masks import MOST_LEFT_BEHIND, MaskBuilder, MaskClock, RowAhead
from rollout.process.deadline_thread import DeadlineCall
from tests.support.engine.constraints import SIZE, Cycle, CyclePlace, MaskTime, X, Y, only_hangs_are_late, threads_of
from tests.support.engine.harness import VOCAB, Bench

STOP = 5
SAMPLED = {"temperature": 1.0, "seed": 3}


class Endless(Matcher):
    """Fine for some tokens, then a matcher that does not come back until it is let go."""

    def __init__(self, good: int) -> None:
        self.good, self.let_go, self.hangs = good, threading.Event(), False

    def start(self) -> Endless:
        return self

    def accept(self, token: int) -> bool:
        self.good -= 1
        return True

    complete, free = True, None

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        if self.good <= 0:
            self.hangs = True
            self.let_go.wait()
            masks_RW[row] = 0  # too late: the memory belongs to another mask by then
        else:
            masks_RW[row] = -1


def letters(tokens: list[int]) -> str:
    names = dict.fromkeys(X, "x") | dict.fromkeys(Y, "y") | dict.fromkeys(SIZE, "s") | {STOP: "."}
    return "".join(names.get(token, "?") for token in tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_token_is_one_that_the_constraint_allows(model, prompt_of, depth):
    bench = Bench(model, pipeline_depth=depth)
    for i in range(6):
        fields = {"stop": {"token_ids": (STOP,)}, "constraint": Cycle([X, Y, SIZE], STOP)}
        bench.submit(f"r{i}", prompt_of(9, i), 40, sampling={**SAMPLED, "seed": i}, **fields)
    bench.run()
    for i in range(6):
        completion = bench.completions[f"r{i}", 0]
        assert re.fullmatch(r"(xys)+\.|(xys)*(xy?)?", letters(completion.token_ids)), completion.token_ids
        assert completion.finish.reason == ("stop" if completion.token_ids[-1] == STOP else "length")
        assert len(completion.drawn_logprobs) == len(completion.token_ids)
        assert (np.array(completion.drawn_logprobs) >= np.array(completion.logprobs) - 1e-4).all()


def test_depth_1_and_2_draw_the_same_and_so_do_all_batchings(model, prompt_of):
    def run(depth: int, rows: int) -> list:
        bench = Bench(model, pipeline_depth=depth, max_rows=rows, prefill_chunk_tokens=16)
        for i in range(8):
            bench.submit(f"c{i}", prompt_of(5 + i, i), 30, sampling={**SAMPLED, "seed": i}, constraint=Cycle([X, Y]))
            bench.submit(f"f{i}", prompt_of(5 + i, i), 20 + i, sampling={**SAMPLED, "seed": i})
        bench.run()
        tokens = [bench.completions[f"{kind}{i}", 0].token_ids for kind in "cf" for i in range(8)]
        bench.close()
        return tokens

    first = run(1, 16)
    assert run(2, 16) == first and run(2, 3) == first


def test_neighbours_without_a_constraint_are_drawn_as_ever(model, prompt_of):
    def run(constrained: bool) -> tuple:
        bench = Bench(model)
        bench.submit("free", prompt_of(9), 30, sampling=SAMPLED)
        if constrained:
            bench.submit("bound", prompt_of(9, 1), 30, sampling=SAMPLED, constraint=AllowList((1, 2, 3), VOCAB))
        bench.run()
        free = bench.completions["free", 0]
        bench.close()
        return free.token_ids, free.logprobs

    (bound_ids, bound_logprobs), (free_ids, free_logprobs) = run(True), run(False)
    assert bound_ids == free_ids and bound_logprobs == pytest.approx(free_logprobs, abs=1e-5)


def test_a_preempted_row_goes_on_in_its_constraint(model, prompt_of):
    bench = Bench(model, kv_pages=24, page_size=4, max_rows=4)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(8, i), 40, sampling={**SAMPLED, "seed": i}, constraint=Cycle([X, Y, SIZE]))
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    for i in range(4):
        assert letters(bench.completions[f"r{i}", 0].token_ids).startswith("xysxys" * 6)


def test_a_token_that_is_not_allowed_ends_the_completion_as_an_error(model, prompt_of, monkeypatch):
    """What must not happen is noticed: here because masks are not applied."""
    monkeypatch.setattr("rollout_kernels.sampling.reference.allow_only", lambda *_: None)
    bench = Bench(model)
    bench.complete("r", prompt_of(9), 30, sampling=SAMPLED, constraint=Cycle([X, Y, SIZE], STOP))
    completion = bench.completions["r", 0]
    assert completion.finish.reason == "error" and "does not allow" in completion.finish.error


class Broken(Cycle):
    """A matcher that raises after some tokens, as compiled code does where it was not meant to be."""

    def filling(self, place):
        if place.at == 3:
            raise RuntimeError("not made for this")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [(Broken([X]), "not made for this"), (Cycle([X, X, X, []]), "allows no token")],
    ids=["raises", "dead end"],
)
def test_a_constraint_that_leads_nowhere_ends_its_own_completion_before_a_token_is_drawn(
    model, prompt_of, constraint, reason
):
    bench = Bench(model)
    stop = {"token_ids": (0,)}  # what a row without an allowed token would draw
    bench.submit("bad", prompt_of(9), 20, sampling=SAMPLED, stop=stop, constraint=constraint)
    bench.submit("last", prompt_of(9), 4, sampling=SAMPLED, stop=stop, constraint=constraint)
    bench.submit("good", prompt_of(9, 1), 20, sampling=SAMPLED, constraint=Cycle([X, Y]))
    bench.complete("free", prompt_of(9, 2), 20, sampling=SAMPLED)
    for name in ("bad", "last"):
        completion = bench.completions[name, 0]
        assert completion.finish.reason == "error" and reason in completion.finish.error
        assert letters(completion.token_ids) == "xxx"
    assert letters(bench.completions["good", 0].token_ids) == "xy" * 10
    assert bench.completions["free", 0].finish.reason == "length"


@pytest.mark.parametrize("good", [0, 7])
def test_a_constraint_that_hangs_ends_its_own_completion_and_no_other(model, prompt_of, good):
    bench = Bench(model, mask_s=0.5)
    only_hangs_are_late(bench)
    hanging = Endless(good)
    bench.submit("before", prompt_of(9, 1), 20, sampling=SAMPLED, constraint=Cycle([X, Y]))
    bench.submit("hangs", prompt_of(9, 2), 20, sampling=SAMPLED, constraint=hanging)
    bench.submit("after", prompt_of(9, 3), 20, sampling=SAMPLED, constraint=Cycle([X, SIZE]))
    bench.submit("free", prompt_of(9, 4), 20, sampling=SAMPLED)
    ticks = 0
    while bench.engine.busy or not ticks:
        bench.engine.tick()
        ticks += 1
        if ticks == 15:
            hanging.let_go.set()  # it comes back in the middle of everything
    bench.run()
    hung = bench.completions["hangs", 0]
    assert hung.finish.reason == "error" and "too long" in hung.finish.error and len(hung.token_ids) == good
    assert letters(bench.completions["before", 0].token_ids) == "xy" * 10
    assert letters(bench.completions["after", 0].token_ids) == "xs" * 10
    assert bench.completions["free", 0].finish.reason == "length"
    bench.engine.check_integrity()


class Slow(Cycle):
    """Each mask takes a while."""

    def __init__(self, lists: list[list[int]], time: MaskTime, seconds: float) -> None:
        super().__init__(lists)
        self.time, self.seconds = time, seconds

    def filling(self, place: CyclePlace) -> None:
        self.time.sleep(self.seconds)


def test_when_time_runs_out_the_slowest_ends_and_not_who_came_last(model, prompt_of):
    time = MaskTime(bench := Bench(model), 0.8)
    bench.submit("slow", prompt_of(9), 6, sampling=SAMPLED, constraint=Slow([X], time, 0.79))
    for i in range(5):
        bench.submit(f"r{i}", prompt_of(9, i), 6, sampling=SAMPLED, constraint=Slow([Y], time, 0.005))
    bench.run()
    assert bench.completions["slow", 0].finish.reason == "error" and bench.engine.masks.left_behind == 0
    assert {bench.completions[f"r{i}", 0].finish.reason for i in range(5)} == {"length"}


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("waits_s", [[0.0, 0.0, 0.9], [0.0, 0.9]])  # of the first mask of a step, of the second one
def test_a_thread_that_waits_for_a_core_fails_no_completion(model, prompt_of, monkeypatch, when, waits_s):
    """Before a mask, between two masks, or after the last mask."""
    time, plain = MaskTime(bench := Bench(model), 0.5), getattr(masks_module._Portion, when)
    waits_s = [*waits_s, *[0.0] * 20]

    def late(portion):
        wait_s = waits_s.pop(0) if waits_s else 0.0
        if when == "begin":
            time.sleep(wait_s)
        answer = plain(portion)
        if when == "end":
            time.sleep(wait_s)
        return answer

    monkeypatch.setattr(masks_module._Portion, when, late)
    for i in range(2):
        bench.submit(f"r{i}", prompt_of(9, i), 6, sampling=SAMPLED, constraint=Cycle([X]))
    bench.run()
    assert {bench.completions[f"r{i}", 0].finish.reason for i in range(2)} == {"length"}
    assert bench.engine.masks.left_behind == 0 and len(waits_s) < 20


def drafts_of(place: CyclePlace, path: list[int]) -> Drafts:
    """The drafts of a row, with as much of its sequence as is looked at for their masks."""
    group = SimpleNamespace(request=SimpleNamespace(stop=StopParams()), stop_ids=frozenset())
    seq = SimpleNamespace(constraint=ConstraintProgress(0, place), prompt_len=0, tokens=[], group=group)
    return Drafts(RowDrafts(seq, Acceptance(), Acceptance()), 0, len(path), path, 0)


def host_masks(rows: int) -> torch.Tensor:
    return torch.full((rows, mask_words(VOCAB)), -1, dtype=torch.int32)


def test_a_thread_that_has_no_core_behind_its_last_draft_costs_no_draft():
    filled, go_on = threading.Event(), threading.Event()

    class WithoutCore(DeadlineCall):
        def __init__(self, work):
            super().__init__(lambda: (work(), filled.set(), go_on.wait()))

        def result(self, timeout_s):
            filled.wait(60)
            return super().result(timeout_s)

    drafts, host = drafts_of(place := Cycle([X, Y]).start(), [X[0]]), host_masks(2)
    place.fill(host, 0)
    builder, renewed = MaskBuilder(0.1, threads=1, make_thread=threads_of(WithoutCore)), []
    masks = SimpleNamespace(host=host, renew_host=lambda: renewed.append(True))
    followed = builder.build_ahead([RowAhead(drafts, 0, 1, drafts.tokens())], masks)
    assert followed == [1] and renewed and builder.left_behind == 1
    go_on.set()
    builder.close()


def test_many_that_take_a_little_each_all_go_on(model, prompt_of):
    """The slowest had less than its part, 0.05 s."""
    time = MaskTime(bench := Bench(model, max_rows=12), 0.4)
    for i in range(12):
        bench.submit(f"r{i}", prompt_of(9, i), 3, sampling=SAMPLED, constraint=Slow([[X, Y][i % 2]], time, 0.045))
    bench.run()
    assert {completion.finish.reason for completion in bench.completions.values()} == {"length"}


class Costly(Cycle):
    """Each mask takes its part of a time that only such matchers spend."""

    def __init__(self, lists: list[list[int]], spent_s: list[float], costs_s: list[float]) -> None:
        super().__init__(lists)
        self.spent_s, self.costs_s = spent_s, costs_s

    def filling(self, place: CyclePlace) -> None:
        self.spent_s[0] += self.costs_s[place.at % len(self.costs_s)]


def test_one_that_is_slow_at_every_token_ends_and_one_that_is_so_now_and_then_goes_on(model, prompt_of):
    spent_s = [0.0]
    bench = Bench(model, mask_s=1.0)
    only_hangs_are_late(bench, MaskClock(spent_s=lambda: spent_s[0]), threads=1)
    slow, steady, seldom = [0.4], [0.09], [0.9, *[0.01] * 9]
    for name, costs_s in (("slow", slow), ("steady", steady), ("seldom", seldom)):
        bench.submit(name, prompt_of(9), 40, sampling=SAMPLED, constraint=Costly([X], spent_s, costs_s))
    bench.complete("free", prompt_of(9, 1), 40, sampling=SAMPLED)
    ended = bench.completions["slow", 0]
    assert ended.finish.reason == "error" and "too long" in ended.finish.error
    assert len(ended.token_ids) == 3, "the fourth mask is 1.2 s more than 0.1 s for each"
    assert {bench.completions[name, 0].finish.reason for name in ("steady", "seldom", "free")} == {"length"}
    assert bench.engine.masks.left_behind == 0
    bench.complete("next", prompt_of(9), 2, sampling=SAMPLED, constraint=Cycle([X]))
    assert bench.completions["next", 0].finish.reason == "length", "the time of ended requests is not charged again"


def test_time_that_others_had_is_not_counted(model, prompt_of):
    time = MaskTime(bench := Bench(model), 0.5)
    bench.complete("waits", prompt_of(9), 14, sampling=SAMPLED, constraint=Slow([X], time, 0.1))
    assert bench.completions["waits", 0].finish.reason == "length"


def test_a_mask_that_is_late_writes_to_memory_that_is_never_read(model, prompt_of):
    bench = Bench(model)
    bench.engine.masks.timeout_s = 0.05
    slots = [bench.engine.pipeline.acquire() for _ in range(2)]
    before = {slot.masks.host.data_ptr() for slot in slots}
    bench.engine.pipeline.free_slots.extend(slots)
    hanging = Endless(0)
    bench.complete("hangs", prompt_of(9), 20, sampling=SAMPLED, constraint=hanging)
    assert len({slot.masks.host.data_ptr() for slot in slots} - before) == 1
    hanging.let_go.set()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", ["off", "ngram"])
def test_no_stop_token_comes_before_min_tokens_unless_nothing_else_may(model, prompt_of, depth, drafts):
    bench = Bench(model, pipeline_depth=depth, speculation=drafts)
    stop = {"token_ids": (STOP,), "min_tokens": 6}
    for i in range(6):
        fields = {"sampling": {**SAMPLED, "seed": i}, "stop": stop}
        bench.submit(f"may{i}", prompt_of(9, i), 40, constraint=Cycle([X, Y], STOP), **fields)
        bench.submit(f"must{i}", prompt_of(9, i), 40, constraint=Cycle([X, Y, [STOP]]), **fields)
        bench.submit(f"only{i}", prompt_of(9, i), 40, constraint=AllowList((STOP,), VOCAB), **fields)
        bench.submit(f"list{i}", prompt_of(9, i), 40, constraint=AllowList((STOP, X[0], X[1]), VOCAB), **fields)
    bench.run()
    for i in range(6):
        assert re.fullmatch(r"(xy){3,}(\.|x?)", letters(bench.tokens(f"may{i}")))
        assert letters(bench.tokens(f"must{i}")) == "xy." and letters(bench.tokens(f"only{i}")) == "."
        assert re.fullmatch(r"x{6,}\.?", letters(bench.tokens(f"list{i}")))
        for name in ("may", "must", "only", "list"):
            done = bench.completions[f"{name}{i}", 0]
            assert done.finish.stop == (STOP if done.token_ids[-1] == STOP else None)
            assert np.isfinite(done.drawn_logprobs).all()
    assert any(bench.tokens(f"may{i}")[-1] == STOP for i in range(6))


@pytest.mark.parametrize("depth", [1, 2])
def test_without_a_stop_token_a_completion_ends_where_its_constraint_allows_nothing_more(model, prompt_of, depth):
    bench = Bench(model, pipeline_depth=depth)
    bench.submit("free", prompt_of(9, 1), 20, sampling=SAMPLED)
    bench.submit("ends", prompt_of(9, 2), 20, sampling=SAMPLED, constraint=Whole([X, Y, X, Y, []]))
    bench.submit("known", prompt_of(9, 2), 20, constraint=Whole([[]]), prior=Prior(np.array([7, 8], np.int32)))
    bench.complete("stuck", prompt_of(9, 3), 20, sampling=SAMPLED, constraint=Cycle([X, Y, X, []]))
    done = bench.completions["ends", 0]
    assert letters(done.token_ids) == "xyxy" and (done.finish.reason, done.finish.stop) == ("stop", None)
    known = bench.completions["known", 0]
    assert known.token_ids == [] and (known.finish.reason, known.finish.stop) == ("stop", None)
    assert bench.completions["stuck", 0].finish.reason == "error" and len(bench.tokens("free")) == 20


class Whole(Cycle):
    """It is obeyed where it allows nothing more."""

    def start(self):
        return WholePlace(self)


class WholePlace(CyclePlace):
    @property
    def complete(self) -> bool:
        return not self.allowed()


def test_a_continued_completion_is_followed_from_its_new_tokens(model, prompt_of):
    class Later(Cycle):
        def start(self) -> CyclePlace:
            place = super().start()
            place.at = 2  # past the end
            return place

    bench = Bench(model)
    prior = Prior(np.array([X[0], Y[0]], dtype=np.int32))
    bench.complete("r", prompt_of(9), 20, sampling=SAMPLED, prior=prior, constraint=Later([X, Y, SIZE]))
    assert bench.completions["r", 0].finish.reason == "length"
    assert letters(bench.tokens("r")) == "sxysxysxysxysxysxy"


def test_too_many_that_hang_end_constraints_and_nothing_else(model, prompt_of):
    bench = Bench(model, mask_s=0.02)
    only_hangs_are_late(bench)
    hanging = [Endless(0) for _ in range(MOST_LEFT_BEHIND)]
    for i, constraint in enumerate(hanging):
        bench.submit(f"h{i}", prompt_of(9, i), 20, sampling=SAMPLED, constraint=constraint)
    bench.run()
    bench.submit("late", prompt_of(9, 50), 20, sampling=SAMPLED, constraint=Cycle([X, Y]))
    bench.complete("free", prompt_of(9, 51), 20, sampling=SAMPLED)
    assert bench.completions["late", 0].finish.error == masks_module.GIVEN_UP
    assert bench.completions["free", 0].finish.reason == "length"
    for constraint in hanging:
        constraint.let_go.set()


def test_the_wait_for_masks_is_no_activity(model, prompt_of):
    """A slow host shows as a bubble, not as a busy device."""

    class Slow(Cycle):
        def filling(self, place):
            forward = threading.Event()
            bench.engine.executor.compute.run(forward.set)  # after the forward, however late that is
            assert forward.wait(60)
            threading.Event().wait(0.02)

    bench = Bench(model)
    bench.complete("r", prompt_of(9), 20, sampling=SAMPLED, constraint=Slow([X, Y], STOP))
    steps = bench.engine.meter.recent_steps()
    waited_s = sum(step.mask_wait[1] - step.mask_wait[0] for step in steps)
    totals = bench.engine.meter.totals()
    assert waited_s > 20 * 0.015
    assert totals["gpu/bubble_pct/host"] / 100 * totals["total/wall_s"] > 0.9 * waited_s
    assert totals["gpu/active_pct"] / 100 * totals["total/wall_s"] <= totals["total/wall_s"] - 0.9 * waited_s


def test_a_mask_has_a_bit_for_each_token():
    masks = torch.zeros(2, mask_words(VOCAB), dtype=torch.int32)
    AllowList((0, 31, 32, 96), VOCAB).fill(masks, 1)
    assert [t for t in range(VOCAB) if masks[1, t // 32] >> (t % 32) & 1] == [0, 31, 32, 96] and not masks[0].any()


def test_a_row_whose_constraint_could_not_be_followed_never_drafts_again():
    """A step in flight may have drafts that it drafted before; they are refused at once, which takes no time."""
    drafts, host = drafts_of(place := Cycle([X, Y, SIZE], STOP).start(), [X[0], Y[0]]), host_masks(3)
    masks, builder = SimpleNamespace(host=host, renew_host=lambda: None), MaskBuilder(10.0, 1)
    place.fill(host, 0)
    assert builder.build_ahead([RowAhead(drafts, 0, 1, drafts.tokens())], masks) == [2] and drafts.tokens()
    drafts.stop()
    assert builder.build_ahead([RowAhead(drafts, 0, 1, drafts.tokens())], masks) == [0] and not drafts.tokens()
    builder.close()
