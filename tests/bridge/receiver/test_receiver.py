"""The worker's side, against a hand-made publisher: what is refused, and that nothing refused ever shows."""

import struct
from typing import Any

import pytest
import torch
import zmq

from tests.support.bridge.fault_client import time_passes
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.raw_publisher import BUCKET, RawPublisher, assert_rejected, publish
from tests.support.robustness.limits import little_memory_and_time
from trainer_bridge.wire.codec import decode, encode, split_envelope
from trainer_bridge.wire.manifest import checksum, pack


def test_a_whole_update_is_applied(worker: Worker) -> None:
    tensors = publish(worker, 1, 1)
    assert serves(worker.model, tensors) and worker.receiver.version == 1
    assert worker.updates[0].nbytes == sum(t.nbytes for t in tensors.values())


def test_stacked_experts_and_other_dtypes_are_converted(worker: Worker) -> None:
    tensors = new_tensors(worker.model, 3, dtype=torch.float32, stacked=True)
    raw = RawPublisher(worker, tensors)
    raw.begin()
    raw.send_all()
    assert raw.commit()["op"] == "ok"
    assert serves(worker.model, tensors)


def test_a_corrupted_bucket_leaves_the_old_weights(worker: Worker) -> None:
    old = publish(worker, 1, 1)
    raw = RawPublisher(worker, new_tensors(worker.model, 2), 2)
    raw.begin()
    for index in range(len(raw.buckets) - 1):
        raw.send(index)
        raw.answer()
    damaged = bytearray(raw.buckets[-1])
    damaged[0] ^= 1
    raw.send(len(raw.buckets) - 1, bytes(damaged), check=checksum(raw.buckets[-1]))
    kind, reason = raw.answer()
    assert kind == b"WNO1" and "damaged" in reason
    assert_rejected(raw.commit(), "damaged")
    assert serves(worker.model, old) and worker.receiver.version == 1
    assert serves(worker.model, publish(worker, 3, 2))


def test_checksums_that_match_other_data_are_found_at_commit(worker: Worker) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 2))
    raw.begin()
    raw.send(0, bytes(BUCKET))  # a sound message, but not what the publisher's list says
    raw.answer()
    for index in range(1, len(raw.buckets)):
        raw.send(index)
        raw.answer()
    assert_rejected(raw.commit(), "checksums")
    assert worker.updates == []


def broken_tensors(kind: str, model: TinyModel) -> dict[str, torch.Tensor]:
    tensors = new_tensors(model, 2)
    if kind == "shape":
        tensors["q.weight"] = tensors["q.weight"][:7]
    elif kind == "unknown":
        tensors["q.bias"] = torch.zeros(8)
    elif kind == "missing":
        del tensors["norm.weight"]
    else:
        tensors["experts.down"] = torch.zeros(model.views["experts.down"].shape)
    return tensors


@pytest.mark.parametrize(
    ("kind", "text"),
    [("shape", "q.weight [7, 6]"), ("unknown", "q.bias"), ("missing", "norm.weight"), ("twice", "write the same")],
)
def test_tensors_that_do_not_fit_are_refused_at_begin(worker: Worker, kind: str, text: str) -> None:
    old = publish(worker, 1, 1)
    raw = RawPublisher(worker, broken_tensors(kind, worker.model), 2)
    assert_rejected(raw.begin(), text)
    assert serves(worker.model, old) and worker.status()["state"] == "idle"


@pytest.mark.parametrize("version", [0, 3, 4])
def test_stale_and_duplicate_versions_are_refused(version: int) -> None:
    with Worker(version=4) as worker:
        raw = RawPublisher(worker, new_tensors(worker.model, 2), version)
        assert_rejected(raw.begin(), "not newer than version 4")
        assert publish(worker, 1, 5) and worker.receiver.version == 5


def test_a_huge_manifest_is_refused_before_memory_is_taken(worker: Worker) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 2))
    rows = [(name, "float32", [1 << 20, 1 << 20]) for name in worker.model.names()]
    with little_memory_and_time():
        assert_rejected(raw.begin(manifest=pack(1, rows, 256 << 20).to_wire()), "wrong shapes")


def test_buckets_in_any_order_and_repeated_make_the_same_update(worker: Worker) -> None:
    tensors = new_tensors(worker.model, 5)
    raw = RawPublisher(worker, tensors)
    raw.begin()
    order = [*reversed(range(len(raw.buckets))), 0, 1, 1]
    for index in order:
        raw.send(index)
        assert raw.answer() == (b"WAK1", index)
    assert worker.status()["incoming"]["arrived_bytes"] == raw.manifest.total_bytes
    assert raw.commit()["op"] == "ok"
    assert serves(worker.model, tensors)


