"""Reports of trainers at the service: compared beside its thread, bounded, and answered whatever happens."""

import threading

import numpy as np
import pytest

from rollout.metrics.logprob_mismatch import MismatchSums
from rollout.service.delivery.mismatch_reports import compare_result
from tests.support.patience import PATIENCE_S
from tests.support.service.harness import serving

ROW = {"0": np.array([-0.5, -1.5, -2.5], np.float32)}  # the engine of these tests says 0, -1, -2


def finish(bench, client, request_id="a") -> None:
    client.send("generate", request_id, prompt=[1], max_tokens=3)
    bench.finish(bench.submitted())
    assert client.receive()["op"] == "result"


class Gate:
    """Compares once it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return compare_result(*arguments)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def held(gate):
    """A bench whose comparisons wait for the gate."""
    with serving(compare=gate) as bench:
        yield bench


def test_the_answer_and_the_box_have_the_same(bench, client):
    finish(bench, client)
    answer = client.ask("report", "r", target="a", logprobs=ROW)
    assert (answer["op"], answer["tokens"], answer["mean_abs"], answer["max_abs"]) == ("ok", 3, 0.5, 0.5)
    assert answer["versions"] == [
        {"version": 7} | {key: answer[key] for key in ("tokens", "k3_kl", "mean_abs", "max_abs")}
    ]
    found = bench.server.mismatch.take()
    assert (found.tokens, found.k3_kl, found.max_abs) == (3, answer["k3_kl"], 0.5)
    assert bench.server.mismatch.take() == MismatchSums()


def test_one_wrong_row_counts_for_none(bench, client):
    finish(bench, client)
    error = client.ask("report", "r", target="a", logprobs=ROW | {"1": [0.0]})
    assert (error["code"], error["field"]) == ("bad_request", "logprobs.1")
    assert bench.server.mismatch.take() == MismatchSums()


def test_the_service_goes_on_while_a_report_is_compared(held, gate):
    client = held.client()
    finish(held, client)
    client.send("report", "r", target="a", logprobs=ROW)
    assert gate.entered.wait(PATIENCE_S)
    assert client.ask("ping", "p")["op"] == "ok"
    assert client.ask("ack", "k", targets=["a"])["op"] == "ok"
    gate.opened.set()
    answer = client.receive()
    assert (answer["id"], answer["op"], answer["tokens"]) == ("r", "ok", 3), "it was there when the report came"


@pytest.mark.parametrize("limit", [{"max_reports": 2}, {"max_report_bytes": 30}], ids=str)
def test_reports_that_wait_are_bounded(gate, limit):
    with serving(compare=gate, **limit) as bench:
        client = bench.client()
        finish(bench, client)
        for i in range(3):
            client.send("report", f"r{i}", target="a", logprobs=ROW)
        refused = client.receive()
        assert (refused["id"], refused["code"], refused["retry_after_s"]) == ("r2", "overloaded", 1.0)
        gate.opened.set()
        assert [client.receive()["op"] for _ in range(2)] == ["ok", "ok"]
        assert client.ask("report", "r3", target="a", logprobs=ROW)["op"] == "ok", "there is room again"


def test_a_fault_in_the_comparison_ends_nothing_else(caplog):
    def broken(*arguments):
        raise RuntimeError("torn")

    with serving(compare=broken) as bench:
        client = bench.client()
        finish(bench, client)
        error = client.ask("report", "r", target="a", logprobs=ROW)
        assert (error["id"], error["code"]) == ("r", "internal")
        assert any(record.exc_info for record in caplog.records), "the fault is in the log"
        assert client.ask("ping", "p")["op"] == "ok"


def test_who_waits_when_the_service_ends_is_told(held, gate):
    client = held.client()
    finish(held, client)
    client.send("report", "r", target="a", logprobs=ROW)
    assert gate.entered.wait(PATIENCE_S)
    held.server.stop()
    assert client.receive()["code"] == "unavailable"
    gate.opened.set()


def test_a_result_belongs_to_its_client(bench, client):
    finish(bench, client)
    error = bench.client().ask("report", "r", target="a", logprobs=ROW)
    assert (error["code"], error["field"]) == ("not_found", "target")
