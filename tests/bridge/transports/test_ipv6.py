"""Workers at IPv6 addresses, and at names that have some: every transport, and where the store of a group listens."""

import ipaddress
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port, needs_ipv6
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.nccl.nccl_group import StoreServer, connect, reach
from trainer_bridge.wire.worker_connection import WorkerConnection

pytestmark = needs_ipv6
TRANSPORTS = ["auto", "zmq", "shm", "nccl", "disk"]


@pytest.mark.parametrize("weights", [None, "tcp://127.0.0.1:0"], ids=["ipv6", "weights by ipv4"])
def test_every_transport_reaches_a_worker_at_an_ipv6_address(tmp_path: Path, weights: str | None) -> None:
    with Worker(host="::1", **({} if weights is None else {"bind": weights})) as worker:
        for version, transport in enumerate(TRANSPORTS, 1):
            folder = str(tmp_path) if transport == "disk" else None
            tensors = new_tensors(worker.model, version)
            with WeightPublisher(worker.endpoint, transport=transport, folder=folder, bucket_bytes=128) as publisher:
                (report,) = publisher.publish(tensors, version).applied(PATIENCE_S)
            assert serves(worker.model, tensors)
            assert report.transport == (transport if transport != "auto" else "shm")


def test_a_group_has_workers_of_both_families() -> None:
    with Worker(host="::1") as one, Worker() as other:
        tensors = new_tensors(one.model, 1)
        with WeightPublisher([one.endpoint, other.endpoint], transport="nccl") as publisher:
            assert len(publisher.publish(tensors, 1).applied(PATIENCE_S)) == 2
        assert serves(one.model, tensors) and serves(other.model, tensors)


def listening_at(port: int) -> set[str]:
    """The addresses of the system's sockets that listen at a port."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            digits, at = local.split(":")
            if state == "0A" and int(at, 16) == port:
                words = [
                    bytes.fromhex(digits[i : i + 8])[:: 1 if sys.byteorder == "big" else -1]
                    for i in range(0, len(digits), 8)
                ]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["::1"], "::1"),
        (["127.0.0.1"], "127.0.0.1"),
        (["127.0.0.1", "::1"], "127.0.0.1"),
        (["::1", "127.0.0.1"], "::1"),
        (["127.0.0.1", "10.0.0.9"], "0.0.0.0"),  # noqa: S104
        (["fd00::9", "10.0.0.9", "::1"], "::"),
    ],
)
def test_a_store_listens_at_the_loopback_only_if_all_members_are_there(hosts: list[str], expected: str) -> None:
    server = StoreServer(hosts, 30.0)
    assert listening_at(server.port) == {expected}
    local = expected if ipaddress.ip_address(expected).is_loopback else "127.0.0.1"
    client = connect(reach([*server.hosts, local], server.port, 2.0), server.port, 30.0)
    client.set("key", "value")
    assert server.store.get("key") == b"value"


def test_an_ipv6_address_without_brackets_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"tcp://::1:5757.*brackets"):
        RolloutClient("tcp://::1:5757")


def test_a_name_is_tried_by_both_families_until_there_is_a_connection() -> None:
    """`127.1` is looked up like a name. By IPv6 it is a mapped address, which the worker takes, too."""
    port, context = free_port(), zmq.Context()
    connection = WorkerConnection(context, f"tcp://127.1:{port}")
    families = set()

    def turned() -> bool:
        connection.drain(1)
        families.add(connection.socket.get(zmq.IPV6))
        return len(families) == 2

    wait_for(turned, "an attempt by IPv6", PATIENCE_S)
    with context.socket(zmq.ROUTER) as worker:
        worker.set(zmq.LINGER, 0)
        worker.bind(f"tcp://127.0.0.1:{port}")
        wait_for(lambda: connection.drain(1) and connection.can_send, "a connection", PATIENCE_S)
        assert connection.numeric_endpoint() in (f"tcp://127.0.0.1:{port}", f"tcp://[::ffff:127.0.0.1]:{port}")
        connection.send("x", [b"hello"])
        assert worker.recv_multipart()[1:] == [b"hello"]
        connection.close()
    context.term()


#: Runs a command with names of its own in /etc/hosts, in a mount namespace.
WITH_NAMES = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
BY_NAME = """
from tests.support.bridge.harness import Worker, new_tensors, serves
from trainer_bridge import WeightPublisher
for host, name in [("::1", "six.test"), ("::1", "both.test"), ("127.0.0.1", "both.test")]:
    with Worker(host=host) as worker:
        endpoint = f"tcp://{name}:{worker.port}"
        for version, transport in enumerate(["zmq", "nccl"], 1):
            with WeightPublisher(endpoint, transport=transport, begin_s=60) as publisher:
                publisher.publish(tensors := new_tensors(worker.model, version), version).applied(60)
            assert serves(worker.model, tensors)
            print(host, name, transport)
"""


def with_names(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost both.test\n::1 both.test six.test\n")
    unshare = ["unshare", "--user", "--map-root-user"] if os.geteuid() else ["unshare"]
    whole = [*unshare, "--mount", "sh", "-c", WITH_NAMES, "sh", str(hosts), *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_worker_is_reached_by_a_name_whatever_addresses_it_has(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or with_names(tmp_path, "true").returncode:
        pytest.skip("needs a mount namespace, for names of its own")
    done = with_names(tmp_path, sys.executable, "-c", BY_NAME)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
