"""Whether a worker's sockets can be bound is known before its model is loaded."""

import socket
from pathlib import Path

import pytest

from rollout.config import ServiceSettings, Settings, WeightsSettings
from rollout.network.ports import check_free


@pytest.mark.parametrize("section", ["service", "weights"])
def test_the_path_of_a_worker_that_lives_is_taken_and_that_of_a_killed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a Unix socket's path is short
    sections = {
        "service": ServiceSettings(bind="ipc://socket" if section == "service" else "tcp://127.0.0.1:0"),
        "weights": WeightsSettings(bind="ipc://socket" if section == "weights" else "tcp://127.0.0.1:0"),
    }
    settings = Settings(**sections)
    check_free(settings)
    with socket.socket(socket.AF_UNIX) as live:
        live.bind("socket")
        live.listen()
        with pytest.raises(ValueError, match=rf"ipc://socket.*{section}\.bind"):
            check_free(settings)
    assert Path("socket").exists()
    check_free(settings)
