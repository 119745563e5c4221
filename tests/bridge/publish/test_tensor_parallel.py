"""A tensor-parallel trainer of two ranks, whose parts reach a worker of two ranks, by gloo."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.bridge.fault_client import FaultServer
from tests.support.bridge.fsdp_trainer import RANKS, counting_step
from tests.support.bridge.harness import TinyModel, new_tensors, wait_for
from tests.support.bridge.tensor_group import GroupWorker
from tests.support.worker.harness import assert_idle, check, launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.transports.payload import Payload


def train(
    faults: FaultServer, endpoint: str, folder: Path, updates: int, counting: bool, meanwhile: Any = None
) -> list[dict]:
    """Run both ranks; what each saw. `meanwhile` is called until they have ended."""
    order = {"endpoints": [endpoint], "updates": updates, "counting": counting, "folder": str(folder)}
    files = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    with ExitStack() as stack:
        for rank in range(RANKS):
            stack.enter_context(faults.child(role="tensor parallel", rank=rank, **order))
        while meanwhile is not None and not all(file.exists() for file in files):
            meanwhile()
        for file in files:
            wait_for(file.exists, f"the end of {file.stem}", 120)
    return [json.loads(file.read_text()) for file in files]


def of_version(noted: list[list[int]], version: int) -> int:
    return sum(nbytes for at, nbytes in noted if at == version)


def test_each_rank_sends_its_parts_and_each_rank_of_the_worker_keeps_its_own(
    faults: FaultServer, tmp_path: Path
) -> None:
    with GroupWorker(2, relay_bytes=512, idle_s=60.0) as worker:
        seen = train(faults, worker.endpoint, tmp_path, 3, counting=False)
        tensors = new_tensors(TinyModel(), 3)
        assert worker.serve(tensors)
        assert [update.version for update in worker.updates] == [1, 2, 3]
    nbytes = Payload(tensors, 1, None).manifest.total_bytes
    for version in (1, 2, 3):
        sent = [of_version(rank["packed"], version) for rank in seen]
        assert sum(sent) == nbytes, "every byte is sent once"
        assert sent[1] > nbytes / 3
        assert of_version(seen[0]["fetched"], version) == 0, "nothing is gathered, whether cut by outputs or by inputs"


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_hundred_updates_reach_two_ranks_that_decode(faults: FaultServer, tmp_path: Path) -> None:
    """Every token is that of the version which it has, on prompts of several lengths at once."""
    flags: dict[str, Any] = {"tensor_parallel": 2, "device": "cpu", "max_rows": 8, "max_context_tokens": 2048}
    flags["kv_on_swap"] = "keep"  # else updates wait for the recomputation of the rows
    steps = {0: 1} | {version: counting_step(version) for version in range(1, 101)}
    completions = []
    with launch(log=tmp_path / "worker.log", check_ranks=True, **flags) as worker:
        with RolloutClient(worker.endpoint, timeout_s=120) as client:

            def load() -> None:
                prompts = ["17:", "2024:", "5:", "999:"]
                asked = [{"prompt": prompt, "max_tokens": 200} for prompt in prompts]
                for prompt, result in zip(prompts, client.generate_many(asked), strict=True):
                    completions.append((prompt, result.completions[0]))

            seen = train(faults, worker.endpoint, tmp_path, 100, counting=True, meanwhile=load)
            load()
        assert_idle(worker)
    assert seen[0]["versions"] == [[version] for version in range(1, 101)]
    for prompt, completion in completions:
        check(prompt, completion, steps)
    assert len({version for _, completion in completions for _, version in completion.versions}) > 10
