"""What people of other libraries write by habit: it works, or the error says what to write."""

import asyncio
import json
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from rollout.weights.parameter_map import ParameterMap
from tests.support.bridge.client_script import Connect, Serve, only_generate, silent
from tests.support.bridge.harness import TinyModel, Worker, new_tensors
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge import AsyncRolloutClient, ConnectionLost, RolloutClient, RolloutTimeout, WeightPublisher
from trainer_bridge.client.batch import plan_batch
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack


def sent(connect: Connect, serve: Serve, **fields: Any) -> dict[str, Any]:
    """The request that a worker gets."""
    worker = serve()
    connect(worker.endpoint).generate([1], max_tokens=1, **fields)
    return worker.requests[-1]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("x", {"strings": ["x"]}),
        (["x", "yy"], {"strings": ["x", "yy"]}),
        ([7, 9], {"token_ids": [7, 9]}),
        (np.array([7]), {"token_ids": [7]}),
        (7, {"token_ids": [7]}),
        (["x", 7], {"strings": ["x"], "token_ids": [7]}),
        ({"token_ids": np.array([7]), "min_tokens": 2}, {"token_ids": [7], "min_tokens": 2}),
    ],
)
def test_stop_may_be_a_string_a_token_or_a_list(connect: Connect, serve: Serve, stop: Any, message: Any) -> None:
    assert sent(connect, serve, stop=stop)["stop"] == message


def test_a_top_k_of_minus_one_is_off(connect: Connect, serve: Serve) -> None:
    assert sent(connect, serve, top_k=-1)["sampling"] == {"top_k": 0}
    assert sent(connect, serve, sampling={"top_k": -1})["sampling"] == {"top_k": 0}


def test_log_probs_that_come_anyway_may_be_asked_for(connect: Connect, serve: Serve) -> None:
    assert "logprobs" not in sent(connect, serve, logprobs=True)
    assert sent(connect, serve, logprobs=3)["logprobs"] == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": {"temprature": 0.5}}, "did you mean 'temperature'"),
        ({"sampling": "greedy"}, "sampling must be a map"),
        ({"logit_bias": "x"}, "logit_bias must be a map"),
        ({"stop": 3.5}, "stop must be a string"),
        ({"continue_from": 3}, "continue_from must be a Completion"),
        ({"request_id": 5}, "request_id must be a string"),
        ({"timeout_s": "10"}, "timeout_s must be a number"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"prompt": ["a", "b"]}, "generate_many"),
        ({"prompt": [[1, 2], [3]]}, "generate_many"),
        ({"prompt": None, "messages": "hello"}, "list of maps"),
        ({"prompt": None, "messages": {"role": "user", "content": "hello"}}, "list of maps"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(
    connect: Connect, serve: Serve, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        connect(serve().endpoint).generate(**{"prompt": [1], **fields})


@pytest.mark.parametrize("requests", ["one prompt", [1, 2, 3], np.array([1, 2]), {"prompt": [1]}])
def test_one_prompt_is_not_many(connect: Connect, serve: Serve, requests: Any) -> None:
    with pytest.raises(ValueError, match="use generate"):
        connect(serve().endpoint).generate_many(requests)


def test_a_model_is_not_its_tensors() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint) as publisher:
        with pytest.raises(ValueError, match=r"model\.state_dict\(\)"):
            publisher.publish(torch.nn.Linear(2, 2), version=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("_orig_mod.", "strip '_orig_mod.'"),
        ("module.", "strip 'module.'"),
        ("base_model.model.", "strip 'base_model.model.'"),
        ("module._orig_mod.", "strip '_orig_mod.' .* and 'module.'"),
        ("base_model.model.lora_A.", "PEFT"),
    ],
)
def test_names_with_a_wrappers_prefix_are_refused_with_the_prefix(prefix: str, words: str) -> None:
    model = TinyModel()
    tensors = [(prefix + name, "float32", list(tensor.shape)) for name, tensor in new_tensors(model, 1).items()]
    with pytest.raises(WeightsRejected, match=words):
        ParameterMap(model.views).check(pack(1, tensors, 64))


def test_iterating_over_a_coroutine_says_what_to_await(serve: Serve) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(serve().endpoint) as client:
            with pytest.raises(TypeError, match="async for chunk in await client.generate"):
                async for _ in client.generate([1], stream="tokens"):  # type: ignore[attr-defined]
                    pass
            task = asyncio.create_task(client.generate([1], max_tokens=1))
            both = await asyncio.gather(task, client.generate([1], max_tokens=1))
            assert [len(found.completions) for found in both] == [1, 1]
            async for chunk in await client.generate([1], max_tokens=1, stream="tokens"):
                assert chunk.index == 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())


def test_arrays_of_a_result_go_to_torch_without_a_warning(connect: Connect, serve: Serve) -> None:
    found = connect(serve().endpoint).generate([1], max_tokens=3).completions[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (found.token_ids, found.logprobs, found.raw_logprobs):
            torch.from_numpy(array).add_(1)


def test_a_result_can_be_written_as_json(connect: Connect, serve: Serve) -> None:
    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        scores = np.array([np.nan, -0.5], np.float32)
        part = completion([4, 5]) | {"logprobs": np.array([-1.0, np.nan], np.float32)}
        worker.reply(peer, header, result([part]) | {"metadata": {"tags": [1, b"\x01"]}, "prompt_logprobs": scores})

    found = connect(serve(only_generate(answer)).endpoint).generate([1, 2], max_tokens=2)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["completions"][0]["token_ids"] == [4, 5] and told["completions"][0]["logprobs"] == [-1.0, None]
    assert told["prompt_logprobs"] == [None, -0.5] and told["metadata"] == {"tags": [1, "01"]}
    assert told["timing"]["total_s"] == found.timing.total_s


def test_a_time_out_names_its_seconds_and_its_endpoint(connect: Connect, serve: Serve) -> None:
    worker = serve(only_generate(silent))
    client = connect(worker.endpoint)
    client.ping()
    with pytest.raises(RolloutTimeout, match=f"{worker.endpoint} within 0.05 s"):
        client.generate([1], timeout_s=0.05)


def test_a_dead_port_is_told_in_seconds(connect: Connect) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConnectionLost, match="tcp://127.0.0.1:9 .*refused connections"):
        connect("tcp://127.0.0.1:9").ping()
    assert time.monotonic() - began_s < 20  # without a limit of its own: 30 s


def test_a_dead_port_is_told_in_seconds_when_weights_are_published() -> None:
    began_s = time.monotonic()
    with WeightPublisher("tcp://127.0.0.1:9") as publisher:
        with pytest.raises(ConnectionLost, match="begin: tcp://127.0.0.1:9 .*refused connections.*begin_s"):
            publisher.publish({"a": torch.zeros(1)}, 1).applied(60)
    assert time.monotonic() - began_s < 20


def test_a_worker_that_is_starting_is_waited_for_where_the_caller_says_so(serve: Serve) -> None:
    first = serve()
    first.stop()
    with RolloutClient(first.endpoint, connect_timeout_s=60.0) as client:
        outcomes = client.generate_as_completed([[1]], max_tokens=1)
        time.sleep(3.5)  # longer than a dead port is waited for
        serve(endpoint=first.endpoint)
        assert next(outcomes).unwrap().completions


@pytest.mark.parametrize(
    ("wrong", "kind"), [({"prompt": [1], "max_tokns": 1}, TypeError), ({"prompt": [1], "stop": 3.5}, ValueError)]
)
def test_the_error_of_one_request_of_many_begins_with_its_place(wrong: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^request 1: "):
        plan_batch([[1, 2], wrong], {})
