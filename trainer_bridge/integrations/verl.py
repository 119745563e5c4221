"""verl 0.9 on workers of this project: `actor_rollout_ref.rollout.name=rollout`.

    verl                                            here
    RolloutReplicaRegistry.get("rollout")           Replica: its VerlServer is a Ray actor that owns a worker process
    server_handle.generate(prompt_ids, ...)         VerlServer.generate
    rollout.update_weights(tensors)                 ServerAdapter: a trainer's rank publishes to the worker on its GPU
    checkpoint_engine.backend=rollout               BridgeEngine: rank 0 of the trainer publishes to all workers
    checkpoint_manager_class=...CheckpointManager   the same, without what verl does around it: abort, release KV

verl loads this file by the entry-point group `verl.plugins`. verl hides errors of updates, so they are logged here. A
replica is one worker on one GPU. Invariants:

- Token ids go both ways and are never made from text here. Pixels are made by the trainer's processor (`verl_media`).
- Weights are swapped between two steps of a worker that generates on: nothing is aborted, and no KV is released.
- `global_steps` of a completion come from the weights versions that drew its tokens, not from when it ended.
- Only `abort_all_requests(reject_request=True)` ends requests. Without it they wait until `resume_generation`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import WorkerProcess, start_worker
from trainer_bridge.client.media import MediaPrompt
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.address import bracketed, host_of, is_loopback
from trainer_bridge.wire.errors import NotFound, RolloutError
from trainer_bridge.wire.finish_reasons import COMPLETE
from trainer_bridge.wire.sampling_rules import RULES

NAME = "rollout"
_PUBLISHED = "published"  # the wire format of updates that workers have already
_SERIES = "0.9."

_NEVER = -100.0  # the logit bias of tokens that must not be drawn

_log = logging.getLogger(__name__)

try:
    if not metadata.version("verl").startswith(_SERIES):
        raise ImportError(f"verl {metadata.version('verl')} is installed, and this integration is for {_SERIES}x")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from verl.checkpoint_engine.base import (
        CheckpointEngine,
        CheckpointEngineManager,
        CheckpointEngineRegistry,
        CheckpointEngineWorker,
    )
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.utils.device import get_resource_name
    from verl.utils.ray_utils import auto_await
    from verl.workers.config import DistillationTeacherModelConfig
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
    from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
    from verl.workers.rollout.utils import ensure_async_iterator

    from trainer_bridge.integrations.verl_media import MediaProcessor, ProcessorSource
except Exception as error:
    _log.error("verl's rollout.name=%s is missing: %s: %s", NAME, type(error).__name__, error)
    raise

_SAMPLING = (*(rule.name for rule in RULES), "seed", "max_tokens", "constraint")


# --- the worker and its actor -----------------------------------------------------------------------------------------


class VerlServer:
    """A Ray actor with a worker process: what verl calls a rollout server.

    `config` is verl's RolloutConfig; `device` the GPU that the worker sees, or None. `processor` is
    for workers with `images`. Methods that verl calls on all servers and that a worker does not need do nothing; each
    says why.
    """

    def __init__(
        self,
        config: Any,
        model: str,
        mode: RolloutMode,
        replica_rank: int,
        device: str | None,
        processor: ProcessorSource,
    ) -> None:
        self._config, self._model, self._mode, self._device = config, model, mode, device
        self._processor = processor
        self._media: MediaProcessor | None = None
        self._flags = serve_flags(config, mode)
        self._seed = config.seed + replica_rank
        self._worker: WorkerProcess | None = None
        self._client: AsyncRolloutClient | None = None
        self._numbers = itertools.count()
        self._under_way: set[str] = set()
        self._rejecting = self._asleep = self._paused = False
        self._order = asyncio.Lock()  # orders sleep, wake, pause and resume
        self._global_steps: int | None = None
        self._steps: dict[int, int | None] = {}  # the trainer's global steps, by weights version

    async def launch(self) -> str:
        """Start the worker. Returns its endpoint. Raises `WorkerFailed`; ValueError if a processor is missing."""
        if self._flags.get("images"):
            self._media = await asyncio.to_thread(MediaProcessor, self._processor)
        host = bracketed(ray.util.get_node_ip_address())
        flags: dict[str, Any] = {
            name: value.format(host=host) if isinstance(value, str) else value for name, value in self._flags.items()
        }
        env = {} if self._device is None else {"CUDA_VISIBLE_DEVICES": self._device}
        worker: WorkerProcess = await asyncio.to_thread(start_worker, self._model, env=env, **flags)
        self._worker, self._client = worker, AsyncRolloutClient(worker.endpoint)
        return worker.endpoint

    async def place(self) -> tuple[str, str]:
        """The worker's endpoint, and the id of its Ray node."""
        assert self._worker is not None
        return self._worker.endpoint, ray.get_runtime_context().get_node_id()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        """One completion. `sampling_params` may also have `constraint`, as the client's `generate` takes it.

        With `prompt_logprobs` = k, of verl's teachers, the result has `prompt_ids` and `prompt_logprobs` (`_scores`).
        Raises ValueError for what cannot be served, `RolloutError` if the completion fails.
        """
        token_ids = [int(token) for token in prompt_ids]
        fields = self._fields(token_ids, sampling_params, request_id)
        prompt = await self._prompt(token_ids, image_data, video_data, audio_data, mm_processor_kwargs)
        wants_logprobs = bool(sampling_params.get("logprobs"))
        if self._rejecting:
            return self._output(None, wants_logprobs)
        name = f"{request_id[:100]}/{next(self._numbers)}"
        self._under_way.add(name)
        try:
            result = await self._connected().generate(prompt, request_id=name, **fields)
        finally:
            self._under_way.discard(name)
        item = result.completions[0]
        if item.finish_reason not in (*COMPLETE, "cancelled"):
            raise RolloutError(f"a completion ended as {item.finish_reason!r}: {item.error}")
        output = self._output(item, wants_logprobs)
        output.num_preempted = result.preemptions
        output.extra_fields["num_cached_tokens"] = result.cached_tokens
        if (top := sampling_params.get("prompt_logprobs")) is not None and item.finish_reason != "cancelled":
            output.extra_fields |= _scores(result, token_ids, top)
        return output

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Generate nothing until `resume_generation`: requests wait, and lose nothing.

        With `reject_request` running and new requests end as `aborted` with the tokens that they have, because the
        replica leaves the load balancer; their client goes on elsewhere.
        """
        if not reject_request:
            async with self._order:
                await self._connected().pause("keep")
                self._paused = True
            return {"aborted_count": 0, "request_ids": []}
        self._rejecting = True
        ended = []
        for name in sorted(self._under_way):
            try:
                await self._connected().cancel(name)
                ended.append(name)
            except NotFound:
                pass  # it has just ended
        return {"aborted_count": len(ended), "request_ids": ended}

    async def resume_generation(self) -> None:
        """End the pause or the rejection of requests."""
        async with self._order:
            self._rejecting = False
            if self._paused:
                await self._connected().resume()
                self._paused = False

    async def sleep(self) -> None:
        """Give the GPU's memory to the trainer, if both use it (`free_cache_engine`). Requests wait for the wake.

        In hybrid mode the weights are dropped, because verl sends them before the next generation.
        """
        if not self._config.free_cache_engine or self._mode == RolloutMode.STANDALONE:
            return
        async with self._order:
            if not self._asleep:
                hybrid = self._mode == RolloutMode.HYBRID
                await self._connected().sleep(2 if hybrid else 1, mode="keep", requests="wait")
                self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End the sleep. The worker takes memory for weights and KV at once, whatever the `tags`."""
        async with self._order:
            if self._asleep:
                await self._connected().wake()
                self._asleep = False

    async def clear_kv_cache(self) -> None:
        """Nothing: cached KV belongs to a weights version, and no other version finds it."""

    async def release_kv_cache(self) -> None:
        """Nothing: a worker takes an update while it generates."""

    async def resume_kv_cache(self) -> None:
        """Nothing, as for `release_kv_cache`."""

    async def announce(self, version: int, global_steps: int | None) -> None:
        """The next update, before it is published: tokens of weights `version` are of these steps."""
        self._steps[version] = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """The trainer's steps, for weights that were never announced."""
        self._global_steps = global_steps

    async def start_profile(self, **options: Any) -> None:
        """Nothing unless the rollout's profiler is on, which raises NotImplementedError."""
        profiler = self._config.profiler
        if profiler is not None and profiler.enable:
            raise NotImplementedError("verl's profiler cannot reach a rollout worker; use `rollout trace` instead")

    async def stop_profile(self) -> None:
        """Nothing, as for `start_profile`."""

    def _connected(self) -> AsyncRolloutClient:
        if self._client is None:
            raise RuntimeError("the server has no worker yet; call launch first")
        return self._client

    async def _prompt(
        self, token_ids: list[int], images: Any, videos: Any, audio: Any, options: Any
    ) -> list[int] | MediaPrompt:
        """The prompt as the client takes it, with the pixels of its images."""
        if audio is not None:
            raise ValueError("the prompt has audio_data, and a rollout worker serves text and images")
        if self._media is not None:
            return await self._media.prompt(token_ids, images, videos, options)
        for name, given in {"image_data": images, "video_data": videos}.items():
            if given is not None:
                raise ValueError(
                    f"the prompt has {name}, and the worker serves text alone; set "
                    "actor_rollout_ref.rollout.engine_kwargs.rollout.images=true for a model of text and images"
                )
        return token_ids

    def _fields(self, prompt: list[int], params: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The fields of `generate` for verl's sampling parameters."""
        given = dict(params)
        given.pop("logprobs", None)
        given.pop("detokenize", None)  # verl's teachers ask for these; the output has no text
        if (top := given.pop("prompt_logprobs", None)) is not None:
            given |= {"prompt_top_logprobs": top} if top else {"prompt_logprobs": True}
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        stop: dict[str, Any] = {"ignore_eos": bool(given.pop("ignore_eos", self._config.ignore_eos))}
        for name, field in {"stop_token_ids": "token_ids", "stop": "strings", "min_tokens": "min_tokens"}.items():
            if (value := given.pop(name, None)) is not None:
                stop[field] = [value] if isinstance(value, str) else value
        if unknown := sorted(given.keys() - {*_SAMPLING, "prompt_logprobs", "prompt_top_logprobs"}):
            raise ValueError(
                f"a rollout worker has no sampling parameter {unknown[0]!r}; it has {', '.join(_SAMPLING)}"
            )
        if given.get("max_tokens") is None:
            room = self._config.prompt_length + self._config.response_length - len(prompt)
            given["max_tokens"] = min(self._config.response_length, room)
        if given["max_tokens"] < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room; raise rollout.response_length")
        if self._config.full_determinism:
            given.setdefault("seed", _seed_of(self._seed, request_id, prompt))
        if self._config.enable_rollout_routing_replay:
            given["return_routing"] = "all"
        if self._media is not None:
            given["logit_bias"] = dict.fromkeys(self._media.placeholders, _NEVER)
        return {**given, "stop": stop}

    def _output(self, item: Completion | None, logprobs: bool) -> TokenOutput:
        """The result for verl: of a completion, or of a rejected request."""
        versions = [] if item is None else [version for version, count in item.versions if count]
        steps = [self._steps.get(version, self._global_steps) for version in versions] or [self._global_steps]
        known = [step for step in steps if step is not None]
        extra = {
            "global_steps": steps[-1],
            "min_global_steps": min(known, default=None),
            "max_global_steps": max(known, default=None),
        }
        if item is None:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=extra)
        processed = self._config.logprobs_mode == "processed_logprobs"
        drawn = item.logprobs if item.drawn_logprobs is None else item.drawn_logprobs
        return TokenOutput(
            token_ids=item.token_ids.tolist(),
            log_probs=(drawn if processed else item.raw_logprobs).tolist() if logprobs else None,
            routed_experts=item.routing,
            stop_reason="aborted" if item.finish_reason == "cancelled" else "completed",
            extra_fields=extra,
        )


