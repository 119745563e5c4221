"""A temporary folder of this process. If the process is killed, the next one removes the folder.

The process holds a file lock on its folder. The kernel releases the lock when the process ends, for whatever reason. A
lock, unlike a process id, is valid in every container that shares the file system.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_MIN_AGE_S = 60.0  # younger folders are kept: their process may not have locked them yet


class ScratchFolder:
    """A new folder `path` whose name begins with `prefix`. As a context manager it removes the folder at the end."""

    def __init__(self, prefix: str) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user that no process has locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # not a folder, or not ours
        return
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or time.time() < found.st_mtime + _MIN_AGE_S:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
