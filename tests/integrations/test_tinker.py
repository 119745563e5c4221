"""The package `tinker` and the rollouts of `tinker-cookbook` sample from a worker: the tokens are the worker's."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_gateway.dialects.tinker import tinker_sessions
from tests.support.gateway.harness import gateway, post
from tests.support.peft_adapters import make_adapter
from tests.support.ports import free_port
from tests.support.worker.harness import ONES, launch, token_ids, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

tinker = pytest.importorskip("tinker", reason="make test-integrations installs tinker")
types = tinker.types

KEY = "tml-0123456789abcdef"
PROMPT = token_ids("17:")
DRAWN = {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "seed": 7}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[WorkerProcess]:
    adapted = {"adapter_slots": 1, "adapter_rank": 4, "adapter_root": str(folder)}
    with launch(log=folder / "log", max_rows=8, max_queue=128, max_context_tokens=512, **adapted) as worker:
        yield worker


@pytest.fixture(scope="module")
def http(worker: WorkerProcess) -> Iterator[httpx.Client]:
    with gateway([worker.endpoint], keys=(KEY.encode(),), served_model_name=("ones",)) as client:
        client.headers["X-API-Key"] = KEY
        yield client


@pytest.fixture(scope="module")
def service(http: httpx.Client) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=str(http.base_url), api_key=KEY) as service:
        yield service


@pytest.fixture(scope="module")
def sampler(service: Any) -> Any:
    return service.create_sampling_client(base_model="ones").result()


@pytest.fixture
def direct(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.endpoint) as client:
        yield client


def text(*tokens: list[int]) -> Any:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=part) for part in tokens])


def near(found: Any, expected: np.ndarray) -> None:
    """Log-probs are equal, up to the rounding of other batches."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def params(**fields: Any) -> Any:
    return types.SamplingParams(**fields)


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_the_workers_own(sampler: Any, direct: RolloutClient) -> None:
    truth = direct.generate(PROMPT, n=3, max_tokens=12, **DRAWN, logprobs=2, prompt_top_logprobs=3)
    found = sampler.sample(
        text(PROMPT[:1], PROMPT[1:]),
        num_samples=3,
        sampling_params=params(max_tokens=12, **DRAWN),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    assert len(found.sequences) == 3 and len({each.sequence_id for each in found.sequences}) == 3
    for sequence, completion in zip(found.sequences, truth.completions, strict=True):
        assert sequence.stop_reason == "length"
        assert np.array_equal(sequence.tokens_np, completion.token_ids)
        near(sequence.logprobs_np, completion.logprobs)
        assert np.array_equal(sequence.topk_logprobs_np.token_ids, completion.top_ids)
        near(sequence.topk_logprobs_np.logprobs, completion.top_logprobs)
    assert found.prompt_logprobs[0] is None and found.topk_prompt_logprobs[0] is None
    assert truth.prompt_logprobs is not None and truth.prompt_tops is not None
    near(found.prompt_logprobs_np, truth.prompt_logprobs)
    assert np.array_equal(found.topk_prompt_logprobs_np.token_ids[1:], truth.prompt_tops.ids[1:])
    near(found.topk_prompt_logprobs_np.logprobs[1:], truth.prompt_tops.logprobs[1:])


def test_many_samples_at_once(sampler: Any, direct: RolloutClient) -> None:
    prompts = [token_ids(f"{number}:") for number in range(100, 130)]

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(
                sampler.sample(text(prompt), num_samples=2, sampling_params=params(max_tokens=16, seed=number))
                for number, prompt in enumerate(prompts)
            )
        )

    for number, (prompt, found) in enumerate(zip(prompts, asyncio.run(ask()), strict=True)):
        truth = direct.generate(prompt, n=2, max_tokens=16, temperature=1.0, seed=number).completions
        assert [each.tokens for each in found.sequences] == [each.token_ids.tolist() for each in truth]
        for sequence, completion in zip(found.sequences, truth, strict=True):
            near(sequence.logprobs, completion.logprobs)


