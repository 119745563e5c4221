"""The corpus of hostile input: one list of values, and what is made of it for each entrance.

| entrance | made by |
|---|---|
| a message to the service: frames and headers | `hostile_messages`, endless and reproducible |
| a manifest of a weight update, a field of it | `wire_values`, `mangled` |
| a JSON file of a model or adapter folder | `json_values` |
| a TCP port | `junk_for_a_port`, `throw_junk` |

Each message comes with the id of its one answer: `id` is the first key of the header, or the header has none. A message
may be valid, if absurd; none pauses or ends a worker.
"""

import contextlib
import copy
import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from tests.support.service.media import item_of, prompt_for
from trainer_bridge.wire.codec import encode

UNREADABLE = ""  # the id of the answer to a message without one
_DIGITS = [3 + digit for digit in range(10)]  # tokens of the counting checkpoints


@dataclass(frozen=True, slots=True)
class Hostile:
    """One message, frame by frame, and the id of its answer."""

    frames: list[bytes]
    id: str


def hostile_messages(count: int, seed: int, kinds: str | None = None) -> Iterator[Hostile]:
    """`count` messages, the same for the same seed. `kinds` restricts them to the makers with these names."""
    rng = random.Random(seed)
    makers = [maker for maker in MAKERS if kinds is None or maker.__name__ in kinds.split()]
    weights = [WEIGHTS.get(maker.__name__, 1.0) for maker in makers]
    for number in range(count):
        yield rng.choices(makers, weights)[0](rng, f"h{seed}-{number}")


#: No prompt, size, count, name, digest, version or list of a right message, manifest or config.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 10**9, 2**31, 2**50, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**400),
    *(1.0, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "7", "generate", "nan", "\0", "\n", "é\U0001f600", "../../etc/passwd", "9" * 100, "x" * 600),
    *(b"", b"6", b"\xff\xfe", b"x" * 300),
    *([], [1], [10**9], [2**40], ["1"], [[]], [[[]]], [0] * 50, ["x"] * 3000),
    *({}, {"a": 1}, {"1": 1}, {"-1": 1}, {"blob": 0}, {"blob": 0, "dtype": "<i4", "shape": [1], "x": 1}),
]


def wire_values() -> list[Any]:
    """The values that msgpack can hold."""
    return [value for value in VALUES if _can(msgpack.packb, value)]


def json_values() -> list[Any]:
    """The values that JSON can hold, by the standard."""
    return [value for value in VALUES if _can(lambda value: json.dumps(value, allow_nan=False), value)]


