"""Likeliest tokens and prompt log-probs at the client: typed, whole over lost workers, in journals, asked for once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve
from tests.support.bridge.model_script import (
    PROMPT_CHOSEN,
    PROMPT_ENTROPY,
    PROMPT_LOGPROBS,
    PROMPT_SCORES,
    PROMPT_TOPS,
    Model,
    check,
    columns,
    vanish,
)
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.client.assembly import Assembler
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, read_completion, read_result
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire import errors
from trainer_bridge.wire.prompt_tops import PromptTops

SEED = 11
SEEDS = [completion_seed(SEED, index) for index in range(4)]
UNKNOWN = PromptTops.unknown(2, 2)
SCORED: dict[str, Any] = {
    "prompt_top_logprobs": 2,
    "prompt_logprob_token_ids": np.array([[1, 2, 3], [4, 5, 6]]),
    "prompt_entropy": True,
    "prompt_logprobs_last": 2,
}
ASKED: dict[str, Any] = {"logprobs": 3, "seed": SEED, **SCORED}


def check_tops(part: Completion, seed: int, tokens: int, unknown: int = 0) -> None:
    """Scores of all tokens except the first `unknown`."""
    expected = columns(seed, 0, tokens, 0, tops=3)
    assert part.top_ids is not None and part.top_logprobs is not None
    assert (part.top_ids.dtype, part.top_logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(part.top_ids[unknown:], expected["top_ids"][unknown:])
    np.testing.assert_array_equal(part.top_logprobs[unknown:], expected["top_logprobs"][unknown:])
    assert (part.top_ids[:unknown] == -1).all() and np.isnan(part.top_logprobs[:unknown]).all()
    assert part.top_ids.flags.writeable


def check_prompt(scored: Chunk | GenerateResult) -> None:
    np.testing.assert_array_equal(scored.prompt_logprobs, PROMPT_LOGPROBS)
    tops = scored.prompt_tops
    assert tops is not None and (tops.ranks.dtype, tops.ids.dtype, tops.logprobs.dtype) == (
        np.int32,
        np.int32,
        np.float32,
    )
    for name, values in PROMPT_TOPS.fields().items():
        np.testing.assert_array_equal(tops.fields()[name], values)
    for found, values in (
        (scored.prompt_chosen_logprobs, PROMPT_CHOSEN),
        (scored.prompt_entropy, PROMPT_ENTROPY),
    ):
        assert found is not None and found.dtype == np.float32
        np.testing.assert_array_equal(found, values)


def askers(worker: ScriptedWorker) -> list[int]:
    """The seeds of the completions with which this worker was asked for the prompt's log-probs."""
    return [
        header["continue_from"]["seed"]
        for header in worker.requests
        if header["op"] == "generate" and header.get("prompt_logprobs")
    ]


def test_a_result_has_them(connect: Connect, serve: Serve) -> None:
    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        fields = completion([5, 6], top_ids=[[5, 9], [6, 9]], top_logprobs=[[-0.5, -1.0], [-0.25, -2.0]])
        worker.reply(peer, header, result([fields], prompt_logprobs=PROMPT_LOGPROBS))

    worker = serve(answer)
    done = connect(worker.endpoint).generate([1, 2], max_tokens=2, logprobs=2, prompt_logprobs=True)
    assert (worker.requests[0]["logprobs"], worker.requests[0]["prompt_logprobs"]) == (2, True)
    assert done.completions[0].top_ids.tolist() == [[5, 9], [6, 9]]
    assert done.completions[0].top_logprobs.dtype == np.float32
    np.testing.assert_array_equal(done.prompt_logprobs, PROMPT_LOGPROBS)
    assert "prompt_logprobs" not in done.extra


