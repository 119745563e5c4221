"""SkyRL's own client and weight sender, made from its own settings, against gateways of real workers.

SkyRL spreads data over `external_proxy_url`, here one gateway of both workers, and orders over `external_server_urls`,
here a gateway for each worker.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

for package in ("skyrl", "skyrl_gym", "omegaconf", "ray", "vllm_router"):
    pytest.importorskip(package, reason="make test-integrations installs SkyRL and what its client needs")
aiohttp = pytest.importorskip("aiohttp")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tests.support.gateway.harness import gateway, meet_by_gloo  # noqa: E402
from tests.support.integrations import skyrl_parts as skyrl  # noqa: E402
from tests.support.integrations.routers import router  # noqa: E402
from tests.support.models.families import make_checkpoint  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402
from tests.support.peft_adapters import make_adapter  # noqa: E402
from tests.support.worker.harness import ONES, launch, tensors, text_of, token_ids, until  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402

Use = Callable[[Any], Awaitable[Any]]


def settings(proxy: str | None, servers: list[str] | None, **more: Any) -> Any:
    """SkyRL's settings for external servers."""
    config = skyrl.SkyRLTrainConfig()
    config.trainer.placement.colocate_all = False
    config.trainer.logger = "console"
    config.trainer.policy.model.path = str(ONES)
    engine = config.generator.inference_engine
    engine.run_engines_locally = False
    engine.external_proxy_url, engine.external_server_urls = proxy, servers
    engine.served_model_name = "ones"
    for name, value in more.items():
        setattr(engine, name, value)
    return config


class Served:
    """Two workers, SkyRL's client of their gateways, and a client of the workers themselves."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        flags = {"max_rows": 8, "max_context_tokens": 4096, "sleep": True, "wait": False, "adapter_slots": 1}
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        adapted = {"adapter_rank": 4, "adapter_root": str(self.adapters)}
        workers = [stack.enter_context(launch(log=folder / f"{n}.log", **flags, **adapted)) for n in range(2)]
        for worker in workers:
            worker.wait_ready(PATIENCE_S)
        self.endpoints = [worker.endpoint for worker in workers]
        self.direct = stack.enter_context(RolloutClient(self.endpoints, timeout_s=PATIENCE_S))

        def url(*endpoints: str) -> str:
            http = stack.enter_context(gateway(endpoints, served_model_name=("ones",)))
            return str(http.base_url).rstrip("/")

        self.proxy, self.servers = url(*self.endpoints), [url(endpoint) for endpoint in self.endpoints]
        self.config = settings(self.proxy, self.servers)

    def use(self, work: Use, tokenizer: Any = None) -> Any:
        """What `work` returns for a client that went to another process, as SkyRL's clients do."""

        async def run() -> Any:
            built, _ = skyrl.build_new_inference_client(self.config, tokenizer)
            async with pickle.loads(pickle.dumps(built)) as client:
                return await work(client)

        return asyncio.run(run())

    def versions(self) -> list[int]:
        return [status["weights_version"] for status in self.direct.statuses().values()]

    def sampling(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        """SkyRL's defaults, as it sends them to vLLM."""
        params = self.config.generator.sampling_params
        params.max_generate_length, params.additional_kwargs = max_tokens, more
        fields: dict[str, Any] = skyrl.get_sampling_params_for_backend("vllm", params)
        return fields


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack, tmp_path_factory.mktemp("skyrl"))


def batch(prompts: list[str], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [token_ids(prompt) for prompt in prompts], "sampling_params": params, **more}


def test_generate_returns_what_the_workers_drew(served: Served) -> None:
    """Prompts of a batch, with log-probs, seeds, stop strings, sessions and the salt that SkyRL always sends."""
    prompts = ["17:", "98:", "5:"]
    params = served.sampling(12, seed=3, ignore_eos=True) | {"temperature": 2.5}
    more = {"session_ids": ["a", "b", 7], "cache_salt": "weights-0"}
    answer = served.use(lambda client: client.generate(batch(prompts, params, **more)))
    wanted = [
        served.direct.generate(
            token_ids(prompt), max_tokens=12, temperature=2.5, seed=3, stop={"ignore_eos": True, "min_tokens": 1}
        ).completions[0]
        for prompt in prompts
    ]
    assert answer["response_ids"] == [completion.token_ids.tolist() for completion in wanted]
    for ours, completion in zip(answer["response_logprobs"], wanted, strict=True):
        np.testing.assert_allclose(ours, completion.logprobs, atol=1e-4)
    assert answer["stop_reasons"] == ["length"] * 3 and len(answer["responses"]) == 3
    stopped = served.use(lambda client: client.generate(batch(["17:"], served.sampling(30) | {"stop": ["20"]})))
    assert (stopped["responses"], stopped["stop_reasons"]) == ([" 18 19 20"], ["stop"])


