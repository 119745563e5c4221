"""A coverage-guided fuzzer for all readers of messages: the wire codec, headers, manifests, replies.

    python -m scripts.check.fuzz_codec --seconds 120          needs atheris (the extra `dev` has it); `make fuzz`
    does it all
    python -m scripts.check.fuzz_codec build/fuzz/crash-...   run one input again

An input becomes frames in one of three ways: raw bytes; a message of plausible fields that is packed and then damaged;
or a valid message with a few values replaced. `check_frames` checks properties that hold for all frames; an error that
it raises is a bug. Inputs that reach new code are kept in build/fuzz/corpus, where the next run starts. An input that
fails is kept in build/fuzz.
"""

import argparse
import importlib
import math
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "fuzz"
TARGETS = (
    "trainer_bridge.wire.codec",
    "trainer_bridge.wire.manifest",
    "trainer_bridge.wire.weight_messages",
    "trainer_bridge.client.results",
    "rollout.service.requests.fields",
    "rollout.service.requests.schema",
)
MAX_INPUT_BYTES = 4096
RSS_LIMIT_MIB = 2048
ONE_INPUT_S = 60  # of wall time: machines stall

_WORDS = [
    *("v", "op", "id", "client", "generate", "cancel", "attach", "ack", "weights", "prompt", "messages", "role", "n"),
    *("sampling", "temperature", "top_p", "logit_bias", "seed", "stop", "token_ids", "strings", "stream", "tokens"),
    *("continue_from", "logprobs", "versions", "metadata", "target", "targets", "offsets", "text_chars", "deadline_s"),
    *("action", "begin", "commit", "abort", "status", "manifest", "transport", "options", "token", "zmq", "disk"),
    *("version", "bucket_bytes", "tensors", "digest", "float32", "bfloat16", "blob", "dtype", "shape", "<i4", "<f4"),
    *("timing", "total_s", "prompt_tokens", "cached_tokens", "preemptions", "drawn_logprobs", "raw_logprobs", "text"),
    *("|b1", "result", "chunk", "error", "code", "message", "completions", "index", "offset", "finish_reason", "x"),
]
_NUMBERS = [0, 1, -1, 2, 3, 64, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)]
_MAX_DEPTH = 40
_MAX_BLOBS, _MAX_BLOB_BYTES = 4, 64


# --- what must hold ---------------------------------------------------------------------------------------------------


def check_frames(frames: list[bytes], decode: Callable[[list[bytes]], dict[str, Any]] | None = None) -> bool:
    """Read frames as both sides do; true if they are a message. Raises AssertionError, or any error, for a bug.

    `decode` is the reader, by default that of the wire.
    """
    from trainer_bridge.wire import codec as wire

    decode = decode or wire.decode
    early = wire.header_id(frames)
    assert early is None or 1 <= len(early) <= wire.MAX_ID_CHARS
    try:
        header = decode(frames)
    except wire.WireError as error:
        assert 5 < len(str(error)) < 2000, "a message that says nothing, or too much"
        return False
    _check_arrays(header)
    assert _same(decode(wire.encode(header)), header), "a message changes when it is sent again"
    _check_request(header)
    _check_weights(header)
    _check_reply(header)
    return True


def _check_arrays(value: Any) -> None:
    if isinstance(value, np.ndarray):
        assert not value.flags.writeable and value.dtype.kind in "biuf"
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_arrays(item)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _check_request(header: dict[str, Any]) -> None:
    from rollout.service.requests.schema import parse_request
    from trainer_bridge.wire.errors import RolloutError

    try:
        parse_request(header)
    except RolloutError as error:
        assert error.code in ("bad_message", "bad_request") and 5 < len(str(error)) < 2000


def _check_weights(header: dict[str, Any]) -> None:
    from trainer_bridge.wire.errors import BadRequest, WeightsRejected
    from trainer_bridge.wire.manifest import from_wire
    from trainer_bridge.wire.weight_messages import check_fields, read_token

    try:
        check_fields(header)
        read_token(header.get("token"))
    except BadRequest as error:
        assert 5 < len(str(error)) < 2000
    try:
        manifest = from_wire(header.get("manifest"))
    except WeightsRejected as error:
        assert 5 < len(str(error)) < 2000
        return
    assert from_wire(manifest.to_wire()) == manifest
    assert all(manifest.bucket_span(i)[1] <= manifest.total_bytes for i in range(min(manifest.bucket_count, 10)))


def _check_reply(header: dict[str, Any]) -> None:
    """Read the same bytes as a worker's reply: a client must not trust replies either."""
    from trainer_bridge.client.results import read_chunk, read_result, split_chunks
    from trainer_bridge.wire.errors import ProtocolError, from_reply

    def read_joined() -> list[Any]:
        return [read_chunk(chunk) for chunk in split_chunks(header)]

    single = (lambda: read_chunk(header), lambda: read_result(header, "tcp://x"), lambda: from_reply(header))
    for read in (*single, read_joined):
        try:
            read()
        except ProtocolError:
            continue


# --- from an input to frames ------------------------------------------------------------------------------------------


