"""A client with a routing id of its own that is back before the worker has noticed that it was gone (half-open)."""

import zmq

from rollout.engine.messages.to_engine import Cancel
from rollout.service.connections import Disconnects
from tests.support.patience import PATIENCE_S
from tests.support.service.harness import Client, delta, serving

ID = b"trainer-0"


def with_identity(bench) -> Client:
    """A client whose socket has a routing id. Several at once are to the worker what half-open connections are."""
    client = bench.client()
    client.socket.close(0)
    client.socket = bench.context.socket(zmq.DEALER)
    for option, value in ((zmq.ROUTING_ID, ID), (zmq.RCVTIMEO, PATIENCE_S * 1000), (zmq.LINGER, 0)):
        client.socket.setsockopt(option, value)
    client.socket.connect(bench.server.endpoint)
    return client


def end(bench, client: Client) -> None:
    """Close a connection. Returns when the worker has noticed that another one ended, which was closed after it."""
    witness = bench.client()
    witness.send("generate", "w", prompt=[1], max_tokens=3)
    request = bench.submitted()
    client.socket.close(0)
    witness.socket.close(0)
    assert bench.command() == Cancel(request.key)
    bench.finish(request, [], reason="cancelled")


def test_a_client_that_reconnects_is_heard_though_its_old_connection_is_still_open(codec):
    with serving(codec) as bench:
        before = with_identity(bench)
        assert before.ask("ping", "1")["op"] == "ok"
        after = with_identity(bench)
        assert [after.ask("ping", name)["id"] for name in ("2", "3")] == ["2", "3"]
        before.socket.close(0)
        assert after.ask("ping", "4")["id"] == "4"


def test_the_end_of_the_old_connection_does_not_end_what_the_new_one_asked_for(codec):
    with serving(codec, lease_s=0.0) as bench:
        before = with_identity(bench)
        assert before.ask("ping", "1")["op"] == "ok"
        after = with_identity(bench)
        after.send("generate", "r", client="job", prompt=[1], max_tokens=3)
        after.send("generate", "s", prompt=[1], max_tokens=3)
        requests = [bench.submitted(), bench.submitted()]
        end(bench, before)
        assert bench.client().ask("status", "x")["reclaimed"] == 1 and bench.inbox.empty(), "only the witness's"
        for request in requests:
            bench.finish(request)
        assert {after.receive()["id"], after.receive()["id"]} == {"r", "s"}


def test_streams_of_the_old_connection_do_not_go_on_in_the_new_one_with_a_gap(codec):
    with serving(codec, lease_s=30.0) as bench:
        before = with_identity(bench)
        before.send("generate", "r", client="job", prompt=[1], max_tokens=4, stream="tokens", stream_every=1)
        request = bench.submitted()
        bench.put(delta(request.key, 0, 0, [1, 2]))
        assert before.receive()["op"] == "chunk"
        after = with_identity(bench)
        assert after.ask("ping", "p", client="job")["id"] == "p"
        bench.put(delta(request.key, 0, 2, [3]))
        after.send("attach", "b", client="job", target="r", stream="tokens", stream_every=1, offsets={"0": 2})
        chunks = [after.receive()]
        bench.put(delta(request.key, 0, 3, [4]))
        chunks.append(after.receive())
        assert {chunk["id"] for chunk in chunks} == {"b"}
        assert [chunk["token_ids"].tolist() for chunk in chunks] == [[3], [4]]
        assert bench.inbox.empty() and bench.client().ask("status", "x")["reclaimed"] == 0


def test_an_end_that_is_read_together_with_the_next_message_comes_before_it():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, PATIENCE_S * 1000
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.bind("tcp://127.0.0.1:0")
        departures = Disconnects(router)
        try:
            for ended in ([], [ID], [ID]):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.linger, dealer.routing_id = 1000, ID
                    dealer.connect(router.last_endpoint.decode())
                    dealer.send(b"x")
                    frame, _ = router.recv_multipart(copy=False)
                    assert departures.note(frame.bytes, frame) == ended
            assert departures.take() in ([], [ID]), "of the last one only"
        finally:
            departures.close()
