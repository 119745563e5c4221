"""Streams that are taken up again: each token and each character once, wherever the first stream ended."""

import logging

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import ServedModel, delta, done, serving

TEXT = "naïve café — stop it, déjà vu 😀 and on"
BASE = {"client": "job", "prompt": [1], "max_tokens": 500}


@pytest.fixture
def bench(codec):
    with serving(codec) as bench:
        yield bench


class Reader:
    """Puts the chunks of one request together, and insists that they fit."""

    def __init__(self, held=None) -> None:
        self.tokens = {index: list(tokens) for index, (tokens, _) in (held or {}).items()}
        self.text = {index: text for index, (_, text) in (held or {}).items()}
        self.ended = {}

    def add(self, chunk):
        index, tokens = chunk["index"], self.tokens.setdefault(chunk["index"], [])
        assert index not in self.ended, "a chunk after the last one"
        assert chunk["offset"] == len(tokens), "a gap, or a token twice"
        assert len(chunk["logprobs"]) == len(chunk["token_ids"]) == sum(count for _, count in chunk["versions"])
        assert chunk["logprobs"].tolist() == [-i for i in range(len(tokens), len(tokens) + len(chunk["token_ids"]))]
        tokens += chunk["token_ids"].tolist()
        self.text[index] = self.text.get(index, "") + chunk.get("text", "")
        if "finish_reason" in chunk:
            self.ended[index] = chunk["finish_reason"]

    def read(self, client):
        """Everything up to the result, which must hold what the chunks did."""
        while (reply := client.receive())["op"] == "chunk":
            self.add(reply)
        assert reply["op"] == "result", reply
        for completion in reply["completions"]:
            index = completion["index"]
            assert self.tokens[index] == completion["token_ids"].tolist()
            assert self.ended[index] == completion["finish_reason"]
            if "text" in completion:
                assert self.text[index] == completion["text"]
        return reply


def put_tokens(bench, request, index, start, tokens, **fields):
    bench.put(delta(request.key, index, start, tokens, **fields))


def forget(client, *targets):
    assert client.ask("ack", "ack", client="job", targets=list(targets))["op"] == "ok"


def test_attach_goes_on_where_the_first_stream_ended(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "r", **BASE, n=2, stream="tokens", stream_every=2)
    request = bench.submitted()
    put_tokens(bench, request, 0, 0, [1, 2])
    put_tokens(bench, request, 1, 0, [11, 12])
    put_tokens(bench, request, 0, 2, [3, 4])
    reader = Reader()
    for _ in range(3):
        reader.add(one.receive())
    two.send("ping", "p", client="job")
    assert two.receive()["op"] == "ok"
    one.socket.close(0)
    put_tokens(bench, request, 0, 4, [5, 6])
    offsets = {str(index): len(tokens) for index, tokens in reader.tokens.items()}
    two.send("attach", "b", client="job", target="r", stream="tokens", stream_every=2, offsets=offsets)
    chunk = two.receive()
    assert (chunk["id"], chunk["offset"], chunk["token_ids"].tolist()) == ("b", 4, [5, 6]), "at once, what is there"
    reader.add(chunk)
    put_tokens(bench, request, 0, 6, [7], finish=Finish("length"))
    put_tokens(bench, request, 1, 2, [13], finish=Finish("stop", 13))
    bench.put(done(request))
    result = reader.read(two)
    assert result["id"] == "b" and reader.tokens == {0: [1, 2, 3, 4, 5, 6, 7], 1: [11, 12, 13]}
    forget(two, "r")


def test_attach_after_the_end_brings_the_rest_and_the_result(bench):
    one = bench.client()
    one.send("generate", "r", **BASE, n=3, stream="tokens", stream_every=3)
    request = bench.submitted()
    for index in range(3):
        put_tokens(bench, request, index, 0, [1, 2, 3, 4], version=7)
        put_tokens(bench, request, index, 4, [5, 6], version=8, finish=Finish("length"))
    bench.put(done(request))
    Reader().read(one)
    one.send("attach", "b", client="job", target="r", stream="tokens", offsets={"0": 3, "1": 6, "2": None})
    chunks = [one.receive() for _ in range(2)]
    assert [(c["index"], c["offset"], c["token_ids"].tolist(), c["versions"]) for c in chunks] == [
        (0, 3, [4, 5, 6], [[7, 1], [8, 2]]),
        (1, 6, [], []),
    ]
    assert all(chunk["finish_reason"] == "length" for chunk in chunks), "the end is repeated: it may have been lost"
    assert one.receive()["op"] == "result", "nothing of what the client has as a whole"
    one.send("attach", "c", client="job", target="r", stream="completions")
    Reader().read(one)
    forget(one, "r")


def test_same_message_from_another_connection_streams_from_the_start(bench):
    one, two = bench.client(), bench.client()
    one.send("generate", "r", **BASE, stream="tokens", stream_every=1)
    request = bench.submitted()
    put_tokens(bench, request, 0, 0, [1, 2, 3])
    first, second = Reader(), Reader()
    first.add(one.receive())
    two.send("generate", "r", **BASE, stream="tokens", stream_every=1)
    second.add(two.receive())
    put_tokens(bench, request, 0, 3, [4], finish=Finish("length"))
    bench.put(done(request))
    first.read(one)
    second.read(two)
    assert first.tokens == second.tokens == {0: [1, 2, 3, 4]}
    two.send("generate", "r", **BASE, stream="tokens", stream_every=1)
    Reader().read(two)
    forget(two, "r")


