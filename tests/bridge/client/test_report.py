"""Reports of a trainer's log-probs as the clients send them."""

from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve
from tests.support.bridge.scripted_worker import ScriptedWorker


def measure(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """Answer a report as a worker does that drew every token with log-prob 0."""
    values = np.concatenate(list(header["logprobs"].values()))
    found = {
        "tokens": len(values),
        "k3_kl": float(np.mean(np.exp(values) - 1 - values)),
        "mean_abs": float(np.abs(values).mean()),
        "max_abs": float(np.abs(values).max()),
    }
    worker.reply(peer, header, {"op": "ok", **found, "versions": [{"version": 0, **found}]})


@pytest.mark.parametrize(
    ("rows", "tokens", "messages"), [(300, 2, [128, 128, 44]), (5, 1_700_000, [2, 2, 1])], ids=["rows", "bytes"]
)
def test_a_large_report_travels_in_several_messages(
    connect: Connect, serve: Serve, rows: int, tokens: int, messages: list[int]
) -> None:
    worker = serve(measure)
    logprobs = [np.full(tokens, -0.1 - index / 1000, np.float32) for index in range(rows)]
    found = connect(worker.endpoint, acknowledge=False).report("large", logprobs)
    assert [len(header["logprobs"]) for header in worker.requests] == messages
    assert {header["target"] for header in worker.requests} == {"large"}
    assert [name for header in worker.requests for name in header["logprobs"]] == [str(index) for index in range(rows)]
    assert found.tokens == found.versions[0].tokens == rows * tokens
    assert found.mean_abs == found.versions[0].mean_abs == pytest.approx(0.1 + (rows - 1) / 2000, rel=1e-3)
    assert found.max_abs == pytest.approx(0.1 + (rows - 1) / 1000, rel=1e-4)
