"""`return_routing` in requests and replies: who may ask, and which entry is where, whatever the pieces."""

from dataclasses import replace

import numpy as np
import pytest

from rollout.engine.messages.requests import RoutingShape
from rollout.engine.messages.to_service import Finish
from tests.support.service.harness import MODEL, delta, done, serving

SHAPE = RoutingShape(layers=2, top_k=3, experts=8)
PROMPT = [4, 5, 6, 7]


@pytest.fixture
def bench():
    with serving(model=replace(MODEL, sparse=True, routing=SHAPE)) as bench:
        yield bench


def entries(start: int, end: int) -> np.ndarray:
    """Entries of positions start..end-1; each is its position."""
    flat = np.arange(start, end, dtype=np.uint8)[:, None, None]
    return np.broadcast_to(flat, (end - start, 2, 3)).copy()


def positions(fields: dict) -> list[int]:
    """What positions the entries of a reply are of."""
    routing = fields["routing"]
    assert routing.dtype == np.uint8 and routing.shape[1:] == (2, 3)
    return routing[:, 1, 2].tolist()


class Engine:
    """Tells tokens and entries as the engine does."""

    def __init__(self, bench, request) -> None:
        self.bench, self.request = bench, request
        self.tokens = len(request.prior.token_ids) if request.prior else 0
        self.told = request.routing_from

    def put(self, count: int, finish: Finish | None = None) -> None:
        begin, self.tokens = self.tokens, self.tokens + count
        end = len(self.request.prompt) + self.tokens - 1 if count else self.told
        ids = list(range(100 + begin, 100 + self.tokens))
        self.bench.put(delta(self.request.key, 0, begin, ids, finish=finish, routing=entries(self.told, end)))
        self.told = end

    def end(self) -> None:
        self.put(0, Finish("length"))
        self.bench.put(done(self.request))


@pytest.mark.parametrize(("wanted", "first"), [(True, 4), ("all", 0)])
def test_a_result_has_an_entry_for_every_token_but_the_last(bench, wanted, first):
    client = bench.client()
    client.send("generate", prompt=PROMPT, max_tokens=5, return_routing=wanted)
    engine = Engine(bench, bench.submitted())
    assert engine.request.routing_from == first
    engine.put(2)
    engine.put(3)
    engine.end()
    (completion,) = client.receive()["completions"]
    assert positions(completion) == list(range(first, 4 + 5 - 1))


@pytest.mark.parametrize(("wanted", "first"), [(True, 4), ("all", 0)])
def test_the_pieces_of_a_stream_are_the_result(bench, wanted, first):
    client = bench.client()
    client.send("generate", prompt=PROMPT, max_tokens=90, return_routing=wanted, stream="tokens", stream_every=3)
    engine = Engine(bench, bench.submitted())
    for count in (1, 3, 80, 6):
        engine.put(count)
    engine.end()
    pieces = [client.receive() for _ in range(4)]
    result = client.receive()
    assert [positions(piece) for piece in pieces] == [
        list(range(first, 4 + 3)), list(range(7, 87)), list(range(87, 93)), [],
    ]  # fmt: skip
    assert positions(result["completions"][0]) == list(range(first, 93))


@pytest.mark.parametrize("offset", [0, 1, 5, 6])
def test_a_stream_goes_on_at_an_offset_while_it_runs_and_from_the_store(bench, offset):
    client, later = bench.client(), bench.client()
    client.send("generate", prompt=PROMPT, max_tokens=6, return_routing="all", client="me")
    engine = Engine(bench, bench.submitted())
    engine.put(6)
    if offset < 6:  # while it runs
        later.send("attach", "k", target="a", client="me", stream="tokens", offsets={"0": offset}, stream_every=1)
        begin = 4 + offset - 1 if offset else 0
        assert positions(later.receive()) == list(range(begin, 9))
    engine.end()
    assert client.receive()["op"] == "result"
    stored = bench.client()
    stored.send("attach", "k2", target="a", client="me", stream="tokens", offsets={"0": offset})
    assert positions(stored.receive()) == list(range(4 + offset - 1 if offset else 0, 9))


def test_tokens_after_a_stop_string_take_their_entries_along(codec):
    with serving(codec, model=replace(MODEL, sparse=True, routing=SHAPE)) as bench:
        client, engine_tokens = bench.client(), codec.encode("a b END c d").tolist()
        client.send("generate", prompt=PROMPT, max_tokens=90, return_routing=True, stop={"strings": ["END"]})
        request = bench.submitted()
        told = entries(4, 4 + len(engine_tokens) - 1)
        bench.put(delta(request.key, 0, 0, engine_tokens, finish=Finish("length"), routing=told), done(request))
        (completion,) = client.receive()["completions"]
        kept = len(completion["token_ids"])
        assert 1 < kept < len(engine_tokens) and positions(completion) == list(range(4, 4 + kept - 1))