def test_sample_in_tinkers_form(served: Served) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": token_ids("17")}, {"tokens": token_ids(":")}]}
    asked = {"prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 6, "temperature": 1.0, "seed": 1}}

    async def work(client: Any) -> Any:
        answer = await client.sample({"json": {**asked, "session_id": "s", "include_prompt_logprobs": True}})
        wider = {**asked, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
        return answer, await client.sample({"json": wider})

    answer, wider = served.use(work)
    assert [text_of(sequence["tokens"]) for sequence in answer["sequences"]] == [" 18 19"] * 2
    assert all(len(sequence["logprobs"]) == 6 for sequence in answer["sequences"])
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == 2 and all(value <= 0 for value in others)
    tops = served.direct.generate(token_ids("17:"), max_tokens=1, prompt_top_logprobs=2).prompt_tops
    assert tops is not None and wider["prompt_logprobs"] == answer["prompt_logprobs"]
    first, *others = wider["topk_prompt_logprobs"]
    assert first is None and [[token for token, _ in row] for row in others] == tops.ids[1:].tolist()


def test_texts_chats_and_sessions(served: Served) -> None:
    messages = [{"role": "user", "content": "17:"}]

    async def work(client: Any) -> Any:
        ids = await client.tokenize(["17: 18", "5"], add_special_tokens=False)
        assert ids == [token_ids("17: 18"), token_ids("5")] and await client.detokenize(ids) == ["17: 18", "5"]
        rendered = await client.render_chat_completion({"json": {"messages": messages}})
        chat = await client.chat_completion({"json": {"messages": messages, "max_tokens": 6, "session_id": "chat"}})
        text = await client.completion({"json": {"prompt": "17:", "max_tokens": 6, "session_id": "text"}})
        open_sessions = held()
        for session in ("chat", "text", "unknown"):
            await client.finish_session(session)
        return rendered, chat, text, open_sessions

    def held() -> int:
        return sum(status["sessions"]["holding"] for status in served.direct.statuses().values())

    before = held()
    rendered, chat, text, open_sessions = served.use(work)
    assert text_of(rendered["token_ids"]).endswith("17:")
    assert chat["choices"][0]["message"]["content"] and chat["usage"]["completion_tokens"] == 6
    assert text["choices"][0]["text"] == " 18 19" and text["model"] == "ones"
    assert open_sessions == before + 2
    until(lambda: held() == before, "the sessions' end")
    with_own = AutoTokenizer.from_pretrained(ONES)
    assert served.use(lambda client: client.tokenize(["17"]), with_own) == [with_own("17")["input_ids"]]


def test_pauses_sleep_and_what_servers_tell(served: Served) -> None:
    long = batch([f"{start}:" for start in range(10, 14)], served.sampling(300, ignore_eos=True))
    short = batch(["17:"], served.sampling(6))

    async def running() -> None:
        while not any(status["rows"]["running"] for status in served.direct.statuses().values()):
            await asyncio.sleep(0.01)

    async def work(client: Any) -> None:
        assert await client.get_world_size() == (2, 1)
        for mode in ("abort", "keep", "wait"):
            under_way = asyncio.create_task(client.generate(long))
            await running()
            answers = await client.pause(mode)
            assert {url: answer["status"] for url, answer in answers.items()} == dict.fromkeys(served.servers, 200)
            late = asyncio.create_task(client.generate(short))
            done, _ = await asyncio.wait({late}, timeout=0.3)
            assert not done, "a paused worker has answered"
            await client.resume()
            result = await under_way
            if mode == "abort":
                assert set(result["stop_reasons"]) <= {"abort", "length"} and "abort" in result["stop_reasons"]
            else:
                assert result["stop_reasons"] == ["length"] * 4
                assert [len(ids) for ids in result["response_ids"]] == [300] * 4
            assert (await late)["responses"] == [" 18 19"]
        await client.pause_generation(), await client.resume_generation()
        assert await client.reset_prefix_cache(reset_running_requests=True)
        await client.sleep(level=1)
        assert {status["state"] for status in served.direct.statuses().values()} == {"asleep"}
        await client.wake_up(tags=["weights"])
        await client.wake_up(tags=["kv_cache"])
        assert (await client.generate(short))["responses"] == [" 18 19"]

    served.use(work)


def test_adapters_are_models(served: Served) -> None:
    base = AutoModelForCausalLM.from_pretrained(ONES)
    for name, seed in (("first", 1), ("second", 2)):
        make_adapter(base, served.adapters / name, seed)
    request = batch(["17:"], served.sampling(12, ignore_eos=True) | {"temperature": 0.0})

    async def work(client: Any) -> None:
        said = [(await client.generate(request))["response_ids"]]
        for folder in ("first", "second"):  # the second replaces the first
            await client.load_lora_adapter("skyrl-lora", str(served.adapters / folder))
            said.append((await client.generate(request, model="skyrl-lora"))["response_ids"])
        assert len({str(ids) for ids in said}) == 3
        await client.unload_lora_adapter("skyrl-lora")
        with pytest.raises(aiohttp.ClientResponseError, match="skyrl-lora") as refused:
            await client.generate(request, model="skyrl-lora")
        assert refused.value.status in (400, 404)  # the gateway that got the request did not unload it itself

    served.use(work)


@pytest.fixture
def trainer() -> Iterator[None]:
    """This process as the only rank of SkyRL's trainer, with torch.distributed's default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_weight_sync_of_its_trainer(served: Served, trainer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL's strategy and sender as its policy worker calls them, with gloo for NCCL at both ends."""
    meet_by_gloo(monkeypatch)
    skyrl.use_gloo_engine(monkeypatch)
    engine = served.config.generator.inference_engine
    strategy = skyrl.get_transfer_strategy_cls(engine.weight_sync_backend, colocate_all=False)
    assert strategy is skyrl.BroadcastTransferStrategy
    first = served.versions()[0]
    long = batch(["17:"], served.sampling(1500, ignore_eos=True))

    async def sync(client: Any, sender: Any, step: int) -> None:
        """As `WorkerDispatch.save_weights_for_sampler` and `broadcast_to_inference_engines`."""
        weights = tensors(step)
        metadata = {
            "names": list(weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }
        chunks = [
            skyrl.WeightChunk(names=[name], dtypes=[str(tensor.dtype)], shapes=[list(tensor.shape)], tensors=[tensor])
            for name, tensor in weights.items()
        ]
        await client.pause_generation()
        reset = asyncio.create_task(client.reset_prefix_cache(reset_running_requests=True))
        await sender.send_chunks(chunks, weight_metadata=metadata)
        await reset
        await client.resume_generation()

    async def work(client: Any) -> None:
        total, _ = await client.get_world_size()
        info = strategy.create_init_info(engine, inference_world_size=total)
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )
        under_way = asyncio.create_task(client.generate(long))
        for number, step in enumerate((2, 1, 2, 1), 1):
            await sync(client, sender, step)
            assert served.versions() == [first + number] * 2
            answer = await client.generate(batch(["17:"], served.sampling(6)))
            assert answer["responses"] == [{1: " 18 19", 2: " 19 21"}[step]]
        result = await under_way
        assert result["stop_reasons"] == ["length"] and len(result["response_ids"][0]) == 1500
        with pytest.raises(aiohttp.ClientResponseError, match="started"):
            await client.finish_weight_update()

    served.use(work)


def test_a_router_in_front_of_the_gateways(served: Served, tmp_path: Path) -> None:
    """As SkyRL's own one: `vllm-router` with consistent hashing, so that a session stays at one worker."""
    with router("vllm_router", "consistent_hash", served.servers, tmp_path) as url:

        def hits() -> int:
            return sum(status["sessions"]["hits"] for status in served.direct.statuses().values())

        config = settings(url, served.servers)
        prompts, sessions = [f"{start}:" for start in range(20, 28)], [f"row-{number}" for number in range(8)]

        async def work() -> None:
            async with skyrl.build_new_inference_client(config, None)[0] as client:
                asked = batch(prompts, served.sampling(6), session_ids=sessions)
                answers = [await client.generate(asked) for _ in range(3)]
            assert [answer["responses"] for answer in answers] == [
                [f" {start + 1} {start + 2}" for start in range(20, 28)]
            ] * 3

        before = hits()
        asyncio.run(work())
        assert hits() - before == 16, "a session's later turns came to another worker"


def test_experts_of_a_mixture(tmp_path: Path) -> None:
    """`enable_return_routed_experts`: nested lists, as the worker's own client has them."""
    make_checkpoint("qwen3_moe", tmp_path / "moe", seed=1)
    with (
        launch(tmp_path / "moe", log=tmp_path / "log", max_rows=4, max_context_tokens=256, routing=True) as worker,
        gateway([worker.endpoint], served_model_name=("ones",)) as http,
        RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as direct,
    ):
        url = str(http.base_url).rstrip("/")
        config = settings(url, [url], enable_return_routed_experts=True)
        request = {"prompt_token_ids": [[5, 6, 7]], "sampling_params": {"max_tokens": 8, "seed": 2, "ignore_eos": True}}

        class Tokenizer:
            def batch_decode(self, ids: list[list[int]]) -> list[str]:
                return [str(each) for each in ids]

        async def work() -> Any:
            async with skyrl.build_new_inference_client(config, Tokenizer())[0] as client:
                return await client.generate(request)

        answer = asyncio.run(work())
        (wanted,) = direct.generate(
            [5, 6, 7], max_tokens=8, seed=2, stop={"ignore_eos": True}, return_routing="all"
        ).completions
        assert answer["response_ids"] == [wanted.token_ids.tolist()]
        assert answer["rollout_expert_indices"] == [wanted.routing.tolist()] and len(wanted.routing) == 10
