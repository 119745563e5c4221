"""The rules by which rank 0 finds a lost rank, and by which a slow one stays."""

from dataclasses import replace
from typing import Any

import pytest

from rollout.ranks.rank_watch import BEAT_S, SILENT_S, FollowerState, LaneProgress, RanksState, RankWatch

STALL_S = 8.0
LOOK_S = BEAT_S
FIRST, SECOND = FollowerState(pid=11), FollowerState(pid=12)
#: A step is ordered, and neither follower has completed it.
WAITING = RanksState([replace(FIRST, launched=1), replace(SECOND, launched=1)], ordered=1, busy=True)


class Group:
    """A group that is looked at every quarter of a second.

    `beats` says which followers beat, `looks` whose main threads look for copies.
    """

    def __init__(self, look: RanksState, stall_s: float | None = STALL_S) -> None:
        self.look = look
        self.watch = RankWatch(len(look.followers), stall_s)
        self.beats = [True] * len(look.followers)
        self.looks = [True] * len(look.followers)
        self.now_s, self.failure = 0.0, ""

    def change(self, follower: int | None = None, **fields: Any) -> None:
        if follower is None:
            self.look = replace(self.look, **fields)
            return
        followers = list(self.look.followers)
        followers[follower] = replace(followers[follower], **fields)
        self.look = replace(self.look, followers=followers)

    def go(self, seconds: float, cpu: float | None = None, passed_s: float = LOOK_S) -> str:
        """Look for so long, or until the group is lost. `cpu` is how many cores its ranks use."""
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for follower, look in enumerate(self.look.followers):
                beat, looks = look.beat + self.beats[follower], look.looks + self.looks[follower]
                self.change(follower, beat=beat, looks=looks)
            if cpu is not None:
                self.change(compute_s=(self.look.compute_s or 0.0) + cpu * LOOK_S)
                for follower, look in enumerate(self.look.followers):
                    self.change(follower, main_s=(look.main_s or 0.0) + cpu * LOOK_S)
            self.failure = self.watch.find_stall(self.look, passed_s)
            if self.failure:
                break
        return self.failure


@pytest.mark.parametrize(("status", "says"), [(-9, "ended by signal 9"), (1, "ended with status 1: no memory")])
def test_a_process_that_ended_is_found_at_once(status: int, says: str) -> None:
    group = Group(RanksState([FIRST, SECOND]))
    assert group.go(100) == ""
    group.change(1, status=status, said="no memory")
    assert says in group.go(LOOK_S) and "rank 2" in group.failure


@pytest.mark.parametrize("ready", [False, True])
def test_a_stopped_process_is_found_also_while_it_starts(ready: bool) -> None:
    group = Group(RanksState([replace(FIRST, ready=ready), SECOND]))
    group.change(0, stopped=True)
    group.beats[0] = False
    assert "rank 1 (process 11) has hung" in group.go(60)
    assert SILENT_S < group.now_s <= SILENT_S + 2 * LOOK_S


def test_a_process_that_is_stopped_now_and_then_is_not_lost() -> None:
    group = Group(RanksState([FIRST, SECOND]))
    for _ in range(5):
        group.change(0, stopped=True)
        group.beats[0] = False
        assert group.go(SILENT_S - 1) == ""
        group.change(0, stopped=False)
        group.beats[0] = True
        assert group.go(1) == ""


def test_a_process_that_is_stopped_at_every_look_and_beats_between_is_not_lost() -> None:
    group = Group(RanksState([FIRST, SECOND]))
    group.change(0, stopped=True)
    for _ in range(10):
        group.beats[0] = False
        assert group.go(SILENT_S - 1) == ""
        group.beats[0] = True
        assert group.go(LOOK_S) == ""


def test_a_beat_that_stands_still_counts_once_a_follower_is_ready() -> None:
    group = Group(RanksState([FIRST, replace(SECOND, ready=False)]))
    group.beats[1] = False
    assert group.go(600) == ""  # it imports, or loads a large model
    group.beats[1] = True
    group.change(1, ready=True)
    assert group.go(10) == ""
    group.beats[1], began_s = False, group.now_s
    assert "rank 2" in group.go(60)
    assert SILENT_S < group.now_s - began_s <= SILENT_S + 2 * LOOK_S


def test_time_that_the_watching_thread_has_not_seen_does_not_count() -> None:
    group = Group(WAITING)
    group.beats[0] = False
    assert group.go(30, passed_s=0.01) == ""


