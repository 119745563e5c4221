"""Forks over HTTP: what a request continues, by the id or the session that the client knows."""

from typing import Any

import httpx
import pytest

from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.workers.workers import RequestIds
from tests.support.gateway.harness import bystand, events, post, refused
from tests.support.worker.harness import text_of, token_ids

PROMPT = token_ids("17: 18 19 20 21 22 23 24 25")
DRAWN = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "return_token_ids": True}


def source(client: httpx.Client, name: str, **fields: Any) -> list[list[int]]:
    """A request by this id; the tokens of its choices."""
    body = {"prompt": PROMPT, "request_id": name, **DRAWN, **fields}
    return [choice["token_ids"] for choice in post(client, "/v1/completions", body)["choices"]]


def ask(client: httpx.Client, path: str, fork: Any, added: list[int] | None = None, **fields: Any) -> Any:
    """An answer of an endpoint to a fork, with its prompt and its first tokens."""
    if path == "/generate":
        sampling = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 5}
        body = {"sampling_params": sampling} | ({} if added is None else {"input_ids": added})
        found = post(client, path, body | {"fork": fork, **fields})
        return found["meta_info"]["prompt_tokens"], None, found["output_ids"]
    if path == "/v1/completions":
        body = DRAWN | ({} if added is None else {"prompt": added})
        choice = (found := post(client, path, body | {"fork": fork, **fields}))["choices"][0]
        return found["usage"]["prompt_tokens"], choice["prompt_token_ids"], choice["token_ids"]
    sampling = {"max_tokens": 6, "temperature": 1.0, "seed": 5}
    body = {"sampling_params": sampling, "return_token_ids": True} | ({} if added is None else {"token_ids": added})
    found = post(client, path, body | {"fork": fork, **fields})
    return found["usage"]["prompt_tokens"], found["prompt_token_ids"], found["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/generate"])
def test_a_fork_is_the_request_that_sends_all_tokens(client: httpx.Client, path: str) -> None:
    first, second = source(client, "root", n=2)
    for fork, added, whole in (
        ({"request": "root"}, None, PROMPT + first),
        ({"request": "cmpl-root", "index": 1}, [8, 9], PROMPT + second + [8, 9]),
        ({"request": "root", "index": 1, "offset": len(PROMPT) + 3}, [9], PROMPT + second[:3] + [9]),
        ({"request": "root", "offset": 4}, [], PROMPT[:4]),
    ):
        count, prompt, tokens = ask(client, path, fork, added)
        assert count == len(whole) and prompt in (None, whole)
        sent = post(client, "/v1/completions", {"prompt": whole, **DRAWN})["choices"][0]["token_ids"]
        assert tokens == sent


