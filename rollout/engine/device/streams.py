"""Streams and events with one interface on CUDA and on a CPU.

A stream runs its work in order and returns to the caller at once. An event marks a place in a stream; other streams and
the host can wait for it. On CUDA these are CUDA's own. On a CPU a stream is a thread that runs closures, so overlap,
ordering and races are as real there as on a GPU.

    event.record on stream A      the event fires when all work that A was given before is done
    B.wait(event)                 B delays the work that it is given after this; the host does not wait
    event.synchronize()           the host waits

A closure that raises poisons its stream, as a fault poisons a CUDA context: later work is skipped, events still fire so
that no thread waits forever, and `check()` raises the first fault.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from rollout.process.host_memory import available_bytes


class DeviceError(RuntimeError):
    """Work on a device stream failed: the steps in flight are lost and the engine cannot go on."""


class Event(Protocol):
    """A place in a stream. An event may be recorded again; later waits refer to the newest record."""

    def query(self) -> bool:
        """True once the stream has reached the newest record."""

    def synchronize(self) -> None:
        """Block the host until the stream has reached the newest record."""

    @property
    def time_s(self) -> float:
        """When the newest record was reached, in `time.perf_counter()` seconds; only valid after it was reached."""


class DeviceStream(Protocol):
    """An ordered queue of device work."""

    @property
    def thread_id(self) -> int:
        """The system's number of the thread that does the work; 0 if a GPU does it."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue `work`."""

    def record(self, event: Event) -> None:
        """Enqueue the firing of `event`."""

    def wait(self, event: Event) -> None:
        """Delay work that is enqueued after this until the newest record of `event` has fired."""

    def check(self) -> None:
        """Raise DeviceError if work on this stream failed."""

    def close(self) -> None:
        """Finish the enqueued work and accept no more."""


class Device(Protocol):
    """A device: it holds tensors and runs steps."""

    torch_device: torch.device

    def stream(self, name: str) -> DeviceStream:
        """A new stream."""

    def event(self) -> Event:
        """A new event, timed."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device can copy from and to in the background."""

    def free_bytes(self) -> int:
        """Memory that is free for tensors now, bytes."""

    def synchronize(self) -> None:
        """Wait for all work on the device, including work on foreign streams; for start-up only."""


def make_device(name: str) -> Device:
    """The device for a `model.device` setting: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises ValueError for any other name and for a device that does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device {name!r}: write auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return CpuDevice()
    if device.type != "cuda":
        raise ValueError(f"model.device {name!r}: write auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"model.device {name!r} does not exist: {torch.cuda.device_count()} CUDA devices are visible")
    return CudaDevice(torch.device("cuda", device.index or 0))


# --- CPU -------------------------------------------------------------------------------------------------------------


class _Ticket:
    """One record of an event: a lock that opens once."""

    __slots__ = ("fired", "lock", "time_s")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.fired = False
        self.time_s = 0.0

    def fire(self) -> None:
        self.time_s = time.perf_counter()
        self.fired = True
        self.lock.release()

    def wait(self) -> None:
        if not self.fired:
            with self.lock:  # released by fire(); each waiter takes and releases it in turn
                pass


_NEVER_RECORDED = _Ticket()
_NEVER_RECORDED.fire()


class CpuEvent:
    """An event between CPU streams."""

    def __init__(self) -> None:
        self.ticket = _NEVER_RECORDED

    def query(self) -> bool:
        """True once the newest record was reached. An event that was never recorded counts as reached."""
        return self.ticket.fired

    def synchronize(self) -> None:
        """Block until the newest record was reached."""
        self.ticket.wait()

    @property
    def time_s(self) -> float:
        """When the newest record was reached, `time.perf_counter()` seconds."""
        fired = self.ticket.fired and self.ticket is not _NEVER_RECORDED
        assert fired, "an event has a time only after it fired"
        return self.ticket.time_s


class CpuStream:
    """A thread that runs closures in order."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"stream-{name}", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The system's number of the thread."""
        return self._thread.native_id or 0

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue `work`; skipped if earlier work failed."""
        self._queue.put(work)

    def record(self, event: CpuEvent) -> None:
        """Enqueue the firing of `event`."""
        ticket = event.ticket = _Ticket()
        self._queue.put(ticket.fire)

    def wait(self, event: CpuEvent) -> None:
        """Delay later work until the newest record of `event` has fired."""
        if not event.ticket.fired:
            self._queue.put(event.ticket.wait)

    def check(self) -> None:
        """Raise DeviceError if a closure raised."""
        if self._failure is not None:
            raise DeviceError(f"{self._thread.name}: {self._failure}") from self._failure

    def close(self) -> None:
        """Run the enqueued work, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                self._step(work)

    def _step(self, work: Callable[[], object]) -> None:
        is_event = isinstance(getattr(work, "__self__", None), _Ticket)
        if self._failure is not None and not is_event:
            return
        try:
            work()
        except BaseException as error:  # check() raises it: a stream has no caller
            self._failure = error


