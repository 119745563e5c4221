"""A process group apart from the default group, which it does not touch: a store, a rank, broadcasts.

    publisher      StoreServer on a free port     rank 0
    workers        join(hosts, port)              ranks 1 to n
    trainer ranks  join(hosts, port)              ranks n+1 and up: the ranks that send their own parts

The backend objects are made directly, not through `init_process_group`, so nothing is registered anywhere and a
process can make and leave any number of groups. `gloo` moves host memory, `nccl` memory of a GPU. Every wait has a
deadline and ends early when `stop` is set.

A store holds bytes, never pickles. It has no password: any process that reaches its port can join or disturb a group.
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
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from trainer_bridge.wire.address import LOOPBACK, address_towards, host_port, is_loopback

POLL_S = 0.002
REACH_S = 2.0
END_S = 2.0  # wait for threads at the end: a thread inside torch may abort the process when Python ends
_GIVE_UP_S = 1.0
_LANDED_POLL_S = 0.0005
_LANDED_POLL_GPU_S = 0.0001  # a bucket takes 0.2 ms from GPU to GPU
_GONE = "gone"  # key of a store
_MAX_REASON = 300  # characters
#: Read by the nccl backend when it is made. Without them a group that has lost a member ends the whole process.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment_lock = threading.Lock()


#: The time at which members on GPUs connect: `together`, once all are present, as `BroadcastGroup`s note in the store;
#: `now`; or `late`, with the first broadcast, as members do that torch.distributed has made.
Connect = Literal["together", "now", "late"]


class GroupError(RuntimeError):
    """The group cannot be made or is broken: a member is gone, hangs, or was stopped."""


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A member's rank in the group `name`, and the lengths of the tables of runs (0: rank 0 sends all) and columns."""

    name: str
    rank: int
    size: int
    runs: int
    columns: int = 0


def device_name(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def local_address(endpoint: str) -> str:
    """The address of this host on the route to `endpoint`. Sends nothing."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.hostname is None:
        return LOOPBACK  # ipc: the same host
    return address_towards(parts.hostname, parts.port)


class StoreServer:
    """The store of one group, on a free port; reachable from other hosts only where one of `hosts` is not loopback."""

    def __init__(self, hosts: Sequence[str], timeout_s: float) -> None:
        # Loopback last: a local member that joins by another address can be reached by members on other hosts, too.
        self.hosts = sorted(dict.fromkeys(hosts), key=is_loopback)
        if is_loopback(self.hosts[0]):
            self.hosts = self.hosts[:1]  # members on this host reach either; a group of gloo has one family
            self.local_host = self.hosts[0]
            self._socket = _listen(self.local_host)
        elif any(":" in host for host in self.hosts):
            self._socket, self.local_host = _listen("::", dual=True), "::1"
        else:
            self._socket, self.local_host = _listen("0.0.0.0"), LOOPBACK  # noqa: S104
        self.port: int = self._socket.getsockname()[1]
        self.store = dist.TCPStore(
            self.local_host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),  # the store closes it
        )


def _listen(host: str, dual: bool = False) -> socket.socket:
    """A listening socket on a free port; `dual`: of IPv4, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=dual)


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
        raise GroupError(f"the store at {host_port(host, port)} cannot be used: {first_line(error)}") from error