def _can(write: Callable[[Any], object], value: Any) -> bool:
    try:
        write(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


PLAIN = wire_values()


def junk(rng: random.Random, depth: int = 2) -> Any:
    """Any value that msgpack can hold."""
    kind = rng.randrange(13 if depth else 11)
    if kind == 11:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 12:
        return {rng.choice(NAMES): junk(rng, depth - 1) for _ in range(rng.randrange(4))}
    return copy.copy(rng.choice(PLAIN))  # makers write into what they get


def mangled(value: Any, rng: random.Random) -> Any:
    """A copy of a message or manifest with one place in it replaced, dropped, doubled or extended."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        change = rng.random()
        if change < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if change < 0.2:
            return value | {"extra": junk(rng)}
        return value | {key: mangled(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        change = rng.random()
        if change < 0.1:
            return value[:at] + value[at + 1 :]
        if change < 0.2:
            return [*value, value[at]]
        return [*value[:at], mangled(value[at], rng), *value[at + 1 :]]
    return junk(rng)


#: Without `min_version`: a request waits for a version that never comes.
NAMES = [
    *("v", "op", "id", "client", "prompt", "messages", "tools", "chat_template_kwargs", "n", "max_tokens", "sampling"),
    *("stop", "stream", "stream_every", "return_text", "continue_from", "priority", "deadline_s", "metadata", "target"),
    *("targets", "offsets", "text_chars", "detached", "mode", "action", "token", "manifest", "transport", "options"),
    *(
        "logprobs",
        "constraint",
        "adapter",
        "name",
        "path",
        "version",
        "session",
        "session_lease_s",
        "max_version_span",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
    ),
    *(
        "logit_bias",
        "token_ids",
        "strings",
        "ignore_eos",
        "min_tokens",
        "versions",
        "version",
        "blob",
        "dtype",
        "shape",
    ),
]
OPS = [
    "generate",
    "media",
    "end_session",
    "prefetch",
    "load_adapter",
    "unload_adapter",
    "cancel",
    "attach",
    "ack",
    "status",
    "ping",
    "resume",
    "weights",
    "trace",
    "report",
    "sleep",
    "x",
    "",
]


def good_generate(rng: random.Random) -> dict[str, Any]:
    """The fields of a `generate` that is right."""
    prompt = [*rng.choices(_DIGITS, k=2), 14]
    return {"prompt": prompt, "max_tokens": rng.randrange(1, 5), "stop": {"ignore_eos": True}}


def header(request_id: Any, fields: dict[str, Any], *, v: Any = 1) -> bytes:
    """A header map whose first key is `id`."""
    return msgpack.packb({"id": request_id, "v": v, **fields}, use_bin_type=True)


# --- makers -----------------------------------------------------------------------------------------------------------


def random_bytes(rng: random.Random, request_id: str) -> Hostile:
    frames = [rng.randbytes(rng.choice([0, 1, 2, 7, 40, 300])) for _ in range(rng.randrange(1, 5))]
    first = next((frame for frame in frames[:2] if frame), b"")
    if first[:1] and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF)):  # a map might have an id in it
        return random_bytes(rng, request_id)
    return Hostile(frames, UNREADABLE)


def cut_off(rng: random.Random, request_id: str) -> Hostile:
    whole = header(request_id, {"op": "generate", **good_generate(rng)})
    id_end = 1 + len(msgpack.packb("id")) + len(msgpack.packb(request_id))
    size = rng.randrange(1, len(whole))
    return Hostile([whole[:size]], request_id if size >= id_end else UNREADABLE)


def followed_by_more(rng: random.Random, request_id: str) -> Hostile:
    return Hostile([header(request_id, {"op": "ping"}) + rng.randbytes(rng.randrange(1, 9))], request_id)


def changed_byte(rng: random.Random, request_id: str) -> Hostile:
    whole = bytearray(header(request_id, {"op": "generate", **good_generate(rng)}))
    id_end = 1 + len(msgpack.packb("id")) + len(msgpack.packb(request_id))
    whole[rng.randrange(id_end, len(whole))] = rng.randrange(256)
    return Hostile([bytes(whole)], request_id)


def wrong_types(rng: random.Random, request_id: str) -> Hostile:
    fields = {"op": "generate", **good_generate(rng)}
    for _ in range(rng.randrange(1, 4)):
        target = fields
        if rng.random() < 0.4:
            target = fields.setdefault(rng.choice(["sampling", "stop", "continue_from"]), {})
            target = target if isinstance(target, dict) else fields
        name = rng.choice(NAMES)
        value = junk(rng)
        if name not in ("id", "v", "op", "client") and (name, value) != ("max_tokens", None):  # None: all that fits
            target[name] = value
    return Hostile([header(request_id, fields)], request_id)


def wrong_ops(rng: random.Random, request_id: str) -> Hostile:
    fields: dict[str, Any] = {"op": rng.choice([*OPS, junk(rng)])}
    fields |= {rng.choice(NAMES[4:]): junk(rng) for _ in range(rng.randrange(4))}
    if fields["op"] in ("pause", "shutdown"):
        fields["op"] = None
    return Hostile([header(request_id, fields, v=rng.choice([1, 1, 1, 2, "1", True, None]))], request_id)


def wrong_ids(rng: random.Random, request_id: str) -> Hostile:
    wrong = rng.choice([None, "", "x" * 129, 5, True, b"x", ["x"], {"x": 1}, 1.5])
    return Hostile([header(wrong, {"op": "ping"})], UNREADABLE)


def keys_that_are_none(rng: random.Random, request_id: str) -> Hostile:
    pairs = [("id", request_id), ("v", 1), ("op", "ping")]
    pairs += rng.choice([[("op", "ping")], [(5, 1)], [(b"x", 1)], [(None, 1)], [("id", "y")]])
    parts = [part for key, value in pairs for part in (msgpack.packb(key), msgpack.packb(value))]
    return Hostile([bytes([0x80 | len(pairs)]) + b"".join(parts)], request_id)


def huge_lengths(rng: random.Random, request_id: str) -> Hostile:
    """A value that says it is longer than the message, than memory, than anything."""
    code, form = rng.choice([(0xDB, ">BI"), (0xC6, ">BI"), (0xDD, ">BI"), (0xDF, ">BI"), (0xC9, ">BIb"), (0xDC, ">BH")])
    size = rng.choice([2**16 - 1] if form == ">BH" else [2**16, 2**24, 2**31, 2**32 - 1])
    value = struct.pack(form, code, size, *([5] if form == ">BIb" else []))
    start = b"\x83" + msgpack.packb("id") + msgpack.packb(request_id) + msgpack.packb("prompt")
    return Hostile([start + value + rng.randbytes(rng.randrange(20))], request_id)


def deep_nesting(rng: random.Random, request_id: str) -> Hostile:
    depth = rng.choice([20, 31, 33, 100, 600, 5000])
    opening = rng.choice([b"\x91", b"\x81\xa1x", b"\x91\x81\xa1x"])
    name = rng.choice(["metadata", "prompt", "messages", "x"])
    start = b"\x85" + b"".join(map(msgpack.packb, ("id", request_id, "v", 1, "op", "generate", "max_tokens", 2, name)))
    return Hostile([start + opening * depth + b"\xc0"], request_id)


def many_containers(rng: random.Random, request_id: str) -> Hostile:
    return Hostile(
        [header(request_id, {"op": "generate", "prompt": [4, 14], "max_tokens": 2, "metadata": {"x": [[]] * 5000}})],
        request_id,
    )


def extensions(rng: random.Random, request_id: str) -> Hostile:
    value = rng.choice([msgpack.ExtType(5, b"x" * 50), msgpack.Timestamp(1, 1), msgpack.ExtType(127, b"")])
    return Hostile(
        [header(request_id, {"op": "generate", "prompt": [1], "max_tokens": 2, "metadata": {"x": value}})], request_id
    )


def wrong_text(rng: random.Random, request_id: str) -> Hostile:
    text = b"\xa4" + rng.choice([b"\xff\xff\xff\xff", b"\xed\xa0\x80x", b"\xc0\x80xx", b"\xf5\x80\x80\x80"])
    start = b"\x84" + b"".join(map(msgpack.packb, ("id", request_id, "v", 1, "op", "generate", "prompt")))
    return Hostile([start + text], request_id)


def wrong_blobs(rng: random.Random, request_id: str) -> Hostile:
    sizes = [0, 1, 2, 3, 4, -1, 2**20, 2**31, 2**62, 2**64 - 1, True, 1.0, "1", None]
    shapes = [[rng.choice(sizes) for _ in range(rng.randrange(4))], [1] * 9, rng.choice(sizes)]
    reference = {
        "blob": rng.choice([0, 0, 0, 1, 5, -1, 2**40, "0", None, True]),
        "dtype": rng.choice(["<i4", "<i4", "<f4", "|b1", ">i4", "|O", "object", "<U9", "<M8[ns]", "V8", "", 5, None]),
        "shape": rng.choice(shapes),
    }
    place = rng.choice(["prompt", "metadata", "stop", "sampling", "messages", "n", "x"])
    value = rng.choice([reference, [reference], {"token_ids": reference}, [reference, reference]])
    blobs = [rng.randbytes(rng.choice([0, 1, 4, 8, 12, 64])) for _ in range(rng.choice([0, 1, 1, 2, 300]))]
    return Hostile(
        [header(request_id, {"op": "generate", "prompt": [1], "max_tokens": 2, place: value}), *blobs], request_id
    )


def wrong_arrays(rng: random.Random, request_id: str) -> Hostile:
    """Blobs that are right, where their content is not."""
    array = rng.choice(
        [
            np.array([2**31 - 1], np.int32),
            np.array([-1], np.int64),
            np.zeros((3, 3), np.int32),
            np.zeros(0, np.uint8),
            np.array(5, np.uint64),
            np.full(5, np.nan, np.float32),
            np.ones(4, np.bool_),
            np.full(20_000, 3, np.uint16),
        ]
    )
    place = rng.choice(["prompt", "continue_from", "metadata", "stop", "messages", "deadline_s"])
    value = {"token_ids": array, "seed": 1} if place in ("continue_from", "stop") else array
    fields = {"op": "generate", **good_generate(rng), place: value if place != "messages" else [{"role": value}]}
    return Hostile(encode({"id": request_id, "v": 1, **fields}), request_id)


def wrong_media(rng: random.Random, request_id: str) -> Hostile:
    """Images of which one place is not right, or many are."""
    grid = rng.choice([(1, 2, 4), (1, 2, 2), (1, 4, 4)])
    items = [item_of(1 + 5 * i, grid, rng.randrange(3)) for i in range(rng.randrange(1, 3))]
    prompt = prompt_for(*items)
    if rng.random() < 0.3:
        items[0]["pixel_values"] = rng.choice(
            [
                np.full((8, 8), np.nan, np.float32),
                np.full((8, 8), 0x7F80, np.uint16),
                np.zeros((0, 8), np.float32),
                np.zeros((8, 0), np.float16),
                np.zeros((8, 8), np.int16),
                np.zeros(64, np.float32),
                np.float32(1.0),
            ]
        )
    if rng.random() < 0.3:
        del items[0]["pixel_values"]
    for _ in range(rng.randrange(3)):
        rng.choice(items)[rng.choice([*items[0], "seconds_per_frame", "x"])] = junk(rng)
    if rng.random() < 0.1:
        prompt = junk(rng)
    media = rng.choice([items, items, items, items[0], [], [items] * 2, junk(rng)])
    fields = {"op": "generate", "prompt": prompt, "max_tokens": 2, "media": media}
    if rng.random() < 0.2:
        fields = {"op": "media", "media": media}
    try:
        return Hostile(encode({"id": request_id, "v": 1, **fields}), request_id)
    except ValueError:  # not a message
        return wrong_media(rng, request_id)


def wrong_order(rng: random.Random, request_id: str) -> Hostile:
    """The frames of a right message, not where they belong. Blobs are no maps: an id is read only from a header."""
    prompt = np.array([3, 4, 14], np.int32)
    first, blob = encode({"id": request_id, "v": 1, "op": "generate", "prompt": prompt, "max_tokens": 2})
    case = rng.randrange(6)
    if case == 0:
        return Hostile([blob, first], UNREADABLE)
    if case == 1:
        return Hostile([b"", blob, first], UNREADABLE)
    if case == 2:
        return Hostile([first, b"", blob], request_id)
    if case == 3:
        return Hostile([first, first, blob], request_id)
    if case == 4:
        return Hostile([b"\0" * 5, b"", first, blob], UNREADABLE)  # the envelope of another router
    return Hostile([b""] * rng.randrange(3, 6), UNREADABLE)


def absurd_but_valid(rng: random.Random, request_id: str) -> Hostile:
    fields: dict[str, Any] = {"op": "generate", **good_generate(rng)}
    change = rng.randrange(12)
    if change == 0:
        fields |= {"n": rng.choice([8, 9, 2**31, 2**62])}
    elif change == 1:
        fields |= {"max_tokens": rng.choice([1, 2**31 - 1, 2**31, 2**63])}
    elif change == 2:
        names = {"temperature": 100.0, "top_p": 1e-300, "min_p": 1.0, "repetition_penalty": 0.01, "seed": 2**63 - 1}
        fields |= {"sampling": {name: names[name] for name in rng.sample(sorted(names), 3)}}
    elif change == 3:
        fields["sampling"] = {"logit_bias": {str(i): rng.choice([100, -100]) for i in range(rng.choice([10, 513]))}}
    elif change == 4:
        fields["stop"] = {"token_ids": list(range(rng.choice([3, 257])))}
    elif change == 5:
        fields |= {"metadata": {"x": "y" * rng.choice([10, 50_000]), "\0": [{}] * 50, "": [1e300, -1, None]}}
    elif change == 6:
        fields |= {"priority": rng.choice([2**31 - 1, -(2**31) + 1, 2**31]), "deadline_s": rng.choice([1e-300, 1e300])}
    elif change == 7:
        fields |= {"stream": "tokens", "stream_every": rng.choice([1, 2**31 - 1, 2**31])}
    elif change == 8:
        fields |= {"continue_from": {"token_ids": [3] * rng.choice([0, 1, 4, 900]), "seed": 0}}
    elif change == 9:
        fields |= {"client": rng.choice(["\0", "é" * 128, "x" * 129, "connection:00", "client:x"])}
    elif change == 10:
        fields = {"op": rng.choice(["cancel", "attach"]), "target": rng.choice(["x", "\0" * 128, request_id])}
    else:
        fields = {"op": "ack", "targets": [f"{i}" for i in range(rng.choice([0, 1, 500]))]}
    return Hostile([header(request_id, fields)], request_id)


def too_large(rng: random.Random, request_id: str) -> Hostile:
    """Larger than a header may be, and than a message may be."""
    if rng.random() < 0.5:
        return Hostile([header(request_id, {"op": "ping", "x": b"x" * 300_000})], request_id)
    reference = {"blob": 0, "dtype": "|u1", "shape": [1_100_000]}
    return Hostile([header(request_id, {"op": "generate", "prompt": reference}), bytes(1_100_000)], request_id)


MAKERS: list[Callable[[random.Random, str], Hostile]] = [
    *(random_bytes, cut_off, followed_by_more, changed_byte, wrong_types, wrong_ops, wrong_ids, keys_that_are_none),
    *(huge_lengths, deep_nesting, many_containers, extensions, wrong_text, wrong_blobs, wrong_arrays, wrong_order),
    *(absurd_but_valid, too_large, wrong_media),
]
WEIGHTS = {"many_containers": 0.02, "too_large": 0.002, "wrong_types": 3.0, "deep_nesting": 0.5}


# --- ports ------------------------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)  # ZMTP 3.0
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def junk_for_a_port() -> list[bytes]:
    """Bytes for a ZeroMQ port: other protocols, half handshakes, frames with a wrong length."""
    huge = [struct.pack(">BQ", flags, size) for flags in (2, 3, 6) for size in (2**31, 2**40, 2**62, 2**63, 2**64 - 1)]
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        os.urandom(1) * 4096,
        b"\xff" * 10_000,
        bytes(10_000),
        GREETING[:11],
        GREETING[:40],
        GREETING,
        GREETING.replace(b"NULL", b"EVIL"),
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING + b"\x04\xff" + b"\x05READY" + b"\xff" * 249,
        GREETING + b"\x04\x0e\x05READY\xff" + b"x" * 7,
        GREETING + READY,
        GREETING + READY + b"\x00\x05ab",
        *(GREETING + frame for frame in huge),
        *(GREETING + READY + frame + b"x" * 1000 for frame in huge),
        *(GREETING + READY + b"\x01\x00" * 1000 + frame for frame in huge[:3]),
    ]


def throw_junk(endpoint: str, read_timeout_s: float = 0.02) -> int:
    """Write each piece of junk to a TCP endpoint on its own connection; returns the number of connections."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    pieces = junk_for_a_port()
    kept = []
    for number, piece in enumerate(pieces):
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.settimeout(read_timeout_s)
        with contextlib.suppress(OSError):
            connection.sendall(piece)
            connection.recv(4096)
        if number % 2:
            kept.append(connection)  # some stay open and send nothing more
        else:
            connection.close()
    for connection in kept:
        connection.close()
    return len(pieces)
