"""Trainers of several ranks of which one does not publish: the other hears of it by a deadline, and can close."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault_client import FaultServer
from weights_harness import Worker, wait_for


@pytest.mark.parametrize(("alone", "text"), [(0, "gather: another rank cannot be reached"), (1, "told to stop")])
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
