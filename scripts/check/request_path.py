"""Prints the files that one prompt passes through: the modules in which a function is called for it.

    PYTHONPATH=.:kernels python -m scripts.check.request_path            prints those of the client and of the worker
    PYTHONPATH=.:kernels python -m scripts.check.request_path --write    writes the page of the worker's

A worker on the CPU serves a completion of token ids, under a profile of all its threads. It is the second one, so that
caches and lazy imports are there.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rollout.cli.main import main as command
from rollout.service import vitals
from scripts.request_page import PAGE, request_page
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker

_ROOT = Path(__file__).parents[2]
_MODEL = _ROOT / "rollout" / "demo" / "checkpoints" / "ones"
_PACKAGES = ("rollout/", "rollout_gateway/", "trainer_bridge/", "kernels/")
_BESIDE = "rollout/process/"  # threads that watch the process
_ENDED_S = 0.5  # the worker has ended its work on a completion this long after the answer
_WAIT_S = 60.0


def main(write: bool) -> None:
    """Print the files of both sides, or write the page."""
    asked, served = files_of_a_prompt()
    if write:
        PAGE.write_text(request_page(served), encoding="utf-8")
        return
    for title, files in (("client", asked), ("worker", served)):
        print(f"{title}: {len(files)} files", *files, sep="\n  ")


def files_of_a_prompt() -> tuple[list[str], list[str]]:
    """Start a worker under the profile and send it a prompt: the files of the client and of the worker, as called."""
    calls = _profile()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "files"
        command = (sys.executable, "-m", "scripts.check.request_path", str(written))
        settings: dict[str, Any] = {"wandb": False, "kv_memory_max_gib": 1 / 32, "interval_s": 3600.0}
        with start_worker(_MODEL, command=command, log_file=Path(folder) / "log", **settings) as worker:
            with RolloutClient(worker.endpoint) as client:
                client.generate([4, 5, 6, 7], max_tokens=4)
                time.sleep(_ENDED_S)
                _files(worker.pid, written)
                calls.clear()
                client.generate([5, 6, 7, 8, 9], max_tokens=4)
                return _paths(calls), _files(worker.pid, written)


def _profile() -> dict[CodeType, None]:
    """The code of the functions that are called from now on, by any thread that starts later and by this one.

    What a worker does to report about itself is left out: it does that with or without requests.
    """
    called: dict[CodeType, None] = {}
    report = vitals.__file__

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code in called:
            return
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename != report:
            caller = caller.f_back
        if caller is None:
            called[frame.f_code] = None

    threading.setprofile(note)
    sys.setprofile(note)
    return called


def _paths(called: dict[CodeType, None]) -> list[str]:
    names = dict.fromkeys(Path(code.co_filename) for code in called.copy())
    paths = [str(name.relative_to(_ROOT)) for name in names if name.is_relative_to(_ROOT)]
    return [path for path in paths if path.startswith(_PACKAGES) and not path.startswith(_BESIDE)]


def _files(pid: int, written: Path) -> list[str]:
    """The files of the calls of the worker since the last call of this function."""
    os.kill(pid, signal.SIGUSR1)
    until_s = time.monotonic() + _WAIT_S
    while not written.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the worker does not write its files")
        time.sleep(0.01)
    files = written.read_text().split()
    written.unlink()
    return files


def _serve(written: Path, arguments: list[str]) -> int:
    """The worker's side: serve under the profile, and write the called files when SIGUSR1 comes."""
    calls = _profile()

    def write(*_: object) -> None:
        part = written.with_suffix(".part")
        part.write_text("\n".join(_paths(calls)))
        calls.clear()
        part.rename(written)

    signal.signal(signal.SIGUSR1, write)
    return command(["serve", *arguments])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(_serve(Path(sys.argv[1]), sys.argv[2:]))
    main(write=sys.argv[1:] == ["--write"])
