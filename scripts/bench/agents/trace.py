"""Trajectories of agents: a file of JSON lines, one a trajectory, and the histories that they make.

    {"group": 0, "stream": 1, "prompt_len": 7570, "out_lens": [399, 65], "obs_lens": [23, 942],
     "tool_times": [1.5, 0.4], "system_len": 6476, "fork": [0, 3], "compact": [[1, 7800]]}

`FIELDS` says what they mean. Turns count from 0; those of a fork are its own. Nothing is asked after the last turn, so
its answer and its time, which may be left out, are not used. The first six fields are those of the traces that vLLM's
benchmark for TPUs replays.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

#: The fields of a line; those with a default in parentheses may be left out.
FIELDS = {
    "group, stream": "a task, and one of the streams that work on it; together they name the trajectory",
    "prompt_len": "tokens of the first prompt: system prompt and task, which all streams of a group share",
    "out_lens": "tokens that the model draws, by turn",
    "obs_lens": "tokens of the tool's answer, by turn; the last one may be missing",
    "tool_times": "seconds that the tool takes, by turn (0)",
    "system_len": "how many tokens of the first prompt all trajectories of the file share (0)",
    "fork": "[stream, turn]: it begins with the history of that stream of the group after that turn, in place of the "
    "first prompt; the stream stands earlier in the file (none)",
    "compact": "[turn, length] pairs: before that turn the history is cut to that length. The first prompt stays, and "
    "so do the newest tokens (none)",
}
_OPTIONAL = ("tool_times", "system_len", "fork", "compact")


class TraceError(ValueError):
    """A line of a trace is wrong; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One line; the fields are described above. Raises TraceError for lengths that do not fit together."""

    group: int
    stream: int
    prompt_len: int
    out_lens: tuple[int, ...]
    obs_lens: tuple[int, ...]
    tool_times: tuple[float, ...] = ()
    system_len: int = 0
    fork: tuple[int, int] | None = None
    compact: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        turns = len(self.out_lens)
        if not turns or min(self.out_lens) < 1:
            raise TraceError("out_lens: a trajectory has one turn or more, each of one token or more")
        if len(self.obs_lens) not in (turns - 1, turns) or min(self.obs_lens, default=1) < 1:
            raise TraceError(f"obs_lens: {turns} turns need {turns - 1} or {turns} answers of one token or more")
        if self.tool_times and (len(self.tool_times) not in (turns - 1, turns) or min(self.tool_times) < 0):
            raise TraceError(f"tool_times: {turns} turns need {turns - 1} or {turns} times of 0 s or more")
        if not 0 <= self.system_len <= self.prompt_len or self.prompt_len < 1:
            raise TraceError("prompt_len: one token or more, and not less than system_len")
        for turn, length in self.compact:
            if not 0 <= turn < turns or length < self.prompt_len:
                raise TraceError(f"compact: {[turn, length]} names a turn from 0 to {turns - 1} and prompt_len or more")

    @property
    def name(self) -> tuple[int, int]:
        """Group and stream."""
        return self.group, self.stream

    def tool_s(self, turn: int) -> float:
        """Seconds of the tool after a turn that is not the last one."""
        return self.tool_times[turn] if self.tool_times else 0.0


# --- files ------------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Trajectory]:
    """The trajectories of a file. Raises TraceError."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                found.append(_trajectory(json.loads(line)))
            except (json.JSONDecodeError, TraceError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    check_trace(found)
    return found


def write_trace(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file, without optional fields that have their default."""
    lines = []
    for trajectory in trajectories:
        fields = dataclasses.asdict(trajectory)
        lines.append(json.dumps({k: v for k, v in fields.items() if v or k not in _OPTIONAL}) + "\n")
    path.write_text("".join(lines))


def check_trace(trajectories: Sequence[Trajectory]) -> None:
    """Check that lines agree with each other. Raises TraceError."""
    if not trajectories:
        raise TraceError("the trace has no trajectory")
    known: dict[tuple[int, int], Trajectory] = {}
    groups: dict[int, int] = {}
    for trajectory in trajectories:
        if trajectory.name in known:
            raise TraceError(f"group {trajectory.group}, stream {trajectory.stream}: there are two of them")
        if groups.setdefault(trajectory.group, trajectory.prompt_len) != trajectory.prompt_len:
            raise TraceError(f"group {trajectory.group}: prompt_len differs between its streams")
        if trajectory.system_len != trajectories[0].system_len:
            raise TraceError(f"group {trajectory.group}: system_len differs from the first line's")
        if trajectory.fork is not None:
            parent = known.get((trajectory.group, trajectory.fork[0]))
            if parent is None or not 0 <= trajectory.fork[1] < len(parent.obs_lens):
                raise TraceError(
                    f"group {trajectory.group}, stream {trajectory.stream}: fork {list(trajectory.fork)} names an "
                    "earlier stream of the group and a turn of it that a tool answers"
                )
        known[trajectory.name] = trajectory


def _trajectory(fields: Any) -> Trajectory:
    if not isinstance(fields, dict):
        raise TraceError("a line is a JSON object")
    readers: dict[str, Callable[[Any], Any]] = {
        "group": _count, "stream": _count, "prompt_len": _count, "system_len": _count,
        "out_lens": _counts, "obs_lens": _counts, "tool_times": _times,
        "fork": _pair, "compact": lambda value: tuple(_pair(pair) for pair in _listed(value)),
    }  # fmt: skip
    if unknown := fields.keys() - readers.keys():
        raise TraceError(f"{min(unknown)}: no such field; there are {', '.join(readers)}")
    if missing := readers.keys() - fields.keys() - set(_OPTIONAL):
        raise TraceError(f"{min(missing)}: missing")
    read = {}
    for name, value in fields.items():
        try:
            read[name] = readers[name](value)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{name}: {error}") from error
    return Trajectory(**read)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return value


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_count(entry) for entry in _listed(value))


def _times(value: Any) -> tuple[float, ...]:
    return tuple(float(entry) for entry in _listed(value))


def _pair(value: Any) -> tuple[int, int]:
    pair = _counts(value)
    if len(pair) != 2:
        raise ValueError(f"{value!r} is not a pair")
    return pair[0], pair[1]


# --- histories --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some tokens of a history: `length` of them from position `begin` of what `source` says.

    A source is ("system",), ("task", group), ("drawn", group, stream, turn) or ("tool", group, stream, turn).
    """

    source: tuple[str | int, ...]
    length: int
    begin: int = 0


Parts = tuple[Part, ...]


def first_prompt(trajectory: Trajectory) -> Parts:
    """The history of a trajectory that is no fork, before its first turn."""
    task = trajectory.prompt_len - trajectory.system_len
    parts = Part(("system",), trajectory.system_len), Part(("task", trajectory.group), task)
    return tuple(part for part in parts if part.length)


def cut(trajectory: Trajectory, turn: int, history: Parts) -> Parts:
    """The prompt of a turn: the history so far, cut where the trajectory says so."""
    for at, length in trajectory.compact:
        if at == turn:
            head = first_prompt(trajectory)
            history = (*head, *_newest(history[len(head) :], length - trajectory.prompt_len))
    return history


def _newest(parts: Parts, tokens: int) -> Parts:
    kept: list[Part] = []
    for part in reversed(parts):
        if not tokens:
            break
        taken = min(part.length, tokens)
        kept.append(Part(part.source, taken, part.begin + part.length - taken))
        tokens -= taken
    return tuple(reversed(kept))


def drawn(trajectory: Trajectory, turn: int) -> Part:
    """What the model draws in a turn."""
    return Part(("drawn", *trajectory.name, turn), trajectory.out_lens[turn])


def answer(trajectory: Trajectory, turn: int) -> Part:
    """The tool's answer to a turn."""
    return Part(("tool", *trajectory.name, turn), trajectory.obs_lens[turn])


def tokens_of(parts: Iterable[Part]) -> int:
    """Tokens of some parts together."""
    return sum(part.length for part in parts)


class Turn(NamedTuple):
    """One request of a trajectory."""

    trajectory: Trajectory
    number: int
    prompt: Parts


def turns(trajectories: Iterable[Trajectory]) -> Iterator[Turn]:
    """All requests, one trajectory after the other."""
    ends: dict[tuple[int, int, int], Parts] = {}
    for one in trajectories:
        history = first_prompt(one) if one.fork is None else ends[one.group, *one.fork]
        for number in range(len(one.out_lens)):
            history = cut(one, number, history)
            yield Turn(one, number, history)
            if number < len(one.obs_lens):
                history = (*history, drawn(one, number), answer(one, number))
                ends[*one.name, number] = history


class Tokens:
    """Counts the tokens of turns: sent, distinct, drawn.

    A token of a prompt is distinct if no prompt and no completion before had it after the same tokens: with all KV
    kept, a prefill computes only these. The order of turns does not matter as long as a history comes after its parts.
    """

    def __init__(self) -> None:
        self.sent = self.distinct = self.drawn = 0
        self._known: dict[Part, Any] = {}

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        node = self._known
        for part in turn.prompt:
            if part not in node:
                node[part] = {}
                self.distinct += part.length
            node = node[part]
        node.setdefault(drawn(turn.trajectory, turn.number), {})
        self.sent += tokens_of(turn.prompt)
        self.drawn += turn.trajectory.out_lens[turn.number]

    @property
    def held(self) -> int:
        """Tokens whose KV must be kept for the trace: each token once, wherever it was drawn or sent."""
        return _held(self._known)


def _held(node: dict[Part, Any]) -> int:
    return sum(part.length + _held(below) for part, below in node.items())


def count(trajectories: Iterable[Trajectory]) -> Tokens:
    """The tokens of all turns."""
    counted = Tokens()
    for turn in turns(trajectories):
        counted.add(turn)
    return counted


def longest(trajectories: Iterable[Trajectory]) -> int:
    """Tokens of the longest prompt with its completion."""
    return max(tokens_of(turn.prompt) + turn.trajectory.out_lens[turn.number] for turn in turns(trajectories))