@pytest.mark.parametrize(
    "fields",
    [
        {"top_ids": [[1], [2]]},
        {"top_ids": [[1], [2]], "top_logprobs": [[0.0]]},
        {"top_ids": [[1]], "top_logprobs": [[0.0]]},
        {"top_ids": [1, 2], "top_logprobs": [[0.0], [0.0]]},
        {"top_ids": [[1.5], [2]], "top_logprobs": [[0.0], [0.0]]},
    ],
)
def test_a_reply_whose_tops_do_not_fit_its_tokens_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolError, match="top_"):
        read_completion(completion([5, 6], **fields))


def test_a_request_for_ranks_asks_for_log_probs_and_has_both(connect: Connect, serve: Serve) -> None:
    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(peer, header, result([completion([5, 6])], **PROMPT_SCORES))

    worker = serve(answer)
    done = connect(worker.endpoint).generate([1, 2], max_tokens=2, prompt_top_logprobs=2)
    assert (worker.requests[0]["prompt_top_logprobs"], worker.requests[0]["prompt_logprobs"]) == (2, True)
    check_prompt(done)
    assert not done.extra.keys() & PROMPT_SCORES.keys()
    assert done.to_dict()["prompt_tops"]["ranks"] == [0, 2]
    assert done.to_dict()["prompt_tops"]["logprobs"] == [[None, None], [-0.25, -0.5]]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ranks": [0]},
        {"prompt_ranks": [[0, 2]]},
        {"prompt_top_ids": [1, 2]},
        {"prompt_top_ids": [[1], [2]]},
        {"prompt_top_logprobs": None},
        {"prompt_top_logprobs": [[0.0, 0.0]]},
        {"prompt_chosen_logprobs": [0.0, 0.0]},
        {"prompt_chosen_logprobs": [[0.0, 0.0]]},
        {"prompt_entropy": [0.0]},
        {"prompt_entropy": "x"},
    ],
)
def test_tops_of_a_prompt_that_do_not_fit_are_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolError, match="prompt_"):
        read_result({"id": "a", **result([completion([5])], **{**PROMPT_SCORES, **fields})})


def test_a_completion_over_two_workers_keeps_them_and_the_prompt_is_scored_once(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=vanish)), serve(Model(5))
    client = connect(first.endpoint, second.endpoint, resume=True)
    stream = client.generate([1, 2], max_tokens=9, stream="tokens", **ASKED)
    chunks = list(stream)
    check_prompt(chunks[0])
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    for done in (stream.result.completions[0], stream.partials()[0]):
        check(done, SEEDS[0], 9, [(3, 4), (5, 5)])
        check_tops(done, SEEDS[0], 9)
    check_prompt(stream.result)
    assert askers(second) == [] and second.requests[0]["logprobs"] == 3


def test_one_member_of_a_scattered_group_asks_for_what_the_first_worker_did_not_tell(
    connect: Connect, serve: Serve
) -> None:
    first, second = serve(Model(3, reach=(0, 2, 0), fail=vanish)), serve(Model(4))
    client = connect(first.endpoint, second.endpoint, resume=True)
    done = client.generate([1, 2], n=3, max_tokens=6, **ASKED)
    for index in range(3):
        check_tops(done.completions[index], SEEDS[index], 6)
    check_prompt(done)
    assert askers(second) == [SEEDS[0]]


def test_who_was_asked_and_lost_is_followed_by_another(connect: Connect, serve: Serve) -> None:
    lives = iter([Model(3, reach=(2, 0), fail=vanish), Model(4, reach=(0, 0), fail=vanish), Model(5)])
    worker = serve(next(lives))
    stream = connect(worker.endpoint, resume=True).generate([1, 2], n=2, max_tokens=4, stream="completions", **ASKED)
    last = worker
    for model in lives:
        last.stop()
        last = serve(model, endpoint=worker.endpoint)
    parts = {part.index: part for part in stream}
    for index in range(2):
        check_tops(parts[index], SEEDS[index], 4)
    check_prompt(stream.result)


