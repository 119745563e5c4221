"""Field types of message headers that need checks: arrays (sent as lists or as blobs) and maps.

Every check raises ValueError with a message that says what to send; `schema` turns it into a `bad_request`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rollout.engine.messages.requests import MAX_LOGIT_BIAS, VERSION_END
from trainer_bridge.wire.columns import MARKS
from trainer_bridge.wire.declarations import INT32_MAX

SEED_END = 2**63
#: A log-prob is at most 0; rounding, also a trainer's, may raise it slightly above.
HIGHEST_LOGPROB = 1.0
MAX_BIAS = 100
MAX_INDEX_ENTRIES = 65_536
_KEYS = {"token": "a token id", "completion": "the index of a completion"}


class Strict(BaseModel):
    """The base of all parts of a message."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


def token_id_rows(value: Any) -> np.ndarray:
    """Token ids as int32 [k] or [n, k]: a list or an array as for `token_id_array`, or one of two dimensions."""
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return token_id_array(value.reshape(-1)).reshape(value.shape)
    if isinstance(value, list) and value and all(type(row) is list for row in value):
        if len({len(row) for row in value}) > 1:
            raise ValueError("rows have different numbers of token ids; repeat ids to make them equally long")
        return token_id_array([item for row in value for item in row]).reshape(len(value), len(value[0]))
    return token_id_array(value)


def token_id_array(value: Any) -> np.ndarray:
    """A list of integers, or a one-dimensional integer array, as int32 [n]."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise ValueError(
                f"token ids must be a one-dimensional array of integers, not {value.dtype} of shape {list(value.shape)}"
            )
        array = value
    elif isinstance(value, list):
        wrong = next((_type_name(item) for item in value if type(item) is not int), "")
        if wrong:
            raise ValueError(f"token ids must be integers, but one is {wrong}")
        try:
            array = np.array(value, dtype=np.int64)
        except OverflowError:
            raise ValueError("a token id does not fit in 32 bits; send ids of the model's vocabulary") from None
    else:
        raise ValueError(f"token ids must be a list of integers or an integer blob, not {_type_name(value)}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > INT32_MAX):
        raise ValueError("a token id is negative or does not fit in 32 bits; send ids of the model's vocabulary")
    return array.astype(np.int32)


def logprob_array(value: Any) -> np.ndarray:
    """A list of numbers, or a one-dimensional float array, as float32 [n]. NaN means unknown."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind != "f":
            raise ValueError(
                f"log-probs must be a one-dimensional array of floats, not {value.dtype} of shape {list(value.shape)}"
            )
        return _as_float32(value)
    if not isinstance(value, list):
        raise ValueError(f"log-probs must be a list of numbers or a float blob, not {_type_name(value)}")
    wrong = next((_type_name(item) for item in value if type(item) not in (int, float)), "")
    if wrong:
        raise ValueError(f"log-probs must be numbers, but one is {wrong}")
    return _as_float32(np.array(value, dtype=np.float64))


def top_id_rows(value: Any) -> np.ndarray:
    """A list of rows of integers, or a two-dimensional integer array, as int32 [n, k]. -1 means unknown."""
    array = _rows(value, "iu", "token ids, all of one length")
    if array.size and (int(array.min()) < -1 or int(array.max()) > INT32_MAX):
        raise ValueError("an id is less than -1 or does not fit in 32 bits; send ids of the model's vocabulary")
    return array.astype(np.int32)


def top_logprob_rows(value: Any) -> np.ndarray:
    """A list of rows of numbers, or a two-dimensional float array, as float32 [n, k]. NaN means unknown."""
    array = _rows(value, "iuf" if isinstance(value, list) else "f", "numbers, all of one length")
    return _as_float32(array)


def _as_float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # a value that does not fit becomes infinite
        return array.astype(np.float32)


def _rows(value: Any, kinds: str, what: str) -> np.ndarray:
    problem = f"send rows of {what}, as a list of lists or as a two-dimensional blob"
    if isinstance(value, list):
        if not all(isinstance(row, list) and all(type(item) in (int, float) for item in row) for row in value):
            raise ValueError(problem)
        if len({len(row) for row in value}) > 1:
            raise ValueError(problem)
        try:
            value = np.array(value) if value else np.zeros((0, 0), np.int32)
        except OverflowError:
            raise ValueError(problem) from None
    if not isinstance(value, np.ndarray) or value.ndim != 2 or (value.size and value.dtype.kind not in kinds):
        raise ValueError(problem)
    return value


def routing_array(value: Any) -> np.ndarray:
    """The experts of tokens, uint8 or uint16 [entries, layers, experts]."""
    if not isinstance(value, np.ndarray) or value.ndim != 3 or value.dtype not in (np.uint8, np.uint16):
        raise ValueError("send the routing as in the completion: a three-dimensional blob of |u1 or <u2")
    return value


