"""Workers that hang, die, never come or come back: the gateway says so at once, logs it, brings them up to date."""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import gateway, post, refused
from tests.support.patience import PATIENCE_S
from tests.support.peft_adapters import make_adapter
from tests.support.ports import free_port
from tests.support.worker.harness import CHECKPOINTS, ONES, TWOS, launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

#: Every endpoint that only asks for state.
STATE = (
    "/health",
    "/metrics",
    "/v1/models",
    "/server_info",
    "/get_server_info",
    "/v1/loads",
    "/get_load",
    "/is_paused",
    "/is_sleeping",
    "/get_model_info",
    "/model_info",
    "/weight_info",
    "/get_weight_version",
    "/get_world_size",
    "/ping",
    "/version",
)
AT_ONCE_S = 4.0  # 0.1 s on a machine with free cores; a gateway that asks workers waits for 5 s
COUNT = {"prompt": "17:", "max_tokens": 6}


class Place:
    """An endpoint, and the worker that is started there again and again."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.folder = folder
        self._worker: WorkerProcess | None = None
        self._starts = 0

    @property
    def worker(self) -> WorkerProcess:
        """The present process."""
        assert self._worker is not None
        return self._worker

    def start(self) -> None:
        """Start a worker with version 0 of the weights, which count in ones."""
        self._starts += 1
        log = self.folder / f"{self.endpoint.rpartition(':')[2]}-{self._starts}"
        flags = {"adapter_slots": 1, "adapter_rank": 4, "adapter_root": str(self.folder / "adapters")}
        self._worker = launch(log=log, bind=self.endpoint, max_rows=8, max_context_tokens=512, wait=False, **flags)

    def kill(self) -> None:
        """The worker dies, without a word."""
        self.worker.kill()

    def status(self) -> dict[str, Any]:
        """The worker's own word."""
        with RolloutClient(self.endpoint, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S) as client:
            return client.status()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Place]]:
    """Two workers."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "adapters").mkdir()
    first, second = Place(folder), Place(folder)
    try:
        first.start(), second.start()
        yield first, second
    finally:
        for place in (first, second):
            place.worker.kill()


@pytest.fixture
def pair(places: tuple[Place, Place]) -> tuple[Place, Place]:
    """Two workers that run."""
    for place in places:
        if place.worker.returncode is not None:
            place.start()
    for place in places:  # while a worker starts, it answers without a version, and then binds its sockets anew
        until(lambda place=place: "weights_version" in place.status(), "its start")  # type: ignore[misc]
    return places


def problems(client: httpx.Client) -> dict[str, str]:
    """Workers that are not in order, by endpoint; at least one is."""
    answer = client.get("/health")
    assert answer.status_code == 200, answer.text
    found: dict[str, str] = answer.json()["unhealthy"]
    return found


def lines(caplog: pytest.LogCaptureFixture, place: Place) -> list[tuple[int, str]]:
    """What the gateway has logged about a worker: level and message."""
    records = [each for each in caplog.records if getattr(each, "endpoint", None) == place.endpoint]
    return [(each.levelno, each.getMessage()) for each in records]


def answers_at_once(client: httpx.Client, *statuses: int) -> None:
    """One of three answers must come at once: any answer may wait for a core, but not all of them for a worker."""

    def came_at_once(path: str) -> bool:
        began = time.monotonic()
        answer = client.get(path, timeout=PATIENCE_S)
        assert answer.status_code in statuses, (path, answer.text)
        return time.monotonic() - began < AT_ONCE_S

    for path in STATE:
        assert any(came_at_once(path) for _ in range(3)), path


def test_state_is_told_at_once_while_a_worker_hangs(
    pair: tuple[Place, Place], caplog: pytest.LogCaptureFixture
) -> None:
    hangs, well = pair
    caplog.set_level(logging.INFO, "rollout_gateway")
    with gateway([hangs.endpoint, well.endpoint]) as client:
        until(lambda: not problems(client) and lines(caplog, hangs), "both workers")
        os.kill(hangs.worker.pid, signal.SIGSTOP)
        try:
            answers_at_once(client, 200)
            until(lambda: list(problems(client)) == [hangs.endpoint], "the gateway to see it")
            until(lambda: lines(caplog, hangs)[-1][0] == logging.WARNING, "the line")
            answers_at_once(client, 200)
        finally:
            os.kill(hangs.worker.pid, signal.SIGCONT)
        until(lambda: not problems(client), "the worker to be back")
        until(lambda: lines(caplog, hangs)[-1][0] == logging.INFO, "the line")
        levels = [level for level, _ in lines(caplog, hangs)]
        assert levels.count(logging.INFO) == 2 and 1 <= levels.count(logging.WARNING) <= 2  # it hangs, then it is lost
        assert len(lines(caplog, well)) <= 1


def test_state_is_told_at_once_when_workers_die_and_never_come(
    pair: tuple[Place, Place], caplog: pytest.LogCaptureFixture
) -> None:
    dies, last = pair
    never = f"tcp://127.0.0.1:{free_port()}"
    caplog.set_level(logging.INFO, "rollout_gateway")
    with gateway([dies.endpoint, last.endpoint, never], resume=False) as client:
        until(lambda: list(problems(client)) == [never] and lines(caplog, dies), "two workers")
        answers_at_once(client, 200)
        dies.kill()
        until(lambda: set(problems(client)) == {never, dies.endpoint}, "the loss")
        answers_at_once(client, 200)
        assert post(client, "/v1/completions", COUNT)["choices"]  # by the one that is left
        until(lambda: len(lines(caplog, dies)) == 2, "the line")
        with RolloutClient(last.endpoint) as direct:
            direct.pause()
        with client.stream("POST", "/v1/completions", json=COUNT | {"stream": True}) as waits:
            assert waits.status_code == 200  # it has no token yet
            last.kill()
            (line,) = [line for line in waits.iter_lines() if line]
            assert json.loads(line.removeprefix("data: "))["error"]["code"] == 502
        until(lambda: client.get("/health").status_code == 503, "the loss")
        assert last.endpoint in client.get("/health").json()["error"]["message"]
        answers_at_once(client, 200, 503)
        assert client.get("/v1/models").status_code == 200
        began = time.monotonic()
        for body in (COUNT, COUNT | {"stream": True}, COUNT | {"n": 2}, COUNT | {"prompt": ["1:", "2:"]}):
            refused(client, "/v1/completions", body, 503)
        assert time.monotonic() - began < 4 * AT_ONCE_S
        refused(client, "/update_weights", {"weight_dir": str(TWOS)}, 403)
    assert [level for level, _ in lines(caplog, dies)] == [logging.INFO, logging.WARNING]


def test_requests_that_are_resumed_wait_for_a_worker_as_long_as_is_said(pair: tuple[Place, Place]) -> None:
    dies, _ = pair
    with gateway([dies.endpoint], resume=True, resume_s=1.0) as client:
        dies.kill()
        until(lambda: client.get("/health").status_code == 503, "the loss")
        began = time.monotonic()
        refused(client, "/v1/completions", COUNT, 502)
        assert time.monotonic() - began >= 1.0


def test_a_worker_that_is_started_again_gets_what_the_others_have(
    pair: tuple[Place, Place], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, adapters and a pause; then weights whose folder is no more as it was."""
    from transformers import AutoModelForCausalLM

    dies, other = pair
    caplog.set_level(logging.INFO, "rollout_gateway")
    version = max(place.status()["weights_version"] for place in pair) + 1
    folder, update = tmp_path / "step", {"model_path": "step", "weight_version": version}
    shutil.copytree(TWOS, folder)
    make_adapter(AutoModelForCausalLM.from_pretrained(ONES), dies.folder / "adapters" / "a", 1)
    with gateway([dies.endpoint, other.endpoint], weights_root=str(tmp_path)) as client:
        until(lambda: not problems(client), "both workers")
        post(client, "/update_weights_from_disk", update)
        post(client, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "a"})
        post(client, "/pause?mode=keep")
        dies.kill()
        until(lambda: list(problems(client)) == [dies.endpoint], "the loss")
        dies.start()
        until(lambda: dies.status()["state"] == "paused", "the pause")
        until(lambda: [each["name"] for each in dies.status()["adapters"]] == ["mine"], "the adapter")
        until(lambda: not problems(client), "the weights")
        assert dies.status()["weights_version"] == version == other.status()["weights_version"]
        post(client, "/resume")
        for rank in ("0", "1"):
            headers = {"X-data-parallel-rank": rank}
            assert post(client, "/v1/completions", COUNT, headers=headers)["choices"][0]["text"] == " 19 21"
        until(lambda: any("brought up to date" in text for _, text in lines(caplog, dies)), "the line")
        texts = [text for _, text in lines(caplog, dies)]
        assert len(set(texts)) == len(texts), texts  # nothing is said twice
        assert not [each for each in caplog.records if each.levelno > logging.WARNING]

        shutil.copy(ONES / "model.safetensors", folder / "model.safetensors")  # another step, in the same folder
        dies.kill()
        until(lambda: dies.endpoint in problems(client), "the loss")
        dies.start()
        until(lambda: str(folder) in problems(client).get(dies.endpoint, ""), "what can be done")
        assert dies.status()["weights_version"] == 0
        assert refused(client, "/update_weights_from_disk", update, 409) == "weight_version"
        post(client, "/update_weights_from_disk", update | {"weight_version": version + 1})
        until(lambda: not problems(client), "newer weights")


