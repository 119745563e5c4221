"""Pages of sequences: admission, growth, sharing, release. The scheduler decides who; this decides which pages.

cached prefix      full pages found by key, shared
group share        a prefilled prompt: its full pages are shared, the page of its last token is copied (the copy is
                   the sequence's own, so that what it writes there is seen by nobody else), and only that last
                   token is computed again
own pages          the rest of the prompt and one page more; after that a page at a time
"""

from __future__ import annotations

import numpy as np

from rollout.engine.pages import PagePool, PrefixKeys
from rollout.engine.sequence import Group, PromptShare, Sequence


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class SequenceMemory:
    """Hands pages of one pool to sequences."""

    def __init__(self, pool: PagePool, page_size: int, prefix_cache: bool) -> None:
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.sharing: list[Group] = []  # groups that hold a share, oldest first

    def try_admit(self, seq: Sequence, version: int, spare: int) -> bool:
        """Give `seq` the pages of its history and one more, if `spare` pages stay available after that.

        On success pages, `kv_len` (tokens whose KV is there already), keys and copy source are set.
        """
        tokens = seq.history()
        shared, keys, source = self._shareable(seq, tokens, version)
        start = len(tokens) - 1 if source is not None else len(shared) * self.page_size
        most = pages_for(seq.prompt_len + seq.max_tokens - 1, self.page_size)
        wanted = min(pages_for(len(tokens), self.page_size) + 1, most) - len(shared)
        held = [*shared, source] if source is not None else shared
        for page in held:
            self.pool.retain(page)
        if self.pool.available < wanted + spare:
            for page in held:
                self.pool.release(page)
            return False
        own = [page for page in (self.pool.allocate() for _ in range(wanted)) if page is not None]
        assert len(own) == wanted, "availability was checked"
        seq.add_pages([*shared, *own], self.page_size)
        seq.prefill_tokens = tokens
        seq.copy_source = source
        seq.keys = keys
        seq.kv_len = seq.kv_uniform = start
        seq.kv_version = version
        return True

    def _shareable(
        self, seq: Sequence, tokens: np.ndarray, version: int
    ) -> tuple[list[int], PrefixKeys | None, int | None]:
        """Pages that `seq` can share, their keys, and the page to copy when a group's prompt is shared."""
        share = seq.group.share
        full = (len(tokens) - 1) // self.page_size  # the page of the last token is never shared: it is written again
        if share is not None and share.version == version and not seq.tokens:
            return share.pages[:full], share.keys.fork(full) if share.keys else None, share.pages[full]
        if not self.prefix_cache:
            return [], None, None
        keys, pages = PrefixKeys(version, self.page_size), []
        for index in range(full):
            key = keys.next_key(tokens[index * self.page_size : (index + 1) * self.page_size])
            page = self.pool.find(key)
            if page is None:
                break
            pages.append(page)
            keys.append(key)
        return pages, keys, None

    def try_grow(self, seq: Sequence) -> bool:
        """One page more for `seq`, if there is one."""
        page = self.pool.allocate()
        if page is None:
            return False
        seq.add_pages([page], self.page_size)
        return True

    def drop_copy_source(self, seq: Sequence) -> None:
        """The copy is enqueued (or not needed any more): later writes to the source come after it."""
        if seq.copy_source is not None:
            self.pool.release(seq.copy_source)
            seq.copy_source = None

    def release(self, seq: Sequence) -> None:
        """Take all pages back."""
        self.drop_copy_source(seq)
        for page in seq.pages:
            self.pool.release(page)
        seq.pages = []
        seq.kv_capacity = seq.kv_len = seq.kv_uniform = 0
        seq.prefill_tokens = seq.keys = None

    def remember(self, seq: Sequence, known: int, version: int) -> None:
        """Make the full pages among the first `known` tokens findable, as far as their KV is all of `version`."""
        if seq.keys is None or seq.kv_version != version:
            return
        for index in range(len(seq.keys), min(known, seq.kv_uniform) // self.page_size):
            start = index * self.page_size
            key = seq.keys.next_key(seq.tokens_between(start, start + self.page_size))
            seq.keys.append(key)
            self.pool.remember(key, seq.pages[index])

    # --- group shares ---

    def open_share(self, seq: Sequence, version: int) -> bool:
        """Hold the prompt pages of a prefilled leader for its group; False if its KV is not all of `version`."""
        if seq.kv_version != version or seq.kv_uniform < seq.prompt_len:
            return False
        pages = seq.pages[: pages_for(seq.prompt_len, self.page_size)]
        for page in pages:
            self.pool.retain(page)
        seq.group.share = PromptShare(pages, version, seq.keys)
        self.sharing.append(seq.group)
        return True

    def close_share(self, group: Group) -> None:
        """Let go of a group's prompt pages."""
        if group.share is not None:
            for page in group.share.pages:
                self.pool.release(page)
            group.share = None
            self.sharing.remove(group)

    def weights_changed(self) -> None:
        """Nothing that is cached or held for sharing is of the new version."""
        for group in list(self.sharing):
            self.close_share(group)
        self.pool.forget_all()
