"""A checkpoint on this host that follows the versions a trainer publishes in a shared folder, as slime and miles do.

    SOURCE/weight_v000004/      a full version: an ordinary checkpoint, copied
    SOURCE/weight_v000005/      a delta: changes of version 4, a zstd frame for each changed tensor
    LOCAL/                      the checkpoint, for `/update_weights_from_disk`
    LOCAL/.weight_sync/         the version that LOCAL has, and a lock: gateways of one host may share LOCAL

The metadata of a delta's files has the checksum of each tensor's new bytes. `xor`: new bytes ^ old bytes. `overwrite`:
the number of changed bytes, their places in the tensor (all of 4 bytes, little-endian), then their values.

Invariants:

- The new bytes of every tensor are checked before the first one is written. A copy is complete before it is used.
- While files change, LOCAL has no version. A pull that finds none, or one from before a restart of the host, begins
  anew. It never continues from a half-written checkpoint.
- Files that no pull wrote are neither replaced nor removed.
"""

from __future__ import annotations

import fcntl
import json
import operator
import shutil
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rollout.extras import install
from rollout_gateway.http.http_errors import HttpError, bad_request

_SYNC, _INDEX = ".weight_sync", "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100 << 20  # safetensors reads no longer ones
_FORMATS = {
    "compression_format": ("zstd",),
    "delta_encoding": ("xor", "overwrite"),
    "checksum_format": ("xxh3-128", "blake3", "adler32"),
}


class _Place(NamedTuple):
    """The bytes of a tensor in a file."""

    file: Path
    begin: int
    nbytes: int


