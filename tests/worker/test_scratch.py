"""A process's temporary folder: gone with it, or with the next one of its kind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout.process.scratch import ScratchFolder
from tests.support.worker.harness import subprocess_environment

PREFIX = "rollout-scratch-test-"
KILLED = f"""
import os, signal
from rollout.process.scratch import ScratchFolder
folder = ScratchFolder({PREFIX!r})
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def grow_old(folder: Path) -> None:
    an_hour_ago = time.time() - 3600
    os.utime(folder, (an_hour_ago, an_hour_ago))


def test_a_folder_goes_with_its_process(temporary: Path) -> None:
    with ScratchFolder(PREFIX) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away_by_the_next(temporary: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=subprocess_environment(TMPDIR=str(temporary)), stdout=subprocess.PIPE
    )
    left = Path(done.stdout.decode().strip())
    assert left.is_dir()
    grow_old(left)
    with ScratchFolder(PREFIX) as folder:
        assert list(temporary.iterdir()) == [folder]


def test_what_is_in_use_or_just_made_or_not_ours_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("x")
    link, just_made, other = (temporary / name for name in (f"{PREFIX}link", f"{PREFIX}new", "other"))
    link.symlink_to(elsewhere)
    just_made.mkdir()
    other.mkdir()
    grow_old(elsewhere)
    grow_old(other)
    with ScratchFolder(PREFIX) as used:
        grow_old(used)
        with ScratchFolder(PREFIX) as second:
            assert {*temporary.iterdir()} == {elsewhere, link, just_made, other, used, second}
    assert (elsewhere / "file").exists()
