"""The id of an NCCL communicator is read out of a pickle that is never unpickled."""

import builtins
import ctypes
import os
import pickle
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.nccl_id import read_nccl_id

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
ID = bytes(range(128))


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class that vLLM pickles: a ctypes structure with 128 bytes, under its module and name."""
    made = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": MODULE}
    kind = type("ncclUniqueId", (ctypes.Structure,), made)
    parts = MODULE.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(parts[count - 1]))
    sys.modules[MODULE].ncclUniqueId = kind  # type: ignore[attr-defined]  # in a module that is made for this test
    yield kind


@pytest.mark.parametrize("protocol", [4, 5])
def test_the_id_is_read_as_vllm_writes_it(structure: Any, protocol: int) -> None:
    written = pickle.dumps(structure.from_buffer_copy(ID), protocol)
    assert bytes(pickle.loads(written)) == ID  # noqa: S301 -- this is what vLLM's own workers do
    assert read_nccl_id(written) == ID


class Hostile:
    """A pickle of this calls `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_other_pickles_are_refused_and_call_nothing(protocol: int, structure: Any, tmp_path: Any) -> None:
    proof = tmp_path / "proof"
    whole = structure.from_buffer_copy(ID)
    inside = Hostile(os.system, f"touch {proof}")
    hostile = [
        inside,
        Hostile(builtins.exec, f"open({str(proof)!r}, 'w')"),
        [whole],
        (whole, inside),
        Hostile(structure.from_buffer_copy, ID),
        ID,
        {"internal": ID},
        None,
        [[] for _ in range(100)],
    ]
    for value in hostile:
        with pytest.raises(WeightsRejected):
            read_nccl_id(pickle.dumps(value, protocol))
    if protocol < 4:
        with pytest.raises(WeightsRejected):
            read_nccl_id(pickle.dumps(whole, protocol))
    assert not proof.exists()


def test_an_id_of_another_class_state_or_length_is_refused(structure: Any) -> None:
    written = pickle.dumps(structure.from_buffer_copy(ID), 4)
    short = type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_byte * 127)]})
    short.__module__ = MODULE
    sys.modules[MODULE].ncclUniqueId = short  # type: ignore[attr-defined]
    changed = [
        b"",
        b".",
        written + b".",
        written + written,
        written[:-1],
        written.replace(b"ncclUniqueId", b"ncclUniqueIe"),
        written.replace(b"_unpickle", b"_unpicklf"),
        written.replace(b"_ctypes", b"_ctypet"),
        written.replace(b"vllm", b"evil"),
        pickle.dumps(short.from_buffer_copy(ID[:127]), 4),
        b"\x80\x04" + b"\x95" + b"\xff" * 8,
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"\x80\x04" + b"(" * 2000,
    ]
    for data in changed:
        with pytest.raises(WeightsRejected):
            read_nccl_id(data)


def test_mutated_pickles_give_an_id_or_are_refused(structure: Any) -> None:
    """Bytes of the id may change, and notes that pickles carry for the reader; nothing else."""
    written = pickle.dumps(structure.from_buffer_copy(ID), 4)
    at = written.index(ID)
    draw = random.Random(0)
    taken = 0
    for _ in range(3000):
        data = bytearray(written)
        for _ in range(draw.choice((1, 1, 2, 5))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = read_nccl_id(bytes(data))
        except WeightsRejected:
            continue
        taken += 1
        assert found == bytes(data[at : at + 128])
    assert 100 < taken < 3000