def pull(local: Path, source: Path, version: int, base: Path | None) -> None:
    """Bring `local` to a version of `source`; version 0 is `base`.

    Raises `HttpError` with `local` as it was, or at the version before the delta that could not be applied.
    """
    sync = local / _SYNC
    try:
        files = local.exists() and any(file != sync for file in local.iterdir())
        if files and not sync.exists():  # in this order: another pull makes the folder before it writes files
            raise bad_request(f"{local!s:.200} has files that no pull wrote: name a new folder", "local_checkpoint_dir")
        sync.mkdir(parents=True, exist_ok=True)
        with (sync / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            have = _version_of(local)
            have = None if have is None or have > version else have  # a newer one is of an earlier run
            start = version
            while start > (have or 0) and "delta_encoding" in _index(_folder(source, start))[0]:
                start -= 1
            if have is None or start > have:
                if start == 0 and base is None:
                    raise bad_request("the workers' model is no folder here: publish a full version", "source_dir")
                _copy(_folder(source, start) if start or base is None else base, local, start)
                have = start
            for number in range(have + 1, version + 1):
                _apply(local, _folder(source, number), number)
    except OSError as error:
        raise _refused(f"the weights cannot be pulled: {error!s:.300}") from error


def _folder(source: Path, version: int) -> Path:
    return source / f"weight_v{version:06d}"


def _refused(message: str) -> HttpError:
    return HttpError(409, message, "source_dir")


def _version_of(local: Path) -> int | None:
    """None: none, or files may be half-written."""
    try:
        state = json.loads((local / _SYNC / "state.json").read_text())
        return state["version"] if state == _state(state["version"]) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _state(version: int | None) -> dict[str, Any]:
    """A version, and this run of the host: files that were written without a sync may be lost when it ends."""
    run = Path("/proc/sys/kernel/random/boot_id")
    return {"version": version, "boot_id": run.read_text().strip() if run.exists() else ""}


def _note_version(local: Path, version: int | None) -> None:
    state = local / _SYNC / "state.json"
    draft = state.with_suffix(".tmp")
    draft.write_text(json.dumps(_state(version)))
    draft.replace(state)


def _copy(source: Path, local: Path, version: int) -> None:
    """Make `local` an exact copy of the files in a folder."""
    incoming = local / _SYNC / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    names = {file.name for file in source.iterdir() if file.is_file()}
    try:
        for name in names:
            shutil.copyfile(source / name, incoming / name)
        if not _tensors(incoming):
            raise _refused(f"{source!s:.200} has no safetensors files")
        _note_version(local, None)
        for old in [file for file in local.iterdir() if file.is_file() and file.name not in names]:
            old.unlink()
        for name in names:
            (incoming / name).replace(local / name)
        _note_version(local, version)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _index(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a folder's index, and the file of each tensor; empty if it has no index."""
    if not folder.is_dir():
        raise HttpError(409, f"the version in {folder!s:.200} was not published", "target_version")
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return dict(index.get("metadata", {})), dict(index.get("weight_map", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise _refused(f"{path!s:.200} cannot be read: {error!r:.200}") from error


def _tensors(folder: Path) -> dict[str, tuple[_Place, str]]:
    """The places of a folder's tensors, with the checksums of a delta. Raises `HttpError` for torn files."""
    found: dict[str, tuple[_Place, str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _MOST_HEADER_BYTES:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(length))
            checks = dict(header.pop("__metadata__", {}))
            for name, value in header.items():
                begin, end = (operator.index(offset) for offset in value["data_offsets"])
                if not 0 <= begin <= end <= path.stat().st_size - 8 - length:
                    raise ValueError(f"it ends before {name}")
                found[name] = _Place(path, 8 + length + begin, end - begin), str(checks.get(name))
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refused(f"{path!s:.200} is torn or no safetensors file: {error!s:.200}") from error
    for name, home in _index(folder)[1].items():
        if name not in found or found[name][0].file.name != home:
            raise _refused(f"{folder!s:.200} lacks {name} of its index")
    return found


def _apply(local: Path, folder: Path, version: int) -> None:
    """Apply a delta in place."""
    metadata, _ = _index(folder)
    versions = {"version": (f"{version:06d}",), "base_version": (f"{version - 1:06d}",)}
    for name, known in {**versions, **_FORMATS}.items():
        if metadata.get(name) not in known:
            raise _refused(f"{folder!s:.200} has the {name} {metadata.get(name)!r:.80}, not {' or '.join(known)}")
    encoding, checksum = metadata["delta_encoding"], metadata["checksum_format"]
    try:
        from zstandard import ZstdError

        _checksum(checksum, b"")
    except ModuleNotFoundError as error:
        raise HttpError(501, f"deltas of weights need {error.name}: {install('http', 'pull')}") from error
    places, changes = _tensors(local), _tensors(folder)

    def check(name: str) -> None:
        try:
            if name not in places:
                raise ValueError(f"{local!s:.200} lacks it")
            frame, expected = changes[name]
            if _checksum(checksum, _new_bytes(places[name][0], frame, encoding).data) != expected:
                raise ValueError("its checksum differs")
        except (ZstdError, ValueError, IndexError) as error:
            raise _refused(f"{folder!s:.200} does not fit, or is damaged at {name}: {error!s:.200}") from error

    def write(name: str) -> None:
        place = places[name][0]
        new = _new_bytes(place, changes[name][0], encoding)
        with place.file.open("r+b") as file:
            file.seek(place.begin)
            file.write(new.data)

    with ThreadPoolExecutor(4, "pull") as threads:  # each has up to seven times a tensor in memory
        list(threads.map(check, changes))
        _note_version(local, None)
        list(threads.map(write, changes))
    _note_version(local, version)


def _new_bytes(place: _Place, frame: _Place, encoding: str) -> Any:
    """The new bytes of a tensor, a NumPy array. Raises ValueError, IndexError or `ZstdError` for wrong changes."""
    import numpy as np
    from zstandard import ZstdDecompressor

    old = np.fromfile(place.file, np.uint8, place.nbytes, offset=place.begin)
    packed = np.fromfile(frame.file, np.uint8, frame.nbytes, offset=frame.begin)
    with ZstdDecompressor().stream_reader(packed.tobytes()) as reader:
        data = np.frombuffer(reader.read(4 + 5 * place.nbytes + 1), np.uint8)  # bounded, whatever the frame says
    if encoding == "xor":
        return old ^ data  # ValueError for another length
    count = int.from_bytes(data[:4].tobytes(), "little")
    if data.size != 4 + 5 * count:
        raise ValueError(f"it has not the {count} changes that it announces")
    old[data[4 : 4 + 4 * count].view("<u4")] = data[4 + 4 * count :]
    return old


def _checksum(name: str, data: bytes | memoryview) -> str:
    if name == "adler32":
        return f"{zlib.adler32(data):08x}"
    if name == "blake3":
        from blake3 import blake3

        return str(blake3(data).hexdigest())
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(data)
