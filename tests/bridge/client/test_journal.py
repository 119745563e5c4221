"""The journal: what a killed process leaves is read, damage is not passed over, what is there needs no worker."""

import gc
import resource
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve, SetClock
from tests.support.bridge.model_script import Model, check, columns, letters, refuse, silent, vanish
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.journal import Journal, fingerprint
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, Timing, read_completion
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire import errors

SEED = 11
SEEDS = [completion_seed(SEED, index) for index in range(4)]


def piece(start: int, end: int, index: int = 0, **more: Any) -> Chunk:
    return Chunk(start, read_completion({"index": index, **columns(SEEDS[index], start, end, 3, True), **more}))


def result_of(completion: Completion) -> GenerateResult:
    return GenerateResult(
        "r", [completion], 2, 1, Timing(total_s=1.5), 0, "w0", {"a": np.arange(3)}, "tcp://x", 2, {"seed": 5}
    )


def write(path: Path, *ids: str) -> None:
    """Two chunks and a result for each id."""
    journal = Journal(path)
    for request_id in ids:
        journal.begin(request_id, "mark", SEED, 1.5, {"prompt": np.arange(4)})
        journal.sent(request_id, "tcp://x", "leg")
        journal.add(request_id, piece(0, 2))
        journal.add(request_id, piece(2, 5, finish_reason="stop", stop="end", text="abc"))
        journal.finish(request_id, result_of(piece(0, 5, text="abc").part))
    journal.close()


def read(path: Path, request_id: str) -> Any:
    journal = Journal(path)
    try:
        return journal.read(request_id)
    finally:
        journal.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "j", "r")
    saved = read(tmp_path / "j", "r")
    assert (saved.mark, saved.seed, saved.started_unix_s, saved.texts) == ("mark", SEED, 1.5, ["abc"])
    assert saved.legs == [("tcp://x", "leg")]
    first, last = saved.chunks
    np.testing.assert_array_equal(np.concatenate([first.token_ids, last.token_ids]), piece(0, 5).token_ids)
    for name in ("logprobs", "raw_logprobs", "drawn_logprobs"):
        np.testing.assert_array_equal(getattr(last.part, name), getattr(piece(2, 5).part, name))
    assert (last.offset, last.finish_reason, last.part.stop, last.part.versions) == (2, "stop", "end", [(3, 3)])
    assert (saved.result.worker, saved.result.resumes, saved.result.timing) == ("w0", 2, Timing(total_s=1.5))
    assert saved.result.metadata["a"].tolist() == [0, 1, 2] and saved.result.extra == {"seed": 5}
    assert (saved.result.prompt_tokens, saved.result.cached_tokens, saved.result.endpoint) == (2, 1, "tcp://x")


def test_a_file_torn_anywhere_gives_every_record_before_and_can_be_written_on(tmp_path: Path) -> None:
    write(tmp_path / "whole", "r")
    whole = (tmp_path / "whole").read_bytes()
    path, tokens_at = tmp_path / "torn", []
    for size in (*range(0, len(whole), 3), len(whole)):
        path.write_bytes(whole[:size])
        journal = Journal(path)
        saved = journal.read("r")
        tokens_at.append(0 if saved is None else sum(len(chunk.token_ids) for chunk in saved.chunks))
        if saved is not None and saved.result is None:
            journal.add("r", piece(tokens_at[-1], tokens_at[-1] + 1))
        elif saved is None:
            journal.begin("r", "mark", SEED, 1.5, {})
        journal.close()
        again = read(path, "r")
        if saved is not None and saved.result is None:
            assert len(again.chunks) == len(saved.chunks) + 1
        else:
            assert (again.result is None) == (saved is None)
    assert sorted(set(tokens_at)) == [0, 2, 5] and tokens_at == sorted(tokens_at)
    assert read(tmp_path / "whole", "r").result is not None


