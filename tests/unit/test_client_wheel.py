"""The installed client needs zmq, msgpack and numpy, and nothing else: neither our worker nor any other library."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import zmq

from trainer_bridge.wire.codec import decode, encode, join_envelope, split_envelope

ROOT = Path(__file__).parents[2]
ALLOWED = ("zmq", "msgpack", "numpy")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rollout", "rollout_gateway", "trainer_bridge", "kernels")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The path of an installation: the wheel without its dependencies, and a folder with the three libraries."""
    source, wheels, site, libraries = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site", "lib"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("*.whl")
    shutil.unpack_archive(wheel, site, format="zip")
    for name in ALLOWED:
        folder = Path(importlib.util.find_spec(name).origin).parent  # type: ignore[union-attr, arg-type]
        os.symlink(folder, libraries / name)
        for shared in folder.parent.glob(f"*{name}*.libs"):  # the shared objects that a wheel brings
            os.symlink(shared, libraries / shared.name)
    return [str(site), str(libraries)]


def run(installed: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Python without site-packages, the environment and this checkout."""
    script = f"import sys\nsys.path[:0] = {installed!r}\n{textwrap.dedent(code)}"
    command = [sys.executable, "-I", "-S", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=installed[0])


@pytest.fixture
def endpoint() -> object:
    """A worker's request socket that answers `ping`, and `generate` with two tokens."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    closing = threading.Event()

    def serve() -> None:
        while not closing.is_set():
            if not socket.poll(20):
                continue
            sender, *frames = socket.recv_multipart()
            delimiter, frames = split_envelope(frames)
            asked = decode(frames)
            completion = {"index": 0, "token_ids": [1, 2], "logprobs": [-0.5, -1.0], "raw_logprobs": [-0.5, -1.0]}
            completion |= {"versions": [[7, 2]], "finish_reason": "stop", "seed": 3}
            result = {"op": "result", "completions": [completion], "prompt_tokens": 1, "cached_tokens": 0}
            answer = result | {"preemptions": 0} if asked["op"] == "generate" else {"op": "ok"}
            reply = encode({"v": 1, "id": asked["id"], **answer})
            socket.send_multipart([sender, *join_envelope(delimiter, reply)])

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    closing.set()
    thread.join()
    socket.close()


def test_a_blocking_client_works_with_three_libraries(installed: list[str], endpoint: str) -> None:
    done = run(
        installed,
        f"""
        import trainer_bridge
        from trainer_bridge import Completion, GenerateResult, RolloutClient, RolloutError
        assert trainer_bridge.__file__.startswith({installed[0]!r})
        with RolloutClient({endpoint!r}, timeout_s=60) as client:
            client.ping()
            result = client.generate([5], max_tokens=2)
        assert isinstance(result, GenerateResult) and result.completions[0].token_ids.tolist() == [1, 2]
        print(trainer_bridge.__version__)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().count(".") >= 1


def test_an_asynchronous_client_works_with_three_libraries(installed: list[str], endpoint: str) -> None:
    done = run(
        installed,
        f"""
        import asyncio
        from trainer_bridge import AsyncRolloutClient
        async def main():
            async with AsyncRolloutClient({endpoint!r}, timeout_s=60) as client:
                return await client.generate([5], max_tokens=2)
        assert asyncio.run(main()).completions[0].versions == [(7, 2)]
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    ["start_worker", "ClientCurve", "Settled", "Mismatch", "Overloaded", "client.journal"],
)
def test_names_of_the_client_load_with_three_libraries(installed: list[str], name: str) -> None:
    load = f"import trainer_bridge.{name}" if "." in name else f"from trainer_bridge import {name}"
    done = run(installed, load)
    assert done.returncode == 0, done.stderr


def test_other_libraries_are_out_of_reach_in_these_tests(installed: list[str]) -> None:
    done = run(installed, "from trainer_bridge import WeightPublisher")
    assert done.returncode and "No module named" in done.stderr


def test_the_clients_come_from_their_package_too(installed: list[str]) -> None:
    done = run(installed, "from trainer_bridge.client import AsyncRolloutClient, RolloutClient")
    assert done.returncode == 0, done.stderr
