"""Triton kernels run in Triton's interpreter where there is no CUDA device; it has to be chosen before Triton loads."""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")  # asserts of helpers show their values, too

# Imports and collection leave hardly any garbage, and the collector would scan all of it again and again.
gc.disable()

# Before torch loads. The tensors here are small, and a second thread spins on a core while it waits for the first: that
# is many times slower beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch asks the name server for the name of each address of a store, such as ::ffff:127.0.0.1, for its log. Where a
# query is lost, the resolver waits for 5 s by default: as long as some tests give a worker to join a group.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import torch  # noqa: E402

import tests.support.quick_transformers.sitecustomize  # noqa: E402, F401 -- before transformers loads
from rollout.process.logs import LineStream  # noqa: E402
from tests.support.worker.harness import launch_shared  # noqa: E402
from trainer_bridge.client.launch import WorkerProcess  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1":
        from tests.support.quick_interpreter import make_quick

        make_quick()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Of several processes each rewrites assertions in its share of the files, and then finds those of the others."""
    name, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not name or sys.dont_write_bytecode:
        return
    folders = [session.config.invocation_params.dir / argument for argument in session.config.args]
    files = sorted({file for folder in folders if folder.is_dir() for file in folder.rglob("test_*.py")})
    for file in files[int(name.removeprefix("gw")) :: count]:
        module = file.relative_to(Path(__file__).parents[1]).with_suffix("")
        with contextlib.suppress(ImportError, pytest.skip.Exception):  # its collection tells
            importlib.import_module(".".join(module.parts))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module with `DEVICE = "cuda"` runs on the GPU: mark its tests `gpu`."""
    for item in items:
        if getattr(getattr(item, "module", None), "DEVICE", "cpu") == "cuda":
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)  # also in the process that only hands tests out, which collects none
def pytest_runtestloop() -> None:
    """Objects made before the first test stay: the garbage collector need not visit them, also at pytest's own end."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or libraries complain of leaks


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seed of the order, which the header of a quiet run hides."""
    seed = terminalreporter.config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"random order: --randomly-seed={seed}")


@pytest.fixture(scope="session")
def first_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that is shared by all tests of this process; it keeps its weights."""
    with launch_shared(tmp_path_factory.mktemp("workers") / "first.log") as worker:
        yield worker


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.distribution import SlowFilesFirst

    return SlowFilesFirst(config, log)


@pytest.fixture(autouse=True)
def _process_stays_as_it_was() -> Iterator[None]:
    """Undo what a command that a test ran here set up: logging, and how long a thread keeps Python's lock."""
    root, streams, hooks = logging.getLogger(), sys.stderr, (sys.excepthook, threading.excepthook)
    handlers, switch_s = list(root.handlers), sys.getswitchinterval()
    levels = {name: logging.getLogger(name).level for name in ("rollout", "rollout_gateway", "trainer_bridge")}
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)
    sys.setswitchinterval(switch_s)
    if isinstance(sys.stderr, LineStream):
        sys.stderr = streams
    sys.excepthook, threading.excepthook = hooks
