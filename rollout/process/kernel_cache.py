"""Compiled kernels in a folder that may be copied, mounted or moved.

Triton lists a kernel's files by absolute paths, so it finds no file in a copy of its cache. Here they are found beside
their list. A kernel that Triton's own folder lacks is read from a second one, which is never written. Both hold
programs: only use a folder from a source whose code you would run.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

from triton.runtime.cache import FileCacheManager

log = logging.getLogger(__name__)


class KernelCache(FileCacheManager):
    """Triton's view of the files of one key. `shipped` is the folder for what its own folder lacks."""

    shipped: ClassVar[Path | None] = None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._second = None if self.shipped is None or override or dump else self.shipped / key

    def get_file(self, filename: str) -> str | None:
        """The path of a file."""
        own: str | None = super().get_file(filename)
        if own is not None or self._second is None or not (self._second / filename).is_file():
            return own
        return str(self._second / filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of the files of a kernel by name, or None if one is missing."""
        path = self.get_file(f"__grp__{filename}")
        if path is None:
            return None
        try:
            names: Any = json.loads(Path(path).read_text())["child_paths"]
            found = {str(name): self.get_file(name) for name in names}
        except (ValueError, KeyError, TypeError):
            log.warning("%s is damaged: its kernel is compiled again", path)
            return None
        files = {name: file for name, file in found.items() if file is not None}
        return files if len(files) == len(found) else None
