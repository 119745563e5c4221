"""Expert records in requests and replies (`return_routing`).

A forward consumes a token and draws the next one; no forward has consumed the newest token. So a completion of n tokens
has n - 1 entries; with `"all"` the prompt's entries come before:

    prompt           p0      p1  |  completion      t0      t1      t2
    "all"      entry  0       1                      2       3
    true       entry                                 0       1

A completion without a token (`max_tokens` 0) has the entries of the prompt except the last one, with `"all"`.
A chunk with tokens t..u-1 has the entries of the tokens before each of them, so chunks join without a gap.
"""

from typing import Any, Literal

import numpy as np

from rollout.engine.messages.requests import RoutingShape
from rollout.service.requests.continue_from import ContinueFrom
from rollout.service.requests.schema import GenerateMessage
from trainer_bridge.wire.errors import BadRequest

_FIRST_CAPACITY = 64


def check_wanted(message: GenerateMessage, shape: RoutingShape | None, sparse: bool) -> None:
    """Raise `RolloutError` if the worker records no experts, or if the given entries cannot be this model's.

    `shape`: shape of this worker's entries. `sparse`: the model is a mixture of experts.
    """
    prior = None if message.continue_from is None else message.continue_from.routing
    if shape is None:
        why = (
            "this worker records no experts: start it with --routing (engine.routing)"
            if sparse
            else "this model has no experts"
        )
        raise BadRequest(f"{why}; remove 'return_routing' (see 'capabilities' in the status)", field="return_routing")
    if prior is not None and (prior.dtype != shape.dtype or prior.shape[1:] != (shape.layers, shape.top_k)):
        raise BadRequest(
            f"the routing is {prior.dtype} with {list(prior.shape[1:])} for each token, this model's is {shape.dtype} "
            f"with {[shape.layers, shape.top_k]}; remove it",
            field="continue_from.routing",
        )


def first_position(wanted: Literal[True, "all"], prior: ContinueFrom | None, prompt_tokens: int) -> int:
    """The first position in prompt and completion for which the engine reports experts.

    Raises `RolloutError` if `continue_from` has the wrong number of entries.
    """
    first = 0 if wanted == "all" else prompt_tokens
    if prior is None or prior.routing is None:
        return first
    should = prompt_tokens + len(prior.token_ids) - 1 - first if len(prior.token_ids) else 0
    if len(prior.routing) != should:
        raise BadRequest(
            f"the routing has {len(prior.routing)} entries; with this 'return_routing' a completion of "
            f"{len(prior.token_ids)} tokens has {should}",
            field="continue_from.routing",
        )
    return first + should


class RoutingColumn:
    """The present entries of one completion; `prior`: the entries of `continue_from`."""

    def __init__(self, shape: RoutingShape, prior: np.ndarray | None = None) -> None:
        self._count = 0
        self._entries = np.empty((_FIRST_CAPACITY, shape.layers, shape.top_k), shape.dtype)
        self._known = False  # false while a continued completion without prior entries has no new token
        if prior is not None:
            self.extend(prior)

    def extend(self, entries: np.ndarray) -> None:
        end = self._count + len(entries)
        if end > len(self._entries):
            grown = np.empty((max(end, 2 * len(self._entries)), *self._entries.shape[1:]), self._entries.dtype)
            grown[: self._count] = self._entries[: self._count]
            self._entries = grown
        self._entries[self._count : end] = entries
        self._count, self._known = end, True

    def fields(self, start: int, end: int) -> dict[str, Any]:
        """The reply field of tokens start..end-1, the newest tokens; empty while there are no entries.

        The array is a view, valid until the next `extend`.
        """
        if not self._known or (end == 0 and not self._count):
            return {}
        return {"routing": last_entries(self._entries[: self._count], start, end)}


def last_entries(entries: np.ndarray, start: int, end: int) -> np.ndarray:
    """The entries of tokens `start` to `end`, the last ones of `entries`."""
    return entries[len(entries) - (end - start) :] if start else entries
