"""Invalid messages made from a seed, each with the id that its error reply must have."""

import random
from collections.abc import Callable
from typing import Any

import msgpack

Message = tuple[list[bytes], str]  # frames, and the id of the answer: "" if the id cannot be read


def bad_message(rng: random.Random, request_id: str) -> Message:
    """One of them."""
    return rng.choice(_MAKERS)(rng, request_id)


def _header(request_id: str, **fields: Any) -> bytes:
    return msgpack.packb({"id": request_id, "v": 1, **fields})


def _good(**changes: Any) -> dict[str, Any]:
    return {"op": "generate", "prompt": [4, 14], "max_tokens": 4, **changes}


def _random_bytes(rng: random.Random, request_id: str) -> Message:
    return [b"\xc1" + rng.randbytes(rng.choice([1, 30, 3000]))], ""  # not a msgpack type


def _cut_off(rng: random.Random, request_id: str) -> Message:
    whole = _header(request_id, **_good())
    start = len(_header(request_id)) - len(msgpack.packb("v")) - 1  # the id can be read
    return [whole[: rng.randrange(start, len(whole))]], request_id


def _wrong_type(rng: random.Random, request_id: str) -> Message:
    field = rng.choice(
        ["prompt", "max_tokens", "n", "sampling", "stop", "stream", "priority", "deadline_s", "metadata"]
    )
    return [_header(request_id, **_good(**{field: rng.choice([b"x", -(2**40), [[]], [{}]])}))], request_id


def _unknown_field(rng: random.Random, request_id: str) -> Message:
    return [_header(request_id, **_good(**{f"x{rng.randrange(99)}": 1}))], request_id


def _unknown_op(rng: random.Random, request_id: str) -> Message:
    return [_header(request_id, op=rng.choice(["x", "", "sleep", "trace", 5, None]))], request_id


def _wrong_version(rng: random.Random, request_id: str) -> Message:
    return [msgpack.packb({"id": request_id, "v": rng.choice([0, 2, "1", None]), "op": "ping"})], request_id


def _wrong_blob(rng: random.Random, request_id: str) -> Message:
    shape = rng.choice([[5], [-1], [2**62], [2**31, 2**31], ["1"], 3])
    reference = {"blob": rng.choice([0, 1, 2**40]), "dtype": rng.choice(["<i4", "|O", "<U9"]), "shape": shape}
    return [_header(request_id, **_good(prompt=reference)), rng.randbytes(8)], request_id


def _deep(rng: random.Random, request_id: str) -> Message:
    start = _header(request_id, **_good(metadata=None))[:-1]
    return [start + b"\x91" * rng.choice([100, 5000]) + b"\xc0"], request_id


def _huge_length(rng: random.Random, request_id: str) -> Message:
    start = _header(request_id, **_good(metadata=None))[:-1]
    return [start + rng.choice([b"\xdd", b"\xdb", b"\xc6"]) + b"\xff\xff\xff\xf0" + rng.randbytes(9)], request_id


def _impossible(rng: random.Random, request_id: str) -> Message:
    change: dict[str, Any] = rng.choice(
        [
            {"prompt": [10**6]},
            {"prompt": []},
            {"max_tokens": 10**9},
            {"sampling": {"temperature": -1.0}},
            {"sampling": {"top_p": 2.0}},
            {"stop": {"strings": [""]}},
            {"continue_from": {"token_ids": [99], "seed": 1}},
            {"detached": True},
        ]
    )
    return [_header(request_id, **_good(**change))], request_id


_MAKERS: list[Callable[[random.Random, str], Message]] = [
    *(_random_bytes, _cut_off, _wrong_type, _unknown_field, _unknown_op, _wrong_version, _wrong_blob, _deep),
    *(_huge_length, _impossible),
]
