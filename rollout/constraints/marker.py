r"""Constraints that begin after a marker, such as `</think>`: before it a completion is free.

    tokens       thoughts   </   think   >\n   \n   {   "a" ...   eos
                 free -----------------------| constrained ----------
                                       ^ barred: tokens that would end the marker with a text that cannot follow it

A marker is a text or a list of token ids. Token ids are found where these tokens stand in a row. A text is found in the
bytes of the tokens, however it was cut into tokens: as the one token `</think>`, or as several. Then the last token may
reach beyond the marker. The rest begins the constrained text. In the free part only tokens whose rest cannot begin that
text are barred.

So a mask is needed after the marker. Before it, a mask is needed only where the text ends with a part of the marker
after which a token is barred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from rollout.constraints.matcher import MOST_UNDONE, NEVER, Constraint, Matcher, Narrows, mask_of

_WHITE = b" \t\r\n"
#: Bytes of white space after a marker at the end of a prompt.
_MOST_WHITE = 64
_BYTES_OF_A_SET = 100  # estimate for each integer of a set


class Marker(Protocol):
    """The token ids or the text that a completion has to contain before its constraint holds."""

    ends: frozenset[int]  # tokens that may end it, or after which a token is barred
    reach: int  # most tokens that it can consist of
    nbytes: int  # approximate memory, bytes

    def rest(self, tokens: Sequence[int]) -> bytes | None:
        """The text after the marker in the last of these tokens, if that ends the marker; else None."""

    def barred(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """The mask of the tokens that may not follow these, int32 [W]; None if all may."""


class IdMarker:
    """Token ids in a row."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._ids = token_ids
        self.ends = frozenset(token_ids[-1:])
        self.reach = len(token_ids)
        self.nbytes = _BYTES_OF_A_SET * len(self.ends)

    def rest(self, tokens: Sequence[int]) -> bytes | None:
        """Empty: the last token has no text after the marker."""
        return b"" if tuple(_last(tokens, len(self._ids))) == self._ids else None

    def barred(self, tokens: Sequence[int]) -> torch.Tensor | None:
        return None


class TokenTexts:
    """The bytes of each token of a vocabulary."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.of = texts

    def tail(self, tokens: Sequence[int], length: int) -> bytes:
        """The last bytes of the text of these tokens: at least `length`, or all of them."""
        parts, count = deque[bytes](), 0
        for token in reversed(tokens):
            if count >= length:
                break
            parts.appendleft(self.of[token])
            count += len(parts[0])
        return b"".join(parts)


class TextMarker:
    """A text, in whatever tokens.

    Args:
        text: the marker; not empty.
        texts: the texts of all tokens; special tokens have their names.
        takes: whether the constrained text can begin with this one, which is not empty.
        vocab: size of the model's output.
    """

    def __init__(self, text: bytes, texts: TokenTexts, takes: Callable[[bytes], bool], vocab: int) -> None:
        self._text, self._texts, of = text, texts, texts.of
        self.reach = len(text)
        beginnings = tuple(text[:part] for part in range(1, len(text)))
        inner = {part[at:] for part in beginnings for at in range(len(part))}
        # Three short passes over the vocabulary: none holds Python's lock for long.
        whole = [token for token, other in enumerate(of) if text in other]
        lasts = tuple(text[part:] for part in range(1, len(text)))
        last = [token for token, other in enumerate(of) if other.startswith(lasts)]
        first = [token for token, other in enumerate(of) if other.endswith(beginnings) or other in inner]
        ends, known = {*whole, *last}, {b"": True}
        self._barred: dict[int, torch.Tensor] = {}  # key: length of the marker's beginning at the end of a text
        for begun in range(len(text)):
            parts = tuple(text[part:] for part in range(begun, 0, -1) if text[:begun].endswith(text[:part]))
            bad = []
            for token in (*whole, *(token for token in last if of[token].startswith(parts))):
                joined = text[:begun] + of[token]
                rest = joined[joined.index(text) + len(text) :]
                if rest not in known:
                    known[rest] = takes(rest)
                if not known[rest]:
                    bad.append(token)
            if bad:
                self._barred[begun] = mask_of(bad, vocab)
                ends.update(token for token in first if _may_end(of[token], text[:begun]))
        self.ends = frozenset(ends)
        self.nbytes = _BYTES_OF_A_SET * len(ends) + sum(mask_W.nbytes for mask_W in self._barred.values())

    def rest(self, tokens: Sequence[int]) -> bytes | None:
        """The text of the last token after the first place where the marker ends in it."""
        new = len(self._texts.of[tokens[-1]])
        if not new:
            return None
        most = new + len(self._text) - 1  # a marker that ends in the last token begins there
        end = self._texts.tail(tokens, most)[-most:]
        at = end.find(self._text)
        return None if at < 0 else end[at + len(self._text) :]

    def barred(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Tokens that would end the marker with a text that cannot follow it."""
        return self._barred.get(self._begun(tokens)) if self._barred else None

    def _begun(self, tokens: Sequence[int]) -> int:
        """Length of the marker's beginning at the end of these tokens' text."""
        end = self._texts.tail(tokens, len(self._text) - 1)
        return next((part for part in range(len(self._text) - 1, 0, -1) if end.endswith(self._text[:part])), 0)