def test_the_same_version_again_goes_to_the_workers_that_lack_it(pair: tuple[Place, Place]) -> None:
    dies, other = pair
    version = max(place.status()["weights_version"] for place in pair) + 1
    update = {"model_path": "twos", "weight_version": version}
    with gateway([dies.endpoint, other.endpoint], weights_root=str(CHECKPOINTS)) as client:
        until(lambda: not problems(client), "both workers")
        dies.kill()
        until(lambda: list(problems(client)) == [dies.endpoint], "the loss")
        assert client.post("/update_weights_from_disk", json=update).status_code in (502, 503)
        until(lambda: other.status()["weights_version"] == version, "the other worker")
        assert client.get("/health").json()["min_version"] == version
        dies.start()
        dies.status()
        assert post(client, "/update_weights_from_disk", update)["success"]
        assert dies.status()["weights_version"] == version
        until(lambda: not problems(client), "the gateway's own connection")  # the update went over another one

    # A gateway that is started again does not know the folder: the same version brings it to the worker that lacks it.
    with gateway([dies.endpoint, other.endpoint], weights_root=str(CHECKPOINTS)) as client:
        until(lambda: not problems(client), "both workers")
        dies.kill()
        until(lambda: list(problems(client)) == [dies.endpoint], "the loss")
        dies.start()
        until(lambda: "weights version 0" in problems(client).get(dies.endpoint, ""), "what is wrong")
        post(client, "/update_weights_from_disk", update)
        assert dies.status()["weights_version"] == version
        until(lambda: not problems(client), "the gateway's own look at it")
        refused(client, "/update_weights_from_disk", update | {"model_path": "ones"}, 409)