def test_a_group_that_completes_nothing_is_lost_however_it_beats() -> None:
    group = Group(WAITING)
    assert "no rank has completed anything for 8 s" in group.go(60)
    assert group.now_s <= STALL_S + 2 * LOOK_S


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "ranks 0, 1, 2 have hung"),
        ({"followers": [replace(FIRST, sequence=1, launched=1), replace(SECOND, launched=1)]},
          "rank 2 has hung"),  # it took no order
        ({"followers": [replace(FIRST, sequence=1, launched=1, done=1), replace(SECOND, sequence=1, launched=1)],
          "busy": False}, "rank 2 has hung"),
        ({"followers": [replace(FIRST, sequence=1), replace(SECOND, sequence=1)]}, "rank 0 has hung"),
    ],
)  # fmt: skip
def test_the_ranks_that_are_behind_are_named(fields: dict[str, Any], named: str) -> None:
    group = Group(replace(WAITING, **({"followers": [replace(f, sequence=1) for f in WAITING.followers]} | fields)))
    assert named in group.go(60)


def test_an_idle_group_is_not_lost() -> None:
    done = [replace(follower, sequence=4, launched=3, done=3) for follower in (FIRST, SECOND)]
    assert Group(RanksState(done, ordered=4, done=3)).go(3600) == ""


def test_each_step_that_is_completed_or_enqueued_begins_the_time_anew() -> None:
    group = Group(replace(WAITING, followers=[replace(f, sequence=1) for f in WAITING.followers]))
    for number in range(1, 10):
        assert group.go(STALL_S - 1) == ""
        group.change(number % 2, **{("done", "launched")[number % 2]: 20 + number})
        group.change(0, launched=40)
    assert group.go(STALL_S - 1) == ""
    group.change(done=1)  # of rank 0
    assert group.go(STALL_S - 1) == ""
    assert "hung" in group.go(2)


@pytest.mark.parametrize("who", [None, 0])
def test_no_time_counts_while_a_rank_compiles(who: int | None) -> None:
    group = Group(WAITING)
    group.change(who, compiling=True)
    assert group.go(60) == ""
    group.change(who, compiling=False)
    assert group.go(STALL_S - 1) == ""
    assert "hung" in group.go(2)


@pytest.mark.parametrize("look", [WAITING, RanksState([FIRST, SECOND], ordered=1)])
def test_ranks_that_compute_on_a_cpu_are_slow_and_not_hung(look: RanksState) -> None:
    group = Group(look)
    assert group.go(120, cpu=0.1) == ""  # a tenth of a core: the machine is busy
    hung_s = group.now_s
    assert "hung" in group.go(60, cpu=0.01)  # threads that look around
    assert group.now_s - hung_s <= STALL_S + 2.0


# --- lanes ------------------------------------------------------------------------------------------------------------


def idle(ordered: int = 4, **lanes: LaneProgress) -> RanksState:
    """A group that has done all that was ordered; rank 2 has these lanes."""
    done = [replace(follower, sequence=4, launched=3, done=3) for follower in (FIRST, SECOND)]
    return RanksState([done[0], replace(done[1], lanes=lanes)], ordered=ordered, done=3)


LANES = ("updates", "adapters", "adapter_copies", "kv_out", "kv_in", "state_out", "state_in", "swap")


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_that_completes_nothing_is_found_while_no_step_is_ordered(lane: str) -> None:
    group = Group(idle(**{lane: LaneProgress(True, 7)}))
    assert f"rank 2 has hung: it has completed nothing in its lane {lane} for 8 s" in group.go(60)
    assert group.now_s <= STALL_S + 2 * LOOK_S


@pytest.mark.parametrize("lane", LANES[:-1])
def test_a_lane_that_completes_nothing_is_found_while_steps_and_other_lanes_go_on(lane: str) -> None:
    group = Group(idle(**{lane: LaneProgress(True, 7)}))
    other = "kv_in" if lane == "kv_out" else "kv_out"
    for number in range(4, 100):
        group.change(
            1,
            sequence=number,
            done=number,
            launched=number,
            lanes={lane: LaneProgress(True, 7), other: LaneProgress(True, number)},
        )
        group.change(0, sequence=number, done=number, launched=number)
        group.change(done=number, ordered=number)
        if group.go(0.5):
            break
    assert f"rank 2 has hung: it has completed nothing in its lane {lane}" in group.failure
    assert group.now_s <= STALL_S + 1


def test_a_lane_may_take_as_long_as_it_needs_while_it_completes_parts() -> None:
    for done in range(100):
        if done == 0:
            group = Group(idle(updates=LaneProgress(True, 0), swap=LaneProgress(True, 0)))
        group.change(1, lanes={"updates": LaneProgress(True, done), "swap": LaneProgress(True, done)})
        assert group.go(STALL_S - 1) == ""
    assert "lane" in group.go(2)


