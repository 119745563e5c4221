"""`thinking_token_budget` and `repetition_detection` through real sockets: to the engine, and what comes back."""

import numpy as np
import pytest

from rollout.constraints.matcher import ANYTHING, AllowList
from rollout.constraints.thoughts import BudgetedConstraint
from rollout.engine.messages.requests import RepetitionRule
from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import MODEL, delta, done, serving

OPEN, CLOSE = 60, 61
THINKING = {"start": [OPEN], "end": [CLOSE]}
EOS = MODEL.eos_ids[0]


def begun(request) -> tuple[bool, int]:
    """Whether a completion begins inside of a thought, and after how many tokens one is forced."""
    assert isinstance(request.constraint, BudgetedConstraint)
    return request.constraint.begin.inside, request.constraint.begin.due


@pytest.mark.parametrize(
    ("prompt", "inside", "due"),
    [
        ([5, OPEN], True, 3),
        ([5, OPEN, 6, 7], True, 1),
        ([OPEN, *range(20)], True, -17),
        ([OPEN, 6, CLOSE], False, None),
        ([OPEN, 6, OPEN], True, 3),
        ([OPEN, 6, EOS, 8], False, None),
        ([OPEN, 6, EOS, OPEN, 8], True, 2),
        ([5], False, None),
    ],
)
def test_an_open_thought_of_the_prompt_counts(bench, prompt, inside, due):
    client = bench.client()
    client.send("generate", prompt=prompt, max_tokens=9, thinking_token_budget=3, thinking=THINKING)
    request = bench.submitted()
    assert begun(request)[0] == inside and (not inside or begun(request)[1] == due)
    assert request.constraint.inner is ANYTHING
    bench.finish(request)
    assert "forced" not in client.receive()["completions"][0]


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": -1, "thinking": THINKING}, {"thinking": THINKING}])
def test_without_a_budget_there_is_no_constraint(bench, fields):
    client = bench.client()
    client.send("generate", prompt=[OPEN], max_tokens=9, **fields)
    request = bench.submitted()
    assert request.constraint is ANYTHING and request.stop.repetition == RepetitionRule()
    bench.finish(request)
    assert client.receive()["op"] == "result"


@pytest.mark.parametrize("stream", [False, "tokens", "completions"])
def test_forced_tokens_are_marked_in_results_and_streams(bench, stream):
    """Of two completions in pieces; a token that only looks like a forced one has no mark."""
    client = bench.client()
    client.send(
        "generate",
        "r",
        prompt=[5, OPEN],
        max_tokens=20,
        n=2,
        thinking_token_budget=2,
        thinking=THINKING,
        stream=stream,
        stream_every=1,
    )
    request = bench.submitted()
    tokens = {0: [7, 8, CLOSE, 9, OPEN, 7, 7, CLOSE, CLOSE], 1: [7, CLOSE, OPEN, CLOSE, OPEN, 1, 1]}
    wanted = {0: [2, 7], 1: []}
    for index, ids in tokens.items():
        for place in range(0, len(ids), 2):
            part, last = ids[place : place + 2], place + 2 >= len(ids)
            bench.put(delta(request.key, index, place, part, finish=Finish("length") if last else None))
    bench.put(done(request))
    seen: dict[int, list[int]] = {0: [], 1: []}
    while (reply := client.receive())["op"] == "chunk":
        places = reply.get("forced", [])
        assert all(reply["offset"] <= place < reply["offset"] + len(reply["token_ids"]) for place in places)
        seen[reply["index"]] += places
    assert {each["index"]: each.get("forced", []) for each in reply["completions"]} == wanted
    assert not stream or seen == wanted
    again = bench.client()
    again.send("attach", "x", target="r")
    assert again.receive()["code"] == "not_found", "another client's"
    client.send("attach", "y", target="r", stream="tokens", offsets={"0": 3})
    rest = [client.receive() for _ in range(3)]
    assert [each.get("forced") for each in rest[:2] if each["index"] == 0] == [[7]]


def test_a_stop_string_cuts_the_marks_too(codec):
    ids = codec.encode("one two END").tolist()
    with serving(codec) as bench:
        client = bench.client()
        client.send(
            "generate", prompt=[1], max_tokens=99, thinking_token_budget=0, thinking=THINKING, stop={"strings": ["END"]}
        )
        request = bench.submitted()
        bench.put(
            delta(request.key, 0, 0, [*ids, OPEN, CLOSE]),
            delta(request.key, 0, len(ids) + 2, [1], finish=Finish("stop", "END")),
            done(request),
        )
        completion = client.receive()["completions"][0]
        assert len(completion["token_ids"]) == len(ids) and "forced" not in completion


