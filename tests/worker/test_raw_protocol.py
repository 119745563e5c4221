"""The protocol as written down, spoken by hand to a real worker: sockets, framing, prompts, streams, arrays."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from tests.support.worker.harness import ROOT, subprocess_environment, text_of, token_ids
from tests.support.worker.raw_client import RawClient, log_probs_of_a_certain_model, pack_blob
from trainer_bridge.client.launch import WorkerProcess

TEXT = " 18 19 20 21 22 23 24 25"
ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "raw_logprobs": "<f4"}


@pytest.mark.parametrize(
    ("kind", "delimiter"),
    [(zmq.REQ, False), (zmq.DEALER, False), (zmq.DEALER, True)],
    ids=["REQ", "DEALER", "DEALER with a delimiter"],
)
def test_a_prompt_is_completed_whatever_the_socket(worker: WorkerProcess, kind: int, delimiter: bool) -> None:
    with RawClient(worker.endpoint, kind, delimiter=delimiter) as raw:
        reply = raw.ask("generate", "a", prompt=token_ids("17:"), max_tokens=24)
        assert raw.types == ARRAYS
        assert reply["op"] == "result" and reply["prompt_tokens"] == 3 and reply["preemptions"] == 0
        (completion,) = reply["completions"]
        assert text_of(completion["token_ids"]) == TEXT
        assert completion["versions"] == [[0, 24]] and completion["index"] == 0
        assert (completion["finish_reason"], completion["stop"]) == ("length", None)
        assert "drawn_logprobs" not in completion and "text" not in completion and "error" not in completion
        for name in ("logprobs", "raw_logprobs"):
            assert len(completion[name]) == 24 and log_probs_of_a_certain_model(completion[name])
        assert raw.ask("ping", "b") == {"v": 1, "op": "ok", "id": "b"}
        refused = raw.ask("generate", "c", prompt=[], max_tokens=24)
        assert (refused["op"], refused["code"], refused["field"]) == ("error", "bad_request", "prompt")
        assert raw.ask("status", "d")["op"] == "status"


@pytest.mark.parametrize("delimiter", [False, True])
def test_streams_come_with_the_framing_of_their_request(worker: WorkerProcess, delimiter: bool) -> None:
    with RawClient(worker.endpoint, delimiter=delimiter) as raw:
        raw.send("generate", "s", prompt="17:", max_tokens=100, stream="tokens", stream_every=8, return_text=True)
        chunks, result = raw.receive_all("s")
    (completion,) = result["completions"]
    assert len(chunks) > 3
    assert all(len(chunk["token_ids"]) >= 8 for chunk in chunks[:-1])
    assert all("finish_reason" not in chunk for chunk in chunks[:-1])
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop"]) == ("length", None)
    assert chunks[0]["offset"] == 0
    assert all(b["offset"] == a["offset"] + len(a["token_ids"]) for a, b in pairwise(chunks))
    for name in ARRAYS:
        assert sum((chunk[name] for chunk in chunks), []) == completion[name]
    assert all(chunk["versions"] == [[0, len(chunk["token_ids"])]] for chunk in chunks)
    assert "".join(chunk["text"] for chunk in chunks) == completion["text"] == text_of(completion["token_ids"])


@pytest.mark.parametrize("form", ["list", "<i4", "<i8", "text", "messages"])
def test_every_form_of_a_prompt_is_the_same_prompt(raw: RawClient, form: str) -> None:
    blobs: tuple[bytes, ...] = ()
    fields: dict = {"prompt": token_ids("17:")}
    if form.startswith("<"):
        reference, blob = pack_blob(token_ids("17:"), form)
        fields, blobs = {"prompt": reference}, (blob,)
    elif form == "text":
        fields = {"prompt": "17:"}
    elif form == "messages":
        fields = {"messages": [{"role": "user", "content": "17"}, {"role": "user", "content": ":"}]}
    reply = raw.ask("generate", form, blobs, max_tokens=24, return_text=True, **fields)
    assert reply["op"] == "result", reply
    assert reply["prompt_tokens"] == 3 and reply["completions"][0]["text"] == TEXT


def test_a_group_is_numbered_and_each_completion_has_its_own_draws(raw: RawClient) -> None:
    sampling = {"temperature": 60.0, "seed": 4}
    reply = raw.ask("generate", "g", prompt="17:", n=5, max_tokens=40, sampling=sampling, stop={"ignore_eos": True})
    completions = reply["completions"]
    assert [completion["index"] for completion in completions] == [0, 1, 2, 3, 4]
    assert len({tuple(completion["token_ids"]) for completion in completions}) == 5
    assert len({completion["seed"] for completion in completions}) == 5
    assert reply["seed"] == 4
    for completion in completions:
        assert len(completion["logprobs"]) == 40
        # Uncertain at temperature 60, and most of what was drawn is next to impossible at temperature 1.
        assert -4.0 < sum(completion["logprobs"]) / 40 < -0.5
        assert sum(completion["raw_logprobs"]) < 3 * sum(completion["logprobs"])


def test_stream_of_completions_has_one_chunk_each_and_the_short_ones_come_first(raw: RawClient) -> None:
    raw.send(
        "generate", "c", prompt="17:", n=4, max_tokens=400, stream="completions",
        sampling={"temperature": 60.0, "seed": 1}, stop={"token_ids": token_ids("\n")},
    )  # fmt: skip
    chunks, result = raw.receive_all("c")
    lengths = [len(chunk["token_ids"]) for chunk in chunks]
    assert sorted(chunk["index"] for chunk in chunks) == [0, 1, 2, 3]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1
    for chunk in chunks:
        completion = result["completions"][chunk["index"]]
        assert chunk["offset"] == 0 and chunk["token_ids"] == completion["token_ids"]
        assert chunk["finish_reason"] == completion["finish_reason"]


def test_many_requests_of_one_connection_are_in_flight_together(raw: RawClient) -> None:
    raw.ask("pause", "pause")  # else the first could be over before the last is sent
    raw.send("generate", "long", prompt=token_ids("17:"), max_tokens=500)
    raw.send("generate", "short", prompt=token_ids("17:"), max_tokens=4)
    raw.send("ping", "p")
    raw.send("resume", "resume")
    assert [raw.receive()["id"] for _ in range(4)] == ["p", "resume", "short", "long"]


def test_the_same_message_again_is_the_same_request_and_another_is_a_duplicate(
    worker: WorkerProcess, raw: RawClient
) -> None:
    request = {"prompt": "17:", "max_tokens": 500, "client": "me", "sampling": {"temperature": 30.0}}
    request["stop"] = {"ignore_eos": True}
    raw.ask("pause", "p")  # it is not to be over before the other messages come
    with RawClient(worker.endpoint) as one, RawClient(worker.endpoint) as other:
        one.send("generate", "same", **request)
        other.send("generate", "same", **request)
        refused = other.ask("generate", "same", **{**request, "max_tokens": 501})
        assert (refused["op"], refused["code"], refused["field"]) == ("error", "duplicate", "id")
        raw.ask("resume", "r")
        with RawClient(worker.endpoint) as stranger:  # another client may use the id
            reply = stranger.ask("generate", "same", prompt="17:", max_tokens=4, client="you")
            assert reply["op"] == "result"
        results = [client.receive() for client in (one, other)]
        assert results[0]["completions"] == results[1]["completions"] and results[0]["seed"] == results[1]["seed"]


def test_metadata_comes_back_as_it_was_sent(raw: RawClient) -> None:
    reference, blob = pack_blob([1.5, -2.0], "<f4")
    metadata = {"who": "tests", "nested": {"list": [1, None, True, 2.5]}, "weights": reference}
    reply = raw.ask("generate", "m", (blob,), prompt="17:", max_tokens=2, metadata=metadata)
    assert reply["metadata"] == {**metadata, "weights": [1.5, -2.0]}
    assert "metadata" not in raw.ask("generate", "n", prompt="17:", max_tokens=2)


def test_timing_adds_up_and_a_repeated_prompt_is_found_in_the_cache(raw: RawClient) -> None:
    prompt = " ".join(map(str, range(500, 560))) + ":"  # of no other test that uses this worker
    replies = [raw.ask("generate", f"t{i}", prompt=prompt, max_tokens=50) for i in range(2)]
    for reply in replies:
        timing = reply["timing"]
        assert timing.keys() == {"queued_s", "prefill_s", "decode_s", "total_s"}
        assert all(value >= 0 for value in timing.values())
        parts = timing["queued_s"] + timing["prefill_s"] + timing["decode_s"]
        assert timing["total_s"] == pytest.approx(parts) and 0 < timing["total_s"] < 60
        assert reply["prompt_tokens"] == len(prompt)
        assert text_of(reply["completions"][0]["token_ids"]).startswith(" 560 561 562")
    assert replies[0]["cached_tokens"] == 0
    assert len(prompt) - 17 <= replies[1]["cached_tokens"] < len(prompt)
    assert replies[0]["completions"][0]["token_ids"] == replies[1]["completions"][0]["token_ids"]


def test_the_minimal_client_prints_a_completion_and_a_stream(worker: WorkerProcess, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "minimal_client.py"), worker.endpoint, "--max-tokens", "24"]
    environ = subprocess_environment()
    del environ["PYTHONPATH"]  # nothing of the project is imported
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "24 tokens, finish_reason length:"
    assert lines[1].split(None, 1) == ["text", repr(TEXT)]
    assert lines[2].split(None, 1) == ["token_ids", str(token_ids(TEXT))]
    assert lines[4].split(None, 1) == ["versions", "[[0, 24]]"]
    streamed = [line for line in lines if line.startswith("completion 0 from token ")]
    assert "".join(text_of(json.loads(line.partition(": ")[2])) for line in streamed) == TEXT
    assert len(streamed) == 3 and lines[-1].startswith("prompt 3 tokens, ")


def test_the_minimal_client_prints_a_refusal(worker: WorkerProcess) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "minimal_client.py"), worker.endpoint, "--max-tokens", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=subprocess_environment())
    assert done.returncode == 1 and done.stderr.startswith("too_long: ") and done.stderr.count("\n") == 1
