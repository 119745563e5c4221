"""AReaL's own engine of remote vLLM servers, with its own process group over gloo, against gateways of real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

policy = asyncio.get_event_loop_policy()
for package in ("areal", "areal.engine.vllm_remote"):
    pytest.importorskip(package, reason="make test-integrations installs AReaL and what its engine needs")
asyncio.set_event_loop_policy(policy)  # AReaL installs uvloop's; other tests keep theirs

from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta  # noqa: E402
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig  # noqa: E402
from areal.engine.core.distributed import init_custom_process_group  # noqa: E402
from areal.engine.vllm_remote import RemotevLLMEngine  # noqa: E402
from areal.infra.platforms import current_platform  # noqa: E402
from areal.utils import name_resolve, names  # noqa: E402

from tests.support.gateway.harness import gateway  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402
from tests.support.ports import free_port  # noqa: E402
from tests.support.worker.harness import CHECKPOINTS, EOS, TWOS, launch, tensors, text_of, token_ids  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402

GROUP = "update_weight_group"
TEXT = {1: " 18 19", 2: " 19 21"}


class Served:
    """AReaL's engine of two gateways, each with a worker; and a client of the workers."""

    def __init__(self, stack: ExitStack, folder: Path, patch: pytest.MonkeyPatch) -> None:
        flags = {"max_rows": 8, "max_context_tokens": 4096, "sleep": True, "wait": False}
        workers = [stack.enter_context(launch(log=folder / f"{number}.log", **flags)) for number in range(2)]
        for worker in workers:
            worker.wait_ready(PATIENCE_S)
        endpoints = [worker.endpoint for worker in workers]
        self.direct = stack.enter_context(RolloutClient(endpoints, timeout_s=PATIENCE_S))
        gateways = [stack.enter_context(gateway([each], weights_root=str(CHECKPOINTS))) for each in endpoints]
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(folder / "names")))
        patch.setenv("AREAL_LLM_SERVER_ADDRS", ",".join(str(each.base_url.netloc, "ascii") for each in gateways))
        config = InferenceEngineConfig(backend="vllm:d2", experiment_name="counting", trial_name="one")
        config.setup_timeout, config.request_timeout = PATIENCE_S, PATIENCE_S
        self.engine = RemotevLLMEngine(config)
        self.engine.initialize(engine_id="0", train_data_parallel_size=1)
        stack.callback(self.engine.destroy)

    def versions(self) -> list[int]:
        return [status["weights_version"] for status in self.direct.statuses().values()]

    def generate(self, prompts: list[str], **fields: Any) -> list[Any]:
        params = GenerationHyperparameters(stop_token_ids=[EOS], **fields)
        requests = [ModelRequest(input_ids=token_ids(prompt), gconfig=params) for prompt in prompts]

        async def work() -> list[Any]:
            return await asyncio.gather(*(self.engine.agenerate(request) for request in requests))

        return asyncio.run(work())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        yield Served(stack, tmp_path_factory.mktemp("areal"), patch)


def test_generate_and_interrupted_requests_that_go_on(served: Served) -> None:
    """AReaL's pause ends requests; its engine sends them again with the tokens they had."""
    answers = served.generate(["17:", "98:"], max_new_tokens=6)
    assert [text_of(answer.output_tokens) for answer in answers] == [" 18 19", " 99 10"]
    assert all(len(answer.output_logprobs) == 6 and answer.stop_reason == "length" for answer in answers)
    warm = served.generate(["17:"], max_new_tokens=20, temperature=2.5, top_p=0.9)[0]
    assert np.isfinite(warm.output_logprobs).all() and len(warm.output_tokens) == len(warm.output_logprobs)

    async def interrupted() -> Any:
        params = GenerationHyperparameters(max_new_tokens=400, ignore_eos=True, greedy=True)
        running = asyncio.create_task(served.engine.agenerate(ModelRequest(input_ids=token_ids("17:"), gconfig=params)))
        for _ in range(3):
            while not any(status["rows"]["running"] for status in served.direct.statuses().values()):
                assert not running.done(), "it ended before it could be interrupted"
                await asyncio.sleep(0.005)
            served.engine.pause()
            await asyncio.to_thread(served.engine.pause_generation)
            await asyncio.to_thread(served.engine.continue_generation)
            served.engine.resume()
        return await running

    answer = asyncio.run(interrupted())
    counted = "".join(f" {number}" for number in range(18, 200))
    assert text_of(answer.output_tokens) == counted[:400] and answer.stop_reason == "length"
    assert len(answer.output_logprobs) == 400


