"""The control messages about trainers' process groups: `join`, `gather` and `leave`.

They come before the `begin` of an update by the transport `torch_group`, which does the work. Gathered tensors are
checked against the model's parameters after they were received, so that a wrong update leaves the group in step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.weights.parameter_map import ParameterMap
from rollout.weights.received_update import Reply
from trainer_bridge.transports.base import TransportReceiver
from trainer_bridge.transports.torch_group.broadcast_transport import TorchGroupReceiver
from trainer_bridge.transports.torch_group.group_member import Meeting
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected, error_reply
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES, Manifest, TensorEntry, pack

_MAX_PART = 1 << 20
_MAX_PACKED = 1 << 62
_LISTED = 4  # names in a reply


class TrainerGroups:
    """Answers the messages. Belongs to the receiver's thread. Its methods raise `RolloutError` or reply once."""

    def __init__(
        self,
        parameters: ParameterMap,
        receivers: Mapping[str, TransportReceiver],
        say_unused: Callable[[Sequence[str]], None],
    ) -> None:
        self._parameters = parameters
        self._receivers = receivers
        self._say_unused = say_unused
        self._unanswered: dict[int, Reply] = {}
        self._count = 0

    def join(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Meet a trainer's group; answered once all members are there."""
        receiver = self._receiver()
        meeting = Meeting.read(header["group"], header["meeting"], receiver.device.type == "cuda")
        answer = self._later(reply)
        try:
            receiver.join(meeting, lambda error: answer({"op": "ok"} if error is None else error_reply(error)))
        except RolloutError as error:
            answer(error_reply(error))

    def gather(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Receive a part of an update; answered once it has come and fits the model."""
        receiver, group = self._receiver(), header["group"]
        answer = self._later(reply)
        try:
            part, packed_bytes = header["part"], header["packed_bytes"]
            if type(part) is not int or not 0 <= part < _MAX_PART:
                raise BadRequest(f"part must be a number from 0 to {_MAX_PART - 1}", field="part")
            if packed_bytes is not None and (type(packed_bytes) is not int or not 0 < packed_bytes <= _MAX_PACKED):
                raise BadRequest("packed_bytes must be a number of bytes, or null", field="packed_bytes")
            tensors = self._tensors(header["tensors"], receiver.gathered if part else [])
            receiver.gather(str(group), part, tensors, packed_bytes, lambda error: answer(self._outcome(error)))
        except RolloutError as error:
            receiver.leave(str(group))  # the part may still be broadcast: the next one would be out of step
            receiver.discard()
            answer(error_reply(error))

    def leave(self, header: Mapping[str, Any], reply: Reply) -> None:
        reply({"op": "ok", "left": self._receiver().leave(str(header["group"]))})

    def close(self, error: RolloutError) -> None:
        """Answer all unanswered messages."""
        while self._unanswered:
            self._unanswered.popitem()[1](error_reply(error))

    def _later(self, reply: Reply) -> Reply:
        """A function that answers once, unless `close` has answered."""
        self._count += 1
        number = self._count
        self._unanswered[number] = reply

        def answer(message: dict[str, Any]) -> None:
            if self._unanswered.pop(number, None) is not None:
                reply(message)

        return answer

    def _receiver(self) -> TorchGroupReceiver:
        receiver = self._receivers.get("torch_group")
        if not isinstance(receiver, TorchGroupReceiver):
            raise BadRequest(
                "this worker joins no process groups: it uses CURVE and their connections have no keys", field="action"
            )
        return receiver

    def _tensors(self, rows: Any, before: list[TensorEntry]) -> list[TensorEntry]:
        """The tensors of a part: sound in themselves, and small enough to be gathered. Raises `WeightsRejected`."""
        if type(rows) is not list or not rows or len(rows) > 2 * len(self._parameters.views) + 64:
            raise WeightsRejected("tensors must be a list of [name, dtype, shape], of this model", field="tensors")
        if not all(type(row) is list and len(row) == 3 and type(row[2]) is list for row in rows):
            raise WeightsRejected("each tensor must be [name, dtype, shape]", field="tensors")
        tensors = list(_manifest(rows).tensors)
        if sum(entry.nbytes for entry in (*before, *tensors)) > self._parameters.max_update_bytes:
            raise WeightsRejected("these are more bytes than the model's parameters have", field="tensors")
        return tensors

    def _outcome(self, error: RolloutError | None) -> dict[str, Any]:
        if error is not None:
            return error_reply(error)
        receiver = self._receiver()
        try:
            gathered = self._gathered(receiver.gathered)
        except RolloutError as refusal:
            receiver.discard()
            return error_reply(refusal)
        used = self._parameters.uses(gathered)
        if not used:  # they may come before an update, or after the part that made one whole
            receiver.discard()
            self._say_unused([entry.name for entry in gathered.tensors])
        lacks = self._parameters.lacks(gathered)
        return {
            "op": "ok",
            "gathered": len(gathered.tensors) if used else 0,
            "missing": lacks.missing,
            "left_out": lacks.left_out[:_LISTED],
        }

    def _gathered(self, tensors: list[TensorEntry]) -> Manifest:
        """All parts so far. Raises `WeightsRejected` for tensors that the model has not, or that came before."""
        once = {entry.name: entry for entry in tensors}
        manifest = _manifest([[entry.name, entry.dtype, entry.shape] for entry in once.values()])
        self._parameters.check_tensors(manifest)
        if len(once) < len(tensors):
            names = [entry.name for entry in tensors]
            again = next(name for index, name in enumerate(names) if name in names[:index])
            lacked = ", ".join(self._parameters.lacks(manifest).missing) or "nothing"
            raise WeightsRejected(f"{again} came again before the update was in use; the update lacked {lacked}")
        return manifest


def _manifest(rows: list[Any]) -> Manifest:
    return pack(0, rows, MAX_BUCKET_BYTES)