def test_a_prompt_that_was_scored_in_part_is_scored_again(connect: Connect, serve: Serve) -> None:
    def half(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        unknown = np.full(2, np.nan, np.float32)
        part = {
            **columns(SEEDS[0], 0, 2, 3, tops=3),
            "index": 0,
            "offset": 0,
            "prompt_logprobs": unknown,
            **UNKNOWN.fields(),
        }
        worker.reply(peer, header, {"op": "chunk", **part})
        worker.vanish()

    first, second = serve(half), serve(Model(4))
    done = connect(first.endpoint, second.endpoint, resume=True).generate([1, 2], max_tokens=6, **ASKED)
    check_tops(done.completions[0], SEEDS[0], 6)
    check_prompt(done)


def test_a_prompt_that_its_first_chunk_did_not_know_comes_with_the_result(connect: Connect, serve: Serve) -> None:
    """Completion 0 fails before the step with the prompt's end is over, and goes on while that worker has the other."""
    first: list[tuple[bytes, dict[str, Any]]] = []

    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] != "generate":
            return
        failed = {**columns(SEEDS[0], 0, 0, 3, tops=3), "index": 0, "finish_reason": "error", "error": "it hung"}
        whole = {**columns(SEEDS[1], 0, 4, 3, tops=3), "index": 1, "finish_reason": "length"}
        if not first:
            first.append((peer, header))
            unknown = np.full(2, np.nan, np.float32)
            worker.reply(
                peer, header, {"op": "chunk", "offset": 0, "prompt_logprobs": unknown, **UNKNOWN.fields(), **failed}
            )
            return
        worker.reply(*first[0], result([failed, whole], **PROMPT_SCORES))
        Model(4)(worker, peer, header)

    worker = serve(answer)
    done = connect(worker.endpoint, resume=True).generate([1, 2], n=2, max_tokens=4, **ASKED)
    for index in range(2):
        check_tops(done.completions[index], SEEDS[index], 4)
    for name in ("prompt_logprobs", "prompt_top_logprobs"):
        assert [name in header for header in worker.requests if header["op"] == "generate"] == [True, False]
    check_prompt(done)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("sent", [0, 2])
