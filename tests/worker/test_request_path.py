"""The page of the files that one prompt runs through: it is short, and a worker that is asked shows no other file."""

from pathlib import Path

import pytest

from scripts.check.request_path import files_of_a_prompt
from scripts.request_page import CORE, listed_files

ROOT = Path(__file__).parents[2]
#: Only less: each file of the path is one more to open for who follows a request.
MOST_FILES = 65
#: Lines of the core that the page says to read, and files of the engine beside it that a prompt enters. Only less.
MOST_LINES_OF_CORE, MOST_DOORS = 5_000, 14
#: Files that also run beside the requests, now and then.
BESIDE = ("rollout/metrics/", "rollout/service/", "rollout/ranks/")


def test_a_prompt_runs_through_few_files() -> None:
    listed = listed_files()
    assert 50 < len(listed) <= MOST_FILES and len(set(listed)) == len(listed)


def test_a_plain_row_can_be_followed_in_few_lines() -> None:
    listed = listed_files()
    assert set(CORE) <= set(listed) and len(set(CORE)) == len(CORE)
    assert sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in CORE) <= MOST_LINES_OF_CORE
    doors = [file for file in listed if file.startswith("rollout/engine/") and file not in CORE]
    assert len(doors) <= MOST_DOORS
    assert not [file for file in CORE if "/features/" in file]


@pytest.mark.nightly
def test_the_page_lists_the_files_of_a_prompt() -> None:
    _, served = files_of_a_prompt()
    other = set(served) ^ set(listed_files())
    assert not [file for file in other if not file.startswith(BESIDE)]
