"""Likeliest tokens and prompt log-probs in messages: asked for, refused, streamed, cut, taken up again, continued."""

import random
from dataclasses import replace

import numpy as np
import pytest

from rollout.engine.messages.to_service import Finish
from rollout.service.requests.fields import top_id_rows, top_logprob_rows
from tests.support.robustness.corpus import PLAIN, junk
from tests.support.service.harness import ServedModel, delta, done, serving
from trainer_bridge.wire.prompt_tops import PromptTops
from trainer_bridge.wire.request_fields import MAX_TOP_LOGPROBS

PROMPT = np.array([np.nan, -0.5, -1.5], np.float32)


def tops(tokens: list[int], k: int) -> dict[str, np.ndarray]:
    """Top tokens as an engine reports them: ids from 10 times the token on."""
    ids = np.array([[10 * token + i for i in range(k)] for token in tokens], np.int32).reshape(len(tokens), k)
    return {"top_ids": ids, "top_logprobs": -ids.astype(np.float32) / 8}


def scored(request, index: int, offset: int, tokens: list[int], **more):
    return delta(request.key, index, offset, tokens, **tops(tokens, request.logprobs), **more)


def test_they_are_asked_for_and_come_in_result_and_chunks(bench):
    client = bench.client()
    fields = {"stream": "tokens", "stream_every": 1, "logprobs": 3, "prompt_logprobs": True}
    client.send("generate", prompt=[1, 2, 3], n=2, max_tokens=9, **fields)
    request = bench.submitted()
    assert (request.logprobs, request.prompt_logprobs) == (3, True)
    bench.put(scored(request, 1, 0, [5], finish=Finish("length")))
    bench.put(scored(request, 0, 0, [5, 6], prompt_logprobs=PROMPT))
    bench.put(scored(request, 0, 2, [7], finish=Finish("length")), replace(done(request), prompt_logprobs=PROMPT))
    other, first, last, result = (client.receive() for _ in range(4))
    assert "prompt_logprobs" not in other and "prompt_logprobs" not in last
    for reply in (first, result):
        np.testing.assert_array_equal(reply["prompt_logprobs"], PROMPT)
        assert reply["prompt_logprobs"].dtype == np.float32
    for fields, tokens in ((other, [5]), (first, [5, 6]), (last, [7]), (result["completions"][0], [5, 6, 7])):
        for name, expected in tops(tokens, 3).items():
            np.testing.assert_array_equal(fields[name], expected)
            assert fields[name].dtype == expected.dtype
    assert "prompt_logprobs" not in result["completions"][0]


def test_ranks_and_tops_of_the_prompt_come_with_its_log_probs(bench):
    client = bench.client()
    client.send("generate", prompt=[1, 2, 3], max_tokens=9, stream="tokens", stream_every=1, prompt_top_logprobs=2)
    request = bench.submitted()
    assert (request.prompt_logprobs, request.prompt_top_logprobs) == (True, 2)
    ranks, rows = np.array([0, 1, 3], np.int32), tops([0, 5, 7], 2)
    prompt = {"prompt_logprobs": PROMPT, "prompt_tops": PromptTops(ranks, rows["top_ids"], rows["top_logprobs"])}
    bench.put(delta(request.key, 0, 0, [5], **prompt))
    bench.put(delta(request.key, 0, 1, [7], finish=Finish("length")), replace(done(request), **prompt))
    first, last, result = (client.receive() for _ in range(3))
    expected = {"prompt_ranks": ranks, "prompt_top_ids": rows["top_ids"], "prompt_top_logprobs": rows["top_logprobs"]}
    for reply in (first, result):
        np.testing.assert_array_equal(reply["prompt_logprobs"], PROMPT)
        for name, values in expected.items():
            np.testing.assert_array_equal(reply[name], values)
            assert reply[name].dtype == values.dtype
    assert not expected.keys() & last.keys()
    client.send("attach", "again", target=result["id"], stream="tokens", stream_every=1)
    again = client.receive()
    for name, values in expected.items():
        np.testing.assert_array_equal(again[name], values)


def test_who_does_not_ask_gets_neither(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=9, logprobs=0, prompt_logprobs=False)
    request = bench.submitted()
    assert (request.logprobs, request.prompt_logprobs) == (0, False)
    bench.finish(request)
    result = client.receive()
    assert not {"top_ids", "top_logprobs", "prompt_logprobs", "prompt_ranks"} & (
        result.keys() | result["completions"][0].keys()
    )


