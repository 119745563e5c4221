"""Folders of weights: which files a folder has, and whether they have changed since."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_gateway.http.http_errors import HttpError, bad_request

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """A folder of weights, with name, bytes and time of the last change (ns) of each file when it was looked at."""

    path: Path
    files: tuple[tuple[str, int, int], ...]

    def problem(self) -> str:
        """The reason why these weights cannot be read again, by a look at the files; empty if they can."""
        try:
            changed = _marks(self.path, [name for name, _, _ in self.files]) != self.files
        except OSError:
            return f"their folder {self.path} is gone"
        return f"their folder {self.path} was changed since" if changed else ""


def path_below(root: Path, folder: str, field: str) -> Path:
    """A path, which may be relative to `root`, and may not exist. Raises `HttpError` that names `field`."""
    try:
        path = (root / Path(folder).expanduser()).resolve()
        path.is_dir()  # raises for a name that is too long, which `resolve` lets pass
    except (OSError, ValueError, RuntimeError) as error:
        raise bad_request(f"{folder!r:.200} is not a path: {error}", field) from error
    if not path.is_relative_to(root):
        raise HttpError(403, f"{folder!r:.200} is not below --weights-root {root}", field)
    return path


def find_folder(root: Path, folder: str, field: str) -> WeightsFolder:
    """The folder of weights at a path, which may be relative to `root`. Raises `HttpError` that names `field`."""
    path = path_below(root, folder, field)
    if not path.is_dir():
        raise bad_request(f"there is no folder {path!s:.300}", field)
    names = [file.name for file in path.glob("*.safetensors")]
    index = path / _INDEX
    if index.is_file():  # a folder may hold other files, too
        try:
            found = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise bad_request(f"{_INDEX} of {folder!r:.200} cannot be read: {error!r:.200}", field) from error
        names = [name for name in found if isinstance(name, str)]
    try:
        marks = _marks(path, names)
    except (OSError, ValueError):  # ValueError: a name with a null
        marks = ()
    if not marks:
        raise bad_request(f"{path!s:.300} has no complete set of safetensors files", field)
    return WeightsFolder(path, marks)


def _marks(path: Path, names: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """The files of a folder as they are now. Raises `OSError` for a name that is no file of this folder."""
    marks = []
    for name in sorted(names):
        file = path / name
        facts = file.stat()
        if not file.is_file() or file.resolve().parent != path:
            raise FileNotFoundError(name)
        marks.append((name, facts.st_size, facts.st_mtime_ns))
    return tuple(marks)
