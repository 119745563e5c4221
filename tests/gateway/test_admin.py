"""Orders of trainers over HTTP: pauses, sleep, adapters, weights from folders; and a gateway's own state."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.model_name import readable_name
from tests.support.gateway.harness import gateway, post, refused
from tests.support.peft_adapters import make_adapter, merged
from tests.support.worker.harness import ONES, TWOS, text_of, token_ids, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

COUNT = {"prompt": "17:", "max_tokens": 6}
LONG = {"prompt": "17:", "ignore_eos": True, "return_token_ids": True, "return_weight_versions": True}


def counted(client: httpx.Client, **more: Any) -> str:
    text: str = post(client, "/v1/completions", COUNT | more)["choices"][0]["text"]
    return text


def running(direct: RolloutClient) -> bool:
    rows: int = direct.status()["rows"]["running"]
    return rows > 0


@pytest.mark.parametrize("orders", [("/pause?mode=keep", "/resume"), ("/pause_generation", "/continue_generation")])
def test_a_pause_that_keeps_requests(client: httpx.Client, orders: tuple[str, str]) -> None:
    post(client, orders[0], {"mode": "in_place"} if "generation" in orders[0] else None)
    assert client.get("/is_paused").json() == {"is_paused": True} and client.get("/health").status_code == 200
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(counted, client)
        until(lambda: "in_flight 1" in client.get("/metrics").text, "the request")
        post(client, orders[1])
        assert waiting.result() == " 18 19"
    assert client.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("order", ["/pause?mode=abort", "/areal_pause_generation", "/pause_generation"])
def test_a_pause_that_aborts_gives_the_tokens_so_far(client: httpx.Client, direct: RolloutClient, order: str) -> None:
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(post, client, "/v1/completions", LONG)
        until(lambda: running(direct) or ended.done(), "a row")
        post(client, order)
        (choice,) = ended.result()["choices"]
    assert choice["finish_reason"] in ("abort", "length")  # it may have been quicker than the order
    assert text_of(choice["token_ids"]) == choice["text"]
    post(client, "/resume")
    assert counted(client) == " 18 19"


def test_a_pause_that_waits_lets_requests_end(client: httpx.Client, direct: RolloutClient) -> None:
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(post, client, "/v1/completions", LONG)
        until(lambda: running(direct) or ended.done(), "a row")
        post(client, "/pause?mode=wait")
        assert ended.result()["choices"][0]["finish_reason"] == "length"
        assert direct.status()["state"] == "paused"
        later = threads.submit(counted, client)
        until(lambda: direct.status()["queue"]["waiting"] == 1, "the next request")
        post(client, "/resume")
        assert later.result() == " 18 19"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/abort_requests", {"request_ids": ["mine"]}), ("/abort_requests", {}), ("/abort_request", {"rid": "cmpl-mine"})],
)
def test_requests_are_aborted_by_their_id(client: httpx.Client, direct: RolloutClient, path: str, body: Any) -> None:
    direct.pause()
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(post, client, "/v1/completions", LONG | {"request_id": "mine"})
        until(lambda: direct.status()["queue"]["waiting"] == 1, "the request")
        post(client, "/abort_request", {"rid": "other"})
        post(client, path, body)
        direct.resume()
        assert ended.result()["choices"][0]["finish_reason"] == "abort"


def test_weights_from_a_folder_while_a_request_runs(client: httpx.Client, direct: RolloutClient) -> None:
    before = client.get("/weight_info").json()["weight_version"]
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(post, client, "/v1/completions", LONG)
        until(lambda: running(direct) or ended.done(), "a row")
        answer = post(client, "/update_weights", {"weight_dir": str(TWOS), "reset_prefix_cache": True})
        (choice,) = ended.result()["choices"]
    assert answer["weight_version"] == before + 1 == direct.status()["weights_version"]
    assert choice["finish_reason"] == "length"  # not aborted
    runs = choice["weight_versions"]
    assert runs[-1]["end"] == len(choice["token_ids"]) and {run["version"] for run in runs} <= {before, before + 1}
    assert counted(client) == " 19 21"
    disk = {"model_path": str(ONES), "weight_version": str(before + 7)}
    assert post(client, "/update_weights_from_disk", disk)["success"]
    assert counted(client) == " 18 19"
    assert client.get("/get_weight_version").json() == {"weight_version": str(before + 7)}
    assert client.get("/health").json()["min_version"] == before + 7
    assert post(client, "/update_weights_from_disk", disk)["success"]  # the same weights again: nothing is to be done
    assert refused(client, "/update_weights_from_disk", disk | {"model_path": str(TWOS)}, 409) == "weight_version"
    refused(client, "/update_weights_from_disk", disk | {"weight_version": before + 6}, 409)  # it is not newer
    assert counted(client) == " 18 19"


def test_an_update_as_prime_rls_orchestrator_orders_it(client: httpx.Client, direct: RolloutClient) -> None:
    """It pauses with `keep`, names a folder and resumes, in this order, while rollouts run."""
    before = client.get("/weight_info").json()["weight_version"]
    assert client.get("/health").status_code == 200
    assert "ones" in [card["id"] for card in client.get("/v1/models").json()["data"]]
    params = {"max_tokens": 300, "logprobs": 1, "stop_token_ids": [1], "skip_special_tokens": False, "ignore_eos": True}
    body = {"model": "ones", "token_ids": token_ids("17:"), "sampling_params": params, "cache_salt": str(before)}
    headers = {"X-Session-ID": "rollout-1"}
    with ThreadPoolExecutor() as threads:
        asked = {**body, "return_weight_versions": True, "priority": 1}
        ended = threads.submit(post, client, "/inference/v1/generate", asked, headers=headers)
        until(lambda: running(direct) or ended.done(), "a row")
        post(client, "/pause", params={"mode": "keep", "clear_cache": "false"})
        post(client, "/update_weights", {"weight_dir": str(TWOS)})
        post(client, "/resume")
        (choice,) = ended.result()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["content"]) == 300
    assert {run["version"] for run in choice["weight_versions"]} <= {before, before + 1}
    assert counted(client) == " 19 21"
    post(client, "/update_weights", {"weight_dir": str(ONES)})
    assert post(client, "/finish_session?session_id=rollout-1")["finished"] is True


def test_folders_that_are_no_weights(client: httpx.Client, worker: WorkerProcess, tmp_path: Path) -> None:
    path, root = "/update_weights", ONES.parent
    assert refused(client, path, {"weight_dir": str(tmp_path)}, 403) == "weight_dir"
    assert refused(client, path, {"weight_dir": f"{root}/ones/../../.."}, 403) == "weight_dir"
    assert refused(client, path, {"model_path": str(root / "none")}) == "model_path"
    assert refused(client, path, {"weight_dir": None}) == "weight_dir"
    for other in ("/init_broadcaster", "/update_weights_from_tensor"):
        refused(client, other, {}, 404)
        assert "/update_weights_from_distributed" in client.post(other, json={}).json()["error"]["message"]
    for method in ("skyrl_sleep_for_weight_sync", "rm"):
        assert refused(client, "/collective_rpc", {"method": method}) == "method"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    (tmp_path / "part").mkdir()
    tensors = load_file(ONES / "model.safetensors")
    save_file(dict(list(tensors.items())[:2]), tmp_path / "part" / "model.safetensors")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "model.safetensors").symlink_to(ONES / "model.safetensors")
    with gateway([worker.endpoint], weights_root=str(tmp_path)) as other:
        assert refused(other, path, {"weight_dir": str(tmp_path / "broken")}) == "weight_dir"
        assert refused(other, path, {"weight_dir": str(tmp_path / "link")}) == "weight_dir"
        refused(other, path, {"weight_dir": str(tmp_path / "part")}, 409)
        assert counted(other) == " 18 19"
    with gateway([worker.endpoint]) as closed:
        assert refused(closed, path, {"weight_dir": str(TWOS)}, 403) == "weight_dir"


def test_sleep_and_wake(client: httpx.Client) -> None:
    post(client, "/sleep?level=1&mode=keep")
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/health").status_code == 200
    post(client, "/wake_up?tags=weights")
    post(client, "/wake_up?tags=kv_cache")
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    post(client, "/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
    post(client, "/resume_memory_occupation", {})
    assert counted(client) == " 18 19"
    assert refused(client, "/sleep?level=3", None) == "level"
    assert refused(client, "/sleep?tags=weights", None) == "tags"
    assert refused(client, "/wake_up?tags=all", None) == "tags.0"
    assert refused(client, "/pause?mode=stop", None) == "mode"
    assert refused(client, "/pause?moed=keep", None) == "moed"
    assert refused(client, "/update_weights_from_disk", {"update_info": {}}) == "update_info"


def test_adapters_are_models(client: httpx.Client, adapters: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(ONES)
    for seed in (1, 2):
        make_adapter(base, adapters / f"a{seed}", seed)
    body = {"prompt": "17:", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    told = {"lora_name": "mine", "lora_path": "a1"}
    assert refused(client, "/v1/completions", body | {"model": "mine"}, 404) == "model"
    post(client, "/v1/load_lora_adapter", told)
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["ones", "mine"]
    assert refused(client, "/v1/load_lora_adapter", told) == "lora_name"
    for path, seed in ((None, 1), ("/load_lora_adapter", 2), ("/skyrl/v1/load_lora_adapter", 1)):
        if path is not None:
            post(client, path, {"lora_name": "mine", "lora_path": f"a{seed}"})
        (choice,) = post(client, "/v1/completions", body | {"model": "mine"})["choices"]
        model = merged(base, adapters / f"a{seed}")
        ids = [*token_ids("17:"), *choice["token_ids"]]
        logits = model(model.dummy_inputs["input_ids"].new_tensor([ids])).logits[0, 2:-1]
        took = logits.gather(1, logits.new_tensor(choice["token_ids"]).long()[:, None])[:, 0]
        assert float((logits.max(-1).values - took).max()) < 1e-3
    assert post(client, "/v1/completions", body)["choices"][0]["text"] == " 18 19 20 21"
    post(client, "/v1/unload_lora_adapter", {"lora_name": "mine", "lora_path": "mine", "load_inplace": True})
    assert refused(client, "/v1/unload_lora_adapter", {"lora_name": "mine"}, 404) == "lora_name"
    assert refused(client, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../x"}) is not None


def test_a_gateway_tells_what_it_serves(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("ones", 512)
    assert client.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    info = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["logprobs_mode"] and info["lora_config"] == {}
    assert info["model_config"]["dtype"] == "float32"
    assert client.get("/health_generate").status_code == client.get("/ping").status_code == 200
    assert post(client, "/reset_prefix_cache", {"reset_running_requests": False}) == {"success": True}
    assert post(client, "/reset_prefix_cache") == {"success": True}
    assert refused(client, "/reset_prefix_cache", {"other": 1}) == "other"
    until(lambda: client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0, "the end of the rows")
    before = generated(client)
    counted(client)
    until(lambda: generated(client) >= before + 6, "the count of tokens")
    for name in ("cache_config_info", "kv_cache_usage_perc", "num_preemptions_total", "num_requests_waiting"):
        assert f"vllm:{name}{{" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/step_100/", "step_100"),
        ("./ckpt", "ckpt"),
        ("a/b/c", "c"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "Qwen/Qwen3-8B"),
        ("/cache/models--gpt2/snapshots/0123abc/", "gpt2"),
    ],
)
def test_a_model_has_a_readable_name(model: str, name: str) -> None:
    assert readable_name(model) == name


def test_a_model_is_found_by_its_name_and_its_path(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint]) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("ones", str(ONES))
        for model in ("ones", str(ONES), None):
            assert post(client, "/v1/completions", COUNT | {"model": model})["choices"][0]["text"] == " 18 19"
        assert post(client, "/v1/completions", COUNT)["model"] == "ones"
        assert refused(client, "/v1/completions", COUNT | {"model": "twos"}, 404) == "model"
        assert client.get("/get_model_info").json()["tokenizer_path"] == str(ONES)


def test_weights_are_found_by_a_path_below_the_root(client: httpx.Client) -> None:
    assert post(client, "/update_weights", {"weight_dir": "twos"})["success"] and counted(client) == " 19 21"
    assert post(client, "/update_weights_from_disk", {"model_path": "./ones"})["success"]
    assert counted(client) == " 18 19"
    answer = client.post("/update_weights", json={"weight_dir": "../ones"})
    assert answer.status_code == 403 and str(ONES.parent) in answer.json()["error"]["message"]


def generated(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:generation_tokens_total{")).split()[-1])


def test_health_waits_for_the_weights_of_the_fleet(client: httpx.Client, worker: WorkerProcess) -> None:
    newest = client.get("/weight_info").json()["weight_version"]
    with gateway([worker.endpoint], min_version=newest + 1, weights_root=str(ONES.parent)) as behind:
        assert behind.get("/health").status_code == behind.get("/health_generate").status_code == 503
        post(behind, "/areal_update_weights", {"model_path": str(ONES)})
        until(lambda: behind.get("/health").status_code == 200, "health")


def test_other_paths_and_methods_are_errors_in_the_same_form(client: httpx.Client) -> None:
    for method, path, status in (("GET", "/v2/models", 404), ("GET", "/pause", 405), ("DELETE", "/v1/models", 405)):
        answer = client.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["code"] == status
    assert client.get("/pause").headers["allow"] == "POST"
    for path, served in (("/v1/response", "/v1/responses"), ("/chat/completion", "/v1/chat/completions")):
        assert served in client.post(path).json()["error"]["message"]
