"""Many updates of a worker under load, by each transport and layout, amid trainer ranks that are killed in every phase.

Each version counts in another step than the one before it, so a token of another version than it names is found. In
the end a rank of the worker is killed in an update.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels.grids import nightly
from tests.support.worker.harness import ONES, TWOS, assert_idle, check, subprocess_environment, tensors
from tests.support.worker.lost_ranks import FAULT, LOST, PROMPTS, ended, followers_of, read, streams_of
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish import publisher as publishing
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

#: A rank of a trainer, which publishes three versions: from the second one on, updates come in sections. In a phase of
#: the third one, rank 0 kills one of the ranks. With two ranks, each has half of every tensor.
DOOMED = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_bridge.publish import publisher
from trainer_bridge.wire.errors import RolloutError

endpoint, transport, folder, version, phase, rank, size, doomed, *models = sys.argv[1:]
pids, size = [os.getpid()], int(size)
if size > 1:
    store = f"file://{folder}/store-{version}"
    dist.init_process_group("gloo", store, timedelta(seconds=60), size, int(rank))
    mesh = init_device_mesh("cpu", (size,))
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())

class Doomed(publisher.PublishHandle):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if rank == "0" and name == "phase" and value == phase and self.version == int(version) + 2:
            os.kill(pids[int(doomed)], signal.SIGKILL)

publisher.PublishHandle = Doomed
sends = publisher.WeightPublisher(
    endpoint, transport=transport, folder=folder, bucket_bytes=4096, collective=size > 1, stall_s=60, begin_s=60
)
for number, model in enumerate(models):
    tensors = load_file(Path(model) / "model.safetensors")
    if size > 1:
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    try:
        sends.publish(tensors, int(version) + number).applied(600)
    except RolloutError:
        assert number == 2
os._exit(0)  # what is left of a group may not end
"""
PHASES = ("prepare", "begin", "transfer", "commit")
#: Trainers: their ranks, and which one is killed. Each layout has another one in each phase.
TRAINERS = ((1, 0), (2, 0), (2, 1))
LAYOUTS = [(1, "staged"), (2, "staged"), (2, "in_place")]
EVERY = [(*layout, transport, 100) for layout in LAYOUTS for transport in ("zmq", "shm", "disk", "nccl")]


@pytest.mark.parametrize(("ranks", "apply", "transport", "updates"), [(2, "staged", "shm", 3), *nightly(*EVERY)])
def test_every_token_has_its_version_though_trainers_are_killed_in_every_phase(
    start_ranks: Callable[..., WorkerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    apply: str,
    transport: str,
    updates: int,
) -> None:
    worker = start_ranks(tensor_parallel=ranks, apply=apply, check_ranks=True, kv_on_swap="keep")
    models, steps, version = {1: ONES, 2: TWOS}, {0: 1}, 0
    first = LAYOUTS.index((ranks, apply))
    faults = [(phase, *TRAINERS[(first + number) % 3]) for number, phase in enumerate(PHASES)]
    faults = faults if updates > 10 else [("transfer", 1, 0)]
    every = updates // len(faults)
    with (
        RolloutClient(worker.endpoint, timeout_s=600.0) as client,
        WeightPublisher(
            worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=4096, apply_s=300
        ) as publisher,
    ):
        for fault in faults:
            streams = streams_of(client)
            for number in range(every):
                version += 1
                steps[version] = 3 - steps[max(steps)]
                publisher.publish(tensors(steps[version]), version).applied(120)
                read(streams[number % len(streams)], 8)
                if number == every // 2:
                    for more in (1, 2, 3):
                        steps[version + more] = 3 - steps[version + more - 1]
                    folders = [models[steps[version + more]] for more in (1, 2, 3)]
                    kill_a_trainer([worker.endpoint, transport, tmp_path, version + 1], fault, folders)
                    version += 3
            for stream, prompt in zip(streams, PROMPTS, strict=True):
                stream.cancel()
                (completion,) = stream.wait().completions
                check(prompt, completion, steps)
                assert len(completion.versions) > every // 2
        assert client.status()["weights"]["version"] == version
        if ranks == 1:
            assert_idle(worker)
            return
        phase = PHASES[("zmq", "shm", "disk", "nccl").index(transport)]
        steps[version + 1] = 3 - steps[version]
        streams, (follower,) = streams_of(client), followers_of(worker.pid)

        class Deadly(publishing.PublishHandle):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                if name == "phase" and value == phase:
                    os.kill(follower, signal.SIGKILL)

        monkeypatch.setattr(publishing, "PublishHandle", Deadly)
        with contextlib.suppress(RolloutError):  # rank 0 may have swapped before it knows
            publisher.publish(tensors(steps[version + 1]), version + 1).applied(120)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            (completion,) = stream.wait().completions
            assert completion.finish_reason == "error" and LOST in (completion.error or "")
            check(prompt, completion, steps)
    assert ended(worker) == FAULT


def kill_a_trainer(order: list[Any], fault: tuple[str, int, int], models: list[Path]) -> None:
    """Run a trainer whose third update ends in a fault: the phase, its ranks, and which one is killed."""
    phase, size, doomed = fault
    commands = [
        [sys.executable, "-c", DOOMED, *map(str, (*order, phase, rank, size, doomed, *models))] for rank in range(size)
    ]
    processes = [subprocess.Popen(command, env=subprocess_environment()) for command in commands]
    try:
        assert processes[doomed].wait(300) == -signal.SIGKILL
        if doomed:
            assert processes[0].wait(300) == 0, "rank 0 knows that the update has failed"
    finally:
        for process in processes:
            process.kill()
            process.wait()
