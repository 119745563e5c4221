"""What results, chunks and reports print: numbers of tokens, and no arrays."""

import json
from dataclasses import replace

import numpy as np

from tests.support.bridge.scripted_worker import completion, result
from trainer_bridge.client.results import Chunk, GenerateResult, Status, read_completion, read_result
from trainer_bridge.publish.handle import WorkerReport
from trainer_bridge.wire.prompt_tops import PromptTops

TOKENS = 16_384


def long_result(n: int) -> GenerateResult:
    more = {"top_ids": np.zeros((TOKENS, 5), np.int32), "top_logprobs": np.zeros((TOKENS, 5), np.float32)}
    items = [completion(list(range(TOKENS)), index, text="word " * TOKENS, **more) for index in range(n)]
    read = read_result({**result(items), "id": "r"}, "tcp://127.0.0.1:1")
    tops = PromptTops.unknown(TOKENS, 5)
    return replace(read, prompt_logprobs=np.zeros(TOKENS, np.float32), prompt_tops=tops, metadata={"a": [1] * TOKENS})


def test_a_result_prints_on_a_line_whatever_its_length() -> None:
    for n in (1, 64):
        whole = long_result(n)
        for value in (whole, whole.completions[0], Chunk(64, whole.completions[0]), whole.prompt_tops):
            assert len(repr(value)) < 2000 and str(TOKENS) in repr(value)
        assert "[1, 2" not in repr(whole)


def test_completions_of_many_versions_print_on_a_line() -> None:
    fields = {**completion(list(range(TOKENS))), "versions": [[version, 1] for version in range(TOKENS)]}
    assert len(repr(read_completion(fields))) < 500


def test_what_a_short_completion_prints_tells_it() -> None:
    fields = {**completion([1, 2, 3], 4), "finish_reason": "stop", "stop": 7, "text": "a b"}
    printed = repr(read_completion(fields))
    for fact in ("index=4", "tokens=3", "'stop'", "stop=7", "'a b'", "(3, 3)"):
        assert fact in printed


def test_a_status_prints_its_main_fields_and_is_a_map() -> None:
    fields = {"state": "serving", "weights_version": 3, "tokens_by_second": [7.5] * 1000}
    status = Status(fields)
    assert "serving" in repr(status) and "7.5" not in repr(status)
    assert status == fields and json.loads(json.dumps(status)) == fields


def test_a_report_prints_its_seconds_rounded() -> None:
    report = WorkerReport("tcp://a:1", 3, "zmq", "", 1 << 30, 0.0123456789, 1.23456789, {"receive": 0.123456789})
    assert "0.0123" in repr(report) and "0.012345" not in repr(report) and "0.12345" not in repr(report)
