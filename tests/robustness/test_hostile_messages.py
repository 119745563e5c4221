"""Hostile messages at a server: each has one answer, and the stream of a good client stays right.

The full count is 100,000 messages, in nightly runs; a default run sends a tenth.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import Pause, Resume, Shutdown, Submit
from rollout.engine.messages.to_service import Delta, Done, Finish
from tests.support.robustness.corpus import MAKERS, UNREADABLE, Hostile, hostile_messages, throw_junk
from tests.support.robustness.limits import little_memory_and_time, rss_bytes
from tests.support.service.harness import Bench, Client, done, serving
from tests.support.service.media import WITH_IMAGES
from trainer_bridge.wire.codec import DEFAULT_LIMITS, WireError, WireLimits, decode, encode, header_id

MESSAGES = [10_000, pytest.param(100_000, marks=pytest.mark.nightly)]
WARM_UP = 0.2  # of the messages
IN_FLIGHT = 1000  # unanswered messages
BURST_S = 120.0
PIECE = 8  # tokens of one delta of the good stream
LIMITS: dict[str, Any] = {
    "max_message_bytes": 1 << 20,
    "max_header_bytes": 256 << 10,
    "max_prompt_tokens": 5000,
    "max_n": 8,
    "max_results": 200,
    "max_results_bytes": 4 << 20,
    "lease_s": 0.5,
    "media_store_bytes": 4096,
}


class Engine:
    """Stands in for the engine: the good request streams until `finish`, every other request ends immediately."""

    def __init__(self, bench: Bench, good: str) -> None:
        self._bench, self._good = bench, good
        self._stream: Request | None = None
        self._at = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._ending.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._take(self._bench.inbox.get(timeout=0.005))
            except Empty:
                self._extend()
        assert self._stream is not None, "the good request never came"
        self._extend(Finish("length"))
        self._bench.put(done(self._stream))

    def _take(self, command: Any) -> None:
        if isinstance(command, Submit):
            if command.request.key[0] == f"client:{self._good}":
                self._stream = command.request
            else:
                self._bench.finish(command.request)
        elif isinstance(command, Resume):
            self._bench.put(Done(command.token))
        else:
            assert not isinstance(command, (Pause, Shutdown)), "a hostile message must not reach this far"

    def _extend(self, finish: Finish | None = None) -> None:
        if self._stream is not None:
            tokens = stream_tokens(self._at, PIECE)
            values = tokens.astype(np.float32)
            self._bench.put(
                Delta(self._stream.key, 0, self._at, tokens, -values, -values, None, [(7, PIECE)], 1, finish)
            )
            self._at += PIECE


def stream_tokens(start: int, count: int) -> np.ndarray:
    """The tokens of the good stream."""
    return (np.arange(start, start + count, dtype=np.int32) * 7919) % 301


@dataclass
class Attacker:
    """One connection that sends hostile messages and counts the answers."""

    client: Client
    expected: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def send(self, message: Hostile) -> None:
        self.client.socket.send_multipart(message.frames)
        self.expected[message.id] += 1

    def read(self) -> None:
        while True:
            try:
                frames = self.client.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = msgpack.unpackb(frames[0] or frames[1])
            if reply["op"] != "chunk":
                self.answers[reply["id"]] += 1
                self.codes[reply.get("code", reply["op"])] += 1

    @property
    def waiting(self) -> int:
        return self.expected.total() - self.answers.total()


@dataclass
class GoodStream:
    """The good client's stream, checked token by token as it comes."""

    client: Client
    tokens: int = 0
    ended: bool = False

    def read(self) -> None:
        while not self.ended and self.client.socket.poll(0):
            reply = self.client.receive()
            assert reply["op"] in ("chunk", "result"), reply
            if reply["op"] == "result":
                tokens = reply["completions"][0]["token_ids"]
                assert np.array_equal(tokens, stream_tokens(0, self.tokens))
                self.ended = True
                return
            assert reply["offset"] == self.tokens, "a gap or an overlap"
            count = len(reply["token_ids"])
            assert np.array_equal(reply["token_ids"], stream_tokens(self.tokens, count)), "a wrong token"
            assert np.array_equal(reply["logprobs"], -reply["token_ids"].astype(np.float32))
            assert sum(run[1] for run in reply["versions"]) == count
            self.tokens += count