def test_zeros_at_the_end_are_cut(tmp_path: Path) -> None:
    write(tmp_path / "j", "r")
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + bytes(5000))
    assert read(tmp_path / "j", "r").result is not None
    assert (tmp_path / "j").read_bytes() == whole


def test_every_flipped_byte_before_the_last_record_is_an_error_and_nothing_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "j", "a", "b")
    whole = (tmp_path / "j").read_bytes()
    last = start_of_the_last_record(tmp_path / "j")
    for place in range(0, last, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        (tmp_path / "j").write_bytes(damaged)
        with pytest.raises(errors.JournalFailed, match="damaged at byte|not a journal"):
            Journal(tmp_path / "j")
        assert (tmp_path / "j").read_bytes() == damaged


def start_of_the_last_record(path: Path) -> int:
    """Where a journal ends that lost the last byte of its last record: it was cut, and the rest was kept."""
    torn = path.with_suffix(".torn")
    torn.write_bytes(path.read_bytes()[:-1])
    Journal(torn).close()
    return torn.stat().st_size


def test_another_file_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    with pytest.raises(errors.JournalFailed, match="not a journal"):
        Journal(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "dear diary"
    with pytest.raises(errors.JournalFailed, match="cannot be opened"):
        Journal(tmp_path / "no folder" / "j")


def test_a_journal_has_one_client(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(errors.JournalFailed, match="in use"):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


def test_a_write_that_fails_leaves_no_torn_record_behind(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.begin("r", "mark", SEED, 1.5, {})
    size = (tmp_path / "j").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(errors.JournalFailed, match="cannot be written"):
            journal.add("r", piece(0, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.add("r", piece(0, 3))
    journal.close()
    assert [len(chunk.token_ids) for chunk in read(tmp_path / "j", "r").chunks] == [3]


def test_forgotten_requests_are_gone_and_their_bytes_too(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, *(f"r{number}" for number in range(2000)))
    before = path.stat().st_size
    assert before > 2 << 20
    journal = Journal(path)
    journal.forget([f"r{number}" for number in range(1990)] + ["never there"])
    assert journal.ids() == {f"r{number}": True for number in range(1990, 2000)}
    assert path.stat().st_size < before / 100
    assert [len(chunk.token_ids) for chunk in journal.read("r1999").chunks] == [2, 3]
    journal.begin("new", "mark", SEED, 1.5, {})
    journal.add("new", piece(0, 2))
    journal.close()
    assert len(read(path, "new").chunks) == 1 and read(path, "r1995").result is not None and read(path, "r3") is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["j"]


def test_what_a_client_that_was_killed_while_it_cleared_out_left_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "a")
    (tmp_path / "journal.new").write_bytes(b"half of it")
    Journal(path, read_only=True).close()
    assert len(list(tmp_path.iterdir())) == 2, "a reader changes nothing"
    journal = Journal(path)
    assert list(tmp_path.iterdir()) == [path] and "a" in journal.ids()
    journal.close()


def test_a_forgotten_id_can_be_used_again(tmp_path: Path) -> None:
    write(tmp_path / "j", "r")
    journal = Journal(tmp_path / "j")
    journal.forget(["r"])
    journal.begin("r", "other", 7, 2.5, {})
    journal.close()
    saved = read(tmp_path / "j", "r")
    assert (saved.mark, saved.chunks, saved.result) == ("other", [], None)


@pytest.mark.parametrize("fsync", ["never", "results", "always"])
def test_the_disk_is_waited_for_as_asked(tmp_path: Path, fsync: Any) -> None:
    synced = []
    journal = Journal(tmp_path / "j", fsync, sync=synced.append)
    journal.begin("r", "mark", SEED, 1.5, {})
    journal.add("r", piece(0, 5))
    journal.finish("r", result_of(piece(0, 5).part))
    journal.close()
    assert len(synced) == {"never": 0, "results": 1, "always": 3}[fsync]


def test_a_request_is_the_same_whatever_the_order_of_its_keys() -> None:
    one = {"prompt": np.arange(3), "sampling": {"top_k": 1, "seed": 2}, "stream": "tokens", "priority": 3}
    assert fingerprint(one) == fingerprint({"sampling": {"seed": 2, "top_k": 1}, "prompt": np.arange(3)})
    for other in ({"prompt": np.arange(4)}, {"sampling": {"top_k": 1, "seed": 3}}, {"n": 2}):
        assert fingerprint(one) != fingerprint({**one, **other})


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_finished_result_is_answered_without_a_worker(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    worker = serve(Model(3, drawn=True))
    asked = {"n": 2, "max_tokens": 6, "request_id": "r", "return_text": True, "metadata": {"step": 1}}
    client = connect(worker.endpoint, journal=tmp_path / "j")
    first = client.generate([1], **asked)
    client.close()
    worker.stop()
    client = connect(worker.endpoint, journal=tmp_path / "j")
    again = client.generate([1], **asked)
    for one, other in zip(first.completions, again.completions, strict=True):
        check(other, one.seed, 6, [(3, 6)], drawn=True)
        assert other.text == letters(one.seed, 0, 6) and other.finish_reason == "length"
    assert (again.id, again.worker, again.metadata, again.timing) == ("r", "w3", {"step": 1}, first.timing)
    (batched,) = client.generate_many([{"prompt": [1], **asked}])
    assert batched.completions[1].token_ids.tolist() == first.completions[1].token_ids.tolist()
    stream = client.generate([1], **asked, stream="completions")
    assert [item.token_ids.tolist() for item in stream] == [item.token_ids.tolist() for item in first.completions]
    assert client.journaled() == {"r": True}


def test_an_unfinished_request_goes_on_where_another_process_left_it(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    first = serve(Model(3, reach=(6, 0, 3), fail=silent))
    client = connect(first.endpoint, journal=tmp_path / "j")
    stream = client.generate([1], n=3, max_tokens=6, request_id="r", stream="tokens")
    seen = [next(stream) for _ in range(5)]
    assert client.journaled() == {"r": False}
    seeds = {chunk.index: chunk.part.seed for chunk in seen}
    first.stop()
    client.close()
    second = serve(Model(4), endpoint=first.endpoint)
    client = connect(second.endpoint, journal=tmp_path / "j")
    result = client.generate([1], n=3, max_tokens=6, request_id="r")
    request_seed = result.extra["seed"]
    assert seeds == {index: completion_seed(request_seed, index) for index in (0, 2)}
    check(result.completions[0], seeds[0], 6, [(3, 6)])
    check(result.completions[1], completion_seed(request_seed, 1), 6, [(4, 6)])
    check(result.completions[2], seeds[2], 6, [(3, 3), (4, 3)])
    assert [header["continue_from"]["seed"] for header in second.requests] == [
        completion_seed(request_seed, index) for index in (1, 2)
    ]
    assert result.resumes == 2 and client.journaled() == {"r": True}


def test_a_wall_clock_that_was_set_back_gives_a_journals_request_no_more_time(
    connect: Connect, serve: Serve, tmp_path: Path, set_clock: SetClock
) -> None:
    first = serve(Model(3, reach=(4,), fail=vanish))
    client = connect(first.endpoint, journal=tmp_path / "j", resume_timeout_s=0.4)
    with pytest.raises(errors.ResumeFailed):
        client.generate([1], max_tokens=8, seed=SEED, request_id="r", deadline_s=3_600.0)
    client.close()
    set_clock(-86_400.0)
    second = serve(Model(4), endpoint=first.endpoint)
    result = connect(second.endpoint, journal=tmp_path / "j").generate(
        [1], max_tokens=8, seed=SEED, request_id="r", deadline_s=3_600.0
    )
    assert result.completions[0].finish_reason == "length" and 0 < result.timing.total_s < 600
    assert 3_000 < second.requests[0]["deadline_s"] <= 3_600


def test_a_stream_begins_with_what_the_journal_has(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    first = serve(Model(3, reach=(4,), fail=vanish))
    client = connect(first.endpoint, journal=tmp_path / "j", resume_timeout_s=0.4)
    with pytest.raises(errors.ResumeFailed):
        client.generate([1], max_tokens=8, seed=SEED, request_id="r")
    client.close()
    second = serve(Model(4), endpoint=first.endpoint)
    client = connect(second.endpoint, journal=tmp_path / "j")
    stream = client.generate([1], max_tokens=8, seed=SEED, request_id="r", stream="tokens")
    assert [chunk.offset for chunk in stream] == [0, 2, 4, 6]
    check(stream.result.completions[0], SEEDS[0], 8, [(3, 4), (4, 4)])
    assert len(second.requests) == 1


def test_a_request_whose_tokens_were_all_there_needs_no_worker(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    worker = serve(Model(3, fail=silent))
    client = connect(worker.endpoint, journal=tmp_path / "j")
    stream = client.generate([1], max_tokens=8, seed=SEED, request_id="r", stream="tokens")
    assert [next(stream).offset for _ in range(4)] == [0, 2, 4, 6]
    client.close()
    worker.stop()
    result = connect(worker.endpoint, journal=tmp_path / "j").generate([1], max_tokens=8, seed=SEED, request_id="r")
    check(result.completions[0], SEEDS[0], 8, [(3, 8)])


def test_a_named_client_ends_what_its_earlier_process_left_running(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    worker = serve(Model(3, reach=(4,), fail=silent))
    killed = f"""
import os, signal
from trainer_bridge import RolloutClient
client = RolloutClient({worker.endpoint!r}, journal={str(tmp_path / "j")!r}, client="trainer")
stream = client.generate([1], max_tokens=8, seed={SEED}, request_id="r", stream="tokens")
assert [next(stream).offset, next(stream).offset] == [0, 2]
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed], timeout=120).returncode == -signal.SIGKILL
    worker.handler = Model(4)
    after = connect(worker.endpoint, journal=tmp_path / "j", client="trainer")
    result = after.generate([1], max_tokens=8, seed=SEED, request_id="r")
    check(result.completions[0], SEEDS[0], 8, [(3, 4), (4, 4)])
    assert [(header["op"], header.get("target")) for header in worker.requests[1:]] == [
        ("cancel", worker.requests[0]["id"]),
        ("generate", None),
    ]


def test_another_request_with_a_known_id_is_refused(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    client = connect(serve(Model()).endpoint, journal=tmp_path / "j")
    client.generate([1], max_tokens=4, request_id="r")
    with pytest.raises(errors.Duplicate, match="forget it, or use a new id"):
        client.generate([2], max_tokens=4, request_id="r")
    client.forget(["r"])
    client.generate([2], max_tokens=4, request_id="r")


def test_workers_know_requests_of_a_journal_by_ids_that_were_never_used(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    """A worker may still keep what the journal has forgotten, or what was in one that is gone."""
    worker = serve(Model())
    asked: dict[str, Any] = {"max_tokens": 4, "request_id": "r" * 128}
    client = connect(worker.endpoint, journal=tmp_path / "j", client="trainer")
    assert client.generate([1], **asked).id == asked["request_id"]
    client.forget([asked["request_id"]])
    client.generate([1], **asked)
    client.close()
    (tmp_path / "j").unlink()
    connect(worker.endpoint, journal=tmp_path / "j", client="trainer").generate([2], **asked)
    ids = [header["id"] for header in worker.requests if header["op"] == "generate"]
    assert len({*ids, asked["request_id"]}) == 4 and all(name.startswith("rrr") and len(name) <= 128 for name in ids)


def test_a_journal_needs_ids_and_forget_needs_a_journal(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    worker = serve(Model(reach=(2,), fail=silent))
    client = connect(worker.endpoint, journal=tmp_path / "j")
    with pytest.raises(ValueError, match="request_id"):
        client.generate([1], max_tokens=4)
    client.generate([1], max_tokens=4, request_id="r", stream="tokens")
    with pytest.raises(ValueError, match="in flight"):
        client.forget(["r"])
    for plain in (connect(worker.endpoint), connect(worker.endpoint, resume=True)):
        with pytest.raises(ValueError, match="no journal"):
            plain.forget(["r"])


def test_a_full_worker_is_asked_again_by_a_batch_with_a_journal(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    def full_once(worker: Any, peer: bytes, header: dict[str, Any]) -> None:
        handler = refuse("overloaded", retry_after_s=0.01) if len(worker.requests) == 1 else Model()
        handler(worker, peer, header)

    client = connect(serve(full_once).endpoint, journal=tmp_path / "j")
    (result,) = client.generate_many([{"prompt": [1], "request_id": "r"}], max_tokens=4)
    check(result.completions[0], result.completions[0].seed, 4, [(3, 4)])
    assert client.journaled() == {"r": True}


def test_a_disk_that_is_full_is_told_with_what_there_was(connect: Connect, serve: Serve, tmp_path: Path) -> None:
    worker = serve(Model(3, reach=(2,), fail=silent))
    client = connect(worker.endpoint, journal=tmp_path / "j")
    stream = client.generate([1], max_tokens=8, seed=SEED, request_id="r", stream="tokens")
    next(stream)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "j").stat().st_size, limits[1]))
    try:
        header = worker.requests[0]
        (peer,) = worker.peers
        more = {"op": "chunk", **columns(SEEDS[0], 2, 4, 3), "index": 0, "offset": 2}
        worker.do(lambda: worker.reply(peer, header, more))
        with pytest.raises(errors.JournalFailed, match="cannot be written") as caught:
            next(stream), next(stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(caught.value.partials[0], SEEDS[0], 4, [(3, 4)])


def test_nothing_in_a_journal_is_executed(tmp_path: Path) -> None:
    import pickle

    import msgpack

    payload = msgpack.packb(["request", "r", pickle.dumps({"mark": "m"})])
    head = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little")
    (tmp_path / "j").write_bytes(b"RLLJRNL1" + head + zlib.crc32(head).to_bytes(4, "little") + payload)
    with pytest.raises(errors.JournalFailed, match="cannot be read"):
        read(tmp_path / "j", "r")


def test_a_client_that_is_dropped_without_close_lets_go_of_its_journal(serve: Serve, tmp_path: Path) -> None:
    worker = serve(Model(3))
    client = RolloutClient(worker.endpoint, journal=tmp_path / "j")
    before = client.generate([1], max_tokens=4, request_id="r")
    del client
    gc.collect()
    with RolloutClient(worker.endpoint, journal=tmp_path / "j") as client:
        after = client.generate([1], max_tokens=4, request_id="r")
        assert after.completions[0].token_ids.tolist() == before.completions[0].token_ids.tolist()
    assert len(worker.requests) == 1


def test_a_fork_goes_on_in_another_process_with_the_tokens_that_the_journal_has(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    """The workers are others by then."""
    worker = serve(Model(3))
    client = connect(worker.endpoint, journal=tmp_path / "j")
    drawn = client.generate(np.array([5, 6]), max_tokens=6, seed=SEED, request_id="r").completions[0].token_ids
    worker.handler = Model(3, reach=(2,), fail=silent)
    stream = client.generate([7], fork={"request": "r"}, max_tokens=6, request_id="b", stream="tokens")
    next(stream)
    client.close()
    other = serve(Model(4))
    client = connect(other.endpoint, journal=tmp_path / "j")
    result = client.generate([7], fork={"request": "r"}, max_tokens=6, request_id="b")
    (sent,) = (header for header in other.requests if header["op"] == "generate")
    assert "fork" not in sent and sent["prompt"].tolist() == [5, 6, *drawn.tolist(), 7]
    assert len(result.completions[0]) == 6 and len(sent["continue_from"]["token_ids"]) == 2
