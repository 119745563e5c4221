"""Drafts by suffix matching: what followed the last tokens before, in the same prompt's texts.

A completion is compared with its prompt, with itself, with the other completions of that prompt as they grow (its
group), and with earlier ones: a trainer comes back to the same prompts at every epoch. Earlier ones are kept by prompt,
within a number of tokens; the prompt that was used longest ago goes first. A token takes about 300 bytes.

    a prompt in use    prompt + running completions | ended ones: kept
    another prompt     prompt + ended ones: kept

A prompt in use keeps its ended completions while they have no more tokens than its other texts: to drop them, the index
of the other texts is built anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from rollout.engine.features.drafts.suffix_index import Match, SuffixIndex

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
        """See `HostDrafter.path`."""
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
        """Index the prompt and its running completions anew, without the ended ones."""
        before, index = texts.index, SuffixIndex(texts.index.prompt)
        versions: list[int | None] = [None]
        for running in sorted(texts.running, key=lambda running: running.text):
            old, running.text, running.source = running.text, index.open(), _PROMPT
            index.add(running.text, before.completion(old))
            versions.append(texts.versions[old])
        self.tokens += len(index) - len(before)
        self.kept -= texts.ended
        texts.index, texts.versions, texts.ended = index, versions, 0
