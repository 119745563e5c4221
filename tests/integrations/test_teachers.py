"""Distillation trainers ask a teacher behind the gateway: own code of TRL and slime, and requests of slime and vime."""

import asyncio
import base64
import io
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.gateway.harness import gateway, post
from tests.support.worker.harness import ONES, launch, token_ids

PROMPT, COMPLETION = token_ids("17:"), token_ids(" 18 19 2")
SEQUENCE = PROMPT + COMPLETION
#: Of a vocabulary of 16.
TOP = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a gateway in front of a teacher."""
    log = tmp_path_factory.mktemp("teacher") / "log"
    with (
        launch(ONES, log=log, max_rows=8, max_context_tokens=512) as worker,
        gateway([worker.endpoint], served_model_name=("teacher",), logprobs="raw") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """[completion tokens, V]: transformers' log-probs, float64."""
    model = AutoModelForCausalLM.from_pretrained(ONES, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([SEQUENCE])).logits[0].double()
    return logits.log_softmax(-1)[len(PROMPT) - 1 : -1]


def own_of(expected: torch.Tensor) -> np.ndarray:
    return expected.gather(1, torch.tensor(COMPLETION)[:, None])[:, 0].numpy()


def url_of(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def test_the_client_of_trls_distillation_trainers(
    teacher: httpx.Client, expected: torch.Tensor, vllm_client: Any
) -> None:
    """`get_sequence_logprobs`, which server distillation, SDPO, SDFT and IW-OPD call."""
    client = vllm_client.VLLMClient(base_url=url_of(teacher))
    found = client.get_sequence_logprobs(
        [SEQUENCE, PROMPT, SEQUENCE], [len(PROMPT), 1, len(SEQUENCE) - 2], top_logprobs=TOP, chunk_size=2
    )
    assert [len(rows) for rows in found["logprobs"]] == [len(COMPLETION), len(PROMPT) - 1, 2]
    for place, last in ((0, len(COMPLETION)), (2, 2)):
        rows = expected[-last:]
        np.testing.assert_allclose(found["logprobs"][place], rows.topk(TOP).values, atol=1e-4)
        ids = torch.tensor(found["logprob_token_ids"][place])
        np.testing.assert_allclose(found["logprobs"][place], rows.gather(1, ids), atol=1e-4)
        actual = np.array(found["actual_logprobs"][place])[:, 0]
        np.testing.assert_allclose(actual, own_of(expected)[-last:], atol=1e-4)
        assert found["actual_token_ids"][place] == [[token] for token in COMPLETION[-last:]]


def test_the_scorer_of_trls_async_distillation(teacher: httpx.Client, expected: torch.Tensor) -> None:
    worker = pytest.importorskip("trl.experimental.async_distillation.async_rollout_worker")
    aiohttp = pytest.importorskip("aiohttp")
    loop = object.__new__(worker._AsyncRolloutLoop)  # the part that generates needs a trainer's process
    loop.teacher_temperature, loop.teacher_top_k, loop.request_timeout = 1.0, 3, 60.0

    async def score() -> Any:
        async with aiohttp.ClientSession() as loop.session:
            return await loop._score_with_teacher(PROMPT, COMPLETION, url_of(teacher), "teacher")

    ids, logprobs = asyncio.run(score())
    assert len(ids) == len(logprobs) == len(COMPLETION)
    for tokens, values, token, row in zip(ids, logprobs, COMPLETION, expected, strict=True):
        assert token in tokens and set(row.topk(3).indices.tolist()) <= set(tokens)
        np.testing.assert_allclose(values, row[tokens], atol=1e-4)
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_request_of_slimes_teacher(teacher: httpx.Client, expected: torch.Tensor, temperature: float) -> None:
    params = {"temperature": temperature, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": SEQUENCE, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    entries = post(teacher, "/generate", body)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == SEQUENCE
    own = [entry[0] for entry in entries[1:]][-len(COMPLETION) :]
    np.testing.assert_allclose(own, own_of(expected), atol=1e-4)


def test_slimes_on_policy_distillation(teacher: httpx.Client, expected: torch.Tensor) -> None:
    """Its `--custom-rm-path` and `--custom-reward-post-process-path`: samples get the teacher's log-probs."""
    slime = pytest.importorskip("slime.rollout.on_policy_distillation", reason="make test-integrations installs slime")
    args = SimpleNamespace(rm_url=f"{url_of(teacher)}/generate", rollout_temperature=1.0, reward_key=None)
    samples = [
        slime.Sample(tokens=SEQUENCE, response_length=len(COMPLETION)),
        slime.Sample(tokens=SEQUENCE, response_length=2),
    ]

    async def score() -> None:
        for sample in samples:
            sample.reward = await slime.reward_func(args, sample)

    asyncio.run(score())
    assert slime.post_process_rewards(args, samples) == ([0.0, 0.0], [0.0, 0.0])
    for sample in samples:
        np.testing.assert_allclose(sample.teacher_log_probs, own_of(expected)[-sample.response_length :], atol=1e-4)


def test_the_requests_of_vimes_teacher(teacher: httpx.Client, expected: torch.Tensor) -> None:
    params = {"max_tokens": 1, "temperature": 0.7, "skip_special_tokens": False}
    body = {"token_ids": SEQUENCE, "model": "teacher"}
    answer = post(teacher, "/inference/v1/generate", body | {"sampling_params": params | {"prompt_logprobs": 1}})
    rows = answer["prompt_logprobs"][len(PROMPT) :]
    own = [row[str(token)]["logprob"] for row, token in zip(rows, COMPLETION, strict=True)]
    np.testing.assert_allclose(own, own_of(expected), atol=1e-4)
    named = {"prompt_logprob_start": len(PROMPT) - 1, "prompt_logprob_token_ids": [[token] for token in COMPLETION]}
    answer = post(teacher, "/inference/v1/generate", body | {"sampling_params": params | named})
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])), allow_pickle=False)
    assert scores.dtype == np.float32 and scores.shape == (len(COMPLETION), 1) and (scores <= 0).all()
    np.testing.assert_allclose(scores[:, 0], own_of(expected), atol=1e-4)


def test_a_teacher_computes_what_samples_share_once(teacher: httpx.Client) -> None:
    """Samples of one prompt: positions that are not asked for come from the cache."""
    prompt = token_ids("".join(f"{number} " for number in range(30)))
    named = {"prompt_logprob_start": len(prompt) - 1, "prompt_logprob_token_ids": [[3, 4]] * len(COMPLETION)}
    body = {"token_ids": prompt + COMPLETION, "sampling_params": {"max_tokens": 0, **named}}
    cached = []
    for _ in range(2):
        answer = post(teacher, "/inference/v1/generate", body)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] >= len(prompt) - 1 - len(prompt) % 16 - 16 and math.isfinite(cached[0])
