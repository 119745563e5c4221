"""The transport `torch_group`: a trainer that speaks HTTP broadcasts its tensors in a process group of its own.

    trainer                      gateway                            worker: receiver thread      member's thread
    init group over HTTP    -->  join   group, meeting         -->  join                    -->  meets the others
    update over HTTP        -->  gather group, part, tensors   -->  gather                  -->  receives them
      broadcasts            =====================================================================^
      (several times, if the update comes in parts)
    after the last part     -->  begin  manifest of all parts  -->  begin, advance: gathered tensors into the staging
                                 commit                        -->  finish

`meeting` has `kind` (`torch`: torch.distributed's group of that name; `vllm`: NCCL's id at `broadcast_from/0/0`),
`rank`, `size`, `backend` (`gloo`, `nccl`), and `host` and `port` of a TCPStore or, for `vllm`, `nccl_id` (128 bytes in
hexadecimal). With `packed_bytes` None each tensor is one broadcast. The manifest of `begin` has the tensors of all
parts, in their order; `begin.options` and `commit.options` are empty.

Only the receiving side is here: the sender is the trainer's own code. A trainer does not say beforehand which tensors
the whole update has, so they are gathered in host memory until the gateway can begin the update.

Invariants:

- A group is dropped when a broadcast may not have been received: later broadcasts would be out of step.
- The gathered tensors are one update's, in the order of its parts. Part 0, a join, an error or the update's end drop
  them.
- The receiver's thread never waits for a group.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainer_bridge.transports.base import IncomingUpdate, TransportReceiver, check_options
from trainer_bridge.transports.nccl.nccl_group import END_S
from trainer_bridge.transports.torch_group.group_member import GroupMember, Meeting, Task
from trainer_bridge.wire.errors import BadRequest, NotFound, RolloutError, Unavailable, WeightsRejected
from trainer_bridge.wire.manifest import TensorEntry

#: Takes the outcome of an order, in the receiver's thread: None, or the error.
Then = Callable[[RolloutError | None], None]

_MOST_GROUPS = 64
_PIECE_BYTES = 64 << 20  # copied in one call of `advance`


class TorchGroupReceiver(TransportReceiver):
    """Joins trainers' groups and gathers what they broadcast. `device` is where the model is."""

    name = "torch_group"

    def __init__(self, device: torch.device, timeout_s: float, wake: Callable[[], object]) -> None:
        self.device = device
        self._timeout_s, self._wake = timeout_s, wake
        self._members: dict[str, GroupMember] = {}  # key: name of the group
        self._leaving: list[GroupMember] = []
        self._tasks: list[Task] = []
        self._parts = 0  # number of parts gathered or under way
        self._gathering = False
        self._entries: list[TensorEntry] = []
        self._data: list[torch.Tensor | None] = []  # bytes of each tensor; None: copied on
        self._at = (0, 0)  # tensor and byte that `advance` copies next

    # --- orders ------------------------------------------------------------------------------------------------------

    @property
    def gathered(self) -> list[TensorEntry]:
        """The tensors that were gathered, in order; their offsets mean nothing."""
        return list(self._entries)

    def join(self, meeting: Meeting, then: Then) -> None:
        """Meet a trainer's group, in the place of one with the same name. Raises `BadRequest`."""
        if meeting.name not in self._members and len(self._members) >= _MOST_GROUPS:
            raise BadRequest(f"this worker is in {_MOST_GROUPS} groups; leave one of them", field="group")
        self.leave(meeting.name)
        self.discard()
        member = GroupMember(meeting, self.device, self._timeout_s, self._wake)
        self._members[meeting.name] = member

        def joined(_: Any, error: RolloutError | None) -> None:
            if error is not None:
                self._drop(member)
            then(error)

        self._tasks.append(member.join(joined))

    def gather(self, group: str, part: int, tensors: list[TensorEntry], packed_bytes: int | None, then: Then) -> None:
        """Receive one part of an update. Raises `RolloutError` if that cannot begin: then leave the group."""
        member = self._members.get(group)
        if member is None:
            raise NotFound(f"this worker is in no group {group!r}: it never joined, or the group broke", field="group")
        if self._gathering:
            raise Unavailable("another part is being gathered; send the parts of an update in turn")
        if part == 0:
            self.discard()
        if part != self._parts:
            self.discard()
            raise WeightsRejected(f"part {part} does not follow: the update was dropped; send it from its first part")
        self._parts += 1
        self._gathering = True

        def received(data: Any, error: RolloutError | None) -> None:
            self._gathering = False
            if error is None and self._parts != part + 1:
                error = WeightsRejected("the update was dropped while it was gathered")
            if error is not None:
                self._drop(member)
                self.discard()
            else:
                self._entries += tensors
                self._data += data
            then(error)

        self._tasks.append(member.receive(tensors, packed_bytes, received))

    def leave(self, group: str) -> bool:
        """Leave a group; false if this worker is not in it."""
        member = self._members.get(group)
        if member is not None:
            self._drop(member)
        return member is not None

    def discard(self) -> None:
        """Drop the gathered tensors."""
        self._parts = 0
        self._entries, self._data, self._at = [], [], (0, 0)

    # --- an update of the gathered tensors ---------------------------------------------------------------------------

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the update consists of the gathered tensors. Raises `BadRequest` and `WeightsRejected`."""
        check_options(self.name, options, {})
        wanted = [(entry.name, entry.dtype, entry.shape) for entry in incoming.manifest.tensors]
        if wanted != [(entry.name, entry.dtype, entry.shape) for entry in self._entries] or self._gathering:
            raise WeightsRejected("the manifest differs from the gathered tensors; gather them again")
        self._at = (0, 0)
        return {}

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        """Answer the orders that are over; copy a piece of a gathered tensor to the update's memory."""
        for task in [task for task in self._tasks if task.over.is_set()]:
            self._tasks.remove(task)
            task.then(task.result, task.error)
        if incoming is None or not incoming.may_land or self._at[0] == len(self._data):
            return False
        index, start = self._at
        entry, data = incoming.manifest.tensors[index], self._data[index]
        assert data is not None, "a gathered tensor is copied once"
        end = min(start + _PIECE_BYTES, entry.nbytes)
        np.copyto(incoming.destination.memory(entry.offset + start, entry.offset + end), data[start:end].numpy())
        incoming.arrived(entry.offset + start, entry.offset + end)
        if end == entry.nbytes:
            self._data[index] = None
            self._at = (index + 1, 0)
        else:
            self._at = (index, end)
        return self._at[0] < len(self._data)

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        """True when every gathered tensor is copied."""
        check_options(self.name, options, {})
        if len(self._data) != len(incoming.manifest.tensors):
            raise WeightsRejected("the gathered tensors were dropped")
        return self._at[0] == len(self._data)

    def drop(self, incoming: IncomingUpdate, error: RolloutError | None) -> None:
        """Free the gathered tensors."""
        self.discard()

    def close(self) -> None:
        """Leave all groups and wait at most 2 s for their threads."""
        for member in list(self._members.values()):
            self._drop(member)
        until_s = time.monotonic() + END_S
        for member in self._leaving:
            member.wait(max(0.0, until_s - time.monotonic()))

    def _drop(self, member: GroupMember) -> None:
        if self._members.get(member.meeting.name) is member:
            del self._members[member.meeting.name]
        member.leave()
        self._leaving = [*(other for other in self._leaving if other.alive), member]
