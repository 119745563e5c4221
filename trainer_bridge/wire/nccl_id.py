"""Reading the id of an NCCL communicator that vLLM's trainer side puts into its store, without unpickling it.

The value is a pickle of a ctypes structure with 128 bytes (`ncclUniqueId`). Unpickling runs whatever a pickle names, so
the opcodes are only listed (`pickletools.genops`, which executes nothing) and must be exactly as for such a structure:

    _ctypes._unpickle ( ncclUniqueId of vLLM, ( {}, 128 bytes ) )
"""

import pickletools
from typing import Any

from trainer_bridge.wire.errors import WeightsRejected

ID_BYTES = 128
_MAX_BYTES = 1024
_PROTOCOLS = [("PROTO", 4), ("PROTO", 5)]
_NOTES = {"PROTO", "FRAME", "MEMOIZE"}  # opcodes that add nothing to the value
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
#: The opcodes of the structure; SHORT_BINBYTES has the id as its argument.
_SHAPE: list[tuple[str, Any]] = [
    *(("SHORT_BINUNICODE", "_ctypes"), ("SHORT_BINUNICODE", "_unpickle"), ("STACK_GLOBAL", None)),
    *(("SHORT_BINUNICODE", _MODULE), ("SHORT_BINUNICODE", "ncclUniqueId"), ("STACK_GLOBAL", None)),
    *(("EMPTY_DICT", None), ("SHORT_BINBYTES", None), ("TUPLE2", None), ("TUPLE2", None), ("REDUCE", None)),
    ("STOP", None),
]
_ID = next(index for index, (name, _) in enumerate(_SHAPE) if name == "SHORT_BINBYTES")


def read_nccl_id(data: bytes) -> bytes:
    """The 128 bytes of the id. Raises `WeightsRejected` for anything but the pickle that vLLM writes."""
    if len(data) > _MAX_BYTES:
        raise _rejected()
    try:
        found = [(opcode.name, argument, index) for opcode, argument, index in pickletools.genops(data)]
    except ValueError as error:
        raise _rejected() from error
    first, end = found[0][:2], found[-1][2]
    shape = [(name, argument) for name, argument, _ in found if name not in _NOTES]
    if first not in _PROTOCOLS or end != len(data) - 1 or len(shape) != len(_SHAPE):
        raise _rejected()
    name, nccl_id = shape[_ID]
    shape[_ID] = (name, None)
    if shape != _SHAPE or type(nccl_id) is not bytes or len(nccl_id) != ID_BYTES:
        raise _rejected()
    return nccl_id


def _rejected() -> WeightsRejected:
    return WeightsRejected(
        "join: the trainer's store does not hold the id of an NCCL communicator, as vLLM writes it; its other contents "
        "are not read",
        field="meeting",
    )