def test_log_probs_of_a_prompt_are_those_of_transformers(sampler: Any) -> None:
    prompt = token_ids("17: 18 19 20")
    model = AutoModelForCausalLM.from_pretrained(ONES, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1].numpy()
    own = expected[np.arange(len(prompt) - 1), prompt[1:]]
    found = sampler.compute_logprobs(text(prompt)).result()
    assert found[0] is None
    near(found[1:], own)
    last = sampler.compute_logprobs(text(prompt), prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (len(prompt) - 3)
    near(last[-3:], own[-3:])
    ids = torch.full((len(prompt) - 1, 3), -1)
    ids[3, 0], ids[3, 2], ids[7, 1] = 5, 9, 12
    for targets in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        scored = sampler.sample(text(prompt), 1, params(max_tokens=1), target_prompt_logprobs=targets).result()
        scores = scored.target_prompt_logprobs.to_torch().numpy()
        wanted = np.where(ids < 0, 0, np.take_along_axis(expected, ids.clamp(0).numpy(), 1))
        near(scores, wanted)


def test_how_samples_end(sampler: Any) -> None:
    def ended(**fields: Any) -> tuple[str, list[int]]:
        (found,) = sampler.sample(text(PROMPT), 1, params(**GREEDY | fields)).result().sequences
        return found.stop_reason, found.tokens

    assert ended() == ended(stop=[]) == ("length", token_ids(" 18 19 20 21"))
    assert ended(stop=" 20") == ended(stop=["x", " 20"]) == ("stop", token_ids(" 18 19 20"))
    assert ended(stop=token_ids("9")) == ("stop", token_ids(" 18 19"))


def test_an_aborted_sample_is_drawn_again(sampler: Any, direct: RolloutClient, http: httpx.Client) -> None:
    direct.pause()
    try:
        future = sampler.sample(text(PROMPT), 1, params(**GREEDY))
        until(lambda: direct.status()["queue"]["waiting"], "the row")
        post(http, "/abort_requests", {})
    finally:
        direct.resume()
    assert future.result(timeout=60).sequences[0].tokens == token_ids(" 18 19 20 21")


def test_a_result_that_takes_longer_than_a_poll(sampler: Any, http: httpx.Client) -> None:
    post(http, "/pause?mode=keep")
    try:
        future = sampler.sample(text(PROMPT), 1, params(**GREEDY))
        body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}, "base_model": "ones"}
        name = post(http, "/api/v1/asample", body)["request_id"]
        answer = http.post("/api/v1/retrieve_future", json={"request_id": name})
        assert answer.status_code == 408
        told = {"type": "try_again", "request_id": name, "queue_state": "paused_capacity"}
        assert answer.json() == told | {"queue_state_reason": "generation is paused"}
        time.sleep(2)
    finally:
        post(http, "/resume")
    assert future.result(timeout=60).sequences[0].tokens == token_ids(" 18 19 20 21")


def test_a_client_that_does_not_wait_cancels_its_request(sampler: Any, direct: RolloutClient) -> None:
    direct.pause()
    try:
        future = sampler.sample(text(PROMPT), 4, params(max_tokens=400, stop=[]))
        until(lambda: direct.status()["queue"]["waiting"] == 4, "the rows")
        future.future().cancel()
        until(lambda: direct.status()["queue"]["waiting"] == 0, "their end")
    finally:
        direct.resume()


