"""A worker and a trainer in two network namespaces that a cable connects: as on two hosts, they share no address.

    python -m tests.support.bridge.two_hosts ADDRESS PREFIX         in `unshare -rn`: the trainer
    python -m .. ADDRESS PREFIX worker                              in `unshare -n` of it: the worker

The worker has the address that ends in 2, the trainer the one that ends in 1. The trainer publishes by each transport,
and prints `TRANSPORT VERSION` if the tokens of the next completion are those of the version that it names.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.worker.harness import check, launch, tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.address import bracketed

TRANSPORTS = ("zmq", "nccl")


def ip(*words: str) -> None:
    """Configure the namespace of this process."""
    subprocess.run(["ip", *words], check=True)


def set_up(device: str, address: str, prefix: str) -> None:
    """Give a device an address, and bring it and the namespace's own loopback up."""
    ip("addr", "add", f"{address}/{prefix}", "dev", device, *(["nodad"] if ":" in address else []))
    ip("link", "set", device, "up")
    ip("link", "set", "lo", "up")


def work(address: str, prefix: str) -> None:
    """Serve until a line comes."""
    print("here", flush=True)
    input()
    set_up("there", address, prefix)
    bind = f"tcp://{bracketed(address)}:0"
    with tempfile.TemporaryDirectory() as folder:
        log, env = Path(folder) / "log", {"OMP_NUM_THREADS": "1"}  # with `env` it is no fork of another namespace
        flags = {"bind": bind, "weights_bind": bind, "insecure": True, "device": "cpu", "max_rows": 4}
        with launch(log=log, env=env, max_context_tokens=1024, **flags) as worker:
            print(worker.endpoint, flush=True)
            input()


def train(network: str, prefix: str) -> None:
    """Publish by each transport."""
    ip("link", "add", "here", "type", "veth", "peer", "name", "there")
    command = ["unshare", "-n", sys.executable, "-m", __spec__.name, network, prefix, "worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert worker.stdout.readline() == "here\n"
        ip("link", "set", "there", "netns", str(worker.pid))
        print(file=worker.stdin, flush=True)
        set_up("here", f"{network}1", prefix)
        endpoint = worker.stdout.readline().strip()
        with RolloutClient(endpoint, timeout_s=120) as client:
            for version, transport in enumerate(TRANSPORTS, 1):
                with WeightPublisher(endpoint, transport=transport, bucket_bytes=4096) as publisher:
                    publisher.publish(tensors(1 + version % 2), version).applied(120)
                (completion,) = client.generate("17:", max_tokens=20, min_version=version).completions
                check("17:", completion, {version: 1 + version % 2})
                print(transport, version, flush=True)
        print(file=worker.stdin, flush=True)


if __name__ == "__main__":
    if sys.argv[3:] == ["worker"]:
        work(f"{sys.argv[1]}2", sys.argv[2])
    else:
        train(*sys.argv[1:])
