"""vLLM's `/inference/v1/generate` and SGLang's `/generate`; the worker's own client says what is right."""

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.gateway.harness import events, post, refused
from tests.support.worker.harness import token_ids
from trainer_bridge.client.blocking import RolloutClient

PROMPT = token_ids("17:")
DRAWN: dict[str, Any] = {"temperature": 2.5, "seed": 4}


def test_tokens_of_vllm(client: httpx.Client, direct: RolloutClient) -> None:
    (truth,) = direct.generate(PROMPT, logprobs=1, max_tokens=15, **DRAWN).completions
    params = {**DRAWN, "max_tokens": 15, "logprobs": 1, "skip_special_tokens": False, "output_kind": 2}
    params["top_k"] = 100_000_000  # AReaL's default, which means all tokens
    body = {"model": "ones", "token_ids": PROMPT, "sampling_params": params, "cache_salt": "7", "priority": 3}
    answer = post(client, "/inference/v1/generate", body)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == truth.token_ids.tolist() and choice["finish_reason"] == truth.finish_reason
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert np.array_equal(np.float32([entry["logprob"] for entry in content]), truth.logprobs)
    streamed = [event["choices"][0] for event in events(client, "/inference/v1/generate", body)]
    assert [token for each in streamed for token in each["token_ids"]] == choice["token_ids"]
    assert streamed[-1]["finish_reason"] == choice["finish_reason"]


def test_prompt_log_probs_of_vllm(client: httpx.Client, direct: RolloutClient) -> None:
    truth = direct.generate(PROMPT, max_tokens=1, prompt_top_logprobs=3)
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    found = post(client, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})["prompt_logprobs"]
    assert found[0] is None
    values = [entry[str(token)]["logprob"] for entry, token in zip(found[1:], PROMPT[1:], strict=True)]
    assert np.array_equal(np.float32(values), truth.prompt_logprobs[1:])
    tops = truth.prompt_tops
    assert tops is not None
    assert [entry[str(token)]["rank"] for entry, token in zip(found[1:], PROMPT[1:], strict=True)] == list(
        tops.ranks[1:]
    )
    assert all(len(entry) == 1 for entry in found[1:]), "the prompt's own tokens alone"
    body = {"token_ids": PROMPT, "sampling_params": params | {"prompt_logprobs": 3}}
    found = post(client, "/inference/v1/generate", body)["prompt_logprobs"]
    for position, entry in enumerate(found[1:], start=1):
        ids = tops.ids[position].tolist()
        assert entry.keys() == {str(token) for token in [PROMPT[position], *ids]}
        assert [entry[str(token)]["rank"] for token in ids if token != PROMPT[position]] == [
            rank for rank, token in enumerate(ids, start=1) if token != PROMPT[position]
        ]
        assert np.float32([entry[str(token)]["logprob"] for token in ids]).tolist() == tops.logprobs[position].tolist()


def test_wrong_fields_of_vllm(client: httpx.Client) -> None:
    path = "/inference/v1/generate"
    assert refused(client, path, {"token_ids": []}) == "token_ids"
    assert refused(client, path, {"token_ids": PROMPT, "features": {"mm_hashes": {}}}) == "features"
    assert refused(client, path, {"token_ids": PROMPT, "sampling_params": {"topk": 3}}) == "sampling_params.topk"
    assert refused(client, path, {"token_ids": PROMPT, "sampling_params": []}) == "sampling_params"
    headers = {"X-data-parallel-rank": "1"}
    assert refused(client, path, {"token_ids": PROMPT}, headers=headers) == "X-data-parallel-rank"


