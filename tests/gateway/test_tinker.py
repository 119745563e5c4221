"""The sampling part of Tinker's API: held against the worker's own answers, in JSON and in protobuf."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_gateway.dialects.tinker.tinker_sessions import RESULT_S, SILENT_S, TinkerSampler, TinkerSessions
from rollout_gateway.http.http_errors import HttpError
from scripts.check.fuzz_gateway import VALID, Traffic, check_answer, mutations
from tests.support.gateway.harness import gateway, post, refused
from tests.support.peft_adapters import make_adapter
from tests.support.worker.harness import EOS, ONES, token_ids, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

API = "/api/v1"
PROMPT = token_ids("17:")
PARAMS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.3, "seed": 7, "top_k": 5, "top_p": 0.9}
DRAWN = {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "seed": 7}
PROTOBUF = "application/x-protobuf"


def body(prompt: list[int] = PROMPT, params: dict[str, Any] = PARAMS, **fields: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": part} for part in (prompt[:1], prompt[1:]) if part]
    return {"prompt": {"chunks": chunks}, "sampling_params": params, "base_model": "ones", "type": "sample", **fields}


def ask(client: httpx.Client, sent: dict[str, Any]) -> str:
    """Begin a sample; the id of the request."""
    answer = post(client, f"{API}/asample", sent)
    name = answer["request_id"]
    assert answer["sample_sequence_ids"] == [f"{name}:{index}" for index in range(sent.get("num_samples", 1))]
    return name


def fetch(client: httpx.Client, name: str) -> dict[str, Any]:
    return post(client, f"{API}/retrieve_future", {"request_id": name, "allow_metadata_only": True})


def sample(client: httpx.Client, sent: dict[str, Any]) -> dict[str, Any]:
    answer = fetch(client, ask(client, sent))
    assert answer["type"] == "sample", answer
    return answer


def start_session(client: httpx.Client) -> str:
    return post(client, f"{API}/create_session", {"tags": [], "user_metadata": None, "sdk_version": "1"})["session_id"]


def start_sampler(client: httpx.Client, session: str, number: int = 0, **model: str) -> str:
    sent = {"session_id": session, "sampling_session_seq_id": number, "type": "create_sampling_session"}
    return post(client, f"{API}/create_sampling_session", sent | (model or {"base_model": "ones"}))[
        "sampling_session_id"
    ]


def near(found: Any, expected: np.ndarray) -> None:
    """Log-probs are equal, up to the rounding of other batches."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def message(data: bytes) -> dict[int, list[Any]]:
    """The values of a message of protobuf by field number, read by its definition: numbers and bytes."""
    found: dict[int, list[Any]] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while place < len(data):
        key = varint()
        assert key & 7 in (0, 2)
        value: Any = varint()
        if key & 7 == 2:
            value, place = data[place : place + value], place + value
            assert place <= len(data)
        found.setdefault(key >> 3, []).append(value)
    return found


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_the_workers_own(client: httpx.Client, direct: RolloutClient) -> None:
    truth = direct.generate(PROMPT, n=3, max_tokens=12, **DRAWN, logprobs=2, prompt_top_logprobs=3)
    scored = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    answer = sample(client, body(num_samples=3, **scored))
    assert len(answer["sequences"]) == 3
    for found, completion in zip(answer["sequences"], truth.completions, strict=True):
        assert found["tokens"] == completion.token_ids.tolist() and found["stop_reason"] == "length"
        near(found["logprobs"], completion.logprobs)
        near(found["topk_logprobs"], np.stack((completion.top_ids, completion.top_logprobs), -1))
        ((version, tokens),) = completion.versions
        assert tokens == 12 and found["weight_versions"] == [{"version": version, "start": 0, "end": tokens}]
    assert answer["prompt_logprobs"][0] is None and answer["topk_prompt_logprobs"][0] is None
    assert truth.prompt_logprobs is not None and truth.prompt_tops is not None
    near(answer["prompt_logprobs"][1:], truth.prompt_logprobs[1:])
    near(answer["topk_prompt_logprobs"][1:], np.stack((truth.prompt_tops.ids, truth.prompt_tops.logprobs), -1)[1:])
    assert answer["prompt_weight_version"] == truth.prompt_version