def test_same_message_on_the_same_connection_has_one_stream_and_two_results(bench):
    client = bench.client()
    for _ in range(2):
        client.send("generate", "r", **BASE, stream="tokens", stream_every=1)
    request = bench.submitted()
    assert client.ask("ping", "p")["op"] == "ok"
    put_tokens(bench, request, 0, 0, [1, 2], finish=Finish("length"))
    bench.put(done(request))
    Reader().read(client)
    assert client.receive()["op"] == "result"
    forget(client, "r")


def test_request_without_a_stream_can_be_streamed_later(bench):
    client = bench.client()
    client.send("generate", "r", **BASE, n=2)
    request = bench.submitted()
    client.send("attach", "b", client="job", target="r", stream="completions")
    put_tokens(bench, request, 1, 0, [5, 6], finish=Finish("length"))
    chunk = client.receive()
    assert (chunk["id"], chunk["index"], chunk["token_ids"].tolist()) == ("b", 1, [5, 6])
    put_tokens(bench, request, 0, 0, [7], finish=Finish("length"))
    bench.put(done(request))
    replies = [client.receive() for _ in range(3)]
    assert {(reply["id"], reply["op"]) for reply in replies} == {("b", "chunk"), ("b", "result"), ("r", "result")}
    forget(client, "r")


def wrong_fields():
    yield {"offsets": {"0": 5}}, "offsets.0"
    yield {"offsets": {"1": 1}}, "offsets.1"
    yield {"offsets": {"x": 1}}, "offsets"
    yield {"offsets": {"0": -1}}, "offsets"
    yield {"offsets": {"0": True}}, "offsets"
    yield {"offsets": {"0": 1, "00": 1}}, "offsets"
    yield {"offsets": [1]}, "offsets"
    yield {"offsets": {"0": 4}, "text_chars": {"0": 99}}, "text_chars.0"
    yield {"offsets": {"0": 4}, "text_chars": {"0": None}}, "text_chars"
    yield {"text_chars": {"0": 1}}, "offsets.0"
    yield {"offsets": {"0": None}, "text_chars": {"0": 1}}, "offsets.0"
    yield {"offsets": {"0": 1}, "stream": False}, "offsets"
    yield {"stream": "words"}, "stream"
    yield {"stream_every": 0}, "stream_every"
    yield {"target": 5}, "target"
    yield {"more": 5}, "more"


@pytest.mark.parametrize("ended", [False, True])
def test_wrong_fields_of_attach_are_named_and_disturb_nobody(bench, ended):
    client, other = bench.client(), bench.client()
    client.send("generate", "r", **BASE, stream="tokens", stream_every=2)
    request = bench.submitted()
    put_tokens(bench, request, 0, 0, [1, 2, 3, 4], finish=Finish("length") if ended else None)
    reader = Reader()
    reader.add(client.receive())
    if ended:
        bench.put(done(request))
        assert client.receive()["op"] == "result"
    for fields, field in wrong_fields():
        header = {"client": "job", "target": "r", "stream": "tokens", **fields}
        error = other.ask("attach", "b", **header)
        assert (error["op"], error["code"], error["field"]) == ("error", "bad_request", field), fields
    if not ended:
        put_tokens(bench, request, 0, 4, [5], finish=Finish("length"))
        bench.put(done(request))
        reader.read(client)
    forget(client, "r")


def test_offsets_before_the_first_chunk_are_refused_unless_they_are_the_start(codec):
    with serving(codec) as bench:
        client = bench.client()
        client.send("generate", "r", **BASE, continue_from={"token_ids": [9, 8], "seed": 5}, stream="tokens")
        request = bench.submitted()
        error = client.ask("attach", "b", client="job", target="r", stream="tokens", offsets={"0": 1})
        assert (error["code"], error["field"]) == ("bad_request", "offsets.0")
        client.send("attach", "b", client="job", target="r", stream="tokens", offsets={"0": 2})
        assert client.ask("ping", "p")["op"] == "ok"
        put_tokens(bench, request, 0, 2, [7], finish=Finish("length"))
        bench.put(done(request))
        replies = [client.receive() for _ in range(4)]
        assert {(reply["id"], reply["op"]) for reply in replies} == {
            ("r", "chunk"),
            ("b", "chunk"),
            ("r", "result"),
            ("b", "result"),
        }
        assert {reply["offset"] for reply in replies if reply["op"] == "chunk"} == {2}