class Source:
    """Takes values from the front of an input; after its end all bytes are zero."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """The next bytes, or fewer at the end."""
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, most: int) -> int:
        """0 to `most`, which is less than 256, from one byte."""
        return int.from_bytes(self.take(1), "little") % (most + 1)

    def pick(self, values: Sequence[Any]) -> Any:
        """One of the choices."""
        return values[self.number(len(values) - 1)]


def frames_of(data: bytes) -> list[bytes]:
    """Frames from an input. Its first byte selects the way; `input_of` documents raw frames."""
    import msgpack

    source = Source(data)
    how = source.number(2)
    if how == 2:
        return _changed(source)
    lengths = [source.number(_MAX_BLOB_BYTES) for _ in range(source.number(_MAX_BLOBS))]
    blobs = [source.take(length) for length in lengths]
    if how == 0:
        return [source.take(MAX_INPUT_BYTES), *blobs]
    value = {"v": 1, "id": "f", "op": source.pick(_WORDS)} if source.number(3) else {}
    for _ in range(source.number(8)):
        value[source.pick(_WORDS)] = _value(source, 0)
    packed = bytearray(msgpack.packb(value, use_bin_type=True))
    for _ in range(source.number(2)):
        packed[int.from_bytes(source.take(2), "little") % len(packed)] = source.number(255)
    return [bytes(packed[: -source.number(255)] if source.number(3) == 3 else packed), *blobs]


def _changed(source: Source) -> list[bytes]:
    """A valid message with some values replaced."""
    from trainer_bridge.wire.codec import encode

    header = source.pick(good_headers())
    for _ in range(1 + source.number(3)):
        place = header
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = source.pick(keys)
            if isinstance(place[key], (dict, list)) and source.number(3):
                place = place[key]
                continue
            place[key] = _value(source, 0)
            break
    try:
        return encode(header)
    except ValueError:  # a value that cannot be sent
        return [b""]


def input_of(frames: list[bytes]) -> bytes:
    """The input that becomes these frames: 0 for raw, the number of blobs, their lengths, the blobs, the header."""
    header, *blobs = frames
    return bytes([0, len(blobs), *map(len, blobs)]) + b"".join(blobs) + header


def _value(source: Source, depth: int) -> Any:
    match source.number(9 if depth < _MAX_DEPTH else 6):
        case 0:
            return source.pick((None, True, False))
        case 1:
            return source.pick(_NUMBERS)
        case 2:
            return struct.unpack("<d", source.take(8).ljust(8, b"\0"))[0]
        case 3 | 4:
            return source.pick(_WORDS)
        case 5:
            return source.take(source.number(20))
        case 6:
            return source.take(source.number(20)).decode("utf-8", "replace")
        case 7:
            return [_value(source, depth + 1) for _ in range(source.number(4))]
        case 8:
            return {source.pick(_WORDS): _value(source, depth + 1) for _ in range(source.number(4))}
    return {"blob": source.number(3), "dtype": source.pick(("<i4", "<f4", "|b1")), "shape": [source.number(16)]}


def good_headers() -> list[dict[str, Any]]:
    """The start of the search: one message of each kind, newly made on each call."""
    from trainer_bridge.wire.manifest import pack

    ids = np.arange(3, dtype=np.int32)
    manifest = pack(1, [("a", "float32", [2, 3]), ("b", "bfloat16", [5])], 64).to_wire()
    base: dict[str, Any] = {"v": 1, "id": "f"}
    completion = {"index": 0, "token_ids": ids, "logprobs": ids.astype(np.float32), "versions": [[0, 3]], "seed": 1}
    completion |= {"raw_logprobs": ids.astype(np.float32), "finish_reason": "length", "stop": None}
    columns = {name: completion[name] for name in ("token_ids", "logprobs", "raw_logprobs")}
    joined = {name: value for name, value in completion.items() if name not in columns}
    told = {"timing": {"total_s": 1.0}, "cached_tokens": 0, "preemptions": 0, "seed": 1, "worker": "w"}
    return [
        base | {"op": "generate", "prompt": ids, "sampling": {"logit_bias": {"1": 1.0}}, "stop": {"strings": ["x"]}},
        base | {"op": "generate", "prompt": [1], "continue_from": {"token_ids": ids, "seed": 1, "versions": [[0, 3]]}},
        base | {"op": "generate", "messages": [{"role": "user", "content": "x"}], "metadata": {"x": [ids]}},
        base | {"op": "attach", "target": "x", "stream": "tokens", "offsets": {"0": 3}},
        base | {"op": "weights", "action": "begin", "version": 1, "manifest": manifest, "transport": "zmq"},
        base | {"op": "chunk", "offset": 0, **completion},
        base | {"op": "chunks", "chunks": [{"id": "f", "tokens": 3, "offset": 0, **joined}], **columns},
        base | {"op": "result", "completions": [completion], "prompt_tokens": 1, **told},
    ]


# --- running ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Fuzz for some time, or run a single input."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of messages.")
    parser.add_argument("--seconds", type=int, default=120, help="seconds to search [120]")
    parser.add_argument("file", nargs="?", help="an input to run once instead")
    args = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("this needs atheris: pip install '.[dev]' on Linux, or make fuzz", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=list(TARGETS)):
        for name in TARGETS:
            importlib.import_module(name)
    from trainer_bridge.wire.codec import encode

    corpus = OUT / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, header in enumerate(good_headers()):
        (corpus / f"good-{number}").write_bytes(input_of(encode(header)))
        (corpus / f"changed-{number}").write_bytes(bytes([2, number, *range(20)]))
    flags = [f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={RSS_LIMIT_MIB}", f"-timeout={ONE_INPUT_S}"]
    flags += [f"-artifact_prefix={OUT}/", "-print_final_stats=1"]
    flags += [args.file] if args.file else [f"-max_total_time={args.seconds}", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], lambda data: check_frames(frames_of(data)))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