def test_a_text_is_a_mark_in_the_model_s_tokens(codec):
    with serving(codec) as bench:
        client = bench.client()
        client.send(
            "generate",
            prompt=[1],
            max_tokens=9,
            thinking_token_budget=2,
            thinking={"start": "<think>", "end": "</think>"},
        )
        rule = bench.submitted().constraint.begin.rule
        assert rule.start == tuple(codec.encode_rendered("<think>").tolist())
        assert rule.end == tuple(codec.encode_rendered("</think>").tolist())


def test_a_continued_completion_keeps_its_marks_and_its_place(bench):
    client = bench.client()
    prior = {"token_ids": [7, CLOSE, OPEN, 7], "seed": 3, "forced": [1]}
    client.send(
        "generate",
        prompt=[5, OPEN],
        max_tokens=20,
        thinking_token_budget=2,
        thinking=THINKING,
        continue_from=prior,
        stream="tokens",
        stream_every=1,
    )
    request = bench.submitted()
    assert begun(request) == (True, 5)
    bench.put(delta(request.key, 0, 4, [7, CLOSE], finish=Finish("length")), done(request))
    assert client.receive()["forced"] == [5]
    assert client.receive()["completions"][0]["forced"] == [1, 5]


def test_a_budget_goes_with_a_constraint(bench):
    client = bench.client()
    client.send(
        "generate",
        prompt=[5],
        max_tokens=20,
        thinking_token_budget=2,
        thinking=THINKING,
        constraint={"token_ids": [7, 8]},
    )
    assert isinstance(bench.submitted().constraint.inner, AllowList)


def test_repetition_reaches_the_engine_and_comes_back(bench):
    client = bench.client()
    for detection, rule in (
        ({"max_pattern_size": 9, "min_count": 3}, RepetitionRule(1, 9, 3)),
        ({"max_pattern_size": 9, "min_pattern_size": 4, "min_count": 2}, RepetitionRule(4, 9, 2)),
        ({"max_pattern_size": 0, "min_count": 3}, RepetitionRule(1, 0, 3)),
        ({}, RepetitionRule()),
    ):
        client.send("generate", str(detection)[:99], prompt=[5], max_tokens=9, repetition_detection=detection)
        request = bench.submitted()
        assert request.stop.repetition == rule
        bench.finish(request, reason="repetition")
        completion = client.receive()["completions"][0]
        assert (completion["finish_reason"], completion["stop"]) == ("repetition", None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thinking_token_budget": 3}, "thinking"),
        ({"thinking_token_budget": -2, "thinking": THINKING}, "thinking_token_budget"),
        ({"thinking_token_budget": True, "thinking": THINKING}, "thinking_token_budget"),
        ({"thinking_token_budget": 2.0, "thinking": THINKING}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**40, "thinking": THINKING}, "thinking_token_budget"),
        ({"thinking_token_budget": 3, "thinking": [1]}, "thinking"),
        ({"thinking_token_budget": 3, "thinking": {"start": [1]}}, "thinking.end"),
        ({"thinking_token_budget": 3, "thinking": {"start": [], "end": [2]}}, "thinking.start"),
        ({"thinking_token_budget": 3, "thinking": {"start": [1], "end": [2] * 65}}, "thinking.end"),
        ({"thinking_token_budget": 3, "thinking": {"start": [1], "end": [-2]}}, "thinking.end"),
        ({"thinking_token_budget": 3, "thinking": {"start": [1], "end": [MODEL.vocab_size]}}, "thinking.end"),
        ({"thinking_token_budget": 3, "thinking": {"start": [1], "end": [1]}}, "thinking.end"),
        ({"thinking_token_budget": 3, "thinking": {"start": "<think>", "end": [1]}}, "thinking.start"),
        ({"thinking_token_budget": 3, "thinking": THINKING | {"begin": [1]}}, "thinking.begin"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": -3}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 5000, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
            "repetition_detection.min_pattern_size",
        ),
        ({"repetition_detection": {"max_size": 3}}, "repetition_detection.max_size"),
        ({"continue_from": {"token_ids": [1, 2], "seed": 1, "forced": [2]}}, "continue_from"),
        ({"continue_from": {"token_ids": [1, 2], "seed": 1, "forced": [1, 0]}}, "continue_from.forced"),
        ({"continue_from": {"token_ids": [1, 2], "seed": 1, "forced": [True]}}, "continue_from.forced"),
        ({"continue_from": {"token_ids": [1, 2], "seed": 1, "forced": 1}}, "continue_from.forced"),
    ],
)
def test_wrong_fields_are_refused_by_name(bench, fields, field):
    reply = bench.client().ask("generate", prompt=[5], max_tokens=9, **fields)
    assert (reply["op"], reply["code"], reply["field"]) == ("error", "bad_request", field), reply


def test_a_blob_of_ids_is_a_mark(bench):
    client = bench.client()
    marks = {"start": np.array([OPEN], np.int32), "end": np.array([CLOSE, 3], np.int64)}
    client.send("generate", prompt=[5], max_tokens=9, thinking_token_budget=2, thinking=marks)
    assert bench.submitted().constraint.begin.rule.end == (CLOSE, 3)
