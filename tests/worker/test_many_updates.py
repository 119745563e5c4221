"""Many updates of a worker under load, by each transport and layout, amid publishers that are killed in every phase.

Each version counts in another step than the one before it, so a token of another version than it names is found.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kernels.grids import nightly
from tests.support.worker.harness import ONES, TWOS, assert_idle, check, subprocess_environment, tensors
from tests.support.worker.lost_ranks import PROMPTS, read, streams_of
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher

#: Publishes two versions, and is killed in a phase of a third one: from the second one on, updates come in sections.
DOOMED = """
import os, signal, sys
from pathlib import Path
from safetensors.torch import load_file
from trainer_bridge.publish import publisher

endpoint, transport, folder, version, phase, *models = sys.argv[1:]

class Doomed(publisher.PublishHandle):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "phase" and value == phase and self.version == int(version) + 2:
            os.kill(os.getpid(), signal.SIGKILL)

publisher.PublishHandle = Doomed
sends = publisher.WeightPublisher(endpoint, transport=transport, folder=folder, bucket_bytes=4096)
for number, model in enumerate(models):
    sends.publish(load_file(Path(model) / "model.safetensors"), int(version) + number).applied(600)
"""
PHASES = ("prepare", "begin", "transfer", "commit")
LAYOUTS = [(1, "staged"), (2, "staged"), (2, "in_place")]
EVERY = [(*layout, transport, 100) for layout in LAYOUTS for transport in ("zmq", "shm", "disk", "nccl")]


@pytest.mark.parametrize(("ranks", "apply", "transport", "updates"), [(2, "staged", "shm", 3), *nightly(*EVERY)])
def test_every_token_has_its_version_though_publishers_are_killed_in_every_phase(
    start_ranks: Callable[..., WorkerProcess], tmp_path: Path, ranks: int, apply: str, transport: str, updates: int
) -> None:
    worker = start_ranks(tensor_parallel=ranks, apply=apply, check_ranks=True, kv_on_swap="keep")
    models, steps, version = {1: ONES, 2: TWOS}, {0: 1}, 0
    phases = PHASES if updates > 10 else PHASES[2:3]
    with (
        RolloutClient(worker.endpoint, timeout_s=120.0) as client,
        WeightPublisher(
            worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=4096, apply_s=300
        ) as publisher,
    ):
        streams = streams_of(client)
        for number in range(updates):
            version += 1
            steps[version] = 3 - steps[max(steps)]
            publisher.publish(tensors(steps[version]), version).applied(120)
            read(streams[number % len(streams)], 8)
            if number % max(1, updates // len(phases)) == updates // len(phases) // 2:
                phase = phases[min(number * len(phases) // updates, len(phases) - 1)]
                for more in (1, 2, 3):
                    steps[version + more] = 3 - steps[version + more - 1]
                order = [worker.endpoint, transport, str(tmp_path), str(version + 1), phase]
                order += [str(models[steps[version + more]]) for more in (1, 2, 3)]
                doomed = subprocess.run([sys.executable, "-c", DOOMED, *order], env=subprocess_environment())
                assert doomed.returncode == -9
                version += 3
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, steps)
            assert len(completion.versions) > updates // 2
        assert client.status()["weights"]["version"] == version
    assert_idle(worker)
