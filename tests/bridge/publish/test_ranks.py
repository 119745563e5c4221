"""Trainers of several ranks: what the others hear of one that does not publish, and how their processes end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bridge.fault_client import FaultServer
from tests.support.bridge.harness import Worker, wait_for


@pytest.mark.parametrize(("alone", "text"), [(0, "gather: another rank cannot be reached"), (1, "it was stopped")])
def test_a_rank_that_publishes_alone_gets_an_error_and_can_close(
    faults: FaultServer, tmp_path: Path, alone: int, text: str
) -> None:
    with Worker() as worker:
        order = {"role": "rank", "endpoint": worker.endpoint, "folder": str(tmp_path), "timeout_s": 0.5}
        with (
            faults.child(rank=0, publishes=alone == 0, **order),
            faults.child(rank=1, publishes=alone == 1, **order),
        ):
            seen = {}
            for rank in (alone, 1 - alone):  # both come to their end
                found = tmp_path / f"rank-{rank}.json"
                wait_for(found.exists, f"the end of rank {rank}", 60)
                seen[rank] = json.loads(found.read_text())
        assert text in seen[alone]["error"] and seen[1 - alone]["error"] == ""
        assert worker.updates == [] and worker.status()["state"] == "idle"


RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tests.support.bridge.harness import TinyModel, new_tensors
from trainer_bridge.publish.publisher import WeightPublisher

rank, endpoint, store, closes = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "closed"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in new_tensors(TinyModel(), 1).items()}
publisher = WeightPublisher(endpoint, transport="nccl", bucket_bytes=128, collective=True)
for version in (1, 2):
    publisher.publish(tensors, version).applied(30)
if closes:
    publisher.close()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("publisher", ["closed", "left open"])
def test_the_processes_of_all_ranks_end_cleanly(tmp_path: Path, publisher: str) -> None:
    """All ranks leave their groups at the same time; a thread that is then inside of torch aborts its process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with Worker() as worker:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), worker.endpoint, str(tmp_path / "store"), publisher],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
