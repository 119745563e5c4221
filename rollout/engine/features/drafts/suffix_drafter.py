"""Drafts by suffix matching: what followed the last tokens before, in the same prompt's texts.

A completion is compared with its prompt, with itself, with the group's other completions as they grow, and with earlier
completions: a trainer repeats its prompts at every epoch. Earlier completions are kept by prompt, within a number of
tokens; the least recently used prompt is dropped first. A token takes about 300 bytes.

    a prompt in use    prompt + running completions | kept: ended completions
    another prompt     prompt + kept: ended completions

A prompt in use keeps its ended completions until they have more tokens than its other texts. Then the index is built
anew from the other texts.

The index finds earlier occurrences of a text's last tokens, in the texts of one prompt:

    texts     0: the prompt | 1, 2, ...: completions, each after the end of the prompt, in the order of their beginning
    gram      the last `LEAST` tokens before a position, as one integer; two grams are equal only if their tokens are
    place     (text, position) where a gram ends and a token follows. Places are numbered as they become known; each
              refers to the place before it with the same gram, so the newest places are found first

A match is one of the newest `CANDIDATES` places of the text's last gram: the place with the most equal tokens before
it, counted up to `MOST`; of several such places, the newest.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

#: The fewest equal tokens of a match, and the most tokens that are compared.
LEAST, MOST = 3, 32
#: Places that are compared.
CANDIDATES = 16
_TOKEN_BITS = 24  # bits of one token in a gram


class Match(NamedTuple):
    """A place that ends like a text."""

    text: int
    position: int  # position in `text` of the token that follows
    length: int  # equal tokens before it, `LEAST` to `MOST`


class SuffixIndex:
    """The texts of one prompt."""

    def __init__(self, prompt: Seq[int]) -> None:
        self._texts: list[array] = []
        self._newest: dict[int, int] = {}  # gram -> number of its newest place
        # Index: number of a place.
        self._text_of, self._position_of, self._before = array("i"), array("i"), array("i")
        self._texts.append(array("i"))
        self.add(0, prompt)
        self._context = array("i", prompt[-MOST:])

    def __len__(self) -> int:
        return sum(map(len, self._texts))

    def open(self) -> int:
        """Begin a completion; returns its text."""
        self._texts.append(array("i", self._context))
        return len(self._texts) - 1

    def length(self, text: int) -> int:
        """Number of tokens in a completion."""
        return len(self._texts[text]) - len(self._context)

    def size(self, text: int) -> int:
        """Tokens that a text takes; a completion includes the end of the prompt before it."""
        return len(self._texts[text])

    @property
    def prompt(self) -> Seq[int]:
        return self._texts[0]

    def completion(self, text: int) -> Seq[int]:
        """The present tokens of a completion."""
        return self._texts[text][len(self._context) :]

    def add(self, text: int, tokens: Seq[int]) -> None:
        own, newest = self._texts[text], self._newest
        for token in tokens:
            if len(own) >= LEAST:
                gram = _gram(own)
                self._before.append(newest.get(gram, -1))
                newest[gram] = len(self._text_of)
                self._text_of.append(text)
                self._position_of.append(len(own))
            own.append(token)

    def match(self, text: int) -> Match | None:
        """The place that is most like the end of a text, or None."""
        own = self._texts[text]
        if len(own) < LEAST:
            return None
        best, place = None, self._newest.get(_gram(own), -1)
        for _ in range(CANDIDATES):
            if place < 0:
                break
            other, position = self._text_of[place], self._position_of[place]
            length = _equal_before(own, self._texts[other], position)
            if best is None or length > best.length:
                best = Match(other, position, length)
                if length == MOST:
                    break
            place = self._before[place]
        return best

    def after(self, text: int, match: Match, want: int) -> list[int]:
        """Up to `want` tokens that follow a match. A text that repeats itself is expected to do so again."""
        _, position, _ = match
        path = self._texts[match.text][position : position + want].tolist()
        if match.text == text:
            period = len(self._texts[text]) - position
            while len(path) < want:
                path.append(path[-period])
        return path


def _gram(tokens: array) -> int:
    gram = 0
    for token in tokens[-LEAST:]:
        gram = gram << _TOKEN_BITS | token
    return gram


def _equal_before(own: array, other: array, position: int) -> int:
    """Number of equal tokens before the end of `own` and before `position` of `other`, at most `MOST`."""
    most = min(len(own), position, MOST)
    end, length = len(own), LEAST
    while length < most and own[end - length - 1] == other[position - length - 1]:
        length += 1
    return length


#: The number of a prompt among its texts.
_PROMPT = 0


@dataclass(eq=False, slots=True)
class _Texts:
    """The texts of one prompt."""

    digest: bytes
    index: SuffixIndex
    versions: list[int | None] = field(default_factory=lambda: [None])  # version of each text's newest token
    running: set[_Running] = field(default_factory=set)  # completions that have not ended
    ended: int = 0  # tokens of ended completions

    @property
    def kept(self) -> int:
        """Its kept tokens that no running completion needs."""
        return self.ended if self.running else len(self.index)


@dataclass(eq=False, slots=True)
class _Running:
    """A completion that has not ended."""

    texts: _Texts
    text: int
    source: int = _PROMPT  # text that the last path follows; the prompt also if there is no path


class SuffixDrafter:
    """Drafts by suffix matching.

    Besides running completions and their prompts it keeps `kept_tokens` tokens. A prompt in use may have more: as many
    tokens of ended completions as the prompt and its running completions have.
    """

    def __init__(self, kept_tokens: int) -> None:
        self._kept_tokens = kept_tokens
        self._by_prompt: dict[bytes, _Texts] = {}  # least recently used first
        self._running: dict[Hashable, _Running] = {}
        self.tokens = 0  # tokens of all texts
        self.kept = 0  # tokens that no running completion needs

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        match, path = self.matched_path(key, prompt, tokens, want, version)
        self._running[key].source = match.text if match else _PROMPT
        return path

    def source(self, key: Hashable) -> int | None:
        """See `HostDrafter.source`: the version of the newest token of the text, or None for the prompt."""
        running = self._running[key]
        return running.texts.versions[running.source]

    def matched_path(
        self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0
    ) -> tuple[Match | None, list[int]]:
        """A path, and the match that it follows. Adds the new tokens to the text."""
        running = self._running.get(key) or self._open(key, prompt)
        texts, text = running.texts, running.text
        index = texts.index
        known = index.length(text)
        if len(tokens) > known:
            index.add(text, tokens[known:])
            texts.versions[text] = version
            self.tokens += len(tokens) - known
        match = index.match(text)
        return match, index.after(text, match, want) if match else []

    def own_text(self, key: Hashable) -> int:
        """The text of a running completion, as `Match.text` names it."""
        return self._running[key].text

    def ended(self, key: Hashable) -> None:
        """See `HostDrafter.ended`. The tokens serve later completions of the same prompt."""
        running = self._running.pop(key, None)
        if running is None:
            return
        texts = running.texts
        self.kept -= texts.kept
        texts.running.remove(running)
        texts.ended += texts.index.size(running.text)
        self.kept += texts.kept
        self._forget()

    def _open(self, key: Hashable, prompt: np.ndarray) -> _Running:
        digest = blake2b(np.ascontiguousarray(prompt, dtype="<i4").tobytes(), digest_size=16).digest()
        texts = self._by_prompt.pop(digest, None)
        if texts is None:
            texts = _Texts(digest, SuffixIndex(prompt.tolist()))
            self.tokens += len(texts.index)
        else:
            self.kept -= texts.kept
        self._by_prompt[digest] = texts  # the most recently used one
        before = len(texts.index)
        running = self._running[key] = _Running(texts, texts.index.open())
        texts.running.add(running)
        texts.versions.append(None)
        self.tokens += len(texts.index) - before
        self.kept += texts.kept
        return running

    def _forget(self) -> None:
        """Drop the least recently used texts until the rest fits the limit: unused prompts, then parts of used ones."""
        for texts in list(self._by_prompt.values()):
            if self.kept <= self._kept_tokens:
                return
            if not texts.running:
                del self._by_prompt[texts.digest]
                self.tokens -= len(texts.index)
                self.kept -= texts.kept
        for texts in self._by_prompt.values():
            if self.kept > self._kept_tokens and 2 * texts.ended > len(texts.index):
                self._drop_ended(texts)

    def _drop_ended(self, texts: _Texts) -> None:
        """Index the prompt and its running completions anew, without ended completions."""
        before, index = texts.index, SuffixIndex(texts.index.prompt)
        versions: list[int | None] = [None]
        for running in sorted(texts.running, key=lambda running: running.text):
            old, running.text, running.source = running.text, index.open(), _PROMPT
            index.add(running.text, before.completion(old))
            versions.append(texts.versions[old])
        self.tokens += len(index) - len(before)
        self.kept -= texts.ended
        texts.index, texts.versions, texts.ended = index, versions, 0
