"""The folder of a checkpoint, local or on the hub, and its JSON files.

A folder is untrusted. Code in it is never run, and no link leads out of it.
"""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_UNWANTED = ("*/*", "consolidated*")
_MAX_JSON_BYTES = 64 << 20
_COUNTING = Lock()


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or used; the message names every file or tensor that is at fault."""


def bad_value(where: str, name: str, value: Any, wanted: str) -> CheckpointError:
    """The error of a config's value that is not as `wanted`; `where` names the config."""
    return CheckpointError(f"{where}: {name} is {value!r:.60}; it must be {wanted}")


def resolve_folder(path: str, revision: str | None, weights: bool, progress: Progress | None = None) -> Path:
    """Local folder of a checkpoint; a hub id is downloaded first, with its weights only if `weights`.

    During a download several threads call `progress` with (bytes so far, bytes in all); the total grows as files are
    found. huggingface_hub's own bars are not shown.

    Raises:
        CheckpointError: there is no such folder, or the download fails.
    """
    if not path:
        raise CheckpointError("no model given; set model.path to a local folder or a Hugging Face hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise CheckpointError(f"{path} is not a folder; name a checkpoint's folder or a Hugging Face hub id")
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(_UNWANTED),
                tqdm_class=_counting_bars(progress),
            )
        )
    # huggingface_hub raises errors of its own, of its HTTP library and of the system.
    except Exception as error:
        raise CheckpointError(_hub_problem(path, revision, error)) from error


def _hub_problem(path: str, revision: str | None, error: Exception) -> str:
    """One sentence about a download that failed, and what to change."""
    match error:
        case HFValidationError():
            return f"{path} is neither a local folder nor a hub id; write a hub id as owner/name"
        case GatedRepoError():
            return f"{path} is a gated hub model; accept its terms on its page and set HF_TOKEN to your token"
        case RepositoryNotFoundError():
            return f"{path} is neither a local folder nor a hub model; check the name, or set HF_TOKEN if it is private"
        case RevisionNotFoundError():
            return f"{path} has no revision {revision}; change model.revision to a branch, tag or commit of it"
        case LocalEntryNotFoundError():
            return (
                f"{path} is not a local folder, and the hub does not answer; check the network and HF_HUB_OFFLINE, or "
                "give the folder of a downloaded checkpoint"
            )
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path} cannot be downloaded from the hub; try again, or give a local folder ({reason:.300})"


def _counting_bars(progress: Progress | None) -> type:
    """A class of progress bars for huggingface_hub: draws nothing, and reports the bytes that were written."""

    class Counting(huggingface_hub.utils.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            name = str(options.get("name", ""))
            # There is another bar of bytes: it counts network traffic, which may be less than the files.
            self._progress = progress if options.get("unit") == "B" and not name.endswith(".transfer") else None
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with _COUNTING:
                self.n += n or 0
            if self._progress is not None:
                self._progress(int(self.n), int(self.total or 0))

    return Counting


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a file that would be read is a link that leads out of the folder.

    In the hub's cache every file of a snapshot is a link; there, links may lead anywhere in the cached repository.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() and any(fnmatch(entry.name, pattern) for pattern in (*_SMALL_FILES, *_WEIGHT_FILES)):
            try:
                inside = entry.resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # links in a circle
                inside = False
            if not inside:
                raise CheckpointError(f"{entry} is a link that leads out of its folder; replace it by the file")


#: Transformers' form of floats that JSON lacks: {"__float__": "Infinity"}.
_SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError for anything else, and for a key that is given twice."""
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file" if file.exists() else f"{file} is missing")
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB; no such file is that large")
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not contain a JSON object")
    return content


def _object(pairs: list[tuple[str, Any]]) -> Any:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} is given twice")
    if content.keys() == {"__float__"} and content["__float__"] in _SPECIAL_FLOATS:
        return float(content["__float__"])
    return content