def attack(attackers: list[Attacker], good: GoodStream, messages: Iterator[Hostile]) -> int:
    """Send all messages in bursts, from each attacker in turn, and read the good stream; returns the peak of memory."""
    most = rss_bytes()
    while burst := list(itertools.islice(messages, IN_FLIGHT)):
        for number, message in enumerate(burst):
            attackers[number % len(attackers)].send(message)
        give_up = time.monotonic() + BURST_S
        while any(attacker.waiting for attacker in attackers):
            settle(attackers, good)
            assert time.monotonic() < give_up, "messages are not answered"
        most = max(most, rss_bytes())
    return most


def settle(attackers: list[Attacker], good: GoodStream) -> None:
    poller = zmq.Poller()
    for socket in (good.client.socket, *(attacker.client.socket for attacker in attackers if attacker.waiting)):
        poller.register(socket, zmq.POLLIN)
    assert poller.poll(20_000), "no answer comes any more"
    time.sleep(0.005)  # let the service have the interpreter: two threads in turns are slower
    for attacker in attackers:
        attacker.read()
    good.read()


@pytest.mark.parametrize("messages", MESSAGES)
def test_each_hostile_message_has_one_answer_and_others_go_on(messages: int, codec) -> None:
    warm_up = int(messages * WARM_UP)
    with serving(codec, model=WITH_IMAGES, **LIMITS) as bench:
        engine = Engine(bench, "good")
        good = GoodStream(bench.client())
        fields: dict[str, Any] = {"client": "good", "prompt": [1], "max_tokens": 900, "stream": "tokens"}
        good.client.send("generate", "good", **fields, stream_every=PIECE)
        attackers = [Attacker(bench.client()) for _ in range(4)]
        attack(attackers, good, hostile_messages(warm_up, seed=1))
        before, tokens_before = rss_bytes(), good.tokens
        most = attack(attackers, good, hostile_messages(messages - warm_up, seed=2))
        engine.finish()
        while not good.ended:
            assert good.client.socket.poll(20_000)
            good.read()
        assert good.tokens > tokens_before > 0, "the good stream stood still"
        for attacker in attackers:
            assert attacker.answers == attacker.expected, "each message has one answer, with the id that it had"
        assert sum(attacker.answers.total() for attacker in attackers) == messages
        codes = sum((attacker.codes for attacker in attackers), Counter())
        assert not codes["internal"], codes
        for code in ("bad_message", "bad_request", "too_long", "not_found", "result"):
            assert codes[code] > 10, (code, codes)
        assert most - before < 48 << 20, f"{(most - before) >> 20} MiB more"


def test_the_messages_are_hostile_in_every_way_and_always_the_same() -> None:
    first = [message.frames for message in hostile_messages(300, seed=3)]
    assert first == [message.frames for message in hostile_messages(300, seed=3)]
    for maker in MAKERS:
        messages = list(hostile_messages(80, seed=4, kinds=maker.__name__))
        for message in messages:
            # The reader of broken headers agrees with what the maker knows.
            assert (header_id(message.frames) or UNREADABLE) == message.id, (maker.__name__, message)
        bad = 0
        for message in messages:
            try:
                decode(message.frames)
            except WireError:
                bad += 1
        of_right_form = ("absurd_but_valid", "wrong_types", "wrong_ops", "wrong_ids", "wrong_arrays", "wrong_media")
        if maker.__name__ not in of_right_form:
            assert bad > 20 or maker.__name__ in ("too_large", "many_containers"), maker.__name__


