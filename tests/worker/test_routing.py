"""`return_routing` of a real worker: transformers' experts, by the client and by ZeroMQ and msgpack alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models.families import make_checkpoint
from tests.support.worker.harness import launch
from tests.support.worker.raw_client import RawClient, pack_blob
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.errors import BadRequest

LAYERS, TOP_K = 3, 2
PROMPT = [5, 40, 7, 66, 23, 9, 31, 2, 50, 18, 44, 12, 60, 27, 35, 8, 19, 3]
FLAGS: dict[str, Any] = {"dtype": "float32", "max_rows": 4, "page_size": 4, "routing": True, "prefill_chunk_tokens": 7}
ASKED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "stop": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and transformers' model of it."""
    folder = tmp_path_factory.mktemp("mixture")
    return folder, make_checkpoint("mixtral", folder)


@pytest.fixture(scope="module")
def routed(mixture: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with launch(mixture[0], log=tmp_path_factory.mktemp("routed") / "log", **FLAGS) as worker:
        yield worker


@pytest.fixture
def caller(routed: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(routed.endpoint, timeout_s=60.0) as client:
        yield client


def assert_routed(hf_model: Any, tokens: list[int], routing: Any, first: int) -> None:
    """Entry i is what transformers' router chooses for token `first` + i of prompt and completion."""
    with torch.inference_mode():
        layers = hf_model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    logits = torch.stack([layer.view(-1, layer.shape[-1]) for layer in layers], dim=1)[first:]
    top, told = logits.topk(TOP_K, dim=-1), torch.tensor(np.asarray(routing).astype(np.int64))
    assert told.shape == top.indices.shape
    assert torch.allclose(logits.gather(-1, told), top.values, atol=1e-4, rtol=0)
    assert (told == top.indices).float().mean() > 0.99


def whole(completion: Completion) -> list[int]:
    return PROMPT + completion.token_ids.tolist()


def test_a_client_gets_the_experts_of_a_group(caller: RolloutClient, mixture: tuple[Path, Any]) -> None:
    result = caller.generate(PROMPT, n=3, max_tokens=40, return_routing="all", **ASKED)
    assert len({tuple(completion.token_ids.tolist()) for completion in result.completions}) == 3
    for completion in result.completions:
        assert completion.routing is not None and completion.routing.dtype == np.uint8
        assert completion.routing.shape == (len(PROMPT) + 39, LAYERS, TOP_K)
        assert_routed(mixture[1], whole(completion), completion.routing, 0)


def test_the_client_joins_the_pieces_of_a_long_completion(caller: RolloutClient, mixture: tuple[Path, Any]) -> None:
    (completion,) = caller.generate(PROMPT, max_tokens=400, return_routing=True, **ASKED).completions
    assert completion.routing is not None and len(completion.routing) == 399
    assert_routed(mixture[1], whole(completion), completion.routing, len(PROMPT))


@pytest.mark.parametrize("wanted", [True, "all"])
def test_a_stream_has_the_experts_of_its_tokens(caller: RolloutClient, wanted: Any, mixture: tuple[Path, Any]) -> None:
    stream = caller.generate(PROMPT, max_tokens=30, return_routing=wanted, stream="tokens", stream_every=4, **ASKED)
    chunks = list(stream)
    first = 0 if wanted == "all" else len(PROMPT)
    for chunk in chunks:
        assert chunk.part.routing is not None
        prompt = len(PROMPT) - first - 1 if chunk.offset == 0 else 0
        assert len(chunk.part.routing) == len(chunk.token_ids) + prompt
    (joined,), (completion,) = stream.partials(), stream.result.completions
    assert joined.routing is not None and completion.routing is not None and len(chunks) > 3
    np.testing.assert_array_equal(joined.routing, completion.routing)
    assert_routed(mixture[1], whole(completion), completion.routing, first)


@pytest.mark.parametrize("wanted", [True, "all"])
def test_a_partial_goes_on_with_the_experts_that_it_had(caller: RolloutClient, wanted: Any) -> None:
    (once,) = caller.generate(PROMPT, max_tokens=30, return_routing=wanted, **ASKED).completions
    (part,) = caller.generate(PROMPT, max_tokens=12, return_routing=wanted, **ASKED).completions
    assert once.routing is not None and part.routing is not None
    marked = Completion(**{**{name: getattr(part, name) for name in part.__slots__}, "routing": part.routing ^ 64})
    onward = {"max_tokens": 30, "return_routing": wanted, "stop": {"ignore_eos": True}, "temperature": 1.0}
    (both,) = caller.generate(PROMPT, continue_from=marked, **onward).completions
    assert both.routing is not None and both.token_ids.tolist() == once.token_ids.tolist()
    had = len(part.routing)
    np.testing.assert_array_equal(both.routing[:had], part.routing ^ 64)
    np.testing.assert_array_equal(both.routing[had:], once.routing[had:])
    stream = caller.generate(PROMPT, continue_from=marked, stream="tokens", **onward)
    list(stream)
    np.testing.assert_array_equal(stream.partials()[0].routing, both.routing)
    (unasked,) = caller.generate(PROMPT, continue_from=part, **{**onward, "return_routing": False}).completions
    assert unasked.routing is None
    given = {"token_ids": part.token_ids, "seed": part.seed}
    (again,) = caller.generate(PROMPT, continue_from=given, **onward).completions
    np.testing.assert_array_equal(again.routing, once.routing)


def test_a_prompt_that_is_scored_without_a_token_has_its_experts(
    caller: RolloutClient, mixture: tuple[Path, Any]
) -> None:
    asked = {"max_tokens": 0, "prompt_logprobs": True, "return_routing": "all", "stop": {"ignore_eos": True}}
    (completion,) = caller.generate(PROMPT, **asked).completions
    assert completion.routing is not None and len(completion.routing) == len(PROMPT) - 1
    assert_routed(mixture[1], PROMPT, completion.routing, 0)
    (chunk,) = caller.generate(PROMPT, stream="tokens", **asked)
    np.testing.assert_array_equal(chunk.part.routing, completion.routing)


def test_a_client_of_zeromq_and_msgpack_alone_gets_them(routed: WorkerProcess, mixture: tuple[Path, Any]) -> None:
    prompt, blob = pack_blob(PROMPT, "<i4")
    with RawClient(routed.endpoint) as raw:
        assert "return_routing" in raw.ask("status", "s")["capabilities"]
        reply = raw.ask("generate", "a", (blob,), prompt=prompt, max_tokens=9, return_routing="all")
        (completion,) = reply["completions"]
        assert raw.types["routing"] == "|u1"
        assert_routed(mixture[1], PROMPT + completion["token_ids"], completion["routing"], 0)
        streamed = {"stream": "tokens", "stream_every": 1, "stop": {"ignore_eos": True}}
        raw.send("generate", "b", (blob,), prompt=prompt, max_tokens=9, return_routing=True, **streamed)
        chunks, reply = raw.receive_all("b")
        joined = [entry for chunk in chunks for entry in chunk["routing"]]
        assert joined == reply["completions"][0]["routing"] and len(joined) == 8


def test_a_dense_model_refuses(client: RolloutClient) -> None:
    assert "return_routing" not in client.status()["capabilities"]
    with pytest.raises(BadRequest, match="no experts.*capabilities") as caught:
        client.generate("17:", return_routing=True)
    assert caught.value.field == "return_routing"
