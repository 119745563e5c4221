"""`recomputed`: in chunks with the token that it comes before, in results whole, and nowhere where there is nothing."""

from __future__ import annotations

import pytest

from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import delta, done, serving
from trainer_bridge.client.results import read_completion


@pytest.fixture
def bench():
    with serving() as bench:
        yield bench


@pytest.mark.parametrize("name", ["recomputed", "adapter_versions"])
def test_marks_come_with_the_token_that_they_come_before(bench, name):
    client = bench.client()
    client.send("generate", "r", client="me", prompt=[1], max_tokens=9, stream="tokens", stream_every=1)
    request = bench.submitted()
    marks = ((2, 8), (3, 8), (4, 9), (5, 9))
    bench.put(delta(request.key, 0, 0, [11, 12]), delta(request.key, 0, 2, [13], **{name: ((2, 8),)}))
    bench.put(delta(request.key, 0, 3, [14, 15], finish=Finish("length"), **{name: marks}))
    bench.put(done(request))
    chunks = [client.receive() for _ in range(3)]
    assert [chunk.get(name) for chunk in chunks] == [None, [[2, 8]], [[3, 8], [4, 9]]]
    (whole,) = client.receive()["completions"]
    assert whole[name] == [[2, 8], [3, 8], [4, 9]]  # nothing came after token 5
    assert getattr(read_completion(whole), name) == [(2, 8), (3, 8), (4, 9)]
    fields = {"target": "r", "stream": "tokens", "client": "me"}
    assert client.ask("attach", "later", offsets={"0": 3}, **fields)[name] == [[3, 8], [4, 9]]
    assert client.receive()["op"] == "result"


def test_without_a_mark_there_is_no_field(bench):
    client = bench.client()
    client.send("generate", "r", client="me", prompt=[1], max_tokens=9)
    bench.finish(bench.submitted())
    (whole,) = client.receive()["completions"]
    assert "recomputed" not in whole and read_completion(whole).recomputed == []
    assert "recomputed" not in client.ask("attach", "later", target="r", client="me", stream="tokens")


def test_marks_of_an_earlier_part_come_back_in_the_result_and_not_in_chunks(bench):
    client = bench.client()
    prior = {"token_ids": [11, 12, 13], "seed": 7, "recomputed": [[1, 4], [1, 5]]}
    client.send("generate", prompt=[1], max_tokens=9, continue_from=prior, stream="tokens", stream_every=1)
    request = bench.submitted()
    bench.put(delta(request.key, 0, 3, [14], recomputed=((3, 7),), finish=Finish("length")), done(request))
    chunk, result = client.receive(), client.receive()
    assert chunk["recomputed"] == [[3, 7]]
    assert result["completions"][0]["recomputed"] == [[1, 4], [1, 5], [3, 7]]


@pytest.mark.parametrize(
    "marks", [3, [3], [[1]], [[1, 2, 3]], [[-1, 2]], [[1, -2]], [["1", 2]], [[2, 1], [1, 1]], [[3, 1]]]
)
@pytest.mark.parametrize("name", ["recomputed", "adapter_versions"])
def test_marks_that_make_no_sense_are_refused_by_name(bench, name, marks):
    prior = {"token_ids": [11, 12, 13], "seed": 77, name: marks}
    reply = bench.client().ask("generate", prompt=[1], max_tokens=5, continue_from=prior)
    assert reply["code"] == "bad_request" and reply["field"].startswith("continue_from"), reply
    assert name in reply["message"]