def test_token_ids_are_scored_as_the_workers_score_them(served: Served) -> None:
    """AReaL scores trajectories with `echo` and likelier prompt tokens; it takes the first of each entry."""
    tokens = token_ids("17: 18 19")
    mask = torch.zeros(1, len(tokens), dtype=torch.int64)
    mask[:, 3:] = 1
    scored = served.engine._engine.compute_logp([{"input_ids": torch.tensor([tokens]), "loss_mask": mask}])
    truth = served.direct.generate(tokens, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert truth is not None
    np.testing.assert_allclose(scored[0][0, 3:], truth[3:], atol=1e-6)
    assert not scored[0][0, :3].any()


def test_updates_over_its_own_process_group(served: Served) -> None:
    """As its FSDP engine: the group `update_weight_group`, chunks of tensors, a pause around them."""
    assert current_platform.communication_backend == "gloo"
    meta = WeightUpdateMeta(
        type="xccl",
        gen_allocation=ModelAllocation.from_str("vllm:d2", name="rollout"),
        nccl_master_address="127.0.0.1",
        nccl_master_port=free_port(),
        nccl_group_name=GROUP,
    )
    joined = served.engine.init_weights_update_group(meta)
    where = f"tcp://127.0.0.1:{meta.nccl_master_port}"
    group = init_custom_process_group("gloo", where, world_size=3, rank=0, group_name=GROUP)
    joined.result(PATIENCE_S)
    first = served.versions()[0]
    for number, step in enumerate((2, 1, 2, 1), 1):
        served.engine.pause_generation()
        weights = list(tensors(step).items())
        for chunk in (weights[:3], weights[3:]):
            specs = [ParamSpec(name, tuple(each.shape), str(each.dtype).split("torch.")[1]) for name, each in chunk]
            told = served.engine.update_weights_from_distributed(meta, specs)
            for work in [dist.broadcast(each, src=0, group=group, async_op=True) for _, each in chunk]:
                work.wait()
            told.result(PATIENCE_S)
        served.engine.continue_generation()
        served.engine.set_version(number)
        assert served.versions() == [first + number] * 2
        (answer,) = served.generate(["17:"], max_new_tokens=6)
        assert text_of(answer.output_tokens) == TEXT[step] and answer.output_versions == [number] * 6
    dist.destroy_process_group(group)


def test_updates_from_a_folder_and_memory_given_back(served: Served) -> None:
    first = served.versions()[0]
    for number, folder in enumerate((TWOS, CHECKPOINTS / "ones"), 1):
        version = served.engine.get_version()
        name_resolve.add(names.update_weights_from_disk("counting", "one", version), "0.0", replace=True)
        meta = WeightUpdateMeta(type="disk", path=str(folder), clear_checkpoint_after_load=False)
        served.engine.update_weights_from_disk(meta).result(PATIENCE_S)
        assert served.versions() == [first + number] * 2
        (answer,) = served.generate(["17:"], max_new_tokens=6)
        assert text_of(answer.output_tokens) == TEXT[2 if folder == TWOS else 1]
    served.engine.offload()
    assert {status["state"] for status in served.direct.statuses().values()} == {"asleep"}
    served.engine.onload(tags=["weights", "kv_cache"])
    assert text_of(served.generate(["17:"], max_new_tokens=6)[0].output_tokens) == TEXT[1]
