"""Reads what a W&B run wrote: a log of 32 KiB blocks, each piece with a header of checksum, length and kind."""

import struct
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32_768, struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def records(path: Path) -> list[Any]:
    """All records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    data, found, whole, at = path.read_bytes(), [], b"", 7
    assert data[:4] == b":W&B"
    while at + _HEADER.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        if kind == 0:
            break
        at += _HEADER.size
        whole += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def history_keys(path: Path) -> set[str]:
    """The names of everything that was logged over time."""
    rows = [record.history.item for record in records(path) if record.HasField("history")]
    return {item.key or "/".join(item.nested_key) for row in rows for item in row}