@dataclass(frozen=True)
class AfterMarker:
    """A constraint that holds for the tokens after a marker. `prior` are the first tokens of the completion."""

    inner: Constraint
    marker: Marker
    prior: tuple[int, ...] = ()

    foreseen = None
    look_at = NEVER

    def start(self) -> AfterMatcher:
        """A matcher of a completion whose marker has not come yet."""
        return AfterMatcher(self)

    def start_after(self, rest: bytes, token: int) -> Matcher | None:
        """None, since no text of a completion comes before its free part."""
        return None

    @cached_property
    def free(self) -> AfterMarker | None:
        """The search for the end of the free part; None if a token is barred everywhere."""
        return None if self.marker.barred(()) is not None else self

    @property
    def ends(self) -> frozenset[int]:
        """Tokens after which `narrows` has to be asked; after all other tokens it returns "no"."""
        return self.marker.ends

    def narrows(self, tokens: Sequence[int]) -> Narrows:
        """See `Free.narrows`; the constraint does not hold for the last of these tokens."""
        if not len(tokens):
            return "no"
        last = _last(tokens, self.marker.reach)
        if self.marker.rest(last) is not None:
            return "all"
        return "no" if self.marker.barred(last) is None else "next"


class AfterMatcher(Matcher):
    """The place of a completion: in its free part, or in the constraint after it."""

    def __init__(self, constraint: AfterMarker) -> None:
        self._constraint = constraint
        self._marker = constraint.marker
        self._free = deque(
            constraint.prior, maxlen=self._marker.reach + MOST_UNDONE
        )  # the last tokens of the free part
        self._inner: Matcher | None = None
        self._accepted = 0  # tokens that the inner matcher accepted

    def accept(self, token: int) -> bool:
        """Advance by one token; False if the constraint has begun and does not allow it here."""
        if self._inner is not None:
            self._accepted += 1
            return self._inner.accept(token)
        self._free.append(token)
        if token not in self._marker.ends or (rest := self._marker.rest(self._free)) is None:
            return True
        inner = self._constraint.inner
        self._inner = inner.start_after(rest, token) if rest else inner.start()
        return self._inner is not None

    def follow(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens; False if the constraint has begun and does not allow one of the tokens."""
        if self._inner is not None or not self._marker.ends.isdisjoint(tokens):
            return super().follow(tokens)
        self._free.extend(tokens)
        return True

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write the mask of the next token."""
        if self._inner is not None:
            self._inner.fill(masks_RW, row)
            return
        masks_RW[row] = -1
        if (barred_W := self._marker.barred(self._free)) is not None:
            masks_RW[row] &= ~barred_W

    def undo(self, tokens: int) -> None:
        """Go back, if necessary to a place before the marker."""
        back = min(tokens, self._accepted)
        if back and self._inner is not None:
            self._inner.undo(back)
            self._accepted -= back
        if tokens > back:
            self._inner = None
            for _ in range(tokens - back):
                self._free.pop()

    @property
    def complete(self) -> bool:
        """True if the constraint has begun and is obeyed."""
        return self._inner is not None and self._inner.complete


def find(marker: Marker, tokens: Sequence[int]) -> tuple[int, bytes] | None:
    """The end of a completion's marker: the number of tokens up to it, and the rest of the last token."""
    for count, token in enumerate(tokens, 1):
        if token in marker.ends and (rest := marker.rest(tokens[max(count - marker.reach, 0) : count])) is not None:
            return count, rest
    return None


def ends_with(prompt: Sequence[int], marker: str | tuple[int, ...], texts: TokenTexts | None) -> bool:
    """True if a prompt ends with a marker, apart from white space. Without `texts` no token is known to be that."""
    if isinstance(marker, str):
        assert texts is not None, "a marker in words needs the texts of the tokens"
        sought = marker.encode()
        end = texts.tail(prompt, len(sought) + _MOST_WHITE)
        return end.endswith(sought) or (bool(sought.strip(_WHITE)) and end.rstrip(_WHITE).endswith(sought))
    end_at = len(prompt)
    while tuple(prompt[max(end_at - len(marker), 0) : end_at]) != marker:
        if texts is None or not end_at or texts.of[prompt[end_at - 1]].strip(_WHITE):
            return False
        end_at -= 1
    return True


def _last(tokens: Sequence[int], count: int) -> Sequence[int]:
    return list(tokens)[-count:] if isinstance(tokens, deque) else tokens[max(len(tokens) - count, 0) :]


def _may_end(token: bytes, text: bytes) -> bool:
    """True if a text that ends with this token can end with `text`."""
    return token.endswith(text) or text.endswith(token)
