"""Hostile messages at a whole worker: the streams of a good client stay right, and memory stays flat.

The full count is 12,000 messages, in nightly runs; a default run sends a tenth.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import msgpack
import pytest
import zmq

from tests.support.robustness.corpus import Hostile, hostile_messages, throw_junk
from tests.support.robustness.limits import rss_bytes
from tests.support.worker.harness import check, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

MESSAGES = [600, pytest.param(12_000, marks=pytest.mark.nightly)]
BURST = 250
PROMPT = "17:"
COMPLETIONS, TOKENS = 2, 15_000  # more than are generated during the attack


class Attacker:
    """A connection that sends hostile messages and counts the answers to each id."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.expected: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()

    def send(self, message: Hostile) -> None:
        self.socket.send_multipart(message.frames)
        self.expected[message.id] += 1

    def read_all(self) -> None:
        """Read until every message has its answer."""
        while self.answers.total() < self.expected.total():
            assert self.socket.poll(60_000), "no answer comes any more"
            frames = self.socket.recv_multipart()
            reply = msgpack.unpackb(frames[0] or frames[1])
            if reply["op"] != "chunk":
                self.answers[reply["id"]] += 1
                self.codes[reply.get("code", reply["op"])] += 1


def attack(attackers: list[Attacker], messages: Iterator[Hostile]) -> None:
    while burst := list(itertools.islice(messages, BURST)):
        for number, message in enumerate(burst):
            attackers[number % len(attackers)].send(message)
        for attacker in attackers:
            attacker.read_all()


@pytest.mark.parametrize("messages", MESSAGES)
def test_hostile_messages_leave_a_good_stream_without_a_wrong_token(
    messages: int, worker: WorkerProcess, client: RolloutClient
) -> None:
    warm_up = messages // 6
    with zmq.Context() as context:
        attackers = [Attacker(context, worker.endpoint) for _ in range(3)]
        attack(attackers, hostile_messages(warm_up, seed=21))
        before = rss_bytes(worker.pid)
        with client.generate(PROMPT, n=COMPLETIONS, max_tokens=TOKENS, stream="tokens", stream_every=16) as stream:
            next(stream)
            attack(attackers, hostile_messages(messages - warm_up, seed=22))
            taken = rss_bytes(worker.pid) - before
            stream.cancel()
            result = stream.wait()
        for attacker in attackers:
            attacker.socket.close()
    for completion in result.completions:
        assert len(completion) > messages // 24, "the stream stood still"
        check(PROMPT, completion, {0: 1})
    for attacker in attackers:
        assert attacker.answers == attacker.expected, "each message has one answer, with the id that it had"
        assert not attacker.codes["internal"], attacker.codes
        assert min(attacker.codes["bad_message"], attacker.codes["bad_request"]) > messages // 120, attacker.codes
    assert taken < 48 << 20, f"{taken >> 20} MiB more"
    client.ping()


def test_junk_on_both_ports_leaves_a_good_stream_without_a_wrong_token(
    worker: WorkerProcess, client: RolloutClient
) -> None:
    before = rss_bytes(worker.pid)
    with client.generate(PROMPT, max_tokens=600, stream="tokens", stream_every=8) as stream:
        next(stream)
        for endpoint in (worker.endpoint, worker.weights_endpoint):
            assert throw_junk(endpoint) > 20
        result = stream.wait()
    check(PROMPT, result.completions[0], {0: 1})
    assert rss_bytes(worker.pid) - before < 64 << 20
    until(lambda: client.status()["rows"]["running"] == 0, "the end of the row")