def test_protobuf_has_the_fields_of_json(client: httpx.Client) -> None:
    targets = {"data": [5, -1, -1, 6], "dtype": "int64", "shape": [2, 2]}
    scored = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    name = ask(client, body(num_samples=2, target_prompt_logprobs=targets, **scored))
    shown = fetch(client, name)
    answer = client.post(f"{API}/retrieve_future", json={"request_id": name}, headers={"Accept": PROTOBUF})
    assert answer.status_code == 200 and answer.headers["content-type"] == PROTOBUF
    fields = message(answer.content)
    assert len(fields[1]) == 2
    for data, found in zip(fields[1], shown["sequences"], strict=True):
        sequence = message(data)
        assert sequence[1] == [1]  # the number of `length`
        assert np.frombuffer(sequence[2][0], "<i4").tolist() == found["tokens"]
        assert np.frombuffer(sequence[3][0], "<f4").tolist() == found["logprobs"]
        tops = message(sequence[4][0])
        assert (tops[3], tops[4]) == ([2], [12])
        pairs = zip(np.frombuffer(tops[1][0], "<i4").tolist(), np.frombuffer(tops[2][0], "<f4").tolist(), strict=True)
        assert [list(pair) for pair in pairs] == [pair for row in found["topk_logprobs"] for pair in row]
        (span,) = found["weight_versions"]
        assert message(sequence[1001][0]) == {1: [span["version"]], 2: [0], 3: [12]}
    prompt = np.frombuffer(fields[2][0], "<f4")
    assert np.isnan(prompt[0]) and prompt[1:].tolist() == shown["prompt_logprobs"][1:]
    tops = message(fields[3][0])
    assert (tops[3], tops[4]) == ([3], [3])
    assert np.frombuffer(tops[2][0], "<f4")[:3].tolist() == [np.float32(-99999.0)] * 3  # nothing precedes token 0
    assert fields[4] == [shown["prompt_cache_hit_tokens"]]
    tensor = message(fields[5][0])
    assert tensor[3] == [1] and tensor[4] == [2, 2]
    assert np.frombuffer(tensor[1][0], "<f4").tolist() == shown["target_prompt_logprobs"]["data"]


def test_scores_of_a_prompt_are_those_of_transformers(client: httpx.Client) -> None:
    prompt = token_ids("17: 18 19 20")
    model = AutoModelForCausalLM.from_pretrained(ONES, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1].numpy()
    own = expected[np.arange(len(prompt) - 1), prompt[1:]]
    one = {"max_tokens": 1}
    found = sample(client, body(prompt, one, prompt_logprobs=True))["prompt_logprobs"]
    near(found[1:], own)
    assert sample(client, body(prompt[:1], one, prompt_logprobs=True))["prompt_logprobs"] == [None]
    last = sample(client, body(prompt, one, prompt_logprobs=True, prompt_logprobs_last_n=4, topk_prompt_logprobs=2))
    assert last["prompt_logprobs"][:-4] == [None] * (len(prompt) - 4) == last["topk_prompt_logprobs"][:-4]
    near(last["prompt_logprobs"][-4:], own[-4:])
    best = np.sort(expected[-4:], axis=1)[:, :-3:-1]
    near([[value for _, value in row] for row in last["topk_prompt_logprobs"][-4:]], best)