@pytest.mark.parametrize("stream", [False, "tokens", "completions"])
def test_a_prompt_is_scored_without_a_token(bench, stream):
    client = bench.client()
    client.send("generate", prompt=[7] * 1000, n=2, max_tokens=0, prompt_logprobs=True, stream=stream)
    request = bench.submitted()
    assert (request.max_tokens, len(request.prompt), request.prompt_logprobs) == (0, 1000, True)
    scores = {"prompt_logprobs": np.zeros(1000, np.float32), "prompt_version": 5}
    bench.put(delta(request.key, 0, 0, [], finish=Finish("length"), **scores))
    bench.put(delta(request.key, 1, 0, [], finish=Finish("length")), replace(done(request), **scores))
    *chunks, result = [client.receive() for _ in range(3 if stream else 1)]
    for reply in (*chunks[:1], result):
        assert reply["prompt_version"] == 5 and len(reply["prompt_logprobs"]) == 1000
    for part in (*chunks, *result["completions"]):
        assert len(part["token_ids"]) == 0 and part["finish_reason"] == "length" and part["versions"] == []
    client.send("attach", "again", target=result["id"], stream="tokens")
    again = client.receive()
    assert again["prompt_version"] == 5 and again["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": [7] * 1001, "max_tokens": 0}, "too_long", "prompt"),
        ({"prompt": [7] * 1000}, "too_long", "prompt"),
        ({"prompt": [7] * 1000, "max_tokens": 1}, "too_long", "max_tokens"),
        ({"prompt": [7], "max_tokens": -1}, "bad_request", "max_tokens"),
        ({"prompt": [7], "max_tokens": 0, "stop": {"min_tokens": 1}}, "bad_request", "stop.min_tokens"),
        (
            {"prompt": [7], "max_tokens": 1, "continue_from": {"token_ids": [1, 2], "seed": 3}},
            "bad_request",
            "max_tokens",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(bench, fields, code, field):
    reply = bench.client().ask("generate", prompt_logprobs=True, **fields)
    assert (reply["code"], reply["field"]) == (code, field)


def test_a_completion_that_has_all_its_tokens_is_taken(bench):
    client = bench.client()
    prior = {"token_ids": [1, 2], "seed": 3}
    client.send("generate", prompt=[7] * 998, max_tokens=2, continue_from=prior, prompt_logprobs=True)
    request = bench.submitted()
    bench.put(delta(request.key, 0, 2, [], finish=Finish("length")), done(request))
    (completion,) = client.receive()["completions"]
    assert completion["token_ids"].tolist() == [1, 2] and completion["finish_reason"] == "length"


def test_many_tokens_keep_theirs(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=500, logprobs=2)
    request = bench.submitted()
    tokens = [1 + i % 290 for i in range(400)]
    for start in range(0, 400, 50):
        bench.put(scored(request, 0, start, tokens[start : start + 50]))
    bench.put(scored(request, 0, 400, [], finish=Finish("cancelled")), done(request))
    (completion,) = client.receive()["completions"]
    np.testing.assert_array_equal(completion["top_ids"], tops(tokens, 2)["top_ids"])
    np.testing.assert_array_equal(completion["top_logprobs"], tops(tokens, 2)["top_logprobs"])


def test_a_completion_without_tokens_has_rows_of_the_right_length(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=500, logprobs=4)
    request = bench.submitted()
    bench.put(scored(request, 0, 0, [], finish=Finish("cancelled")), done(request))
    (completion,) = client.receive()["completions"]
    assert completion["top_ids"].shape == completion["top_logprobs"].shape == (0, 4)


def test_a_stop_string_cuts_them_with_the_tokens(codec):
    tokens = codec.encode("a quick END and more").tolist()
    with serving(codec) as bench:
        client = bench.client()
        client.send("generate", prompt=[1], max_tokens=99, logprobs=2, stop={"strings": ["END"]})
        request = bench.submitted()
        bench.put(scored(request, 0, 0, tokens, finish=Finish("length")), done(request))
        (completion,) = client.receive()["completions"]
        kept = len(completion["token_ids"])
        assert completion["stop"] == "END" and 0 < kept < len(tokens)
        np.testing.assert_array_equal(completion["top_ids"], tops(tokens[:kept], 2)["top_ids"])


@pytest.mark.parametrize("ended", [False, True], ids=["in flight", "stored"])
def test_a_stream_that_is_taken_up_again_has_what_was_missing(bench, ended):
    one, two = bench.client(), bench.client()
    base = {"client": "job", "logprobs": 2, "prompt_logprobs": True}
    one.send("generate", "r", prompt=[1, 2, 3], max_tokens=9, **base)
    request = bench.submitted()
    bench.put(scored(request, 0, 0, [5, 6, 7], prompt_logprobs=PROMPT))
    last = scored(request, 0, 3, [8], finish=Finish("length")), replace(done(request), prompt_logprobs=PROMPT)
    if ended:
        bench.put(*last)
        one.receive()
    else:
        one.ask("ping", "p")
    two.send("attach", "begin", client="job", target="r", stream="tokens", stream_every=1)
    two.send("attach", "middle", client="job", target="r", stream="tokens", stream_every=1, offsets={"0": 2})
    if not ended:
        two.send("ping", "sent")
    parts: dict[str, list] = {"begin": [], "middle": [], "sent": []}
    while not ended and not parts["sent"]:
        reply = two.receive()
        parts[reply["id"]].append(reply)
    if not ended:
        bench.put(*last)
    while not all(parts[name] and parts[name][-1]["op"] == "result" for name in ("begin", "middle")):
        reply = two.receive()
        parts[reply["id"]].append(reply)
    for name, start in (("begin", 0), ("middle", 2)):
        *chunks, result = parts[name]
        np.testing.assert_array_equal(
            np.concatenate([chunk["top_ids"] for chunk in chunks]), tops([5, 6, 7, 8], 2)["top_ids"][start:]
        )
        assert ["prompt_logprobs" in chunk for chunk in chunks] == [start == 0, *[False] * (len(chunks) - 1)]
        np.testing.assert_array_equal(result["prompt_logprobs"], PROMPT)


@pytest.mark.parametrize("as_lists", [False, True])
def test_those_of_old_tokens_come_back(bench, as_lists):
    client = bench.client()
    old = tops([11, 12], 2)
    if as_lists:
        old = {name: rows.tolist() for name, rows in old.items()}
    prior = {"token_ids": [11, 12], "seed": 77, **old}
    client.send("generate", prompt=[1], max_tokens=5, logprobs=2, continue_from=prior)
    request = bench.submitted()
    bench.put(scored(request, 0, 2, [13], finish=Finish("length")), done(request))
    (completion,) = client.receive()["completions"]
    np.testing.assert_array_equal(completion["top_ids"], tops([11, 12, 13], 2)["top_ids"])
    np.testing.assert_array_equal(completion["top_logprobs"], tops([11, 12, 13], 2)["top_logprobs"])


def test_old_tokens_that_came_without_have_none(bench):
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=5, logprobs=2, continue_from={"token_ids": [11], "seed": 77})
    request = bench.submitted()
    bench.put(scored(request, 0, 1, [13], finish=Finish("length")), done(request))
    (completion,) = client.receive()["completions"]
    assert completion["top_ids"][0].tolist() == [-1, -1] and np.isnan(completion["top_logprobs"][0]).all()
    np.testing.assert_array_equal(completion["top_ids"][1:], tops([13], 2)["top_ids"])