class CpuDevice:
    """The CPU: each stream is a thread."""

    torch_device = torch.device("cpu")

    def stream(self, name: str) -> DeviceStream:
        return CpuStream(name)  # type: ignore[return-value]  # a device's streams only see its own events

    def event(self) -> CpuEvent:
        return CpuEvent()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def free_bytes(self) -> int:
        """Memory that is available without swapping, as the kernel reports it, bytes."""
        if (free := available_bytes()) == math.inf:
            raise OSError("/proc/meminfo has no MemAvailable line: set kv_pages")
        return int(free)

    def synchronize(self) -> None:
        """No-op: work that is not on a stream is done when its call returns."""


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _CudaClock:
    """Maps CUDA events to the host's clock.

    CUDA gives the time between two events as a float32 of milliseconds, so the reference event is renewed every few
    seconds: at 10 s the resolution is a microsecond. No thread waits for the new reference: it is recorded on a stream
    of its own, and used from the first question after it was reached. If the device was idle for so long that the
    resolution is lost, the clock is set again, which waits.
    """

    _RENEW_MS = 10_000.0
    _LOST_MS = 60_000.0

    def __init__(self, cuda: Any = torch.cuda, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._now_s = cuda, now_s
        self._stream = cuda.Stream()
        self._set()

    def time_s(self, event: torch.cuda.Event) -> float:
        """`time.perf_counter()` seconds at which a reached event was recorded."""
        elapsed_ms = self._origin.elapsed_time(event)
        if elapsed_ms > self._LOST_MS:
            self._set()
        elif elapsed_ms > self._RENEW_MS:
            self._renew()
        else:
            return self._origin_s + elapsed_ms * 1e-3
        return self._origin_s + self._origin.elapsed_time(event) * 1e-3

    def _set(self) -> None:
        self._newer: torch.cuda.Event | None = None
        self._origin = self._record()
        self._origin.synchronize()
        self._origin_s = self._now_s()

    def _renew(self) -> None:
        """Record a newer origin, or use the recorded one if it was reached."""
        if self._newer is None:
            self._newer = self._record()
        if self._newer.query():
            self._origin_s += self._origin.elapsed_time(self._newer) * 1e-3
            self._origin, self._newer = self._newer, None

    def _record(self) -> torch.cuda.Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class CudaEvent:
    """A timed CUDA event whose times are mapped to the host's clock."""

    def __init__(self, clock: _CudaClock) -> None:
        # External: if it is recorded while a graph is captured, each replay records it.
        self.event = torch.cuda.Event(enable_timing=True, external=True)
        self._clock = clock

    def query(self) -> bool:
        """True once the newest record was reached."""
        return self.event.query()

    def synchronize(self) -> None:
        """Block until the newest record was reached."""
        self.event.synchronize()

    @property
    def time_s(self) -> float:
        """When the newest record was reached, `time.perf_counter()` seconds."""
        return self._clock.time_s(self.event)


class CudaStream:
    """A CUDA stream; work is enqueued by running it on the host with this stream current."""

    thread_id = 0

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], object]) -> None:
        """Run `work` on the host with this stream current, which enqueues its kernels here."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            work()

    def record(self, event: CudaEvent) -> None:
        """Enqueue the firing of `event`."""
        event.event.record(self.stream)

    def wait(self, event: CudaEvent) -> None:
        """Delay later work until the newest record of `event` has fired."""
        self.stream.wait_event(event.event)

    def check(self) -> None:
        """No-op: CUDA itself raises at the next call."""

    def close(self) -> None:
        """Wait for the enqueued work."""
        self.stream.synchronize()


class CudaDevice:
    """One GPU."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        torch.cuda.set_device(torch_device)
        self._clock = _CudaClock()

    def stream(self, name: str) -> DeviceStream:
        return CudaStream(self.torch_device)  # type: ignore[return-value]

    def event(self) -> CudaEvent:
        return CudaEvent(self._clock)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed pinned memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        """Free memory as the driver reports it, plus memory that the allocator keeps unused, bytes."""
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + unused

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(self.torch_device)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one engine's steps."""

    h2d: DeviceStream
    compute: DeviceStream
    d2h: DeviceStream
    beside: Mapping[str, DeviceStream]  # streams of features, by name, for work in parallel to the steps

    @classmethod
    def make(cls, device: Device, beside: Iterable[str] = ()) -> Streams:
        h2d, compute, d2h = device.stream("h2d"), device.stream("compute"), device.stream("d2h")
        return cls(h2d, compute, d2h, {name: device.stream(name) for name in beside})

    def all(self) -> list[DeviceStream]:
        """All streams of this engine."""
        return [self.h2d, self.compute, self.d2h, *self.beside.values()]

    def close(self) -> None:
        """Finish what is enqueued and end the streams."""
        for stream in self.all():
            stream.close()
