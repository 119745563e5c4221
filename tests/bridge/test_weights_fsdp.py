"""A trainer of two ranks, each with its part of the weights (FSDP2 on the CPU), and a worker that gets them whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weights_harness import Worker, serves

from trainer_bridge.payload import Payload

SCRIPT = Path(__file__).with_name("fsdp_trainer.py")
RANKS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(worker: Worker, transport: str, folder: Path, *more: str) -> dict[int, dict]:
    """Run both ranks; what each one saw."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), worker.endpoint, transport, str(folder), *more],
            env={
                **os.environ,
                **place,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1].decode()[-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = {rank: folder / f"rank-{rank}.json" for rank in range(RANKS)}
    assert found[0].exists(), "\n".join(errors)
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}


@pytest.mark.parametrize("transport", ["auto", "nccl", "disk"])
def test_the_parts_of_all_ranks_arrive_as_one(tmp_path: Path, transport: str) -> None:
    with Worker() as worker:
        seen = train(worker, transport, tmp_path)
        assert [update.version for update in worker.updates] == [1, 2, 3]
        assert serves(worker.model, load_file(tmp_path / "3.safetensors"))
    for rank in range(RANKS):
        assert seen[rank]["versions"] == [[1], [2], [3]] and seen[rank]["errors"] == []
        before, after = seen[rank]["groups"]
        assert after <= before + 1  # the device mesh's own; the bridge registers none
    if transport != "disk":
        assert 0 < seen[0]["largest"] <= 128  # one bucket, never a tensor or a model


def test_a_rank_that_dies_ends_the_update_with_an_error_and_the_old_weights_serve(tmp_path: Path) -> None:
    with Worker() as worker:
        seen = train(worker, "zmq", tmp_path, "die")
        assert seen[0]["versions"] == [[1]]
        assert "rank" in seen[0]["errors"][0] and "gather" in seen[0]["errors"][0]
        assert serves(worker.model, load_file(tmp_path / "1.safetensors")) and worker.status()["state"] == "idle"


def test_parts_without_the_other_ranks_are_refused_at_once() -> None:
    class Part(torch.Tensor):
        device_mesh = placements = ()

    with pytest.raises(ValueError, match="collective=True"):
        Payload({"a": torch.zeros(3).as_subclass(Part)}, 1, 64)
