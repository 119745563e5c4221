"""Weight updates that a trainer broadcasts in a process group of its own: the gateway tells the workers about them.

    trainer            gateway                             every worker, all at once
    init        -->    join                           -->  meets the trainer: rank_offset + its index
    update      -->    gather  part 0, 1, ...         -->  receives what the trainer broadcasts now
    (finish)    -->    begin and commit               -->  swaps the gathered tensors in, between two steps

Dialects without a `finish` (SGLang, AReaL) finish with the part that makes the update whole. An update may lack some
tensors, such as correction biases and draft models. During a pause it waits for them until generation continues.
Requests go on meanwhile.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollout.extras import install
from rollout_gateway.http.http_errors import HttpError, bad_request
from rollout_gateway.orders.worker_orders import WorkerOrders
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.wire.errors import RolloutError

#: Tensors of an update: name, dtype, shape.
TensorRows = list[list[Any]]

_LISTED = 4  # names in one message
_NOT_KEPT = "came over a process group, and is not kept"


class ProcessGroupUpdates:
    """Updates by the transport `torch_group`; one at a time. Every method raises `HttpError` and `RolloutError`.

    `update_s`: seconds that a worker may take for one message.
    """

    def __init__(self, pool: AsyncRolloutClient, orders: WorkerOrders, update_s: float) -> None:
        self._pool = pool
        self._update_s = update_s
        self._orders = orders
        self._one_at_a_time = asyncio.Lock()
        self._rows: TensorRows = []  # the tensors of the update that is being gathered
        self._parts = 0
        self._missing: list[str] = []  # some of the tensors that the update lacks and needs
        self._left_out: list[str] = []  # some of the tensors that the update lacks and does not need
        self._waiting: tuple[Any] | None = None  # the version of a whole update that waits for `_left_out`
        self._update = 0  # counts updates; join and leave begin one while a part is received

    async def join(self, group: str, meeting: dict[str, Any], rank_offset: int, world_size: int) -> None:
        """Let all workers meet a trainer's group; returns when they have. Drops an unfinished update."""
        await self.finish_waiting()
        endpoints = self._pool.endpoints
        if rank_offset < 1:
            raise bad_request(f"rank_offset is {rank_offset}: use 1 or more, as rank 0 is the trainer", "rank_offset")
        if rank_offset + len(endpoints) > world_size:
            raise bad_request(
                f"ranks {rank_offset} to {rank_offset + len(endpoints) - 1} of this gateway's {len(endpoints)} workers "
                f"do not fit into a group of {world_size}",
                "world_size",
            )
        self._start()
        meetings = [{**meeting, "rank": rank_offset + index, "size": world_size} for index in range(len(endpoints))]
        await self._ask([{"action": "join", "group": group, "meeting": each} for each in meetings])

    async def leave(self, group: str) -> bool:
        """Let all workers leave a group; false if none was in it. Drops an unfinished update."""
        await self.finish_waiting()
        self._start()
        replies = await self._ask([{"action": "leave", "group": group}] * len(self._pool.endpoints))
        return any(reply["left"] for reply in replies)

    async def start(self) -> None:
        """Begin a new update; an unfinished one is dropped."""
        async with self._one_at_a_time:
            self._start()

    async def gather(self, group: str, rows: TensorRows, packed_bytes: int | None) -> list[str]:
        """Have all workers receive a part from the trainer. Returns some tensors that the update still lacks.

        Parts that hold nothing that workers use, such as layers for multi-token prediction, begin no update.
        """
        if self._waiting is not None and {row[0] for row in self._rows} & {row[0] for row in rows}:
            await self.finish_waiting()  # these belong to the next one
        async with self._one_at_a_time:
            update = self._update
            part = {"action": "gather", "group": group, "part": self._parts, "tensors": rows}
            try:
                replies = await self._ask([{**part, "packed_bytes": packed_bytes}] * len(self._pool.endpoints))
            except BaseException:  # the workers may expect another part, so start over, also if the gateway ends
                self._start()
                raise
            if update != self._update:
                raise HttpError(409, "the update was dropped: a group was joined or left meanwhile; send it again")
            if not replies[0]["gathered"]:
                self._start()
                return list(replies[0]["missing"])
            self._parts += 1
            self._rows = self._rows + rows
            self._missing, self._left_out = list(replies[0]["missing"]), list(replies[0]["left_out"])
            return self._missing

    async def wait_for_more(self, version: Any) -> list[str]:
        """Some of the tensors for which the whole update waits, to be `version`; empty if it is to be finished now."""
        if self._left_out and await self._orders.is_paused():
            self._waiting = (version,)
            return self._left_out
        return []

    async def finish_waiting(self) -> None:
        """Finish an update that waits for tensors that it may lack."""
        if self._waiting is not None:
            await self.finish(*self._waiting)

    @property
    def begun(self) -> bool:
        """Whether an update is being gathered."""
        return self._parts > 0

    async def finish(self, version: Any) -> int:
        """Put the gathered update in use as `version` or the next version; returns its version."""
        async with self._one_at_a_time:
            if not self._parts:
                raise HttpError(409, "there is no update to finish; send its tensors first")
            self.check_whole()
            rows = self._rows
            self._start()
            return await self._orders.publish_as(version, partial(self._publish, rows), why_not_kept=_NOT_KEPT)

    def check_whole(self) -> None:
        """Raise `HttpError` if an update was begun and lacks tensors."""
        if self._parts and self._missing:
            raise HttpError(
                409, f"the update is incomplete and not in use: it lacks {', '.join(self._missing[:_LISTED])}"
            )

    def _start(self) -> None:
        self._rows, self._parts, self._missing = [], 0, []
        self._left_out, self._waiting = [], None
        self._update += 1

    async def _publish(self, rows: TensorRows, version: int, endpoints: Sequence[str]) -> None:
        try:
            from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES, pack
        except ModuleNotFoundError as error:
            raise HttpError(501, f"updates need {error.name}: {install('http', 'publish')}") from error
        manifest = pack(version, [tuple(row) for row in rows], MAX_BUCKET_BYTES).to_wire()
        begin = {"action": "begin", "version": version, "manifest": manifest, "transport": "torch_group", "options": {}}
        replies = await self._replies([begin] * len(endpoints), endpoints)
        begun = {
            each: reply["token"]
            for each, reply in zip(endpoints, replies, strict=True)
            if not isinstance(reply, RolloutError)
        }
        for reply in replies:
            if isinstance(reply, RolloutError):  # a worker that is gone drops the update, too
                await self._replies([{"action": "abort", "token": token} for token in begun.values()], [*begun])
                raise reply
        await self._ask([{"action": "commit", "token": token, "options": {}} for token in begun.values()], endpoints)

    async def _ask(
        self, messages: Sequence[dict[str, Any]], endpoints: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The replies of all workers, or of some, to a message each. Raises the first error, once all have answered."""
        replies = []
        for reply in await self._replies(messages, self._pool.endpoints if endpoints is None else endpoints):
            if isinstance(reply, RolloutError):
                raise reply
            replies.append(reply)
        return replies

    async def _replies(
        self, messages: Sequence[dict[str, Any]], endpoints: Sequence[str]
    ) -> list[dict[str, Any] | RolloutError]:
        return await asyncio.gather(*map(self._one, endpoints, messages))

    async def _one(self, endpoint: str, message: dict[str, Any]) -> dict[str, Any] | RolloutError:
        try:
            return (await self._pool.control("weights", endpoint=endpoint, timeout_s=self._update_s, **message))[0]
        except RolloutError as error:
            return error
