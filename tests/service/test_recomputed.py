"""`recomputed`, `kv_versions`: in chunks with the token that they come before, in results whole, else absent."""

import pytest

from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import delta, done
from trainer_bridge.client.results import read_completion


@pytest.mark.parametrize(("name", "more"), [("recomputed", ()), ("adapter_versions", ()), ("kv_versions", (7,))])
def test_marks_come_with_the_token_that_they_come_before(bench, name, more):
    client = bench.client()
    client.send("generate", "r", client="me", prompt=[1], max_tokens=9, stream="tokens", stream_every=1)
    request = bench.submitted()
    marks = tuple((*mark, *more) for mark in ((2, 8), (3, 8), (4, 9), (5, 9)))
    first, *rest = [list(mark) for mark in marks[:3]]  # nothing comes after token 5
    bench.put(delta(request.key, 0, 0, [11, 12]), delta(request.key, 0, 2, [13], **{name: marks[:1]}))
    bench.put(delta(request.key, 0, 3, [14, 15], finish=Finish("length"), **{name: marks}))
    bench.put(done(request))
    chunks = [client.receive() for _ in range(3)]
    assert [chunk.get(name) for chunk in chunks] == [None, [first], rest]
    (whole,) = client.receive()["completions"]
    assert whole[name] == [first, *rest] and getattr(read_completion(whole), name) == list(marks[:3])
    fields = {"target": "r", "stream": "tokens", "client": "me"}
    assert client.ask("attach", "later", offsets={"0": 3}, **fields)[name] == rest
    assert client.receive()["op"] == "result"


def test_without_a_mark_there_is_no_field(bench):
    client = bench.client()
    client.send("generate", "r", client="me", prompt=[1], max_tokens=9)
    bench.finish(bench.submitted())
    (whole,) = client.receive()["completions"]
    assert not {"recomputed", "kv_versions"} & whole.keys()
    assert read_completion(whole).recomputed == read_completion(whole).kv_versions == []
    chunk = client.ask("attach", "later", target="r", client="me", stream="tokens")
    assert not {"recomputed", "kv_versions"} & chunk.keys()


@pytest.mark.parametrize(("name", "more"), [("recomputed", ()), ("kv_versions", (6,))])
def test_marks_of_an_earlier_part_come_back_in_the_result_and_not_in_chunks(bench, name, more):
    client = bench.client()
    old = [[1, 4, *more], [1, 5, *more]]
    prior = {"token_ids": [11, 12, 13], "seed": 7, name: old}
    client.send("generate", prompt=[1], max_tokens=9, continue_from=prior, stream="tokens", stream_every=1)
    request = bench.submitted()
    new = {name: ((3, 7, *more),)}
    bench.put(delta(request.key, 0, 3, [14], finish=Finish("length"), **new), done(request))
    chunk, result = client.receive(), client.receive()
    assert chunk[name] == [[3, 7, *more]]
    assert result["completions"][0][name] == [*old, [3, 7, *more]]


NO_MARKS = [3, [3], [[1]], [[1, 2, 3]], [[-1, 2]], [[1, -2]], [["1", 2]], [[2, 1], [1, 1]], [[3, 1]]]
NO_RUNS = [
    3,
    [3],
    [[1, 2]],
    [[1, 2, 0]],
    [[1, 2, 2**31]],
    [[-1, 2, 3]],
    [[1, 2, "3"]],
    [[2, 1, 4], [1, 1, 4]],
    [[3, 1, 4]],
]


@pytest.mark.parametrize(
    ("name", "marks"),
    [*((name, marks) for name in ("recomputed", "adapter_versions") for marks in NO_MARKS),
     *(("kv_versions", runs) for runs in NO_RUNS)],
)  # fmt: skip
def test_marks_that_make_no_sense_are_refused_by_name(bench, name, marks):
    prior = {"token_ids": [11, 12, 13], "seed": 77, name: marks}
    reply = bench.client().ask("generate", prompt=[1], max_tokens=5, continue_from=prior)
    assert reply["code"] == "bad_request" and reply["field"].startswith("continue_from"), reply
    assert name in reply["message"]