@pytest.mark.parametrize("lane", LANES)
def test_a_copy_whose_end_the_main_thread_does_not_look_for_is_not_what_hangs(lane: str) -> None:
    group = Group(idle(**{lane: LaneProgress(True, 7)}))
    group.looks[1] = False
    found = group.go(60)
    assert found == "" if lane not in ("updates", "adapters") else lane in found
    group.looks[1] = True
    assert f"in its lane {lane}" in group.go(60)


def test_a_lane_without_work_is_not_lost() -> None:
    group = Group(idle(**{lane: LaneProgress(False, 7) for lane in LANES}))
    assert group.go(3600) == ""
    group.change(1, lanes={"adapters": LaneProgress(True, 7)})
    assert group.go(STALL_S - 1) == ""  # the idle time before does not count
    assert "adapters" in group.go(2)


def test_an_order_that_a_follower_does_not_carry_out_is_found_while_no_step_is_ordered() -> None:
    group = Group(idle(ordered=5))
    group.change(0, sequence=5)
    assert "rank 2 has hung: it has completed nothing in its lane orders for 8 s" in group.go(60)
    assert group.now_s <= STALL_S + 2 * LOOK_S


def test_a_sleep_may_take_as_long_as_its_parts_need() -> None:
    group = Group(idle(ordered=5))
    group.change(0, sequence=5)
    for parts in range(20):
        group.change(1, lanes={"sleep": LaneProgress(False, parts)})
        assert group.go(STALL_S - 1) == ""
    for pieces in range(1, 20):  # of an update that was dropped, which the order waits for
        group.change(1, lanes={"sleep": LaneProgress(False, parts), "updates": LaneProgress(True, pieces)})
        assert group.go(STALL_S - 1) == ""
    assert "rank 2 has hung" in group.go(2)


def test_an_order_that_waits_for_a_step_is_judged_with_the_steps() -> None:
    group = Group(idle(ordered=9))
    group.change(1, launched=40)  # its device waits for sums of rank 1, whose steps are slow
    for number in range(5, 20):
        group.change(0, sequence=number, launched=number, done=number)
        assert group.go(STALL_S - 1) == ""


@pytest.mark.parametrize("lane", ["swap", "sleep", "kv_out"])
def test_a_lane_of_rank_0_is_watched_too(lane: str) -> None:
    group = Group(replace(idle(), lanes={lane: LaneProgress(True, 7)}))
    assert f"rank 0 has hung: it has completed nothing in its lane {lane}" in group.go(60)


def test_steps_wait_for_a_swap_that_goes_on() -> None:
    group = Group(WAITING)
    for parts in range(20):
        group.change(lanes={"swap": LaneProgress(True, parts)})
        assert group.go(STALL_S - 1) == ""
    group.change(lanes={"swap": LaneProgress(False, parts)})
    assert "no rank has completed anything" in group.go(2)


@pytest.mark.parametrize("hung", ["all", "rank 0"])
def test_pieces_of_an_update_do_not_hide_that_steps_hang(hung: str) -> None:
    done = 0 if hung == "all" else 1
    group = Group(replace(WAITING, followers=[replace(f, sequence=1, done=done) for f in WAITING.followers]))
    for pieces in range(100):
        group.change(ordered=pieces + 2)
        for follower in (0, 1):
            group.change(follower, sequence=pieces + 1 + follower, lanes={"updates": LaneProgress(True, pieces)})
        if group.go(0.5):
            break
    assert "no rank has completed anything for 8 s" in group.failure


def test_a_group_that_only_takes_pieces_is_never_up_to_date_and_not_lost() -> None:
    group = Group(idle())
    for pieces in range(5, 200):
        group.change(ordered=pieces)
        for follower in (0, 1):
            group.change(follower, sequence=pieces - 1, lanes={"updates": LaneProgress(True, pieces)})
        assert group.go(0.5) == ""


def test_no_time_counts_in_a_lane_while_its_rank_sees_none_pass_or_one_compiles() -> None:
    group = Group(idle(adapters=LaneProgress(True, 7)))
    for _ in range(30):  # it has little time on an overloaded machine: one beat in two seconds
        group.beats[1] = False
        assert group.go(2 - LOOK_S) == ""
        group.beats[1] = True
        assert group.go(LOOK_S) == ""
    group = Group(idle(adapters=LaneProgress(True, 7)))
    group.change(0, compiling=True)
    assert group.go(60) == ""
    group.change(0, compiling=False)
    assert "adapters" in group.go(60)


def test_without_a_limit_only_the_process_counts() -> None:
    group = Group(WAITING, stall_s=None)
    assert group.go(3600) == ""
    group.change(1, status=0)
    assert "rank 2 ended with status 0" in group.go(LOOK_S)
