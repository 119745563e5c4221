"""`/v1/completions` at a real worker, whose own client says what is right."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.gateway.conftest import CONTEXT
from tests.support.gateway.harness import events, gateway, post, refused
from tests.support.worker.harness import text_of, token_ids, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

PATH = "/v1/completions"
DRAWN: dict[str, Any] = {"temperature": 2.5, "seed": 11, "max_tokens": 24}


def test_several_prompts_as_text_or_ids_come_back_in_order_with_their_tokens(client: httpx.Client) -> None:
    common = {"max_tokens": 6, "n": 2, "return_token_ids": True}
    for prompts in (["17:", "98:", "7:"], [token_ids(prompt) for prompt in ("17:", "98:", "7:")]):
        answer = post(client, PATH, {"model": "ones", "prompt": prompts, **common})
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"] for choice in choices] == [" 18 19"] * 2 + [" 99 10"] * 2 + [" 8 9 1"] * 2
        assert [choice["prompt_token_ids"] for choice in choices[::2]] == list(map(token_ids, ("17:", "98:", "7:")))
        assert all(text_of(choice["token_ids"]) == choice["text"] for choice in choices)
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert answer["usage"]["completion_tokens"] == 36 and answer["usage"]["prompt_tokens"] == 8


def test_log_probs_are_those_of_the_worker_in_every_mode(
    client: httpx.Client, direct: RolloutClient, worker: WorkerProcess
) -> None:
    (truth,) = direct.generate("17:", logprobs=3, top_p=0.9, stop={"ignore_eos": True}, **DRAWN).completions
    body = {
        "prompt": "17:",
        "logprobs": 3,
        "top_p": 0.9,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        **DRAWN,
    }
    policy = post(client, PATH, body)["choices"][0]["logprobs"]
    assert policy["tokens"] == [f"token_id:{token}" for token in truth.token_ids]
    # The prompt is in the prefix cache the second time, so the last bits may differ.
    assert np.allclose(policy["token_logprobs"], truth.logprobs, rtol=1e-5, atol=1e-5)
    for found, token, own, ids, values in zip(
        policy["top_logprobs"], truth.token_ids, truth.raw_logprobs, truth.top_ids, truth.top_logprobs, strict=True
    ):
        wanted = {f"token_id:{other}": float(value) for other, value in zip(ids, values, strict=True)}
        assert found == pytest.approx({f"token_id:{token}": float(own)} | wanted, rel=1e-5, abs=1e-5)
    for mode, wanted in (("raw", truth.raw_logprobs), ("processed", truth.drawn_logprobs)):
        with gateway([worker.endpoint], logprobs=mode) as other:
            found = post(other, PATH, body)["choices"][0]["logprobs"]["token_logprobs"]
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_stream_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    body = {
        "prompt": ["17:", "98:"],
        "n": 2,
        "logprobs": 1,
        "return_token_ids": True,
        "return_weight_versions": True,
        **DRAWN,
    }
    whole = post(client, PATH, body)["choices"]
    found = events(client, PATH, body | {"stream_options": {"include_usage": True}})
    *chunks, last = found
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole)
    for choice in whole:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [token for each in mine for token in each["token_ids"]] == choice["token_ids"]
        assert [each.get("prompt_token_ids") for each in mine] == [choice["prompt_token_ids"]] + [None] * (
            len(mine) - 1
        )
        assert [value for each in mine for value in each["logprobs"]["token_logprobs"]] == choice["logprobs"][
            "token_logprobs"
        ]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        covered = [run for each in mine for run in each["weight_versions"]]
        assert [run["start"] for run in covered] == [0, *(run["end"] for run in covered[:-1])]
        assert covered[-1]["end"] == len(choice["token_ids"])


def test_echo_has_the_prompt_with_its_log_probs(client: httpx.Client, direct: RolloutClient) -> None:
    truth = direct.generate("17: 18", max_tokens=3, prompt_logprobs=True)
    body = {"prompt": "17: 18", "max_tokens": 3, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    (choice,) = post(client, PATH, body)["choices"]
    assert choice["text"] == "17: 18 19" and "".join(choice["logprobs"]["tokens"]) == "17: 18 19"
    assert choice["logprobs"]["text_offset"] == list(range(9))
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    wanted = np.concatenate([truth.prompt_logprobs[1:], truth.completions[0].logprobs])
    assert np.allclose(rest, wanted, atol=1e-5)
    scored = [None if entry is None else next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"]]
    assert scored == [first, *rest[: len("17: 18") - 1]]
    more = body | {"logprobs": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    (wider,) = post(client, PATH, more)["choices"]
    tops = direct.generate("17: 18", max_tokens=1, prompt_top_logprobs=2).prompt_tops
    own = token_ids("17: 18")
    assert tops is not None and wider["logprobs"]["top_logprobs"][0] is None
    for position, (likeliest, entry) in enumerate(
        zip(wider["logprobs"]["top_logprobs"][1 : len(own)], wider["prompt_logprobs"][1:], strict=True), start=1
    ):
        token, (best, second) = own[position], tops.ids[position].tolist()
        assert list(likeliest) == [f"token_id:{each}" for each in dict.fromkeys([best, second, token])]
        assert list(entry) == [str(each) for each in dict.fromkeys([token, best])], (
            "the token itself, and the likeliest"
        )
        assert entry[str(token)]["rank"] == tops.ranks[position] and entry[str(best)]["rank"] == 1
        assert entry[str(best)]["logprob"] == likeliest[f"token_id:{best}"] == float(tops.logprobs[position][0])
    streamed = events(client, PATH, {"prompt": "17:", "max_tokens": 2, "echo": True})
    texts = [event["choices"][0]["text"] for event in streamed]
    assert texts[0].startswith("17: ") and "".join(texts) == "17: 1"


@pytest.mark.parametrize("length", [1, 9, CONTEXT])
def test_a_prompt_is_scored_without_a_token(client: httpx.Client, direct: RolloutClient, length: int) -> None:
    """Over every endpoint, up to a prompt that leaves no room in the context."""
    ids = (token_ids("17: 18 19 ") * length)[:length]
    truth = direct.generate(ids, max_tokens=0, prompt_logprobs=True).prompt_logprobs[1:]
    (echo,) = post(client, PATH, {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0})["choices"]
    assert echo["finish_reason"] == "length" and len(echo["logprobs"]["tokens"]) == length
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    ours = post(client, "/inference/v1/generate", {"token_ids": ids, "sampling_params": params})
    scored = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    sglang = post(client, "/generate", {"input_ids": ids} | scored)
    assert ours["choices"][0]["token_ids"] == sglang["output_ids"] == []
    assert ours["usage"]["completion_tokens"] == sglang["meta_info"]["completion_tokens"] == 0
    found = [
        echo["logprobs"]["token_logprobs"][1:],
        [entry[str(token)]["logprob"] for entry, token in zip(ours["prompt_logprobs"][1:], ids[1:], strict=True)],
        [entry[0] for entry in sglang["meta_info"]["input_token_logprobs"][1:]],
    ]
    assert all(np.array_equal(np.float32(each), truth) for each in found)
    (last,) = events(client, PATH, {"prompt": ids, "max_tokens": 0})
    assert last["choices"][0]["text"] == "" and last["choices"][0]["finish_reason"] == "length"


def test_the_scores_of_a_prompt_do_not_depend_on_how_tokens_are_drawn(client: httpx.Client) -> None:
    """No truncation, bias or constraint makes a score infinite, and every token of the prompt has one."""
    body = {"prompt": "17: 18", "echo": True, "logprobs": 1, "max_tokens": 2}
    wanted = post(client, PATH, body)["choices"][0]["logprobs"]
    assert wanted["tokens"][:6] == list("17: 18") and len(wanted["tokens"]) == 8
    for rule in ({"top_k": 1}, {"top_p": 0.01}, {"logit_bias": {"5": -100}}, {"allowed_token_ids": token_ids("7")}):
        found = post(client, PATH, body | rule)["choices"][0]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert found[name][:6] == wanted[name][:6]


@pytest.mark.parametrize("special", [True, False])
def test_stops_and_their_text(client: httpx.Client, special: bool) -> None:
    body = {"prompt": "17:", "stop": " 2", "skip_special_tokens": special}
    for keep, text in ((False, " 18 19"), (True, " 18 19 2")):
        asked = body | {"include_stop_str_in_output": keep}
        (choice,) = post(client, PATH, asked)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", " 2")
        assert "".join(event["choices"][0]["text"] for event in events(client, PATH, asked)) == text
    (choice,) = post(client, PATH, {"prompt": "17:", "stop_token_ids": token_ids("9"), "return_token_ids": True})[
        "choices"
    ]
    assert choice["token_ids"] == token_ids(" 18 19") and choice["stop_reason"] == token_ids("9")[0]


def test_max_tokens_that_is_left_out_fills_the_context(client: httpx.Client) -> None:
    answer = post(client, PATH, {"prompt": "17:", "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == CONTEXT and answer["choices"][0]["finish_reason"] == "length"
    assert refused(client, PATH, {"prompt": "17:", "max_tokens": CONTEXT}) == "max_tokens"
    longer = client.post(PATH, json={"prompt": "1" * CONTEXT + ":"})
    assert longer.status_code == 400 and "maximum context length" in longer.json()["error"]["message"]


def test_constraints(client: httpx.Client) -> None:
    body = {"prompt": "17:", "temperature": 1.0}
    choices = {"structured_outputs": {"choice": [" 55", " 66"]}}
    assert post(client, PATH, body | choices)["choices"][0]["text"] in (" 55", " 66")
    allowed = {"allowed_token_ids": token_ids("7"), "max_tokens": 3}
    assert post(client, PATH, body | allowed)["choices"][0]["text"] in ("", "7", "77", "777")
    assert refused(client, PATH, body | choices | allowed) == "allowed_token_ids"
    assert refused(client, PATH, body | {"structured_outputs": {"regex": "a", "choice": ["b"]}}) == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"promt": "17:"}, "promt"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": 17}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["2", ""]}, "stop.1"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "stream"),
        ({"logit_bias": {"999": 1.0}}, "logit_bias"),
        ({"stop_token_ids": [99]}, "stop_token_ids"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": [[1, 2], [99]]}, "prompt.1"),
        ({"prompt": ["17:", "1" * 5000]}, "prompt.1"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    assert refused(client, PATH, {"prompt": "17:", "max_tokens": 2} | fields) == named


def test_fields_that_mean_nothing_here_change_nothing(client: httpx.Client) -> None:
    ignored = {"user": "me", "metadata": {}, "best_of": 1, "use_beam_search": False, "seed": None}
    assert post(client, PATH, {"prompt": "17:", "max_tokens": 3} | ignored)["choices"][0]["text"] == " 18"
    assert refused(client, PATH, {"prompt": "17:", "model": "gpt-9"}, 404) == "model"


def test_a_client_that_leaves_ends_its_request(
    client: httpx.Client, worker: WorkerProcess, direct: RolloutClient
) -> None:
    direct.pause()  # nothing comes: the gateway must see by itself that the client has left
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"prompt": ["17:", "98:"], "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "17:"}], "n": 2},
        "/generate": {"text": ["17:", "98:"], "sampling_params": {"n": 2}},
        "/inference/v1/generate": {"token_ids": token_ids("17:"), "sampling_params": {"n": 2}},
    }
    for path, body in bodies.items():
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body | {"stream": stream}, timeout=0.3)
    until(lambda: direct.status()["queue"]["waiting"] + direct.status()["rows"]["running"] == 0, "the cancels")
    direct.resume()
    with client.stream("POST", PATH, json={"prompt": "17:", "stream": True, "ignore_eos": True}) as answer:
        next(answer.iter_lines())


def test_too_many_completions_are_refused_for_now(worker: WorkerProcess, direct: RolloutClient) -> None:
    with gateway([worker.endpoint], max_in_flight=2) as small:
        refused(small, PATH, {"prompt": "17:", "n": 3})
        direct.pause()
        with ThreadPoolExecutor() as threads:
            running = threads.submit(post, small, PATH, {"prompt": "17:", "n": 2, "max_tokens": 4})
            until(lambda: "in_flight 2" in small.get("/metrics").text, "the request")
            answer = small.post(PATH, json={"prompt": "17:"})
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            direct.resume()
            assert [choice["text"] for choice in running.result()["choices"]] == [" 18 "] * 2


def test_a_full_queue_of_the_worker_is_429_with_its_time(
    worker: WorkerProcess, client: httpx.Client, direct: RolloutClient
) -> None:
    direct.pause()
    with ThreadPoolExecutor() as threads:
        running = threads.submit(post, client, PATH, {"prompt": "17:", "n": 64, "max_tokens": 1})
        until(lambda: direct.status()["queue"]["waiting"] >= 56, "a full queue")
        answer = client.post(PATH, json={"prompt": "17:", "n": 64})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        direct.resume()
        assert len(running.result()["choices"]) == 64


def test_a_cache_salt_keeps_prefixes_apart(client: httpx.Client) -> None:
    prompt = token_ids("".join(f"{number} " for number in range(100, 130)) + ":")

    def cached(**salt: str) -> int:
        answer = post(client, PATH, {"prompt": prompt, "max_tokens": 4, **salt})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0]
    assert min(cached(cache_salt="a"), cached(cache_salt="b")) > 100
    params = {"max_tokens": 4}
    body = {"token_ids": prompt, "sampling_params": params, "cache_salt": "a"}
    found = post(client, "/inference/v1/generate", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found > 100
    assert refused(client, PATH, {"prompt": prompt, "cache_salt": ""}) == "cache_salt"


@pytest.mark.parametrize(("given", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature")])
def test_a_misspelt_field_is_answered_with_the_one_meant(client: httpx.Client, given: str, meant: str) -> None:
    answer = client.post(PATH, json={"prompt": "17:", given: 1})
    assert answer.status_code == 400 and f"did you mean '{meant}'?" in answer.json()["error"]["message"]
