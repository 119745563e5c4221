"""The transports by name: the worker's receivers and the publisher's senders. A new transport is entered here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from trainer_bridge.transports.base import TransportReceiver, TransportSender
from trainer_bridge.transports.disk import DiskReceiver, DiskSender
from trainer_bridge.transports.shm import ShmReceiver, ShmSender
from trainer_bridge.transports.zmq_stream import BucketSocket, ZmqReceiver, ZmqSender
from trainer_bridge.wire.keys import ClientCurve

TRANSPORTS = ("cuda_ipc", "nccl", "shm", "zmq", "disk")


def make_receivers(
    socket: BucketSocket, device: torch.device, idle_s: float, wake: Callable[[], object], groups: bool
) -> dict[str, TransportReceiver]:
    """Every transport of a worker, by name.

    `socket` brings buckets, `device` is where the model is, `idle_s` bounds waits in a group, and `wake` makes the
    receiver's thread look. `groups` allows `nccl`, whose connections have no keys.
    """
    zmq_receiver = ZmqReceiver(socket)
    receivers: dict[str, TransportReceiver] = {
        "zmq": zmq_receiver,
        "shm": ShmReceiver(zmq_receiver),
        "disk": DiskReceiver(),
    }
    if device.type == "cuda":
        from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, CudaIpcReceiver
        from trainer_bridge.transports.fingerprint import fingerprint

        fingerprint(torch.zeros(4, dtype=torch.uint8, device=device))  # compiled now, and not while rows decode
        with contextlib.suppress(OSError):  # without the CUDA runtime library the other transports serve
            receivers["cuda_ipc"] = CudaIpcReceiver(zmq_receiver, CudaIpcMemory(device))
    if groups and torch.distributed.is_available():
        from trainer_bridge.transports.nccl.transport import NcclReceiver

        receivers["nccl"] = NcclReceiver(device, idle_s, wake)
    return receivers


def make_sender(
    name: str, folder: str | None, curve: ClientCurve | None = None, endpoints: Sequence[str] = ()
) -> TransportSender:
    """The sender of a transport to the workers at `endpoints`.

    `disk` writes to `folder`; `curve` has the keys for workers with CURVE. Raises ValueError for an unknown name.
    """
    if name == "zmq":
        return ZmqSender(curve)
    if name == "shm":
        return ShmSender(curve)
    if name == "cuda_ipc":
        from trainer_bridge.transports.cuda_ipc import CudaIpcSender

        return CudaIpcSender(curve)
    if name == "nccl":
        from trainer_bridge.transports.nccl.transport import NcclSender

        return NcclSender(endpoints)
    if name == "disk":
        if folder is None:
            raise ValueError("transport 'disk' needs a folder that the workers can read; set folder=")
        return DiskSender(folder)
    raise ValueError(f"unknown transport {name!r}; use auto, {', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}")
