"""`rollout top` without a worker: keys, sorting, widths, and what a hostile client could write into a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rollout.metrics.definitions import TOP_METRICS
from rollout.metrics.idle import IDLE_CAUSES
from rollout.top.frame import bar, count, fit, frame, parts, seconds, spark
from rollout.top.screen import HELP, CancelRequest, Screen, WorkerView, keys_in, rows_of

ENDPOINT = "tcp://127.0.0.1:5757"


def entry(request_id: str, tokens: int, age_s: float, index: int = 0) -> dict:
    return {
        "owner": "client:trainer", "id": request_id, "index": index, "state": "decode", "prompt_tokens": 3,
        "tokens": tokens, "max_tokens": 20_000, "pages": 9, "age_s": age_s, "version": 4, "priority": 0,
    }  # fmt: skip


def view(*entries: dict, endpoint: str = ENDPOINT) -> WorkerView:
    status = {
        "model": "m", "state": "serving", "weights_version": 4, "rows": {"running": len(entries), "max": 8},
        "queue": {"waiting": 2, "max": 9}, "pages": {"free": 5, "cached": 1, "used": 4, "total": 10},
        "tokens_per_s": 1234.5, "gpu_active_pct": 81.0, "uptime_s": 4000.0,
        "idle_pct": {"no_work": 1.0, "prefill": 2.0, "swap": 3.0, "bubble": 13.0},
        "metrics": {"step/decode_ms": 12.34, "kv/prefix_hit_pct": 45.0, "kv/preemptions": 3, "not/shown": 1.0},
        "swaps": [{"version": 4, "age_s": 12.0, "pause_s": 0.0012}], "sequences": list(entries),
    }  # fmt: skip
    return WorkerView(endpoint, status, (1.0, 5.0, 2.0))


SHORT_OLD, LONG_NEW, LONGEST = entry("old", 10, 90.0), entry("new", 500, 3.0), entry("long", 16_000, 40.0)
VIEW = view(SHORT_OLD, LONG_NEW, LONGEST)


def press(screen: Screen, *keys: str) -> list:
    return [screen.press(key) for key in keys]


def test_rows_come_by_length_or_by_age():
    assert [row.id for row in rows_of([VIEW], "length")] == ["long", "new", "old"]
    assert [row.id for row in rows_of([VIEW], "age")] == ["old", "long", "new"]
    screen = Screen()
    press(screen, "a")
    assert screen.sort == "age"
    press(screen, "s")
    assert screen.sort == "length"


def test_a_cancel_needs_a_selection_and_a_yes():
    screen = Screen()
    screen.arrange([VIEW])
    assert press(screen, "c", "y") == [None, None] and screen.asked is None
    assert press(screen, "down", "down", "c", "n") == [None] * 4
    assert press(screen, "c", "y") == [None, CancelRequest(ENDPOINT, "client:trainer", "new")]
    assert press(screen, "y", "q") == [None, "quit"]


def test_q_while_a_cancel_is_asked_for_only_refuses_it():
    screen = Screen()
    screen.arrange([VIEW])
    assert press(screen, "down", "c", "q") == [None] * 3
    assert screen.asked is None and "not cancelled" in screen.message


def test_the_selection_stays_with_its_row_and_moves_on_when_that_ends():
    screen = Screen()
    screen.arrange([VIEW])
    press(screen, "down")
    assert screen.selected is not None and screen.selected[2] == "long"
    screen.arrange([view(LONGEST, entry("new", 17_000, 3.0))])
    assert screen.selected[2] == "long"
    screen.arrange([view(SHORT_OLD, LONG_NEW)])
    assert screen.selected[2] == "old"
    screen.arrange([view()])
    assert screen.selected is None


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 10), (100, 24), (132, 50), (200, 24)])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal_and_no_frame_higher(width: int, height: int, ascii_only: bool):
    views = [
        view(*(entry(f"r{i}", 10**i, 7.0**i) for i in range(8)), endpoint=f"tcp://10.0.0.{i}:5757") for i in (1, 2)
    ]
    views.append(WorkerView("tcp://10.0.0.3:5757", error="cannot be reached; " * 9))
    for count_of_workers in (1, 3):
        lines = frame(views[:count_of_workers], Screen(), width, height, ascii_only)
        assert len(lines) <= height and all(line.cell_len == width for line in lines)
        assert not ascii_only or all(line.plain.isascii() for line in lines)


def test_an_offload_is_shown_where_there_is_one_and_the_line_still_fits():
    assert VIEW.status is not None
    shares = {"no_work": 10.0, "prefill": 11.1, "swap": 12.2, "bubble": 13.3, "offload": 14.4}
    moving = WorkerView(ENDPOINT, {**VIEW.status, "idle_pct": shares, "gpu_active_pct": 39.0})
    for view, shown in ((VIEW, False), (moving, True)):
        line = next(line for line in frame([view], Screen(), 80, 24) if line.plain.startswith("  gpu"))
        assert ("offload 14" in line.plain) == shown and line.cell_len == 80 and "no work 1" in line.plain


def test_the_keys_are_shown_once_whether_the_frame_is_full_or_not():
    for height in (5, 12, 24, 60, None):
        lines = [line.plain for line in frame([VIEW], Screen(), 80, height)]
        assert lines.count(lines[-1]) == 1 and all(key in lines[-1] for key in ("q to quit", "c to cancel", "? for"))
        assert len(HELP) <= 80


def test_why_a_worker_cannot_be_asked_is_said_in_full():
    error = "the worker at tcp://127.0.0.1:5757 and this client do not agree on CURVE: give the client its keys"
    lines = [line.plain for line in frame([WorkerView(ENDPOINT, error=error)], Screen(), 80, 24)]
    assert error in " ".join(" ".join(lines[1:4]).split()) and all(len(line) == 80 for line in lines)
    for height in (24, 4):  # as a block, and as a line
        silent = frame([WorkerView(ENDPOINT, error=f"{ENDPOINT} cannot be reached")], Screen(), 80, height)
        assert silent[1].plain.split() == [ENDPOINT, "cannot", "be", "reached"]


def test_a_frame_says_how_a_worker_is():
    text = "\n".join(line.plain for line in frame([VIEW], Screen(), 80, 24))
    for said in (ENDPOINT, "serving", "3/8", "40.0%", "queue 2", "active 81.0", "bubble 13.0", "no work 1.0"):
        assert said in text
    assert "v4 12.0s ago, 1.2 ms" in text and "1234" in text and "up 1h06m" in text
    assert "0.7 a row" in text, "of the last second, as the rows are"
    rows = [line.plain for line in frame([VIEW], Screen(), 80, 24) if " decode  " in line.plain]
    assert [row.split()[0] for row in rows] == ["long", "new", "old"]
    assert rows[0].count("█") > rows[1].count("█") >= rows[2].count("█") == 0


def test_a_frame_has_the_declared_metrics_that_the_worker_reports_and_the_legend_explains_them():
    (line,) = (line.plain for line in frame([VIEW], Screen(), 80, 24) if line.plain.startswith("  last"))
    assert line.rstrip() == "  last  decode step 12.3 ms, prefix hits 45.0%, preempted 3"
    screen = Screen()
    press(screen, "?")
    legend = "\n".join(line.plain for line in frame([VIEW], screen, 100, 60))
    for metric in TOP_METRICS:
        assert str(metric.top) in legend and metric.meaning.split(";")[0][:30] in legend
    assert all(cause.replace("_", " ") in legend for cause in IDLE_CAUSES)
    press(screen, "?")
    assert any(line.plain.startswith("  new ") for line in frame([VIEW], screen, 80, 24))


def test_drafts_have_lines_of_their_own_where_there_are_any():
    """They fit into 80 columns: acceptance by drafter and by age, tokens a step, time saved and expected."""
    assert VIEW.status is not None
    of_drafts = [metric for metric in TOP_METRICS if metric.name.startswith("speculation/")]
    for drafted in (0, 1):
        values = {metric.name: 12.3 * drafted for metric in of_drafts} | {"step/decode_ms": 1.0}
        values["speculation/saved_s"] = -45678.9 * drafted
        lines = frame([WorkerView(ENDPOINT, {**VIEW.status, "metrics": values})], Screen(), 80, 24)
        assert all(line.cell_len == 80 for line in lines)
        at = [i for i, line in enumerate(lines) if line.plain.startswith("  draft ")]
        assert bool(at) == (drafted > 0)
        if at:
            (swaps,) = (i for i, line in enumerate(lines) if line.plain.startswith("  swaps"))
            text = " ".join(" ".join(line.plain for line in lines[at[0] : swaps]).split())
            assert text.startswith("draft accepted 12.3%, suffix 12.3%, ngram 12.3%, heads 12.3%, age 0 12.3%")
            for said in ("age 1 12.3%", "age 2 to 4 12.3%", "age 5 up 12.3%", "saved -45678.9 s", "expected 12.3 s"):
                assert f"{said}," in text
            assert text.endswith("a step 12.3 tokens")


def test_the_selected_row_is_shown_however_many_there_are():
    screen = Screen()
    views = [view(*(entry(f"row{i}", 1000 - i, 1.0) for i in range(300)))]
    screen.arrange(views)
    press(screen, *["down"] * 200)
    assert any(line.plain.startswith("> row199") for line in frame(views, screen, 80, 24))


@given(st.text(max_size=40), st.integers(0, 30))
def test_whatever_a_client_calls_itself_fits_and_moves_no_cursor(text: str, width: int):
    fitted = fit(text, width)
    assert cell_len(fitted) == width and all(character.isprintable() for character in fitted)


def test_an_escape_sequence_in_an_id_is_shown_not_obeyed():
    lines = frame([view(entry("\x1b[2Jgone", 5, 1.0))], Screen(), 80, 24)
    assert any("?[2Jgone" in line.plain for line in lines) and not any("\x1b" in line.plain for line in lines)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(1, 60))
def test_the_parts_of_a_stacked_bar_never_exceed_it(shares: list[float], width: int):
    cells = parts(shares, width)
    assert len(cells) == len(shares) and sum(cells) <= width and min(cells) >= 0
    if sum(shares) >= 1:
        assert sum(cells) == width


def test_marks_are_as_wide_as_asked():
    assert bar(0.5, 4) == "██  " and bar(0.5, 4, ascii_only=True) == "##  " and bar(7.0, 3) == "███"
    assert spark([0, 1, 2], 5) == "  ▁▅█" and spark([], 3) == "   " and spark([0, 0], 2) == "▁▁"
    assert [count(value) for value in (7, 99_999, 123_456, 12_345_678)] == ["7", "99999", "123.5k", "12.3M"]
    assert [seconds(value) for value in (0.04, 99.9, 100, 3599, 3600, 200_000)] == [
        "0.0s", "99.9s", "1m40s", "59m59s", "1h00m", "2d07h",
    ]  # fmt: skip


def test_keys_are_distinguished():
    assert keys_in("j\x1b[A\x1b[B\x1bOBc") == ["j", "up", "down", "down", "c"]
    assert keys_in("\x1b[15~y\x1b[1;5Ac") == ["y", "c"] and keys_in("\x1b") == ["\x1b"]
