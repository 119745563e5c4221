"""A real worker with CURVE on an open address: its clients, publishers and commands, with and without keys."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.worker.harness import ONES, ROOT, TWOS, check, launch, rollout, subprocess_environment
from trainer_bridge import ClientCurve, RolloutClient, WeightPublisher
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import RolloutError

WAIT_S = 60.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        rollout(*arguments), env=subprocess_environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curve") / "keys"
    made = run("keys", str(folder), "--client", "trainer")
    assert made.returncode == 0, made.stderr
    assert f"--curve-secret-key {folder}/server.key_secret" in made.stdout
    return folder


@pytest.fixture(scope="module")
def curve(keys: Path) -> ClientCurve:
    return ClientCurve.from_files(keys / "trainer.key_secret", keys / "server.key")


@pytest.fixture(scope="module")
def secured(keys: Path, curve: ClientCurve) -> Iterator[WorkerProcess]:
    settings = {"curve_secret_key": keys / "server.key_secret", "curve_client_keys": keys / "clients"}
    opened = {"bind": "tcp://*:0", "weights_bind": "tcp://*:0"}
    with launch(ONES, log=keys.parent / "worker.log", max_rows=2, curve=curve, **settings, **opened) as worker:
        yield worker
        assert worker.stop(timeout_s=120) == 0, "the launcher cannot ask its own worker to end"


def endpoint_of(worker: WorkerProcess) -> str:
    return worker.endpoint.replace("0.0.0.0", "127.0.0.1")


def test_a_client_generates_and_a_publisher_publishes(secured: WorkerProcess, curve: ClientCurve) -> None:
    endpoint = endpoint_of(secured)
    with RolloutClient(endpoint, timeout_s=WAIT_S, curve=curve) as client:
        before = client.generate("17:", max_tokens=200, seed=1).completions[0]
        with WeightPublisher(endpoint, curve=curve) as publisher:
            publisher.publish(load_file(TWOS / "model.safetensors"), version=1).applied(WAIT_S)
        after = client.generate("17:", max_tokens=200, seed=1).completions[0]
    check("17:", before, {0: 1})
    check("17:", after, {1: 2})
    assert [run[0] for run in before.versions] == [0] and [run[0] for run in after.versions] == [1]


def test_other_clients_are_refused(secured: WorkerProcess) -> None:
    with RolloutClient(endpoint_of(secured), connect_timeout_s=WAIT_S) as client, pytest.raises(RolloutError) as error:
        client.status()
    assert "CURVE" in str(error.value)


def test_the_commands_take_keys(secured: WorkerProcess, keys: Path) -> None:
    endpoint = endpoint_of(secured)
    flags = ["--curve-key", str(keys / "trainer.key_secret"), "--curve-server-key", str(keys / "server.key")]
    status = run("status", endpoint, "--json", *flags)
    assert status.returncode == 0 and '"state": "serving"' in status.stdout, status.stderr
    refused = run("status", endpoint, "--timeout-s", "60")
    assert refused.returncode == 1 and "CURVE" in refused.stderr
    half = run("status", endpoint, *flags[:2])
    assert half.returncode == 2 and "--curve-server-key" in half.stderr
    wrong = run("status", endpoint, "--curve-key", str(keys / "server.key"), *flags[2:])
    assert wrong.returncode == 2 and "secret" in wrong.stderr