def test_a_bucket_repeated_with_other_content_ends_the_update(worker: Worker) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 5))
    raw.begin()
    raw.send(0)
    raw.answer()
    raw.send(0, bytes(BUCKET))
    assert "twice" in raw.answer()[1]
    assert worker.status()["state"] == "idle" and worker.updates == []


@pytest.mark.parametrize("index", [10_000, 2**32 - 1])
def test_a_bucket_that_the_manifest_does_not_have_ends_the_update(worker: Worker, index: int) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 5))
    raw.begin()
    raw.send(index, b"x")
    assert raw.answer()[0] == b"WNO1"
    assert worker.status()["state"] == "idle"


def test_a_commit_before_all_buckets_is_refused(worker: Worker) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 5))
    raw.begin()
    raw.send(0)
    raw.answer()
    assert_rejected(raw.commit(), "of 9 buckets")
    assert worker.updates == []
    assert_rejected(raw.commit(), "of 9 buckets")  # asked again, the reason is still known


def test_garbage_on_the_data_socket_disturbs_nothing(worker: Worker) -> None:
    raw = RawPublisher(worker, tensors := new_tensors(worker.model, 6))
    raw.begin()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(worker.receiver.endpoint)
    junk = [[b""], [b"hello"], [b"WBK1"], [b"", b"", b""], [b"x" * 28, b"y"], [b"WBK1" + b"\xff" * 24]]
    for frames in junk:
        stranger.send_multipart(frames)
    stranger.send_multipart([struct.pack("<4s16sII", b"WBK1", bytes(16), 0, 0), bytes(BUCKET)])
    for _ in junk:
        assert stranger.poll(20_000)
        _, answer = split_envelope(stranger.recv_multipart())
        assert decode(answer)["code"] == "bad_message"
    assert stranger.poll(20_000) and stranger.recv()[:4] == b"WNO1"
    raw.send_all()
    assert raw.commit()["op"] == "ok" and serves(worker.model, tensors)
    stranger.close(0)


@pytest.mark.parametrize("delimiter", [[], [b""]])
def test_the_weight_socket_answers_control_messages(worker: Worker, delimiter: list[bytes]) -> None:
    def ask(**header: Any) -> dict[str, Any]:
        socket.send_multipart([*delimiter, *encode(header)])
        assert socket.poll(20_000)
        had_delimiter, frames = split_envelope(socket.recv_multipart())
        assert had_delimiter == bool(delimiter)
        return decode(frames)

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(worker.receiver.endpoint)
        status = ask(v=1, op="weights", id="a", action="status")
        assert (status["op"], status["id"], status["endpoint"]) == ("ok", "a", worker.receiver.endpoint)
        assert ask(v=1, op="weights", id="b", action="undo")["field"] == "action"
        assert ask(v=1, op="generate", id="c", prompt="x")["field"] == "op"
        assert ask(v=2, op="weights", id="d", action="status")["code"] == "bad_message"
        assert ask(v=1, op="weights", action="status")["field"] == "id"


def test_an_update_half_way_is_replaced_by_a_new_begin(worker: Worker) -> None:
    old = publish(worker, 1, 1)
    dead = RawPublisher(worker, new_tensors(worker.model, 2), 2)
    dead.begin()
    dead.send(0)
    dead.answer()
    assert serves(worker.model, old)
    new = publish(worker, 3, 2)
    assert serves(worker.model, new)
    dead.send(1)  # it lives after all: its data is refused, and it learns why
    for _ in range(2):  # when it was dropped, and now
        kind, why = dead.answer()
        assert kind == b"WNO1" and "before this update was complete" in why
    dead.send(2, token=bytes(16))  # of no update that the worker remembers
    assert "not being received" in dead.answer()[1]
    assert_rejected(dead.commit(), "before this update was complete")
    assert serves(worker.model, new)


def test_an_update_without_data_is_dropped_after_idle_s() -> None:
    with Worker(idle_s=60.0) as worker:
        raw = RawPublisher(worker, new_tensors(worker.model, 2))
        raw.begin()
        raw.send(0)
        raw.answer()
        assert worker.status()["state"] == "receiving"
        with time_passes(60.0):
            wait_for(lambda: worker.status()["state"] == "idle", "the drop")
        assert_rejected(raw.commit(), "no data came")
        assert serves(worker.model, publish(worker, 3, 1))


def test_abort_drops_the_update(worker: Worker) -> None:
    raw = RawPublisher(worker, new_tensors(worker.model, 2))
    raw.begin()
    assert worker.control(action="abort", token=raw.token.hex())["op"] == "ok"
    assert_rejected(worker.control(action="abort", token=raw.token.hex()), "token", "not_found")
    assert_rejected(raw.commit(), "aborted")