def version_runs(value: Any) -> list[tuple[int, int]]:
    """A list of `[version, count]` with a version from -1 (unknown) to 2**63 - 1 and a count of at least 1."""
    problem = (
        "versions must be a list of [version, count] with a version from -1 to 2**63 - 1 and a count of at least 1"
    )
    if not isinstance(value, list):
        raise ValueError(problem)
    for run in value:
        if not (isinstance(run, list) and len(run) == 2 and all(type(part) is int for part in run)):
            raise ValueError(problem)
        if not -1 <= run[0] < VERSION_END or run[1] < 1:
            raise ValueError(problem)
    return [(version, count) for version, count in value]


def mark_list(value: Any, parts: Sequence[str]) -> list[tuple[int, ...]]:
    """A list of `[position, version]`, with versions from -1 (unknown) to 2**63 - 1, and a third part of at least 1.

    `parts` are their names; the marks are in order of position.
    """
    problem = f"send a list of [{', '.join(parts)}] in order of position, as in the completion"
    if not isinstance(value, list):
        raise ValueError(problem)
    for mark in value:
        if not (isinstance(mark, list) and len(mark) == len(parts) and all(type(part) is int for part in mark)):
            raise ValueError(problem)
        if mark[0] < 0 or not -1 <= mark[1] < VERSION_END or not all(0 < tokens <= INT32_MAX for tokens in mark[2:]):
            raise ValueError(problem)
    if any(after[0] < before[0] for before, after in pairwise(value)):
        raise ValueError(problem)
    return [tuple(mark) for mark in value]


def position_list(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(_is_count(item) for item in value):
        raise ValueError("send a list of positions, as in the completion")
    if any(after <= before for before, after in pairwise(value)):
        raise ValueError("send each position once, in order")
    return value


def bias_map(value: Any) -> dict[int, float]:
    """A map from token id (a string of digits) to a bias in [-100, 100]."""

    def fits(bias: Any) -> bool:
        return type(bias) in (int, float) and math.isfinite(bias) and abs(bias) <= MAX_BIAS

    biases = _digit_map(value, "token", fits, f"a number from -{MAX_BIAS} to {MAX_BIAS}", MAX_LOGIT_BIAS)
    return {token: float(bias) for token, bias in biases.items()}


def offset_map(value: Any) -> dict[int, int | None]:
    """A map from a completion's index (a string of digits) to a number of tokens, or null."""
    return _digit_map(value, "completion", lambda item: item is None or _is_count(item), "a number of tokens, or null")


def char_map(value: Any) -> dict[int, int]:
    """A map from a completion's index (a string of digits) to a number of characters."""
    return _digit_map(value, "completion", _is_count, "a number of characters")


def _digit_map(
    value: Any, of: str, fits: Callable[[Any], bool], what: str, most: int = MAX_INDEX_ENTRIES
) -> dict[int, Any]:
    key_is = _KEYS[of]
    if not isinstance(value, dict):
        raise ValueError(f"send a map from {key_is} (a string of digits) to {what}, not {_type_name(value)}")
    if len(value) > most:
        raise ValueError(f"{len(value)} entries are too many; send at most {most}")
    found: dict[int, Any] = {}
    for key, item in value.items():
        number = _digits(key, key_is)
        if not fits(item):
            raise ValueError(f"the entry of {of} {number} must be {what}")
        if number in found:
            raise ValueError(f"{of} {number} occurs twice; send one entry for it")
        found[number] = item
    return found


def _is_count(item: Any) -> bool:
    return type(item) is int and 0 <= item <= INT32_MAX


def _digits(key: Any, what: str) -> int:
    if type(key) is int and 0 <= key <= INT32_MAX:
        return key
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= INT32_MAX:
        return int(key)
    raise ValueError(f"the key {key!r:.40} is not {what}; use a string of digits")


def index_digits(key: str) -> str:
    """The index of a completion as digits, without leading zeros."""
    if str(_digits(key, _KEYS["completion"])) != key:
        raise ValueError(f"the key {key!r:.40} has leading zeros; write the index without them")
    return key


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


#: int32 [n], from a list or a blob.
TokenIds = Annotated[Any, BeforeValidator(token_id_array)]
#: float32 [n], from a list or a blob.
Logprobs = Annotated[Any, BeforeValidator(logprob_array)]
#: int32 and float32 [n, k], from lists of lists or blobs.
TopIds = Annotated[Any, BeforeValidator(top_id_rows)]
TopLogprobs = Annotated[Any, BeforeValidator(top_logprob_rows)]
Routing = Annotated[Any, BeforeValidator(routing_array)]
VersionRunList = Annotated[Any, BeforeValidator(version_runs)]
MarkList = Annotated[Any, BeforeValidator(partial(mark_list, parts=MARKS["recomputed"]))]
Positions = Annotated[Any, BeforeValidator(position_list)]
KVRunList = Annotated[Any, BeforeValidator(partial(mark_list, parts=MARKS["kv_versions"]))]
LogitBias = Annotated[Any, BeforeValidator(bias_map)]
#: Index of a completion -> number of tokens that a client has received, None for all; and number of characters.
Offsets = Annotated[Any, BeforeValidator(offset_map)]
IndexDigits = Annotated[str, AfterValidator(index_digits)]
CharCounts = Annotated[Any, BeforeValidator(char_map)]
Seed = Annotated[int, Field(ge=0, lt=SEED_END)]
