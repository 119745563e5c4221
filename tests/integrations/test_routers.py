"""Stock HTTP routers in front of two gateways, each with a worker of its own; one gateway is killed in the middle."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_router", reason="make test-integrations installs vllm-router")
pytest.importorskip("sglang_router", reason="make test-integrations installs sglang-router")
httpx = pytest.importorskip("httpx", reason="the extra http brings it")

from tests.support.integrations.integration_worker import start  # noqa: E402
from tests.support.integrations.routers import answers, process, router  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402
from tests.support.ports import free_port  # noqa: E402
from tests.support.worker.harness import ONES, text_of, token_ids, until  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402
from trainer_bridge.client.launch import WorkerProcess  # noqa: E402

TOKENS = 600
Two = tuple[WorkerProcess, WorkerProcess]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("routed")
    flags = {"max_context_tokens": 4096, "max_rows": 8, "wait": False}
    first, second = (start(ONES, folder / f"{name}.log", **flags) for name in ("first", "second"))
    with first, second:
        first.wait_ready(PATIENCE_S)
        second.wait_ready(PATIENCE_S)
        yield first, second


@contextmanager
def gateway(worker: WorkerProcess, folder: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The gateway of one worker, and its URL."""
    port = free_port()
    arguments = ("gateway", worker.endpoint, "--port", str(port), "--served-model-name", "ones")
    with process("-m", "rollout.cli.main", *arguments, log=folder / f"{name}.log") as running:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url + "/health"), f"{name}: {(folder / f'{name}.log').read_text()[-2000:]}", PATIENCE_S)
        yield running, url


class VllmDialect:
    """`vllm-router`, by OpenAI's completions with token ids."""

    package, policy = "vllm_router", "round_robin"
    path = "/v1/completions"

    @staticmethod
    def body(prompt: str, tokens: int) -> dict[str, Any]:
        return {"model": "ones", "prompt": token_ids(prompt), "max_tokens": tokens, "return_token_ids": True}

    @staticmethod
    def tokens(answer: dict[str, Any]) -> list[int]:
        return list(answer["choices"][0]["token_ids"])


class SglangDialect:
    """`sglang-router`, by SGLang's own endpoint."""

    package, policy = "sglang_router", "round_robin"
    path = "/generate"

    @staticmethod
    def body(prompt: str, tokens: int) -> dict[str, Any]:
        return {
            "input_ids": token_ids(prompt),
            "sampling_params": {"max_new_tokens": tokens},
            "return_logprob": True,
        }

    @staticmethod
    def tokens(answer: dict[str, Any]) -> list[int]:
        return [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("dialect", [VllmDialect, SglangDialect], ids=["vllm-router", "sglang-router"])
def test_requests_go_on_when_a_gateway_is_killed(dialect: Any, workers: Two, tmp_path: Path) -> None:
    before = [generated(worker) for worker in workers]
    with (
        gateway(workers[0], tmp_path, "first") as (doomed, first_url),
        gateway(workers[1], tmp_path, "second") as (_, second_url),
    ):
        with (
            router(dialect.package, dialect.policy, (first_url, second_url), tmp_path) as base,
            httpx.Client(base_url=base, timeout=PATIENCE_S) as client,
        ):

            def ask(start: int, tokens: int = 8) -> Any:
                return client.post(dialect.path, json=dialect.body(f"{start}:", tokens))

            def whole(start: int, answer: Any, tokens: int = 8) -> bool:
                """True for a right answer, false for an error; anything else fails."""
                if answer.status_code != 200:
                    return False
                ids = dialect.tokens(answer.json())
                counted = "".join(f" {number}" for number in range(start + 1, start + tokens))
                assert text_of(ids) == counted[:tokens], "a wrong or cut answer that looks like a success"
                return True

            until(lambda: all(whole(20, ask(20)) for _ in range(4)), "both gateways", PATIENCE_S)
            assert all(generated(worker) > count for worker, count in zip(workers, before, strict=True))

            with ThreadPoolExecutor(8) as pool:
                running = [pool.submit(ask, start, TOKENS) for start in range(20, 28)]
                until(lambda: all(busy(worker) for worker in workers), "rows at both workers", PATIENCE_S)
                doomed.kill()
                ended = [
                    whole(start, each.result(), TOKENS) for start, each in zip(range(20, 28), running, strict=True)
                ]
            assert any(ended), "the other gateway's requests must not notice"
            until(lambda: not busy(workers[0]), "the end of the killed gateway's rows", PATIENCE_S)
            until(lambda: all(whole(30, ask(30)) for _ in range(4)), "the router to leave it out", PATIENCE_S)


def status(worker: WorkerProcess) -> dict[str, Any]:
    with RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        return client.status()


def generated(worker: WorkerProcess) -> int:
    return int(status(worker)["tokens"])


def busy(worker: WorkerProcess) -> bool:
    return bool(status(worker)["rows"]["running"])
