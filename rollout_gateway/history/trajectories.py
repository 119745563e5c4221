"""The tokens of conversations: what each turn's prompt added, and what the engine drew. Stored responses name them.

    turn 0   prompt, answer
    turn 1     +-- added, answer          goes on with the tokens of turn 0
    turn 2     +-- added, answer          a branch: the messages after the answer of turn 0 are others
    turn 3   prompt, answer               a new root: an earlier message, the tools or the template are others

A turn keeps only the tokens that it adds to its parent's. A branch is the way from a root to a turn without children:
one row of tokens, exactly as the engine has read and drawn them.

A turn goes on with the tokens of the longest known conversation with which its messages begin. An answer that a client
sends back must have the same text, apart from white space at both ends, and the same calls. Many clients leave the
reasoning out; if it is sent, it must be the same. Ids of calls do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from rollout_gateway.answers.answer_facts import version_runs
from rollout_gateway.answers.logprobs import finite
from rollout_gateway.prompts.chat_messages import DrawnTurn, Rendering
from trainer_bridge.expiring_cache import ExpiringCache

_TURN_BYTES = 1024  # memory of a turn without its tokens
_MESSAGE_BYTES = 128


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens of one answer. Arrays are [tokens]; the gateway's `--logprobs` selects the log-probs.

    `forced`: positions of tokens that a budget of thoughts has forced, so that the policy did not choose them.
    """

    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: list[tuple[int, int]]  # weights version, tokens
    forced: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, and the tokens that its prompt adds to `parent`.

    `position`: the position of the answer among the messages. `common`: the messages that an earlier turn has, too.
    """

    number: int
    parent: int | None
    position: int
    common: int
    added: np.ndarray  # int32
    drawn: AnswerTokens
    reasoning: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Beginning:
    """The part of a conversation that a trajectory has. `digests`: of its messages up to each; `drawn`: its tokens."""

    digests: tuple[bytes, ...]
    trajectory: Trajectory | None = None
    common: int = 0
    parent: int | None = None
    drawn: DrawnTurn | None = None


@dataclass(slots=True)
class Trajectory:
    """The turns of one session."""

    turns: list[Turn] = field(default_factory=list)
    size: int = 0  # bytes
    _answers: dict[bytes, int] = field(default_factory=dict)  # the last turn with these messages and this answer
    _seen: set[bytes] = field(default_factory=set)

    def copy(self) -> Trajectory:
        """The turns of now, to be read by another thread."""
        return Trajectory(list(self.turns))

    def beginning(self, messages: Sequence[Mapping[str, Any]], digests: tuple[bytes, ...]) -> Beginning:
        """The known tokens of a conversation."""
        common = next((position for position, each in enumerate(digests) if each not in self._seen), len(digests))
        for position in range(common - 1, -1, -1):
            number = self._answers.get(digests[position])
            if number is not None and self._reasoned_alike(number, messages):
                tokens = np.concatenate(
                    [part for turn in self.path(number) for part in (turn.added, turn.drawn.token_ids)]
                )
                size = len(self.turns[number].drawn.token_ids)
                prompt, answer = tokens[: len(tokens) - size].tolist(), tokens[len(tokens) - size :].tolist()
                return Beginning(digests, self, common, number, DrawnTurn(position, prompt, answer))
        return Beginning(digests, self, common)

    def _reasoned_alike(self, number: int, messages: Sequence[Mapping[str, Any]]) -> bool:
        last = {turn.position: turn for turn in self.path(number)}  # an answer goes on in further turns
        sent = ((turn, reasoning_of(messages[position])) for position, turn in last.items())
        return all(not text.strip() or text.strip() == turn.reasoning.strip() for turn, text in sent)

    def path(self, number: int) -> list[Turn]:
        """The turns from a root to this one."""
        turns = []
        position: int | None = number
        while position is not None:
            turns.append(self.turns[position])
            position = self.turns[position].parent
        return turns[::-1]

    def add(
        self,
        known: Beginning,
        added: Sequence[int],
        answer: Mapping[str, Any],
        position: int,
        drawn: AnswerTokens,
        facts: Mapping[str, Any],
    ) -> None:
        """Add a turn: `answer` is its message at `position`, after which the client's next request goes on."""
        number = len(self.turns)
        ids = np.array(added, np.int32)
        turn = Turn(number, known.parent, position, known.common, ids, drawn, reasoning_of(answer), facts)
        self.turns.append(turn)
        before = known.digests[:position]
        end = _next(before[-1] if position else _START, answer)
        new = {*before, end} - self._seen
        self._seen |= new
        self._answers[end] = number
        tokens = ids.nbytes + drawn.token_ids.nbytes + drawn.logprobs.nbytes + 2 * len(turn.reasoning)
        self.size += _TURN_BYTES + tokens + _MESSAGE_BYTES * (len(new) + len(drawn.versions)) + 40 * len(drawn.forced)

    def shown(self) -> dict[str, Any]:
        """All branches with their tokens, and all turns with their positions in a branch."""
        parents = {turn.parent for turn in self.turns}
        branches: list[dict[str, Any]] = []
        positions: dict[int, dict[str, int]] = {}
        for leaf in (turn for turn in self.turns if turn.number not in parents):
            branches.append(_branch(self.path(leaf.number), len(branches), positions))
        turns = [
            {"turn": turn.number, "parent": turn.parent, "messages": turn.position, "common_messages": turn.common}
            | positions[turn.number]
            | dict(turn.facts)
            for turn in self.turns
        ]
        return {"turns": turns, "branches": branches}


