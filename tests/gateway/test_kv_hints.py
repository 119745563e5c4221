"""Hints about KV over HTTP: leases, ends of sessions, priorities; and how many tokens of a prompt were reused."""

from typing import Any

import httpx
import pytest

from rollout_gateway.prompts.kv_hints import KvFields
from tests.support.gateway.harness import bystand, events, gateway, post, refused
from tests.support.worker.harness import token_ids, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

LONG = [token for i in range(20, 60) for token in token_ids(f" {i}")]
MESSAGES = [{"role": "user", "content": " ".join(str(i) for i in range(20, 60))}]
SHORT = {"max_tokens": 4, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate")
PAGE = 16


def body_of(path: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": tokens, **SHORT, **fields}
    if path == "/v1/chat/completions":
        return {"messages": MESSAGES, **SHORT, **fields}
    if path == "/generate":
        return {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, **fields}
    return {"token_ids": tokens, "sampling_params": SHORT, **fields}


def retain(**directive: Any) -> dict[str, Any]:
    """An envelope with one directive."""
    payload = {"scope": None, "directives": [{"priority": 80, **directive}]}
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def unknown(kind: str = "kv.prefetch") -> dict[str, Any]:
    action = {"action_id": "b", "action_type": kind, "action_version": "7", "payload": {"x": [1]}}
    return {"protocol_version": "0.2", "message_id": "m", "actions": [action]}


def holding(direct: RolloutClient) -> int:
    """The sessions with KV: a turn leaves its KV once the step after its last token is over."""

    def over() -> bool:
        status = direct.status()
        return (status["rows"]["running"], status["queue"]["waiting"], status["slots"]["in_flight"]) == (0, 0, 0)

    until(over, "the end of the turn")
    found: int = direct.status()["sessions"]["holding"]
    return found


def test_leases_and_envelopes_reach_the_worker(worker: WorkerProcess, direct: RolloutClient) -> None:
    """KV under lease without a session counts among the sessions of the worker. It is free when the gateway ends."""
    none = holding(direct)
    with gateway([worker.endpoint]) as client:
        for path in PATHS:

            def kept(path: str = path, **fields: Any) -> int:
                before = holding(direct)
                post(client, path, body_of(path, LONG, **fields))
                return holding(direct) - before

            assert kept() == kept(lease_s=None) == kept(kv_hints=None) == kept(kv_hints=unknown()) == 0
            assert kept(lease_s=3000) == kept(kv_hints=retain()) == 1
    until(lambda: holding(direct) == none, "the end of the leases")


@pytest.mark.parametrize(
    ("envelope", "lease_s"),
    [
        ({"protocol_version": "0.1", "message_id": "m"}, 0.0),
        (unknown(), 0.0),
        (retain(priority=0, duration=5), 0.0),
        (retain(duration=0), 0.0),
        (retain(duration=3.5), 3.5),
        (retain(duration=10**6), 3600.0),
        (retain(covers_output=True), 3600.0),
        (retain(start=0, end=8, duration=3), 3.0),
    ],
)
def test_an_envelope_asks_for_the_longest_time_of_its_directives(envelope: dict[str, Any], lease_s: float) -> None:
    assert KvFields.take({"kv_hints": envelope}).hints(None).get("lease_s", 0.0) == lease_s
    longer = KvFields.take({"kv_hints": envelope, "lease_s": 4.0}).hints(None)["lease_s"]
    assert longer == max(lease_s, 4.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": -1}, "lease_s"),
        ({"lease_s": 3601}, "lease_s"),
        ({"lease_s": "5"}, "lease_s"),
        ({"end_of_session": True}, "end_of_session"),
        ({"end_of_session": 1}, "end_of_session"),
        ({"kv_hints": "x"}, "kv_hints"),
        ({"kv_hints": {}}, "kv_hints.protocol_version"),
        ({"kv_hints": retain() | {"message_id": 7}}, "kv_hints.message_id"),
        ({"kv_hints": retain() | {"more": 7}}, "kv_hints.more"),
        ({"kv_hints": retain() | {"actions": [{}]}}, "kv_hints.actions.0.action_id"),
        ({"kv_hints": unknown("kv.retain")}, "kv_hints.actions.0.action_version"),
        ({"kv_hints": retain(priority=101)}, "kv_hints.actions.0.payload.directives.0.priority"),
        ({"kv_hints": retain(duration=-1)}, "kv_hints.actions.0.payload.directives.0.duration"),
        ({"kv_hints": retain(where=1)}, "kv_hints.actions.0.payload.directives.0.where"),
        ({"priority": 1 << 40}, "priority"),
    ],
)
def test_wrong_hints_name_their_field(client: httpx.Client, path: str, fields: dict[str, Any], field: str) -> None:
    assert refused(client, path, body_of(path, LONG, **fields)) == field


def test_wrong_hints_disturb_nothing(client: httpx.Client) -> None:
    refused(client, "/v1/completions", body_of("/v1/completions", LONG, lease_s=0))
    bystand(client)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_last_turn_leaves_no_kv_of_its_session(
    client: httpx.Client, direct: RolloutClient, path: str, streamed: bool
) -> None:
    headers = {"X-Session-ID": f"ends at {path} {streamed}"}
    before = holding(direct)
    post(client, path, body_of(path, LONG), headers=headers)
    assert holding(direct) == before + 1
    body = body_of(path, LONG, end_of_session=True)
    if streamed:
        events(client, path, body, headers=headers)
    else:
        post(client, path, body, headers=headers)
    until(lambda: holding(direct) == before, "the end of the session")
    assert not post(client, "/finish_session", params={"session_id": headers["X-Session-ID"]})["finished"]


def test_a_last_request_of_several_completions_ends_the_session_and_a_refused_one_does_not(
    client: httpx.Client, direct: RolloutClient
) -> None:
    headers, before = {"X-Session-ID": "several"}, holding(direct)
    post(client, "/v1/completions", body_of("/v1/completions", LONG), headers=headers)
    body = body_of("/v1/completions", [10**6], end_of_session=True)
    assert refused(client, "/v1/completions", body, headers=headers) == "prompt"
    assert holding(direct) == before + 1
    post(client, "/v1/completions", body_of("/v1/completions", LONG, n=3, end_of_session=True), headers=headers)
    until(lambda: holding(direct) == before, "the end of the session")


def test_a_session_that_is_idle_for_too_long_leaves_no_kv(worker: WorkerProcess, direct: RolloutClient) -> None:
    before = holding(direct)
    with gateway([worker.endpoint], session_s=1e-6) as brief:
        for session in ("first", "last"):
            post(brief, "/v1/completions", body_of("/v1/completions", LONG), headers={"X-Session-ID": session})
        until(lambda: holding(direct) <= before + 1, "the end of the first session")
        brief.post("/finish_session", params={"session_id": "last"})
        until(lambda: holding(direct) == before, "the end of the last session")


# --- cached tokens of histories that were edited ---


def cached(client: httpx.Client, path: str, body: dict[str, Any], streamed: bool, **options: Any) -> int:
    """The reused tokens that an answer, or the last event of a stream, counts."""
    if path == "/generate":
        found = events(client, path, body, **options)[-1] if streamed else post(client, path, body, **options)
        return found["meta_info"]["cached_tokens"]
    if streamed:
        found = events(client, path, body | {"stream_options": {"include_usage": True}}, **options)[-1]
    else:
        found = post(client, path, body, **options)
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/generate"])
def test_an_edited_history_says_how_many_tokens_were_reused(client: httpx.Client, path: str, streamed: bool) -> None:
    """With a session all tokens before the edit, without one the full pages before it."""
    cut = 2 * PAGE + 5
    for session in (f"edited at {path} {streamed}", None):
        options: dict[str, Any] = {} if session is None else {"headers": {"X-Session-ID": session}}
        first = [*token_ids(f"{len(path)}{streamed:d}{session is None:d}:"), *LONG]
        salt = {} if path == "/generate" else {"cache_salt": f"{path} {streamed} {session}"}
        if path == "/generate":  # without a salt: its own beginning
            first = [*token_ids(f"{77 + streamed}{session is None:d}"), *first]
        assert cached(client, path, body_of(path, first, **salt), False, **options) in range(PAGE)
        edited = [*first[:cut], first[cut] ^ 1, *first[cut + 9 :]]
        found = cached(client, path, body_of(path, edited, **salt), streamed, **options)
        if session is not None:
            post(client, "/finish_session", params={"session_id": session})
        assert found == (cut if session else cut // PAGE * PAGE)


def test_an_edited_conversation_says_so_too(client: httpx.Client) -> None:
    def body(*texts: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text} for text in texts]
        return {"messages": messages, "cache_salt": "edited conversation", **SHORT}

    long = " ".join(str(i) for i in range(30, 70))
    assert cached(client, "/v1/chat/completions", body(long, "1 2 3"), False) == 0
    whole = post(client, "/v1/chat/completions", body(long, "1 2 3"))["usage"]
    for streamed in (False, True):
        found = cached(client, "/v1/chat/completions", body(long, "4 5 6" if streamed else "7 8 9"), streamed)
        assert 0 < found < whole["prompt_tokens"] and found % PAGE == 0
