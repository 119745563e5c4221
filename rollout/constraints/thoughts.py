r"""A budget for thoughts: after this number of tokens in a thought, the tokens that end it are forced.

    prompt   ... <think>            or the completion has the start
    tokens   t t t ... t  </think>  answer ...
             budget       forced

Start and end are token ids. A thought begins after its start and counts no token of the end that is forced. Another
start inside of it is a part of it. If a thought already ends with a part of its end, the rest is forced.

Forcing is a mask of one token. So a budget is a constraint around another one: a row is free until its budget is used
up, has masks until the end is written, and is free again. A forced token that the other constraint does not allow is
not forced. The forced tokens follow from the tokens alone, so the service finds them without the engine.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rollout.constraints.matcher import MOST_UNDONE, NEVER, WORD_BITS, Constraint, FreePart, Matcher, Narrows, mask_of

#: The most tokens in flight after a committed one: two steps, each with the most drafts (`speculation_tokens`).
MOST_IN_FLIGHT = 34


@dataclass(frozen=True)
class ThoughtRule:
    """`budget`: the most tokens of a thought. `start`, `end`: token ids, at least one each."""

    budget: int
    start: tuple[int, ...]
    end: tuple[int, ...]

    @cached_property
    def lasts(self) -> frozenset[int]:
        """Tokens with which a thought may begin or end."""
        return frozenset((self.start[-1], self.end[-1]))

    def after(self, prompt: np.ndarray, turn_ends: Iterable[int], prior: Sequence[int] = ()) -> Thoughts:
        """The place after a prompt, int32 [tokens], and the first tokens of a completion.

        A thought that the prompt left open goes on, unless a token of `turn_ends` came after its start. It began with
        its last start.
        """
        turns = np.flatnonzero(np.isin(prompt, list(turn_ends)))
        begin = int(turns[-1]) + 1 if len(turns) else 0
        started, ended = _last(prompt[begin:], self.start), _last(prompt[begin:], self.end)
        reach = max(len(self.start), len(self.end))
        known = None if started <= ended else len(prompt) - begin - started
        thoughts = Thoughts(self, prompt[max(begin, len(prompt) - reach) :].tolist(), known)
        thoughts.follow(prior)
        return thoughts


class Thoughts:
    """The place of a completion: inside of a thought or not. It can go back by `MOST_UNDONE` tokens.

    Args:
        before: the last tokens of the prompt, in which a start or an end may have begun.
        known: number of tokens of a thought that the prompt left open; None if it left none open.
    """

    def __init__(self, rule: ThoughtRule, before: Sequence[int] = (), known: int | None = None) -> None:
        self.rule = rule
        self.count = 0  # tokens of the completion
        reach = max(len(rule.start), len(rule.end))
        self._last = deque(before, maxlen=reach + MOST_UNDONE)
        self._bounds = [] if known is None else [-known]  # counts at which thoughts began and ended

    @property
    def inside(self) -> bool:
        return len(self._bounds) % 2 == 1

    def accept(self, token: int) -> None:
        self.count += 1
        self._last.append(token)
        if token in self.rule.lasts:
            self._note_bound()

    def follow(self, tokens: Sequence[int]) -> None:
        if self.rule.lasts.isdisjoint(tokens):
            self.count += len(tokens)
            self._last.extend(tokens)
        else:
            for token in tokens:
                self.accept(token)

    def undo(self, tokens: int) -> None:
        self.count -= tokens
        for _ in range(tokens):
            self._last.pop()
        while self._bounds and self._bounds[-1] > self.count:
            self._bounds.pop()

    @property
    def due(self) -> int:
        """The count at which a token is forced, if the thought does not end before; `NEVER` outside of a thought."""
        return self._bounds[-1] + self.rule.budget if self.inside else NEVER

    @property
    def forced(self) -> int | None:
        """The next token, if it is forced."""
        if self.count < self.due:
            return None
        end, thought = self.rule.end, self._since_bound()
        begun = next(part for part in range(len(end) - 1, -1, -1) if _ends_with(thought, end[:part]))
        return end[begun]

    def copy(self) -> Thoughts:
        other = copy.copy(self)
        other._last, other._bounds = self._last.copy(), self._bounds.copy()
        return other

    def _note_bound(self) -> None:
        """Begin or end a thought if the last token does so."""
        if _ends_with(self._since_bound(), self.rule.end if self.inside else self.rule.start):
            self._bounds.append(self.count)

    def _since_bound(self) -> list[int]:
        """The last tokens since a thought began or ended: a mark has no token of the mark before it."""
        last = list(self._last)
        return last[max(len(last) - self.count + self._bounds[-1], 0) :] if self._bounds else last


@dataclass(frozen=True)
class BudgetedConstraint:
    """A constraint, or `ANYTHING`, with a budget for thoughts. `begin`: the place of a completion as it begins."""

    inner: Constraint
    begin: Thoughts

    def start(self) -> BudgetedMatcher:
        return BudgetedMatcher(self.inner.start(), self.begin.copy())

    def start_after(self, rest: bytes, token: int) -> None:
        """None, since no text of a completion comes before its thoughts."""
        return None

    @property
    def free(self) -> FreePart | None:
        """The search for the end of a thought, for one completion."""
        return None if self.inner.free is None else _Watch(self.begin.copy(), self.inner.free, 1)

    @property
    def foreseen(self) -> FreePart | None:
        """See `Constraint`; None if a budget may end before each token in flight has its mask."""
        if self.inner.foreseen is None or self.begin.rule.budget < MOST_IN_FLIGHT:
            return None
        return _Watch(self.begin.copy(), self.inner.foreseen, MOST_IN_FLIGHT)


class _Watch:
    """Follows one completion as it is committed. It asks for masks `lead` tokens before a token is forced."""

    def __init__(self, thoughts: Thoughts, inner: FreePart, lead: int) -> None:
        self.ends = thoughts.rule.lasts | inner.ends
        self.look_at = NEVER
        self._thoughts = thoughts
        self._inner = inner
        self._lead = lead

    def narrows(self, tokens: Sequence[int]) -> Narrows:
        """The effect on the token after these."""
        thoughts = self._thoughts
        thoughts.follow(tokens[thoughts.count :])
        inner = self._inner.narrows(tokens)
        early = thoughts.due - self._lead
        self.look_at = min(early, self._inner.look_at)
        if inner != "no" or thoughts.count < early:
            return inner
        return "soon" if thoughts.count < thoughts.due else "next"


class BudgetedMatcher(Matcher):
    """The place of a completion in a constraint, and in its thoughts."""

    def __init__(self, inner: Matcher, thoughts: Thoughts) -> None:
        self._inner = inner
        self._thoughts = thoughts

    def accept(self, token: int) -> bool:
        """Advance by one token; False if the constraint does not allow it here."""
        self._thoughts.accept(token)
        return self._inner.accept(token)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens; False if the constraint does not allow one of the tokens."""
        self._thoughts.follow(tokens)
        return self._inner.follow(tokens)

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write the mask of the next token: only the forced token, if the constraint allows it."""
        self._inner.fill(masks_RW, row)
        token = self._thoughts.forced
        if token is not None:
            row_W = masks_RW[row]
            forced_W = mask_of((token,), len(row_W) * WORD_BITS)
            if (row_W & forced_W).any():
                row_W.copy_(forced_W)

    def undo(self, tokens: int) -> None:
        self._thoughts.undo(tokens)
        self._inner.undo(tokens)

    @property
    def complete(self) -> bool:
        """True if the completion obeys the constraint as it is."""
        return self._inner.complete


def forced_places(thoughts: Thoughts, tokens: Sequence[int]) -> list[int]:
    """Advance by these tokens; returns the positions of the forced ones in the completion."""
    if thoughts.rule.lasts.isdisjoint(tokens) and thoughts.count + len(tokens) <= thoughts.due:
        thoughts.follow(tokens)
        return []
    found = []
    for token in tokens:
        if thoughts.count >= thoughts.due and thoughts.forced == token:
            found.append(thoughts.count)
        thoughts.accept(token)
    return found


def _last(tokens: np.ndarray, mark: tuple[int, ...]) -> int:
    """The place after the last occurrence of a mark; -1 without one."""
    count = len(tokens) - len(mark) + 1
    if count <= 0:
        return -1
    hits = np.ones(count, bool)
    for place, token in enumerate(mark):
        hits &= tokens[place : place + count] == token
    found = np.flatnonzero(hits)
    return int(found[-1]) + len(mark) if len(found) else -1


def _ends_with(tokens: Sequence[int], mark: tuple[int, ...]) -> bool:
    return len(tokens) >= len(mark) and tuple(tokens[len(tokens) - len(mark) :]) == mark
