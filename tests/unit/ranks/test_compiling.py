"""Compilations that Triton tells of, and those whose end it does not tell of."""

from __future__ import annotations

import pytest

from rollout.ranks import compiling


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


def test_what_is_compiled_ahead_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_running", 0)
    compiling.begins(is_manual_warmup=True)
    assert not compiling.compiling()
    compiling.begins(is_manual_warmup=False)
    compiling.ended(is_manual_warmup=True)
    assert compiling.compiling()
    compiling.ended(is_manual_warmup=False)
    assert not compiling.compiling()
