"""A worker of two ranks, a constraint and updates where /dev/shm has no free byte: run by `test_shared_memory.py`.

`python -m tests.support.worker.small_shared_memory FOLDER` must run in a mount namespace of its own, which it changes.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import check, launch, tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError


def main(folder: Path) -> None:
    """Fill a small /dev/shm, then serve, generate and publish over every transport of a CPU."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
    Path("/dev/shm/full").write_bytes(bytes(64 << 10))
    assert os.statvfs("/dev/shm").f_bavail == 0
    flags = {"tensor_parallel": 2, "device": "cpu", "max_rows": 4, "max_context_tokens": 4_096}
    with launch(log=folder / "log", **flags) as worker, RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        constraint = {"regex": "[0-9 ]+"}
        (completion,) = client.generate("17:", max_tokens=60, constraint=constraint).completions
        check("17:", completion, {0: 1})
        for version, transport in enumerate(("shm", "zmq", "disk"), start=1):
            where = {"folder": str(folder / "updates")} if transport == "disk" else {}
            with WeightPublisher(worker.endpoint, transport=transport, **where) as publisher:
                publisher.publish(tensors(1 + version % 2), version).applied(PATIENCE_S)
            (completion,) = client.generate("17:", max_tokens=60).completions
            check("17:", completion, {version: 1 + version % 2})
        with WeightPublisher(worker.endpoint, transport="disk", folder="/dev/shm/updates") as publisher:
            try:
                publisher.publish(tensors(1), 9).applied(PATIENCE_S)
            except RolloutError as error:
                assert "/dev/shm/updates" in str(error)
            else:
                raise AssertionError("there was no room for the update")
        check("17:", client.generate("17:", max_tokens=60).completions[0], {3: 2})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
