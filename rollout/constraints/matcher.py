"""Matchers: the position of a completion in its constraint.

A mask is a row of int32 words: bit `v % 32` of word `v // 32` is set if token v may come next. A grammar allows stop
tokens where its text is complete, and nothing else where no text may follow. A list of tokens allows these only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

WORD_BITS = 32
#: Tokens by which a matcher can go back.
MOST_UNDONE = 32
#: A number of tokens that no completion has.
NEVER = sys.maxsize


def mask_words(vocab: int) -> int:
    """int32 words of a mask."""
    return -(-vocab // WORD_BITS)


class Matcher(Protocol):
    """The position of one completion in its constraint; for one thread at a time."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False if the constraint does not allow it here."""

    def follow(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens; False if the constraint does not allow one of them. It may be quicker than `accept`."""
        return all(map(self.accept, tokens))

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write the mask of the next token into a row of an int32 tensor on the host."""

    def undo(self, tokens: int) -> None:
        """Go back by the last `tokens` accepted tokens, `MOST_UNDONE` at most."""

    @property
    def complete(self) -> bool:
        """True if the completion obeys the constraint as it is."""


#: The effect on the next token: none; none yet, but soon; a mask for this token; the constraint holds from here on.
Narrows = Literal["no", "soon", "next", "all"]


class FreePart(Protocol):
    """Finds the end of the free part of a completion, whose tokens need no mask."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens after which `narrows` may return more than "no"."""

    @property
    def look_at(self) -> int:
        """The number of tokens after which `narrows` may return more, whichever tokens come; `NEVER`: it never does."""

    def narrows(self, tokens: Sequence[int]) -> Narrows:
        """The effect on the next token after a completion's `tokens`; the constraint does not hold for the last one."""


class Constraint(Protocol):
    """A compiled constraint."""

    def start(self) -> Matcher:
        """A matcher at the beginning, or after the tokens that a continued completion already has."""

    def start_after(self, rest: bytes, token: int) -> Matcher | None:
        """A matcher after `rest`, with which `token` ends; None if the constraint does not allow it."""

    @property
    def free(self) -> FreePart | None:
        """The free part of one completion; None if the constraint holds from the first token."""

    @property
    def foreseen(self) -> FreePart | None:
        """`free` where no row can draw a token again: "soon" comes before any token that needs a mask is launched.

        None if that cannot be.
        """


class Unconstrained(Matcher):
    """The constraint that allows everything. It has no state, so it is its own matcher."""

    complete = True
    ends: frozenset[int] = frozenset()
    look_at = NEVER

    @property
    def free(self) -> Unconstrained:
        """See `Constraint`; this one never holds."""
        return self

    @property
    def foreseen(self) -> Unconstrained:
        """See `free`."""
        return self

    def narrows(self, tokens: Sequence[int]) -> Narrows:
        return "no"

    def start(self) -> Unconstrained:
        return self

    def start_after(self, rest: bytes, token: int) -> Unconstrained:
        return self

    def accept(self, token: int) -> bool:
        return True

    def follow(self, tokens: Sequence[int]) -> bool:
        return True

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Allow every token."""
        masks_RW[row] = -1

    def undo(self, tokens: int) -> None:
        """No-op."""


ANYTHING = Unconstrained()


def mask_of(token_ids: Iterable[int], vocab: int) -> torch.Tensor:
    """The mask of these tokens, int32 [W]."""
    mask_W = torch.zeros(mask_words(vocab), dtype=torch.int32)
    words = mask_W.numpy().view("uint32")
    for token in token_ids:
        words[token // WORD_BITS] |= 1 << (token % WORD_BITS)
    return mask_W


class AllowList(Matcher):
    """The same tokens at every step. It has no state, so it is its own matcher."""

    free = foreseen = None

    def __init__(self, token_ids: tuple[int, ...], vocab: int) -> None:
        self._allowed = frozenset(token_ids)
        self._mask_W = mask_of(self._allowed, vocab)

    def start(self) -> AllowList:
        """The list itself."""
        return self

    def start_after(self, rest: bytes, token: int) -> AllowList | None:
        """The list, if there is no rest: only whole tokens are allowed."""
        return None if rest else self

    def accept(self, token: int) -> bool:
        return token in self._allowed

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        masks_RW[row].copy_(self._mask_W)

    def undo(self, tokens: int) -> None:
        """No-op."""

    @property
    def complete(self) -> bool:
        """True: all accepted tokens are in the list."""
        return True


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The stop tokens of a request, with which a text may end once it is complete.

    They may be text of a grammar, too, unless they are among `no_text`, the tokens of the model that never are.
    """

    tokens: frozenset[int]
    no_text: frozenset[int]
    mask_W: torch.Tensor  # mask of `tokens`, int32 [W]


class GrammarConstraint:
    """A compiled grammar, from which matchers are forked.

    Two kinds of masks narrow it further: `allowed_W` at every step, and masks of `after` for the one step after their
    token. `last` is the token before the first step, if any.
    """

    free = foreseen = None

    def __init__(
        self,
        matcher: Any,
        allowed_W: torch.Tensor,
        ends: StopTokens,
        after: Mapping[int, torch.Tensor] | None = None,
        last: Sequence[int] = (),
    ) -> None:
        self.matcher = matcher  # xgrammar.GrammarMatcher; only its forks advance
        self.allowed_W = allowed_W
        self.ends = ends
        self.after = after or {}
        self._last = last

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self, self.matcher.fork(), self._last)

    def start_after(self, rest: bytes, token: int) -> GrammarMatcher | None:
        """A new matcher after this text; None if the grammar does not allow it."""
        matcher = self.matcher.fork()
        allowed = not rest or matcher.accept_string(rest)
        return GrammarMatcher(self, matcher, (token,)) if allowed else None


class GrammarMatcher(Matcher):
    """A position in a grammar. `last` has the token before, if any."""

    def __init__(self, constraint: GrammarConstraint, matcher: Any, last: Sequence[int]) -> None:
        self._constraint, self._matcher = constraint, matcher
        self._ended = False  # True after a stop token
        # Masks for the next step alone, newest last; the earlier ones are for `undo`.
        self._next = deque([constraint.after.get(last[-1]) if last else None], maxlen=MOST_UNDONE + 1)

    def accept(self, token: int) -> bool:
        """Advance by one token; False if the grammar does not allow it here."""
        self._next.append(self._constraint.after.get(token))
        ends = self._constraint.ends
        if token not in ends.no_text and self._matcher.accept_token(token):
            return True
        self._ended = token in ends.tokens and self.complete
        return self._ended

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write the mask of the next token."""
        self._matcher.fill_next_token_bitmask(masks_RW, row)
        masks_RW[row] &= self._constraint.allowed_W
        if (next_W := self._next[-1]) is not None:
            masks_RW[row] &= next_W
        if self.complete:
            masks_RW[row] |= self._constraint.ends.mask_W

    def undo(self, tokens: int) -> None:
        for _ in range(tokens):
            self._next.pop()
        if tokens and self._ended:
            self._ended, tokens = False, tokens - 1
        self._matcher.rollback(tokens)

    @property
    def complete(self) -> bool:
        """True if the accepted tokens are a whole text of the grammar."""
        return bool(self._matcher.is_completed())
