"""Publishers and table entries with a part of the test's own: a payload that counts, a group that breaks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup, GroupError
from trainer_bridge.transports.nccl.transport import NcclReceiver, NcclSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import TRANSPORTS


class Watchful(WeightPublisher):
    """Looks for restarted workers all the time."""

    watch_s = 0.02


def packing(base: type[WeightPublisher] = WeightPublisher, **methods: Callable[..., Any]) -> type[WeightPublisher]:
    """A publisher whose payloads have these methods in the place of their own."""
    payload_type = type("PayloadOfTheTest", (Payload,), methods)
    return type("PublisherOfTheTest", (base,), {"payload_type": payload_type})


def enter(monkeypatch: pytest.MonkeyPatch, name: str, **facts: Any) -> None:
    """Change a transport's entry in the table, for workers and publishers that are made later."""
    monkeypatch.setitem(TRANSPORTS, name, replace(TRANSPORTS[name], **facts))


def enter_nccl(
    monkeypatch: pytest.MonkeyPatch,
    group_type: type[BroadcastGroup] = BroadcastGroup,
    sender_type: type[NcclSender] = NcclSender,
    receiver_type: type[NcclReceiver] = NcclReceiver,
    **facts: Any,
) -> None:
    """The entry of `nccl` with parts of the test's own."""
    enter(
        monkeypatch,
        "nccl",
        receiver=lambda worker: receiver_type(worker.device, worker.idle_s, worker.wake, group_type),
        sender=lambda publisher: sender_type(publisher.endpoints, group_type),
        **facts,
    )


#: Facts with which `auto` takes `nccl` first, also for tensors on the CPU.
NCCL_FIRST: dict[str, Any] = {"auto": 0, "gpu_to_gpu": False}


def group_with(joined: list[str] | None = None, **methods: Callable[..., Any]) -> type[BroadcastGroup]:
    """A group with these methods in the place of its own. Its `rank` is the member's, 0 for the publisher.

    Members add its name to `joined` when they join.
    """

    def init(self: Any, store: Any, name: str, rank: int, *given: Any, **more: Any) -> None:
        self.rank = rank
        if joined is not None:
            joined.append(name)
        BroadcastGroup.__init__(self, store, name, rank, *given, **more)

    return type("GroupOfTheTest", (BroadcastGroup,), {"__init__": init, **methods})


def no_groups(why: str) -> type[BroadcastGroup]:
    """A group that no member can join."""

    def init(*_: Any) -> None:
        raise GroupError(why)

    return group_with(__init__=init)
