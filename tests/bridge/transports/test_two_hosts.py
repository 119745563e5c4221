"""Updates between two network namespaces, which share no address: as between two hosts."""

import functools
import subprocess
import sys

import pytest

from tests.support.bridge.two_hosts import TRANSPORTS
from tests.support.kernels.grids import nightly
from tests.support.worker.harness import subprocess_environment

CABLE = "ip link add here type veth peer name there && ip link set lo up && ip addr add fd00:7::1/64 dev here"


@functools.cache
def why_not() -> str:
    """Why this system lets a test make no network namespaces; empty if it does."""
    try:
        tried = subprocess.run(["unshare", "-rn", "sh", "-c", CABLE], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


@pytest.mark.parametrize(("network", "prefix"), [("10.7.0.", "24"), *nightly(("fd00:7::", "64"))])
def test_a_worker_on_another_host_takes_updates(network: str, prefix: str) -> None:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    command = ["unshare", "-rn", sys.executable, "-m", "tests.support.bridge.two_hosts", network, prefix]
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_environment(), timeout=300)
    assert done.stdout.splitlines() == [f"{transport} {version}" for version, transport in enumerate(TRANSPORTS, 1)], (
        done.stderr
    )
