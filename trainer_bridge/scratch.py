"""Files and folders that must not outlive their process. The next process removes the files of a killed one.

The owner holds a lock on a file. The kernel releases it when the process ends, for whatever reason, and nothing needs
to be known about the process: a lock, unlike a process id, is valid in every container that shares the file system.
Folders without such a file, and files of another user, are never touched. On a file system without locks nothing is
removed.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainer_bridge.process_bound import ProcessBound

_PREFIX = "rollout-"
_MARK = ".rollout-owner"


class OwnerMark(ProcessBound):
    """A new file that this process keeps locked until `close`, or until it ends. `text` is its content."""

    _instead = "it says which process owns something"
    _idle_after_fork = frozenset({"close"})
    _descriptor = -1

    def __init__(self, path: Path, text: str = "") -> None:
        self.path = path
        made = path.with_name(f"{path.name}.new")  # no process finds it under its name before it is locked
        self._descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.write(self._descriptor, text.encode())
        with contextlib.suppress(OSError):  # no locks here: no other process gets one either
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        made.rename(path)

    def close(self) -> None:
        """Remove the file, if it is still there, and release the lock. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._release()

    def _leave_after_fork(self) -> None:
        """Close the descriptor in a forked process: the lock is the parent's, and must not last longer."""
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def inherit(mark: Path, take: Callable[[str], bool]) -> None:
    """If the process that made this mark has ended, call `take` with its content; if that says so, remove the mark.

    No other process can inherit from it meanwhile.
    """
    try:
        descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # there is none, or it is not ours
        return
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:  # another process was first
            return
        if take(os.pread(descriptor, 4096, 0).decode(errors="replace")):
            mark.unlink(missing_ok=True)
    except OSError:  # the owner is alive, or the mark cannot be removed
        return
    finally:
        os.close(descriptor)


class ScratchFolder:
    """A new temporary folder `path`, `rollout-KIND-...`. As a context manager it removes the folder at the end.

    First the folders of all kinds are removed whose processes were killed.
    """

    def __init__(self, kind: str) -> None:
        _clear_away(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        self._mark = OwnerMark(self.path / _MARK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. Idempotent; a forked process removes nothing."""
        if self._mark._owned:
            shutil.rmtree(self.path, ignore_errors=True)
            self._mark.close()


def _clear_away(root: str) -> None:
    """Remove the scratch folders of this user whose processes were killed."""
    with os.scandir(root) as entries:
        folders = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for entry in folders:
        with contextlib.suppress(FileNotFoundError):  # the owner has just removed it
            if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                inherit(Path(entry.path, _MARK), functools.partial(_remove, entry.path))


def _remove(folder: str, text: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return True
