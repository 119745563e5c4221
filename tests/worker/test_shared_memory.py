"""Workers in a container whose /dev/shm is small: nothing of ours takes memory from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker.harness import subprocess_environment

#: A mount namespace: what is mounted in it nobody else sees.
_OWN_MOUNTS = ("unshare", "--map-root-user", "--mount")


def may_mount() -> bool:
    """True if this system lets a process mount memory in a namespace of its own."""
    probe = [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.nightly
def test_a_full_shared_memory_ends_no_rank_and_no_update(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("this system gives a process no mounts of its own")
    command = [*_OWN_MOUNTS, sys.executable, "-m", "tests.support.worker.small_shared_memory", str(tmp_path)]
    done = subprocess.run(command, env=subprocess_environment(), capture_output=True, text=True, check=False)
    log = tmp_path / "log"
    assert done.returncode == 0, done.stderr[-3_000:] + (log.read_text()[-3_000:] if log.exists() else "")