def begin_ending(work: Callable[[], object]) -> threading.Thread | None:
    """Do `work` in a new thread and return it.

    Python 3.12.0 to 3.12.2 start no thread while the interpreter ends. The work is then done here; returns None.
    """
    thread = threading.Thread(target=work, name="weights-group-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


def give_up(store: dist.Store, why: str) -> None:
    """Tell all members why this one gives up. The first reason stays: later ones mostly follow from it.

    Call it before closing the group, which the other members notice, too. Waits at most 1 s for the store, whose
    process may be stopped: on a GPU, broadcasts in flight end only when the group is closed.
    """

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the group
            store.compare_set(_GONE, "", why[:_MAX_REASON])

    teller = begin_ending(tell)
    if teller is not None:
        teller.join(_GIVE_UP_S)


def given_up(store: dist.Store) -> str | None:
    """The reason of the member that gave up, if one did."""
    try:
        return store.get(_GONE).decode(errors="replace")[:_MAX_REASON] if store.check([_GONE]) else None
    except RuntimeError:
        return "the store of the group is gone"


class BroadcastGroup:
    """A member's end of a group. Belongs to one thread at a time."""

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
        connect: Connect = "together",
    ) -> None:
        """Meet the other members. Raises `GroupError` if not all of them join within `timeout_s`.

        `name` is the prefix of the group's keys in the store. `address` is where gloo listens on this host; empty:
        where torch.distributed would by itself. `op_timeout_s` bounds each later operation; default: `timeout_s`.
        """
        self.device = device
        self._join_timeout = timedelta(seconds=timeout_s)
        self._timeout = timedelta(seconds=op_timeout_s or timeout_s)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arrivals = torch.cuda.Stream(device) if on_gpu else None  # a stream that only waits for broadcasts
        members = dist.PrefixStore(name, store)
        try:
            self._backend = (
                self._gloo(members, rank, size, address)
                if self._stream is None
                else self._nccl(members, rank, size, connect)
            )
        except RuntimeError as error:  # torch's own errors of stores and sockets are kinds of it
            raise GroupError(f"not all members met within {timeout_s:g} s: {first_line(error)}") from error

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that can be broadcast, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def buffers(self) -> int:
        """Buckets in flight at a time: enough on a GPU that it does not wait for the host."""
        return 2 if self._stream is None else 4

    def broadcast(self, data: torch.Tensor, root: int = 0) -> Pending:
        """Start to send `data` from one member to all others, after earlier broadcasts. Raises `GroupError`.

        On a GPU it also runs after the work that is already on the current stream.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = self._timeout
        poll_s = _LANDED_POLL_S if self._stream is None else _LANDED_POLL_GPU_S
        with _group_errors():
            return Pending(self._backend.broadcast([data], options), self._arrivals, self._timeout, poll_s)

    def warm_up(self) -> None:
        """Add up one number of each member. On a GPU it runs on the current stream. Raises `GroupError`."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        with _group_errors():
            self._backend.allreduce([torch.zeros(1, device=self.device)], options).wait()

    def send(self, data: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send bytes of host memory to one member; gloo only; any thread. Raises `GroupError`."""
        with _group_errors():
            self._backend.send([data], to, tag).wait(self._timeout)

    def receive(self, out: torch.Tensor, sender: int, timeout_s: float, tag: int = 0) -> None:
        """Receive bytes of host memory from one member; gloo only; any thread, for tags of its own.

        A timeout breaks the group. Raises `GroupError`.
        """
        self.begin_receive(out, sender, tag)(timeout_s)

    def begin_receive(self, out: torch.Tensor, sender: int, tag: int = 0) -> Callable[[float], None]:
        """`receive` in two steps: the sender need not wait for the second, which takes the time limit."""
        with _group_errors():
            work = self._backend.recv([out], sender, tag)

        def wait(timeout_s: float) -> None:
            with _group_errors():
                work.wait(timedelta(seconds=timeout_s))

        return wait

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """On a GPU: make the stream of the broadcasts the current one."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def close(self, broken: bool) -> threading.Thread | None:
        """Leave the group. If it is broken, the other members get an error.

        Freeing a broken group may wait for its operations, so a thread does it. Returns that thread if it runs.
        """
        with contextlib.suppress(RuntimeError):  # the device may be gone
            if broken:
                self._backend.abort()  # ends operations in flight; otherwise gloo's threads wait for their deadline
            elif self._stream is not None:
                self._backend.shutdown()
        last, self._backend = [self._backend], None
        if not broken:
            return None
        return begin_ending(last.clear)

    def _gloo(self, store: dist.Store, rank: int, size: int, address: str) -> Any:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to set an address
        options._devices = [
            ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
        ]
        options._timeout = self._join_timeout
        options._threads = 2
        return ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: dist.Store, rank: int, size: int, connect: Connect = "together") -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        if connect == "together":  # joining has no deadline inside NCCL, so it begins when all members are present
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(size)], self._join_timeout)
        with torch.cuda.device(self.device):
            with _environment_lock, environment(NCCL_ENVIRONMENT):
                backend = ProcessGroupNCCL(store, rank, size, options)
            if connect != "late":
                backend.eager_connect_single_device(self.device)  # called without the lock, because it may hang
        return backend


class Pending:
    """A broadcast in flight."""

    def __init__(self, work: Any, arrivals: torch.cuda.Stream | None, timeout: timedelta, poll_s: float) -> None:
        self._work, self._timeout, self._poll_s = work, timeout, poll_s
        self._event: torch.cuda.Event | None = None
        if arrivals is not None:
            with torch.cuda.stream(arrivals):
                work.wait()  # the stream waits, not the host
            self._event = torch.cuda.Event()
            self._event.record(arrivals)

    def wait(self, stop: threading.Event, timeout_s: float | None = None) -> None:
        """Return when the data is received or sent. `timeout_s` defaults to the group's. Raises `GroupError`."""
        timeout_s = self._timeout.total_seconds() if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        while not self._done():
            if stop.is_set():
                raise GroupError("it was stopped")
            if time.monotonic() > deadline_s:
                raise GroupError(f"nothing moved for {timeout_s:g} s")
            time.sleep(self._poll_s)

    def _done(self) -> bool:
        with _group_errors():
            if self._event is not None:
                return self._event.query()
            if not self._work.is_completed():
                return False
            self._work.wait(self._timeout)  # raises the error, if any
        return True


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of this process for the time of a `with` block."""
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


@contextlib.contextmanager
def _group_errors() -> Iterator[None]:
    """Torch's errors as `GroupError`."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """The beginning of an error's message: torch appends a stack of C++ calls."""
    return str(error).partition("\n")[0][:300]
