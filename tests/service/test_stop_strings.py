"""Stop strings and streamed text, through the server and by themselves."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine.messages.to_engine import StopAt
from rollout.engine.messages.to_service import Finish
from rollout.service.text.stop_strings import StopMatch, StopText
from rollout.text.detokenizer import Detokenizer
from tests.support.service.harness import delta, done, serving


@pytest.fixture
def bench(codec):
    with serving(codec) as bench:
        yield bench


def feed(bench, request, tokens, size=4):
    for start in range(0, len(tokens), size):
        bench.put(delta(request.key, 0, start, tokens[start : start + size]))


def single_bytes(codec, text):
    """Tokens of one byte each, so that every string spans several."""
    return [token for character in text for token in codec.encode(character).tolist()]


def test_tokens_past_a_stop_string_are_never_sent(bench, codec):
    tokens = single_bytes(codec, "ab END cd ef")
    client = bench.client()
    client.send(
        "generate",
        prompt=[1],
        max_tokens=50,
        stop={"strings": ["END"]},
        stream="tokens",
        stream_every=5,
        return_text=True,
    )
    request = bench.submitted()
    assert request.stream_every == 4
    feed(bench, request, tokens)
    assert bench.command() == StopAt(request.key, 0, 6, "END")
    bench.put(delta(request.key, 0, 12, [], finish=Finish("length")), done(request))
    chunks = []
    while (reply := client.receive())["op"] == "chunk":
        chunks.append(reply)
    assert np.concatenate([chunk["token_ids"] for chunk in chunks]).tolist() == tokens[:6]
    assert "".join(chunk["text"] for chunk in chunks) == "ab "
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop"]) == ("stop", "END")
    completion = reply["completions"][0]
    assert completion["token_ids"].tolist() == tokens[:6] and len(completion["logprobs"]) == 6
    assert completion["versions"] == [[7, 6]]
    assert (completion["finish_reason"], completion["stop"], completion["text"]) == ("stop", "END", "ab ")
    assert bench.inbox.empty()


def test_stop_string_in_the_last_delta_needs_no_command(bench, codec):
    tokens = single_bytes(codec, "ab END cd")
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=9, stop={"strings": ["END"]})
    request = bench.submitted()
    bench.put(delta(request.key, 0, 0, tokens, finish=Finish("length")), done(request))
    completion = client.receive()["completions"][0]
    assert completion["token_ids"].tolist() == tokens[:6] and completion["stop"] == "END"
    assert "text" not in completion and bench.inbox.empty()


def test_text_that_may_become_a_stop_string_is_held_back(bench, codec):
    tokens = single_bytes(codec, "xEN yEN")
    client = bench.client()
    client.send(
        "generate",
        prompt=[1],
        max_tokens=9,
        stop={"strings": ["END"]},
        stream="tokens",
        stream_every=1,
        return_text=True,
    )
    request = bench.submitted()
    feed(bench, request, tokens, size=1)
    bench.put(delta(request.key, 0, len(tokens), [], finish=Finish("length")), done(request))
    chunks = [client.receive() for _ in range(len(tokens) + 1)]
    assert [chunk["text"] for chunk in chunks] == ["x", "", "", "EN ", "y", "", "", "EN"]
    assert client.receive()["completions"][0]["text"] == "xEN yEN"


def test_streamed_text_never_shows_half_a_character(bench, codec):
    text = "né👍"
    tokens = codec.encode(text).tolist()
    assert len(tokens) > len(text)
    client = bench.client()
    client.send("generate", prompt=[1], max_tokens=9, stream="tokens", stream_every=1, return_text=True)
    request = bench.submitted()
    feed(bench, request, tokens, size=1)
    bench.put(delta(request.key, 0, len(tokens), [], finish=Finish("length")), done(request))
    pieces = [client.receive()["text"] for _ in range(len(tokens) + 1)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_stop_string_may_begin_in_the_tokens_of_continue_from(bench, codec):
    old, new = single_bytes(codec, "END xE"), single_bytes(codec, "ND y")
    client = bench.client()
    client.send(
        "generate",
        prompt=[1],
        max_tokens=20,
        stop={"strings": ["END"]},
        return_text=True,
        continue_from={"token_ids": old, "seed": 1},
    )
    request = bench.submitted()
    bench.put(delta(request.key, 0, len(old), new[:3]))
    assert bench.command() == StopAt(request.key, 0, 8, "END")
    bench.put(delta(request.key, 0, len(old) + 3, new[3:], finish=Finish("stop", "END")), done(request))
    completion = client.receive()["completions"][0]
    assert completion["token_ids"].tolist() == old + new[:2] and completion["text"] == "END x"


def test_stop_string_that_lies_in_continue_from_stops_nothing(codec):
    stop = StopText(codec.decode, ["END", "a much longer string"], prior=single_bytes(codec, "END x"))
    assert stop.feed(single_bytes(codec, "yz")) is None
    stop.finish()
    assert stop.text == "END xyz" and stop.take() == "yz"


def test_strings_are_not_looked_for_before_min_tokens(codec):
    tokens = single_bytes(codec, "END END")
    assert StopText(codec.decode, ["END"]).feed(tokens) == StopMatch(3, "END")
    for min_tokens in (1, 3, 4):
        stop = StopText(codec.decode, ["END"], min_tokens)
        assert stop.feed(tokens) == StopMatch(7, "END") and stop.text == "END "
    assert StopText(codec.decode, ["END"], 5).feed(tokens) is None


def test_string_that_begins_first_wins_then_the_one_named_first(codec):
    ids = codec.encode("the quick").tolist()
    whole = next(token for token in ids if len(codec.decode([token]).strip()) > 2)
    text = codec.decode([whole])
    later, first = text[1:], text[:-1]
    assert StopText(codec.decode, [later, first]).feed([whole]) == StopMatch(1, first)
    assert StopText(codec.decode, [text, first]).feed([whole]) == StopMatch(1, text)


def test_string_is_complete_in_a_token_that_also_begins_a_character(codec):
    def decode(ids):  # token 1 is "END" and the first byte of a character, token 2 is its second byte
        return b"".join({0: b"a", 1: b"END\xc3", 2: b"\xa9"}[token] for token in ids).decode(errors="replace")

    stop = StopText(decode, ["END"])
    assert stop.feed([0, 1, 2]) == StopMatch(2, "END") and stop.text == "a"
    plain = StopText(decode)
    assert plain.feed([0, 1]) is None and plain.take() == "aEND"
    plain.feed([2])
    assert plain.take() == "é"


def test_space_in_front_of_a_word_survives_a_decoder_that_strips_it():
    words = {1: "▁one", 2: "▁two", 3: "", 4: "▁"}

    def decode(ids):
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    for tokens in ([1, 2, 1], [1, 3, 2], [3, 1, 2], [4, 1, 2], [1, 3, 3, 4, 2]):
        detokenizer = Detokenizer(decode)
        assert "".join(detokenizer.feed([token]) for token in tokens) == decode(tokens)


def test_byte_fallback_run_that_is_not_yet_text_is_not_taken_for_garbage():
    def decode(ids):  # like byte-fallback decoders: a run of bytes that is not valid as a whole is all U+FFFD
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    text = "日本語"
    for size in (1, 2, 3, 4, 5):
        detokenizer, tokens = Detokenizer(decode), list(text.encode())
        pieces = [detokenizer.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        assert "".join(pieces) + detokenizer.finish() == text


def test_bytes_that_never_become_text_do_not_grow_the_window():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.feed([0xFF]) for _ in range(3000)) + detokenizer.finish()
    assert text == "\ufffd" * 3000 and longest < 1000


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(["a", "E", "N", "EN", "END", "é", "👍", " the", "漢"]), max_size=12), st.integers(0, 9999)
)
def test_match_and_text_depend_on_the_tokens_not_on_how_they_are_batched(codec, pieces, seed):
    rng = random.Random(seed)
    strings, min_tokens = rng.sample(["END", "N", "é👍", "EN th", "漢E"], 2), rng.choice([0, 0, 3])
    tokens = codec.encode("".join(pieces)).tolist() if pieces else []
    split = rng.randint(0, len(tokens))
    outcomes = []
    for batch in (1, 2, 3, 5, 100):
        stop = StopText(codec.decode, strings, min_tokens, tokens[:split])
        taken, start = "", split
        while start < len(tokens) and stop.match is None:
            stop.feed(tokens[start : start + batch])
            taken += stop.take()
            start += batch
        stop.finish()
        taken += stop.take()
        outcomes.append((stop.match, stop.text, taken))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    match, text, taken = outcomes[0]
    assert text.endswith(taken) or match is not None
    if match is None:
        assert text == codec.decode(tokens)
    else:
        assert codec.decode(tokens[: match.tokens]).startswith(text + match.string)


def test_long_completions_are_decoded_a_few_tokens_at_a_time(codec):
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return codec.decode(ids)

    ids = codec.encode("the quick brown fox 漢 " * 400).tolist()
    stop = StopText(decode, ["QXZ"], 0, prior=ids)
    assert stop.feed([*ids, *codec.encode("QXZ").tolist(), *ids]).tokens == 2 * len(ids) + len(codec.encode("QXZ"))
    assert stop.text == codec.decode(ids) * 2
    assert len(ids) > 2000 and max(calls) < 1000
