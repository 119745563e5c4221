"""Compilations whose end Triton reports, and those whose end it does not report."""

from __future__ import annotations

import pytest

from rollout.process import compiling


def test_a_compilation_that_fails_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_running", 0)
    now_s = 1000.0
    monkeypatch.setattr(compiling.time, "monotonic", lambda: now_s)
    assert not compiling.compiling()
    assert compiling.begins() is False, "true would stop it"
    compiling.begins()
    assert compiling.compiling()
    compiling.ended()
    assert compiling.compiling()  # the other one
    now_s += compiling.MOST_S
    assert not compiling.compiling()
    compiling.begins()
    assert compiling.compiling()
    compiling.ended()
    assert not compiling.compiling()


def test_many_count_until_long_after_the_last_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_running", 0)
    now_s = 1000.0
    monkeypatch.setattr(compiling.time, "monotonic", lambda: now_s)
    compiling.begins(is_manual_warmup=True)
    assert not compiling.compiling(), "it may be asked for several times"
    with compiling.many_compilations():
        for _ in range(3):
            assert compiling.compiling()
            now_s += compiling.MOST_S - 1
            compiling.begins(is_manual_warmup=True)
            compiling.ended(is_manual_warmup=True)
        assert compiling.compiling()
        now_s += compiling.MOST_S
        assert not compiling.compiling(), "one hangs"
        compiling.begins(is_manual_warmup=False)
        compiling.ended(is_manual_warmup=False)
    assert not compiling.compiling()
