"""A trainer reports its own log-probs of a result: what the worker answers, what it refuses, where it shows."""

import asyncio
import math
import urllib.request

import numpy as np
import pytest

from tests.support.worker.harness import facts, until
from tests.support.worker.raw_client import RawClient, pack_blob
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.mismatch import Mismatch
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.wire.errors import BadRequest, NotFound

SHIFT = 0.1
WARM = {"temperature": 40.0, "seed": 7}  # so that log-probs are not all next to 0


@pytest.fixture
def reporter(worker: WorkerProcess):
    """A client whose results stay until it acknowledges them."""
    with RolloutClient(worker.endpoint, timeout_s=30.0, acknowledge=False) as client:
        yield client


def generate(client: RolloutClient, request_id: str, n: int = 3) -> GenerateResult:
    result = client.generate("17:", n=n, max_tokens=50, sampling=WARM, request_id=request_id, stop={"ignore_eos": True})
    assert all(completion.logprobs.min() < -0.5 for completion in result.completions)
    return result


def rows(result: GenerateResult, shift: float = 0.0) -> list[np.ndarray]:
    return [completion.logprobs + np.float32(shift) for completion in result.completions]


def test_the_workers_own_log_probs_have_no_mismatch(reporter: RolloutClient) -> None:
    result = generate(reporter, "own")
    found = reporter.report(result, rows(result))
    assert (found.tokens, found.k3_kl, found.mean_abs, found.max_abs) == (150, 0.0, 0.0, 0.0)
    assert found.versions == {0: Mismatch(150)}
    reporter.ack(["own"])


@pytest.mark.parametrize("shift", [SHIFT, -SHIFT])
def test_a_shift_has_the_known_mismatch(reporter: RolloutClient, shift: float) -> None:
    result = generate(reporter, "shifted")
    found = reporter.report("shifted", rows(result, shift))
    assert found.tokens == 150 and found.k3_kl == pytest.approx(math.exp(shift) - 1 - shift, rel=1e-3)
    assert found.mean_abs == pytest.approx(SHIFT, rel=1e-4) and found.max_abs == pytest.approx(SHIFT, rel=1e-3)
    reporter.ack(["shifted"])


def test_unknown_tokens_do_not_count(reporter: RolloutClient) -> None:
    result = generate(reporter, "some")
    some = rows(result, -SHIFT)[1]
    some[10:] = np.nan
    assert reporter.report(result, {1: some}).tokens == 10
    only = reporter.report(result, [None, None, np.full(50, np.nan)])
    assert (only.tokens, only.k3_kl, only.versions[0].tokens) == (0, 0.0, 0)
    reporter.ack(["some"])


def test_reports_are_on_the_page_for_prometheus(worker: WorkerProcess, reporter: RolloutClient) -> None:
    pytest.importorskip("prometheus_client")

    def page() -> dict[str, float]:
        with urllib.request.urlopen(facts(worker.log_path)[0]["metrics_url"], timeout=60) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    def largest_now() -> dict[str, float] | None:
        """Reports again each time: the first interval may also have what the test before has reported."""
        reporter.report(result, rows(result, SHIFT - 5.0))
        now = page()
        return now if now.get("rollout_mismatch_max_abs") == pytest.approx(4.9, rel=1e-5) else None

    result = generate(reporter, "page")
    shown = until(largest_now, "an interval with these reports alone")
    assert shown["rollout_mismatch_tokens_total"] >= 150
    assert shown["rollout_mismatch_k3_kl"] > 0.5 and shown["rollout_mismatch_mean_abs"] > 0.5
    assert shown['rollout_completion_length_bucket{le="64.0"}'] >= 3 and shown["rollout_completion_length_sum"] >= 150
    reporter.ack(["page"])


def test_log_probs_at_another_temperature_show(reporter: RolloutClient) -> None:
    result = generate(reporter, "raw")
    raw = [completion.raw_logprobs for completion in result.completions]
    assert reporter.report(result, raw).mean_abs > 1.0
    reporter.ack(["raw"])


@pytest.mark.parametrize(
    ("entry", "field", "says"),
    [
        ({"0": np.zeros(49, np.float32)}, "logprobs.0", "50 tokens and the report 49"),
        ({"0": np.zeros(50, np.float32), "2": np.zeros(0, np.float32)}, "logprobs.2", "50 tokens and the report 0"),
        ({"3": np.zeros(50, np.float32)}, "logprobs.3", "none with index 3"),
        ({"0": np.zeros(50, np.int32)}, "logprobs.0", "floats"),
        ({"0": np.zeros((50, 1), np.float32)}, "logprobs.0", "floats"),
        ({"0": np.full(50, -np.inf, np.float32)}, "logprobs.0", "finite"),
        ({"0": np.full(50, 1e300)}, "logprobs.0", "finite"),
        ({"0": np.full(50, 2.0, np.float32)}, "logprobs.0", "at most 0"),
        ({"0": ["x"] * 50}, "logprobs.0", "numbers"),
        ({"00": [0.0] * 50}, "logprobs.00", "zeros"),
        ({"first": [0.0] * 50}, "logprobs.first", "index of a completion"),
        ({}, "logprobs", "at least 1"),
        ([[0.0] * 50], "logprobs", "map"),
    ],
)
def test_wrong_reports_are_refused_by_name_and_not_counted(
    reporter: RolloutClient, entry: object, field: str, says: str
) -> None:
    generate(reporter, "wrong")
    with pytest.raises(BadRequest, match=says) as caught:
        reporter.control("report", target="wrong", logprobs=entry)
    assert caught.value.field == field
    reporter.ack(["wrong"])


