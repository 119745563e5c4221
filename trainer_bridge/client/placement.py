"""Chooses the worker of a fleet that gets a request. Plain data and decisions; `ClientCore` has the connections.

    a request with `endpoint=`    that worker
    a fork                        the worker that has the tokens which it continues
    a turn of a session           the worker that has its KV
    a prompt that was sent before the least loaded of the workers that hold the longest part of it,
                                  unless it has far more to do than the least loaded worker
    any other                     the least loaded worker

Load is counted in completions of this client in flight. A worker that was lost or added is a newcomer: it may hold old
weights. It is used once its weights are as new as the other workers', or if there is no other worker. A worker that is
leaving gets no new requests.

A worker holds a prompt once a request with it was sent there. New weights drop prefix caches; the next request
with the prompt then fills the cache again, at the same worker.
"""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from trainer_bridge.client.generate_request import RequestPlan

#: A prompt is known by its blocks of this size: 64 token ids. A shorter prompt is not worth a detour.
_BLOCK_BYTES = 256
_DIGEST_BYTES = 16
_MOST_BLOCKS = 1 << 16  # remembered for a worker
_MOST_REQUESTS = 1 << 14  # requests with a remembered worker, for requests that continue them
#: A worker has far more to do than another with more than this many completions, and this many times as many.
_FAR_MORE, _FAR_TIMES = 16, 1.5


@dataclass(slots=True, eq=False)
class FleetMember:
    """One worker of the fleet. `blocks` are the prompt blocks that were sent to it, the oldest first."""

    endpoint: str
    load: int = 0
    last_chosen: int = 0  # number of its last choice; breaks ties
    newcomer: bool = False
    draining: bool = False
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def note_blocks(self, blocks: Iterable[bytes]) -> None:
        """Note that these blocks were sent to the worker."""
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > _MOST_BLOCKS:
            self.blocks.popitem(last=False)


@dataclass(frozen=True, slots=True)
class CompletionAddress:
    """The request that has a completion at its worker, and the completion's index in it."""

    endpoint: str
    request_id: str
    index: int


@dataclass(slots=True, eq=False)
class SentRequest:
    """The place of a request, and the places of completions that are elsewhere."""

    endpoint: str
    moved: dict[int, CompletionAddress] = field(default_factory=dict)


