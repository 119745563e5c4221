"""The tokens of a completion that a budget of thoughts has forced."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout.constraints.thoughts import Thoughts, forced_places


class ForcedTokens:
    """Forced positions. `known`: those in `continue_from`; `thoughts`: the place after it, None without a budget."""

    def __init__(self, known: Iterable[int] = (), thoughts: Thoughts | None = None) -> None:
        self._places = list(known)
        self._thoughts = thoughts

    def extend(self, token_ids: np.ndarray) -> None:
        """Add the next tokens of the completion, int32."""
        if self._thoughts is not None:
            self._places += forced_places(self._thoughts, token_ids.tolist())

    def fields(self, start: int) -> dict[str, list[int]]:
        """The reply field of the tokens from `start` on; empty if no token was forced."""
        return forced_field(self._places, start)


def forced_field(places: Iterable[int], start: int) -> dict[str, list[int]]:
    """The reply field of the positions from `start` on, if there are any."""
    found = [place for place in places if place >= start]
    return {"forced": found} if found else {}