def test_the_codec_allocates_nothing_for_a_length_that_is_only_claimed() -> None:
    kinds = "huge_lengths deep_nesting wrong_blobs cut_off changed_byte"
    messages = list(hostile_messages(3000, seed=6, kinds=kinds))
    with little_memory_and_time(64 << 20, soon_s=20.0):
        for message in messages:
            try:
                decode(message.frames)
            except WireError:
                continue


def test_a_header_of_many_containers_is_cut_off() -> None:
    limits = WireLimits(max_containers=1000)
    header = msgpack.packb({"id": "x", "y": [[]] * 1000})
    with pytest.raises(WireError, match="1000 maps and lists"):
        decode([header], limits)
    decode([msgpack.packb({"id": "x", "y": [[]] * 998})], limits)


def test_metadata_that_is_accepted_can_be_returned(codec) -> None:
    """Metadata at the limit of depth is echoed: a message whose reply could not be encoded is refused."""
    with serving(codec) as bench:
        client = bench.client()
        for depth in (1, 29, 30, 31, 32, 33):
            nested: Any = 1
            for _ in range(depth):
                nested = {"x": nested}
            header = {"v": 1, "op": "generate", "id": f"d{depth}", "prompt": [1], "max_tokens": 1, "metadata": nested}
            client.send_frames([msgpack.packb(header)])
            if depth < DEFAULT_LIMITS.max_depth:
                bench.finish(bench.submitted())
            reply = client.receive()
            assert reply["op"] == ("result" if depth < DEFAULT_LIMITS.max_depth else "error"), (depth, reply)
            assert reply["op"] == "error" or reply["metadata"] == nested


def test_long_names_in_a_message_do_not_make_its_answer_long(codec) -> None:
    with serving(codec) as bench:
        client = bench.client()
        for fields in ({"x" * 100_000: 1}, {"sampling": {"x" * 100_000: 1}}, {"stop": {"strings": [], "y" * 9999: 0}}):
            client.send_frames([msgpack.packb({"v": 1, "op": "generate", "id": "a", "prompt": [1], **fields})])
            frames = client.socket.recv_multipart()
            assert sum(map(len, frames)) < 2000
        client.send_frames([msgpack.packb({"v": 1, "op": "y" * 100_000, "id": "a"})])
        assert sum(map(len, client.socket.recv_multipart())) < 2000


def test_a_message_twice_as_large_as_allowed_closes_its_connection_and_no_other(codec) -> None:
    with serving(codec, max_message_bytes=1 << 16) as bench:
        bad, good = bench.client(), bench.client()
        assert good.ask("ping")["op"] == "ok"
        bad.send_frames([bytes((1 << 17) + 1)])
        assert bad.socket.poll(300) == 0
        assert good.ask("ping")["op"] == "ok"


def test_junk_on_the_port_takes_no_memory_and_others_go_on(codec) -> None:
    with serving(codec) as bench:
        good = bench.client()
        good.send("generate", "good", prompt=[1, 2], max_tokens=3)
        request = bench.submitted()
        before = rss_bytes()
        for _ in range(3):
            assert throw_junk(bench.server.endpoint) > 20
        assert rss_bytes() - before < 64 << 20
        bench.finish(request)
        assert good.receive()["op"] == "result"


