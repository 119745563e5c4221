"""A temporary folder of this process, which the next one clears away if this one is killed.

The folder is locked for as long as its process lives: the lock ends with the process, however that ends, and unlike a
process id it means the same in every container that shares the folder for temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_JUST_MADE_S = 60.0  # between a folder's making and its locking, generously


class ScratchFolder:
    """A new folder `path`, with `prefix` in its name. As a context manager it goes in the end."""

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(left)
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


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of ours that nobody holds. Whatever cannot be opened is not ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or time.time() < found.st_mtime + _JUST_MADE_S:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