@pytest.mark.parametrize("own", [{}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 1}])
def test_targets_are_scored_at_their_positions(client: httpx.Client, direct: RolloutClient, own: Any) -> None:
    prompt = token_ids("17: 18")
    ids = np.full((len(prompt) - 1, 3), -1)
    ids[2, 0], ids[2, 2], ids[4, 1] = 5, 9, 12
    scores = direct.generate(prompt, max_tokens=1, prompt_logprob_token_ids=list(range(16))).prompt_chosen_logprobs
    assert scores is not None
    expected = np.where(ids < 0, np.float32(0), np.take_along_axis(scores[1:], np.maximum(ids, 0), 1))
    dense = {"data": ids.flatten().tolist(), "dtype": "int64", "shape": list(ids.shape)}
    rows, columns = np.nonzero(ids >= 0)
    starts = [0, *np.cumsum(np.bincount(rows, minlength=len(ids))).tolist()]
    sparse = {"data": ids[rows, columns].tolist(), "dtype": "int64", "shape": list(ids.shape)}
    sparse |= {"sparse_crow_indices": starts, "sparse_col_indices": columns.tolist()}
    for sent, values in ((dense, expected.flatten()), (sparse, expected[rows, columns])):
        answer = sample(client, body(prompt, {"max_tokens": 1}, target_prompt_logprobs=sent, **own))
        found = answer["target_prompt_logprobs"]
        near(found.pop("data"), values)
        assert found == {**{name: each for name, each in sent.items() if name != "data"}, "dtype": "float32"}
        scored = [each is not None for each in answer["prompt_logprobs"] or ()]
        assert scored == ([] if not own else [False] * (len(prompt) - 1) + [True])


def test_how_a_sample_ends(client: httpx.Client) -> None:
    greedy = {"max_tokens": 12, "temperature": 0.0}

    def ended(**params: Any) -> tuple[str, list[int]]:
        (found,) = sample(client, body(params=greedy | params))["sequences"]
        return found["stop_reason"], found["tokens"]

    whole = ended()
    assert whole == ("length", token_ids(" 18 19 20 21"))
    assert ended(stop=" 20") == ("stop", token_ids(" 18 19 20"))
    assert ended(stop=["x", "9"]) == ("stop", token_ids(" 18 19"))
    assert ended(stop=token_ids("9")) == ("stop", token_ids(" 18 19"))
    assert ended(stop=[]) == whole == ended(stop=None) == ended(stop=["x"])
    assert ended(max_tokens=0) == ("length", [])


def test_an_empty_list_of_stops_switches_the_end_token_off(client: httpx.Client) -> None:
    """At a high temperature the model draws its end token now and then."""
    hot = {"max_tokens": 150, "temperature": 100.0, "seed": 3}
    usual = sample(client, body(params=hot, num_samples=8))["sequences"]
    endless = sample(client, body(params=hot | {"stop": []}, num_samples=8))["sequences"]
    assert "stop" in [each["stop_reason"] for each in usual]
    for ended, on in zip(usual, endless, strict=True):
        assert on["stop_reason"] == "length" and on["tokens"][: len(ended["tokens"])] == ended["tokens"]
        assert ended["stop_reason"] == "length" or ended["tokens"][-1] == EOS


# --- sessions, samplers, requests -------------------------------------------------------------------------------------


