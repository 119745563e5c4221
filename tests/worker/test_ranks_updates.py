"""Updates of a worker of two ranks that decodes: every token is one of the version that it names."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.harness import assert_idle, check, launch, tensors
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError


@pytest.mark.parametrize("deltas", [None, "host"])
@pytest.mark.parametrize("apply", [pytest.param(way, marks=pytest.mark.nightly) for way in ("in_place", "staged")])
def test_updates_come_amid_a_completion_and_a_refused_one_changes_nothing(
    tmp_path: Path, apply: str, deltas: Any
) -> None:
    flags: dict[str, Any] = {"tensor_parallel": 2, "device": "cpu", "max_rows": 4, "max_context_tokens": 4096}
    steps = {version: 1 + version % 2 for version in range(7)} | {0: 1}
    flags["kv_on_swap"] = "keep"
    with (
        launch(log=tmp_path / "worker.log", apply=apply, check_ranks=True, **flags) as worker,
        RolloutClient(worker.endpoint, timeout_s=600) as client,
        WeightPublisher(worker.endpoint, bucket_bytes=4096, deltas=deltas) as publisher,
    ):
        assert client.status()["weights"]["apply"] == apply
        stream = client.generate("17:", max_tokens=3000, stream="tokens", stream_every=4)
        for version in range(1, 7):
            next(stream)
            (report,) = publisher.publish(tensors(steps[version]), version).applied(60)
            assert report.version == version
            assert (report.sent_nbytes < report.nbytes) == (deltas is not None and version > 1)
        lacking = dict(list(tensors(1).items())[1:])
        with pytest.raises(RolloutError, match="missing tensors"):
            publisher.publish(lacking, 7).applied(60)
        next(stream)
        stream.cancel()
        (completion,) = stream.wait().completions
        check("17:", completion, steps)
        assert [version for version, _ in completion.versions][-1] == 6 and len(completion.versions) > 3
        assert_idle(worker)
        assert "cannot be read" not in (tmp_path / "worker.log").read_text()  # each rank read the publisher's memory