def test_tokens_of_sglang(client: httpx.Client, direct: RolloutClient) -> None:
    (truth,) = direct.generate(PROMPT, logprobs=2, max_tokens=40, **DRAWN).completions
    params = {"temperature": 2.5, "sampling_seed": 4, "max_new_tokens": 40, "skip_special_tokens": False}
    body = {
        "input_ids": PROMPT,
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "rid": "mine",
    }
    answer = post(client, "/generate", body)
    meta = answer["meta_info"]
    assert answer["output_ids"] == truth.token_ids.tolist() and meta["id"] == "mine"
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert np.array_equal(np.float32([entry[0] for entry in meta["output_token_logprobs"]]), truth.logprobs)
    assert [[entry[1] for entry in row] for row in meta["output_top_logprobs"]] == truth.top_ids.tolist()
    assert meta["finish_reason"]["type"] == truth.finish_reason and meta["completion_tokens"] == len(truth)
    assert meta["prompt_tokens"] == 3 and int(meta["weight_version"]) == truth.versions[-1][0]
    streamed = events(client, "/generate", body)
    assert streamed[-1]["output_ids"] == answer["output_ids"] and streamed[-1]["text"] == answer["text"]
    assert streamed[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    assert all(streamed[-1]["text"].startswith(event["text"]) for event in streamed)


def test_batches_and_stops_of_sglang(client: httpx.Client, direct: RolloutClient) -> None:
    body = {"text": ["17:", "98:"], "sampling_params": {"stop": " 2", "no_stop_trim": True, "max_new_tokens": 9}}
    found = post(client, "/generate", body)
    assert [each["text"] for each in found] == [" 18 19 2", " 99 100 1"]
    assert [each["meta_info"]["finish_reason"] for each in found] == [
        {"type": "stop", "matched": " 2"},
        {"type": "length", "length": 9},
    ]
    several = post(client, "/generate", {"text": "17:", "sampling_params": {"n": 2, "max_new_tokens": 3}})
    assert [each["text"] for each in several] == [" 18", " 18"]
    scored = {
        "text": "17: 18",
        "return_logprob": True,
        "logprob_start_len": 2,
        "sampling_params": {"max_new_tokens": 1},
    }
    found = post(client, "/generate", scored)["meta_info"]
    assert [entry[1] for entry in found["input_token_logprobs"]] == token_ids("17: 18")[2:]
    assert "input_top_logprobs" not in found
    tops = direct.generate("17: 18", max_tokens=1, prompt_top_logprobs=2).prompt_tops
    assert tops is not None
    for start in (0, 2):
        meta = post(client, "/generate", scored | {"top_logprobs_num": 2, "logprob_start_len": start})["meta_info"]
        likeliest = meta["input_top_logprobs"]
        assert len(likeliest) == len(meta["input_token_logprobs"]) == 6 - start
        assert start or likeliest.pop(0) is None
        expected = tops.ids[max(start, 1) :].tolist()
        assert [[token for _, token, _ in row] for row in likeliest] == expected


def test_wrong_fields_of_sglang(client: httpx.Client) -> None:
    assert refused(client, "/generate", {"sampling_params": {}}) == "text"
    assert (
        refused(client, "/generate", {"text": "17:", "sampling_params": {"max_tokns": 1}})
        == "sampling_params.max_tokns"
    )
    assert refused(client, "/generate", {"text": ["1:", "2:"], "sampling_params": [{}]}) == "sampling_params"
    assert refused(client, "/generate", {"text": "17:", "return_hidden_states": True}) == "return_hidden_states"


ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": [{}, {"temperature": -1.0}]}, "sampling_params.1.temperature"),
    ({"sampling_params": [{}, {"regex": "("}]}, "sampling_params.1.regex"),
    ({"sampling_params": [{"regex": "1"}, {"ebnf": "root ::= nothing"}]}, "sampling_params.1.ebnf"),
    ({"sampling_params": [{"ebnf": "root ::= nothing"}, {"regex": "1"}]}, "sampling_params.0.ebnf"),
    ({"sampling_params": [{}, {"stop": ["2", ""]}]}, "sampling_params.1.stop.1"),
    ({"sampling_params": [{}, {"max_new_tokens": 10**6}]}, "sampling_params.1.max_new_tokens"),
    ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"text": None, "input_ids": [PROMPT, [99]]}, "input_ids.1"),
]


