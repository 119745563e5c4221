"""A process's temporary folder: gone with it, or with the next one of the project."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.worker.harness import subprocess_environment
from trainer_bridge.scratch import ScratchFolder

MAKES_ONE = r"""
import os, sys, time
from trainer_bridge.scratch import ScratchFolder
folder = ScratchFolder("test")
(folder.path / "file").write_text("x")
if sys.argv[1:] == ["fork"] and os.fork() == 0:
    try:
        folder.close()
    except RuntimeError:
        pass
    os.write(1, f"{folder.path}\n".encode())
    time.sleep(600)
os.write(1, f"{folder.path}\n".encode())
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(temporary_folder: Path) -> Path:
    return temporary_folder


@contextmanager
def owner(temporary: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder, in a group of its own."""
    environment = subprocess_environment(TMPDIR=str(temporary))
    command = [sys.executable, "-c", MAKES_ONE, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path([process.stdout.readline().strip() for _ in (None, *arguments)][0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_folder_goes_with_its_process(temporary: Path) -> None:
    with ScratchFolder("test") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_at_the_next_start_of_any_kind(temporary: Path) -> None:
    with owner(temporary) as (process, left):
        with ScratchFolder("test"):
            assert (left / "file").exists()
        process.kill()
        process.wait()
        with ScratchFolder("other") as folder:
            assert list(temporary.iterdir()) == [folder]


def test_a_fork_neither_removes_the_folder_nor_keeps_it_after_its_parent(temporary: Path) -> None:
    with owner(temporary, "fork") as (process, left):
        with ScratchFolder("test"):
            assert (left / "file").exists()
        process.kill()
        process.wait()
        with ScratchFolder("test") as folder:
            assert list(temporary.iterdir()) == [folder]


def test_what_is_in_use_or_not_ours_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("x")
    link, without_mark, other = (temporary / name for name in ("rollout-link", "rollout-of-somebody", "other"))
    link.symlink_to(elsewhere)
    without_mark.mkdir()
    other.mkdir()
    with ScratchFolder("test") as used, ScratchFolder("test") as second:
        assert {*temporary.iterdir()} == {elsewhere, link, without_mark, other, used, second}
    assert (elsewhere / "file").exists()


def test_a_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner(temporary) as (process, left):
        process.kill()
        process.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
            ScratchFolder("test").close()
        assert left.exists()
