"""The lengths at which known prefixes end within a page: half-full last pages of turns, and states on the host.

A full page is found by the key of its content. To find a half-full one, a lookup has to know how many tokens to hash.
"""

from collections import OrderedDict


class PrefixEnds:
    """Numbers of tokens after full pages, for at most `most` digests of full pages; the least recently used are lost.

    What ended there may be gone: the caller looks for it by its key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: OrderedDict[bytes, set[int]] = OrderedDict()

    def note(self, digest: bytes, after: int) -> None:
        """Note that a known prefix ends this many tokens after the full pages with this digest."""
        self._after.setdefault(digest, set()).add(after)
        self._after.move_to_end(digest)
        if len(self._after) > self._most:
            self._after.popitem(last=False)

    def after(self, digest: bytes) -> list[int]:
        """Numbers of tokens after these full pages, largest first."""
        if digest not in self._after:
            return []
        self._after.move_to_end(digest)
        return sorted(self._after[digest], reverse=True)

    def clear(self) -> None:
        self._after.clear()