def test_the_end_of_a_service_client_ends_its_requests(http: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    try:
        with tinker.ServiceClient(base_url=str(http.base_url), api_key=KEY) as service:
            sampler = service.create_sampling_client(base_model="ones").result()
            sampler.sample(text(PROMPT), 4, params(max_tokens=400, stop=[]))
            until(lambda: direct.status()["queue"]["waiting"] == 4, "the rows")
        until(lambda: direct.status()["queue"]["waiting"] == 0, "their end")
    finally:
        direct.resume()


def test_clients_wait_for_room(worker: WorkerProcess, direct: RolloutClient) -> None:
    with (
        gateway([worker.endpoint], keys=(KEY.encode(),), served_model_name=("ones",), max_in_flight=2) as http,
        tinker.ServiceClient(base_url=str(http.base_url), api_key=KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model="ones").result()
        futures = [sampler.sample(text(PROMPT), 2, params(**GREEDY)) for _ in range(6)]
        for future in futures:
            assert [each.tokens for each in future.result().sequences] == [token_ids(" 18 19 20 21")] * 2


@pytest.mark.nightly
def test_a_client_that_dies_loses_its_requests(
    http: httpx.Client, direct: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_sessions, "SILENT_S", 15.0)  # clients send a heartbeat every 10 s
    source = (
        "import tinker, time\n"
        f"service = tinker.ServiceClient(base_url={str(http.base_url)!r}, api_key={KEY!r})\n"
        "sampler = service.create_sampling_client(base_model='ones').result()\n"
        f"prompt = tinker.ModelInput.from_ints({PROMPT})\n"
        "sampler.sample(prompt, 4, tinker.SamplingParams(max_tokens=400, stop=[]))\n"
        "time.sleep(600)\n"
    )
    direct.pause()
    try:
        with subprocess.Popen([sys.executable, "-c", source]) as client:
            until(lambda: direct.status()["queue"]["waiting"] == 4, "the rows")
            time.sleep(20)
            assert direct.status()["queue"]["waiting"] == 4
            client.kill()
        until(lambda: direct.status()["queue"]["waiting"] == 0, "their end")
    finally:
        direct.resume()


@pytest.mark.nightly
def test_samples_outlive_a_worker_that_comes_back(folder: Path) -> None:
    place = {"bind": f"tcp://127.0.0.1:{free_port()}", "max_rows": 8, "max_context_tokens": 512}
    worker = launch(log=folder / "first", **place)
    try:
        with (
            gateway([worker.endpoint], keys=(KEY.encode(),), served_model_name=("ones",), heartbeat_s=0.5) as http,
            tinker.ServiceClient(base_url=str(http.base_url), api_key=KEY) as service,
            RolloutClient(worker.endpoint) as direct,
        ):
            sampler = service.create_sampling_client(base_model="ones").result()
            direct.pause()
            futures = [sampler.sample(text(PROMPT), 2, params(**GREEDY)) for _ in range(3)]
            until(lambda: direct.status()["queue"]["waiting"] == 6, "the rows")
            worker.kill()
            until(lambda: http.get("/health").status_code == 503, "the loss")
            worker = launch(log=folder / "second", **place)
            for future in futures:
                found = future.result(timeout=120).sequences
                assert [each.tokens for each in found] == [token_ids(" 18 19 20 21")] * 2
    finally:
        worker.kill()


# --- clients ----------------------------------------------------------------------------------------------------------


def test_copies_of_a_client_sample_from_the_same_model(sampler: Any) -> None:
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    copies.append(tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY))
    found = [each.sample(text(PROMPT), 1, params(**GREEDY)).result() for each in (sampler, *copies)]
    assert {tuple(each.sequences[0].tokens) for each in found} == {tuple(token_ids(" 18 19 20 21"))}
    assert len({each.sequences[0].sequence_id for each in found}) == 4


def test_models_by_name_and_path(service: Any, http: httpx.Client, folder: Path, direct: RolloutClient) -> None:
    make_adapter(AutoModelForCausalLM.from_pretrained(ONES), folder / "step-1", 3)
    path = "tinker://run/sampler_weights/step-1"
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(base_model="other").result()
    post(http, "/v1/load_lora_adapter", {"lora_name": "step-1", "lora_path": "step-1"})
    adapted = service.create_sampling_client(model_path=path).result()
    assert adapted.get_base_model() == "ones"
    truth = direct.generate(PROMPT, max_tokens=12, **DRAWN, adapter="step-1").completions[0]
    (found,) = adapted.sample(text(PROMPT), 1, params(max_tokens=12, **DRAWN)).result().sequences
    assert found.tokens == truth.token_ids.tolist()
    near(found.logprobs, truth.logprobs)
    assert found.tokens != direct.generate(PROMPT, max_tokens=12, **DRAWN).completions[0].token_ids.tolist()


def test_the_service(http: httpx.Client, service: Any) -> None:
    rest = tinker.RestClient(base_url=str(http.base_url), api_key=KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == ("ones", 512)
    assert (model.trainable, model.sampleable) == (False, True)
    with pytest.raises(tinker.NotFoundError, match="does not train"):
        service.create_lora_training_client(base_model="ones").result()
    with pytest.raises(tinker.NotFoundError, match="does not train"):
        rest.list_training_runs().result()


def test_errors_are_raised_and_name_the_field(sampler: Any, http: httpx.Client) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"prompt\.chunks"):
        sampler.sample(types.ModelInput.empty(), 1, params(**GREEDY)).result()
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k"):
        sampler.sample(text(PROMPT), 1, params(**GREEDY), prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.RequestFailedError, match=r"sampling_params\.temperature") as failed:
        sampler.sample(text(PROMPT), 1, params(temperature=-1.0)).result()
    assert failed.value.category == tinker.types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="context"):
        sampler.compute_logprobs(text(PROMPT * 300)).result()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=str(http.base_url), api_key=f"{KEY}x").create_sampling_client(base_model="ones")