@pytest.mark.parametrize(("wanted", "first"), [(True, 4), ("all", 0)])
@pytest.mark.parametrize("given", [True, False])
def test_a_continued_completion_has_the_entries_that_came_with_it_or_those_of_this_worker(bench, wanted, first, given):
    client = bench.client()
    old = entries(first, 4 + 3 - 1) + 100 if given else None
    known = {"token_ids": [1, 2, 3], "seed": 5, **({"routing": old} if given else {})}
    client.send("generate", prompt=PROMPT, max_tokens=8, return_routing=wanted, continue_from=known, stream="tokens")
    engine = Engine(bench, bench.submitted())
    assert engine.request.routing_from == (6 if given else first)
    engine.put(5)
    engine.end()
    chunk, result = client.receive(), client.receive()
    assert positions(chunk) == list(range(6, 11)), "chunks have what is new"
    shift = 100 if given else 0
    assert positions(result["completions"][0]) == [*range(first + shift, 6 + shift), *range(6, 11)]


def test_where_no_token_has_come_there_is_no_routing(bench):
    client = bench.client()
    for fields in ({}, {"continue_from": {"token_ids": [1, 2], "seed": 1}}):
        client.send("generate", prompt=PROMPT, max_tokens=8, return_routing="all", **fields)
        Engine(bench, bench.submitted()).end()
        assert "routing" not in client.receive()["completions"][0]
        assert client.ask("ack", "k", targets=["a"])["op"] == "ok"


def test_who_does_not_ask_gets_none_and_the_engine_is_not_asked(bench):
    client = bench.client()
    client.send("generate", prompt=PROMPT, max_tokens=3, return_routing=False)
    request = bench.submitted()
    assert request.routing_from is None and request.stream_every == 0
    bench.finish(request)
    assert "routing" not in client.receive()["completions"][0]


def test_the_engine_hands_experts_over_bit_by_bit(bench):
    client = bench.client()
    client.send("generate", prompt=PROMPT, max_tokens=3, return_routing=True)
    assert 0 < bench.submitted().stream_every <= 1024


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"return_routing": "prompt"}, "return_routing"),
        ({"return_routing": 1}, "return_routing"),
        ({"return_routing": None}, "return_routing"),
        ({"routing": entries(4, 6)}, "return_routing"),
        ({"return_routing": True, "routing": entries(4, 7)}, "continue_from.routing"),
        ({"return_routing": "all", "routing": entries(4, 6)}, "continue_from.routing"),
        ({"return_routing": True, "routing": entries(4, 6)[:, :1]}, "continue_from.routing"),
        ({"return_routing": True, "routing": entries(4, 6).astype(np.uint16)}, "continue_from.routing"),
        ({"return_routing": True, "routing": entries(4, 6).astype(np.int32)}, "continue_from.routing"),
        ({"return_routing": True, "routing": entries(4, 6)[0]}, "continue_from.routing"),
        ({"return_routing": True, "routing": [[[1]]]}, "continue_from.routing"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(bench, fields, field):
    known = {"token_ids": [1, 2, 3], "seed": 5}
    if "routing" in fields:
        known["routing"] = fields.pop("routing")
    error = bench.client().ask("generate", prompt=PROMPT, max_tokens=9, continue_from=known, **fields)
    assert (error["op"], error["code"], error["field"]) == ("error", "bad_request", field)
    assert bench.inbox.empty()


@pytest.mark.parametrize(("sparse", "why"), [(False, "has no experts"), (True, "engine.routing")])
def test_a_worker_without_routing_says_why(sparse, why):
    with serving(model=replace(MODEL, sparse=sparse)) as bench:
        client = bench.client()
        for wanted in (True, "all"):
            error = client.ask("generate", prompt=PROMPT, return_routing=wanted)
            assert (error["code"], error["field"]) == ("bad_request", "return_routing") and why in error["message"]
        assert "return_routing" not in client.ask("status", "s")["capabilities"]


def test_a_worker_with_routing_says_so(bench):
    assert "return_routing" in bench.client().ask("status", "s")["capabilities"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 4, "max_tokens": 50, "return_routing": True}, "return_routing"),  # 4 x 50 x 6 bytes
        ({"n": 1, "max_tokens": 198, "return_routing": "all"}, "return_routing"),  # (198 + 4) x 6
        ({"n": 1, "max_tokens": 40, "logprobs": 4}, "logprobs"),  # 40 x 4 x 8
        ({"n": 1, "max_tokens": 40, "logprobs": 3, "return_routing": True}, "logprobs"),  # 40 x 24 + 40 x 6
    ],
)
def test_what_a_reply_may_come_to_is_bounded_before_there_is_any_of_it(fields, field):
    with serving(model=replace(MODEL, sparse=True, routing=SHAPE), max_reply_bytes=1199) as bench:
        client = bench.client()
        client.send("generate", prompt=PROMPT, **fields)
        refused = client.receive()
        assert (refused["code"], refused["field"]) == ("bad_request", field)
        assert "1199" in refused["message"]
        client.send("generate", prompt=PROMPT, **fields | {"max_tokens": fields["max_tokens"] - 20})
        assert bench.submitted().max_tokens == fields["max_tokens"] - 20
