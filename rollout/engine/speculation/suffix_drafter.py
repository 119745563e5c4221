"""Drafts by suffix matching: what followed the last tokens before, in the same prompt's texts.

A completion is compared with its prompt, with itself, with the other completions of that prompt as they grow (its
group), and with earlier ones: a trainer comes back to the same prompts at every epoch. Earlier ones are kept by prompt,
within a number of tokens; the prompt that was used longest ago goes first. A token takes about 300 bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from rollout.engine.speculation.suffix_index import Match, SuffixIndex


@dataclass(eq=False, slots=True)
class _Texts:
    """The texts of one prompt."""

    digest: bytes
    index: SuffixIndex
    versions: list[int | None] = field(default_factory=lambda: [None])  # of the newest token of each text
    running: int = 0  # completions that have not ended


@dataclass(eq=False, slots=True)
class _Running:
    """A completion that has not ended."""

    texts: _Texts
    text: int
    source: int | None = None  # text that the last path follows


class SuffixDrafter:
    """Guesses by suffix matching.

    It keeps at most `kept_tokens` tokens of prompts and completions. Prompts with running completions always stay.
    """

    def __init__(self, kept_tokens: int) -> None:
        self._kept_tokens = kept_tokens
        self._by_prompt: dict[bytes, _Texts] = {}  # least recently used first
        self._running: dict[Hashable, _Running] = {}
        self.tokens = 0  # of all texts

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        """As `Drafter.path`."""
        match, path = self.guess(key, prompt, tokens, want, version)
        self._running[key].source = None if match is None else match.text
        return path

    def source(self, key: Hashable) -> int | None:
        """As `Drafter.source`: of the newest token of the text, or None for the prompt."""
        running = self._running[key]
        return None if running.source is None else running.texts.versions[running.source]

    def guess(
        self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0
    ) -> tuple[Match | None, list[int]]:
        """A path, and the match that it follows. Takes the tokens that are new."""
        running = self._running.get(key) or self._open(key, prompt)
        texts, text = running.texts, running.text
        index = texts.index
        known = index.length(text)
        if len(tokens) > known:
            index.add(text, tokens[known:])
            texts.versions[text] = version
            self.tokens += len(tokens) - known
        match = index.match(text)
        return match, [] if match is None else index.after(text, match, want)

    def own_text(self, key: Hashable) -> int:
        """The text of a running completion, as `Match.text` names it."""
        return self._running[key].text

    def ended(self, key: Hashable) -> None:
        """As `Drafter.ended`. Its tokens serve later completions of the same prompt."""
        running = self._running.pop(key, None)
        if running is not None:
            running.texts.running -= 1
            self._forget()

    def _open(self, key: Hashable, prompt: np.ndarray) -> _Running:
        digest = blake2b(np.ascontiguousarray(prompt, dtype="<i4").tobytes(), digest_size=16).digest()
        texts = self._by_prompt.pop(digest, None)
        if texts is None:
            texts = _Texts(digest, SuffixIndex(prompt.tolist()))
            self.tokens += len(texts.index)
        self._by_prompt[digest] = texts  # the most recently used one
        texts.running += 1
        before = len(texts.index)
        running = self._running[key] = _Running(texts, texts.index.open())
        texts.versions.append(None)
        self.tokens += len(texts.index) - before
        return running

    def _forget(self) -> None:
        """Drop prompts until the rest is within the limit."""
        for texts in list(self._by_prompt.values()):
            if self.tokens <= self._kept_tokens:
                return
            if texts.running == 0:
                del self._by_prompt[texts.digest]
                self.tokens -= len(texts.index)
