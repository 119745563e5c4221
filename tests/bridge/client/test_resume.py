"""Clients that resume: the worker that goes on, the messages sent, the caller's view, and when they give up."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engine.sequence.sequence import row_seed
from tests.support.bridge.client_script import Connect, Serve, SetClock
from tests.support.bridge.model_script import Model, check, columns, letters, refuse, silent, vanish
from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from trainer_bridge.client import resume
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire import errors

SEED = 11
SEEDS = [completion_seed(SEED, index) for index in range(4)]


def generates(worker: ScriptedWorker) -> list[dict[str, Any]]:
    return [header for header in worker.requests if header["op"] == "generate"]


@pytest.mark.parametrize("seed", [0, 1, 77, 2**63 - 1])
def test_client_and_worker_derive_the_same_seeds(seed: int) -> None:
    assert [completion_seed(seed, index) for index in range(9)] == [row_seed(seed, index) for index in range(9)]


def test_the_protocol_page_has_the_derivation_with_a_true_example() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "protocol.md").read_text()
    assert str(completion_seed(7, 3)) in page


def test_a_lost_completion_goes_on_elsewhere_with_all_that_the_request_said(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(5))
    client = connect(first.endpoint, second.endpoint, resume=True)
    said = {"priority": 4, "stop": {"token_ids": [9], "min_tokens": 3}, "metadata": {"step": 7}, "stream_every": 2}
    result = client.generate([1, 2], max_tokens=9, seed=SEED, temperature=0.5, request_id="r", **said)
    check(result.completions[0], SEEDS[0], 9, [(3, 4), (5, 5)])
    assert result.completions[0].finish_reason == "length"
    assert (result.id, result.resumes, result.metadata, result.worker) == ("r", 1, {"step": 7}, "w5")
    assert (result.prompt_tokens, result.extra["seed"], result.endpoint) == (2, SEED, second.endpoint)
    (sent,) = generates(second)
    assert {name: sent[name] for name in said} == said and sent["sampling"] == {"temperature": 0.5}
    assert sent["max_tokens"] == 9 and sent["continue_from"]["versions"] == [[3, 4]] and "n" not in sent
    assert sent["prompt"].tolist() == [1, 2] and sent["continue_from"]["token_ids"].tolist() == [
        *columns(SEEDS[0], 0, 4, 3)["token_ids"]
    ]


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_wall_clock_that_jumps_changes_no_deadline_and_no_time(
    connect: Connect, serve: Serve, set_clock: SetClock, jump_s: float
) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(5))
    client = connect(first.endpoint, second.endpoint, resume=True)
    stream = client.generate([1], max_tokens=9, seed=SEED, stream="tokens", deadline_s=3_600.0)
    next(stream)
    set_clock(jump_s)
    result = stream.wait()
    assert result.completions[0].finish_reason == "length" and result.resumes == 1
    assert 0 < result.timing.total_s < 600
    (sent,) = generates(second)
    assert 3_000 < sent["deadline_s"] <= 3_600


def test_members_of_a_group_go_on_by_themselves_each_from_its_own_seed(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(6, 0, 3), fail=vanish)), serve(Model(4))
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], n=3, max_tokens=6, seed=SEED)
    check(result.completions[0], SEEDS[0], 6, [(3, 6)])
    check(result.completions[1], SEEDS[1], 6, [(4, 6)])
    check(result.completions[2], SEEDS[2], 6, [(3, 3), (4, 3)])
    asked = [
        (header["continue_from"]["seed"], len(header["continue_from"]["token_ids"])) for header in generates(second)
    ]
    assert asked == [(SEEDS[1], 0), (SEEDS[2], 3)] and result.resumes == 2


def test_once_enough_of_a_scattered_group_are_complete_the_others_are_cancelled(connect: Connect, serve: Serve) -> None:
    waiting: dict[str, tuple[bytes, dict[str, Any]]] = {}
    whole = Model(4)

    def one_only(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "generate" and header["continue_from"]["seed"] != SEEDS[1]:
            waiting[header["id"]] = peer, header
            return
        whole(worker, peer, header)
        if header["op"] == "cancel" and header["target"] in waiting:
            refuse("unavailable")(worker, *waiting.pop(header["target"]))

    first, second = serve(Model(3, reach=(6, 0, 3, 1), fail=vanish)), serve(one_only)
    client = connect(first.endpoint, second.endpoint, resume=True)
    result = client.generate([1], n=4, max_tokens=6, seed=SEED, min_complete=2)
    assert [part.finish_reason for part in result.completions] == ["length", "length", "cancelled", "cancelled"]
    assert [len(part) for part in result.completions] == [6, 6, 3, 1]


def test_a_group_that_had_not_begun_is_sent_whole_with_the_same_seed(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(reach=(0, 0), fail=vanish)), serve(Model())
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], n=2, max_tokens=4)
    (before,), (after,) = generates(first), generates(second)
    assert before["sampling"]["seed"] == after["sampling"]["seed"] and after["n"] == 2 and "continue_from" not in after
    for index in range(2):
        check(result.completions[index], completion_seed(after["sampling"]["seed"], index), 4, [(3, 4)])


def test_a_stream_of_tokens_brings_each_once_over_a_restart_at_the_same_endpoint(
    connect: Connect, serve: Serve
) -> None:
    first = serve(Model(3, reach=(4, 3), fail=silent))
    stream = connect(first.endpoint, resume=True).generate([1], n=2, max_tokens=8, seed=SEED, stream="tokens")
    seen = [next(stream) for _ in range(4)]
    first.stop()
    again = serve(Model(4), endpoint=first.endpoint)
    seen += list(stream)
    for index in range(2):
        tokens = [number for chunk in seen if chunk.index == index for number in chunk.token_ids.tolist()]
        assert tokens == columns(SEEDS[index], 0, 8, 0)["token_ids"].tolist()
        check(stream.result.completions[index], SEEDS[index], 8, [(3, 4 - index), (4, 4 + index)])
        check(stream.partials()[index], SEEDS[index], 8, [(3, 4 - index), (4, 4 + index)])
    assert [chunk.finish_reason for chunk in seen].count("length") == 2 and len(generates(again)) == 2


def test_a_stream_of_completions_brings_each_whole(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(2, 6), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    stream = client.generate([1], n=2, max_tokens=6, seed=SEED, stream="completions")
    one, other = list(stream)
    check(one, SEEDS[1], 6, [(3, 6)])
    check(other, SEEDS[0], 6, [(3, 2), (4, 4)])


def test_a_completion_of_the_callers_goes_on_too(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(6,), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    known = {name: value for name, value in columns(SEEDS[2], 0, 2, 1).items() if name != "drawn_logprobs"}
    stream = client.generate([1], max_tokens=9, continue_from=known, stream="tokens")
    assert [chunk.offset for chunk in stream] == [2, 4, 6, 8]
    check(stream.result.completions[0], SEEDS[2], 9, [(1, 2), (3, 4), (4, 3)])
    assert generates(second)[0]["continue_from"]["versions"] == [[1, 2], [3, 4]]


def test_text_and_drawn_logprobs_are_whole(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(5,), fail=vanish, drawn=True)), serve(Model(4, drawn=True))
    client = connect(first.endpoint, second.endpoint, resume=True)
    stream = client.generate([1], max_tokens=9, seed=SEED, return_text=True, top_k=5, stream="tokens")
    assert "".join(chunk.part.text for chunk in stream) == letters(SEEDS[0], 0, 9)
    assert stream.result.completions[0].text == letters(SEEDS[0], 0, 9)
    check(stream.result.completions[0], SEEDS[0], 9, [(3, 5), (4, 4)], drawn=True)
    assert generates(second)[0]["continue_from"]["text_chars"] == 4


def test_text_before_the_callers_completion_is_in_the_result(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(6,), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    result = client.generate([1], max_tokens=9, continue_from=columns(SEEDS[0], 0, 2, 1), return_text=True)
    assert result.completions[0].text == letters(SEEDS[0], 0, 9)
    assert generates(first)[0]["continue_from"]["text_chars"] == 0


def hand_back(reason: str, late_s: float = 0.0) -> Any:
    """End completion 0 as a worker does that ends, or whose device failed."""

    def fail(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        have = {**columns(SEEDS[0], 0, 4, 3), "index": 0, "finish_reason": reason, "error": "it ends"}
        chunk = {**have, **columns(SEEDS[0], 4, 4, 3), "offset": 4}
        worker.reply(peer, header, {"op": "chunk", **chunk})
        time.sleep(late_s)
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "preemptions": 0, "timing": {}}
        worker.reply(peer, header, {"op": "result", "completions": [have], **counts})

    return fail


@pytest.mark.parametrize(
    "fail",
    [refuse("unavailable"), refuse("internal"), hand_back("cancelled"), hand_back("error"), vanish],
    ids=["unavailable", "internal", "handed back", "failed", "killed"],
)
def test_whatever_ends_a_worker_the_completion_goes_on(connect: Connect, serve: Serve, fail: Any) -> None:
    first, second = serve(Model(3, reach=(4,), fail=fail)), serve(Model(4))
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    check(result.completions[0], SEEDS[0], 8, [(3, 4), (4, 4)])
    assert result.completions[0].finish_reason == "length" and result.completions[0].error is None
    assert len(generates(first)) == 1


def test_a_worker_that_refused_is_not_asked_again_while_there_are_others(connect: Connect, serve: Serve) -> None:
    busy, draining = serve(Model(3, reach=(1,), fail=silent)), serve(refuse("unavailable"))
    client = connect(busy.endpoint, draining.endpoint, resume=True)
    streams = [client.generate([1], max_tokens=8, seed=SEED, stream="tokens", endpoint=busy.endpoint) for _ in range(3)]
    assert all(next(stream).offset == 0 for stream in streams)
    busy.handler = Model(4)
    result = client.generate([1], max_tokens=8, seed=SEED)
    check(result.completions[0], SEEDS[0], 8, [(4, 8)])
    assert len(generates(draining)) == 1


def test_a_cancel_of_somebody_else_is_the_end(connect: Connect, serve: Serve) -> None:
    def cancelled(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        have = {**columns(SEEDS[0], 0, 4, 3), "index": 0, "finish_reason": "cancelled"}
        worker.reply(peer, header, {"op": "chunk", **have, **columns(SEEDS[0], 4, 4, 3), "offset": 4})
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "preemptions": 0, "timing": {}}
        worker.reply(peer, header, {"op": "result", "completions": [have], **counts})

    worker = serve(Model(3, reach=(4,), fail=cancelled))
    result = connect(worker.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    assert result.completions[0].finish_reason == "cancelled" and len(result.completions[0]) == 4


def test_a_cancel_of_the_caller_ends_what_waits_for_a_worker(connect: Connect, serve: Serve) -> None:
    worker = serve(Model(3, reach=(4, 2), fail=vanish))
    stream = connect(worker.endpoint, resume=True).generate([1], n=2, max_tokens=8, seed=SEED, stream="tokens")
    assert [next(stream).index for _ in range(3)] == [0, 0, 1]
    worker.stop()
    assert stream.result is None
    stream.cancel()
    result = stream.wait()
    assert [(len(item), item.finish_reason) for item in result.completions] == [(4, "cancelled"), (2, "cancelled")]
    assert generates(worker)[0]["id"] == stream.id


def test_a_full_worker_is_asked_again_for_what_had_begun_only(connect: Connect, serve: Serve) -> None:
    asked: list[float] = []

    def full_twice(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        asked.append(time.monotonic())
        if header["op"] == "generate" and len(asked) <= 2:
            refuse("overloaded", retry_after_s=0.05)(worker, peer, header)
        else:
            Model(4)(worker, peer, header)

    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(full_twice)
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    check(result.completions[0], SEEDS[0], 8, [(3, 4), (4, 4)])
    assert len(asked) == 3 and asked[2] - asked[0] >= 0.1
    full = serve(refuse("overloaded", retry_after_s=9.0))
    with pytest.raises(errors.Overloaded):
        connect(full.endpoint, resume=True).generate([1], max_tokens=8)


def test_a_continuation_that_is_refused_for_good_brings_what_there_was(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(refuse("too_long"))
    with pytest.raises(errors.TooLong) as caught:
        connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    check(caught.value.partials[0], SEEDS[0], 4, [(3, 4)])


def test_workers_that_fail_in_a_row_are_enough_at_some_point(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(refuse("internal"))
    client = connect(first.endpoint, second.endpoint, resume=True, resume_max_faults=3)
    with pytest.raises(errors.ResumeFailed, match="4 workers in a row") as caught:
        client.generate([1], max_tokens=8, seed=SEED)
    check(caught.value.partials[0], SEEDS[0], 4, [(3, 4)])
    assert isinstance(caught.value.__cause__, errors.InternalError) and len(generates(second)) == 3


@pytest.mark.parametrize("streamed", [True, False])
def test_a_group_that_every_worker_fails_at_ends_with_the_workers_words(
    connect: Connect, serve: Serve, streamed: bool
) -> None:
    def fail(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] != "generate":
            counting(worker, peer, header)
            return
        known = header.get("continue_from")
        seeds = SEEDS[:2] if known is None else [known["seed"]]
        nothing = {"finish_reason": "error", "error": "its logits are not finite"}
        ended = [{**columns(seed, 0, 0, 3), **nothing, "index": index} for index, seed in enumerate(seeds)]
        for each in ended if streamed else ():
            worker.reply(peer, header, {"op": "chunk", **each, "offset": 0})
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "preemptions": 0, "timing": {}}
        worker.reply(peer, header, {"op": "result", "completions": ended, **counts})

    client = connect(serve(fail).endpoint, resume=True, resume_max_faults=2)
    with pytest.raises(errors.ResumeFailed, match="3 workers in a row.*logits are not finite") as caught:
        client.generate([1], n=2, max_tokens=8, seed=SEED)
    assert len(caught.value.partials) == 2 and isinstance(caught.value.__cause__, errors.InternalError)


def test_workers_that_fail_after_new_tokens_are_not_counted(connect: Connect, serve: Serve) -> None:
    def two_more(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        known = len(header["continue_from"]["token_ids"]) if "continue_from" in header else 0
        done = known + 2 >= header["max_tokens"]
        Model(reach=None if done else (known + 2,), fail=None if done else refuse("internal"))(worker, peer, header)

    worker = serve(two_more)
    result = connect(worker.endpoint, resume=True, resume_max_faults=1).generate([1], max_tokens=12, seed=SEED)
    check(result.completions[0], SEEDS[0], 12, [(3, 12)])
    assert result.resumes == 5


def test_without_a_worker_it_ends_after_the_given_time(connect: Connect, serve: Serve) -> None:
    worker = serve(Model(3, reach=(4,), fail=vanish))
    client = connect(worker.endpoint, resume=True, resume_timeout_s=0.4)
    with pytest.raises(errors.ResumeFailed, match="no worker went on with completion 0 for 0.4 s") as caught:
        client.generate([1], max_tokens=8, seed=SEED, request_id="r")
    check(caught.value.partials[0], SEEDS[0], 4, [(3, 4)])
    assert caught.value.request_id == "r" and isinstance(caught.value.__cause__, errors.ConnectionLost)


def test_the_callers_own_time_limit_holds_over_all_workers(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = serve(Model(3, reach=(4,), fail=silent))
    asked: dict[str, Any] = {"seed": SEED, "timeout_s": 50.0, "request_id": "r", "stream": "tokens"}
    stream = connect(worker.endpoint, resume=True).generate([1], max_tokens=8, **asked)
    assert [next(stream).offset for _ in range(2)] == [0, 2]
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 50.0)
    with monkeypatch.context() as patch, pytest.raises(errors.RolloutTimeout) as caught:
        patch.setattr(resume, "time", later)
        next(stream)
    check(caught.value.partials[0], SEEDS[0], 4, [(3, 4)])
    assert worker.next("cancel")["target"] == "r"


def test_what_is_left_of_the_deadline_is_sent(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(4))
    connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, deadline_s=50.0)
    (sent,) = generates(second)
    assert 30.0 < sent["deadline_s"] < 50.0


def test_the_deadline_passes_without_a_worker_too(connect: Connect, serve: Serve) -> None:
    worker = serve(Model(3, reach=(4,), fail=vanish))
    result = connect(worker.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED, deadline_s=1.0)
    assert result.completions[0].finish_reason == "deadline"
    check(result.completions[0], SEEDS[0], 4, [(3, 4)])


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_the_deadline_has_passed_when_a_worker_gives_it_back(connect: Connect, serve: Serve, reason: str) -> None:
    def late(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        time.sleep(0.3)
        hand_back(reason)(worker, peer, header)

    worker = serve(Model(3, reach=(4,), fail=late))
    result = connect(worker.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED, deadline_s=0.2)
    assert (result.completions[0].finish_reason, result.completions[0].error) == ("deadline", None)
    check(result.completions[0], SEEDS[0], 4, [(3, 4)])
    assert (result.resumes, result.prompt_tokens, result.endpoint) == (0, 1, worker.endpoint)


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_a_cancelled_request_that_a_worker_gives_back_is_cancelled(connect: Connect, serve: Serve, reason: str) -> None:
    def wait(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        assert worker.has_more(60_000)  # the cancel
        hand_back(reason)(worker, peer, header)

    worker = serve(Model(3, reach=(4,), fail=wait))
    stream = connect(worker.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED, stream="tokens")
    assert [next(stream).offset for _ in range(2)] == [0, 2]
    stream.cancel()
    result = stream.wait()
    assert (result.completions[0].finish_reason, result.completions[0].error) == ("cancelled", None)
    check(result.completions[0], SEEDS[0], 4, [(3, 4)])


def test_a_stream_that_was_cut_for_slowness_is_completed_from_the_result(connect: Connect, serve: Serve) -> None:
    def skip(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "preemptions": 0, "timing": {}}
        whole = {**columns(SEEDS[0], 0, 8, 3), "index": 0, "finish_reason": "stop", "stop": 5}
        worker.reply(peer, header, {"op": "result", "completions": [whole], **counts})

    worker = serve(Model(3, reach=(4,), fail=skip))
    stream = connect(worker.endpoint, resume=True).generate([1], max_tokens=99, seed=SEED, stream="tokens")
    assert [(chunk.offset, len(chunk.token_ids), chunk.finish_reason) for chunk in stream] == [
        (0, 2, None),
        (2, 2, None),
        (4, 4, "stop"),
    ]
    for completion in (stream.result.completions[0], stream.partials()[0]):
        check(completion, SEEDS[0], 8, [(3, 8)])


def test_a_result_that_is_not_what_its_stream_was_is_an_error(connect: Connect, serve: Serve) -> None:
    def lie(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "preemptions": 0, "timing": {}}
        whole = {**columns(SEEDS[1], 0, 8, 3), "index": 0, "finish_reason": "length", "seed": SEEDS[0]}
        worker.reply(peer, header, {"op": "result", "completions": [whole], **counts})

    worker = serve(Model(3, reach=(4,), fail=lie))
    with pytest.raises(errors.ProtocolError, match="differs from its stream"):
        connect(worker.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)


def test_a_worker_that_derives_other_seeds_is_an_error(connect: Connect, serve: Serve) -> None:
    def other(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        chunk = {**columns(SEEDS[1], 0, 2, 3), "index": 0, "offset": 0}
        worker.reply(peer, header, {"op": "chunk", **chunk})

    with pytest.raises(errors.ProtocolError, match="could not be continued"):
        connect(serve(other).endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)


def test_a_last_token_without_the_word_that_it_is_the_last_ends_the_completion(connect: Connect, serve: Serve) -> None:
    def almost(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(peer, header, {"op": "chunk", **columns(SEEDS[0], 0, 8, 3), "index": 0, "offset": 0})
        worker.vanish()

    first, second = serve(almost), serve(Model(4))
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    assert result.completions[0].finish_reason == "length" and not generates(second)
    check(result.completions[0], SEEDS[0], 8, [(3, 8)])


def test_many_requests_over_workers_that_die_are_all_answered(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(3, 0), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    asked = [{"prompt": [1], "seed": seed} for seed in range(12)]
    results = client.generate_many(asked, n=2, max_tokens=6, max_in_flight=5)
    for seed, result in enumerate(results):
        for index, completion in enumerate(result.completions):
            assert completion.token_ids.tolist() == columns(completion_seed(seed, index), 0, 6, 0)["token_ids"].tolist()
    assert any(result.resumes for result in results)


def test_a_stream_that_is_left_is_cancelled_where_it_runs_now(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(4, reach=(6,), fail=silent))
    client = connect(first.endpoint, second.endpoint, resume=True)
    stream = client.generate([1], max_tokens=8, seed=SEED, stream="tokens")
    assert [next(stream).offset for _ in range(3)] == [0, 2, 4]
    assert stream.endpoint == second.endpoint
    leg = generates(second)[0]["id"]
    stream.close()
    client.ping(endpoint=second.endpoint)
    assert second.next("cancel")["target"] == leg


def test_a_named_client_ends_what_a_lost_connection_may_have_left(connect: Connect, serve: Serve) -> None:
    first = serve(Model(3, reach=(4,), fail=silent))
    client = connect(first.endpoint, resume=True, client="trainer")
    stream = client.generate([1], max_tokens=8, seed=SEED, stream="tokens", request_id="r")
    assert [next(stream).offset for _ in range(2)] == [0, 2]
    first.stop()
    again = serve(Model(4), endpoint=first.endpoint)
    stream.wait()
    assert [header["op"] for header in again.requests] == ["cancel", "generate"]
    assert again.requests[0]["target"] == "r" and again.requests[1]["id"] != "r"


def test_a_session_moves_when_its_endpoint_is_gone(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    client.generate([1], max_tokens=8, session="s")
    client.generate([1], max_tokens=8, session="s")
    assert len(generates(second)) == 2


@pytest.mark.parametrize("fail", [refuse("unavailable"), refuse("internal"), hand_back("cancelled")])
def test_a_session_moves_when_its_endpoint_refuses(connect: Connect, serve: Serve, fail: Any) -> None:
    """A worker that drains is there for long, and answers."""
    first, second = serve(Model(3)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    places = [client.generate([1], max_tokens=8, seed=SEED, session="s").endpoint]
    (there, other) = (first, second) if places[0] == first.endpoint else (second, first)
    there.handler = Model(3, reach=(4,), fail=fail)
    places += [client.generate([1], max_tokens=8, seed=SEED, session="s").endpoint for _ in range(3)]
    assert places[1:] == [other.endpoint] * 3
    assert len(generates(there)) == 2


def test_a_result_is_of_the_worker_that_went_on_whoever_has_the_last_word(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=hand_back("cancelled", late_s=0.3))), serve(Model(4))
    result = connect(first.endpoint, second.endpoint, resume=True).generate([1], max_tokens=8, seed=SEED)
    assert (result.endpoint, result.worker, result.resumes) == (second.endpoint, "w4", 1)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7"])
def test_a_seed_that_is_none_is_refused_at_once(connect: Connect, serve: Serve, seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        connect(serve(Model()).endpoint, resume=True).generate([1], seed=seed)


def test_an_id_is_in_flight_once(connect: Connect, serve: Serve) -> None:
    client = connect(serve(Model(reach=(2,), fail=silent)).endpoint, resume=True)
    client.generate([1], max_tokens=4, stream="tokens", request_id="r")
    with pytest.raises(ValueError, match="in flight already"):
        client.generate([1], max_tokens=4, request_id="r")


def test_an_undisturbed_result_is_the_workers(connect: Connect, serve: Serve) -> None:
    result = connect(serve(Model(3)).endpoint, resume=True).generate(np.array([1, 2]), n=2, max_tokens=6, seed=SEED)
    assert (result.resumes, result.cached_tokens, result.preemptions, result.timing.total_s) == (0, 1, 1, 1.25)
    check(result.completions[1], SEEDS[1], 6, [(3, 6)])