def test_choices_of_several_prompts_are_counted_as_the_answer_counts_them(client: httpx.Client) -> None:
    prompts = [PROMPT, PROMPT[:5]]
    drawn = source(client, "two", prompt=prompts, n=2)
    for index in range(4):
        _, prompt, _ = ask(client, "/v1/completions", {"request": "two", "index": index})
        assert prompt == prompts[index // 2] + drawn[index]
    assert refused(client, "/v1/completions", {"fork": {"request": "two", "index": 4}}) == "fork.index"


def test_each_prompt_is_a_branch_and_text_has_no_tokens_of_a_beginning(client: httpx.Client) -> None:
    (drawn,) = source(client, "r")
    body = {"prompt": [" 41:", [9]], "fork": {"request": "r"}, **DRAWN, "temperature": 0}
    text, ids = post(client, "/v1/completions", body)["choices"]
    assert text["prompt_token_ids"] == PROMPT + drawn + token_ids(" 41:") and text["text"].startswith(" 42")
    assert ids["prompt_token_ids"] == [*PROMPT, *drawn, 9]


def test_a_session_is_continued_and_goes_back(client: httpx.Client) -> None:
    mine, other = {"X-Session-ID": "mine"}, {"X-Session-ID": "other"}
    body = {"prompt": PROMPT, **DRAWN}
    drawn = post(client, "/v1/completions", body, headers=mine)["choices"][0]["token_ids"]
    branch = post(client, "/v1/completions", DRAWN | {"fork": {"session": "mine"}, "prompt": [9]}, headers=other)
    said = branch["choices"][0]["prompt_token_ids"]
    assert said == [*PROMPT, *drawn, 9]
    said += branch["choices"][0]["token_ids"]
    back = {"fork": {"offset": len(PROMPT) + 2}, "prompt": [7], **DRAWN}
    again = post(client, "/v1/completions", back, headers=mine)
    assert again["choices"][0]["prompt_token_ids"] == [*PROMPT, *drawn[:2], 7]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) + 2
    assert ask(client, "/inference/v1/generate", {"session": "other"})[1] == said
    for name in ("mine", "other"):
        assert post(client, f"/finish_session?session_id={name}")["finished"]
    assert refused(client, "/v1/completions", {"fork": {"session": "mine"}}, status=404) == "fork.session"


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_streams_of_forks_have_the_same_tokens(client: httpx.Client, path: str) -> None:
    source(client, "r")
    body: dict[str, Any] = {"fork": {"request": "r"}, "stream_options": {"include_usage": True}}
    if path == "/v1/completions":
        body |= {"max_tokens": 6, "temperature": 0}
        whole = post(client, path, {name: value for name, value in body.items() if name != "stream_options"})
        *chunks, last = events(client, path, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    else:
        body |= {"sampling_params": {"max_tokens": 6, "temperature": 0}}
        whole = post(client, path, {name: value for name, value in body.items() if name != "stream_options"})
        *chunks, last = events(client, path, body)
        streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert streamed == whole["choices"][0]["token_ids"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_running_stream_is_continued(client: httpx.Client) -> None:
    body = {"prompt": "17:", "max_tokens": 400, "ignore_eos": True, "stream": True, "request_id": "running"}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        _, prompt, _ = ask(client, "/v1/completions", {"request": "running"})
        counted = "17:" + "".join(f" {i}" for i in range(18, 400))
        assert counted.startswith(text_of(prompt)) and len(prompt) > len(token_ids("17:"))


def test_log_probs_of_the_prompt_include_what_is_continued(client: httpx.Client) -> None:
    (drawn,) = source(client, "r")
    body = {"fork": {"request": "r"}, "max_tokens": 0, "prompt_logprobs": 0}
    sent = {"prompt": PROMPT + drawn, "max_tokens": 0, "prompt_logprobs": 0}
    mine, theirs = (post(client, "/v1/completions", each)["choices"][0]["prompt_logprobs"] for each in (body, sent))
    assert [list(each or ()) for each in mine] == [list(each or ()) for each in theirs]


def test_a_request_that_is_refused_leaves_an_earlier_one_with_its_id(client: httpx.Client) -> None:
    (drawn,) = source(client, "again")
    assert refused(client, "/v1/completions", {"prompt": [10**6], "request_id": "again"}) == "prompt"
    assert ask(client, "/v1/completions", {"request": "again"})[1] == PROMPT + drawn
    (other,) = source(client, "again", seed=6, temperature=5.0)
    assert ask(client, "/v1/completions", {"request": "again"})[1] == PROMPT + other


@pytest.mark.parametrize(
    ("fork", "field", "status"),
    [
        ("r", "fork", 400),
        ({}, "fork", 400),
        ({"request": "r", "session": "s"}, "fork.session", 400),
        ({"request": ""}, "fork.request", 400),
        ({"request": 7}, "fork.request", 400),
        ({"request": "r", "index": 1}, "fork.index", 400),
        ({"request": "r", "index": -1}, "fork.index", 400),
        ({"session": "s", "index": 1}, "fork.index", 400),
        ({"request": "r", "offset": 0}, "fork.offset", 400),
        ({"request": "r", "offset": 2.5}, "fork.offset", 400),
        ({"request": "r", "offset": 4000}, "fork.offset", 400),
        ({"request": "r", "at": 4}, "fork.at", 400),
        ({"request": "unknown"}, "fork.request", 404),
        ({"session": "unknown"}, "fork.session", 404),
    ],
)
def test_wrong_forks_name_their_field_and_disturb_nothing(
    client: httpx.Client, fork: Any, field: str, status: int
) -> None:
    source(client, "r")
    for path in ("/v1/completions", "/inference/v1/generate", "/generate"):
        assert refused(client, path, {"fork": fork}, status) == field
    assert len(ask(client, "/v1/completions", {"request": "r"})[1]) == len(PROMPT) + 6
    bystand(client)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"echo": True}, "echo"),
        ({"stream": True, "return_token_ids": True}, "return_token_ids"),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
def test_what_needs_the_continued_tokens_too_early_is_refused(
    client: httpx.Client, fields: dict[str, Any], field: str
) -> None:
    source(client, "r")
    assert refused(client, "/v1/completions", {"fork": {"request": "r"}, **fields}) == field


def test_a_request_without_a_fork_needs_its_prompt_and_a_conversation_takes_none(client: httpx.Client) -> None:
    assert refused(client, "/v1/completions", {}) == "prompt"
    assert refused(client, "/inference/v1/generate", {}) == "token_ids"
    assert refused(client, "/generate", {}) == "text"
    chat = {"messages": [{"role": "user", "content": "17:"}], "fork": {"request": "r"}}
    assert refused(client, "/v1/chat/completions", chat) == "fork"


def test_requests_with_many_prompts_are_forgotten_sooner() -> None:
    known = RequestIds()
    for place in range(40):
        with known.note(f"r{place}", [(f"{place}-{part}", 1) for part in range(1000)]):
            pass
    assert known.worker_fork({"request": "r39", "index": 999})["request"] == "39-999"
    for place in (0, 20):
        with pytest.raises(HttpError):
            known.worker_fork({"request": f"r{place}", "index": 0})
    for _ in range(40):  # a request takes the place of an earlier one with its id
        with known.note("again", [(str(part), 1) for part in range(1000)]):
            pass
    assert known.worker_fork({"request": "r39", "index": 5})["request"] == "39-5"
    with known.note("large", [(str(part), 1) for part in range(20_000)]):
        assert known.worker_fork({"request": "large", "index": 19_999})["request"] == "19999"