def generate_text(bench, codec, cuts, cut_off, attach_late, prior=0):
    """Stream a text, lose the connection after `cut_off` chunks, attach, and return what both brought."""
    ids = codec.encode(TEXT).tolist()
    cuts = sorted({cut % len(ids) for cut in cuts} - {0})
    bounds = [cut for cut in cuts if cut > prior]
    one, two = bench.client(), bench.client()
    fields = {"continue_from": {"token_ids": ids[:prior], "seed": 1}} if prior else {}
    stop = {"strings": ["stop it!", "never"]}  # text is held back that may become one
    one.send("generate", "t", **BASE, **fields, stream="tokens", stream_every=1, return_text=True, stop=stop)
    request = bench.submitted()
    two.send("ping", "p", client="job")
    assert two.receive()["op"] == "ok"
    pieces = list(zip([prior, *bounds], [*bounds, len(ids)], strict=True))
    reader = Reader({0: (ids[:prior], "")} if prior else None)
    held_back = cut_off % len(pieces)
    for start, end in pieces[:held_back]:
        put_tokens(bench, request, 0, start, ids[start:end])
        reader.add(one.receive())
    one.socket.close(0)
    begin = codec.decode(ids[:prior]) if prior else ""
    while begin.endswith("\ufffd"):
        begin = begin[:-1]
    tokens, chars = len(reader.tokens.get(0, ())), len(begin) + len(reader.text.get(0, ""))
    attach = {"client": "job", "target": "t", "stream": "tokens", "stream_every": 1}
    held = {"offsets": {"0": tokens}, "text_chars": {"0": chars}} if held_back else {}

    def finish():
        for start, end in pieces[held_back:]:
            put_tokens(bench, request, 0, start, ids[start:end], finish=Finish("length") if end == len(ids) else None)
        bench.put(done(request))

    if attach_late:
        finish()
        while two.ask("status", "s")["results"]["stored"] == 0:
            pass
        two.send("attach", "b", **attach, **held)
    else:
        two.send("attach", "b", **attach, **held)
        assert two.ask("ping", "p")["op"] == "ok"
        finish()
    reader.text[0] = begin + reader.text.get(0, "")
    result = reader.read(two)
    forget(two, "t")
    two.socket.close(0)
    assert result["completions"][0]["text"] == codec.decode(ids)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(0, 12), st.booleans(), st.sampled_from([0, 5]))
def test_text_of_a_stream_that_was_taken_up_again_is_whole(bench, codec, cuts, cut_off, attach_late, prior):
    generate_text(bench, codec, cuts, cut_off, attach_late, prior)


def test_stop_string_across_the_cut_is_never_shown(bench, codec):
    ids = codec.encode("go on QXZ here").tolist()
    one, two = bench.client(), bench.client()
    one.send("generate", "r", **BASE, stream="tokens", stream_every=1, return_text=True, stop={"strings": ["QXZ"]})
    request = bench.submitted()
    cut = next(i for i in range(len(ids)) if codec.decode(ids[:i]).endswith("Q"))
    put_tokens(bench, request, 0, 0, ids[:cut])
    chunk = one.receive()
    held = {"offsets": {"0": cut}, "text_chars": {"0": len(chunk["text"])}}
    two.send("attach", "b", client="job", target="r", stream="tokens", **held)
    assert two.ask("ping", "p")["op"] == "ok"
    put_tokens(bench, request, 0, cut, ids[cut:])
    last = two.receive()
    assert (last["finish_reason"], last["stop"], last["offset"]) == ("stop", "QXZ", cut)
    assert chunk["text"] + last["text"] == "go on "
    put_tokens(bench, request, 0, len(ids), [], finish=Finish("stop", "QXZ"))
    bench.put(done(request))
    assert two.receive()["op"] == "result"
    forget(two, "r")


def test_stream_that_was_dropped_can_be_taken_up_where_it_ended(codec, caplog):
    """A client that did not read finds its result, and the rest of its stream, when it does."""
    caplog.set_level(logging.WARNING)
    part = 20_000
    model = ServedModel(name="long", vocab_size=302, max_context_tokens=100_000_000)
    with serving(codec, model=model, max_stream_buffer_bytes=1 << 20, send_hwm=1) as bench:
        slow, other = bench.client(), bench.client()
        slow.socket.close(0)
        slow.socket = bench.context.socket(zmq.DEALER)
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.RCVTIMEO, 60_000), (zmq.LINGER, 0)):
            slow.socket.setsockopt(option, value)
        slow.socket.connect(bench.server.endpoint)
        slow.send("generate", "r", client="job", prompt=[1], max_tokens=10_000_000, stream="tokens", stream_every=part)
        request = bench.submitted()
        parts = 0
        while not caplog.records:  # it warns when it drops a stream
            assert parts < 500
            put_tokens(bench, request, 0, parts * part, [parts % 300] * part)
            assert other.ask("ping", "p", client="job")["op"] == "ok"
            parts += 1
        put_tokens(bench, request, 0, parts * part, [5], finish=Finish("length"))
        bench.put(done(request))
        held = 0
        while (reply := slow.receive())["op"] == "chunk":
            held = reply["offset"] + len(reply["token_ids"])
        assert reply["op"] == "result" and held < parts * part
        slow.send("attach", "b", client="job", target="r", stream="tokens", offsets={"0": held})
        chunk = slow.receive()
        assert (chunk["offset"], len(chunk["token_ids"])) == (held, parts * part + 1 - held)