# --- the cookbook -----------------------------------------------------------------------------------------------------


class Counting:
    """The environment of two turns. The reward of each is 1 if the policy counts on."""

    def __init__(self) -> None:
        self._turn = 0

    async def initial_observation(self) -> tuple[Any, list[int]]:
        return text(PROMPT), token_ids("9")

    async def step(self, action: Sequence[int], *, extra: Any = None) -> Any:
        from tinker_cookbook.rl.types import StepResult

        self._turn += 1
        right = list(action) == token_ids(" 18 19" if self._turn == 1 else " 20")
        return StepResult(float(right), self._turn == 2, text(PROMPT, list(action)), token_ids("0"))


def test_rollouts_of_the_cookbook(sampler: Any, direct: RolloutClient) -> None:
    rollouts = pytest.importorskip("tinker_cookbook.rl.rollouts", reason="make test-integrations installs it")
    from tinker_cookbook.rl.types import EnvGroupBuilder

    class Group(EnvGroupBuilder):
        async def make_envs(self) -> Sequence[Any]:
            return [Counting() for _ in range(4)]

    found = asyncio.run(
        rollouts.do_group_rollout_and_filter_constant_reward(
            sampler, Group(), max_tokens=12, temperature=1.0, do_remove_constant_reward_groups=False
        )
    )
    assert found.get_total_rewards() == [2.0] * 4
    for trajectory in found.trajectories_G:
        for turn in trajectory.transitions:
            prompt = turn.ob.to_ints()
            scored = direct.generate([*prompt, *turn.ac.tokens], max_tokens=0, prompt_logprobs=True).prompt_logprobs
            assert scored is not None and turn.ac.stop_reason == "stop"
            near(turn.ac.logprobs, scored[len(prompt) :])


def test_scores_of_the_cookbook(sampler: Any, direct: RolloutClient) -> None:
    evaluator = pytest.importorskip("tinker_cookbook.supervised.nll_evaluator", reason="make test-integrations does it")
    tokens = token_ids("17: 18 19 20")
    targets = {
        "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
        "weights": types.TensorData.from_torch(torch.ones(len(tokens) - 1)),
    }
    datum = types.Datum(model_input=text(tokens[:-1]), loss_fn_inputs=targets)
    found = asyncio.run(evaluator.SamplerNLLEvaluator([datum])(sampler))
    scores = direct.generate(tokens, max_tokens=0, prompt_logprobs=True).prompt_logprobs
    assert scores is not None
    np.testing.assert_allclose(found["test/nll"], -scores[1:].mean(), rtol=1e-5)
