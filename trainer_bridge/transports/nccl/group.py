"""A process group of its own: a store, a rank, broadcasts. The default group is not touched.

    publisher      StoreServer on a free port     rank 0
    workers        join(hosts, port)              ranks 1 to n
    trainer ranks  join(hosts, port)              behind them: those that send what they own

The backend objects are made directly, not through `init_process_group`, so nothing is registered anywhere and groups
can come and go in one process. `gloo` moves host memory, `nccl` memory of a GPU. Every wait has a deadline,
and ends early when `stop` is set.

What a store holds is bytes, never pickles. It has no password: whoever reaches its port can join or disturb a group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

POLL_S = 0.002
REACH_S = 2.0
END_S = 2.0  # for threads at the end: one that is inside of torch while Python ends may abort the process
_TOLD_S = 1.0
_LANDED_POLL_S = 0.0005
_LANDED_POLL_GPU_S = 0.0001  # between two GPUs a bucket takes 0.2 ms
_GONE = "gone"  # key of a store
_MOST_WORDS = 300
_LOOPBACK = "127.0.0.1"
#: Read by the nccl backend when it is made. Without them a group that has lost a member ends the whole process.
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment_lock = threading.Lock()


class GroupError(RuntimeError):
    """The group cannot be made or is broken: a member is gone, hangs, or was told to stop."""


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A member's rank in the group `name`; `runs` is the length of the table of runs, 0 if rank 0 sends all."""

    name: str
    rank: int
    size: int
    runs: int


