"""A worker raises its limit of open files; if the hard limit is too low, an error says what to change."""

import os
import resource
import subprocess
import sys

import pytest

from rollout.process.open_files import WANTED
from tests.support.worker.harness import ONES, rollout, subprocess_environment

_RAISE = """
import resource, sys
soft, hard, ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from rollout.process.open_files import TooFewFilesError, raise_limit
try:
    print(raise_limit(ranks), resource.getrlimit(resource.RLIMIT_NOFILE))
except TooFewFilesError as error:
    print(error)
"""


def said(soft: int, hard: int, ranks: int = 1) -> str:
    """What a process with these limits says."""
    if hard > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        pytest.skip("the limit of this machine is lower")
    command = [sys.executable, "-c", _RAISE, *map(str, (soft, hard, ranks))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    assert said(64, 1000) == "1000 (1000, 1000)"
    assert said(1000, 1000) == "1000 (1000, 1000)"


def test_one_that_is_high_enough_is_left_alone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= WANTED:
        pytest.skip("the limit of this machine is not above what a worker wants")
    assert said(WANTED + 1, WANTED + 1).startswith(f"{WANTED + 1} ")
    assert said(64, WANTED + 1).startswith(f"{WANTED} ")


@pytest.mark.parametrize(("ranks", "least"), [(1, 192), (2, 256), (8, 640)])
def test_one_that_stays_too_low_is_an_error_that_says_what_is_needed(ranks: int, least: int) -> None:
    assert said(64, least, ranks).startswith(f"{least} ")
    told = said(64, least - 1, ranks)
    assert f"may open {least - 1} files" in told and f"needs {least} " in told and "ulimit -n" in told


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("-n 100", "may open 100 files, and a worker of 2 ranks needs 256"),
        ("-f 0", "the ranks cannot share 0.0 MiB of memory"),  # of the size of files
    ],
)
def test_a_worker_does_not_start_with_a_limit_that_is_too_low(limit: str, told: str) -> None:
    command = rollout("serve", str(ONES), "--tensor-parallel=2", "--device=cpu", "--bind=tcp://127.0.0.1:0")
    ended = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert told in ended.stderr and ended.stderr.count("\n") == 1
