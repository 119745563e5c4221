"""Routing as the clients put it together: over chunks, over workers, over a journal; and what is refused as routing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve
from tests.support.bridge.model_script import columns, vanish
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, counting, result
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire.errors import ProtocolError

PROMPT = [1, 2]
SEED = 11
OWN = completion_seed(SEED, 0)


def entries(version: int, start: int, end: int) -> np.ndarray:
    """Of positions start..end-1, which they tell, and of which worker they are."""
    found = np.empty((end - start, 2, 3), np.uint8)
    found[:, 0], found[:, 1] = np.arange(start, end)[:, None], version
    return found


@dataclass
class Routed:
    """A handler: one completion with routing, in chunks of 2 tokens up to `reach` (all without), then `fail`."""

    version: int
    reach: int | None = None
    fail: Callable[[ScriptedWorker, bytes, dict[str, Any]], None] | None = None

    def __call__(self, worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] != "generate":
            counting(worker, peer, header)
            return
        begin = len(PROMPT) if header["return_routing"] is True else 0
        known, end = header.get("continue_from"), header["max_tokens"]
        start = 0 if known is None else len(known["token_ids"])
        for offset in range(start, end if self.reach is None else self.reach, 2):
            upto = min(offset + 2, end)
            first = begin if offset == 0 else len(PROMPT) + offset - 1
            part = columns(OWN, offset, upto, self.version)
            part["routing"] = entries(self.version, first, len(PROMPT) + upto - 1)
            more = {"finish_reason": "length"} if upto == end else {}
            worker.reply(peer, header, {"op": "chunk", "index": 0, "offset": offset, **part, **more})
        if self.fail is not None:
            self.fail(worker, peer, header)
            return
        whole = {**columns(OWN, 0, end, self.version), "index": 0}
        whole["routing"] = entries(self.version, begin, len(PROMPT) + end - 1)
        worker.reply(peer, header, result([whole]))


def told(routing: np.ndarray | None) -> list[tuple[int, int]]:
    """(position, version) of entries."""
    assert routing is not None and routing.dtype == np.uint8
    return [(int(entry[0, 0]), int(entry[1, 2])) for entry in routing]


@pytest.mark.parametrize(("wanted", "first"), [(True, 2), ("all", 0)])
def test_what_two_workers_made_is_one_row_of_entries_and_is_not_sent_again(
    connect: Connect, serve: Serve, wanted: Any, first: int
) -> None:
    lost, other = serve(Routed(3, reach=4, fail=vanish)), serve(Routed(5))
    client = connect(lost.endpoint, other.endpoint, resume=True)
    done = client.generate(PROMPT, max_tokens=9, seed=SEED, return_routing=wanted)
    assert done.resumes == 1
    expected = [(position, 3 if position < 2 + 4 - 1 else 5) for position in range(first, 2 + 9 - 1)]
    assert told(done.completions[0].routing) == expected
    sent = next(header for header in other.requests if header["op"] == "generate")
    assert sent["return_routing"] == wanted and "routing" not in sent["continue_from"]


@pytest.mark.parametrize(("wanted", "first"), [(True, 2), ("all", 0)])
def test_the_rest_of_a_stream_that_ended_early_comes_from_the_result(
    connect: Connect, serve: Serve, wanted: Any, first: int
) -> None:
    worker = serve(Routed(3, reach=4))
    stream = connect(worker.endpoint).generate(PROMPT, max_tokens=9, seed=SEED, return_routing=wanted, stream="tokens")
    pieces = [told(chunk.part.routing) for chunk in stream]
    assert [piece[-1][0] for piece in pieces] == [2, 4, 9]
    assert sum(pieces, []) == [(position, 3) for position in range(first, 10)]
    assert told(stream.partials()[0].routing) == told(stream.result.completions[0].routing) == sum(pieces, [])


def test_a_journal_has_the_entries(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    worker = serve(Routed(3))
    asked = {"max_tokens": 7, "seed": SEED, "return_routing": "all", "request_id": "r"}
    before, count = connect(worker.endpoint, journal=tmp_path / "journal"), len(worker.requests)
    first = before.generate(PROMPT, **asked)
    before.close()
    count = len(worker.requests)
    again = connect(worker.endpoint, journal=tmp_path / "journal").generate(PROMPT, **asked)
    assert len(worker.requests) == count
    assert told(again.completions[0].routing) == told(first.completions[0].routing) == [(i, 3) for i in range(8)]


def test_where_the_beginning_is_not_known_a_stream_has_none_and_its_result_all(connect: Connect, serve: Serve) -> None:
    worker = serve(Routed(3))
    known = {"token_ids": columns(OWN, 0, 4, 1)["token_ids"], "seed": OWN}
    stream = connect(worker.endpoint).generate(
        PROMPT, max_tokens=9, return_routing=True, continue_from=known, stream="tokens"
    )
    assert sum((told(chunk.part.routing) for chunk in stream), []) == [(i, 3) for i in range(5, 10)]
    assert stream.partials()[0].routing is None
    assert told(stream.result.completions[0].routing) == [(i, 3) for i in range(2, 10)]


@pytest.mark.parametrize(
    "routing",
    [entries(1, 0, 1), entries(1, 0, 4)[:, 0], entries(1, 0, 4).astype(np.int32), [[[1]]] * 4, "none"],
)
def test_what_is_no_routing_of_a_reply_is_a_protocol_error(connect: Connect, serve: Serve, routing: Any) -> None:
    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        worker.reply(peer, header, result([completion([7, 8, 9], routing=routing)]))

    client = connect(serve(answer).endpoint)
    with pytest.raises(ProtocolError, match="routing"):
        client.generate(PROMPT, max_tokens=3, return_routing=True)


@pytest.mark.parametrize(
    "second", [entries(3, 4, 6)[:1], entries(3, 3, 6), entries(3, 4, 6)[:, :1], entries(3, 4, 6).astype(np.uint16)]
)
def test_a_chunk_whose_entries_do_not_go_on_from_those_before_is_a_protocol_error(
    connect: Connect, serve: Serve, second: Any
) -> None:
    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        for offset, routing in ((0, entries(3, 0, 3)), (2, second)):
            part = columns(OWN, offset, offset + 2, 3)
            worker.reply(peer, header, {"op": "chunk", "index": 0, "offset": offset, **part, "routing": routing})

    stream = connect(serve(answer).endpoint).generate(
        PROMPT, max_tokens=9, seed=SEED, return_routing="all", stream="tokens"
    )
    assert told(next(stream).part.routing) == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(ProtocolError, match="routing"):
        next(stream)