def test_forks_go_on_at_another_worker_when_theirs_is_lost(pair: tuple[Place, Place]) -> None:
    """Of a request and of a session; and a new worker at the same place, which knows nothing, is no other."""
    drawn = {"max_tokens": 20, "temperature": 2.5, "seed": 4, "return_token_ids": True}
    version = max(place.status()["weights_version"] for place in pair) + 1
    with gateway([place.endpoint for place in pair], weights_root=str(CHECKPOINTS)) as client:
        # The gateway brings these weights to the new worker, too: only then it is in order.
        post(client, "/update_weights_from_disk", {"model_path": "ones", "weight_version": version})
        prompt = {"prompt": "17: 18 19 20", "request_id": "root", **drawn}
        source = post(client, "/v1/completions", prompt, headers={"X-data-parallel-rank": "0"})["choices"][0]
        turn = {"X-Session-ID": "talk"}
        post(client, "/v1/completions", {"fork": {"request": "root"}, **drawn}, headers=turn)

        def branches() -> list[Any]:
            forks: list[dict[str, Any]] = [{"request": "root", "offset": 9}, {"session": "talk"}]
            answers = [post(client, "/v1/completions", {"fork": fork, **drawn}) for fork in forks]
            return [
                (choice["prompt_token_ids"], choice["token_ids"]) for answer in answers for choice in answer["choices"]
            ]

        before = branches()
        assert before[0][0] == [*source["prompt_token_ids"], *source["token_ids"]][:9]
        pair[0].kill()
        assert branches() == before
        pair[0].start()
        until(lambda: client.get("/health").json().get("unhealthy") in (None, {}), "the new worker", PATIENCE_S)
        assert branches() == before