def test_staging_stays_as_it_is_until_its_update_is_applied(worker: Worker) -> None:
    worker.gate.clear()
    first = RawPublisher(worker, tensors := new_tensors(worker.model, 2), 1)
    first.begin()
    first.send_all()
    committed = worker.ask(**first.commit_fields())
    wait_for(lambda: worker.status()["state"] == "ready", "a ready update")
    late = RawPublisher(worker, new_tensors(worker.model, 3), 2)
    begun = worker.ask(**late.begin_fields())
    assert worker.status()["state"] == "ready"  # it is answered after the begin was looked at
    assert committed.empty() and begun.empty()
    worker.gate.set()
    assert committed.get(timeout=20)["op"] == "ok"
    assert begun.get(timeout=20)["op"] == "ok"
    assert serves(worker.model, tensors)


def test_staging_waits_for_a_copy_that_is_queued_behind_applied() -> None:
    model = TinyModel()
    with Worker() as worker:
        worker.gate.clear()
        raw = RawPublisher(worker, new_tensors(model, 2), 1)
        raw.begin()
        raw.send_all()
        committed = worker.ask(**raw.commit_fields())
        update = wait_for(worker.receiver.take_ready, "an update")
        worker.receiver.applied(update, 0.0)
        assert committed.get(timeout=20)["op"] == "ok"
        begun = worker.ask(**RawPublisher(worker, new_tensors(model, 3), 2).begin_fields())
        assert worker.status()["state"] == "idle" and begun.empty()
        update.copy_into()
        assert begun.get(timeout=20)["op"] == "ok"


@pytest.mark.parametrize(("answer", "code"), [("failed", "internal"), ("refused", "weights_rejected")])
def test_an_update_that_is_not_applied_is_reported_and_the_next_one_works(
    worker: Worker, answer: str, code: str
) -> None:
    worker.gate.clear()
    raw = RawPublisher(worker, new_tensors(worker.model, 2), 1)
    raw.begin()
    raw.send_all()
    committed = worker.ask(**raw.commit_fields())
    update = wait_for(worker.receiver.take_ready, "an update")
    getattr(worker.receiver, answer)(update, "that is why")
    assert_rejected(committed.get(timeout=20), "that is why", code)
    assert worker.receiver.version == 0
    worker.gate.set()
    assert serves(worker.model, publish(worker, 3, 1))


def test_staging_is_flat_over_twenty_updates(worker: Worker) -> None:
    places = set()
    for version in range(1, 21):
        assert serves(worker.model, publish(worker, version, version))
        (block,) = worker.staging.memory.blocks
        places.add((block.data_ptr(), block.numel()))
    assert len(places) == 1


def test_tied_tensors_must_be_equal(worker: Worker) -> None:
    tensors = new_tensors(worker.model, 2)
    tensors["lm_head.weight"] = tensors["embed.weight"].float()
    raw = RawPublisher(worker, tensors)
    raw.begin()
    raw.send_all()
    assert raw.commit()["op"] == "ok"
    tensors["lm_head.weight"] = tensors["embed.weight"] + 1
    raw = RawPublisher(worker, tensors, 2)
    raw.begin()
    raw.send_all()
    assert_rejected(raw.commit(), "differ")
    assert worker.receiver.version == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "action"),
        ({"action": ["begin"]}, "action"),
        ({"action": "status", "extra": 1}, "extra"),
        ({"action": "begin"}, "manifest"),
        ({"action": "commit", "token": "zz", "options": {}}, "token"),
        ({"action": "commit", "token": 7, "options": {}}, "token"),
        ({"action": "commit", "token": "00", "options": []}, "options"),
        ({"action": "begin", "manifest": 1, "version": 1, "transport": "zmq", "options": {}}, "manifest"),
    ],
)
def test_broken_control_messages_name_the_field(worker: Worker, fields: dict, field: str) -> None:
    reply = worker.control(**fields)
    assert reply["op"] == "error" and reply["field"] == field
    assert worker.status()["op"] == "ok"


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"transport": "pigeon"}, "transport"), ({"options": {"a": 1}}, "options"), ({"version": 2}, "version")],
)
def test_a_broken_begin_names_the_field(worker: Worker, changes: dict, field: str) -> None:
    reply = RawPublisher(worker, new_tensors(worker.model, 2)).begin(**changes)
    assert reply["op"] == "error" and reply["field"] == field


def test_closing_answers_everyone_who_waits() -> None:
    with Worker() as worker:
        worker.gate.clear()
        raw = RawPublisher(worker, new_tensors(worker.model, 2))
        raw.begin()
        raw.send_all()
        committed = worker.ask(**raw.commit_fields())
        worker.receiver.close()
        assert_rejected(committed.get(timeout=20), "shutting down", "unavailable")
        assert_rejected(worker.status(), "shutting down", "unavailable")
        worker.receiver.close()


def test_a_taken_port_is_an_error_that_names_the_setting(worker: Worker) -> None:
    with pytest.raises(ValueError, match="weights.bind"):
        Worker(bind=worker.receiver.endpoint)