def test_an_endless_message_does_not_block_other_connections(codec) -> None:
    """The server reads a message when its last frame has arrived; until then it serves other connections."""
    with serving(codec) as bench:
        endless, good = bench.client(), bench.client()
        for _ in range(5000):
            endless.socket.send(b"x", zmq.SNDMORE)
        assert good.ask("ping")["op"] == "ok"
        endless.socket.send(b"")
        error = endless.receive()
        assert error["op"] == "error" and "blobs" in error["message"]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_requests_in_flight_have_a_bound_in_bytes_together(codec) -> None:
    with serving(codec, max_pending_bytes=200_000) as bench:
        client = bench.client()
        for name in ("a", "b"):
            client.send("generate", name, prompt=[1], max_tokens=2, metadata={"x": "y" * 80_000})
        requests = [bench.submitted(), bench.submitted()]
        error = client.ask("generate", "c", prompt=[1], max_tokens=2, metadata={"x": "y" * 80_000})
        assert error["code"] == "overloaded" and error["retry_after_s"] > 0
        error = client.ask("generate", "d", prompt=[1], max_tokens=2, n=50)
        assert error["code"] == "overloaded"
        client.send("generate", "e", prompt=[1], max_tokens=2)
        bench.finish(bench.submitted())
        assert client.receive()["id"] == "e"
        for request in requests:
            bench.finish(request)
        assert {client.receive()["id"] for _ in range(2)} == {"a", "b"}
        client.send("generate", "c", prompt=[1], max_tokens=2, metadata={"x": "y" * 80_000})
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"


def test_text_has_a_bound_in_characters_before_and_after_its_template(codec) -> None:
    with serving(codec, max_prompt_chars=100) as bench:
        client = bench.client()
        client.send("generate", "short", prompt="x" * 100, max_tokens=1)
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"
        error = client.ask("generate", "long", prompt="x" * 101, max_tokens=1)
        assert (error["code"], error["field"]) == ("too_long", "prompt") and "101 characters" in error["message"]
        messages = [{"role": "user", "content": "x" * 90}]
        error = client.ask("generate", "chat", messages=messages, max_tokens=1)
        assert (error["code"], error["field"]) == ("too_long", "messages")


def test_control_messages_that_wait_have_a_bound(codec) -> None:
    with serving(codec) as bench:
        client = bench.client()
        for number in range(1100):
            client.send("pause", f"p{number}")
        codes = Counter(client.receive()["code"] for _ in range(1100 - 1024))
        assert codes == {"overloaded": 1100 - 1024}
        tokens = [bench.command().token for _ in range(1024)]
        bench.put(*(Done(token) for token in tokens))
        assert Counter(client.receive()["op"] for _ in range(1024)) == {"ok": 1024}
        client.send("resume", "r")
        bench.put(Done(bench.command().token))
        assert client.receive()["op"] == "ok"


class SilentReceiver:
    """A weight receiver that answers when the test says so."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.at_once = False

    def control(self, header: Any, reply: Any) -> None:
        if self.at_once:
            reply({"op": "ok"})
        self.replies.append(reply)


def test_weight_messages_that_wait_have_a_bound(codec) -> None:
    receiver = SilentReceiver()
    with serving(codec, receiver=receiver) as bench:
        client = bench.client()
        for number in range(70):
            client.send("weights", f"w{number}", action="status")
        assert Counter(client.receive()["code"] for _ in range(6)) == {"overloaded": 6}
        for reply in receiver.replies:
            reply({"op": "ok"})
        assert Counter(client.receive()["op"] for _ in range(64)) == {"ok": 64}
        receiver.at_once = True
        reply = client.ask("weights", "again", action="status")
        assert (reply["op"], reply["id"]) == ("ok", "again"), "an answered message no longer counts"


def test_a_cancel_that_is_repeated_reaches_the_engine_once(codec) -> None:
    with serving(codec) as bench:
        client = bench.client()
        client.send("generate", "a", prompt=[1], max_tokens=5)
        request = bench.submitted()
        for number in range(100):
            assert client.ask("cancel", f"c{number}", target="a")["op"] == "ok"
        bench.command()
        assert bench.inbox.empty()
        bench.finish(request, reason="cancelled")
        assert client.receive()["op"] == "result"


def test_an_unspoiled_message_is_valid() -> None:
    """The messages that the corpus spoils are valid before it spoils them."""
    message = {"id": "x", "v": 1, "op": "generate", "prompt": [3, 4, 14], "max_tokens": 4, "stop": {"ignore_eos": True}}
    with serving() as bench:
        client = bench.client()
        client.send_frames(encode(message))
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"