def test_a_request_of_a_sampler_is_known_by_its_number(client: httpx.Client) -> None:
    session = start_session(client)
    sampler = start_sampler(client, session)
    assert start_sampler(client, session) == sampler
    shown = client.get(f"{API}/samplers/{sampler}").json()
    assert shown == {"sampler_id": sampler, "base_model": "ones", "model_path": None}
    numbered = {"sampling_session_id": sampler, "seq_id": 4}
    sent = body(params=PARAMS | {"seed": None}) | numbered
    sent.pop("base_model")
    first = ask(client, sent)
    assert ask(client, sent) == first
    assert fetch(client, first) == fetch(client, first)
    assert refused(client, f"{API}/asample", body(token_ids("5:")) | numbered) == "seq_id"
    assert ask(client, sent | {"seq_id": 5}) != first
    joined = [post(client, f"{API}/join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
    assert [each["client_counter"] for each in joined] == [1, 2]
    assert client.post(f"{API}/sessions/{session}/finish", json={"reason": {"type": "success"}}).status_code == 200


def test_the_end_of_a_session_ends_its_requests(client: httpx.Client, direct: RolloutClient) -> None:
    session = start_session(client)
    sampler = start_sampler(client, session)
    long = body(params={"stop": [], "max_tokens": 400}, num_samples=2) | {"sampling_session_id": sampler, "seq_id": 0}
    direct.pause()
    try:
        name = ask(client, long)
        until(lambda: sum(direct.status()["queue"].values()) >= 2, "the rows")
        post(client, f"{API}/session_heartbeat", {"session_id": session})
        assert client.post(f"{API}/sessions/{session}/finish", json={}).status_code == 200
        until(lambda: "rollout_gateway_in_flight 0" in client.get("/metrics").text, "the end of the requests")
    finally:
        direct.resume()
    assert refused(client, f"{API}/retrieve_future", {"request_id": name}, 410) == "request_id"
    assert refused(client, f"{API}/session_heartbeat", {"session_id": session}, 410) == "session_id"
    assert refused(client, f"{API}/asample", long, 404) == "sampling_session_id"
    assert refused(client, f"{API}/create_sampling_session", new_sampler(session), 410) == "session_id"


def new_sampler(session: str, **model: str) -> dict[str, Any]:
    return {"session_id": session, "sampling_session_seq_id": 1} | (model or {"base_model": "ones"})


def test_a_cancelled_request_has_no_result(client: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    try:
        name = ask(client, body())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, f"{API}/retrieve_future", json={"request_id": name})
            post(client, f"{API}/cancel_future", {"request_id": name})
            assert waiting.result().status_code == 410
        until(lambda: "rollout_gateway_in_flight 0" in client.get("/metrics").text, "the end of the request")
    finally:
        direct.resume()
    post(client, f"{API}/cancel_future", {"request_id": name})


def test_an_aborted_request_is_to_be_sampled_again(client: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    try:
        name = ask(client, body())
        until(lambda: direct.status()["queue"]["waiting"], "the row")
        post(client, "/abort_request", {"rid": name})
    finally:
        direct.resume()
    assert refused(client, f"{API}/retrieve_future", {"request_id": name}, 410) is None


def test_a_gateway_that_is_full_takes_the_request_later(worker: WorkerProcess, direct: RolloutClient) -> None:
    with gateway([worker.endpoint], served_model_name=("ones",), max_in_flight=2) as small:
        assert post(small, f"{API}/client/config", {"sdk_version": "1"})["sample_max_concurrent_requests"] == 2
        sampler = start_sampler(small, start_session(small))
        numbered = [{"sampling_session_id": sampler, "seq_id": number} for number in range(2)]
        direct.pause()
        try:
            ask(small, body(num_samples=2) | numbered[0])
            refused(small, f"{API}/asample", body() | numbered[1], 429)
        finally:
            direct.resume()
        until(lambda: small.post(f"{API}/asample", json=body() | numbered[1]).status_code == 200, "room")


def test_adapters_are_sampled_by_their_paths(client: httpx.Client, adapters: Path, direct: RolloutClient) -> None:
    make_adapter(AutoModelForCausalLM.from_pretrained(ONES), adapters / "t", 3)
    session = start_session(client)
    path = f"{API}/create_sampling_session"
    missing = new_sampler(session, model_path="tinker://run/sampler_weights/step-1")
    assert refused(client, path, missing, 404) == "model_path"
    post(client, "/v1/load_lora_adapter", {"lora_name": "step-1", "lora_path": "t"})
    try:
        truth = direct.generate(PROMPT, max_tokens=12, **DRAWN, adapter="step-1").completions[0].token_ids.tolist()
        assert truth != direct.generate(PROMPT, max_tokens=12, **DRAWN).completions[0].token_ids.tolist()
        for number, name in enumerate(("tinker://run/sampler_weights/step-1", "tinker://step-1")):
            sampler = start_sampler(client, session, number, model_path=name)
            assert client.get(f"{API}/samplers/{sampler}").json()["model_path"] == name
            sent = body() | {"sampling_session_id": sampler, "seq_id": 0}
            assert sample(client, sent)["sequences"][0]["tokens"] == truth
        (found,) = sample(client, body(model_path="tinker://step-1"))["sequences"]
        assert found["tokens"] == truth and [mark["position"] for mark in found["adapter_versions"]] == [0]
        assert refused(client, path, new_sampler(session, base_model="ones"))  # number 1 is taken
    finally:
        post(client, "/v1/unload_lora_adapter", {"lora_name": "step-1"})
    gone = fetch(client, ask(client, body() | {"sampling_session_id": sampler, "seq_id": 1}))
    assert gone["category"] == "user" and "step-1" in gone["error"]
    base = start_sampler(client, session, 2, model_path="tinker://ones")
    plain = direct.generate(PROMPT, max_tokens=12, **DRAWN).completions[0].token_ids.tolist()
    assert sample(client, body() | {"sampling_session_id": base, "seq_id": 0})["sequences"][0]["tokens"] == plain


def test_state_of_the_service(client: httpx.Client) -> None:
    assert client.get(f"{API}/healthz").json() == {"status": "ok"}
    (model, *_) = client.get(f"{API}/get_server_capabilities").json()["supported_models"]
    assert model == {"model_name": "ones", "max_context_length": 512, "trainable": False, "sampleable": True}
    assert post(client, f"{API}/client/dynamic_config", {"sdk_version": "1"}) == {"sample_cancel_enabled": True}
    for content in (b"{}", b"no json", b"x" * (1 << 20)):
        assert client.post(f"{API}/telemetry", content=content).json() == {"status": "accepted"}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": {"chunks": []}}, "prompt.chunks"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}}, "prompt.chunks"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "prompt.chunks.0.type"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "prompt.chunks.0.tokens.0"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}}, "prompt.chunks.0.tokens.0"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {}}, "prompt.chunks"),
        ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop": [5, "a"]}}, "sampling_params.stop"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 1025}, "num_samples"),
        ({"topk_prompt_logprobs": 257}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"base_model": None}, "base_model"),
        ({"sampling_session_id": "x"}, "seq_id"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, change: dict[str, Any], field: str) -> None:
    found = refused(client, f"{API}/asample", body() | change)
    assert found is not None and (found == field or found.startswith(f"{field}."))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data": [-1] * 4}, "data"),
        ({"data": [5] * 3}, "data"),
        ({"data": [-2] * 4}, "data.0"),
        ({"shape": [4]}, "shape"),
        ({"shape": [4, 1]}, "shape"),
        ({"shape": [2, 2**31 - 1]}, "data"),
        ({"dtype": "float32"}, "dtype"),
        ({"sparse_crow_indices": [0, 2, 4]}, None),
        ({"sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [0, 1, 0, 1]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0, 5, 4], "sparse_col_indices": [0, 1, 0, 1]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0, 4], "sparse_col_indices": [0, 1, 0, 1]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 2, 0, 1]}, "sparse_col_indices"),
        ({"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0]}, "sparse_col_indices"),
    ],
)
def test_a_wrong_matrix_of_targets_is_named(client: httpx.Client, change: dict[str, Any], field: str | None) -> None:
    targets = {"data": [5, 6, 7, 8], "dtype": "int64", "shape": [2, 2]} | change
    found = refused(client, f"{API}/asample", body(target_prompt_logprobs=targets))
    assert found == ("target_prompt_logprobs" if field is None else f"target_prompt_logprobs.{field}")


def test_a_short_body_may_not_ask_for_a_large_message(client: httpx.Client) -> None:
    """One long row fills all others up. A worker cuts the connection if a message is far too large."""
    rows, longest = 8192, 8192
    sparse = {"sparse_crow_indices": [0, *[longest] * rows], "sparse_col_indices": list(range(longest))}
    targets = {"data": [5] * longest, "dtype": "int64", "shape": [rows, longest]} | sparse
    found = refused(client, f"{API}/asample", body([5] * (rows + 1), target_prompt_logprobs=targets))
    assert found == "target_prompt_logprobs.data"
    ragged = [[5] * longest, *[[]] * (rows - 1)]
    params = {"max_tokens": 1, "prompt_logprobs": 1, "prompt_logprob_token_ids": ragged, "prompt_logprob_start": 0}
    asked = {"token_ids": [5] * (rows + 1), "sampling_params": params}
    assert refused(client, "/inference/v1/generate", asked) == "sampling_params.prompt_logprob_token_ids"


def test_what_only_a_worker_knows_to_be_wrong_is_an_error_of_the_request(client: httpx.Client) -> None:
    for change, field in (
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 2.0}}, "sampling_params.top_p"),
        ({"prompt": {"chunks": [{"tokens": [999]}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": PROMPT * 300}]}}, "context"),
    ):
        found = fetch(client, ask(client, body() | change))
        assert found["category"] == "user" and field in found["error"], found


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_the_results_of_mutated_requests_are_no_faults(client: httpx.Client, count: int) -> None:
    traffic = Traffic([next(each for each in VALID if each[0] == f"{API}/asample")])
    results = 0
    for path, data in mutations(5, count, traffic):
        answer = client.post(path, content=data)
        check_answer(data, answer)
        if answer.status_code == 200:
            for accepted in (PROTOBUF, "*/*"):
                asked = {"request_id": answer.json()["request_id"]}
                found = client.post(f"{API}/retrieve_future", json=asked, headers={"Accept": accepted})
                assert found.status_code == 200, (data, found.text)
                if found.headers["content-type"] == PROTOBUF:
                    results += len(message(found.content)[1]) > 0
                else:
                    assert found.json().get("category", "user") == "user", (data, found.text)
    assert results


def test_training_is_refused(client: httpx.Client) -> None:
    calls = ("create_model", "forward_backward", "optim_step", "save_weights_for_sampler", "auth/token")
    refusals = [client.post(f"{API}/{each}", json={}) for each in calls]
    refusals += [client.get(f"{API}/training_runs?limit=1"), client.delete(f"{API}/training_runs/a/checkpoints/b")]
    refusals.append(client.put(f"{API}/training_runs/a/checkpoints/b/ttl", json={}))
    for answer in refusals:
        assert answer.status_code == 404 and "does not train" in answer.json()["error"]["message"]
    assert client.get(f"{API}/asample").status_code == 405


def test_tokens_are_needed_as_elsewhere(worker: WorkerProcess) -> None:
    key = "tml-0123456789abcdef"
    with gateway([worker.endpoint], keys=(key.encode(),)) as closed:
        refused(closed, f"{API}/create_session", {}, 401)
        refused(closed, f"{API}/create_session", {}, 401, headers={"X-API-Key": "tml-0123456789abcdee"})
        assert closed.post(f"{API}/create_session", json={}, headers={"X-API-Key": key}).status_code == 200


# --- memory and time --------------------------------------------------------------------------------------------------


class Sized:
    """A result of some bytes."""

    def __init__(self, size: int) -> None:
        self.size = size


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def run(sessions: TinkerSessions, session: str, name: str, size: int = 1) -> None:
    """A request that ends at once."""

    async def work() -> Sized:
        return Sized(size)

    await sessions.start(name, session, b"", work())
    await asyncio.sleep(0)


def kept(sessions: TinkerSessions, *names: str) -> list[bool]:
    return [sessions.known(name, b"") for name in names]


def test_results_that_were_read_make_room_first() -> None:
    async def check() -> None:
        sessions = TinkerSessions(Clock(), most_bytes=30)
        session = sessions.create()
        for name in "abc":
            await run(sessions, session, name, 10)
        assert await sessions.ended("b", 1.0) is not None
        await run(sessions, session, "d", 10)
        assert kept(sessions, *"abcd") == [True, False, True, True]
        await run(sessions, session, "e", 10)
        assert kept(sessions, *"acde") == [False, True, True, True]
        with pytest.raises(HttpError) as gone:
            await sessions.ended("b", 1.0)
        assert gone.value.status == 410

    asyncio.run(check())


def test_a_result_that_is_too_large_to_keep_is_an_error() -> None:
    """Status 410 would have its client sample again, and again."""

    async def check() -> None:
        sessions = TinkerSessions(Clock(), most_bytes=4096)
        session = sessions.create()
        await run(sessions, session, "a", 1000)

        async def large() -> Sized:
            await asyncio.sleep(0)
            return Sized(4097)

        await sessions.start("b", session, b"", large())
        found = await sessions.ended("b", 1.0)
        assert isinstance(found, HttpError) and found.status == 400 and "4097" in str(found)
        assert kept(sessions, "a") == [True]

    asyncio.run(check())


async def failed(error: Exception, held: list[weakref.ref[Sized]]) -> tuple[HttpError, bool]:
    """The outcome of a request that waits and fails, and whether what it held is free while the outcome is kept."""
    sessions = TinkerSessions(Clock())

    async def failing() -> Sized:
        prompt = Sized(1)
        held.append(weakref.ref(prompt))
        await asyncio.sleep(0)
        try:
            raise LookupError
        except LookupError as cause:
            raise error from cause

    await sessions.start("a", sessions.create(), b"", failing())
    outcome = await sessions.ended("a", 60)
    assert isinstance(outcome, HttpError) and kept(sessions, "a") == [True]
    gc.collect()
    return outcome, held[0]() is None


def test_the_error_of_a_request_does_not_keep_the_request() -> None:
    outcome, free = asyncio.run(failed(HttpError(400, "no room"), []))
    assert outcome.status == 400 and free


def test_a_fault_is_logged_whether_its_client_asks_or_not(caplog: pytest.LogCaptureFixture) -> None:
    fault = KeyError("x")
    assert asyncio.run(failed(fault, []))[0].status == 500
    assert [record for record in caplog.records if record.exc_info and record.exc_info[1] is fault]


def test_a_silent_client_loses_its_requests_and_results() -> None:
    async def check() -> None:
        clock, cancelled = Clock(), asyncio.Event()
        sessions = TinkerSessions(clock)
        silent, other = sessions.create(), sessions.create()
        sessions.add(TinkerSampler(f"{silent}:0", silent, "ones", None, None))

        async def forever() -> Sized:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        await sessions.start("a", silent, b"", forever())
        await run(sessions, silent, "b")
        await run(sessions, other, "c")
        clock.now_s = SILENT_S - 1
        assert await sessions.ended("a", 0.0) is None  # this is a sign of life, too
        sessions.seen(other)
        clock.now_s += SILENT_S - 1
        sessions.forget_old()
        assert kept(sessions, *"abc") == [True, True, True]
        sessions.seen(other)
        clock.now_s += 1
        sessions.forget_old()
        await asyncio.wait_for(cancelled.wait(), 60)
        assert kept(sessions, *"abc") == [False, False, True]
        with pytest.raises(HttpError):
            sessions.sampler(f"{silent}:0")
        await sessions.close()

    asyncio.run(check())


def test_a_result_that_no_client_fetches_is_dropped() -> None:
    async def check() -> None:
        clock = Clock()
        sessions = TinkerSessions(clock)
        session = sessions.create()
        await run(sessions, session, "a")
        while clock.now_s < RESULT_S:
            assert kept(sessions, "a") == [True]
            clock.now_s += SILENT_S / 2
            sessions.seen(session)
            sessions.forget_old()
        assert kept(sessions, "a") == [False]

    asyncio.run(check())