def test_a_stream_that_was_cut_has_the_rest_from_the_result(
    connect: Connect, serve: Serve, resume: bool, sent: int
) -> None:
    def cut(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        once = PROMPT_SCORES
        if sent:
            part = {**columns(SEEDS[0], 0, sent, 3, tops=3), "index": 0, "offset": 0}
            worker.reply(peer, header, {"op": "chunk", **part, **once})
        whole = {**columns(SEEDS[0], 0, 6, 3, tops=3), "index": 0, "finish_reason": "length"}
        worker.reply(peer, header, result([whole], **once))

    stream = connect(serve(cut).endpoint, resume=resume).generate([1, 2], max_tokens=6, stream="tokens", **ASKED)
    chunks = list(stream)
    check_tops(stream.partials()[0], SEEDS[0], 6)
    assert [chunk.offset for chunk in chunks] == [0, sent][: len(chunks)] and len(chunks) == 1 + bool(sent)
    assert [chunk.prompt_logprobs is None for chunk in chunks] == [False, True][: len(chunks)]
    for scored in (chunks[0], stream.result):
        check_prompt(scored)


def test_a_journal_has_them_of_what_is_finished_and_of_what_is_not(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    path, asked = tmp_path / "j", {"max_tokens": 6, **ASKED}
    first = serve(Model(3, reach=(4,), fail=vanish))
    client = connect(first.endpoint, journal=path)
    stream = client.generate([1, 2], request_id="begun", stream="tokens", **asked)
    assert [next(stream).offset for _ in range(2)] == [0, 2]
    client.close()
    second = serve(Model(4))
    for _ in range(2):  # goes on where it was; then it is answered from the file
        client = connect(second.endpoint, journal=path)
        done = client.generate([1, 2], request_id="begun", **asked)
        check_tops(done.completions[0], SEEDS[0], 6)
        assert done.completions[0].versions == [(3, 4), (4, 2)]
        check_prompt(done)
        client.close()
    assert len([header for header in second.requests if header["op"] == "generate"]) == 1 and askers(second) == []


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_is_scored_without_a_token_goes_to_another_worker_when_its_own_is_lost(
    connect: Connect, serve: Serve, tmp_path: Path, n: int
) -> None:
    first, second = serve(Model(3, reach=(0,) * n, fail=vanish)), serve(Model(5))
    path, asked = tmp_path / "j", {"max_tokens": 0, "n": n, "seed": SEED, **SCORED}
    for _ in range(2):  # then it is answered from the file
        client = connect(first.endpoint, second.endpoint, journal=path)
        done = client.generate([1, 2], request_id="r", **asked)
        check_prompt(done)
        assert [(len(part), part.finish_reason) for part in done.completions] == [(0, "length")] * n
        client.close()
    assert len([header for header in second.requests if header["op"] == "generate"]) == 1


@pytest.mark.parametrize("form", ["map", "completion"])
def test_a_completion_of_the_callers_goes_on_with_its_own(connect: Connect, serve: Serve, form: str) -> None:
    known: Any = columns(SEEDS[2], 0, 2, 1, tops=3)
    if form == "completion":
        known = read_completion({**known, "index": 0})
    worker = serve(Model(3))
    stream = connect(worker.endpoint).generate([1, 2], max_tokens=5, logprobs=3, continue_from=known, stream="tokens")
    for _ in stream:
        pass
    check_tops(stream.partials()[0], SEEDS[2], 5)


def test_rows_of_a_completion_that_are_not_wanted_back_are_not_sent() -> None:
    known = read_completion({**columns(SEEDS[0], 0, 2, 1, tops=3), "index": 0})
    plan = plan_request([1, 2], {"continue_from": known})
    assert not {"top_ids", "top_logprobs"} & plan.fields["continue_from"].keys()
    assert plan.prior is not None and plan.prior.top_ids is None


def test_old_tokens_that_came_without_have_none() -> None:
    prior = read_completion({**columns(SEEDS[0], 0, 2, 1), "index": 0})
    assembler = Assembler(1, prior)
    assembler.add(Chunk(2, read_completion({**columns(SEEDS[0], 2, 5, 3, tops=3), "index": 0})))
    check_tops(assembler.joined(0), SEEDS[0], 5, unknown=2)
    assert assembler.prompt.prompt_logprobs is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_map_with_rows_without_entries_has_none(tokens: int) -> None:
    known = {**columns(SEEDS[0], 0, tokens, 1), "top_ids": [[]] * tokens, "top_logprobs": [[]] * tokens}
    plan = plan_request([1, 2], {"continue_from": known, "logprobs": 3})
    assembler = Assembler(1, plan.prior)
    assembler.add(Chunk(tokens, read_completion({**columns(SEEDS[0], tokens, 5, 3, tops=3), "index": 0})))
    check_tops(assembler.joined(0), SEEDS[0], 5, unknown=tokens)


def test_named_tokens_are_sent_as_an_array_and_ask_for_log_probs() -> None:
    for given in ([1, 2], [[1, 2], [3, 4]], np.array([[1, 2]], np.int64), [np.array([1]), np.array([2])]):
        sent = plan_request([1, 2], {"prompt_logprob_token_ids": given}).fields
        assert sent["prompt_logprobs"] and sent["prompt_logprob_token_ids"].dtype == np.int32
        np.testing.assert_array_equal(sent["prompt_logprob_token_ids"], given)
    for wrong in ([[1], [2, 3]], [1.5], [-1], [[2**40]], "12", [[[1]]]):
        with pytest.raises(ValueError, match="prompt_logprob_token_ids"):
            plan_request([1, 2], {"prompt_logprob_token_ids": wrong})
    sent = plan_request([1, 2], {"prompt_entropy": False, "prompt_logprobs_last": 3}).fields
    assert "prompt_logprobs" not in sent