OLD = {"token_ids": [11, 12], "seed": 77}


def test_chosen_tokens_and_entropy_are_asked_for_and_come_as_arrays(bench):
    client, ids = bench.client(), np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    fields = {"prompt_logprobs_last": 2, "prompt_top_logprobs": 40, "prompt_entropy": True}
    client.send("generate", prompt=[1, 2, 3], max_tokens=0, stream="tokens", prompt_logprob_token_ids=ids, **fields)
    request = bench.submitted()
    assert (request.prompt_logprobs, request.prompt_logprobs_last, request.prompt_top_logprobs) == (True, 2, 40)
    np.testing.assert_array_equal(request.chosen, ids)
    assert request.chosen.dtype == np.int32 and request.prompt_entropy and request.scored_from == 1
    told = {
        "prompt_logprobs": PROMPT[1:],
        "prompt_tops": PromptTops.unknown(2, 40),
        "prompt_chosen_logprobs": -ids.astype(np.float32),
        "prompt_entropy": np.array([1.5, 0.25], np.float32),
    }
    bench.put(delta(request.key, 0, 0, [], finish=Finish("length"), **told), replace(done(request), **told))
    for reply in (client.receive(), client.receive()):
        np.testing.assert_array_equal(reply["prompt_chosen_logprobs"], told["prompt_chosen_logprobs"])
        np.testing.assert_array_equal(reply["prompt_entropy"], told["prompt_entropy"])
        assert reply["prompt_top_ids"].shape == (2, 40) and len(reply["prompt_logprobs"]) == 2