def _branch(path: list[Turn], number: int, positions: dict[int, dict[str, int]]) -> dict[str, Any]:
    """The tokens of a branch. The positions of turns that no earlier branch has are added to `positions`."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    versions: list[dict[str, int]] = []
    shared = 0
    for turn in path:
        drawn, added = turn.drawn, len(turn.added)
        start = len(ids) + added
        if turn.number in positions:
            shared = start + len(drawn.token_ids)
        positions.setdefault(turn.number, {"branch": number, "start": start, "end": start + len(drawn.token_ids)})
        ids += [*turn.added.tolist(), *drawn.token_ids.tolist()]
        chosen = [1] * len(drawn.token_ids)
        for position in drawn.forced:
            chosen[position] = 0
        mask += [0] * added + chosen
        logprobs += [None] * added + [finite(value) for value in drawn.logprobs.tolist()]
        versions += version_runs(drawn.versions, start)
    return {
        "turns": [turn.number for turn in path],
        "shared_tokens": shared,
        "token_ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "weight_versions": versions,
    }


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, kept for `previous_response_id`, and to be read again.

    `messages`: the conversation up to its answer as chat messages, without instructions. `trajectory`: where its tokens
    are kept. `size`: bytes of memory, also of messages that it shares with the response before, which may be forgotten
    first.
    """

    shown: dict[str, Any]
    messages: list[dict[str, Any]]
    trajectory: str
    size: int


class Trajectories:
    """The trajectories of all sessions, within a limit of bytes and of age."""

    def __init__(self, most_bytes: int, idle_s: float) -> None:
        self.keeps = most_bytes > 0
        self._kept: ExpiringCache[str, Trajectory] = ExpiringCache(most_bytes, idle_s)

    def beginning(self, session: str, messages: Sequence[Mapping[str, Any]], how: Rendering) -> Beginning:
        """The known tokens of a conversation in this session."""
        digests = tuple(_digests(messages, how))
        found = self._kept.get(session)
        return Beginning(digests) if found is None else found.beginning(messages, digests)

    def keep(
        self,
        session: str,
        known: Beginning,
        prompt: list[int],
        answer: Mapping[str, Any],
        position: int,
        drawn: AnswerTokens,
        facts: Mapping[str, Any],
    ) -> None:
        """Keep a turn: its prompt, and its answer at `position` among the messages."""
        found = self._kept.get(session)
        if found is None or found is not known.trajectory:  # new, or deleted meanwhile
            found, known = found or Trajectory(), Beginning(known.digests)
        begun = [] if known.drawn is None else known.drawn.prompt + known.drawn.answer
        if prompt[: len(begun)] != begun:  # the template does not show where the earlier answer ends
            known, begun = replace(known, parent=None), []
        found.add(known, prompt[len(begun) :], answer, position, drawn, facts)
        self._kept.put(session, found, found.size)

    def get(self, session: str) -> Trajectory | None:
        return self._kept.get(session)

    def drop(self, session: str) -> bool:
        """Forget a session; False if it is unknown."""
        return self._kept.drop(session)


# --- messages ---------------------------------------------------------------------------------------------------------

_START = b""


def _digests(messages: Sequence[Mapping[str, Any]], how: Rendering) -> Iterator[bytes]:
    """A digest of the conversation up to each message, with what else decides about the prompt."""
    turns = ("add_generation_prompt", "continue_final_message")
    options = {name: value for name, value in how.options.items() if name not in turns}
    digest = _START
    for position, message in enumerate(messages):
        if not position:
            message = {**message, "_rendering": [how.tools, options, how.template, how.add_special_tokens]}
        digest = _next(digest, message)
        yield digest


def _next(digest: bytes, message: Mapping[str, Any]) -> bytes:
    text = json.dumps([*_canonical(message), message.get("_rendering")], sort_keys=True)
    return blake2b(digest + text.encode(), digest_size=16).digest()


def _canonical(message: Mapping[str, Any]) -> list[Any]:
    """The part of a message that must stay the same."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and (role == "assistant" or len(content) == 1):
        content = _joined(content)
    if role != "assistant":
        return [role, content or ""]
    calls = message.get("tool_calls") or []
    said = content.strip() if isinstance(content, str) else content or ""
    return [role, said, [_call(call) for call in calls] if isinstance(calls, list) else calls]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; empty if its content is something else."""
    content = message.get("content")
    found = _joined(content) if isinstance(content, list) else content
    return found if isinstance(found, str) else ""


def _joined(parts: list[Any]) -> Any:
    """The texts of parts as one text; the parts if some are no texts."""
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.dumps(json.loads(arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            pass  # other text than the engine's
    else:
        arguments = json.dumps(arguments, sort_keys=True)
    return [function.get("name"), arguments]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of an answer; empty if it has none."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""
