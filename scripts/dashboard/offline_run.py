"""Reads the logged rows, the settings and the summary of an offline W&B run from its folders. Needs no server.

    file = header, then blocks of 32 KiB; a record consists of pieces with checksum, length and kind

A worker that was started again wrote a folder for each process, beside each other: they are one run. The format is
W&B's: a LevelDB log of protobuf records. W&B has no public reader for it. Reading ends at a record that is incomplete
because its process was killed.
"""

import glob
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC, _HEADER_BYTES, _BLOCK = b":W&B", 7, 32_768
_PIECE = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One run. Rows have the logged names and W&B's `_timestamp` (Unix seconds), `_runtime` and `_step`."""

    project: str
    group: str
    name: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    processes: int = 1  # that wrote it, one after the other


def read_offline_run(path: str | Path) -> OfflineRun:
    """The run in a folder, or in a `.wandb` file.

    Raises ValueError unless there is exactly one such file and W&B wrote it; OSError if it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        files = sorted(file.glob("*.wandb"))
        if len(files) != 1:
            raise ValueError(f"{file} has {len(files)} files *.wandb; give the folder of one run (offline-run-...)")
        file = files[0]
    parts = [_read(each) for each in _files_of_the_run(file)]
    last = next((part for part in reversed(parts) if part.id), parts[-1])  # a process may have written nothing
    rows = [row for part in parts for row in part.rows]
    summary = {name: value for part in parts for name, value in part.summary.items()}
    return OfflineRun(last.project, last.group, last.name, rows, summary, last.id, last.config, len(parts))


def _files_of_the_run(file: Path) -> list[Path]:
    """The files of all processes of a run, the oldest first: folders are named by time and id."""
    folder, run_id = file.resolve().parent, file.stem.removeprefix("run-")
    named = re.match(rf"((?:offline-)?run-)\d{{8}}_\d{{6}}-{re.escape(run_id)}", folder.name)
    if named is None:
        return [file]
    # W&B appends a number where two processes start in one second.
    return sorted(folder.parent.glob(f"{named[1]}????????_??????-{glob.escape(run_id)}*/{glob.escape(file.name)}"))


def _read(file: Path) -> OfflineRun:
    data = file.read_bytes()
    if data[:4] != _MAGIC:
        raise ValueError(f"{file} is not a W&B run: it does not begin with {_MAGIC.decode()}")
    project = group = name = run_id = ""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for record in _records(data):
        if record.HasField("run"):
            run = record.run
            project, group, name, run_id = run.project, run.run_group, run.display_name, run.run_id
            config |= _items(run.config.update)
        elif record.HasField("history"):
            rows.append(_items(record.history.item))
        elif record.HasField("summary"):
            summary |= _items(record.summary.update)
    return OfflineRun(project, group, name, rows, summary, run_id, config)


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for whole in _wholes(data):
        record = new_record()
        record.ParseFromString(whole)
        yield record


def _wholes(data: bytes) -> Iterator[bytes]:
    pieces, at = b"", _HEADER_BYTES
    while at + _PIECE.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _PIECE.size:  # padding: no room for another piece
            at += left
            continue
        _, length, kind = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or at + length > len(data):
            return
        pieces = data[at : at + length] if kind in (_WHOLE, _FIRST) else pieces + data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield pieces


def _items(items: Any) -> dict[str, Any]:
    """Names and values. W&B stores a map in parts, each with the path of its keys."""
    found: dict[str, Any] = {}
    for item in items:
        *maps, name = item.nested_key or (item.key,)
        place = found
        for key in maps:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return found