def _scores(result: GenerateResult, prompt: Sequence[int], top: int) -> dict[str, list[list[float]]]:
    """A teacher's log-probs of the `top` likeliest tokens at each position, or of the prompt's own tokens with 0.

    `prompt_ids` and `prompt_logprobs` are [prompt tokens, max(1, top)]. Row i is about token i + 1; the last row is
    padding, as in verl's own servers.
    """
    if top:
        assert result.prompt_tops is not None
        ids, logprobs = result.prompt_tops.ids, result.prompt_tops.logprobs
    else:
        assert result.prompt_logprobs is not None
        ids, logprobs = np.array(prompt, np.int32)[:, None], result.prompt_logprobs[:, None]
    rows = {"prompt_ids": ids, "prompt_logprobs": logprobs}
    return {name: np.concatenate((array[1:], np.zeros_like(array[:1]))).tolist() for name, array in rows.items()}


def serve_flags(config: Any, mode: RolloutMode) -> dict[str, Any]:
    """The flags of `rollout serve` for verl's RolloutConfig; `engine_kwargs.rollout` replaces and adds to them.

    In their texts `{host}` stands for the address of the Ray node. Raises ValueError for what a worker cannot do.
    """
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    wrong = [name for name in sizes if getattr(config, name) != 1]
    if wrong:
        raise ValueError(
            f"rollout.{wrong[0]} is {getattr(config, wrong[0])}; a replica is one worker on one GPU: set 1"
        )
    if config.quantization is not None:
        raise ValueError("rollout.quantization is not supported; see weight_dtype and kv_dtype of `rollout serve`")
    if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
        raise ValueError(
            "rollout.mtp.enable_rollout is not supported; set engine_kwargs.rollout.speculation to heads instead"
        )
    if config.prometheus.enable:
        raise ValueError("rollout.prometheus.enable is not supported; set engine_kwargs.rollout.metrics_port instead")
    if config.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
        raise ValueError(f"rollout.logprobs_mode is {config.logprobs_mode!r}; use processed_logprobs or raw_logprobs")
    dummy = config.load_format.startswith("dummy")
    flags = {
        "max_rows": config.max_num_seqs,
        "max_context_tokens": config.max_model_len or config.prompt_length + config.response_length,
        "prefill_chunk_tokens": config.max_num_batched_tokens,
        "kv_memory_fraction": config.gpu_memory_utilization,
        "dtype": config.dtype,
        "load_format": "random" if dummy else "auto",
        "min_version": 1 if dummy else 0,  # no token of random weights
        "cuda_graph_rows": 0 if config.enforce_eager else None,
        "prefix_cache": config.enable_prefix_caching,
        "routing": config.enable_rollout_routing_replay,
        "sleep": config.free_cache_engine and mode != RolloutMode.STANDALONE,
        "wandb": False,
    }
    return {**flags, **config.engine_kwargs.get(NAME, {})}