@pytest.mark.parametrize(("fields", "named"), ITEMS)
def test_the_error_of_one_item_names_the_item(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    body = {"text": ["17:", "98:"], "sampling_params": {"max_new_tokens": 3}} | fields
    assert refused(client, "/generate", body) == named
    lines = client.post("/generate", json=body | {"stream": True}).text.splitlines()
    (error,) = (json.loads(line.removeprefix("data: "))["error"] for line in lines if '"error"' in line)
    assert error["param"] == named and error["code"] == 400


def test_sampling_params_of_one_item_that_exclude_each_other_name_the_item(client: httpx.Client) -> None:
    params = [{}, {"regex": "1", "json_schema": "{}"}]
    assert refused(client, "/generate", {"text": ["17:", "98:"], "sampling_params": params}).startswith(
        "sampling_params.1."
    )


def test_named_tokens_of_vllm(client: httpx.Client, direct: RolloutClient) -> None:
    """A teacher: the student's tokens at each position of its completion, in vLLM's form."""
    prompt, start = token_ids("17: 18 19"), 3
    rows = len(prompt) - 1 - start
    named = np.random.default_rng(0).integers(0, 16, (rows, 5)).tolist()
    truth = direct.generate(prompt, max_tokens=0, prompt_logprobs_last=rows, prompt_logprob_token_ids=named)
    params = {"max_tokens": 1, "prompt_logprob_start": start, "prompt_logprob_token_ids": named}
    answer = post(client, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
    scores = _npy(answer["prompt_token_id_logprobs"])
    assert scores.dtype == np.float32 and answer["prompt_logprobs"] is None
    assert truth.prompt_chosen_logprobs is not None and truth.prompt_logprobs is not None
    np.testing.assert_allclose(scores, truth.prompt_chosen_logprobs, rtol=1e-6, atol=1e-5)
    own = params | {"prompt_logprob_token_ids": [[token] for token in prompt[start + 1 :]]}
    answer = post(client, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": own})
    np.testing.assert_allclose(
        _npy(answer["prompt_token_id_logprobs"])[:, 0], truth.prompt_logprobs, rtol=1e-6, atol=1e-5
    )
    ragged = params | {"prompt_logprob_token_ids": [row[: 1 + place] for place, row in enumerate(named)]}
    ragged |= {"prompt_logprobs": 2}
    answer = post(client, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": ragged})
    found = _npy(answer["prompt_token_id_logprobs"])
    for place, row in enumerate(found):
        np.testing.assert_allclose(
            row[: 1 + place], truth.prompt_chosen_logprobs[place, : 1 + place], rtol=1e-6, atol=1e-5
        )
        assert (row[1 + place :] == -np.inf).all()
    assert len(answer["prompt_logprobs"]) == len(prompt), "these are of the whole prompt"
    for_all = {"max_tokens": 0, "prompt_logprob_token_ids": [4, -1, 5]}
    answer = post(client, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": for_all})
    found = _npy(answer["prompt_token_id_logprobs"])
    assert found.shape == (len(prompt) - 1, 3) and (found[:, 1] == -np.inf).all() and np.isfinite(found[:, ::2]).all()


def _npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_logprob_start": 1}, "prompt_logprob_start"),
    ({"prompt_logprob_start": 2, "prompt_logprob_token_ids": [1]}, "prompt_logprob_start"),
    ({"prompt_logprob_start": -1, "prompt_logprob_token_ids": [1]}, "prompt_logprob_start"),
    ({"prompt_logprob_token_ids": []}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [[], []]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [[1], 2]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [-2]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [[1] * 257, [1]]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_token_ids": [99999]}, "prompt_logprob_token_ids"),
    ({"prompt_logprobs": 257}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("params", "named"), NAMED)
def test_wrong_named_tokens_of_vllm(client: httpx.Client, params: dict[str, Any], named: str) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1} | params}
    assert refused(client, "/inference/v1/generate", body).startswith(f"sampling_params.{named}")
    body["sampling_params"] = {"max_tokens": 1, "prompt_logprob_token_ids": [1]}
    assert refused(client, "/inference/v1/generate", body | {"stream": True}) == "stream"


def test_rows_of_named_tokens_are_not_filled_up_without_limit(client: httpx.Client) -> None:
    named = [[1] * 1000, *[[1]] * 69_999]
    body = {"token_ids": [1] * 70_001, "sampling_params": {"max_tokens": 0, "prompt_logprob_token_ids": named}}
    field = "sampling_params.prompt_logprob_token_ids"
    assert refused(client, "/inference/v1/generate", body) == field


def test_named_tokens_of_sglang(client: httpx.Client, direct: RolloutClient) -> None:
    prompt, named = token_ids("17: 18 19"), [3, 5, 4]
    truth = direct.generate(prompt, max_tokens=0, prompt_logprob_token_ids=named, prompt_top_logprobs=12)
    chosen, tops = truth.prompt_chosen_logprobs, truth.prompt_tops
    assert chosen is not None and tops is not None
    params = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}
    for start in (0, 4):
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
        meta = post(client, "/generate", body | {"token_ids_logprob": named, "top_logprobs_num": 12})["meta_info"]
        rows = meta["input_token_ids_logprobs"]
        assert len(rows) == len(meta["input_token_logprobs"]) == len(prompt) - start
        assert start or rows.pop(0) is meta["input_top_logprobs"].pop(0) is None
        assert all([token for _, token, _ in row] == named for row in rows)
        np.testing.assert_allclose(
            [[value for value, _, _ in row] for row in rows], chosen[max(start, 1) :], rtol=1e-6, atol=1e-5
        )
        likeliest = [[value for value, _, _ in row] for row in meta["input_top_logprobs"]]
        np.testing.assert_allclose(likeliest, tops.logprobs[max(start, 1) :], rtol=1e-6, atol=1e-5)
    batch = {"input_ids": [prompt, prompt[:3]], "token_ids_logprob": [[1], [2, 3]], "sampling_params": params}
    answers = post(client, "/generate", batch | {"return_logprob": True, "logprob_start_len": 0})
    ids = [
        [[token for _, token, _ in row] for row in each["meta_info"]["input_token_ids_logprobs"][1:]]
        for each in answers
    ]
    assert ids == [[[1]] * (len(prompt) - 1), [[2, 3]] * 2]
    scored = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    for fields, field in (
        ({"logprob_start_len": -1}, "token_ids_logprob"),
        ({"return_logprob": False}, "token_ids_logprob"),
        ({"token_ids_logprob": [99999]}, "token_ids_logprob"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
        ({"token_ids_logprob": [1] * 257}, "token_ids_logprob"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
        ({"top_logprobs_num": 21, "sampling_params": {"max_new_tokens": 1}}, "top_logprobs_num"),
        ({"stream": True}, "stream"),
    ):
        named_field = refused(client, "/generate", scored | {"token_ids_logprob": [1]} | fields)
        assert named_field is not None and named_field.startswith(field), (fields, named_field)
