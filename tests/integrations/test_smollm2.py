"""A real model, SmolLM2-135M-Instruct: its greedy answers over HTTP and the socket are transformers' own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.fetch_smollm2 import FOLDER, fetch
from tests.support.gateway.harness import gateway
from tests.support.worker.harness import launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

openai = pytest.importorskip("openai")

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 2 + 3?",
    "Name three colours.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue? Answer in one sentence.",
)
TOKENS = 40


@pytest.fixture(scope="module")
def model() -> Path:
    """The model's folder, fetched once."""
    if not os.environ.get("TEST_INTEGRATIONS") and not FOLDER.is_dir():
        pytest.skip("make test-integrations fetches the model")
    fetch(FOLDER, [])
    return FOLDER


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, httpx.Client]]:
    log = tmp_path_factory.mktemp("smollm2") / "log"
    flags: dict[str, Any] = {"dtype": "float32", "max_rows": 8, "max_context_tokens": 1024, "kv_memory_max_gib": 0.5}
    with launch(model, log=log, **flags) as worker, gateway([worker.endpoint]) as client:
        yield worker, client


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[list[int], np.ndarray, str]]:
    """transformers' greedy answers: tokens, log-probs at temperature 1, text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            made = reference.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
            logits = reference(made).logits[0, prompt.shape[1] - 1 : -1]
        tokens = made[0, prompt.shape[1] :]
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        answers.append((tokens.tolist(), logprobs.numpy(), tokenizer.decode(tokens, skip_special_tokens=True)))
    return answers


def test_greedy_answers_over_http_are_those_of_transformers(
    served: tuple[WorkerProcess, httpx.Client], expected: list[tuple[list[int], np.ndarray, str]]
) -> None:
    base = str(served[1].base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        (card,) = client.models.list().data
        for question, (tokens, logprobs, text) in zip(QUESTIONS, expected, strict=True):
            fields: dict[str, Any] = {
                "model": card.id,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "logprobs": True,
                "extra_body": {"return_token_ids": True},
            }
            (choice,) = client.chat.completions.create(**fields).choices
            assert choice.message.content == text and choice.token_ids == tokens  # type: ignore[attr-defined]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            found = np.array([entry.logprob for entry in choice.logprobs.content])
            assert np.abs(found - logprobs).max() < 1e-3
            stream = client.chat.completions.create(stream=True, **fields)
            assert "".join(event.choices[0].delta.content or "" for event in stream) == text


def test_greedy_answers_over_the_socket_are_those_of_transformers(
    served: tuple[WorkerProcess, httpx.Client], expected: list[tuple[list[int], np.ndarray, str]]
) -> None:
    with RolloutClient(served[0].endpoint) as client:
        for question, (tokens, logprobs, text) in zip(QUESTIONS, expected, strict=True):
            result = client.generate(
                messages=[{"role": "user", "content": question}], max_tokens=TOKENS, temperature=0.0, return_text=True
            )
            (completion,) = result.completions
            assert completion.token_ids.tolist() == tokens and completion.text == text
            assert np.abs(completion.raw_logprobs - logprobs).max() < 1e-3


def test_long_texts_of_many_alphabets_are_streamed_and_stopped_as_transformers_writes_them(
    served: tuple[WorkerProcess, httpx.Client], model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lines = "".join(f"{i}. naïve café, 東京 {i}, Ωμέγα 🙂🙃\n" for i in range(1, 4))
    prompt = tokenizer(lines)["input_ids"]
    with torch.no_grad():
        made = reference.generate(torch.tensor([prompt]), max_new_tokens=160, do_sample=False)[0, len(prompt) :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    broken = [n for n in range(1, 161) if tokenizer.decode(made[:n]).endswith("\N{REPLACEMENT CHARACTER}")]
    for most in (160, broken[0]):  # the second answer ends within a character
        fields = {"prompt": prompt, "max_tokens": most, "temperature": 0, "return_token_ids": True}
        (choice,) = served[1].post("/v1/completions", json=fields, timeout=300).json()["choices"]
        assert choice["token_ids"] == made[:most].tolist()
        assert choice["text"] == tokenizer.decode(made[:most], skip_special_tokens=True)
    base = str(served[1].base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=300) as client:
        (card,) = client.models.list().data
        ask: dict[str, Any] = {"model": card.id, "prompt": prompt, "max_tokens": 160, "temperature": 0, "stream": True}
        pieces = [event.choices[0].text for event in client.completions.create(**ask)]
        assert "".join(pieces) == text and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        for stop in ("京", "é, 東", "🙃\n"):  # within a character's tokens, and across tokens
            before = text.partition(stop)[0]
            assert len(before) < len(text)
            events = list(client.completions.create(stop=[stop], **ask))
            assert "".join(event.choices[0].text for event in events) == before
            assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["stop"]


def test_a_constraint_gives_json_of_a_schema(served: tuple[WorkerProcess, httpx.Client]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    answer = served[1].post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")
    assert set(httpx.Response(200, text=answer["choices"][0]["message"]["content"]).json()) == {"city"}
