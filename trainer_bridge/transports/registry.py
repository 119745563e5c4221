"""The table of transports: for each name, how a worker makes its receiver and a publisher its sender.

A transport is one entry in `TRANSPORTS`. Publishers and workers take names from here alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_bridge.transports.base import OfferedMemory, TransportReceiver, TransportSender
from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, CudaIpcReceiver, CudaIpcSender, IpcMemory, OpenSlots
from trainer_bridge.transports.disk import DiskReceiver, DiskSender, OpenFolder
from trainer_bridge.transports.fingerprint import prepare_fingerprints
from trainer_bridge.transports.nccl.transport import NcclReceiver, NcclSender
from trainer_bridge.transports.shm import OpenSegment, ShmReceiver, ShmSender
from trainer_bridge.transports.torch_group.broadcast_transport import TorchGroupReceiver
from trainer_bridge.transports.zmq_stream import BucketSocket, ZmqReceiver, ZmqSender
from trainer_bridge.wire.keys import ClientCurve


@dataclass(frozen=True)
class WorkerSetup:
    """The inputs of a worker's receivers."""

    buckets: ZmqReceiver  # reads the socket that brings buckets
    device: torch.device  # device of the model
    idle_s: float  # bounds waits in a group
    wake: Callable[[], object]  # makes the receiver's thread look
    groups: bool  # allows `nccl` and `torch_group`, whose connections have no keys


@dataclass(frozen=True)
class PublisherSetup:
    """The inputs of a publisher's senders."""

    folder: str | None  # the folder that `disk` writes to
    curve: ClientCurve | None  # keys for workers with CURVE
    endpoints: Sequence[str]  # endpoints of the workers; changes when one joins or leaves


@dataclass(frozen=True)
class Transport:
    """The constructors of a transport's two halves. `receiver` returns None where the worker cannot use the transport.

    `sender` raises ValueError if its options are wrong, and `RolloutError` if this process cannot send by it.
    """

    receiver: Callable[[WorkerSetup], TransportReceiver | None]
    sender: Callable[[PublisherSetup], TransportSender]
    auto: int | None = None  # place in the order of `auto`; None: `auto` does not use it
    gpu_to_gpu: bool = False  # `auto` takes it for tensors on a GPU only
    in_group: bool = False  # a sender's workers form a group, which takes time: a late worker gets a new sender
    #: Opens memory that a receiver has offered, for a rank on this device; raises OSError or `RolloutError`.
    offered: Callable[[Mapping[str, Any], torch.device, IpcMemory | None], OfferedMemory] | None = None
    in_files: bool = False  # it offers files of whole tensors, and not the buckets of sections; a read may hang


def _disk_sender(publisher: PublisherSetup) -> TransportSender:
    if publisher.folder is None:
        raise ValueError("transport 'disk' needs a folder that the workers can read; set folder=")
    return DiskSender(publisher.folder)


def _cuda_ipc_receiver(worker: WorkerSetup) -> TransportReceiver | None:
    if worker.device.type != "cuda":
        return None
    prepare_fingerprints(worker.device)
    try:
        return CudaIpcReceiver(worker.buckets, CudaIpcMemory(worker.device))
    except OSError:  # the CUDA runtime library is missing; the other transports do not need it
        return None


def _torch_group_sender(publisher: PublisherSetup) -> TransportSender:
    raise ValueError("transport 'torch_group' is for trainers that update weights over HTTP; use auto or nccl")


#: All transports, in the order of a worker's `status`.
TRANSPORTS: dict[str, Transport] = {
    "zmq": Transport(lambda worker: worker.buckets, lambda publisher: ZmqSender(publisher.curve), auto=4),
    "shm": Transport(
        lambda worker: ShmReceiver(worker.buckets),
        lambda publisher: ShmSender(publisher.curve),
        auto=3,
        offered=lambda options, device, memory: OpenSegment(options, device),
    ),
    "disk": Transport(
        lambda worker: DiskReceiver(),
        _disk_sender,
        offered=lambda options, device, memory: OpenFolder(options, device),
        in_files=True,
    ),
    "cuda_ipc": Transport(
        _cuda_ipc_receiver,
        lambda publisher: CudaIpcSender(publisher.curve),
        auto=1,
        gpu_to_gpu=True,
        offered=OpenSlots,
    ),
    "nccl": Transport(
        lambda worker: NcclReceiver(worker.device, worker.idle_s, worker.wake) if worker.groups else None,
        lambda publisher: NcclSender(publisher.endpoints),
        auto=2,
        gpu_to_gpu=True,
        in_group=True,
    ),
    "torch_group": Transport(
        lambda worker: TorchGroupReceiver(worker.device, worker.idle_s, worker.wake) if worker.groups else None,
        _torch_group_sender,
    ),
}


def auto_order(gpu: bool, parts: bool) -> list[str]:
    """The transports that `auto` tries, in order; the last works between any two hosts. See `transport_choice`.

    `gpu`: the tensors are on a GPU. `parts`: they are spread over several trainer ranks; each rank sends its own parts
    if it is in a group with the workers.
    """
    order = {
        name: (parts and not transport.in_group, transport.auto)
        for name, transport in TRANSPORTS.items()
        if transport.auto is not None and (gpu or not transport.gpu_to_gpu)
    }
    return sorted(order, key=order.__getitem__)


def make_receivers(
    socket: BucketSocket, device: torch.device, idle_s: float, wake: Callable[[], object], groups: bool
) -> dict[str, TransportReceiver]:
    """Every transport that a worker can use, by name; the arguments are the fields of `WorkerSetup`."""
    worker = WorkerSetup(ZmqReceiver(socket), device, idle_s, wake, groups)
    made = {name: transport.receiver(worker) for name, transport in TRANSPORTS.items()}
    receivers = {name: receiver for name, receiver in made.items() if receiver is not None}
    assert all(receiver.name == name for name, receiver in receivers.items()), (
        "a receiver has another name in the table"
    )
    return receivers


def make_sender(
    name: str, folder: str | None, curve: ClientCurve | None = None, endpoints: Sequence[str] = ()
) -> TransportSender:
    """The sender of a transport; the arguments fill `PublisherSetup`. Raises ValueError for an unknown name."""
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; use auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name].sender(PublisherSetup(folder, curve, endpoints))