@pytest.mark.parametrize("ids", [[7, 8], [[7, 8]] * 3, np.array([7, 8], "<i8"), np.array([[7, 8]] * 3, "<u2")])
def test_chosen_tokens_of_all_positions_or_of_each(bench, ids):
    bench.client().send("generate", prompt=[1, 2, 3], max_tokens=0, prompt_logprob_token_ids=ids)
    request = bench.submitted()
    np.testing.assert_array_equal(request.chosen, ids)
    assert request.prompt_logprobs and request.prompt_top_logprobs is None and request.scored_from == 0


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs", f"less than or equal to {MAX_TOP_LOGPROBS}"),
        ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"logprobs": 2.5}, "logprobs", "valid integer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "valid boolean"),
        ({"prompt_top_logprobs": 257}, "prompt_top_logprobs", "or equal to 256"),
        ({"prompt_logprob_token_ids": []}, "prompt_logprob_token_ids", "1 to 256"),
        ({"prompt_logprob_token_ids": [[]]}, "prompt_logprob_token_ids", "1 to 256"),
        ({"prompt_logprob_token_ids": np.zeros((0, 3), np.int32)}, "prompt_logprob_token_ids", "1 to 256"),
        ({"prompt_logprob_token_ids": [0] * 257}, "prompt_logprob_token_ids", "1 to 256"),
        ({"prompt_logprob_token_ids": [[1, 2], [3]]}, "prompt_logprob_token_ids", "different numbers"),
        ({"prompt_logprob_token_ids": [[1], 2]}, "prompt_logprob_token_ids", "must be integers"),
        ({"prompt_logprob_token_ids": [[[1]]]}, "prompt_logprob_token_ids", "must be integers"),
        ({"prompt_logprob_token_ids": [1.0]}, "prompt_logprob_token_ids", "must be integers"),
        ({"prompt_logprob_token_ids": [True]}, "prompt_logprob_token_ids", "must be integers"),
        ({"prompt_logprob_token_ids": [-1]}, "prompt_logprob_token_ids", "negative"),
        ({"prompt_logprob_token_ids": [2**40]}, "prompt_logprob_token_ids", "does not fit"),
        ({"prompt_logprob_token_ids": "12"}, "prompt_logprob_token_ids", "list of integers"),
        ({"prompt_logprob_token_ids": np.zeros((1, 1, 1), np.int32)}, "prompt_logprob_token_ids", "one-dimensional"),
        ({"prompt_logprob_token_ids": np.zeros((1, 2), np.float32)}, "prompt_logprob_token_ids", "array of integers"),
        ({"prompt_logprob_token_ids": [999]}, "prompt_logprob_token_ids", "not in the model's vocabulary"),
        ({"prompt_logprob_token_ids": [[1], [2]]}, "prompt_logprob_token_ids", "2 rows, and 1 tokens"),
        ({"prompt_entropy": 1}, "prompt_entropy", "valid boolean"),
        ({"prompt_logprobs_last": 1}, "prompt_logprobs_last", "needs one of"),
        ({"prompt_logprobs_last": 0, "prompt_logprobs": True}, "prompt_logprobs_last", "greater than or equal"),
        ({"prompt_logprobs_last": 2, "prompt_logprobs": True}, "prompt_logprobs_last", "the prompt has 1 tokens"),
        ({"prompt_top_logprobs": -1}, "prompt_top_logprobs", "greater than or equal to 0"),
        ({"prompt_top_logprobs": True}, "prompt_top_logprobs", "valid integer"),
        ({"continue_from": {**OLD, **tops([1, 2], 3)}}, "logprobs", "make them equal"),
        ({"continue_from": {**OLD, **tops([1, 2], 3)}, "logprobs": 2}, "logprobs", "has 3 top tokens"),
        ({"continue_from": {**OLD, **tops([1], 3)}, "logprobs": 3}, "continue_from", "has 1 entries"),
        (
            {"continue_from": {**OLD, "top_ids": [[1], [2]]}, "logprobs": 1},
            "continue_from",
            "both 'top_ids' and 'top_logprobs'",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[1], [2]], "top_logprobs": [[0.0, 1.0], [0.0, 1.0]]}, "logprobs": 1},
            "continue_from",
            "differ in length",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[1], [2, 3]], "top_logprobs": [[0.0], [0.0]]}},
            "continue_from.top_ids",
            "one length",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[1.5], [2]], "top_logprobs": [[0.0], [0.0]]}},
            "continue_from.top_ids",
            "rows of token ids",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[-2], [2]], "top_logprobs": [[0.0], [0.0]]}},
            "continue_from.top_ids",
            "less than -1",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[2**63], [2]], "top_logprobs": [[0.0], [0.0]]}},
            "continue_from.top_ids",
            "rows of token ids",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [[5], [999]], "top_logprobs": [[0.0], [0.0]]}, "logprobs": 1},
            "continue_from.top_ids",
            "not in the model's vocabulary",
        ),
        (
            {"continue_from": {**OLD, "top_ids": [1, 2], "top_logprobs": [[0.0], [0.0]]}},
            "continue_from.top_ids",
            "rows",
        ),
        ({"continue_from": {**OLD, "top_ids": "x", "top_logprobs": None}}, "continue_from.top_ids", "rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_score_fields_are_refused_with_the_reason(bench, fields, field, reason):
    error = bench.client().ask("generate", prompt=[1], max_tokens=5, **fields)
    assert (error["code"], error["field"]) == ("bad_request", field), error
    assert reason in error["message"]
    assert bench.inbox.empty()


@pytest.mark.parametrize("read", [top_id_rows, top_logprob_rows])
def test_whatever_is_sent_as_rows_is_rows_or_a_reason(read):
    rng = random.Random(1)
    accepted = 0
    for _ in range(4000):
        value = junk(rng)
        if rng.random() < 0.5:
            value = [[rng.choice(PLAIN) for _ in range(2)] for _ in range(rng.randrange(3))]
        try:
            rows = read(value)
        except ValueError as error:
            assert "rows" in str(error) or "32 bits" in str(error)
        else:
            accepted += 1
            assert rows.ndim == 2 and rows.dtype in (np.int32, np.float32)
    assert accepted > 50


def test_rows_without_entries_are_no_rows(bench):
    client = bench.client()
    empty = {"top_ids": [[], []], "top_logprobs": np.zeros((2, 0), np.float32)}
    client.send("generate", prompt=[1], max_tokens=5, logprobs=2, continue_from={**OLD, **empty})
    request = bench.submitted()
    bench.put(scored(request, 0, 2, [13], finish=Finish("length")), done(request))
    assert client.receive()["completions"][0]["top_ids"][:2].tolist() == [[-1, -1], [-1, -1]]


def test_more_than_the_vocabulary_is_refused():
    with serving(model=ServedModel("small", vocab_size=7, max_context_tokens=100)) as bench:
        error = bench.client().ask("generate", prompt=[1], max_tokens=5, logprobs=8)
        assert (error["code"], error["field"]) == ("bad_request", "logprobs") and "7 tokens" in error["message"]


def test_status_lists_them(bench):
    assert {"logprobs", "prompt_logprobs"} <= set(bench.client().ask("status")["capabilities"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprob_token_ids": [1] * 8}, "prompt_logprob_token_ids"),  # 40 x 8 x 4
        ({"prompt_top_logprobs": 5}, "prompt_top_logprobs"),  # 40 x (4 + 5 x 8)
    ],
)
def test_scores_of_the_tokens_that_are_asked_for_have_to_fit_a_reply(fields, field):
    with serving(max_reply_bytes=1199) as bench:
        client = bench.client()
        refused = client.ask("generate", prompt=[1] * 40, max_tokens=0, **fields)
        assert (refused["code"], refused["field"]) == ("bad_request", field)
        client.send("generate", prompt=[1] * 40, max_tokens=0, prompt_logprobs_last=20, **fields)
        assert bench.submitted().prompt_logprobs_last == 20