def _seed_of(seed: int, request_id: str, prompt: Sequence[int]) -> int:
    digest = hashlib.blake2b(f"{seed}/{request_id}/".encode() + np.asarray(prompt, "<i8").tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


class Replica(RolloutReplica):
    """A rollout replica of verl: one server with one worker, on the GPU and the node of the replica's trainer rank."""

    @property
    def server_name(self) -> str:
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        return f"{server_name(self.replica_rank, kind)}{self.name_suffix}"

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The rollout worker of verl that knows the replica's server."""
        return RayClassWithInitArgs(
            cls=ray.remote(ReplicaReceiver),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
            server=self.server_name,
        )

    async def launch_servers(self) -> None:
        """Start the server and its worker. Raises ValueError if this takes more than one GPU."""
        serve_flags(self.config, self.rollout_mode)
        (rank,) = self.workers
        node, device = await rank.__ray_call__.remote(_node_and_device)
        model = self.model_config.get("local_path") or self.model_config.path
        server = (
            ray.remote(VerlServer)
            .options(
                name=self.server_name,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(
                self.config, model, self.rollout_mode, self.replica_rank, device, ProcessorSource.of(self.model_config)
            )
        )
        self._server_address = await server.launch.remote()
        self._server_handle, self.servers = server, [server]


def server_name(replica_rank: int, kind: str = "") -> str:
    """The name of a replica's server actor."""
    return f"{NAME}_server_{kind}{replica_rank}_0"


def _node_and_device(worker: Any) -> tuple[str, str | None]:
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), devices[0] if devices else None


# --- weights ----------------------------------------------------------------------------------------------------------


class _Updates:
    """Publishes to the workers of some servers; `options` are `WeightPublisher`'s."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._publisher: WeightPublisher | None = None
        self._version = 0

    async def publish(self, servers: Sequence[str], weights: Any, global_steps: int | None) -> dict[str, float]:
        """Bring the tensors to the workers of the servers (names of actors), and return when all use them.

        Tensors are collected before they are sent, those on a GPU in host memory. Raises the first worker's error.
        """
        tensors = [(name, tensor.detach().cpu()) async for name, tensor in ensure_async_iterator(weights)]
        handles = [ray.get_actor(name) for name in servers]
        places = [await handle.place.remote() for handle in handles]
        publisher = await asyncio.to_thread(self._connect, places)
        self._version += 1
        for handle in handles:
            await handle.announce.remote(self._version, global_steps)
        reports = await asyncio.to_thread(publisher.publish(tensors, version=self._version).applied)
        for handle in handles:
            if global_steps is not None:
                await handle.set_global_steps.remote(global_steps)
        return {
            "rollout/update_s": max(report.seconds for report in reports),
            "rollout/update_pause_s": max(report.pause_s for report in reports),
        }

    def _connect(self, places: Sequence[tuple[str, str]]) -> WeightPublisher:
        endpoints = [endpoint for endpoint, _ in places]
        for endpoint, node in places:
            if is_loopback(host_of(endpoint)) and node != ray.get_runtime_context().get_node_id():
                raise ValueError(
                    f"the worker at {endpoint} is on another node and serves its own alone; below "
                    "rollout.engine_kwargs.rollout set bind and weights_bind to tcp://{host}:0, and insecure to true"
                )
        if self._publisher is None or self._publisher.endpoints != endpoints:
            if self._publisher is not None:
                self._publisher.close()
            self._publisher = WeightPublisher(endpoints, **self._options)
            self._version = max(self._version, *(status["version"] for status in self._publisher.status()))
        return self._publisher


class ServerAdapter(BaseRollout):
    """The rollout in a trainer's rank: brings the rank's weights to the worker on its GPU."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, server: str = ""
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server = server or server_name(self.replica_rank)
        self._updates = _Updates(self.config.checkpoint_engine.engine_kwargs.get(NAME, {}))

    async def resume(self, tags: list[str]) -> None:
        """Wake the worker. Only with `free_cache_engine`."""
        if self.config.free_cache_engine:
            await ray.get_actor(self._server).wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Have the worker sleep. Only with `free_cache_engine`."""
        if self.config.free_cache_engine:
            await ray.get_actor(self._server).sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = True,
    ) -> None:
        """Publish all tensors of the model; returns when the worker uses them. Raises `RolloutError`.

        Raises NotImplementedError for LoRA adapters and for other wire formats.
        """
        if wire_format == _PUBLISHED:
            return  # `BridgeEngine` has published them from the trainer
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"the wire format {wire_format!r} is not supported; use backend naive, nccl or {NAME}"
            )
        if peft_config is not None:
            raise NotImplementedError(
                "verl's LoRA adapters are not supported; set actor_rollout_ref.model.lora.merge=True"
            )
        await self._updates.publish([self._server], weights, global_steps)


@CheckpointEngineRegistry.register(NAME)
class BridgeEngine(CheckpointEngine):
    """The checkpoint engine that publishes from rank 0 of the trainer to all workers; nothing else carries weights.

    `checkpoint_engine.engine_kwargs.rollout` holds options of `WeightPublisher`.
    """

    wire_format = _PUBLISHED

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        self._is_master = is_master
        self._updates = _Updates(options)
        self._servers: list[str] = []
        self.server = ""  # the replica's server; empty elsewhere

    def prepare(self) -> str:
        """The name of the replica's server; empty in a trainer."""
        return self.server

    @classmethod
    def build_topology(cls, trainers: int, rollouts: int, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `init_process_group` for each trainer rank and each rollout worker."""
        servers = names[trainers:]
        return {"servers": [servers] * trainers}, {"servers": [servers] * rollouts}

    def init_process_group(self, servers: list[str]) -> None:
        """The servers that updates go to from now on."""
        self._servers = servers

    def finalize(self) -> None:
        """Nothing: connections stay for the next update."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish; returns when all workers use the weights. Other ranks than 0 take part in the gathering alone."""
        if self._is_master:
            return await self._updates.publish(self._servers, weights, global_steps)
        async for _ in ensure_async_iterator(weights):
            pass
        return {}

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        """Nothing: the worker has them from the trainer."""
        return iter(())


class ReplicaReceiver(CheckpointEngineWorker):
    """The rollout worker of a standalone replica, whose engine knows the replica's server."""

    def __init__(self, *args: Any, server: str, **options: Any) -> None:
        super().__init__(*args, server=server, **options)
        if isinstance(self.checkpoint_engine, BridgeEngine):
            self.checkpoint_engine.server = server


class CheckpointManager(CheckpointEngineManager):
    """The checkpoint manager for `backend=rollout`, whose updates interrupt nothing.

    For other backends it does what verl's does.

    Set `rollout.checkpoint_manager_class=trainer_bridge.integrations.verl.CheckpointManager`. verl's own manager pauses
    the workers during an update.
    """

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Bring the trainer's weights to all replicas; what they generate goes on. Returns metrics of the update."""
        if self.backend != NAME:
            return await super().update_weights(global_steps)
        ranks = self.actor_wg.world_size
        servers = [replica.server_name for replica in self.replicas]
        ray.get(self.actor_wg.execute_checkpoint_engine(["init_process_group"] * ranks, servers=[servers] * ranks))
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        return {name: value for result in results for name, value in (result or {}).items()}


_check_engine_of_teacher = DistillationTeacherModelConfig._validate_topk_logprobs


def _check_teacher(config: DistillationTeacherModelConfig, use_topk: bool, topk: int | None) -> None:
    """Check a teacher as verl does, which knows two engines alone for losses of the likeliest tokens."""
    try:
        _check_engine_of_teacher(config, use_topk, topk)
    except NotImplementedError:
        if config.inference.name != NAME:
            raise


DistillationTeacherModelConfig._validate_topk_logprobs = _check_teacher
RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.ServerAdapter"