def test_an_unknown_result_has_its_own_error(reporter: RolloutClient) -> None:
    result = generate(reporter, "gone")
    reporter.ack(["gone"])
    with pytest.raises(NotFound, match="report before 'ack'"):
        reporter.report(result, rows(result))
    with reporter.generate("17:", max_tokens=20_000, stream="tokens", request_id="flies") as stream:
        next(stream)
        with pytest.raises(BadRequest, match="in flight"):
            reporter.report("flies", [[0.0]])
        stream.cancel()
        stream.wait()
    reporter.ack(["flies"])


def test_a_client_that_acknowledges_by_itself_gets_an_error(client: RolloutClient) -> None:
    result = client.generate("17:", max_tokens=4)
    with pytest.raises(ValueError, match="acknowledge=False"):
        client.report(result, [completion.logprobs for completion in result.completions])


def test_wrong_values_are_refused_before_they_are_sent(reporter: RolloutClient) -> None:
    for wrong, says in (([], "no log-probs"), ([None], "no log-probs"), (["x"], "not an array"), ([[[0.0]]], "shape")):
        with pytest.raises(ValueError, match=says):
            reporter.report("x", wrong)


def test_the_asyncio_client_reports_many_results_at_once(worker: WorkerProcess) -> None:
    async def run() -> list[Mismatch]:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=30.0, acknowledge=False) as client:
            many = await client.generate_many(["17:"] * 20, n=2, max_tokens=30, sampling=WARM)
            reports = [client.report(result, rows(result, -SHIFT)) for result in many]
            found = await asyncio.gather(*reports)
            await client.ack([result.id for result in many])
            return found

    for found in asyncio.run(run()):
        assert found.tokens <= 60 and found.mean_abs == pytest.approx(SHIFT, rel=1e-4)


def test_the_raw_protocol_reports_with_blobs_and_with_lists(raw: RawClient) -> None:
    reply = raw.ask("generate", "g", prompt="17:", n=2, max_tokens=8, sampling=WARM, stop={"ignore_eos": True})
    first, second = (completion["logprobs"] for completion in reply["completions"])
    reference, blob = pack_blob([value - SHIFT for value in first], "<f4")
    answer = raw.ask("report", "r", (blob,), target="g", logprobs={"0": reference, "1": [*second[:4], *[math.nan] * 4]})
    assert answer.keys() == {"v", "op", "id", "tokens", "k3_kl", "mean_abs", "max_abs", "versions"}
    assert answer["op"] == "ok" and answer["tokens"] == 12
    assert answer["mean_abs"] == pytest.approx(SHIFT * 8 / 12, rel=1e-4)
    assert answer["k3_kl"] == pytest.approx((math.exp(-SHIFT) - 1 + SHIFT) * 8 / 12, rel=1e-3)
    (version,) = answer["versions"]
    assert version["version"] == 0 and version["tokens"] == 12
    assert raw.ask("ack", "k", targets=["g"])["op"] == "ok"
    gone = raw.ask("report", "r2", target="g", logprobs={"0": first})
    assert (gone["code"], gone["field"]) == ("not_found", "target")


def test_tokens_that_came_from_elsewhere_have_no_version(reporter: RolloutClient) -> None:
    (known,) = generate(reporter, "first", n=1).completions
    reporter.ack(["first"])
    old = {"token_ids": known.token_ids[:20], "seed": known.seed}

    result = reporter.generate(
        "17:", max_tokens=50, sampling={"temperature": 40.0}, request_id="on", stop={"ignore_eos": True},
        continue_from={**old, "logprobs": known.logprobs[:20]},
    )  # fmt: skip
    found = reporter.report(result, rows(result))
    assert (found.tokens, {version: part.tokens for version, part in found.versions.items()}) == (50, {0: 30})
    reporter.ack(["on"])
    bare = reporter.generate(
        "17:", max_tokens=50, sampling={"temperature": 40.0}, request_id="bare", stop={"ignore_eos": True},
        continue_from=old,
    )  # fmt: skip
    assert reporter.report(bare, [np.zeros(50)]).tokens == 30, "what the worker does not know does not count"
    reporter.ack(["bare"])
