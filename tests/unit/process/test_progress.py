"""What a worker's start shows."""

import contextlib
import io
import logging
import re
import subprocess
import sys
import threading
import time

import pytest

from rollout.process.progress import stage


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


#: Every stage takes long enough for the log, and has one line while it lasts.
SLOW = {"quick_s": 0.0, "every_s": 600.0}
#: Every stage is quick, on the busiest machine.
QUICK = {"quick_s": 600.0}


def lines_of(caplog) -> list[logging.LogRecord]:
    """Without what a thread of another test may still say."""
    return [record for record in caplog.records if record.name == "rollout.progress"]


def until_said(caplog, messages: int) -> None:
    """Wait for the timer's thread."""
    until_s = time.monotonic() + 60
    while len(lines_of(caplog)) < messages:
        assert time.monotonic() < until_s, "nothing is said"
        time.sleep(0.001)


def run(caplog, messages: int, **times: float) -> None:
    with stage("loading weights", **times) as advance:
        for done in range(1, 5):
            advance(done, 4)
        until_said(caplog, messages)


def test_without_a_terminal_a_long_stage_is_a_line_while_it_lasts_and_one_at_its_end(caplog, capsys):
    with caplog.at_level(logging.INFO, "rollout"):
        run(caplog, 1, **SLOW)
    begun, ended = lines_of(caplog)
    assert begun.stage == ended.stage == "loading weights"
    assert ended.took_s >= 0 and not hasattr(begun, "took_s")
    assert capsys.readouterr() == ("", ""), "no bar"


def test_a_quick_stage_leaves_no_line_and_no_thread(caplog):
    threads = set(threading.enumerate())
    with caplog.at_level(logging.INFO, "rollout"):
        run(caplog, 0, **QUICK)
        with pytest.raises(ValueError, match="no room"), stage("preparing", **QUICK):
            raise ValueError("no room")
    assert lines_of(caplog) == []
    until_s = time.monotonic() + 60  # less than the timers would take
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_on_a_terminal_a_stage_is_a_bar_on_stderr_only(caplog, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level(logging.INFO, "rollout"), contextlib.redirect_stderr(terminal):
        run(caplog, 0, **SLOW)
    assert "loading weights" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert capsys.readouterr().out == ""
    (ended,) = lines_of(caplog)  # the bar is the begin
    assert ended.stage == "loading weights" and ended.took_s >= 0


_SCRIPT = """
import sys, threading, time, rollout.process.progress
said, write, advanced = [], sys.stderr.write, threading.Event()
# The first line waits for the call: the lines after it tell its figures, however late it comes.
sys.stderr.write = lambda text: (advanced.wait(), said.append(text), write(text))[2]
with rollout.process.progress.stage("measuring", quiet=len(sys.argv) > 1, quick_s=0.05, every_s=0.05) as advance:
    advance(1, 4)
    advanced.set()
    while len(sys.argv) == 1 and not any("%" in text for text in said):
        time.sleep(0.01)
    time.sleep(0.2)
print("{}")
"""


@pytest.mark.parametrize("for_a_program", [False, True])
def test_a_command_that_keeps_no_log_says_it_in_plain_lines_and_to_a_program_nothing(for_a_program):
    command = [sys.executable, "-c", _SCRIPT, *(["quiet"] if for_a_program else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "{}\n"
    if for_a_program:
        assert run.stderr == ""
        return
    first, *more, last = run.stderr.splitlines()
    assert first == "measuring" and set(more) == {"measuring: 25 %"} and re.fullmatch(r"measuring took \d+\.\d s", last)


def test_lines_in_a_log_have_their_figures_as_data(caplog):
    with caplog.at_level(logging.INFO, "rollout"), stage("fetching", quick_s=0.0, every_s=0.01) as advance:
        advance(3, 12)
        newer = len(lines_of(caplog)) + 1  # one line may be under way, and older than the call
        until_said(caplog, newer + 1)
    told = lines_of(caplog)[newer]
    assert (told.stage, told.done, told.total) == ("fetching", 3, 12)
    assert lines_of(caplog)[-1].stage == "fetching" and lines_of(caplog)[-1].took_s >= 0


def test_a_stage_that_fails_is_not_said_to_have_ended(caplog):
    with caplog.at_level(logging.INFO, "rollout"), pytest.raises(ValueError, match="no room"):
        with stage("preparing", **SLOW):
            until_said(caplog, 1)
            raise ValueError("no room")
    (begun,) = lines_of(caplog)
    assert begun.stage == "preparing" and not hasattr(begun, "took_s")
