"""A fixture of publishers, transports and receivers: children that fail (`faults`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.bridge.fault_client import FaultServer


@pytest.fixture(scope="session")
def faults() -> Iterator[FaultServer]:
    server = FaultServer()
    yield server
    server.close()