def device_name(device: torch.device) -> str:
    """What tells a GPU from all others; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def local_address(endpoint: str) -> str:
    """Address of this host on the way to `endpoint`. Nothing is sent."""
    host, port = urlsplit(endpoint).hostname, urlsplit(endpoint).port
    if urlsplit(endpoint).scheme != "tcp" or host is None:
        return _LOOPBACK  # ipc: the same host
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return _LOOPBACK


class StoreServer:
    """The store of one group, on a free port; reachable from other hosts only where one of `hosts` is not loopback."""

    def __init__(self, hosts: Sequence[str], timeout_s: float) -> None:
        # Loopback last: who is on this host and reaches another address is reached by the members elsewhere, too.
        self.hosts = sorted(dict.fromkeys(hosts), key=lambda host: host == _LOOPBACK)
        self.local_host = _LOOPBACK
        local = all(host == _LOOPBACK for host in self.hosts)
        self._socket = socket.create_server((_LOOPBACK if local else "0.0.0.0", 0))  # noqa: S104
        self.port: int = self._socket.getsockname()[1]
        self.store = dist.TCPStore(
            _LOOPBACK,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),  # the store closes it
        )


def reach(hosts: Sequence[str], port: int, timeout_s: float) -> str:
    """The first of `hosts` that answers. Raises `GroupError`."""
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout_s):
            return host
    raise GroupError(f"nothing answers at port {port} of {', '.join(hosts)}")


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of a store. Raises `GroupError`."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"the store at {host}:{port} cannot be used: {_first_line(error)}") from error


def begin_ending(work: Callable[[], object]) -> threading.Thread | None:
    """Start a thread that does it. None if it is done: where Python itself ends, 3.12.0 to 3.12.2 start no thread."""
    thread = threading.Thread(target=work, name="weights-group-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


def give_up(store: dist.Store, why: str) -> None:
    """Tell all members why one gives up, unless another has done so before: what comes after is mostly of that.

    Do it before the group is closed: that, too, is seen by the others. A store that does not answer, whose process was
    stopped, is waited for no longer than a moment: on a GPU what is under way ends when the group is closed.
    """

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the group
            store.compare_set(_GONE, "", why[:_MOST_WORDS])

    teller = begin_ending(tell)
    if teller is not None:
        teller.join(_TOLD_S)


def given_up(store: dist.Store) -> str | None:
    """Why a member gave up, if one did."""
    try:
        return store.get(_GONE).decode(errors="replace")[:_MOST_WORDS] if store.check([_GONE]) else None
    except RuntimeError:
        return "the store of the group is gone"


class BroadcastGroup:
    """A member's end. Belongs to one thread at a time."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        timeout_s: float,
        op_timeout_s: float | None = None,
    ) -> None:
        """Meet the other members. Raises `GroupError` when they are not there within `timeout_s`.

        `op_timeout_s` bounds what follows, `timeout_s` when absent.
        """
        self.device = device
        self._join_timeout = timedelta(seconds=timeout_s)
        self._timeout = timedelta(seconds=op_timeout_s or timeout_s)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arrivals = torch.cuda.Stream(device) if on_gpu else None  # waits for broadcasts, and does nothing else
        members = dist.PrefixStore(name, store)
        try:
            self._backend = (
                self._gloo(members, rank, size, address) if self._stream is None else self._nccl(members, rank, size)
            )
        except RuntimeError as error:  # torch's own errors of stores and sockets are kinds of it
            raise GroupError(f"not all members met within {timeout_s:g} s: {_first_line(error)}") from error

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that can be broadcast, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def buffers(self) -> int:
        """Buckets on their way at a time: a host that comes late must not keep GPUs waiting."""
        return 2 if self._stream is None else 4

    def broadcast(self, data: torch.Tensor, root: int = 0) -> Pending:
        """Start to send `data` from one member to all others, behind what was started before. Raises `GroupError`.

        On a GPU also after the work that the current stream has now.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = self._timeout
        poll_s = _LANDED_POLL_S if self._stream is None else _LANDED_POLL_GPU_S
        try:
            return Pending(self._backend.broadcast([data], options), self._arrivals, self._timeout, poll_s)
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error

    def send(self, data: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send bytes of host memory to one member; gloo only; any thread. Raises `GroupError`."""
        try:
            self._backend.send([data], to, tag).wait(self._timeout)
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error

    def receive(self, out: torch.Tensor, sender: int, timeout_s: float, tag: int = 0) -> None:
        """Receive bytes of host memory from one member; gloo only; any thread, for tags of its own.

        A timeout breaks the group. Raises `GroupError`.
        """
        try:
            self._backend.recv([out], sender, tag).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """On a GPU: make the stream of the broadcasts the current one."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def close(self, broken: bool) -> threading.Thread | None:
        """Leave; the other members of a broken group hear of it.

        What torch holds of a broken one is freed in a thread: what is under way may keep it waiting. It is returned if
        it runs.
        """
        with contextlib.suppress(RuntimeError):  # of a device that is gone
            if broken:
                self._backend.abort()  # ends what is under way: without it gloo's threads wait for their deadline
            elif self._stream is not None:
                self._backend.shutdown()
        last, self._backend = [self._backend], None
        if not broken:
            return None
        return begin_ending(last.clear)

    def _gloo(self, store: dist.Store, rank: int, size: int, address: str) -> Any:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the one way to name an address
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self._join_timeout
        options._threads = 2
        return ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: dist.Store, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        # Joining has no deadline inside of NCCL: begin it once everybody is there to join.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(size)], self._join_timeout)
        with torch.cuda.device(self.device):
            with _environment_lock, _environment(_NCCL_ENVIRONMENT):
                backend = ProcessGroupNCCL(store, rank, size, options)
            backend.eager_connect_single_device(self.device)  # not under the lock: it may hang
        return backend


class Pending:
    """A broadcast on its way."""

    def __init__(self, work: Any, arrivals: torch.cuda.Stream | None, timeout: timedelta, poll_s: float) -> None:
        self._work, self._timeout, self._poll_s = work, timeout, poll_s
        self._event: torch.cuda.Event | None = None
        if arrivals is not None:
            with torch.cuda.stream(arrivals):
                work.wait()  # of the stream, not of the host
            self._event = torch.cuda.Event()
            self._event.record(arrivals)

    def wait(self, stop: threading.Event, timeout_s: float | None = None) -> None:
        """Return when the data is there, or away; `timeout_s` is the group's if absent. Raises `GroupError`."""
        timeout_s = self._timeout.total_seconds() if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        while not self._done():
            if stop.is_set():
                raise GroupError("it was told to stop")
            if time.monotonic() > deadline_s:
                raise GroupError(f"nothing moved for {timeout_s:g} s")
            time.sleep(self._poll_s)

    def _done(self) -> bool:
        try:
            if self._event is not None:
                return self._event.query()
            if not self._work.is_completed():
                return False
            self._work.wait(self._timeout)  # raises what went wrong
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error
        return True


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
