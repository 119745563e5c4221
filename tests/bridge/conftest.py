"""Fixtures of the bridge: children that fail (`faults`), and a folder for temporary files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bridge.fault_client import FaultServer
from tests.support.bridge.harness import Worker


@pytest.fixture(scope="session")
def faults() -> Iterator[FaultServer]:
    server = FaultServer()
    yield server
    server.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and its children make temporary files during the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path