class Fleet:
    """The workers of one client, and where its sessions and requests are."""

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._members = {endpoint: FleetMember(endpoint) for endpoint in endpoints}
        self._sessions: dict[str, str] = {}  # endpoints by session
        self._sent: OrderedDict[str, SentRequest] = OrderedDict()  # key: request id; oldest first
        self._counter = itertools.count(1)

    def __getitem__(self, endpoint: str) -> FleetMember:
        return self._members[endpoint]

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    @property
    def endpoints(self) -> list[str]:
        """The endpoints that are not leaving."""
        return [member.endpoint for member in self if not member.draining]

    @property
    def newcomers(self) -> list[str]:
        """The endpoints whose weights must be checked before use; empty if there is only one endpoint."""
        staying = [member for member in self if not member.draining]
        return [member.endpoint for member in staying if member.newcomer] if len(staying) > 1 else []

    # --- who belongs to it --------------------------------------------------------------------------------------------

    def add(self, endpoint: str) -> bool:
        """Add a worker as a newcomer, or keep one that was leaving. False if it was kept. Raises ValueError."""
        known = self._members.get(endpoint)
        if known is None:
            self._members[endpoint] = FleetMember(endpoint, newcomer=True)
        elif known.draining:
            known.draining = False
        else:
            raise ValueError(f"{endpoint!r} is an endpoint of this client already")
        return known is None

    def drain(self, endpoint: str) -> None:
        """Give a worker no new requests; its sessions go on elsewhere. Raises ValueError for the last one."""
        if self.endpoints == [endpoint]:
            raise ValueError(f"{endpoint!r} is the last endpoint of this client; add another one first, or close it")
        self._members[endpoint].draining = True
        self._sessions = {name: home for name, home in self._sessions.items() if home != endpoint}

    def drop(self, endpoint: str) -> None:
        """Forget a worker that has left."""
        del self._members[endpoint]

    def mark_lost(self, endpoint: str) -> None:
        """Forget the contents of a lost worker. A worker that returns at its endpoint is a newcomer."""
        member = self._members[endpoint]
        member.newcomer = True
        member.blocks.clear()

    def admit_newcomers(self, versions: Mapping[str, int]) -> None:
        """Use the newcomers whose weights are current. `versions` are the weights versions of workers that serve."""
        in_use = {member.endpoint for member in self if not member.newcomer}
        settled = [version for endpoint, version in versions.items() if endpoint in in_use]
        current = max(settled or versions.values(), default=0)
        for endpoint, version in versions.items():
            if version >= current and endpoint in self._members:
                self._members[endpoint].newcomer = False

    # --- where to go --------------------------------------------------------------------------------------------------

    def session_home(self, session: str) -> str | None:
        """The endpoint that has a session's KV, if it is known."""
        return self._sessions.get(session)

    def holder(self, fields: Mapping[str, Any]) -> str | None:
        """The endpoint that has a session's KV, or the longest part of a prompt, if it is known."""
        if "session" in fields:
            return self.session_home(fields["session"])
        holders = _holders(list(self), prompt_blocks(fields)) if len(self._members) > 1 else []
        return _least_loaded(holders).endpoint if holders else None

    def end_session(self, session: str) -> None:
        """Forget the place of a session."""
        self._sessions.pop(session, None)

    def note_sent(self, request_id: str, endpoint: str) -> SentRequest | None:
        """Note the place of a request; returns the place of an earlier request with its id."""
        earlier = self._sent.get(request_id)
        self._sent[request_id] = SentRequest(endpoint)
        self._sent.move_to_end(request_id)
        while len(self._sent) > _MOST_REQUESTS:
            self._sent.popitem(last=False)
        return earlier

    def note_refused(self, request_id: str, earlier: SentRequest) -> None:
        """Note that a request was refused: its id names the earlier request again."""
        if request_id in self._sent:
            self._sent[request_id] = earlier

    def note_moved(self, request_id: str, index: int, place: CompletionAddress) -> None:
        """Note the present place of a completion."""
        if request_id not in self._sent:
            self.note_sent(request_id, place.endpoint)
        if (place.request_id, place.index) != (request_id, index):
            self._sent[request_id].moved[index] = place

    def locate_fork(self, fork: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
        """The endpoint that has the source of a request, if it is known, and the `fork` in that worker's terms."""
        known = self._sent.get(str(fork.get("request")))
        if known is None:
            session = fork.get("session")
            return None if session is None else self.session_home(str(session)), fork
        place = known.moved.get(fork.get("index", 0))
        if place is None:
            return known.endpoint, fork
        return place.endpoint, {**fork, "request": place.request_id, "index": place.index}

    def choose(
        self, plan: RequestPlan, gone: Collection[str], avoid: Collection[str] = (), home: str | None = None
    ) -> str:
        """The endpoint for a request: none that is `gone` or to `avoid`, unless there is no other.

        `home` has the tokens that it continues.
        """
        blocks = prompt_blocks(plan.fields) if len(self._members) > 1 else []
        member = (
            self._members[plan.endpoint] if plan.endpoint is not None else self._choose(plan, blocks, gone, avoid, home)
        )
        member.last_chosen = next(self._counter)
        member.note_blocks(blocks)
        if plan.session is not None:
            self._sessions[plan.session] = member.endpoint
        return member.endpoint

    def _choose(
        self, plan: RequestPlan, blocks: list[bytes], gone: Collection[str], avoid: Collection[str], home: str | None
    ) -> FleetMember:
        staying = [member for member in self if not member.draining]
        # A worker that is gone has no load, and would otherwise attract everything.
        there = [member for member in staying if member.endpoint not in gone]
        welcome = [member for member in there if member.endpoint not in avoid]
        settled = [member for member in welcome if not member.newcomer]
        candidates = settled or welcome or there or staying
        if home is None and plan.session is not None:
            home = self._sessions.get(plan.session)
        for member in candidates:
            if member.endpoint == home:
                return member
        least = _least_loaded(candidates)
        holders = _holders(candidates, blocks)
        if holders and not _far_more(holder := _least_loaded(holders), least):
            return holder
        return least


def _least_loaded(members: list[FleetMember]) -> FleetMember:
    return min(members, key=lambda member: (member.load, member.last_chosen))


def _far_more(member: FleetMember, least: FleetMember) -> bool:
    return member.load > max(least.load + _FAR_MORE, least.load * _FAR_TIMES)


def _holders(members: list[FleetMember], blocks: list[bytes]) -> list[FleetMember]:
    """The members that hold the longest part of a prompt, if that is half of it or more."""
    for block in reversed(blocks[(len(blocks) - 1) // 2 :]):
        if holders := [member for member in members if block in member.blocks]:
            return holders
    return []


def prompt_blocks(fields: Mapping[str, Any]) -> list[bytes]:
    """A key for each full block of a request's prompt. It depends on the adapter and on all earlier blocks.

    `fields` belong to a `generate` message. Prompts that begin with the same n blocks have the same first n keys.
    """
    content = memoryview(_prompt_bytes(fields))
    adapter = fields.get("adapter") or ""
    state = blake2b(adapter.encode(), digest_size=_DIGEST_BYTES)
    keys = []
    for end in range(_BLOCK_BYTES, len(content) + 1, _BLOCK_BYTES):
        state.update(content[end - _BLOCK_BYTES : end])
        keys.append(state.digest())
    return keys


def _prompt_bytes(fields: Mapping[str, Any]) -> bytes:
    prompt = fields.get("prompt")
    if isinstance(prompt, np.ndarray):
        return prompt.tobytes()
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return b"".join(msgpack.packb(part, default=repr) for part in (fields.get("tools"), *fields.get("messages", ())))
