"""What a worker's start shows."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from rollout.progress import stage


class Terminal(io.StringIO):
    """What stderr is when somebody looks."""

    def isatty(self) -> bool:
        return True


def run() -> None:
    with stage("loading weights") as advance:
        for done in range(1, 5):
            advance(done, 4)


def test_without_a_terminal_a_stage_is_a_line_at_its_begin_and_end(caplog, capsys):
    with caplog.at_level(logging.INFO, "rollout"):
        run()
    assert caplog.messages[0] == "loading weights"
    assert re.fullmatch(r"loading weights took \d+\.\d s", caplog.messages[1]) and len(caplog.messages) == 2
    assert capsys.readouterr() == ("", ""), "no bar"


def test_on_a_terminal_a_stage_is_a_bar_on_stderr_only(caplog, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "rollout"):
        run()
    assert "loading weights" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert capsys.readouterr().out == ""
    assert [message.split(" took")[0] for message in caplog.messages] == ["loading weights"], "the bar is the begin"


def test_a_stage_that_fails_is_not_said_to_have_ended(caplog):
    with caplog.at_level(logging.INFO, "rollout"), pytest.raises(ValueError, match="no room"), stage("preparing"):
        raise ValueError("no room")
    assert caplog.messages == ["preparing"]
