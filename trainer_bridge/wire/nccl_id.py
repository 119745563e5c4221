"""Reading the id of an NCCL communicator that vLLM's trainer side puts into its store, without unpickling it.

The value is a pickle of a ctypes structure with 128 bytes (`ncclUniqueId`). Unpickling runs whatever a pickle names, so
the opcodes are only listed (`pickletools.genops`, which executes nothing) and must be exactly those of such a
structure:

    _ctypes._unpickle ( ncclUniqueId of vLLM, ( {}, 128 bytes ) )
"""

from __future__ import annotations

import pickletools
from typing import Any

from trainer_bridge.wire.errors import WeightsRejected

ID_BYTES = 128
_MAX_BYTES = 1024
_MIN_PROTOCOL = 4
_NOTES = {"PROTO", "FRAME", "MEMOIZE"}  # opcodes that add nothing to the value
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
#: The opcodes of the structure; the argument of the one with None is the id.
_SHAPE: list[tuple[str, Any]] = [
    *(("SHORT_BINUNICODE", "_ctypes"), ("SHORT_BINUNICODE", "_unpickle"), ("STACK_GLOBAL", None)),
    *(("SHORT_BINUNICODE", _MODULE), ("SHORT_BINUNICODE", "ncclUniqueId"), ("STACK_GLOBAL", None)),
    *(("EMPTY_DICT", None), ("SHORT_BINBYTES", None), ("TUPLE2", None), ("TUPLE2", None), ("REDUCE", None)),
    ("STOP", None),
]
_ID = next(place for place, (name, _) in enumerate(_SHAPE) if name == "SHORT_BINBYTES")


def read_nccl_id(data: bytes) -> bytes:
    """The 128 bytes of the id. Raises `WeightsRejected` for anything but the pickle that vLLM writes."""
    if len(data) > _MAX_BYTES:
        raise _rejected()
    try:
        found = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
    except (ValueError, UnicodeDecodeError) as error:
        raise _rejected() from error
    if found[:1] != [("PROTO", found[0][1])] or not _MIN_PROTOCOL <= found[0][1] <= 5:
        raise _rejected()
    found = [each for each in found if each[0] not in _NOTES]
    if len(found) != len(_SHAPE):
        raise _rejected()
    nccl_id = found[_ID][1]
    if type(nccl_id) is not bytes or len(nccl_id) != ID_BYTES:
        raise _rejected()
    if [each for place, each in enumerate(found) if place != _ID] != _SHAPE[:_ID] + _SHAPE[_ID + 1 :]:
        raise _rejected()
    if found[_ID][0] != "SHORT_BINBYTES" or not data.endswith(b"."):
        raise _rejected()  # bytes after the end
    return nccl_id


def _rejected() -> WeightsRejected:
    return WeightsRejected(
        "join: the trainer's store does not hold the id of an NCCL communicator, as vLLM writes it; its other contents "
        "are not read",
        field="meeting",
    )
